// The part of the HIP runtime's C interface that launchers use, over three virtual devices.
// Signatures, enumerators and struct offsets are those of hip_runtime_api.h (ROCm 6).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "decode/code_object.h"
#include "execution/clock.h"
#include "execution/dispatch.h"

namespace {

using namespace emulator;

// ---- The node -----------------------------------------------------------------------------------

constexpr u32 kKiB = 1024;
constexpr int kDeviceCount = static_cast<int>(std::size(kDevices));

// With the features that all of them have.
std::string gcn_arch_name(const Device& device) {
  return std::string(device.architecture().name) + ":sramecc+:xnack-";
}

// Code, name, and what hipGetErrorString says.
#define EMULATOR_ERRORS(X)                                                           \
  X(0, Success, "no error")                                                          \
  X(1, InvalidValue, "invalid argument")                                             \
  X(2, OutOfMemory, "out of memory")                                                 \
  X(9, InvalidConfiguration, "invalid configuration argument")                       \
  X(101, InvalidDevice, "invalid device ordinal")                                    \
  X(200, InvalidImage, "device kernel image is invalid")                             \
  X(209, NoBinaryForGpu, "no kernel image is available for execution on the device") \
  X(301, FileNotFound, "file not found")                                             \
  X(400, InvalidHandle, "invalid resource handle")                                   \
  X(500, NotFound, "named symbol not found")                                         \
  X(701, LaunchOutOfResources, "out of resources")                                   \
  X(719, LaunchFailure, "unspecified launch failure")                                \
  X(801, NotSupported, "operation not supported")                                    \
  X(999, Unknown, "unknown error")

#define ENUMERATOR(CODE, NAME, TEXT) k##NAME = CODE,
enum Error : int { EMULATOR_ERRORS(ENUMERATOR) };
#undef ENUMERATOR

struct ErrorName {
  int code;
  std::string name;
  const char* text;
};
const ErrorName* find_error(int code) {
#define ROW(CODE, NAME, TEXT) {CODE, CODE == kSuccess ? "hipSuccess" : "hipError" #NAME, TEXT},
  static const ErrorName kErrors[] = {EMULATOR_ERRORS(ROW)};
#undef ROW
  for (const ErrorName& error : kErrors)
    if (error.code == code) return &error;
  return nullptr;
}

// ---- State --------------------------------------------------------------------------------------

struct Function {
  const CodeObject* code;
  const Kernel* kernel;
  int device;  // that its module was loaded for
};

struct Module {
  std::unique_ptr<CodeObject> code;
  int device;
  std::map<std::string, std::unique_ptr<Function>> functions;
};

// Handles are addresses of what stands in here, so that a stale one is an error and not a crash.
struct Runtime {
  std::mutex mutex;
  std::map<void*, std::shared_ptr<Module>> modules;
  std::map<void*, std::shared_ptr<Module>> functions;  // function -> its module
  std::map<u64, u64> blocks;                           // hipMalloc: address -> bytes
};
Runtime& runtime() {
  static Runtime instance;
  return instance;
}

thread_local int current_device = 0;
thread_local int last_error = kSuccess;    // until hipGetLastError takes it
thread_local int last_failure = kSuccess;  // that last_error_text is about
thread_local std::string last_error_text;
// How this thread's launches run, and what they may touch.
thread_local Options launch_options = default_options();
thread_local std::vector<Range> allowed_memory;
thread_local bool everything_allowed = true;
thread_local InterruptionCheck interruption_check = nullptr;

int failed(int code, const std::string& text) {
  last_error = last_failure = code;
  last_error_text = text;
  return code;
}

// Exceptions must not leave an extern "C" function.
template <class Body>
int guarded(Body&& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return failed(kOutOfMemory, "out of host memory");
  } catch (const std::exception& error) {
    return failed(kUnknown, error.what());
  }
}

int check_device(int device) {
  if (device >= 0 && device < kDeviceCount) return kSuccess;
  return failed(kInvalidDevice, "there is no device " + std::to_string(device));
}

