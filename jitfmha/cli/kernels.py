"""``python -m jitfmha kernels``: what AMD GPUs are served, and which rules a combination breaks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from ..ahead.ck_architectures import CkArchitecture, ck_architectures
from ..ahead.registry import every_kernel
from ..ahead.specification_rules import why_nothing_runs_on
from ..ahead.validate import BrokenRule, every_rule, validate_config, validate_specification
from ..amd.chips import Arch, architecture, chip, is_arch
from ..amd.manifest import KernelRow
from ..amd.tree import trees_of
from ..kernels.compiled.rules import SERVES
from ..kernels.compiled.tiles import tile_table
from ..problem.features import DTYPE_FEATURES
from ..problem.problem import BF16_CVTS
from .exit_codes import FAILED, OK, UsageError
from .output import fields, print_json, show, table

_MASKS = ("none", "top-left", "causal")


def run(args: argparse.Namespace) -> int:
    """List what is served, or say which rules the combination of the flags breaks."""
    if args.action == "rules":
        return _list_rules(args.json)
    if args.action == "validate":
        if args.config is not None:
            return _validate_file(args.config, args.json)
        return _validate(args, get_args(Arch) if args.arch is None else [args.arch])
    known = ck_architectures()
    facts = {arch: _facts(known[arch]) for arch in known if args.arch in (None, arch)}
    if args.json:
        print_json(facts)
    else:
        show("\n\n".join(_in_words(arch, of_arch) for arch, of_arch in facts.items()))
    return OK


def _list_rules(as_json: bool) -> int:
    rules = [rule._asdict() for rule in every_rule()]
    if as_json:
        print_json(rules)
        return OK
    for rule in rules:
        show(f"{rule['name']} (of {_WHOSE[rule['of']]})")
        show(f"  source: {rule['source']}")
        if rule["ours"]:
            show(f"  ours: {rule['ours']}")
    return OK


_WHOSE = {"every": "every configuration", "ck": "CK's pipelines", "ours": "kernels of this package"}


def _validate_file(path: Path, as_json: bool) -> int:
    try:
        result = validate_specification(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    if as_json:
        print_json(result.to_dict())
    else:
        show(f"{path}: {'valid' if result.valid else 'not valid'}")
        for what, rules in (("error", result.errors), ("warning", result.warnings)):
            _print_rules(rules, f"{what}: ")
    return OK if result.valid else FAILED


def _print_rules(rules: Iterable[BrokenRule], what: str = "") -> None:
    for rule in rules:
        show(f"  {what}{rule.reason}\n    rule: {rule.name}\n    source: {rule.source}")


def _validate(args: argparse.Namespace, archs: Sequence[str]) -> int:
    others = ("command", "action", "json", "arch", "config")
    given = {name: value for name, value in vars(args).items() if name not in others}
    try:
        broken = {arch: validate_config(arch, **given) for arch in archs}
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    if args.json:
        print_json({arch: [rule._asdict() for rule in rules] for arch, rules in broken.items()})
        return FAILED if any(broken.values()) else OK
    for arch, rules in broken.items():
        show(f"{arch}:" if rules else f"{arch}: no rule is broken")
        _print_rules(rules)
    return FAILED if any(broken.values()) else OK


def _facts(known: CkArchitecture) -> dict[str, Any]:
    of_ck = {name: value for name, value in known._asdict().items() if name != "name"}
    return {"ck": of_ck} | (_facts_of_ours(known.name) if is_arch(known.name) else {})


def _facts_of_ours(arch: Arch) -> dict[str, Any]:
    data = tile_table(arch)
    trees = trees_of(chip(architecture(arch).unlisted_chip))
    return {
        "data_types": [row._asdict() for row in data.elements],
        "features": sorted(x.name.lower() for x in SERVES - {*DTYPE_FEATURES.values()}),
        "compiled": [
            tile._asdict() | {"dtypes": list(tile.dtypes), "threads": tile.threads}
            for tile in data.tiles
        ],
        "kernels": [kernel._asdict() for kernel in every_kernel(arch)],
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


def _in_words(arch: str, facts: dict[str, Any]) -> str:
    """The facts of an architecture as tables."""
    of_ck = facts["ck"]
    known = [
        ("CK's data types", ", ".join(of_ck["supported_dtypes"])),
        ("CK's pipelines", ", ".join(of_ck["supported_pipelines"])),
    ]
    if not is_arch(arch):
        return "\n".join((arch, *why_nothing_runs_on(arch), fields(known)))
    lists = {
        "data types": [row["dtype"] for row in facts["data_types"]],
        "features": facts["features"],
    }
    tiles = [
        (
            *(
                x["kernel"],
                " ".join(name.partition("_")[0] for name in x["dtypes"]),
                _pair(x, "hdim_q", "hdim_v"),
                x["slices"],
            ),
            *(_pair(x, "tile_q", "tile_k"), x["waves"], x["lds_bytes"], x["line"]),
        )
        for x in facts["compiled"]
    ]
    of_waves = ("direction", "features", "held_registers", "waves_of_simd", "line")
    sections = [
        arch,
        fields([*((name, ", ".join(values)) for name, values in lists.items()), *known]),
        "\ncompiled for a call, which takes the first row with room for its head dimensions",
        table(
            ("kernel", "data types", "hdim", "slices", "tile", "waves", "LDS bytes", "line"), tiles
        ),
        "\nwaves that share a SIMD, by the vector registers that each holds in its loop",
        table(
            ("kernels", "features", "registers up to", "waves", "line"),
            [[x[name] for name in of_waves] for x in facts["waves_of_simd"]],
        ),
    ]
    for tree in dict.fromkeys(row["tree"] for row in facts["ready"]):
        rows = [row for row in facts["ready"] if row["tree"] == tree]
        sections += [f"\nready: {tree}", _table_of_ready(rows)]
    return "\n".join(sections)


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
