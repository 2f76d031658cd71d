"""hiprtc, the compiler that every PyTorch for ROCm brings: where it is, and how it is asked.

It is a library beside the HIP runtime, with clang and lld inside of it. It is asked in a process of
its own (see `hiprtc_process.py`).
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
from ..isolated_python import isolated_python
from . import hiprtc_process
from .hip_libraries import folders_of_torch_runtime
from .hiprtc_process import Program

# Wheels of PyTorch may rename it, to `libhiprtc-<hash>.so`.
_NAMES = "libhiprtc*.so*"
_ITS_HEADERS = "libhiprtc-builtins"
# What would change the outcome without a trace in the options.
_HIDDEN_OPTIONS = ("HIPRTC_COMPILE_OPTIONS_APPEND", "HIPRTC_LINK_OPTIONS_APPEND")


class HiprtcNotUsable(RuntimeError):
    """There is no hiprtc here, or it does not run; the message says what was tried."""


class HiprtcFailure(RuntimeError):
    """hiprtc refused a program.

    Attributes:
        output: all that it said.
    """

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output


class Hiprtc(NamedTuple):
    """A hiprtc that answered.

    Attributes:
        path: of the library.
        why: it was looked for there.
        version: what it says, as ``9.0``.
        contents: of the libraries that it consists of, the path and what tells their content from
            any other.
    """

    path: str
    why: str
    version: str
    contents: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"hiprtc {self.version} ({self.path})"

    def compile(self, program: Program, folder: Path) -> bytes:
        """The code object of a program.

        Args:
            program: what to compile; its options name the architecture.
            folder: where the process runs and leaves temporary files.

        Raises:
            HiprtcFailure: it was refused.
        """
        try:
            answer = _ask("compile", self.path, folder, program)
        except HiprtcNotUsable as error:
            raise HiprtcFailure(f"error: {error}") from error
        if answer["error"]:
            raise HiprtcFailure(f"{answer['log']}\n{answer['error']}".strip())
        return base64.b64decode(answer["code"])


def find_hiprtc() -> tuple[str, str]:
    """The path of the hiprtc that belongs to torch's HIP runtime, and why it is that one.

    Raises:
        HiprtcNotUsable: there is none.
    """
    folders = folders_of_torch_runtime()
    for folder, why in folders:
        found = [x for x in sorted(folder.glob(_NAMES)) if not x.name.startswith(_ITS_HEADERS)]
        if found:
            return str(found[0]), why
    places = ", ".join(f"{folder / _NAMES} (not there)" for folder, _ in folders)
    raise HiprtcNotUsable(f"torch's hiprtc: {places}")


def asked_hiprtc(path: str, why: str) -> Hiprtc:
    """The hiprtc at `path`, with what it says of itself.

    Raises:
        HiprtcNotUsable: it does not run.
    """
    answer = _ask("describe", path, Path("/"))
    version = ".".join(map(str, answer["version"]))
    try:
        contents = tuple((file, _content_identity(file)) for file in answer["files"])
    except OSError as error:
        raise HiprtcNotUsable(f"torch's hiprtc: {error}") from error
    return Hiprtc(path, why, version, contents)


def _content_identity(path: str) -> str:
    """The build id that the linker wrote into a library, else the SHA-256 of all of it."""
    found = build_id(path)
    if found is not None:
        return found
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _ask(what: str, path: str, folder: Path, program: Program | None = None) -> Any:
    """The answer of a process that loads the hiprtc at `path`; raises `HiprtcNotUsable`."""
    python = isolated_python()
    if python is None:
        raise HiprtcNotUsable(f"{path} (no interpreter to load it in can be started)")
    try:
        done = subprocess.run(
            [*python, hiprtc_process.__file__, what, path],
            input=json.dumps(program),
            cwd=folder,
            env=_environment(folder),
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


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if name not in _HIDDEN_OPTIONS}
    # Its own cache would need rules of its own about who may write to it; ours is enough.
    return {**kept, "LC_ALL": "C", "TMPDIR": str(folder), "AMD_COMGR_CACHE": "0"}
