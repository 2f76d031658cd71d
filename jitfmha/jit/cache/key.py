"""The address of a build: a hash of everything that can change what comes out of it.

Two parts, because a machine without a compiler must still find what another machine built: the
*content key* holds all but the compiler, the *compiler key* holds the compiler.

The variables by which a site points compilers at headers (CPATH and its relatives) are left out on
purpose: launchers include nothing but the standard library, and on clusters those variables change
with every loaded module.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import NamedTuple

import torch

from ...version import __version__
from ..spec import BuildSpec
from ..toolchain.compiling import Toolchain

# Raised when the meaning of an entry changes in a way that the other ingredients do not show.
_FORMAT = 1
_CONTENT_LENGTH = 24
_COMPILER_LENGTH = 12


class EntryKey(NamedTuple):
    """The name of a cache entry, in its three parts.

    Attributes:
        name: of what is built.
        content: a hash of everything but the compiler.
        compiler: a hash of the compiler; None where there is none, and any compiler's entry will
            do. Published entries have one.
    """

    name: str
    content: str
    compiler: str | None

    @property
    def directory_name(self) -> str:
        """The one path component that the entry is published under."""
        return f"{self.name}-{self.content}-{self.compiler}"

    def is_served_by(self, other: EntryKey) -> bool:
        """Whether the entry published under `other` is one that this key asks for."""
        same_content = (self.name, self.content) == (other.name, other.content)
        return same_content and self.compiler in (None, other.compiler)

    @classmethod
    def parse(cls, directory_name: str) -> EntryKey | None:
        """The key behind a directory name, or None if it is not one of an entry."""
        parts = directory_name.rsplit("-", 2)
        if len(parts) != 3 or len(parts[1]) != _CONTENT_LENGTH or len(parts[2]) != _COMPILER_LENGTH:
            return None
        return cls(*parts)


def entry_key(spec: BuildSpec, toolchain: Toolchain | None) -> EntryKey:
    """The address of what `toolchain` makes of `spec` on this machine; None for any toolchain."""
    interface = f"cxx11abi={torch.compiled_with_cxx11_abi()}"
    surroundings = (__version__, torch.__version__, interface, *_machine())
    content = _short_hash((_FORMAT, spec.digest, *surroundings), _CONTENT_LENGTH)
    compiler = None if toolchain is None else _short_hash(toolchain.identity, _COMPILER_LENGTH)
    return EntryKey(spec.name, content, compiler)


def _machine() -> tuple[str, str, str]:
    return (sys.platform, os.uname().machine, _c_library())


def _c_library() -> str:
    """The C library's version: a library linked against a newer one does not load on an older."""
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        return ""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        return ""


def _short_hash(ingredients: tuple[object, ...], length: int) -> str:
    return hashlib.sha256(json.dumps(ingredients).encode()).hexdigest()[:length]
