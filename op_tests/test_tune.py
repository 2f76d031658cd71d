"""``tune`` on the CPU, in earnest: what it times and keeps, and what calls do from then on."""

import os
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_calls import fresh_calls
from measured_times import times_in
from torch import Tensor
from untyped import explain, fmha_fwd

from jitfmha.ahead import tune as ahead_tune
from jitfmha.ahead.profiles import PROFILES
from jitfmha.ahead.trial_call import trial_call
from jitfmha.ahead.tune import calls_of_profile
from jitfmha.planning.measured import Machine, Measurement, Variant, kind_of, machine_of
from jitfmha.planning.measured_file import forget, keep, kept, to_bytes

_KEYS = 2048
_SHAPE = f"heads=2,seqlen=1,seqlen_k={_KEYS},hdim=32,dtype=fp32"


@pytest.fixture(autouse=True)
def file(tmp_path: Path) -> Iterator[Path]:
    with times_in(tmp_path) as path:
        yield path


def drawn(rng: torch.Generator, keys: int = _KEYS) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(1, 1, 2, 32, generator=rng)
    k, v = (torch.randn(1, keys, 2, 32, generator=rng) for _ in range(2))
    return q, k, v


def test_what_is_measured_is_taken_and_told(run, rng):
    ended = run("tune", "--shapes", _SHAPE, "--device", "cpu", "--seconds", "0", "--json")
    assert ended.code == 0, ended.err
    (call,) = ended.json
    assert (call["seqlen_q"], call["seqlen_k"], call["failed"]) == (1, _KEYS, [])
    measured = call["measured"]
    assert {x["num_splits"] for x in measured} == {0, 1, 2, 4, 8, 16}
    threads = torch.get_num_threads()
    assert {x["threads"] for x in measured} == {0, *(n for n in (1, 2, 4, 8) if n < threads)}
    times = [x["microseconds"] for x in measured]
    assert times == sorted(times)
    assert times[0] > 0
    assert "[1/1]" in ended.err
    q, k, v = drawn(rng)
    told = explain(q, k, v)
    assert f"measured {times[0]:.4g} us" in str(told)
    quickest = [x for x in measured if x["microseconds"] == times[0]]  # of equal times any
    plan = told.plan
    assert (plan.num_splits, plan.threads) in [(x["num_splits"], x["threads"]) for x in quickest]
    near = str(explain(q, *drawn(rng, 3000)[1:]))
    assert "estimate" in near
    assert "measured" not in near.replace("by what was measured", "")
    assert "estimate" not in str(explain(q, *drawn(rng, 4 * _KEYS + 200)[1:]))
    with fresh_calls():
        asked = fmha_fwd(q, k, v, num_splits=plan.num_splits)
        assert torch.equal(fmha_fwd(q, k, v), asked)


def fixed(q: Tensor, k: Tensor, v: Tensor, **choice: int) -> None:
    """Say that a choice takes less than what the family would do."""
    told = explain(q, k, v)
    machine = machine_of(told.target)
    assert machine is not None
    base = told.plan.variant
    keep(
        Measurement(machine, kind_of(told.problem), 1, k.shape[1], variant, time)
        for variant, time in ((base, 9.0), (base._replace(**choice), 1.0))
    )


@pytest.mark.parametrize("num_splits", [1, 4])
def test_splits_that_were_measured_are_those_that_are_asked_for(rng, num_splits):
    """Bit for bit, and whatever the number of threads is."""
    q, k, v = drawn(rng)
    with fresh_calls():
        usual = fmha_fwd(q, k, v)
    fixed(q, k, v, num_splits=num_splits)
    threads = torch.get_num_threads()
    for count in (1, threads):
        torch.set_num_threads(count)
        try:
            with fresh_calls():
                tuned = fmha_fwd(q, k, v)
                asked = fmha_fwd(q, k, v, num_splits=num_splits)
                others = fmha_fwd(q, k, v, num_splits=2)
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(tuned, asked)
        assert not torch.equal(tuned, usual), "sums are taken in another order"
        assert not torch.equal(tuned, others), "what is asked for is done"
    forget()
    with fresh_calls():
        assert torch.equal(fmha_fwd(q, k, v), usual)


