// The operand layer's uncommon paths: scalars, constants, SDWA, DPP, modifiers, partial writes.
#include "execution/lanes.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace emulator {

u64 pack_mask(const u32* plane) {
  u64 mask = 0;
#if defined(__AVX512F__)
  for (u32 lane = 0; lane < kLanes; lane += 16) {
    const __m512i lanes = _mm512_loadu_si512(plane + lane);
    mask |= static_cast<u64>(_mm512_test_epi32_mask(lanes, lanes)) << lane;
  }
#elif defined(__AVX2__)
  for (u32 lane = 0; lane < kLanes; lane += 8) {
    const __m256i lanes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane + lane));
    const __m256i zero = _mm256_cmpeq_epi32(lanes, _mm256_setzero_si256());
    mask |= static_cast<u64>(~_mm256_movemask_ps(_mm256_castsi256_ps(zero)) & 0xff) << lane;
  }
#else
  for (u32 lane = 0; lane < kLanes; ++lane) mask |= static_cast<u64>(plane[lane] != 0) << lane;
#endif
  return mask;
}

void expand_mask(u64 mask, u32* plane) {
#if defined(__AVX512F__)
  for (u32 lane = 0; lane < kLanes; lane += 16)
    _mm512_storeu_si512(plane + lane,
                        _mm512_maskz_set1_epi32(static_cast<__mmask16>(mask >> lane), -1));
#else
  const u32 halves[2] = {static_cast<u32>(mask), static_cast<u32>(mask >> 32)};
  for (u32 half = 0; half < 2; ++half)
    for (u32 lane = 0; lane < 32; ++lane)
      plane[32 * half + lane] = 0u - ((halves[half] >> lane) & 1u);
#endif
}

void write_vgpr(Wave& wave, u32 index, const u32* plane, u64 mask) {
  u32* const target = wave.vgpr[index];
  if (mask == kAllLanes) {
    std::memcpy(target, plane, sizeof(u32) * kLanes);
  } else {
#if defined(__AVX512F__)
    for (u32 lane = 0; lane < kLanes; lane += 16)
      _mm512_mask_storeu_epi32(target + lane, static_cast<__mmask16>(mask >> lane),
                               _mm512_loadu_si512(plane + lane));
#else
    alignas(64) u32 keep[kLanes];
    expand_mask(mask, keep);
    for (u32 lane = 0; lane < kLanes; ++lane)
      target[lane] = (plane[lane] & keep[lane]) | (target[lane] & ~keep[lane]);
#endif
  }
  hooks::vgpr_written(wave, index, 1, mask);
}

// ---- Sources ------------------------------------------------------------------------------------

int dpp_source_lane(u32 control, int lane) {
  const int row = lane & ~15, in_row = lane & 15;
  if (control <= 0xff) return (lane & ~3) | ((control >> (2 * (lane & 3))) & 3);  // quad_perm
  const int count = control & 15;
  switch (control >> 4) {
    case 0x10: return in_row + count < 16 ? lane + count : -1;  // row_shl
    case 0x11: return in_row >= count ? lane - count : -1;      // row_shr
    case 0x12: return row | ((in_row - count) & 15);            // row_ror
    case 0x15: return row | count;                              // row_newbcast
    default: break;
  }
  switch (control) {
    case 0x130: return lane < 63 ? lane + 1 : -1;       // wave_shl:1
    case 0x134: return (lane + 1) & 63;                 // wave_rol:1
    case 0x138: return lane - 1;                        // wave_shr:1
    case 0x13c: return (lane - 1) & 63;                 // wave_ror:1
    case 0x140: return row | (15 - in_row);             // row_mirror
    case 0x141: return (lane & ~7) | (7 - (lane & 7));  // row_half_mirror
    case 0x142: return row ? row - 1 : -1;              // row_bcast:15
    case 0x143: return lane >= 32 ? 31 : -1;            // row_bcast:31
    default: fault("reserved DPP control 0x%x", control);
  }
}

