"""One emulator for all tests of this folder, on the virtual node's chips."""

from collections.abc import Iterator

import pytest

from jitfmha.emulator import DEVICES, Emulator
from jitfmha.jit.toolchain.device_compiler import DeviceCompilerNotFound, device_compiler


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    return Emulator()


@pytest.fixture(scope="session")
def check_emulator() -> Emulator:
    """With the sanitizer."""
    return Emulator("check")


@pytest.fixture(scope="session")
def profiler() -> Emulator:
    """With the cost model."""
    return Emulator("profile")


@pytest.fixture
def default_options(emulator: Emulator) -> Iterator[None]:
    """Puts back what a test sets."""
    with emulator.keep_options():
        yield


@pytest.fixture(params=["gfx942", "gfx950"])
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def device(arch: str) -> int:
    return DEVICES[arch]


@pytest.fixture(scope="session", autouse=True)
def _device_compiler() -> None:
    try:
        device_compiler()
    except DeviceCompilerNotFound as error:
        pytest.skip(str(error))
