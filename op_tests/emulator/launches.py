"""Launches of small kernels, compiled or in assembly, on arrays of NumPy."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitfmha.emulator import DEVICES, Emulator, Function
from jitfmha.jit.toolchain.device_compiler import assemble

Array = NDArray[Any]

_HEADER = """
.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
.amdhsa_code_object_version 5
"""
_KERNEL = """
.text
.globl {name}
.p2align 8
.type {name},@function
{name}:
{body}
  s_endpgm
.fill 8, 4, 0xbf800000
.L{name}_end:
.size {name}, .L{name}_end - {name}
.rodata
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_group_segment_fixed_size {lds_bytes}
  .amdhsa_private_segment_fixed_size {scratch_bytes}
  .amdhsa_enable_private_segment {has_scratch}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_user_sgpr_count 2
  .amdhsa_kernarg_size 16
  .amdhsa_next_free_vgpr {vgprs}
  .amdhsa_accum_offset {arch_vgprs}
  .amdhsa_next_free_sgpr 96
  .amdhsa_float_denorm_mode_32 3
.end_amdhsa_kernel
"""


def kernel_text(
    name: str, body: str, *, lds_bytes: int = 0, scratch_bytes: int = 0, vgprs: int = 512
) -> str:
    """A kernel with the address of its arguments in s[0:1], its workgroup's x in s2; it ends."""
    return _KERNEL.format(
        name=name,
        body=body,
        lds_bytes=lds_bytes,
        scratch_bytes=scratch_bytes,
        has_scratch=int(scratch_bytes > 0),
        vgprs=vgprs,
        arch_vgprs=vgprs // 2,
    )


def assembled(arch: str, *texts: str) -> bytes:
    """The code object of kernels, and of whatever else there is to assemble."""
    return assemble("".join([_HEADER.format(arch=arch), *texts]), arch)


def launch(
    emulator: Emulator,
    function: Function,
    grid: int | tuple[int, int],
    block: int,
    *arguments: Array | float,
    memory: Sequence[Array] = (),
    dynamic_lds: int = 0,
) -> None:
    """Arrays are pointers and, with `memory`, all that may be touched; numbers have 32 bits."""
    kernarg = b""
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            kernarg += struct.pack("<Q", argument.ctypes.data)
        else:
            kernarg += struct.pack("<i" if isinstance(argument, int) else "<f", argument)
    arrays = [x for x in (*arguments, *memory) if isinstance(x, np.ndarray) and x.nbytes]
    x, y = (grid, 1) if isinstance(grid, int) else grid
    emulator.set_allowed_memory([(array.ctypes.data, array.nbytes) for array in arrays])
    try:
        emulator.launch(function, (x, y, 1), (block, 1, 1), kernarg, dynamic_lds=dynamic_lds)
    finally:
        emulator.set_allowed_memory(None)


def launch_code(
    emulator: Emulator,
    device: int | str,
    code_object: bytes,
    name: str,
    grid: int | tuple[int, int],
    block: int,
    *arguments: Array | float,
    memory: Sequence[Array] = (),
) -> None:
    """`launch` of a kernel whose code object is loaded for it alone."""
    index = DEVICES[device] if isinstance(device, str) else device
    with emulator.loaded(code_object, index, name) as function:
        launch(emulator, function, grid, block, *arguments, memory=memory)
