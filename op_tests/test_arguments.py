"""Every broken rule is an error that names the argument and its value."""

import functools
import math
import re
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from inputs import random_qkv
from refusals import Refusal, refused, values
from torch import Tensor
from untyped import explain, fmha_bwd, fmha_fwd

import jitfmha

Q = (2, 33, 4, 64)
K = (2, 49, 2, 64)
SHAPES = (("q", Q), ("k", K), ("v", K))


def tensors(**changes: Tensor) -> dict[str, Tensor]:
    return {"q": torch.zeros(Q), "k": torch.zeros(K), "v": torch.zeros(K)} | changes


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **options)


BROKEN: list[Refusal] = [
    *values(
        ValueError,
        softmax_scale=[0.0, -1, math.nan, math.inf, 1e39, 1e-50],
        logit_softcap=[-1.0, math.nan, math.inf, 1e-40],
        sink_size=[-1, 2**63],
        window_size=[(2**63, 0)],
        num_splits=[-1, 129],
        dropout_p=[1.0, -0.1, math.nan],
    ),
    *values(
        TypeError,
        softmax_scale=["1", True],
        return_lse=[1],
        bias=[1.0],
        logit_softcap=[False],
        sink_size=[1.0, False],
        num_splits=[True, 1.0, "2"],
        dropout_p=["0.1"],
        deterministic=["no"],
    ),
    ({"q": None}, TypeError, ["q", "NoneType"]),
    ({"q": [1.0]}, TypeError, ["q", "list"]),
    ({"k": 3}, TypeError, ["k", "int"]),
    ({"v": "v"}, TypeError, ["v", "str"]),
    ({"q": zeros(*Q, dtype=torch.float64)}, TypeError, ["q", "torch.float64"]),
    ({"q": zeros(*Q, dtype=torch.int32)}, TypeError, ["q", "torch.int32"]),
    ({"k": zeros(*K, dtype=torch.float16)}, TypeError, ["k", "torch.float16", "torch.float32"]),
    ({"v": zeros(*K, dtype=torch.bfloat16)}, TypeError, ["v", "torch.bfloat16", "torch.float32"]),
    ({"q": torch.zeros(Q).to_sparse()}, TypeError, ["q", "torch.sparse_coo"]),
    ({"v": torch.zeros(K).to_sparse()}, TypeError, ["v", "torch.sparse_coo"]),
    ({"q": zeros(33, 4, 64)}, ValueError, ["q", "(33, 4, 64)"]),
    ({"q": zeros()}, ValueError, ["q", "()"]),
    ({"k": zeros(2, 49, 128)}, ValueError, ["k", "(2, 49, 128)"]),
    ({"v": zeros(1, 2, 49, 2, 64)}, ValueError, ["v", "(1, 2, 49, 2, 64)"]),
    ({"k": zeros(3, 49, 2, 64)}, ValueError, ["k has batch size 3", "2"]),
    ({"v": zeros(1, 49, 2, 64)}, ValueError, ["v has batch size 1", "2"]),
    ({"v": zeros(2, 48, 2, 64)}, ValueError, ["v has seqlen 48", "49"]),
    ({"v": zeros(2, 49, 4, 64)}, ValueError, ["v has 4 heads", "2"]),
    ({"k": zeros(2, 49, 2, 32)}, ValueError, ["k has hdim 32", "64"]),
    ({"q": zeros(2, 33, 3, 64)}, ValueError, ["3 heads", "2"]),
    ({"q": zeros(2, 33, 0, 64), "k": zeros(2, 49, 0, 64)}, ValueError, ["v has 2 heads"]),
    ({"k": zeros(2, 49, 0, 64), "v": zeros(2, 49, 0, 64)}, ValueError, ["4 heads", "0"]),
    ({"q": zeros(2, 33, 4, 577), "k": zeros(2, 49, 2, 577)}, ValueError, ["hdim", "577", "576"]),
    ({"q": zeros(2, 33, 4, 0), "k": zeros(2, 49, 2, 0)}, ValueError, ["hdim", "0", "576"]),
    ({"v": zeros(2, 49, 2, 600)}, ValueError, ["hdim of v", "600", "576"]),
    ({"q": zeros(2, 33, 4, 128)[..., ::2]}, ValueError, ["q", "stride 2", "contiguous"]),
    ({"k": zeros(2, 49, 64, 2).mT}, ValueError, ["k", "stride 2", "contiguous"]),
    ({"v": zeros(2, 49, 2, 1).expand(K)}, ValueError, ["v", "stride 0", "contiguous"]),
    ({"softmax_scale": 10**400}, ValueError, ["softmax_scale"]),
    *(({n: zeros(*shape, device="meta")}, ValueError, ["meta", "cpu"]) for n, shape in SHAPES),
    ({"out": 1}, TypeError, ["out", "int"]),
    ({"out": zeros(*Q, dtype=torch.float16)}, TypeError, ["out", "torch.float16"]),
    ({"out": zeros(2, 33, 4, 63)}, ValueError, ["out", "(2, 33, 4, 63)", "(2, 33, 4, 64)"]),
    ({"out": zeros(2, 33, 4, 128)[..., ::2]}, ValueError, ["out", "stride 2"]),
    ({"out": zeros(1, 33, 4, 64).expand(Q)}, ValueError, ["out", "(0, 256, 64, 1)", "overlap"]),
    ({"out": zeros(20000).as_strided(Q, (8448, 64, 64, 1))}, ValueError, ["out", "overlap"]),
    ({"out": torch.zeros(Q).to_sparse()}, TypeError, ["out", "torch.sparse_coo"]),
    ({"bias": zeros(33, 49)}, ValueError, ["bias", "(33, 49)", "(2, 4, 33, 49)"]),
    ({"bias": zeros(2, 4, 33, 48)}, ValueError, ["bias", "(2, 4, 33, 48)", "(2, 4, 33, 49)"]),
    ({"bias": zeros(2, 4, 33, 1)}, ValueError, ["bias", "(2, 4, 33, 1)"]),
    ({"bias": zeros(2, 2, 33, 49)}, ValueError, ["bias", "(2, 2, 33, 49)"]),
    ({"bias": zeros(1, 1, 1, 49, dtype=torch.half)}, TypeError, ["bias", "torch.float16"]),
    ({"bias": zeros(1, 1, 1, 49, dtype=torch.uint8)}, TypeError, ["bias", "torch.uint8"]),
    ({"bias": zeros(1, 1, 1, 49).to_sparse()}, TypeError, ["bias", "torch.sparse_coo"]),
    ({"bias": zeros(1, 1, 1, 49, device="meta")}, ValueError, ["bias is on meta"]),
    ({"alibi_slopes": [1.0]}, TypeError, ["alibi_slopes", "list"]),
    ({"alibi_slopes": zeros(3)}, ValueError, ["alibi_slopes", "(3,)", "(2, 4)"]),
    ({"alibi_slopes": zeros(4, dtype=torch.half)}, TypeError, ["alibi_slopes", "torch.float16"]),
    ({"logit_softcap": None}, TypeError, ["logit_softcap", "NoneType"]),
    ({"sink": zeros(2)}, ValueError, ["sink", "(2,)", "(4,)"]),
    ({"sink": zeros(4, dtype=torch.float64)}, TypeError, ["sink", "torch.float64"]),
    ({"dropout_p": 0.1, "generator": 3}, TypeError, ["generator", "int (3)"]),
    ({"dropout_p": 0.1, "rng_state": 3}, TypeError, ["rng_state", "int"]),
    ({"dropout_p": 0.1, "rng_state": zeros(2)}, TypeError, ["rng_state", "torch.float32"]),
    (
        {"dropout_p": 0.1, "rng_state": zeros(3, dtype=torch.int64)},
        ValueError,
        ["rng_state", "(3,)"],
    ),
    (
        {
            "dropout_p": 0.1,
            "rng_state": zeros(2, dtype=torch.int64),
            "generator": torch.Generator(),
        },
        ValueError,
        ["generator", "rng_state"],
    ),
]


