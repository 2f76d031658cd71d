"""``python -m jitfmha export``: the AMD kernels as a C++ library that needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import starmap
from pathlib import Path

from .. import jit
from ..kernels.compiled.backward_traits import backward_spec
from ..kernels.compiled.sink_gradient import sink_gradient_spec
from ..kernels.compiled.traits import kernel_spec
from .append import append_passes, compiled_append
from .folder import ForeignFilesError, check_folder, publish
from .kernels import (
    DTYPES,
    FEATURES,
    MASKS,
    Selection,
    backward_passes,
    compiled_backward,
    compiled_forward,
    compiled_sink,
    features_named,
    forward_kernels,
    forward_passes,
    ready_backward_kernels,
    selection_of,
    selection_of_set,
    sink_passes,
)
from .library import library_files
from .translation import TranslationError

__all__ = [
    "DTYPES",
    "FEATURES",
    "MASKS",
    "ForeignFilesError",
    "Selection",
    "TranslationError",
    "export",
    "features_named",
    "selection_of",
    "selection_of_set",
]


def export(
    selection: Selection,
    folder: Path,
    on_compiled: Callable[[str], None] | None = None,
    *,
    jobs: int | None = None,
) -> list[str]:
    """Write a library with the selected kernels.

    Args:
        selection: which ones.
        folder: absent, empty, or with an earlier export, which is replaced. It is complete or not
            there at any time.
        on_compiled: called with the name of each kernel or pass as soon as it is compiled, which it
            is where the build cache lacks it.
        jobs: how many are compiled at a time; None: as many as there are processors.

    Returns:
        The names of the kernels; of a backward pass's what they begin with.

    Raises:
        ForeignFilesError: the folder holds something else.
        NotImplementedError: no kernel serves anything that is selected.
        jitfmha.amd.code_object.CodeObjectError: a kernel that comes ready is not what it should be.
        ValueError: nothing is selected.
        jitfmha.BuildError: a kernel does not compile; nothing was written then.
    """
    check_folder(folder)
    forward = list(forward_kernels(selection))
    # In order of preference, which is that of the families in Python.
    backward = list(ready_backward_kernels(selection))
    forward_traits, backward_traits = forward_passes(selection, forward), backward_passes(selection)
    appends, of_sinks = append_passes(selection), sink_passes(selection)
    specs = [
        *map(kernel_spec, forward_traits),
        *map(backward_spec, backward_traits),
        *starmap(sink_gradient_spec, of_sinks),
        *(each.spec for each in appends),
    ]
    missing = [spec for spec in specs if not jit.is_built(spec)]
    for spec, _ in jit.build_all(missing, jobs or len(os.sched_getaffinity(0))):
        if on_compiled is not None:
            on_compiled(spec.name)
    forward += map(compiled_forward, forward_traits)
    backward += map(compiled_backward, backward_traits)
    append = list(map(compiled_append, appends))
    if not forward and not backward and not append:
        raise ValueError("no kernel serves what is selected")
    sinks = [*starmap(compiled_sink, of_sinks)]
    publish(folder, library_files(forward, backward, sinks, append))
    return [x.name for kernels in (forward, backward, sinks, append) for x in kernels]
