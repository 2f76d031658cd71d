"""What is to be built, and with which toolchain: rendered sources and flags."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

ToolchainName = Literal["host_cpp", "host_object", "device_hip"]


class _Suffixes(NamedTuple):
    compiled: str
    artifact: str


_SUFFIXES: dict[ToolchainName, _Suffixes] = {
    "host_cpp": _Suffixes(".cpp", ".so"),
    "host_object": _Suffixes(".cpp", ".o"),
    "device_hip": _Suffixes(".hip", ".co"),
}
_INCLUDED = (".h", ".hpp", ".inc")
ARTIFACT_SUFFIXES = tuple(suffixes.artifact for suffixes in _SUFFIXES.values())

MAX_NAME = 80
"""Characters of a build's name. They leave room for the keys and a random suffix in one path
component, also on file systems that encrypt names (eCryptfs allows 143)."""
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.]{{0,{MAX_NAME - 1}}}")
# A folder has no dot in its name and a file always has one, so nothing can be both.
_SOURCE_NAME = re.compile(r"(?:[A-Za-z0-9_]+/)*[A-Za-z0-9_][A-Za-z0-9_.]*(\.[a-z]+)")
# ninja hands flags to a shell, and nothing a shell interprets has a place in them.
_FLAG = re.compile(r"-[A-Za-z0-9_@%+=:,./-]*")


@dataclass(frozen=True)
class BuildSpec:
    """A host library, loaded with ctypes and free of Python headers, an object that such libraries
    have a part of their code from, or a device's code object.

    Attributes:
        name: short and readable; part of the file name of what is built.
        sources: file name to rendered text. A name may lie in folders, as `memory/lds.h`. Every
            `.cpp` (for device code: every `.hip`) is compiled; a header is found by
            `#include "memory/lds.h"` from any of them.
        cflags: compiler flags, instruction-set flags included (nothing depends on the machine that
            happens to compile). For device code `--offload-arch=` among them.
        ldflags: linker flags. Nothing is linked with PyTorch: what is needed of it is handed over.
        why: what made this build necessary, for the status line; not part of the identity.
        toolchain: host C++ makes a shared library (`.so`) or one object of all its sources (`.o`),
            device HIP a code object (`.co`).
        objects: what else is linked into a library. Each is an entry of its own in the cache, so
            that libraries which differ elsewhere compile it once.

    Raises:
        ValueError: a name or flag holds a character that is not safe in a path or a command, there
            is nothing to compile, two sources or objects would give object files of one name, or
            something else than objects is to be linked, or into something else than a library.
    """

    name: str
    sources: Mapping[str, str]
    cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    why: str = field(default="first use", compare=False)
    toolchain: ToolchainName = "host_cpp"
    objects: tuple[BuildSpec, ...] = ()
    digest: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"build name {self.name!r} must be 1 to {MAX_NAME} letters, digits, '_' or '.'"
            )
        self._check_sources()
        for flag in (*self.cflags, *self.ldflags):
            if not _FLAG.fullmatch(flag):
                raise ValueError(
                    f"flag {flag!r} of build {self.name} must start with '-' and hold nothing "
                    "that a shell interprets"
                )
        kinds = {(self.toolchain, each.toolchain) for each in self.objects}
        if kinds - {("host_cpp", "host_object")}:
            raise ValueError(f"build {self.name}: objects are linked into libraries only")
        if len({each.name for each in self.objects}) < len(self.objects):
            raise ValueError(f"build {self.name}: two objects have one name")
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))
        object.__setattr__(self, "digest", self._compute_digest())

    def __reduce__(self) -> tuple[object, ...]:
        # The read-only view of the sources cannot be pickled.
        fields = (self.name, dict(self.sources), self.cflags, self.ldflags, self.why)
        return (type(self), (*fields, self.toolchain, self.objects))

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def artifact_name(self) -> str:
        return self.name + _SUFFIXES[self.toolchain].artifact

    @property
    def compiled_sources(self) -> list[str]:
        return [name for name in self.sources if name.endswith(_SUFFIXES[self.toolchain].compiled)]

    def _check_sources(self) -> None:
        allowed = (_SUFFIXES[self.toolchain].compiled, *_INCLUDED)
        for name in self.sources:
            match = _SOURCE_NAME.fullmatch(name)
            if match is None or match.group(1) not in allowed:
                raise ValueError(
                    f"source name {name!r} of build {self.name} must be a plain file name "
                    f"ending in one of {', '.join(allowed)}; its folders are letters, digits, '_'"
                )
        # An object file is named after its source, without the folder.
        by_object: dict[str, str] = {}
        for name in self.compiled_sources:
            other = by_object.setdefault(name.rpartition("/")[2], name)
            if other != name:
                raise ValueError(
                    f"sources {other!r} and {name!r} of build {self.name} would give object "
                    "files of one name"
                )
        if not by_object:
            raise ValueError(f"build {self.name} has no {allowed[0]} source: {list(self.sources)}")

    def _compute_digest(self) -> str:
        sources = list(self.sources.items())
        objects = (each.digest for each in self.objects)
        identity = [self.toolchain, self.name, sources, self.cflags, self.ldflags, *objects]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()
