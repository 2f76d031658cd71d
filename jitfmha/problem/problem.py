"""What a call asks for: one immutable value, made from checked arguments."""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
from collections.abc import Callable
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor

from .arguments import (
    Arguments,
    Bf16Cvt,
    CuSeqlens,
    Descales,
    KeyOptions,
    is_of_tokens,
)
from .checks import (
    check_given,
    check_last_dimension,
    check_layout,
    check_numbers,
    check_prefix_sums,
    not_a_tensor,
    refuse_jit_trace,
)
from .dropout import check_rng_state
from .dtypes import (
    DTYPE_BYTES,
    DTYPE_NAMES,
    EIGHT_BIT_DTYPES,
    FP8_NAMES,
    other_out_dtype,
    out_dtype_of,
    out_dtypes_of,
)
from .features import DTYPE_FEATURES, Feature
from .mask import Mask, parse_mask
from .memory import overlaps_itself
from .packed_pages import (
    are_packed,
    check_packed_shape,
    check_packed_strides,
    shape_of_keys,
    shape_of_values,
    strides_of_keys,
    strides_of_values,
)
from .page_lists import are_lists, pages_of_sequences
from .score_features import SCORE_FEATURES, AskedModifiers, Beside, asked_modifiers, check_modifiers
from .unevenness import halves_of_mean

Mode = Literal["gm0", "gm1"]
Direction = Literal["forward", "backward"]

BF16_CVTS: tuple[Bf16Cvt, ...] = get_args(Bf16Cvt)
"""How probabilities become bf16: rounded to nearest even, to nearest away from zero, or towards
zero. A manifest and AITER number them in this order."""

MAX_HDIM = 576

DescaleStrides = tuple[int, int]
"""Of the scales of 8-bit inputs, between batches and heads, in elements; 0 where one serves all."""


class Sizes(NamedTuple):
    """What changes from call to call of one kind, without changing what is asked for.

    Attributes:
        seqlen_q, seqlen_k: gm0 the lengths of every sequence, gm1 the packed rows of all of them.
            Of keys in pages ``seqlen_k`` is the size of a page.
        q, k, v, out: strides in elements as torch gives them, one for each dimension. Those of
            dimensions of size 1 say nothing, and may be anything. Of packed pages they are those
            that ``packed_pages.py`` tells.
    """

    seqlen_q: int
    seqlen_k: int
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    out: tuple[int, ...]


PlainSizes: TypeAlias = (
    "tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]"
)
""":class:`Sizes` with or without the names, which take time where every call has new lengths."""


class GradientStrides(NamedTuple):
    """Strides of what only a backward pass has, in elements, one for each dimension.

    Those of ``dlse`` are None where nothing depends on the lse.
    """

    dout: tuple[int, ...]
    lse: tuple[int, ...]
    dlse: tuple[int, ...] | None
    dq: tuple[int, ...]
    dk: tuple[int, ...]
    dv: tuple[int, ...]


class Strides(NamedTuple):
    """Strides of q, k, v or out in elements; the head dimension itself is contiguous.

    Those of dimensions of size 1 are replaced: kernels multiply lengths with strides to learn where
    a tensor ends.
    """

    batch: int
    seq: int
    head: int


Unevenness = tuple[int | None, int | None]


