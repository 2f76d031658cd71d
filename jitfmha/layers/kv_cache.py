"""flash-attn 2's function for decoding with a KV cache: append, rotate, attend.

Source: ``flash_attn_with_kvcache`` in ``flash_attn/flash_attn_interface.py`` of
github.com/Dao-AILab/flash-attention. It ends in :func:`jitfmha.fmha_fwd`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.detection import target_of
from ..call.interface import fmha_fwd
from ..call.known_calls import Run, keeps_calls
from ..call.pytorch.autocast import under_autocast
from ..call.run import PreparedCall, prepared_call, run_prepared
from ..planning.target import CpuTarget
from ..problem.arguments import (
    Arguments,
    CuSeqlens,
    KeyOptions,
    check_num_splits,
    gather_descales,
    is_of_tokens,
    new_tuple,
)
from ..problem.checks import (
    check_layout,
    describe,
    not_a_tensor,
    requires_any_grad,
    with_clear_errors,
)
from ..problem.mask import OPEN_WINDOW
from ..problem.memory import Apart
from ..problem.packed_pages import DIMENSIONS as PACKED_DIMENSIONS
from ..problem.packed_pages import are_packed, check_packed_shape, shape_of_keys, shape_of_values
from ..problem.problem import make_problem
from ..problem.score_features import gather_modifiers
from ..problem.torch_parts import (
    can_be_read,
    has_watchers,
    is_any_autocast_enabled,
    is_watched,
    refuse_derivatives,
)
from ..rows.heads.ops import operator as heads
from ..rows.heads.problem import HeadArguments
from ..rows.heads.run import prepared_heads
from ..rows.problem import QUANTISED_DTYPES, ROW_DTYPES
from .known_attention import noted
from .peer_values import (
    as_flag,
    as_int,
    as_softcap,
    as_softmax_scale,
    as_window,
    sums_of,
    sums_of_numbers,
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
    window_size: tuple[int, int] = OPEN_WINDOW,
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
            v_descale, of the shape ``(1,)`` or ``(hk,)``, and rounded. Then no argument shares
            memory with the caches; what these may share says :func:`jitfmha.qk_norm_rope_cache`.
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
    length = None
    if not isinstance(cache_seqlens, Tensor) or cache_seqlens.dim() == 0:
        length = None if cache_seqlens is None else as_int("cache_seqlens", cache_seqlens)
        cache_seqlens = None
    softmax_scale = as_softmax_scale(softmax_scale)
    causal, window = as_flag("causal", causal), as_window(window_size)
    softcap = as_softcap("softcap", softcap)
    interleaved = as_flag("rotary_interleaved", rotary_interleaved)
    num_splits = as_int("num_splits", num_splits)
    return_lse = as_flag("return_softmax_lse", return_softmax_lse)
    choices = new_tuple(
        _Choices, (softmax_scale, causal, window, softcap, interleaved, num_splits, return_lse)
    )
    new = (k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad)
    rest = (*new, block_table, alibi_slopes, q_descale, k_descale, v_descale)
    call = new_tuple(_Call, (q, k_cache, v_cache, *rest))
    result: Tensor | tuple[Tensor, Tensor]
    if not (
        has_watchers()
        or is_any_autocast_enabled()
        or (torch.is_grad_enabled() and requires_any_grad(*call))
    ):
        step = _kept_step.known((*call, choices))
        if step is not None:
            result = step(call, length)
            return result
    given = [x for x in rest if x is not None]
    is_seen = is_watched(q, k_cache, v_cache, *given) or is_any_autocast_enabled()
    if is_seen or (torch.is_grad_enabled() and requires_any_grad(q, k_cache, v_cache, *given)):
        refuse_derivatives("flash_attn_with_kvcache", **call._asdict())
    if is_seen:
        return _Step(call, choices)(call, length)
    result = _kept_step((*call, choices))(call, length)
    return result


class _Choices(NamedTuple):
    """What a call says beside its tensors."""

    softmax_scale: float | None
    causal: bool
    window: tuple[int, int, int]
    softcap: float
    rotary_interleaved: bool
    num_splits: int
    return_lse: bool


class _Call(NamedTuple):
    """The tensors of a call."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    cache_seqlens: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    alibi_slopes: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of keys and values in rows."""
        return shape_of_keys(self.k_cache), shape_of_values(self.v_cache)

    @property
    def capacity(self) -> int:
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return pages * self.shapes[0][1]

    @property
    def described(self) -> str:
        """Where a sequence has its keys, in words."""
        if self.block_table is None:
            return f"k_cache ({describe(self.k_cache)})"
        return f"a row of block_table ({describe(self.block_table)})"

    @property
    def sequences(self) -> Tensor:
        """Which sequences of the caches those of q are."""
        if self.cache_batch_idx is not None:
            return self.cache_batch_idx.long()
        return torch.arange(self.q.shape[0], device=self.k_cache.device)

    def seqlens(self, length: int | None) -> Tensor:
        """How many keys the caches hold, int32 ``(b,)``; ``length``, or all, where none is said."""
        if self.cache_seqlens is not None:
            return self.cache_seqlens
        keys = self.capacity if length is None else length
        return torch.full(self.q.shape[:1], keys, dtype=torch.int32, device=self.k_cache.device)


