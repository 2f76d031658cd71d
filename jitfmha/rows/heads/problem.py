"""What a call over heads asks for: its arguments, their checks, and what kernels are made for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...jit.shared_struct import FLOAT, INT32, INT64, Array, Pointer, SharedStruct
from ...problem.checks import (
    check_all_beside,
    check_last_dimension,
    check_not_negative,
    describe,
)
from ...problem.dtypes import DTYPE_NAMES
from ...problem.memory import overlaps_itself
from ...problem.packed_pages import (
    are_packed,
    check_packed_shape,
    check_packed_strides,
    shape_of_keys,
    shape_of_values,
)
from ..problem import QUANTISED_DTYPES, ROW_DTYPES, check_eps, check_weights

MOST_HDIM = 576
MOST_NUMBER = 2**31 - 1

# ---- What Python packs for a kernel, on the CPU and on GPUs --------------------------------------

_OF_TOKENS = SharedStruct("TokenStrides", dict.fromkeys(("batch", "token", "head"), INT64))
_HEADS = SharedStruct(
    "Heads",
    {
        # In elements. Pieces, of packed pages, have 16 bytes of a row each, of values of a column.
        **dict.fromkeys(("x", "out"), _OF_TOKENS),
        **dict.fromkeys(("page", "key", "head", "piece"), INT64),
        "scale": INT32,  # between the scales of heads; 0: there is one
        **dict.fromkeys(("heads", "hdim"), INT32),
        # Whether heads are rotated, and whether each token of a sequence by a position of its own.
        **dict.fromkeys(("rotates", "moves"), INT32),
    },
)
# Queries, keys, values: what they lack is null.
_THREE = Array(Pointer("const void"), 3)
CALL = SharedStruct(
    "HeadsCall",
    {
        "x": _THREE,
        "weight": _THREE,
        **dict.fromkeys(("out", "cache"), Array(Pointer("void"), 3)),
        "scale": Array(Pointer("const float"), 3),
        **dict.fromkeys(("cos", "sin"), Pointer("const void")),
        **dict.fromkeys(("positions", "slots"), Pointer("const long")),
        **dict.fromkeys(("seqlens", "block_table", "batch_idx"), Pointer("const int")),
        "of": Array(_HEADS, 3),
        **dict.fromkeys(("cos_stride", "sin_stride", "table_stride"), INT64),
        **dict.fromkeys(("tokens", "seqlen", "positions_end"), INT32),
        # Numbers of a row of cos and of sin; of the cache, and of the block table.
        **dict.fromkeys(("half", "pages", "page_size", "table_pages"), INT32),
        "eps": FLOAT,
        "workgroups": Array(INT32, 2),  # that a GPU has for keys, and for values
        "turns": INT32,  # blocks of heads that each has, if it has several
    },
)
STRUCTS = _OF_TOKENS, _HEADS, CALL

# ---- What a call asks for ------------------------------------------------------------------------


class HeadArguments(NamedTuple):
    """The arguments of one call; tensors that it does without are None.

    ``q_out`` and ``k_out`` are where results go; without ``q_moves`` all queries of a sequence are
    at its first position.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    q_out: Tensor | None = None
    k_out: Tensor | None = None
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    positions: Tensor | None = None
    k_cache: Tensor | None = None
    v_cache: Tensor | None = None
    slots: Tensor | None = None
    cache_seqlens: Tensor | None = None
    block_table: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    eps: float = 1e-6
    interleaved: bool = False
    q_moves: bool = True

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All that is one."""
        return self[:N_TENSORS]  # type: ignore[return-value]

    @property
    def first(self) -> Tensor:
        """The first of q, k and v."""
        for x in (self.q, self.k, self.v):
            if x is not None:
                return x
        raise ValueError("q, k and v are None; at least one of them is needed")


N_TENSORS = HeadArguments._fields.index("eps")


class HeadTraits(NamedTuple):
    """What a kernel is made for, but for its target; dtypes by their names in kernels."""

    dtype: str
    weight_dtype: str
    table_dtype: str
    cache_dtype: str
    is_interleaved: bool
    is_packed: bool

    @property
    def name(self) -> str:
        others = {"weight": self.weight_dtype, "table": self.table_dtype, "cache": self.cache_dtype}
        words = [f"{dtype}{of}" for of, dtype in others.items() if dtype != self.dtype]
        words += [word for word in ("interleaved", "packed") if getattr(self, f"is_{word}")]
        return "_".join((self.dtype, *words))


def traits_of(arguments: HeadArguments) -> HeadTraits:
    """The traits of a call, after all checks.

    Raises:
        TypeError, ValueError: an argument breaks a rule; the text names it and its value.
        NotImplementedError: nothing serves the call.
    """
    first = arguments.first
    check_all_beside(zip(arguments._fields, arguments.tensors, strict=False))
    check_not_negative(k_cache=arguments.k_cache, v_cache=arguments.v_cache)
    _check_heads(arguments, first)
    q_weight, k_weight = arguments.q_weight, arguments.k_weight
    of_heads = ("q_weight", q_weight, arguments.q), ("k_weight", k_weight, arguments.k)
    weights = check_weights(of_heads, first.dtype)
    tables = _check_tables(arguments, first)
    _check_numbers(arguments, first)
    cache_dtype = _check_caches(arguments, first)
    check_eps(arguments.eps)
    return HeadTraits(
        *(DTYPE_NAMES[first.dtype], DTYPE_NAMES[weights], DTYPE_NAMES[tables]),
        DTYPE_NAMES[cache_dtype],
        arguments.interleaved,
        arguments.k_cache is not None and are_packed(arguments.k_cache),
    )


def _check_heads(arguments: HeadArguments, first: Tensor) -> None:
    q, k, v = arguments[:3]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is None:
            continue
        if x.dtype not in (*ROW_DTYPES, torch.int8) or x.dtype != first.dtype:
            raise NotImplementedError(
                f"{name} has dtype {x.dtype}; all of q, k and v are float32, bfloat16 or float16, "
                "or k and v int8"
            )
        if x.dtype == torch.int8 and any(
            each is not None for each in (q, arguments.k_weight, arguments.cos)
        ):
            raise NotImplementedError(f"{name} is int8, which goes into a cache as it is")
        if x.dim() not in (3, 4) or x.shape[:-2] != first.shape[:-2]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; expected (b, s, heads, hdim) or (tokens, "
                f"heads, hdim), with the tokens of {tuple(first.shape)}"
            )
        if not 1 <= x.shape[-1] <= MOST_HDIM:
            raise ValueError(f"{name} has an hdim of {x.shape[-1]}; expected 1 to {MOST_HDIM}")
        if x.shape[:-1].numel() > MOST_NUMBER:
            raise NotImplementedError(f"{name} is {describe(x)}; 2**31 - 1 heads are served")
        check_last_dimension(name, x)
    if q is not None and k is not None and q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has an hdim of {q.shape[-1]}, k of {k.shape[-1]}; both must agree")
    caches = ("k_cache", arguments.k_cache), ("v_cache", arguments.v_cache)
    for name, out in (("q", arguments.q_out), ("k", arguments.k_out), *caches):
        if out is not None and overlaps_itself(out):
            raise ValueError(f"{name} has strides {out.stride()}; several of its elements are one")


def _check_tables(arguments: HeadArguments, first: Tensor) -> torch.dtype:
    cos, sin = arguments.cos, arguments.sin
    if cos is None or sin is None:
        if cos is not sin:
            raise ValueError("cos and sin go together; one of them is missing")
        return first.dtype
    hdim = min(x.shape[-1] for x in (arguments.q, arguments.k) if x is not None)
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[-1] > hdim:
        raise ValueError(
            f"cos and sin have shapes {tuple(cos.shape)} and {tuple(sin.shape)}; expected one "
            "shape (positions, rotary_dim / 2), with a rotary_dim of at most the hdim of q and k, "
            f"{hdim}"
        )
    if cos.dtype not in ROW_DTYPES or sin.dtype != cos.dtype:
        raise NotImplementedError(
            f"cos has dtype {cos.dtype} and sin {sin.dtype}; both are float32, bfloat16 or float16"
        )
    check_last_dimension("cos", cos)
    check_last_dimension("sin", sin)
    return cos.dtype


def _check_numbers(arguments: HeadArguments, first: Tensor) -> None:
    tokens, batch = first.shape[:-2], 1 if first.dim() == 3 else first.shape[0]
    table = arguments.block_table
    columns = 1 if table is None or table.dim() == 0 else table.shape[-1]
    for name, shape, dtypes in (
        *((name, tokens, (torch.int64,)) for name in ("positions", "slots")),
        ("cache_seqlens", (batch,), (torch.int32,)),
        ("block_table", (batch, columns), (torch.int32,)),
        ("cache_batch_idx", (batch,), (torch.int32,)),
    ):
        x = getattr(arguments, name)
        if x is None:
            continue
        if x.dtype not in dtypes:
            raise TypeError(f"{name} must be {dtypes[0]}, got {describe(x)}")
        if x.shape != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {tuple(shape)}")
    if arguments.slots is not None:
        for name in ("block_table", "cache_batch_idx"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"{name} does not go with slots, which say all of a token's place")
    elif table is not None and arguments.cache_batch_idx is not None:
        raise ValueError(f"cache_batch_idx does not go with a block_table ({describe(table)})")


def _check_caches(arguments: HeadArguments, first: Tensor) -> torch.dtype:
    k, v, k_cache, v_cache = arguments.k, arguments.v, arguments.k_cache, arguments.v_cache
    scales = ("k_scale", arguments.k_scale), ("v_scale", arguments.v_scale)
    if k_cache is None or v_cache is None:
        given = {"v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": arguments.slots}
        given |= {"block_table": arguments.block_table, **dict(scales)}
        name = next((name for name, x in given.items() if x is not None), None)
        if name is not None:
            raise ValueError(f"{name} ({describe(given[name])}) needs k_cache and v_cache")
        return first.dtype
    if k is None or v is None:
        raise ValueError(f"k_cache ({describe(k_cache)}) needs k and v")
    if arguments.slots is None and arguments.cache_seqlens is None:
        raise ValueError(
            f"k_cache ({describe(k_cache)}) needs slots, or cache_seqlens, to say where k goes"
        )
    for name, x, cache in (("k_cache", k, k_cache), ("v_cache", v, v_cache)):
        if are_packed(k_cache) or are_packed(v_cache):
            check_packed_shape(name, cache)
            check_packed_strides(name, cache)
        elif cache.dim() == 4:
            check_last_dimension(name, cache)
        rows = shape_of_keys(cache) if name == "k_cache" else shape_of_values(cache)
        if len(rows) != 4 or rows[2:] != x.shape[-2:] or rows[:2] != shape_of_keys(k_cache)[:2]:
            raise ValueError(
                f"{name} has shape {tuple(cache.shape)}; expected (pages, page_size, heads, hdim) "
                f"as k_cache, with the heads of {name[0]}, {tuple(x.shape[-2:])}"
            )
        dtypes = (x.dtype,) if x.dtype == torch.int8 else (x.dtype, *QUANTISED_DTYPES)
        if cache.dtype not in dtypes or cache.dtype != k_cache.dtype:
            choices = ", ".join(map(str, dtypes))
            raise NotImplementedError(
                f"{name} has dtype {cache.dtype}; both caches are one of {choices}"
            )
        if rows[0] * rows[1] > MOST_NUMBER:
            raise NotImplementedError(f"{name} has {rows[0] * rows[1]} rows; 2**31 - 1 are served")
    for (name, scale), x in zip(scales, (k, v), strict=True):
        if scale is None:
            continue
        if k_cache.dtype not in QUANTISED_DTYPES:
            raise ValueError(f"{name} is the scale of 8 bits; k_cache has dtype {k_cache.dtype}")
        if scale.dtype != torch.float32 or scale.shape not in ((1,), (x.shape[-2],)):
            raise ValueError(
                f"{name} is {describe(scale)}; expected float32 of shape (1,) or ({x.shape[-2]},), "
                "for each head"
            )
    return k_cache.dtype
