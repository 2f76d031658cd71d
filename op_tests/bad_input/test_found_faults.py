"""What the sweeps of this folder have found, each as one call."""

import numpy as np
import pytest
import torch
from inputs import prefix_sums
from untyped import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    fmha_fwd,
    fmha_v3_varlen_fwd,
    mha_fwd_splitkv,
    warmup,
)

from jitfmha import emulate
from jitfmha.aiter import mha_v3
from jitfmha.flash_attn.ops.triton import rotary
from jitfmha.problem.float64_reference import attention

Q = (1, 5, 2, 64)


def qkv(device: str = "cpu") -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    return [torch.randn(Q, generator=rng).to(torch.float16).to(device) for _ in "qkv"]


@pytest.mark.parametrize("side", [2**40 + 1, 2**62, 2**63 - 1])
def test_windows_up_to_the_largest_number(side):
    """They went to the kernel as they were, where adding a row's number to them overflows."""
    q, k, v = qkv()
    for window_size in ((side, 1), (1, side), (side, side)):
        expected, _ = attention(q, k, v, window_size=tuple(min(n, 100) for n in window_size))
        out = fmha_fwd(q, k, v, window_size=window_size)
        torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=0)
    text = fmha_fwd(q, k, v, mask=f"b:{side}{side},1")  # of any length
    expected, _ = attention(q, k, v, window_size=(100, 1))
    torch.testing.assert_close(text.double(), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        # They became other numbers, or an OverflowError on the way through torch's dispatcher.
        ({"window_size": (2**63, 0)}, ValueError, r"window_size=\(9223372036854775808, 0\)"),
        # Wrong types reached torch's dispatcher, which has RuntimeErrors for them.
        ({"softmax_scale": "1"}, TypeError, "softmax_scale"),
        ({"return_lse": 3}, TypeError, "return_lse"),
        ({"window_size": 3}, TypeError, "window_size"),
        ({"out": 3}, TypeError, "out"),
        ({"bf16_cvt": 3}, ValueError, "bf16_cvt"),
        ({"mask": [1]}, TypeError, "mask"),
        ({"mask": "1"}, ValueError, "mask='1'"),
        ({"logit_softcap": 2.0**-101}, ValueError, "logit_softcap=.* between 2"),
        # An array compares element by element.
        ({"bf16_cvt": np.zeros(3)}, ValueError, "bf16_cvt=array"),
        # Python's own refusal to read them does not name the argument.
        ({"mask": f"b:{'9' * 5000},1"}, ValueError, "mask='b:99"),
        # The lengths are given back.
        ({"max_seqlen_k": 17}, ValueError, r"max_seqlen_k is given without .* \(17\)"),
    ],
)
def test_batches(device, changes, error, text):
    with pytest.raises(error, match=text):
        fmha_fwd(*qkv(device), **changes)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lengths_beyond_64_bits(device):
    tensors, ends = [x[0] for x in qkv(device)], prefix_sums([5]).to(device)
    groups = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    with pytest.raises(ValueError, match="max_seqlen_q=9223372036854775808"):
        fmha_fwd(*tensors, **groups, max_seqlen_q=2**63)
    fmha_fwd(*tensors, **groups, max_seqlen_q=2**63 - 1)


@pytest.mark.parametrize("shape", [(), (3,), (3, 64)])
def test_queries_of_too_few_dimensions_over_packed_pages(shape):
    """What tells kinds of calls apart took them to pieces, and named nothing."""
    k = torch.zeros(3, 1, 8, 8, 8, dtype=torch.float16)
    ends, table = prefix_sums([1, 1, 1]), torch.zeros(3, 1, dtype=torch.int32)
    groups = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "block_table": table}
    with pytest.raises(ValueError, match="q has shape"):
        fmha_fwd(torch.zeros(shape, dtype=torch.float16), k, k.view(3, 1, 1, 64, 8), **groups)


def test_pages_of_no_keys_after_pages_of_some():
    """They ended the process: the kernel divides by the size of a page."""
    q, ends = torch.zeros(1, 2, 64), prefix_sums([1])
    first = torch.zeros(1, dtype=torch.int32)
    groups = {"cu_seqlens_q": ends, "cu_seqlens_k": prefix_sums([0])}
    for rows in (16, 0):
        cache = torch.zeros(1, rows, 2, 64)
        calls = (
            lambda c=cache: fmha_fwd(q, c, c, **groups, block_table=first[None]),
            lambda c=cache: flash_attn_with_kvcache(
                q[None], c, c, cache_seqlens=0, cache_batch_idx=first
            ),
        )
        for call in calls:
            if rows:
                call()
                continue
            with pytest.raises(ValueError, match=r"\(1, 0, 2, 64\); a page holds at least one"):
                call()


