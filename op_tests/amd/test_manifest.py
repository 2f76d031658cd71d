"""Manifests and what can be odd in them: told by name, warned of once, and never contagious."""

import os
import re
import time
import warnings
from pathlib import Path
from typing import get_args

import pytest
import torch
from plain_tree import COLUMNS, PlainKernel, write_manifest, write_tree
from rigs.modelled_call import take_only
from untyped import explain, explain_bwd, fmha_fwd

from jitfmha import emulate
from jitfmha.amd.chips import Arch, architecture, chip
from jitfmha.amd.kernel_arguments import (
    ARGUMENTS_OF,
    JITFMHA_ARGUMENTS,
    READY_BACKWARD_ARGUMENTS,
    Abi,
)
from jitfmha.amd.manifest import FORWARD_MANIFEST, READY_BACKWARD_COLUMNS
from jitfmha.amd.tree import AITER_ASM_DIR, HSA_DIR, Tree, trees_of
from jitfmha.amd.tree_check import check_tree
from jitfmha.jit.shared_struct import INT64, SharedStruct

GOOD = PlainKernel()
OTHER = PlainKernel(mode=1)
SHA = "0" * 64


def read(root: Path, chip_name: str = "MI300X") -> Tree:
    found = chip(chip_name)
    return Tree("the tree of the test", root / found.architecture.name, found)


def files_of(folder: Path, *kernels: PlainKernel) -> None:
    """Empty files, for what only reads the manifest."""
    for place in (folder, folder / "MI300", folder / "MI308"):
        for kernel in kernels:
            place.mkdir(parents=True, exist_ok=True)
            (place / kernel.file).touch()


def odd(root: Path, rows: list[dict[str, object]], columns: tuple[str, ...] = COLUMNS) -> Tree:
    """A tree with these rows and one good one behind them."""
    folder = root / "gfx942" / "fmha_v3_fwd"
    write_manifest(folder, [*rows, OTHER.row], columns=columns)
    files_of(folder, GOOD, OTHER)
    return read(root)


def test_rows(tmp_path):
    tree = odd(tmp_path, [GOOD.row])
    assert tree.forward.oddities == ()
    row = tree.forward.rows[0]
    assert (row.dtype, row.hdim_q, row.hdim_v, row.mask, row.mode) == ("bf16", 128, 128, 0, 0)
    assert (row.bf16_cvt, row.ts_qo, row.ts_kv) == (0, 64, 32)
    assert (row.symbol, row.name) == (GOOD.symbol, GOOD.name)
    assert (row.file, row.sha256) == (f"MI300/{GOOD.file}", None)
    assert (row.abi, row.threads, row.combine_symbol) == ("aiter", 512, None)
    assert read(tmp_path, "MI308X").forward.rows[0].file == f"MI308/{GOOD.file}"
    assert read(tmp_path, "MI300A").forward.rows == tree.forward.rows


def test_columns_are_found_by_name(tmp_path):
    """In any order, with unknown ones between, quotes, spaces and a byte order mark."""
    columns = ("compiler", *reversed(COLUMNS), "what_else")
    tree = odd(tmp_path, [GOOD.row | {"compiler": "clang, 22", "what_else": 3}], columns)
    assert [row.symbol for row in tree.forward.rows] == [GOOD.symbol, OTHER.symbol]
    path = tree.folder / FORWARD_MANIFEST
    text = path.read_text().replace('"clang, 22"', "clang").replace(",", " , ")
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n\r\n").encode())
    assert [row.symbol for row in read(tmp_path).forward.rows] == [GOOD.symbol, OTHER.symbol]


def test_the_hash_column(tmp_path):
    rows = [GOOD.row | {"sha256": SHA.upper()}, PlainKernel(mask=2).row | {"sha256": ""}]
    files_of(tmp_path / "gfx942" / "fmha_v3_fwd", PlainKernel(mask=2))
    tree = odd(tmp_path, rows, (*COLUMNS, "sha256"))
    assert tree.forward.oddities == ()
    assert [row.sha256 for row in tree.forward.rows] == [SHA, None, None]


