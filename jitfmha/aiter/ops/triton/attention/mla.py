"""The place of AITER's functions for latent attention with a block table."""

from __future__ import annotations

from ....mla import decode_of_triton as mla_decode_fwd
from ....mla import prefill_of_triton as mla_prefill_fwd

__all__ = ["mla_decode_fwd", "mla_prefill_fwd"]
