"""The mutants, and what runs them: lists that fit the tree, and a few of them that are caught."""

from __future__ import annotations

import ast
import os
import random
import re
import shlex
import sys
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from mutants import run
from mutants.run import ROOT, Mutant, Runner, drawn, judged, main, mutants

_DRAWN = 3
_CAUGHT_ANYWHERE = ("manifest-twin", "tune-infinite-time")
# What nobody would write a mutant of: a version, and what starts the command.
_PLAIN_ROOMS = {"__init__.py", "__main__.py", "version.py", "__pycache__"}


def _rooms() -> list[Path]:
    """What there is a mutant of each: folders and lone files."""
    inside = (ROOT / "jitfmha").iterdir()
    package = [x for x in inside if x.name not in _PLAIN_ROOMS and x.suffix in ("", ".py")]
    templates = [x for x in (ROOT / "csrc_templates").iterdir() if x.is_dir()]
    return [*package, *templates, ROOT / "hsa" / "src"]


def test_texts_are_there_once():
    stale = [each.id for each in mutants() if each.mutated((ROOT / each.file).read_text()) is None]
    assert not stale


def test_each_is_a_fault_of_its_own():
    found = mutants()
    ids = [each.id for each in found]
    assert sorted(set(ids)) == sorted(ids)
    assert all(re.fullmatch(r"[a-z0-9-]+", each) for each in ids)
    assert len({(each.file, each.old, each.new) for each in found}) == len(found)
    assert not [each.id for each in found if each.old.split() == each.new.split()]


def test_python_is_python_with_the_fault():
    for each in mutants():
        if each.file.endswith(".py"):
            compile((ROOT / each.file).read_text().replace(each.old, each.new), each.id, "exec")


def test_tests_are_there():
    missing = []
    for each in mutants():
        names = [x for x in shlex.split(each.tests) if x.startswith("op_tests/")]
        assert names, each.id
        for name in names:
            file, _, function = name.partition("::")
            is_there = (ROOT / file).is_file()
            if not is_there or function.partition("[")[0] not in ("", *_functions_of(ROOT / file)):
                missing.append(f"{each.id}: {name}")
        files = [ROOT / name.partition("::")[0] for name in names]
        texts = [file.read_text() for file in files if file.is_file()]
        missing += [
            f"{each.id}: {word}"
            for word in _selected(each)
            if not any(word in text for text in texts)
        ]
    assert not missing


def _selected(mutant: Mutant) -> list[str]:
    """The tests that ``-k`` names."""
    arguments = shlex.split(mutant.tests)
    expressions = [b for a, b in pairwise(arguments) if a == "-k"]
    return re.findall(r"\btest_\w+", " ".join(expressions))


@cache
def _functions_of(file: Path) -> list[str]:
    tree = ast.parse(file.read_text())
    return [x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)]


def test_every_room_has_one():
    files = [ROOT / each.file for each in mutants()]
    without = [x for x in _rooms() if not any(file.is_relative_to(x) for file in files)]
    assert not without


def test_some_are_caught(request, run_seed):
    """The same ones in each run: some are caught by chance, or on some machines alone."""
    chosen = mutants(_CAUGHT_ANYWHERE)
    assert len(chosen) == len(_CAUGHT_ANYWHERE)
    if request.config.getoption("--exhaustive"):
        chosen += drawn(mutants(), _DRAWN, random.Random(run_seed))
    outcomes = list(Runner().outcomes(chosen))
    assert not [str(each) for each in outcomes if not each.is_fine]


# ---- What runs them ------------------------------------------------------------------------------

PLANTED = Mutant(
    id="planted",
    file="jitfmha/amd/chips.py",
    fault="none at all",
    old="from __future__ import annotations\n",
    new="from __future__ import annotations  # of this file\n",
    tests="op_tests/test_chips.py::test_architectures",
)
FAULT = {"old": "return _facts().architectures[name]", "new": "return None"}


def test_what_becomes_of_them(monkeypatch, capfd):
    """One changes nothing, one is a fault; of others the text or the tests are not there."""
    planted = [
        PLANTED,
        replace(PLANTED, id="caught", **FAULT),
        replace(PLANTED, id="gone", old="what no file has"),
        replace(PLANTED, id="moved", file="jitfmha/nowhere.py"),
        replace(PLANTED, id="renamed", tests="op_tests/test_chips.py::test_nowhere"),
        replace(PLANTED, id="foreign", isa="none"),
    ]
    monkeypatch.setattr(run, "mutants", lambda patterns: planted)
    assert main(["--jobs", "2"]) == 1
    shown = capfd.readouterr().out
    words = dict(line.split()[:2] for line in shown.splitlines()[:-1])
    assert words == {
        "planted": "SURVIVED",
        "caught": "caught",
        "gone": "stale",
        "moved": "stale",
        "renamed": "broken",
        "foreign": "not",
    }
    assert "test_chips.py::test_architectures" in shown
    assert shown.splitlines()[-1].startswith("6 mutants: 2 stale, ")
    monkeypatch.setattr(run, "mutants", lambda patterns: planted[1:2])
    assert main([]) == 0


@pytest.mark.parametrize(
    ("changes", "code", "output", "word"),
    [
        ({}, 0, "3 passed in 0.1s", "SURVIVED"),
        ({}, 0, "3 skipped in 0.1s", "not run here"),
        ({}, 1, "FAILED op_tests/test_x.py::test_y - assert 1 == 2", "caught"),
        ({}, 2, "ERROR op_tests/test_x.py", "broken"),
        ({}, -11, "Fatal Python error", "caught"),
        ({}, None, "", "timed out"),
        ({"hangs": True}, None, "", "caught"),
        ({"equivalent": "why"}, 0, "3 passed in 0.1s", "equivalent"),
        ({"equivalent": "why"}, 1, "FAILED op_tests/test_x.py::test_y", "not equivalent"),
        ({"file": "csrc_templates/x.h"}, 1, "jitfmha.jit.errors.BuildError: x", "broken"),
        ({"file": "csrc_templates/x.h", "does_not_compile": True}, 1, "BuildError: x", "caught"),
    ],
)
def test_what_exit_codes_say(changes, code, output, word):
    found, _ = judged(replace(PLANTED, **changes), code, output)
    assert found == word


def test_what_is_left_running_is_not_waited_for(tmp_path):
    """Here it holds the output, and has a session of its own, as a builder of the cache has."""
    program = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(200)"], start_new_session=True)
print("begun", flush=True)
time.sleep(float(sys.argv[1]))
"""
    command, start = [sys.executable, "-c", program], time.monotonic()
    assert run._run([*command, "0"], tmp_path, dict(os.environ), 60.0) == (0, "begun\n")
    assert run._run([*command, "300"], tmp_path, dict(os.environ), 1.0)[0] is None
    assert time.monotonic() - start < 150


def test_tests_alone_have_no_faults(monkeypatch, capfd):
    planted = [replace(PLANTED, **FAULT), replace(PLANTED, id="same tests")]
    monkeypatch.setattr(run, "mutants", lambda patterns: planted)
    assert main(["--unchanged"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "1 mutants: 1 equivalent"
