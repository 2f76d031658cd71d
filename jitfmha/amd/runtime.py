"""The HIP runtime that launches go to: the one that torch uses, or what stands in for it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..jit.toolchain.hip_libraries import (
    LIBRARY_OF_TORCH,
    NAMES,
    candidates,
    folders_searched,
    runtime_behind,
)
from ..problem.torch_parts import raw_current_stream

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_DRIVER_VERSION = Path("/sys/module/amdgpu/version")
# hipDeviceAttributePciChipId: ROCm 7.1 put another attribute before it, which has its old number
# (aiter pull request 5182). Ids of Instinct chips tell an answer from one to another question.
PCI_CHIP_ID = (10019, 10020)
INSTINCT_IDS = range(0x7400, 0x7600)
_BUS_ID_BYTES = 64
_RELAXED_CAPTURE = 2  # hipStreamCaptureModeRelaxed
_STREAMS_OF_TORCH = 32  # that torch.cuda.Stream gives in turn


class HipError(RuntimeError):
    """A function of the HIP runtime failed.

    ``code`` is HIP's, or negative where the runtime could not be used at all.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


LaunchScope = Callable[[Iterable[Tensor | None]], AbstractContextManager[object]]


class Runtime(Protocol):
    """What a launcher needs of a HIP runtime. A target carries one as a value."""

    @property
    def library_path(self) -> str:
        """The library with the HIP functions, for dlopen; it may be built for that."""
        ...

    @property
    def has_host_memory(self) -> bool:
        """Whether tensors lie in the host's memory, and a launch has ended when it returns."""
        ...

    def describe_device(self, device_index: int) -> str:
        """Return what a message calls the device, such as ``device 0``."""
        ...

    @property
    def driver(self) -> str | None:
        """The version of what drives the GPU, by which measured times are kept.

        None where a launch's time says nothing about a GPU's.
        """
        ...

    @property
    def current_stream(self) -> Callable[[int], int]:
        """Device index -> the stream that torch's own kernels go to; 0 is the default one."""
        ...

    @property
    def launching(self) -> LaunchScope | None:
        """Gives what must be around a launch that may touch these tensors; None: nothing must."""
        ...

    def scale_of_one(self, device_index: int) -> Tensor:
        """A float32 1 of shape (1,) that kernels on the device may read from now on.

        On any stream, without waiting, and as long as the process lives.
        """
        ...


class HipRuntime:
    """A real HIP runtime; ``why`` says why it was taken, and no other."""

    has_host_memory = False
    launching = None

    def __init__(self, library: ctypes.CDLL, why: str = "") -> None:
        """Raises ``OSError`` for a library without HIP's functions."""
        self.library = library
        self.library_path = runtime_behind(library)
        self.why = why
        # As it is, because every launch asks.
        self.current_stream = raw_current_stream

    def describe_device(self, device_index: int) -> str:
        return f"device {device_index}"

    @property
    def driver(self) -> str:
        version = ctypes.c_int()
        self._call("hipDriverGetVersion", ctypes.byref(version))
        try:
            of_kernel = _DRIVER_VERSION.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            of_kernel = "of the kernel"
        return f"HIP {version.value}, amdgpu {of_kernel}"

    def pci_chip_id(self, device: int) -> int | None:
        """The PCI device id of a GPU, which tells chips of one architecture apart.

        None where neither the runtime nor the kernel tells: ROCm 6.2 does not know the question,
        and a container may hide the bus.
        """
        for attribute in PCI_CHIP_ID:
            value = ctypes.c_int()
            code = self._call("hipDeviceGetAttribute", ctypes.byref(value), attribute, device)
            if code == 0 and value.value in INSTINCT_IDS:
                return value.value
        bus_id = ctypes.create_string_buffer(_BUS_ID_BYTES)
        if self._call("hipDeviceGetPCIBusId", bus_id, _BUS_ID_BYTES, device) != 0:
            return None
        try:
            folder = _PCI_DEVICES / bus_id.value.decode("ascii").lower()
            return int((folder / "device").read_text(encoding="ascii"), 16)
        except (OSError, ValueError):
            return None

    def scale_of_one(self, device_index: int) -> Tensor:
        """A float32 1 of shape (1,) that kernels on the device may read from now on.

        On any stream, without waiting, and as long as the process lives.
        """
        if device_index not in _scales_of_one:
            _scales_of_one.setdefault(device_index, self._made_scale_of_one(device_index))
        return _scales_of_one[device_index]

    def _made_scale_of_one(self, device_index: int) -> Tensor:
        # The call may be inside of a graph capture. On the stream that captures, the fill would run
        # with the graph's replays only, and the memory would go with the graph. So a stream that
        # does not capture gets both, and is waited for, which HIP allows in relaxed mode alone: in
        # any other it would spoil the capture.
        device = torch.device("cuda", device_index)
        with torch.cuda.device(device), self._relaxed_capture():
            for _ in range(_STREAMS_OF_TORCH):
                stream = torch.cuda.Stream(device)
                with torch.cuda.stream(stream):
                    if torch.cuda.is_current_stream_capturing():
                        continue
                    one = torch.ones(1, dtype=torch.float32, device=device)
                stream.synchronize()
                return one
        raise HipError(-1, f"every stream of device {device_index} is captured into a graph")

    @contextmanager
    def _relaxed_capture(self) -> Iterator[None]:
        """Inside, this thread may call what other streams' captures would be spoilt by."""
        mode = ctypes.c_int(_RELAXED_CAPTURE)
        exchange = "hipThreadExchangeStreamCaptureMode"  # of `mode` and the thread's
        has_changed = self._call(exchange, ctypes.byref(mode)) == 0
        try:
            yield
        finally:
            if has_changed:
                self._call(exchange, ctypes.byref(mode))

    def _call(self, name: str, *arguments: object) -> int:
        """HIP's code; -1 where the runtime has no such function.

        An error is taken back: torch would find it, and report it as its own.
        """
        function = getattr(self.library, name, None)
        if function is None:
            return -1
        code: int = function(*arguments)
        if code != 0:
            self.library.hipGetLastError()
        return code


# Graphs that were captured may read them whenever they are replayed, so they are never freed.
_scales_of_one: dict[int, Tensor] = {}


def loaded_runtime() -> HipRuntime:
    """The HIP runtime that torch uses, or would load; ``HipError`` says what was tried for it."""
    tried = [f"{LIBRARY_OF_TORCH} (torch has not loaded it)"]
    for path, why, is_loaded in candidates():
        flags = os.RTLD_NOW | (os.RTLD_NOLOAD if is_loaded else 0)
        try:
            return HipRuntime(ctypes.CDLL(path, mode=flags), why)
        except OSError as error:
            tried.append(f"{path} ({error})")
    places = ", ".join(str(folder / NAMES) for folder, _ in folders_searched())
    raise HipError(-1, f"the HIP runtime was not found in {places}; tried {'; '.join(tried)}")
