// A C library in which files, locks, clocks and owners fail on demand, for LD_PRELOAD.
//
// It stands in front of the real one and does nothing until a process has one of these in its
// environment:
//
//   FAULTY_BELOW     folders, one per line: file operations below them are counted, and may fail
//   FAULTY_SPARED    folders below those in which nothing counts or fails
//   FAULTY_COUNTER   a file of 4096 bytes that all processes share: the count (uint64) and, from
//                    byte 64 on, the first operation that was made to fail
//   FAULTY_AT        which operation fails (the first is 1)
//   FAULTY_STAYS     "1": so do all later ones, as on a disk that stays full
//   FAULTY_ERRNO     with which error
//   FAULTY_ONLY      which operations count, such as "close,fsync"; all by default
//   FAULTY_LOCKS     the error of every flock
//   FAULTY_CLOCK     seconds by which the time of day is wrong; of several ("5,-5") each reading
//                    takes the next
//   FAULTY_FOREIGN   lines "device inode user": who appears to own which files

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdint>
#include <string>

// The functions get names of their own here and the names of the C library for the linker, because
// some headers define some of those names themselves.
#define REPLACES(name) __asm__(name) __attribute__((visibility("default")))

namespace {

const size_t kCounterBytes = 4096;
const size_t kNoteOffset = 64;

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

template <class Function, class... Arguments>
auto call_real(const char* name, Arguments... arguments) {
  return real<Function>(name)(arguments...);
}

char* shared_counter() {
  static char* mapped = [] {
    const char* path = getenv("FAULTY_COUNTER");
    if (path == nullptr) return static_cast<char*>(nullptr);
    const int file = call_real<int(const char*, int, ...)>("open", path, O_RDWR | O_CLOEXEC);
    if (file < 0) return static_cast<char*>(nullptr);
    void* memory = mmap(nullptr, kCounterBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    call_real<int(int)>("close", file);
    return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
  }();
  return mapped;
}

std::string link_target(const std::string& link) {
  char target[PATH_MAX];
  const ssize_t length = readlink(link.c_str(), target, sizeof target);
  return length < 0 ? std::string() : std::string(target, static_cast<size_t>(length));
}

std::string path_of(int descriptor) {
  return link_target("/proc/self/fd/" + std::to_string(descriptor));
}

std::string absolute(int folder, const char* path) {
  if (path[0] == '/') return path;
  const std::string base = folder == AT_FDCWD ? link_target("/proc/self/cwd") : path_of(folder);
  return base + "/" + path;
}

bool is_below(const std::string& path, const char* variable) {
  const char* value = getenv(variable);
  const std::string folders = value == nullptr ? "" : value;
  for (size_t begin = 0; begin < folders.size();) {
    size_t end = folders.find('\n', begin);
    if (end == std::string::npos) end = folders.size();
    if (path.compare(0, end - begin, folders, begin, end - begin) == 0) return true;
    begin = end + 1;
  }
  return false;
}

bool is_counted(const char* operation) {
  const char* only = getenv("FAULTY_ONLY");
  if (only == nullptr) return true;
  return ("," + std::string(only) + ",").find("," + std::string(operation) + ",") !=
         std::string::npos;
}

bool is_chosen(uint64_t number) {
  const char* at = getenv("FAULTY_AT");
  if (at == nullptr) return false;
  const uint64_t first = strtoull(at, nullptr, 10);
  return getenv("FAULTY_STAYS") != nullptr ? number >= first : number == first;
}

// Counts the operation; whether it is to fail, in which case errno says why.
bool fails_at(const char* operation, const std::string& path) {
  char* counter = shared_counter();
  if (counter == nullptr || !is_counted(operation)) return false;
  if (!is_below(path, "FAULTY_BELOW") || is_below(path, "FAULTY_SPARED")) return false;
  const uint64_t number = reinterpret_cast<std::atomic<uint64_t>*>(counter)->fetch_add(1) + 1;
  if (!is_chosen(number)) return false;
  char* note = counter + kNoteOffset;
  if (note[0] == 0) {
    snprintf(note, kCounterBytes - kNoteOffset, "%s %s", operation, path.c_str());
  }
  const char* error = getenv("FAULTY_ERRNO");
  errno = error == nullptr ? ENOSPC : atoi(error);
  return true;
}

bool is_on() { return getenv("FAULTY_BELOW") != nullptr; }

bool fails(const char* operation, int folder, const char* path) {
  return is_on() && path != nullptr && fails_at(operation, absolute(folder, path));
}

bool is_written_to(int descriptor) {
  const int flags = fcntl(descriptor, F_GETFL);
  return flags >= 0 && (flags & O_ACCMODE) != O_RDONLY;
}

bool fails(const char* operation, int descriptor) {
  return is_on() && is_written_to(descriptor) && fails_at(operation, path_of(descriptor));
}

bool fails(const char* operation, FILE* file) {
  return file != nullptr && fails(operation, fileno(file));
}

double clock_error() {
  const char* errors = getenv("FAULTY_CLOCK");
  if (errors == nullptr) return 0.0;
  static std::atomic<unsigned> readings{0};
  unsigned count = 1;
  for (const char* c = errors; *c != 0; ++c) count += *c == ',';
  unsigned skip = readings.fetch_add(1) % count;
  while (skip-- > 0) errors = strchr(errors, ',') + 1;
  return atof(errors);
}

void note_owner(struct stat* status) {
  const char* line = getenv("FAULTY_FOREIGN");
  while (line != nullptr && *line != 0) {
    unsigned long device, inode, user;
    if (sscanf(line, "%lu %lu %lu", &device, &inode, &user) == 3 && status->st_dev == device &&
        status->st_ino == inode) {
      status->st_uid = static_cast<uid_t>(user);
    }
    line = strchr(line, '\n');
    if (line != nullptr) ++line;
  }
}

int with_owner(int result, void* status) {
  if (result == 0 && getenv("FAULTY_FOREIGN") != nullptr) {
    note_owner(static_cast<struct stat*>(status));
  }
  return result;
}

}  // namespace

extern "C" {

// Whether the library was preloaded rather than only loaded.
__attribute__((visibility("default"))) int faulty_system_is_there() { return 1; }

#define OPEN(identifier, name)                                                          \
  int identifier(const char* path, int flags, ...) REPLACES(name);                      \
  int identifier(const char* path, int flags, ...) {                                    \
    va_list more;                                                                       \
    va_start(more, flags);                                                              \
    const unsigned mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, unsigned) : 0; \
    va_end(more);                                                                       \
    if ((flags & O_CREAT) && fails("open", AT_FDCWD, path)) return -1;                  \
    return call_real<int(const char*, int, ...)>(name, path, flags, mode);              \
  }
OPEN(faulty_open, "open")
OPEN(faulty_open64, "open64")

#define OPENAT(identifier, name)                                                        \
  int identifier(int folder, const char* path, int flags, ...) REPLACES(name);          \
  int identifier(int folder, const char* path, int flags, ...) {                        \
    va_list more;                                                                       \
    va_start(more, flags);                                                              \
    const unsigned mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, unsigned) : 0; \
    va_end(more);                                                                       \
    if ((flags & O_CREAT) && fails("open", folder, path)) return -1;                    \
    return call_real<int(int, const char*, int, ...)>(name, folder, path, flags, mode); \
  }
