"""warmup(): exactly the launchers that later calls look up, each once."""

from typing import Any

import pytest
import torch
from fresh_calls import fresh_calls
from inputs import prefix_sums
from refusals import refused
from untyped import explain, fmha_fwd, warmup

from jitfmha import BuildError, WarmedLauncher
from jitfmha.jit import BuildSpec, build_all, build_log, build_processes
from jitfmha.kernels.cpu import CpuPlan


def test_builds_what_calls_look_up():
    """Head dimensions that no other test uses, so that they are built here or cached by a rerun."""
    seen: list[tuple[WarmedLauncher, int]] = []
    warmed = warmup(
        dtypes=["bf16"],
        hdims=[(11, 19)],
        masks=["causal", 2, "b:3,4"],
        on_ready=lambda launcher, left: seen.append((launcher, left)),
    )
    assert [left for _, left in seen] == [2, 1, 0]
    assert {launcher for launcher, _ in seen} == set(warmed)
    assert len(warmed) == 3, "masks share a launcher; modes do not, nor few and many queries in gm0"
    names = {launcher.name for launcher in warmed}
    q = torch.zeros(2, 5, 4, 11, dtype=torch.bfloat16)
    v = torch.zeros(2, 5, 2, 19, dtype=torch.bfloat16)
    k = torch.zeros(2, 5, 2, 11, dtype=torch.bfloat16)
    ends = prefix_sums([2, 3])
    groups = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    for plan in (
        explain(q, k, v, mask=2, return_lse=True).plan,
        explain(q[:, :4], k, v, mask=2).plan,
        explain(q[0], k[0], v[0], mask=2, **groups).plan,
    ):
        assert plan is not None
        assert plan.kernel in names
        assert plan.is_built
    fmha_fwd(q, k, v, mask="causal")


def test_several_at_a_time(monkeypatch, tmp_path):
    """Processes build them; this one finds them in the cache."""
    arguments = {"dtypes": ["fp32"], "hdims": [9], "masks": [0], "isa": "generic"}
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path))
    warmed = warmup(**arguments, jobs=2)
    assert [launcher.was_cached for launcher in warmed] == [False, False, False]
    before = len(build_log())
    assert all(launcher.was_cached for launcher in warmup(**arguments))
    assert len(build_log()) == before


def test_processes_do_not_miss_numpy(monkeypatch, tmp_path, capfd):
    """torch warns where it is not there; nobody asked for it."""
    warns = "import warnings; warnings.warn('Failed to initialize NumPy: no module')"
    program = build_processes._PROGRAM.replace("work()\n", f"{warns}\nwork()\n")
    monkeypatch.setattr(build_processes, "_PROGRAM", program)
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path))
    specs = [BuildSpec(f"some_{n}", {"some.cpp": f"int some_{n};"}) for n in range(2)]
    assert len(list(build_all(specs, 2))) == 2
    assert "NumPy" not in capfd.readouterr().err


def test_the_error_of_a_process(monkeypatch, tmp_path):
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path))
    specs = [BuildSpec(f"broken_{n}", {"broken.cpp": f"no_type broken_{n};"}) for n in range(3)]
    with pytest.raises(BuildError, match="no_type"):
        list(build_all(specs, 2))


def test_a_process_that_is_ended(monkeypatch):
    monkeypatch.setattr(build_processes, "_PROGRAM", "import os; os._exit(9)")
    specs = [BuildSpec(f"never_{n}", {"never.cpp": "int never;"}) for n in range(2)]
    with pytest.raises(BuildError, match="ended with exit status 9"):
        list(build_all(specs, 2))


@pytest.mark.parametrize("mode", ["gm0", "gm1"])
def test_a_backward_pass_finds_its_kernel(monkeypatch, mode):
    """The names of what is built ahead are those that autograd asks for."""
    bound: list[str] = []
    bind = CpuPlan.bind

    def watched(plan: CpuPlan) -> Any:
        bound.append(plan.kernel)
        return bind(plan)

    shapes = ((2, 5, 4, 64), (2, 5, 2, 64), (2, 5, 2, 64))
    q, k, v = (torch.zeros(shape, requires_grad=True) for shape in shapes)
    ends = prefix_sums([2, 3])
    groups = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    with fresh_calls():
        monkeypatch.setattr(CpuPlan, "bind", watched)
        if mode == "gm0":
            fmha_fwd(q, k, v, mask=2).sum().backward()
        else:
            fmha_fwd(q[0], k[0], v[0], mask=2, **groups).sum().backward()
    asked_for = list(bound)
    wanted = {"dtypes": ["fp32"], "hdims": [64], "masks": [2], "modes": [mode]}
    warmed = warmup(**wanted, directions=["forward", "backward"])
    assert [x.name for x in warmed if "few_rows" not in x.name] == asked_for
    assert all(x.was_cached for x in warmed if x.name in asked_for)


