"""A combination as a call with tensors of its own, whose values are random, to be run as it is."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.backward import BackwardArguments, make_backward_problem, new_gradients
from ..problem.arguments import Arguments, Gradients, Tensors
from ..problem.dropout import new_rng_state
from ..problem.dtypes import EIGHT_BIT_NAMES, TORCH_DTYPES, out_dtype_of
from ..problem.features import Feature
from ..problem.problem import Problem, make_problem
from .combination import Combination

_DROPOUT_P, _SOFTCAP = 0.125, 30.0
_SERVED = frozenset(
    (
        *(Feature.LSE, Feature.DROPOUT, Feature.DESCALES),
        *(Feature.BIAS, Feature.BOOLEAN_BIAS, Feature.ALIBI, Feature.SOFTCAP),
    )
)


class TrialCall(NamedTuple):
    """What plans are made for, and what their launches take."""

    problem: Problem
    tensors: Tensors


def trial_call(x: Combination, device: torch.device) -> TrialCall:
    """The call on ``device``. Sequences of a pack are equally long.

    Raises ``NotImplementedError`` for features that nothing is made up for, and what a call raises.
    """
    odd = sorted(feature.name.lower() for feature in x.features - _SERVED)
    if odd or x.layout != "bshd":
        raise NotImplementedError(f"no call is made up with {', '.join(odd) or x.layout}")
    q, k, v = (_random(*each, device) for each in _shapes(x))
    shape = *q.shape[:-1], x.hdim_v
    out = q.new_empty(shape, dtype=TORCH_DTYPES[x.out_dtype])
    arguments = Arguments.of(q, k, v, {**_options(x, device), "out": out})
    problem = make_problem(arguments)
    is_backward = x.direction == "backward"
    has_lse = problem.has_lse or is_backward
    # Of a backward pass they stand for what forward gave: a pass takes as long with any values.
    lse = q.new_zeros(problem.lse_shape, dtype=torch.float32) if has_lse else None
    tensors = Tensors(
        *(q, k, v, out, lse, arguments.cu_seqlens),
        descales=arguments.descales,
        modifiers=arguments.modifiers,
        dropout=arguments.dropout,
    )
    if not is_backward:
        return TrialCall(problem, tensors)
    assert lse is not None
    dout = torch.randn_like(out.normal_())
    backward = BackwardArguments(arguments, lse, dout)
    gradients = Gradients(dout, None, *new_gradients(backward), None)
    return TrialCall(make_backward_problem(backward), tensors._replace(gradients=gradients))


def _shapes(x: Combination) -> list[tuple[tuple[int, ...], str]]:
    rows = (x.batch,) if x.mode == "gm0" else ()
    return [
        ((*rows, x.seqlen_q, x.heads_q, x.hdim_q), x.dtype),
        ((*rows, x.seqlen_k, x.heads_k, x.hdim_q), x.kv_dtype),
        ((*rows, x.seqlen_k, x.heads_k, x.hdim_v), x.kv_dtype),
    ]


def _random(shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    if dtype == "int8":
        return torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
    # fp8 has fewer operations, this one among them.
    return torch.randn(shape, device=device).to(TORCH_DTYPES[dtype])


def _options(x: Combination, device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {"mask": x.mask, "return_lse": Feature.LSE in x.features}
    lengths = x.seqlen_q // x.batch, x.seqlen_k // x.batch
    bias: tuple[int, ...] = (1, x.heads_q, x.seqlen_q, x.seqlen_k)
    if x.mode == "gm1":
        for side, length in zip("qk", lengths, strict=True):
            sums = list(accumulate([length] * x.batch, initial=0))
            options[f"cu_seqlens_{side}"] = torch.tensor(sums, dtype=torch.int32, device=device)
            options[f"max_seqlen_{side}"] = length
        bias = (x.heads_q, x.seqlen_q, lengths[1])
    made: dict[Feature, dict[str, Any]] = {
        Feature.DROPOUT: {"dropout_p": _DROPOUT_P, "rng_state": new_rng_state(device)},
        Feature.SOFTCAP: {"logit_softcap": _SOFTCAP},
        Feature.ALIBI: {"alibi_slopes": torch.rand(x.heads_q, device=device)},
    }
    for feature, of_feature in made.items():
        options |= of_feature if feature in x.features else {}
    if Feature.BIAS in x.features:
        options["bias"] = torch.randn(bias, device=device).to(out_dtype_of(TORCH_DTYPES[x.dtype]))
    if Feature.BOOLEAN_BIAS in x.features:
        options["bias"] = torch.rand(bias, device=device) < 1 / 2
    if Feature.DESCALES in x.features:
        scaled = {"q": x.dtype, "k": x.kv_dtype, "v": x.kv_dtype}
        names = [name for name, dtype in scaled.items() if dtype in EIGHT_BIT_NAMES]
        options |= {f"{name}_descale": torch.ones(1, device=device) for name in names}
    return options
