"""A functional emulator of gfx942 and gfx950 behind the HIP runtime's own C functions.

`Emulator` runs code objects on the CPU. `emulate("gfx950")`, or JITFMHA_EMULATE=gfx950 in the
environment, makes CPU tensors take the AMD path; `emulation()` says whether they do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

from .findings import Finding, FindingKind, take_findings
from .library import Variant
from .runtime import Definition, Emulator, EmulatorError, Function, Module

__all__ = [
    "DEVICES",
    "Definition",
    "Emulation",
    "Emulator",
    "EmulatorError",
    "Finding",
    "FindingKind",
    "Function",
    "Module",
    "emulate",
    "emulation",
    "take_findings",
]

# What `emulate` accepts -> the virtual node's device: MI300X, MI308X, MI355X.
DEVICES = {"gfx942": 0, "gfx942-mi308": 1, "gfx950": 2}


@dataclass(frozen=True)
class Emulation:
    """What CPU tensors run on inside of `emulate`.

    Attributes:
        arch: a key of `DEVICES`.
        variant: plain, or with the sanitizer or the cost model.
        random_order: the seed of the order in which waves run; None: a fixed order.
        threads: workers; None: as many as the CPU has.
    """

    arch: str
    variant: Variant = "plain"
    random_order: int | None = None
    threads: int | None = None

    @property
    def device(self) -> int:
        """The device of the virtual node."""
        return DEVICES[self.arch]

    def emulator(self) -> Emulator:
        """The emulator with these options, built where the cache lacks it.

        Options are the process's: they hold for all launches until somebody sets others.

        Raises:
            jitfmha.jit.BuildError: it does not compile.
        """
        emulator = Emulator(self.variant)
        emulator.set_options(
            threads=self.threads or 0,
            random_order=self.random_order is not None,
            seed=self.random_order or 0,
        )
        return emulator


_current: ContextVar[Emulation | None] = ContextVar("jitfmha_emulation", default=None)


def emulation() -> Emulation | None:
    """What CPU tensors run on here: set by `emulate`, else by JITFMHA_EMULATE, else None.

    The environment is read once.

    Raises:
        ValueError: JITFMHA_EMULATE names no chip that is emulated.
    """
    return _current.get() or _from_environment()


@contextmanager
def emulate(
    arch: str,
    *,
    check: bool = False,
    profile: bool = False,
    random_order: int | None = None,
    threads: int | None = None,
) -> Iterator[Emulation]:
    """Make CPU tensors take the AMD path, executed by the emulator.

    The emulator is built when it is first needed, which takes up to a minute; a line on standard
    error says so.

    Args:
        arch: gfx942 (MI300X), gfx942-mi308 (MI308X) or gfx950 (MI355X).
        check: with the sanitizer; JITFMHA_EMULATE_CHECK=1 in the environment does the same.
        profile: with the cost model.
        random_order: a seed: waves run in random order, which shakes out races. None: always in
            the same order.
        threads: workers. None: as many as the CPU has. Float atomics of several workgroups on one
            address give the same bits again with one only.

    Raises:
        ValueError: an unknown arch, fewer than one thread, a seed that is not from 0 to 2**64 - 1,
            or both `check` and `profile`.
    """
    if check and profile:
        raise ValueError("check and profile are separate builds of the emulator; choose one")
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}; the emulator needs one at least")
    if random_order is not None and not 0 <= random_order < 2**64:
        raise ValueError(f"random_order is {random_order}; a seed is from 0 to 2**64 - 1")
    check = check or (_environment_checks() and not profile)
    variant: Variant = "check" if check else "profile" if profile else "plain"
    current = Emulation(_known(arch, "arch"), variant, random_order, threads)
    token = _current.set(current)
    try:
        yield current
    finally:
        _current.reset(token)


def _known(arch: str, origin: str) -> str:
    if arch not in DEVICES:
        raise ValueError(f"{origin} {arch!r} is not emulated; choose one of {', '.join(DEVICES)}")
    return arch


@lru_cache(maxsize=1)
def _environment_checks() -> bool:
    return os.environ.get("JITFMHA_EMULATE_CHECK", "0") not in ("", "0")


@lru_cache(maxsize=1)
def _from_environment() -> Emulation | None:
    arch = os.environ.get("JITFMHA_EMULATE", "")
    if not arch:
        return None
    return Emulation(
        _known(arch, "JITFMHA_EMULATE:"), "check" if _environment_checks() else "plain"
    )
