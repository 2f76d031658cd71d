"""Times what could serve a call on the device at hand, and keeps what was measured.

Of each call the plans of all families are timed, and of a family the tiles, key splits and threads
that its plan can take (``Plan.variants``): in alternation, so that what disturbs the machine
disturbs all of them. From then on calls of the kind are chosen by these times (``Contest``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from statistics import quantiles
from typing import NamedTuple

import torch

from ..amd.events import EventTimer
from ..call.detection import planned_target
from ..call.dispatch import plans_for
from ..planning.measured import (
    Lengths,
    Machine,
    Measurement,
    Variant,
    is_tunable,
    kind_of,
    machine_of,
)
from ..planning.measured_file import keep
from ..planning.plan import Plan
from ..planning.target import AmdTarget, Target
from .build_ahead import combinations_of
from .combination import Combination, check_combination, known
from .profiles import PROFILES
from .trial_call import TrialCall, trial_call

_LEAST_ROUNDS = 5
# What takes so many times as long as the quickest in each of the first rounds is not timed again.
_HOPELESS, _FIRST_ROUNDS = 2.0, 3
# Written between launches on a GPU, so that no cache has what the last one read: as models have
# it, whose other layers come between. MI300X and MI355X have 256 MiB of Infinity Cache.
_FLUSHED_BYTES = 512 << 20


Timed = Callable[[Callable[[], object]], float]
"""A launch -> the seconds that it takes."""


class TunedCall(NamedTuple):
    """A call whose times are kept.

    Attributes:
        kind: of it.
        before: what it would have taken: by estimates, or by earlier measurements.
        measured: the seconds of everything that was timed, the quickest first.
        estimates: the seconds that it was estimated to take; None where nobody estimates.
        failed: what was not, and why.
    """

    kind: str
    lengths: Lengths
    before: Variant
    measured: dict[Variant, float]
    estimates: dict[Variant, float | None]
    failed: tuple[str, ...]

    @property
    def gain(self) -> float | None:
        """How many times as long what would have been taken takes; None where it is not known."""
        seconds = self.measured.get(self.before)
        return None if seconds is None else seconds / next(iter(self.measured.values()))


def tunable_target(device: str | torch.device) -> tuple[Target, Machine]:
    """The target of a device whose launches can be timed, and what times are kept by.

    Raises ``ValueError`` where nothing can be measured, with the reason.
    """
    target = planned_target(device)
    machine = machine_of(target)
    if machine is None:
        raise ValueError(
            f"nothing can be measured on {target}: the times of an emulator, or of a GPU that is "
            "not here, are not a GPU's"
        )
    if isinstance(target, AmdTarget) and target.records:
        raise ValueError("nothing can be measured while JITFMHA_RECORD writes every launch down")
    return target, machine


def tune(
    calls: Iterable[Combination], device: str | torch.device = "cpu", *, seconds: float = 1.0
) -> Iterator[TunedCall | str]:
    """Time the candidates of each call, and keep the times beside the cache.

    Args:
        calls: with the lengths, heads and batch that are of interest: times hold for calls of the
            same kind with these lengths, and correct the estimates of lengths near them. A batch,
            and a number of heads, is a kind of its own.
        device: a device of torch's.
        seconds: for each call, all candidates together; each is timed five times at least, but
            for what takes more than twice as long as the quickest in the first three.

    Yields:
        Each call as soon as its times are kept; or a sentence about why it has none.

    Raises:
        ValueError: nothing can be measured on the device.
        CacheError, OSError: times cannot be kept.
    """
    target, machine = tunable_target(device)
    with ExitStack() as held:
        if torch.device(device).type == "cuda":
            held.enter_context(torch.cuda.device(torch.device(device)))
        timed: Timed = _seconds_on_cpu
        if isinstance(target, AmdTarget):
            timed = held.enter_context(EventTimer(target.runtime, target.device_index)).seconds
        for combination in calls:
            try:
                check_combination(combination)
                call = trial_call(combination, torch.device(device))
                plans = plans_for(call.problem, target)
            except (TypeError, ValueError, RuntimeError, MemoryError) as error:
                yield f"{kind_of(combination.problem())}: {_in_a_line(error)}"
                continue
            if is_tunable(call.problem):
                yield _tuned(call, plans, machine, timed, seconds)
            else:
                yield f"{kind_of(call.problem)}: no times choose for such calls"
            del call, plans  # before the next ones come, which may need the memory


def _seconds_on_cpu(launch: Callable[[], object]) -> float:
    """The seconds of a launch that has ended when it returns."""
    start = time.perf_counter()
    launch()
    return time.perf_counter() - start


def _tuned(
    call: TrialCall,
    plans: Sequence[Plan],
    machine: Machine,
    timed: Timed,
    seconds: float,
) -> TunedCall:
    problem, tensors = call
    lengths = problem.seqlen_q, problem.seqlen_k
    launches: dict[Variant, Callable[[], object]] = {}
    failed: list[str] = []
    candidates = _candidates(plans, lengths)
    estimates = {variant: plan.seconds(*lengths) for variant, plan in candidates.items()}
    for variant, plan in candidates.items():
        try:
            plan.bind()
            launch = partial(plan.launch_for(problem.sizes), tensors)
            launch()
        except (RuntimeError, OSError, MemoryError) as error:
            failed.append(f"{plan.kernel}: {_in_a_line(error)}")
        else:
            launches[variant] = launch
    times = _interleaved(launches, timed, seconds, tensors.q.device)
    quartiles = {name: _first_quartile(x) for name, x in times.items()}
    measured = dict(sorted(quartiles.items(), key=lambda pair: pair[1]))
    kind = kind_of(problem)
    keep(Measurement(machine, kind, *lengths, name, x * 1e6) for name, x in measured.items())
    contest = plans[0].contest
    taken = plans[0] if contest is None else contest.best(*lengths)
    # Where lengths choose the kernel, these have chosen it.
    before = taken.variant or Variant(taken.family, taken.kernel, taken.version)
    return TunedCall(kind, lengths, before, measured, estimates, tuple(failed))


def _candidates(plans: Sequence[Plan], lengths: Lengths) -> dict[Variant, Plan]:
    """What families propose, and their variants; each once."""
    proposed = [plan for plan in plans if plan.variant_of is None]
    every = [each for plan in proposed for each in (plan, *plan.variants(*lengths))]
    return {plan.variant: plan for plan in reversed(every) if plan.variant is not None}


def _interleaved(
    launches: Mapping[Variant, Callable[[], object]],
    timed: Timed,
    seconds: float,
    device: torch.device,
) -> dict[Variant, list[float]]:
    """The seconds of each launch in every round that it takes part in."""
    flushed = None
    if device.type == "cuda":
        flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device)
    times: dict[Variant, list[float]] = {name: [] for name in launches}
    playing = dict(launches)
    end = time.perf_counter() + seconds
    number = 0
    while playing and (number < _LEAST_ROUNDS or time.perf_counter() < end):
        number += 1
        for name, launch in playing.items():
            if flushed is not None:
                flushed.zero_()
            times[name].append(timed(launch))
        if number == _FIRST_ROUNDS:
            bests = {name: min(x) for name, x in times.items()}
            most = _HOPELESS * min(bests.values())
            playing = {name: x for name, x in playing.items() if bests[name] <= most}
    return times


def _first_quartile(seconds: list[float]) -> float:
    """The time below which a quarter of the rounds are: what disturbs them makes them longer."""
    return quantiles(seconds, n=4, method="inclusive")[0]


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def calls_of_profile(name: str, device: str | torch.device) -> list[Combination]:
    """The calls of a profile that times choose for: of each kind a prompt and a decode step.

    Lengths are those of a server on a GPU, and small ones on the CPU. Raises ``TypeError`` or
    ``ValueError`` for a name that no profile has.
    """
    subsets = PROFILES[known("profile is", name, tuple(PROFILES))]
    lengths = _CPU_LENGTHS if torch.device(device).type == "cpu" else _GPU_LENGTHS
    return [
        _with_lengths(x, *each)
        for x in chain.from_iterable(map(combinations_of, subsets))
        for each in lengths
        # There are no gradients of a decode step.
        if not x.is_paged and (x.direction == "forward" or each[1] > 1)
    ]


# Query heads, sequences, queries and keys of each.
_GPU_LENGTHS = ((32, 4, 2048, 2048), (32, 16, 1, 8192))
_CPU_LENGTHS = ((8, 1, 512, 512), (8, 4, 1, 2048))


def _with_lengths(x: Combination, heads: int, batch: int, queries: int, keys: int) -> Combination:
    packs = batch if x.mode == "gm1" else 1
    return x._replace(
        batch=batch,
        heads_q=heads,
        heads_k=heads * x.heads_k // x.heads_q,
        seqlen_q=queries * packs,
        seqlen_k=keys * packs,
    )
