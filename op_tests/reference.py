"""Attention in float64 from the written definitions; shares nothing with the package.

Everything is differentiable by ``torch.autograd``: the gradients of a result are the reference of
a backward pass. What each argument means, in the order in which it acts on a score:

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

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

Result = tuple[Tensor, Tensor]  # out, lse


class Options(TypedDict, total=False):
    """What changes the result besides q, k and v; by default each is off.

    Attributes:
        softmax_scale: ``1 / sqrt(hdim)`` by default.
        mask, window_size, sink_size: see :func:`visible`.
        bias: ``(b|1, hq|1, sq|1, sk)``, added to the scores, or bool: True takes part.
        alibi_slopes: ``(hq,)`` or ``(b, hq)``.
        logit_softcap: 0 is off.
        sink: ``(hq,)``, one more score in each row of the head, which belongs to no key.
        dropout_p: the probability with which ``keep`` was drawn.
        keep: bool ``(b, hq, sq, sk)``: True where a probability is not dropped.
        q_descale, k_descale, v_descale: see :func:`descaled`.
        p_descale: see :func:`int8_probabilities`.
    """

    softmax_scale: float | None
    mask: int | str
    window_size: tuple[int, int]
    sink_size: int
    bias: Tensor | None
    alibi_slopes: Tensor | None
    logit_softcap: float
    sink: Tensor | None
    dropout_p: float
    keep: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    p_descale: Tensor | None


def visible(
    seqlen_q: int,
    seqlen_k: int,
    mask: int | str = 0,
    window_size: tuple[int, int] = (-1, -1),
    sink_size: int = 0,
) -> Tensor:
    """Which key each query sees, as booleans ``(seqlen_q, seqlen_k)``.

    Masks 1, 2 and "causal" never show a key behind the diagonal, however far a window opens to the
    right. The first ``sink_size`` keys are seen to the left of every window, not behind its right
    end.
    """
    i = torch.arange(seqlen_q)[:, None]
    j = torch.arange(seqlen_k)[None, :]
    left, right = window_size
    diagonal = i + seqlen_k - seqlen_q
    if isinstance(mask, str) and ":" in mask:
        form, numbers = mask.split(":")
        left, right = (int(number) for number in numbers.split(","))
        if form in ("t", "g"):
            diagonal = i
        if form == "g":
            left, right = left - 1, right - 1
        right = max(right, 0)
    elif mask in (1, 2, "causal"):
        right = 0
        if mask == 1:
            diagonal = i
    else:
        assert mask in (0, "none")
    everything = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    from_left = everything if left < 0 else (j >= diagonal - left) | (j < sink_size)
    up_to_right = everything if right < 0 else j <= diagonal + right
    return from_left & up_to_right


def alibi(slopes: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """What ALiBi adds to the scores, ``(b|1, hq, sq, sk)``, for slopes ``(hq,)`` or ``(b, hq)``."""
    i = torch.arange(seqlen_q)[:, None]
    j = torch.arange(seqlen_k)[None, :]
    distance = (i + seqlen_k - seqlen_q - j).abs()
    return -slopes.double().view(-1, slopes.shape[-1], 1, 1) * distance


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    mask: int | str = 0,
    window_size: tuple[int, int] = (-1, -1),
    sink_size: int = 0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    logit_softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    keep: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    p_descale: Tensor | None = None,
) -> Result:
    """Out ``(b, sq, hq, hdim_v)`` and lse ``(b, hq, sq)`` of gm0 inputs, all scores at once.

    q is ``(b, sq, hq, hdim)``, k ``(b, sk, hk, hdim)``, v ``(b, sk, hk, hdim_v)``; the rest are
    :class:`Options`.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    groups = q.shape[2] // max(k.shape[2], 1)
    heads_k = k.shape[2]
    q = descaled(q, q_descale, heads_k)
    k = descaled(k, k_descale, heads_k).repeat_interleave(groups, dim=2)
    v = descaled(v, v_descale, heads_k).repeat_interleave(groups, dim=2)

    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    see = visible(q.shape[1], k.shape[1], mask, window_size, sink_size).expand_as(scores)
    if logit_softcap > 0:
        scores = logit_softcap * torch.tanh(scores / logit_softcap)
    if bias is not None and bias.dtype == torch.bool:
        see = see & bias
    elif bias is not None:
        see = see & (bias > -torch.inf)
        scores = scores + bias.double()
    if alibi_slopes is not None:
        scores = scores + alibi(alibi_slopes, q.shape[1], k.shape[1])
    probability, lse = _softmax(scores, see, sink)
    if p_descale is not None:
        probability = int8_probabilities(probability, p_descale, heads_k)
    if keep is not None:
        probability = probability * keep / (1 - dropout_p)
    return torch.einsum("bhij,bjhd->bihd", probability, v), lse


