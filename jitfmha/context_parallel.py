"""Attention over sequences that are divided among the processes of a group.

Each of n processes has some rows of every sequence: one of n chunks; or with ``zigzag`` of 2n
chunks the i-th from the front and the i-th from the end, so that under a causal mask all have the
same work. :func:`shard` cuts them out. Lengths need not divide by anything.

:func:`ring_attention` sends keys and values around a ring and joins the parts by their
log-sum-exps. :func:`all_to_all_attention` exchanges rows for heads, computes whole sequences of
some heads, and exchanges back. The first takes any number of heads, the second moves less where
there are few processes. Both are differentiable, and every process of the group has to call them,
in forward and in backward.

Before the first call of a kind exchanges anything, each process builds the kernels that it takes,
and all wait for those that do, for longer than a message may take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from . import jit
from .call.dispatch import Explanation
from .call.interface import OFF, explain, explain_bwd, fmha_bwd, fmha_fwd
from .problem.arguments import OPTION_NAMES
from .problem.checks import (
    check_flags,
    check_given,
    check_ints,
    describe,
    not_a_tensor,
    refuse_unexpected,
)
from .problem.mask import OPEN_WINDOW, Mask, parse_mask

_SEQUENCE = 1  # the dimension of sequences in q, k and v


class _Shards(NamedTuple):
    """How the rows of a sequence are divided."""

    seqlen: int
    ranks: int
    zigzag: bool

    def chunks(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The rows of one process, from the first to behind the last of each chunk."""
        if not self.zigzag:
            return (self._chunk(rank, self.ranks),)
        number = 2 * self.ranks
        return self._chunk(rank, number), self._chunk(number - 1 - rank, number)

    def length(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.chunks(rank))

    def _chunk(self, i: int, number: int) -> tuple[int, int]:
        size, longer = divmod(self.seqlen, number)
        return i * size + min(i, longer), (i + 1) * size + min(i + 1, longer)


class _Block(NamedTuple):
    """Rows of one process and keys of another one, as far as they see each other."""

    rows: slice
    keys: slice
    mask: str


class _Call(NamedTuple):
    """What is the same in every block of one call."""

    group: dist.ProcessGroup
    rank: int
    of_q: _Shards
    of_k: _Shards
    mask: Mask
    options: dict[str, Any]

    @property
    def ranks(self) -> int:
        return self.of_q.ranks

    def blocks(self, source: int) -> list[_Block]:
        """The blocks of our rows and the keys of ``source``, as few as possible."""
        is_ours = source == self.rank and self.of_q == self.of_k
        if is_ours and self.mask.is_causal:
            # The rows of the process are in order, and its keys are the same.
            whole = slice(0, self.of_q.length(source))
            return [_Block(whole, whole, "t:-1,0")]
        found: list[_Block] = []
        for first_row, q_start, q_stop in _placed(self.of_q.chunks(self.rank)):
            for first_key, k_start, k_stop in _placed(self.of_k.chunks(source)):
                diagonal = q_start - k_start
                if not self.mask.top_left:
                    diagonal += self.of_k.seqlen - self.of_q.seqlen
                block = _visible(q_stop - q_start, k_stop - k_start, diagonal, self.mask)
                if block is not None:
                    rows, keys = _moved(block.rows, first_row), _moved(block.keys, first_key)
                    _add(found, _Block(rows, keys, block.mask))
        return found


def shard(
    x: Tensor, group: dist.ProcessGroup | None = None, *, zigzag: bool = False, dim: int = _SEQUENCE
) -> Tensor:
    """The rows of this process of ``x``, which has whole sequences along ``dim``; a copy.

    Args:
        x: any tensor; has a gradient.
        group, zigzag: those of :func:`ring_attention`.

    Raises ``TypeError`` or ``ValueError`` for what is no tensor, dimension or group.
    """
    _check_sequences(x, zigzag, dim=dim)
    group, rank = _group_and_rank(group)
    chunks = _Shards(x.shape[dim], group.size(), zigzag).chunks(rank)
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in chunks], dim)


