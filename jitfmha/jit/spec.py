"""What is to be built: one launcher, as rendered sources and flags."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

# 80 characters leave room for the keys and a random suffix in one path component, also on file
# systems that encrypt names (eCryptfs allows 143).
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]{0,79}")
# A folder has no dot in its name and a file always has one, so nothing can be both.
_SOURCE_NAME = re.compile(r"(?:[A-Za-z0-9_]+/)*[A-Za-z0-9_][A-Za-z0-9_.]*\.(?:cpp|h|hpp|inc)")
# ninja hands flags to a shell, and nothing a shell interprets has a place in them.
_FLAG = re.compile(r"-[A-Za-z0-9_@%+=:,./-]*")


@dataclass(frozen=True)
class BuildSpec:
    """A C++ host launcher: loaded with ctypes, free of Python and PyTorch headers.

    Attributes:
        name: short and readable; part of the file name of the library.
        sources: file name to rendered text. A name may lie in folders, as `memory/lds.h`. Every
            `.cpp` is compiled; a header is found by `#include "memory/lds.h"` from any of them.
        cflags: compiler flags, instruction-set flags included (nothing depends on the machine that
            happens to compile).
        ldflags: linker flags; PyTorch's own libraries are linked without being asked for.
        why: what made this build necessary, for the status line; not part of the identity.

    Raises:
        ValueError: a name or flag holds a character that is not safe in a path or a command, or
            there is nothing to compile, or two sources would give object files of one name.
    """

    name: str
    sources: Mapping[str, str]
    cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    why: str = field(default="first use", compare=False)
    digest: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"launcher name {self.name!r} must be 1 to 80 letters, digits, '_' or '.'"
            )
        for file_name in self.sources:
            if not _SOURCE_NAME.fullmatch(file_name):
                raise ValueError(
                    f"source name {file_name!r} of launcher {self.name} must be a plain file name "
                    "ending in .cpp, .h, .hpp or .inc; its folders are letters, digits, '_'"
                )
        self._check_compiled_sources()
        for flag in (*self.cflags, *self.ldflags):
            if not _FLAG.fullmatch(flag):
                raise ValueError(
                    f"flag {flag!r} of launcher {self.name} must start with '-' and hold nothing "
                    "that a shell interprets"
                )
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))
        object.__setattr__(self, "digest", self._compute_digest())

    def __reduce__(self) -> tuple[object, ...]:
        # The read-only view of the sources cannot be pickled.
        fields = (self.name, dict(self.sources), self.cflags, self.ldflags, self.why)
        return (type(self), fields)

    def __hash__(self) -> int:
        return hash(self.digest)

    def _check_compiled_sources(self) -> None:
        # cpp_extension names an object file after its source, without the folder.
        by_object: dict[str, str] = {}
        for file_name in self.sources:
            if file_name.endswith(".cpp"):
                other = by_object.setdefault(file_name.rpartition("/")[2], file_name)
                if other != file_name:
                    raise ValueError(
                        f"sources {other!r} and {file_name!r} of launcher {self.name} would give "
                        "object files of one name"
                    )
        if not by_object:
            raise ValueError(f"launcher {self.name} has no .cpp source: {list(self.sources)}")

    def _compute_digest(self) -> str:
        identity = [self.name, list(self.sources.items()), self.cflags, self.ldflags]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()
