"""The question to the families: features that nobody declares, and what is asked how often."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, ClassVar

import pytest
import torch
from closeness import check
from untyped import explain, fmha_fwd

from jitfmha import emulate
from jitfmha.call import dispatch
from jitfmha.jit import BuildSpec
from jitfmha.kernels import compiled, cpu
from jitfmha.planning.plan import Contest, Launch, Plan, Reason, Refusal
from jitfmha.planning.target import CallCache, CpuTarget, Target, cpu_target
from jitfmha.problem.features import Feature
from jitfmha.problem.problem import PlainSizes, Problem


class _Undeclared(Enum):
    TELEPATHY = "telepathy"


class _ProblemWithMore(Problem):
    """A problem with a field that no family has heard of."""

    @property
    def features(self) -> frozenset[Enum]:  # type: ignore[override]
        return super().features | {_Undeclared.TELEPATHY}


def _problem(kind: type[Problem]) -> Problem:
    x = torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16)
    known = explain(x, x, x).problem
    return kind(*known)


@pytest.mark.parametrize("where", ["cpu", "gfx942", "gfx942-mi308", "gfx950"])
def test_a_feature_that_nobody_declares_is_refused_by_name(where):
    target: Target | None = cpu_target()
    if where != "cpu":
        with emulate(where):
            target = explain(*[torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16)] * 3).target
    served = dispatch.propose(_problem(Problem), target)
    assert served.plan is not None
    refused = dispatch.propose(_problem(_ProblemWithMore), target)
    assert refused.plan is None
    asked = ["cpu"] if where == "cpu" else ["ready", "compiled"]
    assert [name for name, _ in refused.refusals] == asked
    explanation = dispatch.Explanation.of(_problem(_ProblemWithMore), target, refused)
    assert set(explanation.rejected) == {"ready", "compiled", "cpu"}
    sentences = dict(refused.refusals)[served.plan.family].sentences()
    assert sentences == ("It does not serve telepathy.",)
    with pytest.raises(NotImplementedError, match="telepathy"):
        dispatch.plan_for(_problem(_ProblemWithMore), target)


def test_every_family_is_asked_once_and_sentences_are_made_when_read(monkeypatch):
    asked: list[str] = []
    spoken: list[str] = []

    class Value:
        def __format__(self, spec: str) -> str:
            spoken.append("a sentence")
            return "value"

    class Unwilling:
        def __init__(self, name: str) -> None:
            self.NAME = name
            self.SERVES = problem.features

        def propose(self, problem: Problem, target: Target) -> Refusal:
            asked.append(self.NAME)
            return Refusal((Reason("It has no {value}.", value=Value()),))

    class UnwillingEntrant(dispatch.Entrant):
        def family(self) -> Any:
            return Unwilling(self.name)

    problem = _problem(Problem)
    entrants = tuple(UnwillingEntrant(name, name, CpuTarget, "") for name in ("first", "second"))
    monkeypatch.setattr(dispatch, "FAMILIES", entrants)
    proposal = dispatch.propose(problem, cpu_target())
    assert asked == ["first", "second"]
    assert spoken == []
    explanation = dispatch.Explanation.of(problem, cpu_target(), proposal)
    assert explanation.rejected == dict.fromkeys(asked, ("It has no value.",))
    assert asked == ["first", "second"]


class _Planned(Plan):
    """A plan of whoever says what it would take; it runs as the CPU's does."""

    def __init__(self, family: str, plan: Plan, seconds: float | None) -> None:
        self.family, self.kernel, self.source = family, f"kernel of {family}", plan.source
        self.problem = plan.problem
        self._plan, self._seconds = plan, seconds

    @property
    def specs(self) -> Sequence[BuildSpec]:
        return self._plan.specs

    def remarks(self) -> list[str]:
        return []

    def bind(self) -> None:
        self._plan.bind()

    def seconds(self, seqlen_q: int, seqlen_k: int) -> float | None:
        return self._seconds

    def serves(self, sizes: PlainSizes) -> bool:
        return True

    def launch_for(self, sizes: PlainSizes) -> Launch:
        return self._plan.launch_for(sizes)


class _Entrant(dispatch.Entrant):
    """A family that serves everything, in so many seconds, or a refusal."""

    answers: ClassVar[dict[str, float | Refusal | None]] = {}
    asked: ClassVar[list[tuple[str, int]]] = []

    def family(self) -> Any:
        return self

    @property
    def NAME(self) -> str:  # noqa: N802
        return self.name

    @property
    def SERVES(self) -> frozenset[Feature]:  # noqa: N802
        return cpu.SERVES

    def propose(self, problem: Problem, target: Target) -> tuple[Plan, ...] | Refusal:
        self.asked.append((self.name, problem.seqlen_k))
        answer = self.answers[self.name]
        if isinstance(answer, Refusal):
            return answer
        plans = cpu.propose(problem, target)
        assert not isinstance(plans, Refusal)
        return (_Planned(self.name, plans[0], answer),)


