"""The table of what changes scores beside the mask: one row for each keyword argument.

Whatever else there is to such a feature follows from its row: its field in ``Modifiers`` and in
``Problem.modifiers``, its place in the key of a call and in the schemas of the operators, its field
in the structs that kernels read, its constant in their sources, and which families refuse it.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from .checks import check_given, check_numbers
from .dtypes import DTYPE_NAMES, out_dtype_of
from .features import Feature
from .mask import INT64_MAX, Mask

Family = Literal["cpu", "compiled"]
"""The families that serve score features at all."""

Dimension = Literal["batch", "head", "query", "key"]


class Beside(NamedTuple):
    """What the tensor of a score feature is checked against.

    Attributes:
        seqlen_k: in gm1 the packed rows of all sequences.
        max_seqlen_k: of gm1, where it is given.
    """

    q: Tensor
    batch: int
    seqlen_k: int
    is_group: bool
    max_seqlen_k: int | None


# Frozen, compared or printed it would take 0.7 ms of every import.
@dataclass(eq=False, repr=False)
class ScoreFeature:
    """A keyword argument of ``fmha_fwd`` and ``fmha_bwd`` that changes scores.

    Attributes:
        name: of the argument.
        schema: its type in the schemas of the operators: "Tensor?", "float" or "SymInt".
        default: what turns it off: None, 0.0 or 0.
        features: all that calls with it may ask for.
        flag: its constant in the sources of kernels, without the k before it, or in those of AMD
            GPUs kHas where it is true or false.
        word: what it is called in a kernel's name, and before its strides.
        check: gives a number as ``Modifiers`` has it; raises ``TypeError`` or ``ValueError``.
        check_tensor: the same for a tensor beside the others of the call.
        has_lengths: whether a tensor's shape changes with the lengths of a call.
        dimensions: of a tensor, the last one last; one of size 1, or that is missing, serves all.
        element: what its elements are in C++; "void" where a constant tells.
        asked: what the problem keeps of a value; that of ``default`` is false.
        feature: the one that a kept value asks for.
        constant: a kept value's constant in C++.
        served_by: the families whose kernels have it.
        read_by: those of them that look for it at run time, with no constant.
    """

    name: str
    schema: Literal["Tensor?", "float", "SymInt"]
    default: float | None
    features: tuple[Enum, ...]
    flag: str
    word: str
    check: Callable[[Any], Any] = lambda value: value
    check_tensor: Callable[[Tensor, Beside], None] = lambda tensor, beside: None
    has_lengths: bool = False
    dimensions: tuple[Dimension, ...] = ()
    element: str = "float"
    asked: Callable[[Any, Mask], Hashable] = lambda value, mask: value
    feature: Callable[[Any], Enum] | None = None
    constant: Callable[[Any], str] = lambda kept: str(bool(kept)).lower()
    served_by: frozenset[Family] = frozenset({"cpu", "compiled"})
    read_by: frozenset[Family] = frozenset()

    def __post_init__(self) -> None:
        if not self.features:
            raise ValueError(
                f"{self.name} asks for no feature: families that lack it would ignore it"
            )

    @property
    def stride_names(self) -> list[str]:
        """The fields of a tensor's strides in the structs that kernels read."""
        return [f"{self.word}_{dimension}" for dimension in self.dimensions]

    def is_off(self, value: object) -> bool:
        """Whether a value of the argument turns the feature off."""
        return value is None if self.default is None else value == self.default

    def feature_of(self, kept: object) -> Enum | None:
        """What a call asks for of which the problem keeps this; None for nothing."""
        if not kept:
            return None
        return self.features[0] if self.feature is None else self.feature(kept)


# ---- The checks of the rows ----------------------------------------------------------------------


def _check_bias(bias: Tensor, beside: Beside) -> None:
    q, batch, seqlen_k, is_group, max_seqlen_k = beside
    check_given("bias", bias, q)
    dtypes = (torch.bool, torch.float32, out_dtype_of(q.dtype))
    if bias.dtype not in dtypes:
        raise TypeError(
            f"bias has dtype {bias.dtype}; served with q of {q.dtype} are "
            f"{', '.join(map(str, dict.fromkeys(dtypes)))}"
        )
    seqlen_q, heads_q = q.shape[-3:-1]
    shape: tuple[int, ...] = (batch, heads_q, seqlen_q, seqlen_k)
    wanted = "(batch, heads of q, seqlen_q, seqlen_k)"
    if is_group:
        wanted = "(heads of q, total_q, max_seqlen_k)"
        if max_seqlen_k is None:
            raise ValueError(
                f"max_seqlen_k is missing; a bias with cu_seqlens has the shape {wanted}"
            )
        shape = (heads_q, seqlen_q, max_seqlen_k)
    if (
        bias.dim() != len(shape)
        or bias.shape[-1] != shape[-1]
        or any(given not in (1, full) for given, full in zip(bias.shape, shape, strict=True))
    ):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; expected {wanted}, which is {shape}, or 1 "
            "in place of any but the last"
        )


def _check_float32(name: str, x: Tensor, q: Tensor) -> None:
    check_given(name, x, q)
    if x.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be torch.float32")


def _check_slopes(slopes: Tensor, beside: Beside) -> None:
    _check_float32("alibi_slopes", slopes, beside.q)
    heads = beside.q.shape[-2]
    if slopes.shape not in ((heads,), (beside.batch, heads)):
        raise ValueError(
            f"alibi_slopes has shape {tuple(slopes.shape)}; expected (heads of q,) or "
            f"(batch, heads of q), which is {(beside.batch, heads)}"
        )


