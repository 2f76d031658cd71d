"""What ``explain`` says of a call in words, and what it knows of one that is not attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .. import jit
from ..planning.target import AmdTarget, Target

NEEDS_AMD = "It needs an AMD Instinct GPU (gfx942 or gfx950); the target is {target}."
NEEDS_CPU = "It is for calls that run on the CPU; the target is {target}."


class Told:
    """What explanations have in common; ``str()`` gives their sentences."""

    __slots__ = ()
    target: Target

    @property
    def kernel(self) -> str | None:
        """The name of the one that serves the call; None where nothing does."""
        raise NotImplementedError

    def __repr__(self) -> str:
        kernel = self.kernel or "no kernel"
        return f"<{type(self).__name__}: {kernel} on {self.target}; print it for the reasons>"

    def _repr_html_(self) -> str:
        from html import escape  # of use in a notebook only

        return f"<pre>{escape(str(self))}</pre>"


def microseconds(seconds: float) -> str:
    """A time in words."""
    return f"{seconds * 1e6:.4g} us"


def kernel_in_words(kernel: str, family: str, is_built: bool) -> str:
    """The line that names what serves a call."""
    return f"kernel   {kernel} (family {family}, {'built' if is_built else 'built on first use'})"


def reasons_in_words(
    rejected: Mapping[str, Iterable[str]], remarks: Iterable[str]
) -> Iterable[str]:
    """The lines behind that: why no other family serves it, and what else there is to know."""
    for family, reasons in rejected.items():
        yield from (f"not {family}: {reason}" for reason in reasons)
    yield from (f"note     {remark}" for remark in remarks)


class _Served(NamedTuple):
    target: Target
    problem: str
    family: str
    kernels: tuple[str, ...] = ()
    source: str = ""
    specs: tuple[jit.BuildSpec, ...] = ()
    seconds: float | None = None
    rejected: Mapping[str, tuple[str, ...]] = {}
    remarks: tuple[str, ...] = ()


class CallExplanation(Told, _Served):
    """Where a call over rows or a product would run. ``str()`` gives it as sentences.

    Attributes:
        problem: in words.
        family: whose kernel serves it, or would.
        kernels: those that it launches one after the other; none where nothing serves the call.
        source: what they are rendered from, or whose they are.
        specs: what has to be built.
        seconds: that it is estimated to take; None where there is no estimate.
        rejected: sentences by family.
        remarks: what else there is to know.
    """

    __slots__ = ()

    @classmethod
    def planned(
        cls, target: Target, problem: str, on_cpu: str, plan: Callable[[], Mapping[str, Any]]
    ) -> CallExplanation:
        """What ``plan`` tells of the target's family, or why that refuses; others are elsewhere.

        ``on_cpu`` is the one of the CPU.
        """
        family, other, needs = on_cpu, "compiled", NEEDS_AMD
        if isinstance(target, AmdTarget):
            family, other, needs = other, family, NEEDS_CPU
        rejected = {other: (needs.format(target=target),)}
        try:
            return cls(target, problem, family, rejected=rejected, **plan())
        except NotImplementedError as error:
            return cls(target, problem, family, rejected={family: (f"{error}.",), **rejected})

    @property
    def kernel(self) -> str | None:
        """The first one; None where nothing serves the call."""
        return self.kernels[0] if self.kernels else None

    @property
    def is_built(self) -> bool:
        """Whether all that has to be built is in the cache already."""
        return all(map(jit.is_built, self.specs))

    def __str__(self) -> str:
        lines = [f"target   {self.target}", f"problem  {self.problem}"]
        if self.kernel is None:
            lines.append("kernel   none")
        else:
            lines.append(kernel_in_words(self.kernel, self.family, self.is_built))
            lines.append(f"source   {self.source}")
            lines.extend(f"stage    {kernel}" for kernel in self.kernels if len(self.kernels) > 1)
            if self.seconds is not None:
                lines.append(f"estimate {microseconds(self.seconds)}")
        return "\n".join((*lines, *reasons_in_words(self.rejected, self.remarks)))

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain values, for JSON."""
        is_served = self.kernel is not None
        return {
            "target": str(self.target),
            "problem": self.problem,
            "family": self.family if is_served else None,
            "kernel": self.kernel,
            "source": self.source if is_served else None,
            "built": self.is_built if is_served else None,
            "stages": list(self.kernels),
            "microseconds": None if self.seconds is None else self.seconds * 1e6,
            "rejected": {family: list(reasons) for family, reasons in self.rejected.items()},
            "remarks": list(self.remarks),
        }
