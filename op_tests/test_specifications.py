"""Configurations of CK's dispatcher as data: rules broken alone, words, and bad input."""

import json
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from refusals import refused
from untyped import explain, validate_config, validate_specification, warmup

import jitfmha
from jitfmha.ahead.build_ahead import plans_ahead
from jitfmha.ahead.ck_architectures import ck_architectures, hdims_of
from jitfmha.ahead.combination import (
    CALL_RULES,
    NAMED_FEATURES,
    Combination,
    check_combination,
)
from jitfmha.ahead.profile_names import PROFILE_NAMES, RECEIPT_NUMBERS
from jitfmha.ahead.profiles import PROFILES
from jitfmha.ahead.receipts import RECEIPTS, allows, receipt_named
from jitfmha.ahead.registry import ListedKernel, every_kernel, has_key
from jitfmha.ahead.specification import DATA_TYPES, combination_of, read_specification
from jitfmha.ahead.specification_rules import SPECIFICATION_RULES
from jitfmha.ahead.validate import every_rule
from jitfmha.amd.chips import Arch
from jitfmha.call.detection import planned_target
from jitfmha.call.dispatch import explain_problem, plans_for
from jitfmha.export.kernels import Selection, forward_kernels, forward_passes, selection_of_set
from jitfmha.kernels.compiled.rules import RULES
from jitfmha.kernels.compiled.tile_rules import TILE_RULES
from jitfmha.planning.specification import Signature
from jitfmha.problem.features import Feature
from jitfmha.problem.mask import CAUSAL_MASK, NO_MASK, Mask
from jitfmha.problem.problem import Problem

OURS = get_args(Arch)
THEIRS = ("gfx90a", "gfx1100", "gfx1201")
RULE_NAMES = {rule.name for rule in (*SPECIFICATION_RULES, *CALL_RULES, *RULES, *TILE_RULES)}

SIGNATURE: dict[str, Any] = {"data_type": "fp16", "hdim_q": 64, "hdim_v": 64}
# A tile of each pipeline that all rules allow, in what follows of gfx942 unless it is named.
WARP = [32, 32, 16, 32, 32, 16, 16, 16, 16]
TILE: dict[str, Any] = {
    "pipeline": "qr",
    "tile": [128, 64, 32, 64, 32, 64],
    "wave": [4, 1, 1, 4, 1, 1, 1, 1, 1],
    "warp": WARP,
}
ASYNC = TILE | {"pipeline": "qr_async"}
PREFILL = {"family": "batch_prefill", "paged_kv": True, "page_size": 16, "mode": "group"}
APPENDED = {"family": "fwd_appendkv"}
PAGED = {"family": "fwd_pagedkv", "paged_kv": True, "mode": "group"}
SPLIT = {"family": "fwd_splitkv"}
COMBINED = {"family": "fwd_splitkv_combine"}
BACKWARD = {"family": "bwd_dq_dk_dv"}
NINE = {"pipeline": "bwd", "tile": [32, 128, 64, 32, 64, 32, 32, 64, 64]}
WIDE = {"hdim_q": 256, "hdim_v": 256}
OF_128 = {"hdim_q": 128, "hdim_v": 128}


def configuration(
    signature: dict[str, Any], algorithm: dict[str, Any], arch: str = "gfx942"
) -> dict[str, Any]:
    return {"signature": SIGNATURE | signature, "algorithm": TILE | algorithm, "arch": arch}


