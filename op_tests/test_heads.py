"""qk_norm_rope_cache against float64."""

from typing import Any

import pytest
import torch
from drawn_rows import drawn_index
from head_calls import VECTORS, apart, check_call, draw_call, draw_kind
from norm_reference import LARGEST
from packed_pages import packed_keys, packed_values

import jitfmha
from jitfmha import aiter  # noqa: A004
from jitfmha.rows.heads.interface import qk_norm_rope_cache


def test_drawn_calls(isa, dtypes, rng, poisoned_memory):
    for dtype in dtypes:
        kind = draw_kind(rng, dtype, list(LARGEST))
        for _ in range(12):
            check_call(draw_call(rng, kind), inplace=bool(drawn_index(rng, 2)))


def test_a_whole_prompt(rng, poisoned_memory):
    """Which several threads have and whose results go past the caches."""
    qkv = torch.randn(3000, 26, 128, generator=rng)
    angles = torch.rand(3000, 64, generator=rng) * 6
    weights = torch.randn(2, 128, generator=rng)
    caches = {name: torch.zeros(200, 16, 2, 128) for name in ("k_cache", "v_cache")}
    check_call(
        {
            **dict(zip("qkv", qkv.split([22, 2, 2], 1), strict=True)),
            **dict(zip(("q_weight", "k_weight"), weights, strict=True)),
            **caches,
            "eps": 1e-6,
            "cos": angles.cos(),
            "sin": angles.sin(),
            "positions": torch.arange(3000),
            "interleaved": False,
            "slots": torch.randperm(3200, generator=rng)[:3000].sub(100),
        }
    )


def test_numbers_that_do_not_follow_each_other(rng):
    """Of vectors, of a table by columns, and of the rows of a wider one."""
    q, k, v = torch.randn(3, 2, 5, 2, 8, generator=rng)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "interleaved": False, "eps": 1e-6}
    given |= dict(zip(("q_weight", "k_weight"), torch.randn(2, 8, generator=rng), strict=True))
    given |= dict(zip(("cos", "sin"), torch.rand(2, 26, 4, generator=rng), strict=True))
    given |= dict(zip(("k_cache", "v_cache"), torch.zeros(2, 8, 8, 2, 8), strict=True))
    positions, slots = torch.randperm(64, generator=rng)[:20].view(2, 2, 5)
    lengths, table = torch.tensor([3, 1]).int(), torch.randperm(8, generator=rng).view(2, 4).int()
    for place in (
        {"positions": positions % 9, "slots": slots},
        {"cache_seqlens": lengths + 18, "block_table": table},
        {"cache_seqlens": lengths, "cache_batch_idx": torch.tensor([5, 2]).int()},
    ):
        call = given | place
        for name in VECTORS & call.keys():
            x = call[name]
            wide = torch.cat([x, torch.full_like(x, -9)], dim=-1)[..., : x.shape[-1]]
            for laid_out in (apart(x), wide, x.t().contiguous().t()):
                check_call(call | {name: laid_out})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_numbers_that_are_not_finite(dtype):
    check_not_finite(dtype)


def check_not_finite(dtype: torch.dtype) -> None:
    x = torch.tensor([[[torch.inf, torch.nan, -torch.inf, 1.0]]])
    x[..., 1] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # NaN of any bits
    caches = torch.zeros(2, 1, 1, 1, 4).to(dtype).unbind()
    slots = torch.zeros(1, dtype=torch.int64)
    qk_norm_rope_cache(k=x, v=x, k_cache=caches[0], v_cache=caches[1], slots=slots)
    nan = 0 if dtype == torch.int8 else torch.nan
    wanted = torch.tensor([LARGEST[dtype], nan, -LARGEST[dtype], 1.0])
    torch.testing.assert_close(caches[0].float().flatten(), wanted, equal_nan=True)


