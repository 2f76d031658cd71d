"""scaled_dot_product_attention under the patch: what is routed is right, the rest is torch's."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from closeness import assert_close
from fresh_calls import fresh_calls
from inputs import LAYOUTS, lay_out, random_qkv
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

import jitfmha
from jitfmha.integrations import sdpa
from jitfmha.problem import torch_parts
from jitfmha.problem.float64_reference import attention, visible

TORCH = F.scaled_dot_product_attention


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The patch, and the calls that our function served."""
    served: list[Any] = []

    def counted(function: Any) -> Any:
        def kept(*args: Any, **options: Any) -> Any:
            served.append(options)
            return function(*args, **options)

        return kept

    for name in ("fmha_fwd", "_run"):
        monkeypatch.setattr(sdpa, name, counted(getattr(sdpa, name)))
    with sdpa.patch():
        yield served


def heads_first(rng: torch.Generator, **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in random_qkv(rng, **sizes))
    return q, k, v


def assert_served(ours: list[Any], qkv: tuple[Tensor, ...], **options: Any) -> None:
    """Against float64, and counted as ours; once more as a call that is known."""
    before = len(ours)
    first = F.scaled_dot_product_attention(*qkv, **options)
    out = F.scaled_dot_product_attention(*qkv, **options)
    assert len(ours) == before + 2
    assert torch.equal(out, first)
    assert out.stride() == first.stride()
    assert sdpa.explain(*qkv, **options).is_ours
    q, k, v = (x.transpose(1, 2) for x in qkv)
    bias = options.get("attn_mask")
    if bias is not None:
        bias = bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    mask = 1 if options.get("is_causal") else 0
    exact = attention(q, k, v, mask=mask, bias=bias, softmax_scale=options.get("scale"))
    lse = exact[1].float()  # SDPA returns none.
    assert_close((out.transpose(1, 2), lse), exact, q, k, v)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("seqlen_q", [0, 1, 33, 65])
