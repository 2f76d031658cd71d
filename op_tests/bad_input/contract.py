"""What must hold of every call: the right result or a clear refusal, and nothing else."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from calls import FRESH, Arguments, Subject, python_value
from expected import check_results
from hypothesis import event, reject
from rules import broken_rules, is_group
from torch import Tensor
from untyped import fmha_fwd

REFUSALS = (TypeError, ValueError, NotImplementedError)
MOST_BYTES = 1 << 24  # of a tensor that is computed with
_NO_MEMORY_HAS = 1 << 48  # bytes: more than a process can address
_MOST_PAIRS = 1 << 22  # of queries and keys that are computed

# What the operators' schema has for a number; torch makes others fit where it can.
_COERCED: dict[str, tuple[type, ...]] = {
    "mask": (str,),
    "bf16_cvt": (str,),
    "softmax_scale": (float, int),
    "return_lse": (bool,),
    "window_size": (list, tuple),
    "max_seqlen_q": (int,),
    "max_seqlen_k": (int,),
}
# How else a message may name an argument: packed tensors and lengths are taken apart first.
_ALSO_CALLED = {
    "kv": ("k", "v"),
    "qkv": ("q", "k", "v"),
    "cu_seqlens": ("cu_seqlens_q", "cu_seqlens_k"),
    "max_seqlen": ("max_seqlen_q", "max_seqlen_k"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ("cu_seqlens",)),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), ("max_seqlen",)),
    "window_size_left": ("window_size",),
    "window_size_right": ("window_size",),
    "softcap": ("logit_softcap",),
    "sink_ptr": ("sink",),
    "softmax_lse": ("lse",),
    "logits_soft_cap": ("logit_softcap",),
}


@dataclass
class Tally:
    """How many calls of a test ended how."""

    ended: Counter[str] = field(default_factory=Counter)

    def count(self, how: str) -> None:
        self.ended[how] += 1
        event(how)

    @property
    def returned(self) -> int:
        return self.ended["returned"]

    @property
    def refused(self) -> int:
        return sum(self.ended[error.__name__] for error in REFUSALS)


Sweep = Callable[..., Tally]
"""The fixture `sweep`."""


@dataclass(frozen=True, repr=False)
class Call:
    """A call to be tried; its repr is what a failing test prints.

    Attributes:
        good: arguments that `subject` must serve, from which the others were made.
    """

    subject: Subject
    arguments: Arguments
    good: Arguments

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print the tensors

    def __repr__(self) -> str:
        parts = [f"{name}={describe(value)}" for name, value in self.arguments.items()]
        return f"{self.subject.name}({', '.join(parts)})"


def describe(value: object) -> str:
    """A value in a few words; a tensor without its data."""
    if not isinstance(value, Tensor):
        return repr(value)[:80]
    kind = f"{type(value).__name__} {value.dtype} {tuple(value.shape)}"
    if value.layout != torch.strided:
        return f"<{kind} {value.layout}>"
    if value.dtype == torch.int32 and not value.is_meta and value.dim() == 1:
        kind += f" {value.tolist()}"
    grad = " grad" if value.requires_grad else ""
    return f"<{kind} strides {value.stride()} on {value.device}{grad}>"


def check_call(
    call: Call,
    tally: Tally,
    *,
    known: KnownCall,
    may_refuse: Callable[[BaseException], bool] = lambda error: False,
    **rules: bool,
) -> None:
    """Make the call, and check all that must hold of it; `rules` are options of `broken_rules`.

    `known`: must still work after a refusal.
    `may_refuse`: whether an error is right though no argument breaks a rule.
    """
    subject, arguments = call.subject, call.arguments
    asked, broken = subject.asked(arguments)
    broken = broken | broken_rules(asked, **rules)
    if asked.get("features"):
        reject()  # tests of their own compare what these give
    if not broken and not rules.get("explains") and _is_too_big(asked):
        _check_too_big(call, asked, tally, known)
        return
    kind = _kind(asked) if not broken and not rules.get("explains") else None
    compiled = {(k.dtype, k.dtype, k.hdim_q, k.hdim_v, False) for k in subject.kinds}
    if kind is not None and kind not in compiled:
        reject()  # valid, and would be compiled
    is_coerced = subject.is_operator and _is_coerced(arguments)
    if is_coerced and _has_ranks(asked) and _is_too_big(asked):
        reject()  # torch may make a valid call of it
    memory = _Memory(arguments)
    returned, error = _outcome(call)
    if is_coerced:
        assert error is None or type(error) in REFUSALS or is_from_dispatcher(error), _text(error)
        tally.count("coerced")
        return
    if error is not None:
        assert broken or may_refuse(error), f"refused: {_text(error)}"
        if _says_no_memory(error) and _has_ranks(asked) and _is_too_big(asked):
            tally.count("too big")  # lengths are looked at when outputs are there
            return
        if broken and not may_refuse(error):
            _check_refusal(subject, error, arguments, broken)
        memory.check_unchanged()
        # What a good call of its kind left behind lets nothing pass.
        _, refused = _outcome(replace(call, arguments=call.good))
        assert refused is None or may_refuse(refused), f"refused: {_text(refused)}"
        returned, again = _outcome(call)
        assert again is not None, f"served after a good call; before it: {_text(error)}"
        assert (type(again), str(again)) == (type(error), str(error)), f"at first: {_text(error)}"
        known.check()
        tally.count(type(error).__name__)
        return
    assert not broken, f"served, though {sorted(broken)} break a rule"
    memory.check_unchanged(but=[arguments.get(name) for name in subject.written])
    subject.check(arguments, returned)
    results = subject.results(returned)
    if results is not None:
        out = arguments.get("out")
        if out is not None:
            assert results[0] is out or subject.name.endswith("_out")
            results = out, results[1]
        unused = 0.0 if out is None or arguments.get("zero_tensors") else FRESH
        if out is None or not is_group(asked) or _is_fresh(memory, out, unused):
            check_results(asked, *results, unused)
    tally.count("returned")


def _check_refusal(
    subject: Subject, error: Exception, arguments: Arguments, broken: set[str]
) -> None:
    """The type, and what the text names."""
    text = _text(error)
    if subject.is_operator and is_from_dispatcher(error):
        return
    assert type(error) in REFUSALS, f"an error of the wrong type: {text}"
    named = [name for name in broken if _names(str(error), name)]
    assert named, f"names none of {sorted(broken)}: {text}"
    if type(error) is ValueError and "is missing" not in str(error):
        facts = _facts(arguments, str(error))
        assert any(fact in str(error) for fact in facts), f"gives no value: {text}"


def refusal(error: Exception, arguments: Arguments) -> bool:
    """Whether an error is of a type that refuses, and names an argument or says what serves it."""
    if type(error) not in REFUSALS:
        return False
    return any(_names(str(error), name) for name in ("q", *arguments))


def _is_coerced(arguments: Arguments) -> bool:
    """Whether torch's dispatcher may have made something else of an argument."""
    window = arguments["window_size"]
    sides = window if isinstance(window, (list, tuple)) else ()
    return (
        any(type(side) is not int for side in sides)
        or arguments["return_lse"] is None
        or any(
            arguments[name] is not None and type(arguments[name]) not in types
            for name, types in _COERCED.items()
        )
    )


