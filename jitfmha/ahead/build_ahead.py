"""The plans of what is built ahead: profiles, what takes the place of their parts, and checks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from typing import Any, TypeVar, get_args

import torch

from ..call.dispatch import plans_for
from ..planning.plan import Plan
from ..planning.specification import OUT_DTYPES, signature_of
from ..planning.target import AmdTarget, CpuTarget, Target
from ..problem.dtypes import DTYPE_NAMES, TORCH_DTYPES
from ..problem.mask import parse_mask
from ..problem.problem import MAX_HDIM, Direction, Mode, Problem
from ..problem.unevenness import MOST_UNEVEN
from .combination import NAMED_FEATURES, Combination, check_combination, known
from .kernel_set import entries_of
from .profiles import DEFAULT, PROFILES, Dtypes, Features, Subset, refuse_out_dtypes
from .receipts import UNIVERSE, Receipt, allows, receipt_named

_T = TypeVar("_T")

_MANY_QUERIES = 64  # as prompts have
_FULL_TILE = 256  # of queries, as long prompts have


def plans_ahead(
    target: Target,
    profile: str | int | None,
    kernel_set: str | PathLike[str] | None = None,
    **parts: Iterable[Any] | None,
) -> dict[str, Plan]:
    """The plans for every combination on ``target``, by the names of their kernels.

    The arguments, and what is raised: see :func:`jitfmha.warmup`.
    """
    listed = {name: _several(name, x) for name, x in parts.items() if x is not None}
    given = {name: tuple(map(_CHECKS[name], values)) for name, values in listed.items()}
    if kernel_set is not None:
        for name in [*(("profile",) if profile is not None else ()), *given]:
            raise ValueError(f"kernel_set {kernel_set} says what is built; {name} has no place")
        return _plans_of_set(kernel_set, target)
    subsets, receipt = _chosen(profile)
    subsets = tuple(each._replace(**given) for each in subsets)
    asked = " and ".join(f"{name} {values}" for name, values in listed.items())
    if "out_dtypes" in given:
        refuse_out_dtypes(subsets, asked)
    combinations = (x for each in subsets for x in combinations_of(each))
    if receipt is not None:
        kept = receipt
        combinations = (x for x in combinations if allows(kept, signature_of(x.problem())))
    plans = _plans(combinations, target, _may_be_left_out(profile, given))
    if receipt is not None and not plans:
        raise ValueError(f"profile {profile!r} keeps {receipt.keeps}: none has {asked}")
    return plans


def _chosen(profile: str | int | None) -> tuple[tuple[Subset, ...], Receipt | None]:
    """What is built for a profile, and the receipt that it is filtered by."""
    if profile is None:
        return DEFAULT, None
    if isinstance(profile, str) and profile in PROFILES:
        return PROFILES[profile], None
    return UNIVERSE, receipt_named(profile)


def _plans_of_set(kernel_set: str | PathLike[str], target: Target) -> dict[str, Plan]:
    plans: dict[str, Plan] = {}
    for entry in entries_of(kernel_set, target.arch if isinstance(target, AmdTarget) else "cpu"):
        may_be_left_out = _ANY_ERROR if entry.has_wildcards else ()
        found = _plans(entry.combinations, target, may_be_left_out)
        plans |= {name: plan for name, plan in found.items() if plan.family in entry.pipelines}
    if not plans:
        raise ValueError(f"kernel_set {kernel_set} has no kernels of its pipelines for {target}")
    return plans


_ANY_ERROR = NotImplementedError, TypeError, ValueError


def _may_be_left_out(
    profile: str | int | None, given: Mapping[str, object]
) -> tuple[type[Exception], ...]:
    """The errors of combinations that nobody asked for one by one."""
    if profile is not None:
        return _ANY_ERROR
    return () if given.keys() >= {"dtypes", "hdims"} else (NotImplementedError,)


def _plans(
    combinations: Iterable[Combination], target: Target, left_out: tuple[type[Exception], ...]
) -> dict[str, Plan]:
    """The plans of all families for all combinations, by the names of their kernels.

    Raises an error of those that are ``left_out`` where nothing else is left.
    """
    plans: dict[str, Plan] = {}
    unserved: Exception | None = None
    for combination in combinations:
        try:
            check_combination(combination)
            problems = _problems(combination, target)
            found = [x for problem in problems for x in plans_for(problem, target)]
        except left_out as error:
            unserved = error
            continue
        for plan in found:
            plans.setdefault(plan.kernel, plan)
    if unserved is not None and not plans:
        raise unserved
    return plans


def _problems(combination: Combination, target: Target) -> Iterator[Problem]:
    """The problem of such calls; and of packed ones also of long and of uneven sequences.

    These have kernels of their own, as few and many queries of gm0 on the CPU.
    """
    yield combination.problem()
    if combination.direction == "backward":
        return
    if combination.mode == "gm0" and isinstance(target, CpuTarget):
        for queries in (_MANY_QUERIES, 1):
            yield combination._replace(seqlen_q=queries).problem()
    if combination.mode == "gm1":
        yield combination._replace(seqlen_q=_FULL_TILE).problem()
        # Whether heads share keys tells two kernels for uneven sequences apart.
        for heads_q in {combination.heads_q, 2 * combination.heads_k}:
            many = combination._replace(seqlen_q=_MANY_QUERIES, batch=2, heads_q=heads_q)
            yield many.problem()._replace(unevenness=(MOST_UNEVEN, MOST_UNEVEN))


def combinations_of(subset: Subset) -> Iterator[Combination]:
    """The smallest calls with each combination of traits."""
    # Heads that share keys are those of decoding, which asks for kernels of few queries.
    is_for_decoding = len(subset.heads) > 1
    for (dtype, kv_dtype), (hdim_q, hdim_v), mask, mode, direction, features, (
        heads_q,
        heads_k,
    ) in itertools.product(*subset[:-1]):
        seqlens = (1,) * is_for_decoding + (_MANY_QUERIES,) * (heads_q == heads_k)
        for seqlen, out_dtype in itertools.product(seqlens, subset.other_out_dtypes(dtype)):
            yield Combination(
                *(dtype, kv_dtype, hdim_q, hdim_v, mask, mode, direction),
                features=frozenset(NAMED_FEATURES[name] for name in features),
                heads_q=heads_q,
                heads_k=heads_k,
                seqlen_q=seqlen,
                seqlen_k=seqlen,
                other_out_dtype=out_dtype,
            )


def _several(name: str, values: Iterable[_T]) -> list[_T]:
    # A lone "bf16" would otherwise be taken apart into letters.
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(
            f"{name} must be a list or tuple, got {values!r}; write {name}=[{values!r}]"
        )
    several = list(values)
    if not several:
        raise ValueError(f"{name} is empty; name at least one")
    return several


def _dtypes(dtypes: object) -> Dtypes:
    if not isinstance(dtypes, (tuple, list)):
        return _dtype(dtypes), _dtype(dtypes)
    if len(dtypes) != 2:
        raise TypeError(f"dtypes holds {dtypes!r}; use names, or pairs (of q, of k and v)")
    return _dtype(dtypes[0]), _dtype(dtypes[1])


def _dtype(dtype: object) -> str:
    if isinstance(dtype, str) and dtype in TORCH_DTYPES:
        return dtype
    if isinstance(dtype, torch.dtype) and dtype in DTYPE_NAMES:
        return DTYPE_NAMES[dtype]
    error = ValueError if isinstance(dtype, (str, torch.dtype)) else TypeError
    names = ", ".join(map(repr, TORCH_DTYPES))
    raise error(f"dtypes holds {dtype!r}; use {names} or the torch dtypes")


def _hdim(hdim: object) -> tuple[int, int]:
    pair = (hdim, hdim) if isinstance(hdim, int) else hdim
    if (
        not isinstance(pair, (tuple, list))
        or len(pair) != 2
        or any(isinstance(side, bool) or not isinstance(side, int) for side in pair)
    ):
        raise TypeError(f"hdims holds {hdim!r}; use ints, or pairs of ints (hdim_q, hdim_v)")
    if not all(1 <= side <= MAX_HDIM for side in pair):
        raise ValueError(f"hdims holds {hdim!r}; a head dimension is between 1 and {MAX_HDIM}")
    return pair[0], pair[1]


def _features(text: object) -> Features:
    """Split a text such as "bias+dropout" into names of features; "plain" has none."""
    if not isinstance(text, str):
        raise TypeError(f"features holds {text!r}; use names, joined by '+', or 'plain'")
    if text == "plain":
        return ()
    what = f"features holds 'plain', or names joined by '+'; {text!r} has"
    return tuple(known(what, name, tuple(NAMED_FEATURES)) for name in text.split("+"))


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "dtypes": _dtypes,
    "hdims": _hdim,
    "masks": parse_mask,
    "modes": lambda mode: known("modes holds", mode, get_args(Mode)),
    "directions": lambda x: known("directions holds", x, get_args(Direction)),
    "features": _features,
    "out_dtypes": lambda x: known("out_dtypes holds", x, OUT_DTYPES),
}
