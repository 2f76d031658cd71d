"""The documents: Python runs, commands parse, what is named exists, the site builds."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rigs import speed_table
from subprocesses import run_forked

import jitfmha
from jitfmha.call.interface import fmha_fwd
from jitfmha.cli import flags
from jitfmha.cli.doctor import LOWEST_TORCH, SIZE_OF_CUDA_BUILD
from jitfmha.cli.flags import parser
from jitfmha.jit.cache.eviction import DEFAULT_LIMIT_BYTES
from jitfmha.jit.toolchain.compiling import INSTALL_ZIG

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = _ROOT / "jitfmha"
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
def test_python_of_a_document(code, tmp_path, monkeypatch, capsys):
    if "install_as" in code:
        # What it installs stays for as long as the process.
        run_forked("-c", code)
        return
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "document", "exec"), scope)
    if "300, 4, 128" in code:
        # 300 queries of four heads go to the smaller of two tiles.
        expected = "fmha_fwd_hd128_bf16_causal_rtne_q128 on AMD Instinct MI300X"
        assert expected in capsys.readouterr().out


def test_there_is_python_to_run():
    assert len(_PYTHON) >= 4
    assert all(ast.parse(parameters.values[0]).body for parameters in _PYTHON)


def _commands() -> list[str]:
    texts = [file.read_text(encoding="utf-8") for file in (*_DOCS, _README, _CONTRIBUTING)]
    return sorted({found.strip() for text in texts for found in _COMMANDS.findall(text)})


@pytest.mark.parametrize("command", _commands())
def test_a_command_of_a_document_is_one(command, capsys, monkeypatch):
    for check in ("_file", "_folder", "_launch"):  # none of them is here
        monkeypatch.setattr(flags, check, Path)
    words = shlex.split(command.replace("...", "x"), comments=True)
    try:
        parser().parse_args(words)
    except SystemExit as end:
        error = capsys.readouterr().err
        # Text names a command without what it needs.
        is_name_alone = len(words) <= 2 and ("required" in error or "expected" in error)
        if "--help" not in words and not is_name_alone:
            pytest.fail(f"{command!r}: {end.code}, {error}")


def test_the_readme_takes_two_minutes():
    text = _README.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 120
    assert lines.index("```python") < 40
    assert len(text.split()) <= 1000
    assert "has run on a real GPU yet" in text
    assert "--exhaustive" in text


def test_the_pages_name_everything_there_is():
    functions = (_ROOT / "docs" / "functions.md").read_text(encoding="utf-8")
    errors = {name for name in jitfmha.__all__ if name.endswith(("Error", "NotFound"))}
    # What functions return is described with these.
    results = {"AttentionCache", "BrokenRule", "Validation", "WarmedLauncher", "__version__"}
    packed = {f"flash_attn_{x}_func" for x in ("qkvpacked", "kvpacked")}
    packed |= {f"flash_attn_varlen_{x}_func" for x in ("qkvpacked", "kvpacked")}
    documented = set(re.findall(r"\w+", functions))
    assert set(jitfmha.__all__) - errors - results - packed <= documented
    arguments = set(fmha_fwd.__code__.co_varnames[: fmha_fwd.__code__.co_argcount])
    assert {name for name in arguments if not name.startswith("_")} <= documented

    page = (_ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    commands = parser()._subparsers._group_actions[0].choices
    assert [x for x in commands if not re.search(rf"`{x}\b", page)] == []
    sources = (path.read_text(encoding="utf-8") for path in _PACKAGE.rglob("*.py"))
    # Those that are constants of C++ end so.
    variables = {x for text in sources for x in _VARIABLES.findall(text) if "ARGUMENTS" not in x}
    assert len(variables) > 5
    assert [x for x in sorted(variables) if f"`{x}`" not in page] == []


def test_the_names_of_the_readme_are_there_after_one_import():
    names = sorted(set(re.findall(r"`(?:with )?(jitfmha(?:\.\w+)+)", _README.read_text("utf-8"))))
    assert "jitfmha.integrations.sdpa.patch" in names
    run_forked("-c", f"import jitfmha\nprint({', '.join(names)})")


def test_every_page_is_listed():
    listing = (_ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    menu = (_ROOT / ".ci" / "mkdocs.yml").read_text(encoding="utf-8")
    for file in _DOCS:
        assert f": docs/{file.name}\n" in menu
        assert file.stem == "README" or f"({file.name})" in listing


def test_the_site(tmp_path):
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


# ---- Numbers that stand in several places --------------------------------------------------------


def test_the_speed_table_follows_from_its_times():
    rows = re.findall(
        r"\| (.+) \| ([\d.]+) ms \| ([\d.]+) ms[^|]* \| ([\d.]+x) \|",
        (_ROOT / "docs" / "speed.md").read_text(encoding="utf-8"),
    )
    times = {name: (ours, theirs) for name, ours, theirs, _ in rows}
    assert list(times) == list(speed_table.ROWS)
    for name, ours, theirs, ratio in rows:
        assert ratio == speed_table.faster(ours, theirs), name
    (said,) = speed_table.README_NUMBERS.findall(_README.read_text(encoding="utf-8"))
    assert said == times[speed_table.FORWARD] + times[speed_table.TRAINING]


def _project(key: str) -> str:
    """What pyproject.toml says behind ``key``."""
    text = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (value,) = set(re.findall(rf'"?{re.escape(key)}([^\s";]+)', text))
    return value


_CI = (_ROOT / ".ci" / "run").read_text(encoding="utf-8")
_PYTHONS = re.findall(r"Python :: (3\.\d+)", (_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# How documents say it, the number being a group; what is true; in how many places it stands.
_SAID = {
    r"(?:PyTorch for ROCm|ROCm first),? \(?([\d.]+) or newer": (
        LOWEST_TORCH,
        2,
    ),
    r"Python (3\.\d+ to 3\.\d+)": (f"{_PYTHONS[0]} to {_PYTHONS[-1]}", 2),
    r"CUDA build of some (\d+ GB)": (SIZE_OF_CUDA_BUILD, 2),
    r"pip install ('ziglang>=[\d.]+')": (INSTALL_ZIG.removeprefix("pip install "), 3),
    r"by default (\d+) GiB|JITFMHA_CACHE_LIMIT` \((\d+) GiB\)": (
        str(DEFAULT_LIMIT_BYTES >> 30),
        2,
    ),
    r"## \[([\d.]+)\]": (jitfmha.__version__, 1),
    r"\| ([\d.]+), CPU build \| all tests": (re.findall(r"torch==([\d.]+)", _CI)[0], 1),
}


@pytest.mark.parametrize("said", list(_SAID))
def test_a_number_of_the_documents_is_that_of_the_code(said):
    true, places = _SAID[said]
    files = (*_DOCS, _README, _ROOT / "CHANGELOG.md")
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    found = [next(filter(None, x.groups())) for x in re.finditer(said, text)]
    assert found == [true] * places


def test_lower_bounds_are_those_of_the_project():
    assert _project("torch>=") == LOWEST_TORCH
    assert _project('compiler = ["ziglang') == INSTALL_ZIG.split("ziglang")[1].rstrip("'")


# ---- What CONTRIBUTING.md names ------------------------------------------------------------------

_PATH = re.compile(r"[\w.-]*/[\w./-]*|[\w-]+\.(?:py|csv|json|h|in|md)")
_NAME = re.compile(r"(?!torch\b)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


@cache
def _names() -> set[str]:
    """The names of the package's code, and every word of its templates."""
    templates = (file for file in (_ROOT / "csrc_templates").rglob("*") if file.is_file())
    words = {x for file in templates for x in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    return words.union(*map(_names_in, _PACKAGE.rglob("*.py")))


def _names_in(file: Path) -> Iterator[str]:
    yield from (file.stem, file.parent.name)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _missing(text: str) -> list[str]:
    """The paths and the names of code among what stands in backticks that are not there."""
    explained, run = text.split("## How to run what")
    quoted = re.findall(r"`([^`]+)`", explained)
    words = [word for quote in (*quoted, *re.findall(r"`([^`]+)`", run)) for word in quote.split()]
    paths = [word.replace("NAME", "*") for word in words if _PATH.fullmatch(word)]
    wrong = [
        path
        for path in paths
        if not any(next(root.glob(path.rstrip("/")), None) for root in (_ROOT, _PACKAGE))
        and ("/" in path or next(_PACKAGE.rglob(path), None) is None)
    ]
    for quote in quoted:
        if _NAME.fullmatch(quote) and quote not in paths:
            wrong += [quote] * (not _names().issuperset(quote.split(".")))
    return wrong


def test_what_contributing_names_is_there():
    text = _CONTRIBUTING.read_text(encoding="utf-8")
    assert _missing(text) == []
    for was, gone in (("`call/run.py`", "call.py"), ("`Arguments`", "TensorGuards")):
        assert _missing(text.replace(was, f"`{gone}`")) != []


def test_files_that_documents_name_are_there():
    others = ("SECURITY.md", "CHANGELOG.md", "hsa/README.md", "csrc_templates/emulator/README.md")
    folders = "jitfmha|csrc_templates|hsa|op_tests|docs|examples"
    named = re.compile(rf"\b((?:{folders})/[\w/-]+\.[\w.]*\w)")
    found = 0
    for file in (*_DOCS, _README, *(_ROOT / other for other in others)):
        for path in named.findall(file.read_text(encoding="utf-8")):
            found += 1
            assert (_ROOT / path).is_file(), f"{path} in {file}"
    assert found > 10
