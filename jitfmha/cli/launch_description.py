"""A launch of any code object's kernel, as data: what `python -m jitfmha run-kernel` reads.

`docs/emulator.md` says what each field means, on an example. Torch is imported where tensors are
made: nobody should wait for it to read that a field is wrong.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..amd.node import VIRTUAL_NODE
from ..jit.regular_file import path_inside, read_regular_file

if TYPE_CHECKING:
    from torch import Tensor

    from ..amd.recording_runtime import Started

_FLOATS = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz",
)  # fmt: skip
DTYPES = (*_FLOATS, "int64", "int32", "int16", "int8", "uint8")
"""Data types of tensors, as torch names them."""

# Types of arguments that are no addresses -> their `struct` code.
_TYPES = {
    "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "f16": "e", "f32": "f", "f64": "d",
}  # fmt: skip
_POINTER_BYTES = 8
_MOST_THREADS = 1024
_LARGEST_KERNARG = 1 << 16
_LARGEST_FILE = 1 << 40
_LARGEST_INTEGER = (1 << 64) - 1
_CONTENTS = ("fill", "random", "file")
# Outputs are written to files of these names.
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_+=-][A-Za-z0-9_.+=-]{0,99}")


class LaunchDescriptionError(ValueError):
    """A description that says nothing that can be launched; the text names field and value."""


def _wrong(where: str, value: object, what: str) -> LaunchDescriptionError:
    text = json.dumps(value)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return LaunchDescriptionError(f"{where} is {shown}, {what}")


@dataclass(frozen=True)
class TensorDescription:
    """A tensor that the kernel is given.

    Attributes:
        dtype, shape: of the tensor, which is contiguous.
        content: where its content comes from: fill, random or file.
        value: the number that fills it, the seed, or the file of its raw bytes.
        low, high: of random content: uniform from `low` up to and without `high`. None: normally
            distributed.
        is_output: the kernel writes it, and it is shown.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: str
    value: Any
    low: float | None
    high: float | None
    is_output: bool

    def make(self) -> Tensor:
        """The tensor, on its own memory; raises for a file that is missing or has another size."""
        # Imported here because a description that is wrong has no use for them.
        import torch

        from ..emulator.guarded_memory import guarded_memory

        where = f"tensors.{self.name}"
        dtype: torch.dtype = getattr(torch, self.dtype)
        wide = torch.float64 if dtype.is_floating_point else torch.int64
        size = math.prod(self.shape) * dtype.itemsize
        tensor = guarded_memory(size).view(dtype).view(self.shape)
        if self.content == "file":
            raw = _raw_bytes(where, Path(self.value), tensor.nbytes)
            if raw:
                of_file = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
                tensor.reshape(-1).view(torch.uint8).copy_(of_file)
            return tensor
        if self.content == "fill":
            return tensor.copy_(torch.full(self.shape, self.value, dtype=wide))
        generator = torch.Generator().manual_seed(self.value)
        if self.low is None or self.high is None:
            values = torch.randn(self.shape, generator=generator)
        elif dtype.is_floating_point:
            uniform = torch.rand(self.shape, generator=generator, dtype=torch.float64)
            values = uniform * (self.high - self.low) + self.low
        else:
            values = torch.randint(
                int(self.low), int(self.high), self.shape, generator=generator, dtype=torch.int64
            )
        return tensor.copy_(values)


@dataclass(frozen=True)
class _Argument:
    """Bytes at an offset; those of an address are known when the tensors are there."""

    offset: int
    size: int
    packed: bytes
    tensor: str | None
    byte_offset: int


