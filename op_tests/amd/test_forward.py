"""The kernels of this package, through its launcher, on the emulator with the sanitizer on.

Every chip, data type and head dimension of theirs. Probabilities of fp8 are rounded to e4m3, so by
a sixteenth of themselves at most, before they are multiplied with the values; their sum, and with
it the lse, has float32's precision. A run draws a few calls; `--exhaustive` takes thousands.
"""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from amd_problems import FP8
from inputs import prefix_sums, random_qkv
from ready_calls import (
    CHIPS,
    DTYPES,
    FP8_ROUNDING,
    KINDS,
    MODES_AND_MASKS,
    ROUNDING,
    ReadyCall,
    drawn_call,
    edges,
)
from torch import Tensor
from untyped import explain, fmha_fwd

from jitfmha import emulate
from jitfmha.amd import chips
from jitfmha.amd.node import VIRTUAL_NODE
from jitfmha.amd.tree import trees_of
from jitfmha.kernels.ready.key_split import KeySplit
from jitfmha.problem.float64_reference import attention

pytestmark = pytest.mark.usefixtures("poisoned_memory", "ready_first")

_THOUSANDS = 4000


def check(call: ReadyCall, rng: torch.Generator, random_order: int | None = None) -> None:
    """Compute on the emulator, compare with float64, and look for findings."""
    problem = call.problem(rng)
    with emulate(call.chip, check=True, random_order=random_order) as emulated:
        assert family_of(problem.q, problem.k, problem.v, **problem.arguments) == "ready"
        actual = problem.run()
        assert emulated.findings() == ()
    call.assert_right(problem, actual)


def family_of(*tensors: Tensor, **options: Any) -> str:
    family: str = explain(*tensors, **options).plan.family
    return family


