"""Measures, by the emulator's cost model, the cycles that kernels' workgroups take.

    cd op_tests && python -m rigs.kernel_cycles ../jitfmha/kernels/cycles.csv [PART ...]

writes what the estimates of plans are made of (``jitfmha/kernels/cycles.py``): after the model or a
kernel has changed. Without a part, such as "decode", all are measured; the file is written after
each of them. Rows of AITER's kernels are those of the tree that ``JITFMHA_HSA_DIR`` names; without
one the rows that the file has are kept.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple, get_args
from unittest.mock import patch

import torch
from torch import Tensor

from jitfmha.amd import chips
from jitfmha.amd.node import VIRTUAL_NODE
from jitfmha.amd.tree import HSA_DIR, trees_of
from jitfmha.call.interface import fmha_bwd, fmha_fwd
from jitfmha.emulator import emulate
from jitfmha.emulator.profile import LaunchProfile
from jitfmha.kernels.cycles import COLUMNS, Part
from jitfmha.kernels.launch_estimate import WAVE_ROWS
from jitfmha.kernels.ready.key_split import KeySplit

from .modelled_call import Kernels, aligned, take_only, torch_dtype

Served = tuple[tuple[str, tuple[int, int]], ...]
"""Data types and head dimensions."""

_HDIMS_16_BITS = ((64, 64), (128, 128))
_READY = (
    *(("bf16", hdims) for hdims in (*_HDIMS_16_BITS, (192, 128))),
    *(("fp16", hdims) for hdims in _HDIMS_16_BITS),
    *(("fp8", hdims) for hdims in ((128, 128), (256, 256))),
)
_AITER = (("bf16", (128, 128)), ("bf16", (192, 128)), ("fp8", (128, 128)), ("fp8", (256, 256)))
_COMPILED = (
    *(("bf16", (n, n)) for n in (32, 64, 96, 128, 160, 192, 256)),
    *(("bf16", hdims) for hdims in ((64, 128), (128, 64), (192, 128), (576, 512))),
    *((dtype, (n, n)) for dtype in ("fp16", "fp8", "int8", "fp32") for n in (64, 128, 256)),
)
# Those that the kernels for few rows have.
_DECODE = tuple(
    (dtype, hdims) for dtype, hdims in _COMPILED if dtype != "fp32" and max(hdims) <= 256
)
_BACKWARD = tuple(
    (dtype, hdims)
    for dtype in ("bf16", "fp16")
    for hdims in (*_HDIMS_16_BITS, (192, 128), (192, 192))
)
# What workgroups go through: keys of forward kernels and those of dq, else queries. Kernels for few
# rows often have few keys, for each of which they take less than for others.
_LENGTHS, _LENGTHS_IN_DECODE = (512, 2048), (128, 2048)
# Of workgroups that see no tile of keys whole: in tiles of keys. They have as many keys as rows.
_SHORT: Mapping[str, tuple[int, int]] = {"short": (1, 2), "medium": (2, 4)}
_MASKED = ("one_wave", *_SHORT)
# Sequences that are the same memory. So workgroups find most of it in caches, as they do where as
# many have the same keys, and wait for HBM for the rest.
_BATCH = 16

# The columns that are measured; those before them say of which kernel.
_MEASURED = ("cycles_of_row", "cycles_once")


class _Kind(NamedTuple):
    """Which kernel is measured.

    Attributes:
        part: of a pass.
        rows: that a workgroup has.
    """

    kernels: Kernels
    part: Part
    dtype: str
    hdims: tuple[int, int]
    rows: int
    is_masked: bool

    @property
    def row(self) -> tuple[object, ...]:
        """What the file has of it."""
        name = "aiter" if self.kernels == "named" else self.kernels
        return name, self.part, self.dtype, *self.hdims, self.rows, int(self.is_masked)


_Job = tuple[chips.Arch, _Kind]


def _kinds() -> Iterator[_Kind]:
    served: list[tuple[Kernels, Part, Served, tuple[int, ...]]] = [
        ("ready", "forward", _READY, (256, 128)),
        ("compiled", "forward", _COMPILED, (128, 32)),
        ("ready", "one_wave", _READY, (256, 128)),
        ("ready", "short", _READY, (256, 128)),
        ("ready", "medium", _READY, (256, 128)),
        ("compiled", "decode", _DECODE, (64, 32, 16)),
        ("ready", "gradients", _BACKWARD, (512, 256, 128)),
        ("ready", "deterministic", _BACKWARD, (256, 128)),
        ("compiled", "dq", _BACKWARD, (128, 32)),
        ("compiled", "dk_and_dv", _BACKWARD, (128, 32)),
        ("named", "forward", _AITER, (256, 128)),
        ("named", "gradients", _BACKWARD, (256, 192, 128, 64)),
    ]
    for kernels, part, calls, rows in served:
        masks = (True,) if part in _MASKED else (False, True)
        for (dtype, hdims), each, is_masked in product(calls, rows, masks):
            yield _Kind(kernels, part, dtype, hdims, each, is_masked)


def _profiles(
    arch: chips.Arch, kind: _Kind, all_heads: int, length: int
) -> tuple[LaunchProfile, ...]:
    """Of launches with one tile of each head; of all sequences together at most ``all_heads``.

    None where the family does not serve it.
    """
    dtype = torch_dtype(kind.dtype, arch)
    hdim_q, hdim_v = kind.hdims
    rows_q, rows_k, gqa = kind.rows, length, 1
    if kind.part == "decode":
        # A query has them, as heads that are stacked.
        rows_q, gqa = 1, kind.rows
    elif kind.part in _SHORT:
        rows_q = length
    elif kind.part == "one_wave":
        rows_q = WAVE_ROWS
    elif kind.part not in ("forward", "dq"):
        rows_q, rows_k = rows_k, rows_q

    heads = all_heads // _BATCH

    def expanded(rows: int, hdim: int, heads: int = heads) -> Tensor:
        return aligned(dtype, 1, rows, heads, hdim).expand(_BATCH, rows, heads, hdim)

    q = expanded(rows_q, hdim_q, gqa * heads)
    k, v = expanded(rows_k, hdim_q), expanded(rows_k, hdim_v)
    is_deterministic = kind.part == "deterministic"
    threads = 1 if is_deterministic else None
    profiled = emulate(arch, profile=True, sample=1, threads=threads)
    with profiled as run, patch.object(KeySplit, "num_splits", _one):
        take_only(kind.kernels)
        try:
            if kind.part in ("forward", "decode", *_MASKED):
                # Where memory bounds a call, splits are chosen otherwise, and persistent kernels
                # split by themselves; ready kernels take no number of splits.
                num_splits = int(kind.kernels == "compiled")
                fmha_fwd(q, k, v, mask=2 if kind.is_masked else 0, num_splits=num_splits)
                return run.profiles()[:1]
            out = expanded(rows_q, hdim_v)
            lse = torch.full((_BATCH, heads, rows_q), 10.0)
            # Under a mask of the one corner the queries of a tile see all keys before it, of the
            # other one the keys of a tile are seen by all queries behind it.
            corner = 2 if kind.part == "dq" else 1
            fmha_bwd(
                *(out, q, k, v, out, lse),
                mask=corner if kind.is_masked else 0,
                deterministic=is_deterministic,
            )
        except NotImplementedError:
            return ()
        first, *others = run.profiles()
        if kind.part == "dq":
            return (first,)
        # Of wide heads dk and dv have kernels of their own.
        return tuple(others) if kind.part == "dk_and_dv" else (others[0],)


def _one(split: KeySplit, seqlen_q: int, key_tiles: int) -> int:
    return 1


def _measured_rows(jobs: Sequence[_Job]) -> Iterator[list[str]]:
    """Of all kernels, each measured in a process of its own, as many at once as there are cores."""
    seen = set()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for found in pool.map(_measured, *zip(*jobs, strict=True)):
            if found is None or found.kernel in seen:
                continue
            seen.add(found.kernel)
            row = [str(cell) for cell in found.row]
            print(*row, sep=",", file=sys.stderr)
            yield row


class _Measured(NamedTuple):
    kernel: tuple[object, ...]
    row: tuple[object, ...]


def _measured(arch: chips.Arch, kind: _Kind) -> _Measured | None:
    """None where no kernel of the family is of this kind."""
    chip = chips.chip(VIRTUAL_NODE[arch])
    units = chip.compute_units
    tiles: dict[str, int] = {}
    key_tiles: dict[str, int] = {}
    for tree in trees_of(chip):
        tiles |= {row.symbol: row.ts_qo for row in tree.forward.rows}
        key_tiles |= {row.symbol: row.ts_kv for row in tree.forward.rows}
        tiles |= {row.symbol: row.keys for row in tree.ready_backward.rows}
        tiles |= {row.symbol: row.ts for row in tree.aiter_backward.rows}
    # Of backward kernels those with few keys are for launches that leave units idle.
    spare = int(kind.rows == 128)
    lengths = _LENGTHS_IN_DECODE if kind.part == "decode" else _LENGTHS
    found = _profiles(arch, kind, units - spare, kind.rows if kind.part in _SHORT else lengths[0])
    if not found or tiles.get(found[0].kernel, kind.rows) != kind.rows:
        return None
    first = found[0]
    if kind.part in _SHORT:
        fewest, most = (count * key_tiles[first.kernel] for count in _SHORT[kind.part])
        lengths = fewest, most
        if most > kind.rows or _profiles(arch, kind, units, fewest)[0].kernel != first.kernel:
            return None  # or another kernel has so few
    slices = max(round(first.launched_workgroups / units), 1)
    if kind.part == "decode" and slices > 1:
        return None  # more rows than a workgroup has
    of_row: list[str] = []
    once: list[str] = []
    for shared in range(1, first.occupancy.workgroups + 1):
        heads = shared * units // slices - spare
        launches = [_profiles(arch, kind, heads, length) for length in lengths]
        for profiles in launches:
            assert [x.kernel for x in profiles] == [x.kernel for x in found], kind
        cycles = [_cycles_of(profiles) for profiles in launches]
        slope = (cycles[1] - cycles[0]) / (lengths[1] - lengths[0])
        of_row.append(_rounded(slope))
        once.append(_rounded(cycles[0] - slope * lengths[0]))
    kernel = arch, first.kernel, kind.kernels == "compiled" and kind.rows
    return _Measured(kernel, (arch, *kind.row, " ".join(of_row), " ".join(once)))


def _rounded(value: float) -> str:
    return f"{float(f'{value:.3g}'):g}"


def _cycles_of(profiles: tuple[LaunchProfile, ...]) -> int:
    """Of a workgroup of each."""
    cycles = 0
    for profile in profiles:
        assert profile.timing is not None, profile.why_not
        cycles += profile.timing.cycles
    return cycles


def main(path: Path, parts: Sequence[str]) -> None:
    """Measure these parts, and write the file."""
    jobs = list(product(get_args(chips.Arch), _kinds()))
    place = {(arch, *map(str, kind.row)): n for n, (arch, kind) in enumerate(jobs)}
    for part in parts:
        measured = [
            (arch, kind)
            for arch, kind in jobs
            if kind.part == part and (kind.kernels != "named" or os.environ.get(HSA_DIR))
        ]
        anew = {(arch, *kind.row[:2]) for arch, kind in measured}
        with path.open(newline="", encoding="utf-8") as file:
            _, *rows = csv.reader(file)
        rows = [row for row in rows if tuple(row[:3]) not in anew]
        rows += _measured_rows(measured)
        rows.sort(key=lambda row: place[tuple(row[: -len(_MEASURED)])])
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or get_args(Part))