# The rule, what breaks it alone in signature and algorithm, the architecture, what is said.
BROKEN: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("family_is_known", {"family": "fwd_magic"}, {}, "gfx942", "'fwd_magic'"),
    ("words_are_known", {"mask": "diagonal"}, {}, "gfx942", "mask 'diagonal'"),
    ("words_are_known", {"features": ["magic"]}, {}, "gfx942", "'magic'"),
    ("data_type_is_known", {"data_type": "fp4"}, {}, "gfx942", "'fp4'"),
    ("data_type_is_known", {"kv_data_type": "fp4"}, {}, "gfx942", "'fp4'"),
    ("pipeline_is_known", {}, {"pipeline": "qr_magic"}, "gfx942", "'qr_magic'"),
    ("workgroups_are_counted", {}, {"block_per_cu": 0}, "gfx942", "block_per_cu 0"),
    ("workgroups_are_counted", {}, {"num_wave_groups": 0}, "gfx942", "num_wave_groups 0"),
    ("architecture_has_kernels", {}, {"pipeline": "compiled"}, "gfx90a", "runs on gfx90a"),
    ("outputs_are_wider", {"data_type": "bf8"}, {"pipeline": "compiled"}, "gfx942", "bf8"),
    (
        "scales_are_not_of_blocks",
        {"data_type": "fp8bf16", "qscale": "blockscale"},
        {"pipeline": "compiled"},
        "gfx950",
        "'blockscale'",
    ),
    (
        "keys_are_rotated_as_they_are_appended",
        {"rope": "half"},
        {"pipeline": "compiled"},
        "gfx950",
        "'half'",
    ),
    ("data_type_is_of_the_architecture", {"data_type": "fp8bf16"}, {}, "gfx90a", "'fp8bf16'"),
    ("data_type_is_of_the_architecture", {"data_type": "fp32"}, {}, "gfx1201", "'fp32'"),
    ("gradients_have_16_bits", BACKWARD | {"data_type": "fp8"}, NINE, "gfx942", "'fp8'"),
    ("pipeline_is_of_the_architecture", {}, {"pipeline": "qs"}, "gfx1100", "'qs'"),
    ("hdims_are_whole_vectors", {"hdim_v": 60}, {}, "gfx942", "hdim_v 60"),
    ("hdims_of_trload_and_v3", WIDE, {"pipeline": "v3"}, "gfx950", "256x256"),
    ("soft_cap_excludes_bias", {"logits": True, "bias": "alibi"}, {}, "gfx942", "'alibi'"),
    ("groups_are_padded", {"mode": "group"}, {"padding": [1, 0, 1, 1]}, "gfx942", "[1, 0, 1, 1]"),
    ("v_is_row_major", SPLIT | {"vlayout": "col"}, {}, "gfx942", "'c'"),
    ("pages_are_pages", PREFILL | {"paged_kv": False}, ASYNC, "gfx942", "'batch_prefill'"),
    ("pages_are_pages", PAGED | {"paged_kv": False}, {"pipeline": "qr_pagedkv"}, "gfx942", "False"),
    ("pages_are_powers_of_two", PREFILL | {"page_size": 12}, ASYNC, "gfx942", "not 12"),
    ("mode_is_of_the_family", PREFILL | {"mode": "batch"}, ASYNC, "gfx942", "'batch'"),
    ("mode_is_of_the_family", APPENDED | {"mode": "group"}, {"pipeline": "appendkv"}, "gfx942", ""),
    ("pipeline_is_of_the_family", PREFILL, {}, "gfx942", "'qr_async'"),
    ("pipeline_is_of_the_family", APPENDED, {}, "gfx942", "'appendkv'"),
    ("pipeline_is_of_the_family", PAGED, {}, "gfx942", "'qr_pagedkv'"),
    ("pipeline_is_of_the_family", SPLIT, ASYNC, "gfx942", "'qr' or 'qr_nwarp_sshuffle'"),
    ("tiles_have_all_numbers", {}, {"tile": [128, 64]}, "gfx942", "tile [128, 64] has 2"),
    ("tiles_have_all_numbers", {}, {"wave": [4]}, "gfx942", "wave [4] has 1"),
    ("tiles_have_all_numbers", {}, {"warp": [0] * 9}, "gfx942", "warp [0, 0"),
    ("tiles_have_all_numbers", BACKWARD, {"pipeline": "bwd"}, "gfx942", "has 6 numbers"),
    (
        "products_come_in_eights",
        WIDE,
        {"tile": [128, 64, 32, 256, 32, 256]},
        "gfx942",
        "makes 4 products",
    ),
    ("results_are_combined_in_slices", COMBINED, {}, "gfx942", "tile has 64"),
    (
        "results_are_combined_in_slices",
        COMBINED | {"hdim_v": 80},
        {"tile": [32, 1, 1, 32, 1, 1]},
        "gfx942",
        "hdim_v 80",
    ),
    ("lds_has_room", {}, {"tile": [256, 384, 64, 64, 32, 64]}, "gfx942", "81920 bytes"),
    (
        "lds_has_room",
        {"hdim_v": 1024},
        ASYNC,
        "gfx942",
        "221184 bytes",
    ),
    ("hdim_q_is_whole_columns", {"hdim_q": 72}, {}, "gfx942", "hdim_q 72"),
    ("hdim_q_is_whole_columns", {"hdim_q": 16}, {}, "gfx942", "hdim_q 16"),
    ("tiles_are_whole_products", {}, {"tile": [128, 80, 32, 64, 32, 64]}, "gfx942", "[128, 80,"),
    ("keys_are_copied_evenly", {}, ASYNC | {"tile": [256, 32, 16, 64, 32, 64]}, "gfx942", "1024"),
    ("tiles_are_those_of_gfx9", {}, {"tile": [32, 64, 32, 64, 32, 64]}, "gfx90a", "32 queries"),
    ("tiles_are_those_of_gfx9", OF_128, {}, "gfx942", "64 keys"),
    (
        "tiles_are_those_of_gfx9",
        OF_128,
        ASYNC | {"tile": [256, 128, 32, 128, 32, 128]},
        "gfx942",
        "256 queries",
    ),
    (
        "tiles_are_those_of_gfx9",
        OF_128,
        {"tile": [128, 128, 64, 128, 32, 128]},
        "gfx942",
        "64 columns",
    ),
    ("tiles_are_those_of_gfx950", {}, {"pipeline": "qr_async_trload_v3"}, "gfx950", "128 queries"),
    (
        "tiles_are_those_of_gfx950",
        OF_128,
        {"pipeline": "qr_async_trload", "tile": [128, 128, 32, 128, 32, 128]},
        "gfx950",
        "128 keys",
    ),
]
# Of what only an architecture without the pipeline can break.
WITH_ITS_PIPELINE = {"v3_is_supported", "loads_can_transpose"}
WARNED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("few_tiles_of_192_with_128", {"hdim_q": 192, "hdim_v": 128, "dropout": True}, {}, "dropout"),
    ("few_tiles_of_192_with_128", {"hdim_q": 192, "hdim_v": 128, "bias": "alibi"}, {}, "'alibi'"),
    ("examples_have_row_major_v", {"vlayout": "c"}, {}, "'c'"),
]


