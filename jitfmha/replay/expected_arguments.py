"""What the arguments and the grid of a recorded kernel should be, by what was asked for.

Strides, lengths and addresses follow from the recorded tensors themselves, the rest from the
problem and from what a manifest says of the kernel. Nothing here is shared with the launcher, whose
arguments these are held against. How workgroups divide the work is the launcher's own choice: of
that only what must hold between the numbers is checked. Strides of dimensions of size 1 may be
anything, and what a mode does not read is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..call.record import (
    FILE,
    INTERFACES,
    Record,
    RecordedKernel,
    RecordedTensor,
    RecordError,
    extent_bytes,
    fields_of,
    where_is,
)
from ..problem.dropout import largest_kept

_FLOAT_BYTES = 4
_OPEN_SIDE = 1 << 30
_WORD = (1 << 32) - 1
_SHUFFLED_ROWS, _SHUFFLED_COLUMNS, _WIDE_SHUFFLED_COLUMNS = 16, 128, 192
_ROUNDING = 1e-6  # of a float32


class Expectation(NamedTuple):
    """What one argument should be.

    Attributes:
        argument: its name; ``grid`` for all three of these.
        value: a number, or the three of a grid.
        why: that follows.
    """

    argument: str
    value: Any
    why: str


class Mismatch(NamedTuple):
    """An argument that is not what the problem implies.

    Attributes:
        kernel: its symbol.
        argument: its name, or ``grid``.
        found: what it is, as people read it.
        expected: what it should be.
        why: that follows.
    """

    kernel: str
    argument: str
    found: str
    expected: str
    why: str

    def __str__(self) -> str:
        return (
            f"{self.argument} of {self.kernel} is {self.found}, expected {self.expected}: "
            f"{self.why}"
        )


def expectations(record: Record, kernel: RecordedKernel) -> list[Expectation]:
    """What the problem implies of one kernel's arguments and grid."""
    facts = _Facts(record, kernel)
    return list(_OF_INTERFACE[kernel.interface](facts))


def mismatches(record: Record) -> list[Mismatch]:
    """Everything that is not as the problem implies, kernel by kernel."""
    return [found for kernel in record.kernels for found in _mismatches_of(record, kernel)]


def _mismatches_of(record: Record, kernel: RecordedKernel) -> Iterator[Mismatch]:
    values = kernel.values()
    for name, value, why in expectations(record, kernel):
        found: Any = kernel.grid if name == "grid" else values[name]
        if _is_same(found, value):
            continue
        is_value, should_be = (_shown(record, kernel, name, each) for each in (found, value))
        yield Mismatch(kernel.symbol, name, is_value, should_be, why)


def _is_same(found: Any, expected: Any) -> bool:
    if isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=_ROUNDING)
    return bool(found == expected)


def _shown(record: Record, kernel: RecordedKernel, name: str, value: Any) -> str:
    """Show an address as what lies there."""
    if name in _addresses(kernel.interface):
        return where_is(record, value) or (f"{value:#x}, where nothing is" if value else "null")
    return str(value)


def _addresses(interface: str) -> set[str]:
    return {name for name, (_, letter) in fields_of(INTERFACES[interface]).items() if letter == "Q"}


class _Row(dict[str, Any]):
    """What is known of a kernel. Raises ``RecordError`` for what is not there, and is needed."""

    def __init__(self, row: Mapping[str, Any], file: Path) -> None:
        super().__init__(row)
        self._file = file

    def __missing__(self, name: str) -> Any:
        raise RecordError(f"{self._file} is damaged: a row of rows has no {name}")


