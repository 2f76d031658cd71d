"""Calls for compiled kernels, drawn as a whole, on the emulator and against float64."""

import csv
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from closeness import assert_close
from descaled_calls import scaled, scales_of_tokens
from inputs import LAYOUTS, lay_out
from packed_calls import Sequences
from packed_pages import packed_keys, packed_values
from score_features import ALL_MODIFIERS, FEATURES, NO_MODIFIERS, Options, Shape, options_of
from torch import Tensor
from untyped import fmha_fwd

from jitfmha import emulate, jit
from jitfmha.amd.code_object import kernel_metadata
from jitfmha.emulator.wait_states import missing_waits
from jitfmha.jit import BuildSpec
from jitfmha.jit.elf import Elf
from jitfmha.kernels.compiled.traits import Access
from jitfmha.kernels.modifiers import ModifierTraits
from jitfmha.problem.dtypes import DTYPE_NAMES
from jitfmha.problem.float64_reference import Result, attention, attention_packed, unpaged
from jitfmha.problem.score_features import AskedModifiers

ARCHS = ("gfx942", "gfx950")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FP8_DTYPES = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
EIGHT_BITS = ("fp8", "bf8", "int8")
# Of queries, and of keys with values.
OTHER_DTYPES = (
    ("fp32", "fp32"),
    *((dtype, dtype) for dtype in EIGHT_BITS),
    *((dtype, kv_dtype) for dtype in ("bf16", "fp16", "fp32") for kv_dtype in EIGHT_BITS),
)


def eight_bit_dtype(arch: str, name: str) -> torch.dtype:
    """That of the architecture with one of these names."""
    bf8 = {"gfx942": torch.float8_e5m2fnuz, "gfx950": torch.float8_e5m2}
    return {"fp8": FP8_DTYPES[arch], "bf8": bf8[arch], "int8": torch.int8}[name]


def kernel_dtype(arch: str, name: str) -> str:
    """What kernels call it."""
    return DTYPE_NAMES[eight_bit_dtype(arch, name)] if name in EIGHT_BITS else name


# Products take 16 columns of q and 32 of v, tiles 64 and 128; what is no multiple of 8 is loaded
# value by value.
HDIMS = (1, 8, 15, 16, 24, 40, 61, 64, 72, 80, 96, 100, 104, 120, 128, 136, 160, 192, 200, 255, 256)
SEQLENS_Q = (0, 1, 2, 31, 32, 33, 127, 128, 129, 140)
SEQLENS_K = (0, 1, 5, 31, 32, 33, 63, 64, 65, 100)
MASKS: tuple[int | str, ...] = (0, 1, 2, "b:0,0", "b:3,2", "b:40,0", "b:-1,7", "t:5,1", "g:3,40")
HEADS = ((1, 1), (3, 3), (4, 2), (5, 1))
# Those of a latent, and what is made in slices.
WIDE_HDIMS = (257, 300, 512, 571, 576)
SCALES = ("one", "each sequence and key head", "each head", "each token")
MODIFIERS = tuple(sorted(set(FEATURES) - {"everything"}))


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
        given_out: the dtype of the output, where it is another one than a new one's.
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
    given_out: str = ""

    @property
    def torch_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of q, and of k and v."""
        by_name = DTYPES | {"fp32": torch.float32}
        by_name |= {name: eight_bit_dtype(self.arch, name) for name in EIGHT_BITS}
        return by_name[self.dtype], by_name[self.kv_dtype or self.dtype]

    @property
    def plain_out_dtype(self) -> torch.dtype:
        """Of a new output, and what an output is as near as."""
        return DTYPES["bf16"] if self.dtype in EIGHT_BITS else self.torch_dtypes[0]

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the output."""
        given = {"fp32": torch.float32, **DTYPES}.get(self.given_out)
        return given or self.plain_out_dtype


