"""Builds the ready code objects of this folder, and the manifests that list them.

    python hsa/build.py            writes what differs
    python hsa/build.py --check    writes nothing; fails where a file differs from what is built
    python hsa/build.py '*/bwd_*'  the same of code objects whose files match a pattern

Every code object comes from `src/fmha_fwd.hip`, or of backward `src/fmha_bwd.hip`,
`src/fmha_bwd_wide.hip` or `src/fmha_bwd_hd192.hip`, specialised by constants. With patterns, other
code objects stay as they are, and so do their rows in the manifests. The compiler is part of the
result: manifests name it, and `--check` refuses to compare with another one. The kernels' arguments
are stated in `jitfmha/amd/kernel_arguments.py`; `src/arguments.h` and `src/backward_arguments.h`
are written from there.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from itertools import product
from pathlib import Path
from typing import get_args

from jitfmha.amd.chips import Arch, architecture
from jitfmha.amd.kernel_arguments import (
    DEVICE,
    DIVISOR,
    GRADIENT_TENSORS,
    JITFMHA_ARGUMENTS,
    READY_BACKWARD_ARGUMENTS,
    TENSOR_STRIDES,
    WINDOW,
)
from jitfmha.amd.manifest import FORWARD_MANIFEST, READY_BACKWARD_MANIFEST
from jitfmha.emulator.wait_states import MissingWaits, missing_waits
from jitfmha.jit.shared_struct import cpp_of
from jitfmha.jit.toolchain.device_compiler import assemble, compile_hip_to_assembly

HSA = Path(__file__).resolve().parent
SOURCES = HSA / "src"

# What the assembler makes an instruction of; other lines are labels, directives and comments.
_INSTRUCTION = re.compile(r"\s*((?:[sv]|ds|buffer|tbuffer|global|flat|scratch)_\w+)(?![\w:])")
_ENCODING = re.compile(r"_(e32|e64|dpp|sdwa)(?=$|_)")
# `s_nop 7` is what every GPU takes for as many as one instruction can be.
_MOST_WAITS = 8
ARCHS: tuple[Arch, ...] = get_args(Arch)
MASKS = {0: "", 1: "causal_top_left", 2: "causal"}
ROUNDINGS = {0: ("rtne", "nearest_even"), 1: ("rtna", "nearest_away"), 2: ("rtz", "towards_zero")}
# (hdim_q, hdim_v) -> query rows of a workgroup, keys of a tile. The first is for long sequences,
# the second for those that it holds whole: half of the first one's waves would have no rows there.
LARGE_TILE, SMALL_TILE = (256, 64), (128, 32)
TILES = {
    (64, 64): (LARGE_TILE,),
    (128, 128): (LARGE_TILE, SMALL_TILE),
    # LDS of gfx942 is too small for two buffers of large tiles.
    (192, 128): (SMALL_TILE,),
}
GFX950_TILES = TILES | {(192, 128): (LARGE_TILE, SMALL_TILE)}
FP8 = "fp8bf16"  # 8-bit inputs, and a bf16 output
FP8_TILES: dict[Arch, dict[tuple[int, int], tuple[int, int]]] = {
    "gfx942": {(128, 128): (256, 64)},
    "gfx950": {(128, 128): (256, 128), (256, 256): (256, 64)},
}
HDIMS: dict[str, tuple[tuple[int, int], ...]] = {
    "bf16": tuple(TILES),
    "fp16": ((64, 64), (128, 128)),
}
# Of backward: keys of a workgroup; queries and threads of one of the kernels before and after.
BACKWARD_KEYS = 128
# Of src/fmha_bwd_wide.hip: keys at a time; how often, where there is a mask.
WIDE_KEYS, WIDE_MASKED_BLOCKS = 256, 2
EDGE_QUERIES, EDGE_THREADS = 128, 256
# (hdim_q, hdim_v) -> source and threads of a workgroup: two waves have 32 keys, or one.
BACKWARD_HDIMS = {
    (64, 64): ("fmha_bwd.hip", 512),
    (128, 128): ("fmha_bwd.hip", 512),
    (192, 128): ("fmha_bwd_hd192.hip", 256),
    (192, 192): ("fmha_bwd_hd192.hip", 256),
}
# Of gfx950, too. By the cost model compiled kernels are quicker there for larger head dimensions.
NARROW_HDIMS = ((64, 64), (128, 128))
FLAGS = (
    "-std=c++17",
    f"-I{SOURCES}",
    # Or the code object would hold a hash of the path that it was compiled at.
    "-fuse-cuid=none",
    # Branches that whole waves take stay as they are: made structured, they would keep old values
    # in registers and cost copies of all accumulators.
    *("-mllvm", "-structurizecfg-skip-uniform-regions=1"),
)
# Packed float32 waits for matrix instructions, which run beside the softmax all the time.
FORWARD_FLAGS = ("-fno-slp-vectorize",)


@dataclass(frozen=True)
class Kernel:
    """A code object: one row of a manifest.

    Attributes:
        mask: 0 none, 1 causal with the diagonal from the top left, 2 to the bottom right.
        mode: 0 gm0 (batch), 1 gm1 (group).
        bf16_cvt: how float32 becomes bf16, a key of `ROUNDINGS`; 0 where that has one way only.
        tile: one of `TILES` or `GFX950_TILES`, or of 8-bit inputs one of `FP8_TILES`.
    """

    arch: Arch
    dtype: str
    hdim_q: int
    hdim_v: int
    mask: int
    mode: int
    bf16_cvt: int
    tile: tuple[int, int]

    flags = FORWARD_FLAGS
    arguments = JITFMHA_ARGUMENTS
    source = "fmha_fwd.hip"

    @property
    def name(self) -> str:
        """As `fmha_fwd_hd128_bf16_causal_rtne_group`."""
        is_first = self.tile == _tiles(self.arch, self.dtype, self.hdim_q, self.hdim_v)[0]
        words = (
            f"fmha_fwd_hd{hdim_word(self.hdim_q, self.hdim_v)}_{self.dtype}",
            MASKS[self.mask],
            rounding_word(self.arch, self.dtype, self.bf16_cvt),
            "" if is_first else f"q{self.tile[0]}",
            "group" if self.mode else "",
        )
        return "_".join(word for word in words if word)

    @property
    def combine_name(self) -> str:
        """Of the kernel that makes the output where keys are split."""
        return f"{self.name}_combine"

    @property
    def symbols(self) -> tuple[str, ...]:
        """The kernels that the code object holds."""
        return (self.name, self.combine_name)

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
        return self.manifest.parent / self.file_name

    @property
    def manifest(self) -> Path:
        return HSA / self.arch / FORWARD_MANIFEST

    def definitions(self) -> dict[str, object]:
        """The constants of the source."""
        return {
            "HAS_8_BITS": int(self.dtype == FP8),
            "DTYPE": "BF16" if self.dtype == FP8 else self.dtype.upper(),
            "HDIM_Q": self.hdim_q,
            "HDIM_V": self.hdim_v,
            "ROUNDING": ROUNDINGS[self.bf16_cvt][1],
            "MASK": self.mask,
            "GROUP": self.mode,
            "TILE_ROWS": self.tile[0],
            "TILE_KEYS": self.tile[1],
            "PAGED": 0,
            "WIDENS_KEYS": 0,
            "KERNEL": f'"{self.name}"',
            "COMBINE": f'"{self.combine_name}"',
        }

    def cells(self) -> dict[str, object]:
        """What its row of the manifest says of it."""
        return {
            "dtype": self.dtype,
            "hdim_q": self.hdim_q,
            "hdim_v": self.hdim_v,
            "mask": self.mask,
            "mode": self.mode,
            "bf16_cvt": self.bf16_cvt,
            "ts_qo": self.tile[0],
            "ts_kv": self.tile[1],
            "knl_name": self.name,
            "co_name": self.file_name,
            "abi": "jitfmha",
            "threads": self.threads,
            "grid": self.grid,
            "combine_name": self.combine_name,
        }


@dataclass(frozen=True)
class BackwardKernels:
    """A code object with the three kernels of a backward pass: one row of a manifest.

    Attributes:
        is_masked: whether there may be a mask; which one is an argument.
        mode, bf16_cvt: those of `Kernel`.
        is_deterministic: whether dq is added up in one order.
        is_wide: whether a workgroup has `WIDE_KEYS`, for which LDS of gfx950 is large enough.
    """

    arch: Arch
    dtype: str
    hdim_q: int
    hdim_v: int
    is_masked: bool
    mode: int
    bf16_cvt: int
    is_deterministic: bool
    is_wide: bool = False

    flags = ()
    arguments = READY_BACKWARD_ARGUMENTS

    @property
    def source(self) -> str:
        """The file in `src`."""
        if self.is_wide:
            return "fmha_bwd_wide.hip"
        return BACKWARD_HDIMS[self.hdim_q, self.hdim_v][0]

    @property
    def threads(self) -> int:
        """Of a workgroup of the kernel in the middle."""
        return BACKWARD_HDIMS[self.hdim_q, self.hdim_v][1]

    @property
    def keys(self) -> int:
        """Of a workgroup of the kernel in the middle."""
        if not self.is_wide:
            return BACKWARD_KEYS
        has_several = self.is_masked and not self.is_deterministic
        return WIDE_KEYS * (WIDE_MASKED_BLOCKS if has_several else 1)

    @property
    def name(self) -> str:
        """As `fmha_bwd_hd128_bf16_masked_rtne_group`: that of the kernel in the middle."""
        words = (
            f"fmha_bwd_hd{hdim_word(self.hdim_q, self.hdim_v)}_{self.dtype}",
            "wide" if self.is_wide else "",
            "deterministic" if self.is_deterministic else "",
            "masked" if self.is_masked else "",
            rounding_word(self.arch, self.dtype, self.bf16_cvt),
            "group" if self.mode else "",
        )
        return "_".join(word for word in words if word)

    @property
    def row_sums_name(self) -> str:
        """Of the kernel before it."""
        return f"{self.name}_row_sums"

    @property
    def round_dq_name(self) -> str:
        """Of the kernel after it."""
        return f"{self.name}_round_dq"

    @property
    def symbols(self) -> tuple[str, ...]:
        """The kernels that the code object holds."""
        return (self.row_sums_name, self.name, self.round_dq_name)

    @property
    def file_name(self) -> str:
        return self.name.removeprefix("fmha_") + ".co"

    @property
    def path(self) -> Path:
        return self.manifest.parent / self.file_name

    @property
    def manifest(self) -> Path:
        return HSA / self.arch / READY_BACKWARD_MANIFEST

    def definitions(self) -> dict[str, object]:
        """The constants of the source."""
        return {
            "DTYPE": self.dtype.upper(),
            "HDIM_Q": self.hdim_q,
            "HDIM_V": self.hdim_v,
            "MASKED": int(self.is_masked),
            "GROUP": self.mode,
            "ROUNDING": ROUNDINGS[self.bf16_cvt][1],
            "DETERMINISTIC": int(self.is_deterministic),
            "KERNEL": f'"{self.name}"',
            "ROW_SUMS": f'"{self.row_sums_name}"',
            "ROUND_DQ": f'"{self.round_dq_name}"',
        }

    def cells(self) -> dict[str, object]:
        """What its row of the manifest says of it."""
        return {
            "dtype": self.dtype,
            "hdim_q": self.hdim_q,
            "hdim_v": self.hdim_v,
            "masked": int(self.is_masked),
            "mode": self.mode,
            "bf16_cvt": self.bf16_cvt,
            "deterministic": int(self.is_deterministic),
            "keys": self.keys,
            "queries": EDGE_QUERIES,
            "knl_name": self.name,
            "co_name": self.file_name,
            "threads": self.threads,
            "edge_threads": EDGE_THREADS,
        }


AnyKernel = Kernel | BackwardKernels


def hdim_word(hdim_q: int, hdim_v: int) -> str:
    """What a name says of head dimensions."""
    return f"{hdim_q}" if hdim_q == hdim_v else f"{hdim_q}x{hdim_v}"


def rounding_word(arch: Arch, dtype: str, bf16_cvt: int) -> str:
    """What a name says of a rounding; nothing where there is one only."""
    return ROUNDINGS[bf16_cvt][0] if architecture(arch).has_roundings(dtype) else ""


@dataclass(frozen=True)
class CodeObject:
    """A built code object."""

    kernel: AnyKernel
    content: bytes
    compiler: str

    def row(self) -> dict[str, object]:
        """Its row of the manifest."""
        return {
            **self.kernel.cells(),
            "layout": self.kernel.arguments.layout,
            # Half of it, which a wheel has room for; it finds damage, and is no signature.
            "sha256": hashlib.sha256(self.content).hexdigest()[:32],
            "compiler": self.compiler,
        }


def _tiles(arch: Arch, dtype: str, hdim_q: int, hdim_v: int) -> Sequence[tuple[int, int]]:
    if dtype == FP8:
        return (FP8_TILES[arch][hdim_q, hdim_v],)
    return (GFX950_TILES if arch == "gfx950" else TILES)[hdim_q, hdim_v]


def _roundings(arch: Arch, dtype: str) -> Sequence[int]:
    return tuple(ROUNDINGS) if architecture(arch).has_roundings(dtype) else (0,)


def kernels() -> Iterator[AnyKernel]:
    """All kernels, in the order of the manifests."""
    for arch in ARCHS:
        yield from _backward_kernels(arch)
        hdims_of = HDIMS | {FP8: tuple(FP8_TILES[arch])}
        for dtype, hdims in hdims_of.items():
            roundings = _roundings(arch, dtype)
            for hdim_q, hdim_v in hdims:
                # Group mode knows no top left.
                modes_and_masks = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 2))
                for (mode, mask), bf16_cvt, tile in product(
                    modes_and_masks, roundings, _tiles(arch, dtype, hdim_q, hdim_v)
                ):
                    yield Kernel(arch, dtype, hdim_q, hdim_v, mask, mode, bf16_cvt, tile)


def _backward_kernels(arch: Arch) -> Iterator[BackwardKernels]:
    for dtype in ("bf16", "fp16"):
        roundings = _roundings(arch, dtype)
        for is_deterministic, (hdim_q, hdim_v), mode, is_masked, bf16_cvt in product(
            (False, True), BACKWARD_HDIMS, (0, 1), (False, True), roundings
        ):
            if arch == "gfx950" and (hdim_q, hdim_v) not in NARROW_HDIMS:
                continue
            of_all = arch, dtype, hdim_q, hdim_v, is_masked, mode, bf16_cvt, is_deterministic
            # Those with more keys come first, as the choice among them has it.
            if arch == "gfx950" and hdim_q == 128:
                yield BackwardKernels(*of_all, is_wide=True)
            yield BackwardKernels(*of_all)


def compile_to_assembly(kernel: AnyKernel) -> str:
    """What the compiler makes of a kernel's source, as text.

    Raises:
        DeviceCompilerNotFound: no compiler for AMD GPUs is installed.
        DeviceCompileError: the source is refused.
    """
    definitions = [f"-D{name}={value}" for name, value in kernel.definitions().items()]
    flags = (*FLAGS, *kernel.flags, *definitions)
    return compile_hip_to_assembly(_source(kernel.source), kernel.arch, flags=flags)


def build(kernel: AnyKernel) -> CodeObject:
    """Compile a kernel, with the wait states that the compiler left out on some path.

    Raises what `compile_to_assembly` and `assemble_with_waits` do.
    """
    assembly, content = assemble_with_waits(compile_to_assembly(kernel), kernel.arch)
    (compiler,) = re.findall(r'\.ident\s+"(clang version [\d.]+)', assembly)
    return CodeObject(kernel, content, compiler)


def assemble_with_waits(assembly: str, arch: Arch) -> tuple[str, bytes]:
    """Assemble what a compiler wrote, with an ``s_nop`` before each instruction that comes too
    early; the text with these, and its code object.

    Raises what `assemble` does, and ``RuntimeError`` where only a run says how the code goes on.
    """
    before = None
    while True:
        code_object = assemble(assembly, arch)
        places = missing_waits(code_object)
        if not places:
            return assembly, code_object
        left = sum(place.missing for place in places)
        if not all(place.missing for place in places) or left == before:
            raise RuntimeError("\n".join(map(str, places)))
        assembly, before = _with_waits(assembly, places), left


def _with_waits(assembly: str, places: Sequence[MissingWaits]) -> str:
    """The text with what the first place of each kernel lacks, by which later ones gain, too."""
    lines = assembly.splitlines(keepends=True)
    for place in {place.kernel: place for place in reversed(places)}.values():
        at = _line_of(lines, place)
        waits = (min(left, _MOST_WAITS) for left in range(place.missing, 0, -_MOST_WAITS))
        lines[at:at] = [f"\ts_nop {each - 1}\n" for each in waits]
    return "".join(lines)


def _line_of(lines: Sequence[str], place: MissingWaits) -> int:
    start = lines.index(next(line for line in lines if line.startswith(f"{place.kernel}:")))
    found = ((at, _INSTRUCTION.match(lines[at])) for at in range(start, len(lines)))
    instructions = [(at, match[1]) for at, match in found if match]
    at, mnemonic = instructions[place.number]
    expected = place.instruction.split(maxsplit=1)[0]
    if _ENCODING.sub("", mnemonic) != _ENCODING.sub("", expected):
        raise RuntimeError(f"{place} is `{lines[at].strip()}` in the listing")
    return at


def device_header() -> str:
    """Return the text of ``hsa/src/arguments.h``."""
    return f"""\
