"""The order of gm1's workgroups: the kernel's is the one that is simulated, and what that shows."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hsa_build import REPOSITORY
from inputs import prefix_sums
from rigs.amd_model_order import GroupLaunch, Workgroup, in_flight, workgroups_in_order
from rigs.modelled_call import take_only
from rigs.recording_runtime import RecordingRuntime
from torch import Tensor
from untyped import fmha_fwd

from jitfmha import HipError
from jitfmha.emulator import DEVICES, Emulator

NUMBER_OF_XCCS = 10018
TILE_ROWS = 128  # of the kernels for hdim 192x128, of which there is one size only
CHIP, ARCH = "MI300X", "gfx942"


def group_launch(
    heads: tuple[int, int],
    xcds: int,
    units: int,
    *,
    seqlens_q: tuple[int, ...] = (300, 0, 129, 5),
    is_causal: bool = True,
) -> GroupLaunch:
    """A unit runs two workgroups of four waves at a time."""
    lengths = [(seqlen_q, 3) for seqlen_q in seqlens_q]
    return GroupLaunch(lengths, *heads, TILE_ROWS, is_causal, xcds, 2 * units)


LAUNCHES = [
    group_launch((8, 4), 4, 8),  # as many key heads for each XCD; some pairs before the tail
    group_launch((8, 8), 4, 4, is_causal=False),
    group_launch((3, 3), 4, 4),  # all XCDs share all heads
    group_launch((6, 6), 4, 2),  # four heads are for single XCDs, two for pairs of XCDs
    group_launch((6, 6), 4, 16),  # none are: the tail is longer
    group_launch((10, 5), 3, 3, is_causal=False),
    group_launch((7, 1), 6, 6, seqlens_q=(130, 1, 260)),  # the last turn is not complete
    group_launch((4, 2), 1, 2),
]


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_every_tile_has_one_workgroup(launch):
    batches, tiles = range(len(launch.lengths)), range(launch.query_tiles)
    every = itertools.product(batches, range(launch.heads_q), tiles)
    assert sorted(workgroups_in_order(launch)) == sorted(itertools.starmap(Workgroup, every))


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_the_kernel_has_this_order(launch, runtime, rng):
    """The first workgroups of a launch compute the first tiles of the order, however many run."""
    order = workgroups_in_order(launch)
    cuts = random.Random(rng.initial_seed()).sample(range(1, len(order)), 3)
    computed = _Recorded(launch, runtime)
    for count in (*cuts, len(order)):
        first = {each for each in order[:count] if _has_rows(launch, each)}
        assert computed.tiles_of_first(count) == first, f"the first {count} workgroups"


def _first_row(launch: GroupLaunch, workgroup: Workgroup) -> int:
    """Of a workgroup's tile."""
    rank, tiles = workgroup.tile_rank, launch.tiles_of(workgroup.batch)
    return (tiles - 1 - rank if launch.is_causal else rank) * TILE_ROWS


def _has_rows(launch: GroupLaunch, workgroup: Workgroup) -> bool:
    return 0 <= _first_row(launch, workgroup) < launch.lengths[workgroup.batch][0]


