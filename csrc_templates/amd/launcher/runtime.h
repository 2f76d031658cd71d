// What all launchers have in common: errors, the HIP runtime that they are given, and how kernels
// are loaded and launched through it. It includes nothing of ROCm or torch, and of C++'s headers
// only those that compile quickly.
#pragma once

#include <dlfcn.h>
#include <pthread.h>

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

// ---- Errors -------------------------------------------------------------------------------------

constexpr int kSuccess = 0;
constexpr int kUnusable = -1;  // a failure of ours; HIP's numbers are positive

thread_local char last_error[4096];

inline void write_error(const char* form, va_list values) {
  std::vsnprintf(last_error, sizeof(last_error), form, values);
}

__attribute__((format(printf, 2, 3))) inline int failed(int code, const char* form, ...) {
  va_list values;
  va_start(values, form);
  write_error(form, values);
  va_end(values);
  return code;
}

// ---- The HIP runtime ----------------------------------------------------------------------------

class Lock {
 public:
  explicit Lock(pthread_mutex_t& mutex) : mutex_(mutex) { pthread_mutex_lock(&mutex_); }
  ~Lock() { pthread_mutex_unlock(&mutex_); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  pthread_mutex_t& mutex_;
};

// A loaded kernel. It stays where it is as long as the process lives, and so does its image.
struct Kernel {
  int device;
  unsigned threads;                            // of a workgroup
  std::uint32_t xcds_of_chip;                  // a partition of which the device may be
  const char *file, *symbol, *combine_symbol;  // the last is empty where there is none
  const void* image;
  std::size_t image_bytes;

  struct Runtime* runtime;
  void *function, *combine;
  std::uint32_t xcds;  // that the device has
  const Kernel* next;  // of those that the runtime loaded
};

// One HIP library, or what stands in for it, and all that was loaded through it. It lives as long
// as the process: unloading at exit would race with the library's own end.
struct Runtime {
  int (*get_device)(int*);
  int (*get_attribute)(int*, int, int);
  int (*set_device)(int);
  int (*module_load_data)(void**, const void*);
  // The emulator's own, which is told where an image ends; null in HIP, which reads on to wherever
  // the image says.
  int (*module_load_bytes)(void**, const void*, std::size_t);
  int (*module_unload)(void*);
  int (*module_get_function)(void**, void*, const char*);
  int (*module_launch_kernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                              unsigned, void*, void**, void**);
  const char* (*get_error_name)(int);
  const char* (*get_error_string)(int);
  int (*get_last_error)();

  pthread_mutex_t loading;
  const Kernel* kernels;
  const char* path;
  Runtime* next;  // of those that were opened

  // The text says what was called, and on what.
  __attribute__((format(printf, 3, 4))) int failed_call(int code, const char* form, ...) const {
    forget_last_error();
    va_list values;
    va_start(values, form);
    write_error(form, values);
    va_end(values);
    const char* const name = get_error_name(code);
    const char* const text = get_error_string(code);
    const std::size_t end = std::strlen(last_error);
    std::snprintf(last_error + end, sizeof(last_error) - end, " failed with %s (%d): %s",
                  name ? name : "an unknown error", code, text ? text : "");
    return code;
  }

