import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from jitfmha import jit
from jitfmha.jit.cache import entry as entry_module
from jitfmha.jit.cache.entry import EntryMeta, InvalidEntry
from jitfmha.jit.cache.key import EntryKey

from .conftest import answer, build_only, make_spec

SPEC = jit.BuildSpec(
    "demo", {"demo.cpp": make_spec().sources["demo.cpp"], "a/b/c.h": "// c\n", "a/d.h": "// d\n"}
)
FILES = ["demo.so", "demo.cpp", "meta.json", "a/b/c.h"]
FOLDERS = ["a", "a/b"]


def flip_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES = {
    "truncated": lambda content: content[: len(content) // 2],
    "zero-filled": lambda content: bytes(len(content)),
    "a bit flipped": flip_bit,
    "longer": lambda content: content + b"\n",
    "empty": lambda content: b"",
}


def assert_built_again(reason: str) -> None:
    """Told once, and then it is as it should be."""
    assert not jit.is_built(SPEC)
    assert [entry.valid for entry in jit.cache_entries()] in ([False], [])
    with pytest.warns(RuntimeWarning, match=reason) as caught:
        assert answer(SPEC) == 42
    assert len(caught) == 1
    assert jit.build_log()[0].how == "built"
    assert jit.is_built(SPEC)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported_once_and_repaired(name, damage, cache, fake_compiler, new_process):
    path = build_only(SPEC) / name
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert_built_again(f"{name} is damaged")
    assert fake_compiler.compiled() == 2
    new_process()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answer(SPEC) == 42
    assert jit.build_log()[0].how == "loaded"


def test_every_bit_of_the_meta_data_counts(cache):
    content = (build_only(make_spec()) / "meta.json").read_bytes()
    EntryMeta.from_bytes(content)
    for position in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            with pytest.raises(InvalidEntry):
                EntryMeta.from_bytes(bytes(damaged))
    for damaged in (content + b"\n", content.replace(b":", b" :", 1), content[:-1]):
        with pytest.raises(InvalidEntry):
            EntryMeta.from_bytes(damaged)


@pytest.mark.parametrize("name", [*FILES[:3], *FOLDERS])
@pytest.mark.parametrize("replacement", ["nothing", "link", "file or directory", "fifo"])
def test_something_else_in_its_place(name, replacement, cache, tmp_path):
    """Not even a link to the very same files is followed."""
    path = build_only(SPEC) / name
    path.rename(tmp_path / "moved")
    if replacement == "link":
        path.symlink_to(tmp_path / "moved")
    elif replacement == "fifo":
        os.mkfifo(path, 0o600)
    elif replacement != "nothing":
        path.write_text("") if name in FOLDERS else path.mkdir()
    is_other = "is no folder" if name in FOLDERS else "is not a regular file|is a symbolic link"
    assert_built_again("is missing" if replacement == "nothing" else is_other)
    assert (tmp_path / "moved").exists()


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
@pytest.mark.parametrize("how", ["open to all", "sticky and open to all", "a group's", "another's"])
def test_in_other_hands(name, how, cache, monkeypatch):
    """Each file of an entry counts, not only the one that is loaded; no sticky bit excuses it.

    Nor does it help that this process belongs to the group: so may others.
    """
    path = build_only(SPEC) / name
    if "open to all" in how:
        path.chmod(path.stat().st_mode | (0o1002 if "sticky" in how else 0o002))
        assert_built_again(f"'{name}' can be written to by everybody")
        return
    if os.geteuid() != 0:
        pytest.skip("giving a file away needs root")
    if how == "another's":
        os.chown(path, 4321, 0)
        assert_built_again(f"'{name}' is owned by user id 4321")
        return
    monkeypatch.setattr(os, "getgroups", lambda: [0, 4321])
    monkeypatch.setattr(os, "getegid", lambda: 4321)
    os.chown(path, 0, 4321)
    path.chmod(path.stat().st_mode | 0o020)
    assert_built_again(f"'{name}' can be written to by group id 4321")


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/etc/passwd", "a//d.h", "a/"])
def test_listed_path_that_leads_out(name, cache, tmp_path):
    path = build_only(SPEC)
    (path.parent / "outside").write_text("")
    directory = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(InvalidEntry, match="lists the path"):
            entry_module._open_file(name, directory)
    finally:
        os.close(directory)


def test_disk_that_returns_something_else(cache, monkeypatch):
    real = entry_module.write_private

    def write(path: Path, content: bytes, *, durable: bool) -> None:
        damaged = flip_bit(content) if path.name == "demo.so" else content
        real(path, damaged, durable=durable)

    monkeypatch.setattr(entry_module, "write_private", write)
    with pytest.raises(jit.BuildError, match=r"not read back \(demo\.so is damaged\); check the"):
        jit.load(make_spec())


def test_link_in_place_of_an_entry(cache, tmp_path, new_process):
    path = build_only(make_spec())
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with pytest.warns(RuntimeWarning, match="symbolic link"):
        assert answer(make_spec()) == 42
    assert not path.is_symlink()
    assert jit.is_built(make_spec())
    assert (tmp_path / "moved" / "demo.so").exists()


def test_entry_of_another_key(cache, new_process):
    path = build_only(make_spec())
    shutil.rmtree(path)
    shutil.copytree(build_only(make_spec(cflags=("-O1",))), path, symlinks=True)
    with pytest.warns(RuntimeWarning, match="it was built as demo-"):
        assert answer(make_spec()) == 42


def test_reader_with_an_entry_that_is_replaced_meanwhile(cache, tmp_path, monkeypatch):
    """What is missing from a directory that was moved away is no damage."""
    path = build_only(make_spec())
    key = EntryKey.parse(path.name)
    assert key is not None
    checked = entry_module._open_checked

    def checked_late(*given: Any) -> Any:
        path.rename(tmp_path / "moved")
        (tmp_path / "moved" / "demo.cpp").unlink()
        return checked(*given)

    monkeypatch.setattr(entry_module, "_open_checked", checked_late)
    assert entry_module.open_entry(path, key) is None
    assert (tmp_path / "moved").exists()
