"""Every kernel that can be had on an architecture, each with its key.

A key is a configuration as :func:`jitfmha.validate_specification` takes it. Those of what is
compiled for a call have patterns in place of values: "*" stands for any, a list for one of several,
``{"up_to": n}`` for numbers, and ``{"any_of": [...]}`` for lists of some of these names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..amd.chips import Arch, architecture, chip
from ..amd.manifest import KernelRow, ReadyBackwardRow
from ..amd.tree import trees_of
from ..kernels.amd_plan import algorithm_of
from ..kernels.compiled.family import algorithm_of_tile
from ..kernels.compiled.tile_table import Tile
from ..kernels.compiled.tiles import tile_table
from ..planning.specification import Algorithm, Signature, data_types_of
from ..problem.problem import MAX_HDIM

ANY = "*"
_MODES = ("batch", "group")
_FORWARD = ["fwd", "fwd_splitkv", "fwd_pagedkv"]
_MASKED = ["top_left", "bottom_right", "generic"]
# Of equal lengths both corners of a mask are one.
_MASKS_OF_COLUMN: tuple[Any, ...] = ("no", "top_left", ["bottom_right", "top_left"])
_OF_READY = {"lse": ANY, "features": {"any_of": ["padded_sequences"]}}
# Templates of calls with few queries, or in pages, which make tiles of their own from those of the
# table: decode.py, latent.py and turns.py.
_VARIANTS = ("decode_fwd.hip", "latent_fwd.hip", "turns_fwd.hip")


class ListedKernel(NamedTuple):
    """A kernel, or those that a row of a table is the tile of."""

    name: str
    key: dict[str, Any]


def every_kernel(arch: Arch) -> Iterator[ListedKernel]:
    """Those of the trees of code objects that calls use, and those that would be compiled."""
    for tree in trees_of(chip(architecture(arch).unlisted_chip)):
        for row in tree.forward.rows:
            yield _listed(row.name, arch, _of_forward(row), algorithm_of(row, "ready"))
        for ready in tree.ready_backward.rows:
            sides = ready.queries, ready.keys, ready.hdim_q, ready.hdim_v, ready.keys, ready.hdim_q
            yield _listed(ready.name, arch, _of_backward(ready), Algorithm("ready", sides))
    table = tile_table(arch)
    for tile in table.tiles:
        for dtype in tile.dtypes:
            name = f"{table.path.name}, line {tile.line}: {tile.kernel} of {dtype}"
            yield _listed(name, arch, _of_tile(tile, dtype), algorithm_of_tile(tile))
    for template in _VARIANTS:
        any_forward: dict[str, Any] = dict.fromkeys(Signature._fields, ANY)
        any_forward["family"] = _FORWARD
        any_forward |= {name: {"up_to": MAX_HDIM} for name in ("hdim_q", "hdim_v")}
        key = _key(arch, any_forward, Algorithm("compiled")._asdict() | {"tile": ANY})
        yield ListedKernel(template, key)


def has_key(kernel: ListedKernel, config: Mapping[str, Any]) -> bool:
    """Whether a configuration is the kernel's: of algorithms pipeline and tile are compared."""
    signature, algorithm = kernel.key["signature"], kernel.key["algorithm"]
    return (
        kernel.key["arch"] == config["arch"]
        and all(_fits(signature[x], value) for x, value in config["signature"].items())
        and all(_fits(algorithm[x], config["algorithm"][x]) for x in ("pipeline", "tile"))
    )


def _fits(pattern: Any, value: Any) -> bool:
    value = tuple(value) if isinstance(value, list) else value
    if isinstance(pattern, dict):
        if "up_to" in pattern:
            return bool(value <= pattern["up_to"])
        return {*value} <= {*pattern["any_of"]}
    return pattern in (ANY, value) or (isinstance(pattern, list) and value in pattern)


def _listed(name: str, arch: Arch, signature: dict[str, Any], algorithm: Algorithm) -> ListedKernel:
    return ListedKernel(name, _key(arch, signature, algorithm._asdict()))


def _key(arch: Arch, signature: dict[str, Any], algorithm: dict[str, Any]) -> dict[str, Any]:
    return {"signature": signature, "algorithm": algorithm, "arch": arch}


def _of_forward(row: KernelRow) -> dict[str, Any]:
    signature = Signature(row.dtype, row.hdim_q, row.hdim_v, mode=_MODES[row.mode])
    more = {"qscale": ["no", "pertensor"]} if row.dtype == "fp8bf16" else {}
    families = _FORWARD[:2] if row.can_split_keys else "fwd"
    mask = _MASKS_OF_COLUMN[row.mask]
    return signature._asdict() | _OF_READY | {"family": families, "mask": mask} | more


def _of_backward(row: ReadyBackwardRow) -> dict[str, Any]:
    signature = Signature(
        *(row.dtype, row.hdim_q, row.hdim_v, "bwd_dq_dk_dv", _MODES[row.mode]),
        deterministic=row.is_deterministic,
    )
    return signature._asdict() | _OF_READY | {"mask": _MASKED if row.is_masked else "no"}


def _of_tile(tile: Tile, dtype: str) -> dict[str, Any]:
    types = [*data_types_of(dtype)]
    any_value: dict[str, Any] = dict.fromkeys(Signature._fields, ANY)
    return any_value | {
        "data_type": types if len(types) > 1 else dtype,
        "hdim_q": {"up_to": tile.hdim_q},
        "hdim_v": {"up_to": tile.hdim_v},
        "family": _FORWARD if tile.kernel == "forward" else "bwd_dq_dk_dv",
    }
