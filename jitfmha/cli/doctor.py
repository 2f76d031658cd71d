"""``python -m jitfmha doctor``: what is amiss on this machine, and what to do about it.

Each check imports what it looks at, so that what cannot be imported is a finding of that check.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from .exit_codes import FAILED, OK, UsageError
from .output import byte_size, fields, print_json, progress, show

if TYPE_CHECKING:
    import torch

    from ..amd.chips import Chip
    from ..amd.tree import Tree
    from ..planning.target import Target
    from ..problem.float64_reference import Judged

Verdict = Literal["ok", "warning", "failed"]

LOWEST_TORCH = "2.10"
SIZE_OF_CUDA_BUILD = "5 GB"
_LOW_SPACE_BYTES = 64 << 20
_DRIVER_DEVICE = Path("/dev/kfd")
_DRIVER_VERSION = Path("/sys/module/amdgpu/version")
_KERNEL_RELEASE = Path("/proc/sys/kernel/osrelease")
_QUERIES, _KEYS = 70, 600  # of the small calls
_KERNARG = "HIP_FORCE_DEV_KERNARG"
# What changes how or where launchers are built, and which kernels run where.
_ENVIRONMENT = (
    *("JITFMHA_CACHE_DIR", "JITFMHA_CACHE_LIMIT", "JITFMHA_VERBOSE", "CXX", "JITFMHA_CPU_ISA"),
    *("JITFMHA_EMULATE", "JITFMHA_EMULATE_CHECK", "JITFMHA_HSA_DIR", "AITER_ASM_DIR"),
    *("JITFMHA_RECORD", "JITFMHA_RECORD_DATA"),
)
_INSTALL_ROCM_TORCH = (
    f"Install PyTorch for ROCm, {LOWEST_TORCH} or newer, from PyTorch's or AMD's index, and "
    "jitfmha after it."
)


@dataclass(frozen=True)
class Finding:
    """What one check found, or what is wrong; a ``remedy`` is empty where nothing needs doing.

    A warning is where calls work, but not everywhere or not as quickly as they could.
    """

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""


def run(args: argparse.Namespace) -> int:
    """Run all checks and print what they found."""
    gpu = None if args.gpu_report is None else _first_gpu()
    findings = [finding for check in _CHECKS for finding in _findings_of(check)]
    worst = max((x.verdict for x in findings), key=get_args(Verdict).index)
    if gpu is not None:
        _write_gpu_report(args.gpu_report, findings, gpu)
    if args.json:
        print_json({"verdict": worst, "checks": [asdict(x) for x in findings]})
    else:
        texts = (x.found + (f"\n-> {x.remedy}" if x.remedy else "") for x in findings)
        names = (f"{x.verdict:<7}  {x.check}" for x in findings)
        show(fields(list(zip(names, texts, strict=True))))
    return FAILED if worst == "failed" else OK


def _first_gpu() -> str:
    gpus = [str(device) for device, _ in _targets_here() if device.type == "cuda"]
    if not gpus:
        raise UsageError("--gpu-report: torch sees no GPU here that jitfmha serves")
    return gpus[0]


def _write_gpu_report(path: Path, findings: list[Finding], gpu: str) -> None:
    """Write what a GPU's user can send to those who have none."""
    from ..jit.regular_file import write_whole
    from .gpu_report import gathered

    report = {"format": 1, "checks": [asdict(x) for x in findings], **gathered(gpu)}
    write_whole(path, json.dumps(report, indent=1, allow_nan=False).encode())
    progress(f"wrote {path}: please send it with a bug report, or just as it is")


