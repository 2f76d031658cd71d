"""The facts about chips, and how devices find theirs."""

import ast
import json
from typing import get_args

import pytest
from subprocesses import run_forked

from jitfmha.amd.chips import (
    _FILE,
    Arch,
    architecture,
    chip,
    chip_of_device,
    chips,
    is_arch,
    supported_chips,
)


def test_every_chip():
    assert [each.name for each in chips()] == list(json.loads(_FILE.read_text())["chips"])
    assert {each.architecture.name for each in chips()} == set(get_args(Arch))
    for each in chips():
        assert each == chip(each.name)
        assert 0 < each.xcds <= each.compute_units
        assert each.compute_units % each.xcds == 0
        # Between the slowest and the fastest HBM among them: 5.3 and 8 TB/s at their peaks.
        assert each.streaming_gb_s is None or 4000 <= each.streaming_gb_s < 8000
        for pci_id in each.pci_ids:
            assert chip_of_device(each.architecture.name, pci_id) == each


def test_each_fact_has_a_source():
    file = json.loads(_FILE.read_text())
    sourced = {name for names in file["sources"] for name in names.split(", ")}
    facts = {
        name for kind in ("architectures", "chips") for each in file[kind].values() for name in each
    }
    assert facts == sourced


def test_a_pci_id_is_of_one_chip():
    ids = [pci_id for each in chips() for pci_id in each.pci_ids]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("arch", "pci_id", "name", "folder"),
    [
        ("gfx942", 0x74A1, "MI300X", "MI300"),
        ("gfx942", 0x74A0, "MI300A", "MI300"),
        ("gfx942", 0x74BC, "MI308X", "MI308"),
        ("gfx942", 0x1234, "MI300X", "MI300"),
        ("gfx950", 0x75A3, "MI355X", None),
        ("gfx950", 0x1234, "MI350X", None),
        ("gfx950", 0x74A2, "MI350X", None),  # that of an MI308X, which has another architecture
    ],
)
def test_the_chip_of_a_device(arch, pci_id, name, folder):
    found = chip_of_device(arch, pci_id)
    assert (found.name, found.kernel_folder) == (name, folder)


def test_architectures():
    assert architecture("gfx942").kernel_folders == ("MI300", "MI308")
    assert architecture("gfx950").kernel_folders == ()
    assert architecture("gfx942").fp8_dtype in architecture("gfx942").dtypes
    assert is_arch("gfx950")
    assert not is_arch("gfx90a")


def test_an_unknown_chip_is_named():
    with pytest.raises(ValueError, match="chip 'MI999' is not known; MI300A, MI300X"):
        chip("MI999")


def test_the_sentence_of_supported_chips():
    assert supported_chips() == (
        "gfx942 (MI300A, MI300X, MI325X and MI308X); gfx950 (MI350X, MI355X and MI350P)"
    )


def test_importing_reads_nothing():
    program = "import jitfmha.amd.chips as c; assert c._facts.cache_info().currsize == 0"
    run_forked("-c", program)


def test_decisions_read_facts():
    """No decision names an architecture: it reads a fact, or a table of a kernel family's own.

    The launcher is told which ABI of AMD's it renders; what a replay expects is stated apart; and
    the emulator is made of differences between chips.
    """
    package = _FILE.parents[1]
    apart = {"kernels/launcher.py", "replay/expected_arguments.py"}
    found = []
    for path in package.rglob("*.py"):
        name = str(path.relative_to(package))
        if name.startswith("emulator/") or name in apart:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = {x.value for x in ast.walk(node) if isinstance(x, ast.Constant)}
            if isinstance(node, ast.Compare) and named & set(get_args(Arch)):
                found.append(f"{name}, line {node.lineno}")
    assert found == []