def unshard(
    x: Tensor,
    seqlen: int,
    group: dist.ProcessGroup | None = None,
    *,
    zigzag: bool = False,
    dim: int = _SEQUENCE,
) -> Tensor:
    """The whole sequences, ``seqlen`` long, of which every process has its rows; no gradients.

    Args:
        x: the rows of this process along ``dim``, as :func:`shard` cuts them out.
        group, zigzag: those of :func:`ring_attention`.

    Raises as :func:`shard`, and ``ValueError`` for another number of rows than a process has.
    """
    _check_sequences(x, zigzag, dim=dim, seqlen=seqlen)
    group, rank = _group_and_rank(group)
    shards = _Shards(seqlen, group.size(), zigzag)
    rows = x.detach().movedim(dim, 0)
    _check_rows("x", rows.shape[0], "seqlen", shards, rank)
    # All send as much, as not every backend gathers tensors of different lengths.
    longest = max(shards.length(each) for each in range(shards.ranks))
    mine = rows.new_zeros(longest, *rows.shape[1:])
    mine[: rows.shape[0]] = rows
    gathered = [torch.empty_like(mine) for _ in range(shards.ranks)]
    dist.all_gather(gathered, mine, group=group)
    parts = [part[: shards.length(each)] for each, part in enumerate(gathered)]
    return _in_order(parts, shards, 0).movedim(0, dim)


def _check_sequences(x: object, zigzag: object, *, dim: int, **lengths: int) -> None:
    if not isinstance(x, Tensor):
        raise not_a_tensor("x", x)
    check_flags(zigzag=zigzag)
    check_ints(dim=dim, **lengths)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim is {dim}; x has shape {tuple(x.shape)}")


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seqlen_q: int,
    seqlen_k: int | None = None,
    group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    mask: int | str = 0,
    window_size: tuple[int, int] = OPEN_WINDOW,
    logit_softcap: float = 0.0,
    zigzag: bool = False,
    return_lse: bool = False,
    **unserved: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the rows of this process over the keys of all.

    While a block is computed, the keys and values of the next one are on their way. What hides
    everything from a process is not computed, but sent on.

    Args:
        q: ``(b, rows, hq, hdim)``, the rows of this process, as :func:`shard` cuts them out.
        k, v: ``(b, keys, hk, hdim)`` and ``(b, keys, hk, hdim_v)``, of q's dtype.
        seqlen_q, seqlen_k: the lengths of the whole sequences, of which no process could tell from
            its own rows; ``seqlen_k`` is ``seqlen_q`` by default.
        group: the processes; all by default.
        softmax_scale, mask, window_size, logit_softcap: those of :func:`jitfmha.fmha_fwd`, for the
            whole sequences.
        zigzag: how the rows are divided, of q and of k and v.
        return_lse: also return the log-sum-exp.
        unserved: the other options of :func:`jitfmha.fmha_fwd`, which are refused.

    Returns:
        out ``(b, rows, hq, hdim_v)``, q's dtype; or ``(out, lse)``, lse being float32
        ``(b, hq, rows)``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`jitfmha.fmha_fwd`, and for shards that
            do not fit the lengths.
        RuntimeError: torch's, where another process has gone or does not answer in time.

    Source: Liu et al., Ring Attention (arXiv 2310.01889); Brandon et al., Striped Attention
    (arXiv 2311.09431), for the balance.
    """
    _refuse_options("ring_attention", unserved, _OPTIONS_OF_RINGS)
    check_flags(return_lse=return_lse)
    options = {"softmax_scale": softmax_scale, "logit_softcap": logit_softcap or OFF}
    parsed = parse_mask(mask, window_size)
    seqlens = {"q": seqlen_q, "k": seqlen_q if seqlen_k is None else seqlen_k}
    call = _checked_call(q, k, v, group, zigzag, seqlens, parsed, options)
    apply: Any = _RingAttention.apply
    out, lse = apply(q, k, v, call)
    return (out, lse) if return_lse else out


def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seqlen_q: int,
    seqlen_k: int | None = None,
    group: dist.ProcessGroup | None = None,
    zigzag: bool = False,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the rows of this process over the keys of all, by heads (Ulysses).

    Args:
        q, k, v, seqlen_q, seqlen_k, group, zigzag, return_lse: those of :func:`ring_attention`. The
            number of processes divides hq and hk.
        alibi_slopes, sink: float32 ``(hq,)``, of all heads.
        options: ``softmax_scale``, ``mask``, ``window_size``, ``logit_softcap``, ``sink_size`` and
            ``num_splits`` of :func:`jitfmha.fmha_fwd`.

    Returns, and raises, what :func:`ring_attention` does.

    Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509).
    """
    _refuse_options("all_to_all_attention", options, _OPTIONS_BY_HEADS)
    check_flags(return_lse=return_lse)
    mask = parse_mask(options.get("mask", 0), options.get("window_size", OPEN_WINDOW))
    seqlens = {"q": seqlen_q, "k": seqlen_q if seqlen_k is None else seqlen_k}
    call = _checked_call(q, k, v, group, zigzag, seqlens, mask, {})
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] % call.ranks != 0:
            raise ValueError(
                f"{name} has {x.shape[2]} heads, which {call.ranks} processes cannot share evenly; "
                "ring_attention takes any number"
            )
    heads = q.shape[2] // call.ranks
    ours = slice(call.rank * heads, (call.rank + 1) * heads)
    of_heads = {"alibi_slopes": alibi_slopes, "sink": sink}
    for name, given in of_heads.items():
        if given is not None:
            check_given(name, given, q)
            if given.shape != (q.shape[2],):
                raise ValueError(f"{name} is {describe(given)}; expected ({q.shape[2]},)")
            options[name] = given[ours]
    shards = call.of_q, call.of_k, call.of_k
    _build_together(call, "all to all", q, v, lambda: _explained_heads(q, k, v, call, options))
    exchange: Any = _Exchange.apply
    whole = (exchange(x, True, each, call) for x, each in zip((q, k, v), shards, strict=True))
    out, lse = fmha_fwd(*whole, return_lse=True, **options)
    rows: Tensor = exchange(out, False, call.of_q, call)
    if not return_lse:
        return rows
    lse_rows: Tensor = exchange(lse.transpose(1, 2)[..., None], False, call.of_q, call)
    return rows, lse_rows[..., 0].transpose(1, 2)


