"""FLAT, GLOBAL, SCRATCH: every row against its model, apertures, atomics across threads."""

import numpy as np
import pytest
from launches import launch_code
from memory_cases import check, draw, rows
from models import flat as model
from programs import LANES, Array, Segment, run

from jitfmha.emulator import Emulator, EmulatorError
from jitfmha.jit.toolchain.device_compiler import compile_hip


@pytest.mark.parametrize(("segment", "times"), [("FLAT", 3), ("GLOBAL", 3), ("SCRATCH", 8)])
def test_every_row(emulator, arch, seed, segment, times):
    rng = np.random.default_rng(seed)
    check(emulator, arch, [draw(row, rng) for row in rows(emulator, arch, segment) * times])


def test_apertures(emulator, arch):
    code = "s_mov_b64 s[4:5], src_shared_base\ns_mov_b64 s[6:7], src_private_base"
    result = run(emulator, arch, [Segment(code, {}, ["s[4:5]", "s[6:7]"])])[0]
    assert result["s[4:5]"][0] == model.SHARED_APERTURE
    assert result["s[6:7]"][0] == model.PRIVATE_APERTURE


_COUNT = """
  s_movk_i32 s30, 100
loop:
  {instruction}
  s_sub_u32 s30, s30, 1
  s_cmp_lg_u32 s30, 0
  s_cbranch_scc1 loop
  s_waitcnt vmcnt(0)"""


@pytest.mark.parametrize(
    ("instruction", "one", "kind"),
    [
        ("global_atomic_add v[2:3], v4, off", 1, np.uint32),
        ("global_atomic_add_f32 v[2:3], v4, off", 0x3F800000, np.float32),
        ("flat_atomic_inc v[2:3], v5", 0, np.uint32),
        ("global_atomic_pk_add_bf16 v[2:3], v4, off", 0, np.uint32),
    ],
)
def test_atomics_of_many_workgroups(emulator, arch, instruction, one, kind):
    """Nothing is lost when workgroups on several threads meet at one address."""
    waves = 32
    counter = np.zeros(2, kind)
    lanes = waves * LANES
    inputs: dict[str, Array | int] = {
        "v[2:3]": np.full(lanes, counter.ctypes.data, np.uint64),
        "v4": np.full(lanes, one, np.uint32),
        "v5": np.full(lanes, 0xFFFFFFFF, np.uint32),
    }
    emulator.set_options(threads=4)
    try:
        segment = Segment(_COUNT.format(instruction=instruction), inputs)
        run(emulator, arch, [segment], memory=[counter])
    finally:
        emulator.set_options()
    expected = 0 if "bf16" in instruction else 100 * lanes
    assert counter[0] == expected
    assert counter[1] == 0


def _faults(emulator: Emulator, code: str, address: int, message: str) -> None:
    memory = np.zeros(64, np.uint8)
    vaddr = np.full(LANES, memory.ctypes.data, np.uint64)
    vaddr[37] += np.uint64(address)
    with pytest.raises(EmulatorError, match=message):
        run(emulator, "gfx942", [Segment(code, {"v[2:3]": vaddr})], memory=[memory])


def test_a_fault_names_the_lane_and_the_address(emulator):
    name = r"kernel program, at program\+0x[0-9a-f]+: `global_load_dword v1, v\[2:3\], off`"
    where = r", workgroup \(0, 0, 0\), wave 0, lane 37: load of 4 bytes at 0x[0-9a-f]+, which is"
    _faults(emulator, "global_load_dword v1, v[2:3], off", 1 << 40, name + where)


def test_an_unaligned_atomic_faults(emulator):
    code = "global_atomic_add v[2:3], v1, off"
    _faults(emulator, code, 2, "lane 37: atomic operation on an address that is not a multiple")


# ---- Private memory ------------------------------------------------------------------------------

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
