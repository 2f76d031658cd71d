"""Builds the tuned code objects of this folder, and the manifests that list them.

    python hsa/build.py            writes what differs
    python hsa/build.py --check    writes nothing; fails where a file differs from what is built

Every code object comes from `src/fmha_fwd.hip`, specialised by constants. The compiler is part of
the result: the manifest names it, and `--check` refuses to compare with another one. The kernels'
arguments are stated in `jitfmha/amd/kernel_arguments.py`; `src/arguments.h` is written from there.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import get_args

from jitfmha.amd.device_compiler import assemble, compile_hip_to_assembly
from jitfmha.amd.kernel_arguments import device_header
from jitfmha.chips import Arch

HSA = Path(__file__).resolve().parent
SOURCES = HSA / "src"
FAMILY = "fmha_v3_fwd"

ARGUMENTS = SOURCES / "arguments.h"
ARCHS: tuple[Arch, ...] = get_args(Arch)
MASKS = {0: "", 1: "causal_top_left", 2: "causal"}
ROUNDINGS = {0: ("rtne", "nearest_even"), 1: ("rtna", "nearest_away"), 2: ("rtz", "towards_zero")}
# (hdim_q, hdim_v) -> query rows of a workgroup, keys of a tile. The first is for long sequences,
# the second for those that it holds whole: half of the first one's waves would have no rows there.
TILES = {
    (64, 64): ((256, 64),),
    (128, 128): ((256, 64), (128, 32)),
    (192, 128): ((128, 32),),
}
COLUMNS = (
    *("dtype", "hdim_q", "hdim_v", "mask", "mode", "bf16_cvt", "ts_qo", "ts_kv"),
    *("knl_name", "co_name", "abi", "threads", "grid", "combine_name", "sha256"),
    *("lds_bytes", "vgprs", "agprs", "sgprs", "spills", "compiler"),
)
FLAGS = (
    "-std=c++17",
    f"-I{SOURCES}",
    # Or the code object would hold a hash of the path that it was compiled at.
    "-fuse-cuid=none",
    # Branches that whole waves take stay as they are: made structured, they would keep old values
    # in registers and cost copies of all accumulators.
    *("-mllvm", "-structurizecfg-skip-uniform-regions=1"),
)


@dataclass(frozen=True)
class Kernel:
    """A code object: one row of a manifest.

    Attributes:
        mask: 0 none, 1 causal with the diagonal from the top left, 2 to the bottom right.
        mode: 0 gm0 (batch), 1 gm1 (group).
        bf16_cvt: how float32 becomes bf16, a key of `ROUNDINGS`; 0 where that has one way only.
        tile: one of `TILES`.
    """

    arch: Arch
    dtype: str
    hdim_q: int
    hdim_v: int
    mask: int
    mode: int
    bf16_cvt: int
    tile: tuple[int, int]

    @property
    def name(self) -> str:
        """As `fmha_fwd_hd128_bf16_causal_rtne_group`."""
        hdim = f"{self.hdim_q}" if self.hdim_q == self.hdim_v else f"{self.hdim_q}x{self.hdim_v}"
        has_roundings = self.arch == "gfx942" and self.dtype == "bf16"
        is_first = self.tile == TILES[self.hdim_q, self.hdim_v][0]
        words = (
            f"fmha_fwd_hd{hdim}_{self.dtype}",
            MASKS[self.mask],
            ROUNDINGS[self.bf16_cvt][0] if has_roundings else "",
            "" if is_first else f"q{self.tile[0]}",
            "group" if self.mode else "",
        )
        return "_".join(word for word in words if word)

    @property
    def combine_name(self) -> str:
        """Of the kernel that makes the output where keys are split."""
        return f"{self.name}_combine"

    @property
    def threads(self) -> int:
        """Of a workgroup: a wave of 64 has 32 rows of q."""
        return 2 * self.tile[0]

    @property
    def grid(self) -> str:
        return "heads_batches_tiles_splits" if self.mode else "xcd_heads_tiles_splits"

    @property
    def file_name(self) -> str:
        return self.name.removeprefix("fmha_") + ".co"

    @property
    def path(self) -> Path:
        return HSA / self.arch / FAMILY / self.file_name

    def definitions(self) -> dict[str, object]:
        """The constants of the source."""
        return {
            "DTYPE": self.dtype.upper(),
            "HDIM_Q": self.hdim_q,
            "HDIM_V": self.hdim_v,
            "MASK": self.mask,
            "GROUP": self.mode,
            "ROUNDING": ROUNDINGS[self.bf16_cvt][1],
            "TILE_ROWS": self.tile[0],
            "TILE_KEYS": self.tile[1],
            "KERNEL": f'"{self.name}"',
            "COMBINE": f'"{self.combine_name}"',
        }


@dataclass(frozen=True)
class CodeObject:
    """A built kernel."""

    kernel: Kernel
    content: bytes
    lds_bytes: int
    vgprs: int
    agprs: int
    sgprs: int
    spills: int
    compiler: str

    def row(self) -> dict[str, object]:
        """Its row of the manifest."""
        kernel = self.kernel
        return {
            "dtype": kernel.dtype,
            "hdim_q": kernel.hdim_q,
            "hdim_v": kernel.hdim_v,
            "mask": kernel.mask,
            "mode": kernel.mode,
            "bf16_cvt": kernel.bf16_cvt,
            "ts_qo": kernel.tile[0],
            "ts_kv": kernel.tile[1],
            "knl_name": kernel.name,
            "co_name": kernel.file_name,
            "abi": "jitfmha",
            "threads": kernel.threads,
            "grid": kernel.grid,
            "combine_name": kernel.combine_name,
            "sha256": hashlib.sha256(self.content).hexdigest(),
            "lds_bytes": self.lds_bytes,
            "vgprs": self.vgprs,
            "agprs": self.agprs,
            "sgprs": self.sgprs,
            "spills": self.spills,
            "compiler": self.compiler,
        }


def kernels() -> Iterator[Kernel]:
    """All kernels, in the order of the manifests."""
    for arch in ARCHS:
        for dtype, hdims in (("bf16", tuple(TILES)), ("fp16", ((64, 64), (128, 128)))):
            roundings = (0, 1, 2) if arch == "gfx942" and dtype == "bf16" else (0,)
            for hdim_q, hdim_v in hdims:
                # Group mode knows no top left.
                modes_and_masks = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 2))
                for (mode, mask), bf16_cvt, tile in product(
                    modes_and_masks, roundings, TILES[hdim_q, hdim_v]
                ):
                    yield Kernel(arch, dtype, hdim_q, hdim_v, mask, mode, bf16_cvt, tile)


def build(kernel: Kernel) -> CodeObject:
    """Compile a kernel.

    Raises:
        jitfmha.amd.device_compiler.DeviceCompilerNotFound: no compiler for AMD GPUs is installed.
        jitfmha.amd.device_compiler.DeviceCompileError: the source is refused.
    """
    definitions = [f"-D{name}={value}" for name, value in kernel.definitions().items()]
    assembly = compile_hip_to_assembly(_source(), kernel.arch, flags=(*FLAGS, *definitions))
    # Of the kernel itself; that of `combine`, which needs less of everything, follows.
    metadata: dict[str, int] = {}
    for name, value in re.findall(r"^ {2}[- ] \.(\w+): +(\d+)$", assembly, re.MULTILINE):
        metadata.setdefault(name, int(value))
    (compiler,) = re.findall(r'\.ident\s+"(clang version [\d.]+)', assembly)
    return CodeObject(
        kernel,
        assemble(assembly, kernel.arch),
        lds_bytes=metadata["group_segment_fixed_size"],
        vgprs=metadata["vgpr_count"],
        agprs=metadata["agpr_count"],
        sgprs=metadata["sgpr_count"],
        spills=metadata["vgpr_spill_count"] + metadata["sgpr_spill_count"],
        compiler=compiler,
    )


def files(code_objects: list[CodeObject]) -> dict[Path, bytes]:
    """What belongs where: code objects, a manifest for each architecture, and the arguments."""
    result = {each.kernel.path: each.content for each in code_objects}
    result[ARGUMENTS] = device_header().encode()
    for arch in dict.fromkeys(each.kernel.arch for each in code_objects):
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(each.row() for each in code_objects if each.kernel.arch == arch)
        result[HSA / arch / FAMILY / "fmha_fwd.csv"] = text.getvalue().encode()
    return result


def differing(expected: dict[Path, bytes]) -> list[str]:
    """A line for each file that is missing, differs, or does not belong here."""
    lines = [
        f"{path.relative_to(HSA)} is missing"
        if not path.is_file()
        else f"{path.relative_to(HSA)} is not what its sources give"
        for path, content in expected.items()
        if not path.is_file() or path.read_bytes() != content
    ]
    return lines + [
        f"{path.relative_to(HSA)} comes from no source" for path in _unexpected(expected)
    ]


def _unexpected(expected: dict[Path, bytes]) -> list[Path]:
    return sorted(set(HSA.glob("gfx*/**/*.*")) - set(expected))


@cache
def _source() -> str:
    return (SOURCES / "fmha_fwd.hip").read_text(encoding="utf-8")


def main() -> int:
    """Build everything; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only, and write nothing")
    arguments = parser.parse_args()
    if not arguments.check:
        ARGUMENTS.write_text(device_header(), encoding="utf-8")
    with ThreadPoolExecutor() as pool:
        expected = files(list(pool.map(build, kernels())))
    lines = differing(expected)
    if not arguments.check:
        for path in _unexpected(expected):
            path.unlink()
        for path, content in expected.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    print("\n".join(lines) or f"{len(expected)} files are what their sources give")
    return 1 if arguments.check and lines else 0


if __name__ == "__main__":
    sys.exit(main())
