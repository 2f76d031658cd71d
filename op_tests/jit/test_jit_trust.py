"""Whose hands a file or directory is in, by its owner, its group and its mode."""

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from jitfmha.jit.cache import trust

USER, PRIVATE_GROUP, TEAM, STRANGER = 1234, 1234, 4321, 777
UNMAPPED = 65534
DIRECTORY, FILE, LINK = stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK
ME = SimpleNamespace(pw_name="me", pw_uid=USER, pw_gid=PRIVATE_GROUP)


@pytest.fixture(autouse=True)
def _ordinary_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user with a private group, who belongs to a team as well."""
    monkeypatch.setattr(os, "geteuid", lambda: USER)
    monkeypatch.setattr(os, "getuid", lambda: USER)
    monkeypatch.setattr(os, "getegid", lambda: PRIVATE_GROUP)
    monkeypatch.setattr(os, "getgid", lambda: PRIVATE_GROUP)
    monkeypatch.setattr(os, "getgroups", lambda: [PRIVATE_GROUP, TEAM])
    monkeypatch.setattr(trust, "_unmapped_owner", lambda: None)
    accounts(monkeypatch)
    trust._has_no_other_member.cache_clear()
    yield
    trust._has_no_other_member.cache_clear()


def accounts(
    monkeypatch: pytest.MonkeyPatch,
    *users: SimpleNamespace,
    members: tuple[str, ...] = (),
    of_root: tuple[str, ...] = (),
) -> None:
    """What the system knows of users and of who is listed in the private group and in root's."""
    known = users or (ME,)
    listed = {0: list(of_root), PRIVATE_GROUP: list(members), TEAM: []}

    def lookup(user: int) -> SimpleNamespace:
        found = [each for each in known if each.pw_uid == user]
        if not found:
            raise KeyError(user)
        return found[0]

    monkeypatch.setattr(pwd, "getpwuid", lookup)
    monkeypatch.setattr(pwd, "getpwall", lambda: list(known))
    monkeypatch.setattr(grp, "getgrgid", lambda group: SimpleNamespace(gr_mem=listed[group]))


def reason(mode: int, user: int = USER, group: int = TEAM, *, as_parent: bool = False) -> str:
    status = os.stat_result((mode, 0, 0, 1, user, group, 0, 0, 0, 0))
    return trust.node_reason("it", status, as_parent=as_parent) or ""


@pytest.mark.parametrize("as_parent", [False, True])
@pytest.mark.parametrize("kind", [DIRECTORY, FILE])
@pytest.mark.parametrize("group", [TEAM, STRANGER])
def test_group_that_may_have_other_members(kind, group, as_parent):
    """That this user belongs to a supplementary group says nothing about who else does."""
    refused = f"'it' can be written to by group id {group} (mode 0770)"
    assert reason(kind | 0o770, group=group, as_parent=as_parent) == refused
    assert reason(kind | 0o020, group=group, as_parent=as_parent)
    assert reason(kind | 0o750, group=group, as_parent=as_parent) == ""


@pytest.mark.parametrize("group", [0, PRIVATE_GROUP])
@pytest.mark.parametrize("members", [(), ("me",)])
def test_group_without_others(group, members, monkeypatch):
    """Root's, and this user's private one, also where it lists the user."""
    accounts(monkeypatch, members=members, of_root=("root",))
    assert reason(DIRECTORY | 0o770, group=group) == ""
    assert reason(FILE | 0o660, user=0, group=group) == ""
    assert reason(FILE | 0o662, group=group) == "'it' can be written to by everybody (mode 0662)"


@pytest.mark.parametrize("case", ["listed", "primary of another", "not primary", "no account"])
def test_group_numbered_like_the_user_that_is_not_private(case, monkeypatch):
    other = SimpleNamespace(pw_name="other", pw_uid=STRANGER, pw_gid=TEAM)
    if case == "listed":
        accounts(monkeypatch, ME, other, members=("me", "other"))
    elif case == "primary of another":
        other.pw_gid = PRIVATE_GROUP
        accounts(monkeypatch, ME, other)
    elif case == "not primary":
        accounts(monkeypatch, SimpleNamespace(pw_name="me", pw_uid=USER, pw_gid=TEAM), other)
    else:
        accounts(monkeypatch, other)
    refused = f"'it' can be written to by group id {PRIVATE_GROUP} (mode 0770)"
    assert reason(DIRECTORY | 0o770, group=PRIVATE_GROUP) == refused
    assert reason(DIRECTORY | 0o770, group=PRIVATE_GROUP, as_parent=True) == refused
    assert reason(DIRECTORY | 0o750, group=PRIVATE_GROUP) == ""


def test_group_of_root_with_other_members(monkeypatch):
    accounts(monkeypatch, of_root=("root", "other"))
    assert reason(DIRECTORY | 0o775, user=0, group=0).endswith("by group id 0 (mode 0775)")


@pytest.mark.parametrize("user", [0, USER])
def test_owner(user):
    assert reason(FILE | 0o600, user=user) == ""
    assert reason(DIRECTORY | 0o777, user=user).endswith("by everybody (mode 0777)")


@pytest.mark.parametrize("kind", [DIRECTORY, FILE, LINK])
@pytest.mark.parametrize("as_parent", [False, True])
@pytest.mark.parametrize("user", [TEAM, STRANGER, UNMAPPED])
def test_owned_by_somebody_else(user, as_parent, kind):
    """Whatever its mode, and also where a group of this user has the same number."""
    for mode in (0o400, 0o700, 0o1777):
        refused = reason(kind | mode, user=user, group=0, as_parent=as_parent)
        assert refused == f"'it' is owned by user id {user}, not by this user (id {USER}) or root"


