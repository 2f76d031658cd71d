"""Whose hands a file or directory is in, by its owner, its group and its mode."""

from __future__ import annotations

import os
import stat

import pytest

from jitfmha.jit.cache import trust

USER, PRIVATE_GROUP, TEAM, STRANGER = 1234, 1234, 4321, 777
DIRECTORY, FILE, LINK = stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK


@pytest.fixture(autouse=True)
def _ordinary_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whose first group is its own, and who belongs to a team as well."""
    monkeypatch.setattr(os, "geteuid", lambda: USER)
    monkeypatch.setattr(os, "getuid", lambda: USER)
    monkeypatch.setattr(os, "getegid", lambda: PRIVATE_GROUP)
    monkeypatch.setattr(os, "getgid", lambda: PRIVATE_GROUP)
    monkeypatch.setattr(os, "getgroups", lambda: [PRIVATE_GROUP, TEAM])
    monkeypatch.setattr(trust, "_stands_for_unmapped", lambda user: False)


def reason(mode: int, user: int = USER, group: int = TEAM, *, as_parent: bool = False) -> str:
    status = os.stat_result((mode, 0, 0, 1, user, group, 0, 0, 0, 0))
    return trust.node_reason("it", status, as_parent=as_parent) or ""


@pytest.mark.parametrize("as_parent", [False, True])
@pytest.mark.parametrize("kind", [DIRECTORY, FILE])
@pytest.mark.parametrize("group", [TEAM, STRANGER])
def test_group_that_may_have_other_members(kind: int, group: int, as_parent: bool) -> None:
    """That this user belongs to a supplementary group says nothing about who else does."""
    refused = f"'it' can be written to by group id {group} (mode 0770)"
    assert reason(kind | 0o770, group=group, as_parent=as_parent) == refused
    assert reason(kind | 0o020, group=group, as_parent=as_parent)
    assert reason(kind | 0o750, group=group, as_parent=as_parent) == ""


@pytest.mark.parametrize("group", [0, PRIVATE_GROUP])
def test_group_without_others(group: int) -> None:
    """Root's, and the one with the user's number."""
    assert reason(DIRECTORY | 0o770, group=group) == ""
    assert reason(FILE | 0o660, user=0, group=group) == ""
    assert reason(FILE | 0o662, group=group) == "'it' can be written to by everybody (mode 0662)"


@pytest.mark.parametrize("user", [0, USER])
def test_owner(user: int) -> None:
    assert reason(FILE | 0o600, user=user) == ""
    assert reason(DIRECTORY | 0o777, user=user).endswith("by everybody (mode 0777)")


@pytest.mark.parametrize("kind", [DIRECTORY, FILE, LINK])
@pytest.mark.parametrize("as_parent", [False, True])
@pytest.mark.parametrize("user", [TEAM, STRANGER])
def test_owned_by_somebody_else(user: int, as_parent: bool, kind: int) -> None:
    """Whatever its mode, and also where a group of this user has the same number."""
    for mode in (0o400, 0o700, 0o1777):
        refused = reason(kind | mode, user=user, group=0, as_parent=as_parent)
        assert refused == f"'it' is owned by user id {user}, not by this user (id {USER}) or root"


def test_sticky_bit_excuses_parents_only() -> None:
    for mode in (0o1777, 0o1770):
        assert reason(DIRECTORY | mode, as_parent=True) == ""
        assert reason(DIRECTORY | mode)
    assert reason(DIRECTORY | 0o4777, as_parent=True)
    assert reason(DIRECTORY | 0o2777, as_parent=True)


def test_mode_of_a_link_means_nothing() -> None:
    assert reason(LINK | 0o777) == ""
