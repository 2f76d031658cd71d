"""Latent attention in both forms against the float64 reference."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from inputs import DTYPES, prefix_sums
from torch import Tensor
from untyped import mla_absorbed_fwd, mla_fwd

import jitfmha.layers.mla
from jitfmha import emulate
from jitfmha.problem.float64_reference import Result, attention, attention_packed

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Whole vectors and a rest. Keys that are projected have head dimensions of other tests' kernels.
HDIM, HDIM_V, RANK, POSITIONAL = 29, 21, 50, 8
# seqlen_q, seqlen_k, heads: decoding, nothing, and what lies around tiles.
SIZES = [(1, 300, 13), (1, 1, 1), (3, 77, 2), (9, 0, 2), (0, 5, 2), (2, 129, 16), (70, 127, 3)]
FORMS = {"absorbed": True, "projected": False}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each form for all lengths, whichever is less work."""
    is_absorbed = FORMS[request.param]
    monkeypatch.setattr(jitfmha.layers.mla, "_is_absorbed_form_less_work", lambda *_: is_absorbed)
    return str(request.param)


def random_inputs(
    rng: torch.Generator,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    heads: int,
    dtype: str = "fp32",
) -> Inputs:
    """q_nope, q_pe, kv, k_pe, wkv_b; ``queries`` and ``keys`` are (batch, length), or (total,)."""
    shapes = (
        (*queries, heads, HDIM),
        (*queries, heads, POSITIONAL),
        (*keys, RANK),
        (*keys, POSITIONAL),
        (heads, HDIM + HDIM_V, RANK),
    )
    q_nope, q_pe, kv, k_pe, wkv_b = (torch.randn(x, generator=rng) for x in shapes)
    inputs = q_nope, q_pe, kv, k_pe, RANK**-0.5 * wkv_b
    return tuple(x.to(DTYPES[dtype]) for x in inputs)  # type: ignore[return-value]


def mla(
    q_nope: Tensor, q_pe: Tensor, kv: Tensor, k_pe: Tensor, wkv_b: Tensor, **options: Any
) -> Result:
    """MLA with the projections inside: out ``(b, sq, hq, hdim_v)`` and lse ``(b, hq, sq)``.

    q_nope is ``(b, sq, hq, hdim)``, q_pe ``(b, sq, hq, r)``, kv ``(b, sk, c)`` and k_pe
    ``(b, sk, r)``. ``wkv_b (hq, hdim + hdim_v, c)`` makes keys and values of the latent, for each
    head its own. The scale is ``1 / sqrt(hdim + r)`` by default.
    """
    hdim = q_nope.shape[-1]
    projected = torch.einsum("bjc,hdc->bjhd", kv.double(), wkv_b.double())
    positional = k_pe.double()[:, :, None].expand(-1, -1, q_pe.shape[2], -1)
    k = torch.cat([projected[..., :hdim], positional], dim=-1)
    q = torch.cat([q_nope, q_pe], dim=-1)
    return attention(q, k, projected[..., hdim:], **options)


def assert_close(
    actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype
) -> None:
    """Within the rounding of what is projected, and of the result; out alone, or with its lse."""
    assert len(actual) == len(expected)
    eps = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 2)
    for name, x, reference in zip(("out", "lse"), actual, expected, strict=False):
        assert x.dtype == (dtype if name == "out" else torch.float32)
        assert x.shape == reference.shape
        seen = reference > -torch.inf
        assert torch.equal(x > -torch.inf, seen)
        if seen.any():
            error = (x[seen] - reference[seen]).abs().max().item()
            bound = eps * (1 + reference[seen].abs().max().item())
            assert error <= bound, f"{name} is off by {error:.3g} > {bound:.3g}"


@pytest.mark.sample("dtype", list(DTYPES), 1)
def test_batch_mode(rng, form, dtype):
    for seqlen_q, seqlen_k, heads in SIZES:
        inputs = random_inputs(rng, (2, seqlen_q), (2, seqlen_k), heads, dtype)
        actual = mla_fwd(*inputs, mask="causal", return_lse=True)
        assert_close(actual, mla(*inputs, mask=2), DTYPES[dtype])
        assert torch.equal(mla_fwd(*inputs, mask="causal"), actual[0])


@pytest.mark.usefixtures("form")
def test_any_strides_and_nothing_at_all(rng):
    inputs = random_inputs(rng, (2, 9), (2, 40), 3)
    expected = mla_fwd(*inputs, mask="causal")
    columns = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs]
    assert all(x.stride(-1) != 1 for x in columns)
    assert_close((mla_fwd(*columns, mask="causal"),), (expected.double(),), torch.float32)
    for batch, heads in ((0, 3), (2, 0)):
        inputs = random_inputs(rng, (batch, 9), (batch, 40), heads)
        assert mla_fwd(*inputs, mask="causal").shape == (batch, 9, heads, HDIM_V)


