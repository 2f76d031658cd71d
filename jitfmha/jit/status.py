"""What the user sees while something takes long: one line on stderr, nothing before a second.

The line grows every ten seconds, so that also a notebook or a log shows that it goes on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PATIENCE_SECONDS = 1.0
STEP_SECONDS = 10.0

_VARIABLE = "JITFMHA_VERBOSE"
# With "jitfmha: building ... interrupted, 99.9 s" around it, 79 columns.
_MOST_CHARACTERS = 37


def _verbosity() -> str:
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", "0", "1", "quiet"):
        raise ValueError(
            f"{_VARIABLE} is {value!r}; use 0 (a line for a build that takes over a second, the "
            "default), 1 (the commands of builds, too) or quiet (nothing)"
        )
    return value


def is_verbose() -> bool:
    """Whether JITFMHA_VERBOSE asks for commands and compiler output; ``ValueError`` if unknown."""
    return _verbosity() == "1"


def say(text: str) -> None:
    """Write one line to stderr, if there is one and nobody asked for quiet."""
    if _verbosity() != "quiet":
        with _lock:
            _write(f"jitfmha: {text}\n")


@contextmanager
def building(name: str, remark: str) -> Iterator[None]:
    """Say that `name` is being built if that lasts longer than a second, and how it ended.

    A long name is shortened; ``remark`` is shown behind it in brackets, where there is room. Raises
    ``ValueError`` where `JITFMHA_VERBOSE` has an unknown value; nothing was built then.
    """
    if _verbosity() == "quiet":
        yield
        return
    line = _BuildLine(_short(name, remark))
    end = ""
    try:
        yield
    except Exception:
        end = "failed, "
        raise
    except BaseException:
        end = "interrupted, "
        raise
    finally:
        line.finish(end)


def _short(name: str, remark: str) -> str:
    if len(name) > _MOST_CHARACTERS:
        half = (_MOST_CHARACTERS - 3) // 2
        return f"{name[:half]}...{name[-half:]}"
    with_remark = f"{name} ({remark})"
    return with_remark if len(with_remark) <= _MOST_CHARACTERS else name


# Of stderr, and of what is known of its lines.
_lock = threading.Lock()
_unfinished: _BuildLine | None = None
_taker: Callable[[str], None] | None = None


def hand_lines_to(taker: Callable[[str], None] | None) -> None:
    """Hand whole lines to whoever has something on the screen below them; None: to stderr again."""
    global _taker
    with _lock:
        _taker = taker


def _write(text: str, writer: _BuildLine | None = None) -> None:
    """Write to stderr, with the lock held; a line that somebody else has begun is ended first."""
    global _unfinished
    if _taker is not None:
        if text.endswith("\n"):
            _taker(text.rstrip("\n"))
        return
    if _unfinished not in (None, writer):
        text = f"\n{text}"
    _unfinished = None if text.endswith("\n") else writer
    if sys.stderr is None:
        return
    with suppress(OSError, ValueError):  # Closed; there is nobody to tell.
        sys.stderr.write(text)
        sys.stderr.flush()


def _forget_lines_of_parent() -> None:
    """Begin anew in the child of a fork, during which another thread may have held the lock."""
    global _lock, _unfinished
    _lock = threading.Lock()
    _unfinished = None


os.register_at_fork(after_in_child=_forget_lines_of_parent)


class _BuildLine:
    """A line that waits for its end, and is written once more if it is not the last by then."""

    def __init__(self, what: str) -> None:
        self._text = f"jitfmha: building {what} ..."
        # Commands and what the compiler says come in between.
        self._stands_alone = is_verbose()
        self._started = time.monotonic()
        self._is_shown = False
        self._is_finished = False
        self._wait(PATIENCE_SECONDS)

    def finish(self, end: str) -> None:
        with _lock:
            self._is_finished = True
            self._timer.cancel()
            if self._is_shown:
                self._go_on(f"{end}{self._seconds:.1f} s\n")

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _wait(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._show)
        self._timer.daemon = True
        # An interpreter that is shutting down starts no more threads.
        with suppress(RuntimeError):
            self._timer.start()

    def _show(self) -> None:
        with _lock:
            if self._is_finished:
                return
            if self._is_shown and not self._stands_alone:
                self._go_on(f"{self._seconds:.0f} s ...")
            elif not self._is_shown:
                self._is_shown = True
                _write(f"{self._text}\n" if self._stands_alone else self._text, self)
            self._wait(STEP_SECONDS)

    def _go_on(self, text: str) -> None:
        """Add to the line, which is written anew where others have written since."""
        begun = "" if _unfinished is self else self._text
        _write(f"{begun} {text}", self)