class Problem(NamedTuple):
    """One attention call, without the addresses of its tensors.

    In gm0 ``seqlen_q`` and ``seqlen_k`` are the lengths that every sequence has. In gm1 they are
    the numbers of packed rows, ``total_q`` and ``total_k``; the lengths are in ``cu_seqlens``.
    ``dtype`` is that of q, ``kv_dtype`` that of k and v, ``out_dtype`` that of the output. The
    scales of 8-bit inputs are None where they are 1, and where they are those of tokens; those of q
    lie between query heads, not key heads, with ``has_query_head_descale``. With ``has_p_descale``
    probabilities are int8. ``modifiers`` are what score features keep: of a bias its dtype, of
    other tensors whether they are there, of numbers the value. ``gradients`` are there for a
    backward pass, and None for forward. ``atomic_fp32`` says in what kernels add dq up that do so
    with atomics: float32 or q's dtype; None leaves the choice. ``unevenness`` is what
    :func:`unevenness_of` tells of the lengths in gm1, by which forward kernels are chosen.
    """

    mode: Mode
    dtype: str
    kv_dtype: str
    out_dtype: str
    batch: int
    heads_q: int
    heads_k: int
    hdim_q: int
    hdim_v: int
    mask: Mask
    softmax_scale: float
    sizes: Sizes
    has_lse: bool
    is_padded: bool = False
    bf16_cvt: Bf16Cvt = "rtne"
    q_descale: DescaleStrides | None = None
    k_descale: DescaleStrides | None = None
    v_descale: DescaleStrides | None = None
    has_query_head_descale: bool = False
    has_token_k_descale: bool = False
    has_token_v_descale: bool = False
    has_p_descale: bool = False
    modifiers: AskedModifiers = AskedModifiers()
    dropout_p: float = 0.0
    is_paged: bool = False
    has_packed_pages: bool = False
    has_v_at_k: bool = False
    num_splits: int = 0
    has_split_results: bool = False
    gradients: GradientStrides | None = None
    is_deterministic: bool = False
    atomic_fp32: bool | None = None
    unevenness: Unevenness = (None, None)

    @property
    def seqlen_q(self) -> int:
        """Queries of each sequence, or in gm1 of all."""
        return self.sizes.seqlen_q

    @property
    def seqlen_k(self) -> int:
        """Keys of each sequence, or in gm1 of all."""
        return self.sizes.seqlen_k

    @property
    def q(self) -> Strides:
        """The strides of q, by dimension."""
        return self._strides(self.sizes.q, self.seqlen_q, self.heads_q, self.hdim_q)

    @property
    def k(self) -> Strides:
        """The strides of k, by dimension."""
        return self._strides(self.sizes.k, self.seqlen_k, self.heads_k, self.hdim_q)

    @property
    def v(self) -> Strides:
        """The strides of v, by dimension."""
        return self._strides(self.sizes.v, self.seqlen_k, self.heads_k, self.hdim_v)

    @property
    def out(self) -> Strides:
        """The strides of the output, by dimension."""
        return self._strides(self.sizes.out, self.seqlen_q, self.heads_q, self.hdim_v)

    @property
    def other_out_dtype(self) -> str:
        """The output's dtype where it is not that of a new one; else empty."""
        return other_out_dtype(self.dtype, self.out_dtype)

    @property
    def features(self) -> frozenset[Enum]:
        """Everything that a kernel has to know of to serve the call."""
        asked = {
            Feature.DESCALES: self.q_descale or self.k_descale or self.v_descale,
            Feature.EIGHT_BIT_KEYS_AND_VALUES: self.has_8_bit_keys_alone,
            Feature.INT8_PROBABILITIES: self.has_p_descale,
            Feature.OUT_DTYPE: self.other_out_dtype != "",
            Feature.COLUMN_MAJOR_V: self.has_column_major_v,
            Feature.QUERY_HEAD_DESCALES: self.has_query_head_descale,
            Feature.TOKEN_DESCALES: self.has_token_k_descale or self.has_token_v_descale,
            Feature.GROUP_MODE: self.mode == "gm1",
            Feature.PADDED_SEQUENCES: self.is_padded,
            Feature.CAUSAL_MASK: self.mask.is_causal,
            Feature.WINDOW_MASK: not (self.mask.is_none or self.mask.is_causal),
            Feature.TOP_LEFT_MASK: self.mask.top_left,
            Feature.LSE: self.has_lse,
            Feature.BACKWARD: self.gradients,
            Feature.DETERMINISTIC: self.is_deterministic,
            Feature.DROPOUT: self.dropout_p > 0,
            Feature.PAGED_KEYS: self.is_paged,
            Feature.PACKED_PAGES: self.has_packed_pages,
            Feature.NUM_SPLITS: self.num_splits > 0,
            Feature.SPLIT_RESULTS: self.has_split_results,
        }
        given = (feature for feature, is_asked in asked.items() if is_asked not in (None, False))
        rows = zip(SCORE_FEATURES, self.modifiers, strict=True)
        of_scores = (row.feature_of(kept) for row, kept in rows)
        changed = (feature for feature in of_scores if feature is not None)
        return frozenset((DTYPE_FEATURES[self.dtype], *given, *changed))

    @property
    def has_column_major_v(self) -> bool:
        """Whether keys are contiguous in v, not its last dimension; in packed pages some are."""
        return self.has_packed_pages or (self.hdim_v > 1 and self.sizes.v[-1] != 1)

    @property
    def direction(self) -> Direction:
        """Whether results are computed, or their gradients are carried back to the inputs."""
        return "forward" if self.gradients is None else "backward"

    @property
    def is_fp8(self) -> bool:
        """True for fp8 inputs."""
        return self.dtype in FP8_NAMES.values()

    @property
    def dtypes_in_words(self) -> str:
        """The data type of q, and those of k and v and of the output where they are others."""
        of_keys = f", {self.kv_dtype} k and v" if self.has_8_bit_keys_alone else ""
        return self.dtype + of_keys + (f", {self.out_dtype} out" if self.other_out_dtype else "")

    @property
    def has_8_bit_keys_alone(self) -> bool:
        """True where k and v have 8 bits and q has more."""
        return self.kv_dtype != self.dtype

    @property
    def gqa(self) -> int:
        """How many query heads share one key and value head."""
        return self.heads_q // self.heads_k

    @property
    def out_shape(self) -> tuple[int, ...]:
        """gm0 ``(b, sq, hq, hdim_v)``, gm1 ``(total_q, hq, hdim_v)``."""
        row = (self.seqlen_q, self.heads_q, self.hdim_v)
        return (self.batch, *row) if self.mode == "gm0" else row

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """gm0 ``(b, hq, sq)``, gm1 ``(hq, total_q)``."""
        row = (self.heads_q, self.seqlen_q)
        return (self.batch, *row) if self.mode == "gm0" else row

    @property
    def is_empty(self) -> bool:
        """True when there is no output element to compute."""
        return self.batch * self.seqlen_q * self.heads_q == 0

    @property
    def packs(self) -> int:
        """How many sequences lie in a pack, 1 at least; 1 in gm0, where there are no packs."""
        return max(self.batch, 1) if self.mode == "gm1" else 1

    def with_sizes(self, sizes: PlainSizes) -> Problem:
        """Return the problem with other lengths and strides."""
        return self._replace(sizes=Sizes._make(sizes))

    def with_unevenness(self, cu_seqlens: CuSeqlens | None) -> Problem:
        """Return the problem with what they tell of its lengths."""
        return self._replace(unevenness=unevenness_of(cu_seqlens, *self.sizes[:2]))

    def row_stride(self, gradient: str) -> int:
        """Elements between rows of dout, dq, dk or dv; 0 of one row, whose stride is anything."""
        seqlen = self.seqlen_k if gradient in ("dk", "dv") else self.seqlen_q
        return getattr(self.gradients, gradient)[-3] if seqlen > 1 else 0

    def _strides(self, given: tuple[int, ...], seqlen: int, heads: int, hdim: int) -> Strides:
        *batch, seq, head, _ = given
        return Strides(
            batch=batch[0] if batch and self.batch > 1 else 0,
            seq=seq if seqlen > 1 else hdim,
            head=head if heads > 1 else hdim,
        )


