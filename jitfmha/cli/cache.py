"""``python -m jitfmha cache``: look at the build cache, or clear it."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict

from .. import jit
from .exit_codes import FAILED, OK
from .output import byte_size, print_json, show, table


def run(args: argparse.Namespace) -> int:
    """List the entries, remove them, or print where they are."""
    if args.action == "list":
        return _list(args)
    where = str(jit.cache_dir())
    if args.action == "path":
        shown: dict[str, object] = {"path": where}
        text = where
    else:
        removed = jit.cache_clear()
        shown = {"removed": removed, "path": where}
        text = f"removed {removed} {'entry' if removed == 1 else 'entries'} from {where}"
    if args.json:
        print_json(shown)
    else:
        show(text)
    return OK


def _list(args: argparse.Namespace) -> int:
    entries = jit.cache_entries()
    if args.json:
        print_json([asdict(x) | {"path": str(x.path)} for x in entries])
    elif entries:
        cells = [
            (
                *(x.name, x.key[:12], byte_size(x.size), _date(x.created), _date(x.last_used)),
                "ok" if x.valid else "DAMAGED",
            )
            for x in entries
        ]
        show(table(("launcher", "key", "size", "created", "last used", "state"), cells))
    else:
        show(f"no entries in {jit.cache_dir()}")
    return OK if all(x.valid for x in entries) else FAILED


def _date(seconds: float) -> str:
    if seconds <= 0:
        return "unknown"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
