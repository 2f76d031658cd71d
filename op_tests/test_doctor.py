"""``python -m jitfmha doctor``: each fault is found, with a remedy, and the exit code says so."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from measured_times import times_in

import jitfmha
from jitfmha import jit
from jitfmha.amd import runtime as hip_runtime
from jitfmha.amd.runtime import HipError
from jitfmha.cli import doctor, gpu_report, main
from jitfmha.cli.doctor import Finding
from jitfmha.jit.errors import CompilerNotFound
from jitfmha.jit.toolchain import device_hip, hip_libraries, host_cpp
from jitfmha.planning.target import cpu_target
from jitfmha.problem.float64_reference import Judged
from jitfmha.replay import kernel_trial

Doctor = Callable[[], tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def examine(capfd: pytest.CaptureFixture[str]) -> Doctor:
    """The exit code, and what every check found."""

    def run() -> tuple[int, list[dict[str, Any]]]:
        capfd.readouterr()
        code = main(["doctor", "--json"])
        answer = json.loads(capfd.readouterr().out)
        verdicts = [each["verdict"] for each in answer["checks"]]
        worst = next(x for x in ("failed", "warning", "ok") if x in verdicts)
        assert answer["verdict"] == worst
        assert code == (1 if worst == "failed" else 0)
        assert all(each["found"] for each in answer["checks"])
        # There is something to do exactly where something is amiss.
        assert all(bool(each["remedy"]) == (each["verdict"] != "ok") for each in answer["checks"])
        return code, answer["checks"]

    return run


def only(check: Callable[[], Iterator[Finding]]) -> Finding:
    (finding,) = check()
    return finding


@pytest.fixture
def no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls and code objects are left out: they take the longest."""
    left_out = (doctor._check_runs, doctor._check_code_objects)
    monkeypatch.setattr(doctor, "_CHECKS", [x for x in doctor._CHECKS if x not in left_out])


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A torch for ROCm that sees one GPU, and its driver."""
    monkeypatch.setattr(torch.version, "hip", "7.0.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor, "_DRIVER_DEVICE", tmp_path / "kfd")
    (tmp_path / "kfd").touch()


def test_this_machine(examine, monkeypatch):
    monkeypatch.delenv("JITFMHA_EMULATE", raising=False)
    code, checks = examine()
    assert code == 0
    names = [each["check"] for each in checks]
    found = {each["check"]: each["found"] for each in checks}
    assert found["versions"].startswith(f"jitfmha {jitfmha.__version__}, Python 3.")
    assert f"JITFMHA_CACHE_DIR={jit.cache_dir()}" in found["environment"].splitlines()
    assert found["cache"].startswith(str(jit.cache_dir()))
    assert re.search(r"; \d+ entries have \d", found["cache"])
    assert found["device compiler"] == device_hip.device_hip_in_words()
    for name in (
        *("versions", "environment", "CPU", "host compiler", "device compiler", "torch", "driver"),
        *("GPUs", "HIP runtime", "kernel arguments", "cache", "a call in gm0", "a call in gm1"),
        *("code objects for MI300X", "code objects for MI350X"),
    ):
        assert names.count(name) == 1
    assert all("on cpu (" in each["found"] for each in checks[-2:])


def test_the_emulated_gpu_is_tried_besides_the_cpu(examine, monkeypatch):
    monkeypatch.setenv("JITFMHA_EMULATE", "gfx942-mi308")
    _, checks = examine()
    calls = [each["found"] for each in checks if each["check"].startswith("a call")]
    assert [found.startswith("on cpu (") for found in calls] == [True, True, False, False]
    emulated = "on gfx942 MI308X (emulated, 80 compute units): largest error"
    assert [found.startswith(emulated) for found in calls] == [False, False, True, True]
    assert any(x["check"] == "code objects for MI308X" for x in checks)


def test_text(capfd, monkeypatch):
    findings = [Finding("one", "ok", "fine"), Finding("other", "warning", "a\nb", "Do c.")]
    monkeypatch.setattr(doctor, "_CHECKS", [lambda: iter(findings)])
    assert main(["doctor"]) == 0
    assert capfd.readouterr().out == (
        "ok       one    fine\nwarning  other  a\n                b\n                -> Do c.\n"
    )


@pytest.mark.usefixtures("no_runs")
@pytest.mark.parametrize(
    ("variable", "value", "check", "verdict", "words", "remedy"),
    [
        ("PATH", "/nowhere", "host compiler", "failed", "g++: not found", "apt install g++"),
        ("JITFMHA_CACHE_DIR", "/proc/no", "cache", "warning", "temporary", "JITFMHA_CACHE_DIR"),
        ("JITFMHA_CACHE_LIMIT", "much", "cache", "failed", "'much' is not a size", "variable"),
        ("JITFMHA_EMULATE", "gfx90a", "emulation", "failed", "'gfx90a'", "JITFMHA_EMULATE"),
    ],
)
def test_the_environment(examine, monkeypatch, variable, value, check, verdict, words, remedy):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(host_cpp, "zig_program", lambda: None)
    monkeypatch.setenv(variable, value)
    _, checks = examine()
    (found,) = (each for each in checks if each["check"] == check)
    assert found["verdict"] == verdict
    assert words in found["found"]
    assert remedy in found["remedy"]


def test_what_is_missing_is_said_once(examine, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("JITFMHA_EMULATE", raising=False)
    monkeypatch.setattr(host_cpp, "zig_program", lambda: None)

    def not_built(*_: object) -> NoReturn:
        raise CompilerNotFound(host_cpp._not_found_message(["g++: not found"]))

    # Whatever this process has loaded.
    monkeypatch.setattr(doctor, "_judged_small_call", not_built)
    code, checks = examine()
    assert code == 1
    assert sum("g++: not found" in each["found"] for each in checks) == 1
    failed = [each["check"] for each in checks if each["verdict"] == "failed"]
    assert failed == ["host compiler", "calls"]


@pytest.mark.usefixtures("no_runs")
def test_a_report_of_a_gpu(capfd, monkeypatch, tmp_path):
    """On the CPU in the place of a GPU."""
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "test_one.py").write_text("def test_one():\n    assert 1 + 1 == 2\n")
    shapes = [
        "seqlen=1,seqlen_k=64,heads=2,hdim=32,dtype=fp32",
        "seqlen=8,heads=2,hdim=32,dtype=fp32",
    ]
    small = partial(gpu_report.gathered, shapes=shapes, seconds=0, tests=tmp_path / "gpu")
    monkeypatch.setattr(gpu_report, "gathered", small)
    monkeypatch.setattr(doctor, "_first_gpu", lambda: "cpu")
    file = tmp_path / "report.json"
    with times_in(tmp_path):
        assert main(["doctor", "--gpu-report", str(file)]) == 0
    assert f"wrote {file}" in capfd.readouterr().err
    report = json.loads(file.read_text())
    assert report["format"] == 1
    assert "torch" in {each["check"] for each in report["checks"]}
    assert report["tests"]["exit_code"] == 0
    assert "test_one PASSED" in report["tests"]["output"]
    assert [(x["seqlen_q"], x["seqlen_k"]) for x in report["times"]] == [(1, 64), (8, 8)]
    assert all(x["measured"][0]["microseconds"] > 0 for x in report["times"])


def test_tests_that_take_too_long_are_ended(monkeypatch, tmp_path):
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "test_slow.py").write_text(
        "import time\n\ndef test_slow():\n    time.sleep(600)\n"
    )
    monkeypatch.setattr(gpu_report, "_TEST_SECONDS", 3)
    told = gpu_report.gathered("cpu", shapes=(), tests=tmp_path / "gpu")
    assert told["tests"]["exit_code"] is None
    assert told["tests"]["seconds"] < 300
    told = gpu_report.gathered("cpu", shapes=(), tests=tmp_path / "none")
    assert "tests are in a checkout" in told["tests"]["left_out"]


def test_without_a_gpu_there_is_no_report(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_gpus", list)
    assert main(["doctor", "--gpu-report", str(tmp_path / "report.json")]) == 2
    assert "torch sees no GPU here" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_cuda_build_without_such_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_DRIVER_DEVICE", tmp_path / "kfd")
    found = only(doctor._check_torch)
    assert found.verdict == "warning"
    assert "built for CUDA 13.0; there is no NVIDIA GPU" in found.found
    assert "build for the CPU" in found.remedy


@pytest.mark.parametrize("emulated", ["", "gfx942"])
def test_no_device_compiler(monkeypatch, emulated):
    def none() -> None:
        raise CompilerNotFound("Tried:\n  this\nGet one:\n  hiprtc")

    monkeypatch.setattr(device_hip, "find_device_hip", none)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setenv("JITFMHA_EMULATE", emulated)
    found = only(doctor._check_device_compiler)
    if emulated:
        expected = Finding("device compiler", "warning", "Tried:\n  this", "Get one:\n  hiprtc")
        assert found == expected
    else:
        assert found.verdict == "ok"


@pytest.mark.usefixtures("no_runs")
def test_an_instruction_set_that_is_not_here(examine, monkeypatch):
    monkeypatch.setenv("JITFMHA_CPU_ISA", "sse2")
    monkeypatch.setattr("jitfmha.planning.target.cpu_target", cpu_target.__wrapped__)
    code, checks = examine()
    (found,) = (each for each in checks if each["check"] == "CPU")
    assert (code, found["verdict"]) == (1, "failed")
    assert "'sse2'" in found["found"]
    assert "JITFMHA_CPU_ISA" in found["remedy"]


def test_no_room(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 20))
    found = only(doctor._check_cache)
    assert found.verdict == "warning"
    assert "1.0 MiB free" in found.found


def test_a_cache_that_others_write_to(monkeypatch, tmp_path):
    (tmp_path / "open" / "v1").mkdir(parents=True)
    (tmp_path / "open" / "v1").chmod(0o777)
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path / "open"))
    found = only(doctor._check_cache)
    assert found.verdict == "failed"
    assert "is not safe" in found.found


def test_a_tree_with_faults(monkeypatch, tmp_path):
    """Files are read, not only listed."""
    from jitfmha.jit.resources import hsa_dir

    shipped = hsa_dir() / "gfx950" / "fmha_v3_fwd"
    folder = tmp_path / "gfx950" / "fmha_v3_fwd"
    folder.mkdir(parents=True)
    for file in shipped.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "fwd_hd128_bf16.co").write_bytes(b"no ELF")
    (folder / "fwd_hd64_bf16.co").unlink()
    monkeypatch.setenv("JITFMHA_HSA_DIR", str(tmp_path))
    findings = {x.found.partition(" in ")[2].partition("\n")[0]: x for x in _of_code_objects()}
    broken = findings[f"JITFMHA_HSA_DIR={tmp_path}"]
    assert broken.verdict == "warning"
    assert "fwd_hd128_bf16.co" in broken.found
    assert "there is no file" in broken.found
    assert findings["the kernels of this package"].verdict == "ok"
    monkeypatch.setattr("jitfmha.amd.tree.hsa_dir", lambda: tmp_path / "nothing")
    monkeypatch.delenv("JITFMHA_HSA_DIR")
    assert {x.verdict for x in _of_code_objects()} == {"failed"}


def _of_code_objects() -> list[Finding]:
    return list(doctor._check_code_objects())


@pytest.mark.parametrize("wrong", [0.1, torch.nan])
def test_wrong_results(examine, monkeypatch, wrong):
    monkeypatch.delenv("JITFMHA_EMULATE", raising=False)
    monkeypatch.setattr(doctor, "_CHECKS", [doctor._check_runs])
    right = kernel_trial.judged_launch

    def judged(*call: Any) -> dict[str, Judged]:
        return {"out": right(*call)["out"]._replace(error=wrong)}

    monkeypatch.setattr(kernel_trial, "judged_launch", judged)
    _, checks = examine()
    assert {each["verdict"] for each in checks} == {"failed"}
    assert all("Do not use this target" in each["remedy"] for each in checks)


def test_runs_that_end_in_an_error(monkeypatch):
    def fails(*_arguments: object) -> Judged:
        raise HipError(719, "hipModuleLaunchKernel failed")

    monkeypatch.setattr(doctor, "_judged_small_call", fails)
    for found in doctor._check_runs():
        assert found.verdict == "failed"
        assert "hipModuleLaunchKernel failed" in found.found
        assert "dmesg" in found.remedy


def test_a_check_that_breaks(examine, monkeypatch):
    """What it found before counts, and the others go on."""

    def _check_nothing() -> Iterator[Finding]:
        yield Finding("before", "ok", "it worked")
        raise KeyError("broken")

    monkeypatch.setattr(doctor, "_CHECKS", [_check_nothing, doctor._check_versions])
    _, checks = examine()
    assert [(x["check"], x["verdict"]) for x in checks] == [
        *(("before", "ok"), ("nothing", "failed"), ("versions", "ok"))
    ]
    assert "KeyError" in checks[1]["found"]


# ---- GPUs that are not there ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hip", "version", "has_gpu", "verdict"),
    [
        (None, "2.13.0+cpu", True, "warning"),
        (None, "2.13.0+cpu", False, "ok"),
        ("6.4", "2.9.1+rocm6.4", True, "warning"),
        ("7.0", "2.10.0+rocm7.0", True, "ok"),
    ],
)
def test_torch(monkeypatch, tmp_path, hip, version, has_gpu, verdict):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(doctor, "_DRIVER_DEVICE", tmp_path if has_gpu else tmp_path / "no")
    found = only(doctor._check_torch)
    assert found.verdict == verdict
    assert version in found.found


@pytest.mark.usefixtures("rocm")
def test_driver(monkeypatch, tmp_path):
    (tmp_path / "version").write_text("6.14.14\n")
    monkeypatch.setattr(doctor, "_DRIVER_VERSION", tmp_path / "version")
    assert only(doctor._check_driver).found == "amdgpu 6.14.14"
    (tmp_path / "version").unlink()
    assert only(doctor._check_driver).found.startswith("amdgpu of Linux ")
    monkeypatch.setattr(doctor.os, "access", lambda *_arguments: False)
    found = only(doctor._check_driver)
    assert found.verdict == "failed"
    assert "groups render and video" in found.remedy


@pytest.mark.usefixtures("rocm")
def test_gpus(monkeypatch):
    gpu = SimpleNamespace(gcnArchName="gfx90a:sramecc+", name="AMD Instinct MI210")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: gpu)
    found = only(doctor._check_gpus)
    assert found.check == "cuda:0"
    assert found.verdict == "warning"
    assert "is a gfx90a" in found.found
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found = only(doctor._check_gpus)
    assert found.verdict == "failed"
    assert "HIP_VISIBLE_DEVICES" in found.remedy


@pytest.mark.usefixtures("rocm")
@pytest.mark.parametrize(("value", "verdict"), [(None, "warning"), ("0", "warning"), ("1", "ok")])
def test_kernel_arguments(monkeypatch, value, verdict):
    monkeypatch.delenv("HIP_FORCE_DEV_KERNARG", raising=False)
    if value is not None:
        monkeypatch.setenv("HIP_FORCE_DEV_KERNARG", value)
    assert only(doctor._check_kernel_arguments).verdict == verdict


@pytest.mark.usefixtures("rocm")
def test_hip_runtime(monkeypatch):
    """Which file, why that one, and that it is the only one."""
    bound = SimpleNamespace(library_path=sys.executable, why="torch calls it")
    monkeypatch.setattr(hip_runtime, "loaded_runtime", lambda: bound)
    monkeypatch.setattr(hip_libraries, "mapped_runtimes", lambda: [sys.executable])
    found = only(doctor._check_hip_runtime)
    assert found.verdict == "ok"
    assert found.found == f"{sys.executable}, because torch calls it"
    monkeypatch.setattr(hip_libraries, "mapped_runtimes", lambda: [sys.executable, "/opt/other.so"])
    found = only(doctor._check_hip_runtime)
    assert found.verdict == "warning"
    assert "/opt/other.so" in found.found

    def missing() -> None:
        raise HipError(-1, "the HIP runtime was not found")

    monkeypatch.setattr(hip_runtime, "loaded_runtime", missing)
    assert only(doctor._check_hip_runtime).verdict == "failed"
