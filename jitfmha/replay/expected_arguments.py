"""What the arguments and the grid of a recorded kernel should be, by what was asked for.

Most follow from the names that ``amd/kernel_arguments.py`` gives them: an argument that is called
after a tensor is its address, ``k_seq`` the stride between the rows of k. The rest follows from the
problem and from what a manifest says of the kernel. Nothing here is shared with the launcher, whose
arguments these are held against. How workgroups divide the work is the launcher's own choice: of
that only what must hold between the numbers is checked. Strides of dimensions of size 1 may be
anything, and what a mode does not read is not looked at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..amd.kernel_arguments import FEW_SPLITS
from ..call.record import (
    FILE,
    INTERFACES,
    Record,
    RecordedKernel,
    RecordedTensor,
    RecordError,
    extent_bytes,
    where_is,
)
from ..problem.dropout import largest_kept
from ..problem.score_features import NUMBER_FEATURES, TENSOR_FEATURES

_FLOAT_BYTES = 4
_OPEN_SIDE = 1 << 30
_WORD = (1 << 32) - 1
_SHUFFLED_ROWS, _SHUFFLED_COLUMNS, _WIDE_SHUFFLED_COLUMNS = 16, 128, 192
_ROUNDING = 1e-6  # of a float32
# What AMD's interfaces call otherwise than this package does, behind "ptr_" or "s_".
_TENSORS_OF_AMD = {
    "": "q", "q": "q", "k": "k", "v": "v", "o": "out", "do": "dout",
    "qseq": "cu_seqlens_q", "qseq_padding": "cu_seqlens_q_padded",
    "kseq": "cu_seqlens_k", "kseq_padding": "cu_seqlens_k_padded",
}  # fmt: skip
_WAYS_OF_AMD = {"Bs": "batch", "Hs": "head", "Seqs": "seq"}
_ADDRESSES = {
    **{name: name for name in ("q", "k", "v", "out", "dout", "dlse", "dq", "dk", "dv", "dbias")},
    **{name: name for name in ("rng_state", "block_table", "p_descale")},
    **{row.name: row.name for row in TENSOR_FEATURES},
    **{f"ptr_{name}": tensor for name, tensor in _TENSORS_OF_AMD.items()},
}
_SUMS = ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_q_padded", "cu_seqlens_k_padded")
_STRUCTS = re.compile(r"(attention|modifiers|gradients|stacked)\.")
_STRIDE = re.compile(r"(?:s_)?(?:(\w+?)(?:_strides)?[_.])?(batch|head|seq|Bs|Hs|Seqs)")
# The dimensions whose strides count bytes, and of what has heads first, whose count elements.
_ROWS_FIRST = ("batch", "seq", "head", "hdim")
_HEADS_FIRST = {
    **dict.fromkeys(("lse", "dlse"), ("batch", "head", "seq")),
    "dbias": ("batch", "head", "seq", "key"),
}


class Expectation(NamedTuple):
    """What an argument, or the ``grid``, should be: a number, or the three of a grid; and why."""

    argument: str
    value: Any
    why: str


class Mismatch(NamedTuple):
    """An argument, or the ``grid``, that is not what the problem implies, as people read it."""

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
    return [*_by_name(facts), *_OF_INTERFACE[kernel.interface](facts)]


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
    if INTERFACES[kernel.interface].leaves.get(name, (0, ""))[1] == "Q":
        return where_is(record, value) or (f"{value:#x}, where nothing is" if value else "null")
    return str(value)


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
        # Query heads that share a key head, and are rows of the same tiles.
        is_stacked = kernel.interface == "CompiledArguments" and self.row.get("stacks_heads")
        self.stacked = self.problem.gqa if is_stacked else 1
        # Of the longest sequence that the launch is for.
        self.rows_q, self.rows_k = (
            rows if not self.is_group or longest is None else min(longest, rows)
            for longest, rows in zip(
                record.max_seqlens, (self.problem.seqlen_q, self.problem.seqlen_k), strict=True
            )
        )
        # Where the caller's tensor has no room for every query head, another one takes its place.
        self._in_place_of = {
            name: self._written(name) for name in ("dk", "dv") if f"ptr_{name}" in self.values
        }

    def tensor(self, name: str) -> RecordedTensor:
        """A tensor by name; of packed pages the strides that stand for rows."""
        each = self.record.tensors[name]
        if name not in ("k", "v") or not self.problem.has_packed_pages:
            return each
        page, head, _, inner, _ = each.strides
        pages, heads, _, rows, _ = each.shape
        page_size = self.problem.seqlen_k
        if name == "k":
            shape, strides = (pages, page_size, heads, self.problem.hdim_q), (page, inner, head, 1)
        else:
            shape, strides = (pages, page_size, heads, rows), (page, 1, head, inner)
        return replace(each, shape=shape, strides=strides)

    def has(self, name: str) -> bool:
        return name in self.record.tensors

    def has_token_descale(self, side: str) -> bool:
        """Whether each token of a tensor has a scale of its own."""
        problem = self.problem
        return {"k": problem.has_token_k_descale, "v": problem.has_token_v_descale}.get(side, False)

    def address(self, argument: str, name: str) -> Iterator[Expectation]:
        """The address of a tensor; null where there is none."""
        name = self._in_place_of.get(name, name)
        if not self.has(name):
            yield Expectation(argument, 0, f"the call has no {name}")
        elif extent_bytes(self.tensor(name)):  # without elements it need not lie anywhere
            yield Expectation(argument, self.begin(name), f"{name} begins there")

    def begin(self, name: str) -> int:
        each = self.tensor(name)
        return self.record.regions[each.region].address + each.offset

    def as_before(
        self, argument: str, interface: str, other: str, what: str
    ) -> Iterator[Expectation]:
        """An address that another argument of an earlier kernel is, too."""
        for kernel in self.record.kernels:
            if kernel.interface == interface:
                expected = int(kernel.values()[other])
                yield Expectation(argument, expected, f"the kernel before {what}")

    def stride(self, argument: str, name: str, way: str) -> Iterator[Expectation]:
        """One of the strides of a tensor, between what ``way`` names."""
        each = self.tensor(self._in_place_of.get(name, name))
        order = _HEADS_FIRST.get(name, _ROWS_FIRST)
        at = order.index(way) - len(order)
        if -at > len(each.shape) or each.shape[at] == 1 or (way == "batch" and self.is_group):
            return
        step = 1 if name in _HEADS_FIRST else element_bytes(each)
        # A head of stacked ones is as many heads of the tensor.
        count = self.stacked if way == "head" and name in ("q", "out") else 1
        why = f"{step} times the stride of {name}'s {way}{_times(count)}"
        yield Expectation(argument, each.strides[at] * step * count, why)

    def _written(self, name: str) -> str:
        found = where_is(self.record, int(self.values[f"ptr_{name}"]))
        is_known = found in self.record.tensors and str(found).startswith((name, "between"))
        return str(found) if is_known else name


def _times(count: int) -> str:
    return f", times {count} heads that share tiles" if count > 1 else ""


def element_bytes(tensor: RecordedTensor) -> int:
    """Return the size of one element, in bytes."""
    return int(getattr(torch, tensor.dtype).itemsize)


def _divided_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


# ---- What names say ------------------------------------------------------------------------------

Numbers = dict[str, tuple[float, str]]
"""What arguments should be and why, by their names without the struct that they stand in."""


def _by_name(facts: _Facts) -> Iterator[Expectation]:
    """What follows from the name of an argument, whatever block it stands in."""
    numbers = _sizes(facts) | _modifiers(facts) | _keys(facts)
    addresses = dict(_ADDRESSES)
    for side in ("q", "k", "v"):
        # Without a scale of the caller's there is one of the launcher's.
        if facts.has(f"{side}_descale"):
            names: tuple[str, ...] = (f"{side}_descale", f"ptr_{side}_descale")
            if facts.has_token_descale(side):
                names = (f"{side}_token_descales",)
            addresses |= dict.fromkeys(names, f"{side}_descale")
    if facts.is_group:
        addresses |= {name: name for name in _SUMS}
    for argument in facts.values:
        name = _STRUCTS.sub("", argument)
        if name in numbers:
            yield Expectation(argument, *numbers[name])
        elif name in addresses:
            tensor = addresses[name]
            # Padded sums are the plain ones where rows have no gaps.
            is_there = facts.has(tensor)
            yield from facts.address(
                argument, tensor if is_there else tensor.removesuffix("_padded")
            )
        elif name.endswith(".reciprocal"):
            divisor = f"{argument.removesuffix('reciprocal')}divisor"
            value = int(facts.values[divisor])
            yield Expectation(argument, _WORD // value if value else 0, f"(2^32 - 1) / {divisor}")
        elif found := _STRIDE.fullmatch(name):
            tensor = _TENSORS_OF_AMD.get(found[1] or "", found[1])
            if tensor in (*_WITH_STRIDES, *_HEADS_FIRST) and facts.has(tensor):
                yield from facts.stride(argument, tensor, _WAYS_OF_AMD.get(found[2], found[2]))


_WITH_STRIDES = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")


def _sizes(facts: _Facts) -> Numbers:
    problem, count = facts.problem, facts.stacked
    heads, scale = problem.heads_q // count, problem.softmax_scale
    head_bytes = _FLOAT_BYTES * problem.seqlen_q
    of_head = "4 bytes for each row of q: a head's lse is contiguous"
    numbers: Numbers = {
        "scalar": (float(scale), "it is the softmax scale"),
        "scale_log2": (scale * math.log2(math.e), "the softmax scale times log2(e)"),
        "log2e": (math.log2(math.e), "log2(e)"),
        **dict.fromkeys(("heads_q", "s_q_head_num"), (problem.heads_q, "heads of q")),
        "heads_k": (problem.heads_k, "heads of k"),
        "batch": (problem.batch, "sequences"),
        **dict.fromkeys(("gqa", "s_gqa"), (problem.gqa, "query heads of a key head")),
        "heads.divisor": (heads, "heads with workgroups of their own"),
        "gqa.divisor": (heads // problem.heads_k, "of them, of a key head"),
        "count.divisor": (count, "query heads that share tiles"),
        "s_qk_head_dim": (problem.hdim_q, "hdim of q and k"),
        "s_v_head_dim": (problem.hdim_v, "hdim of v"),
        **dict.fromkeys(("s_lse_Hs", "lse_stride"), (head_bytes, of_head)),
        "lse_head": (head_bytes * count, of_head + _times(count)),
        **dict.fromkeys(
            ("s_seq_len", "seqlen_q"), (facts.rows_q, "queries of the longest sequence")
        ),
    }
    if facts.is_group:
        numbers["batch.divisor"] = problem.batch, "sequences"
    else:
        keys = problem.seqlen_k, "keys of a sequence"
        numbers |= dict.fromkeys(("seqlen_k", "s_kv_seq_len", "s_seq_len_k"), keys)
        numbers["s_seq_len_q"] = problem.seqlen_q, "queries of a sequence"
    for name in ("q", "out"):
        each = facts.tensor(name)
        if problem.heads_q > 1:
            step = each.strides[-2] * element_bytes(each)
            numbers[f"{name}_stride"] = step, f"bytes between {name}'s heads"
    if problem.hdim_v > 1:
        v = facts.tensor("v")
        numbers["v_column"] = v.strides[-1] * element_bytes(v), "bytes between columns of v"
    return numbers


def _modifiers(facts: _Facts) -> Numbers:
    problem = facts.problem
    numbers: Numbers = {}
    for row in TENSOR_FEATURES:
        if not facts.has(row.name):
            continue
        each = facts.tensor(row.name)
        unit = element_bytes(each) if row.element == "void" else 1
        steps = zip(reversed(each.shape), reversed(each.strides), strict=True)
        strides = [0 if size == 1 else stride * unit for size, stride in steps]
        strides += [0] * (len(row.stride_names) - len(strides))
        for name, stride in zip(row.stride_names, reversed(strides), strict=True):
            numbers[name] = stride, f"the stride of {row.name}; 0 where one serves all"
    if facts.has("bias"):
        numbers["bias_keys"] = facts.tensor("bias").shape[-1], "columns of the bias"
    for row in NUMBER_FEATURES:
        value = getattr(problem.modifiers, row.name)
        expected = float(value) if row.schema == "float" else min(value, _OPEN_SIDE)
        numbers[row.name] = expected, row.name
    softcap, dropout = problem.modifiers.logit_softcap, f"dropout_p is {problem.dropout_p}"
    over = problem.softmax_scale / softcap if softcap else 0.0
    mask = problem.mask
    left, right = (
        _OPEN_SIDE if side is None else min(side, _OPEN_SIDE) for side in (mask.left, mask.right)
    )
    sides = {"left": left, "right": right, "is_bottom_right": int(not mask.top_left)}
    names = {"left": "window_left", "right": "window_right"}
    for name, side in sides.items():
        numbers[f"window.{name}"] = numbers[names.get(name, name)] = side, f"the mask is {mask}"
    return numbers | {
        "scale_over_softcap": (over, "the softmax scale over logit_softcap"),
        "largest_kept": (largest_kept(problem.dropout_p), dropout),
        "keep_scale": (1 / (1 - problem.dropout_p), dropout),
    }


def _keys(facts: _Facts) -> Numbers:
    """Where keys and values lie in pages, and the scales of 8-bit inputs."""
    problem = facts.problem
    shared = "whether the scales are of query heads"
    numbers: Numbers = {"q_descale_of_query_heads": (problem.has_query_head_descale, shared)}
    if facts.has("p_descale"):
        is_wide = len(facts.tensor("p_descale").shape) == 1
        numbers["p_descale_of_query_heads"] = is_wide, shared
    for side in ("q", "k", "v"):
        batch, head = getattr(problem, f"{side}_descale") or (0, 0)
        if facts.has_token_descale(side):
            # Packed ones have no batch.
            strides = (0, *facts.tensor(f"{side}_descale").strides)[-4:-1]
            for way, stride in zip(("batch", "seq", "head"), strides, strict=True):
                numbers[f"{side}_token_{way}"] = _FLOAT_BYTES * stride, f"{side}_descale's stride"
        for names, stride in (
            ((f"{side}_descale_batch", f"s_descale_{side}_Bs"), batch),
            ((f"{side}_descale_head", f"s_descale_{side}_Hs"), head),
        ):
            numbers |= dict.fromkeys(names, (_FLOAT_BYTES * stride, f"{side}_descale's stride"))
    if problem.is_paged:
        k, v, table = (facts.tensor(name) for name in ("k", "v", "block_table"))
        numbers["page_size.divisor"] = problem.seqlen_k, "keys of a page"
        numbers["num_pages"] = k.shape[0], "pages"
        if len(table.shape) == 1:
            numbers["block_table_batch"] = -1, "there are lists in place of a table"
        elif table.shape[0] > 1:
            numbers["block_table_batch"] = table.strides[0], "the table's stride"
        for name, each in (("k", k), ("v", v)):
            if each.shape[0] > 1:
                step = each.strides[0] * element_bytes(each)
                numbers[f"{name}_page"] = step, f"bytes between pages of {name}"
    return numbers


# ---- Forward kernels of AMD's --------------------------------------------------------------------


def _of_aiter(facts: _Facts) -> Iterator[Expectation]:
    yield from facts.address("ptr_lse", "lse")
    yield Expectation("s_lse", int(facts.has("lse")), "whether the lse is wanted")
    yield Expectation("s_opt", _schedule(facts), "AITER's rule for the order of work")
    if "ts_qo" in facts.row:
        yield from _tile_stride(facts, "q", facts.row["ts_qo"])
        yield Expectation("grid", _aiter_grid(facts), f"its row says {facts.row['grid']}")


def _tile_stride(facts: _Facts, name: str, tile: int) -> Iterator[Expectation]:
    each = facts.tensor(name)
    if each.shape[-3] > 1:
        step = tile * each.strides[-3] * element_bytes(each) & _WORD
        yield Expectation("s_Ts", step, f"{tile} rows of {name}, a tile")


def _schedule(facts: _Facts) -> int:
    problem = facts.problem
    if facts.record.arch == "gfx942" and (problem.hdim_q, problem.hdim_v) == (192, 128):
        return 0
    is_masked = facts.row.get("mask", 0) != 0
    return 3 if is_masked and (problem.heads_q % 8 or facts.rows_q > 16384) else 5


def _combining_workgroups(row: Mapping[str, Any], splits: int, slices: int) -> int:
    """Those that combine the splits of a tile (csrc_templates/amd/launcher/forward.h)."""
    waves, rows, columns = row["threads"] // 64, row["ts_qo"], row["hdim_v"]
    if rows >= 32 * waves:
        return int(waves * slices)
    fours = 2 * waves if splits <= FEW_SPLITS and columns > 256 else 2
    return int(rows // 16 * -(-4 * -(-columns // 64) // fours))


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
    yield from _of_forward(facts, "", slices=1)


def _of_compiled(facts: _Facts) -> Iterator[Expectation]:
    slices = max(1, int(facts.values["modifiers.slices"]))
    yield from _of_forward(facts, "attention.", slices)


def _of_forward(facts: _Facts, prefix: str, slices: int) -> Iterator[Expectation]:
    """The grid, and what must hold between the numbers by which workgroups divide the work."""
    problem, values = facts.problem, facts.values
    yield from facts.address(f"{prefix}lse", "lse")
    if "ts_qo" not in facts.row:
        return
    tiles = _divided_up(facts.rows_q * facts.stacked, facts.row["ts_qo"])
    yield Expectation(f"{prefix}query_tiles", tiles, f"tiles of {facts.row['ts_qo']} rows")
    heads, batch = problem.heads_q // facts.stacked, problem.batch
    splits = int(values[f"{prefix}num_splits.divisor"])
    has_room = values[f"{prefix}workspace"] != 0
    if has_room != (splits > 1):
        yield Expectation(f"{prefix}num_splits.divisor", 2 if has_room else 1, "of a workspace")
    # The kernel that makes one output of several splits has a grid of its own.
    combines = facts.kernel.symbol == facts.row.get("combine_symbol")
    workgroups = splits * slices
    if combines:
        workgroups = _combining_workgroups(facts.row, splits, slices)
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


def _of_compiled_backward(facts: _Facts) -> Iterator[Expectation]:
    yield from _of_gradient_tensors(facts, 0)


def _of_ready_backward(facts: _Facts) -> Iterator[Expectation]:
    problem = facts.problem
    # dq is added up before the lse and delta of each row.
    rows = math.prod(problem.lse_shape)
    if facts.has("between_0"):
        begin = facts.begin("between_0")
        yield Expectation("dq_sums", begin, "it lies between the kernels")
        turns = begin + _FLOAT_BYTES * rows * (problem.hdim_q + 2)
        why = "where workgroups count, behind delta"
        yield Expectation("turns", turns if problem.is_deterministic else 0, why)
    yield from _of_gradient_tensors(facts, rows * problem.hdim_q)


def _of_gradient_tensors(facts: _Facts, sums: int) -> Iterator[Expectation]:
    """What both blocks have; ``sums`` float32 are what dq is added up in."""
    problem, values = facts.problem, facts.values
    yield from facts.address("gradients.lse", "lse")
    if facts.has("between_0"):
        lse = facts.begin("between_0") + _FLOAT_BYTES * sums
        yield Expectation("gradients.lse_log2", lse, "behind what dq is added up in")
        delta = lse + _FLOAT_BYTES * math.prod(problem.lse_shape)
        yield Expectation("gradients.delta", delta, "behind lse_log2")
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


# ---- Backward kernels of AMD's -------------------------------------------------------------------


def _of_row_sums(facts: _Facts) -> Iterator[Expectation]:
    problem = facts.problem
    head = _FLOAT_BYTES * problem.seqlen_q
    yield Expectation("s_d_Hs", head, "4 bytes for each row of q: a head's sums are contiguous")
    yield Expectation("s_d_Seqs", _FLOAT_BYTES, "a float32 for each row")
    if not facts.is_group and problem.batch > 1:
        yield Expectation("s_d_Bs", head * problem.heads_q, "the sums of all heads")
    yield Expectation("s_head_dim", problem.hdim_v, "columns of a row")
    yield from _of_tile_grid(facts, facts.rows_q, 1)


def _of_tile_grid(facts: _Facts, rows: int, of_pair: int) -> Iterator[Expectation]:
    if "ts" in facts.row:
        tiles = _divided_up(_divided_up(rows, facts.row["ts"]), of_pair)
        grid = (tiles, facts.problem.heads_q, facts.problem.batch)
        why = f"{'pairs of ' * (of_pair > 1)}tiles of {facts.row['ts']} rows, heads, sequences"
        yield Expectation("grid", grid, why)


def _of_gradients(facts: _Facts) -> Iterator[Expectation]:
    for name in ("dk", "dv"):
        yield from facts.address(f"ptr_{name}", name)
    lse = where_is(facts.record, int(facts.values["ptr_lse"]))
    if lse is None or not lse.startswith("between"):
        yield from facts.address("ptr_lse", "lse")
    yield from facts.as_before("ptr_d", "AiterRowSumArguments", "ptr_d", "writes its sums there")
    if "ts" in facts.row:
        yield from _tile_stride(facts, "k", facts.row["ts"])
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
    yield from facts.address("ptr_dq", "dq")
    sums = "AiterGradientArguments", "ptr_dq", "adds dq up there"
    yield from facts.as_before("ptr_dq_acc", *sums)
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
    yield Expectation("s_head_dim", problem.hdim_q, "columns of a row")
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
