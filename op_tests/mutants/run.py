"""Puts faults into copies of this tree, one at a time, and runs the tests that must catch them.

    python op_tests/mutants/run.py                      every mutant
    python op_tests/mutants/run.py 'amx*' cpu --jobs 8  those whose id or list matches
    python op_tests/mutants/run.py --draw 3             three of them, whichever come
    python op_tests/mutants/run.py --list               what there is; nothing runs
    python op_tests/mutants/run.py --unchanged          the tests alone, which must all pass

The lists are the files `*.toml` beside this one. A mutant is a table with these fields:

    id, file, fault    the name, the file from the repository's root, what is wrong in a few words
    old, new           the text that is replaced, which occurs once in the file, and its replacement
    tests              arguments of pytest: the tests that must fail
    isa                kernels of the CPU are for this instruction set; other machines leave it out
    build              code objects to build anew before, as `python hsa/build.py` takes them
    does_not_compile   the tests fail because a compiler refuses the file
    hangs              the tests fail because they do not end
    equivalent         a sentence that says why nothing can tell: its tests must pass
    slow               its tests take long, so that it is not drawn

A mutant is caught when pytest says that a test failed (exit code 1) or when a signal ended it.
Tests that are not there, a compiler's error and a timeout are no catch. The exit code is 1 where a
mutant survived, or could not be tried although this machine could run it.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEFAULT_SEED = 0
DEFAULT_TIMEOUT = 420.0

_CACHES = shutil.ignore_patterns("__pycache__", ".git", ".*_cache", "*.egg-info", ".venv", "build")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_NOT_COMPILED = re.compile(r"\b(?:BuildError|DeviceCompileError|SyntaxError|IndentationError)\b")
_FINE = ("caught", "equivalent", "not run here")
# What is built while a test runs: some for minutes, and an error of it is no catch.
_BUILT_BY_TESTS = ("csrc_templates/", "hsa/src/")
_BUILT_FOR_LONG = ("csrc_templates/emulator/", "csrc_templates/amd/", "jitfmha/emulator/")
# What a fault of these would leave in a cache, others must not find.
_OF_THE_CACHE = ("jitfmha/jit/cache/", "jitfmha/jit/toolchain/", "jitfmha/jit/loader.py")


@dataclass(frozen=True)
class Mutant:
    """A fault: a text of a file that is replaced, and the tests that must see it."""

    id: str
    file: str
    fault: str
    old: str
    new: str
    tests: str
    isa: str = ""
    build: str = ""
    does_not_compile: bool = False
    hangs: bool = False
    equivalent: str = ""
    slow: bool = False
    room: str = ""

    def mutated(self, text: str) -> str | None:
        """The file's text with the fault; None where the list is stale."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None

    def runs_on(self, isas: Collection[str]) -> bool:
        """Whether a machine with these instruction sets can run it."""
        return not self.isa or self.isa in isas


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: a word, its seconds, and what there is to say of it."""

    mutant: Mutant
    word: str
    seconds: float = 0.0
    detail: str = ""

    @property
    def is_fine(self) -> bool:
        return self.word in _FINE

    def __str__(self) -> str:
        return f"{self.mutant.id:<28} {self.word:<13} {self.seconds:6.1f} s  {self.detail}".rstrip()


def mutants(patterns: Sequence[str] = (), folder: Path = HERE) -> list[Mutant]:
    """Those whose id or list matches one of these patterns, by default all."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for row in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
            each = Mutant(**row, room=path.stem)
            if not patterns or any(fnmatch(x, p) for x in (each.id, each.room) for p in patterns):
                found.append(each)
    return found


def isas_here() -> tuple[str, ...]:
    """The instruction sets for which this machine's CPU runs kernels."""
    sys.path.insert(0, str(ROOT))
    from jitfmha.planning.target import cpu_isas_here

    return cpu_isas_here()


def _copied(root: Path, to: Path) -> None:
    """A copy of a tree: what git tracks, or where there is no git, all but caches."""
    tracked: list[str] = []
    if shutil.which("git"):
        command = ["git", "-C", str(root), "ls-files", "-z"]
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        tracked = listed.split("\0")[:-1]
    if not tracked:
        shutil.copytree(root, to, ignore=_CACHES)
    for name in tracked:
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


