"""The arguments of one attention call, and the tensors of one launch, as values.

:class:`Arguments` is made once, by the public function, and goes down to the checks; what a kernel
is launched with is :class:`Tensors`. Optional arguments that belong together are one nested value,
which is None where the call does not have them. ``OPTIONS`` lists the keyword arguments.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, NamedTuple, TypedDict, TypeGuard

import torch
from torch import Generator, Tensor

from .checks import check_numbers, describe, refuse_unexpected
from .features import Feature
from .mask import INT64_MAX, OPEN_WINDOW, Mask
from .packed_rows import sequences_of_rows
from .page_lists import are_lists
from .score_features import (
    NUMBER_FEATURES,
    SCORE_FEATURES,
    TENSOR_FEATURES,
    Modifiers,
    gather_modifiers,
)
from .torch_parts import is_any_of_subclass, is_any_special

# Annotations are not deferred here: each of the many fields would be compiled once more on import.

new_tuple = tuple.__new__
"""What a NamedTuple's own constructor ends in, at half of its cost; for what every call makes."""

Bf16Cvt = Literal["rtne", "rtna", "rtz"]


class PlainOptions(TypedDict, total=False):
    """The keyword arguments of ``fmha_fwd`` and ``fmha_bwd`` that plain attention has."""

    softmax_scale: float | None
    mask: int | str
    window_size: tuple[int, int]
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_k_padded: Tensor | None
    bf16_cvt: Bf16Cvt


class FeatureOptions(TypedDict, total=False):
    """The keyword arguments of features beyond plain attention."""

    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    p_descale: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    logit_softcap: float
    sink: Tensor | None
    sink_size: int
    dropout_p: float
    rng_state: Tensor | None
    block_table: Tensor | None
    num_splits: int


class AttentionOptions(PlainOptions, FeatureOptions, total=False):
    """The keyword arguments that ``fmha_fwd`` and ``fmha_bwd`` have in common."""


class Options(AttentionOptions, total=False):
    """The keyword arguments of ``fmha_fwd`` but ``return_lse``, on which its result depends."""

    out: Tensor | None
    generator: Generator | None
    deterministic: bool | None


class Option(NamedTuple):
    """A keyword argument that ``fmha_fwd`` and the operators have.

    Attributes:
        schema: its type in the schemas of the operators.
        features: what a call with it may ask for; none only where every kernel has what it does.
        default: in the schemas; None: the operators' callers have to give it.
    """

    name: str
    schema: str
    features: tuple[Enum, ...]
    default: str | None = None


_IN_EVERY_KERNEL: tuple[Enum, ...] = ()
_SEQUENCES = (Feature.GROUP_MODE,)
_UNUSED_ROWS = (Feature.PADDED_SEQUENCES,)

# A schema has no union of int and str, so `mask` is text; lengths may be symbolic.
OPTIONS = (
    Option("softmax_scale", "float?", _IN_EVERY_KERNEL),
    Option("mask", "str", (Feature.CAUSAL_MASK, Feature.WINDOW_MASK, Feature.TOP_LEFT_MASK)),
    Option("window_size", "SymInt[2]", (Feature.WINDOW_MASK, Feature.CAUSAL_MASK)),
    Option("return_lse", "bool", (Feature.LSE,)),
    Option("cu_seqlens_q", "Tensor?", _SEQUENCES),
    Option("cu_seqlens_k", "Tensor?", _SEQUENCES),
    Option("max_seqlen_q", "SymInt?", _SEQUENCES),
    Option("max_seqlen_k", "SymInt?", _SEQUENCES),
    Option("cu_seqlens_q_padded", "Tensor?", _UNUSED_ROWS),
    Option("cu_seqlens_k_padded", "Tensor?", _UNUSED_ROWS),
    Option("out", "Tensor(a!)", _IN_EVERY_KERNEL),
    Option("bf16_cvt", "str", _IN_EVERY_KERNEL, '"rtne"'),
    Option("q_descale", "Tensor?", (Feature.DESCALES, Feature.QUERY_HEAD_DESCALES), "None"),
    Option("k_descale", "Tensor?", (Feature.DESCALES, Feature.TOKEN_DESCALES), "None"),
    Option("v_descale", "Tensor?", (Feature.DESCALES, Feature.TOKEN_DESCALES), "None"),
    Option("p_descale", "Tensor?", (Feature.INT8_PROBABILITIES,), "None"),
    *(Option(row.name, row.schema, row.features, str(row.default)) for row in SCORE_FEATURES),
    Option("dropout_p", "float", (Feature.DROPOUT,), "0.0"),
    Option("rng_state", "Tensor?", (Feature.DROPOUT,), "None"),
    Option("block_table", "Tensor?", (Feature.PAGED_KEYS,), "None"),
    Option("num_splits", "int", (Feature.NUM_SPLITS,), "0"),
)
"""In the order of the operators' arguments."""

