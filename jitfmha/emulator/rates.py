"""What the cost model takes things to cost, read from ``rates.json``, which names the sources."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..amd import chips
from ..amd.clock import Clock, clock_of

_FILE = Path(__file__).with_name("rates.json")


@dataclass(frozen=True)
class ChipRates:
    """What differs between chips of one architecture.

    Attributes:
        clock: that it keeps up.
        streaming: bytes a second that come out of HBM.
        scatter: of modelled times around published ones, as a share; of the chip whose clock was
            measured.
    """

    clock: Clock
    streaming: float
    scatter: float


@cache
def rates_of(arch: chips.Arch) -> Mapping[str, int]:
    """Cycles and sizes by name, those of LDS that ``chips.json`` has among them."""
    facts = chips.architecture(arch)
    banks = {name: getattr(facts, name) for name in ("lds_read_banks", "lds_write_banks")}
    return MappingProxyType({**_file()["architectures"][arch], **banks})


@cache
def rates_of_chip(name: str) -> ChipRates:
    """The rates of a chip, such as "MI300X"; ``ValueError`` where its clock is not published."""
    clock, streaming = clock_of(name), chips.chip(name).streaming_gb_s
    assert streaming is not None
    return ChipRates(clock, streaming * 1e9, _file()["chips"][clock.measured_on]["scatter"])


@cache
def _file() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return content
