"""Programs that tests start, and how they end."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# So that what hangs fails. On a busy machine it takes minutes to build the emulator, say.
PATIENCE_SECONDS = 900.0


def run_program(
    *command: str | Path,
    code: int | None = 0,
    cwd: Path | None = None,
    timeout: float = PATIENCE_SECONDS,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """A command that ends with this exit code (None: any), with these variables on top."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done


def run_python(
    *arguments: str | Path,
    code: int | None = 0,
    cwd: Path | None = None,
    timeout: float = PATIENCE_SECONDS,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """This interpreter, with this checkout's package from whichever directory."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": path, **environment}
    return run_program(
        sys.executable, *arguments, code=code, cwd=cwd, timeout=timeout, **environment
    )
