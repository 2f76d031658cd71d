"""This package in the place of flash-attn and AITER, for code that imports those by their names."""

import importlib.metadata
import importlib.util
import inspect
import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from refusals import refused
from subprocesses import ROOT, run_python
from torch import Tensor

import jitfmha
import jitfmha.aiter
import jitfmha.flash_attn
from jitfmha.flash_attn.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

flash_attn_func: Any = jitfmha.flash_attn_func
install_as: Any = jitfmha.install_as


@pytest.fixture(autouse=True)
def no_package_of_these_names() -> Iterator[None]:
    """A test starts and ends without them."""
    before = tuple(sys.meta_path)
    assert not {"flash_attn", "aiter"} & set(sys.modules)
    yield
    assert tuple(sys.meta_path) == before
    assert not {"flash_attn", "aiter"} & set(sys.modules)


# ---- The stand-ins -------------------------------------------------------------------------------


def test_flash_attn_by_its_name():
    with install_as("flash_attn"):
        import flash_attn
        import flash_attn.bert_padding
        from flash_attn import flash_attn_with_kvcache
        from flash_attn.flash_attn_interface import flash_attn_varlen_func

        assert flash_attn.flash_attn_func is jitfmha.flash_attn_func
        assert flash_attn_varlen_func is jitfmha.flash_attn_varlen_func
        assert flash_attn_with_kvcache is jitfmha.flash_attn_with_kvcache
        assert flash_attn.bert_padding.unpad_input is unpad_input
        assert flash_attn.__name__ == flash_attn.__spec__.name == "flash_attn"
        assert flash_attn.bert_padding.__spec__.name == "flash_attn.bert_padding"
        assert flash_attn.__file__ == jitfmha.flash_attn.__file__
        assert importlib.util.find_spec("flash_attn") is flash_attn.__spec__
        with pytest.raises(ModuleNotFoundError, match=r"'flash_attn\.losses'.*jitfmha stands in"):
            importlib.import_module("flash_attn.losses.cross_entropy")
    with pytest.raises(ModuleNotFoundError, match="No module named 'flash_attn'"):
        importlib.import_module("flash_attn")


def test_version_that_libraries_look_up(monkeypatch):
    torch_version = importlib.metadata.version("torch")
    monkeypatch.setattr(sys, "path", [])  # what else is installed takes seconds to list
    version = jitfmha.flash_attn.__version__
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")
    with install_as("flash_attn"):
        # Found before anything is imported.
        assert importlib.util.find_spec("flash_attn") is not None
        assert "flash_attn" not in sys.modules
        assert importlib.metadata.version("flash-attn") == version
        assert importlib.metadata.version("flash_attn") == version
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
        assert importlib.metadata.metadata("flash-attn")["Name"] == "flash-attn"
        assert importlib.metadata.files("flash-attn") is None
    assert importlib.metadata.packages_distributions() == {}
    monkeypatch.undo()
    with install_as("flash_attn"):
        assert importlib.metadata.version("torch") == torch_version


def test_every_public_function_has_its_place():
    for name in ("flash_attn", "aiter"):
        ours = importlib.import_module(f"jitfmha.{name}")
        with install_as(name):
            theirs = importlib.import_module(name)
            assert set(theirs.__all__) == set(ours.__all__)
            assert all(getattr(theirs, n) is getattr(ours, n) for n in ours.__all__)
            assert theirs.__doc__ == ours.__doc__
    assert set(jitfmha.aiter.__all__) == set(
        importlib.import_module("jitfmha.aiter.ops.mha").__all__
    )


def test_aiter_by_its_name():
    """The eighth argument is a bias there; in flash-attn it is a soft cap."""
    x = torch.zeros(1, 2, 1, 8)
    with install_as("aiter"):
        import aiter  # noqa: A004 - as programs do
        from aiter.ops.mha import flash_attn_func

        assert aiter.flash_attn_func is flash_attn_func is jitfmha.aiter.flash_attn_func
        assert importlib.util.find_spec("aiter") is aiter.__spec__
        with pytest.raises(ValueError, match=r"bias .*, 7, 9\)"):
            flash_attn_func(x, x, x, 0.0, None, False, (-1, -1), torch.zeros(7, 9))


def test_installed_twice_and_removed_twice():
    first = install_as("flash_attn")
    assert install_as("flash_attn") is first
    assert repr(first) == "<jitfmha as flash_attn, installed>"
    import flash_attn

    first.remove()
    first.remove()
    assert repr(first) == "<jitfmha as flash_attn, removed>"
    # What was imported meanwhile keeps what it has.
    assert flash_attn.flash_attn_func is jitfmha.flash_attn_func