def unevenness_of(cu_seqlens: CuSeqlens | None, seqlen_q: int, seqlen_k: int) -> Unevenness:
    """How many times the mean length the longest one is, of queries and keys, in halves.

    Rounded down, and at most eight times. None where ``max_seqlen`` does not tell.
    """
    if cu_seqlens is None:
        return None, None
    sequences = cu_seqlens.q.numel() - 1
    longest_q, longest_k = cu_seqlens.max_seqlen_q, cu_seqlens.max_seqlen_k
    return (
        None if longest_q is None else halves_of_mean(longest_q, sequences, seqlen_q),
        None if longest_k is None else halves_of_mean(longest_k, sequences, seqlen_k),
    )


def make_problem(arguments: Arguments) -> Problem:
    """Check everything about a call that does not need the tensors' data.

    Raises ``TypeError`` or ``ValueError`` naming the argument and its value, and
    ``NotImplementedError`` where torch.jit.trace records.
    """
    refuse_jit_trace()
    for check in CHECKS["kind"]:
        check(arguments)
    sizes = check_sizes(arguments)
    q, k, v, cu_seqlens = arguments.q, arguments.k, arguments.v, arguments.cu_seqlens
    out = arguments.out
    softmax_scale, mask = arguments.softmax_scale, _mask_of(arguments)
    keys, descales = arguments.keys or KeyOptions(), arguments.descales or Descales()
    batch, heads_q, hdim_q = _batch_of(arguments), *q.shape[-2:]
    heads_k = shape_of_keys(k)[-2]
    return Problem(
        mode="gm0" if cu_seqlens is None else "gm1",
        dtype=DTYPE_NAMES[q.dtype],
        kv_dtype=DTYPE_NAMES[k.dtype],
        out_dtype=DTYPE_NAMES[out_dtype_of(q.dtype) if out is None else out.dtype],
        batch=batch,
        heads_q=heads_q,
        heads_k=heads_k,
        hdim_q=hdim_q,
        hdim_v=shape_of_values(v)[-1],
        mask=mask,
        softmax_scale=float(hdim_q) ** -0.5 if softmax_scale is None else float(softmax_scale),
        sizes=sizes,
        has_lse=arguments.return_lse,
        is_padded=cu_seqlens is not None and cu_seqlens.is_padded(keys.block_table is not None),
        bf16_cvt=check_bf16_cvt(arguments.bf16_cvt),
        q_descale=_descale_strides(descales.q, batch, heads_k),
        k_descale=_descale_strides(descales.k, batch, heads_k),
        v_descale=_descale_strides(descales.v, batch, heads_k),
        has_query_head_descale=(
            descales.q is not None and heads_q != heads_k and descales.q.shape == (heads_q,)
        ),
        has_token_k_descale=is_of_tokens(descales.k),
        has_token_v_descale=is_of_tokens(descales.v),
        has_p_descale=descales.p is not None,
        modifiers=asked_modifiers(arguments.modifiers, mask),
        dropout_p=0.0 if arguments.dropout is None else arguments.dropout.p,
        is_paged=keys.block_table is not None,
        has_packed_pages=are_packed(k),
        has_v_at_k=is_v_at_k(k, v),
        num_splits=keys.num_splits,
        has_split_results=keys.out_accum is not None,
        gradients=None,
    )


