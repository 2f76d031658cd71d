"""What the plans of both directions have in common: a build."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from ... import jit
from ...amd.code_object import CodeObject
from ...planning.target import AmdTarget
from ...problem.problem import Problem


class CompiledPlan(ABC):
    """A plan whose kernels are compiled when it is bound."""

    problem: Problem
    target: AmdTarget

    @property
    @abstractmethod
    def kernel(self) -> str:
        """What the names of its kernels begin with."""

    @property
    @abstractmethod
    def spec(self) -> jit.BuildSpec:
        """The build of its kernels."""

    @property
    @abstractmethod
    def argument_bytes(self) -> int:
        """What its kernels take."""

    @property
    def is_built(self) -> bool:
        """True when the kernels and the launcher are in the cache already."""
        from ..launcher import LauncherKind, launcher_spec  # of use where there is a GPU only

        kind = LauncherKind.of(self.problem, self.target, "compiled")
        return jit.is_built(self.spec) and jit.is_built(launcher_spec(kind))

    def remarks(self) -> list[str]:
        """What compiles the kernels, and why that."""
        from ...jit.toolchain.device_hip import device_hip_in_words  # asks a process

        return [f"compiler for AMD GPUs: {device_hip_in_words()}"]

    def build(self) -> None:
        """Compile the kernels and build the launcher, where needed."""
        from ..launcher import LauncherKind, load_launcher  # of use where there is a GPU only

        self.compiled()
        load_launcher(LauncherKind.of(self.problem, self.target, "compiled"))

    def compiled(self) -> CodeObject:
        """The kernels, built where needed."""
        spec, image = self.spec, jit.read(self.spec)
        return CodeObject(Path(spec.artifact_name), image, self.kernel, self.argument_bytes)
