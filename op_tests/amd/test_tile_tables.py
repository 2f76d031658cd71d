"""The data that compiled kernels are made of: what its rules refuse, and that kernels agree."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from jitfmha import jit
from jitfmha.amd.chips import Arch, architecture
from jitfmha.amd.code_object import kernel_descriptors, kernel_metadata
from jitfmha.jit.elf import Elf
from jitfmha.kernels.compiled import tile_table as form
from jitfmha.kernels.compiled.backward_traits import BackwardTraits, backward_spec
from jitfmha.kernels.compiled.tile_rules import TILE_RULES, check_table
from jitfmha.kernels.compiled.tile_table import KernelPart, TileTableError, read_table
from jitfmha.kernels.compiled.tiles import tile_for, tile_table
from jitfmha.kernels.compiled.traits import ForwardTraits, kernel_spec
from jitfmha.kernels.modifiers import ModifierTraits

ARCHS: tuple[Arch, ...] = get_args(Arch)
FOLDER = Path(form.__file__).parent
Change = Callable[[str], str]


def changed(text: str, old: str, new: str) -> str:
    """With the first match of a pattern replaced, which there has to be."""
    result, count = re.subn(old, new, text, count=1, flags=re.MULTILINE)
    assert count == 1, f"nothing is like {old!r}"
    return result


def refusal(folder: Path, old: str, new: str) -> tuple[str, int]:
    """What is said of gfx942's file with a change, and the number of the changed line."""
    text = changed((FOLDER / "gfx942.csv").read_text(), old, new)
    path = folder / "changed.csv"
    path.write_text(text)
    match = re.search(old, (FOLDER / "gfx942.csv").read_text(), flags=re.MULTILINE)
    assert match is not None
    line = match.string[: match.start()].count("\n") + 1
    with pytest.raises(TileTableError) as raised:
        check_table(read_table(path), architecture("gfx942"))
    assert str(path) in str(raised.value)
    return str(raised.value), line


# What is changed in a row, and what the error says of it.
BAD_CELLS = [
    (r"^bf16,BF16,BF16,BF16", "bf16,BF16,BF17,BF16", ["scores 'BF17'", "FP32, BF16, FP16"]),
    (r"^fp16,FP16", "fp8_e4m3fn,FP16", ["dtype 'fp8_e4m3fn'", "fp8_e4m3fnuz", "chips.json"]),
    (r"^fp16,FP16", "bf16,FP16", ["dtype 'bf16'", "already"]),
    (
        r"^forward,bf16 fp16 bf8_e5m2fnuz int8,64,128",
        "sideways,bf16,64,128",
        ["kernel 'sideways'", "dk_and_dv"],
    ),
    (r"^forward,bf16 fp16 bf8_e5m2fnuz int8,64,128,1", "forward,bf16,64,128,x", ["slices 'x'"]),
    (r"^forward,bf16 fp16 bf8_e5m2fnuz int8,64,128,1", "forward,bf16,64,0,1", ["hdim_v '0'"]),
    (r"^forward,bf16 fp16 bf8_e5m2fnuz int8,64,128,1", "forward,bf16,64,1_0,1", ["hdim_v '1_0'"]),
    (
        r"^forward,bf16 fp16 bf8_e5m2fnuz int8,64,128,1,128",
        "forward,bf16,64,128,1",
        ["8 cells", "expected 9"],
    ),
    (
        r"^kernel,dtypes,hdim_q",
        "kernel,dtype,hdim_q",
        ["the columns are", "expected kernel,dtypes"],
    ),
    (r"^\[tiles\]", "[tile]", ["'tile'", "waves of a SIMD"]),
    (r"^\[waves of a SIMD\]", "[tiles]", ["'tiles'", "twice"]),
    (r"^\[data types\]", "data types", ["'data types'", "before the first table"]),
    (r"^forward,none,156,2", "forward,few,156,2", ["features 'few'", "none, light one, any"]),
    (r"^forward,light one,512,1", "forward,light one,116,1", ["held_registers 116", "above"]),
    (
        *(r"^forward,none,156,2", "forward,none,257,2"),
        ["waves_of_simd 2", "held_registers 257", "512"],
    ),
    (r"^forward,any,512,1", "forward,any,500,1", ["held_registers 500", "512"]),
    (r"^backward,any,168,3", "backward,none,168,3", ["features 'none' of backward"]),
]
# The same where the row that the change takes something from is not the one that lacks it.
BAD_WHOLES = [
    (r"^int8,INT8.*\n", "", ["dtype 'int8' is missing"]),
    (r"^forward,fp8_e4m3fnuz(.*\n)*?(?=forward,fp32)", "", ["'fp8_e4m3fnuz' has no tile"]),
    (
        r"^forward,bf16 fp16 bf8_e5m2fnuz int8,64,128,",
        "forward,bf16 fp16 int8,576,128,",
        ["is served by line"],
    ),
    (r"^dv,bf16 fp16,576,576.*\n", "", ["kernel 'dv'", "bf16 with hdims 576"]),
    (r"^backward(.*\n)*", "", ["no row of backward with features 'any'"]),
    (r"^direction(.*\n)*", "", ["no rows of waves of a SIMD"]),
    (
        r"^(waves_of_simd,held_registers\n)",
        r"\g<1>3,200\n",
        ["waves_of_simd 3", "held_registers 200", "512"],
    ),
]
# For every rule of tiles a row that breaks it alone.
BROKEN_RULES = {
    "dtypes_are_listed": ("forward,fp32,64,128", "forward,fp64,64,128", ["'fp64'"]),
    "lds_fits": ("128,32,4,65536", "128,32,4,65552", ["lds_bytes 65552", "65536"]),
    "lds_holds_chunks": ("128,32,4,12288", "128,32,4,12290", ["lds_bytes 12290", "16"]),
    "waves_own_whole_products": ("1,128,32,4,12288", "1,160,32,4,12288", ["tile_q 160", "4 waves"]),
    "others_are_one_product": ("1,128,32,4,12288", "1,256,64,8,12288", ["tile_k 64", "32"]),
    "threads_load_whole_rows": ("1,128,32,4,12288", "1,64,32,2,12288", ["waves 2", "128 threads"]),
    "hdims_are_whole_products": ("^dq,bf16 fp16,64,", "dq,bf16 fp16,72,", ["hdim_q 72", "32"]),
    "slices_are_narrow": ("int8,64,512,2,", "int8,64,512,1,", ["slices 1", "hdim_v 512", "256"]),
    "slices_are_of_one_result": (
        "^dk_and_dv,bf16 fp16,64,64,1",
        "dk_and_dv,bf16,64,64,2",
        ["slices 2", "'dk_and_dv'"],
    ),
    "gradients_have_16_bits_or_more": ("^dv,bf16 fp16,128", "dv,bf16 int8,128", ["'int8'", "'dv'"]),
    "registers_hold_operands": (
        "fp32,256,128,1",
        "fp32,1024,128,1",
        ["hdim_q 1024", "fp32", "512"],
    ),
}


