"""AITER's functions: the meaning of their arguments, and the four results."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close, is_same
from inputs import lay_out, prefix_sums, random_qkv
from packed_calls import Sequences, packed
from refusals import Refusal, refused, values
from torch import Tensor
from untyped import fmha_v3_fwd, fmha_v3_varlen_fwd

import jitfmha
from jitfmha.problem.float64_reference import attention, attention_packed

flash_attn_func: Any = jitfmha.aiter.flash_attn_func
flash_attn_varlen_func: Any = jitfmha.aiter.flash_attn_varlen_func
mha_fwd: Any = jitfmha.aiter.mha_fwd
mha_varlen_fwd: Any = jitfmha.aiter.mha_varlen_fwd


PLAIN: dict[str, Any] = {
    "dropout_p": 0.0,
    "softmax_scale": 0.2,
    "is_causal": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "return_softmax_lse": True,
    "return_dropout_randval": False,
    "how_v3_bf16_cvt": 1,
}
LENGTHS = ([5, 0, 40, 17], [9, 4, 30, 40])
PLAIN_GROUP: dict[str, Any] = {
    **PLAIN,
    **Sequences(LENGTHS).groups,
    "max_seqlen_q": 40,
    "max_seqlen_k": 40,
    "min_seqlen_q": 0,
    "logits_soft_cap": 0.0,
    "zero_tensors": False,
}


def batch_call(q: Tensor, k: Tensor, v: Tensor, **changes: Any) -> Any:
    return fmha_v3_fwd(q, k, v, **(PLAIN | changes))


def group_call(q: Tensor, k: Tensor, v: Tensor, **changes: Any) -> Any:
    return fmha_v3_varlen_fwd(q, k, v, **(PLAIN_GROUP | changes))


def packed_qkv(rng: torch.Generator, gap: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return packed(rng, *LENGTHS, gap=gap).qkv


# is_causal, left, right, and the window around the bottom-right diagonal that it stands for where
# the longest seqlen_k is 40: a side of 40 or more is open, and causal sets the right side to 0.
WINDOWS = [
    (False, -1, -1, (-1, -1)),
    (False, 5, 9, (5, 9)),
    (False, -1, 9, (-1, 9)),
    (False, 5, -1, (5, -1)),
    (False, 39, 39, (39, 39)),
    (False, 40, 40, (-1, -1)),
    (False, 3, 1000, (3, -1)),
    (True, -1, -1, (-1, 0)),
    (True, 5, -1, (5, 0)),
    (True, 5, 9, (5, 0)),
    (True, 40, 40, (-1, 0)),
]


@pytest.mark.parametrize(("is_causal", "left", "right", "window"), WINDOWS)
@pytest.mark.parametrize("seqlen_q", [1, 20, 40, 90])
def test_batch_windows(rng, seqlen_q, is_causal, left, right, window):
    q, k, v = random_qkv(rng, seqlen_q=seqlen_q, seqlen_k=40, heads_q=4)
    out, lse, randval, state = batch_call(
        q, k, v, is_causal=is_causal, window_size_left=left, window_size_right=right
    )
    expected = attention(q, k, v, window_size=window, softmax_scale=0.2)
    assert_close((out, lse), expected, q, k, v, 0.2)
    assert randval.numel() == 0
    assert state.dtype == torch.int64
    assert state.shape == (2,)


@pytest.mark.parametrize(("is_causal", "left", "right", "window"), WINDOWS)
def test_group_windows(rng, is_causal, left, right, window):
    q, k, v = packed_qkv(rng)
    out, lse, randval, state = group_call(
        q, k, v, is_causal=is_causal, window_size_left=left, window_size_right=right
    )
    spans = Sequences(LENGTHS).spans
    expected = attention_packed(q, k, v, *spans, window_size=window, softmax_scale=0.2)
    assert_close((out, lse), expected, q, k, v, 0.2)
    assert randval.numel() == 0
    assert state.shape == (2,)


def test_lse_is_empty_when_not_asked_for(rng):
    qkv = random_qkv(rng)
    out, lse, _, _ = batch_call(*qkv, return_softmax_lse=False)
    assert lse.shape == (0,)
    assert lse.dtype == torch.float32
    assert torch.equal(out, batch_call(*qkv)[0])
    packed = packed_qkv(rng)
    assert group_call(*packed, return_softmax_lse=False)[1].shape == (0,)


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("zero_tensors", [False, True])
def test_zero_tensors(rng, zero_tensors, gap):
    q, k, v = packed_qkv(rng, gap)
    behind = 4  # rows that belong to no sequence, besides the gaps
    q = torch.cat([q, q[:behind]])
    sequences = Sequences(LENGTHS, gap)
    options: dict[str, Any] = {"zero_tensors": zero_tensors, **sequences.groups}
    with torch.inference_mode():  # outside of which torch does not write to what is made inside
        given = torch.full_like(q, -77.0)
    out, lse, _, _ = group_call(q, k, v, out=given, **options)
    fresh, fresh_lse, _, _ = group_call(q, k, v, **options)
    unused = torch.cat([~sequences.used_rows(0), torch.ones(behind, dtype=torch.bool)])
    assert unused.sum() == 4 * gap + behind
    assert (out[unused] == (0.0 if zero_tensors else -77.0)).all()
    assert (fresh[unused] == 0).all()
    assert torch.equal(out[~unused], fresh[~unused])
    assert torch.equal(lse, fresh_lse)
    assert (lse[:, unused] == -torch.inf).all()


UNSERVED: list[Refusal] = [
    *values(
        ValueError,
        dropout_p=[1.5, -1],
        return_dropout_randval=[True],
        is_causal=[2],
        how_v3_bf16_cvt=[3, -1],
        window_size_left=[2**63],
        softmax_scale=[math.inf],
    ),
    *values(
        TypeError,
        dropout_p=[None],
        return_dropout_randval=["0"],
        return_softmax_lse=[0.0],
        how_v3_bf16_cvt=[True],
        window_size_right=[1.5],
        gen=[3],
    ),
    ({"bias": torch.ones(3, 4)}, ValueError, ["bias", "3, 4)"]),
    ({"alibi_slopes": torch.ones(5)}, ValueError, ["alibi_slopes", "(5,)"]),
    *(({f"{n}_descale": torch.ones(1)}, ValueError, [f"{n}_descale", "8-bit"]) for n in "qkv"),
]
UNSERVED_GROUP: list[Refusal] = [
    *values(ValueError, min_seqlen_q=[-1], logits_soft_cap=[-30.0], zero_tensors=[2]),
    ({"cu_seqlens_q": None}, ValueError, ["cu_seqlens_q=None"]),
    *values(TypeError, min_seqlen_q=[0.0], logits_soft_cap=["x"], max_seqlen_q=[None]),
    ({"max_seqlen_k": 39}, ValueError, ["max_seqlen_k=39", "40"]),
    ({"block_table": torch.ones(2, 4)}, ValueError, ["block_table", "k has shape"]),
]


@pytest.mark.parametrize(("changes", "error", "texts"), UNSERVED)
def test_batch_errors(rng, changes, error, texts):
    with refused(error, *texts):
        batch_call(*random_qkv(rng), **changes)


@pytest.mark.parametrize(("changes", "error", "texts"), [*UNSERVED, *UNSERVED_GROUP])
def test_group_errors(rng, changes, error, texts):
    with refused(error, *texts):
        group_call(*packed_qkv(rng), **changes)


@pytest.mark.parametrize(("is_causal", "left", "right", "window"), WINDOWS)
def test_the_functions_agree(rng, is_causal, left, right, window):
    """What models call, and what it ends in, are the same; windows may be tensors."""
    q, k, v = random_qkv(rng, seqlen_q=20, seqlen_k=40, heads_q=4)
    sides = (is_causal, left, right)
    out, lse, _, _ = fmha_v3_fwd(q, k, v, 0.0, 0.2, *sides, True, False, 1)
    results = [
        mha_fwd(q, k, v, 0.0, 0.2, *sides, 0, True, False)[:2],
        flash_attn_func(q, k, v, 0.0, 0.2, is_causal, (left, right), return_lse=True),
        flash_attn_func(
            *(q, k, v, 0, 0.2, is_causal, torch.tensor([left, right])),
            return_lse=1,
            return_attn_probs=True,
        )[:2],
    ]
    strided = [x.mT.contiguous().mT for x in (q, k, v)]
    alone = flash_attn_func(*strided, 0.0, 0.2, is_causal, [left, right, 0], num_splits=3)
    for result in (*results, (alone, lse)):
        assert is_same(result, (out, lse))

    packed, cu = packed_qkv(rng), [prefix_sums(lengths) for lengths in LENGTHS]
    out, lse, _, _ = group_call(
        *packed, is_causal=is_causal, window_size_left=left, window_size_right=right
    )
    longest = (torch.tensor(40), np.int64(40))
    direct = mha_varlen_fwd(
        *(*packed, *cu, *longest, 0, 0.0, 0.2, 0.0, False, *sides, 0, True, False)
    )
    called = flash_attn_varlen_func(
        *(*packed, *cu, *longest),
        softmax_scale=0.2,
        causal=is_causal,
        window_size=(left, right),
        return_lse=True,
    )
    for result in (direct[:2], called):
        assert is_same(result, (out, lse))


@pytest.mark.parametrize(
    ("bias", "error", "text"),
    [
        (True, TypeError, "bias must be a torch.Tensor, got bool"),
        (torch.zeros(3, 1, 20, 40), ValueError, r"bias has shape \(3, 1, 20, 40\); expected \(2,"),
        (torch.zeros(1, 20, 40), ValueError, r"bias has shape \(1, 20, 40\)"),
    ],
)
def test_bias_of_shorter_sequences_is_checked(bias, error, text):
    q, k = torch.zeros(2, 20, 4, 64), torch.zeros(2, 40, 4, 64)
    with pytest.raises(error, match=text):
        flash_attn_func(q, k, k, bias=bias, cu_seqlens_q=prefix_sums([20, 3]))


@pytest.mark.parametrize("shorter", ["q", "k", "both"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "every_other_row"])
def test_sequences_that_are_shorter_than_their_place(rng, layout, is_causal, shorter):
    lengths_q, lengths_k = [20, 0, 7], [40, 33, 1]
    if shorter == "k":
        lengths_q = [20] * 3
    if shorter == "q":
        lengths_k = [40] * 3
    qkv = random_qkv(rng, batch=3, seqlen_q=20, seqlen_k=40, heads_q=4)
    q, k, v = (lay_out(x, layout) for x in qkv)
    given = {
        "cu_seqlens_q": None if shorter == "k" else prefix_sums(lengths_q).long(),
        "cu_seqlens_kv": None if shorter == "q" else prefix_sums(lengths_k),
    }
    options = (0.0, 0.2, is_causal, 5, -1, 0, True, False)
    buffer = torch.full((3, 20, 2, 4, 64), -77.0)
    out, lse, _, _ = mha_fwd(q, k, v, *options, **given, out=buffer[:, :, 1])
    fresh, fresh_lse = flash_attn_func(
        q, k, v, 0.0, 0.2, is_causal, (5, -1), return_lse=True, **given
    )
    assert out.data_ptr() == buffer[:, :, 1].data_ptr()
    assert (buffer[:, :, 0] == -77.0).all()
    assert torch.equal(lse, fresh_lse)
    assert lse.shape == (3, 4, 20)
    for n, (sq, sk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        one = [x[n : n + 1, :length] for x, length in zip(qkv, (sq, sk, sk), strict=True)]
        window = (5, 0) if is_causal else (5, -1)
        expected = attention(*one, window_size=window, softmax_scale=0.2)
        assert_close((out[n, None, :sq], lse[n, None, :, :sq]), expected, *one, 0.2)
        assert torch.equal(fresh[n, :sq], out[n, :sq])
        assert (fresh[n, sq:] == 0).all()
        assert (out[n, sq:] == -77.0).all()
        assert (lse[n, :, sq:] == -torch.inf).all()


def test_out_of_shorter_sequences_must_hold_them_one_after_the_other(rng):
    q, k, v = random_qkv(rng, batch=2, seqlen_q=20, seqlen_k=40)
    out = torch.zeros(2, 25, 2, 64)[:, :20]
    cu_seqlens_q = prefix_sums([20, 3])
    with pytest.raises(ValueError, match=r"out has strides \(3200, 128, 64, 1\)"):
        mha_fwd(
            *(q, k, v, 0.0, 0.2, False, -1, -1, 0, False, False), cu_seqlens_q=cu_seqlens_q, out=out
        )


def kept(randval: Tensor, dropout_p: float) -> Tensor:
    """What AITER's own tests take for kept."""
    return math.floor(255.0 * (1 - dropout_p)) - randval.float() >= 0


