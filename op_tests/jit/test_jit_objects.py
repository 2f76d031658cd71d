"""Libraries that have a part of their code in common compile it once."""

import multiprocessing
import os
import pickle
import time

import pytest

from jitfmha import jit
from jitfmha.jit.cache.key import entry_key

from .conftest import build_only, make_spec

_FORK = multiprocessing.get_context("fork")
_COMMON = {
    "first.cpp": '#include "first.h"\nint first() { return FIRST; }\n',
    "first.h": "#define FIRST 40\ninline int twice(int x) { return 2 * x; }\n",
    "second.cpp": (
        '#include "first.h"\nint of_library();\nint second() { return twice(1) + of_library(); }\n'
    ),
}


def _common(**changes: str) -> jit.BuildSpec:
    return jit.BuildSpec("common", {**_COMMON, **changes}, ("-O1",), toolchain="host_object")


def _library(name: str, result: int, common: jit.BuildSpec | None = None) -> jit.BuildSpec:
    source = (
        "int first();\nint second();\n"
        f"int of_library() {{ return {result}; }}\n"
        'extern "C" int answer() { return first() + second(); }\n'
    )
    return make_spec(name, source, objects=(common or _common(),))


def _answer(spec: jit.BuildSpec) -> int:
    return int(jit.load(spec).answer())


def _names() -> list[str]:
    return [entry.name for entry in jit.cache_entries()]


def test_two_libraries_compile_the_object_once(cache, fake_compiler, new_process):
    assert _answer(_library("a", 1)) == 43
    assert fake_compiler.compiled() == 3
    assert _answer(_library("b", 2)) == 44
    assert fake_compiler.compiled() == 4
    assert _names() == ["a", "b", "common"]
    how = [(event.name, event.how) for event in jit.build_log()]
    assert how == [("common", "built"), ("a", "built"), ("common", "loaded"), ("b", "built")]
    new_process()
    assert _answer(_library("a", 1)) == 43
    assert [event.name for event in jit.build_log()] == ["a"]
    assert jit.cache_clear() == 3
    assert not _names()


def test_processes_at_once_compile_the_object_once(cache, fake_compiler):
    fake_compiler.delay.write_text("1")
    results = range(4)

    def work(result: int) -> None:
        os._exit(_answer(_library(f"of_{result}", result)))

    processes = [_FORK.Process(target=work, args=(result,), daemon=True) for result in results]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [42 + result for result in results]
    assert fake_compiler.compiled() == 2 + len(results)
    assert _names() == ["common", *(f"of_{result}" for result in results)]


@pytest.mark.parametrize("name", ["common.o", "first.cpp", "meta.json"])
def test_a_damaged_object_is_built_again(name, cache, fake_compiler):
    path = build_only(_common()) / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.warns(RuntimeWarning, match=f"common.* is not used.*: {name} is damaged"):
        assert _answer(_library("a", 1)) == 43
    assert fake_compiler.compiled() == 5
    assert all(entry.valid for entry in jit.cache_entries())


def test_an_object_that_others_can_write_to_is_not_linked(cache, fake_compiler):
    path = build_only(_common()) / "common.o"
    path.chmod(0o602)
    with pytest.warns(RuntimeWarning, match=r"'common\.o' can be written to by everybody"):
        assert _answer(_library("a", 1)) == 43
    assert fake_compiler.compiled() == 5


def test_an_object_is_evicted_like_a_library(cache, fake_compiler, monkeypatch):
    _answer(_library("a", 1))
    long_ago = time.time() - 1e6
    for entry in jit.cache_entries():
        os.utime(entry.path, (long_ago, long_ago))
    monkeypatch.setenv("JITFMHA_CACHE_LIMIT", "0")
    # A library that a process uses stays, an object has nobody.
    build_only(make_spec())
    assert _names() == ["a", "demo"]


def test_the_object_is_in_the_key_of_the_library(cache):
    other = _common(**{"first.h": _COMMON["first.h"].replace("40", "50")})
    library = _library("a", 1)
    assert entry_key(library, None) != entry_key(_library("a", 1, other), None)
    assert entry_key(library, None) != entry_key(make_spec("a", library.sources["demo.cpp"]), None)
    assert pickle.loads(pickle.dumps(library)).objects == library.objects
    assert _answer(library) == 43
    assert _answer(_library("a", 1, other)) == 53


def test_an_object_that_does_not_compile(cache):
    broken = _common(**{"first.cpp": "int first( {\n"})
    with pytest.raises(jit.BuildError, match=r"common could not be compiled.*\n.*first\.cpp:1:"):
        jit.load(_library("a", 1, broken))
    assert not _names()


def test_what_is_no_object_is_not_linked():
    with pytest.raises(ValueError, match="objects are linked into libraries only"):
        make_spec("a", objects=(make_spec("b"),))
    with pytest.raises(ValueError, match="objects are linked into libraries only"):
        jit.BuildSpec("b", _COMMON, toolchain="host_object", objects=(_common(),))
    with pytest.raises(ValueError, match="two objects have one name"):
        make_spec("a", objects=(_common(), _common()))
    with pytest.raises(ValueError, match=r"common\.o is no library of this machine"):
        jit.load(_common())
