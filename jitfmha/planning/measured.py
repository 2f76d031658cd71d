"""Times that ``python -m jitfmha tune`` has measured, as the choice among plans looks them up.

A time belongs to a machine, to calls of one kind with certain lengths, and to a variant: which
kernel ran, of which code, with how many splits of the keys.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

from ..problem.problem import Problem
from .target import CpuTarget, Target

# A time says something about other lengths as long as queries and keys together differ from its own
# by less than this factor.
_NEIGHBOURS = 4.0


class Variant(NamedTuple):
    """One way of a family to serve calls of a kind, as far as times tell it from others.

    Attributes:
        version: of the code that runs.
        num_splits: into how many parts keys go; 0: as many as the family takes.
        threads: of the CPU, at most; 0: as many as the family takes.
    """

    family: str
    kernel: str
    version: str
    num_splits: int = 0
    threads: int = 0


class Machine(NamedTuple):
    """What runs a call: a chip, and the software between that and a launch."""

    chip: str
    driver: str


Lengths = tuple[int, int]
"""Queries and keys, as sizes have them: in gm1 those of all sequences together."""

Measured = Mapping[Lengths, Mapping[Variant, float]]
"""The seconds of calls of one kind on one machine."""


class Measurement(NamedTuple):
    """A row of the file: what a launch of one variant takes."""

    machine: Machine
    kind: str
    seqlen_q: int
    seqlen_k: int
    variant: Variant
    microseconds: float

    @property
    def of(self) -> tuple[object, ...]:
        """What it is the time of: a later one takes its place."""
        return self[:-1]


def kind_of(problem: Problem) -> str:
    """All about a call that decides what it takes, but for its lengths and the machine."""
    features = sorted(feature.name.lower() for feature in problem.features)
    if problem.has_v_at_k:
        features.append("v_at_k")
    if problem.atomic_fp32 is not None:
        features.append(f"atomic_fp32={problem.atomic_fp32}")
    return (
        f"{problem.direction}, {problem.mode}, {problem.dtypes_in_words}, {problem.bf16_cvt}, "
        f"batch {problem.batch}, heads {problem.heads_q}/{problem.heads_k}, "
        f"hdim {problem.hdim_q}x{problem.hdim_v}, mask {problem.mask}: {' '.join(features)}"
    )


def is_tunable(problem: Problem) -> bool:
    """Whether measured times choose for a call.

    They do not where the call itself says how it is computed, nor where how many keys there are is
    on the device alone.
    """
    is_told = problem.num_splits or problem.has_split_results or problem.is_deterministic
    return not (is_told or problem.is_paged)


def machine_of(target: Target) -> Machine | None:
    """What times are kept by; None where times mean nothing: on an emulator, or nowhere."""
    if isinstance(target, CpuTarget):
        return Machine(f"{_processor()} ({target.isa})", f"torch {torch.__version__}")
    driver = target.runtime.driver
    if driver is None:
        return None
    return Machine(f"{target.chip}, {target.compute_units} compute units", driver)


@lru_cache(maxsize=1)
def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as facts:
            names = (line.partition(":")[2].strip() for line in facts if line[:10] == "model name")
            return next(names, "") or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def nearest(measured: Measured, seqlen_q: int, seqlen_k: int) -> Lengths | None:
    """The measured lengths that are most like these; None where none are near."""

    def distance(lengths: Lengths) -> float:
        pairs = zip(lengths, (seqlen_q, seqlen_k), strict=True)
        return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs)

    found = min(measured, key=distance, default=None)
    return found if found is not None and distance(found) <= math.log2(_NEIGHBOURS) else None