def is_v_at_k(k: Tensor, v: Tensor) -> bool:
    """Whether narrower values begin where keys do, as those of a latent."""
    if k.shape[-1:] == v.shape[-1:] or not (type(k) is type(v) is Tensor):
        return False
    try:
        return k.data_ptr() == v.data_ptr() != 0
    except RuntimeError:
        return False  # those of transforms have no memory


def check_sizes(arguments: Arguments) -> Sizes:
    """The lengths and strides of a call of a kind that is checked.

    Raises ``TypeError`` or ``ValueError`` naming the argument and its value.
    """
    for check in CHECKS["lengths"]:
        check(arguments)
    q, k, v, out = arguments.q, arguments.k, arguments.v, arguments.out
    *batch, seqlen_q, heads_q, _ = q.shape
    if out is None:
        hdim_v = shape_of_values(v)[-1]
        row = heads_q * hdim_v
        batch_strides = (seqlen_q * row,) if batch else ()
        strides_out: tuple[int, ...] = (*batch_strides, row, hdim_v, 1)
    else:
        strides_out = out.stride()
    of_keys = strides_of_keys(k), strides_of_values(v)
    return Sizes(seqlen_q, shape_of_keys(k)[-3], q.stride(), *of_keys, strides_out)


# ---- The checks ----------------------------------------------------------------------------------

CHECKS: dict[Literal["kind", "lengths"], list[Callable[[Arguments], None]]] = {
    "kind": [],
    "lengths": [],
}
"""Every check of a call, in order. Those of the kind look at nothing that calls of one kind differ
in: lengths, strides and ``max_seqlen``. The others are made again for every new length."""


def _looks_at(what: Literal["kind", "lengths"]) -> Callable[[_Check], _Check]:
    def register(check: _Check) -> _Check:
        CHECKS[what].append(check)
        return check

    return register


_Check = TypeVar("_Check", bound=Callable[[Arguments], None])


@_looks_at("kind")
def _check_options(arguments: Arguments) -> None:
    if not isinstance(arguments.return_lse, bool):
        raise TypeError(f"return_lse must be a bool, got {arguments.return_lse!r}")
    if arguments.softmax_scale is not None:
        check_softmax_scale(arguments.softmax_scale)
    check_bf16_cvt(arguments.bf16_cvt)


def _mask_of(arguments: Arguments) -> Mask:
    mask = arguments.mask
    return mask if isinstance(mask, Mask) else parse_mask(mask, arguments.window_size)


@_looks_at("kind")
def _check_dtypes_and_devices(arguments: Arguments) -> None:
    _check_layouts(arguments)
    q, k, v = arguments[:3]
    if q.dtype not in DTYPE_NAMES:
        raise TypeError(
            f"q has dtype {q.dtype}; served are torch.bfloat16, torch.float16, torch.float32 and "
            "torch.int8, torch.float8_e4m3fnuz and torch.float8_e5m2fnuz on the CPU and on gfx942, "
            "and torch.float8_e4m3fn and torch.float8_e5m2 on the CPU and on gfx950"
        )
    for name, x in (("k", k), ("v", v)):
        check_kv_dtype(name, x.dtype, q.dtype)
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q is on {q.device}; use one device")
    if v.dtype != k.dtype:
        raise TypeError(f"v has dtype {v.dtype}, k has {k.dtype}; they must be equal")


# A sparse tensor has strides as well, and may otherwise be like a dense one that came before.
@_looks_at("lengths")
def _check_layouts(arguments: Arguments) -> None:
    for name, x in zip("qkv", arguments[:3], strict=True):
        if not isinstance(x, Tensor):
            raise not_a_tensor(name, x)
        check_layout(name, x)


