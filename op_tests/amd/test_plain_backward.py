"""Backward passes by a tree in AITER's form, in numbers: plain kernels on the emulated chips.

A wrong argument, grid, stride or sum, and a zero that is missing, give wrong gradients, or touch
memory that the call does not own, which the emulator reports.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from backward_calls import BackwardCall
from plain_backward_tree import GRADIENTS, PlainGradients, write_backward_tree
from plain_tree import UseTree
from untyped import fmha_bwd

from jitfmha import emulate
from jitfmha.kernels.aiter.launch import prepared_for_bf16

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("ready_first")]

# Of rounding probabilities, gradients and their sums.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
# Lengths of 0, of 1, of a tile and one key more or less, some without queries or without keys.
RAGGED = ((33, 65), (0, 20), (17, 0), (1, 1), (40, 31))
DTYPES = {"gfx942": torch.bfloat16, "gfx950": torch.float16}


@pytest.fixture(scope="session")
def backward_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with all plain backward kernels, and no others."""
    root = tmp_path_factory.mktemp("backward_hsa")
    for arch in GRADIENTS:
        write_backward_tree(root, arch)
    return root


@pytest.fixture(autouse=True)
def tree(backward_tree: Path, use_tree: UseTree) -> Path:
    use_tree(backward_tree)
    return backward_tree


def backward(rng: torch.Generator, arch: str, **changes: Any) -> BackwardCall:
    values: dict[str, Any] = {"dtype": DTYPES[arch], "hdims": (8, 8), "heads": (4, 2)}
    return BackwardCall(rng, **(values | changes))


def check(call: BackwardCall, arch: str, kernel: PlainGradients | None = None) -> None:
    """The gradients are right, and that kernel makes them."""
    with emulate(arch):
        plan = call.explain().plan
        assert plan.family == "aiter", str(call.explain())
        if kernel is not None:
            assert plan.kernel == f"fmha_{kernel.name}"
        call.run()
    call.assert_right(TOLERANCE[call.dtype])


BATCHES = [
    ("gfx942", PlainGradients(bf16_cvt=0), 0, None),
    ("gfx942", PlainGradients(hdims=(128, 128), mask=3, bf16_cvt=0), "b:7,20", True),
    ("gfx942", PlainGradients(hdims=(128, 128), mask=3, bf16_cvt=0), "t:-1,9", True),
    ("gfx950", PlainGradients("fp16"), 0, True),
    ("gfx950", PlainGradients("fp16", mask=2), 2, True),
    ("gfx950", PlainGradients("fp16", (128, 128), mask=2, atomic32=0), 2, None),
]


@pytest.mark.sample(
    ("arch", "kernel", "mask", "atomic_fp32", "heads"),
    [(*case, heads) for case in BATCHES for heads in ((4, 2), (3, 3))],
    5,
)
def test_batches(rng, arch, kernel, mask, atomic_fp32, heads):
    layouts = {"q": "packed", "k": "bhsd", "v": "every_other_row"}
    layouts |= {"dout": "sbhd", "dq": "bhsd", "dk": "packed", "dv": "sbhd"}
    options = {"atomic_fp32": atomic_fp32}
    call = backward(
        *(rng, arch),
        hdims=(8, 8) if kernel.hdims == (64, 64) else (72, 72),
        heads=heads,
        lengths=((19, 97),) if kernel.hdims == (64, 64) else ((5, 67),),
        batch=2,
        mask=mask,
        layouts=layouts,
        options=options,
    )
    check(call, arch, kernel)


PACKED = [
    ("gfx942", PlainGradients(mask=2, mode=1, bf16_cvt=0), 2, None),
    ("gfx950", PlainGradients("fp16", mode=1), 0, True),
    ("gfx950", PlainGradients("fp16", mask=2, atomic32=0, mode=1), 2, False),
]
SEQUENCES = [((4, 2), 0, None), ((2, 2), 0, (40, 65)), ((4, 2), 3, (40, 65)), ((2, 2), 3, None)]


@pytest.mark.sample(
    ("arch", "kernel", "mask", "atomic_fp32", "heads", "gap", "longest"),
    [(*case, *sequences) for case in PACKED for sequences in SEQUENCES],
    6,
)
def test_packed_sequences(rng, arch, kernel, mask, atomic_fp32, heads, gap, longest):
    """Keys without queries have gradients of 0; unused rows stay as they are."""
    options: dict[str, Any] = {"atomic_fp32": atomic_fp32}
    if longest is not None:
        options |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    call = backward(rng, arch, heads=heads, lengths=RAGGED, mask=mask, gap=gap, options=options)
    check(call, arch, kernel)