def _refuse_options(function: str, options: Iterable[str], served: Sequence[str]) -> None:
    """Refuse options that are of ``fmha_fwd`` alone, or of no function."""
    unknown = [name for name in options if name not in OPTION_NAMES]
    if unknown:
        refuse_unexpected(function, unknown, served)
    for name in options:
        if name not in served:
            raise NotImplementedError(
                f"{function} does not serve {name}; of the options of fmha_fwd it has "
                f"{', '.join(served)}"
            )


_OPTIONS_OF_RINGS = ("softmax_scale", "mask", "window_size", "logit_softcap")
_OPTIONS_BY_HEADS = (
    *("softmax_scale", "mask", "window_size", "logit_softcap", "sink_size", "num_splits"),
)


def _group_and_rank(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, int]:
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group={group!r} is no process group of this process; "
            "torch.distributed.init_process_group makes the default one"
        )
    return group, group.rank()


def _checked_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None,
    zigzag: bool,
    seqlens: dict[str, int],
    mask: Mask,
    options: dict[str, Any],
) -> _Call:
    """Refuse here what another process would wait for in vain."""
    group, rank = _group_and_rank(group)
    check_flags(zigzag=zigzag)
    check_ints(**{f"seqlen_{name}": seqlen for name, seqlen in seqlens.items()})
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise ValueError(f"{name} is {describe(x)}; expected (b, rows, heads, hdim)")
        if x.dtype != q.dtype or not x.dtype.is_floating_point or x.dtype.itemsize == 1:
            raise TypeError(f"{name} has dtype {x.dtype}; all have one of 16 or 32 bits")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k has shape {tuple(k.shape)}, v {tuple(v.shape)}; only hdim may differ")
    shards = {name: _Shards(seqlen, group.size(), zigzag) for name, seqlen in seqlens.items()}
    for name, x in (("q", q), ("k", k)):
        _check_rows(name, x.shape[_SEQUENCE], f"seqlen_{name}", shards[name], rank)
    return _Call(group, rank, shards["q"], shards["k"], mask, options)


def _check_rows(name: str, rows: int, of_length: str, shards: _Shards, rank: int) -> None:
    expected = shards.length(rank)
    if rows != expected:
        raise ValueError(
            f"{name} has {rows} rows; with {of_length}={shards.seqlen} process {rank} of "
            f"{shards.ranks} has {expected}"
        )


# ---- What is built before anything is exchanged --------------------------------------------------

# How long others may compile.
_PATIENCE = timedelta(minutes=15)
# By group the kinds of calls that were built.
_built: WeakKeyDictionary[dist.ProcessGroup, set[tuple[object, ...]]] = WeakKeyDictionary()


