"""Another user of the machine, who gets between a check and what relies on it."""

import ctypes
import fcntl
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from rigs.cache_faults.caller_process import give_up_privileges
from rigs.cache_faults.processes import Worker

from jitfmha import jit
from jitfmha.jit.cache import directory, entry, eviction, owned_directory
from jitfmha.jit.cache.eviction import empty_trash
from jitfmha.jit.cache.key import EntryKey

from .conftest import SOURCE, answer, build_only, make_spec

_IS_ROOT = os.geteuid() == 0
_STRANGER, _NOBODY, _OUTSIDE = 54321, 65534, 100_000
_NEW_USER_NAMESPACE = 0x10000000


@pytest.fixture
def foreign_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library with the same symbol and another answer."""
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path / "foreign"))
    return build_only(make_spec(source=SOURCE.replace("42", "13"))) / "demo.so"


def after_each_check(monkeypatch: pytest.MonkeyPatch, step: Callable[[], None]) -> None:
    real = directory.check_trust

    def check(cache: directory.CacheDirectory, **options: bool) -> None:
        try:
            real(cache, **options)
        finally:
            step()

    monkeypatch.setattr(directory, "check_trust", check)


def after_each_entry(monkeypatch: pytest.MonkeyPatch, step: Callable[[], None]) -> None:
    """When an entry was opened and checked, and before its library is loaded."""
    real = entry.open_entry

    def open_(path: Path, key: EntryKey) -> object:
        entry = real(path, key)
        if entry is not None:
            step()
        return entry

    monkeypatch.setattr(entry, "open_entry", open_)


@pytest.mark.parametrize("what", ["library", "code object"])
def test_way_that_is_made_after_the_check(what, tmp_path, foreign_library, give_away, monkeypatch):
    """In a directory like /tmp: it leads to this user's own cache at first, and then elsewhere."""
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path / "mine"))
    build_only(make_spec())
    shutil.copytree(tmp_path / "mine", tmp_path / "theirs")
    for copy in (tmp_path / "theirs").rglob("demo.so"):
        shutil.copy(foreign_library, copy)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    link = shared / "cache"
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(link))

    def lead_to(target: str) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / target)
        give_away(link)

    after_each_check(monkeypatch, lambda: None if link.is_symlink() else lead_to("mine"))
    after_each_entry(monkeypatch, lambda: lead_to("theirs"))
    obtain = answer if what == "library" else jit.read
    with pytest.raises(jit.CacheError, match=rf"cache' is owned by user id {_STRANGER}"):
        obtain(make_spec())


def test_clearing_a_cache_that_is_made_after_the_check(tmp_path, monkeypatch):
    """With a link to files of this user in it."""
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").write_text("")

    def plant() -> None:
        (tmp_path / "cache" / "v1").mkdir(parents=True, exist_ok=True)
        if not (tmp_path / "cache" / "v1" / "logs").is_symlink():
            (tmp_path / "cache" / "v1" / "logs").symlink_to(tmp_path / "home")

    after_each_check(monkeypatch, plant)
    assert jit.cache_clear() == 0
    assert (tmp_path / "home" / "precious").exists()


@pytest.mark.parametrize("what", ["library", "code object"])
@pytest.mark.parametrize("where", ["..", ".", "entries"])
def test_way_that_is_opened_to_others_after_the_check(where, what, cache, monkeypatch):
    """It is looked at again right before what was built is used."""
    build_only(make_spec())
    after_each_entry(monkeypatch, lambda: (cache / where).chmod(0o777))
    obtain = answer if what == "library" else jit.read
    with pytest.raises(jit.CacheError, match="can be written to by everybody"):
        obtain(make_spec())
    assert jit.build_log() == ()


def test_library_that_is_replaced_after_the_check(cache, foreign_library, monkeypatch):
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(cache.parent))
    built = build_only(make_spec()) / "demo.so"
    replaced: list[Path] = []

    def replace() -> None:
        if not replaced:
            replaced.append(built)
            shutil.copy(foreign_library, cache / "new.so")
            os.rename(cache / "new.so", built)

    after_each_entry(monkeypatch, replace)
    with pytest.warns(RuntimeWarning, match=r"demo\.so is damaged"):
        assert answer(make_spec()) == 42
    assert replaced


def test_libraries_are_loaded_by_their_own_paths(cache):
    """The loader of the system and debuggers know a library by its path."""
    for name, source in (("one", SOURCE), ("two", SOURCE.replace("42", "43"))):
        library = jit.load(make_spec(name=name, source=source))
        assert library._name == str(jit.build_log()[-1].path)
    assert [library.answer() for library in (jit.load(make_spec(name="one")), library)] == [42, 43]


