"""What torch's transforms see: the operators, torch.compile, fake and meta tensors, grad mode."""

import copy
from typing import Any

import pytest
import torch
from fresh_calls import fresh_calls
from inputs import DTYPES, prefix_sums, random_qkv
from packed_calls import packed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from untyped import explain, flash_attn_with_kvcache, fmha_bwd, fmha_fwd

import jitfmha
from jitfmha.aiter import reshape_and_cache_flash


def packed_qkv(rng: torch.Generator) -> tuple[list[Tensor], dict[str, Tensor]]:
    call = packed(rng, [5, 0, 17], [9, 4, 30], heads=(2, 2))
    return [*call.qkv], call.sequences.groups


def operator_arguments(rng: torch.Generator, mode: str, return_lse: bool) -> tuple[Any, ...]:
    if mode == "gm0":
        return (*random_qkv(rng), 0.3, "causal", [-1, -1], return_lse, *[None] * 6)
    qkv, groups = packed_qkv(rng)
    return (*qkv, None, "0", [8, 3], return_lse, *groups.values(), 17, 30, None, None)


@pytest.fixture
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("mode", ["gm0", "gm1"])
def test_opcheck(rng, mode, return_lse):
    arguments = operator_arguments(rng, mode, return_lse)
    torch.library.opcheck(torch.ops.jitfmha.fmha_fwd.default, arguments)
    out = torch.empty_like(arguments[0])
    torch.library.opcheck(torch.ops.jitfmha.fmha_fwd_out.default, (*arguments, out))


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """A function with something around the call, as a model has it."""
    out = fmha_fwd(q * 2, k, v.relu(), **options)
    assert isinstance(out, Tensor)
    return out + 1


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("mask", [0, 1, "causal", "b:4,5"])
def test_compile(rng, mask):
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for dtype in DTYPES.values():
        q, k, v = random_qkv(rng, dtype=dtype)
        assert torch.equal(compiled(q, k, v, mask=mask), attend(q, k, v, mask=mask))


