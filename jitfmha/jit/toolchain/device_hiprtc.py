"""HIP C++ for AMD GPUs by hiprtc, the compiler in a library that every PyTorch for ROCm brings.

It lies beside the HIP runtime, with clang and lld inside of it, and is asked in a process of its
own (see `hiprtc_process.py`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from ..elf import build_id
from ..errors import BuildError, CompileFailure
from ..spec import BuildSpec
from ..status import is_verbose, say
from . import hiprtc_process
from .compiling import compile_failure, debugger_flags, isolated_python
from .device_compiler import CODE_OBJECT_VERSION_FLAG, KEYWORDS, LANGUAGE_FLAGS, architecture
from .hip_libraries import folders_of_torch_runtime
from .hiprtc_process import Program

# Wheels of PyTorch may rename it, to `libhiprtc-<hash>.so`.
_NAMES = "libhiprtc*.so*"
_ITS_HEADERS = "libhiprtc-builtins"
# After those that hiprtc has of its own, so that these hold. Each code object has a symbol that
# clang would name after a temporary folder.
_OPTIONS = (*LANGUAGE_FLAGS, CODE_OBJECT_VERSION_FLAG, "-cuid=0")
# What would change the outcome without a trace in the options.
_HIDDEN_OPTIONS = ("HIPRTC_COMPILE_OPTIONS_APPEND", "HIPRTC_LINK_OPTIONS_APPEND")


class HiprtcNotUsable(RuntimeError):
    """There is no hiprtc here, or it does not run; the message says what was tried."""


class DeviceHiprtc(NamedTuple):
    """The toolchain around a hiprtc that answered. All sources are one program for it.

    ``contents`` has of each library that it consists of the path and what tells its content from
    any other; ``why`` says why it was taken.
    """

    path: str
    why: str
    version: str
    contents: tuple[tuple[str, str], ...]

    @property
    def identity(self) -> tuple[str, ...]:
        contents = (word for pair in self.contents for word in pair)
        return ("hiprtc", self.path, self.version, *contents, *_OPTIONS)

    def compile(self, spec: BuildSpec, workspace: Path, destination: Path) -> bytes:
        """Compile all sources as one program, as the protocol says."""
        architecture(spec)
        if spec.ldflags:
            raise BuildError(
                f"{spec.name} has the linker flags {list(spec.ldflags)}, and hiprtc takes none"
            )
        program = _program(spec, workspace / "sources", destination)
        if is_verbose():
            say(f"{self} {' '.join(program['options'])} {' '.join(spec.compiled_sources)}")
        try:
            answer = _ask("compile", self.path, workspace, program)
        except HiprtcNotUsable as error:
            answer = {"log": "", "error": f"error: {error}"}
        if not answer["error"]:
            return base64.b64decode(answer["code"])
        output = f"{answer['log']}\n{answer['error']}".strip()
        raise compile_failure(output) if workspace.is_dir() else CompileFailure(output)

    def __str__(self) -> str:
        return f"hiprtc {self.version} ({self.path})"


def find_hiprtc() -> tuple[str, str]:
    """The path of the hiprtc of torch's HIP runtime, and why that; or ``HiprtcNotUsable``."""
    folders = folders_of_torch_runtime()
    for folder, why in folders:
        found = [x for x in sorted(folder.glob(_NAMES)) if not x.name.startswith(_ITS_HEADERS)]
        if found:
            return str(found[0]), why
    places = ", ".join(f"{folder / _NAMES} (not there)" for folder, _ in folders)
    raise HiprtcNotUsable(f"torch's hiprtc: {places}")


def asked_hiprtc(path: str, why: str) -> DeviceHiprtc:
    """The hiprtc at `path`, with what it says of itself; or ``HiprtcNotUsable``."""
    answer = _ask("describe", path, Path("/"))
    version = ".".join(map(str, answer["version"]))
    try:
        # What the linker wrote into a library, else the SHA-256 of all of it.
        contents = tuple(
            (file, build_id(file) or hashlib.sha256(Path(file).read_bytes()).hexdigest())
            for file in answer["files"]
        )
    except OSError as error:
        raise HiprtcNotUsable(f"torch's hiprtc: {error}") from error
    return DeviceHiprtc(path, why, version, contents)


def _program(spec: BuildSpec, sources: Path, destination: Path) -> Program:
    compiled = spec.compiled_sources
    keywords = "".join(f"#ifndef {x}\n#define {x} {KEYWORDS[x]}\n#endif\n" for x in KEYWORDS)
    texts = "".join(_text(spec, name, sources) for name in compiled)
    return {
        "name": f"{spec.name}.program.hip",
        # hiprtc declares names before the first line, `tanh` and `float4` among them. In a
        # namespace, the program may give them meanings of its own.
        "source": f"{keywords}namespace program {{\n{texts}}}\n",
        "headers": {x: _text(spec, x, sources) for x in spec.sources if x not in compiled},
        "options": [*_OPTIONS, *spec.cflags, *debugger_flags(sources, destination)],
    }


def _text(spec: BuildSpec, name: str, sources: Path) -> str:
    """A source that tells the compiler where it lies, for messages and debuggers.

    hiprtc copies what it is given to a place of its own.
    """
    return f'#line 1 "{sources / name}"\n{spec.sources[name]}\n'


def _ask(what: str, path: str, folder: Path, program: Program | None = None) -> Any:
    """The answer of a process that loads the hiprtc at `path`; or ``HiprtcNotUsable``."""
    python = isolated_python()
    if python is None:
        raise HiprtcNotUsable(f"{path} (no interpreter to load it in can be started)")
    kept = {name: text for name, text in os.environ.items() if name not in _HIDDEN_OPTIONS}
    try:
        done = subprocess.run(
            [*python, hiprtc_process.__file__, what, path],
            input=json.dumps(program),
            cwd=folder,
            # Its own cache would need rules of its own about who may write to it; ours is enough.
            env={**kept, "LC_ALL": "C", "TMPDIR": str(folder), "AMD_COMGR_CACHE": "0"},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise HiprtcNotUsable(f"{path} (no process to load it in: {error.strerror})") from error
    if done.returncode != 0:
        raise HiprtcNotUsable(f"{path} ({_end_of(done.returncode)}{done.stderr.strip()})")
    return json.loads(done.stdout)


def _end_of(returncode: int) -> str:
    """What is to be said of a process besides what it said itself."""
    if returncode > 0:
        return ""
    return (
        f"it ended its process with {signal.Signals(-returncode).name}, as some do when they are "
        "asked for an architecture that they do not know; "
    )
