"""Several processes at one cache. Forked, because importing torch takes longer than the tests."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rigs.cache_faults.processes import wait_until

from jitfmha import jit
from jitfmha.jit import loader, status
from jitfmha.jit.cache import owned_directory, turn
from jitfmha.jit.cache.owned_directory import OwnedDirectory, earlier_owner, owner_of
from jitfmha.jit.toolchain import cpp_extension, ninja

from .conftest import FakeCompiler, answer, make_spec

_FORK = multiprocessing.get_context("fork")


def start(work: Callable[[], object]) -> multiprocessing.process.BaseProcess:
    process = _FORK.Process(target=work, daemon=True)
    process.start()
    return process


def is_compiling(fake_compiler: FakeCompiler, count: int = 1) -> Callable[[], bool]:
    return lambda: fake_compiler.compiled() >= count


def start_build(
    fake_compiler: FakeCompiler, seconds: str, count: int = 1
) -> multiprocessing.process.BaseProcess:
    """Another process whose compiler runs, the one of this number."""
    fake_compiler.delay.write_text(seconds)
    # To ask a compiler who it is takes long on a busy machine: this process would come too late.
    jit.is_built(make_spec())
    builder = start(lambda: jit.load(make_spec()))
    assert wait_until(is_compiling(fake_compiler, count))
    return builder


def kill(builder: multiprocessing.process.BaseProcess) -> None:
    builder.kill()
    builder.join()


def processes_in(directory: Path) -> list[int]:
    pids = owned_directory._own_processes()
    return [pid for pid in pids if owned_directory._works_in(pid, os.path.realpath(directory))]


def test_one_who_waits_says_for_whom(cache, fake_compiler, monkeypatch, capfd):
    monkeypatch.setattr(turn, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(status, "PATIENCE_SECONDS", 3600.0)  # The builder is silent.
    builder = start_build(fake_compiler, "2")
    assert answer(make_spec()) == 42
    builder.join(30)
    assert jit.build_log()[0].how == "loaded"
    host = os.uname().nodename
    line = f"jitfmha: waiting for demo, which pid {builder.pid} on {host} is building ..."
    assert capfd.readouterr().err.splitlines().count(line) == 1


@pytest.mark.parametrize("ends_with_its_builder", [True, False])
def test_killed_builder_leaves_no_trace(ends_with_its_builder, cache, fake_compiler, monkeypatch):
    if not ends_with_its_builder:
        monkeypatch.setattr(ninja, "isolated_python", lambda: None)
    for round_ in range(1, 4):
        kill(start_build(fake_compiler, "60", round_))
    assert len(list((cache / "building").iterdir())) == 1
    if ends_with_its_builder:
        assert wait_until(lambda: not processes_in(cache / "building"))
    else:
        assert processes_in(cache / "building")
    fake_compiler.delay.unlink()
    started = time.monotonic()
    assert answer(make_spec()) == 42
    assert time.monotonic() - started < 50  # it waits for none of those who have gone
    assert not list((cache / "building").iterdir())
    assert not processes_in(cache / "building")


def test_threads_that_ask_at_once_load_once(cache, monkeypatch):
    used, entered = loader._used, []

    def used_slowly(spec: jit.BuildSpec, how: Callable[..., Any]) -> Any:
        entered.append(spec)
        time.sleep(0.3)
        return used(spec, how)

    monkeypatch.setattr(loader, "_used", used_slowly)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(jit.load, [make_spec()] * 2)
    assert first is second
    assert len(entered) == 1


def test_fork_during_a_build(cache, fake_compiler):
    """The child has no use for the locks and the environment of the parent's build."""
    fake_compiler.delay.write_text("0.5")
    thread = threading.Thread(target=lambda: jit.load(make_spec()))
    thread.start()
    assert wait_until(is_compiling(fake_compiler))

    def work() -> None:
        unchanged = "TORCH_NO_COMPILER_WRAPPER" not in os.environ
        os._exit(0 if unchanged and answer(make_spec()) == 42 else 1)

    child = start(work)
    child.join(30)
    thread.join()
    assert child.exitcode == 0
    assert fake_compiler.compiled() == 1


def test_child_does_not_keep_the_lock_of_a_killed_parent(cache, fake_compiler, tmp_path):
    fake_compiler.delay.write_text("60")
    child_pid = tmp_path / "child"

    def work() -> None:
        threading.Thread(target=lambda: jit.load(make_spec()), daemon=True).start()
        assert wait_until(is_compiling(fake_compiler))
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        child_pid.write_text(str(child))
        time.sleep(60)

    builder = start(work)
    assert wait_until(lambda: child_pid.exists() and child_pid.read_text() != "")
    kill(builder)
    fake_compiler.delay.unlink()
    try:
        assert answer(make_spec()) == 42
        assert not list((cache / "building").iterdir())
    finally:
        os.kill(int(child_pid.read_text()), signal.SIGKILL)


