"""When keys are split, into how many splits, and what the launcher asks of the runtime then."""

import random
from typing import Any

import pytest
import torch
from inputs import prefix_sums
from rigs.recording_runtime import RecordingRuntime
from untyped import fmha_fwd

from jitfmha.amd.kernel_arguments import JITFMHA_ARGUMENTS
from jitfmha.amd.manifest import KernelDtype, KernelRow
from jitfmha.call.dispatch import plan_for
from jitfmha.kernels.ready.key_split import KeySplit
from jitfmha.problem.arguments import Arguments
from jitfmha.problem.problem import Sizes, make_problem

_DTYPES: tuple[KernelDtype, KernelDtype] = ("bf16", "fp8bf16")


def split(
    *,
    tile_seconds: float = 4e-6,
    busy_slowdown: float = 1.0,
    byte_seconds: float = 0.0,
    **changes: int,
) -> KeySplit:
    values = {"sequences": 8, "ts_qo": 256, "slots": 304, "hdim_v": 128}
    return KeySplit(
        **(values | changes),
        tile_seconds=tile_seconds,
        busy_slowdown=busy_slowdown,
        byte_seconds=byte_seconds,
    )


@pytest.mark.parametrize(
    ("seqlen_q", "changes", "num_splits"),
    [
        (1, {}, 16),  # 304 / 8 workgroups are 38, but splits have four key tiles at least
        (256, {}, 16),
        (257, {}, 16),  # 304 / 16
        (257, {"key_tiles": 1024}, 19),
        (1, {"key_tiles": 24}, 6),
        (1024, {}, 9),  # 304 / 32
        (4096, {}, 2),  # 304 / 128
        (8192, {}, 1),
        (0, {}, 1),
        (1, {"key_tiles": 7}, 1),
        (1, {"key_tiles": 8}, 2),
        (1, {"key_tiles": 0}, 1),
        (1, {"sequences": 304}, 1),
        (1, {"sequences": 152}, 2),
        (1, {"sequences": 0}, 1),
        (1, {"slots": 80}, 10),
        # More would take `combine` longer than they save.
        (1, {"sequences": 1, "key_tiles": 1024}, 128),
        # As many as it reaches.
        (1, {"sequences": 1, "key_tiles": 1 << 20, "slots": 4096}, 1024),
    ],
)
def test_num_splits(seqlen_q, changes, num_splits):
    key_tiles = changes.pop("key_tiles", 64)
    assert split(**changes).num_splits(seqlen_q, key_tiles) == num_splits


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_fp8_keys_take_little_more_than_half_the_time(arch):
    """As whole launches do by the cost model."""
    of_bf16, of_fp8 = (
        KeySplit.of(
            KernelRow(
                *(dtype, 128, 128, 0, 0, 0, 256, 64, "symbol", "x.co"),
                *("jitfmha", 512, "xcd_heads_tiles_splits"),
            ),
            *(8, 304, arch),
        )
        for dtype in _DTYPES
    )
    assert 0.5 < of_fp8.tile_seconds / of_bf16.tile_seconds < 0.62


