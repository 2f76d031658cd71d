"""flash-attn's function for decoding with a KV cache, and paged keys, against the reference."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
import torch
from closeness import assert_as_close, assert_close
from inputs import DTYPES, prefix_sums
from packed_pages import packed_keys, packed_values
from refusals import refused, values
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from untyped import flash_attn_varlen_func, flash_attn_with_kvcache, fmha_fwd

from jitfmha import emulate
from jitfmha.amd.chips import Arch
from jitfmha.call.run import run_prepared
from jitfmha.layers import kv_cache
from jitfmha.problem.float64_reference import attention, attention_packed, unpaged
from jitfmha.problem.packed_pages import as_rows

HEADS_Q, HEADS_K, HDIM, HDIM_V = 6, 2, 32, 24
CAPACITY = 70
ARCHS = get_args(Arch)


@dataclass(frozen=True)
class Decoding:
    """A batch in the middle of decoding: queries, caches, and what the caches hold."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    seqlens: Tensor

    @classmethod
    def random(cls, rng: torch.Generator, seqlens: list[int], seqlen_q: int) -> Decoding:
        batch = len(seqlens)
        return cls(
            torch.randn(batch, seqlen_q, HEADS_Q, HDIM, generator=rng),
            torch.randn(batch, CAPACITY, HEADS_K, HDIM, generator=rng),
            torch.randn(batch, CAPACITY, HEADS_K, HDIM_V, generator=rng),
            torch.tensor(seqlens, dtype=torch.int32),
        )

    def to(self, dtype: torch.dtype) -> Decoding:
        tensors = (x.to(dtype) for x in (self.q, self.k_cache, self.v_cache))
        return Decoding(*tensors, self.seqlens)

    def check(
        self, actual: tuple[Tensor, Tensor], first: Tensor | None = None, **options: Any
    ) -> None:
        """Compare each sequence, which starts at the key ``first``."""
        for n, seqlen in enumerate(self.seqlens.tolist()):
            start = 0 if first is None else int(first[n])
            one = (
                self.q[n, None],
                self.k_cache[n, None, start:seqlen],
                self.v_cache[n, None, start:seqlen],
            )
            slopes = options.get("alibi_slopes")
            alone = {**options, "alibi_slopes": slopes[n] if slopes is not None else None}
            assert_close(tuple(x[n, None] for x in actual), attention(*one, **alone), *one)


