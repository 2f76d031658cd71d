"""Functions over rows under the names of other packages: each gives the bits of this package's.

Read from ``aiter/ops/rmsnorm.py`` and ``aiter/ops/norm.py`` of github.com/ROCm/aiter, and from
``flash_attn/ops/rms_norm.py`` and ``layer_norm.py`` of github.com/Dao-AILab/flash-attention.
"""

from typing import Any

import pytest
import torch

import jitfmha
from jitfmha import aiter, install_as  # noqa: A004
from jitfmha.flash_attn.ops import layer_norm, rms_norm


def numbers(rng, *shape):
    return torch.randn(shape, generator=rng).bfloat16()


def test_aiter(rng):
    x, residual, (weight, bias) = numbers(rng, 5, 40), numbers(rng, 5, 40), numbers(rng, 2, 40)
    expected = jitfmha.rms_norm(x, weight, eps=1e-3)
    assert torch.equal(aiter.rms_norm(x, weight, 1e-3), expected)
    assert torch.equal(aiter.rmsnorm2d_fwd(x, weight, 1e-3), expected)
    expected = jitfmha.layer_norm(x, weight, bias, eps=1e-3)
    assert torch.equal(aiter.layernorm2d_fwd(x, weight, bias, 1e-3), expected)
    expected = jitfmha.layer_norm(x + bias, weight, bias)
    assert torch.equal(aiter.layernorm2d_fwd(x, weight, bias, x_bias=bias), expected)
    for gemma_norm, own in ((False, weight), (True, weight.float() + 1)):
        out, total = x.clone(), residual.clone()  # which it may read from as well
        expected = jitfmha.rms_norm(x, own, eps=1e-3, residual=residual)
        given = out, out, total, total, weight, 1e-3, gemma_norm
        assert aiter.rmsnorm2d_fwd_with_add(*given) is None
        assert torch.equal(out, expected[0])
        assert torch.equal(total, expected[1])


def test_what_aiter_has_and_this_has_not(rng):
    x, weight = numbers(rng, 5, 40), numbers(rng, 40)
    with pytest.raises(NotImplementedError, match="use_model_sensitive_rmsnorm is 1"):
        aiter.rms_norm(x, weight, 1e-5, 1)
    weight.requires_grad_()
    with pytest.raises(NotImplementedError, match="weight requires grad"):
        aiter.rmsnorm2d_fwd_with_add(x, x, x, x, weight, 1e-5)
    weight = weight.detach()
    for out, error, text in (
        (None, ValueError, "out is None"),
        (x.expand(2, 5, 40), ValueError, r"out is .* expected a tensor of shape \(5, 40\)"),
        (x.int(), TypeError, "out has dtype torch.int32"),
    ):
        with pytest.raises(error, match=text):
            aiter.rmsnorm2d_fwd_with_add(out, x, x, x, weight, 1e-5)
        with pytest.raises(error, match=f"residual_{text}"):
            aiter.rmsnorm2d_fwd_with_add(torch.empty_like(x), x, x, out, weight, 1e-5)
    with pytest.raises(ValueError, match="residual_out shares memory with out"):
        aiter.rmsnorm2d_fwd_with_add(x, x, x, x, weight, 1e-5)
    with pytest.raises(ValueError, match=r"weight has shape \(39,\)"):
        aiter.rms_norm(x, weight[1:], 1e-5)


def test_errors_name_the_arguments_of_these_functions(rng):
    x, weight = numbers(rng, 5, 40), numbers(rng, 40)
    calls: list[tuple[Any, tuple[Any, ...], str]] = [
        (aiter.rms_norm, (None, weight, 1e-5), "input must be"),
        (aiter.rmsnorm2d_fwd, (x, weight, -1), "epsilon is -1"),
        (aiter.layernorm2d_fwd, (x, weight, weight, 1e-5, 5), "x_bias must be"),
        (aiter.layernorm2d_fwd, (None, weight, weight, 1e-5, weight), "input must be"),
        (aiter.layernorm2d_fwd, (x, weight, weight, 1e-5, weight[1:]), "x_bias is a"),
        (aiter.layernorm2d_fwd, (x, weight, weight, 1e-5, x[None]), "x_bias is a"),
        (aiter.layernorm2d_fwd, (x.half(), weight, weight, 1e-5, weight), "x_bias is a"),
        (aiter.layernorm2d_fwd, (x, weight, weight, 1e-5, weight.to("meta")), "x_bias is on meta"),
        (aiter.rmsnorm2d_fwd_with_add, (x, x, x, x.clone(), None, 1e-5, True), "weight must be"),
        (aiter.rmsnorm2d_fwd_with_add, (x, x, x[1:], x, weight, 1e-5), "residual_in has shape"),
        (rms_norm.rms_norm, (x, weight, "1"), "epsilon must be"),
        (layer_norm.layer_norm, (x, weight, None, -1), "epsilon is -1"),
    ]
    for function, arguments, text in calls:
        with pytest.raises((TypeError, ValueError), match=f"^{text}"):
            function(*arguments)


def test_by_their_names(rng):
    x, weight = numbers(rng, 5, 40), numbers(rng, 40)
    with install_as("flash_attn"), install_as("aiter"):
        import aiter as by_name
        from flash_attn.ops import layer_norm as layer_norm_by_name
        from flash_attn.ops import rms_norm as rms_norm_by_name

        assert by_name.rms_norm is aiter.rms_norm
        expected = jitfmha.rms_norm(x, weight, eps=1e-3)
        assert torch.equal(rms_norm_by_name.rms_norm(x, weight, 1e-3), expected)
        expected = jitfmha.layer_norm(x, weight, None, eps=1e-3)
        assert torch.equal(layer_norm_by_name.layer_norm(x, weight, None, 1e-3), expected)
