"""Calls on a CPU target that was put in place, which finds nothing that earlier calls left."""

from collections.abc import Iterator
from contextlib import contextmanager

from jitfmha.planning.target import TARGET_HERE, CpuIsa, CpuTarget, cpu_target


@contextmanager
def fresh_calls(isa: CpuIsa | None = None) -> Iterator[CpuTarget]:
    """Inside, CPU tensors run on kernels for ``isa``, by default for this machine's best one."""
    target = CpuTarget(cpu_target().isa if isa is None else isa, "the test says so")
    token = TARGET_HERE.set(target)
    try:
        yield target
    finally:
        TARGET_HERE.reset(token)