@pytest.mark.parametrize(("name", "signature", "algorithm", "arch", "text"), BROKEN)
def test_a_rule_that_is_broken_alone(name, signature, algorithm, arch, text):
    result = validate_specification(configuration(signature, algorithm, arch))
    assert not result.valid
    assert {rule.name for rule in result.errors} == {name}, result.errors
    assert text in result.errors[0].reason
    assert all(rule.source for rule in result.errors)


@pytest.mark.parametrize(("name", "signature", "algorithm", "text"), WARNED)
def test_warnings(name, signature, algorithm, text):
    result = validate_specification(configuration(signature, algorithm))
    assert result.valid
    assert [rule.name for rule in result.warnings] == [name]
    assert text in result.warnings[0].reason


def test_pipelines_that_an_architecture_lacks():
    algorithm = {"tile": [256, 64, 32, 64, 32, 64]}
    trload, v3 = (
        validate_specification(configuration({}, algorithm | {"pipeline": name}))
        for name in ("qr_async_trload", "v3")
    )
    needed = "pipeline_is_of_the_architecture"
    assert [rule.name for rule in trload.errors] == [needed, "loads_can_transpose"]
    assert [rule.name for rule in v3.errors] == [needed]
    assert [rule.name for rule in v3.warnings] == ["v3_is_supported"]
    for name in ("qr_async_trload", "v3"):
        there = validate_specification(configuration({}, algorithm | {"pipeline": name}, "gfx950"))
        assert there == jitfmha.Validation((), ())


def test_every_rule_is_broken_here():
    broken = {name for name, *_ in (*BROKEN, *WARNED)}
    assert broken | WITH_ITS_PIPELINE == {rule.name for rule in SPECIFICATION_RULES}


def test_every_rule_of_theirs_says_what_ours_is():
    for rule in SPECIFICATION_RULES:
        assert rule.source
        assert bool(rule.ours) == (rule.of == "ck"), rule.name
        if not rule.ours.startswith("no meaning: ") and rule.ours:
            names = rule.ours.partition(":")[0].partition(", for ")[0].split(", ")
            assert set(names) <= RULE_NAMES, rule.name
    assert [rule.name for rule in every_rule()] == [
        rule.name for rule in (*SPECIFICATION_RULES, *CALL_RULES, *RULES, *TILE_RULES)
    ]


@pytest.mark.parametrize("arch", [*OURS, *THEIRS])
def test_valid_configurations(arch):
    """On architectures without kernels of ours there is a warning."""
    for signature, algorithm in (
        ({}, {}),
        ({"mask": "causal", "bias": "elementwise", "lse": True, "dropout": True}, {}),
        (SPLIT, {}),
        (PAGED, {"pipeline": "qr_pagedkv"}),
        (BACKWARD, NINE),
    ):
        result = validate_specification(configuration(signature, algorithm, arch))
        warned = [rule.name for rule in result.warnings]
        assert result.valid, result.errors
        assert warned == ([] if arch in OURS else ["architecture_has_kernels"])


def test_what_only_ours_refuse_is_a_warning_for_theirs():
    signature = {"paged_kv": True, "page_size": 16}
    theirs = validate_specification(configuration(signature, {}))
    ours = validate_specification(configuration(signature, {"pipeline": "compiled"}))
    assert theirs.valid
    assert not ours.valid
    assert theirs.warnings == ours.errors
    (broken,) = validate_config("gfx942", dtype="fp16", hdim=64, page_size=16)
    assert ours.errors == (broken,)


def test_what_only_theirs_refuse_is_valid_for_ours():
    signature = {"hdim_q": 60, "logits": True, "bias": "bias", "vlayout": "c"}
    config = {"signature": SIGNATURE | signature, "arch": "gfx950"}
    assert validate_specification(config) == jitfmha.Validation((), ())


def test_an_architecture_that_nobody_knows():
    result = validate_specification(configuration({}, {}, "gfx906"))
    assert [rule.name for rule in result.errors] == ["architecture_is_known"]
    assert "'gfx906'" in result.errors[0].reason


