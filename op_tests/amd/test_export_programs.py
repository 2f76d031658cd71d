"""The benchmark programs: lines of AITER's smoke scripts as they are, help, and what is refused."""

import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from exported_calls import Program, write_library
from parity_calls import PARITY, Saved, called_in_python
from subprocesses import run_program
from untyped import fmha_bwd, fmha_fwd

from jitfmha import emulate
from jitfmha.amd.tree import AITER_ASM_DIR, HSA_DIR
from jitfmha.emulator.library import load
from jitfmha.export.kernels import Selection
from jitfmha.kernels.compiled.traits import ForwardTraits

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

READY = Selection(("gfx942",), dtypes=("bf16",))
FORWARD = Selection(("gfx942",), ("forward",), dtypes=("bf16",), hdims=((32, 32),), modes=("gm0",))
BACKWARD = FORWARD._replace(directions=("backward",), masks=("causal",))
NONE, CAUSAL = ("none",), ("causal",)
EXPORTED = (
    FORWARD._replace(
        hdims=((16, 32),), modes=("gm1",), masks=NONE, features=(("bias", "dropout"),)
    ),
    FORWARD._replace(
        masks=CAUSAL, features=(("alibi",), ("dropout",), ("sink_tokens",), ("sinks",))
    ),
    FORWARD._replace(modes=("gm1",), masks=NONE, features=(("paged_keys",), ("softcap",))),
    FORWARD._replace(modes=("gm1",), masks=CAUSAL, features=((), ("paged_keys",)), appends=True),
    FORWARD._replace(modes=("gm1",), masks=CAUSAL, features=(("paged_keys",),), persistent=True),
    FORWARD._replace(
        dtypes=("fp8",), hdims=((128, 128),), masks=NONE, features=(("column_major_v",),)
    ),
    FORWARD._replace(dtypes=("fp32", "int8"), hdims=((24, 24),), masks=NONE),
    FORWARD._replace(modes=("gm1",), masks=NONE, features=(("packed_pages",),), appends=True),
    FORWARD._replace(
        dtypes=("int8",),
        hdims=((24, 24),),
        masks=NONE,
        features=(("token_descales",), ("int8_probabilities",)),
    ),
    FORWARD._replace(masks=NONE, kv_dtype="fp8"),
    FORWARD._replace(dtypes=("bf8",), masks=CAUSAL),
    FORWARD._replace(dtypes=("fp8",), hdims=((40, 40),), masks=NONE, out_dtypes=("fp32",)),
    FORWARD._replace(masks=NONE, features=(("bias",), ("boolean_bias",), ("split_results",))),
    FORWARD._replace(hdims=((64, 64),), masks=CAUSAL, features=((),)),
    BACKWARD._replace(features=(("alibi", "dropout"), ("bias",), ("sinks",))),
    BACKWARD._replace(hdims=((64, 64),)),
    BACKWARD._replace(dtypes=("fp16",), hdims=((80, 80),), modes=("gm1",)),
    BACKWARD._replace(dtypes=("fp32",), hdims=((72, 72),)),
)
# Lines of AITER's op_tests/cpp/mha/smoke_test_*.sh, with values of their loops.
LINES = """\
fwd -prec=bf16 -mode=1 -b=2 -h=2 -h_k=1 -d=16, -d_v=32 -s=55 -s_k=256 -bias=e -p_drop=0.2 -lse=1 \
  -iperm=1 -operm=1 -vlayout=r -num_splits=1 -page_block_size=0 -cache_batch_idx=0 -kname=1 -v=1 \
  -warmup=0 -repeat=1
fwd -prec=bf16 -mode=0 -b=3 -h=2 -h_k=1 -d=32 -s=200 -s_k=520 -bias=a -p_drop=0.0 -lse=0 \
  -iperm=0 -operm=0 -mask=t:128,30 -vlayout=r -num_splits=1 -page_block_size=0 -cache_batch_idx=0 \
  -kname=1 -v=1 -warmup=0 -repeat=1
fwd -prec=bf16 -mode=0 -b=1 -h=2 -h_k=1 -d=32 -s=1 -s_k=10 -s_kpad=32 -bias=n -p_drop=0.2 -lse=1 \
  -iperm=1 -operm=1 -mask=2 -vlayout=r -num_splits=1 -page_block_size=0 -cache_batch_idx=0 \
  -kname=1 -v=1 -warmup=0 -repeat=1
fwd -prec=bf16 -mode=1 -b=1 -h=3 -d=32 -s=100 -s_k=51 -bias=n -p_drop=0.0 -lse=1 -iperm=0 \
  -operm=0 -vlayout=r -num_splits=3 -page_block_size=128 -cache_batch_idx=1 -kname=1 -v=1 \
  -warmup=0 -repeat=1
fwd -prec=fp8 -init=3 -b=2 -h=1 -d=128 -s=128 -bias=n -iperm=1 -operm=1 -vlayout=c -squant=1 \
  -kname=1 -v=1 -warmup=0 -repeat=1
fwd -prec=bf16 -b=2 -h=4 -h_k=2 -d=192 -d_v=128 -s=127 -s_k=129 -iperm=0 -operm=1 -mask=2 -lse=1 \
  -fwd_v3=1 -v3_bf16_cvt=2 -mode=0 -kname=1 -v=1
fwd -prec=bf16 -b=2 -h=4 -h_k=2 -d=128 -d_v=128 -s=127,129 -s_k=129,0 -iperm=0 -operm=0 -mask=2 \
  -lse=1 -fwd_v3=1 -v3_bf16_cvt=0 -mode=1 -kname=1 -v=1
bwd -prec=bf16 -b=2 -h=1 -d=32 -s=987 -s_k=219 -bias=a -dbias=0 -p_drop=0.2 -iperm=1 -operm=1 \
  -mask=t:128,30 -deterministic=0 -v=1 -mode=0 -kname=1 -v=1
bwd -prec=fp16 -b=2 -h=3 -d=80 -s=65 -s_k=127 -iperm=0 -operm=0 -mask=t -bwd_v3=1 -v3_bf16_cvt=0 \
  -v3_atomic_fp32=1 -mode=1 -kname=1 -v=1
bwd -prec=bf16 -b=2 -h=4 -h_k=2 -d=128 -s=64 -s_k=33 -iperm=1 -operm=1 -mask=b -bwd_v3=1 \
  -v3_atomic_fp32=1 -v3_bf16_cvt=1 -mode=0 -kname=1 -v=1
bwd -prec=bf16 -b=2 -h=2 -d=64 -s=192 -s_k=301 -iperm=0 -operm=0 -mask=b:15,-1 -bwd_v3=1 -mode=0 \
  -kname=1 -v=1
"""
# Of options that the scripts do not have.
MORE_LINES = """\
fwd -prec=fp32 -b=1 -h=2 -h_k=0 -d=24 -d_v=0 -s=33 -s_k=40 -init=ni -lse=1 -scale_s=.3
fwd -prec=int8 -b=1 -h=2 -d=24 -s=33 -s_k=40 -init=uf:q -squant=1 -range_q=2 -range_k=2
fwd -prec=bf16 -mode=1 -b=2 -h=2 -d=32 -s=33,5 -s_k=40,70 -s_kpad=50,70 -logits_soft_cap=3
fwd -prec=bf16 -b=1 -h=1 -d=32 -s=40 -s_k=90 -mask=b:16,3,4
fwd -prec=bf16 -mode=1 -h=2 -d=32 -s=150,3,3 -s_k=230,200,70 -page_block_size=16 -mask=2
fwd -prec=bf16 -b=3 -h=2 -h_k=1 -d=32 -s=5 -s_k=70 -s_knew=5 -rotary_dim=16 -mask=2 -lse=1
fwd -prec=bf16 -b=2 -h=2 -d=32 -s=3 -s_k=40 -s_knew=9 -rotary_dim=32 -rotary_interleaved=0 \
  -page_block_size=16 -iperm=0
fwd -prec=bf16 -b=3 -h=2 -d=32 -s=2 -s_k=40 -s_knew=-1 -cache_batch_idx=1 -mask=b:9,0
fwd -prec=bf16 -b=2 -h=2 -d=32 -s=7 -s_k=40 -rotary_dim=8 -mask=2 -iperm=0
fwd -prec=bf16 -b=2 -h=2 -d=32 -s=7 -s_k=40 -page_block_size=5 -mode=0
fwd -prec=bf16 -d=32 -b=2 -h=4 -h_k=2 -s=30 -s_k=76 -sink=1.0 -lse=1 -causal=1 -via=direct
fwd -prec=bf16 -mode=1 -b=2 -h=2 -d=32 -s=33,5 -s_k=40,70 -s_qpad=40,9 -mask=2 -lse=1
fwd -prec=bf16 -b=2 -h=2 -d=32 -s=33 -s_k=70 -q_eff_lens=20,33 -kv_eff_lens=70,41 -mask=2 -lse=1
fwd -prec=bf16 -kv_prec=fp8 -b=2 -h=2 -d=32 -s=33 -s_k=40 -qscale=ph -init=nf
fwd -prec=int8 -b=1 -h=2 -d=24 -s=33 -s_k=40 -init=uf:q -scale_s=1e-4 -qscale=pt -p_descale=1
fwd -prec=int8 -b=2 -h=4 -h_k=2 -d=24 -s=33 -s_k=40 -init=uf:q -scale_s=1e-4 -qscale=pqh
fwd -prec=bf16 -b=1 -h=2 -d=32 -s=33 -s_k=40 -bias=m:1 -lse=1
fwd -prec=bf16 -b=1 -h=2 -d=32 -s=33 -s_k=200 -num_splits=3 -split_results=1 -lse=1
fwd -prec=bf16 -b=2 -h=2 -d=32 -s=3 -s_k=40 -s_knew=9 -page_block_size=16 \
  -kv_memory_layout=vectorized -kv_lookup_table=sglang
fwd -prec=bf16 -mode=1 -b=0 -h=2 -d=64 -lse=1
bwd -prec=bf16 -b=0 -h=2 -d=64
bwd -prec=bf16 -mode=1 -h=0 -h_k=2 -s=3,0 -s_k=4,5 -s_kpad=6,9 -d=64
bwd -prec=bf16 -b=2 -h=4 -h_k=2 -d=32 -s=40 -s_k=30 -mask=2 -sink_grad=1 -dlse=1
bwd -prec=bf16 -b=1 -h=2 -d=32 -s=40 -s_k=50 -bias=e:2 -dbias=1 -mask=xb:8 -init=tf
bwd -prec=fp32 -b=1 -h=2 -h_k=1 -d=72 -s=40 -s_k=50 -mask=g:9,30 -deterministic=1
bwd -prec=fp16 -mode=1 -b=2 -h=2 -h_k=1 -d=80 -s=33,5 -s_k=40,70 -s_qpad=40,9 -s_kpad=50,70 -mask=t
"""