// A result through a pointer of the caller.
int give(int* to, int value) {
  if (!to) return failed(kInvalidValue, "null pointer");
  *to = value;
  return kSuccess;
}

// ---- Launch -------------------------------------------------------------------------------------

// Hidden arguments are computed by the runtime; code objects name and place them in the metadata.
void fill_hidden_argument(const KernelArgument& argument, const Dispatch& dispatch, u8* kernarg) {
  u64 value = 0;  // for what this runtime does not offer: printf, hostcalls, heap, queues
  if (const int axis = argument.axis_of("hidden_block_count_"); axis >= 0)
    value = dispatch.workgroups[axis];
  else if (const int axis = argument.axis_of("hidden_group_size_"); axis >= 0)
    value = dispatch.workgroup_size[axis];
  else if (argument.value_kind == "hidden_grid_dims")
    value = dispatch.workgroups[2] > 1 ? 3 : dispatch.workgroups[1] > 1 ? 2 : 1;
  else if (argument.value_kind == "hidden_dynamic_lds_size")
    value = dispatch.lds_bytes - dispatch.kernel->descriptor.group_segment_bytes;
  else if (argument.value_kind == "hidden_private_base") value = kPrivateAperture >> 32;
  else if (argument.value_kind == "hidden_shared_base") value = kSharedAperture >> 32;
  std::memcpy(kernarg + argument.offset, &value, std::min<u32>(argument.bytes, sizeof(value)));
}

u32 argument_end(const Kernel& kernel) {
  u32 end = kernel.kernarg_bytes;
  for (const KernelArgument& argument : kernel.arguments)
    end = std::max(end, argument.offset + std::min(argument.bytes, 1u << 20));
  return end;
}

// The two forms in which HIP takes arguments.
struct LaunchArguments {
  void** pointers = nullptr;     // kernelParams: one pointer an explicit argument
  const void* buffer = nullptr;  // extra: the packed segment
  std::size_t buffer_bytes = 0;
};

bool parse_extra(void** extra, LaunchArguments& arguments) {
  const void* const kPointer = reinterpret_cast<void*>(1);
  const void* const kSize = reinterpret_cast<void*>(2);
  const void* const kEnd = reinterpret_cast<void*>(3);
  for (u32 i = 0; i < 8 && extra[i] != kEnd; i += 2) {
    if (extra[i] == kPointer) arguments.buffer = extra[i + 1];
    else if (extra[i] == kSize)
      arguments.buffer_bytes = *static_cast<const std::size_t*>(extra[i + 1]);
    else return false;
  }
  return arguments.buffer || !arguments.buffer_bytes;
}

