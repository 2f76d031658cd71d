"""Drawn matrix products, and their results in float64."""

import torch
from drawn_rows import drawn_index
from torch import Tensor
from torch.nn import functional

import jitfmha
from jitfmha.gemm.problem import ACTIVATIONS, OUT_DTYPES, MatmulArguments, product_of

ACTIVATE = {"relu": torch.relu, "gelu": functional.gelu, "silu": functional.silu}
STEEPEST = 1.13  # any of them
BATCHES = [
    ((), ()),
    ((), ()),
    ((3,), (3,)),
    ((2, 3), ()),
    ((2, 1), (3,)),
    ((1,), (2, 2)),
    ((0,), ()),
]


def matrix(rng: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal numbers, of integers between -100 and 100, in a drawn layout.

    What lies around them is NaN, or 99.
    """
    x = numbers(rng, shape, dtype)
    layout = drawn_index(rng, 6)
    *batch, rows, columns = shape
    if layout == 5:  # rows, or columns, that share memory
        line = numbers(rng, (rows + columns,), dtype)
        step = drawn_index(rng, 2)
        strides = ((step, 1), (1, step))[drawn_index(rng, 2)]
        return line.as_strided((rows, columns), strides).expand(shape)
    if layout < 2:
        return x.mT.contiguous().mT if layout else x
    filling = torch.nan if dtype.is_floating_point else 99
    # Lines that loads of 16 bytes fit, or odd ones, or numbers that do not follow each other.
    wide = (*batch, columns + 7, 2 * rows + 3) if layout == 4 else (*batch, rows + 1, columns + 64)
    around = torch.full(wide, filling).to(dtype)
    view = around[..., 7:, 3::2].mT if layout == 4 else around[..., 1:, 64 - 3 * (layout - 2) :]
    view = view[..., :columns]
    view.copy_(x)
    return view


def numbers(rng: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype in (torch.int8, torch.int32):
        return torch.randint(-100, 101, shape, generator=rng, dtype=torch.int32).to(dtype)
    return torch.randn(shape, generator=rng).to(dtype)


def drawn_call(
    rng: torch.Generator,
    dtype: torch.dtype,
    size: tuple[int, int, int],
    options: MatmulArguments | None = None,
    batches: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
) -> MatmulArguments:
    """A call with drawn options, or with those of another call, (m, k) by (k, n)."""
    m, n, k = size
    batch_a, batch_b = batches or BATCHES[drawn_index(rng, len(BATCHES))]
    a, b = matrix(rng, (*batch_a, m, k), dtype), matrix(rng, (*batch_b, k, n), dtype)
    out_dtypes = OUT_DTYPES[dtype]
    out_dtype = out_dtypes[drawn_index(rng, len(out_dtypes))]
    if options is not None and options.out_dtype is not None:
        out_dtype = options.out_dtype
    if out_dtype == torch.int32:
        return MatmulArguments(a, b, out_dtype=out_dtype)
    activation = (
        (None, *ACTIVATIONS)[drawn_index(rng, 4)] if options is None else options.activation
    )
    batch = torch.broadcast_shapes(batch_a, batch_b)
    shapes = (((n,), (*batch, 1, n)), ((1,), (m, 1), (*batch, m, 1)), ((), (1, n), (*batch, 1, n)))
    given: list[Tensor | None] = []
    for i, of_each in enumerate(shapes):
        is_given = drawn_index(rng, 2) if options is None else options.epilogue()[i] is not None
        x = torch.randn(of_each[drawn_index(rng, len(of_each))], generator=rng)
        if i == 0 and drawn_index(rng, 2):
            x = x.to(out_dtype)
        given.append(x if is_given else None)
    bias, scale_a, scale_b = given
    return MatmulArguments(a, b, bias, scale_a, scale_b, activation, out_dtype)


def run(call: MatmulArguments) -> Tensor:
    named = call._asdict()
    return jitfmha.matmul(named.pop("a"), named.pop("b"), **named)


def check_call(call: MatmulArguments, *, rounds_product: bool = False) -> None:
    """The result of a call; ``rounds_product`` allows one rounding before the epilogue."""
    check(run(call), call, rounds_product=rounds_product)


def check(out: Tensor, call: MatmulArguments, *, rounds_product: bool = False) -> None:
    a, b, bias, scale_a, scale_b, activation, _ = call
    product = product_of(call)
    assert out.shape == product.shape
    assert out.dtype == product.out_dtype
    assert out.is_contiguous()
    if out.dtype == torch.int32:
        assert torch.equal(out, (a.long() @ b.long()).int())
        return
    x, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    # Each number of a sum is rounded as often as it has others, in float32.
    off = (product.k + 8) * 2.0**-24 * size
    unit = torch.finfo(out.dtype).eps / 2
    if rounds_product:
        off = off + unit * x.abs()
    for scale in (scale_a, scale_b):
        if scale is not None:
            x, off = x * scale.double(), off * scale.double().abs()
    if bias is not None:
        x = x + bias.double()
        off = off + 2.0**-23 * x.abs()
    if rounds_product:
        off = off + unit * x.abs()
    if activation is not None:
        # Also what approximations of exp and erf are off.
        off = STEEPEST * off + 2.0**-21 * x.abs()
        x = ACTIVATE[activation](x)
    allowed = off + 2.01 * unit * x.abs() * (1 if rounds_product else 0.55) + 2.0**-24
    most = torch.finfo(out.dtype).max
    wrong = (out.double().clamp(-most, most) - x.clamp(-most, most)).abs() - allowed
    assert not out.isnan().any()
    assert not wrong.numel() or float(wrong.max()) <= 0, f"{float(wrong.max())} too far"
