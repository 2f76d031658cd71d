"""From the arguments of a call to a launched kernel, once slowly and from then on quickly.

A call is looked up under everything that the checks look at, allocates its outputs and launches.
What is not there yet is prepared, on one of two ways. The first call of a kind is checked, planned
and bound. Lengths and strides do not belong to the kind: a call with new ones is checked for them
alone, and gets a launch of the kernel that the kind has.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from ..planning.plan import Launch, LengthsNotPlain, Plan
from ..planning.target import CALLS_HERE, TARGET_HERE, CpuTarget, Target
from ..problem.arguments import (
    Arguments,
    CuSeqlens,
    Descales,
    KeyOptions,
    Tensors,
    is_of_tokens,
    new_tuple,
)
from ..problem.dtypes import TORCH_DTYPES
from ..problem.mask import OPEN_WINDOW
from ..problem.memory import HUGE_PAGES_FROM_BYTES, extent, may_overlap, request_huge_pages
from ..problem.packed_pages import DIMENSIONS as PACKED_DIMENSIONS
from ..problem.page_lists import are_lists
from ..problem.problem import (
    PlainSizes,
    Problem,
    check_cu_seqlens_values,
    check_sizes,
    is_v_at_k,
    make_problem,
    unevenness_of,
)
from ..problem.score_features import SCORE_FEATURES, Modifiers
from .detection import target_of
from .dispatch import plan_for


@dataclass(eq=False, repr=False, slots=True)
class PreparedCall:
    """A call of which everything but the tensors' addresses is settled.

    Attributes:
        kind: what it has in common with calls of other lengths and strides.
        launch: None where there is no output element to compute.
        sizes: lengths and strides.
        out_shape: of a new output.
        out_is_like_q: whether a new output has the shape, strides and dtype of q, and an ordinary
            size: allocating such an output is quicker.
        wants_huge_pages: whether a new output does.
        lse_layout: shape and strides of the lse; None where it is not asked for.
        spans: where ``out`` is given, the bytes from the first to behind the last element, of it
            and of each of ``_read``; 0 of what is no tensor.
        has_gradients: whether it is known that backward is served, too.
    """

    kind: CallKind
    launch: Launch | None
    sizes: PlainSizes
    out_shape: tuple[int, ...]
    out_is_like_q: bool
    wants_huge_pages: bool
    lse_layout: tuple[tuple[int, ...], tuple[int, ...]] | None
    spans: Sequence[float]
    has_gradients: bool = False


class CallKind:
    """Calls that differ in lengths, strides and addresses only, and the kernels that serve them.

    Attributes:
        out_dtype: of outputs.
        reads_cu_seqlens: whether the values of ``cu_seqlens`` are checked.
        kernels_check_lengths: whether kernels do so, and Python only where they find something.
        float32: an empty tensor, which new ones of that dtype are made by: to name the dtype takes
            longer.
    """

    def __init__(self, problem: Problem, target: Target, q: Tensor) -> None:
        self._problem = problem
        self._target = target
        self._plans: list[Plan] = []
        self._kernel_names: dict[PlainSizes, str] = {}
        self._sequences = problem.batch * problem.heads_q
        self._batch = problem.batch if problem.mode == "gm0" else None
        self._heads_q = problem.heads_q
        self._hdim_v = problem.hdim_v
        self.out_dtype = TORCH_DTYPES[problem.out_dtype]
        self._out_may_be_like_q = problem.hdim_v == problem.hdim_q and self.out_dtype == q.dtype
        self.reads_cu_seqlens = target.has_host_memory
        self.kernels_check_lengths = isinstance(target, CpuTarget)
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
        plans = self._plans
        launch: Launch | None
        if plans and seqlen_q and plans[0].serves(sizes):
            launch = plans[0].launch_for(sizes)
        else:
            launch = self._launch_for(sizes)
        spans: list[float] = []
        if arguments.out is not None:
            tensors, keys = (arguments.out, *_read(arguments)), arguments.keys
            spans = [extent(x)[1] if isinstance(x, Tensor) else 0 for x in tensors]
            if keys is not None and keys.block_table is not None and are_lists(keys.block_table):
                spans[-1] = inf  # the key of a call leaves out how long lists are
        return PreparedCall(
            self,
            launch,
            sizes,
            (seqlen_q, self._heads_q, self._hdim_v)
            if batch is None
            else (batch, seqlen_q, self._heads_q, self._hdim_v),
            self._out_may_be_like_q and strides_out == strides_q and not wants_huge_pages,
            wants_huge_pages,
            self._lse_layout(seqlen_q) if arguments.return_lse else None,
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
        for plan in self._plans:
            if plan.serves(sizes):
                # The next call's lengths are often like these.
                self._plans = [plan, *(other for other in self._plans if other is not plan)]
                return plan.launch_for(sizes)
        plan = plan_for(self._problem.with_sizes(sizes), self._target)
        plan.bind()
        if plan.is_settled:
            self._plans.insert(0, plan)
        return plan.launch_for(sizes)

    def kernel_name(self, sizes: PlainSizes) -> str:
        """The name of the kernel that serves calls with ``sizes``, for a profile."""
        name = self._kernel_names.get(sizes)
        if name is None:
            if len(self._kernel_names) >= _MOST_KERNEL_NAMES:
                self._kernel_names.clear()
            name = plan_for(self._problem.with_sizes(sizes), self._target).kernel
            self._kernel_names[sizes] = name
        return name


_MOST_KERNEL_NAMES = 256


def run(arguments: Arguments, is_profiled: bool = False) -> tuple[Tensor, Tensor | None]:
    """Compute attention eagerly: the output, and the log-sum-exp where it is asked for.

    Tensors must be plain: no subclass, no tracing, no transform in effect. With ``is_profiled`` the
    kernel appears by its name in torch's profiler.
    """
    return run_prepared(prepared_call(arguments), arguments, is_profiled)


def run_parts(arguments: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with the results of each part of the keys, accumulated outputs and their lse."""
    arguments = arguments._replace(return_lse=True)
    parts, keys = new_parts(arguments), arguments.keys
    assert keys is not None
    out, lse = run(arguments._replace(keys=KeyOptions(keys.block_table, keys.num_splits, *parts)))
    assert lse is not None
    return out, lse, *parts


