"""``import jitfmha`` compiles nothing, touches no cache, and brings in nothing heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys
import torch
before = set(sys.modules)
import jitfmha
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
