"""A batch as serving frameworks have it: a few queries for each sequence, and keys in pages."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from closeness import assert_close
from descaled_calls import scaled
from inputs import prefix_sums
from torch import Tensor

from jitfmha import emulate
from jitfmha.problem.float64_reference import attention_packed

TARGETS = [None, "gfx942"]
"""The CPU, and an emulated GPU."""

FP8 = torch.float8_e4m3fnuz
"""Which both serve."""


def on(target: str | None) -> AbstractContextManager[object]:
    return emulate(target) if target else nullcontext()


class Serving:
    """Packed queries, and pages in random order among others that hold NaN.

    ``k`` and ``v`` are ``(num_pages, page_size, hk, hdim)``; a latent is ``k`` with one head, of
    which ``v`` is the first columns. Pages of ``kv_dtype`` fp8 have scales other than 1, of no
    dimension, as vLLM has them.
    """

    def __init__(
        self,
        rng: torch.Generator,
        *,
        lengths_q: tuple[int, ...] = (1, 1, 1),
        lengths_k: tuple[int, ...] = (1, 37, 70),
        page_size: int = 16,
        heads: tuple[int, int] = (4, 2),
        hdim: int = 64,
        rank: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        kv_dtype = kv_dtype or dtype
        is_fp8 = kv_dtype == FP8
        self.cache_dtype = "fp8" if is_fp8 else "auto"
        self.k_scale, self.v_scale = map(torch.tensor, (0.75, 1.5) if is_fp8 else (1.0, 1.0))
        self.lengths_q, self.lengths_k, self.page_size = lengths_q, lengths_k, page_size
        counts = [-(-length // page_size) for length in lengths_k]
        num_pages = sum(counts) + 2
        order = torch.randperm(num_pages, generator=rng)[: sum(counts)].int()
        self.table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        of_sequences = order.split(counts)
        for row, pages in zip(self.table, of_sequences, strict=True):
            row[: len(pages)] = pages
        heads_q, heads_k = heads
        shape = (num_pages, page_size, heads_k, hdim)
        self.k = torch.full(shape, torch.nan).to(kv_dtype)
        self.v = self.k[..., :rank] if rank else torch.full(shape, torch.nan).to(kv_dtype)
        rows = []
        for pages, length in zip(of_sequences, lengths_k, strict=True):
            place = pages.long().repeat_interleave(page_size)[:length]
            within = torch.arange(length) % page_size
            for cache in (self.k,) if rank else (self.k, self.v):
                numbers = torch.randn(length, heads_k, hdim, generator=rng).to(kv_dtype)
                # Of fp8 torch indexes bytes alone.
                of_bytes = cache.view(torch.uint8) if is_fp8 else cache
                of_bytes[place, within] = numbers.view(torch.uint8) if is_fp8 else numbers
            of_sequence = self.k.float()[place, within], self.v.float()[place, within]
            rows.append([x.to(kv_dtype) for x in of_sequence])
        self.rows_k, self.rows_v = (torch.cat(x) for x in zip(*rows, strict=True))
        self.q = torch.randn(sum(lengths_q), heads_q, hdim, generator=rng).to(dtype)
        self.out = torch.full((*self.q.shape[:2], self.v.shape[-1]), torch.nan, dtype=dtype)
        self.cu_q, self.cu_k = prefix_sums(lengths_q), prefix_sums(lengths_k)
        self.seqlens_k = torch.tensor(lengths_k, dtype=torch.int32)
        # The same pages as lists, with what has no meaning behind them.
        self.indptr = prefix_sums(counts)
        self.indices = torch.cat([order, torch.tensor([-7], dtype=torch.int32)])
        last = [(length - 1) % page_size + 1 for length in lengths_k]
        self.last_page_lens = torch.tensor(last, dtype=torch.int32)
        self.one = torch.ones(1)
        self.workspace = torch.empty(0, dtype=torch.uint8)

    @property
    def scales(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Of keys and of values, as SGLang has them: of an fp8 cache alone."""
        if self.cache_dtype == "auto":
            return None, None
        return self.k_scale.view(1), self.v_scale.view(1)

    def check(
        self,
        out: Tensor,
        lse: Tensor | None = None,
        softmax_scale: float | None = None,
        **mask: Any,
    ) -> None:
        """Out, and its lse ``(hq, total_q)``, beside float64; causal by default."""
        starts = self.cu_q.tolist()[:-1], self.cu_k.tolist()[:-1]
        of_rows = self.q, self.rows_k, self.rows_v
        scales = {}
        if self.cache_dtype == "fp8":
            scales = dict(zip(("k_descale", "v_descale"), self.scales, strict=True))
        options = {"softmax_scale": softmax_scale, "mask": 2, **scales, **mask}
        expected = attention_packed(*of_rows, self.lengths_q, self.lengths_k, *starts, **options)
        found = out, expected[1].float() if lse is None else lse
        assert_close(found, expected, *scaled(of_rows, scales), softmax_scale, dtype=self.q.dtype)
