"""Compiled kernels with few queries, whose heads are stacked, and with split keys.

On the emulator with the sanitizer and waves in random order, and what the launcher asks for.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled_calls import (
    ARCHS,
    MODIFIERS,
    CompiledCall,
    assert_near,
    check,
    check_tensors,
    draw,
    run,
)
from inputs import prefix_sums
from test_promises import run_with_promise
from torch import Tensor
from untyped import fmha_fwd

from jitfmha.amd.kernel_arguments import COMPILED_ARGUMENTS
from jitfmha.kernels.compiled.decode_policy import StreamedKeys, StreamedSplits
from jitfmha.kernels.compiled.split_choice import SplitChoice
from jitfmha.kernels.compiled.traits import ForwardTraits, forward_tile, stacks_heads
from jitfmha.kernels.ready.key_split import ONE_SPLIT, KeySplit
from jitfmha.planning.target import AmdTarget
from jitfmha.problem.arguments import Arguments, KeyOptions, Modifiers
from jitfmha.problem.float64_reference import attention
from jitfmha.problem.problem import make_problem

pytestmark = pytest.mark.usefixtures("poisoned_memory")

_FP8 = torch.float8_e4m3fnuz
_THOUSANDS = 4000
# Query heads and key heads: of 128 rows of a tile 5 heads have 130 with 26 queries, and 40 heads
# have several tiles.
SHARED_HEADS = ((4, 2), (8, 1), (6, 2), (5, 1), (40, 1), (24, 3))
FEW_QUERIES = (0, 1, 1, 1, 2, 3, 5, 16, 25, 26, 31, 32, 33, 63, 64)
SEQLENS_K = (0, 1, 31, 32, 33, 64, 65, 100, 130, 200)
NUM_SPLITS = (0, 0, 1, 2, 3, 5, 128)


def _with_lengths(
    drawn: random.Random, call: CompiledCall, queries: tuple[int, ...], **changes: Any
) -> CompiledCall:
    """The same call with as many sequences, of lengths from ``queries`` and ``SEQLENS_K``."""
    lengths = [(drawn.choice(queries), drawn.choice(SEQLENS_K)) for _ in call.lengths]
    if not call.is_group:
        lengths = lengths[:1] * len(lengths)
    return replace(
        call,
        lengths=tuple(lengths),
        num_splits=drawn.choice(NUM_SPLITS),
        random_order=drawn.randrange(1 << 32),
        **changes,
    )


@pytest.mark.parametrize("shares_heads", [True, False])
@pytest.mark.sample("number", range(_THOUSANDS), 2)
def test_drawn_calls(rng, number, shares_heads):
    """Of few queries whose heads share keys, and of any."""
    drawn = random.Random(rng.initial_seed())
    call = draw(drawn, MODIFIERS if drawn.random() < 0.5 else ())
    if shares_heads:
        call = _with_lengths(drawn, call, FEW_QUERIES, heads=drawn.choice(SHARED_HEADS))
    else:
        call = _with_lengths(drawn, call, (1, 33, 65, 127, 128, 129))
    check(call, rng)


@pytest.mark.parametrize("seqlen_q", [3, 40])  # of the decode kernel, and of the other
@pytest.mark.sample(
    ("arch", "heads_q", "feature"),
    [
        (arch, heads_q, feature)
        for arch in ARCHS
        for heads_q in (2, 8)
        for feature in ("sink", "dropout", "everything")
    ],
    1,
)
def test_splits_together_count_everything_once(rng, arch, heads_q, feature, seqlen_q):
    """Sinks belong to the first split alone, and what is dropped depends on no split."""
    drawn = random.Random(rng.initial_seed())
    call = replace(
        draw(drawn), arch=arch, heads=(heads_q, 2), is_group=False, mask=0, bf16_cvt="rtne"
    )
    call = replace(call, lengths=((seqlen_q, 150),), features=(feature,), num_splits=3)
    check(call, rng)


@pytest.mark.parametrize("hdim_v", [24, 400])
@pytest.mark.sample("arch", ARCHS, 1)
def test_splits_whose_largest_scores_differ(rng, arch, hdim_v):
    """By 2 from one to the next, for a bias that rises from key to key.

    Also of several waves, and with values that are made in slices.
    """
    shapes = ((100, 24), (96, 24), (96, hdim_v))
    q, k, v = (torch.randn(1, n, 2, hdim, generator=rng).half() for n, hdim in shapes)
    options = {"bias": torch.arange(96.0).view(1, 1, 1, 96) / 16}
    actual = run(arch, q, k, v, num_splits=3, **options)
    assert_near(actual, attention(q, k, v, **options), q, k, v, options)


@pytest.mark.sample(
    ("arch", "mask", "promised"),
    [(arch, mask, promised) for arch in ARCHS for mask in (0, 2) for promised in (0, 1, 64, 65)],
    1,
)
def test_the_workspace_is_as_large_as_was_promised(rng, arch, mask, promised):
    """Sequences turn out longer than they were said to be; two heads are stacked."""
    lengths = [(66, 300), (3, 40), (1, 0), (0, 5), (10, 600)]
    run_with_promise(rng, arch, (24, 40), mask, promised, lengths)


# ---- What is launched ----------------------------------------------------------------------------


def batch_of_8(rows: int, heads: int) -> Tensor:
    """Of a head dimension that no ready kernel has; one row's memory for all."""
    return torch.zeros(1, 1, heads, 96, dtype=torch.bfloat16).expand(8, rows, -1, -1)