@pytest.mark.usefixtures("form")
def test_options(rng):
    """Those of ``fmha_fwd`` have their meaning."""
    inputs = random_inputs(rng, (2, 9), (2, 40), 4)
    options: dict[str, Any] = {"softmax_scale": 0.3, "mask": "b:7,2"}
    options["sink"] = torch.randn(4, generator=rng)
    actual = mla_fwd(*inputs, **options, return_lse=True)
    assert_close(actual, mla(*inputs, **options), torch.float32)
    actual = mla_fwd(*inputs, window_size=(7, 2), return_lse=True)
    assert_close(actual, mla(*inputs, mask="b:7,2"), torch.float32)


@pytest.mark.usefixtures("form")
def test_group_mode(rng):
    """Sequences without queries and without keys, whose keys lie in a cache with room for more."""
    lengths_q, lengths_k, room, heads = [1, 13, 0, 7], [70, 5, 4, 0], 80, 3
    starts = [room * n for n in range(len(lengths_k))]
    inputs = random_inputs(rng, (sum(lengths_q),), (room * len(lengths_k),), heads)
    q_nope, q_pe, kv, k_pe, wkv_b = inputs
    actual = mla_fwd(
        *inputs,
        mask="causal",
        return_lse=True,
        cu_seqlens_q=prefix_sums(lengths_q),
        cu_seqlens_k=prefix_sums(lengths_k),
        cu_seqlens_k_padded=prefix_sums([room] * len(lengths_k)),
    )
    projected = torch.einsum("tc,hdc->thd", kv.double(), wkv_b.double())
    positional = k_pe.double()[:, None].expand(-1, heads, -1)
    keys, values = torch.cat([projected[..., :HDIM], positional], -1), projected[..., HDIM:]
    starts_q = prefix_sums(lengths_q).tolist()[:-1]
    q = torch.cat([q_nope, q_pe], -1)
    lengths = lengths_q, lengths_k, starts_q, starts
    assert_close(actual, attention_packed(q, keys, values, *lengths, mask=2), torch.float32)


