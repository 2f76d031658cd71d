"""What a toolchain makes of a spec, with the records of an entry around it."""

from __future__ import annotations

import os
import time

import torch

from ..version import __version__
from .cache.directory import write_private
from .cache.entry import EntryMeta, file_records
from .cache.turn import Turn
from .errors import CompileFailure
from .spec import BuildSpec
from .status import building
from .toolchain.failure_report import build_error
from .toolchain.protocol import Toolchain


def build(spec: BuildSpec, toolchain: Toolchain, turn: Turn) -> tuple[EntryMeta, dict[str, bytes]]:
    """Compile; returns what is to be published.

    Raises:
        ValueError: JITFMHA_VERBOSE has an unknown value.
        BuildError: it does not compile; the message says what the compiler said first.
        OSError: the disk is full, or the workspace is gone.
    """
    started = time.monotonic()
    with building(spec.name, spec.why):
        artifact = _compile(spec, toolchain, turn)
    sources = {name: text.encode() for name, text in spec.sources.items()}
    contents = {spec.artifact_name: artifact, **sources}
    meta = EntryMeta(
        name=turn.key.name,
        content_key=turn.key.content,
        compiler_key=str(turn.key.compiler),
        compiler=str(toolchain),
        torch=torch.__version__,
        package=__version__,
        host=os.uname().nodename,
        why=spec.why,
        created=time.time(),
        build_seconds=round(time.monotonic() - started, 3),
        files=file_records(contents),
    )
    return meta, contents


def _compile(spec: BuildSpec, toolchain: Toolchain, turn: Turn) -> bytes:
    try:
        with turn.workspace() as workspace:
            for name, text in spec.sources.items():
                write_private(workspace / "sources" / name, text.encode())
            return toolchain.compile(spec, workspace, turn.destination)
    except CompileFailure as failure:
        raise build_error(spec, toolchain, failure.output, workspace, turn.directory.logs) from None
