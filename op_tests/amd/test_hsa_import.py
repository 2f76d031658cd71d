"""`python -m jitfmha hsa`: a listing becomes a kernel of a tree, and what is wrong is named."""

import os
import re
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
from amd_problems import AmdProblem, assert_exact
from assembled_words import assemble_words
from commands import Ended, Run
from plain_tree import COLUMNS, PLAIN_NAME, PlainKernel, plain_listing, write_tree
from rigs.modelled_call import take_only
from untyped import explain

from jitfmha import emulate
from jitfmha.amd import import_kernel, tree_check
from jitfmha.amd.assembly_listing import ListingError, decorated, kernels_of, refuse_files, renamed
from jitfmha.amd.chips import Arch, architecture, chip
from jitfmha.amd.import_kernel import (
    ImportedKernel,
    ImportRefused,
    KernelFacts,
    add_to_tree,
    import_listing,
)
from jitfmha.amd.manifest import READY_BACKWARD_MANIFEST
from jitfmha.amd.tree import AITER_ASM_DIR, HSA_DIR, trees_of
from jitfmha.emulator.disassembly import DecodedInstruction, disassemble, without_padding
from jitfmha.jit.elf import Elf
from jitfmha.jit.toolchain.device_compiler import DeviceCompileError, assemble

KERNEL = PlainKernel(mask=2, mode=1)
FLAGS = (
    *("--arch", "gfx942", "--variant", "MI308", "--dtype", "bf16", "--hdim", "128", "128"),
    *("--mask", "2", "--mode", "gm1", "--bf16-cvt", "rtne", "--tile", "64", "32"),
)
SYMBOL = f"_ZN5aiter{len(PLAIN_NAME)}{PLAIN_NAME}E"
FORWARD = Path("gfx942", "fmha_v3_fwd")
FILE = FORWARD / "MI308" / f"{PLAIN_NAME}.co"


@pytest.fixture
def hsa(run: Run) -> Run:
    return partial(run, "hsa")


@pytest.fixture(scope="module")
def imported() -> ImportedKernel:
    """The kernel of the listing, assembled and not run."""
    facts = KernelFacts("gfx942", ("MI308",), "bf16", (128, 128), 2, "gm1", "rtne", (64, 32))
    return import_listing(plain_listing(KERNEL, "gfx942"), facts)


