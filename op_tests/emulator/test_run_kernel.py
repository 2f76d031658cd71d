"""`run-kernel`: any kernel with its arguments as data, and what docs/emulator.md shows."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from subprocesses import ROOT, run_forked

from jitfmha import emulate
from jitfmha.cli import main
from jitfmha.jit.toolchain.device_compiler import compile_hip

_SOURCE = """
struct Numbers { signed char i8; unsigned short u16; int i32; unsigned long long u64; double f64; };
extern "C" __global__ void copy(Numbers numbers, const int* from, int* to, int count) {
  const int i = __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x();
  if (i < count) to[i] = from[i] + numbers.i8 + numbers.u16 + numbers.i32 + (int)numbers.u64
                         + (int)numbers.f64;
}
"""
_OTHER_KERNEL = 'extern "C" __global__ void other(int* x) { *x = 1; }'
_SUM_OF_NUMBERS = -5 + 60000 - 70000 + 3 + 8
_NUMBERS = [
    {"type": "i8", "value": -5},
    {"type": "u16", "value": 60000},
    {"type": "i32", "value": -70000},
    {"type": "u64", "value": 3},
    {"type": "f64", "value": 8.0},
]


def _launch(**changes: Any) -> dict[str, Any]:
    launch: dict[str, Any] = {
        "arch": "gfx950",
        "grid": [2],
        "block": [64, 1],
        "tensors": {
            "from": {"dtype": "int32", "shape": [100], "random": 3, "low": 0, "high": 1000},
            "to": {"dtype": "int32", "shape": [10, 10], "fill": -1, "output": True},
        },
        "arguments": [
            *_NUMBERS,
            {"tensor": "from"},
            {"tensor": "to"},
            {"type": "i32", "value": 100},
        ],
    }
    return launch | changes


@pytest.fixture(scope="module")
def code_object() -> bytes:
    return compile_hip(_SOURCE, "gfx950")


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    tmp_path: Path,
    code_object: bytes,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    monkeypatch.setenv("COLUMNS", "400")

    def run_kernel(launch: Any, *flags: str, image: bytes = code_object) -> tuple[int, str, str]:
        (tmp_path / "kernel.co").write_bytes(image)
        text = launch if isinstance(launch, str) else json.dumps(launch)
        (tmp_path / "args.json").write_text(text, encoding="utf-8")
        paths = [str(tmp_path / "kernel.co"), "--args", str(tmp_path / "args.json")]
        capfd.readouterr()
        code = main(["run-kernel", *paths, *flags])
        out, err = capfd.readouterr()
        return code, out, err

    return run_kernel


def _output(path: Path, launch: dict[str, Any]) -> np.ndarray:
    return np.fromfile(path / "to.bin", np.int32).reshape(launch["tensors"]["to"]["shape"])


def test_results_and_files(run, tmp_path):
    values = np.arange(100, dtype=np.int32)
    values.tofile(tmp_path / "from.bin")
    launch = _launch()
    launch["tensors"]["from"] = {"dtype": "int32", "shape": [100], "file": "from.bin"}
    code, out, _ = run(launch, "--out", str(tmp_path / "results"), "--json")
    assert code == 0
    result = json.loads(out)
    assert (result["kernel"], result["arch"]) == ("copy", "gfx950")
    assert result["findings"] == []
    assert result["failure"] is result["profile"] is None
    copied = _output(tmp_path / "results", launch)
    np.testing.assert_array_equal(copied.reshape(-1), values + _SUM_OF_NUMBERS)
    about = result["outputs"]["to"]
    assert about["first"] == copied.reshape(-1)[:6].tolist()
    assert (about["smallest"], about["largest"]) == (copied.min(), copied.max())
    assert about["file"] == str(tmp_path / "results" / "to.bin")


def test_random_content_is_the_same_each_time(run, tmp_path):
    launch = _launch()
    results = []
    for name in ("one", "two"):
        assert run(launch, "--out", str(tmp_path / name), "--random-order", "5")[0] == 0
        results.append(_output(tmp_path / name, launch))
    np.testing.assert_array_equal(*results)
    drawn = results[0] - _SUM_OF_NUMBERS
    assert drawn.min() >= 0
    assert drawn.max() < 1000
    assert len(np.unique(drawn)) > 50


def test_findings_and_the_exit_code(run):
    """They are shown once: on a terminal, standard error is there as well."""
    launch = _launch()
    launch["arguments"][-1]["value"] = 101
    image = compile_hip(_SOURCE.replace("copy", "told_once"), "gfx950")
    code, out, err = run(launch, image=image)
    assert (code, err) == (1, "")
    assert out.count("global-bounds: kernel told_once") == 2  # a load and a store
    assert "which is outside of all memory" in out


def test_instruction_budget(run):
    code, out, _ = run(_launch(), "--instruction-budget", "3")
    assert code == 1
    assert "the wave's budget of 3 instructions is used up" in out
    code, out, _ = run(_launch(), "--instruction-budget", "1000", "--json")
    assert (code, json.loads(out)["failure"]) == (0, None)
    for budget in ("0", "-1", str(2**64)):
        code, out, err = run(_launch(), "--instruction-budget", budget)
        assert (code, out) == (2, "")
        assert f"--instruction-budget: {budget}: not from 1" in err


def test_an_access_between_two_tensors_is_found(run):
    """Whatever lies in memory behind a tensor is no other tensor."""
    launch = _launch(grid=[64])
    launch["tensors"]["from"]["shape"] = [4096]
    launch["arguments"][-1]["value"] = 4096
    code, out, _ = run(launch, "--json")
    assert code == 1
    (finding,) = json.loads(out)["findings"]
    assert (finding["kind"], finding["count"]) == ("global-bounds", 4096 - 100)


def test_profile(run):
    code, out, _ = run(_launch(), "--profile", "--json")
    assert code == 0
    profile = json.loads(out)["profile"]
    assert profile["kernel"] == "copy"
    code, out, _ = run(_launch(), "--profile")
    assert code == 0
    assert "Occupancy" in out or "occupancy" in out


def test_a_kernel_with_faults_has_findings_and_no_profile(run):
    """The sanitizer goes on after an access outside of memory, the cost model does not."""
    launch = _launch()
    launch["arguments"][-1]["value"] = 101
    code, out, err = run(launch, "--profile", "--json")
    assert code == 1
    result = json.loads(out)
    assert {finding["kind"] for finding in result["findings"]} == {"global-bounds"}
    assert result["profile"] is None
    assert "no profile: hipErrorLaunchFailure: kernel copy, at copy+0x" in err
    with emulate("gfx950", profile=True) as later:
        assert later.profiles() == ()


def test_offsets_and_byte_offsets(run, tmp_path):
    launch = _launch(kernarg_bytes=64)
    launch["arguments"] = [
        {"type": "bytes", "value": "fb00 60ea 90eefeff 0300000000000000 0000000000002040"},
        {"offset": 24, "tensor": "from", "byte_offset": 40},
        {"tensor": "to"},
        {"offset": 40, "type": "u32", "value": 90},
    ]
    assert run(launch, "--out", str(tmp_path))[0] == 0
    shifted = _output(tmp_path, launch).reshape(-1)
    assert run(_launch(), "--out", str(tmp_path))[0] == 0
    np.testing.assert_array_equal(shifted[:90], _output(tmp_path, launch).reshape(-1)[10:])
    np.testing.assert_array_equal(shifted[90:], -1)


def _with_tensor(**fields: Any) -> dict[str, Any]:
    launch = _launch()
    launch["tensors"]["to"] = {"dtype": "int32", "shape": [100], "fill": 0} | fields
    launch["tensors"]["to"] = {k: v for k, v in launch["tensors"]["to"].items() if v is not None}
    return launch


def _with_argument(**fields: Any) -> dict[str, Any]:
    return _launch(arguments=[{"type": "i32", "value": 1}, fields])


@pytest.mark.parametrize(
    ("launch", "complaint"),
    [
        ("{", "is not JSON"),
        ("[]", "is [], which is not an object"),
        ({"arch": "gfx950"}, "has no 'grid'"),
        (_launch(gird=[1]), "has 'gird', which is none of"),
        (_launch(arch="gfx90a"), 'arch is "gfx90a"'),
        (_launch(kernel=3), "kernel is 3"),
        (_launch(kernel="nonsense"), "names kernel 'nonsense'"),
        (_launch(grid=[0]), "grid is 0, which is not from 1"),
        (_launch(grid=[1, 1, 1, 1]), "grid is [1, 1, 1, 1]"),
        (_launch(block=[32, 33]), "1056 threads, over 1024"),
        (_launch(dynamic_lds=-1), "dynamic_lds is -1"),
        (_launch(kernarg_bytes=8), "kernarg_bytes is 8, which is not from 44"),
        (_with_tensor(dtype="int4"), 'tensors.to.dtype is "int4"'),
        (_with_tensor(shape=100), "tensors.to.shape is 100"),
        (_with_tensor(shape=[1.5]), "tensors.to.shape is 1.5, which is not an integer"),
        (_with_tensor(fill=None), "tensors.to has no content"),
        (_with_tensor(random=1), "tensors.to has fill and random"),
        (_with_tensor(fill="nan"), 'tensors.to.fill is "nan", which is not an integer'),
        (_with_tensor(fill=2**31), "tensors.to.fill is 2147483648"),
        (_with_tensor(fill=None, random=1), "needs both low and high"),
        (_with_tensor(fill=None, random=1, low=5, high=5), "tensors.to.low is 5"),
        (_with_tensor(low=5), "tensors.to.low is for random content"),
        (_with_tensor(output="yes"), 'tensors.to.output is "yes"'),
        (_with_tensor(fill=None, file="missing.bin"), "missing.bin"),
        (_with_tensor(fill=None, file="args.json"), "and the tensor has 400"),
        (_with_tensor(fill=None, file="../x"), ".file: '../x' is not in the folder"),
        (_with_tensor(fill=None, file="/dev/zero"), ".file: '/dev/zero' is not in the folder"),
        (_launch(tensors={"../to": {}}), 'a key of tensors is "../to", no name'),
        (_launch(tensors={".to": {}}), 'a key of tensors is ".to", no name'),
        (_launch(tensors={"\x1b[2J": {}}), r'a key of tensors is "\u001b[2J", no name'),
        (_with_tensor(dtype="float32", fill=10**4000), "tensors.to.fill is 1000000"),
        ('{"grid": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"grid": ' + "[" * 100_000 + "}", "is not JSON"),
        (_launch(grid=[10**4000]), "grid is 100000"),
        (_with_argument(tensor="nobody"), 'arguments[1].tensor is "nobody"'),
        (_with_argument(type="i24", value=1), 'arguments[1].type is "i24"'),
        (_with_argument(type="i8", value=128), "arguments[1].value is 128"),
        (_with_argument(type="u32", value=-1), "arguments[1].value is -1"),
        (_with_argument(type="i32", value=1.5), "arguments[1].value is 1.5"),
        (_with_argument(type="f16", value=1e6), "arguments[1].value is 1000000.0"),
        (_with_argument(type="bytes", value="xy"), 'arguments[1].value is "xy"'),
        (_with_argument(type="i32"), "arguments[1] has no 'value'"),
        (_with_argument(type="i32", value=1, offset=2), "arguments[1].offset is 2"),
    ],
)
def test_usage_errors(run, launch, complaint):
    code, out, err = run(launch)
    assert (code, out) == (2, "")
    assert complaint in err


def test_files_that_are_no_code_objects(run, tmp_path):
    code, _, err = run(_launch(), image=b"nonsense")
    assert code == 2
    assert "is not a code object" in err
    code, _, err = run(_launch(), image=compile_hip(_SOURCE + _OTHER_KERNEL, "gfx950"))
    assert code == 2
    assert "names no kernel" in err
    assert "copy" in err
    assert "other" in err
    assert main(["run-kernel", str(tmp_path / "none.co"), "--args", "none.json"]) == 2


def test_another_chips_code_object_fails(run):
    code, out, _ = run(_launch(arch="gfx942"), "--json")
    assert code == 1
    assert "gfx950" in json.loads(out)["failure"]


def _documented_commands() -> list[list[str]]:
    text = (ROOT / "docs" / "emulator.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert {command[0] for command in commands} == {"python"}
    return [command[1:] for command in commands]


def test_what_the_document_shows(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    compiled, faulty, mended, clean = _documented_commands()
    for command in (compiled, mended):
        run_forked(*command, cwd=tmp_path)
    printed = " ".join(run_forked(*faulty, code=1, cwd=tmp_path).stdout.split())
    # A compiler of another version makes other instructions of it; the faults stay.
    document = (ROOT / "docs" / "emulator.md").read_text(encoding="utf-8")
    shown = " ".join(re.findall(r"```text\n(.*?)```", document, re.DOTALL)[0].split())
    for words in (
        "workgroup (2, 0, 0), wave 0, lane 0: store of 4 bytes at",
        "which is outside of all memory that the launch was given (2 times)",
        "lds-race: kernel row_sums",
        "reads LDS at 0x200, which wave 2 wrote by `ds_write_b32",
        "writes LDS at 0x200, which wave 0 read, without a barrier between",
    ):
        assert words in shown, words
        assert words in printed, words
    numbers = [text.count(" times)") for text in (shown, printed)]
    assert "These are the first four; more follow:" in document
    assert numbers[0] == 4 < numbers[1]
    run_forked(*clean, cwd=tmp_path)
    rows = np.fromfile(tmp_path / "results" / "sums.bin", np.float32)
    assert rows.shape == (10,)
    assert np.isfinite(rows).all()
