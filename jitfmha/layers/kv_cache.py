"""flash-attn 2's function for decoding with a KV cache: append, rotate, attend.

Source: ``flash_attn_with_kvcache`` in ``flash_attn/flash_attn_interface.py`` of
github.com/Dao-AILab/flash-attention. It ends in :func:`jitfmha.fmha_fwd`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.interface import OFF, fmha_fwd
from ..call.pytorch.autocast import under_autocast
from ..call.run import prepared_call
from ..problem.arguments import Arguments, Options, is_of_tokens
from ..problem.checks import (
    can_be_read,
    describe,
    not_a_tensor,
    refuse_grad,
    with_clear_errors,
)
from ..problem.packed_pages import DIMENSIONS as PACKED_DIMENSIONS
from ..problem.packed_pages import are_packed, check_packed_shape, shape_of_keys, shape_of_values
from ..problem.problem import make_problem
from ..problem.torch_parts import is_any_autocast_enabled, is_watched
from ..rows.heads.interface import run_or_trace
from ..rows.heads.problem import CACHE_DTYPES, HEAD_DTYPES, HeadArguments
from .peer_values import (
    as_flag,
    as_int,
    as_softcap,
    as_softmax_scale,
    as_window,
    window_pair,
    with_contiguous_rows,
)


@with_clear_errors
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a cache of keys and values, to which new ones are appended.

    Args:
        q: ``(b, sq, hq, hdim)``.
        k_cache: ``(b_cache, seqlen_cache, hk, hdim)``, or with a block table
            ``(num_pages, page_size, hk, hdim)``; any page size. Its last dimension is contiguous.
            Or with a block table AITER's packed pages, as :func:`jitfmha.fmha_fwd` takes them.
        v_cache: as k_cache, with a head dimension of its own.
        k, v: ``(b, s_new, hk, hdim)`` and ``(b, s_new, hk, hdim_v)`` of the caches' dtype, written
            into these behind the ``cache_seqlens`` keys of each sequence, in place. Both or none.
            Beside caches of e4m3 or int8 they may have more bits: they are divided by k_descale and
            v_descale, of the shape ``(1,)`` or ``(hk,)``, and rounded.
        rotary_cos, rotary_sin: ``(seqlen_ro, rotary_dim / 2)`` in q's dtype: k is rotated by the
            rows from ``cache_seqlens`` on before it is written. So is q, where there is a causal
            mask or a window; else every query by the row ``cache_seqlens``. They need k and v.
        cache_seqlens: how many keys the caches hold: an int, or int32 ``(b,)``; all by default.
        cache_batch_idx: int32 ``(b,)``, which sequence of the cache each one of q is; not with a
            block table. By default they are the same.
        cache_leftpad: int32 ``(b,)``, the first key of each sequence; not with a block table. 0 by
            default.
        block_table: int32 ``(b, most pages)``, the pages of each sequence.
        softmax_scale: finite and > 0; ``1 / sqrt(hdim)`` by default.
        causal, window_size, softcap, alibi_slopes: as in :func:`jitfmha.flash_attn_func`.
        rotary_interleaved: whether neighbouring elements are rotated together (GPT-J), or the
            halves of the first ``rotary_dim`` elements (GPT-NeoX).
        num_splits: that of :func:`jitfmha.fmha_fwd`.
        return_softmax_lse: also return the log-sum-exp.
        q_descale, k_descale, v_descale: those of :func:`jitfmha.fmha_fwd`, for q and caches of 8
            bits. Those of tokens have the shape of a cache, or of pages of rows in place of packed
            ones, with 1 in place of the last dimension; those of new ones are the caller's to
            write.

    Keys and values are read where they lie. With ``block_table`` or ``cache_batch_idx``, and where
    a cache's sequences do not lie one after the other, this is a call of :func:`jitfmha.fmha_fwd`
    with a ``block_table``.

    Returns:
        out ``(b, sq, hq, hdim_v)``; or ``(out, lse)``, lse being float32 ``(b, hq, sq)``.

    Raises:
        TypeError, ValueError: an argument breaks a rule; the text names it and its value. On a GPU
            and in compiled code nobody reads lengths, batch indices and block tables to find out.
        NotImplementedError: what no kernel serves; also inputs that require grad while grad mode is
            on, because there is no backward pass.
    """
    refuse_grad("flash_attn_with_kvcache", q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    causal, window = as_flag("causal", causal), as_window(window_size)
    cache = _Cache.of(q, k_cache, v_cache, cache_batch_idx, cache_leftpad, block_table)
    cache = cache.with_scales(k_descale, v_descale)
    seqlens_k = _seqlens(cache, cache_seqlens, k)
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin go together; one of them is missing")
    if k is not None or v is not None:
        k, v = _checked_new(cache, k, v)
        lengths_k = seqlens_k + k.shape[1]
    elif rotary_cos is not None:
        raise ValueError(f"rotary_cos ({describe(rotary_cos)}) needs k and v, which are missing")
    else:
        lengths_k = seqlens_k
    if cache_leftpad is not None:
        lengths_k = lengths_k - cache_leftpad
    where = cache.where_keys_lie()
    batch, seqlen_q, heads_q, _ = q.shape
    options: Options = {
        "softmax_scale": as_softmax_scale(softmax_scale),
        "mask": 2 if causal else 0,
        "window_size": window_pair(*window[:2]),
        "sink_size": window[2],
        "logit_softcap": as_softcap("softcap", softcap) or OFF,
        "alibi_slopes": alibi_slopes,
        "cu_seqlens_q": starts_in_batch(batch, seqlen_q, q.device),
        "cu_seqlens_k": torch.nn.functional.pad(lengths_k.cumsum(0, dtype=torch.int32), (1, 0)),
        "cu_seqlens_k_padded": where.starts,
        "block_table": where.block_table,
        "num_splits": as_int("num_splits", num_splits) or OFF,
        "max_seqlen_q": seqlen_q,
        "q_descale": q_descale,
        "k_descale": where.k_descale,
        "v_descale": where.v_descale,
    }
    return_lse = as_flag("return_softmax_lse", return_softmax_lse)
    rows = with_contiguous_rows(q.flatten(0, 1))
    if k is not None and v is not None:
        # What is refused changes no cache.
        given = {**options, "return_lse": return_lse}
        _refuse_unserved(Arguments.of(rows, where.keys, where.values, given))
        rotary = None
        if rotary_cos is not None and rotary_sin is not None:
            interleaved = as_flag("rotary_interleaved", rotary_interleaved)
            rotary = Rotary(rotary_cos, rotary_sin, interleaved)
        q_moves = causal or window[:2] != (-1, -1)
        q = cache.append(q, k, v, seqlens_k, rotary, q_moves=q_moves)
        rows = with_contiguous_rows(q.flatten(0, 1))
        if cache.leftpad is not None:
            # Those that were copied do not have the new ones yet.
            where = cache.where_keys_lie()
    result = fmha_fwd(rows, where.keys, where.values, return_lse=return_lse, **options)
    if isinstance(result, Tensor):
        return result.view(batch, seqlen_q, *result.shape[1:])
    out, lse = result
    by_batch = lse.view(heads_q, batch, seqlen_q).transpose(0, 1)
    return out.view(batch, seqlen_q, *out.shape[1:]), by_batch


def _refuse_unserved(arguments: Arguments) -> None:
    """Raise what ``fmha_fwd`` would, and run nothing."""
    if not (is_watched(*arguments[:3]) or is_any_autocast_enabled()):
        prepared_call(arguments)
    elif not torch.compiler.is_compiling():
        make_problem(under_autocast(arguments))


class _WhereKeysLie(NamedTuple):
    """Keys, values and their scales as ``fmha_fwd`` takes them: rows and ``starts``, or pages."""

    keys: Tensor
    values: Tensor
    starts: Tensor | None
    block_table: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None


class _Cache(NamedTuple):
    """The caches, and where each sequence of q has its keys in them."""

    k: Tensor
    v: Tensor
    batch: int
    batch_idx: Tensor | None
    leftpad: Tensor | None
    block_table: Tensor | None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch_idx: Tensor | None,
        leftpad: Tensor | None,
        block_table: Tensor | None,
    ) -> _Cache:
        """Checked: shapes, and on the CPU also indices."""
        caches: tuple[tuple[str, Tensor], ...] = (("k_cache", k), ("v_cache", v))
        may_be_packed = isinstance(block_table, Tensor)
        for name, x in (("q", q), *caches):
            dimensions = (4, PACKED_DIMENSIONS) if may_be_packed and x is not q else (4,)
            if not isinstance(x, Tensor) or x.dim() not in dimensions:
                or_packed = ", or with a block_table the five of packed pages" if x is not q else ""
                raise ValueError(f"{name} is {describe(x)}; expected four dimensions{or_packed}")
        for name, x in caches:
            if are_packed(k) or are_packed(v):
                check_packed_shape(name, x)
            elif x.stride(-1) != 1:
                raise ValueError(f"{name} has strides {x.stride()}; the last one must be 1")
        shape_k, shape_v = shape_of_keys(k), shape_of_values(v)
        if shape_k[:3] != shape_v[:3]:
            raise ValueError(
                f"k_cache has shape {tuple(shape_k)}, v_cache {tuple(shape_v)}; all but the last "
                "dimension agree"
            )
        batch = q.shape[0]
        _check_indices("cache_batch_idx", batch_idx, (batch,), k.shape[0])
        _check_indices("cache_leftpad", leftpad, (batch,), shape_k[1] + 1)
        if block_table is not None:
            for name, other in (("cache_batch_idx", batch_idx), ("cache_leftpad", leftpad)):
                if other is not None:
                    raise ValueError(f"{name} ({describe(other)}) does not go with a block_table")
            _check_indices("block_table", block_table, (batch, None), None)
        elif batch_idx is None and k.shape[0] != batch:
            raise ValueError(
                f"k_cache has shape {tuple(k.shape)}; without cache_batch_idx it has the batch of "
                f"q, which is {batch}"
            )
        return cls(k, v, batch, batch_idx, leftpad, block_table)

    def with_scales(self, k_descale: Tensor | None, v_descale: Tensor | None) -> _Cache:
        """The caches with what they are multiplied with; shapes of those of tokens are checked."""
        shapes = zip(("k", "v"), (k_descale, v_descale), self.shapes, strict=True)
        for name, x, shape in shapes:
            if x is None:
                continue
            if not isinstance(x, Tensor):
                raise not_a_tensor(f"{name}_descale", x)
            if is_of_tokens(x) and x.shape != (*shape[:-1], 1):
                raise ValueError(
                    f"{name}_descale has shape {tuple(x.shape)}; scales of tokens have the shape "
                    f"of {name}_cache with 1 in the end, which is {(*shape[:-1], 1)}"
                )
        return self._replace(k_descale=k_descale, v_descale=v_descale)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of keys and values in rows."""
        return shape_of_keys(self.k), shape_of_values(self.v)

    @property
    def capacity(self) -> int:
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return pages * self.shapes[0][1]

    @property
    def described(self) -> str:
        """Where a sequence has its keys, in words."""
        if self.block_table is None:
            return f"k_cache ({describe(self.k)})"
        return f"a row of block_table ({describe(self.block_table)})"

    def append(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seqlens_k: Tensor,
        rotary: Rotary | None,
        *,
        q_moves: bool,
    ) -> Tensor:
        """Write new keys and values, rotated, behind the ``seqlens_k (b,)`` that are there.

        Returns q, rotated; without ``q_moves`` each by the first position of its sequence.
        """
        if rotary is not None and (q.dtype != k.dtype or q.dtype not in HEAD_DTYPES):
            k = rotary.rotated("k", k, seqlens_k, moves=True)
            q = rotary.rotated("q", q, seqlens_k, moves=q_moves)
            rotary = None
        given = [with_contiguous_rows(x) for x in (k, v)]
        caches = [self.k, self.v]
        if k.dtype not in HEAD_DTYPES:  # bytes, which are copied as they are
            given, caches = ([x.view(torch.int8) for x in pair] for pair in (given, caches))
        scales = (self.k_descale, self.v_descale) if k.dtype != self.k.dtype else (None, None)
        if any(is_of_tokens(x) for x in scales):
            raise NotImplementedError(
                f"k has dtype {k.dtype} and the cache {self.k.dtype} with scales of tokens; round "
                "new keys and values, and write their scales, before"
            )
        turned = None if rotary is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
        shared: dict[str, Any] = {"cache_seqlens": seqlens_k, "q_moves": q_moves}
        if rotary is not None:
            shared |= rotary.tables()
        rows = None if turned is None else with_contiguous_rows(q)
        if rows is not None and q.shape[1] != k.shape[1]:  # of one pass all have the same tokens
            run_or_trace(HeadArguments(rows, None, None, q_out=turned, **shared))
            rows = None
        run_or_trace(
            HeadArguments(
                q=rows,
                k=given[0],
                v=given[1],
                q_out=None if rows is None else turned,
                k_cache=caches[0],
                v_cache=caches[1],
                block_table=self.block_table,
                cache_batch_idx=self.batch_idx,
                k_scale=scales[0],
                v_scale=scales[1],
                **shared,
            )
        )
        return q if turned is None else turned

    def where_keys_lie(self) -> _WhereKeysLie:
        """Nothing is copied but, with ``leftpad``, where strides leave no other way."""
        table = self.block_table
        if table is not None:
            contiguous = table if table.stride(-1) == 1 else table.contiguous()
            return self._lying(lambda x: x, None, contiguous)
        scales = [x for x in (self.k_descale, self.v_descale) if is_of_tokens(x)]
        is_in_rows = self.batch_idx is None and all(map(_lies_in_rows, (self.k, self.v, *scales)))
        # Rows start where the first sequence does, which a trace does not know.
        if is_in_rows and (self.leftpad is None or not torch.compiler.is_compiling()):
            return self._rows()
        if self.leftpad is None:  # each sequence is one page
            return self._lying(lambda x: x, None, self._sequences()[:, None].int())
        # Sequences do not start with a page, but where each key is one.
        capacity = self.capacity
        place = torch.arange(capacity, device=self.k.device) + self.leftpad[:, None]
        pages = self._sequences()[:, None] * capacity + place.clamp(max=capacity - 1)
        return self._lying(lambda x: x.flatten(0, 1)[:, None], None, pages.int())

    def _rows(self) -> _WhereKeysLie:
        skipped = 0
        starts = starts_in_batch(self.batch, self.k.shape[1], self.k.device)
        if self.leftpad is not None and self.batch > 0:
            # Where rows are checked the first sequence starts at the first one; kernels do without.
            skipped = int(self.leftpad[0]) if can_be_read(self.leftpad) else 0
            starts[:-1] += self.leftpad
            starts -= skipped
        return self._lying(lambda x: x.flatten(0, 1)[skipped:], starts, None)

    def _lying(
        self,
        rows_of: Callable[[Tensor], Tensor],
        starts: Tensor | None,
        block_table: Tensor | None,
    ) -> _WhereKeysLie:
        """What ``rows_of`` gives of the caches and of what has their shape."""
        scales = [rows_of(x) if is_of_tokens(x) else x for x in (self.k_descale, self.v_descale)]
        return _WhereKeysLie(rows_of(self.k), rows_of(self.v), starts, block_table, *scales)

    def _sequences(self) -> Tensor:
        if self.batch_idx is not None:
            return self.batch_idx.long()
        return torch.arange(self.batch, device=self.k.device)


def _lies_in_rows(x: Tensor) -> bool:
    """Whether the sequences of ``x (b, s, h, hdim)`` lie one after the other."""
    return min(x.shape[:2]) == 0 or x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


class Rotary(NamedTuple):
    """Rotary position embedding (arXiv 2104.09864)."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def tables(self) -> dict[str, Any]:
        """Those that kernels take, with how they rotate."""
        tables = [self.cos, self.sin]
        if self.cos.dtype != self.sin.dtype or self.cos.dtype not in HEAD_DTYPES:
            tables = [x.float() for x in tables]
        cos, sin = map(with_contiguous_rows, tables)
        return {"cos": cos, "sin": sin, "interleaved": self.interleaved}

    def rotated(self, name: str, x: Tensor, first: Tensor, *, moves: bool) -> Tensor:
        """``x (b, s, h, hdim)``, rotated from the positions ``first (b,)`` on.

        Without ``moves``, all elements of a sequence are at its first position.
        """
        cos, sin = self.cos, self.sin
        width = 2 * cos.shape[-1]
        if cos.dim() != 2 or cos.shape != sin.shape or width > x.shape[-1]:
            raise ValueError(
                f"rotary_cos and rotary_sin have shapes {tuple(cos.shape)} and {tuple(sin.shape)}; "
                f"expected one shape (seqlen_ro, rotary_dim / 2), with a rotary_dim of at most the "
                f"hdim of {name}, {x.shape[-1]}"
            )
        steps = torch.arange(x.shape[1], device=x.device) * int(moves)
        position = first.long()[:, None] + steps
        last = int(position.max()) if can_be_read(position) and position.numel() else -1
        if last >= cos.shape[0]:
            raise ValueError(
                f"rotary_cos has {cos.shape[0]} rows; {name} reaches to position {last}"
            )
        cos, sin = cos[position][:, :, None].float(), sin[position][:, :, None].float()
        turned = x[..., :width].float()
        if self.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            turned = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
        return torch.cat([turned.to(x.dtype), x[..., width:]], dim=-1)


