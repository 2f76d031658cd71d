"""The receipts of CK's dispatcher: which kernels a package that is built with them has.

A receipt is a name, the number that CK's generators know it by, and a filter of signatures. What is
built for one is what it keeps of :data:`UNIVERSE`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..planning.specification import Signature
from ..problem.dtypes import FP8_NAMES
from ..problem.mask import CAUSAL_MASK, NO_MASK, Mask
from .ck_architectures import hdims_of
from .profile_names import RECEIPT_NUMBERS, receipt_name
from .profiles import PLAIN, Dtypes, Features, Subset
from .specification import BACKWARD_FAMILIES, FORWARD_FAMILIES

_SOURCE = "CK's dispatcher, dispatcher/codegen/fmha/validation.py: PROFILES"
_SIXTEEN_BITS = ("fp16", "bf16")
_AITER_TYPES = (*_SIXTEEN_BITS, "fp8bf16")
_FLASH_FAMILIES = tuple(x for x in FORWARD_FAMILIES[:-1] if x != "fwd_splitkv_combine")
_FP8_HDIMS = (128, 192)
_SMALL_HDIMS = (48, 128)


class Receipt(NamedTuple):
    """A filter of kernels; ``keeps`` says in words what passes."""

    name: str
    keeps: str
    filter: Callable[[Signature], bool]
    source: str = _SOURCE

    @property
    def number(self) -> int | None:
        """CK's."""
        return RECEIPT_NUMBERS[self.name]


def allows(receipt: Receipt, signature: Signature) -> bool:
    """Whether a receipt has a kernel; words of the signature are those that stand for others."""
    return receipt.filter(signature)


def _is_flash_forward(sig: Signature) -> bool:
    return (
        sig.family in _FLASH_FAMILIES
        and sig.data_type in _SIXTEEN_BITS
        and sig.bias in ("no", "alibi")
        and (sig.vlayout, sig.qscale) == ("r", "no")
        and not sig.skip_min_seqlen_q
    )


def _is_pytorch(sig: Signature) -> bool:
    return (
        sig.data_type in _SIXTEEN_BITS
        and sig.bias in ("no", "bias")
        and (sig.vlayout, sig.qscale) == ("r", "no")
        and not (sig.skip_min_seqlen_q or sig.logits or sig.sink)
    )


def _is_of_aiter(sig: Signature) -> bool:
    return sig.data_type in _AITER_TYPES and sig.vlayout == "r"


def _has_hdim_of_fp8(sig: Signature) -> bool:
    return sig.data_type != "fp8bf16" or sig.hdim_q in _FP8_HDIMS


def _is_gradient(sig: Signature) -> bool:
    return sig.family in BACKWARD_FAMILIES and sig.data_type in _SIXTEEN_BITS


def _is_small_fp32(sig: Signature) -> bool:
    return (
        sig.data_type == "fp32"
        and sig.mode == "batch"
        and {sig.hdim_q, sig.hdim_v} <= {*_SMALL_HDIMS}
        and (sig.bias, sig.qscale) == ("no", "no")
        and not (sig.lse or sig.dropout)
    )


def _is_test_of_fp8(sig: Signature) -> bool:
    is_fp8 = sig.data_type in ("fp8bf16", "fp8fp32")
    return is_fp8 and sig.hdim_q in _FP8_HDIMS and sig.vlayout == "r"


