"""``python -m jitfmha replay``: runs recorded launches again and says which side is at fault."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .emulated import add_order_and_budget, check_order_and_budget
from .exit_codes import FAILED, OK, UsageError
from .output import add_json_flag, fields, print_json, table

if TYPE_CHECKING:
    from ..call.record import Record, RecordedKernel
    from ..replay.machines import Machine
    from ..replay.rerun import Diagnosis, Outcome


def add_parser(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "replay",
        help="run a recorded launch again: are its arguments wrong, or is it the kernel?",
        description=(
            "Run launches again that JITFMHA_RECORD=DIR has recorded. Each argument is held "
            "against what the problem implies, the result against a float64 reference, and the "
            "side at fault is named. The exit code is 1 where there is one."
        ),
        epilog="docs/code_objects.md says what a recorded launch holds.",
    )
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="DIR", help="a launch's folder, or that of several"
    )
    parser.add_argument(
        "--device", metavar="cuda:0", help="a GPU of torch's (default: the emulator)"
    )
    parser.add_argument(
        "--sanitize", action="store_true", help="with the emulator's sanitizer; findings are faults"
    )
    add_order_and_budget(parser)
    parser.add_argument(
        "--seed", type=int, default=0, help="of tensors that were not recorded (default: 0)"
    )
    parser.add_argument(
        "--arguments", action="store_true", help="print every argument of every kernel, too"
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the launches again, and print what that has shown."""
    from ..call.record import RecordError, read_record
    from ..replay.rerun import diagnose

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
                print()
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
    check_order_and_budget(args)
    if not 0 <= args.seed < 2**63:
        raise UsageError(f"--seed {args.seed}: not from 0 to 2**63 - 1")


def _launch_folders(given: list[Path]) -> list[Path]:
    """A folder of recorded launches stands for all of them, in their order."""
    from ..call.record import FILE

    found = []
    for folder in given:
        inside = [] if (folder / FILE).exists() else sorted(folder.glob(f"[!.]*/{FILE}"))
        found += [path.parent for path in inside] or [folder]
    return found


def _machine(args: argparse.Namespace, record: Record) -> Machine:
    from ..emulator.session import Emulation, emulated_name
    from ..replay.machines import EmulatedMachine, machine_named

    if args.device is not None:
        try:
            return machine_named(args.device, record.arch)
        except ValueError as error:
            raise UsageError(f"--device: {error}") from error
    return EmulatedMachine(
        Emulation(
            emulated_name(record.chip, record.arch),
            "check" if args.sanitize else "plain",
            random_order=args.random_order,
            instruction_budget=args.instruction_budget,
            prints_findings=False,
        )
    )


# ---- What is shown -------------------------------------------------------------------------------


def _document(folder: Path, machine: str, record: Record, diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "ran on": machine,
        "family": record.family,
        "kernels": [
            {"symbol": kernel.symbol, "grid": kernel.grid, "arguments": _values(kernel)}
            for kernel in record.kernels
        ],
        "fault": diagnosis.fault,
        "mismatches": [each._asdict() for each in diagnosis.mismatches],
        "replayed": _outcome(diagnosis.replayed),
        "corrected": _outcome(diagnosis.corrected),
        "recorded": _outcome(diagnosis.recorded),
        "inputs": _outcome(diagnosis.inputs),
        "replaced": list(diagnosis.replaced),
        "findings": [dataclasses.asdict(each) for each in diagnosis.findings],
    }


def _values(kernel: RecordedKernel) -> dict[str, Any]:
    return {name: _number(value) for name, value in kernel.values().items()}


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
    for name, outcome in (
        ("inputs", diagnosis.inputs),
        ("recorded", diagnosis.recorded),
        ("replayed", diagnosis.replayed),
        ("corrected", diagnosis.corrected),
    ):
        if outcome is not None:
            shown.append((name, _in_words(outcome)))
    shown += [("finding", str(each)) for each in diagnosis.findings]
    print(fields([*shown, ("fault", diagnosis.sentence())]))
    if with_arguments:
        for kernel in record.kernels:
            print("\n" + table((kernel.symbol, "value"), _argument_rows(kernel)))


def _argument_rows(kernel: RecordedKernel) -> list[tuple[str, str]]:
    """Names and values, those of addresses in hexadecimal."""
    from ..call.record import INTERFACES, fields_of

    letters = {
        name: letter for name, (_, letter) in fields_of(INTERFACES[kernel.interface]).items()
    }
    return [
        (name, hex(int(value)) if letters[name] == "Q" else str(value))
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
