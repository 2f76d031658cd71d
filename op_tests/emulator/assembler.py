"""What LLVM's assembler makes of many lines at once, refused ones included."""

import re
from collections.abc import Sequence

from assembled_words import assemble_words

from jitfmha.jit.toolchain.device_compiler import DeviceCompileError

_ERROR = re.compile(r"\.s:(\d+):\d+: error:")
_LINES_OF_ONE = 4  # that assemble_words makes of each of its lines
_FIRST = 3


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
