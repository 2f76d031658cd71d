"""This interpreter once more, for a program that needs the standard library alone."""

from __future__ import annotations

import os
import sys


def isolated_python() -> tuple[str, ...] | None:
    """The first words of the command; None where no such interpreter can be started.

    It is isolated, because the working directory may be anybody's and must not be where modules
    come from. Without site-packages it starts in 10 ms.
    """
    # An isolated interpreter ignores this variable, and would not find its own library without it.
    if os.environ.get("PYTHONHOME"):
        return None
    # A program that embeds Python may name itself as its interpreter.
    if not os.path.basename(sys.executable or "").startswith("python"):
        return None
    return (sys.executable, "-I", "-S")
