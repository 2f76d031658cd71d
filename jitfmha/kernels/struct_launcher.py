"""The launcher of kernels that take one packed struct by value: of rows, heads and products."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from torch import Tensor

from .. import jit
from ..planning.target import AmdTarget
from .launcher import Launcher, typed_library


@cache
def struct_launcher_spec() -> jit.BuildSpec:
    """The source and the flags of the launcher, which is the same for all kernels."""
    template = "amd/launcher/one_struct.cpp.in"
    origin = {"origin": f"Rendered from csrc_templates/{template}."}
    return jit.BuildSpec(
        name="amd_one_struct",
        sources={
            "one_struct.cpp": jit.render(template, origin),
            "runtime.h": jit.render("amd/launcher/runtime.h", {}),
        },
        cflags=("-std=c++17", "-O2", "-fvisibility=hidden"),
        ldflags=("-ldl",),
        why="the first call of rows, heads or products on an AMD GPU",
    )


class StructLauncher(Launcher):
    """Launches kernels on a target, and what adds up the parts that they leave."""

    def __init__(self, target: AmdTarget) -> None:
        self._target = target
        self._library = typed_library(struct_launcher_spec())
        self.entry = self._library.jitfmha_start
        counts, bytes_of_call = (ctypes.c_int64,) * 3, (ctypes.c_char_p, ctypes.c_size_t)
        self.entry.argtypes = [ctypes.c_void_p, *counts, ctypes.c_void_p, *bytes_of_call]
        self.launching = target.runtime.launching

    def start(
        self,
        kernel: int,
        counts: tuple[int, int, int],
        packed: bytes,
        tensors: Sequence[Tensor | None],
    ) -> None:
        """Start the kernel on the current stream, with ``counts`` as one_struct.cpp.in has them.

        Raises ``jitfmha.HipError`` where the HIP runtime refuses it.
        """
        target = self._target
        stream = target.runtime.current_stream(target.device_index)
        given = kernel, *counts, stream, packed, len(packed)
        if self.launching is None:
            status = self.entry(*given)
        else:
            with self.launching(tensors):
                status = self.entry(*given)
        if status:
            raise self.error(status)
