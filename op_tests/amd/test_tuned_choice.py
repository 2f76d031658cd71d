"""``tune`` on an AMD GPU whose events give made-up times, and what calls take from then on."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from measured_times import read_anew, times_in
from rigs.recording_runtime import Launch, RecordingRuntime
from untyped import explain, fmha_bwd, fmha_fwd

from jitfmha import BuildError, HipError, emulate
from jitfmha.ahead.combination import Combination
from jitfmha.ahead.tune import TunedCall, tune
from jitfmha.amd.manifest import KernelRow
from jitfmha.kernels.compiled.family import ForwardPlan
from jitfmha.planning.measured_file import kept
from jitfmha.planning.target import AmdTarget
from jitfmha.problem.mask import CAUSAL_MASK


@pytest.fixture(autouse=True)
def file(tmp_path: Path) -> Iterator[Path]:
    with times_in(tmp_path) as path:
        yield path


class MadeUp:
    """Milliseconds of a launch, drawn for each kernel and grid; what combines splits takes none."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.times: dict[tuple[str, tuple[int, ...]], float] = {}

    def __call__(self, launch: Launch) -> float:
        name = launch.symbol.decode()
        if "combine" in name:
            return 0.0
        return self.times.setdefault((name, tuple(launch.grid)), self._draw.uniform(0.01, 0.015))


@pytest.fixture
def made_up(runtime: RecordingRuntime, seed: int) -> MadeUp:
    made_up = MadeUp(seed)
    runtime.take(made_up)
    return made_up


def combination(mode: Any = "gm0", batch: int = 1, seqlen_q: int = 1, **more: Any) -> Combination:
    packs = batch if mode == "gm1" else 1
    return Combination(
        *("bf16", "bf16", 128, 128),
        mode=mode,
        batch=batch,
        heads_q=8,
        heads_k=8,
        seqlen_q=seqlen_q * packs,
        seqlen_k=2048 * packs,
        **more,
    )


def tuned(runtime: RecordingRuntime, target: AmdTarget, x: Combination) -> TunedCall:
    with runtime.stands_for(target):
        (done,) = tune([x], "cpu", seconds=0.0)
    assert isinstance(done, TunedCall), done
    return done


def call(seqlen_k: int = 2048, seqlen_q: int = 1, run: Callable[..., Any] = fmha_fwd) -> Any:
    q, k = (torch.zeros(1, n, 8, 128, dtype=torch.bfloat16) for n in (seqlen_q, seqlen_k))
    return run(q, k, k)


@pytest.mark.parametrize("chip", ["MI300X", "MI355X"])
def test_the_quickest_is_taken_from_then_on(runtime, made_up, chip):
    target = runtime.target(chip)
    done = tuned(runtime, target, combination())
    names = {(x.family, x.kernel) for x in done.measured}
    assert {family for family, _ in names} == {"ready", "compiled"}
    assert len(names) >= 3, "every tile is timed"
    of_kernels = {name: set[int]() for name, _ in made_up.times}
    for name, grid in made_up.times:
        of_kernels[name].add(grid[2])
    assert len(of_kernels) == len(names)
    assert all({1, 2, 4, 8, 16} <= splits for splits in of_kernels.values()), of_kernels
    assert len({x.version for x in done.measured}) == len(names)
    assert done.failed == ()
    assert done.before in done.measured
    assert done.gain is not None
    assert done.gain >= 1
    # By what was made up of kernel and grid, whoever launches these.
    (name, grid), milliseconds = min(made_up.times.items(), key=lambda item: item[1])
    best, seconds = next(iter(done.measured.items()))
    assert seconds == pytest.approx(milliseconds / 1e3, rel=1e-3)
    runtime.reset()
    with runtime.stands_for(runtime.target(chip)):
        told = call(run=explain)
        call()
        call()
    assert told.plan.kernel == best.kernel
    # Or it is the plan that chooses as many by itself, whose launches are the same.
    assert told.plan.num_splits in (0, best.num_splits)
    assert f"measured {seconds * 1e6:.4g} us" in str(told)
    launched = [x for x in runtime.launches() if b"combine" not in x.symbol]
    assert [(x.symbol.decode(), tuple(x.grid)) for x in launched] == [(name, grid)] * 2


@pytest.mark.parametrize(
    "x",
    [
        combination("gm1", batch=3),
        combination(seqlen_q=300, mask=CAUSAL_MASK),
        combination(seqlen_q=300, direction="backward"),
        combination("gm1", batch=2, seqlen_q=200, direction="backward"),
    ],
    ids=lambda x: f"{x.mode}-{x.direction}-{x.mask}",
)
def test_other_calls(runtime, made_up, x):
    target = runtime.target("MI300X")
    done = tuned(runtime, target, x)
    assert len(done.measured) >= 2
    assert done.failed == ()
    again = tuned(runtime, runtime.target("MI300X"), x)
    assert next(iter(again.measured)) == again.before
    assert again.gain == 1


def test_backward_takes_what_was_measured(runtime, made_up):
    """On gfx950 two kernels that come ready differ in their keys."""
    x = combination(seqlen_q=300, direction="backward")
    done = tuned(runtime, runtime.target("MI355X"), x)
    assert [x.family for x in done.measured].count("ready") == 2
    runtime.reset()
    q, k = (torch.zeros(1, n, 8, 128, dtype=torch.bfloat16) for n in (300, 2048))
    with runtime.stands_for(runtime.target("MI355X")):
        fmha_bwd(q, q, k, k, q, torch.zeros(1, 8, 300))
    launched = {x.symbol.decode() for x in runtime.launches()}
    best = next(iter(done.measured))
    assert {f"{best.kernel}_dq", best.kernel} & launched
    assert all(name.startswith(best.kernel) for name in launched), (best, launched)


