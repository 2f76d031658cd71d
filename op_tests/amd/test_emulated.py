"""What the emulator adds to a launch: memory that is declared, findings, options, errors."""

import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from amd_problems import FP8, AmdProblem, assert_exact
from inputs import prefix_sums
from plain_tree import PlainKernel, UseTree, write_manifest, write_tree
from untyped import explain, fmha_fwd, warmup

from jitfmha import HipError, emulate, jit

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


def test_every_tensor_of_a_launch_is_declared(rng, tree):
    """So the sanitizer finds nothing in a kernel that stays within them."""
    for problem in problems(rng):
        with emulate("gfx942", check=True) as run:
            actual = problem.run()
        assert run.findings() == ()
        assert_exact(actual, problem.exact(), BF16_ROUNDING)


@pytest.fixture
def reaching_tree(tmp_path: Path, use_tree: UseTree) -> Path:
    """A manifest that promises larger tiles than its kernel has: q is read beyond its end."""
    kernel = PlainKernel(mask=2)
    write_tree(tmp_path, "gfx942", [kernel])
    folder = tmp_path / "gfx942" / "fmha_v3_fwd"
    write_manifest(folder, [replace(kernel, ts_qo=4096).row])
    use_tree(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("reaching_tree")
def test_the_sanitizer_finds_an_access_outside_of_the_tensors(rng):
    problem = AmdProblem(rng, batch=1, lengths=((130, 65),), mask=2)
    with emulate("gfx942", check=True) as run:
        problem.run()
        kinds = {finding.kind for finding in run.findings()}
    assert kinds == {"global-bounds"}


@pytest.mark.usefixtures("reaching_tree")
def test_without_the_sanitizer_it_is_an_error(rng):
    """Not a crash of the process; and the next launch is none the worse."""
    problem = AmdProblem(rng, batch=1, lengths=((130, 65),), mask=2)
    with emulate("gfx942"):
        with pytest.raises(HipError, match="hipErrorLaunchFailure") as raised:
            problem.run()
        small = AmdProblem(rng, batch=1, lengths=((60, 65),), mask=2)
        assert_exact(small.run(), small.exact(), BF16_ROUNDING)
    for part in (PlainKernel(mask=2).name, "lane", "device 0", "load of"):
        assert part in str(raised.value)


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


@pytest.mark.parametrize("bf16_cvt", ["up", 0, []])
def test_a_rounding_that_is_not_known(tree, bf16_cvt):
    x = [torch.zeros(2, 30, 4, 128).bfloat16() for _ in range(3)]
    words = re.escape(f"bf16_cvt={bf16_cvt!r}") + ".*'rtne', 'rtna', 'rtz'"
    for function in (fmha_fwd, explain):
        with emulate("gfx942"), pytest.raises(ValueError, match=words):
            function(*x, bf16_cvt=bf16_cvt)


def test_descales_are_for_8_bits_only():
    x = [torch.zeros(2, 30, 4, 128) for _ in range(3)]
    with pytest.raises(ValueError, match="k_descale is the scale of fp8 or int8 inputs, k has dt"):
        fmha_fwd(*x, k_descale=torch.ones(1))


def test_warmup(tree, tmp_path, monkeypatch):
    """What is left to defaults is what the target serves; what is named must be served."""
    with emulate("gfx942"):
        wide = warmup(hdims=[(192, 128)], masks=["none"], modes=["gm0"])
        assert [launcher.name for launcher in wide] == [
            "fmha_fwd_compiled_hd192x128_fp32_gm0_gfx942",
            PlainKernel(hdim_q=192, ts_qo=32).name,
            "fmha_fwd_compiled_hd192x128_fp16_gm0_gfx942",
        ]
        (again,) = warmup(dtypes=["fp16"], hdims=[(192, 128)], masks=["none"], modes=["gm0"])
        assert again.was_cached
        with pytest.raises(NotImplementedError, match="fp32"):
            warmup(dtypes=["fp32"], hdims=[300])
        (fp8,) = warmup(dtypes=["fp8_e4m3fnuz"], hdims=[128], masks=[0], modes=["gm1"])
        assert fp8.name == PlainKernel("fp8bf16", mode=1, bf16_cvt=1).name


def test_one_launcher_serves_a_chip_and_mode(tree):
    """Every row of the tree is in it: other dtypes, masks and hdims build nothing."""
    with emulate("gfx942"):
        warmup(dtypes=["bf16"], hdims=[128], masks=[0])
        before = len(jit.build_log())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (again,) = warmup(dtypes=["fp16"], hdims=[64], masks=[0], modes=["gm1"])
            assert again.was_cached
            warmup(dtypes=["bf16"], hdims=[(192, 128)])
        assert len(jit.build_log()) == before