OPENAT(faulty_openat, "openat")
OPENAT(faulty_openat64, "openat64")

#define FOPEN(identifier, name)                                          \
  FILE* identifier(const char* path, const char* mode) REPLACES(name);   \
  FILE* identifier(const char* path, const char* mode) {                 \
    if (mode[0] != 'r' && fails("open", AT_FDCWD, path)) return nullptr; \
    return call_real<FILE*(const char*, const char*)>(name, path, mode); \
  }
FOPEN(faulty_fopen, "fopen")
FOPEN(faulty_fopen64, "fopen64")

int faulty_mkdir(const char* path, mode_t mode) REPLACES("mkdir");
int faulty_mkdir(const char* path, mode_t mode) {
  if (fails("mkdir", AT_FDCWD, path)) return -1;
  return call_real<int(const char*, mode_t)>("mkdir", path, mode);
}

int faulty_mkdirat(int folder, const char* path, mode_t mode) REPLACES("mkdirat");
int faulty_mkdirat(int folder, const char* path, mode_t mode) {
  if (fails("mkdir", folder, path)) return -1;
  return call_real<int(int, const char*, mode_t)>("mkdirat", folder, path, mode);
}

int faulty_access(const char* path, int mode) REPLACES("access");
int faulty_access(const char* path, int mode) {
  if ((mode & W_OK) && fails("access", AT_FDCWD, path)) return -1;
  return call_real<int(const char*, int)>("access", path, mode);
}

int faulty_rename(const char* from, const char* to) REPLACES("rename");
int faulty_rename(const char* from, const char* to) {
  if (fails("rename", AT_FDCWD, to)) return -1;
  return call_real<int(const char*, const char*)>("rename", from, to);
}

ssize_t faulty_write(int descriptor, const void* data, size_t size) REPLACES("write");
ssize_t faulty_write(int descriptor, const void* data, size_t size) {
  if (fails("write", descriptor)) return -1;
  return call_real<ssize_t(int, const void*, size_t)>("write", descriptor, data, size);
}

