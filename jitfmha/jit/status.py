"""What the user sees while something takes long: one line on stderr, nothing before a second."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

PATIENCE_SECONDS = 1.0

Verbosity = Literal["quiet", "lines", "commands"]

_VARIABLE = "JITFMHA_VERBOSE"
_VERBOSITIES: dict[str, Verbosity] = {
    "": "lines",
    "0": "lines",
    "1": "commands",
    "quiet": "quiet",
}
# With "jitfmha: building ... interrupted, 99.9 s" around it, 79 columns.
_MOST_CHARACTERS = 37


def verbosity() -> Verbosity:
    """How much `JITFMHA_VERBOSE` asks for: nothing, a line for what takes long, or every command.

    Raises:
        ValueError: it has another value.
    """
    value = os.environ.get(_VARIABLE, "")
    if value not in _VERBOSITIES:
        raise ValueError(
            f"{_VARIABLE} is {value!r}; use 0 (a line for a build that takes over a second, the "
            "default), 1 (the commands of builds, too) or quiet (nothing)"
        )
    return _VERBOSITIES[value]


def is_verbose() -> bool:
    """Whether commands and compiler output are shown. Raises as :func:`verbosity`."""
    return verbosity() == "commands"


def say(text: str) -> None:
    """Write one line to stderr, if there is one and nobody asked for quiet."""
    if verbosity() != "quiet":
        _STDERR.write_line(f"jitfmha: {text}")


@contextmanager
def building(name: str, remark: str) -> Iterator[None]:
    """Say that `name` is being built if that lasts longer than a second, and how it ended.

    Args:
        name: of the build; shortened where it is long.
        remark: shown behind it in brackets, where there is room.

    Raises:
        ValueError: `JITFMHA_VERBOSE` has an unknown value; nothing was built then.
    """
    if verbosity() == "quiet":
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


class _Stderr:
    """Whole lines on stderr, and one at a time that waits for its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unfinished: object = None

    def renew(self) -> None:
        """For the child of a fork, during which another thread may have held the lock."""
        self._lock = threading.Lock()
        self._unfinished = None

    def write_line(self, line: str) -> None:
        with self._lock:
            self._end_the_unfinished()
            self._write(f"{line}\n")

    def begin(self, writer: object, text: str) -> None:
        """Write the beginning of a line; whatever is written next before its end ends it."""
        with self._lock:
            self._end_the_unfinished()
            self._write(text)
            self._unfinished = writer

    def end(self, writer: object, begun: str, text: str) -> None:
        """Write the end of the line that `writer` began, all of it if that is not the last."""
        with self._lock:
            if self._unfinished is not writer:
                self._end_the_unfinished()
                self._write(begun)
            self._write(f"{text}\n")
            self._unfinished = None

    def _end_the_unfinished(self) -> None:
        if self._unfinished is not None:
            self._write("\n")
            self._unfinished = None

    def _write(self, text: str) -> None:
        if sys.stderr is None:
            return
        with suppress(OSError, ValueError):  # Closed; there is nobody to tell.
            sys.stderr.write(text)
            sys.stderr.flush()


_STDERR = _Stderr()


os.register_at_fork(after_in_child=_STDERR.renew)


class _BuildLine:
    def __init__(self, what: str) -> None:
        self._text = f"jitfmha: building {what} ..."
        # Commands and what the compiler says come in between.
        self._stands_alone = is_verbose()
        self._started = time.monotonic()
        self._is_shown = False
        self._is_finished = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(PATIENCE_SECONDS, self._show)
        self._timer.daemon = True
        # An interpreter that is shutting down starts no more threads.
        with suppress(RuntimeError):
            self._timer.start()

    def finish(self, end: str) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_finished = True
            if self._is_shown:
                seconds = time.monotonic() - self._started
                _STDERR.end(self, self._text, f" {end}{seconds:.1f} s")

    def _show(self) -> None:
        with self._lock:
            if self._is_finished:
                return
            self._is_shown = True
            if self._stands_alone:
                _STDERR.write_line(self._text)
            else:
                _STDERR.begin(self, self._text)
