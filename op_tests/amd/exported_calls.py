"""An exported library, built by g++ and called from Python through op_tests/cpp/calls.cpp."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subprocesses import run_program
from torch import Tensor

from jitfmha.export.folder import publish
from jitfmha.export.kernels import (
    Selection,
    backward_passes,
    compiled,
    forward_kernels,
    ready_backward_kernels,
)
from jitfmha.export.library import library_files

CPP = Path(__file__).resolve().parents[1] / "cpp"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
DTYPES = {"bf16": 0, "fp16": 1, "fp8_e4m3fnuz": 2, "fp8_e4m3fn": 3}
CVTS = {"rtne": 0, "rtna": 1, "rtz": 2}
_CODES = ("ok", "invalid_argument", "unsupported", "runtime_error", "out_of_memory")


class Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "seq", "head")]


class Descale(ctypes.Structure):
    _fields_ = [("scales", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64)]


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
    ("workspace", ctypes.c_void_p),
    ("workspace_bytes", ctypes.c_size_t),
]


class ForwardArguments(ctypes.Structure):
    _fields_ = [
        *_SHARED,
        *(("out", ctypes.c_void_p), ("out_strides", Strides), ("lse", ctypes.c_void_p)),
        *((name, Descale) for name in ("q_descale", "k_descale", "v_descale")),
    ]


class BackwardArguments(ctypes.Structure):
    _fields_ = [
        *_SHARED,
        *((name, ctypes.c_void_p) for name in ("out", "lse", "dout", "dq", "dk", "dv")),
        *((f"{name}_strides", Strides) for name in ("out", "dout", "dq", "dk", "dv")),
        ("deterministic", ctypes.c_bool),
    ]


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
        self._call("use_runtime", ctypes.c_char_p(runtime.encode()))

    def plan(self, arguments: ForwardArguments | BackwardArguments) -> Plan:
        plan = Plan()
        name = "forward" if isinstance(arguments, ForwardArguments) else "backward"
        self._call(f"plan_{name}", ctypes.byref(arguments), ctypes.byref(plan))
        return plan

    def launch(self, arguments: ForwardArguments | BackwardArguments) -> None:
        name = "forward" if isinstance(arguments, ForwardArguments) else "backward"
        self._call(name, ctypes.byref(arguments))

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
    """The address of a scale, or of one for each sequence and key head, and its strides."""
    strides = (0, 0) if x.dim() == 1 else x.stride()
    setattr(arguments, name, Descale(x.data_ptr(), *strides))


def write_library(
    folder: Path, ready: Selection, passes: Selection | None = None, version: str = "1.2.3"
) -> None:
    """Export the kernels that come ready for one selection, and compiled ones for another."""
    backward = list(ready_backward_kernels(ready))
    if passes is not None:
        backward += [compiled(x) for x in backward_passes(passes)]
    publish(folder, library_files(list(forward_kernels(ready)), backward, version))


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