@pytest.fixture
def listing(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.s"
    path.write_text(plain_listing(KERNEL, "gfx942"))
    return path


def with_flag(name: str, *values: str) -> tuple[str, ...]:
    """FLAGS with other values of one."""
    at = FLAGS.index(name) + 1
    return (*FLAGS[:at], *values, *FLAGS[at + len(values) :])


def assert_refused(ended: Ended, complaint: str, code: int = 2) -> None:
    assert (ended.code, complaint in ended.err) == (code, True), ended.err


def test_an_imported_kernel_serves_calls(rng, hsa, listing, tmp_path, use_tree):
    tree = tmp_path / "tree"
    use_tree(tree)
    ended = hsa("import", listing, *FLAGS, "--json")
    assert ended.code == 0, ended.err
    assert ended.json["kernel"] == SYMBOL
    assert ended.json["files"] == [str(tree / FILE)]
    problem = AmdProblem(rng, lengths=((70, 90), (0, 10), (65, 64), (1, 1)), mask=2)
    with emulate("gfx942-mi308"):
        take_only("named")
        actual = problem.run()
        plan = explain(problem.q, problem.k, problem.v, **problem.arguments)
    assert PLAIN_NAME in str(plan)
    assert str(tree) in str(plan)
    assert_exact(actual, problem.exact(), 2**-8)

    listed = hsa("list", "--json").json
    assert [(row["symbol"], row["variants"]) for row in listed] == [(SYMBOL, ["MI308"])]
    assert (listed[0]["mask"], listed[0]["mode"]) == ("causal", "gm1")
    assert hsa("verify", tree).code == 0
    shown = hsa("show", tree / FILE, "--json").json
    (kernel,) = shown["kernels"]
    assert (shown["arch"], kernel["kernel"], kernel["kernarg_bytes"]) == ("gfx942", SYMBOL, 656)
    assert kernel["metadata"][".max_flat_workgroup_size"] == KERNEL.threads
    assert SYMBOL in hsa("show", tree / FILE).out


def test_the_users_own_tree_is_where_kernels_go_and_where_calls_look(
    hsa, listing, tmp_path, use_tree, monkeypatch
):
    use_tree(tmp_path)  # the package's own tree is out of sight
    monkeypatch.delenv(HSA_DIR)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert hsa("import", listing, *FLAGS).code == 0
    own = tmp_path / "data" / "jitfmha" / "hsa"
    assert (own / FILE).is_file()
    (tree,) = trees_of(chip("MI308X"))
    assert str(own) in str(tree)
    assert [row.symbol for row in tree.forward.rows] == [SYMBOL]


def test_a_second_variant_shares_the_row(hsa, listing, tmp_path):
    into = ("--into", tmp_path / "tree")
    assert hsa("import", listing, *FLAGS, *into).code == 0
    rows = (tmp_path / "tree" / FORWARD / "fmha_fwd.csv").read_text()
    assert hsa("import", listing, *with_flag("--variant", "MI300"), *into).code == 0
    assert (tmp_path / "tree" / FORWARD / "fmha_fwd.csv").read_text() == rows
    assert (tmp_path / "tree" / FORWARD / "MI300" / f"{PLAIN_NAME}.co").is_file()
    check = hsa("verify", tmp_path / "tree", "--json").json[str(tmp_path / "tree")]
    assert (check["files"], check["problems"], check["remarks"]) == (2, [], [])


def test_a_kernel_is_replaced_only_on_demand(hsa, listing, tmp_path):
    tree = tmp_path / "tree"
    assert hsa("import", listing, *FLAGS, "--into", tree).code == 0
    again = ("import", listing, *FLAGS, "--into", tree, "--name", "other")
    refused = hsa(*again)
    assert refused.code == 2
    assert f"line 2 serves the same: {PLAIN_NAME}" in refused.err
    assert contents(tree).keys() == {FILE, FORWARD / "fmha_fwd.csv"}
    assert hsa(*again, "--replace").code == 0
    other = FORWARD / "MI308" / "other.co"
    assert contents(tree).keys() == {other, FORWARD / "fmha_fwd.csv"}
    assert hsa("verify", tree).code == 0


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_a_failed_import_leaves_the_tree_as_it_was(hsa, listing, tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    write_tree(tree, "gfx942", [PlainKernel(mask=0, mode=1)])
    before = contents(tree)
    write = import_kernel.write_whole

    def full_disk(path: Path, content: bytes, mode: int) -> None:
        if path.name == "fmha_fwd.csv" and path.is_relative_to(tree):
            raise OSError(28, "No space left on device")
        write(path, content, mode)

    with monkeypatch.context() as patched:
        patched.setattr(import_kernel, "write_whole", full_disk)
        ended = hsa("import", listing, *FLAGS, "--into", tree)
    assert ended.code == 1
    assert "No space left" in ended.err
    assert contents(tree) == before
    assert hsa("import", listing, *FLAGS, "--into", tree).code == 0
    assert contents(tree).keys() - before.keys() == {FILE}


@pytest.mark.parametrize(
    ("flags", "code", "complaint"),
    [
        (with_flag("--arch", "gfx950")[:2] + FLAGS[4:], 2, "is for gfx942 (.amdgcn_target), not"),
        (with_flag("--variant", "MI400"), 2, "variant MI400 is none of MI300, MI308"),
        ((*FLAGS[:2], *FLAGS[4:]), 2, "gfx942 needs a variant: MI300 or MI308, or both"),
        ((*FLAGS, "--kernel", "nonsense"), 2, f"no kernel nonsense; the listing has {PLAIN_NAME}"),
        ((*FLAGS, "--name", "no name"), 2, "'no name' is no name for a kernel"),
        ((*FLAGS, "--threads", "100"), 2, "threads '100' is not a multiple of 64"),
        ((*FLAGS, "--threads", "1024"), 2, "workgroups of at most 512 threads, expected 1024"),
        (with_flag("--hdim", "0", "128"), 2, "hdim_q '0' is not between 1 and 65535"),
        (with_flag("--mask", "1"), 2, "mask 1 with gm1"),
        # It says that it is for another mask than it is.
        (with_flag("--mask", "0"), 1, "computes something else than attention"),
        (with_flag("--bf16-cvt", "rtz") + ("--into", "/proc/no/tree"), 1, "/proc/no"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_kernel_is_refused(hsa, listing, tmp_path, flags, code, complaint):
    tree = tmp_path / "tree"
    ended = hsa("import", listing, "--into", tree, *flags)
    assert_refused(ended, complaint, code)
    assert not tree.exists()


@pytest.mark.parametrize(
    ("form", "other", "complaint"),
    [
        (r"656", "672", "declares 672 bytes of arguments, expected at most 656"),
        (r"656", "80", "declares 80 bytes of arguments; one for gm1 reads ptr_kseq, which ends"),
        (r"(?m)^    \.symbol: .*$", "    .symbol: other.kd", "no metadata about kernel"),
        (r"wavefront_size: 64", "wavefront_size: 32", "waves of 32 lanes, expected 64"),
        (r"group_segment_fixed_size \d+", "group_segment_fixed_size 65537", "of LDS; gfx942 has"),
        (r"\.amdhsa_kernel .*", ".amdhsa_kernel", "the listing has none at all"),
        (r"\ts_endpgm", "\ts_endprogram", "s_endprogram"),
    ],
)
def test_a_listing_is_refused(hsa, listing, tmp_path, form, other, complaint):
    text, count = re.subn(form, other, listing.read_text())
    assert count
    listing.write_text(text)
    ended = hsa("import", listing, *FLAGS, "--into", tmp_path / "tree")
    assert ended.code in (1, 2)
    assert complaint in ended.err
    assert not (tmp_path / "tree").exists()


@pytest.mark.parametrize("name", ["../../../victim.txt", "{}/victim.txt", "sub/victim.txt", ""])
def test_a_replaced_row_that_names_another_file(listing, tmp_path, imported, name):
    """Its file would be removed."""
    tree, victim = tmp_path / "tree", tmp_path / "victim.txt"
    victim.write_text("precious")
    add_to_tree(imported, tree)
    manifest = tree / FORWARD / "fmha_fwd.csv"
    name = name.format(tmp_path)
    text = manifest.read_text().replace(f"{PLAIN_NAME}.co", name).replace(SYMBOL, "another")
    manifest.write_text(text)
    before = contents(tree)
    complaint = re.escape(
        f"fmha_fwd.csv, line 2 cannot be replaced: co_name {name!r} is not a file"
    )
    with pytest.raises(ImportRefused, match=complaint):
        add_to_tree(imported, tree, replaces=True)
    assert contents(tree) == before
    assert victim.read_text() == "precious"


def test_a_file_of_another_kernel_stays(tmp_path, imported):
    """Whether a row names it, or it only lies there."""
    tree = tmp_path / "tree"
    add_to_tree(imported, tree)
    before = contents(tree)
    other = replace(imported, cells={**imported.cells, "mask": "0"})
    for replaces in (False, True):
        with pytest.raises(
            ImportRefused, match=rf"^{PLAIN_NAME}\.co is the file of another kernel"
        ):
            add_to_tree(other, tree, replaces=replaces)
        assert contents(tree) == before
    (tree / FORWARD / "fmha_fwd.csv").unlink()
    (tree / FILE).write_text("precious")
    with pytest.raises(ImportRefused, match=r"\.co is there already; replace it with --replace"):
        add_to_tree(imported, tree)
    assert contents(tree) == {FILE: b"precious"}
    add_to_tree(imported, tree, replaces=True)
    assert contents(tree) == before


def test_a_row_that_another_variant_has_stays(tmp_path, imported):
    tree = tmp_path / "tree"
    add_to_tree(replace(imported, facts=replace(imported.facts, variants=("MI300", "MI308"))), tree)
    before = contents(tree)
    names = {"knl_name": decorated("other"), "co_name": "other.co"}
    with pytest.raises(ImportRefused, match=r"MI300/\S+ has the row .*: give --variant MI300 as"):
        add_to_tree(replace(imported, cells={**imported.cells, **names}), tree, replaces=True)
    assert contents(tree) == before


def test_who_adds_to_a_tree_waits_for_others(tmp_path, imported):
    """Each writes the rows that it has read: at once, one of two new ones would be lost."""
    tree = tmp_path / "tree"
    (tree / FORWARD).mkdir(parents=True)
    other = threading.Thread(target=add_to_tree, args=(imported, tree))
    with import_kernel._turn(tree / FORWARD):
        other.start()
        other.join(timeout=1)
        assert not contents(tree)
    other.join()
    assert contents(tree).keys() == {FILE, FORWARD / "fmha_fwd.csv"}


def test_a_folder_that_is_a_link_out_of_the_tree(tmp_path, imported):
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "tree" / FORWARD
    folder.mkdir(parents=True)
    (folder / "MI308").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ImportRefused, match=r"a kernel has no place in \S+MI308: .*elsewhere"):
        add_to_tree(imported, tmp_path / "tree")
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    "text",
    [
        '\t.incbin "/etc/passwd"',
        '.INCLUDE "other.s"',
        'label: ".incbin" "x"',
        '/**/.IncBin "x"',
        '.macro file name\n.incbin "\\name"\n.endm',
        '.macro file kind\n.inc\\kind "x"\n.endm\nfile bin',
        '.MACRO file a, b\n\\a\\b "x"\n.endm\nfile .inc, bin',
        '.macro file a, b\ns_nop \\a\\b "x"\n.endm\nfile ": .inc", bin',
        '.macro file a\nlabel: \\a\\()bin "x"\n.endm\nfile .inc',
        ".macro file a\n\\a: s_nop 0\n.endm\nfile x",
        '.irp a, .inc\n/* */ \\a\\()bin "x"\n.endr',
        '.irpc a, n\n.i\\a\\()cbin "x"\n.endr',
        ".altmacro",
    ],
)
def test_a_listing_is_one_file(text):
    with pytest.raises(ListingError, match=r"line \d+ (has \.|puts a name together by a macro)"):
        refuse_files(text)


def test_macros_with_whole_names_are_taken():
    load = "buffer_load_dword v\\to, v\\from, s[0:3], 0 offen offset:\\n"
    loop = f"loop_\\@:\n  {load}\n  s_cbranch_scc1 loop_\\@"
    refuse_files(f'.ascii "\\.incb\\n"\n.macro load to, from, n\n{loop}\n.endm\n')


def test_the_assembler_has_limits():
    """Else 400 MB were written, for a listing of one line."""
    with pytest.raises(DeviceCompileError, match="it was ended: an assembler has 60 seconds of"):
        assemble(".text\n.fill 100000000, 4, 1\n", "gfx942", is_limited=True)


@pytest.mark.parametrize("action", ["show", "disasm", "import"])
def test_pipes_and_devices_are_not_read(hsa, tmp_path, action):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        ended = hsa(action, path, *(FLAGS if action == "import" else ()))
        assert_refused(ended, "not a regular file")


def test_every_place_of_a_name_is_found():
    """``{}`` stands for the name; where it is spelled out it means something else."""
    form = """\
	.globl	{}
	.section	.text.{},"axG",@progbits
	.type	{},@function
{}:                              ; @size
	s_getpc_b64 s[0:1]
	s_add_u32 s0, s0, {}@rel32@lo+4
	s_add_u32 s1, s1, size_of_tile
	size s0
	.size	{}, .Lend-{}
	.set {}.num_vgpr, 82
	.amdhsa_kernel "{}"
	.amdgpu_metadata
  - .name:           {}
    .symbol:         '{}.kd'
    .size:           656
    .value_kind:     size
	.end_amdgpu_metadata
"{}.kd":
"""
    listing = form.replace("{}", "size")
    assert kernels_of(listing) == ("size",)
    assert renamed(listing, "size", decorated("size")) == form.replace("{}", "_ZN5aiter4sizeE")


@pytest.mark.parametrize("name", ["v12", "a", "s0", "vcc", "exec_lo", "m0", "off"])
def test_a_name_that_reads_as_an_operand_is_refused(name):
    with pytest.raises(ListingError, match=f"{name!r} has the name of an operand"):
        renamed(f"{name}:\n", name, "other")


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(ListingError, match="line 2 has the symbol other already"):
        renamed("mine:\nother:\n", "mine", "other")


def test_what_is_disassembled_assembles_to_the_same(hsa, tmp_path):
    path = tmp_path / "kernel.co"
    path.write_bytes(KERNEL.code_object("gfx942"))
    instructions = without_padding(
        list(disassemble(Elf(path.read_bytes()), KERNEL.symbol, "gfx942"))
    )
    assert instructions[-1].text == "s_endpgm"
    offsets = {each.offset for each in instructions}
    branches = [each for each in instructions if "branch" in each.text]
    assert branches
    assert all(each.target in offsets for each in branches)
    different = list({each.text: each for each in instructions}.values())
    words = assemble_words([each.text for each in different], "gfx942")
    assert words == [each.words for each in different]
    printed = hsa("disasm", path).out
    assert all(f"L{each.target:x}:" in printed for each in branches)
    assert hsa("disasm", path, "--json").json[-1]["text"] == "s_endpgm"


@pytest.mark.parametrize("last", ["s_branch -3", "s_setpc_b64 s[30:31]", "s_endpgm"])
def test_a_loop_behind_the_first_end_is_no_padding(last):
    texts = ["s_cbranch_scc1 1", "s_endpgm", "v_mov_b32 v0, v1", last, "s_nop 0", "s_nop 0"]
    decoded = [DecodedInstruction(4 * i, (0,), text, None) for i, text in enumerate(texts)]
    assert [each.text for each in without_padding(decoded)] == texts[:4]


@pytest.mark.parametrize(
    ("action", "content", "complaint"),
    [
        ("show", None, "there is no file"),
        ("disasm", b"text", "is not a code object"),
        ("show", b"\x7fELF\x02\x01" + bytes(100), "is for ELF machine 0"),
    ],
)
def test_what_is_no_code_object_is_refused(hsa, tmp_path, action, content, complaint):
    path = tmp_path / "kernel.co"
    if content is not None:
        path.write_bytes(content)
    assert_refused(hsa(action, path), complaint)


def test_verify_names_each_problem(hsa, tmp_path):
    good = PlainKernel(mask=2, mode=1)
    path = write_tree(tmp_path, "gfx950", [good])
    folder, image = path.parent, good.code_object("gfx950")
    rows: list[dict[str, object]] = []

    def row(file: str, content: bytes | None, **cells: object) -> None:
        rows.append({**good.row, "co_name": file, **cells})
        if content is not None:
            (folder / file).write_bytes(content)

    row("missing.co", None, mask=0)
    row("other_arch.co", KERNEL.code_object("gfx942"), mask=0, mode=0)
    row("damaged.co", image[:1000], mask=2, mode=0)
    row("length.co", image, hdim_q=64, knl_name=good.symbol.replace("aiter", "aiter1"))
    row("dtype.co", image, dtype="bf15")
    row("twice.co", image)
    (folder / "unlisted.co").write_bytes(image)
    with path.open("a", newline="") as file:
        file.writelines(",".join(str(row[name]) for name in COLUMNS) + "\n" for row in rows)
    ended = hsa("verify", tmp_path, "--json")
    assert ended.code == 1
    check = ended.json[str(tmp_path)]
    expected = {
        3: ["there is no file", "missing.co"],
        4: ["other_arch.co is for gfx942", "expected gfx950"],
        5: ["damaged.co is damaged"],
        6: ["has no kernel _ZN5aiter1"],
        7: ["dtype 'bf15' is not known"],
        8: ["it serves the same as line 2"],
    }
    for line, parts in expected.items():
        said = "; ".join(each for each in check["problems"] if f"line {line}" in each)
        assert all(part in said for part in parts), (line, said)
    assert not any("csv, line 2" in each for each in check["problems"])
    counted, *unnamed = check["remarks"]
    assert "line 6: symbol _ZN5aiter1" in counted
    assert "letters, and" in counted
    files = "dtype.co", "twice.co", "unlisted.co"
    assert unnamed == [f"{folder / name}: no usable row names it" for name in files]
    assert "problem: " in hsa("verify", tmp_path).out
    assert hsa("verify", tmp_path / "nothing").code == 2


def test_backward_kernels_of_this_package_are_listed_and_verified(hsa, tmp_path, monkeypatch):
    for variable in (HSA_DIR, AITER_ASM_DIR):
        monkeypatch.delenv(variable, raising=False)
    listed = {x["symbol"] for x in hsa("list", "--json").json if x["pass"] == "backward"}
    trees = [trees_of(chip(architecture(arch).unlisted_chip))[-1] for arch in get_args(Arch)]
    assert listed == {row.symbol for tree in trees for row in tree.ready_backward.rows}
    # In a copy one file has another's content, and one is named by no row.
    tree = trees[-1]
    folder = READY_BACKWARD_MANIFEST.parent
    copied = tmp_path / tree.arch / folder
    shutil.copytree(tree.folder / folder, copied)
    assert hsa("verify", tmp_path).code == 0
    # More than the arguments of a kernel take, and less than its LDS.
    with monkeypatch.context() as on_a_small_chip:
        small = architecture(tree.arch)._replace(lds_bytes=1000)
        on_a_small_chip.setattr(tree_check, "architecture", {tree.arch: small}.__getitem__)
        problems = hsa("verify", tmp_path, "--json").json[str(tmp_path)]["problems"]
    assert any(f"bytes of LDS; {tree.arch} has 1000" in problem for problem in problems)
    first, second, *_ = tree.ready_backward.rows
    shutil.copy(copied / second.file, copied / first.file)
    shutil.copy(copied / second.file, copied / "unlisted.co")
    check = hsa("verify", tmp_path, "--json").json[str(tmp_path)]
    (problem,) = check["problems"]
    assert first.file in problem
    assert check["remarks"] == [f"{copied / 'unlisted.co'}: no usable row names it"]


@pytest.mark.parametrize(("action", "code"), [("list", 2), ("verify", 1)])
def test_a_damaged_backward_manifest_is_named(action, code, hsa, tmp_path):
    path = tmp_path / "gfx950" / "fmha_bwd" / "fmha_bwd.csv"
    path.parent.mkdir(parents=True)
    path.write_text("dtype\nbf16\n")
    ended = hsa(action, tmp_path)
    assert f"{path} cannot be read: it has no column hdim_q, hdim_v" in ended.out + ended.err
    assert ended.code == code


def test_a_folder_without_manifests_is_not_listed(hsa, tmp_path):
    assert_refused(hsa("list", tmp_path), f"{tmp_path} has no manifest")


def test_wait_states_that_a_path_lacks_are_named(hsa, listing, tmp_path):
    clean, faulty, other = (tmp_path / name for name in ("clean.co", "faulty.co", "other.co"))
    text = listing.read_text()
    clean.write_bytes(assemble(text, "gfx942"))
    (kernel,) = re.findall(r"^\s*\.amdhsa_kernel (\S+)", text, re.MULTILINE)
    early = "v_mfma_f32_32x32x8_f16 v[8:23], v[2:3], v[4:5], 0\nv_mov_b32 v0, v8"
    faulty.write_bytes(
        assemble(text.replace(f"\n{kernel}:", f"\n{kernel}:\n{early}\n; "), "gfx942")
    )
    other.write_bytes(b"other")
    ended = hsa("waits", clean)
    assert (ended.code, ended.out) == (0, "1 code objects, none of which lack wait states\n")
    ended = hsa("waits", clean, faulty)
    assert ended.code == 1
    assert f"{faulty}: {kernel}+0x8: `v_mov_b32_e32 v0, v8`: v8: needs 11 wait" in ended.out
    assert "2 code objects, 1 of which lack wait states" in ended.out
    (place,) = hsa("waits", faulty, "--json").json[str(faulty)]
    assert (place["kernel"], place["number"], place["missing"]) == (kernel, 1, 11)
    assert_refused(hsa("waits", other), f"{other} is not a code object")


def test_kernels_in_the_cache_are_looked_at(hsa, monkeypatch, tmp_path):
    monkeypatch.setattr("jitfmha.jit.cache_entries", list)
    assert hsa("waits").out == "0 code objects, none of which lack wait states\n"
