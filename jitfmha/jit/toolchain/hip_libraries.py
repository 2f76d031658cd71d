"""Where the HIP runtime may be that torch uses, and the libraries that lie beside it.

A process can hold two of them, torch's own and that of a ROCm installation. Streams, modules and
memory of the one mean nothing to the other, so it has to be torch's. The order of the libraries in
the process's memory does not tell which one that is; where torch's own calls end does.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

# Wheels of PyTorch rename it, to `libamdhip64-<hash>.so`.
NAMES = "libamdhip64*.so*"
SYSTEM_NAMES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
LIBRARY_OF_TORCH = "libc10_hip.so"
_ROCM_PACKAGE = "_rocm_sdk_core"
_DEFAULT_ROCM = "/opt/rocm"
_MAPS = Path("/proc/self/maps")


class _SymbolOwner(ctypes.Structure):
    """The ``Dl_info`` that dladdr fills in."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


class Candidate(NamedTuple):
    """A library that may be the runtime, by its path, or a name for the linker.

    ``why`` it would be taken; with ``is_loaded`` only a copy that is in the process already counts.
    """

    path: str
    why: str
    is_loaded: bool = False


def folders_of_torch_runtime() -> list[tuple[Path, str]]:
    """Where the libraries that belong to torch's HIP runtime may lie, and why each is looked at.

    Loads nothing: where torch has loaded its runtime, that is the only place.
    """
    used = _runtime_of_torch()
    if used is not None:
        return [(Path(used).parent, "it lies beside the HIP runtime that torch uses")]
    *of_torch, _ = folders_searched()
    return of_torch


def candidates() -> Iterator[Candidate]:
    """Yield the libraries to try, in turn."""
    used = _runtime_of_torch()
    if used is not None:
        yield Candidate(used, f"torch's {LIBRARY_OF_TORCH} calls it", is_loaded=True)
    *of_torch, (rocm, in_rocm) = folders_searched()
    for folder, why in of_torch:
        yield from (Candidate(str(path), why) for path in sorted(folder.glob(NAMES)))
    for path in mapped_runtimes():
        yield Candidate(path, "it is loaded in this process", is_loaded=True)
    for name in SYSTEM_NAMES:
        yield Candidate(name, "the system's linker finds it")
    yield from (Candidate(str(path), in_rocm) for path in sorted(rocm.glob(NAMES)))


def folders_searched() -> list[tuple[Path, str]]:
    """Where PyTorch's own runtime may lie, then ROCm's, and why each is looked at."""
    package = importlib.util.find_spec(_ROCM_PACKAGE)
    roots = (package and package.submodule_search_locations) or ()
    in_package = f"it is in the package {_ROCM_PACKAGE}"
    rocm = Path(os.environ.get("ROCM_PATH") or _DEFAULT_ROCM)
    return [
        (_torch_lib(), "it came with torch"),
        *((Path(root) / "lib", in_package) for root in roots),
        (rocm / "lib", "it is ROCm's"),
    ]


def _torch_lib() -> Path:
    return Path(torch.__file__).parent / "lib"


def _runtime_of_torch() -> str | None:
    """The file in which torch's own calls end; None where torch has loaded none."""
    for name in (str(_torch_lib() / LIBRARY_OF_TORCH), LIBRARY_OF_TORCH):
        try:
            # A handle's symbols are those of the library and of what it depends on, so other
            # runtimes in the process are out of sight.
            return runtime_behind(ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD))
        except OSError:
            continue
    return None


def runtime_behind(library: ctypes.CDLL) -> str:
    """The file with the HIP functions that a library has, or depends on; ``OSError`` for none."""
    function = getattr(library, "hipGetDevice", None)
    owner = _SymbolOwner()
    if function is None or not ctypes.CDLL(None).dladdr(function, ctypes.byref(owner)):
        raise OSError(f"{library._name} has no function hipGetDevice")
    return os.fsdecode(owner.file)


def mapped_runtimes() -> list[str]:
    """The HIP runtimes in this process's memory, by path; there should be one."""
    try:
        maps = _MAPS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    paths = (Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines())
    return list(dict.fromkeys(str(path) for path in paths if path.match(NAMES)))
