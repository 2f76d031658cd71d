"""Which kernels of a tree in AITER's form serve a backward pass, and why others do not."""

import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from backward_calls import BackwardCall
from plain_backward_tree import (
    GRADIENTS,
    OTHERS,
    PlainGradients,
    PlainOther,
    write_backward_tree,
    write_rows,
)
from plain_tree import UseTree
from rigs.recording_runtime import RecordingRuntime
from untyped import explain_bwd

import jitfmha
from jitfmha.amd.manifest import AiterBackwardRow
from jitfmha.call import dispatch
from jitfmha.call.dispatch import Entrant
from jitfmha.cli import doctor
from jitfmha.kernels.aiter.choice import picked_row
from jitfmha.planning.target import AmdTarget

fmha_v3_bwd: Any = jitfmha.fmha_v3_bwd
fmha_v3_varlen_bwd: Any = jitfmha.fmha_v3_varlen_bwd
CHIPS = {"gfx942": "MI300X", "gfx950": "MI355X"}


pytestmark = pytest.mark.usefixtures("ready_first")


@pytest.fixture
def calls(rng: torch.Generator) -> Any:
    """`calls(**changes)`: a call that plain kernels serve."""

    def call(**changes: Any) -> BackwardCall:
        values: dict[str, Any] = {"hdims": (8, 8), "lengths": ((9, 20),), "batch": 1}
        return BackwardCall(rng, **(values | changes))

    return call


@pytest.fixture
def tree(tmp_path: Path, use_tree: UseTree) -> Path:
    """The folder of a tree with all plain kernels for gfx942, which is in use."""
    folder = write_backward_tree(tmp_path, "gfx942")
    use_tree(tmp_path)
    return folder


@pytest.fixture
def explained(runtime: RecordingRuntime, calls: Any) -> Any:
    """`explained(chip, **changes)`: what serves a call, and why no other, where nothing runs."""

    def explain(chip: str = "MI300X", **changes: Any) -> str:
        with runtime.stands_for(runtime.target(chip)):
            return str(calls(**changes).explain())

    return explain


# ---- AITER's rule --------------------------------------------------------------------------------


def aiters_pick(
    rows: list[AiterBackwardRow], arch: str, seqlens: tuple[int, int], hdim: int
) -> AiterBackwardRow | None:
    """`get_heuristic_kernel` of AITER's csrc/cpp_itfs/mha_bwd.cu, for rows that fit otherwise."""
    padded_hdim = rows[0].hdim_q
    pddv = int(padded_hdim != hdim)
    ts_kv, pssk, name = 0, 0, None
    for row in rows:
        if ts_kv == 0:
            ts_kv = tmp_ts_kv = row.ts
            if not row.has_atomic_fp32 and (arch == "gfx942" or "recompile" in row.symbol):
                tmp_ts_kv = 64
            pssk = int(seqlens[0] != seqlens[1] or seqlens[1] % tmp_ts_kv != 0)
        if row.takes_any_seqlen == pssk and row.takes_smaller_hdim == pddv:
            return row
        if row.takes_any_seqlen >= pssk and row.takes_smaller_hdim >= pddv:
            name = row
    return name


def test_rows_are_picked_as_aiter_does(seed, calls):
    drawn = random.Random(seed)
    problem = calls().problem()
    for _ in range(100):
        arch = drawn.choice(("gfx942", "gfx950"))
        atomic32, ts = drawn.choice((False, True)), drawn.choice((64, 192, 256))
        kinds = list(itertools.product((False, True), repeat=2))
        drawn.shuffle(kinds)
        rows = [
            AiterBackwardRow(
                *("dqdkdv", "bf16", 128, 128, 0, atomic32, *kind, 0, 3, ts),
                symbol=f"k{i}" + drawn.choice(("", "_recompile")),
                file="k.co",
            )
            for i, kind in enumerate(kinds[: drawn.randint(1, 4)])
        ]
        seqlen_k = drawn.choice((1, 64, 192, 256, 320, 768))
        seqlens = (drawn.choice((seqlen_k, 64, 100)), seqlen_k)
        hdim = drawn.choice((104, 128))
        sizes = problem.sizes._replace(seqlen_q=seqlens[0], seqlen_k=seqlens[1])
        asked = problem._replace(sizes=sizes, hdim_q=hdim, hdim_v=hdim)
        assert picked_row(rows, rows, asked, arch) == aiters_pick(rows, arch, seqlens, hdim)


