"""Options and fixtures of all tests: the seed, the launcher cache, poisoned memory."""

import gc
import os
import random
import secrets
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator
from pathlib import Path
from typing import Any, TypeGuard, get_args

import pytest
import torch
from commands import Ended, Run
from filelock import FileLock
from fresh_calls import fresh_calls
from inputs import DTYPES

from jitfmha.cli import main
from jitfmha.kernels.cpu import BESIDE_TILE_UNIT
from jitfmha.planning import measured_file
from jitfmha.planning.plan import Contest
from jitfmha.planning.target import CpuIsa, cpu_isas_here

_SEED = pytest.StashKey[int]()


class _WorkerConfig(pytest.Config):
    """The configuration of a process of pytest-xdist."""

    workerinput: dict[str, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="seed of all random inputs (default: a fresh one)")
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run the full product of the sweeps instead of a sample drawn from the seed",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sample(names, cases, n): n cases drawn from the seed")
    seed = config.getoption("--seed")
    if _is_worker(config):
        seed = config.workerinput["seed"]
    config.stash[_SEED] = secrets.randbelow(2**31) if seed is None else seed
    # Processes among which tests are divided share the processors. OpenMP's threads that spin while
    # they wait take them from each other: the tests of gradients took four times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected outlives the tests: no garbage collection looks at it again.

    Half a million objects take it half a second each time, and a quarter of the collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_measured() -> Iterator[None]:
    """Choices are those of estimates, whatever this machine's user has measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_file, "readable_directories", list)
        yield


@pytest.fixture(scope="session", autouse=True)
def _nothing_waits_for_the_disk() -> Iterator[None]:
    """What is built need not outlast a power cut; some 20 files of each kernel would be waited for.

    Processes that tests start wait, those of the faults of file systems among them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture
