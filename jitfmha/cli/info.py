"""``python -m jitfmha info``: what a bug report needs."""

from __future__ import annotations

import argparse
import os
import platform
from typing import TYPE_CHECKING, Any

from .exit_codes import OK
from .output import add_json_flag, byte_size, fields, print_json

if TYPE_CHECKING:
    from ..planning.target import Target

# What changes how or where launchers are built, and which kernels run where.
_ENVIRONMENT = (
    *("JITFMHA_CACHE_DIR", "JITFMHA_CACHE_LIMIT", "JITFMHA_VERBOSE", "CXX", "JITFMHA_CPU_ISA"),
    *("JITFMHA_EMULATE", "JITFMHA_EMULATE_CHECK", "JITFMHA_HSA_DIR", "AITER_ASM_DIR"),
    *("JITFMHA_RECORD", "JITFMHA_RECORD_DATA"),
)


def add_parser(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "info",
        help="print versions, targets, compilers and cache",
        description="Print versions, targets, the compilers and the state of the cache.",
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the facts; builds nothing."""
    facts = _facts()
    if args.json:
        print_json(facts)
        return OK
    cache, variables = facts["cache"], facts["environment"]
    print(
        fields(
            [
                ("jitfmha", facts["jitfmha"]),
                ("torch", facts["torch"]),
                ("python", facts["python"]),
                ("platform", facts["platform"]),
                ("targets", "\n".join(facts["targets"])),
                ("trees", "\n".join(facts["trees"]) or "(no AMD target)"),
                ("threads", str(facts["threads"])),
                ("compiler", facts["compiler"] or facts["compiler_error"]),
                ("", f"for AMD GPUs: {facts['device_compiler']}"),
                ("cache", cache["path"] or cache["error"]),
                (
                    "",
                    f"{cache['entries']} entries, {byte_size(cache['size'])}"
                    + (f" of {byte_size(cache['limit'])}" if cache["limit"] is not None else "")
                    + (f"\n{cache['error']}" if cache["path"] and cache["error"] else ""),
                ),
                ("environment", "\n".join(f"{k}={v}" for k, v in variables.items()) or "(nothing)"),
            ]
        )
    )
    return OK


def _facts() -> dict[str, Any]:
    import torch

    from .. import __version__
    from ..jit.errors import CompilerNotFound
    from ..jit.toolchain.device_hip import device_hip_in_words
    from ..jit.toolchain.host_cpp import find_host_cpp

    targets = _targets()
    compiler = compiler_error = None
    try:
        found = find_host_cpp()
        compiler = f"{found}: {found.why}"
    except CompilerNotFound as error:
        compiler_error = str(error)
    return {
        "jitfmha": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "targets": [_describe(target) for target in targets],
        "trees": _trees(targets),
        "threads": torch.get_num_threads(),
        "compiler": compiler,
        "compiler_error": compiler_error,
        "device_compiler": device_hip_in_words(),
        "cache": _cache(),
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }


def _targets() -> list[Target | str]:
    """The CPU, what it emulates, and every GPU; for one that cannot be used, why not."""
    import torch

    from ..call.detection import target_of
    from ..planning.target import cpu_target

    targets: list[Target | str] = []
    try:
        targets.append(cpu_target())
    except ValueError as error:
        targets.append(str(error))
    devices = []
    if torch.cuda.is_available():
        devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    if os.environ.get("JITFMHA_EMULATE"):
        devices.insert(0, torch.device("cpu"))
    for device in devices:
        try:
            targets.append(target_of(device))
        except (ValueError, RuntimeError) as error:
            targets.append(str(error))
    return targets


def _describe(target: Target | str) -> str:
    from ..planning.target import CpuTarget

    return f"{target}: {target.why}" if isinstance(target, CpuTarget) else str(target)


def _trees(targets: list[Target | str]) -> list[str]:
    """The trees of code objects for the GPUs, and what is odd about them."""
    from ..planning.target import AmdTarget

    lines = []
    for chip, target in {x.chip: x for x in targets if isinstance(x, AmdTarget)}.items():
        for tree in target.trees:
            lines.append(f"{chip}: {len(tree.rows)} kernels in {tree}")
            lines += [f"  {oddity}" for oddity in tree.oddities]
        for backward in target.backward_trees:
            lines.append(f"{chip}: {backward.kernel_count} backward kernels in {backward}")
            lines += [f"  {oddity}" for oddity in backward.oddities]
        if not target.trees:
            lines.append(f"{chip}: none")
    return lines


def _cache() -> dict[str, Any]:
    """A cache that must not be used is a fact like any other: its reason is ``error``."""
    from .. import jit
    from ..jit.cache.eviction import cache_limit

    facts: dict[str, Any] = {"path": None, "entries": 0, "size": 0, "limit": None, "error": None}
    try:
        facts["path"] = str(jit.cache_dir())
        facts["limit"] = cache_limit()
        entries = jit.cache_entries()
        facts["entries"] = len(entries)
        facts["size"] = sum(entry.size for entry in entries)
    except jit.CacheError as error:
        facts["error"] = str(error)
    return facts