def test_sparse_tensors():
    """One entry of prefix sums was accepted; more were an error of torch's, as others were, which
    flash-attn's functions first tried to make contiguous.
    """
    q, k, v = (x.float() for x in qkv())
    for lengths in ([], [5]):
        ends = prefix_sums(lengths)
        for group in ((ends.to_sparse(), ends), (ends, ends.to_sparse())):
            with pytest.raises(TypeError, match=r"cu_seqlens_[qk] has layout torch.sparse_coo"):
                flash_attn_varlen_func(q[0], k[0], v[0], *group, 5, 5)
    for sparse in (k.to_sparse(), torch.eye(5).to_sparse_csr()):
        with pytest.raises(TypeError, match=r"k has layout torch\.sparse"):
            flash_attn_func(q, sparse, v)


@pytest.mark.parametrize("sums", [prefix_sums([])[:0], prefix_sums([3, 2]).to("meta")], ids=str)
def test_prefix_sums_of_no_length_and_elsewhere(sums):
    """Where rows are looked up by them before attention checks them."""
    q, good = torch.ones(5, 2, 64), prefix_sums([3, 2])
    table = torch.ones(5, 8)
    for given in ((good, sums), (sums, good)):
        with pytest.raises(ValueError, match=r"cu_seqlens_[qk] (is on meta|has shape)"):
            mha_v3.flash_attn_varlen_fp8_func(q, q, q, *given, 3, 3)
    with pytest.raises(ValueError, match=r"cu_seqlens (is on meta|has shape)"):
        rotary.apply_rotary(q, table, table, cu_seqlens=sums)
    with pytest.raises(ValueError, match="seqlen_offsets is on meta"):
        rotary.apply_rotary(q, table, table, torch.zeros(2).int().to("meta"), good)


def test_zero_tensors_without_a_sequence():
    """There is no last sequence to count the unused rows to."""
    q, k, v = (x[0] for x in qkv())
    out, ends = torch.full_like(q, -77.0), prefix_sums([])
    options = (0.0, None, 0.0, True, False, -1, -1, False, False, 0)
    result = fmha_v3_varlen_fwd(q, k, v, ends, ends, 0, 0, 0, *options, out=out)
    assert result[0] is out
    assert (out == 0).all()


def test_operators_check_what_the_dispatcher_lets_pass():
    """Windows of one side or three, and None in place of a tensor."""
    arguments = [*qkv(), None, "0", [-1, -1], False, *[None] * 6]
    for window in ([1], [1, 2, 3]):
        with pytest.raises(TypeError, match="window_size must be a pair"):
            torch.ops.jitfmha.fmha_fwd(*arguments[:5], window, *arguments[6:])
    with pytest.raises(TypeError, match=r"out must be a torch\.Tensor"):
        torch.ops.jitfmha.fmha_fwd_out(*arguments, None)


def test_a_number_as_a_text_is_no_mask_under_compile():
    compiled = torch.compile(lambda q, k, v: fmha_fwd(q, k, v, mask="1"), backend="eager")
    with pytest.raises(Exception, match="is not known; use 0, 1, 2"):
        compiled(*qkv())


def test_warmup_checks_on_ready_before_it_builds():
    with pytest.raises(TypeError, match="on_ready must be a function or None, got 3"):
        warmup(dtypes=["fp16"], hdims=[64], masks=[0], modes=["gm0"], on_ready=3)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"arch": []}, ValueError, r"arch \[\]"),
        ({"check": 1}, TypeError, "check must be a bool"),
        ({"threads": "2"}, TypeError, "threads must be an int"),
        ({"threads": 2**32}, ValueError, "threads is 4294967296"),
        ({"random_order": 1.5}, TypeError, "random_order must be an int"),
        ({"profile": True, "sample": 2**40}, ValueError, "sample is 1099511627776"),
    ],
)
def test_emulate(arguments, error, text):
    """They were found out when something was launched, or never."""
    with pytest.raises(error, match=text), emulate(**({"arch": "gfx950"} | arguments)):
        pass


@pytest.mark.parametrize("table", [True, torch.zeros(1, 1).int(), torch.zeros(3).int()])
def test_pages_of_which_nobody_says_how_many_keys_they_hold(table):
    """Split keys went to a kernel with them, whose arguments have no place for pages then."""
    with pytest.raises(ValueError, match="block_table is given without cu_seqlens_q"):
        mha_fwd_splitkv(*qkv(), 2, block_table=table)
