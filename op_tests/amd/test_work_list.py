"""Packed calls whose workgroups are persistent, and share work that the device lists for them.

On the emulator with the sanitizer and waves in random order, and what the list says.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_calls import (
    ARCHS,
    MODIFIERS,
    CompiledCall,
    assert_nothing_is_spilled,
    check,
    check_call,
    check_pages,
    draw,
    draw_of_other_dtypes,
    forward_kernels,
    inputs_of,
    run,
)
from inputs import prefix_sums
from score_features import ALL_MODIFIERS
from test_promises import run_with_promise
from untyped import explain, fmha_fwd

from jitfmha import emulate
from jitfmha.amd.kernel_arguments import COMPILED_ARGUMENTS, ROW_BLOCK, SHARE_BEGIN
from jitfmha.amd.recording_runtime import RecordingRuntime, Scope, recorded_scope
from jitfmha.kernels import compiled
from jitfmha.kernels.compiled import work_list
from jitfmha.kernels.compiled.list_policy import ListCosts, list_costs
from jitfmha.kernels.compiled.traits import ForwardTraits, kernel_spec
from jitfmha.kernels.launch_estimate import KernelCycles
from jitfmha.planning.target import TARGET_HERE

pytestmark = pytest.mark.usefixtures("poisoned_memory")

_THOUSANDS = 4000
_LENGTHS_Q = (0, 1, 1, 1, 2, 8, 31, 33, 127, 129)
_LENGTHS_K = (0, 1, 5, 31, 33, 65, 100, 200, 300, 500)
_WORKGROUPS = (2, 3, 7, 16, None)  # None: as many as the GPU runs
_LEAST_TILES, _LEAST_SHARE_TILES, _TILE_KEYS, _TILE_ROWS = 1, 6, 32, 128


@pytest.fixture(autouse=True)
def _takes_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls for which work may be listed take that plan, whatever it is estimated to take."""
    propose = compiled.propose

    def listed(*asked: Any) -> Any:
        plans = propose(*asked)
        chosen = [plan for plan in plans if getattr(plan.traits, "lists_work", False)]
        return tuple(chosen) or plans

    monkeypatch.setattr(compiled, "propose", listed)