@pytest.mark.parametrize(("changes", "error", "texts"), BROKEN)
@pytest.mark.parametrize("function", [fmha_fwd, explain])
def test_errors(function, changes, error, texts):
    arguments = tensors() | changes
    for _ in range(2):  # also when the same call came before
        with refused(error, *texts):
            function(**arguments)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_shares_memory(rng, name):
    buffer = torch.zeros(3, 2, 33, 2, 64)
    named = dict(zip(("q", "k", "v"), random_qkv(rng, seqlen_k=33), strict=True))
    named[name] = buffer[0]
    with pytest.raises(ValueError, match=f"out shares memory with {name}"):
        fmha_fwd(**named, out=buffer[0])
    flat = buffer.flatten()
    with pytest.raises(ValueError, match=f"out shares memory with {name}"):
        fmha_fwd(**named, out=flat[64 : 64 + buffer[0].numel()].view(buffer[0].shape))
    fmha_fwd(**named, out=buffer[1])


READ = {
    "cu_seqlens_q": torch.tensor([0, 3, 5]).int(),
    "cu_seqlens_k": torch.tensor([0, 9, 13]).int(),
    "cu_seqlens_q_padded": torch.tensor([0, 4, 7]).int(),
    **{f"{name}_descale": torch.ones(1) for name in "qkvp"},
    "bias": torch.zeros(2, 7, 9),
    "alibi_slopes": torch.zeros(2),
    "sink": torch.zeros(2),
    "rng_state": torch.ones(2, dtype=torch.int64),
}
PAGES = {
    "block_table": {"block_table": torch.tensor([[0, 1, 2], [3, 4, 0]]).int()},
    "lists": {
        "block_table": torch.tensor([0, 1, 2, 3, 4]).int(),
        "cu_seqlens_k_padded": torch.tensor([0, 3, 5]).int(),
    },
}


