"""The launcher with AMD's own HIP runtime where one is installed, on a machine without a GPU.

Every function that the launcher looks up has to be there, and the runtime's error has to come back.
Debian's package libamdhip64-5 has such a runtime.
"""

import json
from ctypes.util import find_library
from pathlib import Path

import pytest
from subprocesses import run_python

_NAME = find_library("amdhip64")
pytestmark = [
    pytest.mark.skipif(_NAME is None, reason="no HIP runtime is installed"),
    pytest.mark.skipif(Path("/dev/kfd").exists(), reason="there may be a GPU"),
]

# In a process of its own: a runtime that is loaded stays.
_CALLS = """
import ctypes, json, sys
import torch
import jitfmha
from jitfmha.amd.tree import trees_of
from jitfmha.amd.runtime import HipRuntime
from jitfmha.amd.chips import chip
from jitfmha.planning.target import TARGET_HERE, AmdTarget

runtime = HipRuntime(ctypes.CDLL(sys.argv[1]))
errors = []
for name in ("MI300X", "MI355X"):
    found = chip(name)
    TARGET_HERE.set(AmdTarget(found, 0, found.compute_units, runtime, trees_of(found)))
    q = torch.randn(1, 64, 2, 128).bfloat16().requires_grad_()
    for _ in range(2):
        try:
            jitfmha.fmha_fwd(q, q, q)
        except jitfmha.HipError as error:
            errors.append([error.code, str(error)])
print(json.dumps(errors))
"""


def test_its_error_comes_back():
    assert _NAME is not None
    errors = json.loads(run_python("-c", _CALLS, _NAME).stdout)
    assert len(errors) == 4
    for code, text in errors:
        # hipErrorNoDevice, or hipErrorInvalidDevice
        assert code in (100, 101), text
        assert text.startswith("hipSetDevice for fwd_hd128_bf16"), text
