"""Launches of packed calls, replayed with other lengths in the same tensors, as HIP graphs do.

What a call launches is recorded, and launched again by the emulator without its host code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from inputs import prefix_sums
from torch import Tensor
from untyped import fmha_fwd

from jitfmha import emulate
from jitfmha.amd.recording_runtime import RecordingRuntime, Scope, recorded_scope
from jitfmha.emulator.session import Emulation
from jitfmha.planning.target import TARGET_HERE
from jitfmha.problem.float64_reference import attention_packed, unpaged

_ROWS, _MOST_QUERIES, _MOST_KEYS = (360, 1400), 200, 700
_SEQUENCES = 5


class _UnreadEmulation(Emulation):
    """A GPU whose tensors count as a real GPU's."""

    @property
    def has_host_memory(self) -> bool:
        return False


@contextmanager
def _recorded(arch: str, seed: int) -> Iterator[Scope]:
    """What calls inside launch."""
    with emulate(arch, check=True, random_order=seed) as run:
        emulation = _UnreadEmulation(arch, "check", seed)
        TARGET_HERE.get().runtime = RecordingRuntime(emulation, Path())
        token = recorded_scope.set(scope := Scope())
        try:
            yield scope
        finally:
            recorded_scope.reset(token)
        assert run.findings() == ()


def _replay(arch: str, seed: int, scope: Scope) -> None:
    """Launch again what was launched, with the tensors that it used, its workspace included."""
    emulation = Emulation(arch, "check", seed)
    with emulate(arch, check=True, random_order=seed) as run:
        with emulation.launching(scope.touched) as emulator:
            for started in scope.kernels:
                image, symbol = started.image, started.symbol
                with emulator.loaded(image, emulation.device, symbol) as function:
                    emulator.launch(
                        *(function, started.grid, started.block, started.kernarg),
                        dynamic_lds=started.dynamic_lds,
                    )
        assert run.findings() == ()


def _sizes(scope: Scope) -> Any:
    """Of what was launched, and of all tensors."""
    kernels = [(started.symbol, started.grid, started.block) for started in scope.kernels]
    return kernels, [x.shape for x in scope.touched]


def _lengths(rng: torch.Generator, most: int) -> list[int]:
    """Of sequences of which one is long and the others are short: all fit into ``_ROWS``."""
    lengths = [1, most, *torch.randint(0, most // 4, (_SEQUENCES - 2,), generator=rng).tolist()]
    order = torch.randperm(_SEQUENCES, generator=rng)
    return [lengths[i] for i in order]


@pytest.mark.parametrize("page_size", [None, 16], ids=["dense", "pages"])
@pytest.mark.parametrize("mask", [0, 2], ids=["no mask", "causal"])
@pytest.mark.parametrize(
    ("arch", "heads", "hdim"),
    [("gfx942", (8, 2), 128), ("gfx950", (4, 4), 64), ("gfx950", (6, 2), 96)],
    ids=str,
)
def test_other_lengths(rng, seed, arch, heads, hdim, mask, page_size):
    heads_q, heads_k = heads
    rows_q, rows_k = _ROWS
    pages = None if page_size is None else -(-_MOST_KEYS // page_size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).bfloat16()

    q, out = normal(rows_q, heads_q, hdim), torch.full((rows_q, heads_q, hdim), torch.nan)
    out = out.bfloat16()
    shape = (rows_k,) if pages is None else (2 * pages, page_size)
    k, v = (normal(*shape, heads_k, hdim) for _ in range(2))
    table = None
    if pages is not None:
        table = torch.randint(2 * pages, (_SEQUENCES, pages), generator=rng, dtype=torch.int32)

    def lengths_of(side: int) -> list[int]:
        return _lengths(rng, (_MOST_QUERIES, _MOST_KEYS)[side])

    sums = [prefix_sums(lengths_of(side)) for side in (0, 1)]

    def call() -> Tensor:
        _, lse = fmha_fwd(
            *(q, k, v),
            out=out,
            return_lse=True,
            mask=mask,
            block_table=table,
            cu_seqlens_q=sums[0],
            cu_seqlens_k=sums[1],
            max_seqlen_q=_MOST_QUERIES,
            max_seqlen_k=_MOST_KEYS,
        )
        return lse

    with _recorded(arch, seed) as scope:
        lse = call()
    for _ in range(2):
        lengths = [lengths_of(side) for side in (0, 1)]
        for side in (0, 1):
            sums[side].copy_(prefix_sums(lengths[side]))
        for x in (out, lse, *(x for x in scope.touched if x.dtype == torch.float32)):
            x.fill_(torch.nan)
        _replay(arch, seed, scope)
        starts = [x[:-1].tolist() for x in sums]
        used = int(sums[0][-1])
        keys = (k, v)
        if table is not None:
            keys = tuple(unpaged(x, table, lengths[1]) for x in keys)
            starts[1] = prefix_sums(lengths[1])[:-1].tolist()
        expected = attention_packed(q[:used], *keys, *lengths, *starts, mask=mask)
        assert_close((out[:used], lse[:, :used]), expected, q[:used], *keys, None)
        assert out[used:].isnan().all(), "rows of no sequence"
    with _recorded(arch, seed) as other:
        call()
    assert _sizes(other) == _sizes(scope), "what is launched or allocated follows from lengths"