@pytest.mark.parametrize(
    ("chip_name", "kernel", "threads", "grid"),
    [
        ("MI300X", PlainKernel(), 512, "tiles_heads_batches"),
        ("MI300X", PlainKernel(mask=1), 512, "tile_pairs_heads_batches"),
        ("MI355X", PlainKernel(mask=2), 512, "tile_pairs_heads_batches"),
        ("MI308X", PlainKernel(mode=1), 512, "heads_batches_tiles"),
        ("MI355X", PlainKernel(mask=2, mode=1), 512, "heads_batches_tile_pairs"),
        ("MI300X", PlainKernel(hdim_q=192), 256, "heads_tiles_batches"),
        ("MI308X", PlainKernel(hdim_q=192, mask=2), 256, "heads_tiles_batches"),
        ("MI300X", PlainKernel(hdim_q=192, mask=2, mode=1), 256, "heads_batches_tiles"),
        ("MI355X", PlainKernel(hdim_q=192), 256, "tiles_heads_batches"),
        ("MI355X", PlainKernel(hdim_q=192, mask=2), 256, "tile_pairs_heads_batches"),
        ("MI355X", PlainKernel(hdim_q=192, mask=2, mode=1), 256, "heads_batches_tile_pairs"),
    ],
)
def test_the_interface_of_plain_rows(tmp_path, chip_name, kernel, threads, grid):
    """What the production kernels' interface says, which their manifests do not repeat."""
    folder = tmp_path / chip(chip_name).architecture.name / "fmha_v3_fwd"
    write_manifest(folder, [kernel.row])
    files_of(folder, kernel)
    (row,) = read(tmp_path, chip_name).forward.rows
    assert (row.abi, row.threads, row.grid) == ("aiter", threads, grid)


INTERFACE = ("abi", "threads", "grid", "combine_name", "layout")
OURS = {
    "abi": "jitfmha",
    "threads": 128,
    "grid": "xcd_heads_tiles_splits",
    "layout": JITFMHA_ARGUMENTS.layout,
}


def test_the_interface_columns(tmp_path):
    """Our code objects lie beside the manifest, and may differ in their tiles alone."""
    rows = [
        GOOD.row | OURS | {"combine_name": "merge"},
        GOOD.row | OURS | {"ts_qo": 128},
        PlainKernel(mask=2).row | {"threads": 256, "grid": "tiles_heads_batches"},
    ]
    files_of(tmp_path / "gfx942" / "fmha_v3_fwd", PlainKernel(mask=2))
    tree = odd(tmp_path, rows, (*COLUMNS, *INTERFACE))
    assert tree.forward.oddities == ()
    first, second, foreign, _ = tree.forward.rows
    assert (first.abi, first.threads, first.grid) == ("jitfmha", 128, "xcd_heads_tiles_splits")
    assert (first.file, first.combine_symbol) == (GOOD.file, "merge")
    assert (second.ts_qo, second.combine_symbol) == (128, None)
    assert (foreign.abi, foreign.threads, foreign.grid) == ("aiter", 256, "tiles_heads_batches")
    assert foreign.file.startswith("MI300/")


