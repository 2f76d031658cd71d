"""What a call asks for: one immutable value, made from checked arguments."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .mask import Mask

Mode = Literal["gm0", "gm1"]
Bf16Cvt = Literal["rtne", "rtna", "rtz"]

BF16_CVTS: tuple[Bf16Cvt, ...] = get_args(Bf16Cvt)
"""How probabilities become bf16: rounded to nearest even, to nearest away from zero, or towards
zero. A manifest and AITER number them in this order."""

FP8_NAMES = {
    torch.float8_e4m3fnuz: "fp8_e4m3fnuz",
    torch.float8_e4m3fn: "fp8_e4m3fn",
}
DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    **FP8_NAMES,
}
MAX_HDIM = 512

DescaleStrides = tuple[int, int]
"""Of fp8 scales of shape (b, hk), between batches and heads, in elements; 0 and 0 for (1,)."""


@dataclass(frozen=True)
class Strides:
    """Strides of q, k, v or out in elements; the head dimension itself is contiguous."""

    batch: int
    seq: int
    head: int


@dataclass(frozen=True)
class Problem:
    """One attention call, without the addresses of its tensors.

    In gm0 ``seqlen_q`` and ``seqlen_k`` are the lengths that every sequence has. In gm1 they are
    the numbers of packed rows, ``total_q`` and ``total_k``; the lengths are in ``cu_seqlens``.
    The scales of fp8 inputs are None where they are 1.
    """

    mode: Mode
    dtype: str
    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    hdim_q: int
    hdim_v: int
    mask: Mask
    softmax_scale: float
    q: Strides
    k: Strides
    v: Strides
    out: Strides
    has_lse: bool
    bf16_cvt: Bf16Cvt = "rtne"
    q_descale: DescaleStrides | None = None
    k_descale: DescaleStrides | None = None
    v_descale: DescaleStrides | None = None

    @property
    def is_fp8(self) -> bool:
        """True for 8-bit inputs, whose output is bf16."""
        return self.dtype in FP8_NAMES.values()

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


def make_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    mask: Mask,
    has_lse: bool,
    out: Tensor | None,
    cu_seqlens: Sequence[Tensor] | None,
    bf16_cvt: Bf16Cvt = "rtne",
    descales: Sequence[Tensor | None] | None = None,
) -> Problem:
    """Check everything about a call that does not need the tensors' data.

    ``cu_seqlens`` holds cu_seqlens_q, cu_seqlens_k and the padded two (the same tensors where
    there is no padding), or is None for gm0. ``descales`` are those of q, k and v. Raises
    ``TypeError`` or ``ValueError`` naming the argument and its value.
    """
    _check_tensors(q, k, v)
    if cu_seqlens is None:
        mode: Mode = "gm0"
        _check_ndim(q, k, v, 4, "(batch, seqlen, heads, hdim)")
        batch = q.shape[0]
        for name, x in (("k", k), ("v", v)):
            if x.shape[0] != batch:
                raise ValueError(f"{name} has batch size {x.shape[0]}, q has {batch}")
    else:
        mode = "gm1"
        _check_ndim(q, k, v, 3, "(total_tokens, heads, hdim) with cu_seqlens")
        batch = _check_cu_seqlens_tensors(q, *cu_seqlens)
        if mask.top_left:
            raise ValueError(
                f"mask {mask} is not served with cu_seqlens (gm1); "
                "use 0 (none) or 2 (causal, bottom-right)"
            )
    seqlen_q, heads_q, hdim_q = q.shape[-3:]
    seqlen_k, heads_k, _ = k.shape[-3:]
    if k.shape[-1] != hdim_q:
        raise ValueError(f"k has hdim {k.shape[-1]}, q has {hdim_q}; they must be equal")
    if v.shape[-3] != seqlen_k:
        raise ValueError(f"v has seqlen {v.shape[-3]}, k has {seqlen_k}; they must be equal")
    if v.shape[-2] != heads_k:
        raise ValueError(f"v has {v.shape[-2]} heads, k has {heads_k}; they must be equal")
    hdim_v = v.shape[-1]
    for name, hdim in (("q and k", hdim_q), ("v", hdim_v)):
        if not 1 <= hdim <= MAX_HDIM:
            raise ValueError(f"hdim of {name} is {hdim}; it must be between 1 and {MAX_HDIM}")
    if (heads_k == 0 and heads_q != 0) or (heads_k != 0 and heads_q % heads_k != 0):
        raise ValueError(
            f"q has {heads_q} heads, which is not a multiple of the {heads_k} heads of k and v"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_last_dimension(name, x)
    out_shape = (*q.shape[:-1], hdim_v)
    if out is None:
        out_strides = _contiguous(mode, seqlen_q, heads_q, hdim_v)
    else:
        _check_out(out, q, out_shape)
        out_strides = _strides(out)
    return Problem(
        mode=mode,
        dtype=DTYPE_NAMES[q.dtype],
        batch=batch,
        heads_q=heads_q,
        heads_k=heads_k,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        hdim_q=hdim_q,
        hdim_v=hdim_v,
        mask=mask,
        softmax_scale=check_softmax_scale(softmax_scale),
        q=_strides(q),
        k=_strides(k),
        v=_strides(v),
        out=out_strides,
        has_lse=has_lse,
        bf16_cvt=check_bf16_cvt(bf16_cvt),
        **_descale_strides(q, batch, heads_k, descales),
    )


def out_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """The output's dtype for inputs of ``dtype``: the same, and bfloat16 for fp8."""
    return torch.bfloat16 if dtype in FP8_NAMES else dtype


