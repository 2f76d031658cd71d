import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jitfmha import jit
from jitfmha.jit.cache import eviction, turn
from jitfmha.jit.cache.directory import CacheDirectory
from jitfmha.jit.cache.entry import open_entry, publish
from jitfmha.jit.cache.eviction import removal_lock
from jitfmha.jit.cache.flock import Flock
from jitfmha.jit.cache.key import EntryKey

from .conftest import answer, build_only, make_spec


@pytest.fixture
def unused() -> Callable[[str, float], Path]:
    """Builds an entry that no process has loaded, last used some seconds ago."""

    def build(name: str, age: float) -> Path:
        path = build_only(make_spec(name=name))
        then = time.time() - age
        os.utime(path, (then, then))
        return path

    return build


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("", 1 << 30),
        ("12345", 12345),
        ("500M", 500 << 20),
        ("2G", 2 << 30),
        ("1.5k", 1536),
        ("3 GiB", 3 << 30),
        ("0", 0),
    ],
)
def test_limit(text, size, monkeypatch):
    monkeypatch.setenv("JITFMHA_CACHE_LIMIT", text)
    assert eviction.cache_limit() == size


def test_what_was_just_published_stays(cache, monkeypatch):
    """Another build ends between the publication of an entry and its opening, with no room left."""

    def evict_and_publish(staged: Path, target: Path) -> bool:
        is_published = publish(staged, target)
        eviction.enforce_limit(CacheDirectory(cache.parent), keep=cache / "entries" / "other")
        evictions.append(is_published)
        return is_published

    evictions: list[bool] = []
    monkeypatch.setattr(turn, "publish", evict_and_publish)
    monkeypatch.setenv("JITFMHA_CACHE_LIMIT", "0")
    assert jit.load(make_spec()).answer() == 42
    assert evictions == [True]


def test_eviction_keeps_what_it_is_told_to(cache, unused):
    oldest, newest = unused("oldest", 50), unused("newest", 0)
    eviction.enforce_limit(CacheDirectory(cache.parent), keep=oldest)
    assert newest.exists()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JITFMHA_CACHE_LIMIT", "0")
        eviction.enforce_limit(CacheDirectory(cache.parent), keep=oldest)
    assert oldest.exists()
    assert not newest.exists()


def test_entry_under_eviction_is_not_there(cache, unused, monkeypatch):
    path = unused("demo", 0)
    key = EntryKey.parse(path.name)
    assert key is not None
    waits: list[float] = []

    def evict(seconds: float) -> None:
        """Who waits for the lock looks again."""
        waits.append(seconds)
        eviction.discard(path, cache / "trash")

    monkeypatch.setattr(time, "sleep", evict)
    with removal_lock(path) as lock:
        assert lock is Flock.TAKEN
        assert open_entry(path, key) is None
    assert len(waits) == 1


def test_list(cache, unused):
    assert jit.cache_entries() == []
    path = unused("demo", 50)
    unused("another", 0)
    another, entry = jit.cache_entries()
    assert another.name == "another"
    assert (entry.name, entry.path, entry.valid) == ("demo", path, True)
    assert path.name == f"demo-{entry.key}"
    assert entry.size == sum(item.stat().st_size for item in path.iterdir())
    assert abs(entry.created - time.time()) < 60
    assert abs(time.time() - 50 - entry.last_used) < 20


def test_size_counts_folders(cache):
    sources = {"demo.cpp": "int x;\n", "a/b/c.h": "/" * 100_000, "a/d.h": "/" * 10_000}
    path = build_only(jit.BuildSpec("demo", sources))
    size = sum(item.stat().st_size for item in path.rglob("*") if item.is_file())
    assert size > 110_000
    assert eviction.entry_size(path) == size
    assert [entry.size for entry in jit.cache_entries()] == [size]


def test_clear(cache, unused):
    assert jit.cache_clear() == 0
    assert not cache.exists()
    library = jit.load(make_spec(name="in_use"))
    unused("demo", 0)
    assert jit.cache_clear() == 2
    assert jit.cache_entries() == []
    assert library.answer() == 42
    assert len(list((cache / "trash").iterdir())) == 1
    assert answer(make_spec()) == 42
