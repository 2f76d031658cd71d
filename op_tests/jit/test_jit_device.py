"""Device code goes the same way as host libraries: built once, checked, read.

Here the compiler is clang as a program; `test_jit_hiprtc.py` has the one in a library.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from jitfmha import jit
from jitfmha.amd.code_object import read_code_object
from jitfmha.jit import build_processes
from jitfmha.jit.toolchain import device_compiler, device_hip
from jitfmha.jit.toolchain.device_compiler import DeviceCompilerNotFound
from jitfmha.jit.toolchain.device_hip import DeviceClang
from jitfmha.jit.toolchain.device_hiprtc import HiprtcNotUsable

from .conftest import DEVICE_SOURCES, device_spec, make_spec, write_programs


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROCM_PATH", raising=False)
    monkeypatch.setattr(device_hip, "_found", {})
    monkeypatch.setattr(device_hip, "find_hiprtc", no_hiprtc)
    try:
        device_compiler.device_compiler()
    except DeviceCompilerNotFound as error:
        pytest.skip(str(error))


def no_hiprtc() -> tuple[str, str]:
    raise HiprtcNotUsable("torch's hiprtc: hidden")


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def hide() -> None:
        monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
        monkeypatch.setattr(device_compiler, "_DEFAULT_ROCM", str(tmp_path / "default"))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    return hide


def test_several_at_a_time_need_no_processes(cache, monkeypatch):
    monkeypatch.setattr(build_processes, "_PROGRAM", "import os; os._exit(9)")
    specs = [device_spec(f"store_{n}") for n in range(3)]
    built = [spec for spec, seconds in jit.build_all(specs, 2) if seconds > 0]
    assert sorted(spec.name for spec in built) == ["store_0", "store_1", "store_2"]
    assert all(map(jit.is_built, specs))
    broken = [device_spec(f"broken_{n}", sources={"x.hip": "no_type x;"}) for n in range(2)]
    with pytest.raises(jit.BuildError, match="no_type"):
        list(jit.build_all(broken, 2))


def test_built_once_and_then_read(cache, new_process):
    spec = device_spec()
    assert not jit.is_built(spec)
    assert not cache.parent.exists()
    content = jit.read(spec)
    path = jit.build_log()[0].path
    assert path.name == "store.co"
    assert path.read_bytes() == content
    assert {name: (path.parent / name).read_text() for name in DEVICE_SOURCES} == DEVICE_SOURCES
    read_code_object(path, arch="gfx942", kernels={"store": 64}, kernarg_bytes=8, sha256=None)
    assert jit.read(device_spec()) is content
    assert [(event.name, event.how) for event in jit.build_log()] == [("store", "built")]
    new_process()
    assert jit.is_built(spec)
    assert jit.read(spec) == content
    assert [(event.how, event.path) for event in jit.build_log()] == [("loaded", path)]
    assert not [*(cache / "building").iterdir(), *(cache / "trash").iterdir()]


def test_compile_error_is_shown(cache):
    sources = {**DEVICE_SOURCES, "memory/address.h": "int fine;\nint x = nonsense;\n"}
    with pytest.raises(jit.BuildError) as caught:
        jit.read(device_spec(sources=sources))
    text = str(caught.value)
    [log] = (cache / "logs").iterdir()
    assert f"{log}/memory/address.h:2:" in text
    assert "nonsense" in text
    assert "clang" in text
    assert str(log / "build.log") in text
    assert not [*(cache / "building").iterdir(), *(cache / "entries").iterdir()]


def test_link_error_is_shown(cache):
    with pytest.raises(jit.BuildError, match="nosuchlibrary"):
        jit.read(device_spec(ldflags=("-lnosuchlibrary",)))


def test_without_compiler_the_message_names_what_was_tried(cache, tmp_path, no_compiler):
    no_compiler()
    with pytest.raises(jit.CompilerNotFound) as caught:
        jit.read(device_spec())
    for words in (
        "torch's hiprtc: hidden",
        f"ROCM_PATH: {tmp_path}/rocm/llvm/bin/clang++ (not there)",
        f"the default: {tmp_path}/default/llvm/bin/clang++ (not there)",
        "'ziglang' (not installed)",
        "install PyTorch for ROCm",
        "install ROCm, and set ROCM_PATH",
        "pip install 'ziglang>=0.17'",
    ):
        assert words in str(caught.value)
    assert not jit.is_built(device_spec())


def test_without_compiler_a_finished_build_is_used(cache, no_compiler, new_process):
    content = jit.read(device_spec())
    new_process()
    no_compiler()
    assert jit.is_built(device_spec())
    assert jit.read(device_spec()) == content
    with pytest.raises(jit.CompilerNotFound):
        jit.read(device_spec(arch="gfx950"))


@pytest.mark.parametrize("cflags", [(), ("--offload-arch=gfx942", "--offload-arch=gfx950")])
def test_one_architecture_is_needed(cache, cflags):
    spec = jit.BuildSpec("store", DEVICE_SOURCES, cflags, toolchain="device_hip")
    with pytest.raises(jit.BuildError, match=r"store names \[.*\] as its architectures"):
        jit.read(spec)


def test_several_sources_are_linked(cache, tmp_path):
    second = DEVICE_SOURCES["store.hip"].replace("void store", "void second")
    spec = device_spec("both", sources={**DEVICE_SOURCES, "other/second.hip": second})
    path = tmp_path / "both.co"
    path.write_bytes(jit.read(spec))
    for symbol in ("store", "second"):
        read_code_object(path, arch="gfx942", kernels={symbol: 64}, kernarg_bytes=8, sha256=None)


def test_verbose_shows_the_command(cache, monkeypatch, capfd):
    monkeypatch.setenv("JITFMHA_VERBOSE", "1")
    jit.read(device_spec())
    assert "--offload-arch=gfx942" in capfd.readouterr().err


def test_code_object_is_no_library(cache):
    with pytest.raises(ValueError, match=r"store\.co is no library of this machine"):
        jit.load(device_spec())


@pytest.mark.parametrize(
    ("sources", "reason"),
    [
        ({"a.cpp": ""}, "a.cpp"),
        ({"a.h": ""}, r"no \.hip source"),
        ({"a.hip": "", "b/a.hip": ""}, "one name"),
    ],
)
def test_sources_of_device_code(sources, reason):
    with pytest.raises(ValueError, match=reason):
        device_spec(sources=sources)


def test_toolchain_is_in_the_key(cache):
    with pytest.raises(ValueError, match=r"demo\.hip"):
        jit.BuildSpec("demo", {"demo.hip": "", "demo.cpp": ""})
    host = jit.BuildSpec("demo", {"demo.cpp": ""})
    assert host.digest != device_spec("demo").digest
    assert make_spec().artifact_name == "demo.so"


def test_compiler_is_in_the_key():
    found = device_hip.find_device_hip()
    assert isinstance(found, DeviceClang)
    other = DeviceClang(found.compiler, found.version + "1", found.why)
    elsewhere = DeviceClang(
        device_compiler.DeviceCompiler(("/opt/clang",), found.compiler.lld),
        *(found.version, found.why),
    )
    assert len({found.identity, other.identity, elsewhere.identity}) == 3


def test_temporary_files_of_a_compiler_lie_in_its_build(cache, tmp_path, monkeypatch):
    script = '#!/bin/sh\necho "error: in $TMPDIR" >&2; [ $# = 1 ]\n'
    write_programs(tmp_path / "llvm" / "bin", script, "clang++", "ld.lld")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    with pytest.raises(jit.BuildError, match=f"error: in {cache}/building/"):
        jit.read(device_spec())


def test_a_compiler_that_does_not_run(cache, tmp_path, monkeypatch):
    folder = tmp_path / "llvm" / "bin"
    folder.mkdir(parents=True)
    for name in ("clang++", "ld.lld"):
        (folder / name).write_text("no program")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    with pytest.raises(jit.CompilerNotFound) as caught:
        jit.read(device_spec())
    assert f"{folder}/clang++ (cannot be run" in str(caught.value)
    assert "torch's hiprtc: hidden" in str(caught.value)
