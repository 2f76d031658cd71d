"""The HIP functions themselves: attributes, properties, error names, wrong arguments."""

import ctypes
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from launches import launch

from jitfmha.emulator import DEVICES, Emulator, EmulatorError, Function
from jitfmha.jit.toolchain.device_compiler import compile_hip

_CHIPS = list(DEVICES)
# Enumerators of hipDeviceAttribute_t (ROCm 6).
_MULTIPROCESSOR_COUNT, _WARP_SIZE, _MAX_LDS = 63, 87, 74
_NUMBER_OF_XCCS, _PCI_CHIP_ID = 10018, 10019
_MI308_PCI_IDS = {0x74A2, 0x74A8, 0x74B6, 0x74BC}
_SUCCESS, _INVALID_VALUE, _INVALID_CONFIGURATION, _INVALID_DEVICE = 0, 1, 9, 101
_NOT_FOUND_FILE, _INVALID_HANDLE, _LAUNCH_FAILURE = 301, 400, 719
_PROPERTIES_BYTES = 1472

_KERNEL = """
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(1, 128)))
void tiny(int* out) {
  __shared__ int tile[256];
  tile[__builtin_amdgcn_workitem_id_x()] = 1;
  __builtin_amdgcn_s_barrier();
  out[__builtin_amdgcn_workitem_id_x()] = tile[__builtin_amdgcn_workitem_id_x() ^ 1];
}
"""


@pytest.fixture
def library(emulator: Emulator) -> Iterator[ctypes.CDLL]:
    yield emulator.library
    emulator.library.hipSetDevice(0)


@pytest.fixture
def tiny(emulator: Emulator, arch: str, device: int) -> Function:
    return emulator.function(emulator.load_module(compile_hip(_KERNEL, arch), device), "tiny")


# ---- Devices -------------------------------------------------------------------------------------


def _attribute(library: ctypes.CDLL, attribute: int, device: int) -> int:
    value = ctypes.c_int()
    assert library.hipDeviceGetAttribute(ctypes.byref(value), attribute, device) == _SUCCESS
    return value.value


@pytest.mark.parametrize(
    ("chip", "units", "xcds", "lds", "is_mi308"),
    [
        ("gfx942", 304, 8, 64 * 1024, False),
        ("gfx942-mi308", 80, 4, 64 * 1024, True),
        ("gfx950", 256, 8, 160 * 1024, False),
    ],
)
def test_attributes_tell_the_chips_apart(library, chip, units, xcds, lds, is_mi308):
    device = DEVICES[chip]
    assert _attribute(library, _MULTIPROCESSOR_COUNT, device) == units
    assert _attribute(library, _NUMBER_OF_XCCS, device) == xcds
    assert _attribute(library, _MAX_LDS, device) == lds
    assert _attribute(library, _WARP_SIZE, device) == 64
    assert (_attribute(library, _PCI_CHIP_ID, device) in _MI308_PCI_IDS) == is_mi308


@pytest.mark.parametrize("chip", _CHIPS)
def test_properties_agree_with_attributes(library, chip):
    properties = ctypes.create_string_buffer(_PROPERTIES_BYTES)
    assert library.hipGetDevicePropertiesR0600(properties, DEVICES[chip]) == _SUCCESS
    raw = properties.raw
    assert raw[1160:].split(b"\0")[0].split(b":")[0].decode() == chip.partition("-")[0]
    assert raw[:256].startswith(b"AMD Instinct MI3")
    (units,) = struct.unpack_from("<i", raw, 388)
    assert units == _attribute(library, _MULTIPROCESSOR_COUNT, DEVICES[chip])
    (warp,) = struct.unpack_from("<i", raw, 308)
    assert warp == 64


def test_device_count_and_current_device(library):
    count, device = ctypes.c_int(), ctypes.c_int()
    assert library.hipGetDeviceCount(ctypes.byref(count)) == _SUCCESS
    assert count.value == len(DEVICES)
    for index in range(count.value):
        assert library.hipSetDevice(index) == _SUCCESS
        assert library.hipGetDevice(ctypes.byref(device)) == _SUCCESS
        assert device.value == index
    for wrong in (-1, count.value, 99):
        assert library.hipSetDevice(wrong) == _INVALID_DEVICE
    assert device.value == count.value - 1


