// Reads ELF files, kernel descriptors and the MessagePack metadata of kernels.
#include "decode/code_object.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <set>

#include "chips.h"
#include "decode/decode.h"

namespace emulator {
namespace {

// What no real code object exceeds: a damaged field must not cost gigabytes.
constexpr u64 kLargestImage = u64{1} << 30;
constexpr u32 kLargestKernarg = 1u << 20, kLargestScratch = 1u << 20;
constexpr u16 kMostProgramHeaders = 64;

// Hidden arguments of which there is one for each axis of the grid.
constexpr const char* kKindsWithAxis[] = {"hidden_block_count_", "hidden_group_size_",
                                          "hidden_remainder_", "hidden_global_offset_"};

constexpr u64 kPage = 4096;

[[noreturn]] void malformed(const std::string& what) {
  throw CodeObjectError("not a usable AMDGPU code object: " + what);
}

// The parts of a file do not share bytes. Headers that say otherwise would let a small file take
// hours: each of ten thousand tables could be the whole file.
class DisjointParts {
 public:
  DisjointParts(const char* what, u64 file_bytes) : what_(what), left_(file_bytes) {}
  void add(u64 bytes) {
    if (bytes > left_) malformed(std::string("its ") + what_ + " have more bytes than the file");
    left_ -= bytes;
  }

 private:
  const char* what_;
  u64 left_;
};

// A stretch of the file; every read is checked, because files can be damaged.
class Bytes {
 public:
  Bytes(const u8* begin, u64 size) : begin_(begin), size_(size) {}
  u64 size() const { return size_; }
  const u8* data() const { return begin_; }
  template <class T>
  T at(u64 offset) const {
    if (offset > size_ || size_ - offset < sizeof(T)) malformed("it is truncated");
    T value;
    std::memcpy(&value, begin_ + offset, sizeof(T));
    return value;
  }
  Bytes part(u64 offset, u64 size) const {
    if (offset > size_ || size_ - offset < size) malformed("a part lies outside of the file");
    return {begin_ + offset, size};
  }
  std::string string_at(u64 offset) const {
    if (offset >= size_) malformed("a name lies outside of its table");
    const u8* const end = std::find(begin_ + offset, begin_ + size_, 0);
    return {reinterpret_cast<const char*>(begin_ + offset),
            static_cast<std::size_t>(end - begin_ - offset)};
  }

 private:
  const u8* begin_;
  u64 size_;
};

struct ElfHeader {
  u8 identification[16];
  u16 type, machine;
  u32 version;
  u64 entry, program_headers, section_headers;
  u32 flags;
  u16 header_bytes, program_header_bytes, program_header_count, section_header_bytes,
      section_header_count, names_section;
};

struct ProgramHeader {
  u32 type, flags;
  u64 offset, address, physical_address, file_bytes, memory_bytes, alignment;
};

struct SectionHeader {
  u32 name, type;
  u64 flags, address, offset, bytes;
  u32 link, info;
  u64 alignment, entry_bytes;
};

struct Symbol {
  u32 name;
  u8 info, other;
  u16 section;
  u64 value, bytes;
};

struct Relocation {
  u64 offset, info;
  i64 addend;
};

constexpr u16 kMachineAmdGpu = 224;
constexpr u8 kOsAbiHsa = 64;
constexpr u32 kLoad = 1, kNote = 4, kExecutable = 1;
constexpr u32 kSymbolTable = 2, kRelocationTable = 4, kDynamicSymbols = 11;
constexpr u32 kAmdGpuMetadata = 32;
constexpr u32 kMachMask = 0xff;
enum RelocationType : u32 { kAbs32Lo = 1, kAbs32Hi = 2, kAbs64 = 3, kAbs32 = 6, kRelative64 = 13 };

// ---- MessagePack: as much as the metadata uses --------------------------------------------------

class MessagePack {
 public:
  explicit MessagePack(Bytes bytes) : bytes_(bytes) {}

  // Entries of the map, or elements of the array, that comes next.
  u64 begin_map() { return begin(0x80, 0xde, "map"); }
  u64 begin_array() { return begin(0x90, 0xdc, "array"); }

  std::string string() {
    const u8 tag = next();
    u64 length;
    if ((tag & 0xe0) == 0xa0) length = tag & 31;
    else if (tag == 0xd9) length = big_endian(1);
    else if (tag == 0xda) length = big_endian(2);
    else if (tag == 0xdb) length = big_endian(4);
    else malformed("its metadata has something else where a string is expected");
    const Bytes text = bytes_.part(position_, length);
    position_ += length;
    return {reinterpret_cast<const char*>(text.data()), static_cast<std::size_t>(length)};
  }

