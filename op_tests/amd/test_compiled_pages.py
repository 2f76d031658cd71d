"""Prefill with keys in pages, whose kernels have the tiles of those that come ready."""

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from amd_problems import FP8, AmdProblem
from compiled_calls import ARCHS, assert_nothing_is_spilled
from packed_pages import packed_keys, packed_values
from ready_calls import CHIPS, DTYPES, FP8_ROUNDING, ROUNDING
from torch import Tensor
from untyped import explain, fmha_fwd

from jitfmha import emulate
from jitfmha.kernels.compiled.traits import ForwardTraits, kernel_spec
from jitfmha.kernels.modifiers import ModifierTraits

pytestmark = pytest.mark.usefixtures("poisoned_memory")

_THOUSAND = 1000
_KINDS = [
    *(
        (chip, dtype, hdims)
        for chip in CHIPS
        for dtype in DTYPES
        for hdims in ((64, 64), (128, 128), (192, 128))
    ),
    *(
        (chip, f"{dtype}/{kv_dtype}", hdims)
        for chip in CHIPS
        for dtype in DTYPES
        for kv_dtype in ("fp8", "int8")
        for hdims in ((64, 64), (128, 128), (192, 128))
    ),
    *((chip, "fp8", hdims) for chip in CHIPS for hdims in ((64, 64), (128, 128))),
    ("gfx950", "fp8", (256, 256)),
]
# Of queries of 16 bits. Others have the kernels of dense keys, which hold places in wide pages too:
# those named here have few registers to spare.
_IN_TURNS = ((64, 64), (128, 128), (192, 128))
_NOT_IN_TURNS = ((48, 128), (80, 80), (96, 96), (80, 256), (192, 192), (256, 256))
_WIDE_PAGES = (16, 32, 48, 64, 80, 128, 256)
_PAGES = (1, 2, 7, 15, 24, *_WIDE_PAGES)
# Of queries of 16 bits: with these, and these masks, the other kernel takes less time. By bytes of
# keys, and whether pages are packed.
_WITHOUT_TURNS = {
    ("gfx942", 2, False): {(192, 128): (0, 2)},
    ("gfx950", 2, False): {(64, 64): (0,)},
    ("gfx942", 1, True): {(64, 64): (0, 2)},
    ("gfx942", 2, True): {(64, 64): (0, 2), (192, 128): (0,)},
    ("gfx950", 2, True): {(64, 64): (0,)},
}
# Their mean is that from which on these kernels serve, or above it.
_LENGTHS_Q = ((257, 300), (1, 511), (600,), (256,), (0, 290, 600))