@pytest.mark.usefixtures("fresh_dynamo", "quick_inductor")
@pytest.mark.filterwarnings("ignore")
def test_compile_with_inductor(rng):
    q, k, v = random_qkv(rng)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(q, k, v, mask=2), attend(q, k, v, mask=2))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile_dynamic(rng):
    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds

    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=count)
    for batch, seqlen_q, seqlen_k, heads in ((3, 33, 49, 4), (5, 64, 20, 6), (7, 100, 101, 8)):
        q, k, v = random_qkv(rng, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads)
        assert torch.equal(compiled(q, k, v, mask="causal"), attend(q, k, v, mask="causal"))
    assert count.frame_count == 1, "sizes were guarded on"


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile_dynamic_scale_and_window(rng):
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    q, k, v = random_qkv(rng)
    for scale, left in ((0.5, 3), (0.25, 9), (2.0, 20)):
        options = {"softmax_scale": scale, "window_size": (left, left + 1)}
        assert torch.equal(compiled(q, k, v, **options), attend(q, k, v, **options))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_group_mode(rng, dynamic):
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    (q, k, v), groups = packed_qkv(rng)
    for longest in ({}, {"max_seqlen_q": 17, "max_seqlen_k": 30}, {"max_seqlen_q": 18}):
        options = {**groups, **longest, "mask": "causal"}
        assert torch.equal(compiled(q, k, v, **options), attend(q, k, v, **options))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_lse_and_out(rng, dynamic):
    def into(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> tuple[Tensor, Tensor, bool]:
        result, lse = fmha_fwd(q, k, v, out=out, return_lse=True, mask=2)
        return result + 0, lse, result is out

    compiled = torch.compile(into, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen_q in (33, 20):
        q, k, v = random_qkv(rng, seqlen_q=seqlen_q)
        buffer = torch.full((2, seqlen_q, 3, 2, 64), -77.0)
        result, lse, is_out = compiled(q, k, v, buffer[:, :, 1])
        expected, expected_lse = fmha_fwd(q, k, v, mask=2, return_lse=True)
        assert is_out
        assert torch.equal(result, expected)
        assert torch.equal(lse, expected_lse)
        assert torch.equal(buffer[:, :, 1], expected)
        assert (buffer[:, :, ::2] == -77.0).all()


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile_reports_broken_rules(rng):
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, k, v = random_qkv(rng)
    with pytest.raises(Exception, match="k has hdim 32, q has 64"):
        compiled(q, k[..., :32].contiguous(), v)
    with pytest.raises(Exception, match=r"mask='?3"):
        compiled(q, k, v, mask=3)


@pytest.mark.usefixtures("fresh_dynamo")
def test_export(rng):
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, mask="causal")

    q, k, v = random_qkv(rng)
    program = torch.export.export(Model(), (q, k, v))
    assert torch.equal(program.module()(q, k, v), attend(q, k, v, mask="causal"))


def test_out_that_requires_grad(rng):
    """Writing into a leaf, or into what autograd has recorded, would give wrong gradients."""
    q, k, v = random_qkv(rng)
    leaf = torch.empty_like(q, requires_grad=True)
    for out in (leaf, leaf * 1):
        with pytest.raises(NotImplementedError, match="out requires grad"):
            fmha_fwd(q, k, v, out=out)
        with torch.no_grad():
            assert torch.equal(fmha_fwd(q, k, v, out=out), fmha_fwd(q, k, v))


def test_writing_out_is_seen_by_autograd(rng):
    """What autograd saved must not be changed behind its back."""
    q, k, v = random_qkv(rng)
    weight = torch.ones((), requires_grad=True)
    out = torch.zeros_like(q)
    product = (weight * out).sum()
    fmha_fwd(q, k, v, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_refused_call_writes_nothing_that_autograd_sees(rng):
    """Not where a kernel finds lengths that Python refuses, either."""
    q, k, v = (x[0] for x in random_qkv(rng))
    sums = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), prefix_sums([20, 40]))
    out, lse = torch.zeros_like(q), torch.zeros(2, 33)
    for call in (
        lambda: fmha_fwd(q, k, v, out=out, **sums),
        lambda: fmha_bwd(q, q, k, v, q, lse, dq=out, **sums),
    ):
        with pytest.raises(ValueError, match="cu_seqlens_q"):
            call()
    assert out._version == 0
    assert not out.any()


def test_parameters_without_grad_mode(rng):
    q, k, v = random_qkv(rng)
    parameters = [torch.nn.Parameter(x) for x in (q, k, v)]
    with torch.no_grad():
        assert torch.equal(fmha_fwd(*parameters), fmha_fwd(q, k, v))
    assert fmha_fwd(*parameters).requires_grad


def test_inference_mode(rng):
    q, k, v = random_qkv(rng)
    expected = fmha_fwd(q, k, v)
    with torch.inference_mode():
        inside = [x.clone() for x in (q, k, v)]
        assert torch.equal(fmha_fwd(*inside), expected)
        assert torch.equal(fmha_fwd(*inside, out=torch.empty_like(q)), expected)
        assert torch.equal(fmha_fwd(q, k, v), expected)
    assert torch.equal(fmha_fwd(*inside), expected)


@pytest.mark.parametrize("mode", ["gm0", "gm1"])
def test_fake_tensors(rng, mode):
    qkv, groups = (random_qkv(rng), {}) if mode == "gm0" else packed_qkv(rng)
    expected = fmha_fwd(*qkv, return_lse=True, **groups)
    with FakeTensorMode() as fake:
        fakes = [fake.from_tensor(x) for x in qkv]
        fake_groups = {name: fake.from_tensor(x) for name, x in groups.items()}
        results = fmha_fwd(*fakes, return_lse=True, **fake_groups)
        alone = fmha_fwd(*fakes, **fake_groups)
    for result, real in zip((*results, alone), (*expected, expected[0]), strict=True):
        assert result.shape == real.shape
        assert result.stride() == real.stride()
        assert result.dtype == real.dtype
        assert result.device == real.device


