"""When keys are split, into how many parts, and what the launcher asks of the runtime then."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from inputs import prefix_sums
from rigs.recording_runtime import Launch, RecordingRuntime
from untyped import fmha_fwd

from jitfmha.amd.launcher import KeySplit
from jitfmha.target import AmdTarget

MI300 = AmdTarget("gfx942", "MI300", 0, 304)
PARTIAL, SPLITS, TILES = 512, 560, 576  # offsets in the kernels' arguments


def split(**changes: int) -> KeySplit:
    values = {"sequences": 8, "ts_qo": 256, "key_tiles": 64, "slots": 304, "hdim_v": 128}
    return KeySplit(**(values | changes))


@pytest.mark.parametrize(
    ("rows", "changes", "parts"),
    [
        (1, {}, 11),  # 304 / 8 workgroups are 38, but many parts take long to combine
        (256, {}, 11),
        (257, {}, 11),  # 304 / 16
        (257, {"key_tiles": 1024}, 19),
        (1, {"key_tiles": 24}, 6),  # parts have four key tiles at least
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
    ],
)
def test_parts(rows: int, changes: dict[str, int], parts: int) -> None:
    assert split(**changes).parts(rows) == parts


def test_room_for_parts() -> None:
    """Each of a tile's 8 waves leaves 64 values, a maximum and a sum in each of 64 lanes."""
    assert split().floats(257, 3) == 8 * 2 * 3 * 8 * 64 * 66


def words(launch: Launch, *offsets: int) -> list[int]:
    return [struct.unpack_from("<I", bytes(launch.kernarg), offset)[0] for offset in offsets]


def call(runtime: RecordingRuntime, heads: int, rows_q: int, rows_k: int, **options: Any) -> None:
    rows = (1,) if "cu_seqlens_q" not in options else ()
    q, k, v = (
        torch.zeros(*rows, count, heads, 128, dtype=torch.bfloat16)
        for count in (rows_q, rows_k, rows_k)
    )
    with runtime.stands_for(MI300):
        fmha_fwd(q, k, v, **options)


def test_a_full_chip_gets_one_launch(runtime: RecordingRuntime) -> None:
    """Without pairs of tiles, which the kernels are told."""
    call(runtime, 64, 2048, 2048, mask=2)
    (launch,) = runtime.launches()
    assert list(launch.grid) == [8, 64, 1]
    assert words(launch, PARTIAL, PARTIAL + 4, SPLITS, TILES) == [0, 0, 0, 8]


@pytest.mark.parametrize("mask", [0, 2])
def test_split_keys_take_two_launches(runtime: RecordingRuntime, mask: int) -> None:
    call(runtime, 8, 300, 4096, mask=mask)
    first, second = runtime.launches()
    assert list(first.grid) == [3, 8, 16]
    assert list(second.grid) == [3, 8, 1]
    assert bytes(first.kernarg) == bytes(second.kernarg)
    assert words(first, SPLITS, TILES) == [16, 3]
    assert words(first, PARTIAL) != [0]
    assert second.symbol.decode().endswith("_combineE")
    assert list(first.block) == list(second.block) == [256, 1, 1]


def test_group_mode_splits_by_the_longest_sequence(runtime: RecordingRuntime) -> None:
    ends_q, ends_k = prefix_sums([300, 20]), prefix_sums([4096, 4096])
    ends = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
    call(runtime, 4, 320, 8192, **ends, max_seqlen_q=300)
    first, second = runtime.launches()
    assert list(first.grid) == [4, 2, 3 * 16]
    assert list(second.grid) == [4, 2, 3]
    assert words(first, SPLITS, TILES) == [16, 3]


@pytest.mark.parametrize(
    ("heads", "rows", "mask", "tile"),
    [
        (304, 1, 0, 128),  # half of a large tile's waves would have no rows
        (304, 128, 0, 128),
        (304, 256, 0, 256),  # one round of either, and large ones go through keys faster
        (100, 256, 0, 128),  # small ones have units of their own
        (200, 384, 0, 128),  # one round in place of two
        (304, 384, 0, 256),  # two rounds of either
        (304, 512, 0, 256),
        (400, 384, 2, 128),  # less is computed that the mask hides
        (400, 2048, 2, 256),
        (400, 2048, 0, 256),
    ],
)
def test_tiles_on_an_mi300(
    runtime: RecordingRuntime, heads: int, rows: int, mask: int, tile: int
) -> None:
    """A wave of 64 threads has 32 queries."""
    call(runtime, heads, rows, rows, mask=mask)
    launch, *_ = runtime.launches()
    assert list(launch.block) == [2 * tile, 1, 1]


@pytest.mark.parametrize(
    ("target", "tile"), [(MI300, 128), (AmdTarget("gfx942", "MI308", 0, 80), 256)]
)
def test_tiles_depend_on_the_units(runtime: RecordingRuntime, target: AmdTarget, tile: int) -> None:
    """64 large tiles, or 128 small ones: these get a unit each on the larger chip only."""
    q = torch.zeros(1, 256, 64, 128, dtype=torch.bfloat16)
    with runtime.stands_for(target):
        fmha_fwd(q, q, q)
    launch, *_ = runtime.launches()
    assert list(launch.block) == [2 * tile, 1, 1]


@pytest.mark.parametrize(("lengths", "tile"), [([200, 20], 128), ([300, 212], 256)])
def test_group_mode_chooses_tiles_by_the_average(
    runtime: RecordingRuntime, lengths: list[int], tile: int
) -> None:
    ends = prefix_sums(lengths)
    call(runtime, 152, sum(lengths), sum(lengths), cu_seqlens_q=ends, cu_seqlens_k=ends)
    launch, *_ = runtime.launches()
    assert list(launch.block) == [2 * tile, 1, 1]
