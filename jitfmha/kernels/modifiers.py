"""Score features and dropout as kernels have them: what is compiled in, and what is packed.

All of it follows from the rows of ``SCORE_FEATURES``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from ..problem.arguments import Dropout
from ..problem.dropout import largest_kept
from ..problem.features import Feature
from ..problem.mask import Mask
from ..problem.problem import Problem
from ..problem.score_features import (
    NUMBER_FEATURES,
    SCORE_FEATURES,
    TENSOR_FEATURES,
    AskedModifiers,
    Family,
    Modifiers,
)

# Of constants that are true or false; others have no verb.
_PREFIXES: dict[Family, str] = {"cpu": "k", "compiled": "kHas"}
_TRUTHS = ("true", "false")
_NOTHING = AskedModifiers()


def served_features(family: Family) -> frozenset[Feature]:
    """What calls may ask for of scores, and the kernels of a family do."""
    rows = (row for row in SCORE_FEATURES if family in row.served_by)
    return frozenset(cast("Feature", feature) for row in rows for feature in row.features)


@dataclass(frozen=True)
class ModifierTraits:
    """What is compiled into a family's kernels beside the mask.

    ``asked`` are the score features; of numbers True in place of their value.
    """

    family: Family
    asked: AskedModifiers = _NOTHING
    dropout: bool = False

    @classmethod
    def of(cls, problem: Problem, family: Family) -> ModifierTraits:
        """Take what a problem asks for, without what the family's kernels look for at run time."""
        asked = (
            row.default if not kept or family in row.read_by else _compiled_in(kept)
            for row, kept in zip(SCORE_FEATURES, problem.modifiers, strict=True)
        )
        return cls(family, AskedModifiers._make(asked), problem.dropout_p > 0)

    def constants(self) -> str:
        values = {
            row.flag: row.constant(kept)
            for row, kept in zip(SCORE_FEATURES, self.asked, strict=True)
            if self.family in row.served_by - row.read_by
        }
        values["Dropout"] = str(self.dropout).lower()
        return "\n".join(
            f"constexpr auto {_PREFIXES[self.family] if value in _TRUTHS else 'k'}{flag} = {value};"
            for flag, value in values.items()
        )

    def words(self) -> tuple[str, ...]:
        named = (
            f"{row.word}_{kept}" if isinstance(kept, str) else row.word
            for row, kept in zip(SCORE_FEATURES, self.asked, strict=True)
            if kept
        )
        return (*named, *(("dropout",) if self.dropout else ()))


def _compiled_in(kept: object) -> object:
    return kept if isinstance(kept, str) else True


# Of each tensor its place among the modifiers, what is packed where there is none, and whether its
# elements have no type in C++.
_TENSORS = [
    (SCORE_FEATURES.index(row), (0,) * (1 + len(row.dimensions)), row.element == "void")
    for row in TENSOR_FEATURES
]
_NO_TENSORS = [x for _, nothing, _ in _TENSORS for x in nothing]


def packed_tensors(modifiers: Modifiers | None, *, has_strides_in_bytes: bool = False) -> list[int]:
    """Address and strides of each tensor, in the order of the rows and their dimensions.

    Strides are 0 where one element serves all. ``has_strides_in_bytes`` is of those whose elements
    have no type in C++; others count elements.
    """
    if modifiers is None:
        return _NO_TENSORS
    packed: list[int] = []
    for place, nothing, has_no_type in _TENSORS:
        x = cast("Tensor | None", modifiers[place])
        if x is None:
            packed += nothing
            continue
        strides = x.stride()
        if 1 in x.shape:
            sizes = zip(x.shape, strides, strict=True)
            strides = tuple([0 if size == 1 else stride for size, stride in sizes])
        if has_strides_in_bytes and has_no_type:
            unit = x.element_size()
            strides = tuple([unit * stride for stride in strides])
        packed.append(x.data_ptr())
        # Dimensions that are missing come first.
        packed += nothing[1 + len(strides) :]
        packed += strides
    return packed


def read_tensors(modifiers: Modifiers | None, dropout: Dropout | None) -> list[Tensor | None]:
    """Gather the tensors that kernels read of score features and dropout."""
    tensors: list[Tensor | None] = [getattr(modifiers, row.name, None) for row in TENSOR_FEATURES]
    return [*tensors, None if dropout is None else dropout.rng_state]


def packed_window(mask: Mask, open_side: int) -> tuple[int, int, bool]:
    """How far a query sees to the left and right, and whether the diagonal is bottom-right.

    ``open_side`` is farther than any sequence reaches.
    """
    left, right = (
        open_side if side is None else min(side, open_side) for side in (mask.left, mask.right)
    )
    return left, right, not mask.top_left


def packed_dropout(problem: Problem) -> tuple[int, float]:
    """The largest random byte of a probability that is kept, and what that is multiplied with."""
    return largest_kept(problem.dropout_p), 1 / (1 - problem.dropout_p)


def packed_numbers(problem: Problem, largest: int) -> list[float]:
    """The numbers among the score features in order of the rows; integers up to ``largest``."""
    values = (getattr(problem.modifiers, row.name) for row in NUMBER_FEATURES)
    return [min(value, largest) if isinstance(value, int) else value for value in values]


def address(x: Tensor | None) -> int:
    """Return the address of a tensor's first element; 0 for none."""
    return 0 if x is None else x.data_ptr()