size_t faulty_fwrite(const void* data, size_t size, size_t count, FILE* file) REPLACES("fwrite");
size_t faulty_fwrite(const void* data, size_t size, size_t count, FILE* file) {
  if (fails("write", file)) return 0;
  return call_real<size_t(const void*, size_t, size_t, FILE*)>("fwrite", data, size, count, file);
}

int faulty_fsync(int descriptor) REPLACES("fsync");
int faulty_fsync(int descriptor) {
  if (fails("fsync", descriptor)) return -1;
  return call_real<int(int)>("fsync", descriptor);
}

int faulty_fflush(FILE* file) REPLACES("fflush");
int faulty_fflush(FILE* file) {
  if (fails("write", file)) return EOF;
  return call_real<int(FILE*)>("fflush", file);
}

// A network file system writes when a file is closed: the descriptor is gone, and so is the data.
int faulty_close(int descriptor) REPLACES("close");
int faulty_close(int descriptor) {
  const bool failed = fails("close", descriptor);
  const int error = errno;
  const int result = call_real<int(int)>("close", descriptor);
  if (!failed) return result;
  errno = error;
  return -1;
}

int faulty_fclose(FILE* file) REPLACES("fclose");
int faulty_fclose(FILE* file) {
  const bool failed = fails("close", file);
  const int error = errno;
  const int result = call_real<int(FILE*)>("fclose", file);
  if (!failed) return result;
  errno = error;
  return EOF;
}

int faulty_flock(int descriptor, int operation) REPLACES("flock");
int faulty_flock(int descriptor, int operation) {
  const char* error = getenv("FAULTY_LOCKS");
  if (error != nullptr) {
    errno = atoi(error);
    return -1;
  }
  return call_real<int(int, int)>("flock", descriptor, operation);
}

int faulty_clock_gettime(clockid_t clock, struct timespec* now) REPLACES("clock_gettime");
int faulty_clock_gettime(clockid_t clock, struct timespec* now) {
  const int result = call_real<int(clockid_t, struct timespec*)>("clock_gettime", clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    now->tv_sec += static_cast<time_t>(clock_error());
  }
  return result;
}

int faulty_gettimeofday(struct timeval* now, void* zone) REPLACES("gettimeofday");
int faulty_gettimeofday(struct timeval* now, void* zone) {
  const int result = call_real<int(struct timeval*, void*)>("gettimeofday", now, zone);
  if (result == 0) now->tv_sec += static_cast<time_t>(clock_error());
  return result;
}

time_t faulty_time(time_t* where) REPLACES("time");
time_t faulty_time(time_t* where) {
  const time_t now =
      call_real<time_t(time_t*)>("time", nullptr) + static_cast<time_t>(clock_error());
  if (where != nullptr) *where = now;
  return now;
}

#define STAT(identifier, name)                                                         \
  int identifier(const char* path, void* status) REPLACES(name);                       \
  int identifier(const char* path, void* status) {                                     \
    return with_owner(call_real<int(const char*, void*)>(name, path, status), status); \
  }
STAT(faulty_stat, "stat")
STAT(faulty_stat64, "stat64")
STAT(faulty_lstat, "lstat")
STAT(faulty_lstat64, "lstat64")

#define FSTAT(identifier, name)                                                      \
  int identifier(int descriptor, void* status) REPLACES(name);                       \
  int identifier(int descriptor, void* status) {                                     \
    return with_owner(call_real<int(int, void*)>(name, descriptor, status), status); \
  }
FSTAT(faulty_fstat, "fstat")
FSTAT(faulty_fstat64, "fstat64")

#define FSTATAT(identifier, name)                                                       \
  int identifier(int folder, const char* path, void* status, int flags) REPLACES(name); \
  int identifier(int folder, const char* path, void* status, int flags) {               \
    using Function = int(int, const char*, void*, int);                                 \
    return with_owner(call_real<Function>(name, folder, path, status, flags), status);  \
  }
FSTATAT(faulty_fstatat, "fstatat")
FSTATAT(faulty_fstatat64, "fstatat64")

// What programs built against glibc before 2.33 call.
#define XSTAT(identifier, name, Place)                                                          \
  int identifier(int version, Place place, void* status) REPLACES(name);                        \
  int identifier(int version, Place place, void* status) {                                      \
    return with_owner(call_real<int(int, Place, void*)>(name, version, place, status), status); \
  }
XSTAT(faulty_xstat, "__xstat", const char*)
XSTAT(faulty_xstat64, "__xstat64", const char*)
XSTAT(faulty_lxstat, "__lxstat", const char*)
XSTAT(faulty_lxstat64, "__lxstat64", const char*)
XSTAT(faulty_fxstat, "__fxstat", int)
XSTAT(faulty_fxstat64, "__fxstat64", int)

}  // extern "C"