def test_dropout_bias_and_sinks(rng):
    q, k, v = random_qkv(rng, seqlen_q=20, seqlen_k=45, heads_q=4, hdim=32)
    bias, sink = torch.randn(20, 45, generator=rng), torch.randn(4, generator=rng).bfloat16()
    arguments = (0.3, None, True, 9, -1, 2, True, True)
    given = {"bias": bias, "sink_ptr": sink, "alibi_slopes": torch.rand(4, generator=rng)}
    generator = torch.Generator().manual_seed(3)
    out, lse, randval, rng_state = mha_fwd(q, k, v, *arguments, **given, gen=generator)
    assert randval.shape == (2, 4, 20, 45)
    assert randval.dtype == torch.uint8
    assert torch.equal(randval, jitfmha.dropout_randval(rng_state, 2, 4, 20, 45))
    options = {
        "window_size": (9, 0),
        "sink_size": 2,
        "bias": bias[None, None],
        "alibi_slopes": given["alibi_slopes"],
        "sink": sink,
    }
    keep = kept(randval, 0.3)
    assert abs(keep.float().mean() - 0.7) < 0.07
    expected = attention(q, k, v, keep=keep, dropout_p=0.3, **options)
    assert_close((out, lse), expected, q, k, v / 0.7)
    generator.manual_seed(3)
    again = mha_fwd(q, k, v, *arguments, **given, gen=generator)
    assert is_same(again, (out, lse, randval, rng_state))

    torch.manual_seed(3)
    called = flash_attn_func(
        *(q, k, v, 0.3, None, True, (9, 5, 2)), return_lse=True, return_attn_probs=True, **given
    )
    keep = kept(called[2], 0.3)
    expected = attention(q, k, v, keep=keep, dropout_p=0.3, **options)
    assert_close(called[:2], expected, q, k, v / 0.7)


