"""What ``doctor --gpu-report`` adds: GPU tests, and times beside what the cost model estimates."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..ahead.tune import TunedCall, tune
from ..bench.shapes import shapes_of
from ..jit.fresh_process import fresh_python
from .output import progress
from .tune import combination_of, values_of

TESTS = Path(__file__).resolve().parents[2] / "op_tests" / "gpu"
"""They are in a checkout, also in one that is installed editable."""

_SHAPES = ("seqlens", "causal", "training", "decode")
_TEST_SECONDS = 600
_SHAPE_SECONDS = 0.5
_PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
_MOST_TEXT = 20_000  # characters of what tests print


def gathered(
    device: str,
    *,
    shapes: Sequence[str] = _SHAPES,
    seconds: float = _SHAPE_SECONDS,
    tests: Path = TESTS,
) -> dict[str, Any]:
    """Run the tests and time the shapes, as far as they run; what is measured is kept, too."""
    return {
        "tests": _tests(tests),
        "times": list(_times(device, shapes, seconds)),
    }


def _tests(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        return {"left_out": f"there is no {folder}: tests are in a checkout"}
    if find_spec("pytest") is None:
        return {"left_out": "pytest is not installed"}
    progress(f"running {folder}, for {_TEST_SECONDS // 60} minutes at most")
    arguments = [str(folder), "-v", "-p", "no:cacheprovider"]
    start = time.perf_counter()
    process = subprocess.Popen(
        fresh_python(_PYTEST, *arguments),
        cwd=folder.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=_TEST_SECONDS)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        code = None
    return {
        "exit_code": code,
        "seconds": round(time.perf_counter() - start, 1),
        "output": output[-_MOST_TEXT:],
    }


def _times(device: str, shapes: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    calls = [combination_of(shape) for text in shapes for shape in shapes_of(text)]
    for number, done in enumerate(tune(calls, device, seconds=seconds), 1):
        progress(f"timed {number} of {len(calls)} calls")
        yield values_of(done) if isinstance(done, TunedCall) else {"left_out": done}
