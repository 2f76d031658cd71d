"""Feeds the emulator damaged code objects and random instructions; run by test_fuzz.py.

    python fuzz_worker.py --kind code_objects --seed 7 --seconds 5 --progress FILE
    python fuzz_worker.py --kind calls --seed 7 --cases 100 --first 500
    python fuzz_worker.py --kind instructions --seed 7 --case 1234       repeats one case

Every case depends on the kind, the seed and its number only. Errors are what should happen; a
crash, a hang or a damaged buffer ends the process. FILE holds the number of the case that runs.
"""

import argparse
import ctypes
import faulthandler
import mmap
import os
import random
import re
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from itertools import count, takewhile
from pathlib import Path

import torch
from launches import assembled, kernel_text

from jitfmha import emulate, fmha_fwd
from jitfmha.amd import tree
from jitfmha.amd.runtime import HipError
from jitfmha.emulator import DEVICES, Emulator, EmulatorError, Function
from jitfmha.jit.toolchain.device_compiler import compile_hip

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "amd"))
from elf import HEADER_BYTES, section_headers, sections
from instruction_texts import Texts
from plain_tree import PlainKernel, write_tree

_CHIPS = ("gfx942", "gfx950")
_BUDGET, _BUDGET_OF_CALL = 2000, 300_000  # instructions of a wave
_BUFFER_BYTES = 65536
_GUARD = 0xA5
_INSTRUCTIONS = 48  # dwords
_NOP = 0xBF800000
_SET_M0 = 0xBEFC00FF  # s_mov_b32 m0, the next dword
_INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)

_HIP = """
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(1, 256)))
void first(const float* a, float* b, int n) {
  __shared__ float tile[64];
  const int i = __builtin_amdgcn_workitem_id_x();
  tile[i & 63] = a[i];
  __builtin_amdgcn_s_barrier();
  for (int k = 0; k < n; ++k) b[i] += tile[(i + k) & 63];
}
extern "C" __global__ void second(int* a, long n) {
  int table[16];
  for (int k = 0; k < 16; ++k) table[k] = a[k];
  a[__builtin_amdgcn_workgroup_size_x()] = table[n & 15];
}
"""

# Scalar and vector pairs hold the address of a buffer, so that random accesses often hit it.
_PROLOGUE = """
s_load_dwordx2 s[2:3], s[0:1], 0x0
s_waitcnt lgkmcnt(0)
s_mov_b32 s4, s2
s_mov_b32 s5, s3
s_mov_b32 s6, 0x10000
s_mov_b32 s7, 0x20000
{scalars}
{vectors}
"""
# The place for random instructions, and behind the kernel where that is.
_BODY = """{prologue}
.Lplace:
.fill {words}, 4, 0xbf800000"""
_MARKS = """
.section .marks, "a"
.long .Lplace - random_code
"""


class Fuzzer:
    """One emulator and the memory that its launches may touch, between two guards."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self._storage = ctypes.create_string_buffer(bytes([_GUARD]) * (3 * _BUFFER_BYTES))
        self.buffer = ctypes.addressof(self._storage) + _BUFFER_BYTES
        emulator.set_allowed_memory([(self.buffer, _BUFFER_BYTES)])
        self.outcomes: dict[str, int] = {}

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def launch(self, function: Function, rng: random.Random, block: int) -> str:
        """Run a kernel; its end and its failure are both fine. Returns the failure's text."""
        self.emulator.set_options(
            threads=1,
            instruction_budget=_BUDGET,
            random_order=bool(rng.getrandbits(1)),
            time_slice=97,
        )
        kernarg = struct.pack("<QQQQ", *([self.buffer] * 4))
        try:
            self.emulator.launch(function, (rng.choice((1, 2)), 1, 1), (block, 1, 1), kernarg)
        except EmulatorError as error:
            if not self.emulator.last_error().strip():
                raise AssertionError("an error without words") from None
            self.count(error.name)
            return str(error)
        self.count("ran")
        return ""

    def check_guards(self) -> None:
        """Nothing outside of the given memory was written."""
        content = self._storage.raw
        guard = bytes([_GUARD]) * _BUFFER_BYTES
        if {content[:_BUFFER_BYTES], content[2 * _BUFFER_BYTES :][:_BUFFER_BYTES]} != {guard}:
            raise AssertionError("memory beside the buffer was written")


# ---- Damaged code objects ------------------------------------------------------------------------


