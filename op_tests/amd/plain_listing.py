"""Assembly listings of the plain forward kernel, under a name of their own."""

from __future__ import annotations

from functools import cache

from plain_tree import PlainKernel, definitions_of, plain_source

from jitfmha.jit.toolchain.device_compiler import compile_hip_to_assembly

PLAIN_NAME = "attend_plainly"


@cache
def plain_listing(kernel: PlainKernel, arch: str) -> str:
    """What the compiler writes with -S; the kernel is called PLAIN_NAME."""
    definitions = {**definitions_of(kernel), "KERNEL": PLAIN_NAME}
    flags = [f"-D{name}={value}" for name, value in definitions.items()]
    return compile_hip_to_assembly(plain_source(), arch, flags=flags)
