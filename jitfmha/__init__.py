"""Fused multi-head attention for AMD Instinct GPUs, compiled on first use.

``import jitfmha`` registers the operators ``torch.ops.jitfmha.*``; the public functions are
imported when they are first asked for. The command line imports no torch to read its flags.
"""

from __future__ import annotations

import sys
from importlib import import_module
from os.path import basename
from typing import TYPE_CHECKING

from .version import __version__ as __version__

if sys.platform == "win32":
    raise ImportError("jitfmha needs Linux, and this is Windows; WSL is a Linux there")


def _is_command_line() -> bool:
    """Whether this process is ``python -m jitfmha`` or the script ``jitfmha``."""
    program = basename((getattr(sys, "argv", None) or [""])[0])
    # Python has "-m" there for as long as it looks for the module.
    return program == "jitfmha" or (program == "-m" and "jitfmha" in sys.orig_argv)


if TYPE_CHECKING or not _is_command_line():
    # Programs that were exported to files call the operators by name, and need nothing else of
    # this package. ``--help`` needs none, and would wait for torch.
    from .call.interface import explain as explain
    from .call.interface import explain_bwd as explain_bwd
    from .call.interface import fmha_bwd as fmha_bwd
    from .call.interface import fmha_fwd as fmha_fwd

if TYPE_CHECKING:
    from .ahead.validate import BrokenRule as BrokenRule
    from .ahead.validate import Validation as Validation
    from .ahead.validate import validate_config as validate_config
    from .ahead.validate import validate_specification as validate_specification
    from .ahead.warm_up import WarmedLauncher as WarmedLauncher
    from .ahead.warm_up import warmup as warmup
    from .aiter import fmha_v3_bwd as fmha_v3_bwd
    from .aiter import fmha_v3_fwd as fmha_v3_fwd
    from .aiter import fmha_v3_varlen_bwd as fmha_v3_varlen_bwd
    from .aiter import fmha_v3_varlen_fwd as fmha_v3_varlen_fwd
    from .amd.runtime import HipError as HipError
    from .emulator import emulate as emulate
    from .flash_attn import flash_attn_func as flash_attn_func
    from .flash_attn import flash_attn_kvpacked_func as flash_attn_kvpacked_func
    from .flash_attn import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
    from .flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
    from .flash_attn import flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func
    from .flash_attn import flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func
    from .gemm.explain import explain_matmul as explain_matmul
    from .gemm.interface import matmul as matmul
    from .integrations.stand_in import install_as as install_as
    from .jit.errors import BuildError as BuildError
    from .jit.errors import CacheError as CacheError
    from .jit.errors import CompilerNotFound as CompilerNotFound
    from .layers.attention import Attention as Attention
    from .layers.attention import AttentionCache as AttentionCache
    from .layers.kv_cache import flash_attn_with_kvcache as flash_attn_with_kvcache
    from .layers.latent_attention import LatentAttention as LatentAttention
    from .layers.mla import mla_absorbed_fwd as mla_absorbed_fwd
    from .layers.mla import mla_fwd as mla_fwd
    from .layers.page_layout import PageLayout as PageLayout
    from .layers.split_keys import flash_attn_combine as flash_attn_combine
    from .layers.split_keys import mha_fwd_splitkv as mha_fwd_splitkv
    from .problem.dropout import dropout_randval as dropout_randval
    from .problem.dropout import new_rng_state as new_rng_state
    from .rows.explain import explain_rows as explain_rows
    from .rows.heads.interface import qk_norm_rope_cache as qk_norm_rope_cache
    from .rows.interface import layer_norm as layer_norm
    from .rows.interface import rms_norm as rms_norm
    from .rows.interface import softmax as softmax

_NAMES = {
    ".aiter": ("fmha_v3_bwd", "fmha_v3_fwd", "fmha_v3_varlen_bwd", "fmha_v3_varlen_fwd"),
    ".amd.runtime": ("HipError",),
    ".layers.attention": ("Attention", "AttentionCache"),
    ".layers.latent_attention": ("LatentAttention",),
    ".problem.dropout": ("dropout_randval", "new_rng_state"),
    ".emulator": ("emulate",),
    ".flash_attn": (
        "flash_attn_func",
        "flash_attn_kvpacked_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func",
        "flash_attn_varlen_kvpacked_func",
        "flash_attn_varlen_qkvpacked_func",
    ),
    ".call.interface": ("explain", "explain_bwd", "fmha_bwd", "fmha_fwd"),
    ".jit.errors": ("BuildError", "CacheError", "CompilerNotFound"),
    ".layers.kv_cache": ("flash_attn_with_kvcache",),
    ".layers.mla": ("mla_absorbed_fwd", "mla_fwd"),
    ".layers.page_layout": ("PageLayout",),
    ".rows.heads.interface": ("qk_norm_rope_cache",),
    ".gemm.explain": ("explain_matmul",),
    ".gemm.interface": ("matmul",),
    ".rows.explain": ("explain_rows",),
    ".rows.interface": ("layer_norm", "rms_norm", "softmax"),
    ".layers.split_keys": ("flash_attn_combine", "mha_fwd_splitkv"),
    ".integrations.stand_in": ("install_as",),
    ".ahead.validate": (
        *("BrokenRule", "Validation", "validate_config", "validate_specification"),
    ),
    ".ahead.warm_up": ("WarmedLauncher", "warmup"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", *_HOMES]
_PUBLIC_MODULES = ("aiter", "context_parallel", "flash_attn", "integrations")


def __getattr__(name: str) -> object:
    # No program needs all of it, and what it needs it imports with its first use.
    if name in _PUBLIC_MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # What is public, also where nobody has asked for it yet.
    return sorted([*__all__, *_PUBLIC_MODULES])
