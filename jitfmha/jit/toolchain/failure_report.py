"""Turns a failed build into an error that says what the compiler said first."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from ..cache.directory import write_private
from ..cache.eviction import delete
from ..errors import BuildError
from ..spec import BuildSpec
from .compiling import Toolchain

_KEPT_LOGS = 10
_LOG_NAME = "build.log"
_CONTEXT_LINES = 2
_WITHOUT_LOG_CHARACTERS = 4000

_COMPILER_ERROR = re.compile(r"^[^\s:][^:\n]*:\d+(:\d+)?: (fatal )?error: .*", re.MULTILINE)
_OTHER_ERROR = re.compile(
    r"^.*(undefined reference|cannot find -l|ld returned|linker command failed|[Ee]rror: |"
    r"not found|Permission denied|[Kk]illed).*",
    re.MULTILINE,
)


def build_error(
    spec: BuildSpec, toolchain: Toolchain, output: str, workspace: Path, logs: Path
) -> BuildError:
    """The error to raise for `output`; keeps the whole of it, with the sources, in `logs`."""
    headline = f"{spec.name} could not be compiled with {toolchain}"
    try:
        kept = _keep(spec, output, workspace, logs)
    except OSError as error:
        tail = output[-_WITHOUT_LOG_CHARACTERS:]
        return BuildError(f"{headline} (no log could be kept: {error.strerror}):\n{tail}")
    # The error then points at the copy of the source that stays.
    first = first_error(output).replace(str(workspace / "sources"), str(kept))
    return BuildError(f"{headline}:\n{first}\nThe full log is {kept / _LOG_NAME}")


def first_error(output: str) -> str:
    """The first error in the output of ninja and the compiler, with the source line if there is."""
    match = _COMPILER_ERROR.search(output)
    if match:
        return "\n".join([match.group(), *_context(output[match.end() :])])
    match = _OTHER_ERROR.search(_without_commands(output))
    if match:
        return match.group()
    return "\n".join(output.strip().splitlines()[-5:])


def _context(rest: str) -> list[str]:
    """The lines below an error that show the source: gcc and clang indent them."""
    lines = rest.split("\n")[1 : 1 + _CONTEXT_LINES]
    return [line for line in lines if line.startswith(" ")]


def _without_commands(output: str) -> str:
    """The output without the command lines that ninja repeats, which hold any word."""
    lines = output.splitlines()
    return "\n".join(line for line in lines if " -o " not in line and not line.startswith("FAILED"))


def _keep(spec: BuildSpec, output: str, workspace: Path, logs: Path) -> Path:
    _make_room(logs)
    kept = logs / f"{time.strftime('%Y%m%d-%H%M%S')}-{spec.name}.{os.urandom(4).hex()}"
    log = output.replace(str(workspace / "sources"), str(kept))
    for name, text in {**spec.sources, _LOG_NAME: log}.items():
        write_private(kept / name, text.encode(errors="replace"))
    return kept


def _make_room(logs: Path) -> None:
    oldest_first = sorted(logs.iterdir(), key=lambda path: path.name)
    for path in oldest_first[: max(0, len(oldest_first) - _KEPT_LOGS + 1)]:
        delete(path)
