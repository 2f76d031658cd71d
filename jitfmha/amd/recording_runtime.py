"""The runtime that stands between a target and its own, and keeps what is launched.

The environment is read when a target is made, and this is loaded where JITFMHA_RECORD is set.
"""

from __future__ import annotations

import ctypes
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..jit.shared_struct import UINT32, UINT64, Array, Pointer, SharedStruct
from ..problem.memory import extent
from .runtime import Runtime

DATA = "JITFMHA_RECORD_DATA"
MOST_BYTES = 1 << 30
"""Of tensors, that a process writes; later launches are recorded without."""

_TEMPLATE = "amd/launch_recorder.cpp.in"
_RECORDED_LAUNCH = SharedStruct(
    "RecordedLaunch",
    {
        "symbol": Pointer("const char"),
        "image": Pointer("const void"),
        "image_bytes": UINT64,
        "kernarg": Pointer("const void"),
        "kernarg_bytes": UINT64,
        "grid": Array(UINT32, 3),
        "block": Array(UINT32, 3),
        "dynamic_lds": UINT32,
    },
)
_written_bytes = 0


class Started(NamedTuple):
    """A kernel that was started, as the library kept it."""

    symbol: str
    image: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_lds: int
    kernarg: bytes


class Scope:
    """What is seen while one call's launch runs: kernels, and tensors before each."""

    def __init__(self) -> None:
        self.kernels: list[Started] = []
        self.touched: list[Tensor] = []
        self.before: list[bytes | None] = []  # None: too many


recorded_scope: ContextVar[Scope | None] = ContextVar("jitfmha_recorded_launch", default=None)


def recorder_spec(library_path: str) -> jit.BuildSpec:
    """The source and the flags of the library before a runtime's."""
    values = {
        "origin": f"Rendered from csrc_templates/{_TEMPLATE}.",
        "shared_structs": _RECORDED_LAUNCH.cpp(),
        "runtime": json.dumps(library_path),
    }
    return jit.BuildSpec(
        name="amd_launch_recorder",
        sources={"launch_recorder.cpp": jit.render(_TEMPLATE, values)},
        cflags=("-std=c++17", "-O2", "-fvisibility=hidden"),
        ldflags=("-ldl",),
        why="JITFMHA_RECORD asks for launches",
    )


class RecordingRuntime:
    """A runtime whose launches are kept, where a :class:`RecordedLaunch` asks for them.

    Everything goes on to ``recorded``. Launches are written into ``folder``, with the bytes of
    tensors, or their shapes and hashes only.
    """

    def __init__(self, recorded: Runtime, folder: Path, *, keeps_data: bool = True) -> None:
        self.recorded = recorded
        self.folder = folder
        self.keeps_data = keeps_data
        self._library: ctypes.CDLL | None = None

    @property
    def library(self) -> ctypes.CDLL:
        """The library before the runtime's, built where needed."""
        if self._library is None:
            library = jit.load(recorder_spec(self.recorded.library_path))
            library.jitfmha_recorder_record.argtypes = [ctypes.c_bool]
            library.jitfmha_recorder_record.restype = None
            library.jitfmha_recorder_count.restype = ctypes.c_uint64
            library.jitfmha_recorder_launch.argtypes = [ctypes.c_uint64, ctypes.c_void_p]
            library.jitfmha_recorder_launch.restype = None
            self._library = library
        return self._library

    @property
    def library_path(self) -> str:
        return self.library._name

    @property
    def has_host_memory(self) -> bool:
        return self.recorded.has_host_memory

    def describe_device(self, device_index: int) -> str:
        return f"{self.recorded.describe_device(device_index)}, recorded"

    @property
    def driver(self) -> str | None:
        return self.recorded.driver

    @property
    def current_stream(self) -> Callable[[int], int]:
        return self.recorded.current_stream

    def scale_of_one(self, device_index: int) -> Tensor:
        return self.recorded.scale_of_one(device_index)

    @contextmanager
    def launching(self, tensors: Iterable[Tensor | None]) -> Iterator[None]:
        """Around a launch: what it may touch is looked at before, what it starts is kept."""
        touched = [x for x in tensors if x is not None and x.numel()]
        scope = recorded_scope.get()
        inner = self.recorded.launching
        if scope is not None:
            for x in touched:
                if not any(x is known for known in scope.touched):
                    scope.touched.append(x)
                    scope.before.append(bytes_of(x) if fits(x) else None)
            self.library.jitfmha_recorder_record(True)
        try:
            with nullcontext() if inner is None else inner(touched):
                yield
        finally:
            if scope is not None:
                scope.kernels += self._started()
                self.library.jitfmha_recorder_record(False)

    def _started(self) -> list[Started]:
        started = []
        for i in range(self.library.jitfmha_recorder_count()):
            row = _RECORDED_LAUNCH.ctype()
            self.library.jitfmha_recorder_launch(i, ctypes.byref(row))
            symbol = ctypes.string_at(row.symbol).decode()
            image = ctypes.string_at(row.image, row.image_bytes) if row.image else b""
            kernarg = ctypes.string_at(row.kernarg, row.kernarg_bytes)
            extents = tuple(row.grid), tuple(row.block)
            started.append(Started(symbol, image, *extents, row.dynamic_lds, kernarg))
        return started


def recording_runtime(runtime: Runtime, folder: str) -> RecordingRuntime:
    """What JITFMHA_RECORD asks for, whose value is ``folder``, and JITFMHA_RECORD_DATA."""
    keeps = os.environ.get(DATA, "1")
    if keeps not in ("0", "1"):
        raise ValueError(f"{DATA} is {keeps!r}; it is 1 (the default) or 0")
    return RecordingRuntime(runtime, Path(folder).absolute(), keeps_data=keeps == "1")


def bytes_of(x: Tensor) -> bytes:
    """The bytes from a tensor's first element to the end of its last, from whatever device."""
    size = extent(x)[1] // x.element_size()
    flat = x.detach().as_strided((size,), (1,)).view(torch.uint8).cpu()
    return ctypes.string_at(flat.data_ptr(), flat.numel())


def fits(x: Tensor) -> bool:
    """Whether its bytes are looked at: of rows that are far apart there are too many."""
    return extent(x)[1] <= MOST_BYTES - _written_bytes


def kept(file: str, content: bytes | bytearray, files: dict[str, bytes | bytearray]) -> str | None:
    """The file that the content goes to; None where there is no more room for this process."""
    global _written_bytes
    if _written_bytes + len(content) > MOST_BYTES:
        warn_once(f"JITFMHA_RECORD: {MOST_BYTES} bytes are written; what follows has no tensors")
        return None
    _written_bytes += len(content)
    files[file] = content
    return file


_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Warn with ``text`` once in a process."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"jitfmha: {text}", RuntimeWarning, stacklevel=4)
