"""What a forward launch takes on a chip, estimated for any lengths: what families are chosen by.

    seconds = max(memory, compute + what waves wait for memory) + what combining splits takes

Workgroups take the cycles that ``cycles.csv`` has; rounds of them, on the units of each XCD, make
the cycles of the launch. The clock falls as matrix units are busier: power limits it, so that the
time goes with all cycles and, with another factor, with those of the matrix units. Memory moves q,
k, v and the output once, at the speed at which streaming reads: workgroups that read the same keys
run side by side on an XCD, whose L2 has them, or find them in the Infinity Cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from itertools import product
from math import gcd
from typing import NamedTuple

from ..amd.chips import SIMDS, Arch, Chip, architecture, chip
from ..amd.clock import Clock, clock_of
from ..amd.manifest import KernelRow
from ..planning.target import AmdTarget
from ..problem.dtypes import BF8_NAMES, FP8_NAMES
from ..problem.mask import Mask
from ..problem.problem import Problem, element_bytes
from .cycles import WAVE_ROWS, CyclesOf, KernelCycles, Part, kernel_cycles

# Of tiles, more than so many are not looked at one by one.
MOST_TILES = 32
# Different lengths that uneven sequences count as having.
_MOST_LENGTHS = 8
# How many times as uneven as keys the queries of mixed sequences are: at least.
_MIXED = 2
# Workgroups of an XCD that are put on its units one by one.
_MOST_SCHEDULED = 512
# Cycles of a workgroup that has no rows, by the cost model 1000 to 2000.
_CYCLES_OF_NO_ROWS = 1500.0
# Those in which a workgroup finds where its packed sequence lies, by the cost model 650 to 1030.
_CYCLES_OF_PLACE = 900.0
# kTailRounds in forward_gm1.h.
_ROUNDS_IN_TURN = 3
# Of what memory takes for the keys of a wave, how much the wave waits for them, by the cost model:
# of kernels that have one tile on its way, with keys that nobody else reads, 0.6 to 0.97.
_WAITED_FOR = 0.8
# The same of kernels that ask for more as soon as there is room: units compute while it comes. But
# they begin by asking for so many bytes a workgroup, as many as their registers have room for.
_WAITED_FOR_IN_DECODE = 0.0
_BEGUN_IN_DECODE = 1 << 16
# Multiplications of a compute unit in a cycle, with inputs of 16 bits; and how many times as long
# products of others take. Of fp8 compiled kernels make the second one with 16 bits.
_UNIT_PRODUCTS: dict[Arch, int] = {"gfx942": 1024, "gfx950": 2048}
_FP32_PRODUCTS, _FP8_PRODUCTS, _COMPILED_FP8_PRODUCTS = 8.0, 0.5, 0.75


class Lengths(NamedTuple):
    """How long the sequences of a call may be, on average over which estimates are made.

    Attributes:
        queries, keys: over the mean, the longest first; as many sequences have one as another.
    """

    queries: tuple[float, ...]
    keys: tuple[float, ...]

    @classmethod
    def of(cls, problem: Problem) -> tuple[Lengths, ...]:
        """Those of packed sequences are on the GPU; what calls tell is how long the longest are.

        Where they do not, sequences are equally long, or else distributed exponentially, since
        their mean is all that is known.
        """
        equal = cls((1.0,), (1.0,))
        counts = min(problem.packs, _MOST_LENGTHS)
        if counts == 1:
            return (equal,)
        queries, keys = problem.unevenness
        if keys is None:
            uneven = _shares(None, counts)
            return equal, cls(uneven, uneven)
        if queries is None:
            queries = keys
        of_queries, of_keys = _shares(queries, counts), _shares(keys, counts)
        others = sum(of_keys[1:])
        if queries >= _MIXED * keys and others:
            # Chunks of prompts beside decoding: on average, each is in the middle of its prompt.
            chunk = (1 + of_queries[0] * problem.seqlen_q / max(problem.seqlen_k, 1)) / 2
            rest = max(counts - chunk, 0.0) / others
            of_keys = (chunk, *(rest * share for share in of_keys[1:]))
        return (cls(of_queries, of_keys),)


def _shares(unevenness: int | None, counts: int) -> tuple[float, ...]:
    """The lengths of so many sequences over their mean, the longest of which may be told.

    Of exponentially distributed ones the expected lengths in order, the others drawn together where
    the longest is not as long as expected.
    """
    others = [sum(1 / (n + 1) for n in range(rank, counts - 1)) for rank in range(counts - 1)]
    expected = others[0] + 1 / counts
    # What calls tell may be less than the mean, or more than all of them together.
    longest = expected if unevenness is None else min(max(unevenness / 2, 1.0), counts)
    apart = min((longest - 1) / (expected - 1), 1.0)
    mean = (counts - longest) / (counts - 1)
    return (longest, *(mean * (1 + apart * (share - 1)) for share in others))


class Moved(NamedTuple):
    """Bytes that HBM moves for a launch: at its ends, and in its main loop."""

    at_ends: float
    streamed: float


def with_speeds(known: Chip) -> Chip:
    """The chip, or one of its architecture whose speeds are published."""
    if known.streaming_gb_s is None or known.peak_clock_mhz is None:
        return chip(known.architecture.unlisted_chip)
    return known


def streaming_of(known: Chip) -> float:
    """Bytes a second that a kernel which only reads gets out of all of a chip's HBM."""
    gb_s = with_speeds(known).streaming_gb_s
    assert gb_s is not None
    return gb_s * 1e9


