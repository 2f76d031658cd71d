"""The scripts beside the tests, which users of the AMD stack know by name."""

import re
import sys
from pathlib import Path

import pytest
import smoke_fwd_v3
import torch
from amd_problems import AmdProblem
from subprocesses import ROOT, run_forked, run_program
from torch import Tensor

_HERE = Path(__file__).parent


@pytest.mark.parametrize(("chip", "count"), [("gfx950", 3), ("MI308X", 1)])
def test_the_smoke_test(chip, count, seed):
    process = run_program(
        _HERE / "smoke_test_fwd_v3.sh", "-a", chip, "-n", str(count), "-s", str(seed), cwd=ROOT
    )
    assert process.stdout.count(", right,") == count
    assert len(re.findall(r"\bfmha_fwd_\w*hd\d+", process.stdout)) == count


def test_the_smoke_test_fails(monkeypatch, capsys):
    def halved(problem: AmdProblem) -> tuple[Tensor, Tensor]:
        out, lse = exact(problem)
        return out / 2, lse

    exact = AmdProblem.exact
    small = smoke_fwd_v3.Problem((40,), (50,), 1, 1, 128, 0, 0, 0, 2, 1, "rtz")
    monkeypatch.setattr(smoke_fwd_v3, "problems", lambda arch: iter([small]))
    monkeypatch.setattr(sys, "argv", ["smoke_test_fwd_v3.sh", "-a", "gfx942"])
    assert smoke_fwd_v3.main() == 0
    monkeypatch.setattr(AmdProblem, "exact", halved)
    assert smoke_fwd_v3.main() == 1
    assert "WRONG" in capsys.readouterr().out


def test_the_smoke_test_has_all_of_its_options():
    for arch, cvts in (("gfx942", 3), ("gfx950", 1)):
        problems = list(smoke_fwd_v3.problems(arch))
        assert len(set(map(str, problems))) == len(problems)
        assert {p.mask for p in problems} == {0, 1, 2}
        assert all(p.mode == 0 for p in problems if p.mask == 1)
        assert len({p.cvt for p in problems}) == cvts
        assert {p.hdim for p in problems} == {128, 192}


def test_what_nobody_wrote_is_an_error():
    assert smoke_fwd_v3._finite(torch.tensor([torch.nan])).item() == 1e9


@pytest.mark.parametrize(
    ("name", "flags", "rows"),
    [
        ("test_mha", "-q 5 -k 9 -n 3 -gr 1 3 -ns 2 -i KVPACKED -d bf16", 2),
        ("test_mha_varlen", "-s 9,9 -nh 7 -mha mha gqa mqa -dt bf16 --padding mixed", 3),
    ],
)
def test_scripts_of_calls(name, flags, rows):
    flags += " -d_qk_v 64,64 -c true -l false -det false"
    process = run_forked(_HERE / f"{name}.py", *flags.split(), cwd=ROOT)
    lines = process.stdout.splitlines()
    assert sum(line.endswith("  yes") for line in lines) == rows
    assert all(len(line) <= 80 for line in lines)
