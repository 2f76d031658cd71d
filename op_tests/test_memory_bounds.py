"""No byte beside a tensor is read or written: tensors lie directly at pages that cannot be read.

Runs in processes of their own, because a violation ends the process.
"""

import sys

import pytest
from subprocesses import run_forked

PROGRAM = """
import ctypes, itertools, mmap, sys
import torch
from jitfmha import fmha_fwd

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PAGE = mmap.PAGESIZE
dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[sys.argv[1]]
at_end = sys.argv[2] == "end"
kept = []

def guarded(shape, dtype):
    # The tensor starts right behind, or ends right before, a page without access.
    count = 1
    for size in shape:
        count *= size
    nbytes = count * torch.empty(0, dtype=dtype).element_size()
    pages = -(-nbytes // PAGE)
    region = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for page in (0, pages + 1):
        assert libc.mprotect(start + page * PAGE, PAGE, 0) == 0
    offset = PAGE + (pages * PAGE - nbytes if at_end else 0)
    kept.append(region)
    return torch.frombuffer(region, dtype=dtype, count=count, offset=offset).view(shape)

def random(*shape):
    return guarded(shape, dtype).copy_(torch.randn(shape))

def i32(*values):
    return guarded((len(values),), torch.int32).copy_(torch.tensor(values))

for (hdim, hdim_v), seqlen_q, seqlen_k, mask in itertools.product(
    [(64, 64), (53, 37)], [1, 5, 16, 65], [1, 7, 64, 130], ["none", "causal"]
):
    q, k = random(1, seqlen_q, 2, hdim), random(1, seqlen_k, 1, hdim)
    v = random(1, seqlen_k, 1, hdim_v)
    out = random(1, seqlen_q, 2, hdim_v)
    fmha_fwd(q, k, v, out=out, mask=mask)
    assert out.isfinite().all()
    kept.clear()
for mask in ("none", "causal"):
    q, k, v, out = random(22, 2, 64), random(83, 1, 64), random(83, 1, 64), random(22, 2, 64)
    fmha_fwd(
        q, k, v, out=out, mask=mask, cu_seqlens_q=i32(0, 5, 5, 22), cu_seqlens_k=i32(0, 70, 75, 83)
    )
    assert out.isfinite().all()
for seqlen_k in (1, 15, 17, 49) if dtype == torch.float32 else ():
    kept.clear()
    bias = random(1, 2, 5, seqlen_k)
    fmha_fwd(random(1, 5, 2, 37), random(1, seqlen_k, 2, 37), random(1, seqlen_k, 2, 21), bias=bias)

# The guard itself works: a read beside the tensor must end this process.
print("no violation", flush=True)
x = random(22, 2, 64)
ctypes.string_at(x.data_ptr() + (x.numel() * x.element_size() if at_end else -1), 1)
"""


@pytest.mark.sample("side", ["start", "end"], 1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
def test_guard_pages(tmp_path, dtype, side):
    program = tmp_path / "guarded.py"
    program.write_text(PROGRAM)
    done = run_forked(program, dtype, side, code=None)
    assert done.stdout == "no violation\n", done.stderr
    assert done.returncode < 0, "the pages beside the tensors are not guarded"
