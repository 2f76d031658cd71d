"""Writes the files of an exported library."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product
from typing import TypeAlias, TypeVar, get_args

from .. import jit
from ..amd.chips import Arch, Chip, architecture, chip, chips
from ..amd.kernel_arguments import MODIFIERS, SINK_GRADIENT_ARGUMENTS
from ..amd.manifest import KernelDtype
from ..amd.runtime import PCI_CHIP_ID
from ..jit.shared_struct import FLOAT, cpp_of
from ..jit.toolchain.hip_libraries import SYSTEM_NAMES
from ..kernels.compiled.modifiers import OPEN_SIDE
from ..kernels.compiled.sink_gradient import SINK_THREADS
from ..kernels.compiled.tile_table import WAVE
from ..kernels.compiled.tiles import tile_table
from ..kernels.compiled.traits import BUFFER_REACH, LARGE_SOFTCAP, WIDE_PAGE_ROWS, WORD_END
from ..kernels.compiled.work_list import LIST_THREADS
from ..kernels.estimate import clock_speed_of, streaming_of
from ..kernels.launcher import Block, LauncherKind, launcher_sources
from ..kernels.ready.limits import FIELD_END, GRID_END, MOST_ROWS
from ..problem.dtypes import BF8_NAMES, DTYPE_BYTES, FP8_NAMES
from ..problem.problem import MAX_HDIM, Direction, Mode
from ..problem.score_features import (
    NUMBER_FEATURES,
    SCORE_FEATURES,
    TENSOR_FEATURES,
    ScoreFeature,
)
from ..rows.heads.amd import THREADS
from ..rows.heads.problem import STRUCTS as HEADS_STRUCTS
from ..version import __version__
from .append import AppendKernel
from .kernels import BackwardKernels, ForwardKernel, SinkKernel
from .policy import clock_in_cpp, cycles_in_cpp, part_in_cpp, policy_in_cpp, row_in_cpp

AnyKernel: TypeAlias = ForwardKernel | BackwardKernels | SinkKernel | AppendKernel
_HEADER = "// Written by python -m jitfmha export.\n"
_LINE_BYTES = 64
_READY_DTYPES: dict[str, KernelDtype] = {
    "bf16": "bf16",
    "fp16": "fp16",
    **dict.fromkeys(("fp8_e4m3fnuz", "fp8_e4m3fn"), "fp8bf16"),
}
"""The members of ``jitfmha::DataType`` that manifests have, in order, and their names there."""
_DTYPES = (*_READY_DTYPES, "fp32", "int8", *BF8_NAMES.values())
"""All members of ``jitfmha::DataType`` in order."""
_COPIED = (
    "build_mha.sh",
    "benchmarks/appended_keys.h",
    *(f"benchmarks/{x}" for x in ("bench_mha.h", "bench_mha_bwd.cpp", "bench_mha_fwd.cpp")),
    *(f"benchmarks/{x}" for x in ("hip.h", "numbers.h")),
)
_SCORE_DTYPES = ("bool", "bf16", "fp16", "fp32")
"""Those of ``jitfmha::ScoreType``, whose first one has no such name in C++."""
_BLOCKS: tuple[tuple[Direction, Block], ...] = (
    ("forward", "ready"),
    ("forward", "compiled"),
    ("backward", "ready"),
    ("backward", "compiled"),
)
# What stands for a byte in a C++ literal. A question mark would begin a trigraph.
_LETTERS = [
    chr(x) if 0x20 <= x < 0x7F and chr(x) not in '"\\?' else f"\\{x:03o}" for x in range(256)
]


def library_files(
    forward: Sequence[ForwardKernel],
    backward: Sequence[BackwardKernels],
    sinks: Sequence[SinkKernel],
    append: Sequence[AppendKernel],
    version: str = __version__,
) -> dict[str, str]:
    """The text of each file, by its path in the library's folder."""
    kernels: list[AnyKernel] = [*forward, *backward, *sinks, *append]
    arches = [arch for arch in get_args(Arch) if any(x.arch == arch for x in kernels)]
    common = {"version": version, "namespace": _namespace(version)}
    about = {"version": version, "architectures": " and ".join(arches)}
    objects = {
        f"src/code_objects_{arch}.cpp": _code_objects(
            [x for x in kernels if x.arch == arch], common["namespace"]
        )
        for arch in arches
    }
    sources = ["src/jitfmha.cpp", *objects]
    launchers = launcher_sources(
        [
            LauncherKind(arch, mode, direction, block)
            for (direction, block), mode, arch in product(_BLOCKS, get_args(Mode), arches)
        ],
        suffix=".h",
        linkage="[[maybe_unused]] static",
    )
    files = {
        "CMakeLists.txt": _rendered("CMakeLists.txt", {**about, "sources": "\n  ".join(sources)}),
        "README.md": _rendered("README.md", about),
        "include/jitfmha.h": _rendered(
            "jitfmha.h", {**common, **about, "score_arguments": _lines(_score_arguments(), 2)}
        ),
        "include/jitfmha_aiter.h": _rendered("jitfmha_aiter.h", {"namespace": common["namespace"]}),
        "jitfmha.pc": _rendered("jitfmha.pc", about),
        **{x: jit.render(f"export/{x}", {}) for x in _COPIED},
        "src/code_objects.h": _rendered(
            "code_objects.h",
            {
                "namespace": common["namespace"],
                "declarations": _lines((f"extern const char {_object(x)}[];" for x in kernels), 0),
            },
        ),
        "src/exported_symbols.map": _rendered(
            "exported_symbols.map", {"namespace": common["namespace"]}
        ),
        "src/appendkv.h": _rendered(
            "appendkv.h",
            {
                "shared_structs": cpp_of(HEADS_STRUCTS),
                "max_hdim": MAX_HDIM,
                "append_kernels": _lines(_chosen(append, _append_entry)),
            },
        ),
        "src/jitfmha.cpp": _calls(forward, backward, sinks, arches, common["namespace"]),
        **{f"src/launcher/{name}": text for name, text in launchers.items()},
        **objects,
    }
    return {**files, "exported.json": _inventory(files, kernels, version)}


