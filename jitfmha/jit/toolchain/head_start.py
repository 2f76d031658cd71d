"""Compiles while `torch.utils.cpp_extension` is imported, which takes half a second.

A ninja of its own compiles each source into a folder of the workspace, from where the compiler that
cpp_extension is given takes the objects. Where one failed it compiles them all, as if nobody had
begun, so that there is one way in which errors are reported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..cache.directory import write_private
from ..cache.owned_directory import end_processes_in
from .ninja import write_script

_FOLDER = "begun"
# cpp_extension names the object last, in the workspace.
_TAKE_OBJECT = f"""\
for last; do :; done
cat "{_FOLDER}/$last.said" 2>&- && mv "{_FOLDER}/$last" "$last" && exit
"""


def compiler_script(workspace: Path, command: tuple[str, ...]) -> str:
    """The compiler as one word that needs no quoting; it takes what was compiled already."""
    return str(write_script(workspace / "compiler", command, _TAKE_OBJECT))


@contextmanager
def begun(
    workspace: Path, compiler: str, sources: Sequence[str], cflags: Sequence[str]
) -> Iterator[Callable[[], None]]:
    """Compile the files ``sources`` with the ninja on `PATH`; yields what waits for the end.

    Ends what still runs after the `with` block. Raises ``OSError`` where ninja cannot be started.
    """
    folder = workspace / _FOLDER
    compiling = f"{compiler} -fPIC {' '.join(cflags)} -c $in -o $out >$out.said 2>&1"
    rule = f"rule compile\n  command = {compiling}\n"
    objects = (f"build {Path(source).stem}.o: compile {source}\n" for source in sources)
    write_private(folder / "build.ninja", (rule + "".join(objects)).encode())
    jobs = os.environ["MAX_JOBS"]
    process = subprocess.Popen(
        ["ninja", *(("-j", jobs) if jobs else ())],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def wait() -> None:
        if process.wait() != 0:
            shutil.rmtree(folder, ignore_errors=True)

    try:
        yield wait
    finally:
        # Not ninja alone: it waits for its compilers, and a shell that gets SIGINT while it starts
        # one may lose it.
        if process.poll() is None:
            end_processes_in(folder)
        process.wait()
