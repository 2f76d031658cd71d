"""C++ of a test beside the headers of a CPU kernel, as a library."""

import ctypes

from jitfmha.jit.loader import load
from jitfmha.jit.spec import BuildSpec
from jitfmha.kernels.cpu import CpuTraits, launcher_spec
from jitfmha.planning.target import CpuIsa

EXPORT = '#define JITFMHA_EXPORT extern "C" __attribute__((visibility("default")))\n'


def header_library(name: str, source: str, dtype: str, isa: CpuIsa) -> ctypes.CDLL:
    """What ``source`` exports, beside the headers of a forward kernel of ``dtype``."""
    spec = launcher_spec(CpuTraits(dtype, 64, 64, False, "gm0", isa))
    headers = {file: text for file, text in spec.sources.items() if file.endswith(".h")}
    return load(
        BuildSpec(
            name=f"{name}_{isa}",
            sources={**headers, f"{name}.cpp": EXPORT + source},
            cflags=spec.cflags,
            ldflags=(),
            why="a test",
        )
    )