def _seqlens(cache: _Cache, cache_seqlens: int | Tensor | None, k: Tensor | None) -> Tensor:
    """How many keys each sequence has in the cache, int32 ``(b,)``."""
    if cache_seqlens is None and k is not None:
        raise ValueError("cache_seqlens is missing; with k and v it says where to write them")
    if not isinstance(cache_seqlens, Tensor) or cache_seqlens.dim() == 0:
        length = cache.capacity
        if cache_seqlens is not None:
            length = as_int("cache_seqlens", cache_seqlens)
        cache_seqlens = torch.full((cache.batch,), length, dtype=torch.int32, device=cache.k.device)
    new = k.shape[1] if isinstance(k, Tensor) and k.dim() == 4 else 0
    _check_indices("cache_seqlens", cache_seqlens, (cache.batch,), None)
    if can_be_read(cache_seqlens) and cache.batch > 0:
        for number in (int(cache_seqlens.min()), int(cache_seqlens.max())):
            if not 0 <= number <= cache.capacity - new:
                raise ValueError(
                    f"cache_seqlens holds {number}, and k has {new} more keys; {cache.described} "
                    f"has room for {cache.capacity}"
                )
    if cache.leftpad is not None and can_be_read(cache.leftpad):
        behind = cache.leftpad > cache_seqlens
        if behind.any():
            at = int(behind.nonzero()[0])
            raise ValueError(
                f"cache_leftpad is {int(cache.leftpad[at])} for sequence {at}, which has "
                f"{int(cache_seqlens[at])} keys"
            )
    return cache_seqlens


