"""Measures what docs/speed.md and README.md say of the CPU, on a machine that does nothing else,
and puts it there: the table, the numbers of README.md's row, and the picture.

Run in op_tests/, for some three minutes:  python -m rigs.speed_table --threads 16 ..
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from jitfmha.bench.report import Comparison, Report
from jitfmha.call.detection import target_of
from jitfmha.planning.measured import machine_of
from jitfmha.problem.dtypes import DTYPE_NAMES

from .cpu_backward import time_training_step
from .cpu_suite import ragged_lengths, time_ragged
from .over_sdpa import Sizes, time_over_sdpa

_HEADS, _HDIM = 8, 128
_LENGTHS = (512, 1024, 2048, 4096)
_SECONDS = 6.0  # for each row
_SECONDS_OF_POINT = 2.0
# What README.md repeats: forward, and with backward.
FORWARD = "bf16, seqlen 4096, causal"
TRAINING = f"{FORWARD}, forward and backward"

_Timer = Callable[[], Comparison]


def _forward(sizes: Sizes, dtype: torch.dtype, causal: bool, seconds: float = _SECONDS) -> _Timer:
    name, report = f"{DTYPE_NAMES[dtype]} {sizes}", Report("", {})
    return lambda: time_over_sdpa(
        report, name, sizes, dtype, is_causal=causal, min_seconds=seconds
    )[0]


def _training(seqlen: int, dtype: torch.dtype, seconds: float = _SECONDS) -> _Timer:
    name, sizes = f"{DTYPE_NAMES[dtype]} {seqlen}", (1, seqlen, seqlen, _HEADS, _HEADS, _HDIM)
    return lambda: time_training_step(name, sizes, dtype, causal=True, min_seconds=seconds)


def _ragged() -> Comparison:
    lengths = ragged_lengths()
    return time_ragged("ragged", lengths, torch.bfloat16, _HDIM, min_seconds=_SECONDS)[0]


_LONG: Sizes = (1, 4096, 4096, _HEADS, _HEADS, _HDIM)
_DECODE: Sizes = (8, 1, 4096, 32, 8, _HDIM)
ROWS: dict[str, _Timer] = {
    "bf16, seqlen 4096": _forward(_LONG, torch.bfloat16, causal=False),
    FORWARD: _forward(_LONG, torch.bfloat16, causal=True),
    "fp16, seqlen 4096, causal": _forward(_LONG, torch.float16, causal=True),
    "fp32, seqlen 4096, causal": _forward(_LONG, torch.float32, causal=True),
    TRAINING: _training(4096, torch.bfloat16),
    "bf16, 16 ragged sequences from 64 to 2048": _ragged,
    "bf16, decode, batch 8, 4096 keys, heads 32/8": _forward(_DECODE, torch.bfloat16, False),
}
_REMARKS = {"bf16, 16 ragged sequences from 64 to 2048": ", one by one"}


def faster(ours: str, theirs: str) -> str:
    """The table's last column, which follows from the two before it."""
    return f"{float(theirs) / float(ours):.2f}x"


def _milliseconds(seconds: float) -> str:
    """Of three digits, or all before the point."""
    value = 1e3 * seconds
    return f"{value:.{2 if value < 10 else 1}f}"


_TABLE = re.compile(r"Measured (?:.|\n)*?(?=\n\n!\[)((?:.|\n)*?)\n\n\|(?:.|\n)*?\n\n")
README_NUMBERS = re.compile(
    r"(?<=: )([\d.]+) ms, where SDPA takes ([\d.]+); with backward ([\d.]+) where it takes ([\d.]+)"
)


def _write_numbers(root: Path, rows: dict[str, tuple[str, str]], threads: int) -> None:
    machine = machine_of(target_of(torch.device("cpu")))
    assert machine is not None
    lines = [f"| {threads} threads, hdim {_HDIM} | jitfmha | SDPA | faster |", "| --- " * 4 + "|"]
    lines += [
        f"| {name} | {ours} ms | {theirs} ms{_REMARKS.get(name, '')} | {faster(ours, theirs)} |"
        for name, (ours, theirs) in rows.items()
    ]
    intro = (
        "Measured by `python -m rigs.speed_table` in `op_tests/`, in alternation with SDPA:\n"
        f"{machine.chip}, {machine.driver}, batch 1, {_HEADS} heads. Medians:"
    )
    speed, readme = root / "docs" / "speed.md", root / "README.md"
    text = speed.read_text(encoding="utf-8")
    whole = _TABLE.sub(lambda x: f"{intro}{x[1]}\n\n" + "\n".join(lines) + "\n\n", text, count=1)
    speed.write_text(whole, encoding="utf-8")
    (ours, theirs), (our_step, their_step) = rows[FORWARD], rows[TRAINING]
    numbers = (
        f"{ours} ms, where SDPA takes {theirs}; with backward {our_step} where it takes "
        f"{their_step}"
    )
    text = readme.read_text(encoding="utf-8")
    readme.write_text(README_NUMBERS.sub(numbers, text), encoding="utf-8")


def _draw(file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 3.8), layout="constrained")
    for axes, title in zip(figure.subplots(1, 2), ("forward", "forward and backward"), strict=True):
        for dtype, color in ((torch.bfloat16, "C0"), (torch.float32, "C1")):
            timed = [_point(title, seqlen, dtype) for seqlen in _LENGTHS]
            ours = [x.gflops for x in timed]
            theirs = [x.gflops * x.seconds / x.against_seconds for x in timed]
            name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
            axes.plot(_LENGTHS, ours, "o-", color=color, label=f"jitfmha {name}")
            axes.plot(_LENGTHS, theirs, "o--", color=color, label=f"SDPA {name}")
        _finish(axes, title)
    figure.savefig(file)


def _point(what: str, seqlen: int, dtype: torch.dtype) -> Comparison:
    if what == "forward":
        sizes = (1, seqlen, seqlen, _HEADS, _HEADS, _HDIM)
        return _forward(sizes, dtype, causal=True, seconds=_SECONDS_OF_POINT)()
    return _training(seqlen, dtype, _SECONDS_OF_POINT)()


def _finish(axes: Any, title: str) -> None:
    axes.set(title=title, xlabel="sequence length", ylabel="GFLOP/s", xscale="log")
    axes.set_xticks(_LENGTHS, _LENGTHS)
    axes.minorticks_off()
    axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def main() -> None:
    """Measure, and write into the documents of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="of the checkout")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = {}
    for name, timer in ROWS.items():
        timed = timer()
        rows[name] = _milliseconds(timed.seconds), _milliseconds(timed.against_seconds)
        print(f"{name}: {rows[name][0]} ms, SDPA {rows[name][1]} ms", flush=True)
    _write_numbers(arguments.root, rows, arguments.threads)
    _draw(arguments.root / "docs" / "images" / f"cpu_{arguments.threads}_threads.svg")


if __name__ == "__main__":
    main()