int launch(void* function_handle, const u32 (&grid)[3], const u32 (&block)[3], u32 dynamic_lds,
           void** params, void** extra) {
  std::shared_ptr<Module> module;
  {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    const auto found = runtime().functions.find(function_handle);
    if (found == runtime().functions.end())
      return failed(kInvalidHandle, "the function handle is not valid, or its module was unloaded");
    module = found->second;
  }
  const Function& function = *static_cast<Function*>(function_handle);
  const Kernel& kernel = *function.kernel;
  const Device& device = kDevices[current_device];
  const auto refused = [&](int code, const std::string& why) {
    return failed(code, "kernel " + kernel.name + why);
  };
  if (function.code->arch != device.arch)
    return refused(kNoBinaryForGpu, std::string(" is for another chip than ") + device.name);
  if (function.device != current_device)
    return refused(kInvalidHandle,
                   formatted(" was loaded for device %d, and the current device is %d",
                             function.device, current_device));
  const u64 threads = u64{block[0]} * block[1] * block[2];
  for (u32 axis = 0; axis < 3; ++axis) {
    if (!grid[axis] || !block[axis])
      return refused(kInvalidConfiguration, ": a grid or block dimension is 0");
    // A dispatch packet counts threads, in 32 bits for each axis.
    if (u64{grid[axis]} * block[axis] > UINT32_MAX)
      return refused(kInvalidConfiguration,
                     formatted(": %u workgroups of %u threads along an axis are over 4294967295 "
                               "threads",
                               grid[axis], block[axis]));
  }
  if (threads > 1024 || threads > kernel.max_workgroup_size)
    return refused(kInvalidConfiguration, ": a workgroup of " + std::to_string(threads) +
                                              " threads; it was compiled for at most " +
                                              std::to_string(kernel.max_workgroup_size));
  const u64 lds = u64{kernel.descriptor.group_segment_bytes} + dynamic_lds;
  if (lds > device.architecture().lds_bytes)
    return refused(kLaunchOutOfResources, " needs " + std::to_string(lds) + " bytes of LDS; " +
                                              device.name + " has " +
                                              std::to_string(device.architecture().lds_bytes));

  LaunchArguments arguments;
  arguments.pointers = params;
  if (extra && !parse_extra(extra, arguments))
    return refused(kInvalidValue, ": `extra` is not a HIP_LAUNCH_PARAM list");
  if (arguments.pointers && kernel.arguments.empty() && kernel.kernarg_bytes)
    return refused(kInvalidValue,
                   " has no metadata about its arguments; pass them as one buffer in `extra`");

  Dispatch dispatch{};
  dispatch.code = function.code;
  dispatch.kernel = &kernel;
  dispatch.device = &device;
  for (u32 axis = 0; axis < 3; ++axis)
    dispatch.workgroups[axis] = grid[axis], dispatch.workgroup_size[axis] = block[axis];
  dispatch.lds_bytes = static_cast<u32>(lds);
  // A dynamic stack's size is unknown to the compiler; the runtime gives 16 KiB.
  dispatch.scratch_bytes_per_lane = std::min(kernel.descriptor.private_segment_bytes, 1u << 20) +
                                    (kernel.descriptor.has(kDynamicStack) ? 16 * kKiB : 0);

  const u64 preloaded_bytes =
      4 * (u64{kernel.descriptor.preload_offset_dwords()} + kernel.descriptor.preload_dwords());
  const u64 kernarg_bytes =
      std::max<u64>({argument_end(kernel), arguments.buffer_bytes,
                     kernel.descriptor.preload_dwords() ? preloaded_bytes : 0});
  std::vector<u64> kernarg(kernarg_bytes / 8 + 16);
  u8* const segment =
      reinterpret_cast<u8*>((reinterpret_cast<u64>(kernarg.data()) + 63) & ~u64{63});
  if (arguments.buffer) std::memcpy(segment, arguments.buffer, arguments.buffer_bytes);
  u32 explicit_index = 0;
  for (const KernelArgument& argument : kernel.arguments) {
    if (u64{argument.offset} + argument.bytes > kernarg_bytes)
      return refused(kInvalidImage, " has arguments outside of its segment");
    if (argument.is_hidden()) fill_hidden_argument(argument, dispatch, segment);
    else if (arguments.pointers)
      std::memcpy(segment + argument.offset, arguments.pointers[explicit_index++], argument.bytes);
  }
  dispatch.kernarg = segment;

  {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    for (const auto& [address, bytes] : runtime().blocks) dispatch.memory.allow(address, bytes);
  }
  dispatch.options = launch_options;
  dispatch.interruption_check = interruption_check;
  if (everything_allowed) dispatch.memory.allow_everything();
  for (const Range& range : allowed_memory)
    dispatch.memory.allow(range.begin, range.end - range.begin);
  dispatch.memory.allow(reinterpret_cast<u64>(segment), kernarg_bytes);
  dispatch.memory.allow(reinterpret_cast<u64>(dispatch.dispatch_packet),
                        sizeof(dispatch.dispatch_packet));
  dispatch.memory.allow(reinterpret_cast<u64>(function.code->image), function.code->image_bytes);
  dispatch.memory.finish();

  if (dispatch.options.time_slice == 0) dispatch.options.time_slice = default_options().time_slice;
  const LaunchFailure failure = run_dispatch(dispatch);
  return failure.failed ? failed(kLaunchFailure, failure.message) : kSuccess;
}

// ---- Device properties --------------------------------------------------------------------------

// A number of hipDeviceAttribute_t, where its value lies in hipDeviceProp_tR0600 (0: nowhere), and
// the value.
struct Attribute {
  int number;
  u32 offset;
  int value;
};

