"""Wait states that a path through a code object lacks: found without running it, and put in.

What must wait for what is the sanitizer's table (`checks/wait_states.inc`). Where compilers leave
wait states out, and why, says `checks/paths.cpp`.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..amd.chips import Arch
from ..jit.toolchain.device_compiler import assemble
from .library import load

# What the assembler makes an instruction of; other lines are labels, directives and comments.
_INSTRUCTION = re.compile(r"\s*((?:[sv]|ds|buffer|tbuffer|global|flat|scratch)_\w+)(?![\w:])")
_ENCODING = re.compile(r"_(e32|e64|dpp|sdwa)(?=$|_)")
# `s_nop 7` is what every GPU takes for as many as one instruction can be.
_MOST_WAITS = 8


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
