"""The tuned family: code objects of ``hsa/``, or of a tree that the environment names.

A kernel is chosen by rules that each give a sentence where they do not hold: first the rules of
the interface between launcher and kernels, then, tree by tree, whether there is a row for the
problem. The rules are those of AMD's kernels ("fmha v3"), whose interface ours share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...problem import BF16_CVTS, DescaleStrides, Problem, Strides
from ...target import AmdTarget, Arch, Target

if TYPE_CHECKING:
    from ...amd.code_object import CodeObject
    from ...amd.manifest import KernelDtype, KernelRow, Tree

# What only a GPU needs (the modules of jitfmha.amd) is imported in functions.

NAME = "tuned"

_NATIVE_FP8: dict[Arch, str] = {"gfx942": "fp8_e4m3fnuz", "gfx950": "fp8_e4m3fn"}
_FIELD_END = 1 << 32  # the kernels' integers have 32 bits
_GRID_END = 1 << 16
_MODES = ("gm0", "gm1")
_MASK_NAMES = ("none", "causal (top-left)", "causal (bottom-right)")


def reasons_not(problem: Problem, target: Target) -> list[str]:
    """Why the tuned code objects do not serve ``problem``."""
    if not isinstance(target, AmdTarget):
        return [f"It needs an AMD Instinct GPU (gfx942 or gfx950); the target is {target}."]
    reasons = [reason for rule in _RULES if (reason := rule(problem, target))]
    if reasons:
        return reasons
    found, passed_over = _find(problem, target)
    return passed_over if found is None else []


def plan(problem: Problem, target: Target) -> TunedPlan:
    """The kernel for ``problem``."""
    assert isinstance(target, AmdTarget)
    found, _ = _find(problem, target)
    assert found is not None
    return found


def remarks(problem: Problem, target: Target) -> list[str]:
    """What is odd in the trees for ``target``, and why preferred trees do not serve ``problem``."""
    if not isinstance(target, AmdTarget):
        return []
    from ...amd.manifest import trees_of

    odd = [oddity for tree in trees_of(target.arch, target.chip) for oddity in tree.oddities]
    found, passed_over = _find(problem, target)
    return odd if found is None else [*odd, *passed_over]


class TunedPlan:
    """One code object for one problem."""

    def __init__(
        self,
        problem: Problem,
        target: AmdTarget,
        tree: Tree,
        row: KernelRow,
        code_object: CodeObject,
    ) -> None:
        self.family = NAME
        self.problem = problem
        self.target = target
        self.tree = tree
        self.row = row
        self.code_object = code_object

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.row.name

    @property
    def source(self) -> str:
        """The tree and the file in it."""
        return f"{self.row.file} of {self.tree}"

    @property
    def is_built(self) -> bool:
        """True when the launcher is in the cache already."""
        from ... import jit
        from ...amd.launcher import launcher_spec

        return jit.is_built(launcher_spec(self.tree, self.target.chip, self.problem.mode))

    def bind(self) -> Callable[..., None]:
        """Build and load the launcher, and load the code object."""
        if self.problem.mode == "gm0" and self.problem.seqlen_k == 0:
            return _write_no_attention
        from ...amd.launcher import bind

        return bind(self.problem, self.target, self.tree, self.row, self.code_object)


def _write_no_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    cu_seqlens: object,
    max_seqlen_q: int | None,
    descales: object,
) -> None:
    """Where there are no keys the result is known, and there is nothing to read."""
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)


# ---- Rules of the interface ----------------------------------------------------------------------


def _dtype_rule(problem: Problem, target: AmdTarget) -> str | None:
    if problem.dtype == "fp32":
        return "The kernels take bf16, fp16 and fp8; the inputs are fp32."
    native = _NATIVE_FP8[target.arch]
    if problem.is_fp8 and problem.dtype != native:
        return f"The matrix units of {target.arch} take {native}; the inputs are {problem.dtype}."
    return None


def _mask_rule(problem: Problem, target: AmdTarget) -> str | None:
    if problem.mask.is_none or problem.mask.is_causal:
        return None
    return f"The kernels know no mask and causal masks; the mask is a {problem.mask}."


def _length_rule(problem: Problem, target: AmdTarget) -> str | None:
    for name, seqlen in (("q", problem.seqlen_q), ("k", problem.seqlen_k)):
        if seqlen * 4 >= _FIELD_END:  # the lse's stride between heads counts bytes
            return f"The kernels take up to {_FIELD_END // 4 - 1} rows; {name} has {seqlen}."
    return None


def _stride_rule(problem: Problem, target: AmdTarget) -> str | None:
    for name, strides, element in _strided(problem):
        for dimension in ("seq", "head", "batch"):
            if dimension == "batch" and problem.batch == 1:
                continue
            size = getattr(strides, dimension) * element
            if size >= _FIELD_END:
                return (
                    f"The kernels take strides below 4 GiB; "
                    f"{name} has {size} bytes between two in dimension {dimension}."
                )
    return None


def _grid_rule(problem: Problem, target: AmdTarget) -> str | None:
    for what, count in (("heads", problem.heads_q), ("sequences", problem.batch)):
        if count >= _GRID_END:
            return f"A grid takes up to {_GRID_END - 1} {what}; the problem has {count}."
    return None


_RULES: tuple[Callable[[Problem, AmdTarget], str | None], ...] = (
    _dtype_rule,
    _mask_rule,
    _length_rule,
    _stride_rule,
    _grid_rule,
)


def _strided(problem: Problem) -> tuple[tuple[str, Strides, int], ...]:
    """The tensors with their strides and the bytes of an element."""
    element = 1 if problem.is_fp8 else 2
    return (
        ("q", problem.q, element),
        ("k", problem.k, element),
        ("v", problem.v, element),
        ("out", problem.out, 2),
    )


# ---- Rules of one tree ---------------------------------------------------------------------------


def _find(problem: Problem, target: AmdTarget) -> tuple[TunedPlan | None, list[str]]:
    """The first tree's kernel that fits, and a sentence for each tree that was passed over."""
    from ...amd.manifest import trees_of

    passed_over: list[str] = []
    for tree in trees_of(target.arch, target.chip):
        found = _in_tree(problem, target, tree)
        if isinstance(found, TunedPlan):
            return found, passed_over
        passed_over.append(found)
    return None, passed_over or [f"This version ships no code objects for {target.arch}."]


