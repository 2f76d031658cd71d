"""The command line, ``python -m jitfmha``: one module per command.

A command's module has ``add_parser``, which adds its flags, and ``run``, which returns the exit
code. Results go to stdout and progress to stderr, so that ``--json`` leaves pure JSON on stdout.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..version import __version__
from . import (
    bench,
    build,
    cache,
    demo,
    doctor,
    explain,
    export,
    hsa,
    kernels,
    profile,
    replay,
    run_kernel,
)
from .exit_codes import FAILED, USAGE, UsageError

_EXIT_CODES = (
    "exit codes: 0 done, 1 failed (also: a verification failed or a bar was missed), "
    "2 usage error, 130 interrupted"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` is ``sys.argv[1:]`` by default. Returns the exit code."""
    if sys.stdout is None:
        # Closed by who started this (`>&-`): the next file that is opened would take its number.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jitfmha",
        description="Fused attention for AMD Instinct GPUs and the CPU, compiled on first use.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"jitfmha {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module in (
        *(demo, doctor, explain, kernels, hsa, build, export, cache, bench, profile),
        *(run_kernel, replay),
    ):
        module.add_parser(commands)
    return parser