class _Recorded:
    """A launch of fmha_fwd that is recorded, and then run in part on the emulator."""

    def __init__(self, launch: GroupLaunch, runtime: RecordingRuntime) -> None:
        self._launch = launch
        rows_q, rows_k = ([pair[side] for pair in launch.lengths] for side in (0, 1))
        self._starts = [0, *itertools.accumulate(rows_q)]
        self._tensors = q, k, v = (
            torch.ones(sum(rows_q), launch.heads_q, 192, dtype=torch.bfloat16),
            torch.ones(sum(rows_k), launch.heads_k, 192, dtype=torch.bfloat16),
            torch.ones(sum(rows_k), launch.heads_k, 128, dtype=torch.bfloat16),
        )
        self._out = torch.empty(sum(rows_q), launch.heads_q, 128, dtype=torch.bfloat16)
        self._sums = prefix_sums(rows_q), prefix_sums(rows_k)
        # What is loaded stays loaded, with the number of XCDs that its device had then.
        device = (1, 3, 4, 6).index(launch.xcds)
        runtime.set_attribute(device, NUMBER_OF_XCCS, launch.xcds)
        with runtime.stands_for(runtime.target(CHIP, device, launch.slots // 2)):
            fmha_fwd(
                *(q, k, v),
                mask=2 if launch.is_causal else 0,
                out=self._out,
                cu_seqlens_q=self._sums[0],
                cu_seqlens_k=self._sums[1],
                max_seqlen_q=max(rows_q),
            )
        (self._recorded,) = runtime.launches()

    def tiles_of_first(self, count: int) -> set[Workgroup]:
        """What the first ``count`` workgroups compute."""
        self._out.fill_(torch.nan)
        recorded = self._recorded
        symbol = recorded.symbol.decode()
        file = symbol.removeprefix("fmha_") + ".co"
        image = (REPOSITORY / "hsa" / ARCH / "fmha_v3_fwd" / file).read_bytes()
        emulator, kernarg = Emulator(), bytes(recorded.kernarg)[: recorded.kernarg_bytes]
        # The kernel counts its workgroups, whatever the shape of the grid.
        with emulator.loaded(image, DEVICES[ARCH], symbol) as function:
            emulator.launch(function, (count, 1, 1), tuple(recorded.block), kernarg)
        every = workgroups_in_order(self._launch)
        return {each for each in every if self._is_computed(each)}

    def _is_computed(self, workgroup: Workgroup) -> bool:
        if not _has_rows(self._launch, workgroup):
            return False
        begin = self._starts[workgroup.batch] + _first_row(self._launch, workgroup)
        end = min(begin + TILE_ROWS, self._starts[workgroup.batch + 1])
        unwritten: Tensor = self._out[begin:end, workgroup.head].isnan()
        assert unwritten.all() == unwritten.any(), "a part of a tile"
        return not unwritten.any()


# ---- What is in flight ---------------------------------------------------------------------------

LONG = GroupLaunch([(4096, 4096)] * 8, 32, 8, 256, True, xcds=8, slots=304)
RAGGED = [(length, length) for length in (8100, 200, 3000, 5000, 700, 1500, 6000, 2500)]


@pytest.mark.parametrize(
    ("launch", "most", "mean"),
    [
        # An XCD has 38 slots: the 64 tiles of a pair fill them, or a pair more is begun.
        (replace(LONG, is_causal=False), 2, 1.6),
        (LONG, 3, 1.5),
        (replace(LONG, lengths=RAGGED), 4, 1.3),
        # Sixteen tiles a pair; at the end the tail.
        (replace(LONG, heads_k=32, is_causal=False), 5, 3.2),
        (replace(LONG, heads_k=32), 11, 5.7),
        # Eight of twelve key heads have an XCD to themselves, two XCDs share each of the others.
        (replace(LONG, heads_q=12, heads_k=12, is_causal=False), 6, 3.4),
        (replace(LONG, heads_q=48, heads_k=12), 6, 1.9),
        # All XCDs share one head.
        (replace(LONG, heads_k=1, lengths=RAGGED), 4, 1.3),
        (replace(LONG, heads_q=30, heads_k=10, xcds=6, slots=228), 11, 3.7),
    ],
)
def test_few_pairs_are_in_flight(launch, most, mean):
    """Of a sequence and key head, on one XCD, whose L2 cache they share."""
    simulated = in_flight(launch, workgroups_in_order(launch))
    assert simulated.most_pairs <= most
    assert simulated.mean_pairs <= mean


@pytest.mark.parametrize("heads", [(32, 8), (32, 32), (32, 4), (12, 12), (9, 9), (8, 1)])
@pytest.mark.parametrize("lengths", [LONG.lengths, RAGGED], ids=["equal", "ragged"])
def test_units_end_together(heads, lengths):
    """Nearly as with the longest tiles of all pairs first, where nothing is shared in L2."""
    launch = replace(LONG, heads_q=heads[0], heads_k=heads[1], lengths=lengths)
    order = workgroups_in_order(launch)
    by_length = sorted(order, key=lambda each: each.tile_rank)
    assert in_flight(launch, order).busy >= 0.9 * in_flight(launch, by_length).busy


def test_what_is_in_flight_is_counted_right():
    """Two XCDs with a slot each; a key is the unit of time, and 64 come on top."""
    lengths = [(1, 36), (1, 136)]
    launch = GroupLaunch(lengths, 2, 2, 256, False, xcds=2, slots=2)
    order = [Workgroup(0, 0, 0), Workgroup(0, 1, 0), Workgroup(1, 0, 0), Workgroup(1, 1, 0)]
    simulated = in_flight(launch, order)
    assert (simulated.most_pairs, simulated.mean_pairs, simulated.busy) == (1, 1.0, 1.0)
    crossed = [order[0], order[2], order[1], order[3]]
    wide = replace(launch, slots=4)
    assert in_flight(wide, order).most_pairs == 2
    assert in_flight(wide, order).mean_pairs == pytest.approx((2 * 100 + 100) / 200)
    assert in_flight(wide, crossed).most_pairs == 2
    assert in_flight(wide, crossed).busy == pytest.approx((100 + 200) / (2 * 200))


# ---- Limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_seqlen_q", "is_served"), [(None, False), (128, True)])
def test_workgroups_are_counted_in_32_bits(runtime, max_seqlen_q, is_served):
    """130 tiles of 512 heads of 65535 sequences are too many, unless they are known to be short."""
    rows, heads, batch = 130 * TILE_ROWS, 512, 65535
    q = torch.zeros(1, 1, 128, dtype=torch.bfloat16).expand(rows, heads, 128)
    out = torch.empty(rows, heads, 128, dtype=torch.bfloat16)  # which nobody touches
    sums = torch.zeros(batch + 1, dtype=torch.int32)
    arguments = {"cu_seqlens_q": sums, "cu_seqlens_k": sums, "max_seqlen_q": max_seqlen_q}
    with runtime.stands_for(runtime.target(CHIP)):
        take_only("ready")
        if is_served:
            fmha_fwd(q, q[:1], q[:1], out=out, **arguments)
        else:
            with pytest.raises(HipError, match=f"up to {rows} queries take 130 times 33553920 "):
                fmha_fwd(q, q[:1], q[:1], out=out, **arguments)
    assert runtime.launch_count == is_served
