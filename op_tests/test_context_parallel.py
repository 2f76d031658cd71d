"""Context parallelism: groups of processes against one process in float64."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import context_parallel_ranks
import pytest
import torch
import torch.distributed as dist
from subprocesses import run_forked

from jitfmha import context_parallel
from jitfmha.context_parallel import (
    _Call,
    _join,
    _Shards,
    _visible,
    all_to_all_attention,
    ring_attention,
)
from jitfmha.problem.float64_reference import visible
from jitfmha.problem.mask import parse_mask

SIZES = (2, 3, 4, 8)
BY_DEFAULT = (2,)


@pytest.fixture(scope="module")
def results(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, run_seed: int
) -> dict[int, list[dict[str, Any]]]:
    """What every process of every group has to say."""
    folder = tmp_path_factory.mktemp("ranks")
    sizes = SIZES if pytestconfig.getoption("--exhaustive") else BY_DEFAULT
    process = run_forked(
        *(context_parallel_ranks.__file__, folder, str(run_seed), *map(str, sizes)),
        # The test's own imports, and a network that is always there.
        PYTHONPATH=os.pathsep.join(sys.path),
        GLOO_SOCKET_IFNAME="lo",
    )
    files = {size: [folder / f"{size}-{rank}.json" for rank in range(size)] for size in sizes}
    for path in (path for paths in files.values() for path in paths):
        assert path.exists(), process.stdout + process.stderr
    return {size: [_read(path) for path in paths] for size, paths in files.items()}


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("size", SIZES)
def test_processes(pytestconfig, request, size):
    """Outputs, log-sum-exps and gradients; refusals; and the error where a process is killed."""
    if size not in BY_DEFAULT and not pytestconfig.getoption("--exhaustive"):
        pytest.skip("--exhaustive runs more processes")
    results = request.getfixturevalue("results")  # not where it would only be skipped
    expected = {name for name, *_ in context_parallel_ranks.cases(size)}
    expected |= {"half_precision", "refusals", "slopes_and_sinks", "slow_builds"}
    for rank, cases in enumerate(results[size]):
        survives = rank < size - 1
        assert cases.keys() == expected | ({"killed"} if survives else set())
        failed = {name: error for name, error in cases.items() if isinstance(error, str)}
        assert not failed, f"process {rank} of {size}: " + "\n".join(
            f"{name}:\n{error}" for name, error in failed.items()
        )


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("seqlen", [0, 1, 7, 64, 65])
def test_every_row_has_one_process(seqlen, zigzag):
    for ranks in range(1, 9):
        shards = _Shards(seqlen, ranks, zigzag)
        chunks = [chunk for rank in range(ranks) for chunk in shards.chunks(rank)]
        assert sorted(i for chunk in chunks for i in range(*chunk)) == list(range(seqlen))
        lengths = [shards.length(rank) for rank in range(ranks)]
        assert sum(lengths) == seqlen
        assert max(lengths) - min(lengths) <= (2 if zigzag else 1)


def test_blocks_show_what_the_mask_shows(seed):
    """A chunk of queries against a chunk of keys, wherever the diagonal is."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(0, 12, (300, 2), generator=generator).tolist()
    for (seqlen_q, seqlen_k), shift in zip(draws, range(-150, 150), strict=True):
        diagonal = shift % 31 - 15
        for left, right in ((-1, 0), (-1, 3), (2, 0), (4, 5), (0, -1), (-1, -1)):
            mask = parse_mask(0, (left, right))
            i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
            seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
            seen &= (j >= i + diagonal - left) | torch.tensor(left < 0)
            seen &= (j <= i + diagonal + right) | torch.tensor(right < 0)
            block = _visible(seqlen_q, seqlen_k, diagonal, mask)
            found = torch.zeros_like(seen)
            if block is not None:
                part = found[block.rows, block.keys]
                assert min(part.shape) > 0
                found[block.rows, block.keys] = shown = visible(*part.shape, block.mask)
                # What is at an edge without being seen would be sent and computed in vain.
                assert shown[[0, -1]].any(1).all()
                assert shown[:, [0, -1]].any(0).all()
            assert torch.equal(found, seen), (seqlen_q, seqlen_k, diagonal, left, right)


