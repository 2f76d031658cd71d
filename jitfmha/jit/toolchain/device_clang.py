"""HIP C++ for AMD GPUs by the programs clang and lld, of ROCm or of the package `ziglang`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError, CompileFailure
from ..spec import BuildSpec
from ..status import is_verbose, say
from .compiling import compile_failure, source_flags
from .device_compiler import (
    CODE_OBJECT_VERSION_FLAG,
    HIP_FLAGS,
    DeviceCompileError,
    DeviceCompiler,
    architecture,
)


@dataclass(frozen=True)
class DeviceClang:
    """The toolchain around a clang and an lld that know AMD GPUs.

    Attributes:
        compiler: both, as the words of a command.
        version: clang's whole answer to `--version`.
        why: it was taken, and nothing else.
    """

    compiler: DeviceCompiler
    version: str
    why: str

    @property
    def identity(self) -> tuple[str, ...]:
        """Where they are, what clang says of itself, and the flags that every kernel gets."""
        places = [os.path.realpath(words[0]) for words in (self.compiler.clang, self.compiler.lld)]
        words = (*self.compiler.clang, *self.compiler.lld)
        return (*places, *words, self.version, *HIP_FLAGS, CODE_OBJECT_VERSION_FLAG)

    def compile(self, spec: BuildSpec, workspace: Path, destination: Path) -> bytes:
        """As the protocol says: each source by itself, then all of them linked."""
        sources = workspace / "sources"
        arch = architecture(spec)
        paths = source_flags(sources, destination)
        flags = (CODE_OBJECT_VERSION_FLAG, *spec.cflags, *paths)
        linked = workspace / spec.artifact_name
        relocatables = []
        if is_verbose():
            say(f"{self.compiler} {' '.join(flags)} {' '.join(spec.compiled_sources)}")
        try:
            for number, name in enumerate(spec.compiled_sources):
                assembly = workspace / f"{Path(name).stem}.s"
                relocatables.append(assembly.with_suffix(".o"))
                # Each has a symbol of its own, which clang would name after the build's folder.
                self.compiler.compile(sources / name, assembly, (*flags, f"-cuid={number}"))
                self.compiler.assemble(assembly, relocatables[-1], arch)
            self.compiler.link(relocatables, linked, spec.ldflags)
            return linked.read_bytes()
        except DeviceCompileError as error:
            raise compile_failure(error.output) from error
        except OSError as error:
            if not workspace.is_dir():
                raise CompileFailure(str(error)) from error
            raise BuildError(f"the build of {spec.name} cannot be run: {error}") from error

    def __str__(self) -> str:
        return f"{self.compiler} ({self.version.partition(chr(10))[0].strip()})"
