"""AITER's functions: signatures, the meaning of their arguments, and the four results."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inputs import prefix_sums, random_qkv
from reference import assert_close, attention, attention_packed
from torch import Tensor
from untyped import fmha_v3_fwd, fmha_v3_varlen_fwd

FIRST = ["q", "k", "v"]
GROUPS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "min_seqlen_q"]
WINDOW = ["is_causal", "window_size_left", "window_size_right"]
RETURNS = ["return_softmax_lse", "return_dropout_randval", "how_v3_bf16_cvt"]
DESCALES = ["q_descale", "k_descale", "v_descale"]
BATCH_REQUIRED = [*FIRST, "dropout_p", "softmax_scale", *WINDOW, *RETURNS]
BATCH_OPTIONAL = ["out", "bias", "alibi_slopes", *DESCALES, "gen"]
GROUP_REQUIRED = [
    *(*FIRST, *GROUPS, "dropout_p", "softmax_scale", "logits_soft_cap", "zero_tensors"),
    *(*WINDOW, *RETURNS),
]
GROUP_OPTIONAL = [
    *("out", "block_table", "bias", "alibi_slopes", *DESCALES, "gen"),
    *("cu_seqlens_q_padded", "cu_seqlens_k_padded"),
]


@pytest.mark.parametrize(
    ("function", "required", "optional"),
    [
        (fmha_v3_fwd, BATCH_REQUIRED, BATCH_OPTIONAL),
        (fmha_v3_varlen_fwd, GROUP_REQUIRED, GROUP_OPTIONAL),
    ],
)
def test_signature(
    function: Callable[..., object], required: list[str], optional: list[str]
) -> None:
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [*required, *optional]
    for name, parameter in parameters.items():
        assert parameter.default is (inspect.Parameter.empty if name in required else None)


def batch_call(q: Tensor, k: Tensor, v: Tensor, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "dropout_p": 0.0,
        "softmax_scale": 0.2,
        "is_causal": False,
        "window_size_left": -1,
        "window_size_right": -1,
        "return_softmax_lse": True,
        "return_dropout_randval": False,
        "how_v3_bf16_cvt": 1,
    } | changes
    required = [values.pop(name) for name in BATCH_REQUIRED[3:]]
    return fmha_v3_fwd(q, k, v, *required, **values)


LENGTHS = ([5, 0, 40, 17], [9, 4, 30, 40])


def group_call(q: Tensor, k: Tensor, v: Tensor, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "cu_seqlens_q": prefix_sums(LENGTHS[0]),
        "cu_seqlens_k": prefix_sums(LENGTHS[1]),
        "max_seqlen_q": 40,
        "max_seqlen_k": 40,
        "min_seqlen_q": 0,
        "dropout_p": 0.0,
        "softmax_scale": 0.2,
        "logits_soft_cap": 0.0,
        "zero_tensors": False,
        "is_causal": False,
        "window_size_left": -1,
        "window_size_right": -1,
        "return_softmax_lse": True,
        "return_dropout_randval": False,
        "how_v3_bf16_cvt": 1,
    } | changes
    required = [values.pop(name) for name in GROUP_REQUIRED[3:]]
    return fmha_v3_varlen_fwd(q, k, v, *required, **values)


def packed_qkv(rng: torch.Generator, gap: int = 0) -> list[Tensor]:
    total_q, total_k = (sum(n + gap for n in lengths) for lengths in LENGTHS)
    return [x[0] for x in random_qkv(rng, batch=1, seqlen_q=total_q, seqlen_k=total_k, heads_q=4)]


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
def test_batch_windows(
    rng: torch.Generator,
    seqlen_q: int,
    is_causal: bool,
    left: int,
    right: int,
    window: tuple[int, int],
) -> None:
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
def test_group_windows(
    rng: torch.Generator, is_causal: bool, left: int, right: int, window: tuple[int, int]
) -> None:
    q, k, v = packed_qkv(rng)
    out, lse, randval, state = group_call(
        q, k, v, is_causal=is_causal, window_size_left=left, window_size_right=right
    )
    starts = (prefix_sums(lengths).tolist()[:-1] for lengths in LENGTHS)
    expected = attention_packed(q, k, v, *LENGTHS, *starts, window_size=window, softmax_scale=0.2)
    assert_close((out, lse), expected, q, k, v, 0.2)
    assert randval.numel() == 0
    assert state.shape == (2,)


def test_lse_is_empty_when_not_asked_for(rng: torch.Generator) -> None:
    qkv = random_qkv(rng)
    out, lse, _, _ = batch_call(*qkv, return_softmax_lse=False)
    assert lse.shape == (0,)
    assert lse.dtype == torch.float32
    assert torch.equal(out, batch_call(*qkv)[0])
    packed = packed_qkv(rng)
    assert group_call(*packed, return_softmax_lse=False)[1].shape == (0,)


def test_rounding_modes_are_accepted(rng: torch.Generator) -> None:
    qkv = [x.bfloat16() for x in random_qkv(rng)]
    results = [batch_call(*qkv, how_v3_bf16_cvt=mode)[0] for mode in (0, 1, 2)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_out(rng: torch.Generator) -> None:
    q, k, v = random_qkv(rng)
    buffer = torch.full((2, 33, 3, 2, 64), -77.0)
    out, _, _, _ = batch_call(q, k, v, out=buffer[:, :, 1])
    assert out.data_ptr() == buffer[:, :, 1].data_ptr()
    assert torch.equal(out, batch_call(q, k, v)[0])
    assert (buffer[:, :, ::2] == -77.0).all()


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("zero_tensors", [False, True])
def test_zero_tensors(rng: torch.Generator, zero_tensors: bool, gap: int) -> None:
    q, k, v = packed_qkv(rng, gap)
    behind = 4  # rows that belong to no sequence, besides the gaps
    q = torch.cat([q, q[:behind]])
    padded = {
        "cu_seqlens_q_padded": prefix_sums([n + gap for n in LENGTHS[0]]),
        "cu_seqlens_k_padded": prefix_sums([n + gap for n in LENGTHS[1]]),
    }
    options: dict[str, Any] = {"zero_tensors": zero_tensors, **(padded if gap else {})}
    out, lse, _, _ = group_call(q, k, v, out=torch.full_like(q, -77.0), **options)
    fresh, fresh_lse, _, _ = group_call(q, k, v, **options)
    unused = torch.ones(q.shape[0], dtype=torch.bool)
    for start, n in zip(padded["cu_seqlens_q_padded"].tolist(), LENGTHS[0], strict=False):
        unused[start : start + n] = False
    assert unused.sum() == 4 * gap + behind
    assert (out[unused] == (0.0 if zero_tensors else -77.0)).all()
    assert (fresh[unused] == 0).all()
    assert torch.equal(out[~unused], fresh[~unused])
    assert torch.equal(lse, fresh_lse)
    assert (lse[:, unused] == -torch.inf).all()


UNSERVED: list[tuple[dict[str, object], type[Exception], list[str]]] = [
    ({"dropout_p": 0.5}, NotImplementedError, ["dropout_p=0.5"]),
    ({"dropout_p": 1.5}, ValueError, ["dropout_p=1.5"]),
    ({"dropout_p": -1}, ValueError, ["dropout_p=-1"]),
    ({"dropout_p": None}, TypeError, ["dropout_p", "None"]),
    ({"return_dropout_randval": True}, NotImplementedError, ["return_dropout_randval=True"]),
    ({"return_dropout_randval": 0}, TypeError, ["return_dropout_randval", "0"]),
    ({"return_softmax_lse": None}, TypeError, ["return_softmax_lse", "None"]),
    ({"is_causal": 1}, TypeError, ["is_causal", "1"]),
    ({"how_v3_bf16_cvt": 3}, ValueError, ["how_v3_bf16_cvt=3"]),
    ({"how_v3_bf16_cvt": -1}, ValueError, ["how_v3_bf16_cvt=-1"]),
    ({"how_v3_bf16_cvt": True}, TypeError, ["how_v3_bf16_cvt", "True"]),
    ({"window_size_left": -2}, ValueError, ["window_size", "-2"]),
    ({"window_size_right": 1.5}, TypeError, ["window_size_right", "1.5"]),
    ({"softmax_scale": math.inf}, ValueError, ["softmax_scale=inf"]),
    ({"bias": torch.ones(3, 4)}, NotImplementedError, ["bias", "(3, 4)"]),
    ({"alibi_slopes": torch.ones(4)}, NotImplementedError, ["alibi_slopes", "(4,)"]),
    ({"q_descale": torch.ones(1)}, ValueError, ["q_descale", "fp8", "float32"]),
    ({"k_descale": torch.ones(1)}, ValueError, ["k_descale", "fp8", "float32"]),
    ({"v_descale": torch.ones(1)}, ValueError, ["v_descale", "fp8", "float32"]),
    ({"gen": torch.Generator()}, NotImplementedError, ["gen", "Generator"]),
]
UNSERVED_GROUP: list[tuple[dict[str, object], type[Exception], list[str]]] = [
    ({"min_seqlen_q": 1}, NotImplementedError, ["min_seqlen_q=1"]),
    ({"min_seqlen_q": 0.0}, TypeError, ["min_seqlen_q", "0.0"]),
    ({"logits_soft_cap": 30.0}, NotImplementedError, ["logits_soft_cap=30.0"]),
    ({"zero_tensors": 1}, TypeError, ["zero_tensors", "1"]),
    ({"max_seqlen_q": None}, TypeError, ["max_seqlen_q", "None"]),
    ({"max_seqlen_k": 39}, ValueError, ["max_seqlen_k=39", "40"]),
    ({"block_table": torch.ones(2, 4)}, NotImplementedError, ["block_table", "(2, 4)"]),
    ({"cu_seqlens_q": None}, ValueError, ["cu_seqlens_q is missing"]),
]


@pytest.mark.parametrize(("changes", "error", "texts"), UNSERVED)
def test_batch_errors(
    rng: torch.Generator, changes: dict[str, Any], error: type[Exception], texts: list[str]
) -> None:
    with pytest.raises(error) as raised:
        batch_call(*random_qkv(rng), **changes)
    for text in texts:
        assert text in str(raised.value)


@pytest.mark.parametrize(("changes", "error", "texts"), [*UNSERVED, *UNSERVED_GROUP])
def test_group_errors(
    rng: torch.Generator, changes: dict[str, Any], error: type[Exception], texts: list[str]
) -> None:
    with pytest.raises(error) as raised:
        group_call(*packed_qkv(rng), **changes)
    for text in texts:
        assert text in str(raised.value)


def test_compile(rng: torch.Generator) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(group_call, fullgraph=True, backend="aot_eager")
    q, k, v = packed_qkv(rng)
    for options in ({"is_causal": True}, {"zero_tensors": True, "out": torch.zeros_like(q)}):
        actual = compiled(q, k, v, **options)
        expected = group_call(q, k, v, **options)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
