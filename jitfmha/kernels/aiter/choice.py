"""Which kernels of a tree in AITER's form serve a backward pass.

AITER's rules, as its host code has them (``csrc/cpp_itfs/mha_bwd.cu``), with what it leaves to its
callers checked here: kernels whose strides follow from those of other tensors, and known faults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...amd.chips import Arch
from ...amd.code_object import CodeObject
from ...amd.manifest import AiterBackwardRow, AiterKind
from ...amd.tree import Tree
from ...planning.plan import Reason
from ...planning.target import AmdTarget
from ...problem.problem import BF16_CVTS, Problem
from .faults import reason_of_fault
from .layouts import reason_of_layout

_MODES = ("gm0", "gm1")
_MASK_NAMES = ("none", "causal (top-left)", "causal (bottom-right)", "a window")
_HDIM_STEP = 8
_HDIMS = (64, 128, 192)
# In 16 bits, kernels of the same origin take this multiple of keys, whatever their tile is.
_KEYS_IN_16_BITS = 64


class KernelSet(NamedTuple):
    """What AITER has for an architecture.

    Attributes:
        wide_hdims: unequal head dimensions that there are kernels for.
        one_tile_keys: up to so many keys, kernels that add dq up in 16 bits add to each element
            once; 0: never.
        has_bottom_right_in_16_bits: whether some of those have a causal mask of that corner.
        shuffles_dq: whether those leave dq in an order of its own, but for a head dimension of 64.
        are_of_one_origin: whether all of those take multiples of 64 keys.
    """

    wide_hdims: tuple[tuple[int, int], ...]
    one_tile_keys: int
    has_bottom_right_in_16_bits: bool
    shuffles_dq: bool
    are_of_one_origin: bool


_KERNEL_SETS: Mapping[Arch, KernelSet] = {
    "gfx942": KernelSet(
        wide_hdims=(),
        one_tile_keys=0,
        has_bottom_right_in_16_bits=False,
        shuffles_dq=False,
        are_of_one_origin=True,
    ),
    "gfx950": KernelSet(
        wide_hdims=((192, 128),),
        one_tile_keys=256,
        has_bottom_right_in_16_bits=True,
        shuffles_dq=True,
        are_of_one_origin=False,
    ),
}


class BackwardChoice(NamedTuple):
    """The kernels that serve a backward pass.

    Attributes:
        kernels: of row sums, of gradients and of dq, with their code objects; without the last
            where dq is written by the second, or is to be converted by other means.
        mask: the number of the mask by which the second was chosen.
        passed_over: why kernels that AITER would have chosen were not.
    """

    tree: Tree
    kernels: tuple[tuple[AiterBackwardRow, CodeObject], ...]
    mask: int
    passed_over: tuple[Reason, ...]

    @property
    def row_sums(self) -> AiterBackwardRow:
        return self.kernels[0][0]

    @property
    def row(self) -> AiterBackwardRow:
        """That of the kernel of gradients."""
        return self.kernels[1][0]

    @property
    def dq(self) -> AiterBackwardRow | None:
        return self.kernels[2][0] if len(self.kernels) > 2 else None

    @property
    def has_shuffled_dq(self) -> bool:
        """Whether dq is added up in an order of its own."""
        return self.dq is not None and self.dq.kind == "dq_shuffle"

    @property
    def adds_to_dq(self) -> bool:
        return not self.row.has_atomic_fp32 and self.dq is None


def choose(tree: Tree, problem: Problem, target: AmdTarget) -> BackwardChoice | Reason:
    """The kernels of a tree for a backward pass, or why it has none."""
    *others, last = accumulations(problem, target.arch)
    for is_atomic_fp32 in others:
        found = _choice_with(is_atomic_fp32, tree, problem, target)
        if isinstance(found, BackwardChoice):
            return found
    return _choice_with(last, tree, problem, target)


def _choice_with(
    is_atomic_fp32: bool, tree: Tree, problem: Problem, target: AmdTarget
) -> BackwardChoice | Reason:
    """Choose among kernels that add dq up in float32, or among those that do so in 16 bits."""
    arch = target.arch
    mask = mask_number(problem)
    has_bottom_right = is_atomic_fp32 or _KERNEL_SETS[arch].has_bottom_right_in_16_bits
    if mask == 2 and not has_bottom_right and problem.seqlen_q == problem.seqlen_k:
        mask = 1  # where both corners are one, the other does the same
    hdims = padded_hdims(problem, arch)
    candidates = [
        row
        for row in tree.aiter_backward.rows
        if row.kind == "dqdkdv"
        and (row.dtype, row.hdim_q, row.hdim_v) == (problem.dtype, *hdims)
        and (row.mask, row.has_atomic_fp32) == (mask, is_atomic_fp32)
        and row.mode == _MODES.index(problem.mode)
        and row.rounds(problem.bf16_cvt)
    ]
    reasons = [
        reason_of_fault(x, problem, arch) or reason_of_layout(x, problem) for x in candidates
    ]
    usable = [row for row, reason in zip(candidates, reasons, strict=True) if reason is None]
    passed_over = [reason for reason in reasons if reason is not None]
    row = picked_row(usable, candidates, problem, arch)
    if row is None:
        if picked_row(candidates, candidates, problem, arch) is not None:
            return Reason("{tree}: {reason}", tree=tree, reason=passed_over[0])
        return _no_row(tree, problem, mask, is_atomic_fp32, target)
    return _with_others(tree, problem, arch, row, mask, passed_over)


def mask_number(problem: Problem) -> int:
    """Return the number that AITER's manifests have for a mask."""
    mask = problem.mask
    if mask.is_none:
        return 0
    if not mask.is_causal:
        return 3
    return 1 if mask.top_left else 2