  // HIP keeps an error until somebody asks for it: torch would take ours for one of its own.
  void forget_last_error() const { get_last_error(); }
};

// Makes a device the thread's current one, and the previous one again at the end.
class OnDevice {
 public:
  OnDevice(const Runtime& runtime, int device) : runtime_(runtime), device_(device) {
    status_ = runtime_.get_device(&previous_);
    if (status_ == kSuccess && previous_ != device_) status_ = runtime_.set_device(device_);
  }
  ~OnDevice() {
    if (status_ != kSuccess || previous_ == device_) return;
    if (runtime_.set_device(previous_) != kSuccess) runtime_.forget_last_error();
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  int status() const { return status_; }

 private:
  const Runtime& runtime_;
  int device_;
  int previous_ = 0;
  int status_;
};

template <class Function>
bool bind(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (!function) failed(kUnusable, "the HIP runtime has no function %s", name);
  return function;
}

inline Runtime* open_runtime(const char* path) {
  // It is in the process already, as a rule; its own dependencies must then not be looked up again.
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (!library) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* const reason = dlerror();
    failed(kUnusable, "cannot load the HIP runtime %s: %s", path,
           reason ? reason : "unknown reason");
    return nullptr;
  }
  Runtime runtime = {};
  const bool is_complete = bind(library, "hipGetDevice", runtime.get_device) &&
                           bind(library, "hipDeviceGetAttribute", runtime.get_attribute) &&
                           bind(library, "hipSetDevice", runtime.set_device) &&
                           bind(library, "hipModuleLoadData", runtime.module_load_data) &&
                           bind(library, "hipModuleUnload", runtime.module_unload) &&
                           bind(library, "hipModuleGetFunction", runtime.module_get_function) &&
                           bind(library, "hipModuleLaunchKernel", runtime.module_launch_kernel) &&
                           bind(library, "hipGetErrorName", runtime.get_error_name) &&
                           bind(library, "hipGetErrorString", runtime.get_error_string) &&
                           bind(library, "hipGetLastError", runtime.get_last_error);
  if (!is_complete) return nullptr;
  runtime.module_load_bytes = reinterpret_cast<decltype(runtime.module_load_bytes)>(
      dlsym(library, "jitfmha_emulator_module_load"));
  runtime.path = strdup(path);
  pthread_mutex_init(&runtime.loading, nullptr);
  return new Runtime(runtime);
}

// ---- Loading ------------------------------------------------------------------------------------

// How many XCDs a device has: a partition has fewer than the chip. Runtimes before ROCm 7.0 do not
// know, or take the number for that of another attribute.
inline std::uint32_t xcds_of(const Runtime& runtime, int device, std::uint32_t xcds_of_chip) {
  constexpr int kNumberOfXccs = 10018;
  int answer = 0;
  if (runtime.get_attribute(&answer, kNumberOfXccs, device) != kSuccess)
    runtime.forget_last_error();
  else if (0 < answer && static_cast<std::uint32_t>(answer) <= xcds_of_chip)
    return static_cast<std::uint32_t>(answer);
  return xcds_of_chip;
}

// Trees with the same manifest have other files, so the image counts too.
inline bool is_same(const Kernel& one, const Kernel& other) {
  return one.device == other.device && one.threads == other.threads &&
         one.xcds_of_chip == other.xcds_of_chip && one.image_bytes == other.image_bytes &&
         std::strcmp(one.symbol, other.symbol) == 0 &&
         std::memcmp(one.image, other.image, one.image_bytes) == 0;
}

inline const Kernel* find_kernel(const Runtime& runtime, const Kernel& wanted) {
  const Kernel* kernel = runtime.kernels;
  while (kernel && !is_same(*kernel, wanted)) kernel = kernel->next;
  return kernel;
}

inline int find_function(const Kernel& kernel, void* module, const char* symbol, void** function) {
  const Runtime& runtime = *kernel.runtime;
  const int status = runtime.module_get_function(function, module, symbol);
  if (status == kSuccess) return kSuccess;
  // The next attempt loads it again.
  if (runtime.module_unload(module) != kSuccess) runtime.forget_last_error();
  return runtime.failed_call(status, "hipModuleGetFunction of %s in %s on device %d", symbol,
                             kernel.file, kernel.device);
}

inline int load_kernel(Kernel& kernel) {
  const Runtime& runtime = *kernel.runtime;
  const OnDevice on_device(runtime, kernel.device);
  if (on_device.status() != kSuccess)
    return runtime.failed_call(on_device.status(), "hipSetDevice for %s on device %d", kernel.file,
                               kernel.device);
  void* module = nullptr;
  const int status = runtime.module_load_bytes
                         ? runtime.module_load_bytes(&module, kernel.image, kernel.image_bytes)
                         : runtime.module_load_data(&module, kernel.image);
  if (status != kSuccess)
    return runtime.failed_call(status, "hipModuleLoadData of %s on device %d", kernel.file,
                               kernel.device);
  if (const int missing = find_function(kernel, module, kernel.symbol, &kernel.function))
    return missing;
  if (*kernel.combine_symbol)
    if (const int missing = find_function(kernel, module, kernel.combine_symbol, &kernel.combine))
      return missing;
  kernel.xcds = xcds_of(runtime, kernel.device, kernel.xcds_of_chip);
  return kSuccess;
}

// ---- Launching ----------------------------------------------------------------------------------

struct Grid {
  std::int64_t x, y, z;
};

// Of the kernel itself, or of the one that combines what its splits leave.
inline int launch(const Kernel& kernel, bool is_combine, const Grid& grid, void* stream,
                  void* arguments, std::size_t bytes) {
  const Runtime& runtime = *kernel.runtime;
  // HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE and _END.
  void* extra[] = {reinterpret_cast<void*>(1), arguments, reinterpret_cast<void*>(2), &bytes,
                   reinterpret_cast<void*>(3)};
  const OnDevice on_device(runtime, kernel.device);
  if (on_device.status() != kSuccess)
    return runtime.failed_call(on_device.status(), "hipSetDevice %d", kernel.device);
  const int status = runtime.module_launch_kernel(
      is_combine ? kernel.combine : kernel.function, static_cast<unsigned>(grid.x),
      static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z), kernel.threads, 1, 1, 0, stream,
      nullptr, extra);
  if (status != kSuccess)
    return runtime.failed_call(status, "hipModuleLaunchKernel of %s on device %d",
                               is_combine ? kernel.combine_symbol : kernel.symbol, kernel.device);
  return kSuccess;
}

