"""Kernels for every instruction set that this processor has, not only for its best one.

One pair of head dimensions serves all tests: each is whole vectors and a rest in every instruction
set, an odd number of a tile unit's tiles of values, and odd where bf16 numbers come in pairs.
"""

import math
import sys
from typing import Any, get_args

import pytest
import torch
from closeness import check
from fresh_calls import fresh_calls
from inputs import DTYPES, HDIM, HDIM_V, lay_out, prefix_sums, random_qkv
from packed_calls import RAGGED, packed
from subprocesses import run_program
from torch import Tensor
from untyped import explain, fmha_fwd

from jitfmha.kernels.cpu import BESIDE_TILE_UNIT, CpuTraits, launcher_spec
from jitfmha.kernels.modifiers import ModifierTraits
from jitfmha.planning.target import CpuIsa, cpu_isas_here
from jitfmha.problem.problem import Direction
from jitfmha.problem.score_features import AskedModifiers

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# seqlen_q, seqlen_k, heads_q, heads_k: a single row, a few, several query tiles and key tiles.
SIZES = [
    *[(1, 1, 1, 1), (1, 300, 4, 4), (3, 77, 6, 2)],
    *[(33, 49, 2, 2), (150, 290, 3, 1), (9, 0, 2, 2)],
]
MASKS: list[dict[str, Any]] = [
    {},
    {"mask": 1},
    {"mask": 2},
    {"window_size": (3, 5)},
    {"window_size": (70, -1)},
    {"mask": "g:9,20"},
]
# Each has kernels of its own; bf16 is all that tile units have.
FEW_DTYPES = pytest.mark.sample(
    "dtype", ["fp32", "fp16"], 1, always=["bf16"], shared_by="instruction sets"
)


def inputs(rng: torch.Generator, dtype: str, *sizes: Any, **named: int) -> Any:
    return random_qkv(rng, *sizes, hdim=HDIM, hdim_v=HDIM_V, dtype=DTYPES[dtype], **named)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_is_for_the_isa(rng, isa, dtype):
    assert explain(*inputs(rng, dtype)).plan.traits.isa == isa


@pytest.mark.parametrize(("isa", "beside"), BESIDE_TILE_UNIT.items())
def test_tile_units_are_for_bf16(rng, isa, beside):
    with fresh_calls(isa):
        for dtype in ("fp16", "fp32"):
            assert explain(*inputs(rng, dtype)).plan.traits.isa == beside
        q, k, v = inputs(rng, "bf16")
        assert explain(q, k.to(torch.int8), v.to(torch.int8)).plan.traits.isa == beside


@FEW_DTYPES
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_batch_mode(rng, isa, mask, dtype):
    for sizes in SIZES:
        check(*inputs(rng, dtype, sizes), **mask)


@FEW_DTYPES
@pytest.mark.parametrize("mask", [{}, {"mask": 2}, {"mask": "t:9,5"}], ids=str)
def test_group_mode(rng, isa, mask, dtype):
    hdims = {"hdim": HDIM, "hdim_v": HDIM_V}
    packed(rng, *RAGGED, dtype=DTYPES[dtype], **hdims).check(**mask)


@pytest.mark.parametrize("mask", [{}, {"mask": 2}], ids=str)
def test_lengths_at_the_edges_of_tiles(rng, isa, mask):
    """A vector, a tile, two of them and a key tile, and one more or less; three heads share a row's
    keys, so that the rows of a query are spread over vectors.
    """
    edges = [n + more for n in (4, 8, 16, 32, 64, 128, 256) for more in (-1, 0, 1)]
    lengths_k = [0, 1, 2, *edges]
    lengths_q = [lengths_k[i] for i in torch.randperm(len(lengths_k), generator=rng).tolist()]
    hdims = {"hdim": HDIM, "hdim_v": HDIM_V}
    packed(rng, lengths_q, lengths_k, heads=(3, 1), dtype=torch.bfloat16, **hdims).check(**mask)


@pytest.mark.skipif("amx" not in cpu_isas_here(), reason="this processor has no AMX")
def test_torch_sets_up_tiles_of_its_own_in_the_same_threads(rng):
    q, k, v = inputs(rng, "bf16", seqlen_q=300, seqlen_k=300)
    a, b = torch.randn(2, 333, 333, generator=rng).bfloat16()
    with fresh_calls("amx"):
        alone = fmha_fwd(q, k, v)
        product = a @ b
        for _ in range(5):
            assert torch.equal(a @ b, product)
            assert torch.equal(fmha_fwd(q, k, v), alone)


@FEW_DTYPES
def test_layouts(rng, isa, dtype):
    """What lies between the elements is NaN in the inputs, and stays in the output."""
    q, k, v = inputs(rng, dtype)
    expected = fmha_fwd(q, k, v)
    for layout in ("bhsd", "packed_by_head", "odd_address"):
        out = lay_out(torch.zeros_like(expected), layout)
        everything = torch.empty(0, dtype=q.dtype).set_(out.untyped_storage()).fill_(-77.0)
        assert torch.equal(fmha_fwd(*(lay_out(x, layout) for x in (q, k, v)), out=out), expected)
        out.fill_(-77.0)
        assert (everything == -77.0).all(), "something beside the elements of out was written"


