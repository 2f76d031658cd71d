"""What the operations of MUBUF, FLAT, GLOBAL and SCRATCH do to one lane's memory and registers.

From the ISA documents' words. An operation is a mnemonic without its format: load_ubyte_d16,
store_dwordx2, atomic_smin_x2.
"""

import re
from collections.abc import Callable, Sequence

from .atomics import Bytes, Denormals, atomic

# (offset within the access, bytes) -> where that is in memory; None: out of range.
Places = Callable[[int, int], "int | None"]

_DWORDS = {"dword": 1, "dwordx2": 2, "dwordx3": 3, "dwordx4": 4}
_SIGN_OF_MIN_MAX = {
    "smin": ("min", "i"),
    "smax": ("max", "i"),
    "umin": ("min", "u"),
    "umax": ("max", "u"),
}
_FLOAT_ATOMICS = {
    "add_f32": ("add", "f", 32),
    "add_f64": ("add", "f", 64),
    "min_f64": ("min", "f", 64),
    "max_f64": ("max", "f", 64),
    "pk_add_f16": ("add", "pk_f", 16),
    "pk_add_bf16": ("add", "pk_bf", 16),
}


def atomic_of(operation: str) -> tuple[str, str, int]:
    """Operation, kind and bits of atomic_..., as `models.atomics.atomic` takes them."""
    name = operation.removeprefix("atomic_")
    if name in _FLOAT_ATOMICS:
        return _FLOAT_ATOMICS[name]
    bits = 64 if name.endswith("_x2") else 32
    name = name.removesuffix("_x2")
    kind = "u"
    if name in _SIGN_OF_MIN_MAX:
        name, kind = _SIGN_OF_MIN_MAX[name]
    return name, kind, bits


def is_atomic(operation: str) -> bool:
    return operation.startswith("atomic_")


def access_bytes(operation: str) -> int:
    """Bytes of memory that a lane touches."""
    if is_atomic(operation):
        return 8 if atomic_of(operation)[2] == 64 else 4
    name = re.sub("^(load_lds|load|store)_", "", operation)
    return 4 * _DWORDS[name] if name in _DWORDS else 1 if "byte" in name else 2


def access(operation: str, memory: Bytes, places: Places, data: Sequence[int]) -> list[int]:
    """The lane's result in dwords; changes the memory.

    Args:
        data: dwords of the data registers.
    """
    size = access_bytes(operation)
    if is_atomic(operation):
        at = places(0, size)
        if at is None:
            return [0] * (size // 4)
        name, kind, bits = atomic_of(operation)
        operands = [
            sum(data[size // 4 * k + i] << 32 * i for i in range(size // 4))
            for k in range(2 if name == "cmpswap" else 1)
        ]
        old = memory.load(at, size)
        memory.store(at, size, atomic(name, kind, bits, old, operands, Denormals()))
        return [old >> 32 * i & 0xFFFFFFFF for i in range(size // 4)]
    kind, name = re.sub("^load_lds_", "load_", operation).split("_", 1)
    if name in _DWORDS:
        result = []
        for k in range(_DWORDS[name]):
            at = places(4 * k, 4)
            if kind == "load":
                result.append(0 if at is None else memory.load(at, 4))
            elif at is not None:
                memory.store(at, 4, data[k])
        return result
    at = places(0, size)
    if kind == "store":
        if at is not None:
            memory.store(at, size, data[0] >> (16 if name.endswith("_hi") else 0))
        return []
    value = 0 if at is None else memory.load(at, size)
    if name.startswith("s") and not name.startswith("short") and value >> (8 * size - 1):
        value -= 1 << 8 * size
    if "d16" in name:
        # With error correction, the other half of the register becomes 0.
        value = (value & 0xFFFF) << (16 if name.endswith("_hi") else 0)
    return [value & 0xFFFFFFFF]