# ---- What passes a kernel over -------------------------------------------------------------------


ZEROS, UNORDERED = "writes zeros behind the last", "clears LDS while other waves"


@pytest.mark.parametrize(
    ("seqlens", "atomic32", "fault"),
    [
        ((9, 256), 1, None),
        ((9, 257), 1, ZEROS),
        ((9, 512), 1, UNORDERED),
        ((9, 257), 0, UNORDERED),
        ((9, 256), 0, None),
    ],
)
def test_faults_of_causal_kernels(tmp_path, use_tree, explained, seqlens, atomic32, fault):
    """Those for batches on gfx950: with more than one tile of keys they may be wrong."""
    kernel = PlainGradients("fp16", (128, 128), mask=2, atomic32=atomic32)
    others = [PlainOther(kind, "fp16", (128, 128)) for kind in ("odo", "dq_convert", "dq_shuffle")]
    write_backward_tree(tmp_path, "gfx950", [kernel], others)
    use_tree(tmp_path)
    values = {"dtype": torch.float16, "hdims": (72, 72), "lengths": (seqlens,), "mask": 2}
    text = explained("MI355X", **values, options={"atomic_fp32": atomic32 == 1})
    if fault is None:
        assert f"kernel   fmha_{kernel.name} " in text
    else:
        assert f"not aiter: JITFMHA_HSA_DIR={tmp_path}: fmha_{kernel.name} is passed" in text
        assert fault in text


def test_a_kernel_without_the_fault_is_taken(tmp_path, use_tree, explained):
    """Of several rows the others remain, and a remark says what was passed over."""
    causal = {"dtype": "fp16", "hdims": (128, 128), "mask": 1}
    kernels = [PlainGradients(**causal), PlainGradients(**causal, pssk=0)]  # type: ignore[arg-type]
    others = [PlainOther(kind, "fp16", (128, 128)) for kind in ("odo", "dq_convert")]
    write_backward_tree(tmp_path, "gfx950", kernels, others)
    use_tree(tmp_path)
    # A dout with other strides is none for the short block.
    values = {"dtype": torch.float16, "hdims": (72, 72), "mask": 1, "lengths": ((288, 288),)}
    assert f"kernel   fmha_{kernels[1].name} " in explained("MI355X", **values)
    text = explained("MI355X", **values, layouts={"dout": "bhsd"})
    assert f"fmha_{kernels[0].name} is passed over" in text
    text = explained("MI355X", **(values | {"lengths": ((64, 64),)}), layouts={"dout": "bhsd"})
    assert f"kernel   fmha_{kernels[0].name} " in text
    assert f"note     fmha_{kernels[1].name} needs a dout with the strides of q." in text


def test_kernels_that_make_dq_without_waiting(tree, runtime, calls, explained):
    passed_over = "fmha_bwd_hd64_dq_convert_bf16_rtne is passed over: it stores what it"
    assert f"note     {passed_over}" in explained()
    with runtime.stands_for(runtime.target("MI300X")):
        calls().run()
    row_sums, gradients = (x.symbol.decode() for x in runtime.launches())
    assert "odo_bf16E" in row_sums
    assert "a32_rtne_psskddvE" in gradients


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"options": {"deterministic": True}}, "deterministic gradients are asked for"),
        ({"hdims": (12, 12)}, "multiples of 8; that of q and k is 12"),
        ({"hdims": (64, 32)}, "no kernel for bf16, hdim 64x32, mask none, gm0"),
        ({"dtype": torch.float32}, "It serves bf16, fp16; the inputs are fp32"),
        ({"mask": 1}, "mask causal (top-left), gm0, rtne, float32 sums of dq, seqlen 9 x 20"),
        ({"mask": 2, "lengths": ((64, 65),), "options": {"atomic_fp32": False}}, "16-bit sums"),
        ({"lengths": ((9, 20), (3, 4)), "batch": None}, "mask none, gm1"),
        (
            {"mask": 2, "lengths": ((64, 64),), "heads": (2, 2), "layouts": {"v": "bhsd"}}
            | {"options": {"atomic_fp32": False}},
            "needs a v with the strides of k",
        ),
    ],
)
def test_refusals(tree, explained, changes, reason):
    text = explained(**changes)
    assert "not aiter: " in text
    assert reason in text


