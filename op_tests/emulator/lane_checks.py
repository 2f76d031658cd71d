"""Instructions on random lanes, some of them inactive, against models of one lane.

The content of a register is a value a lane, of a pair one of 64 bits; that of a longer range is a
list of such registers, of which models take and give a lane's dwords.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from models.number_formats import Format
from models.vector_alu import Environment, same
from programs import LANES, Array, Segment, parse, run

from jitfmha.emulator import Emulator

_EXEC = 0xFF00_FF0F_FFFF_FFFE


def _in_lanes(content: list[Any]) -> list[Any]:
    return list(zip(*content, strict=True)) if isinstance(content[0], list) else content


@dataclass
class LaneCheck:
    """An instruction with its registers by name, and the model: (old, *sources) -> result.

    Attributes:
        number: what the result consists of, where a NaN is as good as another.
    """

    code: str
    destination: str
    old: list[Any]
    sources: Mapping[str, list[Any]]
    model: Callable[..., Any]
    number: Format | None = None
    mode: int = Environment().bits

    def segment(self) -> Segment:
        inputs: dict[str, Array | int] = {"exec": _EXEC, "mode": self.mode}
        for name, content in {self.destination: self.old, **self.sources}.items():
            inputs[name] = np.array(content, np.uint64 if parse(name).count == 2 else np.uint32)
        return Segment(self.code, inputs, [self.destination])

    def failures(self, result: dict[str, Array]) -> list[str]:
        wrong = []
        lanes = zip(*map(_in_lanes, self.sources.values()), strict=True)
        actual = np.atleast_2d(result[self.destination]).T.tolist()
        for lane, (old, sources) in enumerate(zip(_in_lanes(self.old), lanes, strict=True)):
            expected = self.model(old, *sources) if _EXEC >> (lane % LANES) & 1 else old
            dwords = [expected] if isinstance(expected, int) else expected
            for i, (x, y) in enumerate(zip(actual[lane], dwords, strict=True)):
                if not same(self.number, x, y):
                    shown = [x for s in sources for x in ([s] if isinstance(s, int) else s[:4])]
                    listed = " ".join(f"{bits:x}" for bits in shown)
                    wrong.append(f"    lane {lane}, dword {i}: ({listed}) gave {x:x}, not {y:x}")
        return wrong


def check_lanes(emulator: Emulator, arch: str, checks: list[LaneCheck]) -> None:
    """Runs all checks in one program, and fails with what each got wrong."""
    report = []
    results = run(emulator, arch, [each.segment() for each in checks])
    for each, result in zip(checks, results, strict=True):
        if wrong := each.failures(result):
            report += [f"{each.code}  mode 0x{each.mode:x}", *wrong[:3]]
    assert not report, "\n".join(report[:60])
