"""The decoder's view of instructions agrees with LLVM's."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from assembled_words import assemble_words
from assembler import assemble_each
from elf import text_words
from hip_sources import STYLES
from hsa_build import hsa_build
from instruction_encodings import Encoding, encodings

from jitfmha.emulator import Emulator
from jitfmha.jit.toolchain.device_compiler import assemble, compile_hip_to_assembly

# Forms that LLVM does not write, but that the ISA documents list.
_WITHOUT_TEXT = {("v_readfirstlane_b32", "e64")}
# Forms that LLVM writes, but whose meaning the ISA documents do not give: SDWA of packed halves.
_WITHOUT_MEANING = {"v_pk_fmac_f16_sdwa"}
# LLVM knows these on some instructions only; elsewhere the bits mean nothing, or it has no text.
# At least so much of what we write, it must read.
_LEAST_ACCEPTED = dict.fromkeys(("neg", "abs", "sext", "omod"), 0.85) | {"op_sel": 0.75}
_LEAST_ACCEPTED |= {"clamp": 0.4, "cbsz": 0.9, "blgp": 0.9, "lds": 0.9, "accumulation": 0.6}


def _samples(request: pytest.FixtureRequest) -> int:
    return 200 if request.config.getoption("--exhaustive") else 8


def _hex(words: tuple[int, ...] | None) -> str:
    return "refused" if words is None else " ".join(f"{word:08x}" for word in words)


def test_reassembling_every_row_gives_the_same_bits(emulator, arch, seed, request):
    decoded: list[tuple[Encoding, str]] = []
    forms: Counter[tuple[str, str]] = Counter()
    rng = random.Random(seed)
    for encoding in encodings(emulator.definitions(), arch, rng, samples=_samples(request)):
        text, length = emulator.disassemble(arch, (*encoding.words, 0, 0))
        assert length in (0, len(encoding.words)), f"{text} has {length} dwords"
        form = (encoding.row.mnemonic, encoding.form)
        forms[form] += bool(length)
        if length and form not in _WITHOUT_TEXT:
            decoded.append((encoding, text))
    own = {encoding.row.mnemonic for encoding, _ in decoded}
    unknown = {d.mnemonic for d in emulator.definitions() if arch in d.chips} - own
    assert not unknown, f"no encoding is decoded of {sorted(unknown)}"

    written: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    wrong = []
    for (encoding, text), words in zip(
        decoded, assemble_each([text for _, text in decoded], arch), strict=True
    ):
        written.update(encoding.modifiers)
        if words is not None:
            accepted.update(encoding.modifiers)
        if words != encoding.words and (words is not None or not encoding.modifiers):
            wrong.append(f"{_hex(encoding.words)}  {text}  LLVM: {_hex(words)}")
    assert not wrong, f"{len(wrong)} of {len(decoded)}:\n" + "\n".join(wrong[:40])
    for modifier, count in written.items():
        share = accepted[modifier] / count
        assert share >= _LEAST_ACCEPTED[modifier], f"LLVM reads {share:.0%} of our {modifier}"


def test_forms_that_llvm_has_are_decoded(emulator, arch):
    """SDWA, DPP and VOP3 forms with plain registers, wherever LLVM assembles them."""
    texts = []
    for row in emulator.definitions():
        if arch not in row.chips or row.format not in ("VOP1", "VOP2", "VOPC"):
            continue
        sources = [
            1 + (kind in ("b64", "i64", "f64")) for kind, role in row.sources if role == "source"
        ]
        wide = row.result[0] in ("b64", "i64", "f64", "f32x2")
        operands = ["v[2:3]" if wide else "v2"] if row.format != "VOPC" else ["vcc"]
        operands += ["vcc"] if row.result[1] == "with_carry" else []
        operands += ["v4" if size == 1 else "v[4:5]" for size in sources]
        operands += ["vcc"] if any(role == "lane_bit" for _, role in row.sources) else []
        listed = ", ".join(operands)
        texts += [f"{row.mnemonic}_e64 {listed}", f"{row.mnemonic}_sdwa {listed}"]
        texts += [f"{row.mnemonic}_dpp {listed} row_newbcast:1"]
    missing = [
        text
        for text, words in zip(texts, assemble_each(texts, arch), strict=True)
        if words is not None
        and text.split()[0] not in _WITHOUT_MEANING
        and emulator.disassemble(arch, (*words, 0, 0))[1] == 0
    ]
    assert not missing, missing


_COMMENT = re.compile(r"\s*(;|//).*")
_LABEL = re.compile(r"\s*[\w.$]+:")
_INSTRUCTION = re.compile(r"\s+[a-z]\w* ?[^:]*$|\s+[a-z]\w* .*")
_PADDING = 0xBF800000  # s_nop 0
_SECTIONS = (".text", ".section", ".rodata", ".data", ".amdgpu_metadata")
_PLACEMENT = (".p2align", ".p2alignl", ".fill")


class _Decoded(NamedTuple):
    """One instruction: what the decoder and LLVM's listing call it."""

    at: int
    words: tuple[int, ...]
    ours: str
    theirs: str


