"""The umask during a build."""

import os
from collections.abc import Iterator

import pytest

from jitfmha.jit.cache.umask import owner_umask


@pytest.fixture
def restored_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def current_umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


@pytest.mark.parametrize(
    ("umask", "during"), [(0o777, 0o077), (0o722, 0o022), (0o022, 0o022), (0, 0)]
)
def test_umask_of_a_build(umask, during, restored_umask):
    os.umask(umask)
    with owner_umask():
        assert current_umask() == during
        with owner_umask():  # Another thread's build.
            assert current_umask() == during
        assert current_umask() == during
    assert current_umask() == umask


def test_child_of_a_build_has_the_umask_of_the_user(restored_umask):
    os.umask(0o777)
    with owner_umask():
        child = os.fork()
        if child == 0:
            os._exit(0 if current_umask() == 0o777 else 1)
        assert os.waitpid(child, 0)[1] == 0
