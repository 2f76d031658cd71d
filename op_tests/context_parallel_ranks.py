"""The processes of test_context_parallel.py: all cases on groups of several sizes.

``python context_parallel_ranks.py FOLDER SEED SIZE...`` writes FOLDER/SIZE-RANK.json: by case what
the gradients were off by, or the error of a case that failed. Processes are forked from one that
has imported everything, which takes longer than all cases.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closeness import assert_close
from inputs import random_qkv
from torch import Tensor

from jitfmha import context_parallel, jit
from jitfmha.context_parallel import all_to_all_attention, ring_attention, shard, unshard
from jitfmha.problem.float64_reference import attention

TIMEOUT = timedelta(seconds=30)


def cases(size: int) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any], dict[str, Any]]]:
    """Name, function, sizes of the inputs, and options."""
    ragged = {"seqlen_q": 16 * size + 3, "seqlen_k": 16 * size + 3}
    few = {"seqlen_q": size - 1, "seqlen_k": size + 1}  # Some processes have none.
    unequal = {"seqlen_q": 10 * size + 1, "seqlen_k": 20 * size - 1}
    masks: dict[str, dict[str, Any]] = {
        "none": {},
        "causal": {"mask": "causal"},
        "top-left": {"mask": 1},
        "window": {"mask": "causal", "window_size": (9, 0)},
        "band": {"window_size": (5, 11)},
        "left": {"window_size": (7, -1)},
    }
    heads = {"heads_q": 2 * size, "heads_k": size}
    for zigzag in (False, True):
        for lengths, sizes in (("ragged", ragged), ("unequal", unequal), ("few", few)):
            for mask, options in masks.items():
                if lengths != "ragged" and mask in ("none", "left"):
                    continue
                order = "zigzag" if zigzag else "in order"
                given = {**options, "zigzag": zigzag}
                name = f"ring, {mask}, {lengths}, {order}"
                yield name, ring_attention, {**sizes, "heads_q": 6, "heads_k": 3}, given
                if mask in ("causal", "band") and lengths != "few":
                    name = f"all to all, {mask}, {lengths}, {order}"
                    yield name, all_to_all_attention, {**sizes, **heads}, given
    scaled = {"softmax_scale": 0.3, "mask": "causal", "zigzag": True}
    yield "ring, scale", ring_attention, ragged, scaled
    yield "all to all, scale", all_to_all_attention, {**ragged, **heads}, scaled


def check(
    function: Callable[..., Any], sizes: dict[str, Any], options: dict[str, Any], seed: int
) -> dict[str, float]:
    """Output, log-sum-exp and gradients of all processes against one in float64."""
    rng = torch.Generator().manual_seed(seed)
    qkv = random_qkv(rng, **sizes)
    seqlens = sizes["seqlen_q"], sizes["seqlen_k"]
    of_reference = {name: x for name, x in options.items() if name != "zigzag"}
    exact = [x.double().requires_grad_() for x in qkv]
    out, lse = attention(*exact, **of_reference)
    dout, dlse = torch.randn(out.shape, generator=rng), torch.randn(lse.shape, generator=rng)
    dlse = dlse * lse.detach().isfinite()
    (out * dout).sum().add((lse.nan_to_num(neginf=0) * dlse).sum()).backward()

    zigzag = options["zigzag"]
    ours = [shard(x, zigzag=zigzag).requires_grad_() for x in qkv]
    given = {"seqlen_q": seqlens[0], "seqlen_k": seqlens[1], "return_lse": True, **options}
    rows, row_lse = function(*ours, **given)
    own = shard(dout, zigzag=zigzag), shard(dlse, zigzag=zigzag, dim=2)
    (rows * own[0]).sum().add((row_lse.nan_to_num(neginf=0) * own[1]).sum()).backward()
    whole = unshard(rows, seqlens[0], zigzag=zigzag)
    whole_lse = unshard(row_lse, seqlens[0], zigzag=zigzag, dim=2)
    assert_close((whole, whole_lse), (out.detach(), lse.detach()), *qkv)
    found = {}
    for name, x, y, n in zip("qkv", ours, exact, (*seqlens, seqlens[1]), strict=True):
        assert x.grad is not None
        assert y.grad is not None
        gradient = unshard(x.grad, n, zigzag=zigzag).double()
        error = (gradient - y.grad).abs().max().item() if y.numel() else 0.0
        largest = y.grad.abs().max().item() if y.numel() else 0.0
        assert error <= 1e-4 * largest + 1e-6, f"d{name} is off by {error:.3g} of {largest:.3g}"
        found[f"d{name}"] = error
    return found


def half_precision(seed: int) -> dict[str, float]:
    """The parts of many processes are added up in float32, whatever the inputs are."""
    rng = torch.Generator().manual_seed(seed)
    qkv = random_qkv(rng, seqlen_q=64, seqlen_k=64, dtype=torch.bfloat16)
    ours = (shard(x) for x in qkv)
    out, lse = ring_attention(*ours, seqlen_q=64, mask="causal", return_lse=True)
    assert out.dtype == torch.bfloat16
    result = unshard(out, 64), unshard(lse, 64, dim=2)
    assert_close(result, attention(*qkv, mask="causal"), *qkv)
    return {}


def refusals(seed: int) -> dict[str, float]:
    """Raised by every process alike, before anything is sent."""
    size = dist.get_world_size()
    q = torch.randn(1, 4, 2 * size + 1, 8, generator=torch.Generator().manual_seed(seed))
    whole: dict[str, Any] = {"seqlen_q": 4 * size}
    calls: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: ring_attention(q, q[:, :3], q, **whole), "only hdim may differ"),
        (lambda: ring_attention(q, q, q, **whole, seqlen_k=6 * size), "k has 4 rows"),
        (lambda: ring_attention(q, q, q, seqlen_q=3), "q has 4 rows; with seqlen_q=3"),
        (lambda: ring_attention(q, q.half(), q, **whole), "k has dtype torch.float16"),
        (lambda: ring_attention(q[0], q, q, **whole), "q is .*expected"),
        (lambda: ring_attention(q, q, q, **(whole | {"group": 7})), "group=7"),
        (lambda: ring_attention(q, q, q, **whole, mask="diagonal"), "mask='diagonal'"),
        (lambda: all_to_all_attention(q, q, q, **whole), f"q has {2 * size + 1} heads"),
        (lambda: all_to_all_attention(q, q, q, **whole, bias=q), "does not serve bias"),
        (lambda: unshard(q, 5 * size), "x has 4 rows"),
    )
    for call, said in calls:
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=said):
            call()
    return {}


def slopes_and_sinks(seed: int) -> dict[str, float]:
    """Each process takes those of its heads; here without kernels, by what arrives there."""
    rank, size = dist.get_rank(), dist.get_world_size()
    arrived: dict[str, Any] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        arrived.update(options)
        return q, q[..., 0].transpose(1, 2).float()

    x = torch.randn(1, 4, 2 * size, 8, generator=torch.Generator().manual_seed(seed))
    slopes, sink = torch.arange(2.0 * size), -torch.arange(2.0 * size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_parallel, "fmha_fwd", attend)
        out = all_to_all_attention(x, x, x, seqlen_q=4 * size, alibi_slopes=slopes, sink=sink)
    assert isinstance(out, Tensor)
    assert torch.equal(out, x), "there and back changes nothing"
    assert arrived["alibi_slopes"].tolist() == [2 * rank, 2 * rank + 1]
    assert arrived["sink"].tolist() == [-2 * rank, -2 * rank - 1]
    return {}


def slow_builds(seed: int) -> dict[str, float]:
    """One process compiles for longer than the group lets a message take."""
    size, brief = dist.get_world_size(), timedelta(seconds=4)
    dist.barrier()  # The others of the new group are waited for as briefly.
    group = dist.new_group(list(range(size)), timeout=brief)
    kept = jit.load

    def load(spec: jit.BuildSpec) -> Any:
        if dist.get_rank() == size - 1:
            time.sleep(brief.total_seconds() + 2)
        return kept(spec)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "is_built", lambda _: False)
        patch.setattr(jit, "load", load)
        x = torch.randn(1, 8, size, 32, generator=torch.Generator().manual_seed(seed))
        ours = shard(x, group)
        out, lse = ring_attention(ours, ours, ours, seqlen_q=8, group=group, return_lse=True)
    result = unshard(out, 8), unshard(lse, 8, dim=2)
    assert_close(result, attention(x, x, x), x, x, x)
    return {}


def killed(seed: int) -> dict[str, float]:
    """The last process goes while the others wait for it; comes last, as the group is broken."""
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(1, 8, 2, 64)
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        ring_attention(x, x, x, seqlen_q=8 * dist.get_world_size())
    taken = time.monotonic() - started
    assert taken < TIMEOUT.total_seconds() + 10, f"the error came after {taken} s"
    return {"seconds": taken}


def run_rank(rank: int, size: int, folder: Path, seed: int) -> None:
    """All cases in one process of a group."""
    torch.set_num_threads(1)
    met = f"file://{folder / f'store-{size}'}"
    dist.init_process_group("gloo", init_method=met, rank=rank, world_size=size, timeout=TIMEOUT)
    every: list[tuple[str, Callable[[], dict[str, float]]]] = [
        (name, partial(check, function, sizes, options, seed))
        for name, function, sizes, options in cases(size)
    ]
    every += [
        (function.__name__, partial(function, seed))
        for function in (half_precision, refusals, slopes_and_sinks, slow_builds, killed)
    ]
    results: dict[str, Any] = {}
    for name, case in every:
        try:
            results[name] = case()
        except Exception:
            results[name] = traceback.format_exc()
        # Now, as the last case ends a process.
        (folder / f"{size}-{rank}.json").write_text(json.dumps(results))


def main(folder: Path, seed: int, sizes: list[int]) -> None:
    """Fork the processes of one group after the other."""
    for size in sizes:
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                run_rank(rank, size, folder, seed)
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(size) for size in sys.argv[3:]])