def _rendered(name: str, values: Mapping[str, object]) -> str:
    return jit.render(f"export/{name}.in", values)


def _namespace(version: str) -> str:
    """The C++ namespace of a version, such as v0_1_0."""
    return "v" + re.sub(r"\W", "_", version)


def _inventory(files: Mapping[str, str], kernels: Iterable[AnyKernel], version: str) -> str:
    """What was exported, for people and for the next export into the same folder."""
    listed = [
        {"arch": x.arch, "name": x.name, "sha256": hashlib.sha256(x.image).hexdigest()}
        for x in kernels
    ]
    return json.dumps({"version": version, "files": sorted(files), "kernels": listed}, indent=2)


# ---- C++ -----------------------------------------------------------------------------------------


def _calls(
    forward: Sequence[ForwardKernel],
    backward: Sequence[BackwardKernels],
    sinks: Sequence[SinkKernel],
    arches: Sequence[Arch],
    namespace: str,
) -> str:
    return _rendered(
        "jitfmha.cpp",
        {
            "namespace": namespace,
            "launchers": "\n".join(
                f'#include "launcher/{direction}_{block}_{mode}.h"'
                for (direction, block), mode in product(_BLOCKS, get_args(Mode))
            ),
            "policy_modules": "jitfmha/kernels/ready/ and compiled/",
            "policy": policy_in_cpp().cpp,
            "forward_kernels": _lines(_chosen(forward, _forward_entry)),
            "backward_kernels": _lines(_chosen(backward, _backward_entry)),
            "sink_kernels": _lines(_chosen(sinks, _sink_entry)),
            "sink_threads": SINK_THREADS,
            "list_threads": LIST_THREADS,
            "sink_arguments": SINK_GRADIENT_ARGUMENTS.cpp(),
            "asked_scores": _lines(map(_asked, SCORE_FEATURES), 2),
            "packed_scores": _lines(_packed_scores(), 2),
            "open_side": OPEN_SIDE,
            "wave": WAVE,
            "word_end": WORD_END,
            "large_softcap": f"{LARGE_SOFTCAP}f",
            "wide_page_rows": WIDE_PAGE_ROWS,
            "buffer_reach": BUFFER_REACH,
            "chips": ", ".join(_chip(each, pci_id) for each in chips() for pci_id in each.pci_ids),
            "unlisted_chips": ", ".join(
                _chip(chip(architecture(arch).unlisted_chip), 0) for arch in get_args(Arch)
            ),
            "arch_names": _quoted(get_args(Arch)),
            "dtype_names": _quoted(_DTYPES),
            "dtypes_of_rows": ", ".join(f"KernelDtype::{x}" for x in _READY_DTYPES.values()),
            "input_bytes": ", ".join(str(DTYPE_BYTES[x]) for x in _DTYPES),
            "score_dtype_names": _quoted(_SCORE_DTYPES),
            "score_dtype_bytes": ", ".join(str(DTYPE_BYTES.get(x, 1)) for x in _SCORE_DTYPES),
            "fp8_dtypes": _forms(FP8_NAMES.values()),
            "bf8_dtypes": _forms(BF8_NAMES.values()),
            "exported_archs": ", ".join(map(_arch, arches)),
            "runtime_names": _quoted(SYSTEM_NAMES),
            "pci_chip_id_attributes": ", ".join(map(str, PCI_CHIP_ID)),
            "max_hdim": MAX_HDIM,
            "most_rows": MOST_ROWS,
            "grid_end": GRID_END,
            "field_end": FIELD_END,
        },
    )


