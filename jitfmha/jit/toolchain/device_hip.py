"""HIP C++ for AMD GPUs: which of three compilers makes the code objects on this machine.

In this order: hiprtc beside torch's own HIP runtime, ROCm's clang, the clang of the package
`ziglang`.
"""

from __future__ import annotations

from ..errors import CompilerNotFound
from .device_clang import DeviceClang, clang_version
from .device_compiler import DeviceCompiler, DeviceCompilerNotFound, device_compiler
from .device_hiprtc import DeviceHiprtc
from .hiprtc import HiprtcNotUsable, asked_hiprtc, find_hiprtc
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
        return _hiprtc(ask_again)
    except HiprtcNotUsable as error:
        no_hiprtc = str(error)
    try:
        return _clang(ask_again, no_hiprtc)
    except DeviceCompilerNotFound as error:
        raise CompilerNotFound(_not_found_message([no_hiprtc, *error.tried])) from error
    except CompilerNotFound as error:
        raise CompilerNotFound(_not_found_message([no_hiprtc, str(error)])) from error


def device_hip_in_words() -> str:
    """Which compiler makes code objects here and why, or why none does."""
    try:
        found = find_device_hip()
    except CompilerNotFound as error:
        return str(error)
    return f"{found}: {found.why}"


def _hiprtc(ask_again: bool) -> DeviceToolchain:
    path, why = find_hiprtc()
    if ask_again or path not in _found:
        _found[path] = DeviceHiprtc(asked_hiprtc(path, why))
    return _found[path]


def _clang(ask_again: bool, no_hiprtc: str) -> DeviceToolchain:
    compiler = device_compiler()
    if ask_again or compiler not in _found:
        why = f"{compiler.why}; not {no_hiprtc}"
        _found[compiler] = DeviceClang(compiler, clang_version(compiler), why)
    return _found[compiler]


def _not_found_message(tried: list[str]) -> str:
    reasons = "\n".join(f"  {reason}" for reason in tried)
    return (
        "no compiler for AMD GPUs was found, and kernels that do not come ready are compiled on "
        f"first use. Tried:\n{reasons}\n"
        "Get one:\n"
        "  hiprtc     install PyTorch for ROCm, which brings it\n"
        "  clang      install ROCm, and set ROCM_PATH to it where it is not in /opt/rocm\n"
        f"  ziglang    {INSTALL_ZIG}\n"
        "or set JITFMHA_CACHE_DIR to a cache that was filled on a machine of the same kind that "
        "has one."
    )
