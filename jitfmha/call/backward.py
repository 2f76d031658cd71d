"""A backward pass: its arguments as a value, its checks, and the way to the launched kernel.

A call is looked up under everything that the checks look at. What is not there yet is checked,
planned and bound, as in :mod:`jitfmha.call.run`.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from ..planning.plan import Launch, LengthsNotPlain
from ..planning.target import CALLS_HERE, TARGET_HERE, CpuTarget
from ..problem.arguments import (
    Arguments,
    CuSeqlens,
    Gradients,
    Tensors,
    check_choice,
    new_tuple,
)
from ..problem.checks import check_last_dimension, check_layout, not_a_tensor
from ..problem.dtypes import out_dtype_of
from ..problem.memory import overlaps_itself, refuse_shared_rooms, write_zeros
from ..problem.packed_rows import sequences_of_rows
from ..problem.problem import GradientStrides, Problem, check_cu_seqlens_values, make_problem
from .detection import target_of
from .dispatch import plan_for
from .run import described, key_of


class BackwardArguments(NamedTuple):
    """What a backward pass reads, and where it shall write.

    Attributes:
        forward: the arguments of the call whose gradients these are; ``forward.out`` is what it
            returned.
        lse: what it returned, too.
        dout, dlse: the gradients of both; None is 0 for ``dlse``.
        dq, dk, dv: where to write; None for a new tensor.
        with_dbias, with_dsink: whether the gradients of the bias and of the sinks are wanted.
        deterministic: whether they must be the same in every run; None: as torch is set.
        atomic_fp32: in what kernels add dq up that do so with atomics; None leaves the choice.
    """

    forward: Arguments
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    with_dbias: bool = False
    with_dsink: bool = False
    deterministic: bool | None = None
    atomic_fp32: bool | None = None

    def inputs(self) -> list[tuple[str, Tensor]]:
        """The tensors that are read, under the names of the arguments."""
        read = {"dout": self.dout, **self.forward.flattened(), "lse": self.lse, "dlse": self.dlse}
        return [(name, x) for name, x in read.items() if isinstance(x, Tensor)]

    @property
    def must_be_deterministic(self) -> bool:
        """What is asked for, or else ``torch.use_deterministic_algorithms``."""
        if self.deterministic is None:
            return torch.are_deterministic_algorithms_enabled()
        return self.deterministic

    def outputs(self) -> tuple[tuple[str, Tensor | None, Tensor], ...]:
        """What is given to be written, under the names of the arguments, and what it is like."""
        q, k, v = self.forward[:3]
        return ("dq", self.dq, q), ("dk", self.dk, k), ("dv", self.dv, v)

    def used_rows(self) -> tuple[Tensor | None, ...]:
        """Which rows of dq, dk and dv belong to a sequence; None where all do, as in gm0."""
        sums = self.forward.cu_seqlens
        if sums is None:
            return None, None, None
        q, k, _ = self.forward[:3]
        of_k = sums.used_rows("k", len(k))
        return sums.used_rows("q", len(q)), of_k, of_k


class Results(NamedTuple):
    """What a backward pass computes; ``dbias`` and ``dsink`` where they are wanted."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsink: Tensor | None


class PreparedBackward(NamedTuple):
    """A backward pass of which everything but the tensors' addresses is settled.

    Attributes:
        launch: None where there is no query, so that all gradients are 0.
        kernel: its name.
        reads_cu_seqlens: whether the host checks their values; a GPU's it would wait for.
        kernel_checks_lengths: whether the kernel does, and Python only where it finds something.
        are_rows_dense: whether new gradients lie as the inputs do.
    """

    problem: Problem
    launch: Launch | None
    kernel: str
    reads_cu_seqlens: bool
    kernel_checks_lengths: bool
    are_rows_dense: bool


