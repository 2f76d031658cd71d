"""hiprtc, ROCm's compiler in a library, in a process of its own.

Asked for an architecture that it does not know, hiprtc may end the process that it is in, and its
LLVM should not meet those that torch and Triton have loaded. So this file runs as a program, in an
interpreter that finds nothing but the standard library:

    python -I -S hiprtc_process.py describe LIBRARY >ANSWER
    python -I -S hiprtc_process.py compile LIBRARY <PROGRAM >ANSWER

The program is a `Program`; `describe` and `compile_program` say what the answers hold, all in JSON.
Source of the functions: ROCm's header `hip/hiprtc.h`.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

_FUNCTIONS = (
    *("hiprtcVersion", "hiprtcGetErrorString", "hiprtcCreateProgram", "hiprtcDestroyProgram"),
    *("hiprtcCompileProgram", "hiprtcGetProgramLogSize", "hiprtcGetProgramLog"),
    *("hiprtcGetCodeSize", "hiprtcGetCode"),
)
# Everything that decides what comes out: the front, its own headers, and the compiler behind it.
_COMPILER_LIBRARIES = re.compile(r"lib(hiprtc|amdhip64|amd_comgr|LLVM|clang)[^/]*\.so[^/]*")
_MAPS = Path("/proc/self/maps")


class Program(TypedDict):
    """What is compiled, with file names and texts for `#include "NAME"`, and clang's options."""

    name: str
    source: str
    headers: dict[str, str]
    options: list[str]


class HiprtcError(RuntimeError):
    """A function of hiprtc has failed; the text is hiprtc's own."""


class Hiprtc:
    """The functions of one hiprtc, loaded into this process."""

    def __init__(self, path: str) -> None:
        """Raises ``OSError`` for a file that is no library, or not hiprtc."""
        self._library = library = ctypes.CDLL(path)
        for name in _FUNCTIONS:
            if not hasattr(library, name):
                raise OSError(f"{path} has no function {name}")
        library.hiprtcGetErrorString.restype = ctypes.c_char_p

    @contextmanager
    def program(
        self, name: str, source: str, headers: Mapping[str, str]
    ) -> Iterator[ctypes.c_void_p]:
        """A program that is not compiled yet; it is gone after the `with` block."""
        program = ctypes.c_void_p()
        self.call(
            "hiprtcCreateProgram",
            ctypes.byref(program),
            source.encode(),
            name.encode(),
            len(headers),
            _strings(list(headers.values())),
            _strings(list(headers)),
        )
        try:
            yield program
        finally:
            self.call("hiprtcDestroyProgram", ctypes.byref(program))

    def content(self, get: str, program: ctypes.c_void_p) -> bytes:
        """What the function ``get`` writes, whose size the one named after it tells."""
        size = ctypes.c_size_t()
        self.call(f"{get}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        if size.value:
            self.call(get, program, content)
        return content.raw

    def call(self, name: str, *arguments: object) -> None:
        """Call a function; raises ``HiprtcError`` where it says that it failed."""
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            meaning = self._library.hiprtcGetErrorString(result) or b"an unknown error"
            raise HiprtcError(f"{name}: {meaning.decode(errors='replace')} ({result})")


def describe(path: str) -> dict[str, Any]:
    """The version of the hiprtc at `path`, major and minor, and the files of its libraries.

    The version is 9.0 in every release up to ROCm 7.
    """
    hiprtc = Hiprtc(path)
    # The compiler behind it is loaded with the first program.
    with hiprtc.program("nothing.hip", "// nothing\n", {}):
        files = _mapped_libraries()
    major, minor = ctypes.c_int(), ctypes.c_int()
    hiprtc.call("hiprtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return {"version": (major.value, minor.value), "files": files}


def compile_program(path: str, program: Program) -> dict[str, Any]:
    """What the hiprtc at `path` makes of a program: code, in base64; log; and error.

    The error is the function that failed and hiprtc's name for why; it or the code is empty.
    """
    hiprtc = Hiprtc(path)
    with hiprtc.program(program["name"], program["source"], program["headers"]) as created:
        try:
            options = program["options"]
            hiprtc.call("hiprtcCompileProgram", created, len(options), _strings(options))
            code, error = hiprtc.content("hiprtcGetCode", created), ""
        except HiprtcError as failure:
            code, error = b"", str(failure)
        log = hiprtc.content("hiprtcGetProgramLog", created).rstrip(b"\0")
    return {
        "code": base64.b64encode(code).decode(),
        "log": log.decode(errors="replace"),
        "error": error,
    }


def _strings(texts: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def _mapped_libraries() -> list[str]:
    maps = _MAPS.read_text(encoding="utf-8", errors="surrogateescape")
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines()}
    return sorted(x for x in paths if _COMPILER_LIBRARIES.fullmatch(os.path.basename(x)))


def main() -> None:
    """Answer one question, which the arguments and stdin ask, on stdout."""
    # What the library prints is for people, and goes where errors go.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    what, path = sys.argv[1:]
    try:
        if what == "describe":
            answer = describe(path)
        else:
            answer = compile_program(path, json.load(sys.stdin))
    except (HiprtcError, OSError) as error:
        sys.exit(str(error))
    with answers:
        json.dump(answer, answers)


if __name__ == "__main__":
    main()