namespace {

// Lanes that have a source lane, and one that is active.
u64 dpp_valid_lanes(const Wave& wave, u32 control) {
  u64 valid = 0;
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const int from = dpp_source_lane(control, static_cast<int>(lane));
    valid |= static_cast<u64>(from >= 0 && (wave.exec() >> from & 1)) << lane;
  }
  return valid;
}

// Lanes that are the source of a lane whose result is kept.
u64 dpp_read_lanes(const Wave& wave, const Dpp& dpp) {
  u64 lanes = 0;
  for (u64 written = dpp_write_mask(wave, dpp); written; written &= written - 1) {
    const int from = dpp_source_lane(dpp.control, __builtin_ctzll(written));
    if (from >= 0) lanes |= u64{1} << from;
  }
  return lanes & wave.exec();
}

void permute_by_dpp(const Wave& wave, const Dpp& dpp, const u32* from, u32* to) {
  alignas(64) u32 permuted[kLanes];
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const int source = dpp_source_lane(dpp.control, static_cast<int>(lane));
    permuted[lane] = source >= 0 && (wave.exec() >> source & 1) ? from[source] : 0;
  }
  std::memcpy(to, permuted, sizeof(permuted));
}

void broadcast(u32 value, u32* plane) {
  for (u32 lane = 0; lane < kLanes; ++lane) plane[lane] = value;
}

// The width of a part of a dword, and where it begins.
std::pair<u32, u32> part_of(Select select) {
  const u32 number = static_cast<u32>(select);
  return select <= Select::byte_3
             ? std::pair{8u, 8 * number}
             : std::pair{16u, 16 * (number - static_cast<u32>(Select::word_0))};
}

void select_part(Select select, bool sign_extend, const u32* from, u32* to) {
  if (select == Select::dword) {
    std::memcpy(to, from, sizeof(u32) * kLanes);
    return;
  }
  const auto [width, position] = part_of(select);
  const u32 up = 32 - width - position, down = 32 - width;
  if (sign_extend) {
    for (u32 lane = 0; lane < kLanes; ++lane)
      to[lane] = static_cast<u32>(static_cast<i32>(from[lane] << up) >> down);
  } else {
    for (u32 lane = 0; lane < kLanes; ++lane) to[lane] = from[lane] << up >> down;
  }
}

u32 sign_bit(OperandType type) {
  switch (type) {
    case OperandType::f16:
    case OperandType::bf16: return 0x8000u;
    case OperandType::f16x2:
    case OperandType::bf16x2: return 0x80008000u;
    default: return 0x80000000u;
  }
}

void modify_sign(const Operand& operand, const u32* from, u32* to) {
  const u32 sign = sign_bit(operand.type);
  const u32 keep = operand.modifiers & kAbsolute ? ~sign : ~0u;
  const u32 flip = operand.modifiers & kNegate ? sign : 0u;
  for (u32 lane = 0; lane < kLanes; ++lane) to[lane] = (from[lane] & keep) ^ flip;
}

}  // namespace

Planes materialize(Wave& wave, const Instruction& inst, const Operand& operand,
                   LaneBuffer& buffer) {
  Planes planes{buffer.plane[0], buffer.plane[1]};
  if (operand.place == Place::vgpr) {
    const bool permutes = inst.dpp && &operand == &inst.source[0];
    hooks::vgpr_read(
        wave, operand.index, operand.dwords,
        hooks::kObserving && permutes ? dpp_read_lanes(wave, inst.dpp_control) : wave.exec());
    planes = {wave.vgpr[operand.index], wave.vgpr[operand.index + (operand.dwords > 1)]};
  } else {
    const u64 bits = read_scalar_bits(wave, operand);
    broadcast(static_cast<u32>(bits), buffer.plane[0]);
    if (operand.dwords > 1) broadcast(static_cast<u32>(bits >> 32), buffer.plane[1]);
  }
  if (inst.dpp && &operand == &inst.source[0]) {
    permute_by_dpp(wave, inst.dpp_control, planes.low, buffer.plane[0]);
    if (operand.dwords > 1) permute_by_dpp(wave, inst.dpp_control, planes.high, buffer.plane[1]);
    planes = {buffer.plane[0], operand.dwords > 1 ? buffer.plane[1] : nullptr};
  }
  if (operand.select != Select::dword) {
    select_part(operand.select, operand.modifiers & kSignExtend, planes.low, buffer.plane[0]);
    planes.low = buffer.plane[0];
  }
  if (operand.modifiers & (kAbsolute | kNegate)) {
    const u32 top = operand.dwords > 1 ? 1 : 0;
    modify_sign(operand, top ? planes.high : planes.low, buffer.plane[top]);
    (top ? planes.high : planes.low) = buffer.plane[top];
  }
  return planes;
}