ODD_ROWS: list[tuple[dict[str, object], list[str]]] = [
    ({"dtype": "int8"}, ["dtype 'int8'", "bf16, fp16, fp8bf16"]),
    ({"hdim_q": "wide"}, ["hdim_q 'wide' is not a number"]),
    ({"hdim_v": 0}, ["hdim_v '0' is not between 1"]),
    ({"hdim_v": 1 << 20}, ["hdim_v '1048576' is not between"]),
    ({"mask": 3}, ["mask '3' is not known; 0, 1, 2 are"]),
    ({"mask": -1}, ["mask '-1' is not a number"]),
    ({"mode": 2}, ["mode '2' is not known"]),
    ({"bf16_cvt": 3}, ["bf16_cvt '3' is not known"]),
    ({"ts_qo": "2_56"}, ["ts_qo '2_56' is not a number"]),
    ({"ts_kv": ""}, ["ts_kv '' is not a number"]),
    ({"ts_qo": "٢"}, ["ts_qo '٢' is not a number"]),
    ({"knl_name": 'x"); system("'}, ["knl_name", "is not a symbol"]),
    ({"knl_name": ""}, ["knl_name '' is not a symbol"]),
    ({"co_name": "../../evil.co"}, ["co_name '../../evil.co' is not a file name"]),
    ({"co_name": "/etc/passwd"}, ["co_name '/etc/passwd' is not a file name"]),
    ({"co_name": "missing.co"}, ["there is no file", "MI300/missing.co"]),
    ({"abi": "cuda"}, ["abi 'cuda' is not known; aiter, jitfmha are"]),
    ({"abi": "jitfmha"}, ["abi 'jitfmha' needs threads and a grid; they are '' and ''"]),
    ({"abi": "jitfmha", "threads": 64}, ["needs threads and a grid; they are '64' and ''"]),
    ({"threads": 100}, ["threads '100' is not a multiple of 64 up to 1024"]),
    ({"threads": 2048}, ["threads '2048' is not a multiple of 64"]),
    ({"grid": "round"}, ["grid 'round' is not known for abi aiter and mode 0; tiles_heads_ba"]),
    ({"grid": "heads_batches_tiles"}, ["is not known for abi aiter and mode 0"]),
    (OURS | {"grid": "heads_batches_tiles_splits"}, ["and mode 0; xcd_heads_tiles_splits are"]),
    (OURS | {"layout": ""}, ["it was built for another layout of Arguments: '', where"]),
    (OURS | {"layout": "a" * 5000}, ["of Arguments: 'aaa", JITFMHA_ARGUMENTS.layout]),
    ({"combine_name": "a b"}, ["combine_name 'a b' is not a symbol"]),
    ({"sha256": "abc"}, ["sha256 'abc' is not 32 to 64 hexadecimal digits"]),
    ({"ts_qo": "9" * 5000}, [f"ts_qo '{'9' * 100}...' is not a number of up to 18 digits"]),
    ({"threads": "1" * 5000}, [f"threads '{'1' * 100}...' is not a number of up to 18 digits"]),
    ({"dtype": "x" * 5000}, [f"dtype '{'x' * 100}...' is not known"]),
    ({"grid": "x" * 5000}, [f"grid '{'x' * 100}...' is not known"]),
    ({"abi": "x" * 5000}, [f"abi '{'x' * 100}...' is not known"]),
    ({"co_name": "a" * 300}, ["there is no file", f"MI300/{'a' * 300}"]),
    ({"co_name": "a/b.co"}, ["co_name 'a/b.co' is not a file name"]),
    ({"co_name": "a/" * 3000 + "b.co"}, [f"co_name '{'a/' * 50}...' is not a file name"]),
    ({"knl_name": "\x1b[2J"}, [r"knl_name '\x1b[2J' is not a symbol"]),
]


@pytest.mark.parametrize(("changes", "words"), ODD_ROWS)
def test_odd_rows(tmp_path, changes, words):
    tree = odd(tmp_path, [GOOD.row | changes], (*COLUMNS, *INTERFACE, "sha256"))
    assert [row.symbol for row in tree.forward.rows] == [OTHER.symbol]
    (oddity,) = tree.forward.oddities
    for word in ("the tree of the test", "fmha_fwd.csv, line 2 is left out", *words):
        assert word in oddity


def test_duplicate_rows(tmp_path):
    tree = odd(tmp_path, [GOOD.row, GOOD.row | {"ts_qo": 128}])
    assert [row.ts_qo for row in tree.forward.rows] == [64, 64]
    (oddity,) = tree.forward.oddities
    assert "line 3 is left out: it serves the same as line 2" in oddity


