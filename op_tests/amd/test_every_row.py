"""Every row of our manifests is what some call takes, by the rules and estimates of calls."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from compiled_calls import ARCHS
from torch import Tensor
from untyped import explain, explain_bwd

from jitfmha.amd.chips import architecture, chip
from jitfmha.amd.manifest import KernelRow, ReadyBackwardRow
from jitfmha.amd.node import VIRTUAL_NODE
from jitfmha.amd.tree import Tree, trees_of
from jitfmha.problem.problem import BF16_CVTS

# Batch, heads of queries and of keys, and the length of sequences, in the order in which they are
# tried: what is long, what is short, and what leaves some units of a chip without work.
_SIZES = [
    *product((4, 1, 16), ((64, 8), (8, 8), (40, 40)), (8192, 4096, 2048, 1024, 512, 256, 128)),
    (1, (30, 30), 2000),
]


def _shipped(arch: str) -> Tree:
    return trees_of(chip(architecture(arch).unlisted_chip))[-1]


def _calls(
    row: Any, arch: str, dtype: torch.dtype
) -> Iterator[tuple[list[Tensor], dict[str, Any]]]:
    """q, k and v without memory, and options, for calls of a row's kind on chips of an arch."""
    chips = [name for key, name in VIRTUAL_NODE.items() if key.startswith(arch)]
    for device, (batch, (heads_q, heads_k), seqlen) in product(chips, _SIZES):
        # With a mask that begins in the top left corner, where lengths differ.
        seqlen_k = seqlen + 128 * (getattr(row, "mask", 0) == 1)
        rows = [(batch, seqlen), (batch, seqlen_k)]
        options: dict[str, Any] = {"device": device, "bf16_cvt": BF16_CVTS[row.bf16_cvt]}
        if row.mode:
            sums = torch.empty(batch + 1, dtype=torch.int32, device="meta")
            options |= {"cu_seqlens_q": sums, "cu_seqlens_k": sums}
            options |= {"max_seqlen_q": seqlen, "max_seqlen_k": seqlen_k}
            rows = [(batch * seqlen,), (batch * seqlen_k,)]
        shapes = [
            (*rows[0], heads_q, row.hdim_q),
            (*rows[1], heads_k, row.hdim_q),
            (*rows[1], heads_k, row.hdim_v),
        ]
        yield [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes], options


def _kinds(rows: tuple[Any, ...], *fields: str) -> dict[tuple[Any, ...], list[Any]]:
    kinds: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        kinds.setdefault(tuple(getattr(row, field) for field in fields), []).append(row)
    return kinds


@pytest.mark.parametrize("arch", ARCHS)
def test_forward(arch):
    fields = ("dtype", "hdim_q", "hdim_v", "mask", "mode", "bf16_cvt")
    fp8 = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8bf16": fp8}
    for rows in _kinds(_shipped(arch).forward.rows, *fields).values():
        row: KernelRow = rows[0]
        left = {each.name for each in rows}
        for tensors, options in _calls(row, arch, dtypes[row.dtype]):
            if row.dtype == "fp8bf16":
                scale = torch.empty(1, device="meta")
                options |= dict.fromkeys(("q_descale", "k_descale", "v_descale"), scale)
            left.discard(explain(*tensors, mask=row.mask, **options).plan.kernel)
            if not left:
                break
        assert not left


@pytest.mark.parametrize("arch", ARCHS)
def test_backward(arch):
    fields = ("dtype", "hdim_q", "hdim_v", "is_masked", "mode", "bf16_cvt", "is_deterministic")
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    for rows in _kinds(_shipped(arch).ready_backward.rows, *fields).values():
        row: ReadyBackwardRow = rows[0]
        left = {each.symbol for each in rows}
        for (q, k, v), options in _calls(row, arch, dtypes[row.dtype]):
            out = torch.empty(*q.shape[:-1], row.hdim_v, dtype=q.dtype, device="meta")
            lse = out[..., 0].transpose(-1, -2).contiguous().float()
            options |= {"mask": 2 * row.is_masked, "deterministic": row.is_deterministic}
            left.discard(explain_bwd(out, q, k, v, out, lse, **options).plan.kernel)
            if not left:
                break
        assert not left
