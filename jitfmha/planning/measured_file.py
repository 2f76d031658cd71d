"""The file beside the cache that has measured times.

It is data from somebody who may have another machine or another version: every field is checked,
and what does not fit this process is never looked up. It is read once in a process, when the first
call is planned.
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..jit.cache.directory import CacheDirectory, readable_directories, writable_directory
from ..jit.cache.flock import wait_for_lock
from ..jit.errors import CacheError
from ..jit.regular_file import MOST_BYTES, read_regular_file, write_whole
from ..problem.arguments import MAX_NUM_SPLITS
from ..problem.problem import Problem
from ..problem.typed_json import FieldError, fields, typed
from .measured import (
    Lengths,
    Machine,
    Measured,
    Measurement,
    Variant,
    is_tunable,
    kind_of,
    machine_of,
)
from .target import Target

FORMAT = "jitfmha-measured-1"
FILE_NAME = "measured.json"
_MOST_MEASUREMENTS = 50_000
_MOST_LETTERS = 500
_MOST_THREADS = 1 << 16


def to_bytes(measurements: Iterable[Measurement]) -> bytes:
    """The file's content, which people may read and compare line by line."""
    rows = ",\n".join(json.dumps(_plain(x)) for x in measurements)
    return f'{{"format": "{FORMAT}", "measurements": [\n{rows}\n]}}\n'.encode()


def _plain(x: Measurement) -> dict[str, Any]:
    return x._asdict() | {"machine": x.machine._asdict(), "variant": x.variant._asdict()}


def from_bytes(content: bytes) -> tuple[list[Measurement], list[str]]:
    """The measurements of a file, and what is wrong with each of those that are left out.

    Raises ``ValueError``, in one line, where it is no such file at all.
    """
    try:
        values = json.loads(content)
        told = fields({"format": str, "measurements": tuple[Any, ...]}, values, "it")
    except FieldError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if told["format"] != FORMAT:
        raise ValueError(f"its format is {told['format']!r:.60}, expected {FORMAT!r}")
    measurements, wrong = [], []
    for number, row in enumerate(told["measurements"][:_MOST_MEASUREMENTS]):
        try:
            measurements.append(_checked(typed(Measurement, row, f"measurements[{number}]")))
        except ValueError as error:
            wrong.append(str(error))
    left = len(told["measurements"]) - _MOST_MEASUREMENTS
    if left > 0:
        wrong += [f"there are more than {_MOST_MEASUREMENTS}"] * left
    return measurements, wrong


def _checked(x: Measurement) -> Measurement:
    """The row. Raises ``ValueError`` where a field has a value that none has."""
    variant = x.variant
    limits = {
        "seqlen_q": (x.seqlen_q, 1, 1 << 40),
        "seqlen_k": (x.seqlen_k, 1, 1 << 40),
        "num_splits": (variant.num_splits, 0, MAX_NUM_SPLITS),
        "threads": (variant.threads, 0, _MOST_THREADS),
        "microseconds": (x.microseconds, 1e-3, 1e12),
    }
    for name, (value, least, most) in limits.items():
        if not least <= value <= most:  # NaN is refused, too
            raise ValueError(f"{name} is {value}, expected {least:g} to {most:g}")
    for text in (*x.machine, x.kind, *variant[:3]):
        if len(text) > _MOST_LETTERS or not text.isprintable():
            raise ValueError(f"a name is {text!r:.60}, expected up to {_MOST_LETTERS} letters")
    return x


def left_out(wrong: list[str], count: int) -> str:
    """What is said of measurements that do not fit, in one line."""
    return f"{len(wrong)} of {count} measured times are left out; the first: {wrong[0]}"


# ---- Beside the cache ----------------------------------------------------------------------------


def keep(measurements: Iterable[Measurement]) -> Path:
    """Add measurements to the file beside the cache, where they replace earlier ones of the same.

    Raises ``CacheError`` or ``OSError`` where nothing can be written, and ``ValueError`` for a
    value that would not be read.
    """
    directory = writable_directory()
    path = directory.root / FILE_NAME
    with _turn(directory):
        rows = {x.of: x for x in _read(path)}
        for x in measurements:
            rows.pop(x.of, None)  # the latest are the last
            rows[x.of] = _checked(x)
        write_whole(path, to_bytes(list(rows.values())[-_MOST_MEASUREMENTS:]), mode=0o600)
    _times.cache_clear()
    return path


def kept() -> list[Measurement]:
    """All that is kept beside the cache, of this machine and of others."""
    rows: dict[tuple[object, ...], Measurement] = {}
    try:
        directories = readable_directories()
    except CacheError:
        return []  # whoever builds or loads is told why
    for directory in reversed(directories):
        rows |= {x.of: x for x in _read(directory.root / FILE_NAME)}
    return list(rows.values())


def forget() -> int:
    """Remove the file; returns how many measurements it had."""
    directory = writable_directory()
    with _turn(directory):
        count = len(kept())
        (directory.root / FILE_NAME).unlink(missing_ok=True)
    _times.cache_clear()
    return count


def measured_of(problem: Problem, target: Target) -> Measured | None:
    """The times of calls of this kind on this machine; None where there are none."""
    times = _times()
    if not times or not is_tunable(problem):
        return None
    machine = machine_of(target)
    return None if machine is None else times.get((machine, kind_of(problem)))


@lru_cache(maxsize=1)
def _times() -> Mapping[tuple[Machine, str], Measured]:
    """All that is kept beside the cache, by machine and kind; read once."""
    times: dict[tuple[Machine, str], dict[Lengths, dict[Variant, float]]] = {}
    for x in kept():
        of_kind = times.setdefault((x.machine, x.kind), {})
        of_kind.setdefault((x.seqlen_q, x.seqlen_k), {})[x.variant] = x.microseconds / 1e6
    return times


def _read(path: Path) -> list[Measurement]:
    """What the file has; a damaged one has nothing, which is warned of in one line."""
    try:
        measurements, wrong = from_bytes(read_regular_file(path, MOST_BYTES))
    except OSError:
        return []  # there is none, or it is not for this user
    except ValueError as error:
        warnings.warn(f"jitfmha: {path} is not used: {error}", RuntimeWarning, stacklevel=2)
        return []
    if wrong:
        text = left_out(wrong, len(measurements) + len(wrong))
        warnings.warn(f"jitfmha: {path}: {text}", RuntimeWarning, stacklevel=2)
    return measurements


@contextmanager
def _turn(directory: CacheDirectory) -> Iterator[None]:
    """Inside, no other process changes the file; readers need no turn, since one rename does.

    Where the file system has no locks, of two that write at one moment one may be lost.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(directory.locks / f"{FILE_NAME}.lock", flags, 0o600)
    try:
        wait_for_lock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
