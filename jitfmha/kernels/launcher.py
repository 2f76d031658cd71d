"""The host launcher of the AMD kernels: rendered, built, and bound to a kernel and a call.

The launcher is C++ (``csrc_templates/amd/launcher``). It packs the kernels' arguments and goes to
whichever HIP runtime it is given: the one that torch uses, or what stands in for it. Each kind of
kernels has one of its own, with nothing in it that is for others. What is launched, and into how
many splits, is planned elsewhere (``kernels/ready``).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..amd.chips import Arch
from ..amd.code_object import CodeObject
from ..amd.kernel_arguments import (
    AITER_ARGUMENTS,
    AITER_DQ_ARGUMENTS,
    AITER_GRADIENT_ARGUMENTS,
    AITER_ROW_SUM_ARGUMENTS,
    BACKWARD_ARGUMENTS,
    COMPILED_ARGUMENTS,
    DIVISOR,
    FEW_SPLITS,
    GRADIENT_TENSORS,
    JITFMHA_ARGUMENTS,
    MODIFIERS,
    READY_BACKWARD_ARGUMENTS,
    ROW_BLOCK,
    SHARE_BEGIN,
    STACKED_HEADS,
    TENSOR_STRIDES,
    WINDOW,
    WORK_COSTS,
    WORK_LIST,
)
from ..amd.manifest import KernelRow
from ..amd.runtime import HipError
from ..jit.shared_struct import (
    BOOL,
    FLOAT,
    INT32,
    INT64,
    Array,
    FieldType,
    Pointer,
    SharedStruct,
    cpp_of,
)
from ..planning.target import AmdTarget
from ..problem.arguments import Descales, Tensors, new_tuple
from ..problem.problem import (
    Direction,
    Mode,
    PlainSizes,
    Problem,
    element_bytes,
)

Block = Literal["aiter", "ready", "compiled"]
"""Whose arguments kernels take: those of AMD's, of ours that come ready, or of compiled ones."""

