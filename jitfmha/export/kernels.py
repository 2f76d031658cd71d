"""Which kernels a library gets: those that come ready, and those that are compiled for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, NamedTuple, TypeVar

from .. import jit
from ..ahead.combination import NAMED_FEATURES, Combination, check_combination, known
from ..ahead.kernel_set import entries_of
from ..ahead.profiles import (
    PLAIN,
    PROFILES,
    USUAL_OUT_DTYPES,
    Features,
    Subset,
    refuse_out_dtypes,
)
from ..ahead.receipts import UNIVERSE, Receipt, allows, receipt_named
from ..amd.chips import Arch, architecture, chip
from ..amd.code_object import CodeObjectError
from ..amd.manifest import AnyRow, KernelRow
from ..amd.tree import Tree, trees_of
from ..kernels.backward_estimate import backward_cycles
from ..kernels.compiled.backward_launch import BackwardKernel
from ..kernels.compiled.backward_traits import BackwardTraits, backward_spec
from ..kernels.compiled.decode import streamed_keys
from ..kernels.compiled.decode_policy import DECODE_WAVES, MOST_WAVES, most_blocks
from ..kernels.compiled.latent import row_blocks_of
from ..kernels.compiled.latent_policy import MOST_LATENT_BLOCKS
from ..kernels.compiled.rules import RULES
from ..kernels.compiled.sink_gradient import sink_gradient_name, sink_gradient_spec
from ..kernels.compiled.tiles import tile_table
from ..kernels.compiled.traits import (
    Access,
    ForwardTraits,
    far_stride_bytes,
    forward_tile,
    has_wide_blocks,
    kernel_spec,
    row_of_built,
)
from ..kernels.compiled.turns import takes_turns
from ..kernels.compiled.work_list import has_lists
from ..kernels.cycles import Part, kernel_cycles
from ..kernels.estimate import measured_dtype
from ..kernels.launch_estimate import KernelCycles
from ..kernels.pass_estimate import PartCycles
from ..kernels.ready.backward.kernels import kernels_of
from ..kernels.ready.backward.limits import FAR_STRIDE_BYTES
from ..kernels.rules import reasons_of
from ..planning.specification import signature_of
from ..problem.arguments import Bf16Cvt
from ..problem.dtypes import BF8_NAMES, EIGHT_BIT_NAMES, FP8_NAMES
from ..problem.features import Feature
from ..problem.mask import CAUSAL_MASK, NO_MASK, Mask
from ..problem.problem import BF16_CVTS, Direction, Mode, Problem

DTYPES = ("bf16", "fp16", "fp8", "fp32", "int8", "bf8")
"""What exported calls take: of 8 bits forward ones, of fp8 and bf8 in the form of the chip."""
READY_DTYPES = DTYPES[:3]
"""Those of kernels that come ready."""
FEATURES = tuple(NAMED_FEATURES)
"""What exported calls may have, by the names that ``build`` knows."""
APPEND = "append"
"""What stands beside them for the kernels of ``mha_fwd_appendkv``."""
MASKS = {"none": NO_MASK, "causal": CAUSAL_MASK}
"""Kernels with a mask take both corners, but for those of forward with a tile, which have one."""
_MODES: tuple[Mode, ...] = ("gm0", "gm1")
_DTYPES_OF_BACKWARD = ("bf16", "fp16", "fp32")
# One mask with both sides stands for all: a compiled kernel is told of its window at each call.
_ANY_MASK = Mask(left=1, right=0)
# Of whichever size: a compiled kernel that has no rows but those of a tile serves any length.
_MANY_QUERIES = 4096
_T = TypeVar("_T", ForwardTraits, BackwardTraits)
_HDIMS_OF_COMPILED = ((64, 64), (128, 128))
_CVTS_OF_COMPILED: tuple[Bf16Cvt, ...] = ("rtne",)


class Selection(NamedTuple):
    """Which kernels are exported.

    Attributes:
        hdims: of q and k, and of v. None: all that come ready, and of compiled kernels 64 and 128.
        bf16_cvts: where there is a choice. None: all that come ready, and of compiled kernels rtne.
        features: of calls that compiled kernels serve; each of these has all that are in one value.
        kv_dtype: that of keys and values of such calls, where it is another one, of 8 bits.
        out_dtypes: those of the outputs of compiled 8-bit calls. None: bf16.
        bias_dtype: that of biases that are added, where it is not that of q, or bf16 beside 8 bits.
        subsets: what a profile has: what is compiled, in place of what the other fields say of it,
            and of what comes ready, whatever serves such calls without features.
        declared: the calls of a set of kernels, each with its architecture, in place of these;
            None: there is no set.
        few_queries: whether forward calls of few queries get kernels of their own, too.
        persistent: whether forward calls whose rows see more or less of the keys get kernels with
            persistent workgroups, too.
        far_rows: whether calls whose rows are 16 MiB or more apart get kernels, too, one for any
            number of queries.
        appends: whether keys are appended to caches, by kernels of their own.
        receipt: what is compiled and what comes ready passes it.
    """

    arches: tuple[Arch, ...]
    directions: tuple[Direction, ...] = ("forward", "backward")
    dtypes: tuple[str, ...] = READY_DTYPES
    hdims: tuple[tuple[int, int], ...] | None = None
    masks: tuple[str, ...] = tuple(MASKS)
    modes: tuple[Mode, ...] = _MODES
    bf16_cvts: tuple[Bf16Cvt, ...] | None = None
    features: tuple[Features, ...] | None = None
    subsets: tuple[Subset, ...] = ()
    declared: tuple[tuple[Arch, Combination], ...] | None = None
    kv_dtype: str | None = None
    few_queries: bool = False
    persistent: bool = False
    far_rows: bool = False
    appends: bool = False
    out_dtypes: tuple[str, ...] | None = None
    bias_dtype: str | None = None
    receipt: Receipt | None = None


def selection_of(
    arches: tuple[Arch, ...], profile: str | None, chosen: Mapping[str, Any]
) -> Selection:
    """Select what a profile has, with what is chosen in place of its parts, by ``Selection``.

    Or what a receipt has, by its name. Of the features ``append`` stands for ``appends``.

    Raises ``ValueError`` where there is no such profile.
    """
    features = chosen.get("features", ())
    if (APPEND,) in features:
        others = tuple(x for x in features if x != (APPEND,))
        chosen = {**chosen, "features": others or None, "appends": True}
    if profile is None:
        return Selection(arches, **chosen)
    of_all = (
        *("bf16_cvts", "kv_dtype", "bias_dtype"),
        *("few_queries", "persistent", "far_rows", "appends"),
    )
    given = {name: x for name, x in chosen.items() if name not in of_all and x is not None}
    if "dtypes" in given:
        kv_dtype = chosen.get("kv_dtype")
        given["dtypes"] = tuple(
            (x, y)
            for dtype in given["dtypes"]
            for x in _full_names(dtype)
            for y in (_full_names(kv_dtype) if kv_dtype else (x,))
        )
    if "masks" in given:
        given["masks"] = tuple(MASKS[x] for x in given["masks"])
    receipt = None if profile in PROFILES else receipt_named(profile)
    of_profile = PROFILES[profile] if receipt is None else UNIVERSE
    subsets = (each._replace(**{**given, **_of_pages(each, given)}) for each in of_profile)
    served = tuple(each for each in subsets if each.modes and each.directions)
    return Selection(arches, **chosen, subsets=served, receipt=receipt)


def _of_pages(subset: Subset, given: Mapping[str, Any]) -> dict[str, Any]:
    """What is left of the flags where a profile has keys in pages: forward calls of groups."""
    words = {word for features in subset.features for word in features}
    if "features" in given or words.isdisjoint(("paged_keys", "packed_pages")):
        return {}
    return {
        name: tuple(x for x in given[name] if x == only)
        for name, only in (("modes", "gm1"), ("directions", "forward"))
        if name in given
    }


def selection_of_set(path: str | PathLike[str], selection: Selection) -> Selection:
    """Select what a file declares, as ``build --set`` takes it, beside what comes ready.

    Raises ``TypeError`` or ``ValueError`` for what is no such file or is selected beside it,
    ``OSError`` where it cannot be read, and ``NotImplementedError`` for a call that is named
    without wildcards and not served.
    """
    for name in ("subsets", "features", "kv_dtype", "out_dtypes"):
        if getattr(selection, name):
            said = "profile" if name == "subsets" else name
            raise ValueError(f"{path} says what is compiled; {said} has no place")
    declared: dict[tuple[Arch, Combination], None] = {}
    for arch in selection.arches:
        for entry in entries_of(path, arch):
            for each in entry.combinations if "compiled" in entry.pipelines else ():
                wanted = _of_any_call(each)
                if not entry.has_wildcards:
                    tuple(_problems(selection, wanted, arch))  # raises what such a call would
                declared[arch, wanted] = None
    return selection._replace(declared=tuple(declared))


def features_named(text: str) -> Features:
    """Read the features of a call from a text such as "bias+dropout"; "plain" has none.

    "append" stands alone.

    Raises ``ValueError`` for one that exported calls do not have.
    """
    names = () if text == "plain" else tuple(text.split("+"))
    for name in names:
        known("features hold", name, (*FEATURES, APPEND) if len(names) == 1 else FEATURES)
    return names


_FORMS = {"fp8": FP8_NAMES.values(), "bf8": BF8_NAMES.values()}


def _full_names(dtype: str) -> tuple[str, ...]:
    return tuple(_FORMS.get(dtype, (dtype,)))


class CompiledFor(NamedTuple):
    """What a call has to ask for, to be served by a compiled kernel.

    Attributes:
        features: words that are joined by "+"; none for a plain call.
        has_wide_pages: whether pages are multiples of a wave's rows.
        slices, columns: of the output's columns there are as many slices, of so many.
        far_stride_bytes: from where on rows are far apart.
        has_far_rows: whether it serves those, else the others.
        stacks_heads: whether the query heads that share a key head are rows of the same tiles.
        most_stacked_queries: with how many queries they are, at most.
        decode_blocks: of kernels for decoding: the rows of a workgroup, in blocks; else 0.
        row_blocks: the same of those for latents.
        takes_turns: whether it is for many queries, with keys in pages.
        list_symbol: where workgroups are persistent, of the kernel that lists their work; or empty.
    """

    dtype: str
    features: str
    has_wide_pages: bool
    slices: int
    columns: int
    far_stride_bytes: int
    has_far_rows: bool
    stacks_heads: bool
    most_stacked_queries: int
    decode_blocks: int
    row_blocks: int
    takes_turns: bool
    list_symbol: str


class ForwardKernel(NamedTuple):
    """A row of a manifest, or as a manifest has them, and its code object.

    ``compiled_for`` is None of one that comes ready; ``cycles`` are those that estimates count.
    """

    arch: Arch
    row: KernelRow
    image: bytes
    cycles: tuple[KernelCycles, ...]
    compiled_for: CompiledFor | None = None

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def has_roundings(self) -> bool:
        dtype = self.row.dtype if self.compiled_for is None else self.compiled_for.dtype
        return architecture(self.arch).has_roundings(dtype)


class BackwardKernels(NamedTuple):
    """The kernels of a backward pass, in the order of their launches.

    Attributes:
        row: of the one that the pass is named after.
        has_roundings: whether ``bf16_cvt`` makes a difference.
        adds_dq_up: whether dq is added up in float32, by all workgroups together.
        is_deterministic: whether its order is always one.
        far_stride_bytes, has_far_rows: as ``CompiledFor`` has them.
        of_queries, of_keys: the cycles that estimates count, of a kernel of dq alone and of the one
            of dk and dv.
        features: as ``CompiledFor`` has them.
    """

    arch: Arch
    row: KernelRow
    dtype: str
    has_roundings: bool
    adds_dq_up: bool
    is_deterministic: bool
    far_stride_bytes: int
    has_far_rows: bool
    name: str
    kernels: tuple[BackwardKernel, ...]
    image: bytes
    of_queries: PartCycles
    of_keys: PartCycles
    features: str = ""


class SinkKernel(NamedTuple):
    """The kernel of the gradient of sinks, of outputs of one data type."""

    arch: Arch
    dtype: str
    name: str
    image: bytes


def forward_kernels(selection: Selection) -> Iterator[ForwardKernel]:
    """Choose the kernels that come ready and serve what is selected.

    Raises ``CodeObjectError`` for a file that is not what its manifest says.
    """
    if "forward" not in selection.directions:
        return
    kinds = _kinds_of_profile(selection, "forward")
    for arch in selection.arches:
        for tree in _shipped_trees(arch):
            for row in tree.forward.rows:
                if _is_selected(row, arch, selection, kinds):
                    yield ForwardKernel(arch, row, _image(tree, row), _ready_cycles(arch, row))


def ready_backward_kernels(selection: Selection) -> Iterator[BackwardKernels]:
    """The backward passes that come ready, and serve what is selected.

    Raises ``CodeObjectError`` for a file that is not what its manifest says.
    """
    if "backward" not in selection.directions:
        return
    kinds = _kinds_of_profile(selection, "backward")
    for arch in selection.arches:
        found = ((tree, row) for tree in _shipped_trees(arch) for row in tree.ready_backward.rows)
        for tree, listed in found:
            kernels = kernels_of(listed)
            row = next(kernel.row for kernel in kernels if kernel.row.symbol == listed.symbol)
            if not _is_selected(row, arch, selection, kinds):
                continue
            of_queries, of_keys = backward_cycles(
                *(arch, "ready", row.dtype, (row.hdim_q, row.hdim_v), row.mask != 0),
                is_deterministic=listed.is_deterministic,
            )
            yield BackwardKernels(
                arch=arch,
                row=row,
                dtype=row.dtype,
                has_roundings=architecture(arch).has_roundings(row.dtype),
                adds_dq_up=True,
                is_deterministic=listed.is_deterministic,
                far_stride_bytes=FAR_STRIDE_BYTES,
                has_far_rows=False,
                name=row.name,
                kernels=kernels,
                image=_image(tree, listed),
                of_queries=of_queries,
                of_keys=of_keys,
            )


def _shipped_trees(arch: Arch) -> list[Tree]:
    return [x for x in trees_of(chip(architecture(arch).unlisted_chip)) if x.is_shipped]


def _image(tree: Tree, row: AnyRow) -> bytes:
    code_object = tree.code_object(row)
    if isinstance(code_object, CodeObjectError):
        raise code_object
    return code_object.image


class _PlainKind(NamedTuple):
    """What kernels that come ready are told apart by: calls without features."""

    arch: Arch
    dtype: str
    hdims: tuple[int, int]
    is_masked: bool
    mode: Mode


def _kind_of_row(arch: Arch, row: KernelRow) -> _PlainKind:
    return _PlainKind(arch, row.dtype, (row.hdim_q, row.hdim_v), row.mask != 0, _MODES[row.mode])


def _kind_of_call(arch: Arch, wanted: Combination) -> _PlainKind | None:
    """None of a call with features, or with keys or outputs of another data type than usual."""
    is_plain = wanted.features <= {*_MEANT_BY_OTHERS, Feature.DESCALES}
    if not is_plain or wanted.dtype != wanted.kv_dtype or wanted.other_out_dtype:
        return None
    dtype = "fp8bf16" if wanted.dtype in FP8_NAMES.values() else wanted.dtype
    hdims = wanted.hdim_q, wanted.hdim_v
    return _PlainKind(arch, dtype, hdims, not wanted.mask.is_none, wanted.mode)


def _kinds_of_profile(selection: Selection, direction: Direction) -> set[_PlainKind] | None:
    """The kinds of calls that a profile or a receipt has; None where neither is selected."""
    if not selection.subsets:
        return None
    return {
        kind
        for arch, wanted in _combinations(selection, direction)
        if (kind := _kind_of_call(arch, wanted)) and _passes_receipt(selection, wanted)
    }


def _passes_receipt(selection: Selection, wanted: Combination) -> bool:
    receipt = selection.receipt
    return receipt is None or allows(receipt, signature_of(wanted.problem()))


def _is_selected(
    row: KernelRow, arch: Arch, selection: Selection, kinds: set[_PlainKind] | None
) -> bool:
    hdims, cvts = selection.hdims, selection.bf16_cvts
    has_choice = cvts is not None and architecture(arch).has_roundings(row.dtype)
    return (
        ("fp8" if row.dtype == "fp8bf16" else row.dtype) in selection.dtypes
        and (hdims is None or (row.hdim_q, row.hdim_v) in hdims)
        and ("causal" if row.mask else "none") in selection.masks
        and _MODES[row.mode] in selection.modes
        and (kinds is None or _kind_of_row(arch, row) in kinds)
        and (not has_choice or BF16_CVTS[row.bf16_cvt] in (cvts or ()))
    )


# ---- What is compiled ----------------------------------------------------------------------------


def forward_passes(
    selection: Selection, ready: Iterable[ForwardKernel]
) -> tuple[ForwardTraits, ...]:
    """What is compiled of forward kernels: what is selected and does not come ready.

    Of the kernels that serve a call, that is the one which serves any lengths and heads, with keys
    in pages the one for many queries, and where they are selected those for few. Where plain calls
    are named among the features, they get compiled kernels beside those that come ready, which have
    no windows and no splits of a given number. Where neither few queries, far rows nor head
    dimensions, features or a profile are named, all that is selected comes ready.

    Raises ``NotImplementedError``, ``TypeError`` or ``ValueError`` where nothing can be compiled.
    """
    if selection.out_dtypes:
        refuse_out_dtypes(_subsets(selection), f"out_dtypes {selection.out_dtypes}")
    named = selection.hdims, selection.features, selection.subsets, selection.declared
    dtypes = selection.kv_dtype, selection.out_dtypes
    are_others = selection.few_queries or selection.persistent or selection.far_rows
    if not any((*named, *dtypes, are_others)):
        return ()
    served = {_kind_of_row(each.arch, each.row) for each in ready}
    if PLAIN in (selection.features or ()):
        served.clear()
    passes: list[ForwardTraits] = []
    refusals: list[Exception] = []
    for arch, wanted in _combinations(selection, "forward"):
        is_served = _kind_of_call(arch, wanted) in served
        if is_served and not are_others:
            continue
        try:
            for problem in _problems(selection, wanted, arch):
                traits = _of_any_lengths(problem, arch)
                if not is_served:
                    passes += _variants(traits)
                    passes += _of_many_queries(problem, traits)
                if selection.far_rows and traits.access == "near":
                    passes += _variants(replace(traits, access="far"))
                if selection.persistent:
                    for each in _of_lists(problem, traits):
                        passes += _variants(each)
                if selection.few_queries:
                    for each in _of_few_queries(problem, traits):
                        passes += _variants(each)
        except _REFUSALS as error:
            refusals.append(error)
    return _each_once(passes, refusals)


def backward_passes(selection: Selection) -> tuple[BackwardTraits, ...]:
    """What is compiled for the backward passes that are selected, each once.

    Raises ``NotImplementedError``, ``TypeError`` or ``ValueError`` where none can be.
    """
    passes: list[BackwardTraits] = []
    refusals: list[Exception] = []
    for arch, wanted in _combinations(selection, "backward"):
        try:
            for problem in _problems(selection, wanted, arch):
                traits = BackwardTraits.of(problem, arch)
                passes += _variants(traits)
                if selection.far_rows:
                    passes += _variants(replace(traits, access="far"))
        except _REFUSALS as error:
            refusals.append(error)
    return _each_once(passes, refusals)


def sink_passes(selection: Selection) -> tuple[tuple[Arch, str], ...]:
    """For which data types the gradient of sinks is selected."""
    asked = (
        (arch, wanted.dtype)
        for arch, wanted in _combinations(selection, "backward")
        if Feature.SINKS in wanted.features
    )
    return tuple(dict.fromkeys(asked))


_REFUSALS = NotImplementedError, TypeError, ValueError
# What a kernel does not differ by.
_MEANT_BY_OTHERS = Feature.LSE, Feature.PADDED_SEQUENCES


def selected_types(
    selection: Selection,
) -> Iterator[tuple[Arch, str, str, tuple[int, int], bool]]:
    """The dtypes of forward calls and of their keys, hdims, and whether pages are packed."""
    for arch, x in _every_combination(selection):
        if x.direction == "forward":
            is_packed = Feature.PACKED_PAGES in x.features
            yield arch, x.dtype, x.kv_dtype, (x.hdim_q, x.hdim_v), is_packed


def _subsets(selection: Selection) -> tuple[Subset, ...]:
    dtypes = [x for dtype in selection.dtypes for x in _full_names(dtype)]
    kv_dtype = selection.kv_dtype
    own = Subset(
        tuple(
            (dtype, other)
            for dtype in dtypes
            for other in (_full_names(kv_dtype) if kv_dtype else (dtype,))
        ),
        selection.hdims or _HDIMS_OF_COMPILED,
        tuple(MASKS[mask] for mask in selection.masks),
        selection.modes,
        selection.directions,
        selection.features or (PLAIN,),
        out_dtypes=selection.out_dtypes or USUAL_OUT_DTYPES,
    )
    return selection.subsets or (own,)


def _of_any_call(wanted: Combination) -> Combination:
    """What stands for all calls of that kind, whatever their windows, heads and lengths."""
    return wanted._replace(
        mask=wanted.mask if wanted.mask.is_none else _ANY_MASK,
        heads_q=1,
        heads_k=1,
        seqlen_q=_MANY_QUERIES,
        seqlen_k=_MANY_QUERIES,
    )


def _every_combination(selection: Selection) -> Iterator[tuple[Arch, Combination]]:
    if selection.declared is not None:
        yield from selection.declared
        return
    for arch, subset in itertools.product(selection.arches, _subsets(selection)):
        for direction, (dtype, kv_dtype), hdims, mask, mode, features in itertools.product(
            *(subset.directions, subset.dtypes, subset.hdims),
            *(subset.masks, subset.modes, subset.features),
        ):
            asked = {NAMED_FEATURES[name] for name in features}
            if kv_dtype in EIGHT_BIT_NAMES:
                asked.add(Feature.DESCALES)
            kind = Combination(*(dtype, kv_dtype, *hdims, mask, mode, direction, frozenset(asked)))
            for out_dtype in subset.other_out_dtypes(dtype):
                yield arch, _of_any_call(kind._replace(other_out_dtype=out_dtype))


def _combinations(selection: Selection, direction: Direction) -> Iterator[tuple[Arch, Combination]]:
    """The kinds of calls that are selected, of those that exported calls can ask for."""
    served = DTYPES if direction == "forward" else _DTYPES_OF_BACKWARD
    names = [x for dtype in served for x in _full_names(dtype)]
    for arch, wanted in _every_combination(selection):
        others = {*EIGHT_BIT_NAMES}.difference(tile_table(arch).dtypes_of("forward"))
        dtypes = wanted.dtype, wanted.kv_dtype
        if wanted.direction != direction or wanted.dtype not in names:
            continue
        if others.isdisjoint(dtypes) and (direction == "forward" or len({*dtypes}) == 1):
            yield arch, wanted


def _problems(selection: Selection, wanted: Combination, arch: Arch) -> Iterator[Problem]:
    """A problem for each rounding; raises what such a call would."""
    check_combination(wanted)
    if not _passes_receipt(selection, wanted):
        return
    for cvt in selection.bf16_cvts or _CVTS_OF_COMPILED:
        problem = wanted.problem()._replace(bf16_cvt=cvt)
        if selection.bias_dtype and Feature.BIAS in problem.features:
            modifiers = problem.modifiers._replace(bias=selection.bias_dtype)
            problem = problem._replace(modifiers=modifiers)
        for reason in reasons_of(RULES, problem, arch):
            raise NotImplementedError(str(reason))
        yield problem


def _of_any_lengths(problem: Problem, arch: Arch) -> ForwardTraits:
    """The kernel that is compiled for no special lengths, heads or rows of keys."""
    traits = ForwardTraits.of(problem, arch, _units(arch))
    if traits.access == "packed_pages" and has_wide_blocks(problem, traits.tile):
        traits = replace(traits, access="wide_packed_pages")
    return replace(
        traits,
        stacks_heads=False,
        row_blocks=None,
        decode_blocks=None,
        decode_waves=DECODE_WAVES,
        takes_turns=False,
        lists_work=False,
    )


# The same with pages of any size, where they are multiples of a wave's rows.
_OF_ANY_SIZE: dict[Access, Access] = {
    "wide_pages": "paged",
    "wide_packed_pages": "packed_pages",
}


def _by_own_template(traits: ForwardTraits, **fields: Any) -> ForwardTraits:
    """Such a kernel, of a template that reaches all packed pages alike."""
    is_packed = traits.access == "wide_packed_pages"
    return replace(traits, access="packed_pages" if is_packed else traits.access, **fields)


def _of_many_queries(problem: Problem, traits: ForwardTraits) -> Iterator[ForwardTraits]:
    """Those whose waves take turns, where there are such kernels: of keys in pages."""
    mask = NO_MASK if problem.mask.is_none else CAUSAL_MASK
    problem = problem._replace(mask=mask)
    for each in _variants(traits):
        if takes_turns(problem, traits.arch, are_wide=each.access != "paged"):
            yield _by_own_template(each, takes_turns=True)


def _of_lists(problem: Problem, traits: ForwardTraits) -> Iterator[ForwardTraits]:
    """Those with persistent workgroups, where calls may have work for such."""
    may_differ = problem.mode == "gm1" or not problem.mask.is_none
    if not may_differ or traits.leaves_parts or not has_lists(traits.tile, streams=traits.streams):
        return
    yield replace(traits, lists_work=True)
    if not traits.has_int8_probabilities:
        yield replace(traits, lists_work=True, stacks_heads=True)


def _of_few_queries(problem: Problem, traits: ForwardTraits) -> Iterator[ForwardTraits]:
    """Those with stacked heads, and with rows of latents or for decoding, where there are such."""
    may_stack = not traits.has_int8_probabilities
    if may_stack:
        yield replace(traits, stacks_heads=True)
    of_latent = problem._replace(has_v_at_k=True, sizes=problem.sizes._replace(v=problem.sizes.k))
    if row_blocks_of(of_latent, are_heads_stacked=True):
        for blocks in _doubled(MOST_LATENT_BLOCKS):
            yield _by_own_template(traits, stacks_heads=True, row_blocks=blocks)
    one_query = problem.with_sizes(problem.sizes._replace(seqlen_q=1))
    if ForwardTraits.of(one_query, traits.arch, _units(traits.arch)).decode_blocks is None:
        return
    # Without stacked heads rows are queries, and few.
    decoding = [_by_own_template(traits, decode_blocks=1)]
    if may_stack:
        counts = _doubled(most_blocks(max(traits.hdim_q, traits.hdim_v)))
        decoding += (_by_own_template(traits, stacks_heads=True, decode_blocks=n) for n in counts)
    yield from decoding
    if streamed_keys(problem).have_eight_waves(1):
        for each in decoding:
            if each.decode_blocks == 1:
                yield replace(each, decode_waves=MOST_WAVES)


def _doubled(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


def _variants(traits: _T) -> Iterator[_T]:
    """The kernels of such calls: with another soft cap, and with pages of any size.

    Where tokens have scales, also those whose keys alone, or values alone, have such.
    """
    yield traits
    if isinstance(traits, ForwardTraits) and all(
        (traits.has_token_k_descales, traits.has_token_v_descales)
    ):
        one_scale = replace(traits, has_descales=True)
        yield from _variants(replace(one_scale, has_token_k_descales=False))
        yield from _variants(replace(one_scale, has_token_v_descales=False))
    if traits.access in _OF_ANY_SIZE:
        yield from _variants(replace(traits, access=_OF_ANY_SIZE[traits.access]))
    if traits.modifiers.asked.logit_softcap and not traits.has_large_softcap:
        yield from _variants(replace(traits, has_large_softcap=True))


def _each_once(passes: list[_T], refusals: list[Exception]) -> tuple[_T, ...]:
    if refusals and not passes:
        raise refusals[0]
    return tuple(dict.fromkeys(passes))


def _units(arch: Arch) -> int:
    return chip(architecture(arch).unlisted_chip).compute_units


def features_of(traits: ForwardTraits | BackwardTraits) -> str:
    """The words by which exported calls find a kernel that was compiled for their features."""
    of_forward: tuple[str, ...] = ()
    if isinstance(traits, ForwardTraits):
        kv = traits.kv_dtype.partition("_")[0]
        of_forward = (
            f"{kv}_keys" if traits.kv_dtype != traits.dtype else "",
            f"{traits.other_out_dtype}_out" if traits.other_out_dtype else "",
            "descales" if traits.has_descales else "",
            "token_k" if traits.has_token_k_descales else "",
            "token_v" if traits.has_token_v_descales else "",
            "int8_probabilities" if traits.has_int8_probabilities else "",
            "split_results" if traits.leaves_parts else "",
        )
    are_packed = traits.access in ("packed_pages", "wide_packed_pages")
    words = (
        *of_forward,
        "column_major_v" if traits.has_column_major_v and not are_packed else "",
        "paged_keys" if traits.access in ("paged", "wide_pages") else "",
        "packed_pages" if are_packed else "",
        *traits.modifiers.words(),
        "large_softcap" if traits.has_large_softcap else "",
    )
    return "+".join(word for word in words if word)


def compiled_forward(traits: ForwardTraits) -> ForwardKernel:
    """A forward kernel from the build cache, or compiled.

    Raises ``jitfmha.BuildError`` where it cannot be.
    """
    image = jit.read(kernel_spec(traits))
    row = row_of_built(traits, image)
    far = far_stride_bytes(traits.tile)
    tile = forward_tile(traits.arch, traits.dtype, traits.hdim_q, traits.hdim_v)
    compiled_for = CompiledFor(
        dtype=traits.dtype,
        features=features_of(traits),
        has_wide_pages=traits.access in _OF_ANY_SIZE,
        slices=traits.slices,
        columns=traits.made_columns,
        far_stride_bytes=far,
        has_far_rows=traits.access == "far",
        stacks_heads=traits.stacks_heads,
        most_stacked_queries=tile.tile_q // 2,
        decode_blocks=traits.decode_blocks or 0,
        row_blocks=traits.row_blocks or 0,
        takes_turns=traits.takes_turns,
        list_symbol=traits.list_name if traits.lists_work else "",
    )
    return ForwardKernel(traits.arch, row, image, _compiled_cycles(traits), compiled_for)


def _ready_cycles(arch: Arch, row: KernelRow) -> tuple[KernelCycles, ...]:
    dtype = "fp8" if row.dtype == "fp8bf16" else row.dtype
    hdims = row.hdim_q, row.hdim_v
    return kernel_cycles(arch, "ready", "forward", dtype, hdims, is_masked=row.mask != 0)


def _compiled_cycles(traits: ForwardTraits) -> tuple[KernelCycles, ...]:
    part: Part = "decode" if traits.decode_blocks else "forward"
    dtype = measured_dtype(traits.dtype, traits.kv_dtype, part)
    hdims = traits.hdim_q, -(-traits.hdim_v // traits.slices)
    return kernel_cycles(traits.arch, "compiled", part, dtype, hdims, traits.is_masked)


def compiled_backward(traits: BackwardTraits) -> BackwardKernels:
    """A backward pass's kernels, from the build cache or compiled.

    Raises ``jitfmha.BuildError`` where they cannot be.
    """
    kernels = traits.kernels()
    of_queries, of_keys = backward_cycles(
        *(traits.arch, "compiled", traits.dtype, (traits.hdim_q, traits.hdim_v), traits.is_masked),
        is_deterministic=True,
    )
    return BackwardKernels(
        arch=traits.arch,
        row=kernels[0].row,
        dtype=traits.dtype,
        has_roundings=architecture(traits.arch).has_roundings(traits.dtype),
        adds_dq_up=False,
        is_deterministic=True,
        far_stride_bytes=far_stride_bytes(traits.tile),
        has_far_rows=traits.access == "far",
        name=traits.name,
        kernels=kernels,
        image=jit.read(backward_spec(traits)),
        of_queries=of_queries,
        of_keys=of_keys,
        features=features_of(traits),
    )


def compiled_sink(arch: Arch, dtype: str) -> SinkKernel:
    """The kernel of the gradient of sinks, from the build cache or compiled.

    Raises ``jitfmha.BuildError`` where it cannot be.
    """
    image = jit.read(sink_gradient_spec(arch, dtype))
    return SinkKernel(arch, dtype, sink_gradient_name(arch, dtype), image)