def test_names(library):
    handle, name = ctypes.c_int(), ctypes.create_string_buffer(64)
    assert library.hipInit(0) == _SUCCESS
    assert library.hipDeviceGet(ctypes.byref(handle), 1) == _SUCCESS
    assert library.hipDeviceGetName(name, len(name), handle) == _SUCCESS
    assert name.value == b"AMD Instinct MI308X"
    assert library.hipDeviceGetName(name, 11, handle) == _SUCCESS
    assert name.value == b"AMD Instin"
    assert library.hipDeviceGet(ctypes.byref(handle), 3) == _INVALID_DEVICE
    assert library.hipDeviceGetName(None, 11, handle) == _INVALID_VALUE


def test_unknown_attributes_and_devices(emulator, library):
    value = ctypes.byref(ctypes.c_int())
    assert library.hipDeviceGetAttribute(value, 9999, 0) == _INVALID_VALUE
    assert "device attribute 9999 is not emulated" in emulator.last_error()
    assert library.hipDeviceGetAttribute(value, _WARP_SIZE, 3) == _INVALID_DEVICE
    assert "there is no device 3" in emulator.last_error()


# ---- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "name", "text"),
    [
        (0, "hipSuccess", "no error"),
        (1, "hipErrorInvalidValue", "invalid argument"),
        (200, "hipErrorInvalidImage", "device kernel image is invalid"),
        (209, "hipErrorNoBinaryForGpu", "no kernel image is available"),
        (719, "hipErrorLaunchFailure", "unspecified launch failure"),
        (123456, "hipErrorUnknown", "unknown error"),
    ],
)
def test_error_names(library, code, name, text):
    library.hipGetErrorString.restype = ctypes.c_char_p
    assert library.hipGetErrorName(code).decode() == name
    assert text in library.hipGetErrorString(code).decode()


def test_the_error_string_has_the_details(emulator, library, tiny):
    """Launchers that know nothing but HIP still say what went wrong, and where."""
    library.hipGetErrorString.restype = ctypes.c_char_p
    with pytest.raises(EmulatorError):
        launch(emulator, tiny, 1, 64, 4096, 0)
    text = library.hipGetErrorString(_LAUNCH_FAILURE).decode()
    assert text.startswith("unspecified launch failure: kernel tiny, at tiny+0x")
    assert "wave 0, lane 0: store of 4 bytes at 0x1000" in text
    # Only for that code, and only where it happened.
    assert library.hipGetErrorString(_INVALID_VALUE) == b"invalid argument"
    with ThreadPoolExecutor() as pool:
        elsewhere = pool.submit(library.hipGetErrorString, _LAUNCH_FAILURE).result()
    assert elsewhere == b"unspecified launch failure"


def test_the_last_error_is_kept_until_it_is_taken(library):
    library.hipGetLastError()
    library.hipSetDevice(99)
    assert library.hipPeekAtLastError() == _INVALID_DEVICE
    assert library.hipGetLastError() == _INVALID_DEVICE
    assert library.hipGetLastError() == _SUCCESS


def test_null_pointers(library):
    handle = ctypes.c_void_p()
    for result in (
        library.hipGetDeviceCount(None),
        library.hipGetDevice(None),
        library.hipDeviceGetAttribute(None, _WARP_SIZE, 0),
        library.hipGetDevicePropertiesR0600(None, 0),
        library.hipModuleLoadData(None, b""),
        library.hipModuleLoadData(ctypes.byref(handle), None),
        library.hipModuleLoad(ctypes.byref(handle), None),
        library.hipStreamCreate(None),
        library.hipMalloc(None, 16),
    ):
        assert result == _INVALID_VALUE


def test_missing_file(emulator, library):
    handle = ctypes.c_void_p()
    assert library.hipModuleLoad(ctypes.byref(handle), b"/nowhere/kernel.co") == _NOT_FOUND_FILE
    assert "/nowhere/kernel.co" in emulator.last_error()