class Machine(NamedTuple):
    """What decides about times of a GPU."""

    arch: Arch
    compute_units: int
    xcds: int
    bytes_per_second: float
    clock: Clock

    @classmethod
    def of(cls, target: AmdTarget) -> Machine:
        known = with_speeds(target.chip)
        # A partition has its share of the chip's memory.
        share = target.compute_units / target.chip.compute_units
        xcds = max(round(target.chip.xcds * share), 1)
        bytes_per_second = streaming_of(target.chip) * share
        clock = clock_of(known.name)
        return cls(target.arch, target.compute_units, xcds, bytes_per_second, clock)

    def cycles_of_shares(self, cycles: float, once: float, shared: int) -> float:
        """Of persistent workgroups that share work of so many ``cycles``, as far as it can be told.

        Each begins what another one has begun, which takes ``once`` more.
        """
        return cycles / (self.compute_units * shared) + once

    def cycles_of_launch(self, sizes: Sequence[float], workgroups: int, shared: int) -> float:
        """Until the last workgroup has ended, where ``shared`` of them share a unit.

        ``sizes`` are the cycles of workgroups in the order of the launch: as many have one as
        another.
        """
        slots = self.compute_units * shared // self.xcds
        of_xcd = -(-workgroups // self.xcds)
        if min(sizes) == max(sizes):
            return -(-of_xcd // slots) * sizes[0]
        if of_xcd > _MOST_SCHEDULED:
            # The longest go first, so that all units end at about the same time.
            mean = sum(sizes) / len(sizes)
            return max(max(sizes), workgroups * mean / (slots * self.xcds) + min(sizes) / 2)
        if of_xcd < len(sizes):
            # Some of them, the longest among these.
            sizes = sorted(sizes, reverse=True)
        free_at = [0.0] * slots
        for number in range(of_xcd):
            heapreplace(free_at, free_at[0] + sizes[number * len(sizes) // of_xcd])
        return max(free_at)

    def cycles_of_lines(
        self,
        sizes: Sequence[float],
        lines: int,
        tiles: int,
        shared: int,
        *,
        group: int = 1,
        num_splits: int = 1,
    ) -> float:
        """The same where workgroups of a line follow one another, of as many lines as XCDs share.

        On an XCD the tiles of a ``group`` of lines alternate.
        """
        count = lines * tiles * num_splits
        if min(sizes) == max(sizes):
            return self.cycles_of_launch(sizes, count, shared)
        at_once = gcd(lines, self.xcds)
        most = _MOST_SCHEDULED * at_once // self.xcds
        longest = 0.0
        for xcd in range(0, min(self.xcds, count), at_once):
            numbers = range(xcd, count, self.xcds)
            order = [sizes[n // (at_once * group) % len(sizes)] for n in numbers[:most]]
            longest = max(longest, self.cycles_of_xcd(order, len(numbers), shared))
        return longest

    def cycles_of_xcd(self, order: Sequence[float], count: int, shared: int) -> float:
        """Until the last of ``count`` workgroups of an XCD has ended, the first of which are known.

        The XCD deals them to its shader engines in turn, some of which may get the longest ones.
        """
        units = self.compute_units // self.xcds
        engines = min(architecture(self.arch).xcd_engines, units)
        free_at = [[0.0] * (shared * len(range(e, units, engines))) for e in range(engines)]
        for turn, cycles in enumerate(order):
            slots = free_at[turn % units % engines]
            heapreplace(slots, slots[0] + cycles)
        # What others take on average, all units take longer.
        mean = max(sum(slots) / len(slots) for slots in free_at)
        return max(map(max, free_at)) + mean * max(count / len(order) - 1, 0)

    def seconds_of(self, cycles: float, products: float) -> float:
        """Of a launch of so many cycles with so many multiplications, of 16-bit numbers."""
        of_matrix = products / (_UNIT_PRODUCTS[self.arch] * self.compute_units)
        return self.clock.seconds(cycles, of_matrix)

    def cycles_of_bytes(self, count: float) -> float:
        """In which HBM gives so many bytes to a unit while all units stream."""
        return count * self.compute_units / self.bytes_per_second * self.clock.peak

    def overlapped(
        self, compute: float, moved: Moved, waves: float, waited_for: float = _WAITED_FOR
    ) -> float:
        """Seconds of a launch that computes so long and moves so much, with so many waves a SIMD.

        A wave waits for a share of what it loads, ``waited_for``, while others of its SIMD compute.
        Nothing hides what comes before and behind that.
        """
        ends, streamed = (
            moved.at_ends / self.bytes_per_second,
            moved.streamed / self.bytes_per_second,
        )
        return max(ends + streamed, compute + ends + waited_for * streamed / waves)


class ForwardEstimate:
    """The seconds of one kernel's launches, of calls that differ in lengths only.

    Attributes:
        lengths: that sequences may have.
    """

    def __init__(
        self,
        problem: Problem,
        target: AmdTarget,
        kernels: CyclesOf,
        row: KernelRow,
        slices: int,
        *,
        part: Part = "forward",
        is_shared: bool = False,
    ) -> None:
        """Prepare for a kernel that makes the output in ``slices``; ``row`` describes it.

        The work ``is_shared`` among persistent workgroups, all of which have as much of it.
        """
        self._is_shared = is_shared
        self._machine = Machine.of(target)
        self._mask = problem.mask
        self.lengths = Lengths.of(problem)
        self._sink_size = problem.modifiers.sink_size
        self._ts_qo, self._ts_kv = row.ts_qo, row.ts_kv
        self._waves = max(row.ts_qo / (WAVE_ROWS * SIMDS), 1)
        is_decode = part == "decode"
        self._waited_for = _WAITED_FOR_IN_DECODE if is_decode else _WAITED_FOR
        self._begun_bytes = _BEGUN_IN_DECODE if is_decode else 0
        self._rows_of_query = problem.gqa if row.stacks_heads else 1
        self._lines = problem.batch * problem.heads_q // self._rows_of_query * slices
        self._grid, self._batch = row.grid, problem.batch
        self._cycles_of_place = _CYCLES_OF_PLACE if problem.mode == "gm1" else 0.0
        # Of gm1 those whose query heads have their tiles side by side.
        self._pair_heads = problem.heads_k * slices
        # Of gm0 how many heads have their tiles in turn: `Order` in forward_gm0.h.
        heads = self._lines // problem.batch if problem.batch else 0
        xcds = gcd(self._lines, self._machine.xcds)
        in_turn = heads // xcds if heads % xcds == 0 else gcd(self._lines // xcds, heads)
        self._heads_in_turn = 1 if problem.mask.is_none else in_turn
        dtype = _measured_dtype(problem, part)
        hdims = problem.hdim_q, -(-problem.hdim_v // slices)
        measured = kernel_cycles(target.arch, kernels, part, dtype, hdims, not problem.mask.is_none)
        if kernels != "compiled" or part == "decode":
            # Their waves go through all keys, whether they have rows or not.
            of_tile = (each for each in measured if each.rows == row.ts_qo)
            measured = (next(of_tile, None) or measured[-1].with_rows(row.ts_qo),)
        elif row.ts_qo < measured[-1].rows:
            measured = measured[:1]  # a kernel for few rows
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
        counts = [self.seconds_of(each, seqlen_q, seqlen_k, num_splits) for each in self.lengths]
        return sum(counts) / len(counts)

    def seconds_of(self, lengths: Lengths, seqlen_q: int, seqlen_k: int, num_splits: int) -> float:
        """The same of sequences with such lengths, so many of which they are on average."""
        machine = self._machine
        if self._lines * seqlen_q * seqlen_k == 0:
            return 0.0
        # Each sequence has a query at least.
        queries = [round(1 + share * (seqlen_q - 1)) for share in lengths.queries]
        tiles = [-(-count * self._rows_of_query // self._ts_qo) for count in queries]
        # Those of shorter sequences that have no rows are launched, too.
        launched = self._lines * max(tiles) * num_splits
        shared = self.most_shared
        if not self._is_shared:
            shared = min(shared, -(-launched // machine.compute_units))
        step = -(-sum(tiles) // MOST_TILES)
        of_sequences: list[list[float]] = []
        products = 0.0
        for share, count, tiles_of_it in zip(lengths.keys, queries, tiles, strict=True):
            of_sequences.append([])
            rows = count * self._rows_of_query
            # The last tile, which is the first here, has what others leave.
            of_last = rows - (tiles_of_it - 1) * self._ts_qo
            cycles = self._cycles_of(of_last if step == 1 else rows / tiles_of_it)
            of_others = self._cycles_of(self._ts_qo) if step == 1 < tiles_of_it else cycles
            for keys in self._keys_of_tiles(count, round(share * seqlen_k), tiles_of_it, step):
                size = cycles.of_workgroup(shared, keys / num_splits)
                of_sequences[-1].append(self._cycles_of_place + size)
                products += keys / num_splits * cycles.rows
                cycles = of_others
        sizes = [size for each in of_sequences for size in each]
        workgroups = -(-self._lines * sum(tiles) * num_splits // len(tiles))
        if self._is_shared:
            every = workgroups / len(sizes) * sum(sizes)
            launch = machine.cycles_of_shares(every, self._cycles[-1].once[shared - 1], shared)
        else:
            launch = self._cycles_in_order(of_sequences, tiles, workgroups, num_splits, shared)
        products *= workgroups / len(sizes) * self._products_of_key
        compute = machine.seconds_of(launch, products)
        key_bytes = seqlen_k * self._key_bytes
        begun = min(workgroups * self._begun_bytes, key_bytes)
        moved = Moved(seqlen_q * self._query_bytes + begun, key_bytes - begun)
        return machine.overlapped(compute, moved, shared * self._waves, self._waited_for)

    def _cycles_in_order(
        self,
        sizes: Sequence[Sequence[float]],
        tiles: Sequence[int],
        workgroups: int,
        num_splits: int,
        shared: int,
    ) -> float:
        """The cycles of a launch by the order in which XCDs and their engines get workgroups.

        ``sizes`` are those of the tiles of each sequence, or of some of many.
        """
        machine = self._machine
        every = [size for of_sequence in sizes for size in of_sequence]
        are_equal = min(every) == max(every) and min(tiles) == max(tiles)
        if are_equal or self._grid not in ("xcd_heads_tiles_splits", "heads_batches_tiles_splits"):
            return machine.cycles_of_launch(every, workgroups, shared)
        if self._grid == "xcd_heads_tiles_splits":
            (of_line,), (count,) = sizes, tiles
            spread = [of_line[n * len(of_line) // count] for n in range(count)]
            return machine.cycles_of_lines(
                *(spread, self._lines, count, shared),
                group=self._heads_in_turn,
                num_splits=num_splits,
            )
        launched = self._lines * max(tiles) * num_splits
        # Each set of XCDs has some key heads, and deals their workgroups to its XCDs in turn.
        sets = gcd(self._pair_heads, machine.xcds)
        if launched > _MOST_SCHEDULED * sets:
            return machine.cycles_of_launch(every, workgroups, shared)
        set_xcds = machine.xcds // sets
        of_orders = []
        # Nobody knows whether the longest sequences come first or last.
        for step in (1, -1):
            order = self._order_of_set(sizes[::step], tiles[::step], num_splits, shared * set_xcds)
            of_xcds = (order[n::set_xcds] for n in range(min(set_xcds, len(order))))
            of_orders.append(max(machine.cycles_of_xcd(x, len(x), shared) for x in of_xcds))
        return sum(of_orders) / len(of_orders)

    def _order_of_set(
        self, sizes: Sequence[Sequence[float]], tiles: Sequence[int], num_splits: int, shared: int
    ) -> list[float]:
        """The cycles of the workgroups of a set of XCDs, in order: `Order` in forward_gm1.h.

        A sequence and key head after the other, each with as many tiles as the longest one has; but
        under a mask of as many of them as three rounds take first all tiles that are longest.
        """
        machine = self._machine
        most, of_pair = max(tiles), self._lines // (self._batch * self._pair_heads)
        pairs = self._pair_heads // gcd(self._pair_heads, machine.xcds) * self._batch
        in_turn = 1
        if not self._mask.is_none and most > 1:
            slots = machine.compute_units // machine.xcds * shared
            in_turn = min(pairs, -(-_ROUNDS_IN_TURN * slots // (of_pair * most)))
        order: list[float] = []
        alone = pairs - in_turn
        for together in (*([pair] for pair in range(alone)), range(alone, pairs)):
            for rank, pair in product(range(most), together):
                n = pair % self._batch * len(tiles) // self._batch
                cycles = _CYCLES_OF_NO_ROWS
                if rank < tiles[n]:
                    cycles = sizes[n][rank * len(sizes[n]) // tiles[n]]
                order += [cycles] * (of_pair * num_splits)
        return order

    def _cycles_of(self, rows: float) -> KernelCycles:
        """Of workgroups with so many rows on average, between what was measured of few and all."""
        few, *more = self._cycles
        return few.towards(more[0], rows) if more else few

    def _keys_of_tiles(self, seqlen_q: int, seqlen_k: int, tiles: int, step: int) -> list[int]:
        """The keys that workgroups go through, by their tiles."""
        queries = self._ts_qo / self._rows_of_query
        spans = spans_of_tiles(self._mask, seqlen_q, seqlen_k, tiles, queries, step)
        counts = (end - begin + min(self._sink_size, begin) for begin, end in spans)
        return [-(-count // self._ts_kv) * self._ts_kv for count in counts]


def _measured_dtype(problem: Problem, part: Part) -> str:
    """The data type of which `cycles.csv` has the cycles of such calls, or about the same."""
    has_fp8_keys = problem.kv_dtype in FP8_NAMES.values()
    if problem.is_fp8 or (has_fp8_keys and part == "decode"):
        return "fp8"
    # Products take 16 bits in place of the 8 in memory, as those of integers do.
    is_widened = problem.has_8_bit_keys_alone and problem.dtype != "fp32"
    return "int8" if is_widened or problem.dtype in BF8_NAMES.values() else problem.dtype


def spans_of_tiles(
    mask: Mask, seqlen: int, other_seqlen: int, tiles: int, rows: float, step: int
) -> list[tuple[int, int]]:
    """What tiles of ``rows`` see of the other side: the first of its rows, and behind the last.

    Those of every ``step``-th tile, the last one first.
    """
    if mask.is_none:
        return [(0, other_seqlen)] * -(-tiles // step)
    spans = []
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
