"""Keys that are split into parts: the result, the parts themselves, and their combination."""

import ctypes
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from closeness import assert_close, check, is_same
from inputs import DTYPES, Sizes, prefix_sums, random_qkv
from packed_calls import packed
from refusals import refused
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from untyped import fmha_fwd

import jitfmha
from jitfmha import emulate
from jitfmha.call.run import run
from jitfmha.problem.arguments import Arguments, KeyOptions
from jitfmha.problem.float64_reference import Result, attention, unpaged
from jitfmha.problem.torch_parts import thread_pool

flash_attn_combine: Any = jitfmha.flash_attn_combine
mha_fwd_splitkv: Any = jitfmha.mha_fwd_splitkv

Call = Callable[[Tensor], Any]

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ARCHS = ("gfx942", "gfx950")
# seqlen_q, seqlen_k, heads_q, heads_k: few rows of one head and of several that are done together,
# a tile of many, and keys up to and beyond the tiles of 128 and 132 keys and their parts.
SIZES = [
    *[(1, 0, 4, 2), (1, 1, 4, 4), (1, 127, 5, 5), (1, 1029, 32, 8), (1, 700, 13, 1)],
    *[(2, 129, 12, 4), (3, 1300, 6, 6), (9, 640, 3, 3), (40, 1100, 2, 1), (1, 600, 70, 70)],
]
MASKS: list[dict[str, Any]] = [{}, {"mask": 2}, {"window_size": (300, 2)}]


@pytest.mark.sample("mask", MASKS, 1)
@pytest.mark.parametrize("sizes", SIZES)
def test_batch_mode(rng, sizes, mask):
    qkv = random_qkv(rng, sizes)
    for num_splits in (0, 1, 2, 5, 128):
        check(*qkv, num_splits=num_splits, **mask)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_dtypes(rng, dtype):
    for sizes in ((1, 1500, 8, 2), (20, 1500, 2, 2)):
        qkv = random_qkv(rng, sizes, dtype=DTYPES[dtype])
        for num_splits in (0, 3):
            check(*qkv, num_splits=num_splits)


@pytest.mark.parametrize("mask", [{}, {"mask": 2, "window_size": (250, 0), "sink_size": 300}])
def test_group_mode(rng, mask):
    """Sequences with few rows, whose heads are done together, beside others."""
    call = packed(rng, [1, 0, 2, 30, 1, 5], [900, 4, 0, 650, 128, 1029], heads=(6, 3))
    for num_splits in (0, 1, 3):
        call.check(num_splits=num_splits, **mask)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("mask", [*MASKS, {"window_size": (105, 2)}], ids=str)
def test_threads_do_not_change_the_bits(rng, mask):
    """In some tiles of 290 rows the keys of (105, 2) would go beyond one part of 256.

    Of 194 the last two are in a tile of their own, or not, as it suits the threads. That they are
    few counts where sequences have few rows or many.
    """
    calls: list[tuple[Any, dict[str, Any]]] = [
        (random_qkv(rng, sizes), mask)
        for sizes in ((1, 5000, 8, 2), (1, 1000, 24, 24), (20, 3000, 2, 1), (290, 962, 1, 1))
    ]
    of_194 = packed(rng, [194], [962], heads=(2, 2))
    calls.append((of_194.qkv, {**of_194.sequences.groups, **mask}))
    for qkv, options in calls:
        for num_splits in (0, 4):
            torch.set_num_threads(2)
            first = fmha_fwd(*qkv, return_lse=True, num_splits=num_splits, **options)
            for threads in (1, 2, 3, 5, 2):
                torch.set_num_threads(threads)
                again = fmha_fwd(*qkv, return_lse=True, num_splits=num_splits, **options)
                assert is_same(again, first)


@pytest.mark.usefixtures("num_threads")
def test_calls_on_threads_of_the_pool(rng):
    """There a call is left to its thread alone, which takes the shares of others, too."""
    torch.set_num_threads(2)
    q, k, v = random_qkv(rng, (1, 5000, 8, 2))
    expected = fmha_fwd(q, k, v)
    outs: list[Tensor] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    def on_thread(begin, end, context):
        outs.append(fmha_fwd(q, k, v))

    kinds = *(ctypes.c_int64,) * 3, ctypes.c_void_p, ctypes.c_void_p
    parallel_for = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(thread_pool()[0].value)
    parallel_for(0, 2, 1, ctypes.cast(on_thread, ctypes.c_void_p), None)
    assert [is_same(out, expected) for out in outs] == [True, True]


