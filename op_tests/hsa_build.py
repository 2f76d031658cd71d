"""hsa/build.py as a module: it is a script of the repository, and in no package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def _load() -> ModuleType:
    path = REPOSITORY / "hsa" / "build.py"
    spec = importlib.util.spec_from_file_location("hsa_build_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the types of their fields
    spec.loader.exec_module(module)
    return module


hsa_build: Any = _load()
