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
from untyped import flash_attn_with_kvcache, fmha_fwd

import jitfmha.aiter.mla
from jitfmha import emulate
from jitfmha.amd.recording_runtime import RecordingRuntime, Scope, recorded_scope
from jitfmha.emulator.session import Emulation
from jitfmha.layers import kv_cache
from jitfmha.planning.target import TARGET_HERE
from jitfmha.problem.float64_reference import attention, attention_packed, unpaged
from jitfmha.problem.page_lists import pages_of_sequences

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


@pytest.mark.parametrize("kind", ["dense", "pages", "lists"])
@pytest.mark.parametrize("mask", [0, 2], ids=["no mask", "causal"])
@pytest.mark.sample(
    ("arch", "heads", "hdim"),
    [("gfx942", (8, 2), 128), ("gfx950", (4, 4), 64), ("gfx950", (6, 2), 96)],
    1,
)
def test_other_lengths(rng, seed, arch, heads, hdim, mask, kind):
    heads_q, heads_k = heads
    rows_q, rows_k = _ROWS
    page_size = 16
    pages = None if kind == "dense" else -(-_MOST_KEYS // page_size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).bfloat16()

    q, out = normal(rows_q, heads_q, hdim), torch.full((rows_q, heads_q, hdim), torch.nan)
    out = out.bfloat16()
    shape = (rows_k,) if pages is None else (2 * pages, page_size)
    k, v = (normal(*shape, heads_k, hdim) for _ in range(2))
    table, starts_of_lists = None, None
    if pages is not None:
        shape = (_SEQUENCES, pages) if kind == "pages" else (_SEQUENCES * pages,)
        table = torch.randint(2 * pages, shape, generator=rng, dtype=torch.int32)

    def lengths_of(side: int) -> list[int]:
        return _lengths(rng, (_MOST_QUERIES, _MOST_KEYS)[side])

    def lists_of(lengths: list[int]) -> Tensor:
        """Where lists begin, whose pages are others than those of the lists before."""
        assert table is not None
        table.copy_(torch.randint(2 * pages, table.shape, generator=rng, dtype=torch.int32))
        return prefix_sums([-(-length // page_size) for length in lengths]) + 3

    lengths = [lengths_of(side) for side in (0, 1)]
    sums = [prefix_sums(x) for x in lengths]
    if kind == "lists":
        starts_of_lists = lists_of(lengths[1])

    def call() -> Tensor:
        _, lse = fmha_fwd(
            *(q, k, v),
            out=out,
            return_lse=True,
            mask=mask,
            block_table=table,
            cu_seqlens_q=sums[0],
            cu_seqlens_k=sums[1],
            cu_seqlens_k_padded=starts_of_lists,
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
        if starts_of_lists is not None:
            starts_of_lists.copy_(lists_of(lengths[1]))
        for x in (out, lse, *(x for x in scope.touched if x.dtype == torch.float32)):
            x.fill_(torch.nan)
        _replay(arch, seed, scope)
        starts = [x[:-1].tolist() for x in sums]
        used = int(sums[0][-1])
        keys = (k, v)
        if table is not None:
            of_sequences = pages_of_sequences(table, starts_of_lists)
            keys = tuple(unpaged(x, of_sequences, lengths[1]) for x in keys)
            starts[1] = prefix_sums(lengths[1])[:-1].tolist()
        expected = attention_packed(q[:used], *keys, *lengths, *starts, mask=mask)
        assert_close((out[:used], lse[:, :used]), expected, q[:used], *keys, None)
        assert out[used:].isnan().all(), "rows of no sequence"
    with _recorded(arch, seed) as other:
        call()
    assert _sizes(other) == _sizes(scope), "what is launched or allocated follows from lengths"


def decode_latents(q: Tensor, out: Tensor, ones: Tensor, cache: Tensor, *lists: Tensor) -> None:
    """``aiter.mla.mla_decode_fwd``, whose kernel is that of latents."""
    pages = cache[:, None, None]
    jitfmha.aiter.mla.mla_decode_fwd(q, pages, out, ones, *lists, None, 1, sm_scale=0.1)


def decode_ragged(q: Tensor, out: Tensor, ones: Tensor, cache: Tensor, *lists: Tensor) -> None:
    """``aiter.paged_attention_ragged``, whose kernel is that of few rows."""
    pages, one = cache[:, None, None], torch.ones(1)
    jitfmha.aiter.paged_attention_ragged(
        *(out, out, q, pages, pages[..., : out.shape[-1]], 0.1, *lists, None, 1, 512),
        *(None, "auto", "NHD", 0.0, one, one, None, 256),
    )


@pytest.mark.sample("arch", ["gfx942", "gfx950"], 1)
@pytest.mark.parametrize(
    ("decode", "hdim", "rank"), [(decode_latents, 320, 300), (decode_ragged, 128, 96)]
)
def test_other_lists_of_aiter(rng, seed, arch, decode, hdim, rank):
    """Of pages of one key, where the lists say all there is to know and nothing is made of them."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).bfloat16()

    q, out = normal(_SEQUENCES, 16, hdim), torch.empty(_SEQUENCES, 16, rank).bfloat16()
    cache, ones = normal(2 * _MOST_KEYS, hdim), prefix_sums([1] * _SEQUENCES)
    indices = torch.empty(_ROWS[1], dtype=torch.int32)
    indptr = torch.empty(_SEQUENCES + 1, dtype=torch.int32)

    def fill() -> list[int]:
        lengths = _lengths(rng, _MOST_KEYS)
        indptr.copy_(prefix_sums(lengths))
        indices.copy_(torch.randint(len(cache), indices.shape, generator=rng))
        return lengths

    fill()
    with _recorded(arch, seed) as scope:
        decode(q, out, ones, cache, indptr, indices)
    lengths = fill()
    for x in (out, *(x for x in scope.touched if x.dtype == torch.float32 and x.numel() > 1)):
        x.fill_(torch.nan)
    _replay(arch, seed, scope)
    keys = cache[indices[: sum(lengths)].long(), None]
    starts = ones.tolist()[:-1], indptr.tolist()[:-1]
    expected = attention_packed(
        *(q, keys, keys[..., :rank], [1] * _SEQUENCES, lengths, *starts), softmax_scale=0.1
    )
    assert_close((out, expected[1].float()), expected, q, keys, keys[..., :rank], 0.1)
    with _recorded(arch, seed) as other:
        decode(q, out, ones, cache, indptr, indices)
    assert _sizes(other) == _sizes(scope), "what is launched or allocated follows from lists"


@pytest.mark.sample("arch", ["gfx942", "gfx950"], 1)
def test_padded_caches_are_not_read(rng, seed, arch, monkeypatch):
    """Where the first key of the first sequence is not the first row, which nobody finds out."""
    monkeypatch.setattr(kv_cache, "can_be_read", lambda x: False)
    q, k, v = (
        torch.randn(3, n, heads, 64, generator=rng).bfloat16()
        for n, heads in ((1, 4), (90, 2), (90, 2))
    )
    first, ends = torch.tensor([5, 0, 40]).int(), torch.tensor([70, 90, 41]).int()
    with _recorded(arch, seed):
        actual = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=ends, cache_leftpad=first, return_softmax_lse=True
        )
    for n, (begin, end) in enumerate(zip(first.tolist(), ends.tolist(), strict=True)):
        one = q[n, None], k[n, None, begin:end], v[n, None, begin:end]
        assert_close(tuple(x[n, None] for x in actual), attention(*one), *one)
