"""What all toolchains have in common: what they are, programs, paths, flags, and failures."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ..errors import CompileFailure
from ..spec import BuildSpec
from .environment import user_environment

# What neither ninja nor a shell interprets, in any locale.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+=@,-]+")
_VERSION_TIMEOUT_SECONDS = 30.0
_DISK_FULL_MESSAGES = ("No space left on device", "Disk quota exceeded")
# How the programs around GCC's compiler end where they cannot close a new temporary file.
_ABORTED = re.compile(
    r"^Aborted( \(core dumped\))?$|"
    r"internal compiler error: Aborted signal terminated program collect2",
    re.MULTILINE,
)

# What the extra `compiler` brings; from a checkout and from a wheel.
INSTALL_ZIG = "pip install 'ziglang>=0.17'"
ZIG_MISSING = "the Python package 'ziglang' (not installed)"


class Toolchain(Protocol):
    """A compiler for one kind of `BuildSpec`, as it is on this machine. `str` of it names it."""

    @property
    def identity(self) -> tuple[str, ...]:
        """Everything by which two of them can differ in what they make of the same sources.

        A part of the key of whatever is built.
        """

    def compile(self, spec: BuildSpec, workspace: Path, destination: Path) -> bytes:
        """Compile and link; returns the content of the file `spec.artifact_name`.

        Args:
            spec: what to compile.
            workspace: a directory for this build alone, with a path that a shell leaves alone. The
                sources lie in `sources` below it already, the spec's objects in `objects`. What
                runs has it as current directory, or one below, so that whoever sweeps it up can end
                that too.
            destination: where sources and artifact will be found later, for a debugger.

        Raises:
            CompileFailure: errors in the sources or flags.
            BuildError: the build cannot be run at all.
            OSError: the disk is full, or the workspace is gone.
        """


class DoesNotRun(Exception):
    """Why a program is no compiler that can be used here."""


def version_of(command: Sequence[str]) -> str:
    """A compiler's whole answer to `--version`. Raises ``DoesNotRun`` where there is none."""
    # An empty name of its cache is the working directory to zig, which would leave files there.
    variables = {
        n: text for n, text in user_environment().items() if text or not n.startswith("ZIG_")
    }
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


def isolated_python() -> tuple[str, ...] | None:
    """The first words of the command; None where no such interpreter can be started.

    It is isolated, because the working directory may be anybody's and must not be where modules
    come from. Without site-packages it starts in 10 ms.
    """
    # An isolated interpreter ignores this variable, and would not find its own library without it.
    if os.environ.get("PYTHONHOME"):
        return None
    # A program that embeds Python may name itself as its interpreter.
    if not os.path.basename(sys.executable or "").startswith("python"):
        return None
    return (sys.executable, "-I", "-S")


def zig_program() -> Path | None:
    """The program of the package; None where it is not installed.

    It is run itself: `python -m ziglang` would look for modules in the working directory first.
    """
    package = importlib.util.find_spec("ziglang")
    folders = (package and package.submodule_search_locations) or ()
    programs = (Path(folder, "zig").absolute() for folder in folders)
    return next((program for program in programs if program.is_file()), None)


def is_plain_path(path: Path | str) -> bool:
    """Whether a build may take place at `path`, which a shell gets to see."""
    return _PLAIN_PATH.fullmatch(str(path)) is not None


def source_flags(sources: Path, destination: Path) -> list[str]:
    """Return the flags by which the compiler finds headers, and a debugger later finds sources."""
    # Not -I: a source or folder called "memory" must not come before <memory>.
    return [f"-iquote{sources}", *debugger_flags(sources, destination)]


def debugger_flags(sources: Path, destination: Path) -> list[str]:
    """Return the flags by which a debugger later finds the sources."""
    if is_plain_path(destination) and "=" not in str(sources):
        return [f"-ffile-prefix-map={sources}={destination}"]
    return []


def compile_failure(output: str) -> CompileFailure | OSError:
    """What to raise for a failed compiler's output; a full disk is no fault of the sources."""
    for message in _DISK_FULL_MESSAGES:
        if message in output:
            return OSError(errno.ENOSPC, message)
    if _ABORTED.search(output) and "error: " not in _ABORTED.sub("", output):
        return OSError(errno.EIO, "the compiler could not write a temporary file, and aborted")
    return CompileFailure(output)