_NUMBERED = (
    Receipt("ck_default", "every data type but fp32", lambda x: x.data_type != "fp32"),
    Receipt("ck_extended", "every data type but fp32", lambda x: x.data_type != "fp32"),
    Receipt(
        "flash_fwd",
        "forward in fp16 and bf16, bias 'no' or 'alibi', vlayout 'r', qscale 'no'",
        _is_flash_forward,
    ),
    Receipt("flash_bwd", "backward in fp16 and bf16", _is_gradient),
    Receipt(
        "ck_pytorch",
        "fp16 and bf16, bias 'no' or 'bias', vlayout 'r', qscale 'no', no logits, no sink",
        _is_pytorch,
    ),
    Receipt(
        "aiter_batch",
        "fp16, bf16 and fp8bf16 (hdim_q 128, 192) in mode 'batch', vlayout 'r'",
        lambda x: _is_of_aiter(x) and _has_hdim_of_fp8(x) and x.mode == "batch",
    ),
    Receipt(
        "aiter_group",
        "fp16, bf16 and fp8bf16 in mode 'group', vlayout 'r'",
        lambda x: _is_of_aiter(x) and x.mode == "group",
    ),
    Receipt(
        "aiter_bwd_batch",
        "backward in fp16 and bf16 in mode 'batch'",
        lambda x: _is_gradient(x) and x.mode == "batch",
    ),
    Receipt(
        "aiter_bwd_group",
        "backward in fp16 and bf16 in mode 'group'",
        lambda x: _is_gradient(x) and x.mode == "group",
    ),
    Receipt(
        "aiter_cpp",
        "fp16, bf16 and fp8bf16 (hdim_q 128, 192), vlayout 'r'",
        lambda x: _is_of_aiter(x) and _has_hdim_of_fp8(x),
    ),
    Receipt(
        "fp32_all",
        "fp32 without logits",
        lambda x: x.data_type == "fp32" and not (x.skip_min_seqlen_q or x.logits),
    ),
    Receipt(
        "fp32_min",
        "fp32 in mode 'batch', hdims 48 and 128, without bias, lse and dropout",
        _is_small_fp32,
    ),
    Receipt("fp8_test", "fp8bf16 and fp8fp32 with hdim_q 128 or 192, vlayout 'r'", _is_test_of_fp8),
)


def _any_of(name: str, *names: str) -> Receipt:
    parts = [receipt for receipt in _NUMBERED if receipt.name in names]
    keeps = parts[0].keeps
    if len(parts) > 1:
        keeps = f"what {' or '.join(f'`{part.name}`' for part in parts)} keeps"
    return Receipt(name, keeps, lambda x: any(part.filter(x) for part in parts))


_RECEIPTS = (
    *_NUMBERED,
    _any_of("flash", "flash_fwd", "flash_bwd"),
    _any_of("pytorch", "ck_pytorch"),
    _any_of(
        *("aiter", "aiter_batch", "aiter_group", "aiter_bwd_batch", "aiter_bwd_group", "aiter_cpp")
    ),
    _any_of("fp32", "fp32_all", "fp32_min"),
    _any_of("fp8", "fp8_test"),
    Receipt("all", "everything", lambda x: True),
)
RECEIPTS = {receipt.name: receipt for receipt in _RECEIPTS}
"""By name."""


def receipt_named(name: str | int) -> Receipt:
    """The receipt of that name or number.

    Raises ``TypeError`` or ``ValueError`` where there is none.
    """
    return RECEIPTS[receipt_name(name)]


# ---- What receipts choose from -------------------------------------------------------------------

_WINDOW = Mask(left=128, right=0)
_MASKS = (NO_MASK, CAUSAL_MASK, _WINDOW)
# Of which a chip has one.
_FP8: tuple[Dtypes, ...] = tuple((dtype, dtype) for dtype in FP8_NAMES.values())
_FEATURES: tuple[Features, ...] = (
    *(PLAIN, ("bias",), ("alibi",), ("softcap",), ("dropout",)),
    *(("bias", "dropout"), ("alibi", "dropout"), ("alibi", "softcap")),
)
_SCALED: tuple[Features, ...] = (PLAIN, ("descales",))
_OF_BACKWARD = tuple(features for features in _FEATURES if "softcap" not in features)

UNIVERSE = (
    *(
        subset
        for dtype in ("fp16", "bf16", "fp32")
        for subset in (
            Subset(((dtype, dtype),), hdims_of(dtype), _MASKS[:2], features=_FEATURES),
            Subset(((dtype, dtype),), hdims_of(dtype), (_WINDOW,), features=(("sink_tokens",),)),
            Subset(
                *(((dtype, dtype),), hdims_of(dtype), _MASKS[:2]),
                directions=("backward",),
                features=_OF_BACKWARD,
            ),
            Subset(
                *(((dtype, dtype),), hdims_of(dtype), _MASKS[:2]),
                modes=("gm1",),
                features=(("paged_keys",),),
            ),
        )
    ),
    *(
        Subset(_FP8, hdims_of(f"fp8{out}"), _MASKS[:2], features=_SCALED, out_dtypes=(out,))
        for out in ("bf16", "fp32")
    ),
)
"""Every kind of kernel of CK's that calls of ours have, with features alone and in usual pairs."""
