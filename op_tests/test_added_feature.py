"""A score feature that is added as CONTRIBUTING.md says: a row of the table, and a line of C++."""

import shutil
from pathlib import Path

from subprocesses import run_forked

REPOSITORY = Path(__file__).parents[1]
ROW = """
class _Added(Enum):
    SHARPNESS = "sharper scores"


SCORE_FEATURES.append(
    ScoreFeature(
        name="sharpness",
        schema="float",
        default=0.0,
        features=(_Added.SHARPNESS,),
        flag="Sharpness",
        word="sharp",
        check=float,
        served_by=frozenset({"cpu"}),
    )
)
"""
PLAIN_SCALE = "Scores(shape.softmax_scale, shape, given)"
SHARPER_SCALE = (
    "Scores(kSharpness ? shape.softmax_scale * shape.sharpness : shape.softmax_scale, shape, given)"
)
CALLS = """
import torch
from jitfmha.call.dispatch import plan_for
from jitfmha.call.run import run
from jitfmha.planning.target import cpu_target
from jitfmha.call.detection import planned_target
from jitfmha.problem.arguments import Arguments
from jitfmha.problem.problem import make_problem

q, k, v = torch.randn(3, 2, 5, 2, 8, generator=torch.Generator().manual_seed(SEED))

def computed(**options):
    out, _ = run(Arguments.of(q, k, v, options))
    return out

for sharpness in (2.0, 0.5, 3.0):
    expected = computed(softmax_scale=0.25 * sharpness)
    assert not torch.allclose(computed(softmax_scale=0.25), expected)
    torch.testing.assert_close(computed(softmax_scale=0.25, sharpness=sharpness), expected)

assert torch.equal(computed(sharpness=0.0), computed())
problem = make_problem(Arguments.of(q, k, v, {"sharpness": 2.0}))
assert plan_for(problem, cpu_target()).kernel.split("_")[4:6] == ["none", "sharp"]
for operator in (torch.ops.jitfmha.fmha_fwd, torch.ops.jitfmha.fmha_bwd):
    assert "float sharpness=0" in str(operator.default._schema), operator.default._schema
try:
    plan_for(problem._replace(dtype="bf16", kv_dtype="bf16"), planned_target("gfx942"))
except NotImplementedError as error:
    assert str(error).count("It does not serve sharper scores.") == 2, error
else:
    raise AssertionError("a kernel that knows nothing of it would have served the call")
"""


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, path
    path.write_text(text.replace(old, new))


def test_a_row_and_a_line_add_a_feature_to_the_cpu(tmp_path, seed):
    for folder in ("jitfmha", "csrc_templates"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=ignored)
    (tmp_path / "hsa").symlink_to(REPOSITORY / "hsa")
    table = tmp_path / "jitfmha" / "problem" / "score_features.py"
    changed(table, "\nTENSOR_FEATURES = ", f"{ROW}\nTENSOR_FEATURES = ")
    changed(tmp_path / "csrc_templates" / "cpu" / "scores.h", PLAIN_SCALE, SHARPER_SCALE)
    environment = {"PYTHONPATH": str(tmp_path), "JITFMHA_CPU_ISA": "generic"}
    run_forked("-c", CALLS.replace("SEED", str(seed)), cwd=tmp_path, **environment)
