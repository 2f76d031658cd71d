"""``python -m jitfmha kernels``: what AMD GPUs are served, and which rules a combination breaks."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING, Any

from .exit_codes import FAILED, OK, UsageError
from .output import add_json_flag, fields, print_json, table

if TYPE_CHECKING:
    from ..amd.chips import Arch
    from ..amd.manifest import KernelRow
    from ..kernels.compiled.tile_table import Tile

_MASKS = ("none", "top-left", "causal")
_LINE_WIDTH = 100
_FOLDED: Any = {"width": _LINE_WIDTH, "initial_indent": "  ", "subsequent_indent": "      "}


def add_parser(commands: Any) -> None:
    """Add the command and its two actions."""
    parser = commands.add_parser(
        "kernels",
        help="list what AMD GPUs are served, or say which rules a combination breaks",
        description=(
            "What AMD GPUs are served at all, and which rules a combination breaks, each with its "
            "source. Which kernel one call takes, and why no other, is what `explain` says."
        ),
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    text = (
        "List the kernels for each architecture: the tiles of those that are compiled for a call, "
        "and those that come ready."
    )
    lister = actions.add_parser("list", help=text, description=text)
    lister.add_argument("--arch", choices=["gfx942", "gfx950"], help="one of them (default: both)")
    add_json_flag(lister)
    lister.set_defaults(run=_list)
    text = (
        "Say which rules a combination breaks; the exit code is 1 when it breaks any, and is "
        "not served."
    )
    validator = actions.add_parser("validate", help=text, description=text)
    _add_flags_of_combination(validator)
    add_json_flag(validator)
    validator.set_defaults(run=_validate)


def _add_flags_of_combination(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", choices=["gfx942", "gfx950"], help="one of them (default: both)")
    parser.add_argument("--dtype", default="bf16", help="of q, as bf16 (default) or fp8_e4m3fn")
    parser.add_argument("--kv-dtype", help="of k and v (default: as q)")
    parser.add_argument("--hdim", type=int, default=128, help="hdim of q and k (default: 128)")
    parser.add_argument("--hdim-v", type=int, help="hdim of v (default: as q)")
    parser.add_argument("--mask", default="none", help="as in fmha_fwd, e.g. causal or b:128,0")
    parser.add_argument("--mode", default="gm0", help="gm0 (default) or gm1")
    parser.add_argument("--direction", default="forward", help="forward (default) or backward")
    parser.add_argument(
        "--features",
        nargs="*",
        default=[],
        metavar="FEATURE",
        help="what else the call has, such as alibi, bias, dropout or column_major_v",
    )
    parser.add_argument("--layout", default="bshd", help="bshd (default), bhsd or sbhd")
    parser.add_argument("--page-size", type=int, help="keys of a page (default: no pages)")
    parser.add_argument("--num-splits", type=int, default=0, help="of the keys (default: 0, any)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8, help="heads of q")
    parser.add_argument("--heads-k", type=int, help="heads of k and v (default: as q)")
    parser.add_argument("--seqlen", type=int, default=1024, help="seqlen of q")
    parser.add_argument("--seqlen-k", type=int, help="seqlen of k and v (default: as q)")


def _archs(args: argparse.Namespace) -> list[Arch]:
    from typing import get_args

    from ..amd.chips import Arch

    return [arch for arch in get_args(Arch) if args.arch in (None, arch)]


# ---- validate ------------------------------------------------------------------------------------


def _validate(args: argparse.Namespace) -> int:
    from ..ahead.validate import validate_config

    names = (
        *("dtype", "kv_dtype", "hdim", "hdim_v", "mode", "direction", "features", "layout"),
        *("page_size", "num_splits", "batch", "heads", "heads_k", "seqlen", "seqlen_k"),
    )
    given = {name: getattr(args, name) for name in names}
    mask = int(args.mask) if args.mask.isdecimal() else args.mask
    try:
        broken = {arch: validate_config(arch, mask=mask, **given) for arch in _archs(args)}
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    if args.json:
        print_json({arch: [rule._asdict() for rule in rules] for arch, rules in broken.items()})
    else:
        for arch, rules in broken.items():
            print(f"{arch}:" if rules else f"{arch}: no rule is broken")
            for rule in rules:
                lines = (rule.reason, f"  rule: {rule.name}", f"  source: {rule.source}")
                print("\n".join(textwrap.fill(line, **_FOLDED) for line in lines))
    return FAILED if any(broken.values()) else OK


# ---- list ----------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    facts = {arch: _facts(arch) for arch in _archs(args)}
    if args.json:
        print_json(facts)
        return OK
    for i, (arch, of_arch) in enumerate(facts.items()):
        print("\n" * (i > 0) + _in_words(arch, of_arch))
    return OK


def _facts(arch: Arch) -> dict[str, Any]:
    """Gather what is served as plain values, for JSON."""
    from ..amd.chips import architecture, chip
    from ..amd.tree import trees_of
    from ..kernels.compiled.rules import SERVES
    from ..kernels.compiled.tiles import tile_table
    from ..problem.features import DTYPE_FEATURES

    data = tile_table(arch)
    trees = trees_of(chip(architecture(arch).unlisted_chip))
    return {
        "data_types": [row._asdict() for row in data.elements],
        "features": sorted(x.name.lower() for x in SERVES - {*DTYPE_FEATURES.values()}),
        "compiled": [_of_tile(tile) for tile in data.tiles],
        "waves_of_simd": [row._asdict() for row in data.simd_waves],
        "ready": [_of_row(str(tree), row) for tree in trees for row in tree.forward.rows],
    }


def _of_tile(tile: Tile) -> dict[str, Any]:
    return tile._asdict() | {"dtypes": list(tile.dtypes), "threads": tile.threads}


def _of_row(tree: str, row: KernelRow) -> dict[str, Any]:
    from ..problem.problem import BF16_CVTS

    return {
        "name": row.name,
        "tree": tree,
        "dtype": row.dtype,
        "hdim_q": row.hdim_q,
        "hdim_v": row.hdim_v,
        "mask": _MASKS[row.mask],
        "mode": f"gm{row.mode}",
        "bf16_cvt": BF16_CVTS[row.bf16_cvt],
        "tile_q": row.ts_qo,
        "tile_k": row.ts_kv,
        "threads": row.threads,
    }


def _in_words(arch: Arch, facts: dict[str, Any]) -> str:
    """The facts of an architecture as tables, each line within the width of a page."""
    lists = {
        "data types": [row["dtype"] for row in facts["data_types"]],
        "features": facts["features"],
    }
    sections = [
        arch,
        fields([(name, _wrapped(", ".join(values))) for name, values in lists.items()]),
        "\ncompiled for a call, whose kernel takes the first row with room for its head dimensions",
        table(
            ("kernel", "data types", "hdim", "slices", "tile", "waves", "LDS bytes", "line"),
            [_cells_of_tile(row) for row in facts["compiled"]],
        ),
        "\nwaves that share a SIMD, by the vector registers that each holds throughout its loop",
        table(
            ("kernels", "features", "registers up to", "waves", "line"),
            [_cells_of_waves(row) for row in facts["waves_of_simd"]],
        ),
    ]
    for tree in dict.fromkeys(row["tree"] for row in facts["ready"]):
        rows = [row for row in facts["ready"] if row["tree"] == tree]
        sections += [f"\nready: {tree}", _table_of_ready(rows)]
    return "\n".join(sections)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _LINE_WIDTH - len("data types  ")))


def _cells_of_tile(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        *(row["kernel"], " ".join(row["dtypes"]), f"{row['hdim_q']}x{row['hdim_v']}"),
        *(str(row["slices"]), f"{row['tile_q']}x{row['tile_k']}", str(row["waves"])),
        *(str(row["lds_bytes"]), str(row["line"])),
    )


def _cells_of_waves(row: dict[str, Any]) -> tuple[str, ...]:
    numbers = row["held_registers"], row["waves_of_simd"], row["line"]
    return row["direction"], row["features"], *map(str, numbers)


def _table_of_ready(rows: list[dict[str, Any]]) -> str:
    """Kernels that differ in how they round to bf16 alone share a line."""
    roundings: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        cells = (
            *(row["dtype"], f"{row['hdim_q']}x{row['hdim_v']}", row["mask"], row["mode"]),
            *(f"{row['tile_q']}x{row['tile_k']}", str(row["threads"])),
        )
        roundings.setdefault(cells, []).append(row["bf16_cvt"])
    headers = ("data type", "hdim", "mask", "mode", "tile", "threads", "bf16_cvt")
    return table(headers, [(*cells, " ".join(cvts)) for cells, cvts in roundings.items()])
