"""Runs an imported kernel once on the emulator, through the launcher, against float64."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..amd.chips import Chip, architecture
from ..amd.import_kernel import ImportedKernel, ImportRefused, add_to_tree
from ..amd.manifest import KernelDtype
from ..amd.runtime import HipError
from ..amd.tree import Tree
from ..call.dispatch import propose
from ..emulator.findings import Finding
from ..emulator.session import DEVICES, EmulatedRun, Emulation, collecting, emulated_name
from ..planning.target import AmdTarget
from ..problem.arguments import Arguments, CuSeqlens, Tensors
from ..problem.dtypes import FP8_NAMES, out_dtype_of
from ..problem.float64_reference import Judged, Reference
from ..problem.problem import make_problem

# A kernel that needs more for some hundred rows never ends.
_INSTRUCTION_BUDGET = 50_000_000
_HEADS_Q, _HEADS_K = 2, 1


class TrialError(RuntimeError):
    """A kernel that does not compute attention on the emulator; the text says how."""


class Trial(NamedTuple):
    """How a kernel did.

    Attributes:
        emulated: the device that it ran on.
        lengths: of each sequence, of q and of k.
        judged: out and lse beside their reference.
        findings: of the sanitizer.
    """

    emulated: str
    lengths: list[tuple[int, int]]
    judged: dict[str, Judged]
    findings: tuple[Finding, ...]


def try_kernel(kernel: ImportedKernel, *, seed: int, sanitizes: bool = False) -> Trial:
    """Run a kernel on ragged sequences of a tile and one row, on a tree of its own.

    Args:
        kernel: from :func:`jitfmha.amd.import_kernel.import_listing`.
        seed: of the inputs.
        sanitizes: with the emulator's sanitizer.

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
        arguments = _arguments(kernel, lengths, torch.Generator().manual_seed(seed))
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
    plan = propose(problem, target).plan
    if plan is None or plan.family != "ready":
        why = "; ".join(tree.forward.oddities) or "its row does not say what it should"
        raise ImportRefused(f"a call would not take kernel {kernel.cells['knl_name']}: {why}")
    q, k, v, cu_seqlens = arguments.q, arguments.k, arguments.v, arguments.cu_seqlens
    out = q.new_full(problem.out_shape, torch.nan, dtype=out_dtype_of(q.dtype))
    lse = torch.full(problem.lse_shape, torch.nan)
    tensors = Tensors(q, k, v, out, lse, cu_seqlens)
    run = EmulatedRun(emulation)
    try:
        with collecting(run):
            plan.bind()
            plan.launch_for(problem.sizes)(tensors)
    except HipError as error:
        raise TrialError(f"the kernel's run on the emulator failed: {error}") from error
    return Reference(problem, tensors).judged({"out": out, "lse": lse}), run


def _lengths(kernel: ImportedKernel) -> list[tuple[int, int]]:
    """One sequence has a row more than a tile; in gm1 others are shorter, or have no keys."""
    tile_q, tile_k = kernel.facts.tile
    seqlen_q = tile_q + 1
    # Under a mask most rows see some keys; corners differ.
    seqlen_k = max(seqlen_q, tile_k) + 2 if kernel.facts.mask else tile_k + 1
    if kernel.facts.mode == "gm0":
        return [(seqlen_q, seqlen_k)] * 2
    return [(3, 5), (seqlen_q, seqlen_k), (2, 0), (1, 1)]


def _arguments(
    kernel: ImportedKernel, lengths: list[tuple[int, int]], rng: torch.Generator
) -> Arguments:
    facts = kernel.facts
    rows_q, rows_k = (
        (2, lengths[0][side]) if facts.mode == "gm0" else (sum(x[side] for x in lengths),)
        for side in (0, 1)
    )
    dtype = _torch_dtype(facts.dtype, architecture(facts.arch).fp8_dtype)
    hdim_q, hdim_v = facts.hdim
    q, k, v = (
        torch.randn(*shape, generator=rng).to(dtype)
        for shape in (
            (*rows_q, _HEADS_Q, hdim_q),
            (*rows_k, _HEADS_K, hdim_q),
            (*rows_k, _HEADS_K, hdim_v),
        )
    )
    cu_seqlens = None
    if facts.mode == "gm1":
        sums_q, sums_k = (_prefix_sums([x[side] for x in lengths]) for side in (0, 1))
        longest = (max(x[side] for x in lengths) for side in (0, 1))
        cu_seqlens = CuSeqlens(sums_q, sums_k, sums_q, sums_k, *longest)
    return Arguments(
        *(q, k, v),
        mask=facts.mask,
        return_lse=True,
        cu_seqlens=cu_seqlens,
        bf16_cvt=facts.bf16_cvt,
    )


def _prefix_sums(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _torch_dtype(dtype: KernelDtype, fp8_name: str) -> torch.dtype:
    if dtype == "fp8bf16":
        return next(each for each, name in FP8_NAMES.items() if name == fp8_name)
    return torch.bfloat16 if dtype == "bf16" else torch.float16
