import os
import pickle
import sys

import pytest
import torch

from jitfmha import jit
from jitfmha.jit.cache import key as key_module
from jitfmha.jit.cache.key import EntryKey, entry_key
from jitfmha.jit.toolchain.environment import changed_environment, user_environment
from jitfmha.jit.toolchain.host_cpp import HostCpp, find_host_cpp

from .conftest import make_spec

COMPILER = HostCpp(("/usr/bin/c++",), "/usr/bin/g++-12", "c++ 12.2.0\n")


def test_same_ingredients_same_key():
    assert entry_key(make_spec(), COMPILER) == entry_key(make_spec(why="again"), COMPILER)


@pytest.mark.parametrize(
    "other",
    [
        make_spec(name="other"),
        make_spec(source="extern int x;\n"),
        make_spec(cflags=("-O2",)),
        make_spec(ldflags=("-lm",)),
        make_spec(cflags=("-lm",)),
        jit.BuildSpec("demo", {"other.cpp": make_spec().sources["demo.cpp"]}),
        jit.BuildSpec("demo", {**make_spec().sources, "a.h": ""}),
    ],
)
def test_spec_is_in_the_key(other):
    assert entry_key(other, COMPILER) != entry_key(make_spec(), COMPILER)


@pytest.mark.parametrize(
    "change",
    [
        {"resolved": "/usr/bin/g++-13"},
        {"version": "c++ 12.2.1\n"},
        {"command": ("/usr/bin/c++", "-m32")},
        {"command": ("/usr/bin/clang",)},
    ],
)
def test_compiler_is_in_its_part_of_the_key(change):
    other = COMPILER._replace(**change)  # type: ignore[arg-type]
    before, after = entry_key(make_spec(), COMPILER), entry_key(make_spec(), other)
    assert before.content == after.content
    assert before.compiler != after.compiler


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (torch, "__version__", "2.99.0"),
        (torch, "compiled_with_cxx11_abi", lambda: "another"),
        (key_module, "__version__", "99.0"),
        (sys, "platform", "darwin"),
        (os, "uname", lambda: os.uname_result(("Linux", "name", "6", "version", "riscv64"))),
        (key_module, "_c_library", lambda: "glibc 2.99"),
        (key_module, "_FORMAT", 99),
    ],
)
def test_surroundings_are_in_the_key(where, name, value, monkeypatch):
    before = entry_key(make_spec(), COMPILER)
    monkeypatch.setattr(where, name, value)
    after = entry_key(make_spec(), COMPILER)
    assert before.content != after.content
    assert before.compiler == after.compiler


def test_threads_have_the_compiler_of_the_user_during_a_build():
    found, before = find_host_cpp(ask_again=True), user_environment()
    with changed_environment({"CXX": "/nowhere/compiler", "PATH": "/nowhere"}):
        assert find_host_cpp(ask_again=True) == found
        assert os.environ["PATH"] == "/nowhere"
        assert user_environment() == before
    assert dict(os.environ) == before


def test_directory_name_can_be_parsed():
    key = entry_key(make_spec(name="cpu_fwd.v2"), COMPILER)
    assert EntryKey.parse(key.directory_name) == key
    assert EntryKey.parse("something-else") is None


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", "a-b", "a\n", "x" * 81, ".hidden"])
def test_bad_name_is_refused(name):
    with pytest.raises(ValueError, match="build name"):
        make_spec(name=name)


@pytest.mark.parametrize("flag", ["-D'x'", "-O2 -g", "x.o", "-DX=$(id)", "-I`id`", "-a;b", ""])
def test_flag_for_a_shell_is_refused(flag):
    with pytest.raises(ValueError, match="flag"):
        make_spec(cflags=(flag,))


@pytest.mark.parametrize("name", ["memory/lds.h", "a/b/c/d.inc", "_1/x.y.hpp"])
def test_source_may_lie_in_folders(name):
    spec = jit.BuildSpec("demo", {name: "", "a/demo.cpp": ""})
    assert list(spec.sources) == [name, "a/demo.cpp"]
    flat = jit.BuildSpec("demo", {name.replace("/", "_"): "", "a/demo.cpp": ""})
    assert entry_key(spec, COMPILER) != entry_key(flat, COMPILER)


@pytest.mark.parametrize(
    "name",
    ["../a.cpp", "a.so", "a b.cpp", "a.cpp\n", "meta.json"]
    + ["/a.cpp", "a/../b.cpp", "./a.cpp", "a/./b.cpp", "a//b.cpp", "a/.b.cpp", "a\\b.cpp"]
    + ["meta.json/a.cpp", "demo.so/a.cpp", "a.h/b.cpp", "a b/c.cpp", "~/a.cpp", "a/"],
)
def test_bad_source_name_is_refused(name):
    with pytest.raises(ValueError, match="source name"):
        jit.BuildSpec("demo", {name: ""})


def test_nothing_to_compile_is_refused():
    with pytest.raises(ValueError, match=r"no \.cpp source"):
        jit.BuildSpec("demo", {"a.h": ""})


def test_two_object_files_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"'a/x\.cpp' and 'b/x\.cpp' of build demo"):
        jit.BuildSpec("demo", {"a/x.cpp": "", "a/x.h": "", "b/x.cpp": ""})


def test_spec_is_a_value():
    sources = {"demo.cpp": "int x;\n"}
    spec = jit.BuildSpec("demo", sources)
    sources["demo.cpp"] = "changed"
    assert spec.sources["demo.cpp"] == "int x;\n"
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert len({spec, pickle.loads(pickle.dumps(spec))}) == 1