def test_options_that_are_not_served():
    """Refused before anything is sent: those of ``fmha_fwd`` by name, others as unknown."""
    x = torch.zeros(1, 4, 2, 8)
    for function in (ring_attention, all_to_all_attention):
        call: Any = function
        with pytest.raises(NotImplementedError, match=f"{function.__name__} does not .* dropout_p"):
            call(x, x, x, seqlen_q=4, dropout_p=0.1)
        with pytest.raises(TypeError, match=f"^{function.__name__} got .* argument 'zzz'$"):
            call(x, x, x, seqlen_q=4, zzz=1)


_BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "no tensor": ("shard", {"x": [1.5]}, r"x must .* list \(\[1.5\]\)"),
    "dim": ("shard", {"dim": 4}, r"dim is 4; x has shape \(1, 4, 2, 8\)"),
    "zigzag": ("shard", {"zigzag": "no"}, r"zigzag must be a bool, got str \('no'\)"),
    "seqlen": ("unshard", {"seqlen": 4.0}, r"seqlen must be an int, got float \(4.0\)"),
    "group": ("ring_attention", {"group": 5}, "group=5 is no process group"),
    "rows": ("ring_attention", {"seqlen_q": 5}, "q has 4 rows; with seqlen_q=5 .* has 5"),
    "seqlen_k": ("ring_attention", {"seqlen_k": True}, r"seqlen_k must .* bool \(True\)"),
    "return_lse": ("ring_attention", {"return_lse": 1}, r"return_lse must .* int \(1\)"),
    "zigzag of heads": ("all_to_all_attention", {"zigzag": 1}, r"zigzag must .* int \(1\)"),
    "lse of heads": ("all_to_all_attention", {"return_lse": None}, "return_lse must .* None"),
    "slopes": (
        "all_to_all_attention",
        {"alibi_slopes": [1.5, 2]},
        r"slopes must .* \(\[1.5, 2\]\)",
    ),
}


@pytest.mark.parametrize("case", _BAD)
def test_what_is_wrong_is_named(case, monkeypatch):
    """And is found in a process alone: others would wait for it."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    name, bad, said = _BAD[case]
    x = torch.zeros(1, 4, 2, 8)
    right = {"shard": {"x": x}, "unshard": {"x": x, "seqlen": 4}}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises((TypeError, ValueError), match=said):
            getattr(context_parallel, name)(
                **{**right.get(name, {"q": x, "k": x, "v": x, "seqlen_q": 4}), **bad}
            )
    finally:
        dist.destroy_process_group()


def test_rows_that_have_seen_nothing_join_to_nothing(rng):
    """Without keys before and now; and what either side has seen is what both have."""
    out, part = torch.randn(2, 1, 4, 2, 3, generator=rng)
    lse, part_lse = torch.randn(2, 1, 2, 4, generator=rng)
    out[:, :2], lse[..., :2] = 0, -torch.inf
    part[:, 1:3], part_lse[..., 1:3] = 0, -torch.inf
    old, old_lse = out.clone(), lse.clone()
    _join(out, lse, part, part_lse)
    torch.testing.assert_close(out[:, :3], (part + old)[:, :3])
    assert torch.equal(lse[..., :3], torch.maximum(old_lse, part_lse)[..., :3])
    weight = torch.sigmoid(part_lse - old_lse)[..., 3:].transpose(1, 2)[..., None]
    torch.testing.assert_close(out[:, 3:], torch.lerp(old[:, 3:], part[:, 3:], weight))


def test_zigzag_gives_every_process_the_same_work():
    """And one launch for the keys of each process, of which none is half empty."""
    ranks, seqlen = 4, 4 * 16
    shards = _Shards(seqlen, ranks, zigzag=True)
    group: Any = None
    mask = parse_mask("causal")
    for rank in range(ranks):
        call = _Call(group, rank, shards, shards, mask, {})
        pairs = []
        for source in range(ranks):
            (block,) = call.blocks(source)
            rows, keys = (x.stop - x.start for x in (block.rows, block.keys))
            assert (block.mask == "none") == (source != rank)
            pairs.append(int(visible(rows, keys, block.mask).sum()))
        assert sum(pairs) == seqlen * (seqlen + 1) // 2 // ranks
