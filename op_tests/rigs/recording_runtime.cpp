// A HIP runtime without a GPU behind it: it records what a launcher asks of it and runs nothing.
// Tests read the records; the benchmark times a launcher with nothing else in the way.
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kInvalidDevice = 101, kInvalidHandle = 400;
constexpr int kDevices = 4;
constexpr std::size_t kKernargBytes = 704, kSymbolBytes = 128;

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

// What a launch takes by a clock that a test makes up.
using Clock = double (*)(const Launch*);

// What a function returns once it has worked so many times more.
struct Failure {
  int code;
  int successes_before;
};

struct Recorder {
  std::mutex mutex;
  std::vector<Launch> launches;
  bool keeps_launches = true;
  std::uint64_t launch_count = 0;
  std::vector<int> loads;  // the device of each hipModuleLoadData
  std::uint64_t unload_count = 0;
  std::map<std::string, Failure> failures;  // by function
  std::map<std::pair<int, int>, int> attributes;
  std::map<int, std::string> bus_ids;  // by device
  Clock clock = nullptr;
  double milliseconds = 0;  // that all launches have taken by the clock
};
Recorder& recorder() {
  static Recorder& instance = *new Recorder;
  return instance;
}

thread_local int current_device = 0;
thread_local int last_error = kSuccess;  // until hipGetLastError takes it

int failed(int code) { return last_error = code; }

// Whether a function was told to fail, which counts as a call of it. The caller has the lock.
int failure_of(const char* function) {
  const auto found = recorder().failures.find(function);
  if (found == recorder().failures.end()) return kSuccess;
  if (found->second.successes_before-- > 0) return kSuccess;
  found->second.successes_before = 0;
  return found->second.code;
}

}  // namespace

// ---- HIP ----------------------------------------------------------------------------------------

EXPORT int hipGetDevice(int* device) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  if (const int failure = failure_of("hipGetDevice")) return failed(failure);
  *device = current_device;
  return kSuccess;
}

EXPORT int hipSetDevice(int device) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  if (const int failure = failure_of("hipSetDevice")) return failed(failure);
  if (device < 0 || device >= kDevices) return failed(kInvalidDevice);
  current_device = device;
  return kSuccess;
}

EXPORT int hipDeviceGetAttribute(int* value, int attribute, int device) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  const auto found = recorder().attributes.find({device, attribute});
  if (found == recorder().attributes.end()) return failed(kInvalidValue);
  *value = found->second;
  return kSuccess;
}

EXPORT int hipDeviceGetPCIBusId(char* text, int length, int device) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  const auto found = recorder().bus_ids.find(device);
  if (found == recorder().bus_ids.end()) return failed(kInvalidDevice);
  std::strncpy(text, found->second.c_str(), static_cast<std::size_t>(length));
  return kSuccess;
}

// An event is the time at which it was recorded.
EXPORT int hipEventCreate(void** event) {
  *event = new double{};
  return kSuccess;
}

EXPORT int hipEventDestroy(void* event) {
  delete static_cast<double*>(event);
  return kSuccess;
}

EXPORT int hipEventRecord(void* event, void*) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  *static_cast<double*>(event) = recorder().milliseconds;
  return kSuccess;
}

EXPORT int hipEventSynchronize(void*) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  if (const int failure = failure_of("hipEventSynchronize")) return failed(failure);
  return kSuccess;
}

EXPORT int hipEventElapsedTime(float* milliseconds, void* begin, void* end) {
  *milliseconds = static_cast<float>(*static_cast<double*>(end) - *static_cast<double*>(begin));
  return kSuccess;
}

// It takes a while, as HIP's does: other threads come meanwhile.
EXPORT int hipModuleLoadData(void** module, const void* image) {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  recorder().loads.push_back(current_device);
  if (const int failure = failure_of("hipModuleLoadData")) return failed(failure);
  if (std::memcmp(image,
                  "\x7f"
                  "ELF",
                  4) != 0)
    return failed(kInvalidValue);
  *module = new Module{current_device};
  return kSuccess;
}

EXPORT int hipModuleUnload(void* module) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  if (const int failure = failure_of("hipModuleUnload")) return failed(failure);
  delete static_cast<Module*>(module);
  ++recorder().unload_count;
  return kSuccess;
}

EXPORT int hipModuleGetFunction(void** function, void* module, const char* symbol) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  if (const int failure = failure_of("hipModuleGetFunction")) return failed(failure);
  *function = new Function{static_cast<Module*>(module)->device, symbol};
  return kSuccess;
}

EXPORT int hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                 unsigned block_x, unsigned block_y, unsigned block_z,
                                 unsigned dynamic_lds, void* stream, void** params, void** extra) {
  const Function& kernel = *static_cast<Function*>(function);
  if (kernel.device != current_device) return failed(kInvalidHandle);
  const bool is_one_buffer = !params && extra[0] == reinterpret_cast<void*>(1) &&
                             extra[2] == reinterpret_cast<void*>(2) &&
                             extra[4] == reinterpret_cast<void*>(3);
  if (!is_one_buffer) return failed(kInvalidValue);
  Clock clock;
  {
    const std::lock_guard<std::mutex> lock(recorder().mutex);
    if (const int failure = failure_of("hipModuleLaunchKernel")) return failed(failure);
    ++recorder().launch_count;
    clock = recorder().clock;
    if (!recorder().keeps_launches && !clock) return kSuccess;
  }
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
  // A test's function waits for Python, whose threads may wait for the lock.
  const double milliseconds = clock ? clock(&launch) : 0;
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  recorder().milliseconds += milliseconds;
  if (recorder().keeps_launches) recorder().launches.push_back(launch);
  return kSuccess;
}

EXPORT int hipGetLastError() { return std::exchange(last_error, int{kSuccess}); }

EXPORT int hipPeekAtLastError() { return last_error; }

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
  r.bus_ids.clear();
  r.clock = nullptr;
  r.launch_count = r.unload_count = 0;
  r.keeps_launches = keeps_launches;
  last_error = kSuccess;
}

EXPORT void recorder_fail(const char* function, int code, int successes_before) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  recorder().failures[function] = {code, successes_before};
}

EXPORT void recorder_set_attribute(int device, int attribute, int value) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  recorder().attributes[{device, attribute}] = value;
}

EXPORT void recorder_set_bus_id(int device, const char* text) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  recorder().bus_ids[device] = text;
}

EXPORT void recorder_set_clock(Clock clock) { recorder().clock = clock; }

EXPORT std::uint64_t recorder_unload_count() { return recorder().unload_count; }
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
