"""Reads a recorded launch from its folder; every field is checked before anything is made of it."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..amd.chips import chips
from ..call.backward import BackwardArguments, make_backward_problem
from ..call.record import (
    FILE,
    FORMAT,
    INTERFACES,
    Record,
    RecordedKernel,
    RecordError,
    dtype_named,
    extent_bytes,
    json_number,
    tensors_of,
)
from ..jit.regular_file import path_inside, read_regular_file
from ..problem.arguments import (
    Arguments,
    Descales,
    KeyOptions,
    Tensors,
    gather_cu_seqlens,
    gather_descales,
    gather_dropout,
    gather_keys,
)
from ..problem.mask import INT64_MAX
from ..problem.problem import Problem, make_problem
from ..problem.score_features import gather_modifiers
from ..problem.typed_json import FieldError, fields, hints_of, typed

_LARGEST_REGION = 1 << 40


def read_record(folder: Path) -> Record:
    """Read a folder and check that it is whole.

    Raises ``RecordError`` where it is no recorded launch, or a part is missing, damaged or
    contradicts another. A code object may have been replaced: who runs it again says so.
    """
    path = folder / FILE
    try:
        document = json.loads(read_regular_file(path))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else document
        raise RecordError(f"{path} has format {found!r:.60}, expected {FORMAT}")
    try:
        record = _record(folder, document)
        _check_places(record)
        _check_problem(record)
    except (FieldError, RecordError) as error:
        raise RecordError(f"{path} is damaged: {error}") from error
    _check_files(record)
    return record


def _record(folder: Path, document: dict[str, Any]) -> Record:
    hints = {**hints_of(Record), "format": int, "kernels": tuple[_KernelDocument, ...]}
    del hints["folder"]
    known = fields(hints, document, "")
    del known["format"]
    known["kernels"] = tuple(_kernel(f"kernels[{i}]", x) for i, x in enumerate(known["kernels"]))
    for symbol, row in known["rows"].items():
        for name in _COUNTS & row.keys():
            place = f"rows.{symbol}.{name}"
            if typed(int, row[name], place) <= 0:
                raise FieldError(f"{place} is {row[name]}, not a number of rows or threads")
    return Record(folder=folder, **known)


_COUNTS = {"ts_qo", "ts_kv", "ts", "threads"}


class _ArgumentDocument(NamedTuple):
    """An argument of a kernel, as the file has it, but for what it points to."""

    name: str
    offset: int
    value: int | float | str
    bytes: str


_OF_ARGUMENT = {"name": str, "offset": int, "value": int | float | str, "bytes": str}


class _KernelDocument(NamedTuple):
    """A kernel, as the file has it."""

    symbol: str
    code_object: str
    sha256: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_lds: int
    interface: str
    arguments: tuple[Mapping[str, Any], ...]


def _kernel(where: str, known: _KernelDocument) -> RecordedKernel:
    if known.interface not in INTERFACES:
        raise FieldError(f"{where}.interface is {known.interface!r:.60}, which is not known")
    for name, extent in (("grid", known.grid), ("block", known.block)):
        if not all(0 <= each < 1 << 32 for each in extent):
            raise FieldError(f"{where}.{name} is {extent}, not three integers of 32 bits")
    if any(x * y >= 1 << 32 for x, y in zip(known.grid, known.block, strict=True)):
        raise FieldError(
            f"{where}.grid is {known.grid} with blocks of {known.block}: more than 4294967295 "
            "threads along an axis, which no runtime starts"
        )
    if not 0 <= known.dynamic_lds < 1 << 32:
        raise FieldError(f"{where}.dynamic_lds is {known.dynamic_lds}, not a number of bytes")
    interface = INTERFACES[known.interface]
    arguments = {}
    for i, each in enumerate(known.arguments):
        described = {name: x for name, x in each.items() if name != "points to"}
        one = _ArgumentDocument(**fields(_OF_ARGUMENT, described, f"{where}.arguments[{i}]"))
        arguments[one.name] = one
    block = bytearray(interface.size)
    for name, (at, letter) in interface.leaves.items():
        if name not in arguments:
            raise FieldError(f"{where} has no argument {name}")
        _, offset, told, text = arguments[name]
        try:
            raw = bytes.fromhex(text)
        except ValueError as error:
            raise FieldError(f"{where}: argument {name} has the bytes {text!r:.60}") from error
        if len(raw) != struct.calcsize(f"={letter}") or offset != at:
            raise FieldError(
                f"{where}: argument {name} has {len(raw)} bytes, {raw.hex()}, at {offset}"
            )
        (held,) = struct.unpack(f"={letter}", raw)
        if json_number(held) != told:
            raise FieldError(
                f"{where}: argument {name} has the value {told!r}, and its bytes say {held!r}"
            )
        block[at : at + len(raw)] = raw
    return RecordedKernel(*known[:-1], kernarg=bytes(block))


def _check_places(record: Record) -> None:
    for i, region in enumerate(record.regions):
        if not 0 <= region.size <= _LARGEST_REGION or not 0 <= region.address < 1 << 64:
            raise FieldError(f"regions[{i}] has {region.size} bytes at {region.address}")
    for name, each in record.tensors.items():
        if not 0 <= each.region < len(record.regions):
            raise FieldError(f"tensors.{name} is in region {each.region}, which there is not")
        if len(each.shape) != len(each.strides) or min((*each.shape, *each.strides), default=0) < 0:
            raise FieldError(f"tensors.{name} has shape {each.shape} and strides {each.strides}")
        size = record.regions[each.region].size
        if not 0 <= each.offset <= each.offset + extent_bytes(each) <= size:
            raise FieldError(f"tensors.{name} does not lie in its region of {size} bytes")
    for name, result in record.results.items():
        like = record.tensors.get(name)
        if like is None or (like.dtype, like.shape) != (result.dtype, result.shape):
            raise FieldError(f"results.{name} is {result.dtype} {result.shape}, unlike a tensor")


def _check_problem(record: Record) -> None:
    problem, longest = record.problem, record.max_seqlens
    needed = ["q", "k", "v", "out"]
    needed += ["cu_seqlens_q", "cu_seqlens_k"] if problem.mode == "gm1" else []
    needed += ["rng_state"] if problem.dropout_p else []
    needed += ["dout", "lse", "dq", "dk", "dv"] if problem.gradients is not None else []
    missing = [name for name in needed if name not in record.tensors]
    if missing:
        raise FieldError(f"tensors has no {', '.join(missing)}")
    sides = [side for side in (problem.mask.left, problem.mask.right) if side is not None]
    if not all(0 <= side <= INT64_MAX for side in sides):
        raise FieldError(f"problem.mask is {problem.mask}")
    if not any((x.name, x.architecture.name) == (record.chip, record.arch) for x in chips()):
        raise FieldError(f"no chip of arch {record.arch!r:.60} is called chip {record.chip!r:.60}")
    try:
        named = {
            name: torch.empty_strided(
                each.shape, each.strides, dtype=dtype_named(each.dtype), device="meta"
            )
            for name, each in record.tensors.items()
        }
        implied = _problem_of(tensors_of(named, problem, longest), problem)
    except (TypeError, ValueError, NotImplementedError, RuntimeError, OverflowError) as error:
        raise FieldError(f"what the call was asked for is refused: {error}") from error
    for name, told, found in zip(Problem._fields, problem, implied, strict=True):
        if told != found:
            raise FieldError(f"problem.{name} is {told!r:.60}, and the tensors say {found!r:.60}")


def _problem_of(tensors: Tensors, told: Problem) -> Problem:
    """What a call with these tensors asks for, and with the numbers that the problem tells."""
    sums = tensors.cu_seqlens
    cu_seqlens = None if sums is None else gather_cu_seqlens(*sums)
    modifiers = None if tensors.modifiers is None else tensors.modifiers._asdict()
    dropout = tensors.dropout or (told.dropout_p, None)
    keys = tensors.keys or KeyOptions()
    forward = Arguments(
        *(tensors.q, tensors.k, tensors.v, told.softmax_scale, told.mask),
        return_lse=told.has_lse,
        out=tensors.out,
        cu_seqlens=cu_seqlens,
        bf16_cvt=told.bf16_cvt,
        descales=gather_descales(*(tensors.descales or Descales())),
        modifiers=gather_modifiers(modifiers or {}),
        dropout=gather_dropout(dropout[0], None, dropout[1]),
        keys=gather_keys(keys.block_table, keys.num_splits, cu_seqlens),
    )
    if tensors.gradients is None or tensors.lse is None:
        if told.has_lse != (tensors.lse is not None):
            raise ValueError(f"problem.has_lse is {told.has_lse}")
        return make_problem(forward).with_unevenness(cu_seqlens)
    dout, dlse, dq, dk, dv, _ = tensors.gradients
    backward = BackwardArguments(forward, tensors.lse, dout, dlse, dq, dk, dv)
    return make_backward_problem(
        backward._replace(deterministic=told.is_deterministic, atomic_fp32=told.atomic_fp32)
    )


def _check_files(record: Record) -> None:
    for kernel in record.kernels:
        _contained(record.folder, kernel.code_object, None, None)
    for i, region in enumerate(record.regions):
        if region.file is not None:
            _contained(record.folder, region.file, region.size, region.sha256, f"regions[{i}]")
    for name, result in record.results.items():
        if result.file is not None:
            size = math.prod(result.shape) * dtype_named(result.dtype).itemsize
            _contained(record.folder, result.file, size, result.sha256, f"results.{name}")


def _contained(
    folder: Path, file: str, size: int | None, sha256: str | None, where: str = "kernels"
) -> None:
    if not isinstance(file, str) or Path(file).name != file:
        raise RecordError(
            f"{folder / FILE}: {where} names {file!r:.100}, which is not in the folder"
        )
    try:
        path = path_inside(folder, file)
    except ValueError as error:
        raise RecordError(f"{folder / FILE}: {where} names {error}") from error
    try:
        content = read_regular_file(path, _LARGEST_REGION)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from error
    if size is not None and len(content) != size:
        raise RecordError(f"{path} has {len(content)} bytes, and {where} says {size}")
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise RecordError(f"{path} is damaged: its SHA-256 is not what {where} says")
