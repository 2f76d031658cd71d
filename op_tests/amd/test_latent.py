"""Kernels whose values are the first columns of their keys, on the emulator with its sanitizer."""

import random
from functools import partial
from itertools import accumulate, product
from typing import Any, get_args

import pytest
import torch
from compiled_calls import (
    ARCHS,
    DTYPES,
    FP8_DTYPES,
    assert_near,
    assert_nothing_is_spilled,
    run,
)
from packed_calls import Sequences
from rigs.modelled_call import estimate_of
from torch import Tensor
from untyped import explain, fmha_fwd

from jitfmha import emulate
from jitfmha.kernels.compiled.split_choice import SplitChoice
from jitfmha.kernels.compiled.traits import Access, ForwardTraits, kernel_spec
from jitfmha.kernels.modifiers import ModifierTraits
from jitfmha.kernels.ready.key_split import LAUNCH_GAP_SECONDS
from jitfmha.problem.float64_reference import attention, attention_packed, unpaged

pytestmark = pytest.mark.usefixtures("poisoned_memory")

_THOUSANDS = 1000
HEADS = (2, 5, 16, 17, 32, 64, 128)
SEQLENS_K = (0, 1, 31, 32, 33, 63, 64, 65, 100, 300)
# DeepSeek's, and others that no chunk, line or group of columns divides.
HDIMS = ((576, 512), (576, 512), (576, 500), (512, 511), (324, 300), (300, 257))
SCALE = 192**-0.5


