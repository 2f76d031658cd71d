"""What a launch of a code object's kernel runs on: the emulator, or a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

from ..amd.recording_runtime import Started
from ..amd.runtime import loaded_runtime
from ..emulator.findings import Finding
from ..emulator.runtime import EmulatorError, LaunchParameters
from ..emulator.session import EmulatedRun, Emulation, collecting


class RerunError(RuntimeError):
    """A kernel that does not reach its end, or cannot be loaded."""


class EmulatedMachine:
    """The emulator, with its sanitizer or without.

    Attributes:
        device: of torch, whose memory it has.
    """

    device = torch.device("cpu")

    def __init__(self, emulation: Emulation) -> None:
        self.name = emulation.arch
        self._run = EmulatedRun(emulation)

    def run(self, kernel: Started, memory: Iterable[Tensor]) -> None:
        """Run a kernel, with addresses of this machine among its arguments, to its end.

        ``memory`` is what it may touch. Raises ``RerunError`` where it does not reach its end, or
        cannot be loaded.
        """
        emulation = self._run.emulation
        try:
            with (
                collecting(self._run),
                emulation.launching(memory) as emulator,
                emulator.loaded(kernel.image, emulation.device, kernel.symbol) as function,
            ):
                emulator.launch(
                    *(function, kernel.grid, kernel.block, kernel.kernarg),
                    dynamic_lds=kernel.dynamic_lds,
                )
        except EmulatorError as error:
            raise RerunError(str(error)) from error

    def findings(self) -> tuple[Finding, ...]:
        """What the sanitizer found in all of them."""
        return self._run.findings() if self._run.emulation.variant == "check" else ()


class GpuMachine:
    """A GPU, through the HIP runtime that torch uses.

    A kernel that touches what it must not can end the process there, and harm others' memory.
    """

    def __init__(self, device: torch.device, library: ctypes.CDLL | None = None) -> None:
        """``library`` has HIP's functions; None: that of torch. Raises ``HipError`` without one."""
        self.name = str(device)
        self.device = device
        self._library = loaded_runtime().library if library is None else library

    def run(self, kernel: Started, memory: Iterable[Tensor]) -> None:
        """Run as the emulator does; nobody looks at what the kernel touches."""
        pointer, u32 = ctypes.c_void_p, ctypes.c_uint
        module, function = pointer(), pointer()
        self._call("hipSetDevice", ctypes.c_int(self.device.index or 0))
        self._call("hipModuleLoadData", ctypes.byref(module), ctypes.c_char_p(kernel.image))
        try:
            symbol = ctypes.c_char_p(kernel.symbol.encode())
            self._call("hipModuleGetFunction", ctypes.byref(function), module, symbol)
            parameters = LaunchParameters(kernel.kernarg)
            extents = (u32(each) for each in (*kernel.grid, *kernel.block, kernel.dynamic_lds))
            nothing = pointer()
            arguments = (function, *extents, nothing, nothing, parameters.extra)
            self._call("hipModuleLaunchKernel", *arguments)
            self._call("hipDeviceSynchronize")
        finally:
            self._library.hipModuleUnload(module)

    def findings(self) -> tuple[Finding, ...]:
        return ()

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RerunError(f"{name} failed with HIP's error {status}")


Machine = EmulatedMachine | GpuMachine
"""What runs one kernel after the other."""


def machine_named(device: str, recorded_arch: str) -> GpuMachine:
    """The GPU that torch calls ``device``.

    Raises ``ValueError`` where it is none, or of another architecture than what was recorded, and
    ``HipError`` where there is no HIP runtime.
    """
    try:
        found = torch.device(device)
        arch = torch.cuda.get_device_properties(found).gcnArchName.split(":")[0]
    except (RuntimeError, AssertionError, AttributeError, ValueError) as error:
        raise ValueError(f"device {device!r} is no GPU that torch can use: {error}") from error
    if arch != recorded_arch:
        raise ValueError(
            f"device {device!r} is {arch}, and the launch was recorded for {recorded_arch}"
        )
    return GpuMachine(found)
