"""What is compiled on users' machines is free of warnings, with g++ and with clang."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import pytest
import torch

from jitfmha.amd.chips import Arch, architecture
from jitfmha.amd.recording_runtime import recorder_spec
from jitfmha.emulator.library import Variant, build_spec, decoder_spec
from jitfmha.gemm import amd as gemm
from jitfmha.jit import BuildSpec
from jitfmha.jit.toolchain.compiling import zig_program
from jitfmha.jit.toolchain.device_compiler import HIP_FLAGS
from jitfmha.kernels.compiled.backward_traits import BackwardTraits, backward_spec
from jitfmha.kernels.compiled.sink_gradient import sink_gradient_name, sink_gradient_spec
from jitfmha.kernels.compiled.traits import ForwardTraits, kernel_spec
from jitfmha.kernels.cpu import CpuTraits, launcher_spec
from jitfmha.kernels.launcher import Block, LauncherKind
from jitfmha.kernels.launcher import launcher_spec as amd_launcher_spec
from jitfmha.kernels.modifiers import ModifierTraits
from jitfmha.kernels.struct_launcher import struct_launcher_spec
from jitfmha.planning.target import CpuIsa
from jitfmha.problem.problem import Direction, Mode
from jitfmha.problem.score_features import AskedModifiers
from jitfmha.rows import amd as rows
from jitfmha.rows.cpu import cpu_spec
from jitfmha.rows.heads import amd as heads
from jitfmha.rows.heads.problem import HeadTraits
from jitfmha.rows.problem import KINDS, RowTraits

Compiler = Literal["g++", "clang"]

_CHECKS = ("-Wall", "-Wextra", "-Werror", "-fsyntax-only")
# hsa/src/attention.h, whose bytes are those of the ready kernels' builds, names some fields alone.
_OF_READY_KERNELS = "-Wno-missing-field-initializers"
_TUNING_OF_GCC = ("-fpeel-loops", "-fvect-cost-model=dynamic")
_X86_ISAS: tuple[CpuIsa, ...] = ("avx2", "avx512", "avx512_bf16", "amx", "generic", "amx_emulated")
_ALL = AskedModifiers("bf16", alibi_slopes=True, logit_softcap=True, sink_size=True)
_ALL_ON_CPU = ModifierTraits("cpu", _ALL, dropout=True)
_ALL_ON_AMD = ModifierTraits("compiled", _ALL, dropout=True)
_HDIMS = ((64, 64), (37, 21))
_ARCHS: tuple[Arch, ...] = get_args(Arch)


def _cpu_kernels() -> list[CpuTraits]:
    plain: list[CpuTraits] = []
    for isa, hdims, direction in itertools.product(_X86_ISAS, _HDIMS, get_args(Direction)):
        has_tile_unit = isa.startswith("amx")
        for dtype in ("bf16",) if has_tile_unit else ("bf16", "fp16", "fp32"):
            of_call = dtype, *hdims
            plain.append(CpuTraits(*of_call, False, "gm0", isa, direction))
            plain.append(CpuTraits(*of_call, True, "gm1", isa, direction, _ALL_ON_CPU))
    of_8_bits = [
        kernel
        for isa in _X86_ISAS
        for kernel in (
            CpuTraits(
                *("int8", 64, 64, False, "gm0", isa),
                modifiers=ModifierTraits("cpu", AskedModifiers("bool")),
                descales=True,
                query_head_descales=True,
                int8_probabilities=True,
            ),
            CpuTraits(
                *("fp8_e4m3fn", 64, 64, False, "gm0", isa),
                modifiers=ModifierTraits("cpu", AskedModifiers(logit_softcap=True)),
                descales=True,
            ),
            CpuTraits(
                *("bf16", 64, 64, True, "gm1", isa), paged=True, kv_dtype="int8", descales=True
            ),
        )
    ]
    in_columns = [
        CpuTraits("bf16", 64, 64, False, "gm0", isa, column_major_v=True)
        for isa in _X86_ISAS
        if not isa.startswith("amx")
    ]
    kernels = [*plain, *of_8_bits, *in_columns]
    may_have_few_rows = (x for x in kernels if x.mode == "gm0" and x.most_few_rows)
    return [*kernels, *(replace(x, few_rows=True) for x in may_have_few_rows)]


def _device_kernels() -> list[ForwardTraits | BackwardTraits]:
    found: list[ForwardTraits | BackwardTraits] = []
    for arch, hdims, modifiers in itertools.product(
        _ARCHS, (*_HDIMS, (192, 128)), (ModifierTraits("compiled"), _ALL_ON_AMD)
    ):
        is_masked = modifiers == _ALL_ON_AMD
        found += [
            BackwardTraits(arch, "bf16", *hdims, "gm1", "rtne", is_masked, "far", modifiers),
            ForwardTraits(
                arch, "bf16", *hdims, "gm1", "rtne", is_masked, "near", modifiers, "bf16"
            ),
            ForwardTraits(
                *(arch, "fp16", *hdims, "gm0", "rtne", is_masked, "paged", modifiers, "int8"),
                has_descales=True,
                has_int8_probabilities=True,
                stacks_heads=not is_masked,
            ),
        ]
    of_latents = itertools.product(_ARCHS, ("bf16", "fp16"), (1, 2, 4), ("near", "wide_pages"))
    found += [
        ForwardTraits(
            *(
                arch,
                dtype,
                576,
                512,
                "gm1",
                "rtne",
                True,
                access,
                ModifierTraits("compiled"),
                dtype,
            ),
            stacks_heads=True,
            row_blocks=row_blocks,
        )
        for arch, dtype, row_blocks, access in of_latents
    ]
    return found


def _traits_of_rows(out_dtype: str) -> list[tuple[RowTraits, Direction]]:
    """With nothing but rows, and with all that there is."""
    found: list[tuple[RowTraits, Direction]] = []
    for kind, dtype, direction in itertools.product(
        KINDS, ("fp32", "bf16", "fp16"), get_args(Direction)
    ):
        has_weight, has_bias = kind != "softmax", kind == "layer_norm"
        out = out_dtype if direction == "forward" else dtype
        found += [
            (RowTraits(kind, dtype, dtype, dtype, False, False, False), direction),
            (RowTraits(kind, dtype, "fp32", out, has_weight, has_bias, True), direction),
        ]
    return found


def _rows_on_cpu() -> Iterator[tuple[str, Callable[[], BuildSpec]]]:
    for (traits, direction), isa in itertools.product(_traits_of_rows("int8"), _X86_ISAS):
        yield f"{traits.name}_{direction}_{isa}", partial(cpu_spec, traits, direction, isa)


def _around_attention_on_amd() -> Iterator[tuple[str, Callable[[], BuildSpec]]]:
    """Rows, heads, products and gradients of sinks."""
    for arch, (columns, width) in itertools.product(_ARCHS, ((4096, 4), (40961, 1))):
        for traits, direction in _traits_of_rows(architecture(arch).fp8_dtype):
            row = rows.RowKernel.of(traits, direction, arch, columns, width, is_alone=False)
            yield row.name, partial(rows.kernel_spec, row)
    for arch, cache, choice in itertools.product(_ARCHS, ("bf16", "int8"), (False, True)):
        of_heads = HeadTraits("bf16", "fp32", "fp32", cache, choice, choice)
        head = heads.HeadKernel(
            of_heads, arch, (128, 64), None if choice else 32, (True, choice), 4
        )
        yield head.name, partial(heads.kernel_spec, head)
    for arch, dtype in itertools.product(_ARCHS, ("fp32", "bf16", "fp16")):
        yield sink_gradient_name(arch, dtype), partial(sink_gradient_spec, arch, dtype)
    for arch, dtype in itertools.product(_ARCHS, (torch.bfloat16, torch.int8)):
        for tile, has_all in itertools.product(
            (gemm.TILES[arch][0], gemm.FEW_ROWS[0]), (False, True)
        ):
            of_a = of_b = bool(tile.ahead) or has_all
            end = (True, True, True, "gelu") if has_all else (False, False, False, "none")
            product = gemm.GemmKernel(arch, tile, dtype, torch.float16, of_a, of_b, *end)
            yield product.name, partial(gemm.kernel_spec, product)


def _launchers() -> Iterator[tuple[str, Callable[[], BuildSpec]]]:
    ways = itertools.product(_ARCHS, get_args(Mode), get_args(Direction), get_args(Block))
    for arch, mode, direction, block in ways:
        kind = LauncherKind(arch, mode, direction, block)
        yield f"{kind.name}_{arch}", partial(amd_launcher_spec, kind)
    yield "one_struct", struct_launcher_spec
    yield "recorder", partial(recorder_spec, "libamdhip64.so")


HOST_SOURCES: dict[str, Callable[[], BuildSpec]] = {
    **{traits.name: partial(launcher_spec, traits) for traits in _cpu_kernels()},
    **dict(_rows_on_cpu()),
    **dict(_launchers()),
}
DEVICE_KERNELS: dict[str, Callable[[], BuildSpec]] = {
    **{
        traits.name: partial(
            kernel_spec if isinstance(traits, ForwardTraits) else backward_spec, traits
        )
        for traits in _device_kernels()
    },
    **dict(_around_attention_on_amd()),
}


def check(spec: BuildSpec, compiler: Sequence[str], folder: Path, *but: str) -> None:
    """Every source of the build, as the compiler gets it there."""
    for name, text in spec.sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    flags = [flag for flag in spec.cflags if flag not in _TUNING_OF_GCC]
    for name in spec.compiled_sources:
        command = [*compiler, *flags, *_CHECKS, *but, f"-iquote{folder}", str(folder / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def host_compiler(name: Compiler) -> list[str]:
    """The words of its command; the test is skipped where it is not here."""
    zig = zig_program()
    if os.uname().machine != "x86_64" or shutil.which("g++") is None:
        pytest.skip("the instruction sets are those of x86-64, and the C++ library is that of g++")
    if name == "g++":
        return ["g++"]
    if zig is None:
        pytest.skip("ziglang is not installed")
    # Headers of GCC's library use what they themselves call deprecated.
    clang = [str(zig), "clang", "-x", "c++", "-Wno-deprecated-declarations"]
    return [*clang, "-isystem", str(zig.parent / "lib" / "include")]


@pytest.mark.sample(
    ("compiler", "name"), list(itertools.product(get_args(Compiler), HOST_SOURCES)), 4
)
def test_what_hosts_run(compiler, name, tmp_path):
    check(HOST_SOURCES[name](), host_compiler(compiler), tmp_path)


@pytest.mark.sample("name", list(DEVICE_KERNELS), 2)
def test_kernels_for_amd_gpus(name, tmp_path):
    zig = zig_program()
    if zig is None:
        pytest.skip("ziglang is not installed")
    check(DEVICE_KERNELS[name](), [str(zig), "clang", *HIP_FLAGS], tmp_path, _OF_READY_KERNELS)


@pytest.mark.sample("compiler", get_args(Compiler), 1)
@pytest.mark.sample(
    ("variant", "part"),
    [
        (variant, part)
        for variant in get_args(Variant)
        for part in range(1 + len(build_spec(variant).objects))
    ],
    1,
)
def test_the_emulator(compiler, variant, part, tmp_path):
    """What is a variant's own, or an object of it."""
    spec = build_spec(variant)
    check((spec, *spec.objects)[part], host_compiler(compiler), tmp_path)


@pytest.mark.parametrize("compiler", get_args(Compiler))
def test_the_decoder_of_the_emulator(compiler, tmp_path):
    check(decoder_spec(), host_compiler(compiler), tmp_path)