std::vector<Attribute> attributes_of(const Device& device) {
  constexpr int kThreads = 1024, kRegisters = 2 * 65536, kGrid = 65536;
  const int lds_bytes = static_cast<int>(device.architecture().lds_bytes);
  const int units = static_cast<int>(device.compute_units);
  return {
      {5, 348, static_cast<int>(device.clock_khz)},         // clock rate
      {8, 0, 1},                                            // concurrent kernels
      {10, 0, 0},                                           // cooperative launch
      {16, 0, 0},                                           // integrated
      {19, 616, 4 * 1024 * 1024},                           // size of L2
      {23, 360, 9},                                         // major number of the architecture
      {24, 0, 1},                                           // managed memory
      {26, 324, kThreads},                                  // of a block: x
      {27, 328, kThreads},                                  // y
      {28, 332, kThreads},                                  // z
      {29, 336, 0x7fffffff},                                // of a grid: x
      {30, 340, kGrid},                                     // y
      {31, 344, kGrid},                                     // z
      {55, 0, kThreads},                                    // of a block in any dimension
      {56, 320, kThreads},                                  // of a block
      {57, 624, 2048},                                      // threads of a compute unit
      {59, 612, 8192},                                      // bits of the memory's bus
      {61, 364, device.arch == kGfx950 ? 5 : 4},            // minor number of the architecture
      {63, 388, units},                                     // compute units
      {67, 584, static_cast<int>(&device - kDevices) + 1},  // PCI bus
      {68, 0, 0},                                           // PCI device
      {69, 0, 0},                                           // PCI domain
      {71, 304, kRegisters},                                // of a block
      {72, 0, kRegisters},                                  // of a compute unit
      {74, 0, lds_bytes},                                   // of a block
      {75, 0, lds_bytes},                                   // of a block that asks for it
      {76, 0, lds_bytes},                                   // of a compute unit
      {85, 604, 1},                                         // one address space
      {87, 308, 64},                                        // lanes of a wave
      {10002, 0, lds_bytes},                                // of a compute unit
      {10011, 0, 1},                                        // large BAR
      {10012, 1468, 1},                                     // revision
      {10015, 0, units},                                    // physical compute units
      {10017, 0, 100000},                                   // wall clock's rate in kHz
      {10018, 0, static_cast<int>(device.xcds)},            // XCDs
      {10019, 0, static_cast<int>(device.pci_chip_id)},     // PCI id of the chip
  };
}

int give_attribute(const Device& device, int number, int& value) {
  for (const Attribute& attribute : attributes_of(device))
    if (attribute.number == number) return value = attribute.value, kSuccess;
  return failed(kInvalidValue, "device attribute " + std::to_string(number) + " is not emulated");
}

// hipDeviceProp_tR0600.
void fill_properties(const Device& device, u8* properties) {
  constexpr u32 kBytes = 1472, kGlobalMemory = 288, kGcnArchName = 1160;
  constexpr u32 kSharedMemories[] = {296, 640, 1416};  // of a block, and of a compute unit twice
  const auto put = [&](u32 offset, auto value) {
    std::memcpy(properties + offset, &value, sizeof(value));
  };
  std::memset(properties, 0, kBytes);
  std::snprintf(reinterpret_cast<char*>(properties), 256, "%s", device.name);
  std::snprintf(reinterpret_cast<char*>(properties) + kGcnArchName, 256, "%s",
                gcn_arch_name(device).c_str());
  put(kGlobalMemory, device.memory_bytes);
  for (const u32 offset : kSharedMemories) put(offset, u64{device.architecture().lds_bytes});
  for (const Attribute& attribute : attributes_of(device))
    if (attribute.offset) put(attribute.offset, attribute.value);
}

