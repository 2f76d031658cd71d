"""What CK's dispatcher serves on which architecture, read from ``architectures.json``.

Kernels of this package run on two of these; the others are data to validate against.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_FILE = Path(__file__).with_name("architectures.json")


class CkArchitecture(NamedTuple):
    """One architecture, as CK's dispatcher knows it.

    Attributes:
        family: of matrix cores: "cdna2" to "cdna4", "rdna3" or "rdna4".
        supports_trload: whether there are loads from LDS that transpose.
        supports_v3: whether there is CK's third pipeline.
        key_vector_bytes: that a lane copies into LDS at once.
    """

    name: str
    family: str
    supported_dtypes: tuple[str, ...]
    supported_pipelines: tuple[str, ...]
    supports_trload: bool
    supports_v3: bool
    lds_banks: int
    key_vector_bytes: int


def ck_architectures() -> dict[str, CkArchitecture]:
    """Return all architectures, by name."""
    return {
        name: CkArchitecture(name, **{x: _tuples(y) for x, y in values.items()})
        for name, values in _facts()["architectures"].items()
    }


def hdims_of(data_type: str) -> tuple[tuple[int, int], ...]:
    """The head dimensions of q and of v that CK has kernels for; none of a type it lacks."""
    return tuple((q, v) for q, v in _facts()["supported_hdims"].get(data_type, ()))


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@cache
def _facts() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return facts
