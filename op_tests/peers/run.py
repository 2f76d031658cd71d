"""Runs the public tests of flash-attn and AITER against this package, on the CPU or emulated.

    git clone https://github.com/Dao-AILab/flash-attention DIR
    python op_tests/peers/run.py --suite flash-attn --tests DIR --sample 100

``--tests`` is a checkout of the suite's repository: Dao-AILab/flash-attention, or ROCm/aiter for
the suites ``aiter``, ``aiter-varlen``, ``aiter-prefill`` and ``aiter-mla``. The tests need einops.

A case passes, skips itself, fails, or is refused: this package raised ``NotImplementedError``. One
whose own assertion fails before it has called anything of this package counts as skipped. With
``--longest`` cases of longer sequences are left out: their references take minutes.
The exit code is 1 if a case fails, or is refused for another reason than the suite's ``refusals``.
"""

import argparse
import contextlib
import inspect
import io
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
from adapter import SUITES, calls
from cases import Parameters, ParametrizedTest, parametrized_tests

from jitfmha import emulate
from jitfmha.amd.chips import Arch

HERE = Path(__file__).parent
_PACKAGE = "jitfmha"
_LENGTHS = re.compile("seqlen|.*_lens?$")
_TRIES = 50  # for each case of a sample, most of which may be skipped


@dataclass
class Outcomes:
    """What became of the cases.

    Attributes:
        expected: patterns of messages by the name of the reason.
        longest: sequences of cases that are tried.
        target: what the cases run on.
        counts: of each test's cases, by how they ended.
        refusals: how many cases each expected reason stopped.
        faults: descriptions of the cases that failed, or were refused for an unexpected reason.
    """

    expected: dict[str, str]
    longest: int
    target: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def run(self, test: ParametrizedTest, parameters: Parameters) -> str:
        """Run one case and count it under the word that is returned."""
        ended = self._ended(test, parameters)
        self.counts.setdefault(test.name, Counter())[ended] += 1
        return ended

    def _ended(self, test: ParametrizedTest, parameters: Parameters) -> str:
        lengths = (x for n, x in parameters.items() if _LENGTHS.match(n))
        if max((x for x in lengths if type(x) is int), default=0) > self.longest:
            return "too long"
        described = f"{test.name}({', '.join(f'{n}={x}' for n, x in parameters.items())})"
        called = calls.total()
        try:
            with contextlib.redirect_stdout(io.StringIO()), self.target():
                _call(test, parameters)
        except pytest.skip.Exception:
            return "skipped"
        except NotImplementedError as error:
            if not _is_ours(error):
                self._add_fault(described, error)
                return "failed"
            for reason, pattern in self.expected.items():
                if re.search(pattern, str(error)):
                    self.refusals[reason] += 1
                    return "refused"
            self._add_fault(described, error)
            return "refused unexpectedly"
        except Exception as error:
            if isinstance(error, AssertionError) and calls.total() == called:
                return "skipped"
            self._add_fault(described, error)
            return "failed"
        return "passed"

    def _add_fault(self, described: str, error: Exception) -> None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).strip() or frame.line
        self.faults.append(f"{described}\n  {type(error).__name__}: {text}\n  line {frame.lineno}")


def _call(test: ParametrizedTest, parameters: Parameters) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        wants = inspect.signature(test.function).parameters
        fixtures = {"monkeypatch": monkeypatch} if "monkeypatch" in wants else {}
        test.function(**parameters, **fixtures)


def _is_ours(error: NotImplementedError) -> bool:
    """Whether this package refused, rather than torch."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(Path(frame.filename).parent.name in (_PACKAGE, HERE.name) for frame in frames[-3:])


def run_suite(tests: list[ParametrizedTest], outcomes: Outcomes, sample: int, seed: int) -> None:
    """Run all cases, or where ``sample`` is not 0, as many of each test as make it up."""
    share = -(-sample // len(tests))
    for test in tests:
        done, start = 0, time.monotonic()
        cases = test.cases(random.Random(f"{seed} {test.name}") if sample else None)
        for tried, parameters in enumerate(cases, start=1):
            done += outcomes.run(test, parameters) not in ("skipped", "too long")
            if sample and (done == share or tried == share * _TRIES):
                break
        counts = ", ".join(f"{n} {how}" for how, n in outcomes.counts[test.name].items())
        seconds = time.monotonic() - start
        print(f"{test.name}: {counts}, of {test.count} cases, {seconds:.0f} s", flush=True)


def report(outcomes: Outcomes) -> bool:
    """Print what there is to know; whether all is as expected."""
    for reason, count in outcomes.refusals.most_common():
        print(f"refused, as expected: {count} for {reason}")
    for fault in outcomes.faults:
        print(f"FAULT {fault}")
    total = sum(outcomes.counts.values(), Counter())
    print(", ".join(f"{n} {how}" for how, n in sorted(total.items())))
    return not outcomes.faults


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument("--tests", type=Path, required=True, metavar="DIR", help="the checkout")
    parser.add_argument("--emulate", choices=get_args(Arch), help="in place of the CPU's kernels")
    parser.add_argument("--only", metavar="TEST", help="one test function")
    parser.add_argument(
        "--longest", type=int, default=sys.maxsize, metavar="N", help="leave longer sequences out"
    )
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="run about N cases")
    parser.add_argument("--seed", type=int, help="repeats the sample of an earlier run")
    arguments = parser.parse_args()
    suite = SUITES[arguments.suite]
    if not (arguments.tests / suite.tests).is_file():
        parser.error(f"{arguments.tests} is no checkout of {suite.repository}: no {suite.tests}")
    seed = random.randrange(2**31) if arguments.seed is None else arguments.seed
    print(f"{arguments.suite}, --seed {seed}")
    tests = parametrized_tests(suite.load(arguments.tests, arguments.emulate))
    if arguments.only is not None:
        tests = [test for test in tests if test.name == arguments.only]
        if not tests:
            parser.error(f"--only {arguments.only}: there is no such test")
    outcomes = Outcomes(dict(suite.refusals), arguments.longest)
    if arguments.emulate is not None:
        outcomes.target = partial(emulate, arguments.emulate)
    run_suite(tests, outcomes, arguments.sample, seed)
    return 0 if report(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
