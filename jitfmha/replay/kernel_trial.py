"""Runs a call once, against float64: of an imported kernel on the emulator, or on any target."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..amd.chips import Chip, architecture
from ..amd.import_kernel import ImportedKernel, ImportRefused, add_to_tree
from ..amd.manifest import KernelDtype
from ..amd.runtime import HipError
from ..amd.tree import Tree
from ..call.dispatch import propose
from ..emulator.findings import Finding
from ..emulator.session import DEVICES, EmulatedRun, Emulation, collecting, emulated_name
from ..planning.plan import Plan
from ..planning.target import AmdTarget
from ..problem.arguments import Arguments, CuSeqlens, Tensors
from ..problem.dtypes import FP8_NAMES, out_dtype_of
from ..problem.float64_reference import Judged, Reference
from ..problem.problem import Problem, make_problem

# A kernel that needs more for some hundred rows never ends.
_INSTRUCTION_BUDGET = 50_000_000
_HEADS_Q, _HEADS_K = 2, 1


class TrialError(RuntimeError):
    """A kernel that does not compute attention on the emulator; the text says how."""


class Trial(NamedTuple):
    """How a kernel did on a device: results beside their reference, and what the sanitizer found.

    ``lengths`` are those of each sequence, of q and of k.
    """

    emulated: str
    lengths: list[tuple[int, int]]
    judged: dict[str, Judged]
    findings: tuple[Finding, ...]


def try_kernel(kernel: ImportedKernel, *, seed: int, sanitizes: bool) -> Trial:
    """Run a kernel on ragged sequences of a tile and one row, on a tree of its own.

    Raises:
        ImportRefused: a call would not take it.
        TrialError: it faults, or what it computes is wrong.
    """
    facts = kernel.facts
    chip = facts.chips[0]
    name = emulated_name(chip.name, chip.architecture.name)
    emulation = Emulation(
        name, "check" if sanitizes else "plain", instruction_budget=_INSTRUCTION_BUDGET
    )
    lengths = _lengths(kernel)
    with tempfile.TemporaryDirectory(prefix="jitfmha-") as folder:
        add_to_tree(kernel, Path(folder))
        tree = Tree("the imported kernel", Path(folder, facts.arch), chip)
        arguments = drawn_call(
            facts.mode,
            lengths,
            (_HEADS_Q, _HEADS_K),
            facts.hdim,
            _torch_dtype(facts.dtype, architecture(facts.arch).fp8_dtype),
            seed=seed,
            mask=facts.mask,
            bf16_cvt=facts.bf16_cvt,
        )
        judged, run = _run(kernel, tree, chip, emulation, arguments)
    wrong = [
        f"{each} is off by {found.error:.3g}, where rounding explains {found.allowed:.3g}"
        for each, found in judged.items()
        if not found.is_right
    ]
    if wrong:
        raise TrialError(
            f"kernel {kernel.cells['knl_name']} computes something else than attention on the "
            f"emulator ({name}, {facts.mode}, lengths {lengths}): {'; '.join(wrong)}"
        )
    return Trial(name, lengths, judged, run.findings() if sanitizes else ())


def _run(
    kernel: ImportedKernel, tree: Tree, chip: Chip, emulation: Emulation, arguments: Arguments
) -> tuple[dict[str, Judged], EmulatedRun]:
    problem = make_problem(arguments)
    target = AmdTarget(chip, DEVICES[emulation.arch], chip.compute_units, emulation, (tree,))
    target.families = frozenset({"ready"})
    plan = propose(problem, target).plan
    if plan is None or plan.family != "ready":
        why = "; ".join(tree.forward.oddities) or "its row does not say what it should"
        raise ImportRefused(f"a call would not take kernel {kernel.cells['knl_name']}: {why}")
    run = EmulatedRun(emulation)
    try:
        with collecting(run):
            return judged_launch(arguments, problem, plan), run
    except HipError as error:
        raise TrialError(f"the kernel's run on the emulator failed: {error}") from error


def judged_launch(arguments: Arguments, problem: Problem, plan: Plan) -> dict[str, Judged]:
    """Launch a plan, and judge the out and the lse that it gives.

    The environment is not looked at, so that the CPU's kernel is tried even where CPU tensors are
    emulated.
    """
    q, k, v, cu_seqlens = arguments.q, arguments.k, arguments.v, arguments.cu_seqlens
    out = q.new_full(problem.out_shape, torch.nan, dtype=out_dtype_of(q.dtype))
    lse = q.new_full(problem.lse_shape, torch.nan, dtype=torch.float32)
    tensors = Tensors(q, k, v, out, lse, cu_seqlens)
    plan.bind()
    plan.launch_for(problem.sizes)(tensors)
    return Reference(problem, tensors).judged({"out": out, "lse": lse})


def _lengths(kernel: ImportedKernel) -> list[tuple[int, int]]:
    """One sequence has a row more than a tile; in gm1 others are shorter, or have no keys."""
    tile_q, tile_k = kernel.facts.tile
    seqlen_q = tile_q + 1
    # Under a mask most rows see some keys; corners differ.
    seqlen_k = max(seqlen_q, tile_k) + 2 if kernel.facts.mask else tile_k + 1
    if kernel.facts.mode == "gm0":
        return [(seqlen_q, seqlen_k)] * 2
    return [(3, 5), (seqlen_q, seqlen_k), (2, 0), (1, 1)]


def drawn_call(
    mode: str,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    hdims: tuple[int, int],
    dtype: torch.dtype,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Arguments:
    """A call with random q, k and v, that asks for the lse.

    Args:
        mode: gm0 or gm1.
        lengths: of each sequence, of q and of k; in gm0 all alike.
        heads: of q, and of k and v.
        hdims: of q and k, and of v.
        options: the others of :class:`Arguments`.
    """
    rng = torch.Generator().manual_seed(seed)
    rows_q, rows_k = (
        (len(lengths), lengths[0][side]) if mode == "gm0" else (sum(x[side] for x in lengths),)
        for side in (0, 1)
    )
    (heads_q, heads_k), (hdim_q, hdim_v) = heads, hdims
    q, k, v = (
        torch.randn(*shape, generator=rng).to(device, dtype)
        for shape in (
            (*rows_q, heads_q, hdim_q),
            (*rows_k, heads_k, hdim_q),
            (*rows_k, heads_k, hdim_v),
        )
    )
    cu_seqlens = None
    if mode == "gm1":
        sums_q, sums_k = (
            torch.tensor([0, *(x[side] for x in lengths)], device=device).cumsum(0).to(torch.int32)
            for side in (0, 1)
        )
        longest = (max(x[side] for x in lengths) for side in (0, 1))
        cu_seqlens = CuSeqlens(sums_q, sums_k, sums_q, sums_k, *longest)
    return Arguments(q, k, v, return_lse=True, cu_seqlens=cu_seqlens, **options)


def _torch_dtype(dtype: KernelDtype, fp8_name: str) -> torch.dtype:
    if dtype == "fp8bf16":
        return next(each for each, name in FP8_NAMES.items() if name == fp8_name)
    return torch.bfloat16 if dtype == "bf16" else torch.float16
