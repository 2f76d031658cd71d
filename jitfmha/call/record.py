"""One recorded launch as a folder: ``launch.json``, code objects, and the tensors' bytes.

``launch.json`` has, in the words of this package, what was asked for (`problem`), the tensors with
their places in memory (`tensors`, `regions`), each kernel that was started with its arguments by
name (`kernels`), and what came out (`results`). A folder is there completely or not at all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..amd.kernel_arguments import (
    AITER_ARGUMENTS,
    AITER_DQ_ARGUMENTS,
    AITER_GRADIENT_ARGUMENTS,
    AITER_ROW_SUM_ARGUMENTS,
    BACKWARD_ARGUMENTS,
    COMPILED_ARGUMENTS,
    JITFMHA_ARGUMENTS,
    READY_BACKWARD_ARGUMENTS,
)
from ..jit.regular_file import read_regular_file
from ..jit.shared_struct import SharedStruct
from ..problem.arguments import (
    CuSeqlens,
    Descales,
    Dropout,
    Gradients,
    KeyOptions,
    Tensors,
)
from ..problem.problem import Problem
from ..problem.score_features import TENSOR_FEATURES, Modifiers

FORMAT = 1
FILE = "launch.json"
_STRUCTS = (
    *(AITER_ARGUMENTS, JITFMHA_ARGUMENTS, COMPILED_ARGUMENTS),
    *(READY_BACKWARD_ARGUMENTS, BACKWARD_ARGUMENTS),
    *(AITER_ROW_SUM_ARGUMENTS, AITER_GRADIENT_ARGUMENTS, AITER_DQ_ARGUMENTS),
)
INTERFACES: Mapping[str, SharedStruct] = {each.name: each for each in _STRUCTS}
"""The argument blocks by name. No two have the same size."""

_ALIGNMENT = 256  # hipMalloc's, which addresses are told apart by


class RecordError(ValueError):
    """A folder that is no recorded launch, or is damaged; the text names place and value."""


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor: what it is called, its form, and where it begins.

    Attributes:
        dtype: torch's name for it.
        region: the index of the region that it lies in.
        offset: bytes from the region's beginning.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    region: int
    offset: int


@dataclass(frozen=True)
class Region:
    """A stretch of memory that tensors lie in, which may overlap.

    Attributes:
        address: where it was.
        size: in bytes.
        file: with its bytes from before the launch; None where they were not kept.
        sha256: of these bytes; None where they were too many to look at.
    """

    address: int
    size: int
    file: str | None
    sha256: str | None


@dataclass(frozen=True)
class RecordedKernel:
    """A kernel that was started.

    Attributes:
        symbol: of the kernel. code_object: its file.
        sha256: of that.
        grid: workgroups. block: threads of each.
        dynamic_lds: bytes.
        interface: the name of the argument block in ``INTERFACES``.
        kernarg: the block.
    """

    symbol: str
    code_object: str
    sha256: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_lds: int
    interface: str
    kernarg: bytes

    def values(self) -> dict[str, float]:
        """The kernel's arguments by their names."""
        return unpacked(INTERFACES[self.interface], self.kernarg)


@dataclass(frozen=True)
class RecordedResult:
    """What a tensor held in the end, contiguous.

    Attributes:
        file: None where the bytes were not kept.
        sha256: None where they were too many to look at.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str | None
    sha256: str | None


@dataclass(frozen=True)
class Record:
    """One launch.

    Attributes:
        folder: that it is in.
        arch: gfx942 or gfx950.
        chip: as "MI308X".
        family: of kernels.
        rows: what is known of each kernel beside its code, by symbol.
        max_seqlens: the longest sequences that the caller told, of q and k; None: it did not.
        tensors: by name. results: by name.
    """

    folder: Path
    arch: str
    chip: str
    family: str
    problem: Problem
    rows: Mapping[str, Mapping[str, Any]]
    max_seqlens: tuple[int | None, int | None]
    tensors: Mapping[str, RecordedTensor]
    regions: tuple[Region, ...]
    kernels: tuple[RecordedKernel, ...]
    results: Mapping[str, RecordedResult] = field(default_factory=dict)

    def image(self, kernel: RecordedKernel) -> bytes:
        """The code object as it is in the folder now."""
        return read_regular_file(self.folder / kernel.code_object)


def unpacked(interface: SharedStruct, block: bytes) -> dict[str, float]:
    """The values of an argument block by name."""
    return dict(zip(interface.leaves, interface.packer.unpack(block), strict=True))


def packed(interface: SharedStruct, values: Mapping[str, float]) -> bytes:
    """Pack values, by their names, into the bytes of an argument block."""
    return interface.packer.pack(*(values[name] for name in interface.leaves))


# ---- Named tensors -------------------------------------------------------------------------------


def named_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """What a launch is given, by name. Padded sums that are the plain ones have no name."""
    sums = tensors.cu_seqlens
    modifiers, dropout = tensors.modifiers or Modifiers(), tensors.dropout
    descales, keys = tensors.descales or Descales(), tensors.keys or KeyOptions()
    gradients = tensors.gradients._asdict() if tensors.gradients is not None else {}
    named: dict[str, Tensor | None] = {
        **{name: getattr(tensors, name) for name in ("q", "k", "v", "out", "lse")},
        **(dict(sums.named()) if sums is not None else {}),
        **{f"{name}_descale": x for name, x in descales._asdict().items()},
        **{row.name: getattr(modifiers, row.name) for row in TENSOR_FEATURES},
        "rng_state": None if dropout is None else dropout.rng_state,
        "block_table": keys.block_table,
        **gradients,
    }
    if sums is not None and sums.q_padded is sums.q:
        del named["cu_seqlens_q_padded"]
    if sums is not None and sums.k_padded is sums.k:
        del named["cu_seqlens_k_padded"]
    return {name: x for name, x in named.items() if x is not None}


def tensors_of(
    named: Mapping[str, Tensor], problem: Problem, max_seqlens: tuple[int | None, int | None]
) -> Tensors:
    """Gather a launch's ``Tensors`` from named ones, which is what ``named_tensors`` undoes."""
    sums = None
    if problem.mode == "gm1":
        q, k = named["cu_seqlens_q"], named["cu_seqlens_k"]
        padded = (
            named.get("cu_seqlens_q_padded", q),
            named.get("cu_seqlens_k_padded", k),
        )
        sums = CuSeqlens(q, k, *padded, *max_seqlens)
    scales = [named.get(f"{name}_descale") for name in Descales._fields]
    tensors = {row.name: named.get(row.name) for row in TENSOR_FEATURES}
    modifiers = Modifiers(**{**problem.modifiers._asdict(), **tensors})
    gradients = None
    if problem.gradients is not None:
        gradients = Gradients(
            dout=named["dout"],
            dlse=named.get("dlse"),
            dq=named["dq"],
            dk=named["dk"],
            dv=named["dv"],
            dbias=named.get("dbias"),
        )
    dropout = Dropout(problem.dropout_p, named["rng_state"]) if problem.dropout_p else None
    return Tensors(
        *(named["q"], named["k"], named["v"], named["out"], named.get("lse"), sums),
        *(Descales(*scales), modifiers, dropout, gradients),
        KeyOptions(named.get("block_table"), problem.num_splits),
    )


