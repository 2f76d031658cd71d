// MFMA and SMFMAC: D = A * B + C on the registers of a whole wave, whatever EXEC says. The table is
// mfma.inc; elements, layout and sums of products are in matrix_operands.h.
//
// Numbers (CDNA4 ISA, 7.4). Inputs of less than 32 bits keep their denormals, and so do C and D.
// V_MFMA_F32_*_F32 flushes denormals of A and B where MODE says so; nothing else looks at MODE's
// rounding and denormal bits. MODE.FP16_OVFL clamps results that overflow. V_MFMA_*_XF32 rounds A
// and B to 10 bits of mantissa, to nearest even.
//
// AMD does not publish in which order, and how wide, the hardware adds the products. Here a sum
// starts at C and the products are added one by one with ascending depth, each rounded once, to
// nearest even (a fused multiply-add). Chips may differ in the last bits.
#include "instructions/matrix_operands.h"

namespace emulator {
namespace {

// ---- Modifiers ----------------------------------------------------------------------------------

[[noreturn]] void fault_modifier(const char* name, u32 value) {
  fault("%s:%u is not implemented for this matrix instruction", name, value);
}

// The lane whose elements of B lane `lane` works on.
u32 blgp_lane(u32 blgp, u32 lane) {
  switch (blgp) {
    case 1: return lane % 32;
    case 2: return lane % 32 + 32;
    case 3: return (lane + 16) % 64;
    case 4:
    case 5:
    case 6:
    case 7: return lane % 16 + 16 * (blgp - 4);
    default: return lane;
  }
}

// CBSZ and ABID: all blocks work on block ABID of A. Broadcasts to a part of the blocks
// (1 < 2^cbsz < blocks) are refused: the CDNA4 ISA repeats 64 / 2^cbsz lanes over the wave, AMD's
// matrix instruction calculator broadcasts inside of groups of 2^cbsz blocks, which differs.
template <u32 kSize, u32 kBlocks>
void broadcast_block(const Instruction& inst, u32 count, Plane* a) {
  if (inst.cbsz && 1u << inst.cbsz != kBlocks) fault_modifier("cbsz", inst.cbsz);
  if (inst.abid >= 1u << inst.cbsz) fault_modifier("abid", inst.abid);
  const u32 first = kSize * inst.abid;
  permute_lanes(count, a, [&](u32 lane) { return lane % kSize + first; });
}

// ---- C and D ------------------------------------------------------------------------------------

// Elements of A and of B, `count` planes each.
struct Inputs {
  Plane* a;
  u32 a_count;
  Plane* b;
  u32 b_count;
};

bool clamps_overflow(const Wave& wave) {
  return __builtin_expect((wave.mode & kModeFp16Overflow) != 0, 0);
}

void multiply_by_zero(u32 count, f32* values) {
  for (u32 i = 0; i < count; ++i) values[i] *= 0.0f;
}

// D = C + products, float32. multiply(inputs, rows) adds the products to rows[block][row][column].
template <u32 kSize, u32 kBlocks, class Multiply>
void accumulate(Wave& wave, const Operand& c, const Operand& d, const Inputs& inputs, f32,
                Multiply multiply) {
  Accumulator<kSize, kBlocks, f32> sums;
  sums.read(wave, c);
  if (clamps_overflow(wave)) {
    // With every input times zero, the sum is zero where all inputs of a result are finite and NaN
    // elsewhere: an infinity that comes from an infinite input stays.
    Accumulator<kSize, kBlocks, f32> finite = sums;
    multiply(inputs, sums.rows);
    constexpr u32 kResults = kBlocks * kSize * kSize;
    multiply_by_zero(kResults, &finite.rows[0][0][0]);
    multiply_by_zero(inputs.a_count * kLanes, inputs.a[0]);
    multiply_by_zero(inputs.b_count * kLanes, inputs.b[0]);
    multiply(inputs, finite.rows);
    f32* const results = &sums.rows[0][0][0];
    const f32* const is_finite = &finite.rows[0][0][0];
    for (u32 i = 0; i < kResults; ++i)
      if (std::isinf(results[i]) && !std::isnan(is_finite[i]))
        results[i] = std::copysign(bit_cast<f32>(0x7f7fffffu), results[i]);
  } else {
    multiply(inputs, sums.rows);
  }
  sums.write(wave, d);
}

// The same for int32. Sums of products of int8 are exact in float32.
template <u32 kSize, u32 kBlocks, class Multiply>
void accumulate(Wave& wave, const Operand& c, const Operand& d, const Inputs& inputs, i32,
                Multiply multiply) {
  Accumulator<kSize, kBlocks, f32> products{};
  multiply(inputs, products.rows);
  Accumulator<kSize, kBlocks, i32> sums;
  sums.read(wave, c);
  const f32* const addends = &products.rows[0][0][0];
  i32* const results = &sums.rows[0][0][0];
  constexpr u32 kResults = kBlocks * kSize * kSize;
  if (clamps_overflow(wave)) {
    for (u32 i = 0; i < kResults; ++i) {
      const i64 sum = i64{results[i]} + static_cast<i64>(addends[i]);
      const i64 bounded = sum < INT32_MIN ? INT32_MIN : sum > INT32_MAX ? INT32_MAX : sum;
      results[i] = static_cast<i32>(bounded);
    }
  } else {
    for (u32 i = 0; i < kResults; ++i) {
      const u32 addend = static_cast<u32>(static_cast<i32>(addends[i]));
      results[i] = static_cast<i32>(static_cast<u32>(results[i]) + addend);
    }
  }
  sums.write(wave, d);
}

// ---- Dense products -----------------------------------------------------------------------------

// kBlocks products of kSize x kDepth by kDepth x kSize, of elements of types A and B.
template <u32 kSize, u32 kDepth, u32 kBlocks, class A, class B = A>
struct Dense {
  using Where = Layout<kSize, kBlocks>;
  using Result = std::conditional_t<std::is_same_v<A, Int8>, i32, f32>;
  static constexpr u32 kCount = kDepth / Where::kGroups;  // elements of a lane

