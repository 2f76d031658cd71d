"""The way to an AMD GPU with whatever can be passed: on a runtime that records, and emulated."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from calls import on_amd
from changes import any_calls
from contract import Call, KnownCall, Tally, check_call
from rigs.recording_runtime import RecordingRuntime
from test_functions import SUBJECTS

from jitfmha import emulate
from jitfmha.kernels.compiled import family

_NAMES = ("fmha_fwd", "fmha_v3_varlen_fwd", "flash_attn_func", "ops.jitfmha.fmha_fwd_out")
_SUBJECTS = [on_amd(subject) for subject in SUBJECTS if subject.name in _NAMES]


class RecordedCall(KnownCall):
    """A call that reaches the runtime; nothing computes a result there."""

    def __init__(self, runtime: RecordingRuntime) -> None:
        super().__init__()
        self._runtime = runtime

    def check(self) -> None:
        before = self._runtime.launch_count
        super().check()
        assert self._runtime.launch_count > before

    def _agrees(self, out: torch.Tensor) -> bool:
        return out.shape == self._expected.shape


def is_not_served(error: BaseException) -> bool:
    """The right answer to many masks, dtypes, head dimensions and strides."""
    return isinstance(error, NotImplementedError) and str(error).startswith("no kernel serves")


@pytest.fixture
def uncompiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that would be compiled are files of nothing, as a runtime that records loads them."""
    empty = SimpleNamespace(image=b"\x7fELF")
    monkeypatch.setattr(family.CompiledPlan, "compiled", lambda plan: empty)
    monkeypatch.setattr(family, "row_of_built", lambda traits, image: traits.row())


@pytest.mark.usefixtures("uncompiled_kernels")
@pytest.mark.parametrize("chip", ["MI300X", "MI355X"])
@pytest.mark.parametrize("subject", _SUBJECTS, ids=lambda subject: subject.name)
def test_launcher(subject, chip, sweep):
    """The launcher gets what it can launch; results are left out, as nothing runs."""
    runtime = RecordingRuntime()
    runtime.reset(keeps_launches=False)
    with runtime.stands_for(runtime.target(chip)):
        known = RecordedCall(runtime)

        def check(call: Call, tally: Tally) -> None:
            options = {"may_refuse": is_not_served, "known": known}
            check_call(call, tally, **options, reads_lengths=False)

        sweep(any_calls(subject), check, share=0.5)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_emulated(arch, sweep):
    """The whole way, with results. What AMD's kernels make of NaN is not settled here."""
    subject = next(subject for subject in SUBJECTS if subject.name == "fmha_fwd")
    subject = replace(on_amd(subject), results=subject.results, is_finite=True)
    with emulate(arch):
        known = KnownCall()

        def check(call: Call, tally: Tally) -> None:
            check_call(call, tally, known=known, may_refuse=is_not_served)

        sweep(any_calls(subject), check, share=0.25)
