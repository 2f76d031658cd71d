"""Every file of an entry truncated, zero-filled, or with one bit flipped.

A process that has never seen the entry must notice, say so once, build again and return the right
result; the damaged library must never reach the loader.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jitfmha.jit.cache.entry import InvalidEntry, open_entry
from jitfmha.jit.cache.key import EntryKey

from .callers import Answer, Call, Scratch, Trial, new_scratch
from .outcome import Extent

_BITS_OF_LIBRARY = {Extent.SHORT: 2, Extent.LONG: 200}
_BITS_OF_OTHERS = {Extent.SHORT: 1, Extent.LONG: 100}


@dataclass(frozen=True)
class Damage:
    """What becomes of one file."""

    name: str
    what: str
    content: bytes


def run(trial: Trial) -> None:
    """All damages to the entry of a small launcher, and some to that of a real kernel."""
    with new_scratch() as scratch:
        entry = _build(trial, scratch, "tiny1")
        damages = list(_damages(trial, _contents(entry), trial.extent))
        for number, damage in enumerate(damages, start=1):
            _try(trial, scratch, "tiny1", entry, damage)
            if number % 100 == 0:
                trial.progress(f"{number} of {len(damages)} damages")
        trial.progress(f"{len(damages)} damages to the entry of a small launcher")
    with new_scratch() as scratch:
        entry = _build(trial, scratch, "attention")
        damages = list(_damages(trial, _contents(entry), Extent.SHORT))
        if not trial.is_long:
            library, *others = sorted({damage.name for damage in damages}, key=_library_first)
            choice = [(library, "one bit"), (trial.rng.choice(others), "zero")]
            damages = [
                next(damage for damage in damages if damage.name == name and kind in damage.what)
                for name, kind in choice
            ]
        for damage in damages:
            _try(trial, scratch, "attention", entry, damage)
        trial.progress(f"{len(damages)} damages to the entry of a kernel")


def _build(trial: Trial, scratch: Scratch, kernel: str) -> Path:
    trial.builds(Call(scratch.environment, kernel), "the first call")
    return scratch.entries / scratch.entry_names()[0]


def _contents(entry: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(entry.iterdir())}


def _library_first(name: str) -> tuple[bool, str]:
    return not name.endswith(".so"), name


def _damages(trial: Trial, contents: dict[str, bytes], extent: Extent) -> Iterator[Damage]:
    for name, content in contents.items():
        bits = (_BITS_OF_LIBRARY if name.endswith(".so") else _BITS_OF_OTHERS)[extent]
        half = len(content) // 2
        yield Damage(name, "truncated to nothing", b"")
        yield Damage(name, f"truncated to {half} bytes", content[:half])
        yield Damage(name, "truncated by one byte", content[:-1])
        yield Damage(name, "zero-filled", bytes(len(content)))
        for bit in sorted(trial.rng.sample(range(8 * len(content)), min(bits, 8 * len(content)))):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            yield Damage(name, f"one bit flipped, number {bit}", bytes(flipped))


def _try(trial: Trial, scratch: Scratch, kernel: str, entry: Path, damage: Damage) -> None:
    what = f"{damage.name} of {kernel} {damage.what}"
    # In place, as a failing disk does it: the file stays the same one, with the same times.
    (entry / damage.name).write_bytes(damage.content)
    answer = trial.builds(Call(scratch.environment, kernel), what, warnings=1)
    warning = answer.warnings[0] if answer.warnings else ""
    trial.expect(
        str(entry) in warning and "will be built again" in warning,
        f"{what}: the warning does not name the entry: {warning!r}",
    )
    trial.expect_clean(scratch, what)
    _expect_intact(trial, answer, entry, damage, what)


def _expect_intact(trial: Trial, answer: Answer, entry: Path, damage: Damage, what: str) -> None:
    library = Path(answer.library)
    digest = hashlib.sha256(library.read_bytes()).hexdigest() if answer.library else ""
    trial.expect(
        answer.loaded == ((str(library), digest),),
        f"{what}: the loader was given {answer.loaded}, the new library is {digest}",
    )
    if damage.name == library.name:
        damaged = hashlib.sha256(damage.content).hexdigest()
        trial.expect(damaged != digest, f"{what}: the damaged library is still in place")
    trial.expect(is_intact(entry), f"{what}: the new entry is not valid")


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
