"""VOP1, VOP2, VOPC and VOP3: every row in all forms, modifiers and modes against its model."""

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from models.vector_alu import VOP2, VOP3, VOPC, Environment, Operation
from models.vop1 import EXACT, OF_ONE_CHIP
from models.vop3_convert import is_conversion
from vector_cases import (
    FLOATS,
    WIDTHS,
    Case,
    Form,
    check,
    dpp_controls,
    random_constant,
    random_dpp,
    random_environment,
    random_sdwa,
    random_signs,
)

_Rows = list[tuple[str, Operation]]
# v_cmpx is v_cmp that writes EXEC too.
_VOPC = VOPC | {name.replace("cmp", "cmpx"): op for name, op in VOPC.items()}
_ROWS: dict[str, _Rows] = {
    "VOP1": [*EXACT.items(), *OF_ONE_CHIP],
    "VOP2": list(VOP2.items()),
    "VOPC": list(_VOPC.items()),
    "VOP3": list(VOP3.items()),
}
_OFF = Environment(denormal32=0, denormal16_64=0, ieee=False)


def _short(format_: str) -> str:
    return "vop3" if format_ == "VOP3" else "e32"


def _long(format_: str) -> str:
    return "vop3" if format_ == "VOP3" else "e64"


def _has_floats(op: Operation) -> bool:
    return bool({op.result, *op.sources} & {*FLOATS, "p16"})


@pytest.mark.parametrize("format_", _ROWS)
def test_short_form(emulator, arch, seed, format_):
    rng = random.Random(seed)
    cases = [Case(name, op, Form(_short(format_))) for name, op in _ROWS[format_]]
    for name, op in _ROWS[format_]:
        # One scalar is all that an instruction can read.
        if op.literal is None and not op.carry_in:
            cases.append(Case(name, op, Form(_short(format_), scalar_source=True)))
            if format_ != "VOP3":  # which holds no constant
                constant = random_constant(op.sources[0], rng)
                cases.append(Case(name, op, Form("e32", constant=constant)))
    check(emulator, arch, cases, seed, waves=1 if format_ == "VOPC" else 2)


@pytest.mark.parametrize("format_", ["VOP1", "VOP2"])
def test_vop3_form(emulator, arch, seed, format_):
    rows = [(name, op) for name, op in _ROWS[format_] if op.literal is None]
    check(emulator, arch, [Case(*row, Form("e64")) for row in rows], seed)


@pytest.mark.parametrize("format_", _ROWS)
def test_signs_clamp_and_output_scale(emulator, arch, seed, format_):
    rng = random.Random(seed)
    cases = []

    def add(op: Operation, **form: object) -> None:
        cases.append(Case(name, op, Form(_long(format_), **form)))

    for name, op in _ROWS[format_]:
        if op.literal is not None or op.sources[0] in ("p16", "pb16"):
            continue
        signs = random_signs(op, rng)
        if "mul_hi" not in name and not op.old:
            add(op, **signs)
        if op.saturates or op.result in FLOATS:
            add(op, clamp=True, **signs)
        if op.result in FLOATS:
            omods = ("mul:2", "mul:4", "div:2")
            for omod in omods if format_ == "VOP2" else rng.sample(omods, 1):
                add(op, omod=omod, environment=_OFF, **signs)
                add(op, omod=omod, environment=_OFF, clamp=True)
            # Where denormals are kept or in IEEE mode, it does nothing.
            add(op, omod="mul:2")
    check(emulator, arch, cases, seed, waves=1)


@pytest.mark.parametrize("format_", _ROWS)
def test_mode(emulator, arch, seed, format_):
    rng = random.Random(seed)
    cases = [
        Case(name, op, Form(_short(format_), environment=random_environment(rng)))
        for name, op in _ROWS[format_]
        if (_has_floats(op) or op.raw) and "cmpx" not in name
        for _ in range(1 if format_ == "VOPC" else 4)
    ]
    check(emulator, arch, cases, seed, waves=1)


def _with_sdwa(format_: str) -> Iterable[tuple[str, Operation]]:
    """64-bit operands know neither SDWA nor, but for moves, DPP."""
    for name, op in _ROWS[format_]:
        is_small = format_ == "VOP1" and ("p8" in name or "bf8" in name or "bf16" in name)
        is_wide = any("64" in kind for kind in (op.result, *op.sources))
        if op.literal is None and not op.old and not is_wide and not is_small:
            yield name, op


@pytest.mark.parametrize("format_", ["VOP1", "VOP2", "VOPC"])
def test_sdwa(emulator, arch, seed, format_):
    rng = random.Random(seed)
    cases = []
    for name, op in _with_sdwa(format_):
        for k in range(1 if format_ == "VOPC" else 3):
            sdwa = random_sdwa(op, rng)
            if format_ == "VOPC":
                sdwa = replace(sdwa, destination="DWORD")
            has_signs = format_ == "VOPC" or (format_ == "VOP2" and op.result != "u32")
            signs = random_signs(op, rng) if has_signs else {}
            scalar = format_ == "VOP2" and k == 2 and not op.carry_in
            cases.append(Case(name, op, Form("sdwa", sdwa=sdwa, scalar_source=scalar, **signs)))
    check(emulator, arch, cases, seed, waves=1)


@pytest.mark.parametrize(("format_", "moved"), [("VOP1", "v_mov_b32"), ("VOP2", "v_add_u32")])
def test_dpp(emulator, arch, seed, format_, moved):
    rng = random.Random(seed)
    rows = [
        (name, op)
        for name, op in _ROWS[format_]
        if op.literal is None and not any("64" in kind for kind in (op.result, *op.sources))
    ]
    cases = [Case(*row, Form("dpp", dpp=random_dpp(rng))) for row in rows for _ in range(2)]
    every = dict(rows)[moved]
    cases += [Case(moved, every, Form("dpp", dpp=dpp)) for dpp in dpp_controls()]
    check(emulator, arch, cases, seed, waves=1)


def test_op_sel(emulator, arch, seed):
    rng = random.Random(seed)
    cases = []
    for name, op in VOP3.items():
        # The legacy ones came before op_sel. What has no 16-bit operand has none either.
        if "legacy" in name or all(WIDTHS[kind] != 16 for kind in op.sources):
            continue
        for _ in range(3):
            kinds = (*op.sources, op.result)
            halves = tuple(rng.randrange(2) * (WIDTHS[kind] == 16) for kind in kinds)
            cases.append(Case(name, op, Form("vop3", op_sel=halves)))
    check(emulator, arch, cases, seed, waves=1)


def test_every_row_is_modelled(emulator):
    rows = {(row.format, row.mnemonic) for row in emulator.definitions()}
    for format_ in ("VOP2", "VOPC"):
        assert {name for kind, name in rows if kind == format_} == dict(_ROWS[format_]).keys()
    # The formats of gfx950's small floats have a table and tests of their own.
    tested = Path(__file__).with_name("test_vop3.py").read_text(encoding="utf-8")
    vop3 = {name for kind, name in rows if kind == "VOP3" and not is_conversion(name)}
    assert not {name for name in vop3 - VOP3.keys() if name not in tested}
