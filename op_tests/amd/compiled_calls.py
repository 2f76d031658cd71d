"""Calls for compiled kernels, drawn as a whole, on the emulator and against float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from closeness import assert_close
from inputs import LAYOUTS, lay_out, prefix_sums
from score_features import Options, Shape, options_of
from torch import Tensor
from untyped import fmha_fwd

from jitfmha import emulate
from jitfmha.problem.float64_reference import attention, attention_packed

ARCHS = ("gfx942", "gfx950")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FP8_DTYPES = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
# Of queries, and of keys with values.
OTHER_DTYPES = (
    *(("fp32", "fp32"), ("fp8", "fp8"), ("int8", "int8")),
    *(("bf16", "int8"), ("fp16", "int8"), ("fp32", "int8")),
)
# Products take 16 columns of q and 32 of v, tiles 64 and 128; what is no multiple of 8 is loaded
# value by value.
HDIMS = (1, 8, 15, 16, 24, 40, 61, 64, 72, 80, 96, 100, 104, 120, 128, 136, 160, 192, 200, 255, 256)
SEQLENS_Q = (0, 1, 2, 31, 32, 33, 127, 128, 129, 140)
SEQLENS_K = (0, 1, 5, 31, 32, 33, 63, 64, 65, 100)
MASKS: tuple[int | str, ...] = (0, 1, 2, "b:0,0", "b:3,2", "b:40,0", "b:-1,7", "t:5,1", "g:3,40")
HEADS = ((1, 1), (3, 3), (4, 2), (5, 1))
# Those of a latent, and what is made in slices.
WIDE_HDIMS = (257, 300, 512, 571, 576)
SCALES = ("one", "each sequence and key head", "each head")


@dataclass(frozen=True)
class CompiledCall:
    """What a call asks for; ``lengths`` are (seqlen_q, seqlen_k), in gm0 of all sequences.

    Attributes:
        gap: unused rows behind each sequence of gm1.
        features: keys of ``score_features.FEATURES``.
        num_splits: of the keys; 0 leaves the choice.
        random_order: the seed of the order in which waves run; None: a fixed order.
        kv_dtype: that of keys and values, where it is another one.
        scales: which form those of 8-bit inputs have; "" for none.
        is_v_column_major: whether keys lie side by side in v; it has no other layout then.
    """

    arch: str
    dtype: str
    hdims: tuple[int, int]
    heads: tuple[int, int]
    is_group: bool
    lengths: tuple[tuple[int, int], ...]
    gap: int
    mask: int | str
    layouts: tuple[str, ...]  # of q, k, v and out
    bf16_cvt: str
    features: tuple[str, ...]
    num_splits: int = 0
    random_order: int | None = None
    kv_dtype: str = ""
    scales: str = ""
    is_v_column_major: bool = False

    def __str__(self) -> str:
        hdims, heads = ("x".join(map(str, pair)) for pair in (self.hdims, self.heads))
        lengths = "+".join(f"{q}x{k}" for q, k in self.lengths)
        words = (self.arch, self.dtype, self.bf16_cvt, f"hd{hdims}", f"heads{heads}", lengths)
        mode = f"gm1-gap{self.gap}" if self.is_group else "gm0-" + "-".join(self.layouts)
        splits = (f"splits{self.num_splits}",) if self.num_splits else ()
        kinds = (self.kv_dtype, self.scales, "column-major v" if self.is_v_column_major else "")
        named = (*words, mode, f"mask{self.mask}", *splits, *self.features, *filter(None, kinds))
        return "-".join(named)

    @property
    def torch_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of q, and of k and v."""
        by_name = DTYPES | {"fp32": torch.float32, "int8": torch.int8, "fp8": FP8_DTYPES[self.arch]}
        return by_name[self.dtype], by_name[self.kv_dtype or self.dtype]

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the output."""
        return DTYPES["bf16"] if self.dtype in ("fp8", "int8") else self.torch_dtypes[0]


def draw(drawn: random.Random, features: tuple[str, ...] = ()) -> CompiledCall:
    """Any call that compiled kernels serve; ``features`` are those to choose from."""
    is_group = drawn.random() < 0.4
    arch = drawn.choice(ARCHS)
    dtype = drawn.choice(tuple(DTYPES))
    has_roundings = (arch, dtype) == ("gfx942", "bf16")
    lengths = [(drawn.choice(SEQLENS_Q), drawn.choice(SEQLENS_K)) for _ in range(1 + is_group)]
    if not is_group:
        lengths *= drawn.choice((1, 1, 2))
    masks = [mask for mask in MASKS if not is_group or str(mask)[0] in "02b"]
    return CompiledCall(
        arch,
        dtype,
        (drawn.choice(HDIMS), drawn.choice(HDIMS)),
        drawn.choice(HEADS),
        is_group,
        tuple(lengths),
        drawn.choice((0, 3)) if is_group else 0,
        drawn.choice(masks),
        tuple("bshd" if is_group else drawn.choice(tuple(LAYOUTS)) for _ in range(4)),
        drawn.choice(("rtne", "rtna", "rtz")) if has_roundings else "rtne",
        tuple(feature for feature in features if drawn.random() < 0.5),
    )


def draw_of_other_dtypes(drawn: random.Random, features: tuple[str, ...]) -> CompiledCall:
    """The same with inputs that are not all bf16 or fp16, or with values in columns."""
    call = draw(drawn, features)
    dtype, kv_dtype = drawn.choice((*OTHER_DTYPES, (call.dtype, call.dtype)))
    has_8_bits = kv_dtype in ("fp8", "int8")
    hdims_q = HDIMS if dtype == "fp32" else (*HDIMS, *WIDE_HDIMS)
    hdims = drawn.choice(hdims_q), drawn.choice((*HDIMS, *WIDE_HDIMS))
    if dtype == "fp8" and hdims == (128, 128):
        hdims = 128, 120  # ready kernels serve the others, and round probabilities to fp8
    return replace(
        call,
        dtype=dtype,
        kv_dtype=kv_dtype,
        hdims=hdims,
        bf16_cvt="rtne",
        scales=drawn.choice(("", *SCALES)) if has_8_bits else "",
        is_v_column_major=(not has_8_bits and dtype != "fp32") or drawn.random() < 0.4,
    )


def check(call: CompiledCall, rng: torch.Generator) -> None:
    """Run it with the sanitizer, by a compiled kernel, and compare out and lse with float64."""
    if call.is_group:
        _check_group(call, rng)
    else:
        _check_batch(call, rng)


def run(
    arch: str, *tensors: Tensor, random_order: int | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Out and lse of a call; the sanitizer has nothing to say."""
    with emulate(arch, check=True, random_order=random_order) as emulated:
        out, lse = fmha_fwd(*tensors, return_lse=True, **options)
        assert emulated.findings() == ()
    return out, lse