  static void execute(Wave& wave, const Instruction& inst) {
    alignas(64) Plane a[kCount], b[kCount];
    unpack<A>(wave, inst.source[0], kCount, a);
    unpack<B>(wave, inst.source[1], kCount, b);
    if (__builtin_expect(inst.cbsz | inst.abid, 0))
      broadcast_block<kSize, kBlocks>(inst, kCount, a);
    if (__builtin_expect(inst.blgp, 0)) {
      // AMD's calculator gives it to products of several blocks and of float32 only.
      if (kBlocks == 1 && !std::is_same_v<A, Float32>) fault_modifier("blgp", inst.blgp);
      permute_lanes(kCount, b, [&](u32 lane) { return blgp_lane(inst.blgp, lane); });
    }
    if (std::is_same_v<A, Float32> && !(wave.mode >> 4 & 1)) {
      flush_denormals(kCount, a);
      flush_denormals(kCount, b);
    }
    const Inputs inputs{a, kCount, b, kCount};
    accumulate<kSize, kBlocks>(wave, inst.source[2], inst.destination, inputs, Result{}, multiply);
  }

 private:
  static void multiply(const Inputs& inputs, f32 (&rows)[kBlocks][kSize][kSize]) {
    const Terms terms{inputs.a, inputs.b, kCount, Where::kGroups, Where::kStride};
    for (u32 block = 0; block < kBlocks; ++block) add_products(terms, kSize * block, rows[block]);
  }
};

// ---- Float64 ------------------------------------------------------------------------------------

// kBlocks products of kSize x 4 by 4 x kSize. BLGP negates A, B and C.
template <u32 kSize, u32 kBlocks>
struct DenseFloat64 {
  using Where = Layout<kSize, kBlocks, 1>;
  using Lanes = f64[kLanes];

  static void execute(Wave& wave, const Instruction& inst) {
    if (inst.cbsz) fault_modifier("cbsz", inst.cbsz);
    if (inst.abid) fault_modifier("abid", inst.abid);
    alignas(64) Lanes a, b, c[Where::kItems];
    read(wave, inst.source[0], 0, inst.blgp & 1, a);
    read(wave, inst.source[1], 0, inst.blgp & 2, b);
    for (u32 item = 0; item < Where::kItems; ++item)
      read(wave, inst.source[2], 2 * item, inst.blgp & 4, c[item]);
    for (u32 block = 0; block < kBlocks; ++block)
      for (u32 row = 0; row < kSize; ++row) {
        f64* const sums = c[Where::item_of(block, row)] + Where::lane_of(block, row);
        for (u32 group = 0; group < Where::kGroups; ++group) {
          const u32 first = kSize * block + Where::kStride * group;
          for (u32 column = 0; column < kSize; ++column)
            sums[column] = __builtin_fma(a[first + row], b[first + column], sums[column]);
        }
      }
    for (u32 item = 0; item < Where::kItems; ++item) {
      u32* const low = wave.vgpr[inst.destination.index + 2 * item];
      u32* const high = low + kLanes;
      for (u32 lane = 0; lane < kLanes; ++lane) {
        low[lane] = static_cast<u32>(bit_cast<u64>(c[item][lane]));
        high[lane] = static_cast<u32>(bit_cast<u64>(c[item][lane]) >> 32);
      }
    }
    hooks::vgpr_written(wave, inst.destination.index, 2 * Where::kItems, kAllLanes);
  }

