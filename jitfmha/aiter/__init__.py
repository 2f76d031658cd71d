"""AITER's attention functions: the same arguments in the same order, and the same results.

Source: ``aiter/ops/mha.py``, ``csrc/py_itfs_ck/mha_fwd_kernels.cu``, ``mha_bwd_kernels.cu`` and
``csrc/py_itfs_cu/asm_mha_fwd.cu``, ``asm_mha_bwd.cu`` of github.com/ROCm/aiter, with their
variable-length siblings.
:func:`flash_attn_func` and :func:`flash_attn_varlen_func`, and both with ``_fp8_pertensor_``, are
what models call, and copy tensors whose last dimension is not contiguous; the others are what these
end in there.

What is different here: any head dimensions up to 576, float32 and empty batches on the CPU, an lse
of -inf (not +inf) where there are no keys, and a ``sink_size`` from ``sk`` up shows all keys.

What the functions have in common:

* q is ``(b, sq, hq, hdim)``, k ``(b, sk, hk, hdim)`` and v ``(b, sk, hk, hdim_v)``; in the
  variable-length functions ``(total_q, hq, hdim)``, ``(total_k, hk, hdim)`` and
  ``(total_k, hk, hdim_v)``. Dtypes and strides are those of :func:`jitfmha.fmha_fwd`.
* ``softmax_scale`` is finite and > 0, or None for ``1 / sqrt(hdim)``.
* The causal mask is aligned to the bottom-right corner, and so are windows: ``window_size_left``
  and ``window_size_right`` count keys around the diagonal. A negative side, and one that is as long
  as the longest keys, is open; with the causal mask the right side is 0 whatever is given.
* ``how_v3_bf16_cvt`` is how probabilities are rounded to bfloat16: 0 to nearest even, 1 to nearest
  away from zero, 2 toward zero. It chooses on gfx942 with bf16 inputs; elsewhere there is only one
  way, and it has no effect. ``num_splits`` has none either: keys are split as the chip asks for.
* ``deterministic`` refuses backward kernels that add dq up with atomics, as
  ``torch.use_deterministic_algorithms`` does for all calls. Functions that models call keep it for
  ``torch.autograd``; of these :func:`flash_attn_func` has it by default, as in AITER.
* ``q_descale``, ``k_descale`` and ``v_descale`` are what fp8 inputs are multiplied with, as for
  :func:`jitfmha.fmha_fwd`; None is 1.
* Numbers and flags may also be 0-dim tensors and NumPy numbers, flags 0, 1 and None.
* ``bias`` is ``(sq, sk)``, in the variable-length functions ``(total_q, max_seqlen_k)``, or in the
  shapes of :func:`jitfmha.fmha_fwd`. ``alibi_slopes`` is float32 ``(hq,)`` or ``(b, hq)``.
* ``sink_ptr (hq,)`` is :func:`jitfmha.fmha_fwd`'s ``sink``, and ``sink_size`` is the same there.
* ``dropout_p`` drops probabilities by the random bytes that ``gen``, or torch's own generator,
  seeds: those up to ``255 * (1 - dropout_p)`` are kept.
* What no kernel serves raises ``NotImplementedError``. Every other violation of a rule is a
  ``TypeError`` or a ``ValueError`` that names the argument and its value.

What the functions of the backward pass have in common, beside their options, which are those of the
forward pass with the same values:

* ``dout`` is the gradient of ``out``, and has its shape; ``softmax_lse`` is what the forward pass
  returned.
* ``dq``, ``dk`` and ``dv`` are where to write; new tensors by default.
* ``rng_state`` is what the forward pass returned, needed with dropout; ``gen`` is None.
* ``sink`` is float32 ``(hq,)`` or ``(b, hq)``; its gradient is added to ``d_sink (hq,)``, which is
  given if and only if ``sink`` is. The lse of the forward pass holds the sink already.
* ``is_v3_atomic_fp32`` and ``how_v3_bf16_cvt`` choose among kernels that add dq up with atomics;
  others ignore them.
* The results are ``(dq, dk, dv, softmax_d)``, the last float32, the sum of ``dout * out`` for each
  query and head: ``(b, hq, sq)``, of packed sequences ``(hq, total_q)``.
* ``dbias`` is where to write the gradient of ``bias``, in its shape.
"""

from __future__ import annotations

from . import dtypes as dtypes
from . import mla as mla
from .backward import fmha_v3_bwd, fmha_v3_varlen_bwd, mha_bwd, mha_varlen_bwd
from .batch_prefill import mha_batch_prefill, mha_batch_prefill_func
from .cache import reshape_and_cache, reshape_and_cache_flash
from .decode import OPERATORS as _OF_DECODE
from .decode import (
    get_pa_metadata_info_v1,
    get_pa_metadata_v1,
    pa_decode_gluon,
    pa_persistent_fwd,
    paged_attention_common,
    paged_attention_rocm,
)
from .forward import (
    flash_attn_func,
    flash_attn_varlen_func,
    fmha_v3_fwd,
    fmha_v3_varlen_fwd,
    mha_fwd,
    mha_varlen_fwd,
)
from .fp8 import flash_attn_fp8_pertensor_func, flash_attn_varlen_fp8_pertensor_func
from .gemm import gemm_a8w8, gemm_a16w16
from .mla_metadata import (
    get_mla_metadata_info_v1,
    get_mla_metadata_v1,
    get_ps_metadata_info_v1,
    get_ps_metadata_v1,
    mla_prefill_ps_asm_fwd,
    mla_reduce_v1,
)
from .norms import layernorm2d_fwd, rms_norm, rmsnorm2d_fwd, rmsnorm2d_fwd_with_add
from .opus import fmha_fwd_bf16_opus_fwd, fmha_fwd_bf16_opus_varlen_fwd
from .paged import OPERATORS as _OF_PAGES
from .paged import pa_fwd_asm, paged_attention_ragged, paged_attention_v1
from .sparse import pa_sparse_prefill_opus

OPERATORS = {**_OF_PAGES, **_OF_DECODE}
"""What ``torch.ops.aiter`` has, with the schemas."""

OFFERED = ("dtypes", "mla")
"""What the package has beside its functions."""

__all__ = [
    "flash_attn_fp8_pertensor_func",
    "flash_attn_func",
    "flash_attn_varlen_fp8_pertensor_func",
    "flash_attn_varlen_func",
    "fmha_fwd_bf16_opus_fwd",
    "fmha_fwd_bf16_opus_varlen_fwd",
    "fmha_v3_bwd",
    "fmha_v3_fwd",
    "fmha_v3_varlen_bwd",
    "fmha_v3_varlen_fwd",
    "gemm_a8w8",
    "gemm_a16w16",
    "get_mla_metadata_info_v1",
    "get_mla_metadata_v1",
    "get_pa_metadata_info_v1",
    "get_pa_metadata_v1",
    "get_ps_metadata_info_v1",
    "get_ps_metadata_v1",
    "layernorm2d_fwd",
    "mha_batch_prefill",
    "mha_batch_prefill_func",
    "mha_bwd",
    "mha_fwd",
    "mha_varlen_bwd",
    "mha_varlen_fwd",
    "mla_prefill_ps_asm_fwd",
    "mla_reduce_v1",
    "pa_decode_gluon",
    "pa_fwd_asm",
    "pa_persistent_fwd",
    "pa_sparse_prefill_opus",
    "paged_attention_common",
    "paged_attention_ragged",
    "paged_attention_rocm",
    "paged_attention_v1",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "rms_norm",
    "rmsnorm2d_fwd",
    "rmsnorm2d_fwd_with_add",
]