def _check_sink(sink: Tensor, beside: Beside) -> None:
    _check_float32("sink", sink, beside.q)
    heads = beside.q.shape[-2]
    if sink.shape != (heads,):
        raise ValueError(
            f"sink has shape {tuple(sink.shape)}; expected (heads of q,), which is {(heads,)}"
        )


# Beyond it, and below its inverse, a score over the soft cap leaves float32's range.
_LARGEST_SOFTCAP = 2.0**100


def _checked_softcap(value: float) -> float:
    check_numbers(logit_softcap=value)
    if not 0 <= value <= _LARGEST_SOFTCAP or 0 < value < 1 / _LARGEST_SOFTCAP:
        raise ValueError(f"logit_softcap={value!r} must be 0 (off) or between 2**-100 and 2**100")
    return float(value)


def _checked_sink_size(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"sink_size must be an int, got {type(value).__name__} ({value!r})")
    if value < 0 or (isinstance(value, int) and value > INT64_MAX):
        raise ValueError(f"sink_size={value} must be at least 0 and less than 2**63")
    return value


# ---- The table -----------------------------------------------------------------------------------

_BIAS_DTYPES = {torch.bool: "bool", **DTYPE_NAMES}

SCORE_FEATURES = [
    ScoreFeature(
        name="bias",
        schema="Tensor?",
        default=None,
        features=(Feature.BIAS, Feature.BOOLEAN_BIAS),
        flag="Bias",
        word="bias",
        check_tensor=_check_bias,
        has_lengths=True,
        dimensions=("batch", "head", "query", "key"),
        element="void",
        asked=lambda bias, mask: _BIAS_DTYPES[bias.dtype],
        feature=lambda dtype: Feature.BOOLEAN_BIAS if dtype == "bool" else Feature.BIAS,
        # "bool" is no name in C++.
        constant=lambda dtype: f"Bias::{'boolean' if dtype == 'bool' else dtype or 'none'}",
    ),
    ScoreFeature(
        name="alibi_slopes",
        schema="Tensor?",
        default=None,
        features=(Feature.ALIBI,),
        flag="Alibi",
        word="alibi",
        check_tensor=_check_slopes,
        dimensions=("batch", "head"),
        asked=lambda slopes, mask: True,
    ),
    ScoreFeature(
        name="logit_softcap",
        schema="float",
        default=0.0,
        features=(Feature.SOFTCAP,),
        flag="Softcap",
        word="softcap",
        check=_checked_softcap,
    ),
    ScoreFeature(
        name="sink",
        schema="Tensor?",
        default=None,
        features=(Feature.SINKS,),
        flag="Sink",
        word="sink",
        check_tensor=_check_sink,
        dimensions=("head",),
        asked=lambda sink, mask: True,
        # It costs a look for each row.
        read_by=frozenset({"cpu"}),
    ),
    ScoreFeature(
        name="sink_size",
        schema="SymInt",
        default=0,
        features=(Feature.SINK_TOKENS,),
        flag="SinkTokens",
        word="sinks",
        check=_checked_sink_size,
        asked=lambda size, mask: 0 if mask.left is None else size,
    ),
]

TENSOR_FEATURES = [row for row in SCORE_FEATURES if row.default is None]
NUMBER_FEATURES = [row for row in SCORE_FEATURES if row.default is not None]

if TYPE_CHECKING:
    # What the rows come to, for type checkers.
    class Modifiers(NamedTuple):  # noqa: D101
        bias: Tensor | None = None
        alibi_slopes: Tensor | None = None
        logit_softcap: float = 0.0
        sink: Tensor | None = None
        sink_size: int = 0

    class AskedModifiers(NamedTuple):  # noqa: D101
        bias: str | None = None
        alibi_slopes: bool | None = None
        logit_softcap: float = 0.0
        sink: bool | None = None
        sink_size: int = 0
else:
    _NAMES = [row.name for row in SCORE_FEATURES]
    _DEFAULTS = [row.default for row in SCORE_FEATURES]
    Modifiers = namedtuple("Modifiers", _NAMES, defaults=_DEFAULTS)  # noqa: PYI024
    Modifiers.__doc__ = "What changes the scores beside the mask; each is off by its default."
    AskedModifiers = namedtuple("AskedModifiers", _NAMES, defaults=_DEFAULTS)  # noqa: PYI024
    AskedModifiers.__doc__ = "What a problem keeps of ``Modifiers``: no tensors."


def gather_modifiers(values: Mapping[str, Any]) -> Modifiers | None:
    """What changes the scores, by the names of the arguments; None where nothing does.

    Raises ``TypeError`` or ``ValueError`` for a number without meaning; tensors are checked with
    the problem.
    """
    given: dict[str, Any] = {}
    for row in SCORE_FEATURES:
        if row.name in values:
            value = values[row.name]
            if row.default is not None:
                value = row.check(value)
            if not row.is_off(value):
                given[row.name] = value
    return Modifiers(**given) if given else None


def check_modifiers(modifiers: Modifiers | None, beside: Beside, *, have_lengths: bool) -> None:
    """Check those tensors whose shapes change with the lengths of a call, or the others."""
    if modifiers is None:
        return
    for row, value in zip(SCORE_FEATURES, modifiers, strict=True):
        if row.default is None and value is not None and row.has_lengths is have_lengths:
            row.check_tensor(cast("Tensor", value), beside)


def asked_modifiers(modifiers: Modifiers | None, mask: Mask) -> AskedModifiers:
    """Reduce the modifiers to what a problem keeps of them, which has no tensors."""
    if modifiers is None:
        return AskedModifiers()
    return AskedModifiers._make(
        row.default if row.is_off(value) else row.asked(value, mask)
        for row, value in zip(SCORE_FEATURES, modifiers, strict=True)
    )
