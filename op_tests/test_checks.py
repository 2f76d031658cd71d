"""What a check looks at: those of a kind of calls at no length and no stride.

A call of a kind that came before is checked for its lengths alone, and not even for these where it
is plain at a glance that there is nothing to refuse. Both must leave nothing out.
"""

from typing import Any, NoReturn

import pytest
import torch
from inputs import prefix_sums
from score_features import FEATURES, Options, Shape
from torch import Tensor

from jitfmha.call.run import _kind_and_sizes, key_of
from jitfmha.problem import problem as problem_module
from jitfmha.problem.arguments import Arguments
from jitfmha.problem.problem import CHECKS, check_sizes, make_problem
from jitfmha.problem.score_features import SCORE_FEATURES

HEADS_Q, HEADS_K, HDIM = 4, 2, 16
MODES = ("gm0", "gm1", "pages")
ROUNDS = 200


class Unread:
    """Stands for a length or a stride; whoever does anything with it fails."""

    def _fail(self, *others: object) -> NoReturn:
        pytest.fail("a check of the kind looks at a length or a stride")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _fail
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = __int__ = __str__ = __repr__ = _fail
    __eq__ = __ne__ = _fail  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class WithoutLengths(Tensor):
    """A tensor that says neither its strides nor the lengths among its sizes."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    shown: tuple[Any, ...]

    @property
    def shape(self) -> Any:  # type: ignore[override]
        return self.shown

    def size(self, *dim: Any) -> Any:
        return self.shown[dim[0]] if dim else self.shown

    def stride(self, *dim: Any) -> Any:
        return Unread() if dim else tuple(Unread() for _ in self.shown)


def without_lengths(x: Tensor, *places: int) -> Tensor:
    made = x.as_subclass(WithoutLengths)
    shown: list[Any] = list(x.shape)
    for place in places:
        shown[place] = Unread()
    made.shown = tuple(shown)
    return made


class Drawn:
    """Calls of one kind, of any lengths in any memory."""

    def __init__(self, rng: torch.Generator, mode: str) -> None:
        self.rng = rng
        self.mode = mode

    def one_of(self, *values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=self.rng))]

    def tensor(self, *shape: int) -> Tensor:
        """Rows far apart, heads before rows, or keys before the last dimension."""
        order = self.one_of(*[(0, 1, 2), (1, 0, 2)] * 4, (0, 2, 1), (1, 2, 0))
        first = len(shape) - 3
        dims = (*range(first), *(first + i for i in order))
        room = self.one_of(0, 0, 3)
        sizes = [shape[i] for i in dims]
        x = torch.zeros((*sizes[:-1], sizes[-1] + room))[..., : sizes[-1]]
        return x.permute(*(dims.index(i) for i in range(len(shape))))

    def call(self) -> tuple[Any, Any, Any, Options]:
        seqlen_q, seqlen_k = self.one_of(1, 2, 5), self.one_of(0, 1, 3, 8)
        seqlen_v = self.one_of(seqlen_k, seqlen_k, seqlen_k, seqlen_k + 1)
        batch = (2,) if self.mode == "gm0" else ()
        keys = (2,) if self.mode != "gm1" else ()
        q = self.tensor(*batch, seqlen_q, HEADS_Q, HDIM)
        k = self.tensor(*keys, seqlen_k, HEADS_K, HDIM)
        v = self.tensor(*keys, seqlen_v, HEADS_K, HDIM)
        options: Options = {}
        if self.mode != "gm0":
            options |= {"cu_seqlens_q": prefix_sums([1, 0]), "cu_seqlens_k": prefix_sums([0, 1])}
            options |= {"max_seqlen_k": self.one_of(1, 4, 9), "max_seqlen_q": self.one_of(1, 9)}
        if self.mode == "pages":
            options["block_table"] = torch.zeros(2, 3, dtype=torch.int32)
        if self.one_of(True, False, False):
            out = self.tensor(*batch, self.one_of(seqlen_q, seqlen_q, 3), HEADS_Q, HDIM)
            options["out"] = self.one_of(out, out, out[..., :1].expand(out.shape))
        if self.one_of(True, False, False):
            width = options.get("max_seqlen_k", seqlen_k)
            options["bias"] = torch.zeros(*(1,) * len(batch), 1, 1, self.one_of(width, width, 2))
        return q, k, v, options


def arguments_with_everything(rng: torch.Generator, mode: str) -> Arguments:
    batch = (2,) if mode == "gm0" else ()
    q = torch.zeros(*batch, 5, HEADS_Q, HDIM)
    k = torch.zeros(*(() if mode == "gm1" else (2,)), 3, HEADS_K, HDIM)
    options: Options = {"out": torch.zeros(q.shape), "num_splits": 2}
    if mode != "gm0":
        options |= {"cu_seqlens_q": prefix_sums([4, 0]), "cu_seqlens_k": prefix_sums([1, 2])}
        options |= {"max_seqlen_q": 4, "max_seqlen_k": 3}
    if mode == "pages":
        options["block_table"] = torch.zeros(2, 3, dtype=torch.int32)
    shape = Shape(2, HEADS_Q, 5, 3, q.dtype, rng, is_group=mode != "gm0")
    options |= FEATURES["everything"](shape)
    if mode != "gm0":
        options["mask"] = "b:3,0"
    return Arguments.of(q, k, k.clone(), options)


@pytest.mark.parametrize("mode", MODES)
def test_checks_of_the_kind_look_at_no_length(rng, monkeypatch, mode):
    """Nor does anything else that makes a problem, but what makes its sizes."""
    arguments = arguments_with_everything(rng, mode)
    expected = make_problem(arguments)
    q, k, v = (without_lengths(x, -3) for x in arguments[:3])
    assert arguments.modifiers is not None
    unread = {
        row.name: without_lengths(x, *range(x.dim()))
        for row in SCORE_FEATURES
        if row.has_lengths and (x := getattr(arguments.modifiers, row.name)) is not None
    }
    modifiers = arguments.modifiers._replace(**unread)
    cu_seqlens: Any = arguments.cu_seqlens
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens._replace(max_seqlen_q=Unread(), max_seqlen_k=Unread())
    assert arguments.out is not None
    out = without_lengths(arguments.out, *range(arguments.out.dim()))
    hidden = arguments._replace(q=q, k=k, v=v, out=out, modifiers=modifiers, cu_seqlens=cu_seqlens)
    monkeypatch.setattr(problem_module, "check_sizes", lambda arguments: expected.sizes)
    assert make_problem(hidden) == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_glance_gives_what_the_checks_give(rng, mode):
    """Where one says that there is nothing to refuse, no check refuses anything."""
    drawn = Drawn(rng, mode)
    glances = refusals = 0
    for _ in range(ROUNDS):
        q, k, v, options = drawn.call()
        arguments = Arguments.of(q, k, v, options)
        _, sizes = _kind_and_sizes(key_of(arguments)[1], arguments)
        try:
            checked = check_sizes(arguments)
        except (TypeError, ValueError):
            refusals += 1
            assert sizes is None, "a call that is refused passes at a glance"
            continue
        assert sizes is None or sizes == checked
        glances += sizes is not None
    assert refusals > 0
    assert (glances > 0) == (mode != "pages")


def test_every_check_is_made_for_the_first_call_of_a_kind(rng, monkeypatch):
    made: list[int] = []
    counted = {
        what: [lambda arguments, n=100 * i + j: made.append(n) for j, _ in enumerate(checks)]
        for i, (what, checks) in enumerate(CHECKS.items())
    }
    arguments = arguments_with_everything(rng, "gm0")
    monkeypatch.setattr(problem_module, "CHECKS", counted)
    make_problem(arguments)
    assert made == [*range(len(CHECKS["kind"])), *range(100, 100 + len(CHECKS["lengths"]))]
    made.clear()
    check_sizes(arguments)
    assert made == [*range(100, 100 + len(CHECKS["lengths"]))]
