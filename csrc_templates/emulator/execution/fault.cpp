// The messages of faults, and text as printf makes it.
#include <cstdarg>
#include <cstdio>

#include "execution/wave.h"

namespace emulator {
namespace {

std::string with_arguments(const char* format, va_list arguments) {
  char text[512];
  std::vsnprintf(text, sizeof(text), format, arguments);
  return text;
}

}  // namespace

std::string formatted(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const std::string text = with_arguments(format, arguments);
  va_end(arguments);
  return text;
}

void fault(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const std::string text = with_arguments(format, arguments);
  va_end(arguments);
  throw Fault(text);
}

void lane_fault(int lane, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const std::string text = with_arguments(format, arguments);
  va_end(arguments);
  throw Fault(text, lane);
}

}  // namespace emulator
