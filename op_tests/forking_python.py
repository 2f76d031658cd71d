"""Runs programs in forks of itself, which have torch: what `subprocesses.run_forked` starts.

A request is a line on stdin; the answers are the fork's process, and how it ended.
"""

import json
import os
import runpy
import sys
from typing import Any

import torch  # noqa: F401

_PLAIN_PATH = sys.path[1:]


def _requested() -> dict[str, Any]:
    """Returns in the forks alone."""
    answers = os.dup(1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            request: dict[str, Any] = json.loads(line)
            return request
        os.write(answers, f"{pid}\n".encode())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(answers, f"{status}\n".encode())
    sys.exit()


def _run(request: dict[str, Any]) -> None:
    """As a new interpreter would with these arguments."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for file, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY), file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    way, *arguments = request["arguments"]
    sys.path[:] = ["" if way in ("-c", "-m") else os.path.dirname(way), *given, *_PLAIN_PATH]
    if way == "-c":
        code, *sys.argv[1:] = arguments
        sys.argv[0] = way
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif way == "-m":
        module, *sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = request["arguments"]
        runpy.run_path(way, run_name="__main__")


_run(_requested())
