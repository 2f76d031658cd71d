"""The launcher on a runtime that records: arguments byte by byte, grids, devices, errors."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from inputs import LAYOUTS, lay_out, prefix_sums
from kernel_arguments import FORWARD, differing_slots, packed
from plain_tree import PlainKernel, write_tree
from rigs.recording_runtime import Launch, RecordingRuntime
from torch import Tensor
from untyped import fmha_fwd

from jitfmha import HipError
from jitfmha.kernels import launcher as amd_launcher

pytestmark = pytest.mark.usefixtures("tree", "ready_first")

READY = amd_launcher.LauncherKind("gfx942", "gm0", "forward", "ready")
CHIPS = {"MI300X": 0, "MI308X": 1, "MI355X": 2}  # device of each


def qkv(
    rng: torch.Generator,
    *rows: int,
    heads: tuple[int, int] = (4, 2),
    hdims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    rows_k: tuple[int, ...] | None = None,
) -> list[Tensor]:
    (hq, hk), (dq, dv) = heads, hdims
    rows_k = rows_k or rows
    shapes = ((*rows, hq, dq), (*rows_k, hk, dq), (*rows_k, hk, dv))
    return [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]


def launched(
    runtime: RecordingRuntime, chip: str, *tensors: Tensor, stream: int = 0, **options: Any
) -> tuple[Launch, Any]:
    """The only launch of a call on the chip's device, and what the call gives."""
    with runtime.stands_for(runtime.target(chip, CHIPS[chip]), stream=stream):
        result = fmha_fwd(*tensors, **options)
    (launch,) = runtime.launches()
    assert launch.dynamic_lds == 0
    assert launch.kernarg_bytes == FORWARD
    return launch, result


# ---- Arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("chip", list(CHIPS))
def test_arguments_of_gm0(rng, runtime, chip, layout, return_lse):
    q, k, v = (lay_out(x, layout) for x in qkv(rng, 2, 70, rows_k=(2, 90)))
    out = lay_out(torch.zeros(2, 70, 4, 128, dtype=torch.bfloat16), layout)
    options = {"out": out, "return_lse": return_lse, "softmax_scale": 0.3}
    launch, result = launched(runtime, chip, q, k, v, stream=0xABCD0, **options)
    lse = result[1] if return_lse else None
    expected = packed(q, k, v, out, lse, scale=0.3, ts_qo=64, s_opt=5)
    assert differing_slots(launch, expected) == []
    assert launch.stream == 0xABCD0
    assert launch.device == CHIPS[chip]
    assert launch.symbol.decode() == PlainKernel().symbol
    assert list(launch.block) == [512, 1, 1]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("chip", list(CHIPS))
def test_arguments_of_gm1(rng, runtime, chip, return_lse, padded):
    q, k, v = qkv(rng, 260, rows_k=(300,))
    q, k = q.repeat(1, 2, 1)[:, ::2], k.transpose(0, 1).contiguous().transpose(0, 1)
    ends = [prefix_sums([100, 0, 150]), prefix_sums([120, 30, 140])]
    starts = [prefix_sums([100, 5, 155]), prefix_sums([122, 33, 145])] if padded else ends
    names = ("cu_seqlens_q_padded", "cu_seqlens_k_padded")
    options = dict(zip(names, starts, strict=True)) if padded else {}
    options |= {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "max_seqlen_q": 150}
    options |= {"return_lse": return_lse, "softmax_scale": 0.3}
    launch, result = launched(runtime, chip, q, k, v, **options)
    out, lse = result if return_lse else (result, None)
    expected = packed(
        *(q, k, v, out, lse),
        scale=0.3,
        ts_qo=64,
        s_opt=5,
        cu_seqlens=(*ends, *starts),
        max_seqlen_q=150,
    )
    assert differing_slots(launch, expected) == []
    assert list(launch.grid) == [4, 3, 3]