@pytest.mark.parametrize("pages", PAGES)
def test_out_shares_memory_with_what_is_beside_q_k_and_v(pages):
    """In a call whose tensors lie as those before, which were apart; one kernel serves all."""
    named = {"q": torch.zeros(7, 2, 8), "k": torch.zeros(5, 4, 1, 8), "v": torch.zeros(5, 4, 1, 8)}
    call = {name: x.to(torch.int8) for name, x in named.items()} | READ | PAGES[pages]
    call |= {"dropout_p": 0.5, "max_seqlen_k": 9}
    memory = torch.zeros(4096, dtype=torch.uint8)
    out = memory[2048:2272].view(torch.bfloat16).view(7, 2, 8)
    fmha_fwd(**call, out=out)
    for name in (*READ, *PAGES[pages]):
        x = call[name]

        def ends_at(end: int, x: Tensor = x) -> Tensor:
            return memory[end - x.nbytes : end].view(x.dtype).view(x.shape).copy_(x)

        fmha_fwd(**call | {name: ends_at(2048)}, out=out)
        with pytest.raises(ValueError, match=f"^out shares memory with {name};"):
            fmha_fwd(**call | {name: ends_at(2048 + x.element_size())}, out=out)


def test_out_shares_memory_with_lists_of_any_length():
    """Which are no part of what a call is known by."""
    q, k = torch.zeros(7, 2, 8, dtype=torch.int8), torch.zeros(5, 4, 1, 8, dtype=torch.int8)
    memory = torch.zeros(4096, dtype=torch.uint8)
    out = memory[2048:2272].view(torch.bfloat16).view(7, 2, 8)
    named = READ | PAGES["lists"] | {"dropout_p": 0.5, "max_seqlen_k": 9, "out": out}
    for length in (5, 9):
        lists = memory[2048 - 4 * 5 :][: 4 * length].view(torch.int32)
        context = pytest.raises(ValueError, match="out shares memory with block_table")
        with context if length > 5 else nullcontext():
            fmha_fwd(q, k, k, **named | {"block_table": lists})


def test_out_interleaved_with_q_is_served(rng):
    """Slices of one packed buffer span each other without sharing an element."""
    buffer = torch.randn(2, 33, 4, 2, 64, generator=rng)
    q, k, v, out = buffer.unbind(2)
    expected = fmha_fwd(q.clone(), k.clone(), v.clone())
    assert fmha_fwd(q, k, v, out=out) is out
    assert torch.equal(out, expected)
    rows = torch.randn(2, 66, 2, 64, generator=rng)
    expected = fmha_fwd(rows[:, ::2].clone(), k, v)
    assert torch.equal(fmha_fwd(rows[:, ::2], k, v, out=rows[:, 1::2]), expected)


