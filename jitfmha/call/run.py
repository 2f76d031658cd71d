"""From the arguments of a call to a launched kernel, once slowly and from then on quickly.

A call is looked up under everything that the checks look at, allocates its outputs and launches.
What is not there yet is prepared, on one of two ways. The first call of a kind is checked, planned
and bound. Lengths and strides do not belong to the kind: a call with new ones is checked for them
alone, and gets a launch of the kernel that the kind has.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from ..planning.plan import Kernel, Launch
from ..planning.target import CALLS_HERE, MOST_CALLS, TARGET_HERE, Target
from ..problem.arguments import (
    Arguments,
    CuSeqlens,
    Descales,
    KeyOptions,
    Modifiers,
    Tensors,
    new_tuple,
)
from ..problem.mask import OPEN_WINDOW
from ..problem.memory import HUGE_PAGES_FROM_BYTES, extent, may_overlap, request_huge_pages
from ..problem.problem import (
    PlainSizes,
    Problem,
    check_cu_seqlens_values,
    check_sizes,
    make_problem,
    out_dtype_of,
)
from .detection import target_of
from .dispatch import plan_for

PreparedCall: TypeAlias = (
    "tuple[CallKind, Launch | None, PlainSizes, tuple[int, ...], bool, bool, "
    "tuple[tuple[int, ...], ...], tuple[int, ...]]"
)
"""A call of which everything but the tensors' addresses is settled; a plain tuple, as every new
length makes one:

* the kind, which is what it has in common with calls of other lengths and strides;
* the launch; None where there is no output element to compute;
* lengths and strides;
* the shape of a new output;
* whether a new output has the shape, strides and dtype of q, and an ordinary size: allocating such
  an output is quicker;
* whether a new output wants huge pages;
* shape and strides of the lse, which are there only where it is asked for;
* of q, k, v and ``out`` the bytes from the first to behind the last element, which are there only
  where ``out`` is given.
"""


class CallKind:
    """Calls that differ in lengths, strides and addresses only, and the kernels that serve them.

    Attributes:
        out_dtype: of outputs.
        reads_cu_seqlens: whether the values of ``cu_seqlens`` are checked.
        float32: an empty tensor, which new ones of that dtype are made by: to name the dtype takes
            longer.
    """

    def __init__(self, problem: Problem, target: Target, q: Tensor) -> None:
        self._problem = problem
        self._target = target
        self._kernels: list[Kernel] = []
        self._kernel_names: dict[PlainSizes, str] = {}
        self._sequences = problem.batch * problem.heads_q
        self._batch = problem.batch if problem.mode == "gm0" else None
        self._heads_q = problem.heads_q
        self._hdim_v = problem.hdim_v
        self.out_dtype = out_dtype_of(q.dtype)
        self._out_may_be_like_q = problem.hdim_v == problem.hdim_q and self.out_dtype == q.dtype
        self.reads_cu_seqlens = target.has_host_memory
        self.float32 = q.new_empty(0, dtype=torch.float32)
        row_bytes = (self._batch or 1) * problem.heads_q * problem.hdim_v * self.out_dtype.itemsize
        self._huge_pages_from_seqlen_q: float = inf
        if q.device.type == "cpu" and row_bytes > 0:
            self._huge_pages_from_seqlen_q = HUGE_PAGES_FROM_BYTES / row_bytes

    def prepare(self, sizes: PlainSizes, arguments: Arguments) -> PreparedCall:
        """The call of this kind with these lengths and strides.

        Raises ``NotImplementedError`` where no family serves them.
        """
        seqlen_q, _, strides_q, _, _, strides_out = sizes
        batch = self._batch
        wants_huge_pages = seqlen_q >= self._huge_pages_from_seqlen_q
        # Where nobody has a kernel yet, or the first one is not the best, everything is asked.
        launch = self._kernels[0].launch_for(sizes) if self._kernels and seqlen_q else None
        if launch is None:
            launch = self._launch_for(sizes)
        spans: tuple[int, ...] = ()
        if arguments[_OUT] is not None:
            tensors = arguments.q, arguments.k, arguments.v, arguments.out
            spans = tuple([extent(x)[1] for x in tensors if x is not None])
        return (
            self,
            launch,
            sizes,
            (seqlen_q, self._heads_q, self._hdim_v)
            if batch is None
            else (batch, seqlen_q, self._heads_q, self._hdim_v),
            self._out_may_be_like_q and strides_out == strides_q and not wants_huge_pages,
            wants_huge_pages,
            self._lse_layout(seqlen_q) if arguments[_RETURN_LSE] else (),
            spans,
        )

    def _lse_layout(self, seqlen_q: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of a contiguous lse."""
        shape, strides = (self._heads_q, seqlen_q), (seqlen_q, 1)
        if self._batch is None:
            return shape, strides
        return (self._batch, *shape), (self._heads_q * seqlen_q, *strides)

    def _launch_for(self, sizes: PlainSizes) -> Launch | None:
        """The launch for ``sizes``; None where there is no output element to compute."""
        if self._sequences * sizes[0] == 0:
            # What nobody serves is refused, also where there is nothing to compute.
            plan_for(self._problem.with_sizes(sizes), self._target)
            return None
        for kernel in self._kernels:
            launch = kernel.launch_for(sizes)
            if launch is not None:
                return launch
        kernel = plan_for(self._problem.with_sizes(sizes), self._target).bind()
        launch = kernel.launch_for(sizes)
        assert launch is not None, "a kernel serves the sizes that it was planned for"
        self._kernels.insert(0, kernel)
        return launch

    def kernel_name(self, sizes: PlainSizes) -> str:
        """The name of the kernel that serves calls with ``sizes``, for a profile."""
        if len(self._kernel_names) >= _MOST_KERNEL_NAMES:
            self._kernel_names.clear()
        if sizes not in self._kernel_names:
            plan = plan_for(self._problem.with_sizes(sizes), self._target)
            self._kernel_names[sizes] = plan.kernel
        return self._kernel_names[sizes]


