"""flash-attn 2's functions: the meaning of their arguments, and their results."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close, is_same
from inputs import DTYPES, prefix_sums, random_qkv
from refusals import refused, values
from torch import Tensor
from untyped import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

import jitfmha
from jitfmha.flash_attn import flash_attn_interface
from jitfmha.flash_attn.attend import attend
from jitfmha.problem.float64_reference import attention

GROUPS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
REQUIRED = {
    "flash_attn_func": ["q", "k", "v"],
    "flash_attn_kvpacked_func": ["q", "kv"],
    "flash_attn_qkvpacked_func": ["qkv"],
    "flash_attn_varlen_func": ["q", "k", "v", *GROUPS],
    "flash_attn_varlen_kvpacked_func": ["q", "kv", *GROUPS],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen"],
}


@pytest.mark.parametrize("name", REQUIRED)
def test_defaults_are_those_of_what_all_end_in(name):
    """Arguments that are left out are not passed on."""
    ends_in = [attend, flash_attn_interface._attend, flash_attn_interface._attend_varlen]
    expected = {n: p for each in ends_in for n, p in inspect.signature(each).parameters.items()}
    for argument in inspect.signature(getattr(jitfmha, name)).parameters.values():
        if argument.default is not argument.empty and argument.name in expected:
            assert argument.default == expected[argument.name].default


WINDOWS = [(-1, -1), (0, 0), (4, 9), (-1, 5), (7, -1), (30, 30), (200, 200)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_size", WINDOWS)
@pytest.mark.parametrize("seqlens", [(40, 40), (20, 70), (70, 20), (1, 33)])
def test_formula(rng, seqlens, window_size, causal):
    q, k, v = random_qkv(rng, seqlen_q=seqlens[0], seqlen_k=seqlens[1], heads_q=4)
    out, lse, s_dmask = flash_attn_func(
        q, k, v, causal=causal, window_size=window_size, return_attn_probs=True
    )
    expected = attention(q, k, v, mask=2 if causal else 0, window_size=window_size)
    assert_close((out, lse), expected, q, k, v)
    assert s_dmask.numel() == 0
    alone = flash_attn_func(q, k, v, 0.0, None, causal, window_size, 0.0, None, True)
    assert isinstance(alone, Tensor)
    assert torch.equal(alone, out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_forms(rng, dtype):
    qkv = torch.randn(2, 40, 3, 4, 64, generator=rng).to(DTYPES[dtype])
    q, k, v = qkv.unbind(2)
    expected = flash_attn_func(q, k, v, causal=True, softmax_scale=0.3, return_attn_probs=True)
    packed = flash_attn_qkvpacked_func(qkv, 0.0, 0.3, True, return_attn_probs=True)
    kv_packed = flash_attn_kvpacked_func(q, qkv[:, :, 1:], 0.0, 0.3, True, return_attn_probs=True)
    for result in (packed, kv_packed):
        assert is_same(result, expected)
    assert_close(expected[:2], attention(q, k, v, mask=2, softmax_scale=0.3), q, k, v, 0.3)


def test_varlen_forms(rng):
    lengths = [5, 0, 70, 17]
    qkv = torch.randn(sum(lengths), 3, 4, 64, generator=rng)
    q, k, v = qkv.unbind(1)
    cu = prefix_sums(lengths)
    options = {"window_size": (9, 3), "return_attn_probs": True}
    plain = flash_attn_varlen_func(q, k, v, cu, cu, 70, 70, **options)
    packed = flash_attn_varlen_qkvpacked_func(qkv, cu, 70, **options)
    kv_packed = flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu, 70, 70, **options)
    for result in (packed, kv_packed):
        assert is_same(result, plain)
    out, lse, s_dmask = plain
    assert s_dmask.numel() == 0
    assert lse.shape == (4, sum(lengths))
    for start, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        q1, k1, v1 = (x[None, start:end] for x in (q, k, v))
        expected = attention(q1, k1, v1, window_size=(9, 3))
        assert_close((out[None, start:end], lse[None, :, start:end]), expected, q1, k1, v1)


def call(name: str, **changes: Any) -> object:
    """The named function with small valid arguments, apart from the changes."""
    four, three = torch.zeros(1, 8, 2, 64), torch.zeros(8, 2, 64)
    ends = torch.tensor([0, 8], dtype=torch.int32)
    x = three if "varlen" in name else four
    values: dict[str, Any] = dict.fromkeys(("q", "k", "v"), x)
    values |= {"kv": torch.stack([x] * 2, -3), "qkv": torch.stack([x] * 3, -3)}
    values |= dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), ends)
    values |= dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), 8)
    function: Callable[..., object] = getattr(jitfmha, name)
    return function(**({n: values[n] for n in REQUIRED[name]} | changes))


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize(
    ("changes", "error", "texts"),
    [
        *values(
            ValueError,
            softcap=[math.nan, -1.0],
            dropout_p=[-0.1, 1.0, np.float32(1), math.nan],
            causal=[2],
            deterministic=[-1],
            window_size=[(1, 2, -1), (2**63, 0)],
            softmax_scale=[0.0],
        ),
        *values(
            TypeError,
            softcap=[None],
            dropout_p=["0", None, False, np.zeros(1)],
            causal=[1.0, torch.ones(1), "False"],
            return_attn_probs=["no"],
            window_size=[(1, 2, 3, 4), 3, {1, 2}, torch.ones(2, 2).int()],
            softmax_scale=["1"],
        ),
        ({"dropout_p": torch.zeros((), device="meta")}, TypeError, ["dropout_p", "meta"]),
        ({"window_size": (1.0, 2)}, TypeError, ["window_size", "1.0"]),
        ({"window_size": torch.ones(2)}, TypeError, ["window_size", "1.0"]),
    ],
)
def test_errors(name, changes, error, texts):
    call(name)
    with refused(error, *texts):
        call(name, **changes)


def of_head(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """The reference's probabilities ``(b, hq, sq, sk)``: what is left of them with v = 1."""
    one = torch.eye(k.shape[1])[None, :, None].expand(k.shape[0], -1, k.shape[2], -1)
    return attention(q, k, one, **options)[0].transpose(1, 2)


