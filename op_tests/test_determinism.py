"""The same call gives the same bits: again, with other thread counts, and from many threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from closeness import is_same
from inputs import DTYPES, lay_out, prefix_sums, random_qkv
from packed_calls import packed
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from untyped import fmha_fwd

import jitfmha

SIZES = [(1, 700, 8, 2), (130, 130, 3, 3), (300, 70, 4, 4), (2, 2, 16, 4), (513, 513, 1, 1)]
# Each dtype has kernels of its own, so that one of 16 bits is drawn.
HALVES = ["bf16", "fp16"]
A_DTYPE = pytest.mark.sample("dtype", HALVES, 1, shared_by="determinism", always=["fp32"])


def results(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
    masks = ("none", "causal")
    both = (fmha_fwd(q, k, v, mask=mask, return_lse=True, **options) for mask in masks)
    return [x for pair in both for x in pair]


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("sizes", SIZES)
@A_DTYPE
def test_batch_mode(rng, dtype, sizes):
    q, k, v = random_qkv(rng, sizes, dtype=DTYPES[dtype])
    first = results(q, k, v)
    for threads in (1, 2, 3, 5, 1, 2):
        torch.set_num_threads(threads)
        assert is_same(results(q, k, v), first), f"{threads} threads"


@pytest.mark.usefixtures("num_threads")
@A_DTYPE
def test_group_mode(rng, dtype):
    lengths = torch.randint(0, 200, (9,), generator=rng).tolist()
    call = packed(rng, lengths, lengths, heads=(2, 2), dtype=DTYPES[dtype])
    first = results(*call.qkv, **call.sequences.groups)
    for threads in (1, 2, 3, 5, 1, 2):
        torch.set_num_threads(threads)
        assert is_same(results(*call.qkv, **call.sequences.groups), first), f"{threads} threads"


def test_layout_does_not_change_the_bits(rng):
    q, k, v = random_qkv(rng)
    first = results(q, k, v)
    for layout in ("bhsd", "packed_by_head", "odd_address"):
        assert is_same(results(*(lay_out(x, layout) for x in (q, k, v))), first)


@pytest.mark.sample("half", HALVES, 1, shared_by="determinism")
def test_called_from_many_threads_at_once(rng, half):
    problems = [
        random_qkv(rng, seqlen_q=n, heads_q=2 + n % 3 * 2, dtype=dtype)
        for n in (1, 40, 200)
        for dtype in (torch.float32, DTYPES[half])
    ]
    expected = [results(*problem) for problem in problems]
    order = list(range(len(problems))) * 20
    with ThreadPoolExecutor(8) as pool:
        actual = pool.map(lambda i: results(*problems[i]), order)
        for i, result in zip(order, actual, strict=True):
            assert is_same(result, expected[i])


SUMS, LONGEST = prefix_sums([9, 7]), 9
ANY_ORDER, ONE_ORDER = "fmha_bwd_hd128_bf16_rtne", "fmha_bwd_hd128_bf16_deterministic_rtne"
GROUPS: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), SUMS)
GROUPS |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), LONGEST)
# The shapes of what each function takes first, and what it takes by name.
CALLS: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "fmha_fwd": ([(2, 8, 1, 128)] * 3, {}),
    "flash_attn_func": ([(2, 8, 1, 128)] * 3, {}),
    "flash_attn_kvpacked_func": ([(2, 8, 1, 128), (2, 8, 2, 1, 128)], {}),
    "flash_attn_qkvpacked_func": ([(2, 8, 3, 1, 128)], {}),
    "flash_attn_varlen_func": ([(16, 1, 128)] * 3, GROUPS),
    "flash_attn_varlen_kvpacked_func": ([(16, 1, 128), (16, 2, 1, 128)], GROUPS),
    "flash_attn_varlen_qkvpacked_func": (
        *([(16, 3, 1, 128)], {"cu_seqlens": SUMS, "max_seqlen": LONGEST}),
    ),
    "aiter.flash_attn_func": ([(2, 8, 1, 128)] * 3, {"how_v3_bf16_cvt": 0}),
    "aiter.flash_attn_varlen_func": ([(16, 1, 128)] * 3, {**GROUPS, "how_v3_bf16_cvt": 0}),
}


def backward_kernel(function: Any, name: str, is_watched: bool = False, **options: Any) -> str:
    """What the gradients come from; if the call is watched, it goes through the dispatcher."""
    shapes, given = CALLS[name]
    inputs = [torch.ones(x, dtype=torch.bfloat16, requires_grad=True) for x in shapes]
    with jitfmha.emulate("gfx942"):
        out = None if is_watched else function(*inputs, **given, **options)

        def differentiate() -> None:
            result = function(*inputs, **given, **options) if out is None else out
            torch.autograd.grad(result.sum(), inputs)

        return profiled_kernel(differentiate)


def profiled_kernel(call: Callable[[], object]) -> str:
    """The one of the backward pass, by the name that it has for batches."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        call()
    (kernel,) = {x.name for x in recorded.events() if x.name.startswith("fmha_bwd_")}
    return kernel.replace("_group", "")


def function_of(name: str) -> Any:
    *package, function = name.split(".")
    return getattr(jitfmha.aiter if package else jitfmha, function)


@pytest.mark.usefixtures("ready_first")
@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_backward_kernels_that_have_one_order(name, is_watched):
    function = function_of(name)
    assert backward_kernel(function, name, is_watched, deterministic=False) == ANY_ORDER
    assert backward_kernel(function, name, is_watched, deterministic=True) == ONE_ORDER


@pytest.mark.usefixtures("ready_first")
@pytest.mark.usefixtures("poisoned_memory")  # which makes torch deterministic
@pytest.mark.parametrize("name", [name for name in CALLS if name != "fmha_fwd"])
def test_that_nobody_asks_does_not_override_torch(name):
    assert backward_kernel(function_of(name), name, deterministic=False) == ONE_ORDER


@pytest.mark.usefixtures("ready_first")
@pytest.mark.usefixtures("poisoned_memory")
def test_that_nobody_asks_aiter_does_not_override_torch():
    x, lse = torch.ones(2, 8, 1, 128, dtype=torch.bfloat16), torch.zeros(2, 1, 8)
    mha_bwd = partial(jitfmha.aiter.mha_bwd, x, x, x, x, x, lse, 0.0, None, False, -1, -1)
    with jitfmha.emulate("gfx942"):
        assert profiled_kernel(lambda: mha_bwd(deterministic=False)) == ONE_ORDER


@pytest.mark.usefixtures("ready_first")
def test_defaults():
    name = "aiter.flash_attn_func"
    for each in CALLS:
        expected = ONE_ORDER if each == name else ANY_ORDER
        assert backward_kernel(function_of(each), each) == expected


@pytest.mark.usefixtures("ready_first")
def test_one_order_in_compiled_programs():
    torch._dynamo.reset()
    for deterministic, expected in ((False, ANY_ORDER), (True, ONE_ORDER)):
        compiled = torch.compile(jitfmha.flash_attn_func, fullgraph=True, backend="aot_eager")
        options = {"deterministic": deterministic}
        assert backward_kernel(compiled, "flash_attn_func", **options) == expected
