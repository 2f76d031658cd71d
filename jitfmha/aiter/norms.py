"""AITER's RMSNorm and LayerNorm over rows, by :func:`jitfmha.rms_norm` and ``layer_norm``.

Source: ``aiter/ops/rmsnorm.py`` and ``aiter/ops/norm.py`` of github.com/ROCm/aiter. Here any shape
is served whose last dimension is normalised, and results have gradients where they are new.
"""

# ruff: noqa: A002 - `input` is AITER's name.
from __future__ import annotations

from torch import Tensor

from ..layers.peer_values import as_flag, check_out, ends_in, written_to
from ..problem.checks import check_all_beside, describe, not_a_tensor
from ..problem.memory import refuse_shared_rooms
from ..problem.torch_parts import refuse_derivatives
from ..rows import interface as rows

_NAMES = {"x": "input", "eps": "epsilon", "residual": "residual_in"}


def _refuse_model_sensitive(value: int) -> None:
    if value:
        raise NotImplementedError(
            f"use_model_sensitive_rmsnorm is {value}; results are rounded once, as with 0"
        )


def _rms_norm(
    input: Tensor, weight: Tensor, epsilon: float, use_model_sensitive_rmsnorm: int
) -> Tensor:
    _refuse_model_sensitive(use_model_sensitive_rmsnorm)
    result = rows.rms_norm(input, weight, eps=epsilon)
    assert isinstance(result, Tensor)
    return result


def _rms_norm_with_add(
    out: Tensor,
    residual_out: Tensor,
    epsilon: float,
    gemma_norm: bool,
    use_model_sensitive_rmsnorm: int,
    **read: Tensor,
) -> None:
    for name, x in read.items():
        if not isinstance(x, Tensor):
            raise not_a_tensor(name, x)
    refuse_derivatives("rmsnorm2d_fwd_with_add", **read)
    _refuse_model_sensitive(use_model_sensitive_rmsnorm)
    weight = read["weight"]
    if as_flag("gemma_norm", gemma_norm):
        weight = weight.float() + 1
    result, total = rows.rms_norm(read["input"], weight, eps=epsilon, residual=read["residual_in"])
    check_out("out", out, result)
    check_out("residual_out", residual_out, total)
    refuse_shared_rooms(out=out, residual_out=residual_out)
    written_to(out, result)
    written_to(residual_out, total, name="residual_out")


def _layer_norm(
    input: Tensor, weight: Tensor, bias: Tensor, epsilon: float, x_bias: Tensor | None
) -> Tensor:
    if x_bias is not None:
        if not isinstance(input, Tensor):
            raise not_a_tensor("input", input)
        check_all_beside((("input", input), ("x_bias", x_bias)))
        if x_bias.shape != input.shape[-1:] or x_bias.dtype != input.dtype:
            raise ValueError(
                f"x_bias is {describe(x_bias)}, input is {describe(input)}; expected (n,) and "
                "(..., n) of one dtype"
            )
    x = input if x_bias is None else input + x_bias
    result = rows.layer_norm(x, weight, bias, eps=epsilon)
    assert isinstance(result, Tensor)
    return result


@ends_in(_rms_norm, **_NAMES)
def rms_norm(
    input: Tensor, weight: Tensor, epsilon: float, use_model_sensitive_rmsnorm: int = 0
) -> Tensor:
    """RMSNorm over the last dimension; arguments as in :func:`jitfmha.rms_norm`.

    Raises ``NotImplementedError`` where ``use_model_sensitive_rmsnorm`` is not 0, and what
    :func:`jitfmha.rms_norm` does.
    """


@ends_in(_rms_norm, **_NAMES)
def rmsnorm2d_fwd(
    input: Tensor, weight: Tensor, epsilon: float, use_model_sensitive_rmsnorm: int = 0
) -> Tensor:
    """The same as :func:`rms_norm`."""


@ends_in(_rms_norm_with_add, **_NAMES)
def rmsnorm2d_fwd_with_add(
    out: Tensor,
    input: Tensor,
    residual_in: Tensor,
    residual_out: Tensor,
    weight: Tensor,
    epsilon: float,
    gemma_norm: bool = False,
    use_model_sensitive_rmsnorm: int = 0,
) -> None:
    """RMSNorm of ``input + residual_in`` into ``out``, and the sum into ``residual_out``.

    Either may be the input that it comes from. With ``gemma_norm`` the weight is ``weight + 1``.
    There are no gradients. Raises as :func:`rms_norm`.
    """


@ends_in(_layer_norm, **_NAMES)
def layernorm2d_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    epsilon: float = 1e-5,
    x_bias: Tensor | None = None,
) -> Tensor:
    """LayerNorm over the last dimension, of ``input + x_bias`` where that is given.

    The other arguments, and what is raised, are those of :func:`jitfmha.layer_norm`.
    """
