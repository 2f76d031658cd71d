"""Builds the emulator on first use and loads it, in three variants: plain, check, profile.

Of the code, what no hook is in (execution/hooks.h) is one object in all of them, and what has hooks
is one object in the two that observe; each is built once. The decoder is a library of its own, too,
which is built in seconds.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal, get_args

from .. import jit
from ..amd import chips
from ..amd.chips import SIMDS
from ..amd.node import VIRTUAL_NODE
from ..jit.resources import templates_dir
from ..jit.status import say
from ..planning.target import AVX2_FLAGS, AVX512_FLAGS, CpuIsa, cpu_target
from . import rates
from .shared_structs import (
    DEFAULT_MOST_STEPS,
    DEFAULT_SAMPLE,
    DEFAULT_TIME_SLICE,
    OPTIONS,
    PROFILE_OPTIONS,
    RANGE,
    FindingKind,
)

Variant = Literal["plain", "check", "profile"]

_FOLDER = "emulator"
_SUFFIXES = (".cpp", ".h", ".inc", ".h.in")
_CFLAGS = (
    "-std=c++17",
    "-O2",
    # -O2 alone vectorises only what cannot be slower.
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-fPIC",
    "-fvisibility=hidden",
    # A lane of a register is read as whatever type the instruction says.
    "-fno-strict-aliasing",
    # An instruction rounds exactly where the ISA says.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
)
# Of instruction sets with wider vectors than every processor has.
_ISA_FLAGS: dict[CpuIsa, tuple[str, ...]] = {
    "avx2": AVX2_FLAGS,
    **dict.fromkeys(("amx", "avx512_bf16", "avx512"), (*AVX512_FLAGS, "-mprefer-vector-width=512")),
}
_HOOKS = "execution/hooks.h"
_OBSERVED_FLAG = "-DJITFMHA_EMULATOR_OBSERVED=1"
# Tables are included by a macro that is defined as the quoted name.
_INCLUDED = re.compile(r'^#(?:include|define \w+) "(.+)"', re.MULTILINE)
# Whose sources one library alone has.
_LIBRARY_OF_FOLDER = {"checks": "check", "profile": "profile", "decoder": "decoder"}
_COMPILED_IN_DECODER = (
    *(f"decode/{name}.cpp" for name in ("decode", "disassembly", "text")),
    "decoder/rows.cpp",
    "execution/fault.cpp",
)


@cache
def build_spec(variant: Variant) -> jit.BuildSpec:
    """The sources and flags of one variant."""
    isa = cpu_target().isa
    flags = (*_CFLAGS, *_ISA_FLAGS.get(isa, ()))
    sources = _sources(variant)
    units = {name for name in sources if name.endswith(".cpp")}
    common = {name for name in units if _HOOKS not in _with_included([name], sources)}
    objects = [_object(f"emulator_common_{isa}", common, sources, flags)]
    units -= common
    if variant != "plain":
        flags = (*flags, _OBSERVED_FLAG)
        observed = {name for name in units if name.partition("/")[0] not in _LIBRARY_OF_FOLDER}
        objects.append(_object(f"emulator_observed_{isa}", observed, sources, flags))
        units -= observed
    return jit.BuildSpec(
        name=f"emulator_{variant}_{isa}",
        sources=_with_included(units, sources),
        cflags=flags,
        ldflags=("-pthread",),
        why=f"the first use of the emulator ({variant})",
        objects=tuple(objects),
    )


@cache
def decoder_spec() -> jit.BuildSpec:
    """The sources and flags of the decoder alone, which executes nothing."""
    return jit.BuildSpec(
        name="emulator_decoder",
        sources=_with_included(_COMPILED_IN_DECODER, _sources("decoder")),
        # It decodes a kernel in milliseconds whatever the level, and is compiled for seconds.
        cflags=tuple("-O1" if flag == "-O2" else flag for flag in _CFLAGS),
        why="the first disassembly",
    )


@cache
def load_decoder() -> ctypes.CDLL:
    """The decoder alone: ``jitfmha_emulator_disassemble`` and ``jitfmha_emulator_definitions``."""
    return jit.load(decoder_spec())


@cache
def load(variant: Variant = "plain") -> ctypes.CDLL:
    """The loaded library, built where the cache lacks it, which takes up to a minute."""
    spec = build_spec(variant)
    if not jit.is_built(spec):
        say("the emulator is built once, in up to a minute on two cores; its variants share a part")
    return jit.load(spec)


def taken(library: ctypes.CDLL, what: str) -> list[dict[str, Any]]:
    """What is kept of this thread's launches, and forgotten then; ``RuntimeError`` if there is
    none.
    """
    take = getattr(library, f"jitfmha_emulator_take_{what}", None)
    if take is None:
        raise RuntimeError(f"this variant of the emulator keeps no {what}")
    take.restype = ctypes.c_char_p
    kept: list[dict[str, Any]] = json.loads(take())
    return kept


def _sources(library: str) -> dict[str, str]:
    folder = templates_dir() / _FOLDER
    values = {
        "chips.h.in": _facts_about_chips(),
        "profile/rates.h.in": _rates(),
        "shared_structs.h.in": _shared_structs(),
    }
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    return {
        name.removesuffix(".in"): jit.render(f"{_FOLDER}/{name}", values.get(name, {}))
        for name in names
        if name.endswith(_SUFFIXES)
        and _LIBRARY_OF_FOLDER.get(name.partition("/")[0], library) == library
    }


def _with_included(units: Iterable[str], sources: dict[str, str]) -> dict[str, str]:
    """These sources, and those that they include, directly or not; in the order of their names."""
    found: set[str] = set()
    new = set(units)
    while new:
        found |= new
        new = {name for each in new for name in _INCLUDED.findall(sources[each])} - found
    return {name: sources[name] for name in sorted(found)}


def _object(
    name: str, units: Iterable[str], sources: dict[str, str], flags: tuple[str, ...]
) -> jit.BuildSpec:
    return jit.BuildSpec(
        name,
        _with_included(units, sources),
        flags,
        why="a part of the emulator",
        toolchain="host_object",
    )


def _facts_about_chips() -> dict[str, object]:
    return {
        "simds": SIMDS,
        "architectures": _rows(_architecture_row(each) for each in _architectures()),
        "devices": _rows(_device_row(chips.chip(name)) for name in VIRTUAL_NODE.values()),
    }


def _rates() -> dict[str, object]:
    of_architectures = [rates.rates_of(each.name) for each in _architectures()]
    return {
        "fields": _rows((f"u32 {name};" for name in of_architectures[0]), indent=2),
        "rates": _rows(
            "{" + ", ".join(map(str, each.values())) + "}," for each in of_architectures
        ),
        "chip_rates": _rows(
            f"{{{each.streaming:g}, {speed.cycle:g}, {speed.cycle_of_matrix_work:g}}},"
            for each in map(rates.rates_of_chip, VIRTUAL_NODE.values())
            for speed in (each.clock.speed,)
        ),
    }


def _architectures() -> list[chips.Architecture]:
    return list(dict.fromkeys(each.architecture for each in chips.chips()))


def _architecture_row(arch: chips.Architecture) -> str:
    numbers = (arch.elf_machine, arch.lds_bytes, arch.lds_granularity)
    return f'{{k{arch.name.capitalize()}, "{arch.name}", {", ".join(map(str, numbers))}}},'


def _device_row(chip: chips.Chip) -> str:
    if chip.peak_clock_mhz is None or chip.memory_gib is None:
        raise ValueError(f"{chip} cannot be emulated: its clock or its memory is not published")
    arch = f"k{chip.architecture.name.capitalize()}"
    numbers = (chip.compute_units, chip.xcds, hex(chip.pci_ids[0]), chip.peak_clock_mhz * 1000)
    memory = f"u64{{{chip.memory_gib}}} << 30"
    return f'{{"AMD Instinct {chip}", {arch}, {", ".join(map(str, numbers))}, {memory}}},'


def _shared_structs() -> dict[str, object]:
    kinds = get_args(FindingKind)
    return {
        "options": OPTIONS.cpp(),
        "range": RANGE.cpp(),
        "profile_options": PROFILE_OPTIONS.cpp(),
        "default_time_slice": DEFAULT_TIME_SLICE,
        "default_most_steps": DEFAULT_MOST_STEPS,
        "default_sample": DEFAULT_SAMPLE,
        "finding_kinds": _rows((f"{kind.replace('-', '_')}," for kind in kinds), indent=2),
        "finding_kind_names": _rows(f'"{kind}",' for kind in kinds),
    }


def _rows(rows: Iterable[str], indent: int = 4) -> str:
    """What stands for a placeholder that is indented."""
    return f"\n{' ' * indent}".join(rows)
