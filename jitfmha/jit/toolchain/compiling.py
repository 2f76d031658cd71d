"""What all toolchains have in common: paths, flags about sources, and failures."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ..errors import CompileFailure

# What neither ninja nor a shell interprets, in any locale.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+=@,-]+")
_VERSION_TIMEOUT_SECONDS = 30.0
_DISK_FULL_MESSAGES = ("No space left on device", "Disk quota exceeded")


class DoesNotRun(Exception):
    """Why a program is no compiler that can be used here."""


def version_of(command: Sequence[str]) -> str:
    """A compiler's whole answer to `--version`.

    Raises:
        DoesNotRun: there is none.
    """
    # An empty name of its cache is the working directory to zig, which would leave files there.
    variables = {n: text for n, text in os.environ.items() if text or not n.startswith("ZIG_")}
    try:
        answer = subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**variables, "LC_ALL": "C"},
            timeout=_VERSION_TIMEOUT_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        raise DoesNotRun(f"`--version` failed with exit status {error.returncode}") from error
    except subprocess.TimeoutExpired as error:
        raise DoesNotRun(f"`--version` gave no answer in {error.timeout:.0f} s") from error
    except OSError as error:
        raise DoesNotRun(f"cannot be run ({error.strerror})") from error
    return answer.stdout.decode(errors="replace")


def is_plain_path(path: Path | str) -> bool:
    """Whether a build may take place at `path`, which a shell gets to see."""
    return _PLAIN_PATH.fullmatch(str(path)) is not None


def source_flags(sources: Path, destination: Path) -> list[str]:
    """By which the compiler finds the headers, and a debugger later finds the sources."""
    # Not -I: a source or folder called "memory" must not come before <memory>.
    return [f"-iquote{sources}", *debugger_flags(sources, destination)]


def debugger_flags(sources: Path, destination: Path) -> list[str]:
    """By which a debugger later finds the sources."""
    if is_plain_path(destination) and "=" not in str(sources):
        return [f"-ffile-prefix-map={sources}={destination}"]
    return []


def compile_failure(output: str) -> CompileFailure | OSError:
    """What to raise for a failed compiler's output; a full disk is no fault of the sources."""
    for message in _DISK_FULL_MESSAGES:
        if message in output:
            return OSError(errno.ENOSPC, message)
    return CompileFailure(output)