def test_meta_tensors(rng):
    q, k, v = (x.to("meta") for x in random_qkv(rng, hdim_v=32))
    out, lse = fmha_fwd(q, k, v, return_lse=True)
    assert out.is_meta
    assert out.shape == (2, 33, 2, 32)
    assert lse.shape == (2, 2, 33)
    with pytest.raises(ValueError, match="v has seqlen 48"):
        fmha_fwd(q, k, v[:, 1:])
    fmha_fwd(q.requires_grad_(), k, v).sum().backward()
    assert q.grad is not None
    assert q.grad.is_meta
    assert q.grad.shape == q.shape


def test_forward_mode_tangents_are_refused(rng):
    q, k, v = random_qkv(rng)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="q carries a forward-mode tangent"):
            fmha_fwd(dual, k, v)
        assert torch.equal(fmha_fwd(q, k, v), fmha_fwd(q.clone(), k, v))


def test_subclass_with_torch_function(rng):
    class Tagged(Tensor):
        pass

    q, k, v = random_qkv(rng)
    tagged = q.as_subclass(Tagged)
    out = fmha_fwd(tagged, k, v)
    assert torch.equal(out.as_subclass(Tensor), fmha_fwd(q, k, v))


def test_call_under_a_dispatch_mode(rng):
    """Profilers and the like see the operator, not a hole."""
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Recorder():  # type: ignore[no-untyped-call]
        fmha_fwd(*random_qkv(rng))
    assert "jitfmha.fmha_fwd.default" in seen


def test_module_with_attention_can_be_copied_and_saved(rng):
    q, k, v = random_qkv(rng)
    first = explain(q, k, v)
    assert copy.deepcopy(first).problem == first.problem


def call_for_both(rng: torch.Generator, mode: str, dtype: str) -> tuple[Any, Any, Any]:
    """Tensors, what the function takes beside them, and what the operator does."""
    qkv, groups = (random_qkv(rng), {}) if mode == "gm0" else packed_qkv(rng)
    rest = (None, "0", [-1, -1], True, *groups.values(), *[None] * (6 - len(groups)))
    return [x.to(DTYPES[dtype]) for x in qkv], groups, rest


def negated(x: Tensor) -> Tensor:
    """The same values with torch's negative bit: what lies in memory has the other sign."""
    return torch._neg_view(-x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["gm0", "gm1"])
def test_negative_bit_of_inputs(rng, mode, dtype):
    """Also where the same call without the bit came before."""
    plain, groups, rest = call_for_both(rng, mode, dtype)
    expected = fmha_fwd(*plain, **groups)
    for i in range(3):
        inputs = [negated(x) if i == j else x for j, x in enumerate(plain)]
        assert inputs[i].is_neg()
        assert torch.equal(torch.ops.jitfmha.fmha_fwd(*inputs, *rest)[0], expected)
        assert torch.equal(fmha_fwd(*inputs, **groups), expected)
        with fresh_calls():
            assert torch.equal(fmha_fwd(*inputs, **groups), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["gm0", "gm1"])
def test_negative_bit_of_out(rng, mode, dtype):
    plain, groups, rest = call_for_both(rng, mode, dtype)
    expected, expected_lse = fmha_fwd(*plain, **groups, return_lse=True)
    fmha_fwd(*plain, **groups, out=torch.empty_like(expected))
    for inputs in (plain, [negated(x) for x in plain]):
        out = negated(torch.full_like(expected, torch.nan))
        returned, lse = fmha_fwd(*inputs, **groups, out=out, return_lse=True)
        assert returned is out
        assert out.is_neg()
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        out = negated(torch.full_like(expected, torch.nan))
        lse = torch.ops.jitfmha.fmha_fwd_out(*inputs, *rest, out)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)


