"""The faults are real: what is preloaded reaches a process, and the report shows what it did."""

import errno
import time
from collections.abc import Iterator, Mapping

import pytest
from rigs.cache_faults.callers import Call, Scratch, new_scratch, shared_callers
from rigs.cache_faults.faulty_system import (
    FileFault,
    faulty_system,
    foreign_owner,
    without_locks,
    wrong_clock,
)
from subprocesses import run_python


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    with new_scratch() as scratch:
        yield scratch


def run(code: str, environment: Mapping[str, str]) -> str:
    preloaded = {**environment, "LD_PRELOAD": str(faulty_system())}
    return run_python("-c", code, **preloaded).stdout.strip()


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS])
def test_locks(error):
    code = """
import fcntl
try:
    fcntl.flock(0, fcntl.LOCK_SH)
except OSError as error:
    print(error.errno)
"""
    assert run(code, without_locks(error)) == str(error)


def test_clock():
    code = "import time; print(*(int(time.time()) for _ in range(4)))"
    readings = [int(reading) - time.time() for reading in run(code, wrong_clock(5000, 0)).split()]
    # Python reads the clock before, too, so that the first of ours may be either.
    near = sorted(round(reading / 1000) for reading in readings)
    assert near == [0, 0, 5, 5]


def test_owner(tmp_path):
    code = f"""
import os
print(os.lstat({str(tmp_path)!r}).st_uid, os.stat({str(tmp_path.parent)!r}).st_uid)
"""
    told = run(code, foreign_owner(tmp_path, 4321)).split()
    assert told == ["4321", str(tmp_path.parent.stat().st_uid)]


@pytest.mark.parametrize("stays", [False, True])
def test_files(stays, tmp_path):
    (tmp_path / "below").mkdir()
    fault = FileFault((tmp_path / "below",), tmp_path / "counter", 3, errno.EDQUOT, stays)
    code = f"""
import os
def attempt(function, *arguments):
    try:
        function(*arguments)
        return "done"
    except OSError as error:
        return error.errno
print(*(attempt(os.mkdir, {str(tmp_path)!r} + f"/below/{{n}}") for n in range(4)))
print(attempt(os.mkdir, {str(tmp_path)!r} + "/beside"))
"""
    last = errno.EDQUOT if stays else "done"
    assert run(code, fault.environment()) == f"done done {errno.EDQUOT} {last}\ndone"
    assert fault.operations() == 4
    assert fault.what_failed() == f"mkdir {tmp_path}/below/2"


def test_faults_reach_the_compiler(scratch):
    """Every operation of a caller is far less than every one of those that it starts."""
    fault = FileFault((scratch.cache / "v1" / "building",), scratch.root / "counter", 0, 0)
    answer = shared_callers().call(Call({**scratch.environment, **fault.environment()}))
    assert answer.right
    assert fault.operations() > 50


def test_a_caller_that_fails_is_reported(scratch):
    environment = {**scratch.environment, "JITFMHA_CACHE_LIMIT": "nonsense"}
    answer = shared_callers().call(Call(environment))
    assert not answer.right
    assert answer.error == "CacheError"
    assert "nonsense" in answer.message


def test_warnings_are_counted(scratch):
    environment = {**scratch.environment, "CXX": "nowhere"}
    answer = shared_callers().call(Call(environment))
    assert answer.right
    assert answer.how == "built"
    assert len(answer.warnings) == 1
    assert "CXX='nowhere'" in answer.warnings[0]


def test_permissions_bind_an_ordinary_caller(scratch):
    scratch.cache.mkdir(mode=0o500)
    answer = shared_callers().call(Call(scratch.environment, is_ordinary=True))
    assert len(answer.warnings) == 1
    assert not list(scratch.cache.iterdir())
