"""The decoder's view of instructions agrees with LLVM's."""

import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from assembled_words import assemble_each
from elf import text_words
from hsa_build import hsa_build
from instruction_texts import Texts

from jitfmha.emulator import Emulator
from jitfmha.emulator.library import load_decoder
from jitfmha.emulator.runtime import Decoder

# What LLVM takes and the ISA documents give no meaning: SDWA of packed halves, formats that there
# are not, accumulation registers where nothing is accumulated, constants and signs of two floats.
_WITHOUT_MEANING = re.compile(
    r"v_pk_fmac_f16_sdwa|f8f6f4 .*(cbsz|blgp):[567]|ds_gws_\w+ a|sr_pk_fp4_f32 v\d+, [^v]"
)


def _hex(words: tuple[int, ...] | None) -> str:
    return "refused" if words is None else " ".join(f"{word:08x}" for word in words)


def test_reassembling_what_llvm_assembles_gives_the_same_bits(emulator, arch, seed, request):
    """Every row, encoding, form and modifier: LLVM reads our text of its bits as those."""
    samples = 200 if request.config.getoption("--exhaustive") else 8
    drawn, accepted, decoded, wrong = set(), set(), [], []
    for line, words in Texts(emulator, arch, random.Random(seed)).assembled(samples):
        parts = {line.row.mnemonic, (line.row.format, line.encoding)}
        parts |= {(line.form, modifier) for modifier in line.modifiers}
        drawn |= parts
        if words is None or _WITHOUT_MEANING.search(line.text):
            continue
        accepted |= parts
        text, length = emulator.disassemble(arch, (*words, 0, 0))
        if length == len(words):
            decoded.append((line.text, words, text))
        else:
            wrong.append(f"{_hex(words)}  {line.text}: {length} dwords, {text}")
    assert drawn == accepted, f"LLVM takes nothing of {drawn - accepted}"
    again = assemble_each([text for *_, text in decoded], arch)
    for (line_text, words, text), found in zip(decoded, again, strict=True):
        if words != found:
            wrong.append(f"{_hex(words)}  {line_text}: {text}, LLVM: {_hex(found)}")
    assert not wrong, f"{len(wrong)} of {len(decoded)}:\n" + "\n".join(wrong[:40])


def test_the_decoder_alone_has_the_rows_of_the_emulator(emulator):
    assert Decoder(load_decoder()).definitions() == emulator.definitions()


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


def test_code_objects_of_the_tree_agree_with_llvms_listing(emulator, arch, seed, request):
    """One of which gfx950's lacked wait states, and one more; all with `--exhaustive`."""
    kernels = [kernel for kernel in hsa_build.kernels() if kernel.arch == arch]
    if not request.config.getoption("--exhaustive"):
        with_waits = [x for x in kernels if x.path.name.startswith("fwd_hd256_fp8bf16_causal")]
        kernels = [*with_waits[:1], random.Random(seed).choice(kernels)]

    def listing(kernel: Any) -> tuple[str, bytes]:
        return hsa_build.assemble_with_waits(hsa_build.compile_to_assembly(kernel), arch)

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
