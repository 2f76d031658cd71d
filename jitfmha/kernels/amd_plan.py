"""What the plans of all families for AMD GPUs have in common: a launcher that is built."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from hashlib import sha256

from .. import jit
from ..amd.code_object import CodeObject
from ..amd.manifest import AnyRow, KernelRow
from ..planning.plan import Plan
from ..planning.specification import Algorithm
from ..planning.target import AmdTarget
from ..problem.problem import Problem
from .launcher import Block, LauncherKind, launcher_spec

COMBINES = "fwd_splitkv_combine"
"""The family of kernels that make the output where keys are split."""


def algorithm_of(row: KernelRow, pipeline: str) -> Algorithm:
    """How a kernel of a manifest computes, whose tiles have whole rows."""
    tile = row.ts_qo, row.ts_kv, row.hdim_q, row.hdim_v, row.ts_kv, row.hdim_q
    return Algorithm(pipeline, tile)


def version_of(code_objects: Iterable[CodeObject]) -> str:
    """What times of kernels that come ready are kept by: a hash of their code objects."""
    return sha256(b"".join(sha256(x.image).digest() for x in code_objects)).hexdigest()


class AmdPlan(Plan):
    """A plan for an AMD GPU, whose kernels take the arguments of ``block``."""

    def __init__(
        self, problem: Problem, target: AmdTarget, block: Block, kernel: str, source: str
    ) -> None:
        self.problem = problem
        self.target = target
        self.block = block
        self.kernel = kernel
        self.source = source

    @abstractmethod
    def rows(self) -> Sequence[AnyRow]:
        """What manifests say, or would say, of its kernels, in the order of their launches."""

    @property
    def specs(self) -> Sequence[jit.BuildSpec]:
        return [launcher_spec(LauncherKind.of(self.problem, self.target, self.block))]
