"""A private cache for each test, and a compiler that can be counted and slowed down."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jitfmha import jit
from jitfmha.jit import loader
from jitfmha.jit.cache import directory
from jitfmha.jit.toolchain import host_cpp

SOURCE = 'extern "C" int answer() { return 42; }\n'
DEVICE_SOURCES = {
    "store.hip": (
        '#include "memory/address.h"\n'
        'extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(64, 64)))\n'
        "void store(GLOBAL int* out) { out[THREAD] = ANSWER; }\n"
    ),
    "memory/address.h": (
        '#include "memory/answer.h"\n'
        "#define GLOBAL __attribute__((address_space(1)))\n"
        "#define THREAD __builtin_amdgcn_workitem_id_x()\n"
    ),
    "memory/answer.h": "#define ANSWER 42\n",
}
REAL_COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def make_spec(name: str = "demo", source: str = SOURCE, **fields: object) -> jit.BuildSpec:
    return jit.BuildSpec(name, {"demo.cpp": source}, **fields)  # type: ignore[arg-type]


def device_spec(
    name: str = "store",
    arch: str = "gfx942",
    sources: dict[str, str] = DEVICE_SOURCES,
    **fields: object,
) -> jit.BuildSpec:
    """One of device code, for this architecture."""
    cflags = (f"--offload-arch={arch}",)
    return jit.BuildSpec(name, sources, cflags, toolchain="device_hip", **fields)  # type: ignore[arg-type]


def answer(spec: jit.BuildSpec) -> int:
    return int(jit.load(spec).answer())


def build_only(spec: jit.BuildSpec) -> Path:
    """Build without loader: the loader of the system knows a library by its path, once loaded."""
    entry, _ = loader._obtain(spec)
    entry.close()
    return entry.path


def forget_what_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_state", loader._ProcessState())


@dataclass(frozen=True)
class FakeCompiler:
    """A script in front of the real compiler.

    Attributes:
        path: for `CXX`.
        log: gets one line for each source that is compiled.
        delay: if this file exists, compiling takes as many seconds as it says.
    """

    path: Path
    log: Path
    delay: Path

    def compiled(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


Again = Callable[[], None]
"""The type of the fixture ``new_process``."""


def write_programs(folder: Path, script: str, *names: str) -> Path:
    """Executable files of this content."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(script)
        (folder / name).chmod(0o700)
    return folder


def assert_private(cache: Path) -> None:
    """No file and no folder of a cache is open to others."""
    for path in [cache.parent, *cache.parent.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Files get every permission that is asked for."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def _fresh_process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CXX", "JITFMHA_VERBOSE", "JITFMHA_CACHE_LIMIT", "JITFMHA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    forget_what_was_loaded(monkeypatch)
    monkeypatch.setattr(directory, "_stand_ins", {})
    monkeypatch.setattr(host_cpp, "_found", {})
    yield
    changed = {name for name in before if before[name] != os.environ.get(name)}
    assert changed <= {"CXX", "PATH", "PYTHONPATH", "HOME", "TMPDIR", "PYTEST_CURRENT_TEST"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The versioned folder of an empty cache."""
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "v1"


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes this process forget what it loaded, as if it had just started."""

    return lambda: forget_what_was_loaded(monkeypatch)


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    fake = FakeCompiler(tmp_path / "fake-c++", tmp_path / "compiled", tmp_path / "delay")
    script = (
        "#!/bin/sh\n"
        'case " $* " in *" -c "*)\n'
        f'  echo compiling >> "{fake.log}"\n'
        f'  if [ -e "{fake.delay}" ]; then sleep "$(cat "{fake.delay}")"; fi;;\n'
        "esac\n"
        f'exec "{REAL_COMPILER}" "$@"\n'
    )
    write_programs(tmp_path, script, fake.path.name)
    monkeypatch.setenv("CXX", str(fake.path))
    return fake
