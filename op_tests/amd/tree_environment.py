"""The trees that the environment names, which a target reads when it is made."""

from __future__ import annotations

from collections.abc import Callable

UseTree = Callable[..., None]
"""``use_tree(root)`` sets JITFMHA_HSA_DIR, ``use_tree(root, variable)`` another one."""
