"""A library with hiprtc's C interface, on top of the clang of the package `ziglang`."""

from pathlib import Path

from jitfmha import jit
from jitfmha.jit.toolchain.compiling import zig_program

_SOURCE = Path(__file__).with_suffix(".cpp")
_BUILTIN_HEADER = Path(__file__).with_name("hiprtc_builtin_header.h")


def write_hiprtc(folder: Path, name: str = "libhiprtc.so.7") -> Path:
    """The library, as a new file in ``folder``.

    Raises:
        FileNotFoundError: the package `ziglang` is not installed.
    """
    zig = zig_program()
    if zig is None:
        raise FileNotFoundError("the Python package 'ziglang' is not installed")
    header = _BUILTIN_HEADER.read_text(encoding="utf-8")
    given = f'const char zig[] = "{zig}";\nconst char builtin_header[] = R"({header})";\n'
    spec = jit.BuildSpec(
        name="hiprtc_on_clang",
        sources={_SOURCE.name: _SOURCE.read_text(encoding="utf-8"), "given.h": given},
        cflags=("-std=c++17", "-O1", "-fvisibility=hidden"),
        why="device code is compiled as where PyTorch for ROCm is",
    )
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jit.read(spec))
    return path
