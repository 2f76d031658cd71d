"""What the emulator's C++ and Python share, stated once.

`library.py` renders it into `csrc_templates/emulator/shared_structs.h.in`.
"""

from __future__ import annotations

from typing import Literal

from ..jit.shared_struct import UINT32, UINT64, SharedStruct

OPTIONS = SharedStruct(
    "Options",
    {
        "threads": UINT32,
        "time_slice": UINT32,
        "instruction_budget": UINT64,
        "random_order": UINT32,
        "register_fill": UINT32,
        "seed": UINT64,
        "print_findings": UINT32,
    },
)
"""How the launches of a thread run: the arguments of `Emulator.set_options`."""

# Instructions. Few, so that waves keep pace as they do on hardware: published kernels hand LDS over
# without a barrier. Causal forward kernels of gfx950 are right up to 256, latent-attention decode
# in 8 bits up to 7: two loads to one place are four instructions apart there, so that 4 is right
# whatever the phase. It costs no time that can be measured.
DEFAULT_TIME_SLICE = 4

RANGE = SharedStruct("Range", {"begin": UINT64, "end": UINT64})
"""Addresses that a launch may touch, the end excluded."""

PROFILE_OPTIONS = SharedStruct(
    "ProfileOptions",
    {
        "looked_at": UINT64,
        "assumed_workgroups": UINT64,
        "most_steps": UINT64,
        "sample": UINT64,
        "run_sample_only": UINT32,
    },
)
"""How the launches of a thread are profiled: the arguments of `set_profile_options`."""

DEFAULT_MOST_STEPS = 50_000_000
DEFAULT_SAMPLE = 32

FindingKind = Literal[
    "global-bounds",
    "lds-bounds",
    "scratch-bounds",
    "uninitialized",
    "wait-count",
    "wait-states",
    "lds-race",
    "barrier",
]
"""Kinds of faults that the sanitizer finds; `Finding.kind` says what each is."""
