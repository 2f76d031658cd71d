"""Calls on an AMD GPU, emulated or real, and their float64 answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from inputs import lay_out
from packed_calls import Sequences
from torch import Tensor
from untyped import fmha_fwd

from jitfmha.problem.float64_reference import Result, attention, attention_packed

CPU = torch.device("cpu")
_DESCALES = ("q_descale", "k_descale", "v_descale")
FP8 = {
    "gfx942": torch.float8_e4m3fnuz,
    "gfx942-mi308": torch.float8_e4m3fnuz,
    "gfx950": torch.float8_e4m3fn,
}


@dataclass
class AmdInputs:
    """q, k and v of one call, and its arguments beside them.

    ``lengths`` are (seqlen_q, seqlen_k) of each sequence; gm0 takes them from the first, ``batch``
    times. ``gap`` unused rows follow each sequence of gm1. Tensors are on ``device``; those of the
    CPU run wherever the test emulates them.
    """

    rng: torch.Generator
    dtype: torch.dtype = torch.bfloat16
    hdims: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (2, 1)
    lengths: Sequence[tuple[int, int]] = ((70, 90),)
    batch: int | None = None
    mask: int | str = 0
    gap: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    device: torch.device = CPU
    kv_dtype: torch.dtype | None = None  # that of keys and values, where it is another one

    def __post_init__(self) -> None:
        (hq, hk), (dq, dv) = self.heads, self.hdims
        self.arguments: dict[str, Any] = {"mask": self.mask}
        if self.is_group:
            lengths_q, lengths_k = ([pair[side] for pair in self.lengths] for side in (0, 1))
            self.sequences = Sequences((lengths_q, lengths_k), self.gap)
            self.starts = self.sequences.spans[2:]
            rows_q, rows_k = ([rows] for rows in self.sequences.rows)
            groups = self.sequences.groups
            self.arguments |= {name: x.to(self.device) for name, x in groups.items()}
        else:
            assert self.batch is not None
            rows_q, rows_k = ([self.batch, n] for n in self.lengths[0])
        self.rows_q = rows_q
        self.q = self.random("q", *self.rows_q, hq, dq)
        self.k, self.v = (self.random(n, *rows_k, hk, hdim) for n, hdim in (("k", dq), ("v", dv)))

    @property
    def is_group(self) -> bool:
        return self.batch is None

    def layout_of(self, name: str) -> str:
        """In gm1 of one batch that holds all rows."""
        raise NotImplementedError

    def random(self, name: str, *shape: int) -> Tensor:
        dtype = self.kv_dtype if self.kv_dtype and name in "kv" else self.dtype
        values = torch.randn(shape, generator=self.rng).to(dtype).to(self.device)
        return self.laid_out(name, values)

    def laid_out(self, name: str, x: Tensor) -> Tensor:
        layout = self.layout_of(name)
        return lay_out(x[None], layout)[0] if self.is_group else lay_out(x, layout)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
        if not self.is_group:
            return attention(q, k, v, mask=self.mask, **options)
        return attention_packed(q, k, v, *self.sequences.spans, mask=self.mask, **options)


@dataclass
class AmdProblem(AmdInputs):
    """A forward pass and its exact result."""

    softmax_scale: float = 0.2
    layout: str = "bshd"
    descales: str | None = None  # "one": shape (1,); "each": shape (b, hk)

    def __post_init__(self) -> None:
        super().__post_init__()
        count = len(self.lengths) if self.batch is None else self.batch
        if self.descales:
            shape = [1] if self.descales == "one" else [count, self.heads[1]]
            for name in ("k_descale", "v_descale") if self.kv_dtype else _DESCALES:
                scale = torch.rand(shape, generator=self.rng) + 0.5
                self.arguments[name] = scale.to(self.device)
        plain = {"softmax_scale": self.softmax_scale, "return_lse": True}
        self.arguments |= plain | self.options

    def layout_of(self, name: str) -> str:
        return self.layout

    def launch(self) -> tuple[Tensor, Any]:
        """Out, and lse or None, as they are on the device; a GPU may still be at work."""
        result = fmha_fwd(self.q, self.k, self.v, **self.arguments)
        return result if self.arguments["return_lse"] else (result, None)

    def run(self) -> tuple[Tensor, Any]:
        """The same, complete and on the CPU."""
        out, lse = self.launch()
        return out.cpu(), None if lse is None else lse.cpu()

    def exact(self) -> tuple[Tensor, Tensor]:
        return self._attention(*(self._scaled(name) for name in "qkv"))

    def assert_right(
        self,
        actual: tuple[Tensor, Tensor | None],
        rounding: float,
        max_seqlen_q: int | None = None,
        *,
        of_outputs: float | None = None,
    ) -> None:
        """Within what rounding probabilities and results by a share of themselves explains.

        ``of_outputs`` is the share of results, where it is another one. Of each sequence of gm1,
        rows from ``max_seqlen_q`` on may hold anything.
        """
        out = actual[0].cpu().double()
        lse = None if actual[1] is None else actual[1].cpu().double()
        q, k, v = (self._scaled(name) for name in "qkv")
        exact, exact_lse = self._attention(q, k, v)
        # Of what the probabilities are rounded by, as much as all values together can make.
        spread, _ = self._attention(q, k, v.abs())
        if max_seqlen_q is not None:
            rows = self._promised_rows(max_seqlen_q)
            out, exact, spread = out[rows], exact[rows], spread[rows]
            lse, exact_lse = None if lse is None else lse[:, rows], exact_lse[:, rows]
        of_outputs = rounding if of_outputs is None else of_outputs
        assert ((out - exact).abs() <= rounding * spread + of_outputs * exact.abs() + 1e-5).all()
        if lse is not None:
            torch.testing.assert_close(lse, exact_lse, atol=1e-4, rtol=0)

    def _promised_rows(self, max_seqlen_q: int) -> list[int]:
        return [
            start + row
            for start, (seqlen_q, _) in zip(self.starts[0], self.lengths, strict=True)
            for row in range(min(seqlen_q, max_seqlen_q))
        ]

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Result:
        return self.reference(q, k, v, softmax_scale=self.softmax_scale)

    def _scaled(self, name: str) -> Tensor:
        x: Tensor = getattr(self, name).cpu().double()
        given: Tensor | None = self.arguments.get(f"{name}_descale")
        if given is None:
            return x
        scales = given.cpu().double()
        if scales.dim() == 1:
            return x * scales
        each = scales.repeat_interleave(x.shape[-2] // self.heads[1], dim=1)
        if not self.is_group:
            return x * each[:, None, :, None]
        starts = self.starts[0 if name == "q" else 1]
        ends = [*starts[1:], x.shape[0]]
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            x[start:end] *= each[i][None, :, None]
        return x


def assert_exact(
    actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], rounding: float
) -> None:
    """Within the relative ``rounding`` of the output, and that of float32 arithmetic."""
    out, lse = actual
    assert out.shape == expected[0].shape
    assert lse.shape == expected[1].shape
    assert lse.dtype == torch.float32
    seen = expected[1] > -torch.inf
    assert torch.equal(lse == -torch.inf, ~seen), "lse is not -inf exactly where no key is seen"
    torch.testing.assert_close(lse[seen].double(), expected[1][seen], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(out.double(), expected[0], atol=2e-5, rtol=rounding + 1e-4)
