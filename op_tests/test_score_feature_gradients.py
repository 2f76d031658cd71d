"""Gradients through bias, ALiBi, soft cap, sinks and dropout, against the float64 reference's."""

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fresh_calls import fresh_calls
from inputs import DTYPES, prefix_sums, random_qkv
from packed_calls import packed
from score_features import FEATURES, Options, Shape
from torch import Tensor
from torch.utils._pytree import tree_map_only
from untyped import fmha_bwd, fmha_fwd

from jitfmha import emulate
from jitfmha.problem.float64_reference import attention, attention_packed

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# The last ones are several query tiles, whose windows leave the tile of the sink tokens.
SIZES = [
    *[(1, 1, 1, 1), (9, 0, 2, 2), (17, 127, 7, 7), (129, 49, 2, 1)],
    *[(300, 300, 2, 1), (600, 300, 1, 1)],
]
# Of the largest gradient: sums of rounded products; and of sinks, sums of terms that are not.
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 2e-3}
SINK_TOLERANCE = {"fp32": 2e-5, "bf16": 1e-3, "fp16": 1e-3}
# Of the calls with all features, whose kernels take longest to build.
DRAWN_DTYPE = pytest.mark.sample("dtype", list(DTYPES), 1, shared_by="gradients of all features")


def differentiate(
    function: Any,
    tensors: dict[str, Tensor],
    options: Options,
    dout: Tensor,
    dlse: Tensor,
    *,
    rounded: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of the sum of ``out * dout`` and, where keys are seen, of ``lse * dlse``; and out.

    A backward pass takes ``dout . out`` of each row from an ``out`` that was rounded, and so will
    this one with ``rounded``: that product enters every gradient as ``-dlse`` does. What it leaves
    adds up over all rows in the gradient of a sink, most of whose terms cancel.
    """
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    out, lse = function(**leaves, **options)
    dout = dout.to(out.dtype)
    if rounded is not None:
        dlse = dlse - ((rounded - out.detach()) * dout).sum(-1).transpose(-1, -2)
    hidden = lse == -torch.inf
    of_lse = lse.masked_fill(hidden, 0) * dlse.masked_fill(hidden, 0)
    total = (out * dout).sum() + of_lse.sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, gradients, strict=True)), out.detach()


def with_lse(**arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = fmha_fwd(return_lse=True, **arguments)
    return out, lse


def check(rng: torch.Generator, feature: str, dtype: str, sizes: tuple[int, int, int, int]) -> None:
    seqlen_q, seqlen_k, heads_q, _ = sizes
    qkv = random_qkv(rng, sizes, hdim=37, hdim_v=21, dtype=DTYPES[dtype])
    shape = Shape(2, heads_q, seqlen_q, seqlen_k, DTYPES[dtype], rng)
    options = FEATURES[feature](shape)
    tensors = with_gradients(qkv, options)
    dout = shape.randn(2, seqlen_q, heads_q, 21).to(DTYPES[dtype])
    dlse = shape.randn(2, heads_q, seqlen_q)
    actual, out = differentiate(with_lse, tensors, options, dout, dlse)
    doubled = {name: x.double() for name, x in tensors.items()}
    expected, _ = differentiate(attention, doubled, options, dout, dlse, rounded=out)
    assert_close(actual, expected, dtype, sizes)


def with_gradients(qkv: tuple[Tensor, ...], options: Options) -> dict[str, Tensor]:
    """All that has a gradient, taken out of the options."""
    tensors = dict(zip(("q", "k", "v"), qkv, strict=True))
    for name in ("bias", "sink"):
        if name in options and options[name].dtype != torch.bool:
            tensors[name] = options.pop(name)
    return tensors


def assert_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: str, sizes: tuple[int, ...]
) -> None:
    for name, gradient in actual.items():
        reference = torch.zeros_like(gradient) if expected[name] is None else expected[name]
        # A float32 bias or sink has a gradient of its own dtype.
        assert gradient.dtype in (DTYPES[dtype], torch.float32)
        assert gradient.shape == reference.shape
        error = (gradient.double() - reference).abs()
        assert not error.isnan().any(), f"the gradient of {name} holds NaN"
        if error.numel():
            # The gradients of one call are of one size; each is a sum with some that cancel.
            largest = max(1.0, reference.abs().max().item())
            tolerance = SINK_TOLERANCE if name == "sink" else TOLERANCE
            assert error.max().item() <= tolerance[dtype] * largest, (name, sizes)


@pytest.mark.sample(
    ("feature", "dtype"), list(itertools.product(sorted(set(FEATURES) - {"everything"}), DTYPES)), 2
)
def test_one_feature(rng, feature, dtype):
    for sizes in SIZES:
        check(rng, feature, dtype, sizes)


def test_gradient_of_a_bias_ends_where_the_keys_do(rng: torch.Generator) -> None:
    """Behind the last key of a row is the first of the next."""
    for seqlen_k in (1, 15, 17, 49):
        qkv = random_qkv(rng, seqlen_q=33, seqlen_k=seqlen_k, hdim=37, hdim_v=21)
        tensors = dict(zip(("q", "k", "v"), qkv, strict=True))
        tensors["bias"] = torch.randn(2, 2, 33, seqlen_k, generator=rng)
        dout, dlse = torch.randn(2, 33, 2, 21, generator=rng), torch.zeros(2, 2, 33)
        actual, _ = differentiate(with_lse, tensors, {}, dout, dlse)
        doubled = {name: x.double() for name, x in tensors.items()}
        expected, _ = differentiate(attention, doubled, {}, dout, dlse)
        assert_close(actual, expected, "fp32", (seqlen_k,))


class Elsewhere(Tensor):
    """A tensor whose numbers do not lie where it says."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map_only(cls, lambda x: x.inner, args), **(kwargs or {}))


def test_tensors_that_no_kernel_can_read_as_they_lie(rng: torch.Generator) -> None:
    """Behind calls with those that it can; and a bias with a derivative that there is not."""
    q, k, v = random_qkv(rng, seqlen_q=33, seqlen_k=49, hdim=37, hdim_v=21)
    plain = {"bias": torch.randn(2, 2, 33, 49, generator=rng), "sink": torch.ones(2)}
    out, lse = fmha_fwd(q, k, v, return_lse=True, **plain)
    gradients = fmha_bwd(out, q, k, v, out, lse, **plain)
    for make, name in itertools.product((lambda x: torch._neg_view(-x), Elsewhere), plain):
        given = plain | {name: make(plain[name])}
        found = fmha_fwd(q, k, v, return_lse=True, **given)
        found += fmha_bwd(out, q, k, v, out, lse, **given)
        for x, y in zip(found, (out, lse, *gradients), strict=True):
            assert torch.equal(x, y)
    dq, _, _ = fmha_bwd(out, q, k, v, out, lse, bias=plain["bias"].requires_grad_())
    with pytest.raises(NotImplementedError, match="once more"):
        dq.sum().backward()


@DRAWN_DTYPE
def test_all_features_together(rng, dtype):
    for sizes in SIZES:
        check(rng, "everything", dtype, sizes)


def test_all_features_together_in_an_emulated_tile_unit(rng):
    with fresh_calls("amx_emulated"):
        for sizes in SIZES:
            check(rng, "everything", "bf16", sizes)


@pytest.mark.sample(("feature", "dtype"), list(itertools.product(sorted(FEATURES), DTYPES)), 1)
def test_group_mode(rng, feature, dtype):
    """Sequences without queries and without keys, and unused rows between them."""
    call = packed(
        *(rng, [1, 70, 0, 17, 3], [70, 5, 4, 130, 0]),
        gap=3,
        heads=(6, 2),
        hdim=37,
        hdim_v=21,
        dtype=DTYPES[dtype],
    )
    rows_q, rows_k = len(call.q), len(call.k)
    shape = Shape(5, 6, rows_q, 130, DTYPES[dtype], rng, is_group=True)
    options = FEATURES[feature](shape)
    tensors = with_gradients((call.q, call.k, call.v), options)
    dout = shape.randn(rows_q, 6, 21).to(DTYPES[dtype])
    dlse = shape.randn(6, rows_q)
    groups = call.sequences.groups | {"max_seqlen_k": 130}
    actual, out = differentiate(with_lse, tensors, options | groups, dout, dlse)
    doubled = {name: x.double() for name, x in tensors.items()}
    names = ("lengths_q", "lengths_k", "starts_q", "starts_k")
    of_reference = options | dict(zip(names, call.sequences.spans, strict=True))
    expected, _ = differentiate(attention_packed, doubled, of_reference, dout, dlse, rounded=out)
    assert_close(actual, expected, dtype, (rows_q, rows_k))


@pytest.mark.sample("arch", [None, "gfx942", "gfx950"], 1)
@pytest.mark.parametrize("garbage", [-50.0, 3.0, torch.nan])
def test_rows_of_no_sequence_have_no_sink(rng, garbage, arch):
    """Whatever is between the sequences, and behind the last one."""
    starts, lengths, rows = [0, 9, 9], [7, 0, 5], 19
    groups = {
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), prefix_sums(lengths)),
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_k_padded"), prefix_sums([9, 0, 8])),
    }
    sizes = {"batch": 1, "seqlen_q": rows, "seqlen_k": rows, "hdim": 24}
    q, k, v = (x[0] for x in random_qkv(rng, dtype=torch.bfloat16, **sizes))
    sink = torch.randn(2, generator=rng)
    unused = torch.ones(rows, dtype=torch.bool)
    for start, length in zip(starts, lengths, strict=True):
        unused[start : start + length] = False
    with emulate(arch) if arch else nullcontext():
        out, lse = fmha_fwd(q, k, v, sink=sink, return_lse=True, **groups)
        dout = torch.randn(out.shape, generator=rng).to(out.dtype)
        lse[:, unused], out[unused], dout[unused] = garbage, garbage, 1.0
        dsink = torch.full_like(sink, torch.nan)
        fmha_bwd(dout, q, k, v, out, lse, sink=sink, dsink=dsink, **groups)
    leaf = sink.double().requires_grad_()
    exact, _ = attention_packed(q, k, v, lengths, lengths, starts, starts, sink=leaf)
    (expected,) = torch.autograd.grad((exact * dout.double()).sum(), leaf)
    torch.testing.assert_close(dsink.double(), expected, atol=2e-2, rtol=2e-2)