def test_short_rows(tmp_path):
    tree = odd(tmp_path, [])
    path = tree.folder / FORWARD_MANIFEST
    path.write_text(path.read_text() + "bf16,128,128\n\n  \n")
    tree = read(tmp_path)
    assert len(tree.forward.rows) == 1
    assert "line 3 is left out: it has no mask, mode" in tree.forward.oddities[0]
    assert len(tree.forward.oddities) == 1


def _missing(path: Path) -> None:
    path.unlink()


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


ODD_MANIFESTS = {
    "missing": (_missing, "No such file"),
    "folder": (_folder, "Is a directory"),
    "empty": (lambda path: path.write_text(""), "it has no column dtype, hdim_q"),
    "binary": (lambda path: path.write_bytes(b"\x7fELF\xff\xfe\0"), "decode"),
    "quotes": (lambda path: path.write_text('dtype,"hdim\n'), "unexpected end of data"),
    "columns": (
        lambda path: path.write_text(",".join(COLUMNS).replace("ts_qo,", "") + "\n"),
        "it has no column ts_qo",
    ),
    "twice": (lambda path: path.write_text(",".join([*COLUMNS, "mask"]) + "\n"), "mask more than"),
    "terminal": (
        lambda path: path.write_text(",".join([*COLUMNS, "\x1b[2J", "\x1b[2J"]) + "\n"),
        r"the column \x1b[2J more than once",
    ),
}


@pytest.mark.parametrize("how", list(ODD_MANIFESTS))
def test_unreadable_manifests(tmp_path, how):
    spoil, words = ODD_MANIFESTS[how]
    spoil(odd(tmp_path, []).folder / FORWARD_MANIFEST)  # type: ignore[operator]
    tree = read(tmp_path)
    assert tree.forward.rows == ()
    (oddity,) = tree.forward.oddities
    assert "the tree of the test: the manifest" in oddity
    assert words in oddity


def test_very_many_columns(tmp_path):
    """Whether one is there twice was asked of each of them, and took minutes."""
    columns = (*COLUMNS, *(f"c{i}" for i in range(50_000)))
    start = time.process_time()
    tree = odd(tmp_path, [GOOD.row], columns)
    assert [row.symbol for row in tree.forward.rows] == [GOOD.symbol, OTHER.symbol]
    assert time.process_time() - start < 5.0


def test_a_manifest_is_read_when_it_is_asked_for(tmp_path):
    """A call forward has no time for the manifests of backward kernels."""
    write_tree(tmp_path, "gfx942", [GOOD])
    for name in ("fmha_v3_bwd/fmha_bwd_dqdkdv.csv", "fmha_bwd/fmha_bwd.csv"):
        path = tmp_path / "gfx942" / name
        path.parent.mkdir()
        path.write_text("nothing\n")
    tree = read(tmp_path)
    assert [row.symbol for row in tree.forward.rows] == [GOOD.symbol]
    assert tree.forward.oddities == ()
    assert not {"aiter_backward", "ready_backward"} & vars(tree).keys()
    missing, odd_one = tree.aiter_backward.oddities
    assert "fmha_bwd_odo.csv cannot be read: No such file" in missing
    assert "fmha_bwd_dqdkdv.csv cannot be read: it has no column dtype" in odd_one
    assert "fmha_bwd.csv cannot be read: it has no column dtype" in tree.ready_backward.oddities[0]


