"""AITER's functions that write keys and values into a cache, which vLLM has under the same names.

Source: ``aiter/ops/cache.py`` of github.com/ROCm/aiter. They end in
:func:`jitfmha.qk_norm_rope_cache`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem.checks import describe, not_a_tensor, with_clear_errors
from ..problem.packed_pages import are_packed
from ..rows.heads.interface import qk_norm_rope_cache
from .dtypes import fp8_of

_FP8 = ("fp8", "fp8_e4m3")


@with_clear_errors
def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write the keys and values of tokens into pages, in place.

    Args:
        key, value: ``(tokens, heads, hdim)``, of which those that have a slot count.
        key_cache, value_cache: ``(pages, page_size, heads, hdim)``, or packed pages as
            :func:`jitfmha.fmha_fwd` takes them; of key's dtype, or of 8 bits. Bytes (``uint8``) are
            fp8 in the chip's form where kv_cache_dtype says fp8.
        slot_mapping: int64, ``page * page_size + row`` of each token; negative ones are left out.
        kv_cache_dtype: ``"auto"``, ``"fp8"`` or ``"fp8_e4m3"``.
        k_scale, v_scale: float32 of one number or one for each head, what caches of 8 bits are
            multiplied with when they are read; others ignore it.

    Raises as :func:`jitfmha.qk_norm_rope_cache` does, and ``NotImplementedError`` for other names.
    """
    caches = [key_cache, value_cache]
    if kv_cache_dtype in _FP8:
        caches = [x.view(fp8_of(x.device)) if x.dtype == torch.uint8 else x for x in caches]
        if key_cache.element_size() > 1:
            raise ValueError(
                f"kv_cache_dtype is {kv_cache_dtype!r}; key_cache is {describe(key_cache)}"
            )
    elif kv_cache_dtype != "auto":
        raise NotImplementedError(
            f"kv_cache_dtype is {kv_cache_dtype!r}; choose 'auto' or one of {', '.join(_FP8)}"
        )
    if not isinstance(slot_mapping, Tensor):
        raise not_a_tensor("slot_mapping", slot_mapping)
    tokens = slot_mapping.shape[0]
    has_scales = key_cache.element_size() == 1
    qk_norm_rope_cache(
        k=key[:tokens],
        v=value[:tokens],
        k_cache=caches[0],
        v_cache=caches[1],
        slots=slot_mapping,
        k_scale=k_scale.flatten() if has_scales and k_scale is not None else None,
        v_scale=v_scale.flatten() if has_scales and v_scale is not None else None,
    )


@with_clear_errors
def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    asm_layout: bool = False,
) -> None:
    """The same for packed pages, with ``asm_layout``.

    Raises as :func:`reshape_and_cache_flash`, and ``NotImplementedError`` for values in pages of
    ``(pages, heads, hdim, page_size)``, which is what they are without ``asm_layout``.
    """
    if not asm_layout or not are_packed(value_cache):
        raise NotImplementedError(
            f"asm_layout is {asm_layout} and value_cache {describe(value_cache)}; packed pages "
            "(pages, heads, page_size / x, hdim, x) with asm_layout=True are served"
        )
    reshape_and_cache_flash(
        *(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
    )
