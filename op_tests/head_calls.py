"""Drawn calls of qk_norm_rope_cache, and what they give in float64."""

from typing import Any, NamedTuple

import torch
from drawn_rows import drawn_index
from norm_reference import FLOAT32, LARGEST, check, normal
from packed_pages import packed_keys, packed_values
from torch import Tensor

import jitfmha
from jitfmha.problem.packed_pages import are_packed, as_rows

HDIMS = [1, 2, 6, 24, 64, 80, 96, 128, 200, 256, 576]
_FP8_LEAST = {torch.float8_e4m3fn: 2.0**-9, torch.float8_e4m3fnuz: 2.0**-10}


class Kind(NamedTuple):
    """What kernels are compiled for."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    table_dtype: torch.dtype
    cache_dtype: torch.dtype
    interleaved: bool
    packed: bool


def draw_kind(rng: torch.Generator, dtype: torch.dtype, eight_bits: list[torch.dtype]) -> Kind:
    caches = [dtype, dtype, *eight_bits]
    weight_dtype, table_dtype = ((dtype, torch.float32)[drawn_index(rng, 2)] for _ in range(2))
    cache_dtype = caches[drawn_index(rng, len(caches))]
    interleaved, packed = (bool(drawn_index(rng, 2)) for _ in range(2))
    return Kind(dtype, weight_dtype, table_dtype, cache_dtype, interleaved, packed)


def draw_call(rng: torch.Generator, kind: Kind, hdim: int | None = None) -> dict[str, Any]:
    """Arguments of a call; what is optional is drawn."""

    def one_of(*values: Any) -> Any:
        return values[drawn_index(rng, len(values))]

    piece = 16 // kind.cache_dtype.itemsize
    hdims = [one_of(*HDIMS), one_of(*HDIMS)] if hdim is None else [hdim, hdim]
    if kind.packed:
        hdims = [-(-each // piece) * piece for each in hdims]
    batch, seqlen = one_of((1, 1), (3, 1), (2, 5), (1, 17), (2, 0))
    heads, heads_k = one_of(1, 3, 8), one_of(1, 2)
    hdim, hdim_v = hdims
    packed = torch.randn(batch, seqlen, heads + heads_k, hdim + one_of(0, 8), generator=rng)
    packed = packed.to(kind.dtype)[..., -hdim:]
    v = torch.randn(batch, seqlen, heads_k, hdim_v, generator=rng).to(kind.dtype)
    given: dict[str, Any] = {"q": packed[:, :, :heads], "k": packed[:, :, heads:], "eps": 1e-5}
    for name in ("q_weight", "k_weight"):
        if one_of(True, False):
            given[name] = torch.randn(hdim, generator=rng).to(kind.weight_dtype)
    lengths = torch.randint(0, 20, (batch,), generator=rng).int()
    if hdim > 1 and one_of(True, True, False):
        width = 2 * one_of(hdim // 2, max(hdim // 4, 1))
        angles = torch.rand(40, width // 2, generator=rng) * 6
        given |= {"cos": angles.cos(), "sin": angles.sin(), "interleaved": kind.interleaved}
        for name in ("cos", "sin"):
            given[name] = given[name].to(kind.table_dtype)
    if one_of(True, False):
        given["positions"] = torch.randint(0, 40, (batch, seqlen), generator=rng)
    else:
        given["cache_seqlens"] = lengths
    if kind.packed or one_of(True, True, False):
        given |= {"v": v, **_caches(rng, kind, batch, seqlen, (heads_k, *hdims))}
        given.setdefault("cache_seqlens", lengths)
        if "slots" in given and one_of(True, False):
            given["slots"] = given["slots"].masked_fill(given["slots"] % 3 == 0, -1)
    if one_of(True, False) and batch == 1:
        del packed, v
        for name in ("q", "k", "v", "positions", "slots"):
            if name in given:
                given[name] = given[name][0]
    for name in sorted(VECTORS & given.keys()):
        if one_of(True, False, False):
            given[name] = apart(given[name])
    return given


VECTORS = {"q_weight", "k_weight", "positions", "slots", "cache_seqlens", "block_table"}
VECTORS |= {"cache_batch_idx"}


def apart(x: Tensor) -> Tensor:
    """The same numbers, with others between them."""
    return torch.stack([x, torch.full_like(x, -9)], dim=-1)[..., 0]


def _caches(
    rng: torch.Generator, kind: Kind, batch: int, seqlen: int, sizes: tuple[int, int, int]
) -> dict[str, Any]:
    heads, hdim, hdim_v = sizes
    where = 1 if kind.packed else drawn_index(rng, 4)
    page_size = 16 if kind.packed else (40, 7)[min(where, 1)]
    pages = batch + 1 if where in (0, 3) else -(-40 // page_size) * batch
    found: dict[str, Any] = {}
    order = torch.randperm(pages, generator=rng)
    if where == 0:
        found["cache_batch_idx"] = order[:batch].int()
        page_size = 40
    elif where == 3:
        pages = batch
        page_size = 40
    elif where == 1:
        found["block_table"] = order.view(batch, -1).int()
    if where == 2:
        slots = torch.randperm(pages * page_size, generator=rng)
        found["slots"] = slots[: batch * seqlen].view(batch, seqlen)
    for name, width, packed in (
        *(("k_cache", hdim, packed_keys), ("v_cache", hdim_v, packed_values)),
    ):
        x = torch.randn(pages, page_size, heads, width, generator=rng).to(kind.dtype)
        x = x.mul(20).to(kind.cache_dtype) if kind.cache_dtype.itemsize == 1 else x
        found[name] = packed(x) if kind.packed else x
        if kind.cache_dtype.itemsize == 1 and drawn_index(rng, 3):
            count = (1, heads)[drawn_index(rng, 2)]
            scale = torch.rand(count, generator=rng) * 0.05 + 0.001
            found[f"{name[0]}_scale"] = scale
    return found


def check_call(given: dict[str, Any], **changes: Any) -> None:
    """Compare with float64; and the caches, where nothing was written, with what they were."""
    names = [name for name in ("k_cache", "v_cache") if name in given]
    before = {name: given[name].clone() for name in names}
    own = {name: given[name].clone() for name in ("q", "k")}
    q, k = jitfmha.qk_norm_rope_cache(**(given | changes))
    assert (k is None) == (bool(names) and not changes.get("inplace"))
    if changes.get("inplace"):
        assert q is given["q"]
        assert k is given["k"]
    expected = {name: made(own[name], given, name) for name in own}
    for name, out in (("q", q), ("k", k)):
        if out is not None:
            check(out, *expected[name], out.dtype)
    if not names:
        return
    v = given["v"].double()
    expected["v"] = v, torch.zeros_like(v)
    for name in names:
        _check_cache(name, given, before[name], *expected[name[0]])


def made(x: Tensor, given: dict[str, Any], name: str) -> tuple[Tensor, Tensor]:
    """A head normalised and rotated, and its bound before it is rounded."""
    values, off = x.double(), torch.zeros_like(x, dtype=torch.float64)
    weight = given.get(f"{name}_weight")
    if weight is not None:
        values, _, off, _ = normal("rms_norm", x, given["eps"])
        values, off = values * weight.double(), off * weight.double().abs()
        off = off + 4 * FLOAT32 * values.abs()
    if "cos" not in given:
        return values, off
    cos, sin = (given[each].double()[_positions(x, given)].unsqueeze(-2) for each in ("cos", "sin"))
    turned = rotated(values, cos, sin, given["interleaved"])
    most = rotated(values.abs(), cos.abs(), -sin.abs(), given["interleaved"], signs=False)
    of_off = rotated(off, cos.abs(), -sin.abs(), given["interleaved"], signs=False)
    return turned, of_off + 4 * FLOAT32 * most


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, signs: bool = True) -> Tensor:
    """With ``signs`` False, sums of magnitudes, of a sine that is negative."""
    width = 2 * cos.shape[-1]
    pairs = x[..., :width].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    a, b = pairs.unbind(-1 if interleaved else -2)
    second = a * sin + b * cos if signs else b * cos - a * sin
    both = torch.stack((a * cos - b * sin, second), -1 if interleaved else -2).flatten(-2)
    return torch.cat((both, x[..., width:]), -1)


def _positions(x: Tensor, given: dict[str, Any]) -> Tensor:
    if "positions" in given:
        positions: Tensor = given["positions"]
        return positions
    numbers: Tensor = given["cache_seqlens"].long()[:, None] + torch.arange(x.shape[-3])
    return numbers if x.dim() == 4 else numbers[0]


def _check_cache(
    name: str, given: dict[str, Any], before: Tensor, expected: Tensor, off: Tensor
) -> None:
    def in_rows(x: Tensor) -> Tensor:
        return as_rows(name[0], x) if are_packed(x) else x

    now, before = in_rows(given[name]), in_rows(before)
    page_size = now.shape[1]
    if "slots" in given:
        slots = given["slots"].flatten()
    else:
        numbers = given["cache_seqlens"].long()[:, None] + torch.arange(expected.shape[-3])
        if "block_table" in given:
            pages = given["block_table"].long().gather(1, numbers // page_size)
        else:
            index = given.get("cache_batch_idx", torch.arange(len(numbers)))
            pages = index.long()[:, None].expand_as(numbers)
        slots = (pages * page_size + numbers % page_size).flatten()
    flat, flat_before = (x.flatten(0, 1).contiguous() for x in (now, before))
    others = torch.ones(len(flat), dtype=torch.bool)
    others[slots[slots >= 0]] = False
    if flat.dtype.itemsize == 1:
        flat, flat_before = flat.view(torch.uint8), flat_before.view(torch.uint8)
    assert torch.equal(flat[others], flat_before[others]), f"{name}: what is not written stays"
    found = now.flatten(0, 1)[slots[slots >= 0]]
    keep = (slots >= 0).view(expected.shape[:-2])
    expected, off = expected[keep], off[keep]
    if found.dtype.itemsize > 1:
        check(found, expected, off, found.dtype)
        return
    scale = given.get(f"{name[0]}_scale", torch.ones(1)).double()[:, None]
    most = LARGEST[found.dtype]
    wanted = (expected / scale).clamp(-most, most)
    half_step = torch.full_like(wanted, 0.5)
    if found.dtype != torch.int8:
        half_step = (wanted.abs() * 2.0**-4).clamp(min=_FP8_LEAST[found.dtype] / 2)
    bound = half_step * (1 + 8 * FLOAT32) + 2 * off / scale + 4 * FLOAT32 * wanted.abs()
    if found.dtype != torch.int8:
        bound = bound * (1 + 2.0**-4)  # a step above a power of two is twice that below
    difference = (found.double() - wanted).abs()
    assert (difference <= bound).all(), f"{name}: {(difference / bound).max()} times the bound"
