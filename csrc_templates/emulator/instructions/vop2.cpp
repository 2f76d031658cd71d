// VOP2. The table is vop2.inc.
#include "execution/lanes.h"
#include "numbers/float_order.h"
#include "numbers/half_arithmetic.h"

namespace emulator {
namespace {

// v_cndmask moves bits: neg and abs apply, MODE does not.
inline u32 select_lane(u32 a, u32 b, LaneBit bit) { return bit ? b : a; }

inline WithCarry<Saturating<u32>> add_with_carry(u32 a, u32 b, LaneBit carry) {
  const i64 sum = i64{a} + b + (carry.value & 1);
  return {{sum}, sum > 0xffffffff};
}
inline WithCarry<Saturating<u32>> subtract_with_borrow(u32 a, u32 b, LaneBit borrow) {
  const i64 difference = i64{a} - b - (borrow.value & 1);
  return {{difference}, difference < 0};
}

// Exact in a float for what makes a difference to a half.
inline f32 power_of_two(i32 exponent) {
  const i32 bounded = exponent < -60 ? -60 : exponent > 60 ? 60 : exponent;
  return bit_cast<f32>((127 + bounded) << 23);
}

// v_dot2c: on bits, because MODE's flushing does not apply.
template <class Half>
u32 dot2_of_bits(u32 a, u32 b, Old<u32> addend) {
  const auto lower = [](u32 pair) { return Half::from_bits(static_cast<u16>(pair)); };
  const auto upper = [](u32 pair) { return Half::from_bits(static_cast<u16>(pair >> 16)); };
  return bit_cast<u32>(dot2_onto_addend(lower(a), upper(a), lower(b), upper(b), addend));
}

inline f16x2 fma_halves(f16x2 a, f16x2 b, f16x2 c, Mode mode) {
  const u32 low = fma(lower_half(a), lower_half(b), lower_half(c), mode).bits;
  const u32 high = fma(upper_half(a), upper_half(b), upper_half(c), mode).bits;
  return {low | high << 16};
}

#define VECTOR_TABLE "instructions/vop2.inc"
#define VECTOR_FORMAT VOP2
#include "instructions/vector_table.h"

}  // namespace

DefinitionSpan vop2_definitions() { return {kDefinitions, std::size(kDefinitions)}; }

}  // namespace emulator
