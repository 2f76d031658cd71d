"""What a call runs on: the CPU with its instruction set, or an AMD GPU with its HIP runtime."""

from __future__ import annotations

import platform
from collections.abc import Hashable
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from .amd.manifest import Tree
    from .amd.runtime import Runtime
    from .chips import Arch, Chip

CpuIsa = Literal["avx512_bf16", "avx512", "avx2", "neon", "generic"]


_MOST_OPTIONS = 1024
_MOST_BACKWARD = 1024
_MOST_KINDS = 256
# Of the same options. A loop in which every call has one key more needs none of those before: so
# few are kept that it goes through little memory, and that Python's garbage collection, which comes
# when there are 700 objects more than when it came last, has no reason to come.
_MOST_CALLS = 48


class KeptCalls:
    """Calls with the same options: data types, devices, scale, mask, and all but shapes.

    Attributes:
        prepared: calls of which everything but the tensors' addresses is settled, by the shapes and
            strides of their tensors.
        kinds: calls that differ in lengths and strides only.
    """

    __slots__ = ("kinds", "prepared")

    def __init__(self) -> None:
        self.prepared: dict[Hashable, Any] = {}
        self.kinds: dict[Hashable, Any] = {}

    def keep(self, key: Hashable, prepared: object) -> None:
        """Keep a prepared call; where there are too many, they are all forgotten before."""
        if len(self.prepared) >= _MOST_CALLS:
            self.prepared.clear()
        self.prepared[key] = prepared


class CallCache:
    """What calls left behind for later ones. A target that is put in place has its own.

    Attributes:
        by_options: forward passes.
        backward: backward passes, by everything that the checks look at.
    """

    __slots__ = ("backward", "by_options")

    def __init__(self) -> None:
        self.by_options: dict[Hashable, KeptCalls] = {}
        self.backward: dict[Hashable, Any] = {}

    def keep_backward(self, key: Hashable, prepared: object) -> None:
        """Keep a prepared backward pass; where there are too many, all are forgotten before."""
        if len(self.backward) >= _MOST_BACKWARD:
            self.backward.clear()
        self.backward[key] = prepared

    def keep_kind(self, options: Hashable, key: Hashable, kind: object) -> KeptCalls:
        """Keep a kind of calls; returns where those with its options are kept.

        Where there are too many options, or kinds, they are all forgotten before.
        """
        calls = self.by_options.get(options)
        if calls is None:
            if len(self.by_options) >= _MOST_OPTIONS:
                self.by_options.clear()
            calls = self.by_options[options] = KeptCalls()
        if len(calls.kinds) >= _MOST_KINDS:
            calls.kinds.clear()
        calls.kinds[key] = kind
        return calls


class CpuTarget:
    """A CPU, as far as kernels are compiled for it.

    Attributes:
        isa: the instruction set.
        calls: what calls on this target left behind where it is put in place.
    """

    __slots__ = ("calls", "isa")

    def __init__(self, isa: CpuIsa) -> None:
        self.isa = isa
        self.calls = CallCache()

    def __str__(self) -> str:
        return f"cpu ({self.isa})"

    @property
    def has_host_memory(self) -> bool:
        """Whether the values of tensors can be read without waiting for a device."""
        return True


class AmdTarget:
    """An AMD Instinct GPU: a real one, an emulated one, or one whose launches are recorded.

    Attributes:
        chip: whose kernels it runs.
        device_index: as its runtime counts; for a real GPU that is also how torch counts.
        compute_units: that this device has; a partition has fewer than the chip.
        runtime: the HIP runtime that launches go to.
        trees: of code objects, the preferred one first.
        calls: what calls on this target left behind, as long as it stands in for the CPU.
    """

    __slots__ = ("calls", "chip", "compute_units", "device_index", "runtime", "trees")

    def __init__(
        self,
        chip: Chip,
        device_index: int,
        compute_units: int,
        runtime: Runtime,
        trees: tuple[Tree, ...],
    ) -> None:
        self.chip = chip
        self.device_index = device_index
        self.compute_units = compute_units
        self.runtime = runtime
        self.trees = trees
        self.calls = CallCache()

    @property
    def arch(self) -> Arch:
        """The chip's architecture."""
        return self.chip.architecture.name

    @property
    def has_host_memory(self) -> bool:
        """Whether the values of tensors can be read without waiting for a device."""
        return self.runtime.has_host_memory

    def __str__(self) -> str:
        where = self.runtime.describe_device(self.device_index)
        return f"{self.arch} {self.chip} ({where}, {self.compute_units} compute units)"


Target = CpuTarget | AmdTarget

TARGET_HERE: ContextVar[Target | None] = ContextVar("jitfmha_target_here", default=None)
"""What CPU tensors run on inside of ``emulate``, and wherever else a target is put in place."""


@lru_cache(maxsize=1)
def cpu_target() -> CpuTarget:
    """This machine's CPU, whatever is emulated on it."""
    return CpuTarget(cpu_isas_here()[0])


def cpu_isas_here() -> tuple[CpuIsa, ...]:
    """What kernels for this machine's CPU may be compiled for, the quickest first."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "neon", "generic"
    # torch asks cpuinfo, which also knows whether the operating system saves the registers.
    isas: list[CpuIsa] = ["generic"]
    if torch.cpu._is_avx2_supported():
        isas.insert(0, "avx2")
    if torch.cpu._is_avx512_supported():
        isas.insert(0, "avx512")
        if torch.cpu._is_avx512_bf16_supported():
            # Intel's processors, which also have AMX, run the dot product of bf16 pairs at half the
            # rate of a float32 FMA: 1.4 to 1.8 times slower in all. AMD's run it at twice the rate.
            isas.insert(1 if torch.cpu._is_amx_tile_supported() else 0, "avx512_bf16")
    return tuple(isas)