int load_module(void** module_handle, const u8* image, u64 bytes) {
  try {
    auto module = std::make_shared<Module>();
    module->code = load_code_object(image, bytes);
    module->device = current_device;
    const Device& device = kDevices[current_device];
    if (module->code->arch != device.arch)
      return failed(kNoBinaryForGpu, std::string("the code object is for ") +
                                         architecture_of(module->code->arch).name + ", and " +
                                         device.name + " is a " + gcn_arch_name(device));
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    *module_handle = module.get();
    runtime().modules[module.get()] = std::move(module);
    return kSuccess;
  } catch (const CodeObjectError& error) {
    return failed(kInvalidImage, error.what());
  }
}

}  // namespace

// ---- Exports: HIP -------------------------------------------------------------------------------

EXPORT int hipInit(unsigned) { return kSuccess; }
EXPORT int hipDriverGetVersion(int* version) { return give(version, 60400000); }
EXPORT int hipRuntimeGetVersion(int* version) { return give(version, 60400000); }
EXPORT int hipGetDeviceCount(int* count) { return give(count, kDeviceCount); }
EXPORT int hipGetDevice(int* device) { return give(device, current_device); }
EXPORT int hipSetDevice(int device) {
  if (const int code = check_device(device)) return code;
  current_device = device;
  return kSuccess;
}
EXPORT int hipDeviceGetAttribute(int* value, int attribute, int device) {
  if (!value) return failed(kInvalidValue, "null pointer");
  if (const int code = check_device(device)) return code;
  return give_attribute(kDevices[device], attribute, *value);
}
EXPORT int hipGetDevicePropertiesR0600(void* properties, int device) {
  if (!properties) return failed(kInvalidValue, "null pointer");
  if (const int code = check_device(device)) return code;
  fill_properties(kDevices[device], static_cast<u8*>(properties));
  return kSuccess;
}
EXPORT int hipDeviceSynchronize() { return kSuccess; }
EXPORT int hipDeviceGet(int* handle, int device) {
  if (const int code = check_device(device)) return code;
  return give(handle, device);
}
EXPORT int hipDeviceGetName(char* name, int length, int device) {
  if (!name || length <= 0) return failed(kInvalidValue, "no room for the name");
  if (const int code = check_device(device)) return code;
  std::snprintf(name, static_cast<std::size_t>(length), "%s", kDevices[device].name);
  return kSuccess;
}

EXPORT int hipModuleLoadData(void** module, const void* image) {
  return guarded([&] {
    if (!module || !image) return failed(kInvalidValue, "null pointer");
    try {
      return load_module(module, static_cast<const u8*>(image),
                         code_object_bytes(static_cast<const u8*>(image)));
    } catch (const CodeObjectError& error) {
      return failed(kInvalidImage, error.what());
    }
  });
}
EXPORT int hipModuleLoadDataEx(void** module, const void* image, unsigned, int*, void**) {
  return hipModuleLoadData(module, image);
}
EXPORT int hipModuleLoad(void** module, const char* path) {
  return guarded([&] {
    if (!module || !path) return failed(kInvalidValue, "null pointer");
    std::FILE* const file = std::fopen(path, "rb");
    if (!file) return failed(kFileNotFound, "cannot open " + printable(path));
    std::vector<u8> content;
    u8 block[65536];
    for (std::size_t count; (count = std::fread(block, 1, sizeof(block), file)) > 0;)
      content.insert(content.end(), block, block + count);
    std::fclose(file);
    return load_module(module, content.data(), content.size());
  });
}
EXPORT int hipModuleUnload(void* module) {
  return guarded([&] {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    const auto found = runtime().modules.find(module);
    if (found == runtime().modules.end())
      return failed(kInvalidHandle, "the module handle is not valid");
    for (const auto& [name, function] : found->second->functions)
      runtime().functions.erase(function.get());
    runtime().modules.erase(found);
    return int{kSuccess};
  });
}
EXPORT int hipModuleGetFunction(void** function, void* module, const char* name) {
  return guarded([&] {
    if (!function || !name) return failed(kInvalidValue, "null pointer");
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    const auto found = runtime().modules.find(module);
    if (found == runtime().modules.end())
      return failed(kInvalidHandle, "the module handle is not valid");
    const Kernel* const kernel = found->second->code->find_kernel(name);
    if (!kernel) {
      std::string text = "there is no kernel " + printable(name) + "; the code object has:";
      for (const auto& known : found->second->code->kernels) text += " " + known->name;
      return failed(kNotFound, text);
    }
    auto& slot = found->second->functions[name];
    if (!slot)
      slot = std::make_unique<Function>(
          Function{found->second->code.get(), kernel, found->second->device});
    runtime().functions[slot.get()] = found->second;
    *function = slot.get();
    return int{kSuccess};
  });
}
EXPORT int hipFuncGetAttribute(int* value, int attribute, void* function) {
  return guarded([&] {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    if (!value) return failed(kInvalidValue, "null pointer");
    if (!runtime().functions.count(function))
      return failed(kInvalidHandle, "the function handle is not valid");
    const Kernel& kernel = *static_cast<Function*>(function)->kernel;
    const KernelDescriptor& descriptor = kernel.descriptor;
    const u32 lds_bytes = kDevices[current_device].architecture().lds_bytes;
    // By hipFuncAttribute_t; sizes in bytes.
    const std::map<int, u32> known = {
        {0, kernel.max_workgroup_size},
        {1, descriptor.group_segment_bytes},
        {2, 0},  // constants
        {3, descriptor.private_segment_bytes},
        {4, descriptor.vgprs()},
        {8, lds_bytes - descriptor.group_segment_bytes},
    };
    const auto found = known.find(attribute);
    if (found == known.end())
      return failed(kInvalidValue,
                    "function attribute " + std::to_string(attribute) + " is not emulated");
    *value = static_cast<int>(found->second);
    return int{kSuccess};
  });
}
EXPORT int hipFuncSetAttribute(const void*, int, int) { return kSuccess; }
EXPORT int hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                 unsigned block_x, unsigned block_y, unsigned block_z,
                                 unsigned dynamic_lds, void*, void** params, void** extra) {
  return guarded([&] {
    return launch(function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, dynamic_lds,
                  params, extra);
  });
}