@pytest.mark.sample("dtype", list(DTYPES), 1)
def test_decoding_with_the_largest_latent(rng, dtype):
    """Keys and values are one tensor, which lies in a cache whose unused rows are NaN."""
    rank, r, heads, seqlen_k = 512, 64, 17, 130
    cache = torch.full((2, 200, rank + r), torch.nan).to(DTYPES[dtype])
    latent = cache[:, :seqlen_k]
    latent.copy_(torch.randn(latent.shape, generator=rng))
    q = torch.randn(2, 2, heads, rank + r, generator=rng).to(DTYPES[dtype])
    options = {"softmax_scale": 192**-0.5, "mask": 2}
    actual = mla_absorbed_fwd(q, latent, rank, return_lse=True, **options)
    keys = latent[:, :, None]
    expected = attention(q, keys, keys[..., :rank], **options)
    assert_close(actual, expected, DTYPES[dtype])
    out = torch.full_like(actual[0], 7.0)
    assert mla_absorbed_fwd(q, latent, rank, out=out, **options) is out
    assert torch.equal(out, actual[0])


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.sample("target", [None, "gfx942", "gfx950"], 1)
def test_absorbed_form_in_pages(rng, target, page_size):
    """Two queries of each sequence, which see the keys up to their own."""
    rank, r, heads, lengths = 512, 64, 3, (70, 2)
    pages = [-(-length // page_size) for length in lengths]
    latent = torch.randn(sum(pages), page_size, rank + r, generator=rng).bfloat16()
    table = torch.full((2, max(pages)), -1, dtype=torch.int32)
    table[0], table[1, : pages[1]] = torch.randperm(sum(pages)).split(pages)
    q = torch.randn(4, heads, rank + r, generator=rng).bfloat16()
    options = {"softmax_scale": 192**-0.5, "mask": 2}
    sums = {"cu_seqlens_q": prefix_sums([2, 2]), "cu_seqlens_k": prefix_sums(lengths)}
    with emulate(target) if target else nullcontext():
        actual = mla_absorbed_fwd(q, latent, rank, block_table=table, **sums, **options)
    for i, length in enumerate(lengths):
        rows = latent[table[i, : pages[i]].long()].flatten(0, 1)[:length]
        keys = rows[None, :, None]
        queries = q[None, 2 * i : 2 * i + 2]
        expected = attention(queries, keys, keys[..., :rank], **options)
        assert_close((actual[None, 2 * i : 2 * i + 2],), expected[:1], torch.bfloat16)


def test_the_latent_is_not_copied(rng, monkeypatch):
    seen: list[Tensor] = []
    monkeypatch.setattr(jitfmha.layers.mla, "fmha_fwd", lambda q, k, v, **_: seen.extend((k, v)))
    latent = torch.randn(2, 9, RANK + POSITIONAL, generator=rng)
    mla_absorbed_fwd(latent[:, :, None], latent, RANK, softmax_scale=1.0)
    assert [x.data_ptr() for x in seen] == [latent.data_ptr()] * 2
    assert [x.shape[-1] for x in seen] == [RANK + POSITIONAL, RANK]


@pytest.mark.parametrize(
    ("seqlen_q", "is_absorbed"), [(1, True), (22, True), (23, False), (40, False)]
)
def test_the_form_with_less_work_is_taken(rng, monkeypatch, seqlen_q, is_absorbed):
    """Decoding attends to the latent, in gm0 and in gm1; as many queries as keys do not."""
    heads_k = []

    def spy(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        heads_k.append(k.shape[-2])
        return torch.zeros(*q.shape[:-1], v.shape[-1]), torch.zeros(0)

    monkeypatch.setattr(jitfmha.layers.mla, "fmha_fwd", spy)
    mla_fwd(*random_inputs(rng, (3, seqlen_q), (3, 40), 5), return_lse=True)
    sums = {"cu_seqlens_q": prefix_sums([seqlen_q] * 3), "cu_seqlens_k": prefix_sums([40] * 3)}
    mla_fwd(*random_inputs(rng, (3 * seqlen_q,), (120,), 5), return_lse=True, **sums)
    assert heads_k == [1 if is_absorbed else 5] * 2


def gradients_of(result: Any, dout: Tensor, dlse: Tensor, inputs: list[Tensor]) -> Any:
    out, lse = result(*inputs)
    return torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), inputs)


def assert_gradients_close(actual: Any, expected: Any) -> None:
    for x, reference in zip(actual, expected, strict=True):
        error = (x - reference).abs().max().item()
        assert error <= 2e-5 * (1 + reference.abs().max().item())


@pytest.mark.usefixtures("form")
def test_gradients(rng):
    inputs = [x.requires_grad_() for x in random_inputs(rng, (2, 9), (2, 40), 3)]
    dout = torch.randn(2, 9, 3, HDIM_V, generator=rng)
    dlse = torch.randn(2, 3, 9, generator=rng)
    actual = gradients_of(lambda *x: mla_fwd(*x, mask=2, return_lse=True), dout, dlse, inputs)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    expected = gradients_of(lambda *x: mla(*x, mask=2), dout, dlse, doubles)
    assert_gradients_close(actual, expected)


def test_gradients_of_the_largest_latent(rng):
    """It gets those of keys and those of values."""
    rank, r = 512, 64
    q = torch.randn(1, 3, 5, rank + r, generator=rng).requires_grad_()
    latent = torch.randn(1, 70, rank + r, generator=rng).requires_grad_()
    options = {"softmax_scale": 192**-0.5, "mask": 2}
    dout, dlse = torch.randn(1, 3, 5, rank, generator=rng), torch.randn(1, 5, 3, generator=rng)
    actual = gradients_of(
        lambda q, x: mla_absorbed_fwd(q, x, rank, return_lse=True, **options),
        *(dout, dlse, [q, latent]),
    )
    doubles = [x.detach().double().requires_grad_() for x in (q, latent)]
    expected = gradients_of(
        lambda q, x: attention(q, x[:, :, None], x[:, :, None, :rank], **options),
        *(dout, dlse, doubles),
    )
    assert_gradients_close(actual, expected)


@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_compile(rng, seqlen_q):
    """Both forms, with their gradients."""
    torch._dynamo.reset()
    inputs = [x.requires_grad_() for x in random_inputs(rng, (2, seqlen_q), (2, 40), 3)]
    compiled = torch.compile(mla_fwd, fullgraph=True, backend="aot_eager")
    results = compiled(*inputs, mask=2, return_lse=True)
    assert_close(results, mla(*inputs, mask=2), torch.float32)
    actual = torch.autograd.grad(results[0].square().sum(), inputs)
    expected = torch.autograd.grad(mla_fwd(*inputs, mask=2).square().sum(), inputs)
    assert_gradients_close(actual, expected)


def test_an_amd_gpu_decodes_with_the_latent(rng, monkeypatch):
    """Its kernels have the head dimensions of DeepSeek's latent, forward and with 16 bits."""
    shapes = (1, 1, 2, 128), (1, 1, 2, 64), (1, 70, 512), (1, 70, 64), (2, 256, 512)
    inputs = [torch.randn(x, generator=rng) for x in shapes]
    inputs[-1] *= 512**-0.5
    hdims = []

    def recorded(*tensors: Tensor, **options: Any) -> Any:
        hdims.append(tensors[0].shape[-1])
        return jitfmha.fmha_fwd(*(x.detach() for x in tensors), **options)

    monkeypatch.setattr(jitfmha.layers.mla, "fmha_fwd", recorded)
    for dtype, needs_gradient in (
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        (torch.float32, False),
    ):
        given = [x.to(dtype).requires_grad_(needs_gradient) for x in inputs]
        with emulate("gfx942"):
            actual = mla_fwd(*given, return_lse=True)
        assert_close(actual, mla(*given), dtype)
    assert hdims == [576, 192, 192]


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


BROKEN: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q_nope": None}, TypeError, "q_nope must be a torch.Tensor, got NoneType"),
    ({"q_nope": zeros(2, HDIM)}, ValueError, "q_nope is .*; expected"),
    ({"q_pe": zeros(2, 9, POSITIONAL)}, ValueError, "q_pe is .* as many dimensions as q_nope"),
    ({"q_pe": zeros(2, 9, 2, POSITIONAL)}, ValueError, r"q_pe has shape \(2, 9, 2, 8\), q_nope"),
    ({"kv": zeros(2, 40, 1, RANK)}, ValueError, "kv is .*one dimension less"),
    ({"k_pe": zeros(2, 41, POSITIONAL)}, ValueError, r"k_pe has shape \(2, 41, 8\), kv \(2, 40"),
    ({"k_pe": zeros(2, 40, 7)}, ValueError, "k_pe has 7 columns, q_pe has 8"),
    (
        {"wkv_b": zeros(3, HDIM, RANK)},
        ValueError,
        r"wkv_b has shape \(3, 29, 50\); expected \(3, 29",
    ),
    ({"wkv_b": zeros(2, 50, RANK)}, ValueError, r"wkv_b has shape \(2, 50, 50\)"),
    ({"wkv_b": zeros(3, 50, 49)}, ValueError, r"wkv_b has shape \(3, 50, 49\)"),
    ({"kv": zeros(2, 40, RANK).half()}, TypeError, "kv has dtype torch.float16, q_nope has"),
    ({"kv": zeros(2, 40, RANK).to("meta")}, ValueError, "kv is on meta, q_nope on cpu"),
    ({"softmax_scale": 0.0}, ValueError, r"softmax_scale=0\.0"),
    ({"mask": "diagonal"}, ValueError, "mask='diagonal'"),
    ({"return_lse": 1}, TypeError, "return_lse must be a bool, got int"),
    ({"out": zeros(2, 9, 3, HDIM_V)}, TypeError, "mla_fwd has no argument out"),
    ({"scale": 1.0}, TypeError, "scale"),
]


