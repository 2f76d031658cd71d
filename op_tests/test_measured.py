"""Measured times: the file that has them, and how they choose among plans."""

import json
import math
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from measured_times import read_anew, times_in
from subprocesses import run_forked
from untyped import explain

from jitfmha import emulate
from jitfmha.planning import measured_file
from jitfmha.planning.absent import absent_target
from jitfmha.planning.level import LEVEL
from jitfmha.planning.measured import (
    Lengths,
    Machine,
    Measurement,
    Variant,
    kind_of,
    machine_of,
    nearest,
)
from jitfmha.planning.measured_file import forget, from_bytes, keep, kept, measured_of, to_bytes
from jitfmha.planning.plan import Contest, Launch, Plan, Time, splits_to_time
from jitfmha.planning.target import cpu_target
from jitfmha.problem.problem import PlainSizes, Problem


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    with times_in(tmp_path) as path:
        yield path


def problem_of(seqlen_q: int = 1, seqlen_k: int = 2048, **options: Any) -> Problem:
    q, k = (torch.empty(1, n, 2, 64, device="meta") for n in (seqlen_q, seqlen_k))
    return explain(q, k, k, device="cpu", **options).problem


def drawn_measurement(draw: random.Random) -> Measurement:
    variant = Variant("cpu", f"kernel {draw.randrange(3)}", "abc", draw.randrange(3), 0)
    lengths = draw.randrange(1, 4), draw.randrange(1, 4)
    return Measurement(Machine("chip", "driver"), "kind", *lengths, variant, draw.uniform(1, 99))


# ---- The file ------------------------------------------------------------------------------------


def test_what_is_kept_is_read_and_the_last_time_counts(file, seed):
    draw = random.Random(seed)
    rows = [drawn_measurement(draw) for _ in range(100)]
    expected = {}
    for at in range(0, 100, 10):
        keep(rows[at : at + 10])
        expected |= {x.of: x for x in rows[at : at + 10]}
        assert {x.of: x for x in kept()} == expected
    assert file.stat().st_mode & 0o777 == 0o600
    assert from_bytes(file.read_bytes()) == (kept(), [])
    assert forget() == len(expected)
    assert kept() == []
    assert not file.exists()


def test_what_would_not_be_read_is_not_kept(file):
    rows = from_bytes(_ROW)[0]
    keep(rows)
    with pytest.raises(ValueError, match="microseconds is 0"):
        keep([rows[0]._replace(microseconds=0.0)])
    assert kept() == rows


def test_processes_that_keep_at_one_moment_lose_nothing(file, tmp_path):
    """Each adds its own rows, one by one, and both begin together."""
    program = """
import sys
from pathlib import Path
from measured_times import times_in
from jitfmha.planning.measured import Machine, Measurement, Variant
from jitfmha.planning.measured_file import keep
folder, name = Path(sys.argv[1]), sys.argv[2]
(folder / f"begins-{name}").touch()
while len(list(folder.glob("begins-*"))) < 2:
    pass
with times_in(folder):
    for n in range(1, 21):
        variant = Variant("cpu", name, "", 0, 0)
        keep([Measurement(Machine("chip", "driver"), "kind", n, n, variant, 1.0)])
"""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", program, str(tmp_path)]
    running = [subprocess.Popen([*command, name], cwd=here) for name in ("first", "second")]
    assert [each.wait(120) for each in running] == [0, 0]
    assert len(kept()) == 40


_ROW = to_bytes([Measurement(Machine("c", "d"), "kind", 1, 2, Variant("f", "k", "v"), 3.5)])


