"""Programs that tests start, and how they end."""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# So that what hangs fails. On a busy machine it takes minutes to build the emulator, say.
PATIENCE_SECONDS = 900.0
_LINKERS_PATH = "LD_LIBRARY_PATH"


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
    environment = {"PYTHONPATH": _python_path(), **environment}
    return run_program(
        sys.executable, *arguments, code=code, cwd=cwd, timeout=timeout, **environment
    )


def run_forked(
    *arguments: str | Path,
    code: int | None = 0,
    cwd: Path | None = None,
    timeout: float = PATIENCE_SECONDS,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """`run_python` of a program, a text with ``-c`` or a module with ``-m``, after torch's import.

    That takes a process longer than most of what is tried in it. It is for what needs a process of
    its own, but neither its imports nor variables that torch reads when it starts.
    """
    server = _forking_python(environment.get(_LINKERS_PATH))
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, name) for name in ("stdout", "stderr")}
        for file in files.values():
            file.touch()
        texts = list(map(str, arguments))
        request = {
            "arguments": texts,
            "cwd": str(cwd or Path.cwd()),
            "environment": {**os.environ, "PYTHONPATH": _python_path(), **environment},
            **{name: str(file) for name, file in files.items()},
        }
        server.stdin.write(f"{json.dumps(request)}\n")
        server.stdin.flush()
        pid = int(server.stdout.readline())
        patience = threading.Timer(timeout, os.kill, (pid, signal.SIGKILL))
        patience.start()
        status = int(server.stdout.readline())
        patience.cancel()
        stdout, stderr = (file.read_text() for file in files.values())
    assert code is None or status == code, stdout + stderr
    return subprocess.CompletedProcess(texts, status, stdout, stderr)


@cache
def _forking_python(linkers_path: str | None) -> subprocess.Popen[str]:
    """It ends with this process, which closes its stdin; the linker reads its path at the start."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if linkers_path is not None:
        environment[_LINKERS_PATH] = linkers_path
    server = subprocess.Popen(
        [sys.executable, ROOT / "op_tests" / "forking_python.py"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