def with_lse(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """What a call gives that is known: one with other numbers in tensors of its own was before."""
    others = {name: laid_out_alike(x) for name, x in options.items()}
    flash_attn_with_kvcache(*map(laid_out_alike, arguments), **others, return_softmax_lse=True)
    return flash_attn_with_kvcache(*arguments, **options, return_softmax_lse=True)


def laid_out_alike(x: Any) -> Any:
    """A copy of a tensor, with numbers that are no indices in another order."""
    if not isinstance(x, Tensor) or x.dim() == 0:
        return x
    is_number = x.is_floating_point() and x.dtype.itemsize > 1
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(
        x.flip(0) if is_number else x
    )


# Few pairs, because a kernel is built for each.
@pytest.mark.parametrize(("dtype", "causal"), [("fp32", False), ("fp32", True), ("bf16", True)])
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_lengths(rng, dtype, seqlen_q, causal):
    it = Decoding.random(rng, [0, 1, 33, CAPACITY], seqlen_q).to(DTYPES[dtype])
    result = with_lse(it.q, it.k_cache, it.v_cache, cache_seqlens=it.seqlens, causal=causal)
    it.check(result, mask=2 if causal else 0)
    alone = flash_attn_with_kvcache(
        it.q, it.k_cache, it.v_cache, cache_seqlens=it.seqlens, causal=int(causal)
    )
    assert torch.equal(alone, result[0])


def test_one_length_for_all(rng):
    it = Decoding.random(rng, [CAPACITY] * 2, 3)
    it.check(with_lse(it.q, it.k_cache, it.v_cache))
    it = replace(it, seqlens=torch.tensor([7, 7]))
    it.check(with_lse(it.q, it.k_cache, it.v_cache, cache_seqlens=7))
    it.check(with_lse(it.q, it.k_cache, it.v_cache, cache_seqlens=torch.tensor(7)))


def test_options(rng):
    it = Decoding.random(rng, [9, 40, 61], 4)
    slopes = torch.rand(3, HEADS_Q, generator=rng)
    result = with_lse(
        *(it.q, it.k_cache, it.v_cache),
        cache_seqlens=it.seqlens,
        softmax_scale=0.3,
        window_size=torch.tensor([7, 2]),
        softcap=5.0,
        alibi_slopes=slopes,
        num_splits=2,
    )
    options = {"window_size": (7, 2), "logit_softcap": 5.0, "alibi_slopes": slopes}
    it.check(result, softmax_scale=0.3, **options)


@pytest.mark.parametrize("new", [1, 6])
@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_new_keys_are_appended(rng, page_size, new):
    check_append(rng, page_size, new)


def check_append(rng: torch.Generator, page_size: int | None, new: int) -> None:
    it = Decoding.random(rng, [0, 17, CAPACITY - new], 2)
    k = torch.randn(3, new, HEADS_K, HDIM, generator=rng)
    v = torch.randn(3, new, HEADS_K, HDIM_V, generator=rng)
    expected = replace(
        it, k_cache=it.k_cache.clone(), v_cache=it.v_cache.clone(), seqlens=it.seqlens + new
    )
    for n, seqlen in enumerate(it.seqlens.tolist()):
        expected.k_cache[n, seqlen : seqlen + new] = k[n]
        expected.v_cache[n, seqlen : seqlen + new] = v[n]
    if page_size is None:
        result = with_lse(it.q, it.k_cache, it.v_cache, k, v, cache_seqlens=it.seqlens)
        assert torch.equal(it.k_cache, expected.k_cache)
        assert torch.equal(it.v_cache, expected.v_cache)
    else:
        pages_k, pages_v, table = in_pages(rng, it.k_cache, it.v_cache, page_size)
        result = with_lse(it.q, pages_k, pages_v, k, v, cache_seqlens=it.seqlens, block_table=table)
        for pages, whole in ((pages_k, expected.k_cache), (pages_v, expected.v_cache)):
            assert torch.equal(pages[table.long()].flatten(1, 2)[:, :CAPACITY], whole)
    expected.check(result)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_packed_pages(rng, dtype):
    """They take new keys, and give what pages of rows do."""
    it = Decoding.random(rng, [0, 17, CAPACITY - 3], 2).to(DTYPES[dtype])
    new = (torch.randn(3, 3, HEADS_K, n, generator=rng).to(it.q.dtype) for n in (HDIM, HDIM_V))
    rows_k, rows_v, table = in_pages(rng, it.k_cache, it.v_cache, 16)
    packed = packed_keys(rows_k), packed_values(rows_v)
    options = {"cache_seqlens": it.seqlens, "block_table": table, "causal": True}
    k, v = new
    expected = with_lse(it.q, rows_k, rows_v, k, v, **options)
    actual = with_lse(it.q, *packed, k, v, **options)
    assert_as_close(actual, expected, it.q, rows_k.nan_to_num(), rows_v.nan_to_num())
    for name, pages, rows in (("k", packed[0], rows_k), ("v", packed[1], rows_v)):
        assert torch.equal(as_rows(name, pages).nan_to_num(), rows.nan_to_num())


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"block_table": None}, ["k_cache", "four dimensions", "block_table"]),
        ({"k_cache": torch.zeros(2, 2, 4, 16, 4)}, ["k has hdim 16", "32"]),
        ({"v_cache": torch.zeros(2, 16, 2, 24)}, ["v_cache has shape", "page_size / x"]),
        ({"v_cache": torch.zeros(2, 2, 8, 24, 4)}, ["v_cache", "(2, 32, 2, 24)"]),
    ],
)
def test_packed_pages_that_are_refused(changes, texts):
    given = {
        "q": torch.zeros(2, 1, HEADS_Q, HDIM),
        "k_cache": torch.zeros(2, 2, HDIM // 4, 16, 4),
        "v_cache": torch.zeros(2, 2, 4, 24, 4),
        "block_table": torch.zeros(2, 1, dtype=torch.int32),
    }
    flash_attn_with_kvcache(**given)
    with refused(ValueError, *texts):
        flash_attn_with_kvcache(**(given | changes))


def in_pages(
    rng: torch.Generator, k: Tensor, v: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same keys and values in shuffled pages, among others that hold NaN, and the table."""
    batch, capacity = k.shape[:2]
    columns = -(-capacity // page_size)
    table = torch.randperm(2 * batch * columns, generator=rng)[: batch * columns]
    table = table.view(batch, columns).int()
    caches = []
    for x in (k, v):
        room = torch.full((batch, columns * page_size, *x.shape[2:]), torch.nan, dtype=x.dtype)
        room[:, :capacity] = x
        cache = torch.full((2 * batch * columns, page_size, *x.shape[2:]), torch.nan, dtype=x.dtype)
        cache[table.long()] = room.unflatten(1, (columns, page_size))
        caches.append(cache)
    return caches[0], caches[1], table


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_pages(rng, page_size):
    it = Decoding.random(rng, [0, 16, 17, CAPACITY], 4)
    pages_k, pages_v, table = in_pages(rng, it.k_cache, it.v_cache, page_size)
    for n, seqlen in enumerate(it.seqlens.tolist()):
        table[n, -(-seqlen // page_size) :] = 10**6  # has no meaning
    result = with_lse(
        it.q, pages_k, pages_v, cache_seqlens=it.seqlens, block_table=table, causal=True
    )
    it.check(result, mask=2)
    packed_q, ends = it.q.flatten(0, 1), prefix_sums(it.seqlens.tolist())
    cu_q = prefix_sums([4] * 4)
    out, lse, _ = flash_attn_varlen_func(
        *(packed_q, pages_k, pages_v, cu_q, ends, 4, CAPACITY),
        causal=True,
        block_table=table,
        return_attn_probs=True,
    )
    table = table.where(table < 10**6, 0)
    lengths = it.seqlens.tolist()
    packed = [unpaged(x.nan_to_num(), table, lengths) for x in (pages_k, pages_v)]
    spans = [4] * 4, lengths, cu_q.tolist()[:-1], ends.tolist()[:-1]
    expected = attention_packed(packed_q, *packed, *spans, mask=2)
    assert_close((out, lse), expected, packed_q, *packed)


def test_first_keys_that_do_not_count(rng):
    it = Decoding.random(rng, [3, 40, CAPACITY], 4)
    caches = it.q, it.k_cache, it.v_cache
    flash_attn_with_kvcache(*caches, causal=True, cache_leftpad=it.seqlens, return_softmax_lse=True)
    first = torch.tensor([2, 0, CAPACITY], dtype=torch.int32)
    result = with_lse(
        *(it.q, it.k_cache, it.v_cache), cache_seqlens=it.seqlens, cache_leftpad=first, causal=True
    )
    it.check(result, first=first, mask=2)


def test_known_calls_with_queries_that_are_copied(rng):
    """As their sequences do not lie at one distance, or not with their numbers one by one."""
    it = Decoding.random(rng, [3, 40, 61], 4)
    for q in (it.q[:, 1:3], it.q.transpose(2, 3).contiguous().transpose(2, 3)):
        result = with_lse(q, it.k_cache, it.v_cache, cache_seqlens=it.seqlens)
        replace(it, q=q).check(result)


def test_batch_indices(rng):
    it = Decoding.random(rng, [5, 40, 61], 1)
    places = torch.tensor([4, 0, 3])
    k_cache, v_cache = (torch.full((6, *x.shape[1:]), torch.nan) for x in (it.k_cache, it.v_cache))
    k_cache[places], v_cache[places] = it.k_cache, it.v_cache
    k, v = it.k_cache[:, :1].clone(), it.v_cache[:, :1].clone()
    result = with_lse(
        *(it.q, k_cache, v_cache, k, v), cache_seqlens=it.seqlens, cache_batch_idx=places.int()
    )
    for n, seqlen in enumerate(it.seqlens.tolist()):
        it.k_cache[n, seqlen], it.v_cache[n, seqlen] = k[n, 0], v[n, 0]
    replace(it, seqlens=it.seqlens + 1).check(result)
    assert torch.equal(k_cache[places], it.k_cache)


@pytest.mark.parametrize("with_places", [False, True])
@pytest.mark.parametrize("with_first", [False, True])
def test_caches_with_other_strides(rng, with_first, with_places):
    """Sequences that do not lie one after the other: head by head, in any order, and padded."""
    it = Decoding.random(rng, [3, 40, 61], 2)
    places = torch.tensor([2, 0, 1]) if with_places else torch.arange(3)
    first = torch.tensor([2, 0, 33], dtype=torch.int32) if with_first else None
    caches = []
    for x in (it.k_cache, it.v_cache):
        by_head = torch.full((3, x.shape[2], CAPACITY + 1, x.shape[3]), torch.nan)
        cache = by_head[:, :, :CAPACITY].transpose(1, 2)
        cache[places] = x
        caches.append(cache)
    result = with_lse(
        *(it.q, *caches),
        cache_seqlens=it.seqlens,
        cache_batch_idx=places.int() if with_places else None,
        cache_leftpad=first,
        causal=True,
    )
    it.check(result, first=first, mask=2)


@pytest.mark.parametrize("room", [0, 1])
def test_caches_are_not_copied(rng, monkeypatch, room):
    """Whether sequences lie one after the other, or with room for a key between them."""
    it = Decoding.random(rng, [3, 40, 61], 2)
    caches = [torch.zeros(3, CAPACITY + room, *x.shape[2:]) for x in (it.k_cache, it.v_cache)]
    read = []

    def kept(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        read.extend([k, v])
        return fmha_fwd(q, k, v, **options)

    def kept_of_known(prepared: Any, arguments: Any, **options: Any) -> Any:
        read.extend([arguments.k, arguments.v])
        return run_prepared(prepared, arguments, **options)

    monkeypatch.setattr(kv_cache, "fmha_fwd", kept)
    monkeypatch.setattr(kv_cache, "run_prepared", kept_of_known)
    for _ in range(2):
        flash_attn_with_kvcache(it.q, *[x[:, :CAPACITY] for x in caches], cache_seqlens=it.seqlens)
    assert [x.data_ptr() for x in read] == [x.data_ptr() for x in caches] * 2


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (9, 2)}], ids=str)
@pytest.mark.parametrize("new", [3, 1, 5])
def test_rotary(rng, new, mask, interleaved):
    check_rotary(rng, new, mask, interleaved)


def check_rotary(rng: torch.Generator, new: int, mask: dict[str, Any], interleaved: bool) -> None:
    """Rotation is the product with a complex number for each pair of elements."""
    it = Decoding.random(rng, [0, 17], 3)
    k = torch.randn(2, new, HEADS_K, HDIM, generator=rng)
    v = torch.randn(2, new, HEADS_K, HDIM_V, generator=rng)
    width = 16
    angle = torch.rand(CAPACITY, width // 2, generator=rng) * 2 * math.pi

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        turned = x[..., :width].double()
        pairs = turned.unflatten(-1, (-1, 2) if interleaved else (2, -1))
        a, b = pairs.unbind(-1 if interleaved else -2)
        turned = (
            torch.complex(a, b)
            * torch.polar(torch.ones(()).double(), angle.double())[positions.long()][:, :, None]
        )
        both = torch.stack([turned.real, turned.imag], -1 if interleaved else -2).flatten(-2)
        return torch.cat([both.to(x.dtype), x[..., width:]], dim=-1)

    positions, of_keys = (it.seqlens[:, None] + torch.arange(n) for n in (3, new))
    expected = replace(it, q=rotated(it.q, positions if mask else positions[:, :1].expand(-1, 3)))
    result = with_lse(
        *(it.q, it.k_cache, it.v_cache, k, v, angle.cos(), angle.sin()),
        cache_seqlens=it.seqlens,
        rotary_interleaved=interleaved,
        **mask,
    )
    for n, seqlen in enumerate(it.seqlens.tolist()):
        written = it.k_cache[n, seqlen : seqlen + new]
        torch.testing.assert_close(written, rotated(k, of_keys)[n], atol=1e-6, rtol=1e-6)
    expected = replace(expected, seqlens=it.seqlens + new)
    out, lse = result
    is_causal, window_size = mask.get("causal", False), mask.get("window_size", (-1, -1))
    expected.check((out, lse), mask=2 if is_causal else 0, window_size=window_size)


@pytest.mark.sample("arch, page_size", [(x, y) for x in ARCHS for y in (None, 1, 16)], 1)
def test_append_and_rotary_on_gpus(rng, arch, page_size):
    """The emulator's kernels read caches to which torch has just written."""
    with emulate(arch, check=True) as run:
        check_append(rng, page_size, new=6)
        check_rotary(rng, int(rng.initial_seed() % 2) + 3, {"causal": True}, interleaved=True)
    assert run.findings() == ()


@pytest.mark.parametrize("device", ["cpu", "gfx942"])
def test_new_keys_of_eight_bits_are_copied(rng, device):
    """All of their bytes, also into packed pages."""
    codes = torch.arange(256, dtype=torch.uint8).view(2, 2, 2, 32)
    pages = torch.zeros(2, 2, 16, 2, 32, dtype=torch.uint8)
    table = torch.tensor([[1], [0]], dtype=torch.int32)
    lengths = torch.tensor([0, 13], dtype=torch.int32)
    dtype = torch.float8_e4m3fnuz
    q = torch.randn(2, 1, 2, 32, generator=rng).bfloat16()
    wanted = pages[0].clone()
    for n, length in enumerate(lengths.tolist()):
        wanted[1 - n, length : length + 2] = codes[n]
    for is_packed in (False, True):
        caches = [packed_keys(pages[0]), packed_values(pages[1])] if is_packed else [*pages.clone()]
        new = codes.view(dtype)
        with emulate(device) if device != "cpu" else nullcontext():
            flash_attn_with_kvcache(
                *(q, *(x.view(dtype) for x in caches), new, new),
                cache_seqlens=lengths,
                block_table=table,
            )
        forms = (packed_keys(wanted), packed_values(wanted)) if is_packed else (wanted, wanted)
        assert all(map(torch.equal, caches, forms))


def test_written_caches_are_another_version(rng):
    """In a first call and in a known one: where they were saved, backward refuses."""
    q, k, v = (torch.randn(1, 1, 2, hdim, generator=rng) for hdim in (HDIM, HDIM, HDIM_V))
    caches = [torch.zeros(1, 8, 2, x.shape[-1], requires_grad=True) * 1 for x in (k, v)]
    lengths = torch.tensor([3], dtype=torch.int32)
    for _ in range(3):
        saved = [cache.square().sum() for cache in caches]
        with torch.no_grad():
            flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths)
        for each in saved:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                each.backward()


def test_known_calls_refuse_shared_memory(rng):
    """Of tensors that lie as those before, which were apart."""
    q, k, v = torch.randn(3, 1, 1, 2, HDIM, generator=rng)
    k_cache, v_cache = torch.zeros(2, 1, 8, 2, HDIM)
    v, v_cache = v[..., :HDIM_V], v_cache[..., :HDIM_V]
    lengths = torch.tensor([3], dtype=torch.int32)
    for _ in range(2):
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    before, version = k_cache.clone(), k_cache._version
    within = k_cache.flatten()[192:256].view(k.shape)
    for tensors, other in (
        ((k_cache, k_cache[..., :HDIM_V], k, v), "v_cache"),
        ((k_cache, v_cache, within, v), "k"),
        ((k_cache, v_cache, k, within[..., :HDIM_V]), "v"),
    ):
        with pytest.raises(ValueError, match=f"k_cache is written and shares memory with {other};"):
            flash_attn_with_kvcache(q, *tensors, cache_seqlens=lengths)
    assert torch.equal(k_cache, before)
    assert k_cache._version == version


def test_caches_that_are_written_are_nothing_else(rng):
    """Whatever else is read may not lie in them, in a first call and in a known one."""
    q, k, v = (torch.randn(2, 1, 2, hdim, generator=rng) for hdim in (HDIM, HDIM, HDIM_V))
    cos, sin = torch.randn(2, 8, 4, generator=rng)
    plain = {"q": q, "cache_seqlens": torch.tensor([3, 5]).int()}
    rotated = plain | {"rotary_cos": cos, "rotary_sin": sin}
    moved = plain | {"cache_batch_idx": torch.tensor([1, 0]).int()}
    padded = plain | {"cache_leftpad": torch.tensor([1, 2]).int()}
    pages = plain | {"block_table": torch.tensor([[0], [1]]).int()}
    for call in (plain, rotated, moved, padded, pages):
        hdims = {"k_cache": HDIM, "v_cache": HDIM_V}
        caches = {name: torch.zeros(2, 8, 2, hdim) for name, hdim in hdims.items()}
        for _ in range(2):
            for (to, cache), name in itertools.product(caches.items(), call):
                x = call[name]
                within = cache.view(x.dtype).flatten()[7:][: x.numel()].view(x.shape).copy_(x)
                with pytest.raises(ValueError, match=f"{to} is written and .* with {name};"):
                    flash_attn_with_kvcache(k=k, v=v, **call | caches | {name: within})
            flash_attn_with_kvcache(k=k, v=v, **call, **caches)


def test_new_keys_are_rounded_to_eight_bits(rng, poisoned_memory):
    """By scales that are powers of two, which leaves rounding alone."""
    q, k, v = (torch.randn(2, 3, 2, 32, generator=rng).bfloat16() for _ in range(3))
    caches = torch.randn(2, 2, 20, 2, 32, generator=rng).to(torch.float8_e4m3fn).unbind()
    k_descale, v_descale = torch.tensor([2.0**-9]), torch.tensor([0.25, 2.0])
    scales = {"k_descale": k_descale, "v_descale": v_descale}
    lengths = torch.tensor([0, 17], dtype=torch.int32)
    before = [x.clone() for x in caches]
    given = {"cache_seqlens": lengths, "causal": True, **scales}
    out = flash_attn_with_kvcache(q, *caches, k, v, **given)
    for x, new, scale, old in zip(caches, (k, v), scales.values(), before, strict=True):
        rounded = (new.float() / scale[:, None]).clamp(-448, 448).to(x.dtype)
        for n, length in enumerate(lengths.tolist()):
            old[n, length : length + 3] = rounded[n]
        assert torch.equal(x.view(torch.uint8), old.view(torch.uint8))
    given["cache_seqlens"] = lengths + 3
    torch.testing.assert_close(out, flash_attn_with_kvcache(q, *caches, **given))
    tokens = {"k_descale": torch.ones(2, 20, 2, 1)}
    with refused(NotImplementedError, "scales of tokens", "bfloat16"):
        flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True, **tokens)