OPTION_NAMES = (*(option.name for option in OPTIONS), "generator", "deterministic")


class CuSeqlens(NamedTuple):
    """The sequences of a gm1 call: prefix sums of their lengths, and the longest ones.

    The padded sums are the plain ones where there are no unused rows between sequences.
    """

    q: Tensor
    k: Tensor
    q_padded: Tensor
    k_padded: Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None

    def is_padded(self, has_pages: bool) -> bool:
        """Whether there may be unused rows between the sequences, of keys where these are rows."""
        return self.q_padded is not self.q or not (has_pages or self.k_padded is self.k)

    def used_rows(self, side: str, rows: int) -> Tensor:
        """Whether each row of q, or of k and v, belongs to a sequence, beside heads and columns."""
        sums = (self.q, self.q_padded) if side == "q" else (self.k, self.k_padded)
        return sequences_of_rows(rows, *sums)[2][:, None, None]

    def named(self) -> tuple[tuple[str, Tensor], ...]:
        """The prefix sums under the names of their arguments."""
        return (
            ("cu_seqlens_q", self.q),
            ("cu_seqlens_k", self.k),
            ("cu_seqlens_q_padded", self.q_padded),
            ("cu_seqlens_k_padded", self.k_padded),
        )


class Descales(NamedTuple):
    """What 8-bit inputs are multiplied with; None is 1.

    Those of tokens have the shape of ``k`` or ``v``, with 1 in place of the head dimension. ``p``
    is the scale of int8 probabilities; None where probabilities are no integers.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    p: Tensor | None = None


class Dropout(NamedTuple):
    """The probability, above 0, by which probabilities are dropped, and the random numbers that
    decide.

    ``rng_state`` is None only where nothing is computed, as in ``explain``.
    """

    p: float
    rng_state: Tensor | None


class KeyOptions(NamedTuple):
    """Where keys and values lie, and how they are split.

    Attributes:
        block_table: the pages of each sequence, or lists of them; None where keys do not lie in
            pages.
        num_splits: into how many parts the keys of a sequence are split; 0 leaves the choice.
        out_accum, lse_accum: where the results of each part go, if somebody wants them: float32
            ``(num_splits, b, hq, sq, hdim_v)`` and ``(num_splits, b, hq, sq)``, in gm1
            ``(num_splits, hq, total_q, ...)``; contiguous.
    """

    block_table: Tensor | None = None
    num_splits: int = 0
    out_accum: Tensor | None = None
    lse_accum: Tensor | None = None


class Arguments(NamedTuple):
    """The arguments of one call of ``fmha_fwd``, as they were given."""

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float | None = None
    mask: int | str | Mask = 0
    window_size: tuple[int, int] = OPEN_WINDOW
    return_lse: bool = False
    out: Tensor | None = None
    cu_seqlens: CuSeqlens | None = None
    bf16_cvt: Bf16Cvt = "rtne"
    descales: Descales | None = None
    modifiers: Modifiers | None = None
    dropout: Dropout | None = None
    keys: KeyOptions | None = None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: Mapping[str, Any],
        function: str = "fmha_fwd",
    ) -> "Arguments":
        """The value for keyword arguments by their public names; errors name the function.

        Raises ``TypeError`` or ``ValueError`` as the functions that gather nested values do.
        """
        rest = dict(options)
        cu_seqlens = gather_cu_seqlens(*(rest.pop(name, None) for name in _CU_SEQLENS))
        plain = {name: rest.pop(name) for name in _PLAIN if name in rest}
        return cls(q, k, v, **plain, cu_seqlens=cu_seqlens).with_features(rest, function)

    def with_features(self, options: Mapping[str, Any], function: str) -> "Arguments":
        """Return the arguments with the options of features, by their public names.

        Raises ``TypeError`` or ``ValueError`` as the functions that gather nested values do.
        """
        rest = dict(options)
        descales = gather_descales(*(rest.pop(name, None) for name in _DESCALES))
        modifying = {name: rest.pop(name) for name in Modifiers._fields if name in rest}
        drawn_by = rest.pop("generator", None), rest.pop("rng_state", None)
        dropout = gather_dropout(rest.pop("dropout_p", 0), *drawn_by)
        check_choice("deterministic", rest.pop("deterministic", None))  # only gradients need it
        table, num_splits = rest.pop("block_table", None), rest.pop("num_splits", 0)
        if rest:
            refuse_unexpected(function, rest, OPTION_NAMES)
        return self._replace(
            descales=descales,
            modifiers=gather_modifiers(modifying),
            dropout=dropout,
            keys=gather_keys(table, num_splits, self.cu_seqlens),
        )

    def has_special_options(self) -> bool:
        """Whether kernels cannot read a tensor of the options as it lies.

        Prefix sums and tables with the negative bit are refused with the other checks.
        """
        for refused in (self.cu_seqlens, self.keys):
            if refused is not None and is_any_of_subclass(*refused):
                return True
        for nested in (self.descales, self.modifiers, self.dropout):
            if nested is not None and is_any_special(*nested):
                return True
        return False

    def flattened(self) -> dict[str, Any]:
        """Return every argument under its public name."""
        flat = self._asdict()
        cu_seqlens, descales = flat.pop("cu_seqlens"), flat.pop("descales")
        modifiers, dropout = flat.pop("modifiers"), flat.pop("dropout")
        flat |= dict.fromkeys((*_CU_SEQLENS, *_DESCALES))
        if modifiers is None:
            # 0 is written out: torch.compile takes a number of the table for one that may change.
            flat |= dict.fromkeys(_TENSORS_OF_SCORES) | dict.fromkeys(_NUMBERS_OF_SCORES, 0)
        else:
            flat |= modifiers._asdict()
        flat["dropout_p"], flat["rng_state"] = dropout or (0, None)
        flat["block_table"], flat["num_splits"] = (flat.pop("keys") or KeyOptions())[:2]
        if cu_seqlens is not None:
            flat |= zip(_CU_SEQLENS, cu_seqlens, strict=True)
            for side in ("q", "k"):
                if flat[f"cu_seqlens_{side}_padded"] is flat[f"cu_seqlens_{side}"]:
                    flat[f"cu_seqlens_{side}_padded"] = None
        if descales is not None:
            flat |= zip(_DESCALES, descales, strict=True)
        return flat


_PLAIN = ("softmax_scale", "mask", "window_size", "return_lse", "out", "bf16_cvt")
_CU_SEQLENS = (
    *("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_q_padded", "cu_seqlens_k_padded"),
    *("max_seqlen_q", "max_seqlen_k"),
)
_TENSORS_OF_SCORES = tuple(row.name for row in TENSOR_FEATURES)
_NUMBERS_OF_SCORES = tuple(row.name for row in NUMBER_FEATURES)
_DESCALES = ("q_descale", "k_descale", "v_descale", "p_descale")


class Gradients(NamedTuple):
    """The gradients that a backward pass reads (``dout`` and ``dlse``) and those that it writes.

    ``dlse`` is None where nothing depends on the lse. ``dbias`` is float32 with a full batch, full
    heads and queries, whatever the bias is, and 0 before the launch; None where nobody wants it.
    """

    dout: Tensor
    dlse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None


class Tensors(NamedTuple):
    """The tensors that one launch reads and writes.

    ``lse`` is None where nobody wants it, ``cu_seqlens`` in gm0, ``descales`` where all are 1, and
    ``modifiers``, ``dropout`` and ``keys`` where there are none. ``gradients`` are those of a
    backward pass, which reads ``out`` and ``lse``. A CPU kernel looks at the numbers of
    ``cu_seqlens`` itself where they are not checked.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None = None
    cu_seqlens: CuSeqlens | None = None
    descales: Descales | None = None
    modifiers: Modifiers | None = None
    dropout: Dropout | None = None
    gradients: Gradients | None = None
    keys: KeyOptions | None = None
    lengths_are_checked: bool = True