_MOST_KERNEL_NAMES = 256


def run(arguments: Arguments, is_profiled: bool = False) -> tuple[Tensor, Tensor | None]:
    """Compute attention eagerly: the output, and the log-sum-exp where it is asked for.

    Tensors must be plain: no subclass, no tracing, no transform in effect. With ``is_profiled`` the
    kernel appears by its name in torch's profiler.
    """
    (
        q,
        k,
        v,
        scale,
        mask,
        window,
        return_lse,
        out,
        cu_seqlens,
        bf16_cvt,
        descales,
        modifiers,
        dropout,
        keys,
    ) = arguments
    # CPU tensors are another target's where one is put in place, and only there.
    target = TARGET_HERE.get()
    cache = CALLS_HERE if target is None else target.calls
    options: Hashable
    key: Any
    try:
        options = (
            q.dtype,
            q.device,
            k.dtype,
            k.device,
            v.dtype,
            v.device,
            # 1, 1.0 and True are one key, but not all of them are valid: add what tells them apart.
            scale,
            scale.__class__,
            mask,
            mask.__class__,
            None if window is OPEN_WINDOW else repr(window),
            return_lse,
            return_lse.__class__,
            bf16_cvt,
            None if cu_seqlens is None else _described_cu_seqlens(cu_seqlens),
            None if descales is None else _described_descales(descales),
            None if modifiers is None else _described_modifiers(modifiers),
            None if dropout is None else (dropout.p, _described(dropout.rng_state)),
            None if keys is None else _described_keys(keys),
        )
        calls = cache.by_options.get(options)
        key = (
            q.shape,
            q.stride(),
            k.shape,
            k.stride(),
            v.shape,
            v.stride(),
            None if out is None else (out.shape, out.stride(), out.dtype, out.device),
            None if modifiers is None else _sizes_of_bias(modifiers, cu_seqlens),
        )
        prepared = None if calls is None else calls.prepared.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Not a tensor, not hashable, not strided: the checks say what is wrong, if anything.
        prepared = _first_of_kind(arguments)
    else:
        if prepared is None:
            paged = keys is not None and keys.block_table is not None
            kind_key, new_sizes = _kind_and_sizes(key, cu_seqlens is not None, paged)
            known = None if calls is None else calls.kinds.get(kind_key)
            if calls is not None and known is not None:
                prepared = known.prepare(new_sizes or check_sizes(arguments), arguments)
            else:
                prepared = _first_of_kind(arguments)
                calls = cache.keep_kind(options, kind_key, prepared[0])
            # Here, since a method would take longer: a decode loop comes by in every step.
            if len(calls.prepared) >= MOST_CALLS:
                calls.prepared.clear()
            calls.prepared[key] = prepared
    kind, launch, sizes, out_shape, out_is_like_q, wants_huge_pages, lse_layout, spans = prepared
    covered = True
    if cu_seqlens is not None:
        if kind.reads_cu_seqlens:
            table = None if keys is None else keys.block_table
            covered = check_cu_seqlens_values(sizes, cu_seqlens, table)
        else:
            covered = cu_seqlens.q_padded is cu_seqlens.q
    if out is None:
        if out_is_like_q:
            out = _empty_like(q)
        else:
            out = q.new_empty_strided(out_shape, sizes[5], dtype=kind.out_dtype)
            if wants_huge_pages:
                request_huge_pages(out)
        if not covered:
            out.zero_()
    else:
        _refuse_shared_memory(out, q, k, v, spans)
        if not out.is_inference():
            # Autograd must notice the write if it has saved out for a backward pass.
            torch.autograd.graph.increment_version(out)
    lse = None
    if return_lse:
        lse = kind.float32.new_empty_strided(*lse_layout)
        if not covered:
            lse.fill_(-torch.inf)
    if launch is not None:
        tensors = new_tuple(
            Tensors,
            (q, k, v, out, lse, cu_seqlens, descales, modifiers, dropout, None, keys),
        )
        if is_profiled:
            with record_function(kind.kernel_name(sizes)):
                launch(tensors)
        else:
            launch(tensors)
    return out, lse


