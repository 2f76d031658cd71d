// An AMDGPU code object (ELF, versions 4 to 6), loaded and decoded.
// Formats: LLVM's "User Guide for AMDGPU Backend", sections Code Object, Kernel Descriptor,
// Metadata.
#pragma once

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "decode/instruction.h"

namespace emulator {

// The 64 bytes at a kernel's `.kd` symbol.
struct KernelDescriptor {
  u32 group_segment_bytes;
  u32 private_segment_bytes;
  u32 kernarg_bytes;
  u32 reserved0;
  i64 entry_offset;  // from the descriptor
  u8 reserved1[20];
  u32 rsrc3, rsrc1, rsrc2;
  u16 properties;
  u16 kernarg_preload;
  u8 reserved2[4];

  u32 vgprs() const { return ((rsrc1 & 63) + 1) * 8; }
  u32 accumulation_offset() const { return ((rsrc3 & 63) + 1) * 4; }
  u32 initial_mode() const {
    return (rsrc1 >> 12 & 0xff) | (rsrc1 >> 21 & 1) << 8 | (rsrc1 >> 23 & 1) << 9 |
           (rsrc1 >> 26 & 1) << 23;
  }
  bool enables_workgroup_id(u32 axis) const { return rsrc2 >> (7 + axis) & 1; }
  bool enables_workgroup_info() const { return rsrc2 >> 10 & 1; }
  u32 user_sgprs() const { return rsrc2 >> 1 & 31; }
  bool has(u32 property) const { return properties >> property & 1; }
  u32 preload_dwords() const { return kernarg_preload & 127; }
  u32 preload_offset_dwords() const { return kernarg_preload >> 7; }
};
static_assert(sizeof(KernelDescriptor) == 64, "as the hardware reads it");

// Bits of KernelDescriptor::properties.
enum KernelProperty : u32 {
  kPrivateSegmentBuffer = 0,
  kDispatchPtr = 1,
  kQueuePtr = 2,
  kKernargPtr = 3,
  kDispatchId = 4,
  kFlatScratchInit = 5,
  kPrivateSegmentSize = 6,
  kWave32 = 10,
  kDynamicStack = 11,
};

// One kernel argument of the metadata.
struct KernelArgument {
  u32 offset = 0, bytes = 0;
  std::string value_kind;  // by_value, global_buffer, hidden_block_count_x, ...
  bool is_hidden() const { return value_kind.rfind("hidden_", 0) == 0; }
  // 0 to 2 where the kind is `prefix` and an axis, such as hidden_block_count_x; -1 where it begins
  // otherwise. Throws CodeObjectError for another axis.
  int axis_of(const char* prefix) const;
};

struct Kernel {
  std::string symbol;  // without .kd, as the file has it
  std::string name;    // the same, printable
  KernelDescriptor descriptor;
  u32 entry_dword;                        // index into CodeObject::instructions
  std::vector<KernelArgument> arguments;  // empty where there is no metadata
  u32 kernarg_bytes;
  u32 max_workgroup_size = 1024;
};

struct CodeObject {
  Arch arch;
  u32 version;
  std::unique_ptr<u8, void (*)(void*)> storage{nullptr, std::free};
  u8* image;  // the loaded segments, page-aligned
  u64 image_bytes = 0;
  u64 text_address = 0;  // of the executable segment
  u32 text_dwords = 0;
  // One for each dword of the text, because every dword is decoded as if an instruction began
  // there, and some behind the last one, which fault.
  std::vector<Instruction> instructions;
  std::vector<std::unique_ptr<Kernel>> kernels;

  const Kernel* find_kernel(const std::string& symbol) const;
  // The symbol or kernel that an address of the text belongs to, for messages.
  std::string location(u32 dword) const;
};

// A name that somebody else chose, for messages: bytes that are no printable ASCII become \xNN, so
// that no terminal takes them for commands.
std::string printable(const std::string& name);

// Throws CodeObjectError with what is wrong. Takes time in proportion to the file, whatever its
// headers say.
std::unique_ptr<CodeObject> load_code_object(const u8* elf, u64 bytes);
// Of an image in memory whose size nobody says: the ELF headers give it.
u64 code_object_bytes(const u8* elf);

class CodeObjectError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace emulator
