// What the benchmarks need of the HIP runtime, without its headers: it is looked up at run time.
#pragma once

#include <dlfcn.h>

#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace hip {

class Library {
 public:
  static const Library& instance() {
    static const Library library;
    return library;
  }

  int (*set_device)(int);
  int (*allocate)(void**, std::size_t);
  int (*release)(void*);
  int (*copy)(void*, const void*, std::size_t, int);
  int (*fill)(void*, int, std::size_t);
  int (*synchronize)();
  int (*create_event)(void**);
  int (*destroy_event)(void*);
  int (*record_event)(void*, void*);
  int (*elapsed)(float*, void*, void*);
  int (*device_name)(char*, int, int);
  bool is_emulated;

 private:
  Library() {
    // jitfmha finds the runtime that the program uses.
    for (const char* const name : {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"})
      if (!handle_) handle_ = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    if (!handle_) throw std::runtime_error(std::string("no HIP runtime: ") + dlerror());
    find("hipSetDevice", set_device);
    find("hipMalloc", allocate);
    find("hipFree", release);
    find("hipMemcpy", copy);
    find("hipMemset", fill);
    find("hipDeviceSynchronize", synchronize);
    find("hipEventCreate", create_event);
    find("hipEventDestroy", destroy_event);
    find("hipEventRecord", record_event);
    find("hipEventElapsedTime", elapsed);
    find("hipDeviceGetName", device_name);
    is_emulated = dlsym(handle_, "jitfmha_emulator_last_error");
  }

  template <class Function>
  void find(const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(handle_, name));
    if (!function) throw std::runtime_error(std::string("the HIP runtime has no ") + name);
  }

  void* handle_ = nullptr;
};

inline void check(int status, const char* what) {
  if (status != 0)
    throw std::runtime_error(std::string(what) + " failed with HIP error " +
                             std::to_string(status));
}

inline void set_device(int index) { check(Library::instance().set_device(index), "hipSetDevice"); }

inline bool is_emulated() { return Library::instance().is_emulated; }

inline void synchronize() { check(Library::instance().synchronize(), "hipDeviceSynchronize"); }

inline std::string device_name(int index) {
  char name[256] = "";
  check(Library::instance().device_name(name, sizeof(name), index), "hipDeviceGetName");
  return name;
}

// A time on the device: when all work that was given to it before is done.
class Event {
 public:
  Event() { check(Library::instance().create_event(&handle_), "hipEventCreate"); }
  ~Event() { Library::instance().destroy_event(handle_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record() { check(Library::instance().record_event(handle_, nullptr), "hipEventRecord"); }
  // NaN where the device has no clock: the emulator, but for programs of `run-program`.
  double seconds_since(const Event& begin) const {
    constexpr int kNotSupported = 801;
    float milliseconds = 0;
    const int status = Library::instance().elapsed(&milliseconds, begin.handle_, handle_);
    if (status == kNotSupported) return std::nan("");
    check(status, "hipEventElapsedTime");
    return milliseconds * 1e-3;
  }

 private:
  void* handle_ = nullptr;
};

// Memory of the device. What nobody wrote holds NaNs.
class Memory {
 public:
  explicit Memory(std::size_t bytes) : bytes_(bytes) {
    constexpr int kNanBytes = 0xff;
    check(Library::instance().allocate(&pointer_, bytes ? bytes : 1), "hipMalloc");
    check(Library::instance().fill(pointer_, kNanBytes, bytes), "hipMemset");
  }
  template <class T>
  explicit Memory(const std::vector<T>& content) : Memory(content.size() * sizeof(T)) {
    put(content);
  }
  ~Memory() { Library::instance().release(pointer_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <class T>
  void put(const std::vector<T>& content) const {
    check(Library::instance().copy(pointer_, content.data(), bytes_, kToDevice), "hipMemcpy");
  }
  template <class T>
  std::vector<T> content() const {
    std::vector<T> values(bytes_ / sizeof(T));
    check(Library::instance().copy(values.data(), pointer_, bytes_, kToHost), "hipMemcpy");
    return values;
  }
  template <class T = void>
  T* get() const {
    return static_cast<T*>(pointer_);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  static constexpr int kToDevice = 1, kToHost = 2;

  void* pointer_ = nullptr;
  std::size_t bytes_;
};

}  // namespace hip