def test_masks_and_lengths(rng, ours, seqlen_q):
    qkv = heads_first(rng, seqlen_q=seqlen_q, heads_q=3, heads_k=3)
    assert_served(ours, qkv)
    assert_served(ours, qkv, is_causal=True)
    assert_served(ours, qkv, scale=0.3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(rng, ours, layout):
    q, k, v = (lay_out(x, layout).transpose(1, 2) for x in random_qkv(rng))
    assert_served(ours, (q, k, v), is_causal=True)


def test_grouped_heads(rng, ours):
    qkv = heads_first(rng, heads_q=6, heads_k=2)
    assert_served(ours, qkv, enable_gqa=True)
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(*qkv)  # torch's refusal


@pytest.mark.parametrize("shape", [(33, 49), (2, 1, 33, 49), (2, 2, 33, 49), (2, 33, 49), (33, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_attn_mask(rng, ours, shape, dtype):
    """Also where it hides all keys of a query, which gives 0 as in torch."""
    qkv = heads_first(rng)
    attn_mask = torch.randn(shape, generator=rng)
    attn_mask = attn_mask > 0 if dtype == torch.bool else attn_mask
    if len(shape) > 1:
        attn_mask[..., 3, :] = False if dtype == torch.bool else -torch.inf
    expected = TORCH(*(x.double() for x in qkv), attn_mask=_as_double(attn_mask))
    for number in (1, 2):  # the second one is known
        out = F.scaled_dot_product_attention(*qkv, attn_mask=attn_mask)
        assert len(ours) == number
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


# The dimensions of query, key, value and attn_mask before seqlen and hdim; None is no mask.
BROADCAST: tuple[tuple[Any, ...], ...] = (
    ((), (), (), None),
    ((), (), (), ()),
    ((3,), (3,), (3,), (3,)),
    ((3,), (), (1,), (1,)),
    ((), (3,), (3,), ()),
    ((2, 3), (3,), (3,), (3,)),
    ((2, 3), (1, 3), (1, 1), (2, 1)),
    ((1, 1), (2, 3), (2, 1), (1, 1)),
    ((2, 4), (2, 1), (2, 1), (4,)),
    ((2, 3, 4), (2, 3, 4), (2, 3, 4), (3, 1)),
    ((2, 3, 4), (3, 1), (1, 3, 1), (2, 1, 4)),
    ((1, 3, 4), (2, 1, 4), (4,), None),
)
SHARED_HEADS: tuple[tuple[Any, ...], ...] = (
    ((4,), (2,), (2,), (4,)),
    ((2, 4), (1, 2), (2,), None),
    ((2, 3, 4), (2, 3, 2), (3, 2), (3, 1)),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("leads", [*BROADCAST, *SHARED_HEADS], ids=str)
def test_any_number_of_dimensions(rng, ours, leads):
    """Results, their shapes, and gradients of what was broadcast; heads that are shared need
    enable_gqa."""
    options: dict[str, Any] = {"enable_gqa": leads in SHARED_HEADS}
    sizes = (33, 64), (49, 64), (49, 64), (33, 49)
    call = [
        None if lead is None else torch.randn(*lead, *size, generator=rng, requires_grad=True)
        for lead, size in zip(leads, sizes, strict=True)
    ]
    exact = [None if x is None else x.detach().double().requires_grad_() for x in call]
    out, expected = F.scaled_dot_product_attention(*call, **options), TORCH(*exact, **options)
    assert len(ours) == 1
    assert out.is_contiguous() or out.dim() > 3 or options["enable_gqa"]
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    weight = torch.randn(out.shape, generator=rng)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for x, other in zip(call, exact, strict=True):
        if x is not None:
            torch.testing.assert_close(x.grad.double(), other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seqlens", [(0, 49), (33, 0)])
@pytest.mark.parametrize("grad", [*itertools.product([False, True], repeat=2)])
def test_nothing_to_attend_to(rng, ours, seqlens, grad):
    """What then has a gradient is what torch says."""
    q, k, v = heads_first(rng, seqlen_q=seqlens[0], seqlen_k=seqlens[1])
    results = []
    for function in (F.scaled_dot_product_attention, TORCH):
        leaf = q.clone().requires_grad_(grad[0])
        attn_mask = torch.zeros(seqlens, requires_grad=grad[1])
        out = function(leaf, k, v, attn_mask)
        if out.requires_grad:
            out.sum().backward()
        results.append((out.requires_grad, out, leaf.grad, attn_mask.grad))
    torch.testing.assert_close(*results)
    assert len(ours) == (not grad[1])


def _as_double(attn_mask: Tensor) -> Tensor:
    return attn_mask if attn_mask.dtype == torch.bool else attn_mask.double()


def test_dropout(rng, ours):
    """The mean of many draws is as far from the result without as their variance lets it be."""
    q, k, v = heads_first(rng, batch=1, seqlen_q=64, seqlen_k=64)
    plain = TORCH(q, k, v)
    q, k, v = (x.expand(50, -1, -1, -1) for x in (q, k, v))
    dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    assert len(ours) == 1
    assert not torch.allclose(dropped[0], dropped[1], atol=0.01)
    error = dropped.mean(0) - plain
    # Of 128 rows, which are independent, so that the sums hardly differ.
    assert error.square().sum() < 2 * (dropped.var(0) / 50).sum()


def test_gradients(rng, ours):
    qkv = heads_first(rng)
    leaves = [x.clone().requires_grad_() for x in qkv]
    F.scaled_dot_product_attention(*leaves, is_causal=True).square().sum().backward()
    assert len(ours) == 1
    exact = [x.double().requires_grad_() for x in qkv]
    TORCH(*exact, is_causal=True).square().sum().backward()
    for x, expected in zip(leaves, exact, strict=True):
        assert x.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(x.grad.double(), expected.grad, rtol=1e-4, atol=1e-4)


def test_autocast(rng, ours):
    q, k, v = heads_first(rng)
    with torch.autocast("cpu", torch.bfloat16):
        out = F.scaled_dot_product_attention(q, k.bfloat16(), v)
    assert out.dtype == torch.bfloat16
    assert len(ours) == 1
    torch.testing.assert_close(out.float(), TORCH(q, k, v), rtol=0, atol=0.05)


@pytest.mark.filterwarnings("ignore")
def test_what_goes_to_torch(rng, ours):
    q, k, v = heads_first(rng)
    for qkv, said in (
        ((q.double(), k.double(), v.double()), "float64"),
        ((q, k.transpose(-1, -2).contiguous().transpose(-1, -2), v), "last dimension"),
    ):
        assert torch.equal(F.scaled_dot_product_attention(*qkv), TORCH(*qkv))
        route = sdpa.explain(*qkv)
        assert not route.is_ours
        assert said in route.reasons[0]
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), TORCH(q, k, v))
        assert "sdpa_kernel" in sdpa.explain(q, k, v).reasons[0]
    odd: tuple[dict[str, Any], ...] = (
        {"attn_mask": visible(33, 49), "is_causal": True},
        {"attn_mask": torch.ones(49, dtype=torch.bool)},
        {"attn_mask": torch.ones(1, 1, 1, 33, 49, dtype=torch.bool)},
        {"dropout_p": 1.5},
        {"scale": -1.0},
        *({"is_causal": 1}, {"dropout_p": None}, {"scale": "1"}),
    )
    for options in odd:
        with suppress(RuntimeError, IndexError, TypeError):  # whatever torch says
            F.scaled_dot_product_attention(q, k, v, **options)
        assert not sdpa.explain(q, k, v, **options).is_ours
    batched = torch.vmap(lambda q: F.scaled_dot_product_attention(q, k, v))(q[None])
    torch.testing.assert_close(batched[0], TORCH(q, k, v))
    assert ours == []


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
def test_what_has_no_backward_pass_goes_to_torch(rng, ours, monkeypatch, name):
    """Also where the mask alone requires grad."""
    q, k, v = heads_first(rng)
    call = {"query": q, "key": k, "value": v, "attn_mask": torch.zeros(33, 49)}
    monkeypatch.setattr("jitfmha.kernels.cpu.SERVES", jitfmha.kernels.cpu.SERVES - {BACKWARD})
    monkeypatch.setattr(sdpa, "_known_calls", {})
    F.scaled_dot_product_attention(**call)
    assert len(ours) == 1
    call[name] = call[name].clone().requires_grad_()
    F.scaled_dot_product_attention(**call).sum().backward()
    assert call[name].grad is not None
    assert len(ours) == 1
    assert "backward pass" in sdpa.explain(**call).reasons[0]
    with torch.no_grad():
        F.scaled_dot_product_attention(**call)
    assert len(ours) == 2


def _spread(x: Tensor) -> Tensor:
    """The values of ``x`` with other strides."""
    return torch.stack([x, torch.full_like(x, torch.nan)], dim=-2).flatten(-3, -2)[..., ::2, :]


def _twice_as_wide(x: Tensor) -> Tensor:
    """The values of ``x``, of which the last dimension is not contiguous."""
    return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1).flatten(-2)[..., ::2]


def _asks_for_gradients(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


@contextmanager
def _elsewhere() -> Iterator[None]:
    """On a target that serves nothing."""
    with pytest.MonkeyPatch.context() as patched, fresh_calls():
        patched.setattr("jitfmha.kernels.cpu.SERVES", frozenset())
        yield


# What differs in a call: functions of its tensors, other options, or what it is in.
QKV = ("query", "key", "value")
CHANGES: dict[str, dict[str, Any]] = {
    **{f"{x}'s strides": {x: _spread} for x in QKV},
    **{f"{x}'s last stride": {x: _twice_as_wide} for x in QKV},
    **{f"{x} asks for gradients": {x: _asks_for_gradients} for x in (*QKV, "attn_mask")},
    **{f"{x}'s signs": {x: torch._neg_view} for x in (*QKV, "attn_mask")},
    **{f"{x}'s dtype": {x: Tensor.half} for x in QKV},
    **{f"{x}'s device": {x: lambda x: x.to("meta")} for x in QKV},
    **{f"a subclass of {x}": {x: lambda x: x.as_subclass(Doubling)} for x in QKV},
    "all dtypes": dict.fromkeys(QKV, Tensor.half),
    "a parameter": {"query": lambda x: torch.nn.Parameter(x, requires_grad=False)},
    "query's length": {"query": lambda x: x[:, :, :7], "attn_mask": lambda x: x[:7]},
    "value's length": {"value": lambda x: x[:, :, :3]},
    "the keys' length": {
        **dict.fromkeys(QKV[1:], lambda x: x[:, :, :7]),
        "attn_mask": lambda x: x[:, :7],
    },
    "value's width": {"value": lambda x: x[..., :16]},
    "query's heads": {"query": lambda x: x[:, :2]},
    "no mask": {"attn_mask": lambda _: None},
    "the mask's dtype": {"attn_mask": lambda x: x > 0},
    "the mask's batches": {"attn_mask": lambda x: x.expand(2, 1, -1, -1) * 2},
    "the mask's strides": {"attn_mask": _spread},
    "one row of the mask": {"attn_mask": lambda x: x[:1]},
    "rows of the mask that are missing": {"attn_mask": lambda x: x[:7]},
    "causal": {"attn_mask": lambda _: None, "is_causal": True},
    "a causal mask": {"is_causal": True},  # which torch refuses
    "scale": {"scale": 0.25},
    "a negative scale": {"scale": -1.0},
    "dropout": {"dropout_p": 1.0},
    "no grouped heads": {"enable_gqa": False},
    "a number for a flag": {"enable_gqa": 1},  # which torch refuses
    "the target": {"there": _elsewhere},
    "autocast": {"there": lambda: torch.autocast("cpu", torch.bfloat16)},
    "another backend": {"there": lambda: sdpa_kernel(SDPBackend.MATH)},
    "a mode": {"there": lambda: Negating()},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("has_mask", [False, True])
def test_a_known_call_serves_no_other_one(rng, ours, monkeypatch, change, has_mask):
    """What each of two calls gives alone it also gives after the other one, and once more."""
    plain: dict[str, Any] = {
        **dict(zip(QKV, heads_first(rng, heads_q=4, heads_k=2, hdim=32), strict=True)),
        "attn_mask": torch.randn(33, 49, generator=rng) if has_mask else None,
        "scale": 0.5,
        "enable_gqa": True,
        "there": nullcontext,
    }
    changed = plain | {
        name: x(plain[name]) if name in (*QKV, "attn_mask") else x
        for name, x in change.items()
        if name != "attn_mask" or has_mask
    }

    def outcome(call: dict[str, Any]) -> tuple[object, ...]:
        before = len(ours)
        try:
            with call["there"]():
                out = F.scaled_dot_product_attention(**{x: call[x] for x in call if x != "there"})
        except Exception as error:
            return (type(error),)
        bits = None if out.is_meta else out.detach().contiguous().view(torch.uint8).numpy()
        form = type(out), out.dtype, out.shape, out.stride(), out.requires_grad
        return len(ours) - before, form, bits is not None and bits.tobytes()

    def alone(call: dict[str, Any]) -> tuple[object, ...]:
        monkeypatch.setattr(sdpa, "_known_calls", {})
        return outcome(call)

    expected = {id(call): alone(call) for call in (plain, changed)}
    assert expected[id(plain)][0] == 1
    for one, other in ((plain, changed), (changed, plain)):
        monkeypatch.setattr(sdpa, "_known_calls", {})
        for call in (one, other, one, other):
            assert outcome(call) == expected[id(call)]


BACKWARD = jitfmha.problem.features.Feature.BACKWARD


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_keeps_torch(rng, ours):
    qkv = heads_first(rng)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: F.scaled_dot_product_attention(*x) + 1, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(*qkv), TORCH(*qkv) + 1)
    assert ours == []
    compiled = torch.compile(
        lambda *x: F.scaled_dot_product_attention(*x, causal_upper_left(33, 49)),
        backend="aot_eager",
    )
    torch.testing.assert_close(compiled(*qkv), TORCH(*qkv, is_causal=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("sizes", [(33, 49), (49, 33), (40, 40)])
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"enable_gqa": True}])
def test_causal_biases_of_torch(rng, ours, bias, sizes, options):
    """Also at the bottom right, and with key heads that are shared."""
    if bias is causal_lower_right and sizes[0] > sizes[1]:
        pytest.skip("torch: queries without keys are NaN")
    heads_k = 1 if "enable_gqa" in options else 2
    q, k, v = qkv = heads_first(rng, seqlen_q=sizes[0], seqlen_k=sizes[1], heads_k=heads_k)
    out = F.scaled_dot_product_attention(*qkv, bias(*sizes), **options)
    assert len(ours) == 1
    mask = 1 if bias is causal_upper_left else 2
    swapped = tuple(x.transpose(1, 2) for x in qkv)
    exact = attention(*swapped, mask=mask, softmax_scale=options.get("scale"))
    assert_close((out.transpose(1, 2), exact[1].float()), exact, *swapped)
    route = sdpa.explain(q, k, v, bias(*sizes))
    assert not route.is_ours
    assert "CausalBias" in route.reasons[0]
    with pytest.raises(ValueError, match="CausalBias"):  # torch's refusal
        F.scaled_dot_product_attention(*qkv, bias(*sizes), is_causal=True)


class Doubling(Tensor):
    """Attention where all ways to know the function agree."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        plain = [x.as_subclass(Tensor) if isinstance(x, cls) else x for x in args]
        if _is_attention(func):
            return 2 * func(*plain, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class Negating(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return -result if _is_attention(func) else result


def _is_attention(func: Any) -> bool:
    """By its name, by one from before the patch, by a table from either time."""
    name = F.scaled_dot_product_attention
    return func is name is TORCH and all(func in {known: 0} for known in (TORCH, name))


def test_subclasses_and_modes_see_the_call(rng, ours):
    """As without the patch, which is there again afterwards."""
    q, k, v = heads_first(rng, heads_q=4, heads_k=2)
    options: dict[str, Any] = {"enable_gqa": True, "scale": 0.2}
    expected = TORCH(q, k, v, **options)
    marked = q.as_subclass(Doubling)
    assert torch.equal(F.scaled_dot_product_attention(marked, k, v, **options), 2 * expected)
    with Negating():
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, **options), -expected)
        assert "TorchFunctionMode" in sdpa.explain(q, k, v, **options).reasons[0]
    parts = [x.transpose(0, 1).contiguous() for x in q]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    result = F.scaled_dot_product_attention(nested, nested, nested)
    torch.testing.assert_close(result.unbind()[1], TORCH(q, q, q)[1])
    assert ours == []
    with torch.device("cpu"):  # a mode that every function passes
        assert_served(ours, (q, k, v), **options)
    assert F.scaled_dot_product_attention == TORCH
    assert F.scaled_dot_product_attention is not TORCH


def test_torch_serves_where_it_does_not_tell_its_modes(rng, ours, monkeypatch):
    monkeypatch.setattr(torch_parts, "function_modes", lambda: [None])
    monkeypatch.setattr(torch_parts, "number_of_function_modes", lambda: 1)
    qkv = heads_first(rng)
    assert torch.equal(F.scaled_dot_product_attention(*qkv), TORCH(*qkv))
    assert ours == []


class Undoing(Tensor):
    patch: sdpa.Patch

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        cls.patch.undo()
        return super().__torch_function__(func, types, args, kwargs)


def test_undoing_while_a_subclass_is_asked(rng):
    q, k, v = heads_first(rng)
    Undoing.patch = sdpa.patch()
    F.scaled_dot_product_attention(q.as_subclass(Undoing), k, v)
    assert F.scaled_dot_product_attention is TORCH


def test_modules_of_torch(rng, ours):
    module = torch.nn.MultiheadAttention(128, 2, batch_first=True)
    x = torch.randn(2, 33, 128, generator=rng)
    out, _ = module(x, x, x, need_weights=False)
    assert len(ours) == 1
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(out, module(x, x, x, need_weights=False)[0])


def test_undoing():
    outer = sdpa.patch()
    assert F.scaled_dot_product_attention is not TORCH
    with sdpa.patch():
        pass  # The outer one goes on.
    assert F.scaled_dot_product_attention is not TORCH
    patched = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = other = lambda *x: patched(*x)
    with pytest.raises(RuntimeError, match="was put there after jitfmha's patch"):
        outer.undo()
    assert F.scaled_dot_product_attention is other
    F.scaled_dot_product_attention = patched
    outer.undo()
    outer.undo()
    assert F.scaled_dot_product_attention is TORCH
    with pytest.raises(ZeroDivisionError), sdpa.patch():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is TORCH
