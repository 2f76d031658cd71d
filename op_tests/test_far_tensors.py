"""Tensors of more than 2^31 elements, most of which nobody touches: they take no memory."""

import mmap
from contextlib import nullcontext
from math import prod

import pytest
import torch
import untyped
from inputs import prefix_sums
from packed_pages import packed_keys, packed_values
from torch import Tensor

import jitfmha

MAP_NORESERVE = 0x4000  # of Linux; Python has no name for it before 3.13
ELEMENTS = 1 << 32
TARGETS = ("cpu", "gfx942", "gfx950")
DTYPE = torch.bfloat16
HEADS, HDIM = 2, 64
LENGTHS_Q, LENGTHS_K = (4, 5), (5, 7)


@pytest.fixture(params=TARGETS)
def target(request):
    with nullcontext() if request.param == "cpu" else jitfmha.emulate(request.param):
        yield request.param


def sparse(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Zeros, of which what is written gets memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def far_apart(x: Tensor, dimension: int) -> Tensor:
    """The same values, with 2^31 elements and more between two along a dimension."""
    strides = list(x.contiguous().stride())
    strides[dimension] = (1 << 31) + 64
    last = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    apart = sparse(last + 1, dtype=x.dtype).as_strided(x.shape, strides)
    return apart.copy_(x)


def close(actual: Tensor, expected: Tensor) -> None:
    """But for the order of sums: another kernel may be the choice for so many rows."""
    torch.testing.assert_close(actual.double(), expected.double(), atol=0.02, rtol=0.02)


def test_pages_far_behind(rng, target):
    """Page numbers times a page's size are more than 32 bits have."""
    most = ELEMENTS // (16 * HEADS * HDIM) + 4
    numbers = (0, most // 2 + 1, most - 1)
    q = torch.randn(7, 4, HDIM, generator=rng).to(DTYPE)
    near = [torch.randn(3, 16, HEADS, HDIM, generator=rng).to(DTYPE) for _ in range(2)]
    far = [sparse(most, 16, HEADS, HDIM) for _ in range(2)]
    for pages, x in zip(far, near, strict=True):
        pages[list(numbers)] = x
    options = {"cu_seqlens_q": prefix_sums([3, 4]), "cu_seqlens_k": prefix_sums([20, 16])}
    options |= {"max_seqlen_q": 4, "max_seqlen_k": 20, "return_lse": True, "mask": "causal"}
    results = [
        untyped.fmha_fwd(q, *tensors, block_table=torch.tensor(table).int(), **options)
        for tensors, table in (
            (near, [[0, 1], [2, 0]]),
            (far, [numbers[:2], [numbers[2], numbers[0]]]),
        )
    ]
    for expected, actual in zip(*results, strict=True):
        close(actual, expected)


def test_packed_pages_far_behind(rng, target):
    """Of which there are more pieces of 16 bytes than 31 bits have, for queries of many rows."""
    q = torch.randn(300, 1, 128, generator=rng).to(DTYPE)
    pages = [torch.randn(3, 16, 1, 128, generator=rng).to(DTYPE) for _ in "kv"]
    k, v = packed_keys(pages[0]), packed_values(pages[1])
    strides = (1 << 33, *k.stride()[1:])
    far = sparse(2 * strides[0] + k[0].numel()).as_strided(k.shape, strides).copy_(k)
    options = {"cu_seqlens_q": prefix_sums([300]), "cu_seqlens_k": prefix_sums([41])}
    options |= {"max_seqlen_q": 300, "max_seqlen_k": 41, "return_lse": True}
    options["block_table"] = torch.tensor([[2, 0, 1]]).int()
    results = [untyped.fmha_fwd(q, keys, v, **options) for keys in (k, far)]
    for expected, actual in zip(*results, strict=True):
        close(actual, expected)


@pytest.mark.sample("side", ["q", "k"], 1)
def test_packed_rows_far_behind(rng, target, side):
    """The second sequence begins behind 2^32 elements, forward and backward."""
    lengths = {"q": LENGTHS_Q, "k": LENGTHS_K}
    begin = ELEMENTS // (HEADS * HDIM) + 40
    q, dout, k, v = (
        torch.randn(sum(lengths[name]), HEADS, HDIM, generator=rng).to(DTYPE) for name in "qqkk"
    )
    options = {f"cu_seqlens_{name}": prefix_sums(lengths[name]) for name in "qk"}
    options |= {"max_seqlen_q": 5, "max_seqlen_k": 7, "mask": "causal"}
    out, lse = untyped.fmha_fwd(q, k, v, return_lse=True, **options)
    expected = (out, *untyped.fmha_bwd(dout, q, k, v, out, lse, **options))

    first, second = lengths[side]
    rows = [*range(first), *range(begin, begin + second)]
    padded = {f"cu_seqlens_{side}_padded": torch.tensor([0, begin, begin + second]).int()}

    def spread(x: Tensor) -> Tensor:
        far = sparse(begin + second, *x.shape[1:], dtype=x.dtype)
        far[rows] = x
        return far

    room = [torch.zeros_like(x) for x in (q, q, k, v)]
    if side == "k":
        k, v = spread(k), spread(v)
        room[2:] = spread(room[2]), spread(room[3])
    else:
        q, dout = spread(q), spread(dout)
        room[:2] = spread(room[0]), spread(room[1])
        lse = spread(lse.t()).t()
    untyped.fmha_fwd(q, k, v, out=room[0], **padded, **options)
    rooms = dict(zip(("dq", "dk", "dv"), room[1:], strict=True))
    untyped.fmha_bwd(dout, q, k, v, room[0], lse, **rooms, **padded, **options)
    for is_far, x, exact in zip("qqkk", room, expected, strict=True):
        close(x[rows] if is_far == side else x, exact)


STRIDES = [
    (name, dimension)
    for name in ("q", "k", "v", "bias", "out", "dout", "lse", "dq", "dk", "dv")
    for dimension in (range(2) if name == "lse" else range(3))
]


@pytest.mark.sample("name, dimension", STRIDES, 4)
def test_elements_that_are_far_apart(rng, target, name, dimension):
    """Right, or refused with the limit: kernels of GPUs count most strides in 32 bits."""
    given = {
        n: torch.randn(2, rows, HEADS, HDIM, generator=rng).to(DTYPE)
        for n, rows in {"q": 3, "k": 5, "v": 5, "dout": 3}.items()
    }
    given["bias"] = torch.randn(2, HEADS, 3, 5, generator=rng)
    out, lse = forward(given)
    given |= {"out": out, "lse": lse}
    expected = backward(given)
    like = {"dq": "q", "dk": "k", "dv": "v"}.get(name, name)
    given[name] = far_apart(given[like], dimension)
    if target != "cpu" and not is_served(given):
        return
    results = forward(given), backward(given)
    for actual, exact in zip((*results[0], *results[1]), (out, lse, *expected), strict=True):
        close(actual, exact)


def is_served(given: dict[str, Tensor]) -> bool:
    """Whether no kernel refuses the call; one that does names the limit."""
    try:
        forward(given)
        backward(given)
    except NotImplementedError as error:
        if "below 4 GiB" not in str(error):
            raise
        return False
    return True


def forward(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    q, k, v = (given[name] for name in "qkv")
    return untyped.fmha_fwd(q, k, v, bias=given["bias"], out=given.get("out"), return_lse=True)


def backward(given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    inputs = (given[name] for name in ("dout", "q", "k", "v", "out", "lse"))
    rooms = {name: given.get(name) for name in ("dq", "dk", "dv")}
    return untyped.fmha_bwd(*inputs, bias=given["bias"], **rooms)