def new_parts(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Where the results of parts go; parts that are not there see no keys.

    Raises what ``make_problem`` does.
    """
    problem, keys, q = make_problem(arguments), arguments.keys, arguments.q
    assert keys is not None
    shape = keys.num_splits, *problem.lse_shape
    lse = q.new_full(shape, -torch.inf, dtype=torch.float32)
    return q.new_zeros(*shape, problem.hdim_v, dtype=torch.float32), lse


def prepared_call(arguments: Arguments) -> PreparedCall:
    """The call, looked up or prepared.

    Raises ``TypeError``, ``ValueError`` or ``NotImplementedError`` where a check says no.
    """
    # CPU tensors are another target's where one is put in place, and only there.
    target = TARGET_HERE.get()
    cache = CALLS_HERE if target is None else target.calls
    try:
        options, key = key_of(arguments)
        calls = cache[options]
        prepared: PreparedCall | None = calls.prepared.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Not a tensor, not hashable, not strided: the checks say what is wrong, if anything.
        return _first_of_kind(arguments)
    if prepared is None:
        kind_key, sizes = _kind_and_sizes(key, arguments)
        kind: CallKind | None = calls.kinds.get(kind_key)
        if kind is not None:
            prepared = kind.prepare(sizes or check_sizes(arguments), arguments)
        else:
            prepared = _first_of_kind(arguments)
            calls.keep_kind(kind_key, prepared.kind)
        calls.keep(key, prepared)
    return prepared


def run_prepared(
    prepared: PreparedCall,
    arguments: Arguments,
    is_profiled: bool = False,
    lengths_are_checked: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What ``run`` does with a call that is looked up.

    With ``lengths_are_checked`` nobody looks at ``cu_seqlens``, whose sequences have all rows of q.
    """
    # 0.2 us less than reading nine fields by their names.
    q, k, v, _, _, _, _, out, cu_seqlens, _, descales, modifiers, dropout, keys = arguments
    kind = prepared.kind
    launch, covered = prepared.launch, True
    are_checked = lengths_are_checked or cu_seqlens is None
    if not are_checked and (launch is None or not kind.kernels_check_lengths):
        covered, are_checked = _covers_rows(prepared, arguments), True
    if out is None:
        if prepared.out_is_like_q:
            out = _empty_like(q)
        else:
            *_, strides = prepared.sizes
            out = q.new_empty_strided(prepared.out_shape, strides, dtype=kind.out_dtype)
            if prepared.wants_huge_pages:
                request_huge_pages(out)
    else:
        _refuse_shared_memory(out, arguments, prepared.spans)
    lse = None
    if prepared.lse_layout is not None:
        lse = kind.float32.new_empty_strided(*prepared.lse_layout)
    if not covered:
        _clear_unused(arguments, out, lse)
    if launch is not None:
        # Tensors(...) itself takes half a microsecond longer.
        tensors = new_tuple(
            Tensors,
            (q, k, v, out, lse, cu_seqlens, descales, modifiers, dropout, None, keys, are_checked),
        )
        is_plain = True
        try:
            if is_profiled:
                with record_function(kind.kernel_name(prepared.sizes)):
                    launch(tensors)
            else:
                launch(tensors)
        except LengthsNotPlain:
            is_plain = False  # what is wrong is no part of this error
        if not is_plain:
            if not _covers_rows(prepared, arguments):
                _clear_unused(arguments, out, lse)
            launch(tensors._replace(lengths_are_checked=True))
    if arguments.out is not None and not out.is_inference():
        # Autograd must notice the write if it has saved out for a backward pass.
        torch.autograd.graph.increment_version(out)
    return out, lse


def _clear_unused(arguments: Arguments, out: Tensor, lse: Tensor | None) -> None:
    """Give rows of no sequence their values in new tensors."""
    if arguments.out is None:
        out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)


