"""A kernel's instructions as text, by the emulator's own decoder: no other program is needed."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from ..amd.chips import Arch
from ..jit.elf import Elf
from .library import load_decoder
from .runtime import Decoder

# `s_branch 12`: how many dwords behind the next instruction it goes on.
_BRANCH = re.compile(r"(s_c?branch\w*|s_call_b64 \S+,) (-?\d+)$")
_SIXTEEN_BITS = 1 << 16
# Behind the last of these nothing is executed.
_NO_WAY_ON = re.compile(r"s_endpgm|s_branch -?\d+|s_setpc_b64 .*")


class DecodedInstruction(NamedTuple):
    """One instruction.

    Attributes:
        offset: of its first byte, from the beginning of the kernel.
        text: what it is; ``.long`` where it is none that the architecture has.
        target: the offset at which a branch goes on; None for others.
    """

    offset: int
    words: tuple[int, ...]
    text: str
    target: int | None


def disassemble(elf: Elf, symbol: str, arch: Arch) -> Iterator[DecodedInstruction]:
    """The instructions of a kernel, up to the next symbol or the end of its section.

    Raises ``ValueError`` where there is no code of that name.
    """
    code = _code_of(elf, symbol)
    words = struct.unpack(f"<{len(code) // 4}I", code[: len(code) // 4 * 4])
    decoder = Decoder(load_decoder())
    at = 0
    while at < len(words):
        # The longest instruction has four dwords.
        text, length = decoder.disassemble(arch, words[at : at + 4])
        if length == 0:
            text, length = f".long {words[at]:#010x}", 1
        found = _BRANCH.fullmatch(text)
        target = None
        if found:
            distance = (int(found[2]) + _SIXTEEN_BITS // 2) % _SIXTEEN_BITS - _SIXTEEN_BITS // 2
            target = 4 * (at + length + distance)
        yield DecodedInstruction(4 * at, words[at : at + length], text, target)
        at += length


def _code_of(elf: Elf, symbol: str) -> bytes:
    symbols = [each for each in elf.dynamic_symbols() if each.section < len(elf.sections)]
    start = next((each for each in symbols if each.name == symbol), None)
    if start is None:
        raise ValueError(f"there is no code called {symbol}")
    home = elf.sections[start.section]
    behind = [
        each.address
        for each in symbols
        if each.section == start.section and each.address > start.address
    ]
    end = min(behind, default=home.address + home.size)
    first = home.offset + start.address - home.address
    return elf.image[first : first + end - start.address].rstrip(b"\0")


def without_padding(instructions: list[DecodedInstruction]) -> list[DecodedInstruction]:
    """Leave out what compilers and linkers fill up with behind the last instruction.

    That need not be ``s_endpgm``: a loop may lie behind it, and ends with a branch.
    """
    ends = [i for i, each in enumerate(instructions) if _NO_WAY_ON.fullmatch(each.text)]
    return instructions[: ends[-1] + 1] if ends else instructions
