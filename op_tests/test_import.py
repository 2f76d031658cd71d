"""``import jitfmha`` compiles nothing and brings in nothing heavy; no module needs itself."""

import ast
import json
import re
from collections.abc import Container
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from subprocesses import run_python

import jitfmha
from jitfmha.call.dispatch import FAMILIES

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


def test_windows_is_told_so():
    done = run_python("-c", "import sys; sys.platform = 'win32'; import jitfmha", code=1)
    assert "ImportError: jitfmha needs Linux" in done.stderr


def test_import(tmp_path):
    environment = {
        "JITFMHA_CACHE_DIR": str(tmp_path / "cache"),
        "HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": str(tmp_path / "xdg"),
    }
    done = run_python("-c", PROGRAM, **environment)
    imported = json.loads(done.stdout)
    assert "jitfmha.call.interface" in imported
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


def _imports(name: str, path: Path, known: Container[str]) -> set[str]:
    """The package's modules that a module imports: at its top, in functions, for type checkers."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                full = f"{origin}.{alias.name}"
                found.add(full if full in known else origin)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {each for each in found if each in known and each != name}


def test_programs_in_texts_import_what_is_there():
    """Nobody notices those of tests that are skipped on most machines."""
    known, root = _modules(), PACKAGE.parent
    for path in (*(root / "op_tests").rglob("*.py"), *(root / "examples").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"^\s*(?:from|import) (jitfmha[\w.]*)", text, re.MULTILINE)
        assert set(named) <= set(known), path


# A room is a folder or a file directly in the package. It imports what stands above it.
ROOMS = (
    ("problem", "version"),  # the arguments of a call, checked
    ("jit",),  # renders, builds, keeps, loads
    ("amd",),  # chips, code objects, manifests, the HIP runtime
    ("planning",),  # targets and plans
    ("kernels", "emulator"),  # the families; the GPUs that are not here
    ("call",),  # from arguments to a launch, and PyTorch's side of it
    ("rows",),  # what attention does not need: softmax and norms; heads before it
    ("gemm",),  # matrix products, of which the same holds
    ("layers", "context_parallel", "ahead", "replay", "bench"),
    ("flash_attn", "aiter", "export"),
    ("integrations",),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
PLACES = {room: place for place, rooms in enumerate(ROOMS) for room in rooms}


def _graph() -> dict[str, set[str]]:
    modules = _modules()
    graph = {name: _imports(name, path, modules) for name, path in modules.items()}
    seen = {"jitfmha.call.dispatch", "jitfmha.problem.problem"}
    assert graph["jitfmha.call.run"] >= seen, "imports are not seen"
    assert graph["jitfmha.call.detection"] >= {"jitfmha.planning.devices"}, "nor those in functions"
    graph["jitfmha.call.dispatch"] |= {f"jitfmha.kernels.{entrant.module}" for entrant in FAMILIES}
    return graph


def _room(module: str) -> str:
    return (module.split(".") + ["__init__"])[1]


def test_no_module_imports_itself_by_way_of_others():
    """Nor from inside of a function or for a type checker, where a cycle would only be hidden."""
    try:
        tuple(TopologicalSorter(_graph()).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")


def test_imports_in_functions_say_what_they_save():
    """In a comment, on their line or above them; or as what may not be there, in a try."""
    silent = []
    for path in PACKAGE.rglob("*.py"):
        if path.parts[-2:] == ("cli", "doctor.py"):
            continue  # where each check imports what it looks at, as the module says
        text = path.read_text(encoding="utf-8")
        lines, explained = [line.strip() for line in text.splitlines()], 0
        for node in _imports_in_functions(ast.parse(text)):
            above = node.lineno - 2
            while above >= explained and not lines[above]:
                above -= 1
            if (
                above < explained  # It belongs to the one above.
                or "#" in lines[node.lineno - 1]
                or lines[above].startswith("#")
                or lines[above] == "try:"
            ):
                explained = node.end_lineno or node.lineno
            else:
                silent.append(f"{path}:{node.lineno}")
    assert not silent, "\n".join(silent)


def _imports_in_functions(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    nodes = {node for function in functions for node in ast.walk(function)}
    found = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    return sorted(found, key=lambda node: node.lineno)


def test_every_room_imports_those_above_it_alone():
    graph = _graph()
    assert len(PLACES) <= 22
    assert len(ROOMS) <= 14
    assert {_room(module) for module in graph} == set(PLACES), "a room without a place"
    wrong = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if _room(other) != _room(module) and PLACES[_room(other)] >= PLACES[_room(module)]
    ]
    assert not wrong, "\n".join(wrong)
