"""What plans have in common whose kernels come ready: nothing but the launcher is built."""

from __future__ import annotations


class ReadyPlan:
    """A plan of code objects that a tree holds."""

    @property
    def is_built(self) -> bool:
        """True when the launcher is in the cache already."""
        from .. import jit
        from .launcher import launcher_spec  # of use where there is a GPU only

        return jit.is_built(launcher_spec())

    def build(self) -> None:
        """Build the launcher where needed."""
        from .launcher import launcher_spec, load_launcher

        load_launcher(launcher_spec())
