"""What the user sees while something takes long: one line on stderr, nothing before a second."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PATIENCE_SECONDS = 1.0


def is_verbose() -> bool:
    """Whether `JITFMHA_VERBOSE` asks for commands and compiler output."""
    return os.environ.get("JITFMHA_VERBOSE", "0") not in ("", "0")


def say(text: str) -> None:
    """Write one line to stderr, if there is one."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(f"jitfmha: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # Closed; there is nobody to tell.


@contextmanager
def status_line(text: Callable[[], str]) -> Iterator[None]:
    """Say what is under way if it lasts longer than a second, and at the end how long it took."""
    line = _StatusLine(text)
    try:
        yield
    finally:
        line.finish()


class _StatusLine:
    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        self._started = time.monotonic()
        self._shown = ""
        self._finished = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(PATIENCE_SECONDS, self._show)
        self._timer.daemon = True
        # An interpreter that is shutting down starts no more threads.
        with suppress(RuntimeError):
            self._timer.start()

    def finish(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._finished = True
            if self._shown:
                say(f"{self._shown}: {time.monotonic() - self._started:.1f} s")

    def _show(self) -> None:
        with self._lock:
            if self._finished:
                return
            self._shown = self._text()
            say(f"{self._shown} ...")
