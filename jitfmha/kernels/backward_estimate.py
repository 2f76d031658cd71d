"""What backward passes take on a chip, estimated as :mod:`jitfmha.kernels.estimate` does forward.

The kernel of the gradients, or of several of them, counts by its workgroups' cycles; what is before
and after it by the bytes that it moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot
from typing import NamedTuple

from ..planning.target import AmdTarget
from ..problem.problem import Problem
from .cycles import CyclesOf, Part, kernel_cycles
from .estimate import band_of, lengths_of, machine_of
from .launch_estimate import (
    MOST_TILES,
    WAITED_FOR,
    KernelCycles,
    Machine,
    Moved,
    spans_of_tiles,
)
from .ready.key_split import LAUNCH_GAP_SECONDS

_ELEMENT_BYTES, _SUM_BYTES = 2, 4
_STEP = 32  # rows that workgroups go through at a time, and kernels for hdim 64 twice as many
# Cycles of the launches before and after ready gradients, by the cost model: once and for each of
# the queries of a workgroup, by the widest hdim.
_EDGE_ROWS = 128
# Keys of workgroups of ready kernels that have one tile from each end of the sequence under a mask.
_KEYS_OF_PAIR = 512
_EDGE_CYCLES = {64: (4250, 66), 128: (5050, 109), 192: (6500, 87)}
# Deterministic workgroups of a key head add to a tile of dq one after the other: so many tiles and
# cycles after the one before, and under a causal mask, where most have begun later anyway, a share
# of that. With these the ratios come out that hsa/README.md has calculated.
_HAND_ON_TILES, _HAND_ON_CYCLES, _MASKED_SHARE = 2.2, 2000, 0.3


class BackwardKernels(NamedTuple):
    """What is known of the kernels of a pass.

    Attributes:
        kernels: whose they are.
        rows: that workgroups of the kernel of dk and dv have, of keys.
        edges: launches before and after that of the gradients, or of others than that of dq.
        has_lines_of_queries: whether each query head has workgroups of its own, also where query
            heads share a key head.
    """

    kernels: CyclesOf
    rows: int
    edges: int = 2
    has_lines_of_queries: bool = False


def backward_seconds(
    problem: Problem, target: AmdTarget, kernels: BackwardKernels, seqlen_q: int, seqlen_k: int
) -> float:
    """The seconds of a pass with lengths as those of sizes, in gm1 of all sequences together."""
    machine = machine_of(target)
    packs = problem.packs
    lengths = -(-seqlen_q // packs), -(-seqlen_k // packs)
    if min(lengths) == 0 or problem.is_empty:
        return 0.0
    is_turns = problem.is_deterministic and kernels.kernels == "ready"
    hdim_q, hdim_v = problem.hdim_q, problem.hdim_v
    if kernels.kernels == "compiled":
        of_queries = _seconds(
            problem, machine, kernels, "dq", lengths, products=2 * hdim_q + hdim_v
        )
        of_keys = _seconds(
            problem, machine, kernels, "dk_and_dv", lengths, products=2 * hdim_q + 2 * hdim_v
        )
        return of_queries + of_keys + kernels.edges * LAUNCH_GAP_SECONDS
    part: Part = "deterministic" if is_turns else "gradients"
    gradients = _seconds(problem, machine, kernels, part, lengths, products=3 * hdim_q + 2 * hdim_v)
    # The first reads out and dout; float32 sums of dq are zeroed, and read for dq.
    moved = 2 * hdim_v * _ELEMENT_BYTES + hdim_q * (2 * _SUM_BYTES + _ELEMENT_BYTES)
    rows = problem.batch * problem.heads_q * lengths[0]
    width = max(hdim_q, hdim_v)
    once, of_row = _EDGE_CYCLES[min((n for n in _EDGE_CYCLES if n >= width), default=192)]
    cycles = kernels.edges / 2 * (once + of_row * min(lengths[0], _EDGE_ROWS))
    # Workgroups wait for memory in part while others do.
    edges = hypot(cycles / machine.clock.peak, rows * moved / machine.bytes_per_second)
    return gradients + edges + kernels.edges * LAUNCH_GAP_SECONDS


def _of_rows(measured: Sequence[KernelCycles], rows: int) -> KernelCycles:
    """The cycles of workgroups that have so many rows."""
    found = (each for each in measured if each.rows == rows)
    return next(found, None) or measured[-1].with_rows(rows)


def _seconds(
    problem: Problem,
    machine: Machine,
    kernels: BackwardKernels,
    part: Part,
    lengths: tuple[int, int],
    products: int,
) -> float:
    """Of one kernel; ``products`` are those for a query and a key."""
    mask, gqa = problem.mask, problem.gqa
    hdims = problem.hdim_q, problem.hdim_v
    kind = machine.arch, kernels.kernels, part, problem.dtype, hdims
    measured = kernel_cycles(*kind, not mask.is_none)
    cycles = whole = _of_rows(measured, kernels.rows)
    own, other = lengths
    of_own, of_other = problem.heads_q, problem.heads_k
    lines, rounds = problem.batch * problem.heads_q, 1
    if part != "dq":
        own, other = other, own
        of_own, of_other = of_other, of_own
        mask = mask._replace(left=mask.right, right=mask.left)
        if not kernels.has_lines_of_queries:
            lines, rounds = problem.batch * problem.heads_k, gqa
    is_paired = kernels.kernels == "ready" and kernels.rows == _KEYS_OF_PAIR and part != "dq"
    tile_rows = cycles.rows // 2 if is_paired else cycles.rows
    tiles = -(-own // tile_rows)
    spans = spans_of_tiles(band_of(mask), own, other, tiles, tile_rows, -(-tiles // MOST_TILES))
    if kernels.kernels == "compiled" and measured[0].rows < cycles.rows:
        cycles = measured[0].towards(cycles, own / tiles)
    step = _STEP * max(128 // hdims[0], 1) if kernels.kernels == "ready" else _STEP
    # Tiles of the other side lie where they do without a mask.
    steps = ((-(-end // step) - begin // step) * (end > begin) for begin, end in spans)
    counts = [float(rounds * step * count) for count in steps]
    if is_paired:
        tiles = -(-tiles // 2)
        in_pairs = [sum(pair) / 2 for pair in zip(counts, counts[::-1], strict=True)]
        middle = len(counts) // 2
        passed = in_pairs[:middle] + [x / 2 for x in counts[middle : len(counts) - middle]]
    else:
        passed = counts
    workgroups = lines * tiles
    shared = min(cycles.most_shared(), -(-workgroups // machine.compute_units))
    # What masked tiles take more was measured of one head and as many rows as a workgroup has.
    plain = _of_rows(kernel_cycles(*kind, False), kernels.rows)
    of_mask = whole.once[shared - 1] - plain.once[min(shared, plain.most_shared()) - 1]
    of_mask *= rounds * min(own / whole.rows, 1.0) - 1
    launches = []
    for lengths_of_pack in lengths_of(problem):
        rows = [count * share for share in lengths_of_pack.keys for count in passed]
        sizes = [cycles.of_workgroup(shared, count) + of_mask for count in rows]
        launches.append(machine.cycles_of_lines(sizes, lines, tiles, shared, 1, 1))
    launch = sum(launches) / len(launches)
    if part == "deterministic":
        tile = 32 * max(128 // hdims[0], 1)  # of queries
        at_once = min(tiles, machine.compute_units * shared // lines or 1)
        waits = (at_once - 1) * (
            _HAND_ON_TILES * tile * cycles.of_row[shared - 1] + _HAND_ON_CYCLES
        )
        launch += waits if mask.is_none else _MASKED_SHARE * waits
    total = workgroups * sum(passed) / len(passed) * cycles.rows * products
    # What a workgroup has for itself it loads before, and its sums of that it stores behind.
    widths = problem.batch * _ELEMENT_BYTES * sum(hdims)
    # Rows of a query are loaded even where it sees nothing; of the others those that anyone sees.
    seeing = 1.0 if part == "dq" else sum(map(bool, counts)) / len(counts)
    seen = [span for span, count in zip(spans, counts, strict=True) if count]
    others = max(end for _, end in seen) - min(begin for begin, _ in seen) if seen else 0
    moved = Moved(2 * widths * of_own * own * seeing, widths * of_other * others)
    return machine.overlapped(machine.seconds_of(launch, total), moved, shared, WAITED_FOR)