 private:
  static void read(Wave& wave, const Operand& operand, u32 offset, bool negate, Lanes& to) {
    const u64 sign = negate ? u64{1} << 63 : 0;
    if (operand.place == Place::constant) {
      for (f64& value : to) value = bit_cast<f64>(operand.constant ^ sign);
      return;
    }
    hooks::vgpr_read(wave, operand.index + offset, 2, kAllLanes);
    const u32* const low = wave.vgpr[operand.index + offset];
    const u32* const high = low + kLanes;
    for (u32 lane = 0; lane < kLanes; ++lane)
      to[lane] = bit_cast<f64>((static_cast<u64>(high[lane]) << 32 | low[lane]) ^ sign);
  }
};

// ---- Sparse products ----------------------------------------------------------------------------

// Where depth k of a dense operand is, when its lanes hold `count` elements each: in one piece, or
// in two, the second half of the elements for the second half of the depths (CDNA4 ISA, the tables
// of 7.1.5 and 7.5.1).
struct Depth {
  u32 element, group;
};
constexpr Depth depth_in_one_piece(u32 k, u32 count) { return {k % count, k / count}; }
constexpr Depth depth_in_halves(u32 k, u32 count, u32 depths) {
  const Depth in_half = depth_in_one_piece(k % (depths / 2), count / 2);
  return {in_half.element + (k < depths / 2 ? 0 : count / 2), in_half.group};
}

// kSize x kDepth by kDepth x kSize. Of each four elements in a row of A two are stored, the indices
// in C's place say which; D adds to itself.
template <u32 kSize, u32 kDepth, class A, class B = A>
struct Sparse {
  using Where = Layout<kSize, 1>;
  using Result = std::conditional_t<std::is_same_v<A, Int8>, i32, f32>;
  static constexpr u32 kCount = kDepth / Where::kGroups;  // elements of B in a lane
  static constexpr u32 kStored = kCount / 2;              // and of A
  static constexpr u32 kIndexBits = 2 * kStored;
  static constexpr bool kInHalves = kCount * B::kBits == 8 * 32;

  static void execute(Wave& wave, const Instruction& inst) {
    if (inst.blgp) fault_modifier("blgp", inst.blgp);
    alignas(64) Plane a[kStored], b[kCount];
    unpack<A>(wave, inst.source[0], kStored, a);
    unpack<B>(wave, inst.source[1], kCount, b);
    const Operand& indices = inst.source[2];
    hooks::vgpr_read(wave, indices.index, 1, kAllLanes);
    // The register has room for several sets of indices.
    constexpr u32 kSets = 32 / kIndexBits;
    const u32 shift = inst.cbsz & 3 ? 0 : kIndexBits * (inst.abid % kSets);
    u32 index[kLanes];
    for (u32 lane = 0; lane < kLanes; ++lane) index[lane] = wave.vgpr[indices.index][lane] >> shift;
    const Inputs inputs{a, kStored, b, kCount};
    accumulate<kSize, 1>(
        wave, inst.destination, inst.destination, inputs, Result{},
        [&](const Inputs& in, f32(&rows)[1][kSize][kSize]) { multiply(in, index, rows[0]); });
  }

