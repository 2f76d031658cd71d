"""An exported library against Python: the same plans, and the same results bit for bit."""

import importlib.util
import math
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from amd_problems import FP8, AmdProblem
from backward_calls import POISON, BackwardCall
from exported_calls import (
    CPP,
    CVTS,
    DTYPES,
    WARNINGS,
    BackwardArguments,
    CallError,
    Descale,
    ExportedCalls,
    ForwardArguments,
    Program,
    Strides,
    build_program,
    build_shared,
    build_shim,
    compile_cpp,
    set_descale,
    set_tensor,
    write_library,
)
from inputs import prefix_sums
from subprocesses import run_program, run_python
from torch import Tensor
from untyped import fmha_bwd, fmha_fwd

from jitfmha import emulate
from jitfmha.ahead.combination import Combination
from jitfmha.amd.chips import Arch
from jitfmha.amd.tree import AITER_ASM_DIR, HSA_DIR
from jitfmha.call.dispatch import plan_for
from jitfmha.emulator.library import load
from jitfmha.emulator.session import DEVICES
from jitfmha.export.kernels import Selection, ready_backward_kernels
from jitfmha.kernels import ready
from jitfmha.kernels.ready.backward.family import ReadyBackwardPlan
from jitfmha.kernels.ready.backward.kernels import turns_of
from jitfmha.planning.plan import Refusal
from jitfmha.planning.target import TARGET_HERE
from jitfmha.problem.dtypes import DTYPE_NAMES
from jitfmha.problem.mask import parse_mask

READY = Selection(("gfx942", "gfx950"))
COMPILED = Selection(
    ("gfx942",), ("backward",), dtypes=("bf16",), hdims=((96, 96),), masks=("causal",)
)
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
    # As the exported library does.
    pytest.mark.usefixtures("ready_first"),
]


