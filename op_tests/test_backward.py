"""The backward pass on the CPU against the gradients of the float64 reference."""

import sys
from itertools import product
from typing import Any

import pytest
import torch
from backward_calls import rounded
from fresh_calls import fresh_calls
from inputs import DTYPES, Sizes, lay_out, prefix_sums, random_qkv
from packed_calls import packed
from refusals import Refusal, refused
from subprocesses import run_python
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from untyped import fmha_bwd, fmha_fwd

from jitfmha.planning.target import cpu_isas_here
from jitfmha.problem.float64_reference import Result, attention, attention_packed

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Whole vectors and a rest in every instruction set.
HDIM, HDIM_V = 37, 21
# seqlen_q, seqlen_k, heads_q, heads_k: a single row, a few, several query tiles and key tiles, no
# queries, no keys, and lengths around those of both tiles.
SIZES = [
    *[(1, 1, 1, 1), (1, 300, 4, 4), (3, 77, 6, 2), (33, 49, 2, 2), (150, 290, 3, 1)],
    *[(300, 7, 4, 2), (9, 0, 2, 2), (0, 9, 2, 2), (255, 127, 1, 1), (257, 129, 1, 1)],
    (600, 600, 1, 1),
]
MASKS: list[dict[str, Any]] = [
    {},
    {"mask": 1},
    {"mask": 2},
    {"window_size": (3, 5)},
    {"window_size": (70, -1)},
    {"window_size": (0, 0)},
    {"mask": "g:9,20"},
]
# Kernels: of masks there are two kinds.
KERNELS = list(product(DTYPES, ("none", "window")))
Gradients = tuple[Tensor, Tensor, Tensor]


def drawn_dtypes(n: int) -> pytest.MarkDecorator:
    """The first n of the data types drawn for this file, whose tests share their kernels."""
    return pytest.mark.sample("dtype", list(DTYPES), n, shared_by="backward")


def masks_of(kind: str) -> list[dict[str, Any]]:
    return MASKS[:1] if kind == "none" else MASKS[1:]


def weighted_sum(result: Result, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """The number whose gradients with respect to out and lse are ``dout`` and ``dlse``."""
    out, lse = result
    total = (out * dout.double()).sum()
    if dlse is not None:
        seen = lse > -torch.inf
        total = total + (lse[seen] * dlse[seen].double()).sum()
    return total


def expected_gradients(result: Any, dout: Tensor, dlse: Tensor | None, *qkv: Tensor) -> Gradients:
    """By differentiation of the reference; ``result(q, k, v)`` calls it."""
    inputs = [x.detach().double().requires_grad_() for x in qkv]
    total = weighted_sum(result(*inputs), dout, dlse)
    dq, dk, dv = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
    return dq, dk, dv


def assert_gradients_close(
    actual: Gradients, expected: Gradients, dout: Tensor, *qkv: Tensor
) -> None:
    """Compare within what rounding explains.

    A gradient is rounded, and made of products that may cancel: a score's gradient is a difference
    of two numbers, each at most |dout| |v|.
    """
    q, k, v = (x.double() for x in qkv)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2.5e-2, torch.float16: 4e-3}[dout.dtype]
    summand = q.shape[-1] ** -0.5 * largest_norm(dout) * largest_norm(v)
    cancelled = 16 * torch.finfo(torch.float32).eps * summand
    for name, x, reference, factor in zip("qkv", actual, expected, (k, q, None), strict=True):
        assert x.dtype == dout.dtype
        assert x.shape == reference.shape
        bound = tolerance * largest(reference)
        if factor is not None:
            bound += cancelled * largest(factor) * q.shape[-3] ** 0.5
        error = (x.double() - reference).abs()
        assert not error.isnan().any(), f"d{name} holds NaN"
        assert largest(error) <= bound, f"d{name} is off by {largest(error):.3g} > {bound:.3g}"


def largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def largest_norm(x: Tensor) -> float:
    return largest(x.double().norm(dim=-1))


