"""``python -m jitfmha hsa``: import, list, show, disassemble and verify code objects."""

from __future__ import annotations

import argparse
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .exit_codes import FAILED, OK, UsageError
from .output import add_json_flag, byte_size, fields, print_json, progress, table

if TYPE_CHECKING:
    from ..amd.chips import Arch
    from ..amd.import_kernel import ImportedKernel, KernelFacts
    from ..amd.manifest import AnyRow
    from ..emulator.disassembly import DecodedInstruction
    from ..jit.elf import Elf
    from ..replay.kernel_trial import Trial

_ARCHS: tuple[Arch, ...] = ("gfx942", "gfx950")
_CVTS = ("rtne", "rtna", "rtz")
_MASKS = ("none", "top-left", "causal", "window")


def add_parser(commands: Any) -> None:
    """Add the command and its actions."""
    parser = commands.add_parser(
        "hsa",
        help="import, list, show, disassemble and verify code objects",
        description=__doc__,
        epilog="docs/code_objects.md goes through all of it on an example.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    _add_import(actions)
    text = "List the kernels of a tree, or of all trees that calls use."
    lister = actions.add_parser("list", help=text, description=text)
    lister.add_argument("tree", type=Path, nargs="?", metavar="TREE", help="a folder")
    lister.add_argument("--arch", choices=_ARCHS, help="one of them (default: both)")
    add_json_flag(lister)
    lister.set_defaults(run=_list)
    text = "Show what a code object says of its kernels: registers, LDS, symbols, arguments."
    shower = actions.add_parser("show", help=text, description=text)
    shower.add_argument("code_object", type=Path, metavar="FILE.co")
    add_json_flag(shower)
    shower.set_defaults(run=_show)
    text = "Disassemble a kernel with the emulator's decoder."
    decoder = actions.add_parser("disasm", help=text, description=text)
    decoder.add_argument("code_object", type=Path, metavar="FILE.co")
    decoder.add_argument("--kernel", metavar="NAME", help="its symbol, where there are several")
    add_json_flag(decoder)
    decoder.set_defaults(run=_disasm)
    text = (
        "Check whole trees: manifests, files, symbols, metadata, architecture. The exit code is 1 "
        "where there is a problem."
    )
    verifier = actions.add_parser("verify", help=text, description=text)
    verifier.add_argument(
        "trees",
        type=Path,
        nargs="*",
        metavar="TREE",
        help="folders (default: those that calls use)",
    )
    add_json_flag(verifier)
    verifier.set_defaults(run=_verify)


def _add_import(actions: Any) -> None:
    text = "Add a forward kernel of AITER's interface to a tree, from its assembly listing."
    parser = actions.add_parser(
        "import",
        help=text,
        description=(
            f"{text} It is assembled, linked, checked, and run on the emulator against a float64 "
            "reference. Without --into it goes to the tree that JITFMHA_HSA_DIR names, else to "
            "jitfmha/hsa in your folder for data, which calls look into before the package's own."
        ),
    )
    parser.add_argument("listing", type=Path, metavar="FILE.s")
    parser.add_argument("--arch", choices=_ARCHS, required=True)
    parser.add_argument(
        "--variant", nargs="+", default=[], metavar="MI308", help="of gfx942: MI300, MI308 or both"
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp8bf16"), required=True, help="fp8bf16: bf16 out"
    )
    parser.add_argument(
        "--hdim", type=int, nargs=2, required=True, metavar="N", help="of q and k, and of v"
    )
    parser.add_argument("--mask", type=int, choices=(0, 1, 2), required=True)
    parser.add_argument("--mode", choices=("gm0", "gm1"), required=True)
    parser.add_argument("--bf16-cvt", choices=_CVTS, default="rtne", help="(default: rtne)")
    parser.add_argument(
        "--tile", type=int, nargs=2, required=True, metavar="N", help="rows of q, and of k"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of a workgroup (default: 512; 256 for 192 128)"
    )
    parser.add_argument("--kernel", metavar="NAME", help="its symbol, where there are several")
    parser.add_argument("--name", help="of the kernel in the tree (default: as in the listing)")
    parser.add_argument("--into", type=Path, metavar="DIR", help="another tree")
    parser.add_argument(
        "--replace", action="store_true", help="a kernel that serves the same, or has the same file"
    )
    parser.add_argument(
        "--sanitize", action="store_true", help="run it with the emulator's sanitizer"
    )
    parser.add_argument("--seed", type=int, help="of the inputs of its run (default: a fresh one)")
    add_json_flag(parser)
    parser.set_defaults(run=_import)


# ---- import --------------------------------------------------------------------------------------


def _import(args: argparse.Namespace) -> int:
    from ..amd.import_kernel import ImportRefused, add_to_tree, import_listing, rows_of
    from ..amd.tree import user_tree
    from ..jit.regular_file import read_regular_file
    from ..jit.toolchain.device_compiler import DeviceCompileError
    from ..replay.kernel_trial import try_kernel

    seed = _seed(args.seed)
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
    facts = _facts_of_import(kernel, trial, root, files, unused, seed)
    if args.json:
        print_json(facts)
    else:
        print(fields([(name, _in_words(value)) for name, value in facts.items()]))
    return FAILED if trial.findings or unused else OK


def _facts(args: argparse.Namespace) -> KernelFacts:
    from ..amd.import_kernel import KernelFacts

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


def _seed(given: int | None) -> int:
    import secrets

    seed = secrets.randbelow(2**31) if given is None else given
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed {seed}: not from 0 to 2**63 - 1")
    return seed


def _facts_of_import(
    kernel: ImportedKernel,
    trial: Trial,
    root: Path,
    files: list[Path],
    unused: list[str],
    seed: int,
) -> dict[str, Any]:
    return {
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


def _in_words(value: object) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value)) or "none"
    return str(value)


