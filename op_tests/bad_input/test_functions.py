"""Every public function, with whatever can be passed: the right result, or a clear refusal."""

from typing import Any

import pytest
import torch
import untyped
from calls import (
    KINDS,
    SQUARE_KINDS,
    Subject,
    no_results,
    operator_arguments,
    operator_asked,
    operator_results,
    pair_results,
    peer_arguments,
    peer_asked,
    peer_results,
    plain_arguments,
    plain_asked,
)
from changes import any_calls
from contract import Call, KnownCall, Tally, check_call
from torch import Tensor

_BOTH, _GM0, _GM1 = ("gm0", "gm1"), ("gm0",), ("gm1",)


def _peer(name: str, packed: int = 1) -> Subject:
    function = getattr(untyped, name)
    modes = _GM1 if "varlen" in name else _GM0
    kinds = KINDS if packed == 1 else SQUARE_KINDS
    calls = (modes, peer_arguments(function), peer_asked, peer_results, kinds)
    return Subject(name, function, *calls, packed=packed)


def _fmha_fwd_out(**arguments: Any) -> tuple[Tensor, Tensor]:
    return arguments["out"], torch.ops.jitfmha.fmha_fwd_out.default(**arguments)


SUBJECTS = (
    Subject("fmha_fwd", untyped.fmha_fwd, _BOTH, plain_arguments, plain_asked, pair_results),
    Subject("explain", untyped.explain, _BOTH, plain_arguments, plain_asked, no_results),
    *(_peer(name) for name in ("fmha_v3_fwd", "fmha_v3_varlen_fwd")),
    *(
        _peer(f"flash_attn_{name}func", packed)
        for mode in ("", "varlen_")
        for packed, name in ((1, mode), (2, f"{mode}kvpacked_"), (3, f"{mode}qkvpacked_"))
    ),
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
def test_function(subject, sweep):
    known = KnownCall()

    def check(call: Call, tally: Tally) -> None:
        check_call(call, tally, known=known, explains=subject.name == "explain")

    sweep(any_calls(subject), check)
