"""validate_config() and profiles: rules broken alone, and what real calls say of the same."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

import pytest
import torch
from inputs import prefix_sums
from packed_pages import packed_keys, packed_values
from refusals import refused, values
from rigs.recording_runtime import RecordingRuntime
from untyped import explain, fmha_fwd, validate_config, warmup

from jitfmha.ahead.combination import CALL_RULES, NAMED_FEATURES, TORCH_DTYPES, Combination
from jitfmha.ahead.profiles import PROFILES, Subset
from jitfmha.amd.chips import Arch, architecture
from jitfmha.call.backward import BackwardArguments, make_backward_problem
from jitfmha.call.dispatch import Proposal, plan_for, propose
from jitfmha.kernels.compiled.family import BackwardPlan, ForwardPlan
from jitfmha.kernels.compiled.rules import RULES, SERVES
from jitfmha.kernels.cpu import CpuPlan
from jitfmha.kernels.ready.family import ReadyPlan
from jitfmha.planning.target import TARGET_HERE, AmdTarget, Target, cpu_target
from jitfmha.problem.arguments import Arguments, KeyOptions
from jitfmha.problem.dtypes import plain_out_dtype
from jitfmha.problem.features import Feature
from jitfmha.problem.packed_pages import shape_of_keys, shape_of_values
from jitfmha.problem.problem import Problem, make_problem

ARCHS: tuple[Arch, ...] = get_args(Arch)
FAR = 1 << 32

BACKWARD = {"direction": "backward"}
PADDED = {"features": ["padded_sequences"]}
PAGED = {"features": ["paged_keys"], "mode": "gm1"}
PACKED = {"features": ["packed_pages"], "mode": "gm1"}
OF_QUERY_HEADS = {"features": ["query_head_descales"], "kv_dtype": "int8", "heads_k": 2}
INT8_PRODUCT = {"features": ["int8_probabilities"], "kv_dtype": "int8"}
MANY_ROWS = {"seqlen": 1 << 30, "hdim": 8, "mode": "gm1", "batch": 2}
# What breaks one rule alone, on every architecture but where one is named, and what it says.
BROKEN: list[tuple[str, dict[str, Any], list[str]]] = [
    ("hdims_are_in_range", {"hdim": 0, "hdim_v": 8}, ["q and k is 0", "576"]),
    ("hdims_are_in_range", {"hdim": 64, "hdim_v": 0}, ["of v is 0"]),
    ("query_heads_share_key_heads_evenly", {"heads": 3, "heads_k": 2}, ["3 heads", "2 heads"]),
    (
        "keys_are_as_queries_or_of_8_bits",
        {"dtype": "bf16", "kv_dtype": "fp16"},
        ["float16", "bfloat16"],
    ),
    ("outputs_are_as_queries_or_of_8_bit_calls", {"out_dtype": "fp32"}, ["float32", "bfloat16"]),
    ("padding_is_between_packed_sequences", PADDED, ["cu_seqlens_q_padded"]),
    ("pages_have_lengths", {"page_size": 16}, ["block_table", "cu_seqlens_k"]),
    ("pages_have_no_gradients", PAGED | BACKWARD, ["block_table", "backward"]),
    ("pages_have_lengths", {"features": ["packed_pages"]}, ["block_table", "cu_seqlens_k"]),
    ("pages_have_no_gradients", PACKED | BACKWARD, ["block_table", "backward"]),
    ("packed_pages_hold_whole_pieces", PACKED | {"hdim": 60}, ["hdim is 60", "8 of"]),
    (
        "packed_pages_hold_whole_pieces",
        PACKED | {"page_size": 8, "kv_dtype": "int8"},
        ["page_size is 8", "16 of"],
    ),
    ("num_splits_is_in_range", {"num_splits": 129}, ["num_splits=129", "128"]),
    ("num_splits_is_in_range", {"num_splits": -1}, ["num_splits=-1"]),
    ("scaled_inputs_have_8_bits", {"features": ["descales"]}, ["k_descale", "bfloat16"]),
    ("scaled_inputs_have_8_bits", {"features": ["token_descales"]}, ["k_descale", "bfloat16"]),
    ("scales_of_query_heads_are_of_8_bit_queries", OF_QUERY_HEADS, ["q_descale", "bfloat16"]),
    ("int8_probabilities_meet_int8_values", INT8_PRODUCT, ["p_descale", "bfloat16"]),
    *(
        ("dtype_is_one_of_the_matrix_units", {"arch": arch, "dtype": dtype}, texts)
        for arch, dtype, texts in (
            ("gfx942", "fp8_e4m3fn", ["gfx942", "fp8_e4m3fnuz", "are fp8_e4m3fn"]),
            ("gfx950", "fp8_e4m3fnuz", ["gfx950", "are fp8_e4m3fnuz"]),
        )
    ),
    ("rows_can_be_counted", MANY_ROWS, ["1073741823", "q has 1073741824"]),
    ("strides_fit", {"seqlen": 1 << 20, "batch": 2, "hdim": 256, "heads": 9}, ["4 GiB", "batch"]),
    ("the_grid_has_room", {"heads": 65536, "hdim": 8, "seqlen": 8}, ["65535 heads", "65536"]),
    ("the_grid_has_room", {"batch": 65537, "hdim": 8, "seqlen": 8}, ["sequences", "65537"]),
    ("gradients_have_tiles_of_the_dtype", {"kv_dtype": "int8"} | BACKWARD, ["fp32", "are int8"]),
]
CALL_RULE_NAMES = {rule.name for rule in CALL_RULES}
# That one is broken by the strides of tensors that a combination has none of.
NOT_OF_COMBINATIONS = {"strides_of_gradients_fit"}


@pytest.mark.parametrize(("name", "options", "texts"), BROKEN)
def test_a_rule_that_is_broken_alone(name, options, texts):
    rest = {"hdim": 64, **options}
    only = rest.pop("arch", None)
    for arch in ARCHS if only is None else (only,):
        broken = validate_config(arch, **rest)
        assert {rule.name for rule in broken} == {name}
        for text in texts:
            assert text in broken[0].reason
        assert broken[0].source


@pytest.mark.parametrize(
    "options",
    [
        {"hdim": 576, "hdim_v": 576},
        {"hdim": 576, "hdim_v": 576, "dtype": "fp32"},
        {"hdim": 576, "hdim_v": 576, "dtype": "fp32", "features": ["column_major_v"]} | BACKWARD,
        {"hdim": 1, "hdim_v": 1},
        {"num_splits": 128},
        {"heads": 65535, "hdim": 8, "seqlen": 8},
        {"batch": 65535, "hdim": 8, "seqlen": 8},
        {"seqlen": (1 << 30) - 1, "hdim": 1, "heads": 1, "mode": "gm1"},
        {"seqlen": (1 << 20) - 1, "batch": 2, "hdim": 256},
        {"kv_dtype": "int8", "heads_k": 2, "features": ["descales", "column_major_v"]},
        {"dtype": "int8", "heads_k": 2, "features": ["int8_probabilities", "query_head_descales"]},
        {"mode": "gm1", "page_size": 1, "features": ["padded_sequences"], "mask": 2},
    ],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_just_within_the_rules(arch, options):
    assert validate_config(arch, **({"hdim": 64} | options)) == ()


def test_every_rule_is_broken_here():
    rules = {rule.name for rule in (*CALL_RULES, *RULES)}
    assert rules == {name for name, _, _ in BROKEN} | NOT_OF_COMBINATIONS
    assert all(rule.source for rule in (*CALL_RULES, *RULES))


def test_compiled_kernels_serve_every_feature():
    """So that no rule says which ones."""
    assert set(Feature) <= SERVES


def test_strides_of_gradients():
    (rule,) = (rule for rule in RULES if rule.name == "strides_of_gradients_fit")
    problem = real_problem(Drawn(direction="backward"))
    assert problem.gradients is not None
    assert not list(rule.reasons(problem, "gfx942"))
    for name in ("dout", "dq", "dk", "dv"):
        strides = *getattr(problem.gradients, name)[:-3], FAR // 2, 8, 1
        far = problem._replace(gradients=problem.gradients._replace(**{name: strides}))
        (reason,) = rule.reasons(far, "gfx942")
        assert f"rows of {name} are {FAR} bytes" in str(reason)
        of_one_row = far.with_sizes(far.sizes._replace(seqlen_q=1, seqlen_k=1))
        assert not list(rule.reasons(of_one_row, "gfx942"))


def test_the_stride_of_a_single_row_says_nothing():
    near, far = (torch.empty_strided((2, 1, 2, 64), (128, seq, 64, 1)) for seq in (128, FAR))
    problems = [make_problem(Arguments.of(x, x, x, {})) for x in (near, far)]
    of_near, of_far = ((each.q, each.k, each.v, each.out) for each in problems)
    assert of_near == of_far


def test_every_broken_rule_is_told():
    broken = validate_config(
        "gfx942",
        dtype="fp32",
        mode="gm1",
        features=["split_results", "descales"],
        num_splits=200,
        heads=3,
        heads_k=2,
        seqlen=1 << 30,
        page_size=16,
    )
    assert [rule.name for rule in broken] == [
        "query_heads_share_key_heads_evenly",
        *("num_splits_is_in_range", "scaled_inputs_have_8_bits"),
        "rows_can_be_counted",
    ]


@pytest.mark.parametrize(
    ("options", "error", "texts"),
    [
        *values(ValueError, seqlen=[-1], page_size=[0], mask=["diagonal"], mode=["gm2"]),
        *values(ValueError, direction=["sideways"], layout=["dhsb"]),
        *values(TypeError, arch=[None], kv_dtype=[torch.int8], hdim=[64.0], heads=[True]),
        *values(TypeError, features=["bias"], num_splits=["2"]),
        ({"arch": "gfx906"}, ValueError, ["arch", "'gfx906'", "gfx950"]),
        ({"dtype": "float8"}, ValueError, ["dtype", "'float8'", "fp8_e4m3fn"]),
        ({"features": ["magic"]}, ValueError, ["features", "'magic'", "alibi"]),
        ({"features": ["bias", "boolean_bias"]}, ValueError, ["boolean_bias", "one bias"]),
    ],
)
def test_bad_arguments(options, error, texts):
    arguments = {"arch": "gfx942", **options}
    with refused(error, *texts):
        validate_config(**arguments)


# ---- The same as real calls ----------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A combination, as validate_config takes it, and of which a real call can be made."""

    dtype: str = "bf16"
    kv_dtype: str = ""
    out_dtype: str = ""
    hdim: int = 64
    hdim_v: int = 64
    mask: int | str = 0
    mode: str = "gm0"
    direction: str = "forward"
    features: tuple[str, ...] = ()
    layout: str = "bshd"
    page_size: int | None = None
    num_splits: int = 0
    batch: int = 2
    heads: int = 4
    heads_k: int = 2
    seqlen: int = 34
    seqlen_k: int = 40

    @property
    def options(self) -> dict[str, Any]:
        return vars(self) | {
            "kv_dtype": self.kv_dtype or None,
            "out_dtype": self.out_dtype or None,
        }

    @property
    def torch_out_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.out_dtype or plain_out_dtype(self.dtype)]

    @property
    def is_group(self) -> bool:
        return self.mode == "gm1"

    @property
    def is_paged(self) -> bool:
        return not {"paged_keys", "packed_pages"}.isdisjoint(self.features)