 private:
  static void multiply(const Inputs& in, const u32 (&index)[kLanes], f32 (&rows)[kSize][kSize]) {
    for (u32 row = 0; row < kSize; ++row) {
      alignas(64) f32 sums[kSize];
      std::memcpy(sums, rows[row], sizeof(sums));
      for (u32 group = 0; group < Where::kGroups; ++group) {
        const u32 lane = row + kSize * group;
        for (u32 stored = 0; stored < kStored; ++stored) {
          const u32 k = kCount * group + 4 * (stored / 2) + (index[lane] >> 2 * stored & 3);
          const Depth depth =
              kInHalves ? depth_in_halves(k, kCount, kDepth) : depth_in_one_piece(k, kCount);
          const f32 factor = in.a[stored][lane];
          const f32* const b = in.b[depth.element] + kSize * depth.group;
          for (u32 column = 0; column < kSize; ++column)
            sums[column] = __builtin_fmaf(factor, b[column], sums[column]);
        }
      }
      std::memcpy(rows[row], sums, sizeof(sums));
    }
  }
};

// ---- Formats chosen by the instruction, and scales ----------------------------------------------

constexpr u32 kScaleBlock = 32;  // depths that share a scale, and the elements of a lane

// A or B of the f8f6f4 instructions: after this, group g of the lanes holds depths 32 g and up.
template <u32 kSize>
void unpack_format(Wave& wave, const Operand& operand, u32 format, Plane* planes) {
  using Unpack = void (*)(Wave&, const Operand&, u32, Plane*);
  constexpr Unpack kUnpack[] = {unpack<Fp8>, unpack<Bf8>, unpack<Fp6>, unpack<Bf6>, unpack<Fp4>};
  kUnpack[format](wave, operand, kScaleBlock, planes);
  if (format > 1) return;
  // 8-bit elements come in halves.
  constexpr u32 kDepths = kScaleBlock * kLanes / kSize;
  alignas(64) Plane halves[kScaleBlock];
  std::memcpy(halves, planes, sizeof(halves));
  for (u32 k = 0; k < kDepths; ++k) {
    const Depth from = depth_in_halves(k, kScaleBlock, kDepths);
    const Depth to = depth_in_one_piece(k, kScaleBlock);
    std::memcpy(planes[to.element] + kSize * to.group, halves[from.element] + kSize * from.group,
                sizeof(f32) * kSize);
  }
}

// 2^(code - 127) of each lane. An inline float stands for its exponent.
void read_scales(Wave& wave, const Operand& operand, u32 byte, f64 (&scales)[kLanes]) {
  if (operand.place == Place::vgpr) hooks::vgpr_read(wave, operand.index, 1, kAllLanes);
  const u32 constant = static_cast<u32>(operand.constant);
  const i32 integer = static_cast<i32>(constant);
  const bool is_float = operand.place == Place::constant && (integer < -16 || integer > 64);
  if (operand.place != Place::vgpr && !is_float)
    fault("a matrix scale that is neither a VGPR nor a float constant");
  constexpr u32 kNan = 0xff;
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const u32 source = is_float ? constant >> 23 : wave.vgpr[operand.index][lane] >> 8 * byte;
    const u32 code = source & 0xff;
    scales[lane] = bit_cast<f64>(code == kNan ? u64{0x7ff8} << 48 : u64{1023 - 127 + code} << 52);
  }
}

// kSize x (32 * groups) by (32 * groups) x kSize; CBSZ and BLGP name the formats of A and B. With
// scales, the sum over each block of 32 depths is multiplied with those of its row and its column;
// blocks and C are added in float64 and rounded once.
template <u32 kSize>
struct ChosenFormats {
  using Where = Layout<kSize, 1>;

  static void execute(Wave& wave, const Instruction& inst) {
    alignas(64) Plane a[kScaleBlock], b[kScaleBlock];
    unpack_format<kSize>(wave, inst.source[0], inst.cbsz, a);
    unpack_format<kSize>(wave, inst.source[1], inst.blgp, b);
    const Inputs inputs{a, kScaleBlock, b, kScaleBlock};
    const bool is_scaled = inst.definition->format == Format::MFMA_SCALE && inst.abid & 1;
    if (!is_scaled) {
      accumulate<kSize, 1>(wave, inst.source[2], inst.destination, inputs, f32{}, multiply);
      return;
    }
    alignas(64) f64 a_scales[kLanes], b_scales[kLanes];
    read_scales(wave, inst.source[3], (inst.op_sel & 1) | (inst.op_sel_hi & 1) << 1, a_scales);
    read_scales(wave, inst.source[4], (inst.op_sel >> 1 & 1) | (inst.op_sel_hi & 2), b_scales);
    accumulate<kSize, 1>(wave, inst.source[2], inst.destination, inputs, f32{},
                         [&](const Inputs& in, f32(&rows)[1][kSize][kSize]) {
                           multiply_scaled(in, a_scales, b_scales, rows[0]);
                         });
  }

 private:
  static void multiply(const Inputs& in, f32 (&rows)[1][kSize][kSize]) {
    add_products({in.a, in.b, kScaleBlock, Where::kGroups, kSize}, 0, rows[0]);
  }

  static void multiply_scaled(const Inputs& in, const f64* a_scales, const f64* b_scales,
                              f32 (&rows)[kSize][kSize]) {
    alignas(64) f32 products[Where::kGroups][kSize][kSize] = {};
    for (u32 group = 0; group < Where::kGroups; ++group)
      add_products({in.a, in.b, kScaleBlock, 1, 0}, kSize * group, products[group]);
    for (u32 row = 0; row < kSize; ++row) {
      alignas(64) f64 sums[kSize];
      for (u32 j = 0; j < kSize; ++j) sums[j] = static_cast<f64>(rows[row][j]);
      for (u32 group = 0; group < Where::kGroups; ++group) {
        const f64 a_scale = a_scales[kSize * group + row];
        const f32* const dot = products[group][row];
        for (u32 j = 0; j < kSize; ++j)
          sums[j] += static_cast<f64>(dot[j]) * (a_scale * b_scales[kSize * group + j]);
      }
      for (u32 j = 0; j < kSize; ++j) rows[row][j] = static_cast<f32>(sums[j]);
    }
  }
};

// ---- The table ----------------------------------------------------------------------------------

const Definition kDefinitions[] = {
#include "instructions/mfma.inc"
};

}  // namespace

DefinitionSpan mfma_definitions() { return {kDefinitions, std::size(kDefinitions)}; }

}  // namespace emulator
