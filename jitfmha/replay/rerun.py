"""Runs a recorded launch again and says which side is at fault: its arguments, or its kernels."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..amd.recording_runtime import Started
from ..call.record import (
    INTERFACES,
    Record,
    RecordedKernel,
    RecordError,
    packed,
    tensors_of,
    view_of,
    where_is,
)
from ..emulator.findings import Finding
from ..emulator.guarded_memory import guarded_memory
from ..problem.arguments import Tensors
from ..problem.float64_reference import Judged, Reference, forward_reference
from .expected_arguments import Mismatch, expectations, mismatches
from .machines import Machine, RerunError

Fault = Literal["none", "arguments", "kernel", "arguments and kernel", "inputs", "neither"]
"""``inputs``: a backward pass was given an out or an lse of another call. ``neither``: the recorded
result is wrong, and the same launch is right when it runs again."""

_CORRECTIONS = 4  # an argument may follow from others, which are corrected first


@dataclass(frozen=True)
class Outcome:
    """How kernels did: why one of them failed, or their results beside the reference."""

    failure: str | None
    judged: Mapping[str, Judged]

    @property
    def is_right(self) -> bool:
        """Whether rounding explains every difference from the reference."""
        return self.failure is None and all(each.is_right for each in self.judged.values())


@dataclass(frozen=True)
class Diagnosis:
    """What running a launch again has shown.

    Attributes:
        replayed: with the arguments as they were recorded.
        corrected: with those that the problem implies; None where they are the same.
        recorded: what was recorded as the result; None where its bytes were not kept.
        inputs: of a backward pass, its out and lse beside what forward gives; None for forward.
        replaced: code objects that are not those that were recorded.
        findings: of the sanitizer, in the run as recorded.
    """

    fault: Fault
    mismatches: tuple[Mismatch, ...]
    replayed: Outcome
    corrected: Outcome | None
    recorded: Outcome | None
    inputs: Outcome | None
    replaced: tuple[str, ...]
    findings: tuple[Finding, ...]

    def sentence(self) -> str:
        return {
            "none": "Arguments and kernels are right.",
            "arguments": "The arguments are at fault: with those that the problem implies, the "
            "kernels compute what they should.",
            "kernel": "The kernel is at fault: its arguments are what the problem implies, and "
            "its result is wrong.",
            "arguments and kernel": "Both are at fault: arguments are not what the problem "
            "implies, and with the right ones the result is wrong, too.",
            "inputs": "The inputs are at fault: the out or the lse that backward was given is not "
            "what forward gives for this call.",
            "neither": "Arguments and kernels are right here, and the recorded result is wrong: "
            "look for a race (--sanitize, --random-order), for tensors that were changed during "
            "the launch, or for what came after it.",
        }[self.fault]


def diagnose(record: Record, make_machine: Callable[[], Machine], *, seed: int = 0) -> Diagnosis:
    """Run a recorded launch again, compare, and say which side is at fault.

    Args:
        make_machine: gives what it runs on, for each run a new one.
        seed: of tensors whose bytes were not recorded.

    Raises:
        RecordError: an address is nowhere in what was recorded.
    """
    contents = _contents(record, seed)
    named = {name: view_of(each, contents) for name, each in record.tensors.items()}
    tensors = tensors_of(named, record.problem, record.max_seqlens)
    reference = Reference(record.problem, tensors)
    found = tuple(mismatches(record))
    machine = make_machine()
    replayed = _outcome(record, record.kernels, contents, machine, reference)
    findings = machine.findings()
    corrected = None
    if found:
        kernels = [_corrected(record, kernel) for kernel in record.kernels]
        corrected = _outcome(record, kernels, contents, make_machine(), reference)
    recorded = _recorded_outcome(record, reference)
    inputs = _outcome_of_forward(record, tensors)
    return Diagnosis(
        fault=_fault(replayed, corrected, recorded, inputs),
        mismatches=found,
        replayed=replayed,
        corrected=corrected,
        recorded=recorded,
        inputs=inputs,
        replaced=_replaced(record),
        findings=findings,
    )


def _outcome_of_forward(record: Record, tensors: Tensors) -> Outcome | None:
    """The out and the lse that a backward pass reads, beside the reference."""
    if record.problem.gradients is None:
        return None
    reference = Reference(record.problem._replace(gradients=None), tensors)
    given = {"out": tensors.out} | ({} if tensors.lse is None else {"lse": tensors.lse})
    return Outcome(None, reference.judged(given))


def _fault(
    replayed: Outcome, corrected: Outcome | None, recorded: Outcome | None, inputs: Outcome | None
) -> Fault:
    if inputs is not None and not inputs.is_right:
        return "inputs"
    if corrected is not None:
        return "arguments" if corrected.is_right else "arguments and kernel"
    if not replayed.is_right:
        return "kernel"
    return "none" if recorded is None or recorded.is_right else "neither"


def _replaced(record: Record) -> tuple[str, ...]:
    return tuple(
        kernel.code_object
        for kernel in record.kernels
        if hashlib.sha256(record.image(kernel)).hexdigest() != kernel.sha256
    )


def _recorded_outcome(record: Record, reference: Reference) -> Outcome | None:
    results = {}
    for name, each in record.results.items():
        if each.file is None:
            return None
        held = _held(record, each.file).view(getattr(torch, each.dtype))
        results[name] = held.view(each.shape)
    # Without the tensors that it was computed from, the reference is of other ones.
    if any(region.file is None and region.size for region in record.regions):
        return None
    return Outcome(None, reference.judged(results)) if results else None


# ---- Memory --------------------------------------------------------------------------------------


def _contents(record: Record, seed: int) -> list[Tensor]:
    """What the regions held before, on the CPU; made up where that was not recorded."""
    contents = [
        torch.zeros(x.size, dtype=torch.uint8) if x.file is None else _held(record, x.file)
        for x in record.regions
    ]
    _make_up(record, contents, seed)
    return contents


def _held(record: Record, file: str) -> Tensor:
    content = bytearray((record.folder / file).read_bytes())
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.zeros(0).byte()


def _make_up(record: Record, contents: Sequence[Tensor], seed: int) -> None:
    """Random inputs where they were not recorded; outputs, and what is added up, begin at 0."""
    rng = torch.Generator().manual_seed(seed)
    named = {}
    made_up = []
    for name, each in record.tensors.items():
        named[name] = view_of(each, contents)
        if record.regions[each.region].file is not None or not math.prod(each.shape):
            continue
        made_up.append(name)
        if name in ("out", "lse", "dq", "dk", "dv", "dbias") or name.startswith("between"):
            continue
        values = torch.randn(each.shape, generator=rng)
        if name.endswith(("descale", "slopes")):
            values = values.abs() * 0.1 + 0.05
        elif not named[name].dtype.is_floating_point:
            values = (values * 20).clamp(-127, 127)
        named[name].copy_(values)
    if record.problem.gradients is not None and {"out", "lse"} & set(made_up):
        tensors = tensors_of(named, record.problem, record.max_seqlens)
        for name, values in forward_reference(record.problem, tensors).items():
            named[name].copy_(values.nan_to_num(0, posinf=torch.inf, neginf=-torch.inf))
    # A moved lse is a copy; kernels find theirs between.
    _fill_copies(record, named, made_up)


def _fill_copies(record: Record, named: Mapping[str, Tensor], made_up: Sequence[str]) -> None:
    """What kernels read and the launch copied: an lse that was brought into another layout."""
    if "lse" not in made_up or "lse" not in named:
        return
    for kernel in record.kernels:
        address = kernel.values().get("ptr_lse") if record.problem.gradients else None
        for name, each in record.tensors.items():
            begin = record.regions[each.region].address + each.offset
            if name.startswith("between") and begin == address:
                flat = named["lse"].reshape(-1)
                named[name].view(-1)[: flat.numel()].copy_(flat)


def _outcome(
    record: Record,
    kernels: Sequence[RecordedKernel],
    contents: Sequence[Tensor],
    machine: Machine,
    reference: Reference,
) -> Outcome:
    """Run kernels on fresh memory and judge what they leave."""
    rooms = [
        guarded_memory(region.size, region.address, machine.device).copy_(content)
        for region, content in zip(record.regions, contents, strict=True)
    ]
    try:
        for kernel in kernels:
            machine.run(_moved(record, kernel, rooms), rooms)
    except RerunError as error:
        return Outcome(str(error), {})
    left = [room.cpu() for room in rooms]
    return Outcome(None, reference.judged(_results(record, left)))


def _moved(record: Record, kernel: RecordedKernel, rooms: Sequence[Tensor]) -> Started:
    interface = INTERFACES[kernel.interface]
    values = kernel.values()
    for name, (_, letter) in interface.leaves.items():
        if letter != "Q" or not values[name]:
            continue
        address = int(values[name])
        for region, room in zip(record.regions, rooms, strict=True):
            if region.address <= address < region.address + max(region.size, 1):
                values[name] = room.data_ptr() + address - region.address
                break
        else:
            if rooms and rooms[0].is_cuda:
                raise RecordError(
                    f"{name} of {kernel.symbol} is {address:#x}, where nothing was recorded: "
                    "a GPU may not touch that; take the emulator"
                )
            # Nothing may be there, whatever it is on this machine.
            values[name] = 0
    image, kernarg = record.image(kernel), packed(interface, values)
    return Started(kernel.symbol, image, kernel.grid, kernel.block, kernel.dynamic_lds, kernarg)


def _corrected(record: Record, kernel: RecordedKernel) -> RecordedKernel:
    interface = INTERFACES[kernel.interface]
    for _ in range(_CORRECTIONS):
        values = kernel.values()
        grid = kernel.grid
        for name, value, _ in expectations(record, kernel):
            if name == "grid":
                grid = value
            else:
                values[name] = value
        kernel = replace(kernel, grid=grid, kernarg=packed(interface, values))
    return kernel


# ---- Results -------------------------------------------------------------------------------------


def _results(record: Record, contents: Sequence[Tensor]) -> dict[str, Tensor]:
    named = {name: view_of(each, contents) for name, each in record.tensors.items()}
    results = {name: named[name] for name in record.results if name in named}
    interfaces = {kernel.interface for kernel in record.kernels}
    if "AiterRowSumArguments" in interfaces and "AiterGradientArguments" not in interfaces:
        return {}  # without keys there are no gradients to compute
    for kernel in record.kernels:
        if kernel.interface == "AiterGradientArguments":
            results |= _results_between(record, kernel, named)
    return results


def _results_between(
    record: Record, kernel: RecordedKernel, named: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients that AMD's kernels leave in tensors between, as torch's operators go on from.

    dk and dv may be there for each query head; dq in float32, heads before rows, where no third
    kernel converts it.
    """
    problem, values = record.problem, kernel.values()
    found = {}
    for name in ("dq", "dk", "dv"):
        written = where_is(record, int(values[f"ptr_{name}"])) or ""
        if written not in named or not written.startswith("between"):
            continue
        x = named[written]
        if name != "dq":
            of_heads = x.double().unflatten(-2, (-1, problem.gqa)).sum(-2)
            found[name] = of_heads.to(named[name].dtype)
        elif not any(each.interface == "AiterDqArguments" for each in record.kernels):
            found[name] = _dq_of_sums(x, named[name], problem.hdim_q)
    return found


def _dq_of_sums(sums: Tensor, dq: Tensor, hdim: int) -> Tensor:
    if sums.shape == dq.shape:
        return sums
    *batch, rows, heads, _ = dq.shape
    count = math.prod((*batch, heads, rows, hdim))
    return sums.reshape(-1)[:count].view(*batch, heads, rows, hdim).transpose(-2, -3).to(dq.dtype)
