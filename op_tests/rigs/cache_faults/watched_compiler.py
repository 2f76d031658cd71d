"""A script in front of the real compiler that counts what it compiles and can be held.

It has nothing optimised: what is tried here is the cache, not the speed of what is in it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

# What the build of a CPU kernel runs: its two translation units, and the linker.
BUILD = ["compile", "compile", "link"]


@dataclass(frozen=True)
class WatchedCompiler:
    """What stands in ``CXX``.

    Attributes:
        path: of the script.
        log: has one line for each run that compiles or links.
        hold: while this file is there, compiling does not get on.
    """

    path: Path
    log: Path
    hold: Path

    @classmethod
    def below(cls, folder: Path) -> WatchedCompiler:
        """The one that was installed in this folder."""
        return cls(folder / "watched-c++", folder / "compiler-runs", folder / "hold")

    @classmethod
    def install(cls, folder: Path, command: list[str]) -> WatchedCompiler:
        """Write the script for the compiler that ``command`` runs."""
        watched = cls.below(folder)
        log, hold = shlex.quote(str(watched.log)), shlex.quote(str(watched.hold))
        watched.path.write_text(
            # Shells may lose one that comes while they start a program; so this one always does.
            "#!/bin/sh\ntrap '' INT\n"
            'case " $* " in\n'
            f'*" -c "*) echo compile >>{log}; while [ -e {hold} ]; do sleep 0.05; done ;;\n'
            f'*" -shared "*) echo link >>{log} ;;\n'
            "esac\n"
            f'exec {shlex.join(command)} "$@" -O0\n',
            encoding="utf-8",
        )
        watched.path.chmod(0o700)
        return watched

    def runs(self) -> list[str]:
        """``compile`` and ``link`` for each run so far, in order."""
        return self.log.read_text(encoding="ascii").split() if self.log.exists() else []

    def forget(self) -> None:
        """Start counting anew."""
        self.log.unlink(missing_ok=True)
