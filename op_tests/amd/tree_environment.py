"""The trees that the environment names, which a process reads once and a test sets."""

from __future__ import annotations

from collections.abc import Callable

from jitfmha import call
from jitfmha.amd import manifest
from jitfmha.amd.launcher import checked_code_object

UseTree = Callable[..., None]
"""``use_tree(root)`` sets JITFMHA_HSA_DIR, ``use_tree(root, variable)`` another one."""


def forget_trees() -> None:
    """Read the environment and the manifests again, as a new process would."""
    manifest._trees_of.cache_clear()
    manifest._warned_of.clear()
    checked_code_object.cache_clear()
    call._prepared.clear()
