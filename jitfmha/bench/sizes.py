"""The sizes that ``bench --shapes rows`` and ``bench --shapes gemm`` are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import NamedTuple

import torch

from ..amd.chips import chip
from ..amd.node import VIRTUAL_NODE
from ..emulator import emulate
from ..problem.dtypes import TORCH_DTYPES
from .timing import alternate, beside_torch, compiled_side

_SAMPLE = 8  # of workgroups, which all have as much to do


class Measured(NamedTuple):
    """What a call of ours takes, how many times as long torch's does, and that in words."""

    seconds: float
    ratio: float
    text: str


@dataclass(frozen=True)
class Sizes:
    """What is measured of a kind.

    Attributes:
        shapes: rows and columns, or m, n and k.
        dtypes: by name; the usual ones where there are none.
        layouts: of products, of a and of b: n as ``(m, k)`` and ``(k, n)``, t transposed.
        compiled: beside torch's functions compiled by ``torch.compile``, too.
        device: an emulated one, whose times are the cost model's; None for the CPU.
    """

    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[str] = ()
    layouts: Sequence[str] = ("nt",)
    compiled: bool = False
    device: str | None = None

    def torch_dtypes(self, usual: Sequence[torch.dtype]) -> Sequence[torch.dtype]:
        """Those that are named, of 8 bits in the form of the device; else the ``usual`` ones."""
        served: Sequence[str] = "fp32", "bf16", "fp16", "fp8_e4m3fn", "bf8_e5m2", "int8"
        if self.device is not None:
            served = chip(VIRTUAL_NODE[self.device]).architecture.dtypes
        by_name = {name.partition("_")[0]: TORCH_DTYPES[name] for name in served}
        by_name["int32"] = torch.int32
        return [by_name[name] for name in self.dtypes] or usual

    def measure(
        self,
        ours: Callable[[], object],
        theirs: Callable[[], object],
        *,
        seconds: float = 0.3,
        compiles: bool = True,
    ) -> Measured:
        """Time calls of both for so long; ``compiles`` tells whether torch's can be compiled."""
        if self.device is not None:
            with emulate(self.device, profile=True, sample=_SAMPLE) as run:
                ours()
                estimates = [profile.estimate() for profile in run.profiles()]
            modelled = sum(x.seconds for x in estimates if x is not None)
            return Measured(modelled, nan, "by the cost model")
        sides = [ours, theirs, *compiled_side(theirs, self.compiled and compiles)]
        times = alternate(sides, min_seconds=seconds, calls=4)
        return Measured(times.best(0), times.ratio(1, 0), beside_torch(times))
