"""One lane of the conversions to and from the formats of 4 to 8 bits.

From the CDNA4 ISA's descriptions of V_CVT_SCALEF32_* and V_CVT_SR_*, and AMD's CDNA3 and CDNA4
rules for MODE.FP16_OVFL: an overflow gives infinity, NaN where there is none, or the largest
number.
"""

from fractions import Fraction
from functools import cache

from .number_formats import BF16, F16, F32, NEAREST, Format
from .small_floats import SmallFormat

FORMATS: dict[str, Format] = {"f32": F32, "f16": F16, "bf16": BF16}


def scale_of(bits: int) -> Fraction | None:
    """2 to the exponent of a float; None: NaN."""
    exponent = bits >> 23 & 0xFF
    return None if exponent == 255 else Fraction(2) ** (exponent - 127)


def narrow(
    small: SmallFormat,
    source: Format,
    bits: int,
    *,
    scale: int | None = None,
    random: int | None = None,
    saturates: bool = False,
) -> int:
    """A float's bits divided by the scale, as a code; `random` rounds stochastically."""
    negative = source.is_negative(bits)
    factor = Fraction(1) if scale is None else scale_of(scale)
    if factor is None or source.is_nan(bits):
        return small.of_nan(negative)
    if source.is_infinite(bits):
        return small.of_infinity(negative)
    value = source.value(bits) / factor
    if random is None:
        return small.nearest(value, negative=negative, saturates=saturates)
    return small.stochastic(value, random, source.mantissa, negative=negative, saturates=saturates)


def widen(small: SmallFormat, code: int, target: Format, scale: int) -> int:
    factor = scale_of(scale)
    value = small.value(code)
    sign = target.sign if code & small.sign else 0
    if factor is None or (isinstance(value, float) and value != value):
        return target.quiet_nan | sign
    if isinstance(value, float):
        return target.infinity | sign
    return target.round(value * factor, NEAREST, negative_zero=bool(sign))


def next_random(random: int) -> int:
    return (random << 1 ^ (197 if random >> 31 else 0)) & 0xFFFFFFFF


@cache
def as_small(number: Format) -> SmallFormat:
    """f16 or bf16 as a target of float32, which is rounded as for the small formats."""
    bias = 1 - number.lowest_exponent
    nan, infinity = number.quiet_nan, number.infinity
    return SmallFormat(16, number.mantissa, bias, nan=nan, infinity=infinity)


def is_conversion(name: str) -> bool:
    """Whether VOP3's row is one of these."""
    kinds = ("scalef32", "_fp8", "_bf8", "_sr_")
    return name.startswith("v_cvt_") and any(kind in name for kind in kinds)
