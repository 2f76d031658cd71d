"""This package's own backward kernels, on the emulator with the sanitizer, against float64.

Waves take their turns in a random order. A run draws a few calls; `--exhaustive` takes hundreds.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from backward_calls import POISON, BackwardCall, exact_gradients
from compiled_calls import ARCHS
from torch import Tensor
from untyped import explain_bwd, fmha_bwd, fmha_fwd

from jitfmha import HipError, emulate
from jitfmha.amd.chips import Arch
from jitfmha.emulator import EmulatedRun
from jitfmha.planning.target import TARGET_HERE
from jitfmha.problem.float64_reference import attention

pytestmark = pytest.mark.usefixtures("ready_first")

FAMILY = "ready"
_HUNDREDS = 400
HDIMS: dict[Arch, tuple[tuple[int, int], ...]] = {
    "gfx942": ((64, 64), (128, 128), (192, 128), (192, 192)),
    "gfx950": ((64, 64), (128, 128)),
}
ARCHS_AND_HDIMS = [(arch, hdims) for arch in ARCHS for hdims in HDIMS[arch]]
# Around tiles of 64 or 32 queries and 128 or 256 keys.
QUERIES, KEYS = (0, 1, 31, 32, 33, 63, 64, 65, 70, 130), (0, 1, 127, 128, 129, 200, 256, 257)
HEADS = ((1, 1), (2, 1), (3, 3), (6, 2))
MASKS = (0, 1, 2, "t:20,10", "b:40,0", "b:-1,7")
LAYOUTS = ("bshd", "bhsd")
# Where every workgroup has many keys: an architecture, and that its GPU has one compute unit.
_SMALL: tuple[Arch, bool] = ("gfx950", True)
EVERY_KERNEL = [*((arch, False, hdims) for arch, hdims in ARCHS_AND_HDIMS), (*_SMALL, (128, 128))]
# Of the size of a gradient, as root mean squares; towards zero errors do not average out. Of many
# rows they are 0.0030 and 0.0066, and up to a third more where a gradient has a single row.
TOLERANCE = {"rtne": 0.006, "rtna": 0.006, "rtz": 0.012}


def drawn(rng: torch.Generator, hdims: tuple[tuple[int, int], ...]) -> BackwardCall:
    """A call of any mask, mode and layout, in which nothing is a multiple of a tile."""
    chosen = random.Random(rng.initial_seed())
    is_group = chosen.random() < 0.5
    count = chosen.randint(2, 4) if is_group else 1
    names = ("q", "k", "v", "dout", "dq", "dk", "dv")
    return BackwardCall(
        rng,
        dtype=chosen.choice((torch.bfloat16, torch.float16)),
        hdims=chosen.choice(hdims),
        heads=chosen.choice(HEADS),
        lengths=[(chosen.choice(QUERIES), chosen.choice(KEYS)) for _ in range(count)],
        batch=None if is_group else chosen.randint(1, 2),
        mask=chosen.choice(MASKS),
        layouts={} if is_group else {name: chosen.choice(LAYOUTS) for name in names},
        gap=chosen.choice((0, 5)),
        options={
            "bf16_cvt": chosen.choice(tuple(TOLERANCE)),
            "deterministic": chosen.random() < 0.5,
        },
    )


@contextmanager
def emulated(arch: Arch, is_small: bool = False, **options: Any) -> Iterator[EmulatedRun]:
    """A GPU without findings, which has one compute unit where it is small.

    Any call has workgroups for that one, however many keys these have.
    """
    with emulate(arch, **options) as run:
        if is_small:
            target = TARGET_HERE.get()
            target.compute_units = 1
        yield run
        assert not options.get("check") or run.findings() == ()


def planned(call: BackwardCall) -> str:
    """The kernel that comes ready and serves the call here."""
    explanation = call.explain()
    assert explanation.plan.family == FAMILY, str(explanation)
    return explanation.plan.kernel


def assert_near(actual: Iterable[Tensor], exact: Iterable[Tensor], tolerance: float) -> None:
    """All gradients, by the root mean squares of errors over those of gradients."""
    for x, reference in zip(actual, exact, strict=True):
        error = (x.double() - reference).norm() / reference.norm()
        assert error <= tolerance, error


@pytest.mark.parametrize(("arch", "is_small"), [*((arch, False) for arch in ARCHS), _SMALL])
@pytest.mark.sample("number", range(_HUNDREDS), 2)
def test_drawn_calls(arch, is_small, number, rng):
    call = drawn(rng, HDIMS[arch] if not is_small else ((128, 128),))
    call.poison_unused_rows()
    with emulated(arch, is_small, check=True, random_order=rng.initial_seed()):
        kernel = planned(call)
        assert not (is_small and call.k.numel()) or "wide" in kernel
        call.run()
    call.assert_right(TOLERANCE[call.arguments["bf16_cvt"]])


@pytest.mark.parametrize(
    ("lengths", "mask"),
    [([(140, 600)], 0), ([(300, 800)], 2), ([(70, 513)], "b:-1,7"), ([(99, 258), (130, 513)], 2)],
)
def test_several_blocks_of_many_keys(lengths, mask, rng):
    """Where there is a mask a workgroup has two of them, or the one in the middle."""
    batch = 1 if len(lengths) == 1 else None
    longest = {} if batch else {"max_seqlen_q": 130, "max_seqlen_k": 513}
    call = BackwardCall(
        *(rng, torch.bfloat16, (128, 128), (2, 1), lengths, batch, mask), options=longest
    )
    call.poison_unused_rows()
    with emulated("gfx950", is_small=True, check=True, random_order=rng.initial_seed()):
        assert "wide" in planned(call)
        call.run()
    call.assert_right(TOLERANCE["rtne"])


@pytest.mark.parametrize(
    ("heads", "seqlen_k", "mask", "is_wide"),
    [
        (256, 1, 0, True),
        (255, 1, 0, False),
        (8, 7937, 0, True),
        (8, 7936, 0, False),
        (16, 7681, 2, True),
        (16, 7680, 2, False),
    ],
)
def test_many_keys_are_for_calls_that_fill_the_gpu(heads, seqlen_k, mask, is_wide):
    """An MI355X has 256 compute units."""
    q, k = (torch.empty(1, n, heads, 128, dtype=torch.bfloat16) for n in (1, seqlen_k))
    with emulate("gfx950"):
        lse = torch.empty(1, heads, 1)
        plan = explain_bwd(q, q, k, k, q, lse, mask=mask).plan
    assert ("wide" in plan.kernel) == is_wide


# Masks of each kind; ragged sequences, of which some have no queries or no keys; workgroups of a
# single tile; and so many key heads that not all are at work at a time. Keys take several
# workgroups.
BATCHES = [(mask, 1, (4, 2), [(150, 700)]) for mask in (0, 1, 2, "b:40,0", "t:100,20")]
GROUPS = [(mask, None, (4, 2), [(0, 5), (90, 400), (40, 0), (70, 300)]) for mask in (0, 2)]
SINGLE_TILES = [(0, 2, (2, 2), [(20, 1500)])]
MANY_HEADS = [(2, 3, (3, 3), [(70, 300)])]
# So many tiles, and workgroups for each, that some would overtake others if they did not wait. Sums
# in another order differ in float32's last bit, which float16 hides less often than bfloat16 does.
MANY_TILES = [(0, 1, (4, 1), [(300, 1500)]), (2, 1, (2, 1), [(700, 1500)])]


@pytest.mark.parametrize(("arch", "is_small", "hdims"), EVERY_KERNEL)
@pytest.mark.sample(
    ("mask", "batch", "heads", "lengths"),
    [*BATCHES, *GROUPS, *SINGLE_TILES, *MANY_HEADS],
    3,
    always=MANY_TILES,
)
@pytest.mark.usefixtures("poisoned_memory")
def test_deterministic_bits_do_not_depend_on_the_order(
    arch, is_small, mask, batch, heads, lengths, hdims, rng
):
    """One workgroup after the other, then in random order."""
    dtype = torch.float16 if (mask, batch, heads, lengths) in MANY_TILES else torch.bfloat16
    options = {"deterministic": True}
    call = BackwardCall(rng, dtype, hdims, heads, lengths, batch, mask, options=options)
    call.poison_unused_rows()
    with emulated(arch, is_small, threads=1):
        assert ("wide" in planned(call)) == is_small
        expected = {name: x.clone() for name, x in call.run().items()}
    call.assert_right(TOLERANCE["rtz"])
    for seed in range(2):
        with emulated(arch, is_small, random_order=rng.initial_seed() + seed):
            for x in call.gradients.values():
                x.fill_(POISON)
            for name, x in call.run().items():
                assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("arch", ARCHS)
def test_without_queries_deterministic_gradients_are_zero(arch, rng):
    call = BackwardCall(rng, lengths=[(0, 200)], batch=2, options={"deterministic": True})
    with emulated(arch, check=True):
        call.run()
    assert (call.gradients["dk"] == 0).all()
    assert (call.gradients["dv"] == 0).all()


@pytest.mark.parametrize(("arch", "hdims"), ARCHS_AND_HDIMS)
@pytest.mark.parametrize("mask", [0, 2, "b:-1,7"])
def test_a_single_query_whose_stride_says_nothing(arch, mask, hdims, rng):
    """Rows behind it are not more of it."""
    call = BackwardCall(rng, hdims=hdims, lengths=[(1, 70)], batch=2, mask=mask)
    for x in (call.dout, call.gradients["dq"]):
        x.as_strided_(x.shape, (x.stride(0), 1 << 62, *x.stride()[2:]))
    with emulated(arch, check=True):
        planned(call)
        call.run()
    call.assert_right(TOLERANCE["rtz"])


@pytest.mark.parametrize("name", ["q and out", "dout"])
@pytest.mark.parametrize("arch", ARCHS)
def test_expanded_rows(arch, name, rng):
    """Such as the gradient of a sum, whose rows are all one row."""
    q, k, v, dout = (torch.randn(1, n, 2, 128, generator=rng).bfloat16() for n in (40, 70, 70, 40))
    if name == "dout":
        dout = dout[:, :1].expand_as(dout)
    else:
        q = q[:, :1].expand_as(q)
    with emulated(arch, check=True):
        out, lse = fmha_fwd(q, k, v, return_lse=True)
        if name == "q and out":
            out = out[:, :1].expand_as(out)
        actual = fmha_bwd(dout, q, k, v, out, lse)
    assert_near(actual, exact_gradients(q, k, v, dout), TOLERANCE["rtna"])


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_that_see_nothing_get_and_give_nothing(arch, rng):
    call = BackwardCall(rng, lengths=[(70, 33)], batch=1, mask=2)
    with emulate(arch):
        call.run()
    assert (call.gradients["dq"][:, :37] == 0).all()
    call.assert_right(TOLERANCE["rtne"])


@pytest.mark.parametrize("arch", ARCHS)
def test_keys_behind_the_last_one_add_nothing(arch, rng):
    """All scores are near -280. That of a key that is not there, 0, would be far above the lse.

    What rows have in common cancels in dq and dk, but not in the rounding of what is added up.
    """
    q, k, v, dout = (torch.randn(1, n, 1, 128, generator=rng) for n in (33, 70, 70, 33))
    q, k, v, dout = (x.bfloat16() for x in (q / 10 + 5, k / 10 - 5, v, dout))
    out, lse = attention(q, k, v)
    with emulated(arch, check=True):
        actual = fmha_bwd(dout, q, k, v, out.bfloat16(), lse.float())
    assert_near(actual, exact_gradients(q, k, v, dout), 0.3)


@pytest.mark.parametrize("hdim", [64, 128, 192])
def test_a_gradient_of_the_lse(hdim, rng):
    q, k, v = (torch.randn(1, n, 2, hdim, generator=rng).bfloat16() for n in (40, 70, 70))
    dout = torch.randn(q.shape, generator=rng).bfloat16()
    dlse = torch.randn(1, 2, 40, generator=rng)
    with emulate("gfx942"):
        out, lse = fmha_fwd(q, k, v, return_lse=True)
        actual = fmha_bwd(dout, q, k, v, out, lse, dlse=dlse)
    assert_near(actual, exact_gradients(q, k, v, dout, dlse), 0.008)


@pytest.mark.parametrize("hdim", [64, 128, 192])
@pytest.mark.parametrize("arch", ARCHS)
def test_errors_are_at_most_twice_those_of_rounding(arch, hdim, rng):
    """Against gradients in float64 of inputs that are rounded, and rounded themselves."""
    exact = [torch.randn(1, 160, 2, hdim, generator=rng, dtype=torch.float64) for _ in range(4)]
    *qkv, dout = (x.bfloat16() for x in exact)
    expected, of_rounded = exact_gradients(*exact), exact_gradients(*qkv, dout)
    with emulate(arch):
        out, lse = fmha_fwd(*qkv, return_lse=True)
        actual = fmha_bwd(dout, *qkv, out, lse)
    for x, least, reference in zip(actual, of_rounded, expected, strict=True):
        error, least_error = ((y.double() - reference).norm() for y in (x, least.bfloat16()))
        assert error <= 2 * least_error, f"{error / least_error} times"


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize(("arch", "is_small", "hdims"), EVERY_KERNEL)
def test_main_loops_have_no_conflicts_and_no_scratch(arch, is_small, hdims, is_deterministic, rng):
    options = {"deterministic": is_deterministic}
    call = BackwardCall(
        rng, hdims=hdims, heads=(1, 1), lengths=[(192, 128)], batch=1, options=options
    )
    with emulated(arch, is_small, profile=True) as run:
        call.run()
        _, gradients, _ = run.profiles()
    assert gradients.main_loops
    for loop in gradients.main_loops:
        assert loop.work.lds_conflict_cycles == 0
        assert loop.work.scratch_bytes == 0


@pytest.mark.parametrize(
    ("hdims", "deterministic"), [((96, 96), True), ((96, 96), False), ((128, 64), False)]
)
def test_other_calls_go_to_compiled_kernels(hdims, deterministic, rng):
    options = {"deterministic": deterministic}
    call = BackwardCall(rng, hdims=hdims, lengths=[(3, 5)], batch=1, options=options)
    with emulate("gfx942"):
        explanation = call.explain()
    assert explanation.plan.family == "compiled"
    reason = f"the kernels of this package: none for bf16 and hdim {hdims[0]}x{hdims[1]}."
    assert any(reason in text for text in explanation.rejected[FAMILY]), explanation


def test_rows_that_are_too_far_apart_are_refused_with_their_distance(rng):
    call = BackwardCall(rng, heads=(1, 1), lengths=[(3, 2)], batch=1)
    stride = 1 << 23
    call.k = torch.empty_strided((1, 2, 1, 128), (0, stride, 128, 1), dtype=torch.bfloat16)
    with emulate("gfx942"):
        text = str(call.explain())
    assert "Rows are to be less than 16777216 bytes apart; those of k are 16777216." in text


@pytest.mark.parametrize("launches", range(3))
def test_a_launch_that_fails_is_an_error_that_names_its_kernel(launches, rng, runtime):
    """The kernels after it are not launched."""
    call = BackwardCall(rng, lengths=[(3, 5)], batch=1)
    runtime.fail("hipModuleLaunchKernel", 1, after=launches)
    failed = ("row_sums", r"rtne\b", "round_dq")[launches]
    with (
        runtime.stands_for(runtime.target("MI300X")),
        pytest.raises(HipError, match=f"hipModuleLaunchKernel of .*{failed}.* on device 0"),
    ):
        call.run()
    assert len(runtime.launches()) == launches