def _take_workgroups(monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    """As many share the work; with few of them a share has many blocks."""
    if count is not None:
        monkeypatch.setattr(work_list, "listed_workgroups", lambda *_: count)


def _uneven(drawn: random.Random, call: CompiledCall) -> CompiledCall:
    """The same of packed sequences, one of which is long."""
    lengths = [
        (drawn.choice(_LENGTHS_Q), drawn.choice(_LENGTHS_K)) for _ in range(drawn.randint(2, 5))
    ]
    lengths.insert(drawn.randrange(len(lengths)), (drawn.choice((1, 150)), 700))
    return replace(
        call,
        is_group=True,
        lengths=tuple(lengths),
        gap=0 if call.given_out else drawn.choice((0, 3)),
        mask=drawn.choice((call.mask, 0, 1, 2, "b:200,0")),
        layouts=("bshd",) * 4,
        heads=drawn.choice(((1, 1), (4, 2), (5, 1), (8, 1))),
        random_order=drawn.randrange(1 << 32),
    )


@pytest.mark.parametrize("are_usual", [True, False])
@pytest.mark.sample("number", range(_THOUSANDS), 2)
def test_drawn_calls(rng, monkeypatch, number, are_usual):
    """Of 16 bits and of any other inputs, with any features."""
    drawn = random.Random(rng.initial_seed())
    _take_workgroups(monkeypatch, drawn.choice(_WORKGROUPS))
    features = MODIFIERS if drawn.random() < 0.5 else ()
    call = (draw if are_usual else draw_of_other_dtypes)(drawn, features)
    check(_uneven(drawn, call), rng)


@pytest.mark.sample("number", range(_THOUSANDS), 2)
def test_drawn_sequences_of_one_length(rng, monkeypatch, number):
    """Under a mask, which some tiles of rows see more of than others."""
    drawn = random.Random(rng.initial_seed())
    _take_workgroups(monkeypatch, drawn.choice(_WORKGROUPS))
    call = draw(drawn, MODIFIERS if drawn.random() < 0.5 else ())
    lengths = drawn.choice(((129, 300), (300, 129), (200, 200), (33, 500)))
    is_group = drawn.random() < 0.3
    check(
        replace(
            call,
            lengths=(lengths,) * drawn.randint(1, 3),
            is_group=is_group,
            layouts=("bshd",) * 4,
            gap=0,
            mask=drawn.choice((1, 2, "b:100,0")),
            heads=drawn.choice(((1, 1), (4, 2), (5, 1))),
            random_order=drawn.randrange(1 << 32),
        ),
        rng,
    )


@pytest.mark.sample(
    ("arch", "page_size", "dtype"),
    list(product(ARCHS, (1, 16, 24), (torch.bfloat16, torch.int8))),
    2,
)
def test_pages(rng, monkeypatch, arch, page_size, dtype):
    _take_workgroups(monkeypatch, 3)
    check_pages(arch, rng, page_size, (64, 128), dtype=dtype)


@pytest.mark.sample(
    ("arch", "mask", "promised"),
    [(arch, mask, promised) for arch in ARCHS for mask in (0, 2) for promised in (0, 1, 64, 65)],
    2,
)
def test_sequences_that_are_longer_than_promised(rng, arch, mask, promised):
    lengths = [(66, 300), (3, 40), (1, 0), (0, 5), (10, 600)]
    run_with_promise(rng, arch, (64, 40), mask, promised, lengths)


@pytest.mark.parametrize("arch", ARCHS)
def test_parts_of_many_blocks(rng, seed, monkeypatch, arch):
    """Each share has several, and long ones belong to several shares."""
    _take_workgroups(monkeypatch, 16)
    lengths = ((1, 700), (140, 300), (3, 40), (1, 0), (2, 500))
    call = draw(random.Random(seed))
    check(
        replace(
            call,
            arch=arch,
            hdims=(64, 64),
            heads=(8, 2),
            is_group=True,
            lengths=lengths,
            mask=2,
            layouts=("bshd",) * 4,
            random_order=seed,
        ),
        rng,
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_many_parts_of_a_block(rng, seed, monkeypatch, arch):
    """Groups of them are parts of groups. Whichever is the last one, the output is the same."""
    _take_workgroups(monkeypatch, 40)
    call = replace(
        draw(random.Random(seed)),
        arch=arch,
        hdims=(128, 128),
        heads=(2, 1),
        is_group=True,
        lengths=((60, 5000), (1, 40), (2, 70)),
        mask=2,
        layouts=("bshd",) * 4,
        is_v_column_major=False,
    )
    given = inputs_of(call, rng)
    first, second = (
        run(
            *(arch, given.q, given.k, given.v),
            bf16_cvt=call.bf16_cvt,
            random_order=order,
            **given.sequences,
            **given.options,
        )
        for order in (seed, seed + 1)
    )
    check_call(call, given, first)
    assert all(map(torch.equal, first, second))


# ---- What is listed ------------------------------------------------------------------------------


def _listed(
    arch: str, lengths: list[tuple[int, int]], heads: tuple[int, int], mask: int
) -> tuple[list[dict[str, int]], list[dict[str, int]], dict[str, Any]]:
    """Where shares begin, the blocks of a head, and the arguments of the kernel."""
    (rows_q, rows_k), (heads_q, heads_k) = (map(sum, zip(*lengths, strict=True)), heads)
    q = torch.zeros(rows_q, heads_q, 96, dtype=torch.bfloat16)
    k = torch.zeros(rows_k, heads_k, 96, dtype=torch.bfloat16)
    with emulate(arch) as run:
        TARGET_HERE.get().runtime = RecordingRuntime(run.emulation, Path())
        token = recorded_scope.set(scope := Scope())
        try:
            sums_q, sums_k = (prefix_sums(each) for each in zip(*lengths, strict=True))
            fmha_fwd(q, k, k, mask=mask, cu_seqlens_q=sums_q, cu_seqlens_k=sums_k)
        finally:
            recorded_scope.reset(token)
    (workspace,) = [x for x in scope.touched if x.dtype == torch.float32 and x.dim() == 1]
    started = scope.kernels[1]
    values = COMPILED_ARGUMENTS.packer.unpack_from(started.kernarg)
    arguments = dict(zip(COMPILED_ARGUMENTS.leaves, values, strict=True))
    content = memoryview(workspace.numpy()).cast("B")

    def rows(struct: Any, address: int, count: int) -> list[dict[str, int]]:
        begin = address - workspace.data_ptr()
        unpacked = struct.packer.iter_unpack(content[begin : begin + count * struct.size])
        return [dict(zip(struct.leaves, row, strict=True)) for row in unpacked]

    shares = rows(SHARE_BEGIN, arguments["list.shares"], started.grid[0] + 1)
    blocks = rows(ROW_BLOCK, arguments["list.blocks"], arguments["list.most_blocks"])
    last = next(i for i, block in enumerate(blocks) if block["is_last"] == 1)
    return shares, blocks[: last + 1], arguments


def _pieces(
    shares: list[dict[str, int]], blocks: list[dict[str, int]]
) -> Iterator[list[tuple[int, int, int, int]]]:
    """The parts of blocks that each share has: head, block, first key tile and end."""
    for begin, end in pairwise(shares):
        place = (begin["head"], begin["block"], begin["key_tile"])
        last = (end["head"], end["block"], end["key_tile"])
        pieces = []
        while place < last:
            head, block, _ = place
            is_cut = place[:2] == last[:2]
            pieces.append((*place, last[2] if is_cut else blocks[block]["key_tiles"]))
            place = (head, block + 1, 0) if block + 1 < len(blocks) else (head + 1, 0, 0)
            if is_cut:
                break
        yield pieces


@pytest.mark.parametrize("mask", [0, 2])
@pytest.mark.sample("arch", ARCHS, 1)
@pytest.mark.parametrize("are_few", [False, True], ids=["many", "few"])
def test_shares(rng, arch, mask, are_few):
    """They are all of the work together, and each is as large as the others."""
    drawn = random.Random(rng.initial_seed())
    count = drawn.randint(1, 8) if are_few else 140  # which three waves list
    lengths = [(drawn.randint(1, 8), drawn.randint(1, 1500)) for _ in range(count)]
    longest = (drawn.randint(20, 100),) if are_few else (300, drawn.randint(150, 700))
    lengths += [(n, n + drawn.randint(0, 600)) for n in longest]
    drawn.shuffle(lengths)
    heads_q, heads_k = drawn.choice(((8, 2), (4, 4), (16, 4)))
    shares, blocks, arguments = _listed(arch, lengths, (heads_q, heads_k), mask)
    stacked, heads = arguments["stacked.count.divisor"], arguments["attention.heads.divisor"]
    names = ("block", "wave", "key_tile", "wave_of_tile")
    of_block, of_wave, of_tile, wave_of_tile = (arguments[f"list.costs.{x}"] for x in names)

    expected = []
    for number, (queries, keys) in enumerate(lengths):
        for n in range(-(-queries * stacked // _TILE_ROWS)):
            last_row = min((n + 1) * _TILE_ROWS, queries * stacked) - 1
            seen = min(keys, last_row // stacked + 1 + keys - queries) if mask else keys
            expected.append((number, n, -(-max(seen, 0) // _TILE_KEYS)))
    assert [(x["sequence"], x["tile"], x["key_tiles"]) for x in blocks] == expected

    def waves_of(number: int) -> int:
        sequence, n, _ = expected[number]
        return -(-min(lengths[sequence][0] * stacked - n * _TILE_ROWS, _TILE_ROWS) // 32)

    pieces_of_shares = list(_pieces(shares, blocks))
    every: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    units = []
    for number, pieces in enumerate(pieces_of_shares):
        of_share = 0
        for head, n, begin, end in pieces:
            every.setdefault((head, n), []).append((begin, end, number))
            waves = waves_of(n)
            of_share += (end - begin) * (of_tile + waves * wave_of_tile)
            of_share += (of_block + waves * of_wave) * (begin == 0)
        units.append(of_share)
    assert set(every) == {(head, n) for head in range(heads) for n in range(len(blocks))}
    for (_, n), parts in every.items():
        begins, ends = [x[0] for x in parts], [x[1] for x in parts]
        assert begins == [0, *ends[:-1]]
        assert ends[-1] == blocks[n]["key_tiles"]
        if len(parts) == 1:
            continue
        assert min(end - begin for begin, end, _ in parts) >= _LEAST_TILES
        first, *_, last = (number for *_, number in parts)
        for cut in shares[first + 1 : last + 1]:
            assert (cut["first_cut"], cut["last_cut"]) == (first + 1, last)
    # A share is moved by less than a block without its tiles, and a few of these.
    most_waves = _TILE_ROWS // 32
    least = of_block + most_waves * of_wave + 2 * (of_tile + most_waves * wave_of_tile)
    assert max(units) <= max(sum(units) / len(units), least) + 2 * least


def test_what_work_costs():
    """Blocks with rows for one wave alone take less, and so do their key tiles.

    Where they were measured to take more, they take the same: no cost is below 0.
    """
    few = KernelCycles(32, (80,), (6400,))
    for of_row, once, costs in ((86, 12160, (78, 30, 39, 1)), (74, 6340, (108, 0, 40, 0))):
        every = KernelCycles(128, (of_row,), (once,))
        assert list_costs((few, every), 1, 128, 32) == ListCosts(*costs)


# ---- What takes it -------------------------------------------------------------------------------


@pytest.mark.sample(
    ("arch", "hdims", "is_masked", "access", "modifiers", "stacks_heads"),
    forward_kernels((256, 256), (192, 128), (160, 128), (128, 128), (96, 96), (64, 64)),
    2,
    is_fixed=True,
)
def test_nothing_is_spilled(arch, hdims, is_masked, access, modifiers, stacks_heads):
    traits = ForwardTraits(
        *(arch, "bf16", *hdims, "gm1", "rtne", is_masked, access, modifiers),
        has_large_softcap=modifiers == ALL_MODIFIERS,
        kv_dtype="bf16",
        stacks_heads=stacks_heads,
        lists_work=True,
    )
    names = traits.name, traits.list_name
    most = 24 if modifiers == ALL_MODIFIERS else 0  # which nobody asks for at once
    assert_nothing_is_spilled(kernel_spec(traits), *names, most_scalars=most)


@pytest.mark.parametrize(
    ("lengths", "options", "lists_work"),
    [
        ([(1, 900)] * 9 + [(200, 900)], {}, True),
        ([(1, 900)] * 9 + [(200, 900)], {"num_splits": 1}, False),
        ([(20, 900)] * 9, {}, False),
        ([(200, 900)], {}, False),
        ([(1, 9)] * 1023 + [(50, 9)], {}, True),
        ([(1, 9)] * 1024 + [(50, 9)], {}, False),
        ([(1, 9)] * 99 + [(8192 * 128, 9)], {}, False),
    ],
)
def test_which_calls_take_it(lengths, options, lists_work):
    """Uneven ones that may be split, of as many sequences and rows as there is room for."""
    of_q, of_k = zip(*lengths, strict=True)
    q, k = (torch.zeros(1, 2, 96).bfloat16().expand(sum(n), -1, -1) for n in (of_q, of_k))
    with emulate("gfx950"):
        plan = explain(
            *(q, k, k),
            cu_seqlens_q=prefix_sums(of_q),
            cu_seqlens_k=prefix_sums(of_k),
            max_seqlen_q=max(of_q),
            max_seqlen_k=max(of_k),
            **options,
        ).plan
    assert plan.traits.lists_work == lists_work


@pytest.mark.parametrize(
    ("batch", "seqlen", "mask", "options", "lists_work"),
    [
        (1, 8192, 2, {}, True),
        (1, 8192, 0, {}, False),
        (1, 8192, 2, {"num_splits": 1}, False),
        (8, 8192, 2, {}, True),
        (1, 512, 2, {}, False),
    ],
)
def test_which_calls_of_equal_lengths_take_it(
    monkeypatch, batch, seqlen, mask, options, lists_work
):
    """Those with a mask, whose last tiles leave units without work, if they are long."""
    monkeypatch.undo()  # by what plans are estimated to take
    q, k, v = (torch.zeros(1, 1, 1, 96).bfloat16().expand(batch, seqlen, 8, 96) for _ in "qkv")
    with emulate("gfx950"):
        plan = explain(q, k, v, mask=mask, **options).plan
    assert plan.traits.lists_work == lists_work