@pytest.mark.parametrize("shape", [None, "one", "each"])
@pytest.mark.parametrize("mode", ["gm0", "gm1"])
def test_arguments_of_fp8(rng, runtime, mode, shape):
    rows, options = ((3, 70), {}) if mode == "gm0" else ((70,), {"max_seqlen_q": 33})
    q, k, v = qkv(rng, *rows, dtype=torch.float8_e4m3fnuz)
    ends = prefix_sums([33, 30, 7])
    cu_seqlens = None
    if mode == "gm1":
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        cu_seqlens = (ends, ends, ends, ends)
    descales = None
    if shape is not None:
        size, order = ((1,), (0,)) if shape == "one" else ((2, 3), (1, 0))
        descales = tuple(torch.rand(size, generator=rng).permute(*order) for _ in range(3))
        options |= dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    launch, out = launched(runtime, "MI300X", q, k, v, softmax_scale=0.3, **options)
    expected = packed(
        *(q, k, v, out, None),
        scale=0.3,
        ts_qo=64,
        s_opt=5,
        cu_seqlens=cu_seqlens,
        max_seqlen_q=33,
        descales=descales,
    )
    wrong = differing_slots(launch, expected)
    if shape is None:
        # One scale of 1 takes the place of all three.
        assert wrong == [512, 528, 544]
        addresses = {bytes(launch.kernarg[i : i + 8]) for i in wrong}
        assert len(addresses) == 1
        assert addresses != {bytes(8)}
    else:
        assert wrong == []


def test_the_scale_of_one_is_made_when_a_call_is_bound(rng, runtime, monkeypatch):
    """Before the first launch, on the call's device, and never again: a graph may be captured."""
    made: list[tuple[int, int, Tensor]] = []

    def scale_of_one(device: int) -> Tensor:
        made.append((device, runtime.launch_count, torch.ones(1)))
        return made[-1][2]

    monkeypatch.setattr(runtime, "scale_of_one", scale_of_one)
    q, k, v = qkv(rng, 1, 70, dtype=torch.float8_e4m3fnuz)
    given = torch.full((1,), 2.0)
    with runtime.stands_for(runtime.target("MI300X", 3)):
        fmha_fwd(*qkv(rng, 1, 70))
        for stream in (0, 1, 2):
            runtime._stream = stream
            fmha_fwd(q, k, v)
            fmha_fwd(q[:, :9], k, v)
        fmha_fwd(q, k, v, k_descale=given)
    assert [(device, launches) for device, launches, _ in made] == [(3, 1), (3, 7)]
    launches = [bytes(launch.kernarg) for launch in runtime.launches()[1:]]
    addresses = [
        [int.from_bytes(x[i : i + 8], "little") for i in (512, 528, 544)] for x in launches
    ]
    one, other = (scale.data_ptr() for _, _, scale in made)
    assert addresses == [[one] * 3] * 6 + [[other, given.data_ptr(), other]]


@pytest.mark.parametrize(
    ("chip", "hdims", "mask", "heads", "seqlen_q", "s_opt"),
    [
        ("MI300X", (128, 128), 0, 4, 70, 5),
        ("MI300X", (128, 128), 2, 8, 70, 5),
        ("MI300X", (128, 128), 2, 16, 16384, 5),
        ("MI300X", (128, 128), 2, 4, 70, 3),
        ("MI300X", (128, 128), 2, 8, 16385, 3),
        ("MI300X", (128, 128), 0, 4, 16385, 5),
        ("MI300X", (192, 128), 0, 4, 70, 0),
        ("MI308X", (192, 128), 2, 4, 70, 0),
        ("MI355X", (192, 128), 0, 4, 70, 5),
        ("MI355X", (192, 128), 2, 4, 70, 3),
    ],
)
def test_scheduling_hint(rng, runtime, chip, hdims, mask, heads, seqlen_q, s_opt):
    q, k, v = qkv(rng, 1, seqlen_q, heads=(heads, 1), hdims=hdims, rows_k=(1, 9))
    launch, _ = launched(runtime, chip, q, k, v, mask=mask)
    assert int.from_bytes(launch.kernarg[240:256], "little") == s_opt


# ---- Grids ---------------------------------------------------------------------------------------

WIDE, SQUARE = (192, 128), (128, 128)  # tiles of 32 and of 64 rows


