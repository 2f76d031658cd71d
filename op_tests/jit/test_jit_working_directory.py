"""The working directory may be anybody's: nothing that is started imports from it."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from subprocesses import run_python

import jitfmha
from jitfmha.jit.fresh_process import fresh_python, search_path
from jitfmha.jit.toolchain.device_compiler import DeviceCompilerNotFound, device_compiler
from jitfmha.jit.toolchain.ninja import path_with_ninja

from .conftest import device_spec

_ROOT = Path(jitfmha.__file__).parents[1]
_OTHER_MODULES = ("filelock", "jitfmha", "ninja", "setuptools", "torch", "ziglang")
_PLANTED = """
import os
with open(os.environ["IMPORTED"], "a") as file:
    file.write(f"{__name__}\\n")
raise SystemExit(f"{__name__} of the working directory was imported")
"""
_BUILD_LIBRARY = """
from jitfmha import jit
spec = jit.BuildSpec("demo", {"demo.cpp": 'extern "C" int answer() { return 42; }'})
assert jit.load(spec).answer() == 42
"""
_BUILD_CODE_OBJECT = """
from jitfmha import jit
assert jit.read(jit.BuildSpec("store", SOURCES, ("--offload-arch=gfx942",), toolchain="device_hip"))
"""
_FRESH_PROCESS = """
from rigs.fresh_run import run_fresh
code = "import ctypes, json, sys, jitfmha; print(jitfmha.__file__, *sys.argv[1:])"
process = run_fresh(code, "argument", failure="it failed", timeout=900)
import jitfmha
assert process.stdout.split() == [jitfmha.__file__, "argument"], process.stdout
"""


@pytest.fixture
def somebody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a module for each name that a child process could import."""
    folder = tmp_path / "somebody-elses"
    folder.mkdir()
    for name in (*sys.stdlib_module_names, *_OTHER_MODULES):
        (folder / f"{name}.py").write_text(_PLANTED)
    monkeypatch.setenv("IMPORTED", str(tmp_path / "imported"))
    return folder


def imported(tmp_path: Path) -> list[str]:
    log = tmp_path / "imported"
    return log.read_text().split() if log.exists() else []


def run_job(tmp_path: Path, where: Path, code: str) -> None:
    job = tmp_path / "job" / "job.py"
    job.parent.mkdir()
    job.write_text(code)
    run_python(job, cwd=where, PYTHONPATH=os.pathsep.join(search_path()))
    assert imported(tmp_path) == []


@pytest.mark.parametrize("arguments", [("-c", "import ctypes"), ("-m", "ziglang", "clang")])
def test_interpreter_that_is_not_isolated(arguments, somebody_elses, tmp_path):
    """It imports what is planted, so the other tests could see it."""
    subprocess.run([sys.executable, *arguments], cwd=somebody_elses, capture_output=True)
    assert imported(tmp_path)


def test_build_of_a_library(cache, somebody_elses, tmp_path):
    run_job(tmp_path, somebody_elses, _BUILD_LIBRARY)


def test_build_of_a_code_object(cache, somebody_elses, tmp_path):
    try:
        device_compiler()
    except DeviceCompilerNotFound as error:
        pytest.skip(str(error))
    sources = dict(device_spec().sources)
    run_job(tmp_path, somebody_elses, f"SOURCES = {sources!r}\n{_BUILD_CODE_OBJECT}")


def test_fresh_process(somebody_elses, tmp_path):
    run_job(tmp_path, somebody_elses, _FRESH_PROCESS)


def test_search_path_leaves_out_the_working_directory(monkeypatch):
    monkeypatch.setattr(sys, "path", ["", "relative", "/absolute"])
    assert search_path(Path("/first")) == ["/first", "/absolute", str(_ROOT)]
    assert fresh_python("pass")[1:3] == ["-I", "-c"]


def interpreters_started(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line of each command that begins with this interpreter, and its first argument."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.List, ast.Tuple)) or not node.elts:
            continue
        if ast.unparse(node.elts[0]) == "sys.executable":
            yield node.lineno, ast.unparse(node.elts[1]) if len(node.elts) > 1 else ""


def test_every_interpreter_that_is_started_is_isolated():
    """In the package and in the rigs that its benchmarks run."""
    found = []
    for path in sorted([*_ROOT.glob("jitfmha/**/*.py"), *_ROOT.glob("op_tests/rigs/**/*.py")]):
        if path.name == "hostile_environment.py":
            continue  # It stands for a user's own program.
        text = path.read_text()
        for line, argument in interpreters_started(ast.parse(text)):
            found.append(path.name)
            assert argument == "'-I'", f"{path}:{line} starts an interpreter with {argument}"
    assert set(found) == {"fresh_process.py", "compiling.py"}


def test_ninja_where_an_isolated_interpreter_would_not_start(tmp_path, monkeypatch):
    """It is then started without a script; what it leaves behind is ended by the next builder."""
    assert str(tmp_path) in path_with_ninja(tmp_path)
    monkeypatch.setenv("PYTHONHOME", sys.prefix)
    assert str(tmp_path) not in path_with_ninja(tmp_path)