def _build_together(
    call: _Call, what: str, q: Tensor, v: Tensor, explained: Callable[[], Iterator[Explanation]]
) -> None:
    """Build what the first call of a kind takes, and wait for the processes that build.

    One that compiles answers nobody, and that may last longer than the group lets a message take.
    So each says before whether it has to build, and in the group's store when it is done. Kernels
    that calls with other lengths take may still be built between messages.
    """
    options = tuple(sorted(name for name, value in call.options.items() if value is not OFF))
    is_masked = call.mask.left is not None or call.mask.right is not None
    kind = (what, q.device.type, q.dtype, q.shape[-1], v.shape[-1], is_masked, options)
    kinds = _built.setdefault(call.group, set())
    # torch 2.10 may lack the way to a group's store, and not every group has one.
    store = getattr(call.group, "get_group_store", lambda: None)()
    if kind in kinds or call.ranks == 1 or store is None:
        return
    kinds.add(kind)
    specs = {x.digest: x for each in explained() if each.plan for x in each.plan.specs}
    missing = [spec for spec in specs.values() if not jit.is_built(spec)]
    builds = torch.tensor([len(missing)], device=q.device)
    of_all = [torch.empty_like(builds) for _ in range(call.ranks)]
    dist.all_gather(of_all, builds, group=call.group)
    done = [f"jitfmha/{len(kinds)}/{rank}" for rank in range(call.ranks)]
    try:
        for spec in missing:
            (jit.load if spec.toolchain == "host_cpp" else jit.read)(spec)
    finally:  # Nobody waits for one that failed.
        store.set(done[call.rank], "")
    store.wait([x for x, number in zip(done, of_all, strict=True) if number.item()], _PATIENCE)


def _on_meta(like: Tensor, seqlen: int) -> Tensor:
    shape = (like.shape[0], seqlen, *like.shape[2:])
    return torch.empty(shape, dtype=like.dtype, device="meta")


