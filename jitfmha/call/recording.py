"""Writes each launch on an AMD GPU into a folder of its own: ``JITFMHA_RECORD``.

The environment is read when a target is made. Where it asks for nothing, nothing here is loaded.
Where it does, the target's runtime is one that stands between: its library keeps what is launched,
and its scope around a launch sees the tensors that the launch may touch.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..amd.recording_runtime import (
    MOST_BYTES,
    RecordingRuntime,
    Scope,
    Started,
    bytes_of,
    fits,
    kept,
    recorded_scope,
    warn_once,
)
from ..jit import BuildSpec
from ..kernels.amd_plan import AmdPlan
from ..planning.plan import Launch, Plan
from ..planning.target import AmdTarget
from ..problem.arguments import Tensors
from ..problem.memory import extent
from ..problem.problem import PlainSizes, Problem
from .record import (
    INTERFACES,
    Record,
    RecordedKernel,
    RecordedResult,
    RecordedTensor,
    Region,
    named_tensors,
    publish,
)

MOST_LAUNCHES = 1000
"""That a process records."""

# Of a launch's results, in the order in which passes have them.
_RESULTS = ("out", "lse"), ("dq", "dk", "dv", "dbias")
_LONGEST_NAME = 200  # letters of a folder's
_numbers = itertools.count(1)


class RecordedPlan(Plan):
    """A plan whose launches are written down; otherwise it is the plan."""

    def __init__(self, plan: Plan, target: AmdTarget) -> None:
        assert isinstance(plan, AmdPlan), plan
        self._plan = plan
        self._target = target
        self.problem = plan.problem
        self.family, self.kernel, self.source = plan.family, plan.kernel, plan.source
        self.is_settled = plan.is_settled

    @property
    def specs(self) -> Sequence[BuildSpec]:
        return self._plan.specs

    def remarks(self) -> list[str]:
        return self._plan.remarks()

    def bind(self) -> None:
        self._plan.bind()

    def seconds(self, seqlen_q: int, seqlen_k: int) -> float | None:
        return self._plan.seconds(seqlen_q, seqlen_k)

    def serves(self, sizes: PlainSizes) -> bool:
        return self._plan.serves(sizes)

    def launch_for(self, sizes: PlainSizes) -> RecordedLaunch:
        """The plan's launch, with what is known of the call."""
        launch = self._plan.launch_for(sizes)
        return RecordedLaunch(launch, self._plan, self.problem.with_sizes(sizes), self._target)


