"""Where there is no C++ compiler, that of the package `ziglang` builds for the host."""

import os
from collections.abc import Mapping

import pytest
from subprocesses import run_python

from jitfmha import jit
from jitfmha.emulator import library
from jitfmha.jit.toolchain import cpp_extension
from jitfmha.jit.toolchain.compiling import zig_program
from jitfmha.jit.toolchain.host_cpp import find_host_cpp

from .conftest import answer, make_spec

pytestmark = pytest.mark.skipif(zig_program() is None, reason="it is about the package ziglang")

_CALLS = """
import torch
import jitfmha
q, k, v = torch.randn(3, 1, 70, 4, 64, dtype=torch.bfloat16)
scores = (x.transpose(1, 2).double() for x in (q, k, v))
expected = torch.nn.functional.scaled_dot_product_attention(*scores).transpose(1, 2)
for chip in (None, "gfx942"):
    out = torch.full_like(q, torch.nan)
    if chip is None:
        jitfmha.fmha_fwd(q, k, v, out=out)
    else:
        with jitfmha.emulate(chip):
            jitfmha.fmha_fwd(q, k, v, out=out)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
"""


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


def test_it_is_the_last(monkeypatch, tmp_path):
    found = find_host_cpp()
    machine = os.uname().machine
    assert found.command[:2] == (str(zig_program()), "c++")
    assert f"--target={machine}-linux-gnu" in found.command
    assert found.why == "there is no other, and it came with the Python package ziglang"
    (tmp_path / "clang++").write_text("#!/bin/sh\necho some clang\n")
    (tmp_path / "clang++").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_host_cpp().why == "it is clang++ on PATH"


def test_a_compiler_that_was_chosen_and_is_not_there(monkeypatch):
    monkeypatch.setenv("CXX", "my-compiler")
    with pytest.warns(RuntimeWarning, match="CXX='my-compiler': not found.*ziglang/zig c\\+\\+"):
        find_host_cpp()


def test_a_library_is_built(cache, capfd):
    """With no program on PATH at all; without libraries, which it would have to compile first."""
    source = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
    cflags, ldflags = library.build_spec("plain").cflags, ("-nostdlib", "-nostdlib++")
    assert answer(make_spec(source=source, cflags=cflags, ldflags=ldflags)) == 42
    assert (cache / "zig").stat().st_mode & 0o777 == 0o700
    assert capfd.readouterr().err.count("the first build with ziglang takes minutes") == 1


def test_builds_say_that_they_take_long_until_one_has_ended(cache, monkeypatch, capfd):
    def interrupted(*arguments: object) -> bytes:
        raise jit.BuildError("interrupted")

    with monkeypatch.context() as patched:
        patched.setattr(cpp_extension, "compile_library", interrupted)
        for _ in range(2):
            with pytest.raises(jit.BuildError, match="interrupted"):
                jit.load(make_spec())
    assert capfd.readouterr().err.count("takes minutes") == 2
    cflags = library.build_spec("plain").cflags
    for number in (40, 41):
        body = f"int answer() {{ return {number}; }}\n"
        source = f'extern "C" __attribute__((visibility("default"))) {body}'
        spec = make_spec(source=source, cflags=cflags, ldflags=("-nostdlib", "-nostdlib++"))
        assert answer(spec) == number
    assert capfd.readouterr().err.count("takes minutes") == 1


def test_an_object_is_linked_into_a_library(cache):
    flags = (library.build_spec("plain").cflags, ("-nostdlib", "-nostdlib++"))
    sources = {
        "first.cpp": "int of_library();\nint first() { return of_library() + 40; }\n",
        "second.cpp": "int first();\nint second() { return first() + 1; }\n",
    }
    source = (
        "int second();\n"
        "int of_library() { return 1; }\n"
        'extern "C" __attribute__((visibility("default"))) int answer() { return second(); }\n'
    )
    common = jit.BuildSpec("common", sources, *flags, toolchain="host_object")
    spec = jit.BuildSpec("demo", {"demo.cpp": source}, *flags, objects=(common,))
    assert answer(spec) == 42


@pytest.mark.parametrize("given", ["", "somewhere"])
def test_its_own_cache_lies_where_nobody_else_can_write(given, cache, monkeypatch, tmp_path):
    seen: dict[str, str] = {}
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    def compile_library(*arguments: object) -> bytes:
        assert isinstance(arguments[-1], Mapping)
        seen.update(arguments[-1])
        raise jit.BuildError("seen")

    monkeypatch.setattr(cpp_extension, "compile_library", compile_library)
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", given and str(tmp_path / given))
    monkeypatch.delenv("ZIG_LOCAL_CACHE_DIR", raising=False)
    with pytest.raises(jit.BuildError, match="seen"):
        jit.load(make_spec())
    names = ("ZIG_LOCAL_CACHE_DIR",) if given else ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")
    assert seen == dict.fromkeys(names, str(cache / "zig"))
    assert not list(here.iterdir())


def test_calls_on_a_machine_without_a_compiler(cache, pytestconfig, tmp_path):
    if not pytestconfig.getoption("--exhaustive"):
        pytest.skip("minutes, most of them for a C++ library; with --exhaustive")
    job = tmp_path / "job.py"
    job.write_text(_CALLS)
    run_python(job, timeout=3600)
    built = {entry.name.partition("_")[0] for entry in jit.cache_entries()}
    assert built == {"amd", "cpu", "emulator"}