def test_calls_that_differ_in_one_argument(rng):
    """The second is not taken for the first, which is there."""
    q, k, weight, cos = (torch.randn(9, 1, 8, generator=rng) for _ in range(4))
    first = {"q": q, "k": k, "q_weight": weight[0, 0], "eps": 1e-5}
    first |= {"cos": cos[:, 0, :2], "sin": cos[:, 0, 2:4], "interleaved": False}
    for changed in (
        *({"eps": 0.5}, {"interleaved": True}, {"cos": cos[:, 0, :4], "sin": cos[:, 0, 4:]}),
        *({"positions": torch.arange(9).flip(0)}, {"q": q[:, :, :4], "k": k[..., :4]}),
    ):
        if "q" in changed:
            changed["q_weight"] = first["q_weight"][:4]
        for given in (first, first | changed):
            check_call({"cache_seqlens": torch.zeros(1).int(), **given})


def test_what_is_written_is_another_version(rng):
    """So that autograd does not take it for what it was: where it was saved, backward refuses."""
    x, weight = torch.randn(3, 1, 8, generator=rng), torch.ones(8)
    q, *caches = (torch.zeros(1, 3, 1, 8, requires_grad=True) * 1 for _ in range(3))
    for written in (q, *caches):
        saved = written.square().sum()
        with torch.no_grad():
            qk_norm_rope_cache(q[0], q_weight=weight, inplace=True)
            named = dict(zip(("k_cache", "v_cache"), caches, strict=True))
            qk_norm_rope_cache(k=x, v=x, **named, slots=torch.arange(3))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()


def test_nothing_to_do_gives_what_came():
    q = torch.zeros(2, 3, 8)
    assert qk_norm_rope_cache(q) == (q, None)


def test_compiled(rng):
    """Without graph breaks, in place and not."""
    torch._dynamo.reset()
    qkv = torch.randn(2, 3, 4, 16, generator=rng)
    weight, cos = torch.rand(16, generator=rng), torch.rand(9, 8, generator=rng)

    def call(qkv: torch.Tensor, caches: torch.Tensor, inplace: bool) -> Any:
        q, k, v = qkv[:, :, :2], qkv[:, :, 2:3], qkv[:, :, 3:]
        lengths = torch.tensor([1, 4], dtype=torch.int32)
        return jitfmha.qk_norm_rope_cache(
            *(q, k, v),
            q_weight=weight,
            cos=cos,
            sin=cos,
            k_cache=caches[0],
            v_cache=caches[1],
            cache_seqlens=lengths,
            inplace=inplace,
        )[0]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for inplace in (False, True):
        results = []
        for function in (call, compiled):
            written = qkv.clone(), torch.zeros(2, 2, 8, 1, 16)
            results.append((function(*written, inplace), *written))
        torch.testing.assert_close(*results)


def test_aiter_writes_into_caches(rng):
    """By slots, of which there may be fewer than tokens, and none of some."""
    k, v = torch.randn(2, 5, 2, 32, generator=rng).bfloat16()
    slots, taken = torch.tensor([17, -1, 40, 3]), [17, 40, 3]
    for dtype, asked in ((torch.bfloat16, "auto"), (torch.uint8, "fp8")):
        caches = torch.zeros(2, 3, 16, 2, 32, dtype=dtype).unbind()
        scales = torch.tensor([0.25]), torch.tensor([0.5, 1.0])
        aiter.reshape_and_cache_flash(k, v, *caches, slots, asked, *scales)
        packed = packed_keys(caches[0]).zero_(), packed_values(caches[1]).zero_()
        aiter.reshape_and_cache(k, v, *packed, slots, asked, *scales, asm_layout=True)
        for x, new, scale in zip(caches, (k, v), scales, strict=True):
            wanted = torch.zeros_like(x).flatten(0, 1)
            made = new[[0, 2, 3]]
            if dtype == torch.uint8:
                made = (made.float() / scale[:, None]).to(torch.float8_e4m3fn).view(dtype)
            wanted[taken] = made
            assert torch.equal(x.flatten(0, 1), wanted)
        assert torch.equal(packed[0], packed_keys(caches[0]))
        assert torch.equal(packed[1], packed_values(caches[1]))
    with pytest.raises(ValueError, match=r"is 'fp8'; key_cache is a torch\.bfloat16"):
        aiter.reshape_and_cache_flash(k, v, k[None], v[None], slots, "fp8", *scales)
    with pytest.raises(NotImplementedError, match="kv_cache_dtype is 'int4'"):
        aiter.reshape_and_cache_flash(k, v, *caches, slots, "int4", *scales)
    of_int8 = torch.zeros(3, 16, 2, 32, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"is 'fp8'; value_cache is a torch\.int8"):
        aiter.reshape_and_cache_flash(k, v, caches[0], of_int8, slots, "fp8")
    names = "key", "value", "key_cache", "value_cache", "slot_mapping"
    good = k, v, *torch.zeros(2, 3, 16, 2, 32, dtype=k.dtype).unbind(), slots
    for at, name in enumerate(names):
        for bad in (None, torch.tensor(7), good[at].to(torch.complex64)):
            changed: Any = [*good[:at], bad, *good[at + 1 :]]
            with pytest.raises((TypeError, ValueError, NotImplementedError), match=rf"^{name} "):
                aiter.reshape_and_cache_flash(*changed, "auto")
    with pytest.raises(NotImplementedError, match="asm_layout is False"):
        aiter.reshape_and_cache(k, v, *caches, slots, "auto")


