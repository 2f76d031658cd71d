"""The seam where another store plugs in, with one that two machines share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jitfmha import jit
from jitfmha.jit import loader
from jitfmha.jit.cache.entry import EntryMeta, OpenEntry
from jitfmha.jit.cache.key import EntryKey
from jitfmha.jit.cache.local_store import LocalStore
from jitfmha.jit.cache.store import Store, Turn
from jitfmha.jit.errors import StoreFailure

from .conftest import FakeCompiler, answer, make_spec

Kept = dict[str, tuple[EntryMeta, Mapping[str, bytes]]]


@dataclass(frozen=True)
class KeptTurn:
    """A local turn that also gives what is published to the others."""

    turn: Turn
    kept: Kept

    @property
    def destination(self) -> Path:
        return self.turn.destination

    @property
    def logs(self) -> Path:
        return self.turn.logs

    def workspace(self) -> AbstractContextManager[Path]:
        return self.turn.workspace()

    def publish(self, meta: EntryMeta, contents: Mapping[str, bytes]) -> OpenEntry:
        self.kept[meta.key.directory_name] = (meta, contents)
        return self.turn.publish(meta, contents)


@dataclass(frozen=True)
class SharedStore:
    """Looks on this machine first; what comes from elsewhere is published here before its use."""

    kept: Kept
    local: Store = field(default_factory=LocalStore)

    def find(self, key: EntryKey, *, warn: bool = True) -> OpenEntry | None:
        entry = self.local.find(key, warn=warn)
        if entry is None and key.directory_name in self.kept:
            with self.local.turn(key) as turn:
                if isinstance(turn, OpenEntry):
                    return turn
                return turn.publish(*self.kept[key.directory_name])
        return entry

    @contextmanager
    def turn(self, key: EntryKey) -> Iterator[OpenEntry | Turn]:
        with self.local.turn(key) as turn:
            yield turn if isinstance(turn, OpenEntry) else KeptTurn(turn, self.kept)

    def substitute(self, name: str, failure: StoreFailure) -> Store:
        return self.local.substitute(name, failure)

    def locate(self, key: EntryKey) -> Path | None:
        return self.local.locate(key)


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_process: Callable[[], None]
) -> Callable[[str, Kept], None]:
    """Goes on as a new process on another machine, with a cache of its own."""

    def go_on(name: str, kept: Kept) -> None:
        new_process()
        monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path / name))
        monkeypatch.setattr(loader, "STORE", SharedStore(kept))

    return go_on


def test_machines_that_share_a_store_build_once(
    machine: Callable[[str, Kept], None], tmp_path: Path, fake_compiler: FakeCompiler
) -> None:
    kept: Kept = {}
    for name in ("first", "second", "third"):
        machine(name, kept)
        assert jit.is_built(make_spec()) == (name != "first")
        assert answer(make_spec()) == 42
        assert jit.artifact_path(make_spec()).is_relative_to(tmp_path / name)
        assert jit.build_log()[0].how == ("built" if name == "first" else "loaded")
    assert fake_compiler.compiled() == 1


def test_damage_on_the_way_is_noticed(
    machine: Callable[[str, Kept], None], fake_compiler: FakeCompiler
) -> None:
    kept: Kept = {}
    machine("first", kept)
    answer(make_spec())
    [(name, (meta, contents))] = kept.items()
    library = bytearray(contents["demo.so"])
    library[len(library) // 2] ^= 1
    kept[name] = (meta, {**contents, "demo.so": bytes(library)})
    machine("second", kept)
    with pytest.raises(jit.BuildError, match=r"demo\.so is damaged"):
        answer(make_spec())