# What must share no memory with caches that are written, and is not checked where they are.
_APART = [
    (_Call._fields.index(cache), at)
    for cache in ("k_cache", "v_cache")
    for at, name in enumerate(_Call._fields)
    if name == "q" or name not in HeadArguments._fields
]
_IN_PAIRS = {at for pair in _APART for at in pair}


class _WhereKeysLie(NamedTuple):
    """Keys, values and their scales as ``fmha_fwd`` takes them: rows and ``starts``, or pages."""

    keys: Tensor
    values: Tensor
    starts: Tensor | None
    block_table: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None


class _Step:
    """Calls with the same choices and with tensors of the same layouts, which are checked.

    What tensors hold is checked with every call, where it can be read.
    """

    def __init__(self, call: _Call, choices: _Choices) -> None:
        self._choices = choices
        _check_caches(call)
        _check_scales(call)
        _check_new(call)
        check_num_splits(choices.num_splits)
        q, caches = call.q, [call.k_cache, call.v_cache]
        self._batch, self._seqlen_q, self._heads_q, _ = q.shape
        self._out_shape = (*q.shape[:3], call.shapes[1][-1])
        self._new = 0 if call.k is None else call.k.shape[1]
        self._capacity = call.capacity
        left, right, sink_size = self._choices.window
        self._q_moves = self._choices.causal or (left, right) != (-1, -1)
        self._window = window_pair(left, right)
        self._scores = {"logit_softcap": self._choices.softcap, "sink_size": sink_size}
        self._modifiers = gather_modifiers(self._scores)
        numbers = call.cache_seqlens, call.cache_batch_idx, call.cache_leftpad
        self._can_read = all(can_be_read(x) for x in (call.k_cache, *numbers) if x is not None)
        scales = [x for x in (call.k_descale, call.v_descale) if is_of_tokens(x)]
        self._is_in_rows = call.cache_batch_idx is None and all(
            map(_lies_in_rows, (*caches, *scales))
        )
        self._starts: dict[int, Tensor] = {}
        self._is_served = self._is_kept = self._reads_addresses = False
        self._prepared: PreparedCall | None = None
        self._writes: dict[bool, Run] = {}
        self._known_write: _KnownWrite | None = None
        self._apart: Apart | None = None

    def __call__(self, call: _Call, length: int | None) -> Tensor | tuple[Tensor, Tensor]:
        sums = self._sums_of_keys(call, length)
        q = call.q
        if call.k is not None:
            if not self._is_served:
                # What is refused changes no cache.
                _refuse_unserved(self._arguments(call, q, sums))
                self._is_served = True
            self._refuse_shared(call)
            q = self._append(call, length)
        arguments = self._arguments(call, q, sums)
        lse = None
        if self._prepared is not None:
            out, lse = run_prepared(self._prepared, arguments, lengths_are_checked=True)
        else:
            result = fmha_fwd(**arguments.flattened())
            out, lse = (result, None) if isinstance(result, Tensor) else result
            if self._is_kept:
                self._prepared = prepared_call(arguments)
        if out.dim() == 3:
            out = out.view(self._out_shape)
        if lse is None:
            return out
        return out, lse.view(self._heads_q, self._batch, self._seqlen_q).transpose(0, 1)

    def _refuse_shared(self, call: _Call) -> None:
        """Raise ``ValueError`` where a cache that is written has what attention reads."""
        if self._apart is None:
            return
        places = self._apart.places
        pointers = tuple([call[at].data_ptr() for at in places])  # type: ignore[union-attr]
        for pair in self._apart.shared(call, pointers):
            cache, other = (_Call._fields[at] for at in pair)
            raise ValueError(f"{cache} is written and shares memory with {other}; give it its own")

    def _arguments(self, call: _Call, q: Tensor, sums: Tensor) -> Arguments:
        """Those of ``fmha_fwd``; of a prepared call the tensors may lie as they are given."""
        choices = self._choices
        where = self._where_keys_lie(call)
        table, starts_q = where.block_table, self._starts_of(self._seqlen_q, q)
        starts_k = sums if where.starts is None else where.starts
        lengths = new_tuple(CuSeqlens, (starts_q, sums, starts_q, starts_k, self._seqlen_q, None))
        modifiers = self._modifiers
        if call.alibi_slopes is not None:
            modifiers = gather_modifiers({**self._scores, "alibi_slopes": call.alibi_slopes})
        keys = None
        if table is not None or choices.num_splits:
            keys = new_tuple(KeyOptions, (table, choices.num_splits, None, None))
        return new_tuple(
            Arguments,
            (
                q if self._is_by_address else with_contiguous_rows(q.flatten(0, 1)),
                where.keys,
                where.values,
                choices.softmax_scale,
                2 if choices.causal else 0,
                self._window,
                choices.return_lse,
                None,
                lengths,
                "rtne",
                gather_descales(call.q_descale, where.k_descale, where.v_descale, None),
                modifiers,
                None,
                keys,
            ),
        )

    @property
    def _is_by_address(self) -> bool:
        return self._reads_addresses and self._prepared is not None

    def _append(self, call: _Call, length: int | None) -> Tensor:
        """Write new keys and values, rotated, behind those that are there.

        Returns q, rotated; where no mask tells queries apart, by the first position of each
        sequence.
        """
        q, k, v, seqlens = call.q, call.k, call.v, call.seqlens(length)
        known = self._known_write
        if known is not None:
            turned = q.new_empty(q.shape) if known.turns else None
            known.run(*known.tensors_of((*call, seqlens, turned, None)))
            return q if turned is None else turned
        assert k is not None
        assert v is not None
        rotary = None
        if call.rotary_cos is not None and call.rotary_sin is not None:
            rotary = Rotary(call.rotary_cos, call.rotary_sin, self._choices.rotary_interleaved)
            if q.dtype != k.dtype or q.dtype not in ROW_DTYPES:
                k = rotary.rotated("k", k, seqlens, moves=True)
                q = rotary.rotated("q", q, seqlens, moves=self._q_moves)
                rotary = None
        k, v, caches = (
            with_contiguous_rows(k),
            with_contiguous_rows(v),
            [call.k_cache, call.v_cache],
        )
        is_rounded = k.dtype != call.k_cache.dtype
        scales = (call.k_descale, call.v_descale) if is_rounded else (None, None)
        if any(map(is_of_tokens, scales)):
            raise NotImplementedError(
                f"k has dtype {k.dtype} and the cache {call.k_cache.dtype} with scales of tokens; "
                "round new keys and values, and write their scales, before"
            )
        if k.dtype not in ROW_DTYPES:  # bytes, which are copied as they are
            k, v, *caches = (x.view(torch.int8) for x in (k, v, *caches))
        shared: dict[str, Any] = {"cache_seqlens": seqlens, "q_moves": self._q_moves}
        turned = rows = None
        if rotary is not None:
            shared |= rotary.tables()
            turned = q.new_empty(q.shape)
            rows = with_contiguous_rows(q)
            if q.shape[1] != k.shape[1]:  # of one pass all have the same tokens
                self._write(HeadArguments(rows, None, None, q_out=turned, **shared))
                rows = None
        write = HeadArguments(
            q=rows,
            k=k,
            v=v,
            q_out=None if rows is None else turned,
            k_cache=caches[0],
            v_cache=caches[1],
            block_table=call.block_table,
            cache_batch_idx=call.cache_batch_idx,
            k_scale=scales[0],
            v_scale=scales[1],
            **shared,
        )
        run = self._write(write)
        if run is not None and (turned is None) == (rows is None):
            self._known_write = _KnownWrite.of(run, write, (*call, seqlens, turned, None))
        return q if turned is None else turned

    def _write(self, arguments: HeadArguments) -> Run | None:
        """Write, and return what does so for later calls, if one may be kept."""
        if not self._is_kept:
            heads.run(arguments)
            return None
        has_keys = arguments.k is not None
        run = self._writes.get(has_keys)
        if run is None:
            run = self._writes[has_keys] = prepared_heads(arguments)
        run(*arguments.tensors)
        return run

    def _sums_of_keys(self, call: _Call, length: int | None) -> Tensor:
        """The prefix sums of how many keys each sequence has, with those that are new.

        Raises ``ValueError`` for numbers that are out of range.
        """
        given, places, pads = call.cache_seqlens, call.cache_batch_idx, call.cache_leftpad
        if given is None and length is None and call.k is not None:
            raise ValueError("cache_seqlens is missing; with k and v it says where to write them")
        if not self._can_read:
            lengths = call.seqlens(length) + self._new
            return sums_of(lengths if pads is None else lengths - pads)
        held = [self._capacity if length is None else length] * self._batch
        if given is not None:
            held = given.tolist()
        for number in (min(held), max(held)) if held else ():
            if not 0 <= number <= self._capacity - self._new:
                raise ValueError(
                    f"cache_seqlens holds {number}, and k has {self._new} more keys; "
                    f"{call.described} has room for {self._capacity}"
                )
        if places is not None:
            _check_numbers("cache_batch_idx", places, call.k_cache.shape[0])
        if pads is not None:
            _check_numbers("cache_leftpad", pads, self._capacity + 1)
            pairs = [*zip(held, pads.tolist(), strict=True)]
            for sequence, (keys, pad) in enumerate(pairs):
                if pad > keys:
                    raise ValueError(
                        f"cache_leftpad is {pad} for sequence {sequence}, which has {keys} keys"
                    )
            held = [keys - pad for keys, pad in pairs]
        return sums_of_numbers([keys + self._new for keys in held] if self._new else held)

    def _starts_of(self, seqlen: int, x: Tensor) -> Tensor:
        """Where sequences of one length start; on a host they are kept."""
        if not self._can_read:  # in a trace seqlen may be no number yet
            return starts_in_batch(self._batch, seqlen, x.device)
        starts = self._starts.get(seqlen)
        if starts is None:
            starts = self._starts[seqlen] = starts_in_batch(self._batch, seqlen, x.device)
        return starts

    def _where_keys_lie(self, call: _Call) -> _WhereKeysLie:
        """Nothing is copied but, with ``leftpad``, where strides leave no other way."""
        table, pads = call.block_table, call.cache_leftpad
        if table is not None:
            contiguous = table if table.stride(-1) == 1 else table.contiguous()
            return _as_given(call, None, contiguous)
        # Rows start where the first sequence does, which a trace does not know.
        if self._is_in_rows and (pads is None or self._can_read or not call.k_cache.is_cpu):
            return self._rows(call)
        if pads is None:  # each sequence is one page
            return _as_given(call, None, call.sequences[:, None].int())
        # Sequences do not start with a page, but where each key is one.
        place = torch.arange(self._capacity, device=call.k_cache.device) + pads[:, None]
        pages = call.sequences[:, None] * self._capacity + place.clamp(max=self._capacity - 1)
        return _lying(call, lambda x: x.flatten(0, 1)[:, None], None, pages.int())

    def _rows(self, call: _Call) -> _WhereKeysLie:
        starts, pads = self._starts_of(self._capacity, call.k_cache), call.cache_leftpad
        if self._is_by_address:
            return _as_given(call, starts, None)
        if pads is None or self._batch == 0:
            return _lying(call, lambda x: x.flatten(0, 1), starts, None)
        # Where rows are checked the first sequence starts at the first one; kernels do without.
        skipped = int(pads[0]) if can_be_read(pads) else 0
        starts = starts - skipped
        starts[:-1] += pads
        return _lying(call, lambda x: x.flatten(0, 1)[skipped:], starts, None)