@pytest.mark.parametrize(("old", "new", "texts"), [*BAD_CELLS, *BROKEN_RULES.values(), *BAD_WHOLES])
def test_bad_data_names_file_line_and_value(tmp_path, old, new, texts):
    said, line = refusal(tmp_path, old, new)
    assert (old, new, texts) in BAD_WHOLES or f", line {line}: " in said
    for text in texts:
        assert text in said


def test_every_rule_of_tiles_is_broken_alone(tmp_path):
    """And each says its source."""
    by_name = {rule.name: rule for rule in TILE_RULES}
    assert by_name.keys() == BROKEN_RULES.keys()
    for name, (old, new, _) in BROKEN_RULES.items():
        said, line = refusal(tmp_path, old, new)
        assert said.endswith(f"({by_name[name].source})")
        table = read_table(tmp_path / "changed.csv")
        if name != "dtypes_are_listed":
            (tile,) = (each for each in table.tiles if each.line == line)
            chip = architecture("gfx942")
            broken = [x.name for x in TILE_RULES if any(x.complaints(tile, table, chip))]
            assert broken == [name]


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TileTableError, match=r"gfx000\.csv cannot be read"):
        read_table(tmp_path / "gfx000.csv")


@pytest.mark.parametrize("arch", ARCHS)
def test_the_first_row_with_room_is_taken(arch):
    for kernel in get_args(KernelPart):
        for hdims in ((1, 1), (64, 128), (65, 64), (64, 129), (256, 256), (160, 160), (161, 160)):
            rows = [
                row
                for row in tile_table(arch).tiles
                if row.kernel == kernel
                and "bf16" in row.dtypes
                and row.hdim_q >= hdims[0]
                and row.hdim_v >= hdims[1]
            ]
            assert tile_for(arch, kernel, "bf16", *hdims) == (rows[0] if rows else None)
    assert tile_for(arch, "forward", "fp32", 577, 8) is None
    assert tile_for(arch, "dq", "int8", 8, 8) is None


@pytest.mark.sample(
    "tile",
    [
        (arch, tile)
        for arch in ARCHS
        for tile in tile_table(arch).tiles
        # Of the kernels of dk and dv that for both is the one that is compiled where it can be.
        if tile_for(arch, "dk_and_dv", tile.dtypes[0], tile.hdim_q, tile.hdim_v) is None
        or tile.kernel not in ("dk", "dv")
    ],
    1,
)
def test_the_widest_kernel_of_a_row_takes_its_lds(tile):
    """The build fails where a kernel would take more. In backward dropout takes some."""
    arch, row = tile
    options = {"is_masked": True, "access": "near"}
    common = arch, row.dtypes[0], row.hdim_q, row.hdim_v, "gm0", "rtne"
    if row.kernel == "forward":
        plain = {"modifiers": ModifierTraits("compiled"), "kv_dtype": row.dtypes[0]}
        traits = ForwardTraits(*common, **options, **plain)
        image, symbol = jit.read(kernel_spec(traits)), traits.name
    else:
        backward = BackwardTraits(
            *common, **options, modifiers=ModifierTraits("compiled", dropout=True)
        )
        image, symbol = jit.read(backward_spec(backward)), f"{backward.name}_{row.kernel}"
    elf = Elf(image)
    descriptor, metadata = kernel_descriptors(elf)[symbol], kernel_metadata(elf, symbol)
    assert descriptor.lds_bytes == row.lds_bytes
    assert metadata is not None
    # A wave takes them in eights; one that has a SIMD to itself more than half of all.
    least_alone = architecture(arch).simd_vgprs // 2 + 8
    unused = descriptor.vgprs - metadata[".vgpr_count"]
    assert 0 <= unused < 8 or (unused > 0 and descriptor.vgprs == least_alone)
