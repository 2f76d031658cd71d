"""The arguments of one attention call, and the tensors of one launch, as values.

:class:`Arguments` is made once, by the public function, and goes down to the checks; what a kernel
is launched with is :class:`Tensors`. Optional arguments that belong together are one nested value,
which is None where the call does not have them. A new argument of ``fmha_fwd`` stands in its
signature, in :class:`Options`, and here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from .mask import INT64_MAX, OPEN_WINDOW, Mask

if TYPE_CHECKING:
    from collections.abc import Mapping

new_tuple = tuple.__new__
"""What a NamedTuple's own constructor ends in, at half of its cost; for what every call makes."""

Bf16Cvt = Literal["rtne", "rtna", "rtz"]


class Options(TypedDict, total=False):
    """The keyword arguments of ``fmha_fwd`` but ``return_lse``, on which its result depends."""

    softmax_scale: float | None
    mask: int | str
    window_size: tuple[int, int]
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_k_padded: Tensor | None
    out: Tensor | None
    bf16_cvt: Bf16Cvt
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None


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

    @property
    def is_padded(self) -> bool:
        """Whether there may be unused rows between the sequences."""
        return self.q_padded is not self.q or self.k_padded is not self.k

    def named(self) -> tuple[tuple[str, Tensor], ...]:
        """The prefix sums under the names of their arguments."""
        return (
            ("cu_seqlens_q", self.q),
            ("cu_seqlens_k", self.k),
            ("cu_seqlens_q_padded", self.q_padded),
            ("cu_seqlens_k_padded", self.k_padded),
        )


class Descales(NamedTuple):
    """What the fp8 inputs are multiplied with; None is 1."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None

    def named(self) -> tuple[tuple[str, Tensor | None], ...]:
        """The scales under the names of their arguments."""
        return (("q_descale", self.q), ("k_descale", self.k), ("v_descale", self.v))


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

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Arguments:
        """The value for keyword arguments by their public names.

        Raises ``TypeError`` or ``ValueError`` as :func:`gather_cu_seqlens` does.
        """
        rest = dict(options)
        cu_seqlens = gather_cu_seqlens(*(rest.pop(name, None) for name in _CU_SEQLENS))
        descales = gather_descales(*(rest.pop(name, None) for name in _DESCALES))
        return cls(q, k, v, cu_seqlens=cu_seqlens, descales=descales, **rest)

    def flattened(self) -> dict[str, Any]:
        """Everything by its public name."""
        flat = self._asdict()
        cu_seqlens, descales = flat.pop("cu_seqlens"), flat.pop("descales")
        flat |= dict.fromkeys((*_CU_SEQLENS, *_DESCALES))
        if cu_seqlens is not None:
            flat |= zip(_CU_SEQLENS, cu_seqlens, strict=True)
            for side in ("q", "k"):
                if flat[f"cu_seqlens_{side}_padded"] is flat[f"cu_seqlens_{side}"]:
                    flat[f"cu_seqlens_{side}_padded"] = None
        if descales is not None:
            flat |= zip(_DESCALES, descales, strict=True)
        return flat


_CU_SEQLENS = (
    *("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_q_padded", "cu_seqlens_k_padded"),
    *("max_seqlen_q", "max_seqlen_k"),
)
_DESCALES = ("q_descale", "k_descale", "v_descale")


class Tensors(NamedTuple):
    """The tensors that one launch reads and writes.

    ``lse`` is None where nobody wants it, ``cu_seqlens`` in gm0, and ``descales`` where all are 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None = None
    cu_seqlens: CuSeqlens | None = None
    descales: Descales | None = None


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
    if max_seqlen_q is not None:
        _check_max_seqlen("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None:
        _check_max_seqlen("max_seqlen_k", max_seqlen_k)
    q_padded = q if q_padded is None else q_padded
    k_padded = k if k_padded is None else k_padded
    return new_tuple(CuSeqlens, (q, k, q_padded, k_padded, max_seqlen_q, max_seqlen_k))


def _check_max_seqlen(name: str, value: object) -> None:
    if value.__class__ is int and 0 <= value <= INT64_MAX:
        return
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} ({value!r})")
    if value < 0:
        raise ValueError(f"{name}={value} must not be negative")
    if isinstance(value, int) and value > INT64_MAX:
        raise ValueError(f"{name}={value} must be less than 2**63")


def gather_descales(q: Tensor | None, k: Tensor | None, v: Tensor | None) -> Descales | None:
    """The scales of fp8 inputs, or None where all of them are 1."""
    if q is None and k is None and v is None:
        return None
    return Descales(q, k, v)
