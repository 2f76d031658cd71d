"""The published-times suite's points of decode: AITER's kernel for paged keys.

No call of `fmha_fwd` takes it, so its code object is launched as AITER's `asm_pa.cu` does that.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from jitfmha.emulator import DEVICES, Emulator
from jitfmha.emulator.profile import LaunchProfile, profile_launch

from .modelled_call import estimate_of

_FILE = Path(__file__).with_name("published_times.json")
_ARCH, _NAME = "gfx950", "pa_bf16_noquant_gqa16_1tg_4w"
_HEADS_K, _GROUP, _HDIM, _PAGE = 2, 16, 128, 16
_THREADS = 256
# All workgroups have the same to do.
_SAMPLE = 1


@dataclass(frozen=True)
class DecodePoint:
    """One published figure: one query of each sequence, whose lengths are alike.

    Attributes:
        keys: of each sequence.
        seconds: measured.
    """

    batch: int
    keys: int
    seconds: float

    def __str__(self) -> str:
        heads = f"{_GROUP * _HEADS_K}/{_HEADS_K}"
        return f"AITER's pull request 4794, {_ARCH} decode, ({self.batch}, {heads}, {self.keys})"


def points() -> Iterator[DecodePoint]:
    """All published figures of the kernel; nothing is fitted to them."""
    for batch, keys, microseconds in json.loads(_FILE.read_text())["aiter_decode"]["rows"]:
        yield DecodePoint(batch, keys, microseconds / 1e6)


def modelled_seconds(point: DecodePoint, tree: Path) -> float:
    """By the code object in AITER's ``tree``; ``FileNotFoundError`` where it has none."""
    return estimate_of(_profile(point.batch, point.keys, tree)).seconds


@cache
def _emulator() -> Emulator:
    return Emulator("profile")


def _profile(batch: int, keys: int, tree: Path) -> LaunchProfile:
    pages_of_each = keys // _PAGE
    q, out = (np.zeros((batch, _GROUP * _HEADS_K, _HDIM), np.uint16) for _ in range(2))
    # Zeros, which no memory is touched for: what they are changes no cost.
    pages = (batch * pages_of_each, _HEADS_K, _PAGE, _HDIM)
    k, v = (np.zeros(pages, np.uint16) for _ in range(2))
    table = np.arange(pages[0], dtype=np.int32)
    lengths = np.full(batch, keys, np.int32)
    tensors = (out, q, k, v, table, lengths)
    of_head = _PAGE * _HDIM * k.itemsize
    fields = [struct.pack("<Q", each.ctypes.data) for each in tensors]
    fields += [bytes(8)] * 2  # scales, of 8-bit keys and values
    fields += [struct.pack("<f", np.log2(np.e) / np.sqrt(_HDIM))]
    numbers = (
        *(pages_of_each, _HEADS_K, _GROUP * _HEADS_K * _HDIM * q.itemsize),
        *(_HEADS_K * of_head, of_head, 0, _GROUP),
    )
    fields += [struct.pack("<I", number) for number in numbers]
    fields += [bytes(8)]  # offsets of the queries, where a sequence has several
    kernarg = b"".join(field.ljust(16, b"\0") for field in fields)
    code_object = (tree / _ARCH / "pa" / f"{_NAME}.co").read_bytes()
    symbol = f"_ZN5aiter{len(_NAME)}{_NAME}E"
    with _emulator().loaded(code_object, DEVICES[_ARCH], symbol) as function:
        return profile_launch(
            _emulator(),
            function,
            (_HEADS_K, batch, 1),
            (_THREADS, 1, 1),
            kernarg,
            memory=[(each.ctypes.data, each.nbytes) for each in tensors],
            sample=_SAMPLE,
            run_sample_only=True,
        )
