import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from jitfmha import jit
from jitfmha.jit.cache import directory, entry, owned_directory

from .conftest import answer, make_spec

_IS_ROOT = os.geteuid() == 0


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made."""
    folder = tmp_path / "temporary"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def assert_falls_back(temporary: Path, reason: str) -> None:
    with pytest.warns(RuntimeWarning, match=reason) as caught:
        assert answer(make_spec()) == 42
    assert len(caught) == 1
    assert answer(make_spec(name="second")) == 42
    assert jit.cache_dir().is_relative_to(temporary)
    assert all(event.path.is_relative_to(temporary) for event in jit.build_log())
    assert {item.name for item in jit.cache_entries()} == {"demo", "second"}
    assert jit.cache_dir().stat().st_mode & 0o777 == 0o700
    owned_directory._remove_all_owned_here()
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("name", ["file/cache", "x" * 300])
def test_a_place_that_cannot_be(name, temporary, tmp_path, monkeypatch):
    """Below a file, or with a name that is too long."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path / name))
    assert_falls_back(temporary, "cannot be used")


def test_no_home(temporary, monkeypatch):
    import platformdirs

    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *_a, **_k: "~/.cache/jitfmha")
    with pytest.raises(jit.CacheError, match="no home directory"):
        jit.cache_dir()
    assert_falls_back(temporary, r"no home directory is known.* Set HOME, or JITFMHA_CACHE_DIR")


def test_home_of_nobody(temporary, monkeypatch):
    """Not a folder named "~nobody..." in the current directory."""
    monkeypatch.setenv("JITFMHA_CACHE_DIR", "~nobody-of-this-name/cache")
    with pytest.raises(jit.CacheError, match="'~nobody-of-this-name/cache': there is no such home"):
        jit.load(make_spec())
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_disk_full_while_publishing(number, cache, temporary, monkeypatch):
    real = entry.write_private

    def write(path: Path, content: bytes, *, durable: bool) -> None:
        if path.is_relative_to(cache.parent) and path.name == "meta.json":
            real(path, content[:10])
            raise OSError(number, os.strerror(number))
        real(path, content, durable=durable)

    monkeypatch.setattr(entry, "write_private", write)
    advice = "Set JITFMHA_CACHE_DIR to a dir" if number == errno.EIO else "Free some space there"
    assert_falls_back(temporary, rf"{os.strerror(number)}.*{advice}")
    assert not list((cache / "entries").iterdir())
    assert not list((cache / "building").iterdir())


