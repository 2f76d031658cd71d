"""Attention in float64 from its definition, for the commands that judge a kernel.

It takes the problem and the tensors of a launch, and shares nothing with the kernels: every score
of a sequence is made at once, so it is for small calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Descales, KeyOptions, Modifiers, Tensors
from .dropout import dropout_randval, largest_kept
from .mask import Mask
from .problem import Problem

_INT8_LARGEST = 127
_FLOAT32_EPS = torch.finfo(torch.float32).eps
# Of a gradient's largest value: products of rounded numbers are added up in it.
_GRADIENT_ROUNDING = 0.02


class Judged(NamedTuple):
    """One result beside its reference.

    Attributes:
        error: the largest difference; NaN where the result holds NaN the reference lacks.
        allowed: what rounding explains.
    """

    error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        """Whether rounding explains the difference."""
        return self.error <= self.allowed


class _Sequence(NamedTuple):
    """Where one sequence lies: its number, and its rows of q and of the packed keys."""

    number: int
    rows: slice
    keys: slice


class _Inputs(NamedTuple):
    """Packed float64 inputs of all sequences, the scales of 8-bit inputs multiplied in."""

    q: Tensor  # (rows, hq, hdim_q)
    k: Tensor  # (keys, hk, hdim_q)
    v: Tensor  # (keys, hk, hdim_v)


class Reference:
    """What a launch should write: ``out`` and ``lse``, or ``dq``, ``dk``, ``dv`` and ``dbias``.

    Attributes:
        expected: by the name of the tensor, in the shapes of the call; rows of no sequence are NaN.
    """

    def __init__(self, problem: Problem, tensors: Tensors) -> None:
        """Compute it from the problem and from what the launch reads, on the CPU."""
        sequences = list(_sequences(problem, tensors))
        inputs = _inputs(problem, tensors, sequences)
        if problem.gradients is None:
            self.expected = _forward(problem, tensors, inputs, sequences)
            self._allowed = _allowed_of_forward(problem, tensors, inputs, self.expected)
        else:
            self.expected = _backward(problem, tensors, inputs, sequences)
            self._allowed = _allowed_of_gradients(
                problem, tensors, inputs, sequences, self.expected
            )

    def judged(self, results: Mapping[str, Tensor]) -> dict[str, Judged]:
        """Results beside it, by name, in the shapes and dtypes of the call; others are left out."""
        return {
            name: Judged(_largest_error(results[name], expected), self._allowed[name])
            for name, expected in self.expected.items()
            if name in results
        }


def forward_reference(problem: Problem, tensors: Tensors) -> dict[str, Tensor]:
    """``out`` and ``lse`` of the call whose gradients ``problem`` may be about."""
    return Reference(problem._replace(gradients=None), tensors).expected


def _largest_error(actual: Tensor, expected: Tensor) -> float:
    """Where both are the same infinity there is no error. Rows of no sequence are skipped: NaN."""
    actual = actual.double()
    counted = ~(expected.isnan() | (actual == expected))
    error = (actual - expected).abs()[counted]
    return error.max().item() if error.numel() else 0.0


# ---- What the tensors hold -----------------------------------------------------------------------


def _sequences(problem: Problem, tensors: Tensors) -> Iterator[_Sequence]:
    """In rows of q as it is packed, and of the keys as :func:`_inputs` packs them."""
    if tensors.cu_seqlens is None:
        sq, sk = problem.seqlen_q, problem.seqlen_k
        for n in range(problem.batch):
            yield _Sequence(n, slice(n * sq, n * sq + sq), slice(n * sk, n * sk + sk))
        return
    sums = tensors.cu_seqlens
    ends_q, ends_k, starts_q, starts_k = (
        x.tolist() for x in (sums.q, sums.k, sums.q_padded, sums.k_padded)
    )
    for n in range(problem.batch):
        sq, sk = ends_q[n + 1] - ends_q[n], ends_k[n + 1] - ends_k[n]
        first = ends_k[n] if problem.is_paged else starts_k[n]
        yield _Sequence(n, slice(starts_q[n], starts_q[n] + sq), slice(first, first + sk))


def _inputs(problem: Problem, tensors: Tensors, sequences: list[_Sequence]) -> _Inputs:
    q, k, v = tensors.q, tensors.k, tensors.v
    if problem.is_paged:
        keys = tensors.keys or KeyOptions()
        assert keys.block_table is not None
        k, v = (_unpaged(x, keys.block_table, sequences) for x in (k, v))
    elif problem.mode == "gm0":
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    packed_q = q.flatten(0, 1) if problem.mode == "gm0" else q
    scales = tensors.descales or Descales()
    sides = [
        _scaled(x, scale, problem.heads_k, [getattr(each, side) for each in sequences])
        for x, scale, side in (
            (packed_q, scales.q, "rows"),
            (k, scales.k, "keys"),
            (v, scales.v, "keys"),
        )
    ]
    return _Inputs(*sides)


def _unpaged(cache: Tensor, block_table: Tensor, sequences: list[_Sequence]) -> Tensor:
    """The keys or values of paged sequences, one sequence after the other."""
    pieces = [cache.new_empty(0, *cache.shape[2:])]
    for sequence in sequences:
        count = sequence.keys.stop - sequence.keys.start
        if count == 0:
            continue
        pages = block_table[sequence.number, : -(-count // cache.shape[1])]
        # One page after the other: tensors of 8 bits cannot be indexed by others.
        pieces += [cache[page] for page in pages.tolist()]
        pieces[-1] = pieces[-1][: count - (len(pages) - 1) * cache.shape[1]]
    return torch.cat(pieces)


def _scaled(x: Tensor, scale: Tensor | None, heads_k: int, places: list[slice]) -> Tensor:
    """``x (rows, heads, hdim)`` times its scale: ``(1,)``, ``(h,)``, or ``(b, heads_k)``."""
    wide = x.double()
    if scale is None:
        return wide
    factors = scale.double()
    if factors.dim() == 1:
        return wide * factors.view(1, -1, 1)
    factors = factors.repeat_interleave(x.shape[1] // max(heads_k, 1), dim=1)
    wide = wide.clone()
    for n, place in enumerate(places):
        wide[place] *= factors[n, None, :, None]
    return wide


# ---- Attention -----------------------------------------------------------------------------------


def _forward(
    problem: Problem,
    tensors: Tensors,
    inputs: _Inputs,
    sequences: list[_Sequence],
    shift: Tensor | None = None,
) -> dict[str, Tensor]:
    """``out`` and ``lse`` in the shapes of the call; rows of no sequence are NaN.

    ``shift`` is added to the scores, in the shape of ``dbias``.
    """
    rows, heads = inputs.q.shape[:2]
    outs = []
    lses = []
    places = []
    for sequence in sequences:
        out, lse = _of_sequence(problem, tensors, inputs, sequence, shift)
        outs.append(out)
        lses.append(lse)
        places.append(torch.arange(rows)[sequence.rows])
    place = torch.cat(places) if places else torch.arange(0)
    out = torch.full((rows, heads, problem.hdim_v), torch.nan, dtype=torch.float64)
    lse = torch.full((rows, heads), torch.nan, dtype=torch.float64)
    if outs:
        out = out.index_copy(0, place, torch.cat(outs))
        lse = lse.index_copy(0, place, torch.cat(lses))
    if problem.mode == "gm1":
        return {"out": out, "lse": lse.T}
    out = out.unflatten(0, (problem.batch, problem.seqlen_q))
    return {"out": out, "lse": lse.unflatten(0, (problem.batch, problem.seqlen_q)).mT}


def _of_sequence(
    problem: Problem, tensors: Tensors, inputs: _Inputs, sequence: _Sequence, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Out ``(sq, hq, hdim_v)`` and lse ``(sq, hq)`` of one sequence."""
    number, rows, keys = sequence
    q = inputs.q[rows]
    k, v = (x[keys].repeat_interleave(problem.gqa, dim=1) for x in (inputs.k, inputs.v))
    modifiers = tensors.modifiers or Modifiers()
    scores = torch.einsum("ihd,jhd->hij", q, k) * problem.softmax_scale
    if modifiers.logit_softcap > 0:
        scores = modifiers.logit_softcap * torch.tanh(scores / modifiers.logit_softcap)
    seen = _visible(problem.mask, q.shape[0], k.shape[0], modifiers.sink_size).expand_as(scores)
    if modifiers.bias is not None:
        bias = _bias_of(modifiers.bias, problem, sequence)
        if bias.dtype == torch.bool:
            seen = seen & bias
        else:
            seen = seen & (bias > -torch.inf)
            scores = scores + bias.double().nan_to_num(neginf=0)
    if shift is not None:
        scores = scores + _bias_of(shift, problem, sequence)
    if modifiers.alibi_slopes is not None:
        slopes = modifiers.alibi_slopes
        slopes = slopes[number] if slopes.dim() == 2 else slopes
        i, j = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])
        distance = (i + k.shape[0] - q.shape[0] - j).abs()
        scores = scores - slopes.double()[:, None, None] * distance
    probabilities, lse = _softmax(scores, seen, modifiers.sink)
    probabilities = _as_int8(probabilities, tensors.descales, problem, number)
    if tensors.dropout is not None:
        kept = _kept(problem, tensors, number, *scores.shape[1:])
        probabilities = probabilities * kept / (1 - tensors.dropout.p)
    return torch.einsum("hij,jhd->ihd", probabilities, v), lse.T


