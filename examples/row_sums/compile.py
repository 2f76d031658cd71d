"""Makes a code object of HIP C++ without headers, with the device compiler that jitfmha finds.

    python examples/row_sums/compile.py gfx942 examples/row_sums/row_sums.hip row_sums.co

More flags, such as -DMENDED, go to the compiler. With ROCm's own compiler it is

    clang++ -x hip --offload-arch=gfx942 --cuda-device-only -O3 -nogpulib -nogpuinc ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from jitfmha.jit.toolchain.device_compiler import compile_hip

arch, source, code_object, *flags = sys.argv[1:]
text = Path(source).read_text(encoding="utf-8")
Path(code_object).write_bytes(compile_hip(text, arch, flags=flags))