template <class Block>
int launch(const Kernel& kernel, const Grid& grid, void* stream, Block& arguments) {
  return launch(kernel, false, grid, stream, &arguments, sizeof(arguments));
}

}  // namespace

// ---- Exports ------------------------------------------------------------------------------------

// Why this thread's last call failed.
EXPORT const char* jitfmha_last_error() { return last_error; }

// The runtime in the library at `path`; null where it cannot be used.
EXPORT void* jitfmha_open_runtime(const char* path) {
  static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
  static Runtime* opened = nullptr;
  const Lock lock(opening);
  for (Runtime* each = opened; each; each = each->next)
    if (std::strcmp(each->path, path) == 0) return each;
  Runtime* const runtime = open_runtime(path);
  if (!runtime) return nullptr;
  runtime->next = opened;
  return opened = runtime;
}

// Loads a kernel on a device, unless that has been done. `combine_symbol` is empty where there is
// no such kernel; `file` is for messages.
EXPORT int jitfmha_load(void* runtime_handle, int device, unsigned threads,
                        std::uint32_t xcds_of_chip, const char* file, const char* symbol,
                        const char* combine_symbol, const void* image, std::size_t image_bytes,
                        const void** loaded) {
  Runtime& runtime = *static_cast<Runtime*>(runtime_handle);
  const Lock lock(runtime.loading);
  Kernel kernel = {device,      threads,  xcds_of_chip, file,    symbol, combine_symbol, image,
                   image_bytes, &runtime, nullptr,      nullptr, 0,      runtime.kernels};
  const Kernel* found = find_kernel(runtime, kernel);
  if (!found) {
    // HIP may read an image as long as its kernels are in use.
    char* const copy = new char[image_bytes];
    std::memcpy(copy, image, image_bytes);
    kernel.image = copy;
    if (const int status = load_kernel(kernel)) {
      delete[] copy;
      return status;
    }
    kernel.file = strdup(file);
    kernel.symbol = strdup(symbol);
    kernel.combine_symbol = strdup(combine_symbol);
    runtime.kernels = found = new Kernel(kernel);
  }
  *loaded = found;
  return kSuccess;
}
