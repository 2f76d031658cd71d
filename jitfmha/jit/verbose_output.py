"""Shows the commands of a build as they run, for `JITFMHA_VERBOSE=1`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .status import is_verbose

_STDOUT = 1


class ShownOutput:
    """What was shown so far."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    def text(self) -> str:
        """All of it."""
        return b"".join(self._chunks).decode(errors="replace")

    def _forward(self, source: int) -> None:
        with os.fdopen(source, "rb", buffering=0) as pipe:
            while chunk := pipe.read(65536):
                self._chunks.append(chunk)
                if sys.stderr is not None:
                    sys.stderr.write(chunk.decode(errors="replace"))
                    sys.stderr.flush()


@contextmanager
def shown_output() -> Iterator[ShownOutput]:
    """Copy what child processes write to stdout to stderr; does nothing unless verbose.

    cpp_extension either keeps the output to itself or gives it to stdout, which belongs to the
    user's program.
    """
    shown = ShownOutput()
    if not is_verbose():
        yield shown
        return
    reading, writing = os.pipe()
    forwarder = threading.Thread(target=shown._forward, args=(reading,), daemon=True)
    if sys.stdout is not None:
        sys.stdout.flush()
    kept = os.dup(_STDOUT)
    os.dup2(writing, _STDOUT)
    os.close(writing)
    forwarder.start()
    try:
        yield shown
    finally:
        os.dup2(kept, _STDOUT)
        os.close(kept)
        forwarder.join(timeout=5.0)
