"""What the sanitizer found: the emulator's library in its `check` variant."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, get_args

from .shared_structs import FINDING_ROW, FindingKind

__all__ = ["Finding", "FindingKind", "SanitizerWarning", "take_findings"]

_KINDS: tuple[FindingKind, ...] = get_args(FindingKind)
_MOST_FINDINGS = 1000


class SanitizerWarning(UserWarning):
    """A kernel has faults, and nobody has asked for them."""


@dataclass(frozen=True)
class Finding:
    """A fault of a kernel, at one instruction.

    The place is that of its first occurrence.

    Attributes:
        kind: global-bounds: an access outside of the memory that the launch was given. lds-bounds,
            scratch-bounds: outside of the allocation. uninitialized: a read of a register, an
            accumulator or an LDS word that nobody wrote. wait-count: a result used or overwritten
            before the s_waitcnt that covers it. wait-states: fewer instructions between two than
            the hardware requires. lds-race: two waves, one LDS word, one of them writing, no
            barrier between. barrier: a wave waits at a barrier, another one has ended.
        kernel: its name.
        address: of the instruction, as symbol+0xoffset.
        instruction: its text.
        workgroup: x, y, z.
        wave: in the workgroup.
        lane: None where it is the whole wave.
        count: how often, over all waves and launches.
        message: what was wrong.
    """

    kind: FindingKind
    kernel: str
    address: str
    instruction: str
    workgroup: tuple[int, int, int]
    wave: int
    lane: int | None
    count: int
    message: str

    def __str__(self) -> str:
        lane = "" if self.lane is None else f", lane {self.lane}"
        times = "" if self.count == 1 else f" ({self.count} times)"
        return (
            f"{self.kind}: kernel {self.kernel}, at {self.address}: `{self.instruction}`, "
            f"workgroup {self.workgroup}, wave {self.wave}{lane}: {self.message}{times}"
        )


def take_findings(library: ctypes.CDLL) -> list[Finding]:
    """The findings of this thread's launches since the last call, at most 1000.

    Args:
        library: the `check` variant of the emulator.

    Raises:
        RuntimeError: another variant.
    """
    try:
        take = library.jitfmha_emulator_take_findings
    except AttributeError:
        raise RuntimeError("this variant of the emulator does not check; load 'check'") from None
    take.restype = ctypes.c_int
    take.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    rows = (FINDING_ROW.ctype * _MOST_FINDINGS)()
    left_out = ctypes.c_uint64()
    count = take(rows, len(rows), ctypes.byref(left_out))
    return [_finding(rows[i]) for i in range(count)]


def _finding(row: Any) -> Finding:
    return Finding(
        kind=_KINDS[row.kind],
        kernel=row.kernel.decode(errors="replace"),
        address=row.address.decode(errors="replace"),
        instruction=row.instruction.decode(errors="replace"),
        workgroup=(row.workgroup[0], row.workgroup[1], row.workgroup[2]),
        wave=row.wave,
        lane=None if row.lane < 0 else row.lane,
        count=row.count,
        message=row.message.decode(errors="replace"),
    )
