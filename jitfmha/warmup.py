"""Build launchers ahead: for container images, and before a job of many ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar, get_args

import torch

from .arguments import Arguments, CuSeqlens
from .detection import target_of
from .dispatch import plan_for
from .plan import Plan
from .problem import DTYPE_NAMES, MAX_HDIM, Direction, GradientStrides, Mode, make_problem
from .target import CpuTarget, Target, cpu_isas_here, isa_named

_T = TypeVar("_T")
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_DEFAULT_DTYPES = ("fp32", "bf16", "fp16")
_DEFAULT_HDIMS = (64, 128)


class WarmedLauncher(NamedTuple):
    """One launcher that is ready now: its kernel's name, and the seconds that building it took.

    ``seconds`` is None where the launcher was in the cache already.
    """

    name: str
    seconds: float | None

    @property
    def was_cached(self) -> bool:
        """True when nothing had to be built."""
        return self.seconds is None


def warmup(
    *,
    dtypes: Iterable[str | torch.dtype] | None = None,
    hdims: Iterable[int | tuple[int, int]] | None = None,
    masks: Iterable[int | str] = ("none", "causal"),
    modes: Iterable[Mode] = ("gm0", "gm1"),
    directions: Iterable[Direction] = ("forward",),
    device: str | torch.device = "cpu",
    isa: str | None = None,
    on_ready: Callable[[WarmedLauncher], None] | None = None,
) -> list[WarmedLauncher]:
    """Build and load the launcher of every combination, so that later calls find it.

    Args:
        dtypes: "fp32", "bf16", "fp16", "fp8_e4m3fnuz", "fp8_e4m3fn", "int8", or the torch dtypes;
            by default those of the first three that ``device`` serves.
        hdims: head dimensions, 1 to 576: an int, or a pair (hdim of q and k, hdim of v); by
            default those of 64 and 128 that ``device`` serves.
        masks: what :func:`jitfmha.fmha_fwd` takes as ``mask``.
        modes: "gm0" (batch) and "gm1" (group, with cu_seqlens).
        directions: "forward", and "backward" for gradients; training needs both.
        device: where the calls will run.
        isa: the instruction set of the CPU that the calls will run on, such as "amx",
            "avx512_bf16", "avx512" or "avx2"; None: what calls on this CPU take.
        on_ready: called with each launcher as soon as it is ready, to report progress.

    Returns:
        The launchers in the order of the arguments, each once: several combinations may share one
        (all masks other than "none" do on the CPU).

    Raises:
        TypeError, ValueError: an argument or a combination breaks a rule; nothing was built then.
        NotImplementedError: no kernel serves a combination on ``device`` (of defaults: any at
            all); nothing was built then.
        jitfmha.BuildError: a launcher could not be compiled; those before it are in the cache.
    """
    where = _device(device)
    target = target_of(where) if isa is None else _cpu_with(isa, where)
    if on_ready is not None and not callable(on_ready):
        raise TypeError(f"on_ready must be a function or None, got {on_ready!r}")
    plans: dict[str, Plan] = {}
    may_be_unserved, unserved = dtypes is None or hdims is None, None
    dtypes = _DEFAULT_DTYPES if dtypes is None else dtypes
    hdims = _DEFAULT_HDIMS if hdims is None else hdims
    for dtype, hdim, mask, mode, direction in itertools.product(
        [_dtype(dtype) for dtype in _several("dtypes", dtypes)],
        [_hdim(hdim) for hdim in _several("hdims", hdims)],
        _several("masks", masks),
        [_known("modes", mode, Mode) for mode in _several("modes", modes)],
        [_known("directions", x, Direction) for x in _several("directions", directions)],
    ):
        try:
            plan = _plan(dtype, hdim, mask, mode, direction, where, target)
        except NotImplementedError as error:
            if not may_be_unserved:
                raise
            unserved = error
            continue
        plans.setdefault(plan.kernel, plan)
    if unserved is not None and not plans:
        raise unserved
    warmed = []
    for name, plan in plans.items():
        was_cached = plan.is_built
        start = time.perf_counter()
        plan.bind()
        launcher = WarmedLauncher(name, None if was_cached else time.perf_counter() - start)
        warmed.append(launcher)
        if on_ready is not None:
            on_ready(launcher)
    return warmed


def _plan(
    dtype: torch.dtype,
    hdim: tuple[int, int],
    mask: int | str,
    mode: Mode,
    direction: Direction,
    device: torch.device,
    target: Target,
) -> Plan:
    """The plan of the smallest call with these traits, made as a real call makes it."""
    rows = (1, 1, 1) if mode == "gm0" else (1, 1)
    q = torch.empty((*rows, hdim[0]), dtype=dtype, device=device)
    v = torch.empty((*rows, hdim[1]), dtype=dtype, device=device)
    sums = torch.empty(2, dtype=torch.int32, device=device)
    cu_seqlens = None if mode == "gm0" else CuSeqlens(sums, sums, sums, sums, None, None)
    problem = make_problem(Arguments(q, q, v, mask=mask, cu_seqlens=cu_seqlens))
    if direction == "backward":
        of_q, of_v = q.stride(), v.stride()
        lse = torch.empty(problem.lse_shape).stride()
        gradients = GradientStrides(of_v, lse, None, of_q, of_q, of_v)
        problem = problem._replace(gradients=gradients)
    return plan_for(problem, target)


def _several(name: str, values: Iterable[_T]) -> list[_T]:
    # A lone "bf16" would otherwise be taken apart into letters.
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(
            f"{name} must be a list or tuple, got {values!r}; write {name}=[{values!r}]"
        )
    several = list(values)
    if not several:
        raise ValueError(f"{name} is empty; name at least one")
    return several


def _dtype(dtype: object) -> torch.dtype:
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    if isinstance(dtype, torch.dtype) and dtype in DTYPE_NAMES:
        return dtype
    error = ValueError if isinstance(dtype, (str, torch.dtype)) else TypeError
    raise error(f"dtypes holds {dtype!r}; use {', '.join(map(repr, _DTYPES))} or the torch dtypes")


def _hdim(hdim: object) -> tuple[int, int]:
    pair = (hdim, hdim) if isinstance(hdim, int) else hdim
    if (
        not isinstance(pair, (tuple, list))
        or len(pair) != 2
        or any(isinstance(side, bool) or not isinstance(side, int) for side in pair)
    ):
        raise TypeError(f"hdims holds {hdim!r}; use ints, or pairs of ints (hdim_q, hdim_v)")
    if not all(1 <= side <= MAX_HDIM for side in pair):
        raise ValueError(f"hdims holds {hdim!r}; a head dimension is between 1 and {MAX_HDIM}")
    return pair[0], pair[1]


def _known(name: str, value: object, choices: Any) -> Any:
    known: tuple[str, ...] = get_args(choices)
    for choice in known:
        if isinstance(value, str) and value == choice:
            return choice
    raise ValueError(f"{name} holds {value!r}; use {' or '.join(map(repr, known))}")


def _device(device: object) -> torch.device:
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a str or a torch.device, got {device!r}")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device: {error}") from error
    target_of(where)
    return where


def _cpu_with(isa: object, device: torch.device) -> CpuTarget:
    """A CPU with that instruction set, which this one may lack: nothing is run."""
    if device.type != "cpu":
        raise ValueError(f"isa is {isa!r}, but the device is {device}; it is for the CPU")
    if not isinstance(isa, str):
        raise TypeError(f"isa must be a str or None, got {isa!r}")
    named = isa_named(isa, "isa")
    if (named == "neon") != ("neon" in cpu_isas_here()):
        raise ValueError(f"isa is {isa!r}, which this machine's compiler does not build for")
    return CpuTarget(named, "it was asked for")
