"""``python -m jitfmha hsa``: import, list, show, disassemble and check code objects."""

from __future__ import annotations

import argparse
import os
import secrets
import struct
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

from .. import jit
from ..amd.chips import Arch, architecture, chips_of_folders
from ..amd.code_object import kernel_descriptors, kernel_metadata
from ..amd.import_kernel import ImportRefused, KernelFacts, add_to_tree, import_listing, rows_of
from ..amd.manifest import AnyRow, KernelRow, ReadyBackwardRow
from ..amd.tree import (
    AITER_ASM_DIR,
    HSA_DIR,
    Tree,
    architecture_folder,
    default_user_tree,
    trees_of,
    user_tree,
)
from ..amd.tree_check import check_tree, manifest_folders
from ..emulator.disassembly import DecodedInstruction, disassemble, without_padding
from ..emulator.wait_states import missing_waits
from ..jit.elf import Elf, printable
from ..jit.regular_file import read_regular_file
from ..jit.resources import hsa_dir
from ..jit.toolchain.device_compiler import DeviceCompileError
from ..problem.problem import BF16_CVTS
from ..replay.kernel_trial import try_kernel
from .emulated import kernel_of
from .exit_codes import FAILED, OK, UsageError
from .output import byte_size, fields, print_json, progress, show, table

_MASKS = ("none", "top-left", "causal", "window")


def run(args: argparse.Namespace) -> int:
    """Do what the action says."""
    actions = {
        "import": _import,
        "list": _list,
        "show": _show,
        "disasm": _disasm,
        "verify": _verify,
        "waits": _waits,
    }
    return actions[args.action](args)


# ---- import --------------------------------------------------------------------------------------


def _import(args: argparse.Namespace) -> int:
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    try:
        listing = read_regular_file(args.listing).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{args.listing} cannot be read: {error}") from error
    root = (user_tree() if args.into is None else args.into).absolute()
    try:
        kernel = import_listing(listing, _facts(args), args.kernel)
        progress(f"running {kernel.cells['knl_name']} on the emulator, seed {seed}")
        trial = try_kernel(kernel, seed=seed, sanitizes=args.sanitize)
        files = add_to_tree(kernel, root, replaces=args.replace)
        unused = [f"{chip}: {why}" for chip, row, why in rows_of(kernel, root) if row is None]
    except ImportRefused as error:
        raise UsageError(f"{args.listing} is not imported: {error}") from error
    except DeviceCompileError as error:
        raise RuntimeError(f"{args.listing} is not assembled: {error.output}") from error
    facts = {
        "kernel": kernel.code_object.symbol,
        "in the listing": kernel.listing_symbol,
        "tree": str(root),
        "files": [str(path) for path in files],
        "row": ",".join(kernel.cells.values()),
        "argument bytes": kernel.code_object.kernarg_bytes,
        "LDS bytes": kernel.lds_bytes,
        "vector registers": kernel.vgprs,
        "ran on": f"{trial.emulated}, lengths {trial.lengths}, seed {seed}",
        "errors": [
            f"{name} {judged.error:.3g}, where rounding explains {judged.allowed:.3g}"
            for name, judged in trial.judged.items()
        ],
        "findings": [str(finding) for finding in trial.findings],
        "not used": unused,
    }
    if args.json:
        print_json(facts)
    else:
        listed = {x: "\n".join(y) or "none" for x, y in facts.items() if isinstance(y, list)}
        show(fields([(name, str(value)) for name, value in (facts | listed).items()]))
    return FAILED if trial.findings or unused else OK


def _facts(args: argparse.Namespace) -> KernelFacts:
    return KernelFacts(
        arch=args.arch,
        variants=tuple(dict.fromkeys(args.variant)),
        dtype=args.dtype,
        hdim=tuple(args.hdim),
        mask=args.mask,
        mode=args.mode,
        bf16_cvt=args.bf16_cvt,
        tile=tuple(args.tile),
        threads=args.threads,
        name=args.name,
    )


