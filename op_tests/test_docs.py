"""The documents: Python runs, commands parse, what is named exists, the site builds."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jitfmha
from jitfmha import cli
from jitfmha.call.interface import fmha_fwd

_ROOT = Path(__file__).resolve().parents[1]
_README = _ROOT / "README.md"
_CONTRIBUTING = _ROOT / "CONTRIBUTING.md"
_DOCS = sorted((_ROOT / "docs").glob("*.md"))
_VARIABLES = re.compile(r"[\"']((?:JITFMHA|AITER)_[A-Z_]+)[\"']")
_COMMANDS = re.compile(r"python -m jitfmha ([a-z][^`\n|]*)")


def _blocks(file: Path, language: str) -> list[str]:
    """Those that need nothing that is not here: a comment in front of the others says so."""
    text = file.read_text(encoding="utf-8")
    return re.findall(rf"(?<!not run -->\n)```{language}\n(.*?)```", text, re.DOTALL)


_PYTHON = [
    pytest.param(code, id=f"{file.stem}-{number}")
    for file in _DOCS
    for number, code in enumerate(_blocks(file, "python"))
]


@pytest.mark.parametrize("code", _PYTHON)
def test_python_of_a_document(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "install_as" in code:
        # What it installs stays for as long as the process.
        subprocess.run([sys.executable, "-c", code], check=True)
        return
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "document", "exec"), scope)
    if "300, 4, 128" in code:
        # 300 queries of four heads go to the smaller of two tiles.
        expected = "fmha_fwd_hd128_bf16_causal_rtne_q128 on AMD Instinct MI300X"
        assert expected in capsys.readouterr().out


def test_there_is_python_to_run() -> None:
    assert len(_PYTHON) >= 4
    assert all(ast.parse(parameters.values[0]).body for parameters in _PYTHON)


def _commands() -> list[str]:
    texts = [file.read_text(encoding="utf-8") for file in (*_DOCS, _README)]
    return sorted({found.strip() for text in texts for found in _COMMANDS.findall(text)})


@pytest.mark.parametrize("command", _commands())
def test_a_command_of_a_document_is_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command.replace("...", "x"), comments=True)
    try:
        cli._parser().parse_args(words)
    except SystemExit as end:
        error = capsys.readouterr().err
        # Text names a command without what it needs.
        is_name_alone = len(words) <= 2 and ("required" in error or "expected" in error)
        if "--help" not in words and not is_name_alone:
            pytest.fail(f"{command!r}: {end.code}, {error}")


def test_the_readme_takes_two_minutes() -> None:
    text = _README.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 120
    assert lines.index("```python") < 40
    assert len(text.split()) <= 1000
    assert "has run on a real GPU yet" in text
    assert "--exhaustive" in text


def test_the_pages_name_everything_there_is() -> None:
    functions = (_ROOT / "docs" / "functions.md").read_text(encoding="utf-8")
    errors = {name for name in jitfmha.__all__ if name.endswith(("Error", "NotFound"))}
    # What functions return is described with these.
    results = {"AttentionCache", "BrokenRule", "WarmedLauncher", "__version__"}
    packed = {f"flash_attn_{x}_func" for x in ("qkvpacked", "kvpacked")}
    packed |= {f"flash_attn_varlen_{x}_func" for x in ("qkvpacked", "kvpacked")}
    documented = set(re.findall(r"\w+", functions))
    assert set(jitfmha.__all__) - errors - results - packed <= documented
    arguments = set(fmha_fwd.__code__.co_varnames[: fmha_fwd.__code__.co_argcount])
    assert {name for name in arguments if not name.startswith("_")} <= documented

    page = (_ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    commands = cli._parser()._subparsers._group_actions[0].choices
    assert [x for x in commands if not re.search(rf"`{x}\b", page)] == []
    sources = (path.read_text(encoding="utf-8") for path in (_ROOT / "jitfmha").rglob("*.py"))
    # Those that are constants of C++ end so.
    variables = {x for text in sources for x in _VARIABLES.findall(text) if "ARGUMENTS" not in x}
    assert len(variables) > 5
    assert [x for x in sorted(variables) if f"`{x}`" not in page] == []


def test_every_page_is_listed() -> None:
    listing = (_ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    menu = (_ROOT / ".ci" / "mkdocs.yml").read_text(encoding="utf-8")
    for file in _DOCS:
        assert f": docs/{file.name}\n" in menu
        assert file.stem == "README" or f"({file.name})" in listing


def test_the_site(tmp_path: Path) -> None:
    site = tmp_path / "site"
    build = [sys.executable, str(_ROOT / ".ci" / "site.py"), str(site)]
    process = subprocess.run(build, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    for file in _DOCS:
        page = "index.html" if file.stem == "README" else f"{file.stem}/index.html"
        assert (site / "docs" / page).is_file()
    again = subprocess.run(build, capture_output=True, text=True, check=False)
    assert again.returncode != 0
    assert "exists" in again.stderr
