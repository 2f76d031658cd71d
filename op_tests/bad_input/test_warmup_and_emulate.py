"""`warmup` and `emulate` with whatever can be passed: done, or a clear refusal."""

from typing import Any

import torch
from calls import PLAIN, Arguments, is_int
from changes import INTEGERS, MASKS, THINGS
from contract import REFUSALS, Tally
from hypothesis import strategies as st
from rules import broken_numbers
from untyped import warmup

from jitfmha import emulate
from jitfmha.emulator import DEVICES
from jitfmha.kernels.cpu import CpuPlan


def _check(tally: Tally, arguments: Arguments, broken: set[str], call: Any) -> None:
    """`broken` are the arguments of which one at least must be named; none: it must succeed."""
    error: Exception | None = None
    try:
        call()
    except Exception as raised:
        error = raised
    if error is None:
        assert not broken, f"served, though {sorted(broken)} break a rule: {arguments}"
        tally.count("returned")
        return
    assert broken, f"refused: {error!r}"
    assert type(error) in REFUSALS, f"{error!r}"
    assert any(name in str(error) for name in broken), f"{error!r} names none of {broken}"
    tally.count(type(error).__name__)


# ---- warmup --------------------------------------------------------------------------------------

_GOOD: dict[str, Any] = {
    "dtypes": st.lists(
        st.sampled_from(("fp32", "bf16", torch.float16, "fp8_e4m3fn")), min_size=1, max_size=3
    ),
    "hdims": st.lists(st.sampled_from((64, (24, 40), [33, 33], 1, 576)), min_size=1, max_size=2),
    "masks": st.lists(st.sampled_from((0, 2, "none", "causal", "b:3,4")), min_size=1, max_size=2),
    "modes": st.sampled_from((["gm0"], ["gm1"], ["gm0", "gm1"])),
    "directions": st.sampled_from((["forward"], ["backward"], ["forward", "backward"])),
    "device": st.sampled_from(("cpu", torch.device("cpu"))),
    "on_ready": st.sampled_from((None, lambda launcher, left: None)),
}
_BAD: dict[str, Any] = {
    "dtypes": st.sampled_from(
        ("bf16", [], ["fp64"], [torch.float64], [3], ["float8"], [torch.int16], [None], 5)
    ),
    "hdims": INTEGERS
    | st.sampled_from(
        ([], [0], [577], [(64,)], [(64, 0)], [True], [1.5], ["64"], [None], [2**70], "64", [[]])
    ),
    "masks": st.lists(MASKS, min_size=1, max_size=1).filter(lambda masks: not _is_mask(masks[0]))
    | st.sampled_from(("causal", [], 0)),
    "modes": st.sampled_from(("gm0", [], ["gm2"], [0], [None], [torch.zeros(2)], 3)),
    "directions": st.sampled_from(("forward", [], ["sideways"], [0], [None], 3)),
    "device": st.sampled_from(("gpu", "meta", 0, None, "cuda:99", "cpu:x", b"cpu", 1.5)),
    "on_ready": st.sampled_from((3, "print", [])),
}


def _is_mask(mask: object) -> bool:
    return not broken_numbers({**PLAIN, "mask": mask})


@st.composite
def _warmups(draw: Any) -> tuple[Arguments, set[str]]:
    broken = set(draw(st.lists(st.sampled_from(sorted(_BAD)), max_size=2)))
    arguments = {n: draw((_BAD if n in broken else _GOOD)[n]) for n in sorted(_GOOD)}
    # Each is right alone.
    if not broken & {"dtypes", "directions"} and "fp8_e4m3fn" in arguments["dtypes"]:
        broken |= {"backward"} & set(arguments["directions"])
    return arguments, broken


def test_warmup(sweep, monkeypatch):
    """Nothing is built: that would take seconds for each."""
    bound: list[str] = []
    monkeypatch.setattr(CpuPlan, "specs", property(lambda plan: bound.append(plan.kernel) or ()))

    def check(example: tuple[Arguments, set[str]], tally: Tally) -> None:
        arguments, broken = example
        bound.clear()
        names = broken | ({"mask"} if "masks" in broken else set())
        _check(tally, arguments, names, lambda: warmup(**arguments))
        assert not (broken and bound), "something was built"

    sweep(_warmups(), check)


# ---- emulate -------------------------------------------------------------------------------------


@st.composite
def _emulations(draw: Any) -> Arguments:
    flag = st.booleans() | st.just(False)
    number = st.none() | st.sampled_from((1, 2, 7))
    arguments = {
        "arch": draw(st.sampled_from(sorted(DEVICES))),
        "check": draw(flag),
        "profile": draw(flag),
        "random_order": draw(number),
        "threads": draw(number),
        "sample": None,
        "instruction_budget": draw(number),
    }
    if arguments["profile"]:
        arguments |= {"check": False, "sample": draw(number)}
    for name in draw(st.lists(st.sampled_from(sorted(arguments)), max_size=2)):
        arguments[name] = draw(INTEGERS | THINGS)
    return arguments


def _broken_emulation(arguments: Arguments) -> set[str]:
    arch, sample = arguments["arch"], arguments["sample"]
    broken = {n for n in ("check", "profile") if not isinstance(arguments[n], bool)}
    if not (isinstance(arch, str) and arch in DEVICES):
        broken.add("arch")
    for name, least, end in (
        ("threads", 1, 2**31),
        ("random_order", 0, 2**64),
        ("sample", 1, 2**31),
        ("instruction_budget", 1, 2**64),
    ):
        value = arguments[name]
        if value is not None and not (is_int(value) and least <= value < end):
            broken.add(name)
    if arguments["check"] is True and arguments["profile"] is True:
        broken |= {"check", "profile"}
    if sample is not None and arguments["profile"] is not True:
        broken.add("sample")
    return broken


def test_emulate(sweep):
    def check(arguments: Arguments, tally: Tally) -> None:
        def enter() -> None:
            with emulate(**arguments):
                pass

        _check(tally, arguments, _broken_emulation(arguments), enter)

    sweep(_emulations(), check)