@_looks_at("kind")
def _check_shapes(arguments: Arguments) -> None:
    q, k, v = arguments.q, arguments.k, arguments.v
    table = None if arguments.keys is None else arguments.keys.block_table
    if arguments.cu_seqlens is None:
        _check_ndim((("q", q), ("k", k), ("v", v)), 4, "(batch, seqlen, heads, hdim)")
        for name, x in (("k", k), ("v", v)):
            if x.shape[0] != q.shape[0]:
                raise ValueError(f"{name} has batch size {x.shape[0]}, q has {q.shape[0]}")
    else:
        _check_cu_seqlens_tensors(q, arguments.cu_seqlens)
        packed = "(total_tokens, heads, hdim) with cu_seqlens"
        _check_ndim((("q", q),), 3, packed)
        of_keys = ("k", k), ("v", v)
        if table is None:
            _check_ndim(of_keys, 3, packed)
        elif are_packed(k) or are_packed(v):
            for name, x in of_keys:
                check_packed_shape(name, x)
            _check_block_table(table, k, v, _batch_of(arguments))
        else:
            _check_ndim(of_keys, 4, "(num_pages, page_size, heads, hdim) with a block_table")
            _check_block_table(table, k, v, _batch_of(arguments))
    *_, heads_k, hdim_k = shape_of_keys(k)
    *_, heads_v, hdim_v = shape_of_values(v)
    if hdim_k != q.shape[-1]:
        raise ValueError(f"k has hdim {hdim_k}, q has {q.shape[-1]}; they must be equal")
    if heads_v != heads_k:
        raise ValueError(f"v has {heads_v} heads, k has {heads_k}; they must be equal")
    check_hdims(q.shape[-1], hdim_v)
    check_heads(q.shape[-2], heads_k)


def _batch_of(arguments: Arguments) -> int:
    """Return the number of sequences."""
    if arguments.cu_seqlens is None:
        return arguments.q.shape[0]
    return arguments.cu_seqlens.q.shape[0] - 1


@_looks_at("kind")
def _check_descales(arguments: Arguments) -> None:
    q, k, v = arguments.q, arguments.k, arguments.v
    batch, heads_k = _batch_of(arguments), shape_of_keys(k)[-2]
    shapes = q.shape, shape_of_keys(k), shape_of_values(v), q.shape
    descales = arguments.descales or Descales()
    if isinstance(descales.p, Tensor):
        check_p_descale_dtype(q.dtype)
    of_tensors = zip(descales._asdict().items(), (q, k, v, q), shapes, strict=True)
    for (name, x), of, shape in of_tensors:
        if x is not None:
            _check_descale(f"{name}_descale", x, of, shape, batch, heads_k)
    check_int8_products(descales.p is not None, is_of_tokens(descales.v))


@_looks_at("kind")
def _check_modifiers(arguments: Arguments) -> None:
    check_modifiers(arguments.modifiers, _beside(arguments), have_lengths=False)


@_looks_at("kind")
def _check_dropout(arguments: Arguments) -> None:
    state = None if arguments.dropout is None else arguments.dropout.rng_state
    if state is None:
        return
    check_rng_state(state)
    if state.device != arguments.q.device:
        raise ValueError(
            f"rng_state is on {state.device}, q is on {arguments.q.device}; use one device"
        )


@_looks_at("lengths")
def _check_lengths_of_keys(arguments: Arguments) -> None:
    k, v, keys = arguments.k, arguments.v, arguments.keys
    seqlen_k, seqlen_v = shape_of_keys(k)[-3], shape_of_values(v)[-3]
    if seqlen_v != seqlen_k:
        raise ValueError(f"v has seqlen {seqlen_v}, k has {seqlen_k}; they must be equal")
    if keys is not None and keys.block_table is not None and seqlen_k < 1:
        raise ValueError(f"k has shape {tuple(k.shape)}; a page holds at least one key")
    if seqlen_k > 1 and keys is not None and keys.block_table is not None:
        sums = arguments.cu_seqlens
        # What is no tensor is refused where the table is checked, or for want of prefix sums.
        if sums is not None and sums.k_padded is sums.k and are_lists(keys.block_table):
            raise ValueError(
                f"block_table has shape {tuple(keys.block_table.shape)}; a table is (batch, most "
                "pages), and for lists of pages cu_seqlens_k_padded says where each begins"
            )


@_looks_at("lengths")
def _check_descales_of_tokens(arguments: Arguments) -> None:
    descales = arguments.descales or Descales()
    shape_k, shape_v = shape_of_keys(arguments.k), shape_of_values(arguments.v)
    for name, x, shape in (("k_descale", descales.k, shape_k), ("v_descale", descales.v, shape_v)):
        if is_of_tokens(x) and x.shape != (*shape[:-1], 1):
            raise _unexpected_shape(name, x, shape, _batch_of(arguments), shape_k[-2])


