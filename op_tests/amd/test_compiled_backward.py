"""The backward pass of compiled kernels, on the emulator with the sanitizer on, against float64.

A run takes a few drawn calls; `--exhaustive` takes thousands.
"""

import random
from dataclasses import replace

import pytest
import torch
from backward_calls import exact_gradients, rounded
from compiled_calls import (
    ARCHS,
    MODIFIERS,
    CompiledCall,
    assert_nothing_is_spilled,
    column_major,
    draw,
    draw_of_other_gradients,
    inputs_of,
)
from inputs import lay_out, random_qkv
from score_features import ALL_MODIFIERS, FEATURES, NO_MODIFIERS, Shape
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from untyped import fmha_bwd, fmha_fwd

from jitfmha import emulate
from jitfmha.kernels.compiled.backward_traits import BackwardTraits, backward_spec
from jitfmha.problem.float64_reference import attention

_THOUSANDS = 4000
# Of the largest gradient: sums of rounded products.
TOLERANCE = {"bf16": 4e-2, "fp16": 1e-2, "fp32": 2e-5}


@pytest.mark.sample("number", range(_THOUSANDS), 1)
def test_drawn_calls(rng, number):
    check(draw(random.Random(rng.initial_seed())), rng)


@pytest.mark.sample("number", range(_THOUSANDS), 2)
def test_drawn_calls_with_modified_scores(rng, number):
    check(draw(random.Random(rng.initial_seed()), MODIFIERS), rng)


@pytest.mark.sample("number", range(_THOUSANDS), 2)
def test_drawn_calls_of_other_kinds(rng, number):
    """In fp32, of wide heads, and of values in columns."""
    check(draw_of_other_gradients(random.Random(rng.initial_seed()), MODIFIERS), rng)


