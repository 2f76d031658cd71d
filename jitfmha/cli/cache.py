"""``python -m jitfmha cache``: look at the build cache, or clear it."""

from __future__ import annotations

import argparse
import time
from typing import Any

from .exit_codes import FAILED, OK
from .output import add_json_flag, byte_size, print_json, table


def add_parser(commands: Any) -> None:
    """Add the command and its three actions."""
    parser = commands.add_parser(
        "cache", help="list, clear or locate the build cache", description=__doc__
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    for action, function, text in (
        ("list", _list, "List the entries; the exit code is 1 when one is damaged."),
        ("clear", _clear, "Remove every entry and build log. Running processes keep theirs."),
        ("path", _path, "Print where the cache is. It need not exist yet."),
    ):
        action_parser = actions.add_parser(action, help=text, description=text)
        add_json_flag(action_parser)
        action_parser.set_defaults(run=function)


def _list(args: argparse.Namespace) -> int:
    from .. import jit

    entries = jit.cache_entries()
    if args.json:
        print_json(
            [
                {
                    "name": x.name,
                    "key": x.key,
                    "size": x.size,
                    "created": x.created,
                    "last_used": x.last_used,
                    "valid": x.valid,
                    "path": str(x.path),
                }
                for x in entries
            ]
        )
    elif entries:
        headers = ("launcher", "key", "size", "created", "last used", "state")
        print(
            table(
                headers,
                [
                    (
                        x.name,
                        x.key[:12],
                        byte_size(x.size),
                        _date(x.created),
                        _date(x.last_used),
                        "ok" if x.valid else "DAMAGED",
                    )
                    for x in entries
                ],
            )
        )
    else:
        print(f"no entries in {jit.cache_dir()}")
    return OK if all(x.valid for x in entries) else FAILED


def _clear(args: argparse.Namespace) -> int:
    from .. import jit

    removed = jit.cache_clear()
    if args.json:
        print_json({"removed": removed, "path": str(jit.cache_dir())})
    else:
        entries = "entry" if removed == 1 else "entries"
        print(f"removed {removed} {entries} from {jit.cache_dir()}")
    return OK


def _path(args: argparse.Namespace) -> int:
    from .. import jit

    path = str(jit.cache_dir())
    if args.json:
        print_json({"path": path})
    else:
        print(path)
    return OK


def _date(seconds: float) -> str:
    if seconds <= 0:
        return "unknown"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
