"""Code objects of all versions: arguments, preloading, and what is wrong with broken ones."""

import ctypes
import struct

import numpy as np
import pytest
from elf import section_headers, sections
from launches import assembled, kernel_text, launch_code

from jitfmha.emulator import Emulator, EmulatorError, Module
from jitfmha.jit.toolchain.device_compiler import compile_hip

_OTHER_CHIP = {"gfx942": "gfx950", "gfx950": "gfx942"}
_VERSIONS = (4, 5, 6)
_FLAGS_OFFSET, _ABI_OFFSET = 48, 8

# Every explicit and hidden argument that a kernel can read, into out.
_ARGUMENTS = """
extern "C" __global__ void arguments(int* out, char c, double d, short s, float4_ v) {
  if (__builtin_amdgcn_workitem_id_x()) return;
  const int group = __builtin_amdgcn_workgroup_id_x() + 3 * __builtin_amdgcn_workgroup_id_y();
  int* const to = out + 16 * group;
  to[0] = c;
  to[1] = (int)(d * 8);
  to[2] = s;
  to[3] = (int)v.w;
  to[4] = __builtin_amdgcn_workgroup_size_x();
  to[5] = __builtin_amdgcn_workgroup_size_y();
  to[6] = __builtin_amdgcn_grid_size_x();
  to[7] = __builtin_amdgcn_workgroup_id_z();
}
"""
_FLOAT4 = "typedef float float4_ __attribute__((ext_vector_type(4)));\n"
_SCALE = """
extern "C" __global__ void scale(const float* in, float* out, float factor, int shift) {
  const int i = __builtin_amdgcn_workitem_id_x();
  out[i] = in[i] * factor + shift;
}
"""


# Where each thread is, into out in the order of workgroups and threads.
_PLACES = """
extern "C" __global__ void places(int* out) {
  const int group = __builtin_amdgcn_workgroup_id_x() +
      3 * (__builtin_amdgcn_workgroup_id_y() + 2 * __builtin_amdgcn_workgroup_id_z());
  const int thread = __builtin_amdgcn_workitem_id_x() +
      16 * (__builtin_amdgcn_workitem_id_y() + 4 * __builtin_amdgcn_workitem_id_z());
  out[128 * group + thread] = 128 * group + thread + 1;
}
"""


def _explicit(out: np.ndarray) -> bytes:
    return struct.pack("<Qb7xdh6x4f", out.ctypes.data, -5, 2.5, -300, 1, 2, 3, 4)


def _expected(blocks_x: int, blocks_y: int, size: tuple[int, int]) -> np.ndarray:
    row = [-5, 20, -300, 4, size[0], size[1], blocks_x * size[0], 0]
    return np.array([row] * (blocks_x * blocks_y), np.int32)


@pytest.mark.parametrize("version", _VERSIONS)
def test_explicit_and_hidden_arguments(emulator, arch, device, version):
    code = compile_hip(_FLOAT4 + _ARGUMENTS, arch, code_object_version=version)
    out = np.zeros((6, 16), np.int32)
    function = emulator.function(emulator.load_module(code, device), "arguments")
    emulator.set_allowed_memory([(out.ctypes.data, out.nbytes)])
    emulator.launch(function, (3, 2, 1), (64, 2, 1), _explicit(out))
    np.testing.assert_array_equal(out[:, :8], _expected(3, 2, (64, 2)))


def test_places_in_three_dimensions(emulator, arch, device):
    out = np.zeros(3 * 2 * 5 * 128, np.int32)
    function = emulator.function(emulator.load_module(compile_hip(_PLACES, arch), device), "places")
    emulator.set_allowed_memory([(out.ctypes.data, out.nbytes)])
    emulator.launch(function, (3, 2, 5), (16, 4, 2), struct.pack("<Q", out.ctypes.data))
    np.testing.assert_array_equal(out, np.arange(out.size) + 1)


def test_arguments_as_pointers(emulator, arch, device):
    """`kernelParams`: one pointer an argument, placed by the metadata."""
    code = compile_hip(_FLOAT4 + _ARGUMENTS, arch)
    out = np.zeros((6, 16), np.int32)
    emulator.set_allowed_memory([(out.ctypes.data, out.nbytes)])
    function = emulator.function(emulator.load_module(code, device), "arguments")
    values = [
        ctypes.c_uint64(out.ctypes.data),
        ctypes.c_char(b"\xfb"),
        ctypes.c_double(2.5),
        ctypes.c_short(-300),
        (ctypes.c_float * 4)(1, 2, 3, 4),
    ]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    launch = emulator.library.hipModuleLaunchKernel
    assert launch(function.handle, 3, 2, 1, 64, 2, 1, 0, None, pointers, None) == 0
    np.testing.assert_array_equal(out[:, :8], _expected(3, 2, (64, 2)))


@pytest.mark.parametrize("dwords", [1, 4, 6, 14])
@pytest.mark.parametrize("version", _VERSIONS)
def test_preloaded_arguments(emulator, arch, device, version, dwords):
    """Arguments in SGPRs when the kernel starts, behind its 256 bytes for older firmware."""
    flags = ["-mllvm", f"-amdgpu-kernarg-preload-count={dwords}"]
    code = compile_hip(_SCALE, arch, code_object_version=version, flags=flags)
    offset, _ = sections(code)[".rodata"]
    assert struct.unpack_from("<H", code, offset + 58)[0] & 127, "nothing is preloaded"
    source, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    launch_code(emulator, device, code, "scale", 1, 64, source, out, 3.0, 7)
    np.testing.assert_array_equal(out, source * 3 + 7)