@contextmanager
def _mutated(tree: Path, mutant: Mutant) -> Iterator[bool]:
    """The fault is in the copy meanwhile; False where its text is not."""
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    changed = mutant.mutated(text)
    if changed is not None:
        path.write_text(changed, encoding="utf-8")
    try:
        yield changed is not None
    finally:
        if changed is not None:
            path.write_text(text, encoding="utf-8")


@contextmanager
def _rebuilt(tree: Path, pattern: str, environment: dict[str, str]) -> Iterator[str]:
    """Code objects that are built from the copy's sources meanwhile; why they are not, if so."""
    if not pattern:
        yield ""
        return
    kept = tree.parent / f"{tree.name}.hsa"
    shutil.copytree(tree / "hsa", kept)
    try:
        command = [sys.executable, "hsa/build.py", *shlex.split(pattern)]
        built = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, check=False
        )
        yield built.stderr.strip().rpartition("\n")[2] if built.returncode else ""
    finally:
        shutil.rmtree(tree / "hsa")
        kept.rename(tree / "hsa")


def _run(
    command: Sequence[str], tree: Path, environment: dict[str, str], timeout: float
) -> tuple[int | None, str]:
    """A command's exit code and output; None where it did not end, and was ended.

    What it leaves running is ended with it, and is not waited for: some of it may hold the output.
    """
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
        code = process.poll()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        return code, output.read()


class Runner:
    """Runs mutants in copies of a tree, each copy for one of them at a time.

    Attributes:
        jobs: how many run at once.
        seed: that of the tests, always the same, so that what was caught is caught again.
        timeout: seconds of one run.
    """

    def __init__(
        self,
        jobs: int = 1,
        seed: int = DEFAULT_SEED,
        timeout: float = DEFAULT_TIMEOUT,
        root: Path = ROOT,
    ) -> None:
        self.jobs = jobs
        self.seed = seed
        self.timeout = timeout
        self._root = root

    def outcomes(self, of: Iterable[Mutant]) -> Iterator[Outcome]:
        """What becomes of each, as they end."""
        isas = isas_here()
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
            for number in range(self.jobs):
                _copied(self._root, Path(folder, f"{number}"))
                trees.put(Path(folder, f"{number}"))

            def outcome(mutant: Mutant) -> Outcome:
                if not mutant.runs_on(isas):
                    return Outcome(mutant, "not run here", detail=f"has no {mutant.isa}")
                tree, start = trees.get(), time.monotonic()
                try:
                    word, detail = self._tried(mutant, tree)
                finally:
                    trees.put(tree)
                return Outcome(mutant, word, time.monotonic() - start, detail)

            with ThreadPoolExecutor(self.jobs) as pool:
                for done in as_completed([pool.submit(outcome, each) for each in of]):
                    yield done.result()

    def _tried(self, mutant: Mutant, tree: Path) -> tuple[str, str]:
        with tempfile.TemporaryDirectory(dir=tree.parent) as scratch:
            environment = self._environment(mutant, tree, Path(scratch))
            with (
                _mutated(tree, mutant) as is_there,
                _rebuilt(tree, mutant.build, environment) as why_not_built,
            ):
                if not is_there:
                    return "stale", f"{mutant.file} has not the text once"
                if why_not_built:
                    return "broken", why_not_built
                command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
                command += [f"--seed={self.seed}", f"--basetemp={scratch}/tests"]
                command += shlex.split(mutant.tests)
                code, output = _run(command, tree, environment, self.timeout)
        return judged(mutant, code, output)

    def _environment(self, mutant: Mutant, tree: Path, scratch: Path) -> dict[str, str]:
        environment = dict(os.environ)
        path = [str(tree), *filter(None, [environment.get("PYTHONPATH")])]
        # A module whose fault came within a second of its last change would be read from a cache.
        environment |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTEST_ADDOPTS", None)
        # Of each of the jobs: threads, and compilers at once.
        environment.setdefault("OMP_NUM_THREADS", "2")
        environment.setdefault("MAX_JOBS", "2")
        if mutant.isa:
            environment["JITFMHA_CPU_ISA"] = mutant.isa
        # All others share one, by their keys.
        shared = scratch.parent / "cache"
        shared.mkdir(mode=0o700, exist_ok=True)
        if mutant.file.startswith(_OF_THE_CACHE):
            environment["JITFMHA_CACHE_DIR"] = str(scratch / "cache")
            (scratch / "cache").mkdir(mode=0o700)
        else:
            environment.setdefault("JITFMHA_CACHE_DIR", str(shared))
        return environment


