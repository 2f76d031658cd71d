"""matmul on emulated GPUs, under the sanitizer, against float64."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from drawn_products import check_call, drawn_call, numbers
from drawn_products import run as run_call
from drawn_rows import drawn_index

import jitfmha
from jitfmha.gemm import amd
from jitfmha.gemm.problem import ACTIVATIONS, MatmulArguments
from jitfmha.planning.target import TARGET_HERE
from jitfmha.problem.dtypes import BF8_NAMES, FP8_NAMES

ARCHES = "gfx942", "gfx950"
FORMS = dict(zip(ARCHES, zip(FP8_NAMES, BF8_NAMES, strict=True), strict=True))
DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.int8, "e4m3", "e5m2"
# Around loads of 16 bytes, steps and tiles.
SIZES = [0, 1, 4, 16, 31, 63, 64, 65, 100, 128, 129]


def dtype_on(arch, dtype):
    return FORMS[arch][dtype == "e5m2"] if isinstance(dtype, str) else dtype


@pytest.mark.sample("dtype", DTYPES, 3)
def test_drawn_calls(dtype, rng, poisoned_memory):
    """Of one set of options, so that few kernels are compiled."""
    arch = ARCHES[drawn_index(rng, 2)]
    options = drawn_call(rng, dtype_on(arch, dtype), (8, 8, 8))
    with jitfmha.emulate(arch, check=True, random_order=drawn_index(rng, 100)) as run:
        for _ in range(3):
            size = tuple(SIZES[drawn_index(rng, len(SIZES))] for _ in range(3))
            check_call(drawn_call(rng, dtype_on(arch, dtype), size, options))
        assert not run.findings()


@pytest.mark.parametrize("layouts", list(product((False, True), repeat=2)))
def test_layouts(layouts, rng, poisoned_memory):
    """Of bytes, whose fours change places on their way."""
    a, b = (numbers(rng, (80, 80), torch.int8) for _ in range(2))
    a, b = (x.mT if swap else x for x, swap in zip((a, b), layouts, strict=True))
    with jitfmha.emulate(ARCHES[drawn_index(rng, 2)], check=True) as run:
        check_call(MatmulArguments(a, b))
        assert not run.findings()


@pytest.mark.parametrize("arch", ARCHES)
def test_ends_of_rows(arch, rng, poisoned_memory):
    """Behind which there are NaNs, of which a step of products takes none."""
    around = [torch.full((70, 256), torch.nan) for _ in range(2)]
    a, b = (x[:, :72] for x in around)
    for x in (a, b):
        x.copy_(numbers(rng, tuple(x.shape), torch.float32))
    with jitfmha.emulate(arch, check=True) as run:
        check_call(MatmulArguments(a, b.mT))
        assert not run.findings()


@pytest.mark.parametrize("tile", range(4))
def test_tiles(tile, rng, poisoned_memory, monkeypatch):
    arch = ARCHES[drawn_index(rng, 2)]
    dtype = (FORMS[arch][tile % 2], torch.float16, torch.int8)[drawn_index(rng, 3)]
    chosen = amd.TILES[arch][tile]
    monkeypatch.setattr(amd, "tiles_of", lambda *_: (chosen,))
    a, b = numbers(rng, (chosen.m + 1, 304), dtype), numbers(rng, (304, 300), dtype)
    a, b = (x.mT.contiguous().mT if drawn_index(rng, 2) else x for x in (a, b))
    with jitfmha.emulate(arch, check=True, random_order=drawn_index(rng, 100)) as run:
        check_call(MatmulArguments(a, b))
        assert not run.findings()


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2", torch.int8], ids=str)
def test_lines_of_bytes(dtype, rng, poisoned_memory, monkeypatch):
    """By the largest tile, around steps and chunks of lines, behind which there are NaNs."""
    arch = "gfx950"
    dtype = dtype_on(arch, dtype)
    monkeypatch.setattr(amd, "tiles_of", lambda *_: amd.TILES[arch][:1])
    is_line = drawn_index(rng, 3)  # of a alone, of b alone, or of both
    with jitfmha.emulate(arch, check=True) as run:
        for m, n, k in ((257, 40, 129), (16, 256, 128), (33, 300, 100)):
            operands = []
            for side, rows in enumerate((m, n)):
                has_lines = is_line in (side, 2)
                shape = (k, rows) if has_lines else (rows, k)
                filling = torch.nan if dtype.is_floating_point else 77
                around = torch.full((shape[0] + 1, -(-shape[1] // 16) * 16 + 64), filling).to(dtype)
                x = around[: shape[0], : shape[1]].copy_(numbers(rng, shape, dtype))
                operands.append(x.mT if has_lines else x)
            check_call(MatmulArguments(operands[0], operands[1].mT))
        assert not run.findings()


@pytest.mark.parametrize("tile", amd.FEW_ROWS, ids=lambda tile: f"{tile.m}x{tile.n}")
def test_few_rows(tile, rng, poisoned_memory, monkeypatch):
    """Around steps and blocks of columns; behind rows and columns there are NaNs."""
    arch, m = ARCHES[drawn_index(rng, 2)], 1 + drawn_index(rng, tile.m)
    dtype = dtype_on(arch, DTYPES[drawn_index(rng, len(DTYPES))])
    monkeypatch.setattr(amd, "tiles_of", lambda *_: (tile,))
    step = 16 * tile.chunks // dtype.itemsize
    call = drawn_call(rng, dtype, (8, 8, 8))
    with jitfmha.emulate(arch, check=True, random_order=drawn_index(rng, 100)) as run:
        for n, k in ((1, 1), (tile.n, step), (tile.n + 1, 2 * step + 1), (3 * tile.n - 1, 0)):
            batch = (2,) if drawn_index(rng, 2) else ()
            drawn = drawn_call(rng, dtype, (m, n, k), call, (batch, batch))
            around = [torch.full((*batch, x, k + step), 77).to(dtype) for x in (m, n)]
            if dtype.is_floating_point:
                around = [x.fill_(torch.nan) for x in around]
            a, b = (x[..., :k] for x in around)
            a.copy_(drawn.a)
            b.copy_(drawn.b.mT)
            check_call(drawn._replace(a=a, b=b.mT))
        assert not run.findings()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_follows_products(activation, rng, poisoned_memory):
    """All of it, by several waves; a NaN stays one."""
    m, n, k = 65, 70, 40
    a, b = numbers(rng, (m, k), torch.bfloat16), numbers(rng, (k, n), torch.bfloat16)
    bias, scale_a, scale_b = (torch.randn(size, generator=rng) for size in ((n,), (m, 1), (n,)))
    call = MatmulArguments(a, b, bias, scale_a, scale_b, activation, torch.float32)
    with jitfmha.emulate(ARCHES[drawn_index(rng, 2)], check=True) as run:
        check_call(call)
        bias[3] = torch.nan
        assert run_call(call).isnan().equal(bias.isnan().expand(m, n))
        assert not run.findings()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_shared_tiles(dtype, rng, poisoned_memory, monkeypatch):
    """Several workgroups have parts of two tiles, and a whole round comes before."""
    arch = ARCHES[drawn_index(rng, 2)]
    monkeypatch.setattr(amd, "tiles_of", lambda *_: amd.TILES[arch][2:3])
    monkeypatch.setattr(amd, "_LEAST_STEPS", 2)
    monkeypatch.setattr(amd, "_COMBINE_CYCLES", -1e9)  # so that they are never left whole
    options = drawn_call(rng, dtype, (8, 8, 8))
    for units in (2, 3, 100):
        with jitfmha.emulate(arch, check=True, random_order=drawn_index(rng, 100)) as run:
            monkeypatch.setattr(TARGET_HERE.get(), "compute_units", units)
            check_call(drawn_call(rng, dtype, (150, 130, 700), options, ((), ())))
            assert not run.findings()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_several_tiles(dtype, rng, poisoned_memory, monkeypatch):
    """A workgroup has one after the other, of another batch too, with and without steps."""
    arch = ARCHES[drawn_index(rng, 2)]
    monkeypatch.setattr(amd, "tiles_of", lambda *_: amd.TILES[arch][3:])
    options = drawn_call(rng, dtype, (8, 8, 8))._replace(
        bias=torch.ones(8), scale_a=torch.ones(8, 1), activation="silu", out_dtype=torch.float32
    )
    with jitfmha.emulate(arch, check=True, random_order=drawn_index(rng, 100)) as run:
        monkeypatch.setattr(TARGET_HERE.get(), "compute_units", 1)
        for m, n, k in ((70, 130, 72), (40, 200, 0), (33, 129, 300)):
            check_call(drawn_call(rng, dtype, (m, n, k), options, ((2,), (2,))))
        assert not run.findings()


def test_work_is_divided():
    """All tiles whole; or the last ones for all slots, or each for as many workgroups."""
    for tiles, steps, slots, *expected in (
        (8, 16, 8, (16, 8, 8)),
        (10, 16, 8, (16, 8, 10), (16, 8, 8, 2, 4), (16, 8, 8, 2, 4)),
        (3, 160, 8, (160, 3, 3), (160, 8, 0, 3, 8), (160, 6, 0, 3, 6)),
        (15, 16, 8, (16, 8, 15), (16, 8, 8, 7, 8)),
        (5, 4, 8, (4, 5, 5)),
        (0, 16, 8, (16, 0, 0)),
    ):
        assert amd.Work.ways(tiles, steps, slots) == [amd.Work(*each) for each in expected]
    assert [work.has_two_tiles for work in amd.Work.ways(3, 160, 8)] == [False, True, False]
    assert len(amd.Work.ways(3, 1 << 30, 8)) == 1  # more than kernels count


def test_tiles_of_calls():
    """The largest where there are many results, the smallest where there are few."""
    for arch in ARCHES:
        with jitfmha.emulate(arch):
            target = TARGET_HERE.get()
            for m, expected in ((8192, (256, 256)), (16, (32, 64))):
                tile, _ = amd.Work.choose(target, torch.bfloat16, False, (1, m, 8192, 8192))
                assert tile[:2] == expected
            for size, expected in (
                *(((8, 8192, 8192), (8, 16)), ((9, 8192, 8192), (16, 16))),
                # With many columns; with few, whose k is divided; with more rows.
                *(((1, 128256, 4096), (16, 32)), ((1, 16, 65536), (32, 64))),
                ((17, 8192, 8192), (32, 64)),
            ):
                tile, work = amd.Work.choose(target, torch.bfloat16, True, (1, *size))
                assert tile[:2] == expected
                assert not work.sharing or not tile.ahead
    # Whose parts take as long as the products.
    with jitfmha.emulate("gfx942"):
        target = TARGET_HERE.get()
        for m, k, shares in ((4096, 1024, False), (8192, 8192, True)):
            _, work = amd.Work.choose(target, torch.bfloat16, True, (1, m, m, k))
            assert (work.sharing > 0) == shares


def test_gradients_by_torch(rng):
    a, b = numbers(rng, (2, 9, 16), torch.float32), numbers(rng, (16, 8), torch.float32)
    results = []
    for on_gpu in (False, True):
        leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
        with jitfmha.emulate("gfx950", check=True) if on_gpu else nullcontext():
            jitfmha.matmul(*leaves, activation="gelu").sin().sum().backward()
        results.append([each.grad for each in leaves])
    torch.testing.assert_close(*results)


def test_what_the_chip_does_not_multiply_is_refused():
    for dtype in (torch.int32, torch.float8_e4m3fn):
        x = torch.zeros(8, 8).to(dtype)
        with (
            jitfmha.emulate("gfx942"),
            pytest.raises(NotImplementedError, match=f"a has dtype {dtype}; .*fp8_e4m3fnuz"),
        ):
            jitfmha.matmul(x, x)