namespace {

// Zeros instead of denormals, signs kept. Two 16-bit numbers in a dword where `kHalves`.
template <bool kHalves>
void flush_plane(const u32* from, u32* to) {
  constexpr u32 kSigns = kHalves ? 0x80008000u : 0x80000000u;
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const u32 bits = from[lane];
    u32 keep = 0;
    if (kHalves) {
      keep |= bits & 0x7c00u ? 0xffffu : 0;
      keep |= bits & 0x7c000000u ? 0xffff0000u : 0;
    } else {
      keep = bits & 0x7f800000u ? ~0u : 0;
    }
    to[lane] = bits & (keep | kSigns);
  }
}

void flush_doubles(const u32* from_low, const u32* from_high, u32* low, u32* high) {
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const u32 keep = from_high[lane] & 0x7ff00000u ? ~0u : 0;
    low[lane] = from_low[lane] & keep;
    high[lane] = from_high[lane] & (keep | 0x80000000u);
  }
}

}  // namespace

Planes flush_denormal_sources(const Wave& wave, OperandType type, Planes planes,
                              LaneBuffer& buffer) {
  const u32 denormal = float_class(type) == FloatClass::single ? wave.mode >> 4 : wave.mode >> 6;
  if (denormal & 1) return planes;
  switch (type) {
    case OperandType::f32: flush_plane<false>(planes.low, buffer.plane[0]); break;
    case OperandType::f16:
    case OperandType::f16x2: flush_plane<true>(planes.low, buffer.plane[0]); break;
    case OperandType::f64:
      flush_doubles(planes.low, planes.high, buffer.plane[0], buffer.plane[1]);
      break;
    default: return planes;
  }
  return {buffer.plane[0], buffer.plane[1]};
}

void flush_denormal_results(const Wave& wave, OperandType type, u32* low, u32* high) {
  if (type == OperandType::f16 && wave.mode & kModeFp16Overflow)
    fault("MODE.FP16_OVFL is not emulated here");
  const u32 denormal = float_class(type) == FloatClass::single ? wave.mode >> 4 : wave.mode >> 6;
  if (denormal & 2) return;
  switch (type) {
    case OperandType::f32: flush_plane<false>(low, low); break;
    case OperandType::f16:
    case OperandType::f16x2: flush_plane<true>(low, low); break;
    case OperandType::f64: flush_doubles(low, high, low, high); break;
    default: break;
  }
}

u64 dpp_write_mask(const Wave& wave, const Dpp& dpp) {
  u64 enabled = 0;
  for (u32 lane = 0; lane < kLanes; ++lane)
    enabled |=
        static_cast<u64>((dpp.row_mask >> (lane / 16) & 1) && (dpp.bank_mask >> (lane / 4 % 4) & 1))
        << lane;
  if (!dpp.bound_control) enabled &= dpp_valid_lanes(wave, dpp.control);
  return enabled & wave.exec();
}

// ---- Results ------------------------------------------------------------------------------------

