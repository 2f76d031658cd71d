"""`python -m jitfmha export`: the folder is complete or absent; foreign files are left alone."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jitfmha.export.append import append_passes
from jitfmha.export.folder import ForeignFilesError, publish
from jitfmha.export.kernels import (
    Selection,
    backward_passes,
    features_of,
    forward_kernels,
    forward_passes,
    ready_backward_kernels,
    selection_of,
    selection_of_set,
)

SMALL = ("export", "--arch", "gfx942", "--direction", "forward", "--hdim", "64", "--dtype", "fp16")
FILES = {"a/b.h": "1", "exported.json": json.dumps({"files": ["a/b.h"]})}


def contents(folder: Path) -> dict[str, str]:
    return {
        x.relative_to(folder).as_posix(): x.read_text() for x in folder.rglob("*") if x.is_file()
    }


def test_command(tmp_path, run):
    folder = tmp_path / "new" / "library"
    said = run(*SMALL, "--json", "-o", folder).json
    files = contents(folder)
    inventory = json.loads(files.pop("exported.json"))
    assert inventory["files"] == sorted(files)
    assert [x["name"] for x in inventory["kernels"]] == said["kernels"]
    assert len(said["kernels"]) == 5
    assert all(f"{name}[]" in files["src/code_objects.h"] for name in said["kernels"])
    assert not any("@{" in text for text in files.values())
    assert os.listdir(tmp_path / "new") == ["library"]
    # In the place of an earlier one.
    assert run(*SMALL, "--mask", "none", "-o", folder).code == 0
    assert "causal" not in contents(folder)["src/code_objects.h"]
    assert os.listdir(tmp_path / "new") == ["library"]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--hdim", "600"), "must be between 1 and 576"),
        (("--features", "haste"), "features hold 'haste'; use 'lse', "),
        (("--features", "paged_keys", "--mode", "gm0"), "cu_seqlens_k"),
        (("--dtype", "int8", "--direction", "backward"), "no kernel serves what is selected"),
        (("--dtype", "bf16", "--out-dtype", "fp16"), "8 bits, and none has"),
        (("--hdim", "wide"), "wide is not a number"),
        (("--arch", "gfx90a"), "gfx90a"),
        (("--dtype", "fp64"), "fp64"),
    ],
)
def test_usage_errors(flags, complaint, tmp_path, run):
    result = run(*SMALL[:5], *flags, "-o", tmp_path / "library")
    assert result.code == 2
    assert complaint in result.err
    assert not os.listdir(tmp_path)


def test_foreign_files_are_left_alone(tmp_path, run):
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "letter.txt").write_text("dear")
    result = run(*SMALL, "-o", folder)
    assert result.code == 2
    assert "letter.txt" in result.err
    assert contents(folder) == {"letter.txt": "dear"}
    # Also beside an export, and where a file stands in the place of the folder.
    publish(tmp_path / "other", FILES)
    (tmp_path / "other" / "a" / "letter.txt").write_text("dear")
    with pytest.raises(ForeignFilesError, match=r"a/letter\.txt"):
        publish(tmp_path / "other", FILES)
    with pytest.raises(ForeignFilesError, match="is no folder"):
        publish(folder / "letter.txt", FILES)


def test_an_empty_folder_is_taken(tmp_path):
    publish(tmp_path, FILES)
    assert contents(tmp_path) == FILES


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    folder = tmp_path / "library"
    publish(folder, FILES)
    rename = os.rename

    def failing(old: Path, new: Path) -> None:
        if Path(old).name == "complete":
            raise OSError("no space left")
        rename(old, new)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="no space left"):
        publish(folder, FILES | {"a/c.h": "2"})
    assert contents(folder) == FILES
    with pytest.raises(OSError, match="no space left"):
        publish(tmp_path / "another", FILES)
    assert os.listdir(tmp_path) == ["library"]


def test_what_a_profile_has(tmp_path, run):
    """The flags take the place of its parts; plain calls that are named get compiled kernels."""
    flags = ("--arch", "gfx942", "--profile", "training", "--hdims", "64,24", "--dtype", "fp16")
    few = ("--mask", "none", "--mode", "gm0", "--features", "alibi+dropout,plain")
    said = run("export", *flags, *few, "--json", "-o", tmp_path / "library").json["kernels"]
    compiled = sorted(name for name in said if "_compiled_" in name)
    assert compiled == sorted(
        f"fmha_{way}_compiled_hd{hdims}_fp16_{words}gm0_gfx942"
        for way, hdims, words in (
            (way, f"{n}x{n}", words)
            for way in ("fwd", "bwd")
            for n in (24, 64)
            for words in ("", "alibi_dropout_")
        )
    )
    assert len(said) > len(compiled)


def test_kernels_of_few_queries():
    """Beside those that come ready, each with stacked heads or as many rows as decoding has."""
    plain = Selection(("gfx942",), ("forward",), ("fp16",), ((64, 64),), ("none",), ("gm0",))
    selection = plain._replace(few_queries=True)
    names = [x.name for x in forward_passes(selection, forward_kernels(selection))]
    words = ("stacked", "decode1", *(f"stacked_decode{n}" for n in (1, 2, 4)))
    assert names == [f"fmha_fwd_compiled_hd64x64_fp16_{word}_gm0_gfx942" for word in words]
    # Wider rows have no room for as many, and biases for none.
    wide = selection._replace(hdims=((200, 200),))
    assert sum("decode" in x.name for x in forward_passes(wide, ())) == 3
    biased = selection._replace(features=(("bias",),))
    assert not any("decode" in x.name for x in forward_passes(biased, ()))


def test_persistent_kernels():
    """Where rows may see more or less of the keys, and no results of splits are wanted."""
    plain = Selection(("gfx942",), ("forward",), ("fp16",), ((64, 64),))
    selection = plain._replace(persistent=True)
    passes = forward_passes(selection, forward_kernels(selection))
    assert all(x.lists_work for x in passes)
    kinds = {(x.mode, x.is_masked, x.stacks_heads) for x in passes}
    assert len(passes) == len(kinds) == 6
    assert not any(mode == "gm0" and not is_masked for mode, is_masked, _ in kinds)
    parts = selection._replace(features=(("split_results",),))
    sliced = selection._replace(hdims=((300, 280),))
    assert not any(x.lists_work for each in (parts, sliced) for x in forward_passes(each, ()))


def test_scales_of_tokens_beside_int8_probabilities_are_of_keys():
    features = (("int8_probabilities", "token_descales"),)
    selection = Selection(("gfx942",), ("forward",), ("int8",), ((64, 64),), features=features)
    passes = forward_passes(selection, ())
    assert {(x.has_token_k_descales, x.has_token_v_descales) for x in passes} == {(True, False)}


@pytest.mark.parametrize(("receipt", "has_forward"), [("flash_fwd", True), ("3", False)])
def test_receipts_say_what_is_compiled(receipt, has_forward):
    selection = selection_of(("gfx942",), receipt, {"hdims": ((96, 96),), "modes": ("gm1",)})
    forward, backward = forward_passes(selection, ()), backward_passes(selection)
    assert (bool(forward), bool(backward)) == (has_forward, not has_forward)
    for each in (*forward, *backward):
        assert (each.dtype in ("bf16", "fp16"), each.hdim_q, each.mode) == (True, 96, "gm1")
    # CK's flash-attn has slopes and no bias; its backward all that there is.
    words = {word for each in (*forward, *backward) for word in features_of(each).split("+")}
    assert {"alibi", "dropout"} <= words
    assert ("bias_bf16" in words) != has_forward


@pytest.mark.parametrize("profile", ["inference", "aiter", "fp8"])
@pytest.mark.parametrize("flags", [{"modes": ("gm0",)}, {"directions": ("backward",)}])
def test_flags_leave_out_what_has_no_such_calls(profile, flags):
    """Keys in pages, of a profile that has others, too."""
    selection = selection_of(("gfx942",), profile, {"hdims": ((128, 128),), **flags})
    passes = (*forward_passes(selection, ()), *backward_passes(selection))
    assert bool(passes) == (profile != "fp8" or "modes" in flags)
    assert not [x for x in passes if "pages" in features_of(x)]


_SIXTEEN_BITS = ("bf16", "fp16")


@pytest.mark.parametrize(
    ("profile", "chosen", "has"),
    [
        ("flash_fwd", {}, lambda way, row: way == "forward" and row.dtype in _SIXTEEN_BITS),
        ("flash_bwd", {}, lambda way, row: way == "backward"),
        ("aiter_group", {}, lambda way, row: row.mode == 1),
        ("fp8_test", {}, lambda way, row: row.dtype == "fp8bf16" and row.hdim_q in (128, 192)),
        ("fp32_all", {}, lambda way, row: False),
        (
            "inference",
            {},
            lambda way, row: (
                way == "forward" and row.dtype in _SIXTEEN_BITS and row.hdim_q in (64, 128)
            ),
        ),
        (
            "pytorch",
            {"hdims": ((64, 64),), "masks": ("causal",)},
            lambda way, row: (row.hdim_q, row.mode) == (64, 0) and row.mask > 0,
        ),
        ("training", {"features": (("dropout",),)}, lambda way, row: False),
    ],
)
def test_profiles_say_what_comes_ready(profile, chosen, has):
    def rows(selection: Selection) -> set[tuple[str, Any]]:
        forward, backward = forward_kernels(selection), ready_backward_kernels(selection)
        return {("forward", x.row) for x in forward} | {("backward", x.row) for x in backward}

    every = rows(Selection(("gfx942", "gfx950")))
    expected = {(way, row) for way, row in every if has(way, row)}
    assert len(expected) < len(every)
    assert rows(selection_of(("gfx942", "gfx950"), profile, chosen)) == expected


def test_sets_say_what_is_compiled(tmp_path):
    """What wildcards make and nothing serves is left out; what is named and not served is not."""
    path = tmp_path / "set.json"

    def selected(*entries: dict[str, Any], **others: Any) -> Selection:
        path.write_text(json.dumps({"kernels": entries}))
        return selection_of_set(path, Selection(("gfx942", "gfx950"), **others))

    fields = {"data_type": "fp16", "hdim_q": 96, "hdim_v": 96}
    backward = {"signature": fields | {"family": "bwd_dq_dk_dv"}, "arch": "gfx942"}
    forward = {"signature": fields | {"data_type": ["fp16", "bf16"], "mask": "*", "mode": "group"}}
    selection = selected(forward, backward)
    kinds = sorted({(x.arch, x.dtype, x.is_masked, x.mode) for x in forward_passes(selection, ())})
    assert kinds == [
        (arch, dtype, is_masked, "gm1")
        for arch in ("gfx942", "gfx950")
        for dtype in ("bf16", "fp16")
        for is_masked in (False, True)
    ]
    kinds = [(x.arch, x.dtype, x.hdim_q, x.mode) for x in backward_passes(selection)]
    assert kinds == [("gfx942", "fp16", 96, "gm0")]
    only_ready = {"signature": fields | {"hdim_q": 64, "hdim_v": 64}}
    assert not backward_passes(selected(only_ready | {"algorithm": {"pipeline": "ready"}}))
    appended = append_passes(selected(forward, appends=True))
    assert {x.kernel.hdims for x in appended} == {(96, 96)}
    with pytest.raises(ValueError, match=f"{path} says what is compiled; features has no place"):
        selected(forward, features=(("alibi",),))
    with pytest.raises((NotImplementedError, ValueError), match="577"):
        selected({"signature": fields | {"hdim_q": 577}})
