"""Compiles HIP C++ and assembly to AMDGPU code objects, with or without a ROCm installation.

The compiler is clang with lld, as programs. A ROCm installation has both under `llvm/bin`.
Elsewhere the PyPI package `ziglang` carries both, with the AMDGPU back end; it needs neither ROCm
nor a GPU. (`device_hiprtc.py` finds them in a library, which takes no assembly.) No HIP header is
used: kernels are written with `__global__`, `__device__`, `__shared__` and the `__builtin_amdgcn_*`
builtins.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from ..errors import BuildError
from ..resources import templates_dir
from ..spec import BuildSpec
from .compiling import INSTALL_ZIG, ZIG_MISSING, zig_program

_DEFAULT_ROCM = "/opt/rocm"
_CODE_OBJECT_VERSIONS = (4, 5, 6)
_ARCH_FLAG = "--offload-arch="
_TARGET = ("-target", "amdgcn-amd-amdhsa")
# What hip_runtime.h would bring; no header is needed.
KEYWORDS = {
    "__global__": "__attribute__((global))",
    "__device__": "__attribute__((device))",
    "__shared__": "__attribute__((shared))",
}
# Every kernel gets these, whatever compiles it.
LANGUAGE_FLAGS = ("-std=gnu++17", "-O3")
CODE_OBJECT_VERSION_FLAG = "-mcode-object-version=5"
_HIP_HEADER = "hip/hip_runtime.h"
HIP_FLAGS = (
    *("-x", "hip", "--cuda-device-only", "-nogpuinc", "-nogpulib", "--no-gpu-bundle-output"),
    *(f"-D{keyword}={meaning}" for keyword, meaning in KEYWORDS.items()),
    *LANGUAGE_FLAGS,
)


def architecture(spec: BuildSpec) -> str:
    """The one that the flags of a spec name; ``BuildError`` where they name none, or several."""
    archs = [flag.removeprefix(_ARCH_FLAG) for flag in spec.cflags if flag.startswith(_ARCH_FLAG)]
    if len(archs) != 1:
        raise BuildError(f"{spec.name} names {archs} as its architectures; give one {_ARCH_FLAG}")
    return archs[0]


# Repetitions and macros of a few letters can keep an assembler busy for years, or fill a disk.
_MOST_SECONDS, _MOST_MEMORY, _MOST_OUTPUT = 60, 2 << 30, 64 << 20
_LIMITS = (
    f"ulimit -t {_MOST_SECONDS}; ulimit -v {_MOST_MEMORY >> 10}; ulimit -f {_MOST_OUTPUT >> 9}"
)
# Where there are lower limits already, these are refused, and the lower ones stay.
_LIMITED = "/bin/sh", "-c", f'{{ {_LIMITS}; }} 2>/dev/null; exec "$@"', "sh"
_REFUSED = re.compile(r":\d+:\d+: error")


class DeviceCompilerNotFound(RuntimeError):
    """No clang with the AMDGPU back end is installed; the message says how to get one.

    ``tried`` has each place, and why it is not that.
    """

    def __init__(self, tried: Sequence[str]) -> None:
        super().__init__(
            f"no clang for AMD GPUs was found; tried {'; '.join(tried)}. Install ROCm and set "
            f"ROCM_PATH, or run: {INSTALL_ZIG}"
        )
        self.tried = tuple(tried)


class DeviceCompileError(RuntimeError):
    """The compiler refused the source; ``output`` has its own words, all of them."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class DeviceCompiler:
    """A clang and an lld that know AMD GPUs, each as the words of a command.

    Its methods run one step each, in the folder of what they write, and raise DeviceCompileError
    where the compiler refuses. There are three steps because clang does not find lld everywhere.

    Attributes:
        why: they were looked for there.
    """

    clang: tuple[str, ...]
    lld: tuple[str, ...]
    why: str = field(default="", compare=False)

    def __str__(self) -> str:
        return " ".join(self.clang)

    def compile(self, source: Path, assembly: Path, flags: Sequence[str]) -> None:
        """Assembly text from HIP C++ text; the flags name the architecture."""
        command = [*self.clang, *HIP_FLAGS, *flags, "-S", str(source), "-o", str(assembly)]
        _run(command, assembly.parent)

    def assemble(
        self, assembly: Path, relocatable: Path, arch: str, *, is_limited: bool = False
    ) -> None:
        """Make a relocatable object of assembly text, which has limits where others wrote it."""
        words = (*self.clang, *_TARGET, f"-mcpu={arch}", "-c", str(assembly))
        limits = _LIMITED if is_limited else ()
        _run([*words, "-o", str(relocatable)], relocatable.parent, limits)

    def link(self, relocatables: Sequence[Path], linked: Path, flags: Sequence[str] = ()) -> None:
        words = (*self.lld, "-shared", *flags, *map(str, relocatables))
        _run([*words, "-o", str(linked)], linked.parent)


