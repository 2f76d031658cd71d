"""The kernels of this package, through its launcher, on the emulator with the sanitizer on.

The matrix is that of AMD's own smoke test, for every chip, dtype and head dimension that the ready
family serves. A run takes a sample of it, and all edge cases; `--exhaustive` takes everything.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from inputs import LAYOUTS, lay_out, prefix_sums
from torch import Tensor
from untyped import fmha_fwd

from jitfmha import emulate
from jitfmha.problem.float64_reference import attention

CHIPS = ("gfx942", "gfx942-mi308", "gfx950")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# By what share of itself a number changes when it becomes one of 16 bits; outputs go to nearest.
ROUNDING = {"rtne": 2**-8, "rtna": 2**-8, "rtz": 2**-7}
BF16_ROUNDING, FP16_ROUNDING = ROUNDING["rtne"], 2**-11


@dataclass(frozen=True)
class Case:
    """One call; in group mode each of ``batch`` sequences is a little shorter than the last."""

    chip: str
    dtype: str
    hdims: tuple[int, int]
    is_group: bool
    layout: str  # of q, k and v
    out_layout: str
    mask: int
    return_lse: bool
    seqlen_q: int
    seqlen_k: int
    bf16_cvt: str
    heads: tuple[int, int, int]  # batch, query heads, key heads

    def __str__(self) -> str:
        mode = "gm1" if self.is_group else f"gm0-{self.layout}-{self.out_layout}"
        hdims, heads = ("x".join(map(str, sizes)) for sizes in (self.hdims, self.heads))
        return (
            f"{self.chip}-{self.dtype}-{self.bf16_cvt}-hd{hdims}-{mode}-mask{self.mask}"
            f"{'-lse' if self.return_lse else ''}-{self.seqlen_q}x{self.seqlen_k}-{heads}"
        )

    @property
    def is_valid(self) -> bool:
        """Mask 1 is for gm0; only gfx942's bf16 has conversions."""
        if self.dtype == "fp16" and self.hdims == (192, 128):
            return False
        if self.mask == 1 and self.is_group:
            return False
        if self.is_group and (self.layout, self.out_layout) != ("bshd", "bshd"):
            return False
        converts = self.dtype == "bf16" and self.chip != "gfx950"
        return converts or self.bf16_cvt == "rtne"


def matrix() -> list[Case]:
    """The smoke test's, with our other dtypes and head dimensions beside its own."""
    cases = (
        Case(*values)
        for values in itertools.product(
            CHIPS,
            DTYPES,
            ((64, 64), (128, 128), (192, 128)),
            (False, True),
            ("bshd", "bhsd"),
            ("bshd", "bhsd"),
            (0, 1, 2),
            (False, True),
            (127, 192, 301, 512, 1024),
            (0, 129, 301, 512, 700, 1023, 1058),
            ("rtne", "rtna", "rtz"),
            ((2, 4, 2), (1, 3, 1), (1, 1, 1)),
        )
    )
    return [case for case in cases if case.is_valid]


def edges() -> list[Case]:
    """Lengths about the tiles' sizes, no queries, no keys, one of each, heads in odd numbers."""
    tiles = (
        *((hdims, (256, 64)) for hdims in ((64, 64), (128, 128), (192, 128))),
        *((hdims, (128, 32)) for hdims in ((128, 128), (192, 128))),
    )
    cases: list[Case] = []
    for hdims, (rows, keys) in tiles:
        lengths = [
            *itertools.product((1, rows - 1, rows, rows + 1), (1, keys - 1, keys, keys + 1)),
            *((0, 70), (70, 0), (1, 1), (33, 2 * keys + 1), (2 * rows + 1, 31), (5, 300)),
        ]
        modes = ((False, 0), (False, 1), (False, 2), (True, 0), (True, 2))
        kinds = itertools.cycle(itertools.product(CHIPS, modes))
        for (seqlen_q, seqlen_k), (chip, (is_group, mask)) in zip(lengths, kinds, strict=False):
            cases += [
                Case(
                    *(chip, dtype, hdims, is_group, "bshd", "bshd", mask, True),
                    *(seqlen_q, seqlen_k, "rtne", (2, 3, 1)),
                )
                for dtype in DTYPES
            ]
    return [case for case in cases if case.is_valid]


