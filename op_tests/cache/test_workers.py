"""The processes of the scenarios: a signal reaches a worker, and nobody else."""

import signal
import time
from pathlib import Path

import pytest
from rigs.cache_faults.processes import Worker, wait_until


def worker(folder: Path, seconds: float) -> Worker:
    def work() -> dict[str, object]:
        time.sleep(seconds)
        return {"slept": seconds}

    return Worker(folder, work, {})


def test_signal_reaches_a_worker(tmp_path):
    sleeper = worker(tmp_path / "1", 60.0)
    sleeper.signal(signal.SIGKILL)
    assert sleeper.end(30.0).status == -signal.SIGKILL


@pytest.mark.parametrize("reaped_by", ["asking", "starting another", "nobody"])
@pytest.mark.parametrize("group", [False, True])
def test_a_worker_that_has_ended_gets_no_signal(tmp_path, group, reaped_by):
    """Its number may be another process's by then."""
    ended = worker(tmp_path / "1", 0.0)
    stat = Path(f"/proc/{ended.pid}/stat")
    assert wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    if reaped_by == "asking":
        assert not ended.is_running()
    elif reaped_by == "starting another":
        worker(tmp_path / "2", 0.0).end(30.0)
    ended.signal(signal.SIGKILL, group=group)
    ending = ended.end(30.0)
    assert ending.status == 0
    assert ending.report == {"slept": 0.0}
