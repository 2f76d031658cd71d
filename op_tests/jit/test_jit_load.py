import re
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from subprocesses import run_python

from jitfmha import jit
from jitfmha.jit import status
from jitfmha.jit.errors import CompileFailure
from jitfmha.jit.toolchain import host_cpp
from jitfmha.jit.toolchain.compiling import compile_failure
from jitfmha.jit.toolchain.cpp_extension import ShownOutput

from .conftest import answer, assert_private, build_only, make_spec


def test_built_once_and_then_loaded(cache, fake_compiler, new_process):
    spec = make_spec()
    assert not jit.is_built(spec)
    assert not cache.parent.exists()
    assert answer(spec) == 42
    assert jit.load(spec) is jit.load(make_spec())
    assert [(event.name, event.how) for event in jit.build_log()] == [("demo", "built")]
    new_process()
    assert jit.is_built(spec)
    assert answer(spec) == 42
    assert [(event.name, event.how) for event in jit.build_log()] == [("demo", "loaded")]
    assert [entry.path for entry in jit.cache_entries()] == [jit.build_log()[0].path.parent]
    assert fake_compiler.compiled() == 1


def test_everything_is_private(cache, no_umask):
    answer(make_spec())
    assert_private(cache)


def test_nothing_is_linked_with_pytorch(cache):
    source = """
        extern "C" int torch_get_num_threads(unsigned*);
        extern "C" int answer() { return torch_get_num_threads(nullptr); }
    """
    spec = make_spec(source=source)
    assert b"libtorch" not in (build_only(spec) / spec.artifact_name).read_bytes()


def test_headers_lie_beside_the_sources(cache):
    sources = {
        "a.cpp": '#include "b.h"\nint part();\nextern "C" int answer() { return B + part(); }\n',
        "c.cpp": "int part() { return 2; }\n",
        "b.h": "#define B 40\n",
    }
    assert answer(jit.BuildSpec("parts", sources, ("-O1",), ("-lm",))) == 42


def test_sources_in_folders(cache, fake_compiler, new_process, no_umask):
    """Found from everywhere, kept as they are, and no danger to a standard header of that name."""
    sources = {
        "run/a.cpp": (
            "#include <memory>\n"
            '#include "memory/one.h"\n'
            '#include "beside.h"\n'
            'extern "C" int answer() { return *std::make_unique<int>(ONE + BESIDE); }\n'
        ),
        "run/beside.h": "#define BESIDE 2\n",
        "memory/one.h": '#include "memory/inner/two.h"\n#define ONE TWO\n',
        "memory/inner/two.h": "#define TWO 40\n",
        "memory.h": "#error this is not the standard one\n",
    }
    spec = jit.BuildSpec("folders", sources)
    assert answer(spec) == 42
    entry = jit.build_log()[0].path.parent
    assert {name: (entry / name).read_text() for name in sources} == sources
    assert_private(cache)
    new_process()
    assert answer(spec) == 42
    assert jit.build_log()[0].how == "loaded"
    assert fake_compiler.compiled() == 1


def test_compile_error_in_a_folder(cache):
    spec = jit.BuildSpec("folders", {"a/b.cpp": '#include "c/d.h"\n', "c/d.h": "int x = no;\n"})
    with pytest.raises(jit.BuildError, match=r"logs/[^\n]*/c/d\.h:1:") as caught:
        jit.load(spec)
    [log] = (cache / "logs").iterdir()
    assert f"{log}/c/d.h:1:" in str(caught.value)
    assert (log / "c" / "d.h").read_text() == spec.sources["c/d.h"]


