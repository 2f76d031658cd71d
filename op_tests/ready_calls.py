"""Forward calls of kernels that come ready: drawn ones, and all about the sizes of tiles."""

import itertools
import random
from dataclasses import dataclass

import torch
from amd_problems import CPU, FP8, AmdProblem
from inputs import LAYOUTS, lay_out
from torch import Tensor

CHIPS = ("gfx942", "gfx942-mi308", "gfx950")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HDIMS = {
    "bf16": ((64, 64), (128, 128), (192, 128)),
    "fp16": ((64, 64), (128, 128)),
    "fp8": ((128, 128),),
}
DTYPES_AND_HDIMS = [(dtype, hdims) for dtype, all_hdims in HDIMS.items() for hdims in all_hdims]
OF_GFX950 = ("fp8", (256, 256))
KINDS = [(chip, *kind) for chip in CHIPS for kind in DTYPES_AND_HDIMS]
KINDS.append(("gfx950", *OF_GFX950))
MODES_AND_MASKS = ((False, 0), (False, 1), (False, 2), (True, 0), (True, 2))
HEADS = ((2, 4, 2), (1, 3, 1), (1, 1, 1), (2, 5, 5), (2, 6, 2))
SEQLENS_Q = (0, 1, 31, 33, 127, 129, 192, 255, 256, 257, 301, 512)
SEQLENS_K = (0, 1, 5, 63, 64, 65, 127, 128, 129, 191, 301, 512, 700, 1058)
# By what share of itself a number changes when it becomes one of 16 bits; outputs go to nearest.
ROUNDING = {"rtne": 2**-8, "rtna": 2**-8, "rtz": 2**-7}
FP8_ROUNDING = 2**-4  # of probabilities


@dataclass(frozen=True)
class ReadyCall:
    """One call; in gm1 each of ``heads[0]`` sequences is a little shorter than the last.

    Two more of gm1 have no queries, and no keys.

    Attributes:
        lengths: seqlen_q and seqlen_k.
        heads: batch, query heads, key heads.
        layouts: in gm0 of q, k and v, and of out.
        gap: unused rows behind each sequence of gm1.
        descales: of fp8, as `AmdProblem` has them.
    """

    chip: str
    dtype: str
    hdims: tuple[int, int]
    is_group: bool
    mask: int
    lengths: tuple[int, int]
    heads: tuple[int, int, int] = (2, 3, 1)
    layouts: tuple[str, str] = ("bshd", "bshd")
    return_lse: bool = True
    bf16_cvt: str = "rtne"
    gap: int = 0
    descales: str | None = None

    def problem(self, rng: torch.Generator, device: torch.device = CPU) -> AmdProblem:
        """Its tensors, with an output of NaN in gm0."""
        batch, heads, heads_k = self.heads
        lengths = [self.lengths]
        if self.is_group:
            seqlen_q, seqlen_k = self.lengths
            lengths = [(max(seqlen_q - 37 * i, 0), max(seqlen_k - 61 * i, 0)) for i in range(batch)]
            lengths += [(0, 5), (5, 0)]
        problem = AmdProblem(
            *(rng, (DTYPES | {"fp8": FP8[self.chip]})[self.dtype], self.hdims),
            heads=(heads, heads_k),
            lengths=lengths,
            batch=None if self.is_group else batch,
            mask=self.mask,
            softmax_scale=self.hdims[0] ** -0.5,
            layout=self.layouts[0],
            gap=self.gap,
            descales=self.descales,
            options={"bf16_cvt": self.bf16_cvt, "return_lse": self.return_lse},
            device=device,
        )
        if not self.is_group:
            shape = (*problem.q.shape[:3], self.hdims[1])
            poison = torch.full(shape, torch.nan, device=device)
            poison = poison.to(DTYPES.get(self.dtype, torch.bfloat16))
            problem.arguments["out"] = lay_out(poison, self.layouts[1])
        return problem

    def assert_right(self, problem: AmdProblem, actual: tuple[Tensor, Tensor | None]) -> None:
        """Within what rounding explains."""
        of_probabilities = {"bf16": ROUNDING[self.bf16_cvt], "fp16": 2**-11, "fp8": FP8_ROUNDING}
        of_outputs = 2**-11 if self.dtype == "fp16" else ROUNDING["rtne"]
        problem.assert_right(actual, of_probabilities[self.dtype], of_outputs=of_outputs)


def drawn_call(drawn: random.Random) -> ReadyCall:
    """Any call that these kernels serve; lengths are often about the sizes of tiles."""
    chip, dtype, hdims = drawn.choice(KINDS)
    is_group, mask = drawn.choice(MODES_AND_MASKS)
    layouts = ("bshd",) if is_group else tuple(LAYOUTS)
    has_roundings = dtype == "bf16" and chip != "gfx950"
    return ReadyCall(
        *(chip, dtype, hdims, is_group, mask),
        lengths=(drawn.choice(SEQLENS_Q), drawn.choice(SEQLENS_K)),
        heads=drawn.choice(HEADS),
        layouts=(drawn.choice(layouts), drawn.choice(layouts)),
        return_lse=drawn.random() < 0.5,
        bf16_cvt=drawn.choice(tuple(ROUNDING)) if has_roundings else "rtne",
        gap=drawn.choice((0, 3)) if is_group else 0,
        descales=drawn.choice((None, "one", "each")) if dtype == "fp8" else None,
    )


def edges() -> list[ReadyCall]:
    """Lengths about the tiles' sizes, no queries, no keys, one of each, heads in odd numbers."""
    gfx942, gfx950 = CHIPS[:2], CHIPS[2:]
    tiles = (
        *((dtype, hdims, (256, 64), CHIPS) for dtype, hdims in DTYPES_AND_HDIMS if dtype != "fp8"),
        *(("bf16", hdims, (128, 32), CHIPS) for hdims in ((128, 128), (192, 128))),
        ("fp16", (128, 128), (128, 32), CHIPS),
        *(("fp8", (128, 128), (256, 64), gfx942), ("fp8", (128, 128), (256, 128), gfx950)),
        (*OF_GFX950, (256, 64), gfx950),
    )
    calls = []
    for dtype, hdims, (rows, keys), chips in tiles:
        lengths = [
            *itertools.product((1, rows - 1, rows, rows + 1), (1, keys - 1, keys, keys + 1)),
            *((0, 70), (70, 0), (33, 2 * keys + 1), (2 * rows + 1, 31), (5, 300)),
        ]
        kinds = itertools.cycle(itertools.product(chips, MODES_AND_MASKS))
        for seqlens, (chip, (is_group, mask)) in zip(lengths, kinds, strict=False):
            descales = "each" if dtype == "fp8" else None
            call = ReadyCall(chip, dtype, hdims, is_group, mask, seqlens, descales=descales)
            calls.append(call)
    return calls