def device_compiler() -> DeviceCompiler:
    """The first that is there of `$ROCM_PATH/llvm/bin`, `/opt/rocm/llvm/bin` and `ziglang`.

    Raises:
        DeviceCompilerNotFound: none is; the message names each place and how to get one.
    """
    return _find(os.environ.get("ROCM_PATH"))


@lru_cache(maxsize=4)
def _find(rocm_path: str | None) -> DeviceCompiler:
    tried = []
    for root, origin in ((rocm_path, "ROCM_PATH"), (_DEFAULT_ROCM, "the default")):
        if not root:
            tried.append(f"{origin} (not set)")
            continue
        folder = Path(root, "llvm", "bin").absolute()
        clang, lld = folder / "clang++", folder / "ld.lld"
        if clang.is_file() and lld.is_file():
            return DeviceCompiler((str(clang),), (str(lld),), f"it is that of ROCm in {root}")
        missing = clang if not clang.is_file() else lld
        tried.append(f"{origin}: {missing} (not there)")
    zig = zig_program()
    if zig is not None:
        why = "it came with the Python package ziglang"
        return DeviceCompiler((str(zig), "clang"), (str(zig), "ld.lld"), why)
    raise DeviceCompilerNotFound((*tried, ZIG_MISSING))


def compile_hip(
    source: str, arch: str, *, code_object_version: int = 5, flags: Sequence[str] = ()
) -> bytes:
    """A linked code object from HIP C++ text, as `hipModuleLoadData` takes it.

    Args:
        source: uses no header; `__global__`, `__device__`, `__shared__` are defined.
        code_object_version: 4, 5 or 6.
        flags: more compiler flags, after `-O3`.

    Raises:
        DeviceCompilerNotFound: no compiler is installed.
        DeviceCompileError: the source is refused.
        ValueError: an unknown code object version.
    """
    assembly = compile_hip_to_assembly(
        source, arch, code_object_version=code_object_version, flags=flags
    )
    return assemble(assembly, arch)


def compile_hip_file(source: Path, arch: str, *, flags: Sequence[str] = ()) -> bytes:
    """A linked code object from a file of ordinary HIP C++, with no headers of ROCm's.

    What such kernels use most is in `csrc_templates/hip/hip/hip_runtime.h`, which is put in front,
    and found under the names of ROCm's headers. Raises as `compile_hip`.
    """
    found = ("-fdeclspec", "-isystem", str(templates_dir() / "hip"), "-include", _HIP_HEADER)
    target = (f"{_ARCH_FLAG}{arch}", CODE_OBJECT_VERSION_FLAG)
    with tempfile.TemporaryDirectory(prefix="jitfmha-") as folder:
        assembly = Path(folder, "kernel.s")
        device_compiler().compile(source.absolute(), assembly, (*target, *found, *flags))
        return assemble(assembly.read_text(encoding="utf-8"), arch)


def compile_hip_to_assembly(
    source: str, arch: str, *, code_object_version: int = 5, flags: Sequence[str] = ()
) -> str:
    """The assembly text of HIP C++ text; arguments and errors as `compile_hip`."""
    if code_object_version not in _CODE_OBJECT_VERSIONS:
        raise ValueError(f"code object version {code_object_version} is not 4, 5 or 6")
    with tempfile.TemporaryDirectory(prefix="jitfmha-") as folder:
        text, assembly = Path(folder, "kernel.hip"), Path(folder, "kernel.s")
        text.write_text(source, encoding="utf-8")
        target = (f"{_ARCH_FLAG}{arch}", f"-mcode-object-version={code_object_version}")
        device_compiler().compile(text, assembly, (*target, *flags))
        return assembly.read_text(encoding="utf-8")


def assemble(source: str, arch: str, *, is_limited: bool = False) -> bytes:
    """A linked code object from assembly text, which says its code object version.

    With ``is_limited`` the assembler has limits of time, memory and output: others wrote the text.

    Raises:
        DeviceCompilerNotFound: no compiler is installed.
        DeviceCompileError: the source is refused, or takes more than the limits.
    """
    with tempfile.TemporaryDirectory(prefix="jitfmha-") as folder:
        text, relocatable, linked = (Path(folder, f"kernel.{x}") for x in ("s", "o", "co"))
        text.write_text(source, encoding="utf-8")
        device_compiler().assemble(text, relocatable, arch, is_limited=is_limited)
        device_compiler().link([relocatable], linked)
        return linked.read_bytes()


def _run(command: Sequence[str], folder: Path, within: Sequence[str] = ()) -> None:
    done = subprocess.run(
        [*within, *command],
        cwd=folder,
        # The directory for temporary files may be full.
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        output = done.stderr.strip()
        if within and not _REFUSED.search(output):
            output += (
                f"\nit was ended: an assembler has {_MOST_SECONDS} seconds of processor time, "
                f"{_MOST_MEMORY >> 30} GiB of memory, and may write {_MOST_OUTPUT >> 20} MiB"
            )
        raise DeviceCompileError(f"{' '.join(command[:4])} ... failed:\n{output}", output)