def run_backward(arguments: BackwardArguments, is_profiled: bool = False) -> Results:
    """Compute the gradients eagerly.

    Tensors must be plain: no subclass, no tracing, no transform in effect. With ``is_profiled`` the
    kernel appears by its name in torch's profiler.
    """
    forward, lse, dout, dlse, dq, dk, dv, with_dbias, with_dsink, deterministic, atomic = arguments
    target = TARGET_HERE.get()
    cache = CALLS_HERE if target is None else target.calls
    prepared: PreparedBackward | None
    try:
        options, key = key_of(forward)
        if deterministic is None:
            deterministic = _are_deterministic_algorithms_enabled()
        choices = with_dbias, with_dsink, deterministic, deterministic.__class__, atomic
        calls = cache[options]
        key = (
            key,
            dout.shape,
            dout.stride(),
            dout.dtype,
            dout.device,
            lse.shape,
            lse.stride(),
            lse.dtype,
            lse.device,
            # Where gradients are written to new tensors, and the lse has none, nobody asks.
            None if dlse is dq is dk is dv is None else described((dlse, dq, dk, dv)),
            choices,
            atomic.__class__,
        )
        prepared = calls.prepared.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Not a tensor, not hashable, not strided: the checks say what is wrong, if anything.
        prepared = _prepare(arguments)
    else:
        if prepared is None:
            prepared = _prepare(arguments)
            calls.keep(key, prepared)
    if is_profiled:
        with record_function(prepared.kernel):
            return _launch(prepared, arguments)
    return _launch(prepared, arguments)


_are_deterministic_algorithms_enabled = torch.are_deterministic_algorithms_enabled


def make_backward_problem(arguments: BackwardArguments) -> Problem:
    """Check everything about a backward pass that does not need the tensors' data.

    Raises ``TypeError`` or ``ValueError`` naming the argument and its value.
    """
    forward = arguments.forward
    q, out = forward.q, forward.out
    problem = make_problem(forward._replace(out=None)).with_unevenness(forward.cu_seqlens)
    check_keys_of_backward(problem.is_paged)
    _check_what_is_wanted(arguments)
    out_dtype = out_dtype_of(q.dtype)
    for name, x in (("out", out), ("dout", arguments.dout)):
        _check_like(name, x, problem.out_shape, out_dtype, q)
    assert out is not None, "it is checked"
    for name, x in (("lse", arguments.lse), ("dlse", arguments.dlse)):
        if x is not None or name == "lse":
            _check_like(name, x, problem.lse_shape, torch.float32, q, any_last_stride=True)
    for name, given, like in arguments.outputs():
        if given is None:
            continue
        _check_like(name, given, tuple(like.shape), like.dtype, q)
        if overlaps_itself(given):
            raise ValueError(f"{name} has strides {given.stride()} with which its elements overlap")
    strides = [x.stride() for x in new_gradients(arguments)]
    dlse = None if arguments.dlse is None else arguments.dlse.stride()
    return problem._replace(
        sizes=problem.sizes._replace(out=out.stride()),
        gradients=GradientStrides(arguments.dout.stride(), arguments.lse.stride(), dlse, *strides),
        is_deterministic=arguments.must_be_deterministic,
        atomic_fp32=arguments.atomic_fp32,
    )


def check_keys_of_backward(are_paged: bool) -> None:
    """Raise ``NotImplementedError`` where no kernel could say where gradients go."""
    if are_paged:
        raise NotImplementedError(
            "block_table: attention over keys and values in pages has no backward pass"
        )