@pytest.fixture(scope="module", autouse=True)
def _own_tree() -> None:
    for variable in (HSA_DIR, AITER_ASM_DIR):
        if variable in os.environ:
            pytest.skip(f"{variable} is set, and exports have the kernels of this package")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all kernels that come ready, and compiled ones for what ``COMPILED`` names."""
    folder = tmp_path_factory.mktemp("export") / "exported"
    write_library(folder, READY, [COMPILED])
    return folder


@pytest.fixture(scope="module")
def shared_library(exported: Path) -> Path:
    return build_shared(exported)


@pytest.fixture(scope="module")
def emulator_path() -> str:
    return load("plain")._name


@pytest.fixture(scope="module")
def calls(exported: Path, shared_library: Path, emulator_path: str) -> ExportedCalls:
    return ExportedCalls(build_shim(exported, shared_library), emulator_path)


def use_device(chip: str) -> None:
    assert load("plain").hipSetDevice(DEVICES[chip]) == 0


def ready_hdims(arch: Arch) -> list[tuple[int, int]]:
    """Those of the backward kernels that come ready."""
    kernels = ready_backward_kernels(READY._replace(arches=(arch,)))
    return sorted({(each.row.hdim_q, each.row.hdim_v) for each in kernels})


def arguments_of(
    wanted: Combination, max_seqlen_q: int = 0, kind: Any = ForwardArguments
) -> ForwardArguments | BackwardArguments:
    """Without addresses."""
    problem = wanted.problem()
    mask = 0 if wanted.mask.is_none else 1 if wanted.mask.top_left else 2
    arguments = kind(
        dtype=DTYPES[wanted.dtype],
        mode=("gm0", "gm1").index(wanted.mode),
        mask=mask,
        softmax_scale=0.1,
        max_seqlen_q=max_seqlen_q,
        **{
            name: getattr(problem, name)
            for name in ("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "hdim_q", "hdim_v")
        },
    )
    for name in ("q", "k", "v", "out"):
        strides = getattr(arguments, f"{name}_strides")
        strides.batch, strides.seq, strides.head = getattr(problem, name)
    return arguments


# ---- The policy ----------------------------------------------------------------------------------


def drawn_combination(
    draw: random.Random,
    dtypes: Sequence[str],
    hdims: Sequence[tuple[int, int]],
    seqlens: tuple[int, int],
    *,
    heads_k: Sequence[int] = (1, 2, 5, 8),
    **others: Any,
) -> Combination:
    """`seqlens` are those of a sequence; half of all calls have no more queries than keys."""
    mode, batch = draw.choice(("gm0", "gm1")), draw.choice((1, 2, 3, 16))
    key_heads, (seqlen_q, seqlen_k) = draw.choice(heads_k), seqlens
    packs = batch if mode == "gm1" else 1
    return Combination(
        *(dtype := draw.choice(dtypes), dtype),
        *draw.choice(hdims),
        mask=parse_mask(draw.choice((0, 1, 2) if mode == "gm0" else (0, 2))),
        mode=mode,
        batch=batch,
        heads_q=key_heads * draw.choice((1, 2, 7)),
        heads_k=key_heads,
        seqlen_q=packs * (min(seqlens) if draw.random() < 0.5 else seqlen_q),
        seqlen_k=packs * seqlen_k,
        **others,
    )


@pytest.mark.parametrize("chip", DEVICES)
def test_plans_are_those_of_python(chip, calls, seed):
    draw = random.Random(seed)
    use_device(chip)
    kernels = set()
    with emulate(chip):
        target = TARGET_HERE.get()
        for _ in range(400):
            # Many are short, where splits and tiles depend on everything.
            seqlens = tuple(int(2 ** draw.uniform(0, 15)) - 1 for _ in "qk")
            dtypes = "bf16", "fp16", target.chip.architecture.fp8_dtype
            hdims = (64, 64), (128, 128), (192, 128), (96, 96)
            wanted = drawn_combination(draw, dtypes, hdims, seqlens)
            cvt = draw.choice(("rtne", "rtna", "rtz"))
            max_seqlen_q = draw.randint(1, wanted.seqlen_q + 3) if wanted.mode == "gm1" else 0
            problem = wanted.problem()._replace(bf16_cvt=cvt)
            answer = ready.propose(problem, target)
            arguments = arguments_of(wanted, max_seqlen_q)
            arguments.bf16_cvt = CVTS[cvt]
            if isinstance(answer, Refusal):
                with pytest.raises(CallError, match=r"^unsupported: no kernel for"):
                    calls.plan(arguments)
                continue
            (plan,) = answer
            tile = plan.choice.tiles.tile_for(wanted.seqlen_q, wanted.seqlen_k)
            splits = tile.splits
            if tile.splits_of is not None:
                splits = tile.splits_of(min(max_seqlen_q, wanted.seqlen_q))
            found = calls.plan(arguments)
            here = (found.kernel.decode(), found.num_splits, found.workspace_bytes)
            assert here == (plan.kernel, splits.num_splits, 4 * splits.workspace_floats), wanted
            assert (found.tile_q, found.tile_k) == (tile.row.ts_qo, tile.row.ts_kv)
            kernels.add((plan.kernel, splits.num_splits > 1))
    assert {splits for _, splits in kernels} == {False, True}
    assert any("q128" in name for name, _ in kernels)
    assert any("fp8" in name for name, _ in kernels)


@pytest.mark.parametrize("chip", ["gfx942", "gfx950"])
def test_backward_plans_are_those_of_python(chip, calls, seed):
    draw = random.Random(seed)
    use_device(chip)
    families, kernels, hdims = set(), set(), (*ready_hdims(chip), (64, 64), (96, 96))
    options = {"direction": "backward", "heads_k": (1, 2, 5, 100)}  # 100: all units have work
    for _ in range(150):
        seqlens = draw.randint(1, 3000), draw.randint(1, 3000)
        wanted = drawn_combination(draw, ("bf16", "fp16"), hdims, seqlens, **options)
        cvt = draw.choice(tuple(CVTS))
        if draw.random() < 0.3:
            wanted, cvt = as_compiled(wanted), "rtne"
        is_deterministic = draw.random() < 0.3
        problem = wanted.problem()._replace(bf16_cvt=cvt, is_deterministic=is_deterministic)
        with emulate(chip):
            target = TARGET_HERE.get()
            plan = plan_for(problem, target)
        arguments = arguments_of(wanted, kind=BackwardArguments)
        arguments.bf16_cvt = CVTS[cvt]
        arguments.deterministic = is_deterministic
        if plan.family == "compiled" and not is_compiled(wanted, cvt, chip):
            with pytest.raises(CallError, match=r"^unsupported: no backward kernel for"):
                calls.plan(arguments)
            continue
        found = calls.plan(arguments)
        assert found.kernel.decode() == plan.kernel, wanted
        of_dq = wanted.hdim_q if plan.family == "ready" else 0
        words = math.prod(problem.lse_shape) * (of_dq + 2)
        if isinstance(plan, ReadyBackwardPlan) and is_deterministic:
            words += turns_of(plan.row, problem)
        assert found.workspace_bytes == 4 * words
        families.add(plan.family)
        kernels.add(plan.kernel)
    assert any("wide" in name for name in kernels) == (chip == "gfx950")
    compiled = {"compiled"} if chip == "gfx942" else set()
    assert families == {"ready"} | compiled


def as_compiled(wanted: Combination) -> Combination:
    """With what ``COMPILED`` names."""
    (dtype,), ((hdim_q, hdim_v),) = COMPILED.dtypes, COMPILED.hdims or ()
    hdims = {"hdim_q": hdim_q, "hdim_v": hdim_v}
    return wanted._replace(dtype=dtype, kv_dtype=dtype, **hdims, mask=parse_mask(2))


def is_compiled(wanted: Combination, cvt: str, arch: Arch) -> bool:
    """Whether ``COMPILED`` names it."""
    like = as_compiled(wanted)._replace(mask=wanted.mask)
    is_named = arch in COMPILED.arches and cvt == "rtne" and not wanted.mask.is_none
    return is_named and wanted == like


# ---- Results -------------------------------------------------------------------------------------

FORWARD_CASES: Sequence[tuple[str, dict[str, Any]]] = (
    ("gfx942", {"batch": 2, "lengths": ((129, 127),), "heads": (6, 3), "mask": 2}),
    ("gfx950", {"batch": 1, "lengths": ((1, 1000),), "heads": (3, 1), "layout": "bhsd"}),
    ("gfx942-mi308", {"batch": 2, "lengths": ((65, 33),), "mask": 1, "layout": "sbhd"}),
    ("gfx942", {"batch": 1, "lengths": ((70, 0),)}),
    ("gfx942", {"lengths": ((0, 5), (1, 64), (128, 65), (33, 0)), "gap": 3, "mask": 2}),
    ("gfx950", {"lengths": ((3, 1900), (2, 2100)), "hdims": (64, 64)}),
    ("gfx942", {"batch": 2, "lengths": ((33, 129),), "heads": (4, 2), "mask": 2, "fp8": "each"}),
    ("gfx950", {"batch": 1, "lengths": ((1, 1500),), "layout": "bhsd", "fp8": "one"}),
    ("gfx942", {"batch": 2, "lengths": ((33, 70),), "fp8": "none"}),
    ("gfx950", {"lengths": ((0, 5), (65, 64), (3, 65)), "heads": (3, 3), "gap": 3, "fp8": "each"}),
)


@pytest.mark.parametrize(("chip", "changes"), FORWARD_CASES)
@pytest.mark.parametrize("has_lse", [True, False])
def test_forward_is_that_of_python(chip, changes, has_lse, calls, rng, poisoned_memory):
    dtype = (torch.bfloat16, torch.float16)[int(torch.randint(2, (), generator=rng))]
    descales = changes.get("fp8")
    others = {name: x for name, x in changes.items() if name != "fp8"}
    dtype = FP8[chip] if descales else dtype
    others["descales"] = None if descales == "none" else descales
    problem = AmdProblem(rng, dtype=dtype, **others)
    max_seqlen_q = 150 if problem.is_group else None
    with emulate(chip):
        out, lse = fmha_fwd(
            *(problem.q, problem.k, problem.v), **problem.arguments, max_seqlen_q=max_seqlen_q
        )
    arguments = forward_arguments(problem, max_seqlen_q or 0)
    use_device(chip)
    here, here_lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    set_tensor(arguments, "out", here)
    if has_lse:
        arguments.lse = here_lse.data_ptr()
    plan = calls.plan(arguments)
    assert (plan.num_splits > 1) == (max(k for _, k in problem.lengths) > 800)
    launch_with_workspace(calls, arguments, plan.workspace_bytes)
    rows = covered_rows(problem)
    assert torch.equal(here[rows], out[rows])
    assert not has_lse or torch.equal(here_lse.mT[rows], lse.mT[rows])


def launch_with_workspace(calls: ExportedCalls, arguments: Any, size: int) -> None:
    workspace = torch.full((size // 4,), torch.nan)
    arguments.workspace, arguments.workspace_bytes = workspace.data_ptr(), workspace.nbytes
    calls.launch(arguments)


def covered_rows(problem: AmdProblem) -> Any:
    """Those of sequences; what lies between these may hold anything."""
    if not problem.is_group:
        return slice(None)
    pairs = zip(problem.starts[0], problem.lengths, strict=True)
    return [start + row for start, (length, _) in pairs for row in range(length)]


LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_q_padded", "cu_seqlens_k_padded")
DESCALES = ("q_descale", "k_descale", "v_descale")


def sizes_of(call: AmdProblem | BackwardCall) -> dict[str, Any]:
    """What the arguments of both directions have of a call, without addresses."""
    return {
        "dtype": DTYPES[DTYPE_NAMES[call.dtype]],
        "mode": int(call.is_group),
        "mask": call.mask,
        "batch": call.batch or len(call.lengths),
        "heads_q": call.heads[0],
        "heads_k": call.heads[1],
        "seqlen_q": call.q.shape[-3],
        "seqlen_k": call.k.shape[-3],
        "hdim_q": call.hdims[0],
        "hdim_v": call.hdims[1],
    }


def forward_arguments(problem: AmdProblem, max_seqlen_q: int) -> ForwardArguments:
    """With the inputs of a problem."""
    scale = problem.softmax_scale
    sizes = sizes_of(problem)
    arguments = ForwardArguments(**sizes, softmax_scale=scale, max_seqlen_q=max_seqlen_q)
    for name in ("q", "k", "v"):
        set_tensor(arguments, name, getattr(problem, name))
    for name in problem.arguments.keys() & {*LENGTHS}:
        set_tensor(arguments, name, problem.arguments[name])
    for name in problem.arguments.keys() & {*DESCALES}:
        set_descale(arguments, name, problem.arguments[name])
    return arguments


def test_without_a_workspace_keys_are_not_split(calls, rng):
    problem = AmdProblem(rng, batch=1, lengths=((2, 900),), hdims=(64, 64))
    use_device("gfx942")
    out = torch.full((1, 2, 2, 64), torch.nan, dtype=torch.bfloat16)
    lse = torch.full((1, 2, 2), torch.nan)
    arguments = forward_arguments(problem, 0)
    set_tensor(arguments, "out", out)
    arguments.lse = lse.data_ptr()
    assert calls.plan(arguments).num_splits > 1
    calls.launch(arguments)
    problem.assert_right((out, lse), 2**-8)


# Up to two tiles of keys: two summands of dq have one sum, in whichever order they come.
BACKWARD_CASES: Sequence[tuple[Arch, dict[str, Any]]] = (
    ("gfx942", {"batch": 2, "lengths": ((33, 200),), "heads": (4, 2), "mask": 2}),
    ("gfx942", {"lengths": ((0, 5), (1, 64), (65, 129), (33, 0)), "gap": 3}),
    ("gfx950", {"batch": 1, "lengths": ((70, 33),), "mask": 1, "layouts": {"q": "bhsd"}}),
    ("gfx950", {"lengths": ((3, 129), (40, 7)), "heads": (3, 1), "mask": 2}),
)


@pytest.mark.parametrize(("chip", "changes"), BACKWARD_CASES)
def test_backward_is_that_of_python(chip, changes, calls, rng, seed):
    draw = random.Random(seed)
    options = {"bf16_cvt": draw.choice(tuple(CVTS))}
    call = BackwardCall(
        rng,
        dtype=draw.choice((torch.bfloat16, torch.float16)),
        hdims=draw.choice(ready_hdims(chip)),
        options=options,
        **changes,
    )
    assert "compiled" not in assert_backward_is_that_of_python(call, chip, calls)


@pytest.mark.parametrize(("hdim", "kernel"), [(64, "_deterministic_"), (96, "_compiled_")])
@pytest.mark.parametrize("lengths", [((33, 270),), ((0, 5), (1, 64), (65, 129), (33, 0))])
def test_deterministic_backward_is_that_of_python(lengths, hdim, kernel, calls, rng):
    call = BackwardCall(
        rng,
        batch=None if len(lengths) > 1 else 2,
        lengths=lengths,
        hdims=(hdim, hdim),
        heads=(4, 2),
        mask=2,
        options={"deterministic": True},
    )
    assert kernel in assert_backward_is_that_of_python(call, "gfx942", calls)


@pytest.mark.parametrize(
    ("batch", "lengths", "heads", "layout"),
    [
        (2, ((33, 70),), (0, 2), "bhsd"),
        (1, ((3, 1),), (0, 3), "sbhd"),
        (None, ((0, 5), (1, 64), (33, 0)), (0, 3), "bshd"),
        (None, ((0, 5), (0, 7)), (4, 2), "bshd"),
        (None, (), (2, 1), "bshd"),
        (2, ((0, 9),), (2, 2), "bhsd"),
        (0, ((5, 9),), (2, 1), "bshd"),
        (2, ((5, 0),), (0, 0), "bshd"),
    ],
)
def test_backward_without_queries_is_that_of_python(batch, lengths, heads, layout, calls, rng):
    """Of heads, rows or sequences there are none; what would be read is not there."""
    rows_q, rows_k = (3, 11) if not lengths else map(sum, zip(*lengths, strict=True))
    before = () if batch is None else (batch,)
    orders = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}

    def poisoned(rows: int, count: int, hdim: int) -> Tensor:
        shape = (*before, rows, count, hdim)
        order = orders[layout] if before else range(3)
        memory = torch.full([shape[i] for i in order], POISON, dtype=torch.float16)
        return memory.permute([list(order).index(i) for i in range(len(shape))])

    q, dq, k, dk = (
        poisoned(*x, 128) for x in ((rows_q, heads[0]),) * 2 + ((rows_k, heads[1]),) * 2
    )
    out, dout, v, dv = (
        poisoned(*x, 64) for x in ((rows_q, heads[0]),) * 2 + ((rows_k, heads[1]),) * 2
    )
    lse = torch.zeros(*before, heads[0], rows_q)
    options: dict[str, Any] = {}
    if batch is None:
        sides = zip(*lengths, strict=True) if lengths else ((), ())
        sums = (prefix_sums(list(side)) for side in sides)
        options = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), sums, strict=True))
    gradients = {"dq": dq, "dk": dk, "dv": dv}
    with emulate("gfx942"):
        fmha_bwd(dout, q, k, v, out, lse, **gradients, **options)
    expected = {name: x.clone() for name, x in gradients.items()}
    arguments = BackwardArguments(
        dtype=DTYPES["fp16"],
        mode=int(batch is None),
        batch=len(lengths) if batch is None else batch,
        heads_q=heads[0],
        heads_k=heads[1],
        seqlen_q=rows_q,
        seqlen_k=rows_k,
        hdim_q=128,
        hdim_v=64,
        softmax_scale=0.1,
    )
    for name, x in gradients.items():
        set_tensor(arguments, name, x.fill_(POISON))
    use_device("gfx942")
    calls.launch(arguments)
    for name, x in gradients.items():
        assert torch.equal(x, expected[name]), name
        assert bool((x == (0 if arguments.batch else POISON)).all()), name


def assert_backward_is_that_of_python(call: BackwardCall, chip: Arch, calls: ExportedCalls) -> str:
    """The gradients, bit for bit, and what was not to be written. The kernel's name."""
    longest = {"max_seqlen_q": 65, "max_seqlen_k": 129} if call.is_group else {}
    call.arguments |= longest | {"dlse": torch.randn(call.lse.shape, generator=call.rng)}
    with emulate(chip):
        expected = {name: x.clone() for name, x in call.run().items()}
    arguments = backward_arguments(call)
    for x in call.gradients.values():
        x.fill_(POISON)
    use_device(chip)
    plan = calls.plan(arguments)
    launch_with_workspace(calls, arguments, plan.workspace_bytes)
    for name, x in call.gradients.items():
        assert torch.equal(x, expected[name]), name
    return str(plan.kernel.decode())


