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
# Whose headers those with takes_turns need beside them.
_HEADERS_OF_TURNS = (
    *("forward.h", "forward_output.h", "forward_turns.h", "forward_work.h"),
    *("fp8_attention.h", "fp8_tiles.h", "fp8_turns.h"),
)
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
    takes_turns: bool = False,
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
        takes_turns: whether it has the turns of the ready kernels, whose flags these are then.
    """
    origin = {"origin": f"csrc_templates/amd/{template}.in for {name}"}
    shared = hsa_dir() / "src"
    shared_headers = (*_SHARED_HEADERS, *(_HEADERS_OF_TURNS if takes_turns else ()))
    return jit.BuildSpec(
        name=name[:MAX_NAME],
        sources={
            template: jit.render(f"amd/{template}.in", origin | dict(values)),
            **{header: jit.render(f"amd/{header}", {}) for header in headers},
            **{each: (shared / each).read_text(encoding="utf-8") for each in shared_headers},
        },
        cflags=(
            "-std=c++17",
            f"--offload-arch={arch}",
            # Branches that whole waves take stay as they are, as in the ready kernels.
            *("-mllvm", "-structurizecfg-skip-uniform-regions=1"),
            *(("-fno-slp-vectorize",) if takes_turns else ()),
            *(() if packs_floats or takes_turns else _UNPACKED),
            *(_UNROLLED if streams else ()),
        ),
        toolchain="device_hip",
        why=why,
    )
