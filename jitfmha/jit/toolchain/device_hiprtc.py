"""HIP C++ for AMD GPUs by hiprtc, the compiler in a library that comes with PyTorch for ROCm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError, CompileFailure
from ..spec import BuildSpec
from ..status import is_verbose, say
from .compiling import compile_failure, debugger_flags
from .device_compiler import KEYWORDS, LANGUAGE_FLAGS
from .device_flags import CODE_OBJECT_VERSION_FLAG, architecture
from .hiprtc import Hiprtc, HiprtcFailure
from .hiprtc_process import Program

# After those that hiprtc has of its own, so that these hold. Each code object has a symbol that
# clang would name after a temporary folder.
_OPTIONS = (*LANGUAGE_FLAGS, CODE_OBJECT_VERSION_FLAG, "-cuid=0")


@dataclass(frozen=True)
class DeviceHiprtc:
    """The toolchain around a hiprtc. All sources are one program for it."""

    hiprtc: Hiprtc

    @property
    def why(self) -> str:
        """It was taken, and nothing else."""
        return self.hiprtc.why

    @property
    def identity(self) -> tuple[str, ...]:
        """Where it is, what it consists of, its version, and the options that every kernel gets."""
        path, _, version, contents = self.hiprtc
        return ("hiprtc", path, version, *(word for pair in contents for word in pair), *_OPTIONS)

    def compile(self, spec: BuildSpec, workspace: Path, destination: Path) -> bytes:
        """As the protocol says: all sources as one program."""
        architecture(spec)
        if spec.ldflags:
            raise BuildError(
                f"{spec.name} has the linker flags {list(spec.ldflags)}, and hiprtc takes none"
            )
        program = _program(spec, workspace / "sources", destination)
        if is_verbose():
            say(f"{self} {' '.join(program['options'])} {' '.join(spec.compiled_sources)}")
        try:
            return self.hiprtc.compile(program, workspace)
        except HiprtcFailure as error:
            if not workspace.is_dir():
                raise CompileFailure(error.output) from error
            raise compile_failure(error.output) from error

    def __str__(self) -> str:
        return str(self.hiprtc)


def _program(spec: BuildSpec, sources: Path, destination: Path) -> Program:
    compiled = spec.compiled_sources
    keywords = "".join(f"#ifndef {x}\n#define {x} {KEYWORDS[x]}\n#endif\n" for x in KEYWORDS)
    texts = "".join(_text(spec, name, sources) for name in compiled)
    return {
        "name": f"{spec.name}.program.hip",
        # hiprtc declares names before the first line, `tanh` and `float4` among them. In a
        # namespace, the program may give them meanings of its own.
        "source": f"{keywords}namespace program {{\n{texts}}}\n",
        "headers": {x: _text(spec, x, sources) for x in spec.sources if x not in compiled},
        "options": [*_OPTIONS, *spec.cflags, *debugger_flags(sources, destination)],
    }


def _text(spec: BuildSpec, name: str, sources: Path) -> str:
    """A source that tells the compiler where it lies, for messages and debuggers.

    hiprtc copies what it is given to a place of its own.
    """
    return f'#line 1 "{sources / name}"\n{spec.sources[name]}\n'
