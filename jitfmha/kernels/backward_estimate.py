"""What backward passes take on a chip, as :mod:`jitfmha.kernels.estimate` says of forward ones."""

from __future__ import annotations

from ..amd.chips import Arch
from ..planning.target import AmdTarget
from ..problem.problem import Problem
from . import pass_estimate
from .cycles import CyclesOf, Part, kernel_cycles
from .estimate import band_of, lengths_of, machine_of
from .pass_estimate import BackwardCall, BackwardKernel, PartCycles


def backward_seconds(
    problem: Problem,
    target: AmdTarget,
    kernels: CyclesOf,
    rows: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    edges: int = 2,
    has_lines_of_queries: bool = False,
) -> float:
    """The seconds of a backward pass with such lengths, in gm1 of all sequences together.

    ``rows``, ``edges`` and ``has_lines_of_queries`` are those of ``BackwardKernel``.
    """
    call = BackwardCall(
        *(problem.batch, problem.heads_q, problem.heads_k, problem.hdim_q, problem.hdim_v),
        *(band_of(problem.mask), lengths_of(problem)),
    )
    is_deterministic = problem.is_deterministic and kernels == "ready"
    hdims = problem.hdim_q, problem.hdim_v
    kernel = BackwardKernel(
        rows, edges, kernels == "compiled", is_deterministic, has_lines_of_queries
    )
    return pass_estimate.backward_seconds(
        machine_of(target),
        call,
        kernel,
        *backward_cycles(
            *(target.arch, kernels, problem.dtype, hdims, not problem.mask.is_none),
            is_deterministic=is_deterministic,
        ),
        -(-seqlen_q // problem.packs),
        -(-seqlen_k // problem.packs),
    )


def backward_cycles(
    arch: Arch,
    kernels: CyclesOf,
    dtype: str,
    hdims: tuple[int, int],
    is_masked: bool,
    *,
    is_deterministic: bool,
) -> tuple[PartCycles, PartCycles]:
    """What was measured of the kernel of dq, where it has one, and of the one of dk and dv."""

    def of_part(part: Part) -> PartCycles:
        kind = arch, kernels, part, dtype, hdims
        return PartCycles(kernel_cycles(*kind, is_masked), kernel_cycles(*kind, False))

    if kernels == "compiled":
        return of_part("dq"), of_part("dk_and_dv")
    return PartCycles((), ()), of_part("deterministic" if is_deterministic else "gradients")
