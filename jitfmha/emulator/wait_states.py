"""Wait states that a path through a code object lacks, found without running it.

What must wait for what is the sanitizer's table (`checks/wait_states.inc`). Where compilers leave
wait states out, and why, says `checks/paths.cpp`.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass

from .library import load


@dataclass(frozen=True)
class MissingWaits:
    """An instruction that comes too early on some path to it.

    Attributes:
        kernel: its name.
        address: of the instruction, as symbol+0xoffset.
        number: of the instruction, counted from the kernel's first one.
        instruction: its text.
        missing: wait states, on the worst path. 0: only a run says where the code goes on behind
            it, so that nothing is known of what comes then.
        message: what it must keep away from.
    """

    kernel: str
    address: str
    number: int
    instruction: str
    missing: int
    message: str

    def __str__(self) -> str:
        return f"{self.address}: `{self.instruction}`: {self.message}"


def missing_waits(code_object: bytes) -> list[MissingWaits]:
    """The places of a code object that lack wait states, in the order of kernels and addresses.

    Builds the emulator's sanitizer where the cache lacks it. Raises ``ValueError`` for what is no
    code object of gfx942 or gfx950.
    """
    check = load("check").jitfmha_emulator_check_paths
    check.restype, check.argtypes = ctypes.c_char_p, [ctypes.c_char_p, ctypes.c_size_t]
    found = json.loads(check(code_object, len(code_object)))
    if isinstance(found, dict):
        raise ValueError(found["error"])
    return [MissingWaits(**each) for each in found]
