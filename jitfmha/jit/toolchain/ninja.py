"""Finds ninja, and runs it so that it does not outlive the process that builds.

A process that is killed, or that a scheduler ends with SIGTERM, cannot end its compilers: ninja
starts each in a process group of its own. So ninja is started through a script that asks the kernel
for SIGTERM as soon as the building thread dies, on which ninja ends all that it started. Where that
cannot be had, the compilers are ended by the next process that builds (see
cache/owned_directory.py).
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from importlib import import_module
from pathlib import Path

from ..cache.directory import forbids_execution, write_private
from ..errors import BuildError
from .compiling import isolated_python

# 1 is PR_SET_PDEATHSIG, 15 is SIGTERM. The builder may be dead already when it is asked for, and
# then `kill` raises; it may also be alive without being the parent, if the interpreter is started
# through a script. What compilers write on the way goes where the build is, and goes with it: the
# directory for temporary files may be full.
_TIED_TO_BUILDER = """\
import ctypes, os, sys
ninja, builder, os.environ["TMPDIR"] = sys.argv[1], int(sys.argv[2]), sys.argv[3]
ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
if os.getppid() != builder:
    os.kill(builder, 0)
os.execv(ninja, ["ninja", *sys.argv[4:]])
"""


def path_with_ninja(workspace: Path) -> str:
    """The `PATH` on which cpp_extension finds the ninja to build with.

    A script may be put into the workspace of the build. Raises ``BuildError`` where there is no
    ninja, ``OSError`` where the script cannot be written.
    """
    path = os.environ.get("PATH", os.defpath)
    ninja = shutil.which("ninja")
    if ninja is None:
        # The package's program need not be on PATH: the interpreter may run from a virtual
        # environment that is not activated.
        folder = _package_folder()
        path = f"{folder}{os.pathsep}{path}" if path else folder
        ninja = f"{folder}/ninja"
    # Not every system can tie it, and a script has to be where it may be run.
    python = isolated_python()
    if python is None or not sys.platform.startswith("linux") or forbids_execution(workspace):
        return path
    tied = _write_tied_ninja(workspace, python, os.path.abspath(ninja))
    return f"{tied}{os.pathsep}{path}"


def _package_folder() -> str:
    try:
        folder = str(import_module("ninja").BIN_DIR)
    except ImportError:
        folder = ""
    if not folder:
        raise BuildError("ninja was not found, and launchers are built with it; pip install ninja")
    return folder


def _write_tied_ninja(workspace: Path, python: tuple[str, ...], ninja: str) -> str:
    folder = workspace / "bin"
    folder.mkdir(mode=0o700)
    command = (*python, "-c", _TIED_TO_BUILDER, ninja, str(os.getpid()), str(workspace))
    # cpp_extension asks for the version first, which needs no Python to start.
    asked = f'[ "$1" = --version ] && exec {shlex.quote(ninja)} --version'
    write_script(folder / "ninja", command, asked)
    return str(folder)


def write_script(path: Path, command: tuple[str, ...], before: str) -> Path:
    """Write a program that runs `command` with its own arguments after it."""
    text = f'#!/bin/sh\n{before}\nexec {shlex.join(command)} "$@"\n'
    write_private(path, os.fsencode(text), mode=0o700)
    return path
