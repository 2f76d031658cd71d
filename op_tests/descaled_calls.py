"""8-bit inputs: scales for them, and what two products of int8 numbers may be off by."""

from collections.abc import Callable
from typing import Any

import torch
from closeness import assert_close
from torch import Tensor

from jitfmha.problem.float64_reference import Result, attention, descaled

QkvScales = dict[str, Tensor]


def random_scales(
    rng: torch.Generator,
    form: str,
    heads_q: int,
    heads_k: int,
    *,
    batch: int = 2,
    size: float = 1 / 64,
) -> QkvScales:
    """Of about this size, with gaps between them; by default int8 numbers become normal ones."""
    scales = {}
    for name, heads in (("q", heads_q), ("k", heads_k), ("v", heads_k)):
        shape = {"one": (1,), "each sequence and key head": (batch, heads_k), "each head": (heads,)}
        spread = torch.rand(*shape[form], 2, generator=rng) + 0.5
        scales[f"{name}_descale"] = size * spread[..., 0]
    return scales


def scales_of_tokens(rng: torch.Generator, x: Tensor) -> Tensor:
    """One for each token and head of keys or values, such that numbers are about normal ones.

    Heads lie farthest apart, and NaN between the scales.
    """
    size = 1 / 64 if x.dtype == torch.int8 else 1.0
    heads_first = x[..., :1].movedim(-2, 0)
    room = torch.full((*heads_first.shape, 3), torch.nan)
    room[..., 1] = size * (torch.rand(heads_first.shape, generator=rng) + 0.5)
    return room[..., 1].movedim(0, -2)


def scaled(tensors: tuple[Tensor, ...], scales: QkvScales) -> list[Tensor]:
    """What the numbers stand for, with each tensor's largest scale: bounds are asked for."""
    return [
        descaled(
            x if x.dim() == 4 else x[None],
            torch.cat([torch.zeros(1), scales[name].nan_to_num().flatten()]).amax().view(1)
            if name in scales
            else None,
            1,
        )
        for x, name in zip(tensors, ("q_descale", "k_descale", "v_descale"), strict=True)
    ]


def steps_of_probabilities(
    q: Tensor, k: Tensor, p_descale: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """What one step of an int8 probability is for each row, ``(b, hq, sq, 1)``.

    And how near ``(b, hq, sq, sk)`` the probabilities are to the next whole step.
    """
    batch, seqlen_k, heads_k, _ = k.shape
    eye = torch.eye(seqlen_k)[None, :, None].expand(batch, -1, heads_k, -1)
    options = {name: x for name, x in options.items() if name != "v_descale"}
    probability = attention(q, k, eye, **options)[0].transpose(1, 2)
    largest = probability.amax(-1, keepdim=True)
    scale = descaled(torch.ones(1, 1, q.shape[2], 1), p_descale, heads_k).transpose(1, 2)
    steps = torch.where(largest > 0, probability / largest, 0) / scale
    return scale * largest, (steps - steps.round()).abs()


def check_both_products(
    actual: Result,
    tensors: tuple[Tensor, Tensor, Tensor],
    scales: QkvScales,
    is_one_tile: bool,
    **options: Any,
) -> None:
    """Within rounding, and a step where a probability is as good as whole.

    Probabilities are relative to the largest one so far: where there are several key tiles, each of
    them may be a step less than it should.
    """
    out, lse = actual
    p_descale = scales["p_descale"]
    of_inputs = {name: x for name, x in scales.items() if name != "p_descale"}
    exact = options | of_inputs
    plain = attention(*tensors, **exact)
    expected = attention(*tensors, p_descale=p_descale, **exact)[0] if is_one_tile else plain[0]
    q, k, v = scaled(tensors, scales)
    if tensors[1].shape[1] == 0 or tensors[0].shape[1] == 0:
        assert torch.equal(out.double(), expected)
        return
    step, distance = steps_of_probabilities(*tensors[:2], p_descale, **exact)
    counts = distance < 0.02 if is_one_tile else torch.ones_like(distance, dtype=torch.bool)
    groups = tensors[0].shape[2] // tensors[1].shape[2]
    values = v.abs().repeat_interleave(groups, dim=2)
    slack = torch.einsum("bhij,bjhd->bihd", step * counts, values)
    largest = v.abs().max()
    error = (out.double() - expected).abs()
    bound = slack + 0.01 * expected.abs() + 1e-4 * largest
    assert (error <= bound).all(), (error - bound).max()
    assert_close((plain[0].bfloat16(), lse), plain, q, k, v, dtype=torch.bfloat16)


def check_rounding_towards_zero(hdims: tuple[int, int], call: Callable[..., Tensor]) -> None:
    """Two keys, whose relative probabilities are 1 and one just below, at or above a whole step."""
    q = torch.ones(1, 3, 1, hdims[0], dtype=torch.int8)
    k, v = (torch.zeros(1, 2, 1, hdim, dtype=torch.int8) for hdim in hdims)
    k[:, 1, :, 0] = -1
    v[:, 1] = 64
    for steps, whole in ((1.98, 1), (2.02, 2), (0.97, 0), (3.9, 3)):
        # The second score is the first one's less the logarithm.
        scale = -torch.tensor(steps / 4).log().item()
        out = call(q, k, v, softmax_scale=scale, p_descale=torch.full((1,), 1 / 4))
        share = whole / 4 / (1 + steps / 4)
        torch.testing.assert_close(out, torch.full_like(out, 64 * share), rtol=0.01, atol=1e-3)
