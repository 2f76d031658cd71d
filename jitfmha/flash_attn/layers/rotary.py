"""flash-attn's layer for the rotary position embedding, and its functions.

Source: ``flash_attn/layers/rotary.py`` of github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layers.peer_values import as_flag, as_int, as_number
from ...problem.checks import describe, with_clear_errors
from ...problem.memory import overlaps_itself
from ..ops.triton.rotary import apply_rotary, check_floating, rotate_all

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


@with_clear_errors
def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """``x (..., d)``, every pair ``(a, b)`` of it as ``(-b, a)``; pairs as of ``apply_rotary``.

    Raises:
        TypeError, ValueError: x is no tensor of floating-point numbers, or d is odd.
    """
    check_floating("x", x)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"x is {describe(x)}; expected an even last dimension")
    if as_flag("interleaved", interleaved):
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((-b, a), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


@with_clear_errors
def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """:func:`apply_rotary_emb` in the dtype of x; ``cos`` and ``sin`` may also have a batch.

    x is ``(b, s, h, hdim)``, cos and sin ``(s, rotary_dim / 2)`` or ``(b, s, rotary_dim / 2)``.

    Raises:
        TypeError, ValueError: an argument breaks a rule.
    """
    interleaved = as_flag("interleaved", interleaved)
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        check_floating(name, tensor)
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}")
    shape = x.shape[:2] if cos.dim() == 3 else x.shape[1:2]
    if x.dim() != 4 or cos.shape != sin.shape or cos.shape[:-1] != shape:
        raise ValueError(
            f"cos is {describe(cos)}, sin {describe(sin)}, x {describe(x)}; expected "
            "(s, rotary_dim / 2) or (b, s, rotary_dim / 2) twice, and (b, s, h, hdim)"
        )
    width = 2 * cos.shape[-1]
    if width > x.shape[-1]:
        raise ValueError(f"cos is {describe(cos)}; x has an hdim of {x.shape[-1]} only")

    def of_pairs(table: Tensor) -> Tensor:
        repeated = table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)
        return repeated.unsqueeze(-2)

    turned = x[..., :width]
    turned = turned * of_pairs(cos) + rotate_half(turned, interleaved) * of_pairs(sin)
    return torch.cat((turned, x[..., width:]), dim=-1)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """:func:`jitfmha.flash_attn.ops.triton.rotary.apply_rotary`, with another order of arguments.

    Raises:
        TypeError, ValueError: as that does.
    """
    return apply_rotary(
        x,
        cos,
        sin,
        seqlen_offsets=seqlen_offsets,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        interleaved=interleaved,
        inplace=inplace,
    )


apply_rotary_emb_func = apply_rotary_emb
"""The name that it had before."""


@with_clear_errors
def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k, in place.

    Args:
        qkv: ``(b, s, 3, h, hdim)``, or with num_heads_q ``(b, s, hq + 2 * hk, hdim)``.
        cos, sin: as of :func:`jitfmha.flash_attn.ops.triton.rotary.apply_rotary`; of k alone cos_k
            and sin_k, where they are given.
        interleaved, seqlen_offsets: as there.
        num_heads_q: hq.

    Returns:
        ``qkv``; a copy of it where it is a leaf that requires grad, which torch leaves as it is.

    Raises:
        TypeError, ValueError: an argument breaks a rule.
    """
    qkv = _writable("qkv", qkv, (4, 5))
    for name, table in (("cos_k", cos_k), ("sin_k", sin_k)):
        if table is not None:
            check_floating(name, table)
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            raise ValueError(f"qkv is {describe(qkv)}; expected (b, s, 3, h, hdim)")
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        heads = qkv.shape[2]
        heads_q = heads if num_heads_q is None else as_int("num_heads_q", num_heads_q)
        if not 0 <= heads_q < max(heads, 1) or (heads - heads_q) % 2:
            raise ValueError(
                f"num_heads_q={num_heads_q!r}; qkv is {describe(qkv)}; expected "
                "(b, s, hq + 2 * hk, hdim)"
            )
        q, k = qkv[:, :, :heads_q], qkv[:, :, heads_q : (heads + heads_q) // 2]
    of_k = k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    rotate_all((q, cos, sin), of_k, seqlen_offsets=seqlen_offsets, interleaved=interleaved)
    return qkv


@with_clear_errors
def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotate k of ``kv (b, s, 2, h, hdim)``; otherwise as :func:`apply_rotary_emb_qkv_`."""
    kv = _writable_kv(kv)
    of_k = kv[:, :, 0], cos, sin
    rotate_all(of_k, seqlen_offsets=seqlen_offsets, interleaved=interleaved)
    return kv


def _writable_kv(kv: Tensor) -> Tensor:
    kv = _writable("kv", kv, (5,))
    if kv.shape[2] != 2:
        raise ValueError(f"kv is {describe(kv)}; expected (b, s, 2, h, hdim)")
    return kv


def _writable(name: str, x: Tensor, dimensions: tuple[int, ...]) -> Tensor:
    check_floating(name, x)
    if x.dim() not in dimensions:
        expected = " or ".join(map(str, dimensions))
        raise ValueError(f"{name} is {describe(x)}; expected {expected} dimensions")
    if overlaps_itself(x):
        raise ValueError(f"{name} has strides {x.stride()}; several of its elements are one")
    return x.clone() if x.is_leaf and x.requires_grad and torch.is_grad_enabled() else x


class RotaryEmbedding(torch.nn.Module):
    """The rotary position embedding (arXiv 2104.09864), with ``scale_base`` XPos (2212.10554).

    Args:
        dim: how many elements of a head are rotated.
        base: of the wavelengths: pair i turns by ``base ** (-2 * i / dim)`` at each position.
        interleaved: whether neighbouring elements are a pair (GPT-J), or those of the halves.
        scale_base: how many positions change the size of queries by a factor that is there once;
            keys have its inverse. None is off.
        device: where the buffers are.

    Raises:
        TypeError, ValueError: dim is not even, or below 0; base or scale_base is not above 0.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        dim = as_int("dim", dim)
        if dim < 0 or dim % 2:
            raise ValueError(f"dim={dim!r}; expected an even number from 0 on")
        for name, size in (("base", base), ("scale_base", 1 if scale_base is None else scale_base)):
            if not 0 < as_number(name, size) <= torch.finfo(torch.float32).max:
                raise ValueError(f"{name}={size!r}; expected a number above 0, within float32")
        self.dim, self.base = dim, float(base)
        self.interleaved, self.scale_base = as_flag("interleaved", interleaved), scale_base
        self.register_buffer("inv_freq", self._inverse_wavelengths(device), persistent=False)
        places = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        scale = None if scale_base is None else (places + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._tables: tuple[Tensor, ...] = ()

    def _inverse_wavelengths(self, device: torch.device | str | None) -> Tensor:
        places = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / self.base ** (places / self.dim)

    def _tables_for(self, positions: int, like: Tensor) -> tuple[Tensor, ...]:
        """Cos and sin of q and of k, kept until more positions are asked for."""
        known = self._tables
        kind = like.device, like.dtype
        if known and len(known[0]) >= positions and (known[0].device, known[0].dtype) == kind:
            return known
        with torch.inference_mode(False):  # what is kept may be of use in training, too
            tables = self._new_tables(positions, like)
        if not torch.compiler.is_exporting():
            self._tables = tables
        return tables

    def _new_tables(self, positions: int, like: Tensor) -> tuple[Tensor, ...]:
        # A model that was converted to 16 bits has rounded its buffers, too.
        is_exact = self.inv_freq.dtype == torch.float32 and self.inv_freq.device == like.device
        turns = self.inv_freq if is_exact else self._inverse_wavelengths(like.device)
        position = torch.arange(positions, device=like.device, dtype=torch.float32)
        angles = torch.outer(position, turns)
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None or self.scale_base is None:
            tables = cos, sin, cos, sin
        else:
            power = (position - positions // 2) / self.scale_base
            scale = self.scale.to(like.device) ** power[:, None]
            tables = cos * scale, sin * scale, cos / scale, sin / scale
        return tuple(x.to(like.dtype) for x in tables)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate queries and keys, in place.

        Args:
            qkv: as of :func:`apply_rotary_emb_qkv_`; with kv q alone, ``(b, s, hq, hdim)``.
            kv: ``(b, s, 2, hk, hdim)``.
            seqlen_offset: the position of the first token, an int for all or int32 or int64
                ``(b,)``, with which max_seqlen is needed.
            max_seqlen: how many positions there are.
            num_heads_q: as of :func:`apply_rotary_emb_qkv_`.

        Returns:
            ``qkv``, or ``(q, kv)``.

        Raises:
            TypeError, ValueError: an argument breaks a rule.
        """
        qkv = _writable("qkv", qkv, (4, 5))
        positions = max_seqlen
        if positions is None:
            if isinstance(seqlen_offset, Tensor) and seqlen_offset.dim() > 0:
                raise ValueError(
                    f"max_seqlen=None; seqlen_offset is {describe(seqlen_offset)}, which nobody "
                    "reads to find out how many positions there are"
                )
            positions = qkv.shape[1] + as_int("seqlen_offset", seqlen_offset)
        positions = as_int("max_seqlen", positions)
        if positions < 0:
            raise ValueError(f"seqlen_offset={seqlen_offset!r}, max_seqlen={max_seqlen!r}: below 0")
        cos, sin, cos_k, sin_k = self._tables_for(positions, qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(
                *(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
            )
        kv = _writable_kv(kv)
        of_k = kv[:, :, 0], cos_k, sin_k
        rotate_all(
            *((qkv, cos, sin), of_k), seqlen_offsets=seqlen_offset, interleaved=self.interleaved
        )
        return qkv, kv
