"""Attention as an ``nn.Module``: projections, rotary embedding and a cache around ``fmha_fwd``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..call.interface import OFF, fmha_fwd
from ..problem.checks import (
    check_counts,
    check_flags,
    check_numbers,
    describe,
    requires_any_grad,
)
from ..problem.mask import OPEN_WINDOW, check_window_size
from ..problem.memory import write_values
from ..problem.packed_pages import shape_of_keys
from ..rows.heads.interface import qk_norm_rope_cache
from ..rows.problem import ROW_DTYPES
from .kv_cache import Rotary, flash_attn_with_kvcache
from .page_layout import PageLayout

_PAGE_SIZE = 128


class AttentionCache(NamedTuple):
    """Keys and values of earlier tokens; :meth:`Attention.new_cache` makes one.

    Attributes:
        k, v: ``(b, capacity, num_kv_heads, head_dim)``, or pages; written in place.
        seqlens: int32 ``(b,)``, how many tokens each sequence has; it grows in place. Setting some
            of it to 0 starts these sequences anew.
        block_table: of pages, those of each sequence, int32 ``(b, pages)``.
        rotary: cosines and sines of all positions, float32 ``(capacity, rotary_dim / 2)``; without
            them each call makes them anew.
    """

    k: Tensor
    v: Tensor
    seqlens: Tensor
    block_table: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None

    @property
    def capacity(self) -> int:
        """How many tokens of a sequence there is room for."""
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return pages * shape_of_keys(self.k)[1]


class Attention(nn.Module):
    """Multi-head self-attention or cross-attention, with fewer key heads where that is wanted.

    Args:
        embed_dim: of the input and the output.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of ``num_heads`` (GQA, MQA); by default as
            many.
        head_dim: ``embed_dim // num_heads`` by default.
        bias: of the four projections.
        causal: whether tokens see no later ones; at the bottom right where the context is longer.
        window_size: (left, right), how far tokens see around their own place; -1 is open.
        rotary_dim: how many elements of each query and key are rotated by position, an even number
            up to ``head_dim``; 0 is off.
        rotary_base, rotary_interleaved: of the rotary embedding; whether neighbours are rotated
            together (GPT-J), or halves (GPT-NeoX, Llama).
        qk_norm: RMS norms over each head of queries and keys, before the rotation (Qwen3).
        dropout: of probabilities, in training mode only.
        softmax_scale, logit_softcap: those of :func:`jitfmha.fmha_fwd`.
        device, dtype: of the parameters.

    Raises ``TypeError`` or ``ValueError`` for what is no size, number or flag, and for sizes that
    do not fit together.

    Source: Vaswani et al. (arXiv 1706.03762); Su et al., RoFormer (arXiv 2104.09864), for the
    rotary embedding.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        causal: bool = False,
        window_size: tuple[int, int] = OPEN_WINDOW,
        rotary_dim: int = 0,
        rotary_base: float = 10000.0,
        rotary_interleaved: bool = False,
        qk_norm: bool = False,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        logit_softcap: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(1, embed_dim=embed_dim, num_heads=num_heads)
        check_counts(rotary_dim=rotary_dim)
        check_numbers(rotary_base=rotary_base, dropout=dropout)
        flags = {"bias": bias, "causal": causal, "rotary_interleaved": rotary_interleaved}
        check_flags(**flags, qk_norm=qk_norm)
        if head_dim is None and embed_dim % num_heads != 0:
            raise ValueError(f"embed_dim={embed_dim} is no multiple of num_heads={num_heads}")
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        check_counts(1, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        if num_heads % self.num_kv_heads != 0:
            raise ValueError(f"num_kv_heads={num_kv_heads} is no divisor of num_heads={num_heads}")
        if rotary_dim % 2 != 0 or rotary_dim > self.head_dim:
            raise ValueError(
                f"rotary_dim={rotary_dim} must be an even number up to head_dim={self.head_dim}"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} must be at least 0 and less than 1")
        self.causal = causal
        self.window_size = check_window_size(window_size)
        self.rotary_dim, self.rotary_base = rotary_dim, rotary_base
        self.rotary_interleaved = rotary_interleaved
        self.dropout = dropout
        self.softmax_scale, self.logit_softcap = softmax_scale, logit_softcap
        width, kv_width = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, width, bias=bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(embed_dim, kv_width, bias=bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(embed_dim, kv_width, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(width, embed_dim, bias=bias, device=device, dtype=dtype)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6, device=device, dtype=dtype)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """Attention of ``x`` over itself, over ``context``, or over itself behind a cache.

        Args:
            x: ``(b, s, embed_dim)``, or with ``cu_seqlens`` the packed rows
                ``(total, embed_dim)``.
            context: ``(b, s_context, embed_dim)``, what keys and values are made of; not with
                ``cu_seqlens``, ``cache`` or a rotary embedding.
            bias: that of :func:`jitfmha.fmha_fwd`; not with ``cache``.
            cu_seqlens, max_seqlen: int32 ``(b + 1,)``, the prefix sums of the lengths of packed
                sequences, and the longest one of them, optional. Positions start anew in each.
            cache: to which the keys and values of x are appended. It needs ``causal=True``, and
                gradients that are off.

        Returns:
            The shape and dtype of ``x``.

        Raises ``ValueError`` for what does not go together, and as :func:`jitfmha.fmha_fwd` and
        :func:`jitfmha.flash_attn_with_kvcache` do.
        """
        self._check(x, context, bias, cu_seqlens, cache)
        source = x if context is None else context
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(source).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(source).unflatten(-1, (self.num_kv_heads, self.head_dim))
        if cache is not None:
            out = self._behind(cache, q, k, v)
        else:
            q, k = self._prepared(q, k, cu_seqlens)
            out = fmha_fwd(
                *(q, k, v),
                softmax_scale=self.softmax_scale,
                mask="causal" if self.causal else 0,
                window_size=self.window_size,
                logit_softcap=self.logit_softcap or OFF,
                bias=bias,
                dropout_p=(self.dropout if self.training else 0) or OFF,
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_k=cu_seqlens,
                max_seqlen_q=max_seqlen,
                max_seqlen_k=max_seqlen,
            )
        projected: Tensor = self.out_proj(out.flatten(-2))
        return projected

    def new_cache(
        self, batch: int, capacity: int, *, layout: PageLayout | str | None = None
    ) -> AttentionCache:
        """An empty cache with room for at least ``capacity`` tokens of each of ``batch`` sequences.

        With a :class:`jitfmha.PageLayout`, or its value, it has pages of 128 tokens, which follow
        each other. Raises ``TypeError`` or ``ValueError`` for what is no size or layout, and where
        ``head_dim`` does not fit into packed pages.
        """
        check_counts(batch=batch, capacity=capacity)
        weight, pages, page_size = self.k_proj.weight, 1, capacity
        if layout is not None:
            pages, page_size = -(-capacity // _PAGE_SIZE), _PAGE_SIZE
        k, v = PageLayout(layout or "rows").new_pages(
            *(batch * pages, page_size, self.num_kv_heads, self.head_dim),
            dtype=weight.dtype,
            device=weight.device,
        )
        table = torch.arange(batch * pages, dtype=torch.int32, device=weight.device)
        table = table.view(batch, pages)
        seqlens = torch.zeros(batch, dtype=torch.int32, device=weight.device)
        rotary = self._rotary_tables(pages * page_size, weight.device)
        return AttentionCache(k, v, seqlens, None if layout is None else table, rotary)

    def extra_repr(self) -> str:
        shown = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        shown += f", head_dim={self.head_dim}, causal={self.causal}"
        if self.window_size != OPEN_WINDOW:
            shown += f", window_size={self.window_size}"
        return shown + (f", rotary_dim={self.rotary_dim}" if self.rotary_dim else "")

    def _check(
        self,
        x: Tensor,
        context: Tensor | None,
        bias: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: AttentionCache | None,
    ) -> None:
        expected = 3 if cu_seqlens is None else 2
        if not isinstance(x, Tensor) or x.dim() != expected:
            rows = "(b, s, embed_dim)" if cu_seqlens is None else "(total, embed_dim)"
            raise ValueError(f"x is {describe(x)}; expected {rows}")
        if context is not None:
            if cu_seqlens is not None or cache is not None:
                other = "cache" if cu_seqlens is None else "cu_seqlens"
                raise ValueError(f"context ({describe(context)}) cannot be combined with {other}")
            if self.rotary_dim > 0:
                raise ValueError(
                    f"context ({describe(context)}) has no positions that a rotary embedding "
                    f"(rotary_dim={self.rotary_dim}) could count from those of x"
                )
        if cache is None:
            return
        if not self.causal:
            raise ValueError(f"causal={self.causal}: a cache is for causal attention")
        if cu_seqlens is not None or bias is not None:
            name, given = ("cu_seqlens", cu_seqlens) if bias is None else ("bias", bias)
            raise ValueError(f"{name} ({describe(given)}) cannot be combined with cache")
        if self.training and self.dropout > 0:
            raise ValueError(f"dropout={self.dropout} in training mode does not go with a cache")

    def _behind(self, cache: AttentionCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        norms = self._fused_norms()
        if norms is None:
            q, k, norms = self.q_norm(q), self.k_norm(k), {}
        rotary = cache.rotary or self._rotary_tables(cache.capacity, q.device)
        q_turned, _ = qk_norm_rope_cache(
            q,
            k,
            v,
            **norms,
            **self._as_arguments(rotary),
            k_cache=cache.k,
            v_cache=cache.v,
            cache_seqlens=cache.seqlens,
            block_table=cache.block_table,
        )
        assert q_turned is not None
        seqlens = cache.seqlens + q.shape[1]
        out = flash_attn_with_kvcache(
            *(q_turned, cache.k, cache.v),
            cache_seqlens=seqlens,
            block_table=cache.block_table,
            softmax_scale=self.softmax_scale,
            causal=True,
            window_size=self.window_size,
            softcap=self.logit_softcap,
        )
        assert isinstance(out, Tensor)
        write_values(cache.seqlens, seqlens)
        return out

    def _fused_norms(self) -> dict[str, Any] | None:
        """The norms of q and k as arguments of one pass; None where they are other modules."""
        norms = self.q_norm, self.k_norm
        if all(type(norm) is nn.Identity for norm in norms):
            return {}
        weights = []
        for norm in norms:
            is_plain = isinstance(norm, nn.RMSNorm) and norm.weight is not None
            if not is_plain or norm._forward_hooks or norm._forward_pre_hooks:
                return None
            weights.append(norm.weight)
        if self.q_norm.eps != self.k_norm.eps or self.q_norm.eps is None:
            return None
        return {"q_weight": weights[0], "k_weight": weights[1], "eps": self.q_norm.eps}

    def _as_arguments(self, rotary: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
        if rotary is None:
            return {}
        return {"cos": rotary[0], "sin": rotary[1], "interleaved": self.rotary_interleaved}

    def _prepared(self, q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries and keys normalised and rotated: for gradients by torch's own operations."""
        norms = self._fused_norms()
        if (
            norms is None
            or (torch.is_grad_enabled() and requires_any_grad(q, k, *norms.values()))
            or torch.compiler.is_compiling()
            or q.dtype not in ROW_DTYPES
        ):
            q, k = self.q_norm(q), self.k_norm(k)
            return self._rotated(q, k, cu_seqlens) if self.rotary_dim > 0 else (q, k)
        positions = None
        if self.rotary_dim > 0 and cu_seqlens is not None:
            positions = self._positions(q.shape[0], cu_seqlens)
        rotary = self._as_arguments(self._rotary_tables(q.shape[-3], q.device))
        given = {**norms, **rotary, "positions": positions}
        if q.shape[:-2] == k.shape[:-2]:
            q_made, k_made = qk_norm_rope_cache(q, k, **given)
        else:  # of a context, which has no positions
            q_made, _ = qk_norm_rope_cache(q, **given | {"k_weight": None})
            _, k_made = qk_norm_rope_cache(None, k, **given | {"q_weight": None})
        assert q_made is not None
        assert k_made is not None
        return q_made, k_made

    def _rotated(self, q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        tables = self._rotary_tables(q.shape[-3], q.device)
        assert tables is not None
        rotary = Rotary(*tables, self.rotary_interleaved)
        if cu_seqlens is None:
            first = torch.zeros(q.shape[0], dtype=torch.long, device=q.device)
            q, k = (rotary.rotated(name, x, first, moves=True) for name, x in (("q", q), ("k", k)))
            return q, k
        # Each packed row as a sequence of its own, which starts at the row's position.
        first = self._positions(q.shape[0], cu_seqlens)
        q, k = (
            rotary.rotated(name, x[:, None], first, moves=True)[:, 0]
            for name, x in (("q", q), ("k", k))
        )
        return q, k

    @staticmethod
    def _positions(rows: int, cu_seqlens: Tensor) -> Tensor:
        """Those of packed rows in their sequences, int64 ``(rows,)``."""
        row = torch.arange(rows, device=cu_seqlens.device)
        starts = cu_seqlens.long()
        sequence = torch.bucketize(row, starts[1:], right=True).clamp(max=starts.shape[0] - 2)
        return row - starts[sequence]

    def _rotary_tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        if self.rotary_dim == 0:
            return None
        return rotary_tables(self.rotary_dim, self.rotary_base, length, device)


def rotary_tables(
    rotary_dim: int, base: float, length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position, float32 ``(length, rotary_dim / 2)``."""
    even = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32)
    frequency = base ** (-even / rotary_dim)
    position = torch.arange(length, device=device, dtype=torch.float32)
    angle = position[:, None] * frequency
    return angle.cos(), angle.sin()
