"""explain(): the plan and the reasons, without building or launching anything."""

import json

import pytest
import torch
from inputs import prefix_sums
from untyped import explain, fmha_fwd


def test_cpu_plan():
    q = torch.zeros(2, 33, 4, 64, dtype=torch.bfloat16)
    k = torch.zeros(2, 49, 2, 64, dtype=torch.bfloat16)
    plan = explain(q, k, k, mask="causal", return_lse=True)
    assert plan.plan is not None
    assert plan.plan.family == "cpu"
    assert set(plan.rejected) == {"ready", "compiled"}
    assert all("AMD Instinct GPU" in reason for why in plan.rejected.values() for reason in why)
    text = str(plan)
    for part in ("gm0", "bf16", "33 x 49", "heads 4/2", "64x64", "causal (bottom-right)", "cpu"):
        assert part in text
    assert json.loads(json.dumps(plan.to_dict()))["family"] == "cpu"


def test_group_mode():
    x = torch.zeros(30, 4, 64)
    ends = prefix_sums([10, 20])
    text = str(explain(x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends))
    assert "gm1" in text
    assert "2 sequences, 30 x 30 packed rows" in text


def test_says_whether_the_launcher_is_built():
    """A head dimension that no other test uses, so that it is built here."""
    x = torch.zeros(1, 4, 2, 13)
    before = explain(x, x, x)
    assert before.plan is not None
    built_before = before.plan.is_built
    assert before.to_dict()["built"] == built_before
    assert explain(x, x, x).plan.is_built == built_before, "explain built something"
    fmha_fwd(x, x, x)
    assert explain(x, x, x).to_dict()["built"] is True


def test_does_not_read_the_data():
    x = torch.zeros(30, 4, 64)
    wrong = torch.tensor([7, 3, 99], dtype=torch.int32)
    assert explain(x, x, x, cu_seqlens_q=wrong, cu_seqlens_k=wrong).plan is not None
    on_meta = x[None].to("meta")
    with pytest.raises(ValueError, match="meta"):
        explain(on_meta, on_meta, on_meta)
