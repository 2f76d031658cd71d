"""The runner for tests that other packages wrote: what it counts, and when it fails."""

from pathlib import Path

import pytest
from subprocesses import run_forked

RUN = Path(__file__).parent / "peers" / "run.py"
TESTS = """
import pytest
import torch
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.bert_padding import pad_input
from flash_attn.flash_attn_interface import USE_TRITON_ROCM
from flash_attn.layers.rotary import apply_rotary_emb

assert torch.cuda.get_device_capability("cuda") == (9, 0)


def inputs():
    return torch.randn(3, 1, 8, 2, 16, device="cuda")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen,d", [(8, 16), (9, 16), (4096, 16)])
def test_that_passes(seqlen, d, causal):
    assert flash_attn_func(*inputs(), causal=causal).shape == (1, 8, 2, 16)
    with pytest.raises(RuntimeError, match="softmax_scale"):
        flash_attn_func(*inputs(), softmax_scale=-1)


@pytest.mark.parametrize("reason", ["asked", "contradiction"])
def test_that_is_skipped(reason):
    if reason == "asked":
        pytest.skip()
    assert 9 % 8 == 0


@pytest.mark.skipif(not USE_TRITON_ROCM, reason="another system")
def test_that_is_switched_off():
    raise AssertionError


def test_of_internals():
    from flash_attn.flash_attn_interface import flash_attn_gpu
"""
FAULTS = """

@pytest.mark.parametrize("right", [True, False])
def test_that_fails(right):
    out = flash_attn_func(*inputs())
    assert out.isnan().any() or right, "wrong numbers"


def test_of_what_is_not_there():
    from flash_attn.flash_attn_interface import something_else
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the runner needs of flash-attn's repository."""
    files = {
        "tests/test_flash_attn.py": TESTS,
        "flash_attn/layers/rotary.py": (
            "from flash_attn.ops.triton.rotary import apply_rotary\ndef apply_rotary_emb(): ..."
        ),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def run(checkout: Path, *options: str) -> tuple[int, list[str]]:
    """The exit code, and the lines of the output, behind those of stderr: it tells of builds."""
    suite = ("--suite", "flash-attn", "--tests", checkout)
    ended = run_forked(RUN, *suite, *options, code=None)
    return ended.returncode, (ended.stderr + ended.stdout).splitlines()


def test_all_as_expected(checkout):
    code, lines = run(checkout, "--longest", "100", "--seed", "3")
    assert code == 0, lines
    assert "flash-attn, --seed 3" in lines
    assert lines[-1] == "4 passed, 1 refused, 2 skipped, 2 too long"
    assert "refused, as expected: 1 for an internal function of flash-attn" in lines


def test_faults_are_told(checkout):
    tests = checkout / "tests/test_flash_attn.py"
    tests.write_text(TESTS + FAULTS, encoding="utf-8")
    code, lines = run(checkout, "--sample", "8", "--longest", "100")
    assert code == 1
    assert "FAULT test_that_fails(right=False)" in lines
    assert "  AssertionError: wrong numbers" in lines
    assert any(line == "  NotImplementedError: there is no something_else" for line in lines)
    assert "1 failed" in lines[-1]
    assert "1 refused unexpectedly" in lines[-1]


def test_one_test_and_no_checkout(checkout, tmp_path):
    code, lines = run(checkout, "--only", "test_that_is_skipped")
    assert code == 0
    assert lines[-1] == "2 skipped"
    code, lines = run(tmp_path / "nowhere")
    assert code == 2
    assert "is no checkout of Dao-AILab/flash-attention" in lines[-1]
