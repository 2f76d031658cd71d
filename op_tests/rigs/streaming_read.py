"""A kernel that reads memory from end to end and does nothing else, timed by the cost model.

What it takes is the yardstick of kernels that memory binds: a launch reaches the rate that HBM
sustains only once its loads are on their way, which a few microseconds of reading notice.
"""

import struct
from functools import cache

import numpy as np
from numpy.typing import NDArray

from jitfmha.amd import chips
from jitfmha.amd.node import VIRTUAL_NODE
from jitfmha.emulator import DEVICES, Emulator
from jitfmha.emulator.profile import profile_launch
from jitfmha.jit.toolchain.device_compiler import compile_hip

from .modelled_call import estimate_of

_THREADS, _LOAD_BYTES = 256, 16
# With as many, more loads on their way are no quicker (the test tries).
_WORKGROUPS_OF_UNIT, _LOADS_AHEAD = 8, 2
_ALIGNMENT = 512
# A workgroup reads a share that lies in one piece, and looks at it, so that it is not left out.
_SOURCE = f"""
constexpr unsigned kThreads = {_THREADS}, kAhead = {_LOADS_AHEAD};
typedef unsigned Numbers __attribute__((ext_vector_type({_LOAD_BYTES // 4})));
typedef __attribute__((address_space(1))) Numbers* Memory;

extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads))) void
read(Memory from, unsigned loads, Memory to) {{
  const unsigned long workgroup = __builtin_amdgcn_workgroup_id_x();
  from += workgroup * loads * kThreads + __builtin_amdgcn_workitem_id_x();
  Numbers ahead[kAhead], all = Numbers(0);
#pragma unroll
  for (unsigned i = 0; i < kAhead; ++i) ahead[i] = from[i * kThreads];
  for (unsigned i = kAhead; i < loads; ++i) {{
    all |= ahead[0];
#pragma unroll
    for (unsigned j = 1; j < kAhead; ++j) ahead[j - 1] = ahead[j];
    ahead[kAhead - 1] = from[i * kThreads];
  }}
#pragma unroll
  for (unsigned i = 0; i < kAhead; ++i) all |= ahead[i];
  if (all.x == 1 && all.y == 2) *to = all;
}}
"""


@cache
def streaming_read_seconds(device: str, size: int) -> float:
    """What a device of the emulator takes to read ``size`` bytes once.

    All workgroups read as much, so that some bytes may be left or too many, a small part of them:
    these are counted at the rate that HBM sustains.
    """
    chip = chips.chip(VIRTUAL_NODE[device])
    assert chip.streaming_gb_s is not None
    workgroups = chip.compute_units * _WORKGROUPS_OF_UNIT
    load_of_all = workgroups * _THREADS * _LOAD_BYTES
    loads = max(round(size / load_of_all), _LOADS_AHEAD)
    read = loads * load_of_all
    # Zeros, which no memory is touched for.
    source, out = np.zeros(read + _ALIGNMENT, np.uint8), np.zeros(_LOAD_BYTES, np.uint8)
    first = source.ctypes.data + -source.ctypes.data % _ALIGNMENT
    kernarg = struct.pack("<QIxxxxQ", first, loads, out.ctypes.data)
    emulator = _emulator()
    code_object = compile_hip(_SOURCE, chip.architecture.name)
    with emulator.loaded(code_object, DEVICES[device], "read") as function:
        launch = profile_launch(
            *(emulator, function, (workgroups, 1, 1), (_THREADS, 1, 1), kernarg),
            memory=[(first, read), _range(out)],
            sample=1,  # all workgroups have the same to do
            run_sample_only=True,
        )
    return estimate_of(launch).seconds + (size - read) / (chip.streaming_gb_s * 1e9)


@cache
def _emulator() -> Emulator:
    return Emulator("profile")


def _range(x: NDArray[np.uint8]) -> tuple[int, int]:
    return x.ctypes.data, x.nbytes
