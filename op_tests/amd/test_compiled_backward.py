"""The backward pass of compiled kernels, on the emulator with the sanitizer on, against float64.

A run takes a few drawn calls; `--exhaustive` takes thousands.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from compiled_calls import ARCHS, DTYPES, CompiledCall, draw
from inputs import lay_out, prefix_sums, random_qkv
from score_features import ALL_MODIFIERS, FEATURES, NO_MODIFIERS, Options, Shape, options_of
from torch import Tensor
from untyped import fmha_bwd, fmha_fwd

from jitfmha import emulate, jit
from jitfmha.amd.code_object import kernel_metadata
from jitfmha.jit.elf import Elf
from jitfmha.kernels.compiled.backward_traits import BackwardTraits, backward_spec
from jitfmha.problem.float64_reference import attention, attention_packed

_THOUSANDS = 4000
MODIFIERS = tuple(sorted(set(FEATURES) - {"everything"}))
# Of the largest gradient: sums of rounded products.
TOLERANCE = {"bf16": 4e-2, "fp16": 1e-2}


@pytest.mark.sample("number", range(_THOUSANDS), 1)
def test_drawn_calls(rng, number):
    check(draw(random.Random(rng.initial_seed())), rng)


@pytest.mark.sample("number", range(_THOUSANDS), 2)
def test_drawn_calls_with_modified_scores(rng, number):
    check(draw(random.Random(rng.initial_seed()), MODIFIERS), rng)


@dataclass
class Inputs:
    """A drawn call's tensors and options, and how float64 has them.

    Attributes:
        options: of `fmha_fwd`, but for what has a gradient.
        rows_q, rows_k: which rows belong to sequences; all of them in gm0.
        with_gradient: q, k and v, and a bias or sink that has a gradient.
    """

    with_gradient: dict[str, Tensor]
    options: Options
    reference: Any
    reference_options: Options
    rows_q: Tensor
    rows_k: Tensor


def check(call: CompiledCall, rng: torch.Generator) -> None:
    """Compare all gradients of the call, written over what was there, with float64's."""
    given = _group(call, rng) if call.is_group else _batch(call, rng)
    q, k, v = (given.with_gradient[name] for name in "qkv")
    modifiers = {name: x for name, x in given.with_gradient.items() if name not in "qkv"}
    options = given.options | modifiers
    layouts = (call.layouts[3], *call.layouts[:3])
    with emulate(call.arch, check=True) as emulated:
        out, lse = fmha_fwd(q, k, v, return_lse=True, **options)
        dout = torch.randn(out.shape, generator=rng).to(out.dtype)
        dlse = torch.randn(lse.shape, generator=rng) if rng.initial_seed() % 3 else None
        if not call.is_group:
            dout = lay_out(dout, layouts[0])
        rooms = {
            f"d{name}": _poisoned(x, layout)
            for (name, x), layout in zip(
                given.with_gradient.items(), (*layouts[1:], "", ""), strict=False
            )
        }
        fmha_bwd(dout, q, k, v, out, lse, dlse=dlse, **rooms, **options)
        assert emulated.findings() == ()
    expected = _expected(given, dout, dlse)
    for name, reference in expected.items():
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
    if layout and x.dim() == 4:
        room = lay_out(torch.zeros_like(room), layout)
    return room.fill_(_POISON)


def _expected(given: Inputs, dout: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    leaves = {name: x.double().requires_grad_() for name, x in given.with_gradient.items()}
    out, lse = given.reference(**leaves, **given.reference_options)
    total = (out * dout.double()).sum()
    if dlse is not None:
        seen = lse > -torch.inf
        total = total + (lse[seen] * dlse[seen].double()).sum()
    gradients = torch.autograd.grad(
        total, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, gradients, strict=True))