@pytest.fixture
def call_with_everything(rng: torch.Generator, dtype: str) -> tuple[dict[str, Tensor], Options]:
    """What has gradients, and the other options, of one call."""
    shape = Shape(2, 4, 9, 40, DTYPES[dtype], rng)
    options = FEATURES["everything"](shape)
    qkv = random_qkv(rng, (9, 40, 4, 2), hdim=37, hdim_v=21, dtype=DTYPES[dtype])
    return with_gradients(qkv, options), options


@DRAWN_DTYPE
def test_compile(rng, dtype, call_with_everything):
    torch._dynamo.reset()
    tensors, options = call_with_everything
    dout = torch.randn(2, 9, 4, 21, generator=rng).to(DTYPES[dtype])
    dlse = torch.randn(2, 4, 9, generator=rng)
    compiled: Any = torch.compile(with_lse, fullgraph=True, backend="aot_eager")
    actual, out = differentiate(compiled, tensors, options, dout, dlse)
    doubled = {name: x.double() for name, x in tensors.items()}
    expected, _ = differentiate(attention, doubled, options, dout, dlse, rounded=out)
    assert_close(actual, expected, dtype, (9, 40))


@DRAWN_DTYPE
def test_opcheck(call_with_everything):
    tensors, options = call_with_everything
    plain: Options = {
        **dict.fromkeys(("softmax_scale", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q")),
        **dict.fromkeys(("max_seqlen_k", "cu_seqlens_q_padded", "cu_seqlens_k_padded")),
        "window_size": (-1, -1),
        **options,
    }
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    torch.library.opcheck(
        torch.ops.jitfmha.fmha_fwd.default, (), {**leaves, **plain, "return_lse": True}
    )
    out, lse = fmha_fwd(**tensors, **options, return_lse=True)
    given = {"dout": out.clone(), "out": out, "lse": lse, "dlse": lse.nan_to_num(0, 0, 0)}
    wanted = {"with_dbias": True, "with_dsink": True}
    torch.library.opcheck(
        torch.ops.jitfmha.fmha_bwd.default, (), {**given, **tensors, **plain, **wanted}
    )


def test_broken_rules(rng):
    q, k, v = random_qkv(rng)
    out, lse = fmha_fwd(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match=r"rng_state=None: with dropout_p=0\.5"):
        fmha_bwd(out, q, k, v, out, lse, dropout_p=0.5)
    with pytest.raises(ValueError, match="dbias is wanted, but bias=None"):
        fmha_bwd(out, q, k, v, out, lse, dbias=torch.zeros(1))
    hides = torch.ones(49, dtype=torch.bool)[None, None, None]
    with pytest.raises(ValueError, match=r"dbias is wanted, but a bias of torch\.bool"):
        fmha_bwd(out, q, k, v, out, lse, bias=hides, dbias=torch.zeros(1))
    with pytest.raises(ValueError, match="dsink is wanted, but sink=None"):
        fmha_bwd(out, q, k, v, out, lse, dsink=torch.zeros(2))


def test_alibi_slopes_and_scales_have_no_gradient(rng):
    q, k, v = random_qkv(rng)
    with pytest.raises(NotImplementedError, match="alibi_slopes requires grad"):
        fmha_fwd(q, k, v, alibi_slopes=torch.ones(2, requires_grad=True))
    eight_bits = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    scales = {f"{name}_descale": torch.ones(1, requires_grad=name == "k") for name in "qkv"}
    with pytest.raises(NotImplementedError, match="k_descale requires grad"):
        fmha_fwd(*eight_bits, **scales)