  u64 integer() {
    const u8 tag = next();
    if (tag < 0x80) return tag;
    if (tag >= 0xcc && tag <= 0xcf) return big_endian(1u << (tag - 0xcc));
    if (tag >= 0xd0 && tag <= 0xd3) return big_endian(1u << (tag - 0xd0));
    malformed("its metadata has something else where an integer is expected");
  }

  void skip(u32 depth = 0) {
    if (depth > 64) malformed("its metadata nests too deeply");
    const u8 tag = bytes_.at<u8>(position_);
    if ((tag & 0xf0) == 0x80 || tag == 0xde || tag == 0xdf) {
      for (u64 n = begin_map(); n; --n) skip(depth + 1), skip(depth + 1);
    } else if ((tag & 0xf0) == 0x90 || tag == 0xdc || tag == 0xdd) {
      for (u64 n = begin_array(); n; --n) skip(depth + 1);
    } else if ((tag & 0xe0) == 0xa0 || (tag >= 0xd9 && tag <= 0xdb)) {
      string();
    } else if (tag < 0x80 || (tag >= 0xcc && tag <= 0xd3)) {
      integer();
    } else {
      ++position_;
      if (tag == 0xca) big_endian(4);
      else if (tag == 0xcb) big_endian(8);
      else if (tag >= 0xc4 && tag <= 0xc6) advance(big_endian(1u << (tag - 0xc4)));
      else if (!(tag >= 0xe0 || tag == 0xc0 || tag == 0xc2 || tag == 0xc3))
        malformed("its metadata has an unknown type");
    }
  }

 private:
  u8 next() { return bytes_.at<u8>(position_++); }
  void advance(u64 bytes) {
    bytes_.part(position_, bytes);
    position_ += bytes;
  }
  u64 big_endian(u32 bytes) {
    u64 value = 0;
    while (bytes--) value = value << 8 | next();
    return value;
  }
  u64 begin(u8 short_form, u8 long_form, const char* what) {
    const u8 tag = next();
    if ((tag & 0xf0) == short_form) return tag & 15;
    if (tag == long_form) return big_endian(2);
    if (tag == long_form + 1) return big_endian(4);
    malformed(std::string("its metadata has something else where a ") + what + " is expected");
  }

  Bytes bytes_;
  u64 position_ = 0;
};

struct KernelMetadata {
  std::string symbol;
  std::vector<KernelArgument> arguments;
  u32 kernarg_bytes = 0;
  u32 max_workgroup_size = 1024;
};

KernelArgument read_argument(MessagePack& metadata) {
  KernelArgument argument;
  for (u64 n = metadata.begin_map(); n; --n) {
    const std::string key = metadata.string();
    if (key == ".offset") argument.offset = static_cast<u32>(metadata.integer());
    else if (key == ".size") argument.bytes = static_cast<u32>(metadata.integer());
    else if (key == ".value_kind") argument.value_kind = metadata.string();
    else metadata.skip();
  }
  return argument;
}

KernelMetadata read_kernel(MessagePack& metadata) {
  KernelMetadata kernel;
  for (u64 n = metadata.begin_map(); n; --n) {
    const std::string key = metadata.string();
    if (key == ".symbol") kernel.symbol = metadata.string();
    else if (key == ".kernarg_segment_size")
      kernel.kernarg_bytes = static_cast<u32>(metadata.integer());
    else if (key == ".max_flat_workgroup_size")
      kernel.max_workgroup_size = static_cast<u32>(metadata.integer());
    else if (key == ".args")
      for (u64 count = metadata.begin_array(); count; --count)
        kernel.arguments.push_back(read_argument(metadata));
    else metadata.skip();
  }
  return kernel;
}

std::vector<KernelMetadata> read_metadata(Bytes note) {
  std::vector<KernelMetadata> kernels;
  MessagePack metadata(note);
  for (u64 n = metadata.begin_map(); n; --n) {
    if (metadata.string() != "amdhsa.kernels") {
      metadata.skip();
      continue;
    }
    for (u64 count = metadata.begin_array(); count; --count)
      kernels.push_back(read_kernel(metadata));
  }
  return kernels;
}

// ---- ELF ----------------------------------------------------------------------------------------

class ElfLoader {
 public:
  ElfLoader(const u8* elf, u64 bytes) : file_(elf, bytes), header_(file_.at<ElfHeader>(0)) {}

