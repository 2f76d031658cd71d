"""`emulate`: CPU tensors take the AMD path, and what the emulator saw of it.

A launcher that finds an `Emulation` binds to `Emulation.library` instead of libamdhip64, and wraps
every launch in `Emulation.launching`. What the sanitizer and the cost model made of the launches
is then with the `EmulatedRun` that `emulate` gave.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..amd.chips import chip
from ..amd.node import VIRTUAL_NODE
from ..amd.tree import trees_of
from ..planning.target import TARGET_HERE, AmdTarget
from ..problem.checks import check_flags, check_ints
from ..problem.memory import extent
from .findings import Finding, SanitizerWarning, take_findings
from .library import Variant
from .profile import LaunchProfile, set_profile_options, take_profiles
from .runtime import Emulator

# What `emulate` accepts -> the virtual node's device.
DEVICES = {arch: device for device, arch in enumerate(VIRTUAL_NODE)}

_CURRENT_RUN: ContextVar[EmulatedRun | None] = ContextVar("jitfmha_emulated_run", default=None)


@dataclass(frozen=True)
class Emulation:
    """How CPU tensors run inside of `emulate`, whose arguments these are.

    Attributes:
        arch: a key of `DEVICES`.
        variant: plain, or with the sanitizer or the cost model.
        prints_findings: the sanitizer tells each finding on standard error, once in a process.
    """

    arch: str
    variant: Variant = "plain"
    random_order: int | None = None
    threads: int | None = None
    sample: int | None = None
    instruction_budget: int | None = None
    prints_findings: bool = True

    @property
    def device(self) -> int:
        return DEVICES[self.arch]

    @property
    def has_host_memory(self) -> bool:
        return True

    @property
    def driver(self) -> None:
        return None

    def describe_device(self, device_index: int) -> str:
        return "emulated"

    def current_stream(self, device_index: int) -> int:
        return 0

    def scale_of_one(self, device_index: int) -> Tensor:
        return torch.ones(1, dtype=torch.float32)

    @property
    def library(self) -> ctypes.CDLL:
        """The emulator, built where the cache lacks it; it stands in for libamdhip64."""
        return _emulator(self.variant).library

    @property
    def library_path(self) -> str:
        return self.library._name

    def emulator(self) -> Emulator:
        """The emulator with these options, which hold for later launches of this thread."""
        emulator = _emulator(self.variant)
        emulator.set_options(
            threads=self.threads or 0,
            instruction_budget=self.instruction_budget or 0,
            random_order=self.random_order is not None,
            seed=self.random_order or 0,
            print_findings=self.prints_findings,
        )
        if self.variant == "profile":
            if self.sample is None:
                set_profile_options(emulator.library)
            else:
                set_profile_options(emulator.library, sample=self.sample, run_sample_only=True)
        return emulator

    @contextmanager
    def launching(self, tensors: Iterable[Tensor | None]) -> Iterator[Emulator]:
        """Launches inside, on this thread, may touch these tensors and nothing else.

        They run with the options of this emulation. What the sanitizer or the cost model sees
        goes to the `EmulatedRun` around. Other threads are not affected. On the main thread, Ctrl-C
        ends a launch. Raises ``jitfmha.jit.BuildError`` where the emulator does not compile.
        """
        with _emulator(self.variant).keep_options():
            emulator = self.emulator()
            emulator.set_allowed_memory([extent(x) for x in tensors if x is not None and x.numel()])
            try:
                with emulator.interruptible():
                    yield emulator
            finally:
                emulator.set_allowed_memory(None)
                _run_here(self).collect()


_emulators: dict[Variant, Emulator] = {}


def _emulator(variant: Variant) -> Emulator:
    if variant not in _emulators:
        _emulators[variant] = Emulator(variant)
        _seen(variant)  # of launches by others, which are nothing to a run
    return _emulators[variant]


def _seen(variant: Variant) -> tuple[list[Finding], list[LaunchProfile]]:
    """What was seen of this thread's launches since the last time."""
    if variant == "check":
        return list(take_findings(_emulator(variant).library)), []
    if variant == "profile":
        return [], take_profiles(_emulator(variant).library)
    return [], []


