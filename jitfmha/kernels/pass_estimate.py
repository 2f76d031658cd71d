"""What a backward pass takes, as :mod:`jitfmha.kernels.backward_estimate` says, by plain numbers.

The kernel of the gradients, or of several of them, counts by its workgroups' cycles; what is before
and after it by the bytes that it moves.

``python -m jitfmha export`` translates this module to C++, so it keeps to the Python that
``jitfmha/export/translation.py`` knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from .launch_estimate import (
    MOST_TILES,
    Band,
    KernelCycles,
    Lengths,
    Machine,
    Moved,
    spans_of_tiles,
)
from .ready.key_split import LAUNCH_GAP_SECONDS

_ELEMENT_BYTES, _SUM_BYTES = 2, 4
_STEP = 32  # rows that workgroups go through at a time, and kernels for hdim 64 twice as many
# Keys of workgroups of ready kernels that have one tile from each end of the sequence under a mask.
_KEYS_OF_PAIR = 512
# Cycles of the launches before and after ready gradients, by the cost model: once and for each of
# the queries of a workgroup, by the widest hdim.
_EDGE_ROWS = 128
_EDGE_ONCE_64, _EDGE_ONCE_128, _EDGE_ONCE_192 = 4250, 5050, 6500
_EDGE_OF_ROW_64, _EDGE_OF_ROW_128, _EDGE_OF_ROW_192 = 66, 109, 87
# Deterministic workgroups of a key head add to a tile of dq one after the other: so many tiles and
# cycles after the one before, and under a causal mask, where most have begun later anyway, a share
# of that. With these the ratios come out that hsa/README.md has calculated.
_HAND_ON_TILES, _HAND_ON_CYCLES, _MASKED_SHARE = 2.2, 2000, 0.3


class BackwardCall(NamedTuple):
    """What estimates know of calls that differ in lengths only.

    Attributes:
        lengths: that sequences may have.
    """

    batch: int
    heads_q: int
    heads_k: int
    hdim_q: int
    hdim_v: int
    band: Band
    lengths: Sequence[Lengths]


class BackwardKernel(NamedTuple):
    """What is known of the kernels of a pass.

    Attributes:
        rows: that workgroups of the kernel of dk and dv have, of keys.
        edges: launches before and after that of the gradients, or of others than that of dq.
        is_compiled: whether dq has a kernel of its own, whose waves do nothing without rows.
        hands_on: whether workgroups of a key head add to dq in one order.
        has_lines_of_queries: whether each query head has workgroups of its own, also where query
            heads share a key head.
    """

    rows: int
    edges: int
    is_compiled: bool
    hands_on: bool
    has_lines_of_queries: bool


class PartCycles(NamedTuple):
    """What was measured of a kernel of a pass, the fewest rows first.

    Attributes:
        measured: with a mask if the call has one.
        unmasked: without.
    """

    measured: Sequence[KernelCycles]
    unmasked: Sequence[KernelCycles]


def backward_seconds(
    machine: Machine,
    call: BackwardCall,
    kernels: BackwardKernel,
    of_queries: PartCycles,
    of_keys: PartCycles,
    seqlen_q: int,
    seqlen_k: int,
) -> float:
    """The seconds of a pass whose sequences have so many queries and keys on average.

    ``of_queries`` is what was measured of the compiled kernel of dq, and ``of_keys`` of the one of
    dk and dv, or of all gradients.
    """
    hdim_q = call.hdim_q
    hdim_v = call.hdim_v
    if min(seqlen_q, seqlen_k, call.batch, call.heads_q) == 0:
        return 0.0
    if kernels.is_compiled:
        of_dq = _kernel_seconds(
            machine, call, kernels, of_queries, True, seqlen_q, seqlen_k, 2 * hdim_q + hdim_v
        )
        of_others = _kernel_seconds(
            machine, call, kernels, of_keys, False, seqlen_q, seqlen_k, 2 * hdim_q + 2 * hdim_v
        )
        return of_dq + of_others + kernels.edges * LAUNCH_GAP_SECONDS
    gradients = _kernel_seconds(
        machine, call, kernels, of_keys, False, seqlen_q, seqlen_k, 3 * hdim_q + 2 * hdim_v
    )
    # The first reads out and dout; float32 sums of dq are zeroed, and read for dq.
    moved = 2 * hdim_v * _ELEMENT_BYTES + hdim_q * (2 * _SUM_BYTES + _ELEMENT_BYTES)
    rows = call.batch * call.heads_q * seqlen_q
    once = _EDGE_ONCE_64
    of_row = _EDGE_OF_ROW_64
    if max(hdim_q, hdim_v) > 64:
        once = _EDGE_ONCE_128
        of_row = _EDGE_OF_ROW_128
    if max(hdim_q, hdim_v) > 128:
        once = _EDGE_ONCE_192
        of_row = _EDGE_OF_ROW_192
    cycles = kernels.edges * (once + of_row * min(seqlen_q, _EDGE_ROWS)) / 2
    # Workgroups wait for memory in part while others do.
    computing = cycles / machine.clock.peak
    moving = rows * moved / machine.bytes_per_second
    edges = sqrt(computing * computing + moving * moving)
    return gradients + edges + kernels.edges * LAUNCH_GAP_SECONDS


def _of_rows(measured: Sequence[KernelCycles], rows: int) -> KernelCycles:
    """The cycles of workgroups that have so many rows."""
    found = measured[len(measured) - 1].with_rows(rows)
    for each in measured:
        if each.rows == rows:
            found = each
    return found


def _kernel_seconds(
    machine: Machine,
    call: BackwardCall,
    kernels: BackwardKernel,
    part: PartCycles,
    is_of_queries: bool,
    seqlen_q: int,
    seqlen_k: int,
    products: int,
) -> float:
    """Of one kernel; ``products`` are those for a query and a key."""
    whole = _of_rows(part.measured, kernels.rows)
    cycles = whole
    band = call.band
    own = seqlen_q
    other = seqlen_k
    of_own = call.heads_q
    of_other = call.heads_k
    lines = call.batch * call.heads_q
    rounds = 1
    if not is_of_queries:
        band = Band(band.is_top_left, band.right, band.left)
        own = seqlen_k
        other = seqlen_q
        of_own = call.heads_k
        of_other = call.heads_q
        if not kernels.has_lines_of_queries:
            lines = call.batch * call.heads_k
            rounds = call.heads_q // call.heads_k
    is_paired = not kernels.is_compiled and kernels.rows == _KEYS_OF_PAIR
    tile_rows = cycles.rows // 2 if is_paired else cycles.rows
    tiles = -(-own // tile_rows)
    spans = spans_of_tiles(band, own, other, tiles, tile_rows, -(-tiles // MOST_TILES))
    if kernels.is_compiled and part.measured[0].rows < cycles.rows:
        cycles = part.measured[0].towards(cycles, own / tiles)
    step = _STEP if kernels.is_compiled else _STEP * max(128 // call.hdim_q, 1)
    counts: list[int] = []
    for each in spans:
        # Tiles of the other side lie where they do without a mask.
        steps = -(-each.end // step) - each.begin // step
        counts.append(rounds * step * steps if each.end > each.begin else 0)
    passed: list[float] = []
    every = 0.0  # rows that the workgroups of a line pass
    if is_paired:
        tiles = -(-tiles // 2)
        for i in range((len(counts) + 1) // 2):
            behind = len(counts) - 1 - i
            passed.append((counts[i] + counts[behind] if i < behind else counts[i]) / 2)
            every += passed[i]
    else:
        for count in counts:
            passed.append(1.0 * count)
            every += count
    workgroups = lines * tiles
    shared = min(cycles.most_shared(), -(-workgroups // machine.compute_units))
    # What masked tiles take more was measured of one head and as many rows as a workgroup has.
    plain = _of_rows(part.unmasked, kernels.rows)
    of_mask = whole.once[shared - 1] - plain.once[min(shared, plain.most_shared()) - 1]
    of_mask = of_mask * (rounds * min(own / whole.rows, 1.0) - 1)
    launch = 0.0
    for lengths in call.lengths:
        of_one = len(passed)
        sizes: list[float] = [
            cycles.of_workgroup(shared, passed[n % of_one] * lengths.keys[n // of_one]) + of_mask
            for n in range(of_one * len(lengths.keys))
        ]
        launch += machine.cycles_of_lines(sizes, lines, tiles, shared, 1, 1)
    launch = launch / len(call.lengths)
    if kernels.hands_on:
        tile = 32 * max(128 // call.hdim_q, 1)  # of queries
        at_once = min(tiles, max(machine.compute_units * shared // lines, 1))
        waits = (at_once - 1) * (
            _HAND_ON_TILES * tile * cycles.of_row[shared - 1] + _HAND_ON_CYCLES
        )
        launch += waits if call.band.is_none() else _MASKED_SHARE * waits
    seeing = 0
    first = other
    last = 0
    for i in range(len(counts)):
        if counts[i] > 0:
            seeing += 1
            first = min(first, spans[i].begin)
            last = max(last, spans[i].end)
    total = workgroups * every / len(passed) * cycles.rows * products
    # What a workgroup has for itself it loads before, and its sums of that it stores behind.
    widths = call.batch * _ELEMENT_BYTES * (call.hdim_q + call.hdim_v)
    # Rows of a query are loaded even where it sees nothing; of the others those that anyone sees.
    loaded = 1.0 if is_of_queries else seeing / len(counts)
    moved = Moved(2 * widths * of_own * own * loaded, widths * of_other * max(last - first, 0))
    compute = machine.seconds_of(launch, total)
    waited = 0.0
    # Ready kernels have several tiles on their way.
    if kernels.is_compiled and every > 0:
        mean = every / len(passed)
        of_row = cycles.of_row[shared - 1]
        looped = compute * of_row * mean / cycles.of_workgroup(shared, mean)
        waited = machine.waits(looped, of_row, moved, shared)
    return machine.overlapped(compute, moved, waited)
