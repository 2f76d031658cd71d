"""Valid calls of every public function, drawn small: what the changes of `changes.py` start from.

A call is a dictionary of arguments by name. Whatever a function's own arguments are, it asks for
what `fmha_fwd` computes; `Subject.asked` translates them, so that one set of rules and one
reference serve all of them.
"""

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from inputs import HDIM, HDIM_V, LAYOUTS, lay_out, prefix_sums
from torch import Tensor

Arguments = dict[str, Any]
Draw = Callable[..., Any]

FRESH = -77.0
"""What an `out` holds before it is written."""


@dataclass(frozen=True)
class Kind:
    """What a CPU kernel is compiled for, apart from mode and mask."""

    dtype: torch.dtype
    hdim_q: int
    hdim_v: int


# What other tests have kernels for as well: each is compiled for both modes, with and without a
# mask, and once more with sanitizers. In rows that do not end with a vector a kernel may read or
# write too much.
KINDS = (Kind(torch.bfloat16, HDIM, HDIM_V), Kind(torch.float32, 64, 64))
BACKWARD_KINDS = KINDS[:1]
SQUARE_KINDS = tuple(kind for kind in KINDS if kind.hdim_q == kind.hdim_v)
AMD_KINDS = (
    Kind(torch.bfloat16, 64, 64),
    Kind(torch.bfloat16, 128, 128),
    Kind(torch.float16, 128, 128),
)

GROUP = (
    *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    *("cu_seqlens_q_padded", "cu_seqlens_k_padded"),
)
PLAIN: Arguments = {
    "softmax_scale": None,
    "mask": 0,
    "window_size": (-1, -1),
    "return_lse": False,
    "out": None,
    **dict.fromkeys(GROUP),
    "bf16_cvt": "rtne",
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
    "p_descale": None,
}
"""The defaults of `fmha_fwd`."""


@dataclass(frozen=True)
class Subject:
    """A public function.

    Attributes:
        name: of the function.
        function: takes the arguments by name.
        modes: gm0, gm1 or both.
        arguments: those of a function, from those of `fmha_fwd` that ask for the same.
        asked: the other way round, for arguments that may be anything; with the names of those
            that break a rule of the function's own.
        kinds: what to draw.
        results: out and lse, from what the function returns; None where it returns neither.
        packed: 1, or 2 for k and v, or 3 for q, k and v in one tensor.
        written: the names of arguments that it writes to.
        check: of what it returns for arguments that break no rule, where ``results`` gives nothing.
        is_finite: whether NaN and infinity are left out.
        is_operator: of torch, whose dispatcher looks at the arguments first.
    """

    name: str
    function: Callable[..., Any]
    modes: tuple[str, ...]
    arguments: Callable[[Draw, Arguments], Arguments]
    asked: Callable[[Arguments], tuple[Arguments, set[str]]]
    results: Callable[[Any], tuple[Tensor, Tensor | None] | None]
    kinds: tuple[Kind, ...] = KINDS
    packed: int = 1
    written: tuple[str, ...] = ("out",)
    check: Callable[[Arguments, Any], None] = lambda arguments, returned: None
    is_finite: bool = False
    is_operator: bool = False


@st.composite
def valid_calls(draw: Draw, subject: Subject) -> Arguments:
    """Arguments that `subject` must serve."""
    problem = draw(problems(subject))
    return subject.arguments(draw, problem)


@st.composite
def problems(draw: Draw, subject: Subject) -> Arguments:
    """The arguments of `fmha_fwd` for a small problem in memory of any layout."""
    mode = draw(st.sampled_from(subject.modes))
    kind = draw(st.sampled_from(subject.kinds))
    heads_k = draw(st.integers(1, 3))
    heads_q = heads_k if subject.packed == 3 else heads_k * draw(st.integers(1, 3))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    group: Arguments = {}
    if mode == "gm0":
        batch = draw(st.integers(0, 3))
        rows_q, rows_k = draw(_rows()), draw(_rows())
        shape_q, shape_k = (batch, rows_q), (batch, rows_k)
    else:
        count = draw(st.integers(0, 4))
        group, rows_q, rows_k = draw(groups(count, same=subject.packed == 3))
        shape_q, shape_k = (1, rows_q), (1, rows_k)
    if subject.packed == 3:
        shape_k = shape_q
    shapes = (
        (*shape_q, heads_q, kind.hdim_q),
        (*shape_k, heads_k, kind.hdim_q),
        (*shape_k, heads_k, kind.hdim_v),
        (*shape_q, heads_q, kind.hdim_v),
    )
    layouts = st.sampled_from(sorted(LAYOUTS))
    q, k, v, out = (
        lay_out(torch.randn(shape, generator=rng).to(kind.dtype), draw(layouts)) for shape in shapes
    )
    if not subject.is_finite and draw(st.integers(0, 4)) == 0:
        _spoil(draw, (q, k, v))
    if mode == "gm1":
        q, k, v, out = (x[0] for x in (q, k, v, out))
    return {
        "q": q,
        "k": k,
        "v": v,
        **PLAIN,
        **group,
        "softmax_scale": draw(st.none() | st.floats(2.0**-10, 4) | st.just(1)),
        **draw(masks()),
        "return_lse": draw(st.booleans()),
        "out": out.fill_(FRESH) if draw(st.booleans()) else None,
    }


