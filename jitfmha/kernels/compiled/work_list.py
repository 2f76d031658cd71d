"""Calls whose workgroups are persistent, and take their work from a list made on the device.

``csrc_templates/amd/work_list.h`` says how. No launch depends on how long sequences are: neither
its grid nor its workspace.
"""

from __future__ import annotations

from ...amd.kernel_arguments import ROW_BLOCK, SHARE_BEGIN
from ...amd.manifest import KernelRow
from ...planning.target import AmdTarget
from ...problem.problem import Problem, element_bytes
from ..cycles import kernel_cycles
from ..estimate import machine_of
from ..launch_estimate import WAVE_ROWS
from ..launcher import ListedWork
from ..ready.key_split import LAUNCH_GAP_SECONDS, MOST_SPLITS, Splits
from .tile_table import Tile

LIST_THREADS = 1024
"""Of the kernel that lists the work: kListThreads."""

# As many as it has room for in LDS: kMostSequences and kMostBlocks.
_MOST_SEQUENCES, _MOST_BLOCKS = 1024, 8192
# Costs are counted in so many cycles: coarsely, since all of them have 32 bits.
_UNIT = 64
# So many times the mean length in halves, as `unevenness_of` has it, the longest one has.
_UNEVEN = 4
# Cycles that persistent workgroups take to find a block in the list, by the cost model.
_LISTED = 2500
# How much longer keys take where units are quicker than HBM, of what they would if all came from
# there: by the cost model, in mixes of which some are read by many blocks and others by one.
_STREAMED = 0.25
# What it takes to list the work, by the cost model 5 to 9 us, and to make the output of blocks that
# are cut, beside what it takes to read their parts: 4 to 9 us. On any chip.
_LISTING_SECONDS = 2 * LAUNCH_GAP_SECONDS + 6e-6 + 6e-6


def listing_seconds(target: AmdTarget, row: KernelRow) -> float:
    """What a call takes beside its persistent workgroups, of which each leaves two parts."""
    part_bytes = 4 * _floats_of_parts(_workgroups(target, row), row)
    return _LISTING_SECONDS + part_bytes / machine_of(target).bytes_per_second


def may_list_work(problem: Problem, tile: Tile, *, streams: bool) -> bool:
    """Whether persistent workgroups serve calls of this kind and length, and may be quicker.

    Where sequences may be uneven, or tiles of rows see more or less of the keys.
    """
    is_uneven = problem.mode == "gm1" and problem.batch > 1 and _may_be_uneven(problem)
    return (
        (is_uneven or not (problem.mask.is_none or problem.is_paged))
        and problem.num_splits == 0
        and not problem.has_split_results
        and tile.slices == 1
        and not streams
        and problem.batch <= _MOST_SEQUENCES
        and not problem.is_empty
        and _most_blocks(problem, problem.seqlen_q * problem.gqa, tile.tile_q) <= _MOST_BLOCKS
    )


def _may_be_uneven(problem: Problem) -> bool:
    """Whether sequences may differ much in length, by what the call tells of the longest ones."""
    queries, keys = problem.unevenness
    if problem.is_paged:  # whose keys nobody counts, and where nobody estimates
        return queries is not None and queries >= _UNEVEN
    if queries is None and problem.seqlen_q == problem.batch:
        queries = 0  # of decoding
    return any(longest is None or longest >= _UNEVEN for longest in (queries, keys))


def _most_blocks(problem: Problem, rows: int, tile_q: int) -> int:
    """How many blocks a head has at most, of so many rows of a sequence, or of all packed ones."""
    of_rows = -(-rows // tile_q)
    return of_rows * problem.batch if problem.mode == "gm0" else of_rows + problem.batch


def listed_work(problem: Problem, target: AmdTarget, row: KernelRow, symbol: str) -> ListedWork:
    """What the launches of the kernel have in common, which ``row`` describes."""
    workgroups = _workgroups(target, row)
    return ListedWork(symbol, LIST_THREADS, workgroups, _costs(problem, target, row))


def _workgroups(target: AmdTarget, row: KernelRow) -> int:
    """As many as run at a time, and no more parts of a block than can be combined."""
    return min(row.workgroups_of_unit * target.compute_units, MOST_SPLITS)


def _costs(problem: Problem, target: AmdTarget, row: KernelRow) -> tuple[int, int, int]:
    """Of a block, of each wave of it, and of a key tile, as ``WORK_COSTS`` has them.

    A key tile takes a block of few rows as long as others: it waits for the keys.
    """
    dtype = "fp8" if problem.is_fp8 else problem.dtype
    hdims = problem.hdim_q, problem.hdim_v
    is_masked = not problem.mask.is_none
    few, *_, every = kernel_cycles(target.arch, "compiled", "forward", dtype, hdims, is_masked)
    shared = min(row.workgroups_of_unit, every.most_shared())
    once = few.once[shared - 1]
    of_wave = (every.once[shared - 1] - once) / (row.ts_qo // WAVE_ROWS - 1)
    of_tile = every.of_row[shared - 1] * row.ts_kv
    tile_bytes = shared * row.ts_kv * sum(hdims) * element_bytes(problem).kv
    streamed = machine_of(target).cycles_of_bytes(tile_bytes)
    of_tile += _STREAMED * max(streamed - of_tile, 0)
    cycles = once - of_wave + _LISTED, of_wave, of_tile
    block, wave, key_tile = (round(x / _UNIT) for x in cycles)
    return block, wave, key_tile


def list_workspace(problem: Problem, seqlen_q: int, work: ListedWork, row: KernelRow) -> Splits:
    """The workspace of calls with so many rows: the list, and parts of blocks behind it.

    Those of a sequence, or of all packed ones.
    """
    rows = seqlen_q * (problem.gqa if row.stacks_heads else 1)
    blocks = _most_blocks(problem, rows, row.ts_qo)
    list_bytes = SHARE_BEGIN.size * (work.workgroups + 1) + ROW_BLOCK.size * blocks
    return Splits(1, list_bytes // 4 + _floats_of_parts(work.workgroups, row))


def _floats_of_parts(workgroups: int, row: KernelRow) -> int:
    """How many float32 values workgroups leave of blocks that they share."""
    columns = -(-row.hdim_v // 32) * 32
    return 2 * workgroups * row.ts_qo * (columns + 4)