@dataclass
class Paged:
    """A problem of gm1 with its keys and values in pages, in any order, beside others of NaN."""

    problem: AmdProblem
    page_size: int
    is_packed: bool = False

    def tensors(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        problem, size = self.problem, self.page_size
        lengths = [pair[1] for pair in problem.lengths]
        most = max(-(-max(lengths) // size), 1)
        count = len(lengths) * most
        table = torch.randperm(count, generator=problem.rng).view(len(lengths), most).int()
        caches = []
        for x in (problem.k, problem.v):
            # Beside each page lies another one.
            beside = torch.nan if x.dtype.is_floating_point else 99
            cache = torch.full((count, 2, size, *x.shape[1:]), beside).to(x.dtype)[:, 1]
            for of_sequence, pages in zip(x.split(lengths), table.tolist(), strict=True):
                for part, page in zip(of_sequence.split(size), pages, strict=False):
                    cache[page, : len(part)] = part
            if self.is_packed:
                packed = packed_values(cache) if caches else packed_keys(cache)
                cache = torch.full((count, 2, *packed.shape[1:]), beside).to(x.dtype)[:, 1]
                cache.copy_(packed)
            caches.append(cache)
        return (problem.q, *caches), problem.arguments | {"block_table": table}


def dtypes_of(chip: str) -> dict[str, torch.dtype]:
    return DTYPES | {"fp8": FP8[chip], "int8": torch.int8}


def check(paged: Paged, chip: str, dtype: str, rounding: float, random_order: int | None) -> None:
    (q, k, v), options = paged.tensors()
    kind = chip.partition("-")[0], k.dtype.itemsize, paged.is_packed
    masks = _WITHOUT_TURNS.get(kind, {}).get(paged.problem.hdims, ())
    takes_turns = paged.problem.hdims in _IN_TURNS or q.dtype.itemsize == 1
    if q.dtype.itemsize == 2 and (paged.is_packed or paged.page_size in _WIDE_PAGES):
        takes_turns &= options["mask"] not in masks
    with emulate(chip, check=True, random_order=random_order) as run:
        assert ("_turns_" in explain(q, k, v, **options).plan.kernel) == takes_turns
        actual = fmha_fwd(q, k, v, **options)
        assert run.findings() == ()
    of_outputs = 2**-11 if dtype == "fp16" else ROUNDING["rtne"]
    paged.problem.assert_right(actual, rounding, of_outputs=of_outputs)


@pytest.mark.sample("number", range(_THOUSAND), 6)
def test_drawn_calls(number, rng):
    """Two of each kernel, which takes longer to compile than to run."""
    drawn = random.Random(rng.initial_seed())
    chip, dtypes, hdims = drawn.choice(_KINDS)
    (dtype, *others), names = dtypes.split("/"), dtypes_of(chip)
    mask = drawn.choice((0, 2))
    bf16_cvt = drawn.choice(tuple(ROUNDING)) if (dtype, chip) != ("bf16", "gfx950") else "rtne"
    of_probabilities = {"bf16": ROUNDING[bf16_cvt], "fp16": 2**-11, "fp8": FP8_ROUNDING}
    is_packed = drawn.random() < 0.5
    # A piece of a packed page has so many values of a column.
    piece = 8 if dtypes in DTYPES else 16
    page_size = drawn.choice((piece, 3 * piece, *_WIDE_PAGES) if is_packed else _PAGES)
    descales: tuple[Any, ...] = (None,)
    if (others or dtype == "fp8") and drawn.random() < 0.6:
        descales = "one", "each"
    for queries in drawn.sample(_LENGTHS_Q, 2):
        longest = drawn.choice((1, 63, 64, 65, 200, 385, 700))
        lengths = [
            (n, drawn.randrange(longest + 1) if i else longest) for i, n in enumerate(queries)
        ]
        problem = AmdProblem(
            *(rng, names[dtype], hdims, drawn.choice(((1, 1), (4, 2), (3, 1)))),
            lengths=lengths,
            mask=mask,
            softmax_scale=hdims[0] ** -0.5,
            descales=drawn.choice(descales),
            kv_dtype=names[others[0]] if others else None,
            options={"bf16_cvt": bf16_cvt, "num_splits": drawn.choice((0, 0, 1, 2, 5))},
        )
        order = drawn.choice((None, drawn.randrange(1 << 31)))
        paged = Paged(problem, page_size, is_packed)
        check(paged, chip, dtype, of_probabilities[dtype], order)


@pytest.mark.sample("chip", CHIPS, 1)
def test_scales_beside_wider_queries(chip, rng):
    problem = AmdProblem(
        *(rng, torch.bfloat16, (128, 128), (2, 2)),
        lengths=((300, 100),),
        softmax_scale=128**-0.5,
        descales="each",
        kv_dtype=FP8[chip],
    )
    check(Paged(problem, 16), chip, "bf16", ROUNDING["rtne"], None)


@pytest.mark.sample("kind", _KINDS, 2)
@pytest.mark.parametrize("page_size", [1, 16])
def test_more_tiles_than_are_looked_up_at_once(kind, page_size, rng):
    check_many_tiles(kind, page_size, rng)


@pytest.mark.sample("chip", CHIPS, 1)
def test_more_tiles_of_wide_heads(chip, rng):
    check_many_tiles((chip, "bf16", (256, 256)), 16, rng)


@pytest.mark.sample(
    ("arch", "hdims", "is_packed", "mask"),
    [*itertools.product(ARCHS, (f"{q}x{v}" for q, v in _NOT_IN_TURNS), (False, True), (0, 2))],
    2,
)
def test_heads_that_take_no_turns(arch, hdims, is_packed, mask, rng):
    hdim_q, hdim_v = map(int, hdims.split("x"))
    problem = AmdProblem(
        *(rng, torch.bfloat16, (hdim_q, hdim_v), (2, 1)),
        lengths=((257, 2100), (300, 33), (1, 0)),
        mask=mask,
        softmax_scale=hdim_q**-0.5,
        options={"num_splits": 1},
    )
    order = int(torch.randint(1 << 30, (), generator=rng))
    check(Paged(problem, 16, is_packed), arch, "bf16", ROUNDING["rtne"], order)


@pytest.mark.sample("chip", CHIPS, 1)
def test_narrow_heads_of_8_bits(chip, rng):
    check_many_tiles((chip, "fp8", (64, 64)), 16, rng)


@pytest.mark.sample("kind", [kind for kind in _KINDS if kind[1] == "fp8"], 2)
@pytest.mark.parametrize("page_size", [16, 48])
def test_packed_pages(kind, page_size, rng):
    check_many_tiles(kind, page_size, rng, is_packed=True)


@pytest.mark.sample("kind", [kind for kind in _KINDS if kind[1] in DTYPES], 2)
@pytest.mark.parametrize("page_size", [8, 24])
def test_packed_pages_of_16_bits(kind, page_size, rng):
    check_many_tiles(kind, page_size, rng, is_packed=True)


@pytest.mark.sample("kind", [kind for kind in _KINDS if "/" in kind[1]], 2)
def test_packed_bytes_beside_wider_queries(kind, rng):
    check_many_tiles(kind, 16, rng, is_packed=True)


def check_many_tiles(
    kind: tuple[str, str, Any], page_size: int, rng: torch.Generator, *, is_packed: bool = False
) -> None:
    chip, dtypes, hdims = kind
    (dtype, *others), names = dtypes.split("/"), dtypes_of(chip)
    problem = AmdProblem(
        *(rng, names[dtype], hdims, (1, 1)),
        lengths=((256, 6300),),
        mask=2,
        softmax_scale=hdims[0] ** -0.5,
        kv_dtype=names[others[0]] if others else None,
        options={"num_splits": 1},
    )
    of_probabilities = {"bf16": ROUNDING["rtne"], "fp16": 2**-11, "fp8": FP8_ROUNDING}
    paged = Paged(problem, page_size, is_packed)
    check(paged, chip, dtype, of_probabilities[dtype], None)


@pytest.mark.parametrize("page_size", [1, 16])
def test_other_calls_take_other_kernels(page_size, rng):
    """Where queries do not fill a tile."""
    problem = AmdProblem(rng, heads=(1, 1), lengths=((255, 100),))
    (q, k, v), options = Paged(problem, page_size).tensors()
    with emulate("gfx942"):
        assert "_turns_" not in explain(q, k, v, **options).plan.kernel


@pytest.mark.sample("chip", CHIPS, 1)
def test_pages_of_single_rows_of_several_heads(chip, rng):
    problem = AmdProblem(rng, heads=(2, 2), lengths=((300, 100),), options={"num_splits": 1})
    check(Paged(problem, 1), chip, "bf16", ROUNDING["rtne"], None)


def test_pages_of_keys_and_of_values_are_as_far_apart(rng):
    problem = AmdProblem(rng, heads=(1, 1), lengths=((300, 100),))
    (q, k, v), options = Paged(problem, 16).tensors()
    with emulate("gfx942"):
        assert "_turns_" in explain(q, k, v, **options).plan.kernel
        assert "_turns_" not in explain(q, k, v.contiguous(), **options).plan.kernel


@pytest.mark.sample(
    ("kind", "is_masked", "access"),
    [
        *itertools.product(_KINDS, (False, True), ("paged", "wide_pages", "packed_pages")),
    ],
    4,
    is_fixed=True,
)
def test_nothing_is_spilled(kind, is_masked, access):
    chip, dtypes, hdims = kind
    arch = chip.removesuffix("-mi308")
    fp8 = str(FP8[arch]).removeprefix("torch.").replace("float8", "fp8")
    dtype, *others = (fp8 if name == "fp8" else name for name in dtypes.split("/"))
    traits = ForwardTraits(
        *(arch, dtype, *hdims, "gm1", "rtne", is_masked, access),
        ModifierTraits("compiled"),
        kv_dtype=others[0] if others else dtype,
        takes_turns=True,
    )
    assert_nothing_is_spilled(kernel_spec(traits), traits.name, traits.combine_name)


@pytest.mark.sample(
    ("arch", "hdims", "is_masked", "is_packed"),
    [
        case
        for hdims in (*_NOT_IN_TURNS, (128, 32), (128, 64), (64, 64))
        for case in itertools.product(ARCHS, (hdims,), (False, True), (False, True))
    ],
    2,
    is_fixed=True,
)
def test_nothing_is_spilled_beside_places(arch, hdims, is_masked, is_packed):
    traits = ForwardTraits(
        *(arch, "bf16", *hdims, "gm1", "rtne", is_masked),
        "wide_packed_pages" if is_packed else "wide_pages",
        ModifierTraits("compiled"),
        kv_dtype="bf16",
        has_column_major_v=is_packed,
    )
    assert_nothing_is_spilled(kernel_spec(traits), traits.name, traits.combine_name)
