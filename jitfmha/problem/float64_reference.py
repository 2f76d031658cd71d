"""Attention in float64 from the written definition, with all scores of a sequence at once.

Tests compare every kernel with it, and so do the commands that judge one. It shares no code with
the kernels, and is differentiable by ``torch.autograd``: the gradients of a result are the
reference of a backward pass. What each option means, in the order in which it acts on a score:

    score   = softmax_scale * <q_i, k_j>            q_i, k_j, v_j multiplied with their descales
    score   = logit_softcap * tanh(score / logit_softcap)               where logit_softcap > 0
    score  += bias                                  a boolean bias hides the keys where it is False
    score  -= alibi_slope * |i + sk - sq - j|
    score   = -inf                                  where the mask hides key j from query i
    p_j     = exp(score_j) / (sum of exp(score_j) over the keys + exp(sink))
    p_j     = int8_probabilities(p_j)                                      where p_descale is given
    p_j     = p_j * keep_j / (1 - dropout_p)
    out     = sum of p_j * v_j

The lse is the logarithm of the denominator: dropout does not change it, a sink counts. A query that
sees no key has output 0, lse -inf (the sink where there is one) and gradients 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import Arguments, Descales, Tensors, is_of_tokens
from .dropout import dropout_randval, largest_kept
from .mask import OPEN_WINDOW, Mask, parse_mask
from .packed_pages import are_packed, as_rows
from .page_lists import pages_of_sequences
from .problem import Problem
from .score_features import Modifiers

Result = tuple[Tensor, Tensor]
"""out and lse."""

_INT8_LARGEST = 127
_FLOAT32_EPS = torch.finfo(torch.float32).eps
# Of a gradient's largest value: products of rounded numbers are added up in it.
_GRADIENT_ROUNDING = 0.02


# ---- The definition ------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
    """Out ``(b, sq, hq, hdim_v)`` and lse ``(b, hq, sq)`` of gm0 inputs.

    Args:
        q: ``(b, sq, hq, hdim)``.
        k: ``(b, sk, hk, hdim)``.
        v: ``(b, sk, hk, hdim_v)``.
        options: those of ``fmha_fwd`` that change the result, by name. ``keep``, bool
            ``(b, hq, sq, sk)``, may stand in the place of ``rng_state``: True where a probability
            is not dropped.

    Raises ``TypeError`` for an option that it does not know.
    """
    v_descale, p_descale = options.pop("v_descale", None), options.pop("p_descale", None)
    dropout_p, rng_state = options.pop("dropout_p", 0.0), options.pop("rng_state", None)
    keep = options.pop("keep", None)
    probability, lse = probabilities(q, k, **options)
    if p_descale is not None:
        probability = int8_probabilities(probability, p_descale, k.shape[2])
    if rng_state is not None:
        keep = kept(rng_state, dropout_p, probability.shape)
    if keep is not None:
        probability = probability * keep / (1 - dropout_p)
    v = _for_each_head(descaled(v, v_descale, k.shape[2]), q)
    return torch.einsum("bhij,bjhd->bihd", probability, v), lse


def probabilities(q: Tensor, k: Tensor, *, sink: Tensor | None = None, **options: Any) -> Result:
    """The softmax ``(b, hq, sq, sk)`` over the keys that are seen, and its lse ``(b, hq, sq)``."""
    # Nothing that is hidden enters a computation, not even as an infinity: its gradient would be
    # NaN.
    scores, see = _scores(q, k, **options)
    scores = scores.masked_fill(~see, 0)
    if sink is not None:
        column = sink.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
        see = torch.cat([see, column != -torch.inf], dim=-1)
    sees_any = see.any(-1)
    largest = torch.zeros_like(sees_any, dtype=torch.float64)
    if scores.shape[-1] > 0:
        seen_scores = scores.detach().masked_fill(~see, -torch.inf)
        largest = seen_scores.amax(-1).masked_fill(~sees_any, 0)
    exponentials = (scores - largest[..., None]).masked_fill(~see, -torch.inf).exp()
    total = exponentials.sum(-1).masked_fill(~sees_any, 1)
    lse = (total.log() + largest).masked_fill(~sees_any, -torch.inf)
    return (exponentials / total[..., None])[..., : k.shape[1]], lse


def _scores(
    q: Tensor,
    k: Tensor,
    *,
    softmax_scale: float | None = None,
    mask: int | str | Mask = 0,
    window_size: tuple[int, int] = OPEN_WINDOW,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    **modifiers: Any,
) -> tuple[Tensor, Tensor]:
    """All scores, and whether the query sees the key, both ``(b, hq, sq, sk)``."""
    modified_by = Modifiers(**modifiers)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    keys = _for_each_head(descaled(k, k_descale, k.shape[2]), q)
    scores = torch.einsum("bihd,bjhd->bhij", descaled(q, q_descale, k.shape[2]), keys) * scale
    see = visible(q.shape[1], k.shape[1], mask, window_size, modified_by.sink_size)
    see = see.to(q.device).expand_as(scores)
    if modified_by.logit_softcap > 0:
        scores = modified_by.logit_softcap * torch.tanh(scores / modified_by.logit_softcap)
    bias, slopes = modified_by.bias, modified_by.alibi_slopes
    if bias is not None and bias.dtype == torch.bool:
        see = see & bias
    elif bias is not None:
        # Of a score that is no number, or infinity, the sum is NaN.
        see = see & ~((bias == -torch.inf) & (scores < torch.inf))
        scores = scores + bias.double()
    if slopes is not None:
        distance = _ahead(q.shape[1], k.shape[1]).abs().to(q.device)
        scores = scores - slopes.double().view(-1, slopes.shape[-1], 1, 1) * distance
    return scores, see


def visible(
    seqlen_q: int,
    seqlen_k: int,
    mask: int | str | Mask = 0,
    window_size: tuple[int, int] = OPEN_WINDOW,
    sink_size: int = 0,
) -> Tensor:
    """Which key each query sees, as booleans ``(seqlen_q, seqlen_k)``.

    The first ``sink_size`` keys are seen to the left of every window, not behind its right end.
    """
    band = mask if isinstance(mask, Mask) else parse_mask(mask, window_size)
    ahead = _ahead(seqlen_q, seqlen_k) + (seqlen_k - seqlen_q if band.top_left else 0)
    see = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if band.left is not None:
        see &= (ahead >= -band.left) | (torch.arange(seqlen_k) < sink_size)
    if band.right is not None:
        see &= ahead <= band.right
    return see


def _ahead(seqlen_q: int, seqlen_k: int) -> Tensor:
    """How far each key is to the right of the diagonal that ends in the last one."""
    return torch.arange(seqlen_k) - (torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)


def _for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values of each query head, from those of each key head."""
    return x.repeat_interleave(q.shape[2] // max(x.shape[2], 1), dim=2)


def descaled(x: Tensor, descale: Tensor | None, heads_k: int) -> Tensor:
    """``x (b, s, h, hdim)`` times its scale, float64.

    The scale is ``(1,)``, one for each head ``(h,)``, one for each sequence and key head
    ``(b, heads_k)``, or one for each token and head ``(b, s, h, 1)``.
    """
    if descale is None:
        return x.double()
    if descale.dim() == 4:
        return x.double() * descale.double()
    if descale.dim() == 2:
        descale = descale.repeat_interleave(x.shape[2] // max(heads_k, 1), dim=1)
    return x.double() * descale.double().view(-1, 1, descale.shape[-1], 1)


def int8_probabilities(probability: Tensor, p_descale: Tensor, heads_k: int) -> Tensor:
    """Probabilities ``(b, hq, sq, sk)``, as multiples of ``p_descale`` times their row's largest.

    They are at most 127 of them, rounded towards zero. The scale has the shapes that
    :func:`descaled` takes, with hq heads; it is float32, and so is what is divided by it.
    """
    if probability.shape[-1] == 0:
        return probability
    ones = torch.ones(1, 1, probability.shape[1], 1)
    p_scale, unit = (descaled(ones, x, heads_k).transpose(1, 2) for x in (1 / p_descale, p_descale))
    largest = probability.amax(-1, keepdim=True)
    relative = torch.where(largest > 0, probability / largest, 0)
    return (relative * p_scale).floor().clamp(max=_INT8_LARGEST) * unit * largest


def kept(rng_state: Tensor, dropout_p: float, shape: Sequence[int]) -> Tensor:
    """Say which probabilities of ``(b, hq, sq, sk)`` are not dropped."""
    batch, heads_q, seqlen_q, seqlen_k = shape
    drawn = dropout_randval(rng_state, batch, heads_q, seqlen_q, seqlen_k)
    return drawn <= largest_kept(dropout_p)


# ---- Packed sequences, and pages -----------------------------------------------------------------


class Spans(NamedTuple):
    """Where the sequences of packed tensors lie: the length and the first row of each.

    Attributes:
        lengths_q, lengths_k: of queries and of keys.
        starts_q, starts_k: rows of q, and of k and v.
    """

    lengths_q: Sequence[int]
    lengths_k: Sequence[int]
    starts_q: Sequence[int]
    starts_k: Sequence[int]

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """The rows and the keys of each sequence."""
        for sq, sk, row, key in zip(*self, strict=True):
            yield slice(row, row + sq), slice(key, key + sk)

    def shape(self, heads_q: int) -> tuple[int, int, int, int]:
        """The shape of a tensor of probabilities: ``(b, hq, longest sq, longest sk)``."""
        longest_q, longest_k = max(self.lengths_q, default=0), max(self.lengths_k, default=0)
        return len(self.lengths_q), heads_q, longest_q, longest_k


def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    starts_q: Sequence[int],
    starts_k: Sequence[int],
    **options: Any,
) -> Result:
    """Out ``(total_q, hq, hdim_v)`` and lse ``(hq, total_q)`` of gm1 inputs, one by one.

    The options are those of :func:`attention`. A bias is ``(hq|1, total_q|1, longest sk)``, and
    ``keep`` ``(b, hq, longest sq, longest sk)``; of both, each sequence takes the first keys.
    Scales of tokens are packed, too, ``(total_k, hk, 1)``. Rows that belong to no sequence are 0,
    and -inf in the lse.
    """
    spans = Spans(lengths_q, lengths_k, starts_q, starts_k)
    rng_state = options.pop("rng_state", None)
    if rng_state is not None:
        options["keep"] = kept(rng_state, options["dropout_p"], spans.shape(q.shape[1]))
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64)
    for n, (rows, keys) in enumerate(spans.slices()):
        one = q[None, rows], k[None, keys], v[None, keys]
        out_one, lse_one = attention(*one, **_of_sequence(options, n, rows, keys))
        out[rows], lse[:, rows] = out_one[0], lse_one[0]
    return out, lse


