"""What LLVM's assembler makes of single instructions."""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from elf import sections

from jitfmha.jit.toolchain.device_compiler import DeviceCompileError, device_compiler

_ERROR = re.compile(r"\.s:(\d+):\d+: error:")
_LINES_OF_ONE = 4  # that `assemble_words` makes of each of its lines
_FIRST = 3


def assemble_words(lines: Sequence[str], arch: str) -> list[tuple[int, ...]]:
    """The dwords of each line of assembly, one instruction a line.

    Raises:
        DeviceCompilerNotFound: no compiler is installed.
        DeviceCompileError: a line is not an instruction of `arch`.
    """
    # Every instruction begins a slot of 16 bytes, the longest there is. Padding is s_nop; labels
    # around it tell how long the instruction is.
    body = "".join(f".p2align 4\n.Lb{i}:\n{line}\n.Le{i}:\n" for i, line in enumerate(lines))
    sizes = "".join(f".long .Le{i} - .Lb{i}\n" for i in range(len(lines)))
    source = f'.text\n{body}.section .sizes, "a"\n{sizes}'
    with tempfile.TemporaryDirectory(prefix="jitfmha-") as folder:
        text, relocatable = Path(folder, "words.s"), Path(folder, "words.o")
        text.write_text(source, encoding="utf-8")
        device_compiler().assemble(text, relocatable, arch)
        image = relocatable.read_bytes()
    places = (sections(image)[name] for name in (".text", ".sizes"))
    code_bytes, lengths = (image[offset : offset + size] for offset, size in places)
    words = []
    for i in range(len(lines)):
        length = int.from_bytes(lengths[4 * i : 4 * i + 4], "little")
        code = code_bytes[16 * i : 16 * i + length]
        words.append(tuple(int.from_bytes(code[k : k + 4], "little") for k in range(0, length, 4)))
    return words


def assemble_each(lines: Sequence[str], arch: str) -> list[tuple[int, ...] | None]:
    """The dwords of each line, None where the assembler refuses it."""
    try:
        return list(assemble_words(lines, arch))
    except DeviceCompileError as error:
        found = {int(number) for number in _ERROR.findall(error.output)}
    refused = {(number - _FIRST) // _LINES_OF_ONE for number in found}
    if not refused:
        raise AssertionError("the assembler failed without naming a line")
    accepted = [line for i, line in enumerate(lines) if i not in refused]
    words = iter(assemble_words(accepted, arch))
    return [None if i in refused else next(words) for i in range(len(lines))]
