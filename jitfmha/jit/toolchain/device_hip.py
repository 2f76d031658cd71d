"""HIP C++ for AMD GPUs: which of three compilers makes the code objects on this machine.

In this order: hiprtc beside torch's own HIP runtime, ROCm's clang, the clang of the package
`ziglang`.
"""

from __future__ import annotations

from ..errors import CompilerNotFound
from .compiling import DoesNotRun, version_of
from .device_clang import DeviceClang
from .device_compiler import DeviceCompiler, DeviceCompilerNotFound, device_compiler
from .device_hiprtc import DeviceHiprtc, HiprtcNotUsable, asked_hiprtc, find_hiprtc
from .zig import INSTALL_ZIG

DeviceToolchain = DeviceHiprtc | DeviceClang

# Asking costs a process. The answer holds as long as the compiler that was found.
_found: dict[str | DeviceCompiler, DeviceToolchain] = {}


def find_device_hip(*, ask_again: bool = False) -> DeviceToolchain:
    """The toolchain of the first compiler that is there and runs; its `why` says why that one.

    Args:
        ask_again: whether to distrust an answer that this process got earlier.

    Raises:
        CompilerNotFound: there is none; the message names all three, and how to get one.
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
