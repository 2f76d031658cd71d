"""Which rules a combination breaks: asked ahead, without tensors and without a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, get_args

from ..amd.chips import is_arch
from ..kernels.compiled.rules import RULES
from ..kernels.compiled.tile_rules import TILE_RULES
from ..problem.checks import check_counts, check_ints
from ..problem.dtypes import TORCH_DTYPES, other_out_dtype
from ..problem.features import Feature
from ..problem.mask import parse_mask
from ..problem.problem import Direction, Mode
from .ck_architectures import ck_architectures
from .combination import CALL_RULES, NAMED_FEATURES, Combination, Layout, known
from .receipts import allows, receipt_named
from .registry import every_kernel, has_key
from .specification import Specification, combination_of, read_specification
from .specification_rules import (
    OUR_PIPELINES,
    SPECIFICATION_RULES,
    architecture_has_kernels,
    why_nothing_runs_on,
)


class BrokenRule(NamedTuple):
    """A rule that a combination breaks.

    Attributes:
        name: of the function that states it.
        reason: a sentence, with the value that is wrong.
        source: where the rule comes from: a document, a file, or a measurement.
    """

    name: str
    reason: str
    source: str


class Validation(NamedTuple):
    """What is wrong with a configuration, and what there is to know about it."""

    errors: tuple[BrokenRule, ...]
    warnings: tuple[BrokenRule, ...]

    @property
    def valid(self) -> bool:
        return not self.errors

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values, for JSON."""
        lists = {name: [x._asdict() for x in rules] for name, rules in self._asdict().items()}
        return {"valid": self.valid, **lists}


class ListedRule(NamedTuple):
    """A rule of the table.

    Attributes:
        of: whose kernels it is about: "every", "ck" or "ours".
        ours: of a rule of CK's, what is there of it for ours.
    """

    name: str
    of: str
    source: str
    ours: str = ""


def every_rule() -> tuple[ListedRule, ...]:
    """The table of all rules, which say what kernels can be had."""
    of_calls = (ListedRule(x.name, "ours", x.source) for x in (*CALL_RULES, *RULES, *TILE_RULES))
    specific = (ListedRule(x.name, x.of, x.source, x.ours) for x in SPECIFICATION_RULES)
    return (*specific, *of_calls)


def validate_specification(config: Mapping[str, Any]) -> Validation:
    """Every rule that a configuration of CK's dispatcher breaks.

    Args:
        config: ``{"signature": {...}, "algorithm": {...}, "arch": ...}`` with the fields of CK's
            dispatcher: of "signature" "data_type", "hdim_q" and "hdim_v" are needed, and
            "algorithm" may be missing. Where its "pipeline" is one of CK's, CK's rules are errors,
            and what stands in the way of our own kernels are warnings; where it is "compiled",
            the default, "ready" or "aiter", our rules are errors. With "profile", a receipt's name
            or number, the configuration has to be one of the receipt's.

    Raises:
        TypeError, ValueError: it is no configuration, or has a field that is not known.
    """
    specification = read_specification(config)
    arch = ck_architectures().get(specification.arch)
    if arch is None:
        known_ones = ", ".join(ck_architectures())
        reason = f"arch {specification.arch!r} is none of {known_ones}"
        return Validation((BrokenRule("architecture_is_known", reason, _ARCHITECTURES),), ())

    def broken(*of: str, warns: bool = False) -> tuple[BrokenRule, ...]:
        return tuple(
            BrokenRule(rule.name, text, rule.source)
            for rule in SPECIFICATION_RULES
            if rule.of in of and rule.is_warning == warns
            for text in rule.complaints(specification.signature, specification.algorithm, arch)
        )

    errors = broken("every")
    if errors:
        return Validation(errors, ())  # others take for granted that words are known
    errors = _missing_of_profile(specification)
    of_ours = (*broken("ours"), *_broken_by_call(specification))
    if specification.algorithm.pipeline in OUR_PIPELINES:
        return Validation((*errors, *(of_ours or _unlisted(specification))), ())
    return Validation((*errors, *broken("ck")), (*broken("ck", warns=True), *of_ours))