@pytest.mark.parametrize("arch", THEIRS)
def test_validate_config_of_an_architecture_without_kernels(arch):
    (broken,) = validate_config(arch)
    assert (broken.name, arch in broken.reason) == ("architecture_has_kernels", True)
    with refused(ValueError, arch, "not supported"):
        jitfmha.warmup(device=arch)


@pytest.mark.parametrize(
    ("config", "error", "texts"),
    [
        (7, TypeError, ["a dict", "7"]),
        ({"arch": "gfx942"}, ValueError, ["no 'signature'"]),
        ({"signature": SIGNATURE}, ValueError, ["no 'arch'"]),
        ({"signature": SIGNATURE, "arch": 942}, TypeError, ["arch", "942"]),
        ({"signature": SIGNATURE, "arch": "gfx942", "tile": 1}, ValueError, ["'tile'", "arch"]),
        ({"signature": [], "arch": "gfx942"}, TypeError, ["signature", "[]"]),
        ({"signature": {"hdim_q": 64}, "arch": "gfx942"}, ValueError, ["no 'data_type'"]),
        (configuration({"hdim": 64}, {}), ValueError, ["'hdim'", "hdim_q"]),
        (configuration({"hdim_q": "64"}, {}), TypeError, ["signature.hdim_q", "'64'"]),
        (configuration({"lse": 1}, {}), TypeError, ["signature.lse", "bool", "1"]),
        (configuration({"page_size": True}, {}), TypeError, ["signature.page_size", "True"]),
        (configuration({"features": "lse"}, {}), TypeError, ["signature.features", "'lse'"]),
        (configuration({}, {"tile": "128"}), TypeError, ["algorithm.tile", "'128'"]),
        (configuration({}, {"tile": ["128"]}), TypeError, ["algorithm.tile", "['128']"]),
        (configuration({}, {"stages": 2}), ValueError, ["'stages'", "pipeline"]),
        (configuration({}, {}) | {"profile": True}, TypeError, ["profile", "True"]),
        (configuration({}, {}) | {"profile": 5}, ValueError, ["5", "ck_default"]),
        (configuration({}, {}) | {"profile": "flush"}, ValueError, ["'flush'", "flash_fwd"]),
    ],
)
def test_what_is_no_configuration(config, error, texts):
    with refused(error, *texts):
        validate_specification(config)


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ({"mask": "t", "bias": "no_bias"}, {"mask": "top_left"}),
        ({"mask": "window_generic", "qscale": "no_scale"}, {"mask": "generic"}),
        ({"bias": "elementwise_bias", "vlayout": "row_major", "rope": "no"}, {"bias": "bias"}),
    ],
)
def test_words_that_mean_the_same(words, meaning):
    read = [read_specification(configuration(x, {})) for x in (words, meaning)]
    assert read[0] == read[1]


# ---- Receipts ------------------------------------------------------------------------------------

EIGHT_BITS = {"data_type": "fp8bf16", "hdim_q": 128, "hdim_v": 128}
FP32 = {"data_type": "fp32", "hdim_q": 48, "hdim_v": 48}
GROUP = {"mode": "group"}
# The number, the name, a signature that passes, and changes each of which does not.
FILTERS: list[tuple[int | None, str, dict[str, Any], list[dict[str, Any]]]] = [
    (0, "ck_default", {"bias": "bias"}, [FP32]),
    (1, "ck_extended", EIGHT_BITS, [FP32]),
    (
        *(2, "flash_fwd", {"bias": "alibi", "logits": True}),
        [{"bias": "bias"}, FP32, BACKWARD, {"vlayout": "c"}, {"qscale": "pertensor"}, COMBINED],
    ),
    (3, "flash_bwd", BACKWARD, [{"family": "fwd"}, FP32]),
    (
        *(4, "ck_pytorch", BACKWARD | {"bias": "bias"}),
        [{"bias": "alibi"}, {"logits": True}, {"sink": True}, FP32, {"skip_min_seqlen_q": True}],
    ),
    (100, "aiter_batch", EIGHT_BITS, [GROUP, {"hdim_q": 256}, FP32, {"vlayout": "c"}]),
    (200, "aiter_group", EIGHT_BITS | GROUP | {"hdim_q": 256}, [{"mode": "batch"}, FP32]),
    (300, "aiter_bwd_batch", BACKWARD, [GROUP, {"family": "fwd"}]),
    (400, "aiter_bwd_group", BACKWARD | GROUP, [{"mode": "batch"}, FP32]),
    (600, "aiter_cpp", EIGHT_BITS | GROUP, [{"hdim_q": 256}, {"vlayout": "c"}]),
    (800, "fp32_all", FP32 | {"dropout": True}, [{"logits": True}, SIGNATURE]),
    (801, "fp32_min", FP32, [GROUP, {"hdim_v": 64}, {"lse": True}, {"bias": "alibi"}]),
    (888, "fp8_test", EIGHT_BITS, [{"hdim_q": 256}, SIGNATURE, {"vlayout": "c"}]),
    (None, "flash", {"bias": "alibi"}, [{"bias": "bias"}, FP32]),
    (None, "flash", BACKWARD | {"bias": "bias"}, [{"family": "fwd"}]),
    (None, "pytorch", {"bias": "bias"}, [{"bias": "alibi"}, {"logits": True}, FP32]),
    (None, "aiter", EIGHT_BITS | GROUP | {"hdim_q": 256}, [{"mode": "batch"}, FP32]),
    (None, "aiter", BACKWARD | {"vlayout": "c"}, [FP32]),
    (None, "fp32", FP32 | {"dropout": True}, [{"logits": True}, SIGNATURE]),
    (None, "fp8", EIGHT_BITS, [{"hdim_q": 256}, SIGNATURE]),
]