def test_a_loop_goes_from_what_was_measured_to_what_was_not(rng):
    """Lengths in one step with what was measured, near it, and far from it."""
    q, k, v = drawn(rng, 9000)
    fixed(q, k[:, :_KEYS], v[:, :_KEYS], num_splits=4)
    for keys, splits in ((400, 0), (600, 4), (2000, 4), (8100, 4), (9000, 0)):
        for first in (keys, 300, _KEYS):  # planned for, and met by a plan that is there
            with fresh_calls():
                fmha_fwd(q, k[:, :first], v[:, :first])
                out = fmha_fwd(q, k[:, :keys], v[:, :keys])
                asked = fmha_fwd(q, k[:, :keys], v[:, :keys], num_splits=splits)
                assert torch.equal(out, asked), (keys, first)


def busy_elsewhere() -> int:
    """Nanoseconds that other threads of this process have run."""
    own = threading.get_native_id()
    tasks = [x for x in os.listdir("/proc/self/task") if int(x) != own]
    files = (Path(f"/proc/self/task/{x}/schedstat").read_text().split()[0] for x in tasks)
    return sum(map(int, files))


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's schedstat")
def test_threads_that_were_measured_are_at_work(rng):
    if torch.get_num_threads() < 2:
        pytest.skip("needs two threads")
    q, k, v = drawn(rng, 1 << 15)

    def worked_elsewhere() -> int:
        with fresh_calls():
            fmha_fwd(q, k, v)
            before = busy_elsewhere()
            for _ in range(50):
                fmha_fwd(q, k, v)
            return busy_elsewhere() - before

    usual = worked_elsewhere()
    fixed(q, k, v, threads=1)
    assert worked_elsewhere() < usual / 4


