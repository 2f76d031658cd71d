"""The documents: their Python runs, their commands parse, their site builds."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jitfmha import cli

_ROOT = Path(__file__).resolve().parents[1]
_DOCS = sorted((_ROOT / "docs").glob("*.md"))
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
def test_python_of_a_document(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "install_as" in code:
        # What it installs stays for as long as the process.
        subprocess.run([sys.executable, "-c", code], check=True)
        return
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "document", "exec"), scope)


def test_there_is_python_to_run() -> None:
    assert len(_PYTHON) >= 4
    assert all(ast.parse(parameters.values[0]).body for parameters in _PYTHON)


def _commands() -> list[str]:
    texts = [file.read_text(encoding="utf-8") for file in (*_DOCS, _ROOT / "README.md")]
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