def ready_rows(folder: Path) -> list[dict[str, object]]:
    """Two good rows of our backward manifest, with their files."""
    folder.mkdir(parents=True)
    values = ("bf16", 64, 64, 0, 0, 0, 0, 128, 64, "main", "a.co", 512, 256, SHA)
    (folder / "a.co").touch()
    row: dict[str, object] = dict(zip(READY_BACKWARD_COLUMNS, values, strict=True))
    row["layout"] = READY_BACKWARD_ARGUMENTS.layout
    return [row, row | {"masked": 1}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "fp8bf16"}, "dtype 'fp8bf16' is not known; bf16, fp16 are"),
        ({"masked": "yes"}, "masked 'yes' is not a number"),
        ({"mode": 2}, "mode '2' is not known; 0, 1 are"),
        ({"bf16_cvt": 3}, "bf16_cvt '3' is not known"),
        ({"keys": 0}, "keys '0' is not between 1 and 65535"),
        ({"knl_name": "a b"}, "knl_name 'a b' is not a symbol"),
        ({"edge_threads": 100}, "edge_threads '100' is not a multiple of 64 up to 1024"),
        ({"sha256": ""}, "it has no sha256"),
        ({"sha256": "12"}, "sha256 '12' is not 32 to 64 hexadecimal digits"),
        ({"layout": ""}, "it was built for another layout of ReadyBackwardArguments: '', where"),
        ({"layout": JITFMHA_ARGUMENTS.layout}, f"{READY_BACKWARD_ARGUMENTS.layout!r}; rebuild it"),
        ({"co_name": "../a.co"}, "co_name '../a.co' is not a file name"),
        ({"co_name": "/dev/zero"}, "co_name '/dev/zero' is not a file name"),
        ({"co_name": "b.co"}, "there is no file"),
        ({"masked": 1}, "it serves the same as line 2"),
    ],
)
def test_odd_rows_of_ready_backward_kernels(tmp_path, changes, words):
    folder = tmp_path / "gfx942" / "fmha_bwd"
    first, second = ready_rows(folder)
    columns = *READY_BACKWARD_COLUMNS, "layout"
    write_manifest(folder, [second, first | changes], columns=columns)
    (folder / "fmha_fwd.csv").rename(folder / "fmha_bwd.csv")
    manifest = read(tmp_path).ready_backward
    assert [row.is_masked for row in manifest.rows] == [True]
    (oddity,) = manifest.oddities
    assert f"the tree of the test: {folder / 'fmha_bwd.csv'}, line 3 is left out: " in oddity
    assert words in oddity


@pytest.mark.parametrize("arch", get_args(Arch))
def test_code_objects_of_another_layout_serve_no_call(arch, monkeypatch):
    """With one field more, kernels of before would read their pointers where others lie now."""
    for variable in (HSA_DIR, AITER_ASM_DIR):
        monkeypatch.delenv(variable, raising=False)
    (tree,) = trees_of(chip(architecture(arch).unlisted_chip))
    assert tree.forward.oddities == tree.ready_backward.oddities == ()
    counts = len(tree.forward.rows), len(tree.ready_backward.rows)
    assert min(counts) > 0
    forward, backward = (
        SharedStruct(struct.name, {**struct.fields, "one_more": INT64})
        for struct in (JITFMHA_ARGUMENTS, READY_BACKWARD_ARGUMENTS)
    )
    of_abi: dict[Abi, SharedStruct] = {**ARGUMENTS_OF, "jitfmha": forward}
    monkeypatch.setattr("jitfmha.amd.manifest.ARGUMENTS_OF", of_abi)
    monkeypatch.setattr("jitfmha.amd.manifest.READY_BACKWARD_ARGUMENTS", backward)
    (tree,) = trees_of(chip(architecture(arch).unlisted_chip))
    manifests = tree.forward, tree.ready_backward
    assert [manifest.rows for manifest in manifests] == [(), ()]
    assert tuple(len(manifest.left_out) for manifest in manifests) == counts
    for manifest, struct in zip(manifests, (forward, backward), strict=True):
        (oddity,) = manifest.oddities
        assert f"line 2 (and {len(manifest.left_out) - 1} more) is left out: it was" in oddity
        assert f"for another layout of {struct.name}: " in oddity
        assert f"{struct.layout!r}; rebuild it with hsa/build.py, or reinstall" in oddity
    check = check_tree(tree.folder)
    assert (check.files, len(check.problems)) == (0, sum(counts))
    x = torch.zeros(1, 64, 2, 128, dtype=torch.bfloat16)
    with emulate(arch), pytest.warns(RuntimeWarning, match="for another layout of") as warned:
        plans = explain(x, x, x), explain_bwd(x, x, x, x, x, torch.zeros(1, 2, 64))
    assert len(warned) == 2
    for plan in plans:
        assert plan.plan.family == "compiled"
        assert re.search(r"not ready: .* was built for another layout of", str(plan))


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_a_link_out_of_the_folder(tmp_path, linked):
    """What a manifest names stays inside of its folder; links inside of it are followed."""
    tree = odd(tmp_path / "tree", [GOOD.row])
    path = tree.path_of(tree.forward.rows[0])
    outside = path if linked == "file" else path.parent
    outside.rename(outside.parent / "moved")
    outside.symlink_to("moved")
    assert read(tmp_path / "tree").forward.oddities == ()
    (outside.parent / "moved").rename(tmp_path / "elsewhere")
    outside.unlink()
    outside.symlink_to(tmp_path / "elsewhere")
    tree = read(tmp_path / "tree")
    oddity = tree.forward.oddities[0]
    assert f"fmha_fwd.csv, line 2 is left out: 'MI300/{GOOD.file}' leads to" in oddity
    assert "elsewhere" in oddity