def _forms(names: Collection[str]) -> str:
    """Which of these each architecture takes."""
    taken = (tile_table(arch).dtypes_of("forward") for arch in get_args(Arch))
    return ", ".join(f"DataType::{x}" for served in taken for x in names if x in served)


_Kernel = TypeVar("_Kernel", bound=AnyKernel)


def _chosen(kernels: Iterable[_Kernel], text_of: Callable[[_Kernel], str]) -> Iterator[str]:
    """The text of each kernel, between what leaves it out of libraries that go without its kind."""
    for kind, several in groupby(kernels, _kind):
        without = " || ".join(f"defined(JITFMHA_WITHOUT_{name})" for name in kind)
        yield f"#if !({without})"
        yield from map(text_of, several)
        yield "#endif"


def _kind(kernel: AnyKernel) -> tuple[str, ...]:
    if isinstance(kernel, AppendKernel):
        return "FORWARD", "COMPILED"
    if isinstance(kernel, ForwardKernel):
        return "FORWARD", *(("COMPILED",) if kernel.compiled_for else ())
    is_ready = isinstance(kernel, BackwardKernels) and kernel.adds_dq_up
    return "BACKWARD", *(() if is_ready else ("COMPILED",))


def _forward_entry(kernel: ForwardKernel) -> str:
    row, made = kernel.row, kernel.compiled_for
    names = _quoted((row.name, row.symbol, row.combine_symbol or ""))
    compiled_for = "{}"
    if made is not None:
        numbers = (
            f"{_bool(made.has_wide_pages)}, "
            f"{made.slices}, {made.columns}, {made.far_stride_bytes}, {_bool(made.has_far_rows)}, "
            f"{_bool(made.stacks_heads)}, {made.most_stacked_queries}, {made.decode_blocks}, "
            f"{made.row_blocks}, {_bool(made.takes_turns)}"
        )
        if made.list_symbol:
            numbers += f', "{made.list_symbol}"'
        compiled_for = f'{{true, DataType::{made.dtype}, "{made.features}", {numbers}}}'
    return (
        f"{{{_arch(kernel.arch)}, {row_in_cpp(row)}, {_bool(kernel.has_roundings)}, "
        f"{row.threads}, {names}, {compiled_for}, "
        f"{cycles_in_cpp(kernel.cycles)}, {_image(kernel, row.file)}}},"
    )


def _backward_entry(each: BackwardKernels) -> str:
    row = each.row
    launches = ", ".join(
        f'{{"{kernel.row.symbol}", {_bool(kernel.rows == "k")}, {kernel.own_rows}, '
        f"{kernel.slices}, {kernel.row.threads}}}"
        for kernel in each.kernels
    )
    return (
        f"{{{_arch(each.arch)}, {row_in_cpp(row)}, DataType::{each.dtype}, "
        f'"{each.features}", {_bool(each.has_roundings)}, '
        f"{_bool(each.adds_dq_up)}, {_bool(each.is_deterministic)}, {each.far_stride_bytes}, "
        f"{_bool(each.has_far_rows)}, "
        f'"{each.name}", {{{launches}}}, {part_in_cpp(each.of_queries)}, '
        f"{part_in_cpp(each.of_keys)}, {_image(each, row.file)}}},"
    )


def _append_entry(each: AppendKernel) -> str:
    made, kernel = each.made_for, each.made_for.kernel
    hdims = ", ".join(map(str, kernel.hdims))
    return (
        f"{{{_arch(each.arch)}, DataType::{made.dtype}, KeyType::{made.cache}, {hdims}, "
        f"Rope::{made.rope}, {_bool(kernel.traits.is_packed)}, "
        f"{kernel.width}, {{{', '.join(map(str, kernel.tokens_of_wave))}}}, "
        f'{kernel.heads_of_wave}, {THREADS}, "{each.name}", '
        f"{_image(each, each.name)}}},"
    )