def decode(seqlen_k: int, seqlen_q: int = 1) -> None:
    q, k = batch_of_8(seqlen_q, 32)[:4], batch_of_8(seqlen_k, 8)[:4]
    fmha_fwd(q, k, k)


def test_stacked_heads_take_the_workgroups_of_key_heads(runtime):
    with runtime.stands_for(runtime.target("MI300X")):
        decode(8192)
    first, second = runtime.launches()
    # 32 sequences and key heads, which are fewer than draw what the chip streams.
    (num_splits,) = first.fields(COMPILED_ARGUMENTS, "attention.num_splits.divisor")
    assert num_splits > 1
    assert first.grid[0] * first.grid[1] * first.grid[2] == 32 * num_splits
    # A workgroup for each of four waves.
    assert second.grid[0] * second.grid[1] * second.grid[2] == 32 * 4
    assert bytes(first.kernarg) == bytes(second.kernarg)
    assert second.symbol == first.symbol + b"_combine"
    names = ("heads.divisor", "gqa.divisor", "query_tiles")
    assert first.fields(COMPILED_ARGUMENTS, *(f"attention.{name}" for name in names)) == [8, 1, 1]
    assert first.fields(COMPILED_ARGUMENTS, "stacked.count.divisor", "stacked.q_stride") == [4, 192]


@pytest.mark.parametrize(
    ("seqlen_k", "options", "num_splits"),
    [
        (8192, {}, 1),  # 64 sequences and key heads: units enough ask for keys
        (8192, {"batch": 4}, 2),  # 32, which ask for too few
        (8192, {"batch": 1, "heads": (256, 8)}, 13),  # two blocks of rows take longer
        (8192, {"num_splits": 1}, 1),
        (8192, {"num_splits": 7}, 7),
        (64, {"num_splits": 7}, 2),  # as many as there are tiles
        (16, {"num_splits": 7}, 1),
        (64, {}, 1),  # too few keys for a second launch to pay
        (8192, {"window_size": (100, 0)}, 1),  # as few are seen
        (8192, {"batch": 4, "window_size": (100, 0), "sink_size": 8000}, 2),
        (8192, {"batch": 4, "mask": 2}, 2),
        (65536, {"batch": 1, "heads": (8, 1)}, 64),
        (1 << 20, {"batch": 1, "heads": (8, 1)}, 64),
        (8192, {"heads": (32, 32)}, 1),  # 256 sequences and heads
        # The other kernel: of 608 workgroups that run at a time.
        (8192, {"seqlen_q": 33}, 4),  # two tiles for each key head
        (8192, {"seqlen_q": 64}, 4),
        (8192, {"seqlen_q": 65}, 2),  # a tile for each of 32 query heads
    ],
    ids=str,
)
def test_num_splits(runtime, seqlen_k, options, num_splits):
    """Where two waves share a SIMD."""
    target = runtime.target("MI300X")
    seqlen_q, heads = options.pop("seqlen_q", 1), options.pop("heads", (32, 8))
    batch = options.pop("batch", 8)
    q, k = batch_of_8(seqlen_q, heads[0])[:batch], batch_of_8(seqlen_k, heads[1])[:batch]
    keys = KeyOptions(num_splits=options.pop("num_splits", 0))
    modifiers = Modifiers(sink_size=options.pop("sink_size", 0))
    problem = make_problem(Arguments(q, k, k, keys=keys, modifiers=modifiers, **options))
    traits = ForwardTraits.of(problem, target.arch, target.compute_units)
    row, streams = traits.row()._replace(waves_of_simd=2), traits.decode_blocks is not None
    assert streams == (seqlen_q == 1)
    columns = traits.made_columns
    choice = SplitChoice(problem, target, row, 1, columns, streams=streams)
    splits = choice.splits(seqlen_q, seqlen_k)
    assert splits.num_splits == num_splits
    # A tile's row leaves its output, a maximum and a sum; there is room for two of these.
    stacked = heads[0] // heads[1] if row.stacks_heads else 1
    tiles = batch * heads[0] // stacked * -(-seqlen_q * stacked // row.ts_qo)
    floats = tiles * num_splits * row.ts_qo * (columns + 4)
    if num_splits == 1:
        assert splits.workspace_floats == 0
    elif streams and keys.num_splits == 0:
        assert splits.workspace_floats >= floats  # it is that of any length
    else:
        assert splits.workspace_floats == floats