def backward_arguments(call: BackwardCall) -> BackwardArguments:
    """Without a workspace."""
    given = call.arguments
    arguments = BackwardArguments(
        **sizes_of(call),
        bf16_cvt=CVTS[given.get("bf16_cvt", "rtne")],
        softmax_scale=call.hdims[0] ** -0.5,
        lse=call.lse.data_ptr(),
        dlse=given["dlse"].data_ptr() if "dlse" in given else None,
        **{name: given.get(name, 0) for name in ("max_seqlen_q", "max_seqlen_k", "deterministic")},
    )
    for name in ("q", "k", "v", "out", "dout"):
        set_tensor(arguments, name, getattr(call, name))
    for name, x in call.gradients.items():
        set_tensor(arguments, name, x)
    for name in given.keys() & {*LENGTHS}:
        set_tensor(arguments, name, given[name])
    return arguments


# ---- What is refused -----------------------------------------------------------------------------

PLAIN = Combination("bf16", "bf16", 64, 64, batch=1, heads_q=2, heads_k=1, seqlen_q=5, seqlen_k=9)
FP8_CALL = {"dtype": 2, "hdim_q": 128, "hdim_v": 128} | {
    name: Descale(1, 0, 1) for name in DESCALES
}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"batch": -1}, "invalid_argument: batch is -1"),
        ({"seqlen_k": -7}, "invalid_argument: seqlen_k is -7"),
        ({"heads_q": 3, "heads_k": 2}, "invalid_argument: heads_q is 3, .*, 2"),
        ({"hdim_q": 577}, "invalid_argument: hdim_q is 577"),
        ({"hdim_v": 0}, "invalid_argument: hdim_v is 0"),
        ({"softmax_scale": math.nan}, "invalid_argument: softmax_scale is nan"),
        ({"softmax_scale": 0.0}, "invalid_argument: softmax_scale is 0"),
        ({"dtype": 8}, "invalid_argument: dtype is 8"),
        (
            {"dtype": 2, "hdim_q": 128, "hdim_v": 128, "k_descale": Descale(token=1)},
            r"invalid_argument: k_descale\.scales is null, and k_descale.token 1",
        ),
        ({"dtype": 3}, "unsupported: dtype is fp8_e4m3fn; the fp8 of gfx942 is fp8_e4m3fnuz"),
        ({"dtype": 2}, "unsupported: no kernel for fp8_e4m3fnuz, hdim 64x64"),
        ({"mask": -1}, "invalid_argument: mask is -1"),
        (
            {"mode": 1, "mask": 1, "cu_seqlens_q": 1, "cu_seqlens_k": 1},
            "unsupported: no kernel for bf16, .*, mask causal_top_left",
        ),
        ({"mask": 5}, "invalid_argument: mask is 5"),
        ({"logit_softcap": -1.0}, "invalid_argument: logit_softcap is -1"),
        ({"dropout_p": 1.0}, "invalid_argument: dropout_p is 1"),
        ({"dropout_p": 0.5}, "invalid_argument: rng_state is null"),
        ({"sink_size": 3}, "invalid_argument: sink_size is 3"),
        ({"v_column": 9}, "invalid_argument: v_column is 9"),
        ({"out_accum": 1, "num_splits": 2}, "invalid_argument: lse_accum is null"),
        ({"out_accum": 1, "lse_accum": 1}, "invalid_argument: num_splits is 0"),
        ({"key_type": 4}, "invalid_argument: key_type is 4"),
        ({"out_dtype": 2, "dtype": 2}, "invalid_argument: out_dtype is fp8_e4m3fnuz; outputs"),
        ({"key_type": 1, "dtype": 2}, "invalid_argument: key_type is given, and q has 8 bits"),
        ({"num_splits": -1}, "invalid_argument: num_splits is -1"),
        ({"num_splits": 1025}, "unsupported: num_splits is 1025"),
        ({"block_table": 1, "page_size": 16}, "invalid_argument: block_table is given in batch"),
        ({"q": None}, "invalid_argument: q is null"),
        ({"v": None}, "invalid_argument: v is null"),
        ({"out": None}, "invalid_argument: out is null"),
        ({"mode": 1}, "invalid_argument: cu_seqlens_q is null"),
        (
            {"hdim_q": 80},
            "unsupported: no kernel for bf16, hdim 80x64, mask none, batch mode, rtne was exported",
        ),
        ({"heads_q": 1 << 16}, "unsupported: heads_q is 65536"),
        ({"seqlen_k": 1 << 30}, "unsupported: seqlen_k is 1073741824"),
        ({"k_strides": Strides(0, 1 << 31, 64)}, r"unsupported: k_strides\.seq is 2147483648"),
        ({"k_strides": Strides(0, -1, 64)}, r"invalid_argument: k_strides\.seq is -1"),
        (FP8_CALL | {"out_dtype": 1}, "unsupported: no kernel .* --dtype fp8 --out-dtype fp16 "),
        (FP8_CALL | {"v_descale": Descale(1, 0, -1)}, r"invalid_argument: v_descale\.head is -1"),
        (FP8_CALL | {"v_descale": Descale(1, 0, 1 << 30)}, r"unsupported: v_descale\.head is 1073"),
    ],
)
def test_refusals(changes, text, calls):
    use_device("gfx942")
    arguments = arguments_of(PLAIN)
    somewhere = torch.zeros(4096).data_ptr()
    for name in ("q", "k", "v", "out"):
        setattr(arguments, name, somewhere)
    for name, value in changes.items():
        setattr(arguments, name, value)
    with pytest.raises(CallError, match=f"^{text}"):
        calls.launch(arguments)


