// Buffer instructions. The table is mubuf.inc. Operands: vaddr, data, resource, soffset; result.
#include "memory/buffer_format.h"
#include "memory/vector_memory.h"

namespace emulator {
namespace {

// A buffer as its resource (4 SGPRs) describes it.
//
//     index   = (idxen ? vgpr : 0) + (resource adds lane number ? lane : 0)
//     offset  = (offen ? vgpr : 0) + instruction's offset
//     address = base + soffset + stride * index + offset, or the swizzled form of the last two
//
// Range checks, by kind of buffer:
//
//     raw         no index, not swizzled: offset against the size in bytes minus soffset, for each
//                 dword of an access and for the whole of it; sums do not wrap around
//     structured  idxen with a stride: index against the number of records
//     private     the lane's number is the index: none
//
// The documents leave the other combinations open.
class Buffer {
 public:
  static constexpr bool kChecksEachDword = true;

  Buffer(Wave& wave, const Instruction& inst, bool is_format = false) : wave_(wave), inst_(inst) {
    count_vector_memory(wave, inst);
    const u64 low = read_scalar_pair(wave, inst.source[2].index);
    const u64 high = read_scalar_pair(wave, inst.source[2].index + 2);
    const u32 word3 = static_cast<u32>(high >> 32), data_format = word3 >> 15 & 15;
    base_ = low & 0xffffffffffff;
    stride_ = static_cast<u32>(low >> 48 & 0x3fff);
    records_ = static_cast<u32>(high);
    swizzles_ = low >> 63;
    adds_lane_ = word3 >> 23 & 1;
    index_stride_ = 8u << (word3 >> 21 & 3);
    if (inst.to_lds && inst.definition->unit != Unit::vmem_load)
      fault("only loads can have the lds bit");
    if (word3 >> 30) fault("the resource's type is %u, which is not a buffer", word3 >> 30);
    if (adds_lane_ && !is_format) stride_ |= data_format << 14;
    soffset_ = read_scalar<u32>(wave, inst.source[3]);
    index_ = inst.idxen ? read_address(wave, inst, 0) : nullptr;
    offset_ = inst.offen ? read_address(wave, inst, 0, inst.idxen) : nullptr;
    if (adds_lane_ && !inst.idxen) kind_ = Kind::private_;
    else if (!adds_lane_ && inst.idxen && stride_) kind_ = Kind::structured;
    else if (!adds_lane_ && !inst.idxen && !swizzles_) kind_ = Kind::raw;
    else
      fault(
          "the range check of this buffer is not documented: stride %u, swizzled %d, adds the "
          "lane's number %d, idxen %d",
          stride_, swizzles_, adds_lane_, inst.idxen);
    if (!swizzles_)
      land_own_atomics(wave, [&](u32 lane) {
        return base_ + soffset_ + u64{stride_} * index(lane) + offset(lane);
      });
  }

  u8* at(u32 lane, u32 within, u32 bytes, Access access) const {
    const u64 offset = this->offset(lane) + within;
    const u32 index = this->index(lane);
    if (kind_ == Kind::raw && (records_ < soffset_ || offset + bytes > records_ - soffset_))
      return nullptr;
    if (kind_ == Kind::structured && index >= records_) return nullptr;
    const u64 in_buffer =
        swizzles_ ? swizzled(lane, index, offset, within + bytes) : u64{stride_} * index + offset;
    return global_memory(wave_, inst_, static_cast<int>(lane), base_ + soffset_ + in_buffer, bytes,
                         access);
  }

  bool point_at_all(u32 bytes, Access, LanePointers& pointers) const {
    if (hooks::kObserving || kind_ != Kind::raw || records_ < soffset_) return false;
    const AddressRange range(wave_.exec(), [&](u32 lane) { return offset(lane); });
    if (range.highest + bytes > records_ - soffset_) return false;
    const u64 base = base_ + soffset_;
    const AddressRange addresses(range.lowest + base, range.highest + base);
    if (!addresses.is_allowed(wave_, bytes)) return false;
    for (u32 lane = 0; lane < kLanes; ++lane)
      pointers.lane[lane] = reinterpret_cast<u8*>(base + offset(lane));
    return true;
  }

 private:
  enum class Kind : u8 { raw, structured, private_ };

  u32 index(u32 lane) const { return (index_ ? index_[lane] : 0) + (adds_lane_ ? lane : 0); }
  u64 offset(u32 lane) const {
    return u64{offset_ ? offset_[lane] : 0} + static_cast<u32>(inst_.offset);
  }

  // Records are cut into elements; the same element of index_stride_ records lies together. The
  // element's size was 2 to 16 bytes once; on these chips the resource has no field for it.
  u64 swizzled(u32 lane, u32 index, u64 offset, u32 end) const {
    constexpr u32 kElement = 4;
    if (offset % kElement + end > kElement)
      lane_fault(static_cast<int>(lane),
                 "an access to a swizzled buffer that is not within one element of %u bytes",
                 kElement);
    const u64 index_high = index / index_stride_, index_low = index % index_stride_;
    const u64 element = offset / kElement * kElement;
    return (index_high * stride_ + element) * index_stride_ + index_low * kElement +
           offset % kElement;
  }

