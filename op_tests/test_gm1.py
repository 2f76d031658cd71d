"""Group mode: ragged and empty sequences, padding between them, and the rules of cu_seqlens."""

from typing import Any

import pytest
import torch
from inputs import DTYPES, lay_out, prefix_sums, random_qkv
from packed_calls import packed
from refusals import refused
from torch import Tensor
from untyped import fmha_fwd

pytestmark = pytest.mark.usefixtures("poisoned_memory")

RAGGED = {
    "one": ([5], [9]),
    "equal": ([16, 16, 16], [16, 16, 16]),
    "ragged": ([1, 130, 17, 64, 3, 200, 65], [70, 5, 17, 64, 300, 200, 1]),
    "empty members": ([0, 7, 0, 0, 33, 0], [5, 0, 0, 9, 40, 3]),
    "decoding": ([1] * 9, [3, 500, 1, 64, 65, 17, 0, 128, 7]),
    "no queries": ([0, 0], [4, 4]),
    "no keys": ([4, 4], [0, 0]),
    "no sequences": ([], []),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sample("gap", [0, 1, 20], 1)
@pytest.mark.parametrize("lengths", RAGGED)
def test_ragged(rng, lengths, gap, dtype):
    inputs = packed(rng, *RAGGED[lengths], gap=gap, dtype=DTYPES[dtype])
    inputs.check()
    inputs.check(mask="causal")
    inputs.check(mask=1)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (9, 1), (5, 5)])
def test_random_batches(rng, heads):
    for _ in range(15):
        batch = int(torch.randint(1, 12, (1,), generator=rng))
        lengths_q, lengths_k = torch.randint(0, 150, (2, batch), generator=rng).tolist()
        gap = int(torch.randint(0, 3, (1,), generator=rng))
        left, right = torch.randint(-1, 160, (2,), generator=rng).tolist()
        inputs = packed(rng, lengths_q, lengths_k, gap=gap, heads=heads)
        inputs.check()
        inputs.check(mask=2)
        inputs.check(window_size=(left, right))
        inputs.check(mask=f"t:{left},{right}")


@pytest.mark.parametrize("layout", ["bhsd", "packed", "packed_by_head", "odd_address"])
def test_layouts(rng, layout):
    inputs = packed(rng, *RAGGED["ragged"])
    for name in "qkv":
        setattr(inputs, name, lay_out(getattr(inputs, name)[None], layout)[0])
    inputs.check(mask="causal")
    out = lay_out(torch.zeros_like(inputs.q)[None], layout)[0]
    assert torch.equal(inputs.call(out=out)[0], inputs.call()[0])


def test_equal_to_batch_mode(rng):
    q, k, v = random_qkv(rng, batch=3)
    cu_q, cu_k = prefix_sums([q.shape[1]] * 3), prefix_sums([k.shape[1]] * 3)
    groups = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    out = fmha_fwd(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask="causal", **groups)
    assert torch.equal(out, fmha_fwd(q, k, v, mask="causal").flatten(0, 1))


def test_unused_rows_of_a_fresh_output(rng):
    inputs = packed(rng, *RAGGED["ragged"], gap=3)
    out, lse = inputs.call()
    unused = ~inputs.sequences.used_rows(0)
    assert unused.sum() == 3 * 7
    assert (out[unused] == 0).all()
    assert (lse[:, unused] == -torch.inf).all()


def test_unused_rows_of_out_stay(rng):
    inputs = packed(rng, *RAGGED["ragged"], gap=3)
    out = torch.full_like(inputs.q, -77.0)
    _, lse = inputs.call(out=out)
    unused = ~inputs.sequences.used_rows(0)
    assert (out[unused] == -77.0).all()
    assert torch.equal(out[~unused], inputs.call()[0][~unused])
    assert (lse[:, unused] == -torch.inf).all()


def test_lengths_may_change_between_calls_of_one_shape(rng):
    """cu_seqlens is read in every call, also where everything else is as before."""
    for lengths_q, lengths_k in (([10, 20], [5, 40]), ([0, 30], [45, 0]), ([29, 1], [1, 44])):
        packed(rng, lengths_q, lengths_k).check(mask="causal")