@dataclass(frozen=True)
class LaunchDescription:
    """One launch.

    Attributes:
        file: that says so.
        arch: what `emulate` takes.
        kernel: its symbol; None: the only one of the code object.
        dynamic_lds: bytes beyond those that the kernel declares.
        kernarg_bytes: of the whole argument block.
    """

    file: Path
    arch: str
    kernel: str | None
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_lds: int
    tensors: Mapping[str, TensorDescription]
    kernarg_bytes: int
    _arguments: tuple[_Argument, ...]

    def started(self, symbol: str, image: bytes, tensors: Mapping[str, Tensor]) -> Started:
        # Imported here because it imports torch.
        from ..amd.recording_runtime import Started

        block = bytearray(self.kernarg_bytes)
        for argument in self._arguments:
            packed = argument.packed
            if argument.tensor is not None:
                address = tensors[argument.tensor].data_ptr() + argument.byte_offset
                packed = struct.pack("<Q", address)
            block[argument.offset : argument.offset + argument.size] = packed
        return Started(symbol, image, self.grid, self.block, self.dynamic_lds, bytes(block))

    @classmethod
    def read(cls, path: Path) -> LaunchDescription:
        """Read a JSON file; files that it names are found beside it.

        Raises:
            LaunchDescriptionError: something is missing, unknown or impossible.
            OSError: the file cannot be read.
        """
        try:
            document = json.loads(read_regular_file(path))
        except (ValueError, RecursionError) as error:
            raise LaunchDescriptionError(f"it is not JSON: {error}") from error
        fields = _fields(
            "the document", document, ("arch", "grid", "block", "arguments"),
            ("kernel", "dynamic_lds", "tensors", "kernarg_bytes"),
        )  # fmt: skip
        if fields["arch"] not in VIRTUAL_NODE:
            raise _wrong("arch", fields["arch"], f"which is none of {', '.join(VIRTUAL_NODE)}")
        kernel = fields.get("kernel")
        if kernel is not None and not isinstance(kernel, str):
            raise _wrong("kernel", kernel, "which is not a symbol")
        block = _extent("block", fields["block"])
        if math.prod(block) > _MOST_THREADS:
            raise LaunchDescriptionError(
                f"block is {fields['block']}: {math.prod(block)} threads, over {_MOST_THREADS}"
            )
        tensors = {
            name: _tensor(name, each, path.parent)
            for name, each in _mapping("tensors", fields.get("tensors", {})).items()
        }
        arguments = _arguments(fields["arguments"], tensors)
        used = max((each.offset + each.size for each in arguments), default=0)
        kernarg_bytes = _integer(
            "kernarg_bytes", fields.get("kernarg_bytes", used), used, _LARGEST_KERNARG
        )
        dynamic_lds = _integer("dynamic_lds", fields.get("dynamic_lds", 0), 0, 1 << 20)
        grid = _extent("grid", fields["grid"])
        return cls(
            *(path, fields["arch"], kernel, grid, block, dynamic_lds),
            *(tensors, kernarg_bytes, arguments),
        )


def _raw_bytes(where: str, path: Path, size: int) -> bytes:
    try:
        raw = read_regular_file(path, _LARGEST_FILE)
    except OSError as error:
        raise LaunchDescriptionError(f"{where}.file: {error}") from error
    if len(raw) != size:
        raise LaunchDescriptionError(
            f"{where}.file: {path} has {len(raw)} bytes, and the tensor has {size}"
        )
    return raw


# ---- Fields of the JSON document -----------------------------------------------------------------


def _mapping(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, value, "which is not an object")
    return value


def _fields(
    where: str, value: object, needed: Collection[str], optional: Collection[str]
) -> Mapping[str, Any]:
    fields = _mapping(where, value)
    for name in needed:
        if name not in fields:
            raise LaunchDescriptionError(f"{where} has no {name!r}")
    for name in fields:
        if name not in needed and name not in optional:
            known = ", ".join((*needed, *optional))
            raise LaunchDescriptionError(f"{where} has {name!r}, which is none of {known}")
    return fields


