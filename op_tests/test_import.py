"""``import jitfmha`` compiles nothing and brings in nothing heavy; no module needs itself."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Container, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import jitfmha
from jitfmha.dispatch import FAMILIES

PROGRAM = """
import json, sys
import torch
before = set(sys.modules)
import jitfmha
assert torch.ops.jitfmha.fmha_fwd, "programs that were exported to files need it"
print(json.dumps(sorted(set(sys.modules) - before)))
"""
# Needed to build, not to import; each takes longer than the package itself.
HEAVY = ("torch.utils.cpp_extension", "setuptools", "filelock", "platformdirs", "torch._inductor")


def test_import(tmp_path: Path) -> None:
    environment = os.environ | {
        "JITFMHA_CACHE_DIR": str(tmp_path / "cache"),
        "HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": str(tmp_path / "xdg"),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    imported = json.loads(done.stdout)
    assert "jitfmha.interface" in imported
    assert not [name for name in imported if name.startswith(HEAVY)]
    assert list(tmp_path.iterdir()) == []
    assert done.stderr == ""


# ---- No cycles -----------------------------------------------------------------------------------

PACKAGE = Path(jitfmha.__file__).parent


def _modules() -> dict[str, Path]:
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def _run_time_statements(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below ``node``, in functions too, without what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _run_time_statements(child)


def _imports(name: str, path: Path, known: Container[str]) -> set[str]:
    """The package's modules that a module imports, at its top or anywhere else."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in _run_time_statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                full = f"{origin}.{alias.name}"
                found.add(full if full in known else origin)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {each for each in found if each in known and each != name}


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Nor from inside of a function, where a cycle would only be hidden."""
    modules = _modules()
    graph = {name: _imports(name, path, modules) for name, path in modules.items()}
    assert graph["jitfmha.call"] >= {"jitfmha.dispatch", "jitfmha.problem"}, "imports are not seen"
    assert graph["jitfmha.detection"] >= {"jitfmha.amd.devices"}, "nor those in functions"
    graph["jitfmha.dispatch"] |= {f"jitfmha.kernels.{entrant.name}" for entrant in FAMILIES}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")