def descaled(x: Tensor, descale: Tensor | None, heads_k: int) -> Tensor:
    """``x (b, s, h, hdim)`` times its scale, float64.

    The scale is ``(1,)``, one for each head ``(h,)``, or one for each sequence and key head
    ``(b, heads_k)``.
    """
    if descale is None:
        return x.double()
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
    return (relative * p_scale).floor().clamp(max=127) * unit * largest


def _softmax(scores: Tensor, see: Tensor, sink: Tensor | None) -> Result:
    """Probabilities ``(b, hq, sq, sk)`` over the keys that are seen, and their lse ``(b, hq, sq)``.

    Nothing that is hidden enters a computation, not even as an infinity: its gradient would be NaN.
    """
    scores = scores.masked_fill(~see, 0)
    b, heads, seqlen_q, _ = scores.shape
    if sink is not None:
        column = sink.double().view(1, heads, 1, 1).expand(b, heads, seqlen_q, 1)
        scores = torch.cat([scores, column], dim=-1)
        see = torch.cat([see, torch.ones_like(column, dtype=torch.bool)], dim=-1)
    sees_any = see.any(-1)
    largest = torch.zeros_like(sees_any, dtype=torch.float64)
    if scores.shape[-1] > 0:
        seen_scores = scores.detach().masked_fill(~see, -torch.inf)
        largest = seen_scores.amax(-1).masked_fill(~sees_any, 0)
    exponentials = (scores - largest[..., None]).masked_fill(~see, -torch.inf).exp()
    total = exponentials.sum(-1).masked_fill(~sees_any, 1)
    lse = (total.log() + largest).masked_fill(~sees_any, -torch.inf)
    probability = exponentials / total[..., None]
    return (probability if sink is None else probability[..., :-1]), lse


def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    starts_q: Sequence[int],
    starts_k: Sequence[int],
    **options: Unpack[Options],
) -> Result:
    """Out ``(total_q, hq, hdim_v)`` and lse ``(hq, total_q)`` of gm1 inputs, one by one.

    A bias is ``(hq|1, total_q|1, longest sk)``, and ``keep`` ``(b, hq, longest sq, longest sk)``;
    of both, each sequence takes the first keys. Rows that belong to no sequence are 0, and -inf in
    the lse.
    """
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64)
    spans = zip(lengths_q, lengths_k, starts_q, starts_k, strict=True)
    for n, (sq, sk, start_q, start_k) in enumerate(spans):
        rows, keys = slice(start_q, start_q + sq), slice(start_k, start_k + sk)
        out_one, lse_one = attention(
            q[None, rows], k[None, keys], v[None, keys], **_of_sequence(options, n, rows, sk)
        )
        out[rows], lse[:, rows] = out_one[0], lse_one[0]
    return out, lse


def _of_sequence(options: Options, n: int, rows: slice, seqlen_k: int) -> Options:
    """The options of sequence ``n`` alone, as a batch of one."""
    one: dict[str, Any] = dict(options)
    bias, keep = options.get("bias"), options.get("keep")
    if bias is not None:
        one["bias"] = (bias if bias.shape[1] == 1 else bias[:, rows])[None, :, :, :seqlen_k]
    if keep is not None:
        one["keep"] = keep[n : n + 1, :, : rows.stop - rows.start, :seqlen_k]
    for name, x in options.items():
        if isinstance(x, Tensor) and x.dim() == 2:  # for each sequence and head
            one[name] = x[n : n + 1]
    return cast("Options", one)