class RecordedLaunch:
    """A launch that is written down when it has run."""

    def __init__(self, launch: Launch, plan: AmdPlan, problem: Problem, target: AmdTarget) -> None:
        assert isinstance(target.runtime, RecordingRuntime)
        self._launch = launch
        self._plan = plan
        self._problem = problem
        self._target = target
        self._runtime = target.runtime

    def __call__(self, tensors: Tensors) -> None:
        """Run it, and write it down; what cannot be written is warned of, and the call goes on."""
        number = MOST_LAUNCHES + 1 if _is_captured(tensors.q) else next(_numbers)
        if number > MOST_LAUNCHES:
            warn_once(
                "JITFMHA_RECORD: launches that are captured into a graph are not recorded, nor "
                f"those after the first {MOST_LAUNCHES} of a process"
            )
            self._launch(tensors)
            return
        scope = Scope()
        token = recorded_scope.set(scope)
        try:
            self._launch(tensors)
        finally:
            recorded_scope.reset(token)
            if scope.kernels:
                self._write(tensors, scope, number)

    def _write(self, tensors: Tensors, scope: Scope, number: int) -> None:
        files: dict[str, bytes | bytearray] = {}
        named = named_tensors(tensors)
        # What else was touched: tensors between kernels.
        for x in scope.touched:
            if not any(x is known for known in named.values()):
                named[f"between_{sum(name.startswith('between') for name in named)}"] = x
        places, regions = self._regions(named, scope, files)
        results = self._results(tensors, files)
        sums = tensors.cu_seqlens
        record = Record(
            folder=self._runtime.folder,
            arch=self._target.arch,
            chip=self._target.chip.name,
            family=self._plan.family,
            problem=self._problem,
            rows=_described_rows(self._plan),
            max_seqlens=(None, None) if sums is None else (sums.max_seqlen_q, sums.max_seqlen_k),
            tensors=places,
            regions=regions,
            kernels=tuple(_recorded(each, files) for each in scope.kernels),
            results=results,
        )
        now = time.strftime("%Y%m%d-%H%M%S")
        name = f"{now}-{os.getpid()}-{number:04d}-{self._plan.kernel}"[:_LONGEST_NAME]
        try:
            publish(self._runtime.folder, name, record, files)
        except OSError as error:
            warn_once(f"JITFMHA_RECORD: {self._runtime.folder} cannot be written: {error}")

    def _regions(
        self, named: dict[str, Tensor], scope: Scope, files: dict[str, bytes | bytearray]
    ) -> tuple[dict[str, RecordedTensor], tuple[Region, ...]]:
        """Where the tensors lie; those that overlap share a region."""
        spans = {name: extent(x) for name, x in named.items()}
        stretches = _stretches(spans.values())
        contents = [bytearray(size if size <= MOST_BYTES else 0) for _, size in stretches]
        # Lengths, tables and random states are kept in any case: without them nothing can run.
        is_kept = [self._runtime.keeps_data] * len(stretches)
        is_known = [len(x) == size for x, (_, size) in zip(contents, stretches, strict=True)]
        places = {}
        for name, x in named.items():
            begin, size = spans[name]
            index = max(i for i, (first, _) in enumerate(stretches) if first <= begin)
            offset = begin - stretches[index][0]
            places[name] = RecordedTensor(
                *(_name_of(x.dtype), tuple(x.shape), tuple(x.stride()), index, offset)
            )
            is_kept[index] |= not x.dtype.is_floating_point and x.dtype.itemsize > 1
            before = _before(x, scope)
            is_known[index] &= before is not None
            if before is not None and is_known[index]:
                contents[index][offset : offset + size] = before
        regions = []
        for i, (begin, size) in enumerate(stretches):
            file = hashed = None
            if is_known[i]:
                hashed = hashlib.sha256(contents[i]).hexdigest()
                if is_kept[i]:
                    file = kept(f"region_{i}.bin", contents[i], files)
            regions.append(Region(begin, size, file, hashed))
        return places, tuple(regions)

    def _results(
        self, tensors: Tensors, files: dict[str, bytes | bytearray]
    ) -> dict[str, RecordedResult]:
        written = _RESULTS[self._problem.gradients is not None]
        results = {}
        for name, x in named_tensors(tensors).items():
            if name not in written:
                continue
            contiguous = x.detach().contiguous()
            file = hashed = None
            if fits(contiguous):
                content = bytes_of(contiguous) if x.numel() else b""
                hashed = hashlib.sha256(content).hexdigest()
                if self._runtime.keeps_data:
                    file = kept(f"result_{name}.bin", content, files)
            results[name] = RecordedResult(_name_of(x.dtype), tuple(x.shape), file, hashed)
        return results


def _stretches(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Address and bytes of what the spans cover together, in order."""
    stretches: list[tuple[int, int]] = []
    for begin, size in sorted(spans):
        if stretches and begin < sum(stretches[-1]):
            first, room = stretches[-1]
            stretches[-1] = first, max(room, begin + size - first)
        else:
            stretches.append((begin, size))
    return stretches


def _before(x: Tensor, scope: Scope) -> bytes | None:
    """What a tensor held before the first kernel; no kernel writes those that none may touch."""
    for known, before in zip(scope.touched, scope.before, strict=True):
        if known is x:
            return before
    if not x.numel():
        return b""
    return bytes_of(x) if fits(x) else None


def _recorded(started: Started, files: dict[str, bytes | bytearray]) -> RecordedKernel:
    hashed = hashlib.sha256(started.image).hexdigest()
    file = f"{hashed[:16]}.co"
    files[file] = started.image
    interface = next(name for name, each in INTERFACES.items() if each.size == len(started.kernarg))
    return RecordedKernel(
        *(started.symbol, file, hashed, started.grid, started.block, started.dynamic_lds),
        *(interface, started.kernarg),
    )


def _described_rows(plan: AmdPlan) -> dict[str, dict[str, object]]:
    """What a manifest or the tables say of the plan's kernels, by symbol."""
    described: dict[str, dict[str, object]] = {}
    for row in plan.rows():
        facts = {name: value for name, value in row._asdict().items() if _is_plain(value)}
        described[row.symbol] = facts
    return described


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