@FEW_DTYPES
def test_numbers_at_the_edges_of_the_format(isa, dtype):
    """A single key's value comes out as it went in: subnormal, largest, infinite, NaN."""
    finfo = torch.finfo(DTYPES[dtype])
    numbers = [0.0, -0.0, 1.0, finfo.tiny, -finfo.tiny, finfo.max, finfo.min, torch.inf, -torch.inf]
    numbers += [finfo.eps, 1 + finfo.eps, torch.nan]
    # Products of bf16 pairs take subnormal numbers as 0.
    if dtype != "bf16" or isa not in ("amx", "avx512_bf16", "amx_emulated"):
        numbers.append(finfo.smallest_normal / 4)
    v = torch.tensor(numbers + [0.0] * (HDIM_V - len(numbers)), dtype=DTYPES[dtype])
    for seqlen_q in (1, 40):
        q, k = (torch.zeros(1, n, 1, HDIM, dtype=v.dtype) for n in (seqlen_q, 1))
        out = fmha_fwd(q, k, v.view(1, 1, 1, HDIM_V))
        assert torch.equal(out.nan_to_num(7.0), v.expand_as(out).nan_to_num(7.0))
        assert torch.equal(out.isnan(), v.expand_as(out).isnan())


@FEW_DTYPES
def test_halves_are_rounded_to_even(isa, dtype):
    """The mean of two neighbours is as far from one as from the other."""
    numbers = 1 + torch.finfo(DTYPES[dtype]).eps * torch.arange(HDIM_V + 1, dtype=torch.float64)
    v = torch.stack([numbers[:-1], numbers[1:]]).to(DTYPES[dtype]).view(1, 2, 1, HDIM_V)
    expected = v.double().mean(1, keepdim=True).to(v.dtype)
    for seqlen_q in (1, 40):
        q, k = (torch.zeros(1, n, 1, HDIM, dtype=v.dtype) for n in (seqlen_q, 2))
        out = fmha_fwd(q, k, v)
        assert torch.equal(out, expected.expand_as(out))


@FEW_DTYPES
def test_nan_and_hidden_keys(rng, isa, dtype):
    q, k, v = inputs(rng, dtype, seqlen_q=150, seqlen_k=150)
    clean = fmha_fwd(q, k, v, mask="causal")
    for first in (1, 77):
        bad = k.clone()
        bad[:, first:] = torch.nan
        out = fmha_fwd(q, bad, v, mask="causal")
        assert torch.equal(out[:, :first], clean[:, :first])
        assert out[:, first:].isnan().all()


@FEW_DTYPES
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_spoils_its_column_alone(rng, isa, dtype, bad):
    q, k, v = inputs(rng, dtype, seqlen_q=1, seqlen_k=100)
    clean = fmha_fwd(q, k, v)
    # Probabilities and outputs are rounded.
    bound = 2 * torch.finfo(q.dtype).eps * v.abs().max()
    for column in (0, 5, HDIM_V - 1):
        spoiled = v.clone()
        spoiled[:, 40, :, column] = bad
        out = fmha_fwd(q, k, spoiled)
        assert not out[..., column].isfinite().any()
        others = torch.arange(HDIM_V) != column
        assert ((out - clean)[..., others].abs() <= bound).all()


@pytest.mark.usefixtures("num_threads")
def test_nan_of_an_earlier_call(rng, isa):
    """Scratch is kept between calls, and padding in it may be where NaN was."""
    torch.set_num_threads(1)
    q, k, v = inputs(rng, "bf16", seqlen_q=150, seqlen_k=290)
    nan = torch.full_like(q, torch.nan)
    for seqlen_q, seqlen_k in ((150, 290), (2, 290), (150, 5), (3, 33)):
        clean = [x[:, :n] for x, n in ((q, seqlen_q), (k, seqlen_k), (v, seqlen_k))]
        assert fmha_fwd(nan, k * torch.nan, v * torch.nan).isnan().all()
        check(*clean)
    # The second panel of each tile has one vector, where the earlier one had two.
    q, k, v = inputs(rng, "bf16", (16, 33, 8, 8), batch=6)
    assert fmha_fwd(q * torch.nan, k, v).isnan().all()
    check(q[:, :12], k, v)


