"""``python -m jitfmha export``: the AMD kernels as a C++ library that needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .folder import ForeignFilesError, check_folder, publish
from .kernels import (
    DTYPES,
    FEATURES,
    MASKS,
    Selection,
    backward_passes,
    compiled_backward,
    compiled_forward,
    features_named,
    forward_kernels,
    forward_passes,
    ready_backward_kernels,
    selection_of,
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
]


def export(
    selection: Selection, folder: Path, on_compiled: Callable[[str], None] | None = None
) -> list[str]:
    """Write a library with the selected kernels.

    Args:
        selection: which ones.
        folder: absent, empty, or with an earlier export, which is replaced. It is complete or not
            there at any time.
        on_compiled: called with the name of each kernel or pass as soon as it is compiled.

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
    said = on_compiled or (lambda name: None)
    for each in forward_traits:
        forward.append(compiled_forward(each))
        said(each.name)
    for pass_ in backward_traits:
        backward.append(compiled_backward(pass_))
        said(pass_.name)
    if not forward and not backward:
        raise ValueError("no kernel serves what is selected")
    publish(folder, library_files(forward, backward))
    return [*(x.name for x in forward), *(x.name for x in backward)]
