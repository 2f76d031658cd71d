"""SCRATCH instructions and private memory: every row against its model, and compiled kernels."""

from __future__ import annotations

import numpy as np
import pytest
from launches import launch_code
from memory_cases import check, draw, rows
from programs import LANES, Segment, run

from jitfmha.emulator import EmulatorError
from jitfmha.jit.toolchain.device_compiler import compile_hip

_KERNEL = """
extern "C" __global__ void shuffle(const int* order, int* out) {
  // An array with dynamic indices lives in scratch, and a pointer that may be either becomes flat.
  int own[16];
  __shared__ int shared[256 * 16];
  const int thread = __builtin_amdgcn_workitem_id_x();
  const int global = __builtin_amdgcn_workgroup_id_x() * 256 + thread;
  for (int i = 0; i < 16; ++i) {
    own[order[i]] = global * 100 + i;
    shared[thread * 16 + order[15 - i]] = -(global * 100 + i);
  }
  const int* volatile where = order[0] & (thread & 1) ? own : shared + thread * 16;
  for (int i = 0; i < 16; ++i) out[global * 16 + i] = own[order[order[i]]] + where[i];
}
"""


def test_every_row(emulator, arch, seed):
    rng = np.random.default_rng(seed)
    check(emulator, arch, [draw(row, rng) for row in rows(emulator, arch, "SCRATCH") * 8])


def test_private_arrays_and_generic_pointers(emulator, arch, device):
    code = compile_hip(_KERNEL, arch, flags=["-O1"])
    order = np.array([3, 0, 9, 15, 6, 1, 12, 7, 2, 14, 5, 8, 11, 4, 13, 10], np.int32)
    workgroups = 3
    out = np.zeros((workgroups * 256, 16), np.int32)
    launch_code(emulator, device, code, "shuffle", workgroups, 256, order, out)
    thread = np.arange(workgroups * 256)[:, None]
    own = np.zeros_like(out)
    shared = np.zeros_like(out)
    own[:, order] = thread * 100 + np.arange(16)
    shared[:, order[::-1]] = -(thread * 100 + np.arange(16))
    where = np.where(thread & 1, own, shared)
    np.testing.assert_array_equal(out, own[:, order[order]] + where)


def test_beyond_the_private_memory(emulator):
    offset = np.zeros(LANES, np.uint32)
    offset[5] = 64
    message = r"`scratch_load_dword v1, v2, off.*lane 5: load of 4 bytes at offset 0x40 of private"
    segment = Segment("scratch_load_dword v1, v2, off", {"v2": offset})
    with pytest.raises(EmulatorError, match=message):
        run(emulator, "gfx942", [segment], scratch_bytes=64)
