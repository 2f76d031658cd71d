"""The C++ examples of features, with the kernels that each asks for, on the emulator."""

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from exported_calls import Program, build_shared, compile_cpp, write_library

from jitfmha.amd.tree import AITER_ASM_DIR, HSA_DIR
from jitfmha.cli.export import selected
from jitfmha.cli.flags import parser
from jitfmha.emulator.library import load
from jitfmha.export.kernels import Selection

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "examples" / "features").glob("*.cpp"))

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def selection_of(file: Path) -> Selection:
    """What the line at the head of an example exports."""
    line = re.search(r"//   python -m jitfmha (export (.|\n//     )*)", file.read_text())
    assert line is not None, f"{file.name} does not say what it needs"
    return selected(parser().parse_args(shlex.split(line[1].replace("//", ""))))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """All examples as one program, which EXAMPLE in the environment tells which one to run."""
    for variable in (HSA_DIR, AITER_ASM_DIR):
        if variable in os.environ:
            pytest.skip(f"{variable} is set, and exports have the kernels of this package")
    folder = tmp_path_factory.mktemp("examples")
    ready = Selection(("gfx942",), dtypes=("bf16", "fp8"), bf16_cvts=("rtne",))
    write_library(folder / "mha", ready, [selection_of(file) for file in FILES])
    library = build_shared(folder / "mha")
    names = [file.stem for file in FILES]
    (folder / "all.cpp").write_text(
        "#include <plain.h>\n#include <jitfmha_aiter.h>\n"
        + "".join(f'namespace {x}_cpp {{\n#include "{x}.cpp"\n}}\n' for x in names)
        + 'void example() {\n  const std::string name = std::getenv("EXAMPLE");\n'
        + '  if (name == "wrong") plain::compare("one", {1 + 1. / 64}, {1});\n'
        + '  if (name == "nan") plain::compare("one", {std::nan("")}, {1});\n'
        + "".join(f'  if (name == "{x}") return {x}_cpp::example();\n' for x in names)
        + "}\n"
    )
    folders = [f"-I{FILES[0].parent}", *(f"-I{folder}/mha/{x}" for x in ("include", "benchmarks"))]
    built = compile_cpp(
        folder / "all", *folders, folder / "all.cpp", library, f"-Wl,-rpath,{folder}"
    )
    return Program(built, load("plain")._name)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_runs(file, program, monkeypatch):
    monkeypatch.setenv("EXAMPLE", file.stem)
    assert "off by" in program.run()


@pytest.mark.parametrize("name", ["wrong", "nan"])
def test_a_wrong_result_ends_an_example(name, program, monkeypatch):
    monkeypatch.setenv("EXAMPLE", name)
    assert "one is wrong" in program.run(code=1)


def test_the_documents_name_each():
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    assert not [x.name for x in FILES if f"../examples/features/{x.name}" not in page]
