"""An exported library, built by g++ and called from Python through op_tests/cpp/calls.cpp."""

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from subprocesses import run_program
from torch import Tensor

from jitfmha import jit
from jitfmha.export.append import append_passes, compiled_append
from jitfmha.export.folder import publish
from jitfmha.export.kernels import (
    Selection,
    backward_passes,
    compiled_backward,
    compiled_forward,
    compiled_sink,
    forward_kernels,
    forward_passes,
    ready_backward_kernels,
    sink_passes,
)
from jitfmha.export.library import library_files
from jitfmha.kernels.compiled.backward_traits import backward_spec
from jitfmha.kernels.compiled.sink_gradient import sink_gradient_spec
from jitfmha.kernels.compiled.traits import ForwardTraits, kernel_spec
from jitfmha.problem.score_features import NUMBER_FEATURES, SCORE_FEATURES, ScoreFeature

CPP = Path(__file__).resolve().parents[1] / "cpp"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
_DTYPES = ("bf16", "fp16", "fp8_e4m3fnuz", "fp8_e4m3fn", "fp32", "int8", "bf8_e5m2fnuz", "bf8_e5m2")
DTYPES = {name: i for i, name in enumerate(_DTYPES)}
KEY_TYPES = ("", "fp8", "int8", "bf8")
SCORE_DTYPES = (torch.bool, torch.bfloat16, torch.float16, torch.float32)
CVTS = {"rtne": 0, "rtna": 1, "rtz": 2}
_SOMEWHERE = torch.zeros(1)
_CODES = ("ok", "invalid_argument", "unsupported", "runtime_error", "out_of_memory")


class Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "seq", "head")]


class Descale(ctypes.Structure):
    _fields_ = [
        ("scales", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token")),
        ("of_query_heads", ctypes.c_bool),
    ]


def _score_fields(row: ScoreFeature) -> list[tuple[str, Any]]:
    if row in NUMBER_FEATURES:
        return [(row.name, ctypes.c_float if row.schema == "float" else ctypes.c_int64)]
    dtype = [(f"{row.name}_dtype", ctypes.c_int32)] if row.element == "void" else []
    strides = ((name, ctypes.c_int64) for name in row.stride_names)
    return [(row.name, ctypes.c_void_p), *dtype, *strides]


_SHARED = [
    *((name, ctypes.c_int32) for name in ("dtype", "mode", "mask", "bf16_cvt")),
    *((name, ctypes.c_int64) for name in ("batch", "heads_q", "heads_k")),
    *((name, ctypes.c_int64) for name in ("seqlen_q", "seqlen_k", "hdim_q", "hdim_v")),
    ("softmax_scale", ctypes.c_float),
    *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
    *((name, Strides) for name in ("q_strides", "k_strides", "v_strides")),
    *((name, ctypes.c_void_p) for name in ("cu_seqlens_q", "cu_seqlens_k")),
    *((name, ctypes.c_void_p) for name in ("cu_seqlens_q_padded", "cu_seqlens_k_padded")),
    *((name, ctypes.c_int64) for name in ("max_seqlen_q", "max_seqlen_k")),
    *((name, ctypes.c_int64) for name in ("window_left", "window_right", "v_column")),
    *(field for row in SCORE_FEATURES for field in _score_fields(row)),
    *(("dropout_p", ctypes.c_double), ("rng_state", ctypes.c_void_p)),
    ("workspace", ctypes.c_void_p),
    ("workspace_bytes", ctypes.c_size_t),
]


class ForwardArguments(ctypes.Structure):
    _fields_ = [
        *_SHARED,
        *(("out", ctypes.c_void_p), ("out_strides", Strides), ("lse", ctypes.c_void_p)),
        *((name, ctypes.c_int32) for name in ("key_type", "out_dtype")),
        *((name, Descale) for name in ("q_descale", "k_descale", "v_descale", "p_descale")),
        ("block_table", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("block_table_stride", "page_size", "num_pages")),
        *(("has_packed_pages", ctypes.c_bool), ("num_splits", ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("out_accum", "lse_accum")),
    ]

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"v_column": 1, **values})


class BackwardArguments(ctypes.Structure):
    _fields_ = [
        *_SHARED,
        *((name, ctypes.c_void_p) for name in ("out", "lse", "dout", "dlse")),
        *((name, ctypes.c_void_p) for name in ("dq", "dk", "dv")),
        *((f"{name}_strides", Strides) for name in ("out", "dout", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("dbias", "dsink")),
        ("deterministic", ctypes.c_bool),
    ]

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"v_column": 1, **values})


class AppendTraits(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("hdim_q", "hdim_v")),
        *(("data_type", ctypes.c_int32), ("is_v_rowmajor", ctypes.c_bool)),
        *((name, ctypes.c_int32) for name in ("rope_type", "cache_type")),
    ]

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"is_v_rowmajor": True, **values})


