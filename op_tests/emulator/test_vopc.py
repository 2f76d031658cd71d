"""VOPC: comparisons and classes, to VCC, an SGPR pair and EXEC."""

from __future__ import annotations

import random
from dataclasses import replace

from models.vector_alu import VOPC, Operation
from vector_cases import (
    FLOATS,
    Case,
    Form,
    Sdwa,
    check,
    random_environment,
    random_sdwa,
    random_signs,
)

from jitfmha.emulator import Emulator

# v_cmpx is v_cmp that writes EXEC too.
_ALL: dict[str, Operation] = VOPC | {name.replace("cmp", "cmpx"): op for name, op in VOPC.items()}


def test_short_form(emulator: Emulator, arch: str, seed: int) -> None:
    cases = [
        Case(name, op, Form(scalar_source=scalar))
        for name, op in _ALL.items()
        for scalar in (False, True)
    ]
    check(emulator, arch, cases, seed, waves=1)


def test_vop3_form_with_signs(emulator: Emulator, arch: str, seed: int) -> None:
    rng = random.Random(seed)
    cases = [Case(name, op, Form("e64", **random_signs(op, rng))) for name, op in _ALL.items()]
    check(emulator, arch, cases, seed, waves=1)


def test_mode(emulator: Emulator, arch: str, seed: int) -> None:
    rng = random.Random(seed)
    cases = [
        Case(name, op, Form(environment=random_environment(rng)))
        for name, op in VOPC.items()
        if op.sources[0] in FLOATS
    ]
    check(emulator, arch, cases, seed, waves=1)


def test_sdwa(emulator: Emulator, arch: str, seed: int) -> None:
    rng = random.Random(seed)
    cases = []
    for name, op in _ALL.items():
        if "64" not in op.sources[0]:
            sdwa: Sdwa = replace(random_sdwa(op, rng), destination="DWORD")
            cases.append(Case(name, op, Form("sdwa", sdwa=sdwa, **random_signs(op, rng))))
    check(emulator, arch, cases, seed, waves=1)


def test_every_row_is_modelled(emulator: Emulator) -> None:
    rows = {row.mnemonic for row in emulator.definitions() if row.format == "VOPC"}
    assert rows == set(_ALL)