def dominating(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that one key dominates, as booleans like the lse, and that key's value for each row.

    Their second largest score is so far below that neither rounding nor the key counts.
    """
    (first, second), best = scores.topk(2, dim=-1).values.unbind(-1), scores.argmax(-1)
    values = v.transpose(1, 2).gather(2, best[..., None].expand(*best.shape, v.shape[-1]))
    return first - second > 120 + 1e-5 * scores.abs().max(), values


@pytest.mark.parametrize("group", [False, True], ids=["gm0", "gm1"])
@pytest.mark.parametrize("largest_score", [1e3, 1e5, 3e9, 1e11])
@pytest.mark.parametrize("seqlen_q", [1, 70])
@FEW_DTYPES
def test_a_key_that_dominates_its_row(rng, isa, dtype, seqlen_q, largest_score, group):
    """However large the scores are, the result is that key's value to the last bit."""
    q, k, v = inputs(rng, dtype, batch=1, seqlen_q=seqlen_q, seqlen_k=300)
    k[:, 100 : 100 + seqlen_q] = 4 * q
    products = torch.einsum("bihd,bjhd->bhij", q.double(), k.double())
    scale = largest_score / products.abs().max().item()
    scores = products * scale
    dominated, values = dominating(scores, v)
    assert dominated.float().mean() > 0.5
    options: dict[str, Any] = {"softmax_scale": scale, "return_lse": True}
    if group:
        cu_q, cu_k = prefix_sums([seqlen_q]), prefix_sums([300])
        out, lse = fmha_fwd(q[0], k[0], v[0], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
        out, lse = out[None], lse[None]
    else:
        out, lse = fmha_fwd(q, k, v, **options)
    assert out.isfinite().all()
    assert torch.equal(out.transpose(1, 2)[dominated], values[dominated])
    error = (lse.double() - scores.logsumexp(-1)).abs()
    assert (error <= 1e-5 * largest_score).all()


@pytest.mark.parametrize("rise", [3, 30, 400])
def test_scores_that_rise_from_tile_to_tile(rng, isa, rise):
    """By so many powers of two in every second row, which changes no bit of the rows beside."""
    q, k, v = inputs(rng, "bf16", (40, 1100, 2, 2))
    k[..., 0] = torch.arange(1100)[:, None] // 256
    q[..., 0] = 0
    beside = fmha_fwd(q, k, v)[:, ::2]
    q[:, 1::2, :, 0] = rise * math.log(2) * HDIM**0.5
    check(q, k, v)
    assert torch.equal(fmha_fwd(q, k, v)[:, ::2], beside)


@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_scores_up_to_the_largest_float(rng, isa, seqlen_q):
    """Finite where torch's own attention is finite, with a large scale and with large inputs."""
    q, k, v = inputs(rng, "fp32", seqlen_q=seqlen_q)
    products = torch.einsum("bihd,bjhd->bhij", q.double(), k.double())
    for size, scale in ((1e12, 1e10), (1e18, 1.0), (1.0, 1e36), (1.0, 3.4e38), (1e-18, 1e38)):
        out, lse = fmha_fwd(q * size, k * size, v, softmax_scale=scale, return_lse=True)
        assert out.isfinite().all(), (size, scale)
        assert not lse.isnan().any()
        dominated, values = dominating(products * size * size * scale, v)
        assert torch.equal(out.transpose(1, 2)[dominated], values[dominated]), (size, scale)


@pytest.mark.sample(
    ("other_isa", "dtype"),
    [
        (isa, dtype)
        for isa in sorted(set(get_args(CpuIsa)) - set(cpu_isas_here()))
        for dtype in DTYPES
        if dtype == "bf16" or isa not in BESIDE_TILE_UNIT
    ],
    2,
)
def test_other_isas_are_compiled(tmp_path, other_isa, dtype):
    """What this processor does not run: for another one, by a compiler that has all of them."""
    pytest.importorskip("ziglang", reason="a compiler for other processors comes with ziglang")
    machine, in_elf = ("aarch64", 183) if other_isa == "neon" else ("x86_64", 62)
    asked = AskedModifiers(dtype, alibi_slopes=True, logit_softcap=True, sink_size=True)
    everything = ModifierTraits("cpu", asked, dropout=True)
    kernels: list[tuple[str, bool, ModifierTraits, Direction]] = [
        ("gm0", False, ModifierTraits("cpu"), "forward"),
        ("gm1", True, everything, "forward"),
    ]
    if other_isa in BESIDE_TILE_UNIT:
        kernels.append(("gm1", True, everything, "backward"))
    for mode, masked, modifiers, direction in kernels:
        traits = CpuTraits(
            dtype, HDIM, HDIM_V, masked, mode, other_isa, direction=direction, modifiers=modifiers
        )
        spec = launcher_spec(traits)
        for name, text in spec.sources.items():
            (tmp_path / name).write_text(text)
        compiler = [sys.executable, "-I", "-m", "ziglang", "c++", f"--target={machine}-linux-gnu"]
        for file in spec.compiled_sources:
            run_program(*compiler, *spec.cflags, "-fPIC", "-c", file, "-o", "fmha.o", cwd=tmp_path)
            assert int.from_bytes((tmp_path / "fmha.o").read_bytes()[18:20], "little") == in_elf
