"""Calls that are legal and far from any other: told lengths beyond all keys, one sequence with all.

Estimates, splits, launches and results, each with what may be divided by or counted with: nothing
at all, pages with room for more keys than there are, more splits than keys, and the largest numbers
that arguments take.
"""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from closeness import assert_close
from frameworks.serving import on
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from inputs import prefix_sums
from rigs.recording_runtime import RecordingRuntime
from test_every_function import FUNCTIONS, of_signature, outcome
from torch import Tensor
from untyped import explain, explain_bwd, fmha_bwd, fmha_fwd

from jitfmha.amd.code_object import CodeObject
from jitfmha.kernels.compiled import family
from jitfmha.problem.float64_reference import attention_packed

CHIPS = ["MI300X", "MI308X", "MI355X"]
LARGEST = 2**63 - 1
_MOST_WRITTEN = 1 << 26
WINDOWS = [(-1, -1), (-1, -1), (0, 0), (2**40, 0), (3, LARGEST)]
BOUNDS = {
    *("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_context_len", "max_seq_len"),
    *("window_size_left", "window_size_right", "sliding_window"),
}
"""Arguments that say nothing new from the longest sequence on."""


class Extreme(NamedTuple):
    """Packed sequences, or pages of them, or with sequences of equal length a batch.

    ``most_pages`` is the width of the block table, 0 where keys are in rows.
    """

    lengths_q: list[int]
    lengths_k: list[int]
    heads: tuple[int, int]
    page_size: int
    most_pages: int
    options: dict[str, Any]
    is_batch: bool

    @classmethod
    def drawn(cls, random: Random, totals_q: list[int], totals_k: list[int]) -> "Extreme":
        sequences = random.choice([1, 1, 2, 9, 40])
        lengths_q = _lengths(random, sequences, random.choice(totals_q))
        lengths_k = _lengths(random, sequences, random.choice(totals_k))
        if random.random() < 0.4:
            lengths_q = [1] * sequences
        heads_k = random.choice([1, 2])
        options: dict[str, Any] = {"mask": random.choice([0, 2])}
        options["window_size"] = random.choice(WINDOWS)
        if random.random() < 0.4:
            options["num_splits"] = random.choice([1, 3, 128])
        is_batch = random.random() < 0.2
        if is_batch:
            lengths_q, lengths_k = [max(lengths_q)] * sequences, [max(lengths_k)] * sequences
            if random.random() < 0.2:
                lengths_q, lengths_k = [], []
        else:
            for side, lengths in (("q", lengths_q), ("k", lengths_k)):
                told = random.choice([None, max(lengths), max(lengths) + 1, 2**31, LARGEST])
                options[f"max_seqlen_{side}"] = told
        page_size = random.choice([1, 16, 64, 4096]) if random.random() < 0.4 else 0
        most = 0
        if page_size and not is_batch:
            most = max(-(-length // page_size) for length in lengths_k) + random.choice([0, 1, 100])
        heads = heads_k * random.choice([1, 2, 8]), heads_k
        return cls(lengths_q, lengths_k, heads, page_size, most, options, is_batch)

    def call(self, make: Callable[..., Tensor], hdim: int) -> tuple[list[Tensor], dict[str, Any]]:
        """Arguments of ``fmha_fwd`` with tensors of some shape; pages are not those of a call."""
        heads_q, heads_k = self.heads
        if self.is_batch:
            sequences = len(self.lengths_q)
            shapes = [
                (sequences, max(lengths, default=5), heads, hdim)
                for lengths, heads in ((self.lengths_q, heads_q), (self.lengths_k, heads_k))
            ]
            q, k = (make(*shape) for shape in shapes)
            return [q, k, make(*shapes[1])], self.options
        sums = {"cu_seqlens_q": prefix_sums(self.lengths_q)}
        sums["cu_seqlens_k"] = prefix_sums(self.lengths_k)
        rows: tuple[int, ...] = (sum(self.lengths_k),)
        if self.most_pages:
            pages = sum(-(-length // self.page_size) for length in self.lengths_k)
            rows = max(pages, 1), self.page_size
            sums["block_table"] = torch.zeros(len(self.lengths_k), self.most_pages).int()
        tensors = [make(sum(self.lengths_q), heads_q, hdim)]
        return tensors + [make(*rows, heads_k, hdim) for _ in "kv"], {**self.options, **sums}


def _lengths(random: Random, sequences: int, total: int) -> list[int]:
    how = random.choice(["one", "last", "even", "none", "any"])
    if how == "even":
        return [total // sequences] * sequences
    if how == "any":
        return [random.choice([0, 0, 1, 2, random.randint(0, total)]) for _ in range(sequences)]
    lengths = [0] * sequences
    if how != "none":
        lengths[-1 if how == "last" else random.randrange(sequences)] = total
    return lengths


# ---- Results -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("target", "count"), [(None, 40), ("gfx942", 6), ("gfx950", 6)])
def test_results(seed, rng, target, count):
    random, hdim, dtype = Random(seed), 64, torch.bfloat16
    for _ in range(count):
        it = Extreme.drawn(random, [1, 17, 40], [0, 1, 17, 200])
        q, k, v = (
            torch.randn(sum(lengths), heads, hdim, generator=rng).to(dtype)
            for lengths, heads in zip(
                (it.lengths_q, it.lengths_k, it.lengths_k), (*it.heads, it.heads[1]), strict=True
            )
        )
        tensors, options = [q, k, v], it.options
        if it.is_batch:
            tensors = [x.view(len(it.lengths_q), -1, *x.shape[1:]) for x in tensors if len(x)]
            if len(tensors) < 3:
                continue  # of no rows, torch does not know how long sequences are
        else:
            tensors, options = it.call(lambda *shape: torch.full(shape, torch.nan), hdim)
            tensors = [q, *(x.to(dtype) for x in tensors[1:])]
            _fill(it, tensors[1:], (k, v), options)
        with on(target):
            out, lse = fmha_fwd(*tensors, return_lse=True, **options)
        if it.is_batch:
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        starts = (prefix_sums(x).tolist()[:-1] for x in (it.lengths_q, it.lengths_k))
        window = tuple(min(side, 1000) for side in it.options["window_size"])
        expected = attention_packed(
            *(q, k, v, it.lengths_q, it.lengths_k, *starts),
            mask=it.options["mask"],
            window_size=window,
        )
        assert_close((out, lse), expected, q, k, v)


def _fill(
    it: Extreme, places: list[Tensor], rows: tuple[Tensor, ...], options: dict[str, Any]
) -> None:
    """Write keys and values to their rows, or to pages one after the other."""
    if not it.most_pages:
        for place, x in zip(places, rows, strict=True):
            place.copy_(x)
        return
    page = first = 0
    for table, length in zip(options["block_table"], it.lengths_k, strict=True):
        count = -(-length // it.page_size)
        table[count:] = -1  # of no meaning
        table[:count] = torch.arange(page, page + count)
        for place, x in zip(places, rows, strict=True):
            place[page : page + count].flatten(0, 1)[:length] = x[first : first + length]
        page, first = page + count, first + length


@pytest.mark.parametrize("name", FUNCTIONS)
def test_told_lengths_are_bounds(name, seed):
    """A longest length, or a window, that is larger than all sequences gives the same bits."""
    function, good = FUNCTIONS[name]
    names = sorted(BOUNDS & inspect.signature(function).parameters.keys())
    random = Random(seed)

    @hypothesis_seed(seed)
    @settings(
        max_examples=1,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.composite(of_signature(function, good))())
    def examined(arguments: dict[str, Any]) -> None:
        for changed in names if arguments.get("cu_seqlens_q", names) is not None else ():
            told = random.choice([1000, 2**31 - 1, 2**31, 2**40, LARGEST])
            found, expected = (
                outcome(function, {**arguments, **changes}) for changes in ({}, {changed: told})
            )
            place = 1 + list(arguments).index(changed)
            for results in (found[0], expected[0]):
                assert isinstance(results, list)
                del results[place]
            assert found == expected, f"{changed}={told}"

    examined()


# ---- Plans and launches --------------------------------------------------------------------------

TOTALS_Q, TOTALS_K = [1, 17, 4096, 70000], [0, 1, 17, 1000, 70000, 2**20]


@pytest.mark.parametrize("device", ["cpu", *CHIPS])
def test_plans(seed, device):
    """Every plan says in a finite number of seconds what it takes, with whatever lengths."""
    random = Random(seed)
    for _ in range(12):
        it = Extreme.drawn(random, TOTALS_Q, TOTALS_K)
        hdim = random.choice([32, 64, 96, 128, 256, 576])
        dtype = random.choice([torch.bfloat16, torch.float16, torch.float32, torch.int8])
        is_backward = not it.most_pages and dtype is not torch.int8 and random.random() < 0.3

        def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        tensors, options = it.call(make, hdim)
        options = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in options.items()}
        if is_backward:
            options.pop("num_splits", None)
            tensors, lse = _of_backward(tensors)
            explained = explain_bwd(*tensors, lse, device=device, **options)
        else:
            explained = explain(*tensors, device=device, **options)
        assert str(explained)
        plan = explained.plan
        for each in () if plan is None else plan.contest.plans if plan.contest else (plan,):
            lengths = each.problem.sizes[:2]
            each.variants(*lengths)
            each.serves(each.problem.sizes)
            for sizes in (lengths, (0, 0), (1, 2**31 - 1), (2**31 - 1, 1), (0, 1), (1, 0)):
                seconds = each.seconds(*sizes)
                assert seconds is None or 0 <= seconds < math.inf, (each.kernel, sizes, seconds)


def _of_backward(tensors: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    q, k, v = tensors
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    *batch, rows, heads, _ = q.shape
    return [out, q, k, v, out], q.new_empty(*batch, heads, rows, dtype=torch.float32)


@pytest.fixture(scope="module")
def runtime() -> RecordingRuntime:
    return RecordingRuntime()


@pytest.fixture
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder loads what has the first bytes of a code object."""

    def compiled(plan: Any) -> CodeObject:
        path = Path(plan.spec.artifact_name)
        return CodeObject(path, b"\x7fELF", plan.kernel, plan.arguments.size)

    monkeypatch.setattr(family.CompiledPlan, "compiled", compiled)
    monkeypatch.setattr(family, "row_of_built", lambda traits, image: traits.row())


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize("chip", CHIPS)
def test_launches(seed, runtime, chip):
    """Launchers get what they can launch; nothing runs, and no row is touched."""
    random = Random(seed)
    runtime.reset(keeps_launches=False)
    with runtime.stands_for(runtime.target(chip)):
        for _ in range(25):
            it = Extreme.drawn(random, [1, 17, 4096], TOTALS_K)
            dtype = random.choice([torch.bfloat16, torch.float16])

            def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
                return torch.empty(shape, dtype=dtype)

            tensors, options = it.call(make, 128)
            # Workspaces of so many splits would be larger than memory.
            options = {n: x for n, x in options.items() if (n, x) != ("num_splits", 128)}
            fmha_fwd(*tensors, **options)
            # Gradients of keys that no query sees are written, as zeros.
            if not it.most_pages and tensors[1].numel() < _MOST_WRITTEN:
                options.pop("num_splits", None)
                given, lse = _of_backward(tensors)
                fmha_bwd(*given, lse, **options)