  std::unique_ptr<CodeObject> load() {
    check_header();
    check_segments();
    code_->version = header_.identification[8] + 2u;
    load_segments();
    relocate();
    read_kernels();
    decode();
    return std::move(code_);
  }

 private:
  void check_header() {
    if (std::memcmp(header_.identification, "\177ELF\2\1", 6))
      malformed("it is not a little-endian 64-bit ELF file");
    if (header_.machine != kMachineAmdGpu) malformed("its machine is not AMDGPU");
    if (header_.identification[7] != kOsAbiHsa) malformed("its operating system is not HSA");
    const u32 abi = header_.identification[8];
    if (abi < 2 || abi > 4) malformed("its version is not 4, 5 or 6");
    const auto known = std::find_if(
        std::begin(kArchitectures), std::end(kArchitectures),
        [&](const Architecture& each) { return each.elf_machine == (header_.flags & kMachMask); });
    if (known == std::end(kArchitectures))
      malformed("it is neither for gfx942 nor for gfx950 (e_flags " +
                std::to_string(header_.flags) + ")");
    code_->arch = known->arch;
    if (header_.program_header_bytes != sizeof(ProgramHeader))
      malformed("its program headers have an unknown size");
  }

  ProgramHeader segment(u32 i) const {
    return file_.at<ProgramHeader>(header_.program_headers + i * sizeof(ProgramHeader));
  }
  SectionHeader section(u32 i) const {
    return file_.at<SectionHeader>(header_.section_headers + u64{i} * sizeof(SectionHeader));
  }

  void check_segments() const {
    DisjointParts loads("segments", file_.size()), notes("notes", file_.size());
    for (u32 i = 0; i < header_.program_header_count; ++i) {
      const ProgramHeader each = segment(i);
      if (each.type != kLoad && each.type != kNote) continue;
      file_.part(each.offset, each.file_bytes);
      (each.type == kLoad ? loads : notes).add(each.file_bytes);
    }
  }

  void load_segments() {
    u64 end = 0;
    for (u32 i = 0; i < header_.program_header_count; ++i) {
      const ProgramHeader load = segment(i);
      if (load.type != kLoad) continue;
      if (load.address > kLargestImage || load.memory_bytes > kLargestImage ||
          load.file_bytes > load.memory_bytes)
        malformed("a segment has an impossible size");
      end = std::max(end, load.address + load.memory_bytes);
    }
    code_->image_bytes = end;
    // calloc gives pages of zeros that cost nothing before they are touched.
    code_->storage.reset(static_cast<u8*>(std::calloc(end + 2 * kPage, 1)));
    if (!code_->storage) throw std::bad_alloc();
    code_->image = reinterpret_cast<u8*>((reinterpret_cast<u64>(code_->storage.get()) + kPage - 1) &
                                         ~(kPage - 1));
    for (u32 i = 0; i < header_.program_header_count; ++i) {
      const ProgramHeader load = segment(i);
      if (load.type != kLoad) continue;
      const Bytes content = file_.part(load.offset, load.file_bytes);
      std::memcpy(code_->image + load.address, content.data(), content.size());
      if (!(load.flags & kExecutable)) continue;
      if (code_->text_dwords) malformed("it has more than one executable segment");
      if (load.address % 4) malformed("its code is not aligned");
      code_->text_address = reinterpret_cast<u64>(code_->image) + load.address;
      code_->text_dwords = static_cast<u32>(load.file_bytes / 4);
      text_offset_ = load.address;
    }
  }

  void relocate() {
    DisjointParts tables("relocations", file_.size());
    for (u32 i = 0; i < header_.section_header_count; ++i) {
      const SectionHeader table = section(i);
      if (table.type != kRelocationTable) continue;
      tables.add(table.bytes);
      const SectionHeader symbols = section(table.link);
      for (u64 offset = 0; offset + sizeof(Relocation) <= table.bytes; offset += sizeof(Relocation))
        apply(file_.at<Relocation>(table.offset + offset), symbols);
    }
  }

