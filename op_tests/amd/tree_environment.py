"""The trees that the environment names, which a process reads once and a test sets."""

from __future__ import annotations

from collections.abc import Callable

from jitfmha import call
from jitfmha.emulator import session

UseTree = Callable[..., None]
"""``use_tree(root)`` sets JITFMHA_HSA_DIR, ``use_tree(root, variable)`` another one."""


def forget_trees() -> None:
    """Read the environment and the manifests again, as a new process would."""
    session._target_with_trees.cache_clear()
    call._kinds.clear()