def unpaged(cache: Tensor, block_table: Tensor, seqlens_k: Sequence[int]) -> Tensor:
    """The keys or values of paged sequences, packed one after the other ``(total_k, hk, hdim)``.

    cache is ``(num_pages, page_size, hk, hdim)``. Row ``n`` of ``block_table (b, most pages)``
    names the pages of sequence ``n``, which has ``seqlens_k[n]`` keys.
    """
    page_size = cache.shape[1]
    sequences = [
        cache[pages[: -(-seqlen // page_size)].long()].flatten(0, 1)[:seqlen]
        for pages, seqlen in zip(block_table, seqlens_k, strict=True)
    ]
    return torch.cat(sequences) if sequences else cache.new_empty(0, *cache.shape[2:])


def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqlens_k: Sequence[int],
    **options: Unpack[Options],
) -> Result:
    """Out ``(b, sq, hq, hdim_v)`` and lse ``(b, hq, sq)`` of gm0 queries against paged keys."""
    b, seqlen_q = q.shape[:2]
    starts_k = [sum(seqlens_k[:n]) for n in range(b)]
    out, lse = attention_packed(
        q.flatten(0, 1),
        unpaged(k_cache, block_table, seqlens_k),
        unpaged(v_cache, block_table, seqlens_k),
        [seqlen_q] * b,
        seqlens_k,
        [n * seqlen_q for n in range(b)],
        starts_k,
        **options,
    )
    return out.unflatten(0, (b, seqlen_q)), lse.unflatten(1, (b, seqlen_q)).transpose(0, 1)


def mla_absorbed(q: Tensor, kv: Tensor, k_pe: Tensor, **options: Unpack[Options]) -> Result:
    """MLA with the projection of keys in q: out ``(b, sq, hq, c)`` and lse ``(b, hq, sq)``.

    q is ``(b, sq, hq, c + r)``: what meets the latent, then the positional part. All heads share
    the latent ``kv (b, sk, c)``, which is key and value, and the positional keys ``k_pe
    (b, sk, r)``. The scale that a model means is ``1 / sqrt(hdim + r)`` with the head dimension
    from before the absorption; the default knows only ``c``.
    """
    keys = torch.cat([kv, k_pe], dim=-1)[:, :, None]
    return attention(q, keys, kv[:, :, None], **options)


def mla(
    q_nope: Tensor,
    q_pe: Tensor,
    kv: Tensor,
    k_pe: Tensor,
    wkv_b: Tensor,
    **options: Unpack[Options],
) -> Result:
    """MLA with the projections inside: out ``(b, sq, hq, hdim_v)`` and lse ``(b, hq, sq)``.

    q_nope is ``(b, sq, hq, hdim)``, q_pe ``(b, sq, hq, r)``, kv ``(b, sk, c)`` and k_pe
    ``(b, sk, r)``. ``wkv_b (hq, hdim + hdim_v, c)`` makes keys and values of the latent, for each
    head its own. The scale is ``1 / sqrt(hdim + r)`` by default.
    """
    hdim = q_nope.shape[-1]
    projected = torch.einsum("bjc,hdc->bjhd", kv.double(), wkv_b.double())
    positional = k_pe.double()[:, :, None].expand(-1, -1, q_pe.shape[2], -1)
    k = torch.cat([projected[..., :hdim], positional], dim=-1)
    q = torch.cat([q_nope, q_pe], dim=-1)
    return attention(q, k, projected[..., hdim:], **options)


def assert_close(
    actual: Result,
    expected: Result,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    *,
    largest_modifier: float = 0.0,
    dropout_p: float = 0.0,
    dtype: torch.dtype | None = None,
) -> None:
    """Compare within what rounding explains.

    Out is a mean of rows of v, so its error is at most v's largest value times the rounding of the
    probabilities and of the result, plus what the rounding of the scores to float32 does to the
    probabilities. |score| is at most softmax_scale * |q| * |k|, and ``largest_modifier`` on top of
    it where a bias or the like is added. ``dtype`` is what the output has instead of q's dtype,
    where the inputs have 8 bits; q, k and v are what they stand for.
    """
    out, lse = actual
    dtype = q.dtype if dtype is None else dtype
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert out.shape == expected[0].shape, f"{tuple(out.shape)} != {tuple(expected[0].shape)}"
    assert lse.shape == expected[1].shape, f"{tuple(lse.shape)} != {tuple(expected[1].shape)}"
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    largest_score = scale * _largest_norm(q) * _largest_norm(k) + largest_modifier
    eps, eps32 = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    score_error = 4 * eps32 * (1 + largest_score)
    largest_v = v.double().abs().max().item() / (1 - dropout_p) if v.numel() else 0.0
    _assert_within(out, expected[0], largest_v * (2 * eps + 2 * score_error), "out")
    seen = expected[1] > -torch.inf
    assert torch.equal(lse == -torch.inf, ~seen), "lse is not -inf exactly where no key is seen"
    lse_rounding = 4 * eps32 * (1 + largest_score + _logarithm(k.shape[-3]))
    # 16-bit kernels may sum probabilities that are rounded like those they multiply v with.
    probability_rounding = eps if dtype != torch.float32 else 0.0
    _assert_within(
        lse[seen], expected[1][seen], lse_rounding + probability_rounding + score_error, "lse"
    )


def _assert_within(actual: Tensor, expected: Tensor, bound: float, name: str) -> None:
    error = (actual.double() - expected).abs()
    assert not error.isnan().any(), f"{name} holds NaN"
    largest = error.max().item() if error.numel() else 0.0
    assert largest <= bound, f"{name} is off by {largest:.3g}, allowed are {bound:.3g}"


def _largest_norm(x: Tensor) -> float:
    return x.double().norm(dim=-1).max().item() if x.numel() else 0.0


def _logarithm(n: int) -> float:
    return torch.tensor(float(max(n, 1))).log().item()
