"""Streams, devices, graphs, threads and torch.compile: what runs when, where, and again."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from amd_problems import FP8, AmdProblem
from torch import Tensor
from torch.utils._triton import has_triton

ROUNDING = 2**-8
LATE = 200_000_000  # cycles: a tenth of a second
FIRST, OTHER, TOO_LONG = (  # of one sum
    ((300, 500), (200, 400), (100, 100)),
    ((100, 100), (299, 650), (201, 250)),
    ((520, 800), (40, 100), (40, 100)),
)


def gm0(rng: torch.Generator, device: torch.device, **changes: object) -> AmdProblem:
    """Of two launches, as the keys are split."""
    shape: dict[str, object] = {"lengths": ((70, 3000),), "batch": 2, "heads": (4, 2), "mask": 2}
    return AmdProblem(rng, device=device, **shape | changes)  # type: ignore[arg-type]


def gm1(
    rng: torch.Generator, device: torch.device, lengths: tuple[tuple[int, int], ...] = FIRST
) -> AmdProblem:
    options = {"max_seqlen_q": 300}
    return AmdProblem(rng, lengths=lengths, mask=2, device=device, options=options)


def become(call: AmdProblem, other: AmdProblem) -> None:
    """The tensors stay where they are, and get the values of another call."""
    for name in "qkv":
        getattr(call, name).copy_(getattr(other, name))
    for name, value in call.arguments.items():
        if isinstance(value, Tensor):
            value.copy_(other.arguments[name])


# ---- Streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gm0, gm1])
def test_a_call_waits_for_its_stream(gpu, rng, make):
    """Its inputs come late, and on its own stream only."""
    assert callable(make)
    call, late = make(rng, gpu), make(rng, gpu)
    call.run()
    torch.cuda.synchronize(gpu)
    stream = torch.cuda.Stream(gpu)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE)
        become(call, late)
        actual = call.launch()
    stream.synchronize()
    late.assert_right(actual, ROUNDING)


def test_streams_at_once(gpu, rng):
    calls = [gm0(rng, gpu) for _ in range(6)]
    torch.cuda.synchronize(gpu)
    results = []
    for call in calls:
        with torch.cuda.stream(torch.cuda.Stream(gpu)):
            results.append(call.launch())
    torch.cuda.synchronize(gpu)
    for call, actual in zip(calls, results, strict=True):
        call.assert_right(actual, ROUNDING)


# ---- Two GPUs ------------------------------------------------------------------------------------


def test_two_gpus(two_gpus, rng):
    """Whichever is current: the tensors say where a call runs."""
    calls = [make(rng, device) for make in (gm0, gm1) for device in two_gpus]
    for current in two_gpus:
        with torch.cuda.device(current):
            results = [call.launch() for call in calls]
            assert torch.cuda.current_device() == current.index
        for call, actual in zip(calls, results, strict=True):
            assert actual[0].device == call.device
            call.assert_right(actual, ROUNDING)


# ---- Graphs --------------------------------------------------------------------------------------


def capture_and_replay(rng: torch.Generator, device: torch.device) -> None:
    call = gm0(rng, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = call.launch()
    for _ in range(2):
        values = gm0(rng, device)
        become(call, values)
        graph.replay()
        values.assert_right(actual, ROUNDING)


def test_graph(gpu, rng):
    gm0(rng, gpu).run()
    capture_and_replay(rng, gpu)


def test_graph_without_a_call_before(gpu, seed):
    """The launcher is built and the kernel loaded while the stream is captured."""
    folder = Path(__file__).parent
    program = (
        f"import sys, torch; sys.path[:0] = {[str(folder), str(folder.parent)]}\n"
        "from test_gpu_order import capture_and_replay\n"
        f"rng, device = torch.Generator().manual_seed({seed}), torch.device('{gpu}')\n"
        "torch.cuda.set_device(device)\n"
        "capture_and_replay(rng, device)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_graph_with_other_lengths(gpu, rng):
    """Lengths are read when the graph runs; those beyond the promise are cut there."""
    call = gm1(rng, gpu)
    call.run()
    surrounding = torch.full((3, *call.q.shape), 7.0, dtype=call.dtype, device=gpu)
    call.arguments["out"] = surrounding[1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = call.launch()
    del call.arguments["out"]
    for lengths in (FIRST, OTHER, TOO_LONG, OTHER):
        values = gm1(rng, gpu, lengths)
        become(call, values)
        graph.replay()
        values.assert_right(actual, ROUNDING, max_seqlen_q=300)
        assert (surrounding[[0, 2]] == 7).all()


def test_graph_of_fp8_without_scales(gpu, arch, rng):
    """The scale of 1 is not the graph's: it is there before, on other streams, and after."""
    changes = {"dtype": FP8[arch], "mask": 0, "softmax_scale": 0.05}
    call, other = gm0(rng, gpu, **changes), gm0(rng, gpu, **changes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.launch()
    with torch.cuda.stream(torch.cuda.Stream(gpu)):
        actual = other.launch()
    torch.cuda.synchronize(gpu)
    other.assert_right(actual, 2**-3)
    del graph
    torch.cuda.empty_cache()
    other.assert_right(other.run(), 2**-3)


# ---- Threads -------------------------------------------------------------------------------------


def test_threads(gpu, rng):
    """Each on a stream of its own, all from the first call on."""
    threads = 8
    calls = [(gm0, gm1)[i % 2](rng, gpu) for i in range(threads)]
    barrier = threading.Barrier(threads)
    torch.cuda.synchronize(gpu)

    def call_often(call: AmdProblem) -> tuple[Tensor, Tensor]:
        with torch.cuda.stream(torch.cuda.Stream(gpu)):
            barrier.wait()
            for _ in range(20):
                actual = call.launch()
            torch.cuda.current_stream(gpu).synchronize()
        return actual

    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(call_often, calls))
    for call, actual in zip(calls, results, strict=True):
        call.assert_right(actual, ROUNDING)


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gm0, gm1])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(gpu, rng, backend, make):
    assert callable(make)
    if backend == "inductor" and not has_triton():
        pytest.skip("inductor was not tried on a GPU: it needs Triton")
    call = make(rng, gpu)
    torch._dynamo.reset()
    compiled = torch.compile(call.launch, backend=backend)
    for _ in range(2):
        call.assert_right(compiled(), ROUNDING)


# ---- Errors --------------------------------------------------------------------------------------


def test_no_error_is_left_for_torch(gpu, rng):
    """The launcher asks for attributes that a runtime may not know."""
    call = gm0(rng, gpu)
    call.launch()
    assert torch.ones(3, device=gpu).sum().item() == 3
    torch.cuda.synchronize(gpu)