def _integer(where: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(where, value, "which is not an integer")
    if not least <= value <= most:
        raise _wrong(where, value, f"which is not from {least} to {most}")
    return value


def _extent(where: str, value: object) -> tuple[int, int, int]:
    if not isinstance(value, list) or not 1 <= len(value) <= 3:
        raise _wrong(where, value, "not one to three integers")
    x, y, z = (*(_integer(where, each, 1, 2**31 - 1) for each in value), 1, 1)[:3]
    return x, y, z


def _number(where: str, value: object) -> float:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(where, value, "which is not a number")
    if not -_LARGEST_INTEGER <= value <= _LARGEST_INTEGER and isinstance(value, int):
        raise _wrong(where, value, "beyond 64 bits: write 1e30")
    return value


def _tensor(name: str, value: object, folder: Path) -> TensorDescription:
    if not _TENSOR_NAME.fullmatch(name):
        what = "no name: up to 100 letters, digits and any of _.+=-, which begins with no dot"
        raise _wrong("a key of tensors", name, what)
    where = f"tensors.{name}"
    fields = _fields(where, value, ("dtype", "shape"), (*_CONTENTS, "low", "high", "output"))
    if fields["dtype"] not in DTYPES:
        known = ", ".join(DTYPES)
        raise _wrong(f"{where}.dtype", fields["dtype"], f"which is none of {known}")
    dtype = fields["dtype"]
    if not isinstance(fields["shape"], list):
        raise _wrong(f"{where}.shape", fields["shape"], "not a list")
    shape = tuple(_integer(f"{where}.shape", each, 0, 2**40) for each in fields["shape"])
    contents = [each for each in _CONTENTS if each in fields]
    if len(contents) != 1:
        raise LaunchDescriptionError(
            f"{where} has {' and '.join(contents) or 'no content'}: one of fill, random, file"
        )
    (content,) = contents
    given: Any = fields[content]
    if content == "fill":
        given = _of_dtype(f"{where}.fill", given, dtype)
    elif content == "random":
        given = _integer(f"{where}.random", given, 0, 2**63 - 1)
    elif not isinstance(given, str):
        raise _wrong(f"{where}.file", given, "which is not a path")
    else:
        try:
            given = path_inside(folder, given)
        except ValueError as error:
            raise LaunchDescriptionError(f"{where}.file: {error}") from error
    low, high = _limits(where, fields, content, dtype)
    is_output = fields.get("output", False)
    if not isinstance(is_output, bool):
        raise _wrong(f"{where}.output", is_output, "not true or false")
    return TensorDescription(name, dtype, shape, content, given, low, high, is_output)


def _of_dtype(where: str, value: object, dtype: str) -> float:
    if dtype in _FLOATS:
        return _number(where, value)
    return _integer(where, value, *_range_of(signed=dtype[0] == "i", bits=int(dtype.strip("uint"))))


def _range_of(*, signed: bool, bits: int) -> tuple[int, int]:
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


def _limits(
    where: str, fields: Mapping[str, Any], content: str, dtype: str
) -> tuple[float | None, float | None]:
    given = [name for name in ("low", "high") if name in fields]
    if content != "random" and given:
        raise LaunchDescriptionError(f"{where}.{given[0]} is for random content")
    if content != "random" or (not given and dtype in _FLOATS):
        return None, None
    if len(given) != 2:
        raise LaunchDescriptionError(f"{where}: random {dtype} needs both low and high")
    low, high = (_of_dtype(f"{where}.{name}", fields[name], dtype) for name in ("low", "high"))
    if not low < high:
        raise LaunchDescriptionError(f"{where}.low is {low}, which is not below high, {high}")
    return low, high


def _arguments(value: object, tensors: Collection[str]) -> tuple[_Argument, ...]:
    if not isinstance(value, list):
        raise _wrong("arguments", value, "which is not a list")
    arguments: list[_Argument] = []
    end = 0
    for index, each in enumerate(value):
        argument = _argument(f"arguments[{index}]", each, tensors, end)
        if argument.offset < end:
            raise LaunchDescriptionError(
                f"arguments[{index}].offset is {argument.offset}, where the argument before it "
                f"ends at {end}"
            )
        arguments.append(argument)
        end = argument.offset + argument.size
    return tuple(arguments)


def _argument(where: str, value: object, tensors: Collection[str], end: int) -> _Argument:
    tensor, byte_offset = None, 0
    if "tensor" in _mapping(where, value):
        fields = _fields(where, value, ("tensor",), ("offset", "byte_offset"))
        tensor, packed = fields["tensor"], bytes(_POINTER_BYTES)
        if tensor not in tensors:
            raise _wrong(f"{where}.tensor", tensor, "no name in tensors")
        byte_offset = _integer(
            f"{where}.byte_offset", fields.get("byte_offset", 0), -(2**40), 2**40
        )
    else:
        fields = _fields(where, value, ("type", "value"), ("offset",))
        packed = _packed(where, fields["type"], fields["value"])
    aligned = end + -end % len(packed) if len(packed) in (1, 2, 4, 8) else end
    offset = _integer(f"{where}.offset", fields.get("offset", aligned), 0, _LARGEST_KERNARG)
    return _Argument(offset, len(packed), packed, tensor, byte_offset)


def _packed(where: str, kind: object, value: object) -> bytes:
    if kind == "bytes":
        try:
            return bytes.fromhex(value)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise _wrong(f"{where}.value", value, "which is not hexadecimal") from error
    if not isinstance(kind, str) or kind not in _TYPES:
        known = ", ".join((*_TYPES, "bytes"))
        raise _wrong(f"{where}.type", kind, f"which is none of {known}")
    if kind[0] == "f":
        number = _number(f"{where}.value", value)
    else:
        limits = _range_of(signed=kind[0] == "i", bits=int(kind[1:]))
        number = _integer(f"{where}.value", value, *limits)
    try:
        return struct.pack(f"<{_TYPES[kind]}", number)
    except (struct.error, OverflowError) as error:
        raise LaunchDescriptionError(f"{where}.value is {value}: {error}") from error
