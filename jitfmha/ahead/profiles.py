"""Named subsets of kernels, to be built ahead: in a container image, or before a job of many ranks.

Sources of what they leave out: the signatures of flash-attn 2, of AITER's ``mha`` operators and of
``torch.nn.functional.scaled_dot_product_attention``. They have the head dimensions that most models
have; what is not built ahead is built by the first call of its kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..problem.dtypes import EIGHT_BIT_NAMES, other_out_dtype, plain_out_dtype
from ..problem.mask import CAUSAL_MASK, NO_MASK, Mask
from ..problem.problem import Direction, Mode

Features = tuple[str, ...]
"""Names as ``NAMED_FEATURES`` in ``combination.py`` has them; none for a plain call."""

PLAIN: Features = ()

USUAL_OUT_DTYPES = (plain_out_dtype("int8"),)
"""Of calls whose q has 8 bits, where none are named."""

Dtypes = tuple[str, str]


class Subset(NamedTuple):
    """Every combination of these.

    Attributes:
        dtypes: of q, and of k and v.
        hdims: of q and k, and of v.
        features: each of which a call has all of.
        heads: of q and of k. Where several query heads share a key head, calls with few queries, as
            in decoding, have kernels of their own on AMD GPUs.
        out_dtypes: of the outputs of calls whose q has 8 bits.
    """

    dtypes: tuple[Dtypes, ...]
    hdims: tuple[tuple[int, int], ...]
    masks: tuple[Mask, ...] = (NO_MASK, CAUSAL_MASK)
    modes: tuple[Mode, ...] = ("gm0", "gm1")
    directions: tuple[Direction, ...] = ("forward",)
    features: tuple[Features, ...] = (PLAIN,)
    heads: tuple[tuple[int, int], ...] = ((1, 1),)
    out_dtypes: tuple[str, ...] = USUAL_OUT_DTYPES

    def other_out_dtypes(self, dtype: str) -> tuple[str, ...]:
        """What calls with a q of ``dtype`` have as that of ``Combination``."""
        if dtype not in EIGHT_BIT_NAMES:
            return ("",)
        return tuple(other_out_dtype(dtype, x) for x in self.out_dtypes)


def refuse_out_dtypes(subsets: Iterable[Subset], asked: str) -> None:
    """Raise ``ValueError`` for ``asked``, which names out_dtypes, where no q has 8 bits."""
    if not any(x in EIGHT_BIT_NAMES for each in subsets for x, _ in each.dtypes):
        raise ValueError(f"{asked}: out_dtypes are of calls whose q has 8 bits, and none has")


_BOTH_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
_SIXTEEN_BITS = (("bf16", "bf16"), ("fp16", "fp16"))
_FLOATS = (("fp32", "fp32"), *_SIXTEEN_BITS)
# Of which a chip has one.
_FP8 = (("fp8_e4m3fnuz", "fp8_e4m3fnuz"), ("fp8_e4m3fn", "fp8_e4m3fn"))
_COMMON_HDIMS = ((64, 64), (128, 128))
_WITH_SHARED_HEADS = ((1, 1), (2, 1))

_KEYS_IN_PAGES = Subset(
    _SIXTEEN_BITS,
    _COMMON_HDIMS,
    modes=("gm1",),
    features=(("paged_keys",),),
    heads=_WITH_SHARED_HEADS,
)

# As AITER's functions of paged caches mostly have them.
_KEYS_IN_PACKED_PAGES = _KEYS_IN_PAGES._replace(
    dtypes=(*_SIXTEEN_BITS, *_FP8), hdims=((128, 128),), features=(("packed_pages",),)
)

DEFAULT = (Subset(_FLOATS, _COMMON_HDIMS),)
"""What is built where nothing is asked for."""

PROFILES: Mapping[str, tuple[Subset, ...]] = {
    # Prompts and decoding, with a cache in pages too.
    "inference": (Subset(_SIXTEEN_BITS, _COMMON_HDIMS, heads=_WITH_SHARED_HEADS), _KEYS_IN_PAGES),
    "training": (
        Subset(
            _SIXTEEN_BITS,
            _COMMON_HDIMS,
            directions=_BOTH_DIRECTIONS,
            features=(PLAIN, ("dropout",)),
        ),
    ),
    "flash-attn": (
        Subset(
            *(_SIXTEEN_BITS, (*_COMMON_HDIMS, (96, 96))),
            directions=_BOTH_DIRECTIONS,
            features=(PLAIN, ("alibi",), ("softcap",), ("dropout",)),
        ),
        _KEYS_IN_PAGES,
    ),
    "aiter": (
        Subset(
            *(_SIXTEEN_BITS, (*_COMMON_HDIMS, (192, 128))),
            directions=_BOTH_DIRECTIONS,
            features=(PLAIN, ("alibi",), ("bias",)),
        ),
        Subset(_FP8, ((128, 128),), features=(PLAIN, ("descales",))),
        *(_KEYS_IN_PAGES, _KEYS_IN_PACKED_PAGES),
    ),
    # SDPA takes a causal mask or another one, and no packed sequences.
    "pytorch": (
        Subset(_FLOATS, _COMMON_HDIMS, modes=("gm0",), directions=_BOTH_DIRECTIONS),
        Subset(
            *(_FLOATS, _COMMON_HDIMS, (NO_MASK,), ("gm0",), _BOTH_DIRECTIONS),
            features=(("boolean_bias",), ("bias",), ("dropout",)),
        ),
    ),
}
"""By name; ``warmup`` and ``build`` take them."""
