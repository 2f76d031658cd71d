"""A call of `fmha_fwd` or `fmha_bwd` that the emulator's cost model times."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jitfmha.amd.chips import chip
from jitfmha.amd.node import VIRTUAL_NODE
from jitfmha.amd.tree import HSA_DIR
from jitfmha.bench.report import Progress, Report
from jitfmha.call.interface import fmha_bwd, fmha_fwd
from jitfmha.emulator import emulate
from jitfmha.emulator.estimate import Estimate
from jitfmha.emulator.profile import LaunchProfile
from jitfmha.planning.target import TARGET_HERE, AmdTarget
from jitfmha.problem.arguments import AttentionOptions
from jitfmha.problem.dtypes import TORCH_DTYPES

Kernels = Literal["own", "ready", "compiled", "named"]
"""Which a call takes: of this package's what it takes by itself, those that come ready, or ones
that are compiled for it; or those of the tree that ``JITFMHA_HSA_DIR`` names."""
_FAMILIES_OF: Mapping[Kernels, frozenset[str] | None] = {
    "own": None,
    "ready": frozenset({"ready"}),
    "compiled": frozenset({"compiled"}),
    "named": frozenset({"ready", "aiter"}),
}
_AITER = "aiter"  # in the names of its kernels
# GPU allocators align to more than a cache line, PyTorch's for the CPU to less.
_ALIGNMENT = 512


class NotServedError(NotImplementedError):
    """Another kernel than the published one ran."""


@dataclass(frozen=True)
class ModelledCall:
    """What decides about the time of a call.

    Attributes:
        chip: which to emulate.
        hdims: of q and k, and of v.
        problem: batch, heads of queries and of keys, and seqlen.
        options: those of the call.
        sample: how many workgroups are run, None for all.
        dtype: of all tensors.
        seqlen_k: of the keys, where it is another one.
        kernels: whose kernels are taken.
    """

    chip: str
    hdims: tuple[int, int]
    problem: tuple[int, int, int, int]
    options: AttentionOptions
    sample: int | None
    dtype: torch.dtype = torch.bfloat16
    seqlen_k: int | None = None
    kernels: Kernels = "own"

    def __str__(self) -> str:
        options = {"mask": 0, "bf16_cvt": "rtne", **self.options}
        mask, kind = options.pop("mask"), options.pop("bf16_cvt")
        if self.dtype != torch.bfloat16:
            kind = str(self.dtype).removeprefix("torch.")
        batch, heads, heads_k, seqlen = self.problem
        seqlens = seqlen if self.seqlen_k is None else f"{seqlen}/{self.seqlen_k}"
        words = ("causal" if mask else "no mask", *options)
        hdims = "x".join(map(str, self.hdims))
        shape = f"({batch}, {heads}/{heads_k}, {seqlens})"
        return f"{self.chip} {hdims} {kind}, {shape}, {', '.join(words)}"

    def forward(self, progress: Progress) -> tuple[LaunchProfile, ...]:
        """Of its launches: of the kernel, and where keys are split of `combine`.

        The output is not looked at, since a sample leaves most of it undone.
        """
        q, k, v, out = self._tensors()
        with emulate(self.chip, profile=True, sample=self.sample) as run:
            take_only(self.kernels)
            fmha_fwd(q, k, v, out=out, **self.options)
            profiles = run.profiles()
        self._tell(profiles, progress)
        return profiles

    def backward(
        self, progress: Progress, *, atomic_fp32: bool | None = None, deterministic: bool = False
    ) -> tuple[LaunchProfile, ...]:
        """Of the launches of its backward pass.

        What the forward pass would have returned is random, as its values change no cost.
        ``atomic_fp32`` and ``deterministic`` are those of :func:`jitfmha.fmha_bwd`.
        """
        q, k, v, out = self._tensors()
        dout = aligned(self.dtype, *out.shape).copy_(out)
        of_inputs = zip(("dq", "dk", "dv"), (q, k, v), strict=True)
        gradients = {name: aligned(self.dtype, *x.shape) for name, x in of_inputs}
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), 10.0)
        choices = {"atomic_fp32": atomic_fp32, "deterministic": deterministic}
        with emulate(self.chip, profile=True, sample=self.sample) as run:
            take_only(self.kernels)
            fmha_bwd(dout, q, k, v, out, lse, **gradients, **choices, **self.options)  # type: ignore[arg-type]
            profiles = run.profiles()
        self._tell(profiles, progress)
        return profiles

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        batch, heads, heads_k, seqlen = self.problem
        seqlen_k = seqlen if self.seqlen_k is None else self.seqlen_k
        out_dtype = self.dtype if self.dtype.itemsize > 1 else torch.bfloat16
        q = aligned(self.dtype, batch, seqlen, heads, self.hdims[0])
        out = aligned(out_dtype, batch, seqlen, heads, self.hdims[1])
        k, v = (aligned(self.dtype, batch, seqlen_k, heads_k, d) for d in self.hdims)
        generator = torch.Generator().manual_seed(20260101)
        for x in (q, k, v, out):
            # One sequence's values serve all: what they are changes no cost.
            x.copy_(torch.randn(1, x.shape[1], 1, x.shape[-1], generator=generator))
        return q, k, v, out

    def _tell(self, profiles: tuple[LaunchProfile, ...], progress: Progress) -> None:
        estimates = [estimate_of(profile) for profile in profiles]
        progress(
            f"{self.kernels} kernels, {self}: "
            f"{' + '.join(f'{estimate.seconds * 1e3:.3f}' for estimate in estimates)} ms "
            f"give or take {estimates[0].uncertainty:.0%}, "
            f"{' + '.join(f'{estimate.cycles:.0f}' for estimate in estimates)} cycles, "
            f"matrix units busy {matrix_busy(profiles):.1%}"
        )


def add_faults(report: Report, which: str, profiles: Iterable[LaunchProfile]) -> None:
    """Add the rows of what must not be in any main loop of these kernels."""
    loops = [loop.work for profile in profiles for loop in profile.main_loops]
    conflicts = sum(work.lds_conflict_cycles for work in loops)
    scratch = sum(work.scratch_bytes for work in loops)
    report.at_most(f"LDS bank conflicts in all main loops{which}", conflicts, 0, "cycles")
    report.at_most(f"spilled to scratch in all main loops{which}", scratch, 0, "bytes")


def check_kernels_of_aiter(profiles: tuple[LaunchProfile, ...]) -> None:
    """Of a call for which the tree that ``JITFMHA_HSA_DIR`` names should have had kernels.

    Raises:
        NotServedError: they are missing, or were refused because of a known fault.
    """
    for profile in profiles:
        if _AITER not in profile.kernel:
            raise NotServedError(
                f"{HSA_DIR}={os.environ.get(HSA_DIR, '')} has no kernel that the call may use: "
                f"{profile.kernel} ran"
            )


def matrix_busy(profiles: tuple[LaunchProfile, ...]) -> float:
    """The share of the launches' time in which the matrix units are busy."""
    estimates = [estimate_of(profile) for profile in profiles]
    busy = sum(estimate.seconds * estimate.matrix_busy for estimate in estimates)
    return busy / sum(estimate.seconds for estimate in estimates)


