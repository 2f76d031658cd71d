"""A general kernel that is loaded, and its launches."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...amd.code_object import CodeObject
from ...amd.kernel_arguments import MODIFIERS
from ...amd.launcher import TENSORS, AmdLaunch, BoundKernel
from ...arguments import Tensors
from ...mask import Mask
from ...problem import Problem, Sizes
from ...target import AmdTarget
from .traits import GeneralTraits

_ONE_SPLIT = (1, 0)
# A side of a window that no sequence reaches; together with a row's number below 2^31.
_OPEN_SIDE = 1 << 30


class BoundGeneralKernel:
    """A general kernel loaded on a device, for calls that differ in lengths and strides only."""

    def __init__(
        self, problem: Problem, target: AmdTarget, traits: GeneralTraits, code_object: CodeObject
    ) -> None:
        """Build and load the launcher and the kernel, as far as that has not been done.

        Raises:
            HipError: the HIP runtime cannot be used, or refuses the code object.
            jitfmha.BuildError: the launcher does not compile.
        """
        self.kernel = BoundKernel(problem, target, traits.row(), code_object)
        self._window = _packed_window(problem.mask)

    def launch_for(self, sizes: Sizes) -> GeneralLaunch:
        """The launch for these lengths and strides."""
        launch = self.kernel.launch_for(sizes, _ONE_SPLIT, None)
        return GeneralLaunch(launch, self._window)


class GeneralLaunch(NamedTuple):
    """A bound kernel with all that it needs but the tensors' addresses.

    Attributes:
        launch: what a tuned kernel would need.
        window: of the mask, packed.
    """

    launch: AmdLaunch
    window: tuple[int, int, int]

    def __call__(self, tensors: Tensors) -> None:
        """Start the kernel on torch's current stream; ``out`` and ``lse`` are written later.

        Raises:
            HipError: the HIP runtime refuses the launch. On the emulator also where the kernel does
                what it must not, such as touching anything but these tensors.
        """
        kernel, sizes, seqlen_q, *_ = self.launch
        q, k, v, out, lse, cu_seqlens, *_ = tensors
        sums: tuple[Tensor | None, ...] = (None,) * 4
        max_seqlen_q = 0
        if cu_seqlens is not None:
            sums, given = cu_seqlens[:4], cu_seqlens.max_seqlen_q
            # No sequence is longer than all rows together; workgroups without a tile end at once.
            max_seqlen_q = seqlen_q if given is None else min(given, seqlen_q)
        addresses = TENSORS.packer.pack(
            *(_address(x) for x in (q, k, v, out, lse, None, *sums, None, None, None)),
            *(max_seqlen_q, 1),
        )
        modifiers = MODIFIERS.packer.pack(*self.window)
        stream = kernel.current_stream(kernel.device_index)
        entry = kernel.launcher.jitfmha_general_fwd
        if kernel.launching is None:
            status = entry(kernel.call, sizes, addresses, modifiers, stream)
        else:
            with kernel.launching((q, k, v, out, lse, *sums)):
                status = entry(kernel.call, sizes, addresses, modifiers, stream)
        if status != 0:
            raise kernel.error(status)


def _packed_window(mask: Mask) -> tuple[int, int, int]:
    left, right = (
        _OPEN_SIDE if side is None else min(side, _OPEN_SIDE) for side in (mask.left, mask.right)
    )
    return left, right, not mask.top_left


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