def _sink_entry(kernel: SinkKernel) -> str:
    dtype = f"DataType::{kernel.dtype}"
    image = _image(kernel, f"{kernel.name}.co")
    return f'{{{_arch(kernel.arch)}, {dtype}, "{kernel.name}", {image}}},'


# Of what changes scores the arguments, the words of kernels that have it, and what these are told
# follow from the table of features: fields have the names that kernels know them by.


def _score_arguments() -> Iterator[str]:
    for row in SCORE_FEATURES:
        if row in NUMBER_FEATURES:
            number = "float" if row.schema == "float" else "std::int64_t"
            yield f"{number} {row.name} = 0;"
            continue
        yield f"const {row.element}* {row.name} = nullptr;  // ({', '.join(row.dimensions)})"
        if row.element == "void":
            yield f"ScoreType {row.name}_dtype = ScoreType::fp32;"
        strides = (f"{x} = {int(x == f'{row.word}_key')}" for x in row.stride_names)
        yield f"std::int64_t {', '.join(strides)};"


def _asked(row: ScoreFeature) -> str:
    """Add the word of a feature, and the flag that exports it, where a call asks for it."""
    one, *others = (feature.name.lower() for feature in row.features)
    word, flag = f'"{row.word}"', f'"{one}"'
    if row.element == "void":
        dtype = f"args.{row.name}_dtype"
        word = f'std::string("{row.word}_") + name_of({dtype})'
        flag = f'{dtype} == ScoreType::boolean ? "{others[0]}" : {flag}'
    # Backward finds it in the lse.
    is_asked = f"args.{row.name}" if row.name != "sink" else f"is_forward && args.{row.name}"
    return f"if ({is_asked}) asked.add({word}, {flag});"


def _packed_scores() -> Iterator[str]:
    for row in TENSOR_FEATURES:
        is_untyped = row.element == "void"
        address = f"static_cast<const char*>(args.{row.name})" if is_untyped else f"args.{row.name}"
        yield f"modifiers.{row.name} = {address};"
        unit = f" * bytes_of(args.{row.name}_dtype)" if is_untyped else ""
        for name in row.stride_names:
            yield f"modifiers.{name} = args.{name}{unit};"
    for row in NUMBER_FEATURES:
        value = f"args.{row.name}"
        if MODIFIERS.fields[row.name] != FLOAT:
            value = f"field_of_side({value})"
        yield f"modifiers.{row.name} = {value};"


def _definition(x: AnyKernel) -> str:
    return f"alignas({_LINE_BYTES}) const char {_object(x)}[] =\n{_literal(x.image)};"


def _code_objects(kernels: Collection[AnyKernel], namespace: str) -> str:
    definitions = "\n".join(_chosen(kernels, _definition))
    return (
        f'{_HEADER}#include "code_objects.h"\n\n'
        f"namespace jitfmha {{\ninline namespace {namespace} {{\nnamespace code_objects {{\n\n"
        f"{definitions}\n\n"
        f"}}  // namespace code_objects\n}}  // namespace {namespace}\n}}  // namespace jitfmha\n"
    )


def _image(kernel: AnyKernel, file: str) -> str:
    return f'{{"{file}", code_objects::{_object(kernel)}, {len(kernel.image)}}}'


def _object(kernel: AnyKernel) -> str:
    return f"{kernel.arch}_{kernel.name}"


def _literal(content: bytes) -> str:
    """Bytes as a string, which compilers read far quicker than a list of numbers."""
    lines = (content[at : at + _LINE_BYTES] for at in range(0, len(content), _LINE_BYTES))
    return "\n".join(f'    "{_text(line)}"' for line in lines)


def _text(content: bytes) -> str:
    return "".join(_LETTERS[byte] for byte in content)


def _chip(each: Chip, pci_id: int) -> str:
    units = f"{each.xcds}, {each.compute_units}, {each.architecture.xcd_engines}"
    speeds = f"{streaming_of(each)!r}, {clock_in_cpp(clock_speed_of(each))}"
    return f"{{{_arch(each.architecture.name)}, {pci_id:#x}, {units}, {speeds}}}"


def _arch(arch: Arch) -> str:
    return f"Arch::{arch}"


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _lines(lines: Iterable[str], indent: int = 4) -> str:
    """What stands for a placeholder that is indented."""
    return f"\n{' ' * indent}".join(lines)
