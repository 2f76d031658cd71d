// Exports for tests: the decoder's view of a code object, and the instruction tables.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "chips.h"
#include "decode/decode.h"
#include "decode/text.h"
#include "json.h"
#include "shared_structs.h"

namespace {

using namespace emulator;

Json json_of(const Parameter& parameter) {
  const char* const words[] = {name_of(parameter.type), name_of(parameter.role)};
  return json_list(words);
}

Json json_of(const Definition& row) {
  std::vector<const char*> chips;
  for (const Architecture& each : kArchitectures)
    if (row.arch & each.arch) chips.push_back(each.name);
  std::vector<Parameter> sources;
  for (const Parameter& source : row.signature.sources)
    if (source.role != Role::none) sources.push_back(source);
  return json_object({{"mnemonic", row.mnemonic},
                      {"format", name_of(row.format)},
                      {"opcode", row.opcode},
                      {"chips", json_list(chips)},
                      {"unit", name_of(row.unit)},
                      {"registers", json_list(row.registers)},
                      {"passes", row.passes},
                      {"result", json_of(row.signature.result)},
                      {"sources", json_list(sources, [](const auto& x) { return json_of(x); })}});
}

}  // namespace

// Writes the text of the instruction at `words` and returns its length in dwords; 0 where it is not
// known, or nothing known is called `arch_name`.
EXPORT int jitfmha_emulator_disassemble(const char* arch_name, const u32* words, int available,
                                        char* text, int text_bytes) {
  const auto known =
      std::find_if(std::begin(kArchitectures), std::end(kArchitectures),
                   [&](const Architecture& each) { return !std::strcmp(each.name, arch_name); });
  if (known == std::end(kArchitectures)) return 0;
  const Instruction inst = decode_instruction(known->arch, words, static_cast<u32>(available));
  std::snprintf(text, static_cast<std::size_t>(text_bytes), "%s", text_of(inst).c_str());
  return is_decoded(inst) ? inst.dwords : 0;
}

// Every row of the instruction tables, as JSON.
EXPORT const char* jitfmha_emulator_definitions() {
  static const std::string text =
      json_list(all_definitions(), [](const Definition* row) { return json_of(*row); }).text;
  return text.c_str();
}