@pytest.mark.sample(
    ("mask", "layout", "gradient_layout"),
    list(product((0, 2), ("bshd", "bhsd", "packed", "sbhd"), ("bshd", "bhsd"))),
    5,
)
def test_kernels_of_the_short_block(rng, mask, layout, gradient_layout):
    """Strides of dk, dv and in 16 bits dq follow from those of k and q, wherever the caller wants
    the gradients.
    """
    kernel = PlainGradients(mask=mask // 2, atomic32=1 - mask // 2, pssk=0, bf16_cvt=0)
    layouts = dict.fromkeys(("q", "k", "v", "dout"), layout)
    layouts |= dict.fromkeys(("dq", "dk", "dv"), gradient_layout)
    changes = {"layouts": layouts, "options": {"atomic_fp32": mask == 0}}
    call = backward(rng, "gfx942", lengths=((64, 64),), batch=2, mask=mask, **changes)
    check(call, "gfx942", kernel)


def test_192x128(rng):
    """The sums of rows go by the columns of v, and shuffled rows of dq are wider."""
    changes = {"hdims": (192, 128), "heads": (1, 1), "options": {"atomic_fp32": False}}
    call = backward(rng, "gfx950", lengths=((5, 40),), batch=2, **changes)
    check(call, "gfx950", PlainGradients("fp16", (192, 128), atomic32=0))


def test_no_keys(rng):
    for arch in GRADIENTS:
        call = backward(rng, arch, lengths=((9, 0),), batch=2, options={"atomic_fp32": True})
        check(call, arch)
        assert not call.gradients["dq"].any()


def test_an_lse_of_any_strides(rng):
    call = backward(rng, "gfx942", lengths=((33, 20),), batch=2)
    call.lse = torch.full((33, 4, 3, 2), torch.nan)[:, :, 1].permute(2, 1, 0).copy_(call.lse)
    assert call.lse.stride() == (1, 6, 24)
    check(call, "gfx942")


def test_roundings(rng):
    """Where torch converts dq in the place of a kernel with a fault, it rounds as asked for."""
    seed, results = rng.initial_seed(), []
    for cvt in ("rtne", "rtna", "rtz"):
        options = {"bf16_cvt": cvt}
        rng.manual_seed(seed)
        call = backward(rng, "gfx942", lengths=((33, 20),), batch=1, options=options)
        with emulate("gfx942", threads=1):
            results.append(call.run()["dq"])
    nearest, away, to_zero = (x.double() for x in results)
    # All three are of the same sums.
    assert (to_zero.abs() <= nearest.abs()).all()
    assert (away.abs() >= nearest.abs()).all()
    share_of_zero = (to_zero != nearest).double().mean().item()
    assert 0.3 < share_of_zero < 0.7
    torch.testing.assert_close(to_zero, nearest, atol=0, rtol=2**-7)
    torch.testing.assert_close(away, nearest, atol=0, rtol=2**-7)


def test_rounding_of_single_values():
    exact = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-9, torch.inf, torch.nan])
    low, high = 1.0, 1 + 2**-7
    expected = {
        "rtne": [low, 1 + 2**-6, -low, low, torch.inf, torch.nan],
        "rtna": [high, 1 + 2**-6, -high, low, torch.inf, torch.nan],
        "rtz": [low, high, -low, low, torch.inf, torch.nan],
    }
    for cvt, values in expected.items():
        actual = prepared_for_bf16(exact, cvt).bfloat16()
        assert torch.equal(actual.nan_to_num(-1), torch.tensor(values).bfloat16().nan_to_num(-1))


def test_new_gradients(rng):
    """Unused rows of new tensors are 0, and so are gradients of keys without queries."""
    for gap in (0, 3):
        call = backward(rng, "gfx942", lengths=RAGGED, mask=2, gap=gap)
        with emulate("gfx942"):
            gradients = fmha_bwd(
                *(call.dout, call.q, call.k, call.v, call.out, call.lse), **call.arguments
            )
        for name, x in zip(call.gradients, gradients, strict=True):
            used = call.used_rows(name)
            assert used is not None
            assert not x[~used].any()
            call.gradients[name][used] = x[used]
        call.assert_right(TOLERANCE[call.dtype])


def test_gradients_of_inference_mode(rng):
    """They can be written in kernels only, or in that mode."""
    call = backward(rng, "gfx942", lengths=((33, 40),), batch=1)
    with torch.inference_mode():
        call.gradients = {name: x.clone() for name, x in call.gradients.items()}
    check(call, "gfx942")


def test_one_key_tile_is_deterministic(rng):
    """On gfx950, where kernels that add up in 16 bits add to each element once."""
    changes = {"hdims": (72, 72), "mask": 2, "options": {"deterministic": True}}
    call = backward(rng, "gfx950", lengths=((9, 30),), batch=1, **changes)
    check(call, "gfx950", PlainGradients("fp16", (128, 128), mask=2, atomic32=0))
