"""Packed sequences, their calls, and what the float64 reference makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from closeness import assert_close
from inputs import prefix_sums, random_qkv
from torch import Tensor
from untyped import fmha_fwd

from jitfmha.problem.float64_reference import Result, attention_packed

# Of AITER's mha_batch_prefill and mha_varlen_fwd, beside tensors and lengths.
PREFILL_OPTIONS: dict[str, Any] = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "logits_soft_cap": 0.0,
    "zero_tensors": False,
    "is_causal": True,
    "window_size_left": -1,
    "window_size_right": -1,
    "sink_size": 0,
    "return_softmax_lse": True,
    "return_dropout_randval": False,
}

# Around tiles, without queries, and without keys.
RAGGED = [1, 130, 0, 17, 3, 65], [70, 5, 4, 17, 300, 0]


@dataclass(frozen=True)
class Sequences:
    """Lengths of queries and of keys, and how many unused rows follow each sequence.

    Two numbers for ``gap`` are those of queries and of keys.
    """

    lengths: tuple[Sequence[int], Sequence[int]]
    gap: int | tuple[int, int] = 0

    @property
    def gaps(self) -> tuple[int, int]:
        return (self.gap, self.gap) if isinstance(self.gap, int) else self.gap

    @property
    def rooms(self) -> list[list[int]]:
        sides = zip(self.lengths, self.gaps, strict=True)
        return [[n + gap for n in side] for side, gap in sides]

    @property
    def rows(self) -> tuple[int, int]:
        """All of q, and all of k."""
        rows_q, rows_k = map(sum, self.rooms)
        return rows_q, rows_k

    @property
    def padded(self) -> dict[str, Tensor]:
        """Where each sequence begins."""
        sums_q, sums_k = map(prefix_sums, self.rooms)
        return {"cu_seqlens_q_padded": sums_q, "cu_seqlens_k_padded": sums_k}

    @property
    def groups(self) -> dict[str, Tensor]:
        """The arguments that say so."""
        sums_q, sums_k = map(prefix_sums, self.lengths)
        padded = self.padded if any(self.gaps) else {}
        return {"cu_seqlens_q": sums_q, "cu_seqlens_k": sums_k, **padded}

    @property
    def spans(self) -> tuple[Sequence[int], ...]:
        """Lengths and first rows, as the reference takes them."""
        return *self.lengths, *(sums.tolist()[:-1] for sums in self.padded.values())

    def used_rows(self, side: int) -> Tensor:
        """Which rows of q, or of k and v, belong to a sequence."""
        used = [torch.arange(n + self.gaps[side]) < n for n in self.lengths[side]]
        return torch.cat([torch.zeros(0, dtype=torch.bool), *used])


@dataclass
class Packed:
    """q, k and v, in which rows between sequences hold NaN."""

    sequences: Sequences
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """What stands between the sequences as 0."""
        has_gaps = any(self.sequences.gaps)
        q, k, v = (x.nan_to_num() if has_gaps else x for x in (self.q, self.k, self.v))
        return q, k, v

    def call(self, **options: Any) -> Result:
        options |= {"return_lse": True, **self.sequences.groups}
        out, lse = fmha_fwd(self.q, self.k, self.v, **options)
        return out, lse

    def expected(self, **options: Any) -> Result:
        """The reference's, to which ``num_splits`` and the longest lengths mean nothing."""
        ours = ("num_splits", "max_seqlen_q", "max_seqlen_k")
        options = {name: value for name, value in options.items() if name not in ours}
        return attention_packed(*self.qkv, *self.sequences.spans, **options)

    def check(self, **options: Any) -> None:
        actual, expected = self.call(**options), self.expected(**options)
        scale, dropout_p = options.get("softmax_scale"), options.get("dropout_p", 0.0)
        assert_close(actual, expected, *self.qkv, scale, dropout_p=dropout_p)


def packed(
    rng: torch.Generator,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    *,
    gap: int = 0,
    heads: tuple[int, int] = (4, 2),
    **options: Any,
) -> Packed:
    """Random ones; the options are those of ``random_qkv``."""
    sequences = Sequences((lengths_q, lengths_k), gap)
    q, k, v = (x[0] for x in random_qkv(rng, (*sequences.rows, *heads), batch=1, **options))
    if gap:
        for side, x in ((0, q), (1, k), (1, v)):
            x[~sequences.used_rows(side)] = torch.nan
    return Packed(sequences, q, k, v)