def _explained_ring(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Iterator[Explanation]:
    for mask, *tensors in _blocks_on_meta(q, k, v, call):
        yield explain(*tensors, device=q.device, mask=mask, return_lse=True, **call.options)


def _explained_gradients(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Iterator[Explanation]:
    for mask, *tensors in _blocks_on_meta(q, k, v, call):
        rows = tensors[0].shape[1]
        out = tensors[0].new_empty(*tensors[0].shape[:-1], v.shape[-1])
        lse = out.new_empty(q.shape[0], q.shape[2], rows, dtype=torch.float32)
        yield explain_bwd(*(out, *tensors, out, lse), device=q.device, mask=mask, **call.options)


def _blocks_on_meta(
    q: Tensor, k: Tensor, v: Tensor, call: _Call
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """The mask of each kind of block, with q, k and v of one."""
    for block in _kinds_of_blocks(call):
        rows, keys = (part.stop - part.start for part in (block.rows, block.keys))
        yield block.mask, _on_meta(q, rows), _on_meta(k, keys), _on_meta(v, keys)


def _explained_heads(
    q: Tensor, k: Tensor, v: Tensor, call: _Call, options: dict[str, Any]
) -> Iterator[Explanation]:
    lengths = (call.of_q.seqlen, call.of_k.seqlen, call.of_k.seqlen)
    whole = [
        _on_meta(x[:, :, : x.shape[2] // call.ranks], seqlen)
        for x, seqlen in zip((q, k, v), lengths, strict=True)
    ]
    given: dict[str, Any] = {
        n: x.to("meta") if isinstance(x, Tensor) else x for n, x in options.items()
    }
    yield explain(*whole, device=q.device, return_lse=True, **given)


def _kinds_of_blocks(call: _Call) -> Iterable[_Block]:
    """The largest block with a mask, and the largest one without."""
    largest: dict[bool, _Block] = {}
    blocks = (block for source in range(call.ranks) for block in call.blocks(source))
    for block in sorted(blocks, key=lambda x: (x.keys.stop - x.keys.start) * x.rows.stop):
        largest[block.mask == "none"] = block
    return largest.values()


# ---- Blocks --------------------------------------------------------------------------------------


def _placed(chunks: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """Say where each chunk lies in the shard, and where its rows lie in the sequence."""
    place = 0
    for start, stop in chunks:
        yield place, start, stop
        place += stop - start


def _visible(seqlen_q: int, seqlen_k: int, diagonal: int, mask: Mask) -> _Block | None:
    """What a chunk of queries sees of a chunk of keys, with nothing around it; None for nothing.

    The mask's diagonal is where ``j = i + diagonal``.
    """
    first_row, stop_row, first_key, stop_key = 0, seqlen_q, 0, seqlen_k
    if mask.right is not None:
        right = diagonal + mask.right
        first_row, stop_key = max(0, -right), min(seqlen_k, seqlen_q + right)
    if mask.left is not None:
        left = diagonal - mask.left
        first_key, stop_row = max(0, first_row + left), min(seqlen_q, seqlen_k - left)
    rows, keys = stop_row - first_row, stop_key - first_key
    if rows <= 0 or keys <= 0:
        return None
    moved = diagonal + first_row - first_key
    to_right = keys if mask.right is None else moved + mask.right
    to_left = rows if mask.left is None else mask.left - moved
    sees_all = to_right >= keys - 1 and to_left >= rows - 1
    text = "none" if sees_all else f"t:{-1 if mask.left is None else to_left},{to_right}"
    return _Block(slice(first_row, stop_row), slice(first_key, stop_key), text)


def _moved(where: slice, by: int) -> slice:
    return slice(where.start + by, where.stop + by)


def _add(blocks: list[_Block], block: _Block) -> None:
    """Add a block, as a part of one that is there where both have no mask and touch each other."""
    for i, other in enumerate(blocks):
        if block.mask != "none" or other.mask != "none":
            continue
        joined = None
        if other.rows == block.rows and other.keys.stop == block.keys.start:
            joined = other._replace(keys=slice(other.keys.start, block.keys.stop))
        elif other.keys == block.keys and other.rows.stop == block.rows.start:
            joined = other._replace(rows=slice(other.rows.start, block.rows.stop))
        if joined is not None:
            del blocks[i]
            _add(blocks, joined)
            return
    blocks.append(block)


# ---- The ring ------------------------------------------------------------------------------------


class _Passed:
    """A tensor on its way to the next process, while another one comes from the one before."""

    def __init__(self, x: Tensor, elements: int, call: _Call, tag: int = 0) -> None:
        following, before = (call.rank + 1) % call.ranks, (call.rank - 1) % call.ranks
        self._sent = x  # It must not go before it has been sent.
        self._arriving = x.new_empty(elements)
        to, origin = (dist.get_global_rank(call.group, rank) for rank in (following, before))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, to, call.group, tag),
                dist.P2POp(dist.irecv, self._arriving, origin, call.group, tag),
            ]
        )

    def arrived(self) -> Tensor:
        """What came; raises torch's ``RuntimeError`` where nothing does."""
        for work in self._works:
            work.wait()
        return self._arriving


class _KeysAndValues:
    """k and v of any process in one tensor, as they travel."""

    def __init__(self, k: Tensor, v: Tensor, call: _Call) -> None:
        self._call = call
        self._batch, _, self._heads, self._hdim_k = k.shape
        self._hdim_v = v.shape[-1]

    def packed(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k.flatten(), v.flatten()])

    def elements(self, source: int) -> int:
        return self._rows(source) * (self._hdim_k + self._hdim_v)

    def unpacked(self, packed: Tensor, source: int) -> tuple[Tensor, Tensor]:
        shape = (self._batch, self._call.of_k.length(source), self._heads)
        of_k = self._rows(source) * self._hdim_k
        k, v = packed[:of_k], packed[of_k:]
        return k.view(*shape, self._hdim_k), v.view(*shape, self._hdim_v)

    def _rows(self, source: int) -> int:
        return self._batch * self._call.of_k.length(source) * self._heads


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        _build_together(call, "forward", q, v, lambda: _explained_ring(q, k, v, call))
        shape = (*q.shape[:-1], v.shape[-1])
        out = torch.zeros(shape, dtype=torch.float32, device=q.device)
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32)
        for source, keys, values in _around(k, v, call):
            for block in call.blocks(source):
                part = fmha_fwd(
                    *(q[:, block.rows], keys[:, block.keys], values[:, block.keys]),
                    mask=block.mask,
                    return_lse=True,
                    **call.options,
                )
                _join(out[:, block.rows], lse[:, :, block.rows], *part)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return result, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        call: _Call = ctx.call
        _build_together(call, "backward", q, v, lambda: _explained_gradients(q, k, v, call))
        dout = torch.zeros_like(out) if dout is None else dout
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        dq = torch.zeros_like(q, dtype=torch.float32)
        form = _KeysAndValues(k, v, call)
        packed: Tensor | None = None
        for step, (source, keys, values) in enumerate(_around(k, v, call)):
            if step > 0 and packed is not None:
                # The sums of the process before, for these keys, came this way, too.
                packed = _Passed(packed, form.elements(source), call, tag=1).arrived()
            else:
                packed = q.new_zeros(form.elements(source), dtype=torch.float32)
            dk, dv = form.unpacked(packed, source)
            for block in call.blocks(source):
                rows, at = block.rows, block.keys
                parts = fmha_bwd(
                    *(dout[:, rows], q[:, rows], keys[:, at], values[:, at], out[:, rows]),
                    lse[:, :, rows],
                    dlse=None if dlse is None else dlse[:, :, rows],
                    mask=block.mask,
                    **call.options,
                )
                for total, part in zip((dq[:, rows], dk[:, at], dv[:, at]), parts, strict=True):
                    total.add_(part)
        assert packed is not None
        if call.ranks > 1:
            packed = _Passed(packed, form.elements(call.rank), call, tag=1).arrived()
        dk, dv = form.unpacked(packed, call.rank)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _around(k: Tensor, v: Tensor, call: _Call) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Keys and values of each process, ours first; the next ones travel meanwhile."""
    form = _KeysAndValues(k, v, call)
    packed = form.packed(k, v) if call.ranks > 1 else None
    for step in range(call.ranks):
        source = (call.rank - step) % call.ranks
        on_its_way = None
        if packed is not None and step < call.ranks - 1:
            on_its_way = _Passed(packed, form.elements((source - 1) % call.ranks), call)
        keys, values = (k, v) if packed is None else form.unpacked(packed, source)
        yield source, keys, values
        if on_its_way is not None:
            packed = on_its_way.arrived()


def _join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add the result of more keys to ``out`` (float32) and ``lse``, both in place."""
    joined = torch.logaddexp(lse, part_lse)
    reference = joined.masked_fill(joined == -torch.inf, 0)  # Rows that see no key yet.
    old, new = ((x - reference).exp().transpose(1, 2)[..., None] for x in (lse, part_lse))
    out.mul_(old).add_(part * new)
    lse.copy_(joined)


# ---- All to all ----------------------------------------------------------------------------------


class _Exchange(torch.autograd.Function):
    """One of the two functions below; the other one is its inverse, and takes the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_heads: bool, shards: _Shards, call: _Call) -> Tensor:
        ctx.given = to_heads, shards, call
        return (_rows_for_heads if to_heads else _heads_for_rows)(x, shards, call)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        to_heads, shards, call = ctx.given
        back = _heads_for_rows if to_heads else _rows_for_heads
        return back(gradient, shards, call), None, None, None


def _rows_for_heads(x: Tensor, shards: _Shards, call: _Call) -> Tensor:
    """``(b, rows, h, d)`` becomes ``(b, seqlen, h / ranks, d)``."""
    batch, _, heads, hdim = x.shape
    heads //= call.ranks
    parts = list(x.split(heads, dim=2))
    shapes = [(batch, shards.length(rank), heads, hdim) for rank in range(call.ranks)]
    return _in_order(_exchanged(parts, shapes, call), shards, _SEQUENCE)


def _heads_for_rows(x: Tensor, shards: _Shards, call: _Call) -> Tensor:
    batch, _, heads, hdim = x.shape
    parts = [
        torch.cat([x[:, start:stop] for start, stop in shards.chunks(rank)], _SEQUENCE)
        for rank in range(call.ranks)
    ]
    shapes = [(batch, shards.length(call.rank), heads, hdim)] * call.ranks
    return torch.cat(_exchanged(parts, shapes, call), dim=2)


def _exchanged(parts: list[Tensor], shapes: Sequence[tuple[int, ...]], call: _Call) -> list[Tensor]:
    """What every process has for this one, where it has ``parts`` for each of them."""
    sent = torch.cat([part.flatten() for part in parts])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    arrived = sent.new_empty(sum(sizes))
    dist.all_to_all_single(arrived, sent, sizes, [x.numel() for x in parts], group=call.group)
    pieces = zip(arrived.split(sizes), shapes, strict=True)
    return [piece.view(shape) for piece, shape in pieces]


def _in_order(parts: list[Tensor], shards: _Shards, dim: int) -> Tensor:
    """The rows of all processes in the order of the sequence."""
    placed: list[tuple[int, Tensor]] = []
    for rank, part in enumerate(parts):
        for place, start, stop in _placed(shards.chunks(rank)):
            placed.append((start, part.narrow(dim, place, stop - start)))
    in_order = sorted(placed, key=lambda each: each[0])
    return torch.cat([part for _, part in in_order], dim)