  Wave& wave_;
  const Instruction& inst_;
  u64 base_;
  u32 stride_, records_, soffset_, index_stride_;
  bool swizzles_, adds_lane_;
  Kind kind_;
  const u32* index_;
  const u32* offset_;
};

// ---- Loads to registers or to LDS ---------------------------------------------------------------

template <u32 kDwords> void execute_buffer_load(Wave& wave, const Instruction& inst) {
  if (!inst.to_lds) return execute_load<Buffer, kDwords>(wave, inst);
  const bool is_gfx950 = wave.dispatch().device->arch == kGfx950;
  if (kDwords == 2 || (kDwords > 2 && !is_gfx950)) fault("this load cannot go to LDS");
  execute_load_to_lds<Buffer, kDwords>(wave, inst);
}

template <class From, class To, u32 kShift = 0>
void execute_buffer_load_part(Wave& wave, const Instruction& inst) {
  if (!inst.to_lds) return execute_load_part<Buffer, From, To, kShift>(wave, inst);
  if (sizeof(To) != 4) fault("this load cannot go to LDS");
  execute_load_part_to_lds<Buffer, From, To>(wave, inst);
}

// ---- Formats ------------------------------------------------------------------------------------
// An access is all or nothing: it is range-checked as a whole.

// BUFFER_*_FORMAT_*: the resource says which format, and where the components that are loaded come
// from. Its word 3: 3 bits each for x, y, z, w; number format; data format.
struct FormatOfResource {
  BufferFormat format;
  BufferFormat::Selection selection;
  FormatOfResource(Wave& wave, const Instruction& inst)
      : FormatOfResource(static_cast<u32>(read_scalar_pair(wave, inst.source[2].index + 2) >> 32)) {
  }

 private:
  explicit FormatOfResource(u32 word3) : format(word3 >> 15 & 15, word3 >> 12 & 7) {
    for (u32 i = 0; i < 4; ++i) selection[i] = static_cast<u8>(word3 >> 3 * i & 7);
  }
};

// TBUFFER_*: the instruction says which, components come in order.
struct FormatOfInstruction {
  BufferFormat format;
  BufferFormat::Selection selection = {4, 5, 6, 7};
  FormatOfInstruction(Wave&, const Instruction& inst)
      : format(inst.words[0] >> 19 & 15, inst.words[0] >> 23 & 7) {
    for (u32 i = format.components(); i < 4; ++i) selection[i] = 0;
  }
};

template <class Format, u32 kComponents, bool kHalves, u32 kShift = 0>
void execute_format_load(Wave& wave, const Instruction& inst) {
  if (inst.to_lds) fault("format loads to LDS are not emulated");
  const Format description(wave, inst);
  const BufferFormat& format = description.format;
  const Buffer buffer(wave, inst, true);
  LaneRegisters result;
  for_each_lane(wave.exec(), [&](u32 lane) {
    const u8* const from = buffer.at(lane, 0, format.bytes(), Access::load);
    u32 values[4] = {};
    for (u32 i = 0; i < kComponents; ++i) {
      const u32 selected = description.selection[i];
      if (selected == 2 || selected == 3 || (selected >= 4 && selected - 4 >= format.components()))
        fault("component %u of the resource comes from %u, which the format does not have", i,
              selected);
      if (selected == 1) values[i] = kHalves ? format.half_one() : format.one();
      else if (selected && from)
        values[i] =
            kHalves ? format.load_half(from, selected - 4) : format.load(from, selected - 4);
    }
    if (kHalves) {
      for (u32 i = 0; i < kComponents; i += 2)
        result.set_dword(lane, i / 2, (values[i] | values[i + 1] << 16) << kShift);
    } else {
      for (u32 i = 0; i < kComponents; ++i) result.set_dword(lane, i, values[i]);
    }
  });
  result.store(wave, inst.destination, kHalves ? (kComponents + 1) / 2 : kComponents, wave.exec());
}

template <class Format, u32 kComponents, bool kHalves, u32 kShift = 0>
void execute_format_store(Wave& wave, const Instruction& inst) {
  const Format description(wave, inst);
  const BufferFormat& format = description.format;
  if (format.components() != kComponents)
    fault("a store of %u components to a format of %u is not emulated", kComponents,
          format.components());
  for (u32 i = 0; i < kComponents; ++i)
    if (description.selection[i] != 4 + i)
      fault("a store through a resource that swaps components is not emulated");
  const Buffer buffer(wave, inst, true);
  const LaneRegisters data(wave, inst.source[1]);
  for_each_lane(wave.exec(), [&](u32 lane) {
    u8* const to = buffer.at(lane, 0, format.bytes(), Access::store);
    for (u32 i = 0; to && i < kComponents; ++i) {
      if (kHalves)
        format.store_half(to, i, data.dword(lane, i / 2) >> (kShift + 16 * (i % 2)) & 0xffff);
      else format.store(to, i, data.dword(lane, i));
    }
  });
}

// There are no caches. A write-back raises vmcnt, an invalidation does not.
void execute_cache_control(Wave& wave, const Instruction& inst) {
  wave.vector_memory_issued += inst.definition->unit == Unit::vmem_store;
}

// The executors of mubuf.inc.
#define LOAD(DWORDS) execute_buffer_load<DWORDS>
#define STORE(DWORDS) execute_store<Buffer, DWORDS>
#define LOAD_PART(...) execute_buffer_load_part<__VA_ARGS__>
#define STORE_PART(...) execute_store_part<Buffer, __VA_ARGS__>
#define ATOMIC(...) execute_atomic<Buffer, &atomics::__VA_ARGS__>

const Definition kDefinitions[] = {
#include "instructions/mubuf.inc"
};

}  // namespace

DefinitionSpan buffer_definitions() { return {kDefinitions, std::size(kDefinitions)}; }

}  // namespace emulator