def check_bf16_cvt(bf16_cvt: str) -> Bf16Cvt:
    """``bf16_cvt`` if it is known."""
    for known in BF16_CVTS:
        if isinstance(bf16_cvt, str) and bf16_cvt == known:
            return known
    raise ValueError(f"bf16_cvt={bf16_cvt!r} is not known; use {', '.join(map(repr, BF16_CVTS))}")


def check_softmax_scale(softmax_scale: float) -> float:
    """``softmax_scale`` as a float; the kernels need it finite and > 0, also as float32."""
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(
            f"softmax_scale must be a number, got {type(softmax_scale).__name__} "
            f"({softmax_scale!r})"
        )
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
    problem: Problem,
    cu_seqlens: Sequence[Tensor],
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> bool:
    """Check the numbers inside ``cu_seqlens``; reads the tensors' data.

    Returns True when the sequences cover every row of q, so that no row of the output is left
    over. Raises ``ValueError`` naming the argument, the position and the value.
    """
    q_covered = True
    sides = (
        ("q", cu_seqlens[0], cu_seqlens[2], max_seqlen_q, problem.seqlen_q),
        ("k", cu_seqlens[1], cu_seqlens[3], max_seqlen_k, problem.seqlen_k),
    )
    for side, logical, physical, longest, rows in sides:
        name = f"cu_seqlens_{side}"
        ends = logical.tolist()
        lengths = _lengths(name, ends)
        if physical is not logical:
            name = f"cu_seqlens_{side}_padded"
            ends = physical.tolist()
            for i, (length, room) in enumerate(zip(lengths, _lengths(name, ends), strict=True)):
                if room < length:
                    raise ValueError(
                        f"{name} leaves {room} rows for sequence {i}, "
                        f"which has {length} by cu_seqlens_{side}"
                    )
            if side == "q":
                q_covered = sum(lengths) == rows
        elif side == "q":
            q_covered = ends[-1] == rows
        if ends[-1] > rows:
            raise ValueError(f"{name} ends at {ends[-1]}, past the {rows} rows of {side}")
        if longest is not None and longest < max(lengths, default=0):
            raise ValueError(
                f"max_seqlen_{side}={longest} is less than the longest sequence, "
                f"{max(lengths)} by cu_seqlens_{side}"
            )
    return q_covered


