"""`emulate`, JITFMHA_EMULATE and what the device compiler says."""

import pytest
from assembled_words import assemble_words

from jitfmha.emulator import DEVICES, Emulation, emulate, emulation, library
from jitfmha.jit.toolchain.device_compiler import (
    DeviceCompileError,
    compile_hip,
)


@pytest.mark.parametrize("arch", list(DEVICES))
def test_emulate_holds_inside_only(arch):
    before = emulation()
    with emulate(arch, random_order=7, threads=2) as run:
        current = run.emulation
        assert emulation() == current
        assert (current.arch, current.device) == (arch, DEVICES[arch])
        assert (current.variant, current.random_order, current.threads) == ("plain", 7, 2)
        with emulate("gfx942", check=True):
            inner = emulation()
            assert inner is not None
            assert inner.variant == "check"
        assert emulation() == current
    assert emulation() == before


def test_emulate_ends_with_an_error():
    before = emulation()
    with pytest.raises(KeyError), emulate("gfx950"):
        raise KeyError
    assert emulation() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"arch": "gfx90a"},
            "'gfx90a' is not emulated; choose one of gfx942, gfx942-mi308, gfx950",
        ),
        ({"arch": ""}, "'' is not emulated"),
        ({"arch": "gfx942", "check": True, "profile": True}, "separate builds"),
        ({"arch": "gfx942", "threads": 0}, "threads is 0"),
        ({"arch": "gfx942", "random_order": -1}, "random_order is -1"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(ValueError, match=words), emulate(**arguments):
        pass


def test_environment(monkeypatch):
    for arch, check, expected in (
        ("", "1", None),
        ("gfx942-mi308", "0", Emulation("gfx942-mi308")),
        ("MI308X", "0", Emulation("gfx942-mi308")),
        ("mi355x", "0", Emulation("gfx950")),
        ("gfx950", "1", Emulation("gfx950", "check")),
    ):
        monkeypatch.setenv("JITFMHA_EMULATE", arch)
        monkeypatch.setenv("JITFMHA_EMULATE_CHECK", check)
        assert emulation() == expected
    with emulate("gfx942") as run:
        assert run.emulation.variant == "check"
    with emulate("gfx942", profile=True) as run:
        assert run.emulation.variant == "profile"


def test_environment_that_names_no_chip(monkeypatch):
    monkeypatch.setenv("JITFMHA_EMULATE", "mi300")
    with pytest.raises(ValueError, match="JITFMHA_EMULATE: 'mi300' is not emulated; choose one of"):
        emulation()


@pytest.mark.parametrize("is_built", [True, False])
def test_first_build_says_how_long_it_takes(is_built, monkeypatch, capsys):
    monkeypatch.setattr(library.jit, "is_built", lambda spec: is_built)
    monkeypatch.setattr(library.jit, "load", lambda spec: spec.name)
    library.load.__wrapped__("check")
    assert ("up to a minute" in capsys.readouterr().err) == (not is_built)


# ---- The device compiler -------------------------------------------------------------------------


def test_the_compilers_words_are_passed_on():
    with pytest.raises(DeviceCompileError, match="unknown type name 'nonsense'"):
        compile_hip("nonsense x;", "gfx942")
    with pytest.raises(DeviceCompileError, match="invalid instruction"):
        assemble_words(["v_nonsense v0"], "gfx950")
    with pytest.raises(ValueError, match="version 3"):
        compile_hip("", "gfx942", code_object_version=3)