@pytest.mark.sample(
    ("q_dtype", "kv_dtype", "hdim", "page_size", "num_splits"),
    [
        (torch.bfloat16, torch.bfloat16, 64, None, 1),
        (_FP8, _FP8, 128, None, 1),
        (_FP8, _FP8, 64, None, 1),
        (torch.bfloat16, _FP8, 64, None, 1),
        (torch.float16, _FP8, 64, None, 2),
        (torch.bfloat16, torch.int8, 128, None, 1),
        (torch.bfloat16, torch.int8, 64, None, 1),
        (_FP8, _FP8, 128, 16, 1),
        (torch.bfloat16, torch.int8, 128, 16, 1),
        (torch.bfloat16, torch.int8, 256, 1, 1),
        # Of eight waves.
        (_FP8, _FP8, 64, 16, 1),
        (_FP8, _FP8, 128, 1, 1),
        (torch.bfloat16, torch.int8, 64, 16, 1),
    ],
    5,
)
def test_8_bit_keys_are_split_where_units_draw_little(
    runtime, q_dtype, kv_dtype, hdim, page_size, num_splits
):
    """Of 128 sequences and key heads, each a workgroup's, on a chip of 304 units."""
    actual = _splits_of_8_bit_keys(runtime, (16, 8192), q_dtype, kv_dtype, hdim, page_size)
    assert actual == num_splits


@pytest.mark.parametrize("seqlen_k", [1024, 4096])
def test_short_keys_that_are_looked_up_are_not_split(runtime, seqlen_k):
    """Of 64 sequences and key heads: a block of wide rows draws more than other small pages."""
    shape = 8, seqlen_k
    actual = _splits_of_8_bit_keys(runtime, shape, torch.bfloat16, torch.int8, 128, page_size=1)
    assert (actual > 1) == (seqlen_k > 1024)


def _splits_of_8_bit_keys(runtime, shape, q_dtype, kv_dtype, hdim, page_size):
    """How many an MI300X makes; ``shape`` is the batch and the keys of a sequence."""
    (batch, seqlen_k), heads = shape, 8
    q = torch.zeros(1, hdim).to(q_dtype).expand(batch, 8 * heads, hdim)
    k = torch.zeros(1, hdim).to(kv_dtype)
    options: dict[str, Any] = {}
    if page_size:
        pages = seqlen_k // page_size
        options = {
            "cu_seqlens_q": torch.arange(batch + 1).int(),
            "cu_seqlens_k": torch.arange(batch + 1).int() * seqlen_k,
            "max_seqlen_q": 1,
            "max_seqlen_k": seqlen_k,
            "block_table": torch.zeros(batch, pages).int(),
        }
        k = k.expand(1, page_size, heads, hdim)
    else:
        q, k = q[:, None], k.expand(batch, seqlen_k, heads, hdim)
    with runtime.stands_for(runtime.target("MI300X")):
        fmha_fwd(q, k, k, **options)
    (splits,) = runtime.launches()[0].fields(COMPILED_ARGUMENTS, "attention.num_splits.divisor")
    return splits