def test_neighbours_are_corrected(runtime, made_up):
    """An estimate of a neighbour is off as that of what was measured is; far away none is."""
    target = runtime.target("MI300X")
    with runtime.stands_for(target):
        before = {n: call(n, run=explain).to_dict()["estimates"] for n in (2048, 4096, 16384)}
    compiled = tuned(runtime, target, combination()).measured
    with runtime.stands_for(runtime.target("MI300X")):
        near, far = call(4096, run=explain), call(16384, run=explain)
    assert [x for x in far.to_dict()["estimates"] if x["microseconds"]] == before[16384]
    assert "estimate" in str(near)
    assert not any(x["measured"] for x in near.to_dict()["estimates"])
    at, there = (
        next(x for x in before[n] if x["family"] == "compiled")["microseconds"]
        for n in (2048, 4096)
    )
    measured = next(s for x, s in compiled.items() if x.family == "compiled" and not x.num_splits)
    corrected = next(
        x["microseconds"]
        for x in near.to_dict()["estimates"]
        if x["family"] == "compiled" and x["num_splits"] == 0
    )
    assert corrected == pytest.approx(there * measured * 1e6 / at)


def changed_rows(file: Path, **changes: str) -> None:
    document = json.loads(file.read_bytes())
    for row in document["measurements"]:
        row["machine"] |= {x: v for x, v in changes.items() if x in row["machine"]}
        row["variant"] |= {x: v for x, v in changes.items() if x in row["variant"]}
    file.write_text(json.dumps(document))
    read_anew()


@pytest.mark.parametrize(
    "changes",
    [
        {"chip": "MI300X, 38 compute units"},
        {"driver": "another"},
        {"version": "0" * 64},
        {"kernel": "another"},
        {"family": "cpu"},
    ],
    ids=lambda x: next(iter(x)),
)
def test_times_of_something_else_count_for_nothing(runtime, made_up, file, changes):
    with runtime.stands_for(runtime.target("MI300X")):
        before = call(run=explain)
    tuned(runtime, runtime.target("MI300X"), combination())
    changed_rows(file, **changes)
    with runtime.stands_for(runtime.target("MI300X")):
        after = call(run=explain)
    assert after.plan.kernel == before.plan.kernel
    assert not any(x["measured"] for x in after.to_dict()["estimates"])


def test_splits_that_a_kernel_cannot_make_are_not_made(runtime, made_up, file, monkeypatch):
    """A file may say anything; a kernel of AITER's form is not launched with splits for that."""
    tuned(runtime, runtime.target("MI300X"), combination())
    monkeypatch.setattr(KernelRow, "can_split_keys", False)
    with runtime.stands_for(runtime.target("MI300X")):
        contest = call(run=explain).estimates
    ready = [x.plan for x in contest if x.plan.family == "ready"]
    assert ready
    assert not any(plan.num_splits for plan in ready)


def test_what_cannot_be_built_is_left_out(runtime, made_up, monkeypatch):
    def bind(plan: ForwardPlan) -> None:
        raise BuildError("no compiler\nat all")

    monkeypatch.setattr(ForwardPlan, "bind", bind)
    done = tuned(runtime, runtime.target("MI300X"), combination())
    assert {x.family for x in done.measured} == {"ready"}
    assert set(done.failed) == {f"{done.before.kernel}: BuildError: no compiler"}


def test_an_error_of_the_gpu_ends_it(runtime, made_up):
    """What was kept before is still there."""
    tuned(runtime, runtime.target("MI300X"), combination())
    count = len(kept())
    runtime.fail("hipEventSynchronize", 999)
    with pytest.raises(HipError, match="hipEventSynchronize failed: the recorder was told to fail"):
        tuned(runtime, runtime.target("MI300X"), combination(seqlen_q=7))
    runtime.fail("hipEventSynchronize", 0)
    assert len(kept()) == count


def test_nothing_is_measured_on_the_emulator(run):
    with emulate("gfx950"), pytest.raises(ValueError, match="times of an emulator"):
        next(tune([combination()], "cpu"))
    ended = run("tune", "--device", "gfx950")
    assert ended.code == 2
    assert "nothing can be measured on gfx950" in ended.err
    assert kept() == []


def test_nothing_is_measured_while_launches_are_written_down(
    runtime, made_up, monkeypatch, tmp_path
):
    """Their choice is that of calls which are not."""
    tuned(runtime, runtime.target("MI300X"), combination())
    monkeypatch.setenv("JITFMHA_RECORD", str(tmp_path))
    target = runtime.target("MI300X")
    with runtime.stands_for(target):
        assert any(x.time.is_measured for x in call(run=explain).estimates)
        with pytest.raises(ValueError, match="JITFMHA_RECORD"):
            next(tune([combination()], "cpu"))


def test_calls_of_emulated_gpus_look_nothing_up(runtime, made_up):
    tuned(runtime, runtime.target("MI300X"), combination())
    with emulate("gfx942"):
        assert not any(x.time.is_measured for x in call(run=explain).estimates)
