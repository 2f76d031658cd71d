"""A call of `fmha_fwd` or `fmha_bwd` that the emulator's cost model times."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from jitfmha.amd.tree import HSA_DIR
from jitfmha.bench.report import Progress
from jitfmha.call.interface import fmha_bwd, fmha_fwd
from jitfmha.emulator import emulate
from jitfmha.emulator.profile import Estimate, LaunchProfile
from jitfmha.planning.target import TARGET_HERE, AmdTarget
from jitfmha.problem.arguments import AttentionOptions

Kernels = Literal["own", "compiled", "named"]
"""Which a call takes: those that come ready, where they serve it; ones that are compiled for the
call; or the first that serve it, beginning with the tree that ``JITFMHA_HSA_DIR`` names."""
_AITER = "aiter"  # in the names of its kernels
# GPU allocators align to more than a cache line, PyTorch's for the CPU to less.
_ALIGNMENT = 512


class NotServedError(RuntimeError):
    """Another kernel than the published one ran."""


def profiles_of_call(
    name: str,
    chip: str,
    dtype: torch.dtype,
    hdims: tuple[int, int],
    extent: tuple[int, int, int],
    sample: int | None,
    progress: Progress,
    options: AttentionOptions,
    *,
    keys: tuple[int, int] | None = None,
    kernels: Kernels = "own",
) -> tuple[LaunchProfile, ...]:
    """Of the launches of one call: of the kernel, and where keys are split of `combine`.

    The output is not looked at, since a sample leaves most of it undone.

    Args:
        name: what progress is told under.
        chip: which to emulate.
        dtype: of all tensors.
        hdims: of q and k, and of v.
        extent: batch, heads and seqlen.
        sample: how many workgroups are run, None for all.
        progress: told of times.
        options: those of the call.
        keys: key heads and seqlen of the keys, where they are not those of the queries.
        kernels: whose kernels are taken.
    """
    q, k, v, out = _tensors_of_call(dtype, hdims, extent, keys)
    with (
        emulate(chip, profile=True, sample=sample) as run,
        _trees_of(kernels),
    ):
        fmha_fwd(q, k, v, out=out, **options)
        profiles = run.profiles()
    _tell(name, extent, profiles, progress)
    return profiles


def profiles_of_backward(
    name: str,
    chip: str,
    dtype: torch.dtype,
    hdims: tuple[int, int],
    extent: tuple[int, int, int],
    sample: int | None,
    progress: Progress,
    options: AttentionOptions,
    *,
    keys: tuple[int, int] | None = None,
    atomic_fp32: bool | None = None,
    deterministic: bool = False,
    kernels: Kernels = "own",
) -> tuple[LaunchProfile, ...]:
    """Of the launches of one backward pass, by the arguments of :func:`profiles_of_call`.

    What the forward pass would have returned is random, as its values change no cost.
    ``atomic_fp32`` and ``deterministic`` are those of :func:`jitfmha.fmha_bwd`.
    """
    batch, heads, seqlen = extent
    q, k, v, out = _tensors_of_call(dtype, hdims, extent, keys)
    dout = _aligned(dtype, *out.shape).copy_(out)
    dq, dk, dv = (_aligned(dtype, *x.shape) for x in (q, k, v))
    lse = torch.full((batch, heads, seqlen), 10.0)
    # Workgroups that take turns are modelled without their waits: one after the other, none waits.
    threads = 1 if deterministic else None
    with (
        emulate(chip, profile=True, sample=sample, threads=threads) as run,
        _trees_of(kernels),
    ):
        fmha_bwd(
            *(dout, q, k, v, out, lse),
            dq=dq,
            dk=dk,
            dv=dv,
            atomic_fp32=atomic_fp32,
            deterministic=deterministic,
            **options,
        )
        profiles = run.profiles()
    _tell(name, extent, profiles, progress)
    return profiles


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


def _tensors_of_call(
    dtype: torch.dtype,
    hdims: tuple[int, int],
    extent: tuple[int, int, int],
    keys: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, seqlen = extent
    heads_k, seqlen_k = keys or (heads, seqlen)
    out_dtype = dtype if dtype.itemsize > 1 else torch.bfloat16
    q = _aligned(dtype, batch, seqlen, heads, hdims[0])
    out = _aligned(out_dtype, batch, seqlen, heads, hdims[1])
    k, v = (_aligned(dtype, batch, seqlen_k, heads_k, d) for d in hdims)
    generator = torch.Generator().manual_seed(20260101)
    for x in (q, k, v, out):
        # One sequence's values serve all: what they are changes no cost.
        x.copy_(torch.randn(1, x.shape[1], 1, x.shape[-1], generator=generator))
    return q, k, v, out


def _tell(
    name: str,
    extent: tuple[int, int, int],
    profiles: tuple[LaunchProfile, ...],
    progress: Progress,
) -> None:
    estimates = [estimate_of(profile) for profile in profiles]
    progress(
        f"{name}, seqlen {extent[2]}: "
        f"{' + '.join(f'{estimate.seconds * 1e3:.3f}' for estimate in estimates)} ms "
        f"give or take {estimates[0].uncertainty:.0%}, "
        f"{' + '.join(f'{estimate.cycles:.0f}' for estimate in estimates)} cycles, "
        f"matrix units busy {matrix_busy(profiles):.1%}"
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


@contextmanager
def _trees_of(kernels: Kernels) -> Iterator[None]:
    """The target in place with the trees of code objects that these kernels are in."""
    target = TARGET_HERE.get()
    assert isinstance(target, AmdTarget)
    same = target.chip, target.device_index, target.compute_units, target.runtime
    trees = tuple(
        tree
        for tree in target.trees
        if kernels == "named" or (kernels == "own" and tree.is_shipped)
    )
    before = TARGET_HERE.set(AmdTarget(*same, trees=trees))
    try:
        yield
    finally:
        TARGET_HERE.reset(before)


def _aligned(dtype: torch.dtype, *shape: int) -> Tensor:
    """Uninitialised memory, aligned as a GPU's allocator does it."""
    spare = _ALIGNMENT // dtype.itemsize
    count = torch.Size(shape).numel()
    flat = torch.empty(count + spare, dtype=dtype)
    begin = -flat.data_ptr() % _ALIGNMENT // dtype.itemsize
    return flat[begin : begin + count].view(shape)
