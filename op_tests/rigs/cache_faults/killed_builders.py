"""The builder gets SIGKILL at a random moment: the next caller is not held up and nothing piles up.

The moments are uniform over the time of a normal build, and every fifth lies in the few
milliseconds between the first file of the finished entry and its publication. Half of the next
callers wait for the builder already when it dies, the others come right afterwards. The cache is
never cleared, only the published entry is removed, so that whatever a killed builder leaves behind
has to go by the package's own doing.

A normal build is timed before every recovery, because the load of a shared machine changes from
minute to minute.
"""

import shutil
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass

from .attention_call import AttentionCall
from .outcome import Extent, Outcome
from .processes import Ending, Gate, Worker, wait_until
from .sandbox import Sandbox

_KILLS = {Extent.SHORT: 4, Extent.LONG: 200}
LIMIT_SECONDS = {Extent.SHORT: 240.0, Extent.LONG: 3600.0}
_CALL_LIMIT_SECONDS = 60.0
_PUBLISHING_EVERY = 5
# From the first file of the staged entry to its publication: a few fsyncs and a rename.
_PUBLISHING_SECONDS = 0.02
_BAR = 1.5


def run_inside(sandbox: Sandbox, extent: Extent) -> Outcome:
    """All kills."""
    outcome = Outcome()
    kills = _KilledBuilders(sandbox, AttentionCall.draw(sandbox.rng.randrange(2**31)), outcome)
    kills.normal_build()
    for number in range(_KILLS[extent]):
        kills.normal_build()
        kills.kill_and_recover(number)
        if number % 20 == 19:
            sandbox.progress(f"{number + 1} kills: {kills.summary()}")
    sandbox.progress(kills.summary())
    if extent is Extent.LONG:  # The slowest of a few tells of the machine, not of the package.
        what = f"killed builder: slowest of {_KILLS[extent]} next callers"
        what += " over the slowest normal build"
        outcome.at_most(what, kills.slowest_over_slowest(), _BAR, "x")
    median = kills.median_over_median()
    if median is not None:
        what = "killed builder: median next caller over the median normal build"
        outcome.at_most(what, median, _BAR, "x")
    return outcome


@dataclass(frozen=True)
class _Recovery:
    """What came after one kill: ``normal`` is the time of the normal build before it."""

    seconds: float
    normal: float
    was_waiting: bool
    built: bool


