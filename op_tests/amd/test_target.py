"""Which chip it is: by the name's first part and the PCI id, for each device once."""

import ctypes
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rigs.recording_runtime import RecordingRuntime

from jitfmha.amd import runtime as hip_runtime
from jitfmha.amd.runtime import HipRuntime
from jitfmha.call.detection import target_of
from jitfmha.emulator import DEVICES, Emulator, emulate
from jitfmha.planning import devices
from jitfmha.planning.target import AmdTarget, CpuTarget, Target, cpu_target

MI308_IDS = (0x74A2, 0x74A8, 0x74B6, 0x74BC)
PCI_CHIP_ID, COMPUTE_UNITS = 10019, 63


@dataclass
class Properties:
    """What torch.cuda.get_device_properties gives, as far as anybody looks."""

    gcnArchName: str  # noqa: N815 - torch's name
    multi_processor_count: int
    name: str


class FakeGpus:
    """GPUs that torch and the runtime tell of."""

    def __init__(self, runtime: RecordingRuntime) -> None:
        self.runtime = runtime
        self.devices: list[Properties] = []
        self.questions: list[int] = []
        self.current = 0

    def add(self, arch: str, units: int, pci_chip_id: int | None, name: str = "") -> torch.device:
        index = len(self.devices)
        self.devices.append(Properties(arch, units, name))
        if pci_chip_id is not None:
            self.runtime.set_attribute(index, PCI_CHIP_ID, pci_chip_id)
        return torch.device("cuda", index)

    def properties(self, index: int) -> Properties:
        self.questions.append(index)
        return self.devices[index]