@_looks_at("lengths")
def _check_strides(arguments: Arguments) -> None:
    check_last_dimension("q", arguments.q)
    k, v = arguments.k, arguments.v
    if are_packed(k):
        check_packed_strides("k", k)
        check_packed_strides("v", v)
        return
    check_last_dimension("k", k)
    if v.shape[-1] > 1 and v.stride(-1) != 1 and v.shape[-3] > 1 and v.stride(-3) != 1:
        raise ValueError(
            f"v has stride {v.stride(-1)} in its last dimension, which must be contiguous, or its "
            f"keys, which have stride {v.stride(-3)}; call v.contiguous()"
        )


@_looks_at("lengths")
def _check_out(arguments: Arguments) -> None:
    out, q = arguments.out, arguments.q
    if out is None:
        return
    if not isinstance(out, Tensor):
        raise not_a_tensor("out", out)
    check_layout("out", out)
    check_out_dtype(out.dtype, q.dtype)
    if out.device != q.device:
        raise ValueError(f"out is on {out.device}, q is on {q.device}; use one device")
    shape = (*q.shape[:-1], shape_of_values(arguments.v)[-1])
    if tuple(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}; expected {shape}")
    check_last_dimension("out", out)
    if overlaps_itself(out):
        raise ValueError(f"out has strides {out.stride()} with which its elements overlap")


@_looks_at("lengths")
def _check_modifiers_with_lengths(arguments: Arguments) -> None:
    check_modifiers(arguments.modifiers, _beside(arguments), have_lengths=True)


def _beside(arguments: Arguments) -> Beside:
    cu_seqlens = arguments.cu_seqlens
    max_seqlen_k = None if cu_seqlens is None else cu_seqlens.max_seqlen_k
    batch, seqlen_k = _batch_of(arguments), shape_of_keys(arguments.k)[-3]
    return Beside(arguments.q, batch, seqlen_k, cu_seqlens is not None, max_seqlen_k)


