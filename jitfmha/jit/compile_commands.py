"""Runs `torch.utils.cpp_extension.load` so that its traps stay shut.

* Its lock file, ninja's time stamps and `.ninja_log` are harmless in a directory that exists for
  one build only.
* It hands every path and flag to a shell, through ninja. So all of them are either ours or checked
  against what a shell leaves alone; a compiler with arguments is called through a script.
* It loads what it built, from where it built it. As a "standalone" target it does not: the process
  only ever maps the published and checked file.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from .cache_directory import make_private
from .compiler import Compiler
from .errors import BuildError
from .ninja_command import path_with_ninja
from .spec import BuildSpec
from .status import is_verbose
from .verbose_output import shown_output

# What neither ninja nor a shell interprets, in any locale.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+=@,-]+")
_INTERPRETED = re.compile(r"""[\x00-\x20!"#$&'()*:;<>?\[\\\]^`{|}~\x7f]""")
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DISK_FULL_MESSAGES = ("No space left on device", "Disk quota exceeded")

# cpp_extension takes compiler and ninja from the environment, of which there is only one.
_one_build_at_a_time = threading.Lock()
_environment_before: dict[str, str | None] = {}


class CompileFailure(Exception):
    """The compiler or linker reported errors; `output` is all that it and ninja said."""

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output


def is_plain_path(path: Path) -> bool:
    """Whether a build may take place at `path`."""
    return _PLAIN_PATH.fullmatch(str(path)) is not None


def compile_library(
    spec: BuildSpec, compiler: Compiler, workspace: Path, destination: Path
) -> bytes:
    """Compile and link the launcher; returns the content of the library.

    Args:
        spec: what to compile.
        compiler: what to compile it with.
        workspace: an existing directory for this build alone, for which `is_plain_path` holds.
        destination: where sources and library will be found later, for the debugger.

    Raises:
        CompileFailure: errors in the sources or flags.
        BuildError: the build cannot be run at all.
        OSError: the disk is full.
    """
    sources = workspace / "sources"
    sources.mkdir(mode=0o700)
    for name, text in spec.sources.items():
        path = sources / name
        make_private(path.parent)
        path.write_text(text, encoding="utf-8")
    # Not -I: a source or folder called "memory" must not come before <memory>.
    cflags = [*spec.cflags, f"-iquote{sources}", *_source_path_flags(sources, destination)]
    ldflags = ["-shared", *_needed_libraries_only(), *spec.ldflags]
    with _one_build_at_a_time, _environment(compiler, workspace):
        library = _load(spec, sources, workspace, cflags, ldflags)
    return Path(library).read_bytes()


def _load(
    spec: BuildSpec, sources: Path, workspace: Path, cflags: list[str], ldflags: list[str]
) -> str:
    with _quiet_extension_log(), shown_output() as shown:
        extension = _imported_cpp_extension()
        _check_torch_location(extension.library_paths())
        try:
            library = extension.load(
                name=spec.name,
                sources=[str(sources / name) for name in spec.sources if name.endswith(".cpp")],
                extra_cflags=cflags,
                extra_ldflags=ldflags,
                build_directory=str(workspace),
                verbose=is_verbose(),
                with_cuda=False,
                with_sycl=False,
                is_python_module=False,
                is_standalone=True,
            )
        except UnicodeDecodeError as error:
            # cpp_extension expects UTF-8 of the compiler.
            raise _failure(error.object.decode(errors="replace")) from error
        except RuntimeError as error:
            raise _failure(str(error) + shown.text()) from error
        except OSError as error:
            if error.errno in _DISK_FULL:
                raise
            raise BuildError(f"the build of {spec.name} cannot be run: {error}") from error
    return str(library)


def _imported_cpp_extension() -> Any:
    """Imported when needed because it drags in setuptools, which a filled cache has no use for.

    A KeyboardInterrupt meanwhile would leave half of setuptools in place, with which no later
    attempt succeeds. So what is half there is forgotten.
    """
    before = set(sys.modules)
    try:
        return import_module("torch.utils.cpp_extension")
    except BaseException:
        for name in sys.modules.keys() - before:
            if name.partition(".")[0] == "setuptools" or name == "torch.utils.cpp_extension":
                del sys.modules[name]
        raise


def _failure(output: str) -> Exception:
    for message in _DISK_FULL_MESSAGES:
        if message in output:
            return OSError(errno.ENOSPC, message)
    return CompileFailure(output)


def _source_path_flags(sources: Path, destination: Path) -> list[str]:
    if not is_plain_path(destination) or "=" in str(sources):
        return []
    return [f"-ffile-prefix-map={sources}={destination}"]


def _needed_libraries_only() -> list[str]:
    # cpp_extension links all of PyTorch; this keeps what the launcher calls.
    return ["-Wl,--as-needed"] if sys.platform.startswith("linux") else []


def _check_torch_location(paths: list[str]) -> None:
    for path in paths:
        if _INTERPRETED.search(path):
            raise BuildError(
                f"PyTorch is installed at {path!r}, and its build tool cannot handle the special "
                "characters in that path; install it where the path has no spaces or quotes"
            )


@contextmanager
def _quiet_extension_log() -> Iterator[None]:
    log = logging.getLogger("torch.utils.cpp_extension")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _environment(compiler: Compiler, workspace: Path) -> Iterator[None]:
    changes = {
        "CXX": _plain_command(compiler, workspace),
        "PATH": path_with_ninja(workspace),
        # The errors of the compiler are read by a program here.
        "LC_ALL": "C",
        # The compiler that was hashed is the one that runs: no ccache put in front of it unasked.
        "TORCH_NO_COMPILER_WRAPPER": "1",
        # Launchers have a C interface; whether PyTorch's C++ one would fit does not matter.
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",
    }
    _environment_before.update({name: os.environ.get(name) for name in changes})
    os.environ.update(changes)
    try:
        yield
    finally:
        _restore_environment()


def _restore_environment() -> None:
    for name, value in _environment_before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _environment_before.clear()


def _forget_build_of_parent() -> None:
    """In the child of a fork that took place while another thread was building."""
    global _one_build_at_a_time
    _one_build_at_a_time = threading.Lock()
    _restore_environment()


def _plain_command(compiler: Compiler, workspace: Path) -> str:
    """The compiler as one word that needs no quoting."""
    if len(compiler.command) == 1 and _PLAIN_PATH.fullmatch(compiler.command[0]):
        return compiler.command[0]
    script = workspace / "compiler"
    text = f'#!/bin/sh\nexec {shlex.join(compiler.command)} "$@"\n'
    descriptor = os.open(script, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700)
    with os.fdopen(descriptor, "wb") as file:
        file.write(os.fsencode(text))
    return str(script)


os.register_at_fork(after_in_child=_forget_build_of_parent)
