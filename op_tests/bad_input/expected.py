"""What a valid call must return, in float64, and how near to it a result must be."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from calls import Arguments
from rules import EIGHT_BITS, is_group
from torch import Tensor

from jitfmha.problem.float64_reference import visible

# Beyond it the rounding of a scaled score to float32 is larger than any exponent: the results are
# left open here.
_EXACT_SCORES = 1e8
_FAR = 1 << 30  # keys; no sequence here is as long


@dataclass(frozen=True)
class Sequence:
    """One sequence of a call: its rows `(seqlen, heads, hdim)`, and its lse `(heads, seqlen)`."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None


def check_results(call: Arguments, out: Tensor, lse: Tensor | None, unused_rows: float) -> None:
    """Compare with the definition, element by element.

    `unused_rows`: what rows of `out` hold that belong to no sequence. A NaN in q, or in a key that
    a query sees, makes the query's results NaN; one in v makes its column NaN. What infinity does
    to a query that sees it is left open, but no other query may notice.
    """
    q, v = call["q"], call["v"]
    has_8_bits = q.dtype in EIGHT_BITS
    assert out.dtype == (torch.bfloat16 if has_8_bits else q.dtype)
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    assert (lse is not None) == call["return_lse"]
    if lse is not None:
        assert lse.dtype == torch.float32
        heads, rows = q.shape[-2], q.shape[-3]
        assert lse.shape == ((heads, rows) if is_group(call) else (q.shape[0], heads, rows))
    if q.is_meta:
        assert out.is_meta
        return
    if has_8_bits:
        return  # their scales and roundings have tests of their own
    for sequence in _sequences(call, out, lse):
        _check_sequence(call, sequence)
    if is_group(call):
        used = torch.zeros(q.shape[0], dtype=torch.bool)
        for first, rows in places(call, "q"):
            used[first : first + rows] = True
        assert (out[~used] == unused_rows).all(), "rows that belong to no sequence were written"
        if lse is not None:
            assert (lse[:, ~used] == -torch.inf).all(), "the lse of unused rows is not -inf"


def places(call: Arguments, side: str) -> list[tuple[int, int]]:
    """The first row and the number of rows of each sequence."""
    ends = call[f"cu_seqlens_{side}"].tolist()
    starts = call[f"cu_seqlens_{side}_padded"]
    starts = ends if starts is None else starts.tolist()
    return [(start, b - a) for start, (a, b) in zip(starts[:-1], pairwise(ends), strict=True)]


def _sequences(call: Arguments, out: Tensor, lse: Tensor | None) -> list[Sequence]:
    q, k, v = call["q"], call["k"], call["v"]
    if not is_group(call):
        return [
            Sequence(q[b], k[b], v[b], out[b], None if lse is None else lse[b])
            for b in range(q.shape[0])
        ]
    found = []
    for (at, n), (at_k, n_k) in zip(places(call, "q"), places(call, "k"), strict=True):
        rows, keys = slice(at, at + n), slice(at_k, at_k + n_k)
        found.append(
            Sequence(q[rows], k[keys], v[keys], out[rows], None if lse is None else lse[:, rows])
        )
    return found


def _check_sequence(call: Arguments, one: Sequence) -> None:
    q, k, v = (x.double().transpose(0, 1) for x in (one.q, one.k, one.v))
    if one.out.numel() == 0:
        return
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scale = call["softmax_scale"]
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    see = visible(q.shape[1], k.shape[1], *_short_sides(call))

    # Rows that hold NaN, and rows that hold any value that is not finite.
    nan_q, nan_k = q.isnan().any(-1)[..., None], k.isnan().any(-1)[:, None, :]
    odd_q, odd_k = ~q.isfinite().all(-1)[..., None], ~k.isfinite().all(-1)[:, None, :]
    blind = ~see.any(-1)
    has_nan = ((nan_q | nan_k) & see).any(-1)
    is_open = ((odd_q | odd_k) & see).any(-1)
    # A probability of 0 times NaN is NaN: every key of the sequence counts.
    nan_v = (v.isnan()[:, None] & see[None, :, :, None]).any(2)
    open_v = (~v.isfinite()).any(1)[:, None, :]

    q, k, v = (x.nan_to_num(0.0, 0.0, 0.0) for x in (q, k, v))
    scores = torch.einsum("hid,hjd->hij", q, k) * scale
    scores = scores.masked_fill(~see, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    probability = torch.exp(scores - lse[..., None]).masked_fill(~see, 0)
    expected = torch.einsum("hij,hjd->hid", probability, v)

    # The rounding of scores to float32, of probabilities and of results to the dtype.
    eps, eps32 = torch.finfo(one.q.dtype).eps, torch.finfo(torch.float32).eps
    largest_score = scale * _largest(q.norm(dim=-1)) * _largest(k.norm(dim=-1))
    if largest_score > _EXACT_SCORES:
        return
    score_error = 4 * eps32 * (1 + largest_score)
    tolerance = _largest(v.abs()) * (2 * eps + 2 * score_error)

    out = one.out.double().transpose(0, 1)
    exact = ~(is_open[..., None] | open_v) & ~blind[:, None]
    assert (out[:, blind] == 0).all(), "a query that sees no key has an output other than 0"
    worst = (out - expected).abs().masked_fill(~exact, 0)
    assert worst.max() <= tolerance, f"out is off by {worst.max():.3g}, allowed: {tolerance:.3g}"
    spoilt = (has_nan[..., None] | nan_v) & ~blind[:, None]
    assert out[spoilt].isnan().all(), "a NaN was lost"
    if one.lse is None:
        return
    assert (one.lse[:, blind] == -torch.inf).all(), "the lse of a query without keys is not -inf"
    allowed = score_error + eps + 4 * eps32 * (1 + largest_score + 10)
    exact_lse = ~is_open & ~blind
    off = (one.lse.double() - lse).abs().masked_fill(~exact_lse, 0)
    assert off.max() <= allowed, f"lse is off by {off.max():.3g}, allowed: {allowed:.3g}"
    assert one.lse[has_nan & ~blind].isnan().all(), "a NaN was lost"


def _short_sides(call: Arguments) -> tuple[int | str, tuple[int, int]]:
    """Mask and window size with numbers that torch can compute with, as far as they go."""
    mask, window = call["mask"], call["window_size"]
    if isinstance(mask, str) and ":" in mask:
        first, second = (min(int(number), _FAR) for number in mask[2:].split(","))
        mask = f"{mask[:2]}{first},{second}"
    return mask, (min(window[0], _FAR), min(window[1], _FAR))


def _largest(x: Tensor) -> float:
    return x.max().item() if x.numel() else 0.0