def check_out_dtype(out_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Raise ``TypeError`` for an output that no call with queries of ``dtype`` has."""
    dtypes = out_dtypes_of(dtype)
    if out_dtype not in dtypes:
        raise TypeError(
            f"out has dtype {out_dtype}, q has {dtype}; out must be {' or '.join(map(str, dtypes))}"
        )


def check_hdims(hdim_q: int, hdim_v: int) -> None:
    """Raise ``ValueError`` for a head dimension that no kernel has."""
    for name, hdim in (("q and k", hdim_q), ("v", hdim_v)):
        if not 1 <= hdim <= MAX_HDIM:
            raise ValueError(f"hdim of {name} is {hdim}; it must be between 1 and {MAX_HDIM}")


def check_heads(heads_q: int, heads_k: int) -> None:
    """Raise ``ValueError`` where query heads cannot share the key heads evenly."""
    if (heads_k == 0 and heads_q != 0) or (heads_k != 0 and heads_q % heads_k != 0):
        raise ValueError(
            f"q has {heads_q} heads, which is not a multiple of the {heads_k} heads of k and v"
        )


def check_kv_dtype(name: str, dtype: torch.dtype, q_dtype: torch.dtype) -> None:
    """Raise ``TypeError`` where k or v, of that name, is neither as q nor of 8 bits beside more."""
    if dtype == q_dtype or (dtype in EIGHT_BIT_DTYPES and q_dtype not in EIGHT_BIT_DTYPES):
        return
    raise TypeError(
        f"{name} has dtype {dtype}, q has {q_dtype}; they must be equal, or {name} of 8 bits and "
        "q of more bits"
    )


def check_descale_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` for a scale, of that name, of a tensor that has none."""
    if dtype not in EIGHT_BIT_DTYPES:
        raise ValueError(
            f"{name} is the scale of 8-bit inputs, {name[0]} has dtype {dtype}; use None"
        )


def check_p_descale_dtype(q_dtype: torch.dtype) -> None:
    """Raise ``ValueError`` for a scale of probabilities that are not int8."""
    if q_dtype != torch.int8:
        raise ValueError(
            f"p_descale is the scale of int8 probabilities, for which q, k and v are int8; q has "
            f"dtype {q_dtype}; use None"
        )


def check_int8_products(has_p_descale: bool, has_token_v_descale: bool) -> None:
    """Raise ``ValueError`` for integer products over values that have no scale in common."""
    if has_p_descale and has_token_v_descale:
        raise ValueError(
            "v_descale is one for each token; with p_descale the sums over tokens are those of "
            "integers: give values of a head one scale, or probabilities none"
        )


class ElementBytes(NamedTuple):
    """How large an element of each tensor is."""

    q: int
    kv: int
    out: int


def element_bytes(problem: Problem) -> ElementBytes:
    """Return the sizes of elements, in bytes."""
    dtypes = problem.dtype, problem.kv_dtype, problem.out_dtype
    return ElementBytes(*(DTYPE_BYTES[dtype] for dtype in dtypes))


def check_bf16_cvt(bf16_cvt: str) -> Bf16Cvt:
    """Return ``bf16_cvt``, or raise ``ValueError`` where it is not known."""
    for known in BF16_CVTS:
        if isinstance(bf16_cvt, str) and bf16_cvt == known:
            return known
    raise ValueError(f"bf16_cvt={bf16_cvt!r} is not known; use {', '.join(map(repr, BF16_CVTS))}")


def check_softmax_scale(softmax_scale: float) -> float:
    """``softmax_scale`` as a float; the kernels need it finite and > 0, also as float32."""
    check_numbers(softmax_scale=softmax_scale)
    try:
        as_float32 = ctypes.c_float(softmax_scale).value
    except OverflowError:
        as_float32 = math.inf
    if not (math.isfinite(as_float32) and as_float32 > 0):
        raise ValueError(
            f"softmax_scale={softmax_scale!r} must be finite and greater than 0 (in float32)"
        )
    return float(softmax_scale)


def check_cu_seqlens_values(
    sizes: PlainSizes, cu_seqlens: CuSeqlens, block_table: Tensor | None = None
) -> bool:
    """Check the numbers inside ``cu_seqlens``; reads the tensors' data.

    The pages that a ``block_table`` names are not looked at; the kernel does.

    Returns True when the sequences cover every row of q, so that no row of the output is left
    over. Raises ``ValueError`` naming the argument, the position and the value.
    """
    q, k, q_padded, k_padded, max_seqlen_q, max_seqlen_k = cu_seqlens
    used_rows = _check_side("q", q, q_padded, max_seqlen_q, sizes[0])
    if block_table is None:
        _check_side("k", k, k_padded, max_seqlen_k, sizes[1])
    else:
        _check_paged_side(cu_seqlens, sizes[1], block_table)
    return used_rows == sizes[0]


def _check_side(side: str, plain: Tensor, padded: Tensor, max_seqlen: int | None, rows: int) -> int:
    """Check the prefix sums of q, or of k and v; returns how many rows the sequences have."""
    sums = plain.tolist()
    lengths = _lengths_of(sums)
    # The quick question first: every call comes by here.
    if sums[0] != 0 or (lengths and min(lengths) < 0):
        _check_sums(f"cu_seqlens_{side}", sums)
    used_rows: int = sums[-1]
    if padded is not plain:
        sums = padded.tolist()
        rooms = _lengths_of(sums)
        if sums[0] != 0 or any(map(operator.lt, rooms, lengths)):
            name = f"cu_seqlens_{side}_padded"
            _check_sums(name, sums)
            i = [*map(operator.lt, rooms, lengths)].index(True)
            raise ValueError(
                f"{name} leaves {rooms[i]} rows for sequence {i}, "
                f"which has {lengths[i]} by cu_seqlens_{side}"
            )
    if sums[-1] > rows:
        name = f"cu_seqlens_{side}" if padded is plain else f"cu_seqlens_{side}_padded"
        raise ValueError(f"{name} ends at {sums[-1]}, past the {rows} rows of {side}")
    if max_seqlen is not None and max_seqlen < max(lengths, default=0):
        raise ValueError(
            f"max_seqlen_{side}={max_seqlen} is less than the longest sequence, "
            f"{max(lengths)} by cu_seqlens_{side}"
        )
    return used_rows


def _check_paged_side(cu_seqlens: CuSeqlens, page_size: int, block_table: Tensor) -> None:
    plain = cu_seqlens.k
    if are_lists(block_table):
        plain = plain - plain[:1]  # kernels look at differences alone
    sums = plain.tolist()
    _check_side("k", plain, plain, cu_seqlens.max_seqlen_k, sums[-1])
    pages, rows = [block_table.shape[-1]] * (len(sums) - 1), "a row of block_table"
    if are_lists(block_table):
        starts, rows = cu_seqlens.k_padded.tolist(), "its list in block_table"
        pages = _lengths_of(starts)
        if min(pages, default=0) < 0 or starts[0] < 0 or starts[-1] > block_table.shape[0]:
            raise ValueError(
                f"cu_seqlens_k_padded is {starts}; expected ascending numbers up to the "
                f"{block_table.shape[0]} entries of block_table"
            )
    lengths, rooms = _lengths_of(sums), [count * page_size for count in pages]
    if any(map(operator.lt, rooms, lengths)):
        i = [*map(operator.lt, rooms, lengths)].index(True)
        raise ValueError(
            f"sequence {i} has {lengths[i]} keys by cu_seqlens_k; {rows} has room for {rooms[i]} "
            f"of them, {pages[i]} pages of {page_size}"
        )


def _lengths_of(sums: list[int]) -> list[int]:
    """What prefix sums are of."""
    return [*map(operator.sub, sums[1:], sums)]  # a comprehension takes twice as long


def _check_ndim(tensors: tuple[tuple[str, Tensor], ...], ndim: int, wanted: str) -> None:
    for name, x in tensors:
        if x.dim() != ndim:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {wanted}")


def _check_cu_seqlens_tensors(q: Tensor, cu_seqlens: CuSeqlens) -> None:
    cu_q = cu_seqlens.q
    for name, x in cu_seqlens.named():
        check_prefix_sums(name, x, "q", q)
        if x.shape[0] != cu_q.shape[0]:
            raise ValueError(
                f"{name} has {x.shape[0]} entries, cu_seqlens_q has {cu_q.shape[0]}; "
                "both need batch + 1"
            )
        if x.shape[0] > 1 and x.stride(0) != 1:
            raise ValueError(f"{name} has stride {x.stride(0)}; it must be contiguous")
        if x.is_neg():
            raise ValueError(f"{name} has torch's negative bit; call {name}.resolve_neg()")


def _check_block_table(block_table: Tensor, k: Tensor, v: Tensor, batch: int) -> None:
    check_given("block_table", block_table, k)
    if block_table.dtype != torch.int32:
        raise TypeError(f"block_table has dtype {block_table.dtype}; it must be torch.int32")
    if block_table.dim() not in (1, 2) or (block_table.dim() == 2 and len(block_table) != batch):
        raise ValueError(
            f"block_table has shape {tuple(block_table.shape)}; expected (batch, most pages), the "
            f"batch being {batch}, or lists of one dimension"
        )
    check_last_dimension("block_table", block_table)
    if block_table.is_neg():
        raise ValueError("block_table has torch's negative bit; call block_table.resolve_neg()")
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"v has {v.shape[0]} pages, k has {k.shape[0]}; they must be equal")