@pytest.mark.parametrize("where", ["rows", "cache_leftpad", "cache_batch_idx", "block_table"])
def test_compiled(rng, where):
    """Without graph breaks, new keys and their rotation included."""
    torch._dynamo.reset()
    it = Decoding.random(rng, [5, 17, 33], 2)
    new = (torch.randn(3, 2, HEADS_K, x.shape[-1], generator=rng) for x in (it.k_cache, it.v_cache))
    options = {"cache_seqlens": it.seqlens, "causal": True, "return_softmax_lse": True}
    caches = [it.k_cache, it.v_cache]
    if where == "block_table":
        *caches, options["block_table"] = in_pages(rng, *caches, 16)
    elif where != "rows":
        options[where] = torch.tensor([2, 0, 1], dtype=torch.int32)
    rest = (*new, *torch.randn(2, CAPACITY, 8, generator=rng))
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="eager")
    results = []
    for function in (flash_attn_with_kvcache, compiled):
        written = [x.clone() for x in caches]
        results.append([*function(it.q, *written, *rest, **options), *written])
    torch.testing.assert_close(results[1], results[0], equal_nan=True)


@pytest.mark.parametrize("where", ["rows", "cache_leftpad", "cache_batch_idx", "block_table"])
@pytest.mark.parametrize("way", ["real", "symbolic", "functional"])
def test_recorded(rng, way, where):
    """What make_fx recorded serves other lengths: it kept those that it saw as constants, or failed
    as a step of compiled code does not; transforms without values were asked for them.
    """
    it = Decoding.random(rng, [5, 17, 33], 2)
    caches, options = [it.k_cache, it.v_cache], {}
    if where == "block_table":
        *caches, options["block_table"] = in_pages(rng, *caches, 16)
    elif where != "rows":
        options[where] = torch.tensor([2, 0, 1], dtype=torch.int32)

    def attend(q: Tensor, seqlens: Tensor) -> Any:
        given = {"cache_seqlens": seqlens, "causal": True, "return_softmax_lse": True}
        return flash_attn_with_kvcache(q, *caches, **given, **options)

    recorded = torch.func.functionalize(attend)
    if way != "functional":
        mode = {"tracing_mode": way, "_allow_non_fake_inputs": True}
        recorded = make_fx(attend, **mode)(it.q, it.seqlens)
    others = it.seqlens.flip(0)
    torch.testing.assert_close(recorded(it.q, others), attend(it.q, others))


