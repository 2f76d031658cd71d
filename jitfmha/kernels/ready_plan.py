"""What plans have in common whose kernels come ready: nothing but the launcher is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..planning.target import AmdTarget
    from ..problem.problem import Problem
    from .launcher import Block


class PlanOfCodeObjects:
    """A plan of code objects that a tree holds.

    Attributes:
        block: that the kernels take.
    """

    problem: Problem
    target: AmdTarget
    block: Block

    @property
    def is_built(self) -> bool:
        """True when the launcher is in the cache already."""
        from .. import jit
        from .launcher import LauncherKind, launcher_spec  # of use where there is a GPU only

        return jit.is_built(launcher_spec(LauncherKind.of(self.problem, self.target, self.block)))

    def build(self) -> None:
        """Build the launcher where needed."""
        from .launcher import LauncherKind, load_launcher  # of use where there is a GPU only

        load_launcher(LauncherKind.of(self.problem, self.target, self.block))
