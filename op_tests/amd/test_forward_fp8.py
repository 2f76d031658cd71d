"""The fp8 kernels of this package, through its launcher, on the emulator with the sanitizer on.

Probabilities are rounded to e4m3, so by a sixteenth of themselves at most, before they are
multiplied with the values; their sum, and with it the lse, has float32's precision.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from amd_problems import FP8, AmdProblem
from inputs import LAYOUTS, lay_out, random_qkv
from torch import Tensor
from untyped import explain, fmha_fwd

from jitfmha import emulate
from jitfmha.problem.float64_reference import attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CHIPS = ("gfx942", "gfx942-mi308", "gfx950")
ROUNDING = 2**-4
TILE_ROWS, TILE_KEYS = 256, {"gfx942": 64, "gfx942-mi308": 64, "gfx950": 128}
MODES_AND_MASKS = (("gm0", 0), ("gm0", 1), ("gm0", 2), ("gm1", 0), ("gm1", 2))
HEADS = ((1, 1), (3, 1), (4, 2), (5, 5), (6, 2))
_THOUSANDS = 4000


@dataclass(frozen=True)
class Call:
    """One call; of gm1 with several sequences, one of them without queries, one without keys."""

    chip: str
    mode: str
    mask: int
    lengths: tuple[int, int]
    heads: tuple[int, int] = (3, 1)
    layouts: tuple[str, str] = ("bshd", "bshd")  # gm0: of q, k and v; of out
    descales: str | None = "each"
    gap: int = 0
    random_order: int | None = None

    def __str__(self) -> str:
        seqlens, heads = ("x".join(map(str, pair)) for pair in (self.lengths, self.heads))
        words = (self.chip, f"{self.mode}-mask{self.mask}", seqlens, f"heads{heads}")
        others = (*self.layouts, self.descales, f"gap{self.gap}", self.random_order)
        return "-".join(map(str, (*words, *others)))


def drawn_call(drawn: random.Random) -> Call:
    chip = drawn.choice(CHIPS)
    keys = TILE_KEYS[chip]
    seqlens_q = (0, 1, 31, 33, 129, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1)
    seqlens_k = (0, 1, 5, keys - 1, keys, keys + 1, 2 * keys, 3 * keys - 1)
    mode, mask = drawn.choice(MODES_AND_MASKS)
    layouts = tuple(LAYOUTS) if mode == "gm0" else ("bshd",)
    return Call(
        *(chip, mode, mask, (drawn.choice(seqlens_q), drawn.choice(seqlens_k))),
        *(drawn.choice(HEADS), (drawn.choice(layouts), drawn.choice(layouts))),
        *(drawn.choice((None, "one", "each")), drawn.choice((0, 3)) if mode == "gm1" else 0),
        drawn.choice((None, drawn.randrange(1 << 31))),
    )


def edges() -> list[Call]:
    """Lengths about the tiles' sizes, no queries, no keys, one of each."""
    calls = []
    for keys in (64, 128):
        lengths = (
            *itertools.product(
                (1, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1), (1, keys - 1, keys, keys + 1)
            ),
            *((0, 70), (70, 0), (33, 3 * keys), (2 * TILE_ROWS + 1, 31), (5, 300)),
        )
        chips = [chip for chip in CHIPS if TILE_KEYS[chip] == keys]
        kinds = itertools.cycle(itertools.product(MODES_AND_MASKS, chips))
        for seqlens, ((mode, mask), chip) in zip(lengths, kinds, strict=False):
            calls.append(Call(chip, mode, mask, seqlens))
    return calls


def layouts() -> list[Call]:
    """Every layout of the inputs and of `out`."""
    pairs = itertools.product(LAYOUTS, LAYOUTS)
    return [
        Call(chip, "gm0", 2, (130, 70), heads=(2, 1), layouts=pair)
        for chip, pair in zip(itertools.cycle(CHIPS), pairs, strict=False)
    ]


