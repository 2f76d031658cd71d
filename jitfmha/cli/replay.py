"""``python -m jitfmha replay``: runs recorded launches again and says which side is at fault."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

from ..call.record import FILE, INTERFACES, Record, RecordedKernel, RecordError
from ..emulator.session import emulated_name
from ..replay.machines import Machine, machine_named
from ..replay.reading import read_record
from ..replay.rerun import Diagnosis, Outcome, diagnose
from .emulated import emulated_machine
from .exit_codes import FAILED, OK, UsageError
from .output import fields, print_json, show, table


def run(args: argparse.Namespace) -> int:
    """Run the launches again, and print what that has shown."""
    _check(args)
    documents = []
    is_right = True
    for number, folder in enumerate(_launch_folders(args.folders)):
        try:
            record = read_record(folder)
            machine = _machine(args, record)
            diagnosis = diagnose(record, lambda: _machine(args, record), seed=args.seed)  # noqa: B023
        except RecordError as error:
            raise UsageError(str(error)) from error
        is_right &= diagnosis.fault == "none" and not diagnosis.findings
        if args.json:
            documents.append(_document(folder, machine.name, record, diagnosis))
        else:
            if number > 0:
                show()
            _print(folder, machine.name, record, diagnosis, with_arguments=args.arguments)
    if args.json:
        print_json(documents)
    return OK if is_right else FAILED


def _check(args: argparse.Namespace) -> None:
    of_emulator = {
        "--sanitize": args.sanitize,
        "--random-order": args.random_order is not None,
        "--instruction-budget": args.instruction_budget is not None,
    }
    for flag, is_given in of_emulator.items():
        if is_given and args.device is not None:
            raise UsageError(f"{flag} is for the emulator, not for --device {args.device}")


def _launch_folders(given: list[Path]) -> list[Path]:
    """A folder of recorded launches stands for all of them, in their order."""
    found = []
    for folder in given:
        inside = [] if (folder / FILE).exists() else sorted(folder.glob(f"[!.]*/{FILE}"))
        found += [path.parent for path in inside] or [folder]
    return found


def _machine(args: argparse.Namespace, record: Record) -> Machine:
    if args.device is not None:
        try:
            return machine_named(args.device, record.arch)
        except ValueError as error:
            raise UsageError(f"--device: {error}") from error
    arch = emulated_name(record.chip, record.arch)
    return emulated_machine(args, arch, sanitizes=args.sanitize)


# ---- What is shown -------------------------------------------------------------------------------


def _document(folder: Path, machine: str, record: Record, diagnosis: Diagnosis) -> dict[str, Any]:
    kernels = [
        {
            "symbol": kernel.symbol,
            "grid": kernel.grid,
            "arguments": {name: _number(value) for name, value in kernel.values().items()},
        }
        for kernel in record.kernels
    ]
    outcomes = {name: _outcome(outcome) for name, outcome in _outcomes(diagnosis).items()}
    return {
        "folder": str(folder),
        "ran on": machine,
        "family": record.family,
        "kernels": kernels,
        "fault": diagnosis.fault,
        "replaced": diagnosis.replaced,
        **outcomes,
        "mismatches": [each._asdict() for each in diagnosis.mismatches],
        "findings": [dataclasses.asdict(each) for each in diagnosis.findings],
    }


def _outcomes(diagnosis: Diagnosis) -> dict[str, Outcome | None]:
    return {x: getattr(diagnosis, x) for x in ("inputs", "recorded", "replayed", "corrected")}


def _outcome(outcome: Outcome | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    errors = {
        name: {
            "error": _number(each.error),
            "allowed": _number(each.allowed),
            "is_right": each.is_right,
        }
        for name, each in outcome.judged.items()
    }
    return {"is_right": outcome.is_right, "failure": outcome.failure, "results": errors}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _print(
    folder: Path, machine: str, record: Record, diagnosis: Diagnosis, *, with_arguments: bool
) -> None:
    shown = [("launch", str(folder)), ("ran on", machine)]
    shown += [
        (f"kernel {i}", f"{kernel.symbol}, grid {kernel.grid}, block {kernel.block}")
        for i, kernel in enumerate(record.kernels, 1)
    ]
    for name in diagnosis.replaced:
        shown.append(("replaced", f"{name} is not the code object that was recorded"))
    wrong = "\n".join(str(each) for each in diagnosis.mismatches)
    shown.append(("arguments", wrong or "all that is checked is as the problem implies"))
    for name, outcome in _outcomes(diagnosis).items():
        if outcome is not None:
            shown.append((name, _in_words(outcome)))
    shown += [("finding", str(each)) for each in diagnosis.findings]
    show(fields([*shown, ("fault", diagnosis.sentence())]))
    if with_arguments:
        for kernel in record.kernels:
            show("\n" + table((kernel.symbol, "value"), _argument_rows(kernel)))


def _argument_rows(kernel: RecordedKernel) -> list[tuple[str, str]]:
    """Names and values, those of addresses in hexadecimal."""
    forms = INTERFACES[kernel.interface].leaves
    return [
        (name, hex(int(value)) if forms[name][1] == "Q" else str(value))
        for name, value in kernel.values().items()
    ]


def _in_words(outcome: Outcome) -> str:
    if outcome.failure is not None:
        return outcome.failure
    return "\n".join(
        f"{name} is {'right' if each.is_right else 'WRONG'}: off by {each.error:.3g}, where "
        f"rounding explains {each.allowed:.3g}"
        for name, each in outcome.judged.items()
    )
