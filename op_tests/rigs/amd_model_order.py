"""The order of gm1's workgroups, and how many keys and values an XCD's L2 cache has to hold.

A small simulation of a launch: workgroups go to the XCDs in turn, there to the first free slot, and
take as long as they have keys. The order is stated here once more, list by list; the kernel says it
in divisions (``place_in_group`` of ``hsa/src/workgroups.h``), and the tests compare the two.
"""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["GroupLaunch", "InFlight", "Workgroup", "in_flight", "workgroups_in_order"]

# What a workgroup takes beside its keys, in keys: loading queries and storing the output.
_KEYS_OF_THE_REST = 64

_Pair = tuple[int, int]  # a sequence and a key head


@dataclass(frozen=True)
class GroupLaunch:
    """A launch in gm1 whose keys are not split.

    Attributes:
        lengths: seqlen_q and seqlen_k of each sequence.
        heads_q, heads_k: of all sequences.
        ts_qo: queries of a tile.
        is_causal: the diagonal ends in the bottom right corner.
        xcds: of the device.
        slots: workgroups that the device runs at a time.
    """

    lengths: Sequence[tuple[int, int]]
    heads_q: int
    heads_k: int
    ts_qo: int
    is_causal: bool
    xcds: int
    slots: int

    @property
    def gqa(self) -> int:
        """Query heads of a key head."""
        return self.heads_q // self.heads_k

    @property
    def query_tiles(self) -> int:
        """Of the longest sequence."""
        return max(self.tiles_of(batch) for batch in range(len(self.lengths)))

    def tiles_of(self, batch: int) -> int:
        """Of one sequence."""
        return -(-self.lengths[batch][0] // self.ts_qo)


class Workgroup(NamedTuple):
    """What a workgroup computes.

    Attributes:
        batch: number of the sequence.
        head: of q.
        tile_rank: where the tile comes among those of its sequence and head; under a causal mask
            the last one is first.
    """

    batch: int
    head: int
    tile_rank: int


@dataclass(frozen=True)
class InFlight:
    """What the XCDs of a launch are at work on.

    Attributes:
        most_pairs: different pairs of a sequence and key head on one XCD at one time.
        mean_pairs: over all XCDs and the time that each is at work.
        busy: share of the launch in which slots have work.
    """

    most_pairs: int
    mean_pairs: float
    busy: float


def workgroups_in_order(launch: GroupLaunch) -> list[Workgroup]:
    """The n-th goes to XCD n modulo ``launch.xcds``."""
    first_heads, sets = _shared_out(launch)
    tail_pairs = _wanted_tail(launch, sets)
    return [
        *_dealt(launch, range(first_heads), launch.xcds, tail_pairs=0),
        *_dealt(launch, range(first_heads, launch.heads_k), sets, tail_pairs),
    ]


def _shared_out(launch: GroupLaunch) -> tuple[int, int]:
    """How many key heads go to single XCDs, and to how many sets of XCDs the others go."""
    heads_left = launch.heads_k % launch.xcds
    if heads_left == 0:
        return 0, launch.xcds
    sets = math.gcd(heads_left, launch.xcds)
    first_heads = launch.heads_k - heads_left
    if first_heads and heads_left // sets * len(launch.lengths) < _wanted_tail(launch, sets):
        first_heads -= launch.xcds
    return first_heads, sets


def _wanted_tail(launch: GroupLaunch, sets: int) -> int:
    """How many pairs of a set of XCDs take turns at the end."""
    if not launch.is_causal or launch.query_tiles == 1:
        return 0
    return -(-3 * (launch.slots // sets) // (launch.gqa * launch.query_tiles))


def _dealt(launch: GroupLaunch, heads_k: range, sets: int, tail_pairs: int) -> list[Workgroup]:
    """The workgroups of these key heads, each ``sets``-th of which goes to one set of XCDs."""
    lists = []
    for own in range(sets):
        pairs = [
            (head, batch) for head in heads_k[own::sets] for batch in range(len(launch.lengths))
        ]
        alone = max(len(pairs) - tail_pairs, 0)
        groups = [*([pair] for pair in pairs[:alone]), pairs[alone:]]
        of_set = [
            Workgroup(batch, head * launch.gqa + member, rank)
            for group in groups
            for rank in range(launch.query_tiles)
            for head, batch in group
            for member in range(launch.gqa)
        ]
        lists.append(_in_turns(of_set, launch.xcds // sets))
    return [workgroup for each in zip(*lists, strict=True) for workgroup in each]


def _in_turns(workgroups: list[Workgroup], xcds: int) -> list[Workgroup]:
    """Of one set: in every turn each XCD gets another place, in the last one if it is complete."""
    result: list[Workgroup] = []
    for turn, begin in enumerate(range(0, len(workgroups), xcds)):
        of_turn = workgroups[begin : begin + xcds]
        shift = (turn + turn // xcds) % xcds if len(of_turn) == xcds else 0
        result += of_turn[shift:] + of_turn[:shift]
    return result


def in_flight(launch: GroupLaunch, order: Sequence[Workgroup]) -> InFlight:
    """Simulate ``launch`` with its workgroups in this order."""
    slots = launch.slots // launch.xcds
    xcds = [_Xcd(slots) for _ in range(launch.xcds)]
    for number, workgroup in enumerate(order):
        duration = _duration(launch, workgroup)
        if duration:  # else it ends at once
            pair = (workgroup.batch, workgroup.head // launch.gqa)
            xcds[number % launch.xcds].begin(pair, duration)
    for xcd in xcds:
        xcd.end()
    last = max(xcd.now for xcd in xcds)
    return InFlight(
        most_pairs=max(xcd.most_pairs for xcd in xcds),
        mean_pairs=sum(xcd.pair_time for xcd in xcds) / sum(xcd.now for xcd in xcds),
        busy=sum(xcd.work for xcd in xcds) / (last * slots * launch.xcds),
    )


class _Xcd:
    """An XCD at work.

    Attributes:
        now: when the last slot became free.
        work: time of all workgroups.
        most_pairs: different ones at one time.
        pair_time: integral of their number over time.
    """

    def __init__(self, slots: int) -> None:
        self.now = self.work = self.most_pairs = self.pair_time = 0
        self._slots = slots
        self._running: list[tuple[int, _Pair]] = []  # when each ends
        self._pairs: Counter[_Pair] = Counter()

    def begin(self, pair: _Pair, duration: int) -> None:
        """Start a workgroup as soon as a slot is free."""
        if len(self._running) == self._slots:
            self._free_slot()
        heapq.heappush(self._running, (self.now + duration, pair))
        self.work += duration
        self._pairs[pair] += 1
        self.most_pairs = max(self.most_pairs, len(self._pairs))

    def end(self) -> None:
        """Wait for all."""
        while self._running:
            self._free_slot()

    def _free_slot(self) -> None:
        end, pair = heapq.heappop(self._running)
        self.pair_time += (end - self.now) * len(self._pairs)
        self.now = end
        self._pairs[pair] -= 1
        if self._pairs[pair] == 0:
            del self._pairs[pair]


def _duration(launch: GroupLaunch, workgroup: Workgroup) -> int:
    """In keys; 0: the sequence has no such tile."""
    batch, _, rank = workgroup
    seqlen_q, seqlen_k = launch.lengths[batch]
    tile = launch.tiles_of(batch) - 1 - rank if launch.is_causal else rank
    if not 0 <= tile < launch.tiles_of(batch):
        return 0
    keys = seqlen_k
    if launch.is_causal:
        keys = min(keys, min((tile + 1) * launch.ts_qo, seqlen_q) + seqlen_k - seqlen_q)
    return max(keys, 0) + _KEYS_OF_THE_REST
