"""What a call over rows asks for: its arguments, their checks, and what kernels are made for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..problem.checks import check_all_beside, check_numbers, not_a_tensor
from ..problem.dtypes import DTYPE_NAMES, FP8_NAMES, TORCH_DTYPES

Kind = Literal["softmax", "rms_norm", "layer_norm"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MOST_COLUMNS = 131072
ROW_DTYPES = torch.float32, torch.bfloat16, torch.float16
QUANTISED_DTYPES = (*FP8_NAMES, torch.int8)


class RowArguments(NamedTuple):
    """The arguments of one call; tensors that it does without are None."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    kind: Kind
    eps: float
    out_dtype: torch.dtype | None


class RowBackwardArguments(NamedTuple):
    """The arguments of a backward pass.

    Attributes:
        dout, dsum: the gradients of the results; the latter of the sum with a residual, or None.
        x: what was normalised, with a residual the sum; of a softmax the result.
        bias: a tensor of the bias's dtype where its gradient is wanted.
        wants_weight: whether the gradient of the weight is.
    """

    dout: Tensor
    dsum: Tensor | None
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    kind: Kind
    eps: float
    wants_weight: bool

    @property
    def has(self) -> tuple[bool, bool]:
        """Whether the gradients of the weight and of the bias are asked for."""
        return self.weight is not None and self.wants_weight, self.bias is not None


class RowTraits(NamedTuple):
    """What a kernel is made for, but for its target; dtypes by their names in kernels.

    ``weight_dtype`` is that of weights and biases, and that of the rows where there are none.
    """

    kind: Kind
    dtype: str
    weight_dtype: str
    out_dtype: str
    has_weight: bool
    has_bias: bool
    has_residual: bool

    @property
    def name(self) -> str:
        words = (
            *(self.kind, self.dtype),
            f"{self.weight_dtype}weight" if self.has_weight else "",
            f"{self.weight_dtype}bias" if self.has_bias else "",
            "residual" if self.has_residual else "",
            f"{self.out_dtype}out" if self.out_dtype != self.dtype else "",
        )
        return "_".join(word for word in words if word)

    @property
    def is_quantised(self) -> bool:
        return TORCH_DTYPES[self.out_dtype] in QUANTISED_DTYPES


def traits_of(arguments: RowArguments) -> RowTraits:
    """The traits of a call, after all checks.

    Raises:
        TypeError, ValueError: an argument breaks a rule; the text names it and its value.
        NotImplementedError: nothing serves the call.
    """
    x, residual, weight, bias, kind, eps, out_dtype = arguments
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; choose one of {', '.join(KINDS)}")
    if not isinstance(x, Tensor):
        raise not_a_tensor("x", x)
    check_all_beside((("x", x), ("residual", residual), ("weight", weight), ("bias", bias)))
    if x.dtype not in ROW_DTYPES:
        raise NotImplementedError(
            f"x has dtype {x.dtype}; rows are served in float32, bfloat16 and float16"
        )
    if x.dim() == 0 or not 1 <= x.shape[-1] <= MOST_COLUMNS:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; its last dimension must be from 1 to {MOST_COLUMNS}"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual has shape {tuple(residual.shape)} and dtype {residual.dtype}, x has "
            f"{tuple(x.shape)} and {x.dtype}; both must be the same"
        )
    of_weights = check_weights((("weight", weight, x), ("bias", bias, x)), x.dtype)
    check_eps(eps)
    if out_dtype is not None and out_dtype not in (x.dtype, *QUANTISED_DTYPES):
        raise NotImplementedError(
            f"out_dtype is {out_dtype}; results are {x.dtype} as x, or quantised to one of "
            f"{', '.join(map(str, QUANTISED_DTYPES))}"
        )
    return RowTraits(
        *(kind, DTYPE_NAMES[x.dtype], DTYPE_NAMES[of_weights], DTYPE_NAMES[out_dtype or x.dtype]),
        *(weight is not None, bias is not None, residual is not None),
    )


LARGEST_EPS = torch.finfo(torch.float32).max


def check_eps(eps: float) -> None:
    """Raise ``TypeError`` or ``ValueError`` where it is none of a norm."""
    check_numbers(eps=eps)
    if not 0 <= eps <= LARGEST_EPS:
        raise ValueError(f"eps is {eps}; it must be at least 0, and finite in float32")


def check_weights(
    named: Iterable[tuple[str, Tensor | None, Tensor | None]], dtype: torch.dtype
) -> torch.dtype:
    """That of weights, each beside what it is for, which has ``dtype``; the same without any.

    Raises ``ValueError`` where one has another shape or dtype than it must have.
    """
    of_weights = None
    for name, weight, x in named:
        if weight is None:
            continue
        if x is None:
            raise ValueError(f"{name} has shape {tuple(weight.shape)}; what it is for is missing")
        if weight.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} has shape {tuple(weight.shape)}; with rows of {x.shape[-1]} numbers it "
                f"must have shape ({x.shape[-1]},)"
            )
        if weight.dtype not in (dtype, torch.float32) or of_weights not in (None, weight.dtype):
            raise ValueError(
                f"{name} has dtype {weight.dtype}; weights must be {dtype} as what they are for, "
                "or float32, and all the same"
            )
        of_weights = weight.dtype
    return of_weights or dtype


def as_rows(x: Tensor, most_stride: int | None = None) -> Tensor:
    """A matrix of all rows, whose columns follow each other.

    A view as long as one stride, less than ``most_stride``, leads from each row to the next,
    otherwise a copy.
    """
    rows = x.reshape(-1, x.shape[-1])
    if most_stride is not None and rows.stride(0) >= most_stride:
        return rows.contiguous()
    return rows if rows.shape[1] == 1 or rows.stride(1) == 1 else rows.contiguous()