def drawn_combination(drawn: random.Random) -> Drawn:
    dtype = drawn.choice(("fp32", "bf16", "fp16", "fp8_e4m3fnuz", "fp8_e4m3fn", "int8"))
    features = [name for name in NAMED_FEATURES if drawn.random() < 0.05]
    if {"bias", "boolean_bias"} <= set(features):
        features.remove("bias")
    heads = (3, 2) if drawn.random() < 0.05 else drawn.choice(((4, 2), (2, 2)))
    call = Drawn(
        dtype=dtype,
        kv_dtype=drawn.choice((*("",) * 12, "int8", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp16")),
        hdim=drawn.choice((8, 64, 64, 128, 255, 256, 256, 257, 576, 577)),
        hdim_v=drawn.choice((8, 64, 64, 128, 255, 256, 256, 257, 576, 577)),
        mask=drawn.choice((0, 1, 2, "b:3,2", "t:5,1")),
        mode=drawn.choice(("gm0", "gm1")),
        direction=drawn.choice(("forward", "backward")),
        features=tuple(features),
        layout=drawn.choice(("bshd", "bhsd", "sbhd")),
        num_splits=drawn.choice((*(0,) * 12, 3, 3, 129)),
        heads=heads[0],
        heads_k=heads[1],
        seqlen=drawn.choice((0, 2, 34, 128, 130)),
        # Where there are no keys nothing says how they lie.
        seqlen_k=drawn.choice((40, 64) if "column_major_v" in features else (0, 2, 40, 64)),
    )
    if call.direction == "forward":  # backward takes what forward gave
        call = replace(call, out_dtype=drawn.choice((*("",) * 9, "bf16", "fp16", "fp32")))
    if "packed_pages" in features:  # of pieces, and of some keys, so that tensors have strides
        sizes = {"hdim": (64, 256, 576), "page_size": (16, 48), "seqlen_k": (2, 40, 64)}
        return replace(call, **{name: drawn.choice(each) for name, each in sizes.items()})
    return replace(call, page_size=drawn.choice((7, 16)) if call.is_paged else None)


def real_problem(x: Drawn) -> Problem:
    """Of a call with tensors; raises what the call would raise."""
    q, k, v = _tensors(x)
    options = _options(x, k, v)
    arguments = Arguments.of(q, k, v, {name: y for name, y in options.items() if y is not None})
    if "split_results" in x.features:
        table, count, *_ = arguments.keys or KeyOptions()
        accum = torch.empty(1, device="meta")
        arguments = arguments._replace(keys=KeyOptions(table, count, accum, accum))
    out = torch.empty((*q.shape[:-1], x.hdim_v), dtype=x.torch_out_dtype)
    forward = arguments._replace(out=out) if x.out_dtype or x.direction == "backward" else arguments
    if x.direction == "forward":
        return make_problem(forward)
    lse_shape = (x.heads, x.seqlen) if x.is_group else (x.batch, x.heads, x.seqlen)
    return make_backward_problem(
        BackwardArguments(forward, torch.empty(lse_shape), torch.empty_like(out))
    )


def _tensors(x: Drawn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_q, of_kv = (TORCH_DTYPES[name] for name in (x.dtype, x.kv_dtype or x.dtype))

    def tensor(dtype: torch.dtype, rows: int, heads: int, hdim: int, *, is_paged: bool) -> Any:
        batch = 1 if x.is_group else x.batch
        if is_paged:
            assert x.page_size is not None
            batch, rows = -(-rows // x.page_size), x.page_size
        sizes = dict(zip("bshd", (batch, rows, heads, hdim), strict=True))
        lying = torch.empty([sizes[name] for name in x.layout], dtype=dtype)
        result = lying.permute([x.layout.index(name) for name in "bshd"])
        return result[0] if x.is_group and not is_paged else result

    q = tensor(of_q, x.seqlen, x.heads, x.hdim, is_paged=False)
    k = tensor(of_kv, x.seqlen_k, x.heads_k, x.hdim, is_paged=x.is_paged)
    v = tensor(of_kv, x.seqlen_k, x.heads_k, x.hdim_v, is_paged=x.is_paged)
    if "packed_pages" in x.features:
        return q, packed_keys(k), packed_values(v)
    if "column_major_v" in x.features:
        v = v.transpose(-3, -1).contiguous().transpose(-3, -1)
    return q, k, v


def _options(x: Drawn, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    has = set(x.features)
    sums = prefix_sums([0] * x.batch)
    bias_shape = (x.heads, x.seqlen, 5) if x.is_group else (1, 1, 1, x.seqlen_k)
    bias = torch.zeros(bias_shape, dtype=TORCH_DTYPES[plain_out_dtype(x.dtype)])
    scale, scales = torch.ones(1), {}
    eight_bit = ("fp8_e4m3fnuz", "fp8_e4m3fn", "int8")
    if "descales" in has:
        is_scaled = (x.dtype in eight_bit, *((x.kv_dtype or x.dtype) in eight_bit,) * 2)
        if not any(is_scaled):
            is_scaled = (False, True, False)
        names = ("q_descale", "k_descale", "v_descale")
        scales = {name: scale for name, given in zip(names, is_scaled, strict=True) if given}
    if "token_descales" in has:
        of_tokens = {"k_descale": shape_of_keys(k), "v_descale": shape_of_values(v)}
        if "int8_probabilities" in has:  # sums of integers have one scale
            del of_tokens["v_descale"]
        scales |= {name: torch.ones(*shape[:-1], 1) for name, shape in of_tokens.items()}
    if "query_head_descales" in has:
        scales["q_descale"] = torch.ones(x.heads)
    if "int8_probabilities" in has:
        scales["p_descale"] = scale
    given: dict[str, Any] = {
        "mask": x.mask,
        "return_lse": "lse" in has,
        "num_splits": x.num_splits,
        "alibi_slopes": torch.ones(x.heads) if "alibi" in has else None,
        "logit_softcap": 1.0 if "softcap" in has else 0.0,
        "sink": torch.ones(x.heads) if "sinks" in has else None,
        "sink_size": int("sink_tokens" in has),
        "dropout_p": 0.5 if "dropout" in has else 0.0,
        "rng_state": torch.zeros(2, dtype=torch.int64) if "dropout" in has else None,
    }
    if "bias" in has or "boolean_bias" in has:
        given["bias"] = bias.bool() if "boolean_bias" in has else bias
    if x.is_group:
        given |= {"cu_seqlens_q": sums, "cu_seqlens_k": sums, "max_seqlen_k": 5}
    if "padded_sequences" in has:
        given["cu_seqlens_q_padded"] = sums.clone()
    if x.is_paged:
        given["block_table"] = torch.zeros(x.batch, 3, dtype=torch.int32)
    return given | scales


@cache
def target_of_arch(arch: Arch) -> AmdTarget:
    """A GPU that records."""
    return RecordingRuntime().target(architecture(arch).unlisted_chip)


def refusal_of_real_call(x: Drawn, arch: Arch) -> tuple[str, ...]:
    """What stops a real call: one sentence of its checks, or all reasons of the family."""
    try:
        proposal: Proposal = propose(real_problem(x), target_of_arch(arch))
    except (TypeError, ValueError, NotImplementedError) as error:
        return (str(error),)
    if proposal.plan is not None:
        return ()
    return dict(proposal.refusals)["compiled"].sentences()


@pytest.mark.sample("number", range(4000), 120)
def test_agrees_with_real_calls(rng, number):
    drawn = random.Random(rng.initial_seed())
    combination, arch = drawn_combination(drawn), drawn.choice(ARCHS)
    broken = validate_config(arch, **combination.options)
    said = refusal_of_real_call(combination, arch)
    of_call, of_kernels = (
        [rule.reason for rule in broken if rule.name in names]
        for names in (CALL_RULE_NAMES, {rule.name for rule in RULES})
    )
    if of_call:
        # A call raises for the first one that its checks come to.
        assert len(said) == 1, combination
        assert said[0] in of_call, combination
    else:
        assert sorted(said) == sorted(of_kernels), combination


@pytest.mark.parametrize("mode", ["gm0", "gm1"])
def test_a_combination_lies_as_real_tensors_do(mode):
    call = Drawn(mode=mode, direction="backward")
    real = real_problem(call)
    combination = Combination(
        *(call.dtype, call.dtype, call.hdim, call.hdim_v),
        mode=real.mode,
        direction="backward",
        batch=call.batch,
        heads_q=call.heads,
        heads_k=call.heads_k,
        seqlen_q=call.seqlen,
        seqlen_k=call.seqlen_k,
    )
    made = combination.problem()
    assert (made.sizes, made.gradients) == (real.sizes, real.gradients)
    made = combination._replace(features=frozenset([Feature.COLUMN_MAJOR_V])).problem()
    assert made.gradients is not None
    assert (made.sizes.v[-1], made.gradients.dv[-1]) == (call.seqlen_k, 1)


# ---- Profiles ------------------------------------------------------------------------------------


@pytest.fixture
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made, and no more."""
    for plan in (CpuPlan, ReadyPlan, ForwardPlan, BackwardPlan):
        monkeypatch.setattr(plan, "specs", ())


@contextmanager
def on(target: Target) -> Iterator[None]:
    token = TARGET_HERE.set(target)
    try:
        yield
    finally:
        TARGET_HERE.reset(token)


_IN_PAGES: dict[str, Any] = {"mode": "gm1", "features": ("paged_keys",), "mask": 2}


def drawn_call(drawn: random.Random, subset: Subset) -> Drawn:
    """A call of realistic sizes that a part of a profile is for."""
    mode, features = drawn.choice(subset.modes), drawn.choice(subset.features)
    hdim, hdim_v = drawn.choice(subset.hdims)
    is_decoding = drawn.choice(subset.heads) != (1, 1)
    heads = (8, 2) if is_decoding else drawn.choice(((8, 8), (8, 2)))
    dtype, kv_dtype = drawn.choice(subset.dtypes)
    call = Drawn(
        dtype=dtype,
        kv_dtype=kv_dtype,
        hdim=hdim,
        hdim_v=hdim_v,
        mask=0 if drawn.choice(subset.masks).is_none else 2,
        mode=mode,
        direction=drawn.choice(subset.directions),
        features=features,
        layout=drawn.choice(("bshd", "bhsd")),
        batch=3,
        heads=heads[0],
        heads_k=heads[1],
        seqlen=3 if is_decoding else 600,
        seqlen_k=640,
    )
    return replace(call, page_size=drawn.choice((16, 48, 256)) if call.is_paged else None)


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("profile", PROFILES)
def test_calls_find_what_a_profile_builds(seed, profile, on_cpu):
    drawn = random.Random(seed)
    target: Target = cpu_target() if on_cpu else target_of_arch(drawn.choice(ARCHS))
    with on(target):
        built = {launcher.name for launcher in warmup(profile=profile)}
    families = set()
    for subset in PROFILES[profile]:
        for _ in range(12):
            call = drawn_call(drawn, subset)
            try:
                problem = real_problem(call)
                if call.is_group:
                    problem = problem._replace(
                        unevenness=drawn.choice(((None, None), (2, 2), (9, 9)))
                    )
                plan = plan_for(problem, target)
            except NotImplementedError:
                assert call.dtype not in ("bf16", "fp16")  # those are served everywhere
                continue
            families.add(plan.family)
            # Those that come ready have tiles of two sizes, and one launcher.
            assert plan.kernel in built or plan.family == "ready", call
    assert families & {"cpu", "compiled"}


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize(
    ("profile", "call"),
    [
        ("inference", Drawn(hdim=64, heads=8, seqlen=2, page_size=16, **_IN_PAGES)),
        ("inference", Drawn(hdim=64, heads=2, seqlen=600, page_size=32, **_IN_PAGES)),
        ("training", Drawn(hdim=128, hdim_v=128, direction="backward", features=("dropout",))),
        ("flash-attn", Drawn(hdim=96, hdim_v=96, mask=2, features=("alibi",), seqlen=600)),
        ("flash-attn", Drawn(features=("softcap",), mask="b:128,0", direction="backward")),
        (
            "aiter",
            Drawn(hdim=192, hdim_v=128, features=("alibi",), direction="backward", mode="gm1"),
        ),
        ("pytorch", Drawn("fp16", features=("boolean_bias",), direction="backward")),
        ("pytorch", Drawn("fp32", features=("bias",), seqlen=600)),
    ],
)
def test_calls_that_a_profile_is_for(profile, call):
    with on(target_of_arch("gfx942")):
        built = {launcher.name for launcher in warmup(profile=profile)}
    plan = plan_for(real_problem(call), target_of_arch("gfx942"))
    assert plan.family == "compiled"
    assert plan.kernel in built


@pytest.mark.usefixtures("nothing_is_built")
def test_arguments_override_a_profile():
    with on(target_of_arch("gfx942")):
        everything = warmup(profile="inference")
        of_gm0 = warmup(profile="inference", modes=["gm0"], hdims=[24], dtypes=["fp16"])
        backward = warmup(profile="inference", directions=["backward"], hdims=[24])
        with pytest.raises(NotImplementedError, match="block_table"):
            warmup(profile="inference", features=["paged_keys"], directions=["backward"])
        # What is asked for by name is not left out.
        with pytest.raises(NotImplementedError, match="fp8_e4m3fn"):
            warmup(dtypes=["bf16", "fp8_e4m3fn"], hdims=[64], masks=[0], modes=["gm0"])
    assert len(everything) > len(of_gm0) > 0
    assert all("_hd24x24_fp16_" in x.name and "_gm0_" in x.name for x in of_gm0)
    assert all(x.name.startswith("fmha_bwd_") for x in backward)


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("arch", ARCHS)
def test_packed_pages_are_built(arch):
    """What calls of them look up, in prefill and in decoding, is what was asked for by name."""
    wanted: dict[str, Any] = {"hdims": [128], "masks": [2], "modes": ["gm1"]}
    with on(target_of_arch(arch)):
        warmed = warmup(profile="inference", features=["packed_pages"], **wanted)
    names = {launcher.name for launcher in warmed}
    for seqlen, heads in ((2, 2), (2, 8), (600, 8)):
        call = Drawn(
            *("bf16", "", "", 128, 128, 2, "gm1"),
            features=("packed_pages",),
            page_size=64,
            heads=heads,
            seqlen=seqlen,
            seqlen_k=640,
        )
        plan = plan_for(real_problem(call), target_of_arch(arch))
        assert (plan.kernel in names, "packed_pages" in plan.kernel) == (True, True), call


def test_a_profile_is_built_for_a_gpu(rng):
    """And a call of its kind launches what was built, on a runtime that records."""
    runtime = RecordingRuntime()
    wanted = {"dtypes": ["fp16"], "hdims": [24], "masks": [0], "features": ["plain"]}
    q, k, v = (torch.randn(2, 70, 3, 24, generator=rng).half() for _ in range(3))
    with runtime.stands_for(runtime.target("MI300X")):
        (warmed,) = warmup(profile="pytorch", directions=["forward"], **wanted)
        plan = explain(q, k, v).plan
        assert (plan.family, plan.kernel, plan.is_built) == ("compiled", warmed.name, True)
        fmha_fwd(q, k, v)
        (again,) = warmup(profile="pytorch", directions=["forward"], **wanted)
    assert again.was_cached
    assert runtime.launch_count == 1


def test_a_profile_is_built_for_a_cpu():
    wanted = {"dtypes": ["fp32"], "hdims": [64], "masks": [0], "features": ["plain"]}
    warmed = warmup(profile="pytorch", directions=["forward"], **wanted)
    x = torch.zeros(2, 9, 4, 64)
    plans = [explain(x[:, :queries], x, x).plan for queries in (9, 1)]
    assert [plan.kernel for plan in plans] == [each.name for each in warmed]
    assert all(plan.is_built for plan in plans)
