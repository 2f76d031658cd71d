"""Compilers, torch, the package, a template or the CPU that change under one shared home.

What changed builds an entry of its own; the old one stays as it is, and serves whoever is still
of the old kind.
"""

import hashlib
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

import jitfmha
from jitfmha.jit.resources import hsa_dir, templates_dir
from jitfmha.jit.toolchain.host_cpp import find_host_cpp
from jitfmha.planning.target import cpu_target

from .callers import Call, Callers, Scratch, Trial, new_scratch

_TEMPLATE = Path("cpu", "fmha_fwd.cpp.in")


def run(trial: Trial) -> None:
    """Each upgrade, and all of them one after the other in one cache."""
    kernel = "attention" if trial.is_long else "tiny1"
    with new_scratch() as scratch:
        old = Call(scratch.environment, kernel)
        trial.builds(old, "before any upgrade")
        for what, new in _kinds_of_callers(scratch, old).items():
            _upgrade(trial, scratch, old, new, what)
        trial.progress(f"{len(scratch.entry_names())} entries of {kernel} beside each other")
        _compiler_upgraded_in_place(trial, scratch, old)
    with new_scratch() as scratch:
        old = Call(scratch.environment, "attention")
        trial.builds(old, "before any upgrade")
        if cpu_target().isa != "generic":
            new = replace(old, answers={"jitfmha.planning.target.cpu_isas_here": ["generic"]})
            _upgrade(trial, scratch, old, new, "another CPU")
        _edited_template(trial, scratch, old)
        trial.progress(f"{len(scratch.entry_names())} entries of fmha_fwd beside each other")


def _kinds_of_callers(scratch: Scratch, old: Call) -> dict[str, Call]:
    # Both say what a compiler of another version would; the second also is elsewhere.
    changed = _compiler(scratch.root / "changed" / "c++", "c++ 99.1")
    moved = _compiler(scratch.root / "moved" / "c++", "")
    return {
        "a compiler of another version": _with_compiler(old, str(changed)),
        "a compiler elsewhere": _with_compiler(old, str(moved)),
        "a compiler with arguments": _with_compiler(old, f"{shlex.quote(str(moved))} -O1"),
        "another torch": replace(
            old, attributes={"torch.__version__": torch.torch_version.TorchVersion("97.1.0")}
        ),
        "torch with another C++ interface": replace(
            old, answers={"torch.compiled_with_cxx11_abi": not torch.compiled_with_cxx11_abi()}
        ),
        "another version of the package": replace(
            old, attributes={"jitfmha.jit.cache.key.__version__": f"{jitfmha.__version__}.post1"}
        ),
        "another C library": replace(old, answers={"os.confstr": "glibc 99.1"}),
    }


def _upgrade(
    trial: Trial,
    scratch: Scratch,
    old: Call,
    new: Call,
    what: str,
    new_callers: Callers | None = None,
) -> None:
    callers = new_callers or trial.callers
    before = _contents(scratch)
    answer = callers.call(new)
    trial.expect_right(answer, f"{what}: the first call", how="built")
    added = _contents(scratch).keys() - before.keys()
    trial.expect(
        len(added) == 1 and Path(answer.library).parent.name in added,
        f"{what}: loaded {answer.library!r}, added {added}",
    )
    trial.expect_right(callers.call(new), f"{what}: its next call", how="loaded")
    trial.loads(old, f"{what}: the old one after it")
    _expect_unchanged(trial, scratch, before, what)
    trial.expect_clean(scratch, what)


def _expect_unchanged(
    trial: Trial, scratch: Scratch, before: Mapping[str, dict[str, str]], what: str
) -> None:
    after = _contents(scratch)
    changed = [name for name in before if after.get(name) != before[name]]
    trial.expect(not changed, f"{what}: changed the entries {changed}")


def _compiler_upgraded_in_place(trial: Trial, scratch: Scratch, old: Call) -> None:
    """What a distribution does: the same path, another version; and back."""
    path = scratch.root / "in-place" / "c++"
    call = _with_compiler(old, str(_compiler(path, "c++ 1.0")))
    trial.builds(call, "version 1.0 of a compiler")
    before = _contents(scratch)
    _compiler(path, "c++ 2.0")
    trial.builds(call, "version 2.0 of a compiler")
    _compiler(path, "c++ 1.0")
    trial.loads(call, "version 1.0 again")
    _expect_unchanged(trial, scratch, before, "a compiler upgraded in place")


def _edited_template(trial: Trial, scratch: Scratch, old: Call) -> None:
    copy = scratch.root / "edited"
    package = Path(jitfmha.__file__).parent
    shutil.copytree(package, copy / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    templates = copy / "jitfmha" / "csrc_templates"
    if not templates.is_dir():
        shutil.copytree(templates_dir(), templates)
        (copy / "jitfmha" / "hsa").symlink_to(hsa_dir())
    with (templates / _TEMPLATE).open("a", encoding="utf-8") as template:
        template.write("// Edited.\n")
    with Callers(copy) as edited:
        _upgrade(trial, scratch, old, old, "an edited template", edited)


def _with_compiler(call: Call, command: str) -> Call:
    return replace(call, environment={**call.environment, "CXX": command})


def _compiler(path: Path, version: str) -> Path:
    """A script that is the real compiler, but for the version that it tells if one is given."""
    path.parent.mkdir(exist_ok=True)
    version_case = ""
    if version:
        version_case = f'case "$1" in --version) echo {shlex.quote(version)}; exit;; esac\n'
    command = shlex.join(find_host_cpp().command)
    path.write_text(f'#!/bin/sh\n{version_case}exec {command} "$@"\n', encoding="utf-8")
    path.chmod(0o700)
    return path


def _contents(scratch: Scratch) -> Mapping[str, dict[str, str]]:
    """The entries, each with its files' inodes and digests."""
    return {
        entry.name: {
            file.name: f"{file.stat().st_ino} {hashlib.sha256(file.read_bytes()).hexdigest()}"
            for file in entry.iterdir()
        }
        for entry in scratch.entries.iterdir()
    }
