"""The command line: what it prints, pure JSON, and exit codes."""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rigs import cpu_drawn_suite, cpu_suite, decode_loop
from rigs.first_call import first_call
from subprocesses import run_forked, run_python

import jitfmha
from jitfmha import jit
from jitfmha.amd.chips import is_arch
from jitfmha.bench import SUITES, sizes, suite
from jitfmha.bench.report import Report, Row
from jitfmha.bench.timing import TOLERANCE, Timings, alternate
from jitfmha.call.dispatch import Explanation
from jitfmha.cli import bench, demo, explain, main, output
from jitfmha.cli.flags import parser
from jitfmha.jit.resources import hsa_dir
from jitfmha.kernels.compiled.tiles import tile_table
from jitfmha.planning.target import Target
from jitfmha.problem.problem import Problem

_FEW_NUMBERS = ("-M", "3", "-N", "64", "--dtype", "fp32")
_SHAPE = "seqlen=3,dtype=fp32"
COMMANDS = (
    *("demo", "doctor", "explain", "kernels", "build", "cache", "bench", "profile"),
    *("run-kernel", "run-program", "hsa", "replay", "export", "tune", "hip"),
)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    small = demo.DemoSizes(2, 100, 8, (70, 1, 33), 16, 0.0)
    monkeypatch.setattr(demo, "_REAL_SIZES", small)


def test_python_dash_m_runs_from_any_directory(tmp_path):
    process = run_forked("-m", "jitfmha", "cache", "path", cwd=tmp_path)
    assert process.stdout == f"{jit.cache_dir()}\n"


@pytest.mark.parametrize("argv", [(), *((command,) for command in COMMANDS)])
def test_help(run, argv):
    result = run(*argv, "--help")
    assert result.code == 0
    assert "usage: jitfmha" in result.out
    if not argv:
        assert all(re.search(rf"\n    {command}\s", result.out) for command in COMMANDS)
        assert "exit codes" in result.out


@pytest.mark.parametrize("argv", [("--help",), ("--version",), ("build", "--help")])
@pytest.mark.parametrize("is_script", [False, True])
def test_help_does_not_wait_for_torch(tmp_path, argv, is_script):
    """Nor in the script that an installer writes."""
    script = tmp_path / "jitfmha"
    script.write_text("import sys\nfrom jitfmha.cli import main\nsys.exit(main())\n")
    imported = imported_by(*((str(script),) if is_script else ("-m", "jitfmha")), *argv)
    assert "jitfmha.cli" in imported
    assert "torch" not in imported


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("run-kernel", __file__, "--args", "launch.json"), "json: the document has no 'block'"),
        (("build", "--profile", "flush"), "'flash-attn'"),
        (("tune", "--profile", "flash"), "flash-attn"),
    ],
)
def test_what_is_wrong_does_not_wait_for_torch(tmp_path, flags, complaint):
    (tmp_path / "launch.json").write_text('{"arch": "gfx90a", "grid": [1]}')
    result = run_python("-X", "importtime", "-m", "jitfmha", *flags, code=2, cwd=tmp_path)
    assert complaint in result.stderr
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "jitfmha.cli.flags" in imported
    assert "torch" not in imported