@pytest.mark.parametrize(
    ("chip", "hdims", "mode", "mask", "seqlen_q", "grid", "threads"),
    [
        ("MI300X", SQUARE, "gm0", 0, 256, (4, 4, 3), 512),
        ("MI300X", SQUARE, "gm0", 0, 257, (5, 4, 3), 512),
        ("MI300X", SQUARE, "gm0", 2, 256, (2, 4, 3), 512),
        ("MI355X", SQUARE, "gm0", 2, 257, (3, 4, 3), 512),
        ("MI308X", SQUARE, "gm0", 2, 1, (1, 4, 3), 512),
        ("MI300X", SQUARE, "gm1", 0, 257, (4, 3, 5), 512),
        ("MI300X", SQUARE, "gm1", 2, 257, (4, 3, 3), 512),
        ("MI355X", SQUARE, "gm1", 2, 256, (4, 3, 2), 512),
        ("MI300X", WIDE, "gm0", 0, 70, (4, 3, 3), 256),
        ("MI308X", WIDE, "gm0", 2, 70, (4, 3, 3), 256),
        ("MI300X", WIDE, "gm1", 0, 70, (4, 3, 3), 256),
        ("MI300X", WIDE, "gm1", 2, 70, (4, 3, 3), 256),
        ("MI355X", WIDE, "gm0", 0, 70, (3, 4, 3), 256),
        ("MI355X", WIDE, "gm0", 2, 70, (2, 4, 3), 256),
        ("MI355X", WIDE, "gm1", 0, 70, (4, 3, 3), 256),
        ("MI355X", WIDE, "gm1", 2, 70, (4, 3, 2), 256),
    ],
)
def test_grid(rng, runtime, chip, hdims, mode, mask, seqlen_q, grid, threads):
    options: dict[str, Any] = {"mask": mask}
    rows: tuple[int, ...] = (3, seqlen_q)
    if mode == "gm1":
        rows = (3 * seqlen_q,)
        ends = prefix_sums([seqlen_q, 0, 1])
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": seqlen_q}
    launch, _ = launched(runtime, chip, *qkv(rng, *rows, hdims=hdims), **options)
    assert tuple(launch.grid) == grid
    assert list(launch.block) == [threads, 1, 1]


@pytest.mark.parametrize(("longest", "tiles"), [(None, 5), (1000, 5), (65, 2), (64, 1)])
def test_longest_length_sizes_the_grid(rng, runtime, longest, tiles):
    """Without it, and where it is too large, there are as many tiles as all rows together have."""
    ends = prefix_sums([100, 157])
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest}
    launch, _ = launched(runtime, "MI300X", *qkv(rng, 257), **options)
    assert list(launch.grid) == [4, 2, tiles]


def test_nothing_is_launched_without_work(rng, runtime):
    ends = prefix_sums([0, 0])
    q, k, v = qkv(rng, 30)
    with runtime.stands_for(runtime.target("MI300X")):
        fmha_fwd(*qkv(rng, 2, 0))
        fmha_fwd(*qkv(rng, 0, 70))
        fmha_fwd(*qkv(rng, 2, 70, heads=(0, 0)))
        assert (fmha_fwd(*qkv(rng, 2, 70, rows_k=(2, 0))) == 0).all()
        fmha_fwd(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=0)
        fmha_fwd(q[:0], k, v, cu_seqlens_q=ends, cu_seqlens_k=ends)
        no_sequence = prefix_sums([])
        fmha_fwd(q, k, v, cu_seqlens_q=no_sequence, cu_seqlens_k=no_sequence)
    assert runtime.launch_count == 0