def test_negative_bit_of_cu_seqlens(rng):
    """Refused, also where the same call without it came before."""
    qkv, groups = packed_qkv(rng)
    expected = fmha_fwd(*qkv, **groups)
    for name in groups:
        with pytest.raises(ValueError, match=f"{name} has torch's negative bit"):
            fmha_fwd(*qkv, **(groups | {name: negated(groups[name])}))
        resolved = {name: negated(groups[name]).resolve_neg()}
        assert torch.equal(fmha_fwd(*qkv, **(groups | resolved)), expected)


def test_negative_bit_of_gradients(rng):
    """Refused where they are written: they had the other sign."""
    q, k, v = (torch.randn(1, 3, 2, 64, generator=rng).half() for _ in range(3))
    out, lse = fmha_fwd(q, k, v, return_lse=True)
    for name in ("dq", "dk", "dv"):
        room = torch.zeros_like(q)
        fmha_bwd(out, q, k, v, out, lse, **{name: room})
        with pytest.raises(ValueError, match=f"{name} has torch's negative bit"):
            fmha_bwd(out, q, k, v, out, lse, **{name: negated(room)})


def test_unused_rows_of_a_negated_out_stay(rng):
    (q, k, v), groups = packed_qkv(rng)
    q = torch.cat([q, q])
    out = negated(torch.full_like(q, 7.0))
    fmha_fwd(q, k, v, out=out, **groups)
    assert torch.equal(out[:22], fmha_fwd(q[:22], k, v, **groups))
    assert (out[22:] == 7.0).all()


def test_imaginary_part_of_a_conjugate(rng):
    """Where such tensors come from: every other number, unless the last dimension has one only."""
    z = torch.randn(2, 33, 2, 1, generator=rng, dtype=torch.complex64).conj()
    assert z.imag.is_neg()
    _, k, v = random_qkv(rng, hdim=1, hdim_v=8)
    for _ in range(2):
        assert torch.equal(fmha_fwd(z.imag, k, v), fmha_fwd(z.imag.clone(), k, v))


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_conjugate_bit_is_refused(rng, name):
    """Only complex numbers have a conjugate, and these are not served."""
    named = dict(zip(("q", "k", "v"), random_qkv(rng, seqlen_k=33), strict=True))
    named["out"] = torch.empty_like(named["q"])
    named[name] = torch.zeros_like(named[name], dtype=torch.complex64).conj()
    with pytest.raises(TypeError, match=f"{name} has dtype torch.complex64"):
        fmha_fwd(**named)
    q, k, v, out = named.values()
    with pytest.raises(TypeError, match=f"{name} has dtype torch.complex64"):
        torch.ops.jitfmha.fmha_fwd_out(q, k, v, None, "0", [-1, -1], False, *[None] * 6, out)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_jit_trace_is_refused(rng, requires_grad):
    """Also where the same call came before."""
    q, k, v = (x.requires_grad_(requires_grad) for x in random_qkv(rng))
    fmha_fwd(q, k, v)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace .* use\s+torch\.export"):
        torch.jit.trace(lambda *x: fmha_fwd(*x), (q, k, v))
    assert fmha_fwd(q, k, v).shape == q.shape


CACHE, ROWS, LENGTHS = torch.zeros(3, 4, 2, 16), torch.zeros(3, 4, 16), torch.zeros(3).int()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "call",
    [
        lambda x: jitfmha.rms_norm(x, out_dtype=torch.int8),
        lambda x: jitfmha.qk_norm_rope_cache(x, q_weight=ROWS[0, 0]),
        lambda x: flash_attn_with_kvcache(x[:, None], CACHE, CACHE, cache_seqlens=LENGTHS),
        lambda x: reshape_and_cache_flash(
            *(x[:, :2], x[:, :2], CACHE, CACHE, LENGTHS.long(), "auto"), *[LENGTHS[:1].float()] * 2
        ),
    ],
    ids=["rows", "heads", "cache", "written"],
)
def test_jit_trace_of_others_is_refused(call):
    """It recorded results that nobody writes, or said that a length is no int."""
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace"):
        torch.jit.trace(call, (ROWS,), check_trace=False)
