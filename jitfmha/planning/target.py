"""What a call runs on: the CPU with its instruction set, or an AMD GPU with its HIP runtime."""

from __future__ import annotations

import os
import platform
from collections.abc import Hashable
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..problem.torch_parts import has_cpu_feature, init_amx

if TYPE_CHECKING:
    from ..amd.chips import Arch, Chip
    from ..amd.runtime import Runtime
    from ..amd.tree import Tree

RECORD = "JITFMHA_RECORD"
CpuIsa = Literal["amx", "avx512_bf16", "avx512", "avx2", "neon", "generic", "amx_emulated"]
AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
AVX512_FLAGS = (*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")

_MOST_OPTIONS = 1024
_MOST_KINDS = 256
# Of the same options. A loop in which every call has one key more needs none of those before: so
# few are kept that it goes through little memory, and that Python's garbage collection, which comes
# when there are 700 objects more than when it came last, has no reason to come.
MOST_CALLS = 48


class KeptCalls:
    """Calls with the same options: data types, devices, scale, mask, and all but shapes.

    Attributes:
        prepared: calls of which everything but the tensors' addresses is settled, by the shapes and
            strides of their tensors.
        kinds: forward calls that differ in lengths and strides only.
    """

    __slots__ = ("kinds", "prepared")

    def __init__(self) -> None:
        self.prepared: dict[Hashable, Any] = {}
        self.kinds: dict[Hashable, Any] = {}

    def keep(self, key: Hashable, prepared: object) -> None:
        """Keep a prepared call; where there are ``MOST_CALLS``, all are forgotten before."""
        if len(self.prepared) >= MOST_CALLS:
            self.prepared.clear()
        self.prepared[key] = prepared

    def keep_kind(self, key: Hashable, kind: object) -> None:
        """Keep a kind of calls; where there are too many, all are forgotten before."""
        if len(self.kinds) >= _MOST_KINDS:
            self.kinds.clear()
        self.kinds[key] = kind


class CallCache(dict[Hashable, KeptCalls]):
    """What calls left behind for later ones, forward and backward, by their options.

    A target that is put in place has its own.
    """

    __slots__ = ()

    def __missing__(self, options: Hashable) -> KeptCalls:
        # Where there are too many options, they are all forgotten before.
        if len(self) >= _MOST_OPTIONS:
            self.clear()
        calls = self[options] = KeptCalls()
        return calls


class CpuTarget:
    """A CPU, as far as kernels are compiled for it.

    ``why`` goes on from "it is taken because"; ``calls`` are what calls on this target left behind
    where it is put in place.
    """

    __slots__ = ("calls", "isa", "why")

    def __init__(self, isa: CpuIsa, why: str) -> None:
        self.isa = isa
        self.why = why
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
        records: whether launches are written into the folder that JITFMHA_RECORD names.
        trees: of code objects, the preferred one first.
        families: of kernels that may serve calls, by name; None: all that can.
        calls: what calls on this target left behind, as long as it stands in for the CPU.
    """

    __slots__ = (
        "calls",
        "chip",
        "compute_units",
        "device_index",
        "families",
        "records",
        "runtime",
        "trees",
    )

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
        folder = os.environ.get(RECORD)
        if folder:
            # Few processes record what they launch.
            from ..amd.recording_runtime import recording_runtime

            runtime = recording_runtime(runtime, folder)
        self.runtime = runtime
        self.records = bool(folder)
        self.trees = trees
        self.families: frozenset[str] | None = None
        self.calls = CallCache()

    @property
    def arch(self) -> Arch:
        return self.chip.architecture.name

    @property
    def has_host_memory(self) -> bool:
        return self.runtime.has_host_memory

    def __str__(self) -> str:
        where = self.runtime.describe_device(self.device_index)
        return f"{self.arch} {self.chip} ({where}, {self.compute_units} compute units)"


Target = CpuTarget | AmdTarget

TARGET_HERE: ContextVar[Target | None] = ContextVar("jitfmha_target_here", default=None)
"""What CPU tensors run on inside of ``emulate``, and wherever else a target is put in place."""

CALLS_HERE = CallCache()
"""What calls left behind wherever no target is put in place: those on the CPU and on real GPUs."""


@lru_cache(maxsize=1)
def cpu_target() -> CpuTarget:
    """This machine's CPU, whatever is emulated on it.

    Raises ``ValueError`` where JITFMHA_CPU_ISA names no instruction set, or one that is not here.
    """
    isas = cpu_isas_here()
    wanted = os.environ.get("JITFMHA_CPU_ISA")
    if not wanted:
        return CpuTarget(isas[0], _why_quickest(isas))
    isa = isa_named(wanted, "JITFMHA_CPU_ISA")
    if isa not in isas:
        raise ValueError(
            f"JITFMHA_CPU_ISA is {isa}, which this processor or its operating system does not "
            f"have; it has {', '.join(isas)}"
        )
    return CpuTarget(isa, "JITFMHA_CPU_ISA says so")


def isa_named(name: str, origin: str) -> CpuIsa:
    """The instruction set of that name. Raises ``ValueError``, naming ``origin``, for others."""
    for known in get_args(CpuIsa):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise ValueError(f"{origin} is {name!r}; choose one of {', '.join(get_args(CpuIsa))}")


def cpu_isas_here() -> tuple[CpuIsa, ...]:
    """What kernels for this machine's CPU may be compiled for, the quickest first."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "neon", "generic", "amx_emulated"
    # torch asks cpuinfo, which also knows whether the operating system saves the registers.
    isas: list[CpuIsa] = ["generic", "amx_emulated"]
    if has_cpu_feature("avx2"):
        isas.insert(0, "avx2")
    if has_cpu_feature("avx512"):
        isas.insert(0, "avx512")
        if has_cpu_feature("avx512_bf16"):
            isas.insert(0 if _is_made_by_amd() else 1, "avx512_bf16")
            # Threads may use tiles once their process has asked for it, which torch does here.
            if has_cpu_feature("amx_tile") and init_amx():
                isas.insert(0, "amx")
    return tuple(isas)


def _is_made_by_amd() -> bool:
    try:
        with open("/proc/cpuinfo", "rb", buffering=0) as facts:
            return b"AuthenticAMD" in facts.read(256)  # the second line of the first processor
    except OSError:
        return False


def _why_quickest(isas: tuple[CpuIsa, ...]) -> str:
    """What goes on from "the first of them is taken because"."""
    quickest = isas[0]
    if quickest == "amx":
        return "the tiles of AMX are the quickest that this processor has for bf16"
    if quickest == "avx512_bf16":
        return "AMD's processors run dot products of bf16 pairs at twice the rate of float32 FMAs"
    if quickest != "avx512" or "avx512_bf16" not in isas:
        return "it is the most that this processor has"
    why = "Intel's processors run dot products of bf16 pairs at half the rate of float32 FMAs"
    if has_cpu_feature("amx_tile"):
        why += ", and the operating system refuses the tiles of AMX"
    return why