def ready_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on AMD GPUs take code objects of a tree where there are some, whatever they take."""
    monkeypatch.setattr(Contest, "best", lambda contest, *lengths: contest.plans[0])


def _is_worker(config: pytest.Config) -> TypeGuard[_WorkerConfig]:
    """Whether this is one of the processes among which pytest-xdist divides the tests."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes draw the same cases."""
    node.workerinput["seed"] = node.config.stash[_SEED]


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.stash[_SEED]} (repeat this run's random inputs with --seed)"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("seed", f"repeat with --seed {item.config.stash[_SEED]}"))
    return report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``@pytest.mark.sample(names, cases, n)``: parametrize with n cases drawn from the seed.

    With ``--exhaustive`` all cases are taken. Tests whose marks say ``shared_by="..."`` with the
    same text draw the same cases, and need no kernels of their own. What stands in ``always=[...]``
    comes on top, drawn or not. With ``is_fixed=True`` each run has the same cases: what a compiler
    makes of a kernel does not depend on inputs, and the sweep tells it of all.
    """
    for mark in metafunc.definition.iter_markers("sample"):
        names, cases, n = mark.args
        if not metafunc.config.getoption("--exhaustive"):
            of = mark.kwargs.get("shared_by", metafunc.definition.name)
            seed = "" if mark.kwargs.get("is_fixed") else metafunc.config.stash[_SEED]
            drawn = random.Random(f"{seed} {of}")
            cases = drawn.sample(cases, min(n, len(cases)))
        metafunc.parametrize(names, [*mark.kwargs.get("always", ()), *cases])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How the calls with bad input ended."""
    ended: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                ended.update(dict(report.user_properties).get("bad input"))
    if ended:
        counts = ", ".join(f"{n} {how}" for how, n in ended.most_common())
        terminalreporter.write_line(f"bad input: {sum(ended.values())} calls: {counts}")


@pytest.fixture(scope="session")
def run_seed(pytestconfig: pytest.Config) -> int:
    """The seed of the whole run."""
    return pytestconfig.stash[_SEED]


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of one test: it depends on the run's seed and on the test's name only."""
    return zlib.crc32(f"{request.config.stash[_SEED]} {request.node.nodeid}".encode())


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    """The random numbers of one test, from its seed."""
    return torch.Generator().manual_seed(seed)


def _folder_of_all(config: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder of all processes of this run."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if _is_worker(config) else folder


@pytest.fixture(scope="session")
def built_once(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Callable[[Path], object]], Path]:
    """``built_once(name, build)``: a folder that the first process to ask for it builds in."""

    def obtain(name: str, build: Callable[[Path], object]) -> Path:
        folder = _folder_of_all(pytestconfig, tmp_path_factory) / name
        done = folder.with_suffix(".built")
        with FileLock(folder.with_suffix(".lock")):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a process that failed
                folder.mkdir()
                build(folder)
                done.touch()
        return folder

    return obtain


@pytest.fixture(scope="session", autouse=True)
def launcher_cache(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """One cache for the session, so that each launcher is built once; one that is set is kept."""
    given = os.environ.get("JITFMHA_CACHE_DIR")
    if given is None:
        folder = _folder_of_all(pytestconfig, tmp_path_factory)
        (folder / "launchers").mkdir(mode=0o700, exist_ok=True)
        os.environ["JITFMHA_CACHE_DIR"] = str(folder / "launchers")
    yield os.environ["JITFMHA_CACHE_DIR"]
    if given is None:
        del os.environ["JITFMHA_CACHE_DIR"]


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Every fresh tensor holds NaN until something is written to it."""
    torch.use_deterministic_algorithms(True)  # includes torch.utils.deterministic's filling
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def dtypes(request: pytest.FixtureRequest, rng: torch.Generator) -> list[torch.dtype]:
    """Those of a test with many other cases: a drawn one, and with ``--exhaustive`` all."""
    every = list(DTYPES.values())
    if request.config.getoption("--exhaustive"):
        return every
    return [every[int(torch.randint(len(every), (), generator=rng))]]


@pytest.fixture
def quick_inductor() -> Iterator[None]:
    """Inductor writes scalar code: it neither tries instruction sets nor precompiles headers."""
    from torch._inductor import config

    with config.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}):
        yield


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Restores the number of threads that a test sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a path that of user 54321; only in appearance where this process is not root's."""
    is_root, stranger = os.geteuid() == 0, 54321
    strange: set[str] = set()
    lstat = os.lstat

    def fabricated(path: str | Path) -> os.stat_result:
        status = lstat(path)
        if str(path) in strange:
            return os.stat_result((*status[:4], stranger, *status[5:]))
        return status

    def give(path: Path) -> None:
        if is_root:
            os.chown(path, stranger, stranger, follow_symlinks=False)
        else:
            strange.add(str(path))

    if not is_root:
        monkeypatch.setattr(os, "lstat", fabricated)
    return give


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("explain", "--json")``: the package's command, whose lines may be long."""
    monkeypatch.setenv("COLUMNS", "400")

    def run_command(*argv: object) -> Ended:
        capfd.readouterr()
        try:
            code = main([*map(str, argv)])
        except SystemExit as end:  # argparse's way
            code = end.code if isinstance(end.code, int) else 1
        return Ended(code, *capfd.readouterr())

    return run_command


def _drawn_isas(config: pytest.Config) -> Collection[CpuIsa]:
    if config.getoption("--exhaustive"):
        return cpu_isas_here()
    drawn = random.Random(f"{config.stash[_SEED]} instruction sets")
    others = [isa for isa in cpu_isas_here() if isa != "amx_emulated"]
    return {"amx_emulated", drawn.choice(others)}


@pytest.fixture(params=get_args(CpuIsa))
def isa(request: pytest.FixtureRequest) -> Iterator[CpuIsa]:
    """An instruction set that this processor has, with CPU tensors on kernels for it.

    Without ``--exhaustive`` these are the emulated tile unit and one more, drawn from the seed, as
    each has dozens of kernels of its own. Those with a tile unit come with bf16 only.
    """
    if request.param not in cpu_isas_here():
        pytest.skip(f"this processor does not run {request.param}")
    if request.param not in _drawn_isas(request.config):
        pytest.skip(f"{request.param} was not drawn; --exhaustive runs all")
    dtype = request.node.callspec.params.get("dtype", "bf16")
    if request.param in BESIDE_TILE_UNIT and dtype != "bf16":
        pytest.skip(f"kernels of {dtype} for {request.param} are those of another instruction set")
    with fresh_calls(request.param):
        yield request.param