def test_pipes_are_not_waited_for(tmp_path):
    tree = odd(tmp_path, [GOOD.row])
    path = tree.path_of(tree.forward.rows[0])
    path.unlink()
    os.mkfifo(path)
    assert "there is no file" in read(tmp_path).forward.oddities[0]
    with pytest.warns(RuntimeWarning, match="is not a regular file"):
        found = tree.code_object(tree.forward.rows[0])
    assert str(found) == f"{path} cannot be read: it is not a regular file"
    manifest = tree.folder / FORWARD_MANIFEST
    manifest.unlink()
    os.mkfifo(manifest)
    assert "cannot be read: it is not a regular file" in read(tmp_path).forward.oddities[0]


# ---- Which trees there are -----------------------------------------------------------------------


def origins(chip_name: str = "MI300X") -> list[str]:
    return [f"{tree.origin} {len(tree.forward.rows)}" for tree in trees_of(chip(chip_name))]


def test_the_environment_names_a_root(tmp_path, use_tree):
    write_tree(tmp_path, "gfx942", [GOOD, OTHER])
    assert origins() == []
    use_tree(tmp_path)
    assert origins() == [f"JITFMHA_HSA_DIR={tmp_path} 2"]
    # A tree without a folder for the chip's architecture has nothing to say about it.
    assert origins("MI355X") == []


@pytest.mark.parametrize("variable", [HSA_DIR, AITER_ASM_DIR])
def test_the_environment_names_a_folder_of_an_architecture(tmp_path, use_tree, variable):
    write_tree(tmp_path, "gfx942", [GOOD])
    use_tree(tmp_path / "gfx942", variable)
    assert origins() == [f"{variable}={tmp_path / 'gfx942'} 1"]
    assert origins("MI355X") == []
    renamed = tmp_path / "asm"
    (tmp_path / "gfx942").rename(renamed)
    use_tree(renamed, variable)
    assert origins() == [f"{variable}={renamed} 1"]


@pytest.mark.parametrize("variable", [HSA_DIR, AITER_ASM_DIR])
def test_a_folder_that_is_not_there(tmp_path, use_tree, variable):
    use_tree(tmp_path / "nowhere", variable)
    (tree,) = trees_of(chip("MI300X"))
    with pytest.warns(RuntimeWarning, match=rf"{variable}=\S+nowhere: the manifest \S+ cannot be"):
        tree.warn_of(tree.forward)
    assert tree.forward.rows == ()


