"""Moved to `jitfmha.device_compiler`."""

from ..device_compiler import (
    DeviceCompileError,
    DeviceCompiler,
    DeviceCompilerNotFound,
    assemble,
    assemble_words,
    compile_hip,
    compile_hip_to_assembly,
    device_compiler,
)

__all__ = [
    "DeviceCompileError",
    "DeviceCompiler",
    "DeviceCompilerNotFound",
    "assemble",
    "assemble_words",
    "compile_hip",
    "compile_hip_to_assembly",
    "device_compiler",
]
