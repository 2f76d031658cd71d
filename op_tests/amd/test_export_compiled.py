"""Compiled kernels in an exported library: against float64, and gradients as Python has them."""

import os
import random
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled_calls import (
    FP8_DTYPES,
    CompiledCall,
    Inputs,
    assert_near,
    check_call,
    column_major,
    inputs_of,
    kernel_dtype,
)
from exported_calls import (
    CVTS,
    DTYPES,
    KEY_TYPES,
    BackwardArguments,
    CallError,
    Descale,
    ExportedCalls,
    ForwardArguments,
    Strides,
    build_shared,
    build_shim,
    set_descale,
    set_scores,
    set_tensor,
    write_library,
)
from inputs import LAYOUTS
from packed_calls import Sequences
from packed_pages import packed_keys, packed_values
from score_features import Shape
from torch import Tensor
from untyped import explain, fmha_bwd, fmha_fwd

from jitfmha import emulate, jit
from jitfmha.ahead.combination import Combination
from jitfmha.amd.tree import AITER_ASM_DIR, HSA_DIR
from jitfmha.emulator.library import load
from jitfmha.emulator.session import DEVICES
from jitfmha.export.kernels import Selection, forward_passes
from jitfmha.kernels import compiled
from jitfmha.kernels.compiled.split_choice import SplitChoice
from jitfmha.kernels.compiled.traits import ForwardTraits, kernel_spec, row_of_built
from jitfmha.layers.split_keys import mha_fwd_splitkv
from jitfmha.planning.target import TARGET_HERE
from jitfmha.problem.arguments import Descales
from jitfmha.problem.dtypes import DTYPE_NAMES
from jitfmha.problem.features import Feature
from jitfmha.problem.float64_reference import attention_packed, unpaged
from jitfmha.problem.mask import CAUSAL_MASK, NO_MASK, Mask, parse_mask

NOTHING = Selection(("gfx942",), hdims=((1, 1),), directions=())
BOTH = Selection(("gfx942",), dtypes=("bf16",), hdims=((96, 40),), masks=("causal",))
FORWARD = Selection(("gfx950",), ("forward",), masks=("none",), modes=("gm0",))
SLICED = FORWARD._replace(dtypes=("fp16",), hdims=((300, 280),))
MODIFIED = ("bias", "alibi", "softcap", "dropout")
LATENT = Selection(
    *(("gfx950",), ("forward",), ("bf16",), ((264, 257),)),
    masks=("none",),
    modes=("gm1",),
    few_queries=True,
)
TURNS = Selection(
    *(("gfx942",), ("forward",), ("fp8",), ((64, 64),)),
    masks=("causal",),
    modes=("gm1",),
    features=(("paged_keys",), ("packed_pages",)),
)
FAR = Selection(
    ("gfx942",), dtypes=("bf16",), hdims=((24, 24),), masks=("none",), modes=("gm0",), far_rows=True
)
LISTED = Selection(("gfx942",), ("forward",), ("bf16",), ((80, 48),), ("causal",))
LISTED = LISTED._replace(persistent=True, features=((),))
EXPORTED = (
    BOTH._replace(modes=("gm0",), features=(MODIFIED, ("sink_tokens",))),
    BOTH._replace(modes=("gm1",), features=((), ("sinks",), ("column_major_v", "boolean_bias"))),
    FORWARD._replace(dtypes=("fp32",), hdims=((24, 24),)),
    Selection(
        *(("gfx942",), ("forward", "backward"), ("bf16",), ((96, 40),)),
        masks=("none",),
        modes=("gm0",),
        features=(("bias",),),
        bias_dtype="fp32",
    ),
    SLICED,
    BOTH._replace(directions=("forward",), features=(("split_results",),)),
    FORWARD._replace(dtypes=("bf16",), hdims=((72, 40),), kv_dtype="fp8"),
    FORWARD._replace(dtypes=("bf16",), hdims=((72, 40),), kv_dtype="bf8"),
    FORWARD._replace(dtypes=("fp16",), hdims=((72, 40),), kv_dtype="int8", features=(("alibi",),)),
    FORWARD._replace(dtypes=("bf16",), hdims=((576, 512),), modes=("gm1",)),
    FORWARD._replace(dtypes=("fp8",), hdims=((72, 40),)),
    FORWARD._replace(dtypes=("fp8",), hdims=((72, 40),), out_dtypes=("fp16",)),
    FORWARD._replace(
        dtypes=("bf8",),
        hdims=((40, 40),),
        features=(("bias",),),
        out_dtypes=("fp32",),
        bias_dtype="fp32",
    ),
    FORWARD._replace(
        dtypes=("int8",),
        hdims=((64, 40),),
        features=(
            *((), ("int8_probabilities",), ("token_descales",)),
            ("int8_probabilities", "token_descales"),
        ),
    ),
    FORWARD._replace(
        dtypes=("fp16",),
        hdims=((72, 72),),
        modes=("gm1",),
        features=(("paged_keys",), ("packed_pages",)),
    ),
    LATENT,
    TURNS,
    FAR,
    LISTED,
)
PLAIN = {"hdim_q": 96, "hdim_v": 40, "softmax_scale": 1.0, "mask": 2}
PLAIN_MASKS = (1, 2, "b:0,0", "b:40,0", "t:5,1", "g:3,40", "b:-1,7")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> ExportedCalls:
    """A library with the kernels that ``EXPORTED`` names, and no others.

    With these head dimensions it has kernels for latents, those with turns, and persistent
    workgroups alone.
    """
    for variable in (HSA_DIR, AITER_ASM_DIR):
        if variable in os.environ:
            pytest.skip(f"{variable} is set, and exports have the kernels of this package")
    folder = tmp_path_factory.mktemp("export") / "compiled"

    def keeps(traits: ForwardTraits) -> bool:
        own = {
            LATENT.hdims: traits.row_blocks is not None,
            TURNS.hdims: traits.takes_turns,
            LISTED.hdims: traits.lists_work,
        }
        return own.get(((traits.hdim_q, traits.hdim_v),), True)

    write_library(folder, NOTHING, EXPORTED, version="4.5.6", keeps=keeps)
    return ExportedCalls(build_shim(folder, build_shared(folder)), load("plain")._name)


