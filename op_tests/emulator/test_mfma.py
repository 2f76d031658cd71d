"""MFMA and SMFMAC of every shape, type and modifier against float64."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from models import mfma as model
from models.mfma import Array, Expected, Mfma
from numpy.typing import NDArray
from programs import DEFAULT_MODE, LANES, Segment, register_name, run

from jitfmha.emulator import Definition, Emulator, EmulatorError

_FLUSH_DENORMALS_32 = DEFAULT_MODE & ~0x30
_FP16_OVERFLOW = DEFAULT_MODE | 1 << 23
# First registers of the operands; the destination has two poisoned registers on either side.
_A, _B, _C, _D = 16, 32, 64, 130
# v or a for A, B and C with D.
_FILES = ("vvv", "vva", "avv", "vaa", "aaa", "aav")
_INDICES, _A_SCALE, _B_SCALE = 40, 42, 43
_CONSTANTS = {
    "f32": ("0", "1.0", "-4.0", "0.5"),
    "i32": ("0", "1", "-16", "64"),
    "f64": ("0", "1.0", "-2.0"),
}


@pytest.fixture
def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def batch(emulator: Emulator, arch: str, random: np.random.Generator) -> _Batch:
    return _Batch(emulator, arch, random)


@pytest.fixture
def batch_of_gfx950(emulator: Emulator, random: np.random.Generator) -> _Batch:
    return _Batch(emulator, "gfx950", random)


def _definitions(emulator: Emulator, arch: str) -> list[Definition]:
    rows = (d for d in emulator.definitions() if d.format in ("MFMA", "MFMA_SCALE"))
    return [d for d in rows if arch in d.chips]


def _random_codes(
    random: np.random.Generator, kind: str, arch: str, shape: tuple[int, ...]
) -> Array:
    """Finite numbers of moderate size, none of them alike."""
    if kind == "i8":
        return random.integers(256, size=shape, dtype=np.uint64)
    if kind in ("fp8", "bf8", "fp6", "bf6", "fp4"):
        codes = np.arange({"fp8": 256, "bf8": 256, "fp6": 64, "bf6": 64, "fp4": 16}[kind])
        finite = codes[np.isfinite(model.values_of(codes, kind, arch))]
        return random.choice(finite, size=shape).astype(np.uint64)
    values = random.standard_normal(shape) * 2.0 ** random.integers(-4, 4, size=shape)
    codes = model.codes_of(values, kind)
    if kind == "xf32":  # as many ties as numbers that round up or down
        is_tie = random.random(shape) < 0.5
        codes = np.where(is_tie, (codes & ~np.uint64(0x1FFF)) | np.uint64(0x1000), codes)
    return codes


def _sprinkle(random: np.random.Generator, codes: Array, kind: str, arch: str) -> Array:
    """Some infinities, NaN, zeros and denormals."""
    special = {
        "f32": [0x7F800000, 0xFF800000, 0x7FC00001, 0x80000000, 0x00000001, 0x807FFFFF],
        "xf32": [0x7F800000, 0xFF800000, 0x7F800001, 0x80000000],
        "f16": [0x7C00, 0xFC00, 0x7E01, 0x8000, 0x0001, 0x83FF],
        "bf16": [0x7F80, 0xFF80, 0x7FC1, 0x8000, 0x0001, 0x807F],
        "fp8": [0x7F, 0x80, 0xFF, 0x00, 0x01, 0x87],
        "bf8": [0x7C, 0xFC, 0x7D, 0x80, 0xFF, 0x01, 0x83],
        "f64": [0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, 1 << 63, 1, (1 << 63) + 12345],
    }.get(kind, [0])
    chosen = random.choice(np.array(special, np.uint64), size=codes.shape)
    return np.where(random.random(codes.shape) < 0.01, chosen, codes)


def _random_inputs(
    random: np.random.Generator, instruction: Mfma, *, specials: bool = False
) -> tuple[Array, Array, Array]:
    """Registers of A, B and C."""
    results = instruction.blocks * instruction.size**2 // LANES
    registers = []
    for kind, items in (
        (instruction.a, instruction.a_items),
        (instruction.b, instruction.b_items),
        (instruction.result, results),
    ):
        if kind == "i32":
            registers.append(random.integers(2**32, size=(items, LANES), dtype=np.uint32))
            continue
        codes = _random_codes(random, kind, instruction.arch, (items, LANES))
        codes = _sprinkle(random, codes, kind, instruction.arch) if specials else codes
        registers.append(model.pack(codes, model.BITS[kind]))
    a, b, c = registers
    return a, b, c


def _check(instruction: Mfma, expected: Expected, before: Array, after: Array, what: str) -> None:
    np.testing.assert_array_equal(after[:2], before[:2], f"{what}: below the destination")
    np.testing.assert_array_equal(after[-2:], before[-2:], f"{what}: above the destination")
    actual = instruction.c_matrix(after[2:-2])
    if instruction.result == "i32":
        wrapped = (expected.value.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
        np.testing.assert_array_equal(actual, wrapped, what)
        return
    finite = np.isfinite(expected.value)
    np.testing.assert_array_equal(
        actual[~finite], expected.value[~finite].astype(actual.dtype), what
    )
    error = np.abs(actual[finite].astype(np.float64) - expected.value[finite])
    bound = expected.bound[finite]
    worst = int(np.argmax(error - bound)) if error.size else 0
    assert np.all(error <= bound), f"{what}: error {error[worst]} > {bound[worst]}"


def _dense(
    instruction: Mfma,
    a: Array,
    b: Array,
    c: Array | float,
    *,
    blgp: int = 0,
    cbsz: int = 0,
    abid: int = 0,
    scales: Sequence[Array] = (),
) -> Expected:
    """The model of an MFMA on registers; `scales`: (size, blocks of 32 depths) for A, then B."""
    a_codes = instruction.a_matrix(a, lambda lane: model.cbsz_lane(cbsz, abid, lane))
    b_codes = instruction.b_matrix(b, lambda lane: model.blgp_lane(blgp, lane))
    a_values = model.values_of(a_codes, instruction.a, instruction.arch)
    b_values = model.values_of(b_codes, instruction.b, instruction.arch)
    if scales:
        a_values = a_values * np.repeat(scales[0], 32, axis=1)
        b_values = b_values * np.repeat(scales[1], 32, axis=1).T
    c_values = c if isinstance(c, float) else instruction.c_matrix(c).astype(np.float64)
    shape = (instruction.blocks, instruction.size, instruction.size)
    return model.product(a_values, b_values, np.broadcast_to(c_values, shape), instruction.result)


def _sparse(
    instruction: Mfma, a: Array, b: Array, c: Array, indices: Array, index_set: int
) -> Expected:
    return model.sparse_product(
        model.values_of(instruction.a_matrix(a), instruction.a, instruction.arch),
        instruction.sparse_depths(indices, index_set),
        model.values_of(instruction.b_matrix(b), instruction.b, instruction.arch),
        instruction.c_matrix(c).astype(np.float64),
        instruction.result,
    )


def _random_indices(random: np.random.Generator) -> NDArray[np.uint32]:
    """Of each four bits, the lower index is below the upper one."""
    pairs = np.array([low | high << 2 for low in range(4) for high in range(low + 1, 4)], np.uint32)
    nibbles = random.choice(pairs, size=(8, LANES))
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
    indices: NDArray[np.uint32] = np.bitwise_or.reduce(nibbles << shifts, axis=0)
    return indices.astype(np.uint32)


class _Batch:
    """Segments of one launch, each with what must come out of it."""

    def __init__(self, emulator: Emulator, arch: str, random: np.random.Generator) -> None:
        self.emulator, self.arch, self.random = emulator, arch, random
        parsed = (Mfma.parse(row.mnemonic, arch) for row in _definitions(emulator, arch))
        # Those whose formats are not chosen by modifiers.
        self.instructions = [each for each in parsed if not each.chosen_formats]
        self.dense = [each for each in self.instructions if not each.sparse]
        self.segments: list[Segment] = []
        self.checks: list[tuple[Mfma, Expected, Array]] = []

    def add(
        self,
        instruction: Mfma,
        modifiers: str = "",
        *,
        inputs: Sequence[Array] = (),
        constant: str = "",
        files: str = "vvv",
        in_place: bool = True,
        extra: Mapping[str, Array | int] | None = None,
        expected: Expected | None = None,
        **of_model: Any,
    ) -> None:
        """A segment, and the content of the destination with its surroundings before it.

        Args:
            inputs: registers of A, B and C; default: drawn ones.
            constant: the text of C.
            files: v or a, of A, B and C with D.
            in_place: D is C.
            extra: more registers.
            expected: default: what the model of dense products gives with `of_model`.
        """
        a, b, c = inputs or _random_inputs(self.random, instruction)
        if expected is None:
            of_c = float(constant) if constant else c
            expected = _dense(instruction, a, b, of_c, **of_model)
        counts = instruction.registers
        a_name, b_name, c_name = map(register_name, files, (_A, _B, _C), counts)
        d_name = register_name(files[2], _D, counts[2])
        around_name = register_name(files[2], _D - 2, counts[2] + 4)
        around = self.random.integers(2**32, size=(counts[2] + 4, LANES), dtype=np.uint32)
        given = {a_name: a, b_name: b, around_name: around}
        if constant:
            c_name = constant
        elif in_place:
            c_name, around[2:-2] = d_name, c
        else:
            given[c_name] = c
        names = [d_name, a_name, b_name, f"v{_INDICES}" if instruction.sparse else c_name]
        names += [f"v{_A_SCALE}", f"v{_B_SCALE}"] if instruction.scaled else []
        code = f"{instruction.mnemonic} {', '.join(names)} {modifiers}"
        self.segments.append(Segment(code, given | dict(extra or {}), [around_name]))
        self.checks.append((instruction, expected, around))

    def results(self) -> list[Array]:
        """The destinations with their surroundings."""
        assert self.segments
        return [next(iter(r.values())) for r in run(self.emulator, self.arch, self.segments)]

    def run(self) -> None:
        for segment, check, after in zip(self.segments, self.checks, self.results(), strict=True):
            instruction, expected, before = check
            _check(instruction, expected, before, after, segment.code)

    def random_exec(self) -> int:
        return int(self.random.integers(2**63))


# ---- The table and the layouts -------------------------------------------------------------------


def test_all_matrix_instructions_are_there(emulator, arch):
    rows = _definitions(emulator, arch)
    assert {row.mnemonic for row in rows} == model.all_mnemonics(arch)
    for row in rows:
        instruction = Mfma.parse(row.mnemonic, arch)
        a, b, c = instruction.registers
        expected = (0, 0, c) if instruction.chosen_formats else (a, b, c)
        assert row.registers == expected, row.mnemonic


def test_published_cycles(emulator, arch):
    cycles = {row.mnemonic: 4 * row.passes for row in _definitions(emulator, arch)}
    published = {
        "v_mfma_f32_32x32x8_bf16": 32, "v_mfma_f32_16x16x16_f16": 16,
        "v_mfma_f32_4x4x4_16b_bf16": 8, "v_mfma_f32_32x32x4_2b_f16": 64,
        "v_mfma_f32_16x16x4_f32": 32, "v_mfma_f32_32x32x2_f32": 64,
        "v_mfma_i32_32x32x16_i8": 32, "v_mfma_f32_16x16x32_fp8_fp8": 16,
        "v_smfmac_f32_16x16x64_bf8_fp8": 16, "v_smfmac_f32_32x32x16_bf16": 32,
    }  # fmt: skip
    if arch == "gfx942":
        published |= {"v_mfma_f32_16x16x8_xf32": 16, "v_mfma_f64_16x16x4_f64": 32}
    else:
        published |= {
            "v_mfma_f32_32x32x16_bf16": 32, "v_mfma_f32_16x16x32_f16": 16,
            "v_mfma_i32_32x32x32_i8": 32, "v_mfma_f64_16x16x4_f64": 64,
            "v_smfmac_i32_16x16x128_i8": 16, "v_mfma_scale_f32_32x32x64_f8f6f4": 64,
            "v_mfma_f32_16x16x128_f8f6f4": 32,  # with a matrix of 8-bit elements
        }  # fmt: skip
    assert {name: cycles[name] for name in published} == published


@pytest.mark.parametrize(
    ("mnemonic", "items"),
    [
        ("v_mfma_f32_32x32x8_bf16", 4),
        ("v_mfma_f32_16x16x16_f16", 4),
        ("v_mfma_f32_32x32x16_bf16", 8),
        ("v_mfma_f32_16x16x32_bf16", 8),
    ],
)
def test_model_has_the_layouts_of_real_kernels(mnemonic, items):
    instruction = Mfma.parse(mnemonic, "gfx950")
    size = instruction.size
    for lane, item in itertools.product(range(LANES), range(items)):
        indices = map(np.array, (0, lane % size, items * (lane // size) + item))
        place = instruction.input_place(*indices, items=items, halves=False)
        assert tuple(map(int, place)) == (lane, item)
    for lane, register in itertools.product(range(LANES), range(size * size // LANES)):
        row = 4 * (lane // 16) + register
        if size == 32:
            row = 8 * (register // 4) + 4 * (lane // 32) + register % 4
        place = instruction.output_place(np.array(0), np.array(row), np.array(lane % size))
        assert tuple(map(int, place)) == (lane, register)


# ---- Dense products ------------------------------------------------------------------------------


def test_dense(batch):
    """EXEC does not matter."""
    for instruction in batch.dense:
        for number, files in enumerate(_FILES):
            extra = {"exec": batch.random_exec()} if number else {}
            batch.add(instruction, files=files, in_place=number % 2 == 0, extra=extra)
        for constant in _CONSTANTS[instruction.result]:
            batch.add(instruction, constant=constant, files=str(batch.random.choice(_FILES[:2])))
    batch.run()


def test_destination_over_a_source(emulator, arch, random):
    """D may lie in A's and B's registers: everything is read first."""
    segments, expected = [], []
    names = ("v_mfma_f32_32x32x8_bf16", "v_mfma_f32_32x32x1_2b_f32", "v_mfma_f64_16x16x4_f64")
    for mnemonic in names:
        instruction = Mfma.parse(mnemonic, arch)
        a, b, c = _random_inputs(random, instruction)
        count = instruction.registers[2]
        for first in (_A, _B):
            places = zip((_A, _B, _C), instruction.registers, strict=True)
            sources = [register_name("v", *place) for place in places]
            d_name = register_name("v", first, count)
            inputs = dict(zip(sources, (a, b, c), strict=True))
            code = f"{mnemonic} {d_name}, {', '.join(sources)}"
            segments.append(Segment(code, inputs, [d_name]))
            expected.append((instruction, _dense(instruction, a, b, c)))
    for (instruction, result), segment, outputs in zip(
        expected, segments, run(emulator, arch, segments), strict=True
    ):
        (after,) = outputs.values()
        padded = np.pad(after, ((2, 2), (0, 0)))
        _check(instruction, result, padded, padded, segment.code)


def test_special_values(batch):
    """Infinity and NaN; zeros and denormals among normal numbers."""
    for instruction in [each for each in batch.instructions if each.result != "i32"] * 2:
        inputs = _random_inputs(batch.random, instruction, specials=True)
        if instruction.sparse:
            indices = _random_indices(batch.random)
            expected = _sparse(instruction, *inputs, indices, 0)
            extra = {f"v{_INDICES}": indices}
            batch.add(instruction, inputs=inputs, extra=extra, expected=expected)
        else:
            batch.add(instruction, inputs=inputs)
    batch.run()


def _denormal_inputs(random: np.random.Generator, instruction: Mfma) -> tuple[Array, Array, Array]:
    """A all denormals, B large, C zeros and denormals."""
    mantissa = {"f64": 52, "f32": 23, "xf32": 23, "f16": 10, "bf16": 7, "fp8": 3, "bf8": 2}
    bits = mantissa[instruction.a]
    shape = (instruction.a_items, LANES)
    sign = np.uint64(1 << model.BITS[instruction.a] - 1)
    sign *= random.integers(2, size=shape, dtype=np.uint64)
    a = random.integers(1, 2**bits, size=shape, dtype=np.uint64) | sign
    if instruction.a == "xf32":
        a &= ~np.uint64(0x1FFF)  # nothing to round
    b = _random_codes(random, instruction.b, instruction.arch, (instruction.b_items, LANES))
    results = instruction.registers[2] // (2 if instruction.result == "f64" else 1)
    c = random.integers(0, 2**20, size=(results, LANES), dtype=np.uint64)
    pack_a, pack_b = (model.BITS[kind] for kind in (instruction.a, instruction.b))
    wide = 64 if instruction.result == "f64" else 32
    return model.pack(a, pack_a), model.pack(b, pack_b), model.pack(c, wide)


@pytest.mark.parametrize("mode", [DEFAULT_MODE, _FLUSH_DENORMALS_32, DEFAULT_MODE & ~0xFF | 0x0F])
def test_denormals(batch, mode):
    """Kept whatever MODE says, and rounded to nearest; only float32 inputs look at MODE."""
    for instruction in [each for each in batch.dense if each.result != "i32"]:
        a, b, c = _denormal_inputs(batch.random, instruction)
        flushed = a & np.uint32(0x80000000) if instruction.a == "f32" and not mode & 0x10 else a
        expected = _dense(instruction, flushed, b, c)
        batch.add(instruction, inputs=(a, b, c), extra={"mode": mode}, expected=expected)
    batch.run()


# ---- Modifiers -----------------------------------------------------------------------------------


def test_blgp_cbsz_and_abid(batch):
    for instruction in [each for each in batch.dense if each.result != "f64"]:
        if instruction.blocks > 1 or instruction.a == "f32":
            for blgp in range(1, 8):
                batch.add(instruction, f"blgp:{blgp}", blgp=blgp)
        if instruction.blocks > 1:
            cbsz = instruction.blocks.bit_length() - 1
            for abid in range(instruction.blocks):
                chosen = {"cbsz": cbsz, "abid": abid, "blgp": int(batch.random.integers(8))}
                modifiers = " ".join(f"{name}:{value}" for name, value in chosen.items())
                batch.add(instruction, modifiers, **chosen)
    batch.run()


@pytest.mark.parametrize(
    ("mnemonic", "modifiers", "message"),
    [
        ("v_mfma_f32_16x16x1_4b_f32", "cbsz:1", "cbsz:1 is not implemented"),
        ("v_mfma_f32_4x4x4_16b_f16", "cbsz:3 abid:2", "cbsz:3 is not implemented"),
        ("v_mfma_f32_32x32x1_2b_f32", "cbsz:1 abid:2", "abid:2 is not implemented"),
        ("v_mfma_f32_32x32x8_bf16", "cbsz:1", "cbsz:1 is not implemented"),
        ("v_mfma_f32_32x32x8_bf16", "blgp:1", "blgp:1 is not implemented"),
        ("v_mfma_f32_16x16x32_fp8_fp8", "abid:1", "abid:1 is not implemented"),
    ],
)
def test_modifiers_without_a_meaning_are_errors(batch, mnemonic, modifiers, message):
    batch.add(Mfma.parse(mnemonic, batch.arch), modifiers)
    with pytest.raises(EmulatorError, match=f"{mnemonic}.*{message}"):
        batch.run()


def test_negated_float64(batch):
    for mnemonic in ("v_mfma_f64_16x16x4_f64", "v_mfma_f64_4x4x4_4b_f64"):
        instruction = Mfma.parse(mnemonic, batch.arch)
        for negated in itertools.product((0, 1), repeat=3):
            inputs = _random_inputs(batch.random, instruction)
            signed = [register.copy() for register in inputs]
            for register, negate in zip(signed, negated, strict=True):
                register[1::2] ^= np.uint32(negate << 31)
            modifiers = f"neg:[{','.join(map(str, negated))}]"
            batch.add(instruction, modifiers, inputs=inputs, expected=_dense(instruction, *signed))
            expected = _dense(instruction, *signed[:2], -2.0 if negated[2] else 2.0)
            batch.add(instruction, modifiers, inputs=inputs, constant="2.0", expected=expected)
    batch.run()


# ---- Sparse products -----------------------------------------------------------------------------


def test_sparse(batch):
    for instruction in [each for each in batch.instructions if each.sparse]:
        sets = 16 // instruction.a_items  # of two bits an element, in 32
        cases = [
            (f"abid:{index_set}", files, index_set)
            for index_set, files in zip(itertools.cycle(range(sets)), _FILES, strict=False)
        ]
        # With CBSZ the first set is taken. One set alone is taken whatever the fields say.
        first = ["cbsz:1 abid:1", "cbsz:2 abid:1", "cbsz:3 abid:3"] + ["abid:2"] * (sets == 1)
        for modifiers, files, index_set in cases + [(each, "vvv", 0) for each in first]:
            inputs, indices = (
                _random_inputs(batch.random, instruction),
                _random_indices(batch.random),
            )
            extra = {f"v{_INDICES}": indices, "exec": batch.random_exec()}
            expected = _sparse(instruction, *inputs, indices, index_set)
            batch.add(
                instruction, modifiers, inputs=inputs, files=files, extra=extra, expected=expected
            )
    batch.run()


# ---- Chosen formats and scales -------------------------------------------------------------------

_FORMAT_PAIRS = [(a, b) for a in range(5) for b in range(5)]
_SHAPES = ("16x16x128", "32x32x64")


def _format_modifiers(a: int, b: int) -> str:
    return f"{f'cbsz:{a} ' if a else ''}{f'blgp:{b}' if b else ''}"


def test_chosen_formats(batch_of_gfx950):
    batch = batch_of_gfx950
    for shape, formats in itertools.product(_SHAPES, _FORMAT_PAIRS):
        instruction = Mfma.parse(f"v_mfma_f32_{shape}_f8f6f4", "gfx950", formats)
        specials = batch.random.random() < 0.3
        inputs = _random_inputs(batch.random, instruction, specials=specials)
        files = str(batch.random.choice(_FILES))
        for constant in ("", "-4.0"):
            modifiers = _format_modifiers(*formats)
            batch.add(instruction, modifiers, inputs=inputs, constant=constant, files=files)
    batch.run()


def test_scales(batch_of_gfx950):
    batch, random = batch_of_gfx950, batch_of_gfx950.random
    for number, (shape, formats) in enumerate(itertools.product(_SHAPES, _FORMAT_PAIRS)):
        instruction = Mfma.parse(f"v_mfma_scale_f32_{shape}_f8f6f4", "gfx950", formats)
        codes = random.integers(118, 136, size=(2, 4, LANES), dtype=np.uint8)
        if number % 5 == 0:
            codes[0, :, 5] = codes[1, :, 37] = 0xFF  # NaN
            codes[0, :, 9] = 0
        registers = codes.transpose(0, 2, 1).copy().view(np.uint32)[:, :, 0]
        bytes_ = random.integers(4, size=2).tolist()
        low, high = ([byte >> bit & 1 for byte in bytes_] for bit in (0, 1))
        modifiers = f"op_sel:[{low[0]},{low[1]},0] op_sel_hi:[{high[0]},{high[1]},0] "
        modifiers += _format_modifiers(*formats)
        extra = {f"v{_A_SCALE}": registers[0], f"v{_B_SCALE}": registers[1]}
        extra["exec"] = batch.random_exec()
        # The scale of a row (column) and a block of 32 depths.
        scales = [
            model.scales_of(*each, instruction.size) for each in zip(registers, bytes_, strict=True)
        ]
        files = str(random.choice(_FILES))
        for constant in ("", "1.0"):
            batch.add(
                instruction, modifiers, constant=constant, files=files, extra=extra, scales=scales
            )
    batch.run()


# ---- Overflow ------------------------------------------------------------------------------------


def test_float_results_saturate_with_fp16_ovfl(batch):
    instruction = Mfma.parse("v_mfma_f32_32x32x8_bf16", batch.arch)
    largest, infinity = np.float32(np.finfo(np.float32).max), np.float32(np.inf)
    # Row 0 of A is huge and column 1 of B is infinite; C has an infinity of its own in row 2.
    a = np.full((2, LANES), 0x3F803F80, np.uint32)
    a[:, 0] = a[:, 32] = 0x7F7F7F7F
    b = np.full((2, LANES), 0x7F007F00, np.uint32)
    b[:, 1] = b[:, 33] = 0x7F807F80
    c = np.ones((instruction.registers[2], LANES), np.float32)
    lane, register = instruction.output_place(np.array(0), np.array(2), np.array(7))
    c[register, lane] = -infinity
    modes = {DEFAULT_MODE: infinity, _FP16_OVERFLOW: largest}
    for mode in modes:
        batch.add(instruction, inputs=(a, b, c.view(np.uint32)), extra={"mode": mode})
    for (mode, overflow), after in zip(modes.items(), batch.results(), strict=True):
        d = instruction.c_matrix(after[2:-2])[0]
        assert (d[0, 0], d[0, 1], d[5, 1], d[2, 7]) == (overflow, infinity, infinity, -infinity)
        assert np.isfinite(np.delete(d[3], 1)).all() or mode == DEFAULT_MODE


def test_integer_results_saturate_with_fp16_ovfl(batch):
    for instruction in [each for each in batch.dense if each.result == "i32"]:
        a, b, c = _random_inputs(batch.random, instruction)
        c = np.where(batch.random.random(c.shape) < 0.5, 0x7FFFFFF0, 0x80000010).astype(np.uint32)
        exact = _dense(instruction, a, b, c)
        clipped = Expected(np.clip(exact.value, -(2.0**31), 2.0**31 - 1), exact.bound)
        batch.add(instruction, inputs=(a, b, c), expected=exact)
        extra = {"mode": _FP16_OVERFLOW}
        batch.add(instruction, inputs=(a, b, c), extra=extra, expected=clipped)
    batch.run()
