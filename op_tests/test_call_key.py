"""What a call left behind serves no call that differs from it in one ingredient.

These are the tensors; `test_every_option.py` has the options.

Every case changes one thing about a call. Both orders of the two calls must end as each of them
does where nothing came before: with the same bits, or with the same error.
"""

from typing import Any

import pytest
import torch
from fresh_calls import fresh_calls
from inputs import prefix_sums, random_qkv
from torch import Tensor
from untyped import fmha_fwd

from jitfmha.planning.target import MOST_CALLS, cpu_isas_here

Call = dict[str, Any]
OUT = ((2, 33, 4, 64), (8448, 256, 64, 1), torch.float32, "cpu")
BASES = ("batch mode", "group mode", "padded group mode", "with out")


def base_call(rng: torch.Generator, base: str) -> Call:
    """An ordinary call; ``out`` stands as its shape, strides, dtype and device."""
    q, k, v = random_qkv(rng, heads_q=4, heads_k=2)
    if "group" not in base:
        return {"q": q, "k": k, "v": v} | ({"out": OUT} if base == "with out" else {})
    groups = {"cu_seqlens_q": prefix_sums([10, 23]), "cu_seqlens_k": prefix_sums([29, 20])}
    if base == "padded group mode":
        groups |= {"cu_seqlens_q": i32(0, 10, 32), "cu_seqlens_q_padded": i32(0, 11, 33)}
        groups |= {"cu_seqlens_k_padded": i32(0, 29, 49)}
    return {"q": q[0], "k": k[0], "v": v[0], **groups}


def outcome(call: Call) -> list[object]:
    """The bits of the results and how they lie in memory, or the error."""
    if isinstance(call.get("out"), tuple):
        shape, strides, dtype, device = call["out"]
        out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        call = {**call, "out": out}
    try:
        results = fmha_fwd(**call)
    except Exception as error:
        return [type(error), str(error)]
    tensors = results if isinstance(results, tuple) else (results,)
    return [
        (x.shape, x.stride(), x.dtype, x.contiguous().view(torch.uint8).numpy().tobytes())
        for x in tensors
    ]


def alone(call: Call) -> list[object]:
    with fresh_calls():
        return outcome(call)


