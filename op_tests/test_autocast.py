"""torch.autocast does to attention what it does to scaled_dot_product_attention."""

import warnings
from typing import Any

import pytest
import torch
from closeness import assert_close
from inputs import random_qkv
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from untyped import fmha_fwd

from jitfmha.call.pytorch.ops import NAMES
from jitfmha.problem.float64_reference import attention

DTYPE = torch.bfloat16


@pytest.mark.usefixtures("poisoned_memory")
def test_inputs_are_cast_to_the_dtype_of_the_region(rng):
    q, k, v = random_qkv(rng)
    expected = fmha_fwd(q.to(DTYPE), k.to(DTYPE), v.to(DTYPE), mask="causal")
    for mixed in ((q, k, v), (q.to(DTYPE), k, v), (q, k.half(), v.to(DTYPE))):
        fmha_fwd(q, k, v, mask="causal")  # The same call outside, before.
        with torch.autocast("cpu", DTYPE):
            out = fmha_fwd(*mixed, mask="causal")
        assert out.dtype == DTYPE
        if mixed[1].dtype != torch.float16:
            assert torch.equal(out, expected)
    exact = attention(q.to(DTYPE), k.to(DTYPE), v.to(DTYPE), mask="causal")
    with torch.autocast("cpu", DTYPE):
        result = fmha_fwd(q, k, v, mask="causal", return_lse=True)
    assert_close(result, exact, q.to(DTYPE), k, v)
    assert fmha_fwd(q, k, v, mask="causal").dtype == torch.float32


def test_gradients_have_the_dtype_of_the_inputs(rng):
    with FakeTensorMode() as mode:
        leaves = [mode.from_tensor(x).requires_grad_() for x in random_qkv(rng)]
        with torch.autocast("cpu", DTYPE):
            out = fmha_fwd(*leaves)
        out.sum().backward()
    assert out.dtype == DTYPE
    assert [x.grad.dtype for x in leaves] == [torch.float32] * 3


class Arrived(TorchDispatchMode):
    """Keeps the arguments of our operators, none of which runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "jitfmha" not in str(func):
            return func(*args, **(kwargs or {}))
        self.arguments = dict(zip(NAMES, args, strict=False))
        return args[0], args[0]


def test_what_must_be_float32_stays(rng):
    q, k, v = random_qkv(rng)
    slopes, sink = torch.rand(2, generator=rng), torch.randn(2, generator=rng)
    for bias_dtype, expected in ((torch.float32, torch.float32), (torch.float16, DTYPE)):
        bias = torch.randn(2, 2, 33, 49, generator=rng).to(bias_dtype)
        options = {"bias": bias, "alibi_slopes": slopes, "sink": sink}
        with torch.autocast("cpu", DTYPE), Arrived() as arrived:  # type: ignore[no-untyped-call]
            fmha_fwd(q, k, v, **options)
        dtypes = {name: arrived.arguments[name].dtype for name in ("q", *options)}
        assert dtypes == {
            "q": DTYPE,
            "bias": expected,
            "alibi_slopes": torch.float32,
            "sink": torch.float32,
        }


def test_other_calls_are_not_changed(rng):
    q, k, v = random_qkv(rng)
    expected, out = fmha_fwd(q, k, v), torch.empty_like(q)
    with torch.autocast("cpu", DTYPE):
        fmha_fwd(q, k, v, out=out)
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(fmha_fwd(q, k, v), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # There may be no GPU.
        of_gpus = torch.autocast("cuda", DTYPE)
    with of_gpus:
        assert torch.equal(fmha_fwd(q, k, v), expected)
    assert torch.equal(out, expected)


def test_the_operator_and_compiled_calls(rng):
    q, k, v = random_qkv(rng)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", DTYPE):
            out = fmha_fwd(q, k, v)
        assert isinstance(out, Tensor)
        return out + 1

    expected = fmha_fwd(q.to(DTYPE), k.to(DTYPE), v.to(DTYPE))
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), expected + 1)
    with torch.autocast("cpu", DTYPE):
        rest = (None, "0", [-1, -1], False, *[None] * 6)
        assert torch.equal(torch.ops.jitfmha.fmha_fwd(q, k, v, *rest)[0], expected)
