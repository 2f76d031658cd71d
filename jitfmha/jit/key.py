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
from dataclasses import dataclass

import torch

from .compiler import Compiler
from .spec import BuildSpec

# Raised when the meaning of an entry changes in a way that the other ingredients do not show.
_FORMAT = 1
_CONTENT_LENGTH = 24
_COMPILER_LENGTH = 12


@dataclass(frozen=True)
class EntryKey:
    """The name of a cache entry, in its three parts."""

    name: str
    content: str
    compiler: str

    @property
    def directory_name(self) -> str:
        """The one path component that the entry is published under."""
        return f"{self.name}-{self.content}-{self.compiler}"

    @classmethod
    def parse(cls, directory_name: str) -> EntryKey | None:
        """The key behind a directory name, or None if it is not one of an entry."""
        parts = directory_name.rsplit("-", 2)
        if len(parts) != 3 or len(parts[1]) != _CONTENT_LENGTH or len(parts[2]) != _COMPILER_LENGTH:
            return None
        return cls(*parts)


def entry_key(spec: BuildSpec, compiler: Compiler) -> EntryKey:
    """The address of what `compiler` makes of `spec` on this machine."""
    return EntryKey(spec.name, content_key(spec), _short_hash(compiler.identity, _COMPILER_LENGTH))


def content_key(spec: BuildSpec) -> str:
    """The part of the address that does not depend on the compiler."""
    return _short_hash((_FORMAT, spec.digest, *_surroundings()), _CONTENT_LENGTH)


def _surroundings() -> tuple[str, ...]:
    return (package_version(), *_torch_identity(), *_machine())


def package_version() -> str:
    """The version of jitfmha."""
    # Imported here because the package's own __init__ imports this module.
    from jitfmha import __version__

    return __version__


def _torch_identity() -> tuple[str, str]:
    return (torch.__version__, f"cxx11abi={torch.compiled_with_cxx11_abi()}")


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