TABLE, COS = torch.zeros(2, 1, dtype=torch.int32), torch.ones(9, 4)
NEW = {"k": torch.zeros(2, 2, 2, 32), "v": torch.zeros(2, 2, 2, 24)}
LEAF = torch.zeros(2, 3, 6, 32, requires_grad=True)


@pytest.mark.parametrize(
    ("changes", "error", "texts"),
    [
        *values(ValueError, cache_seqlens=[-1], num_splits=[-1]),
        *values(TypeError, cache_seqlens=["5"]),
        ({"cache_seqlens": 71}, ValueError, ["cache_seqlens", "71", "70"]),
        ({"cache_seqlens": torch.ones(2)}, TypeError, ["cache_seqlens", "float32"]),
        ({"cache_seqlens": torch.ones(3).int()}, ValueError, ["cache_seqlens", "(3,)"]),
        ({"cache_seqlens": 69, **NEW}, ValueError, ["cache_seqlens holds 69", "2 more keys", "70"]),
        ({"k": NEW["k"][:, :1]}, ValueError, ["v is missing"]),
        ({"k": NEW["k"][..., :8], "v": NEW["v"]}, ValueError, ["k", "2, 8"]),
        ({"block_table": TABLE + 2}, ValueError, ["block_table", "page 2", "2 pages"]),
        ({"block_table": TABLE.long()}, TypeError, ["block_table", "int64"]),
        ({"block_table": TABLE, "cache_seqlens": 71}, ValueError, ["block_table", "71", "70"]),
        ({"block_table": TABLE, "cache_leftpad": TABLE[:, 0]}, ValueError, ["cache_leftpad"]),
        ({"cache_batch_idx": TABLE[:, 0] + 2}, ValueError, ["cache_batch_idx", "2"]),
        ({"cache_leftpad": TABLE[:, 0] + 6}, ValueError, ["cache_leftpad", "6", "5"]),
        ({"cache_leftpad": TABLE[:, 0] - 1}, ValueError, ["cache_leftpad holds -1", "0 to 70"]),
        ({"cache_leftpad": TABLE[:, 0] + 71}, ValueError, ["cache_leftpad holds 71", "0 to 70"]),
        ({"rotary_cos": COS}, ValueError, ["rotary_sin"]),
        ({"rotary_cos": COS, "rotary_sin": COS}, ValueError, ["rotary_cos", "k and v"]),
        ({"q": torch.zeros(2, 3, 6)}, ValueError, ["q", "(2, 3, 6)"]),
        ({"v_cache": torch.zeros(2, 69, 2, 24)}, ValueError, ["v_cache", "69"]),
        ({"q": LEAF}, NotImplementedError, ["q requires grad"]),
    ],
)
def test_errors(rng, changes, error, texts):
    it = Decoding.random(rng, [5, 5], 3)
    given = {"q": it.q, "k_cache": it.k_cache, "v_cache": it.v_cache, "cache_seqlens": 5}
    with refused(error, *texts):
        flash_attn_with_kvcache(**(given | changes))


