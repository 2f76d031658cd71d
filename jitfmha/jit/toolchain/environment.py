"""What a build changes in the environment, which cpp_extension reads and the process has once.

Other threads look for compilers meanwhile, and start processes: they have the user's.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_lock = threading.Lock()
_before: dict[str, str | None] = {}


def user_environment() -> dict[str, str]:
    """The environment, without what a build of this process has put there for now."""
    with _lock:
        return {name: text for name, text in (os.environ | _before).items() if text is not None}


@contextmanager
def changed_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Put ``changes`` into the environment for a `with` block, one at a time."""
    with _lock:
        _before.update({name: os.environ.get(name) for name in changes})
        os.environ.update(changes)
    try:
        yield
    finally:
        with _lock:
            _restore()


def _restore() -> None:
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()


def _forget_build_of_parent() -> None:
    """Begin anew in the child of a fork that took place while another thread was building."""
    global _lock
    _lock = threading.Lock()
    _restore()


os.register_at_fork(after_in_child=_forget_build_of_parent)
