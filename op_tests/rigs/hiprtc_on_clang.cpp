// hiprtc's C interface (hip/hiprtc.h) on top of clang and lld as programs.
//
// It does as the real one does where a caller can tell: its own options come before the caller's,
// it puts a header in front of the program, sources and headers lie in a temporary folder of its
// own, more options come from the environment, and an architecture that it does not know ends the
// process.

#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "given.h"  // zig: the path of the program; builtin_header: hiprtc_builtin_header.h

namespace {

enum Result { success = 0, invalid_input = 3, compilation = 6 };

using File = std::pair<std::string, std::string>;  // name, content

struct Program {
  File source;
  std::vector<File> headers;
  std::string log;
  std::string code;
};

void write(const std::string& folder, const File& file) {
  const std::string path = folder + "/" + file.first;
  for (size_t i = folder.size(); i < path.size(); ++i)
    if (path[i] == '/') mkdir(path.substr(0, i).c_str(), 0700);
  std::ofstream(path) << file.second;
}

std::string read(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

bool run(Program& program, const std::string& folder, const std::vector<std::string>& command) {
  const std::string log = folder + "/log";
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 2, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  pid_t child = 0;
  int status = 1;
  if (posix_spawn(&child, words[0], &actions, nullptr, words.data(), environ) == 0)
    waitpid(child, &status, 0);
  posix_spawn_file_actions_destroy(&actions);
  program.log += read(log);
  return status == 0;
}

std::string architecture(const std::vector<std::string>& options) {
  const std::string flag = "--offload-arch=";
  std::string found;
  for (const std::string& option : options)
    if (option.compare(0, flag.size(), flag) == 0) found = option.substr(flag.size());
  if (found != "gfx942" && found != "gfx950") abort();
  return found;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const char* hiprtcGetErrorString(int result) {
  return result == compilation ? "HIPRTC_ERROR_COMPILATION" : "HIPRTC_ERROR_INVALID_INPUT";
}

EXPORTED int hiprtcVersion(int* major, int* minor) {
  *major = 9;
  *minor = 0;
  return success;
}

EXPORTED int hiprtcCreateProgram(Program** program, const char* source, const char* name,
                                 int header_count, const char** headers, const char** names) {
  if (*source == 0) return invalid_input;
  *program = new Program{{name, source}, {}, {}, {}};
  for (int i = 0; i < header_count; ++i) (*program)->headers.emplace_back(names[i], headers[i]);
  return success;
}

EXPORTED int hiprtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return success;
}

EXPORTED int hiprtcCompileProgram(Program* program, int count, const char** given) {
  puts("what a library prints is no answer");
  fflush(stdout);
  std::vector<std::string> options(given, given + count);
  if (const char* more = getenv("HIPRTC_COMPILE_OPTIONS_APPEND")) options.emplace_back(more);
  const std::string arch = architecture(options);

  const char* temporary = getenv("TMPDIR");
  std::string folder = std::string(temporary ? temporary : "/tmp") + "/comgr-XXXXXX";
  if (!mkdtemp(folder.data())) return invalid_input;
  write(folder + "/input", program->source);
  write(folder + "/include", {"hiprtc_runtime.h", builtin_header});
  for (const File& header : program->headers) write(folder + "/include", header);

  const std::string assembly = folder + "/program.s", relocatable = folder + "/program.o";
  std::vector<std::string> compile = {
      zig, "clang", "-x", "hip", "--cuda-device-only", "-nogpulib", "--no-gpu-bundle-output",
      // From here on as hiprtc does it.
      "-O3", "-mcumode", "-std=c++14", "-I" + folder + "/include", "-D__HIPCC_RTC__", "-nogpuinc",
      "-include", "hiprtc_runtime.h"};
  compile.insert(compile.end(), options.begin(), options.end());
  for (const std::string& word :
       {std::string("-S"), folder + "/input/" + program->source.first, std::string("-o"), assembly})
    compile.push_back(word);
  const std::string linked = folder + "/program.co";
  const bool done = run(*program, folder, compile) &&
                    run(*program, folder,
                        {zig, "clang", "-target", "amdgcn-amd-amdhsa", "-mcpu=" + arch, "-c",
                         assembly, "-o", relocatable}) &&
                    run(*program, folder, {zig, "ld.lld", "-shared", relocatable, "-o", linked});
  if (done) program->code = read(linked);
  return done ? success : compilation;
}

EXPORTED int hiprtcGetProgramLogSize(Program* program, size_t* size) {
  *size = program->log.size() + 1;
  return success;
}

EXPORTED int hiprtcGetProgramLog(Program* program, char* log) {
  memcpy(log, program->log.c_str(), program->log.size() + 1);
  return success;
}

EXPORTED int hiprtcGetCodeSize(Program* program, size_t* size) {
  *size = program->code.size();
  return success;
}

EXPORTED int hiprtcGetCode(Program* program, char* code) {
  memcpy(code, program->code.data(), program->code.size());
  return success;
}