# ---- list ----------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    from ..amd.tree_check import manifest_folders

    archs = [arch for arch in _ARCHS if args.arch in (None, arch)]
    try:
        if args.tree is not None:
            manifest_folders(args.tree)
        rows = [row for arch in archs for row in _rows(arch, args.tree)]
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
    if args.json:
        print_json(rows)
    elif rows:
        headers = ("tree", "arch", "kernel", "pass", "dtype", "hdim", "mask", "mode", "for", "file")
        print(table(headers, [_cells(row) for row in rows]))
    else:
        print("no kernels" if args.tree is None else f"no kernels in {args.tree}")
    return OK


def _rows(arch: Arch, root: Path | None) -> list[dict[str, Any]]:
    """The usable kernels of an architecture; one that several chips have is there once.

    Of a code object for backward passes it is the kernel that makes gradients.
    """
    from ..amd.tree import Tree, architecture_folder, trees_of
    from ..amd.tree_check import chips_of_folders

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
    from ..amd.manifest import KernelRow, ReadyBackwardRow

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
        "bf16_cvt": (*_CVTS, "any")[row.bf16_cvt],
        "variants": [],
        "files": [],
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        *(row["tree"], row["arch"], row["kernel"], row["pass"], row["dtype"]),
        *(f"{row['hdim_q']}x{row['hdim_v']}", row["mask"], row["mode"]),
        *(" ".join(row["variants"]) or "all", Path(row["files"][0]).name),
    )


# ---- show ----------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[Elf, Arch]:
    """Read a code object, and its architecture from its header."""
    from ..amd.chips import architecture
    from ..jit.elf import Elf
    from ..jit.regular_file import read_regular_file

    try:
        elf = Elf(read_regular_file(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, struct.error) as error:
        raise UsageError(f"{path} is not a code object: {error}") from error
    archs = {architecture(name).elf_machine: name for name in _ARCHS}
    machine = elf.flags & 0xFF
    if elf.machine != 224 or machine not in archs:
        raise UsageError(
            f"{path} is for ELF machine {elf.machine} with EF_AMDGPU_MACH {machine:#x}; known are "
            + ", ".join(f"224 with {number:#x} ({name})" for number, name in archs.items())
        )
    return elf, archs[machine]


def _show(args: argparse.Namespace) -> int:
    from ..amd.code_object import kernel_descriptors, kernel_metadata

    elf, arch = _read(args.code_object)
    try:
        kernels = [
            {
                "kernel": symbol,
                "lds_bytes": descriptor.lds_bytes,
                "vgprs": descriptor.vgprs,
                "kernarg_bytes": descriptor.kernarg_bytes,
                "metadata": kernel_metadata(elf, symbol),
            }
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
    print(fields([("file", str(args.code_object)), ("arch", arch), ("size", _size(elf))]))
    for kernel in kernels:
        print()
        print(fields(_shown_kernel(kernel)))
    print("\n" + table(("address", "symbol"), [(f"{at:#x}", name) for name, at in symbols]))
    return OK


def _size(elf: Elf) -> str:
    return byte_size(len(elf.image))


def _shown_kernel(kernel: dict[str, Any]) -> list[tuple[str, str]]:
    from ..jit.elf import printable

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
        ", ".join(f"{str(name).lstrip('.')} {value}" for name, value in each.items())
        for each in arguments
        if isinstance(each, dict)
    ]
    shown.append(("arguments", printable_lines(lines) or "not told"))
    return shown


def printable_lines(lines: list[str]) -> str:
    """Lines of a file, as a terminal may show them."""
    from ..jit.elf import printable

    return "\n".join(printable(line) for line in lines)


# ---- disasm --------------------------------------------------------------------------------------


def _disasm(args: argparse.Namespace) -> int:
    from ..amd.code_object import kernel_descriptors, list_of_names
    from ..emulator.disassembly import disassemble, without_padding

    elf, arch = _read(args.code_object)
    try:
        names = list(kernel_descriptors(elf))
        wanted = args.kernel or (names[0] if len(names) == 1 else None)
        if wanted not in names:
            asked = "--kernel is missing" if wanted is None else f"--kernel {wanted} is not there"
            raise UsageError(f"{asked}; {args.code_object} has {list_of_names(names)}")
        instructions = without_padding(list(disassemble(elf, wanted, arch)))
    except (ValueError, LookupError, struct.error) as error:
        raise UsageError(f"{args.code_object} is damaged: {error}") from error
    if args.json:
        print_json([each._asdict() for each in instructions])
    else:
        print(_as_listing(wanted, instructions))
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
        lines.append(f"  {each.text:<60} // {each.offset:06x}: {words}{goes_to}".rstrip())
    return "\n".join(lines)


# ---- verify --------------------------------------------------------------------------------------


def _verify(args: argparse.Namespace) -> int:
    from ..amd.tree_check import check_tree

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
            print(f"{root}: {check.rows} rows, {check.files} code objects, {found}")
            for problem in check.problems:
                print(f"  problem: {problem}")
            for remark in check.remarks:
                print(f"  remark: {remark}")
    return FAILED if any(check.problems for check in checks.values()) else OK


def _trees_of_calls() -> list[Path]:
    """What the environment names, or the user's own tree where there is one, and the package's."""
    import os

    from ..amd.tree import AITER_ASM_DIR, HSA_DIR, default_user_tree
    from ..jit.resources import hsa_dir

    named = [Path(os.environ[name]) for name in (HSA_DIR, AITER_ASM_DIR) if os.environ.get(name)]
    own = default_user_tree()
    if not os.environ.get(HSA_DIR) and own is not None and own.is_dir():
        named.insert(0, own)
    return [*named, hsa_dir()]
