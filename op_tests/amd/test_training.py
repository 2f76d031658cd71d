"""A tiny language model, trained on the emulated GPU and on the CPU: the losses agree."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from compiled_calls import ARCHS
from torch import Tensor
from torch.nn import functional
from untyped import fmha_fwd

from jitfmha import emulate

_TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. "
_LETTERS = sorted(set(_TEXT))
_BATCH, _SEQLEN = 2, 40
_LAYERS, _HEADS, _KEY_HEADS, _HDIM = 2, 2, 1, 24
_WIDTH = _HEADS * _HDIM
# How far the rounding of bf16 attention on both sides takes the losses apart, by steps: 1e-4 and
# 4e-3 were seen.
_TOLERANCE = {3: 1e-3, 50: 2e-2}


_Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _fmha(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = fmha_fwd(q, k, v, mask="causal")
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's own, for which no kernel has to be built."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


class _TinyModel(torch.nn.Module):
    """Letters to the next letter's logits: attention in bf16 with shared key heads, then an MLP."""

    def __init__(self, attention: _Attention) -> None:
        super().__init__()
        self.attention = attention
        of_keys = _KEY_HEADS * _HDIM
        self.embedding = torch.nn.Embedding(len(_LETTERS), _WIDTH)
        torch.nn.init.normal_(self.embedding.weight, std=0.2)
        self.positions = torch.nn.Parameter(0.1 * torch.randn(_SEQLEN, _WIDTH))
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleList((_layer(_WIDTH + 2 * of_keys), _layer(2 * _WIDTH, _WIDTH)))
            for _ in range(_LAYERS)
        )

    def forward(self, letters: Tensor) -> Tensor:
        x: Tensor = self.embedding(letters) + self.positions
        for projection, mlp in self.layers:
            qkv = projection(x).bfloat16().unflatten(-1, (-1, _HDIM))
            heads = qkv.split((_HEADS, _KEY_HEADS, _KEY_HEADS), dim=-2)
            x = x + self.attention(*heads).flatten(-2).float()
            x = x + mlp(x)
        return functional.layer_norm(x, (_WIDTH,)) @ self.embedding.weight.T


def _layer(*widths: int) -> torch.nn.Sequential:
    """A normalization and a linear map, with another one behind a GELU."""
    layers = [torch.nn.LayerNorm(_WIDTH), torch.nn.Linear(_WIDTH, widths[0])]
    for before, after in itertools.pairwise(widths):
        layers += [torch.nn.GELU(), torch.nn.Linear(before, after)]
    return torch.nn.Sequential(*layers)


def _losses(attention: _Attention, seed: int, steps: int, where: Any) -> list[float]:
    """Of each step of training."""
    torch.manual_seed(seed)
    model = _TinyModel(attention)
    # Unlike Adam it knows how large gradients are.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    numbers = torch.tensor([_LETTERS.index(letter) for letter in _TEXT * 4])
    losses = []
    with where:
        for _ in range(steps):
            starts = torch.randint(len(_TEXT), (_BATCH,)).tolist()
            text = torch.stack([numbers[start : start + _SEQLEN + 1] for start in starts])
            logits = model(text[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.sample("arch", ARCHS, 1)
def test_losses_agree_with_the_cpu(pytestconfig, seed, arch):
    """Three steps by default; 50 with ``--exhaustive``, beside our own kernels for the CPU."""
    is_long = pytestconfig.getoption("--exhaustive")
    steps = 50 if is_long else 3
    state = torch.get_rng_state()
    on_cpu = _losses(_fmha if is_long else _sdpa, seed, steps, nullcontext())
    emulated = _losses(_fmha, seed, steps, emulate(arch))
    torch.set_rng_state(state)
    torch.testing.assert_close(emulated, on_cpu, atol=0, rtol=_TOLERANCE[steps])
    assert emulated != on_cpu, "the same kernels ran on both"
    if is_long:
        assert emulated[-1] < 0.7 * emulated[0]