@pytest.mark.parametrize(("number", "name", "kept", "changes"), FILTERS)
def test_what_a_receipt_keeps(number, name, kept, changes):
    receipt = receipt_named(name)
    if number is not None:
        assert receipt is receipt_named(number)
        assert receipt is receipt_named(str(number))
    signature = Signature(**SIGNATURE | kept)
    assert allows(receipt, signature)
    assert allows(receipt_named("all"), signature)
    for change in changes:
        assert not allows(receipt, signature._replace(**change)), change
    config = configuration(kept, {"pipeline": "compiled"}) | {
        "profile": name if number is None else number
    }
    assert "profile_has_it" not in {rule.name for rule in validate_specification(config).errors}
    left_out = configuration(kept | changes[0], {"pipeline": "compiled"}) | {"profile": name}
    (broken,) = (x for x in validate_specification(left_out).errors if x.name == "profile_has_it")
    assert repr(name) in broken.reason


def test_every_receipt_is_here():
    assert {*RECEIPTS} == {*RECEIPT_NUMBERS}
    assert {*PROFILES} == {*PROFILE_NAMES}
    assert {name for _, name, *_ in FILTERS} | {"all"} == {*RECEIPTS}
    with refused(ValueError, "'nonsense'", "inference", "'flash_fwd' (2)"):
        warmup(profile="nonsense")
    with refused(TypeError, "True"):
        warmup(profile=True)


@pytest.mark.parametrize("device", ["gfx942", "cpu"])
def test_what_is_built_for_a_receipt(device):
    target = planned_target(device)
    parts = {"dtypes": ["bf16"], "hdims": [64]}
    flash, pytorch = (
        {name: plan.problem for name, plan in plans_ahead(target, name_of, **parts).items()}
        for name_of in ("flash_fwd", 4)
    )
    assert all(x.direction == "forward" and x.modifiers.bias is None for x in flash.values())
    assert {Feature.ALIBI, Feature.SOFTCAP, Feature.PAGED_KEYS} <= {
        feature for x in flash.values() for feature in x.features
    }
    assert {x.direction for x in pytorch.values()} == {"forward", "backward"}
    assert not any("alibi" in name or "softcap" in name for name in pytorch)


# ---- Sets of kernels -----------------------------------------------------------------------------


def declared(folder: Path, *entries: Any) -> Path:
    path = folder / "set.json"
    path.write_text(json.dumps({"kernels": entries}))
    return path


def names_of(path: Path, device: str = "gfx942") -> set[str]:
    return {*plans_ahead(planned_target(device), None, path)}


def test_a_set_of_one_kernel(tmp_path):
    entry = {"signature": SIGNATURE | BACKWARD | {"hdim_q": 40, "bias": "elementwise"}}
    assert names_of(declared(tmp_path, entry), "gfx950") == {
        "fmha_bwd_compiled_hd40x64_fp16_bias_fp16_gm0_gfx950"
    }
    assert names_of(declared(tmp_path, entry), "cpu") == {
        plan.kernel
        for plan in plans_ahead(
            *(planned_target("cpu"), None),
            dtypes=["fp16"],
            hdims=[(40, 64)],
            masks=[0],
            modes=["gm0"],
            directions=["backward"],
            features=["bias"],
        ).values()
    }


def test_a_set_with_nothing_for_a_device(tmp_path):
    path = declared(tmp_path, {"signature": SIGNATURE, "algorithm": {"pipeline": "compiled"}})
    assert names_of(path)
    with refused(ValueError, str(path), "no kernels of its pipelines for cpu"):
        names_of(path, "cpu")