class _KilledBuilders:
    """Normal builds and kills in turns, and what was measured."""

    def __init__(self, sandbox: Sandbox, call: AttentionCall, outcome: Outcome) -> None:
        self._sandbox = sandbox
        self._call = call
        self._outcome = outcome
        self._normal: list[float] = []
        self._recoveries: list[_Recovery] = []
        self._moments: Counter[str] = Counter()

    def normal_build(self) -> None:
        """Time a first call that nobody disturbs."""
        self._unpublish()
        ending = self._sandbox.run(self._call.make, _CALL_LIMIT_SECONDS)
        built = ending.status == 0 and ending.report["how"] == ["built"]
        self._outcome.expect(built, f"a normal build failed: {ending}")
        if built:
            self._normal.append(_timestamp(ending, "ended") - _timestamp(ending, "began"))

    def kill_and_recover(self, number: int) -> None:
        """Kill a builder, and see how the next caller fares."""
        rng = self._sandbox.rng
        self._unpublish()
        label = f"kill {number}"
        waits_already = rng.random() < 0.5
        gate = Gate(1)
        victim = self._sandbox.start(lambda: self._victim(gate))
        gate.open()
        opened = time.monotonic()
        next_caller: Worker | None = None
        if number % _PUBLISHING_EVERY == 0:
            self._await_publishing(victim)
            time.sleep(rng.uniform(0, _PUBLISHING_SECONDS))
        else:
            after = rng.uniform(0, statistics.median(self._normal))
            if waits_already:
                time.sleep(after / 2)
                next_caller = self._sandbox.start(self._call.make)
            time.sleep(max(0.0, opened + after - time.monotonic()))
        victim.signal(signal.SIGKILL)
        killed = time.monotonic()
        self._moments[self._moment_of_the_kill()] += 1
        if next_caller is None:
            next_caller = self._sandbox.start(self._call.make)
        ending = next_caller.end(_CALL_LIMIT_SECONDS)
        self._outcome.expect(
            victim.end(_CALL_LIMIT_SECONDS).status in (-signal.SIGKILL, 0),
            f"{label}: the victim ended by itself",
        )
        self._outcome.expect(ending.status == 0, f"{label}: the next caller failed: {ending}")
        if ending.status == 0:
            self._record(ending, killed)
            self._check_debris(label, self._recoveries[-1])

    def _victim(self, gate: Gate) -> dict[str, object]:
        gate.wait()
        return self._call.make()

    def _await_publishing(self, victim: Worker) -> None:
        building = self._sandbox.cache.building
        began = wait_until(
            lambda: any(building.glob("*/entry")) or not victim.is_running(), _CALL_LIMIT_SECONDS
        )
        self._outcome.expect(began, "a builder does not get as far as publishing")

    def _moment_of_the_kill(self) -> str:
        """What a builder that was just killed leaves."""
        cache = self._sandbox.cache
        if any(cache.building.glob("*/entry")):
            return "while writing the entry"
        if any(cache.entries.glob("*")):
            return "after publishing"
        if self._sandbox.compiler.runs().count("link"):
            return "during or after linking"
        if self._sandbox.compiler.runs():
            return "while compiling"
        return "before compiling"

    def _record(self, ending: Ending, killed: float) -> None:
        began = _timestamp(ending, "began")
        self._recoveries.append(
            _Recovery(
                seconds=_timestamp(ending, "ended") - max(began, killed),
                normal=self._normal[-1],
                was_waiting=began < killed,
                built=ending.report["how"] == ["built"],
            )
        )

    def _check_debris(self, label: str, recovery: _Recovery) -> None:
        counts = self._sandbox.counts()
        # Who only loads does not clean up; what is left then goes with the next build.
        expected = {
            "entries": 1,
            "building": counts["building"] if not recovery.built else 0,
            "locks": 2,
            "trash": 0,
            "logs": 0,
            "tmp": 0,
        }
        holds = counts["building"] <= 1 and counts | {"locks": 2} == expected
        self._outcome.expect(holds and counts["locks"] <= 2, f"{label}: left behind {counts}")
        running = self._sandbox.still_running(grace_seconds=0.5)
        self._outcome.expect(not running, f"{label}: still running: {running}")

    def _unpublish(self) -> None:
        for path in self._sandbox.cache.entries.glob("*"):
            shutil.rmtree(path)
        self._sandbox.compiler.forget()

    def ratios(self) -> list[float]:
        """Each recovery over the normal build before it."""
        return [recovery.seconds / recovery.normal for recovery in self._recoveries]

    def slowest_over_slowest(self) -> float:
        """The slowest of the recoveries over the slowest of as many normal builds."""
        return max(r.seconds for r in self._recoveries) / max(self._normal)

    def median_over_median(self) -> float | None:
        """For the recoveries that had to build; None where a builder always ended before."""
        built = [r.seconds for r in self._recoveries if r.built]
        return statistics.median(built) / statistics.median(self._normal) if built else None

    def summary(self) -> str:
        """Everything measured so far, in a line."""
        built = [r for r in self._recoveries if r.built]
        kinds = {
            "waiting already": [r.seconds for r in built if r.was_waiting],
            "coming afterwards": [r.seconds for r in built if not r.was_waiting],
            "normal builds": self._normal,
        }
        parts = [
            f"{name} {statistics.median(s):.2f} s (median), {max(s):.2f} s (slowest) of {len(s)}"
            for name, s in kinds.items()
            if s
        ]
        parts.append(
            f"found published {len(self._recoveries) - len(built)}; each over the normal build "
            f"before it: {statistics.median(self.ratios()):.2f} (median), "
            f"{max(self.ratios()):.2f} (largest)"
        )
        killed = ", ".join(f"{count} {when}" for when, count in sorted(self._moments.items()))
        return "; ".join([*parts, f"killed {killed}"])


def _timestamp(ending: Ending, name: str) -> float:
    value = ending.report[name]
    assert isinstance(value, float)
    return value