# ---- Locks that others hold, and entries that cannot be read -------------------------------------


def test_lock_that_a_reader_holds(cache, fake_compiler):
    """Whoever can read a file can lock it; nobody has to build again for that."""
    library = build_only(make_spec()) / "demo.so"
    descriptor = os.open(library, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        started = time.monotonic()
        assert answer(make_spec()) == 42
        assert time.monotonic() - started < 50
        assert [event.how for event in jit.build_log()] == ["loaded"]
    finally:
        os.close(descriptor)
    assert fake_compiler.compiled() == 1


@pytest.mark.skipif(not _IS_ROOT, reason="becoming another user needs root")
def test_cache_of_root_that_others_can_read(monkeypatch, new_process):
    """Another user loads what is there and can lock it, which makes nobody build again."""
    with tempfile.TemporaryDirectory(prefix="jitfmha-test-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        cache = Path(folder, "cache")
        monkeypatch.setenv("JITFMHA_CACHE_DIR", str(cache))
        entry = build_only(make_spec())
        for path in (cache, cache / "v1", cache / "v1" / "entries", entry):
            path.chmod(0o755)
        for path in entry.iterdir():
            path.chmod(0o644)
        locked, done = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(done[1])
                os.setgid(_STRANGER)
                os.setuid(_STRANGER)
                flags = fcntl.LOCK_EX | fcntl.LOCK_NB
                fcntl.flock(os.open(entry / "demo.so", os.O_RDONLY), flags)
                assert answer(make_spec()) == 42
                assert [event.how for event in jit.build_log()] == ["loaded"]
                os.write(locked[1], b"1")
                os.read(done[0], 1)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(locked[1])
        assert os.read(locked[0], 1) == b"1", "the other user could not load it"
        assert answer(make_spec()) == 42
        assert [event.how for event in jit.build_log()] == ["loaded"]
        os.close(done[1])
        os.waitpid(child, 0)
        os.close(locked[0])
        os.close(done[0])


def in_ordinary_process(folder: Path, work: Callable[[], None]) -> None:
    """Run `work` in a child that permissions bind, also where this process is root's."""

    def bound() -> dict[str, object]:
        give_up_privileges()
        work()
        return {}

    ending = Worker(folder / "worker", bound, {}).end(120.0)
    assert ending.status == 0, ending


def _hide(name: str) -> Callable[[Path], None]:
    return lambda entry: (entry / name).chmod(0)


def _hide_lock(entry: Path) -> None:
    entry.chmod(0)
    (entry.parents[1] / "locks" / f"{entry.name}.lock").chmod(0)


def _give_directory_away(entry: Path) -> None:
    entry.chmod(0o700)
    os.chown(entry, _STRANGER, _STRANGER)


@pytest.mark.parametrize(
    "hide", [_hide(""), _hide("demo.so"), _hide("demo.cpp"), _hide_lock, _give_directory_away]
)
def test_entry_that_cannot_be_read(hide, cache, tmp_path, new_process):
    """That one is built again, and nothing else is built anywhere but in this cache."""
    if hide is _give_directory_away and not _IS_ROOT:
        pytest.skip("giving a directory away needs root")
    entry = build_only(make_spec())
    hide(entry)

    def work() -> None:
        assert not jit.is_built(make_spec())
        with pytest.warns(RuntimeWarning, match="cannot be read .Permission denied") as caught:
            assert answer(make_spec()) == 42
        assert len(caught) == 1
        new_process()
        for name in ("demo", "second"):
            assert answer(make_spec(name=name)) == 42
        assert [event.how for event in jit.build_log()] == ["loaded", "built"]
        assert jit.cache_dir() == cache.parent
        assert {found.name for found in jit.cache_entries() if found.valid} == {"demo", "second"}

    in_ordinary_process(tmp_path, work)


def test_what_cannot_be_locked_leaves_the_trash_in_the_end(cache, tmp_path, monkeypatch):
    discarded = cache / "trash" / "demo"
    discarded.mkdir(parents=True, mode=0o700)
    (discarded / "demo.so").touch(mode=0)

    def work() -> None:
        empty_trash(cache / "trash")
        assert discarded.exists()
        monkeypatch.setattr(eviction, "_DISCARDED_WITHOUT_LOCKS_SECONDS", -1.0)
        empty_trash(cache / "trash")
        assert not discarded.exists()

    in_ordinary_process(tmp_path, work)


# ---- A stand-in for the cache, in a directory for temporary files --------------------------------


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made, and the cache cannot be."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    folder.chmod(0o1777)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    return folder


def test_stand_in_that_was_removed_and_made_by_another_user(
    temporary, tmp_path, foreign_library, give_away, monkeypatch, new_process
):
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        answer(make_spec())
    stand_in = jit.cache_dir()
    names = [path.relative_to(stand_in) for path in stand_in.rglob("*")]
    stand_in.rename(tmp_path / "removed")
    stand_in.mkdir(mode=0o755)
    for name in names:
        (stand_in / name).mkdir() if (tmp_path / "removed" / name).is_dir() else None
    shutil.copytree(tmp_path / "removed", stand_in, dirs_exist_ok=True)
    give_away(stand_in)
    new_process()
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert answer(make_spec()) == 42
    assert jit.build_log()[0].how == "built"
    assert jit.cache_dir() != stand_in
    assert jit.cache_dir().is_relative_to(temporary)
    kept = sorted(stand_in.rglob("*"))
    owned_directory._remove_all_owned_here()
    assert sorted(stand_in.rglob("*")) == kept, "somebody else's files were removed at exit"


def test_stand_in_that_lost_its_empty_folders(temporary, new_process):
    """With these a cleaner begins; the rest is used as before."""
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        build_only(make_spec())
    stand_in = jit.cache_dir()
    for name in ("building", "trash", "logs"):
        (stand_in / "v1" / name).rmdir()
    assert jit.is_built(make_spec())
    assert answer(make_spec(name="second")) == 42
    assert jit.cache_dir() == stand_in


def test_stand_in_that_is_gone(temporary, new_process):
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        build_only(make_spec())
    shutil.rmtree(jit.cache_dir())
    assert not jit.is_built(make_spec())
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert answer(make_spec()) == 42


def test_link_in_place_of_an_own_directory(tmp_path):
    """What it leads to is not removed, and no process that works there is ended."""
    with owned_directory.OwnedDirectory(tmp_path, "demo") as mine:
        mine.path.rename(tmp_path / "moved")
        (tmp_path / "home").mkdir()
        mine.path.symlink_to(tmp_path / "home")
        ended: list[Path] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owned_directory, "end_processes_in", ended.append)
            mine.remove()
    assert ended == []
    assert mine.path.is_symlink()


# ---- User namespaces -----------------------------------------------------------------------------


def in_user_namespace(work: Callable[[], bool]) -> bool:
    """What `work` returns in a child whose user namespace has the users 0 to 65535 of this one."""
    entered, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        status = 2
        try:
            if ctypes.CDLL(None).unshare(_NEW_USER_NAMESPACE) == 0:
                os.write(entered[1], b"1")
                os.read(mapped[0], 1)
                status = 0 if work() else 1
        finally:
            os._exit(status)
    os.close(entered[1])
    if os.read(entered[0], 1):
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text("0 0 65536")
    os.write(mapped[1], b"1")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for descriptor in (entered[0], *mapped):
        os.close(descriptor)
    if status == 2:
        pytest.skip("a user namespace cannot be made here")
    return status == 0


@pytest.mark.skipif(not _IS_ROOT, reason="giving files to users outside needs root")
@pytest.mark.parametrize("owner", [0, _NOBODY, _OUTSIDE])
@pytest.mark.parametrize("where", [".", "demo.so", "meta.json"])
def test_entry_in_a_user_namespace(owner, where, cache):
    """The user 65534 inside has the number that stands for all users outside."""
    path = build_only(make_spec())
    os.chown(path / where, owner, 0)
    assert in_user_namespace(lambda: jit.is_built(make_spec())) == (owner == 0)


@pytest.mark.skipif(not _IS_ROOT, reason="giving files to users outside needs root")
@pytest.mark.parametrize("owner", [0, _NOBODY, _OUTSIDE])
@pytest.mark.parametrize("is_shared", [False, True])
def test_parents_in_a_user_namespace(owner, is_shared, tmp_path, monkeypatch):
    outer = tmp_path / "outer"
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(outer / "inner" / "cache"))
    build_only(make_spec())
    if is_shared:
        tmp_path.chmod(0o1777)
    os.chown(outer, owner, 0)
    outer.chmod(0o755)
    # pytest's own folders lie below /tmp, where nobody outside is trusted any more.
    monkeypatch.setattr(directory, "parents_reason", _as_below_the_root(tmp_path))

    def is_trusted() -> bool:
        try:
            return jit.is_built(make_spec())
        except jit.CacheError:
            return False

    assert in_user_namespace(is_trusted) == (owner == 0 or not is_shared)


def _as_below_the_root(root: Path) -> Callable[..., str | None]:
    """`parents_reason` where the way to `root` is left out."""
    real, lstat = directory.parents_reason, os.lstat

    def reason(path: str, *, must_exist: bool = False) -> str | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "lstat", lambda node: lstat(f"{root}{node}"))
            return real(path.removeprefix(str(root)), must_exist=must_exist)

    return reason