def _rows() -> st.SearchStrategy[int]:
    # Past one tile of queries or keys now and then.
    return st.sampled_from((*range(21), *range(10), 1, 16, 33, 140))


def _spoil(draw: Draw, tensors: Iterable[Tensor]) -> None:
    """NaN, infinity or a large number at a few places."""
    for x in tensors:
        for _ in range(draw(st.integers(0, 2))):
            if x.numel() == 0:
                continue
            place = [draw(st.integers(0, size - 1)) for size in x.shape]
            x[tuple(place)] = draw(st.sampled_from((torch.nan, torch.inf, -torch.inf, 1e4)))


@st.composite
def groups(draw: Draw, count: int, same: bool = False) -> tuple[Arguments, int, int]:
    """The arguments of gm1 for `count` sequences, and the packed rows of q and of k."""
    group: Arguments = {}
    rows = []
    is_padded = draw(st.booleans()) and not same
    for side in ("q",) if same else ("q", "k"):
        lengths = draw(st.lists(_rows(), min_size=count, max_size=count))
        room = [n + draw(st.integers(0, 3)) for n in lengths] if is_padded else lengths
        group[f"cu_seqlens_{side}"] = prefix_sums(lengths)
        group[f"cu_seqlens_{side}_padded"] = prefix_sums(room) if is_padded else None
        longest = max(lengths, default=0)
        group[f"max_seqlen_{side}"] = draw(
            st.sampled_from((None, longest, longest, longest + 3, 2**31 - 1))
        )
        rows.append(sum(room) + draw(st.sampled_from((0, 0, 2))))
    if same:
        group |= {"cu_seqlens_k": group["cu_seqlens_q"], "max_seqlen_k": group["max_seqlen_q"]}
    return group, rows[0], rows[-1]


@st.composite
def masks(draw: Draw) -> Arguments:
    """`mask` and `window_size` that go together."""
    side = st.integers(-1, 50)
    form = draw(st.sampled_from(("number", "name", "text")))
    if form == "text":
        letter = draw(st.sampled_from("btg"))
        numbers = st.integers(1, 50) if letter == "g" else side
        return {"mask": f"{letter}:{draw(numbers)},{draw(numbers)}"}
    mask = draw(st.sampled_from((0, 1, 2) if form == "number" else ("none", "causal", "t", "b")))
    open_or_not = st.just((-1, -1)) | st.tuples(side, side) | st.lists(side, min_size=2, max_size=2)
    return {"mask": mask, "window_size": draw(open_or_not)}


# ---- What the functions take, and what it means --------------------------------------------------


def plain_arguments(draw: Draw, problem: Arguments) -> Arguments:
    return problem


def plain_asked(arguments: Arguments) -> tuple[Arguments, set[str]]:
    return arguments, set()


def pair_results(returned: Any) -> tuple[Tensor, Tensor | None]:
    return (returned, None) if isinstance(returned, Tensor) else returned


def no_results(returned: Any) -> None:
    return None


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_window_size(value: object) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(is_int(side) and -1 <= side < 2**63 for side in value)
    )


def python_value(value: object) -> object:
    """What is in a 0-dim tensor, a 0-dim array or a NumPy number; anything else as it is."""
    is_one = isinstance(value, (np.generic, np.ndarray, Tensor)) and value.ndim == 0
    if not is_one or (isinstance(value, Tensor) and value.is_meta):
        return value
    return value.item()