def drawn_call(drawn: random.Random, call: CompiledCall) -> CompiledCall:
    """With any lengths, heads, layouts, splits and masks."""
    lengths = [(drawn.choice((0, 1, 33, 129)), drawn.choice((0, 5, 64, 200))) for _ in range(2)]
    masks = PLAIN_MASKS if call.mask else (0,)
    return replace(
        call,
        heads=drawn.choice(((1, 1), (4, 2), (3, 1))),
        lengths=tuple(lengths if call.is_group else lengths[:1] * drawn.choice((1, 2))),
        gap=drawn.choice((0, 3)) if call.is_group else 0,
        mask=drawn.choice(masks),
        layouts=tuple(
            "bshd" if call.is_group else drawn.choice(tuple(LAYOUTS)) for _ in call.layouts
        ),
        num_splits=drawn.choice((0, 1, 3)),
    )


def kind(
    arch: str,
    dtype: str,
    hdims: tuple[int, int],
    mask: int | str,
    features: tuple[str, ...],
    **other: Any,
) -> CompiledCall:
    is_group = other.pop("is_group", False)
    plain = CompiledCall(
        *(arch, dtype, hdims, (1, 1), is_group, ((1, 1),), 0, mask),
        *(("bshd",) * 4, "rtne", features),
    )
    return replace(plain, **other)


GRADIENTS = (
    kind("gfx942", "bf16", (96, 40), 2, MODIFIED),
    kind("gfx942", "bf16", (96, 40), 0, ("bias",)),
    kind("gfx942", "bf16", (96, 40), 2, ("sink_tokens",)),
    kind("gfx942", "bf16", (96, 40), 2, (), is_group=True),
    kind("gfx942", "bf16", (96, 40), 2, ("sink",), is_group=True),
    kind(
        *("gfx942", "bf16", (96, 40), 2, ("boolean_bias",)),
        is_group=True,
        is_v_column_major=True,
    ),
)
KINDS = (
    *GRADIENTS,
    kind("gfx950", "fp32", (24, 24), 0, ()),
    kind("gfx950", "fp16", (300, 280), 0, ()),
    kind("gfx950", "fp8", (72, 40), 0, (), scales="each sequence and key head"),
    kind("gfx950", "fp8", (72, 40), 0, (), scales="one", given_out="fp16"),
    kind("gfx950", "bf8", (40, 40), 0, ("bias",), scales="each head", given_out="fp32"),
    kind("gfx950", "int8", (64, 40), 0, (), scales="one"),
    kind("gfx950", "bf16", (72, 40), 0, (), kv_dtype="fp8", scales="one"),
    kind("gfx950", "bf16", (72, 40), 0, (), kv_dtype="bf8", scales="each head"),
    kind("gfx950", "fp16", (72, 40), 0, ("alibi",), kv_dtype="int8", scales="each head"),
)


def drawn_inputs(call: CompiledCall, rng: torch.Generator) -> Inputs:
    """A bias has the dtype of the output where there are other features, as is exported."""
    given = inputs_of(call, rng)
    bias = given.options.get("bias")
    if bias is not None and bias.dtype != torch.bool:
        dtype = torch.float32 if call.features == ("bias",) else call.plain_out_dtype
        given.options["bias"] = bias.to(dtype)
    # In the library it is a float.
    scale = given.options.get("softmax_scale") or call.hdims[0] ** -0.5
    given.options["softmax_scale"] = torch.tensor(scale).item()
    if call.is_v_column_major:
        given.v = column_major(given.v)
    return given


def arguments_of(call: CompiledCall, given: Inputs, kind_of: Any) -> Any:
    """What both directions have."""
    arguments = kind_of(
        dtype=DTYPES[DTYPE_NAMES[given.q.dtype]],
        mode=int(call.is_group),
        bf16_cvt=CVTS[call.bf16_cvt],
        batch=len(call.lengths),
        heads_q=call.heads[0],
        heads_k=call.heads[1],
        seqlen_q=given.q.shape[-3],
        seqlen_k=given.k.shape[-3],
        hdim_q=call.hdims[0],
        hdim_v=call.hdims[1],
        softmax_scale=given.options["softmax_scale"],
        v_column=given.v.stride(-1),
    )
    set_mask(arguments, parse_mask(given.options["mask"]))
    for name in ("q", "k", "v"):
        set_tensor(arguments, name, getattr(given, name))
    for name, x in given.sequences.items():
        if isinstance(x, Tensor):
            set_tensor(arguments, name, x)
        else:
            setattr(arguments, name, max(x, 1))  # 0: nobody knows
    set_scores(arguments, given.options)
    return arguments