def test_outputs_of_8_bit_calls(tmp_path, run):
    """Sets, parts and flags name the same kernels; a receipt has those that it keeps."""
    target, out = planned_target("gfx942"), {"data_type": "fp8fp32"}
    path = declared(tmp_path, {"signature": SIGNATURE | out, "arch": "gfx942"})
    parts = {"dtypes": ["fp8_e4m3fnuz"], "masks": [0], "modes": ["gm0"], "hdims": [64]}
    plans = plans_ahead(target, None, out_dtypes=["fp32"], **parts)
    # A set has calls of decoding, too.
    assert {*plans} <= names_of(path)
    assert all("_fp32out_" in name for name in names_of(path))
    flags = "--dtype fp8_e4m3fnuz --mask 0 --mode gm0 --hdim 64 --out-dtype fp32 --device gfx942"
    listed = run("build", *flags.split(), "--dry-run", "--json")
    assert {x["name"] for x in json.loads(listed.out)} == {*plans}
    of_flags = Selection(
        *(("gfx942",), ("forward",), ("fp8",), ((128, 128),), ("none",), ("gm0",)),
        out_dtypes=("bf16", "fp32"),
    )
    # With outputs of bf16 it comes ready.
    (compiled,) = forward_passes(of_flags, forward_kernels(of_flags))
    assert compiled.other_out_dtype == "fp32"
    (of_set,) = forward_passes(selection_of_set(path, Selection(("gfx942",))), ())
    assert of_set.other_out_dtype == "fp32"
    kept = plans_ahead(target, 888, **parts | {"hdims": None})
    assert {x.problem.out_dtype for x in kept.values()} == {"bf16", "fp32"}


def test_wildcards(tmp_path):
    """A list and "*" are each value alone; what breaks a rule is left out."""
    everything = {"dropout": "*", "data_type": ["fp16", "bf16"], "hdim_v": "*"}
    wild = {"signature": SIGNATURE | BACKWARD | everything | {"mask": "*", "mode": "*"}}
    alone = [
        {"signature": SIGNATURE | BACKWARD | {"dropout": drops, "data_type": dtype} | of_mode}
        for drops in (True, False)
        for dtype in ("fp16", "bf16")
        for of_mode in ({"mask": mask, "mode": mode} for mask in ("no", "b") for mode in GM)
    ]
    expected = names_of(declared(tmp_path, *alone))
    assert len(expected) >= 16
    assert names_of(declared(tmp_path, wild)) == expected


GM = ("batch", "group")


def test_entries_of_architectures_pipelines_and_receipts(tmp_path):
    wide = {"signature": SIGNATURE}
    there = declared(tmp_path, wide | {"arch": ["gfx950"]}, wide | {"arch": "gfx1100"})
    assert names_of(there, "gfx950")
    with refused(ValueError, str(there), "no kernels for gfx942"):
        names_of(there, "gfx942")
    every = names_of(declared(tmp_path, wide))
    compiled = names_of(declared(tmp_path, wide | {"algorithm": {"pipeline": "compiled"}}))
    ready = names_of(declared(tmp_path, wide | {"algorithm": {"pipeline": ["ready"]}}))
    assert compiled
    assert ready
    assert compiled.isdisjoint(ready)
    assert every == compiled | ready
    filtered = {"signature": SIGNATURE | {"bias": "*"}, "profile": "flash_fwd"}
    named = names_of(declared(tmp_path, filtered))
    assert any("alibi" in name for name in named)
    assert not any("bias" in name for name in named)


@pytest.mark.parametrize(
    ("entry", "error", "texts"),
    [
        (7, TypeError, ["signature", "7"]),
        ({"signature": {**SIGNATURE, "hdim": 3}}, ValueError, ["'hdim'"]),
        ({"signature": {**SIGNATURE, "mask": "diagonal"}}, ValueError, ["'diagonal'"]),
        ({"signature": {**SIGNATURE, "page_size": "*"}}, ValueError, ["page_size", "'*'"]),
        ({"signature": SIGNATURE, "arch": "gfx906"}, ValueError, ["'gfx906'", "gfx90a"]),
        ({"signature": SIGNATURE, "algorithm": {"tile": []}}, ValueError, ["tile", "pipeline"]),
        ({"signature": SIGNATURE, "algorithm": {"pipeline": "qr"}}, ValueError, ["'qr'"]),
        ({"signature": {**SIGNATURE, "data_type": "bf8"}}, ValueError, ["'bf8'", "int8bf16"]),
        ({"signature": SIGNATURE, "profile": 5}, ValueError, ["5", "ck_default"]),
    ],
)
def test_what_is_no_entry(tmp_path, entry, error, texts):
    path = declared(tmp_path, entry)
    with refused(error, str(path), *texts):
        warmup(kernel_set=path, device="gfx942")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python reads TOML from 3.11 on")
def test_a_set_in_toml(tmp_path, monkeypatch):
    fields = {"data_type": "fp16", "hdim_q": [40, 64], "hdim_v": 64, "mask": "*"}
    values = (f"{name} = {json.dumps(value)}" for name, value in fields.items())
    path = tmp_path / "set.toml"
    path.write_text(f'[[kernels]]\narch = "gfx942"\nsignature = {{{", ".join(values)}}}\n')
    assert names_of(path) == names_of(declared(tmp_path, {"signature": fields}))
    with refused(ValueError, str(path), "no kernels for gfx950"):
        names_of(path, "gfx950")
    with monkeypatch.context() as changed:
        changed.setattr(sys, "version_info", (3, 10, 14))
        with refused(ValueError, str(path), "3.11", "JSON"):
            names_of(path)
    path.write_text("[[kernels]")
    with refused(ValueError, str(path), "line 1"):
        names_of(path)