def gather_cu_seqlens(
    q: Tensor | None,
    k: Tensor | None,
    q_padded: Tensor | None,
    k_padded: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> CuSeqlens | None:
    """The sequences of a gm1 call, or None for gm0.

    Raises ``ValueError`` where only some of what gm1 needs is given, and ``TypeError`` or
    ``ValueError`` for a ``max_seqlen`` that is no length.
    """
    if q is None and k is None:
        for name, value in (
            ("cu_seqlens_q_padded", q_padded),
            ("cu_seqlens_k_padded", k_padded),
            ("max_seqlen_q", max_seqlen_q),
            ("max_seqlen_k", max_seqlen_k),
        ):
            if value is not None:
                given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(f"{name} is given without cu_seqlens_q and cu_seqlens_k ({given})")
        return None
    if q is None or k is None:
        missing = "cu_seqlens_q" if q is None else "cu_seqlens_k"
        raise ValueError(f"{missing} is missing; group mode needs cu_seqlens_q and cu_seqlens_k")
    if max_seqlen_q is not None and not (
        max_seqlen_q.__class__ is int and 0 <= max_seqlen_q <= INT64_MAX
    ):
        _check_max_seqlen("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None and not (
        max_seqlen_k.__class__ is int and 0 <= max_seqlen_k <= INT64_MAX
    ):
        _check_max_seqlen("max_seqlen_k", max_seqlen_k)
    q_padded = q if q_padded is None else q_padded
    k_padded = k if k_padded is None else k_padded
    return new_tuple(CuSeqlens, (q, k, q_padded, k_padded, max_seqlen_q, max_seqlen_k))


def _check_max_seqlen(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} ({value!r})")
    if value < 0:
        raise ValueError(f"{name}={value} must not be negative")
    if isinstance(value, int) and value > INT64_MAX:
        raise ValueError(f"{name}={value} must be less than 2**63")


def gather_descales(
    q: Tensor | None, k: Tensor | None, v: Tensor | None, p: Tensor | None
) -> Descales | None:
    """The scales of 8-bit inputs and probabilities, or None where none is given."""
    if q is None and k is None and v is None and p is None:
        return None
    return Descales(q, k, v, p)


def is_of_tokens(descale: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a scale of k or v differs from token to token; others have one dimension or two."""
    return descale is not None and descale.dim() > 2


def gather_dropout(
    dropout_p: float, generator: Generator | None, rng_state: Tensor | None
) -> Dropout | None:
    """Dropout with the state of its random numbers, or None where nothing is dropped.

    Raises ``TypeError`` or ``ValueError`` for a ``dropout_p`` that is no probability below 1, for
    what is no generator, and where a generator stands beside a state that is drawn already.
    """
    if generator is not None and not isinstance(generator, Generator):
        given = f"{type(generator).__name__} ({generator!r})"
        raise TypeError(f"generator must be a torch.Generator, got {given}")
    if generator is not None and rng_state is not None:
        raise ValueError(
            f"generator={generator!r} cannot be combined with rng_state, which is drawn already"
        )
    check_numbers(dropout_p=dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p={dropout_p!r} must be at least 0 and less than 1")
    return None if dropout_p == 0 else Dropout(float(dropout_p), rng_state)


def gather_keys(
    block_table: Tensor | None, num_splits: int, cu_seqlens: CuSeqlens | None
) -> KeyOptions | None:
    """Where keys lie and how they are split, or None where nothing is said about it.

    Raises ``TypeError`` or ``ValueError`` for a ``num_splits`` without meaning, and where the
    lengths of paged sequences are missing or in the wrong place; the table is checked with the
    problem.
    """
    # Every paged call comes by here.
    if num_splits.__class__ is not int or not 0 <= num_splits <= MAX_NUM_SPLITS:
        check_num_splits(num_splits)
    if block_table is None:
        return None if num_splits == 0 else KeyOptions(None, num_splits)
    check_pages_have_lengths(cu_seqlens is not None)
    padded = None if cu_seqlens is None else cu_seqlens.k_padded
    if (
        cu_seqlens is not None
        and padded is not cu_seqlens.k
        and not (isinstance(block_table, Tensor) and are_lists(block_table))
    ):
        raise ValueError(
            f"cu_seqlens_k_padded ({describe(padded)}) cannot be combined with block_table "
            f"({describe(block_table)}), which says where keys lie"
        )
    return new_tuple(KeyOptions, (block_table, num_splits, None, None))


def check_choice(name: str, value: object) -> None:
    """Raise ``TypeError`` for what is neither a bool nor None, which leaves the choice."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool or None, got {type(value).__name__} ({value!r})")


def check_num_splits(num_splits: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a number of splits without meaning."""
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        given = f"{type(num_splits).__name__} ({num_splits!r})"
        raise TypeError(f"num_splits must be an int, got {given}")
    if not 0 <= num_splits <= MAX_NUM_SPLITS:
        raise ValueError(
            f"num_splits={num_splits} must be 0, which leaves the choice, or a number of parts up "
            f"to {MAX_NUM_SPLITS}"
        )


def check_pages_have_lengths(has_cu_seqlens: bool) -> None:
    """Raise ``ValueError`` for keys in pages of which nobody says how many there are."""
    if not has_cu_seqlens:
        raise ValueError(
            "block_table is given without cu_seqlens_q and cu_seqlens_k; the latter say how many "
            "keys each paged sequence has"
        )


MAX_NUM_SPLITS = 128
"""As flash-attn has it."""
