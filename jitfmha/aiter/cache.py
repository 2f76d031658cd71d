"""AITER's functions that write keys and values into a cache, which vLLM has under the same names.

Source: ``aiter/ops/cache.py`` of github.com/ROCm/aiter. They end in
:func:`jitfmha.qk_norm_rope_cache`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layers.peer_values import as_flag, ends_in
from ..problem.checks import describe, not_a_tensor
from ..problem.packed_pages import are_packed
from ..rows.heads.interface import qk_norm_rope_cache
from .dtypes import fp8_of

_FP8 = ("fp8", "fp8_e4m3")
_NAMES = {"k": "key", "v": "value", "slots": "slot_mapping"}
_NAMES |= {"k_cache": "key_cache", "v_cache": "value_cache"}


def _write(
    kv_cache_dtype: str, k_scale: Tensor | None, v_scale: Tensor | None, **given: Tensor
) -> None:
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise not_a_tensor(name, x)
    key, value, slots = given["key"], given["value"], given["slot_mapping"]
    caches = {name: given[name] for name in ("key_cache", "value_cache")}
    if kv_cache_dtype in _FP8:
        for name, x in caches.items():
            caches[name] = x = x.view(fp8_of(x.device)) if x.dtype == torch.uint8 else x
            if x.element_size() > 1 or not x.is_floating_point():
                raise ValueError(f"kv_cache_dtype is {kv_cache_dtype!r}; {name} is {describe(x)}")
    elif kv_cache_dtype != "auto":
        raise NotImplementedError(
            f"kv_cache_dtype is {kv_cache_dtype!r}; choose 'auto' or one of {', '.join(_FP8)}"
        )
    tokens = len(slots) if slots.dim() else 0
    qk_norm_rope_cache(
        k=key[:tokens] if key.dim() else key,
        v=value[:tokens] if value.dim() else value,
        k_cache=caches["key_cache"],
        v_cache=caches["value_cache"],
        slots=slots,
        k_scale=_scale_of(caches["key_cache"], k_scale),
        v_scale=_scale_of(caches["value_cache"], v_scale),
    )


def _scale_of(cache: Tensor, scale: Tensor | None) -> Tensor | None:
    if cache.element_size() > 1:
        return None
    return scale.flatten() if isinstance(scale, Tensor) else scale


def _write_packed(value_cache: Tensor, asm_layout: object, **others: Any) -> None:
    if not isinstance(value_cache, Tensor):
        raise not_a_tensor("value_cache", value_cache)
    if not as_flag("asm_layout", asm_layout) or not are_packed(value_cache):
        raise NotImplementedError(
            f"asm_layout is {asm_layout} and value_cache {describe(value_cache)}; packed pages "
            "(pages, heads, page_size / x, hdim, x) with asm_layout=True are served"
        )
    _write(value_cache=value_cache, **others)


@ends_in(_write, **_NAMES)
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


@ends_in(_write_packed, **_NAMES)
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