# ---- list ----------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    archs = [arch for arch in get_args(Arch) if args.arch in (None, arch)]
    try:
        if args.tree is not None:
            manifest_folders(args.tree)
        rows = [row for arch in archs for row in _rows(arch, args.tree)]
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
    if args.json:
        print_json(rows)
    elif rows:
        headers = ("kernel", "pass", "dtype", "hdim", "mask", "mode", "for")
        of_trees = groupby(rows, itemgetter("tree", "arch"))
        tables = (
            f"{tree}\n{arch}:\n{table(headers, [_cells(row) for row in of_tree])}"
            for (tree, arch), of_tree in of_trees
        )
        show("\n\n".join(tables))
    else:
        show("no kernels" if args.tree is None else f"no kernels in {args.tree}")
    return OK


def _rows(arch: Arch, root: Path | None) -> list[dict[str, Any]]:
    """The usable kernels of an architecture; one that several chips have is there once.

    Of a code object for backward passes it is the kernel that makes gradients.
    """
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    oddities: list[str] = []
    for chip in chips_of_folders(arch):
        folder = None if root is None else architecture_folder(root, arch)
        given = () if folder is None else (Tree(str(root), folder, chip),)
        for tree in trees_of(chip) if root is None else given:
            oddities += (oddity for each in tree.manifests for oddity in each.oddities)
            for row in (row for each in tree.manifests for row in each.rows):
                path = tree.path_of(row)
                key = str(tree), row.symbol, path.name
                fact = found.setdefault(key, _fact(str(tree), arch, row))
                if str(path) not in fact["files"]:
                    fact["files"].append(str(path))
                    fact["variants"] += [chip.kernel_folder] if "/" in row.file else []
    if root is not None and oddities and not found:
        raise UsageError("\n".join(dict.fromkeys(oddities)))
    return list(found.values())


def _fact(tree: str, arch: Arch, row: AnyRow) -> dict[str, Any]:
    if isinstance(row, ReadyBackwardRow):
        kind, mask = "backward", "window" if row.is_masked else "none"
    else:
        kind = "forward" if isinstance(row, KernelRow) else f"backward {row.kind}"
        mask = _MASKS[row.mask]
    return {
        "tree": tree,
        "arch": arch,
        "kernel": row.name,
        "symbol": row.symbol,
        "pass": kind,
        "dtype": row.dtype,
        "hdim_q": row.hdim_q,
        "hdim_v": row.hdim_v,
        "mask": mask,
        "mode": f"gm{row.mode}",
        "bf16_cvt": (*BF16_CVTS, "any")[row.bf16_cvt],
        "variants": [],
        "files": [],
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        *(row["kernel"], row["pass"], row["dtype"], f"{row['hdim_q']}x{row['hdim_v']}"),
        *(row["mask"], row["mode"], " ".join(row["variants"]) or "all"),
    )


