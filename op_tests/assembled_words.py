"""What LLVM's assembler makes of single instructions."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from jitfmha.jit.elf import Elf
from jitfmha.jit.toolchain.device_compiler import device_compiler


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
        elf = Elf(relocatable.read_bytes())
    sections = elf.sections_by_name()
    code_bytes, lengths = elf.content(sections[".text"]), elf.content(sections[".sizes"])
    words = []
    for i in range(len(lines)):
        length = int.from_bytes(lengths[4 * i : 4 * i + 4], "little")
        code = code_bytes[16 * i : 16 * i + length]
        words.append(tuple(int.from_bytes(code[k : k + 4], "little") for k in range(0, length, 4)))
    return words