class EmulatedRun:
    """What `emulate` gives: how the block is emulated, and what was seen of its launches."""

    def __init__(self, emulation: Emulation) -> None:
        self.emulation = emulation
        self._lock = threading.Lock()
        self._findings: dict[tuple[str, str, str, str], Finding] = {}
        self._unread = 0
        self._profiles: list[LaunchProfile] = []

    def emulator(self) -> Emulator:
        return self.emulation.emulator()

    def findings(self) -> tuple[Finding, ...]:
        """What the sanitizer found until now, one for each kind, kernel and instruction. Raises
        ``RuntimeError`` where the run is not checked.
        """
        if self.emulation.variant != "check":
            raise RuntimeError("nothing is checked here; use emulate(..., check=True)")
        self.collect()
        with self._lock:
            self._unread = 0
            return tuple(self._findings.values())

    def profiles(self) -> tuple[LaunchProfile, ...]:
        """The cost model's view of each launch until now. Raises ``RuntimeError`` where the run is
        not profiled.
        """
        if self.emulation.variant != "profile":
            raise RuntimeError("nothing is profiled here; use emulate(..., profile=True)")
        self.collect()
        with self._lock:
            return tuple(self._profiles)

    def collect(self) -> None:
        """Take over what was seen of this thread's launches."""
        findings, profiles = _seen(self.emulation.variant)
        with self._lock:
            for finding in findings:
                self._add(finding)
            self._profiles += profiles

    def warn_of_unread(self) -> str:
        """The sentence about findings that nobody has asked for; empty where there are none."""
        with self._lock:
            if not self._unread:
                return ""
            first = next(iter(self._findings.values()))
            return (
                f"the emulator's sanitizer found {len(self._findings)} faults that nobody asked "
                f"for; the first one: {first}"
            )

    def _add(self, finding: Finding) -> None:
        key = (finding.kind, finding.kernel, finding.address, finding.instruction)
        known = self._findings.get(key)
        if known is not None:
            finding = dataclasses.replace(known, count=known.count + finding.count)
        self._findings[key] = finding
        self._unread += 1


def emulation() -> Emulation | None:
    """How CPU tensors run here: set by `emulate`, else by JITFMHA_EMULATE; None: on the CPU. Raises
    ``ValueError`` where JITFMHA_EMULATE names no chip that is emulated.
    """
    target = TARGET_HERE.get()
    if target is None and os.environ.get("JITFMHA_EMULATE"):
        target = target_of_environment()
    runtime = target.runtime if isinstance(target, AmdTarget) else None
    runtime = getattr(runtime, "recorded", runtime)  # that of a target whose launches are recorded
    return runtime if isinstance(runtime, Emulation) else None


def _run_here(emulation: Emulation) -> EmulatedRun:
    """The run that collects what is seen of a launch: the block's around it, else the process's."""
    run = _CURRENT_RUN.get()
    return run if run is not None and run.emulation == emulation else _run_of_process(emulation)


