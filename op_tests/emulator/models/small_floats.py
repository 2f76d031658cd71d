"""fp8, bf8, fp6, bf6 and fp4: every code's exact value, and rounding by search among the values.

gfx942's FNUZ and gfx950's OCP forms, from the documents' tables: AMD's CDNA3 ISA ("FP8 and BF8"),
the OCP 8-bit floating point and microscaling specifications. Codes are integers, values exact.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True)
class SmallFormat:
    """`nan`, `infinity`: codes without a sign; None where the format has none."""

    width: int
    mantissa: int
    bias: int
    nan: int | None
    infinity: int | None
    fnuz: bool = False
    _values: list[Fraction] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        for code in range(self.sign):
            if code in (self.nan, self.infinity) and not self.fnuz:
                break
            exponent, significand = divmod(code, 1 << self.mantissa)
            if exponent:
                significand += 1 << self.mantissa
            power = max(exponent, 1) - self.bias - self.mantissa
            self._values.append(Fraction(significand) * Fraction(2) ** power)

    @property
    def sign(self) -> int:
        return 1 << (self.width - 1)

    @property
    def largest(self) -> int:
        return len(self._values) - 1

    def value(self, code: int) -> Fraction | float:
        """NaN and infinity as floats."""
        negative = bool(code & self.sign)
        magnitude = code & (self.sign - 1)
        if self.fnuz:
            if code == self.sign:
                return float("nan")
        elif self.infinity is not None and magnitude == self.infinity:
            return float("-inf") if negative else float("inf")
        elif magnitude > self.largest:
            return float("nan")
        return -self._values[magnitude] if negative else self._values[magnitude]

    def _signed(self, code: int, negative: bool) -> int:
        if self.fnuz and code == 0:
            return 0
        return code | (self.sign if negative else 0)

    def of_nan(self, negative: bool) -> int:
        if self.fnuz:
            return self.sign
        return self._signed(self.largest if self.nan is None else self.nan, negative)

    def of_infinity(self, negative: bool) -> int:
        if self.infinity is not None:
            return self._signed(self.infinity, negative)
        return self.of_nan(negative)

    def _rounded(self, code: int, negative: bool, saturates: bool) -> int:
        """A code, or what becomes of one beyond the largest."""
        if code > self.largest and not saturates:
            return self.of_infinity(negative)
        return self._signed(min(code, self.largest), negative)

    def nearest(self, value: Fraction, *, negative: bool, saturates: bool) -> int:
        """The code of the nearest number; of two, the even one.

        `negative` is the sign of zero, too.
        """
        size = abs(value)
        # The number after the largest counts, too: what is nearer to it is an overflow.
        step = self._values[-1] - self._values[-2]
        values = [*self._values, self._values[-1] + step]
        below = bisect_right(values, size) - 1
        if below + 1 >= len(values):
            return self._rounded(below, negative, saturates)
        down, up = size - values[below], values[below + 1] - size
        code = below if down < up or (down == up and below % 2 == 0) else below + 1
        return self._rounded(code, negative, saturates)

    def stochastic(
        self, value: Fraction, random: int, source_mantissa: int, *, negative: bool, saturates: bool
    ) -> int:
        """Cut off after adding the upper bits of 32 random ones below the last bit.

        As many random bits as the source type's mantissa has more than this one.
        """
        size = abs(value)
        if size == 0:
            return self._signed(0, negative)
        exponent = size.numerator.bit_length() - size.denominator.bit_length()
        if Fraction(2) ** exponent > size:
            exponent -= 1
        exponent = max(exponent, 1 - self.bias)
        bits = source_mantissa - self.mantissa
        # In units of the source's last bit, which a denormal result has shifted out in part.
        unit = Fraction(2) ** (exponent - source_mantissa)
        shifted = int(size / unit) + (random >> (32 - bits))
        whole = shifted >> bits
        code = whole + ((exponent + self.bias - 1) << self.mantissa)
        return self._rounded(code, negative, saturates)


FP8 = SmallFormat(8, 3, 7, nan=0x7F, infinity=None)
BF8 = SmallFormat(8, 2, 15, nan=0x7E, infinity=0x7C)
FP8_FNUZ = SmallFormat(8, 3, 8, nan=None, infinity=None, fnuz=True)
BF8_FNUZ = SmallFormat(8, 2, 16, nan=None, infinity=None, fnuz=True)
FP6 = SmallFormat(6, 3, 1, nan=None, infinity=None)
BF6 = SmallFormat(6, 2, 3, nan=None, infinity=None)
FP4 = SmallFormat(4, 1, 1, nan=None, infinity=None)


def of_chip(name: str, arch: str) -> SmallFormat:
    """fp8, bf8, fp6, bf6 or fp4 of gfx942 or gfx950."""
    if arch == "gfx942":
        return {"fp8": FP8_FNUZ, "bf8": BF8_FNUZ}[name]
    return {"fp8": FP8, "bf8": BF8, "fp6": FP6, "bf6": BF6, "fp4": FP4}[name]