class PeerArguments:
    """The arguments of a function that takes numbers of every kind, read one by one.

    Attributes:
        broken: the names of those that break a rule of the function's own.
        features: the names of those that ask for what is compared in tests of its own.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self.broken: set[str] = set()
        self.features: set[str] = set()

    def flag(self, name: str) -> bool:
        value = python_value(self._arguments[name])
        is_flag = value is None or (isinstance(value, int) and value in (0, 1))
        if not is_flag:
            self.broken.add(name)
        return is_flag and bool(value)

    def number(self, name: str) -> object:
        return python_value(self._arguments[name])

    def feature(self, name: str, below: float) -> None:
        """A number from 0, which is off, to one that it is less than."""
        value = self.number(name)
        if not (is_number(value) and 0 <= value < below):
            self.broken.add(name)
        elif value > 0:
            self.features.add(name)

    def count(self, name: str) -> None:
        """A whole number from 0, which is off."""
        value = self.number(name)
        if not is_int(value) or value < 0:
            self.broken.add(name)
        elif value > 0:
            self.features.add(name)

    def none(self, *names: str) -> None:
        self.broken |= {name for name in names if self._arguments.get(name) is not None}

    def side(self, name: str, value: object) -> int:
        """A side of a window; negative ones are open."""
        value = python_value(value)
        if not is_int(value) or value >= 2**63:
            self.broken.add(name)
            return -1
        return max(value, -1)

    def window_size(self) -> tuple[int, int]:
        window = self._arguments["window_size"]
        if window is None:
            return -1, -1
        is_array = isinstance(window, np.ndarray) or (
            isinstance(window, Tensor) and not window.is_meta
        )
        if is_array and window.ndim == 1:
            window = window.tolist()
        if not isinstance(window, (tuple, list)) or len(window) not in (2, 3):
            self.broken.add("window_size")
            return -1, -1
        if len(window) == 3:
            sink_size = python_value(window[2])
            if not is_int(sink_size) or not 0 <= sink_size < 2**63:
                self.broken.add("window_size")
            elif sink_size > 0:
                self.features.add("window_size")
        return self.side("window_size", window[0]), self.side("window_size", window[1])


def peer_arguments(function: Callable[..., Any]) -> Callable[[Draw, Arguments], Arguments]:
    """Those of a function of flash-attn or AITER, by the names that it declares."""
    parameters = inspect.signature(function).parameters.values()
    # Those that are given by name only are vLLM's; test_every_function has them.
    names = [x.name for x in parameters if x.kind is not x.KEYWORD_ONLY]

    def arguments(draw: Draw, problem: Arguments) -> Arguments:
        left, right = problem["window_size"]
        has_lse = problem["return_lse"]
        made: Arguments = {
            **{n: draw(st.sampled_from((0.0, 0))) for n in _FEATURES},
            **{n: draw(st.booleans()) for n in ("causal", "is_causal", "deterministic")},
            "window_size_left": left,
            "window_size_right": right,
            "return_attn_probs": has_lse,
            "return_softmax_lse": has_lse,
            "return_dropout_randval": False,
            "zero_tensors": draw(st.booleans()),
            "how_v3_bf16_cvt": draw(st.integers(0, 2)),
            "min_seqlen_q": 0,
            "cu_seqlens": problem["cu_seqlens_q"],
            "max_seqlen": problem["max_seqlen_q"],
        }
        for packed in ("kv", "qkv"):
            if packed in names:
                made[packed] = torch.stack([problem[n] for n in packed], dim=-3)
        if "min_seqlen_q" in names:  # AITER's need numbers.
            made |= {n: problem[n] or 2**31 - 1 for n in ("max_seqlen_q", "max_seqlen_k")}
        return {n: made.get(n, problem.get(n)) for n in names}

    return arguments


_FEATURES = {"dropout_p": 1.0, "softcap": math.inf, "logits_soft_cap": math.inf}
_FLAGS = (
    *("causal", "is_causal", "deterministic", "zero_tensors"),
    *("return_attn_probs", "return_softmax_lse", "return_dropout_randval"),
)


def peer_asked(arguments: Arguments) -> tuple[Arguments, set[str]]:
    """What a call of a function of flash-attn or AITER asks for."""
    peer = PeerArguments(arguments)
    is_group = "cu_seqlens" in arguments or "cu_seqlens_q" in arguments
    flags = {n: peer.flag(n) for n in _FLAGS if n in arguments}
    for name, below in _FEATURES.items():
        if name in arguments:
            peer.feature(name, below)
    if flags.get("return_dropout_randval") and "dropout_p" not in peer.features:
        peer.broken.add("return_dropout_randval")
    peer.none("alibi_slopes", "bias", "block_table")
    if not isinstance(arguments.get("gen"), torch.Generator | None):
        peer.broken.add("gen")
    if "min_seqlen_q" in arguments:
        peer.count("min_seqlen_q")
    cvt = peer.number("how_v3_bf16_cvt") if "how_v3_bf16_cvt" in arguments else 0
    if not (is_int(cvt) and 0 <= cvt <= 2):
        peer.broken.add("how_v3_bf16_cvt")
    causes = flags.get("causal") or flags.get("is_causal")
    names = (*GROUP, "out", "q_descale", "k_descale", "v_descale")
    call: Arguments = {
        **PLAIN,
        **{n: arguments[n] for n in names if n in arguments},
        **{n: peer.number(n) for n in GROUP if n in arguments},
        "softmax_scale": peer.number("softmax_scale"),
        "mask": 2 if causes else 0,
        "return_lse": bool(flags.get("return_attn_probs") or flags.get("return_softmax_lse")),
        "features": peer.features,
        **_unpacked(arguments, is_group, peer.broken),
    }
    if "cu_seqlens" in arguments:
        longest = peer.number("max_seqlen")
        call |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), arguments["cu_seqlens"])
        call |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), longest)
    # Without them it would be the batch mode, which has functions of its own.
    sums = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k")
    peer.broken |= {name for name in sums if arguments.get(name, ()) is None}
    if "window_size" in arguments:
        call["window_size"] = peer.window_size()
        return _contiguous(call), peer.broken
    # In AITER's, every side from the longest sequence of keys up is open.
    most = call["max_seqlen_k"] if is_group else _seqlen(arguments["k"])
    sides = [peer.side(name, arguments[name]) for name in ("window_size_left", "window_size_right")]
    call["window_size"] = tuple(-1 if is_int(most) and x >= most else x for x in sides)
    longest_sides = ("max_seqlen_q", "max_seqlen_k")
    peer.broken |= {n for n in longest_sides if is_group and not is_int(call[n])}
    return call, peer.broken


def _unpacked(arguments: Arguments, is_group: bool, broken: set[str]) -> Arguments:
    found = {n: arguments.get(n) for n in ("q", "k", "v")}
    for name in ("kv", "qkv"):
        x = arguments.get(name)
        if name not in arguments:
            continue
        is_one = isinstance(x, Tensor) and x.layout == torch.strided
        if is_one and x.dim() == (4 if is_group else 5) and x.shape[-3] == len(name):
            found |= dict(zip(name, x.unbind(-3), strict=True))
        else:
            broken.add(name)
    return found


def _contiguous(call: Arguments) -> Arguments:
    """With the rows that flash-attn's functions copy."""

    def copied(x: Any) -> Any:
        is_plain = isinstance(x, Tensor) and x.layout == torch.strided and x.dim() > 0
        return x.contiguous() if is_plain and x.stride(-1) != 1 else x

    return call | {n: copied(call[n]) for n in ("q", "k", "v")}


