// A HIP runtime without a GPU behind it: it records what a launcher asks of it and runs nothing.
// Tests read the records; the benchmark times a launcher with nothing else in the way.
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kInvalidDevice = 101, kInvalidHandle = 400;
constexpr int kDevices = 4;
constexpr std::size_t kKernargBytes = 656, kSymbolBytes = 128;

// `Launch` of recording_runtime.py.
struct Launch {
  std::int32_t device;
  std::uint32_t grid[3];
  std::uint32_t block[3];
  std::uint32_t dynamic_lds;
  std::uint64_t stream;
  std::uint64_t kernarg_bytes;
  std::uint8_t kernarg[kKernargBytes];
  char symbol[kSymbolBytes];
};

struct Module {
  int device;
};

struct Function {
  int device;
  std::string symbol;
};

struct Recorder {
  std::mutex mutex;
  std::vector<Launch> launches;
  bool keeps_launches = true;
  std::uint64_t launch_count = 0;
  std::vector<int> loads;               // the device of each hipModuleLoadData
  std::map<std::string, int> failures;  // function -> the code that it returns
  std::map<std::pair<int, int>, int> attributes;
};
Recorder& recorder() {
  static Recorder& instance = *new Recorder;
  return instance;
}

thread_local int current_device = 0;

int failure_of(const char* function) {
  const auto found = recorder().failures.find(function);
  return found == recorder().failures.end() ? kSuccess : found->second;
}

}  // namespace

// ---- HIP ----------------------------------------------------------------------------------------

EXPORT int hipGetDevice(int* device) {
  *device = current_device;
  return kSuccess;
}

EXPORT int hipSetDevice(int device) {
  if (device < 0 || device >= kDevices) return kInvalidDevice;
  current_device = device;
  return kSuccess;
}

EXPORT int hipDeviceGetAttribute(int* value, int attribute, int device) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  const auto found = recorder().attributes.find({device, attribute});
  if (found == recorder().attributes.end()) return kInvalidValue;
  *value = found->second;
  return kSuccess;
}

EXPORT int hipModuleLoadData(void** module, const void* image) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  recorder().loads.push_back(current_device);
  if (const int failure = failure_of("hipModuleLoadData")) return failure;
  if (std::memcmp(image,
                  "\x7f"
                  "ELF",
                  4) != 0)
    return kInvalidValue;
  *module = new Module{current_device};
  return kSuccess;
}

EXPORT int hipModuleGetFunction(void** function, void* module, const char* symbol) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  if (const int failure = failure_of("hipModuleGetFunction")) return failure;
  *function = new Function{static_cast<Module*>(module)->device, symbol};
  return kSuccess;
}

EXPORT int hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                 unsigned block_x, unsigned block_y, unsigned block_z,
                                 unsigned dynamic_lds, void* stream, void** params, void** extra) {
  const Function& kernel = *static_cast<Function*>(function);
  if (kernel.device != current_device) return kInvalidHandle;
  const bool is_one_buffer = !params && extra[0] == reinterpret_cast<void*>(1) &&
                             extra[2] == reinterpret_cast<void*>(2) &&
                             extra[4] == reinterpret_cast<void*>(3);
  if (!is_one_buffer) return kInvalidValue;
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  if (const int failure = failure_of("hipModuleLaunchKernel")) return failure;
  ++recorder().launch_count;
  if (!recorder().keeps_launches) return kSuccess;
  Launch launch{};
  launch.device = current_device;
  const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
  std::memcpy(launch.grid, grid, sizeof(grid));
  std::memcpy(launch.block, block, sizeof(block));
  launch.dynamic_lds = dynamic_lds;
  launch.stream = reinterpret_cast<std::uint64_t>(stream);
  launch.kernarg_bytes = *static_cast<std::size_t*>(extra[3]);
  if (launch.kernarg_bytes <= kKernargBytes)
    std::memcpy(launch.kernarg, extra[1], launch.kernarg_bytes);
  std::strncpy(launch.symbol, kernel.symbol.c_str(), kSymbolBytes - 1);
  recorder().launches.push_back(launch);
  return kSuccess;
}

EXPORT const char* hipGetErrorName(int code) {
  return code == kInvalidDevice ? "hipErrorInvalidDevice" : "hipErrorOfTheRecorder";
}

EXPORT const char* hipGetErrorString(int code) {
  return code == kInvalidDevice ? "invalid device ordinal" : "the recorder was told to fail";
}

// ---- The recorder's own -------------------------------------------------------------------------

EXPORT void recorder_reset(bool keeps_launches) {
  Recorder& r = recorder();
  const std::lock_guard<std::mutex> lock(r.mutex);
  r.launches.clear();
  r.loads.clear();
  r.failures.clear();
  r.attributes.clear();
  r.launch_count = 0;
  r.keeps_launches = keeps_launches;
}

EXPORT void recorder_fail(const char* function, int code) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  recorder().failures[function] = code;
}

EXPORT void recorder_set_attribute(int device, int attribute, int value) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  recorder().attributes[{device, attribute}] = value;
}

EXPORT std::uint64_t recorder_launch_count() { return recorder().launch_count; }

// Copies up to `room` launches, and returns how many there are.
EXPORT int recorder_launches(Launch* to, int room) {
  Recorder& r = recorder();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const int count = static_cast<int>(r.launches.size());
  for (int i = 0; i < count && i < room; ++i) to[i] = r.launches[static_cast<std::size_t>(i)];
  return count;
}

// The same for the devices that modules were loaded on.
EXPORT int recorder_loads(int* to, int room) {
  Recorder& r = recorder();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const int count = static_cast<int>(r.loads.size());
  for (int i = 0; i < count && i < room; ++i) to[i] = r.loads[static_cast<std::size_t>(i)];
  return count;
}
