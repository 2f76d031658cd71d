"""What a forward launch takes on a chip, estimated for any lengths: what families are chosen by.

    seconds = max(compute, memory) + what combining splits takes

Workgroups take the cycles that ``cycles.csv`` has; rounds of them, on the units of each XCD, make
the cycles of the launch. The clock falls as matrix units are busier: power limits it, so that the
time goes with all cycles and, with another factor, with those of the matrix units. Memory moves q,
k, v and the output once, at the speed at which streaming reads: workgroups that read the same keys
run side by side on an XCD, whose L2 has them, or find them in the Infinity Cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from typing import NamedTuple

from ..amd.chips import Arch, architecture, chip
from ..amd.clock import Clock, clock_of
from ..amd.manifest import KernelRow
from ..planning.target import AmdTarget
from ..problem.mask import Mask
from ..problem.problem import Problem, element_bytes
from .cycles import CyclesOf, KernelCycles, kernel_cycles

_WAVE_ROWS = 32
# Of tiles under a mask, more than so many are not looked at one by one.
_MOST_TILES = 32
# Workgroups of an XCD that are put on its units one by one.
_MOST_SCHEDULED = 512
# Of what compute and memory take, the shorter one is hidden but for this share: a launch begins
# with loads that nothing hides, and ends with stores.
_NOT_HIDDEN = 0.1
# Multiplications of a compute unit in a cycle, with inputs of 16 bits; and how many times as long
# products of others take. Of fp8 compiled kernels make the second one with 16 bits.
_UNIT_PRODUCTS: dict[Arch, int] = {"gfx942": 1024, "gfx950": 2048}
_FP32_PRODUCTS, _FP8_PRODUCTS, _COMPILED_FP8_PRODUCTS = 8.0, 0.5, 0.75


def length_shares(problem: Problem) -> tuple[float, ...]:
    """The lengths of sequences over their mean, the longest first; each has as many of them.

    Those of packed sequences are on the GPU, and seldom equal: half of these count as twice as long
    as they are on average, and the others as empty.
    """
    return (2.0, 0.0) if problem.mode == "gm1" and problem.batch > 1 else (1.0,)


class Machine(NamedTuple):
    """What decides about times of a GPU."""

    arch: Arch
    compute_units: int
    xcds: int
    bytes_per_second: float
    clock: Clock

    @classmethod
    def of(cls, target: AmdTarget) -> Machine:
        known = target.chip
        if known.streaming_gb_s is None or known.peak_clock_mhz is None:
            known = chip(architecture(target.arch).unlisted_chip)
        assert known.streaming_gb_s is not None
        # A partition has its share of the chip's memory.
        share = target.compute_units / target.chip.compute_units
        xcds = max(round(target.chip.xcds * share), 1)
        bytes_per_second = known.streaming_gb_s * 1e9 * share
        clock = clock_of(known.name)
        return cls(target.arch, target.compute_units, xcds, bytes_per_second, clock)

    def cycles_of_launch(self, sizes: Sequence[float], workgroups: int, shared: int) -> float:
        """Until the last workgroup has ended, where ``shared`` of them share a unit.

        ``sizes`` are the cycles of workgroups in the order of the launch: as many have one as
        another.
        """
        slots = self.compute_units * shared // self.xcds
        each = -(-workgroups // (self.xcds * len(sizes)))
        if len(sizes) == 1 or min(sizes) == max(sizes):
            return -(-each * len(sizes) // slots) * sizes[0]
        if each * len(sizes) > _MOST_SCHEDULED:
            # The longest go first, so that all units end at about the same time.
            mean = sum(sizes) / len(sizes)
            return max(max(sizes), workgroups * mean / (slots * self.xcds) + min(sizes) / 2)
        free_at = [0.0] * slots
        for size in sizes:
            for _ in range(each):
                heapreplace(free_at, free_at[0] + size)
        return max(free_at)

    def seconds_of(self, cycles: float, products: float) -> float:
        """Of a launch of so many cycles with so many multiplications, of 16-bit numbers."""
        of_matrix = products / (_UNIT_PRODUCTS[self.arch] * self.compute_units)
        return self.clock.seconds(cycles, of_matrix)

    def overlapped(self, compute: float, moved_bytes: float) -> float:
        """Seconds of a launch that computes so long and moves so much."""
        memory = moved_bytes / self.bytes_per_second
        return max(compute, memory) + _NOT_HIDDEN * min(compute, memory)


class ForwardEstimate:
    """The seconds of one kernel's launches, of calls that differ in lengths only."""

    def __init__(
        self, problem: Problem, target: AmdTarget, kernels: CyclesOf, row: KernelRow, slices: int
    ) -> None:
        """Prepare for a kernel that makes the output in ``slices``; ``row`` describes it."""
        self._machine = Machine.of(target)
        self._mask = problem.mask
        self._length_shares = length_shares(problem)
        self._sink_size = problem.modifiers.sink_size
        self._ts_qo, self._ts_kv = row.ts_qo, row.ts_kv
        self._rows_of_query = problem.gqa if row.stacks_heads else 1
        self._lines = problem.batch * problem.heads_q // self._rows_of_query * slices
        self._is_paired = "tile_pairs" in row.grid
        dtype = "fp8" if problem.is_fp8 else problem.dtype
        hdims = problem.hdim_q, -(-problem.hdim_v // slices)
        measured = kernel_cycles(
            target.arch, kernels, "forward", dtype, hdims, not problem.mask.is_none
        )
        if kernels != "compiled":
            # Their waves go through all keys, whether they have rows or not.
            of_tile = (each for each in measured if each.rows == row.ts_qo)
            measured = (next(of_tile, None) or measured[-1].with_rows(row.ts_qo),)
        self._cycles = measured
        bytes_of = element_bytes(problem)
        widths = problem.hdim_q, problem.hdim_v
        self._query_bytes = (
            problem.batch * problem.heads_q * (widths[0] * bytes_of.q + widths[1] * bytes_of.out)
        )
        self._key_bytes = problem.batch * problem.heads_k * sum(widths) * bytes_of.kv
        slowness = _FP32_PRODUCTS if problem.dtype == "fp32" else 1.0
        if problem.is_fp8:
            slowness = _COMPILED_FP8_PRODUCTS if kernels == "compiled" else _FP8_PRODUCTS
        self._products_of_key = sum(hdims) * slowness

    @property
    def most_shared(self) -> int:
        """How many workgroups a compute unit has room for."""
        return self._cycles[0].most_shared

    def seconds(self, seqlen_q: int, seqlen_k: int, num_splits: int) -> float:
        """Of sequences of so many queries and keys, without what combining splits takes."""
        machine = self._machine
        rows = seqlen_q * self._rows_of_query
        tiles = -(-rows // self._ts_qo)
        workgroups = self._lines * tiles * num_splits
        if workgroups == 0 or seqlen_k == 0:
            return 0.0
        keys = [count / num_splits for count in self._keys_of_tiles(seqlen_q, seqlen_k, tiles)]
        keys = [count * share for share in self._length_shares for count in keys]
        mean = sum(keys) / len(keys)
        shared = min(self.most_shared, -(-workgroups // machine.compute_units))
        cycles = self._cycles_of(rows / tiles)
        launch = machine.cycles_of_launch(
            [cycles.of_workgroup(shared, count) for count in keys], workgroups, shared
        )
        rows_in_waves = -(-cycles.rows // _WAVE_ROWS) * _WAVE_ROWS
        products = workgroups * mean * rows_in_waves * self._products_of_key
        compute = machine.seconds_of(launch, products)
        moved = seqlen_q * self._query_bytes + seqlen_k * self._key_bytes
        return machine.overlapped(compute, moved)

    def _cycles_of(self, rows: float) -> KernelCycles:
        """Of workgroups with so many rows on average, between what was measured of few and all."""
        few, *more = self._cycles
        if not more:
            return few
        (every,) = more
        waves = -(-min(rows, every.rows) // _WAVE_ROWS) - few.rows / _WAVE_ROWS
        share = waves * _WAVE_ROWS / (every.rows - few.rows)

        def between(least: tuple[float, ...], most: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(a + share * (b - a) for a, b in zip(least, most, strict=True))

        return KernelCycles(
            int(few.rows + share * (every.rows - few.rows)),
            between(few.of_row, every.of_row),
            between(few.once, every.once),
        )

    def _keys_of_tiles(self, seqlen_q: int, seqlen_k: int, tiles: int) -> list[int]:
        """The keys that workgroups go through, by their tiles."""
        queries = self._ts_qo / self._rows_of_query
        spans = spans_of_tiles(self._mask, seqlen_q, seqlen_k, tiles, queries)
        counts = (end - begin + min(self._sink_size, begin) for begin, end in spans)
        return [-(-count // self._ts_kv) * self._ts_kv for count in counts]


def spans_of_tiles(
    mask: Mask, seqlen: int, other_seqlen: int, tiles: int, rows: float
) -> list[tuple[int, int]]:
    """What tiles of ``rows`` see of the other side: the first of its rows, and behind the last.

    Of many tiles those of some, the last one first. Without a mask one stands for all.
    """
    if mask.is_none:
        return [(0, other_seqlen)]
    spans = []
    step = -(-tiles // _MOST_TILES)
    for tile in range(tiles - 1, -1, -step):
        first, last = int(tile * rows), min(int((tile + 1) * rows), seqlen) - 1
        begin, end = _visible(mask, first, last, seqlen, other_seqlen)
        spans.append((begin, max(end, begin)))
    return spans


def _visible(mask: Mask, first: int, last: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """The first key that queries from ``first`` to ``last`` see, and the one behind the last."""
    beyond = 0 if mask.top_left else seqlen_k - seqlen_q
    begin = 0 if mask.left is None else max(first + beyond - mask.left, 0)
    end = seqlen_k if mask.right is None else min(last + beyond + mask.right + 1, seqlen_k)
    return begin, max(end, 0)
