"""``python -m jitfmha hip``: a code object from a file of HIP C++."""

from __future__ import annotations

import argparse
import sys

from ..amd.code_object import kernel_descriptors
from ..jit.elf import Elf
from ..jit.regular_file import write_whole
from ..jit.toolchain.device_compiler import DeviceCompileError, compile_hip_file
from .exit_codes import FAILED, OK
from .output import print_json, show


def run(args: argparse.Namespace) -> int:
    """Compile, and say which kernels there are; errors are the compiler's."""
    flags = [*(f"-D{each}" for each in args.define), *(f"-I{each}" for each in args.include)]
    try:
        image = compile_hip_file(args.source, args.arch, flags=flags)
    except DeviceCompileError as error:
        print(error.output, file=sys.stderr)
        return FAILED
    write_whole(args.output, image)
    kernels = sorted(kernel_descriptors(Elf(image)))
    if args.json:
        print_json({"file": str(args.output), "bytes": len(image), "kernels": kernels})
    else:
        show(f"{args.output}: {', '.join(kernels) or 'no kernel'}")
    return OK