def _check_batch(call: CompiledCall, rng: torch.Generator) -> None:
    (heads_q, heads_k), batch = call.heads, len(call.lengths)
    seqlen_q, seqlen_k = call.lengths[0]
    shape = Shape(batch, heads_q, seqlen_q, seqlen_k, call.out_dtype, rng)
    of_q, of_kv = call.torch_dtypes
    q, k, v, out = (
        lay_out(_random(shape, dtype, batch, rows, heads, hdim), layout)
        for dtype, rows, heads, hdim, layout in zip(
            (of_q, of_kv, of_kv, call.out_dtype),
            (seqlen_q, seqlen_k, seqlen_k, seqlen_q),
            (heads_q, heads_k, heads_k, heads_q),
            (call.hdims[0], *call.hdims, call.hdims[1]),
            call.layouts,
            strict=True,
        )
    )
    out.fill_(torch.nan)
    options = _options(call, shape)
    given = column_major(v) if call.is_v_column_major else v
    actual = run(call.arch, q, k, given, out=out, **_beside_the_result(call), **options)
    expected = attention(q, k, v, **options)
    _assert_close(actual, expected, (q, k, v), options, shape)


def _check_group(call: CompiledCall, rng: torch.Generator) -> None:
    heads_q, heads_k = call.heads
    of_q, of_k = ([pair[side] for pair in call.lengths] for side in (0, 1))
    rows_q, rows_k = ([length + call.gap for length in lengths] for lengths in (of_q, of_k))
    shape = Shape(
        *(len(call.lengths), heads_q, sum(rows_q), max(of_k), call.out_dtype, rng), is_group=True
    )
    dtype_q, dtype_kv = call.torch_dtypes
    q = _random(shape, dtype_q, sum(rows_q), heads_q, call.hdims[0])
    k, v = (_random(shape, dtype_kv, sum(rows_k), heads_k, hdim) for hdim in call.hdims)
    options = _options(call, shape)
    starts = [prefix_sums(rows).tolist()[:-1] for rows in (rows_q, rows_k)]
    sequences: dict[str, Any] = {
        "cu_seqlens_q": prefix_sums(of_q),
        "cu_seqlens_k": prefix_sums(of_k),
        "max_seqlen_k": max(of_k),
    }
    if shape.one_of(2):
        sequences["max_seqlen_q"] = max(of_q)
    if call.gap:
        sequences["cu_seqlens_q_padded"] = prefix_sums(rows_q)
        sequences["cu_seqlens_k_padded"] = prefix_sums(rows_k)
    given = column_major(v) if call.is_v_column_major else v
    actual = run(call.arch, q, k, given, **_beside_the_result(call), **sequences, **options)
    expected = attention_packed(q, k, v, of_q, of_k, *starts, **options)
    _assert_close(actual, expected, (q, k, v), options, shape)