def test_second_time_is_cached():
    arguments = {"dtypes": [torch.float32], "hdims": [64], "masks": [0], "modes": ["gm0"]}
    warmup(**arguments)
    for again in warmup(**arguments):
        assert again.was_cached
        assert again.seconds is None


def test_for_another_processor():
    """Built here, whether or not it would run here."""
    launchers = warmup(dtypes=["bf16"], hdims=[8], masks=[0], modes=["gm0"], isa="generic")
    names = [launcher.name for launcher in launchers]
    assert names == [f"cpu_fwd_bf16_8x8_none_gm0_{x}generic" for x in ("", "few_rows_")]


@pytest.mark.parametrize(
    ("changes", "error", "texts"),
    [
        ({"dtypes": "bf16"}, TypeError, ["dtypes", "'bf16'"]),
        ({"dtypes": []}, ValueError, ["dtypes"]),
        ({"dtypes": ["float8"]}, ValueError, ["dtypes", "'float8'", "'bf16'"]),
        ({"dtypes": [torch.float64]}, ValueError, ["dtypes", "torch.float64"]),
        ({"dtypes": [3]}, TypeError, ["dtypes", "3"]),
        ({"hdims": 64}, TypeError, ["hdims", "64"]),
        ({"hdims": [0]}, ValueError, ["hdims", "0", "576"]),
        ({"hdims": [(64, 577)]}, ValueError, ["hdims", "(64, 577)", "576"]),
        ({"hdims": [(64, 64, 64)]}, TypeError, ["hdims", "(64, 64, 64)"]),
        ({"hdims": ["64"]}, TypeError, ["hdims", "'64'"]),
        ({"hdims": [True]}, TypeError, ["hdims", "True"]),
        ({"hdims": [64.0]}, TypeError, ["hdims", "64.0"]),
        ({"masks": "causal"}, TypeError, ["masks", "'causal'"]),
        ({"masks": ["cause"]}, ValueError, ["mask='cause'"]),
        ({"modes": ["gm2"]}, ValueError, ["modes", "'gm2'", "'gm0'"]),
        ({"modes": [0]}, TypeError, ["modes", "0"]),
        ({"directions": "backward"}, TypeError, ["directions", "'backward'"]),
        ({"directions": ["sideways"]}, ValueError, ["directions", "'sideways'", "'backward'"]),
        ({"directions": [None]}, TypeError, ["directions", "None"]),
        ({"profile": "nonsense"}, ValueError, ["profile", "'nonsense'", "'flash-attn'"]),
        ({"profile": 3.0}, TypeError, ["profile", "3.0"]),
        ({"profile": -3}, ValueError, ["profile", "-3"]),
        ({"features": "alibi"}, TypeError, ["features", "'alibi'"]),
        ({"features": [("alibi",)]}, TypeError, ["features", "('alibi',)"]),
        ({"features": ["alibi+magic"]}, ValueError, ["'alibi+magic'", "'magic'", "'softcap'"]),
        ({"features": ["descales"], "dtypes": ["bf16"]}, ValueError, ["k_descale", "bfloat16"]),
        ({"features": ["paged_keys"], "modes": ["gm0"]}, ValueError, ["block_table"]),
        ({"out_dtypes": ["fp32"]}, ValueError, ["out_dtypes ['fp32']", "8 bits"]),
        (
            {"out_dtypes": ["fp16"], "dtypes": ["bf16"]},
            ValueError,
            ["dtypes ['bf16'] and out_dtypes ['fp16']", "8 bits"],
        ),
        (
            {"profile": "aiter_group", "modes": ["gm0"]},
            ValueError,
            ["'aiter_group'", "mode 'group'", "modes ['gm0']"],
        ),
        (
            {"profile": 3, "directions": ["forward"], "hdims": [64]},
            ValueError,
            ["profile 3", "backward", "hdims [64] and directions ['forward']"],
        ),
        ({"device": "gpu"}, ValueError, ["device='gpu'"]),
        ({"device": 0}, TypeError, ["device", "0"]),
        ({"device": "meta"}, ValueError, ["device meta"]),
        ({"jobs": 0}, ValueError, ["jobs", "0"]),
        ({"jobs": "2"}, TypeError, ["jobs", "'2'"]),
        ({"isa": "sse2"}, ValueError, ["isa", "'sse2'", "avx512_bf16"]),
        ({"isa": 512}, TypeError, ["isa", "512"]),
    ],
)
def test_errors(changes, error, texts):
    with refused(error, *texts):
        warmup(**changes)