def changed(path: str, value: Any) -> bytes:
    document = json.loads(_ROW)
    *way, last = path.split(".")
    place = document["measurements"][0]
    for name in way:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("microseconds", "3", r"measurements\[0\]\.microseconds is '3', expected float"),
        ("microseconds", 0.0, "microseconds is 0.0"),
        ("microseconds", -1.0, "microseconds is -1.0"),
        ("microseconds", math.nan, "microseconds is nan"),
        ("microseconds", math.inf, "microseconds is inf"),
        ("seqlen_q", 0, "seqlen_q is 0"),
        ("seqlen_k", 1 << 50, "seqlen_k is"),
        ("seqlen_k", 2.0, "seqlen_k is 2.0, expected int"),
        ("variant.num_splits", 129, "num_splits is 129, expected 0 to 128"),
        ("variant.num_splits", -1, "num_splits is -1"),
        ("variant.threads", 1 << 40, "threads is"),
        ("variant.kernel", "k" * 501, "a name is"),
        ("kind", "two\nlines", "a name is 'two"),
        ("machine", "MI300X", "machine is 'MI300X', not an object"),
        ("machine.chip", None, "machine.chip is None, expected str"),
        ("machine.driver", ..., "machine.driver is missing"),
        ("more", 1, "more is not known"),
    ],
)
def test_rows_that_do_not_fit_are_left_out_with_one_line(file, path, value, said):
    good = json.loads(_ROW)["measurements"]
    document = json.loads(changed(path, value))
    document["measurements"] += good
    content = json.dumps(document).encode()
    rows, wrong = from_bytes(content)
    assert len(rows) == 1
    assert len(wrong) == 1
    file.write_bytes(content)
    with pytest.warns(RuntimeWarning, match=said) as warned:
        assert kept() == rows
    (warning,) = warned
    text = str(warning.message)
    assert "1 of 2 measured times are left out" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not an object"),
        (b'{"format": "jitfmha-measured-0", "measurements": []}', "jitfmha-measured-0"),
        (b'{"measurements": []}', "format is missing"),
        (b'{"format": "jitfmha-measured-1", "measurements": {}}', "measurements is {}"),
        (_ROW[:-20], "not JSON"),
    ],
)
def test_what_is_no_such_file_is_not_used_with_one_line(file, content, said):
    file.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="is not used") as warned:
        found = [measured_of(problem_of(), cpu_target()) for _ in range(2)]
    assert found == [None, None]
    (warning,) = warned
    assert said in str(warning.message)
    assert "\n" not in str(warning.message)
    with pytest.warns(RuntimeWarning, match="is not used"):
        keep(from_bytes(_ROW)[0])  # which replaces it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(kept()) == 1


def test_what_is_not_a_file_is_not_read(file):
    file.mkdir()
    assert kept() == []


def test_it_is_read_once(file, monkeypatch):
    seen: list[Path] = []
    read = measured_file.read_regular_file
    monkeypatch.setattr(
        measured_file, "read_regular_file", lambda path, most: seen.append(path) or read(path, most)
    )
    for n in (1, 2, 3):
        measured_of(problem_of(n), cpu_target())
    assert seen == [file]


def test_it_lies_beside_the_cache(tmp_path):
    """Also when that is cleared. In a cache that others may write to nobody looks."""
    program = """
from jitfmha.jit import cache_clear
from jitfmha.planning.measured import Machine, Measurement, Variant
from jitfmha.planning.measured_file import keep, kept
print(keep([Measurement(Machine("c", "d"), "kind", 1, 2, Variant("f", "k", "v"), 3.5)]))
cache_clear()
print(len(kept()))
"""
    cache = tmp_path / "cache"
    environment = {"JITFMHA_CACHE_DIR": str(cache)}
    lines = run_forked("-c", program, **environment).stdout.splitlines()
    assert lines == [str(cache / "v1" / "measured.json"), "1"]
    (cache / "v1").chmod(0o777)
    program = "from jitfmha.planning.measured_file import kept; print(kept())"
    assert run_forked("-c", program, **environment).stdout == "[]\n"


# ---- What times are kept by ----------------------------------------------------------------------


def test_kinds_differ_in_all_but_lengths():
    kinds = [
        problem_of(),
        problem_of(mask="causal"),
        problem_of(window_size=(7, 0)),
        problem_of(return_lse=True),
        problem_of(logit_softcap=3.0),
        problem_of(alibi_slopes=torch.empty(2, device="meta")),
        problem_of()._replace(batch=2),
        problem_of()._replace(heads_q=4),
        problem_of()._replace(heads_k=1),
        problem_of()._replace(hdim_q=32),
        problem_of()._replace(hdim_v=32),
        problem_of()._replace(mode="gm1"),
        problem_of()._replace(dtype="bf16"),
        problem_of()._replace(kv_dtype="int8"),
        problem_of()._replace(bf16_cvt="rtz"),
        problem_of()._replace(has_v_at_k=True),
        problem_of()._replace(atomic_fp32=True),
    ]
    assert len({kind_of(problem) for problem in kinds}) == len(kinds)
    assert kind_of(problem_of(5, 6)) == kind_of(problem_of())


def test_an_emulator_and_a_gpu_that_is_not_here_are_no_machine():
    x = torch.empty(1, 4, 2, 64, dtype=torch.bfloat16)
    with emulate("gfx942"):
        assert machine_of(explain(x, x, x).target) is None
    absent = absent_target("MI300X")
    assert absent is not None
    assert machine_of(absent) is None
    assert machine_of(cpu_target()) is not None


def keep_for(problem: Problem, seconds: Mapping[Lengths, Mapping[Variant, float]]) -> None:
    machine = machine_of(cpu_target())
    assert machine is not None
    keep(
        Measurement(machine, kind_of(problem), *lengths, variant, 1e6 * x)
        for lengths, of_variants in seconds.items()
        for variant, x in of_variants.items()
    )


