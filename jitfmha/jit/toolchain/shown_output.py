"""Shows the commands of a build as they run, for `JITFMHA_VERBOSE=1`."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

from ..status import is_verbose

_STDOUT = 1
# A process that outlives the build may keep its end of the pipe open.
_PATIENCE_SECONDS = 5.0


class ShownOutput:
    """Copies what child processes write to stdout to stderr; does nothing unless verbose.

    cpp_extension either keeps the output to itself or gives it to stdout, which belongs to the
    user's program.

    Attributes:
        text: all of it, once the `with` block has ended; empty before, because the copying thread
            may be behind.
    """

    def __init__(self) -> None:
        self.text = ""
        self._chunks: list[bytes] = []
        self._forwarder: threading.Thread | None = None
        self._stdout = -1

    def __enter__(self) -> None:
        if not is_verbose():
            return
        reading, writing = os.pipe()
        self._forwarder = threading.Thread(target=self._forward, args=(reading,), daemon=True)
        if sys.stdout is not None:
            sys.stdout.flush()
        self._stdout = os.dup(_STDOUT)
        os.dup2(writing, _STDOUT)
        os.close(writing)
        self._forwarder.start()

    def __exit__(self, *_exception: object) -> None:
        if self._forwarder is None:
            return
        os.dup2(self._stdout, _STDOUT)
        os.close(self._stdout)
        self._forwarder.join(_PATIENCE_SECONDS)
        self.text = b"".join(self._chunks).decode(errors="replace")

    def _forward(self, source: int) -> None:
        with os.fdopen(source, "rb", buffering=0) as pipe:
            while chunk := pipe.read(65536):
                self._chunks.append(chunk)
                # Whether or not anybody can see it: a compiler whose pipe nobody reads is ended.
                with suppress(OSError, ValueError, AttributeError):
                    sys.stderr.write(chunk.decode(errors="replace"))
                    sys.stderr.flush()