  void apply(const Relocation& relocation, const SectionHeader& symbols) {
    const u64 base = reinterpret_cast<u64>(code_->image);
    const u32 type = static_cast<u32>(relocation.info),
              symbol_index = static_cast<u32>(relocation.info >> 32);
    u64 value = base + static_cast<u64>(relocation.addend);
    if (type != kRelative64) {
      const Symbol symbol = file_.at<Symbol>(symbols.offset + u64{symbol_index} * sizeof(Symbol));
      if (symbol.section == 0) malformed("it refers to a symbol that it does not define");
      value += symbol.value;
    }
    const u32 bytes = type == kAbs64 || type == kRelative64 ? 8 : 4;
    if (relocation.offset > code_->image_bytes || code_->image_bytes - relocation.offset < bytes)
      malformed("a relocation lies outside of the image");
    if (type == kAbs32Hi) value >>= 32;
    else if (type != kAbs64 && type != kRelative64 && type != kAbs32Lo && type != kAbs32)
      malformed("relocation type " + std::to_string(type) + " is not supported");
    std::memcpy(code_->image + relocation.offset, &value, bytes);
  }

  std::vector<KernelMetadata> metadata() const {
    for (u32 i = 0; i < header_.program_header_count; ++i) {
      const ProgramHeader notes = segment(i);
      if (notes.type != kNote) continue;
      const Bytes content = file_.part(notes.offset, notes.file_bytes);
      for (u64 offset = 0; offset + 12 <= content.size();) {
        const u32 name_bytes = content.at<u32>(offset), bytes = content.at<u32>(offset + 4),
                  type = content.at<u32>(offset + 8);
        const u64 description = offset + 12 + ((u64{name_bytes} + 3) & ~u64{3});
        if (type == kAmdGpuMetadata && name_bytes == 7 &&
            content.string_at(offset + 12) == "AMDGPU")
          return read_metadata(content.part(description, bytes));
        offset = description + ((u64{bytes} + 3) & ~u64{3});
      }
    }
    return {};
  }

  void read_kernels() {
    std::map<std::string, KernelMetadata> described;  // by symbol
    for (KernelMetadata& kernel : metadata()) described[kernel.symbol] = std::move(kernel);
    DisjointParts tables("symbols", file_.size()), all_names("names", file_.size());
    for (u32 i = 0; i < header_.section_header_count; ++i) {
      const SectionHeader table = section(i);
      if (table.type != kDynamicSymbols && table.type != kSymbolTable) continue;
      tables.add(table.bytes);
      const SectionHeader names_header = section(table.link);
      const Bytes names = file_.part(names_header.offset, names_header.bytes);
      for (u64 offset = 0; offset + sizeof(Symbol) <= table.bytes; offset += sizeof(Symbol)) {
        const Symbol symbol = file_.at<Symbol>(table.offset + offset);
        const std::string name = names.string_at(symbol.name);
        all_names.add(name.size());
        if (symbol.section == 0 || name.size() <= 3 || name.compare(name.size() - 3, 3, ".kd"))
          continue;
        add_kernel(name, symbol.value, described);
      }
    }
    std::sort(code_->kernels.begin(), code_->kernels.end(),
              [](const auto& a, const auto& b) { return a->entry_dword < b->entry_dword; });
  }

  void add_kernel(const std::string& symbol, u64 address,
                  const std::map<std::string, KernelMetadata>& described) {
    if (!added_.insert(symbol).second) return;  // .dynsym and .symtab list the same kernels
    if (address > code_->image_bytes || code_->image_bytes - address < sizeof(KernelDescriptor))
      malformed("a kernel descriptor lies outside of the image");
    auto kernel = std::make_unique<Kernel>();
    kernel->symbol = symbol.substr(0, symbol.size() - 3);
    const std::string& name = kernel->name = printable(kernel->symbol);
    std::memcpy(&kernel->descriptor, code_->image + address, sizeof(KernelDescriptor));
    const u64 entry = address + static_cast<u64>(kernel->descriptor.entry_offset);
    if (entry < text_offset_ || entry - text_offset_ >= 4 * u64{code_->text_dwords} || entry % 4)
      malformed("the entry of kernel " + name + " lies outside of the code");
    kernel->entry_dword = static_cast<u32>((entry - text_offset_) / 4);
    if (kernel->descriptor.has(kWave32)) malformed("kernel " + name + " is for waves of 32 lanes");
    kernel->kernarg_bytes = kernel->descriptor.kernarg_bytes;
    if (const auto found = described.find(symbol); found != described.end()) {
      const KernelMetadata& metadata = found->second;
      kernel->arguments = metadata.arguments;
      kernel->kernarg_bytes = std::max(kernel->kernarg_bytes, metadata.kernarg_bytes);
      kernel->max_workgroup_size = metadata.max_workgroup_size;
    }
    if (kernel->kernarg_bytes > kLargestKernarg)
      malformed("kernel " + name + " has " + std::to_string(kernel->kernarg_bytes) +
                " bytes of arguments");
    if (kernel->descriptor.private_segment_bytes > kLargestScratch)
      malformed("kernel " + name + " has " +
                std::to_string(kernel->descriptor.private_segment_bytes) +
                " bytes of private memory a lane");
    for (const KernelArgument& argument : kernel->arguments) {
      if (u64{argument.offset} + argument.bytes > kLargestKernarg)
        malformed("an argument of kernel " + name + " lies outside of its segment");
      for (const char* const prefix : kKindsWithAxis) argument.axis_of(prefix);
    }
    code_->kernels.push_back(std::move(kernel));
  }