def assert_same_gradients(actual: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Of a sum of the elements with weights from -1 to 1."""
    weights = torch.linspace(-1, 1, actual.numel()).view_as(actual)
    ours, reference = (torch.autograd.grad((x * weights).sum(), inputs) for x in (actual, expected))
    for name, a, b in zip("qkv", ours, reference, strict=True):
        torch.testing.assert_close(a, b.float(), atol=2e-5, rtol=2e-5, msg=lambda m, n=name: n + m)


def test_gradients_of_paged_keys(rng):
    """What nobody sees of a page has the gradient 0."""
    q = torch.randn(9, 4, 64, generator=rng).requires_grad_()
    k, v = (torch.randn(5, 16, 2, 64, generator=rng).requires_grad_() for _ in range(2))
    table = torch.tensor([[3, 0], [1, 99]], dtype=torch.int32)
    cu_q, cu_k = prefix_sums([4, 5]), prefix_sums([20, 7])
    out = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 5, 20, causal=True, deterministic=True, block_table=table
    )
    parts = []
    for rows, pages, length in ((slice(0, 4), [3, 0], 20), (slice(4, 9), [1], 7)):
        keys, values = (x[pages].flatten(0, 1)[None, :length] for x in (k, v))
        parts.append(attention(q[None, rows], keys, values, mask=2)[0][0])
    assert_same_gradients(out, torch.cat(parts), (q, k, v))


def test_dropout_and_score_options(rng):
    qkv = random_qkv(rng, seqlen_q=20, seqlen_k=45, heads_q=4, hdim=32)
    q, k, v = (x.requires_grad_() for x in qkv)
    slopes = torch.rand(2, 4, generator=rng)
    given: dict[str, Any] = {"softcap": 2.0, "alibi_slopes": slopes, "return_attn_probs": True}
    given |= {"window_size": (15, 3, 2), "dropout_p": 0.3}
    options: dict[str, Any] = {"window_size": (15, 3), "sink_size": 2, "logit_softcap": 2.0}
    options["alibi_slopes"] = slopes
    torch.manual_seed(5)
    out, lse, signed = flash_attn_func(q, k, v, **given)
    assert signed.shape == (2, 4, 20, 45)
    torch.testing.assert_close(
        signed.abs().double(), of_head(q, k, **options), atol=1e-5, rtol=1e-5
    )
    dropped = (signed < 0).sum() / (signed != 0).sum()
    assert abs(dropped - 0.3) < 0.07
    expected = attention(q, k, v, keep=signed >= 0, dropout_p=0.3, **options)
    assert_close((out, lse), expected, q, k, v / 0.7)
    assert_same_gradients(out, expected[0], (q, k, v))
    torch.manual_seed(5)
    again = flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **given)
    assert is_same((out, lse, signed), again)
    other = flash_attn_func(q, k, v, **given)[2]
    assert not torch.equal(other < 0, signed < 0)


def test_dropout_and_score_options_of_packed_sequences(rng):
    lengths = [20, 0, 45, 1]
    q, k, v = (x[0] for x in random_qkv(rng, batch=1, seqlen_q=66, seqlen_k=66, hdim=32))
    cu, slopes = prefix_sums(lengths), torch.rand(4, 2, generator=rng)
    out, lse, signed = flash_attn_varlen_func(
        *(q, k, v, cu, cu, 45, 45),
        softcap=2.0,
        alibi_slopes=slopes,
        window_size=(15, 3, 2),
        dropout_p=0.3,
        return_attn_probs=True,
    )
    assert signed.shape == (4, 2, 45, 45)
    for n, (start, length) in enumerate(zip(cu.tolist(), lengths, strict=False)):
        one = [x[None, start : start + length] for x in (q, k, v)]
        of_one = signed[n, None, :, :length, :length]
        options: dict[str, Any] = {"window_size": (15, 3), "sink_size": 2, "logit_softcap": 2.0}
        options["alibi_slopes"] = slopes[n]
        probabilities = of_head(*one[:2], **options)
        torch.testing.assert_close(of_one.abs().double(), probabilities, atol=1e-5, rtol=1e-5)
        assert signed[n].count_nonzero() == of_one.count_nonzero()
        expected = attention(*one, keep=of_one >= 0, dropout_p=0.3, **options)
        result = out[None, start : start + length], lse[None, :, start : start + length]
        assert_close(result, expected, *one[:2], one[2] / 0.7)


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"causal": True}, {"causal": 1}),
    ({"causal": True}, {"causal": np.True_}),
    ({"causal": True}, {"causal": torch.tensor(True)}),
    ({"causal": True}, {"causal": True, "window_size": (-1, 3)}),
    ({"causal": False}, {"causal": None, "deterministic": None}),
    ({"causal": False}, {"causal": np.array(0), "return_attn_probs": 0}),
    ({"softmax_scale": 0.5}, {"softmax_scale": np.float32(0.5), "dropout_p": np.float16(0)}),
    ({"softmax_scale": 2.0}, {"softmax_scale": torch.tensor(2), "dropout_p": torch.zeros(())}),
    *(
        ({"window_size": (3, 0)}, {"window_size": window})
        for window in (
            *([3, 0], (3, 0, 0), [np.int64(3), 0], (torch.tensor(3), torch.tensor(0))),
            *(torch.tensor([3, 0]), np.array([3, 0]), torch.Size((3, 0)), torch.tensor([3, 0, 0])),
        )
    ),
    ({"window_size": (-1, 2)}, {"window_size": (-7, 2)}),
    ({"window_size": (2, -1)}, {"window_size": torch.tensor([2, -(2**62)])}),
]


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize(("plain", "as_peers_pass_it"), SAME)
def test_values_that_peers_accept(rng, name, plain, as_peers_pass_it):
    tensors = {n: torch.randn(8, len(n), 2, 64, generator=rng) for n in ("q", "kv", "qkv")}
    tensors["q"] = tensors["q"].squeeze(1)
    tensors["k"], tensors["v"] = tensors["kv"].unbind(1)
    batched = {n: x if "varlen" in name else x[None] for n, x in tensors.items()}
    given = {n: x for n, x in batched.items() if n in REQUIRED[name]}
    lengths: dict[str, Any] = {
        n: value
        for n in REQUIRED[name]
        if n.startswith("max_seqlen")
        for value in [torch.tensor([0, 8]).diff().max()]
    }
    expected = call(name, **given, **plain)
    assert torch.equal(call(name, **given, **lengths, **as_peers_pass_it), expected)  # type: ignore[arg-type]
    if plain:  # what is compared depends on the option at all
        assert plain == {"causal": False} or not torch.equal(expected, call(name, **given))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in REQUIRED if "varlen" in name])
@pytest.mark.parametrize("max_seqlen", [None, 8])
def test_varlen_without_cu_seqlens(name, max_seqlen):
    """Four dimensions and no prefix sums must not become batch mode."""
    q = torch.zeros(1, 8, 2, 64)
    tensors = {"q": q, "k": q, "v": q, "kv": torch.stack([q] * 2, -3)}
    tensors["qkv"] = torch.stack([q] * 3, -3)
    required = REQUIRED[name]
    without = {n: None if "cu_seqlens" in n else max_seqlen for n in required if "seqlen" in n}
    for given in (tensors, {}):
        changes = {n: x for n, x in given.items() if n in required} | without
        with pytest.raises(ValueError, match=r"cu_seqlens(_q)?=None: packed sequences need"):
            call(name, **changes)
    if "qkv" not in name:
        with pytest.raises(ValueError, match="cu_seqlens_k=None"):
            call(name, cu_seqlens_k=None)


@pytest.mark.parametrize(
    ("name", "argument", "shape"),
    [
        ("flash_attn_qkvpacked_func", "qkv", (1, 8, 2, 2, 64)),
        ("flash_attn_qkvpacked_func", "qkv", (8, 3, 2, 64)),
        ("flash_attn_kvpacked_func", "kv", (1, 8, 3, 2, 64)),
        ("flash_attn_kvpacked_func", "kv", ()),
        ("flash_attn_varlen_qkvpacked_func", "qkv", (1, 8, 3, 2, 64)),
        ("flash_attn_varlen_kvpacked_func", "kv", (8, 1, 2, 64)),
    ],
)
def test_packed_shapes(name, argument, shape):
    with pytest.raises(ValueError, match=argument) as raised:
        call(name, **{argument: torch.zeros(shape)})
    assert str(shape) in str(raised.value)
    with pytest.raises(TypeError, match=f"{argument} must be a torch.Tensor"):
        call(name, **{argument: None})


def test_compile(rng):
    torch._dynamo.reset()

    def attend(qkv: Tensor, left: int) -> list[Tensor]:
        options: dict[str, Any] = {"causal": True, "window_size": (left, left)}
        sums = torch.arange(0, 81, 40, dtype=torch.int32)
        packed = flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), sums, 40, **options)
        return [flash_attn_qkvpacked_func(qkv, **options), packed]

    qkv = torch.randn(2, 40, 3, 4, 64, generator=rng)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for actual, expected in zip(compiled(qkv, 8), attend(qkv, 8), strict=True):
        assert torch.equal(actual, expected)
