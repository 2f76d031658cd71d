"""Every option, forward and backward: a call gets its own launch, whatever came before it.

Nothing is built: what stands for a kernel keeps the problem that it was planned for. Options follow
from ``OPTIONS``, so that a new one fails here until its values stand in ``VALUES``; every feature
that it says it asks for has to be asked for by one of these.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from fresh_calls import fresh_calls
from inputs import prefix_sums
from torch import Tensor
from untyped import explain, fmha_bwd, fmha_fwd

from jitfmha.call.backward import BackwardArguments, make_backward_problem
from jitfmha.call.pytorch.ops import BACKWARD_NAMES
from jitfmha.kernels.cpu import CpuPlan
from jitfmha.planning.plan import Launch
from jitfmha.problem.arguments import OPTIONS, Arguments, Tensors
from jitfmha.problem.features import Feature
from jitfmha.problem.problem import PlainSizes, Problem, make_problem

BATCH, SEQLEN_Q, SEQLEN_K, HEADS_Q, HEADS_K, HDIM = 2, 5, 7, 4, 2, 16
SUMS_Q, SUMS_K = prefix_sums([2, 3]), prefix_sums([4, 3])
ROOMY_Q, ROOMY_K = prefix_sums([3, 2]), prefix_sums([5, 2])
Call = dict[str, Any]

GROUPS: Call = {"cu_seqlens_q": SUMS_Q, "cu_seqlens_k": SUMS_K}
LONGEST: Call = GROUPS | {"max_seqlen_q": 3, "max_seqlen_k": 4}
SHORTER: Call = {"cu_seqlens_q": prefix_sums([2, 1]), "cu_seqlens_k": prefix_sums([3, 1])}
PAGES: Call = {"cu_seqlens_q": SUMS_Q, "cu_seqlens_k": SUMS_K}
STATE = torch.tensor([3, 0])


def spread(x: Tensor, dim: int) -> Tensor:
    """The same values with room behind each along a dimension."""
    return x.repeat_interleave(2, dim)[(slice(None),) * dim + (slice(None, None, 2),)]


BIAS = torch.zeros(1, 1, SEQLEN_Q, SEQLEN_K)
SLOPES = torch.ones(BATCH, HEADS_Q)
SCALES = [None, torch.ones(1), torch.ones(BATCH, HEADS_K), spread(torch.ones(BATCH, HEADS_K), 0)]
OF_TOKENS = [torch.ones(BATCH, SEQLEN_K, HEADS_K, 1)]
OF_TOKENS += [spread(OF_TOKENS[0], dim) for dim in (0, 1)]
TABLE = torch.zeros(2, 4, dtype=torch.int32)
DLSE = torch.zeros(BATCH, HEADS_Q, SEQLEN_Q)
DQ, DK = torch.zeros(BATCH, SEQLEN_Q, HEADS_Q, HDIM), torch.zeros(BATCH, SEQLEN_K, HEADS_K, HDIM)

# What goes with an option, and values that it may have, each of which is another call.
VALUES: dict[str, tuple[Call, list[Any]]] = {
    "softmax_scale": ({}, [None, 0.5, 2, 2.5]),
    "mask": ({}, [0, 1, 2, "t:3,4", "b:3,4", "g:2,2"]),
    "window_size": ({}, [(-1, -1), (2, 1), (1, 2), (-1, 0)]),
    "return_lse": ({}, [False, True]),
    "cu_seqlens_q": (GROUPS, [SUMS_Q, prefix_sums([4, 1]), prefix_sums([5, 0])]),
    "cu_seqlens_k": (GROUPS, [SUMS_K, prefix_sums([7, 0])]),
    "max_seqlen_q": (GROUPS, [None, 3, 5]),
    "max_seqlen_k": (GROUPS, [None, 4, 5]),
    "cu_seqlens_q_padded": (SHORTER, [None, ROOMY_Q, prefix_sums([2, 3])]),
    "cu_seqlens_k_padded": (SHORTER, [None, ROOMY_K, prefix_sums([4, 2])]),
    "out": (
        {},
        [None, torch.zeros(BATCH, SEQLEN_Q, HEADS_Q, HDIM)]
        + [spread(torch.zeros(BATCH, SEQLEN_Q, HEADS_Q, HDIM), dim) for dim in (0, 1, 2)],
    ),
    "bf16_cvt": ({}, ["rtne", "rtna", "rtz"]),
    "q_descale": ({"dtype": torch.float8_e4m3fn}, [*SCALES, torch.ones(HEADS_Q)]),
    "k_descale": ({"dtype": torch.float8_e4m3fn}, [*SCALES, torch.ones(HEADS_K), *OF_TOKENS]),
    "v_descale": ({"dtype": torch.float8_e4m3fn}, [*SCALES, torch.ones(HEADS_K), *OF_TOKENS]),
    "p_descale": ({"dtype": torch.int8}, [None, torch.ones(1)]),
    "bias": (
        {},
        [None, BIAS, BIAS.bool(), BIAS.expand(BATCH, 1, SEQLEN_Q, SEQLEN_K), spread(BIAS, 2)],
    ),
    "alibi_slopes": ({}, [None, SLOPES[0], SLOPES, spread(SLOPES, 0), spread(SLOPES, 1)]),
    "logit_softcap": ({}, [0, 0.5, 3, 30.0]),
    "sink": ({}, [None, torch.zeros(HEADS_Q), spread(torch.zeros(HEADS_Q), 0)]),
    "sink_size": ({"window_size": (1, 1)}, [0, 1, 4]),
    "dropout_p": ({"rng_state": STATE}, [0, 0.25, 0.5, 0.75]),
    "rng_state": ({"dropout_p": 0.5}, [STATE, STATE.clone()]),
    "block_table": (PAGES, [TABLE, TABLE.repeat(1, 2)[:, :4], TABLE[:, :3]]),
    "num_splits": ({}, [0, 1, 2, 128]),
}
# Of the backward pass alone.
BACKWARD_VALUES: dict[str, tuple[Call, list[Any]]] = {
    "deterministic": ({}, [None, True]),
    "atomic_fp32": ({}, [None, False, True]),
    "dlse": ({}, [None, DLSE, spread(DLSE, 1)]),
    "dq": ({}, [None, DQ, spread(DQ, 1)]),
    "dk": ({}, [None, DK, spread(DK, 1)]),
    "dv": ({}, [None, DK, spread(DK, 1)]),
}


class Launched(NamedTuple):
    problem: Problem
    tensors: Tensors


def bad_sums(sums: Tensor) -> list[Tensor]:
    """Of another length, rank, dtype, stride or device."""
    return [sums[:2], sums[None], sums.long(), spread(sums, 0), sums.to("meta")]


BAD_SCALES = [torch.ones(3), torch.ones(1).double(), torch.ones(1, device="meta")]
# Tensors that are refused, though a good one is like them but for one thing.
REFUSED: dict[str, list[Tensor]] = {
    "cu_seqlens_q": bad_sums(SUMS_Q),
    "cu_seqlens_k": bad_sums(SUMS_K),
    "cu_seqlens_q_padded": bad_sums(ROOMY_Q),
    "cu_seqlens_k_padded": bad_sums(ROOMY_K),
    "out": [torch.zeros(BATCH, SEQLEN_Q, HEADS_Q, HDIM, dtype=torch.half)],
    **{f"{name}_descale": BAD_SCALES for name in "qkvp"},
    "bias": [BIAS[..., :3], BIAS[0], BIAS.half(), BIAS.to("meta")],
    "alibi_slopes": [SLOPES[:, :2], SLOPES.double(), SLOPES.to("meta")],
    "sink": [torch.zeros(3), torch.zeros(HEADS_Q).half(), torch.zeros(HEADS_Q, device="meta")],
    "rng_state": [STATE[:1], STATE.int(), STATE.to("meta"), spread(STATE, 0)],
    "block_table": [TABLE[:1], TABLE.long(), spread(TABLE, 1), TABLE.to("meta")],
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    made: list[Launched] = []

    def launch_for(plan: CpuPlan, sizes: PlainSizes) -> Launch:
        problem = plan.problem.with_sizes(sizes)
        return lambda tensors: made.append(Launched(problem, tensors))

    monkeypatch.setattr(CpuPlan, "bind", lambda plan: None)
    monkeypatch.setattr(CpuPlan, "launch_for", launch_for)
    return made


def inputs(call: Call) -> tuple[Tensor, Tensor, Tensor, Call]:
    options = dict(call)
    dtype = options.pop("dtype", torch.float32)
    is_group = "cu_seqlens_q" in options
    rows_q = (SEQLEN_Q,) if is_group else (BATCH, SEQLEN_Q)
    rows_k = (SEQLEN_K,) if is_group else (BATCH, SEQLEN_K)
    if "block_table" in options:
        rows_k = (2, 3)
    shapes = (*rows_q, HEADS_Q, HDIM), (*rows_k, HEADS_K, HDIM), (*rows_k, HEADS_K, HDIM)
    q, k, v = (torch.zeros(shape).to(dtype) for shape in shapes)
    return q, k, v, options


def calls_of(name: str, values: dict[str, tuple[Call, list[Any]]]) -> list[Call]:
    base, those = values[name]
    return [base | {name: value} for value in those]


def pairs(calls: list[Call]) -> Iterator[tuple[Call, Call]]:
    return itertools.permutations(calls, 2)


def is_same(a: Any, b: Any) -> bool:
    """Whether values nested in tuples are equal, and tensors the same."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)


