"""The command line, ``python -m jitfmha``: the flags of all commands, and one module per command.

A command's module is imported when it is asked for, and has ``run``, which returns the exit code.
Results go to stdout and progress to stderr, so that ``--json`` leaves pure JSON on stdout.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from ..jit.fresh_process import NUMPY_IS_MISSING
from .exit_codes import FAILED, USAGE, UsageError
from .flags import parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` is ``sys.argv[1:]`` by default. Returns the exit code."""
    if sys.stdout is None:
        # Closed by who started this (`>&-`): the next file that is opened would take its number.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
    warnings.filterwarnings("ignore", NUMPY_IS_MISSING)
    try:
        args = parser().parse_args(argv)
    except SystemExit as end:  # argparse has printed why
        return int(end.code or 0)
    try:
        command = import_module(f".{args.command.replace('-', '_')}", __name__)
        code: int = command.run(args)
        sys.stdout.flush()
    except UsageError as error:
        print(f"jitfmha {args.command}: {error}", file=sys.stderr)
        return USAGE
    except (NotImplementedError, RuntimeError, OSError, MemoryError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader (`| head`) has seen enough. Python would complain once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        print(f"jitfmha {args.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130
    return code