def _in_tree(problem: Problem, target: AmdTarget, tree: Tree) -> TunedPlan | str:
    from ...amd.launcher import checked_code_object
    from ...amd.manifest import warn_of

    row = _row(problem, target, tree)
    if isinstance(row, str):
        return row
    if not tree.is_shipped:
        for rule in _PLAIN_RULES:
            reason = rule(problem, target, row)
            if reason:
                return f"{tree}: {reason}"
    code_object = checked_code_object(tree, row, target.arch)
    if isinstance(code_object, str):
        warn_of(code_object)
        return code_object
    return TunedPlan(problem, target, tree, row, code_object)


def _row(problem: Problem, target: AmdTarget, tree: Tree) -> KernelRow | str:
    """The manifest's row for a problem, or the sentence that there is none."""
    dtype: KernelDtype = "fp8bf16" if problem.is_fp8 else problem.dtype  # type: ignore[assignment]
    mask, mode = _mask_column(problem), _MODES.index(problem.mode)
    # gfx950 rounds to bf16 in hardware. fp16 kernels have no bf16 inside, and fp8 ones no choice.
    converts = dtype == "bf16" and target.arch == "gfx942"
    rows = [
        row
        for row in tree.rows
        if (row.dtype, row.hdim_q, row.hdim_v) == (dtype, problem.hdim_q, problem.hdim_v)
        and (row.mask, row.mode) == (mask, mode)
        and (not converts or BF16_CVTS[row.bf16_cvt] == problem.bf16_cvt)
    ]
    if rows and tree.is_shipped:
        from .tile_choice import best_tile

        return best_tile(rows, problem, target, tree)
    if rows:
        return rows[0]
    cvt = f", {problem.bf16_cvt}" if converts else ""
    return (
        f"{tree}: no kernel for {dtype}, hdim {problem.hdim_q}x{problem.hdim_v}, "
        f"mask {_MASK_NAMES[mask]}, {problem.mode}{cvt} on {target.chip}."
    )


def _mask_column(problem: Problem) -> int:
    """The manifest's number for the mask: where both corners are one, bottom-right serves both."""
    if problem.mask.is_none:
        return 0
    return 1 if problem.mask.top_left and problem.seqlen_q != problem.seqlen_k else 2


# What AMD's own kernels cannot do beyond the interface. Ours have none of these limits.


def _range_rule(problem: Problem, target: AmdTarget, row: KernelRow) -> str | None:
    """Plain kernels give the buffer unit a sequence's length times its stride, in 32 bits."""
    if problem.is_empty:
        return None
    for name, strides, element in _strided(problem):
        rows = problem.seqlen_q if name in ("q", "out") else problem.seqlen_k
        width = problem.hdim_v if name in ("v", "out") else problem.hdim_q
        if rows > 1 and rows * strides.seq * element >= _FIELD_END:
            return f"its kernels reach 4 GiB of one head; the rows of {name} take more."
        if rows > 1 and strides.seq < width:
            return f"its kernels need rows that do not overlap; those of {name} do."
    return None


def _descale_shape_rule(problem: Problem, target: AmdTarget, row: KernelRow) -> str | None:
    """Plain gfx950 kernels read one scale each of q, k and v, and no strides."""
    if target.arch != "gfx950" or problem.batch * problem.heads_k == 1:
        return None
    for name in ("q_descale", "k_descale", "v_descale"):
        strides = getattr(problem, name)
        if strides not in (None, _ONE_SCALE):
            return f"its kernels take a {name} of shape (1,) only."
    return None


def _descale_twice_rule(problem: Problem, target: AmdTarget, row: KernelRow) -> str | None:
    """Plain gfx942 kernels with a mask multiply their scale in place, once for each tile.

    So the second tile of a workgroup has the scales of q and k squared.
    """
    if not problem.is_fp8 or target.arch != "gfx942" or row.mask == 0:
        return None
    if (problem.q_descale or problem.k_descale) and problem.seqlen_q > row.ts_qo:
        return (
            f"its causal fp8 kernels apply q_descale and k_descale twice from row {row.ts_qo} on."
        )
    return None


def _gqa_rule(problem: Problem, target: AmdTarget, row: KernelRow) -> str | None:
    """Plain gfx950 fp8 kernels turn the ratio of heads into a shift, which knows five of them."""
    ratio = problem.heads_q // max(problem.heads_k, 1)
    if problem.is_empty:
        return None
    if target.arch != "gfx950" or not problem.is_fp8 or ratio in (1, 2, 4, 8, 16):
        return None
    return f"its fp8 kernels take 1, 2, 4, 8 or 16 query heads for a key head; here are {ratio}."


_ONE_SCALE: DescaleStrides = (0, 0)
_PLAIN_RULES: tuple[Callable[[Problem, AmdTarget, KernelRow], str | None], ...] = (
    _range_rule,
    _gqa_rule,
    _descale_shape_rule,
    _descale_twice_rule,
)
