"""Trees of code objects in the plain form, assembled from a simple kernel that honours it."""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from jitfmha.jit.toolchain.device_compiler import compile_hip, compile_hip_to_assembly

COLUMNS = (
    *("dtype", "hdim_q", "hdim_v", "mask", "mode", "bf16_cvt"),
    *("ts_qo", "ts_kv", "knl_name", "co_name"),
)
PLAIN_NAME = "attend_plainly"
UseTree = Callable[..., None]
"""The type of the fixture ``use_tree``: ``use_tree(root)``, or with another variable."""
_SOURCE = Path(__file__).with_name("plain_fmha_fwd.hip")
_DTYPES = {"bf16": "BF16", "fp16": "FP16", "fp8bf16": "FP8"}
_CVTS = ("rtne", "rtna", "rtz")


@dataclass(frozen=True)
class PlainKernel:
    """One row of a manifest and the kernel behind it."""

    dtype: str = "bf16"
    hdim_q: int = 128
    hdim_v: int = 128
    mask: int = 0
    mode: int = 0
    bf16_cvt: int = 0
    ts_qo: int = 64
    ts_kv: int = 32

    @property
    def name(self) -> str:
        mask = ("", "_causal_tl", "_causal")[self.mask]
        group = "_group" if self.mode else ""
        cvt = _CVTS[self.bf16_cvt]
        return f"fmha_fwd_hd{self.hdim_q}x{self.hdim_v}_{self.dtype}{mask}_{cvt}{group}"

    @property
    def symbol(self) -> str:
        return f"_ZN5aiter{len(self.name)}{self.name}E"

    @property
    def file(self) -> str:
        return f"{self.name.removeprefix('fmha_')}.co"

    @property
    def threads(self) -> int:
        return 256 if (self.hdim_q, self.hdim_v) == (192, 128) else 512

    @property
    def row(self) -> dict[str, object]:
        values = (
            *(self.dtype, self.hdim_q, self.hdim_v, self.mask, self.mode, self.bf16_cvt),
            *(self.ts_qo, self.ts_kv, self.symbol, self.file),
        )
        return dict(zip(COLUMNS, values, strict=True))

    def code_object(self, arch: str) -> bytes:
        """Compiled once in a process."""
        return _compiled(replace(self, ts_kv=0), arch)


@cache
def plain_listing(kernel: PlainKernel, arch: str) -> str:
    """What the compiler writes with -S; the kernel is called PLAIN_NAME."""
    return compile_hip_to_assembly(
        _SOURCE.read_text(), arch, flags=_definitions(kernel, PLAIN_NAME)
    )


def _definitions(kernel: PlainKernel, symbol: str) -> list[str]:
    """What the kernel's text is compiled with."""
    values = {
        "KERNEL": symbol,
        _DTYPES[kernel.dtype]: 1,
        "HDIM_Q": kernel.hdim_q,
        "HDIM_V": kernel.hdim_v,
        "MASK": kernel.mask,
        "GROUP": kernel.mode,
        "TS_QO": kernel.ts_qo,
        "THREADS": kernel.threads,
        "CVT": kernel.bf16_cvt,
    }
    return [f"-D{name}={value}" for name, value in values.items()]


@cache
def _compiled(kernel: PlainKernel, arch: str) -> bytes:
    return compile_hip(_SOURCE.read_text(), arch, flags=_definitions(kernel, kernel.symbol))


_BF16 = [PlainKernel(mask=mask, mode=mode) for mask in (0, 2) for mode in (0, 1)]
_WIDE = [
    PlainKernel(hdim_q=192, mask=mask, mode=mode, ts_qo=32) for mask in (0, 2) for mode in (0, 1)
]
FULL_TREE: dict[str, list[PlainKernel]] = {
    "gfx942": [
        *_BF16,
        *_WIDE,
        PlainKernel(mask=1),
        *(PlainKernel(mode=mode, bf16_cvt=cvt) for mode in (0, 1) for cvt in (1, 2)),
        *(PlainKernel("fp16", 64, 64, mode=mode) for mode in (0, 1)),
        *(PlainKernel("fp8bf16", mode=mode, bf16_cvt=1) for mode in (0, 1)),
    ],
    "gfx950": [
        *_BF16,
        *_WIDE,
        *(PlainKernel("fp8bf16", hdim, hdim, mode=mode) for hdim in (128, 256) for mode in (0, 1)),
    ],
}
"""What the tests launch, in one tree, so that one launcher for a chip and mode is enough."""


def write_tree(
    root: Path,
    arch: str,
    kernels: Iterable[PlainKernel],
    *,
    chips: Sequence[str] = ("MI300", "MI308"),
    columns: Sequence[str] = COLUMNS,
) -> Path:
    """A whole tree below ``root``; gives the manifest's path."""
    kernels = list(kernels)
    folder = root / arch / "fmha_v3_fwd"
    for place in [folder / chip for chip in chips] if arch == "gfx942" else [folder]:
        place.mkdir(parents=True, exist_ok=True)
        for kernel in kernels:
            (place / kernel.file).write_bytes(kernel.code_object(arch))
    return write_manifest(folder, [kernel.row for kernel in kernels], columns=columns)


def write_manifest(
    folder: Path, rows: Iterable[dict[str, object]], *, columns: Sequence[str] = COLUMNS
) -> Path:
    """The manifest of a folder, with these columns in this order."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_table(folder / "fmha_fwd.csv", rows, columns)


def write_table(path: Path, rows: Iterable[dict[str, object]], columns: Sequence[str]) -> Path:
    """A file of comma-separated values."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path
