"""What a recorded launch runs on again: the emulator, or a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..amd.node import VIRTUAL_NODE
from ..amd.runtime import loaded_runtime
from ..call.record import Record, RecordedKernel
from ..emulator.findings import Finding, take_findings
from ..emulator.runtime import Emulator, EmulatorError
from ..emulator.session import DEVICES

_ALIGNMENT = 256
# Lies between two regions and belongs to neither: an access past one's end is outside of all.
_GAP = 1 << 16
# HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE and _END.
_LAUNCH_BUFFER, _LAUNCH_SIZE, _LAUNCH_END = 1, 2, 3


class RerunError(RuntimeError):
    """A kernel that does not reach its end, or cannot be loaded."""


class Machine(Protocol):
    """Runs one kernel after the other."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    def room(self, size: int, address: int) -> Tensor:
        """uint8 memory that lies to multiples of 256 as ``address`` does."""
        ...

    def run(self, kernel: RecordedKernel, image: bytes, memory: Sequence[tuple[int, int]]) -> None:
        """Run a kernel to its end.

        Args:
            kernel: with the addresses of this machine among its arguments.
            image: its code object.
            memory: address and bytes of what it may touch.

        Raises:
            RerunError: it does not reach its end.
        """
        ...

    def findings(self) -> list[Finding]:
        """What a sanitizer found in all of them."""
        ...


class EmulatedMachine:
    """The emulator, with its sanitizer or without.

    Args:
        record: whose chip it stands for.
        sanitizes: whether the sanitizer looks on.
        random_order: the seed of the order in which waves run; None: a fixed order.
        instruction_budget: of each wave; None: only Ctrl-C ends a kernel that does not.
    """

    def __init__(
        self,
        record: Record,
        *,
        sanitizes: bool = False,
        random_order: int | None = None,
        instruction_budget: int | None = None,
    ) -> None:
        names = {chip: name for name, chip in VIRTUAL_NODE.items()}
        self.name = names.get(record.chip, record.arch)
        self._emulator = Emulator("check" if sanitizes else "plain")
        self._sanitizes = sanitizes
        self._random_order = random_order
        self._budget = instruction_budget or 0
        if sanitizes:
            take_findings(self._emulator.library)  # of what ran before

    def room(self, size: int, address: int) -> Tensor:
        """On the CPU."""
        return _aligned(torch.empty(size + _ALIGNMENT + _GAP, dtype=torch.uint8), size, address)

    def run(self, kernel: RecordedKernel, image: bytes, memory: Sequence[tuple[int, int]]) -> None:
        """As `Machine.run`."""
        emulator = self._emulator
        with emulator.keep_options():
            emulator.set_options(
                random_order=self._random_order is not None,
                seed=self._random_order or 0,
                instruction_budget=self._budget,
                print_findings=False,
            )
            try:
                module = emulator.load_module(image, DEVICES[self.name])
            except EmulatorError as error:
                raise RerunError(f"{kernel.symbol} cannot be loaded: {error}") from error
            emulator.set_allowed_memory(memory)
            try:
                function = emulator.function(module, kernel.symbol)
                emulator.launch(
                    *(function, kernel.grid, kernel.block, kernel.kernarg),
                    dynamic_lds=kernel.dynamic_lds,
                )
            except EmulatorError as error:
                raise RerunError(str(error)) from error
            finally:
                emulator.set_allowed_memory(None)
                emulator.unload_module(module)

    def findings(self) -> list[Finding]:
        """Those of the sanitizer."""
        return take_findings(self._emulator.library) if self._sanitizes else []


class GpuMachine:
    """A GPU, through the HIP runtime that torch uses.

    A kernel that touches what it must not can end the process there, and harm others' memory.
    """

    def __init__(self, device: torch.device, library: ctypes.CDLL | None = None) -> None:
        """``library`` has HIP's functions; None: that of torch. Raises ``HipError`` without one."""
        self.name = str(device)
        self._device = device
        self._library = loaded_runtime().library if library is None else library

    def room(self, size: int, address: int) -> Tensor:
        """On the GPU."""
        room = torch.empty(size + _ALIGNMENT + _GAP, dtype=torch.uint8, device=self._device)
        return _aligned(room, size, address)

    def run(self, kernel: RecordedKernel, image: bytes, memory: Sequence[tuple[int, int]]) -> None:
        """As `Machine.run`; nobody looks at what it touches."""
        pointer, u32 = ctypes.c_void_p, ctypes.c_uint
        module, function = pointer(), pointer()
        self._call("hipSetDevice", ctypes.c_int(self._device.index or 0))
        self._call("hipModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
        try:
            symbol = ctypes.c_char_p(kernel.symbol.encode())
            self._call("hipModuleGetFunction", ctypes.byref(function), module, symbol)
            block = ctypes.create_string_buffer(kernel.kernarg, len(kernel.kernarg))
            size = ctypes.c_size_t(len(kernel.kernarg))
            extra = (pointer * 5)(
                *(_LAUNCH_BUFFER, ctypes.addressof(block)),
                *(_LAUNCH_SIZE, ctypes.addressof(size), _LAUNCH_END),
            )
            extents = (u32(each) for each in (*kernel.grid, *kernel.block, kernel.dynamic_lds))
            nothing = pointer()
            self._call("hipModuleLaunchKernel", function, *extents, nothing, nothing, extra)
            self._call("hipDeviceSynchronize")
        finally:
            self._library.hipModuleUnload(module)

    def findings(self) -> list[Finding]:
        """A GPU has no sanitizer."""
        return []

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RerunError(f"{name} failed with HIP's error {status}")


def machine_named(device: str, record: Record) -> GpuMachine:
    """The GPU that torch calls ``device``.

    Raises:
        ValueError: it is none, or of another architecture than the record.
        HipError: there is no HIP runtime.
    """
    try:
        found = torch.device(device)
        arch = torch.cuda.get_device_properties(found).gcnArchName.split(":")[0]
    except (RuntimeError, AssertionError, AttributeError, ValueError) as error:
        raise ValueError(f"device {device!r} is no GPU that torch can use: {error}") from error
    if arch != record.arch:
        raise ValueError(f"device {device!r} is {arch}, and the launch was recorded for "
                         f"{record.arch}")  # fmt: skip
    return GpuMachine(found)


def _aligned(room: Tensor, size: int, address: int) -> Tensor:
    first = (address - room.data_ptr()) % _ALIGNMENT
    return room[first : first + size]