def test_cu_seqlens_may_be_a_slice(rng):
    inputs = packed(rng, [10, 20], [5, 40])
    cu_q = torch.tensor([9, 0, 10, 30, 9], dtype=torch.int32)[1:4]
    cu_k = torch.tensor([9, 9, 0, 5, 45], dtype=torch.int32)[2:]
    out = fmha_fwd(inputs.q, inputs.k, inputs.v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    assert torch.equal(out, inputs.call()[0])


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "texts"),
    [
        ({"cu_seqlens_q": None}, ValueError, ["cu_seqlens_q is missing"]),
        ({"cu_seqlens_k": None}, ValueError, ["cu_seqlens_k is missing"]),
        ({"cu_seqlens_q": [0, 10, 30]}, TypeError, ["cu_seqlens_q", "list"]),
        ({"cu_seqlens_q": i32(0, 10, 30).long()}, TypeError, ["cu_seqlens_q", "int64"]),
        ({"cu_seqlens_k": i32(0, 5, 45).float()}, TypeError, ["cu_seqlens_k", "float32"]),
        ({"cu_seqlens_q": i32(0, 10, 30)[None]}, ValueError, ["cu_seqlens_q", "(1, 3)"]),
        ({"cu_seqlens_q": i32()}, ValueError, ["cu_seqlens_q", "(0,)"]),
        ({"cu_seqlens_k": i32(0, 45)}, ValueError, ["cu_seqlens_k has 2 entries", "3"]),
        ({"cu_seqlens_q": i32(1, 10, 30)}, ValueError, ["cu_seqlens_q starts at 1"]),
        ({"cu_seqlens_k": i32(-1, 10, 30)}, ValueError, ["cu_seqlens_k starts at -1"]),
        ({"cu_seqlens_q": i32(0, 10, 9)}, ValueError, ["cu_seqlens_q decreases", "10 to 9"]),
        ({"cu_seqlens_k": i32(0, -2, 9)}, ValueError, ["cu_seqlens_k decreases", "0 to -2"]),
        ({"cu_seqlens_q": i32(0, 10, 31)}, ValueError, ["cu_seqlens_q ends at 31", "30 rows"]),
        ({"cu_seqlens_k": i32(0, 5, 2**31 - 1)}, ValueError, ["cu_seqlens_k ends", "45 rows"]),
        ({"cu_seqlens_q": i32(0, 9, 9, 9, 30)[::2]}, ValueError, ["cu_seqlens_q", "stride 2"]),
        ({"max_seqlen_q": 19}, ValueError, ["max_seqlen_q=19", "20"]),
        ({"max_seqlen_k": 39}, ValueError, ["max_seqlen_k=39", "40"]),
        ({"max_seqlen_k": -1}, ValueError, ["max_seqlen_k=-1"]),
        ({"max_seqlen_q": 20.0}, TypeError, ["max_seqlen_q", "20.0"]),
        ({"max_seqlen_q": True}, TypeError, ["max_seqlen_q", "True"]),
        ({"cu_seqlens_q_padded": i32(0, 9, 30)}, ValueError, ["cu_seqlens_q_padded leaves 9"]),
        ({"cu_seqlens_q_padded": i32(0, 11, 30)}, ValueError, ["leaves 19 rows for sequence 1"]),
        ({"cu_seqlens_k_padded": i32(0, 5, 46)}, ValueError, ["cu_seqlens_k_padded ends at 46"]),
        ({"cu_seqlens_k_padded": i32(1, 5, 45)}, ValueError, ["cu_seqlens_k_padded starts at 1"]),
        ({"cu_seqlens_q_padded": i32(0, 10)}, ValueError, ["cu_seqlens_q_padded has 2 entries"]),
        ({"cu_seqlens_q_padded": (0,)}, TypeError, ["cu_seqlens_q_padded", "tuple"]),
        ({"mask": 3}, ValueError, ["mask=3"]),
    ],
)
def test_errors(rng, changes, error, texts):
    inputs = packed(rng, [10, 20], [5, 40])
    groups: dict[str, Any] = {"cu_seqlens_q": i32(0, 10, 30), "cu_seqlens_k": i32(0, 5, 45)}
    for _ in range(2):  # the second call must not find the first one prepared
        with refused(error, *texts):
            fmha_fwd(inputs.q, inputs.k, inputs.v, **groups | changes)


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("longest", [0, 1, 2])
def test_max_seqlen_holds_for_every_sequence(rng, longest, side):
    """Wherever the longest sequence is, the first and the last one included."""
    lengths = [8 if i == longest else 3 for i in range(3)]
    inputs = packed(rng, lengths, lengths)
    expected = inputs.call()[0]
    assert torch.equal(inputs.call(**{f"max_seqlen_{side}": 8})[0], expected)
    for max_seqlen in (0, 3, 7):
        with pytest.raises(ValueError, match=f"max_seqlen_{side}={max_seqlen} is less than .* 8"):
            inputs.call(**{f"max_seqlen_{side}": max_seqlen})


@pytest.mark.parametrize("name", ["cu_seqlens_q_padded", "cu_seqlens_k_padded", "max_seqlen_q"])
def test_group_arguments_without_cu_seqlens(rng, name):
    q, k, v = random_qkv(rng)
    with pytest.raises(ValueError, match=f"{name} is given without cu_seqlens"):
        fmha_fwd(q, k, v, **{name: 8 if "max" in name else i32(0, 8)})