def _covers_rows(prepared: PreparedCall, arguments: Arguments) -> bool:
    """Whether sequences have all rows of q, as far as is known; raises for numbers out of range."""
    cu_seqlens, keys = arguments.cu_seqlens, arguments.keys
    assert cu_seqlens is not None
    if not prepared.kind.reads_cu_seqlens:
        return cu_seqlens.q_padded is cu_seqlens.q
    table = None if keys is None else keys.block_table
    return check_cu_seqlens_values(prepared.sizes, cu_seqlens, table)


_empty_like = torch.empty_like


def _first_of_kind(arguments: Arguments) -> PreparedCall:
    problem = make_problem(arguments).with_unevenness(arguments.cu_seqlens)
    kind = CallKind(problem, target_of(arguments.q.device), arguments.q)
    return kind.prepare(problem.sizes, arguments)


# ---- The key of a call ---------------------------------------------------------------------------


def key_of(arguments: Arguments) -> tuple[Hashable, Any]:
    """What a call is looked up by: its options, and the shapes and strides of its tensors.

    Raises ``AttributeError``, ``TypeError`` or ``RuntimeError`` where an argument cannot be
    described: what should be a tensor is none, or a tensor has no strides.
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
    k_shape, v_shape = k.shape, v.shape
    return (
        q.dtype,
        # Quicker than the device, and as good on the CPU.
        q.is_cpu or q.device,
        k.dtype,
        k.is_cpu or k.device,
        v.dtype,
        v.is_cpu or v.device,
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
        None if dropout is None else described(dropout),
        None if keys is None else _described_keys(keys),
        # The same shapes, the common case, are compared 0.8 us quicker than the last sizes.
        k_shape != v_shape and is_v_at_k(k, v),
    ), (
        q.shape,
        q.stride(),
        k_shape,
        k.stride(),
        v_shape,
        v.stride(),
        None if out is None else (out.shape, out.stride(), out.dtype, out.is_cpu or out.device),
        None
        if modifiers is None and descales is None
        else _lengths_of_features(modifiers, descales, cu_seqlens),
    )


_WITH_LENGTHS = frozenset(i for i, row in enumerate(SCORE_FEATURES) if row.has_lengths)


def described(values: Iterable[Any]) -> tuple[object, ...]:
    """What checks and plans look at: of tensors all but their data."""
    return tuple(
        [
            (x, x.__class__)
            if x is None or not isinstance(x, Tensor)
            else (x.shape, x.stride(), x.dtype, x.is_cpu or x.device, x.is_neg())
            for x in values
        ]
    )


def _described_modifiers(modifiers: Modifiers) -> tuple[object, ...]:
    """Describe the modifiers without the shapes that change with a call's lengths."""
    values: tuple[Any, ...] = modifiers
    fixed = [None if i in _WITH_LENGTHS else x for i, x in enumerate(values)]
    of_others = [
        (x.dtype, x.is_cpu or x.device) for i in _WITH_LENGTHS if (x := values[i]) is not None
    ]
    return (*described(fixed), *of_others)


def _described_descales(descales: Descales) -> tuple[object, ...]:
    """Describe the scales likewise: those of tokens change with the lengths."""
    return described(
        (x.dim(), x.dtype, x.is_cpu or x.device, x.is_neg()) if is_of_tokens(x) else x
        for x in descales
    )


