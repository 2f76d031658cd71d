"""VOP2: two-source vector instructions, in their short form, as VOP3, and with SDWA and DPP."""

from __future__ import annotations

import random

from models.vector_alu import VOP2, Environment, Operation
from vector_cases import (
    FLOATS,
    Case,
    Form,
    check,
    dpp_controls,
    random_dpp,
    random_environment,
    random_sdwa,
    random_signs,
)

from jitfmha.emulator import Emulator


def _cases(*forms: Form) -> list[Case]:
    return [Case(name, op, form) for name, op in VOP2.items() for form in forms]


def _has_vop3(op: Operation) -> bool:
    return op.literal is None


def _is_float(op: Operation) -> bool:
    return op.result in FLOATS


def test_short_form(emulator: Emulator, arch: str, seed: int) -> None:
    # One scalar is all that an instruction can read.
    one_scalar = [
        Case(name, op, Form(scalar_source=True))
        for name, op in VOP2.items()
        if op.literal is None and not op.carry_in
    ]
    check(emulator, arch, _cases(Form()) + one_scalar, seed)


def test_vop3_form(emulator: Emulator, arch: str, seed: int) -> None:
    cases = [Case(name, op, Form("e64")) for name, op in VOP2.items() if _has_vop3(op)]
    check(emulator, arch, cases, seed)


def test_signs_clamp_and_output_scale(emulator: Emulator, arch: str, seed: int) -> None:
    rng = random.Random(seed)
    cases = []
    for name, op in VOP2.items():
        if not _has_vop3(op) or op.sources[0] in ("p16", "pb16"):
            continue
        signs = random_signs(op, rng)
        if "mul_hi" not in name and not op.old:
            cases.append(Case(name, op, Form("e64", **signs)))
        if op.saturates or _is_float(op):
            cases.append(Case(name, op, Form("e64", clamp=True, **signs)))
        if _is_float(op):
            for omod in ("mul:2", "mul:4", "div:2"):
                off = Environment(denormal32=0, denormal16_64=0, ieee=False)
                cases.append(Case(name, op, Form("e64", omod=omod, environment=off, **signs)))
                cases.append(Case(name, op, Form("e64", omod=omod, clamp=True, environment=off)))
            # Where denormals are kept or in IEEE mode, it does nothing.
            cases.append(Case(name, op, Form("e64", omod="mul:2")))
    check(emulator, arch, cases, seed)


def test_mode(emulator: Emulator, arch: str, seed: int) -> None:
    rng = random.Random(seed)
    cases = [
        Case(name, op, Form("e32", environment=random_environment(rng)))
        for name, op in VOP2.items()
        if _is_float(op) or op.result == "p16" or op.raw
        for _ in range(4)
    ]
    check(emulator, arch, cases, seed, waves=1)


def _has_sdwa(name: str, op: Operation) -> bool:
    return op.literal is None and not op.old and "f64" not in op.sources


def test_sdwa(emulator: Emulator, arch: str, seed: int) -> None:
    rng = random.Random(seed)
    cases = []
    for name, op in VOP2.items():
        if not _has_sdwa(name, op):
            continue
        for k in range(3):
            sdwa = random_sdwa(op, rng)
            signs = random_signs(op, rng) if op.result != "u32" else {}
            scalar = k == 2 and not op.carry_in
            cases.append(Case(name, op, Form("sdwa", sdwa=sdwa, scalar_source=scalar, **signs)))
    check(emulator, arch, cases, seed, waves=1)


def test_dpp(emulator: Emulator, arch: str, seed: int) -> None:
    rng = random.Random(seed)
    cases = []
    for name, op in VOP2.items():
        if op.literal is None and "f64" not in op.sources:
            cases += [Case(name, op, Form("dpp", dpp=random_dpp(rng))) for _ in range(2)]
    add = VOP2["v_add_u32"]
    cases += [Case("v_add_u32", add, Form("dpp", dpp=dpp)) for dpp in dpp_controls()]
    check(emulator, arch, cases, seed, waves=1)


def test_every_row_is_modelled(emulator: Emulator) -> None:
    rows = {row.mnemonic for row in emulator.definitions() if row.format == "VOP2"}
    assert rows == set(VOP2)
