"""Whose hands a tree of code objects is in: what the environment names, and what is shipped."""

from pathlib import Path

import pytest
from plain_tree import PlainKernel, write_tree

from jitfmha.amd.chips import chip
from jitfmha.amd.code_object import CodeObject, CodeObjectError
from jitfmha.amd.tree import Tree, trees_of

GOOD = PlainKernel()


def read(root: Path) -> Tree:
    return Tree("the tree of the test", root / "gfx942", chip("MI300X"))


def good_tree(root: Path) -> Path:
    """A tree with one kernel; its manifest's folder."""
    write_tree(root, "gfx942", [GOOD])
    return root / "gfx942" / "fmha_v3_fwd"


def read_first(root: Path) -> CodeObject | CodeObjectError:
    tree = read(root)
    return tree.code_object(tree.forward.rows[0])


@pytest.mark.parametrize("where", ["gfx942", "gfx942/fmha_v3_fwd", "gfx942/fmha_v3_fwd/MI300"])
def test_folder_that_others_can_write_to(where, tmp_path):
    good_tree(tmp_path)
    assert isinstance(read_first(tmp_path), CodeObject)
    (tmp_path / where).chmod(0o777)
    assert_not_used(tmp_path, "can be written to by everybody (mode 0777)")
    (tmp_path / where).chmod(0o1777)
    assert isinstance(read_first(tmp_path), CodeObject), "others cannot replace what is not theirs"


@pytest.mark.parametrize("where", ["fmha_fwd.csv", f"MI300/{GOOD.file}"])
@pytest.mark.parametrize("mode", [0o646, 0o1646])
def test_file_that_others_can_write_to(where, mode, tmp_path):
    (good_tree(tmp_path) / where).chmod(mode)
    assert_not_used(tmp_path, f"can be written to by everybody (mode {mode:04o})")


@pytest.mark.parametrize("where", [".", "fmha_fwd.csv", "MI300", f"MI300/{GOOD.file}"])
def test_owned_by_another_user(where, tmp_path, give_away):
    give_away(good_tree(tmp_path) / where)
    assert_not_used(tmp_path, "is owned by user id 54321, not by this user")


def test_link_to_a_file_of_another_user(tmp_path, give_away):
    path = good_tree(tmp_path) / "MI300" / GOOD.file
    other = path.with_name("elsewhere.co")
    path.rename(other)
    path.symlink_to(other)
    assert isinstance(read_first(tmp_path), CodeObject)
    give_away(other)
    assert_not_used(tmp_path, "elsewhere.co' is owned by user id 54321")


def test_the_shipped_tree_is_as_safe_as_the_package(tmp_path, use_tree, give_away, monkeypatch):
    folder = good_tree(tmp_path)
    use_tree(tmp_path)
    monkeypatch.setattr("jitfmha.amd.tree.hsa_dir", lambda: tmp_path)
    give_away(folder / "fmha_fwd.csv")
    give_away(folder / "MI300" / GOOD.file)
    theirs, ours = trees_of(chip("MI300X"))
    assert theirs.forward.rows == ()
    assert isinstance(ours.code_object(ours.forward.rows[0]), CodeObject)


def assert_not_used(root: Path, reason: str) -> None:
    """Neither the manifest, if it is as odd as that, nor the code object."""
    tree = read(root)
    if not tree.forward.rows:
        (oddity,) = tree.forward.oddities
        assert "the tree of the test: the manifest " in oddity
        assert "is not used: '" in oddity
        assert reason in oddity
        return
    assert tree.forward.oddities == ()
    with pytest.warns(RuntimeWarning, match="is not used: '"):
        found = tree.code_object(tree.forward.rows[0])
    assert isinstance(found, CodeObjectError)
    assert reason in str(found)
