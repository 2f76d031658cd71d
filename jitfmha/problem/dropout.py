"""The random numbers of dropout: their state, and the numbers themselves where somebody asks.

Kernels make them where they need them, with the counter-based generator Philox 4x32-7. A number
depends on the state and on its position (batch, query head, query, key) alone, so that a forward
and a backward pass agree whatever their tiles, threads and processors are.

Seven rounds are the fewest that pass BigCrush, and as many as flash-attn makes.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from .checks import check_ints, with_clear_errors

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7
_LOW = 0xFFFFFFFF
BYTES_PER_COUNTER = 16  # four words of four bytes, for as many keys that follow each other


def new_rng_state(
    device: torch.device | str = "cpu", *, generator: Generator | None = None
) -> Tensor:
    """A fresh state for ``rng_state`` of :func:`jitfmha.fmha_fwd`: int64 ``(2,)``, seed and offset.

    Args:
        device: of the tensors that it is used with.
        generator: where the seed is drawn from; by default torch's own one for the device, which
            ``torch.manual_seed`` seeds.
    """
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device, generator=generator)
    return torch.cat([seed, torch.zeros_like(seed)])


def largest_kept(dropout_p: float) -> int:
    """The largest random byte that keeps a probability, as flash-attn and AITER have it.

    Their steps are ours, too: what is kept is a multiple of 1/256, and at most 255/256.
    """
    return math.floor(255.0 * (1.0 - dropout_p))


@with_clear_errors
def dropout_randval(
    rng_state: Tensor, batch: int, heads_q: int, seqlen_q: int, seqlen_k: int
) -> Tensor:
    """The random bytes that :func:`jitfmha.fmha_fwd` drops probabilities by.

    The probability of (batch, query head, query, key) is kept where its byte is at most
    ``255 * (1 - dropout_p)``, and divided by ``1 - dropout_p`` then. In gm1 batch counts the
    sequences, and query and key count from the start of each.

    Args:
        rng_state: int64 ``(2,)``, as the call had it.
        batch, heads_q, seqlen_q, seqlen_k: the shape of the result. A byte does not depend on the
            lengths, and on ``heads_q`` only as part of its position.

    Returns:
        uint8 ``(batch, heads_q, seqlen_q, seqlen_k)``, on the device of ``rng_state``.

    Raises ``TypeError`` or ``ValueError`` where ``rng_state`` is no such state or has no values,
    and for what is no size.
    """
    check_rng_state(rng_state)
    if rng_state.is_meta:
        raise ValueError("rng_state is on meta, where it has no values to draw by")
    sizes = {"batch": batch, "heads_q": heads_q, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    check_ints(**sizes)
    for name, size in sizes.items():
        if not 0 <= size < 1 << 31:
            raise ValueError(f"{name}={size} must not be negative, and below 2**31")
    seed, offset = (int(word) for word in rng_state.tolist())
    counters = -(-seqlen_k // BYTES_PER_COUNTER)

    def indices(count: int) -> Tensor:
        return torch.arange(count, dtype=torch.int64, device=rng_state.device)

    words = _philox(
        (
            indices(counters) & _LOW,
            (indices(seqlen_q) & _LOW)[:, None],
            (indices(batch * heads_q) & _LOW)[:, None, None],
            torch.full_like(rng_state[:1], offset & _LOW),
        ),
        (seed & _LOW, seed >> 32 & _LOW),
    )
    bytes_ = [word >> shift & 0xFF for word in words for shift in (0, 8, 16, 24)]
    # The words lie along the keys: 16 bytes of a counter for 16 keys.
    drawn = torch.stack(bytes_, dim=-1).to(torch.uint8).flatten(-2)
    return drawn[..., :seqlen_k].reshape(batch, heads_q, seqlen_q, seqlen_k)


def check_rng_state(rng_state: Tensor) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what is no state of random numbers."""
    if not isinstance(rng_state, Tensor):
        raise TypeError(f"rng_state must be a torch.Tensor, got {type(rng_state).__name__}")
    if rng_state.layout != torch.strided or rng_state.dtype != torch.int64:
        raise TypeError(f"rng_state has dtype {rng_state.dtype}; it must be a strided torch.int64")
    if rng_state.shape != (2,) or rng_state.stride() != (1,):
        raise ValueError(
            f"rng_state has shape {tuple(rng_state.shape)} and strides {rng_state.stride()}; "
            "expected a contiguous (2,), seed and offset"
        )


Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four words of 32 bits for each counter of four; all are int64 tensors that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _KEY_STEPS[0] & _LOW, k1 + _KEY_STEPS[1] & _LOW
    return c0, c1, c2, c3


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of ``a * b``, in steps that fit in int64."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    carried = (low >> 16) + (high & 0xFFFF)
    return (high >> 16) + (carried >> 16), (carried & 0xFFFF) << 16 | low & 0xFFFF