# ---- show ----------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[Elf, Arch]:
    try:
        elf = Elf(read_regular_file(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, struct.error) as error:
        raise UsageError(f"{path} is not a code object: {error}") from error
    archs = {architecture(name).elf_machine: name for name in get_args(Arch)}
    machine = elf.flags & 0xFF
    if elf.machine != 224 or machine not in archs:
        raise UsageError(
            f"{path} is for ELF machine {elf.machine} with EF_AMDGPU_MACH {machine:#x}; known are "
            + ", ".join(f"224 with {number:#x} ({name})" for number, name in archs.items())
        )
    return elf, archs[machine]


def _show(args: argparse.Namespace) -> int:
    elf, arch = _read(args.code_object)
    try:
        kernels = [
            {"kernel": symbol, **descriptor._asdict(), "metadata": kernel_metadata(elf, symbol)}
            for symbol, descriptor in kernel_descriptors(elf).items()
        ]
        symbols = [(each.name, each.address) for each in elf.dynamic_symbols() if each.name]
    except (ValueError, LookupError, struct.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{args.code_object} is damaged: {error}") from error
    facts = {
        "file": str(args.code_object),
        "arch": arch,
        "bytes": len(elf.image),
        "kernels": kernels,
        "symbols": dict(symbols),
    }
    if args.json:
        print_json(facts)
        return OK
    size = byte_size(len(elf.image))
    show(fields([("file", str(args.code_object)), ("arch", arch), ("size", size)]))
    for kernel in kernels:
        show()
        show(fields(_shown_kernel(kernel)))
    show("\n" + table(("address", "symbol"), [(f"{at:#x}", name) for name, at in symbols]))
    return OK


def _shown_kernel(kernel: dict[str, Any]) -> list[tuple[str, str]]:
    metadata = kernel["metadata"]
    known = metadata if isinstance(metadata, dict) else {}
    shown = [
        ("kernel", printable(kernel["kernel"])),
        ("LDS", byte_size(kernel["lds_bytes"])),
        ("registers", f"{kernel['vgprs']} vector, with those for accumulation"),
        ("in descriptor", f"{kernel['kernarg_bytes']} bytes of arguments"),
    ]
    shown += [
        (str(name).lstrip("."), printable(str(value)))
        for name, value in known.items()
        if name not in (".args", ".name", ".symbol")
    ]
    arguments = known.get(".args") or []
    lines = [
        printable(", ".join(f"{str(name).lstrip('.')} {value}" for name, value in each.items()))
        for each in arguments
        if isinstance(each, dict)
    ]
    return [*shown, ("arguments", "\n".join(lines) or "not told")]


# ---- disasm --------------------------------------------------------------------------------------


def _disasm(args: argparse.Namespace) -> int:
    elf, arch = _read(args.code_object)
    try:
        asked = f"--kernel {'is missing' if args.kernel is None else f'{args.kernel} is not there'}"
        kernel = kernel_of(elf.image, args.code_object, args.kernel, asked)
        instructions = without_padding(list(disassemble(elf, kernel, arch)))
    except (ValueError, LookupError, struct.error) as error:
        raise UsageError(f"{args.code_object} is damaged: {error}") from error
    if args.json:
        print_json([each._asdict() for each in instructions])
    else:
        show(_as_listing(kernel, instructions))
    return OK


def _as_listing(symbol: str, instructions: list[DecodedInstruction]) -> str:
    """Write the code as a listing, with a label wherever a branch goes."""
    targets = {each.target for each in instructions if each.target is not None}
    lines = [f"{symbol}:"]
    for each in instructions:
        if each.offset in targets:
            lines.append(f"L{each.offset:x}:")
        words = " ".join(f"{word:08x}" for word in each.words)
        goes_to = "" if each.target is None else f" -> L{each.target:x}"
        lines.append(f"  {each.text:<46} // {each.offset:06x}: {words}{goes_to}".rstrip())
    return "\n".join(lines)


# ---- verify --------------------------------------------------------------------------------------


def _verify(args: argparse.Namespace) -> int:
    checks = {}
    for root in args.trees or _trees_of_calls():
        try:
            checks[str(root)] = check_tree(root)
        except FileNotFoundError as error:
            raise UsageError(str(error)) from error
    if args.json:
        print_json({root: vars(check) for root, check in checks.items()})
    else:
        for root, check in checks.items():
            found = f"{len(check.problems) or 'no'} problem{'s' * (len(check.problems) != 1)}"
            show(f"{root}: {check.rows} rows, {check.files} code objects, {found}")
            for problem in check.problems:
                show(f"  problem: {problem}")
            for remark in check.remarks:
                show(f"  remark: {remark}")
    return FAILED if any(check.problems for check in checks.values()) else OK


def _trees_of_calls() -> list[Path]:
    """What the environment names, or the user's own tree where there is one, and the package's."""
    named = [Path(os.environ[name]) for name in (HSA_DIR, AITER_ASM_DIR) if os.environ.get(name)]
    own = default_user_tree()
    if not os.environ.get(HSA_DIR) and own is not None and own.is_dir():
        named.insert(0, own)
    return [*named, hsa_dir()]


# ---- waits ---------------------------------------------------------------------------------------


def _waits(args: argparse.Namespace) -> int:
    paths = args.code_objects or sorted(
        path for entry in jit.cache_entries() for path in entry.path.glob("*.co")
    )
    found = {str(path): missing_waits(_read(path)[0].image) for path in paths}
    if args.json:
        print_json({path: [vars(place) for place in places] for path, places in found.items()})
    else:
        for path, places in found.items():
            for place in places:
                show(f"{path}: {place}")
        faulty = sum(map(bool, found.values()))
        show(f"{len(found)} code objects, {faulty or 'none'} of which lack wait states")
    return FAILED if any(found.values()) else OK
