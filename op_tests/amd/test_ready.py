"""The rules of the ready family, each with its sentence, and what explain makes of them."""

import json
from typing import Any

import pytest
import torch
from plain_tree import PlainKernel, write_tree
from torch import Tensor
from untyped import explain, fmha_fwd

from jitfmha import emulate
from jitfmha.amd.chips import chip
from jitfmha.amd.manifest import KernelRow
from jitfmha.amd.tree import trees_of
from jitfmha.call.dispatch import explain_problem, plan_for
from jitfmha.emulator.session import Emulation
from jitfmha.kernels.ready import family as ready
from jitfmha.kernels.ready.limits import reasons_of_row
from jitfmha.planning.plan import Refusal
from jitfmha.planning.target import TARGET_HERE, AmdTarget, CpuTarget
from jitfmha.problem.dtypes import plain_out_dtype
from jitfmha.problem.mask import parse_mask
from jitfmha.problem.problem import Mode, Problem, Sizes

pytestmark = pytest.mark.usefixtures("tree")

MI300, MI350 = "MI300X", "MI355X"
GIB = 1 << 30


READY = frozenset({"ready"})


def target(name: str, families: frozenset[str] | None = READY) -> AmdTarget:
    """A GPU that nothing is launched on, with the trees that the environment names."""
    found = chip(name)
    on = AmdTarget(found, 0, found.compute_units, Emulation("gfx942"), trees_of(found))
    on.families = families
    return on


def strides(
    batch: int = 70 * 4 * 128, seq: int = 4 * 128, head: int = 128
) -> tuple[int, int, int, int]:
    return batch, seq, head, 1


def problem(mode: Mode = "gm0", **changes: Any) -> Problem:
    """A small problem that the tree serves, bshd, with changes."""
    sizes: dict[str, Any] = {"seqlen_q": 70, "seqlen_k": 70}
    sizes |= dict.fromkeys(("q", "k", "v", "out"), strides())
    for name in sizes:
        sizes[name] = changes.pop(name, sizes[name])
        if mode == "gm1" and isinstance(sizes[name], tuple):
            sizes[name] = sizes[name][1:]
    values: dict[str, Any] = {
        "mode": mode,
        "dtype": "bf16",
        "kv_dtype": changes.get("dtype", "bf16"),
        "batch": 2,
        "heads_q": 4,
        "heads_k": 4,
        "hdim_q": 128,
        "hdim_v": 128,
        "mask": parse_mask(0),
        "softmax_scale": 0.3,
        "sizes": Sizes(**sizes),
        "has_lse": False,
    }
    values |= changes
    return Problem(**{"out_dtype": plain_out_dtype(values["dtype"])} | values)


def reasons(changed: Problem, chip_name: str = MI300) -> str:
    """The ready family's reasons, which dispatch and explain give alike."""
    given = explain_problem(changed, target(chip_name)).rejected.get("ready", ())
    if given:
        try:
            assert plan_for(changed, target(chip_name, None)).family == "compiled"
        except NotImplementedError as error:
            for reason in given:
                assert f"not ready: {reason}" in str(error)  # noqa: PT017 - only where none serves
    return "\n".join(given)


@pytest.mark.parametrize("mode", ["gm0", "gm1"])
@pytest.mark.parametrize("mask", [0, 2])
def test_served(mode, mask):
    served = problem(mode, mask=parse_mask(mask))
    assert reasons(served) == ""
    plan = plan_for(served, target(MI300))
    assert plan.family == "ready"
    assert plan.kernel == PlainKernel(mask=mask, mode=("gm0", "gm1").index(mode)).name


def test_the_target():
    (reason,) = explain_problem(problem(), CpuTarget("generic", "the test says so")).rejected[
        "ready"
    ]
    assert reason.startswith("It needs an AMD Instinct GPU")