class CodeObjects:
    """Loads and launches code objects with damage in their headers, notes, descriptors and code."""

    def __init__(self, fuzzer: Fuzzer) -> None:
        self._fuzzer = fuzzer
        self._originals = [
            (chip, compile_hip(_HIP, chip, code_object_version=version))
            for chip in _CHIPS
            for version in (4, 5, 6)
        ]

    def run(self, rng: random.Random) -> None:
        chip, original = rng.choice(self._originals)
        damaged = _damage(original, rng)
        emulator = self._fuzzer.emulator
        try:
            module = emulator.load_module(damaged, DEVICES[chip])
        except EmulatorError as error:
            self._fuzzer.count(f"load: {error.name}")
            return
        for name in ("first", "second"):
            try:
                function = emulator.function(module, name)
            except EmulatorError as error:
                self._fuzzer.count(error.name)
                continue
            self._fuzzer.launch(function, rng, rng.choice((1, 64, 100, 256)))
        emulator.unload_module(module)


def _damage(original: bytes, rng: random.Random) -> bytes:
    content = bytearray(original)
    found = sections(original)
    table = section_headers(original)
    places = [
        (0, HEADER_BYTES),
        (HEADER_BYTES, 56 * 8),
        table,
        found[".note"],
        found[".rodata"],
        found[".dynsym"],
        found[".text"],
        (0, len(original)),
    ]
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        offset, length = rng.choice(places)
        at = offset + rng.randrange(max(1, length))
        kind = rng.randrange(4)
        if kind == 0:
            content[at % len(content)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            content[at % len(content)] = rng.choice(_INTERESTING) & 0xFF
        else:
            # A whole field; most are aligned.
            size = rng.choice((2, 4, 8))
            at = min(at // size * size, len(content) - size)
            value = rng.choice((*_INTERESTING, rng.getrandbits(64), 1 << rng.randrange(64)))
            content[at : at + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    if rng.randrange(10) == 0:
        del content[rng.randrange(len(content)) :]
    return bytes(content)


# ---- Calls ---------------------------------------------------------------------------------------


class Calls:
    """Calls `fmha_fwd` with a tree of damaged code objects: all checks, the launcher, a launch.

    Each code object that is loaded stays loaded: some hundred cases are enough for a process.
    """

    def __init__(self, fuzzer: Fuzzer) -> None:
        self._fuzzer = fuzzer
        self._folder = tempfile.TemporaryDirectory()
        root = Path(self._folder.name)
        tree.hsa_dir = lambda: root / "nothing"
        os.environ[tree.HSA_DIR] = str(root)
        kernels = [PlainKernel(), PlainKernel(mode=1)]
        for chip in _CHIPS:
            write_tree(root, chip, kernels)
        self._originals = {path: path.read_bytes() for path in sorted(root.rglob("*.co"))}
        generator = torch.Generator().manual_seed(5)
        self._qkv = [torch.randn(9, 2, 128, generator=generator).bfloat16() for _ in "qkv"]

    def run(self, rng: random.Random) -> None:
        chip, is_group = rng.choice(_CHIPS), bool(rng.getrandbits(1))
        for path, original in self._originals.items():
            path.write_bytes(_damage(original, rng))
        order = rng.choice((None, rng.getrandbits(32)))
        with (
            warnings.catch_warnings(),
            emulate(chip, threads=1, instruction_budget=_BUDGET_OF_CALL, random_order=order),
        ):
            warnings.simplefilter("ignore")  # of what is refused
            try:
                if is_group:
                    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
                    fmha_fwd(*self._qkv, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=5)
                else:
                    fmha_fwd(*(x[None] for x in self._qkv))
            except HipError as error:
                self._fuzzer.count(re.findall(r"hipError\w+", str(error))[0])
            except NotImplementedError:
                self._fuzzer.count("refused")
            else:
                self._fuzzer.count("ran")


# ---- Random instructions -------------------------------------------------------------------------


class Instructions:
    """Disassembles and executes random, and randomly damaged, instructions of the tables' rows."""

    def __init__(self, fuzzer: Fuzzer) -> None:
        self._fuzzer = fuzzer
        self._originals = {chip: _random_code(chip) for chip in _CHIPS}
        rng = random.Random(1)
        self._instructions = {
            chip: [words for _, words in Texts(fuzzer.emulator, chip, rng).assembled(2) if words]
            for chip in _CHIPS
        }

    def run(self, rng: random.Random) -> None:
        chip = rng.choice(_CHIPS)
        words = self._words(chip, rng)
        for at in range(0, len(words), 7):
            text, _ = self._fuzzer.emulator.disassemble(chip, words[at : at + 4])
            assert text
        original, place, entry = self._originals[chip]
        # Where an instruction stops the kernel, the next launch goes on behind it.
        for _ in range(_INSTRUCTIONS):
            code = struct.pack(f"<{_INSTRUCTIONS}I", *words)
            content = original[:place] + code + original[place + len(code) :]
            module = self._fuzzer.emulator.load_module(content, DEVICES[chip])
            function = self._fuzzer.emulator.function(module, "random_code")
            failure = self._fuzzer.launch(function, rng, rng.choice((64, 64, 7, 128)))
            self._fuzzer.emulator.unload_module(module)
            at = _stopped_at(failure)
            if at is None or not 0 <= at - entry < 4 * _INSTRUCTIONS:
                return
            words[(at - entry) // 4] = _NOP

    def _words(self, chip: str, rng: random.Random) -> list[int]:
        words: list[int] = []
        damage = rng.choice((0, 0, 0, 3, 30))  # percent of damaged instructions
        while len(words) < _INSTRUCTIONS:
            if rng.randrange(16) == 0:  # M0 is an index, an offset, a count
                words += [_SET_M0, rng.choice(_INTERESTING)]
            encoded = list(rng.choice(self._instructions[chip]))
            if rng.randrange(100) < damage:
                encoded[rng.randrange(len(encoded))] ^= 1 << rng.randrange(32)
            if rng.randrange(100) < damage // 3:
                encoded = [rng.getrandbits(32)]
            words += encoded
        return words[:_INSTRUCTIONS]


def _stopped_at(failure: str) -> int | None:
    """The offset in the kernel of the instruction that a failure's text names."""
    found = re.search(r"at random_code\+0x([0-9a-f]+)", failure)
    return int(found[1], 16) if found else None


def _random_code(chip: str) -> tuple[bytes, int, int]:
    """A code object; the place for random instructions, from the file's and the kernel's begin."""
    pairs = ((i, i % 4 + 4 & ~1) for i in range(8, 102, 2))
    scalars = "\n".join(f"s_mov_b64 s[{i}:{i + 1}], s[{j}:{j + 1}]" for i, j in pairs)
    vectors = "\n".join(f"v_mov_b32 v{i}, s{2 + i % 2}" for i in range(1, 256))
    prologue = _PROLOGUE.format(scalars=scalars, vectors=vectors)
    body = _BODY.format(prologue=prologue, words=_INSTRUCTIONS)
    code = assembled(
        chip, kernel_text("random_code", body, lds_bytes=4096, scratch_bytes=256), _MARKS
    )
    found = sections(code)
    (place,) = struct.unpack_from("<I", code, found[".marks"][0])
    return code, found[".text"][0] + place, place


_KINDS: dict[str, Callable[[Fuzzer], CodeObjects | Calls | Instructions]] = {
    "code_objects": CodeObjects,
    "calls": Calls,
    "instructions": Instructions,
}


def _cases(arguments: argparse.Namespace) -> Iterable[int]:
    if arguments.case is not None:
        return [arguments.case]
    if arguments.cases is not None:
        return range(arguments.first, arguments.first + arguments.cases)
    end = time.monotonic() + arguments.seconds
    return takewhile(lambda number: time.monotonic() < end, count(arguments.first))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=list(_KINDS), required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--cases", type=int, help="how many, in place of a time")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument("--progress", type=Path)
    parser.add_argument(
        "--library", type=Path, help="a build of the emulator; default: the cache's"
    )
    arguments = parser.parse_args()
    faulthandler.enable()
    library = ctypes.CDLL(str(arguments.library)) if arguments.library else None
    fuzzer = Fuzzer(Emulator(library=library))
    subject = _KINDS[arguments.kind](fuzzer)
    progress = mmap.mmap(-1, 8)
    if arguments.progress:
        arguments.progress.write_bytes(bytes(8))
        with arguments.progress.open("r+b") as file:
            progress = mmap.mmap(file.fileno(), 8)
    done = 0
    for number in _cases(arguments):
        progress[:8] = struct.pack("<q", number)
        subject.run(random.Random(f"{arguments.kind} {arguments.seed} {number}"))
        fuzzer.check_guards()
        done += 1
    print(f"{done} cases: {fuzzer.outcomes}")


if __name__ == "__main__":
    sys.exit(main())