def test_score_features(rng):
    """They depend on where a key is in its sequence, and the sink counts once."""
    for heads_q, heads_k in ((6, 3), (70, 70)):  # of the latter, several are done together
        q, k, v = random_qkv(rng, seqlen_q=1, seqlen_k=700, heads_q=heads_q, heads_k=heads_k)
        options: dict[str, Any] = {
            "bias": torch.randn(2, heads_q, 1, 700, generator=rng),
            "alibi_slopes": torch.rand(heads_q, generator=rng) / 100,
            "sink": torch.randn(heads_q, generator=rng),
        }
        for num_splits in (0, 4):
            check(q, k, v, num_splits=num_splits, **options)


@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_parts(rng, seqlen_q):
    """Each is attention to some of the keys, one part after the other."""
    q, k, v = random_qkv(rng, seqlen_q=seqlen_q, seqlen_k=1000, heads_q=6)
    out, lse, out_accum, lse_accum = mha_fwd_splitkv(q, k, v, 2)
    assert torch.equal(out, fmha_fwd(q, k, v, num_splits=2))
    assert out_accum.dtype == lse_accum.dtype == torch.float32
    assert out_accum.shape == (2, 2, 6, seqlen_q, 64)
    # How long tiles are depends on the processor: without queries a part is the mean of its values.
    numbers = torch.arange(1000.0).view(1, -1, 1, 1).expand_as(v).contiguous()
    first = round(2 * mha_fwd_splitkv(torch.zeros_like(q), k, numbers, 2)[2][0].mean().item()) + 1
    assert 0 < first < 1000
    for n, keys in enumerate((slice(0, first), slice(first, None))):
        expected, _ = attention(q, k[:, keys], v[:, keys])
        torch.testing.assert_close(
            out_accum[n].transpose(1, 2).double(), expected, atol=1e-5, rtol=0
        )
    combined, combined_lse = flash_attn_combine(
        out_accum.transpose(2, 3), lse_accum.transpose(2, 3)
    )
    torch.testing.assert_close(combined, out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(combined_lse.transpose(1, 2), lse, atol=1e-5, rtol=1e-5)


def traced(call: Call, q: Tensor) -> list[Tensor]:
    return make_fx(call)(q.new_zeros(q.shape))(q)


WATCHED: dict[str, Callable[[Call, Tensor], Any]] = {
    "the negative bit": lambda call, q: call(torch._neg_view(-q)),
    "make_fx": traced,
    "torch.compile": lambda call, q: torch.compile(call, backend="eager", fullgraph=True)(q),
    "vmap": lambda call, q: [x[0] for x in torch.vmap(call)(q[None])],
}


@pytest.mark.parametrize("way", WATCHED)
def test_parts_where_somebody_has_to_know_of_them(rng, way):
    q, k, v = random_qkv(rng, seqlen_q=3, seqlen_k=700)

    def call(q: Tensor) -> Any:
        return mha_fwd_splitkv(q, k, v, 2)

    for found, expected in zip(WATCHED[way](call, q), call(q), strict=True):
        assert torch.equal(found, expected)


def test_parts_of_fake_tensors(rng):
    """They have no memory; neither have those on meta."""
    q, k, v = random_qkv(rng, seqlen_q=3, seqlen_k=700)
    expected = [(x.shape, x.stride(), x.dtype) for x in mha_fwd_splitkv(q, k, v, 2)]
    with FakeTensorMode() as mode:
        fakes = mha_fwd_splitkv(*map(mode.from_tensor, (q, k, v)), 2)
    for found in (fakes, mha_fwd_splitkv(*(x.to("meta") for x in (q, k, v)), 2)):
        assert [(x.shape, x.stride(), x.dtype) for x in found] == expected
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with refused(NotImplementedError, "q carries a forward-mode tangent"):
            mha_fwd_splitkv(dual, k, v, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert mha_fwd_splitkv(q, k, v, 2)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_part_without_numbers(rng, bad):
    """Its rows have none, as in one call; AITER's function that reduces parts agrees."""
    q, k, v = random_qkv(rng, batch=1, seqlen_q=3, seqlen_k=1000)
    q[0, 1, 0, 0], k[0, 999, 0, 0] = 1, bad
    out, lse, out_accum, lse_accum = mha_fwd_splitkv(q, k, v, 2)
    parts = out_accum.transpose(2, 3), lse_accum.transpose(2, 3)
    combined, combined_lse = flash_attn_combine(*parts)
    assert combined_lse.isnan().any()
    torch.testing.assert_close(combined, out, equal_nan=True, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(combined_lse.transpose(1, 2), lse, equal_nan=True)
    reduced, reduced_lse = torch.empty_like(out[0]), torch.empty_like(combined_lse[0])
    indices = torch.tensor([0, 2]).int(), torch.tensor([[0, 3]]).int(), torch.tensor([0, 3]).int()
    rows = [x.flatten(0, 2) for x in parts]
    jitfmha.aiter.mla_reduce_v1(*rows, *indices, 3, 0, reduced, reduced_lse)
    torch.testing.assert_close(reduced, combined[0], equal_nan=True)
    torch.testing.assert_close(reduced_lse, combined_lse[0], equal_nan=True)


@pytest.mark.parametrize("chip", [None, "gfx950"])
def test_parts_are_scaled_as_the_result_is(rng, chip):
    """By the scale of 8-bit values, and for what dropout leaves of the probabilities."""
    q, k, v = random_qkv(rng, seqlen_q=3, seqlen_k=700)
    state = torch.tensor([5, 0])
    scales = {f"{name}_descale": torch.tensor([1.5]) for name in "qkv"}
    eight_bits = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    cases: list[tuple[list[Tensor], dict[str, Any]]] = [
        ([q, k, v], {"dropout_p": 0.5, "rng_state": state}),
        (eight_bits, scales),
    ]
    for tensors, options in cases:
        out_accum, lse_accum = torch.zeros(2, 2, 2, 3, 64), torch.zeros(2, 2, 2, 3)
        arguments = Arguments.of(*tensors, {**options, "return_lse": True})
        with emulate(chip) if chip else nullcontext():
            out, lse = run(arguments._replace(keys=KeyOptions(None, 2, out_accum, lse_accum)))
        check_combined((out, lse), out_accum, lse_accum)


@pytest.mark.sample("number", range(1000), 1)
def test_parts_on_amd(rng, number):
    """Drawn calls, also of values in slices: each part is attention to whole tiles of keys."""
    drawn = random.Random(rng.initial_seed())
    sizes, named = drawn_sizes(drawn)
    q, k, v = random_qkv(rng, sizes, **named)
    num_splits = drawn.choice((1, 2, 7))
    with emulate(drawn.choice(ARCHS), check=True) as emulated:
        out, lse, out_accum, lse_accum = mha_fwd_splitkv(q, k, v, num_splits)
        assert emulated.findings() == ()
    assert_close((out, lse), attention(q, k, v), q, k, v)
    # Their numbers of tiles of 32 keys differ by one at most.
    tiles, first = -(-k.shape[1] // 32), 0
    for n in range(num_splits):
        behind = first + 32 * (tiles // num_splits + (n < tiles % num_splits))
        of_k, of_v = k[:, first:behind], v[:, first:behind]
        part = out_accum[n].transpose(1, 2).to(q.dtype), lse_accum[n]
        assert_close(part, attention(q, of_k, of_v), q, of_k, of_v)
        first = behind
    check_combined((out, lse), out_accum, lse_accum)


@pytest.mark.sample("number", range(1000), 1)
def test_parts_of_packed_sequences_on_amd(rng, number):
    """Drawn calls, also of keys in pages: what the parts make is the result."""
    drawn = random.Random(rng.initial_seed())
    (*lengths, heads_q, heads_k), named = drawn_sizes(drawn)
    lengths_q, lengths_k = [lengths[0], 0, 5], [lengths[1], 7, 40]
    call = packed(rng, lengths_q, lengths_k, heads=(heads_q, heads_k), **named)
    q, k, v, options = call.q, call.k, call.v, call.sequences.groups
    mask = drawn.choice((0, 2))
    if drawn.random() < 0.5:
        table = torch.randint(9, (3, 13), generator=rng, dtype=torch.int32)
        options |= {"block_table": table, "max_seqlen_k": max(lengths_k)}
        k, v = (torch.randn(9, 16, *x.shape[1:], generator=rng).to(x.dtype) for x in (k, v))
        call.k, call.v = (unpaged(x, table, lengths_k) for x in (k, v))
    with emulate(drawn.choice(ARCHS), check=True) as emulated:
        out, lse, *parts = mha_fwd_splitkv(q, k, v, drawn.choice((1, 2, 7)), mask=mask, **options)
        assert emulated.findings() == ()
    assert_close((out, lse), call.expected(mask=mask), *call.qkv)
    check_combined((out[None], lse[None]), *(x[:, None] for x in parts))


def drawn_sizes(drawn: random.Random) -> tuple[Sizes, dict[str, Any]]:
    """The sizes and other options of ``random_qkv``."""
    lengths, heads = (drawn.choice((1, 3, 140)), drawn.choice((0, 33, 200))), (4, 2)
    hdims = {"hdim": drawn.choice((8, 61, 128)), "hdim_v": drawn.choice((24, 64, 101, 300))}
    return (*lengths, *heads), hdims | {"dtype": drawn.choice(list(DTYPES.values()))}


def check_combined(result: Result, out_accum: Tensor, lse_accum: Tensor) -> None:
    """What parts of gm0 make together is the result, which may have been rounded to 16 bits."""
    out, lse = result
    parts = out_accum.transpose(2, 3), lse_accum.transpose(2, 3)
    combined, combined_lse = flash_attn_combine(*parts)
    eps = torch.finfo(out.dtype).eps
    torch.testing.assert_close(combined, out.float(), atol=1e-5, rtol=eps)
    torch.testing.assert_close(combined_lse.transpose(1, 2), lse, atol=1e-5, rtol=1e-5)


def test_parts_of_packed_sequences(rng):
    lengths_q, lengths_k = [1, 3, 0], [700, 0, 50]
    cu_q, cu_k = prefix_sums(lengths_q), prefix_sums(lengths_k)
    q, k, v = (x[0] for x in random_qkv(rng, batch=1, seqlen_q=4, seqlen_k=750))
    out, lse, out_accum, lse_accum = mha_fwd_splitkv(
        q, k, v, 3, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k
    )
    assert out_accum.shape == (3, 2, 4, 64)
    combined, combined_lse = flash_attn_combine(
        out_accum.transpose(1, 2)[:, None], lse_accum.transpose(1, 2)[:, None]
    )
    torch.testing.assert_close(combined[0], out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(combined_lse[0].T, lse, atol=1e-5, rtol=1e-5)
    assert (lse[:, 1:] == -torch.inf).all()


def test_combine(rng):
    """Against the definition in float64; what stands in a part without keys does not count."""
    parts = torch.randn(4, 2, 3, 5, 8, generator=rng)
    lse = torch.randn(4, 2, 3, 5, generator=rng) * 50
    lse[1] = lse[:, 0, 0, 0] = -torch.inf
    parts[1] = torch.nan
    weights = lse.double().exp() / lse.double().exp().sum(0)
    expected = (parts.nan_to_num() * weights.nan_to_num()[..., None]).sum(0)
    out, total = flash_attn_combine(parts, lse)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total.double(), lse.double().logsumexp(0), atol=1e-4, rtol=1e-6)
    assert total[0, 0, 0] == -torch.inf
    given = torch.full_like(out, torch.nan, dtype=torch.bfloat16)
    assert flash_attn_combine(parts, lse, given)[0] is given
    assert torch.equal(given, flash_attn_combine(parts, lse, out_dtype=torch.bfloat16)[0])


@pytest.mark.parametrize(
    ("changes", "error", "texts"),
    [
        ({"out_partial": torch.zeros(2, 1, 3, 4, 8).half()}, TypeError, ["out_partial", "float16"]),
        ({"lse_partial": torch.zeros(2, 1, 3)}, ValueError, ["lse_partial", "(2, 1, 3)"]),
        ({"lse_partial": torch.zeros(2, 1, 3, 5)}, ValueError, ["lse_partial", "(2, 1, 3, 5)"]),
        ({"out": torch.zeros(1, 3, 4, 7)}, ValueError, ["out", "(1, 3, 4, 7)"]),
        ({"out": torch.zeros(1, 3, 4, 8).int()}, TypeError, ["out", "int32"]),
        (
            {"lse_partial": torch.zeros(2, 1, 3, 4, device="meta")},
            ValueError,
            ["lse_partial", "meta"],
        ),
        (
            {"out": torch.zeros(1, 3, 4, 8), "out_dtype": torch.float16},
            ValueError,
            ["out_dtype=torch.float16"],
        ),
    ],
)
def test_combine_errors(changes, error, texts):
    given = {"out_partial": torch.zeros(2, 1, 3, 4, 8), "lse_partial": torch.zeros(2, 1, 3, 4)}
    with refused(error, *texts):
        flash_attn_combine(**(given | changes))


def test_parts_have_no_gradient():
    q = torch.zeros(1, 2, 1, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="q requires grad"):
        mha_fwd_splitkv(q, q, q, 2)
    with pytest.raises(ValueError, match="num_splits=0"):
        mha_fwd_splitkv(q.detach(), q.detach(), q.detach(), 0)
