"""Which instruction set a CPU's kernels are compiled for: by the processor, or as it is told."""

from collections.abc import Callable

import pytest
import torch
from inputs import random_qkv
from untyped import explain

from jitfmha.cli import doctor
from jitfmha.planning import target
from jitfmha.planning.target import CpuTarget, cpu_isas_here, cpu_target

Choose = Callable[..., CpuTarget]

FLAGS = ("avx2", "avx512", "avx512_bf16", "amx_tile")
# The flags that a processor has, whether it is AMD's, what follows, and a word of the reason.
PROCESSORS = [
    ("", False, "generic", "most"),
    ("avx2", False, "avx2", "most"),
    ("avx2 avx512", False, "avx512", "most"),
    ("avx2 avx512 avx512_bf16", False, "avx512", "half the rate"),
    ("avx2 avx512 avx512_bf16", True, "avx512_bf16", "twice the rate"),
    ("avx2 avx512 avx512_bf16 amx_tile", False, "amx", "tiles"),
]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """The target of a processor with these flags."""
    monkeypatch.delenv("JITFMHA_CPU_ISA", raising=False)
    monkeypatch.setattr(target.platform, "machine", lambda: "x86_64")

    def chosen(flags: str, is_amd: bool, serves_tiles: bool = True) -> CpuTarget:
        for flag in FLAGS:
            has = flag in flags.split()
            monkeypatch.setattr(torch.cpu, f"_is_{flag}_supported", lambda has=has: has)
        monkeypatch.setattr(torch.cpu, "_init_amx", lambda: serves_tiles)
        monkeypatch.setattr(target, "_is_made_by_amd", lambda: is_amd)
        return cpu_target.__wrapped__()

    return chosen


@pytest.mark.parametrize(("flags", "is_amd", "isa", "word"), PROCESSORS)
def test_by_processor(choose, flags, is_amd, isa, word):
    chosen = choose(flags, is_amd)
    assert chosen.isa == isa
    assert word in chosen.why


def test_the_operating_system_refuses_tiles(choose):
    chosen = choose(PROCESSORS[-1][0], False, serves_tiles=False)
    assert chosen.isa == "avx512"
    assert "the operating system refuses" in chosen.why


def test_arm(monkeypatch):
    monkeypatch.setattr(target.platform, "machine", lambda: "aarch64")
    assert cpu_isas_here()[0] == "neon"


def test_as_told(choose, monkeypatch):
    monkeypatch.setenv("JITFMHA_CPU_ISA", "avx2")
    chosen = choose("avx2 avx512", False)
    assert chosen.isa == "avx2"
    assert "JITFMHA_CPU_ISA" in chosen.why
    for wanted, words in (("amx", "does not have"), ("AVX2", "'AVX2'; choose one of amx, ")):
        monkeypatch.setenv("JITFMHA_CPU_ISA", wanted)
        with pytest.raises(ValueError, match=f"JITFMHA_CPU_ISA is .*{words}"):
            choose("avx2 avx512", False)


def test_doctor_and_explain_say_why(rng, monkeypatch, run):
    monkeypatch.setenv("JITFMHA_CPU_ISA", "amx_emulated")
    for module in ("jitfmha.planning.target", "jitfmha.call.detection"):
        monkeypatch.setattr(f"{module}.cpu_target", cpu_target.__wrapped__)
    monkeypatch.setattr(doctor, "_CHECKS", (doctor._check_environment, doctor._check_cpu))
    result = run("doctor")
    assert result.code == 0
    assert "cpu (amx_emulated): JITFMHA_CPU_ISA says so" in result.out
    assert "JITFMHA_CPU_ISA=amx_emulated" in result.out

    q, k, v = random_qkv(rng)
    assert "amx_emulated is taken because JITFMHA_CPU_ISA says so" in str(
        explain(*(x.bfloat16() for x in (q, k, v)))
    )
    assert "This kernel takes generic" in str(explain(q, k, v))


def test_build_for_another_processor(run):
    argv = ("build", "--dtype", "bf16", "--hdim", "8", "--mask", "none", "--mode", "gm0", "--isa")
    assert "cpu_fwd_bf16_8x8_none_gm0_generic" in run(*argv, "generic").out
    foreign = "neon" if "neon" not in cpu_isas_here() else "avx2"
    for isa, complaint in (("sse2", "isa is 'sse2'"), (foreign, "compiler does not build")):
        result = run(*argv, isa)
        assert result.code == 2
        assert complaint in result.err