def judged(mutant: Mutant, code: int | None, output: str) -> tuple[str, str]:
    """What an exit code of pytest says of a mutant, with a detail."""
    if code == 0:
        if not re.search(r"\b\d+ passed\b", output):
            return "not run here", "its tests are skipped"
        return ("equivalent" if mutant.equivalent else "SURVIVED"), mutant.fault
    if code is None:
        return ("caught" if mutant.hangs else "timed out"), "the tests did not end"
    if code < 0:
        word, detail = "caught", f"ended by {signal.Signals(-code).name}"
    elif code == 1:
        word, detail = "caught", next(iter(_FAILED.findall(output)), "")
        is_built = mutant.file.startswith(_BUILT_BY_TESTS) and not mutant.does_not_compile
        if is_built and _NOT_COMPILED.search(output):
            word, detail = "broken", f"does not compile: {detail}"
    else:
        # What a module that cannot be imported says, or else pytest's last line.
        said = re.findall(r"^E +(.+)$", output, re.MULTILINE) or output.strip().splitlines()
        return "broken", f"pytest ended with {code}: {said[-1] if said else 'nothing said'}"
    if word == "caught" and mutant.equivalent:
        word = "not equivalent"
    return word, detail


def drawn(of: Sequence[Mutant], n: int, rng: random.Random) -> list[Mutant]:
    """n of those that this machine can see caught in little time, without a compiler."""
    isas = isas_here()

    def is_quick(mutant: Mutant) -> bool:
        is_built = mutant.build or mutant.file.startswith(_BUILT_BY_TESTS + _BUILT_FOR_LONG)
        return not (is_built or mutant.hangs or mutant.slow or mutant.equivalent)

    quick = [each for each in of if each.runs_on(isas) and is_quick(each)]
    return rng.sample(quick, min(n, len(quick)))


def _unchanged(of: Iterable[Mutant]) -> list[Mutant]:
    """One mutant without a fault for each selection of tests: they must pass."""
    first: dict[tuple[str, str], Mutant] = {}
    for each in of:
        passes = replace(each, new=each.old, build="", equivalent="nothing was changed")
        first.setdefault((each.tests, each.isa), passes)
    return list(first.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line names; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pattern", nargs="*", help="ids or lists, as 'amx*' or cpu")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at once")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="of the tests' inputs")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT, help="seconds of a run")
    parser.add_argument("--draw", type=int, metavar="N", help="only N of them")
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--unchanged", action="store_true", help="run the tests without any fault")
    arguments = parser.parse_args(argv)
    chosen = mutants(arguments.pattern)
    if not chosen:
        parser.error(f"no mutant matches {' or '.join(arguments.pattern)}")
    if arguments.draw is not None:
        chosen = drawn(chosen, arguments.draw, random.Random())
    # The longest first, or the last of a run are waited for.
    chosen.sort(key=lambda each: not each.file.startswith(_BUILT_FOR_LONG))
    if arguments.list:
        for each in chosen:
            print(f"{each.room:<12} {each.id:<28} {each.file}: {each.fault}")
        equivalents = sum(bool(each.equivalent) for each in chosen)
        print(f"{len(chosen)} mutants, {equivalents} of them equivalent")
        return 0
    if arguments.unchanged:
        chosen = _unchanged(chosen)
    runner = Runner(arguments.jobs, arguments.seed, arguments.timeout)
    ended: list[Outcome] = []
    for outcome in runner.outcomes(chosen):
        ended.append(outcome)
        print(outcome, flush=True)
    counts = Counter(each.word for each in ended)
    print(f"{len(ended)} mutants: {', '.join(f'{n} {word}' for word, n in counts.most_common())}")
    return 0 if all(each.is_fine for each in ended) else 1


if __name__ == "__main__":
    sys.exit(main())