def test_sticky_bit_excuses_parents_only():
    for mode in (0o1777, 0o1770):
        assert reason(DIRECTORY | mode, as_parent=True) == ""
        assert reason(DIRECTORY | mode)
    assert reason(DIRECTORY | 0o4777, as_parent=True)
    assert reason(DIRECTORY | 0o2777, as_parent=True)


def test_mode_of_a_link_means_nothing():
    assert reason(LINK | 0o777) == ""


# ---- User namespaces -----------------------------------------------------------------------------


@pytest.fixture
def user_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_unmapped_owner", lambda: UNMAPPED)


@pytest.mark.parametrize("kind", [DIRECTORY, FILE, LINK])
@pytest.mark.parametrize("user", [USER, UNMAPPED])
def test_what_is_loaded_from_outside_of_the_namespace(kind, user, user_namespace, monkeypatch):
    """Also for a user inside who has the same number: nobody can tell the two."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert "everybody outside of it" in reason(kind | 0o700, user=UNMAPPED)
    assert "everybody outside of it" in reason(kind | 0o700, user=UNMAPPED, as_parent=True)
    assert reason(kind | 0o700, user=0) == ""
    assert reason(kind | 0o700, user=STRANGER)


Nodes = dict[str, tuple[int, int]]
SYSTEM: Nodes = {"/": (DIRECTORY | 0o755, UNMAPPED), "/home": (DIRECTORY | 0o755, UNMAPPED)}
STICKY: Nodes = {"/": (DIRECTORY | 0o755, UNMAPPED), "/tmp": (DIRECTORY | 0o1777, UNMAPPED)}


def way(nodes: Nodes, path: str, monkeypatch: pytest.MonkeyPatch, **links: str) -> str:
    """The reason for `path` in a file system that has nothing but `nodes`: mode and owner."""
    asked = []

    def lstat(node: str) -> os.stat_result:
        asked.append(node)
        if node not in nodes:
            raise FileNotFoundError(node)
        mode, user = nodes[node]
        return os.stat_result((mode, 0, 0, 1, user, TEAM, 0, 0, 0, 0))

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", lstat)
        patch.setattr(os, "readlink", lambda node: links[os.path.basename(node)])
        found = trust.parents_reason(path, must_exist=True) or ""
    assert asked[0] == "/"
    return found


def test_parents_from_outside_of_the_namespace(user_namespace, monkeypatch):
    nodes = {**SYSTEM, "/home/me": (DIRECTORY | 0o700, USER)}
    assert way(nodes, "/home/me", monkeypatch) == ""
    nodes["/home/me/.cache"] = (DIRECTORY | 0o700, UNMAPPED)
    assert way(nodes, "/home/me/.cache", monkeypatch) == ""


@pytest.mark.parametrize("mode", [0o1777, 0o1775])
@pytest.mark.parametrize("user", [UNMAPPED, 0, USER])
def test_parents_below_a_directory_that_others_can_write_to(
    mode, user, user_namespace, monkeypatch
):
    """There anybody may have made them."""
    nodes = {**STICKY, "/tmp": (DIRECTORY | mode, user)}
    assert way(nodes, "/tmp", monkeypatch) == ""
    nodes["/tmp/mine"] = (DIRECTORY | 0o700, USER)
    assert way(nodes, "/tmp/mine", monkeypatch) == ""
    nodes["/tmp/mine/inner"] = (DIRECTORY | 0o700, UNMAPPED)
    assert "'/tmp/mine/inner' is owned by" in way(nodes, "/tmp/mine/inner", monkeypatch)
    nodes["/tmp/theirs"] = (DIRECTORY | 0o755, UNMAPPED)
    assert "'/tmp/theirs' is owned by" in way(nodes, "/tmp/theirs", monkeypatch)


def test_link_from_outside_of_the_namespace(user_namespace, monkeypatch):
    """Once the way has crossed a directory that others can write to, no link leads out of that."""
    nodes = {**SYSTEM, **STICKY, "/home/link": (LINK | 0o777, UNMAPPED)}
    nodes |= {"/tmp/mine": (DIRECTORY | 0o700, USER), "/home/inner": (DIRECTORY | 0o755, UNMAPPED)}
    assert way(nodes, "/home/link", monkeypatch, link="/home/inner") == ""
    assert way(nodes, "/home/link", monkeypatch, link="../tmp/mine") == ""
    nodes["/tmp/link"] = (LINK | 0o777, UNMAPPED)
    assert "'/tmp/link' is owned by" in way(nodes, "/tmp/link", monkeypatch, link="/home/inner")
    nodes["/tmp/link"] = (LINK | 0o777, USER)
    assert "'/home' is owned by" in way(nodes, "/tmp/link", monkeypatch, link="/home/inner")


def test_missing_component(monkeypatch):
    nodes: Nodes = {"/": (DIRECTORY | 0o755, 0)}
    with pytest.raises(FileNotFoundError):
        way(nodes, "/missing", monkeypatch)
    assert trust.parents_reason("/missing-here/deeper") is None
    assert trust.private_directory_reason("/missing-here") is None
    with pytest.raises(FileNotFoundError):
        trust.private_directory_reason("/missing-here", must_exist=True)