class _Facts:
    """A record, in the words of the argument blocks."""

    def __init__(self, record: Record, kernel: RecordedKernel) -> None:
        self.record = record
        self.problem = record.problem
        self.kernel = kernel
        self.values = kernel.values()
        self.is_group = record.problem.mode == "gm1"
        # One that combines splits has that of the kernel before it.
        rows = (
            _Row(row, record.folder / FILE)
            for row in record.rows.values()
            if kernel.symbol in (row.get("symbol"), row.get("combine_symbol"))
        )
        self.row: Mapping[str, Any] = next(rows, {})
        # Of the longest sequence that the launch is for.
        self.rows_q, self.rows_k = (
            rows if not self.is_group or longest is None else min(longest, rows)
            for longest, rows in zip(
                record.max_seqlens, (self.problem.seqlen_q, self.problem.seqlen_k), strict=True
            )
        )

    @property
    def combines(self) -> bool:
        """Whether the kernel makes one output of several splits."""
        return self.kernel.symbol == self.row.get("combine_symbol")

    def tensor(self, name: str) -> RecordedTensor:
        return self.record.tensors[name]

    def has(self, name: str) -> bool:
        return name in self.record.tensors

    def address(self, name: str) -> int:
        """0 where there is no such tensor."""
        if not self.has(name):
            return 0
        each = self.tensor(name)
        # Without elements it need not lie anywhere.
        return self.record.regions[each.region].address + each.offset

    def addresses(self, names: Mapping[str, str], suffix: str = "") -> Iterator[Expectation]:
        """Arguments that are the addresses of tensors."""
        for argument, name in names.items():
            if self.has(name) and extent_bytes(self.tensor(name)) == 0:
                continue
            why = f"{name} begins there" if self.has(name) else f"the call has no {name}"
            yield Expectation(argument, self.address(name), why + suffix)

    def sums(self, names: Mapping[str, str]) -> Iterator[Expectation]:
        """Addresses of prefix sums; padded ones are the plain ones where rows have no gaps."""
        for argument, name in names.items():
            plain = name.removesuffix("_padded")
            yield from self.addresses({argument: name if self.has(name) else plain})

    def as_before(
        self, argument: str, interface: str, other: str, what: str
    ) -> Iterator[Expectation]:
        """An address that another argument of an earlier kernel is, too."""
        for kernel in self.record.kernels:
            if kernel.interface == interface:
                expected = int(kernel.values()[other])
                yield Expectation(argument, expected, f"the kernel before {what}")

    def tensor_at(self, address: int) -> str | None:
        """Name the tensor that begins at an address."""
        found = where_is(self.record, address)
        return found if found in self.record.tensors else None

    def strides(
        self, name: str, seq: str, head: str, batch: str, *, factor: int = 1
    ) -> Iterator[Expectation]:
        """Expect the strides of a tensor ``(b, s, h, d)`` or ``(s, h, d)``, between rows, heads and
        batches, in bytes.

        ``factor`` is that of heads.
        """
        each = self.tensor(name)
        step = element_bytes(each)
        (rows, heads), (of_rows, of_heads) = each.shape[-3:-1], each.strides[-3:-1]
        why = f"{step} bytes times the stride of {name}'s"
        if rows > 1:
            yield Expectation(seq, of_rows * step, f"{why} rows")
        if heads > 1:
            yield Expectation(head, of_heads * step * factor, f"{why} heads{_times(factor)}")
        if len(each.shape) == 4 and each.shape[0] > 1 and not self.is_group:
            yield Expectation(batch, each.strides[0] * step, f"{why} batches")


def _times(factor: int) -> str:
    return f", times {factor} heads that share tiles" if factor > 1 else ""


def element_bytes(tensor: RecordedTensor) -> int:
    """Return the size of one element, in bytes."""
    return int(getattr(torch, tensor.dtype).itemsize)


def _divided_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


# ---- Forward kernels of AMD's --------------------------------------------------------------------


def _of_aiter(facts: _Facts) -> Iterator[Expectation]:
    problem = facts.problem
    yield from facts.addresses({"ptr_o": "out", "ptr_lse": "lse"})
    yield from _of_both_passes(facts)
    yield Expectation("s_seq_len", facts.rows_q, "queries of the longest sequence")
    yield from facts.strides("q", "s_Seqs", "s_Hs", "s_Bs")
    yield from facts.strides("out", "s_o_Seqs", "s_o_Hs", "s_o_Bs")
    if problem.seqlen_q > 1 and "ts_qo" in facts.row:
        tile = facts.row["ts_qo"]
        rows = facts.tensor("q").strides[-3] * element_bytes(facts.tensor("q"))
        yield Expectation("s_Ts", tile * rows, f"{tile} rows of q, a tile")
    yield Expectation("s_lse", int(facts.has("lse")), "whether the lse is wanted")
    if not facts.is_group:
        yield Expectation("s_kv_seq_len", problem.seqlen_k, "keys of a sequence")
    yield Expectation("s_opt", _schedule(facts), "AITER's rule for the order of work")
    for side in ("q", "k", "v"):
        if facts.has(f"{side}_descale"):
            yield from facts.addresses({f"ptr_{side}_descale": f"{side}_descale"})
        batch, head = getattr(problem, f"{side}_descale") or (0, 0)
        yield Expectation(f"s_descale_{side}_Bs", _FLOAT_BYTES * batch, f"{side}_descale's stride")
        yield Expectation(f"s_descale_{side}_Hs", _FLOAT_BYTES * head, f"{side}_descale's stride")
    if "ts_qo" in facts.row:
        yield Expectation("grid", _aiter_grid(facts), f"its row says {facts.row['grid']}")


