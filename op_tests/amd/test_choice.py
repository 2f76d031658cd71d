"""Which family a call takes on an AMD GPU: the one that is estimated to take least."""

import json
from math import ceil
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from amd_problems import AmdProblem
from inputs import prefix_sums
from rigs.recording_runtime import RecordingRuntime
from torch import Tensor
from untyped import explain, explain_bwd, fmha_fwd

from jitfmha import emulate
from jitfmha.amd.chips import Arch
from jitfmha.amd.clock import clock_of
from jitfmha.call import run
from jitfmha.flash_attn import flash_attn_with_kvcache
from jitfmha.jit.errors import CompilerNotFound
from jitfmha.jit.resources import hsa_dir, templates_dir
from jitfmha.jit.toolchain import device_hip
from jitfmha.kernels import launch_estimate
from jitfmha.kernels.cycles import kernel_cycles
from jitfmha.kernels.estimate import forward_estimate, lengths_of
from jitfmha.kernels.launch_estimate import Lengths, Machine, Moved, SharedWork
from jitfmha.planning.plan import Plan
from jitfmha.planning.target import Target
from jitfmha.problem.arguments import Arguments
from jitfmha.problem.problem import Problem, make_problem

CHIPS = ("MI300X", "MI308X", "MI350X", "MI355X")