def test_dropout_and_bias_of_packed_sequences(rng):
    q, k, v = (x[..., :32] for x in packed_qkv(rng, gap=3))
    bias = torch.randn(q.shape[0], 40, generator=rng)
    sequences = Sequences(LENGTHS, 3)
    slopes = torch.rand(4, 4, generator=rng)
    out, lse, randval, _ = group_call(
        *(q, k, v),
        dropout_p=0.3,
        return_dropout_randval=True,
        bias=bias,
        alibi_slopes=slopes,
        logits_soft_cap=3.0,
        **sequences.padded,
    )
    assert randval.shape == (4, q.shape[0], 40)
    _, _, starts_q, starts_k = sequences.spans
    for n, (sq, sk) in enumerate(zip(*LENGTHS, strict=True)):
        rows, keys = slice(starts_q[n], starts_q[n] + sq), slice(starts_k[n], starts_k[n] + sk)
        one = q[None, rows], k[None, keys], v[None, keys]
        expected = attention(
            *one,
            softmax_scale=0.2,
            bias=bias[None, None, rows, :sk],
            alibi_slopes=slopes[n],
            logit_softcap=3.0,
            keep=kept(randval[None, :, rows, :sk], 0.3),
            dropout_p=0.3,
        )
        assert_close((out[None, rows], lse[None, :, rows]), expected, *one[:2], one[2] / 0.7, 0.2)


