"""Other packages' attention, each with the layout that it likes best, to be timed beside ours.

Each peer is told the same tensors and says by itself why it does not run a shape. The backends of
``scaled_dot_product_attention`` (SDPA) are taken one by one, and as torch chooses among them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..call.interface import fmha_fwd

if TYPE_CHECKING:
    from .shapes import Shape

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Peer(ABC):
    """One implementation.

    Attributes:
        name: what ``--peers`` calls it.
        by_head: whether it takes and returns ``(batch, heads, seqlen, hdim)``, else
            ``(batch, seqlen, heads, hdim)``; contiguous in either case.
    """

    name: str
    by_head = False

    @property
    def is_installed(self) -> bool:
        """Whether there is anything to call."""
        return True

    def why_not(self, shape: Shape) -> str | None:
        """Why it has no arguments for the shape; None: it has. It may still refuse when called."""
        return None

    @abstractmethod
    def attend(self, shape: Shape) -> Attend:
        """The function of q, k and v, in its layout."""


class Ours(Peer):
    """This package, by its public function."""

    name = "jitfmha"

    def attend(self, shape: Shape) -> Attend:
        return lambda q, k, v: fmha_fwd(q, k, v, mask=shape.mask)


class Sdpa(Peer):
    """Torch's own, with one backend or (None) with that which torch chooses."""

    by_head = True

    def __init__(self, backend: SDPBackend | None) -> None:
        self.backend = backend
        suffix = "" if backend is None else f"-{_BACKENDS[backend]}"
        self.name = f"sdpa{suffix}"

    @property
    def is_installed(self) -> bool:
        """Two of the backends are for GPUs alone."""
        return self.backend not in _ON_GPUS or torch.cuda.is_available()

    def why_not(self, shape: Shape) -> str | None:
        """SDPA's causal mask starts in the top left corner."""
        if shape.is_causal and shape.seqlen != shape.seqlen_k:
            return "is_causal of SDPA means another mask where seqlen and seqlen_k differ"
        return None

    def attend(self, shape: Shape) -> Attend:
        """Shared key heads are shared inside of SDPA."""
        options: dict[str, Any] = {"is_causal": shape.is_causal}
        if shape.heads != shape.kv_heads:
            options["enable_gqa"] = True

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v, **options)

        def with_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(self.backend):  # type: ignore[arg-type]
                return run(q, k, v)

        return run if self.backend is None else with_backend


_BACKENDS = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
}
_ON_GPUS = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)


class Flex(Peer):
    """``torch.nn.attention.flex_attention``, compiled."""

    name = "flex"
    by_head = True

    def attend(self, shape: Shape) -> Attend:
        """A block mask is made once, for all calls."""
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
            out: Tensor = compiled(
                q, k, v, block_mask=mask, enable_gqa=shape.heads != shape.kv_heads
            )
            return out

        return run


class FlashAttn(Peer):
    """The package ``flash_attn``, whose causal mask is the bottom-right one."""

    name = "flash-attn"

    @property
    def is_installed(self) -> bool:
        """The real one; a stand-in of ours is not."""
        return _is_installed("flash_attn")

    def attend(self, shape: Shape) -> Attend:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

        return lambda q, k, v: flash_attn_func(q, k, v, causal=shape.is_causal)


class Aiter(Peer):
    """The package ``aiter``, whose causal mask is the bottom-right one."""

    name = "aiter"

    @property
    def is_installed(self) -> bool:
        """The real one; a stand-in of ours is not."""
        return _is_installed("aiter")

    def attend(self, shape: Shape) -> Attend:
        from aiter import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

        return lambda q, k, v: flash_attn_func(q, k, v, causal=shape.is_causal)


class Xformers(Peer):
    """The package ``xformers``, with its bottom-right causal mask."""

    name = "xformers"

    @property
    def is_installed(self) -> bool:
        return _is_installed("xformers")

    def why_not(self, shape: Shape) -> str | None:
        """Shared key heads take five dimensions there, which its backends seldom serve."""
        if shape.heads != shape.kv_heads:
            return "shared key heads are not tried"
        return None

    def attend(self, shape: Shape) -> Attend:
        from xformers import ops  # type: ignore[import-not-found, unused-ignore]

        bias = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if shape.is_causal else None
        return lambda q, k, v: ops.memory_efficient_attention(q, k, v, attn_bias=bias)


def _is_installed(package: str) -> bool:
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # ValueError: a module without a specification
        return False
    return spec is not None and not str(spec.origin or "").startswith(_OUR_FOLDER)


_OUR_FOLDER = str(__file__).rpartition("bench")[0]
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        *(Sdpa(None), *map(Sdpa, _BACKENDS)),
        *(Flex(), FlashAttn(), Aiter(), Xformers()),
    )
}