def check_pages(cu_seqlens: CuSeqlens, block_table: Tensor, k: Tensor) -> None:
    """Raise ``ValueError`` where sequences have pages that are not there; reads the tensors."""
    num_pages, page_size, _, _ = shape_of_keys(k)
    counts = [-(-length // page_size) for length in cu_seqlens.k.diff().tolist()]
    named = pages_of_sequences(block_table, cu_seqlens.k_padded)
    for sequence, (pages, count) in enumerate(zip(named, counts, strict=True)):
        used = pages[:count]
        is_wrong = (used < 0) | (used >= num_pages)
        if is_wrong.any():
            place = int(is_wrong.nonzero()[0])
            raise ValueError(
                f"block_table names page {int(used[place])} as page {place} of sequence "
                f"{sequence}; k has {num_pages} pages"
            )


def _check_sums(name: str, sums: list[int]) -> None:
    """Raise ``ValueError`` where numbers are no prefix sums."""
    if sums[0] != 0:
        raise ValueError(f"{name} starts at {sums[0]}; it must start at 0")
    for i, (start, end) in enumerate(itertools.pairwise(sums)):
        if end < start:
            raise ValueError(f"{name} decreases at entry {i + 1}, from {start} to {end}")


def _check_descale(
    name: str, x: Tensor, of: Tensor, shape: tuple[int, ...], batch: int, heads_k: int
) -> None:
    """Check the scale of a tensor, given under the name of its argument; ``shape`` is in rows."""
    if not isinstance(x, Tensor):
        raise not_a_tensor(name, x)
    check_descale_dtype(name, of.dtype)
    if x.layout != torch.strided or x.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be a strided torch.float32")
    if x.device != of.device:
        raise ValueError(f"{name} is on {x.device}, q is on {of.device}; use one device")
    may_be_of_tokens = name in ("k_descale", "v_descale") and x.dim() == len(shape)
    if not may_be_of_tokens and x.shape not in ((1,), (batch, heads_k), (shape[-2],)):
        raise _unexpected_shape(name, x, shape, batch, heads_k)


def _unexpected_shape(
    name: str, x: Tensor, shape: tuple[int, ...], batch: int, heads_k: int
) -> ValueError:
    """The error for a scale of no shape that one has."""
    of_tokens = ""
    if name in ("k_descale", "v_descale"):
        of_tokens = f", or one for each token, which is {(*shape[:-1], 1)}"
    return ValueError(
        f"{name} has shape {tuple(x.shape)}; expected (1,), (heads of {name[0]},), which is "
        f"{(shape[-2],)}, (batch, heads of k), which is {(batch, heads_k)}{of_tokens}"
    )


def _descale_strides(x: Tensor | None, batch: int, heads_k: int) -> DescaleStrides | None:
    if x is None or is_of_tokens(x):
        return None
    if x.shape == (1,):
        return 0, 0
    return (x.stride(0), x.stride(1)) if x.shape == (batch, heads_k) else (0, x.stride(0))