def inputs(
    rng: torch.Generator, chip: str, seqlen_q: int, seqlen_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one sequence with two heads."""
    sizes = {"batch": 1, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "hdim": 128}
    return random_qkv(rng, dtype=FP8[chip], **sizes)


def family_of(*tensors: Tensor, **options: Any) -> str:
    family: str = explain(*tensors, **options).plan.family
    return family


def run(call: Call, rng: torch.Generator) -> None:
    """Compute on the emulator, compare with float64, and look for findings."""
    lengths = [call.lengths]
    if call.mode == "gm1":
        lengths += [(0, 5), (max(call.lengths[0] - 37, 0), call.lengths[1] + 61), (5, 0)]
    problem = AmdProblem(
        *(rng, FP8[call.chip], (128, 128), call.heads, lengths),
        batch=None if call.mode == "gm1" else 2,
        mask=call.mask,
        softmax_scale=0.1,
        layout=call.layouts[0],
        gap=call.gap,
        descales=call.descales,
    )
    if call.mode == "gm0":
        poison = torch.full((2, lengths[0][0], call.heads[0], 128), torch.nan)
        problem.arguments["out"] = lay_out(poison.bfloat16(), call.layouts[1])
    with emulate(call.chip, check=True, random_order=call.random_order) as emulated:
        assert family_of(problem.q, problem.k, problem.v, **problem.arguments) == "ready"
        actual = problem.run()
        assert emulated.findings() == ()
    problem.assert_right(actual, ROUNDING)


@pytest.mark.sample("number", range(_THOUSANDS), 2)
def test_drawn_calls(number, rng):
    run(drawn_call(random.Random(rng.initial_seed() + number)), rng)


@pytest.mark.sample("call", edges(), 2)
def test_edges(call, rng):
    run(call, rng)


@pytest.mark.sample("call", layouts(), 1)
def test_layouts(call, rng):
    run(call, rng)


@pytest.mark.sample(("chip", "mode_and_mask"), list(itertools.product(CHIPS, MODES_AND_MASKS)), 1)
def test_split_keys(chip, mode_and_mask, rng):
    """Few queries and many keys: each tile of queries is shared by several workgroups."""
    call = Call(chip, *mode_and_mask, (70, 2600), heads=(2, 1))
    run(call, rng)
    q, k, v = inputs(rng, chip, 70, 2600)
    with emulate(chip, profile=True) as emulated:
        fmha_fwd(q, k, v)
        kernels = [profile.kernel for profile in emulated.profiles()]
    assert [kernel.endswith("_combine") for kernel in kernels] == [False, True]


@pytest.mark.sample(
    ("chip", "beyond"), list(itertools.product(CHIPS, (-129, -31, 0, 1, 33, 65, 127))), 1
)
def test_keys_that_one_row_sees(chip, beyond, rng):
    """The diagonal enters a tile of keys with a wave's first row, its last one, or between."""
    run(Call(chip, "gm0", 2, (TILE_ROWS, TILE_ROWS + beyond), heads=(1, 1)), rng)


@pytest.mark.sample("chip", ("gfx942", "gfx950"), 1)
def test_every_number(chip):
    """As torch converts it: as a value it comes out, as a key or a query it is the score."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8[chip])
    numbers = codes.float()
    q, k = (torch.zeros(1, rows, 2, 128).to(FP8[chip]) for rows in (3, 1))
    v = codes.view(1, 1, 2, 128)
    with emulate(chip):
        out = fmha_fwd(q, k, v)
    torch.testing.assert_close(out, v.bfloat16().expand_as(out), atol=0, rtol=0, equal_nan=True)
    ones, coded = torch.zeros(2, 1, 1, 256, 128)
    ones[..., 0], coded[..., 0] = 1, numbers
    for first, second in ((ones, coded), (coded, ones)):
        tensors = first.to(FP8[chip]), second.to(FP8[chip]), torch.zeros_like(second).to(FP8[chip])
        with emulate(chip):
            _, lse = fmha_fwd(*tensors, softmax_scale=1.0, return_lse=True)
        torch.testing.assert_close(lse[0, :, 0], numbers, atol=2e-6, rtol=2e-7, equal_nan=True)


@pytest.mark.sample("chip", ("gfx942", "gfx950"), 1)
@pytest.mark.parametrize("slope", [0.0, 0.05, 0.4])
def test_precision(chip, slope, rng):
    """Errors are random, so that those of many keys are far below what one key's may be.

    Rounding to four significant bits is 2.5 % off on average. That a slope makes later keys the
    larger ones changes nothing: neither do maxima that grow with every tile, whether within the
    headroom that goes without rescaling or beyond it.
    """
    q, k, v = inputs(rng, chip, 40, 700)
    q[..., 0], k[..., 0] = 8, (slope * torch.arange(700)).clamp(max=200).to(k.dtype)[None, :, None]
    with emulate(chip, check=True) as emulated:
        out, lse = fmha_fwd(q, k, v, return_lse=True)
        assert emulated.findings() == ()
    exact, exact_lse = attention(q, k, v)
    spread, _ = attention(q, k, v.double().abs())
    assert ((out - exact).abs() <= ROUNDING * spread + 2**-8 * exact.abs()).all()
    assert (out - exact).norm() <= 0.03 * exact.norm()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-6)


@pytest.mark.sample(
    ("chip", "stride", "far"),
    list(
        itertools.product(
            ("gfx942", "gfx950"),
            (2**24 - 8, 2**24, 2**25 - 8, 2**25, 2**26 - 16, 2**26, 2**32 - 256),
            ({"q"}, {"k"}, {"v"}, {"out"}, {"q", "k", "v", "out"}),
        )
    ),
    1,
)
def test_rows_far_apart(chip, stride, far, rng, monkeypatch):
    """Rows that a buffer's offsets reach just so, just not, and that are nearly 4 GiB apart."""
    rows = 3 if stride > 2**30 else 70
    # Nobody touches what lies between the rows, so it takes no memory.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    storage, out_storage = (torch.empty(rows * stride + 512, dtype=torch.uint8) for _ in range(2))

    def placed(name: str, dtype: torch.dtype, count: int, begin: int = 0) -> Tensor:
        if name not in far:
            return torch.empty(1, count, 1, 128, dtype=dtype)
        own = (out_storage if name == "out" else storage).view(dtype)
        return own.as_strided((1, count, 1, 128), (0, stride // dtype.itemsize, 128, 1), begin)

    queries = min(rows, 40)
    sizes = (("q", queries, 0), ("k", rows, 128), ("v", rows, 256))
    q, k, v = (placed(name, FP8[chip], *size) for name, *size in sizes)
    out = placed("out", torch.bfloat16, queries)
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape, generator=rng))
    out.fill_(torch.nan)
    with emulate(chip):
        _, lse = fmha_fwd(q, k, v, mask=2, return_lse=True, out=out)
    exact, exact_lse = attention(q, k, v, mask=2)
    spread, _ = attention(q, k, v.double().abs(), mask=2)
    assert ((out - exact).abs() <= ROUNDING * spread + 2**-8 * exact.abs() + 1e-5).all()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=0)