class AppendArguments(ctypes.Structure):
    _fields_ = [
        *((f"{name}_ptr", ctypes.c_void_p) for name in ("q", "k", "knew", "v", "vnew", "seqlen_k")),
        *((name, ctypes.c_int64) for name in ("seqlen_q", "seqlen_knew", "batch")),
        *((name, ctypes.c_int64) for name in ("hdim_q", "hdim_v", "nhead_q", "nhead_k")),
        *((f"rotary_{name}_ptr", ctypes.c_void_p) for name in ("cos", "sin")),
        *(("rotary_dim", ctypes.c_int64), ("has_mask", ctypes.c_bool)),
        ("block_table_ptr", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch_stride_block_table", "page_block_size")),
        ("cache_batch_idx", ctypes.c_void_p),
        *(
            (f"{of}stride_{name}", ctypes.c_int64)
            for of in ("", "nhead_", "batch_")
            for name in ("q", "k", "knew", "v", "vnew")
        ),
        *(("q_out_ptr", ctypes.c_void_p), ("has_packed_pages", ctypes.c_bool)),
        *((name, Descale) for name in ("k_descale", "v_descale")),
    ]

    def set_tensor(self, name: str, x: Tensor) -> None:
        """An address, and strides between sequences or pages, rows and heads."""
        setattr(self, f"{name}_ptr", x.data_ptr())
        for of, stride in zip(("batch_", "", "nhead_"), x.stride()[:3], strict=True):
            setattr(self, f"{of}stride_{name}", stride)


class Plan(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("tile_q", "tile_k", "num_splits")),
        ("workspace_bytes", ctypes.c_size_t),
    ]


class Status(ctypes.Structure):
    _fields_ = [
        *(("code", ctypes.c_int32), ("hip_error", ctypes.c_int32)),
        ("text", ctypes.c_char * 500),
    ]


class CallError(Exception):
    """A status that is not ok."""


class ExportedCalls:
    """The calls of a library, with errors as exceptions that begin with the status's name."""

    def __init__(self, shim: Path, runtime: str) -> None:
        self._library = ctypes.CDLL(str(shim))
        assert self._library.size_of_forward_arguments() == ctypes.sizeof(ForwardArguments)
        assert self._library.size_of_backward_arguments() == ctypes.sizeof(BackwardArguments)
        of_append = ctypes.sizeof(AppendTraits) + ctypes.sizeof(AppendArguments)
        assert self._library.size_of_append_arguments() == of_append
        self._call("use_runtime", ctypes.c_char_p(runtime.encode()))

    def plan(self, arguments: ForwardArguments | BackwardArguments) -> Plan:
        plan = Plan()
        name = "forward" if isinstance(arguments, ForwardArguments) else "backward"
        self._call(f"plan_{name}", ctypes.byref(arguments), ctypes.byref(plan))
        return plan

    def launch(
        self, arguments: ForwardArguments | BackwardArguments, name: str | None = None
    ) -> None:
        """Call the function of the direction, or another one of ``op_tests/cpp/calls.cpp``."""
        direction = "forward" if isinstance(arguments, ForwardArguments) else "backward"
        self._call(name or direction, ctypes.byref(arguments))

    def append(self, traits: AppendTraits, arguments: AppendArguments) -> None:
        """Append keys to caches."""
        self._call("append", ctypes.byref(traits), ctypes.byref(arguments))

    def _call(self, name: str, *arguments: Any) -> None:
        status = Status()
        getattr(self._library, name)(*arguments, ctypes.byref(status))
        if status.code:
            raise CallError(f"{_CODES[status.code]}: {status.text.decode()}")


def set_tensor(arguments: ctypes.Structure, name: str, x: Tensor) -> None:
    """An address and, of tensors with heads, the strides."""
    setattr(arguments, name, x.data_ptr())
    if hasattr(arguments, f"{name}_strides"):
        *batch, seq, head, _ = x.stride()
        setattr(arguments, f"{name}_strides", Strides(batch[0] if batch else 0, seq, head))


def set_descale(arguments: ForwardArguments, name: str, x: Tensor) -> None:
    """The address of a scale, or of several in one of the forms that ``fmha_fwd`` takes.

    One for each head, of several, is of query heads where it is of q or of probabilities.
    """
    if x.dim() > 2:
        *batch, token, head, _ = x.stride()
        setattr(arguments, name, Descale(x.data_ptr(), *(batch or (0,)), head, token))
        return
    strides = (0, 0) if x.shape == (1,) else (0, *x.stride())[-2:]
    of_query_heads = x.dim() == 1 and x.shape[0] > 1 and name[0] in "qp"
    setattr(arguments, name, Descale(x.data_ptr(), *strides, 0, of_query_heads))