def padded_hdims(problem: Problem, arch: Arch) -> tuple[int, int]:
    """The head dimensions that a kernel is made for, for those of a problem."""
    hdims = problem.hdim_q, problem.hdim_v
    if hdims in _KERNEL_SETS[arch].wide_hdims:
        return hdims
    padded = next((hdim for hdim in _HDIMS if hdim >= problem.hdim_q), None)
    return hdims if padded is None or hdims[0] != hdims[1] else (padded, padded)


def accumulations(problem: Problem, arch: Arch) -> tuple[bool, ...]:
    """Whether dq is added up in float32: what is asked for, and else as AITER's callers choose.

    What is preferred comes first.
    """
    if problem.atomic_fp32 is not None:
        return (problem.atomic_fp32,)
    if not has_one_key_tile(problem, arch):
        return (True,)
    return (False,) if problem.is_deterministic else (False, True)


def has_one_key_tile(problem: Problem, arch: Arch) -> bool:
    """Whether kernels that add up in 16 bits add to each element of dq once."""
    hdim = problem.hdim_q
    fits = _HDIMS[0] < hdim <= _HDIMS[1] and problem.hdim_v == hdim
    keys = _KERNEL_SETS[arch].one_tile_keys
    return fits and keys > 0 and problem.seqlen_k <= keys


def reasons_of_problem(problem: Problem, target: AmdTarget) -> Iterator[Reason]:
    """What no kernel of AITER's does in a backward pass."""
    for name, hdim in (("q and k", problem.hdim_q), ("v", problem.hdim_v)):
        if hdim % _HDIM_STEP:
            template = "Head dimensions must be multiples of {step}; that of {name} is {hdim}."
            yield Reason(template, step=_HDIM_STEP, name=name, hdim=hdim)
    if problem.gradients is not None and problem.gradients.dlse is not None:
        yield Reason("Its kernels know no gradient of the lse (dlse).")
    if problem.is_deterministic and not (
        has_one_key_tile(problem, target.arch) and problem.atomic_fp32 is not True
    ):
        yield Reason(
            "Its kernels add dq up with atomics, in any order; deterministic gradients are asked "
            "for."
        )


def picked_row(
    usable: Sequence[AiterBackwardRow],
    candidates: Sequence[AiterBackwardRow],
    problem: Problem,
    arch: Arch,
) -> AiterBackwardRow | None:
    """AITER's pick: the row that does exactly what is needed, or the last one that does more."""
    if not candidates:
        return None
    first = candidates[0]
    is_of_origin = _KERNEL_SETS[arch].are_of_one_origin or "recompile" in first.symbol
    is_in_64s = not first.has_atomic_fp32 and is_of_origin
    keys = _KEYS_IN_16_BITS if is_in_64s else first.ts
    needs_any_seqlen = problem.seqlen_q != problem.seqlen_k or problem.seqlen_k % keys != 0
    needs_smaller_hdim = (problem.hdim_q, problem.hdim_v) != (first.hdim_q, first.hdim_v)
    needed = needs_any_seqlen, needs_smaller_hdim
    picked = None
    for row in usable:
        does = row.takes_any_seqlen, row.takes_smaller_hdim
        if does == needed:
            return row
        if does[0] >= needed[0] and does[1] >= needed[1]:
            picked = row
    return picked


