"""Latent attention (MLA) as an ``nn.Module``: projections, rotary embedding, and a cache."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..call.interface import fmha_fwd
from ..problem.checks import check_counts, check_flags, check_numbers, describe
from ..problem.memory import write_values
from .attention import AttentionCache, rotary_tables
from .kv_cache import Rotary, flash_attn_with_kvcache
from .mla import absorbed_qkv, mla_fwd, projected_qkv, with_values_projected

Form = Literal["naive", "absorbed", "flash"]


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values of all heads are made of one latent per token.

    Its three forms compute the same, and differ in what they project, in what a cache holds, and in
    where results are rounded:

    * "naive" projects keys and values. A cache holds those of all heads.
    * "absorbed" projects queries and outputs, and all heads attend to the latent. A cache holds the
      latents: of each token ``kv_lora_rank + qk_rope_head_dim`` numbers, however many heads.
    * "flash" takes whichever of the two is less work, as :func:`jitfmha.mla_fwd` does; with a cache
      it is the absorbed one.

    Args:
        embed_dim: of the input and the output.
        num_heads: heads of queries, keys and values.
        kv_lora_rank: columns of the latent.
        qk_nope_head_dim, qk_rope_head_dim: of a head's queries and keys the part without a
            position, and the one that is rotated by it, an even number.
        v_head_dim: of a head's values.
        q_lora_rank: columns of what queries are made of; 0 makes them of the input.
        form: "naive", "absorbed" or "flash"; it may be set anew, with a new cache.
        causal: whether tokens see no later ones.
        rotary_base, rotary_interleaved: of the rotary embedding, as :class:`jitfmha.Attention` has
            them.
        softmax_scale: ``1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)`` by default.
        device, dtype: of the parameters, which have the names that DeepSeek's have.

    Raises ``TypeError`` or ``ValueError`` for what is no size, number or flag, for sizes that do
    not fit together, and for a form that is none.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; ``MLA`` in ``inference/model.py`` of
    github.com/deepseek-ai/DeepSeek-V3.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_lora_rank: int = 512,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        q_lora_rank: int = 0,
        form: Form = "flash",
        causal: bool = True,
        rotary_base: float = 10000.0,
        rotary_interleaved: bool = True,
        softmax_scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        ranks = {"kv_lora_rank": kv_lora_rank, "v_head_dim": v_head_dim}
        check_counts(1, embed_dim=embed_dim, num_heads=num_heads, **ranks)
        check_counts(q_lora_rank=q_lora_rank, qk_nope_head_dim=qk_nope_head_dim)
        check_counts(2, qk_rope_head_dim=qk_rope_head_dim)
        check_numbers(rotary_base=rotary_base)
        check_flags(causal=causal, rotary_interleaved=rotary_interleaved)
        if qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim={qk_rope_head_dim} must be even")
        self.form = form
        self.num_heads, self.kv_lora_rank = num_heads, kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.causal = causal
        self.rotary_base, self.rotary_interleaved = rotary_base, rotary_interleaved
        hdim = qk_nope_head_dim + qk_rope_head_dim
        self.softmax_scale = float(hdim) ** -0.5 if softmax_scale is None else softmax_scale

        def linear(columns: int, rows: int) -> nn.Linear:
            return nn.Linear(columns, rows, bias=False, device=device, dtype=dtype)

        def norm(columns: int) -> nn.RMSNorm:
            return nn.RMSNorm(columns, eps=1e-6, device=device, dtype=dtype)

        self.q_lora_rank = q_lora_rank
        if q_lora_rank == 0:
            self.wq = linear(embed_dim, num_heads * hdim)
        else:
            self.wq_a, self.q_norm = linear(embed_dim, q_lora_rank), norm(q_lora_rank)
            self.wq_b = linear(q_lora_rank, num_heads * hdim)
        self.wkv_a = linear(embed_dim, kv_lora_rank + qk_rope_head_dim)
        self.kv_norm = norm(kv_lora_rank)
        self.wkv_b = linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim))
        self.wo = linear(num_heads * v_head_dim, embed_dim)

    @property
    def form(self) -> Form:
        """What is projected, and what a cache holds."""
        return self._form

    @form.setter
    def form(self, form: Form) -> None:
        if form not in get_args(Form):
            raise ValueError(f"form={form!r} is not known; use {', '.join(get_args(Form))}")
        self._form = form

    def forward(self, x: Tensor, *, cache: AttentionCache | None = None) -> Tensor:
        """Attention of ``x`` over itself, or over itself behind a cache.

        Args:
            x: ``(b, s, embed_dim)``.
            cache: to which the tokens of x are appended. It needs ``causal=True``, and gradients
                that are off.

        Returns:
            The shape and dtype of ``x``.

        Raises ``ValueError`` for what does not go together, and as :func:`jitfmha.fmha_fwd`,
        :func:`jitfmha.mla_fwd` and :func:`jitfmha.flash_attn_with_kvcache` do.
        """
        self._check(x, cache)
        q = self.wq(x) if self.q_lora_rank == 0 else self.wq_b(self.q_norm(self.wq_a(x)))
        q_nope, q_pe = q.unflatten(-1, (self.num_heads, -1)).split(
            [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1
        )
        latent, k_pe = self.wkv_a(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        latent = self.kv_norm(latent)
        q_pe, k_pe = self._rotated(q_pe, k_pe, cache)
        out = self._attended(q_nope, q_pe, latent, k_pe, cache)
        projected: Tensor = self.wo(out.flatten(-2))
        return projected

    def new_cache(self, batch: int, capacity: int) -> AttentionCache:
        """An empty cache of the form, with room for ``capacity`` tokens of each sequence.

        Raises ``TypeError`` or ``ValueError`` for what is no size.
        """
        check_counts(batch=batch, capacity=capacity)
        weight = self.wkv_b.weight
        heads, hdim, hdim_v = self._row_of_cache()
        k = torch.zeros(batch, capacity, heads, hdim, device=weight.device, dtype=weight.dtype)
        is_naive = self.form == "naive"
        v = k.new_zeros(batch, capacity, heads, hdim_v) if is_naive else k[..., :hdim_v]
        seqlens = torch.zeros(batch, dtype=torch.int32, device=weight.device)
        return AttentionCache(k, v, seqlens, rotary=self._tables(capacity, weight.device))

    def extra_repr(self) -> str:
        sizes = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        shown = ", ".join(f"{name}={getattr(self, name)}" for name in sizes)
        return f"{shown}, form={self.form}, causal={self.causal}"

    @property
    def _mask(self) -> str | int:
        return "causal" if self.causal else 0

    def _row_of_cache(self) -> tuple[int, int, int]:
        """Key heads, and the columns of keys and of values."""
        if self.form == "naive":
            hdim = self.qk_nope_head_dim + self.qk_rope_head_dim
            return self.num_heads, hdim, self.v_head_dim
        return 1, self.kv_lora_rank + self.qk_rope_head_dim, self.kv_lora_rank

    def _check(self, x: Tensor, cache: AttentionCache | None) -> None:
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise ValueError(f"x is {describe(x)}; expected (b, s, embed_dim)")
        if cache is None:
            return
        if not self.causal:
            raise ValueError(f"causal={self.causal}: a cache is for causal attention")
        held = (*cache.k.shape[-2:], cache.v.shape[-1])
        if held != self._row_of_cache():
            raise ValueError(
                f"the cache has {held[0]} heads of {held[1]} and {held[2]} columns, and form "
                f"{self.form!r} {', '.join(map(str, self._row_of_cache()))}; make it by new_cache"
            )

    def _attended(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        latent: Tensor,
        k_pe: Tensor,
        cache: AttentionCache | None,
    ) -> Tensor:
        wkv_b = self.wkv_b.weight.unflatten(0, (self.num_heads, -1))
        inputs = q_nope, q_pe, latent, k_pe, wkv_b
        if self.form == "flash" and cache is None:
            found = mla_fwd(*inputs, softmax_scale=self.softmax_scale, mask=self._mask)
            assert isinstance(found, Tensor)
            return found
        if self.form == "naive":
            return self._over(*projected_qkv(*inputs), cache)
        out = self._over(*absorbed_qkv(*inputs), cache)
        return with_values_projected(out, wkv_b, self.qk_nope_head_dim)

    def _over(self, q: Tensor, k: Tensor, v: Tensor, cache: AttentionCache | None) -> Tensor:
        """Attention of queries that a form has projected over its keys and values."""
        if cache is None:
            return fmha_fwd(q, k, v, softmax_scale=self.softmax_scale, mask=self._mask)
        out = flash_attn_with_kvcache(
            *(q, cache.k, cache.v, k, v),
            cache_seqlens=cache.seqlens,
            softmax_scale=self.softmax_scale,
            causal=True,
        )
        assert isinstance(out, Tensor)
        write_values(cache.seqlens, cache.seqlens + q.shape[1])
        return out

    def _rotated(
        self, q_pe: Tensor, k_pe: Tensor, cache: AttentionCache | None
    ) -> tuple[Tensor, Tensor]:
        length = q_pe.shape[1] if cache is None else cache.k.shape[1]
        tables = None if cache is None else cache.rotary
        rotary = Rotary(*(tables or self._tables(length, q_pe.device)), self.rotary_interleaved)
        if cache is None:
            first = torch.zeros(q_pe.shape[0], dtype=torch.long, device=q_pe.device)
        else:
            first = cache.seqlens.long()
        q_pe = rotary.rotated("q", q_pe, first, moves=True)
        return q_pe, rotary.rotated("k", k_pe.unsqueeze(-2), first, moves=True).squeeze(-2)

    def _tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return rotary_tables(self.qk_rope_head_dim, self.rotary_base, length, device)
