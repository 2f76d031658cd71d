"""Backward passes that were there before go a short way: what differs must not be overlooked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from backward_calls import BackwardCall
from plain_backward_tree import write_backward_tree
from plain_tree import UseTree
from rigs.recording_runtime import RecordingRuntime
from torch import Tensor
from untyped import fmha_bwd

from jitfmha import emulate
from jitfmha.call import backward
from jitfmha.planning.target import AmdTarget

pytestmark = pytest.mark.usefixtures("ready_first")

POINTERS = (*range(0x00, 0x90, 0x10), *range(0x250, 0x290, 0x10))
LENGTHS = ((64, 64),)


@pytest.fixture(autouse=True)
def tree(tmp_path: Path, use_tree: UseTree) -> None:
    write_backward_tree(tmp_path, "gfx942")
    use_tree(tmp_path)


def read_by_backward(call: BackwardCall) -> list[Tensor]:
    return [call.dout, call.q, call.k, call.v, call.out, call.lse]


def launched(
    runtime: RecordingRuntime, target: AmdTarget, read: list[Tensor], **options: Any
) -> tuple[object, ...]:
    """What a call launches, but for addresses, and how its results lie."""
    runtime.reset()
    with runtime.stands_for(target):
        gradients = fmha_bwd(*read, **options)
    launches = []
    for launch in runtime.launches():
        kernarg = bytearray(launch.kernarg)
        for at in POINTERS:
            kernarg[at : at + 16] = bytes(16)
        launches.append((launch.symbol, list(launch.grid), bytes(kernarg)))
    return launches, [(x.shape, x.stride()) for x in gradients]


@pytest.mark.parametrize("mode", ["gm0", "gm1"])
def test_types_are_told_apart(rng, runtime, mode):
    """Of values that are one key of a dictionary, and of what is no value at all."""
    target = runtime.target("MI300X")
    kind = {"batch": 1, "lengths": LENGTHS} if mode == "gm0" else {"lengths": ((9, 30), (1, 1))}
    call = BackwardCall(rng, hdims=(8, 8), **kind)
    read, good = read_by_backward(call), call.arguments | {"deterministic": False}
    wrong = [({"deterministic": 0}, "deterministic must be a bool or None")]
    if mode == "gm0":
        array = torch.ones(2).numpy()
        wrong.append(({"mask": False}, "mask must be an int or a str, got bool"))
        wrong.append(({"max_seqlen_q": array}, "max_seqlen_q is given without cu_seqlens_q"))
    else:
        good |= {"max_seqlen_q": 1, "max_seqlen_k": 30}
        of_q, of_k = (call.arguments[f"cu_seqlens_{side}"] for side in "qk")
        wrong += [
            ({"max_seqlen_q": longest}, "max_seqlen_q must be an int, got ")
            for longest in (True, 1.0, torch.ones(2).numpy())
        ]
        wrong.append(({"cu_seqlens_k": None}, "cu_seqlens_k is missing"))
        wrong.append(({"cu_seqlens_k": of_k[:-1]}, "cu_seqlens"))
        wrong.append(({"cu_seqlens_q": of_q.long()}, "cu_seqlens_q"))
        wrong.append(({"cu_seqlens_q": nested(of_q[None])}, "cu_seqlens_q"))
    with runtime.stands_for(target):
        fmha_bwd(*read, **good)
        for changed, text in wrong:
            with pytest.raises((TypeError, ValueError), match=text):
                fmha_bwd(*read, **good | changed)


def test_lengths_of_packed_sequences_are_read_in_each_call(rng):
    """Their shapes alone do not tell which rows have gradients, which are 0 in new tensors."""
    with emulate("gfx942"):
        for lengths in (
            ((20, 9), (0, 31)),
            ((11, 40), (9, 0)),
            ((20, 40), (0, 0)),
            ((4, 7), (3, 8)),
        ):
            call = BackwardCall(rng, hdims=(8, 8), lengths=lengths, mask=2)
            call = _with_rows(call, 20, 40)
            gradients = fmha_bwd(*read_by_backward(call), **call.arguments)
            for name, x in zip(call.gradients, gradients, strict=True):
                rows = sum(pair[name != "dq"] for pair in lengths)
                assert not x[rows:].any(), name
                call.gradients[name] = x[:rows]
            call.assert_right(2e-2)  # a gradient of a few rows may be small by chance


def _with_rows(call: BackwardCall, rows_q: int, rows_k: int) -> BackwardCall:
    """The same with unused rows behind the last sequence, which hold NaN."""

    def longer(x: Tensor, rows: int, value: float = torch.nan) -> Tensor:
        return torch.cat((x, x.new_full((rows - x.shape[0], *x.shape[1:]), value)))

    call.q, call.dout, call.out = (longer(x, rows_q) for x in (call.q, call.dout, call.out))
    call.k, call.v = (longer(x, rows_k) for x in (call.k, call.v))
    call.lse = longer(call.lse.T, rows_q, -torch.inf).T.contiguous()
    return call


def test_what_goes_the_long_way(rng, runtime, monkeypatch):
    """Given gradients are written, and results that torch differentiates know of it."""
    target = runtime.target("MI300X")
    call = BackwardCall(rng, hdims=(8, 8), lengths=LENGTHS, batch=1)
    read = read_by_backward(call)
    launched(runtime, target, read)
    with runtime.stands_for(target):
        room = torch.empty_like(call.q)
        assert fmha_bwd(*read, dq=room)[0] is room
        with pytest.raises(ValueError, match="dq shares memory with q"):
            fmha_bwd(*read, dq=call.q)
        leaf = call.dout.clone().requires_grad_()
        with torch.no_grad():
            fmha_bwd(leaf, *read[1:])
        with pytest.raises(NotImplementedError, match="cannot be differentiated once more"):
            fmha_bwd(leaf, *read[1:])[0].sum().backward()
    # A call that was there before asks for no plan.
    monkeypatch.setattr(backward, "plan_for", None)
    assert len(launched(runtime, target, read)[0]) == 2  # type: ignore[arg-type]


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(x))


def negative(x: Tensor) -> Tensor:
    return torch._neg_view(-x)


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


OTHER_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "no tensor": Tensor.tolist,
    "nested": nested,
    "sparse": Tensor.to_sparse,
    "mkldnn": lambda x: x.float().to_mkldnn(),
    "meta": lambda x: x.to("meta"),
    "another dtype": Tensor.double,
    "another seqlen": lambda x: x[:, :-1],
    "other strides": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a sign bit": negative,
    "from inference mode": inference,
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
}


@pytest.mark.parametrize("other", OTHER_TENSORS)
@pytest.mark.parametrize("index", range(6))
def test_tensors_are_told_apart(rng, runtime, index, other):
    """What is not like the tensors of a call before is served, or refused, as without that call."""
    call = BackwardCall(rng, hdims=(8, 8), lengths=LENGTHS, batch=1)
    read = read_by_backward(call)
    changed = [*read]
    changed[index] = OTHER_TENSORS[other](read[index])

    def outcome(target: AmdTarget) -> object:
        try:
            return launched(runtime, target, changed)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            return type(error), str(error)

    target = runtime.target("MI300X")
    for _ in range(2):
        launched(runtime, target, read)
    assert outcome(target) == outcome(runtime.target("MI300X"))


@pytest.mark.parametrize("mode", ["gm0", "gm1", "padded gm1"])
def test_a_call_like_one_before_goes_the_short_way(rng, runtime, monkeypatch, mode):
    def like_the_first(gap: int = 0) -> BackwardCall:
        if mode == "gm0":
            return BackwardCall(rng, hdims=(8, 8), lengths=LENGTHS, batch=2)
        return BackwardCall(rng, hdims=(8, 8), lengths=((9, 30), (40, 7)), gap=gap)

    target = runtime.target("MI300X")
    gap = 3 if mode == "padded gm1" else 0
    first = like_the_first(gap)
    alone = launched(runtime, target, read_by_backward(first), **first.arguments)
    monkeypatch.setattr(backward, "_prepare", None)
    second = like_the_first(gap)
    again = launched(runtime, target, read_by_backward(second), **second.arguments)
    assert again == alone
    assert len(alone[0]) > 0  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not callable"):
        launched(runtime, target, read_by_backward(first), **{**first.arguments, "mask": 1})
