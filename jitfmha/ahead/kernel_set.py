"""A set of kernels that is declared in one place: a file of configurations with wildcards.

``{"kernels": [{"signature": {...}, "algorithm": {"pipeline": ...}, "arch": ...}, ...]}``, in JSON
or the same in TOML, has the fields of configurations of CK's dispatcher. A field may have a list of
values, or "*" for every one that there is; "arch" is "*" where it is missing, and "algorithm" says
but the pipelines.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from ..amd.chips import is_arch
from ..planning.specification import Signature
from .ck_architectures import ck_architectures, hdims_of
from .combination import Combination
from .receipts import allows, receipt_named
from .specification import DATA_TYPES, WORDS, combination_of, read_specification
from .specification_rules import OUR_PIPELINES, SPECIFICATION_RULES

ANY = "*"
_FAMILIES = ("fwd", "fwd_pagedkv", "bwd_dq_dk_dv")
# Heads of q and of k, and queries: of long calls, and of decoding without shared heads and with.
_FORWARD_CALLS = ((1, 1, 64), (1, 1, 1), (2, 1, 1))
_BACKWARD_CALLS = _FORWARD_CALLS[:1]


class SetEntry(NamedTuple):
    """The calls that an entry asks for; ``pipelines`` are families that it is confined to."""

    combinations: tuple[Combination, ...]
    has_wildcards: bool
    pipelines: tuple[str, ...]


def entries_of(path: str | PathLike[str], arch: str) -> list[SetEntry]:
    """The entries of a file that are for an architecture, or with "cpu" for the CPU.

    Raises ``TypeError`` or ``ValueError`` for what is no such file, or has no entry for ``arch``,
    and for TOML before Python 3.11; ``OSError`` where it cannot be read.
    """
    try:
        declared = _read(Path(path))
        if not isinstance(declared, dict) or [*declared] != ["kernels"]:
            raise TypeError(f"a set is a dict with 'kernels', got {declared!r}")
        if not isinstance(declared["kernels"], list):
            raise TypeError(f"kernels must be a list, got {declared['kernels']!r}")
        entries = [entry for each in declared["kernels"] for entry in _entry(each, arch)]
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{path}: {error}") from error
    if not entries:
        raise ValueError(f"{path} has no kernels for {arch}")
    return entries


def _read(path: Path) -> object:
    """What the file has: TOML where its name says so, else JSON."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".toml":
        return json.loads(text)
    if sys.version_info >= (3, 11):
        import tomllib  # which earlier ones lack

        return tomllib.loads(text)
    raise ValueError("Python reads TOML from 3.11 on; use that, or write the set in JSON")


def _entry(given: object, arch: str) -> Iterator[SetEntry]:
    if not isinstance(given, Mapping) or not isinstance(given.get("signature"), Mapping):
        raise TypeError(f"an entry is a dict with a signature, got {given!r}")
    known = (*ck_architectures(), "cpu")
    archs = _several("arch", given.get("arch", ANY), known)
    algorithm = given.get("algorithm", {})
    if not isinstance(algorithm, Mapping) or not {*algorithm} <= {"pipeline"}:
        raise ValueError(f"algorithm of an entry has a pipeline and no more, got {algorithm!r}")
    families = (*OUR_PIPELINES, "cpu")
    pipelines = _several("algorithm.pipeline", algorithm.get("pipeline", ANY), families)
    if arch not in archs:
        return
    signature = given["signature"]
    others = {x: y for x, y in given.items() if x not in ("signature", "algorithm", "arch")}
    has_wildcards = ANY in signature.values()
    combinations: list[Combination] = []
    for each in _signatures(signature):
        # Of the CPU there is no configuration: any architecture stands for it.
        config = {"signature": each, "arch": arch if is_arch(arch) else "gfx942", **others}
        read = read_specification(config)
        if read.profile is not None and not allows(receipt_named(read.profile), read.signature):
            continue
        complaint = next(_complaints(read.signature, read.arch), None)
        if complaint is None:
            combinations += _calls(combination_of(read.signature, arch))
        elif not has_wildcards:
            raise ValueError(complaint)
    yield SetEntry(tuple(dict.fromkeys(combinations)), has_wildcards, pipelines)


def _complaints(signature: Signature, arch: str) -> Iterator[str]:
    algorithm = read_specification({"signature": signature._asdict(), "arch": arch}).algorithm
    for rule in SPECIFICATION_RULES:
        if rule.of != "ck":
            yield from rule.complaints(signature, algorithm, ck_architectures()[arch])


def _calls(combination: Combination) -> Iterator[Combination]:
    is_forward = combination.direction == "forward"
    for heads_q, heads_k, queries in _FORWARD_CALLS if is_forward else _BACKWARD_CALLS:
        yield combination._replace(
            heads_q=heads_q, heads_k=heads_k, seqlen_q=queries, seqlen_k=queries
        )


def _signatures(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every choice of values for fields that have several."""
    rest = {name: value for name, value in given.items() if not name.startswith("hdim")}
    names = [*rest]
    for values in itertools.product(*(_values(name, rest[name]) for name in names)):
        chosen = dict(zip(names, values, strict=True))
        for hdims in _hdims(given, str(chosen.get("data_type"))):
            yield chosen | hdims


def _hdims(given: Mapping[str, Any], data_type: str) -> Iterator[dict[str, Any]]:
    """The pairs of head dimensions; where one may be any, those that CK has for the data type."""
    names = [name for name in given if name.startswith("hdim")]
    sides = [value if isinstance(value, list) else [value] for value in map(given.get, names)]
    if [ANY] not in sides:
        for values in itertools.product(*sides):
            yield dict(zip(names, values, strict=True))
        return
    for pair in hdims_of(data_type):
        chosen = dict(zip(("hdim_q", "hdim_v"), pair, strict=True))
        if all(
            side in ([ANY], None) or chosen.get(x) in side
            for x, side in zip(names, sides, strict=True)
        ):
            yield chosen


def _values(name: str, value: object) -> Iterable[object]:
    """The values that a field has in turn."""
    if value == ANY:
        return _every(name)
    return value if isinstance(value, list) and name != "features" else (value,)


def _every(name: str) -> Iterable[object]:
    if name in WORDS:
        return dict.fromkeys(WORDS[name].values())
    known: dict[str, Iterable[object]] = {"data_type": DATA_TYPES, "family": _FAMILIES}
    if name in known:
        return known[name]
    if isinstance(Signature._field_defaults.get(name), bool):
        return (False, True)
    raise ValueError(
        f"signature.{name} is {ANY!r}; only words, flags and head dimensions may be any"
    )


def _several(name: str, value: object, known: tuple[str, ...]) -> tuple[str, ...]:
    """The names that a name, a list of names or "*" means."""
    if value == ANY:
        return known
    names = value if isinstance(value, list) else [value]
    for each in names:
        if each not in known:
            raise ValueError(f"{name} is {each!r}; use {', '.join(map(repr, known))} or {ANY!r}")
    return tuple(names)
