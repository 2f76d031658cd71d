"""Which HIP runtime is bound where there are several, and what is asked of it besides launches."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rigs.recording_runtime import RecordingRuntime
from subprocesses import run_forked

from jitfmha.amd import runtime as hip_runtime
from jitfmha.amd.runtime import HipError, HipRuntime
from jitfmha.jit.toolchain.host_cpp import find_host_cpp

# ---- Several runtimes ----------------------------------------------------------------------------

RUNTIME = """
extern "C" int hipGetDevice(int* device) { return *device = 0; }
"""
C10_HIP = """
extern "C" int hipGetDevice(int*);
extern "C" int current_device_of_c10() { int device; return hipGetDevice(&device); }
"""
# Loads what it is told to, pretends that torch lies elsewhere, and prints what is bound.
PROGRAM = """
import ctypes, json, sys
import torch
from jitfmha.amd import runtime
libraries, torch.__file__ = json.loads(sys.argv[1]), sys.argv[2]
sys.path.insert(0, sys.argv[3])
for library in libraries:
    ctypes.CDLL(library)
try:
    bound = runtime.loaded_runtime()
    print(json.dumps([bound.library_path, bound.library.hipGetDevice(bytes(4)), bound.why]))
except runtime.HipError as error:
    print(json.dumps(str(error)))
