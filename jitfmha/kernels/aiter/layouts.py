"""Where AITER's backward kernels find and leave tensors, and which layouts they cannot serve.

They write dk and dv of each query head, whether query heads share key heads or not. Some take a
*short* block of arguments: the strides of dout are those of q, those of v are those of k, and those
of dk and dv follow from those of k. So where the caller's gradients do not lie like that, the
kernels get tensors between, and the results are brought to their place afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...amd.manifest import AiterBackwardRow
from ...planning.plan import Reason
from ...problem.memory import overlaps_itself
from ...problem.problem import Problem, Strides

ELEMENT_BYTES = 2
_FIELD_END = 1 << 32  # the kernels' integers have 32 bits


class Room(NamedTuple):
    """A tensor that the kernels write, in elements: its shape and its strides."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_distinct(self) -> bool:
        x = torch.empty_strided(self.shape, self.strides, device="meta")
        return not overlaps_itself(x)


class GradientLayout(NamedTuple):
    """Strides of what only a backward pass has; see ``Problem`` for the others."""

    dout: Strides
    dq: Strides
    dk: Strides
    dv: Strides


def gradient_layout(problem: Problem) -> GradientLayout:
    """Return the strides of dout, dq, dk and dv as the caller has them."""
    given = problem.gradients
    assert given is not None
    of_q, of_k = (problem.seqlen_q, problem.heads_q), (problem.seqlen_k, problem.heads_k)
    return GradientLayout(
        _strides(problem, given.dout, *of_q, problem.hdim_v),
        _strides(problem, given.dq, *of_q, problem.hdim_q),
        _strides(problem, given.dk, *of_k, problem.hdim_q),
        _strides(problem, given.dv, *of_k, problem.hdim_v),
    )


def _strides(
    problem: Problem, given: tuple[int, ...], seqlen: int, heads: int, hdim: int
) -> Strides:
    *batch, seq, head, _ = given
    return Strides(
        batch=batch[0] if batch and problem.batch > 1 else 0,
        seq=seq if seqlen > 1 else hdim,
        head=head if heads > 1 else hdim,
    )


def takes_short_block(row: AiterBackwardRow) -> bool:
    """Whether strides follow from those of other tensors."""
    return not row.takes_any_seqlen


def room_of_keys(row: AiterBackwardRow, problem: Problem, hdim: int) -> Room:
    """The room for dk or dv of each query head, where that is not the caller's tensor."""
    shape: tuple[int, ...] = (problem.seqlen_k, problem.heads_q, hdim)
    if problem.mode == "gm1":
        return Room(shape, (problem.heads_q * hdim, hdim, 1))
    shape = (problem.batch, *shape)
    if takes_short_block(row):
        batch, seq, head = problem.k
        # Heads between rows take as much more room as there are more of them.
        is_by_head = head >= seq * problem.seqlen_k
        return Room(shape, (batch * problem.gqa, seq if is_by_head else seq * problem.gqa, head, 1))
    row_elements = problem.heads_q * hdim
    return Room(shape, (problem.seqlen_k * row_elements, row_elements, hdim, 1))


def room_of_queries(problem: Problem) -> Room:
    """A dq that lies as q does."""
    shape = (problem.batch, problem.seqlen_q, problem.heads_q, problem.hdim_q)
    batch, seq, head = problem.q
    return Room(shape, (batch, seq, head, 1))


def keys_are_in_place(row: AiterBackwardRow, problem: Problem) -> bool:
    """Whether the kernels can write the caller's dk and dv."""
    if problem.gqa != 1:
        return False
    if not takes_short_block(row):
        return True
    _, _, dk, dv = gradient_layout(problem)
    return dk == dv and (dk.batch, dk.head) == (problem.k.batch, problem.k.head)


def queries_are_in_place(problem: Problem) -> bool:
    """Whether kernels that give dq the strides of q can write the caller's dq."""
    return gradient_layout(problem).dq == problem.q


def reason_of_layout(row: AiterBackwardRow, problem: Problem) -> Reason | None:
    """Why a kernel of the short block does not serve the strides of this call, if it does not."""
    if not takes_short_block(row):
        return None
    fault = _fault_of_short_block(row, problem)
    return None if fault is None else Reason("{name} " + fault, name=row.name)


def _fault_of_short_block(row: AiterBackwardRow, problem: Problem) -> str | None:
    if gradient_layout(problem).dout != problem.q:
        return "needs a dout with the strides of q."
    if problem.v != problem.k:
        return "needs a v with the strides of k."
    if not keys_are_in_place(row, problem):
        room = room_of_keys(row, problem, problem.hdim_q)
        if not room.is_distinct:
            return "gives dk the strides of k, with which its elements would overlap."
    moves_dq = not (row.has_atomic_fp32 or queries_are_in_place(problem))
    if moves_dq and not room_of_queries(problem).is_distinct:
        return "gives dq the strides of q, with which its elements would overlap."
    return None


def reasons_of_strides(problem: Problem) -> Iterator[Reason]:
    """What does not fit into the kernels' arguments."""
    if problem.is_empty:
        return
    layout = gradient_layout(problem)
    row_widths = {
        **dict.fromkeys(("q", "k", "dq", "dk"), problem.hdim_q),
        **dict.fromkeys(("v", "out", "dout", "dv"), problem.hdim_v),
    }
    for name, width in row_widths.items():
        strides: Strides = getattr(layout, name, None) or getattr(problem, name)
        rows = problem.seqlen_k if name in ("k", "v", "dk", "dv") else problem.seqlen_q
        if max(strides) * ELEMENT_BYTES >= _FIELD_END or (
            rows > 1 and rows * strides.seq * ELEMENT_BYTES >= _FIELD_END
        ):
            template = "The kernels reach 4 GiB of one head; the rows of {name} take more."
            yield Reason(template, name=name)
        elif rows > 1 and strides.seq < width:
            template = "The kernels need rows that do not overlap; those of {name} do."
            yield Reason(template, name=name)
    for name, count in (
        ("dq", problem.heads_q * problem.seqlen_q * max(problem.hdim_q, 128) * 4),
        ("dk and dv", problem.heads_q * problem.seqlen_k * problem.hdim_q * ELEMENT_BYTES),
    ):
        if count >= _FIELD_END:
            template = (
                "The kernels reach 4 GiB of one sequence; the sums that make {name} take {count} "
                "bytes."
            )
            yield Reason(template, name=name, count=count)