def _of_both_passes(facts: _Facts) -> Iterator[Expectation]:
    """What AITER's kernels for out and for the gradients have in common."""
    problem = facts.problem
    yield from facts.addresses({"ptr_q": "q", "ptr_k": "k", "ptr_v": "v"})
    yield Expectation("scalar", float(problem.softmax_scale), "it is the softmax scale")
    for name in ("k", "v"):
        yield from facts.strides(name, f"s_{name}_Seqs", f"s_{name}_Hs", f"s_{name}_Bs")
    yield Expectation("s_gqa", problem.gqa, "query heads of a key head")
    yield Expectation("s_qk_head_dim", problem.hdim_q, "hdim of q and k")
    yield Expectation("s_v_head_dim", problem.hdim_v, "hdim of v")
    yield Expectation("s_q_head_num", problem.heads_q, "heads of q")
    yield Expectation("s_lse_Hs", _FLOAT_BYTES * problem.seqlen_q, _LSE_HEAD)
    yield from facts.sums(
        {
            "ptr_qseq": "cu_seqlens_q",
            "ptr_kseq": "cu_seqlens_k",
            "ptr_qseq_padding": "cu_seqlens_q_padded",
            "ptr_kseq_padding": "cu_seqlens_k_padded",
        }
    )


_LSE_HEAD = "4 bytes for each row of q: a head's lse is contiguous"


def _schedule(facts: _Facts) -> int:
    problem = facts.problem
    if facts.record.arch == "gfx942" and (problem.hdim_q, problem.hdim_v) == (192, 128):
        return 0
    is_masked = facts.row.get("mask", 0) != 0
    return 3 if is_masked and (problem.heads_q % 8 or facts.rows_q > 16384) else 5


def _aiter_grid(facts: _Facts) -> tuple[int, int, int]:
    heads, batch = facts.problem.heads_q, facts.problem.batch
    tiles = _divided_up(facts.rows_q, facts.row["ts_qo"])
    pairs = _divided_up(tiles, 2)
    grids = {
        "tiles_heads_batches": (tiles, heads, batch),
        "tile_pairs_heads_batches": (pairs, heads, batch),
        "heads_tiles_batches": (heads, tiles, batch),
        "heads_batches_tiles": (heads, batch, tiles),
        "heads_batches_tile_pairs": (heads, batch, pairs),
    }
    if facts.row["grid"] not in grids:
        file = facts.record.folder / FILE
        raise RecordError(f"{file} is damaged: a row of rows has the grid {facts.row['grid']!r}")
    return grids[facts.row["grid"]]


# ---- Kernels of ours -----------------------------------------------------------------------------


def _of_ours(facts: _Facts) -> Iterator[Expectation]:
    yield from _of_attention(facts, "", 1)
    yield from _of_our_grid(facts, "", 1, slices=1)


def _of_compiled(facts: _Facts) -> Iterator[Expectation]:
    count = facts.problem.gqa if facts.row.get("stacks_heads") else 1
    yield from _of_attention(facts, "attention.", count)
    yield from _of_modifiers(facts)
    yield from _of_keys(facts)
    yield Expectation("stacked.count.divisor", count, "query heads that share tiles")
    q, out = facts.tensor("q"), facts.tensor("out")
    if facts.problem.heads_q > 1:
        for name, each in (("q", q), ("out", out)):
            step = each.strides[-2] * element_bytes(each)
            yield Expectation(f"stacked.{name}_stride", step, f"bytes between {name}'s heads")
    yield Expectation("stacked.lse_stride", _FLOAT_BYTES * facts.problem.seqlen_q, _LSE_HEAD)
    slices = max(1, int(facts.values["modifiers.slices"]))
    yield from _of_our_grid(facts, "attention.", count, slices)


