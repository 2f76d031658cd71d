"""What the emulator's variants share: compiled once, and the same for whoever links it."""

import shutil
import subprocess
from typing import get_args

import pytest

from jitfmha.emulator.library import Variant, build_spec
from jitfmha.jit.resources import templates_dir

_HOOKS = "execution/hooks.h"
_MACRO = "JITFMHA_EMULATOR_OBSERVED"


def test_a_variant_compiles_only_what_the_others_did_not():
    plain, check, profile = (build_spec(variant) for variant in get_args(Variant))
    assert plain.objects == check.objects[:1] == profile.objects[:1]
    assert check.objects == profile.objects
    common, observed = check.objects
    assert plain.compiled_sources == observed.compiled_sources
    for spec, folder in ((check, "checks"), (profile, "profile")):
        assert {name.partition("/")[0] for name in spec.compiled_sources} == {folder}
        compiled = [*spec.compiled_sources, *common.compiled_sources, *observed.compiled_sources]
        in_tree = {
            path.relative_to(templates_dir() / "emulator").as_posix()
            for path in (templates_dir() / "emulator").rglob("*.cpp")
        }
        others = {"checks", "profile", "decoder"} - {folder}
        assert sorted(compiled) == sorted(x for x in in_tree if x.partition("/")[0] not in others)


def test_the_compiler_finds_hooks_where_the_specs_say(tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not here")
    plain = build_spec("plain")
    for spec, has_hooks in ((plain, True), (*plain.objects, False)):
        for name, text in spec.sources.items():
            path = tmp_path / spec.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for name in spec.compiled_sources:
            command = [compiler, *spec.cflags, f"-iquote{tmp_path / spec.name}", "-MM"]
            command.append(str(tmp_path / spec.name / name))
            made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            assert (_HOOKS in made) == has_hooks, name


def test_the_macro_is_asked_for_in_one_file():
    specs = [build_spec(variant) for variant in get_args(Variant)]
    sources = {
        name: text
        for spec in specs
        for each in (spec, *spec.objects)
        for name, text in each.sources.items()
    }
    assert [name for name, text in sources.items() if _MACRO in text] == [_HOOKS]
    assert build_spec("plain").cflags == build_spec("plain").objects[0].cflags
    assert f"-D{_MACRO}=1" in build_spec("check").cflags