def set_scores(arguments: ctypes.Structure, options: Mapping[str, Any]) -> None:
    """What changes scores: the options of ``fmha_fwd`` that the table of features names."""
    for row in SCORE_FEATURES:
        value = options.get(row.name)
        if value is None or row in NUMBER_FEATURES:
            setattr(arguments, row.name, value or 0)
            continue
        # An empty tensor has no address, and is asked for all the same.
        setattr(arguments, row.name, value.data_ptr() or _SOMEWHERE.data_ptr())
        if row.element == "void":
            setattr(arguments, f"{row.name}_dtype", SCORE_DTYPES.index(value.dtype))
        sizes = zip(value.shape, value.stride(), strict=True)
        strides = [0 if size == 1 else stride for size, stride in sizes]
        strides = [0] * (len(row.dimensions) - len(strides)) + strides
        for name, stride in zip(row.stride_names, strides, strict=True):
            setattr(arguments, name, stride)
    arguments.dropout_p = options.get("dropout_p", 0)
    if "rng_state" in options:
        arguments.rng_state = options["rng_state"].data_ptr()


def write_library(
    folder: Path,
    ready: Selection,
    passes: Sequence[Selection] = (),
    version: str = "1.2.3",
    keeps: Callable[[ForwardTraits], bool] = lambda traits: True,
) -> None:
    """Export the kernels that come ready for one selection, and compiled ones for others.

    Without those for large soft caps, which no test launches, and of forward ones those that it
    ``keeps``.
    """
    forward, backward = list(forward_kernels(ready)), list(ready_backward_kernels(ready))
    of_forward = [x for each in passes for x in forward_passes(each, forward)]
    of_backward = [x for each in passes for x in backward_passes(each)]
    of_forward = [x for x in dict.fromkeys(of_forward) if not x.has_large_softcap and keeps(x)]
    of_backward = [x for x in dict.fromkeys(of_backward) if not x.has_large_softcap]
    of_sinks = dict.fromkeys(x for each in passes for x in sink_passes(each))
    of_append = list(dict.fromkeys(x for each in passes for x in append_passes(each)))
    specs = [
        *map(kernel_spec, of_forward),
        *map(backward_spec, of_backward),
        *starmap(sink_gradient_spec, of_sinks),
        *(x.spec for x in of_append),
    ]
    missing = [spec for spec in specs if not jit.is_built(spec)]
    for _ in jit.build_all(missing, len(os.sched_getaffinity(0))):
        pass
    forward += map(compiled_forward, of_forward)
    backward += map(compiled_backward, of_backward)
    sinks, append = [*starmap(compiled_sink, of_sinks)], [*map(compiled_append, of_append)]
    publish(folder, library_files(forward, backward, sinks, append, version))


def compile_cpp(output: Path, *arguments: str | Path) -> Path:
    """Run g++; what it says is the error."""
    command = ("g++", "-std=c++17", "-O0", *WARNINGS, "-ffp-contract=off")
    run_program(*command, *arguments, "-ldl", "-o", output)
    return output


def build_shared(folder: Path) -> Path:
    """An exported folder as a shared library, with the calls that Python makes."""
    sources: Sequence[Path] = sorted((folder / "src").glob("*.cpp"))
    symbols = f"-Wl,--version-script={folder / 'src' / 'exported_symbols.map'}"
    flags = ("-shared", "-fPIC", "-fvisibility=hidden", f"-I{folder / 'include'}")
    return compile_cpp(folder.parent / f"lib{folder.name}.so", *flags, symbols, *sources)


def build_shim(folder: Path, library: Path) -> Path:
    """What Python calls of a shared library."""
    flags = ("-shared", "-fPIC", f"-I{folder / 'include'}", CPP / "calls.cpp", library)
    return compile_cpp(
        library.with_name(f"{folder.name}_calls.so"), *flags, f"-Wl,-rpath,{library.parent}"
    )


def build_program(name: str, exported: Path, library: Path) -> Path:
    """A benchmark beside the shared library that it uses."""
    path = library.with_name(name)
    flags = (f"-I{exported / 'include'}", exported / "benchmarks" / f"{name}.cpp", library)
    return path if path.exists() else compile_cpp(path, *flags, f"-Wl,-rpath,{library.parent}")


class Program:
    """A benchmark on the emulator, which its linker finds as the HIP runtime."""

    def __init__(self, path: Path, runtime: str) -> None:
        self._path = path
        alias = path.with_name("libamdhip64.so")
        with suppress(FileExistsError):  # also where another process was quicker
            alias.symlink_to(runtime)

    def run(self, *options: str, code: int | None = 0) -> str:
        folder = str(self._path.parent)
        done = run_program(self._path, *options, code=code, LD_LIBRARY_PATH=folder)
        return done.stdout + done.stderr
