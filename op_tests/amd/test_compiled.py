"""The compiled kernels through the launcher, on the emulator with the sanitizer on.

A run takes a few drawn calls; `--exhaustive` takes thousands.
"""

import random

import pytest
import torch
from closeness import assert_close
from compiled_calls import (
    ARCHS,
    MODIFIERS,
    assert_nothing_is_spilled,
    check,
    check_pages,
    check_tensors,
    draw,
    forward_kernels,
    run,
)
from inputs import prefix_sums
from score_features import ALL_MODIFIERS, FEATURES, Shape, options_of
from untyped import explain, fmha_fwd

from jitfmha import dropout_randval, emulate
from jitfmha.jit.toolchain.device_hip import device_hip_in_words
from jitfmha.kernels.compiled import launch as compiled_launch
from jitfmha.kernels.compiled.traits import ForwardTraits, kernel_spec
from jitfmha.problem.float64_reference import attention

_THOUSANDS = 4000
# Which leave every key of a call some weight.
_TWO_FEATURES = ("softcap", "dropout")


@pytest.mark.sample("number", range(_THOUSANDS), 4)
def test_drawn_calls(rng, number):
    check(draw(random.Random(rng.initial_seed())), rng)


@pytest.mark.sample("number", range(_THOUSANDS), 4)
def test_drawn_calls_with_modified_scores(rng, number):
    check(draw(random.Random(rng.initial_seed()), MODIFIERS), rng)


@pytest.mark.sample("hdim", (32, 96, 120, 160, 256), 1)
def test_tiles_that_are_loaded_early(rng, hdim):
    """Beside the products that begin the output, that rescale it as maxima rise, and the others."""
    for keys in (1, 33, 200):
        q, k, v = (torch.randn(1, n, 1, hdim, generator=rng).bfloat16() for n in (140, keys, keys))
        k *= torch.linspace(0.1, 8, keys)[:, None, None].bfloat16()
        order = int(torch.randint(1 << 30, (), generator=rng))
        actual = run("gfx950", q, k, v, random_order=order, num_splits=1)
        assert_close(actual, attention(q, k, v), q, k, v)


@pytest.mark.sample("arch", ARCHS, 1)
def test_dropout_drops_what_it_drops_on_the_cpu(rng, arch):
    """With one value for each key, and 1 in it, the output has the kept probabilities."""
    batch, seqlen_q, heads, seqlen_k = 2, 33, 3, 70
    q, k = (torch.randn(batch, n, heads, 16, generator=rng).half() for n in (seqlen_q, seqlen_k))
    v = torch.eye(seqlen_k)[None, :, None].expand(batch, -1, heads, -1).half()
    state = torch.randint(-(2**62), 2**62, (2,), generator=rng)
    out, _ = run(arch, q, k, v, dropout_p=0.4, rng_state=state)
    kept = dropout_randval(state, batch, heads, seqlen_q, seqlen_k) <= 255 * 0.6
    assert torch.equal(out.transpose(1, 2) > 0, kept)


@pytest.mark.parametrize(("arch", "seqlen_q", "num_splits"), [("gfx942", 33, 1), ("gfx950", 1, 3)])
def test_an_infinite_sink_takes_everything(rng, arch, seqlen_q, num_splits):
    q, k, v = (torch.randn(1, n, 2, 24, generator=rng).bfloat16() for n in (seqlen_q, 100, 100))
    sink = torch.tensor([torch.inf, -torch.inf])
    out, lse = run(arch, q, k, v, sink=sink, num_splits=num_splits)
    plain, plain_lse = attention(q, k, v)
    assert (out[:, :, 0] == 0).all()
    assert (lse[:, 0] == torch.inf).all()
    assert_close((out[:, :, 1:], lse[:, 1:]), (plain[:, :, 1:], plain_lse[:, 1:]), q, k, v)


@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, -1e30])
def test_a_bias_of_huge_finite_floats_hides_nothing(rng, least):
    """Masks are often made of it: a row that has nothing else is the mean of all values."""
    q, k, v = (torch.randn(1, 40, 1, 32, generator=rng).bfloat16() for _ in range(3))
    bias = torch.full((1, 1, 40, 40), least)
    bias[..., 20:, :7] = 0
    out, _ = run("gfx950", q, k, v, bias=bias)
    exact, _ = attention(q, k, v, bias=bias)
    torch.testing.assert_close(out.double(), exact, atol=0.03, rtol=0)


