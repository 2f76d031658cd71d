"""The amd-model suite's rows of latent decode (MLA): whole calls beside AITER's first stage alone.

No call of `fmha_fwd` takes AITER's kernel, so its code object, of the tree that ``JITFMHA_HSA_DIR``
names, is launched as its `asm_mla.cu` does that. Both read pages of one key, as that kernel must;
ours also reads keys that lie side by side.
"""

import os
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jitfmha.amd.tree import HSA_DIR
from jitfmha.bench.report import Progress, Report
from jitfmha.call.interface import fmha_fwd
from jitfmha.emulator import DEVICES, Emulator, emulate
from jitfmha.emulator.profile import LaunchProfile, profile_launch

from .modelled_call import aligned, estimate_of, take_only

_BATCH, _KEYS, _HDIM, _HDIM_V, _SCALE = 32, 4096, 576, 512, 192**-0.5
_HEADS = 16, 128
# Splits of the keys, by AITER's `get_meta_param`.
_SPLITS = {"gfx942": 9, "gfx950": 8}
_THREADS = 256
# All workgroups have the same to do.
_SAMPLE = 1


def add_rows(report: Report, quick: bool, progress: Progress) -> None:
    """Model the launches; ``quick`` takes one kind."""
    tree = os.environ.get(HSA_DIR)
    if not tree:
        return  # which the rows of ready kernels say
    for arch, splits in _SPLITS.items():
        for heads in _HEADS:
            call = f"{arch} latent decode, {_BATCH} x {_KEYS} keys, {heads} heads"
            try:
                of_aiter = _aiter_seconds(arch, heads, splits, Path(tree))
            except FileNotFoundError as error:
                progress(f"{call}: left out, because {error}")
                continue
            for page_size, where in ((1, "pages of 1"), (None, "dense")):
                ours = [estimate_of(launch).seconds for launch in _launches(arch, heads, page_size)]
                times = " + ".join(f"{1e6 * seconds:.2f}" for seconds in ours)
                progress(f"{call}, {where}: {times} us, AITER's first stage {1e6 * of_aiter:.2f}")
                what = f"kernel and combine over AITER's first stage, {call}, {where}"
                report.at_most(what, sum(ours) / of_aiter, 1.0, "x")
            if quick:
                return


def _launches(arch: str, heads: int, page_size: int | None) -> tuple[LaunchProfile, ...]:
    batch = (_BATCH,) if page_size else (_BATCH, 1)
    pages = _BATCH * _KEYS // (page_size or _KEYS)
    q, out = (aligned(torch.bfloat16, *batch, heads, d) for d in (_HDIM, _HDIM_V))
    k = aligned(torch.bfloat16, pages, page_size or _KEYS, 1, _HDIM)
    # One tile's keys serve all: what they are changes no cost.
    for x in (q, k):
        generator = torch.Generator().manual_seed(20260101)
        x.copy_(torch.randn(1, *x.shape[1:], generator=generator))
    options: dict[str, Any] = {}
    if page_size:
        options = {
            "cu_seqlens_q": torch.arange(_BATCH + 1, dtype=torch.int32),
            "cu_seqlens_k": torch.arange(_BATCH + 1, dtype=torch.int32) * _KEYS,
            "max_seqlen_q": 1,
            "max_seqlen_k": _KEYS,
            "block_table": torch.arange(pages, dtype=torch.int32).view(_BATCH, -1),
        }
    with emulate(arch, profile=True, sample=_SAMPLE) as run:
        take_only("own")
        fmha_fwd(q, k, k[..., :_HDIM_V], out=out, softmax_scale=_SCALE, **options)
        return run.profiles()


@cache
def _emulator() -> Emulator:
    return Emulator("profile")


def _aiter_seconds(arch: str, heads: int, splits: int, tree: Path) -> float:
    name = f"mla_dec_stage1_bf16_a16w16_subQ{heads}_mqa{heads}"
    code_object = (tree / arch / "mla" / f"{name}.co").read_bytes()
    # Zeros, which no memory is touched for.
    q = np.zeros((_BATCH, heads, _HDIM), np.uint16)
    keys = np.zeros((_BATCH * _KEYS, _HDIM), np.uint16)
    results = np.zeros((_BATCH, splits, heads, _HDIM_V), np.float32)
    lse = np.zeros((_BATCH, splits, heads), np.float32)
    sums_q, sums_k, sums_of_splits = (
        np.arange(_BATCH + 1, dtype=np.int32) * step for step in (1, _KEYS, splits)
    )
    table, last_page_lengths = np.arange(_BATCH * _KEYS, dtype=np.int32), np.ones(_BATCH, np.int32)
    inputs = q, keys, sums_k, table, last_page_lengths
    tensors: tuple[NDArray[Any], ...] = results, lse, *inputs, sums_q, sums_of_splits
    fields = [_pointer(x) for x in (results, lse, *inputs)]
    row_bytes = _HDIM * q.itemsize
    numbers = heads, splits, heads * row_bytes, row_bytes, 0  # the last is log2(page size)
    fields += [struct.pack("<f", _SCALE), *(struct.pack("<I", number) for number in numbers)]
    fields += [_pointer(sums_q), _pointer(sums_of_splits)]
    # Of what other kernels of the family read there is none, but one rank that has all keys.
    fields += [bytes(8)] * 6 + [struct.pack("<I", 1), bytes(4)]
    kernarg = b"".join(field.ljust(16, b"\0") for field in fields)
    with _emulator().loaded(code_object, DEVICES[arch], f"_ZN5aiter{len(name)}{name}E") as function:
        launch = profile_launch(
            *(_emulator(), function, (1, _BATCH, splits), (_THREADS, 1, 1), kernarg),
            memory=[(x.ctypes.data, x.nbytes) for x in tensors],
            sample=_SAMPLE,
            run_sample_only=True,
        )
    return estimate_of(launch).seconds


def _pointer(x: NDArray[Any]) -> bytes:
    return struct.pack("<Q", x.ctypes.data)