def imported_by(*argv: str) -> set[str]:
    """The modules that a Python process with these arguments imports."""
    lines = run_python("-X", "importtime", *argv).stderr.splitlines()
    return {line.rpartition("|")[2].strip() for line in lines}


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ((), "command"),
        (("nonsense",), "nonsense"),
        (("cache",), "action"),
        (("bench", "--suite", "nonsense"), "nonsense"),
        (("bench", "--shapes", "nonsense"), "'nonsense'"),
        (("bench", "--shapes", "@/nowhere/at/all"), "/nowhere/at/all"),
        (("bench", "--shapes", _SHAPE, "--peers", "nobody"), "'nobody'"),
        (("bench", "--shapes", _SHAPE, "--device", "nowhere"), "'nowhere'"),
        (("bench", "--shapes", _SHAPE, "--plot", "x.gif"), "'x.gif'"),
        (("bench", "--shapes", _SHAPE, "--seconds", "-1"), "-1"),
        (("bench", "--shapes", _SHAPE, "--quick"), "--quick"),
        (("bench", "--shapes", _SHAPE, "seqlen=3,dtype=fp16", "--roofline", "x.png"), "fp16, fp32"),
        (("bench", "--csv", "x.csv"), "'x.csv'"),
        (("bench", "--suite", "gemm", "-M", "3"), "-M is for --shapes rows and gemm"),
        (("bench", "--shapes", "gemm", "-M", "3"), "needs -M and -N and -K"),
        (("bench", "--shapes", "rows", "-M", "8..3", "-N", "3"), "'8..3'"),
        (("bench", "--shapes", "rows", "-M", "3", "-N", "3", "--dtype", "fp8"), "--dtype of"),
        (("bench", "--shapes", "rows", "-M", "3", "-N", "3", "--device", "mps"), "'mps'"),
        (("bench", "--shapes", "rows", "-M", "3", "-N", "3", "--quick"), "--quick is not for"),
        (("bench", "--shapes", _SHAPE, "-M", "3"), "-M is for --shapes rows and gemm"),
        (("bench", "--suite", "rows", "--compiled"), "--compiled is for --shapes"),
        (("bench", "--suite", "memory", "--device", "cpu"), "'cpu'"),
        (("explain", "--mask", "diagonal"), "mask='diagonal'"),
        (("explain", "--hdim", "577"), "577"),
        (("explain", "--heads", "8", "--heads-k", "3"), "3 heads"),
        (("explain", "--window", "one,two"), "--window one,two"),
        (("explain", "--window", "1"), "window_size"),
        (("explain", "--batch", "-1"), "-1"),
        (("explain", "--device", "mps"), "mps"),
        (("explain", "--device", "nonsense"), "nonsense"),
        (("explain", "--varlen", "3,-1"), "--varlen 3,-1"),
        (("explain", "--varlen-k", "3"), "--varlen-k needs --varlen"),
        (("explain", "--varlen", "3", "--layout", "bhsd"), "--layout"),
        (("explain", "--layout", "qkvpacked", "--heads-k", "1"), "qkvpacked"),
        (("explain", "-M", "3"), "-M is not for --of attention"),
        (("explain", "--of", "softmax", "-M", "3"), "needs -M and -N"),
        (("explain", "--of", "softmax", "-M", "3", "-N", "0"), "(3, 0)"),
        (("explain", "--of", "matmul", "--heads", "3"), "--heads is not for --of matmul"),
        (("explain", "--of", "matmul", "--residual"), "--residual is not for --of matmul"),
        (("explain", "--of", "rms_norm", "-K", "3"), "-K is not for --of rms_norm"),
        (("build", "--hdim", "wide"), "--hdim: wide"),
        (("build", "--hdim", "64x128x32"), "--hdim: 64x128x32"),
        (("build", "--hdim", "64x"), "--hdim: 64x is not"),
        (("explain", "--varlen", "3,4", "--batch", "2"), "--batch 2 has no place"),
        (("explain", "--varlen", "3,4", "--seqlen-k", "9"), "--seqlen-k 9 has no place"),
        (("build", "--dtype", "int4"), "int4"),
        (("build", "--profile", "nonsense"), "'nonsense'"),
        (("build", "--features", "magic"), "'magic'"),
        (("kernels",), "action"),
        (("kernels", "list", "--arch", "gfx906"), "gfx906"),
        (("kernels", "validate", "--dtype", "fp4"), "'fp4'"),
        (("kernels", "validate", "--mask", "diagonal"), "mask='diagonal'"),
        (("kernels", "validate", "--heads", "-8"), "heads=-8"),
    ],
)
def test_usage_errors_name_the_value(run, argv, complaint):
    result = run(*argv)
    assert result.code == 2
    assert complaint in result.err
    assert result.out == ""
    assert "Traceback" not in result.err


