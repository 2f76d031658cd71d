"""What the device's memory gives: reading, writing and copying a block that no cache holds."""

from __future__ import annotations

from functools import partial

import torch

from .report import Progress, Report
from .timing import alternate, finished, machine_here

_QUICK_BYTES = 256 << 20
_BYTES = {"cpu": 1 << 30, "cuda": 4 << 30}


def run(quick: bool, progress: Progress) -> Report:
    """Measure with torch's threads, or on the GPU that torch takes by default."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = _QUICK_BYTES if quick else _BYTES[device.type]
    report = Report(
        "memory",
        {
            "device": str(device),
            "block": f"{size >> 20} MiB",
            **machine_here(),
        },
    )
    for what, gigabytes in bandwidths(device, size, seconds=1.0 if quick else 6.0).items():
        progress(f"{what}: {gigabytes:.1f} GB/s")
        report.figure(what, gigabytes, "GB/s")
    return report


def bandwidths(device: torch.device, size: int, *, seconds: float) -> dict[str, float]:
    """GB/s of reading, writing and copying ``size`` bytes; a copy counts both.

    The best of several interleaved rounds that take ``seconds`` in all. On a CPU the processor
    reads what it writes first, unless the stores go past its caches; that is not counted.
    """
    block, other = (torch.zeros(size // 8, dtype=torch.int64, device=device) for _ in range(2))

    steps = (block.sum, partial(other.fill_, 1), partial(other.copy_, block))
    times = alternate([finished(step, device) for step in steps], min_seconds=seconds)
    moved = {"read": size, "write": size, "copy, both directions": 2 * size}
    return {what: n / times.best(i) / 1e9 for i, (what, n) in enumerate(moved.items())}


def peak_gflops(device: torch.device, dtype: torch.dtype, *, seconds: float) -> float:
    """Billions of operations a second in torch's matrix product, the best of several sizes."""
    sizes = (1024, 2048) if device.type == "cpu" else (4096, 8192)
    factors = [[torch.randn(n, n, device=device, dtype=dtype) for _ in range(2)] for n in sizes]

    steps = [finished(partial(torch.mm, *pair), device) for pair in factors]
    times = alternate(steps, min_seconds=seconds)
    return max(2 * n**3 / times.best(i) / 1e9 for i, n in enumerate(sizes))
