"""Every form of mask against its written definition."""

import itertools

import pytest
import torch
from closeness import check
from inputs import DTYPES, random_qkv
from packed_calls import packed
from refusals import refused
from torch import Tensor
from untyped import fmha_fwd

from jitfmha.problem.float64_reference import visible

pytestmark = pytest.mark.usefixtures("poisoned_memory")

WINDOWS = [(-1, -1), (0, 0), (0, -1), (-1, 0), (3, 5), (-1, 7), (9, -1), (64, 0), (1000, 1000)]
TEXTS = [
    *(f"{corner}:{left},{right}" for corner in "tb" for left, right in WINDOWS),
    *(f"{form}:{width}" for form in ("xt", "xb") for width in (-1, 0, 1, 2, 9, 1000)),
    *(f"g:{y},{x}" for y, x in ((1, 1), (1, 9), (9, 1), (20, 30), (1000, 1), (1, 1000))),
]
LENGTHS = [(1, 1), (1, 40), (40, 1), (33, 33), (20, 90), (90, 20), (129, 200), (200, 129), (9, 0)]


@pytest.mark.parametrize("window_size", WINDOWS)
@pytest.mark.parametrize("mask", [0, 1, 2, "none", "causal"])
def test_numbers(rng, mask, window_size, dtypes):
    for lengths, dtype in itertools.product(LENGTHS, dtypes):
        qkv = random_qkv(rng, (*lengths, 2, 2), dtype=dtype)
        check(*qkv, mask=mask, window_size=window_size)


@pytest.mark.parametrize("mask", TEXTS)
def test_texts(rng, mask):
    for seqlen_q, seqlen_k in LENGTHS:
        check(*random_qkv(rng, (seqlen_q, seqlen_k, 2, 2)), mask=mask)


def test_random_windows_and_lengths(rng):
    for _ in range(150):
        seqlen_q, seqlen_k, heads_k, groups = torch.randint(1, 200, (4,), generator=rng).tolist()
        heads_k, groups = heads_k % 3 + 1, groups % 3 + 1
        left, right = torch.randint(-1, 250, (2,), generator=rng).tolist()
        mask = int(torch.randint(3, (1,), generator=rng))
        qkv = random_qkv(rng, (seqlen_q, seqlen_k, heads_k * groups, heads_k), batch=1)
        check(*qkv, mask=mask, window_size=(left, right))


@pytest.mark.parametrize("mask", [0, 2, "none", "causal", *(t for t in TEXTS if t[0] == "b")])
def test_group_mode(rng, mask):
    lengths_q, lengths_k = zip(*LENGTHS, strict=True)
    call = packed(rng, lengths_q, lengths_k, heads=(2, 2))
    windows = WINDOWS if not isinstance(mask, str) or ":" not in mask else [(-1, -1)]
    for window_size in windows:
        call.check(mask=mask, window_size=window_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_keys_at_all(rng, dtype):
    q, k, v = random_qkv(rng, seqlen_k=0, dtype=DTYPES[dtype])
    for mask in (0, 1, 2):
        out, lse = fmha_fwd(q, k, v, mask=mask, return_lse=True)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()


def written_definition(
    seqlen_q: int, seqlen_k: int, mask: int | str = 0, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    """Which key each query sees, as booleans ``(seqlen_q, seqlen_k)``.

    Masks 1, 2 and "causal" never show a key behind the diagonal, however far a window opens to the
    right.
    """
    i = torch.arange(seqlen_q)[:, None]
    j = torch.arange(seqlen_k)[None, :]
    left, right = window_size
    diagonal = i + seqlen_k - seqlen_q
    if isinstance(mask, str) and ":" in mask:
        form, numbers = mask.split(":")
        left, *others = (int(number) for number in numbers.split(","))
        right = others[0] if others else max(left - 1 - left // 2, 0)
        if form[0] == "x":  # a width
            left = left // 2 if left > 0 else -1
        if form in ("t", "xt", "g"):
            diagonal = i
        if form == "g":
            left, right = left - 1, right - 1
        right = max(right, 0)
    elif mask in (1, 2, "causal", "t", "b"):
        right = 0
        if mask in (1, "t"):
            diagonal = i
    else:
        assert mask in (0, "none")
    everything = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    from_left = everything if left < 0 else j >= diagonal - left
    up_to_right = everything if right < 0 else j <= diagonal + right
    return from_left & up_to_right


def test_parsed_masks_see_what_the_definition_says():
    """The Python side alone, over all small sizes: independent of any kernel."""
    forms: list[tuple[int | str, tuple[int, int]]] = [
        (mask, window) for mask in (0, 1, 2, "t", "b") for window in WINDOWS
    ]
    forms += [(text, (-1, -1)) for text in TEXTS]
    for (mask, window), sq, sk in itertools.product(forms, (1, 3, 12), (1, 4, 12)):
        sees = visible(sq, sk, mask, window)
        assert torch.equal(sees, written_definition(sq, sk, mask, window)), (mask, window, sq, sk)


@pytest.mark.parametrize(
    ("mask", "window_size", "error", "texts"),
    [
        (3, (-1, -1), ValueError, ["mask=3"]),
        (-1, (-1, -1), ValueError, ["mask=-1"]),
        (True, (-1, -1), TypeError, ["mask", "True"]),
        (1.0, (-1, -1), TypeError, ["mask", "1.0"]),
        (None, (-1, -1), TypeError, ["mask", "None"]),
        ("causal ", (-1, -1), ValueError, ["mask='causal '"]),
        ("b:1", (-1, -1), ValueError, ["mask='b:1'"]),
        ("b:1,-2", (-1, -1), ValueError, ["mask='b:1,-2'"]),
        ("xg:2", (-1, -1), ValueError, ["mask='xg:2'"]),
        ("xt:2,3", (-1, -1), ValueError, ["mask='xt:2,3'"]),
        ("g:0,1", (-1, -1), ValueError, ["mask='g:0,1'"]),
        ("b:1,2", (3, 4), ValueError, ["window_size=(3, 4)", "mask='b:1,2'"]),
        (0, (-2, 0), ValueError, ["window_size=(-2, 0)"]),
        (0, (1,), TypeError, ["window_size", "(1,)"]),
        (0, 5, TypeError, ["window_size", "5"]),
        (0, (1.0, 2), TypeError, ["window_size", "(1.0, 2)"]),
        (0, (True, 2), TypeError, ["window_size", "(True, 2)"]),
        (0, None, TypeError, ["window_size", "None"]),
    ],
)
def test_errors(rng, mask, window_size, error, texts):
    q, k, v = random_qkv(rng)
    with refused(error, *texts):
        fmha_fwd(q, k, v, mask=mask, window_size=window_size)