def test_version(run):
    result = run("--version")
    assert (result.code, result.out) == (0, f"jitfmha {jitfmha.__version__}\n")


@pytest.mark.parametrize("json_flag", [(), ("--json",)])
def test_a_closed_stdout(json_flag, monkeypatch):
    """As `>&-` leaves it, which is None for Python."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(("cache", "path", *json_flag)) == 0


def test_kernels_list(run):
    listed = run("kernels", "list")
    facts = run("kernels", "list", "--json").json
    assert listed.code == 0
    assert list(facts) == ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"]
    for arch, of_arch in facts.items():
        assert of_arch["ck"]["supported_pipelines"][0] == "qr"
        if not is_arch(arch):
            assert list(of_arch) == ["ck"]
            assert f"nothing here runs on {arch}" in run("kernels", "list", "--arch", arch).out
            continue
        table = tile_table(arch)
        assert [row["line"] for row in of_arch["compiled"]] == [tile.line for tile in table.tiles]
        assert all(row["tree"] and row["threads"] for row in of_arch["ready"])
        assert {"alibi", "backward", "paged_keys"} <= set(of_arch["features"])
        only = run("kernels", "list", "--arch", arch).out
        assert only in listed.out
        assert f"data types       {', '.join(row.dtype for row in table.elements)}" in only


def test_kernels_validate(run):
    served = run("kernels", "validate", "--hdim", "192", "--hdim-v", "128", "--mask", "causal")
    assert served.code == 0
    assert served.out == "gfx942: no rule is broken\ngfx950: no rule is broken\n"
    argv = (
        *("kernels", "validate", "--arch", "gfx942", "--dtype", "int8", "--num-splits"),
        *("129", "--mode", "gm1", "--direction", "backward", "--features", "lse", "column_major_v"),
    )
    broken = run(*argv)
    assert broken.code == 1
    expected = jitfmha.validate_config(
        "gfx942",
        dtype="int8",
        num_splits=129,
        mode="gm1",
        direction="backward",
        features=["lse", "column_major_v"],
    )
    as_json = run(*argv, "--json")
    assert as_json.code == 1
    assert as_json.json == {"gfx942": [rule._asdict() for rule in expected]}
    assert len(expected) == 2
    for rule in expected:
        assert all(text in broken.out for text in (rule.name, *rule.source.split()))


def test_explain_says_what_fmha_fwd_would_do(run):
    q, k = torch.empty(2, 100, 8, 64), torch.empty(2, 60, 2, 64)
    v = torch.empty(2, 60, 2, 32)
    argv = (
        *("explain", "--dtype", "fp32", "--batch", "2", "--seqlen", "100", "--seqlen-k", "60"),
        *("--heads", "8", "--heads-k", "2", "--hdim", "64", "--hdim-v", "32", "--lse"),
        *("--mask", "2", "--window", "16,0"),
    )
    expected = jitfmha.explain(q, k, v, mask=2, window_size=(16, 0), return_lse=True)
    assert run(*argv).out == f"{expected}\n"
    assert run(*argv, "--json").json == expected.to_dict()


def test_explain_of_what_stands_around_attention(run):
    empty = partial(torch.empty, dtype=torch.float16, device="meta")
    x, weight, device = empty(30, 40), empty(40), {"device": "MI300X"}
    of_rows = jitfmha.explain_rows(
        "layer_norm", x, weight, weight, residual=x, direction="backward", **device
    )
    of_matmul = jitfmha.explain_matmul(x, empty(50, 40).mT, out_dtype=torch.float32, **device)
    for of, flags, expected in (
        ("layer_norm", ("-N", "40", "--direction", "backward", "--residual"), of_rows),
        ("matmul", ("-N", "50", "-K", "40", "--out-dtype", "fp32"), of_matmul),
    ):
        argv = ("explain", "--of", of, "-M", "30", *flags, "--dtype", "fp16", "--device", "MI300X")
        assert run(*argv).out.replace("\n  ", " ") == f"{expected}\n"
        assert run(*argv, "--json").json == expected.to_dict()
    assert run("explain", "--of", "softmax", "-M", "3", "-N", "4", "--dtype", "int8").code == 1


def test_explain_varlen(run):
    ends_q = torch.tensor([0, 3, 8], dtype=torch.int32)
    ends_k = torch.tensor([0, 10, 21], dtype=torch.int32)
    q, k = torch.empty(8, 4, 64).half(), torch.empty(21, 4, 64).half()
    expected = jitfmha.explain(q, k, k, mask="causal", cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
    result = run(
        *("explain", "--dtype", "fp16", "--heads", "4", "--hdim", "64"),
        *("--varlen", "3,5", "--varlen-k", "10,11", "--mask", "causal"),
    )
    assert result.code == 0
    assert result.out == f"{expected}\n"


@pytest.mark.parametrize(
    ("layout", "tensors"),
    [
        ("bshd", lambda: [torch.empty(2, 5, 3, 8)] * 3),
        ("bhsd", lambda: [torch.empty(2, 3, 5, 8).transpose(1, 2)] * 3),
        ("sbhd", lambda: [torch.empty(5, 2, 3, 8).transpose(0, 1)] * 3),
        ("qkvpacked", lambda: torch.empty(2, 5, 3, 3, 8).unbind(2)),
    ],
)
def test_explain_layouts(run, monkeypatch, layout, tensors):
    asked: list[Problem] = []
    give = explain.explain_problem

    def spy(problem: Problem, target: Target) -> Explanation:
        asked.append(problem)
        return give(problem, target)

    monkeypatch.setattr(explain, "explain_problem", spy)
    flags = ("--batch", "2", "--seqlen", "5", "--heads", "3", "--hdim", "8", "--layout", layout)
    assert run("explain", *flags).code == 0
    (problem,) = asked
    q, k, v = tensors()
    assert (problem.batch, problem.seqlen_q, problem.heads_q, problem.hdim_q) == tuple(q.shape)
    assert problem.sizes[:5] == (q.shape[1], k.shape[1], *(x.stride() for x in (q, k, v)))


def test_explain_features_and_backward(run):
    q, k = torch.empty(2, 100, 8, 64), torch.empty(2, 60, 2, 64)
    flags = (
        *("explain", "--dtype", "fp32", "--batch", "2", "--seqlen", "100", "--seqlen-k", "60"),
        *("--heads", "8", "--heads-k", "2", "--hdim", "64", "--device", "gfx950"),
    )
    given = {"bias": torch.empty(2, 8, 100, 60), "alibi_slopes": torch.empty(8)}
    expected = jitfmha.explain(q, k, k, device="gfx950", num_splits=3, **given)
    asked = ("--features", "bias", "alibi", "--num-splits", "3")
    assert run(*flags, *asked, "--json").json == expected.to_dict()
    out, lse = torch.empty_like(q), torch.empty(2, 8, 100)
    for deterministic in (False, True):
        backward = jitfmha.explain_bwd(
            *(out, q, k, k, out, lse), device="gfx950", deterministic=deterministic
        )
        asked = ("--direction", "backward", *(["--deterministic"] if deterministic else []))
        assert run(*flags, *asked, "--json").json == backward.to_dict()
    paged = run(*flags, "--page-size", "16")
    assert paged.code == 2
    assert "block_table" in paged.err


def test_explain_of_a_huge_problem_allocates_nothing(run):
    argv = ("explain", "--batch", "4096", "--seqlen", "1000000", "--heads", "128")
    assert run(*argv).code == 0


def test_explain_fails_when_no_kernel_serves(run, monkeypatch):
    monkeypatch.setenv("JITFMHA_EMULATE", "gfx950")
    result = run("explain", "--dtype", "fp8_e4m3fnuz", "--json")
    assert result.code == 1
    assert result.json["kernel"] is None
    assert set(result.json["rejected"]) == {"ready", "compiled", "cpu"}


def test_build_fills_the_cache_once(run, empty_cache):
    argv = ("build", "--dtype", "fp32", "--hdim", "24x8", "--mask", "causal", "--mode", "gm1")
    first = run(*argv, "--json")
    assert first.code == 0
    assert [x["name"].split("_")[2:4] for x in first.json] == [["fp32", "24x8"]]
    assert first.json[0]["build_seconds"] > 0
    again = run(*argv)
    assert again.code == 0
    assert "in the cache already" in again.out


def test_what_would_be_built_is_listed(run, empty_cache, monkeypatch):
    argv = ("build", "--dtype", "fp32", "--hdim", "27", "--mask", "none", "--mode", "gm1")
    plain = ("--isa", "generic")
    (planned,) = run(*argv, *plain, "--dry-run", "--json").json
    assert (planned["cached"], planned["took_seconds"]) == (False, None)
    assert not empty_cache.exists()
    (built,) = run(*argv, *plain, "--json").json
    (planned,) = run(*argv, *plain, "--dry-run", "--json").json
    assert planned == {"name": built["name"], "cached": True, "took_seconds": None}
    # As another compiler has it.
    monkeypatch.setattr(jit, "is_built", lambda spec: False)
    (planned,) = run(*argv, *plain, "--dry-run", "--json").json
    assert not planned["cached"]
    assert 0 < planned["took_seconds"] <= built["build_seconds"]
    assert "to be built; another build of it took" in run(*argv, *plain, "--dry-run").out


def test_cache_commands(run, empty_cache):
    assert run("cache", "path").out == f"{empty_cache}\n"
    assert run("cache", "path", "--json").json == {"path": str(empty_cache)}
    assert run("cache", "list").out == f"no entries in {empty_cache}\n"
    assert run("cache", "list", "--json").json == []
    assert not empty_cache.exists()
    # No other test has hdim 25 or 26: what this process has loaded already would not be built here.
    run("build", "--dtype", "fp32", "--hdim", "25", "--mask", "none", "--mode", "gm1")
    (entry,) = run("cache", "list", "--json").json
    assert entry["valid"]
    assert entry["size"] > 1000
    assert Path(entry["path"]).is_dir()
    assert entry["name"] in run("cache", "list").out

    library = next(Path(entry["path"]).glob("*.so"))
    damaged = bytearray(library.read_bytes())
    damaged[100] ^= 1
    # A new file, because this process has the old one mapped.
    library.unlink()
    library.write_bytes(damaged)
    library.chmod(0o600)
    run("build", "--dtype", "fp32", "--hdim", "26", "--mask", "none", "--mode", "gm1")
    listed = run("cache", "list")
    assert listed.code == 1
    assert listed.out.count("DAMAGED") == 1

    assert run("cache", "clear", "--json").json == {"removed": 2, "path": str(empty_cache)}
    assert run("cache", "clear").out == f"removed 0 entries from {empty_cache}\n"


def test_a_refused_cache_is_a_failure_with_its_reason(run, empty_cache, monkeypatch):
    empty_cache.mkdir()
    empty_cache.chmod(0o777)
    result = run("cache", "list")
    assert result.code == 1
    assert "CacheError" in result.err
    assert str(empty_cache) in result.err


@pytest.mark.usefixtures("small_demo")
def test_demo(run):
    result = run("demo", "--dtype", "fp32", "--json")
    assert result.code == 0
    assert result.json["verified"]
    kernels = [x["kernel"] for x in result.json["results"]]
    assert ["_gm0_" in kernels[0], "_gm1_" in kernels[1]] == [True, True]
    assert all(x["milliseconds"] > 0 and x["gflops"] > 0 for x in result.json["results"])
    table = run("demo", "--dtype", "fp32")
    assert table.code == 0
    assert all(kernel in table.out for kernel in kernels)
    assert "target: cpu" in table.err


@pytest.mark.usefixtures("small_demo")
@pytest.mark.parametrize("wrong_mode", ["gm0", "gm1"])
def test_demo_fails_on_a_wrong_result(run, monkeypatch, wrong_mode):
    right = demo.fmha_fwd

    def wrong(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
        mode = "gm1" if "cu_seqlens_q" in arguments else "gm0"
        return right(q, k, v, **arguments) + 1e-3 * (mode == wrong_mode)

    monkeypatch.setattr(demo, "fmha_fwd", wrong)
    result = run("demo", "--dtype", "fp32")
    assert result.code == 1
    assert "NO" in result.out


@pytest.mark.usefixtures("small_demo")
def test_demo_takes_the_cpu_where_a_gpu_is_not_served(run, monkeypatch):
    """With a sentence that says so."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gfx90a = SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-", name="AMD Instinct MI210")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: gfx90a)
    result = run("demo", "--json")
    assert result.code == 0
    assert "device cuda:0 is a gfx90a; supported are gfx942" in result.err
    assert "the demo runs on the CPU" in result.err
    assert result.json["target"].startswith("cpu (")