def test_shipped_kernels_come_last(tmp_path, use_tree, monkeypatch):
    for name, kernels in (("shipped", [GOOD, OTHER]), ("theirs", [GOOD])):
        write_tree(tmp_path / name, "gfx942", kernels)
    use_tree(tmp_path / "theirs")
    monkeypatch.setattr("jitfmha.amd.tree.hsa_dir", lambda: tmp_path / "shipped")
    trees = [str(tree) for tree in trees_of(chip("MI300X"))]
    assert trees == [f"JITFMHA_HSA_DIR={tmp_path / 'theirs'}", "the kernels of this package"]


# ---- An odd tree in use --------------------------------------------------------------------------


def qkv() -> list[torch.Tensor]:
    return [torch.zeros(1, 70, 2, 128, dtype=torch.bfloat16) for _ in range(3)]


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000])
def test_a_tree_whose_name_no_file_can_have(name, use_tree):
    use_tree(Path("/", name))
    (tree,) = trees_of(chip("MI300X"))
    assert tree.forward.rows == ()
    (oddity,) = tree.forward.oddities
    assert oddity.endswith("cannot be read: File name too long")


def test_oddities_are_warned_of_once_and_explained(tmp_path, use_tree):
    write_tree(tmp_path, "gfx942", [GOOD, OTHER])
    write_manifest(
        tmp_path / "gfx942" / "fmha_v3_fwd",
        [GOOD.row, PlainKernel(mask=2).row, GOOD.row | {"mask": 7}],
    )
    use_tree(tmp_path)
    with emulate("gfx942"):
        take_only("named")
        with pytest.warns(RuntimeWarning) as warned:
            plan = explain(*qkv())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            explain(*qkv())
            fmha_fwd(*qkv())
    assert plan.plan.kernel == GOOD.name
    assert len(warned) == len(plan.remarks) == 2
    for text in (str(plan), *("\n".join(str(w.message) for w in warned),)):
        assert "there is no file" in text
        assert PlainKernel(mask=2).file in text
        assert "mask '7' is not known" in text
    assert str(plan).count("note     ") == 2
    assert plan.to_dict()["remarks"] == list(plan.remarks)


def test_a_bad_code_object_leaves_the_next_tree(tmp_path, use_tree):
    """Damaged, or for another architecture: the kernel of the next tree serves, and both say so."""
    for name in ("first", "second"):
        write_tree(tmp_path / name, "gfx942", [GOOD, OTHER])
    bad = tmp_path / "first" / "gfx942" / "fmha_v3_fwd" / "MI300" / GOOD.file
    bad.write_bytes(GOOD.code_object("gfx950"))
    use_tree(tmp_path / "second", AITER_ASM_DIR)
    use_tree(tmp_path / "first")
    with emulate("gfx942"):
        take_only("named")
        with pytest.warns(RuntimeWarning, match=r"is for gfx950 .*expected gfx942"):
            plan = explain(*qkv())
        assert (fmha_fwd(*qkv()) == 0).all()
    assert "second" in plan.plan.source
    (remark,) = plan.remarks
    assert f"JITFMHA_HSA_DIR={tmp_path / 'first'}: {bad} is for gfx950" in remark


def test_a_bad_code_object_without_another_is_the_reason(tmp_path, use_tree):
    write_tree(tmp_path, "gfx942", [GOOD, OTHER])
    bad = tmp_path / "gfx942" / "fmha_v3_fwd" / "MI300" / GOOD.file
    bad.write_bytes(bad.read_bytes()[:1000])
    use_tree(tmp_path)
    with emulate("gfx942"):
        with pytest.warns(RuntimeWarning, match="is damaged"):
            plan = explain(*qkv())
        assert plan.plan.family == "compiled"
        assert re.search(rf"not ready: .*{GOOD.file} is damaged", str(plan))
        assert (fmha_fwd(*qkv()) == 0).all()
        x = [y[0] for y in qkv()]
        ends = torch.tensor([0, 70], dtype=torch.int32)
        assert (fmha_fwd(*x, cu_seqlens_q=ends, cu_seqlens_k=ends) == 0).all()