# What a write is made of: the tensors of a call, the numbers of keys, the new queries, and nothing.
_SOURCES = (*_Call._fields, "seqlens", "turned", "nothing")
_SOURCE_OF = {
    **{name: name for name in HeadArguments._fields if name in _SOURCES},
    "cos": "rotary_cos",
    "sin": "rotary_sin",
    "cache_seqlens": "seqlens",
    "q_out": "turned",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
}


class _KnownWrite(NamedTuple):
    """A write to caches whose tensors are those of a call, as they are given.

    ``turns`` is whether there are new queries, which are rotated.
    """

    run: Run
    tensors_of: Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]
    turns: bool

    @classmethod
    def of(
        cls, run: Run, write: HeadArguments, sources: tuple[Tensor | None, ...]
    ) -> _KnownWrite | None:
        """None where a tensor had to be made of one of the call's."""
        places = []
        for name, x in zip(write._fields, write.tensors, strict=False):
            place = _SOURCES.index("nothing" if x is None else _SOURCE_OF[name])
            if x is not sources[place]:
                return None
            places.append(place)
        return cls(run, itemgetter(*places), write.q_out is not None)


@keeps_calls("kv_cache", len(_Call._fields))
def _kept_step(given: tuple[Any, ...]) -> _Step:
    """One for later calls too, whose tensors are plain as those of this one are."""
    *tensors, choices = given
    call = _Call(*tensors)
    step = _Step(call, choices)
    if call.k is not None:
        step._apart = Apart([x if at in _IN_PAIRS else None for at, x in enumerate(call)], _APART)
    # Where keys have to be skipped the rows are others in each call.
    step._is_kept = call.cache_leftpad is None or not step._can_read
    # A CPU kernel takes of the tensors where they are, so that they need no views as rows.
    step._reads_addresses = (
        isinstance(target_of(call.q.device), CpuTarget)
        and call.q.flatten(0, 1).data_ptr() == call.q.data_ptr()
        and call.q.stride(-1) == 1
        and not any(map(is_of_tokens, (call.k_descale, call.v_descale)))
    )
    return step