def test_num_splits_take_least_time(seed):
    """Beside all others, by the same model."""
    draw = random.Random(seed)
    for _ in range(300):
        tile_seconds, slots = draw.choice([1e-6, 2e-6, 4e-6]), draw.choice([80, 256, 304, 608])
        sequences, key_tiles = draw.randint(1, 400), draw.randint(1, 300)
        slowdown, byte_seconds = draw.uniform(1, 1.5), draw.choice([0.0, 0.4e-12])
        some = split(
            tile_seconds=tile_seconds,
            busy_slowdown=slowdown,
            byte_seconds=byte_seconds,
            slots=slots,
            sequences=sequences,
        )
        # Of each query in a tile of 256: the output, and its maximum and sum twice.
        of_results = sequences * 256 * (128 + 4) * 4 * byte_seconds

        def seconds(
            count: int,
            keys: float = key_tiles * tile_seconds,
            slowdown: float = slowdown,
            of_results: float = of_results,
        ) -> float:
            if count == 1:
                return keys
            second_launch = 4e-6 + 3e-6 + 0.25e-6 * (count - 2) + of_results * count
            return keys * slowdown / count + second_launch

        possible = range(1, max(min(slots // sequences, key_tiles // 4), 1) + 1)
        best = min(map(seconds, possible))
        chosen = some.num_splits(1, key_tiles)
        assert chosen in possible
        assert seconds(chosen) <= best * 1.001, f"{some}, {key_tiles} key tiles: {chosen}"


def test_the_workspace():
    """Each of a tile's 8 waves leaves 64 values, a maximum and a sum in each of 64 lanes."""
    assert split().workspace_floats(257, 3) == 8 * 2 * 3 * 8 * 64 * 66


def call(
    runtime: RecordingRuntime,
    heads: int,
    rows_q: int,
    rows_k: int,
    chip: str = "MI300X",
    **options: Any,
) -> None:
    rows = (1,) if "cu_seqlens_q" not in options else ()
    q, k, v = (
        torch.zeros(*rows, count, heads, 128, dtype=torch.bfloat16)
        for count in (rows_q, rows_k, rows_k)
    )
    with runtime.stands_for(runtime.target(chip)):
        fmha_fwd(q, k, v, **options)


@pytest.mark.usefixtures("ready_first")
def test_a_full_chip_gets_one_launch(runtime):
    call(runtime, 64, 2048, 2048, mask=2)
    (launch,) = runtime.launches()
    assert list(launch.grid) == [64, 8, 1]
    assert launch.fields(JITFMHA_ARGUMENTS, "workspace", "num_splits.divisor", "query_tiles") == [
        0,
        1,
        8,
    ]


@pytest.mark.usefixtures("ready_first")
@pytest.mark.parametrize("mask", [0, 2])
def test_split_keys_take_two_launches(runtime, mask):
    call(runtime, 8, 300, 4096, mask=mask)
    first, second = runtime.launches()
    assert list(first.grid) == [8, 3, 16]
    assert list(second.grid) == [8, 3, 4]  # a workgroup for each of four waves
    assert bytes(first.kernarg) == bytes(second.kernarg)
    assert first.fields(JITFMHA_ARGUMENTS, "num_splits.divisor", "query_tiles") == [16, 3]
    assert first.fields(JITFMHA_ARGUMENTS, "workspace") != [0]
    assert second.symbol.decode().endswith("_combine")
    assert list(first.block) == list(second.block) == [256, 1, 1]


@pytest.mark.usefixtures("ready_first")
def test_group_mode_splits_by_the_longest_sequence(runtime):
    ends_q, ends_k = prefix_sums([300, 20]), prefix_sums([4096, 4096])
    ends = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
    call(runtime, 4, 320, 8192, **ends, max_seqlen_q=300)
    first, second = runtime.launches()
    assert list(first.grid) == [4, 2, 3 * 16]
    assert list(second.grid) == [4, 2, 3 * 4]
    assert first.fields(JITFMHA_ARGUMENTS, "num_splits.divisor", "query_tiles") == [16, 3]


@pytest.mark.usefixtures("ready_first")
@pytest.mark.parametrize(
    ("chip", "heads", "rows", "mask", "tile"),
    [
        ("MI300X", 304, 1, 0, 128),  # half of a large tile's waves would have no rows
        ("MI300X", 304, 128, 0, 128),
        ("MI300X", 304, 256, 0, 256),  # one round of either, and large ones go through keys faster
        ("MI300X", 100, 256, 0, 128),  # small ones have units of their own
        ("MI300X", 200, 384, 0, 128),  # one round in place of two
        ("MI300X", 304, 384, 0, 256),  # two rounds of either
        ("MI300X", 304, 512, 0, 256),
        ("MI300X", 304, 384, 2, 128),  # less is computed that the mask hides
        ("MI300X", 400, 2048, 2, 256),
        ("MI300X", 400, 2048, 0, 256),
        # 64 large tiles, or 128 small ones: these get a unit each on the larger chip only.
        ("MI300X", 64, 256, 0, 128),
        ("MI308X", 64, 256, 0, 256),
    ],
)
def test_tiles(runtime, chip, heads, rows, mask, tile):
    """A wave of 64 threads has 32 queries."""
    call(runtime, heads, rows, rows, chip, mask=mask)
    launch, *_ = runtime.launches()
    assert list(launch.block) == [2 * tile, 1, 1]


@pytest.mark.usefixtures("ready_first")
@pytest.mark.parametrize(("lengths", "tile"), [([200, 20], 128), ([300, 212], 256)])
def test_group_mode_chooses_tiles_by_the_average(runtime, lengths, tile):
    ends = prefix_sums(lengths)
    call(runtime, 152, sum(lengths), sum(lengths), cu_seqlens_q=ends, cu_seqlens_k=ends)
    launch, *_ = runtime.launches()
    assert list(launch.block) == [2 * tile, 1, 1]


# ---- Another kernel for other lengths ------------------------------------------------------------


@pytest.mark.parametrize("of_one_family", [False, True])
def test_a_loop_changes_kernels_where_others_would_be_chosen(runtime, request, of_one_family):
    """Each call gets the kernel and the splits that a fresh process would give it."""
    if of_one_family:
        request.getfixturevalue("ready_first")
    squares = [(n, n) for n in (128, 256, 257, 384, 512)]
    lengths = [*squares, (1, 4096), (1, 4097), (1, 8192)]

    def launches(each_afresh: bool) -> list[tuple[bytes, list[int], list[int]]]:
        runtime.reset()
        target = runtime.target("MI300X")
        for rows_q, rows_k in lengths * 2:
            q, k = (torch.zeros(1, n, 200, 128, dtype=torch.bfloat16) for n in (rows_q, rows_k))
            with runtime.stands_for(runtime.target("MI300X") if each_afresh else target):
                fmha_fwd(q, k, k)
        return [(x.symbol, list(x.grid), list(x.block)) for x in runtime.launches()]

    in_a_loop = launches(each_afresh=False)
    assert in_a_loop == launches(each_afresh=True)
    assert len({symbol for symbol, _, _ in in_a_loop}) > 1


def with_value(sizes: Sizes, name: str, dimension: int, value: int) -> Sizes:
    """The sizes with another length, or another stride of ``dimension``."""
    if name.startswith("seqlen"):
        return sizes._replace(**{name: value})
    changed = list(getattr(sizes, name))
    changed[dimension] = value
    return sizes._replace(**{name: tuple(changed)})


LIMITS = [("seqlen_q", 0, 1 << 30), ("seqlen_k", 0, 1 << 30)] + [
    (name, dimension, 1 << 31)  # 4 GiB of bf16
    for name in ("q", "k", "v", "out")
    for dimension in (-2, -3, -4)
]


@pytest.mark.usefixtures("ready_first")
@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize("kind", ["ready", "plain", "compiled"])
def test_a_plan_does_not_serve_what_is_beyond_its_limits(runtime, request, kind, is_group):
    """Of calls of a known kind nothing but lengths and strides is looked at."""
    if kind == "plain":
        request.getfixturevalue("use_tree")(request.getfixturevalue("full_tree"))
    q = torch.zeros(*([70] if is_group else [2, 70]), 4, 136 if kind == "compiled" else 128)
    q = q.bfloat16()
    sums = prefix_sums([40, 30]) if is_group else None
    options = {"cu_seqlens_q": sums, "cu_seqlens_k": sums} if is_group else {}
    problem = make_problem(Arguments.of(q, q, q, options))
    plan = plan_for(problem, runtime.target("MI300X"))
    assert plan.family == ("compiled" if kind == "compiled" else "ready")
    assert plan.is_settled
    assert plan.serves(problem.sizes)
    for name, dimension, limit in LIMITS:
        if dimension == -4 and is_group:
            continue
        assert not plan.serves(with_value(problem.sizes, name, dimension, limit))
        if kind == "ready" and dimension != 0:
            below = with_value(problem.sizes, name, dimension, limit - 8)
            assert plan.serves(below)
