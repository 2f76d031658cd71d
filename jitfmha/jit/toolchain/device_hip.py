"""HIP C++ for AMD GPUs: finds the compiler, tells one from another, makes a code object."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ...amd.device_compiler import (
    HIP_FLAGS,
    DeviceCompileError,
    DeviceCompiler,
    DeviceCompilerNotFound,
    device_compiler,
)
from ..errors import BuildError, CompileFailure, CompilerNotFound
from ..spec import BuildSpec
from ..status import is_verbose, say
from .compiling import compile_failure, source_flags

_ARCH_FLAG = "--offload-arch="
_CODE_OBJECT_VERSION_FLAG = "-mcode-object-version=5"


@dataclass(frozen=True)
class DeviceHip:
    """The toolchain around a clang and an lld that know AMD GPUs.

    Attributes:
        compiler: both, as the words of a command.
        version: clang's whole answer to `--version`.
    """

    compiler: DeviceCompiler
    version: str

    @property
    def identity(self) -> tuple[str, ...]:
        """Where they are, what clang says of itself, and the flags that every kernel gets."""
        places = [os.path.realpath(words[0]) for words in (self.compiler.clang, self.compiler.lld)]
        words = (*self.compiler.clang, *self.compiler.lld)
        return (*places, *words, self.version, *HIP_FLAGS, _CODE_OBJECT_VERSION_FLAG)

    def compile(self, spec: BuildSpec, workspace: Path, destination: Path) -> bytes:
        """As the protocol says: each source by itself, then all of them linked."""
        sources = workspace / "sources"
        arch = _arch(spec)
        paths = source_flags(sources, destination)
        flags = (_CODE_OBJECT_VERSION_FLAG, *spec.cflags, *paths)
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


# Asking costs a process. The answer holds as long as the compiler that was found.
_found: dict[DeviceCompiler, DeviceHip] = {}


def find_device_hip(*, ask_again: bool = False) -> DeviceHip:
    """The toolchain of ROCm, else that of the package `ziglang`.

    Args:
        ask_again: whether to distrust an answer that this process got earlier.

    Raises:
        CompilerNotFound: neither is installed, or it does not run; the message names both.
    """
    try:
        compiler = device_compiler()
    except DeviceCompilerNotFound as error:
        raise CompilerNotFound(str(error)) from error
    if ask_again or compiler not in _found:
        _found[compiler] = DeviceHip(compiler, _version(compiler))
    return _found[compiler]


def _version(compiler: DeviceCompiler) -> str:
    try:
        command = [*compiler.clang, "--version"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerNotFound(f"the compiler for AMD GPUs does not run: {error}") from error
    return answer.stdout


def _arch(spec: BuildSpec) -> str:
    archs = [flag.removeprefix(_ARCH_FLAG) for flag in spec.cflags if flag.startswith(_ARCH_FLAG)]
    if len(archs) != 1:
        raise BuildError(f"{spec.name} names {archs} as its architectures; give one {_ARCH_FLAG}")
    return archs[0]