# ---- Writing -------------------------------------------------------------------------------------


def publish(
    parent: Path, name: str, record: Record, files: Mapping[str, bytes | bytearray]
) -> Path:
    """Write a folder below ``parent``, where it appears by one rename; returns its place.

    Raises:
        OSError: it cannot be written; nothing is left.
    """
    parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=parent))
    try:
        for file, content in files.items():
            (unfinished / file).write_bytes(content)
        (unfinished / FILE).write_text(json.dumps(_document(record), indent=1) + "\n")
        os.rename(unfinished, parent / name)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return parent / name


def _document(record: Record) -> dict[str, Any]:
    return {
        "format": FORMAT,
        **{name: getattr(record, name) for name in ("arch", "chip", "family", "rows")},
        "problem": _plain(record.problem),
        "max_seqlens": list(record.max_seqlens),
        "tensors": {name: asdict(each) for name, each in record.tensors.items()},
        "regions": [asdict(each) for each in record.regions],
        "kernels": [_described_kernel(each, record) for each in record.kernels],
        "results": {name: asdict(each) for name, each in record.results.items()},
    }


def _plain(value: Any) -> Any:
    """Nested tuples with names as objects, others as lists."""
    if hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _described_kernel(kernel: RecordedKernel, record: Record) -> dict[str, Any]:
    described = asdict(kernel)
    del described["kernarg"]
    values = kernel.values()
    arguments = []
    for name, (at, letter) in INTERFACES[kernel.interface].leaves.items():
        size = struct.calcsize(f"={letter}")
        one: dict[str, Any] = {"name": name, "offset": at, "value": json_number(values[name])}
        if letter == "Q":
            one["points to"] = where_is(record, int(values[name]))
        arguments.append(one | {"bytes": kernel.kernarg[at : at + size].hex()})
    return described | {"arguments": arguments}


def json_number(value: float) -> float | str:
    """A number as JSON has it: what is not finite is text."""
    return value if isinstance(value, int) or math.isfinite(value) else str(value)


def where_is(record: Record, address: int) -> str | None:
    """What begins at an address, or what it lies in; None for null and for what is nowhere."""
    inside = None
    for name, each in record.tensors.items():
        begin = record.regions[each.region].address + each.offset
        if begin == address and address:
            return name
        if begin <= address < begin + extent_bytes(each):
            inside = f"{name} + {address - begin}"
    return inside


def extent_bytes(tensor: RecordedTensor) -> int:
    """Count the bytes from a tensor's first element to the end of its last one."""
    if 0 in tensor.shape:
        return 0
    steps = zip(tensor.shape, tensor.strides, strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return (last + 1) * dtype_named(tensor.dtype).itemsize


def dtype_named(name: str) -> torch.dtype:
    """Torch's dtype of that name. Raises ``RecordError`` where there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise RecordError(f"dtype {name!r} is none that torch has")
    return found


def view_of(tensor: RecordedTensor, regions: Sequence[Tensor]) -> Tensor:
    """The tensor in regions of uint8, which lie where they lay but for a distance."""
    dtype = dtype_named(tensor.dtype)
    end = tensor.offset + extent_bytes(tensor)
    typed = regions[tensor.region][tensor.offset : end].view(dtype)
    return typed.as_strided(tensor.shape, tensor.strides, typed.storage_offset())