@pytest.mark.parametrize(
    ("name", "numbers", "texts"),
    [
        ("cache_seqlens", [5, 70], ["cache_seqlens holds 70", "1 more keys", "70"]),
        ("cache_batch_idx", [0, 2], ["cache_batch_idx holds 2", "0 to 1"]),
        ("cache_leftpad", [0, 6], ["cache_leftpad is 6 for sequence 1", "5 keys"]),
    ],
)
def test_numbers_of_known_calls_are_checked(rng, name, numbers, texts):
    """Before anything is written; what was there before is found by the layouts of its tensors."""
    it = Decoding.random(rng, [5, 5], 1)
    new = (torch.randn(2, 1, HEADS_K, n, generator=rng) for n in (HDIM, HDIM_V))
    given = (it.q, it.k_cache, it.v_cache, *new)
    lengths = {"cache_seqlens": it.seqlens}
    flash_attn_with_kvcache(*given, **{**lengths, name: torch.tensor([1, 0]).int()})
    before = it.k_cache.clone()
    with refused(ValueError, *texts):
        flash_attn_with_kvcache(*given, **{**lengths, name: torch.tensor(numbers).int()})
    assert torch.equal(it.k_cache, before)


def test_more_keys_than_prefix_sums_hold():
    """In pages that are all the same one."""
    q, cache = torch.zeros(2, 1, 1, 32), torch.zeros(1, 1, 1, 32).expand(1, 2**12, 1, 32)
    table = torch.zeros(1, 1, dtype=torch.int32).expand(2, 2**19)
    with refused(ValueError, "all sequences", str(2**32), str(2**31 - 1)):
        flash_attn_with_kvcache(q, cache, cache, block_table=table)


