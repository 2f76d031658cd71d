"""Sums of matrix products stay in registers of the CPU, as the assembly of kernels shows.

A loop that stores its sums at every step gives the same numbers, and takes twice as long or half as
long again.
"""

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from jitfmha.kernels.cpu import CpuTraits, launcher_spec
from jitfmha.planning.target import CpuIsa
from jitfmha.problem.problem import Direction

_ISAS: tuple[CpuIsa, ...] = ("avx2", "avx512")
# Dot products of more than 128 elements are summed up in parts.
KERNELS = {
    traits.name: traits
    for isa, hdim, direction in itertools.product(_ISAS, (104, 232), get_args(Direction))
    for traits in [CpuTraits("fp32", hdim, hdim, False, "gm0", isa, direction)]
}
_FUNCTION = re.compile(r"(_Z\S+):")
_LABEL = re.compile(r"(\.L\w+):")
_JUMP = re.compile(r"\s+j\w+\s+(\.L\w+)")
_STORE = re.compile(r"\s+vmov[au]p[sd]\s+%[xyz]mm\d+,\s*\S*\(")
_LEAST_SUMS, _LEAST_SCALARS = 12, 6  # of a register block


def product_loops(assembly: str) -> Iterator[tuple[str, list[str]]]:
    """Function and lines of each loop without another that multiplies scalars for many sums.

    Products of few rows, which are bound by memory, are left out.
    """
    lines = assembly.splitlines()
    function, labels = "", dict[str, int]()
    for i, line in enumerate(lines):
        if found := _FUNCTION.match(line):
            function = found[1]
        if found := _LABEL.match(line):
            labels[found[1]] = i
        found = _JUMP.match(line)
        start = i if found is None else labels.get(found[1], i)
        loop = lines[start:i]
        if "in_place" in function or any(_JUMP.match(line) for line in loop):
            continue
        sums, scalars = (sum(word in x for x in loop) for word in ("vfmadd", "vbroadcastss"))
        if sums >= _LEAST_SUMS and scalars >= _LEAST_SCALARS:
            yield function, loop


@pytest.mark.sample("name", list(KERNELS)[:-2], 1, always=list(KERNELS)[-2:])
def test_products_store_nothing_between_steps(name, tmp_path: Path):
    if os.uname().machine != "x86_64" or shutil.which("g++") is None:
        pytest.skip("the instruction sets are those of x86-64, and the sums' registers are of g++")
    spec = launcher_spec(KERNELS[name])
    for name, text in spec.sources.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    source = "many_rows.cpp"
    command = ["g++", "-S", "-fPIC", *spec.cflags, "-o", "kernel.s", source]
    subprocess.run(command, cwd=tmp_path, check=True)
    loops = list(product_loops((tmp_path / "kernel.s").read_text(encoding="utf-8")))
    assert len(loops) > 1, "both products have such loops"
    for function, loop in loops:
        stores = [line for line in loop if _STORE.match(line)]
        assert not stores, f"{function} stores its sums:\n" + "\n".join(loop)