@pytest.mark.parametrize("hdim", [64, 128])
def test_keys_are_not_split_where_a_quarter_of_the_units_is_enough(runtime, hdim):
    """Of 64 sequences and key heads, on a chip of 256 units whose HBM is the quickest."""
    q, k = torch.zeros(2, 1, hdim).bfloat16()
    q, k = q.expand(8, 1, 32, hdim), k.expand(8, 4096, 8, hdim)
    with runtime.stands_for(runtime.target("MI355X")):
        fmha_fwd(q, k, k)
    (actual,) = runtime.launches()[0].fields(COMPILED_ARGUMENTS, "attention.num_splits.divisor")
    assert actual == 1


@pytest.mark.parametrize(
    ("arch", "kind", "shape", "num_splits"),
    [
        # Narrow rows of few bytes: each wave has two tiles, which come at once.
        ("gfx942", (1, False, 64, 0), (8, 8192, 1), 32),
        ("gfx950", (2, False, 64, 0), (24, 3072, 1), 1),  # several tiles are on their way
        ("gfx950", (1, False, 64, 1), (64, 4096, 1), 4),  # each key is looked up
        ("gfx950", (2, False, 64, 16), (24, 3072, 1), 6),  # in pages
        ("gfx950", (1, False, 64, 0), (64, 4096, 2), 4),  # two blocks of rows
        ("gfx950", (1, True, 64, 0), (64, 4096, 1), 4),
        ("gfx950", (2, False, 128, 0), (8, 8192, 1), 11),  # eight draw less than HBM gives
        ("gfx942", (2, False, 128, 0), (24, 32768, 1), 2),  # HBM is as busy with one round
        ("gfx942", (1, False, 64, 1), (16, 8192, 1), 13),  # two of a unit compute for twice as long
        ("gfx950", (1, False, 128, 0), (8, 5120, 2), 14),  # no wave has fewer tiles with 19
        ("gfx950", (1, True, 64, 0), (96, 3072, 2), 1),  # two would gain next to nothing
        ("gfx942", (2, False, 64, 16), (16, 8192, 1), 8),  # seven leave waves less even tiles
        ("gfx942", (2, False, 64, 0), (1, 1 << 20, 1), 64),  # as many are combined at once
    ],
    ids=str,
)
def test_splits_of_streamed_keys(arch, kind, shape, num_splits):
    """Of numbers of so many bytes, whether they are fp8 beside fp16, the head dimension and pages.

    A shape is sequences and key heads, keys, and blocks of rows, with eight rows of a query.
    """
    number_bytes, is_fp16, hdim, page_rows = kind
    sequences, seqlen_k, blocks = shape
    keys = StreamedKeys(number_bytes, is_fp16, is_fp16, hdim, hdim, page_rows, False)
    units, streamed = {"gfx942": (304, 4.3e12), "gfx950": (256, 6.91e12)}[arch]
    split = KeySplit(sequences, 16 * blocks, units * (2 if blocks == 1 else 1), hdim, 1, 1, 4e-13)
    choice = StreamedSplits.of(split, keys, 8, arch, 32, 4, units, streamed)
    assert choice.splits(2 * blocks, -(-seqlen_k // 32)).num_splits == num_splits


def _choice_of_decode(
    target: AmdTarget, batch: int, heads: tuple[int, int], queries: int
) -> tuple[SplitChoice, int]:
    """That of a decode kernel, and the float32 values that a split leaves of a row."""
    q, k = batch_of_8(queries, heads[0])[:1], batch_of_8(1, heads[1])[:1]
    problem = make_problem(Arguments(*(x.expand(batch, -1, -1, -1) for x in (q, k, k))))
    traits = ForwardTraits.of(problem, target.arch, target.compute_units)
    row, columns = traits.row()._replace(waves_of_simd=2), traits.made_columns
    return SplitChoice(problem, target, row, 1, columns, streams=True), columns + 4


@pytest.mark.parametrize("batch", [1, 3, 40])
def test_what_decode_allocates_is_bounded_by_the_chip(runtime, batch):
    """However long sequences become: three rounds of workgroups leave results at most."""
    target = runtime.target("MI300X")
    choice, row_floats = _choice_of_decode(target, batch, (32, 8), 1)
    most = 3 * 2 * target.compute_units * choice.policy.ts_qo * row_floats
    sizes = [choice.splits(1, 1 << shift).workspace_floats for shift in range(26)]
    assert sizes[0] == 0
    assert max(sizes) <= most


def test_a_step_of_decode_allocates_what_others_do(runtime, seed):
    """No length of the keys changes the workspace, which has room for the splits of any."""
    drawn = random.Random(seed)
    are_split = 0
    for _ in range(40):
        target = runtime.target(drawn.choice(("MI300X", "MI308X", "MI355X")))
        heads_k, queries = drawn.choice((1, 2, 4, 8)), drawn.randint(1, 8)
        heads, batch = (heads_k * drawn.randint(1, 16), heads_k), drawn.choice((1, 2, 3, 7, 30))
        choice, row_floats = _choice_of_decode(target, batch, heads, queries)
        chosen = {choice.splits(queries, int(2 ** (22 * drawn.random()))) for _ in range(20)}
        chosen.discard(ONE_SPLIT)
        are_split += len(chosen) > 1
        assert len({x.workspace_floats for x in chosen}) <= 1
        rows, tile_rows = queries * heads[0] // heads_k, choice.policy.ts_qo
        floats = batch * heads_k * -(-rows // tile_rows) * tile_rows * row_floats
        assert all(x.workspace_floats >= x.num_splits * floats for x in chosen)
    assert are_split > 0


@pytest.mark.parametrize(
    ("max_seqlen_k", "lists", "are_split"),
    [
        (None, None, True),  # as many keys as the table has pages for
        (8192, None, True),
        (64, None, False),
        (None, 4 * 128, True),  # as many as the lists have in the mean
        (None, 4, False),
        (8192, 4, True),
    ],
)
def test_keys_in_pages_are_split_by_the_longest_sequence(runtime, max_seqlen_k, lists, are_split):
    q = torch.zeros(4, 32, 128, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, 8, 128, dtype=torch.bfloat16).expand(3, 64, -1, -1)
    table = torch.zeros((4, 128) if lists is None else lists, dtype=torch.int32)
    ends = {"cu_seqlens_q": prefix_sums([1] * 4), "cu_seqlens_k": prefix_sums([64] * 4)}
    if lists is not None:
        ends["cu_seqlens_k_padded"] = prefix_sums([1] * 4)
    longest = {"max_seqlen_q": 1, "max_seqlen_k": max_seqlen_k}
    with runtime.stands_for(runtime.target("MI300X")):
        fmha_fwd(q, k, k, block_table=table, **ends, **longest)
    first, *others = runtime.launches()
    (num_splits,) = first.fields(COMPILED_ARGUMENTS, "attention.num_splits.divisor")
    assert (num_splits > 1) == bool(others) == are_split


def test_a_decode_loop_keeps_its_kernel(runtime):
    """Whether keys are split or not; and many queries take one of their own."""
    with runtime.stands_for(runtime.target("MI300X")):
        for seqlen_k in (1, 64, 500, 8192, 8193):
            decode(seqlen_k)
        decode(64, seqlen_q=65)
        decode(64)
        decode(64, seqlen_q=40)
    symbols = [each.symbol.decode() for each in runtime.launches()]
    forward = [symbol for symbol in symbols if not symbol.endswith("_combine")]
    assert len(symbols) > len(forward) == 8
    assert "_stacked_" in forward[0]
    assert forward[5] == forward[0].replace("_stacked_decode1", "")
    assert {*forward[:5], forward[6]} == {forward[0]}
    assert forward[7] == forward[0].replace("_decode1", "")


def test_heads_that_are_far_apart_are_not_stacked(rng, monkeypatch):
    """Four of them would be 4 GiB from the next four; and back to heads that are not."""
    # Nobody reads what lies between.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    far = 1 << 29  # elements
    memory = torch.empty(3 * far + 24, dtype=torch.bfloat16)
    q = memory.as_strided((1, 1, 4, 24), (0, 96, far, 1))
    k, v = (torch.randn(1, 33, 1, 24, generator=rng).bfloat16() for _ in range(2))
    q.copy_(torch.randn(1, 1, 4, 24, generator=rng))
    for queries in (q, q.contiguous(), q):
        problem = make_problem(Arguments(queries, k, v))
        tile = forward_tile("gfx942", "bf16", 24, 24)
        assert stacks_heads(problem, tile) == queries.is_contiguous()
        check_tensors("gfx942", queries, k, v)
