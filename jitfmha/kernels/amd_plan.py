"""What the plans of all families for AMD GPUs have in common: a launcher that is built."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import jit
from ..planning.plan import Plan
from ..planning.target import AmdTarget
from ..problem.problem import Problem

if TYPE_CHECKING:
    from ..amd.manifest import AnyRow
    from .launcher import Block, LauncherKind


class AmdPlan(Plan):
    """A plan for an AMD GPU.

    Attributes:
        block: the arguments that its kernels take.
    """

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
    def is_built(self) -> bool:
        from .launcher import launcher_spec  # of use where there is a GPU only

        return jit.is_built(launcher_spec(self._launcher_kind()))

    def build(self) -> None:
        from .launcher import load_launcher  # of use where there is a GPU only

        load_launcher(self._launcher_kind())

    def _launcher_kind(self) -> LauncherKind:
        from .launcher import LauncherKind  # of use where there is a GPU only

        return LauncherKind.of(self.problem, self.target, self.block)