def _seqlen(x: object) -> int:
    return x.shape[1] if isinstance(x, Tensor) and x.dim() > 1 else 0


def peer_results(returned: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(returned, Tensor):
        return returned, None
    out, lse, randval, *state = returned
    assert randval.numel() == 0
    assert [x.shape for x in state] in ([], [(2,)])
    return out, lse if lse.dim() > 1 else None


# The operators.

OPERATOR_ARGUMENTS = (
    *("q", "k", "v", "softmax_scale", "mask", "window_size", "return_lse", *GROUP),
    *("bf16_cvt", "q_descale", "k_descale", "v_descale", "p_descale"),
)


def operator_arguments(with_out: bool) -> Callable[[Draw, Arguments], Arguments]:
    """The arguments of `torch.ops.jitfmha.fmha_fwd`, or of `fmha_fwd_out`."""

    def arguments(draw: Draw, problem: Arguments) -> Arguments:
        made = {n: problem[n] for n in OPERATOR_ARGUMENTS}
        made |= {"mask": str(problem["mask"]), "window_size": list(problem["window_size"])}
        if with_out:
            q, v = problem["q"], problem["v"]
            made["out"] = problem["out"]
            if made["out"] is None:
                made["out"] = q.new_full((*q.shape[:-1], v.shape[-1]), FRESH)
        return made

    return arguments


def operator_asked(arguments: Arguments) -> tuple[Arguments, set[str]]:
    mask = arguments["mask"]
    number = int(mask) if isinstance(mask, str) and mask in ("0", "1", "2") else mask
    broken = {"out"} if arguments.get("out", ...) is None else set()
    return {**PLAIN, **arguments, "mask": number}, broken


def operator_results(returned: Any) -> tuple[Tensor, Tensor | None]:
    out, lse = returned
    return out, lse if lse.dim() > 1 else None


def on_amd(subject: Subject) -> Subject:
    """The same function, with calls most of which an AMD GPU's kernels serve."""

    def arguments(draw: Draw, problem: Arguments) -> Arguments:
        if draw(st.integers(0, 5)):
            problem |= {"mask": draw(st.sampled_from((0, 2))), "window_size": (-1, -1)}
        return subject.arguments(draw, problem)

    return replace(subject, arguments=arguments, kinds=AMD_KINDS, results=no_results)
