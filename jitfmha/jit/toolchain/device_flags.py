"""The flags of device code that every compiler of it is given, and the one that every spec has."""

from __future__ import annotations

from ..errors import BuildError
from ..spec import BuildSpec

CODE_OBJECT_VERSION_FLAG = "-mcode-object-version=5"
_ARCH_FLAG = "--offload-arch="


def architecture(spec: BuildSpec) -> str:
    """The architecture that a spec is for.

    Raises:
        BuildError: it names none, or several.
    """
    archs = [flag.removeprefix(_ARCH_FLAG) for flag in spec.cflags if flag.startswith(_ARCH_FLAG)]
    if len(archs) != 1:
        raise BuildError(f"{spec.name} names {archs} as its architectures; give one {_ARCH_FLAG}")
    return archs[0]
