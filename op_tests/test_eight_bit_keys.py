"""Keys and values of 8 bits beside queries of more, whose bits all count."""

from typing import Any

import pytest
import torch
from closeness import assert_close
from descaled_calls import random_scales, scaled
from fresh_calls import fresh_calls
from inputs import DTYPES, EIGHT_BITS, SIZES, prefix_sums, random_qkv
from packed_calls import RAGGED, packed
from refusals import refused
from score_features import FEATURES, Shape
from torch import Tensor
from untyped import explain, fmha_fwd, warmup

from jitfmha import emulate
from jitfmha.cli import main
from jitfmha.kernels.cpu import CpuPlan
from jitfmha.planning.target import cpu_isas_here
from jitfmha.problem.float64_reference import attention, attention_packed, unpaged

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HDIM, HDIM_V = 37, 21
KINDS = [(dtype, kv_dtype) for dtype in DTYPES for kv_dtype in EIGHT_BITS]
DRAWN_ISA = pytest.mark.sample("an_isa", list(cpu_isas_here()), 1, shared_by="8-bit keys")
DRAWN_KIND = pytest.mark.sample(("dtype", "kv_dtype"), KINDS, 1, shared_by="8-bit keys")


def of_8_bits(rng: torch.Generator, kv_dtype: str, *shape: int) -> Tensor:
    """Normal numbers, or whole ones over the whole range."""
    if kv_dtype == "int8":
        return torch.randint(-128, 128, shape, generator=rng, dtype=torch.int8)
    return torch.randn(shape, generator=rng).to(EIGHT_BITS[kv_dtype])


def size_of(kv_dtype: str) -> float:
    """Of scales that make normal numbers."""
    return 1 / 64 if kv_dtype == "int8" else 1.0


def scales_of_keys(rng: torch.Generator, kv_dtype: str, form: str, *heads: int, batch: int) -> Any:
    scales = random_scales(rng, form, *heads, batch=batch, size=size_of(kv_dtype))
    del scales["q_descale"]
    return scales


@DRAWN_ISA
@DRAWN_KIND
def test_batch_mode(rng, an_isa, dtype, kv_dtype):
    for sizes in SIZES:
        q, *keys = random_qkv(rng, sizes, hdim=HDIM, hdim_v=HDIM_V, dtype=DTYPES[dtype])
        tensors = (q, *(of_8_bits(rng, kv_dtype, *x.shape) for x in keys))
        for form in ("one", "each sequence and key head", "each head"):
            scales = scales_of_keys(rng, kv_dtype, form, *sizes[2:], batch=2)
            with fresh_calls(an_isa):
                actual = fmha_fwd(*tensors, mask="causal", return_lse=True, **scales)
            expected = attention(*tensors, mask="causal", **scales)
            assert_close(actual, expected, *scaled(tensors, scales), dtype=q.dtype)


@DRAWN_KIND
def test_group_mode_with_all_features(rng, dtype, kv_dtype):
    call = packed(rng, *RAGGED, hdim=HDIM, hdim_v=HDIM_V, dtype=DTYPES[dtype])
    call.k, call.v = (of_8_bits(rng, kv_dtype, *x.shape) for x in (call.k, call.v))
    batch, longest = len(RAGGED[0]), max(RAGGED[1])
    scales = scales_of_keys(rng, kv_dtype, "each sequence and key head", 4, 2, batch=batch)
    for features in ({"mask": "causal"}, None):
        shape = Shape(batch, 4, call.q.shape[0], longest, call.q.dtype, rng, is_group=True)
        options = scales | (features or FEATURES["everything"](shape))
        actual, expected = call.call(max_seqlen_k=longest, **options), call.expected(**options)
        bounds = scaled(call.qkv, scales)
        dropout_p = options.get("dropout_p", 0.0)
        assert_close(actual, expected, *bounds, dropout_p=dropout_p, dtype=call.q.dtype)


