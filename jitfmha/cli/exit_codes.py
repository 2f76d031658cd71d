"""The exit codes that scripts can rely on."""

from __future__ import annotations

OK = 0
FAILED = 1
USAGE = 2


class UsageError(Exception):
    """The flags ask for something that cannot be; the message names the flag or the argument."""