EXPORT const char* hipGetErrorName(int code) {
  const ErrorName* const known = find_error(code);
  return known ? known->name.c_str() : "hipErrorUnknown";
}
// With the details of this thread's last failure where it had this code: what launchers show of an
// error is this text.
EXPORT const char* hipGetErrorString(int code) {
  thread_local std::string text;
  const ErrorName* const known = find_error(code);
  text = known ? known->text : "unknown error";
  if (code != kSuccess && code == last_failure) text += ": " + last_error_text;
  return text.c_str();
}
EXPORT int hipGetLastError() { return std::exchange(last_error, int{kSuccess}); }
EXPORT int hipPeekAtLastError() { return last_error; }

// Launches are synchronous: a stream is a name.
EXPORT int hipStreamCreate(void** stream) {
  if (!stream) return failed(kInvalidValue, "null pointer");
  *stream = new char;
  return kSuccess;
}
EXPORT int hipStreamCreateWithFlags(void** stream, unsigned) { return hipStreamCreate(stream); }
EXPORT int hipStreamDestroy(void* stream) { return delete static_cast<char*>(stream), kSuccess; }
EXPORT int hipStreamSynchronize(void*) { return kSuccess; }
EXPORT int hipStreamQuery(void*) { return kSuccess; }
EXPORT int hipStreamIsCapturing(void*, int* status) { return give(status, 0); }

// An event is a time of the model's clock, and NaN before it is recorded.
EXPORT int hipEventCreate(void** event) {
  return guarded([&] {
    if (!event) return failed(kInvalidValue, "null pointer");
    *event = new double(std::nan(""));
    return int{kSuccess};
  });
}
EXPORT int hipEventCreateWithFlags(void** event, unsigned) { return hipEventCreate(event); }
EXPORT int hipEventDestroy(void* event) { return delete static_cast<double*>(event), kSuccess; }
EXPORT int hipEventRecord(void* event, void*) {
  if (!event) return failed(kInvalidHandle, "the event handle is not valid");
  *static_cast<double*>(event) = clock_now();
  return kSuccess;
}
EXPORT int hipEventSynchronize(void*) { return kSuccess; }
EXPORT int hipEventQuery(void*) { return kSuccess; }
EXPORT int hipEventElapsedTime(float* milliseconds, void* begin, void* end) {
  if (!milliseconds) return failed(kInvalidValue, "null pointer");
  if (!begin || !end) return failed(kInvalidHandle, "the event handle is not valid");
  const double seconds = *static_cast<double*>(end) - *static_cast<double*>(begin);
  if (std::isnan(seconds)) return failed(kInvalidHandle, "the event was not recorded");
  if (!clock_runs())
    return failed(kNotSupported,
                  "launches have times where the cost model says them: python -m jitfmha "
                  "run-program PROGRAM");
  *milliseconds = static_cast<float>(seconds * 1e3);
  return kSuccess;
}