def is_from_dispatcher(error: Exception) -> bool:
    """Whether torch itself found that arguments do not fit an operator's schema."""
    return "jitfmha::fmha_fwd" in str(error)


def _names(text: str, name: str) -> bool:
    # About all tensors of a call: no kernel for their dtype, where all reasons are given, or none
    # for their device.
    if text.startswith(("no kernel serves this call", "device ")) and name in ("q", "kv", "qkv"):
        return True
    names = (name, *_ALSO_CALLED.get(name, ()))
    return any(re.search(rf"(?<![\w.]){n}(?!\w)", text) for n in names)


def _facts(arguments: Arguments, text: str) -> list[str]:
    """What a text may say of the arguments that it names."""
    facts = ["shares memory", "top-left"]
    for name, value in arguments.items():
        if not _names(text, name):
            continue
        if not isinstance(value, Tensor):
            facts += [repr(value), repr(python_value(value))]
            if type(value) is int and abs(value) < _NO_MEMORY_HAS**2:
                facts.append(repr(float(value)))  # what an operator's schema makes of it
            continue
        facts += [str(value.dtype), str(value.device), str(tuple(value.shape))]
        if value.dim() == 0 and not value.is_meta:
            facts += [repr(value), repr(python_value(value))]
        facts += [str(size) for size in value.shape]
        if value.layout == torch.strided:
            facts += [str(stride) for stride in value.stride()]
            if value.dim() == 1 and not value.is_meta:
                try:
                    numbers = value.tolist()
                except RuntimeError:
                    continue  # of a dtype that torch knows by name only
                facts += [str(number) for number in numbers]
                # The lengths of sequences, where these are prefix sums.
                facts += [str(end - start) for start, end in pairwise(numbers)]
    return facts


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _outcome(call: Call) -> tuple[Any, Exception | None]:
    """What a call returns, or raises."""
    with all_threads():
        try:
            return call.subject.function(**call.arguments), None
        except Exception as error:
            return None, error