# Changes, a chip, and words of the only sentence. All but the first few go through one rule each.
REFUSED: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"dtype": "fp32"}, MI300, ["fp32"]),
    ({"dtype": "fp8_e4m3fn"}, MI300, ["gfx942", "fp8_e4m3fnuz", "fp8_e4m3fn"]),
    ({"dtype": "fp8_e4m3fnuz"}, MI350, ["gfx950", "fp8_e4m3fn", "fp8_e4m3fnuz"]),
    ({"mask": parse_mask(0, (5, 5))}, MI300, ["window (left 5, right 5, bottom-right)"]),
    ({"mask": parse_mask(1, (5, -1))}, MI300, ["window (left 5, right 0, top-left)"]),
    ({"mask": parse_mask("g:3,4")}, MI300, ["window (left 2, right 3, top-left)"]),
    ({"dtype": "fp8_e4m3fnuz", "out_dtype": "fp16"}, MI300, ["that is not bf16"]),
    ({"mode": "gm1", "mask": parse_mask(1)}, MI300, ["no mask causal (top-left)"]),
    ({"seqlen_q": GIB}, MI300, ["1073741823 rows", "q has 1073741824"]),
    ({"seqlen_k": GIB}, MI300, ["k has 1073741824"]),
    ({"q": strides(head=2 * GIB)}, MI300, ["q has 4294967296 bytes", "head"]),
    ({"k": strides(batch=2 * GIB)}, MI300, ["k has 4294967296 bytes", "batch"]),
    ({"v": strides(seq=2 * GIB)}, MI300, ["v has 4294967296 bytes", "seq"]),
    ({"out": strides(seq=2 * GIB)}, MI300, ["out has 4294967296 bytes", "seq"]),
    ({"batch": 65536}, MI300, ["65535 sequences", "65536"]),
    ({"heads_q": 65536}, MI300, ["65535 heads", "65536"]),
    # Of plain trees only:
    ({"hdim_q": 96, "hdim_v": 96}, MI300, ["no kernel for bf16, hdim 96x96, mask none, gm0, rtne"]),
    ({"dtype": "fp16"}, MI300, ["no kernel for fp16, hdim 128x128, mask none, gm0 on MI300"]),
    ({"mask": parse_mask(2), "bf16_cvt": "rtz"}, MI300, ["causal (bottom-right), gm0, rtz"]),
    ({"mask": parse_mask(1), "seqlen_k": 71}, MI350, ["mask causal (top-left), gm0 on MI355X"]),
    ({"seqlen_q": 4096, "q": strides(seq=GIB // 2048)}, MI300, ["4 GiB", "rows of q"]),
    ({"seqlen_k": 4096, "v": strides(seq=GIB // 2048)}, MI300, ["4 GiB", "rows of v"]),
    ({"seqlen_q": 4096, "out": strides(seq=GIB // 2048)}, MI300, ["4 GiB", "rows of out"]),
    ({"k": strides(seq=127)}, MI300, ["do not overlap", "those of k"]),
    ({"q": strides(seq=0)}, MI300, ["do not overlap", "those of q"]),
]


@pytest.mark.parametrize(("changes", "chip_name", "words"), REFUSED)
def test_refused(tree, changes, chip_name, words):
    text = reasons(problem(**changes), chip_name)
    assert text.count("\n") == 0
    for word in words:
        assert word in text
    assert (str(tree) in text) == ("kernel" in words[0] or text.startswith("JITFMHA_HSA_DIR"))


# One less, or one more, than what is refused.
JUST_SERVED: list[tuple[dict[str, Any], str]] = [
    ({"q": strides(head=2 * GIB - 1)}, MI300),
    ({"k": strides(batch=2 * GIB - 1)}, MI300),
    ({"batch": 1, "q": strides(batch=1 << 50)}, MI300),
    ({"batch": 65535, "heads_q": 65532}, MI300),
    ({"seqlen_q": 4095, "q": strides(seq=GIB // 2048)}, MI300),
    ({"k": strides(seq=128)}, MI300),
    ({"seqlen_q": 1, "seqlen_k": 1, "q": strides(seq=0), "k": strides(seq=1)}, MI300),
    ({"mask": parse_mask(0, (-1, 0))}, MI300),
    ({"mask": parse_mask("b:-1,0")}, MI300),
    ({"mask": parse_mask(1)}, MI350),
    ({"mask": parse_mask(1), "seqlen_k": 71}, MI300),
    ({"bf16_cvt": "rtz"}, MI300),
    ({"bf16_cvt": "rtz"}, MI350),
    ({"dtype": "fp8_e4m3fnuz"}, MI300),
    (
        {
            "dtype": "fp8_e4m3fn",
            "hdim_q": 256,
            "hdim_v": 256,
            **dict.fromkeys("qkv", strides(seq=256)),
        },
        MI350,
    ),
    ({"dtype": "fp16", "hdim_q": 64, "hdim_v": 64, "bf16_cvt": "rtna"}, MI300),
]


@pytest.mark.parametrize(("changes", "chip_name"), JUST_SERVED)
def test_just_served(changes, chip_name):
    out = {"out": strides(seq=256)} if changes.get("hdim_v") == 256 else {}
    assert reasons(problem(**changes, **out), chip_name) == ""


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_plain_gfx950_kernels_take_one_scale(name):
    each = {name: (4, 1)}
    assert f"{name} of shape (1,)" in reasons(problem(dtype="fp8_e4m3fn", **each), MI350)
    assert reasons(problem(dtype="fp8_e4m3fn", **{name: (0, 0)}), MI350) == ""
    alone = {"batch": 1, "heads_k": 1, "heads_q": 1}
    assert reasons(problem(dtype="fp8_e4m3fn", **each, **alone), MI350) == ""
    assert reasons(problem(dtype="fp8_e4m3fnuz", **each), MI300) == ""


def test_plain_causal_gfx942_kernels_take_no_scale_beyond_a_tile():
    """Production kernels loop back to before the multiplication of the scale with q_ and k_descale.

    Seen in their disassembly, and in numbers: from the second tile on the scale has both squared.
    """
    one, on = (0, 0), target(MI300)
    causal: dict[str, Any] = {"dtype": "fp8_e4m3fnuz", "mask": parse_mask(2)}
    answer = ready.propose(problem(**causal), on)
    assert isinstance(answer, Refusal), "the tree of the tests has no such kernel"
    for scales in ({"q_descale": one}, {"k_descale": one}):
        (reason,) = reasons_of_row(problem(**causal, **scales), on, fp8_row(mask=2))
        assert "twice from row 64 on" in str(reason)
        assert not reasons_of_row(problem(**causal, **scales, seqlen_q=64), on, fp8_row(mask=2))
        assert not reasons_of_row(problem(**causal, **scales), on, fp8_row())
        assert not reasons_of_row(problem(**causal, **scales), target(MI350), fp8_row(mask=2))
    assert not reasons_of_row(problem(**causal, v_descale=one), on, fp8_row(mask=2))
    assert not reasons_of_row(problem(**causal), on, fp8_row(mask=2))


def fp8_row(mask: int = 0) -> KernelRow:
    """A row of a plain manifest."""
    return KernelRow(
        *("fp8bf16", 128, 128, mask, 0, 1, 64, 64, "symbol", "x.co"),
        *("aiter", 512, "tile_pairs_heads_batches" if mask else "tiles_heads_batches"),
    )


def test_plain_gfx950_fp8_kernels_take_five_ratios_of_heads():
    """Seen in their disassembly: the ratio is compared with powers of two, and becomes a shift."""
    for ratio in (1, 2, 3, 4, 6, 8, 16, 32):
        heads = {"heads_q": 2 * ratio, "heads_k": 2}
        fp8 = problem(dtype="fp8_e4m3fn", **heads)
        reasons_of_fp8 = reasons_of_row(fp8, target(MI350), fp8_row())
        assert (not reasons_of_fp8) == (ratio in (1, 2, 4, 8, 16))
        assert all(f"here are {ratio}" in str(reason) for reason in reasons_of_fp8)
        assert not reasons_of_row(problem(**heads), target(MI350), fp8_row())
        assert not reasons_of_row(fp8, target(MI300), fp8_row())


def test_our_kernels_have_no_limits_of_plain_ones():
    ours = KernelRow(
        *("bf16", 128, 128, 0, 0, 0, 256, 64, "symbol", "x.co"),
        *("jitfmha", 512, "xcd_heads_tiles_splits"),
    )
    for beyond in (problem(seqlen_q=4096, q=strides(seq=GIB // 2048)), problem(k=strides(seq=0))):
        assert reasons(beyond) != ""
        assert not reasons_of_row(beyond, target(MI300), ours)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.zeros(2, 70, 4, 128, dtype=torch.bfloat16) for _ in range(3))
    return q, k, v


def test_explanation(tree):
    with emulate("gfx942-mi308"):
        on = TARGET_HERE.get()
        assert isinstance(on, AmdTarget)
        on.families = READY
        plan = explain(*qkv(), mask=2, return_lse=True)
    text = str(plan)
    kernel = PlainKernel(mask=2)
    for part in (
        *("gfx942", "MI308", "emulated", "80 compute units", kernel.name, "family ready"),
        *(f"MI308/{kernel.file}", f"JITFMHA_HSA_DIR={tree}", "not cpu: "),
        "not compiled: The target leaves it out.",
    ):
        assert part in text
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["kernel"] == kernel.name
    assert values["source"] == f"MI308/{kernel.file} of JITFMHA_HSA_DIR={tree}"
    assert values["remarks"] == []


def test_an_uncovered_call_raises_what_explain_says():
    q = torch.zeros(1, 4, 1, 300).to(torch.float8_e4m3fnuz)  # the other chip's form
    with emulate("gfx950"):
        said = explain(q, q, q)
        with pytest.raises(NotImplementedError) as raised:
            fmha_fwd(q, q, q)
    assert said.plan is None
    assert str(said) in str(raised.value)
    assert "fp8_e4m3fnuz" in str(raised.value)


def test_emulation_takes_effect_at_once_and_ends_at_once(tree):
    """The same tensors, prepared before, go to whatever is emulated at the moment."""
    q, k, v = qkv()
    other_fp8 = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    families = []
    for _ in range(2):
        families.append(explain(q, k, v).plan.family)
        on_cpu = fmha_fwd(q + 1, k, v)
        with emulate("gfx942"):
            families.append(explain(q, k, v).target.chip.name)
            fmha_fwd(q + 1, k, v)
            with pytest.raises(NotImplementedError):
                fmha_fwd(*other_fp8)
            with emulate("gfx950"):
                families.append(explain(q, k, v).target.chip.name)
                assert torch.equal(fmha_fwd(q + 1, k, v), on_cpu)
        fmha_fwd(*other_fp8)
    assert families == ["cpu", "MI300X", "MI355X"] * 2


def test_no_tree_at_all(monkeypatch):
    monkeypatch.delenv("JITFMHA_HSA_DIR")
    assert reasons(problem()) == "This version ships no code objects for gfx942."


def test_every_tree_is_asked(tmp_path, full_tree, use_tree):
    """JITFMHA_HSA_DIR, then AITER_ASM_DIR: of those that have a kernel one is taken."""
    first = PlainKernel(ts_qo=32)
    write_tree(tmp_path, "gfx942", [first])
    use_tree(full_tree, "AITER_ASM_DIR")
    use_tree(tmp_path)
    assert [tree.origin.partition("=")[0] for tree in trees_of(chip("MI300X"))] == [
        "JITFMHA_HSA_DIR",
        "AITER_ASM_DIR",
    ]
    on = target(MI300)
    plan = plan_for(problem(), on)
    assert isinstance(plan, ready.ReadyPlan)
    assert plan.choice.row.ts_qo == 32
    (remark,) = explain_problem(problem(), on).remarks
    assert "AITER_ASM_DIR" in remark
    assert "is estimated to take" in remark
    other = plan_for(problem("gm1"), on)
    assert "AITER_ASM_DIR" in other.source
    (remark,) = explain_problem(problem("gm1"), on).remarks
    assert remark.startswith("JITFMHA_HSA_DIR")
    assert "no kernel for bf16, hdim 128x128, mask none, gm1" in remark
    text = reasons(problem(hdim_q=96, hdim_v=96))
    assert text.count("no kernel for") == 2