def _of_sequence(options: Mapping[str, Any], n: int, rows: slice, keys: slice) -> dict[str, Any]:
    """The options of sequence ``n`` alone, as a batch of one."""
    seqlen_q, seqlen_k = rows.stop - rows.start, keys.stop - keys.start
    # What has two dimensions has a row for each sequence.
    one = {
        name: x[n : n + 1] if isinstance(x, Tensor) and x.dim() == 2 else x
        for name, x in options.items()
    }
    bias, keep = options.get("bias"), options.get("keep")
    for name in ("k_descale", "v_descale"):
        scales = options.get(name)
        if is_of_tokens(scales):
            one[name] = scales[None, keys]
    if bias is not None:
        of_rows = bias if bias.shape[1] == 1 else bias[:, rows]
        one["bias"] = of_rows[None, :, :, :seqlen_k]
    if keep is not None:
        one["keep"] = keep[n : n + 1, :, :seqlen_q, :seqlen_k]
    return one


def unpaged(cache: Tensor, block_table: Iterable[Tensor], seqlens_k: Sequence[int]) -> Tensor:
    """The keys or values of paged sequences, packed one after the other ``(total_k, hk, hdim)``.

    cache is ``(num_pages, page_size, hk, hdim)``. Row ``n`` of a ``block_table (b, most pages)``,
    or one of other tensors in place of rows, names the pages of sequence ``n``, which has
    ``seqlens_k[n]`` keys.
    """
    page_size, pieces = cache.shape[1], [cache.new_empty(0, *cache.shape[2:])]
    for pages, seqlen in zip(block_table, seqlens_k, strict=True):
        # One page after the other: tensors of 8 bits cannot be indexed by others.
        used = [cache[page] for page in pages[: -(-seqlen // page_size)].tolist()]
        pieces.append(torch.cat([*pieces[:1], *used])[:seqlen])
    return torch.cat(pieces)


# ---- Calls ---------------------------------------------------------------------------------------


def _packed(call: Arguments | Tensors) -> tuple[Tensor, Tensor, Spans]:
    """Keys, values and the sequences of a gm1 call; what lies in pages is brought together."""
    k, v, sums = call.k, call.v, call.cu_seqlens
    assert sums is not None
    table = None if call.keys is None else call.keys.block_table
    lengths_q, lengths_k = sums.q.diff().tolist(), sums.k.diff().tolist()
    first_keys = sums.k_padded if table is None else sums.k - sums.k[:1]
    if table is not None:
        if are_packed(k):
            k, v = as_rows("k", k), as_rows("v", v)
        pages = pages_of_sequences(table, sums.k_padded)
        k, v = unpaged(k, pages, lengths_k), unpaged(v, pages, lengths_k)
    starts_q, starts_k = sums.q_padded.tolist()[:-1], first_keys.tolist()[:-1]
    return k, v, Spans(lengths_q, lengths_k, starts_q, starts_k)


@torch.no_grad()
def signed_probabilities(arguments: Arguments) -> Tensor:
    """flash-attn's ``S_dmask``: the softmax's probabilities, negative where dropout dropped them.

    Args:
        arguments: those of ``fmha_fwd``, with ``dropout_p`` and ``rng_state``.

    Returns:
        ``(b, hq, sq, sk)`` in q's dtype; for packed sequences ``(b, hq, max_seqlen_q,
        max_seqlen_k)``, 0 behind the end of each.
    """
    q, sums, dropout = arguments.q, arguments.cu_seqlens, arguments.dropout
    options = (arguments.modifiers or Modifiers())._asdict()
    options["softmax_scale"] = arguments.softmax_scale
    options |= {"mask": arguments.mask, "window_size": arguments.window_size}
    if sums is None:
        found = probabilities(q, arguments.k, **options)[0].to(q.dtype)
    else:
        k, _, spans = _packed(arguments)
        batch, heads_q, *longest = spans.shape(q.shape[1])
        given = sums.max_seqlen_q, sums.max_seqlen_k
        sizes = [a if b is None else b for a, b in zip(longest, given, strict=True)]
        found = q.new_zeros(batch, heads_q, *sizes)
        for n, (rows, keys) in enumerate(spans.slices()):
            of_one = _of_sequence(options, n, rows, keys)
            one, _ = probabilities(q[None, rows], k[None, keys], **of_one)
            found[n, :, : one.shape[2], : one.shape[3]] = one[0]
    assert dropout is not None
    assert dropout.rng_state is not None
    return torch.where(kept(dropout.rng_state, dropout.p, found.shape), found, -found)


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
        """Whether rounding explains the error."""
        return self.error <= self.allowed


class Reference:
    """What a launch should write: ``out`` and ``lse``, or ``dq``, ``dk``, ``dv`` and ``dbias``.

    Attributes:
        expected: by the name of the tensor, in the shapes of the call; rows of no sequence are NaN.
    """

    def __init__(self, problem: Problem, tensors: Tensors) -> None:
        """Compute it from the problem and from what the launch reads, on the CPU."""
        if problem.gradients is None:
            out, lse = _forward(problem, tensors)
            self.expected = {"out": out, "lse": lse}
            self._allowed = _rounding_of_launch(problem, tensors, lse)
        else:
            self.expected = _gradients(problem, tensors)
            self._allowed = _rounding_of_gradients(problem, tensors, self.expected)
        if tensors.cu_seqlens is not None:
            _mark_unused(self.expected, _packed(tensors)[-1])

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
    """The largest error. The same infinity in both is none, and rows of no sequence, NaN, are
    skipped.
    """
    actual = actual.double()
    counted = ~(expected.isnan() | (actual == expected))
    error = (actual - expected).abs()[counted]
    return error.max().item() if error.numel() else 0.0


def _forward(problem: Problem, tensors: Tensors) -> Result:
    scales = tensors.descales or Descales()
    options = (tensors.modifiers or Modifiers())._asdict()
    options |= {f"{name}_descale": x for name, x in scales._asdict().items()}
    options |= {"softmax_scale": problem.softmax_scale, "mask": problem.mask}
    if tensors.dropout is not None:
        options["dropout_p"], options["rng_state"] = tensors.dropout
    if tensors.cu_seqlens is None:
        return attention(tensors.q, tensors.k, tensors.v, **options)
    k, v, spans = _packed(tensors)
    table = None if tensors.keys is None else tensors.keys.block_table
    if table is not None:
        assert tensors.cu_seqlens is not None
        for name, x in (("k_descale", scales.k), ("v_descale", scales.v)):
            if is_of_tokens(x):
                pages = pages_of_sequences(table, tensors.cu_seqlens.k_padded)
                options[name] = unpaged(x, pages, spans.lengths_k)
    return attention_packed(tensors.q, k, v, *spans, **options)


def _gradients(problem: Problem, tensors: Tensors) -> dict[str, Tensor]:
    given, modifiers = tensors.gradients, tensors.modifiers
    assert given is not None
    leaves = {
        f"d{name}": getattr(tensors, name).detach().double().requires_grad_() for name in "qkv"
    }
    if given.dbias is not None:
        assert modifiers is not None
        assert modifiers.bias is not None
        bias = modifiers.bias.detach().double().expand(given.dbias.shape).clone()
        leaves["dbias"] = bias.requires_grad_()
        modifiers = modifiers._replace(bias=bias)
    q, k, v = (leaves[f"d{name}"] for name in "qkv")
    out, lse = _forward(problem, tensors._replace(q=q, k=k, v=v, modifiers=modifiers))
    dlse = torch.zeros_like(lse)
    if given.dlse is not None:
        dlse = torch.where(lse.isfinite(), given.dlse.double(), dlse)
    found = torch.autograd.grad(
        (out, lse), tuple(leaves.values()), (given.dout.double(), dlse), materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


def _mark_unused(results: Mapping[str, Tensor], spans: Spans) -> None:
    """Rows that belong to no sequence become NaN."""
    for name, x in results.items():
        if name != "dbias":
            by_row = x.T if name == "lse" else x
            unused = torch.ones(by_row.shape[0], dtype=torch.bool)
            for rows, keys in spans.slices():
                unused[keys if name in ("dk", "dv") else rows] = False
            by_row[unused] = torch.nan


# ---- What rounding explains ----------------------------------------------------------------------


def rounding_of_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float | None = None,
    dtype: torch.dtype,
    dropout_p: float = 0.0,
) -> dict[str, float]:
    """Bound the error that rounding may make in ``out`` and ``lse`` of ``dtype``.

    Out is a mean of rows of v, so its error is at most v's largest value times the rounding of the
    probabilities and of the result, plus what the rounding of the scores to float32 does to the
    probabilities. Where a bias or the like makes scores that matter larger than
    ``softmax_scale * |q| * |k|``, it makes the lse larger, too.

    Args:
        q, k, v: what the inputs stand for; packed or in batches.
        lse: of the reference.
        softmax_scale: ``1 / sqrt(hdim)`` by default.
        dtype: of out.
        dropout_p: what is kept is divided by the rest.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    of_sum = math.log(max(k.shape[-3], 1))
    largest_score = scale * _largest_norm(q) * _largest_norm(k)
    largest_score += max(_largest(lse) - of_sum, 0.0)
    eps, score_error = torch.finfo(dtype).eps, 4 * _FLOAT32_EPS * (1 + largest_score)
    # 16-bit kernels may sum probabilities that are rounded like those they multiply v with.
    of_probability = eps if dtype != torch.float32 else 0.0
    return {
        "out": _largest(v) / (1 - dropout_p) * (2 * eps + 2 * score_error),
        "lse": 2 * score_error + 4 * _FLOAT32_EPS * of_sum + of_probability,
    }


def _rounding_of_launch(problem: Problem, tensors: Tensors, lse: Tensor) -> dict[str, float]:
    # A bound is asked for: the largest scale of a tensor serves all of it.
    scales = tensors.descales or Descales()
    q, k, v = (
        x.double() * (1 if scale is None else scale.double().abs().max())
        for x, scale in zip(
            (tensors.q, *_packed(tensors)[:2]) if tensors.cu_seqlens else tensors[:3],
            scales[:3],
            strict=True,
        )
    )
    allowed = rounding_of_forward(
        *(q, k, v, lse),
        softmax_scale=problem.softmax_scale,
        dtype=tensors.out.dtype,
        dropout_p=problem.dropout_p,
    )
    if problem.has_p_descale or problem.kv_dtype.startswith(("fp8", "bf8", "int8")):
        # Kernels of 8-bit inputs round probabilities to 8 bits, too.
        allowed["out"] += _largest(v) / (1 - problem.dropout_p) * 2.0**-3
    return allowed


def _rounding_of_gradients(
    problem: Problem, tensors: Tensors, expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """A row's gradients of scores are probabilities times what dout's products with v differ from
    their mean. So their sum, signs left out, is at most the largest product, and that of their
    errors an epsilon of it.
    """
    assert tensors.gradients is not None
    dout, kept_share = tensors.gradients.dout, 1 - problem.dropout_p
    eps = torch.finfo(dout.dtype).eps
    of_score = eps * _largest_product(tensors) / kept_share
    # Rounding has no direction: over many rows it adds up as a random walk does.
    rows = math.prod(tensors.q.shape[:-2])
    sums = max(1.0, math.sqrt(rows * problem.gqa) / 4)
    scale = problem.softmax_scale
    unit = {
        "dq": of_score * scale * _largest(tensors.k),
        "dk": of_score * scale * _largest(tensors.q) * sums,
        "dv": eps * _largest(dout) / kept_share * sums,
        "dbias": of_score,
    }
    return {name: _GRADIENT_ROUNDING * _largest(x) + unit[name] for name, x in expected.items()}


def _largest_product(tensors: Tensors) -> float:
    """The largest product of a row of dout and a row of v of the same sequence and key head."""
    assert tensors.gradients is not None
    dout, v = tensors.gradients.dout.double(), tensors.v.double()
    if tensors.cu_seqlens is None:
        pairs = [(dout, v)]
    else:
        spans = _packed(tensors)[-1]
        pairs = [(dout[None, rows], v[None, keys]) for rows, keys in spans.slices()]
    return max(
        (_largest(torch.einsum("bihd,bjhd->bhij", x, _for_each_head(y, x))) for x, y in pairs),
        default=0.0,
    )


def _largest_norm(x: Tensor) -> float:
    return _finite(x).norm(dim=-1).max().item() if x.numel() else 0.0


def _largest(x: Tensor) -> float:
    return _finite(x).abs().max().item() if x.numel() else 0.0


def _finite(x: Tensor) -> Tensor:
    """What is not finite explains no rounding."""
    return x.double().nan_to_num(0, posinf=0, neginf=0)