@contextmanager
def emulate(
    arch: str,
    *,
    check: bool = False,
    profile: bool = False,
    random_order: int | None = None,
    threads: int | None = None,
    sample: int | None = None,
    instruction_budget: int | None = None,
) -> Iterator[EmulatedRun]:
    """Make CPU tensors take the AMD path, executed by the emulator.

        with emulate("gfx950", check=True) as run:
            out = fmha_fwd(q, k, v)
        assert not run.findings()

    The emulator is built when it is first needed, which takes up to a minute; a line on standard
    error says so. The sanitizer also prints each finding on standard error, once in a process.

    Args:
        arch: gfx942 (MI300X), gfx942-mi308 (MI308X) or gfx950 (MI355X); or the chip.
        check: with the sanitizer; JITFMHA_EMULATE_CHECK=1 in the environment does the same.
        profile: with the cost model.
        random_order: a seed: waves and workgroups run in random order, which shakes out races, on
            one thread, so that the seed decides all of it. None: always in the same order.
        threads: workers. None: as many as the CPU has. Float atomics of several workgroups on one
            address give the same bits again with one only. In random order there is one.
        sample: with the cost model: only so many workgroups of a launch run, and outputs stay
            incomplete. For launches that would take too long.
        instruction_budget: a wave that has executed so many instructions is stopped with an error,
            for kernels that may never end. None: no budget; Ctrl-C ends them as well.

    Warns:
        SanitizerWarning: the block ends and nobody has asked for its findings.

    Raises:
        TypeError: a flag that is no bool, or a number that is no int.
        ValueError: an unknown arch, a number out of range, both `check` and `profile`, or a
            `sample` without `profile`.
    """
    check_flags(check=check, profile=profile)
    for name, value, least, end in (
        ("threads", threads, 1, 2**31),
        ("random_order", random_order, 0, 2**64),
        ("sample", sample, 1, 2**31),
        ("instruction_budget", instruction_budget, 1, 2**64),
    ):
        if value is not None:
            check_ints(**{name: value})
            if not least <= value < end:
                raise ValueError(f"{name} is {value}, not from {least} to {end - 1}")
    if check and profile:
        raise ValueError("check and profile are separate builds of the emulator; choose one")
    if sample is not None and not profile:
        raise ValueError(f"sample is {sample}; it counts workgroups and needs profile=True")
    check = check or (_environment_checks() and not profile)
    variant: Variant = "check" if check else "profile" if profile else "plain"
    emulation = Emulation(
        named_device(arch, "arch"), variant, random_order, threads, sample, instruction_budget
    )
    run = EmulatedRun(emulation)
    target = TARGET_HERE.set(_target_of(emulation))
    try:
        with collecting(run):
            yield run
    finally:
        TARGET_HERE.reset(target)
        if text := run.warn_of_unread():
            # The caller of the context manager, not contextlib.
            warnings.warn(text, SanitizerWarning, stacklevel=3)


@contextmanager
def collecting(run: EmulatedRun) -> Iterator[None]:
    """What is seen of the launches of ``run.emulation`` inside goes to ``run``.

    It puts no target in place: for who has launches of their own.
    """
    variant, outer = run.emulation.variant, _CURRENT_RUN.get()
    if variant in _emulators:
        if outer is not None and outer.emulation.variant == variant:
            outer.collect()
        else:
            _seen(variant)  # of launches by others, which are nothing to this run
    run_before = _CURRENT_RUN.set(run)
    try:
        yield
    finally:
        _CURRENT_RUN.reset(run_before)


def emulated_name(chip_name: str, arch: str) -> str:
    """The key of ``DEVICES`` for a chip, as "MI308X"; for one that is not emulated its arch."""
    return next((name for name, known in VIRTUAL_NODE.items() if known == chip_name), arch)


def named_device(name: str, origin: str) -> str:
    """The key of ``DEVICES`` that is meant by itself, or by its chip's name.

    Raises ``ValueError``, which begins with ``origin``, where none is.
    """
    if isinstance(name, str):
        for key, chip_name in VIRTUAL_NODE.items():
            if name == key or name.upper() == chip_name:
                return key
    known = ", ".join((*VIRTUAL_NODE, *VIRTUAL_NODE.values()))
    raise ValueError(f"{origin} {name!r} is not emulated; choose one of {known}")


def target_of_environment() -> AmdTarget:
    """The target that JITFMHA_EMULATE names, or ``ValueError``; its trees are read once."""
    arch = named_device(os.environ["JITFMHA_EMULATE"], "JITFMHA_EMULATE:")
    return _target_of_process(Emulation(arch, "check" if _environment_checks() else "plain"))


def _environment_checks() -> bool:
    return os.environ.get("JITFMHA_EMULATE_CHECK", "0") not in ("", "0")


def _target_of(emulation: Emulation) -> AmdTarget:
    """What the emulator's device is, without building the emulator to ask it."""
    emulated = chip(VIRTUAL_NODE[emulation.arch])
    units, trees = emulated.compute_units, trees_of(emulated)
    return AmdTarget(emulated, emulation.device, units, emulation, trees)


@cache
def _target_of_process(emulation: Emulation) -> AmdTarget:
    return _target_of(emulation)


@cache
def _run_of_process(emulation: Emulation) -> EmulatedRun:
    run = EmulatedRun(emulation)
    atexit.register(_print_unread, run)
    return run


def _print_unread(run: EmulatedRun) -> None:
    if text := run.warn_of_unread():
        print(f"jitfmha: {text}", file=sys.stderr)