def test_demo_says_when_the_launcher_was_in_the_cache(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    figures = (1.0, 2.0, 3.0, 4.0, 5.0)
    demo._print(
        [demo.DemoResult("p", "k", 2.5, *figures), demo.DemoResult("p", "k", None, *figures)]
    )
    out = capsys.readouterr().out
    assert "2.5 s" in out
    assert "in the cache" in out


@pytest.mark.parametrize(("measured", "code"), [(1.5, 0), (1.3, 1)])
def test_bench_exit_code_follows_the_bars(run, monkeypatch, measured, code):
    def suite(
        name: str,
        *,
        quick: bool,
        progress: Callable[[str], None],
        threads: int | None,
    ) -> Report:
        progress("under way")
        report = Report(name, {"extent": "quick" if quick else "full", "threads": str(threads)})
        report.at_least("speed", measured, 1.4, "x")
        report.at_most("first call", 3.0, 4.0, "s")
        return report

    monkeypatch.setattr(bench, "run_suite", suite)
    result = run("bench", "--suite", "cpu")
    assert result.code == code
    assert ("NO" in result.out) == bool(code)
    assert "under way" in result.err
    as_json = run("bench", "--json", "--quick", "--threads", "16")
    assert as_json.code == code
    assert as_json.json["met"] == (code == 0)
    assert as_json.json["machine"] == {"extent": "quick", "threads": "16"}
    assert [row["met"] for row in as_json.json["rows"]] == [code == 0, True]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("rows", "-M", "3", "-N", "5,16..32"), ["3x5", "3x16", "3x32"]),
        (
            ("gemm", "-M", "3", "-N", "5", "-K", "7,8", "--dtype", "bf16", "int32"),
            [f"3 x 5 x {k} {x} nt" for k in (7, 8) for x in ("bfloat16", "int32")],
        ),
        (
            ("gemm", "-M", "3", "-N", "5", "-K", "7", "--dtype", "fp8", "--layout", "nn", "tt"),
            ["3 x 5 x 7 float8_e4m3fn nn", "3 x 5 x 7 float8_e4m3fn tt"],
        ),
    ],
)
def test_bench_sweeps(run, flags, named, monkeypatch):
    """Beside compiled functions, which are not compiled here."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(sizes, "alternate", partial(_briefly, alternate))
    result = run("bench", "--json", "--compiled", "--shapes", *flags)
    assert result.code == 0
    assert result.json["rows"] == []  # bars are for the suite's own shapes
    figures = [each["what"] for each in result.json["figures"]]
    for each in result.json["figures"]:
        assert ("torch.compile" in each["unit"]) == ("gradients" not in each["what"])
    assert all(any(shape in figure for figure in figures) for shape in named)
    assert all(any(shape in figure for shape in named) for figure in figures)


def _briefly(timed, functions, **how):
    return timed(functions, **how | {"min_seconds": 0.0})


@pytest.mark.parametrize(
    "flags", [("gemm", "-M", "3", "-N", "5", "-K", "7", "--dtype", "fp8"), ("rows", *_FEW_NUMBERS)]
)
def test_bench_of_the_cost_model(run, flags):
    result = run("bench", "--json", "--device", "MI300X", "--shapes", *flags)
    assert result.code == 0
    figures = result.json["figures"]
    assert len(figures) == (1 if "gemm" in flags else 7)
    for each in figures:
        assert "by the cost model" in each["unit"]
        assert each["measured"] > 0
        assert ("float8_e4m3fnuz" in each["what"]) == ("fp8" in flags)


@pytest.mark.parametrize("flags", [("--threads", "0"), ("--suite", "cache", "--threads", "2")])
def test_bench_refuses_threads(run, flags):
    result = run("bench", *flags)
    assert result.code == 2
    assert "--threads must be at least 1" in result.err


def test_calls_that_bench_draws():
    calls = cpu_drawn_suite.drawn_calls(7, 300)
    assert calls == cpu_drawn_suite.drawn_calls(7, 300)
    lengths = [n for call in calls for n in call.sizes[1:3]]
    assert 50 <= min(lengths) < 100
    assert 2000 < max(lengths) <= 5000
    assert {call.sizes[5] for call in calls} == set(range(32, 257, 8))
    assert {1, 32} <= {call.sizes[3] for call in calls} <= set(range(1, 33))
    assert all(call.sizes[1] == call.sizes[2] for call in calls if call.is_causal)
    kinds = {(call.dtype, call.is_causal, call.is_training) for call in calls}
    assert len(kinds) == 3 * 2 * 2


def test_bench_suites_exist():
    for name in SUITES:
        assert callable(suite(name))


@pytest.mark.parametrize("name", [name for name in SUITES if SUITES[name].from_checkout])
def test_a_suite_without_its_rigs_is_a_usage_error(run, monkeypatch, tmp_path, name):
    monkeypatch.setattr(jitfmha.bench, "_CHECKOUT", tmp_path)
    result = run("bench", "--suite", name, "--quick")
    assert result.code == 2
    assert f"the suite {name!r} needs the test rigs of a checkout" in result.err
    assert str(tmp_path / "op_tests" / "rigs") in result.err
    assert f"`python -m jitfmha bench --suite {name}`" in result.err
    assert result.out == ""


def test_bars():
    assert Row("", 1.4, 1.4, "x", at_least=True).met
    assert not Row("", 1.39, 1.4, "x", at_least=True).met
    assert Row("", 4.0, 4.0, "s", at_least=False).met
    assert not Row("", 4.1, 4.0, "s", at_least=False).met
    # A figure that could not be measured meets no bar.
    assert not Row("", float("nan"), 4.0, "s", at_least=False).met


def test_timings_alternate():
    calls: list[str] = []
    timings = alternate(
        [lambda: calls.append("a"), lambda: calls.append("b")], min_seconds=0.0, calls=2
    )
    assert calls == ["a", "b"] + ["a", "a", "b", "b"] * 3
    assert len(timings.rounds) == 3
    calls.clear()
    alternate([lambda: calls.append("a")], min_seconds=0.0, before_round=lambda: calls.append("."))
    assert calls == [".", "a"] * 4
    timings = Timings([[1.0, 2.0], [10.0, 30.0], [2.0, 2.0]])
    assert timings.best(0) == 1.0
    assert timings.ratio(1, 0) == 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ragged_benchmark_checks_what_it_times(monkeypatch, dtype):
    looped, padded = cpu_suite.time_ragged("small", [5, 40, 1], dtype, 64, min_seconds=0.0)
    assert looped.against != padded.against
    assert looped.error < TOLERANCE[dtype]
    assert looped.gflops == pytest.approx(4 * 8 * (25 + 1600 + 1) * 64 / looped.seconds / 1e9)

    right = cpu_suite.fmha_fwd
    monkeypatch.setattr(cpu_suite, "fmha_fwd", lambda *args, **kwargs: -right(*args, **kwargs))  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="small: the result differs"):
        cpu_suite.time_ragged("small", [5, 40, 1], dtype, 64, min_seconds=0.0)


def test_ragged_lengths_are_those_of_the_bar():
    lengths = cpu_suite.ragged_lengths()
    assert len(lengths) == 16
    assert (min(lengths), max(lengths)) == (64, 2048)
    assert lengths == cpu_suite.ragged_lengths()


def test_a_decode_loop_has_one_key_more_each_call(monkeypatch):
    calls: list[tuple[int, float, tuple[int, ...]]] = []

    def record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float) -> None:
        assert k.shape == v.shape
        assert q.shape == (1, 1, 2, 8)
        calls.append((k.shape[1], softmax_scale, k.stride()))

    monkeypatch.setattr(decode_loop, "fmha_fwd", record)
    q, k, v = decode_loop.tensors(torch.float32, heads=2, hdim=8)
    scales = decode_loop.distinct_scales(8)
    seen: set[float] = set()
    for kind in decode_loop.KINDS:
        calls.clear()
        decode_loop.loop_over_repeated(q, k, v, kind, scales, min_seconds=0.0)
        rounds = [calls[i : i + 1025] for i in range(0, len(calls), 1025)]
        assert len(rounds) == 6
        for of_round in rounds:
            lengths = [length for length, _, _ in of_round]
            assert lengths == [767, *range(512, 1024), *[767] * 512]
            assert len({scale for _, scale, _ in of_round}) == 1
            # What a loop left behind serves no other one, be it of the other kind of tensors.
            assert of_round[0][1] not in seen
            seen.add(of_round[0][1])
        batch_strides = {length: stride[0] for length, _, stride in calls}
        is_cache = kind == "slices of a cache"
        assert batch_strides == {n: 16 * (1023 if is_cache else n) for n in range(512, 1024)}


def test_first_call_is_measured_in_a_process_of_its_own(tmp_path):
    cold = first_call(str(tmp_path), dtype="float32", mode="gm1")
    assert len(list(tmp_path.rglob("*.so"))) == 1
    warm = first_call(str(tmp_path), dtype="float32", mode="gm1")
    assert len(list(tmp_path.rglob("*.so"))) == 1
    assert warm.call_seconds < cold.call_seconds
    with pytest.raises(RuntimeError, match="no_such_dtype"):
        first_call(str(tmp_path), dtype="no_such_dtype")


_KERNEL = hsa_dir() / "gfx942" / "fmha_v3_fwd" / "fwd_hd64_bf16_rtne.co"
_COMMANDS = (
    "doctor",
    "demo",
    "explain",
    "explain --device MI300X --direction backward --features alibi dropout --varlen 5,70",
    "kernels list",
    "kernels rules",
    "kernels validate --hdim 513 --mode gm1 --mask 1 --features column_major_v bias",
    "hsa list",
    f"hsa show {_KERNEL}",
    f"hsa disasm {_KERNEL} --kernel fmha_fwd_hd64_bf16_rtne",
    f"hsa waits {_KERNEL}",
    "hsa verify",
    "build --dry-run",
    "cache list",
    "cache path",
    "bench --shapes seqlen=8,heads=2 --peers sdpa --seconds 0",
)


def _parsers(of: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield of
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _parsers(each)


def _too_long(text: str) -> list[str]:
    """Lines of more than 80 columns that are more than a path."""
    return [line for line in text.splitlines() if len(line) > 80 and " " in line.strip()]


def test_every_help_has_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    every = list(_parsers(parser()))
    assert len(every) > 25
    assert not [line for each in every for line in _too_long(each.format_help())]


@pytest.mark.usefixtures("small_demo")
@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_has_80_columns(run, monkeypatch, command):
    monkeypatch.delenv("COLUMNS")
    ended = run(*command.split())
    assert ended.out
    assert not _too_long(ended.out)


def test_table_aligns_columns():
    text = output.table(("name", "ms"), [("a", "1.5"), ("longer", "10.25")])
    assert text.splitlines() == ["name       ms", "------  -----", "a         1.5", "longer  10.25"]
    assert output.table(("name",), []) == "name\n----"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 30, "1.0 GiB")]
)
def test_byte_size(size, text):
    assert output.byte_size(size) == text
