"""Each kind of launcher has what its kernels need, nothing of other kinds, and no warnings."""

import re
import shutil
import sys
from collections.abc import Iterator
from itertools import product
from typing import get_args

import pytest
from subprocesses import run_program

from jitfmha.amd.chips import Arch
from jitfmha.kernels.launcher import Block, LauncherKind, launcher_spec
from jitfmha.problem.problem import Direction, Mode

KINDS = [
    LauncherKind(*parts)
    for parts in product(get_args(Arch), get_args(Mode), get_args(Direction), get_args(Block))
]
NAMES = [f"{kind.name}_{kind.arch}" for kind in KINDS]
# What only launchers with all of these have: words of their code.
WORDS_OF: dict[tuple[str, ...], tuple[str, ...]] = {
    ("gfx942",): ("gfx942",),
    ("gfx950",): ("gfx950",),
    ("gm0",): ("gm0",),
    ("gm1",): ("gm1",),
    ("forward",): ("forward", "struct Call", "DescaleStrides"),
    ("backward",): ("backward",),
    ("aiter",): ("aiter",),
    ("ready",): ("ready",),
    ("compiled",): ("compiled", "Modifiers"),
    ("gm0", "forward"): ("xcd_heads =", "has_heads_first"),
    ("gm1", "forward"): ("slots", "tail_begin =", "kMostWorkgroups"),
    ("forward", "aiter"): ("AiterArguments", "schedule_of", "workgroup_tiles"),
    ("forward", "compiled"): ("CompiledArguments", "StackedHeads", "stacked_heads"),
    ("backward", "ready"): ("ReadyBackwardArguments", "Window"),
    ("backward", "compiled"): ("BackwardArguments",),
    ("backward", "aiter"): ("AiterBackward", "AiterRowSumArguments", "AiterDqArguments"),
}


def parts_of(kind: LauncherKind) -> set[str]:
    return {kind.arch, kind.mode, kind.direction, kind.block}


def code_of(kind: LauncherKind) -> str:
    """All sources without comments."""
    text = "\n".join(launcher_spec(kind).sources.values())
    return re.sub(r"//.*", "", text)


def words_of_others(kind: LauncherKind) -> Iterator[str]:
    for owners, words in WORDS_OF.items():
        if not parts_of(kind).issuperset(owners):
            yield from words


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_nothing_of_other_kinds(kind):
    code = code_of(kind)
    # Neither as a word nor as a part of a name with underscores.
    found = [
        word
        for word in words_of_others(kind)
        if re.search(rf"(?<![A-Za-z]){re.escape(word)}(?![A-Za-z])", code)
    ]
    assert found == []


def test_the_words_are_there():
    """Each of them is in some launcher; or the test above would look for what nobody writes."""
    codes = {kind: code_of(kind) for kind in KINDS}
    for owners, words in WORDS_OF.items():
        for word in words:
            having = {kind for kind, code in codes.items() if word in code}
            assert having, f"{word} of {owners}"


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_says_what_it_was_rendered_from(kind):
    (source,) = launcher_spec(kind).compiled_sources
    first, *_ = launcher_spec(kind).sources[source].splitlines()
    template = f"csrc_templates/amd/launcher/{kind.direction}_{kind.block}.cpp.in"
    assert first == f"// Rendered from {template} for {kind.mode} on {kind.arch}."


COMPILERS = {"g++": ["g++"], "zig": [sys.executable, "-m", "ziglang", "c++"]}


# The code of the others is that of the same kind of another chip: the test of words sees it.
OWN_CODE = [kind for kind in KINDS if kind.arch == "gfx942" or kind.block == "aiter"]


@pytest.mark.parametrize("compiler", list(COMPILERS))
@pytest.mark.parametrize("kind", OWN_CODE, ids=lambda kind: f"{kind.name}_{kind.arch}")
def test_compiles_without_warnings(kind, compiler, tmp_path):
    """With two compilers, each of which warns of what the other one does not see."""
    if compiler == "g++" and shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    if compiler == "zig":
        pytest.importorskip("ziglang")
    spec = launcher_spec(kind)
    for name, text in spec.sources.items():
        (tmp_path / name).write_text(text)
    warnings = ("-Wall", "-Wextra", "-Werror", "-c")
    command = (*COMPILERS[compiler], *spec.cflags, *warnings, *spec.compiled_sources)
    run_program(*command, cwd=tmp_path)
