"""Each example of a feature runs as it is written, on the CPU and on emulated GPUs."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "features"
FILES = [path for path in sorted(FOLDER.glob("*.py")) if path.name != "plain.py"]


@pytest.mark.sample("device", ["cpu", "gfx942", "gfx950"], 1)
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_runs(file, device, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [str(file), "--device", device])
    runpy.run_path(str(file), run_name="__main__")
    assert "off by" in capsys.readouterr().out


def test_a_wrong_result_ends_an_example(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    compare = runpy.run_path(str(FOLDER / "plain.py"))["compare"]
    expected = torch.ones(2, 3, dtype=torch.float64)
    for wrong in (1 + 2**-6, torch.nan):
        with pytest.raises(SystemExit, match="one is wrong"):
            compare("one", (expected * wrong).bfloat16(), expected)


def test_the_documents_name_each():
    page = (FOLDER.parents[1] / "docs" / "functions.md").read_text(encoding="utf-8")
    missing = [file.name for file in FILES if f"../examples/features/{file.name}" not in page]
    assert not missing