_ARCHITECTURES = "jitfmha/ahead/architectures.json"


def _missing_of_profile(specification: Specification) -> tuple[BrokenRule, ...]:
    if specification.profile is None:
        return ()
    receipt = receipt_named(specification.profile)
    if allows(receipt, specification.signature):
        return ()
    reason = f"profile {receipt.name!r} leaves the configuration out: {receipt.keeps}"
    return (BrokenRule("profile_has_it", reason, receipt.source),)


def _unlisted(specification: Specification) -> tuple[BrokenRule, ...]:
    """Complain about a tile that no kernel has, where a tile is named."""
    signature, algorithm, arch, _ = specification
    key = {"signature": signature._asdict(), "algorithm": algorithm._asdict(), "arch": arch}
    if not (algorithm.tile and is_arch(arch)) or any(has_key(x, key) for x in every_kernel(arch)):
        return ()
    reason = (
        f"pipeline {algorithm.pipeline!r} has no kernel with tile {list(algorithm.tile)} for this "
        f"signature; `python -m jitfmha kernels list --json` has all"
    )
    return (BrokenRule("kernel_is_listed", reason, "jitfmha/ahead/registry.py"),)


def _broken_by_call(specification: Specification) -> tuple[BrokenRule, ...]:
    combination = combination_of(specification.signature, specification.arch)
    return _broken_rules(combination, specification.arch)


def validate_config(
    arch: str,
    *,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    out_dtype: str | None = None,
    hdim: int = 128,
    hdim_v: int | None = None,
    mask: int | str = 0,
    window_size: tuple[int, int] = (-1, -1),
    mode: str = "gm0",
    direction: str = "forward",
    features: Iterable[str] = (),
    layout: str = "bshd",
    page_size: int | None = None,
    num_splits: int = 0,
    batch: int = 1,
    heads: int = 8,
    heads_k: int | None = None,
    seqlen: int = 1024,
    seqlen_k: int | None = None,
) -> tuple[BrokenRule, ...]:
    """Every rule that a call of this kind would break on an AMD GPU; none where it is served.

    The rules are those of the arguments, which hold everywhere, and those of the kernels that are
    compiled for a call, which serve whatever the ready ones of this package do. Nothing is built or
    allocated.

    Args:
        arch: "gfx942" or "gfx950"; on gfx90a, gfx1100 and gfx1201 nothing runs.
        dtype: of q: "fp32", "bf16", "fp16", "fp8_e4m3fnuz", "fp8_e4m3fn", "bf8_e5m2fnuz",
            "bf8_e5m2" or "int8".
        kv_dtype: of k and v; as q by default.
        out_dtype: of the output; as q by default, and bf16 beside 8 bits.
        hdim: of q and k; hdim_v: of v, as ``hdim`` by default.
        mask, window_size: as in :func:`jitfmha.fmha_fwd`.
        mode: "gm0" (batch) or "gm1" (packed sequences).
        direction: "forward", or "backward" for the gradients.
        features: what else the call has, any of "lse", "padded_sequences", "column_major_v",
            "bias" (of the dtype of q, beside 8 bits bf16), "boolean_bias", "alibi", "softcap",
            "sinks", "sink_tokens", "dropout", "descales", "query_head_descales", "token_descales",
            "int8_probabilities", "paged_keys", "packed_pages" (which says "paged_keys" too) and
            "split_results".
        layout: the order in memory, "bshd", "bhsd" or "sbhd"; in gm1 without the batch.
        page_size: keys of a page; given, it says "paged_keys" too.
        num_splits: as in :func:`jitfmha.fmha_fwd`.
        batch, heads, heads_k, seqlen, seqlen_k: sizes; those of k are as those of q by default. In
            gm1 ``seqlen`` and ``seqlen_k`` are the rows of all sequences together.

    Raises:
        TypeError, ValueError: an argument has no meaning, such as a name that is not known.
    """
    combination = asked_combination(
        dtype=dtype,
        kv_dtype=kv_dtype,
        out_dtype=out_dtype,
        hdim=hdim,
        hdim_v=hdim_v,
        mask=mask,
        window_size=window_size,
        mode=mode,
        direction=direction,
        features=features,
        layout=layout,
        page_size=page_size,
        num_splits=num_splits,
        batch=batch,
        heads=heads,
        heads_k=heads_k,
        seqlen=seqlen,
        seqlen_k=seqlen_k,
    )
    arch = known("arch is", arch, tuple(ck_architectures()))
    (of_arch,) = (x for x in SPECIFICATION_RULES if x.complaints is architecture_has_kernels)
    refused = (BrokenRule(of_arch.name, x, of_arch.source) for x in why_nothing_runs_on(arch))
    return (*refused, *_broken_rules(combination, arch))