def test_the_same_shapes_with_other_addresses_are_checked_again(rng):
    q, k, v = random_qkv(rng, seqlen_k=33)
    fmha_fwd(q, k, v, out=torch.empty_like(q))
    with pytest.raises(ValueError, match="out shares memory with v"):
        fmha_fwd(q, k, v, out=v)


def test_public_names():
    assert all(hasattr(jitfmha, name) for name in jitfmha.__all__)
    modules = ("aiter", "context_parallel", "flash_attn", "integrations")
    assert dir(jitfmha) == sorted([*jitfmha.__all__, *modules])
    assert all(hasattr(jitfmha, name) for name in modules)


def test_options_are_given_by_name():
    q = torch.zeros(1, 4, 2, 8)
    for rest in ((0.5,), (None, 0.5)):
        with pytest.raises(TypeError, match="by name"):
            fmha_fwd(q, q, q, *rest)
        with pytest.raises(TypeError, match="by name"):
            fmha_bwd(q, q, q, q, q, q[..., 0], *rest)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("causal", 'mask="causal"'),
        ("is_causal", "mask=1"),
        ("attn_mask", "bias"),
        ("scale", "softmax_scale"),
        ("softmax_scal", "softmax_scale"),
        ("return_les", "return_lse"),
    ],
)
def test_unexpected_keywords_say_what_is_meant(name, meant):
    q = torch.zeros(1, 4, 2, 8)
    backward = functools.partial(jitfmha.fmha_bwd, dout=q, out=q, lse=torch.zeros(1, 2, 4))
    for call in (fmha_fwd, explain, backward):
        wanted = f"unexpected keyword argument '{name}'; did you mean {meant}"
        with pytest.raises(TypeError, match=re.escape(wanted)):
            call(q=q, k=q, v=q, **{name: True})


def test_an_unexpected_keyword_like_nothing():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(TypeError, match=r"^fmha_fwd got an unexpected keyword argument 'zzz'$"):
        fmha_fwd(q, q, q, zzz=1)
    # It shares a word with softmax_scale.
    with pytest.raises(TypeError, match=r"'output_scale'$"):
        fmha_fwd(q, q, q, output_scale=1)


def test_all_unexpected_keywords_are_named():
    q = torch.zeros(1, 4, 2, 8)
    wanted = "unexpected keyword arguments: 'zzz', 'scale' (did you mean softmax_scale?), 'yyy'"
    backward = functools.partial(jitfmha.fmha_bwd, dout=q, out=q, lse=torch.zeros(1, 2, 4))
    calls: dict[str, Any] = {"fmha_fwd": fmha_fwd, "explain": explain, "fmha_bwd": backward}
    calls |= {"flash_attn_func": jitfmha.flash_attn_func}
    for name, call in calls.items():
        with pytest.raises(TypeError, match=re.escape(f"{name} got {wanted}")):
            call(q=q, k=q, v=q, zzz=1, scale=1, yyy=2)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_nested_tensors(layout, place):
    inputs = [torch.zeros(2, 4, 2, 8)] * 3
    parts = [torch.zeros(3, 2, 8), torch.zeros(4, 2, 8)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Torch says that they are new.
        inputs[place] = torch.nested.nested_tensor(parts, layout=layout)
    for call in (fmha_fwd, explain):
        with pytest.raises(TypeError, match=f"{'qkv'[place]} is a nested tensor; pass the rows"):
            call(*inputs)


def test_arrays_are_named_by_their_type():
    q = torch.zeros(1, 4, 2, 8)
    for name in ("q", "k", "v", "bias", "cu_seqlens_q"):
        given = {"q": q, "k": q, "v": q, "cu_seqlens_k": q} if name == "cu_seqlens_q" else {}
        given = {"q": q, "k": q, "v": q} | given | {name: q.numpy()}
        with pytest.raises(TypeError) as caught:
            fmha_fwd(**given)
        assert str(caught.value).startswith(
            f"{name} must be a torch.Tensor, got numpy.ndarray of shape (1, 4, 2, 8) and dtype"
        )
