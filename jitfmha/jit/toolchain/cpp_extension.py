"""Runs `torch.utils.cpp_extension.load` so that its traps stay shut.

* Its lock file, ninja's time stamps and `.ninja_log` are harmless in a directory that exists for
  one build only.
* It hands every path and flag to a shell, through ninja. So all of them are either ours or checked
  against what a shell leaves alone; the compiler is called through a script.
* It loads what it built, from where it built it. As a "standalone" target it does not: the process
  only ever maps the published and checked file.
* Compilers are started before its import, which takes long (head_start.py).
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from ..cache.directory import write_private
from ..errors import BuildError
from ..spec import BuildSpec
from ..status import is_verbose
from .compiling import compile_failure, source_flags
from .environment import changed_environment
from .head_start import begun, compiler_script
from .ninja import path_with_ninja

_INTERPRETED = re.compile(r"""[\x00-\x20!"#$&'()*:;<>?\[\\\]^`{|}~\x7f]""")
_STDOUT = 1
# A process that outlives the build may keep its end of the pipe open.
_PATIENCE_SECONDS = 5.0
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

# cpp_extension takes compiler and ninja from the environment.
_one_build_at_a_time = threading.Lock()
# A fork waits for it: the child would find the import unfinished, and wait for it for ever.
_importing = threading.RLock()


def compile_library(
    spec: BuildSpec,
    command: tuple[str, ...],
    workspace: Path,
    destination: Path,
    variables: Mapping[str, str],
) -> bytes:
    """Compile and link as `Toolchain.compile` says, by the words of ``command``."""
    cflags = [*spec.cflags, *source_flags(workspace / "sources", destination)]
    objects = [str(workspace / "objects" / each.artifact_name) for each in spec.objects]
    ldflags = ["-shared", *objects, *spec.ldflags]
    if sys.platform.startswith("linux"):
        ldflags.append(f"-L{_without_torch(workspace)}")
    with (
        _one_build_at_a_time,
        changed_environment(_variables(command, workspace, variables)),
    ):
        library = Path(_load(spec, workspace, cflags, ldflags))
        if spec.toolchain == "host_object" and library.is_file():
            library = _one_object(command, workspace, workspace / spec.artifact_name)
    if workspace.is_dir() and not library.is_file():
        raise BuildError(
            f"{spec.name} could not be compiled: {command[0]} ended without an error and wrote "
            "nothing, so it is no C++ compiler. Set CXX to one, or unset it."
        )
    return library.read_bytes()


def _without_torch(workspace: Path) -> Path:
    """A folder of empty archives, where linkers find PyTorch's libraries first.

    cpp_extension links all of PyTorch, which nothing here calls by name, and reading its symbols
    takes a quarter of a second.
    """
    folder = workspace / "without_torch"
    for name in ("c10", "torch", "torch_cpu"):
        write_private(folder / f"lib{name}.a", b"!<arch>\n")
    return folder


def _one_object(command: tuple[str, ...], workspace: Path, result: Path) -> Path:
    """Make one object of those that were linked into a library, which cpp_extension always does."""
    objects = sorted(workspace.glob("*.o"))
    done = subprocess.run(
        [*command, "-r", "-nostdlib", *objects, "-o", result],
        cwd=workspace,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode != 0:
        raise compile_failure(done.stdout.decode(errors="replace"))
    return result


class ShownOutput:
    """Copies what child processes write to stdout to stderr at once, for `JITFMHA_VERBOSE=1`.

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


def _load(spec: BuildSpec, workspace: Path, cflags: list[str], ldflags: list[str]) -> str:
    sources = [f"{workspace}/sources/{name}" for name in spec.compiled_sources]
    shown = ShownOutput()
    try:
        with begun(workspace, os.environ["CXX"], sources, cflags) as wait, shown:
            extension = _imported_cpp_extension()
            _check_torch_location(extension.library_paths())
            wait()
            with _quiet_extension_log(), _lock_by_file(extension):
                library = extension.load(
                    name=spec.name,
                    sources=sources,
                    extra_cflags=cflags,
                    extra_ldflags=ldflags,
                    build_directory=str(workspace),
                    verbose=is_verbose(),
                    with_cuda=False,
                    with_sycl=False,
                    is_python_module=False,
                    is_standalone=True,
                )
    except UnicodeDecodeError as error:
        # cpp_extension expects UTF-8 of the compiler.
        raise compile_failure(error.object.decode(errors="replace")) from error
    except RuntimeError as error:
        raise compile_failure(str(error) + shown.text) from error
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise
        raise BuildError(f"the build of {spec.name} cannot be run: {error}") from error
    return str(library)


@contextmanager
def _interrupt_afterwards() -> Iterator[None]:
    """Handle the first SIGINT in the end, where it was to be handled in this thread by Python.

    Python makes a TypeError of one KeyboardInterrupt in some hundred during imports: that of a
    `from` whose module it was about to look up ("expected a message argument").
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def note(_number: int, _frame: object) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


@_interrupt_afterwards()
def _imported_cpp_extension() -> Any:
    """Imported when needed because it drags in setuptools, which a filled cache has no use for.

    An exception of a signal meanwhile would leave half of setuptools in place, with which no later
    attempt succeeds. So what is half there is forgotten.
    """
    with _importing:
        before = set(sys.modules)
        try:
            return import_module("torch.utils.cpp_extension")
        except BaseException:
            for name in sys.modules.keys() - before:
                if name.partition(".")[0] == "setuptools" or name == "torch.utils.cpp_extension":
                    del sys.modules[name]
            raise


def _check_torch_location(paths: list[str]) -> None:
    for path in paths:
        if _INTERPRETED.search(path):
            raise BuildError(
                f"PyTorch is installed at {path!r}, and its build tool cannot handle the special "
                "characters in that path; install it where the path has no spaces or quotes"
            )


@contextmanager
def _lock_by_file(extension: Any) -> Iterator[None]:
    """Let it lock by a file's presence, as it did before torch 2.15, which asks the kernel.

    A file system may have no such locks, and nobody else builds in this directory.
    """
    lock = getattr(extension, "FileLock", None)
    if lock is None:
        yield
        return
    from filelock import SoftFileLock  # Imported where it is used: it takes 30 ms.

    extension.FileLock = SoftFileLock
    try:
        yield
    finally:
        extension.FileLock = lock


@contextmanager
def _quiet_extension_log() -> Iterator[None]:
    log = logging.getLogger("torch.utils.cpp_extension")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _variables(
    command: tuple[str, ...], workspace: Path, of_compiler: Mapping[str, str]
) -> dict[str, str]:
    jobs = os.environ.get("MAX_JOBS", "")
    return {
        **of_compiler,
        # It ends in an error where a digit is no decimal one, and ignores what else is no number.
        "MAX_JOBS": str(int(jobs)) if jobs.isdecimal() else "",
        "CXX": compiler_script(workspace, command),
        "PATH": path_with_ninja(workspace),
        # The errors of the compiler are read by a program here.
        "LC_ALL": "C",
        # The compiler that was hashed is the one that runs: no ccache put in front of it unasked.
        "TORCH_NO_COMPILER_WRAPPER": "1",
        # Launchers have a C interface; whether PyTorch's C++ one would fit does not matter.
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",
    }


def _forget_build_of_parent() -> None:
    """Begin anew in the child of a fork that took place while another thread was building."""
    global _one_build_at_a_time
    _one_build_at_a_time = threading.Lock()
    _importing.release()


os.register_at_fork(
    before=_importing.acquire,
    after_in_parent=_importing.release,
    after_in_child=_forget_build_of_parent,
)
