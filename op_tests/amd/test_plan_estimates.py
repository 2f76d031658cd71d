"""What estimates of plans are put together from: cycles of workgroups, launches, and combining."""

import csv
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from rigs.amd_model_choice import DrawnCall
from untyped import explain

from jitfmha.amd.chips import Arch, chip
from jitfmha.amd.clock import clock_of
from jitfmha.kernels import cycles
from jitfmha.kernels.compiled.decode import decode_tile
from jitfmha.kernels.compiled.split_policy import CompiledSplits
from jitfmha.kernels.compiled.traits import forward_tile
from jitfmha.kernels.cycles import kernel_cycles
from jitfmha.kernels.estimate import lengths_of
from jitfmha.kernels.launch_estimate import ForwardEstimate, KernelCycles, Machine
from jitfmha.kernels.ready.combine_estimate import combine_fours_seconds, combine_seconds
from jitfmha.kernels.ready.key_split import KeySplit
from jitfmha.problem.arguments import Arguments
from jitfmha.problem.problem import make_problem
from jitfmha.problem.unevenness import MOST_UNEVEN

_DECODE = "gfx942", "compiled", "decode", "bf16", (64, 64), False
_LOOKED_UP = (("q", 1), ("k", 64))
_ENGINES, _UNITS_OF_ENGINE, _XCDS = 4, 8, 8


def _machine() -> Machine:
    units = _XCDS * _ENGINES * _UNITS_OF_ENGINE
    return Machine("gfx950", units, _XCDS, _ENGINES, 7e12, clock_of("MI355X").speed)


@pytest.mark.parametrize("lines_of_xcd", [_UNITS_OF_ENGINE, 64, 1024])
def test_an_engine_gets_the_longest_tile_of_every_line(lines_of_xcd):
    sizes = [4000.0, 3000.0, 2000.0, 1000.0]
    cycles = _machine().cycles_of_lines(sizes, _XCDS * lines_of_xcd, _ENGINES, 1, 1, 1)
    assert cycles == pytest.approx(sizes[0] * lines_of_xcd / _UNITS_OF_ENGINE)


def test_engines_share_the_tiles_of_lines_that_do_not_divide_by_them():
    sizes = [5000.0, 4000.0, 3000.0, 2000.0, 1000.0]
    cycles = _machine().cycles_of_lines(sizes, _XCDS * 64, len(sizes), 1, 1, 1)
    mean = 64 * sum(sizes) / (_ENGINES * _UNITS_OF_ENGINE)
    assert mean <= cycles <= mean + sizes[0]