def _visible(mask: Mask, seqlen_q: int, seqlen_k: int, sink_size: int) -> Tensor:
    """Which key each query sees, as booleans ``(seqlen_q, seqlen_k)``."""
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    ahead = j - i - (0 if mask.top_left else seqlen_k - seqlen_q)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if mask.left is not None:
        seen &= (ahead >= -mask.left) | (j < sink_size)
    if mask.right is not None:
        seen &= ahead <= mask.right
    return seen


def _bias_of(bias: Tensor, problem: Problem, sequence: _Sequence) -> Tensor:
    """What of ``(b|1, hq|1, sq|1, sk)``, in gm1 ``(hq|1, total_q|1, sk)``, is the sequence's."""
    number, rows, keys = sequence
    if problem.mode == "gm0":
        return bias[0 if bias.shape[0] == 1 else number]
    of_rows = bias if bias.shape[1] == 1 and problem.seqlen_q != 1 else bias[:, rows]
    return of_rows[..., : keys.stop - keys.start]


def _softmax(scores: Tensor, seen: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities ``(hq, sq, sk)`` over the keys that are seen, and the lse ``(hq, sq)``.

    What is hidden enters no computation, not even as an infinity: its gradient would be NaN.
    """
    scores = scores.masked_fill(~seen, 0)
    if sink is not None:
        column = sink.double()[:, None, None].expand(*scores.shape[:2], 1)
        scores = torch.cat((scores, column), dim=-1)
        seen = torch.cat((seen, torch.ones_like(column, dtype=torch.bool)), dim=-1)
    sees_any = seen.any(-1)
    largest = torch.zeros(sees_any.shape, dtype=torch.float64)
    if scores.shape[-1]:
        largest = scores.detach().masked_fill(~seen, -torch.inf).amax(-1)
        largest = largest.masked_fill(~sees_any, 0)
    exponentials = (scores - largest[..., None]).masked_fill(~seen, -torch.inf).exp()
    total = exponentials.sum(-1).masked_fill(~sees_any, 1)
    lse = (total.log() + largest).masked_fill(~sees_any, -torch.inf)
    probabilities = exponentials / total[..., None]
    return (probabilities if sink is None else probabilities[..., :-1]), lse


def _as_int8(
    probabilities: Tensor, descales: Descales | None, problem: Problem, number: int
) -> Tensor:
    """As multiples of their scale times their row's largest, where a call asks for that."""
    if descales is None or descales.p is None or probabilities.shape[-1] == 0:
        return probabilities
    # The scale is float32, and so is what is divided by it.
    unit, inverse = (_of_heads(x, problem, number) for x in (descales.p, 1 / descales.p))
    largest = probabilities.amax(-1, keepdim=True)
    relative = torch.where(largest > 0, probabilities / largest, 0)
    return (relative * inverse).floor().clamp(max=_INT8_LARGEST) * unit * largest


def _of_heads(scale: Tensor, problem: Problem, number: int) -> Tensor:
    """A scale for each query head, ``(hq|1, 1, 1)``."""
    factors = scale.double()
    if factors.dim() == 2:
        factors = factors[number].repeat_interleave(problem.gqa)
    return factors[:, None, None]


def _kept(problem: Problem, tensors: Tensors, number: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    assert tensors.dropout is not None
    assert tensors.dropout.rng_state is not None
    shape = problem.batch, problem.heads_q, seqlen_q, seqlen_k
    drawn = dropout_randval(tensors.dropout.rng_state, *shape)
    return drawn[number] <= largest_kept(tensors.dropout.p)


def _backward(
    problem: Problem, tensors: Tensors, inputs: _Inputs, sequences: list[_Sequence]
) -> dict[str, Tensor]:
    """The gradients in the shapes of the call; rows of no sequence are NaN."""
    gradients = tensors.gradients
    assert gradients is not None
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    shift = None
    if gradients.dbias is not None:
        shift = torch.zeros(gradients.dbias.shape, dtype=torch.float64, requires_grad=True)
        leaves.append(shift)
    results = _forward(problem, tensors, _Inputs(*leaves[:3]), sequences, shift)
    used = ~results["out"].isnan()
    total = (results["out"][used] * gradients.dout.double()[used]).sum()
    if gradients.dlse is not None:
        counted = results["lse"].isfinite()
        total = total + (results["lse"][counted] * gradients.dlse.double()[counted]).sum()
    found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    by_name = dict(zip(("dq", "dk", "dv", "dbias"), found, strict=False))
    for name, places in (("dq", "rows"), ("dk", "keys"), ("dv", "keys")):
        mine = torch.zeros(by_name[name].shape[0], dtype=torch.bool)
        for sequence in sequences:
            mine[getattr(sequence, places)] = True
        by_name[name][~mine] = torch.nan
    if problem.mode == "gm0":
        for name, rows in (("dq", problem.seqlen_q), ("dk", problem.seqlen_k)):
            by_name[name] = by_name[name].unflatten(0, (problem.batch, rows))
        by_name["dv"] = by_name["dv"].unflatten(0, (problem.batch, problem.seqlen_k))
    return by_name


# ---- What rounding explains ----------------------------------------------------------------------


def _allowed_of_forward(
    problem: Problem, tensors: Tensors, inputs: _Inputs, expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """Out is a mean of rows of v, so its error is at most v's largest value times what rounding
    does to a probability and to the result.
    """
    dtype = tensors.out.dtype
    eps = torch.finfo(dtype).eps
    largest_score = problem.softmax_scale * _largest_norm(inputs.q) * _largest_norm(inputs.k)
    # Where a bias makes scores larger than that, it makes the lse larger, too.
    largest_score += _largest(expected["lse"])
    score_error = 4 * _FLOAT32_EPS * (1 + largest_score)
    probability = 0.0
    if problem.has_p_descale or problem.kv_dtype.startswith(("fp8", "int8")):
        # Kernels of 8-bit inputs round probabilities to 8 bits, too.
        probability = 2.0**-3
    kept = 1 - problem.dropout_p
    return {
        "out": _largest(inputs.v) / kept * (2 * eps + 2 * score_error + probability),
        "lse": score_error + 8 * _FLOAT32_EPS * math.log(2 + inputs.k.shape[0]) + eps,
    }


def _allowed_of_gradients(
    problem: Problem,
    tensors: Tensors,
    inputs: _Inputs,
    sequences: list[_Sequence],
    expected: Mapping[str, Tensor],
) -> dict[str, float]:
    """A row's gradients of scores are probabilities times what dout's products with v differ from
    their mean. So their sum, signs left out, is at most the largest product, and that of their
    errors an epsilon of it.
    """
    assert tensors.gradients is not None
    dout, kept = tensors.gradients.dout.double(), 1 - problem.dropout_p
    eps = torch.finfo(tensors.gradients.dout.dtype).eps
    rows_of_dout = dout if problem.mode == "gm1" else dout.flatten(0, 1)
    products = [
        _largest(
            torch.einsum(
                "ihd,jhd->hij",
                rows_of_dout[rows],
                inputs.v[keys].repeat_interleave(problem.gqa, dim=1),
            )
        )
        for _, rows, keys in sequences
    ]
    of_score = eps * max(products, default=0.0) / kept
    # Rounding has no direction: over many rows it adds up as a random walk does.
    sums = max(1.0, math.sqrt(inputs.q.shape[0] * problem.gqa) / 4)
    scale = problem.softmax_scale
    unit = {
        "dq": of_score * scale * _largest(inputs.k),
        "dk": of_score * scale * _largest(inputs.q) * sums,
        "dv": eps * _largest(dout) / kept * sums,
        "dbias": of_score,
    }
    return {name: _GRADIENT_ROUNDING * _largest(x) + unit[name] for name, x in expected.items()}


def _largest_norm(x: Tensor) -> float:
    return _finite(x).norm(dim=-1).max().item() if x.numel() else 0.0


def _largest(x: Tensor) -> float:
    return _finite(x).abs().max().item() if x.numel() else 0.0


def _finite(x: Tensor) -> Tensor:
    """What is not finite explains no rounding."""
    return x.nan_to_num(0, posinf=0, neginf=0)
