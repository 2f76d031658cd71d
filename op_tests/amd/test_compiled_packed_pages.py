"""AITER's packed pages in compiled kernels, on the emulator with its sanitizer."""

import pytest
import torch
from compiled_calls import ARCHS, FP8_DTYPES, check_pages
from packed_pages import packed_keys, packed_values
from untyped import explain

from jitfmha import emulate

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.sample(
    ("arch", "dtype", "page_size", "features", "hdims"),
    [
        (arch, dtype, page_size, features, hdims)
        for arch in ARCHS
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8)
        for page_size in (16, 32, 64, 128, 256, 1024)
        for features in ((), ("bias", "alibi", "softcap", "dropout"), ("sink", "sink_tokens"))
        for hdims in ((48, 40), (64, 128), (128, 128), (256, 250), (576, 512))
    ],
    4,
)
def test_drawn_pages(rng, arch, dtype, page_size, features, hdims):
    """Beside what else a call has; of int8 also with scales of tokens."""
    check_pages(
        *(arch, rng, page_size, hdims),
        dtype=dtype,
        features=features,
        scales="each token" if dtype == torch.int8 and not features else "",
        is_packed=True,
    )


@pytest.mark.sample("arch", ARCHS, 1)
def test_which_family_serves_them(arch):
    """The one whose kernels are compiled; explain says what others lack."""
    dtype = FP8_DTYPES[arch]
    q = torch.zeros(2, 4, 128).to(dtype)
    k = torch.zeros(2, 16, 2, 128).to(dtype)
    sums = torch.tensor([0, 1, 2], dtype=torch.int32)
    table = torch.zeros(2, 1, dtype=torch.int32)
    groups = {"cu_seqlens_q": sums, "cu_seqlens_k": sums, "block_table": table}
    with emulate(arch):
        explanation = explain(q, packed_keys(k), packed_values(k), **groups)
    assert "packed_pages" in explanation.plan.kernel
    assert "packed pages of five dimensions" in str(explanation)