@pytest.fixture
def gpus(runtime: RecordingRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeGpus:
    fake = FakeGpus(runtime)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", fake.properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake.current)
    monkeypatch.setattr(devices, "loaded_runtime", lambda: HipRuntime(runtime.library))
    monkeypatch.setattr("jitfmha.planning.devices._gpu_targets", {})
    monkeypatch.setattr(hip_runtime, "_PCI_DEVICES", tmp_path)
    devices._warn_of_assumed_chip.cache_clear()
    return fake


def _identity(target: Target) -> tuple[str, str, int, int]:
    assert isinstance(target, AmdTarget)
    return target.arch, target.chip.name, target.device_index, target.compute_units


def chip_of(device: torch.device) -> str:
    return _identity(target_of(device))[1]


def test_several_gpus_each_get_theirs(gpus):
    """And a partition of an MI300X, whose units are those of an MI308X, stays an MI300X."""
    devices = [
        gpus.add("gfx942:sramecc+:xnack-", 304, 0x74A1),
        gpus.add("gfx942:sramecc+:xnack-", 80, MI308_IDS[0]),
        gpus.add("gfx950:sramecc+:xnack-", 256, 0x75A3, "AMD Instinct MI355X"),
        gpus.add("gfx942", 80, 0x74A1),
        gpus.add("gfx942", 228, 0x74A0),
        gpus.add("gfx942:xnack+", 20, MI308_IDS[3]),
    ]
    targets = [target_of(device) for device in devices]
    assert [_identity(target) for target in targets] == [
        ("gfx942", "MI300X", 0, 304),
        ("gfx942", "MI308X", 1, 80),
        ("gfx950", "MI355X", 2, 256),
        ("gfx942", "MI300X", 3, 80),
        ("gfx942", "MI300A", 4, 228),
        ("gfx942", "MI308X", 5, 20),
    ]
    assert str(targets[1]) == "gfx942 MI308X (device 1, 80 compute units)"


@pytest.mark.parametrize("pci_chip_id", MI308_IDS)
def test_every_id_of_the_mi308(gpus, pci_chip_id):
    assert chip_of(gpus.add("gfx942", 80, pci_chip_id)) == "MI308X"


def test_a_device_is_asked_once(gpus):
    first, second = (gpus.add("gfx950", 256, 0x75A3) for _ in range(2))
    for device in (first, second, first, torch.device("cuda"), second):
        target_of(device)
    assert gpus.questions == [0, 1]


def test_a_device_without_an_index_is_the_current_one(gpus):
    gpus.add("gfx950", 256, 0x75A3)
    gpus.add("gfx942", 304, 0x74A1)
    for gpus.current, arch in ((0, "gfx950"), (1, "gfx942")):
        identity = _identity(target_of(torch.device("cuda")))
        assert identity[::2] == (arch, gpus.current)


@pytest.mark.parametrize("arch", ["gfx90a:sramecc+", "gfx1100", "gfx9420", ""])
def test_unsupported_gpus(gpus, arch):
    device = gpus.add(arch, 104, 0x740F)
    with pytest.raises(ValueError, match="cuda:0") as raised:
        target_of(device)
    for part in (arch.partition(":")[0], "gfx942 (MI300A, MI300X", "gfx950 (MI350X, MI355X"):
        assert part in str(raised.value)
    assert "sramecc" not in str(raised.value)


def test_runtimes_that_number_attributes_anew(gpus):
    """From ROCm 7.1 on the old number asks for registers, and the new one for the id."""
    device = gpus.add("gfx942", 80, 512)
    gpus.runtime.set_attribute(0, PCI_CHIP_ID + 1, MI308_IDS[1])
    assert chip_of(device) == "MI308X"


def tell_by_the_bus(gpus: FakeGpus, folder: Path, pci_chip_id: int) -> None:
    """The runtime names device 0 on the bus, and the kernel has its id."""
    gpus.runtime.set_bus_id(0, "0000:C1:00.0")
    (folder / "0000:c1:00.0").mkdir()
    (folder / "0000:c1:00.0" / "device").write_text(f"{pci_chip_id:#06x}\n")


@pytest.mark.parametrize("answer", [None, 512])
def test_the_bus_tells_what_the_attribute_does_not(gpus, tmp_path, answer):
    device = gpus.add("gfx942", 80, answer)
    tell_by_the_bus(gpus, tmp_path, MI308_IDS[2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chip_of(device) == "MI308X"
    assert gpus.runtime.last_error == 0


def test_an_id_that_nobody_listed_is_no_mi308(gpus, tmp_path):
    device = gpus.add("gfx942", 80, None)
    tell_by_the_bus(gpus, tmp_path, 0x74FF)
    assert chip_of(device) == "MI300X"


@pytest.mark.parametrize("on_the_bus", [False, True])
@pytest.mark.parametrize("answer", [None, 512])
def test_without_an_id_it_is_an_mi300_with_one_warning(gpus, answer, on_the_bus):
    """Also where the bus is hidden. No error stays behind in the runtime."""
    devices = [gpus.add("gfx942", units, answer) for units in (304, 80, 304)]
    if on_the_bus:
        gpus.runtime.set_bus_id(0, "0000:C1:00.0")
    with pytest.warns(RuntimeWarning, match="PCI id of a gfx942; it runs .* MI300X") as warned:
        chips = {chip_of(device) for device in devices}
    assert len(warned) == 1
    assert chips == {"MI300X"}
    assert gpus.runtime.last_error == 0


@pytest.mark.parametrize("chip", ["MI350X", "MI355X", "MI350P"])
def test_a_gfx950_is_not_asked_for_its_id(gpus, monkeypatch, chip):
    """It has kernels for all chips, so nothing can fail for want of an answer."""
    monkeypatch.delattr(HipRuntime, "pci_chip_id")
    device = gpus.add("gfx950:sramecc+:xnack-", 256, None, f"AMD Instinct {chip}")
    assert chip_of(device) == chip
    unnamed = gpus.add("gfx950", 128, None, "AMD Radeon Graphics")
    assert chip_of(unnamed) == "MI350X"


def test_other_devices(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(ValueError, match=r"NVIDIA GPU, which is not supported.*gfx942 .*gfx950"):
        target_of(torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"device meta is not supported.*gfx942 .*gfx950"):
        target_of(torch.device("meta"))


# ---- Emulated ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", list(DEVICES))
def test_emulated_targets_are_what_the_emulator_says(chip):
    """explain must not build the emulator to ask it, so the package knows; here both are asked."""
    assert target_of(torch.device("cpu")) == cpu_target()
    with emulate(chip) as run:
        target = target_of(torch.device("cpu"))
        assert target.runtime == run.emulation
        assert isinstance(cpu_target(), CpuTarget)
    assert target_of(torch.device("cpu")) == cpu_target()
    emulator, device = Emulator(), target.device_index
    properties = ctypes.create_string_buffer(1472)
    emulator.library.hipGetDevicePropertiesR0600(properties, device)
    name = properties.raw[1160:].split(b"\0")[0].decode()
    assert name.partition(":")[0] == target.arch
    units, chip_id = ctypes.c_int(), ctypes.c_int()
    for value, attribute in ((units, COMPUTE_UNITS), (chip_id, PCI_CHIP_ID)):
        assert not emulator.library.hipDeviceGetAttribute(ctypes.byref(value), attribute, device)
    assert units.value == target.compute_units
    assert (chip_id.value in MI308_IDS) == (target.chip.name == "MI308X")
    assert (
        str(target)
        == f"{target.arch} {target.chip} (emulated, {target.compute_units} compute units)"
    )


def test_other_threads_are_not_emulated():
    seen = []
    with emulate("gfx950"):
        thread = threading.Thread(target=lambda: seen.append(target_of(torch.device("cpu"))))
        thread.start()
        thread.join()
    assert seen == [cpu_target()]