def _described_keys(keys: KeyOptions) -> tuple[object, ...]:
    """Describe them without the length of lists of pages, which is another in every step."""
    table, num_splits, out_accum, lse_accum = keys
    rest: Hashable = num_splits
    if out_accum is not None or lse_accum is not None:
        rest = described(keys[1:])
    if table is None:
        return None, rest
    where = table.is_cpu or table.device
    if are_lists(table):
        return table.is_contiguous(), table.dtype, where, table.is_neg(), rest
    return table.shape, table.stride(), table.dtype, where, table.is_neg(), rest


def _lengths_of_features(
    modifiers: Modifiers | None, descales: Descales | None, cu_seqlens: CuSeqlens | None
) -> tuple[object, ...] | None:
    """Describe the shapes that do; a bias of gm1 is as wide as the longest sequence of keys."""
    values: tuple[Any, ...] = modifiers or Modifiers()
    shapes = [(x.shape, x.stride()) for i in _WITH_LENGTHS if (x := values[i]) is not None]
    shapes += [(x.shape, x.stride()) for x in descales or () if is_of_tokens(x)]
    if not shapes:
        return None
    return (*shapes, None if cu_seqlens is None else cu_seqlens.max_seqlen_k)


def _described_cu_seqlens(cu_seqlens: CuSeqlens) -> tuple[object, ...]:
    """What the checks look at; tensors that are there twice, as those of self-attention, once."""
    q, k, q_padded, k_padded, _, _ = cu_seqlens
    plain: tuple[object, ...] = _described_sums(q)
    if k is not q:
        plain = (plain, *_described_sums(k))
    if q_padded is q and k_padded is k:
        return plain
    return (*plain, _described_sums(q_padded), _described_sums(k_padded))


def _described_sums(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.dtype, x.is_cpu or x.device, x.is_neg()


def _kind_and_sizes(key: Any, arguments: Arguments) -> tuple[Hashable, PlainSizes | None]:
    """The part of a call's key that tells kinds apart, and what ``check_sizes`` would give.

    The latter only where it is plain at a glance that there is nothing to refuse. A tensor with a
    dimension too few or too many makes a kind of its own, which is refused.
    """
    shape_q, strides_q, shape_k, strides_k, shape_v, strides_v, out, lengths = key
    keys = arguments.keys
    is_paged = keys is not None and keys.block_table is not None
    if is_paged and len(shape_k) == len(shape_v) == PACKED_DIMENSIONS:
        rows_q = shape_q[0] if len(shape_q) > 2 else 0
        unevenness = unevenness_of(arguments.cu_seqlens, rows_q, shape_k[3])
        kind = len(shape_q), shape_q[-2:], shape_k, shape_v, out and out[2:], unevenness
        return kind, None
    batch: int | None = None
    batch_k = batch_v = None
    try:
        if arguments.cu_seqlens is None:
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
        unevenness_of(arguments.cu_seqlens, seqlen_q, seqlen_k),
    )
    if (
        out
        or lengths
        or is_paged
        or seqlen_k != seqlen_v
        or not strides_q[-1] == strides_k[-1] == last_stride_v == 1
    ):
        return kind_key, None
    return kind_key, (seqlen_q, seqlen_k, strides_q, strides_k, strides_v, strides_out)


def _read(arguments: Arguments) -> list[Any]:
    """The tensors that a call reads, among numbers and None."""
    q, k, v, _, _, _, _, _, cu_seqlens, _, descales, modifiers, dropout, keys = arguments
    read: list[Any] = [q, k, v]
    if cu_seqlens is not None:
        read += cu_seqlens[:4]
    if descales is not None:
        read += descales
    if modifiers is not None:
        read += modifiers
    if dropout is not None:
        read.append(dropout.rng_state)
    if keys is not None:
        read.append(keys.block_table)
    return read


def _refuse_shared_memory(out: Tensor, arguments: Arguments, spans: Sequence[float]) -> None:
    start = out.data_ptr()
    end = start + spans[0]
    for x, span in zip(_read(arguments), spans[1:], strict=True):
        if span:
            other = x.data_ptr()
            if start < other + span and other < end and may_overlap(out, x):
                flat = arguments.flattened().items()
                name = next(name for name, y in flat if y is x)
                raise ValueError(f"out shares memory with {name}; give it memory of its own")
