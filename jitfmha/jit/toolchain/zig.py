"""The compilers that come with the Python package `ziglang`: clang, lld and a C++ library."""

from __future__ import annotations

import importlib.util
from pathlib import Path

# `pip` adds what an extra names to a package that is there already, whatever it came from.
INSTALL_ZIG = "pip install 'jitfmha[compiler]'"
ZIG_MISSING = "the Python package 'ziglang' (not installed)"


def zig_program() -> Path | None:
    """The program of the package; None where it is not installed.

    It is run itself: `python -m ziglang` would look for modules in the working directory first.
    """
    package = importlib.util.find_spec("ziglang")
    folders = (package and package.submodule_search_locations) or ()
    programs = (Path(folder, "zig").absolute() for folder in folders)
    return next((program for program in programs if program.is_file()), None)