@pytest.mark.parametrize(
    ("seqlen_k", "atomic32", "said"),
    [
        (256, 0, "family aiter"),
        (257, 0, "deterministic gradients are asked for"),
        (256, 1, "16-bit sums of dq"),  # by atomics in any order
    ],
)
def test_one_key_tile_is_deterministic_in_16_bits(
    tmp_path, use_tree, explained, seqlen_k, atomic32, said
):
    kernel = PlainGradients("fp16", (128, 128), mask=2, atomic32=atomic32)
    others = [PlainOther(kind, "fp16", (128, 128)) for kind in ("odo", "dq_convert", "dq_shuffle")]
    write_backward_tree(tmp_path, "gfx950", [kernel], others)
    use_tree(tmp_path)
    values = {"dtype": torch.float16, "hdims": (72, 72), "lengths": ((9, seqlen_k),), "mask": 2}
    assert said in explained("MI355X", **values, options={"deterministic": True})


def test_gradients_of_keys_that_are_one_head_would_overlap(tree, runtime, calls):
    """Where they have the strides of the keys."""
    sizes = {"mask": 2, "lengths": ((64, 64),), "heads": (2, 2)}
    call = calls(**sizes, options={"atomic_fp32": False})
    call.k, call.v = (x[:, :, :1].expand_as(x) for x in (call.k, call.v))
    with runtime.stands_for(runtime.target("MI300X")):
        assert "gives dk the strides of k, with which its elements" in str(call.explain())


def test_a_gradient_of_the_lse_is_refused(tree, runtime, calls):
    call = calls()
    with runtime.stands_for(runtime.target("MI300X")):
        arguments = call.dout, call.q, call.k, call.v, call.out, call.lse
        text = str(explain_bwd(*arguments, dlse=torch.ones_like(call.lse)))
    assert "not aiter: Its kernels know no gradient of the lse" in text


def test_trees_without_backward_kernels(tmp_path, use_tree, explained):
    use_tree(tmp_path)
    assert "not aiter: No tree of code objects has backward kernels for gfx942" in explained()


def test_torch_asks_for_determinism(tree, explained, poisoned_memory):
    assert torch.are_deterministic_algorithms_enabled()
    assert "deterministic gradients are asked for" in explained()
    assert "family aiter" in explained(options={"deterministic": False})


@pytest.mark.parametrize("missing", ["odo", "dq_convert"])
def test_missing_companions(tmp_path, use_tree, explained, missing):
    others = [x for x in OTHERS["gfx942"] if x.kind != missing]
    write_backward_tree(tmp_path, "gfx942", others=others)
    use_tree(tmp_path)
    assert f"({missing}) for bf16, hdim 64, gm0" in explained()


# ---- Manifests -----------------------------------------------------------------------------------


