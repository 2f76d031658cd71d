"""How long launches take on an AMD GPU, by the events of its HIP runtime."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager

from .runtime import HipError, Runtime


class EventTimer(AbstractContextManager["EventTimer"]):
    """Two events on torch's current stream of a device, which must be the current device."""

    def __init__(self, runtime: Runtime, device_index: int) -> None:
        """Raises ``HipError`` where the runtime makes no events."""
        self._library = ctypes.CDLL(runtime.library_path)
        self._library.hipGetErrorString.restype = ctypes.c_char_p
        self._stream = ctypes.c_void_p(runtime.current_stream(device_index))
        self._events = ctypes.c_void_p(), ctypes.c_void_p()
        for event in self._events:
            self._call("hipEventCreate", ctypes.byref(event))

    def __exit__(self, *_: object) -> None:
        for event in self._events:
            self._library.hipEventDestroy(event)

    def seconds(self, launch: Callable[[], object]) -> float:
        """What the GPU takes for what ``launch`` starts; returns when it has ended.

        Raises ``HipError`` where it does not end well.
        """
        begin, end = self._events
        self._call("hipEventRecord", begin, self._stream)
        launch()
        self._call("hipEventRecord", end, self._stream)
        self._call("hipEventSynchronize", end)
        milliseconds = ctypes.c_float()
        self._call("hipEventElapsedTime", ctypes.byref(milliseconds), begin, end)
        return milliseconds.value / 1e3

    def _call(self, name: str, *arguments: object) -> None:
        code: int = getattr(self._library, name)(*arguments)
        if code != 0:
            text = self._library.hipGetErrorString(code).decode()
            self._library.hipGetLastError()  # torch would report it as its own
            raise HipError(code, f"{name} failed: {text}")
