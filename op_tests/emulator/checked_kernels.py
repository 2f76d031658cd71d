"""Small assembly kernels under the sanitizer.

    findings = run_checked(emulator, "gfx942", {
        "clean": Body("v_mov_b32 v1, 0"),
        "faulty": Body("v_mov_b32 v1, v2"),
    })
    findings["faulty"][0].kind

All bodies become kernels of one code object. They begin with the address of BYTES bytes in s[0:1],
the only memory that is allowed, the workgroup's x in s2 and the thread in v0. s_endpgm follows.
`memory_after` runs one body without a look at findings, and returns these bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jitfmha.emulator import DEVICES, Emulator, Function
from jitfmha.emulator.findings import Finding, take_findings
from jitfmha.jit.toolchain.device_compiler import assemble

BYTES = 4096

_HEADER = """
.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
.amdhsa_code_object_version 5
.text
"""
_KERNEL = """
.globl {name}
.p2align 8
.type {name},@function
{name}:
  s_load_dwordx2 s[0:1], s[0:1], 0x0
  s_waitcnt lgkmcnt(0)
{body}
  s_endpgm
.L{name}_end:
.size {name}, .L{name}_end - {name}
"""
_DESCRIPTOR = """
.amdhsa_kernel {name}
  .amdhsa_group_segment_fixed_size {lds_bytes}
  .amdhsa_private_segment_fixed_size {scratch_bytes}
  .amdhsa_enable_private_segment {has_scratch}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_user_sgpr_count 2
  .amdhsa_kernarg_size 8
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_next_free_vgpr 512
  .amdhsa_accum_offset 256
  .amdhsa_next_free_sgpr 96
.end_amdhsa_kernel
"""
_METADATA_OF_KERNEL = """
  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: 8
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {lds_bytes}
    .private_segment_fixed_size: {scratch_bytes}
    .wavefront_size: 64
    .sgpr_count: 96
    .vgpr_count: 512
    .agpr_count: 256
    .max_flat_workgroup_size: 1024
    .args: [{{.offset: 0, .size: 8, .value_kind: global_buffer, .address_space: global}}]
"""


@dataclass(frozen=True)
class Body:
    """The lines of a kernel.

    Attributes:
        code: assembly, without s_endpgm.
        waves: of its one workgroup.
        lds_bytes, scratch_bytes: that the kernel declares.
        dynamic_lds: bytes that the launch adds.
    """

    code: str
    waves: int = 1
    lds_bytes: int = 0
    scratch_bytes: int = 0
    dynamic_lds: int = 0


def run_checked(
    emulator: Emulator, arch: str, bodies: Mapping[str, Body]
) -> dict[str, list[Finding]]:
    """The findings of each body, by its name."""
    module = emulator.load_module(_assembled(arch, bodies), DEVICES[arch])
    data = np.zeros(BYTES // 4, np.uint32)
    take_findings(emulator.library)
    findings = {}
    try:
        for name, body in bodies.items():
            _launch(emulator, emulator.function(module, name), body, data)
            findings[name] = take_findings(emulator.library)
    finally:
        emulator.unload_module(module)
    return findings


def memory_after(
    emulator: Emulator, arch: str, body: Body, before: NDArray[np.uint32]
) -> NDArray[np.uint32]:
    """The BYTES bytes after the body, which finds `before` there, followed by zeros."""
    module = emulator.load_module(_assembled(arch, {"kernel": body}), DEVICES[arch])
    data = np.zeros(BYTES // 4, np.uint32)
    data[: before.size] = before
    try:
        _launch(emulator, emulator.function(module, "kernel"), body, data)
    finally:
        emulator.unload_module(module)
    return data


def _launch(emulator: Emulator, function: Function, body: Body, data: NDArray[np.uint32]) -> None:
    kernarg = struct.pack("<Q", data.ctypes.data)
    emulator.set_allowed_memory([(data.ctypes.data, data.nbytes)])
    try:
        block = (64 * body.waves, 1, 1)
        emulator.launch(function, (1, 1, 1), block, kernarg, dynamic_lds=body.dynamic_lds)
    finally:
        emulator.set_allowed_memory(None)


def _assembled(arch: str, bodies: Mapping[str, Body]) -> bytes:
    forms = {
        name: {
            "name": name,
            "body": "\n".join(f"  {line}" for line in body.code.splitlines()),
            "lds_bytes": body.lds_bytes,
            "scratch_bytes": body.scratch_bytes,
            "has_scratch": int(body.scratch_bytes > 0),
        }
        for name, body in bodies.items()
    }
    source = "".join(
        [
            _HEADER.format(arch=arch),
            *(_KERNEL.format(**form) for form in forms.values()),
            ".rodata\n.p2align 6\n",
            *(_DESCRIPTOR.format(**form) for form in forms.values()),
            ".amdgpu_metadata\n---\namdhsa.version: [1, 2]\n",
            f"amdhsa.target: amdgcn-amd-amdhsa--{arch}\namdhsa.kernels:",
            *(_METADATA_OF_KERNEL.format(**form) for form in forms.values()),
            "...\n.end_amdgpu_metadata\n",
        ]
    )
    return assemble(source, arch)


def kinds(findings: list[Finding]) -> list[str]:
    """Their kinds, in order."""
    return [finding.kind for finding in findings]
