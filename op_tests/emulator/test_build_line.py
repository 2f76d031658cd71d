"""What is said before the emulator is built, which takes up to a minute."""

from __future__ import annotations

import pytest

from jitfmha.emulator import library


@pytest.mark.parametrize("is_built", [True, False])
def test_first_build_says_how_long_it_takes(is_built, monkeypatch, capsys):
    monkeypatch.setattr(library.jit, "is_built", lambda spec: is_built)
    monkeypatch.setattr(library.jit, "load", lambda spec: spec.name)
    library.load.__wrapped__("check")
    assert ("up to a minute" in capsys.readouterr().err) == (not is_built)