def test_engines_get_the_tiles_of_heads_that_have_them_in_turn():
    """One kind of tile, or of all kinds where as many heads have theirs in turn."""
    sizes, lines = [2000.0, 1000.0], _XCDS * 64

    def cycles(group: int) -> float:
        return _machine().cycles_of_lines(sizes, lines, 2, 1, group, 1)

    assert cycles(1) == cycles(2) == 64 / (_ENGINES // 2 * _UNITS_OF_ENGINE) * sizes[0]
    mean = 64 * sum(sizes) / (_ENGINES * _UNITS_OF_ENGINE)
    assert mean <= cycles(_ENGINES) < mean + sizes[0]


@pytest.mark.parametrize("mask", [0, 2])
@pytest.mark.parametrize(("batch", "heads", "longest"), [(8, 2, 300), (4, 4, 224), (16, 1, 64)])
def test_xcds_get_all_workgroups_of_packed_sequences(monkeypatch, mask, batch, heads, longest):
    """Those without rows among them."""
    counts: list[int] = []
    order_of_set = ForwardEstimate._order_of_set

    def told(*args: Any) -> list[float]:
        order = order_of_set(*args)
        counts.append(len(order))
        return order

    monkeypatch.setattr(ForwardEstimate, "_order_of_set", told)
    q, k = (torch.empty(batch * 64, n, 128).to("meta", torch.bfloat16) for n in (2 * heads, heads))
    sums = (64 * torch.arange(batch + 1, dtype=torch.int32)).to("meta")
    told_lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    packed = {"cu_seqlens_q": sums, "cu_seqlens_k": sums, **told_lengths}
    explanation = explain(q, k, k, device="MI300X", mask=mask, **packed)
    (plan,) = (x.plan for x in explanation.estimates if x.plan.family == "ready")
    counts.clear()
    plan.seconds(batch * 64, batch * 64)
    tiles = -(-longest // plan.choice.tiles.tile_for(batch * 64, batch * 64).row.ts_qo)
    sets = math.gcd(heads, 8)
    assert set(counts) <= {2 * heads // sets * batch * tiles}
    assert counts or longest == 64


def test_ready_kernels_leave_out_tiles_that_no_row_of_a_wave_sees(monkeypatch):
    """Of waves of 32 rows: on average 3/8 of the keys of a tile of queries with four tiles."""
    made: list[ForwardEstimate] = []
    of = ForwardEstimate.of
    monkeypatch.setattr(ForwardEstimate, "of", lambda *args: made.append(of(*args)) or made[-1])
    q = torch.empty(1, 4099, 8, 128).to("meta", torch.bfloat16)
    assert explain(q, q, q, device="MI355X", mask=2).estimates
    assert {x.left_out for x in made if not x.kernel.is_compiled} == {3 / 8}
    assert {x.left_out for x in made if x.kernel.is_compiled} == {0}


def test_xcds_share_the_tiles_of_one_line():
    sizes = [1.0] * 16
    sizes[8] = 1000.0
    assert _machine().cycles_of_lines(sizes, 1, len(sizes), 1, 1, 1) == 1000


def test_workgroups_of_more_waves_take_what_lies_between():
    few, every = KernelCycles(32, [10.0], [1000.0]), KernelCycles(128, [40.0], [4000.0])
    assert few.towards(every, 1) == few.towards(every, 32) == few
    assert few.towards(every, 97) == few.towards(every, 128) == every
    assert few.towards(every, 33) == KernelCycles(64, [20.0], [2000.0])
    assert every.of_workgroup(1, 100) == 4000 + 40 * 100
    assert every.of_workgroup(1, 0) == 0


@pytest.mark.parametrize(
    ("chip", "dtype", "hdim", "heads", "lengths", "mask"),
    [
        # Waves without rows go through the keys that a mask hides from others.
        ("gfx942", "bf16", 64, (1, 64, 64), (64, 320), 2),
        # No tile of keys is whole, and first tiles hide behind nothing.
        ("gfx942", "bf16", 64, (1, 64, 64), (128, 128), 2),
        ("gfx942", "bf16", 64, (1, 64, 64), (192, 192), 2),
        ("gfx950", "bf16", 64, (1, 64, 64), (64, 64), 2),
        ("gfx950", "bf16", 64, (16, 8, 8), (256, 256), 2),
        ("gfx942", "fp16", 128, (16, 32, 16), (2, 128), 2),
    ],
)
def test_short_calls_take_what_ready_kernels_do(chip, dtype, hdim, heads, lengths, mask):
    """By the cost model."""
    call = DrawnCall(chip, dtype, (hdim, hdim), heads, (lengths,), "gm0", mask)
    _, seconds = call.seconds()
    assert call.estimated()["ready"] == pytest.approx(seconds["ready"], rel=0.03)


@pytest.mark.parametrize("arch", get_args(Arch))
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8", "int8"])
@pytest.mark.parametrize(("hdim", "most_blocks"), [(64, 4), (128, 4), (256, 2)])
@pytest.mark.parametrize("is_masked", [False, True])
def test_every_tile_of_few_rows_was_measured(arch, dtype, hdim, most_blocks, is_masked):
    of_dtype = {"fp8": "fp8_e4m3fnuz" if arch == "gfx942" else "fp8_e4m3fn"}.get(dtype, dtype)
    tile = forward_tile(arch, of_dtype, hdim, hdim)
    blocks = [n for n in (1, 2, 4) if n <= most_blocks]
    measured = kernel_cycles(arch, "compiled", "decode", dtype, (hdim, hdim), is_masked)
    rows = [decode_tile(tile, hdim, n).tile_q for n in blocks]
    assert [each.rows for each in measured] == rows


def test_what_workgroups_take_grows_with_keys_and_with_those_that_share_a_unit():
    """So it is where all of a row was measured of one kernel."""
    with Path(cycles.__file__).with_name("cycles.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            of_row, once = (
                tuple(map(float, row[name].split())) for name in ("cycles_of_row", "cycles_once")
            )
            kernel = KernelCycles(int(row["rows"]), of_row, once)
            assert min(*of_row, *once) > 0, row
            # Workgroups that see no tile of keys whole go through few.
            for keys in (64, 128) if row["part"] in ("short", "medium") else (512, 2048):
                taken = [kernel.of_workgroup(n + 1, keys) for n in range(kernel.most_shared())]
                # Another order of waves may save a little.
                assert all(b > 0.95 * a for a, b in pairwise(taken)), row


def test_calls_of_few_rows_take_what_kernels_for_few_rows_do():
    kernel = {each.rows: each for each in kernel_cycles(*_DECODE)}
    for gqa in kernel:
        q, k = torch.zeros(8, 1, 4 * gqa, 64), torch.zeros(8, 64, 4, 64)
        plan = explain(*(x.bfloat16() for x in (q, k, k)), device="MI300X").plan
        assert plan.family == "compiled"
        # One workgroup a unit and one split: nothing but its cycles, and a little of memory.
        (row,) = plan.rows()
        seconds = kernel[row.ts_qo].of_workgroup(1, 64) / clock_of("MI300X").peak
        assert plan.seconds(1, 64) == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize("device", ["MI300X", "MI355X"])
@pytest.mark.parametrize("gqa", [2, 4, 8])
def test_heads_that_share_keys_take_what_as_many_queries_do(device, gqa):
    def seconds(heads: int, queries: int) -> float:
        # With so few keys it is the workgroups that take time, in some rounds, not memory.
        q, k = torch.empty(256, queries, heads, 128), torch.empty(256, 64, 8, 128)
        explanation = explain(*(x.to("meta", torch.bfloat16) for x in (q, k, k)), device=device)
        (plan,) = (x.plan for x in explanation.estimates if x.plan.family == "compiled")
        assert "_decode" in plan.kernel
        return plan.seconds(queries, 64)

    assert seconds(8 * gqa, 1) == seconds(8, gqa)


def test_packed_sequences_are_looked_up():
    q, k = torch.zeros(1, 8, 128), torch.zeros(64, 8, 128)
    seconds = []
    for packed in ({}, {f"cu_seqlens_{x}": torch.tensor([0, n]).int() for x, n in _LOOKED_UP}):
        tensors = (x.bfloat16() if packed else x.bfloat16()[None] for x in (q, k, k))
        seconds.append(explain(*tensors, device="MI300X", **packed).plan.seconds(1, 64))
    plain, looked_up = seconds
    assert 500 < (looked_up - plain) * clock_of("MI300X").peak < 1500


def test_keys_that_kernels_for_few_rows_begin_with_hide_behind_nothing():
    q, k = (torch.empty(256, n, 8, 128).to("meta", torch.bfloat16) for n in (8, 64))
    explanation = explain(q, k, k, device="MI300X")
    (plan,) = (x.plan for x in explanation.estimates if x.plan.family == "compiled")
    (kernel,) = (
        each
        for each in kernel_cycles("gfx942", "compiled", "decode", "bf16", (128, 128), False)
        if each.rows == plan.rows()[0].ts_qo
    )
    rounds = 256 * 8 / (304 * kernel.most_shared())
    compute = rounds * kernel.of_workgroup(kernel.most_shared(), 64) / clock_of("MI300X").peak
    streamed = 2 * k.numel() * k.element_size() / (1e9 * chip("MI300X").streaming_gb_s)
    assert plan.seconds(8, 64) > streamed + compute


def test_kernels_for_few_rows_compute_while_keys_come():
    """Of 64 rows in a workgroup, which compute for about as long as their keys come."""
    device = chip("MI355X")
    tensors = (torch.empty(16, n, heads, 128) for n, heads in ((8, 128), (4096, 8), (4096, 8)))
    q, k, v = (x.to("meta", torch.bfloat16) for x in tensors)
    plan = explain(q, k, v, device=device.name, mask=2).plan
    assert "_decode4_" in plan.kernel
    (kernel,) = (
        each
        for each in kernel_cycles("gfx950", "compiled", "decode", "bf16", (128, 128), False)
        if each.rows == plan.rows()[0].ts_qo
    )
    compute = kernel.of_workgroup(1, 4096) / clock_of(device.name).peak
    streamed = 2 * k.numel() * k.element_size() / (1e9 * device.streaming_gb_s)
    assert streamed / 2 < compute < plan.seconds(8, 4096) < compute + streamed / 2


def test_ready_packed_calls_have_the_splits_of_their_longest_sequence(monkeypatch):
    taken: set[int] = set()
    seconds_of = ForwardEstimate.seconds_of

    def told(*args: Any) -> float:
        taken.add(args[-1])
        return seconds_of(*args)

    q, k = (torch.empty(n, 2, 128).to("meta", torch.float16) for n in (458, 3064))
    sums = torch.arange(9).int().to("meta")
    packed = {"cu_seqlens_q": sums, "cu_seqlens_k": sums, "max_seqlen_q": 201, "max_seqlen_k": 799}
    explanation = explain(q, k, k, device="MI300X", mask=2, **packed)
    (plan,) = (x.plan for x in explanation.estimates if x.plan.family == "ready")
    monkeypatch.setattr(ForwardEstimate, "seconds_of", told)
    plan.seconds(458, 3064)
    tile = plan.choice.tiles.tile_for(458, 3064)
    assert taken == {tile.splits_of(201).num_splits}
    assert taken != {tile.splits.num_splits}


def test_compiled_packed_calls_have_the_splits_of_their_longest_keys(monkeypatch):
    """Where a chunk of queries is beside decoding, other sequences have the most keys."""
    taken: set[int] = set()
    of_tiles = CompiledSplits.of_tiles

    def told(*args: Any) -> Any:
        taken.add(args[-1])
        return of_tiles(*args)

    q, k = torch.empty(144, 2, 128), torch.empty(1478, 1, 128)
    sums = torch.arange(9).int().to("meta")
    packed = {"cu_seqlens_q": sums, "cu_seqlens_k": sums, "max_seqlen_q": 102, "max_seqlen_k": 512}
    tensors = (x.to("meta", torch.bfloat16) for x in (q, k, k))
    explanation = explain(*tensors, device="MI300X", mask=2, **packed)
    plan = next(x.plan for x in explanation.estimates if x.plan.family == "compiled")
    monkeypatch.setattr(CompiledSplits, "of_tiles", told)
    plan.seconds(144, 1478)
    (tiles,) = taken
    # What is told of the longest is in halves of the mean.
    assert 512 - 1478 / 8 / 2 <= tiles * plan.rows()[0].ts_kv <= 512


# Small passes, whose first and last launches count; queries that see keys from within a tile on;
# and masks of which each query head has its own.
@pytest.mark.parametrize(
    ("chip", "heads", "lengths", "hdim", "mask"),
    [
        ("gfx942", (8, 8), (128, 128), 64, 0),
        ("gfx950", (2, 1), (256, 256), 128, 2),
        ("gfx942", (4, 2), (775, 128), 64, 2),
        ("gfx950", (8, 2), (222, 128), 64, 2),
    ],
)
def test_backward_passes_take_what_the_cost_model_says(chip, heads, lengths, hdim, mask):
    call = DrawnCall(chip, "bf16", (hdim, hdim), (1, *heads), (lengths,), "gm0", mask, True)
    _, modelled = call.seconds()
    assert set(modelled) == {"ready", "compiled"}
    estimated = call.estimated()
    for family, seconds in modelled.items():
        assert estimated[family] == pytest.approx(seconds, rel=0.1), family


def test_pairs_of_tiles_see_three_quarters_under_a_mask():
    seconds = {}
    for mask in (0, 2):
        call = DrawnCall(
            "gfx950", "bf16", (128, 128), (1, 256, 256), ((512, 512),), "gm0", mask, True
        )
        seconds[mask] = call.estimated()["ready"]
    # What is before and after gradients takes as long.
    assert 0.75 < seconds[2] / seconds[0] < 0.85


@pytest.mark.parametrize("longest_q", [None, *range(MOST_UNEVEN + 1)])
@pytest.mark.parametrize("packs", [1, 2, 3, 8, 9])
def test_uneven_sequences_are_as_long_as_all_together(packs, longest_q):
    """Whatever is told of the longest ones, which is not checked."""
    q = torch.zeros(8 * packs, 1, 64)
    cu_seqlens = 8 * torch.arange(packs + 1, dtype=torch.int32)
    packed = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    problem = make_problem(Arguments.of(q, q, q, packed))
    for longest_k in (None, *range(MOST_UNEVEN + 1)):
        told = problem._replace(unevenness=(longest_q, longest_k))
        for lengths in lengths_of(told):
            for shares in (lengths.queries, lengths.keys):
                assert min(shares) >= 0
                assert sum(shares) == pytest.approx(len(shares))


def test_of_tiles_the_rows_that_there_are_take_time_to_combine():
    whole = KeySplit(64, 256, 304, 128, 1e-6, 1.4, 0.4e-12)
    for rows in (1, 255, 256, 300):
        seconds = combine_seconds(whole, rows, 4)
        assert seconds == combine_seconds(replace(whole, ts_qo=32), rows, 4)
        assert seconds > combine_seconds(whole, rows - 1, 4)
    assert combine_seconds(whole, 256, 1) == 0


def test_splits_that_are_not_loaded_at_once_take_a_round_more():
    few_bytes = KeySplit(1, 16, 304, 64, 1, 1, 0.0)
    seconds = [combine_fours_seconds(few_bytes, 8, n, 32, 64, 304, 1e-6) for n in (64, 65, 128)]
    assert seconds[1] - seconds[0] > 1e-6 > seconds[2] - seconds[1]