@pytest.mark.sample("arch", ARCHS, 1)
def test_a_bias_whose_maximum_is_late_or_huge(rng, arch):
    """Tiles make no scores where the maximum so far serves them, and is not so large that they
    would be rounded apart."""
    late = torch.arange(200) >= 70
    # Of each head: moderate ones, and one that leaves nothing of the dot products.
    moderate = torch.stack([torch.where(late, 30.0, 0.0), torch.where(late, 0.0, -torch.inf)])
    huge = torch.stack([torch.full((200,), 1e30), torch.where(late, 1e30, 0.0)])
    drawn = torch.randn(1, 2, 40, 200, generator=rng)
    # fp16 has no room for probabilities by a maximum that is too small.
    for offsets, dtype in ((moderate, torch.float16), (huge, torch.bfloat16)):
        q, k, v = (torch.randn(1, n, 2, 24, generator=rng).to(dtype) for n in (40, 200, 200))
        bias = (drawn + offsets[:, None]).to(dtype)
        if offsets is moderate:
            check_tensors(arch, q, k, v, bias=bias)
        else:
            exact, actual = attention(q, k, v, bias=bias), run(arch, q, k, v, bias=bias)
            torch.testing.assert_close(actual[0].double(), exact[0], atol=0.01, rtol=0.01)
            torch.testing.assert_close(actual[1].double(), exact[1], atol=0, rtol=1e-6)


@pytest.mark.sample("arch", ARCHS, 1)
def test_a_bias_that_is_far_apart(rng, arch):
    """Between heads that are rows of one tile; lanes copy it one by one then."""
    far = 1 << 31  # elements: 4 GiB
    q = torch.randn(1, 3, 2, 24, generator=rng).bfloat16()
    k, v = (torch.randn(1, 70, 1, 24, generator=rng).bfloat16() for _ in range(2))
    memory = torch.empty(far + 3 * 70, dtype=torch.bfloat16)
    bias = memory.as_strided((1, 2, 3, 70), (0, far, 70, 1))
    bias.copy_(torch.randn(1, 2, 3, 70, generator=rng))
    check_tensors(arch, q, k, v, bias=bias)


def test_a_bias_that_has_no_room_in_lds(rng):
    """Beside the widest tiles of fp32, which take all that gfx942 has."""
    q, k, v = (torch.randn(1, n, 1, 256, generator=rng) for n in (5, 70, 70))
    bias = torch.randn(1, 1, 5, 70, generator=rng)
    check_tensors("gfx942", q, k, v, bias=bias)


@pytest.mark.sample("arch", ARCHS, 1)
def test_alibi_that_raises_the_maximum_late(rng, arch):
    """Behind the diagonal, where tiles do not look for it first: where a slope is negative."""
    slopes = torch.tensor([-1.0, -0.04, 0.4]) * (0.5 + torch.rand(3, generator=rng) / 2)
    # Of the last keys, and of all: there the first head prefers the last keys to those before.
    for queries, keys in ((33, 450), (300, 300)):
        lengths = (queries, keys, keys)
        q, k, v = (torch.randn(1, n, 3, 24, generator=rng).bfloat16() for n in lengths)
        check_tensors(arch, q, k, v, alibi_slopes=slopes)


@pytest.mark.sample("arch", ARCHS, 1)
def test_a_soft_cap_far_above_the_logits(rng, arch):
    """It changes nothing: what it is wrong by must not grow with it."""
    q, k, v = (torch.randn(1, 40, 1, 24, generator=rng).half() for _ in range(3))
    for softcap in (1024.0, 1e6):
        check_tensors(arch, q, k, v, logit_softcap=softcap)


@pytest.mark.sample(
    ("arch", "hdims", "is_masked", "access", "modifiers", "stacks_heads"),
    [
        case
        for case in forward_kernels(
            *((256, 256), (255, 251), (192, 192), (128, 224)),
            *((160, 128), (96, 96), (64, 64)),
        )
        # In packed pages keys of values lie side by side.
        if not {"packed_pages", "wide_packed_pages"}.intersection(map(str, case))
    ],
    2,
    is_fixed=True,
)
def test_nothing_is_spilled(arch, hdims, is_masked, access, modifiers, stacks_heads):
    traits = ForwardTraits(
        *(arch, "bf16", *hdims, "gm1", "rtne", is_masked, access, modifiers),
        has_large_softcap=modifiers == ALL_MODIFIERS,
        kv_dtype="bf16",
        stacks_heads=stacks_heads,
    )
    assert_nothing_is_spilled(kernel_spec(traits), traits.name, traits.combine_name)