def said(launched: Launched) -> tuple[Any, ...]:
    """What a launch is told beside q, k, v and out."""
    problem, tensors = launched
    return problem, *tensors[TELLING]


TELLING = slice(Tensors._fields.index("cu_seqlens"), None)


def expect(launched: Launched, problem: Problem, forward: Arguments) -> None:
    # How long the longest sequence is told to be decides about nothing but the choice of a kernel,
    # which is that of the first call of these shapes.
    assert launched.problem == problem._replace(unevenness=launched.problem.unevenness)
    for name in ("q", "k", "v", "cu_seqlens", "descales", "modifiers", "dropout", "keys"):
        if name != "keys" or problem.gradients is None:
            assert is_same(getattr(launched.tensors, name), getattr(forward, name)), name


def test_values_of_every_option_are_tried():
    assert VALUES.keys() == {option.name for option in OPTIONS}
    backward = {*BACKWARD_NAMES} - {"dout", "q", "k", "v", "out", "lse", "with_dbias", "with_dsink"}
    assert backward <= VALUES.keys() | BACKWARD_VALUES.keys()


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_option_asks_for_its_features(option):
    """Families that lack one refuse the call; one that asks for none would be ignored by them."""
    asked = []
    for call in calls_of(option.name, VALUES):
        q, k, v, options = inputs(call)
        asked.append(make_problem(Arguments.of(q, k, v, options)).features)
    assert frozenset().union(*asked).issuperset(option.features)
    assert option.features or len({*asked}) == 1, "what it asks for is not said"


