"""Many processes make the first call at once on an empty cache: one of them builds.

Real first calls of ``fmha_fwd`` that are let go together. The compiler is counted by a script in
front of it, the waiters' messages are read from their stderr.
"""

import os
import statistics

from .attention_call import AttentionCall
from .outcome import Extent, Outcome
from .processes import Ending, Gate
from .sandbox import Sandbox
from .watched_compiler import BUILD

_PROCESSES = {Extent.SHORT: 16, Extent.LONG: 64}
_ROUNDS = {Extent.SHORT: 1, Extent.LONG: 20}
LIMIT_SECONDS = {Extent.SHORT: 180.0, Extent.LONG: 1800.0}
_CALL_LIMIT_SECONDS = 120.0
# The message comes after a second; polls, and a machine with too few processors, may delay it.
_MUST_HAVE_TOLD_SECONDS = 1.5


def run_inside(sandbox: Sandbox, extent: Extent) -> Outcome:
    """All rounds."""
    outcome = Outcome()
    ratios, messages = [], 0
    for number in range(_ROUNDS[extent]):
        call = AttentionCall.draw(sandbox.rng.randrange(2**31))
        alone = _first_call_alone(sandbox, call, outcome)
        endings = _round(sandbox, call, _PROCESSES[extent])
        _check_round(sandbox, endings, outcome, f"round {number}")
        slowest = max((_seconds(ending) for ending in endings if ending.report), default=0.0)
        messages += sum("waiting for" in ending.output for ending in endings)
        ratios.append(slowest / alone)
        sandbox.progress(
            f"round {number}: the slowest of {len(endings)} callers took {slowest:.2f} s, "
            f"a first call alone {alone:.2f} s"
        )
    sandbox.progress(
        f"the slowest caller took {statistics.median(ratios):.2f} times a first call alone "
        f"(median over rounds; at most {max(ratios):.2f} times); {messages} waiters told of it"
    )
    return outcome


def _first_call_alone(sandbox: Sandbox, call: AttentionCall, outcome: Outcome) -> float:
    sandbox.empty_cache()
    ending = sandbox.run(call.make, _CALL_LIMIT_SECONDS)
    outcome.expect(ending.status == 0, f"a first call alone failed: {ending}")
    return _seconds(ending) if ending.report else float("nan")


def _round(sandbox: Sandbox, call: AttentionCall, processes: int) -> list[Ending]:
    sandbox.empty_cache()
    gate = Gate(processes)

    def work() -> dict[str, object]:
        gate.wait()
        return call.make()

    workers = [sandbox.start(work) for _ in range(processes)]
    gate.open()
    return [worker.end(_CALL_LIMIT_SECONDS) for worker in workers]


def _check_round(sandbox: Sandbox, endings: list[Ending], outcome: Outcome, label: str) -> None:
    for ending in endings:
        outcome.expect(ending.status == 0, f"{label}: {ending}")
    builders = [ending for ending in endings if ending.report.get("how") == ["built"]]
    outcome.expect(len(builders) == 1, f"{label}: {len(builders)} processes built")
    runs = sandbox.compiler.runs()
    outcome.expect(runs == BUILD, f"{label}: the compiler was run for {runs}")
    counts = sandbox.counts()
    # Beside the lock of the one entry there is that of eviction.
    expected = {"entries": 1, "building": 0, "locks": 2, "trash": 0, "logs": 0, "tmp": 0}
    outcome.expect(counts == expected, f"{label}: left behind {counts}")
    running = sandbox.still_running(grace_seconds=1.0)
    outcome.expect(not running, f"{label}: still running: {running}")
    if builders:
        _check_messages(endings, builders[0], outcome, label)


def _check_messages(endings: list[Ending], builder: Ending, outcome: Outcome, label: str) -> None:
    whom = f"pid {builder.pid} on {os.uname().nodename}"
    line = f"jitfmha: waiting for {builder.report['name']}, which {whom} is building ..."
    for ending in endings:
        if ending is builder or not ending.report:
            continue
        waited = _number(ending, "waited")
        if waited > _MUST_HAVE_TOLD_SECONDS:
            outcome.expect(
                ending.output.splitlines().count(line) == 1,
                f"{label}: waited {waited:.1f} s without telling once for {whom}: {ending}",
            )
        elif waited < 1.0:
            outcome.expect("waiting" not in ending.output, f"{label}: told too early: {ending}")


def _seconds(ending: Ending) -> float:
    return _number(ending, "ended") - _number(ending, "began")


def _number(ending: Ending, name: str) -> float:
    value = ending.report[name]
    assert isinstance(value, float | int)
    return float(value)