def estimate_of(profile: LaunchProfile) -> Estimate:
    """The model's times of a launch.

    Raises:
        RuntimeError: the model has none; the message says why.
    """
    estimate = profile.estimate()
    if estimate is None:
        raise RuntimeError(f"no timing: {profile.why_not}")
    return estimate


def take_only(kernels: Kernels) -> None:
    """Leave the target in place these kernels."""
    target = TARGET_HERE.get()
    assert isinstance(target, AmdTarget)
    is_named = kernels == "named"
    target.trees = tuple(tree for tree in target.trees if tree.is_shipped != is_named)
    target.families = _FAMILIES_OF[kernels]


def torch_dtype(name: str, device: str) -> torch.dtype:
    """A data type by its name; "fp8" is the form that a device of the emulator has."""
    architecture = chip(VIRTUAL_NODE[device]).architecture
    return TORCH_DTYPES[architecture.fp8_dtype if name == "fp8" else name]


def aligned(dtype: torch.dtype, *shape: int) -> Tensor:
    """Zeros, aligned as a GPU's allocator does it; no memory is touched for them."""
    spare = _ALIGNMENT // dtype.itemsize
    count = torch.Size(shape).numel()
    flat = torch.zeros(count + spare, dtype=dtype)
    begin = -flat.data_ptr() % _ALIGNMENT // dtype.itemsize
    return flat[begin : begin + count].view(shape)