def check(call: CompiledCall, rng: torch.Generator) -> None:
    """Compare all gradients of the call, written over what was there, with float64's."""
    given = inputs_of(call, rng)
    v = column_major(given.v) if call.is_v_column_major else given.v
    with_gradient = {"q": given.q, "k": given.k, "v": v}
    for name in ("bias", "sink"):
        if name in given.options and given.options[name].dtype != torch.bool:
            with_gradient[name] = given.options.pop(name)
    options = given.options | given.sequences
    layouts = (*call.layouts[:3], "", "")
    leaves = {name: x.double().requires_grad_() for name, x in with_gradient.items()}
    exact_out, exact_lse = given.reference(**leaves, **given.options)
    out, lse = rounded((exact_out, exact_lse), given.q.dtype)
    out.movedim(-3, 0)[~given.rows_q] = torch.nan
    with emulate(call.arch, check=True) as emulated:
        dout = lay_out(torch.randn(out.shape, generator=rng).to(out.dtype), call.layouts[3])
        dlse = torch.randn(lse.shape, generator=rng) if rng.initial_seed() % 3 else None
        rooms = {
            f"d{name}": _poisoned(x, layout)
            for (name, x), layout in zip(with_gradient.items(), layouts, strict=False)
        }
        fmha_bwd(dout, out=out, lse=lse, dlse=dlse, **rooms, **with_gradient, **options)
        assert emulated.findings() == ()
    total = (exact_out * dout.double()).sum()
    if dlse is not None:
        seen = exact_lse > -torch.inf
        total = total + (exact_lse[seen] * dlse[seen].double()).sum()
    expected = torch.autograd.grad(
        total, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    for name, reference in zip(leaves, expected, strict=True):
        actual = rooms[f"d{name}"].double()
        rows = {"q": given.rows_q, "k": given.rows_k, "v": given.rows_k}.get(name)
        if rows is not None:
            assert (actual.movedim(-3, 0)[~rows] == _POISON).all(), f"d{name}: unused rows"
            actual, reference = (x.movedim(-3, 0)[rows] for x in (actual, reference))
        error = (actual - reference).abs()
        assert not error.isnan().any(), f"d{name} holds NaN"
        if error.numel():
            # The gradients of one call are of one size; each is a sum with some that cancel.
            # Where all of them do, there remains what rounding the output leaves of its size, in a
            # sum over the row.
            size = max(1, out.shape[-1] / 64) ** 0.5 / (1 - options.get("dropout_p", 0.0))
            bound = TOLERANCE[call.dtype] * max(size, reference.abs().max().item())
            assert error.max().item() <= bound, f"d{name} is off by {error.max()} > {bound}"


_POISON = -77.0


def _poisoned(x: Tensor, layout: str) -> Tensor:
    room = torch.empty(x.shape, dtype=x.dtype)
    if layout:
        room = lay_out(torch.zeros_like(room), layout)
    return room.fill_(_POISON)


def test_what_nobody_sees_has_no_gradient(rng):
    """Keys behind all queries, whatever they hold, and queries before all keys."""
    with emulate("gfx942"):
        for mask, seqlen_q, seqlen_k in ((1, 20, 170), (2, 170, 20)):
            q, k, v = (
                torch.randn(1, n, 1, 24, generator=rng).bfloat16()
                for n in (seqlen_q, seqlen_k, seqlen_k)
            )
            out, lse = rounded(attention(q, k, v, mask=mask), q.dtype)
            dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
            rooms = {"dq": dq, "dk": dk, "dv": dv}
            # It is anything where nothing is seen, as torch.logsumexp makes it NaN there.
            dlse = torch.where(lse == -torch.inf, torch.nan, 0.0)
            fmha_bwd(torch.ones_like(out), q, k, v, out, lse, dlse=dlse, mask=mask, **rooms)
            assert not dk[:, 20:].any()
            assert not dv[:, 20:].any()
            assert dv[:, :20].all()
            assert not dq[:, : max(seqlen_q - seqlen_k, 0)].any()
            assert dq[:, -19:].any()


def test_sink_tokens_have_gradients_of_far_queries(rng):
    """Further from the window than a workgroup's keys are; and others of queries before them."""
    options = {"mask": "b:3,7", "sink_size": 4}
    q, k, v = (torch.randn(1, 200, 1, 24, generator=rng).bfloat16() for _ in range(3))
    out, lse = rounded(attention(q, k, v, **options), q.dtype)
    with emulate("gfx942"):
        actual = fmha_bwd(torch.ones_like(out), q, k, v, out, lse, **options)
    for x, exact in zip(
        actual, exact_gradients(q, k, v, torch.ones_like(out), **options), strict=True
    ):
        largest = exact.abs().max().item()
        assert (x.double() - exact).abs().max() <= TOLERANCE["bf16"] * max(1, largest)


def test_what_lies_behind_the_last_row_adds_nothing():
    """Where all scores are small, those of rows that are not there would be infinite powers."""
    q, k = torch.full((1, 33, 1, 24), -8.0).bfloat16(), torch.full((1, 33, 1, 24), 8.0).bfloat16()
    with emulate("gfx942"):
        out, lse = fmha_fwd(q, k, k, return_lse=True)
        dq, dk, dv = fmha_bwd(torch.ones_like(out), q, k, k, out, lse)
    assert (lse < -200).all()
    # Equal keys with equal values: the probabilities may change at will.
    assert not dq.any()
    assert not dk.any()
    torch.testing.assert_close(dv, torch.ones_like(dv), atol=1e-2, rtol=0)


@pytest.mark.parametrize(("hdim", "chip"), [(24, "gfx942"), (64, "gfx950")])  # 64: ready
def test_autograd(rng, hdim, chip):
    """`fmha_fwd` saves what backward needs, and gets the gradients of what followed."""
    qkv = [torch.randn(1, 33, 2, hdim, generator=rng).bfloat16().requires_grad_() for _ in "qkv"]
    with emulate(chip, check=True) as emulated:
        (fmha_fwd(*qkv, mask="causal").float() ** 2).sum().backward()
        assert emulated.findings() == ()
    out, _ = attention(*(x.detach() for x in qkv), mask=2)
    for x, exact in zip(qkv, exact_gradients(*qkv, 2 * out, mask=2), strict=True):
        bound = TOLERANCE["bf16"] * max(1.0, exact.abs().max().item())
        assert (x.grad.double() - exact).abs().max() <= bound


def test_no_order_of_waves_changes_the_bits(rng):
    """With several query heads of a key head, whose gradients are added up."""
    sizes = {"seqlen_q": 70, "seqlen_k": 200, "heads_q": 6, "heads_k": 2}
    q, k, v = random_qkv(rng, batch=1, hdim=24, dtype=torch.bfloat16, **sizes)
    results = []
    for order in (1, 2):
        with emulate("gfx942", random_order=order):
            out, lse = fmha_fwd(q, k, v, return_lse=True)
            results.append(fmha_bwd(out.flip(1).contiguous(), q, k, v, out, lse))
    assert all(map(torch.equal, *results))


def test_rows_that_are_far_apart(rng):
    """A tile's rows reach further than a buffer's offsets: those of dout, then those of keys.

    Far rows take scalar registers that the keys of dropout's generator have otherwise.
    """
    far = 1 << 25  # elements: 32 of them are 2 GiB apart
    memory = torch.empty(33 * far, dtype=torch.bfloat16)
    distant = memory.as_strided((1, 33, 1, 24), (0, far, 24, 1))
    q, k, v, dout = (torch.randn(1, 33, 1, 24, generator=rng).bfloat16() for _ in range(4))
    with emulate("gfx942"):
        for options in ({}, FEATURES["dropout"](Shape(1, 1, 33, 33, q.dtype, rng))):
            out, lse = fmha_fwd(q, k, v, return_lse=True, **options)
            expected = fmha_bwd(dout, q, k, v, out, lse, **options)
            of_dout = fmha_bwd(distant.copy_(dout), q, k, v, out, lse, **options)
            assert all(map(torch.equal, of_dout, expected))
            of_keys = fmha_bwd(dout, q, distant.copy_(k), v, out, lse, **options)
            assert all(map(torch.equal, of_keys, expected))


_WIDE = ((576, 512), (571, 300), (256, 256), (192, 192), (192, 128), (128, 256))
_NARROW = ((128, 128), (64, 64), (96, 8))
# A sink is in the lse already.
_ALL_BUT_SINK = replace(ALL_MODIFIERS, asked=ALL_MODIFIERS.asked._replace(sink=None))


@pytest.mark.sample(
    ("arch", "dtype", "hdims", "is_masked", "access", "modifiers", "is_v_column_major"),
    [
        (arch, dtype, hdims, is_masked, access, modifiers, is_v_column_major)
        for arch in ARCHS
        for is_masked in (False, True)
        for access in ("near", "far")
        for dtype in ("bf16", "fp32")
        for is_v_column_major in (False, True)
        for hdims, modifiers in (
            *((hdims, NO_MODIFIERS) for hdims in (*_WIDE, *_NARROW, (255, 251), (61, 100))),
            *((hdims, _ALL_BUT_SINK) for hdims in (*_WIDE, *_NARROW)),
        )
    ],
    1,
    is_fixed=True,
)
def test_nothing_is_spilled(arch, dtype, hdims, is_masked, access, modifiers, is_v_column_major):
    traits = BackwardTraits(
        *(arch, dtype, *hdims, "gm1", "rtne", is_masked, access),
        modifiers=modifiers,
        has_column_major_v=is_v_column_major,
    )
    symbols = [kernel.row.symbol for kernel in traits.kernels()]
    # Streamed values in columns, with all features, have addresses for a few scalars more.
    most = 4 if traits.streams and is_v_column_major and modifiers != NO_MODIFIERS else 0
    assert_nothing_is_spilled(backward_spec(traits), *symbols, most_scalars=most)


def test_wide_heads_have_a_kernel_each_for_dk_and_dv():
    traits = BackwardTraits(
        *("gfx950", "bf16", 192, 128, "gm0", "rtne", False, "near"), NO_MODIFIERS
    )
    assert [each.rows for each in traits.kernels()] == ["q", "k"]
    assert [each.rows for each in replace(traits, hdim_v=129).kernels()] == ["q", "k", "k"]


@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize(("hdims", "hidden"), [((64, 64), True), ((576, 300), False)])
def test_fp32_is_as_exact_as_torch(rng, hdims, hidden, spread):
    """``spread`` scales the scores: from a nearly even softmax to one with few large weights.

    The largest of few errors is a matter of luck, so their mean squares are compared, of rows that
    see 51 keys at least: of fewer, errors of a row are one and large, and few rows make the mean.
    """
    mask, seqlen_k = (2, 200) if hidden else (0, 150)
    q, k, v = random_qkv(rng, (150, seqlen_k, 2, 2), batch=1, hdim=hdims[0], hdim_v=hdims[1])
    q *= spread
    dout = torch.randn(*q.shape[:-1], hdims[1], generator=rng)
    with emulate("gfx942"):
        out, lse = fmha_fwd(q, k, v, mask=mask, return_lse=True)
        actual = fmha_bwd(dout, q, k, v, out, lse, mask=mask)
    leaves = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
    seen = torch.ones(150, 200).tril(50).bool() if hidden else None
    of_torch = scaled_dot_product_attention(*leaves, attn_mask=seen)
    theirs = torch.autograd.grad(of_torch, leaves, dout.transpose(1, 2))
    for ours, other, exact in zip(
        actual, theirs, exact_gradients(q, k, v, dout, mask=mask), strict=True
    ):
        error, others_error = ours - exact, other.transpose(1, 2) - exact
        assert error.square().mean() <= 1.5**2 * others_error.square().mean()


def test_what_is_not_served_is_refused_by_name():
    q = torch.zeros(1, 4, 1, 64, dtype=torch.int8)
    out, lse = torch.zeros(1, 4, 1, 64).bfloat16(), torch.zeros(1, 1, 4)
    with emulate("gfx942"), pytest.raises(NotImplementedError) as raised:
        fmha_bwd(out.clone(), q, q, q, out, lse)
    assert "not compiled: Its backward pass serves bf16, fp16, fp32" in str(raised.value)
