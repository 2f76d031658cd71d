"""The script that formats C++ leaves the placeholders of templates as they are."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("clang_format", ROOT / ".ci" / "clang_format.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def formatted(script: ModuleType, text: str) -> str:
    try:
        clang_format = script.clang_format_of_this_environment()
    except SystemExit as error:
        pytest.skip(str(error))
    return str(script.formatted(clang_format, ROOT / "csrc_templates" / "example.cpp.in", text))


def test_placeholders_stay(script):
    text = (
        "// @{origin}\n"
        "#define MODE_@{mode} 1\n"
        "using Dtype = @{dtype};\n"
        "constexpr Row kRows[] = {\n"
        "    @{rows}\n"
        "};\n"
        'constexpr const char* kName = "@{name}";\n'
    )
    assert formatted(script, text) == text


def test_what_is_around_a_placeholder_is_formatted(script):
    text = "int  x=@{x};\nRow rows[] = {\n@{rows}\n};\n@{code}\nint y ;\n"
    expected = "int x = @{x};\nRow rows[] = {\n    @{rows}\n};\n@{code}\nint y;\n"
    assert formatted(script, text) == expected


def test_comments_are_not_wrapped(script):
    text = f"// {'word ' * 30}\n".replace(" \n", "\n")
    assert formatted(script, text) == text
    assert script.show_long_lines(ROOT / "example.h", text) == 1


def test_the_mark_of_placeholders(script):
    with pytest.raises(ValueError, match="stands for placeholders"):
        formatted(script, f"// {script.MARK}\n")