_STRIDES = SharedStruct("Strides", dict.fromkeys(("batch", "seq", "head", "hdim"), INT64))
_DESCALE_STRIDES = SharedStruct("DescaleStrides", dict.fromkeys(("batch", "head"), INT64))
# What stays the same from call to call.
_CALL: Mapping[str, FieldType] = {
    "kernel": Pointer("const void"),
    **dict.fromkeys(("batch", "heads_q", "heads_k"), INT64),
    **dict.fromkeys(("hdim_q", "hdim_v"), INT32),
    **dict.fromkeys(("q_bytes", "kv_bytes", "out_bytes"), INT32),  # of an element
    "softmax_scale": FLOAT,
}
_FORWARD_CALL: Mapping[str, FieldType] = {
    **_CALL,
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), _DESCALE_STRIDES),
    **dict.fromkeys(("mask", "ts_qo"), INT32),
}
BACKWARD_CALL = SharedStruct("BackwardCall", _CALL)
# In elements, and as torch gives them: strides of dimensions of size 1 may be anything.
SIZES = SharedStruct(
    "Sizes",
    {
        **dict.fromkeys(("seqlen_q", "seqlen_k"), INT64),  # gm1: the packed rows
        **dict.fromkeys(("q", "k", "v", "out"), _STRIDES),
    },
)
TENSORS = SharedStruct(
    "Tensors",
    {
        **dict.fromkeys(("q", "k", "v"), Pointer("const char")),
        "out": Pointer("char"),
        "lse": Pointer("float"),
        "workspace": Pointer("float"),  # of splits; null: there is one
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), Pointer("const int")),
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_k_padded"), Pointer("const int")),
        **dict.fromkeys(("q_descale", "k_descale", "v_descale"), Pointer("const float")),
        "max_seqlen_q": INT64,  # gm1
        "num_splits": INT64,
        # Here, so that the launcher's functions take bytes alone, which ctypes need not convert.
        "stream": Pointer(),
    },
)
# One kernel of a backward pass, and whose rows its workgroups have.
BACKWARD_KERNEL = SharedStruct(
    "LaunchedBackwardKernel",
    {
        "call": BACKWARD_CALL,
        "heads": INT64,  # query heads, or key heads
        "rows": INT64,  # of a workgroup
        "slices": INT64,  # of a gradient's columns, for which there are workgroups each
        "has_rows_of_keys": BOOL,
    },
)
MOST_BACKWARD_KERNELS = 3  # of one pass
# A backward pass that is compiled or this package's own: what stays the same from call to call.
BACKWARD_PASS = SharedStruct(
    "BackwardPass",
    {
        "kernels": Array(BACKWARD_KERNEL, MOST_BACKWARD_KERNELS),
        "kernel_count": INT64,
        "sizes": SIZES,
    },
)
BACKWARD_TENSORS = SharedStruct(
    "BackwardTensors",
    {
        "attention": TENSORS,
        "gradients": GRADIENT_TENSORS,
        # Of ready kernels.
        "dq_sums": Pointer("float"),
        "turns": Pointer("unsigned"),
        # Of compiled kernels.
        "dbias": Pointer("float"),
        "dbias_strides": TENSOR_STRIDES,
        "max_seqlen_k": INT64,  # the longest sequence of keys
    },
)
# A backward pass of AMD's kernels: their arguments but for addresses and what follows from the
# longest sequences, which are of each call.
AITER_BACKWARD = SharedStruct(
    "AiterBackward",
    {
        "row_sum_arguments": AITER_ROW_SUM_ARGUMENTS,
        "gradient_arguments": AITER_GRADIENT_ARGUMENTS,
        "dq_arguments": AITER_DQ_ARGUMENTS,
        **dict.fromkeys(("row_sum_kernel", "gradient_kernel"), Pointer("const void")),
        "dq_kernel": Pointer("const void"),  # null: there is none
        **dict.fromkeys(("batch", "heads"), INT64),
        **dict.fromkeys(("row_sum_rows", "gradient_rows", "dq_rows"), INT64),  # of a workgroup
        "has_tile_pairs": BOOL,
        "has_shuffled_dq": BOOL,  # in tiles of 16 rows
    },
)
AITER_BACKWARD_TENSORS = SharedStruct(
    "AiterBackwardTensors",
    {
        **dict.fromkeys(("q", "k", "v", "out", "dout"), Pointer("const void")),
        **dict.fromkeys(("lse", "row_sums"), Pointer("const void")),
        # What dq is added up in; dq itself where no kernel follows.
        "dq_acc": Pointer("const void"),
        **dict.fromkeys(("dq", "dk", "dv"), Pointer("const void")),
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), Pointer("const void")),
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_k_padded"), Pointer("const void")),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), INT64),
        "stream": Pointer(),
    },
)
_pack_sizes, _pack_tensors = SIZES.packer.pack, TENSORS.packer.pack
_NO_DESCALES = Descales()

SplitsOf = Callable[[int], tuple[int, int]]
"""Longest sequence of q -> num_splits, and how many float32 values the splits leave."""


class LauncherKind(NamedTuple):
    """What a launcher is built for; its source has nothing that is for other kinds."""

    arch: Arch
    mode: Mode
    direction: Direction
    block: Block

    @classmethod
    def of(cls, problem: Problem, target: AmdTarget, block: Block) -> LauncherKind:
        """The kind that launches kernels with that argument block for ``problem``."""
        return cls(target.arch, problem.mode, problem.direction, block)

    @property
    def name(self) -> str:
        """What its function and its file are named after: of every chip the same."""
        return f"{self.direction}_{self.block}_{self.mode}"

    @property
    def call(self) -> SharedStruct:
        """What stays the same from call to call of kernels, other than AMD's of backward."""
        if self.direction == "backward":
            return BACKWARD_CALL
        fields = dict(_FORWARD_CALL)
        if self.block == "aiter":
            fields["workgroup_tiles"] = INT32  # of queries
            if self.mode == "gm0":
                fields["has_heads_first"] = BOOL  # along x; else tiles
        elif self.mode == "gm1":
            fields["slots"] = INT32  # workgroups that the device runs at a time
        if self.block == "compiled":
            fields["stacked_heads"] = INT32  # that are rows of the same tiles
            # That lists the work of persistent workgroups; null: the others have a task each.
            fields["list_kernel"] = Pointer("const void")
            fields["list_workgroups"] = INT32
            fields["list_costs"] = WORK_COSTS
        return SharedStruct("Call", fields)


