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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from launches import assembled, kernel_text, launch, launch_code
from numpy.typing import NDArray

from jitfmha.emulator import DEVICES, Emulator
from jitfmha.emulator.findings import Finding, take_findings
from jitfmha.emulator.wait_states import missing_waits

BYTES = 4096


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


def two_waves(first: str, second: str, *, before: str = "", lds_bytes: int = 0) -> Body:
    """The first wave runs `first`, others `second`, behind `before`; the thread is in s8, too."""
    code = f"""{before}
v_readfirstlane_b32 s8, v0
s_cmp_eq_u32 s8, 0
s_cbranch_scc1 1f
{second}
s_branch 2f
1:
{first}
2:"""
    return Body(code, waves=2, lds_bytes=lds_bytes)


def run_checked(
    emulator: Emulator, arch: str, bodies: Mapping[str, Body]
) -> dict[str, list[Finding]]:
    """The findings of each body, by its name.

    Wait states that a run lacks are seen without running it, too.
    """
    code_object = code_object_of(arch, bodies)
    lacking = {place.address for place in missing_waits(code_object)}
    module = emulator.load_module(code_object, DEVICES[arch])
    data = np.zeros(BYTES // 4, np.uint32)
    take_findings(emulator.library)
    findings = {}
    try:
        for name, body in bodies.items():
            function = emulator.function(module, name)
            launch(emulator, function, 1, 64 * body.waves, data, dynamic_lds=body.dynamic_lds)
            findings[name] = take_findings(emulator.library)
            seen = {each.address for each in findings[name] if each.kind == "wait-states"}
            assert seen <= lacking, name
    finally:
        emulator.unload_module(module)
    return findings


@dataclass(frozen=True)
class Fault:
    """A kernel with a fault, one without, and what the one finding is.

    Attributes:
        kind: of the finding.
        text: that its message has.
    """

    kind: str
    text: str
    clean: Body
    faulty: Body


def check_faults(emulator: Emulator, arch: str, faults: Mapping[str, Fault]) -> None:
    """The faults are found, and nothing else."""
    cases = {f"{name}_clean": (fault.clean, []) for name, fault in faults.items()}
    cases |= {
        f"{name}_faulty": (fault.faulty, [(fault.kind, fault.text)])
        for name, fault in faults.items()
    }
    check_findings(emulator, arch, cases)


def check_findings(
    emulator: Emulator, arch: str, cases: Mapping[str, tuple[Body, Sequence[tuple[str, str]]]]
) -> None:
    """Each body has exactly the findings of those (kind, text of the message)."""
    findings = run_checked(emulator, arch, {name: body for name, (body, _) in cases.items()})
    for name, (_, expected) in cases.items():
        assert kinds(findings[name]) == [kind for kind, _ in expected], name
        for finding, (_, text) in zip(findings[name], expected, strict=True):
            assert text in finding.message, name


def memory_after(
    emulator: Emulator, arch: str, body: Body, before: NDArray[np.uint32]
) -> NDArray[np.uint32]:
    """The BYTES bytes after the body, which finds `before` there, followed by zeros."""
    data = np.zeros(BYTES // 4, np.uint32)
    data[: before.size] = before
    launch_code(emulator, arch, _assembled_alone(arch, body), "kernel", 1, 64 * body.waves, data)
    return data


@cache
def _assembled_alone(arch: str, body: Body) -> bytes:
    return code_object_of(arch, {"kernel": body})


def code_object_of(arch: str, bodies: Mapping[str, Body]) -> bytes:
    """One with a kernel for each body."""
    load = "s_load_dwordx2 s[0:1], s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\n"
    texts = [
        kernel_text(
            name, load + body.code, lds_bytes=body.lds_bytes, scratch_bytes=body.scratch_bytes
        )
        for name, body in bodies.items()
    ]
    return assembled(arch, *texts)


def kinds(findings: list[Finding]) -> list[str]:
    """Their kinds, in order."""
    return [finding.kind for finding in findings]