def test_the_stride_of_a_single_row_may_be_anything(calls):
    use_device("gfx942")
    arguments = arguments_of(PLAIN._replace(seqlen_k=1))
    arguments.k_strides.seq = -1
    calls.plan(arguments)


def test_rows_that_are_too_far_apart_are_refused(calls, rng):
    use_device("gfx942")
    arguments = backward_arguments(BackwardCall(rng, batch=1, lengths=((3, 5),)))
    arguments.v_strides.seq = 1 << 23
    said = r"^unsupported: rows of q, k, v or dout are 16777216 .* --far-rows has it$"
    with pytest.raises(CallError, match=said):
        calls.plan(arguments)
    arguments.dtype = DTYPES["fp8_e4m3fnuz"]
    with pytest.raises(CallError, match=r"^unsupported: no backward kernel for fp8_e4m3fnuz, hdim"):
        calls.plan(arguments)


def test_a_small_workspace_is_refused(calls):
    use_device("gfx942")
    arguments = arguments_of(PLAIN._replace(seqlen_q=1, seqlen_k=2000))
    needed = calls.plan(arguments).workspace_bytes
    memory = torch.zeros(1 << 16)
    for name in ("q", "k", "v", "out", "workspace"):
        setattr(arguments, name, memory.data_ptr())
    arguments.workspace_bytes = needed - 1
    with pytest.raises(CallError, match=f"workspace_bytes is {needed - 1}; .* {needed}$"):
        calls.launch(arguments)