def restrided(x: Tensor, *strides: int) -> Tensor:
    """The values of ``x`` with other strides; what lies between is NaN."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
    memory = torch.full((last + 1,), torch.nan, dtype=x.dtype)
    return memory.as_strided(x.shape, strides).copy_(x)


def stride_changes(name: str) -> dict[str, Call]:
    """Each stride of a tensor of the batch mode by itself, as functions of the tensor."""
    seqlen, heads = (33, 4) if name == "q" else (49, 2)
    strides = {
        "batch": (seqlen * heads * 64 + 5, heads * 64, 64, 1),
        "seq": (seqlen * heads * 64, heads * 64 - 64, 64 * (seqlen + 1) * heads, 1),
        "head": (seqlen * heads * 64, 64, seqlen * 64, 1),
        "hdim": (seqlen * heads * 64, heads * 64, 1, heads),
    }
    return {
        f"{name}'s {which} stride": {name: lambda x, s=s: restrided(x, *s)}
        for which, s in strides.items()
    }


def out_change(index: int, value: object) -> Call:
    return {"out": (*OUT[:index], value, *OUT[index + 1 :])}


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# What replaces an argument, or a function of the tensor that is there.
IN_BATCH_MODE: dict[str, Call] = {
    "all dtypes": dict.fromkeys(("q", "k", "v"), Tensor.half),
    "q's dtype": {"q": Tensor.half},
    "k's dtype": {"k": Tensor.half},
    "v's dtype": {"v": Tensor.half},
    "k's device": {"k": lambda x: x.to("meta")},
    "v's device": {"v": lambda x: x.to("meta")},
    "the batch": {name: lambda x: x[:1] for name in ("q", "k", "v")},
    "q's batch": {"q": lambda x: x[:1]},
    "k's batch": {"k": lambda x: x[:1]},
    "v's batch": {"v": lambda x: x[:1]},
    "seqlen_q": {"q": lambda x: x[:, :32].contiguous()},
    "seqlen_k": {name: lambda x: x[:, :48].contiguous() for name in ("k", "v")},
    "seqlen_k of a slice": {name: lambda x: x[:, :48] for name in ("k", "v")},
    "k's seqlen": {"k": lambda x: x[:, :48]},
    "v's seqlen": {"v": lambda x: x[:, :48]},
    "heads_q": {"q": lambda x: x[:, :, :2].contiguous()},
    "heads_q of a slice": {"q": lambda x: x[:, :, :2]},
    "heads_q that are no multiple": {"q": lambda x: x[:, :, :3]},
    "heads_k": {name: lambda x: x[:, :, :1].contiguous() for name in ("k", "v")},
    "k's heads": {"k": lambda x: x[:, :, :1]},
    "v's heads": {"v": lambda x: x[:, :, :1]},
    "hdim_q": {name: lambda x: x[..., :8] for name in ("q", "k")},
    "q's hdim": {"q": lambda x: x[..., :8]},
    "k's hdim": {"k": lambda x: x[..., :8]},
    "hdim_v": {"v": lambda x: x[..., :8]},
    "q's dimensions": {"q": lambda x: x[0]},
    "k's dimensions": {"k": lambda x: x[0]},
    "v's dimensions": {"v": lambda x: x[None]},
    "k's layout": {"k": Tensor.to_sparse},
    **stride_changes("q"),
    **stride_changes("k"),
    **stride_changes("v"),
    "return_lse's type": {"return_lse": 0},
    "out": {"out": (OUT[0], (8448, 64, 2112, 1), *OUT[2:])},
    "no tensor": {"k": lambda x: x.tolist()},
    "cu_seqlens": {"cu_seqlens_q": i32(0, 33), "cu_seqlens_k": i32(0, 49)},
}
WITH_OUT: dict[str, Call] = {
    "out's batch": out_change(0, (1, 33, 4, 64)),
    "out's seqlen": out_change(0, (2, 32, 4, 64)),
    "out's heads": out_change(0, (2, 33, 3, 64)),
    "out's hdim": out_change(0, (2, 33, 4, 63)),
    "out's dimensions": {"out": ((33, 4, 64), (256, 64, 1), *OUT[2:])},
    "out's batch stride": out_change(1, (8449, 256, 64, 1)),
    "out's seq and head strides": out_change(1, (8448, 64, 2112, 1)),
    "out's hdim stride": out_change(1, (16896, 512, 128, 2)),
    "out that overlaps itself": out_change(1, (0, 256, 64, 1)),
    "out's dtype": out_change(2, torch.float16),
    "out's device": out_change(3, "meta"),
    "no out": {"out": None},
}
IN_GROUP_MODE: dict[str, Call] = {
    "the number of sequences": {"cu_seqlens_q": i32(0, 33), "cu_seqlens_k": i32(0, 49)},
    "cu_seqlens_q's values": {"cu_seqlens_q": i32(0, 11, 33)},
    "cu_seqlens_k's values": {"cu_seqlens_k": i32(0, 0, 40)},
    "rows that are left over": {"cu_seqlens_q": i32(0, 10, 30)},
    "padded q": {"cu_seqlens_q_padded": i32(0, 10, 33)},
    "total_q": {"q": lambda x: torch.cat([x, x])},
    "total_k": {name: lambda x: torch.cat([x, x]) for name in ("k", "v")},
    "total_k that is too small": {name: lambda x: x[:48] for name in ("k", "v")},
    "heads_q": {"q": lambda x: x[:, :2]},
    "k's strides": {"k": lambda x: restrided(x, 64, 3136, 1)},
    "k's hdim": {"k": lambda x: x[..., :8]},
    "dimensions": {"q": lambda x: x[None]},
}
# Where 1, 1.0 and True, which are one dictionary key, are not all valid.
EQUAL_NUMBERS: list[tuple[str, object, object]] = [
    ("softmax_scale", 1, True),
    ("softmax_scale", 1, 1.0),
    ("mask", 1, True),
    ("mask", 1, 1.0),
    ("window_size", (1, 0), (True, 0)),
    ("window_size", (1, 0), (1.0, 0)),
    ("return_lse", True, 1),
]
CASES = [
    *(("batch mode", what, changes) for what, changes in IN_BATCH_MODE.items()),
    *(("with out", what, changes) for what, changes in WITH_OUT.items()),
    *(("group mode", what, changes) for what, changes in IN_GROUP_MODE.items()),
]


def assert_apart(first: Call, second: Call) -> None:
    """Neither call notices that the other came before."""
    expected = {id(call): alone(call) for call in (first, second)}
    for one, other in ((first, second), (second, first)):
        with fresh_calls():
            assert outcome(one) == expected[id(one)]
            assert outcome(other) == expected[id(other)]
            assert outcome(one) == expected[id(one)]


@pytest.mark.parametrize(("base", "changes"), [x[::2] for x in CASES], ids=[x[1] for x in CASES])
def test_one_ingredient(rng, base, changes):
    call = base_call(rng, base)
    assert isinstance(alone(call)[0], tuple), "the call itself is served"
    changed = call | {
        name: x(call[name]) if callable(x) and name in call else x for name, x in changes.items()
    }
    assert_apart(call, changed)


@pytest.mark.parametrize(("name", "number", "equal"), EQUAL_NUMBERS)
def test_equal_numbers_of_other_types(rng, name, number, equal):
    call = base_call(rng, "batch mode")
    assert_apart(call | {name: number}, call | {name: equal})


@pytest.mark.parametrize("base", BASES)
def test_lengths_and_strides_of_one_kind(rng, base):
    """Many of them one after the other: each is checked, and gets its own launch."""
    call = base_call(rng, base)
    dimension = 0 if "group" in base else 1
    calls = [
        call | {name: call[name].narrow(dimension, 0, n) for name in ("k", "v")}
        for n in (49, 1, 48, 17)
    ]
    calls += [call | {"k": call["k"].narrow(dimension, 0, n)} for n in (48, 17)]
    calls += [c | {"k": c["k"].contiguous(), "v": c["v"].contiguous()} for c in calls[:4]]
    expected = [alone(c) for c in calls]
    with fresh_calls():
        for _ in range(2):
            assert [outcome(c) for c in calls] == expected


def test_few_calls_of_one_kind_are_kept():
    with fresh_calls() as target:
        for n in range(MOST_CALLS + 2):
            x = torch.zeros(1, n, 1, 64)
            fmha_fwd(x, x, x)
        (kept,) = target.calls.values()
    assert 0 < len(kept.prepared) <= MOST_CALLS


def test_target(rng):
    """A target that is put in place is served by its own kernels, and leaves the others alone."""
    if len(cpu_isas_here()) == 1:
        pytest.skip("this processor runs kernels for one instruction set only")
    call = base_call(rng, "batch mode")
    here = outcome(call)
    with fresh_calls("generic"):
        generic = outcome(call)
        with fresh_calls():
            assert outcome(call) == here
        assert outcome(call) == generic
    assert outcome(call) == here
    # Sums are taken in another order.
    assert generic != here
