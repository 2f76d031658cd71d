"""Trees in the plain form run on the emulated chips: every row of the interface, in numbers."""

from typing import Any

import pytest
import torch
from amd_problems import FP8, AmdProblem, assert_exact
from plain_tree import PlainKernel
from torch import Tensor
from untyped import explain, fmha_v3_fwd, fmha_v3_varlen_fwd

from jitfmha import emulate

pytestmark = [pytest.mark.usefixtures("tree", "ready_first"), pytest.mark.filterwarnings("error")]

CHIPS = ("gfx942", "gfx942-mi308", "gfx950")
# The largest relative error of rounding to nearest.
BF16_ROUNDING, FP16_ROUNDING = 2**-8, 2**-11
MODES = ("gm0", "gm1")
RAGGED = ((70, 90), (0, 10), (20, 0), (129, 64), (1, 1))


def problem(rng: torch.Generator, mode: str, **changes: object) -> AmdProblem:
    options: dict[str, object] = (
        {"batch": 2, "lengths": ((70, 90),)} if mode == "gm0" else {"lengths": RAGGED}
    )
    return AmdProblem(rng, **(options | changes))  # type: ignore[arg-type]


def run_exactly(chip: str, call: AmdProblem, rounding: float = BF16_ROUNDING) -> None:
    """On the emulated chip, and as near as rounding explains."""
    with emulate(chip):
        actual = call.run()
    assert_exact(actual, call.exact(), rounding)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("mask", [0, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hdim_q", [128, 192])
@pytest.mark.sample("chip", CHIPS, 1)
def test_bf16(rng, tree, chip, hdim_q, mode, mask):
    """For 192x128 another workgroup, and on gfx942 a grid in which causal tiles come one by one."""
    ts_qo = 64 if hdim_q == 128 else 32
    kernel = PlainKernel(hdim_q=hdim_q, mask=mask, mode=MODES.index(mode), ts_qo=ts_qo)
    call = problem(rng, mode, mask=mask, hdims=(hdim_q, 128))
    with emulate(chip):
        plan = explain(call.q, call.k, call.v, **call.arguments)
    assert plan.plan.kernel == kernel.name
    assert str(tree) in str(plan)
    run_exactly(chip, call)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("mode", MODES)
def test_fp16(rng, mode):
    call = problem(rng, mode, dtype=torch.float16, hdims=(64, 64))
    run_exactly("gfx942", call, FP16_ROUNDING)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.sample(
    ("chip", "hdim", "descales"),
    [
        *(("gfx942", 128, descales) for descales in (None, "one", "each")),
        # Plain gfx950 kernels take one scale; test_ready.py has the refusal of others.
        *(("gfx950", hdim, descales) for hdim in (128, 256) for descales in (None, "one")),
    ],
    3,
)
@pytest.mark.parametrize("mode", MODES)
def test_fp8(rng, chip, hdim, mode, descales):
    changes = {"hdims": (hdim, hdim), "heads": (4, 2), "softmax_scale": 0.05}
    run_exactly(chip, problem(rng, mode, dtype=FP8[chip], descales=descales, **changes))


def test_some_descales(rng):
    """Those that are not given are 1."""
    call = problem(rng, "gm0", dtype=FP8["gfx942"], descales="one")
    for name in ("q_descale", "v_descale"):
        del call.arguments[name]
        run_exactly("gfx942", call)


@pytest.mark.parametrize("layout", ["bhsd", "sbhd", "packed", "packed_by_head", "every_other_row"])
def test_layouts(rng, layout):
    """Strides of every kind, and none but the given tensors is touched."""
    call = problem(rng, "gm0", mask=2, layout=layout, heads=(4, 2))
    buffer = torch.full((2, 70, 4, 3, 128), -77.0, dtype=torch.bfloat16)
    call.arguments["out"] = buffer[:, :, :, 1]
    run_exactly("gfx942", call)
    assert (buffer[:, :, :, ::2] == -77.0).all()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (1, 130), (65, 1), (128, 64), (127, 129)]
)
def test_ragged_lengths(rng, seqlen_q, seqlen_k):
    run_exactly("gfx950", problem(rng, "gm0", mask=2, lengths=((seqlen_q, seqlen_k),)))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("return_lse", [False, True])
