from pathlib import Path

import pytest

from jitfmha import jit
from jitfmha.jit import resources


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("jitfmha.jit.resources._PACKAGE", tmp_path / "jitfmha")
    folder = tmp_path / "csrc_templates"
    (folder / "cpu").mkdir(parents=True)
    return folder


def test_values_are_inserted(templates):
    (templates / "cpu" / "a.cpp").write_text("int @{name} = @{value}; // @{name} {x} @x $y\n")
    text = jit.render("cpu/a.cpp", {"name": "n", "value": 3})
    assert text == "int n = 3; // n {x} @x $y\n"


def test_values_are_not_searched_for_placeholders(templates):
    (templates / "a.cpp").write_text("@{a}@{b}")
    assert jit.render("a.cpp", {"a": "@{b}", "b": "\\1"}) == "@{b}\\1"


@pytest.mark.parametrize(
    ("text", "values", "named"),
    [
        ("@{a} @{b}", {"a": 1}, "no value for @{b}"),
        ("@{a}", {"a": 1, "bee": 2}, "'bee'"),
        ("@{a b}", {"a b": 1}, "malformed placeholder @{a b}"),
        ("@{}", {}, "malformed"),
    ],
)
def test_misfits_are_named(templates, text, values, named):
    (templates / "a.cpp").write_text(text)
    with pytest.raises(jit.TemplateError) as caught:
        jit.render("a.cpp", values)
    assert named in str(caught.value)
    assert "a.cpp" in str(caught.value)


@pytest.mark.parametrize("template", ["missing.cpp", "cpu", "../secret", "/etc/passwd"])
def test_no_such_template(templates, template):
    (templates.parent / "secret").touch()
    with pytest.raises(jit.TemplateError, match=template):
        jit.render(template, {})


def test_folder_in_the_package_comes_first(templates, tmp_path):
    assert resources.templates_dir() == templates
    inside = tmp_path / "jitfmha" / "csrc_templates"
    inside.mkdir(parents=True)
    assert resources.templates_dir() == inside


def test_missing_folder_is_an_error(templates):
    with pytest.raises(FileNotFoundError, match="no 'hsa' folder"):
        resources.hsa_dir()
