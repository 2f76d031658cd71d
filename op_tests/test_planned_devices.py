"""Plans and builds for GPUs that are not here, by the names of their chips."""

import pytest
import torch
from untyped import explain, fmha_fwd

from jitfmha import HipError, emulate, jit, warmup
from jitfmha.call.detection import planned_target
from jitfmha.call.dispatch import plan_for
from jitfmha.cli import main
from jitfmha.planning.target import TARGET_HERE, AmdTarget


def inputs(hdim: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.empty(2, 33, 4, hdim, dtype=dtype, device="meta")] * 3


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("gfx942", "MI300X"),
        ("gfx942-mi308", "MI308X"),
        ("gfx950", "MI355X"),
        ("MI308X", "MI308X"),
        ("mi308", "MI308X"),
        ("MI325", "MI325X"),
        ("MI350X", "MI350X"),
    ],
)
def test_a_chip_by_its_name(name, chip):
    target = planned_target(name)
    assert isinstance(target, AmdTarget)
    assert target.chip.name == chip
    assert target.compute_units == target.chip.compute_units
    explanation = explain(*inputs(), device=name)
    assert explanation.target.chip.name == chip
    assert f"{chip} (not here" in str(explanation)
    assert explanation.plan.family in ("ready", "compiled")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("MI300", "'MI300' may be several chips; choose one of MI300A, MI300X"),
        ("gfx90a", "'gfx90a' is not supported; supported are gfx942"),
        ("MI399", "device='MI399' is neither a device of torch nor one of gfx942"),
        ("nonsense", "device='nonsense' is neither"),
        ("meta", "device meta is not supported"),
    ],
)
def test_names_that_are_refused(name, complaint):
    for call in (lambda: explain(*inputs(), device=name), lambda: warmup(device=name)):
        with pytest.raises(ValueError, match=complaint):
            call()


def test_the_plan_is_that_of_the_emulated_chip():
    x = [torch.zeros(2, 33, 4, 96, dtype=torch.float16)] * 3
    with emulate("gfx950"):
        here = explain(*x, mask="causal")
    there = explain(*inputs(96, torch.float16), mask="causal", device="gfx950")
    assert (here.plan.kernel, here.plan.source) == (there.plan.kernel, there.plan.source)
    assert here.rejected.keys() == there.rejected.keys()


def test_builds_for_a_gpu_that_is_not_here():
    wanted = {"dtypes": ["bf16"], "hdims": [(24, 16)], "masks": [0], "modes": ["gm0"]}
    for direction in ("forward", "backward"):
        (built,) = warmup(**wanted, directions=[direction], device="gfx950")
        assert built.name.endswith("gfx950")
        (again,) = warmup(**wanted, directions=[direction], device="MI355X")
        assert again.was_cached
    assert not any("emulator" in event.name for event in jit.build_log()[-4:])


@pytest.mark.parametrize("command", ["explain", "build"])
def test_command_line_without_building_the_emulator(command, monkeypatch, capsys):
    """Neither a name nor the environment makes it build what only runs kernels."""
    monkeypatch.setattr("jitfmha.emulator.session._emulator", None)
    flags = ("--dtype", "bf16", "--hdim", "64", "--mask", "none")
    assert main((command, *flags, "--device", "MI308")) == 0
    assert "fmha_fwd_hd64_bf16" in capsys.readouterr().out
    monkeypatch.setenv("JITFMHA_EMULATE", "gfx942")
    assert main((command, *flags)) == 0
    assert "fmha_fwd_hd64_bf16" in capsys.readouterr().out


def test_nothing_runs_on_it():
    target = planned_target("gfx942")
    x = [torch.zeros(1, 3, 2, 64, dtype=torch.bfloat16)] * 3
    plan = plan_for(explain(*x, device="gfx942").problem, target)
    with pytest.raises(HipError, match="nothing runs on it here"):
        plan.bind()
    put_in_place = TARGET_HERE.set(target)
    try:
        with pytest.raises(HipError, match="nothing runs on it here"):
            fmha_fwd(*x)
    finally:
        TARGET_HERE.reset(put_in_place)


def test_every_reason_is_given():
    """What features are missing does not hide which rules are broken."""
    x = inputs(300)
    refused = explain(*x, device="gfx942", mask="b:5,5", logit_softcap=3.0, dropout_p=0.5).rejected[
        "ready"
    ]
    for part in ("window", "soft", "dropout", "hdim 300x300"):
        assert any(part in reason for reason in refused), (part, refused)


def test_the_cpu_family_says_what_the_target_is():
    x = [torch.zeros(1, 3, 2, 64, dtype=torch.bfloat16)] * 3
    with emulate("gfx942"):
        (reason,) = explain(*x).rejected["cpu"]
    assert reason.startswith("It is for calls that run on the CPU; the target is gfx942 MI300X (em")
