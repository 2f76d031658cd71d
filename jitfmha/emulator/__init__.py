"""A functional emulator of gfx942 and gfx950 behind the HIP runtime's own C functions.

`emulate("gfx950")`, or JITFMHA_EMULATE=gfx950 in the environment, makes CPU tensors take the AMD
path; `emulation()` says whether they do. `Emulator` runs code objects directly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .session import DEVICES, EmulatedRun, Emulation, emulate, emulation

if TYPE_CHECKING:
    from .findings import Finding, FindingKind, SanitizerWarning, take_findings
    from .runtime import Definition, Emulator, EmulatorError, Function, Module

__all__ = [
    "DEVICES",
    "Definition",
    "EmulatedRun",
    "Emulation",
    "Emulator",
    "EmulatorError",
    "Finding",
    "FindingKind",
    "Function",
    "Module",
    "SanitizerWarning",
    "emulate",
    "emulation",
    "take_findings",
]

# Loaded when they are first asked for: every `import jitfmha` comes by here.
_FINDINGS = ("Finding", "FindingKind", "SanitizerWarning", "take_findings")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(".findings" if name in _FINDINGS else ".runtime", __name__)
    return getattr(module, name)