def _with_others(
    tree: Tree,
    problem: Problem,
    arch: Arch,
    row: AiterBackwardRow,
    mask: int,
    passed_over: list[Reason],
) -> BackwardChoice | Reason:
    """The whole choice: the kernels before and after that of the gradients, and all their files."""
    row_sums = next(
        (
            x
            for x in tree.aiter_backward.rows
            if (x.kind, x.dtype, x.hdim_v, x.mode) == ("odo", row.dtype, row.hdim_v, row.mode)
        ),
        None,
    )
    if row_sums is None:
        template = "{tree}: no kernel that sums rows (odo) for {dtype}, hdim {hdim}, {mode}."
        values = {"dtype": row.dtype, "hdim": row.hdim_v, "mode": problem.mode}
        return Reason(template, tree=tree, **values)
    of_dq = _dq_row(tree, problem, arch, row)
    if isinstance(of_dq, Reason):
        return of_dq
    if of_dq is not None and (fault := reason_of_fault(of_dq, problem, arch)):
        passed_over = [*passed_over, fault]
        of_dq = None
    kernels = []
    for each in (row_sums, row, *([] if of_dq is None else [of_dq])):
        code_object = tree.code_object(each)
        if isinstance(code_object, Exception):
            return Reason("{tree}: {error}", tree=tree, error=code_object)
        kernels.append((each, code_object))
    return BackwardChoice(tree, tuple(kernels), mask, tuple(passed_over))


def _dq_row(
    tree: Tree, problem: Problem, arch: Arch, row: AiterBackwardRow
) -> AiterBackwardRow | Reason | None:
    """The kernel that makes dq of what was added up; None where dq is added to itself."""
    is_shuffled = _KERNEL_SETS[arch].shuffles_dq and problem.hdim_q != _HDIMS[0]
    if not row.has_atomic_fp32 and not is_shuffled:
        return None
    kind: AiterKind = "dq_convert" if row.has_atomic_fp32 else "dq_shuffle"
    for x in tree.aiter_backward.rows:
        if (x.kind, x.hdim_q, x.mode) != (kind, row.hdim_q, row.mode):
            continue
        is_for_dtype = x.dtype == row.dtype or not row.has_atomic_fp32
        if is_for_dtype and x.rounds(problem.bf16_cvt):
            return x
    template = "{tree}: no kernel that makes dq ({kind}) for {dtype}, hdim {hdim}, {mode}{cvt}."
    cvt = f", {problem.bf16_cvt}" if problem.dtype == "bf16" else ""
    values = {"dtype": row.dtype, "hdim": row.hdim_q, "mode": problem.mode, "cvt": cvt}
    return Reason(template, tree=tree, kind=kind, **values)


def _no_row(
    tree: Tree, problem: Problem, mask: int, is_atomic_fp32: bool, target: AmdTarget
) -> Reason:
    rows = (row for row in tree.aiter_backward.rows if row.kind == "dqdkdv")
    is_any_cvt = all(row.bf16_cvt >= len(BF16_CVTS) for row in rows)
    return Reason(
        "{tree}: no kernel for {dtype}, hdim {hdim_q}x{hdim_v}, mask {mask}, {mode}{cvt}, "
        "{sum} sums of dq, seqlen {seqlen_q} x {seqlen_k} on {chip}.",
        tree=tree,
        dtype=problem.dtype,
        hdim_q=problem.hdim_q,
        hdim_v=problem.hdim_v,
        mask=_MASK_NAMES[mask],
        mode=problem.mode,
        cvt="" if is_any_cvt or problem.dtype != "bf16" else f", {problem.bf16_cvt}",
        sum="float32" if is_atomic_fp32 else "16-bit",
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        chip=target.chip,
    )