@pytest.mark.parametrize(
    "told", ["num_splits", "is_deterministic", "is_paged", "has_split_results"]
)
def test_where_the_call_decides_nothing_measured_does(file, told):
    variant = Variant("cpu", "kernel", "")
    for problem in (problem_of(), problem_of()._replace(**{told: 2})):
        keep_for(problem, {(1, 2048): {variant: 0.5}})
    assert measured_of(problem_of(), cpu_target()) == {(1, 2048): {variant: 0.5}}
    assert measured_of(problem_of()._replace(**{told: 2}), cpu_target()) is None
    assert measured_of(problem_of(mask="causal"), cpu_target()) is None


def test_splits_that_are_timed():
    assert [splits_to_time(n) for n in (0, 127, 128, 511, 512)] == [(), (), (1,), (1, 2), (1, 2, 4)]
    assert splits_to_time(1 << 30)[-1] == 128


# ---- Choice --------------------------------------------------------------------------------------


class Estimated(Plan):
    """A plan that takes so many seconds for each key, or of which nobody knows."""

    def __init__(
        self, kernel: str, of_key: float | None, splits: int = 0, variant_of: Plan | None = None
    ) -> None:
        self.problem = problem_of()
        self.family, self.kernel, self.source = "fake", kernel, "nowhere"
        self.of_key, self.num_splits, self.variant_of = of_key, splits, variant_of

    specs = ()

    def remarks(self) -> list[str]:
        return []

    def bind(self) -> None:
        raise AssertionError

    def seconds(self, seqlen_q: int, seqlen_k: int) -> float | None:
        return None if self.of_key is None else self.of_key * seqlen_q * seqlen_k

    def launch_for(self, sizes: PlainSizes) -> Launch:
        raise AssertionError


class Free(Estimated):
    """A plan whose kernel follows from the lengths."""

    variant = None


def seen(times: Mapping[Plan, float]) -> dict[Variant, float]:
    assert None not in {plan.variant for plan in times}
    return {plan.variant: x for plan, x in times.items() if plan.variant}


def test_nearest_lengths():
    lengths = {(1, 2048): {}, (1, 16384): {}, (512, 512): {}}
    for given, expected in {
        (1, 2048): (1, 2048),
        (1, 4096): (1, 2048),
        (1, 8191): (1, 16384),
        (2, 4096): (1, 2048),
        (1, 512): (1, 2048),
        (1, 500): None,
        (2, 500): None,
        (256, 300): (512, 512),
        (1, 65536): (1, 16384),
        (1, 65568): None,
        (4, 2049): None,
        (0, 2048): (1, 2048),
    }.items():
        assert nearest(lengths, *given) == expected, given
    assert nearest({}, 1, 1) is None


def test_measured_times_choose_and_correct_estimates():
    a, b = Estimated("a", 1e-9), Estimated("b", 1.5e-9)
    assert Contest((a, b)).best(1, 2048) is a
    at = 2048
    contest = Contest((a, b), {(1, at): seen({a: 4e-9 * at, b: 3e-9 * at})})
    assert contest.times(1, at) == (Time(4e-9 * at, True), Time(3e-9 * at, True))
    assert contest.best(1, at) is b
    near = contest.times(1, 2 * at)
    assert not any(each.is_measured for each in near)
    assert [each.seconds for each in near] == pytest.approx([8e-9 * at, 6e-9 * at])
    assert contest.best(1, 2 * at) is b
    # What nothing near was measured of is estimated as it always was.
    assert contest.times(1, 5 * at) == (Time(1e-9 * 5 * at), Time(1.5e-9 * 5 * at))
    assert contest.best(1, 5 * at) is a


def test_lengths_of_one_step_are_measured():
    """As the choice is remembered by steps: of 128 keys here."""
    a = Estimated("a", 1e-9)
    b = Estimated("b", 1e-9)
    contest = Contest((a, b), {(1, 2500): seen({a: 2.0, b: 1.0})})
    assert [contest.times(1, n)[1].is_measured for n in (2432, 2433, 2500, 2560, 2561)] == [
        False,
        *[True] * 3,
        False,
    ]


def test_what_was_not_measured_is_as_far_off_as_what_was():
    """Else it would be taken because nobody knows better."""
    a, b, c = Estimated("a", 2e-9), Estimated("b", 1e-9), Estimated("c", 1e-9)
    contest = Contest((a, b, c), {(1, 2048): seen({a: 3 * 2e-9 * 2048, b: 5 * 1e-9 * 2048})})
    assert contest.times(1, 2048)[2] == Time(pytest.approx(4 * 1e-9 * 2048))
    assert contest.times(1, 4096)[2] == Time(pytest.approx(4 * 1e-9 * 4096))
    assert contest.best(1, 2048) is c


