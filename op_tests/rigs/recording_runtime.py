"""A HIP runtime that records what a launcher asks of it and runs nothing."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jitfmha import jit
from jitfmha.amd.chips import chip
from jitfmha.amd.tree import trees_of
from jitfmha.jit.shared_struct import SharedStruct
from jitfmha.planning.target import TARGET_HERE, AmdTarget

_SOURCE = Path(__file__).with_suffix(".cpp")


class Launch(ctypes.Structure):
    """One hipModuleLaunchKernel; ``Launch`` of the C++ source."""

    _fields_ = [
        ("device", ctypes.c_int32),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_lds", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("kernarg_bytes", ctypes.c_uint64),
        ("kernarg", ctypes.c_uint8 * 704),
        ("symbol", ctypes.c_char * 128),
    ]

    def arguments(self, struct: SharedStruct) -> dict[str, Any]:
        """The kernel's arguments by their names."""
        assert self.kernarg_bytes == struct.size
        values = struct.packer.unpack_from(bytes(self.kernarg))
        return dict(zip(struct.leaves, values, strict=True))

    def fields(self, struct: SharedStruct, *names: str) -> list[int]:
        """Some of them."""
        arguments = self.arguments(struct)
        return [arguments[name] for name in names]


_CLOCK = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.POINTER(Launch))


class RecordingRuntime:
    """The runtime's library, and what it recorded since :meth:`reset`."""

    has_host_memory = False
    launching = None
    driver = "made up"

    def __init__(self) -> None:
        spec = jit.BuildSpec(
            name="recording_hip_runtime",
            sources={_SOURCE.name: _SOURCE.read_text(encoding="utf-8")},
            cflags=("-std=c++17", "-O2", "-fvisibility=hidden"),
            why="a launcher is tried without a GPU",
        )
        self.library = jit.load(spec)
        self.library.recorder_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
        self.library.recorder_launch_count.restype = ctypes.c_uint64
        self.library.recorder_unload_count.restype = ctypes.c_uint64
        self.library_path = self.library._name
        self._stream = 0
        self.reset()

    def describe_device(self, device_index: int) -> str:
        """What a message calls the device."""
        return f"device {device_index}, recorded"

    def current_stream(self, device_index: int) -> int:
        """The stream that :meth:`stands_for` was given."""
        return self._stream

    def scale_of_one(self, device_index: int) -> Tensor:
        """A float32 1 of shape (1,); nothing reads it."""
        return torch.ones(1, dtype=torch.float32)

    def target(
        self, chip_name: str, device_index: int = 0, compute_units: int | None = None
    ) -> AmdTarget:
        """A GPU whose launches are recorded, with the trees that the environment names now."""
        found = chip(chip_name)
        units = found.compute_units if compute_units is None else compute_units
        return AmdTarget(found, device_index, units, self, trees_of(found))

    def reset(self, *, keeps_launches: bool = True) -> None:
        """Forget everything: launches, loads, failures, attributes, this thread's last error."""
        self.library.recorder_reset(ctypes.c_bool(keeps_launches))

    def fail(self, function: str, code: int, *, after: int = 0) -> None:
        """Make a HIP function return an error once it has worked ``after`` times more.

        0 makes it work again.
        """
        self.library.recorder_fail(function.encode(), code, after)

    @property
    def last_error(self) -> int:
        """The error that this thread's next hipGetLastError would take."""
        return int(self.library.hipPeekAtLastError())

    @property
    def current_device(self) -> int:
        """This thread's device."""
        device = ctypes.c_int()
        self.library.hipGetDevice(ctypes.byref(device))
        return device.value

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        """Inside, it is this thread's current device."""
        before = self.current_device
        self.library.hipSetDevice(device)
        try:
            yield
        finally:
            self.library.hipSetDevice(before)

    def set_attribute(self, device: int, attribute: int, value: int) -> None:
        """What hipDeviceGetAttribute tells; it fails for what is not set."""
        self.library.recorder_set_attribute(device, attribute, value)

    def set_bus_id(self, device: int, text: str) -> None:
        """What hipDeviceGetPCIBusId tells; it fails for what is not set."""
        self.library.recorder_set_bus_id(device, text.encode())

    def take(self, milliseconds: Callable[[Launch], float]) -> None:
        """What each launch takes from now on, by the events of the runtime."""
        # The library keeps no reference to the function.
        self._clock = _CLOCK(lambda launch: milliseconds(launch.contents))
        self.library.recorder_set_clock(self._clock)

    @property
    def unload_count(self) -> int:
        """Modules that were unloaded."""
        return int(self.library.recorder_unload_count())

    @property
    def launch_count(self) -> int:
        """Launches, whether they were kept or not."""
        return int(self.library.recorder_launch_count())

    def launches(self) -> list[Launch]:
        """The launches in order."""
        count = self.library.recorder_launches(None, 0)
        launches = (Launch * count)()
        self.library.recorder_launches(launches, count)
        return list(launches)

    def loads(self) -> list[int]:
        """The device of each module that was loaded, in order."""
        count = self.library.recorder_loads(None, 0)
        devices = (ctypes.c_int * count)()
        self.library.recorder_loads(devices, count)
        return list(devices)

    @contextmanager
    def stands_for(self, target: AmdTarget, *, stream: int = 0) -> Iterator[None]:
        """Inside, on this thread, CPU tensors are on ``target``, one of :meth:`target`."""
        self._stream = stream
        token = TARGET_HERE.set(target)
        try:
            yield
        finally:
            TARGET_HERE.reset(token)