@pytest.mark.parametrize("shape", [(20, 40), (2, 4, 20, 40)])
def test_bias_and_dropout_of_shorter_sequences(rng, shape):
    q, k, v = random_qkv(rng, batch=2, seqlen_q=20, seqlen_k=40, heads_q=4, hdim=32)
    bias, lengths = torch.randn(shape, generator=rng), ([20, 7], [31, 40])
    cu_seqlens = {"cu_seqlens_q": prefix_sums(lengths[0]), "cu_seqlens_kv": prefix_sums(lengths[1])}
    out, lse, randval, _ = mha_fwd(
        *(q, k, v, 0.3, 0.2, False, -1, -1, 0, True, True), **cu_seqlens, bias=bias
    )
    for n, (sq, sk) in enumerate(zip(*lengths, strict=True)):
        one = [x[n : n + 1, :length] for x, length in zip((q, k, v), (sq, sk, sk), strict=True)]
        keep = kept(randval[n, None, :, :sq, :sk], 0.3)
        small = bias.expand(2, 4, -1, -1)[n : n + 1, :, :sq, :sk]
        expected = attention(*one, softmax_scale=0.2, bias=small, keep=keep, dropout_p=0.3)
        result = out[n, None, :sq], lse[n, None, :, :sq]
        assert_close(result, expected, *one[:2], one[2] / 0.7, 0.2)


def test_short_sequences_are_skipped(rng):
    """Those of as many queries, too."""
    q, k, v = packed_qkv(rng)
    whole, all_lse = group_call(q, k, v, return_softmax_lse=True)[:2]
    out, lse = group_call(q, k, v, return_softmax_lse=True, min_seqlen_q=5)[:2]
    assert not out[:5].any()
    assert (lse[:, :5] == -torch.inf).all()
    assert torch.equal(out[5:], whole[5:])
    assert torch.equal(lse[:, 5:], all_lse[:, 5:])


def test_roundings_by_number(rng, monkeypatch):
    """As AITER counts them."""
    asked = []

    def spy(q: Tensor, *_: Tensor, bf16_cvt: str, **options: Any) -> Tensor:
        asked.append(bf16_cvt)
        return torch.zeros_like(q)

    monkeypatch.setattr("jitfmha.layers.known_attention.fmha_fwd", spy)
    for number in range(3):
        batch_call(*random_qkv(rng), how_v3_bf16_cvt=number)
    assert asked == ["rtne", "rtna", "rtz"]


def test_num_splits_is_a_number(rng):
    with pytest.raises(ValueError, match="num_splits=-1"):
        flash_attn_func(*random_qkv(rng), num_splits=-1)


def test_compile(rng):
    torch._dynamo.reset()
    compiled = torch.compile(group_call, fullgraph=True, backend="aot_eager")
    q, k, v = packed_qkv(rng)
    for options in ({"is_causal": True}, {"zero_tensors": True, "out": torch.zeros_like(q)}):
        actual = compiled(q, k, v, **options)
        expected = group_call(q, k, v, **options)
        assert is_same(actual, expected)