def layouts() -> list[Case]:
    """Every layout of the inputs and of `out`."""
    return [
        Case(chip, "bf16", (128, 128), False, layout, out, 2, True, 130, 70, "rtne", (2, 2, 1))
        for chip, (layout, out) in zip(
            itertools.cycle(CHIPS), itertools.product(LAYOUTS, LAYOUTS), strict=False
        )
    ]


def run(case: Case, rng: torch.Generator) -> None:
    """Compute on the emulator, compare with float64, and look for findings."""
    batch, heads_q, heads_k = case.heads
    dtype, (hdim_q, hdim_v) = DTYPES[case.dtype], case.hdims
    steps = range(batch) if case.is_group else [0] * batch
    lengths = [(max(case.seqlen_q - 37 * i, 0), max(case.seqlen_k - 61 * i, 0)) for i in steps]
    if case.is_group:
        lengths += [(0, 5), (5, 0)]
    problems = [
        tuple(
            torch.randn(1, rows, heads, hdim, generator=rng).to(dtype)
            for rows, heads, hdim in (
                (rows_q, heads_q, hdim_q),
                (rows_k, heads_k, hdim_q),
                (rows_k, heads_k, hdim_v),
            )
        )
        for rows_q, rows_k in lengths
    ]
    dimension = 1 if case.is_group else 0
    q, k, v = (torch.cat(parts, dimension) for parts in zip(*problems, strict=True))
    poison = torch.full((*q.shape[:3], hdim_v), torch.nan, dtype=dtype)
    if case.is_group:
        q, k, v, out = q[0], k[0], v[0], poison[0]
    else:
        q, k, v = (lay_out(x, case.layout) for x in (q, k, v))
        out = lay_out(poison, case.out_layout)
    options: dict[str, Any] = {
        "mask": case.mask,
        "return_lse": case.return_lse,
        "out": out,
        "bf16_cvt": case.bf16_cvt,
    }
    if case.is_group:
        options["cu_seqlens_q"] = prefix_sums([rows for rows, _ in lengths])
        options["cu_seqlens_k"] = prefix_sums([rows for _, rows in lengths])
    with emulate(case.chip, check=True) as emulated:
        result = fmha_fwd(q, k, v, **options)
        assert emulated.findings() == ()
    is_fp16 = case.dtype == "fp16"
    of_probabilities = FP16_ROUNDING if is_fp16 else ROUNDING[case.bf16_cvt]
    of_outputs = FP16_ROUNDING if is_fp16 else BF16_ROUNDING
    lse = result[1] if case.return_lse else None
    begin = 0
    for i, (q_one, k_one, v_one) in enumerate(problems):
        exact = attention(q_one, k_one, v_one, mask=case.mask)
        # Of what the probabilities are rounded by, as much as all values together can make.
        spread, _ = attention(q_one, k_one, v_one.abs(), mask=case.mask)
        end = begin + q_one.shape[1]
        out_one = out[begin:end] if case.is_group else out[i]
        bound = of_probabilities * spread + of_outputs * exact[0].abs()
        _assert_within(out_one, exact[0][0], bound[0])
        if lse is not None:
            _assert_lse(lse[:, begin:end] if case.is_group else lse[i], exact[1][0])
        begin = end