Q, K, COS = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 2, 8), torch.ones(9, 4)
LENGTHS, TABLE = torch.tensor([0, 5]).int(), torch.zeros(2, 1, dtype=torch.int32)
CACHE: dict[str, Any] = {"v": K, "k_cache": torch.zeros(2, 9, 2, 8)}
CACHE["v_cache"] = CACHE["k_cache"].clone()
BEHIND = {**CACHE, "cache_seqlens": LENGTHS}
FP8 = {name: CACHE[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
OF_BYTES = FP8["v_cache"].view(torch.float32).flatten()[:24].view(1, 3, 1, 8).expand(2, 3, 2, 8)
LEAF = torch.zeros(2, 3, 2, 8, requires_grad=True)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"q": None, "k": None}, ValueError, "q, k and v are None"),
        ({"q": [1]}, TypeError, "q must be a torch.Tensor, got list"),
        ({"q": Q.double()}, NotImplementedError, "q has dtype torch.float64"),
        ({"k": K.half()}, NotImplementedError, "k has dtype torch.float16"),
        ({"k": K[:, 1:]}, ValueError, r"k has shape \(2, 2, 2, 8\)"),
        ({"k": K[..., :6]}, ValueError, "hdim of 8, k of 6"),
        ({"q": torch.zeros(1, 1, 577)}, ValueError, "hdim of 577"),
        ({"q": Q.transpose(2, 3), "k": None}, ValueError, "q has stride"),
        (
            {"q": Q[:1, :1].expand(2, 3, 4, 8), "q_weight": torch.ones(8), "inplace": True},
            *(ValueError, "elements are one"),
        ),
        ({"q_weight": torch.zeros(7)}, ValueError, r"q_weight has shape \(7,\)"),
        ({"q_weight": torch.zeros(8).half()}, ValueError, "q_weight has dtype torch.float16"),
        ({"cos": COS}, ValueError, "cos and sin go together"),
        ({"cos": COS.double(), "sin": COS.double()}, NotImplementedError, "torch.float64"),
        ({"cos": COS[:, [0] * 5], "sin": COS[:, [0] * 5]}, ValueError, r"\(9, 5\).*of q and k, 8"),
        ({"cos": COS[:2], "sin": COS[:2]}, ValueError, "has 2 rows.*position 2"),
        ({"positions": torch.zeros(2, 3)}, TypeError, "positions must be torch.int64"),
        ({"positions": torch.zeros(6).long()}, ValueError, r"positions has shape \(6,\)"),
        (CACHE, ValueError, "needs slots, or cache_seqlens"),
        ({"v": K}, ValueError, "v .*needs k_cache"),
        ({**BEHIND, "v": None}, ValueError, "needs k and v"),
        ({**BEHIND, "v_cache": torch.zeros(2, 8, 2, 8)}, ValueError, r"v_cache.*\(2, 8, 2, 8\)"),
        ({**BEHIND, **{x: CACHE[x].half() for x in FP8}}, NotImplementedError, "torch.float16"),
        ({**BEHIND, "cache_seqlens": LENGTHS + 2}, ValueError, "a token is key 9; .*room for 9"),
        ({**BEHIND, "block_table": TABLE + 2}, ValueError, "names page 2; k_cache has 2 pages"),
        ({**BEHIND, "block_table": TABLE[0, 0]}, ValueError, r"block_table has shape \(\)"),
        ({**BEHIND, "cache_batch_idx": LENGTHS}, ValueError, "cache_batch_idx names sequence 5"),
        ({**BEHIND, "slots": torch.full((2, 3), 18)}, ValueError, "has slot 18; k_cache has 18"),
        ({**BEHIND, "v_cache": torch._neg_view(CACHE["v_cache"])}, ValueError, "negative bit"),
        (
            {**BEHIND, "k_cache": CACHE["k_cache"][:1].expand(2, -1, -1, -1)},
            *(ValueError, r"k_cache has strides \(0, .*elements are one"),
        ),
        ({**BEHIND, "k_scale": torch.ones(1)}, ValueError, "k_scale is the scale of 8 bits"),
        ({**BEHIND, **FP8, "v_scale": torch.ones(3)}, ValueError, r"v_scale.*shape \(3,\)"),
        ({"eps": -1.0}, ValueError, "eps is -1.0"),
        ({"k": Q, "q_weight": torch.ones(8), "inplace": True}, ValueError, "q is .* memory with k"),
        ({**BEHIND, "k": CACHE["k_cache"][:, 5:8]}, ValueError, "k_cache is .* memory with k"),
        ({**BEHIND, "v": CACHE["k_cache"][:, 5:8]}, ValueError, "k_cache is .* memory with v"),
        (
            {**BEHIND, "k": K + 1, "v_cache": CACHE["k_cache"]},
            ValueError,
            "k_cache is .* with v_cache",
        ),
        ({**BEHIND, **FP8, "v": OF_BYTES}, ValueError, "v_cache is .* memory with v"),
        ({"k": LEAF}, NotImplementedError, "k requires grad"),
        ({"cos": COS, "sin": torch.nn.Parameter(COS)}, NotImplementedError, "sin requires grad"),
        ({**BEHIND, "k_cache": LEAF}, NotImplementedError, "k_cache requires grad"),
        ({"interleaved": 1}, TypeError, "interleaved must be a bool"),
    ],
)
def test_refusals_name_the_argument_and_its_value(changes, error, text):
    """And write nothing."""
    with pytest.raises(error, match=text):
        qk_norm_rope_cache(**({"q": Q, "k": K} | changes))
    assert not CACHE["k_cache"].any()