def test_oddities_of_manifests(tree, explained):
    """Each is told by name, and the rows that are left serve."""
    good = [x.row for x in GRADIENTS["gfx942"]]
    odd = {
        "mask '4' is not known": good[0] | {"mask": 4},
        "dtype 'fp8' is not known": good[0] | {"dtype": "fp8"},
        "ts '0' is not between 1 and 65535": good[0] | {"ts": 0},
        "knl_name 'a b' is not a symbol": good[0] | {"knl_name": "a b"},
        "there is no file": good[0] | {"co_name": "none.co"},
        "co_name '../x.co' is not a file name": good[0] | {"co_name": "../x.co"},
    }
    path = write_rows(tree, "dqdkdv", [*odd.values(), *good])
    path.write_text("# comment\n" + path.read_text() + "// another\n")
    (tree / "fmha_bwd_dq_shuffle.csv").write_text("dtype\n")
    with pytest.warns(RuntimeWarning) as warned:
        text = explained()
    assert "family aiter" in text
    said = [str(x.message) for x in warned]
    for i, reason in enumerate(odd):
        assert any(f"line {i + 3} is left out: " in x and reason in x for x in said), reason
    assert any("dq_shuffle.csv cannot be read: it has no column hdim_q" in x for x in said)
    assert len(said) == len(odd) + 1


def test_code_objects_are_checked(tree, tmp_path, explained):
    """What is not for this architecture is not loaded."""
    other = write_backward_tree(tmp_path, "gfx950")
    shutil.copy(other / "plain_fp16.co", tree / "plain_bf16.co")
    with pytest.warns(RuntimeWarning, match="is for gfx950"):
        text = explained()
    assert "not aiter" in text
    assert "is for gfx950" in text


def test_what_others_could_change_is_not_used(tree, explained):
    (tree / "fmha_bwd_dqdkdv.csv").chmod(0o666)
    with pytest.warns(RuntimeWarning, match=r"fmha_bwd_dqdkdv.csv is not used: "):
        assert "not aiter" in explained()


def test_what_tools_tell_of_a_tree(tree):
    """`doctor` counts the kernels, and reads their files, which have them or not."""
    count = len(GRADIENTS["gfx942"]) + len(OTHERS["gfx942"])
    (tree / "plain_bf16.co").write_bytes(b"no ELF")
    found = "\n".join(x.found for x in doctor._check_code_objects() if x.verdict == "warning")
    assert f"{count} backward kernels" in found
    assert f"{tree / 'plain_bf16.co'} " in found


# ---- AITER's functions ---------------------------------------------------------------------------


@pytest.fixture
def only_aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled where the tree does not serve a call."""
    entrant = Entrant("aiter", "aiter", AmdTarget, "")
    monkeypatch.setattr(dispatch, "FAMILIES", (entrant,))


@pytest.mark.usefixtures("only_aiter")
@pytest.mark.parametrize("mode", ["gm0", "gm1"])
def test_functions_of_aiter(tree, runtime, calls, mode):
    is_group = mode == "gm1"
    call = calls(lengths=((64, 64),), batch=None if is_group else 1, mask=2)
    read = call.dout, call.q, call.k, call.v, call.out, call.lse

    def run(deterministic: bool, atomic_fp32: bool, cvt: int) -> list[str]:
        runtime.reset()
        with runtime.stands_for(runtime.target("MI300X")):
            last = (True, -1, -1, deterministic, atomic_fp32, cvt)
            if is_group:
                sums = call.arguments["cu_seqlens_q"], call.arguments["cu_seqlens_k"]
                fmha_v3_varlen_bwd(*read, *sums, 64, 64, 0.0, None, False, *last)
            else:
                fmha_v3_bwd(*read, 0.0, None, *last)
        return [x.symbol.decode() for x in runtime.launches()]

    with pytest.raises(NotImplementedError, match="deterministic gradients are asked for"):
        run(True, True, 0)
    if is_group:
        row_sums, gradients = run(False, True, 0)
        assert "odo_bf16_group" in row_sums
        assert "causal_br_a32_rtne_psskddv_group" in gradients
        with pytest.raises(NotImplementedError, match="gm1, rtz, float32 sums"):
            run(False, True, 2)
    else:
        row_sums, gradients = run(False, False, 0)
        assert "odo_bf16E" in row_sums
        assert "causal_a16_rtne_pddvE" in gradients
        with pytest.raises(NotImplementedError, match="float32 sums"):
            run(False, True, 0)