def draw(drawn: random.Random, features: tuple[str, ...] = ()) -> CompiledCall:
    """Any call that compiled kernels serve; ``features`` are those to choose from."""
    is_group = drawn.random() < 0.4
    arch = drawn.choice(ARCHS)
    dtype = drawn.choice(tuple(DTYPES))
    has_roundings = (arch, dtype) == ("gfx942", "bf16")
    lengths = [(drawn.choice(SEQLENS_Q), drawn.choice(SEQLENS_K)) for _ in range(1 + is_group)]
    if not is_group:
        lengths *= drawn.choice((1, 1, 2))
    return CompiledCall(
        arch,
        dtype,
        (drawn.choice(HDIMS), drawn.choice(HDIMS)),
        drawn.choice(HEADS),
        is_group,
        tuple(lengths),
        drawn.choice((0, 3)) if is_group else 0,
        drawn.choice(MASKS),
        tuple("bshd" if is_group else drawn.choice(tuple(LAYOUTS)) for _ in range(4)),
        drawn.choice(("rtne", "rtna", "rtz")) if has_roundings else "rtne",
        tuple(feature for feature in features if drawn.random() < 0.5),
    )


def draw_of_other_dtypes(drawn: random.Random, features: tuple[str, ...]) -> CompiledCall:
    """The same with inputs that are not all bf16 or fp16, or with values in columns."""
    call = draw(drawn, features)
    dtype, kv_dtype = drawn.choice((*OTHER_DTYPES, (call.dtype, call.dtype)))
    has_8_bits = kv_dtype in EIGHT_BITS
    hdims = drawn.choice((*HDIMS, *WIDE_HDIMS)), drawn.choice((*HDIMS, *WIDE_HDIMS))
    if dtype == "fp8" and hdims in ((128, 128), (256, 256)):
        # Ready kernels serve the others, and round probabilities to fp8.
        hdims = hdims[0], hdims[1] - 8
    given_out = drawn.choice(("", "fp16", "fp32")) if dtype in EIGHT_BITS else ""
    return replace(
        call,
        dtype=dtype,
        kv_dtype=kv_dtype,
        hdims=hdims,
        gap=0 if given_out else call.gap,
        given_out=given_out,
        bf16_cvt="rtne",
        scales=drawn.choice(("", *SCALES)) if has_8_bits else "",
        is_v_column_major=(not has_8_bits and dtype != "fp32") or drawn.random() < 0.4,
    )


def draw_of_other_gradients(drawn: random.Random, features: tuple[str, ...]) -> CompiledCall:
    """Calls with gradients in fp32, of wide heads or of values in columns."""
    call = draw(drawn, features)
    dtype = drawn.choice(("fp32", call.dtype))
    hdims = call.hdims if drawn.random() < 0.3 else drawn.choices((*HDIMS, *WIDE_HDIMS), k=2)
    return replace(
        call,
        dtype=dtype,
        hdims=tuple(hdims),
        bf16_cvt=call.bf16_cvt if dtype == "bf16" else "rtne",
        is_v_column_major=drawn.random() < 0.5,
    )