@pytest.mark.sample(("chip", "seqlens"), list(itertools.product(CHIPS, ((300, 40), (700, 400)))), 1)
def test_hidden_values_do_not_reach_queries_without_keys(chip, seqlens, rng):
    """Zero times NaN is NaN, also where keys are split."""
    seqlen_q, seqlen_k = seqlens
    q, k, v = inputs(rng, chip, seqlen_q, seqlen_k)
    v[:, 0] = torch.nan
    with emulate(chip):
        out, lse = fmha_fwd(q, k, v, mask=2, return_lse=True)
    blind = seqlen_q - seqlen_k
    assert not out[:, :blind].any()
    assert (lse[..., :blind] == -torch.inf).all()
    assert out[:, blind:].isnan().all()


@pytest.mark.sample("chip", ("gfx942", "gfx950"), 1)
def test_scales_of_zero(chip, rng):
    """Inputs that are all 0 may have them; what is hidden stays so."""
    q, k, v = inputs(rng, chip, 40, 90)
    for name in ("q_descale", "k_descale", "v_descale"):
        options: dict[str, Any] = {name: torch.zeros(1, 2), "mask": 1}
        with emulate(chip):
            out, lse = fmha_fwd(q, k, v, return_lse=True, **options)
        exact, exact_lse = attention(q, k, v, **options)
        torch.testing.assert_close(out.double(), exact, atol=0.1, rtol=0)
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chip", ["gfx942", "gfx950"])
def test_which_calls_they_serve(chip):
    """Those of one head dimension with a scale for each sequence and key head, or one for all."""

    def family(heads: tuple[int, int] = (4, 2), hdim: int = 128, **options: Any) -> str:
        q, k = (torch.zeros(2, 9, n, hdim).to(FP8[chip]) for n in heads)
        with emulate(chip):
            return family_of(q, k, k, **options)

    assert family() == "ready"
    for mask in (0, 1, 2):
        assert family(mask=mask, q_descale=torch.ones(2, 2), v_descale=torch.ones(1)) == "ready"
    assert family(q_descale=torch.ones(4)) == "compiled"
    assert family((4, 4), q_descale=torch.ones(4)) == "ready"
    assert family(window_size=(3, 3)) == family(hdim=64) == "compiled"