# ---- Launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "block", "dynamic_lds", "words", "name"),
    [
        ((0, 1, 1), (64, 1, 1), 0, "dimension is 0", "hipErrorInvalidConfiguration"),
        ((1, 1, 1), (64, 0, 1), 0, "dimension is 0", "hipErrorInvalidConfiguration"),
        ((1 << 26, 1, 1), (64, 1, 1), 0, "67108864 workgroups", "hipErrorInvalidConfiguration"),
        ((1, 1, 1), (256, 1, 1), 0, "256 threads; .* at most 128", "hipErrorInvalidConfiguration"),
        ((1, 1, 1), (1024, 2, 1), 0, "2048 threads", "hipErrorInvalidConfiguration"),
        ((1, 1, 1), (64, 1, 1), 1 << 20, "bytes of LDS", "hipErrorLaunchOutOfResources"),
    ],
)
def test_wrong_launches(emulator, tiny, grid, block, dynamic_lds, words, name):
    with pytest.raises(EmulatorError, match=f"kernel tiny.*{words}") as caught:
        emulator.launch(tiny, grid, block, bytes(8), dynamic_lds=dynamic_lds)
    assert caught.value.name == name


def test_a_kernel_of_another_chip(emulator, library, tiny):
    other = 2 if tiny.device == 0 else 0
    with pytest.raises(EmulatorError, match="another chip") as caught:
        emulator.launch(Function(tiny.handle, other, "tiny"), (1, 1, 1), (64, 1, 1), bytes(8))
    assert caught.value.name == "hipErrorNoBinaryForGpu"


def test_a_kernel_of_another_device(emulator):
    function = emulator.function(
        emulator.load_module(compile_hip(_KERNEL, "gfx942"), DEVICES["gfx942"]), "tiny"
    )
    elsewhere = Function(function.handle, DEVICES["gfx942-mi308"], "tiny")
    with pytest.raises(EmulatorError, match=r"loaded for device 0, .* current device is 1"):
        emulator.launch(elsewhere, (1, 1, 1), (64, 1, 1), bytes(8))


def test_what_is_no_list_of_parameters_and_no_function(library, tiny):
    library.hipSetDevice(tiny.device)
    extra = (ctypes.c_void_p * 3)(77, 0, 3)
    launch = library.hipModuleLaunchKernel
    assert launch(tiny.handle, 1, 1, 1, 64, 1, 1, 0, None, None, extra) == _INVALID_VALUE
    assert launch(1234, 1, 1, 1, 64, 1, 1, 0, None, None, None) == _INVALID_HANDLE


def test_function_attributes(library, tiny):
    value = ctypes.c_int()
    handle = ctypes.c_void_p(tiny.handle)
    for attribute, expected in ((0, 128), (1, 1024)):  # threads of a block, LDS
        assert library.hipFuncGetAttribute(ctypes.byref(value), attribute, handle) == _SUCCESS
        assert value.value == expected
    assert library.hipFuncGetAttribute(ctypes.byref(value), 77, handle) == _INVALID_VALUE
    assert library.hipFuncGetAttribute(None, 0, handle) == _INVALID_VALUE
    wrong = ctypes.c_void_p(16)
    assert library.hipFuncGetAttribute(ctypes.byref(value), 0, wrong) == _INVALID_HANDLE


# ---- Memory and streams --------------------------------------------------------------------------


def test_memory(emulator, library, tiny):
    """Blocks of hipMalloc are open to every launch until they are freed."""
    library.hipMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.hipFree.argtypes = [ctypes.c_void_p]
    block = ctypes.c_void_p()
    assert library.hipMalloc(ctypes.byref(block), ctypes.c_size_t(256)) == _SUCCESS
    emulator.set_allowed_memory([])
    try:
        emulator.launch(tiny, (1, 1, 1), (64, 1, 1), struct.pack("<Q", block.value or 0))
        copy = np.zeros(64, np.int32)
        assert library.hipMemcpy(copy.ctypes.data, block, 256, 2) == _SUCCESS
        np.testing.assert_array_equal(copy, 1)
        assert library.hipFree(block) == _SUCCESS
        assert library.hipFree(block) == _INVALID_VALUE
        with pytest.raises(EmulatorError, match="outside of all memory"):
            emulator.launch(tiny, (1, 1, 1), (64, 1, 1), struct.pack("<Q", block.value or 0))
    finally:
        emulator.set_allowed_memory(None)


def test_streams(library):
    stream, status = ctypes.c_void_p(), ctypes.c_int(7)
    assert library.hipStreamCreate(ctypes.byref(stream)) == _SUCCESS
    assert library.hipStreamSynchronize(stream) == _SUCCESS
    assert library.hipStreamIsCapturing(stream, ctypes.byref(status)) == _SUCCESS
    assert status.value == 0
    assert library.hipStreamDestroy(stream) == _SUCCESS