def test_what_is_no_set(tmp_path, run):
    path = declared(tmp_path, {"signature": SIGNATURE | {"paged_kv": True}})
    with refused(ValueError, "block_table", "cu_seqlens_k"):
        warmup(kernel_set=path, device="gfx942")
    with refused(ValueError, str(path), "profile has no place"):
        warmup(kernel_set=path, profile="training")
    with refused(ValueError, str(path), "hdims has no place"):
        warmup(kernel_set=path, hdims=[64])
    path.write_text("[]")
    with refused(TypeError, str(path), "[]"):
        warmup(kernel_set=path)
    asked = run("build", "--set", path, "--dry-run")
    assert (asked.code, str(path) in asked.err) == (2, True)


# ---- Keys and stages -----------------------------------------------------------------------------


@cache
def kernels_of(arch: Arch) -> tuple[ListedKernel, ...]:
    return tuple(every_kernel(arch))


def drawn_problem(drawn: random.Random) -> Problem:
    """Of a call with random features, some of which no call can have together."""
    is_paged = drawn.random() < 0.2
    dtype = drawn.choice(("bf16", "bf16", "fp16", "fp32", "int8"))
    features = {x for x in NAMED_FEATURES.values() if drawn.random() < 0.1} - {Feature.PAGED_KEYS}
    heads = drawn.choice(((8, 8), (8, 2)))
    combination = Combination(
        *(dtype, dtype, drawn.choice((40, 64, 128, 192, 300)), drawn.choice((64, 128, 400))),
        other_out_dtype=drawn.choice(("", "fp16", "fp32")) if dtype == "int8" else "",
        mask=drawn.choice((NO_MASK, CAUSAL_MASK, Mask(left=40, right=3))),
        mode="gm1" if is_paged else drawn.choice(("gm0", "gm1")),
        direction=drawn.choice(("forward", "forward", "backward")),
        features=frozenset(features | ({Feature.PAGED_KEYS} if is_paged else set())),
        num_splits=drawn.choice((0, 0, 0, 1, 3)),
        batch=drawn.choice((1, 4)),
        heads_q=heads[0],
        heads_k=heads[1],
        seqlen_q=drawn.choice((1, 16, 300, 4000)),
        seqlen_k=drawn.choice((64, 300, 40000)),
    )
    check_combination(combination)
    return combination.problem()


@pytest.mark.parametrize("arch", OURS)
@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_a_data_type_is_that_of_the_key(data_type, arch):
    """From a configuration to a call, to its kernel, and to the configuration of that."""
    call = combination_of(Signature(data_type, 96, 64), arch)
    key = explain_problem(call.problem(), planned_target(arch)).to_dict()["key"]
    assert key["signature"]["data_type"] == data_type
    assert validate_specification(key).valid
    assert any(has_key(kernel, key) for kernel in kernels_of(arch))
    assert call.out_dtype == (data_type if data_type in SIXTEEN_AND_32_BITS else data_type[-4:])


SIXTEEN_AND_32_BITS = ("fp16", "bf16", "fp32")


@pytest.mark.sample("number", range(2000), 60)
def test_a_key_is_that_of_a_listed_kernel(seed, number):
    """And a valid configuration; with another tile it is none."""
    drawn = random.Random(seed)
    arch = drawn.choice(OURS)
    target = planned_target(arch)
    try:
        explanation = explain_problem(drawn_problem(drawn), target).to_dict()
    except (TypeError, ValueError, NotImplementedError):
        return  # such a call cannot be
    key = explanation["key"]
    if key is None:
        return
    assert any(has_key(kernel, key) for kernel in kernels_of(arch)), key
    assert json.loads(json.dumps(key))["arch"] == arch
    result = validate_specification(key)
    assert result.valid, result.errors
    odd = key | {"algorithm": key["algorithm"] | {"tile": (7, *key["algorithm"]["tile"][1:])}}
    if not key["signature"]["family"].startswith("fwd"):
        (broken,) = validate_specification(odd).errors
        assert (broken.name, "[7, " in broken.reason) == ("kernel_is_listed", True)
    assert explanation["kernel"] in {stage["kernel"] for stage in explanation["stages"]} or (
        key["signature"]["family"] == "bwd_dq_dk_dv"
    )


def stages_of(*shapes: tuple[int, ...], device: str = "gfx942", **options: Any) -> list[str]:
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    explained = explain(*tensors, device=device, **options)
    said = str(explained)
    stages = explained.to_dict()["stages"]
    for stage in stages:
        assert (len(stages) > 1) == (f"stage    {stage['family']}: {stage['kernel']}" in said)
    return [stage["family"] for stage in stages]