def _refuse_unserved(arguments: Arguments) -> None:
    """Raise what ``fmha_fwd`` would, and run nothing."""
    if not (is_watched(*arguments[:3]) or is_any_autocast_enabled()):
        prepared_call(arguments)
    elif not torch.compiler.is_compiling():
        make_problem(under_autocast(arguments))


def _as_given(call: _Call, starts: Tensor | None, block_table: Tensor | None) -> _WhereKeysLie:
    scales = call.k_descale, call.v_descale
    return new_tuple(_WhereKeysLie, (call.k_cache, call.v_cache, starts, block_table, *scales))


def _lying(
    call: _Call,
    rows_of: Callable[[Tensor], Tensor],
    starts: Tensor | None,
    block_table: Tensor | None,
) -> _WhereKeysLie:
    """What ``rows_of`` gives of the caches and of what has their shape."""
    scales = [rows_of(x) if is_of_tokens(x) else x for x in (call.k_descale, call.v_descale)]
    return _WhereKeysLie(rows_of(call.k_cache), rows_of(call.v_cache), starts, block_table, *scales)


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
        if self.cos.dtype != self.sin.dtype or self.cos.dtype not in ROW_DTYPES:
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


def _check_caches(call: _Call) -> None:
    q, table, batch_idx = call.q, call.block_table, call.cache_batch_idx
    caches: tuple[tuple[str, Tensor], ...] = (("k_cache", call.k_cache), ("v_cache", call.v_cache))
    may_be_packed = isinstance(table, Tensor)
    for name, x in (("q", q), *caches):
        dimensions = (4, PACKED_DIMENSIONS) if may_be_packed and x is not q else (4,)
        if not isinstance(x, Tensor) or x.dim() not in dimensions:
            or_packed = ", or with a block_table the five of packed pages" if x is not q else ""
            raise ValueError(f"{name} is {describe(x)}; expected four dimensions{or_packed}")
    for name, x in caches:
        if any(are_packed(each) for _, each in caches):
            check_packed_shape(name, x)
        elif x.stride(-1) != 1:
            raise ValueError(f"{name} has strides {x.stride()}; the last one must be 1")
    shape_k, shape_v = call.shapes
    if shape_k[:3] != shape_v[:3]:
        raise ValueError(
            f"k_cache has shape {tuple(shape_k)}, v_cache {tuple(shape_v)}; all but the last "
            "dimension agree"
        )
    batch = q.shape[0]
    others = ("cache_batch_idx", batch_idx), ("cache_leftpad", call.cache_leftpad)
    for name, other in (("cache_seqlens", call.cache_seqlens), *others):
        _check_indices(name, other, (batch,))
    if table is not None:
        for name, other in others:
            if other is not None:
                raise ValueError(f"{name} ({describe(other)}) does not go with a block_table")
        _check_indices("block_table", table, (batch, None))
    elif batch_idx is None and call.k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache has shape {tuple(call.k_cache.shape)}; without cache_batch_idx it has the "
            f"batch of q, which is {batch}"
        )