def test_kernels_of_one_module_are_found_by_name(emulator, arch, device):
    module = emulator.load_module(compile_hip(_FLOAT4 + _SCALE + _ARGUMENTS, arch), device)
    assert emulator.function(module, "scale").name == "scale"
    with pytest.raises(EmulatorError, match=r"no kernel add; .* has:.*scale") as caught:
        emulator.function(module, "add")
    assert caught.value.name == "hipErrorNotFound"


def test_data_of_the_code_object_is_relocated(emulator, arch, device):
    """Constant tables, and a table of addresses that a relocation fills in."""
    source = """
    __device__ int first[4] = {3, 5, 7, 11};
    __device__ int second[4] = {13, 17, 19, 23};
    __device__ int* tables[2] = {second, first};
    extern "C" __global__ void lookup(int* out, int which) {
      const int i = __builtin_amdgcn_workitem_id_x();
      out[i] = tables[which][i & 3] + first[i & 1];
    }
    """
    code = compile_hip(source, arch)
    out = np.zeros(64, np.int32)
    for which, table in enumerate(([13, 17, 19, 23], [3, 5, 7, 11])):
        launch_code(emulator, device, code, "lookup", 1, 64, out, which)
        i = np.arange(64)
        np.testing.assert_array_equal(out, np.array(table)[i & 3] + np.array([3, 5])[i & 1])


# ---- What is refused -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good() -> dict[str, bytes]:
    return {chip: compile_hip(_SCALE, chip) for chip in _OTHER_CHIP}


def _refused(emulator: Emulator, code: bytes, device: int, words: str, name: str) -> None:
    with pytest.raises(EmulatorError, match=words) as caught:
        emulator.load_module(code, device)
    assert caught.value.name == name


def _with(code: bytes, offset: int, content: bytes) -> bytes:
    return code[:offset] + content + code[offset + len(content) :]


def test_code_for_another_chip(emulator, arch, device, good):
    other = _OTHER_CHIP[arch]
    _refused(emulator, good[other], device, f"for {other}, and.*{arch}", "hipErrorNoBinaryForGpu")


def test_code_for_a_chip_that_is_not_emulated(emulator, good):
    gfx90a = _with(good["gfx942"], _FLAGS_OFFSET, b"\x3f")
    _refused(emulator, gfx90a, 0, "neither for gfx942 nor for gfx950", "hipErrorInvalidImage")


@pytest.mark.parametrize(
    ("offset", "content", "words"),
    [
        (0, b"\x7fELG", "not a little-endian 64-bit ELF"),
        (4, b"\x01", "not a little-endian 64-bit ELF"),
        (7, b"\x00", "operating system is not HSA"),
        (_ABI_OFFSET, b"\x01", "version is not 4, 5 or 6"),
        (_ABI_OFFSET, b"\x09", "version is not 4, 5 or 6"),
        (18, b"\x3e\x00", "machine is not AMDGPU"),
        (32, b"\xff" * 8, "truncated"),
        (54, b"\x01\x00", "program headers have an unknown size"),
    ],
)
def test_damaged_header(emulator, good, offset, content, words):
    _refused(emulator, _with(good["gfx942"], offset, content), 0, words, "hipErrorInvalidImage")


def test_a_segment_that_ends_behind_the_file(emulator, good):
    code = good["gfx942"]
    (headers,) = struct.unpack_from("<Q", code, 32)
    for number in range(struct.unpack_from("<H", code, 56)[0]):
        at = headers + 56 * number
        kind, offset = struct.unpack_from("<I4xQ", code, at)
        if kind in (1, 4):  # loaded, or notes
            damaged = _with(code, at + 32, struct.pack("<Q", len(code) - offset + 1))
            words = "a part lies outside of the file"
            _refused(emulator, damaged, 0, words, "hipErrorInvalidImage")


def test_truncated_files(emulator, arch, device, good):
    code = good[arch]
    ends = section_headers(code)[0]
    for length in (*range(0, 128, 9), *range(128, ends, 97), len(code) - 1):
        with pytest.raises(EmulatorError, match=r"not a usable AMDGPU code object|null pointer"):
            emulator.load_module(code[:length], device)


@pytest.mark.parametrize(
    ("field", "form", "change", "words"),
    [
        (16, "<q", lambda value: 1 << 40, "entry of kernel scale lies outside of the code"),
        (56, "<H", lambda value: value | 1 << 10, "waves of 32 lanes"),
    ],
)
def test_damaged_descriptor(emulator, good, field, form, change, words):
    code = good["gfx942"]
    at = sections(code)[".rodata"][0] + field
    damaged = _with(code, at, struct.pack(form, change(*struct.unpack_from(form, code, at))))
    _refused(emulator, damaged, 0, words, "hipErrorInvalidImage")


def test_unknown_instruction_stops_when_it_is_reached(emulator, arch, device):
    code = assembled(arch, kernel_text("unknown", "s_nop 0\n.long 0xffffffff"))
    words = r"kernel unknown, at unknown\+0x4: `.long 0xffffffff`.*unknown instruction"
    with pytest.raises(EmulatorError, match=words):
        launch_code(emulator, device, code, "unknown", 1, 64)


def test_handles_of_an_unloaded_module_are_errors(emulator, arch, device, good):
    module = emulator.load_module(good[arch], device)
    function = emulator.function(module, "scale")
    emulator.unload_module(module)
    for use in (
        lambda: emulator.launch(function, (1, 1, 1), (64, 1, 1), b""),
        lambda: emulator.function(module, "scale"),
        lambda: emulator.unload_module(module),
        lambda: emulator.function(Module(1234, device), "scale"),
    ):
        with pytest.raises(EmulatorError, match="not valid") as caught:
            use()
        assert caught.value.name == "hipErrorInvalidHandle"