@dataclass
class Inputs:
    """What a drawn call takes, and what float64 makes of it.

    Attributes:
        out: a tensor of NaN.
        options: what float64 knows.
        sequences: the other options: of gm1 where the sequences are.
        reference: the call in float64, of tensors and `options`.
        rows_q, rows_k: of a tensor, which belong to sequences; all of them in gm0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    options: Options
    sequences: dict[str, Any]
    reference: Callable[..., Result]
    rows_q: Tensor
    rows_k: Tensor


def inputs_of(call: CompiledCall, rng: torch.Generator) -> Inputs:
    """Drawn tensors and options of the call."""
    (heads_q, heads_k), (hdim_q, hdim_v), batch = call.heads, call.hdims, len(call.lengths)
    lengths = call.lengths if call.is_group else call.lengths[:1]
    of_q, of_k = ([pair[side] for pair in lengths] for side in (0, 1))
    sequences = Sequences((of_q, of_k), call.gap if call.is_group else 0)
    rows_q, rows_k = ([n] if call.is_group else [batch, n] for n in sequences.rows)
    shape = Shape(batch, heads_q, rows_q[-1], max(of_k), call.plain_out_dtype, rng, call.is_group)
    dtype_q, dtype_kv = call.torch_dtypes
    q, k, v, out = (
        lay_out(_random(shape, dtype, *sizes), layout)
        for dtype, sizes, layout in zip(
            (dtype_q, dtype_kv, dtype_kv, call.out_dtype),
            (
                (*rows_q, heads_q, hdim_q),
                (*rows_k, heads_k, hdim_q),
                (*rows_k, heads_k, hdim_v),
                (*rows_q, heads_q, hdim_v),
            ),
            call.layouts,
            strict=True,
        )
    )
    options, groups, reference = _options(call, shape, {"q": q, "k": k, "v": v}), {}, attention
    if call.is_group:
        groups = sequences.groups | {"max_seqlen_k": max(of_k)}
        if shape.one_of(2):
            groups["max_seqlen_q"] = max(of_q)
        names = ("lengths_q", "lengths_k", "starts_q", "starts_k")
        reference = partial(attention_packed, **dict(zip(names, sequences.spans, strict=True)))
    used = (sequences.used_rows(side) for side in (0, 1))
    return Inputs(q, k, v, out.fill_(torch.nan), options, groups, reference, *used)


def check(call: CompiledCall, rng: torch.Generator) -> None:
    """Run it with the sanitizer, by a compiled kernel, and compare out and lse with float64."""
    given = inputs_of(call, rng)
    q, k, v = given.q, given.k, given.v
    actual = run(
        *(call.arch, q, k, column_major(v) if call.is_v_column_major else v),
        # Rows between sequences are 0 in a new tensor alone.
        out=None if call.is_group and call.gap else given.out,
        bf16_cvt=call.bf16_cvt,
        num_splits=call.num_splits,
        random_order=call.random_order,
        **given.sequences,
        **given.options,
    )
    check_call(call, given, actual)


def check_call(call: CompiledCall, given: Inputs, actual: Result) -> None:
    """Compare a call's out and lse with float64.

    Probabilities times the scales of tokens are rounded to bf16 where fp16 lacks the range.
    """
    tensors = given.q, given.k, given.v
    assert actual[0].dtype == call.out_dtype
    dtype = call.plain_out_dtype
    if call.scales == "each token" and dtype == torch.float16:
        dtype = torch.bfloat16
    actual = actual[0].to(dtype), actual[1]
    expected = given.reference(*tensors, **given.options)
    assert_near(actual, expected, *scaled(tensors, given.options), given.options, dtype)


def run(
    arch: str, *tensors: Tensor, random_order: int | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Out and lse of a call; the sanitizer has nothing to say."""
    with emulate(arch, check=True, random_order=random_order) as emulated:
        out, lse = fmha_fwd(*tensors, return_lse=True, **options)
        assert emulated.findings() == ()
    return out, lse