"""


class Machine:
    """A folder with libraries that a process can load."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.torch = root / "site-packages" / "torch"
        self.torch_lib = self.torch / "lib"

    def runtime(self, path: str) -> str:
        """A HIP runtime; two with one name have one soname, as two copies of one version do."""
        return self._library(path, RUNTIME, f"-Wl,-soname,{Path(path).name}")

    def c10_hip(self, runtime: str) -> str:
        """What torch calls HIP from, linked against a runtime by its path."""
        file = Path(runtime)
        flags = (f"-L{file.parent}", f"-l:{file.name}", f"-Wl,-rpath,{file.parent}")
        name = "site-packages/torch/lib/libc10_hip.so"
        return self._library(name, C10_HIP, "-Wl,-soname,libc10_hip.so", *flags)

    def _library(self, name: str, source: str, *flags: str) -> str:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [*find_host_cpp().command, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
        subprocess.run([*command, "-x", "none", *flags], input=source, text=True, check=True)
        return str(path)

    def bound(self, *loaded: str, **environment: str) -> Any:
        """The path that is bound once these libraries are loaded in turn, and why; or an error."""
        site_packages = str(self.root / "site-packages")
        arguments = (json.dumps(loaded), str(self.torch / "__init__.py"), site_packages)
        nowhere = {"ROCM_PATH": str(self.root / "rocm")}
        answer = json.loads(run_forked("-c", PROGRAM, *arguments, **nowhere, **environment).stdout)
        return answer if isinstance(answer, str) else (answer[0], answer[2])


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


TORCH_CALLS_IT = "torch's libc10_hip.so calls it"


@pytest.mark.parametrize("torch_comes_first", [True, False])
@pytest.mark.sample("name", ["libamdhip64.so", "libamdhip64-2f1a3c.so"], 1)
def test_of_two_runtimes_torch_uses_one(machine, torch_comes_first, name):
    """Whichever was loaded first, and under whatever name its wheel has it."""
    of_torch = machine.runtime(f"site-packages/torch/lib/{name}")
    other = machine.runtime("opt/rocm/lib/libamdhip64.so.7")
    c10 = machine.c10_hip(of_torch)
    order = (c10, other) if torch_comes_first else (other, c10)
    assert machine.bound(*order) == (of_torch, TORCH_CALLS_IT)


def test_torch_may_use_what_somebody_else_loaded(machine):
    """Two files with one soname: the linker takes the one that is there, and so must we."""
    of_torch = machine.runtime("site-packages/torch/lib/libamdhip64.so.7")
    other = machine.runtime("opt/rocm/lib/libamdhip64.so.7")
    c10 = machine.c10_hip(of_torch)
    assert machine.bound(other, c10) == (other, TORCH_CALLS_IT)
    assert machine.bound(c10, other) == (of_torch, TORCH_CALLS_IT)


@pytest.mark.parametrize("torch_comes_first", [True, False])
def test_the_layout_of_rocm_sdk_core(machine, torch_comes_first):
    """No unversioned name, and outside of the linker's search path."""
    of_torch = machine.runtime("site-packages/_rocm_sdk_core/lib/libamdhip64.so.7")
    other = machine.runtime("opt/rocm/lib/libamdhip64.so.6")
    c10 = machine.c10_hip(of_torch)
    order = (c10, other) if torch_comes_first else (other, c10)
    assert machine.bound(*order) == (of_torch, TORCH_CALLS_IT)


def test_what_is_taken_where_torch_has_loaded_nothing(machine):
    """From what belongs to torch to what is anywhere, each seen when the one before is gone."""
    beside_torch = machine.runtime("site-packages/torch/lib/libamdhip64-2f1a3c.so")
    (machine.root / "site-packages" / "_rocm_sdk_core").mkdir()
    (machine.root / "site-packages" / "_rocm_sdk_core" / "__init__.py").write_text("")
    in_package = machine.runtime("site-packages/_rocm_sdk_core/lib/libamdhip64.so.7")
    loaded = machine.runtime("some where/libamdhip64.so.9")
    linked = machine.runtime("linker/libamdhip64.so.6")
    of_rocm = machine.runtime("rocm/lib/libamdhip64.so.5")
    machine.c10_hip(machine.runtime("elsewhere/libamdhip64.so.8"))  # which nobody loads
    linker = {"LD_LIBRARY_PATH": str(machine.root / "linker")}
    for path, why in (
        (beside_torch, "it came with torch"),
        (in_package, "it is in the package _rocm_sdk_core"),
        (loaded, "it is loaded in this process"),
    ):
        assert machine.bound(loaded, **linker) == (path, why)
        Path(path).unlink()
    assert machine.bound(**linker) == (linked, "the system's linker finds it")
    assert machine.bound() == (of_rocm, "it is ROCm's")


def test_no_runtime_at_all(machine):
    """A library that only has the name is passed over."""
    no_runtime = machine._library("site-packages/torch/lib/libamdhip64.so", "int nothing;")
    error = machine.bound(no_runtime)
    for part in (
        *("the HIP runtime was not found", "libc10_hip.so (torch has not loaded it)"),
        *(str(machine.torch_lib), f"{no_runtime} has no function hipGetDevice"),
    ):
        assert part in error


# ---- The scale of one ----------------------------------------------------------------------------


class FakeTorchGpu:
    """What torch.cuda does around the scale, in order; some of its streams may be captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, captured: set[int]) -> None:
        self.events: list[object] = []
        self.stream = self.streams = 0
        ones = torch.ones

        def make_ones(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            self.events.append(("fill", self.stream))
            return ones(*shape, dtype=dtype)

        for name, value in {
            "device": self.on_device,
            "Stream": self.new_stream,
            "stream": self.on_stream,
            "is_current_stream_capturing": lambda: self.stream in captured,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "ones", make_ones)
        monkeypatch.setattr(hip_runtime, "_scales_of_one", {})

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        self.events.append(str(device))
        yield

    def new_stream(self, device: torch.device) -> SimpleNamespace:
        self.streams += 1
        wait = partial(self.events.append, ("synchronize", self.streams))
        return SimpleNamespace(number=self.streams, synchronize=wait)

    @contextmanager
    def on_stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.stream = self.stream, stream.number
        yield
        self.stream = before


class FakeLibrary:
    """The recorder's library with a capture mode."""

    def __init__(self, runtime: RecordingRuntime, events: list[object]) -> None:
        self._name = runtime.library._name
        self.hipGetDevice = runtime.library.hipGetDevice
        self.mode, self.events = 0, events

    def hipThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802 - HIP's name
        value = mode._obj
        self.mode, value.value = value.value, self.mode
        self.events.append(("mode", self.mode))
        return 0


@pytest.mark.parametrize("captured", [set(), {0, 1, 2}])
def test_the_scale_is_complete_when_it_is_there(runtime, monkeypatch, captured):
    """On a stream that no graph captures, in the mode in which a wait spoils no capture."""
    gpu = FakeTorchGpu(monkeypatch, captured)
    library: Any = FakeLibrary(runtime, gpu.events)
    bound = HipRuntime(library)
    scale = bound.scale_of_one(3)
    assert scale.tolist() == [1.0]
    stream = max(captured, default=0) + 1
    assert gpu.events == [
        *("cuda:3", ("mode", 2), ("fill", stream), ("synchronize", stream), ("mode", 0))
    ]
    assert bound.scale_of_one(3) is HipRuntime(library).scale_of_one(3) is scale
    assert bound.scale_of_one(1) is not scale


def test_a_runtime_without_capture_modes_serves_too(runtime, monkeypatch):
    gpu = FakeTorchGpu(monkeypatch, set())
    assert HipRuntime(runtime.library).scale_of_one(0).tolist() == [1.0]
    assert gpu.events == ["cuda:0", ("fill", 1), ("synchronize", 1)]


def test_no_stream_is_free(runtime, monkeypatch):
    gpu = FakeTorchGpu(monkeypatch, set(range(100)))
    library: Any = FakeLibrary(runtime, gpu.events)
    with pytest.raises(HipError, match="every stream of device 2 is captured"):
        HipRuntime(library).scale_of_one(2)
    assert gpu.events[-1] == ("mode", 0)