def column_major(v: Tensor) -> Tensor:
    """The same values, keys contiguous, at an odd address, with other numbers between the columns.

    ``v`` is ``(..., keys, heads, hdim)``.
    """
    *batch, seqlen, heads, hdim = v.shape
    filling = torch.nan if v.dtype.is_floating_point else 99
    room = torch.full((*batch, heads, hdim, seqlen + 3), filling).to(v.dtype)
    return room[..., 1 : 1 + seqlen].movedim(-1, -3).copy_(v)


def _random(shape: Shape, dtype: torch.dtype, *sizes: int) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, sizes, generator=shape.rng, dtype=dtype)
    return shape.randn(*sizes).to(dtype)


def _beside_the_result(call: CompiledCall) -> dict[str, Any]:
    """What the reference needs nothing of."""
    return {
        "bf16_cvt": call.bf16_cvt,
        "num_splits": call.num_splits,
        "random_order": call.random_order,
    }


def _options(call: CompiledCall, shape: Shape) -> Options:
    options = {"mask": call.mask} | options_of(call.features, shape)
    dtypes = dict(zip("qkv", (call.dtype, *(2 * (call.kv_dtype or call.dtype,))), strict=True))
    if call.scales:
        for name, dtype in dtypes.items():
            if dtype in ("fp8", "int8"):
                options[f"{name}_descale"] = _scale(call, name, dtype, shape)
    else:  # integers are not to make the softmax one key's
        options["softmax_scale"] = call.hdims[0] ** -0.5
        for name in "qk":
            options["softmax_scale"] /= 64 if dtypes[name] == "int8" else 1
    return options


def _scale(call: CompiledCall, name: str, dtype: str, shape: Shape) -> Tensor:
    """Such that numbers are about as large as normal ones; with room between its elements."""
    heads_q, heads_k = call.heads
    sizes = {
        "one": (1,),
        "each sequence and key head": (shape.batch, heads_k),
        "each head": (heads_q if name == "q" else heads_k,),
    }[call.scales]
    scale = torch.rand(*sizes, 2, generator=shape.rng)[..., 0] + 0.5
    return scale / 64 if dtype == "int8" else scale


def _assert_close(
    actual: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    tensors: tuple[Tensor, ...],
    options: Options,
    shape: Shape,
) -> None:
    # A bound is asked for: the largest scale of a tensor serves all of it.
    q, k, v = (
        x.double() * options.get(f"{name}_descale", torch.ones(1)).max().double()
        for name, x in zip("qkv", tensors, strict=True)
    )
    assert_close(
        *(actual, expected, q, k, v),
        options.get("softmax_scale"),
        dropout_p=options.get("dropout_p", 0.0),
        dtype=shape.dtype,
    )