def test_warm_path_imports_nothing_heavy(cache):
    answer(make_spec())
    program = (
        "import sys, torch, jitfmha.jit as jit\n"
        "from jitfmha.jit.spec import BuildSpec\n"
        f"spec = BuildSpec('demo', {dict(make_spec().sources)!r})\n"
        "assert jit.load(spec).answer() == 42\n"
        "assert jit.build_log()[0].how == 'loaded'\n"
        "heavy = {'torch.utils.cpp_extension', 'setuptools', 'filelock', 'platformdirs', 'ninja'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    done = run_python("-W", "error", "-c", program)
    assert (done.stdout, done.stderr) == ("", "")


def test_quiet_build_prints_nothing(cache, monkeypatch, capfd):
    monkeypatch.setattr(status, "PATIENCE_SECONDS", 3600.0)  # however busy the machine is
    answer(make_spec(source='#warning "look"\n' + make_spec().sources["demo.cpp"]))
    assert capfd.readouterr() == ("", "")


def test_verbose_build_shows_commands_and_warnings(cache, monkeypatch, capfd):
    monkeypatch.setenv("JITFMHA_VERBOSE", "1")
    answer(make_spec(source='#warning "look here"\n' + make_spec().sources["demo.cpp"]))
    out, err = capfd.readouterr()
    assert out == ""
    assert "-c " in err
    assert "look here" in err


def test_long_build_is_one_line(cache, fake_compiler, monkeypatch, capfd):
    monkeypatch.setattr(status, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(status, "STEP_SECONDS", 3600.0)  # However long the compiler takes.
    fake_compiler.delay.write_text("1")
    answer(make_spec(why="first call with these traits"))
    line = r"jitfmha: building demo \(first call with these traits\) \.\.\. \d+\.\d s\n"
    assert re.fullmatch(line, capfd.readouterr().err)


def wait_for_a_line() -> None:
    """Until the thread that writes it has had its turn, however busy the machine is."""
    end = time.monotonic() + 60
    while status._unfinished is None and time.monotonic() < end:
        time.sleep(0.01)


def test_a_line_grows(monkeypatch, capsys):
    monkeypatch.setattr(status, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(status, "STEP_SECONDS", 0.05)
    shown, end = "", time.monotonic() + 60
    with status.building("demo", "a test"):
        while shown.count(" s ...") < 2 and time.monotonic() < end:
            time.sleep(0.01)
            shown += capsys.readouterr().err
        monkeypatch.setattr(status, "STEP_SECONDS", 3600.0)
    shown += capsys.readouterr().err
    assert re.fullmatch(
        r"jitfmha: building demo \(a test\) \.\.\.( \d+ s \.\.\.)+ \d+\.\d s\n", shown
    )


@pytest.mark.parametrize(
    ("error", "end"),
    [(RuntimeError("no"), "failed, "), (KeyboardInterrupt(), "interrupted, "), (None, "")],
)
def test_line_says_how_a_build_ended(error, end, monkeypatch, capsys):
    monkeypatch.setattr(status, "PATIENCE_SECONDS", 0.0)
    expected = pytest.raises(type(error)) if error else nullcontext()
    with expected, status.building("a" * 40 + "b" * 40, "a reason for which there is no room"):
        wait_for_a_line()
        if error:
            raise error
    line = capsys.readouterr().err
    assert re.fullmatch(rf"jitfmha: building a+\.\.\.b+ \.\.\. {end}\d+\.\d s\n", line)
    assert len(line) <= 80


def test_lines_in_between_stay_whole(monkeypatch, capsys):
    monkeypatch.setattr(status, "PATIENCE_SECONDS", 0.0)
    with status.building("demo", "a test"):
        wait_for_a_line()
        status.say("something else")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["jitfmha: building demo (a test) ...", "jitfmha: something else"]
    assert re.fullmatch(r"jitfmha: building demo \(a test\) \.\.\. \d+\.\d s", lines[2])


def test_quiet_shows_nothing(cache, monkeypatch, capfd):
    monkeypatch.setenv("JITFMHA_VERBOSE", "quiet")
    monkeypatch.setattr(status, "PATIENCE_SECONDS", 0.0)
    answer(make_spec())
    status.say("waiting")
    assert capfd.readouterr() == ("", "")


def test_unknown_verbosity_is_refused(cache, monkeypatch):
    monkeypatch.setenv("JITFMHA_VERBOSE", "loud")
    with pytest.raises(ValueError, match=r"JITFMHA_VERBOSE is 'loud'; use 0 .* 1 .* or quiet"):
        answer(make_spec())
    assert not list((cache / "entries").iterdir())


@pytest.mark.parametrize("verbose", ["0", "1"])
def test_compile_error_shows_the_first_one(cache, verbose, monkeypatch):
    monkeypatch.setenv("JITFMHA_VERBOSE", verbose)
    source = "int fine;\nint x = nonsense;\nint y = rubbish;\n"
    with pytest.raises(jit.BuildError) as caught:
        jit.load(make_spec(source=source))
    text = str(caught.value)
    assert "demo.cpp:2:" in text
    assert "nonsense" in text
    assert "rubbish" not in text
    [log] = (cache / "logs").iterdir()
    assert str(log / "build.log") in text
    assert "rubbish" in (log / "build.log").read_text()
    assert f"{log}/demo.cpp:2:" in text
    assert (log / "demo.cpp").read_text() == source
    assert not list((cache / "building").iterdir())
    assert not list((cache / "entries").iterdir())


def test_verbose_failure_waits_for_the_output(cache, monkeypatch, capfd):
    """The thread that copies the output may be behind when the build has failed."""
    monkeypatch.setenv("JITFMHA_VERBOSE", "1")
    forward = ShownOutput._forward

    def late(self: ShownOutput, source: int) -> None:
        time.sleep(0.5)
        forward(self, source)

    monkeypatch.setattr(ShownOutput, "_forward", late)
    with pytest.raises(jit.BuildError, match="nonsense"):
        jit.load(make_spec(source="int x = nonsense;\n"))
    assert "nonsense" in capfd.readouterr().err


def test_what_is_no_compiler(cache, monkeypatch):
    """It succeeds at everything, and writes nothing."""
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(jit.BuildError, match=r"true ended without an error .* Set CXX to one, or"):
        jit.load(make_spec())
    assert not list((cache / "building").iterdir())


def test_link_error_is_shown(cache):
    with pytest.raises(jit.BuildError, match="cannot find -lnosuchlibrary"):
        jit.load(make_spec(ldflags=("-lnosuchlibrary",)))


def test_logs_are_bounded(cache, monkeypatch):
    monkeypatch.setattr("jitfmha.jit.toolchain.failure_report._KEPT_LOGS", 2)
    for number in range(4):
        with pytest.raises(jit.BuildError):
            jit.load(make_spec(source=f"error{number}"))
    assert len(list((cache / "logs").iterdir())) == 2


def test_without_compiler_each_candidate_is_listed(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "my-compiler -O3")
    monkeypatch.setattr(host_cpp, "zig_program", lambda: None)
    with pytest.raises(jit.CompilerNotFound) as caught:
        jit.load(make_spec())
    for words in (
        *("CXX='my-compiler -O3': not found", "c++: ", "g++: ", "clang++: "),
        *("'ziglang' (not installed)", "apt install", "pip install 'ziglang>=0.17'"),
    ):
        assert words in str(caught.value)
    assert not jit.is_built(make_spec())


def test_without_compiler_a_finished_build_is_used(cache, monkeypatch, new_process):
    answer(make_spec())
    path = jit.build_log()[0].path
    new_process()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(host_cpp, "zig_program", lambda: None)
    assert jit.is_built(make_spec())
    assert answer(make_spec()) == 42
    assert jit.build_log()[0].path == path
    with pytest.raises(jit.CompilerNotFound):
        jit.load(make_spec(cflags=("-O3",)))


def test_temporary_files_of_a_compiler_lie_in_its_build(cache, tmp_path, fake_compiler):
    """The directory for temporary files may be full, which says nothing about the cache."""
    text = fake_compiler.path.read_text()
    fake_compiler.path.write_text(text.replace("echo compiling", 'echo "$TMPDIR"'))
    answer(make_spec())
    [folder] = fake_compiler.log.read_text().split()
    assert Path(folder).is_relative_to(cache / "building")


def test_torch_in_a_hostile_place_is_refused(cache, monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "library_paths", lambda: ["/opt/my torch/lib"])
    with pytest.raises(jit.BuildError, match="'/opt/my torch/lib'"):
        jit.load(make_spec())


def test_ninja_beside_the_interpreter_is_found(cache, tmp_path, monkeypatch):
    pytest.importorskip("ninja")
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("c++", "as", "ld", "sh", "sleep"):
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))
    assert answer(make_spec()) == 42


def test_compiler_that_was_upgraded_meanwhile(cache, fake_compiler):
    assert not jit.is_built(make_spec())  # the compiler was asked
    text = fake_compiler.path.read_text()
    version = 'if [ "$1" = --version ]; then echo new; exit; fi\n'
    fake_compiler.path.write_text(text.replace("exec", version + "exec"))
    answer(make_spec())
    [entry] = jit.cache_entries()
    assert "c++ (new)" in (entry.path / "meta.json").read_text()


def test_broken_library_is_no_traceback_from_ctypes(cache):
    source = (
        'extern "C" int missing_symbol();\nextern "C" int answer() { return missing_symbol(); }'
    )
    with pytest.raises(jit.BuildError, match="missing_symbol"):
        jit.load(make_spec(source=source))


@pytest.mark.parametrize("said_before", ["note", "fatal error", "kernel.cpp:3: error"])
def test_a_compiler_that_aborts_without_a_word(said_before):
    """Only that is said to be the disk's fault."""
    failure = compile_failure(
        f"FAILED: tiny\nc++ tiny.o -o tiny\n{said_before}: no more\nAborted\n"
    )
    assert isinstance(failure, OSError if said_before == "note" else CompileFailure)
