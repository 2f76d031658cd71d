"""Other packages' attention, each with the layout that it likes best, to be timed beside ours.

Each peer is told the same tensors and says by itself why it does not run a shape. The backends of
``scaled_dot_product_attention`` (SDPA) are taken one by one, and as torch chooses among them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..call.interface import fmha_fwd
from .shapes import Shape

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _takes_all(_shape: Shape) -> str | None:
    return None


class Peer(NamedTuple):
    """One implementation.

    Attributes:
        name: what ``--peers`` calls it.
        attend: gives the function of q, k and v for a shape, in its layout.
        by_head: whether it takes and returns ``(batch, heads, seqlen, hdim)``, else
            ``(batch, seqlen, heads, hdim)``; contiguous in either case.
        why_not: why it has no arguments for a shape; None: it has. It may still refuse when called.
        package: that has to be there: the real one, not a stand-in of ours.
        is_for_gpus: alone.
    """

    name: str
    attend: Callable[[Shape], Attend]
    by_head: bool = False
    why_not: Callable[[Shape], str | None] = _takes_all
    package: str = ""
    is_for_gpus: bool = False

    @property
    def is_installed(self) -> bool:
        if self.is_for_gpus and not torch.cuda.is_available():
            return False
        return not self.package or _is_installed(self.package)


def _ours(shape: Shape) -> Attend:
    return lambda q, k, v: fmha_fwd(q, k, v, mask=shape.mask)


OURS = Peer("jitfmha", _ours)


def _sdpa(shape: Shape, backend: SDPBackend | None = None) -> Attend:
    """Shared key heads are shared inside of SDPA."""
    options: dict[str, Any] = {"is_causal": shape.is_causal}
    if shape.heads != shape.kv_heads:
        options["enable_gqa"] = True
    run: Attend = partial(scaled_dot_product_attention, **options)

    def with_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):  # type: ignore[arg-type]
            return run(q, k, v)

    return run if backend is None else with_backend


def _why_not_sdpa(shape: Shape) -> str | None:
    """SDPA's causal mask starts in the top left corner."""
    if shape.is_causal and shape.seqlen != shape.seqlen_k:
        return "is_causal of SDPA means another mask where seqlen and seqlen_k differ"
    return None


def _flex(shape: Shape) -> Attend:
    """Flex attention is compiled, with a block mask that is made once."""
    # It imports torch's compiler.
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    offset = shape.seqlen_k - shape.seqlen
    compiled = torch.compile(flex_attention)
    masks: dict[torch.device, Any] = {}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = masks.get(q.device)
        if mask is None and shape.is_causal:
            mask = masks[q.device] = create_block_mask(
                lambda b, h, i, j: j <= i + offset,
                *(None, None, shape.seqlen, shape.seqlen_k),
                device=str(q.device),
            )
        out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=shape.heads != shape.kv_heads)
        return out

    return run


def _flash(shape: Shape, package: str) -> Attend:
    """flash-attn and AITER have the bottom-right causal mask."""
    attend = import_module(package).flash_attn_func
    return partial(attend, causal=shape.is_causal)


def _xformers(shape: Shape) -> Attend:
    from xformers import ops  # type: ignore[import-not-found, unused-ignore]

    bias = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if shape.is_causal else None
    return partial(ops.memory_efficient_attention, attn_bias=bias)


def _why_not_xformers(shape: Shape) -> str | None:
    """Shared key heads take five dimensions there, which backends of xformers seldom serve."""
    return None if shape.heads == shape.kv_heads else "shared key heads are not tried"


def _is_installed(package: str) -> bool:
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # ValueError: a module without a specification
        return False
    return spec is not None and not str(spec.origin or "").startswith(_OUR_FOLDER)


_OUR_FOLDER = str(__file__).rpartition("bench")[0]
_BACKENDS = {  # and which of them are for GPUs alone
    "math": (SDPBackend.MATH, False),
    "flash": (SDPBackend.FLASH_ATTENTION, False),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, True),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, True),
}
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("sdpa", _sdpa, True, _why_not_sdpa),
        *(
            Peer(f"sdpa-{x}", partial(_sdpa, backend=backend), True, _why_not_sdpa, "", on_gpus)
            for x, (backend, on_gpus) in _BACKENDS.items()
        ),
        Peer("flex", _flex, True),
        Peer("flash-attn", partial(_flash, package="flash_attn"), package="flash_attn"),
        Peer("aiter", partial(_flash, package="aiter"), package="aiter"),
        Peer("xformers", _xformers, False, _why_not_xformers, "xformers"),
    )
}