def test_variants_take_part_where_they_are_measured_alone():
    base = Estimated("a", 1e-9)
    two, four = (Estimated("a", 1e-9, n, base) for n in (2, 4))
    times = {(1, 2048): seen({base: 3.0, two: 2.0}), (1, 16384): seen({base: 3.0, four: 2.0})}
    contest = Contest((base, two, four), times)
    assert contest.times(1, 2048) == (Time(3.0, True), Time(2.0, True), Time(None))
    assert contest.best(1, 2048) is two
    assert contest.best(1, 16384) is four
    assert contest.times(1, 100) == (Time(pytest.approx(128e-9)), Time(None), Time(None))
    assert contest.best(1, 100) is base


def test_variants_stand_for_a_plan_whose_kernel_follows_from_lengths():
    base = Free("a", 1e-12)
    one, two = (Estimated("a", 1e-9, n, base) for n in (1, 2))
    contest = Contest((base, one, two), {(1, 2048): seen({one: 3.0, two: 2.0})})
    assert contest.times(1, 2048) == (Time(None), Time(3.0, True), Time(2.0, True))
    assert contest.best(1, 2048) is two
    assert contest.best(1, 4096) is two
    assert contest.best(1, 64) is base


def test_without_estimates_times_go_with_the_products():
    base = Estimated("a", None)
    other = Estimated("a", None, 2, base)
    contest = Contest((base, other), {(4, 2048): seen({base: 3.0, other: 2.0})})
    assert contest.times(8, 1024) == (Time(pytest.approx(3.0)), Time(pytest.approx(2.0)))
    assert contest.times(8, 4096) == (Time(pytest.approx(12.0)), Time(pytest.approx(8.0)))
    assert contest.best(8, 1024) is other
    assert contest.best(1, 64) is base


def test_equal_times_leave_the_order():
    a, b = Estimated("a", 1e-9), Estimated("b", 1e-9)
    assert Contest((a, b), {(1, 2048): seen({a: 1.0, b: 1.0})}).best(1, 2048) is a


def test_a_tree_that_is_named_may_take_a_tenth_longer():
    for of_named, is_taken in ((1.09, True), (1.11, False)):
        named, other = Estimated("a", 1e-9), Estimated("b", 1e-9)
        named.is_named = True
        contest = Contest((other, named), {(1, 2048): seen({named: of_named, other: 1.0})})
        assert (contest.best(1, 2048) is named) == is_taken


def test_what_was_measured_to_be_the_quickest_need_not_be_much_quicker():
    first, other = Estimated("a", 1e-9), Estimated("b", 0.995e-9)
    assert Contest((first, other)).best(1, 2048) is first
    times = {(1, 2048): seen({first: 1.0, other: 0.995})}
    assert Contest((first, other), times).best(1, 2048) is other


class Drawn(NamedTuple):
    plans: tuple[Estimated, ...]
    times: dict[Lengths, dict[Variant, float]]


def test_drawn_contests(seed):
    """The choice is that of the least time, which a second reading of the rules gives."""
    draw = random.Random(seed)
    for _ in range(50):
        plans = tuple(Estimated(f"{i}", draw.uniform(1e-9, 4e-9)) for i in range(4))
        lengths = [(1, 1 << draw.randrange(5, 20)) for _ in range(draw.randrange(1, 4))]
        times = {x: seen({plan: draw.uniform(1e-6, 1e-3) for plan in plans}) for x in lengths}
        contest = Contest(plans, times)
        for keys in (1 << draw.randrange(5, 20) for _ in range(5)):
            off = {x: abs(math.log2(x[1] / keys)) for x in lengths}
            there = min(off, key=off.__getitem__)
            expected = {}
            for plan in plans:
                estimate = plan.seconds(1, keys)
                of_there = plan.seconds(*there)
                assert estimate is not None
                assert of_there is not None
                is_near = off[there] <= 2
                ratio = times[there][plan.variant] / of_there if is_near else 1
                expected[plan] = estimate * ratio
            found = [each.seconds for each in contest.times(1, keys)]
            if len({x for x in lengths if off[x] == off[there]}) == 1:
                assert found == pytest.approx(list(expected.values()))
                best = contest.best(1, keys)
                least = min(expected.values())
                assert expected[best] <= LEVEL * least
                if off[there] == 0:
                    assert expected[best] == least
                else:
                    assert best is next(x for x in plans if expected[x] <= LEVEL * least)


def test_reading_anew(file):
    """What a process keeps itself, it looks at."""
    variant = Variant("cpu", "kernel", "")
    assert measured_of(problem_of(), cpu_target()) is None
    keep_for(problem_of(), {(1, 64): {variant: 0.5}})
    assert measured_of(problem_of(), cpu_target()) == {(1, 64): {variant: 0.5}}
    file.unlink()
    assert measured_of(problem_of(), cpu_target()) is not None
    read_anew()
    assert measured_of(problem_of(), cpu_target()) is None
