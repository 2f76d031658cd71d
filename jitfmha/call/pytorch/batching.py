"""What ``torch.vmap`` does with the operators.

The new dimension and the batch become one, so that one launch computes all examples. Calls that
this does not fit run example by example: packed sequences, whose lengths lie in one tensor;
dropout, which drops by position in the batch; sinks and scales of 8-bit inputs that differ between
examples; gradients of biases and sinks, which a launch adds up over the batch; calls with ``out``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...problem.arguments import is_of_tokens
from .ops import BACKWARD_NAMES, NAMES, NAMES_WITH_OUT, library

_ROWS = ("dout", "q", "k", "v", "out", "lse", "dlse")
_BY_BATCH_OR_NOT = ("alibi_slopes", "q_descale", "k_descale", "v_descale", "p_descale")
_SAME_FOR_ALL = ("sink", "q_descale", "k_descale", "v_descale", "p_descale")
_SCALES_OF_TOKENS = ("k_descale", "v_descale")
_ONE_BY_ONE = ("cu_seqlens_q", "block_table", "with_dbias", "with_dsink", "dropout_p")


class _Examples(NamedTuple):
    """The arguments of one operator by name, of ``size`` examples.

    ``dims`` says where a tensor has them; None where one serves all.
    """

    flat: dict[str, Any]
    dims: dict[str, int | None]
    size: int

    @classmethod
    def of(cls, names: tuple[str, ...], info: Any, dims: Any, given: Any) -> _Examples:
        flat = dict(zip(names, given, strict=False))
        tensors = {name for name, x in flat.items() if isinstance(x, Tensor)}
        named = zip(names, dims, strict=False)
        return cls(flat, {name: at for name, at in named if name in tensors}, info.batch_size)

    @property
    def fit_one_launch(self) -> bool:
        """Whether the examples can become parts of one batch."""
        flat, dims = self.flat, self.dims
        if any(flat.get(name) for name in _ONE_BY_ONE if not isinstance(flat.get(name), Tensor)):
            return False
        if any(isinstance(flat.get(name), Tensor) for name in _ONE_BY_ONE):
            return False
        return all(dims.get(name) is None for name in _SAME_FOR_ALL)

    def number(self, i: int) -> tuple[Any, ...]:
        """Return the arguments of the example with the number ``i``."""
        return tuple(
            x if self.dims.get(name) is None else x.select(self.dims[name], i)
            for name, x in self.flat.items()
        )

    def in_one_batch(self) -> tuple[Any, ...]:
        """The arguments of one call with all examples."""
        batch = self._first("q").shape[1]
        rows_too = [name for name in _SCALES_OF_TOKENS if is_of_tokens(self.flat.get(name))]
        changed = {
            name: _joined(self._first(name)) for name in (*_ROWS, *rows_too) if name in self.dims
        }
        for name in _BY_BATCH_OR_NOT:
            x = self.flat.get(name)
            if x is not None and (self.dims[name] is not None or x.dim() == 2):
                first = self._first(name)
                rows = first if first.dim() == 3 else first[:, None]
                changed[name] = rows.expand(-1, batch, -1).flatten(0, 1)
        bias = self.flat.get("bias")
        if bias is not None and (self.dims["bias"] is not None or bias.shape[0] > 1):
            changed["bias"] = self._first("bias").expand(-1, batch, -1, -1, -1).flatten(0, 1)
        return tuple((self.flat | changed).values())

    def parted(self, x: Tensor) -> Tensor:
        """A result of that call, with the examples first."""
        return x.unflatten(0, (self.size, -1)) if self.size else x.new_empty(0, *x.shape)

    def _first(self, name: str) -> Tensor:
        x, at = self.flat[name], self.dims[name]
        moved: Tensor = x.expand(self.size, *x.shape) if at is None else x.movedim(at, 0)
        return moved


def _joined(x: Tensor) -> Tensor:
    """Examples and batch in one dimension, copied where strides leave no other way."""
    joined = x.flatten(0, 1)
    return joined.contiguous() if joined.shape[-1] > 1 and joined.stride(-1) != 1 else joined


_Results = tuple[tuple[Tensor, ...], tuple[int | None, ...]]


def _fmha_fwd(info: Any, dims: Any, *given: Any) -> _Results:
    examples = _Examples.of(NAMES, info, dims, given)
    operator = torch.ops.jitfmha.fmha_fwd
    lse_dim = 0 if examples.flat["return_lse"] else None
    if not examples.fit_one_launch:
        return _one_by_one(operator, examples, (0, lse_dim))
    out, lse = operator(*examples.in_one_batch())
    return (examples.parted(out), lse if lse_dim is None else examples.parted(lse)), (0, lse_dim)


def _fmha_bwd(info: Any, dims: Any, *given: Any) -> _Results:
    examples = _Examples.of(BACKWARD_NAMES, info, dims, given)
    operator = torch.ops.jitfmha.fmha_bwd
    wanted = [0 if examples.flat.get(name) else None for name in ("with_dbias", "with_dsink")]
    result_dims = (0, 0, 0, *wanted)
    if not examples.fit_one_launch:
        return _one_by_one(operator, examples, result_dims)
    *gradients, dbias, dsink = operator(*examples.in_one_batch())
    return (*(examples.parted(x) for x in gradients), dbias, dsink), result_dims


def _fmha_fwd_out(info: Any, dims: Any, *given: Any) -> tuple[Tensor, int | None]:
    examples = _Examples.of(NAMES_WITH_OUT, info, dims, given)
    if examples.dims["out"] is None:
        raise ValueError(
            f"out has shape {tuple(examples.flat['out'].shape)} and is the same for all "
            f"{info.batch_size} examples of a vmap; give it an in_dim of its own"
        )
    operator = torch.ops.jitfmha.fmha_fwd_out
    lses = [operator(*examples.number(i)) for i in range(examples.size)]
    return (torch.stack(lses), 0) if examples.flat["return_lse"] else (lses[0], None)


def _one_by_one(operator: Any, examples: _Examples, dims: tuple[int | None, ...]) -> _Results:
    results = zip(*(operator(*examples.number(i)) for i in range(examples.size)), strict=True)
    pairs = zip(results, dims, strict=True)
    return tuple(x[0] if dim is None else torch.stack(x) for x, dim in pairs), dims


for _name, _rule in (
    ("fmha_fwd", _fmha_fwd),
    ("fmha_fwd_out", _fmha_fwd_out),
    ("fmha_bwd", _fmha_bwd),
):
    torch.library.register_vmap(f"jitfmha::{_name}", _rule, lib=library)
