"""explain_rows and explain_matmul: what they name is what calls launch, and nothing is built."""

import json
from functools import partial

import pytest
import torch
from drawn_rows import drawn_index

import jitfmha
from jitfmha.amd.chips import chip

KINDS = {"softmax": jitfmha.softmax, "rms_norm": jitfmha.rms_norm, "layer_norm": jitfmha.layer_norm}


def launched(arch, call):
    with jitfmha.emulate(arch, profile=True) as run:
        call()
        return tuple(profile.kernel for profile in run.profiles())


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_rows(kind, rng):
    """Of rows that lie anywhere, some of which are copied."""
    arch = ("gfx942", "gfx950")[drawn_index(rng, 2)]
    columns = (33, 64, 300)[drawn_index(rng, 3)]
    x = torch.randn(5, 2 * columns + 1, generator=rng).bfloat16()
    x = (x[:, 1 : 1 + columns], x[:, : 2 * columns : 2], x[:, :columns])[drawn_index(rng, 3)]
    weights = [torch.randn(columns, generator=rng) for _ in range(list(KINDS).index(kind))]
    out_dtype = (None, torch.int8)[drawn_index(rng, 2)]
    call = partial(KINDS[kind], x, *weights)
    explain = partial(jitfmha.explain_rows, kind, x, *weights, device=arch)
    given = {} if out_dtype is None else {"out_dtype": out_dtype}
    assert launched(arch, partial(call, **given)) == explain(**given).kernels
    leaves = [each.detach().requires_grad_() for each in (x, *weights)]
    both = explain().kernels + explain(direction="backward").kernels
    assert launched(arch, lambda: KINDS[kind](*leaves).float().sum().backward()) == both


def test_rows_that_are_copied():
    """They lie where loads are widest then."""
    x = torch.empty(5, 129, dtype=torch.bfloat16)[:, 1::2]
    copied = jitfmha.explain_rows("softmax", x.contiguous(), device="gfx942")
    assert jitfmha.explain_rows("softmax", x, device="gfx942").kernels == copied.kernels


@pytest.mark.parametrize("size", [(70, 40, 48), (16, 300, 1000), (3, 5, 0)])
def test_kernels_of_products(size, rng):
    m, n, k = size
    arch = ("gfx942", "gfx950")[drawn_index(rng, 2)]
    a, b = torch.randn(2, m, k, generator=rng), torch.randn(n, k, generator=rng).mT
    options = {"bias": torch.randn(n, generator=rng), "activation": "silu"}
    explained = jitfmha.explain_matmul(a, b, device=arch, **options)
    assert launched(arch, partial(jitfmha.matmul, a, b, **options)) == explained.kernels
    on_meta = jitfmha.explain_matmul(a.to("meta"), b.to("meta"), device=arch)
    assert on_meta.kernel == jitfmha.explain_matmul(a, b, device=arch).kernel


def test_what_bytes_take():
    x = torch.empty(4096, 8192, dtype=torch.bfloat16, device="meta")
    rate = 1e9 * chip("MI300X").streaming_gb_s
    for options, tensors in (
        *(({}, 2), ({"residual": x}, 4), ({"direction": "backward"}, 3)),
        *(({"direction": "backward", "residual": x}, 4), ({"out_dtype": torch.int8}, 1.5)),
    ):
        explained = jitfmha.explain_rows("softmax", x, device="MI300X", **options)
        assert explained.seconds == pytest.approx(tensors * x.nbytes / rate)
    assert not explained.is_built
    text = str(explained)
    for part in ("gfx942 MI300X", "softmax, (4096, 8192), bfloat16, to int8", "us\n", "not cpu: "):
        assert part in text
    assert json.loads(json.dumps(explained.to_dict()))["microseconds"] == explained.seconds * 1e6


def test_why_a_call_is_not_served():
    x = torch.empty(4, 8)
    for explained, reason in (
        (jitfmha.explain_rows("softmax", x.double()), "x has dtype torch.float64"),
        (
            jitfmha.explain_rows("rms_norm", x, out_dtype=torch.int8, direction="backward"),
            "have no gradient",
        ),
        (
            jitfmha.explain_rows("softmax", x, out_dtype=torch.float8_e4m3fn, device="gfx942"),
            "rounds to fp8_e4m3fnuz",
        ),
        (jitfmha.explain_matmul(x.double(), x.double().mT), "a has dtype torch.float64"),
        (jitfmha.explain_matmul(x.int(), x.int().mT, device="gfx950"), "a has dtype torch.int32"),
    ):
        assert explained.kernel is None
        assert any(reason in text for text in explained.rejected[explained.family])
        assert "kernel   none" in str(explained)
    with pytest.raises(ValueError, match="direction is 'up'"):
        jitfmha.explain_rows("softmax", x, direction="up")
    with pytest.raises(ValueError, match="kind is 'norm'"):
        jitfmha.explain_rows("norm", x)


def test_on_the_cpu():
    x = torch.empty(4, 8)
    explained = jitfmha.explain_rows("layer_norm", x)
    assert explained.family == "cpu"
    assert set(explained.rejected) == {"compiled"}
    for options, function in (
        *(({}, "torch.matmul"), ({"bias": torch.empty(4)}, "torch.nn.functional.linear")),
        ({"bias": torch.empty(4), "scale_a": torch.empty(1)}, "torch.matmul"),
    ):
        assert jitfmha.explain_matmul(x, x.mT, **options).kernel == function