def random_rows(rng: torch.Generator, dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.randn(sizes, generator=rng).to(dtype)


def drawn_descales(
    rng: torch.Generator, dtype: torch.dtype, kv_dtype: torch.dtype
) -> dict[str, Tensor]:
    """Of the tensors that have 8 bits."""
    dtypes = zip("qkv", (dtype, kv_dtype, kv_dtype), strict=True)
    return {
        f"{name}_descale": torch.rand(1, generator=rng) + 0.5
        for name, each in dtypes
        if each.itemsize == 1
    }


def is_latent(arch: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> bool:
    with emulate(arch):
        return "latent" in explain(q, k, v, **options).plan.kernel


@pytest.mark.sample("number", range(_THOUSANDS), 2)
def test_drawn_calls(rng, number):
    """Of any number of heads and a few queries, in all modes, with keys that are split or not.

    Two of each kernel.
    """
    drawn = random.Random(rng.initial_seed())
    arch, kind = ARCHS[number % 2], ("gm0", "gm1", "pages")[number // 2 % 3]
    dtypes = *DTYPES.values(), FP8_DTYPES[arch]
    dtype, heads = drawn.choice(dtypes), drawn.choice(HEADS)
    kv_dtype = drawn.choice((dtype, FP8_DTYPES[arch]))
    hdim, hdim_v = drawn.choice(HDIMS)
    seqlens_q = [drawn.randint(1, 4)] * 3
    mask = drawn.choice((0, 2, "b:3,0", "b:40,1"))
    bf16_cvt, page_size = drawn.choice(("rtne", "rtna", "rtz")), drawn.choice((1, 6, 16, 64))
    for _ in range(2):
        seqlens_k = [drawn.choice(SEQLENS_K) for _ in seqlens_q]
        options: dict[str, Any] = {"softmax_scale": SCALE, "mask": mask}
        options |= drawn_descales(rng, dtype, kv_dtype)
        more: dict[str, Any] = {
            "num_splits": drawn.randint(0, 4),
            "random_order": drawn.choice((None, number)),
        }
        if (arch, dtype) == ("gfx942", torch.bfloat16):
            more["bf16_cvt"] = bf16_cvt
        reference = attention
        if kind == "gm0":
            rows = random_rows(rng, kv_dtype, len(seqlens_q), seqlens_k[0] + 5, 1, hdim)
            rows[:, seqlens_k[0] :] = torch.nan
            q = random_rows(rng, dtype, len(seqlens_q), seqlens_q[0], heads, hdim)
            latent = keys = rows[:, : seqlens_k[0]]
        else:
            sequences = Sequences((seqlens_q, seqlens_k), 0 if kind == "pages" else 3)
            names = "lengths_q", "lengths_k", "starts_q", "starts_k"
            reference = partial(attention_packed, **dict(zip(names, sequences.spans, strict=True)))
            total_q, total_k = sequences.rows
            q = random_rows(rng, dtype, total_q, heads, hdim)
            more |= sequences.groups | {"max_seqlen_k": max(seqlens_k)}
            if kind == "pages":
                most = -(-max(*seqlens_k, 1) // page_size)
                latent = random_rows(rng, kv_dtype, most + 3, page_size, 1, hdim)
                shape = len(seqlens_k), most + 1
                table = torch.randint(most + 3, shape, generator=rng, dtype=torch.int32)
                more["block_table"] = table
                keys = unpaged(latent, table, seqlens_k)
            else:
                latent = keys = random_rows(rng, kv_dtype, total_k, 1, hdim)
        values = latent[..., :hdim_v]
        if latent.numel():
            asked = {name: x for name, x in more.items() if name != "random_order"}
            assert is_latent(arch, q, latent, values, **asked, **options)
        actual = run(arch, q, latent, values, **more, **options)
        expected = reference(q, keys, keys[..., :hdim_v], **options)
        scaled = (
            x.double() * options.get(f"{name}_descale", torch.ones(1)).double()
            for name, x in zip("qkv", (q, keys, keys[..., :hdim_v]), strict=True)
        )
        out_dtype = dtype if dtype.itemsize == 2 else torch.bfloat16
        assert_near(actual, expected, *scaled, options, out_dtype)


def numbered_pages(latent: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """The rows of sequences in pages, the last one first, and the table that names them."""
    batch, keys, _, hdim = latent.shape
    of_each = -(-keys // page_size)
    padding = latent.new_full((batch, of_each * page_size - keys, 1, hdim), torch.nan)
    pages = torch.cat([latent, padding], dim=1).view(-1, page_size, 1, hdim).flip(0)
    table = torch.arange(batch * of_each, dtype=torch.int32).flip(0)
    return pages.contiguous(), table.view(batch, of_each)


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.sample(
    ("arch", "bits", "queries", "page_size"),
    list(product(ARCHS, ("16 and 16", "16 and 8", "8 and 8"), (1, 2, 4), (1, 64))),
    1,
)
def test_decode_in_pages(rng, arch, bits, queries, page_size, heads):
    """What is served: the last queries of each sequence, which see the keys up to their own."""
    of_bits = {"16": torch.bfloat16, "8": FP8_DTYPES[arch]}
    dtype, kv_dtype = (of_bits[each] for each in bits.split(" and "))
    lengths = 150, 3, 65
    latent = random_rows(rng, kv_dtype, len(lengths), max(lengths), 1, 576)
    q = random_rows(rng, dtype, len(lengths) * queries, heads, 576)
    pages, table = numbered_pages(latent, page_size)
    options: dict[str, Any] = {"softmax_scale": SCALE, "mask": 2}
    options |= drawn_descales(rng, dtype, kv_dtype)
    sums_q, sums_k = (
        torch.tensor([0, *accumulate(x)], dtype=torch.int32)
        for x in ([queries] * len(lengths), lengths)
    )
    more = {"cu_seqlens_q": sums_q, "cu_seqlens_k": sums_k, "block_table": table}
    more |= {"max_seqlen_q": queries, "max_seqlen_k": max(lengths)}
    for num_splits in (1, 3):
        out, lse = run(
            *(arch, q, pages, pages[..., :512]), num_splits=num_splits, **more, **options
        )
        for i, length in enumerate(lengths):
            rows = slice(i * queries, (i + 1) * queries)
            k = latent[i : i + 1, :length]
            expected = attention(q[None, rows], k, k[..., :512], **options)
            scaled = (
                x.double() * options.get(f"{name}_descale", torch.ones(1)).double()
                for name, x in zip("qkv", (q[None, rows], k, k[..., :512]), strict=True)
            )
            actual = out[None, rows], lse[None, :, rows]
            assert_near(actual, expected, *scaled, options, torch.bfloat16)


@pytest.mark.sample("heads", [16, 40], 1)
@pytest.mark.sample("arch", ARCHS, 1)
def test_one_split_has_the_same_bits_everywhere(rng, arch, heads):
    """Alone, in a batch, and in pages of any size: nothing else decides than a sequence's rows."""
    lengths = 100, 33, 230
    latent = random_rows(rng, torch.bfloat16, len(lengths), max(lengths), 1, 576)
    q = random_rows(rng, torch.bfloat16, len(lengths), heads, 576)
    options: dict[str, Any] = {"softmax_scale": SCALE, "num_splits": 1}
    sums = {
        "cu_seqlens_q": torch.arange(len(lengths) + 1, dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        "max_seqlen_q": 1,
        "max_seqlen_k": max(lengths),
    }
    rows = torch.cat([x[:length] for x, length in zip(latent, lengths, strict=True)])
    results = [run(arch, q, rows, rows[..., :512], **sums, **options)]
    for page_size in (1, 6, 16):
        pages, table = numbered_pages(latent, page_size)
        results.append(run(arch, q, pages, pages[..., :512], block_table=table, **sums, **options))
    alone = [
        run(arch, q[None, i : i + 1], k, k[..., :512], **options)
        for i, length in enumerate(lengths)
        for k in [latent[i : i + 1, :length]]
    ]
    expected = torch.cat([out[0] for out, _ in alone]), torch.cat([lse[0] for _, lse in alone], 1)
    for out, lse in results:
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("arch", ARCHS)
def test_splits(arch):
    """No more than keep HBM busy, and a workspace that no length of the keys changes."""
    chosen = {}
    for heads, batch in product((16, 32, 64, 128), (1, 32, 200)):
        q = torch.empty(batch, 1, heads, 576, dtype=torch.bfloat16)
        latent = torch.empty(batch, 64, 1, 576, dtype=torch.bfloat16)
        with emulate(arch):
            plan = explain(q, latent, latent[..., :512]).plan
        row = plan.traits.row()._replace(waves_of_simd=1)
        choice = SplitChoice(plan.problem, plan.target, row, 1, 512, are_latents=True)
        splits = [choice.splits(1, seqlen_k) for seqlen_k in (0, 33, 500, 4096, 50000)]
        chosen[heads, batch] = [x.num_splits for x in splits]
        assert splits[0].num_splits == 1
        assert len({x.workspace_floats for x in splits if x.num_splits > 1}) <= 1
        for x in splits:
            least = plan.traits.tile.tile_q * (512 + 2) * x.num_splits
            assert x.num_splits == 1 or x.workspace_floats >= batch * least
    # By the cost model, of which the amd-model suite has the times.
    assert [chosen[heads, 32][3] for heads in (16, 32, 64, 128)] == {
        "gfx942": [5, 5, 7, 4],
        "gfx950": [5, 6, 8, 4],
    }[arch]
    assert chosen[16, 200] == [1] * 5
    # As soon as tiles gained take longer than combining, and evenly.
    assert chosen[16, 1] == {"gfx942": [1, 1, 16, 32, 121], "gfx950": [1, 1, 16, 32, 121]}[arch]


@pytest.mark.parametrize(
    ("batch", "heads", "num_splits"),
    [(1, 16, 4), (1, 128, 8), (1, 16, 16), (1, 128, 32), (1, 16, 64), (32, 64, 9)],
)
@pytest.mark.sample("arch", ARCHS, 1)
def test_combining_takes_what_is_estimated(arch, batch, heads, num_splits):
    """By the cost model, give or take a round of loads, which is the least that is counted.

    Also where more workgroups combine than run at a time.
    """
    q = torch.zeros(batch, 1, heads, 576, dtype=torch.bfloat16)
    latent = torch.zeros(batch, 32 * num_splits, 1, 576, dtype=torch.bfloat16)
    with emulate(arch, profile=True, sample=1) as emulated:
        plan = explain(q, latent, latent[..., :512]).plan
        fmha_fwd(q, latent, latent[..., :512], num_splits=num_splits)
        _, combine = emulated.profiles()
    row = plan.traits.row()
    policy = SplitChoice(plan.problem, plan.target, row, 1, 512, are_latents=True).policy
    # The other kernel writes what is read here.
    written = 2 * policy.key_split.floats_of_rows(heads, num_splits) * policy.key_split.byte_seconds
    seconds = policy.seconds_to_combine(1, num_splits) - LAUNCH_GAP_SECONDS - written
    assert seconds == pytest.approx(estimate_of(combine).seconds, abs=policy.latents.on_the_way)


@pytest.mark.sample("arch", ARCHS, 1)
def test_keys_are_read_once(arch):
    """Whatever a workgroup has of rows: longer sequences read their rows, and nothing else."""
    for heads in (16, 64):
        loaded = []
        for keys in (512, 1024):
            q = torch.zeros(1, 1, heads, 576, dtype=torch.bfloat16)
            latent = torch.zeros(1, keys, 1, 576, dtype=torch.bfloat16)
            with emulate(arch, profile=True) as emulated:
                fmha_fwd(q, latent, latent[..., :512], num_splits=1)
                (profile,) = emulated.profiles()
            loaded.append(profile.work.global_bytes)
        assert loaded[1] - loaded[0] == 512 * 576 * 2


@pytest.mark.parametrize("heads", [16, 40])
@pytest.mark.sample("arch", ARCHS, 1)
def test_hidden_values_and_later_maxima(rng, arch, heads):
    """Rows that see nothing are 0 beside values of NaN, and scores that grow rescale the output."""
    q, latent = random_rows(rng, torch.bfloat16, 1, 3, heads, 576), torch.full((1, 97, 1, 576), 4.0)
    latent = latent.bfloat16()
    latent[:, 64:] += q[:, :1, :1] * 8
    for options in ({"num_splits": 1}, {"num_splits": 3}):
        actual = run(arch, q, latent, latent[..., :512], softmax_scale=SCALE, **options)
        expected = attention(q, latent, latent[..., :512], softmax_scale=SCALE)
        assert_near(actual, expected, q, latent, latent[..., :512], {"softmax_scale": SCALE})
        blind = torch.full((1, 2, 1, 576), torch.nan).bfloat16()
        blind[:, 0] = 1
        out, lse = run(arch, q, blind, blind[..., :512], mask=2, **options)
        assert out[:, 0].eq(0).all()
        assert lse[..., 0].eq(-torch.inf).all()


@pytest.mark.sample(
    ("arch", "dtype", "row_blocks", "access", "is_masked"),
    [
        (arch, dtype, row_blocks, access, is_masked)
        for arch in ARCHS
        for dtype in ("bf16", "fp16", "fp8", "bf16 beside fp8", "fp16 beside fp8")
        for row_blocks in (1, 2, 4)
        for access in get_args(Access)
        if "packed" not in access  # those have another kernel
        for is_masked in (False, True)
    ],
    2,
    is_fixed=True,
)
def test_nothing_is_spilled(arch, dtype, row_blocks, access, is_masked):
    fp8 = "fp8_e4m3fnuz" if arch == "gfx942" else "fp8_e4m3fn"
    name, _, others = dtype.replace("fp8", fp8).partition(" beside ")
    traits = ForwardTraits(
        *(arch, name, 576, 512, "gm1", "rtne", is_masked, access, ModifierTraits("compiled")),
        kv_dtype=others or name,
        has_descales="fp8" in dtype,
        stacks_heads=True,
        row_blocks=row_blocks,
    )
    assert_nothing_is_spilled(kernel_spec(traits), traits.name, traits.combine_name)


def test_which_calls_are_meant(rng):
    """Those of few rows, whose values are the keys' columns; the same shapes otherwise are not."""
    arch = "gfx942"
    latent = random_rows(rng, torch.bfloat16, 2, 70, 1, 576)
    for seqlen_q, heads, blocks in ((1, 16, 1), (1, 17, 2), (2, 16, 2), (1, 33, 4), (4, 128, 4)):
        q = random_rows(rng, torch.bfloat16, 2, seqlen_q, heads, 576)
        with emulate(arch):
            plan = explain(q, latent, latent[..., :512]).plan
        assert plan.kernel.endswith(f"stacked_latent{blocks}_gm0_{arch}")
        assert "latent_fwd" in str(plan.source)
    q = random_rows(rng, torch.bfloat16, 2, 1, 16, 576)
    for k, v, options in (
        (latent, latent.clone()[..., :512], {}),
        (latent, latent[..., 1:513], {}),
        (latent, latent[..., :256], {}),
        (latent, latent[..., :513], {}),
        (latent, latent[..., :512], {"sink": torch.zeros(16)}),
        (latent, latent[..., :512], {"dropout_p": 0.5}),
    ):
        assert not is_latent(arch, q, k, v, **options)
    for dtype, is_served in ((FP8_DTYPES[arch], True), (torch.int8, False)):
        of_8_bits = random_rows(rng, dtype, 2, 70, 1, 576)
        assert is_latent(arch, q, of_8_bits, of_8_bits[..., :512]) == is_served
    for shape in ((2, 1, 1, 576), (2, 65, 16, 576)):  # heads that share nothing, and many queries
        q = random_rows(rng, torch.bfloat16, *shape)
        assert not is_latent(arch, q, latent, latent[..., :512])


def test_views_and_copies_in_turn(rng):
    """Values elsewhere, of the same strides, are not taken for those of the keys."""
    q, latent, other = (random_rows(rng, torch.bfloat16, 1, n, 16, 576) for n in (1, 40, 40))
    latent, other = latent[:, :, :1], other[:, :, :1]
    with emulate("gfx950"):  # which keeps its calls
        for values in (latent, other, latent, other):
            v = values[..., :512]
            actual = fmha_fwd(q, latent, v, softmax_scale=SCALE, return_lse=True)
            expected = attention(q, latent, v, softmax_scale=SCALE)
            assert_near(actual, expected, q, latent, v, {"softmax_scale": SCALE})