def _findings_of(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """All findings of a check; a check that breaks is a finding, and the others go on."""
    findings = []
    try:
        for finding in check():
            findings.append(finding)  # noqa: PERF402 - those before an exception are kept
    except Exception as error:
        name = check.__name__.removeprefix("_check_").replace("_", " ")
        remedy = "This check does not expect that: please report it."
        findings.append(Finding(name, "failed", f"{type(error).__name__}: {error}", remedy))
    return findings


def _check_versions() -> Iterator[Finding]:
    from .. import __version__

    found = f"jitfmha {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield Finding("versions", "ok", found)


def _check_environment() -> Iterator[Finding]:
    lines = [f"{name}={os.environ[name]}" for name in _ENVIRONMENT if name in os.environ]
    yield Finding("environment", "ok", "\n".join(lines) or "nothing that is looked at is set")


def _check_cpu() -> Iterator[Finding]:
    import torch

    from ..planning.target import cpu_target

    try:
        target = cpu_target()
        yield Finding("CPU", "ok", f"{target}: {target.why}; {torch.get_num_threads()} threads")
    except ValueError as error:
        yield Finding("CPU", "failed", str(error), "Set or unset JITFMHA_CPU_ISA.")


# ---- Software ------------------------------------------------------------------------------------


def _check_host_compiler() -> Iterator[Finding]:
    from ..jit.errors import CompilerNotFound
    from ..jit.toolchain.host_cpp import find_host_cpp

    try:
        found = find_host_cpp()
        yield Finding("host compiler", "ok", f"{found}: {found.why}")
    except CompilerNotFound as error:
        tried, _, remedy = str(error).partition("\nInstall one:")
        yield Finding("host compiler", "failed", tried, f"Install one:{remedy}")


def _check_device_compiler() -> Iterator[Finding]:
    import torch

    from ..jit.errors import CompilerNotFound
    from ..jit.toolchain.device_hip import device_hip_in_words, find_device_hip

    try:
        find_device_hip()
    except CompilerNotFound as error:
        found, _, remedy = str(error).partition("\nGet one:")
        # Without such a GPU only the tests of the emulator need one.
        if torch.version.hip is None and not os.environ.get("JITFMHA_EMULATE"):
            yield Finding("device compiler", "ok", "none, and no AMD GPU to compile for")
        else:
            yield Finding("device compiler", "warning", found, f"Get one:{remedy}")
        return
    yield Finding("device compiler", "ok", device_hip_in_words())


def _check_torch() -> Iterator[Finding]:
    import torch

    build = "for the CPU alone"
    if torch.version.hip is not None:
        build = f"for ROCm {torch.version.hip}"
    elif torch.version.cuda is not None:
        build = f"for CUDA {torch.version.cuda}"
    found = f"{torch.__version__}, built {build}"
    if torch.version.hip is None and _DRIVER_DEVICE.exists():
        found += f"; there is an AMD GPU here ({_DRIVER_DEVICE})"
        yield Finding("torch", "warning", found, _INSTALL_ROCM_TORCH)
    elif torch.version.cuda is not None and not torch.cuda.is_available():
        found += (
            f"; there is no NVIDIA GPU here that it can use, and it takes some {SIZE_OF_CUDA_BUILD}"
        )
        remedy = "It works; to save the room, install PyTorch's build for the CPU, from its index."
        yield Finding("torch", "warning", found, remedy)
    elif _release(torch.__version__) < _release(LOWEST_TORCH):
        found += f"; nothing older than {LOWEST_TORCH} has been seen to work"
        yield Finding("torch", "warning", found, f"Install torch {LOWEST_TORCH} or newer.")
    else:
        yield Finding("torch", "ok", found)


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


# ---- GPUs ----------------------------------------------------------------------------------------


def _check_driver() -> Iterator[Finding]:
    if not _DRIVER_DEVICE.exists():
        yield Finding("driver", "ok", f"none: there is no {_DRIVER_DEVICE}")
    elif not os.access(_DRIVER_DEVICE, os.R_OK | os.W_OK):
        remedy = "Add the user to the groups render and video, or give the container the device."
        yield Finding("driver", "failed", f"{_DRIVER_DEVICE} may not be opened", remedy)
    elif _DRIVER_VERSION.exists():
        yield Finding("driver", "ok", f"amdgpu {_DRIVER_VERSION.read_text().strip()}")
    else:
        yield Finding("driver", "ok", f"amdgpu of Linux {_KERNEL_RELEASE.read_text().strip()}")


def _gpus() -> list[torch.device]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", index) for index in range(count)]


def _check_gpus() -> Iterator[Finding]:
    import torch

    from ..call.detection import target_of

    if torch.version.hip is not None and _DRIVER_DEVICE.exists() and not _gpus():
        remedy = "See whether rocminfo lists it, and whether HIP_VISIBLE_DEVICES hides it."
        yield Finding("GPUs", "failed", "there is a driver, but torch sees no GPU", remedy)
    elif not _gpus():
        yield Finding("GPUs", "ok", "none; calls run on the CPU")
    for device in _gpus():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                target = target_of(device)
            except (ValueError, RuntimeError) as error:
                remedy = "Tensors on it cannot be used with jitfmha; those of the CPU can."
                yield Finding(str(device), "warning", str(error), remedy)
                continue
        if caught:
            remedy = "Update ROCm to 6.3 or newer, or let the container see /sys/bus/pci."
            found = f"{target}\n{caught[0].message}"
            yield Finding(str(device), "warning", found, remedy)
        else:
            yield Finding(str(device), "ok", str(target))


def _check_hip_runtime() -> Iterator[Finding]:
    import torch

    from ..amd.runtime import HipError, loaded_runtime
    from ..jit.toolchain.hip_libraries import mapped_runtimes

    if torch.version.hip is None:
        yield Finding("HIP runtime", "ok", "none: this torch was not built for ROCm")
        return
    try:
        runtime = loaded_runtime()
    except HipError as error:
        yield Finding("HIP runtime", "failed", str(error), _INSTALL_ROCM_TORCH)
        return
    found = f"{runtime.library_path}, because {runtime.why}"
    own = os.path.realpath(runtime.library_path)
    others = [path for path in mapped_runtimes() if os.path.realpath(path) != own]
    if others:
        found += f"\nalso loaded in this process: {', '.join(others)}"
        remedy = "Take the other one's folder out of LD_LIBRARY_PATH and LD_PRELOAD."
        yield Finding("HIP runtime", "warning", found, remedy)
    else:
        yield Finding("HIP runtime", "ok", found)


def _check_kernel_arguments() -> Iterator[Finding]:
    check = "kernel arguments"
    value = os.environ.get(_KERNARG)
    if not _gpus():
        yield Finding(check, "ok", "no GPU reads any")
    elif value == "1":
        yield Finding(check, "ok", f"in the GPU's memory ({_KERNARG}=1)")
    else:
        given = "not set" if value is None else f"{value!r}"
        found = f"they may be in the host's memory, where each kernel waits for them ({_KERNARG} "
        remedy = f"Set {_KERNARG}=1 before Python starts."
        yield Finding(check, "warning", f"{found}is {given})", remedy)


# ---- Files ---------------------------------------------------------------------------------------


def _check_cache() -> Iterator[Finding]:
    from .. import jit
    from ..jit.cache.directory import writable_directory
    from ..jit.cache.eviction import cache_limit

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            directory = writable_directory()
        limit = cache_limit()
        sizes = [entry.size for entry in jit.cache_entries()]
    except jit.CacheError as error:
        yield Finding("cache", "failed", str(error), "Set the variable as the text says.")
        return
    free = shutil.disk_usage(directory.root).free
    found = (
        f"{directory.root.parent}, may be written to, {byte_size(free)} free; {len(sizes)} entries "
        f"have {byte_size(sum(sizes))}"
    )
    if directory.replaced:
        reason = "\n".join(str(each.message) for each in caught)
        remedy = "Set JITFMHA_CACHE_DIR to a folder of your own that can be written to."
        yield Finding("cache", "warning", f"temporary: {found}\n{reason}".rstrip(), remedy)
    elif free < _LOW_SPACE_BYTES:
        remedy = "Make room on the disk, or set JITFMHA_CACHE_DIR to a folder on another one."
        yield Finding("cache", "warning", found, remedy)
    else:
        yield Finding("cache", "ok", f"{found} of {byte_size(limit)}")


def _check_code_objects() -> Iterator[Finding]:
    """Every file of every tree is read, as its first launch would read it."""
    from ..amd.tree import trees_of

    for chip in _chips_here():
        check = f"code objects for {chip}"
        trees = trees_of(chip)
        if not trees:
            yield Finding(check, "failed", "none", "Install jitfmha again, from a complete wheel.")
        for tree in trees:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read = [tree.code_object(row) for each in tree.manifests for row in each.rows]
            oddities = [oddity for each in tree.manifests for oddity in each.oddities]
            oddities += [str(x) for x in read if isinstance(x, Exception)]
            found = "\n".join([*_counts(tree), *oddities])
            if oddities:
                remedy = "Mend the tree, or unset the variable; or install jitfmha again."
                yield Finding(check, "warning", found, remedy)
            else:
                yield Finding(check, "ok", found)


def _counts(tree: Tree) -> Iterator[str]:
    yield f"{len(tree.forward.rows)} kernels in {tree}"
    if tree.aiter_backward.rows:
        yield f"{len(tree.aiter_backward.rows)} backward kernels"
    if tree.ready_backward.rows:
        yield f"{len(tree.ready_backward.rows)} code objects of backward kernels"


def _chips_here() -> list[Chip]:
    """The chips of the GPUs, real or emulated; without any, one of each architecture."""
    from ..amd.chips import Arch, architecture, chip
    from ..planning.target import AmdTarget

    targets = (target for _, target in _targets_here())
    here = dict.fromkeys(target.chip for target in targets if isinstance(target, AmdTarget))
    return list(here) or [chip(architecture(arch).unlisted_chip) for arch in get_args(Arch)]


# ---- Small runs ----------------------------------------------------------------------------------


def _targets_here() -> Iterator[tuple[torch.device, Target]]:
    """Every target that can be used; why others cannot is said elsewhere."""
    import torch

    from ..call.detection import target_of
    from ..planning.target import cpu_target

    cpu = torch.device("cpu")
    with suppress(ValueError):
        yield cpu, cpu_target()
    for device in ([cpu] if os.environ.get("JITFMHA_EMULATE") else []) + _gpus():
        try:
            yield device, target_of(device)
        except (ValueError, RuntimeError):
            continue


def _check_emulation() -> Iterator[Finding]:
    from ..emulator.session import target_of_environment

    if os.environ.get("JITFMHA_EMULATE"):
        try:
            yield Finding("emulation", "ok", str(target_of_environment()))
        except ValueError as error:
            yield Finding("emulation", "failed", str(error), "Set or unset JITFMHA_EMULATE.")


def _check_runs() -> Iterator[Finding]:
    from .. import jit

    for device, target in _targets_here():
        progress(f"a small call on {target}")
        try:
            for mode in ("gm0", "gm1"):
                yield _small_run(device, target, mode)
        except jit.CompilerNotFound:
            found = f"none on {target}: their kernels are not built, and there is no compiler"
            yield Finding("calls", "failed", found, "Install the compiler, as it says above.")


def _small_run(device: torch.device, target: Target, mode: str) -> Finding:
    from .. import jit
    from ..amd.runtime import HipError

    check = f"a call in {mode}"
    try:
        out = _judged_small_call(device, target, mode)
    except jit.CompilerNotFound:
        raise
    except jit.BuildError as failure:
        remedy = "Mend the compiler, or set CXX to another one."
        return Finding(check, "failed", f"on {target}: {failure}", remedy)
    except HipError as failure:
        remedy = "See whether other programs use the GPU without errors, and what dmesg says."
        return Finding(check, "failed", f"on {target}: {failure}", remedy)
    except (NotImplementedError, RuntimeError, OSError, ValueError) as failure:
        text = f"on {target}: {type(failure).__name__}: {failure}"
        return Finding(check, "failed", text, "Please report it, with what this command prints.")
    found = f"on {target}: largest error {out.error:.1e}, at most {out.allowed:.1e} is right"
    if out.is_right:
        return Finding(check, "ok", found)
    remedy = "Do not use this target. Please report it, with what this command prints."
    return Finding(check, "failed", found, remedy)


def _judged_small_call(device: torch.device, target: Target, mode: str) -> Judged:
    """The output for a sequence under a causal mask, with keys enough for a GPU to split them."""
    import torch

    from ..call.dispatch import plan_for
    from ..problem.problem import make_problem
    from ..replay.kernel_trial import drawn_call, judged_launch

    sizes = [(_QUERIES, _KEYS)], (4, 2), (128, 128)
    call = drawn_call(mode, *sizes, torch.bfloat16, seed=0, device=device, mask="causal")
    problem = make_problem(call)
    return judged_launch(call, problem, plan_for(problem, target))["out"]


_CHECKS = (
    *(_check_versions, _check_environment),
    *(_check_cpu, _check_host_compiler, _check_device_compiler, _check_torch),
    *(_check_driver, _check_gpus, _check_hip_runtime, _check_kernel_arguments),
    *(_check_cache, _check_code_objects, _check_emulation, _check_runs),
)
