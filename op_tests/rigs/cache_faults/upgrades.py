"""Compilers, torch, the package, a template or the CPU that change under one shared home.

What changed builds an entry of its own; the old one stays as it is, and serves whoever is still
of the old kind.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

import jitfmha
from jitfmha.bench.report import Progress
from jitfmha.jit.resources import hsa_dir, templates_dir
from jitfmha.jit.toolchain.host_cpp import find_host_cpp
from jitfmha.planning.target import cpu_target

from .callers import (
    Call,
    Callers,
    Scratch,
    expect_answer,
    expect_clean,
    new_scratch,
    shared_callers,
)
from .outcome import Extent, Outcome

_TEMPLATE = Path("cpu", "fmha_fwd.cpp.in")


def run(extent: Extent, progress: Progress, _seed: int | None = None) -> Outcome:
    """Each upgrade, and all of them one after the other in one cache."""
    outcome = Outcome()
    callers = shared_callers()
    kernel = "tiny1" if extent is Extent.SHORT else "attention"
    with new_scratch() as scratch:
        old = Call(scratch.environment, kernel)
        expect_answer(outcome, callers.call(old), "before any upgrade", how="built")
        for what, new in _kinds_of_callers(scratch, old).items():
            _upgrade(callers, scratch, old, callers, new, what, outcome)
        progress(f"{len(scratch.entry_names())} entries of {kernel} beside each other")
        _compiler_upgraded_in_place(callers, scratch, old, outcome)
    with new_scratch() as scratch:
        old = Call(scratch.environment, "attention")
        expect_answer(outcome, callers.call(old), "before any upgrade", how="built")
        if cpu_target().isa != "generic":
            new = replace(old, answers={"jitfmha.planning.target.cpu_isas_here": ["generic"]})
            _upgrade(callers, scratch, old, callers, new, "another CPU", outcome)
        _edited_template(callers, scratch, old, outcome)
        progress(f"{len(scratch.entry_names())} entries of fmha_fwd beside each other")
    return outcome


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
    old_callers: Callers,
    scratch: Scratch,
    old: Call,
    new_callers: Callers,
    new: Call,
    what: str,
    outcome: Outcome,
) -> None:
    before = _contents(scratch)
    answer = new_callers.call(new)
    expect_answer(outcome, answer, f"{what}: the first call", how="built")
    added = _contents(scratch).keys() - before.keys()
    outcome.expect(
        len(added) == 1 and Path(answer.library).parent.name in added,
        f"{what}: loaded {answer.library!r}, added {added}",
    )
    expect_answer(outcome, new_callers.call(new), f"{what}: its next call", how="loaded")
    expect_answer(outcome, old_callers.call(old), f"{what}: the old one after it", how="loaded")
    after = _contents(scratch)
    changed = [name for name in before if after.get(name) != before[name]]
    outcome.expect(not changed, f"{what}: changed the entries {changed}")
    expect_clean(outcome, scratch, what)


def _compiler_upgraded_in_place(
    callers: Callers, scratch: Scratch, old: Call, outcome: Outcome
) -> None:
    """What a distribution does: the same path, another version; and back."""
    path = scratch.root / "in-place" / "c++"
    call = _with_compiler(old, str(_compiler(path, "c++ 1.0")))
    expect_answer(outcome, callers.call(call), "version 1.0 of a compiler", how="built")
    before = _contents(scratch)
    _compiler(path, "c++ 2.0")
    expect_answer(outcome, callers.call(call), "version 2.0 of a compiler", how="built")
    _compiler(path, "c++ 1.0")
    expect_answer(outcome, callers.call(call), "version 1.0 again", how="loaded")
    after = _contents(scratch)
    changed = [name for name in before if after.get(name) != before[name]]
    outcome.expect(not changed, f"a compiler upgraded in place: changed the entries {changed}")


def _edited_template(callers: Callers, scratch: Scratch, old: Call, outcome: Outcome) -> None:
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
        _upgrade(callers, scratch, old, edited, old, "an edited template", outcome)


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
