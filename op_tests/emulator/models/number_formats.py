"""Binary floating point with exact rational arithmetic: rounded once, in any rounding mode.

A number is the integer of its bits. Nothing here uses the host's floating point.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

NEAREST, UP, DOWN, TO_ZERO = range(4)


@dataclass(frozen=True)
class Format:
    """An IEEE 754 format of `width` bits, `mantissa` of them after the point."""

    width: int
    mantissa: int

    @property
    def sign(self) -> int:
        return 1 << (self.width - 1)

    @property
    def infinity(self) -> int:
        return self.sign - (1 << self.mantissa)

    @property
    def quiet_nan(self) -> int:
        return self.infinity | 1 << (self.mantissa - 1)

    @property
    def lowest_exponent(self) -> int:
        """Of normal numbers."""
        return 2 - (1 << (self.width - self.mantissa - 2))

    def magnitude(self, bits: int) -> int:
        return bits & (self.sign - 1)

    def is_negative(self, bits: int) -> bool:
        return bits & self.sign != 0

    def is_nan(self, bits: int) -> bool:
        return self.magnitude(bits) > self.infinity

    def is_signaling(self, bits: int) -> bool:
        return self.is_nan(bits) and not bits >> (self.mantissa - 1) & 1

    def quiet(self, bits: int) -> int:
        return bits | 1 << (self.mantissa - 1)

    def is_infinite(self, bits: int) -> bool:
        return self.magnitude(bits) == self.infinity

    def is_below_zero(self, bits: int) -> bool:
        return self.is_negative(bits) and not self.is_zero(bits)

    def is_zero(self, bits: int) -> bool:
        return self.magnitude(bits) == 0

    def is_denormal(self, bits: int) -> bool:
        return 0 < self.magnitude(bits) < 1 << self.mantissa

    def exponent_field(self, bits: int) -> int:
        return self.magnitude(bits) >> self.mantissa

    def flush(self, bits: int) -> int:
        return bits & self.sign if self.is_denormal(bits) else bits

    def value(self, bits: int) -> Fraction:
        """Of a finite number."""
        field = self.exponent_field(bits)
        significand = bits & ((1 << self.mantissa) - 1)
        if field:
            significand |= 1 << self.mantissa
        power = max(field, 1) - 1 + self.lowest_exponent - self.mantissa
        value = Fraction(significand) * Fraction(2) ** power
        return -value if self.is_negative(bits) else value

    def round(self, value: Fraction, rounding: int, *, negative_zero: bool = False) -> int:
        """The number for an exact value; the sign of an exact zero is the caller's."""
        if value == 0:
            return self.sign if negative_zero else 0
        sign = self.sign if value < 0 else 0
        size = abs(value)
        exponent = size.numerator.bit_length() - size.denominator.bit_length()
        if Fraction(2) ** exponent > size:
            exponent -= 1
        exponent = max(exponent, self.lowest_exponent)
        quanta = size / Fraction(2) ** (exponent - self.mantissa)
        whole = quanta.numerator // quanta.denominator
        rest = quanta - whole
        away = (rounding == UP and not sign) or (rounding == DOWN and bool(sign))
        half = Fraction(1, 2)
        if rounding == NEAREST:
            away = rest > half or (rest == half and whole % 2 == 1)
        whole += bool(away and rest)
        bits = whole + (exponent - self.lowest_exponent << self.mantissa)
        if bits >= self.infinity:
            # What rounds away from zero overflows to infinity, the rest to the largest number.
            to_infinity = rounding == NEAREST or (rounding == UP and not sign)
            to_infinity = to_infinity or (rounding == DOWN and bool(sign))
            bits = self.infinity if to_infinity else self.infinity - 1
        return sign | bits

    def fma(self, a: int, b: int, c: int, rounding: int) -> int:
        """a * b + c. Any NaN is `quiet_nan`."""
        if self.is_nan(a) or self.is_nan(b) or self.is_nan(c):
            return self.quiet_nan
        product_sign = (a ^ b) & self.sign
        if self.is_infinite(a) or self.is_infinite(b):
            if self.is_zero(a) or self.is_zero(b):
                return self.quiet_nan
            if self.is_infinite(c) and c & self.sign != product_sign:
                return self.quiet_nan
            return product_sign | self.infinity
        if self.is_infinite(c):
            return c
        exact = self.value(a) * self.value(b) + self.value(c)
        both_negative = bool(product_sign) and self.is_negative(c)
        either_negative = bool(product_sign) or self.is_negative(c)
        negative_zero = either_negative if rounding == DOWN else both_negative
        return self.round(exact, rounding, negative_zero=negative_zero)

    def multiply(self, a: int, b: int, rounding: int) -> int:
        # Adding a zero of the product's sign changes nothing.
        return self.fma(a, b, (a ^ b) & self.sign, rounding)

    def add(self, a: int, b: int, rounding: int) -> int:
        one = (self.sign >> 1) - (1 << self.mantissa)
        return self.fma(a, one, b, rounding)

    def convert(self, bits: int, to: Format, rounding: int) -> int:
        """To another format; the payload of a NaN is not kept."""
        if self.is_nan(bits):
            return to.quiet_nan
        sign = to.sign if self.is_negative(bits) else 0
        if self.is_infinite(bits):
            return sign | to.infinity
        return to.round(self.value(bits), rounding, negative_zero=bool(sign))

    def less(self, a: int, b: int) -> bool:
        """Of numbers, with -0 below +0."""
        key_a = -self.magnitude(a) - 1 if self.is_negative(a) else self.magnitude(a)
        key_b = -self.magnitude(b) - 1 if self.is_negative(b) else self.magnitude(b)
        return key_a < key_b

    def power_of_two(self, bits: int, exponent: int, rounding: int) -> int:
        """The number times 2 ** exponent."""
        if self.is_nan(bits):
            return self.quiet_nan
        if self.is_infinite(bits) or self.is_zero(bits):
            return bits
        bounded = max(-5000, min(5000, exponent))
        return self.round(self.value(bits) * Fraction(2) ** bounded, rounding)


F16 = Format(16, 10)
BF16 = Format(16, 7)
F32 = Format(32, 23)
F64 = Format(64, 52)
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