_OF_FORWARD = (_STRIDES, _DESCALE_STRIDES, SIZES, TENSORS)
_OF_BACKWARD = (
    *(_STRIDES, SIZES, TENSORS),
    *(BACKWARD_CALL, BACKWARD_KERNEL, BACKWARD_PASS, BACKWARD_TENSORS),
)
_STRUCTS: Mapping[tuple[Direction, Block], tuple[SharedStruct, ...]] = {
    ("forward", "aiter"): (AITER_ARGUMENTS, *_OF_FORWARD),
    ("forward", "ready"): (DIVISOR, JITFMHA_ARGUMENTS, *_OF_FORWARD),
    ("forward", "compiled"): (
        *(DIVISOR, JITFMHA_ARGUMENTS, MODIFIERS, STACKED_HEADS),
        *(ROW_BLOCK, SHARE_BEGIN, WORK_COSTS, WORK_LIST, COMPILED_ARGUMENTS),
        *_OF_FORWARD,
    ),
    ("backward", "aiter"): (
        *(AITER_ROW_SUM_ARGUMENTS, AITER_GRADIENT_ARGUMENTS, AITER_DQ_ARGUMENTS),
        *(_STRIDES, SIZES, AITER_BACKWARD, AITER_BACKWARD_TENSORS),
    ),
    ("backward", "ready"): (
        *(DIVISOR, TENSOR_STRIDES, GRADIENT_TENSORS, WINDOW, READY_BACKWARD_ARGUMENTS),
        *_OF_BACKWARD,
    ),
    ("backward", "compiled"): (
        *(DIVISOR, JITFMHA_ARGUMENTS, MODIFIERS, TENSOR_STRIDES, GRADIENT_TENSORS),
        *(BACKWARD_ARGUMENTS, *_OF_BACKWARD),
    ),
}
"""What C++ and Python share, but for a forward ``Call``, in the order of the definitions."""

_FOLDER = "amd/launcher"
_INCLUDED = re.compile(r'^#include "(\w+\.h)"$', re.MULTILINE)


def launcher_sources(kinds: Sequence[LauncherKind], *, suffix: str, linkage: str) -> dict[str, str]:
    """The text of one file for each name of ``kinds``, and of the headers that they include.

    Kinds of one name are of several chips, and differ in nothing else. Files that are named after
    kinds have the ``suffix``; the declarations of their functions begin with ``linkage``.
    """
    structs = dict.fromkeys(x for kind in kinds for x in _STRUCTS[kind.direction, kind.block])
    shared = {"structs": cpp_of(structs), "few_splits": FEW_SPLITS}
    files = {"structs.h": jit.render(f"{_FOLDER}/structs.h.in", shared)}
    for kind in kinds:
        arches = [each.arch for each in kinds if each.name == kind.name]
        files[f"{kind.name}{suffix}"] = _rendered(kind, " and ".join(arches), linkage)
    waiting = list(files.values())
    while waiting:
        for header in _INCLUDED.findall(waiting.pop()):
            if header not in files:
                files[header] = jit.render(f"{_FOLDER}/{header}", {})
                waiting.append(files[header])
    return files


def _rendered(kind: LauncherKind, arches: str, linkage: str) -> str:
    template = f"{_FOLDER}/{kind.direction}_{kind.block}.cpp.in"
    values = {
        "origin": f"Rendered from csrc_templates/{template} for {kind.mode} on {arches}.",
        "linkage": linkage,
        "kind": kind.name,
        "mode": kind.mode,
    }
    if kind.direction == "forward":
        values["call"] = kind.call.cpp()
        if kind.block == "aiter":
            values["arch"] = kind.arch
    return jit.render(template, values)


@cache
def launcher_spec(kind: LauncherKind) -> jit.BuildSpec:
    """The source and the flags of the launcher of that kind."""
    return jit.BuildSpec(
        name=f"amd_{kind.name}_{kind.arch}",
        sources=launcher_sources(
            [kind], suffix=".cpp", linkage='extern "C" __attribute__((visibility("default")))'
        ),
        cflags=("-std=c++17", "-O2", "-fvisibility=hidden"),
        ldflags=("-ldl",),
        why=f"the first {kind.direction} pass in {kind.mode} on {kind.arch}",
    )


