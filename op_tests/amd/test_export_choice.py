"""An exported library takes the kernels that Python takes: ready, compiled or persistent ones."""

import os
import random
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from exported_calls import (
    DTYPES,
    BackwardArguments,
    ExportedCalls,
    ForwardArguments,
    Strides,
    build_shared,
    build_shim,
    write_library,
)
from untyped import explain, explain_bwd

from jitfmha.amd.chips import Arch
from jitfmha.amd.node import VIRTUAL_NODE
from jitfmha.amd.tree import AITER_ASM_DIR, HSA_DIR
from jitfmha.emulator.library import load
from jitfmha.emulator.session import DEVICES
from jitfmha.export.kernels import Selection

HDIM = 64
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def library(folder: Path, arch: str, *, has_all: bool) -> ExportedCalls:
    """Kernels of one head dimension: all, or those with a mask, of forward for many queries of
    equal heads.
    """
    for variable in (HSA_DIR, AITER_ASM_DIR):
        if variable in os.environ:
            pytest.skip(f"{variable} is set, and exports have the kernels of this package")
    ready = Selection((arch,), ("forward", "backward"), ("bf16",), ((HDIM, HDIM),))
    compiled = ready._replace(features=((),), persistent=True)
    compiled = compiled._replace(few_queries=True) if has_all else compiled
    masked = ready if has_all else ready._replace(masks=("causal",))
    write_library(
        *(folder, masked, (compiled._replace(masks=masked.masks),)),
        keeps=lambda x: has_all or not x.stacks_heads,
    )
    return ExportedCalls(build_shim(folder, build_shared(folder)), load("plain")._name)


def length(drawn: random.Random, least: int, bits: int) -> int:
    return least + int(2 ** drawn.uniform(0, bits))


def drawn_call(drawn: random.Random, *, is_group: bool, has_all: bool) -> dict[str, Any]:
    """Lengths of a batch, heads, a mask, and what is told of packed sequences."""
    batch, least = drawn.choice((1, 2, 3, 8, 16, 40)), 0 if has_all else 16
    heads_k, mask = drawn.choice((1, 2, 4, 5, 8)), 2
    shared = 1
    if has_all:
        shared = drawn.choice((1, 2, 4, 8))
        mask = drawn.choice((0, 2) if is_group else (0, 1, 2))
    told = {"batch": batch, "heads_q": heads_k * shared, "heads_k": heads_k, "mask": mask}
    if not is_group:
        return {**told, "seqlen_q": length(drawn, least, 13), "seqlen_k": length(drawn, 0, 13)}
    queries = [length(drawn, least, 11) for _ in range(batch)]
    keys = [count + drawn.choice((0, length(drawn, 0, 11))) for count in queries]
    for name, lengths in (("q", queries), ("k", keys)):
        told[f"seqlen_{name}"] = sum(lengths)
        if drawn.random() < 0.6:
            told[f"max_seqlen_{name}"] = max(lengths)
    return told


def kernel_in_python(chip: str, call: dict[str, Any], *, is_group: bool) -> str:
    batch, options = call["batch"], {"mask": call["mask"], "device": chip}
    before = () if is_group else (batch,)
    shapes = ((*before, call[f"seqlen_{x}"], call[f"heads_{x}"], HDIM) for x in "qk")
    q, k = (torch.empty(x, dtype=torch.bfloat16, device="meta") for x in shapes)
    options |= {name: x for name, x in call.items() if name.startswith("max_")}
    if is_group:
        sums = torch.zeros(batch + 1, dtype=torch.int32, device="meta")
        options |= {"cu_seqlens_q": sums, "cu_seqlens_k": sums}
    if "deterministic" not in call:
        return str(explain(q, k, k, **options).plan.kernel)
    lse = torch.empty(*before, call["heads_q"], call["seqlen_q"], device="meta")
    options["deterministic"] = call["deterministic"]
    if call["sink"]:
        options["sink"] = torch.empty(call["heads_q"], device="meta")
    return str(explain_bwd(q, q, k, k, q, lse, **options).plan.kernel)


def kernel_in_cpp(calls: ExportedCalls, call: dict[str, Any], *, is_group: bool) -> str:
    of_direction = BackwardArguments if "deterministic" in call else ForwardArguments
    arguments = of_direction(
        **call, mode=int(is_group), dtype=DTYPES["bf16"], hdim_q=HDIM, hdim_v=HDIM
    )
    arguments.softmax_scale = 1.0
    for name, of in (("q", "q"), ("k", "k"), ("v", "k"), ("out", "q"), ("dout", "q")):
        row = call[f"heads_{of}"] * HDIM
        strides = Strides(0 if is_group else call[f"seqlen_{of}"] * row, row, HDIM)
        setattr(arguments, f"{name}_strides", strides)
    if call["mask"] and call["seqlen_k"] % 2:  # the same by another name
        arguments.mask += 2
        arguments.window_left, arguments.window_right = -1, 0
    return calls.plan(arguments).kernel.decode()


@pytest.mark.sample("arch", get_args(Arch), 1)
def test_the_choice_is_that_of_python(arch, tmp_path, seed, request):
    has_all = request.config.getoption("--exhaustive")
    calls = library(tmp_path / "choice", arch, has_all=has_all)
    devices = [x for x in VIRTUAL_NODE if x.startswith(arch)]
    drawn, taken = random.Random(seed), set()
    for number in range(1000 if has_all else 300):
        is_group, is_backward = number % 2 == 1, number % 3 > 0
        call = drawn_call(drawn, is_group=is_group, has_all=has_all)
        if is_backward:
            call["deterministic"] = drawn.random() < 0.5
            call["sink"] = drawn.choice((None, None, None, 8))  # an address, which nobody reads
        device = drawn.choice(devices)
        assert load("plain").hipSetDevice(DEVICES[device]) == 0
        expected = kernel_in_python(VIRTUAL_NODE[device], call, is_group=is_group)
        assert kernel_in_cpp(calls, call, is_group=is_group) == expected, (device, call)
        is_compiled = "_compiled_" in expected
        taken.add((is_backward, "listed" if "_listed_" in expected else is_compiled))
    expected_kinds = {(x, y) for x in (False, True) for y in (False, True)}
    assert expected_kinds <= taken
