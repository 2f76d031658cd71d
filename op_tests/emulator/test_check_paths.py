"""Wait states over all paths of a code object, and those that are put in.

The kernels do not run: many of them would not end.
"""

import random
from dataclasses import dataclass, field

import pytest
from checked_kernels import Body, code_object_of, run_checked
from hsa_build import hsa_build
from launches import assembled, kernel_text

from jitfmha.emulator.disassembly import disassemble
from jitfmha.emulator.wait_states import MissingWaits, missing_waits
from jitfmha.jit.elf import Elf
from jitfmha.jit.toolchain.device_compiler import assemble

# A product of 4 passes, and how many wait states must follow before its result is used.
_PRODUCT = "v_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[4:5], 0"
_NEEDED = {"gfx942": 7, "gfx950": 8}
_READ, _OVERWRITE, _OTHER = "v_mov_b32 v20, v8", "v_mov_b32 v8, 0", "v_mov_b32 v21, 0"
_ENDS = ("s_endpgm", "s_branch", "s_cbranch_scc1", "s_cbranch_vccz", "s_cbranch_execnz")


@dataclass
class _Block:
    """Instructions, then a branch to another block, or none."""

    lines: list[str]
    end: str = ""
    target: int = 0


@dataclass
class _Program:
    """Blocks in a row, and what each instruction lacks by a reckoning of its own.

    What matters of the past is how many wait states ago the product was issued that made v8, so
    that all pasts of a block are few.
    """

    blocks: list[_Block]
    arch: str
    missing: dict[int, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        lines = []
        for number, block in enumerate(self.blocks):
            lines += [f".Lblock{number}_%=:", *block.lines]
            if block.end:
                target = f" .Lblock{block.target}_%=" if "branch" in block.end else ""
                lines.append(block.end + target)
        return "\n".join(lines)

    def reckon(self) -> None:
        firsts = [0]
        for block in self.blocks:
            firsts.append(firsts[-1] + len(block.lines) + bool(block.end))
        open_: list[tuple[int, int | None]] = [(0, None)]
        seen = set(open_)
        while open_:
            number, since = open_.pop()
            block = self.blocks[number]
            for at, line in enumerate(block.lines, firsts[number]):
                since = self._after(at, line, since)
            ways = [] if block.end in ("s_branch", "s_endpgm") else [number + 1]
            ways += [block.target] if "branch" in block.end else []
            if block.end:
                since = self._after(firsts[number] + len(block.lines), block.end, since)
            new = {(way, since) for way in ways if way < len(self.blocks)} - seen
            seen |= new
            open_ += new

    def _after(self, at: int, line: str, since: int | None) -> int | None:
        uses = line in (_READ, _OVERWRITE)
        if uses and since is not None and since < _NEEDED[self.arch]:
            lacking = _NEEDED[self.arch] - since
            self.missing[at] = max(self.missing.get(at, 0), lacking)
        if line == _PRODUCT:
            return 0
        if line == _OVERWRITE or since is None:
            return None
        waits = int(line.split()[1]) + 1 if line.startswith("s_nop") else 1
        return since + waits if since + waits < _NEEDED[self.arch] else None


def _drawn(arch: str, draw: random.Random) -> _Program:
    def line() -> str:
        nop = f"s_nop {draw.randrange(8)}"
        return draw.choice((_PRODUCT, _READ, _OVERWRITE, _OTHER, _OTHER, _OTHER, nop))

    count = draw.randrange(2, 8)
    blocks = [
        _Block(
            [line() for _ in range(draw.randrange(6))],
            draw.choice(("", *_ENDS)),
            draw.randrange(count),
        )
        for _ in range(count)
    ]
    program = _Program([*blocks, _Block([_OTHER])], arch)
    program.reckon()
    return program


def _around(then: int, waits: int) -> Body:
    """A product, a branch around `then` instructions, `waits` wait states, and a read."""
    lines = [
        *("v_mov_b32 v2, 0", "v_mov_b32 v3, 0", "v_mov_b32 v4, 0", "v_mov_b32 v5, 0", "s_nop 7"),
        *(_PRODUCT, "s_cmp_eq_u32 s2, 1", "s_cbranch_scc1 1f"),
        *[_OTHER] * then,
        "1:",
        *([f"s_nop {waits - 1}"] if waits else []),
        _READ,
    ]
    return Body("\n".join(lines))


def test_drawn_programs(arch, rng):
    draw = random.Random(rng.initial_seed())
    programs = {f"kernel{i}": _drawn(arch, draw) for i in range(60)}
    texts = [kernel_text(name, each.text.replace("%=", name)) for name, each in programs.items()]
    found: dict[str, dict[int, int]] = {name: {} for name in programs}
    for place in missing_waits(assembled(arch, *texts)):
        found[place.kernel][place.number] = place.missing
    assert found == {name: program.missing for name, program in programs.items()}
    assert any(found.values())


def test_the_path_that_a_run_does_not_take(check_emulator, arch):
    """Its workgroup is number 0, so that a run goes through what the branch is around."""
    bodies = {"lacks": _around(5, 1), "waits": _around(5, 6)}
    assert run_checked(check_emulator, arch, bodies) == {"lacks": [], "waits": []}
    (place,) = missing_waits(code_object_of(arch, bodies))
    needed = _NEEDED[arch]
    assert (place.kernel, place.missing) == ("lacks", needed - 3)
    assert place.instruction == "v_mov_b32_e32 v20, v8"
    assert f"v8: needs {needed} wait states after `v_mfma_f32_16x16x16_f16" in place.message


def _listing(arch: str) -> str:
    """Two kernels that lack something: one a little, at two places, one more than s_nop has."""
    little = f"{_PRODUCT}\n; a comment\n{_OTHER}\n{_READ}\n{_OVERWRITE}"
    wide = "v_mfma_f32_32x32x4_2b_f16 v[8:39], v[2:3], v[4:5], 0"
    return _header(arch) + kernel_text("little", little) + kernel_text("much", f"{wide}\n{_READ}")


def test_waits_are_put_in(arch):
    assembly, code_object = hsa_build.assemble_with_waits(_listing(arch), arch)
    assert assemble(assembly, arch) == code_object
    assert missing_waits(code_object) == []
    needed = _NEEDED[arch]
    for kernel, waits in (("little", [needed - 1]), ("much", [8, 8, 3])):
        lines = [each.text for each in disassemble(Elf(code_object), kernel, arch)]
        nops = [f"s_nop {each - 1}" for each in waits]
        at = lines.index("v_mov_b32_e32 v20, v8")
        assert lines[at - len(nops) : at] == nops
        assert lines.index("s_endpgm") == {"little": 5, "much": 5}[kernel]


def test_what_waits_is_assembled_as_it_is(arch):
    text = kernel_text("kernel", _around(5, 6).code)
    assembly = _header(arch) + text
    assert hsa_build.assemble_with_waits(assembly, arch) == (assembly, assembled(arch, text))


def test_code_whose_way_on_a_run_alone_knows(arch):
    text = kernel_text("kernel", f"s_getpc_b64 s[4:5]\ns_setpc_b64 s[4:5]\n{_OTHER}")
    code_object = assembled(arch, text)
    (place,) = missing_waits(code_object)
    assert (place.number, place.missing) == (1, 0)
    with pytest.raises(RuntimeError, match="only a run says"):
        hsa_build.assemble_with_waits(_header(arch) + text, arch)


def test_a_listing_of_other_code_is_told(arch, monkeypatch):
    place = MissingWaits("kernel", "kernel+0x4", 0, "v_mov_b32_e32 v1, v2", 1, "too early")
    monkeypatch.setattr(hsa_build, "missing_waits", lambda code_object: [place])
    with pytest.raises(RuntimeError, match="is `s_nop 0` in the listing"):
        hsa_build.assemble_with_waits(_header(arch) + kernel_text("kernel", "  s_nop 0"), arch)


def test_what_is_no_code_object_is_refused():
    with pytest.raises(ValueError, match="truncated"):
        missing_waits(b"nothing")


def _header(arch: str) -> str:
    return f'\n.amdgcn_target "amdgcn-amd-amdhsa--{arch}"\n.amdhsa_code_object_version 5\n'