class Launcher:
    """A launcher that is loaded for a device: it loads kernels, and launches them.

    Attributes:
        entry: the function that launches; it takes bytes alone, which ctypes need not convert.
        current_stream, device_index, launching: those of the target and of its runtime.
    """

    def __init__(self, problem: Problem, target: AmdTarget, block: Block) -> None:
        """Build and load it, as far as that has not been done; ``block`` is what its kernels take.

        Raises ``jitfmha.BuildError`` where it does not compile.
        """
        self.kind = LauncherKind.of(problem, target, block)
        self._target = target
        self._library = load_launcher(self.kind)
        self.entry: Callable[..., int] = getattr(self._library, f"jitfmha_{self.kind.name}")
        self.device_index = target.device_index
        self.current_stream = target.runtime.current_stream
        self.launching = target.runtime.launching

    def load(self, image: bytes, threads: int, *names: str) -> int:
        """The address by which the launcher knows a kernel, loaded on the target's device.

        ``threads`` are those of a workgroup; ``names`` those of the file, of the kernel and of the
        one that combines splits, or "". Raises ``HipError`` where the HIP runtime cannot be used,
        or refuses the image.
        """
        target, library = self._target, self._library
        runtime = library.jitfmha_open_runtime(target.runtime.library_path.encode())
        if not runtime:
            raise self.error(-1)
        kernel = ctypes.c_void_p()
        status = library.jitfmha_load(
            *(runtime, target.device_index, threads, target.chip.xcds),
            *(name.encode() for name in names),
            *(image, len(image), ctypes.byref(kernel)),
        )
        if status != 0 or kernel.value is None:
            raise self.error(status)
        return kernel.value

    def error(self, status: int) -> HipError:
        """Why this thread's last call of the launcher failed."""
        text: bytes = self._library.jitfmha_last_error()
        return HipError(status, text.decode(errors="replace"))


class ListedWork(NamedTuple):
    """What is the same for all launches of persistent workgroups.

    Attributes:
        symbol, threads: of the kernel that lists their work.
        costs: as ``WORK_COSTS`` has them.
    """

    symbol: str
    threads: int
    workgroups: int
    costs: tuple[int, int, int, int]


class BoundKernel(Launcher):
    """A kernel loaded on a device, with what is the same for all calls of a kind."""

    def __init__(
        self,
        problem: Problem,
        target: AmdTarget,
        block: Block,
        row: KernelRow,
        code_object: CodeObject,
        listed: ListedWork | None = None,
    ) -> None:
        """Build and load the launcher and the kernel, as far as that has not been done.

        Its workgroups are persistent where their work is ``listed``.

        Raises what ``Launcher`` and its ``load`` do.
        """
        super().__init__(problem, target, block)
        self.is_fp8 = problem.is_fp8
        self.is_group = problem.mode == "gm1"
        # Complete before any launch: one that is captured, or on another stream, waits for nothing.
        self.one = target.runtime.scale_of_one(target.device_index) if self.is_fp8 else None
        names = row.file, row.symbol, row.combine_symbol or ""
        q_bytes, kv_bytes, out_bytes = element_bytes(problem)
        values = {
            "kernel": self.load(code_object.image, row.threads, *names),
            "batch": problem.batch,
            "heads_q": problem.heads_q,
            "heads_k": problem.heads_k,
            "hdim_q": row.hdim_q,
            "hdim_v": row.hdim_v,
            "q_bytes": q_bytes,
            "kv_bytes": kv_bytes,
            "out_bytes": out_bytes,
            "softmax_scale": problem.softmax_scale,
            "q_descale": problem.q_descale or (0, 0),
            "k_descale": problem.k_descale or (0, 0),
            "v_descale": problem.v_descale or (0, 0),
            "mask": row.mask,
            "ts_qo": row.ts_qo,
            "workgroup_tiles": 2 if "tile_pairs" in row.grid else 1,
            "has_heads_first": row.grid == "heads_tiles_batches",
            "slots": row.workgroups_of_unit * target.compute_units,
            "stacked_heads": problem.gqa if row.stacks_heads else 1,
            "list_kernel": 0,
            "list_workgroups": 0,
            "list_costs": (0, 0, 0, 0),
        }
        if listed is not None:
            list_names = row.file, listed.symbol, ""
            values |= {
                "list_kernel": self.load(code_object.image, listed.threads, *list_names),
                "list_workgroups": listed.workgroups,
                "list_costs": listed.costs,
            }
        call = self.kind.call
        self.call = bytes(call.ctype(**{name: values[name] for name in call.fields}))

    def launch_for(
        self,
        sizes: PlainSizes,
        splits: tuple[int, int],
        splits_of: SplitsOf | None,
    ) -> AmdLaunch:
        """The launch for these lengths and strides, with fields as ``AmdLaunch`` has them."""
        # Written out: with stars in the call it would take longer.
        q0 = k0 = v0 = o0 = 0
        if self.is_group:
            seqlen_q, seqlen_k, (q1, q2, q3), (k1, k2, k3), (v1, v2, v3), (o1, o2, o3) = sizes
        else:
            seqlen_q, seqlen_k, q, k, v, out = sizes
            (q0, q1, q2, q3), (k0, k1, k2, k3), (v0, v1, v2, v3), (o0, o1, o2, o3) = q, k, v, out
        # fmt: off
        packed = _pack_sizes(
            seqlen_q, seqlen_k,
            q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, o0, o1, o2, o3,
        )
        # fmt: on
        return new_tuple(AmdLaunch, (self, packed, seqlen_q, splits, splits_of))

    def descales(self, given: Descales | None) -> list[Tensor]:
        """The scales of fp8 inputs, with 1 in place of those that were not given."""
        one = self.one
        assert one is not None, "only kernels for fp8 take scales"
        return [one if x is None else x for x in (given or _NO_DESCALES)[:3]]