namespace {

constexpr f32 kOutputScale[4] = {1.0f, 2.0f, 4.0f, 0.5f};

// clamp: to [0, 1], NaN to 0 where MODE.DX10_CLAMP says so.
template <class T>
T clamp_to_unit(T value, bool nan_to_zero) {
  if (value != value) return nan_to_zero ? T(0) : value;
  return value <= T(0) ? T(0) : value > T(1) ? T(1) : value;
}

// omod applies where neither MODE.IEEE is set nor denormal results are kept; it turns -0 to +0.
bool scales_output(const Wave& wave, const Instruction& inst) {
  const bool is_single = float_class(inst.destination.type) == FloatClass::single;
  const u32 keeps_denormals = (is_single ? wave.mode >> 4 : wave.mode >> 6) & 2;
  return inst.omod && !keeps_denormals && !(wave.mode & kModeIeee);
}

template <class T>
T flushed(T value, T smallest_normal) {
  return value > -smallest_normal && value < smallest_normal ? T(0) : value;
}

void modify_output(const Wave& wave, const Instruction& inst, u32* low, u32* high) {
  const bool scales = scales_output(wave, inst);
  const f32 scale = kOutputScale[inst.omod];
  const bool nan_to_zero = wave.mode & kModeDx10Clamp;
  if (!scales && !inst.clamp) return;
  switch (inst.destination.type) {
    case OperandType::f32: {
      f32* const values = reinterpret_cast<f32*>(low);
      if (scales)
        for (u32 lane = 0; lane < kLanes; ++lane)
          values[lane] = flushed(values[lane] * scale, 0x1p-126f);
      if (inst.clamp)
        for (u32 lane = 0; lane < kLanes; ++lane)
          values[lane] = clamp_to_unit(values[lane], nan_to_zero);
      break;
    }
    case OperandType::f16:
      for (u32 lane = 0; lane < kLanes; ++lane) {
        f32 value = half_to_float(static_cast<u16>(low[lane]));
        // As for the others, what is rounded up to a normal number stays.
        if (scales) value = flushed(half_to_float(float_to_half(value * scale)), 0x1p-14f);
        if (inst.clamp) value = clamp_to_unit(value, nan_to_zero);
        low[lane] = float_to_half(value);
      }
      break;
    case OperandType::f64:
      for (u32 lane = 0; lane < kLanes; ++lane) {
        f64 value = bit_cast<f64>(static_cast<u64>(high[lane]) << 32 | low[lane]);
        if (scales) value = flushed(value * scale, 0x1p-1022);
        if (inst.clamp) value = clamp_to_unit(value, nan_to_zero);
        const u64 bits = bit_cast<u64>(value);
        low[lane] = static_cast<u32>(bits);
        high[lane] = static_cast<u32>(bits >> 32);
      }
      break;
    default: break;  // integers saturate in their semantics (Saturating)
  }
}

// Puts a narrow result into its part of the register.
void place_part(Select select, u8 unused, const u32* old, u32* plane) {
  const auto [width, position] = part_of(select);
  const u32 part = ((width == 8 ? 0xffu : 0xffffu)) << position;
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const u32 placed = plane[lane] << position & part;
    u32 rest = 0;
    if (unused == 1) {  // sign extension above the part, zeros below
      const bool negative = plane[lane] >> (width - 1) & 1;
      rest = negative ? ~((part - 1) | part) : 0;
    } else if (unused == 2) {
      rest = old[lane] & ~part;
    }
    plane[lane] = placed | rest;
  }
}

}  // namespace

void commit(Wave& wave, const Instruction& inst, u32* low, u32* high, u64 mask, bool keep_high) {
  const u32 index = inst.destination.index;
  if (inst.has_output_modifiers) modify_output(wave, inst, low, high);
  if (inst.destination_select != Select::dword) {
    place_part(inst.destination_select, inst.destination_unused, wave.vgpr[index], low);
  } else if (keep_high) {
    place_part(Select::word_0, 2, wave.vgpr[index], low);
  }
  write_vgpr(wave, index, low, mask);
  if (high) write_vgpr(wave, index + 1, high, mask);
}

u64 read_scalar_status(Wave& wave, Place place) {
  switch (place) {
    case Place::vccz: return read_scalar_pair(wave, kVccIndex) == 0;
    case Place::execz: return wave.exec() == 0;
    case Place::scc: return wave.scc;
    default: return 0;
  }
}

}  // namespace emulator
