"""Hostile values in the environment: special characters in paths, odd compilers and flags.

A call works or is refused with a clear error, and nothing is ever passed through a shell: every
value that could, tries to create a file called ``marker``.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from jitfmha.jit.fresh_process import search_path
from jitfmha.jit.toolchain.host_cpp import find_host_cpp

from .callers import Answer, Call, Scratch, Trial, new_scratch

_MARKER = "marker"
# Names of folders; what is not UTF-8 is written as Python's own names of such files are.
_NAMES = (
    "$(touch marker); touch marker; `touch marker`", "with space", "quo'te", 'dou"ble',
    "new\nline", "$(touch marker)", "`touch marker`", "a; touch marker;", "& touch marker &",
    "| touch marker", "> marker", "$HOME", "${IFS}", "%s%n", "hash # comment", "-leading",
    "--version", "back\\slash", "tab\t", "*?[a]", "{a,b}", "a:b", "a=b", "!history", "~", "@file",
    "\udcff\udcfe", "\u00fcml\u00e4ut \u6f22", "\x01\x1b[31m", "n" * 200,
)  # fmt: skip
_REFUSED = (
    "{compiler} $(touch marker)", "{compiler} `touch marker`", "{compiler} ; touch marker",
    "{compiler} > marker", "{compiler} /nowhere.o", "touch marker",  # It tells a version.
)  # fmt: skip
# Not compilers: another one is taken, with a warning.
_REPLACED = (
    "{compiler} 'unbalanced", '"', "\\", "nowhere", "/dev/null", "/", "$(touch marker)",
    "`touch marker`", "-leading", "\udcff", "with space", "# comment", "false",
)  # fmt: skip
_WORKING = (
    "{compiler} '-DMARKER=$(touch marker)'", "{compiler} -O1",
    "{compiler} -DTEXT='a b' -DQUOTED='\"'", "{compiler} '-DMARKER=`touch marker`; touch marker'",
    "  {compiler}  ", "", "   ", "\n",
)  # fmt: skip
_VALUES = (
    "$(touch marker)", "`touch marker`", "; touch marker;", "-DX='a b'", "a\nb", "\udcff", "-1",
    "%x %", "", "x" * 10_000,
)  # fmt: skip
_VARIABLES = (
    "CXXFLAGS", "CFLAGS", "CPPFLAGS", "LDFLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH",
    "LD_LIBRARY_PATH", "LD_RUN_PATH", "PYTHONPATH", "MAX_JOBS", "NINJA_STATUS", "NINJAFLAGS",
    "TORCH_EXTENSIONS_DIR", "TORCH_CUDA_ARCH_LIST", "JITFMHA_VERBOSE", "VERBOSE", "TMP", "LANG",
    "LC_ALL", "CC", "LD", "MAKEFLAGS", "CUDA_HOME", "ROCM_HOME", "HOME", "SOURCE_DATE_EPOCH",
    "GCC_EXEC_PREFIX", "COMPILER_PATH", "DEPENDENCIES_OUTPUT",
)  # fmt: skip
_READ_AT_THE_START = ("LD_LIBRARY_PATH", "PYTHONPATH", "LC_ALL", "LANG", "TORCH_EXTENSIONS_DIR")
_NEW_CALL = """
import os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from rigs.cache_faults.caller_process import tiny
sys.exit(0 if tiny(1) else 3)
"""
_REFUSALS = ("BuildError", "CacheError", "CompilerNotFound")
_Case = TypeVar("_Case")


def run(trial: Trial) -> None:
    """Paths, compilers, other variables, and the same in new interpreters."""
    short = not trial.is_long
    for name in _some(trial, _NAMES, 2 if short else len(_NAMES)):
        _hostile_folders(trial, name)
    for kind, commands, least in (
        ("working", _WORKING, 2),
        ("replaced", _REPLACED, 2),
        ("refused", _REFUSED, 1),
    ):
        for command in _some(trial, commands, least if short else len(commands)):
            _compiler(trial, command, kind)
    pairs = [(variable, value) for variable in _VARIABLES for value in _VALUES]
    for variable, value in _some(trial, pairs, 8 if short else 100):
        _hostile_variable(trial, variable, value)
    pairs = [(variable, value) for variable in _READ_AT_THE_START for value in _VALUES]
    for variable, value in _some(trial, pairs, 1 if short else 10):
        _new_interpreter(trial, variable, value)


def _some(trial: Trial, cases: Sequence[_Case], count: int) -> Sequence[_Case]:
    """So many of them, the first always."""
    return [cases[0], *trial.rng.sample(cases[1:], min(count, len(cases)) - 1)]


def _hostile_folders(trial: Trial, name: str) -> None:
    with new_scratch() as scratch:
        folder = _work(scratch) / name
        folder.mkdir(mode=0o700)
        cache = {**scratch.environment, "JITFMHA_CACHE_DIR": str(folder)}
        temporary = {**scratch.environment, "TMPDIR": str(folder)}
        no_cache = {**temporary, "JITFMHA_CACHE_DIR": str(scratch.root / "file" / "cache")}
        (scratch.root / "file").touch()
        both = {**cache, "TMPDIR": str(folder)}
        home = {"HOME": str(folder), "TMPDIR": str(scratch.temporary)}
        relative = {**scratch.environment, "JITFMHA_CACHE_DIR": name}
        compiler = _linked_compiler(folder)
        for what, environment, warnings in (
            ("cache directory", cache, 0),
            ("temporary directory", temporary, 0),
            ("temporary directory in place of a cache", no_cache, 1),
            ("cache and temporary directory", both, 0),
            ("home", home, 0),
            ("relative cache directory", relative, 0),
            ("compiler's directory", {**scratch.environment, "CXX": shlex.quote(compiler)}, 0),
        ):
            what = f"{what} {name[:40]!r}"
            answer = _call(trial, scratch, environment, what)
            trial.expect_right(answer, what, warnings=warnings)
            again = "built" if warnings else "loaded"
            answer = _call(trial, scratch, environment, what)
            trial.expect_right(answer, f"{what}, again", how=again, warnings=warnings)


def _work(scratch: Scratch) -> Path:
    work = scratch.root / "work"
    work.mkdir(mode=0o700, exist_ok=True)
    return work


def _linked_compiler(folder: Path) -> str:
    command = find_host_cpp().command
    script = folder / "c++"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    script.chmod(0o700)
    return str(script)


def _call(
    trial: Trial, scratch: Scratch, environment: Mapping[str, str | None], what: str
) -> Answer:
    """Call from a folder that the marker would appear in, and look for it everywhere."""
    answer = trial.callers.call(Call(environment, directory=_work(scratch)))
    _expect_no_marker(trial, scratch, what)
    return answer


def _expect_no_marker(trial: Trial, scratch: Scratch, what: str) -> None:
    markers = [
        os.path.join(root, name)
        for root, folders, files in os.walk(scratch.root)
        for name in (*folders, *files)
        if name == _MARKER
    ]
    trial.expect(not markers, f"{what}: a shell ran it: {markers}")


def _compiler(trial: Trial, command: str, kind: str) -> None:
    """A command that works, is replaced with a warning, or is refused."""
    with new_scratch() as scratch:
        what = f"CXX={command!r}"
        real = shlex.join(find_host_cpp().command)
        environment = {**scratch.environment, "CXX": command.replace("{compiler}", real)}
        answer = _call(trial, scratch, environment, what)
        if kind == "refused":
            holds = answer.status == 0 and answer.error in _REFUSALS
            trial.expect(holds, f"{what}: expected a refusal; got {answer}")
            return
        trial.expect_right(answer, what, how="built", warnings=int(kind == "replaced"))
        if kind == "replaced":
            trial.expect("CXX=" in str(answer.warnings), f"{what}: CXX is not named: {answer}")


def _hostile_variable(trial: Trial, variable: str, value: str) -> None:
    with new_scratch() as scratch:
        what = f"{variable}={value[:40]!r}"
        environment = {**scratch.environment, variable: value}
        answer = _call(trial, scratch, environment, what)
        is_our_own = variable == "JITFMHA_VERBOSE"  # The one whose values we judge ourselves.
        if answer.message and (
            answer.error in _REFUSALS or (is_our_own and answer.error == "ValueError")
        ):
            if is_our_own:
                trial.expect(variable in answer.message, f"{what} is not named: {answer}")
            trial.progress(
                f"{what} is refused: {answer.error}: {' '.join(answer.message.split())[:300]}"
            )
            trial.expect(answer.status == 0, f"{what}: {answer}")
        else:
            trial.expect_right(answer, what, how="built")


def _new_interpreter(trial: Trial, variable: str, value: str) -> None:
    """What the dynamic loader and Python themselves read at their start."""
    with new_scratch() as scratch:
        what = f"{variable}={value[:40]!r} in a new interpreter"
        own = os.environ.get("PYTHONPATH", "")
        value = f"{own}:{value}" if variable == "PYTHONPATH" and own else value
        process = subprocess.run(
            [sys.executable, "-c", _NEW_CALL, os.pathsep.join(search_path())],
            env={**os.environ, **scratch.environment, variable: value},
            cwd=_work(scratch),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=300,
            check=False,
        )
        output = process.stderr.decode(errors="replace")[-1000:]
        trial.expect(process.returncode == 0, f"{what}: status {process.returncode}: {output}")
        _expect_no_marker(trial, scratch, what)
