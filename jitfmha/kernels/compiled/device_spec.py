"""How a compiled kernel is built from its template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ... import jit
from ...amd.chips import Arch
from ...jit.resources import hsa_dir
from ...jit.spec import MAX_NAME

# What compiled kernels share with the ready ones.
_SHARED_HEADERS = (
    *("address_spaces.h", "arguments.h", "attention.h", "number_formats.h"),
    *("split_results.h", "tiles.h", "workgroups.h"),
)
# Operands on their way are an array of registers only where every step has a place of its own:
# rows that are streamed have more steps than the compiler would give one otherwise.
_UNROLLED = ("-mllvm", "-pragma-unroll-threshold=200000")
_UNPACKED = ("-Xclang", "-target-feature", "-Xclang", "-packed-fp32-ops")


def device_spec(
    name: str,
    arch: Arch,
    template: str,
    values: Mapping[str, object],
    headers: Sequence[str],
    why: str,
    *,
    packs_floats: bool = True,
    streams: bool = False,
) -> jit.BuildSpec:
    """The sources and the flags of a kernel.

    Args:
        name: the kernel's, which may be longer than a build's.
        arch: what it is compiled for.
        template: below ``csrc_templates/amd``, without its ``.in``.
        values: those of the template, beside where it came from.
        headers: what it includes from ``csrc_templates/amd``.
        why: for whom it is built.
        packs_floats: whether two numbers may be computed by one instruction of packed float32.
            Those take half as many instructions, but wait for the matrix units
            (LLVM pull request 157968; `packed_after_matrix` in jitfmha/emulator/rates.json).
        streams: whether operands come from memory whenever a product takes them.
    """
    origin = {"origin": f"csrc_templates/amd/{template}.in for {name}"}
    shared = hsa_dir() / "src"
    return jit.BuildSpec(
        name=name[:MAX_NAME],
        sources={
            template: jit.render(f"amd/{template}.in", origin | dict(values)),
            **{header: jit.render(f"amd/{header}", {}) for header in headers},
            **{each: (shared / each).read_text(encoding="utf-8") for each in _SHARED_HEADERS},
        },
        cflags=(
            "-std=c++17",
            f"--offload-arch={arch}",
            # Branches that whole waves take stay as they are, as in the ready kernels.
            *("-mllvm", "-structurizecfg-skip-uniform-regions=1"),
            *(() if packs_floats else _UNPACKED),
            *(_UNROLLED if streams else ()),
        ),
        toolchain="device_hip",
        why=why,
    )