@pytest.mark.parametrize("profile", PROFILES)
def test_calls_of_profiles(monkeypatch, profile):
    """They are those of the combinations, with tensors, and no others."""
    monkeypatch.setattr(ahead_tune, "_CPU_LENGTHS", ((4, 1, 9, 17), (4, 2, 1, 33)))
    calls = calls_of_profile(profile, "cpu")
    assert {(x.seqlen_q // (x.batch if x.mode == "gm1" else 1)) for x in calls} <= {9, 1}
    if profile == "inference":
        assert {(x.heads_q, x.heads_k) for x in calls} == {(4, 4), (4, 2)}
    for x in calls:
        made = trial_call(x, torch.device("cpu"))
        assert kind_of(made.problem) == kind_of(x.problem())
        assert made.problem.sizes[:2] == (x.seqlen_q, x.seqlen_k)


def test_a_disturbed_round_decides_nothing():
    """Rounds of what is quick but disturbed at first, what is not quick, and what is hopeless."""
    rounds = {"quick": iter((90.0, 1.0, 80.0, 1.0, 70.0, 1.0, 1.0)), "slow": 1.5, "hopeless": 2.5}
    clock: list[float] = []

    def launch(name: str) -> None:
        times = rounds[name]
        clock.append(times if isinstance(times, float) else next(times))

    def timed(run: Any) -> float:
        run()
        return clock[-1]

    names = {name: Variant("fake", name, "") for name in rounds}
    launches = {names[name]: partial(launch, name) for name in rounds}
    times = ahead_tune._interleaved(launches, timed, 0.0, torch.device("cpu"))
    assert {x.kernel: len(seconds) for x, seconds in times.items()} == {
        "quick": 5,
        "slow": 5,
        "hopeless": 3,
    }
    quartiles = {x.kernel: ahead_tune._first_quartile(y) for x, y in times.items()}
    assert quartiles == {"quick": 1.0, "slow": 1.5, "hopeless": 2.5}


# ---- The command ---------------------------------------------------------------------------------


def rows(count: int, **changes: Any) -> list[Measurement]:
    machine = Machine("somewhere else", "driver")
    variant = Variant("cpu", "kernel", "version")
    return [
        Measurement(machine, "kind", n, n, variant, 1.5)._replace(**changes)
        for n in range(1, count + 1)
    ]


def test_export_import_and_forget(run, tmp_path):
    keep(rows(3))
    exported = tmp_path / "times.json"
    ended = run("tune", "--export", exported)
    assert (ended.code, ended.out) == (0, f"wrote 3 measured times to {exported}\n")
    assert run("tune", "--forget").out == "forgot 3 measured times\n"
    assert kept() == []
    assert run("tune", "--forget", "--json").json == {"forgotten": 0}
    keep(rows(4, microseconds=7.0))
    ended = run("tune", "--import", exported, "--json")
    assert ended.code == 0
    assert (ended.json["imported"], ended.json["left_out"]) == (3, 0)
    assert {x.seqlen_q: x.microseconds for x in kept()} == {1: 1.5, 2: 1.5, 3: 1.5, 4: 7.0}


def test_what_does_not_fit_is_not_imported_and_told_in_one_line(run, tmp_path):
    file = tmp_path / "times.json"
    file.write_bytes(to_bytes(rows(2) + rows(1, microseconds=-1.0)))
    ended = run("tune", "--import", file)
    assert ended.code == 0
    (line,) = ended.err.splitlines()
    assert line.startswith("1 of 3 measured times are left out; the first: microseconds is -1.0")
    assert len(kept()) == 2
    file.write_text("no JSON")
    ended = run("tune", "--import", file)
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1
    assert "it is not JSON" in ended.err
    assert run("tune", "--import", tmp_path / "nowhere").code == 2
    assert len(kept()) == 2


def test_ctrl_c_keeps_what_is_measured_so_far(run, monkeypatch):
    seen: list[object] = []

    def interrupted(x: Any, device: torch.device) -> Any:
        seen.append(x)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return trial_call(x, device)

    monkeypatch.setattr(ahead_tune, "trial_call", interrupted)
    other = _SHAPE.replace("heads=2", "heads=4")
    ended = run("tune", "--shapes", _SHAPE, other, "--device", "cpu", "--seconds", "0")
    assert ended.code == 130
    assert {x.seqlen_k for x in kept()} == {_KEYS}
    assert {"heads 2/2" in x.kind for x in kept()} == {True}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--shapes", "seqlen=0"), "seqlen='0' is not a number"),
        (("--profile", "nothing"), "invalid choice: 'nothing'"),
        (("--seconds", "-1"), "--seconds must be from 0 to 3600"),
        (("--device", "MI300X"), "nothing can be measured on gfx942 MI300X"),
        (("--export", "a", "--import", __file__), "not allowed with"),
    ],
)
def test_usage_errors(run, argv, said):
    ended = run("tune", "--device", "cpu", *argv)
    assert ended.code == 2
    assert said in ended.err


def test_nothing_is_measured_where_cpu_tensors_are_emulated(run, monkeypatch):
    monkeypatch.setenv("JITFMHA_EMULATE", "gfx950")
    ended = run("tune", "--device", "cpu")
    assert ended.code == 2
    assert "the times of an emulator" in ended.err


@pytest.mark.parametrize("load", [0.5, 1.5])
def test_a_busy_machine_is_told_of(run, monkeypatch, load):
    monkeypatch.setattr(os, "getloadavg", lambda: (load * (os.cpu_count() or 1), 0.0, 0.0))
    ended = run("tune", "--shapes", _SHAPE, "--device", "cpu", "--seconds", "0")
    assert ("will not hold for a machine at rest" in ended.err) == (load > 1)


def test_a_call_that_nothing_serves_is_told_and_the_others_go_on(run, monkeypatch):
    def refused(*_: object) -> Mapping[str, object]:
        raise NotImplementedError("no kernel serves this call\nwith reasons")

    monkeypatch.setattr(ahead_tune, "plans_for", refused)
    ended = run("tune", "--shapes", _SHAPE, "--device", "cpu")
    assert ended.code == 1
    assert "mask none: fp32: NotImplementedError: no kernel serves this call\n" in ended.err
