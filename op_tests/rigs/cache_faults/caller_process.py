"""What runs in the process that :mod:`.callers` starts, and in the callers that it forks."""

import atexit
import ctypes
import hashlib
import importlib
import json
import os
import pwd
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from .attention_call import AttentionCall

_POLL_SECONDS = 0.005
_PR_CAPBSET_DROP = 24
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 0x40000

_Request = dict[str, Any]


def serve() -> None:
    """Fork a caller for each request on stdin; answers go to stdout, one line each."""
    _import_everything()
    torch.set_num_threads(1)  # Its pool of threads would not survive a fork.
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _reply(replies, {"is_faulty": hasattr(ctypes.CDLL(None), "faulty_system_is_there")})
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _reply(replies, {"status": _wait(request["wait"], request["seconds"])})
            continue
        pid = os.fork()
        if pid == 0:
            replies.close()
            _call(request)
            _exit()
        _reply(replies, {"pid": pid})


def _import_everything() -> None:
    """A caller with another user or a broken environment may not be able to."""
    for module in (
        "platformdirs",
        "torch.utils.cpp_extension",
        "jitfmha.jit.cache.turn",
        "jitfmha.jit.toolchain.cpp_extension",
        "jitfmha.kernels.cpu",
        "shutil",
        "tempfile",
    ):
        importlib.import_module(module)


def _reply(replies: Any, message: dict[str, object]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _wait(pid: int, seconds: float) -> int | None:
    """The exit status; None for a caller that hangs, which is ended."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(_POLL_SECONDS)


def _call(request: _Request) -> None:
    folder = Path(request["folder"])
    flags = os.O_WRONLY | os.O_CREAT
    report = os.open(folder / "report", flags, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(folder / "stderr", flags, 0o600), 2)
    loaded: list[tuple[str, str]] = []
    sys.addaudithook(lambda event, arguments: _note_loading(event, arguments, loaded))
    held = [os.open(folder / "held", os.O_RDONLY)] if request["hold"] else []
    answer: dict[str, object] = {"right": False, "how": "", "error": "", "message": ""}
    started = time.perf_counter()
    try:
        _prepare(request)
        started = time.perf_counter()
        answer["right"] = _kernel(request["kernel"])()
    except Exception as error:
        answer["error"] = type(error).__name__
        answer["message"] = str(error)
    from jitfmha.jit import build_log

    answer["seconds"] = time.perf_counter() - started
    events = build_log()
    if events:
        answer["how"] = events[-1].how
        answer["library"] = str(events[-1].path)
    answer["loaded"] = loaded
    answer["files_left"] = [path for root in request["listed_folders"] for path in _below(root)]
    os.environ.pop("FAULTY_BELOW", None)  # What follows is no longer the package's.
    os.write(report, json.dumps(answer).encode("ascii"))
    os.close(report)
    for pipe in held:
        os.read(pipe, 1)  # Returns when the other side closes it, or dies.


def _exit() -> None:
    """What matters of the interpreter's exit; the rest takes longer than all calls."""
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(0)


def _prepare(request: _Request) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    if request["directory"] is not None:
        os.chdir(request["directory"])
    if request["mounts"]:
        _mount(request["mounts"])
    if request["umask"] is not None:
        os.umask(request["umask"])
    if request["is_nobody"]:
        pwd.getpwuid = _not_found
    if request["is_ordinary"]:
        give_up_privileges()
    for name, value in request["attributes"].items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, value)
    for name, value in request["answers"].items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, lambda *_, value=value: value)


def _not_found(user: int) -> pwd.struct_passwd:
    raise KeyError(f"getpwuid(): uid not found: {user}")


def give_up_privileges() -> None:
    """Make the permissions of files bind root too, in this process and in what it starts."""
    if os.geteuid() != 0:
        return
    library = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        library.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if library.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _mount(mounts: list[list[str]]) -> None:
    """Put each (folder, options) under a memory file system that this process alone sees."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_CLONE_NEWNS) != 0 or library.mount(b"none", b"/", None, _MS_REC_PRIVATE, 0):
        raise OSError(ctypes.get_errno(), "unshare")
    for folder, options in mounts:
        if library.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options.encode()) != 0:
            raise OSError(ctypes.get_errno(), "mount")


def _note_loading(event: str, arguments: tuple[Any, ...], loaded: list[tuple[str, str]]) -> None:
    is_path = event == "ctypes.dlopen" and arguments[0] and os.path.isabs(arguments[0])
    if is_path and arguments[0] != torch._C.__file__:  # whose threads kernels are handed
        content = Path(arguments[0]).read_bytes()
        loaded.append((arguments[0], hashlib.sha256(content).hexdigest()))


def _below(root: str) -> list[str]:
    return [str(path) for path in sorted(Path(root).rglob("*"))]


def _kernel(name: str) -> Any:
    if name.startswith("tiny"):
        return lambda: tiny(int(name.removeprefix("tiny")))
    return lambda: bool(AttentionCall.draw(1).make())


def tiny(number: int) -> bool:
    """Load a small launcher, and tell whether it gives its number."""
    from jitfmha import jit

    # The header makes two sources of an entry, the number an entry of its own.
    sources = {
        "tiny.cpp": '#include "tiny.h"\nextern "C" int answer() { return ANSWER; }\n',
        "tiny.h": f"#define ANSWER {number}\n",
    }
    return bool(jit.load(jit.BuildSpec("tiny", sources)).answer() == number)