def _of_tensors(facts: _Facts, prefix: str, count: int) -> Iterator[Expectation]:
    """What all kernels of ours are told, forward and backward, in any block.

    ``count`` query heads that share a key head are rows of the same tiles.
    """
    problem = facts.problem
    yield from facts.addresses({f"{prefix}{name}": name for name in ("q", "k", "v", "out")})
    scale = problem.softmax_scale * math.log2(math.e)
    yield Expectation(f"{prefix}scale_log2", scale, "the softmax scale times log2(e)")
    yield Expectation(f"{prefix}seqlen_q", facts.rows_q, "queries of the longest sequence")
    if not facts.is_group:
        yield Expectation(f"{prefix}seqlen_k", problem.seqlen_k, "keys of a sequence")
    for name in ("q", "k", "v", "out"):
        arguments = (f"{prefix}{name}_{way}" for way in ("seq", "head", "batch"))
        factor = count if name in ("q", "out") else 1
        yield from facts.strides(name, *arguments, factor=factor)
    rows = problem.seqlen_q
    why = _LSE_HEAD + _times(count)
    yield Expectation(f"{prefix}lse_head", _FLOAT_BYTES * rows * count, why)
    if facts.is_group:
        sums = ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_q_padded", "cu_seqlens_k_padded")
        yield from facts.sums({f"{prefix}{name}": name for name in sums})
    yield from _reciprocals(facts)