def test_stages_of_forward():
    few, many, keys = (1, 1, 8, 128), (4, 4096, 8, 128), (1, 65536, 8, 128)
    parts = ["fwd_splitkv", "fwd_splitkv_combine"]
    assert stages_of(few, keys, keys) == parts
    assert stages_of(few, keys, keys, num_splits=1) == ["fwd"]
    assert stages_of(many, many, many) == ["fwd"]
    assert stages_of((1, 1, 8, 80), *((1, 65536, 8, 80),) * 2) == parts
    assert stages_of((1, 1, 8, 80), *((1, 65536, 8, 80),) * 2, num_splits=3) == parts
    assert stages_of(few, keys, keys, device="cpu") == ["fwd"]


def test_stages_of_work_that_is_listed():
    combination = Combination(
        *("bf16", "bf16", 80, 80), mode="gm1", batch=8, heads_q=8, heads_k=8, seqlen_q=8192
    )
    problem = combination._replace(seqlen_k=8192).problem()
    plans = plans_for(problem._replace(unevenness=(9, 9)), planned_target("gfx950"))
    (listed,) = (plan for plan in plans if plan.kernel.endswith("_listed_gm1_gfx950"))
    assert [str(stage) for stage in listed.stages()] == [
        f"fwd_list: {listed.kernel}_list",
        f"fwd: {listed.kernel}",
    ]


@pytest.mark.parametrize("arch", OURS)
def test_stages_of_backward(arch):
    stages: dict[str, list[str]] = {}
    combination = Combination("bf16", "bf16", 64, 64, direction="backward", seqlen_q=512)
    for plan in plans_for(combination._replace(seqlen_k=512).problem(), planned_target(arch)):
        stages[plan.family] = [stage.family for stage in plan.stages()]
        assert len({stage.kernel for stage in plan.stages()}) == len(plan.stages())
    assert stages == {
        "ready": ["bwd_dot_do_o", "bwd_dq_dk_dv", "bwd_convert_dq"],
        "compiled": ["bwd_dq_dk_dv"] * 2,
    }


def test_kernels_of_an_architecture(run):
    listed = run("kernels", "list", "--arch", "gfx942", "--json").json["gfx942"]
    assert [x["name"] for x in listed["kernels"]] == [x.name for x in kernels_of("gfx942")]
    assert {x["key"]["algorithm"]["pipeline"] for x in listed["kernels"]} == {"ready", "compiled"}


# ---- On the command line -------------------------------------------------------------------------


def test_a_file_on_the_command_line(run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(configuration({"hdim_v": 60}, {})))
    wrong = run("kernels", "validate", "--config", str(path))
    assert wrong.code == 1
    assert "error: hdim_v 60 is no multiple of 8" in wrong.out
    first, *others = wrong.out.splitlines()
    assert first == f"{path}: not valid"
    assert max(map(len, others)) <= 80
    as_json = run("kernels", "validate", "--config", str(path), "--json")
    assert as_json.json["valid"] is False
    assert as_json.json["errors"][0]["name"] == "hdims_are_whole_vectors"
    path.write_text(json.dumps(configuration({}, {}, "gfx1100")))
    right = run("kernels", "validate", "--config", str(path))
    assert right.code == 0
    assert "warning: nothing here runs on gfx1100" in right.out
    path.write_text("{")
    broken = run("kernels", "validate", "--config", str(path))
    assert (broken.code, str(path) in broken.err) == (2, True)


def test_the_table_on_the_command_line(run):
    listed = run("kernels", "rules")
    assert [rule["name"] for rule in run("kernels", "rules", "--json").json] == [
        rule.name for rule in every_rule()
    ]
    assert all(f"{rule.name} (of " in listed.out for rule in every_rule())


def test_the_table_of_the_document():
    page = Path(__file__).parents[1] / "docs" / "specifications.md"
    rows = [x for x in page.read_text(encoding="utf-8").splitlines() if x.startswith("| `")]
    named = {row.split("`")[1]: row for row in rows}
    for rule in SPECIFICATION_RULES:
        assert rule.ours in named[rule.name], rule.name


def test_architectures_are_whole():
    known = ck_architectures()
    assert [*known] == ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"]
    assert {name for name, x in known.items() if x.supports_trload} == {"gfx950"}
    assert hdims_of("fp8bf16") == ((64, 64), (128, 128), (192, 128), (256, 256))
    assert hdims_of("int8bf16") == ()


def test_the_receipts_of_the_document():
    page = Path(__file__).parents[1] / "docs" / "specifications.md"
    text = page.read_text(encoding="utf-8")
    for receipt in RECEIPTS.values():
        number = "" if receipt.number is None else f" {receipt.number}"
        assert f"|{number} | `{receipt.name}` | {receipt.keeps} |" in text
