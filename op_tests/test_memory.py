"""Whether views share elements: the smallest overlaps and the smallest distances."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from jitfmha.problem.memory import extent, may_overlap, overlaps_itself


def addresses(x: Tensor) -> set[int]:
    """Of every element, by going through all of them."""
    steps = [
        range(0, size * stride, stride) if stride else [0]
        for size, stride in zip(x.shape, x.stride(), strict=True)
    ]
    return {x.data_ptr() + sum(i) * x.element_size() for i in itertools.product(*steps)}


def view(memory: Tensor, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return memory.as_strided(shape, strides, offset)


# Two views by offset, shape and strides, that share exactly one element.
ONE_SHARED = {
    "the last of one is the first of the other": ((0, (5,), (1,)), (4, (5,), (1,))),
    "the last of both": ((0, (4,), (3,)), (1, (3,), (4,))),
    "the first of both": ((6, (4,), (3,)), (6, (3,), (4,))),
    "in the middle of both": ((0, (5,), (4,)), (2, (5,), (3,))),
    "one in a hole of the other, but for its last": ((0, (3, 2), (8, 1)), (2, (7,), (1,))),
    "a single element inside": ((0, (3, 3), (10, 2)), (12, (1,), (1,))),
    "the corners of two blocks": ((0, (3, 3), (10, 1)), (22, (3, 3), (10, 1))),
}
# Two views that span each other, and share none.
NONE_SHARED = {
    "neighbours": ((0, (5,), (1,)), (5, (5,), (1,))),
    "every other element": ((0, (5,), (2,)), (1, (5,), (2,))),
    "columns": ((0, (4, 3), (6, 1)), (3, (4, 3), (6, 1))),
    "an element in a hole": ((0, (3, 3), (10, 2)), (13, (1,), (1,))),
    "blocks that touch": ((0, (3, 3), (10, 1)), (23, (3, 3), (10, 1))),
    "nothing": ((0, (0, 3), (3, 1)), (0, (3,), (1,))),
}
Layout = tuple[int, tuple[int, ...], tuple[int, ...]]


@pytest.mark.parametrize("name", [*ONE_SHARED, *NONE_SHARED])
def test_shared_elements(name):
    memory = torch.zeros(200)
    a, b = (view(memory, *layout) for layout in (ONE_SHARED | NONE_SHARED)[name])
    assert len(addresses(a) & addresses(b)) == (name in ONE_SHARED)
    assert may_overlap(a, b) == may_overlap(b, a) == (name in ONE_SHARED)


def test_random_views(seed):
    """Decided exactly, as by going through all elements; strides of 0 among them."""
    rng = random.Random(seed)
    memory = torch.zeros(400)
    halves = memory.view(torch.float16)
    shared = 0
    for _ in range(3000):
        views = []
        for _ in range(2):
            dims = rng.randint(1, 3)
            shape = tuple(rng.randint(1, 4) for _ in range(dims))
            strides = tuple(rng.choice((0, 1, 2, 3, 5, 7, 12, 30)) for _ in range(dims))
            views.append(view(memory, rng.randint(0, 60), shape, strides))
        a, b = views
        expected = bool(addresses(a) & addresses(b))
        shared += expected
        layouts = a.stride(), a.shape, b.stride(), b.shape
        assert may_overlap(a, b) == expected, layouts
        half = halves.as_strided(b.shape, [2 * n for n in b.stride()], 2 * b.storage_offset() + 1)
        assert may_overlap(a, half) == may_overlap(half, a) == expected, layouts
        assert extent(a) == (min(addresses(a)), max(addresses(a)) - min(addresses(a)) + 4)
        if len(addresses(a)) < a.numel():
            assert overlaps_itself(a)
    assert 300 < shared < 2700


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((3, 4), (4, 1), False),
        ((3, 4), (3, 1), True),
        ((3, 4), (1, 3), False),
        ((3, 4), (1, 2), True),
        ((1, 4), (0, 1), False),
        ((2, 1), (0, 1), True),
        ((0, 4), (0, 1), False),
    ],
)
def test_overlaps_itself(shape, strides, overlaps):
    x = view(torch.zeros(200), 0, shape, strides)
    assert overlaps_itself(x) == overlaps == (len(addresses(x)) < x.numel())