def test_a_workspace_that_is_null_is_refused(calls, rng):
    use_device("gfx942")
    arguments = backward_arguments(BackwardCall(rng, batch=1, lengths=((3, 5),)))
    arguments.workspace_bytes = calls.plan(arguments).workspace_bytes
    with pytest.raises(CallError, match=r"^invalid_argument: workspace is null"):
        calls.launch(arguments)


def test_another_runtime_is_refused(shared_library, calls):
    with pytest.raises(CallError, match="another HIP runtime is in use"):
        calls._call("use_runtime", str(shared_library).encode())


# ---- Libraries -----------------------------------------------------------------------------------


def test_symbols_have_the_version(shared_library):
    listed = run_program("nm", "-DC", "--defined-only", shared_library).stdout
    names = [line.split(maxsplit=2)[2] for line in listed.splitlines()]
    assert len(names) == 10
    assert all(name.startswith("jitfmha::v1_2_3::") for name in names)


def test_tables_take_no_code(shared_library):
    """A function that fills them took compilers longer than all others."""
    assert "static_initialization" not in run_program("nm", "-C", shared_library).stdout


@pytest.mark.parametrize("source", ["jitfmha.cpp", "code_objects_gfx942.cpp"])
def test_clang_has_no_complaints(source, exported, tmp_path):
    """As the tests' g++ has none."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed")
    flags = ("-std=c++17", "-O0", *WARNINGS, f"-I{exported / 'include'}")
    files = ("-c", exported / "src" / source, "-o", tmp_path / "object.o")
    run_python("-m", "ziglang", "c++", *flags, *files)


def test_two_versions_in_one_process(calls, tmp_path, emulator_path):
    """Each answers for its own kernels."""
    only = Selection(("gfx942",), dtypes=("fp16",), hdims=((128, 128),), masks=("none",))
    write_library(tmp_path / "other", only, version="1.3")
    other = ExportedCalls(
        build_shim(tmp_path / "other", build_shared(tmp_path / "other")), emulator_path
    )
    use_device("gfx942")
    fp16 = Combination("fp16", "fp16", 128, 128)
    assert calls.plan(arguments_of(fp16)).kernel == other.plan(arguments_of(fp16)).kernel
    assert calls.plan(arguments_of(PLAIN)).num_splits == 1
    with pytest.raises(CallError, match=r"^unsupported: no kernel for bf16"):
        other.plan(arguments_of(PLAIN))
    use_device("gfx950")
    with pytest.raises(CallError, match="is a gfx950, for which nothing was exported"):
        other.plan(arguments_of(fp16))


# ---- Programs ------------------------------------------------------------------------------------


def saved(folder: Path, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
    content = bytearray((folder / f"{name}.bin").read_bytes())
    return torch.frombuffer(content, dtype=dtype).view(shape)


OF_GROUPS = {
    "cu_seqlens_q": prefix_sums([1, 0, 129]),
    "cu_seqlens_k": prefix_sums([700, 5, 33]),
    "max_seqlen_q": 129,
}


@pytest.mark.parametrize(
    ("chip", "flags", "options", "kernel"),
    [
        (
            "gfx942",
            "-prec=bf16 -h=4 -h_k=2 -s=65 -s_k=130 -d=64 -mask=b -operm=0 -scale=.3 -v3_bf16_cvt=1",
            {"mask": 2, "softmax_scale": 0.3, "bf16_cvt": "rtna"},
            "fmha_fwd_hd64_bf16_causal_rtna, ",
        ),
        (
            "gfx950",
            "-prec=fp16 -mode=1 -s=1,0,129 -s_k=700,5,33 -h=3 -h_k=1 -iperm=0 -init=ui",
            OF_GROUPS,
            "fmha_fwd_hd128_fp16",
        ),
        *(
            (
                chip,
                "-prec=fp8 -h=4 -h_k=2 -s=33 -s_k=130 -mask=1 -iperm=0 -operm=0 -qscale=ph",
                {"mask": 1},
                "fmha_fwd_hd128_fp8bf16_causal_top_left",
            )
            for chip in ("gfx942", "gfx950")
        ),
    ],
)
def test_forward_program(
    chip, flags, options, kernel, exported, shared_library, emulator_path, tmp_path, seed
):
    built = Program(build_program("bench_mha_fwd", exported, shared_library), emulator_path)
    said = built.run(
        *("-init=nf", *flags.split(), "-lse=1", "-kname=1", "-warmup=0", "-repeat=1"),
        "-num_splits=0",
        *(f"-device={DEVICES[chip]}", f"-seed={seed}", f"-save={tmp_path}"),
    )
    for word in ("valid: y", "is emulated, with no time", kernel):
        assert word in said
    given = {"d": "128", "iperm": "1", "operm": "1"}
    given |= dict(flag[1:].split("=") for flag in flags.split())
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": FP8[chip]}[given["prec"]]
    heads_q, heads_k, hdim = (int(given[name]) for name in ("h", "h_k", "d"))
    batch = () if "mode" in given else (2,)
    rows_q, rows_k = (sum(map(int, given[name].split(","))) for name in ("s", "s_k"))

    def tensor(name: str, flag: str, kind: torch.dtype, rows: int, heads: int) -> Tensor:
        if given[flag] == "0":
            return saved(tmp_path, name, kind, *batch, rows, heads, hdim)
        return saved(tmp_path, name, kind, *batch, heads, rows, hdim).transpose(-3, -2)

    q = tensor("q", "iperm", dtype, rows_q, heads_q)
    k, v = (tensor(name, "iperm", dtype, rows_k, heads_k) for name in "kv")
    if given["prec"] == "fp8":
        options |= {name: saved(tmp_path, name, torch.float32, 2, 2) for name in DESCALES}
    with emulate(chip):
        out, lse = fmha_fwd(q, k, v, return_lse=True, **options)
    assert torch.equal(tensor("out", "operm", out.dtype, rows_q, heads_q), out)
    assert torch.equal(saved(tmp_path, "lse", torch.float32, *batch, heads_q, rows_q), lse)


def test_flags_of_programs(exported, shared_library, emulator_path):
    built = Program(build_program("bench_mha_fwd", exported, shared_library), emulator_path)
    for said, *options in (
        ("-prec=fp4 is not served", "-prec=fp4"),
        ("-nonsense=1 is no option", "-nonsense=1"),
        ("-b=-1 is not served", "-mode=1", "-b=-1"),
        ("-s=3,4 is not served", "-s=3,4"),
        ("-s_k=3,4 is not served", "-mode=1", "-s=3,4,5", "-s_k=3,4"),
    ):
        assert said in built.run(*options, code=2)
    assert "no kernel for fp16, hdim 80x80" in built.run("-d=80", "-s=3", code=1)
    backward = Program(build_program("bench_mha_bwd", exported, shared_library), emulator_path)
    assert "-prec=fp8 is not served" in backward.run("-prec=fp8", code=2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_program(deterministic, exported, shared_library, emulator_path, tmp_path, seed):
    built = Program(build_program("bench_mha_bwd", exported, shared_library), emulator_path)
    drawn = random.Random(seed)
    hdim, hdim_v = drawn.choice(ready_hdims("gfx942"))
    rows = drawn.choice((1, 33))
    said = built.run(
        *("-prec=bf16", "-b=1", "-h=4", "-h_k=2", f"-s={rows}", "-s_k=70", f"-d={hdim}", "-mask=2"),
        *("-bwd_v3=1", "-v3_atomic_fp32=0", "-v3_bf16_cvt=0", "-init=1", "-iperm=0", "-operm=0"),
        *(f"-d_v={hdim_v}", f"-deterministic={int(deterministic)}"),
        *("-kname=1", "-warmup=0", "-repeat=1", f"-seed={seed}", f"-save={tmp_path}"),
    )
    assert ("_deterministic_" in said) == deterministic
    assert "fmha_bwd_hd" in said
    assert "is emulated, with no time" in said
    assert "valid: y" in said
    q, k, v, out, dout, *here = (
        saved(tmp_path, name, torch.bfloat16, 1, count, heads, columns)
        for name, heads, count, columns in (
            *(("q", 4, rows, hdim), ("k", 2, 70, hdim), ("v", 2, 70, hdim_v)),
            *(("out", 4, rows, hdim_v), ("dout", 4, rows, hdim_v)),
            *(("dq", 4, rows, hdim), ("dk", 2, 70, hdim), ("dv", 2, 70, hdim_v)),
        )
    )
    lse = saved(tmp_path, "lse", torch.float32, 1, 4, rows)
    with emulate("gfx942"):
        expected = fmha_bwd(dout, q, k, v, out, lse, mask=2, deterministic=deterministic)
    for one, other in zip(here, expected, strict=True):
        assert torch.equal(one, other)


def test_aiter_structs(exported, shared_library):
    """Filled in AITER's order; what the call gets is that."""
    flags = (f"-I{exported / 'include'}", CPP / "aiter_structs.cpp", shared_library)
    program = shared_library.with_name("aiter_structs")
    run_program(compile_cpp(program, *flags, f"-Wl,-rpath,{shared_library.parent}"))


