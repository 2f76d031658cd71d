"""Calls whose workgroups are persistent, and take their work from a list made on the device.

``csrc_templates/amd/work_list.h`` says how. No launch depends on how long sequences are: neither
its grid nor its workspace.
"""

from __future__ import annotations

from ...amd.manifest import KernelRow
from ...planning.target import AmdTarget
from ...problem.problem import Problem
from ..estimate import measured_cycles
from ..launcher import ListedWork
from ..ready.key_split import Splits
from .list_policy import ListedCall, list_costs, listed_workgroups
from .tile_table import Tile

LIST_THREADS = 1024
"""Of the kernel that lists the work: kListThreads."""


def listed_call(problem: Problem, tile_q: int) -> ListedCall:
    """What decides whether the work of a call is listed."""
    queries, keys = (-1 if told is None else told for told in problem.unevenness)
    return ListedCall(
        problem.mode == "gm1",
        problem.is_paged,
        not problem.mask.is_none,
        *(problem.batch, problem.seqlen_q, problem.gqa, queries, keys, tile_q),
    )


def may_list_work(problem: Problem, tile: Tile, *, streams: bool) -> bool:
    """Whether persistent workgroups serve calls of this kind and length, and may be quicker."""
    return (
        problem.num_splits == 0
        and not problem.has_split_results
        and has_lists(tile, streams=streams)
        and not problem.is_empty
        and listed_call(problem, tile.tile_q).may_be_listed()
    )


def has_lists(tile: Tile, *, streams: bool) -> bool:
    """Whether there are such kernels with a tile."""
    return tile.slices == 1 and not streams


def listed_work(problem: Problem, target: AmdTarget, row: KernelRow, symbol: str) -> ListedWork:
    """What the launches of the kernel have in common, which ``row`` describes."""
    workgroups = listed_workgroups(row.workgroups_of_unit, target.compute_units)
    cycles = measured_cycles(problem, target.arch, "compiled", "forward", 1)
    costs = list_costs(cycles, row.workgroups_of_unit, row.ts_qo, row.ts_kv)
    return ListedWork(symbol, LIST_THREADS, workgroups, costs)


def list_workspace(problem: Problem, seqlen_q: int, work: ListedWork, row: KernelRow) -> Splits:
    """The workspace of calls with so many rows of a sequence, or of all packed ones."""
    rows = seqlen_q * (problem.gqa if row.stacks_heads else 1)
    return listed_call(problem, row.ts_qo).workspace(rows, work.workgroups, row.hdim_v)