_threads = torch.get_num_threads()


@contextmanager
def all_threads() -> Iterator[None]:
    """The calls have all threads; everything around them is small, and faster with one."""
    torch.set_num_threads(_threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)


# ---- A call that is known to work ----------------------------------------------------------------


class KnownCall:
    """A call that has worked before, and gives the same bits again."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(1)
        self._inputs = [torch.randn(1, 3, 2, 64, generator=rng) for _ in "qkv"]
        self._expected = fmha_fwd(*self._inputs)

    def check(self) -> None:
        assert self._agrees(fmha_fwd(*self._inputs))

    def _agrees(self, out: Tensor) -> bool:
        return torch.equal(out, self._expected)


# ---- Sizes ---------------------------------------------------------------------------------------


def _kind(asked: Arguments) -> tuple[Any, ...]:
    q, k, v = asked["q"], asked["k"], asked["v"]
    is_column_major = v.shape[-1] > 1 and v.stride(-1) != 1
    return q.dtype, k.dtype, q.shape[-1], v.shape[-1], is_column_major


def _out_bytes(asked: Arguments) -> int:
    q, v = asked["q"], asked["v"]
    return math.prod(q.shape[:-1]) * v.shape[-1] * q.element_size()


def _has_ranks(asked: Arguments) -> bool:
    """Whether the tensors have the sizes of which `_is_too_big` speaks."""
    return all(isinstance(asked[name], Tensor) and asked[name].dim() >= 3 for name in "qkv")


def _is_too_big(asked: Arguments) -> bool:
    pairs = math.prod(asked["q"].shape[:-1]) * asked["k"].shape[-3]
    is_big = _out_bytes(asked) > MOST_BYTES or pairs > _MOST_PAIRS
    return is_big or max((*asked["q"].shape, *asked["k"].shape)) > _MOST_PAIRS


def _check_too_big(call: Call, asked: Arguments, tally: Tally, known: KnownCall) -> None:
    """What no process has memory for is refused in words; what would take hours is not tried."""
    is_meta = asked["q"].is_meta
    if not is_meta and _out_bytes(asked) and _out_bytes(asked) < _NO_MEMORY_HAS:
        reject()
    if not is_meta and not _out_bytes(asked) and math.prod(asked["q"].shape[:-1]):
        reject()
    _, error = _outcome(call)
    if error is None:
        assert is_meta or not _out_bytes(asked)
        tally.count("returned")
        return
    says_so = _says_no_memory(error)
    assert says_so or type(error) in REFUSALS, f"an error of the wrong type: {_text(error)}"
    if not says_so:
        assert any(str(size) in str(error) for size in asked["q"].shape), _text(error)
    known.check()
    tally.count("too big")


def _says_no_memory(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


# ---- Memory --------------------------------------------------------------------------------------


class _Memory:
    """What all memory behind the arguments holds, bit by bit."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._before = {name: _content(value) for name, value in arguments.items()}

    def before(self, x: Tensor) -> Tensor:
        """The values that `x`, one of the arguments, had."""
        name = next(n for n, value in self._arguments.items() if value is x)
        content = self._before[name]
        assert content is not None
        whole = torch.empty(0, dtype=x.dtype).set_(content.untyped_storage())
        return whole.as_strided(x.shape, x.stride(), x.storage_offset())

    def check_unchanged(self, but: Iterable[object] = ()) -> None:
        """No byte changed, other than those of elements of the tensors in `but`."""
        for name, before in self._before.items():
            after = _content(self._arguments[name])
            if before is None or after is None:
                continue
            changed = before != after
            for x in but:
                if isinstance(x, Tensor) and changed.any() and _shares(x, self._arguments[name]):
                    mine = torch.zeros(len(changed) // x.element_size(), dtype=torch.bool)
                    mine.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
                    mine = mine.repeat_interleave(x.element_size())
                    changed[: len(mine)] &= ~mine
            assert not changed.any(), f"{name} was written to"


def _is_dense(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_meta


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _content(value: object) -> Tensor | None:
    """A copy of the bytes of a tensor's or an array's whole memory."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return torch.from_numpy(value.copy()).view(torch.uint8).reshape(-1)
    if not isinstance(value, Tensor) or not _is_dense(value):
        return None
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).clone()


def _is_fresh(memory: _Memory, out: Tensor, unused: float) -> bool:
    """Whether rows of `out` that nobody writes are known to hold `unused`."""
    return unused == 0.0 or out.is_meta or bool((memory.before(out) == FRESH).all())