def test_a_ready_kernel_is_the_first_choice(ready_first):
    """Also for a call that a compiled kernel served before with other strides."""
    q, v = (torch.zeros(1, 40, 1, hdim, dtype=torch.bfloat16) for hdim in (64, 96))
    with emulate("gfx942"):
        assert explain(q, q, q).plan.family == "ready"
        assert explain(q, q, v).plan.family == "compiled"


def test_explain_names_the_compiler():
    q = torch.zeros(1, 40, 1, 96, dtype=torch.bfloat16)
    with emulate("gfx942"):
        explanation = explain(q, q, q)
    assert explanation.remarks == (f"compiler for AMD GPUs: {device_hip_in_words()}",)
    assert f"note     {explanation.remarks[0]}" in str(explanation)


def test_rows_that_are_far_apart(rng):
    """A tile's keys reach further than a buffer's offsets; and back to rows that do not.

    With features their kernels find out anew what has no room in scalar registers.
    """
    far = 1 << 25  # elements: 32 of them are 2 GiB apart
    memory = torch.empty(33 * far, dtype=torch.bfloat16)
    k = memory.as_strided((1, 33, 1, 24), (0, far, 24, 1))
    q, v = (torch.randn(1, 33, 1, 24, generator=rng).bfloat16() for _ in range(2))
    k.copy_(torch.randn(1, 33, 1, 24, generator=rng))
    for keys in (k, k.contiguous(), k):
        check_tensors("gfx942", q, keys, v)
    shape = Shape(1, 1, 33, 33, q.dtype, rng)
    check_tensors("gfx950", q, k, v, **options_of(_TWO_FEATURES, shape))


@pytest.mark.sample(
    ("arch", "page_size", "features", "hdims"),
    [
        (arch, page_size, features, hdims)
        for arch in ARCHS
        for page_size in (1, 7, 16, 48, 300)
        for features in ((), *((feature,) for feature in FEATURES), _TWO_FEATURES)
        for hdims in ((24, 40), (21, 37))
    ],
    3,
)
def test_keys_in_pages(rng, arch, page_size, features, hdims):
    check_pages(arch, rng, page_size, hdims, features=features)


@pytest.mark.sample("arch", ARCHS, 1)
def test_keys_in_small_pages_with_features(rng, arch):
    """Their kernels find out anew what has no room in scalar registers."""
    check_pages(arch, rng, 7, (21, 37), features=_TWO_FEATURES)


def test_a_page_that_is_not_there(monkeypatch):
    q, k = torch.zeros(1, 1, 24).bfloat16(), torch.zeros(3, 4, 1, 24).bfloat16()
    keys = {"block_table": torch.tensor([[2, 3]], dtype=torch.int32)}
    sums = {"cu_seqlens_q": prefix_sums([1]), "cu_seqlens_k": prefix_sums([5])}
    with emulate("gfx942"):
        with pytest.raises(ValueError, match="names page 3 as page 1"):
            fmha_fwd(q, k, k, **keys, **sums)
        # Of a GPU nobody reads the table before: the kernel stays in the pages that there are.
        monkeypatch.setattr(compiled_launch, "check_pages", lambda *_: None)
        assert not fmha_fwd(q, k, k, **keys, **sums).any()


def test_the_last_key_of_a_tile_is_hidden_from_its_first_row(rng):
    q, k, v = (torch.randn(1, 64, 1, 24, generator=rng).bfloat16() for _ in range(3))
    for right in (30, 62):
        check_tensors("gfx950", q, k, v, mask=f"t:-1,{right}")


@pytest.mark.sample(("arch", "mask"), [(a, m) for a in ARCHS for m in ("b:3,0", "t:3,5")], 1)
def test_what_a_window_hides_from_all_is_not_read(arch, mask):
    """Tiles of keys before those that a tile of queries sees, or behind them."""
    q, k, v = (torch.ones(1, n, 1, 24).bfloat16() for n in (128, 300, 300))
    hidden = slice(160) if mask[0] == "b" else slice(160, None)
    for x in (k, v):
        x[:, hidden] = torch.nan
    out, _ = run(arch, q, k, v, mask=mask)
    assert (out == 1).all()
