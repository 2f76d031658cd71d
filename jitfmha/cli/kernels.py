"""``python -m jitfmha kernels``: what AMD GPUs are served, and which rules a combination breaks."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any, get_args

from ..ahead.validate import validate_config
from ..amd.chips import Arch, architecture, chip
from ..amd.manifest import KernelRow
from ..amd.tree import trees_of
from ..kernels.compiled.rules import SERVES
from ..kernels.compiled.tiles import tile_table
from ..problem.features import DTYPE_FEATURES
from ..problem.problem import BF16_CVTS
from .exit_codes import FAILED, OK, UsageError
from .output import fields, print_json, table

_MASKS = ("none", "top-left", "causal")
_LINE_WIDTH = 100
_FOLDED: Any = {"width": _LINE_WIDTH, "initial_indent": "  ", "subsequent_indent": "      "}


def run(args: argparse.Namespace) -> int:
    """List what is served, or say which rules the combination of the flags breaks."""
    archs = [arch for arch in get_args(Arch) if args.arch in (None, arch)]
    if args.action == "validate":
        return _validate(args, archs)
    facts = {arch: _facts(arch) for arch in archs}
    if args.json:
        print_json(facts)
    else:
        print("\n\n".join(_in_words(arch, of_arch) for arch, of_arch in facts.items()))
    return OK


def _validate(args: argparse.Namespace, archs: list[Arch]) -> int:
    others = ("command", "action", "json", "arch")
    given = {name: value for name, value in vars(args).items() if name not in others}
    try:
        broken = {arch: validate_config(arch, **given) for arch in archs}
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    if args.json:
        print_json({arch: [rule._asdict() for rule in rules] for arch, rules in broken.items()})
        return FAILED if any(broken.values()) else OK
    for arch, rules in broken.items():
        print(f"{arch}:" if rules else f"{arch}: no rule is broken")
        for rule in rules:
            lines = (rule.reason, f"  rule: {rule.name}", f"  source: {rule.source}")
            print("\n".join(textwrap.fill(line, **_FOLDED) for line in lines))
    return FAILED if any(broken.values()) else OK


def _facts(arch: Arch) -> dict[str, Any]:
    data = tile_table(arch)
    trees = trees_of(chip(architecture(arch).unlisted_chip))
    return {
        "data_types": [row._asdict() for row in data.elements],
        "features": sorted(x.name.lower() for x in SERVES - {*DTYPE_FEATURES.values()}),
        "compiled": [
            tile._asdict() | {"dtypes": list(tile.dtypes), "threads": tile.threads}
            for tile in data.tiles
        ],
        "waves_of_simd": [row._asdict() for row in data.simd_waves],
        "ready": [_of_row(str(tree), row) for tree in trees for row in tree.forward.rows],
    }


def _of_row(tree: str, row: KernelRow) -> dict[str, Any]:
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
    tiles = [
        (
            *(x["kernel"], " ".join(x["dtypes"]), _pair(x, "hdim_q", "hdim_v"), x["slices"]),
            *(_pair(x, "tile_q", "tile_k"), x["waves"], x["lds_bytes"], x["line"]),
        )
        for x in facts["compiled"]
    ]
    of_waves = ("direction", "features", "held_registers", "waves_of_simd", "line")
    sections = [
        arch,
        fields([(name, _wrapped(", ".join(values))) for name, values in lists.items()]),
        "\ncompiled for a call, whose kernel takes the first row with room for its head dimensions",
        table(
            ("kernel", "data types", "hdim", "slices", "tile", "waves", "LDS bytes", "line"), tiles
        ),
        "\nwaves that share a SIMD, by the vector registers that each holds throughout its loop",
        table(
            ("kernels", "features", "registers up to", "waves", "line"),
            [[x[name] for name in of_waves] for x in facts["waves_of_simd"]],
        ),
    ]
    for tree in dict.fromkeys(row["tree"] for row in facts["ready"]):
        rows = [row for row in facts["ready"] if row["tree"] == tree]
        sections += [f"\nready: {tree}", _table_of_ready(rows)]
    return "\n".join(sections)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _LINE_WIDTH - len("data types  ")))


def _pair(row: dict[str, Any], first: str, second: str) -> str:
    return f"{row[first]}x{row[second]}"


def _table_of_ready(rows: list[dict[str, Any]]) -> str:
    """Kernels that differ in how they round to bf16 alone share a line."""
    roundings: dict[tuple[str, ...], list[str]] = {}
    for x in rows:
        cells = (
            *(x["dtype"], _pair(x, "hdim_q", "hdim_v"), x["mask"], x["mode"]),
            *(_pair(x, "tile_q", "tile_k"), x["threads"]),
        )
        roundings.setdefault(cells, []).append(x["bf16_cvt"])
    headers = ("data type", "hdim", "mask", "mode", "tile", "threads", "bf16_cvt")
    return table(headers, [(*cells, " ".join(cvts)) for cells, cvts in roundings.items()])