def inputs(
    rng: torch.Generator, chip: str, dtype: str, seqlen_q: int, seqlen_k: int, hdim: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one sequence with two heads."""
    sizes = {"batch": 1, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "hdim": hdim}
    return random_qkv(rng, dtype=(DTYPES | {"fp8": FP8[chip]})[dtype], **sizes)


def assert_right(
    actual: tuple[Tensor, Tensor], *qkv: Tensor, slack: float = 0.0, **options: Any
) -> None:
    """Out and lse of gm0; ``slack`` is allowed of out beside what rounding explains."""
    (out, lse), (q, k, v) = actual, qkv
    exact, exact_lse = attention(q, k, v, **options)
    # Of what the probabilities are rounded by, as much as all values together can make.
    spread, _ = attention(q, k, v.double().abs(), **options)
    of_probabilities = FP8_ROUNDING if q.dtype.itemsize == 1 else ROUNDING["rtne"]
    bound = of_probabilities * spread + ROUNDING["rtne"] * exact.abs() + 1e-5 + slack
    assert ((out - exact).abs() <= bound).all()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-6)


@pytest.mark.sample("number", range(_THOUSANDS), 30)
def test_drawn_calls(number, rng):
    drawn = random.Random(rng.initial_seed())
    check(drawn_call(drawn), rng, drawn.choice((None, drawn.randrange(1 << 31))))


@pytest.mark.sample("call", edges(), 60)
def test_edges(call, rng):
    check(call, rng)


@pytest.mark.parametrize("bf16_cvt", ROUNDING)
@pytest.mark.parametrize("hdim", [64, 96, 128])  # 96: compiled
def test_rows_of_one_key_are_exact(hdim, bf16_cvt, rng):
    """Such as the first one of a causal call: its probability is 1, however it is rounded."""
    q, k, v = (torch.randn(1, n, 5, hdim, generator=rng).bfloat16() for n in (260, 70, 70))
    q *= torch.tensor([0, 1e-3, 1, 10, 1e3])[:, None]
    with emulate("gfx942", check=True) as emulated:
        out = fmha_fwd(q, k, v, mask=1, bf16_cvt=bf16_cvt)
        assert torch.equal(out[:, 0], v[:, 0])
        out = fmha_fwd(q, k[:, :1], v[:, :1], bf16_cvt=bf16_cvt)
        assert torch.equal(out, v[:, :1].expand_as(out))
        assert emulated.findings() == ()


@pytest.mark.sample(
    ("chip", "dtype", "hdims", "seqlen_q", "beyond"),
    [
        (*kind, seqlen_q, beyond)
        for kind in KINDS
        for seqlen_q in (128, 256)
        for beyond in (-129, -31, 0, 1, 33, 65, 127)
    ],
    30,
)
def test_keys_that_one_row_sees(chip, dtype, hdims, seqlen_q, beyond, rng):
    """The diagonal enters a tile of keys with a wave's first row, its last one, or between."""
    lengths = (seqlen_q, max(seqlen_q + beyond, 0))
    check(ReadyCall(chip, dtype, hdims, False, 2, lengths, heads=(1, 1, 1)), rng)


@pytest.mark.sample(("chip", "dtype", "hdims"), KINDS, 4)
@pytest.mark.parametrize("mask", [1, 2])
def test_hidden_tiles_take_no_products(chip, dtype, hdims, mask, monkeypatch):
    """Each 32 queries are multiplied with the tiles of keys that any of them sees."""
    monkeypatch.setattr(KeySplit, "num_splits", lambda *_: 1)
    seqlen = 512
    of_inputs = (DTYPES | {"fp8": FP8[chip]})[dtype]
    q, k, v = (torch.zeros(1, seqlen, 1, n, dtype=of_inputs) for n in (hdims[0], *hdims))
    with emulate(chip, profile=True) as emulated:
        for each in (0, mask):
            fmha_fwd(q, k, v, mask=each)
        (plain, masked) = emulated.profiles()
    (tree,) = trees_of(chips.chip(VIRTUAL_NODE.get(chip, chip)))
    (keys,) = {row.ts_kv for row in tree.forward.rows if row.symbol == masked.kernel}
    seen = sum(-(-(row + 32) // keys) for row in range(0, seqlen, 32))
    share = seen / (seqlen // 32 * seqlen // keys)
    assert masked.work.matrix_cycles == share * plain.work.matrix_cycles


@pytest.mark.sample(("kind", "mode_and_mask"), list(itertools.product(KINDS, MODES_AND_MASKS)), 14)
def test_split_keys(kind, mode_and_mask, rng):
    """Few queries and many keys: each tile of queries is shared by several workgroups."""
    check(ReadyCall(*kind, *mode_and_mask, (300, 1500), heads=(1, 2, 1)), rng)


@pytest.mark.sample(("chip", "dtype"), list(itertools.product(CHIPS, ("bf16", "fp8"))), 3)
def test_split_keys_are_combined(chip, dtype, rng):
    """Two kernels run where keys are split, and one where the queries alone fill the chip."""
    q, k, v = inputs(rng, chip, dtype, 600, 2600)
    with emulate(chip, profile=True) as emulated:
        fmha_fwd(q[:, :, :1], k[:, :, :1], v[:, :, :1])
        kernels = [profile.kernel for profile in emulated.profiles()]
        assert [kernel.endswith("_combine") for kernel in kernels] == [False, True]
        fmha_fwd(*(x[:, :70].expand(80, -1, -1, -1) for x in (q, k, v)))
        kernels = [profile.kernel for profile in emulated.profiles()]
    assert not kernels[-1].endswith("_combine")


@pytest.mark.parametrize("chip", CHIPS)
def test_large_scores_are_rescaled(chip, rng):
    """Maxima that grow with every tile, by more than what goes without rescaling."""
    q, k, v = inputs(rng, chip, "bf16", 200, 200)
    k *= torch.linspace(0.1, 12, 200)[None, :, None, None]
    with emulate(chip, check=True) as emulated:
        actual = fmha_fwd(q, k, v, return_lse=True)
        assert emulated.findings() == ()
    assert_right(actual, q, k, v, slack=1e-3)


@pytest.mark.parametrize("chip", CHIPS)
def test_splits_whose_scores_are_all_very_negative(chip, rng):
    """Beside those of -300, what is not there counts as nothing, though it reads as zero."""
    q, k, v = inputs(rng, chip, "bf16", 40, 1500)
    q[..., 0], k[..., 0] = 40, -85
    with emulate(chip, check=True) as emulated:
        actual = fmha_fwd(q, k, v, return_lse=True)
        assert emulated.findings() == ()
    assert_right(actual, q, k, v, slack=1e-3)


@pytest.mark.parametrize("chip", ["gfx942", "gfx950"])
def test_fp8_probabilities_at_the_end_of_the_headroom(chip):
    """Later keys exceed the first maximum by 2^3.91 to 2^3.99, where 2^4 rescale all.

    They are as often rounded up as down, whether they count from 8 or from 16 on.
    """
    q, k, v = (torch.zeros(1, n, 1, 128) for n in (40, 192, 192))
    q[..., 0], q[..., 1] = 8, 0.1875
    k[:, 64:, :, 0] = 1
    k[:, 64:, 0, 1] = torch.arange(128) % 8 / 8
    v[:] = 1
    q, k, v = (x.to(FP8[chip]) for x in (q, k, v))
    with emulate(chip):
        out = fmha_fwd(q, k, v, softmax_scale=0.489 / math.log2(math.e))
    # Rounding is 0.15 % off on average here, and that of the output 0.4 % at most.
    assert (out.float() - 1).abs().max() < 0.01


@pytest.mark.sample("chip", ("gfx942", "gfx950"), 1)
@pytest.mark.parametrize("slope", [0.0, 0.05, 0.4])
def test_precision_of_fp8(chip, slope, rng):
    """Errors are random, so that those of many keys are far below what one key's may be.

    Rounding to four significant bits is 2.5 % off on average. That a slope makes later keys the
    larger ones changes nothing: neither do maxima that grow with every tile, whether within the
    headroom that goes without rescaling or beyond it.
    """
    q, k, v = inputs(rng, chip, "fp8", 40, 700)
    q[..., 0], k[..., 0] = 8, (slope * torch.arange(700)).clamp(max=200).to(k.dtype)[None, :, None]
    with emulate(chip, check=True) as emulated:
        out, lse = fmha_fwd(q, k, v, return_lse=True)
        assert emulated.findings() == ()
    assert_right((out, lse), q, k, v)
    exact, _ = attention(q, k, v)
    assert (out - exact).norm() <= 0.03 * exact.norm()


FAR_KINDS = [(chip, dtype, 128) for chip in CHIPS for dtype in ("bf16", "fp8")]
FAR_KINDS.append(("gfx950", "fp8", 256))


@pytest.mark.sample(
    ("kind", "stride", "far"),
    list(
        itertools.product(
            FAR_KINDS,
            # In bytes.
            (2**25 - 16, 2**25 + 16, 2**26 - 16, 2**26 + 16, 2**32 - 256),
            ({"q"}, {"k"}, {"v"}, {"out"}, {"q", "k", "v", "out"}),
        )
    ),
    20,
)
def test_rows_far_apart(kind, stride, far, rng, monkeypatch):
    """Rows that a buffer's offsets reach just so, just not, and that are nearly 4 GiB apart."""
    chip, dtype, hdim = kind
    # Nobody touches what lies between the rows, so it takes no memory.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    rows = 3 if stride > 2**30 else 70
    storage, out_storage = (torch.empty(rows * stride + 1024, dtype=torch.uint8) for _ in range(2))

    def placed(name: str, of: torch.dtype, count: int, begin: int = 0) -> Tensor:
        if name not in far:
            return torch.empty(1, count, 1, hdim, dtype=of)
        own = (out_storage if name == "out" else storage).view(of)
        return own.as_strided((1, count, 1, hdim), (0, stride // of.itemsize, hdim, 1), begin)

    queries = min(rows, 40)
    of_inputs = FP8[chip] if dtype == "fp8" else torch.bfloat16
    q, k, v = (
        placed(name, of_inputs, count, begin).copy_(torch.randn(1, count, 1, hdim, generator=rng))
        for name, count, begin in (("q", queries, 0), ("k", rows, hdim), ("v", rows, 2 * hdim))
    )
    out = placed("out", torch.bfloat16, queries).fill_(torch.nan)
    with emulate(chip):
        actual = fmha_fwd(q, k, v, mask=2, return_lse=True, out=out)
    assert_right(actual, q, k, v, mask=2)


@pytest.mark.sample(
    ("chip", "dtype", "seqlens", "value"),
    list(
        itertools.product(
            *(CHIPS, ("bf16", "fp8"), ((2, 1), (300, 40), (700, 400)), (torch.nan, torch.inf))
        )
    ),
    8,
)
def test_hidden_values_do_not_reach_queries_without_keys(chip, dtype, seqlens, value, rng):
    """Zero times NaN is NaN, also where keys are split."""
    q, k, v = inputs(rng, chip, dtype, *seqlens)
    v[:, 0] = torch.nan if dtype == "fp8" else value  # fp8 has no infinity
    with emulate(chip):
        out, lse = fmha_fwd(q, k, v, mask=2, return_lse=True)
    blind = seqlens[0] - seqlens[1]
    assert not out[:, :blind].any()
    assert (lse[..., :blind] == -torch.inf).all()
    assert not out[:, blind:].isfinite().any()


@pytest.mark.sample("chip", ("gfx942", "gfx950"), 1)
@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_scales_of_zero(chip, name, rng):
    """Inputs that are all 0 may have them; what is hidden stays so."""
    q, k, v = inputs(rng, chip, "fp8", 40, 90)
    options: dict[str, Any] = {name: torch.zeros(1, 2), "mask": 1}
    with emulate(chip):
        actual = fmha_fwd(q, k, v, return_lse=True, **options)
    assert_right(actual, q, k, v, slack=0.1, **options)


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize("chip", CHIPS)
def test_a_single_row_of_any_stride(chip, is_group, rng):
    """Where there is one row, its stride leads nowhere, and nothing else may be written."""
    q, k, v = inputs(rng, chip, "bf16", 1, 50)
    storage = torch.full((5, 2, 128), torch.nan, dtype=torch.bfloat16)
    out = storage.as_strided((1, 1, 2, 128), (0, 0, 128, 1), 512)
    with emulate(chip, check=True) as emulated:
        if is_group:
            ends = {"cu_seqlens_q": prefix_sums([1]), "cu_seqlens_k": prefix_sums([50])}
            _, lse = fmha_fwd(q[0], k[0], v[0], out=out[0], return_lse=True, **ends)
            lse = lse[None]
        else:
            _, lse = fmha_fwd(q, k, v, out=out, return_lse=True)
        assert emulated.findings() == ()
    assert_right((out, lse), q, k, v)
    assert storage[[0, 1, 3, 4]].isnan().all()


@pytest.mark.parametrize("chip", ["gfx942", "gfx950"])
def test_which_calls_of_fp8_are_served(chip):
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
    assert family(hdim=256) == ("ready" if chip == "gfx950" else "compiled")