@pytest.fixture
def answer_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts families in place of all that there are, by their answers."""

    def put(**answers: float | Refusal | None) -> None:
        entrants = tuple(_Entrant(name, name, CpuTarget, "") for name in answers)
        monkeypatch.setattr(dispatch, "FAMILIES", entrants)
        monkeypatch.setattr(_Entrant, "answers", answers)
        monkeypatch.setattr(_Entrant, "asked", [])
        monkeypatch.setattr("jitfmha.call.run.CALLS_HERE", CallCache())

    return put


@pytest.mark.parametrize(
    ("answers", "taken"),
    [
        ({"first": None, "second": 1e-6}, "first"),
        ({"first": 3e-6, "second": 1e-6, "third": 2e-6}, "second"),
        ({"first": 1e-6, "second": 1e-6}, "first"),
        ({"first": 3e-6, "second": None, "third": 1e-6}, "third"),
        ({"first": Refusal((Reason("No."),)), "second": 2e-6, "third": None}, "second"),
    ],
)
def test_the_least_estimate_is_taken_and_else_the_order_decides(answer_with, answers, taken):
    problem = _problem(Problem)
    answer_with(**answers)
    proposal = dispatch.propose(problem, cpu_target())
    assert proposal.plan is not None
    assert proposal.plan.family == taken
    assert [name for name, _ in _Entrant.asked] == list(answers)
    explanation = dispatch.Explanation.of(problem, cpu_target(), proposal)
    assert explanation.rejected.keys() == answers.keys() - {taken}
    estimated = {name: x for name, x in answers.items() if not isinstance(x, Refusal)}
    known = explanation.to_dict()["estimates"]
    assert {each["family"]: each["microseconds"] for each in known} == {
        name: None if seconds is None else pytest.approx(1e6 * seconds)
        for name, seconds in estimated.items()
    }
    for name, seconds in estimated.items():
        if name != taken:
            says = (
                "not estimated" if seconds is None else f"estimated to take {1e6 * seconds:.4g} us"
            )
            assert says in explanation.rejected[name][0]


@pytest.mark.parametrize(("over", "taken"), [(1.09, "named"), (1.11, "other")])
def test_a_tree_that_the_user_names_may_take_a_tenth_longer(answer_with, over, taken):
    answer_with(other=1e-6, named=over * 1e-6)
    plans = dispatch.propose(_problem(Problem), cpu_target()).contest.plans
    plans[1].is_named = True
    assert Contest(plans).best(4, 4).family == taken


@pytest.mark.parametrize(("over", "taken"), [(0.99, "ready"), (1.005, "ready"), (1.02, "compiled")])
def test_what_is_preferred_may_take_a_little_longer(answer_with, over, taken):
    answer_with(ready=over * 1e-6, compiled=1e-6)
    explanation = dispatch.explain_problem(_problem(Problem), cpu_target())
    assert explanation.plan.family == taken
    assert any("are level" in each for each in explanation.remarks) == (over == 1.005)


def test_a_loop_takes_what_takes_least_for_its_lengths(monkeypatch, answer_with):
    """Each family is asked for its estimate once for a step of lengths, and once for a plan."""
    answer_with(short=0.0, long=0.0)
    asked: list[tuple[str, int]] = []

    def seconds(plan: _Planned, seqlen_q: int, seqlen_k: int) -> float:
        asked.append((plan.family, seqlen_k))
        return float(seqlen_k) if plan.family == "short" else 450.0

    def serves(plan: _Planned, sizes: PlainSizes) -> bool:
        assert plan.contest is not None
        return plan.contest.best(sizes[0], sizes[1]) is plan

    monkeypatch.setattr(_Planned, "seconds", seconds)
    monkeypatch.setattr(_Planned, "serves", serves)
    taken: list[str] = []
    launch_for = _Planned.launch_for

    def told(plan: _Planned, sizes: PlainSizes) -> Launch:
        taken.append(plan.family)
        return launch_for(plan, sizes)

    monkeypatch.setattr(_Planned, "launch_for", told)
    q = torch.zeros(1, 1, 2, 64)
    lengths = range(400, 600)
    for length in lengths:
        x = torch.zeros(1, length, 2, 64)
        fmha_fwd(q, x, x)
    # In whole steps of 16 or 32 keys, but 32 at least.
    assert taken == ["short" if -(-n // 32) * 32 < 450 else "long" for n in lengths]
    assert len(_Entrant.asked) == 4, "one plan for each family that wins, both families asked"
    assert len(asked) <= 2 * 2 * len({-(-n // 32) for n in lengths})


@pytest.mark.parametrize("of_every_size", [False, True])
def test_who_refuses_some_sizes_is_asked_about_others(answer_with, of_every_size):
    answer_with(first=Refusal((Reason("Not yet."),), of_every_size), second=None)
    q = torch.zeros(1, 1, 2, 64)
    for length in (5, 6, 5, 7):
        x = torch.zeros(1, length, 2, 64)
        fmha_fwd(q, x, x)
    lengths = [5] if of_every_size else [5, 6, 7]
    assert _Entrant.asked == [(name, n) for n in lengths for name in ("first", "second")]


@pytest.mark.parametrize("rows", [[1, 0], [0, 1]])
def test_what_nobody_serves_is_refused_without_a_query_too(answer_with, rows):
    answer_with(first=Refusal((Reason("Never."),)))
    x = torch.zeros(1, 1, 2, 64)
    for n in rows:
        with pytest.raises(NotImplementedError, match=r"not first: Never\."):
            fmha_fwd(x[:, :n], x, x)


@pytest.mark.parametrize("feature", Feature)
def test_a_family_is_asked_for_what_it_declares(monkeypatch, feature):
    problem = _problem(Problem)
    monkeypatch.setattr(Problem, "features", frozenset({feature}))
    for entrant in dispatch.FAMILIES:
        family = entrant.family()
        refusal = dispatch.refusal_of_features(family, problem)
        assert (refusal is None) == (feature in family.SERVES), entrant


@pytest.mark.parametrize("fresh", [False, True], ids=["slices", "fresh"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_new_lengths_are_not_planned_again(monkeypatch, rng, layout, fresh):
    """A decode loop: every call has one key more, in a cache or in tensors of its own."""
    plans: list[Problem] = []
    plan_for = dispatch.plan_for

    def counted(problem: Problem, target: Target) -> Plan:
        plans.append(problem)
        return plan_for(problem, target)

    monkeypatch.setattr("jitfmha.call.run.plan_for", counted)
    monkeypatch.setattr("jitfmha.call.run.CALLS_HERE", CallCache())
    batch, heads, hdim = 2, 4, 64
    q = torch.randn(batch, 1, heads, hdim, generator=rng)
    shape = (batch, 40, 2, hdim) if layout == "bshd" else (batch, 2, 40, hdim)
    k_cache, v_cache = (torch.randn(shape, generator=rng) for _ in range(2))
    if layout == "bhsd":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    for length in (*range(41), 7):
        k, v = k_cache[:, :length], v_cache[:, :length]
        if fresh:
            k, v = k.clone(), v.clone()
        check(q, k, v, mask="causal")
    assert len(plans) == 1


def test_new_lengths_are_checked(rng):
    q, x = torch.randn(1, 1, 2, 64, generator=rng), torch.randn(1, 9, 2, 64, generator=rng)
    fmha_fwd(q, x, x)
    with pytest.raises(ValueError, match="v has seqlen 7, k has 8"):
        fmha_fwd(q, x[:, :8], x[:, :7])
    with pytest.raises(ValueError, match=r"k has stride 2 in its last dimension"):
        fmha_fwd(q, torch.zeros(1, 8, 2, 128)[..., ::2], x[:, :8])
    with pytest.raises(
        ValueError, match=r"out has shape \(1, 2, 2, 64\); expected \(1, 1, 2, 64\)"
    ):
        fmha_fwd(q, x[:, :8], x[:, :8], out=torch.zeros(1, 2, 2, 64))
    with pytest.raises(ValueError, match="elements overlap"):
        fmha_fwd(x[:, :3], x, x, out=torch.zeros(1, 1, 2, 64).expand(1, 3, 2, 64))


@pytest.mark.parametrize("where", ["gfx942", "gfx950"])
def test_gradients_that_nobody_serves_are_refused_before_forward(monkeypatch, where):
    q = torch.zeros(1, 4, 2, 96, dtype=torch.bfloat16, requires_grad=True)
    monkeypatch.setattr(compiled, "SERVES", compiled.SERVES - {Feature.BACKWARD})
    with emulate(where), pytest.raises(NotImplementedError, match="the backward pass"):
        fmha_fwd(q, q, q)
    with emulate(where), torch.no_grad():
        fmha_fwd(q, q, q)