CONSUMER = """
#include <jitfmha.h>
#include <cstdio>
int main() {
  jitfmha::MhaFwdArgs args;
  args.batch = args.heads_q = args.heads_k = args.seqlen_q = args.seqlen_k = 1;
  args.hdim_q = args.hdim_v = 64;
  args.softmax_scale = 1;
  jitfmha::MhaPlan plan;
  const jitfmha::Status status = jitfmha::plan_mha_fwd(args, &plan);
  std::printf("%s%s", plan.kernel, status.text);
}
"""
CONSUMER_LISTS = """
cmake_minimum_required(VERSION 3.16)
project(consumer LANGUAGES CXX)
find_package(jitfmha 7.8 REQUIRED)
add_executable(consumer consumer.cpp)
target_link_libraries(consumer PRIVATE jitfmha::jitfmha)
"""


def test_cmake_and_pkg_config(tmp_path, emulator_path):
    """Built and installed; a program that asks CMake for it, and one that asks pkg-config."""
    for tool in ("cmake", "pkg-config"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    only = Selection(("gfx942",), dtypes=("bf16",), hdims=((64, 64),), masks=("none",))
    write_library(tmp_path / "library", only, version="7.8.9")
    prefix, consumer = tmp_path / "prefix", tmp_path / "consumer"
    consumer.mkdir()
    (consumer / "consumer.cpp").write_text(CONSUMER)
    (consumer / "CMakeLists.txt").write_text(CONSUMER_LISTS)
    environment = {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}

    def run(*command: str) -> str:
        return run_program(*command, cwd=tmp_path, **environment).stdout

    run("cmake", "-S", "library", "-B", "built", "-DCMAKE_BUILD_TYPE=Debug")
    run("cmake", "--build", "built")
    run("cmake", "--install", "built", "--prefix", str(prefix))
    run("cmake", "-S", "consumer", "-B", "consumer_built", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", "consumer_built")
    flags = run("pkg-config", "--cflags", "--libs", "jitfmha").split()
    # A library with a static one inside shows none of its names.
    plugin = compile_cpp(
        tmp_path / "plugin.so", "-shared", "-fPIC", consumer / "consumer.cpp", *flags
    )
    assert "plan_mha_fwd" in run("nm", "-C", "--defined-only", str(plugin))
    assert "plan_mha_fwd" not in run("nm", "-DC", "--defined-only", str(plugin))
    assert run("pkg-config", "--modversion", "jitfmha") == "7.8.9\n"
    compile_cpp(tmp_path / "by_pkg_config", consumer / "consumer.cpp", *flags)
    (tmp_path / "libamdhip64.so").symlink_to(emulator_path)
    environment["LD_LIBRARY_PATH"] = str(tmp_path)
    for built in ("consumer_built/consumer", "by_pkg_config"):
        assert run(str(tmp_path / built)) == "fmha_fwd_hd64_bf16_rtne"
    environment["LD_LIBRARY_PATH"] = str(prefix)
    assert "the HIP runtime was not found" in run(str(tmp_path / "by_pkg_config"))