def _of_attention(facts: _Facts, prefix: str, count: int) -> Iterator[Expectation]:
    """``Arguments``, with ``count`` query heads in the same tiles."""
    problem = facts.problem
    yield from _of_tensors(facts, prefix, count)
    is_forward = problem.gradients is None
    if is_forward:
        yield from facts.addresses({f"{prefix}lse": "lse"})
    heads = problem.heads_q // count
    if is_forward and "ts_qo" in facts.row:
        tiles = _divided_up(facts.rows_q * count, facts.row["ts_qo"])
        yield Expectation(f"{prefix}query_tiles", tiles, f"tiles of {facts.row['ts_qo']} rows")
    yield Expectation(f"{prefix}heads.divisor", heads, "heads with workgroups of their own")
    yield Expectation(f"{prefix}gqa.divisor", heads // problem.heads_k, "of them, of a key head")
    if facts.is_group:
        yield Expectation(f"{prefix}batch.divisor", problem.batch, "sequences")
    for side in ("q", "k", "v"):
        batch, head = getattr(problem, f"{side}_descale") or (0, 0)
        if facts.has(f"{side}_descale"):
            yield from facts.addresses({f"{prefix}{side}_descale": f"{side}_descale"})
        for way, stride in (("batch", batch), ("head", head)):
            argument = f"{prefix}{side}_descale_{way}"
            yield Expectation(argument, _FLOAT_BYTES * stride, f"{side}_descale's stride")


def _reciprocals(facts: _Facts) -> Iterator[Expectation]:
    for name, value in facts.values.items():
        if name.endswith(".divisor"):
            expected = _WORD // int(value) if value else 0
            yield Expectation(
                f"{name.removesuffix('divisor')}reciprocal", expected, f"(2^32 - 1) / {name}"
            )


def _of_our_grid(facts: _Facts, prefix: str, count: int, slices: int) -> Iterator[Expectation]:
    """The grid, and what must hold between the numbers by which workgroups divide the work."""
    problem, values = facts.problem, facts.values
    if "ts_qo" not in facts.row:
        return
    tiles = _divided_up(facts.rows_q * count, facts.row["ts_qo"])
    heads, batch = problem.heads_q // count, problem.batch
    splits = int(values[f"{prefix}num_splits.divisor"])
    has_room = values[f"{prefix}workspace"] != 0
    if has_room != (splits > 1):
        yield Expectation(f"{prefix}num_splits.divisor", 2 if has_room else 1, "of a workspace")
    workgroups = (facts.row["threads"] // 64 if facts.combines else splits) * slices
    if facts.is_group:
        expected = (heads, batch, tiles * workgroups)
        yield Expectation("grid", expected, "heads, sequences, and tiles with their workgroups")
        yield from _of_group_order(facts, prefix, tiles)
        return
    xcds, group = (int(values[f"{prefix}{name}"]) for name in ("xcds.divisor", "group_heads"))
    each = heads * batch // max(xcds, 1)
    yield Expectation(f"{prefix}xcd_heads", each, "heads of all sequences, for each XCD")
    if group and each % group == 0:
        grid = (xcds * group, tiles, each // group * workgroups)
        yield Expectation("grid", grid, "heads in groups, tiles, and groups with their workgroups")


def _of_group_order(facts: _Facts, prefix: str, tiles: int) -> Iterator[Expectation]:
    problem = facts.problem

    def value(name: str) -> int:
        return int(facts.values[f"{prefix}{name}"])

    gqa, sets, first = value("gqa.divisor"), value("xcd_sets.divisor"), value("first_heads")
    pair_tiles = gqa * tiles
    yield Expectation(f"{prefix}pair_tiles.divisor", pair_tiles, "tiles of a key head's heads")
    in_a_set = value("xcds.divisor") // max(sets, 1)
    yield Expectation(f"{prefix}set_xcds.divisor", in_a_set, "XCDs over their sets")
    set_tiles = (problem.heads_k - first) // max(sets, 1) * problem.batch * pair_tiles
    yield Expectation(f"{prefix}set_tiles", set_tiles, "tiles of a set's key heads")
    tail = value("tail_heads.divisor") // max(gqa, 1) * pair_tiles
    yield Expectation(f"{prefix}tail_begin", set_tiles - tail, "a set's tiles without its tail")


def _of_modifiers(facts: _Facts) -> Iterator[Expectation]:
    problem, prefix = facts.problem, "modifiers."
    yield from facts.addresses(
        {f"{prefix}{name}": name for name in ("bias", "alibi_slopes", "sink", "rng_state")}
    )
    if facts.has("bias"):
        bias = facts.tensor("bias")
        steps = _steps(bias, element_bytes(bias), 4)
        for way, step in zip(("batch", "head", "query", "key"), steps, strict=True):
            yield Expectation(f"{prefix}bias_{way}", step, "the bias's stride; 0 for one for all")
        yield Expectation(f"{prefix}bias_keys", bias.shape[-1], "columns of the bias")
    if facts.has("alibi_slopes"):
        slopes = facts.tensor("alibi_slopes")
        if slopes.shape[-1] > 1:
            yield Expectation(f"{prefix}alibi_head", slopes.strides[-1], "the slopes' stride")
        if len(slopes.shape) == 2 and slopes.shape[0] > 1:
            yield Expectation(f"{prefix}alibi_batch", slopes.strides[0], "the slopes' stride")
    if facts.has("sink") and facts.tensor("sink").shape[0] > 1:
        yield Expectation(f"{prefix}sink_head", facts.tensor("sink").strides[0], "sink's stride")
    softcap = problem.modifiers.logit_softcap
    names = ("window_left", "window_right", "is_bottom_right")
    yield from _of_mask(facts, *(f"{prefix}{name}" for name in names))
    yield Expectation(
        f"{prefix}sink_size", min(problem.modifiers.sink_size, _OPEN_SIDE), "sink tokens"
    )
    kept = largest_kept(problem.dropout_p)
    yield Expectation(f"{prefix}largest_kept", kept, f"dropout_p is {problem.dropout_p}")
    keep_scale = 1 / (1 - problem.dropout_p)
    yield Expectation(f"{prefix}keep_scale", keep_scale, f"dropout_p is {problem.dropout_p}")
    yield Expectation(f"{prefix}logit_softcap", float(softcap), "logit_softcap")
    over = problem.softmax_scale / softcap if softcap else 0.0
    yield Expectation(f"{prefix}scale_over_softcap", over, "the softmax scale over logit_softcap")


def _of_mask(facts: _Facts, left: str, right: str, is_bottom_right: str) -> Iterator[Expectation]:
    mask = facts.problem.mask
    for name, side in ((left, mask.left), (right, mask.right)):
        expected = _OPEN_SIDE if side is None else min(side, _OPEN_SIDE)
        yield Expectation(name, expected, f"the mask is {mask}")
    yield Expectation(is_bottom_right, int(not mask.top_left), f"the mask is {mask}")


def _steps(tensor: RecordedTensor, unit: int, count: int) -> tuple[int, ...]:
    """Strides; 0 where a dimension has one element, or is missing."""
    pairs = zip(tensor.shape, tensor.strides, strict=True)
    steps = [0 if size == 1 else stride * unit for size, stride in pairs]
    return (*(0,) * (count - len(steps)), *steps)


def _of_keys(facts: _Facts) -> Iterator[Expectation]:
    """Where keys and values lie, and the scales of integers."""
    problem, prefix = facts.problem, "modifiers."
    yield from facts.addresses({f"{prefix}block_table": "block_table"})
    if problem.is_paged:
        k, v, table = (facts.tensor(name) for name in ("k", "v", "block_table"))
        if table.shape[0] > 1:
            stride = table.strides[0]
            yield Expectation(f"{prefix}block_table_batch", stride, "the table's stride")
        for name, each in (("k", k), ("v", v)):
            if each.shape[0] > 1:
                step = each.strides[0] * element_bytes(each)
                yield Expectation(f"{prefix}{name}_page", step, f"bytes between pages of {name}")
        yield Expectation(f"{prefix}page_size.divisor", k.shape[1], "keys of a page")
        yield Expectation(f"{prefix}num_pages", k.shape[0], "pages")
    v = facts.tensor("v")
    if problem.hdim_v > 1:
        step = v.strides[-1] * element_bytes(v)
        yield Expectation(f"{prefix}v_column", step, "bytes between columns of v")
    for name in ("q", "p"):
        if name == "p" and not facts.has("p_descale"):
            continue
        is_wide = problem.has_query_head_descale
        if name == "p":
            is_wide = len(facts.tensor("p_descale").shape) == 1
        expected = int(is_wide)
        argument = f"{prefix}{name}_descale_of_query_heads"
        yield Expectation(argument, expected, "whether the scales are of query heads")
    yield from facts.addresses({f"{prefix}p_descale": "p_descale"})


def _of_compiled_backward(facts: _Facts) -> Iterator[Expectation]:
    yield from _of_attention(facts, "attention.", 1)
    yield from _of_modifiers(facts)
    yield from facts.addresses({"dbias": "dbias"})
    if facts.has("dbias"):
        strides = facts.tensor("dbias").strides[:-1]
        yield from _strides_of_rows(facts, "dbias", "dbias_strides", strides)
    yield from _of_gradient_tensors(facts, 0)


def _of_ready_backward(facts: _Facts) -> Iterator[Expectation]:
    problem = facts.problem
    yield from _of_tensors(facts, "", 1)
    for name, why in (("batch", "sequences"), ("heads_q", "heads of q"), ("heads_k", "heads of k")):
        yield Expectation(name, getattr(problem, name), why)
    yield Expectation("gqa", problem.gqa, "query heads of a key head")
    yield from _of_mask(facts, "window.left", "window.right", "window.is_bottom_right")
    # dq is added up before the lse and delta of each row.
    rows = math.prod(problem.lse_shape)
    if facts.has("between_0"):
        begin = facts.address("between_0")
        yield Expectation("dq_sums", begin, "it lies between the kernels")
        turns = begin + _FLOAT_BYTES * rows * (problem.hdim_q + 2)
        why = "where workgroups count, behind delta"
        yield Expectation("turns", turns if problem.is_deterministic else 0, why)
    yield from _of_gradient_tensors(facts, rows * problem.hdim_q)


def _of_gradient_tensors(facts: _Facts, sums: int) -> Iterator[Expectation]:
    """What both blocks have; ``sums`` float32 are what dq is added up in."""
    problem, values = facts.problem, facts.values
    names = ("dout", "lse", "dlse", "dq", "dk", "dv")
    yield from facts.addresses({f"gradients.{name}": name for name in names})
    if facts.has("between_0"):
        lse = facts.address("between_0") + _FLOAT_BYTES * sums
        yield Expectation("gradients.lse_log2", lse, "behind what dq is added up in")
        delta = lse + _FLOAT_BYTES * math.prod(problem.lse_shape)
        yield Expectation("gradients.delta", delta, "behind lse_log2")
    for name in ("dout", "dq", "dk", "dv"):
        ways = (f"gradients.{name}_strides.{way}" for way in ("seq", "head", "batch"))
        yield from facts.strides(name, *ways)
    for name in ("lse", "dlse"):
        if facts.has(name):
            strides = facts.tensor(name).strides
            yield from _strides_of_rows(facts, name, f"gradients.{name}_strides", strides)
    lines, tiles = int(values["line_heads.divisor"]), int(values["tiles"])
    if "ts_qo" in facts.row:
        is_of_queries, own = _backward_tile(facts)
        heads = problem.heads_q if is_of_queries else problem.heads_k
        rows = facts.rows_q if is_of_queries else facts.rows_k
        tiles = _divided_up(rows, own)
        side = "q" if is_of_queries else "k"
        yield Expectation("line_heads.divisor", heads, f"heads of {side}")
        yield Expectation("tiles", tiles, f"tiles of {own} rows of {side}")
    xcd_lines = int(values["xcd_lines"])
    x = lines * problem.batch // max(xcd_lines, 1)
    yield Expectation("grid", (x, tiles, xcd_lines), "XCDs, tiles, and the lines of an XCD")


def _backward_tile(facts: _Facts) -> tuple[bool, int]:
    """Whether a workgroup has rows of q, else of k, and how many."""
    if facts.record.family == "ready":
        # The second kernel makes the gradients of keys; those before and behind it go by queries.
        is_second = facts.kernel.symbol in list(facts.record.rows)[1:2]
        return not is_second, facts.row["ts_kv" if is_second else "ts_qo"]
    return facts.kernel.symbol.endswith("_dq"), facts.row["ts_qo"]


def _strides_of_rows(
    facts: _Facts, name: str, argument: str, strides: tuple[int, ...]
) -> Iterator[Expectation]:
    """Expect the strides of ``(b, h, s)`` or ``(h, s)``, in elements."""
    shape = facts.tensor(name).shape[: len(strides)]
    ways = ("batch", "head", "seq")[-len(strides) :]
    for way, size, stride in zip(ways, shape, strides, strict=True):
        if size > 1:
            yield Expectation(f"{argument}.{way}", stride, f"{name}'s stride")


# ---- Backward kernels of AMD's -------------------------------------------------------------------


def _of_row_sums(facts: _Facts) -> Iterator[Expectation]:
    problem = facts.problem
    yield from facts.addresses({"ptr_o": "out", "ptr_do": "dout"})
    yield from facts.strides("out", "s_o_Seqs", "s_o_Hs", "s_o_Bs")
    yield from facts.strides("dout", "s_do_Seqs", "s_do_Hs", "s_do_Bs")
    head = _FLOAT_BYTES * problem.seqlen_q
    yield Expectation("s_d_Hs", head, "4 bytes for each row of q: a head's sums are contiguous")
    yield Expectation("s_d_Seqs", _FLOAT_BYTES, "a float32 for each row")
    if not facts.is_group and problem.batch > 1:
        yield Expectation("s_d_Bs", head * problem.heads_q, "the sums of all heads")
    yield from _of_queries(facts, problem.hdim_v)
    yield from _of_tile_grid(facts, facts.rows_q, 1)


def _of_queries(facts: _Facts, hdim: int) -> Iterator[Expectation]:
    """What the kernels before and behind that of the gradients have in common."""
    if not facts.is_group:
        yield Expectation("s_seq_len_q", facts.problem.seqlen_q, "queries of a sequence")
    yield Expectation("s_head_dim", hdim, "columns of a row")
    yield from facts.sums({"ptr_qseq": "cu_seqlens_q", "ptr_qseq_padding": "cu_seqlens_q_padded"})


def _of_tile_grid(facts: _Facts, rows: int, of_pair: int) -> Iterator[Expectation]:
    if "ts" in facts.row:
        tiles = _divided_up(_divided_up(rows, facts.row["ts"]), of_pair)
        grid = (tiles, facts.problem.heads_q, facts.problem.batch)
        why = f"{'pairs of ' * (of_pair > 1)}tiles of {facts.row['ts']} rows, heads, sequences"
        yield Expectation("grid", grid, why)


def _of_gradients(facts: _Facts) -> Iterator[Expectation]:
    problem = facts.problem
    yield from facts.addresses({"ptr_do": "dout"})
    yield from _of_both_passes(facts)
    yield Expectation("log2e", math.log2(math.e), "log2(e)")
    for name, of in (("q", "q"), ("do", "dout")):
        yield from facts.strides(of, f"s_{name}_Seqs", f"s_{name}_Hs", f"s_{name}_Bs")
    for name in ("dk", "dv"):
        # Where the caller's tensor has no room for every query head, another one takes its place.
        written = facts.tensor_at(int(facts.values[f"ptr_{name}"]))
        if written is None or not written.startswith((name, "between")):
            yield from facts.addresses({f"ptr_{name}": name})
        else:
            yield from facts.strides(written, f"s_{name}_Seqs", f"s_{name}_Hs", f"s_{name}_Bs")
    lse = facts.tensor_at(int(facts.values["ptr_lse"]))
    if lse is None or not lse.startswith(("lse", "between")):
        yield from facts.addresses({"ptr_lse": "lse"})
    if not facts.is_group:
        yield Expectation("s_seq_len_q", problem.seqlen_q, "queries of a sequence")
        yield Expectation("s_seq_len_k", problem.seqlen_k, "keys of a sequence")
    yield from facts.as_before("ptr_d", "AiterRowSumArguments", "ptr_d", "writes its sums there")
    if "ts" in facts.row:
        if problem.seqlen_k > 1:
            k = facts.tensor("k")
            tile = facts.row["ts"] * k.strides[-3] * element_bytes(k) % (1 << 32)
            yield Expectation("s_Ts", tile, f"{facts.row['ts']} rows of k, a tile")
        if facts.row["mask"] == 3:
            yield from _of_window(facts)
    yield from _of_tile_grid(facts, facts.rows_k, 2 if facts.row.get("mask") in (1, 2) else 1)


def _of_window(facts: _Facts) -> Iterator[Expectation]:
    """Distances from the top-left corner, to the right and down; no window is wider than it all."""
    mask, sq, sk = facts.problem.mask, facts.problem.seqlen_q, facts.problem.seqlen_k
    shift = 0 if mask.top_left else sk - sq
    open_left, open_right = (sq - 1, sk - 1) if mask.top_left else (sk - 1, sq - 1)
    left = open_left if mask.left is None else min(mask.left, sq + sk)
    right = open_right if mask.right is None else min(mask.right, sq + sk)
    yield Expectation("mask_x", 1 + right + shift, f"the mask is {mask}")
    yield Expectation("mask_y", 1 + left - shift, f"the mask is {mask}")


def _of_dq(facts: _Facts) -> Iterator[Expectation]:
    problem = facts.problem
    yield from facts.addresses({"ptr_dq": "dq"})
    sums = "AiterGradientArguments", "ptr_dq", "adds dq up there"
    yield from facts.as_before("ptr_dq_acc", *sums)
    yield from facts.strides("dq", "s_dq_Seqs", "s_dq_Hs", "s_dq_Bs")
    rows, step = problem.seqlen_q, _FLOAT_BYTES * problem.hdim_q
    if facts.row.get("kind") == "dq_shuffle":
        rows = _divided_up(facts.rows_q, _SHUFFLED_ROWS) * _SHUFFLED_ROWS
        is_wide = problem.hdim_q == _WIDE_SHUFFLED_COLUMNS
        step = 2 * (_WIDE_SHUFFLED_COLUMNS if is_wide else _SHUFFLED_COLUMNS)
    yield Expectation("s_dq_acc_Seqs", step, "a row of what dq is added up in")
    yield Expectation("s_dq_acc_Hs", step * rows, f"{rows} rows of what dq is added up in")
    if problem.batch > 1 and not facts.is_group:
        all_heads = step * rows * problem.heads_q
        yield Expectation("s_dq_acc_Bs", all_heads, "the rows of all heads")
    yield from _of_queries(facts, problem.hdim_q)
    yield from _of_tile_grid(facts, facts.rows_q, 1)


_OF_INTERFACE: Mapping[str, Callable[[_Facts], Iterator[Expectation]]] = {
    "AiterArguments": _of_aiter,
    "Arguments": _of_ours,
    "CompiledArguments": _of_compiled,
    "BackwardArguments": _of_compiled_backward,
    "ReadyBackwardArguments": _of_ready_backward,
    "AiterRowSumArguments": _of_row_sums,
    "AiterGradientArguments": _of_gradients,
    "AiterDqArguments": _of_dq,
}