def test_no_keys(rng, return_lse):
    call = problem(rng, "gm0", lengths=((70, 0),), options={"return_lse": return_lse})
    buffer = torch.full((2, 70, 2, 3, 128), -77.0, dtype=torch.bfloat16)
    call.arguments["out"] = buffer[:, :, :, 1]
    with emulate("gfx942"):
        out, lse = call.run()
    assert (out == 0).all()
    assert (buffer[:, :, :, ::2] == -77.0).all()
    if return_lse:
        assert lse.shape == (2, 2, 70)
        assert (lse == -torch.inf).all()


@pytest.mark.usefixtures("poisoned_memory")
def test_no_keys_in_any_sequence(rng):
    call = problem(rng, "gm1", lengths=((20, 0), (5, 0)), gap=2)
    call.k, call.v = call.k[:0], call.v[:0]
    call.arguments["cu_seqlens_k_padded"] = call.arguments["cu_seqlens_k"]
    with emulate("gfx942"):
        out, lse = call.run()
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("longest", [None, 129, 5000])
def test_gaps_and_longest_lengths(rng, longest):
    """Unused rows are 0 and -inf; the grid holds every tile whatever length is announced."""
    options = {"max_seqlen_q": longest}
    run_exactly("gfx942", problem(rng, "gm1", mask=2, gap=7, options=options))


def test_top_left_masks(rng):
    """Bottom-right kernels serve square problems; others need a kernel of their own."""
    for lengths, kernel in (((70, 70), PlainKernel(mask=2)), ((70, 90), PlainKernel(mask=1))):
        call = problem(rng, "gm0", mask=1, lengths=(lengths,))
        with emulate("gfx942"):
            assert explain(call.q, call.k, call.v, mask=1).plan.kernel == kernel.name
        run_exactly("gfx942", call)


@pytest.mark.parametrize("mode", MODES)
def test_rounding_is_the_one_asked_for(rng, mode):
    call = problem(rng, mode)
    exact = call.exact()[0]
    results = []
    for cvt in ("rtne", "rtna", "rtz"):
        call.arguments["bf16_cvt"] = cvt
        with emulate("gfx942"):
            results.append(call.run()[0])
    nearest, away, to_zero = (x.double() for x in results)
    assert (to_zero.abs() <= exact.abs() + 2e-5).all()
    assert not torch.equal(nearest, to_zero)
    for rounded in (nearest, away):
        torch.testing.assert_close(rounded, exact, atol=2e-5, rtol=BF16_ROUNDING + 1e-4)
    for how, result in enumerate(results):
        with emulate("gfx942"):
            assert torch.equal(of_aiter(call, how)[0], result)


def of_aiter(call: AmdProblem, how: int, **scales: Tensor) -> Any:
    """What AITER's functions make of it, with this rounding."""
    last = (False, -1, -1, True, False, how)
    if not call.is_group:
        return fmha_v3_fwd(call.q, call.k, call.v, 0.0, 0.2, *last, **scales)
    ends = (call.arguments["cu_seqlens_q"], call.arguments["cu_seqlens_k"], 129, 90)
    others = (0, 0.0, 0.2, 0.0, False)
    return fmha_v3_varlen_fwd(call.q, call.k, call.v, *ends, *others, *last, **scales)


def test_rounding_is_ignored_on_gfx950(rng):
    call = problem(rng, "gm0")
    with emulate("gfx950"):
        results = [call.run()[0] for call.arguments["bf16_cvt"] in ("rtne", "rtna", "rtz")]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("mode", MODES)
def test_descales_of_aiter(rng, mode):
    call = problem(rng, mode, dtype=FP8["gfx942"], heads=(4, 2), descales="each")
    scales = {name: call.arguments[name] for name in ("q_descale", "k_descale", "v_descale")}
    with emulate("gfx942"):
        out, lse, _, _ = of_aiter(call, 1, **scales)
    assert_exact((out, lse), call.exact(), BF16_ROUNDING)


@pytest.mark.filterwarnings("default")
def test_compiled_graphs(rng):
    call = problem(rng, "gm0", dtype=FP8["gfx942"], descales="one")
    torch._dynamo.reset()
    compiled = torch.compile(lambda: call.run(), backend="aot_eager")
    with emulate("gfx942"):
        assert_exact(compiled(), call.exact(), BF16_ROUNDING)
