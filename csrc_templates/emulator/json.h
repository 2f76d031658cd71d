// Values as JSON text, for Python.
#pragma once

#include <cstdio>
#include <initializer_list>
#include <string>
#include <type_traits>

namespace emulator {

// What is JSON already.
struct Json {
  std::string text;
};

inline std::string json(const Json& value) { return value.text; }
inline std::string json(const std::string& value) {
  std::string text = "\"";
  for (const char c : value) {
    char escaped[8];
    const unsigned byte = static_cast<unsigned char>(c);
    const bool is_plain = byte >= 0x20 && byte < 0x7f && c != '"' && c != '\\';
    std::snprintf(escaped, sizeof(escaped), is_plain ? "%c" : "\\u%04x", byte);
    text += escaped;
  }
  return text + '"';
}
inline std::string json(const char* value) { return json(std::string(value)); }
template <class Integer, class = std::enable_if_t<std::is_integral_v<Integer>>>
std::string json(Integer value) {
  return std::to_string(value);
}

// What `value_of` gives for each of the items.
template <class Items, class ValueOf>
Json json_list(const Items& items, ValueOf&& value_of) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : ",") + json(value_of(item));
  return {"[" + text + "]"};
}
template <class Items> Json json_list(const Items& items) {
  return json_list(items, [](const auto& item) { return item; });
}

struct JsonField {
  std::string text;
  template <class T>
  JsonField(const char* name, const T& value) : text(json(name) + ":" + json(value)) {}
};
inline Json json_object(std::initializer_list<JsonField> fields) {
  std::string text;
  for (const JsonField& field : fields) text += (text.empty() ? "" : ",") + field.text;
  return {"{" + text + "}"};
}

}  // namespace emulator
