"""Trees of backward kernels in AITER's form, compiled from simple ones that honour it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from plain_tree import write_table

from jitfmha.jit.toolchain.device_compiler import compile_hip

COLUMNS = (
    *("dtype", "hdim_q", "hdim_v", "mask", "atomic32", "pssk", "pddv", "mode", "bf16_cvt"),
    *("ts_qo", "ts", "knl_name", "co_name"),
)
TS = 32  # keys of a workgroup
_SOURCE = Path(__file__).with_name("plain_fmha_bwd.hip")
_MASKS = ("", "_causal", "_causal_br", "_swa")
_CVTS = ("_rtne", "_rtna", "_rtz", "")
_ANY_CVT = 3
_WIDE = (192, 128)


class _Named:
    """A kernel with a name."""

    @property
    def symbol(self) -> str:
        """As the published code objects decorate the name.

        One kernel is there for all roundings: probabilities of plain kernels are not rounded, and
        none that makes dq for one rounding is ever launched.
        """
        name = self.name if self.bf16_cvt == _ANY_CVT else replace(self, bf16_cvt=0).name
        return f"_ZN5aiter{len(name) + 5}fmha_{name}E"

    @property
    def row(self) -> dict[str, object]:
        cells = (*self.cells, self.symbol, _file(self.dtype, self.hdims))
        return dict(zip(COLUMNS, cells, strict=True))


@dataclass(frozen=True)
class PlainGradients(_Named):
    """A row of the kernels that make gradients, named as the published ones are."""

    dtype: str = "bf16"
    hdims: tuple[int, int] = (64, 64)
    mask: int = 0
    atomic32: int = 1
    pssk: int = 1
    pddv: int = 1
    mode: int = 0
    bf16_cvt: int = _ANY_CVT
    ts: int = TS

    @property
    def name(self) -> str:
        hdim_q, hdim_v = self.hdims
        words = (
            f"bwd_hd{hdim_q}" + (f"_{hdim_v}" if hdim_q != hdim_v else ""),
            f"_{self.dtype}{_MASKS[self.mask]}",
            "_a32" if self.atomic32 else "_a16",
            _CVTS[self.bf16_cvt],
            (("", "_pddv"), ("_pssk", "_psskddv"))[self.pssk][self.pddv],
            "_group" if self.mode else "",
        )
        return "".join(words)

    @property
    def cells(self) -> tuple[object, ...]:
        return (
            *(self.dtype, *self.hdims, self.mask, self.atomic32, self.pssk, self.pddv, self.mode),
            *(self.bf16_cvt, 16, self.ts),
        )

    def instance(self, arch: str) -> str:
        """The line of the source that makes the kernel."""
        sums = "kInFloat" if self.atomic32 else "kInPlace" if arch == "gfx942" else "kShuffled"
        return f"GRADIENTS({self.symbol}, {self.mode}, {1 - self.pssk}, {self.mask}, {sums})"


@dataclass(frozen=True)
class PlainOther(_Named):
    """A row of the kernels before and after that of the gradients."""

    kind: str  # odo, dq_convert or dq_shuffle
    dtype: str = "bf16"
    hdims: tuple[int, int] = (64, 64)
    mode: int = 0
    bf16_cvt: int = _ANY_CVT

    @property
    def name(self) -> str:
        words = (
            f"bwd_hd{self.hdims[0]}_{self.kind}",
            "" if self.kind == "dq_shuffle" else f"_{self.dtype}",
            _CVTS[self.bf16_cvt],
            "_group" if self.mode else "",
        )
        return "".join(words)

    @property
    def cells(self) -> tuple[object, ...]:
        ts = 128 if self.kind == "odo" else 64
        return self.dtype, *self.hdims, 0, 0, 0, 0, self.mode, self.bf16_cvt, 0, ts

    @property
    def instance(self) -> str:
        """The line of the source that makes the kernel."""
        if self.kind == "odo":
            return f"ROW_SUMS({self.symbol}, {self.mode})"
        is_shuffled = int(self.kind == "dq_shuffle")
        return f"MAKE_DQ({self.symbol}, {self.mode}, {is_shuffled}, 0)"


def _file(dtype: str, hdims: tuple[int, int]) -> str:
    """Kernels for equal head dimensions are in one, as their code is the same."""
    return f"plain_{dtype}_wide.co" if hdims == _WIDE else f"plain_{dtype}.co"


MODES = (0, 1)
GRADIENTS: dict[str, list[PlainGradients]] = {
    "gfx942": [
        *(PlainGradients(bf16_cvt=cvt) for cvt in (0, 1, 2)),
        PlainGradients(mask=2, mode=1, bf16_cvt=0),
        PlainGradients(hdims=(128, 128), mask=3, bf16_cvt=0),
        PlainGradients(pssk=0, bf16_cvt=0),
        PlainGradients(mask=1, atomic32=0, pssk=0, bf16_cvt=0),
    ],
    "gfx950": [
        PlainGradients("fp16"),
        PlainGradients("fp16", mask=2),
        PlainGradients("fp16", mode=1),
        *(PlainGradients("fp16", (128, 128), mask=2, atomic32=atomic32) for atomic32 in (0, 1)),
        *(PlainGradients("fp16", (128, 128), mask=1, pssk=pssk) for pssk in (0, 1)),
        PlainGradients("fp16", mask=2, atomic32=0, mode=1),
        PlainGradients("fp16", (192, 128), atomic32=0),
    ],
}
OTHERS: dict[str, list[PlainOther]] = {
    "gfx942": [
        *(PlainOther("odo", mode=mode) for mode in MODES),
        *(PlainOther("dq_convert", mode=mode, bf16_cvt=cvt) for mode in MODES for cvt in (0, 1, 2)),
        *(
            PlainOther(kind, hdims=(128, 128), bf16_cvt=3 * (kind == "odo"))
            for kind in ("odo", "dq_convert")
        ),
    ],
    "gfx950": [
        *(
            PlainOther(kind, "fp16", mode=mode)
            for kind in ("odo", "dq_convert", "dq_shuffle")
            for mode in MODES
        ),
        *(PlainOther(kind, "fp16", (128, 128)) for kind in ("odo", "dq_convert", "dq_shuffle")),
        PlainOther("dq_shuffle", "fp16", (192, 192)),
    ],
}


@cache
def _compiled(arch: str, dtype: str, is_wide: bool, lines: tuple[str, ...]) -> bytes:
    """Kernels for equal head dimensions, or for unequal ones; several rows may have one."""
    text = "\n".join((_SOURCE.read_text(), *dict.fromkeys(lines), ""))
    hdim_v = _WIDE[1] if is_wide else 0
    flags = ["-O1", f"-D{dtype.upper()}=1", f"-DTS={TS}", f"-DHDIM_V={hdim_v}"]
    return compile_hip(text, arch, flags=flags)


def write_backward_tree(
    root: Path,
    arch: str,
    gradients: Sequence[PlainGradients] | None = None,
    others: Sequence[PlainOther] | None = None,
) -> Path:
    """A tree below ``root``, of all kernels of the tests or of these; gives its folder."""
    folder = root / arch / "fmha_v3_bwd"
    folder.mkdir(parents=True, exist_ok=True)
    gradients = GRADIENTS[arch] if gradients is None else gradients
    others = OTHERS[arch] if others is None else others
    lines: dict[tuple[str, bool], list[str]] = {}
    for each in gradients:
        lines.setdefault((each.dtype, each.hdims == _WIDE), []).append(each.instance(arch))
    for other in others:
        lines.setdefault((other.dtype, False), []).append(other.instance)
    for (dtype, is_wide), of_file in lines.items():
        image = _compiled(arch, dtype, is_wide, tuple(of_file))
        (folder / _file(dtype, _WIDE if is_wide else (64, 64))).write_bytes(image)
    for kind in ("odo", "dq_convert", "dq_shuffle"):
        write_rows(folder, kind, [x.row for x in others if x.kind == kind])
    write_rows(folder, "dqdkdv", [x.row for x in gradients])
    return folder


def write_rows(folder: Path, kind: str, rows: Iterable[dict[str, object]]) -> Path:
    """One manifest."""
    return write_table(folder / f"fmha_bwd_{kind}.csv", rows, COLUMNS)