def _code(assembly: str) -> Iterator[str]:
    """The text section's labels, instructions, and directives that move what follows."""
    in_text = False
    for line in assembly.splitlines():
        line = _COMMENT.sub("", line).rstrip()
        directive = line.split()[:2]
        if directive and directive[0] in _SECTIONS:
            in_text = (
                directive[0] == ".text"
                or directive[1:2] == [".text"]
                or (directive[0] == ".section" and ".text" in line)
            )
        elif in_text and (
            _LABEL.fullmatch(line)
            or _INSTRUCTION.match(line)
            or (directive and directive[0] in _PLACEMENT)
        ):
            yield " ".join(line.split())


def _side_by_side(
    emulator: Emulator, arch: str, assembly: str, words: Sequence[int]
) -> tuple[list[_Decoded], dict[str, int]]:
    """Every instruction of a listing with the decoder's view of it, and where the labels are.

    Where LLVM names a branch's target, that is resolved to the distance which the encoding has.
    """
    at = 0
    decoded: list[_Decoded] = []
    labels: dict[str, int] = {}
    for line in _code(assembly):
        if line.endswith(":"):
            assert line[:-1] not in labels, f"{line} stands twice"
            labels[line[:-1]] = at
        elif line.startswith("."):
            directive, first, *_ = line.replace(",", " ").split()
            unit = max(1, 2 ** int(first) // 4)
            end = at + int(first) if directive == ".fill" else -(-at // unit) * unit
            assert set(words[at:end]) <= {_PADDING}, f"more than padding at dword {at}: {line}"
            at = end
        else:
            text, length = emulator.disassemble(arch, words[at : at + 4])
            assert length, f"not decoded: {line} ({_hex(tuple(words[at : at + 2]))})"
            decoded.append(_Decoded(at, tuple(words[at : at + length]), text, line))
            # The rest of the listing would be out of step.
            assert text.split()[0] == line.split()[0], f"ours {text!r}, LLVM's {line!r}"
            at += length
    assert at == len(words), f"{len(words) - at} dwords are not in the listing"
    return [each._replace(theirs=_with_distance(each, labels)) for each in decoded], labels


def _with_distance(decoded: _Decoded, labels: dict[str, int]) -> str:
    """LLVM's text; a branch's target as the encoding has it, in dwords from the next one."""
    mnemonic, _, operands = decoded.theirs.partition(" ")
    if operands not in labels:
        return decoded.theirs
    return f"{mnemonic} {(labels[operands] - decoded.at - 1) & 0xFFFF}"


def _is_symbol(operand: str) -> bool:
    return "@" in operand or ".L" in operand


def _same(ours: str, theirs: str) -> bool:
    """Equal but for operands that LLVM gives by symbol."""
    our_operands, their_operands = (text.replace(", ", " ").split() for text in (ours, theirs))
    return len(our_operands) == len(their_operands) and all(
        a == b or _is_symbol(b) for a, b in zip(our_operands, their_operands, strict=True)
    )


@pytest.mark.parametrize("level", ["-O3", "-O1", "-O0"])
@pytest.mark.parametrize("style", list(STYLES))
def test_compiled_code_agrees_with_llvms_listing(emulator, arch, style, level):
    assembly = compile_hip_to_assembly(STYLES[style], arch, flags=[level])
    words = text_words(assemble(assembly, arch))
    decoded, _ = _side_by_side(emulator, arch, assembly, words)
    for each in decoded:
        assert _same(each.ours, each.theirs), f"ours {each.ours!r}, LLVM's {each.theirs!r}"
    # A symbol is a literal, even where its value has a shorter form.
    plain = [each for each in decoded if not _is_symbol(each.theirs)]
    again = assemble_words([each.ours for each in plain], arch)
    differ = [each.ours for each, words in zip(plain, again, strict=True) if each.words != words]
    assert not differ, differ


def test_code_objects_of_the_tree_agree_with_llvms_listing(emulator, arch, seed, request):
    """Two of each architecture, all with `--exhaustive`."""
    kernels = [kernel for kernel in hsa_build.kernels() if kernel.arch == arch]
    if not request.config.getoption("--exhaustive"):
        kernels = random.Random(seed).sample(kernels, 2)

    def listing(kernel: Any) -> tuple[str, bytes]:
        assembly = hsa_build.compile_to_assembly(kernel)
        return assembly, assemble(assembly, arch)

    with ThreadPoolExecutor() as pool:
        listings = list(pool.map(listing, kernels))
    for kernel, (assembly, assembled) in zip(kernels, listings, strict=True):
        name = kernel.path.relative_to(hsa_build.HSA)
        code_object = kernel.path.read_bytes()
        # So that LLVM's text is that of these very instructions.
        assert code_object == assembled, f"{name} is not what its source gives"
        decoded, labels = _side_by_side(emulator, arch, assembly, text_words(code_object))
        starts = {each.at for each in decoded}
        for symbol in kernel.symbols:
            assert labels.get(symbol) in starts, f"{name} has no {symbol}"
        differ = [
            f"dword {each.at}: {_hex(each.words)}  {each.ours}  LLVM: {each.theirs}"
            for each in decoded
            if each.ours != each.theirs
        ]
        assert not differ, f"{name}: {len(differ)} of {len(decoded)}:\n" + "\n".join(differ[:40])
