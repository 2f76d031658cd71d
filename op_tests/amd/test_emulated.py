"""What the emulator adds to a launch: memory that is declared, findings, options, errors."""

import warnings
from dataclasses import replace

import pytest
import torch
from amd_problems import FP8, AmdProblem, assert_exact
from inputs import prefix_sums
from plain_tree import PlainKernel, write_manifest, write_tree
from untyped import fmha_fwd, warmup

from jitfmha import emulate, jit
from jitfmha.planning.target import TARGET_HERE, AmdTarget

BF16_ROUNDING = 2**-8


def problems(rng: torch.Generator) -> list[AmdProblem]:
    """One of each kind: batch and group, causal, lse, gaps, fp8 with scales."""
    ragged = ((70, 90), (0, 10), (20, 0), (129, 64), (1, 1))
    return [
        AmdProblem(rng, batch=2, lengths=((70, 90),), layout="packed"),
        AmdProblem(rng, batch=1, lengths=((130, 65),), mask=2),
        AmdProblem(rng, lengths=ragged, mask=2),
        AmdProblem(rng, lengths=ragged, gap=3),
        AmdProblem(
            *(rng, FP8["gfx942"], (128, 128), (4, 2)), lengths=ragged, gap=3, descales="each"
        ),
    ]


@pytest.mark.usefixtures("ready_first")
def test_every_tensor_of_a_launch_is_declared(rng, tree):
    """So the sanitizer finds nothing in a kernel that stays within them."""
    for problem in problems(rng):
        with emulate("gfx942", check=True) as run:
            actual = problem.run()
        assert run.findings() == ()
        assert_exact(actual, problem.exact(), BF16_ROUNDING)


@pytest.mark.usefixtures("ready_first")
def test_the_sanitizer_finds_an_access_outside_of_the_tensors(rng, tmp_path, use_tree):
    """A manifest that promises larger tiles than its kernel has: q is read beyond its end."""
    kernel = PlainKernel(mask=2)
    path = write_tree(tmp_path, "gfx942", [kernel])
    write_manifest(path.parent, [replace(kernel, ts_qo=4096).row])
    use_tree(tmp_path)
    problem = AmdProblem(rng, batch=1, lengths=((130, 65),), mask=2)
    with emulate("gfx942", check=True) as run:
        problem.run()
        kinds = {finding.kind for finding in run.findings()}
    assert kinds == {"global-bounds"}


def test_random_order_gives_the_same(rng, tree):
    problem = AmdProblem(rng, lengths=((130, 90), (64, 65)), mask=2)
    with emulate("gfx942"):
        expected = problem.run()
    with emulate("gfx942", random_order=7, threads=1):
        actual = problem.run()
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def test_cu_seqlens_are_checked_as_on_the_cpu(rng, tree):
    x = [torch.zeros(30, 2, 128, dtype=torch.bfloat16) for _ in range(3)]
    wrong = prefix_sums([10, 40])
    with emulate("gfx942"), pytest.raises(ValueError, match="cu_seqlens_q ends at 50, past the 30"):
        fmha_fwd(*x, cu_seqlens_q=wrong, cu_seqlens_k=wrong)


def test_warmup(tree, tmp_path, monkeypatch):
    """What is left to defaults is what the target serves; what is named must be served."""
    with emulate("gfx942"):
        wide = warmup(hdims=[(192, 128)], masks=["none"], modes=["gm0"])
        assert [launcher.name for launcher in wide] == [
            "fmha_fwd_compiled_hd192x128_fp32_gm0_gfx942",
            PlainKernel(hdim_q=192, ts_qo=32).name,
            "fmha_fwd_compiled_hd192x128_bf16_rtne_gm0_gfx942",
            "fmha_fwd_compiled_hd192x128_fp16_gm0_gfx942",
        ]
        (again,) = warmup(dtypes=["fp16"], hdims=[(192, 128)], masks=["none"], modes=["gm0"])
        assert again.was_cached
        with pytest.raises(NotImplementedError, match="the inputs are fp8_e4m3fn"):
            warmup(dtypes=["fp8_e4m3fn"], hdims=[64])
        fp8, *_ = warmup(dtypes=["fp8_e4m3fnuz"], hdims=[128], masks=[0], modes=["gm1"])
        assert fp8.name == PlainKernel("fp8bf16", mode=1, bf16_cvt=1).name


def test_one_launcher_serves_a_chip_and_mode(tree):
    """Every row of the tree is in it: other dtypes, masks and hdims build nothing."""
    with emulate("gfx942"):
        target = TARGET_HERE.get()
        assert isinstance(target, AmdTarget)
        target.families = frozenset({"ready"})
        warmup(dtypes=["bf16"], hdims=[128], masks=[0])
        before = len(jit.build_log())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (again,) = warmup(dtypes=["fp16"], hdims=[64], masks=[0], modes=["gm1"])
            assert again.was_cached
            warmup(dtypes=["bf16"], hdims=[(192, 128)])
        assert len(jit.build_log()) == before
