"""C++ for this machine: finds the compiler, tells one from another, and has it make a library."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..cache.directory import make_private
from ..errors import CompilerNotFound
from ..spec import BuildSpec
from ..status import say
from .compiling import INSTALL_ZIG, ZIG_MISSING, DoesNotRun, version_of, zig_program
from .environment import user_environment

_STANDARD_NAMES = ("c++", "g++", "clang++")


class HostCpp(NamedTuple):
    """The toolchain around a C++ compiler that answered `--version` with ``version``.

    Attributes:
        command: what to run, as words; the first is an absolute path, not resolved further because
            ccache and clang look at the name they are called by.
        resolved: the file that the first word leads to.
        variables_of_its_cache: in the environment, which name the directory where the compiler
            keeps what it makes for itself.
        unknown_flags: which only tune, and which it would refuse.
    """

    command: tuple[str, ...]
    resolved: str
    version: str
    why: str = ""
    variables_of_its_cache: tuple[str, ...] = ()
    unknown_flags: frozenset[str] = frozenset()

    @property
    def identity(self) -> tuple[str, ...]:
        name = os.path.basename(self.command[0])
        return (self.resolved, name, *self.command[1:], self.version)

    def compile(self, spec: BuildSpec, workspace: Path, destination: Path) -> bytes:
        # Imported here because a filled cache has no use for it.
        from .cpp_extension import compile_library

        known = tuple(flag for flag in spec.cflags if flag not in self.unknown_flags)
        known_spec = replace(spec, cflags=known)
        if not self.variables_of_its_cache:
            return compile_library(known_spec, self.command, workspace, destination, {})
        # Beside the entries, where nobody else can write to.
        folder = destination.parents[1] / "zig"
        named = user_environment()
        own = {n: str(folder) for n in self.variables_of_its_cache if not named.get(n)}
        is_filled = folder / "is_filled"
        if not is_filled.exists():
            say("the first build with ziglang takes minutes, for a C++ library that is then kept")
        make_private(folder)
        library = compile_library(known_spec, self.command, workspace, destination, own)
        if spec.toolchain == "host_cpp":  # objects need no library
            is_filled.touch()
        return library

    def __str__(self) -> str:
        first_line = self.version.partition("\n")[0].strip()
        return f"{shlex.join(self.command)} ({first_line})"


# Asking costs a process. The answer holds as long as the two variables it depends on.
_found: dict[tuple[str | None, str | None], HostCpp] = {}


def find_host_cpp(*, ask_again: bool = False) -> HostCpp:
    """A toolchain around `CXX` (which may carry arguments), else `c++`, `g++`, `clang++`.

    Where none of them is there, the compiler of the package `ziglang` is taken. With ``ask_again``
    an answer that this process got earlier counts for nothing. Raises ``CompilerNotFound`` where
    none of them runs; the message lists each with its reason.
    """
    environment = user_environment()
    question = (environment.get("CXX"), environment.get("PATH"))
    if ask_again or question not in _found:
        _found[question] = _search(environment)
    return _found[question]


def _search(environment: Mapping[str, str]) -> HostCpp:
    reasons: list[str] = []
    for label, command, why in _candidates(environment.get("CXX", "")):
        try:
            compiler = _ask(command, environment.get("PATH"))._replace(why=why)
        except DoesNotRun as reason:
            reasons.append(f"{label}: {reason}")
            continue
        if reasons:
            _warn_about_cxx(reasons[0], compiler)
        return compiler
    zig = _zig_cpp()
    if zig is None:
        raise CompilerNotFound(_not_found_message([*reasons, ZIG_MISSING]))
    _warn_about_cxx(reasons[0], zig)
    return zig


def _candidates(chosen: str) -> list[tuple[str, str, str]]:
    """What to call each, its command, and why it would be taken."""
    named = [(f"CXX={chosen!r}", chosen, "CXX names it")] if chosen.strip() else []
    return named + [(name, name, f"it is {name} on PATH") for name in _STANDARD_NAMES]


def _zig_cpp() -> HostCpp | None:
    program = zig_program()
    if program is None:
        return None
    # Without a level it checks for undefined behaviour, with a run-time library that takes minutes
    # to compile; this also holds where it links, which no flag of a spec reaches.
    words = [str(program), "c++", "-O2", "-fno-sanitize=undefined"]
    if sys.platform.startswith("linux"):
        # Otherwise it compiles for the very processor that it runs on.
        words.append(f"--target={os.uname().machine}-linux-gnu")
    try:
        version = version_of(words)
    except DoesNotRun:
        return None
    return HostCpp(
        tuple(words),
        os.path.realpath(program),
        version,
        "there is no other, and it came with the Python package ziglang",
        ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"),
        # Other clangs ignore what is GCC's alone.
        frozenset({"-fpeel-loops", "-fvect-cost-model=dynamic"}),
    )


def _ask(command: str, folders: str | None) -> HostCpp:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise DoesNotRun(f"cannot be split into words ({error})") from error
    path = shutil.which(words[0], path=folders) if words else None
    if path is None:
        raise DoesNotRun("not found, or not executable")
    words[0] = path = os.path.abspath(path)
    return HostCpp(tuple(words), os.path.realpath(path), version_of(words))


def _warn_about_cxx(reason: str, compiler: HostCpp) -> None:
    if reason.startswith("CXX="):
        warnings.warn(f"jitfmha: {reason}; using {compiler} instead", RuntimeWarning, stacklevel=2)


def _not_found_message(reasons: list[str]) -> str:
    tried = "\n".join(f"  {reason}" for reason in reasons)
    return (
        "no C++ compiler was found, and jitfmha compiles its launchers on first use. Tried:\n"
        f"{tried}\n"
        "Install one:\n"
        "  Debian, Ubuntu   apt install g++\n"
        "  Fedora, RHEL     dnf install gcc-c++\n"
        "  conda            conda install -c conda-forge cxx-compiler\n"
        f"  anywhere         {INSTALL_ZIG}\n"
        "or set CXX to the one to use, or set JITFMHA_CACHE_DIR to a cache that was filled on a "
        "machine of the same kind that has one."
    )