@pytest.mark.parametrize(("changes", "error", "text"), BROKEN)
def test_errors(rng, changes, error, text):
    names = ("q_nope", "q_pe", "kv", "k_pe", "wkv_b")
    inputs = dict(zip(names, random_inputs(rng, (2, 9), (2, 40), 3), strict=True))
    with pytest.raises(error, match=text):
        mla_fwd(**(inputs | changes))


BROKEN_ABSORBED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rank": 50.0}, TypeError, r"rank must be an int, got 50\.0"),
    ({"rank": True}, TypeError, "rank must be an int, got True"),
    ({"rank": 0}, ValueError, "rank=0 must be between 1 and the 58"),
    ({"rank": 59}, ValueError, "rank=59"),
    ({"q": zeros(2, 9)}, ValueError, "q is .*; expected"),
    ({"latent": [1]}, TypeError, "latent must be a torch.Tensor, got list"),
    ({"latent": zeros(2, 40, 1, 58)}, ValueError, "latent is .*one dimension less"),
    ({"latent": zeros(2, 40, 57)}, ValueError, "latent has 57 columns, q has hdim 58"),
    ({"latent": zeros(3, 40, 58)}, ValueError, "batch size 3"),
    ({"q": zeros(1, 1, 1, 577), "latent": zeros(1, 1, 577)}, ValueError, "hdim .*577"),
    ({"softmax_scale": None}, TypeError, "softmax_scale is missing"),
    ({"softmax_scale": -1.0}, ValueError, r"softmax_scale=-1\.0"),
]


@pytest.mark.parametrize(("changes", "error", "text"), BROKEN_ABSORBED)
def test_errors_of_the_absorbed_form(changes, error, text):
    arguments = {"q": zeros(2, 9, 3, 58), "latent": zeros(2, 40, 58), "rank": 50}
    with pytest.raises(error, match=text):
        mla_absorbed_fwd(**({**arguments, "softmax_scale": 0.2} | changes))
