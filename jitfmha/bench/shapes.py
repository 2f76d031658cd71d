"""The problems of ``python -m jitfmha bench --shapes``: in text, in files, and named sets."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from ..problem.dtypes import DTYPE_NAMES
from ..problem.problem import MAX_HDIM

_DTYPES = {DTYPE_NAMES[dtype]: dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
_NUMBERS = ("batch", "heads", "kv_heads", "seqlen", "seqlen_k", "hdim", "hdim_v")
_MASKS = ("none", "causal")
_DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Shape:
    """One dense problem.

    Attributes:
        batch: number of sequences.
        heads, kv_heads: of queries, of keys and values; ``heads`` is a multiple of ``kv_heads``.
        seqlen, seqlen_k: rows of queries, of keys and values.
        hdim, hdim_v: head dimension of queries and keys, of values.
        dtype: ``bf16``, ``fp16`` or ``fp32``.
        mask: ``none`` or ``causal`` (bottom-right).
        direction: ``forward``, or ``backward``: the gradients of q, k and v alone.
    """

    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    seqlen: int = 1024
    seqlen_k: int = 1024
    hdim: int = 128
    hdim_v: int = 128
    dtype: str = "bf16"
    mask: str = "none"
    direction: str = "forward"

    def __str__(self) -> str:
        seqlens = _once_or_both(self.seqlen, self.seqlen_k)
        heads, hdims = _once_or_both(self.heads, self.kv_heads), _once_or_both(*self.hdims)
        sizes = f"batch {self.batch}, seqlen {seqlens}, heads {heads}, hdim {hdims}"
        return ", ".join((sizes, self.dtype, *self._unusual()))

    def _unusual(self) -> list[str]:
        causal = [self.mask] if self.is_causal else []
        return causal if self.direction == "forward" else [*causal, self.direction]

    @property
    def hdims(self) -> tuple[int, int]:
        return self.hdim, self.hdim_v

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def is_causal(self) -> bool:
        return self.mask == "causal"

    @property
    def flops(self) -> float:
        """Of the matrix products on the pairs that the mask leaves: two products, or five in
        backward.
        """
        per_pair = 2 * (self.hdim + self.hdim_v)
        if self.direction == "backward":
            per_pair = 2 * (3 * self.hdim + 2 * self.hdim_v)
        return float(self.batch * self.heads * self._pairs() * per_pair)

    def _pairs(self) -> int:
        if not self.is_causal:
            return self.seqlen * self.seqlen_k
        hidden = max(self.seqlen - self.seqlen_k, 0)  # queries that see no key
        first = max(self.seqlen_k - self.seqlen, 0) + 1
        rows = self.seqlen - hidden
        return rows * (first + self.seqlen_k) // 2

    @property
    def bytes(self) -> int:
        """What has to be read and written once: inputs and results, without the lse."""
        of_queries = self.batch * self.seqlen * self.heads * (self.hdim + self.hdim_v)
        of_keys = self.batch * self.seqlen_k * self.kv_heads * (self.hdim + self.hdim_v)
        # Backward reads q, k, v, out and dout, and writes dq, dk and dv.
        times = 2 if self.direction == "backward" else 1
        return times * (of_queries + of_keys) * self.torch_dtype.itemsize


def _once_or_both(first: int, second: int) -> str:
    return str(first) if first == second else f"{first}/{second}"


_SEQLENS = tuple(Shape(seqlen=n, seqlen_k=n) for n in (256, 512, 1024, 2048, 4096))
NAMED_SHAPES = {
    "seqlens": _SEQLENS,
    "causal": tuple(replace(shape, mask="causal") for shape in _SEQLENS),
    "training": tuple(replace(shape, mask="causal", direction="backward") for shape in _SEQLENS),
    "decode": tuple(
        Shape(batch=8, heads=32, kv_heads=8, seqlen=1, seqlen_k=n) for n in (512, 2048, 8192)
    ),
}


def shapes_of(text: str) -> tuple[Shape, ...]:
    """What one argument of ``--shapes`` stands for.

    It is the name of a set of ``NAMED_SHAPES``; ``@FILE``, with a shape on each line, empty lines
    and what follows ``#`` left out; or one shape, such as
    ``batch=2,heads=16,kv_heads=4,seqlen=4096,hdim=64,dtype=fp16,mask=causal``. What is left out is
    as in :class:`Shape`; ``kv_heads`` is then ``heads``, ``seqlen_k`` ``seqlen``, ``hdim_v``
    ``hdim``.

    Raises:
        ValueError: it is none of these; the text names the value, and the line of a file.
        OSError: the file cannot be read.
    """
    if text.startswith("@"):
        return _of_file(Path(text[1:]))
    if text in NAMED_SHAPES:
        return NAMED_SHAPES[text]
    return (_shape(text),)


def _of_file(file: Path) -> tuple[Shape, ...]:
    shapes: list[Shape] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            shapes.append(_shape(text))
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
    if not shapes:
        raise ValueError(f"{file} has no shape")
    return tuple(shapes)


def _shape(text: str) -> Shape:
    known = [field.name for field in fields(Shape)]
    values: dict[str, str] = {}
    for part in text.split(","):
        name, is_named, value = (piece.strip() for piece in part.partition("="))
        if not is_named or name not in known:
            sets = ", ".join(NAMED_SHAPES)
            raise ValueError(
                f"{part!r} is not known in the shape {text!r}; use NAME=VALUE of {', '.join(known)}"
                f", a set ({sets}), or @FILE"
            )
        if name in values:
            raise ValueError(f"{name} is given twice in the shape {text!r}")
        values[name] = value
    sizes = {name: _size(name, value) for name, value in values.items() if name in _NUMBERS}
    words = {name: value for name, value in values.items() if name not in _NUMBERS}
    for name, default in (("kv_heads", "heads"), ("seqlen_k", "seqlen"), ("hdim_v", "hdim")):
        if default in sizes:
            sizes.setdefault(name, sizes[default])
    shape = replace(Shape(), **sizes, **words)  # type: ignore[arg-type]
    _check(shape)
    return shape


def _size(name: str, value: str) -> int:
    if not value.isascii() or not value.isdecimal() or not 0 < int(value) < 1 << 31:
        raise ValueError(f"{name}={value!r} is not a number of at least 1")
    return int(value)


def _check(shape: Shape) -> None:
    for name, values in (("dtype", _DTYPES), ("mask", _MASKS), ("direction", _DIRECTIONS)):
        value = getattr(shape, name)
        if value not in values:
            raise ValueError(f"{name}={value!r} is not known; use {', '.join(values)}")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"heads={shape.heads} is not a multiple of kv_heads={shape.kv_heads}")
    for name in ("hdim", "hdim_v"):
        if getattr(shape, name) > MAX_HDIM:
            raise ValueError(f"{name}={getattr(shape, name)} is more than {MAX_HDIM}")
