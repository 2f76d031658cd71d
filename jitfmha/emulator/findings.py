"""What the sanitizer found: the emulator's library in its `check` variant."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from .library import taken
from .shared_structs import FindingKind as FindingKind


class SanitizerWarning(UserWarning):
    """A kernel has faults, and nobody has asked for them."""


@dataclass(frozen=True)
class Finding:
    """A fault of a kernel, at one instruction.

    The place is that of its first occurrence.

    Attributes:
        kind: global-bounds: an access outside of the memory that the launch was given. lds-bounds,
            scratch-bounds: outside of the allocation. uninitialized: a read of an LDS word that
            nobody wrote, or of a register, where its content or what was computed from it makes an
            address, a branch, a matrix product or what is stored. wait-count: a result used or
            overwritten before the s_waitcnt that covers it. wait-states: fewer instructions between
            two than the hardware requires. lds-race: two waves, one LDS word, one of them writing,
            not what is there already, no barrier between. barrier: a wave waits at a barrier,
            another one has ended.
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

    Raises ``RuntimeError`` for a ``library`` that is not the `check` variant of the emulator.
    """
    found = []
    for row in taken(library, "findings"):
        lane = None if row["lane"] < 0 else row["lane"]
        found.append(Finding(**{**row, "workgroup": tuple(row["workgroup"]), "lane": lane}))
    return found
