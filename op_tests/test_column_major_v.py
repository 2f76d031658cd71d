"""Values whose keys are contiguous: `v.stride(1) == 1` in gm0 and `v.stride(0) == 1` in gm1."""

from typing import Any

import pytest
import torch
from backward_calls import rounded
from closeness import assert_close, is_same
from fresh_calls import fresh_calls
from inputs import DTYPES, HDIM, HDIM_V, SIZES, random_qkv
from packed_calls import RAGGED, packed
from torch import Tensor
from untyped import explain, fmha_bwd, fmha_fwd

from jitfmha import emulate
from jitfmha.planning.target import cpu_isas_here
from jitfmha.problem.float64_reference import Result, attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DRAWN = pytest.mark.sample(
    ("an_isa", "dtype"),
    [(isa, dtype) for isa in cpu_isas_here() for dtype in (*DTYPES, "fp8_e4m3fn")],
    1,
    shared_by="column-major v",
)


def inputs(rng: torch.Generator, dtype: str, *sizes: Any, **named: int) -> Any:
    torch_dtype = DTYPES.get(dtype, torch.float8_e4m3fn)
    return random_qkv(rng, *sizes, hdim=HDIM, hdim_v=HDIM_V, dtype=torch_dtype, **named)


def column_major(v: Tensor) -> Tensor:
    """The same values, keys contiguous, at an odd address, with NaN between the columns."""
    *batch, seqlen, heads, hdim = v.shape
    room = torch.full((*batch, heads, hdim, seqlen + 3), torch.nan).to(v.dtype)
    view = room[..., 1 : 1 + seqlen].movedim(-1, -3)
    view.copy_(v)
    assert view.stride(-3) == 1
    return view


def check(actual: Result, expected: Result, *tensors: Tensor) -> None:
    q, k, v = (x.float() for x in tensors)
    assert_close(actual, expected, q, k, v, dtype=actual[0].dtype)


@DRAWN
def test_batch_mode(rng, an_isa, dtype):
    """Rows with contiguous elements first and last: they are calls of another kind."""
    for sizes in SIZES:
        q, k, v = inputs(rng, dtype, sizes)
        expected = attention(q, k, v, mask="causal")
        with fresh_calls(an_isa):
            for layout in (column_major(v), v, column_major(v), v):
                check(fmha_fwd(q, k, layout, mask="causal", return_lse=True), expected, q, k, v)


@DRAWN
def test_group_mode(rng, an_isa, dtype):
    torch_dtype = DTYPES.get(dtype, torch.float8_e4m3fn)
    call = packed(rng, *RAGGED, hdim=HDIM, hdim_v=HDIM_V, dtype=torch_dtype)
    call.v = column_major(call.v)
    with fresh_calls(an_isa):
        check(call.call(), call.expected(), *call.qkv)


@pytest.mark.sample(
    ("an_isa", "dtype"),
    # The tile units have kernels for contiguous rows only.
    [(isa, dtype) for isa in cpu_isas_here() if "amx" not in isa for dtype in DTYPES],
    1,
)
def test_gradients(rng, an_isa, dtype):
    """The same bits as with rows that are contiguous, in the order of the call's own v."""
    for lengths in ((33, 49), (150, 290), (1, 130), (40, 1)):
        q, k, v = inputs(rng, dtype, (*lengths, 4, 2))
        out, lse = rounded(attention(q, k, v, mask="causal"), q.dtype)
        with fresh_calls(an_isa):
            dout = torch.randn(out.shape, generator=rng).to(out.dtype)
            expected = fmha_bwd(dout, q, k, v, out, lse, mask="causal")
            actual = fmha_bwd(dout, q, k, column_major(v), out, lse, mask="causal")
            leaves = [x.requires_grad_() for x in (q, k, column_major(v))]
            by_autograd = torch.autograd.grad(fmha_fwd(*leaves, mask="causal"), leaves, dout)
        for ours, theirs, autograds in zip(actual, expected, by_autograd, strict=True):
            assert torch.equal(ours, theirs)
            assert autograds.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.sample("hdim_v", [40, 200, 300], 1)
def test_gradients_on_amd(rng, dtype, hdim_v):
    """The same bits as with contiguous rows, also of tiles in two parts and of streamed rows."""
    q, k, v = random_qkv(rng, (35, 49, 2, 1), hdim=24, hdim_v=hdim_v, dtype=dtype)
    out, lse = rounded(attention(q, k, v), dtype)
    with emulate("gfx942" if dtype == torch.float32 else "gfx950", check=True) as emulated:
        expected, actual = (
            fmha_bwd(out.flip(1).contiguous(), q, k, x, out, lse) for x in (v, column_major(v))
        )
        assert emulated.findings() == ()
    assert is_same(actual, expected)


@DRAWN
def test_decode_steps(rng, an_isa, dtype):
    """Keys grow from call to call, and there is one at first, whose stride says nothing."""
    q, k, v = inputs(rng, dtype, seqlen_q=1, seqlen_k=80)
    cache = column_major(v)
    with fresh_calls(an_isa):
        for seqlen in (1, 2, 64, 65, 80):
            tensors = (q, k[:, :seqlen], cache[:, :seqlen])
            actual = fmha_fwd(*tensors, mask="causal", return_lse=True)
            check(actual, attention(*tensors, mask="causal"), *tensors)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_other_strides_are_refused(rng, name):
    call: dict[str, Any] = dict(zip("qkv", inputs(rng, "fp32"), strict=True))
    doubled = call[name].repeat_interleave(2, dim=-1)[..., ::2]
    for function in (fmha_fwd, explain):
        with pytest.raises(ValueError, match=f"{name} has stride 2 in its last dimension"):
            function(**(call | {name: doubled}))
    if name != "v":
        with pytest.raises(ValueError, match=f"{name} has stride .* in its last dimension"):
            fmha_fwd(**(call | {name: column_major(call[name])}))