def _assert_within(actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    error = (actual.double() - expected).abs()
    assert not error.isnan().any(), "out holds NaN"
    excess = (error - bound - 1e-5).max().item() if error.numel() else 0.0
    assert excess <= 0, f"out is off by {excess:.3g} more than rounding explains"


def _assert_lse(actual: Tensor, expected: Tensor) -> None:
    seen = expected > -torch.inf
    assert torch.equal(actual == -torch.inf, ~seen), "lse is not -inf where no key is seen"
    torch.testing.assert_close(actual[seen].double(), expected[seen], atol=1e-4, rtol=0)


@pytest.mark.sample("case", matrix(), 40)
def test_matrix(case, rng):
    run(case, rng)


@pytest.mark.parametrize("case", edges(), ids=str)
def test_edges(case, rng):
    run(case, rng)


@pytest.mark.sample("case", layouts(), 12)
def test_layouts(case, rng):
    run(case, rng)


@pytest.mark.parametrize("bf16_cvt", ROUNDING)
@pytest.mark.parametrize("hdim", [64, 96, 128])  # 96: compiled
def test_rows_of_one_key_are_exact(hdim, bf16_cvt, rng):
    """Such as the first one of a causal call: its probability is 1, however it is rounded."""
    q, k, v = (torch.randn(1, n, 5, hdim, generator=rng).bfloat16() for n in (260, 70, 70))
    q *= torch.tensor([0, 1e-3, 1, 10, 1e3])[:, None]
    out = torch.full_like(q, torch.nan)
    with emulate("gfx942", check=True) as emulated:
        fmha_fwd(q, k, v, mask=1, out=out, bf16_cvt=bf16_cvt)
        assert torch.equal(out[:, 0], v[:, 0])
        fmha_fwd(q, k[:, :1], v[:, :1], out=out.fill_(torch.nan), bf16_cvt=bf16_cvt)
        assert torch.equal(out, v[:, :1].expand_as(out))
        assert emulated.findings() == ()


@pytest.mark.parametrize("beyond", [-31, 0, 1, 33])
@pytest.mark.parametrize(
    ("hdims", "seqlen_q"),
    [(hdims, rows) for hdims in ((128, 128), (192, 128)) for rows in (128, 256)]
    + [((64, 64), 256)],
)
@pytest.mark.parametrize("chip", CHIPS)
def test_keys_that_one_row_sees(chip, hdims, seqlen_q, beyond, rng):
    """The diagonal enters a tile of keys with a wave's first row, its last one, or between."""
    seqlen_k = seqlen_q + beyond
    case = Case(
        *(chip, "bf16", hdims, False, "bshd", "bshd", 2, True),
        *(seqlen_q, seqlen_k, "rtne", (1, 1, 1)),
    )
    run(case, rng)


@pytest.mark.parametrize("mask", [0, 1, 2])
@pytest.mark.parametrize("hdims", [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("chip", CHIPS)
def test_split_keys(chip, hdims, mask, rng):
    """Few queries and many keys: each tile of queries is shared by several workgroups."""
    case = Case(
        *(chip, "bf16", hdims, False, "bshd", "bshd", mask, True, 300, 1500, "rtne", (1, 2, 1))
    )
    run(case, rng)
    if mask != 1:
        run(replace(case, is_group=True, heads=(3, 2, 1)), rng)


@pytest.mark.parametrize("chip", CHIPS)
def test_split_keys_are_combined(chip, rng):
    """Two kernels run where keys are split, and one where the queries alone fill the chip."""
    q, k, v = (torch.randn(1, rows, 1, 64, generator=rng).bfloat16() for rows in (600, 1200, 1200))
    with emulate(chip, profile=True) as emulated:
        fmha_fwd(q, k, v)
        kernels = [profile.kernel for profile in emulated.profiles()]
        assert [kernel.endswith("_combine") for kernel in kernels] == [False, True]
        wide = [x.expand(80, -1, 2, -1) for x in (q, k, v)]
        fmha_fwd(*(x[:, :1] for x in wide[:1]), *(x[:, :70] for x in wide[1:]))
        kernels = [profile.kernel for profile in emulated.profiles()]
    assert not kernels[-1].endswith("_combine")


@pytest.mark.parametrize("chip", CHIPS)
def test_large_scores_are_rescaled(chip, rng):
    """Maxima that grow with every tile, by more than what goes without rescaling."""
    q, k, v = (torch.randn(1, 200, 1, 128, generator=rng).bfloat16() for _ in range(3))
    k *= torch.linspace(0.1, 12, 200)[None, :, None, None]
    out = torch.full_like(q, torch.nan)
    with emulate(chip, check=True) as emulated:
        _, lse = fmha_fwd(q, k, v, out=out, return_lse=True)
        assert emulated.findings() == ()
    exact, exact_lse = attention(q, k, v)
    spread, _ = attention(q, k, v.abs())
    _assert_within(out, exact, 2**-8 * (spread + exact.abs()) + 1e-3)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-6)


@pytest.mark.sample(
    ("chip", "stride", "far"),
    list(
        itertools.product(
            CHIPS,
            (2**24 - 8, 2**24 + 8, 2**25 - 8, 2**25 + 8, 2**31 - 128),
            ({"q"}, {"k"}, {"v"}, {"out"}, {"q", "k", "v", "out"}),
        )
    ),
    24,
)
def test_rows_far_apart(chip, stride, far, rng):
    """Rows that a buffer's offsets reach just so, just not, and that are nearly 4 GiB apart."""
    rows = 3 if stride > 2**30 else 70
    # Nobody touches what lies between the rows, so it takes no memory.
    storage = torch.empty(rows * stride + 512, dtype=torch.bfloat16)
    q, k, v, out = (
        storage.as_strided((1, count, 1, 128), (0, stride, 128, 1), offset)
        if name in far
        else torch.empty(1, count, 1, 128, dtype=torch.bfloat16)
        for name, count, offset in (
            *(("q", min(rows, 40), 0), ("k", rows, 128)),
            *(("v", rows, 256), ("out", min(rows, 40), 384)),
        )
    )
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape, generator=rng))
    out.fill_(torch.nan)
    with emulate(chip):
        _, lse = fmha_fwd(q, k, v, mask=2, return_lse=True, out=out)
    exact, exact_lse = attention(q, k, v, mask=2)
    spread, _ = attention(q, k, v.abs(), mask=2)
    _assert_within(out, exact, 2**-8 * (spread + exact.abs()))
    _assert_lse(lse, exact_lse)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(2, 1), (300, 40), (700, 400)])
