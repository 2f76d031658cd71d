"""Faults found in kernels of others: what can be said of `examples/found` without these kernels."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from subprocesses import ROOT

from jitfmha.cli.launch_description import LaunchDescription

_FOLDER = ROOT / "examples" / "found"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reproduce", _FOLDER / "reproduce.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reproduce"] = module
    spec.loader.exec_module(module)
    return module


_REPRODUCE = _script()
_FOUND = _REPRODUCE.FOUND


def test_each_fault_has_a_launch_and_is_documented():
    assert {path.stem for path in _FOLDER.glob("*.json")} == set(_FOUND)
    document = (ROOT / "docs" / "found.md").read_text(encoding="utf-8")
    for name, found in _FOUND.items():
        assert f"`{name}`" in document
        assert found.file.rpartition("/")[2] in document


@pytest.mark.parametrize("name", _FOUND)
def test_a_launch_is_one_of_the_file_that_is_named(name):
    found = _FOUND[name]
    launch = LaunchDescription.read(_FOLDER / f"{name}.json")
    assert launch.kernel is not None
    if found.compiled is None:
        folder, stem = found.file.split("/")[1], Path(found.file).stem
        assert (launch.arch, stem in launch.kernel) == (folder, True)
        return
    assert launch.kernel == found.compiled.kernel
    # Arguments are those of the signature, in order, and two hidden addresses of Triton's.
    arguments = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))["arguments"]
    types = [each.get("type", "*") for each in arguments]
    kinds = (kind.replace("fp", "f") for kind in found.compiled.signature.values())
    expected = ["*" if kind.startswith("*") else kind for kind in kinds]
    assert ["*" if kind in ("*", "u64") else kind for kind in types] == [*expected, "*", "*"]
    assert launch.block == (64 * found.compiled.options["num_warps"], 1, 1)


def test_another_file_is_refused(tmp_path):
    other = tmp_path / "other.co"
    other.write_bytes(b"something else")
    with pytest.raises(ValueError, match="has the SHA-256"):
        _REPRODUCE.reproduce(next(iter(_FOUND)), other)
