"""What a process pays once, import and first call, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# The clocks start and stop inside the process, so its own start and torch's import stay out.
_PROCESS = """
import json, sys, time
import torch
start = time.perf_counter()
import jitfmha
imported = time.perf_counter() - start
dtype, mode, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
rows = (1, 128) if mode == "gm0" else (128,)
q, k, v = (torch.randn(*rows, 8, 128).to(getattr(torch, dtype)) for _ in range(3))
ends = None if mode == "gm0" else torch.tensor([0, 50, 128], dtype=torch.int32)
start = time.perf_counter()
jitfmha.fmha_fwd(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends)
called = time.perf_counter() - start
print(json.dumps({"import_seconds": imported, "call_seconds": called}))
"""
_TIMEOUT_SECONDS = 120.0
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class FirstCall:
    """``import_seconds`` is what ``import jitfmha`` took after ``import torch``."""

    import_seconds: float
    call_seconds: float


def first_call(
    cache_dir: str,
    *,
    dtype: str = "bfloat16",
    mode: Literal["gm0", "gm1"] = "gm0",
    threads: int = 2,
) -> FirstCall:
    """Run a new process whose build cache is ``cache_dir``.

    Raises ``RuntimeError`` with the process's stderr when it fails.
    """
    search_path = [_PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.run(
        [sys.executable, "-c", _PROCESS, dtype, mode, str(threads)],
        cwd=cache_dir,
        env={
            **os.environ,
            "JITFMHA_CACHE_DIR": cache_dir,
            "PYTHONPATH": os.pathsep.join(search_path),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    if process.returncode != 0:
        raise RuntimeError(f"the process for a first call failed:\n{process.stderr.strip()}")
    return FirstCall(**json.loads(process.stdout))