def _batch(call: CompiledCall, rng: torch.Generator) -> Inputs:
    (heads_q, heads_k), batch = call.heads, len(call.lengths)
    seqlen_q, seqlen_k = call.lengths[0]
    hdim_q, hdim_v = call.hdims
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": heads_q, "heads_k": heads_k}
    dtype = DTYPES[call.dtype]
    qkv = random_qkv(rng, batch=batch, hdim=hdim_q, hdim_v=hdim_v, dtype=dtype, **sizes)
    tensors = {
        name: lay_out(x, layout)
        for name, x, layout in zip("qkv", qkv, call.layouts[:3], strict=True)
    }
    shape = Shape(batch, heads_q, seqlen_q, seqlen_k, dtype, rng)
    options = _options(call, shape)
    of_reference = dict(options)
    all_rows = [torch.ones(n, dtype=torch.bool) for n in (seqlen_q, seqlen_k)]
    return Inputs(
        _moved(tensors, options, of_reference), options, attention, of_reference, *all_rows
    )


def _group(call: CompiledCall, rng: torch.Generator) -> Inputs:
    heads_q, heads_k = call.heads
    of_q, of_k = ([pair[side] for pair in call.lengths] for side in (0, 1))
    room_q, room_k = ([n + call.gap for n in lengths] for lengths in (of_q, of_k))
    hdim_q, hdim_v = call.hdims
    sizes = {
        "seqlen_q": sum(room_q),
        "seqlen_k": sum(room_k),
        "heads_q": heads_q,
        "heads_k": heads_k,
    }
    dtype = DTYPES[call.dtype]
    qkv = random_qkv(rng, batch=1, hdim=hdim_q, hdim_v=hdim_v, dtype=dtype, **sizes)
    tensors = {name: x[0] for name, x in zip("qkv", qkv, strict=True)}
    shape = Shape(len(call.lengths), heads_q, sum(room_q), max(of_k), dtype, rng, is_group=True)
    options = _options(call, shape)
    of_reference = dict(options)
    moved = _moved(tensors, options, of_reference)
    starts = [prefix_sums(room).tolist()[:-1] for room in (room_q, room_k)]
    options |= {
        "cu_seqlens_q": prefix_sums(of_q),
        "cu_seqlens_k": prefix_sums(of_k),
        "max_seqlen_k": max(of_k),
    }
    if shape.one_of(2):
        options["max_seqlen_q"] = max(of_q)
    if call.gap:
        options["cu_seqlens_q_padded"] = prefix_sums(room_q)
        options["cu_seqlens_k_padded"] = prefix_sums(room_k)
    of_reference |= {"lengths_q": of_q, "lengths_k": of_k}
    of_reference |= {"starts_q": starts[0], "starts_k": starts[1]}
    used = [_used(lengths, call.gap) for lengths in (of_q, of_k)]
    return Inputs(moved, options, attention_packed, of_reference, *used)


def _used(lengths: list[int], gap: int) -> Tensor:
    rows = [torch.arange(n + gap) < n for n in lengths]
    return torch.cat(rows)


def _options(call: CompiledCall, shape: Shape) -> Options:
    return {"mask": call.mask} | options_of(call.features, shape)


def _moved(
    tensors: dict[str, Tensor], options: Options, of_reference: Options
) -> dict[str, Tensor]:
    """All that has a gradient, taken out of the options."""
    for name in ("bias", "sink"):
        if name in options and options[name].dtype != torch.bool:
            tensors[name] = options.pop(name)
            del of_reference[name]
    return tensors


def test_what_nobody_sees_has_no_gradient(rng):
    """Keys behind all queries, whatever they hold, and queries before all keys."""
    with emulate("gfx942"):
        for mask, seqlen_q, seqlen_k in ((1, 20, 170), (2, 170, 20)):
            q, k, v = (
                torch.randn(1, n, 1, 24, generator=rng).bfloat16()
                for n in (seqlen_q, seqlen_k, seqlen_k)
            )
            out, lse = fmha_fwd(q, k, v, mask=mask, return_lse=True)
            dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
            rooms = {"dq": dq, "dk": dk, "dv": dv}
            fmha_bwd(torch.ones_like(out), q, k, v, out, lse, mask=mask, **rooms)
            assert not dk[:, 20:].any()
            assert not dv[:, 20:].any()
            assert dv[:, :20].all()
            assert not dq[:, : max(seqlen_q - seqlen_k, 0)].any()
            assert dq[:, -19:].any()


