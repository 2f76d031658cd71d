"""What is taken from torch that is not public stands in one module, and may be missing."""

import re
import shutil
from pathlib import Path

from subprocesses import run_forked

REPOSITORY = Path(__file__).parents[1]
PARTS = Path("jitfmha", "problem", "torch_parts.py")
PRIVATE = re.compile(r"\btorch(\.\w+)*\._[a-zA-Z]|from torch[\w.]* import (\w+, )*_")
# A torch that lacks them all.
MISSING = {
    "        return reduce(getattr, path.split(": '        if "._" in f".{path}":\n'
    "            raise AttributeError(path)\n"
    "        return reduce(getattr, path.split(",
    "forward_ad._current_level": "forward_ad.missing",
    "profiler._is_profiler_enabled": "profiler.missing",
    'getattr(forward_ad, "_current_level"': 'getattr(forward_ad, "missing"',
    'getattr(profiler, "_is_profiler_enabled"': 'getattr(profiler, "missing"',
    "from torch._functorch.utils import": "from torch.missing import",
    "from torch.utils._device import": "from torch.missing import",
    "from torch.utils._python_dispatch import": "from torch.missing import",
    "torch._C.DispatchKey,": "torch._C.missing,",
}
CALLS = """
import torch
import torch.nn.functional as F
from torch.profiler import profile
import jitfmha
from jitfmha.integrations import sdpa
from jitfmha.problem import torch_parts
from jitfmha.problem.float64_reference import attention

rng = torch.Generator().manual_seed(SEED)
q, k, v = torch.randn(3, 2, 5, 2, 8, generator=rng)
expected, _ = attention(q, k, v)

def check(out, tolerance=1e-5):
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)

assert torch_parts.is_watched(q, q, q), "nobody knows who watches"
assert not torch_parts.has_autograd_kernels
check(jitfmha.fmha_fwd(q, k, v))
check(jitfmha.fmha_fwd(q, k, v, out=torch.empty_like(q)))
inputs = [x.clone().requires_grad_() for x in (q, k, v)]
torch.autograd.backward(jitfmha.fmha_fwd(*inputs), torch.ones_like(q))
exact = [x.double().requires_grad_() for x in (q, k, v)]
torch.autograd.backward(attention(*exact)[0], torch.ones(q.shape, dtype=torch.float64))
for x, y in zip(inputs, exact, strict=True):
    torch.testing.assert_close(x.grad.double(), y.grad, atol=1e-5, rtol=1e-5)
with torch.autocast("cpu", torch.bfloat16):
    half = jitfmha.fmha_fwd(q, k, v)
assert half.dtype == torch.bfloat16
check(half, 0.05)
check(torch.vmap(jitfmha.fmha_fwd)(q[None], k[None], v[None])[0])
with profile():
    check(jitfmha.fmha_fwd(q, k, v))
heads_first = [x.transpose(1, 2) for x in (q, k, v)]
with sdpa.patch():
    check(F.scaled_dot_product_attention(*heads_first).transpose(1, 2))
print(jitfmha.explain(q, k, v).target)
"""


def private_parts(text: str) -> list[str]:
    lines = (line.partition("#")[0] for line in text.splitlines())
    return [line.strip() for line in lines if PRIVATE.search(line)]


def test_they_stand_in_one_module():
    assert private_parts((REPOSITORY / PARTS).read_text())
    for path in sorted(REPOSITORY.glob("jitfmha/**/*.py")):
        if path != REPOSITORY / PARTS:
            assert private_parts(path.read_text()) == [], path


def test_calls_are_right_without_them(tmp_path, seed):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "jitfmha", tmp_path / "jitfmha", ignore=ignored)
    for folder in ("csrc_templates", "hsa"):
        (tmp_path / folder).symlink_to(REPOSITORY / folder)
    text = (tmp_path / PARTS).read_text()
    for part, missing in MISSING.items():
        assert part in text, part
        text = text.replace(part, missing)
    (tmp_path / PARTS).write_text(text)
    environment = {"PYTHONPATH": str(tmp_path), "JITFMHA_CPU_ISA": "generic"}
    done = run_forked("-c", CALLS.replace("SEED", str(seed)), cwd=tmp_path, **environment)
    assert "cpu (generic)" in done.stdout