def asked_combination(
    *,
    dtype: str,
    kv_dtype: str | None,
    out_dtype: str | None,
    hdim: int,
    hdim_v: int | None,
    mask: int | str,
    window_size: tuple[int, int],
    mode: str,
    direction: str,
    features: Iterable[str],
    layout: str,
    page_size: int | None,
    num_splits: int,
    batch: int,
    heads: int,
    heads_k: int | None,
    seqlen: int,
    seqlen_k: int | None,
) -> Combination:
    """What the options of :func:`validate_config` ask for; it raises what that does."""
    check_ints(num_splits=num_splits)
    named = _features(features)
    if page_size is None:
        page_size = _PAGE_SIZE
    else:
        named |= {Feature.PAGED_KEYS}
    hdim_v = hdim if hdim_v is None else hdim_v
    heads_k = heads if heads_k is None else heads_k
    seqlen_k = seqlen if seqlen_k is None else seqlen_k
    check_counts(hdim=hdim, hdim_v=hdim_v, batch=batch, heads=heads, heads_k=heads_k)
    check_counts(seqlen=seqlen, seqlen_k=seqlen_k)
    check_counts(1, page_size=page_size)
    dtype = known("dtype is", dtype, tuple(TORCH_DTYPES))
    if out_dtype is not None:
        out_dtype = other_out_dtype(dtype, known("out_dtype is", out_dtype, tuple(TORCH_DTYPES)))
    return Combination(
        dtype=dtype,
        kv_dtype=known("kv_dtype is", dtype if kv_dtype is None else kv_dtype, tuple(TORCH_DTYPES)),
        mask=parse_mask(mask, window_size),
        mode=known("mode is", mode, get_args(Mode)),
        direction=known("direction is", direction, get_args(Direction)),
        features=named,
        layout=known("layout is", layout, get_args(Layout)),
        num_splits=num_splits,
        other_out_dtype=out_dtype or "",
        hdim_q=hdim,
        hdim_v=hdim_v,
        page_size=page_size,
        batch=batch,
        heads_q=heads,
        heads_k=heads_k,
        seqlen_q=seqlen,
        seqlen_k=seqlen_k,
    )


_PAGE_SIZE = 16


def _broken_rules(combination: Combination, arch: str) -> tuple[BrokenRule, ...]:
    problem = combination.problem()
    broken = []
    for call_rule in CALL_RULES:
        complaint = call_rule.complaint(combination)
        if complaint is not None:
            broken.append(BrokenRule(call_rule.name, complaint, call_rule.source))
    if is_arch(arch):
        for rule in RULES:
            reasons = rule.reasons(problem, arch)
            broken += [BrokenRule(rule.name, str(reason), rule.source) for reason in reasons]
    return tuple(broken)


def _features(names: Iterable[str]) -> frozenset[Feature]:
    # A lone "bias" would otherwise be taken apart into letters.
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"features must be a list or tuple, got {names!r}; write [{names!r}]")
    chosen = (known("features is", name, tuple(NAMED_FEATURES)) for name in names)
    features = frozenset(NAMED_FEATURES[name] for name in chosen)
    if features >= {Feature.BIAS, Feature.BOOLEAN_BIAS}:
        raise ValueError("features holds 'bias' and 'boolean_bias'; a call has one bias at most")
    return features