def test_sink_tokens_have_gradients_of_far_queries(rng):
    """Further from the window than a workgroup's keys are."""
    options = {"mask": "b:3,0", "sink_size": 4}
    q, k, v = (torch.randn(1, 200, 1, 24, generator=rng).bfloat16() for _ in range(3))
    with emulate("gfx942"):
        out, lse = fmha_fwd(q, k, v, return_lse=True, **options)
        actual = fmha_bwd(torch.ones_like(out), q, k, v, out, lse, **options)
    doubles = [x.double().requires_grad_() for x in (q, k, v)]
    attention(*doubles, **options)[0].sum().backward()
    for x, reference in zip(actual, doubles, strict=True):
        assert reference.grad is not None
        largest = reference.grad.abs().max().item()
        assert (x.double() - reference.grad).abs().max() <= TOLERANCE["bf16"] * max(1, largest)


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


def test_autograd(rng):
    """`fmha_fwd` saves what backward needs, and gets the gradients of what followed."""
    qkv = [torch.randn(1, 33, 2, 24, generator=rng).bfloat16().requires_grad_() for _ in range(3)]
    with emulate("gfx942", check=True) as emulated:
        (fmha_fwd(*qkv, mask="causal").float() ** 2).sum().backward()
        assert emulated.findings() == ()
    doubles = [x.detach().double().requires_grad_() for x in qkv]
    (attention(*doubles, mask=2)[0] ** 2).sum().backward()
    for x, reference in zip(qkv, doubles, strict=True):
        assert x.grad is not None
        assert reference.grad is not None
        bound = TOLERANCE["bf16"] * max(1.0, reference.grad.abs().max().item())
        assert (x.grad.double() - reference.grad).abs().max() <= bound


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


_WIDE = ((256, 256), (192, 192), (192, 128), (128, 256))
_NARROW = ((128, 128), (64, 64), (96, 8))
# A sink is in the lse already.
_ALL_BUT_SINK = replace(ALL_MODIFIERS, asked=ALL_MODIFIERS.asked._replace(sink=None))


@pytest.mark.sample(
    ("arch", "hdims", "is_masked", "access", "modifiers"),
    [
        (arch, hdims, is_masked, access, modifiers)
        for arch in ARCHS
        for is_masked in (False, True)
        for access in ("near", "far")
        for hdims, modifiers in (
            *((hdims, NO_MODIFIERS) for hdims in (*_WIDE, *_NARROW, (255, 251), (61, 100))),
            *((hdims, _ALL_BUT_SINK) for hdims in (*_WIDE, *_NARROW)),
        )
    ],
    1,
)
def test_nothing_is_spilled(arch, hdims, is_masked, access, modifiers):
    """What goes to scratch memory, or scalars to vector registers, would be in every loop's way."""
    traits = BackwardTraits(
        *(arch, "bf16", *hdims, "gm1", "rtne", is_masked, access), modifiers=modifiers
    )
    elf = Elf(jit.read(backward_spec(traits)))
    for kernel in traits.kernels():
        symbol = kernel.row.symbol
        metadata = kernel_metadata(elf, symbol)
        assert metadata is not None
        assert metadata[".private_segment_fixed_size"] == 0, symbol
        assert metadata[".vgpr_spill_count"] == 0, symbol
        assert metadata[".sgpr_spill_count"] == 0, symbol


def test_wide_heads_have_a_kernel_each_for_dk_and_dv():
    traits = BackwardTraits(
        *("gfx950", "bf16", 192, 128, "gm0", "rtne", False, "near"), NO_MODIFIERS
    )
    assert [each.rows for each in traits.kernels()] == ["q", "k"]
    assert [each.rows for each in replace(traits, hdim_v=129).kernels()] == ["q", "k", "k"]


def test_what_is_not_served_is_refused_by_name(rng):
    q, k, v = random_qkv(rng, dtype=torch.bfloat16)
    out, lse = fmha_fwd(q, k, v, return_lse=True)
    column_major = v.transpose(1, 3).contiguous().transpose(1, 3)
    with emulate("gfx942"):
        with pytest.raises(NotImplementedError, match="not aiter: It does not serve values"):
            fmha_bwd(out.clone(), q, k, column_major, out, lse)
        with pytest.raises(
            NotImplementedError, match="not compiled: Its backward pass does not serve values"
        ):
            fmha_bwd(out.clone(), q, k, column_major, out, lse)
