"""The host launcher of the tuned kernels: rendered for a tree, chip and mode, built, and bound.

The launcher is C++ (``csrc_templates/amd/fmha_fwd_launcher.cpp.in``). It packs the kernels'
arguments and goes to whichever HIP runtime it is given: the one that torch uses, or the emulator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..problem import DescaleStrides, Problem, Strides
from ..target import AmdTarget, Chip
from .code_object import CodeObject, CodeObjectError, read_code_object
from .manifest import KernelRow, Tree
from .runtime import HipError, loaded_runtime

CuSeqlens = tuple[Tensor, Tensor, Tensor, Tensor]
Descales = tuple[Tensor | None, Tensor | None, Tensor | None]

KERNARG_BYTES = 656
_TEMPLATE = "amd/fmha_fwd_launcher.cpp.in"
# Fewer key tiles for a part would cost more in reading and writing parts than they save.
_LEAST_KEY_TILES = 4
_INPUT_BYTES = {"bf16": 2, "fp16": 2, "fp8bf16": 1}
_MODES = ("gm0", "gm1")


@lru_cache(maxsize=64)
def launcher_spec(tree: Tree, chip: Chip, mode: str) -> jit.BuildSpec:
    """The source and the flags of the launcher for one mode of a tree's kernels."""
    rows = rows_of(tree, mode)
    values = {
        "origin": f"Rendered from csrc_templates/{_TEMPLATE} for {chip}, {mode}.",
        "chip": chip,
        "is_gfx942": str(chip != "MI350").lower(),
        "is_group_mode": str(mode == "gm1").lower(),
        "code_objects": "\n".join(
            f'    {{"{row.file}", "{row.symbol}", "{row.combine_symbol or ""}", '
            f"{row.hdim_q}, {row.hdim_v}, {row.mask}, "
            f"{_INPUT_BYTES[row.dtype]}, {row.ts_qo}, {threads_of(tree, row)}}},"
            for row in rows
        ),
        "kernarg_bytes": KERNARG_BYTES,
    }
    return jit.BuildSpec(
        name=f"amd_fwd_{chip.lower()}_{mode}",
        sources={"fmha_fwd_launcher.cpp": jit.render(_TEMPLATE, values)},
        cflags=("-std=c++17", "-O2", "-fvisibility=hidden"),
        ldflags=("-ldl",),
        why=f"the first call in {mode} on an {chip} with {tree}",
    )


def rows_of(tree: Tree, mode: str) -> list[KernelRow]:
    """The rows of one mode, in the order in which the launcher knows them."""
    return [row for row in tree.rows if _MODES[row.mode] == mode]


def threads_of(tree: Tree, row: KernelRow) -> int:
    """Threads of a workgroup of a kernel.

    A plain manifest does not say; its kernels have one size for each head dimension. In ours a
    wave of 64 threads takes 32 rows of q.
    """
    if tree.is_shipped:
        return 2 * row.ts_qo
    return 256 if (row.hdim_q, row.hdim_v) == (192, 128) else 512


@lru_cache(maxsize=512)
def checked_code_object(tree: Tree, row: KernelRow, target_arch: str) -> CodeObject | str:
    """The code object of a row after all checks, or the sentence that says why it fails them."""
    try:
        return read_code_object(
            tree.folder / row.file,
            arch=target_arch,
            symbol=row.symbol,
            threads=threads_of(tree, row),
            kernarg_bytes=KERNARG_BYTES,
            sha256=row.sha256,
            combine_symbol=row.combine_symbol,
        )
    except CodeObjectError as error:
        return f"{tree}: {error}"


