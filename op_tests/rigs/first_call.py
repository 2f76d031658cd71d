"""What a process pays once, import and first call, measured in a process of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from .fresh_run import run_fresh

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
sums = None if mode == "gm0" else torch.tensor([0, 50, 128], dtype=torch.int32)
start = time.perf_counter()
jitfmha.fmha_fwd(q, k, v, cu_seqlens_q=sums, cu_seqlens_k=sums)
called = time.perf_counter() - start
print(json.dumps({"import_seconds": imported, "call_seconds": called}))
"""
_TIMEOUT_SECONDS = 120.0


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
    process = run_fresh(
        *(_PROCESS, dtype, mode, str(threads)),
        failure="the process for a first call failed",
        timeout=_TIMEOUT_SECONDS,
        cwd=cache_dir,
        environment={"JITFMHA_CACHE_DIR": cache_dir},
    )
    return FirstCall(**json.loads(process.stdout))