def test_compilers_run_while_cpp_extension_is_imported(cache, fake_compiler, monkeypatch):
    imported = cpp_extension._imported_cpp_extension

    def imported_late() -> Any:
        assert wait_until(is_compiling(fake_compiler))
        return imported()

    monkeypatch.setattr(cpp_extension, "_imported_cpp_extension", imported_late)
    for jobs in ("\u0663", "\u00b2"):  # a three that only Python reads, and what it does not read
        monkeypatch.setenv("MAX_JOBS", jobs)
        assert answer(make_spec(name=f"demo_{ord(jobs)}")) == 42
        assert os.environ["MAX_JOBS"] == jobs
    assert fake_compiler.compiled() == 2


def test_objects_of_failed_compilers_are_not_taken(cache, fake_compiler):
    script = fake_compiler.path.read_text()
    early = 'case "$PWD" in */begun) for last; do :; done; echo rubbish > "$last"; exit 1;; esac\n'
    fake_compiler.path.write_text(script.replace("exec", f"{early}exec"))
    assert answer(make_spec()) == 42


def test_without_locks_nobody_waits_for_the_dead(cache, fake_compiler, monkeypatch):
    monkeypatch.setattr(turn, "_locked", lambda _path, _held: None)
    kill(start_build(fake_compiler, "60"))
    fake_compiler.delay.unlink()
    assert answer(make_spec()) == 42
    assert fake_compiler.compiled() == 2


def test_who_came_earlier(tmp_path, monkeypatch):
    with OwnedDirectory(tmp_path, "a") as first, OwnedDirectory(tmp_path, "a") as second:
        os.utime(first.path / "owner", (1000, 1000))
        os.utime(second.path / "owner", (1001, 1001))
        os.utime(first.path / "owner", (1001, 1001))
        waits = [earlier_owner(own, "a") is not None for own in (first, second)]
        assert sorted(waits) == [False, True], "of two at the same moment one goes first"
        os.utime(first.path / "owner", (1000, 1000))
        with OwnedDirectory(tmp_path, "b") as other:
            os.utime(other.path / "owner", (1, 1))
            assert earlier_owner(first, "a") is None
            assert earlier_owner(second, "a") == owner_of(tmp_path, "a")
        # One who cannot be asked is waited for, but not for ever.
        owner = (first.path / "owner").read_text()
        (first.path / "owner").write_text(owner.replace(f'"pid": {os.getpid()}', '"pid": 4194304'))
        os.utime(first.path / "owner", (1000, 1000))
        assert earlier_owner(second, "a") is None
        monkeypatch.setattr(owned_directory, "_boot", lambda: "another machine")
        assert earlier_owner(second, "a") is not None
        os.utime(second.path / "owner", (2000, 2000))
        assert earlier_owner(second, "a") is None


def test_without_locks_others_of_the_same_moment_are_seen(tmp_path, monkeypatch):
    with ExitStack() as held:

        def others_come(_seconds):
            other = held.enter_context(OwnedDirectory(tmp_path, "a"))
            os.utime(other.path / "owner", (1, time.time() - 1))

        monkeypatch.setattr(turn.time, "sleep", others_come)
        directory, key = SimpleNamespace(building=tmp_path), SimpleNamespace(directory_name="a")
        assert not turn._first_to_come(directory, key, held)()


def test_without_locks_the_first_to_publish_wins(cache, fake_compiler, monkeypatch):
    monkeypatch.setattr(turn, "_locked", lambda _path, _held: None)
    monkeypatch.setattr(turn, "earlier_owner", lambda _own, _prefix: None)
    other = start_build(fake_compiler, "2")
    assert answer(make_spec()) == 42
    other.join(30)
    assert other.exitcode == 0
    assert fake_compiler.compiled() == 2
    assert len(list((cache / "entries").iterdir())) == 1


def test_one_who_waited_too_long_builds_alone(cache, fake_compiler, monkeypatch, capfd):
    monkeypatch.setattr(turn, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(turn, "_GIVE_UP_SECONDS", 0.3)
    builder = start_build(fake_compiler, "60")
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGSTOP)
    fake_compiler.delay.unlink()
    try:
        assert answer(make_spec()) == 42
        assert "building it without waiting any longer" in capfd.readouterr().err
    finally:
        kill(builder)
    owned_directory.sweep(cache / "building")
    assert not list((cache / "building").iterdir())
