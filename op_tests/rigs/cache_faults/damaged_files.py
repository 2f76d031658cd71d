"""Every file of an entry truncated, zero-filled, or with one bit flipped.

A process that has never seen the entry must notice, say so once, build again and return the right
result; the damaged library must never reach the loader.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jitfmha.bench.report import Progress
from jitfmha.jit.cache.entry import InvalidEntry, open_entry
from jitfmha.jit.cache.key import EntryKey

from .callers import (
    Answer,
    Call,
    Callers,
    Scratch,
    expect_answer,
    expect_clean,
    new_scratch,
    seeded_rng,
    shared_callers,
)
from .outcome import Extent, Outcome

_BITS_OF_LIBRARY = {Extent.SHORT: 2, Extent.LONG: 200}
_BITS_OF_OTHERS = {Extent.SHORT: 1, Extent.LONG: 100}


@dataclass(frozen=True)
class Damage:
    """What becomes of one file."""

    name: str
    what: str
    content: bytes


def run(extent: Extent, progress: Progress, seed: int | None = None) -> Outcome:
    """All damages to the entry of a small launcher, and some to that of a real kernel."""
    rng = seeded_rng(__name__, progress, seed)
    outcome = Outcome()
    callers = shared_callers()
    with new_scratch() as scratch:
        entry = _build(callers, scratch, "tiny1", outcome)
        damages = list(_damages(_contents(entry), extent, rng))
        for number, damage in enumerate(damages, start=1):
            _try(callers, scratch, "tiny1", entry, damage, outcome)
            if number % 100 == 0:
                progress(f"{number} of {len(damages)} damages")
        progress(f"{len(damages)} damages to the entry of a small launcher")
    with new_scratch() as scratch:
        entry = _build(callers, scratch, "attention", outcome)
        damages = list(_damages(_contents(entry), Extent.SHORT, rng))
        if extent is Extent.SHORT:
            library, *others = sorted({damage.name for damage in damages}, key=_library_first)
            choice = [(library, "one bit"), (rng.choice(others), "zero")]
            damages = [
                next(damage for damage in damages if damage.name == name and kind in damage.what)
                for name, kind in choice
            ]
        for damage in damages:
            _try(callers, scratch, "attention", entry, damage, outcome)
        progress(f"{len(damages)} damages to the entry of a kernel")
    return outcome


def _build(callers: Callers, scratch: Scratch, kernel: str, outcome: Outcome) -> Path:
    answer = callers.call(Call(scratch.environment, kernel))
    expect_answer(outcome, answer, "the first call", how="built")
    return scratch.entries / scratch.entry_names()[0]


def _contents(entry: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(entry.iterdir())}


def _library_first(name: str) -> tuple[bool, str]:
    return not name.endswith(".so"), name


def _damages(contents: dict[str, bytes], extent: Extent, rng: random.Random) -> Iterator[Damage]:
    for name, content in contents.items():
        bits = (_BITS_OF_LIBRARY if name.endswith(".so") else _BITS_OF_OTHERS)[extent]
        half = len(content) // 2
        yield Damage(name, "truncated to nothing", b"")
        yield Damage(name, f"truncated to {half} bytes", content[:half])
        yield Damage(name, "truncated by one byte", content[:-1])
        yield Damage(name, "zero-filled", bytes(len(content)))
        for bit in sorted(rng.sample(range(8 * len(content)), min(bits, 8 * len(content)))):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            yield Damage(name, f"one bit flipped, number {bit}", bytes(flipped))


def _try(
    callers: Callers, scratch: Scratch, kernel: str, entry: Path, damage: Damage, outcome: Outcome
) -> None:
    what = f"{damage.name} of {kernel} {damage.what}"
    # In place, as a failing disk does it: the file stays the same one, with the same times.
    (entry / damage.name).write_bytes(damage.content)
    answer = callers.call(Call(scratch.environment, kernel))
    expect_answer(outcome, answer, what, how="built", warnings=1)
    warning = answer.warnings[0] if answer.warnings else ""
    outcome.expect(
        str(entry) in warning and "will be built again" in warning,
        f"{what}: the warning does not name the entry: {warning!r}",
    )
    expect_clean(outcome, scratch, what)
    _expect_intact(answer, entry, damage, what, outcome)


def _expect_intact(
    answer: Answer, entry: Path, damage: Damage, what: str, outcome: Outcome
) -> None:
    library = Path(answer.library)
    digest = hashlib.sha256(library.read_bytes()).hexdigest() if answer.library else ""
    outcome.expect(
        answer.loaded == ((str(library), digest),),
        f"{what}: the loader was given {answer.loaded}, the new library is {digest}",
    )
    if damage.name == library.name:
        damaged = hashlib.sha256(damage.content).hexdigest()
        outcome.expect(damaged != digest, f"{what}: the damaged library is still in place")
    outcome.expect(is_intact(entry), f"{what}: the new entry is not valid")


def is_intact(entry: Path) -> bool:
    """Whether the package would load this entry."""
    key = EntryKey.parse(entry.name)
    if key is None:
        return False
    try:
        opened = open_entry(entry, key)
    except InvalidEntry:
        return False
    if opened is None:
        return False
    opened.close()
    return True