def new_gradients(arguments: BackwardArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors for dq, dk and dv: those that are given, and new ones like q, k and v."""
    dq, dk, dv = (_new_like(like) if x is None else x for _, x, like in arguments.outputs())
    return dq, dk, dv


def _prepare(arguments: BackwardArguments) -> PreparedBackward:
    problem = make_backward_problem(arguments)
    target = target_of(arguments.forward.q.device)
    plan = plan_for(problem, target)
    has_queries = problem.batch * problem.seqlen_q * problem.heads_q > 0
    launch = None
    if has_queries:
        plan.bind()
        launch = plan.launch_for(problem.sizes)
    are_rows_dense = all(x.stride(-1) == 1 for x in arguments.forward[:3])
    kernel_checks = launch is not None and isinstance(target, CpuTarget)
    reads = target.has_host_memory
    return PreparedBackward(problem, launch, plan.kernel, reads, kernel_checks, are_rows_dense)


def _check_what_is_wanted(arguments: BackwardArguments) -> None:
    forward = arguments.forward
    modifiers, dropout = forward.modifiers, forward.dropout
    for name in ("deterministic", "atomic_fp32"):
        check_choice(name, getattr(arguments, name))
    if dropout is not None and dropout.rng_state is None:
        raise ValueError(
            f"rng_state=None: with dropout_p={dropout.p} a backward pass needs the state of the "
            "random numbers that the forward pass had"
        )
    bias = None if modifiers is None else modifiers.bias
    if arguments.with_dbias and (bias is None or bias.dtype == torch.bool):
        given = "bias=None" if bias is None else f"a bias of {bias.dtype}"
        raise ValueError(f"dbias is wanted, but {given} has no gradient")
    if arguments.with_dsink and (modifiers is None or modifiers.sink is None):
        raise ValueError("dsink is wanted, but sink=None has no gradient")


def _launch(prepared: PreparedBackward, arguments: BackwardArguments) -> Results:
    forward, lse, dout, dlse, dq, dk, dv, with_dbias, with_dsink, _, _ = arguments
    q, k, v, _, _, _, _, out, cu_seqlens, _, descales, modifiers, dropout, _ = forward
    are_given = not (dq is dk is dv is None)
    if are_given:
        refuse_shared_rooms(*arguments.inputs(), **{name: x for name, x, _ in arguments.outputs()})
    if are_given or not prepared.are_rows_dense:
        new_dq, new_dk, new_dv = new_gradients(arguments)
    else:
        new_dq, new_dk, new_dv = _empty_like(q), _empty_like(k), _empty_like(v)
    is_left_to_kernel = cu_seqlens is not None and prepared.kernel_checks_lengths
    dbias = _zeros_for_dbias(prepared.problem, forward) if with_dbias else None
    gradients = new_tuple(Gradients, (dout, dlse, new_dq, new_dk, new_dv, dbias))
    if not is_left_to_kernel:
        _clear_unused(prepared, arguments, gradients)
    launch = prepared.launch
    if launch is None:
        rows, given_ones = arguments.used_rows(), (dq, dk, dv)
        for x, used, given in zip((new_dq, new_dk, new_dv), rows, given_ones, strict=True):
            write_zeros(x, None if given is None else used)
    else:
        of_forward = (q, k, v, out, lse, cu_seqlens, descales, modifiers, dropout)
        tensors = new_tuple(Tensors, (*of_forward, gradients, None, not is_left_to_kernel))
        is_plain = True
        try:
            launch(tensors)
        except LengthsNotPlain:
            is_plain = False  # what is wrong is no part of this error
        if not is_plain:
            _clear_unused(prepared, arguments, gradients)
            launch(tensors._replace(lengths_are_checked=True))
    if are_given:
        for given in (dq, dk, dv):
            if given is not None and not given.is_inference():
                torch.autograd.graph.increment_version(given)
    if dbias is not None:
        dbias = _summed_for_bias(dbias, forward)
    dsink = _gradient_of_sink(arguments) if with_dsink else None
    return new_tuple(Results, (new_dq, new_dk, new_dv, dbias, dsink))


_empty_like = torch.empty_like


def _clear_unused(
    prepared: PreparedBackward, arguments: BackwardArguments, gradients: Gradients
) -> None:
    """Put zeros into new gradients that have rows of no sequence."""
    cu_seqlens = arguments.forward.cu_seqlens
    if cu_seqlens is None:
        return
    q_covered, k_covered = _covered(prepared, cu_seqlens)
    if not q_covered and arguments.dq is None:
        gradients.dq.zero_()
    if not k_covered and arguments.dk is None:
        gradients.dk.zero_()
    if not k_covered and arguments.dv is None:
        gradients.dv.zero_()


def _covered(prepared: PreparedBackward, cu_seqlens: CuSeqlens) -> tuple[bool, bool]:
    """Whether the sequences have all rows of q, and all of k and v."""
    has_no_gaps = cu_seqlens.k_padded is cu_seqlens.k
    if not prepared.reads_cu_seqlens:
        return cu_seqlens.q_padded is cu_seqlens.q, has_no_gaps
    sizes = prepared.problem.sizes
    q_covered = check_cu_seqlens_values(sizes, cu_seqlens)
    return q_covered, has_no_gaps and int(cu_seqlens.k[-1]) == sizes.seqlen_k


def _zeros_for_dbias(problem: Problem, forward: Arguments) -> Tensor:
    """Room for the gradient of each score; float32, as some of them may be added up."""
    shape: tuple[int, ...] = (problem.heads_q, problem.seqlen_q)
    if forward.cu_seqlens is None:
        shape = (problem.batch, *shape, problem.seqlen_k)
    else:
        longest = forward.cu_seqlens.max_seqlen_k
        assert longest is not None, "a bias of gm1 has as many columns"
        shape = (*shape, longest)
    return forward.q.new_zeros(shape, dtype=torch.float32)


def _summed_for_bias(dbias: Tensor, forward: Arguments) -> Tensor:
    """The gradients of the scores, summed over the dimensions in which one bias serves all."""
    assert forward.modifiers is not None
    bias = forward.modifiers.bias
    assert bias is not None
    sizes = enumerate(zip(bias.shape, dbias.shape, strict=True))
    shared = [i for i, (one, all_of_them) in sizes if one != all_of_them]
    # In float64, so that no rounding shows in which order torch adds up.
    summed = dbias.sum(shared, keepdim=True, dtype=torch.float64) if shared else dbias
    return summed.to(bias.dtype)


def _gradient_of_sink(arguments: BackwardArguments) -> Tensor:
    """float32 ``(hq,)``: a sink has a probability in each row, and no value.

    It is the sum over all rows of ``p * (dlse - delta)``, where ``p = exp(sink - lse)`` and delta
    is the row's sum of ``out * dout``.
    """
    forward, lse = arguments.forward, arguments.lse
    assert forward.out is not None
    assert forward.modifiers is not None
    sink = forward.modifiers.sink
    assert sink is not None
    delta = (forward.out.double() * arguments.dout).sum(-1).transpose(-1, -2)
    if arguments.dlse is not None:
        delta = delta - arguments.dlse
    # A sink of infinity has all of its row. None has more, though an lse may be rounded.
    distance = (sink.double()[:, None] - lse).masked_fill(lse == torch.inf, 0).clamp(max=0)
    # A row without keys and sink has no probabilities, and one of no sequence is none.
    is_left_out = lse == -torch.inf
    sums = forward.cu_seqlens
    if sums is not None:
        _, _, is_of_sequence = sequences_of_rows(lse.shape[-1], sums.q, sums.q_padded)
        is_left_out |= ~is_of_sequence
    gradient = -(distance.exp() * delta).masked_fill(is_left_out, 0)
    return gradient.sum(-1).view(-1, sink.shape[0]).sum(0).float()


def _check_like(
    name: str,
    x: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    q: Tensor,
    any_last_stride: bool = False,
) -> None:
    if not isinstance(x, Tensor):
        raise not_a_tensor(name, x)
    check_layout(name, x)
    if x.dtype != dtype:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be {dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, q is on {q.device}; use one device")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {shape}")
    if not any_last_stride:
        check_last_dimension(name, x)


def _new_like(x: Tensor) -> Tensor:
    """A new tensor with the strides of ``x`` where these are dense."""
    fresh = torch.empty_like(x)
    if fresh.shape[-1] > 1 and fresh.stride(-1) != 1:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return fresh
