"""torch.profiler shows calls with kernel names and shapes; FlopCounterMode counts them."""

import random
from typing import Any

import pytest
import torch
from inputs import random_qkv
from packed_calls import packed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from untyped import explain, fmha_bwd, fmha_fwd

import jitfmha
from jitfmha.call.pytorch.flop_count import visible_pairs
from jitfmha.problem.float64_reference import visible
from jitfmha.problem.mask import parse_mask


def profiled(call: Any) -> dict[str, Any]:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        call()
    return {event.name: event for event in recorded.events()}


def test_profiler_shows_kernel_and_shapes(rng):
    q, k, v = random_qkv(rng)
    out, lse = fmha_fwd(q, k, v, mask="causal", return_lse=True)
    kernel = explain(q, k, v, mask="causal").plan.kernel
    for _ in range(2):
        events = profiled(lambda: fmha_fwd(q, k, v, mask="causal"))
        assert kernel in events
        assert events["jitfmha::fmha_fwd"].input_shapes[:2] == [[2, 33, 2, 64], [2, 49, 2, 64]]
    fmha_bwd(out, q, k, v, out, lse, mask="causal")
    for _ in range(2):
        events = profiled(lambda: fmha_bwd(out, q, k, v, out, lse, mask="causal"))
        assert events["jitfmha::fmha_bwd"].input_shapes[2] == [2, 49, 2, 64]
        assert jitfmha.explain_bwd(out, q, k, v, out, lse, mask="causal").plan.kernel in events


def test_profiler_shows_the_backward_pass_of_autograd(rng):
    q, k, v = (x.requires_grad_() for x in random_qkv(rng))
    assert "jitfmha::fmha_bwd" in profiled(lambda: fmha_fwd(q, k, v).sum().backward())


def test_kernel_names_follow_the_sizes(rng):
    """One kind of calls may have several kernels, and none where there is nothing to compute."""
    for seqlen_q in (1, 0, 33):
        q, k, v = random_qkv(rng, seqlen_q=seqlen_q)
        events = profiled(lambda q=q, k=k, v=v: fmha_fwd(q, k, v))
        assert (explain(q, k, v).plan.kernel in events) == (seqlen_q > 0)


def test_nothing_is_recorded_without_a_profiler(rng, monkeypatch):
    def fail(name: str) -> None:
        raise AssertionError(f"{name} is recorded, and nobody looks")

    monkeypatch.setattr("jitfmha.call.run.record_function", fail)
    monkeypatch.setattr("jitfmha.call.backward.record_function", fail)
    q, k, v = (x.requires_grad_() for x in random_qkv(rng))
    fmha_fwd(q, k, v).sum().backward()


# ---- Counts --------------------------------------------------------------------------------------


def masks(generator: random.Random) -> list[tuple[int | str, tuple[int, int], int]]:
    left, right = generator.randint(-1, 20), generator.randint(-1, 20)
    windows = [(0, (left, right), 0), (2, (left, -1), 0), (1, (left, -1), generator.randint(0, 9))]
    texts = [f"t:{left},{right}", f"g:{generator.randint(1, 20)},{generator.randint(1, 20)}"]
    plain = [(mask, (-1, -1), 0) for mask in (0, 1, "causal", *texts)]
    return [*plain, *windows, (0, (left, right), generator.randint(1, 30))]


def test_visible_pairs_are_those_of_the_mask(seed):
    generator = random.Random(seed)
    for _ in range(20):
        sq, sk = generator.choice([0, 1, 7, 33]), generator.choice([0, 1, 6, 49])
        for mask, window, sink_size in masks(generator):
            expected = int(visible(sq, sk, mask, window, sink_size).sum())
            given = parse_mask(mask, window)
            assert visible_pairs(sq, sk, given, sink_size) == expected, (sq, sk, mask, window)


def counted(call: Any) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        call()
    return {str(name): n for name, n in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("mask", [0, "causal", "b:4,5"])
def test_flops_of_both_directions(rng, mask):
    real = random_qkv(rng, heads_q=4, hdim_v=32)
    fake = FakeTensorMode()
    q, k, v = (fake.from_tensor(x).requires_grad_() for x in real)
    pairs = 2 * 4 * int(visible(33, 49, mask).sum())
    counts = counted(lambda: fmha_fwd(q, k, v, mask=mask).sum().backward())
    assert counts["jitfmha.fmha_fwd"] == pairs * 2 * (64 + 32)
    assert counts["jitfmha.fmha_bwd"] == pairs * 2 * (3 * 64 + 2 * 32)
    with torch.no_grad():
        assert counted(lambda: fmha_fwd(q, k, v, mask=mask)) == {
            "jitfmha.fmha_fwd": counts["jitfmha.fmha_fwd"]
        }


def test_flops_are_those_of_sdpa_without_a_mask(rng):
    q, k, v = random_qkv(rng)
    ours = counted(lambda: fmha_fwd(q, k, v))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):  # Torch does not count its kernel for the CPU.
        theirs = counted(lambda: torch.nn.functional.scaled_dot_product_attention(*heads_first))
    assert list(ours.values()) == list(theirs.values())


def test_flops_of_packed_sequences(rng):
    call = packed(rng, [5, 0, 17], [9, 4, 30], heads=(2, 2))
    (q, k, v), groups = call.qkv, call.sequences.groups
    pairs = 2 * (5 * 9 + 17 * 30)
    assert counted(lambda: fmha_fwd(q, k, v, **groups)) == {"jitfmha.fmha_fwd": pairs * 2 * 128}
    out = torch.empty_like(q)
    assert counted(lambda: fmha_fwd(q, k, v, **groups, out=out)) == {
        "jitfmha.fmha_fwd_out": pairs * 2 * 128
    }
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        fake_groups = {name: mode.from_tensor(x) for name, x in groups.items()}
        as_if_equal = 2 * 3 * (22 // 3) * (43 // 3)
        assert counted(lambda: fmha_fwd(*fakes, **fake_groups)) == {
            "jitfmha.fmha_fwd": as_if_equal * 2 * 128
        }


def test_a_counter_that_is_counting_already_learns_of_the_operators(rng, monkeypatch):
    """As where this package is imported first, and torch's counter for the first time after it."""
    q, k, v = random_qkv(rng)
    for operator in ("fmha_fwd", "fmha_fwd_out", "fmha_bwd"):
        monkeypatch.delitem(flop_registry, getattr(torch.ops.jitfmha, operator), raising=False)
    arguments = (q, k, v, None, "0", [-1, -1], False, *[None] * 6)
    assert counted(lambda: torch.ops.jitfmha.fmha_fwd(*arguments))