def test_strides_of_single_rows_mean_nothing(rng, runtime):
    """Kernels take the end of a tensor from length times stride, so it must not be too short."""
    q, k, v = qkv(rng, 1, 1, heads=(1, 1))
    tensors = (q, k, v, torch.empty_like(q))
    *odd, out = (x.as_strided(x.shape, (1 << 40, 0, 3, 1)) for x in tensors)
    launch, _ = launched(runtime, "MI300X", *odd, out=out, softmax_scale=0.3)
    contiguous = [x.as_strided(x.shape, (0, 128, 128, 1)) for x in tensors]
    expected = packed(*contiguous, None, scale=0.3, ts_qo=64, s_opt=5)
    assert differing_slots(launch, expected) == []


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("padded", [False, True])
def test_gaps_are_filled_without_reading_cu_seqlens(rng, runtime, padded):
    """On a GPU the values stay unread: these would be refused on the CPU."""
    wrong = torch.tensor([7, 3, 99], dtype=torch.int32)
    options = {"cu_seqlens_q_padded": wrong.clone()} if padded else {}
    options |= {"cu_seqlens_q": wrong, "cu_seqlens_k": wrong, "return_lse": True}
    _, (out, lse) = launched(runtime, "MI300X", *qkv(rng, 30), **options)
    assert (out == 0).all() == padded
    assert (lse == -torch.inf).all() == padded


# ---- Devices, modules, threads -------------------------------------------------------------------


def test_devices_get_their_own_modules(rng, runtime):
    """Each once, as long as the process lives; no other test may load the same kernel there.

    The thread's current device stays what it was.
    """
    inputs = qkv(rng, 1, 70, heads=(1, 1), hdims=(64, 64), dtype=torch.float16)
    devices = [runtime.target("MI300X", i) for i in (3, 1, 3, 1)]
    with runtime.on_device(2):
        for target in devices:
            with runtime.stands_for(target, stream=100 + target.device_index):
                fmha_fwd(*inputs)
        assert runtime.current_device == 2
    assert [launch.device for launch in runtime.launches()] == [3, 1, 3, 1]
    assert [launch.stream for launch in runtime.launches()] == [103, 101, 103, 101]
    assert runtime.loads() == [3, 1]


def test_trees_with_one_manifest_keep_their_own_code_objects(rng, runtime, tmp_path, use_tree):
    """They share a launcher, in which a row has one number for both."""
    kernel, inputs = PlainKernel(), qkv(rng, 1, 70)
    for name in ("one", "two"):
        write_tree(tmp_path / name, "gfx942", [kernel])
        file = tmp_path / name / "gfx942" / "fmha_v3_fwd" / "MI300" / kernel.file
        file.write_bytes(file.read_bytes() + name.encode())  # behind the sections
    for name in ("one", "two", "one"):
        use_tree(tmp_path / name)
        with runtime.stands_for(runtime.target("MI300X", 2)):
            fmha_fwd(*inputs)
    assert runtime.loads() == [2, 2]


def test_threads_load_once_and_launch_all(rng, runtime):
    q, k, v = qkv(rng, 1, 70, hdims=(192, 128))
    threads, each = 8, 50
    barrier = threading.Barrier(threads)

    def call_often(i: int) -> None:
        with runtime.stands_for(target):
            barrier.wait()
            for _ in range(each):
                fmha_fwd(q, k, v, softmax_scale=1.0 + i, bf16_cvt="rtne")

    target = runtime.target("MI308X", 3)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(call_often, range(threads)))
    launches = runtime.launches()
    assert len(launches) == threads * each
    scales = {bytes(launch.kernarg[80:84]) for launch in launches}
    assert len(scales) == threads
    assert runtime.loads() == [3]


# ---- Errors --------------------------------------------------------------------------------------


def test_wrong_devices_surface(rng, runtime):
    text = r"hipErrorInvalidDevice \(101\): invalid device ordinal"
    target = runtime.target("MI300X", 9)
    with runtime.stands_for(target), pytest.raises(HipError, match=text):
        fmha_fwd(*qkv(rng, 1, 70))


def test_a_library_that_is_no_hip_runtime(tmp_path):
    launcher = amd_launcher.load_launcher(READY)
    assert launcher.jitfmha_open_runtime(str(tmp_path / "missing.so").encode()) is None
    assert "missing.so" in launcher.jitfmha_last_error().decode()
    # The launcher itself is a library without HIP's functions.
    assert launcher.jitfmha_open_runtime(launcher._name.encode()) is None
    assert "no function hipGetDevice" in launcher.jitfmha_last_error().decode()
