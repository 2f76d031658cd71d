"""The random numbers of dropout: the generator, its state, and that the kernels use these."""

import pytest
import torch
from inputs import DTYPES, random_qkv
from torch import Tensor
from untyped import explain, fmha_fwd

from jitfmha import dropout_randval, new_rng_state
from jitfmha.problem.dropout import _philox, largest_kept

# Counter, key and result, from the known answers of Random123, the authors' own library.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in _philox((c0, c1, c2, c3), key)) == expected


def test_bytes_do_not_depend_on_the_lengths(rng):
    state = torch.randint(-(2**62), 2**62, (2,), generator=rng)
    whole = dropout_randval(state, 3, 5, 40, 70)
    assert torch.equal(dropout_randval(state, 2, 5, 7, 33), whole[:2, :, :7, :33])
    other = dropout_randval(state + torch.tensor([1, 0]), 3, 5, 40, 70)
    assert (other == whole).float().mean() < 0.02
    other = dropout_randval(state + torch.tensor([0, 1]), 3, 5, 40, 70)
    assert (other == whole).float().mean() < 0.02


@pytest.mark.parametrize(
    ("dropout_p", "largest"),
    [(1 / 256, 254), (0.1, 229), (0.25, 191), (0.3, 178), (0.5, 127), (0.7, 76), (255 / 256, 0)],
)
def test_the_largest_byte_that_is_kept(dropout_p, largest):
    """Rounded down, as flash-attn has it: 229.5 of 255 are 229."""
    assert largest_kept(dropout_p) == largest


@pytest.mark.parametrize("size", [-1, 2**31, 2**63, 2**70])
@pytest.mark.parametrize("name", ["batch", "heads_q", "seqlen_q", "seqlen_k"])
def test_sizes_that_no_call_has_are_refused(name, size):
    sizes = {"batch": 0, "heads_q": 1, "seqlen_q": 1, "seqlen_k": 1, name: size}
    with pytest.raises(ValueError, match=f"{name}={size} must"):
        dropout_randval(new_rng_state(), **sizes)


def test_bytes_are_uniform():
    drawn = dropout_randval(new_rng_state(), 4, 4, 256, 256).flatten().long()
    counts = drawn.bincount(minlength=256).double()
    expected = drawn.numel() / 256
    # Chi squared with 255 degrees of freedom; beyond 400 once in 10^8 runs.
    assert ((counts - expected) ** 2 / expected).sum() < 400


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("num_threads")
def test_the_kernel_drops_by_these_bytes(rng, dtype):
    """With a unit matrix for v the output is the probabilities, all of which are equal here."""
    sizes = {"seqlen_q": 140, "seqlen_k": 64, "heads_q": 4, "heads_k": 2}
    q, k, _ = (torch.zeros_like(x) for x in random_qkv(rng, **sizes))
    v = torch.eye(64)[None, :, None].expand(2, 64, 2, 64).to(DTYPES[dtype])
    q, k = q.to(v.dtype), k.to(v.dtype)
    state = new_rng_state(generator=rng)
    outs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        outs.append(fmha_fwd(q, k, v, dropout_p=0.3, rng_state=state))
    assert torch.equal(*outs)
    kept = dropout_randval(state, 2, 4, 140, 64) <= 255 * 0.7
    assert torch.equal(outs[0].transpose(1, 2) != 0, kept)


def call(qkv: tuple[Tensor, Tensor, Tensor], **options: object) -> Tensor:
    out: Tensor = fmha_fwd(*qkv, dropout_p=0.5, **options)
    return out


def test_where_the_state_comes_from(rng):
    qkv = random_qkv(rng)
    torch.manual_seed(7)
    first, second = call(qkv), call(qkv)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    explain(*qkv, dropout_p=0.5)  # draws nothing
    fmha_fwd(*qkv, dropout_p=0.0)
    assert torch.equal(call(qkv), first)
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(call(qkv, generator=generator), first)
    assert torch.equal(call(qkv, generator=generator), second)
    state = new_rng_state(generator=generator.manual_seed(7))
    assert torch.equal(call(qkv, rng_state=state), first)
    assert torch.equal(call(qkv, rng_state=state), first)