def _checked_new(cache: _Cache, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor]:
    if k is None or v is None:
        raise ValueError(f"k and v go together; {'k' if k is None else 'v'} is missing")
    caches = zip(("k", "v"), (k, v), (cache.k, cache.v), cache.shapes, strict=True)
    for name, x, whole, shape in caches:
        rows = k.shape[1] if isinstance(k, Tensor) and k.dim() == 4 else None
        expected = (cache.batch, rows, *shape[2:])
        if not isinstance(x, Tensor) or tuple(x.shape) != expected:
            raise ValueError(
                f"{name} is {describe(x)}; expected (batch, new keys, heads, hdim), which is "
                f"{expected}"
            )
        is_rounded = x.dtype in HEAD_DTYPES and whole.dtype in CACHE_DTYPES
        if x.dtype != whole.dtype and not is_rounded:
            raise TypeError(f"{name} has dtype {x.dtype}; {name}_cache has {whole.dtype}")
    return k, v


def _check_indices(
    name: str, x: Tensor | None, shape: tuple[int | None, ...], below: int | None
) -> None:
    """Check an int32 tensor of numbers from 0; None in ``shape`` and ``below`` is anything."""
    if x is None:
        return
    if not isinstance(x, Tensor) or x.dtype != torch.int32:
        raise TypeError(f"{name} must be an int32 tensor, got {describe(x)}")
    fits = x.dim() == len(shape) and all(
        n in (None, size) for n, size in zip(shape, x.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {shape}")
    if below is None or not can_be_read(x) or x.numel() == 0:
        return
    for number in (int(x.min()), int(x.max())):
        if not 0 <= number < below:
            raise ValueError(f"{name} holds {number}; it must be from 0 to {below - 1}")


def starts_in_batch(batch: int, seqlen: int, device: torch.device) -> Tensor:
    """Where sequences of one length start, and the end of the last one, int32 ``(b + 1,)``."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen
