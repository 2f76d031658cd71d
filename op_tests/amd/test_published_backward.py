"""Every backward kernel of a published tree, through the public interface, against float64.

    JITFMHA_HSA_DIR=... python -m pytest op_tests/amd/test_published_backward.py --exhaustive

Skipped where JITFMHA_HSA_DIR names no tree with backward kernels; otherwise a run takes a few of
them, and `--exhaustive` takes all, for some minutes.
"""

import csv
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from backward_calls import BackwardCall

from jitfmha import emulate
from jitfmha.amd.chips import Arch
from jitfmha.amd.tree import HSA_DIR
from jitfmha.problem.problem import BF16_CVTS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Of rounding inputs, probabilities and results; rounding towards zero is biased.
TOLERANCE = {"bf16": 1.2e-2, "fp16": 3e-3}
FOLDER = "fmha_v3_bwd"
ARCHS: tuple[Arch, ...] = ("gfx942", "gfx950")
TREE = Path(os.environ.get(HSA_DIR) or "no_tree")


@dataclass(frozen=True)
class PublishedKernel:
    """A row of the manifest of kernels that make gradients."""

    arch: Arch
    cells: tuple[tuple[str, str], ...]

    def __getitem__(self, name: str) -> str:
        return dict(self.cells)[name]

    def __str__(self) -> str:
        return f"{self.arch}-{self['co_name']}"

    def number(self, name: str) -> int:
        return int(self[name])

    @property
    def can_fail_with_more_than_one_tile(self) -> bool:
        """Of the facts about these kernels: some for gfx950 are right with one tile of keys."""
        is_own = self.arch == "gfx950" and "recompile" not in self["knl_name"]
        is_causal = self["mask"] in "12" and self["mode"] == "0"
        return is_own and is_causal and self["hdim_q"] == "128"

    def call(self, rng: torch.Generator) -> BackwardCall:
        """One that only this kernel of its kind can serve."""
        hdim_q, hdim_v, ts, mask = map(self.number, ("hdim_q", "hdim_v", "ts", "mask"))
        if hdim_q == hdim_v and self["pddv"] == "1":
            hdim_q = hdim_v = hdim_q - 16
        options: dict[str, Any] = {"atomic_fp32": self["atomic32"] == "1"}
        if self["bf16_cvt"] != "3":
            options["bf16_cvt"] = BF16_CVTS[self.number("bf16_cvt")]
        values: dict[str, Any] = {
            "dtype": DTYPES[self["dtype"]],
            "hdims": (hdim_q, hdim_v),
            "mask": ("t:20,5", "b:20,5")[rng.initial_seed() % 2] if mask == 3 else mask,
            "options": options,
        }
        if self["mode"] == "1":
            values |= {"lengths": ((33, 50), (0, 20), (61, ts + 9)), "gap": 3}
        elif self["pssk"] == "0":
            heads = (1, 1) if self["atomic32"] == "1" else (4, 2)
            n = 192 if self["atomic32"] == "1" else 128
            values |= {"lengths": ((n, n),), "batch": 1, "heads": heads}
        elif mask == 3:
            values |= {"lengths": ((100, 95),), "batch": 2}
        else:
            n = ts - 15 if self.can_fail_with_more_than_one_tile else ts + 41
            values |= {"lengths": ((50, n),), "batch": 2}
        return BackwardCall(rng, **values)


def _published() -> list[PublishedKernel]:
    """Those that a call can reach: those of gm1 are not taken with a mask of the top left."""
    kernels = []
    for arch in ARCHS:
        path = TREE / arch / FOLDER / "fmha_bwd_dqdkdv.csv"
        if path.is_file():
            with path.open(newline="") as file:
                kernels += [PublishedKernel(arch, tuple(x.items())) for x in csv.DictReader(file)]
    return [kernel for kernel in kernels if (kernel["mode"], kernel["mask"]) != ("1", "1")]


PUBLISHED = _published()
pytestmark = pytest.mark.skipif(
    not PUBLISHED, reason=f"{HSA_DIR} names no tree with backward kernels"
)


def tree_of(kernel: PublishedKernel, root: Path) -> None:
    """The published tree without the other kernels that make gradients."""
    source, folder = TREE / kernel.arch / FOLDER, root / kernel.arch / FOLDER
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if "_odo_" in file.name or "_dq_" in file.name or file.name == kernel["co_name"]:
            shutil.copy(file, folder)
    shutil.copy(source / "fmha_bwd_odo.csv", folder)
    header, cells = zip(*kernel.cells, strict=True)
    (folder / "fmha_bwd_dqdkdv.csv").write_text(f"{','.join(header)}\n{','.join(cells)}\n")


@pytest.mark.sample("kernel", PUBLISHED, 3)
def test_published_kernel(rng, use_tree, tmp_path, kernel):
    tree_of(kernel, tmp_path)
    use_tree(tmp_path)
    call = kernel.call(rng)
    with emulate(kernel.arch):
        assert call.explain().plan.source.startswith(kernel["co_name"])
        call.run()
    call.assert_right(TOLERANCE[kernel["dtype"]])