@pytest.mark.parametrize(
    "wrong", [{"softmax_scale": -1.0}, {"softcap": -1.0}, {"num_splits": "all"}, {"dtype": True}]
)
def test_what_is_refused_changes_no_cache(rng, wrong):
    q, k, v = (torch.randn(1, 1, 2, 64, generator=rng).bfloat16() for _ in range(3))
    caches = [torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
    if wrong == {"dtype": True}:
        wrong, q, k, v = {}, *(x.to(torch.int16) for x in (q, k, v))
        caches = [x.to(torch.int16) for x in caches]
    with pytest.raises((TypeError, ValueError)):
        flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=1, **wrong)
    assert not any(x.any() for x in caches)


def test_new_keys_in_caches_that_have_to_be_copied(rng):
    """With first keys that do not count, where sequences do not lie one after the other."""
    q, k, v = (torch.randn(2, 1, 2, 64, generator=rng).bfloat16() for _ in range(3))
    apart = [torch.randn(6, 2, 2, 64, generator=rng).bfloat16().transpose(0, 1) for _ in range(2)]
    together = [x.contiguous() for x in apart]
    rest = {
        "cache_seqlens": torch.tensor([2, 4]).int(),
        "cache_leftpad": torch.tensor([1, 0]).int(),
    }
    results = [flash_attn_with_kvcache(q, *caches, k, v, **rest) for caches in (together, apart)]
    assert torch.equal(*results)
    for x, y in zip(apart, together, strict=True):
        assert torch.equal(x, y)


def test_new_keys_under_autocast(rng):
    """Which gives q the dtype that the caches have."""
    q = torch.randn(1, 1, 2, 64, generator=rng)
    k, v, *caches = (torch.randn(1, n, 2, 64, generator=rng).bfloat16() for n in (1, 1, 4, 4))
    copies = [x.clone() for x in caches]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=1)
    same = flash_attn_with_kvcache(q.bfloat16(), *copies, k, v, cache_seqlens=1)
    assert torch.equal(result, same)
    assert all(map(torch.equal, caches, copies))