  void decode() {
    code_->instructions.resize(code_->text_dwords + 4);
    const u32* const words = reinterpret_cast<const u32*>(code_->text_address);
    for (u32 i = 0; i < code_->text_dwords; ++i)
      code_->instructions[i] = decode_instruction(code_->arch, words + i, code_->text_dwords - i);
    for (u32 i = 0; i < 4; ++i) code_->instructions[code_->text_dwords + i] = end_of_code();
  }

  Bytes file_;
  ElfHeader header_;
  std::unique_ptr<CodeObject> code_ = std::make_unique<CodeObject>();
  u64 text_offset_ = 0;
  std::set<std::string> added_;  // symbols of kernels
};

}  // namespace

std::unique_ptr<CodeObject> load_code_object(const u8* elf, u64 bytes) {
  return ElfLoader(elf, bytes).load();
}

u64 code_object_bytes(const u8* elf) {
  const Bytes headers(elf, sizeof(ElfHeader));
  const ElfHeader header = headers.at<ElfHeader>(0);
  if (std::memcmp(header.identification, "\177ELF", 4)) malformed("it is not an ELF file");
  // Nothing can be checked against the end of the memory, so at least what every linker does.
  if (header.program_headers != sizeof(ElfHeader) ||
      header.program_header_count > kMostProgramHeaders)
    malformed("its program headers do not follow its header");
  u64 end = sizeof(ElfHeader) + u64{header.program_header_count} * sizeof(ProgramHeader);
  const auto extend = [&](u64 offset, u64 bytes) {
    if (offset > kLargestImage || bytes > kLargestImage) malformed("a part has an impossible size");
    end = std::max(end, offset + bytes);
  };
  extend(header.section_headers, u64{header.section_header_count} * sizeof(SectionHeader));
  for (u32 i = 0; i < header.program_header_count; ++i) {
    ProgramHeader segment;
    std::memcpy(&segment, elf + sizeof(ElfHeader) + i * sizeof(ProgramHeader), sizeof(segment));
    extend(segment.offset, segment.file_bytes);
  }
  return end;
}

const Kernel* CodeObject::find_kernel(const std::string& symbol) const {
  for (const auto& kernel : kernels)
    if (kernel->symbol == symbol) return kernel.get();
  return nullptr;
}

int KernelArgument::axis_of(const char* prefix) const {
  const std::size_t length = std::strlen(prefix);
  if (value_kind.compare(0, length, prefix)) return -1;
  const std::string axis = value_kind.substr(length);
  if (axis != "x" && axis != "y" && axis != "z")
    malformed("an argument's kind is " + printable(value_kind) + ", whose axis is not x, y or z");
  return axis[0] - 'x';
}

std::string printable(const std::string& name) {
  std::string text;
  for (const char each : name) {
    char escaped[8];
    std::snprintf(escaped, sizeof(escaped), "\\x%02x", static_cast<u8>(each));
    if (each >= ' ' && each <= '~') text += each;
    else text += escaped;
  }
  return text;
}

std::string CodeObject::location(u32 dword) const {
  const Kernel* nearest = nullptr;
  for (const auto& kernel : kernels)
    if (kernel->entry_dword <= dword) nearest = kernel.get();
  const u32 from = nearest ? nearest->entry_dword : 0;
  char offset[32];
  std::snprintf(offset, sizeof(offset), "+0x%x", 4 * (dword - from));
  return (nearest ? nearest->name : std::string("code")) + offset;
}

}  // namespace emulator