def gradients_of_results(rng: torch.Generator, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    dout = torch.randn(out.shape, generator=rng).to(out.dtype)
    return dout, torch.randn(lse.shape, generator=rng)


def check_batch_mode(
    rng: torch.Generator, dtype: str, mask: dict[str, Any], sizes: Sizes, batch: int = 2
) -> None:
    hdims = {"hdim": HDIM, "hdim_v": HDIM_V}
    q, k, v = random_qkv(rng, sizes, batch=batch, dtype=DTYPES[dtype], **hdims)
    out, lse = rounded(attention(q, k, v, **mask), q.dtype)
    dout, drawn_dlse = gradients_of_results(rng, out, lse)
    # A call takes one of the two, as the references are what takes long.
    dlse = drawn_dlse if torch.rand((), generator=rng) < 0.5 else None
    actual = fmha_bwd(dout, q, k, v, out, lse, dlse=dlse, **mask)
    expected = expected_gradients(lambda *qkv: attention(*qkv, **mask), dout, dlse, q, k, v)
    assert_gradients_close(actual, expected, dout, q, k, v)


@drawn_dtypes(2)
@pytest.mark.parametrize("kind", ["none", "window"])
def test_batch_mode(rng, dtype, kind, pytestconfig):
    """Each of the sizes with two of the masks, as the references are what takes long."""
    masks = masks_of(kind)
    for sizes in SIZES:
        drawn = torch.randperm(len(masks), generator=rng).tolist()
        for i in drawn if pytestconfig.getoption("--exhaustive") else drawn[:2]:
            check_batch_mode(rng, dtype, masks[i], sizes)


@pytest.mark.sample(
    "other_isa, dtype, kind", [(x, *y) for x in cpu_isas_here()[1:] for y in KERNELS], 1
)
def test_other_isas(rng, other_isa, dtype, kind):
    with fresh_calls(other_isa):
        for mask, sizes in product(masks_of(kind)[:3], SIZES[1:6]):
            check_batch_mode(rng, dtype, mask, sizes, batch=1)


# Around the squares of a tile unit, its key tiles and its query tiles.
TILE_UNIT_SIZES = [
    *[(1, 1, 1, 1), (2, 300, 3, 3), (31, 33, 6, 2), (32, 32, 1, 1), (9, 0, 2, 2), (0, 9, 2, 2)],
    *[(255, 127, 1, 1), (257, 129, 1, 1), (129, 257, 2, 1)],
]


@pytest.mark.parametrize("kind", ["none", "window"])
def test_emulated_tile_unit(rng, kind):
    with fresh_calls("amx_emulated"):
        for mask, sizes in product(masks_of(kind)[1::2] or [{}], TILE_UNIT_SIZES):
            check_batch_mode(rng, "bf16", mask, sizes, batch=1)


def test_group_mode_in_an_emulated_tile_unit(rng):
    with fresh_calls("amx_emulated"):
        check_group_mode(rng, "bf16", {"mask": 2})


@drawn_dtypes(1)
@pytest.mark.sample("mask", [{}, {"mask": 1}, {"mask": 2}, {"mask": "t:20,9"}], 2)
def test_group_mode(rng, dtype, mask):
    check_group_mode(rng, dtype, mask)


def check_group_mode(rng: torch.Generator, dtype: str, mask: dict[str, Any]) -> None:
    """Sequences without queries, without keys, and unused rows between them."""
    for gap in (0, 3):
        call = packed(
            *(rng, [1, 130, 0, 17, 3, 265], [70, 5, 4, 17, 300, 0]),
            gap=gap,
            hdim=HDIM,
            hdim_v=HDIM_V,
            dtype=DTYPES[dtype],
        )
        q, k, v = call.qkv
        options: dict[str, Any] = {**call.sequences.groups, **mask}
        out, lse = rounded(call.expected(**mask), q.dtype)
        unused = ~call.sequences.used_rows(0)
        out[unused], lse[:, unused] = torch.nan, torch.nan
        dout, dlse = gradients_of_results(rng, out, lse)
        inputs = (dout, call.q, call.k, call.v, out, lse)
        actual = fmha_bwd(*inputs, dlse=dlse, **options)
        expected = expected_gradients(
            lambda *qkv: attention_packed(*qkv, *call.sequences.spans, **mask),  # noqa: B023
            *(dout, dlse, q, k, v),
        )
        assert_gradients_close(actual, expected, dout, q, k, v)
        # Past torch's dispatcher, and through it.
        for last_input in (lse, torch._neg_view(-lse)):
            given = {f"d{name}": torch.full_like(getattr(call, name), 7.0) for name in "qkv"}
            fmha_bwd(*inputs[:-1], last_input, dlse=dlse, **given, **options)
            for written, new, side in zip(given.values(), actual, (0, 1, 1), strict=True):
                used = call.sequences.used_rows(side)
                assert torch.equal(written[used], new[used])
                assert (written[~used] == 7.0).all()


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_given_gradients_without_queries(rng, lengths):
    """Keys that no query sees have the gradient 0; rows of no sequence stay as they are."""
    q, k, v = (x[0] for x in random_qkv(rng, seqlen_q=0))
    lengths_k = [3, 2][: len(lengths)]
    sums = {"cu_seqlens_q": prefix_sums(lengths), "cu_seqlens_k": prefix_sums(lengths_k)}
    out, lse = fmha_fwd(q, k, v, return_lse=True, **sums)
    for last_input in (lse, torch._neg_view(-lse)):
        given = [torch.full_like(x, 7.0) for x in (q, k, v)]
        rooms = dict(zip(("dq", "dk", "dv"), given, strict=True))
        fmha_bwd(out, q, k, v, out, last_input, **rooms, **sums)
        used = sum(lengths_k)
        for x in given[1:]:
            assert (x[:used] == 0).all()
            assert (x[used:] == 7.0).all()


@drawn_dtypes(1)
def test_layouts(rng, dtype):
    """What lies between the elements is NaN in the inputs, and stays in the gradients."""
    q, k, v = random_qkv(rng, hdim=HDIM, hdim_v=HDIM_V, dtype=DTYPES[dtype])
    out, lse = rounded(attention(q, k, v, mask=2), q.dtype)
    dout, dlse = gradients_of_results(rng, out, lse)
    expected = fmha_bwd(dout, q, k, v, out, lse, dlse=dlse, mask=2)
    for layout in ("bhsd", "sbhd", "packed_by_head", "every_other_row", "odd_address"):
        given = [lay_out(torch.zeros_like(x), layout) for x in (q, k, v)]
        storages = [torch.empty(0, dtype=q.dtype).set_(x.untyped_storage()) for x in given]
        for storage in storages:
            storage.fill_(-77.0)
        laid_out = [lay_out(x, layout) for x in (dout, q, k, v, out)]
        lse_by_query = lse.transpose(1, 2).contiguous().transpose(1, 2)
        dq, dk, dv = given
        actual = fmha_bwd(*laid_out, lse_by_query, dlse=dlse, mask=2, dq=dq, dk=dk, dv=dv)
        assert actual == (dq, dk, dv)
        for x, reference, storage in zip(given, expected, storages, strict=True):
            assert torch.equal(x, reference)
            x.fill_(-77.0)
            assert (storage == -77.0).all(), "something beside the elements was written"


@drawn_dtypes(1)
def test_rows_that_are_one_row(rng, dtype):
    """What is only read may lie in any place, also several times in one."""
    q, k, v = random_qkv(rng, hdim=HDIM, hdim_v=HDIM_V, dtype=DTYPES[dtype])
    q = q[:, :1].expand_as(q)
    out, lse = rounded(attention(q, k, v), q.dtype)
    dout = gradients_of_results(rng, out, lse)[0][:, :1].expand_as(out)
    given = dout, q, k, v, out[:, :1].expand_as(out), lse[:, :, :1].expand_as(lse)
    actual = fmha_bwd(*given)
    expected = fmha_bwd(*(x.contiguous() for x in given))
    assert all(map(torch.equal, actual, expected))


@pytest.mark.usefixtures("num_threads")
def test_nan_of_an_earlier_call(rng):
    """Scratch is kept between calls, and squares of a tile unit have room for more keys."""
    torch.set_num_threads(1)
    q, k, v = random_qkv(rng, (40, 64, 2, 1), hdim=HDIM, hdim_v=HDIM_V, dtype=DTYPES["bf16"])
    with fresh_calls("amx_emulated"):
        out, lse = rounded(attention(q, k[:, :5], v[:, :5]), q.dtype)
        few_keys = out, q, k[:, :5], v[:, :5], out, lse
        expected = fmha_bwd(*few_keys)
        fmha_bwd(out, q, k * torch.nan, v * torch.nan, out, lse)
        actual = fmha_bwd(*few_keys)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.usefixtures("num_threads")
def test_threads_do_not_change_the_bits_of_an_emulated_tile_unit(rng):
    with fresh_calls("amx_emulated"):
        check_that_threads_do_not_change_the_bits(rng, "bf16", [(300, 290, 2, 1)], (1, 3, 16))


@pytest.mark.usefixtures("num_threads")
@drawn_dtypes(2)
def test_threads_do_not_change_the_bits(rng, dtype):
    sizes = [(700, 700, 1, 1), (400, 300, 6, 2), (90, 1000, 3, 3)]
    check_that_threads_do_not_change_the_bits(rng, dtype, sizes, (1, 2, 3, 16, 1, 5))


def check_that_threads_do_not_change_the_bits(
    rng: torch.Generator,
    dtype: str,
    all_sizes: list[tuple[int, int, int, int]],
    thread_counts: tuple[int, ...],
) -> None:
    """Few heads and many threads: all of them add to the same dk and dv."""
    for sizes in all_sizes:
        q, k, v = random_qkv(rng, sizes, hdim=HDIM, hdim_v=HDIM_V, dtype=DTYPES[dtype])
        out, lse = rounded(attention(q, k, v, mask=2), q.dtype)
        dout, _ = gradients_of_results(rng, out, lse)
        first = fmha_bwd(dout, q, k, v, out, lse, mask=2)
        for threads in thread_counts:
            torch.set_num_threads(threads)
            again = fmha_bwd(dout, q, k, v, out, lse, mask=2)
            assert all(map(torch.equal, again, first)), f"{threads} threads"


def test_keys_that_nobody_sees(rng):
    """Their gradients are 0, whatever they hold; so are those of queries that see nothing."""
    hdims = {"hdim": 16, "hdim_v": 48}
    q, k, v = random_qkv(rng, seqlen_q=20, seqlen_k=400, **hdims)
    out, lse = rounded(attention(q, k, v, mask=1), q.dtype)
    _, dk, dv = fmha_bwd(torch.ones_like(out), q, k, v, out, lse, mask=1)
    assert not dk[:, 20:].any()
    assert not dv[:, 20:].any()
    assert dv[:, :20].all()
    q, k, v = random_qkv(rng, seqlen_q=400, seqlen_k=20, **hdims)
    out, lse = rounded(attention(q, k, v, mask=2), q.dtype)
    dq, _, _ = fmha_bwd(torch.ones_like(out), q, k, v, out, lse, mask=2)
    assert not dq[:, :380].any()
    assert dq[:, 381:].any()


def test_large_scores(rng):
    """Where one key has all the probability, its value's gradient is that of the output."""
    q, k, v = random_qkv(rng, seqlen_q=40, seqlen_k=40)
    k = 1000 * q
    out, lse = fmha_fwd(q, k, v, return_lse=True)
    dout, _ = gradients_of_results(rng, out, lse)
    dq, dk, dv = fmha_bwd(dout, q, k, v, out, lse)
    rounding = 4 * torch.finfo(torch.float32).eps * largest(lse)  # of scores, and of their lse
    assert (dv - dout).abs().max() <= rounding * largest(dout)
    assert dq.isfinite().all()
    assert dk.isfinite().all()


def root_mean_square(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize("amplitude", [9.0, 30.0])
def test_large_scores_are_as_exact_as_torch(rng, amplitude):
    """The lse has 24 bits, of which large scores leave few to their differences.

    Of large ones a few rows in a hundred have more than one key that counts. Many are drawn, so
    that which these are is no matter of luck.
    """
    q, k, v = (amplitude * (2 * torch.rand(640, 50, 2, 8, generator=rng) - 1) for _ in range(3))
    dout = torch.randn(q.shape, generator=rng)

    def by_torch(*qkv: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv)).transpose(1, 2)

    def gradients(function: Any, dtype: torch.dtype) -> Gradients:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        dq, dk, dv = torch.autograd.grad(function(*leaves), leaves, dout.to(dtype))
        return dq, dk, dv

    of_both = gradients(fmha_fwd, torch.float32), gradients(by_torch, torch.float32)
    exact = gradients(by_torch, torch.float64)
    for name, ours, theirs, reference in zip("qkv", *of_both, exact, strict=True):
        error, of_torch = (root_mean_square(x - reference) for x in (ours, theirs))
        assert error <= 1.5 * of_torch, f"d{name} is off by {error:.3g}, torch's by {of_torch:.3g}"


BROKEN: list[Refusal] = [
    ({"dout": torch.zeros(2, 33, 2, 63)}, ValueError, ["dout has shape (2, 33, 2, 63)"]),
    ({"dout": torch.zeros(2, 33, 2, 64).half()}, TypeError, ["dout has dtype torch.float16"]),
    ({"dout": torch.zeros(1).expand(2, 33, 2, 64)}, ValueError, ["dout has stride 0"]),
    ({"lse": torch.zeros(2, 33, 2)}, ValueError, ["lse has shape (2, 33, 2)"]),
    ({"dlse": 1.0}, TypeError, ["dlse must be a torch.Tensor, got float"]),
    ({"out": None}, TypeError, ["out must be a torch.Tensor, got NoneType"]),
    ({"dk": torch.zeros(2, 49, 2, 1).expand(2, 49, 2, 64)}, ValueError, ["dk has stride 0"]),
    ({"dv": torch.zeros(2, 1, 2, 64).expand(2, 49, 2, 64)}, ValueError, ["dv has strides"]),
    ({"mask": "diagonal"}, ValueError, ["mask='diagonal'"]),
    ({"q": torch.zeros(2, 33, 3, 64)}, ValueError, ["q has 3 heads"]),
]


@pytest.mark.parametrize(("changes", "error", "texts"), BROKEN)
def test_broken_arguments(rng, changes, error, texts):
    q, k, v = random_qkv(rng)
    out, lse = fmha_fwd(q, k, v, return_lse=True)
    arguments = {"dout": out.clone(), "q": q, "k": k, "v": v, "out": out, "lse": lse}
    with refused(error, *texts):
        fmha_bwd(**(arguments | changes))


def test_shared_memory_is_refused(rng):
    q, k, v = random_qkv(rng)
    out, lse = fmha_fwd(q, k, v, return_lse=True)
    for name, x, other in (("dq", q, "q"), ("dk", v, "v"), ("dv", v, "v")):
        with pytest.raises(ValueError, match=f"{name} shares memory with {other}"):
            fmha_bwd(out.clone(), q, k, v, out, lse, **{name: x})
    both = torch.empty_like(k)
    with pytest.raises(ValueError, match="dv shares memory with sink"):
        fmha_bwd(out.clone(), q, k, v, out, lse, dv=both, sink=both[0, 0, :, 0])
    with pytest.raises(ValueError, match="dv shares memory with dk"):
        fmha_bwd(out.clone(), q, k, v, out, lse, dk=both, dv=both)
    sink = {"sink": torch.zeros(q.shape[2]), "dsink": both.flatten()[: q.shape[2]]}
    with pytest.raises(ValueError, match="dsink shares memory with dv"):
        fmha_bwd(out.clone(), q, k, v, out, lse, dv=both, **sink)
    bias = torch.zeros(1, 1, q.shape[1], k.shape[1])
    for name, other in (("q", q), ("lse", lse), ("bias", bias), ("sink", sink["sink"])):
        given = {"bias": bias, "sink": sink["sink"]}
        for room, like in (("dbias", bias), ("dsink", sink["sink"])):
            if other.numel() < like.numel():
                continue
            given[room] = other.as_strided(like.shape, like.stride())
            with pytest.raises(ValueError, match=f"{room} shares memory with {name}"):
                fmha_bwd(out.clone(), q, k, v, out, lse, **given)
            del given[room]


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dsink"])
@pytest.mark.parametrize("seqlen", [0, 5])
def test_results_with_gradients_are_refused(rng, seqlen, name):
    """As out=... is by torch's functions; without grad mode they are written."""
    q, k, v = random_qkv(rng, seqlen_q=seqlen, seqlen_k=seqlen)
    sink = torch.zeros(q.shape[2])
    out, lse = fmha_fwd(q, k, v, sink=sink, return_lse=True)
    sources = {"dq": q, "dk": k, "dv": v, "dsink": sink}
    room = torch.full_like(sources[name], 7.0).requires_grad_()
    options = {"sink": sink, name: room}
    with pytest.raises(NotImplementedError, match=f"{name} requires grad"):
        fmha_bwd(torch.ones_like(out), q, k, v, out, lse, **options)
    assert (room == 7.0).all()
    with torch.no_grad():
        fmha_bwd(torch.ones_like(out), q, k, v, out, lse, **options)
    assert (room != 7.0).all()


MEMORY_PROGRAM = """
import torch
from jitfmha import fmha_fwd, fmha_bwd
torch.set_num_threads(2)
def status(name):
    # Not getrusage: a process inherits its largest resident set from the one that started it.
    (line,) = (x for x in open("/proc/self/status") if x.startswith(name + ":"))
    return int(line.split()[1]) << 10
def call(seqlen):
    q, k, v, dout = (torch.randn(1, seqlen, 1, 37, dtype=torch.bfloat16) for _ in range(4))
    dout, v = (x[..., :21].contiguous() for x in (dout, v))
    out, lse = fmha_fwd(q, k, v, return_lse=True)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # The largest so far is what is resident now; pages of files may have gone.
    before = status("VmRSS")
    dq, dk, dv = fmha_bwd(dout, q, k, v, out, lse)
    tensors = sum(x.nbytes for x in (q, k, v, out, lse, dout, dq, dk, dv))
    return status("VmHWM") - before - dq.nbytes - dk.nbytes - dv.nbytes, tensors
call(64)
beyond, tensors = call(16384)
assert beyond <= 0.05 * tensors + (16 << 20), (beyond, tensors)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="nothing says what is resident")
def test_memory_is_linear_in_the_sequence_length():
    """The scores of 16384 queries and keys are 1 GiB; nothing near that is taken."""
    run_python("-c", MEMORY_PROGRAM)
