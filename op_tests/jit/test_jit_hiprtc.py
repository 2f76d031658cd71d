"""Device code by hiprtc: where it is found, what it is given, and what becomes of its errors.

The library has hiprtc's interface, with ziglang's clang behind it; the last tests take a real one,
where there is one.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path
from typing import get_args

import pytest
from elf import text_words
from rigs.hiprtc_on_clang import write_hiprtc
from score_features import ALL_MODIFIERS

from jitfmha import jit
from jitfmha.amd.chips import Arch
from jitfmha.amd.code_object import read_code_object
from jitfmha.jit.cache.key import entry_key
from jitfmha.jit.elf import build_id
from jitfmha.jit.toolchain import device_compiler, device_hip
from jitfmha.jit.toolchain import hip_libraries as hip_runtime
from jitfmha.jit.toolchain.device_hip import DeviceClang
from jitfmha.jit.toolchain.device_hiprtc import DeviceHiprtc
from jitfmha.jit.toolchain.host_cpp import find_host_cpp
from jitfmha.kernels.compiled.traits import ForwardTraits, kernel_spec

from .conftest import DEVICE_SOURCES, REAL_COMPILER, device_spec, write_programs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="hiprtc stands on ziglang's clang here"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hiprtc(tmp_path_factory.mktemp("hiprtc"))


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch seems to be, on a machine with no other compiler; it has loaded no runtime."""
    folder = tmp_path / "site-packages"
    (folder / "torch" / "lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(hip_runtime, "_torch_lib", lambda: folder / "torch" / "lib")
    monkeypatch.setattr(hip_runtime, "_runtime_of_torch", lambda: None)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    monkeypatch.setattr(device_compiler, "_DEFAULT_ROCM", str(tmp_path / "default"))
    monkeypatch.setattr(device_hip, "_found", {})
    device_compiler._find.cache_clear()
    return folder


@pytest.fixture
def hiprtc(site_packages: Path, library: Path) -> Path:
    """The library as newer PyTorch has it: in a package, without unversioned names."""
    path = site_packages / "_rocm_sdk_core" / "lib" / "libhiprtc.so.7"
    path.parent.mkdir(parents=True)
    (site_packages / "_rocm_sdk_core" / "__init__.py").touch()
    path.with_name("libhiprtc-builtins.so.7").touch()
    path.write_bytes(library.read_bytes())
    return path


def asked(toolchain: object) -> DeviceHiprtc:
    assert isinstance(toolchain, DeviceHiprtc)
    return toolchain


# ---- Which compiler is taken ---------------------------------------------------------------------


def test_hiprtc_comes_first_then_rocm_then_ziglang(hiprtc, tmp_path, monkeypatch):
    folder = tmp_path / "rocm" / "llvm" / "bin"
    write_programs(folder, "#!/bin/sh\necho ROCm clang 99\n", "clang++", "ld.lld")
    found = device_hip.find_device_hip()
    assert str(found) == f"hiprtc 9.0 ({hiprtc})"
    assert found.why == "it is in the package _rocm_sdk_core"
    hiprtc.unlink()
    found = device_hip.find_device_hip()
    assert str(found) == f"{folder}/clang++ (ROCm clang 99)"
    assert found.why.startswith(f"it is that of ROCm in {tmp_path}/rocm; not torch's hiprtc: ")
    assert f"{hiprtc.parent}/libhiprtc*.so* (not there)" in found.why
    (folder / "clang++").unlink()
    device_compiler._find.cache_clear()
    found = device_hip.find_device_hip()
    assert isinstance(found, DeviceClang)
    assert found.compiler.clang[0].endswith("/ziglang/zig")
    assert found.why.startswith("it came with the Python package ziglang; not torch's hiprtc: ")


@pytest.mark.parametrize("name", ["libhiprtc.so", "libhiprtc-2f1a3c.so"])
def test_beside_torch(site_packages, library, name):
    path = site_packages / "torch" / "lib" / name
    path.write_bytes(library.read_bytes())
    found = device_hip.find_device_hip()
    assert (asked(found).path, found.why) == (str(path), "it came with torch")


def test_beside_the_runtime_that_torch_uses(hiprtc, library, tmp_path, monkeypatch):
    """And nowhere else, once torch has loaded one."""
    runtime = tmp_path / "elsewhere" / "libamdhip64.so.7"
    monkeypatch.setattr(hip_runtime, "_runtime_of_torch", lambda: str(runtime))
    assert isinstance(device_hip.find_device_hip(), DeviceClang)
    path = runtime.with_name("libhiprtc.so.7")
    path.parent.mkdir()
    path.write_bytes(library.read_bytes())
    found = device_hip.find_device_hip()
    assert asked(found).path == str(path)
    assert found.why == "it lies beside the HIP runtime that torch uses"


def test_a_library_that_is_none_is_passed_over(hiprtc):
    hiprtc.write_bytes(b"no library")
    found = device_hip.find_device_hip()
    assert isinstance(found, DeviceClang)
    assert f"not {hiprtc} (" in found.why


def test_a_library_of_something_else_is_passed_over(hiprtc, cache):
    spec = jit.BuildSpec("other", {"other.cpp": 'extern "C" int hiprtcVersion() { return 0; }'})
    hiprtc.write_bytes(jit.read(spec))
    found = device_hip.find_device_hip()
    assert f"{hiprtc} has no function hiprtcGetErrorString" in found.why


def test_no_interpreter_to_load_it_in(hiprtc, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/usr/bin/blender")
    found = device_hip.find_device_hip()
    assert isinstance(found, DeviceClang)
    assert "no interpreter to load it in" in found.why


# ---- The key -------------------------------------------------------------------------------------


def test_what_is_in_the_key(hiprtc):
    found = asked(device_hip.find_device_hip())
    assert found.version == "9.0"
    assert [path for path, _ in found.contents] == [str(hiprtc)]
    ((path, content),) = found.contents
    others = (
        found._replace(path="/elsewhere/libhiprtc.so.7"),
        found._replace(version="9.1"),
        found._replace(contents=((path, content[::-1]),)),
    )
    assert len({each.identity for each in (found, *others)}) == 4
    assert found._replace(why="").identity == found.identity


@pytest.mark.skipif(shutil.which("strip") is None, reason="it takes the build id away")
def test_an_upgrade_while_the_process_runs(hiprtc, cache):
    """To a library without a build id."""
    before = device_hip.find_device_hip()
    subprocess.run(["strip", "-R", ".note.gnu.build-id", hiprtc], check=True)
    jit.read(device_spec())
    found = device_hip.find_device_hip()
    assert found.identity != before.identity
    [entry] = jit.cache_entries()
    assert entry.path.name == entry_key(device_spec(), found).directory_name
    ((_, content),) = asked(found).contents
    assert content == hashlib.sha256(hiprtc.read_bytes()).hexdigest()


def test_build_id(tmp_path):
    if REAL_COMPILER is None:
        pytest.skip("a compiler whose linker writes build ids is needed")
    path = tmp_path / "library.so"
    for flag, expected in (("0x0123456789abcdef", "0123456789abcdef"), ("none", None)):
        command = [*find_host_cpp().command, "-shared", "-fPIC", "-x", "c++", "-"]
        arguments = ["-o", str(path), f"-Wl,--build-id={flag}"]
        subprocess.run([*command, *arguments], input=b"int x;", check=True)
        assert build_id(str(path)) == expected
    image = path.read_bytes()
    for size in (0, 5, 63, 64, 100):
        path.write_bytes(image[:size])
        assert build_id(str(path)) is None


# ---- Compiling -----------------------------------------------------------------------------------


def instructions(spec: jit.BuildSpec) -> tuple[int, ...]:
    jit.loader._state.code_objects.clear()
    return text_words(jit.read(spec))


def test_code_is_that_of_clang(hiprtc, cache):
    """The same instructions, from the same language and at the same optimisation level."""
    sources = {
        "store.hip": (
            '#include "memory/address.h"\n'
            "static_assert(__cplusplus == 201703L, __FILE__);\n"
            "template <typename T> constexpr bool is_int = false;\n"
            "template <> inline constexpr bool is_int<int> = true;\n"
            'extern "C" __global__ void store(GLOBAL int* out, int n) {\n'
            "  __shared__ int row[64];\n"
            "  row[THREAD] = out[THREAD];\n"
            "  __builtin_amdgcn_s_barrier();\n"
            "  int sum = 0;\n"
            "  if constexpr (is_int<decltype(sum)>)\n"
            "    for (int i = 0; i < n; ++i) sum += row[(THREAD + i) & 63] * ANSWER;\n"
            "  out[THREAD] = sum;\n}\n"
        ),
        "memory/address.h": DEVICE_SOURCES["memory/address.h"],
        "memory/answer.h": DEVICE_SOURCES["memory/answer.h"],
    }
    by_hiprtc = instructions(device_spec(sources=sources))
    hiprtc.unlink()
    assert instructions(device_spec(sources=sources)) == by_hiprtc
    assert len(jit.cache_entries()) == 2


@pytest.mark.sample("arch", get_args(Arch), 1)
def test_a_compiled_kernel_is_that_of_clang(hiprtc, cache, arch):
    """The package's own sources: no name of theirs meets one of hiprtc's."""
    traits = ForwardTraits(
        *(arch, "bf16", 128, 96, "gm1", "rtne"),
        is_masked=True,
        access="near",
        modifiers=ALL_MODIFIERS,
        has_large_softcap=True,
        kv_dtype="bf16",
    )
    by_hiprtc = instructions(kernel_spec(traits))
    hiprtc.unlink()
    assert instructions(kernel_spec(traits)) == by_hiprtc


def test_a_program_may_use_names_that_hiprtc_declares(hiprtc, cache):
    sources = {
        "store.hip": (
            '#include "names.h"\n'
            'extern "C" __global__ void store(float4* out, float x) { *out = tanh(max(x)); }\n'
        ),
        "names.h": (
            "#pragma once\n"
            "typedef float float4 __attribute__((ext_vector_type(4)));\n"
            "template <class T> __device__ float max(T x) { return x; }\n"
            "__device__ inline float tanh(float x) { return 0.5f * x; }\n"
        ),
    }
    assert b"store.kd" in jit.read(device_spec(sources=sources))


def test_several_sources_are_one_program(hiprtc, cache, tmp_path):
    second = DEVICE_SOURCES["store.hip"].replace("void store", "void second")
    path = tmp_path / "both.co"
    path.write_bytes(jit.read(device_spec(sources={**DEVICE_SOURCES, "other/second.hip": second})))
    for symbol in ("store", "second"):
        read_code_object(path, arch="gfx942", kernels={symbol: 64}, kernarg_bytes=8, sha256=None)


def assert_error_is_named(cache: Path, name: str, **spec: str) -> str:
    """Of a source, as it is kept; gives what is said."""
    sources = {**DEVICE_SOURCES, name: f"int fine;\nint x = nonsense;\n{DEVICE_SOURCES[name]}"}
    with pytest.raises(jit.BuildError) as caught:
        jit.read(device_spec(sources=sources, **spec))
    [log] = (cache / "logs").iterdir()
    assert f"{log}/{name}:2:" in str(caught.value)
    assert "nonsense" in (log / "build.log").read_text()
    assert (log / name).read_text() == sources[name]
    return f"{caught.value}\n{(log / 'build.log').read_text()}"


@pytest.mark.parametrize("name", ["store.hip", "memory/answer.h"])
def test_compile_error_names_the_source_that_is_kept(hiprtc, cache, name):
    said = assert_error_is_named(cache, name)
    assert f"could not be compiled with hiprtc 9.0 ({hiprtc}):\n{cache}/logs/" in said
    assert "HIPRTC_ERROR_COMPILATION (6)" in said
    assert not [*(cache / "building").iterdir(), *(cache / "entries").iterdir()]


def test_an_architecture_that_ends_the_process(hiprtc, cache):
    """Not this one."""
    with pytest.raises(jit.BuildError, match="ended its process with SIGABRT"):
        jit.read(device_spec(arch="gfx999"))


def test_linker_flags_are_refused(hiprtc, cache):
    with pytest.raises(jit.BuildError, match=r"linker flags \['-lm'\], and hiprtc takes none"):
        jit.read(device_spec(ldflags=("-lm",)))


def test_options_of_the_environment_do_not_count(hiprtc, cache, monkeypatch):
    """They would be no part of the key."""
    monkeypatch.setenv("HIPRTC_COMPILE_OPTIONS_APPEND", "--no-such-option")
    assert jit.read(device_spec())


def test_modules_of_the_working_directory_are_not_imported(hiprtc, cache, tmp_path, monkeypatch):
    somebody_elses = tmp_path / "somebody-elses"
    somebody_elses.mkdir()
    for name in ("base64", "ctypes", "json", "re"):
        (somebody_elses / f"{name}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(somebody_elses)
    monkeypatch.setenv("PYTHONPATH", str(somebody_elses))
    assert isinstance(device_hip.find_device_hip(), DeviceHiprtc)
    assert jit.read(device_spec())


def test_verbose_shows_the_options(hiprtc, cache, monkeypatch, capfd):
    monkeypatch.setenv("JITFMHA_VERBOSE", "1")
    jit.read(device_spec())
    shown = capfd.readouterr()
    assert f"hiprtc 9.0 ({hiprtc})" in shown.err
    assert "--offload-arch=gfx942" in shown.err
    assert shown.out == ""


# ---- A real one ----------------------------------------------------------------------------------


@pytest.fixture
def real_hiprtc(site_packages: Path) -> Path:
    """That of a ROCm which the system has. Until ROCm 6, hiprtc was in the runtime's library.

    It needs no GPU. Debian's package libamdhip64-5 has one, which knows gfx90a but not gfx942.
    """
    name = find_library("hiprtc") or find_library("amdhip64")
    if name is None:
        pytest.skip("no hiprtc is installed")
    folder = site_packages / "_rocm_sdk_core" / "lib"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    code = f"import ctypes; ctypes.CDLL({name!r}); print(open('/proc/self/maps').read())"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True)
    (path,) = {line.split()[-1] for line in loaded.splitlines() if name in line}
    link = folder / "libhiprtc.so"
    link.symlink_to(path)
    return link


def test_a_real_one_compiles(real_hiprtc, cache):
    content = jit.read(device_spec(arch="gfx90a"))
    assert str(real_hiprtc) in asked(device_hip.find_device_hip()).path
    assert b"store.kd" in content
    # v_mov_b32 of 42, into whichever register.
    assert any(word & 0xFE01FFFF == 0x7E0002AA for word in text_words(content))


def test_a_real_ones_errors_name_the_source(real_hiprtc, cache):
    assert_error_is_named(cache, "memory/answer.h", arch="gfx90a")