@pytest.mark.sample("page_size", [1, 7, 16, 128], 1)
@DRAWN_KIND
def test_pages(rng, dtype, kv_dtype, page_size):
    """With key splits, of few and of many queries."""
    lengths_q, lengths_k = [1, 4, 40, 0], [300, 33, 129, 20]
    most = -(-max(lengths_k) // page_size)
    table = torch.randint(most + 3, (4, most), generator=rng, dtype=torch.int32)
    q = torch.randn(sum(lengths_q), 4, HDIM, generator=rng).to(DTYPES[dtype])
    k, v = (of_8_bits(rng, kv_dtype, most + 3, page_size, 2, x) for x in (HDIM, HDIM_V))
    scales = scales_of_keys(rng, kv_dtype, "each head", 4, 2, batch=4)
    groups = {"cu_seqlens_q": prefix_sums(lengths_q), "cu_seqlens_k": prefix_sums(lengths_k)}
    rows = [unpaged(x, table, lengths_k) for x in (k, v)]
    starts = (x.tolist()[:-1] for x in groups.values())
    expected = attention_packed(q, *rows, lengths_q, lengths_k, *starts, mask=2, **scales)
    for num_splits in (0, 3):
        actual = fmha_fwd(
            *(q, k, v),
            **(groups | scales),
            block_table=table,
            mask=2,
            num_splits=num_splits,
            return_lse=True,
        )
        assert_close(actual, expected, *scaled((q, *rows), scales), dtype=q.dtype)


@pytest.mark.parametrize("target", [None, "gfx942", "gfx950"])
@pytest.mark.sample("dtype", ["bf16", "fp16"], 1)
@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_all_bits_of_queries_count(rng, target, dtype, seqlen_q):
    """The score of a single key is its lse: as exact as sums of float32 are."""
    kv_dtype = torch.float8_e4m3fnuz if target == "gfx942" else torch.float8_e4m3fn
    q = torch.randn(2, seqlen_q, 4, 64, generator=rng).to(DTYPES[dtype])
    k, v = (torch.randn(2, 1, 4, 64, generator=rng).to(kv_dtype) for _ in "kv")
    options: dict[str, Any] = {"softmax_scale": 1.0, "k_descale": torch.full((1,), 0.75)}
    with fresh_calls() if target is None else emulate(target):
        out, lse = fmha_fwd(q, k, v, return_lse=True, **options)
    products = 0.75 * q.double() * k.double()
    bound = 2**-24 * (64 * products.abs().sum(-1)).mT
    assert ((lse.double() - products.sum(-1).mT).abs() <= bound).all()
    assert torch.equal(out.float(), v.float().expand_as(out))


# ---- What else knows of them ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float8_e4m3fn, torch.int8),
        (torch.int8, torch.float8_e4m3fn),
        (torch.float8_e4m3fn, torch.float8_e4m3fnuz),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float8_e5m2, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e8m0fnu),
        (torch.bfloat16, torch.uint8),
        (torch.bfloat16, torch.float16),
    ],
)
def test_what_goes_with_what(dtype, kv_dtype):
    q, k = torch.zeros(1, 3, 2, 8).to(dtype), torch.zeros(1, 3, 2, 8).to(kv_dtype)
    with refused(TypeError, "k has dtype", str(dtype), str(kv_dtype)):
        fmha_fwd(q, k, k)


def test_refusals():
    q, k = torch.zeros(1, 3, 2, 8).bfloat16(), torch.zeros(1, 9, 2, 8).to(torch.float8_e4m3fn)
    with refused(ValueError, "q_descale", "bfloat16"):
        fmha_fwd(q, k, k, q_descale=torch.ones(1))
    with refused(NotImplementedError, "backward", "fp8_e4m3fn"):
        fmha_fwd(q.requires_grad_(), k, k)
    with emulate("gfx942"), refused(NotImplementedError, "gfx942", "fp8_e4m3fn"):
        fmha_fwd(q.detach(), k, k)


def test_explanations_name_both_dtypes(capsys):
    q, k = torch.zeros(1, 3, 2, 8).half(), torch.zeros(1, 9, 2, 8).to(torch.float8_e4m3fnuz)
    with emulate("gfx942"):
        explanation = explain(q, k, k)
    assert explanation.plan.kernel.startswith("fmha_fwd_compiled_hd8x8_fp16_fp8kv_")
    assert "fp16, fp8_e4m3fnuz k and v" in str(explanation)
    sizes = ("--seqlen", "3", "--seqlen-k", "9", "--heads", "2", "--hdim", "8")
    flags = "explain", "--device", "gfx942", "--dtype", "fp16", "--kv-dtype", "fp8_e4m3fnuz"
    assert main([*flags, *sizes]) == 0
    assert explanation.plan.kernel in capsys.readouterr().out


def test_built_ahead(monkeypatch, capsys):
    """A pair of data types builds what such calls look up."""
    monkeypatch.setattr(CpuPlan, "specs", ())
    pair = "bf16", torch.float8_e4m3fn
    names = [x.name for x in warmup(dtypes=[pair], hdims=[8], masks=[0], modes=["gm0"])]
    q, k = (torch.zeros(1, 3, 2, 8).to(x) for x in (torch.bfloat16, torch.float8_e4m3fn))
    assert explain(q, k, k).plan.kernel in names
    flags = "--dtype", "bf16,fp8_e4m3fn", "--hdim", "8", "--mask", "none", "--mode", "gm0"
    assert main(["build", *flags]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in names)
    with refused(TypeError, "dtypes", "('bf16',)"):
        warmup(dtypes=[("bf16",)])
    with refused(TypeError, "k has dtype torch.bfloat16"):
        warmup(dtypes=[("int8", "bf16")], hdims=[8])
