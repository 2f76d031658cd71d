"""What a forward launch takes, as :mod:`jitfmha.kernels.estimate` says, by plain numbers.

``python -m jitfmha export`` translates this module to C++, so it keeps to the Python that
``jitfmha/export/translation.py`` knows. Sums are loops, since ``sum`` rounds otherwise from one
version of Python to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from math import ceil, gcd
from typing import NamedTuple

from ..amd.chips import SIMDS, Arch
from ..amd.clock_speed import ClockSpeed
from ..amd.manifest import GridAxes, KernelRow

WAVE_ROWS = 32
_ROWS_OF_SIMDS = SIMDS * WAVE_ROWS  # of one wave in each
# Of tiles, more than so many are not looked at one by one.
MOST_TILES = 32
# Different lengths that uneven sequences count as having.
_MOST_LENGTHS = 8
# How many times as uneven as keys the queries of mixed sequences are: at least.
_MIXED = 2
# Workgroups of an XCD that are put on its units one by one.
_MOST_SCHEDULED = 512
# Sequences and key heads that are looked at one by one, to see which engines get them.
_MOST_PAIRS = 64
# Cycles of a workgroup that has no rows, by the cost model 1000 to 2000.
_CYCLES_OF_NO_ROWS = 1500.0
# Those in which a workgroup finds where its packed sequence lies, by the cost model 850 to 1030,
# and 650 to 860 of kernels for few rows.
_CYCLES_OF_PLACE, _CYCLES_OF_PLACE_IN_DECODE = 950.0, 700.0
# kTailRounds in forward_gm1.h.
_ROUNDS_IN_TURN = 3
# kLeastShareTiles in work_list.h, and kGroup in block_parts.h.
_LEAST_SHARE_TILES, _ADDED_AT_ONCE = 6, 4
# In which persistent workgroups find a block in the list, by the cost model: a barrier and a round
# of loads.
CYCLES_OF_LISTED = 500.0
# Persistent workgroups add a group of parts of a block in so many cycles for each column, and more
# for each of the other parts; as many times as many share a unit. By the cost model 16 to 28 with
# one other part, 31 to 48 with three, but 20 to 36 with one of wide rows.
_CYCLES_OF_ADDING, _CYCLES_OF_ADDED = 16.0, 8.0
_MOST_LEVELS = 5  # of groups of parts, which are parts of larger groups
# From where a wave asks HBM for a tile of keys or queries until it has it, and the tile's rows: by
# the cost model 1300 to 2200 where one tile is on its way. The wave computes meanwhile.
_CYCLES_ON_THE_WAY, _ROWS_ON_THE_WAY = 1500.0, 32
# Before their first product workgroups ask for so many keys with values, by the cost model: where
# one tile is on its way, and of ready kernels with several.
_KEYS_BEGUN, _KEYS_BEGUN_READY, _KEYS_BEGUN_OF_SEVERAL = 16, 48, 128
# Kernels for few rows ask for more as soon as there is room: units compute while it comes. But they
# begin by asking for so many bytes a workgroup, as many as their registers have room for.
_BEGUN_IN_DECODE = 65536
# Multiplications of a compute unit in a cycle, with inputs of 16 bits; and how many times as long
# products of others take. Of fp8 compiled kernels make the second one with 16 bits.
_UNIT_PRODUCTS: dict[Arch, int] = {"gfx942": 1024, "gfx950": 2048}
_FP32_PRODUCTS, _FP8_PRODUCTS, _COMPILED_FP8_PRODUCTS = 8.0, 0.5, 0.75


class KernelCycles(NamedTuple):
    """What workgroups take, by how many of them share a compute unit, beginning with one.

    Attributes:
        rows: that a workgroup has: queries, or keys of kernels that make dk and dv.
        of_row: cycles for each row that it goes through, of keys or queries.
        once: cycles beside those.
    """

    rows: int
    of_row: Sequence[float]
    once: Sequence[float]

    def most_shared(self) -> int:
        """How many workgroups a compute unit has room for."""
        return len(self.of_row)

    def with_rows(self, rows: int) -> KernelCycles:
        """What workgroups with another number of rows take, in proportion."""
        of_row: list[float] = [cycles * rows / self.rows for cycles in self.of_row]
        return KernelCycles(rows, of_row, self.once)

    def of_workgroup(self, shared: int, rows: float) -> float:
        """Cycles of each of ``shared`` workgroups of a unit that go through so many rows.

        One that goes through none ends at once.
        """
        if rows == 0:
            return 0.0
        return self.once[shared - 1] + self.of_row[shared - 1] * rows

    def towards(self, other: KernelCycles, rows: float) -> KernelCycles:
        """Between these with rows for one wave and the ``other`` ones with rows for all.

        Workgroups have so many ``rows`` on average, of which a wave has `WAVE_ROWS`.
        """
        waves = ceil(min(rows, other.rows) / WAVE_ROWS)
        share = (waves - 1) * WAVE_ROWS / (other.rows - WAVE_ROWS)
        return KernelCycles(
            int(self.rows + share * (other.rows - self.rows)),
            _between(self.of_row, other.of_row, share),
            _between(self.once, other.once, share),
        )


def _between(least: Sequence[float], most: Sequence[float], share: float) -> Sequence[float]:
    values: list[float] = [least[i] + share * (most[i] - least[i]) for i in range(len(least))]
    return values


class Span(NamedTuple):
    """Rows from the first to the one behind the last."""

    begin: int
    end: int


class Band(NamedTuple):
    """What a mask lets queries see: keys beside a diagonal.

    Attributes:
        left, right: how far; -1: all.
    """

    is_top_left: bool
    left: int
    right: int

    def is_none(self) -> bool:
        """Whether every query sees every key."""
        return self.left < 0 and self.right < 0

    def seen(self, first: int, last: int, seqlen_q: int, seqlen_k: int) -> Span:
        """The keys that queries from ``first`` to ``last`` see."""
        beyond = 0 if self.is_top_left else seqlen_k - seqlen_q
        begin = 0 if self.left < 0 else max(first + beyond - self.left, 0)
        end = seqlen_k if self.right < 0 else min(last + beyond + self.right + 1, seqlen_k)
        return Span(begin, max(end, begin, 0))


def spans_of_tiles(
    band: Band, seqlen: int, other_seqlen: int, tiles: int, rows: float, step: int
) -> Sequence[Span]:
    """What tiles of ``rows`` see of the other side.

    Those of every ``step``-th tile, the last one first.
    """
    spans: list[Span] = []
    for number in range(-(-tiles // step)):
        tile = tiles - 1 - number * step
        if band.is_none():
            spans.append(Span(0, other_seqlen))
        else:
            last = min(int((tile + 1) * rows), seqlen) - 1
            spans.append(band.seen(int(tile * rows), last, seqlen, other_seqlen))
    return spans


class Lengths(NamedTuple):
    """How long the sequences of a call may be, on average over which estimates are made.

    Attributes:
        queries, keys: over the mean, the longest first; as many sequences have one as another.
        longest_keys: over the mean, which the launch splits for.
    """

    queries: Sequence[float]
    keys: Sequence[float]
    longest_keys: float


def lengths_of_packs(
    packs: int, queries: int, keys: int, seqlen_q: int, seqlen_k: int
) -> Sequence[Lengths]:
    """Those of packed sequences are on the GPU; what calls tell is how long the longest are.

    That is ``queries`` and ``keys``, in halves of the mean; -1: nobody tells. Where they do not,
    sequences are equally long, or else distributed exponentially, since their mean is all that is
    known.
    """
    counts = min(packs, _MOST_LENGTHS)
    lengths: list[Lengths] = []
    if counts == 1 or keys < 0:
        equal: list[float] = [1.0]
        lengths.append(Lengths(equal, equal, 1.0))
    if counts == 1:
        return lengths
    if keys < 0:
        uneven = _shares(-1, counts)
        lengths.append(Lengths(uneven, uneven, uneven[0]))
        return lengths
    longest_q = keys if queries < 0 else queries
    of_queries = _shares(longest_q, counts)
    of_keys = _shares(keys, counts)
    # Chunks of prompts beside decoding: as many as have all queries. On average, each is in the
    # middle of its prompt.
    chunks = ceil(counts / of_queries[0])
    others = 0.0
    for i in range(counts - chunks):
        others += of_keys[chunks + i]
    is_mixed = longest_q >= _MIXED * keys and others > 0
    # Those with the most queries may have the most keys, or be such chunks; so they are where the
    # longest leave a query or so to each of the others.
    if chunks > 1 or not is_mixed:
        lengths.append(Lengths(of_queries, of_keys, of_keys[0]))
    if not is_mixed:
        return lengths
    chunk_queries: list[float] = []
    mixed: list[float] = []
    rest = 1.0 * counts
    for i in range(counts):
        share = max(min(of_queries[0], counts - i * of_queries[0]), 0.0)
        of_prompt = min((1 + share * seqlen_q / max(seqlen_k, 1)) / 2, rest)
        chunk_queries.append(share)
        mixed.append(of_prompt if i < chunks else rest * of_keys[i] / others)
        if i < chunks:
            rest -= of_prompt
    lengths.append(Lengths(chunk_queries, mixed, of_keys[0]))
    return lengths


def _shares(unevenness: int, counts: int) -> Sequence[float]:
    """The lengths of so many sequences over their mean, the longest of which may be told.

    Of exponentially distributed ones the expected lengths in order, the others drawn together where
    the longest is not as long as expected.
    """
    others: list[float] = []
    for rank in range(counts - 1):
        share = 0.0
        for n in range(counts - 1 - rank):
            share += 1 / (rank + n + 1)
        others.append(share)
    expected = others[0] + 1 / counts
    longest = expected
    if unevenness >= 0:
        # What calls tell is rounded down, if sequences are not all equal. It may be less than the
        # mean, or more than all of them together.
        longest = min((unevenness + 0.5) / 2 if unevenness > 2 else 1.0, counts)
    apart = min((longest - 1) / (expected - 1), 1.0)
    mean = (counts - longest) / (counts - 1)
    shares: list[float] = [
        longest if rank == 0 else mean * (1 + apart * (others[rank - 1] - 1))
        for rank in range(counts)
    ]
    return shares


class SeenKeys(NamedTuple):
    """How many keys the rows of a tile see.

    Attributes:
        passed: those that the workgroup goes through, in whole tiles of keys.
        by_any, by_all: those that some row sees, and those that a mask hides from none.
    """

    passed: int
    by_any: int
    by_all: int


class Moved(NamedTuple):
    """Bytes that HBM moves for a launch: at its ends, and in its main loop."""

    at_ends: float
    streamed: float


class SharedWork(NamedTuple):
    """What persistent workgroups share, in cycles.

    Attributes:
        every, longest: of all blocks of rows, and of the longest one.
        least: of a share.
        once: of a part of a block, beside its keys.
        tile: of a tile of keys.
        columns: of the output; fewer where some waves have no rows.
    """

    every: float
    longest: float
    least: float
    once: float
    tile: float
    columns: float


class Machine(NamedTuple):
    """What decides about times of a GPU.

    Attributes:
        xcd_engines: shader engines of an XCD.
        bytes_per_second: that streaming reads get out of its HBM.
    """

    arch: Arch
    compute_units: int
    xcds: int
    xcd_engines: int
    bytes_per_second: float
    clock: ClockSpeed

    def cycles_of_shares(self, work: SharedWork, shared: int) -> float:
        """Until the last of persistent workgroups has ended, ``shared`` of which share a unit.

        All have as much work, up to a tile of keys, and the ``least`` share or more, as far as
        there is work. Where a share ends and the next one begins a block is cut: that one begins
        it anew, and the last one of all that have parts of it adds them.
        """
        share = max(work.every / (self.compute_units * shared), min(work.every, work.least))
        if share >= work.every:
            return work.every
        parts = min(ceil(work.longest / share) + 1, ceil(work.every / share))
        added = 0.0
        for _ in range(_MOST_LEVELS):
            others = min(parts, _ADDED_AT_ONCE) - 1
            if others > 0:
                added += _CYCLES_OF_ADDING + _CYCLES_OF_ADDED * others
            parts = -(-parts // _ADDED_AT_ONCE)
        return share + work.tile + work.once + added * work.columns * shared

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
            mean = _total(sizes) / len(sizes)
            return max(max(sizes), workgroups * mean / (slots * self.xcds) + min(sizes) / 2)
        if of_xcd < len(sizes):
            # Some of them, the longest among these.
            longest: list[float] = sorted(sizes, reverse=True)
            return _cycles_of_slots(longest, of_xcd, slots)
        return _cycles_of_slots(sizes, of_xcd, slots)

    def cycles_of_lines(
        self,
        sizes: Sequence[float],
        lines: int,
        tiles: int,
        shared: int,
        group: int,
        num_splits: int,
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
        for line in range(-(-min(self.xcds, count) // at_once)):
            xcd = line * at_once
            of_xcd = -(-(count - xcd) // self.xcds)
            order: list[float] = [
                sizes[(xcd + n * self.xcds) // (at_once * group) % len(sizes)]
                for n in range(min(of_xcd, most))
            ]
            longest = max(longest, self.cycles_of_xcd(order, of_xcd, shared))
        return longest

    def cycles_of_xcd(self, order: Sequence[float], count: int, shared: int) -> float:
        """Until the last of ``count`` workgroups of an XCD has ended, the first of which are known.

        The XCD deals them to its shader engines in turn, some of which may get the longest ones.
        """
        units = self.compute_units // self.xcds
        engines = min(self.xcd_engines, units)
        longest = 0.0
        mean = 0.0
        for engine in range(engines):
            slots = shared * -(-(units - engine) // engines)
            free_at: list[float] = [0.0] * slots
            every = 0.0
            for turn in range(len(order)):
                if turn % units % engines == engine:
                    heapreplace(free_at, free_at[0] + order[turn])
                    every += order[turn]
            longest = max(longest, max(free_at))
            mean = max(mean, every / slots)
        # What others take on average, all units take longer.
        return longest + mean * max(count / len(order) - 1, 0.0)

    def seconds_of(self, cycles: float, products: float) -> float:
        """Of a launch of so many cycles with so many multiplications, of 16-bit numbers."""
        of_matrix = products / (_UNIT_PRODUCTS[self.arch] * self.compute_units)
        return self.clock.seconds(cycles, of_matrix)

    def overlapped(self, compute: float, moved: Moved, waited: float) -> float:
        """Seconds of a launch that computes so long, moves so much and waits so long for that.

        Nothing hides what comes before and behind its main loop.
        """
        ends = moved.at_ends / self.bytes_per_second
        streamed = moved.streamed / self.bytes_per_second
        return ends + max(streamed, compute + waited)

    def waits(self, looped: float, of_row: float, moved: Moved, shared: int) -> float:
        """The seconds that waves with one tile on its way wait for what the main loop moves.

        Of ``shared`` workgroups of a unit each has its share of that to wait for, while it computes
        for so many seconds, ``looped``, or cycles for each row, less the time on the way.
        """
        computed_meanwhile = max(1 - _CYCLES_ON_THE_WAY / (_ROWS_ON_THE_WAY * of_row), 0.0)
        of_workgroup = moved.streamed / self.bytes_per_second / shared
        return max(of_workgroup - computed_meanwhile * looped, 0.0)


def _total(values: Sequence[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total


def _cycles_of_slots(sizes: Sequence[float], count: int, slots: int) -> float:
    """Until the last of so many workgroups has ended, each of which takes the first free slot."""
    free_at: list[float] = [0.0] * slots
    for number in range(count):
        heapreplace(free_at, free_at[0] + sizes[number * len(sizes) // count])
    return max(free_at)


class EstimatedCall(NamedTuple):
    """What estimates know of calls that differ in lengths only.

    Attributes:
        lengths: that sequences may have.
        q_bytes, kv_bytes, out_bytes: of a number.
        is_fp8, is_fp32: of queries.
    """

    batch: int
    heads_q: int
    heads_k: int
    hdim_q: int
    hdim_v: int
    q_bytes: int
    kv_bytes: int
    out_bytes: int
    is_fp8: bool
    is_fp32: bool
    is_group: bool
    band: Band
    sink_size: int
    lengths: Sequence[Lengths]


class EstimatedKernel(NamedTuple):
    """How a kernel divides the work of a call.

    Attributes:
        slices: in which it makes the columns of the output.
        is_compiled: or comes ready.
        is_decode: whether it is one for few rows, whose waves share keys.
        is_shared: whether the work is among persistent workgroups, all of which have as much of it.
    """

    slices: int
    rows_of_query: int
    is_compiled: bool
    is_decode: bool
    is_shared: bool

    def measured(self, cycles: Sequence[KernelCycles], ts_qo: int) -> Sequence[KernelCycles]:
        """The cycles of its workgroups, of those that were measured: the fewest rows first.

        Waves of compiled kernels for many rows go through keys where they have rows alone, and
        those of others in any case; without rows, through those that a mask hides from others, too.
        """
        last = cycles[len(cycles) - 1]
        if self.is_compiled and not self.is_decode:
            count = len(cycles) if ts_qo >= last.rows else 1
            of_waves: list[KernelCycles] = [cycles[i] for i in range(count)]
            return of_waves
        of_tile: list[KernelCycles] = []
        for each in cycles:
            if each.rows == ts_qo:
                of_tile.append(each)  # noqa: PERF401 - only loops with conditions are translated
        if len(of_tile) == 0:
            of_tile.append(last.with_rows(ts_qo))
        return of_tile


@dataclass(frozen=True)
class ForwardEstimate:
    """The seconds of one kernel's launches, of calls that differ in lengths only.

    Attributes:
        lines: of tiles, one behind the other.
        cycles_of_place: in which a workgroup finds its sequence.
        pair_heads: of gm1 those whose query heads have their tiles side by side.
        heads_in_turn: of gm0 how many have their tiles in turn: `Order` in forward_gm0.h.
        query_bytes, key_bytes: that each row of all sequences has, with those of the output.
    """

    machine: Machine
    call: EstimatedCall
    kernel: EstimatedKernel
    grid: GridAxes
    ts_qo: int
    ts_kv: int
    cycles: Sequence[KernelCycles]
    lines: int
    cycles_of_place: float
    pair_heads: int
    heads_in_turn: int
    query_bytes: int
    key_bytes: int
    products_of_key: float
    left_out: float

    @classmethod
    def of(
        cls,
        machine: Machine,
        call: EstimatedCall,
        kernel: EstimatedKernel,
        row: KernelRow,
        measured: Sequence[KernelCycles],
    ) -> ForwardEstimate:
        """Prepare for a kernel that ``row`` describes, whose workgroups were ``measured``."""
        lines = call.batch * call.heads_q // kernel.rows_of_query * kernel.slices
        heads_in_turn = 1
        if not call.band.is_none() and call.batch > 0:
            heads = lines // call.batch
            xcds = max(gcd(lines, machine.xcds), 1)
            heads_in_turn = heads // xcds if heads % xcds == 0 else gcd(lines // xcds, heads)
        products = call.hdim_q + -(-call.hdim_v // kernel.slices)
        slowness = _FP32_PRODUCTS if call.is_fp32 else 1.0
        if call.is_fp8:
            slowness = _COMPILED_FP8_PRODUCTS if kernel.is_compiled else _FP8_PRODUCTS
        of_query = call.hdim_q * call.q_bytes + call.hdim_v * call.out_bytes
        # Of the keys that a mask hides from some rows of a tile: waves of ready kernels leave out
        # those tiles that none of their rows sees.
        left_out = 0.0
        if not kernel.is_compiled:
            left_out = max(1.0 - row.ts_kv / row.ts_qo, 0.0) / 2.0
        of_place = 0.0
        if kernel.is_shared:
            of_place = CYCLES_OF_LISTED
        elif call.is_group:
            of_place = _CYCLES_OF_PLACE_IN_DECODE if kernel.is_decode else _CYCLES_OF_PLACE
        return cls(
            machine,
            call,
            kernel,
            row.grid,
            row.ts_qo,
            row.ts_kv,
            kernel.measured(measured, row.ts_qo),
            lines,
            of_place,
            call.heads_k * kernel.slices,
            heads_in_turn,
            call.batch * call.heads_q * of_query,
            call.batch * call.heads_k * (call.hdim_q + call.hdim_v) * call.kv_bytes,
            products * slowness,
            left_out,
        )

    def most_shared(self) -> int:
        """How many workgroups a compute unit has room for."""
        return self.cycles[0].most_shared()

    def seconds(self, seqlen_q: int, seqlen_k: int, num_splits: int) -> float:
        """Of sequences of so many queries and keys, without what combining splits takes."""
        seconds = 0.0
        for lengths in self.call.lengths:
            seconds += self.seconds_of(lengths, seqlen_q, seqlen_k, num_splits)
        return seconds / len(self.call.lengths)

    def seconds_of(self, lengths: Lengths, seqlen_q: int, seqlen_k: int, num_splits: int) -> float:
        """The same of sequences with such lengths, so many of which they are on average."""
        machine = self.machine
        if self.lines == 0 or seqlen_q == 0 or seqlen_k == 0:
            return 0.0
        # Each sequence has a query at least.
        queries: list[int] = []
        tiles: list[int] = []
        every_tile = 0
        for share in lengths.queries:
            count = round(1 + share * (seqlen_q - 1))
            of_sequence = -(-count * self.kernel.rows_of_query // self.ts_qo)
            queries.append(count)
            tiles.append(of_sequence)
            every_tile += of_sequence
        shared = self.most_shared()
        if not self.kernel.is_shared:
            # Those of shorter sequences that have no rows are launched, too.
            launched = self.lines * max(tiles) * num_splits
            shared = min(shared, -(-launched // machine.compute_units))
        step = -(-every_tile // MOST_TILES)
        of_sequences: list[Sequence[float]] = []
        sizes: list[float] = []
        passed = 0.0
        looped = 0.0
        products = 0.0
        every = 0.0
        longest = 0.0
        of_longest = self.cycles[0]
        for i in range(len(tiles)):
            rows = queries[i] * self.kernel.rows_of_query
            # The last tile, which is the first here, has what others leave.
            of_last = rows - (tiles[i] - 1) * self.ts_qo
            cycles = self._cycles_of(of_last if step == 1 else rows / tiles[i])
            of_others = self._cycles_of(self.ts_qo) if step == 1 and tiles[i] > 1 else cycles
            counts = self._keys_of_tiles(
                queries[i], round(lengths.keys[i] * seqlen_k), tiles[i], step
            )
            of_tiles: list[float] = []
            looked_at_for = tiles[i] / len(counts)
            for seen in counts:
                keys = seen.passed / num_splits
                is_short = seen.by_all < self.ts_kv and num_splits == 1
                of_tile = self._short_cycles(cycles, seen.passed) if is_short else cycles
                size = self.cycles_of_place + of_tile.of_workgroup(shared, keys)
                if size > longest:
                    longest = size
                    of_longest = of_tile
                of_tiles.append(size)
                sizes.append(size)
                every += looked_at_for * size
                passed += looked_at_for * keys
                looped += looked_at_for * keys * of_tile.of_row[shared - 1]
                left_out = self.left_out * (seen.by_any - seen.by_all) / num_splits
                products += looked_at_for * (keys - left_out) * cycles.rows
                cycles = of_others
            of_sequences.append(of_tiles)
        workgroups = -(-self.lines * every_tile * num_splits // len(tiles))
        launch = 0.0
        if self.kernel.is_shared:
            of_all = self.cycles[len(self.cycles) - 1]
            tile = self.ts_kv * of_all.of_row[shared - 1]
            # With rows for one wave about half as much is added.
            half = self.ts_qo / 2
            columns = self.call.hdim_v * (of_longest.rows + half) / (of_all.rows + half)
            work = SharedWork(
                workgroups / every_tile * every,
                longest,
                _LEAST_SHARE_TILES * tile,
                of_longest.once[shared - 1],
                tile,
                columns,
            )
            launch = machine.cycles_of_shares(work, shared)
        else:
            launch = self._cycles_in_order(
                of_sequences, sizes, tiles, workgroups, num_splits, shared
            )
        products *= workgroups / every_tile * self.products_of_key
        compute = machine.seconds_of(launch, products)
        key_bytes = 1.0 * seqlen_k * self.key_bytes
        begun = self._begun_bytes(workgroups, passed / every_tile, key_bytes)
        moved = Moved(seqlen_q * self.query_bytes + begun, key_bytes - begun)
        waited = 0.0
        if looped > 0 and self._has_one_tile_on_its_way():
            of_row = self._cycles_of(self.ts_qo).of_row[shared - 1]
            waited = machine.waits(compute * looped / every, of_row, moved, shared)
        return machine.overlapped(compute, moved, waited)

    def _begun_bytes(self, workgroups: int, keys: float, key_bytes: float) -> float:
        """Those of keys and values that are asked for before products hide them.

        Workgroups go through so many ``keys`` on average.
        """
        if self.kernel.is_decode:
            return min(1.0 * workgroups * _BEGUN_IN_DECODE, key_bytes)
        begun = _KEYS_BEGUN
        if not self.kernel.is_compiled:
            is_small = self._has_one_tile_on_its_way()
            begun = _KEYS_BEGUN_READY if is_small else _KEYS_BEGUN_OF_SEVERAL
        return key_bytes * min(begun / max(keys, 1.0), 1.0)

    def _has_one_tile_on_its_way(self) -> bool:
        """Ready kernels with two waves of a SIMD have several, as those for few rows do."""
        return self.ts_qo <= _ROWS_OF_SIMDS and not self.kernel.is_decode

    def _cycles_in_order(
        self,
        sizes: Sequence[Sequence[float]],
        every: Sequence[float],
        tiles: Sequence[int],
        workgroups: int,
        num_splits: int,
        shared: int,
    ) -> float:
        """The cycles of a launch by the order in which XCDs and their engines get workgroups.

        ``sizes`` are those of the tiles of each sequence, or of some of many; ``every`` has all.
        """
        machine = self.machine
        are_equal = min(every) == max(every) and min(tiles) == max(tiles)
        if not are_equal and self.grid == "xcd_heads_tiles_splits":
            count = tiles[0]
            spread: list[float] = [sizes[0][n * len(sizes[0]) // count] for n in range(count)]
            return machine.cycles_of_lines(
                spread, self.lines, count, shared, self.heads_in_turn, num_splits
            )
        launched = self.lines * max(tiles) * num_splits
        # Each set of XCDs has some key heads, and deals their workgroups to its XCDs in turn.
        sets = gcd(self.pair_heads, machine.xcds)
        set_xcds = machine.xcds // sets
        if are_equal or self.grid != "heads_batches_tiles_splits":
            return machine.cycles_of_launch(every, workgroups, shared)
        if launched > _MOST_SCHEDULED * sets:
            least = machine.cycles_of_launch(every, workgroups, shared)
            return max(least, self._cycles_of_first_engine(sizes, tiles, num_splits, shared))
        # Nobody knows whether the longest sequences come first or last.
        seconds = 0.0
        for number in range(2):
            is_reversed = number == 1
            order = self._order_of_set(sizes, tiles, is_reversed, num_splits, shared * set_xcds)
            longest = 0.0
            for xcd in range(min(set_xcds, len(order))):
                of_xcd: list[float] = [
                    order[xcd + n * set_xcds] for n in range(-(-(len(order) - xcd) // set_xcds))
                ]
                longest = max(longest, machine.cycles_of_xcd(of_xcd, len(of_xcd), shared))
            seconds += longest
        return seconds / 2

    def _cycles_of_first_engine(
        self,
        sizes: Sequence[Sequence[float]],
        tiles: Sequence[int],
        num_splits: int,
        shared: int,
    ) -> float:
        """Those of the shader engine that gets the first workgroup.

        Each sequence is launched with as many tiles as the longest one has. Where that is a
        multiple of the engines, the engine gets the first tiles of all sequences.
        """
        machine = self.machine
        batch = self.call.batch
        set_xcds = machine.xcds // gcd(self.pair_heads, machine.xcds)
        units = machine.compute_units // machine.xcds
        engines = min(machine.xcd_engines, units)
        of_tile = self.lines // (batch * self.pair_heads) * num_splits
        pairs = self.pair_heads * set_xcds // machine.xcds * batch
        looked_at = min(pairs, _MOST_PAIRS)
        cycles = 0.0
        for pair in range(looked_at):
            n = pair * batch // looked_at % batch * len(tiles) // batch
            mean = _total(sizes[n]) / len(sizes[n])
            launched = tiles[n] * of_tile
            if launched >= set_xcds * engines:
                cycles += launched * mean / (set_xcds * engines)
            else:
                for place in range(launched):
                    turn = pair * max(tiles) * of_tile + place
                    if turn % set_xcds == 0 and turn // set_xcds % units % engines == 0:
                        cycles += mean
        return cycles * pairs / looked_at / (shared * -(-units // engines))

    def _order_of_set(
        self,
        sizes: Sequence[Sequence[float]],
        tiles: Sequence[int],
        is_reversed: bool,
        num_splits: int,
        shared: int,
    ) -> Sequence[float]:
        """The cycles of the workgroups of a set of XCDs, in order: `Order` in forward_gm1.h.

        A sequence and key head after the other, each with as many tiles as the longest one has; but
        under a mask of as many of them as three rounds take first all tiles that are longest.
        """
        machine = self.machine
        most = max(tiles)
        of_pair = self.lines // (self.call.batch * self.pair_heads)
        pairs = self.pair_heads // gcd(self.pair_heads, machine.xcds) * self.call.batch
        in_turn = 1
        if not self.call.band.is_none() and most > 1:
            slots = machine.compute_units // machine.xcds * shared
            in_turn = min(pairs, -(-_ROUNDS_IN_TURN * slots // (of_pair * most)))
        order: list[float] = []
        alone = pairs - in_turn
        for block in range(alone + 1):
            together = in_turn if block == alone else 1
            for rank in range(most):
                for member in range(together):
                    n = (block + member) % self.call.batch * len(tiles) // self.call.batch
                    n = len(tiles) - 1 - n if is_reversed else n
                    cycles = _CYCLES_OF_NO_ROWS
                    if rank < tiles[n]:
                        cycles = sizes[n][rank * len(sizes[n]) // tiles[n]]
                    order += [cycles] * (of_pair * num_splits)
        return order

    def _cycles_of(self, rows: float) -> KernelCycles:
        """Of workgroups with so many rows on average, between what was measured of few and all."""
        if len(self.cycles) == 1:
            return self.cycles[0]
        return self.cycles[0].towards(self.cycles[1], rows)

    def _short_cycles(self, cycles: KernelCycles, keys: int) -> KernelCycles:
        """Those of workgroups that see none of their tiles of keys whole, if they were measured."""
        is_medium = keys > 2 * self.ts_kv and len(self.cycles) > 3
        of_keys = 3 if is_medium else 2
        return self.cycles[of_keys] if len(self.cycles) > of_keys else cycles

    def _keys_of_tiles(
        self, seqlen_q: int, seqlen_k: int, tiles: int, step: int
    ) -> Sequence[SeenKeys]:
        """The keys that workgroups go through, by their tiles."""
        queries = self.ts_qo / self.kernel.rows_of_query
        band = self.call.band
        spans = spans_of_tiles(band, seqlen_q, seqlen_k, tiles, queries, step)
        keys: list[SeenKeys] = []
        for number in range(len(spans)):
            span = spans[number]
            count = span.end - span.begin + min(self.call.sink_size, span.begin)
            by_all = count
            if not band.is_none():
                first = int((tiles - 1 - number * step) * queries)
                last = min(int(first + queries), seqlen_q) - 1
                seen_by_first = band.seen(first, first, seqlen_q, seqlen_k)
                seen_by_last = band.seen(last, last, seqlen_q, seqlen_k)
                by_all = max(seen_by_first.end - seen_by_last.begin, 0)
            passed = -(-count // self.ts_kv) * self.ts_kv
            keys.append(SeenKeys(passed, count, by_all))
        return keys
