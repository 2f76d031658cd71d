"""``python -m jitfmha hip``: ordinary HIP kernels, without ROCm's headers."""

import json
from pathlib import Path

import numpy as np
import pytest

from jitfmha.cli import main

_LANES = 64
_FUNCTIONS = {
    "expf(x)": np.exp,
    "exp2f(x)": np.exp2,
    "logf(fabsf(x))": lambda x: np.log(np.abs(x)),
    "log2f(fabsf(x))": lambda x: np.log2(np.abs(x)),
    "sqrtf(fabsf(x))": lambda x: np.sqrt(np.abs(x)),
    "rsqrtf(fabsf(x))": lambda x: 1 / np.sqrt(np.abs(x)),
    "__expf(x)": np.exp,
    "__fdividef(1, x)": lambda x: 1 / x,
    "tanhf(x)": np.tanh,
    "floorf(x)": np.floor,
    "rintf(x)": np.rint,
    "truncf(x)": np.trunc,
    "fmaf(x, x, 1)": lambda x: x * x + 1,
    "max(x, 0.5f)": lambda x: np.maximum(x, 0.5),
    "__half2float(__float2half(x))": lambda x: x.astype(np.float16),
    "__half2float(__hfma(x, x, 1))": lambda x: _fp16_fma(x),
    "__uint_as_float(__brev(__brev(__float_as_uint(x))))": lambda x: x,
    "__shfl_xor(x, 5)": lambda x: _of_lanes(x, lambda lane: lane ^ 5),
    "__shfl_up(x, 3)": lambda x: _of_lanes(x, lambda lane: lane - 3 if lane >= 3 else lane),
    "__shfl_down(x, 3, 16)": lambda x: _of_lanes(
        x, lambda lane: lane + 3 if lane % 16 < 13 else lane
    ),
    "__shfl(x, 70, 32)": lambda x: _of_lanes(x, lambda lane: lane // 32 * 32 + 6),
    "static_cast<float>(__shfl(static_cast<double>(x), 9))": lambda x: _of_lanes(x, lambda _: 9),
    "static_cast<float>(__popcll(__ballot(x > 0)))": lambda x: np.repeat(
        (x.reshape(-1, _LANES) > 0).sum(1), _LANES
    ),
    "threadIdx.x + 1000.0f * blockIdx.y": lambda x: [
        n % 128 + 1000 * (n // 128) for n in range(x.size)
    ],
    "blockDim.x + 1000.0f * gridDim.y + 7 * gridDim.x": lambda x: np.full(x.shape, 128 + 2007.0),
}
# What the chips' own instructions are allowed, and what rounding once gives.
_ROUGHLY, _EXACTLY = 1e-5, 3e-7


def _of_lanes(x, source):
    waves = x.reshape(-1, _LANES)
    return np.stack([[wave[source(lane)] for lane in range(_LANES)] for wave in waves]).reshape(-1)


def _fp16_fma(x):
    rounded = x.astype(np.float16).astype(np.float64)
    return (rounded * rounded + 1).astype(np.float16)


_SOURCE = """
#include <hip/hip_bf16.h>
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
functions(const float* values, float* results, __hip_bfloat16* rounded, int* counts) {
  HIP_DYNAMIC_SHARED(float, shared)
  const int n = blockIdx.y * blockDim.x + threadIdx.x;
  const int all = gridDim.y * blockDim.x;
  shared[threadIdx.x] = values[n];
  __syncthreads();
  const float x = shared[kThreads - 1 - threadIdx.x];
  int row = 0;
  %s
  rounded[n] = __float2bfloat16(x);
  atomicAdd(counts, 1);
  atomicMax(counts + 1, n);
  atomicCAS(counts + 2, 0, 5);
  atomicSub(counts + 3, 2u);
}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "functions.hip"
    lines = "\n  ".join(f"results[row++ * all + n] = {text};" for text in _FUNCTIONS)
    path.write_text(_SOURCE % lines)
    return path


def test_functions(source, arch, rng, tmp_path):
    size = 256
    generator = np.random.default_rng(rng.initial_seed())
    values = np.exp(generator.uniform(-6, 2, size))
    values = (values * generator.choice([-1, 1], size)).astype(np.float32)
    values.tofile(tmp_path / "values.bin")
    launch = {
        "arch": arch,
        "grid": [1, 2],
        "block": [128],
        "dynamic_lds": 512,
        "tensors": {
            "values": {"dtype": "float32", "shape": [size], "file": "values.bin"},
            "results": {
                "dtype": "float32",
                "shape": [len(_FUNCTIONS), size],
                "fill": "nan",
                "output": True,
            },
            "rounded": {"dtype": "bfloat16", "shape": [size], "fill": "nan", "output": True},
            "counts": {"dtype": "int32", "shape": [4], "fill": 0, "output": True},
        },
        "arguments": [{"tensor": name} for name in ("values", "results", "rounded", "counts")],
    }
    description = tmp_path / "launch.json"
    description.write_text(json.dumps(launch))
    arguments = ["--args", str(description), "--out", str(tmp_path)]
    assert main(["run-kernel", str(source), *arguments]) == 0
    x = values.reshape(2, 128)[:, ::-1].reshape(-1)
    results = np.fromfile(tmp_path / "results.bin", np.float32).reshape(len(_FUNCTIONS), size)
    for (text, function), result in zip(_FUNCTIONS.items(), results, strict=True):
        expected = np.asarray(function(x.astype(np.float64)), np.float64)
        is_rough = text.startswith(("__expf", "__fdividef", "rsqrtf", "tanhf", "exp", "log"))
        bound = _ROUGHLY if is_rough else _EXACTLY
        least = 1 if text.startswith("log") else 1e-2
        error = np.abs(result - expected) / np.maximum(np.abs(expected), least)
        assert error.max() <= bound, f"{text}: {error.max()}"
    bits = np.fromfile(tmp_path / "rounded.bin", np.uint16).astype(np.uint32) << 16
    assert np.abs(bits.view(np.float32) / x - 1).max() <= 2**-8
    assert np.fromfile(tmp_path / "counts.bin", np.int32).tolist() == [size, size - 1, 5, -2 * size]


def test_what_the_compiler_says_is_shown(tmp_path, capsys):
    path = tmp_path / "wrong.hip"
    path.write_text("__global__ void wrong(float* x) { x[threadIdx.x] = nothing; }\n")
    assert main(["hip", str(path), "--arch", "gfx950", "-o", str(tmp_path / "wrong.co")]) == 1
    said = capsys.readouterr().err
    assert f"{path}:1:" in said
    assert "nothing" in said
    assert "Traceback" not in said
    assert not (tmp_path / "wrong.co").exists()


def test_macros_and_headers(tmp_path, capsys):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sizes.h").write_text("constexpr int kSize = SIZE;\n")
    path = tmp_path / "sized.hip"
    path.write_text(
        '#include "sizes.h"\nextern "C" __global__ void sized(int* x) { *x = kSize; }\n'
    )
    output = tmp_path / "sized.co"
    flags = ["-D", "SIZE=64", "-I", str(tmp_path / "own"), "--json"]
    assert main(["hip", str(path), "--arch", "gfx942", "-o", str(output), *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "file": str(output),
        "bytes": output.stat().st_size,
        "kernels": ["sized"],
    }


def test_no_such_file(tmp_path, capsys):
    missing = str(tmp_path / "none.hip")
    assert main(["hip", missing, "--arch", "gfx942", "-o", "none.co"]) == 2
    assert f"there is no file {missing}" in capsys.readouterr().err