# What the scripts vary: lines with the values of their loops, but for the longest lengths.
_DENSE = (
    "-prec=fp16|bf16 -mode=1|0 {} -bias=n|e|a -p_drop=0.0|0.2 -lse=0|1 -iperm=0|1 -operm=0|1 "
    "{} -vlayout=r|c -num_splits=1|2|3 -page_block_size=0|128 -cache_batch_idx=0|1 -kname=1 "
    "-v=1 -warmup=0 -repeat=1"
)
_APPENDED = (
    "-prec=fp16 -b=3 -h=3 -d=32|64|128|256 -s=63|64|65 -s_k=65|129 -s_knew=0|64|65|129 "
    "-rotary_dim=0|16|32|64 -rotary_interleaved=0|1 -page_block_size=0|128 -cache_batch_idx=0|1 "
    "-iperm=1 -operm=1 -kname=1 -v=1 -warmup=0 -repeat=1"
)
_FP8 = (
    "-prec=fp8 -init=3 -b=1|2 -h=1 -d=128 -s=128 -bias=n|e|a -iperm=0|1 -operm=0|1 "
    "-vlayout=c -squant=1 -kname=1 -v=1 -warmup=0 -repeat=1"
)
_FP32 = (
    "-prec=fp32 -b=1|15 -h=1|9 -d=128 -s=16|31 -s_k=12 -iperm=0|1 -operm=0|1 -bwd_v3=1 "
    "-v3_atomic_fp32=1 -v3_bf16_cvt=0 -kname=1 -v=1"
)
_SINK = (
    "-d=64|128 -b=1|2 -h=8|4 -h_k=1|2|4 -s=30 -s_k=76 -sink=-1e30|1.0|0 -v=1 -causal=1 -warmup=2 "
    "-repeat=3 -via=mha_fwd|direct"
)
_READY = "{} -iperm=0|1 -operm=0|1 -mask=0|1|2 -lse=0|1 -fwd_v3=1 {} -mode={} -kname=1 -v=1"
_GRADIENTS = "-prec=fp16|bf16 {} -iperm=0|1 -operm=0|1 {} -bwd_v3=1 {} -kname=1 -v=1"
_WINDOWS = "t:-1,10|t:15,-1|t:15,15|t:190,187|b:-1,10|b:15,-1|b:15,15|b:190,187"
SCRIPTS = {
    "smoke_test_fwd.sh": (
        _DENSE.format("-b=2 -h=2 -h_k=1 -d=16, -d_v=32|64|128|256 -s=55 -s_k=256", ""),
        _DENSE.format("-b=1 -h=3 -d=32|64|128|256 -s=100 -s_k=51", ""),
        _DENSE.format("-b=2 -h=1 -d=16 -d_v=32|64|128|256 -s=99 -s_k=256", "-mask=1"),
        _DENSE.format("-b=2 -h=1 -d=32|64|128|256 -d_v=24 -s=3 -s_k=99", "-mask=2"),
        _DENSE.format("-b=3 -h=2 -h_k=1 -d=32|64 -s=20 -s_k=52", "-mask=t:128,30"),
        _DENSE.format("-b=2 -h=1 -d=32|64|128|256 -s=99 -s_k=32", "-mask=b:4,35"),
        _DENSE.format("-b=1 -h=2 -h_k=1 -d=32|64|128|256 -s=33 -s_k=0", "-mask=2"),
        _DENSE.format("-b=1 -h=2 -h_k=1 -d=32|64|128 -s=1 -s_k=10 -s_kpad=32", "-mask=2"),
        _FP8,
        _APPENDED,
    ),
    "smoke_test_fwd_v3.sh": (
        # The script sets no rounding where it is for gfx950.
        _READY.format(
            "-prec=bf16 -b=2|1 -h=4|3|1 -h_k=1 -d=128|192 -d_v=128 -s=127 -s_k=0|129", "", "0|1"
        ),
        _READY.format(
            "-prec=bf16 -b=2 -h=4 -h_k=2 -d=128 -s=127,12 -s_k=12,0", "-v3_bf16_cvt=|0|1|2", "1"
        ),
    ),
    "smoke_test_fwd_sink.sh": (_SINK,),
    "smoke_test_bwd_v3.sh": (
        _GRADIENTS.format(
            "-b=2 -h=4 -h_k=2 -d=64|72|96|128|144|176|192 -s=64 -s_k=33",
            "-mask=0|t|b",
            "-v3_atomic_fp32=0|1 -v3_bf16_cvt=0|1|2 -mode=0",
        ),
        _GRADIENTS.format(
            "-b=2|1 -h=3 -d=64|80|96|120|128|144|160|192 -s=65 -s_k=63|12",
            "-mask=0|t|b",
            "-v3_bf16_cvt=0|1|2 -v3_atomic_fp32=1 -mode=1",
        ),
        _GRADIENTS.format("-b=1 -h=2 -d=72|96|128 -s=19 -s_k=30", f"-mask={_WINDOWS}", "-mode=0"),
        _GRADIENTS.format(
            "-b=3 -h=2|4 -h_k=2 -d=192 -d_v=128 -s=62 -s_k=65",
            "-mask=0|1|2",
            "-v3_atomic_fp32=1|0 -mode=0",
        ),
    ),
    "smoke_test_bwd_v3_fp32.sh": (_FP32,),
}


