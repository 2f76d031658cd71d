"""A launch on the emulator: the real launcher, told what the kernel may touch."""

from __future__ import annotations

from torch import Tensor

from .amd.code_object import CodeObject
from .amd.launcher import AmdLaunch, CuSeqlens, Descales
from .amd.manifest import KernelRow, Tree
from .problem import Problem
from .target import AmdTarget


class EmulatedLaunch:
    """A loaded kernel with the constants of one problem, on an emulated GPU."""

    __slots__ = ("_emulation", "_is_fp8", "_launch")

    def __init__(
        self,
        problem: Problem,
        target: AmdTarget,
        tree: Tree,
        row: KernelRow,
        code_object: CodeObject,
    ) -> None:
        assert target.emulation is not None
        self._emulation = target.emulation
        self._is_fp8 = problem.is_fp8
        self._launch = AmdLaunch(
            *(problem, target, tree, row, code_object),
            runtime_path=target.emulation.library_path,
            stream_of=_no_stream,
        )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        cu_seqlens: CuSeqlens | None,
        max_seqlen_q: int | None,
        descales: Descales | None,
    ) -> None:
        """Run the kernel; returns when ``out`` and ``lse`` are written.

        Raises :class:`jitfmha.HipError` where the kernel does what it must not, such as touching
        anything but the tensors of the call.
        """
        scales = self._launch.complete(descales, q.device) if self._is_fp8 else ()
        partial = self._launch.new_partial(q, max_seqlen_q)
        memory = None if partial is None else partial.memory
        with self._emulation.launching(q, k, v, out, lse, *(cu_seqlens or ()), *scales, memory):
            self._launch(q, k, v, out, lse, cu_seqlens, max_seqlen_q, descales, partial)


def _no_stream(_device: int) -> None:
    """The emulator runs a launch to its end."""