EXPORT int hipMalloc(void** pointer, std::size_t bytes) {
  return guarded([&] {
    if (!pointer) return failed(kInvalidValue, "null pointer");
    *pointer = nullptr;
    if (!bytes) return int{kSuccess};
    *pointer = std::aligned_alloc(256, (bytes + 255) & ~std::size_t{255});
    if (!*pointer) return failed(kOutOfMemory, "hipMalloc of " + std::to_string(bytes) + " bytes");
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    runtime().blocks[reinterpret_cast<u64>(*pointer)] = bytes;
    return int{kSuccess};
  });
}
EXPORT int hipFree(void* pointer) {
  return guarded([&] {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    if (pointer && !runtime().blocks.erase(reinterpret_cast<u64>(pointer)))
      return failed(kInvalidValue, "hipFree of an address that hipMalloc did not give");
    std::free(pointer);
    return int{kSuccess};
  });
}
EXPORT int hipMemcpy(void* to, const void* from, std::size_t bytes, int) {
  return std::memmove(to, from, bytes), kSuccess;
}
EXPORT int hipMemcpyAsync(void* to, const void* from, std::size_t bytes, int kind, void*) {
  return hipMemcpy(to, from, bytes, kind);
}
EXPORT int hipMemset(void* to, int value, std::size_t bytes) {
  return std::memset(to, value, bytes), kSuccess;
}
EXPORT int hipMemsetAsync(void* to, int value, std::size_t bytes, void*) {
  return hipMemset(to, value, bytes);
}
EXPORT int hipMemset2DAsync(void* to, std::size_t pitch, int value, std::size_t width,
                            std::size_t height, void*) {
  if (width > pitch) return failed(kInvalidValue, "hipMemset2DAsync of rows that overlap");
  for (std::size_t row = 0; row < height; ++row)
    std::memset(static_cast<char*>(to) + row * pitch, value, width);
  return kSuccess;
}

// ---- Exports: the emulator's own ----------------------------------------------------------------

// Text of this thread's last failure, with kernel, address, instruction, wave and lane where they
// apply.
EXPORT const char* jitfmha_emulator_last_error() { return last_error_text.c_str(); }
// As hipModuleLoadData, of a code object whose size is known, so that reading never leaves it.
EXPORT int jitfmha_emulator_module_load(void** module, const void* image, std::size_t bytes) {
  return guarded([&] {
    if (!module || !image) return failed(kInvalidValue, "null pointer");
    return load_module(module, static_cast<const u8*>(image), bytes);
  });
}
// For this thread's later launches; gives the options until now where the caller wants them.
EXPORT void jitfmha_emulator_set_options(const Options* options, Options* until_now) {
  if (until_now) *until_now = launch_options;
  if (options) launch_options = *options;
}
// What this thread's later launches ask whether to go on; null, the initial state: nobody. Returns
// whom they asked until now.
EXPORT InterruptionCheck jitfmha_emulator_set_interruption_check(InterruptionCheck check) {
  return std::exchange(interruption_check, check);
}
// What this thread's later launches may touch. count < 0: everything, which is the initial state.
EXPORT void jitfmha_emulator_set_allowed_memory(const Range* ranges, i64 count) {
  everything_allowed = count < 0;
  allowed_memory.assign(ranges, ranges + (count < 0 ? 0 : count));
}
