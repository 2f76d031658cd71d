"""HIP C++ for AMD GPUs: which of three compilers makes the code objects on this machine.

In this order: hiprtc beside torch's own HIP runtime, ROCm's clang, the clang of the package
`ziglang`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError, CompileFailure, CompilerNotFound
from ..spec import BuildSpec
from ..status import is_verbose, say
from .compiling import INSTALL_ZIG, DoesNotRun, compile_failure, source_flags, version_of
from .device_compiler import (
    CODE_OBJECT_VERSION_FLAG,
    HIP_FLAGS,
    DeviceCompileError,
    DeviceCompiler,
    DeviceCompilerNotFound,
    architecture,
    device_compiler,
)
from .device_hiprtc import DeviceHiprtc, HiprtcNotUsable, asked_hiprtc, find_hiprtc


@dataclass(frozen=True)
class DeviceClang:
    """The toolchain around a clang and an lld that know AMD GPUs.

    ``version`` is clang's whole answer to `--version`; ``why`` says why it was taken.
    """

    compiler: DeviceCompiler
    version: str
    why: str

    @property
    def identity(self) -> tuple[str, ...]:
        places = [os.path.realpath(words[0]) for words in (self.compiler.clang, self.compiler.lld)]
        words = (*self.compiler.clang, *self.compiler.lld)
        return (*places, *words, self.version, *HIP_FLAGS, CODE_OBJECT_VERSION_FLAG)

    def compile(self, spec: BuildSpec, workspace: Path, destination: Path) -> bytes:
        """Compile each source by itself, as the protocol says, then link all of them."""
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


DeviceToolchain = DeviceHiprtc | DeviceClang

# Asking costs a process. The answer holds as long as the compiler that was found.
_found: dict[str | DeviceCompiler, DeviceToolchain] = {}


def find_device_hip(*, ask_again: bool = False) -> DeviceToolchain:
    """The toolchain of the first compiler that is there and runs; its `why` says why that one.

    With ``ask_again`` an answer that this process got earlier counts for nothing. Raises
    ``CompilerNotFound`` where there is none; the message names all three, and how to get one.
    """
    try:
        path, why = find_hiprtc()
        if ask_again or path not in _found:
            _found[path] = asked_hiprtc(path, why)
        return _found[path]
    except HiprtcNotUsable as error:
        no_hiprtc = str(error)
    tried: tuple[str, ...]
    try:
        compiler = device_compiler()
        if ask_again or compiler not in _found:
            why = f"{compiler.why}; not {no_hiprtc}"
            _found[compiler] = DeviceClang(compiler, version_of(compiler.clang), why)
        return _found[compiler]
    except DeviceCompilerNotFound as error:
        tried = error.tried
    except DoesNotRun as error:
        tried = (f"{compiler} ({error})",)
    reasons = "\n".join(f"  {reason}" for reason in (no_hiprtc, *tried))
    raise CompilerNotFound(
        "no compiler for AMD GPUs was found, and kernels are compiled on first use unless a code "
        "object is there for them. "
        f"Tried:\n{reasons}\n"
        "Get one:\n"
        "  hiprtc     install PyTorch for ROCm, which brings it\n"
        "  clang      install ROCm, and set ROCM_PATH to it where it is not in /opt/rocm\n"
        f"  ziglang    {INSTALL_ZIG}\n"
        "or set JITFMHA_CACHE_DIR to a cache that was filled on a machine of the same kind that "
        "has one."
    )


def device_hip_in_words() -> str:
    """Which compiler makes code objects here and why, or why none does."""
    try:
        found = find_device_hip()
    except CompilerNotFound as error:
        return str(error)
    return f"{found}: {found.why}"
