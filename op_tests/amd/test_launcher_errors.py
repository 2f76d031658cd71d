"""The launcher on a runtime that fails: nothing is left behind, and the next attempt is whole."""

import csv
import secrets
from pathlib import Path

import pytest
import torch
from plain_tree import UseTree, write_manifest
from torch import Tensor
from untyped import fmha_fwd

from jitfmha import HipError
from jitfmha.jit.resources import hsa_dir

KERNEL = "fmha_fwd_hd128_bf16_rtne"


@pytest.fixture(autouse=True)
def unloaded_kernel(tmp_path: Path, use_tree: UseTree, ready_first: None) -> None:
    """A shipped kernel with a ``combine``, alone in a tree, in a file not loaded before."""
    shipped = hsa_dir() / "gfx942" / "fmha_v3_fwd"
    with (shipped / "fmha_fwd.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        (row,) = (row for row in reader if row["knl_name"] == KERNEL)
        columns = [name for name in row if name != "sha256"]
    folder = tmp_path / "gfx942" / "fmha_v3_fwd"
    write_manifest(folder, [dict(row)], columns=columns)
    image = (shipped / row["co_name"]).read_bytes()
    (folder / row["co_name"]).write_bytes(image + secrets.token_bytes(16))
    use_tree(tmp_path)


def split_call(rng: torch.Generator) -> Tensor:
    """A call of two launches: the keys are split, and then the parts combined."""
    q, k, v = (torch.randn(1, rows, 1, 128, generator=rng).bfloat16() for rows in (64, 4096, 4096))
    return fmha_fwd(q, k, v)


@pytest.mark.parametrize(
    ("function", "after"),
    [
        ("hipGetDevice", 0),
        ("hipSetDevice", 0),
        ("hipModuleLoadData", 0),
        ("hipModuleGetFunction", 0),
        ("hipModuleGetFunction", 1),  # that of `combine`
        ("hipModuleLaunchKernel", 0),
        ("hipModuleLaunchKernel", 1),
    ],
)
def test_a_failure_leaves_no_trace(rng, runtime, function, after):
    """The device that was current is again, no error stays for torch to find, no module is lost.

    Every attempt fails like the first, with HIP's name, number and text, and the one after the
    fault is whole: both launches of a call with split keys, in their order.
    """
    with runtime.on_device(2), runtime.stands_for(runtime.target("MI300X", 3)):
        for _ in range(3):
            runtime.fail(function, 719, after=after)
            with pytest.raises(HipError) as raised:
                split_call(rng)
            runtime.fail(function, 0)
            assert raised.value.code == 719
            if "Module" in function:
                place = (function, KERNEL.removeprefix("fmha_"), "device 3")
                for part in (*place, "hipErrorOfTheRecorder (719)", "told to fail"):
                    assert part in str(raised.value)
            assert runtime.last_error == 0
            assert runtime.current_device == 2
        failed_launches, failed_loads = runtime.launch_count, len(runtime.loads())
        split_call(rng)
        assert runtime.current_device == 2
    symbols = [launch.symbol.decode() for launch in runtime.launches()[failed_launches:]]
    assert symbols == [KERNEL, f"{KERNEL}_combine"]
    assert {launch.device for launch in runtime.launches()} == {3}
    is_look_up = function == "hipModuleGetFunction"
    assert runtime.unload_count == (failed_loads if is_look_up else 0)


def test_a_device_that_does_not_come_back_leaves_no_error(rng, runtime):
    """The launch has been made: it is no failure, and nothing of torch's may look like one."""
    with runtime.on_device(2), runtime.stands_for(runtime.target("MI300X", 3)):
        split_call(rng)
        runtime.fail("hipSetDevice", 719, after=3)
        split_call(rng)
        assert runtime.last_error == 0
        runtime.fail("hipSetDevice", 0)


def test_an_unknown_attribute_leaves_no_error(rng, runtime):
    """The number of XCDs is asked of every runtime, and older ones do not know it."""
    with runtime.stands_for(runtime.target("MI300X", 1)):
        split_call(rng)
    assert runtime.last_error == 0