def test_what_lies_between_other_numbers_shares_no_memory(rng):
    """Parts of packed tensors, and values that are the first columns of keys, as of a latent."""
    qkv, caches = torch.randn(5, 5, 8, generator=rng), torch.zeros(1, 9, 2, 2, 8).unbind(2)
    own = qkv.clone()
    for k, v, v_cache in (
        (qkv[:, 1:3], qkv[:, 3:], caches[1]),
        (qkv[:, 1:3], qkv[:, 1:3, :4], caches[0][..., :4]),
    ):
        given = {"k_cache": caches[0], "v_cache": v_cache, "cache_seqlens": torch.ones(1).int()}
        qk_norm_rope_cache(qkv[:, :1], k, v, q_weight=torch.ones(8), inplace=True, **given)
        assert torch.equal(caches[0][0, 1:6], own[:, 1:3])
        assert torch.equal(v_cache[0, 1:6], v)
    given["k_weight"] = torch.ones(8)  # so that keys are no longer what values are
    with pytest.raises(ValueError, match="k_cache is written and shares memory with v_cache"):
        qk_norm_rope_cache(None, k, v, **given)


def test_vmap_is_refused():
    with pytest.raises(NotImplementedError, match=r"torch\.vmap does not serve"):
        torch.vmap(lambda q: qk_norm_rope_cache(q, cos=COS, sin=COS)[0])(Q[:, None])


def test_tangents_are_refused():
    """They would be lost."""
    with torch.autograd.forward_ad.dual_level():
        k = torch.autograd.forward_ad.make_dual(K, K)
        with pytest.raises(NotImplementedError, match="k carries a forward-mode tangent"):
            qk_norm_rope_cache(Q, k, cos=COS, sin=COS)
        caches = [CACHE[name].clone() for name in ("k_cache", "v_cache")]
        with pytest.raises(NotImplementedError, match="k carries a forward-mode tangent"):
            jitfmha.flash_attn_with_kvcache(Q, *caches, k, K, cache_seqlens=1)