def tensors(
    batch: int, heads: tuple[int, int], seqlens: tuple[int, int], hdim: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    """Of bf16, without memory."""
    rows = zip(seqlens, heads, strict=True)
    q, k = (torch.empty(batch, n, h, hdim, dtype=torch.bfloat16, device="meta") for n, h in rows)
    return q, k, k


def family(*shape: Any, device: str, **options: Any) -> str:
    return str(explain(*tensors(*shape), device=device, **options).plan.family)


@pytest.mark.parametrize("device", CHIPS)
@pytest.mark.parametrize("shape", [(16, 8192), (1, 32768), (64, 2048)])
def test_decoding_reads_keys_once_for_the_heads_that_share_them(device, shape):
    batch, keys = shape
    for mask in (0, 2):
        plan = explain(*tensors(batch, (32, 8), (1, keys)), device=device, mask=mask)
        assert "_stacked_" in plan.plan.kernel
        estimates = {x["family"]: x["microseconds"] for x in plan.to_dict()["estimates"]}
        assert estimates["ready"] > 1.5 * estimates["compiled"]
    packed = [x[0].expand(batch, *x.shape[2:]) for x in tensors(1, (32, 8), (1, 1))[:1]]
    k = torch.empty(batch * keys, 8, 128, dtype=torch.bfloat16, device="meta")
    sums_q, sums_k = prefix_sums([1] * batch), prefix_sums([keys] * batch)
    options = {"cu_seqlens_q": sums_q.to("meta"), "cu_seqlens_k": sums_k.to("meta")}
    assert "_stacked_" in explain(*packed, k, k, device=device, **options).plan.kernel


@pytest.mark.parametrize("device", CHIPS)
@pytest.mark.parametrize("heads", [(32, 32), (64, 8)])
def test_prefill_takes_kernels_that_come_ready(device, heads):
    for mask in (0, 2):
        assert family(4, heads, (4096, 4096), device=device, mask=mask) == "ready"


def test_the_tiles_of_gfx942_for_hdim_64_are_slower_than_compiled_ones():
    assert family(4, (32, 32), (4096, 4096), 64, device="MI300X") == "compiled"


@pytest.mark.parametrize(
    ("device", "hdim", "heads", "batch", "taken"),
    [
        # hsa/README.md: workgroups wait for their turns where all of a head begin at once.
        ("MI355X", 64, 8, 1, "compiled"),
        ("MI355X", 128, 8, 1, "compiled"),
        ("MI300X", 128, 64, 8, "ready"),
        ("MI355X", 128, 64, 8, "ready"),
    ],
)
def test_small_deterministic_backward(device, hdim, heads, batch, taken):
    q, k, v = tensors(batch, (heads, heads), (4096, 4096), hdim)
    lse = torch.empty(batch, heads, 4096, device="meta")

    def families(deterministic: bool) -> str:
        plan = explain_bwd(q, q, k, v, q, lse, device=device, deterministic=deterministic)
        return str(plan.plan.family)

    assert families(deterministic=True) == taken
    assert families(deterministic=False) == "ready"


def test_explain_prints_the_estimates():
    plan = explain(*tensors(16, (32, 8), (1, 8192)), device="MI300X")
    values = json.loads(json.dumps(plan.to_dict()))
    ready, compiled = values["estimates"]
    assert (ready["family"], compiled["family"]) == ("ready", "compiled")
    lines = str(plan).splitlines()
    assert f"estimate {compiled['microseconds']:.4g} us" in lines
    said = f"{ready['kernel']} of {ready['source']} is estimated to take"
    assert f"not ready: {said} {ready['microseconds']:.4g} us." in lines
    assert not any("preferred" in line for line in lines)


def test_a_named_tree_is_taken_where_it_is_as_quick(monkeypatch):
    """Ours under another name, beside ours; for decoding it is no use."""
    ours = hsa_dir()
    monkeypatch.setenv("JITFMHA_HSA_DIR", str(ours))
    for batch, heads, seqlens, is_named in (
        (4, (32, 32), (4096, 4096), True),
        (16, (32, 8), (1, 8192), False),
    ):
        plan = explain(*tensors(batch, heads, seqlens), device="MI300X")
        assert len(plan.estimates) == 3
        assert (f"JITFMHA_HSA_DIR={ours}" in plan.plan.source) == is_named


def test_a_tree_in_aiters_form_is_no_choice_for_decoding(tree: Path):
    with emulate("gfx942"):
        q, k = (torch.empty(16, n, h, 128).bfloat16() for n, h in ((1, 32), (8192, 8)))
        plan = explain(q, k, k, bf16_cvt="rtne")
    assert plan.plan.family == "compiled"
    assert str(tree) in plan.to_dict()["estimates"][0]["source"]


def counted_plans(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    plans: list[Problem] = []
    plan_for = run.plan_for

    def counted(problem: Problem, target: Target) -> Plan:
        plans.append(problem)
        return plan_for(problem, target)

    monkeypatch.setattr(run, "plan_for", counted)
    return plans


def test_a_growing_loop_is_planned_once_for_each_kernel(runtime: RecordingRuntime, monkeypatch):
    """And each call gets the kernel that a fresh process would give it."""
    lengths = (*range(1, 130, 3), *range(130, 3000, 37))
    q = torch.zeros(1, 1, 8, 128, dtype=torch.bfloat16)
    cache = torch.zeros(1, max(lengths), 8, 128, dtype=torch.bfloat16)

    def symbols(each_afresh: bool) -> list[bytes]:
        runtime.reset()
        target = runtime.target("MI300X")
        for n in lengths:
            with runtime.stands_for(runtime.target("MI300X") if each_afresh else target):
                fmha_fwd(q, cache[:, :n], cache[:, :n])
        return [launch.symbol for launch in runtime.launches()]

    plans = counted_plans(monkeypatch)
    in_a_loop = symbols(each_afresh=False)
    kernels = {symbol for symbol in in_a_loop if not symbol.endswith(b"_combine")}
    assert len(plans) == len(kernels)
    assert in_a_loop == symbols(each_afresh=True)


def test_a_kv_cache_takes_the_stacked_kernel(runtime: RecordingRuntime, monkeypatch):
    q = torch.zeros(8, 1, 32, 128, dtype=torch.bfloat16)
    cache = torch.zeros(8, 2048, 8, 128, dtype=torch.bfloat16)
    plans = counted_plans(monkeypatch)
    with runtime.stands_for(runtime.target("MI355X")):
        for n in range(2000, 2040):
            lengths = torch.full((8,), n, dtype=torch.int32)
            flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, causal=True)
    assert all(b"_stacked_" in launch.symbol for launch in runtime.launches())
    assert len(plans) == 1


@pytest.mark.parametrize("chip", ["gfx942", "gfx942-mi308", "gfx950"])
@pytest.mark.parametrize("is_group", [False, True])
def test_what_is_taken_computes_the_right_thing(rng, chip, is_group):
    lengths = ((3, 900), (1, 590)) if is_group else ((1, 700),)
    batch = None if is_group else 2
    call = AmdProblem(rng, heads=(16, 1), lengths=lengths, batch=batch, mask=2)
    with emulate(chip, check=True) as seen:
        assert explain(call.q, call.k, call.v, **call.arguments).plan.family == "compiled"
        actual = call.run()
    assert seen.findings() == ()
    call.assert_right(actual, 2**-8)


def test_a_plan_of_stacked_heads_serves_few_queries(runtime: RecordingRuntime):
    q = torch.zeros(1, 40, 8, 96, dtype=torch.bfloat16)
    x = torch.zeros(1, 300, 2, 96, dtype=torch.bfloat16)
    problem = make_problem(Arguments.of(q, x, x, {}))
    plan = run.plan_for(problem, runtime.target("MI300X"))
    # Fewer queries have a kernel of 16 rows, and more are too many to be stacked.
    for n, is_served in ((1, False), (33, True), (64, True), (65, False), (300, False)):
        assert plan.serves(problem.sizes._replace(seqlen_q=n)) == is_served
    far = problem.sizes._replace(q=(0, 8 * 96, 1 << 29, 1))
    assert not plan.serves(far)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_kernels_that_were_not_measured_count_as_wider_ones(arch: Arch):
    def cycles(hdims: tuple[int, int], dtype: str = "bf16") -> float:
        return kernel_cycles(arch, "compiled", "forward", dtype, hdims, False)[-1].of_row[0]

    assert cycles((80, 80)) == cycles((96, 96))
    assert cycles((96, 32)) == cycles((96, 96))
    assert cycles((96, 96)) < cycles((160, 160)) < cycles((576, 512))
    assert cycles((1152, 1024)) == pytest.approx(2 * cycles((576, 512)))


def test_without_a_compiler_a_kernel_that_is_there_is_taken(monkeypatch, tmp_path):
    """However much longer it takes; where there is none, the error says how to get a compiler."""

    def no_compiler(**asked: bool) -> NoReturn:
        raise CompilerNotFound("Get one.")

    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(device_hip, "find_device_hip", no_compiler)
    explanation = explain(*tensors(16, (32, 8), (1, 8192)), device="MI300X")
    assert explanation.plan.family == "ready"
    (reason,) = explanation.rejected["compiled"]
    assert "there is no compiler" in reason
    assert family(1, (2, 2), (8, 8), 96, device="MI300X") == "compiled"


def packed(lengths: list[int], longest: int | None) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """A pack with one query a sequence, whose longest keys are told."""
    q = torch.empty(len(lengths), 16, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(sum(lengths), 2, 128, dtype=torch.bfloat16, device="meta")
    sums = {"cu_seqlens_q": prefix_sums([1] * len(lengths)), "cu_seqlens_k": prefix_sums(lengths)}
    options: dict[str, Any] = {name: each.to("meta") for name, each in sums.items()}
    return (q, k, k), options | {"max_seqlen_q": 1, "max_seqlen_k": longest}


def estimates(lengths: list[int], longest: int | None) -> dict[str, float]:
    tensors, options = packed(lengths, longest)
    told = explain(*tensors, device="MI300X", **options).to_dict()["estimates"]
    # Shares of little listed work are the least that there are, whatever lengths are.
    return {each["family"]: each["microseconds"] for each in reversed(told)}


def test_estimates_know_how_long_the_longest_sequence_is_told_to_be():
    lengths = [1600] + [64] * 7
    even, uneven, unknown = (estimates(lengths, n) for n in (256, 1600, None))
    for name, each in unknown.items():
        assert even[name] < each < uneven[name]
    assert uneven["ready"] > 3 * even["ready"]


@pytest.mark.parametrize("batch", [2, 3, 8, 64])
def test_the_lengths_that_are_assumed(batch):
    tensors, options = packed([64] * batch, 64)
    problem = make_problem(Arguments.of(*tensors, options))
    equal, exponential = lengths_of(problem)
    assert equal == ([1.0], [1.0], 1.0)
    for twice in range(2, 2 * min(batch, 8) + 1):
        (told,) = lengths_of(problem._replace(unevenness=(2, twice)))
        assert told.queries == pytest.approx([1.0] * min(batch, 8))
        longest = min((twice + 0.5 * (twice > 2)) / 2, batch, 8)  # told rounded down
        assert told.keys[0] == told.longest_keys == longest
        for shares in (told.keys, exponential.keys):
            assert sum(shares) == pytest.approx(len(shares))
            assert list(shares) == sorted(shares, reverse=True)
            assert min(shares) >= 0


@pytest.mark.parametrize("longest", [4, 5, 8, 16])
def test_chunks_that_are_assumed_beside_decoding(longest):
    """As many as have all queries, in the middle of prompts whose mean is known.

    Or those with most queries have most keys, unless they are one for all of them.
    """
    tensors, options = packed([64] * 8, 64)
    *by_rank, told = lengths_of(
        make_problem(Arguments.of(*tensors, options))._replace(unevenness=(longest, 2))
    )
    of_chunk = min((longest + 0.5) / 2, 8)
    chunks = ceil(8 / of_chunk)
    assert len(by_rank) == (chunks > 1)
    for each in by_rank:
        assert list(each.queries) == sorted(each.queries, reverse=True)
        assert each.queries[0] == told.queries[0] == of_chunk
        assert each.keys == pytest.approx([1.0] * 8)
    assert sum(told.queries) == sum(told.keys) == pytest.approx(8)
    assert told.queries[: chunks - 1] == pytest.approx([of_chunk] * (chunks - 1))
    assert max(told.queries[chunks:]) == 0
    for queries, keys in zip(told.queries[:chunks], told.keys[:chunks], strict=True):
        assert keys == pytest.approx((1 + queries / 64) / 2)


def test_an_engine_gets_the_first_tiles_of_all_sequences():
    """Where the longest has a multiple of 16 tiles: four XCDs of four engines take turns."""
    q = torch.empty(1047, 48, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(96000, 6, 128, dtype=torch.bfloat16, device="meta")
    sums = {
        "cu_seqlens_q": prefix_sums([1024] + [1] * 23).to("meta"),
        "cu_seqlens_k": prefix_sums([4000] * 24).to("meta"),
    }
    told = {"max_seqlen_q": 1024, "max_seqlen_k": 4000, "num_splits": 1}
    plan: Any = explain(q, k, k, mask=2, device="MI355X", **sums, **told).plan
    row, slices = plan.traits.row(), plan.traits.slices
    assert (row.ts_qo, row.stacks_heads) == (128, True)
    estimate = forward_estimate(plan.problem, plan.target, "compiled", row, slices)

    def seconds(longest: int) -> float:
        """Of one with so many queries among those with one, of 44 on average."""
        lengths = Lengths([(longest - 1) / 43] + [0.0] * 23, [1.0] * 24, 1.0)
        return estimate.seconds_of(lengths, 44, 4000, 1)

    assert seconds(1024) > 2 * seconds(1040)


def test_memory_bounds_a_launch_and_is_waited_for_by_few_waves():
    machine = Machine("gfx942", 304, 8, 4, 1e12, clock_of("MI300X").speed)
    moved = Moved(at_ends=1e6, streamed=1e7)  # in 1 and 10 us
    assert machine.overlapped(0.0, moved, 0.0) == pytest.approx(11e-6)
    assert machine.overlapped(2e-5, moved, 0.0) == pytest.approx(21e-6)
    # Of 20 us with 60 cycles for a row, 4.4 us are left beside the time on the way.
    alone, *others = (machine.waits(2e-5, 60, moved, shared) for shared in (1, 2, 4))
    assert alone == pytest.approx(1e-5 - (1 - 1500 / (32 * 60)) * 2e-5)
    assert others == pytest.approx([alone - 5e-6, 0])
    assert machine.waits(2e-5, 40, moved, 1) == pytest.approx(1e-5)  # none is left
    assert machine.overlapped(2e-5, moved, alone) == pytest.approx(21e-6 + alone)


def test_shares_of_persistent_workgroups():
    """As much work for each as for the others, and the last one adds the parts of a block."""
    machine = Machine("gfx942", 304, 8, 4, 1e12, clock_of("MI300X").speed)

    def cycles(every: float, longest: float) -> float:
        work = SharedWork(every, longest, least=5000.0, once=100.0, tile=10.0, columns=64)
        return machine.cycles_of_shares(work, shared=2)

    assert cycles(3000.0, 3000.0) == 3000  # of one share
    of_two, of_three, of_four = (2 * 64 * (16.0 + 8.0 * others) for others in (1, 2, 3))
    assert cycles(5001.0, 5001.0) == 5110 + of_two  # shares of little work are the least
    assert cycles(608 * 6000.0, 6000.0) == 6110 + of_two
    assert cycles(608 * 6000.0, 6001.0) == 6110 + of_three
    # The cuts of a block of 3.5 shares may be four, of groups of four parts and of the others.
    assert cycles(608 * 6000.0, 3.5 * 6000.0) == 6110 + of_four + of_two
    assert cycles(608 * 6000.0, 14.5 * 6000.0) == 6110 + 2 * of_four
    # All of it is one block.
    assert cycles(608 * 6000.0, 608 * 6000.0) == 6110 + 4 * of_four + of_three


def test_all_tiles_of_listed_work_count_though_some_are_looked_at():
    """One sequence has 64 tiles of few keys, and 32 have one of many."""
    q = torch.empty(8192 + 32 * 128, 2, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(33 * 4096, 2, 128, dtype=torch.bfloat16, device="meta")
    sums = {f"cu_seqlens_{x}": prefix_sums([1] * 33).to("meta") for x in "qk"}
    told = {"max_seqlen_q": 8192, "max_seqlen_k": 4096}
    plans: Any = [x.plan for x in explain(q, k, k, device="MI308X", **sums, **told).estimates]
    (plan,) = [x for x in plans if getattr(getattr(x, "traits", None), "lists_work", False)]
    row, slices = plan.traits.row(), plan.traits.slices
    estimate = forward_estimate(plan.problem, plan.target, "compiled", row, slices, is_shared=True)
    rows, tiles = (8192 + 32 * 128) // 33, [64.0] + [1.0] * 32

    def seconds(keys: list[float]) -> float:
        queries = [(128 * n - 1) / (rows - 1) for n in tiles]
        return estimate.seconds_of(Lengths(queries, keys, 1.0), rows, 1024, 1)

    # As much work as where all of the 96 tiles have as many keys.
    of_few = (96 - 32 * 2) / 64
    assert seconds([of_few] + [2.0] * 32) == pytest.approx(seconds([1.0] * 33), rel=0.05)


def test_the_least_share_is_that_of_the_kernels():
    header = (templates_dir() / "amd/work_list.h").read_text(encoding="utf-8")
    assert f"kLeastShareTiles = {launch_estimate._LEAST_SHARE_TILES}," in header
    header = (templates_dir() / "amd/block_parts.h").read_text(encoding="utf-8")
    assert f"kGroup = {launch_estimate._ADDED_AT_ONCE};" in header
