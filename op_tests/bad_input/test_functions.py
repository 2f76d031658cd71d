"""Every public function, with whatever can be passed: the right result, or a clear refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import untyped
from calls import (
    SQUARE_KINDS,
    Subject,
    flash_arguments,
    flash_asked,
    flash_results,
    no_results,
    operator_arguments,
    operator_asked,
    operator_results,
    pair_results,
    plain_arguments,
    plain_asked,
    v3_arguments,
    v3_asked,
    v3_results,
)
from changes import any_calls
from contract import Call, KnownCall, Sweep, Tally, check_call
from torch import Tensor

_BOTH, _GM0, _GM1 = ("gm0", "gm1"), ("gm0",), ("gm1",)


def _flash(name: str, packed: int, group: bool) -> Subject:
    return Subject(
        name,
        getattr(untyped, name),
        _GM1 if group else _GM0,
        flash_arguments(packed, group),
        flash_asked(packed, group),
        flash_results,
        packed=packed,
        **({} if packed == 1 else {"kinds": SQUARE_KINDS}),
    )


def _fmha_fwd_out(**arguments: Any) -> tuple[Tensor, Tensor]:
    return arguments["out"], torch.ops.jitfmha.fmha_fwd_out.default(**arguments)


SUBJECTS = (
    Subject("fmha_fwd", untyped.fmha_fwd, _BOTH, plain_arguments, plain_asked, pair_results),
    Subject("explain", untyped.explain, _BOTH, plain_arguments, plain_asked, no_results),
    *(
        Subject(
            name, getattr(untyped, name), modes, v3_arguments(group), v3_asked(group), v3_results
        )
        for name, modes, group in (
            ("fmha_v3_fwd", _GM0, False),
            ("fmha_v3_varlen_fwd", _GM1, True),
        )
    ),
    _flash("flash_attn_func", 1, group=False),
    _flash("flash_attn_kvpacked_func", 2, group=False),
    _flash("flash_attn_qkvpacked_func", 3, group=False),
    _flash("flash_attn_varlen_func", 1, group=True),
    _flash("flash_attn_varlen_kvpacked_func", 2, group=True),
    _flash("flash_attn_varlen_qkvpacked_func", 3, group=True),
    *(
        Subject(
            *(name, function, _BOTH, operator_arguments(with_out)),
            *(operator_asked, operator_results),
            is_operator=True,
        )
        for name, function, with_out in (
            ("ops.jitfmha.fmha_fwd", torch.ops.jitfmha.fmha_fwd.default, False),
            ("ops.jitfmha.fmha_fwd_out", _fmha_fwd_out, True),
        )
    ),
)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_function(subject: Subject, sweep: Sweep) -> None:
    known = KnownCall()

    def check(call: Call, tally: Tally) -> None:
        check_call(call, tally, known=known, explains=subject.name == "explain")

    sweep(any_calls(subject), check)
