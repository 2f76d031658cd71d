"""Drawn calls over rows."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from jitfmha.rows import interface
from jitfmha.rows.problem import Kind

# Around vectors, and around what is staged.
COLUMNS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 127, 256, 1000, 1025, 4096, 5003]
BATCHES = [(), (1,), (3,), (2, 17), (0, 4), (3, 1, 7)]


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls take them, too."""
    monkeypatch.setattr(interface, "MOST_OF_TORCH", {})


class RowCall(NamedTuple):
    """The tensors of a call; a weight or bias is float32 or of the dtype of x."""

    kind: Kind
    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    @property
    def options(self) -> dict[str, object]:
        """All but x, by the names of the public functions."""
        given: dict[str, object] = {"residual": self.residual}
        if self.kind != "softmax":
            given |= {"weight": self.weight, "eps": self.eps}
        if self.kind == "layer_norm":
            given["bias"] = self.bias
        return given


def drawn_index(rng: torch.Generator, count: int) -> int:
    return int(torch.randint(count, (), generator=rng))


def draw(
    rng: torch.Generator,
    kind: Kind,
    dtype: torch.dtype,
    *,
    columns: int = 1,
    batch: tuple[int, ...] = (),
) -> RowCall:
    """A call with drawn options."""
    x, residual = (_laid_out(rng, (*batch, columns), dtype) for _ in range(2))
    if drawn_index(rng, 2):
        x = x + 3 * torch.randn((), generator=rng).to(dtype)
    weight_dtype = (dtype, torch.float32)[drawn_index(rng, 2)]
    weight, bias = (torch.randn(columns, generator=rng).to(weight_dtype) for _ in range(2))

    def drawn(tensor: Tensor, is_served: bool = True) -> Tensor | None:
        return tensor if is_served and drawn_index(rng, 2) else None

    return RowCall(
        *(kind, x),
        residual=drawn(residual),
        weight=drawn(weight, kind != "softmax"),
        bias=drawn(bias, kind == "layer_norm"),
        eps=(1e-6, 1e-5, 0.25)[drawn_index(rng, 3)],
    )


def draw_like(rng: torch.Generator, call: RowCall) -> RowCall:
    """A call with the same options, which the same kernel serves, of another shape."""
    columns = COLUMNS[drawn_index(rng, len(COLUMNS))]
    batch = BATCHES[drawn_index(rng, len(BATCHES))]
    drawn = draw(rng, call.kind, call.x.dtype, columns=columns, batch=batch)

    def drawn_as(like: Tensor | None, *shape: int) -> Tensor | None:
        numbers = torch.randn(shape, generator=rng)
        return None if like is None else numbers.to(like.dtype)

    weight, bias = drawn_as(call.weight, columns), drawn_as(call.bias, columns)
    residual = drawn_as(call.residual, *batch, columns)
    return drawn._replace(weight=weight, bias=bias, residual=residual)


def _laid_out(rng: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Contiguous; rows with something between them; or numbers that do not follow each other."""
    layout = drawn_index(rng, 3)
    *batch, columns = shape
    if layout == 0:
        return torch.randn(shape, generator=rng).to(dtype)
    wide = (*batch, columns + 5) if layout == 1 else (*batch, 2 * columns)
    x = torch.randn(wide, generator=rng).to(dtype)
    return x[..., 3 : 3 + columns] if layout == 1 else x[..., ::2]