class AmdLaunch(NamedTuple):
    """A bound kernel with all that it needs but the tensors' addresses.

    Attributes:
        sizes: packed as the launcher reads them.
        seqlen_q: gm0 of every sequence, gm1 of all together.
        splits: num_splits, and how many float32 values the splits leave.
        splits_of: gm1: where the splits follow from the longest sequence of each call.
    """

    kernel: BoundKernel
    sizes: bytes
    seqlen_q: int
    splits: tuple[int, int]
    splits_of: SplitsOf | None

    def __call__(self, tensors: Tensors) -> None:
        kernel, sizes, seqlen_q, (num_splits, workspace_floats), splits_of = self
        # A star in place of the last ones would take longer.
        q, k, v, out, lse, cu_seqlens, descales, _, _, _, _, _ = tensors
        max_seqlen_q = 0
        sums_q = sums_k = padded_q = padded_k = 0
        if cu_seqlens is not None:
            q_sums, k_sums, q_padded, k_padded, given, _ = cu_seqlens
            # No sequence is longer than all rows together; workgroups without a tile end at once.
            max_seqlen_q = seqlen_q if given is None or given > seqlen_q else given
            sums_q = sums_k = q_sums.data_ptr()
            if k_sums is not q_sums:
                sums_k = k_sums.data_ptr()
            padded_q = sums_q if q_padded is q_sums else q_padded.data_ptr()
            padded_k = sums_k if k_padded is k_sums else k_padded.data_ptr()
            if splits_of is not None:
                num_splits, workspace_floats = splits_of(max_seqlen_q)
        workspace = None
        if num_splits > 1:
            workspace = q.new_empty(workspace_floats, dtype=torch.float32)
        scales: Sequence[Tensor] = ()
        scale_q = scale_k = scale_v = 0
        if kernel.is_fp8:
            scales = kernel.descales(descales)
            scale_q, scale_k, scale_v = [x.data_ptr() for x in scales]
        # Written out: with a star in the call it would take longer.
        addresses = _pack_tensors(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            0 if workspace is None else workspace.data_ptr(),
            sums_q,
            sums_k,
            padded_q,
            padded_k,
            scale_q,
            scale_k,
            scale_v,
            max_seqlen_q,
            num_splits,
            kernel.current_stream(kernel.device_index),
        )
        if kernel.launching is None:
            status = kernel.entry(kernel.call, sizes, addresses)
        else:
            read = (*(cu_seqlens or ())[:4], *scales)
            with kernel.launching((q, k, v, out, lse, workspace, *read)):
                status = kernel.entry(kernel.call, sizes, addresses)
        if status != 0:
            raise kernel.error(status)


def load_launcher(kind: LauncherKind) -> ctypes.CDLL:
    """The loaded library of a kind."""
    return typed_library(launcher_spec(kind))


def typed_library(spec: jit.BuildSpec) -> ctypes.CDLL:
    """A loaded launcher. Functions get types where ctypes would cut pointers in half without."""
    library = jit.load(spec)
    pointer, integer, unsigned = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
    text = ctypes.c_char_p
    for name, result, arguments in (
        ("jitfmha_last_error", text, []),
        ("jitfmha_open_runtime", pointer, [text]),
        (
            *("jitfmha_load", integer),
            [pointer, integer, unsigned, unsigned, *(text,) * 4, ctypes.c_size_t, pointer],
        ),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