def check_tensors(arch: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """The same for tensors of gm0."""
    actual = run(arch, q, k, v, **options)
    assert_near(actual, attention(q, k, v, **options), q, k, v, options)


def check_pages(
    arch: str,
    rng: torch.Generator,
    page_size: int,
    hdims: tuple[int, int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    features: tuple[str, ...] = (),
    scales: str = "",
    is_v_column_major: bool = False,
    is_packed: bool = False,
) -> None:
    """The same for pages in any order, used by several sequences, beside which other keys lie."""
    lengths_q, lengths_k = [1, 33, 0, 5], [70, 0, 20, 33]
    sequences = Sequences((lengths_q, lengths_k))
    heads_q, heads_k, batch = 4, 2, 4
    most = -(-max(lengths_k) // page_size)
    kept = torch.float16 if dtype == torch.int8 else dtype
    shape = Shape(batch, heads_q, sum(lengths_q), max(lengths_k), kept, rng, is_group=True)
    q = _random(shape, kept, sum(lengths_q), heads_q, hdims[0])
    k, v = (_random(shape, dtype, most + 3, heads_k, page_size, n).transpose(1, 2) for n in hdims)
    table = torch.randint(most + 3, (batch, most + 2), generator=rng, dtype=torch.int32)
    options = options_of(features, shape)
    packed = [unpaged(x, table, lengths_k) for x in (k, v)]
    bounds, of_packed = (q, *packed), dict(options)
    if scales == "each token":
        for name, x in (("k_descale", k), ("v_descale", v)):
            options[name] = scales_of_tokens(rng, x)
            of_packed[name] = unpaged(options[name], table, lengths_k)
        bounds = scaled(bounds, of_packed)
    elif dtype == torch.int8:
        options["softmax_scale"] = of_packed["softmax_scale"] = 0.003
    given = k, column_major(v) if is_v_column_major else v
    if is_packed:
        given = packed_keys(k), packed_values(v)
    actual = run(
        *(arch, q, *given),
        block_table=table,
        num_splits=shape.one_of(4),
        max_seqlen_k=max(lengths_k),
        **sequences.groups,
        **options,
    )
    expected = attention_packed(q, *packed, *sequences.spans, **of_packed)
    if "v_descale" in of_packed:  # as in check_call
        kept = torch.bfloat16
        actual = actual[0].to(kept), actual[1]
    assert_near(actual, expected, *bounds, of_packed, kept)


def assert_near(
    actual: Result,
    expected: Result,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    dtype: torch.dtype | None = None,
) -> None:
    """As near as rounding explains; ``dtype`` is the output's where it is not q's."""
    assert_close(
        *(actual, expected, q, k, v),
        options.get("softmax_scale"),
        dropout_p=options.get("dropout_p", 0.0),
        dtype=dtype,
    )


def forward_kernels(*hdims: tuple[int, int]) -> list[tuple[Any, ...]]:
    """Traits of kernels: arch, hdims, is_masked, access, modifiers, stacks_heads."""
    return [
        (arch, each, is_masked, access, modifiers, stacks_heads)
        for arch in ARCHS
        for each in hdims
        for is_masked in (False, True)
        for access in get_args(Access)
        for modifiers in (
            NO_MODIFIERS,
            ModifierTraits("compiled", AskedModifiers("bf16")),
            ALL_MODIFIERS,
        )
        # Wide pages are for calls without biases and dropout.
        if "wide" not in access or modifiers == NO_MODIFIERS
        for stacks_heads in (False, True)
    ]


def assert_nothing_is_spilled(
    spec: BuildSpec, *kernels: str, most_vector_registers: int = 0, most_scalars: int = 0
) -> None:
    """What goes to scratch memory, or scalars to vector registers, would be in every loop's way.

    ``spilling_kernels.csv`` has those in which something does still, and how much. Nor does a path
    lack wait states, which whoever looks at every kernel of a family looks at, too.
    """
    code_object = jit.read(spec)
    assert missing_waits(code_object) == []
    elf = Elf(code_object)
    for kernel in kernels:
        metadata = kernel_metadata(elf, kernel)
        assert metadata is not None
        scratch, scalars, vector_registers = SPILLING.get(
            kernel, (0, most_scalars, most_vector_registers)
        )
        assert metadata[".private_segment_fixed_size"] <= scratch, kernel
        assert metadata[".sgpr_spill_count"] <= scalars, kernel
        assert metadata[".vgpr_spill_count"] <= vector_registers, kernel


def _spilling() -> dict[str, tuple[int, ...]]:
    with Path(__file__).with_name("spilling_kernels.csv").open(newline="") as file:
        _, *rows = csv.reader(file)
    return {kernel: tuple(map(int, counts)) for kernel, *counts in rows}


SPILLING = _spilling()


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


def _options(call: CompiledCall, shape: Shape, qkv: Mapping[str, Tensor]) -> Options:
    options = {"mask": call.mask} | options_of(call.features, shape)
    dtypes = dict(zip("qkv", (call.dtype, *(2 * (call.kv_dtype or call.dtype,))), strict=True))
    if call.scales:
        for name, dtype in dtypes.items():
            if dtype in EIGHT_BITS:
                options[f"{name}_descale"] = _scale(call, name, qkv[name], shape)
    else:  # integers are not to make the softmax one key's
        options["softmax_scale"] = call.hdims[0] ** -0.5
        for name in "qk":
            options["softmax_scale"] /= 64 if dtypes[name] == "int8" else 1
    return options


def _scale(call: CompiledCall, name: str, of: Tensor, shape: Shape) -> Tensor:
    """Such that numbers are about as large as normal ones.

    Elements are not side by side, and as far apart as those of no other tensor's.
    """
    if call.scales == "each token" and name != "q":
        return scales_of_tokens(shape.rng, of)
    heads_q, heads_k = call.heads
    sizes = {
        **dict.fromkeys(("one", "each token"), (1,)),
        "each sequence and key head": (shape.batch, heads_k),
        "each head": (heads_q if name == "q" else heads_k,),
    }[call.scales]
    room = 2 + "qkv".index(name)
    scale = torch.rand(*sizes, room, generator=shape.rng).add_(0.5)[..., 0]
    return scale.div_(64) if of.dtype == torch.int8 else scale
