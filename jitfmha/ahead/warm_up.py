"""Build launchers ahead: for container images, and before a job of many ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from .. import jit
from ..call.detection import planned_target
from ..planning.target import CpuTarget, cpu_isas_here, isa_named
from ..problem.checks import check_counts
from ..problem.problem import Direction, Mode

_Dtype: TypeAlias = "str | torch.dtype"


class WarmedLauncher(NamedTuple):
    """One launcher that is ready now: its kernel's name, and the seconds that building it took.

    ``seconds`` is None where the launcher was in the cache already. What several launchers have in
    common counts for each.
    """

    name: str
    seconds: float | None

    @property
    def was_cached(self) -> bool:
        return self.seconds is None


def warmup(
    *,
    profile: str | int | None = None,
    kernel_set: str | os.PathLike[str] | None = None,
    dtypes: Iterable[_Dtype | tuple[_Dtype, _Dtype]] | None = None,
    hdims: Iterable[int | tuple[int, int]] | None = None,
    masks: Iterable[int | str] | None = None,
    modes: Iterable[Mode] | None = None,
    directions: Iterable[Direction] | None = None,
    features: Iterable[str] | None = None,
    out_dtypes: Iterable[str] | None = None,
    device: str | torch.device = "cpu",
    isa: str | None = None,
    jobs: int | None = None,
    on_ready: Callable[[WarmedLauncher, int], None] | None = None,
) -> list[WarmedLauncher]:
    """Build the launcher of every combination, so that later calls find it.

    Args:
        profile: a named set of combinations, "inference", "training", "flash-attn", "aiter" or
            "pytorch": what most calls of its kind need, but for what ``device`` does not serve. The
            arguments below override it: each that is given takes the place of the same in every
            part of the profile, and what makes no call then is left out. Or a receipt of CK's, by
            its name or number, as "flash_fwd" or 2.
        kernel_set: a file, JSON or TOML, that declares what is built, in place of a profile and of
            the arguments up to ``out_dtypes``.
        dtypes: "fp32", "bf16", "fp16", "fp8_e4m3fnuz", "fp8_e4m3fn", "bf8_e5m2fnuz", "bf8_e5m2",
            "int8", or the torch dtypes; or pairs (of q, of k and v), such as
            ("bf16", "fp8_e4m3fn") for a cache of 8 bits. By default those of the first three that
            ``device`` serves.
        hdims: head dimensions, 1 to 576: an int, or a pair (hdim of q and k, hdim of v); by
            default those of 64 and 128 that ``device`` serves.
        masks: what :func:`jitfmha.fmha_fwd` takes as ``mask``; by default "none" and "causal".
        modes: "gm0" (batch) and "gm1" (group, with cu_seqlens); by default both.
        directions: "forward", the default, and "backward" for gradients; training needs both.
        features: what calls have beside that, each a name as :func:`jitfmha.validate_config` has
            them, several joined by "+", or "plain": ``["plain", "alibi", "bias+dropout"]`` builds
            three kernels where "plain", the default, builds one.
        out_dtypes: of the outputs of calls whose q has 8 bits: "bf16", the default, "fp16" and
            "fp32".
        device: where the calls will run. A GPU need not be here: "gfx942", "gfx950", or the name of
            a chip, as "MI308X".
        isa: the instruction set of the CPU that the calls will run on, such as "amx",
            "avx512_bf16", "avx512" or "avx2"; None: what calls on this CPU take.
        jobs: how many are compiled at a time, each by a process of its own; None: as many as this
            process may use processors.
        on_ready: called with each launcher as soon as it is ready, those in the cache first, and
            with how many are left, to report progress.

    Returns:
        The launchers in the order of the arguments, each once: several combinations may share one
        (all masks other than "none" do on the CPU); gm0 has two there, for few and many queries.

    Raises:
        TypeError, ValueError: an argument or a combination breaks a rule, or no combination has all
            that is asked for; nothing was built then.
        NotImplementedError: no kernel serves a combination on ``device`` (of defaults and of a
            profile: any at all); nothing was built then.
        jitfmha.BuildError: a launcher could not be compiled; those before it are in the cache.
    """
    if jobs is None:
        jobs = len(os.sched_getaffinity(0))
    check_counts(1, jobs=jobs)
    if on_ready is not None and not callable(on_ready):
        raise TypeError(f"on_ready must be a function or None, got {on_ready!r}")
    specs = specs_ahead(
        profile=profile,
        kernel_set=kernel_set,
        dtypes=dtypes,
        hdims=hdims,
        masks=masks,
        modes=modes,
        directions=directions,
        features=features,
        out_dtypes=out_dtypes,
        device=device,
        isa=isa,
    )
    missing = {x.digest: x for each in specs.values() for x in each if not jit.is_built(x)}
    left = {name: {x.digest for x in each} & missing.keys() for name, each in specs.items()}
    warmed: dict[str, WarmedLauncher] = {}
    seconds: dict[str, float] = {}

    def report() -> None:
        for name in [name for name, digests in left.items() if digests <= seconds.keys()]:
            took = [seconds[digest] for digest in left.pop(name)]
            warmed[name] = WarmedLauncher(name, sum(took) if took else None)
            if on_ready is not None:
                on_ready(warmed[name], len(left))

    report()
    for spec, took in jit.build_all(list(missing.values()), jobs):
        seconds[spec.digest] = took
        report()
    return [warmed[name] for name in specs]


def specs_ahead(
    *,
    profile: str | int | None,
    device: str | torch.device,
    isa: str | None,
    kernel_set: str | os.PathLike[str] | None = None,
    **parts: Any,
) -> dict[str, Sequence[jit.BuildSpec]]:
    """What :func:`warmup` has to build for each launcher, in the cache or not; raises as that."""
    from .build_ahead import plans_ahead  # of use where something is built ahead only

    target = planned_target(device) if isa is None else _cpu_with(isa, device)
    plans = plans_ahead(target, profile, kernel_set, **parts)
    return {name: plan.specs for name, plan in plans.items()}


def _cpu_with(isa: object, device: str | torch.device) -> CpuTarget:
    """A CPU with that instruction set, which this one may lack: nothing is run."""
    if str(device).partition(":")[0] != "cpu":
        raise ValueError(f"isa is {isa!r}, but the device is {device}; it is for the CPU")
    if not isinstance(isa, str):
        raise TypeError(f"isa must be a str or None, got {isa!r}")
    named = isa_named(isa, "isa")
    if (named == "neon") != ("neon" in cpu_isas_here()):
        raise ValueError(f"isa is {isa!r}, which this machine's compiler does not build for")
    return CpuTarget(named, "it was asked for")
