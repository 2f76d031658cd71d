"""Names of C++ functions as their authors wrote them."""

from __future__ import annotations

import ctypes


def demangled(symbol: str) -> str:
    """What a mangled name such as ``_Z3addPf`` stands for; every other name as it is.

    The C++ runtime library does it, which torch brings into the process.
    """
    if not symbol.startswith("_Z"):
        return symbol
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return symbol
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = demangle(symbol.encode(), None, None, ctypes.byref(status))
    if not text:
        return symbol
    try:
        return ctypes.string_at(text).decode(errors="replace")
    finally:
        free = ctypes.CDLL(None).free
        free.argtypes = [ctypes.c_void_p]
        free(text)