def may_overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two strided views of equal item size share an element.

    Exact for the views that attention sees (slices, permutations and packed buffers). A pair too
    tangled to decide in a bounded number of steps counts as overlapping.
    """
    if a.numel() == 0 or b.numel() == 0:
        return False
    item = a.element_size()
    # The views meet where  offset_a + sum(s_a * i) == offset_b + sum(s_b * j).  With every term
    # moved to one side, that is a sum of stride times a bounded integer equal to a constant.
    distance, rest = divmod(b.data_ptr() - a.data_ptr(), item)
    low = high = 0
    terms: dict[int, int] = {}
    for x, sign in ((a, 1), (b, -1)):
        for size, stride in zip(x.shape, x.stride(), strict=True):
            if size > 1 and stride > 0:
                terms[stride] = terms.get(stride, 0) + size - 1
                if sign > 0:
                    high += stride * (size - 1)
                else:
                    low -= stride * (size - 1)
    if not low <= distance <= high:
        return False
    if rest:
        return True
    # Shift every b term by its range, so that all integers run from 0 up to their bound.
    return _reachable(distance - low, sorted(terms.items(), reverse=True))


def overlaps_itself(x: Tensor) -> bool:
    """Whether two indices of a strided view name one element (an expanded ``out``, say)."""
    reach = 0
    if x.numel() == 0:
        return False
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _reachable(target: int, terms: list[tuple[int, int]], budget: int = 20_000) -> bool:
    """Whether ``target`` is a sum of ``stride * n`` with ``0 <= n <= bound`` for each term."""
    reach = [0] * (len(terms) + 1)
    for i in range(len(terms) - 1, -1, -1):
        reach[i] = reach[i + 1] + terms[i][0] * terms[i][1]
    stack = [(0, target)]
    while stack:
        budget -= 1
        if budget == 0:
            return True
        i, left = stack.pop()
        if left == 0:
            return True
        if i == len(terms) or not 0 < left <= reach[i]:
            continue
        stride, bound = terms[i]
        fewest = max(0, -(-(left - reach[i + 1]) // stride))
        most = min(bound, left // stride)
        stack.extend((i + 1, left - stride * n) for n in range(fewest, most + 1))
    return False


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout != torch.strided:
            raise TypeError(f"{name} has layout {x.layout}; only torch.strided is served")
    if q.dtype not in DTYPE_NAMES:
        raise TypeError(
            f"q has dtype {q.dtype}; served are torch.bfloat16 and torch.float16, "
            "torch.float32 on the CPU, torch.float8_e4m3fnuz on gfx942 and torch.float8_e4m3fn "
            "on gfx950"
        )
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, q has {q.dtype}; they must be equal")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q is on {q.device}; use one device")


def _check_ndim(q: Tensor, k: Tensor, v: Tensor, ndim: int, wanted: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != ndim:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {wanted}")


def _check_last_dimension(name: str, x: Tensor) -> None:
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {x.stride(-1)} in its last dimension, which must be contiguous; "
            f"call {name}.contiguous()"
        )


def _check_cu_seqlens_tensors(
    q: Tensor, cu_q: Tensor, cu_k: Tensor, cu_q_padded: Tensor, cu_k_padded: Tensor
) -> int:
    named = (
        ("cu_seqlens_q", cu_q),
        ("cu_seqlens_k", cu_k),
        ("cu_seqlens_q_padded", cu_q_padded),
        ("cu_seqlens_k_padded", cu_k_padded),
    )
    for name, x in named:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout != torch.strided:
            raise TypeError(f"{name} has layout {x.layout}; only torch.strided is served")
        if x.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {x.dtype}; it must be torch.int32")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q is on {q.device}; use one device")
        if x.dim() != 1 or x.shape[0] < 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (batch + 1,)")
        if x.shape[0] != cu_q.shape[0]:
            raise ValueError(
                f"{name} has {x.shape[0]} entries, cu_seqlens_q has {cu_q.shape[0]}; "
                "both need batch + 1"
            )
        if x.shape[0] > 1 and x.stride(0) != 1:
            raise ValueError(f"{name} has stride {x.stride(0)}; it must be contiguous")
    return cu_q.shape[0] - 1


def _lengths(name: str, ends: list[int]) -> list[int]:
    if ends[0] != 0:
        raise ValueError(f"{name} starts at {ends[0]}; it must start at 0")
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    if lengths and min(lengths) < 0:
        i = next(i for i, length in enumerate(lengths) if length < 0)
        raise ValueError(f"{name} decreases at entry {i + 1}, from {ends[i]} to {ends[i + 1]}")
    return lengths


def _check_out(out: Tensor, q: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a torch.Tensor, got {type(out).__name__}")
    if out.layout != torch.strided:
        raise TypeError(f"out has layout {out.layout}; only torch.strided is served")
    if out.dtype != out_dtype_of(q.dtype):
        rule = "out must be torch.bfloat16" if q.dtype in FP8_NAMES else "they must be equal"
        raise TypeError(f"out has dtype {out.dtype}, q has {q.dtype}; {rule}")
    if out.device != q.device:
        raise ValueError(f"out is on {out.device}, q is on {q.device}; use one device")
    if tuple(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}; expected {shape}")
    _check_last_dimension("out", out)
    if overlaps_itself(out):
        raise ValueError(f"out has strides {out.stride()} with which its elements overlap")


def _descale_strides(
    q: Tensor, batch: int, heads_k: int, descales: Sequence[Tensor | None] | None
) -> dict[str, DescaleStrides]:
    """The strides of the scales that are given, under the names of their arguments."""
    strides: dict[str, DescaleStrides] = {}
    for name, x in zip(("q_descale", "k_descale", "v_descale"), descales or (), strict=False):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__} ({x!r})")
        if q.dtype not in FP8_NAMES:
            raise ValueError(f"{name} is the scale of fp8 inputs, q has dtype {q.dtype}; use None")
        if x.layout != torch.strided or x.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {x.dtype}; it must be a strided torch.float32")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q is on {q.device}; use one device")
        if x.shape == (1,):
            strides[name] = (0, 0)
        elif x.shape == (batch, heads_k):
            strides[name] = (x.stride(0), x.stride(1))
        else:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; expected (1,) or (batch, heads of k), "
                f"which is {(batch, heads_k)}"
            )
    return strides


def _strides(x: Tensor) -> Strides:
    """The strides, those of dimensions of size 1 replaced: they say nothing, and can be anything.

    Kernels multiply lengths with them to learn where a tensor ends.
    """
    *batches, seqlen, heads, hdim = x.shape
    *batch, seq, head, _ = x.stride()
    return Strides(
        batch=batch[0] if batches and batches[0] > 1 else 0,
        seq=seq if seqlen > 1 else hdim,
        head=head if heads > 1 else hdim,
    )


def _contiguous(mode: Mode, seqlen: int, heads: int, hdim: int) -> Strides:
    row = heads * hdim
    return Strides(seqlen * row if mode == "gm0" else 0, row, hdim)