def is_launched(traits: ForwardTraits) -> bool:
    """By some line: none has scales of one tensor alone, or small pages of some kinds."""
    if traits.lists_work and (traits.stacks_heads or traits.access == "paged"):
        return False
    has_both = traits.has_token_k_descales == traits.has_token_v_descales
    return has_both and traits.access != "packed_pages"


@pytest.fixture(scope="module")
def built(built_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """What build_mha.sh makes of a library with both directions."""
    for variable in (HSA_DIR, AITER_ASM_DIR):
        if variable in os.environ:
            pytest.skip(f"{variable} is set, and exports have the kernels of this package")

    def build(folder: Path) -> None:
        write_library(folder / "mha", READY, EXPORTED, keeps=is_launched)
        build_mha(folder)

    return built_once("programs", build)


def build_mha(folder: Path, *ways: str) -> None:
    run_program(*("bash", "mha/build_mha.sh", *ways), cwd=folder, CXXFLAGS="-O0 -Werror -Wall")


@pytest.fixture(scope="module")
def programs(built: Path) -> dict[str, Program]:
    return {way: Program(built / f"{way}.exe", load("plain")._name) for way in ("fwd", "bwd")}


@pytest.mark.parametrize("line", [*LINES.splitlines(), *MORE_LINES.splitlines()])
def test_lines(line, programs, seed, monkeypatch):
    # As the scripts say.
    monkeypatch.setenv("CK_WARMUP", "0")
    monkeypatch.setenv("CK_REPEAT", "1")
    way, *options = line.split()
    said = programs[way].run(*options, f"-seed={seed}")
    assert "valid: y" in said
    assert "is emulated, with no time" in said


@pytest.mark.parametrize("parity", PARITY, ids=lambda each: each.name)
@pytest.mark.sample("draw", range(5), 1)
def test_parity_with_python(draw, parity, programs, seed, tmp_path):
    """Programs and Python take the same kernel, and all bits of its results are the same."""
    drawn = random.Random(seed + draw)
    arguments = parity.arguments(drawn)
    said = programs[parity.way].run(*arguments, f"-seed={seed + draw}", f"-save={tmp_path}")
    saved = Saved(tmp_path, arguments, parity.scores)
    kernel, results = called_in_python(parity, saved)
    assert f", {kernel}," in said
    assert "valid: y" in said
    assert parity.kernel in kernel
    assert (", splits 1," not in said) == parity.is_split
    for name, expected in results.items():
        found = saved.lse() if name == "lse" else saved.tensor(name, expected.dtype)
        assert torch.equal(found, expected), name


def check_built(folder: Path, *ways: str) -> None:
    """Each library has the kernels of its direction alone."""
    names = {f"libmha_{way}.so" for way in ways} | {f"{way}.exe" for way in ways}
    names |= {f"benchmark_mha_{way}" for way in ways} | {"mha"}
    assert {x.name for x in folder.iterdir()} - {"libamdhip64.so"} == names
    for way in ways:
        listed = run_program("nm", "-C", folder / f"libmha_{way}.so").stdout
        other = "bwd" if way == "fwd" else "fwd"
        assert f"gfx942_fmha_{way}_" in listed
        assert f"gfx942_fmha_{other}_" not in listed


def test_build_mha(built):
    check_built(built, "fwd", "bwd")


@pytest.mark.sample("way", ["fwd", "bwd"], 1)
def test_build_mha_without_compiled_kernels(way, tmp_path):
    """Of each kind that a library has, or is built without, there is one kernel."""
    fp16 = Selection(("gfx942",), dtypes=("fp16",), hdims=((64, 64),), modes=("gm0",), masks=NONE)
    write_library(tmp_path / "mha", fp16, [fp16._replace(hdims=((24, 24),))])
    build_mha(tmp_path, f"{way}_v3")
    check_built(tmp_path, way)
    program = Program(tmp_path / f"{way}.exe", load("plain")._name)
    few = ("-prec=fp16", "-b=1", "-h=1", "-s=5", "-repeat=0")
    assert "valid: y" in program.run(*few, "-d=64")
    assert "kernel for fp16, hdim 24x24" in program.run(*few, "-d=24", code=1)
    assert "_compiled_hd" not in run_program("nm", tmp_path / f"libmha_{way}.so").stdout


def test_ways_of_build_mha(tmp_path):
    """What they have a compiler do, by one that does nothing but say it."""
    write_library(tmp_path / "mha", READY._replace(hdims=((64, 64),)))
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\necho "$*"; for output; do :; done; touch "$output"\n')
    compiler.chmod(0o700)

    def commands(*ways: str) -> str:
        command = "bash", "mha/build_mha.sh", *ways
        return run_program(*command, cwd=tmp_path, CXX=str(compiler)).stdout

    both = commands("fwd"), commands("bwd")
    assert commands() == "".join(both)
    for way, all_kernels in zip(("fwd", "bwd"), both, strict=True):
        assert commands(f"{way}_v3").replace(" -DJITFMHA_WITHOUT_COMPILED", "", 1) == all_kernels
        assert f"libmha_{way}.so" in all_kernels
    said = run_program("bash", "mha/build_mha.sh", "all", code=2, cwd=tmp_path).stderr
    assert "takes fwd, bwd, fwd_v3, bwd_v3 or nothing, not all" in said


@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_help(way, programs):
    said = programs[way].run("-?")
    for name in ("bias", "drop_offset", "v3_bf16_cvt=1", "jsonfile", "mask"):
        assert f"\n  -{name}" in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_json(programs, tmp_path):
    file = tmp_path / "figures.json"
    line = "-prec=bf16 -b=1 -h=1 -s=5 -d=64 -warmup=0 -repeat=1 -json=1"
    programs["fwd"].run(*line.split(), f"-jsonfile={file}")
    written = json.loads(file.read_text())
    assert written["emulated"] is True
    assert "seconds" not in written
    assert "b 1, h 1/1, s 5/5" in written["problem"]


@pytest.mark.usefixtures("ready_first")
@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_times_of_the_model(way, built, tmp_path):
    """Those of the launches that Python profiles, for the same call."""
    file = tmp_path / "figures.json"
    line = "-prec=bf16 -v3_bf16_cvt=0 -b=2 -h=3 -s=200 -d=64 -iperm=0 -operm=0 -repeat=1 -json=1"
    program = (built / f"{way}.exe", *line.split(), f"-jsonfile={file}")
    program += ("-num_splits=0",) if way == "fwd" else ()
    said = run_program(sys.executable, "-m", "jitfmha", "run-program", *program).stdout
    assert "by the cost model of AMD Instinct MI300X" in said
    assert "valid: y" in said
    q, k, v, dout = torch.randn(4, 2, 200, 3, 64, dtype=torch.bfloat16)
    with emulate("gfx942", profile=True) as run:
        out, lse = fmha_fwd(q, k, v, return_lse=True)
        of_forward = len(run.profiles())
        if way == "bwd":
            fmha_bwd(dout, q, k, v, out, lse)
        first = of_forward if way == "bwd" else 0
        estimates = [profile.estimate() for profile in run.profiles()[first:]]
    written = json.loads(file.read_text())
    expected = sum(each.seconds for each in estimates if each)
    # But for where tensors begin, and for what launches may touch.
    assert written["seconds"] == pytest.approx(expected, rel=0.1)
    flops = 4 * 2 * 3 * 200**2 * 64 * (2.5 if way == "bwd" else 1)
    assert written["tflops"] == pytest.approx(flops / written["seconds"] / 1e12, rel=1e-4)
    rows = 2 * 3 * 200
    moved = rows * 64 * 2 * (8 if way == "bwd" else 4) + (4 * rows if way == "bwd" else 0)
    assert written["gb_per_second"] == pytest.approx(moved / written["seconds"] / 1e9, rel=1e-4)


def test_what_a_ready_kernel_serves(programs):
    line = "-prec=bf16 -is_v3_check=1 -b=1 -h=1 -s=5"
    assert "serves it: y (fmha_fwd_hd128_bf16_rtna" in programs["fwd"].run(*line.split(), "-d=128")
    assert "serves it: n" in programs["fwd"].run(*line.split(), "-d=32", "-mask=2", "-bias=a")
    assert "serves it: y" in programs["bwd"].run(*line.split(), "-v3_api_check=1")


def expanded(line: str) -> Iterator[list[str]]:
    """Lines in which each value of each option is at least once."""
    options = [option.partition("=") for option in line.split()]
    values = [(name, every.split("|")) for name, _, every in options]
    for i in range(max(len(every) for _, every in values)):
        yield [f"{name}={every[i % len(every)]}" for name, every in values]


@pytest.mark.parametrize("script", SCRIPTS)
def test_options_of_scripts(script, programs, monkeypatch):
    """Each is known with each of its values: a line runs, or no exported kernel has it."""
    monkeypatch.setenv("CK_WARMUP", "0")
    monkeypatch.setenv("CK_REPEAT", "1")
    program = programs["bwd" if "bwd" in script else "fwd"]
    for line in SCRIPTS[script]:
        for options in expanded(line):
            said = program.run(*options, code=None)
            assert re.search("valid: y|python -m jitfmha export|no kernel has pages", said), said


@pytest.mark.parametrize(("options", "is_split"), [((), False), (("-num_splits=0",), True)])
def test_splits_of_ready_kernels(options, is_split, programs):
    few = ("-prec=bf16", "-b=1", "-h=1", "-s=2", "-s_k=2000", "-d=64", "-repeat=0")
    said = programs["fwd"].run(*few, *options)
    assert "valid: y" in said
    assert (", splits 1," not in said) == is_split


def test_what_is_refused(programs):
    forward = programs["fwd"]
    assert "-prec=bf8 is not served" in programs["bwd"].run("-prec=bf8", code=2)
    few = ("-prec=bf16", "-b=1", "-h=1", "-s=3")
    both = forward.run(*few, "-d=32", "-bias=a", "-logits_soft_cap=2", code=1)
    assert "--features alibi+softcap has it" in both
    for option in ("-mask=g:0,1", "-mask=xt:1,2", "-page_block_size=-1", "-bias=z", "-s="):
        assert f"{option} is not served" in forward.run(option, code=2)
    for option in ("-rotary_dim=33", "-rotary_dim=3", "-s_knew=4"):
        assert f"{option} is not served" in forward.run(*few, "-d=32", option, code=2)
    for option in ("-kv_prec=fp4", "-kv_eff_lens=1,2", "-q_eff_lens=4,1", "-split_results=1"):
        assert f"{option} is not served" in forward.run(*few, "-d=32", option, code=2)
    of_blocks = forward.run("-prec=int8", "-qscale=bs", "-d=24", code=1)
    assert "-qscale=bs: no kernel has scales of blocks" in of_blocks
    rotated = forward.run(*few, "-d=64", "-rotary_dim=16", code=1)
    assert "--dtype bf16 --hdims 64 --features append has it" in rotated