def _check_scales(call: _Call) -> None:
    """Check what the caches are multiplied with, and the shapes of those of tokens."""
    shapes = zip(("k", "v"), (call.k_descale, call.v_descale), call.shapes, strict=True)
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


def _check_new(call: _Call) -> None:
    k, v = call.k, call.v
    if (call.rotary_cos is None) != (call.rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin go together; one of them is missing")
    if k is None and v is None:
        if call.rotary_cos is not None:
            given = describe(call.rotary_cos)
            raise ValueError(f"rotary_cos ({given}) needs k and v, which are missing")
        return
    if k is None or v is None:
        raise ValueError(f"k and v go together; {'k' if k is None else 'v'} is missing")
    caches = zip(("k", "v"), (k, v), (call.k_cache, call.v_cache), call.shapes, strict=True)
    for name, x, whole, shape in caches:
        if isinstance(x, Tensor):
            check_layout(name, x)
        rows = k.shape[1] if isinstance(k, Tensor) and k.dim() == 4 else None
        expected = (call.q.shape[0], rows, *shape[2:])
        if not isinstance(x, Tensor) or tuple(x.shape) != expected:
            raise ValueError(
                f"{name} is {describe(x)}; expected (batch, new keys, heads, hdim), which is "
                f"{expected}"
            )
        is_rounded = x.dtype in ROW_DTYPES and whole.dtype in QUANTISED_DTYPES
        if x.dtype != whole.dtype and not is_rounded:
            raise TypeError(f"{name} has dtype {x.dtype}; {name}_cache has {whole.dtype}")


def _check_indices(name: str, x: Tensor | None, shape: tuple[int | None, ...]) -> None:
    """Check an int32 tensor; None in ``shape`` is anything."""
    if x is None:
        return
    if not isinstance(x, Tensor) or x.dtype != torch.int32:
        raise TypeError(f"{name} must be an int32 tensor, got {describe(x)}")
    fits = x.dim() == len(shape) and all(
        n in (None, size) for n, size in zip(shape, x.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {shape}")


def _check_numbers(name: str, x: Tensor, below: int) -> None:
    numbers = x.tolist()
    for number in (min(numbers), max(numbers)) if numbers else ():
        if not 0 <= number < below:
            raise ValueError(f"{name} holds {number}; it must be from 0 to {below - 1}")


@noted
def starts_in_batch(batch: int, seqlen: int, device: torch.device) -> Tensor:
    """Where sequences of one length start, and the end of the last one, int32 ``(b + 1,)``."""
    numbers = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return numbers if type(seqlen) is int and seqlen == 1 else numbers * seqlen