// The arguments of the forward kernels. Written by hsa/build.py: jitfmha/amd/kernel_arguments.py
// states them, says what they mean, and gives them to the host's launcher too.
#pragma once

#include "address_spaces.h"

{DIVISOR.cpp(DEVICE)}

{JITFMHA_ARGUMENTS.cpp(DEVICE)}
"""


def backward_device_header() -> str:
    """Return the text of ``hsa/src/backward_arguments.h``."""
    structs = TENSOR_STRIDES, GRADIENT_TENSORS, WINDOW, READY_BACKWARD_ARGUMENTS
    return f"""\
// The arguments of the backward kernels. Written by hsa/build.py, as arguments.h is.
#pragma once

#include "arguments.h"

{cpp_of(structs, DEVICE)}
"""


# The headers that are written, and what is in them.
ARGUMENTS = {
    SOURCES / "arguments.h": device_header,
    SOURCES / "backward_arguments.h": backward_device_header,
}


def files(code_objects: list[CodeObject]) -> dict[Path, bytes]:
    """What belongs where: code objects, their manifests, and the arguments.

    Code objects that are not built, and their rows, are what is there.
    """
    built = {each.kernel.path: each for each in code_objects}
    result = {path: each.content for path, each in built.items()}
    result |= {path: header().encode() for path, header in ARGUMENTS.items()}
    for manifest in dict.fromkeys(each.kernel.manifest for each in code_objects):
        mine = [each.path for each in kernels() if each.manifest == manifest]
        others = _rows_of(manifest) if any(path not in built for path in mine) else {}
        rows = [built[path].row() if path in built else others[path.name] for path in mine]
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        result[manifest] = text.getvalue().encode()
    return result


def _rows_of(manifest: Path) -> dict[str, dict[str, object]]:
    """The rows that are there, by the names of files."""
    with manifest.open(newline="", encoding="utf-8") as text:
        return {row["co_name"]: dict(row) for row in csv.DictReader(text)}


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
    known = {path for each in kernels() for path in (each.path, each.manifest)}
    return sorted(set(HSA.glob("gfx*/**/*.*")) - known - set(expected))


def _matches(kernel: AnyKernel, patterns: Sequence[str]) -> bool:
    name = str(kernel.path.relative_to(HSA))
    return not patterns or any(fnmatch(name, pattern) for pattern in patterns)


@cache
def _source(name: str) -> str:
    return (SOURCES / name).read_text(encoding="utf-8")


def main() -> int:
    """Build everything; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only, and write nothing")
    parser.add_argument("pattern", nargs="*", help="files below this folder, as 'gfx942/*/fwd_*'")
    arguments = parser.parse_args()
    chosen = [each for each in kernels() if _matches(each, arguments.pattern)]
    if not chosen:
        parser.error(f"no code object matches {' or '.join(arguments.pattern)}")
    if not arguments.check:
        for path, header in ARGUMENTS.items():
            path.write_text(header(), encoding="utf-8")
    with ThreadPoolExecutor() as pool:
        expected = files(list(pool.map(build, chosen)))
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