@dataclass(frozen=True)
class KeySplit:
    """How keys are split among workgroups where query tiles alone would leave units idle.

    Attributes:
        sequences: batch times query heads.
        ts_qo: rows of q in a tile.
        key_tiles: of the longest sequence, or in gm1 of one of average length.
        slots: workgroups that the GPU runs at a time.
        hdim_v: columns of a part's output.
    """

    sequences: int
    ts_qo: int
    key_tiles: int
    slots: int
    hdim_v: int

    def parts(self, rows: int) -> int:
        """Parts of the keys for query sequences of up to ``rows``; 1: keys are not split."""
        workgroups = self.sequences * -(-rows // self.ts_qo)
        if workgroups == 0:
            return 1
        # Each part more makes parts shorter but takes `combine` longer, which merges them one after
        # another: by the cost model about as long as half a tile of keys.
        quickest = isqrt(2 * self.key_tiles)
        most = min(quickest, self.key_tiles // _LEAST_KEY_TILES)
        return max(1, min(self.slots // workgroups, most))

    def floats(self, rows: int, parts: int) -> int:
        """The size of what parts leave: for each query the output, its maximum and its sum.

        A wave of 64 lanes has 32 queries: the last two are there twice.
        """
        waves = self.ts_qo // 32
        tiles = self.sequences * -(-rows // self.ts_qo)
        return tiles * parts * waves * 64 * (self.hdim_v // 2 + 2)


class Partial(NamedTuple):
    """How many parts the keys are split into, and the memory for what these leave, in float32."""

    memory: Tensor
    parts: int


def key_split_of(problem: Problem, target: AmdTarget, row: KernelRow, threads: int) -> KeySplit:
    """The split for a problem on a GPU; two workgroups of four waves share a unit."""
    rows_k = problem.seqlen_k
    if problem.mode == "gm1":
        rows_k //= max(problem.batch, 1)
    return KeySplit(
        sequences=problem.batch * problem.heads_q,
        ts_qo=row.ts_qo,
        key_tiles=-(-rows_k // row.ts_kv),
        slots=target.compute_units * (512 // threads),
        hdim_v=row.hdim_v,
    )


class AmdLaunch:
    """A loaded kernel with the constants of one problem."""

    __slots__ = (
        *("_bound", "_bound_address", "_device", "_entry"),
        *("_is_fp8", "_launcher", "_ones", "_rows", "_split", "_stream_of"),
    )

    def __init__(
        self,
        problem: Problem,
        target: AmdTarget,
        tree: Tree,
        row: KernelRow,
        code_object: CodeObject,
        *,
        runtime_path: str,
        stream_of: Callable[[int], int | None],
    ) -> None:
        launcher = _launcher(launcher_spec(tree, target.chip, problem.mode))
        index = rows_of(tree, problem.mode).index(row)
        runtime = launcher.jitfmha_open_runtime(runtime_path.encode())
        if not runtime:
            raise HipError(-1, _last_error(launcher))
        function, combine = ctypes.c_void_p(), ctypes.c_void_p()
        status = launcher.jitfmha_load(
            *(runtime, target.device_index, index, code_object.image, len(code_object.image)),
            *(ctypes.byref(function), ctypes.byref(combine)),
        )
        if status != 0:
            raise HipError(status, _last_error(launcher))
        self._launcher = launcher
        self._entry = launcher.jitfmha_fwd
        self._device = target.device_index
        self._stream_of = stream_of
        self._is_fp8 = problem.is_fp8
        self._rows = problem.seqlen_q
        self._ones: Tensor | None = None
        self._split = None
        if row.combine_symbol is not None:
            split = key_split_of(problem, target, row, threads_of(tree, row))
            # More rows make more tiles: where one tile for each sequence is enough, all are.
            if split.parts(problem.seqlen_q if problem.mode == "gm0" else 1) > 1:
                self._split = split
        self._bound = _BoundKernel(
            runtime, function, combine, target.device_index, index, _launch_problem(problem)
        )
        self._bound_address = ctypes.addressof(self._bound)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        cu_seqlens: CuSeqlens | None,
        max_seqlen_q: int | None,
        descales: Descales | None,
        partial: Partial | None = None,
    ) -> None:
        """Start the kernel on torch's current stream; ``out`` and ``lse`` are written later.

        ``partial`` is what :meth:`new_partial` gives, where the caller has asked for it already.
        """
        scale_q = scale_k = scale_v = None
        if self._is_fp8:
            scale_q, scale_k, scale_v = (x.data_ptr() for x in self.complete(descales, q.device))
        longest = 0
        ends_q = ends_k = starts_q = starts_k = None
        if cu_seqlens is not None:
            # No sequence is longer than all rows together; workgroups without a tile end at once.
            longest = self._rows
            if max_seqlen_q is not None and max_seqlen_q < longest:
                longest = max_seqlen_q
            plain_q, plain_k, padded_q, padded_k = cu_seqlens
            ends_q, ends_k = plain_q.data_ptr(), plain_k.data_ptr()
            starts_q = ends_q if padded_q is plain_q else padded_q.data_ptr()
            starts_k = ends_k if padded_k is plain_k else padded_k.data_ptr()
        if partial is None and self._split is not None:
            partial = self.new_partial(q, max_seqlen_q)
        status = self._entry(
            self._bound_address,
            self._stream_of(self._device),
            longest,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            None if lse is None else lse.data_ptr(),
            scale_q,
            scale_k,
            scale_v,
            ends_q,
            ends_k,
            starts_q,
            starts_k,
            None if partial is None else partial.memory.data_ptr(),
            1 if partial is None else partial.parts,
        )
        if status != 0:
            raise HipError(status, _last_error(self._launcher))

    def new_partial(self, q: Tensor, max_seqlen_q: int | None) -> Partial | None:
        """The parts of the keys and room for them, or None where keys are not split."""
        if self._split is None:
            return None
        rows = self._rows if max_seqlen_q is None else min(self._rows, max_seqlen_q)
        parts = self._split.parts(rows)
        if parts == 1:
            return None
        memory = q.new_empty(self._split.floats(rows, parts), dtype=torch.float32)
        return Partial(memory, parts)

    def complete(self, descales: Descales | None, device: torch.device) -> tuple[Tensor, ...]:
        """The scales of fp8 inputs, with 1 in place of those that were not given."""
        ones = self._ones
        if ones is None:
            ones = self._ones = torch.ones(1, dtype=torch.float32, device=device)
        return tuple([ones if x is None else x for x in descales or _NO_DESCALES])


def bind(
    problem: Problem, target: AmdTarget, tree: Tree, row: KernelRow, code_object: CodeObject
) -> Callable[..., None]:
    """Build, load and bind whatever a launch needs and is not there yet."""
    if target.emulation is not None:
        # Imported here because a machine with a GPU has no use for the emulator.
        from ..emulated_launch import EmulatedLaunch

        return EmulatedLaunch(problem, target, tree, row, code_object)
    return AmdLaunch(
        problem,
        target,
        tree,
        row,
        code_object,
        runtime_path=loaded_runtime()._name,
        stream_of=torch._C._cuda_getCurrentRawStream,
    )


_NO_DESCALES = (None, None, None)


class _Strides(ctypes.Structure):
    """``Strides`` of the template, in elements."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "seq", "head")]


class _Problem(ctypes.Structure):
    """``Problem`` of the template."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads_q", "heads_k")),
        *((name, ctypes.c_int64) for name in ("seqlen_q", "seqlen_k")),
        *((name, _Strides) for name in ("q", "k", "v", "o")),
        *((name, _Strides) for name in ("q_descale", "k_descale", "v_descale")),
        ("lse_head", ctypes.c_int64),
        ("softmax_scale", ctypes.c_float),
    ]


class _BoundKernel(ctypes.Structure):
    """``BoundKernel`` of the template."""

    _fields_ = [
        ("runtime", ctypes.c_void_p),
        ("function", ctypes.c_void_p),
        ("combine", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("code_object", ctypes.c_int32),
        ("problem", _Problem),
    ]


def _launch_problem(problem: Problem) -> _Problem:
    return _Problem(
        batch=problem.batch,
        heads_q=problem.heads_q,
        heads_k=problem.heads_k,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        q=_strides(problem.q),
        k=_strides(problem.k),
        v=_strides(problem.v),
        o=_strides(problem.out),
        q_descale=_descale_strides(problem.q_descale),
        k_descale=_descale_strides(problem.k_descale),
        v_descale=_descale_strides(problem.v_descale),
        lse_head=problem.seqlen_q,
        softmax_scale=problem.softmax_scale,
    )


def _strides(strides: Strides) -> _Strides:
    return _Strides(strides.batch, strides.seq, strides.head)


def _descale_strides(strides: DescaleStrides | None) -> _Strides:
    batch, head = strides or (0, 0)
    return _Strides(batch, 0, head)


def _launcher(spec: jit.BuildSpec) -> ctypes.CDLL:
    """The loaded library; its functions get their types, or ctypes would cut pointers in half."""
    library = jit.load(spec)
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    for name, result, arguments in (
        ("jitfmha_last_error", ctypes.c_char_p, []),
        ("jitfmha_open_runtime", pointer, [ctypes.c_char_p]),
        (
            "jitfmha_load",
            integer,
            [pointer, integer, integer, ctypes.c_char_p, ctypes.c_size_t, pointer, pointer],
        ),
        (
            "jitfmha_fwd",
            integer,
            [pointer, pointer, ctypes.c_int64, *[pointer] * 13, ctypes.c_int32],
        ),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def _last_error(launcher: ctypes.CDLL) -> str:
    text: bytes = launcher.jitfmha_last_error()
    return text.decode(errors="replace")