@pytest.mark.parametrize("window_size", [(-1, 3), (3, -1), (2, 1)])
def test_every_window_asks_for_one(window_size):
    q, k, v, _ = inputs({})
    problem = make_problem(Arguments.of(q, k, v, {"window_size": window_size}))
    assert Feature.WINDOW_MASK in problem.features


def test_what_hides_nothing_asks_for_no_feature():
    q, k, v, _ = inputs({})
    plain = make_problem(Arguments.of(q, k, v, {})).features
    for options in ({"sink_size": 4}, {"logit_softcap": 0}, {"dropout_p": 0.0}):
        assert make_problem(Arguments.of(q, k, v, options)).features == plain


@pytest.mark.parametrize("name", VALUES)
def test_pairs_of_forward_calls(launches, name):
    for pair in pairs(calls_of(name, VALUES)):
        with fresh_calls():
            seen = []
            for call in (*pair, pair[0]):
                q, k, v, options = inputs(call)
                fmha_fwd(q, k, v, **options)
                forward = Arguments.of(q, k, v, options)
                launched = launches.pop()
                expect(launched, make_problem(forward), forward)
                seen.append(launched)
            first, second, again = (said(launched) for launched in seen)
            assert is_same(first, again)
            # An out that lies as a new one would be makes no difference to a launch.
            assert name == "out" or not is_same(first, second)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("name", REFUSED)
def test_a_good_call_lets_no_other_pass(name):
    for value in REFUSED[name]:
        texts = []
        with fresh_calls():
            for call in (*calls_of(name, VALUES), VALUES[name][0] | {name: value}):
                q, k, v, options = inputs(call)
                if options.get(name) is not value:
                    fmha_fwd(q, k, v, **options)
                    continue
                for function in (fmha_fwd, explain):
                    with pytest.raises((TypeError, ValueError), match=name) as raised:
                        function(q, k, v, **options)
                    texts.append(str(raised.value))
        assert texts[0] == texts[1]


def test_every_tensor_has_some_that_are_refused():
    assert REFUSED.keys() == {x.name for x in OPTIONS if x.schema.startswith("Tensor")}


HAVE_GRADIENTS = [
    *(n for n in VALUES if n in BACKWARD_NAMES and "dtype" not in VALUES[n][0]),
    *BACKWARD_VALUES,
]


@pytest.mark.parametrize(
    "name", [n for n in HAVE_GRADIENTS if n not in ("out", "block_table", "num_splits")]
)
def test_pairs_of_backward_calls(launches, name):
    values = BACKWARD_VALUES if name in BACKWARD_VALUES else VALUES
    for pair in pairs(calls_of(name, values)):
        with fresh_calls():
            for call in (*pair, pair[0]):
                q, k, v, options = inputs(call)
                out, dout = torch.zeros_like(q), torch.zeros_like(q)
                lse = torch.zeros(*q.shape[:-3], HEADS_Q, SEQLEN_Q)
                fmha_bwd(dout, q, k, v, out, lse, **options)
                own = {n: options.pop(n) for n in BACKWARD_VALUES if n in options}
                forward = Arguments.of(q, k, v, {**options, "out": out})
                problem = make_backward_problem(BackwardArguments(forward, lse, dout, **own))
                launched = launches.pop()
                expect(launched, problem, forward)
                assert launched.tensors.gradients is not None
                assert launched.tensors.gradients.dlse is own.get("dlse")