@pytest.mark.parametrize("blocks", [0, 1000])
def test_disk_full_with_the_temporary_directory_on_it(
    blocks, cache, temporary, monkeypatch, fake_compiler
):
    """No stand-in is announced that has no room either; some file systems do not say theirs."""
    status = os.statvfs_result((4096, 4096, blocks, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: status)
    cache.parent.mkdir()
    real = os.mkdir

    def mkdir(path: str | Path, mode: int = 0o777) -> None:
        if Path(path).is_relative_to(cache.parent):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    if not blocks:
        assert_falls_back(temporary, "No space left on device")
        return
    full = rf"'{temporary}' has only 0 KiB of free space\. Free some space there"
    with pytest.raises(jit.CacheError, match=rf"'{cache.parent}' cannot be used .No space.*{full}"):
        jit.load(make_spec())
    assert fake_compiler.compiled() == 0
    assert not list(temporary.iterdir())


def test_noexec(cache, temporary, monkeypatch):
    monkeypatch.setattr(
        directory, "forbids_execution", lambda path: path.is_relative_to(cache.parent)
    )
    assert_falls_back(temporary, r"noexec.* a file system from which programs may run")


def test_noexec_everywhere(cache, temporary, monkeypatch, fake_compiler):
    """Nothing is compiled only to find that it cannot be loaded."""
    monkeypatch.setattr(directory, "forbids_execution", lambda path: True)
    with pytest.raises(
        jit.CacheError, match=rf"noexec, and no .* because '{temporary}'.* mounted noexec\. Set"
    ):
        jit.load(make_spec())
    assert fake_compiler.compiled() == 0
    assert not list(temporary.iterdir())


def test_temporary_directory_of_a_dead_process_is_swept(temporary):
    dead = temporary / f"jitfmha-{os.geteuid()}.0123"
    dead.mkdir(mode=0o700)
    boot = owned_directory._boot()
    (dead / "owner").write_text(f'{{"pid": 1, "host": "h", "boot": "{boot}"}}')
    with pytest.warns(RuntimeWarning):
        replacement = directory._stand_in("is gone", "Look for it.")
    assert not dead.exists()
    assert replacement.root.exists()


@pytest.mark.parametrize(
    ("boot", "age", "stays"),
    [("here", 0, False), ("elsewhere", 0, True), ("elsewhere", 90_000, False), (None, 0, True)],
)
def test_who_is_swept(boot, age, stays, tmp_path):
    folder = tmp_path / "demo.0123"
    folder.mkdir()
    name = owned_directory._boot() if boot == "here" else boot
    content = f'{{"pid": 1, "host": "h", "boot": "{name}"}}' if boot else ""
    (folder / "owner").write_text(content)
    then = (folder / "owner").stat().st_mtime - age
    os.utime(folder / "owner", (then, then))
    owned_directory.sweep(tmp_path)
    assert folder.exists() == stays


def test_the_living_are_not_swept(tmp_path):
    with owned_directory.OwnedDirectory(tmp_path, "demo") as mine:
        owned_directory.sweep(tmp_path)
        assert mine.path.exists()
        owner = owned_directory.owner_of(tmp_path, "demo")
        assert owner is not None
        assert owner.pid == os.getpid()
    assert not mine.path.exists()


def assert_refused(reason: str) -> None:
    for attempt in (jit.load, jit.is_built):
        with pytest.raises(jit.CacheError, match=reason) as caught:
            attempt(make_spec())
        assert "JITFMHA_CACHE_DIR" in str(caught.value)


@pytest.mark.parametrize("where", [".", "..", "entries", "building"])
@pytest.mark.parametrize(
    ("user", "group", "mode", "reason"),
    [
        (-1, -1, 0o777, r"written to by everybody \(mode 0777\)"),
        (-1, 4321, 0o770, "written to by group id 4321"),
        (4321, -1, 0o700, "owned by user id 4321"),
        (-1, -1, 0o1777, "written to by everybody"),
    ],
)
def test_in_other_hands(where, user, group, mode, reason, cache):
    """The sticky bit excuses the folder above the cache alone."""
    if (user, group) != (-1, -1) and not _IS_ROOT:
        pytest.skip("giving a directory away needs root")
    answer(make_spec())
    os.chown(cache / where, user, group)
    os.chmod(cache / where, mode)
    # Another spec is asked for, so that the memory of this process does not answer.
    if (where, mode) == ("..", 0o1777):
        assert answer(make_spec(name="other")) == 42
        return
    for attempt in (jit.load, jit.is_built):
        with pytest.raises(jit.CacheError, match=reason) as caught:
            attempt(make_spec(name="other"))
        assert "JITFMHA_CACHE_DIR" in str(caught.value)


def test_links_in_the_way_are_followed_and_checked(tmp_path, monkeypatch):
    (tmp_path / "real" / "deep").mkdir(parents=True, mode=0o700)
    (tmp_path / "link").symlink_to("real/../real")
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path / "link" / "deep"))
    assert answer(make_spec()) == 42
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(jit.CacheError, match="real' can be written to"):
        jit.load(make_spec(name="other"))


def test_circle_of_links_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path / "a"))
    assert_refused("more than 40 symbolic links")


def test_unsafe_temporary_directory_is_refused(temporary, tmp_path, monkeypatch):
    temporary.chmod(0o777)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(jit.CacheError, match="written to by everybody"):
        jit.load(make_spec())


def test_whose_it_is_goes_last(tmp_path, monkeypatch):
    """A directory without an owner stays for an hour, should its process die while removing it."""
    left: list[list[str]] = []
    remove = shutil.rmtree
    with owned_directory.OwnedDirectory(tmp_path, "demo") as mine:
        # Folders list their files in any order.
        for number in range(20):
            (mine.path / f"folder{number}").mkdir()
            (mine.path / f"file{number}").touch()

        def observed(path: Path, *, ignore_errors: bool) -> None:
            left.append([x.name for x in mine.path.iterdir()])
            remove(path, ignore_errors=ignore_errors)

        monkeypatch.setattr(shutil, "rmtree", observed)
    assert all("owner" in names for names in left)
    assert left[-1] == ["owner"]
    assert not mine.path.exists()