def test_refused_where_the_package_is_imported(monkeypatch):
    real = ModuleType("flash_attn")
    real.__file__ = "/somewhere/flash_attn/__init__.py"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", real)
        with pytest.raises(RuntimeError, match=r"/somewhere/flash_attn/__init__\.py"):
            install_as("flash_attn")
        with install_as("aiter"):
            assert sys.modules["flash_attn"] is real


@pytest.mark.parametrize("name", ["flash-attn", "xformers", "", None])
def test_refused_without_a_stand_in(name):
    with pytest.raises(ValueError, match=f"stand-in for {name!r}; use 'flash_attn' or 'aiter'"):
        install_as(name)


# ---- Padding -------------------------------------------------------------------------------------


def padded_batch(seed: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Tokens, their mask with holes, and the kept tokens of each sequence, found one by one."""
    drawn = random.Random(seed)
    lengths = [0, 1, 7, drawn.randint(2, 6)]
    drawn.shuffle(lengths)
    places = [sorted(drawn.sample(range(7), n)) for n in lengths]
    mask = torch.tensor([[int(place in kept) for place in range(7)] for kept in places])
    tokens = torch.randn(4, 7, 3, 5, generator=torch.Generator().manual_seed(seed))
    return tokens, mask, [tokens[n, kept] for n, kept in enumerate(places)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
def test_unpad_and_pad(seed, dtype):
    tokens, mask, sequences = padded_batch(seed)
    lengths = [len(x) for x in sequences]
    packed, indices, cu_seqlens, max_seqlen, used = unpad_input(tokens, mask.to(dtype))
    assert torch.equal(packed, torch.cat(sequences))
    assert cu_seqlens.dtype == used.dtype == torch.int32
    assert cu_seqlens.tolist() == [sum(lengths[:n]) for n in range(5)]
    assert used.tolist() == lengths
    assert max_seqlen == 7
    assert type(max_seqlen) is int
    assert torch.equal(tokens.flatten(0, 1)[indices], packed)
    assert torch.equal(pad_input(packed, indices, 4, 7), tokens * mask[..., None, None])


def test_places_that_are_not_used(seed):
    tokens, mask, _ = padded_batch(seed)
    unused = 1 - mask
    unused[0] = 0
    kept = (mask + unused).bool()
    packed, _, cu_seqlens, _, used = unpad_input(tokens, mask, unused)
    assert torch.equal(packed, tokens[kept])
    assert cu_seqlens.diff().tolist() == kept.sum(1).tolist()
    assert used.tolist() == mask.sum(1).tolist()


def test_several_sequences_in_a_row(seed):
    lengths = [[2, 3], [7], [], [1, 1, 4]]
    table = torch.tensor([[*row, *[0] * (7 - len(row))] for row in lengths])
    tokens, _, _ = padded_batch(seed)
    packed, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(tokens, table)
    assert torch.equal(packed, torch.cat([tokens[n, : sum(row)] for n, row in enumerate(lengths)]))
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, 2, 5, 12, 13, 14, 18]
    assert max_seqlen == 7
    assert torch.equal(tokens.flatten(0, 1)[indices], packed)


def test_nothing_but_padding():
    packed, indices, cu_seqlens, max_seqlen, used = unpad_input(
        torch.ones(2, 3, 4), torch.zeros(2, 3).int()
    )
    assert packed.shape == (0, 4)
    assert (cu_seqlens.tolist(), max_seqlen, used.tolist()) == ([0, 0, 0], 0, [0, 0])
    assert torch.equal(pad_input(packed, indices, 2, 3), torch.zeros(2, 3, 4))


def test_gradients_of_padding(seed):
    tokens, mask, _ = padded_batch(seed)
    tokens = tokens.double().requires_grad_()

    def there_and_back(x: Tensor) -> Tensor:
        packed, indices, *_ = unpad_input(x, mask)
        return pad_input(packed.square(), indices, 4, 7)

    weights = torch.linspace(-1, 1, tokens.numel(), dtype=torch.float64).view_as(tokens)
    (gradient,) = torch.autograd.grad((there_and_back(tokens) * weights).sum(), tokens)
    torch.testing.assert_close(gradient, 2 * tokens.detach() * weights * mask[..., None, None])


BATCH, ROWS = torch.ones(2, 3, 4), torch.ones(5, 4)
MASK, LENGTHS = torch.ones(2, 3).int(), torch.tensor([[2, 2, 0], [3, 0, 0]])
PADDING: list[tuple[Any, tuple[Any, ...], type[Exception], list[str]]] = [
    (unpad_input, (BATCH, MASK.view(3, 2)), ValueError, ["attention_mask", "(3, 2)"]),
    (unpad_input, (BATCH, torch.ones(2, 3)), ValueError, ["attention_mask", "float32"]),
    (unpad_input, (BATCH, MASK, MASK[:, 0]), ValueError, ["unused_mask", "(2,)"]),
    (unpad_input, (BATCH[0, 0], BATCH[0]), ValueError, ["hidden_states", "(4,)"]),
    (unpad_input, ([[1]], BATCH[0]), TypeError, ["hidden_states", "list"]),
    (
        unpad_input_for_concatenated_sequences,
        (BATCH, LENGTHS),
        ValueError,
        ["attention_mask_in_length has 4 tokens", "3 places"],
    ),
    (index_first_axis, (ROWS, torch.tensor([0.0])), ValueError, ["indices", "float32"]),
    (index_first_axis, (ROWS, torch.tensor([7])), ValueError, ["indices", "7"]),
    (index_put_first_axis, (ROWS, torch.arange(2), 9), ValueError, ["indices", "(2,)", "(5, 4)"]),
    (pad_input, (ROWS, torch.arange(5), 2, 2), ValueError, ["indices", "4 rows"]),
]


@pytest.mark.parametrize(("function", "arguments", "error", "texts"), PADDING)
def test_errors_of_padding(function, arguments, error, texts):
    with refused(error, *texts):
        function(*arguments)


# ---- Keywords that are called otherwise elsewhere ------------------------------------------------

PUBLIC = [
    *(getattr(jitfmha.flash_attn, name) for name in jitfmha.flash_attn.__all__[1:]),
    *(getattr(jitfmha.aiter, name) for name in jitfmha.aiter.__all__),
    jitfmha.flash_attn_combine,
]


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_keyword_with_a_typing_error(function):
    name = next(n for n in inspect.signature(function).parameters if len(n) > 3)
    with pytest.raises(TypeError, match=f"argument '{name}x'; did you mean {name}?"):
        function(**{f"{name}x": 1})
    with pytest.raises(TypeError, match=r"'completely_different'$"):
        function(completely_different=1)
    with pytest.raises(TypeError, match=r"missing .* required positional argument"):
        function()


@pytest.mark.parametrize(
    ("function", "given", "meant"),
    [
        (jitfmha.flash_attn_func, "is_causal", "causal"),
        (jitfmha.flash_attn_func, "scale", "softmax_scale"),
        (jitfmha.flash_attn_func, "logit_softcap", "softcap"),
        (jitfmha.flash_attn_func, "return_lse", "return_attn_probs"),
        (jitfmha.flash_attn_with_kvcache, "return_lse", "return_softmax_lse"),
        (jitfmha.flash_attn_with_kvcache, "page_table", "block_table"),
        (jitfmha.aiter.flash_attn_func, "return_softmax_lse", "return_lse"),
        (jitfmha.aiter.flash_attn_func, "attn_mask", "bias"),
        (jitfmha.aiter.flash_attn_func, "cu_seqlens_k", "cu_seqlens_kv"),
        (jitfmha.aiter.flash_attn_varlen_func, "softcap", "logits_soft_cap"),
        (jitfmha.aiter.flash_attn_varlen_func, "s_aux", "sink_ptr"),
        (jitfmha.aiter.mha_fwd, "causal", "is_causal"),
    ],
)
def test_keyword_of_another_package(function, given, meant):
    with pytest.raises(TypeError, match=f"argument '{given}'; did you mean {meant}?"):
        function(**{given: 1})


RESULTS = """
import jitfmha
import torch

def check(q: torch.Tensor, asked: bool) -> None:
    reveal_type(jitfmha.flash_attn_func(q, q, q, 0.0, None, True))
    reveal_type(jitfmha.flash_attn_kvpacked_func(q, q, return_attn_probs=False))
    reveal_type(jitfmha.flash_attn_qkvpacked_func(q, 0.0, causal=True, return_attn_probs=True))
    reveal_type(jitfmha.flash_attn_varlen_func(q, q, q, q, q, 1, 1, return_attn_probs=asked))
    jitfmha.flash_attn_func(q, q)
    jitfmha.flash_attn_func(q, q, q, softcap=None)
"""


def test_types_of_results(tmp_path):
    """The type of the result follows from ``return_attn_probs`` where that is known."""
    program = tmp_path / "program.py"
    program.write_text(RESULTS)
    done = run_python("-m", "mypy", "--no-error-summary", program, cwd=ROOT, code=None)
    tensor = "torch._tensor.Tensor"
    triple = f"tuple[{tensor}, {tensor}, {tensor}]"
    # What mypy kept of an earlier run it tells again, with the folder of that time.
    lines = [line for line in done.stdout.splitlines() if f"/{program.name}:" in line]
    revealed = [line.partition('type is "')[2][:-1] for line in lines if "Revealed" in line]
    assert revealed == [tensor, tensor, triple, f"{tensor} | {triple}"], done.stdout
    errors = [line for line in lines if "error:" in line]
    assert len(errors) == 2, done.stdout
    assert all("No overload variant" in line for line in errors)