@pytest.mark.parametrize("chip", CHIPS)
def test_hidden_values_do_not_reach_queries_without_keys(chip, seqlen_q, seqlen_k, value, rng):
    """Zero times NaN is NaN, also where keys are split."""
    q, k, v = (
        torch.randn(1, rows, 2, 128, generator=rng).bfloat16()
        for rows in (seqlen_q, seqlen_k, seqlen_k)
    )
    v[:, 0] = value
    with emulate(chip):
        out, lse = fmha_fwd(q, k, v, mask=2, return_lse=True)
    blind = seqlen_q - seqlen_k
    assert not out[:, :blind].any()
    assert (lse[..., :blind] == -torch.inf).all()


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize("chip", CHIPS)
def test_a_single_row_of_any_stride(chip, is_group, rng):
    """Where there is one row, its stride leads nowhere, and nothing else may be written."""
    q, k, v = (torch.randn(1, rows, 2, 128, generator=rng).bfloat16() for rows in (1, 50, 50))
    storage = torch.full((5, 2, 128), torch.nan, dtype=torch.bfloat16)
    out = storage.as_strided((1, 1, 2, 128), (0, 0, 128, 1), 512)
    with emulate(chip, check=True) as emulated:
        if is_group:
            ends = {"cu_seqlens_q": prefix_sums([1]), "cu_seqlens_k": prefix_sums([50])}
            fmha_fwd(q[0], k[0], v[0], out=out[0], **ends)
        else:
            fmha_fwd(q, k, v, out=out)
        assert emulated.findings() == ()
    exact, _ = attention(q, k, v)
    _assert_within(out, exact, 2**-6 * (1 + exact.abs()))
    assert storage[[0, 1, 3, 4]].isnan().all()


def test_the_sample_is_of_everything():
    """No value of any parameter has dropped out of the matrix."""
    cases = matrix()
    assert {case.hdims for case in cases} == {(64, 64), (128, 128), (192, 128)}
    assert {case.mask for case in cases if not case.is_group} == {0, 1, 2}
    for chip, dtype in itertools.product(CHIPS, DTYPES):
        drawn = [case for case in cases if (case.chip, case.dtype) == (chip, dtype)]
        assert {case.is_group for case in drawn} == {False, True}
    assert replace(random.choice(cases), mask=1, is_group=True).is_valid is False
