"""What a small call costs when one like it was there before: under the patch of SDPA, torch's, and
under the names of flash-attn and AITER, with keys in pages, too.

Run in op_tests/:  python -m rigs.known_calls [ROUNDS]

The tensors are so small that little but the way to the kernel is measured, on one thread. Both
sides take turns, and of each the quickest round counts: what disturbs the machine only adds. How
many of Python's instructions a call runs depends on no machine.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from untyped import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    fmha_fwd,
)

import jitfmha
from jitfmha.aiter.ops.triton.unified_attention import unified_attention
from jitfmha.integrations import sdpa
from jitfmha.problem.packed_pages import as_packed

_CALLS = 100  # of a round
_TORCH = F.scaled_dot_product_attention


def main() -> None:
    """Print microseconds of each kind of call, patched and without the patch, and their ratio."""
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    projected = torch.randn(1, 4, 3, 2, 64)
    q, k, v = (x.transpose(1, 2) for x in projected.unbind(2))
    leaf, mask = q.clone().requires_grad_(), torch.randn(4, 4)
    kinds: dict[str, Callable[[Any], Tensor]] = {
        "plain": lambda attend: attend(q, k, v),
        "causal": lambda attend: attend(q, k, v, is_causal=True),
        "mask": lambda attend: attend(q, k, v, mask),
        "three dimensions": lambda attend: attend(q[0], k[0], v[0]),
        "with gradients": lambda attend: attend(leaf, k, v),
    }
    with sdpa.patch():
        sides = _TORCH, F.scaled_dot_product_attention
    for name, call in kinds.items():
        torchs, ours = _best(rounds, *(partial(call, attend) for attend in sides))
        print(f"{name}: {ours:.1f} us, torch {torchs:.1f} us, {torchs / ours:.2f}x", flush=True)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    for name, own in (_flash_attn(q, k, v) | _in_pages(q)).items():
        with torch.no_grad():  # as servers call them
            took, count = _best(rounds, own)[0], _instructions(own)
        print(f"{name}: {took:.1f} us, {count} instructions", flush=True)


def _best(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """The microseconds that each takes in its quickest round; they take turns."""
    best = [math.inf] * len(calls)
    for _ in range(rounds):
        for side, call in enumerate(calls):
            call()
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            best[side] = min(best[side], (time.perf_counter() - start) / _CALLS * 1e6)
    return best


def _instructions(call: Callable[[], object]) -> int:
    """How many of Python's instructions a known call runs."""
    count = 0

    def watch(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return watch

    for _ in range(3):
        call()
    before = sys.gettrace()
    sys.settrace(watch)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def _flash_attn(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    sums, lengths = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    packed, new = [x[0] for x in (q, k, v)], [x[:, :1] for x in (q, k, v)]
    caches = [x.contiguous() for x in (k, v)]
    return {
        "flash_attn_func": lambda: flash_attn_func(q, k, v, causal=True),
        "flash_attn_varlen_func": lambda: flash_attn_varlen_func(*packed, sums, sums, 4, 4),
        "flash_attn_with_kvcache": lambda: flash_attn_with_kvcache(
            new[0], *caches, cache_seqlens=lengths
        ),
        "flash_attn_with_kvcache, with a new key": lambda: flash_attn_with_kvcache(
            *(new[0], *caches, *new[1:]), cache_seqlens=lengths
        ),
    }


def _in_pages(q: Tensor) -> dict[str, Callable[[], object]]:
    """One query and 20 keys, in packed pages of 16."""
    sums_q, sums_k, starts, pages, last, lengths = (
        torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0, 20], [0, 2], [0, 1], [4], [20])
    )
    table, row, new = pages[None], q[0, :1], q[:, :1]
    rows = torch.randn(2, 4, 16, 2, 64)
    k, v = (as_packed(name, torch.randn(4, 16, 2, 64)) for name in "kv")
    scale, peer = 0.125, jitfmha.aiter
    out, one = torch.empty_like(row), torch.ones(1)
    rest = None, "auto", one, one
    return {
        "fmha_fwd": lambda: fmha_fwd(new, new, new),
        "pages in a table": lambda: fmha_fwd(
            row, k, v, cu_seqlens_q=sums_q, cu_seqlens_k=sums_k, block_table=table
        ),
        "pages in lists": lambda: fmha_fwd(
            *(row, k, v),
            cu_seqlens_q=sums_q,
            cu_seqlens_k=sums_k,
            cu_seqlens_k_padded=starts,
            block_table=pages,
        ),
        "flash_attn_with_kvcache, packed pages": lambda: flash_attn_with_kvcache(
            new, k, v, cache_seqlens=lengths, block_table=table
        ),
        "aiter.flash_attn_varlen_func, packed pages": lambda: peer.flash_attn_varlen_func(
            row, k, v, sums_q, sums_k, 1, 20, block_table=table
        ),
        "flash_attn_varlen_func, as vLLM calls it": lambda: flash_attn_varlen_func(
            *(row, *rows, sums_q),
            max_seqlen_q=1,
            max_seqlen_k=20,
            seqused_k=lengths,
            block_table=table,
            causal=True,
            out=out,
        ),
        "aiter.unified_attention": lambda: unified_attention(
            *(row, rows[0], rows[1], out, sums_q, 1, lengths, 20),
            *(scale, True, (-1, -1), table, 0.0, None, None, None),
        ),
        "aiter.mha_batch_prefill_func": lambda: peer.mha_batch_prefill_func(
            row, k, v, sums_q, starts, pages, 1, 20, causal=True, kv_last_page_lens=last
        ),
        "aiter.paged_attention_rocm": lambda: peer.paged_attention_rocm(
            out, one, one, one, row, k, v, 2, scale, table, lengths, 16, 20, *rest
        ),
    }


if __name__ == "__main__":
    main()
