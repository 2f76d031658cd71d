"""The kernel that makes the gradient of sinks, for programs without torch.

In Python torch's own operators make it (``jitfmha/call/backward.py``).
"""

from __future__ import annotations

from functools import cache

from ... import jit
from ...amd.chips import Arch
from ...amd.kernel_arguments import sink_gradient_structs
from .device_spec import device_spec
from .tiles import tile_table

SINK_THREADS = 1024
"""Of a workgroup, of which each head has one."""


def sink_gradient_name(arch: Arch, dtype: str) -> str:
    """The symbol of the kernel for outputs and their gradients of such a type."""
    return f"fmha_bwd_compiled_sink_{dtype}_{arch}"


@cache
def sink_gradient_spec(arch: Arch, dtype: str) -> jit.BuildSpec:
    """The sources and the flags of the kernel."""
    name = sink_gradient_name(arch, dtype)
    values = {
        "shared_structs": sink_gradient_structs(),
        "kernel": name,
        "element": tile_table(arch).elements_of(dtype).element,
        "threads": SINK_THREADS,
    }
    why = f"the first gradient of sinks beside {dtype} on {arch}"
    return device_spec(name, arch, "sink_gradient.hip", values, ("elements.h",), why)
