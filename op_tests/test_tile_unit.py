"""The emulated tile unit: against exact sums, and bit for bit against AMX where that is here."""

import ctypes

import pytest
import torch
from subprocesses import run_python
from torch import Tensor

from jitfmha.jit import BuildSpec, load
from jitfmha.jit.render import render
from jitfmha.kernels.cpu import _TILE_UNITS, ISAS
from jitfmha.planning.target import CpuIsa, cpu_isas_here

SOURCE = """
#include "tile_unit.h"

// sum (m, n) += a (m, 2 k) times the pairs of b (k, 2 n), in tiles of just these shapes, with tiles
// that are not used around them.
extern "C" void add_product(int m, int k, int n, const void* a, const void* b, void* sum) {
  const tile_unit::Shapes shapes{{0, m, k, m, 0}, {0, 4 * k, 4 * n, 4 * n, 0}};
  const tile_unit::Configured unit(shapes);
  tile_unit::load<1>(a, 4 * k);
  tile_unit::load<2>(b, 4 * n);
  tile_unit::load<3>(sum, 4 * n);
  tile_unit::add_bf16_products<3, 1, 2>();
  tile_unit::store<3>(sum, 4 * n);
}

extern "C" void misuse(int which) {
  const tile_unit::Shapes shapes{{which == 2 ? 3 : 2, 2, which == 0 ? 3 : 2}, {8, 8, 8}};
  const tile_unit::Configured unit(shapes);
  if (which == 1) tile_unit::zero<3>();
  tile_unit::add_bf16_products<0, 1, 2>();
}
"""


def unit(isa: CpuIsa) -> ctypes.CDLL:
    shapes = render("cpu/tile_unit_shapes.h", {})
    headers = {"tile_unit.h": render(_TILE_UNITS[isa], {}), "tile_unit_shapes.h": shapes}
    sources = {"unit.cpp": SOURCE, **headers}
    flags = ("-std=c++17", "-O2", *ISAS[isa][1])
    return load(BuildSpec(f"tile_unit_{isa}", sources, flags))


def product(isa: CpuIsa, a: Tensor, b: Tensor, sums: Tensor) -> Tensor:
    """a (m, 2 k) and b (k, 2 n) in bf16, sums (m, n) in float32."""
    (m, n), k = sums.shape, b.shape[0]
    a, b, sums = a.contiguous(), b.contiguous(), sums.clone()
    addresses = (ctypes.c_void_p(x.data_ptr()) for x in (a, b, sums))
    unit(isa).add_product(m, k, n, *addresses)
    return sums


def shapes(rng: torch.Generator, count: int) -> list[list[int]]:
    """m, k and n: the edges and what is drawn."""
    return [[1, 1, 1], [16, 16, 16], *torch.randint(1, 17, (count, 3), generator=rng).tolist()]


def test_emulated_sums(rng):
    for m, k, n in shapes(rng, 20):
        a, b = (torch.randn(*size, generator=rng).bfloat16() for size in ((m, 2 * k), (k, 2 * n)))
        sums = torch.randn(m, n, generator=rng)
        # Pairs lie along the columns of b: row 2 i + j of the matrix is every second one of row i.
        matrix = b.view(k, n, 2).transpose(1, 2).reshape(2 * k, n)
        expected = sums.double() + a.double() @ matrix.double()
        error = (product("amx_emulated", a, b, sums) - expected).abs().max()
        assert error < 1e-6 * (1 + 2 * k)


@pytest.mark.skipif("amx" not in cpu_isas_here(), reason="this processor has no AMX")
@pytest.mark.parametrize("numbers", ["any bits", "near the smallest", "near the largest"])
def test_emulated_as_amx(rng, numbers):
    """Whatever the inputs are: subnormal, infinite, not a number."""

    def draw(dtype: torch.dtype, *size: int) -> Tensor:
        if numbers == "any bits":
            bits = torch.randint(-(2**15), 2**15, (*size, dtype.itemsize // 2), generator=rng)
            return bits.to(torch.int16).view(dtype).squeeze(-1)
        # Products and sums leave the format, or nearly so.
        exponent = {"near the smallest": -63.5, "near the largest": 62.5}[numbers]
        exponents = exponent * (2 if dtype == torch.float32 else 1) + torch.rand(
            size, generator=rng
        )
        return (torch.randn(size, generator=rng) * 2**exponents).to(dtype)

    for m, k, n in shapes(rng, 200):
        inputs = draw(torch.bfloat16, m, 2 * k), draw(torch.bfloat16, k, 2 * n)
        sums = draw(torch.float32, m, n)
        expected, actual = (product(isa, *inputs, sums) for isa in ("amx", "amx_emulated"))
        nan = expected.isnan()
        assert torch.equal(actual.isnan(), nan)
        assert torch.equal(actual.view(torch.int32)[~nan], expected.view(torch.int32)[~nan])


@pytest.mark.parametrize(
    "which",
    [0, 1, 2],
    ids=["factors that do not fit", "a tile without a shape", "a sum that does not fit"],
)
@pytest.mark.parametrize("isa", _TILE_UNITS)
def test_misuse_ends_the_process(isa, which):
    """As it does on the chip, so that tests without one find it, too."""
    if isa not in cpu_isas_here():
        pytest.skip(f"this processor does not run {isa}")
    path = unit(isa)._name
    code = (
        "import ctypes, sys\n"
        "ask = ctypes.CDLL(None).syscall\n"
        f"if {isa == 'amx'}: assert ask(158, 0x1023, 18) == 0\n"
        f"ctypes.CDLL({path!r}).misuse({which})\n"
    )
    done = run_python("-c", code, code=None)
    assert done.returncode < 0, done
