"""A kernel as data: what it computes and how, with the field names of CK's dispatcher.

The names are those of ``dispatcher/codegen/fmha`` of github.com/ROCm/composable_kernel. What its
fields do not say of a call of ours stands in ``kv_data_type`` and ``features``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..problem.dtypes import DTYPE_NAMES, out_dtypes_of
from ..problem.features import Feature
from ..problem.mask import Mask
from ..problem.problem import Problem

EIGHT_BIT_DATA_TYPES = {
    "fp8_e4m3fnuz": "fp8bf16",
    "fp8_e4m3fn": "fp8bf16",
    "bf8_e5m2fnuz": "bf8bf16",
    "bf8_e5m2": "bf8bf16",
    "int8": "int8bf16",
}
"""By our names, with the usual output's type behind the input's; CK has neither int8 nor bf8 so."""
OUT_DTYPES = tuple(DTYPE_NAMES[dtype] for dtype in out_dtypes_of(torch.int8))
"""Of outputs of 8-bit calls, as names of data types end with them."""


class Signature(NamedTuple):
    """What a kernel computes.

    Attributes:
        family: "fwd", "fwd_pagedkv", "fwd_splitkv", "fwd_splitkv_combine", "fwd_appendkv",
            "batch_prefill", "bwd_dot_do_o", "bwd_dq_dk_dv" or "bwd_convert_dq".
        mode: "batch" (gm0) or "group" (gm1).
        vlayout: "r", or "c" where keys lie side by side in v.
        kv_data_type: of k and v, where that is not ``data_type``.
        features: what no other field says, as :func:`jitfmha.validate_config` names it.
    """

    data_type: str
    hdim_q: int
    hdim_v: int
    family: str = "fwd"
    mode: str = "batch"
    vlayout: str = "r"
    mask: str = "no"
    bias: str = "no"
    lse: bool = False
    dropout: bool = False
    qscale: str = "no"
    rope: str = "none"
    logits: bool = False
    paged_kv: bool = False
    fp8_static_quant: bool = False
    skip_min_seqlen_q: bool = False
    sink: bool = False
    dbias: bool = False
    store_randval: bool = False
    deterministic: bool = False
    dropout_variant: str = ""
    kv_memory_layout: str = "vectorized"
    kv_lookup_table: str = "sglang"
    page_size: int = 1
    kv_data_type: str = ""
    features: tuple[str, ...] = ()


class Algorithm(NamedTuple):
    """How a kernel computes it; empty tuples where a pipeline does not say it in these terms.

    Attributes:
        pipeline: a name of CK's, or the family of ours that has the kernel.
        tile: (queries, keys, columns of q at a time, columns of v, keys at a time, columns of q).
            For dq, dk and dv CK has nine numbers; ours go through the same six.
        wave: the waves of a workgroup along the sides of three products, three numbers each.
        warp: what a wave makes at a time in each of them.
        padding: whether rows of q and of k, and columns of q and of v, may be any number.
        block_per_cu: workgroups of a compute unit; -1: as many as fit.
    """

    pipeline: str = "compiled"
    tile: tuple[int, ...] = ()
    wave: tuple[int, ...] = ()
    warp: tuple[int, ...] = ()
    padding: tuple[bool, ...] = (True, True, True, True)
    block_per_cu: int = -1
    num_wave_groups: int = 1
    max_splits_log2: int = 0
    max_seq_len_q: int = 0
    use_trload: bool = False


class Stage(NamedTuple):
    """One kernel of those that a call launches one after the other.

    Attributes:
        family: CK's name for what it does, or "fwd_list" where it lists the work of the next one.
        condition: of its launch, where that is not certain; a part of a sentence.
    """

    family: str
    kernel: str
    algorithm: Algorithm
    condition: str = ""

    def __str__(self) -> str:
        return f"{self.family}: {self.kernel}{f', {self.condition}' if self.condition else ''}"


_BESIDE_RESULTS = frozenset({"fwd_list", "bwd_dot_do_o"})


def key_of(problem: Problem, stages: Sequence[Stage], arch: str) -> dict[str, Any]:
    """The configuration of the kernel that makes the results, of those that serve a problem."""
    main = next(stage for stage in stages if stage.family not in _BESIDE_RESULTS)
    signature = signature_of(problem, main.family)
    return {"signature": _data(signature), "algorithm": _data(main.algorithm), "arch": arch}


def _data(fields: Signature | Algorithm) -> dict[str, Any]:
    """As JSON has it."""
    values = fields._asdict().items()
    return {name: list(x) if isinstance(x, tuple) else x for name, x in values}


def data_type_of(dtype: str, out_dtype: str = "") -> str:
    """CK's name for inputs of a dtype of ours, and an output that is not as usual."""
    name = EIGHT_BIT_DATA_TYPES.get(dtype, dtype)
    return name.removesuffix("bf16") + out_dtype if out_dtype else name


def data_types_of(dtype: str) -> tuple[str, ...]:
    """CK's names for inputs of a dtype of ours, with every output."""
    return (
        tuple(data_type_of(dtype, x) for x in OUT_DTYPES)
        if dtype in EIGHT_BIT_DATA_TYPES
        else (dtype,)
    )


def signature_of(problem: Problem, family: str | None = None) -> Signature:
    """What serves a problem computes; with ``family`` one stage of it."""
    asked = problem.features
    said: dict[str, Any] = {
        "lse": Feature.LSE in asked,
        "dropout": Feature.DROPOUT in asked,
        "logits": Feature.SOFTCAP in asked,
        "sink": Feature.SINK_TOKENS in asked,
        "paged_kv": Feature.PAGED_KEYS in asked,
        "deterministic": problem.direction == "backward" and problem.is_deterministic,
    }
    named = (feature for feature in _NAMED_ALONE if feature in asked)
    return Signature(
        data_type_of(problem.dtype, problem.other_out_dtype),
        problem.hdim_q,
        problem.hdim_v,
        family=family_of(problem) if family is None else family,
        mode="group" if problem.mode == "gm1" else "batch",
        vlayout="c" if problem.has_column_major_v and not problem.has_packed_pages else "r",
        mask=mask_word(problem.mask),
        bias=next((word for feature, word in _BIASES.items() if feature in asked), "no"),
        qscale="pertensor" if Feature.DESCALES in asked else "no",
        page_size=problem.seqlen_k if problem.is_paged else 1,
        kv_data_type="" if problem.kv_dtype == problem.dtype else data_type_of(problem.kv_dtype),
        features=tuple(feature.name.lower() for feature in named),
        **said,
    )


_BIASES = {Feature.BIAS: "bias", Feature.ALIBI: "alibi"}
_NAMED_ALONE = (
    *(Feature.BOOLEAN_BIAS, Feature.SINKS, Feature.PADDED_SEQUENCES),
    *(Feature.QUERY_HEAD_DESCALES, Feature.TOKEN_DESCALES, Feature.INT8_PROBABILITIES),
    *(Feature.PACKED_PAGES, Feature.SPLIT_RESULTS),
)


def family_of(problem: Problem) -> str:
    """CK's name for the family of the kernel that makes a problem's results."""
    if problem.direction == "backward":
        return "bwd_dq_dk_dv"
    if problem.is_paged:
        return "fwd_pagedkv"
    return "fwd_splitkv" if problem.num_splits > 1 or problem.has_split_results else "fwd"


def mask_word(mask: Mask) -> str:
    """CK's name for a mask."""
    if mask.is_none:
        return "no"
    if mask.is_causal:
        return "top_left" if mask.top_left else "bottom_right"
    return "generic"