def set_mask(arguments: Any, mask: Mask) -> None:
    if not mask.is_none:
        arguments.mask = 3 if mask.top_left else 4
        sides = -1 if mask.left is None else mask.left, -1 if mask.right is None else mask.right
        arguments.window_left, arguments.window_right = sides


def launch(calls: ExportedCalls, arch: str, arguments: Any, name: str | None = None) -> str:
    """The kernel's name; ``name`` is that of the call, where it is no plain one."""
    assert load("plain").hipSetDevice(DEVICES[arch]) == 0
    plan = calls.plan(arguments)
    workspace = torch.full((plan.workspace_bytes // 4,), torch.nan)
    arguments.workspace, arguments.workspace_bytes = workspace.data_ptr(), workspace.nbytes
    calls.launch(arguments, name)
    return str(plan.kernel.decode())


@pytest.mark.parametrize("of_kind", KINDS)
def test_forward(of_kind, calls, rng):
    call = drawn_call(random.Random(rng.initial_seed()), of_kind)
    given = drawn_inputs(call, rng)
    check_forward(calls, call, given)


def set_descales(arguments: ForwardArguments, given: Inputs) -> None:
    for name in Descales._fields:
        scale = given.options.get(f"{name}_descale")
        if scale is not None:
            set_descale(arguments, f"{name}_descale", scale)


def check_forward(calls: ExportedCalls, call: CompiledCall, given: Inputs) -> None:
    arguments = arguments_of(call, given, ForwardArguments)
    arguments.num_splits = call.num_splits
    arguments.key_type = KEY_TYPES.index(call.kv_dtype)
    arguments.out_dtype = DTYPES[DTYPE_NAMES[given.out.dtype]]
    set_descales(arguments, given)
    lse = torch.full((*given.q.shape[:-3], call.heads[0], given.q.shape[-3]), torch.nan)
    set_tensor(arguments, "out", given.out)
    arguments.lse = lse.data_ptr()
    assert "_compiled_" in launch(calls, call.arch, arguments)
    given.out.movedim(-3, 0)[~given.rows_q] = 0  # as in a new tensor
    lse.movedim(-1, 0)[~given.rows_q] = -torch.inf
    check_call(call, given, (given.out, lse))


# Of which none comes ready, that Python may take in their place.
FEW = (
    kind("gfx950", "bf16", (64, 40), 0, ()),
    kind("gfx942", "fp16", (128, 72), 2, ()),
    kind("gfx942", "bf16", (64, 40), 0, (), kv_dtype="fp8", scales="one"),
    kind("gfx950", "bf16", (192, 96), 2, (), is_group=True),
    kind("gfx950", "int8", (64, 64), 2, ("sink",), scales="each sequence and key head"),
)


@pytest.mark.sample("of_kind", FEW, 1)
def test_few_queries_are_those_of_python(of_kind, rng, tmp_path):
    """Decoding takes the same kernel and as many splits, so that all bits are the same."""
    selection = Selection(
        *((of_kind.arch,), ("forward",), (of_kind.dtype,), (of_kind.hdims,)),
        masks=("causal" if of_kind.mask else "none",),
        modes=("gm1" if of_kind.is_group else "gm0",),
        features=(("sinks",),) if of_kind.features else None,
        kv_dtype=of_kind.kv_dtype or None,
        few_queries=True,
    )
    folder = tmp_path / "few"
    write_library(folder, NOTHING, (selection,))
    calls = ExportedCalls(build_shim(folder, build_shared(folder)), load("plain")._name)
    drawn = random.Random(rng.initial_seed())
    for heads, queries, word in (
        ((3, 3), 7, "_decode1_"),
        ((8, 2), 3, "_stacked_decode1_"),
        ((8, 1), 4, "_stacked_decode2_"),
        ((16, 1), 4, "_stacked_decode2_"),  # two workgroups have them, since units are idle
        ((16, 1), 8, "_stacked_decode4_"),
        ((16, 1), 16, "_stacked_gm"),
        ((4, 2), 150, "_gm"),
    ):
        length = queries, drawn.choice((1, 100, 129, 1500))
        call = replace(of_kind, heads=heads, lengths=(length,) * drawn.choice((1, 2)))
        given = drawn_inputs(call, rng)
        arguments = arguments_of(call, given, ForwardArguments)
        arguments.key_type = KEY_TYPES.index(call.kv_dtype)
        set_descales(arguments, given)
        lse = torch.full((*given.q.shape[:-3], heads[0], given.q.shape[-3]), torch.nan)
        set_tensor(arguments, "out", given.out)
        arguments.lse = lse.data_ptr()
        kernel = launch(calls, call.arch, arguments)
        with emulate(call.arch):
            inputs = given.q, given.k, given.v
            plan = explain(*inputs, **given.options, **given.sequences).plan
            expected = fmha_fwd(*inputs, return_lse=True, **given.options, **given.sequences)
        assert kernel == plan.kernel
        if max(of_kind.hdims) > 128:  # of which there is room for fewer rows
            word = word.replace("decode4", "decode2")
        assert word in kernel
        assert ("stacked" in kernel) == ("stacked" in word)
        assert torch.equal(given.out, expected[0])
        assert torch.equal(lse, expected[1])
    if not of_kind.is_group:
        splits = {check_splits(calls, of_kind, *drawn_sizes(drawn)) for _ in range(20)}
        assert len(splits) > 2
        # About half as many workgroups as units, which have eight waves where that is quicker.
        check_splits(calls, of_kind, (8, 8), 16, (1, 5000))


def test_latents_are_those_of_python(calls, rng):
    """Where values are the first columns of keys; where they are others, there is no kernel."""
    drawn = random.Random(rng.initial_seed())
    for heads, queries, blocks in ((16, 1, 1), (5, 4, 2), (24, 2, 4)):
        lengths = (queries, drawn.choice((33, 150))), (queries, drawn.choice((1, 1500)))
        call = kind("gfx950", "bf16", (264, 257), 0, (), is_group=True, lengths=lengths)
        call = replace(call, heads=(heads, 1))
        given = drawn_inputs(call, rng)
        given.v = given.k[..., :257]
        arguments = arguments_of(call, given, ForwardArguments)
        options = given.options | given.sequences
        inputs = given.q, given.k, given.v
        kernel = check_like_python(calls, call.arch, arguments, inputs, **options)
        assert f"_latent{blocks}_" in kernel
    arguments.v += 2
    with pytest.raises(CallError, match="no kernel for bf16, hdim 264x257"):
        calls.plan(arguments)


def drawn_sizes(drawn: random.Random) -> tuple[tuple[int, int], int, tuple[int, int]]:
    """Heads, batch, and lengths of decoding."""
    heads = drawn.choice(((8, 8), (32, 4), (16, 1)))
    lengths = drawn.choice((1, 4)), drawn.randint(1000, 60000)
    return heads, drawn.choice((1, 3, 16)), lengths


def check_splits(
    calls: ExportedCalls,
    of_kind: CompiledCall,
    heads: tuple[int, int],
    batch: int,
    lengths: tuple[int, int],
) -> int:
    """A plan of decoding has as many splits as in Python, whatever its size."""
    asked = {Feature.SINKS} if of_kind.features else set()
    names = [kernel_dtype(of_kind.arch, x) for x in (of_kind.dtype, of_kind.kv_dtype) if x]
    if of_kind.scales:
        asked.add(Feature.DESCALES)
    names_of_sizes = "batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k"
    sizes = dict(zip(names_of_sizes, (batch, *heads, *lengths), strict=True))
    mask = CAUSAL_MASK if of_kind.mask else NO_MASK
    features = frozenset(asked)
    wanted = Combination(*(names[0], names[-1], *of_kind.hdims, mask), features=features, **sizes)
    with emulate(of_kind.arch):
        target = TARGET_HERE.get()
    problem = wanted.problem()
    traits = ForwardTraits.of(problem, target.arch, target.compute_units)
    row = row_of_built(traits, jit.read(kernel_spec(traits)))
    choice = SplitChoice(
        *(problem, target, row, traits.slices, traits.made_columns),
        streams=traits.decode_blocks is not None,
    )
    arguments = ForwardArguments(
        dtype=DTYPES[names[0]],
        key_type=KEY_TYPES.index(of_kind.kv_dtype),
        mask=of_kind.mask,
        hdim_q=of_kind.hdims[0],
        hdim_v=of_kind.hdims[1],
        softmax_scale=1.0,
        **sizes,
    )
    if of_kind.features:
        arguments.sink = 1
    plan = calls.plan(arguments)
    num_splits, floats = choice.splits(sizes["seqlen_q"], sizes["seqlen_k"])
    assert plan.kernel.decode() == traits.name
    assert (plan.num_splits, plan.workspace_bytes) == (num_splits, 4 * floats)
    return num_splits


# Backward finds sinks in the lse: no kernel of its own has them.
WITH_SINKS = kind("gfx942", "bf16", (96, 40), 2, ("sink_tokens", "sink"))


@pytest.mark.parametrize("of_kind", [*GRADIENTS, WITH_SINKS])
def test_backward_is_that_of_python(of_kind, calls, rng):
    call = drawn_call(random.Random(rng.initial_seed()), of_kind)
    if of_kind is WITH_SINKS:  # more rows than a workgroup takes at a time
        call = replace(call, lengths=((300, 64),) * 2)
    given = drawn_inputs(call, rng)
    out, lse = given.reference(given.q, given.k, given.v, **given.options)
    out, lse = out.to(given.q.dtype), lse.float()
    dout = torch.randn(out.shape, generator=rng).to(out.dtype)
    dlse = torch.randn(lse.shape, generator=rng) if rng.initial_seed() % 3 else None
    rooms = {
        f"d{name}": torch.full(x.shape, -77, dtype=x.dtype)
        for name, x in (("q", given.q), ("k", given.k), ("v", given.v))
    }
    bias = given.options.get("bias")
    has_dbias = bias is not None and bias.dtype != torch.bool and given.q.shape[-3] > 0
    dbias = None
    if has_dbias:
        # Each score has a gradient of its own, so that nothing is summed up behind the kernels.
        full = len(call.lengths), call.heads[0], given.q.shape[-3], given.k.shape[-3]
        given.options["bias"] = bias.expand(full).contiguous()
        dbias = torch.zeros(full, dtype=torch.float32)
    arguments = arguments_of(call, given, BackwardArguments)
    for name, x in (("out", out), ("dout", dout), *rooms.items()):
        set_tensor(arguments, name, x)
    arguments.lse = lse.data_ptr()
    if dlse is not None:
        arguments.dlse = dlse.data_ptr()
    if dbias is not None:
        arguments.dbias = dbias.data_ptr()
    dsink = None
    if "sink" in given.options:
        dsink = torch.full_like(given.options["sink"], torch.nan)
        arguments.dsink = dsink.data_ptr()
    assert "_compiled_" in launch(calls, call.arch, arguments)
    found = {name: x.clone() for name, x in rooms.items()}
    for x in rooms.values():
        x.fill_(-77)
    if dbias is not None:
        found["dbias"] = dbias.to(given.q.dtype)
        rooms["dbias"] = torch.full_like(found["dbias"], torch.nan)
    inputs = dout, given.q, given.k, given.v, out, lse
    expected = None if dsink is None else torch.empty_like(dsink)
    with emulate(call.arch):
        fmha_bwd(*inputs, dlse=dlse, dsink=expected, **rooms, **given.options, **given.sequences)
    for name, x in rooms.items():
        assert torch.equal(found[name], x), name
    if dsink is not None and expected is not None:
        # Products of float32, added up with what is left of each, beside those of float64.
        terms = (out.double() * dout).abs().sum(-1).transpose(-1, -2)
        terms += 0 if dlse is None else dlse.abs()
        rows = terms.nan_to_num().sum(-1).view(-1, call.heads[0]).sum(0)
        assert ((dsink - expected).abs() <= 2**-20 * rows).all()


@pytest.mark.parametrize(("page_size", "kernel"), [(16, "_wide_pages_"), (5, "_paged_")])
def test_pages(page_size, kernel, calls, rng):
    lengths_q, lengths_k = [1, 33, 0, 5], [70, 0, 20, 33]
    sequences = Sequences((lengths_q, lengths_k))
    shape = Shape(4, 4, sum(lengths_q), max(lengths_k), torch.float16, rng, is_group=True)
    most = -(-max(lengths_k) // page_size)
    q, out = (shape.randn(sum(lengths_q), 4, 72).half() for _ in range(2))
    k, v = (shape.randn(most + 3, 2, page_size, 72).half().transpose(1, 2) for _ in "kv")
    table = torch.randint(most + 3, (4, most + 2), generator=rng, dtype=torch.int32)
    options = {"mask": 0, "softmax_scale": 0.125}
    call = kind("gfx950", "fp16", (72, 72), 0, (), is_group=True, lengths=((1, 1),) * 4)
    call = replace(call, heads=(4, 2))
    groups = sequences.groups | {"max_seqlen_k": max(lengths_k)}
    given = Inputs(q, k, v, out.fill_(torch.nan), options, groups, attention_packed, q, k)
    arguments = arguments_of(call, given, ForwardArguments)
    arguments.seqlen_k = sum(lengths_k)
    arguments.block_table, arguments.block_table_stride = table.data_ptr(), table.stride(0)
    arguments.page_size, arguments.num_pages = page_size, most + 3
    for name, x in (("k", k), ("v", v)):
        page, seq, head, _ = x.stride()
        strides = getattr(arguments, f"{name}_strides")
        strides.batch, strides.seq, strides.head = page, seq, head
    lse = torch.full((4, sum(lengths_q)), torch.nan)
    set_tensor(arguments, "out", out)
    arguments.lse, arguments.num_splits = lse.data_ptr(), shape.one_of(4)
    assert kernel in launch(calls, "gfx950", arguments, "batch_prefill")
    packed = [unpaged(x, table, lengths_k) for x in (k, v)]
    expected = attention_packed(q, *packed, *sequences.spans, **options)
    assert_near((out, lse), expected, q, *packed, options)
    of_table = out.clone(), lse.clone()
    counts = [-(-count // page_size) for count in lengths_k]
    lists = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
    arguments.block_table, arguments.block_table_stride = lists.data_ptr(), -1
    with pytest.raises(CallError, match=r"^invalid_argument: cu_seqlens_k_padded, .* is null"):
        calls.launch(arguments)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    set_tensor(arguments, "cu_seqlens_k_padded", starts)
    out.fill_(torch.nan)
    lse.fill_(torch.nan)
    launch(calls, "gfx950", arguments, "batch_prefill")
    assert torch.equal(out, of_table[0])
    assert torch.equal(lse, of_table[1])


def test_packed_pages_are_those_of_python(calls, rng):
    lengths_q, lengths_k = [150, 129], [70, 33]
    sequences = Sequences((lengths_q, lengths_k))
    q = torch.randn(sum(lengths_q), 2, 72, generator=rng).half()
    rows = (torch.randn(9, 16, 1, 72, generator=rng).half() for _ in "kv")
    k, v = (make(x) for make, x in zip((packed_keys, packed_values), rows, strict=True))
    table = torch.randint(9, (2, 5), generator=rng, dtype=torch.int32)
    call = kind("gfx950", "fp16", (72, 72), 0, (), is_group=True, lengths=((1, 1),) * 2)
    out, options = torch.full_like(q, torch.nan), {"mask": 0, "softmax_scale": 0.125}
    groups = sequences.groups | {"max_seqlen_k": 70}
    given = Inputs(q, q[:, :1], q[:, :1], out, options, groups, attention_packed, q, q)
    arguments = arguments_of(replace(call, heads=(2, 1)), given, ForwardArguments)
    arguments.block_table, arguments.block_table_stride = table.data_ptr(), table.stride(0)
    arguments.page_size, arguments.num_pages, arguments.has_packed_pages = 16, 9, True
    arguments.seqlen_k = sum(lengths_k)
    for name, x in (("k", k), ("v", v)):
        setattr(arguments, name, x.data_ptr())
        setattr(arguments, f"{name}_strides", Strides(x.stride(0), 99, x.stride(1)))
    check_like_python(
        calls, call.arch, arguments, (q, k, v), block_table=table, **options, **groups
    )
    assert b"_wide_packed_pages_" in calls.plan(arguments).kernel
    arguments.page_size = 1 << 24  # of which a buffer reaches no page
    assert b"_wide_packed_pages_" not in calls.plan(arguments).kernel
    arguments.page_size = 12
    with pytest.raises(CallError, match="page_size is 12; packed pages are in pieces of 16 bytes"):
        calls.plan(arguments)


@pytest.mark.parametrize("form", ["each token", "tokens of k", "tokens of v", "each head", "k"])
def test_scales_are_those_of_python(form, calls, rng):
    scales = "each head" if form in ("each head", "k") else "each token"
    call = kind("gfx950", "int8", (64, 40), 0, (), scales=scales, lengths=((129, 70),) * 2)
    given = drawn_inputs(replace(call, heads=(4, 2)), rng)
    if form == "tokens of k":
        given.options["v_descale"] = torch.full((1,), 1 / 64)
    elif form == "tokens of v":
        given.options["k_descale"] = torch.rand(2, 2, generator=rng) / 64
    elif form == "k":  # the others are 1
        del given.options["q_descale"], given.options["v_descale"]
    arguments = arguments_of(replace(call, heads=(4, 2)), given, ForwardArguments)
    set_descales(arguments, given)
    inputs = given.q, given.k, given.v
    kernel = check_like_python(calls, call.arch, arguments, inputs, **given.options)
    assert ("token_k" in kernel) == (form in ("each token", "tokens of k"))
    assert ("token_v" in kernel) == (form in ("each token", "tokens of v"))


@pytest.mark.parametrize(
    ("name", "descale", "text"),
    [
        ("q", Descale(8, token=1), "q_descale.token is 1; tokens are those of k and v"),
        ("k", Descale(8, token=-1), "k_descale.token is -1; it is not negative"),
        ("v", Descale(8, of_query_heads=True), "v_descale.of_query_heads is true"),
    ],
)
def test_scales_that_nothing_has(name, descale, text, calls):
    assert load("plain").hipSetDevice(DEVICES["gfx950"]) == 0
    arguments = ForwardArguments(
        **dict.fromkeys(("batch", "heads_q", "heads_k", "seqlen_q", "q", "out"), 1),
        dtype=5,
        hdim_q=64,
        hdim_v=40,
        softmax_scale=1.0,
        **{f"{x}_descale": descale if x == name else Descale(8) for x in "qkv"},
    )
    with pytest.raises(CallError, match=f"^invalid_argument: {text}"):
        calls.launch(arguments)


@pytest.mark.parametrize("page_size", [16, 5, 32])
def test_turns_are_those_of_python(page_size, calls, rng):
    """Of queries that fill tiles; 32: in packed pages."""
    lengths_q, lengths_k = [300, 260], [200, 100]
    sequences = Sequences((lengths_q, lengths_k))
    q = torch.randn(560, 2, 64, generator=rng).to(FP8_DTYPES["gfx942"])
    most = -(-200 // page_size)
    k, v = (torch.randn(most + 3, page_size, 1, 64, generator=rng).to(q.dtype) for _ in "kv")
    if page_size == 32:
        k, v = packed_keys(k), packed_values(v)
    table = torch.randint(most + 3, (2, most), generator=rng, dtype=torch.int32)
    options = {"mask": "causal", "softmax_scale": 0.125}
    options |= {f"{x}_descale": torch.rand(1, generator=rng) + 0.5 for x in "qkv"}
    groups = sequences.groups | {"max_seqlen_k": 200}
    call = kind("gfx942", "fp8", (64, 64), 2, (), is_group=True, lengths=((1, 1),) * 2)
    given = Inputs(q, q[:, :1], q[:, :1], q, options, groups, attention_packed, q, q)
    arguments = arguments_of(replace(call, heads=(2, 1)), given, ForwardArguments)
    set_descales(arguments, given)
    arguments.seqlen_k = sum(lengths_k)
    arguments.block_table, arguments.block_table_stride = table.data_ptr(), table.stride(0)
    arguments.page_size, arguments.num_pages = page_size, most + 3
    arguments.has_packed_pages = page_size == 32
    for name, x in (("k", k), ("v", v)):
        setattr(arguments, name, x.data_ptr())
        setattr(arguments, f"{name}_strides", Strides(x.stride(0), 64, x.stride(1)))
    inputs, of_pages = (q, k, v), {"block_table": table, **options, **groups}
    assert "_turns_" in check_like_python(calls, call.arch, arguments, inputs, **of_pages)
    changed = {"seqlen_q": 511, "mask": 1, "window_left": 7}
    for name, value in changed.items():
        others = ForwardArguments.from_buffer_copy(arguments)
        setattr(others, name, value)
        with pytest.raises(CallError, match="no kernel for fp8_e4m3fnuz, hdim 64x64"):
            calls.plan(others)


def check_like_python(
    calls: ExportedCalls,
    arch: str,
    arguments: ForwardArguments,
    inputs: tuple[Tensor, Tensor, Tensor],
    **options: Any,
) -> str:
    """The same kernel gives the same bits; without an output so far. Its name."""
    with emulate(arch):
        kernel = explain(*inputs, **options).plan.kernel
        expected = fmha_fwd(*inputs, return_lse=True, **options)
    out, lse = (torch.full_like(x, torch.nan) for x in expected)
    set_tensor(arguments, "out", out)
    arguments.lse = lse.data_ptr()
    assert launch(calls, arch, arguments) == kernel
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    return str(kernel)


def test_far_rows_are_those_of_python(calls, rng):
    """By kernels of their own; rows that are near have the others."""
    far = 1 << 25  # elements: 32 of them are 2 GiB apart
    memory = torch.empty(33 * far, dtype=torch.bfloat16)
    distant = memory.as_strided((1, 33, 1, 24), (0, far, 24, 1))
    q, k, v, dout = (torch.randn(1, 33, 1, 24, generator=rng).bfloat16() for _ in range(4))
    call = kind("gfx942", "bf16", (24, 24), 0, (), lengths=((33, 33),))
    call = replace(call, heads=(1, 1))
    options = {"mask": 0, "softmax_scale": 0.25}
    given = Inputs(q, k, v, torch.empty_like(q), options, {}, attention_packed, q, k)
    arguments = arguments_of(call, given, ForwardArguments)
    near = check_like_python(calls, "gfx942", arguments, (q, k, v), **options)
    set_tensor(arguments, "k", distant.copy_(k))
    kernel = check_like_python(calls, "gfx942", arguments, (q, distant, v), **options)
    assert "_far_" in kernel
    assert "_far_" not in near
    backward = arguments_of(call, given, BackwardArguments)
    with emulate("gfx942"):
        out, lse = fmha_fwd(q, k, v, return_lse=True, **options)
        expected = fmha_bwd(dout, q, k, v, out, lse, **options)
    gradients = [torch.full_like(x, torch.nan) for x in expected]
    for name, x in zip(("dq", "dk", "dv"), gradients, strict=True):
        set_tensor(backward, name, x)
    set_tensor(backward, "out", out)
    backward.lse = lse.data_ptr()
    for rows in (dout, distant.copy_(dout)):
        set_tensor(backward, "dout", rows)
        assert ("_far_" in launch(calls, "gfx942", backward)) == (rows is distant)
        assert all(map(torch.equal, gradients, expected))
        for x in gradients:
            x.fill_(torch.nan)


@pytest.mark.parametrize(("is_group", "heads"), [(True, (2, 2)), (True, (4, 2)), (False, (2, 2))])
def test_persistent_kernels_are_those_of_python(is_group, heads, calls, rng, monkeypatch):
    """Where a library has no others, and Python takes none: with a workspace, or what lacks is
    said.
    """
    propose = compiled.propose

    def listed(*asked: Any) -> Any:
        return [plan for plan in propose(*asked) if plan.traits.lists_work]

    monkeypatch.setattr(compiled, "propose", listed)
    lengths = ((150, 300), (1, 129), (0, 5), (33, 0), (2, 700)) if is_group else ((300, 400),) * 2
    call = kind("gfx942", "bf16", LISTED.hdims[0], 2, (), is_group=is_group, lengths=lengths)
    given = drawn_inputs(replace(call, heads=heads), rng)
    arguments = arguments_of(replace(call, heads=heads), given, ForwardArguments)
    options, inputs = given.options | given.sequences, (given.q, given.k, given.v)
    kernel = check_like_python(calls, "gfx942", arguments, inputs, **options)
    assert "_listed_" in kernel
    assert ("_stacked_" in kernel) == (heads[0] > heads[1])
    arguments.workspace = 0
    said = f"workspace is null.* {arguments.workspace_bytes} bytes. .* plain has it"
    with pytest.raises(CallError, match=f"^invalid_argument: {said}"):
        calls.launch(arguments)


def test_latent_attention(calls, rng):
    """Of a latent, values are the first columns of keys, which all heads share."""
    call = kind("gfx950", "bf16", (576, 512), 0, (), is_group=True, lengths=((1, 70), (3, 150)))
    call = replace(call, heads=(16, 1))
    given = drawn_inputs(call, rng)
    given.v = given.k[..., :512]
    check_forward(calls, call, given)


@pytest.mark.parametrize("scales", ["one", "each token"])
def test_int8_probabilities_are_those_of_python(scales, calls, rng):
    call = kind("gfx950", "int8", (64, 40), 0, (), scales=scales, lengths=((129, 70),) * 2)
    given = drawn_inputs(replace(call, heads=(2, 1)), rng)
    given.options["v_descale"] = torch.full((1,), 1 / 64)
    given.options["p_descale"] = torch.full((1,), 1 / 127)
    arguments = arguments_of(replace(call, heads=(2, 1)), given, ForwardArguments)
    for name in ("q", "k", "v", "p"):
        set_descale(arguments, f"{name}_descale", given.options[f"{name}_descale"])
    set_tensor(arguments, "out", given.out)
    arguments.num_splits = 1
    kernel = launch(calls, call.arch, arguments)
    assert "_int8p_" in kernel
    assert ("_token_k_" in kernel) == (scales == "each token")
    with emulate(call.arch):
        expected = fmha_fwd(given.q, given.k, given.v, num_splits=1, **given.options)
    assert torch.equal(given.out, expected)


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_results_of_splits_are_those_of_python(is_group, num_splits, calls, rng):
    call = kind(
        *("gfx942", "bf16", (96, 40), "b:150,0", ()),
        is_group=is_group,
        lengths=((129, 200), (40, 300)) if is_group else ((129, 300),) * 2,
        num_splits=num_splits,
    )
    call = replace(call, heads=(4, 2))
    given = drawn_inputs(call, rng)
    arguments = arguments_of(call, given, ForwardArguments)
    with emulate(call.arch):
        expected = mha_fwd_splitkv(
            *(given.q, given.k, given.v, num_splits), **given.options, **given.sequences
        )
    out, lse, out_accum, lse_accum = (torch.full_like(x, torch.nan) for x in expected)
    out_accum.zero_()  # as Python does, of what is not written
    lse_accum.fill_(-torch.inf)
    set_tensor(arguments, "out", out)
    arguments.num_splits, arguments.lse = num_splits, lse.data_ptr()
    arguments.out_accum, arguments.lse_accum = out_accum.data_ptr(), lse_accum.data_ptr()
    assert "_parts_" in launch(calls, call.arch, arguments, "forward_splitkv")
    results = zip((out, lse, out_accum, lse_accum), expected, strict=True)
    assert all(torch.equal(one, other) for one, other in results)


def test_what_other_names_need(calls):
    arguments = ForwardArguments(**PLAIN)
    with pytest.raises(CallError, match="num_splits is 0; mha_fwd decides about it"):
        calls.launch(arguments, "forward_splitkv")
    with pytest.raises(CallError, match="block_table is null"):
        calls.launch(arguments, "batch_prefill")


def test_the_workspace_of_splits(calls):
    """Of an output that is made in slices, each has rows of its own in it."""
    (traits,) = forward_passes(SLICED, ())
    assert traits.slices > 1
    batch, heads, seqlen_q, splits = 2, 3, 200, 3
    sizes = {"batch": batch, "heads_q": heads, "heads_k": heads, "seqlen_q": seqlen_q}
    arguments = ForwardArguments(
        **sizes, dtype=1, seqlen_k=900, hdim_q=300, hdim_v=280, softmax_scale=1.0, num_splits=splits
    )
    assert load("plain").hipSetDevice(DEVICES["gfx950"]) == 0
    plan = calls.plan(arguments)
    tiles = -(-seqlen_q // traits.tile.own_rows)
    rows = batch * heads * traits.slices * tiles * traits.tile.own_rows * splits
    columns = -(-traits.made_columns // 32) * 32 + 4
    assert (plan.num_splits, plan.workspace_bytes) == (splits, 4 * rows * columns)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"bias": 1, "bias_dtype": 3}, ".* --features bias --bias-dtype fp32 has it"),
        ({"bias": 1, "bias_dtype": 1}, ".* --features bias has it"),
        ({"mask": 0}, ".* --mask none --mode gm0 --features plain has it"),
        ({"dtype": 5, "out_dtype": 1}, ".* --dtype int8 --out-dtype fp16 --hdims 96x40 "),
        ({"dropout_p": 0.5}, ".*, dropout, .* --hdims 96x40 .* --features dropout has it"),
        (
            {"bias": 1, "logit_softcap": 2.0},
            r".*bias_bool\+softcap, .* boolean_bias\+soft",
        ),
        ({"v_column": 9, "alibi_slopes": 1}, r".*column_major_v\+alibi"),
        ({"logit_softcap": 2000.0}, r".*softcap\+large_softcap, .* --features softcap has it"),
        ({"mode": 1, "bf16_cvt": 1}, ".* --mode gm1 --bf16-cvt rtna --features plain has it"),
        ({"dtype": 5}, ".*int8, .* --dtype int8 "),
        (
            {"dtype": 5, "k_descale": Descale(8, token=1)},
            r".*, descales\+token_k, .* --features token_descales has it",
        ),
        (
            {"dtype": 5, "heads_q": 2, "q_descale": Descale(8, of_query_heads=True)},
            r".*, descales, .* --features query_head_descales has it",
        ),
        ({"key_type": 2, "sink": 1}, r".*, int8_keys\+descales\+sink, .* --kv-dtype int8 "),
    ],
)
def test_what_is_missing_names_the_flags(changes, text, calls):
    arguments = ForwardArguments(
        **dict.fromkeys(("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k"), 1),
        **PLAIN,
    )
    arguments.v_strides.seq = 1
    assert load("plain").hipSetDevice(DEVICES["gfx942"]) == 0
    for name, value in changes.items():
        setattr(arguments, name, value)
    with pytest.raises(CallError, match=f"^unsupported: no kernel for {text}"):
        calls.plan(arguments)


def test_the_gradient_of_sinks_is_refused(calls):
    """Without sinks, and where the library has no kernel for it; of no rows it is 0."""
    sizes = dict.fromkeys(("heads_q", "heads_k", "seqlen_q", "seqlen_k"), 1)
    sink, dsink = torch.ones(1), torch.full((1,), torch.nan)
    arguments = BackwardArguments(**sizes, **PLAIN, dsink=dsink.data_ptr())
    assert load("plain").hipSetDevice(DEVICES["gfx942"]) == 0
    with pytest.raises(CallError, match="dsink is given, and there is no sink"):
        calls.launch(arguments)
    arguments.sink = sink.data_ptr()
    calls.launch(arguments)
    assert dsink.item() == 0
    arguments.dtype = 1
    with pytest.raises(CallError, match=r"of sinks beside fp16 .* --features sinks has it"):
        calls.launch(arguments)


def test_far_keys_are_refused(calls):
    arguments = ForwardArguments(
        **dict.fromkeys(("batch", "heads_q", "heads_k", "seqlen_q"), 1),
        **PLAIN,
        mode=1,
        seqlen_k=2,
    )
    arguments.k_strides.seq = 1 << 29
    assert load("plain").hipSetDevice(DEVICES["gfx942"]) == 0
    with pytest.raises(CallError, match="rows of k or v are 1073741824 bytes apart"):
        calls.plan(arguments)
