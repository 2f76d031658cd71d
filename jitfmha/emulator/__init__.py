"""A functional emulator of gfx942 and gfx950 behind the HIP runtime's own C functions.

`emulate("gfx950")`, or JITFMHA_EMULATE=gfx950 in the environment, makes CPU tensors take the AMD
path; `emulation()` says whether they do. `Emulator` runs code objects directly.
"""

from .findings import Finding as Finding
from .findings import FindingKind as FindingKind
from .findings import SanitizerWarning as SanitizerWarning
from .findings import take_findings as take_findings
from .runtime import Definition as Definition
from .runtime import Emulator as Emulator
from .runtime import EmulatorError as EmulatorError
from .runtime import Function as Function
from .runtime import Module as Module
from .session import DEVICES as DEVICES
from .session import EmulatedRun as EmulatedRun
from .session import Emulation as Emulation
from .session import emulate as emulate
from .session import emulation as emulation