_empty_like = torch.empty_like
_OUT = Arguments._fields.index("out")
_RETURN_LSE = Arguments._fields.index("return_lse")


def _first_of_kind(arguments: Arguments) -> PreparedCall:
    problem = make_problem(arguments)
    kind = CallKind(problem, target_of(arguments.q.device), arguments.q)
    return kind.prepare(problem.sizes, arguments)


def _kind_and_sizes(key: Any, is_group: bool, is_paged: bool) -> tuple[Hashable, PlainSizes | None]:
    """The part of a call's key that tells kinds apart, and what ``check_sizes`` would give.

    The latter only where it is plain at a glance that there is nothing to refuse. A tensor with a
    dimension too few or too many makes a kind of its own, which is refused.
    """
    shape_q, strides_q, shape_k, strides_k, shape_v, strides_v, out, bias = key
    batch: int | None = None
    batch_k = batch_v = None
    try:
        if not is_group:
            batch, seqlen_q, heads_q, hdim_q = shape_q
            batch_k, seqlen_k, heads_k, hdim_k = shape_k
            batch_v, seqlen_v, heads_v, hdim_v = shape_v
            row = heads_q * hdim_v
            strides_out: tuple[int, ...] = (seqlen_q * row, row, hdim_v, 1)
        else:
            seqlen_q, heads_q, hdim_q = shape_q
            if is_paged:
                # The number of pages takes the place of the batch.
                batch_k, seqlen_k, heads_k, hdim_k = shape_k
                batch_v, seqlen_v, heads_v, hdim_v = shape_v
            else:
                seqlen_k, heads_k, hdim_k = shape_k
                seqlen_v, heads_v, hdim_v = shape_v
            strides_out = (heads_q * hdim_v, hdim_v, 1)
    except ValueError:
        return key, None
    last_stride_v = strides_v[-1]
    kind_key = (
        batch,
        batch_k,
        batch_v,
        heads_q,
        heads_k,
        heads_v,
        hdim_q,
        hdim_k,
        hdim_v,
        last_stride_v == 1,
        out and out[2:],
    )
    if (
        out
        or bias
        or seqlen_k != seqlen_v
        or not strides_q[-1] == strides_k[-1] == last_stride_v == 1
    ):
        return kind_key, None
    return kind_key, (seqlen_q, seqlen_k, strides_q, strides_k, strides_v, strides_out)


def _described_descales(descales: Descales) -> tuple[object, ...]:
    """What the checks look at."""
    return tuple([_described(x) for x in descales])


def _described_modifiers(modifiers: Modifiers) -> tuple[object, ...]:
    """What the checks look at, but for the sizes of a bias."""
    bias, alibi_slopes, logit_softcap, sink, sink_size = modifiers
    of_bias = None if bias is None else (bias.dtype, bias.device)
    return of_bias, _described(alibi_slopes), logit_softcap, _described(sink), sink_size


def _sizes_of_bias(modifiers: Modifiers, cu_seqlens: CuSeqlens | None) -> tuple[object, ...] | None:
    bias = modifiers.bias
    if bias is None:
        return None
    # A bias of gm1 is as wide as the longest sequence of keys.
    longest = None if cu_seqlens is None else cu_seqlens.max_seqlen_k
    return bias.shape, bias.stride(), longest


def _described_keys(keys: KeyOptions) -> tuple[object, ...]:
    """What the checks look at, and the room of a table's row."""
    block_table, num_splits, out_accum, _ = keys
    has_split_results = out_accum is not None
    if block_table is None:
        return None, num_splits, has_split_results
    return _described(block_table), block_table.is_neg(), num_splits, has_split_results


def _described(x: Tensor | None) -> tuple[object, ...] | None:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


def _described_cu_seqlens(cu_seqlens: CuSeqlens) -> tuple[object, ...]:
    """What the checks look at; tensors that are there twice, as those of self-attention, once."""
    q, k, q_padded, k_padded, _, _ = cu_seqlens
    plain: tuple[object, ...] = (q.shape, q.stride(), q.dtype, q.device, q.is_neg())
    if k is not q:
        plain = (plain, k.shape, k.stride(), k.dtype, k.device, k.is_neg())
    if q_padded is q and k_padded is k:
        return plain
    padded = [(x.shape, x.stride(), x.dtype, x.device, x.is_neg()) for x in (q_padded, k_padded)]
    return (*plain, *padded)


def _refuse_shared_memory(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, spans: tuple[int, ...]
) -> None:
    start = out.data_ptr()
    end = start + spans[3]
    for name, x, span in (("q", q, spans[0]), ("k", k, spans[1]), ("v", v, spans[2])):
        other = x.data_ptr()
        if start < other + span and other < end and may_overlap(out, x):
            raise ValueError(f"out shares memory with {name}; give it memory of its own")
