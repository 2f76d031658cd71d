"""Batches whose pages are named in lists, one behind the other, as SGLang's are."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from closeness import assert_close
from inputs import prefix_sums
from torch import Tensor

from jitfmha.problem.float64_reference import attention_packed, unpaged

NO_PAGE = -(10**6)


class PageLists:
    """Packed queries, and keys in pages in random order among others that hold NaN.

    Sequences share pages with the one before, room is left between their lists, and before the
    first one. ``k`` and ``v`` are ``(num_pages, page_size, hk, hdim)``; with a ``rank``, values are
    the first columns of k.
    """

    def __init__(
        self,
        rng: torch.Generator,
        lengths_q: Sequence[int],
        lengths_k: Sequence[int],
        page_size: int,
        heads: tuple[int, int] = (6, 3),
        hdim: int = 32,
        rank: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        def draw(most: int) -> int:
            return int(torch.randint(most + 1, (), generator=rng))

        self.lengths_q, self.lengths_k, self.page_size = list(lengths_q), list(lengths_k), page_size
        counts = [-(-length // page_size) for length in lengths_k]
        num_pages = sum(counts) + 3  # the last of which kernels take for what is no page
        order = torch.randperm(num_pages - 1, generator=rng)[: sum(counts)].int()
        self.pages = [x.clone() for x in order.split(counts)]
        for n, (before, own) in enumerate(itertools.pairwise(self.pages), start=1):
            shared = draw(min(lengths_k[n - 1], lengths_k[n]) // page_size)
            own[:shared] = before[:shared]
        gaps = [draw(3) for _ in range(len(counts) + 1)]
        pieces = [torch.full((gap,), NO_PAGE, dtype=torch.int32) for gap in gaps]
        for own, gap in zip(self.pages, pieces[1:], strict=True):
            pieces[0] = torch.cat([pieces[0], own, gap])
        self.lists = pieces[0]
        rooms = [count + gap for count, gap in zip(counts, gaps[1:], strict=True)]
        self.starts = prefix_sums(rooms) + gaps[0]
        self.table = torch.full((len(counts), max(counts)), NO_PAGE, dtype=torch.int32)
        for row, own in zip(self.table, self.pages, strict=True):
            row[: len(own)] = own
        heads_q, heads_k = heads
        self.k = torch.full((num_pages, page_size, heads_k, hdim), torch.nan)
        self.v = self.k[..., :rank] if rank else self.k.clone()
        for own, length in zip(self.pages, lengths_k, strict=True):
            for place, page in enumerate(own.tolist()):
                used = min(page_size, length - place * page_size)
                for cache in (self.k,) if rank else (self.k, self.v):
                    rows = cache[page, :used]
                    drawn = torch.randn(rows.shape, generator=rng)
                    rows.copy_(torch.where(rows.isnan(), drawn, rows))
        self.k = self.k.to(dtype)
        self.v = self.k[..., :rank] if rank else self.v.to(dtype)
        self.q = torch.randn(sum(lengths_q), heads_q, hdim, generator=rng).to(dtype)
        self.cu_q, self.cu_k = prefix_sums(lengths_q), prefix_sums(lengths_k)

    @property
    def groups(self) -> dict[str, Any]:
        return {
            "cu_seqlens_q": self.cu_q,
            "cu_seqlens_k": self.cu_k,
            "cu_seqlens_k_padded": self.starts,
            "block_table": self.lists,
            "max_seqlen_q": max(self.lengths_q),
        }

    @property
    def by_table(self) -> dict[str, Any]:
        """The same with a table of the same pages."""
        return self.groups | {"cu_seqlens_k_padded": None, "block_table": self.table}

    @property
    def without_gaps(self) -> dict[str, Tensor]:
        """The lists as AITER's functions take them, with what has no meaning behind them."""
        last = [(length - 1) % self.page_size + 1 if length else 1 for length in self.lengths_k]
        return {
            "kv_indptr": prefix_sums([len(own) for own in self.pages]),
            "kv_page_indices": torch.cat([*self.pages, self.lists.new_full((2,), NO_PAGE)]),
            "kv_last_page_lens": torch.tensor(last, dtype=torch.int32),
        }

    def check(self, actual: tuple[Tensor, Tensor], **options: Any) -> None:
        """Out and lse beside float64."""
        k, v = (unpaged(x, self.pages, self.lengths_k) for x in (self.k, self.v))
        spans = self.lengths_q, self.lengths_k, self.cu_q.tolist()[:-1], self.cu_k.tolist()[:-1]
        expected = attention_packed(self.q, k, v, *spans, **options)
        assert_close(actual, expected, self.q, k, v, options.get("softmax_scale"))
