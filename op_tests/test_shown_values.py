"""What people see of tables, explanations and profiles: terminals and notebooks."""

import pytest
import torch
from untyped import explain

from jitfmha.amd.demangling import demangled
from jitfmha.cli import output
from jitfmha.cli.lines import folded
from jitfmha.emulator import profile

HEADERS = ("launcher", "size", "state")
ROWS = [("x" * 70, "12 KiB", "ok"), ("short", "3 KiB", "ok")]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_tables_fit_the_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = output.table(HEADERS, ROWS).splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.count("x") for line in lines) == 70
    assert sum(line.endswith("ok") for line in lines) == 2


def test_several_columns_are_wrapped(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rows = [("tree", "k" * 55, "gfx942", "f" * 53), ("", "k" * 20, "", "f" * 9)]
    lines = output.table(("tree", "kernel", "arch", "file"), rows).splitlines()
    assert max(map(len, lines)) <= 80
    for letter, count in (("k", 75 + 1), ("f", 62 + 1)):  # those of the header
        assert sum(line.count(letter) for line in lines) >= count
    assert lines[-1].split() == ["k" * 20, "f" * 9]


def test_cells_are_cut_between_their_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "34")
    rows = [("compiled_gm0_gfx942", "in the cache already", "12")]
    assert output.table(("launcher", "build", "size"), rows).splitlines()[2:] == [
        "compiled_gm0_  in the cache    12",
        "gfx942         already",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("name    one two three four", ["name    one two", "        three four"]),
        ("  problem: it has no end", ["  problem: it has no", "    end"]),
        ("see /a/long/path/of/a/file now", ["see", "  /a/long/path/of/a/file", "  now"]),
    ],
)
def test_lines_are_folded_between_words(line, expected, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert folded(line).splitlines() == expected


def test_an_explanation_in_a_notebook():
    x = torch.zeros(1, 4, 2, 64)
    explanation = explain(x, x, x)
    assert len(repr(explanation)) < 120
    assert explanation.plan.kernel in repr(explanation)
    assert explanation._repr_html_().startswith("<pre>target   cpu")
    assert "&lt;" in explain(x, x, x)._replace(remarks=("a < b",))._repr_html_()


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_ZN5aiter3addEPfi", "aiter::add(float*, int)"),
        ("fmha_fwd_hd64", "fmha_fwd_hd64"),
        ("_Zbroken", "_Zbroken"),
    ],
)
def test_names_of_functions(symbol, name):
    assert demangled(symbol) == name


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999999, "999999"), (1234567.0, "1.2346M"), (1.5, "1.5"), (98765432100, "98.765G")],
)
def test_figures_of_a_profile(value, text):
    assert profile._figure(value) == text


def test_tables_of_a_profile_are_in_blocks():
    names = [f"column {i}" for i in range(13)]
    rows = [["a name of some length", *names], ["all", *("1234567" for _ in names)]]
    lines = profile._table(rows)
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).count("1234567") == 13
    assert all(" ".join(lines).count(name) >= 1 for name in names)
    assert len(lines) == 6
