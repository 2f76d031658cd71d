"""The CPU family: one C++ template, compiled for exactly a call's traits.

The launcher and the kernel are one shared library here. It runs on torch's own thread pool and is
called through ctypes, so that it needs neither torch's nor Python's headers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..jit.loader import load
from ..jit.render import render
from ..jit.shared_struct import FLOAT, INT32, INT64, FieldType, Pointer, SharedStruct, cpp_of
from ..jit.spec import MAX_NAME, BuildSpec
from ..planning.measured import Variant
from ..planning.plan import Launch, LengthsNotPlain, Plan, Reason, Refusal, splits_to_time
from ..planning.target import AVX2_FLAGS, AVX512_FLAGS, CpuIsa, CpuTarget, Target
from ..problem.arguments import CuSeqlens, Descales, Dropout, KeyOptions, Tensors, is_of_tokens
from ..problem.dtypes import EIGHT_BIT_NAMES, plain_out_dtype
from ..problem.features import Feature
from ..problem.page_lists import stride_of_rows
from ..problem.problem import Direction, GradientStrides, PlainSizes, Problem, check_pages
from ..problem.score_features import NUMBER_FEATURES, TENSOR_FEATURES, Modifiers
from ..problem.torch_parts import thread_pool
from .modifiers import (
    ModifierTraits,
    address,
    packed_dropout,
    packed_numbers,
    packed_tensors,
    packed_window,
    served_features,
)
from .rules import ATTENTION, BACKWARD

NAME = "cpu"
SERVES = (
    ATTENTION
    | BACKWARD
    | served_features("cpu")
    | {
        Feature.FP32,
        Feature.BF16,
        Feature.FP16,
        Feature.FP8_E4M3FNUZ,
        Feature.FP8_E4M3FN,
        Feature.BF8_E5M2FNUZ,
        Feature.BF8_E5M2,
        Feature.INT8,
        Feature.EIGHT_BIT_KEYS_AND_VALUES,
        Feature.INT8_PROBABILITIES,
        Feature.OUT_DTYPE,
        Feature.COLUMN_MAJOR_V,
        Feature.DESCALES,
        Feature.QUERY_HEAD_DESCALES,
        Feature.TOKEN_DESCALES,
        Feature.WINDOW_MASK,
        Feature.DROPOUT,
        Feature.PAGED_KEYS,
        Feature.PACKED_PAGES,
        Feature.NUM_SPLITS,
        Feature.SPLIT_RESULTS,
    }
)

# What all kernels are made of beside their template and what depends on their traits.
_HEADERS = (
    *("dropout", "elements", "exponent", "intrinsics", "library", "problem"),
    *("schedule", "scores", "simd", "threads", "tiles"),
)
_TILE_UNITS: dict[CpuIsa, str] = {
    "amx": "cpu/tile_unit_amx.h",
    "amx_emulated": "cpu/tile_unit_emulated.h",
}
# Tile units multiply bf16 numbers. Kernels of other dtypes are compiled for what is there beside.
BESIDE_TILE_UNIT: dict[CpuIsa, CpuIsa] = {"amx": "avx512", "amx_emulated": "generic"}
# The header of an instruction set's vectors, and its flags.
ISAS: dict[CpuIsa, tuple[str, tuple[str, ...]]] = {
    "amx": ("avx512", (*AVX512_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16")),
    "avx512_bf16": ("avx512", (*AVX512_FLAGS, "-mavx512bf16")),
    "avx512": ("avx512", AVX512_FLAGS),
    "avx2": ("avx2", AVX2_FLAGS),
    "neon": ("neon", ()),
    # The compiler makes the vector instructions.
    "generic": ("generic", ("-O3",)),
    "amx_emulated": ("generic", ("-DJITFMHA_BF16_PAIRS=1",)),
}
CFLAGS = (
    "-std=c++17",
    # -O3 takes a third longer to compile. Of what it does beyond this level, kernels of vector
    # instructions need nothing but that loops of known length are unrolled.
    "-O2",
    "-fpeel-loops",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
)
_SHORT_DIRECTIONS: dict[Direction, str] = {"forward": "fwd", "backward": "bwd"}
_CALLS: dict[Direction, str] = {"forward": "call", "backward": "backward pass"}
_OPEN_SIDE = 1 << 40  # a window side that no sequence reaches


# Strides are in elements; those of the sequence dimension lie between tokens.
STRIDES = SharedStruct("Strides", {"batch": INT64, "seq": INT64, "head": INT64, "hdim": INT64})
_FORWARD_STRIDES = ("q", "k", "v", "o", "lse")
_BACKWARD_STRIDES = (*_FORWARD_STRIDES, "dout", "dlse", "dq", "dk", "dv")
_SHAPE = {
    "batch": INT64,
    "heads_q": INT64,
    "heads_k": INT64,
    "window_left": INT64,
    "window_right": INT64,
    "bottom_right": INT32,
    "softmax_scale": FLOAT,
    **{row.name: FLOAT if row.schema == "float" else INT64 for row in NUMBER_FEATURES},
    "largest_kept": INT32,
    "keep_scale": FLOAT,
    "seqlen_q": INT64,
    "seqlen_k": INT64,
}
_CU_SEQLENS: dict[str, FieldType] = {
    **dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_q_padded", "cu_seqlens_k_padded"),
        Pointer("const std::int32_t"),
    ),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), INT64),
    "lengths_are_checked": INT64,
}
FMHA_SHAPE: dict[Direction, SharedStruct] = {
    "forward": SharedStruct("FmhaShape", {**_SHAPE, **dict.fromkeys(_FORWARD_STRIDES, STRIDES)}),
    "backward": SharedStruct("FmhaShape", {**_SHAPE, **dict.fromkeys(_BACKWARD_STRIDES, STRIDES)}),
}
TENSORS: dict[Direction, SharedStruct] = {
    "forward": SharedStruct(
        "Tensors",
        {
            **dict.fromkeys(("q", "k", "v"), Pointer("const void")),
            "o": Pointer("void"),
            "lse": Pointer("float"),
            **_CU_SEQLENS,
        },
    ),
    "backward": SharedStruct(
        "Tensors",
        {
            **dict.fromkeys(("q", "k", "v", "o", "dout"), Pointer("const void")),
            **dict.fromkeys(("lse", "dlse"), Pointer("const float")),
            **dict.fromkeys(("dq", "dk", "dv"), Pointer("void")),
            **_CU_SEQLENS,
        },
    ),
}

# Of 8-bit inputs: where the scales are, and how many query heads share one.
DESCALE = SharedStruct(
    "Descale",
    {"values": Pointer("const float"), "batch": INT64, "head": INT64, "group": INT64},
)
_SCORE_TENSORS: dict[str, FieldType] = {}
for _row in TENSOR_FEATURES:
    _SCORE_TENSORS[_row.name] = Pointer(f"const {_row.element}")
    _SCORE_TENSORS |= dict.fromkeys(_row.stride_names, INT64)  # in elements
MODIFIERS = SharedStruct(
    "Modifiers",
    {
        **_SCORE_TENSORS,
        "rng_state": Pointer("const std::int64_t"),
        "dbias": Pointer("float"),
        "dbias_strides": STRIDES,
        **dict.fromkeys(("q_descale", "k_descale", "v_descale", "p_descale"), DESCALE),
        **{
            name: kind
            for side in ("k", "v")
            for name, kind in (
                (f"{side}_token_descales", Pointer("const float")),
                (f"{side}_token_descale_strides", STRIDES),
            )
        },
    },
)

KEY_OPTIONS = SharedStruct(
    "KeyOptions",
    {
        "block_table": Pointer("const std::int32_t"),
        "block_table_stride": INT64,
        "num_pages": INT64,
        "table_entries": INT64,  # of a row of the table, or of all lists
        "num_splits": INT64,
        "most_threads": INT64,  # 0: as many as have something to do
        "out_accum": Pointer("float"),
        "lse_accum": Pointer("float"),
    },
)


def reasons(problem: Problem, target: Target) -> tuple[Reason, ...]:
    """Why ``problem`` is not served, whatever features it asks for."""
    if problem.direction == "backward" and problem.kv_dtype in EIGHT_BIT_NAMES:
        template = "Its backward pass serves fp32, bf16, fp16; k and v are {dtype}."
        return (Reason(template, dtype=problem.kv_dtype),)
    return ()


def propose(problem: Problem, target: Target) -> tuple[CpuPlan] | Refusal:
    """The kernel for ``problem``; 8-bit inputs have no backward pass."""
    assert isinstance(target, CpuTarget)
    broken = reasons(problem, target)
    if broken:
        return Refusal(broken)
    return (CpuPlan(problem, target),)


_NO_MODIFIERS = ModifierTraits("cpu")


@dataclass(frozen=True)
class CpuTraits:
    """Everything that a CPU kernel is specialised on."""

    dtype: str
    hdim_q: int
    hdim_v: int
    masked: bool
    mode: str
    isa: CpuIsa
    direction: Direction = "forward"
    modifiers: ModifierTraits = _NO_MODIFIERS
    few_rows: bool = False  # of a head, in gm0; in gm1 some sequences may have few
    paged: bool = False
    packed_pages: bool = False
    # Scales of 8-bit inputs, and whether those of q differ among the query heads of a key head.
    descales: bool = False
    query_head_descales: bool = False
    token_k_descales: bool = False
    token_v_descales: bool = False
    int8_probabilities: bool = False
    kv_dtype: str = ""  # where it is not that of q
    other_out_dtype: str = ""  # where it is not the one that such queries have
    column_major_v: bool = False

    @classmethod
    def of(cls, problem: Problem, isa: CpuIsa) -> CpuTraits:
        multiplies_bf16 = problem.dtype == problem.kv_dtype == "bf16"
        # Of packed pages rows are made first.
        has_column_major_v = problem.has_column_major_v and not problem.has_packed_pages
        uses_tile_unit = multiplies_bf16 and not has_column_major_v
        scales = problem.q_descale, problem.k_descale, problem.v_descale
        traits = cls(
            dtype=problem.dtype,
            hdim_q=problem.hdim_q,
            hdim_v=problem.hdim_v,
            masked=not problem.mask.is_none,
            mode=problem.mode,
            isa=isa if uses_tile_unit else BESIDE_TILE_UNIT.get(isa, isa),
            direction=problem.direction,
            modifiers=ModifierTraits.of(problem, "cpu"),
            paged=problem.is_paged,
            packed_pages=problem.has_packed_pages,
            descales=any(x is not None for x in scales),
            query_head_descales=problem.has_query_head_descale,
            token_k_descales=problem.has_token_k_descale,
            token_v_descales=problem.has_token_v_descale,
            int8_probabilities=problem.has_p_descale,
            kv_dtype=problem.kv_dtype if problem.has_8_bit_keys_alone else "",
            other_out_dtype=problem.other_out_dtype,
            column_major_v=has_column_major_v,
        )
        return replace(traits, few_rows=0 < problem.seqlen_q <= traits.few_queries(problem))

    @property
    def most_few_rows(self) -> int:
        """Up to so many rows of a head have head elements in the lanes."""
        # Dropout has its random numbers, and int8 probabilities their scales, for rows in the lanes
        # only; values with contiguous keys have no elements side by side.
        has_rows_there = self.modifiers.dropout or self.int8_probabilities or self.column_major_v
        return 0 if has_rows_there or self.direction == "backward" else 8

    def few_queries(self, problem: Problem) -> int:
        """Up to so many queries have few rows of a head; 0 in gm1."""
        group = problem.heads_q // max(problem.heads_k, 1)
        return self.most_few_rows // max(group, 1) if self.mode == "gm0" else 0

    @property
    def rows(self) -> tuple[str, ...]:
        """Which rows of a head there may be; each is compiled by itself."""
        if self.few_rows:
            return ("few",)
        return ("few", "many") if self.mode == "gm1" and self.most_few_rows else ("many",)

    @property
    def name(self) -> str:
        descales = "query_head_descales" if self.query_head_descales else "descales"
        words = (
            f"cpu_{self.short_direction}_{self.dtype}",
            f"{self.kv_dtype}kv" if self.kv_dtype else "",
            f"{self.other_out_dtype}out" if self.other_out_dtype else "",
            descales if self.descales else "",
            "token_k" if self.token_k_descales else "",
            "token_v" if self.token_v_descales else "",
            "int8_p" if self.int8_probabilities else "",
            f"{self.hdim_q}x{self.hdim_v}{'c' if self.column_major_v else ''}",
            self.mask,
            *self.modifiers.words(),
            self.mode,
            "few_rows" if self.few_rows else "",
            "packed_pages" if self.packed_pages else "paged" if self.paged else "",
            self.isa,
        )
        return "_".join(word for word in words if word)

    @property
    def out_dtype(self) -> str:
        return self.other_out_dtype or plain_out_dtype(self.dtype)

    @property
    def short_direction(self) -> str:
        return _SHORT_DIRECTIONS[self.direction]

    @property
    def template(self) -> str:
        return f"cpu/fmha_{self.short_direction}.cpp.in"

    @property
    def mask(self) -> str:
        return "window" if self.masked else "none"


# Traits that are constants under their names.
_SWITCHES = (
    *("column_major_v", "descales", "int8_probabilities", "packed_pages", "paged"),
    *("query_head_descales", "token_k_descales", "token_v_descales"),
)


@lru_cache(maxsize=256)
def launcher_spec(traits: CpuTraits) -> BuildSpec:
    """The source and the flags of the launcher for ``traits``."""
    structs = (
        STRIDES,
        DESCALE,
        FMHA_SHAPE[traits.direction],
        TENSORS[traits.direction],
        MODIFIERS,
        KEY_OPTIONS,
    )
    values = {
        "direction": traits.direction,
        "dtype": traits.dtype,
        "kv_dtype": traits.kv_dtype or traits.dtype,
        "out_dtype": traits.out_dtype,
        "hdim_q": traits.hdim_q,
        "hdim_v": traits.hdim_v,
        "mask": traits.mask,
        "mode": traits.mode,
        "few_rows": traits.most_few_rows,
        "rows": "_or_".join(traits.rows),
        "tile_unit": traits.isa in _TILE_UNITS,
        "shared_structs": cpp_of(structs),
        "score_constants": traits.modifiers.constants(),
        **{name: getattr(traits, name) for name in _SWITCHES},
    }
    template = f"fmha_{traits.short_direction}"
    sources = {
        **{
            f"{rows}_rows.cpp": render(
                "cpu/beside.cpp.in", {"kernel": f"{template}.cpp", "rows": rows}
            )
            for rows in traits.rows
        },
        "traits.h": render("cpu/traits.h.in", values),
        **_product_sources(traits),
    }
    why = (
        f"the first {traits.dtype} {_CALLS[traits.direction]} in {traits.mode} with hdim "
        f"{traits.hdim_q}x{traits.hdim_v} and mask {traits.mask}"
        f"{''.join(f', {word}' for word in traits.modifiers.words())}"
        f"{' in pages' if traits.paged else ''}"
    )
    return kernel_build(template, traits.name, traits.isa, {}, _HEADERS, sources, (), why)


def kernel_build(
    template: str,
    name: str,
    isa: CpuIsa,
    values: Mapping[str, object],
    headers: Sequence[str],
    sources: Mapping[str, str],
    flags: Sequence[str],
    why: str,
) -> BuildSpec:
    """The sources and the flags of a kernel: its template, what it includes, and other sources."""
    vectors, flags_of_isa = ISAS[isa]
    origin = {"origin": f"csrc_templates/cpu/{template}.cpp.in for {name}"}
    return BuildSpec(
        # Long ones are cut: the cache tells its entries apart by their content.
        name=name[:MAX_NAME],
        sources={
            f"{template}.cpp": render(f"cpu/{template}.cpp.in", origin | dict(values)),
            "vectors.h": render(f"cpu/simd_{vectors}.h", {}),
            **{f"{header}.h": render(f"cpu/{header}.h", {}) for header in headers},
            **sources,
        },
        cflags=(*CFLAGS, *flags, *flags_of_isa),
        why=why,
    )


def _product_sources(traits: CpuTraits) -> dict[str, str]:
    """Matrix products, which depend on the instruction set and on packed pages."""
    tile_unit = _TILE_UNITS.get(traits.isa)
    of_unit = "vectors" if tile_unit is None else "tile_unit"
    sources = {}
    if traits.direction == "forward":
        sources["products.h"] = f"cpu/products_{of_unit}.h"
        packed = "packed_" if traits.packed_pages else ""
        sources["few_rows.h"] = f"cpu/few_rows_{packed}{of_unit}.h"
        sources["few_rows_operands.h"] = "cpu/few_rows_operands.h"
        sources[f"{packed}in_place.h"] = f"cpu/{packed}in_place.h"
    else:
        sources["backward_products.h"] = f"cpu/backward_products_{of_unit}.h"
    if tile_unit is not None:
        sources["tile_unit.h"] = tile_unit
        sources["tile_unit_shapes.h"] = "cpu/tile_unit_shapes.h"
        sources["transposed_pairs.h"] = "cpu/transposed_pairs.h"
    return {name: render(template, {}) for name, template in sources.items()}


class CpuPlan(Plan):
    """The CPU kernel for one problem, which serves all lengths with few rows, or with many.

    A backward pass has the strides of its gradients from the problem.
    """

    family = NAME

    def __init__(
        self, problem: Problem, target: CpuTarget, num_splits: int = 0, threads: int = 0
    ) -> None:
        self.problem = problem
        self.target = target
        self.num_splits = num_splits
        self.threads = threads
        self.traits = CpuTraits.of(problem, target.isa)
        self._few_queries = self.traits.few_queries(problem)
        # That of the cache entry is the same, or its beginning.
        self.kernel = self.traits.name
        self.source = f"csrc_templates/{self.traits.template}"

    @property
    def version(self) -> str:
        return launcher_spec(self.traits).digest

    def variants(self, seqlen_q: int, seqlen_k: int) -> list[Plan]:
        if self.problem.direction == "backward":
            return []
        splits = splits_to_time(seqlen_k // self.problem.packs)
        of_threads = (1 << bits for bits in range((torch.get_num_threads() - 1).bit_length()))
        choices = (*((n, 0) for n in splits), *((0, n) for n in of_threads))
        return [CpuPlan(self.problem, self.target, *choice) for choice in choices]

    def with_choice(self, variant: Variant) -> CpuPlan | None:
        _, kernel, _, *choice = variant
        if kernel != self.kernel or self.problem.direction == "backward" or not any(choice):
            return None
        return CpuPlan(self.problem, self.target, *choice)

    @property
    def specs(self) -> Sequence[BuildSpec]:
        return [launcher_spec(self.traits)]

    def remarks(self) -> list[str]:
        isa, chosen = self.traits.isa, self.target.isa
        remarks = [f"{chosen} is taken because {self.target.why}."]
        if isa != chosen:
            remarks.append(f"This kernel takes {isa}: {chosen} has tiles for rows of bf16 only.")
        return remarks

    def bind(self) -> None:
        problem = self.problem
        self._entry = _entry(self.traits)
        self._is_group = problem.mode == "gm1"
        self._constants = (
            *(problem.batch, problem.heads_q, problem.heads_k),
            *packed_window(problem.mask, _OPEN_SIDE),
            problem.softmax_scale,
            *packed_numbers(problem, _OPEN_SIDE),
            *packed_dropout(problem),
        )

    def serves(self, sizes: PlainSizes) -> bool:
        """All lengths with few rows, or with many; where times were measured, the best for it."""
        if (sizes[0] <= self._few_queries) != self.traits.few_rows:
            return False
        contest = self.contest
        return contest is None or contest.best(sizes[0], sizes[1]) is self

    def launch_for(self, sizes: PlainSizes) -> Launch:
        problem = self.problem
        seqlen_q, seqlen_k, q, k, v, out = sizes
        if problem.gradients is not None:
            strides = self._backward_strides(sizes, problem.gradients)
        elif problem.is_paged:
            strides = (0, *q, *k, *v, 0, *out, 0, 1, seqlen_q, 1)
        elif self._is_group:
            strides = (0, *q, 0, *k, 0, *v, 0, *out, 0, 1, seqlen_q, 1)
        else:
            strides = (*q, *k, *v, *out, problem.heads_q * seqlen_q, 1, seqlen_q, 1)
        shape = FMHA_SHAPE[self.traits.direction].packer.pack(
            *self._constants, seqlen_q, seqlen_k, *strides
        )
        if problem.gradients is not None:
            return _backward_launch(self._entry, shape)
        usual = None
        if self.num_splits or self.threads:
            usual = KEY_OPTIONS.packer.pack(0, 0, 0, 0, self.num_splits, self.threads, 0, 0)
        group = problem.heads_q // max(problem.heads_k, 1)
        return _forward_launch(self._entry, shape, group, usual)

    def _backward_strides(self, sizes: PlainSizes, gradients: GradientStrides) -> tuple[int, ...]:
        """The strides (batch, seq, head, hdim) of all tensors, in the order of the shape."""
        dout, lse, dlse, dq, dk, dv = gradients
        _, _, *rows = sizes
        of_lse = (lse, lse if dlse is None else dlse)
        batch = (0,) if self._is_group else ()
        lses = [(*batch, *x[:-2], x[-1], x[-2], 1) for x in of_lse]
        before, after = [(*batch, *x) for x in rows], [(*batch, *x) for x in (dq, dk, dv)]
        ordered = (*before, lses[0], (*batch, *dout), lses[1], *after)
        return tuple(chain.from_iterable(ordered))


def _forward_launch(
    entry: Callable[..., int], shape: bytes, group: int, usual: bytes | None
) -> Launch:
    """Runs the kernel; returns when ``out`` and ``lse`` are written.

    Where keys lie in no pages it reads nothing of q, k, v and ``out`` but their addresses.
    ``usual`` are the packed key options of calls that ask for none.
    """

    def launch(tensors: Tensors) -> None:
        # 0.2 us less than reading them by their names.
        q, k, v, out, lse, cu_seqlens, descales, modifiers, dropout, _, keys, is_checked = tensors
        modifying = None
        if modifiers is not None or dropout is not None or descales is not None:
            scales = _NO_DESCALES if descales is None else _located_descales(descales, group)
            modifying = _packed_modifiers(modifiers, dropout, scales)
        lengths = _NO_LENGTHS if cu_seqlens is None else _located_lengths(cu_seqlens)
        # Written out: a loop over the tensors takes 1 us longer.
        packed = _pack_tensors(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            *lengths,
            is_checked,
        )
        key_options = usual if keys is None else _packed_keys(keys, k)
        status = entry(shape, packed, modifying, key_options)
        if status != 0:
            _raise_for(status, tensors)

    return launch


def _backward_launch(entry: Callable[..., int], shape: bytes) -> Launch:
    """Runs the kernel; returns when ``dq``, ``dk`` and ``dv`` are written."""

    def launch(tensors: Tensors) -> None:
        # Written out, as above.
        q, k, v, out, lse, cu_seqlens, _, modifiers, dropout, gradients, _, is_checked = tensors
        assert lse is not None, "a backward pass reads the lse"
        assert gradients is not None, "a backward pass has gradients"
        dout, dlse, dq, dk, dv, dbias = gradients
        packed = _pack_backward_tensors(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            dout.data_ptr(),
            lse.data_ptr(),
            0 if dlse is None else dlse.data_ptr(),
            dq.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
            *(_NO_LENGTHS if cu_seqlens is None else _located_lengths(cu_seqlens)),
            is_checked,
        )
        modifying = None
        if modifiers is not None or dropout is not None:
            modifying = _packed_modifiers(modifiers, dropout, _NO_DESCALES, dbias)
        status = entry(shape, packed, modifying)
        if status != 0:
            _raise_for(status, tensors)

    return launch


def _raise_for(status: int, tensors: Tensors) -> NoReturn:
    if status == _LENGTHS_NOT_PLAIN:
        raise LengthsNotPlain
    if status == _NAMES_NO_PAGE:
        assert tensors.keys is not None
        assert tensors.keys.block_table is not None
        assert tensors.cu_seqlens is not None
        check_pages(tensors.cu_seqlens, tensors.keys.block_table, tensors.k)
    raise MemoryError(_NO_MEMORY)


_NAMES_NO_PAGE, _LENGTHS_NOT_PLAIN = 2, 3
_NO_MEMORY = "the CPU kernel could not allocate its scratch memory"
_pack_tensors, _pack_backward_tensors = (x.packer.pack for x in TENSORS.values())
_NO_DESCALES: tuple[int, ...] = (0,) * 26
_NO_LENGTHS: tuple[int, ...] = (0,) * 6
_ANY_LENGTH = 2**63 - 1


def _located_lengths(cu_seqlens: CuSeqlens) -> tuple[int, ...]:
    """The addresses of prefix sums, and the longest lengths that there may be."""
    q, k, q_padded, k_padded, longest_q, longest_k = cu_seqlens
    sums_q, sums_k = q.data_ptr(), k.data_ptr()
    return (
        sums_q,
        sums_k,
        sums_q if q_padded is q else q_padded.data_ptr(),
        sums_k if k_padded is k else k_padded.data_ptr(),
        _ANY_LENGTH if longest_q is None else longest_q,
        _ANY_LENGTH if longest_k is None else longest_k,
    )


def _located_descales(descales: Descales, group: int) -> tuple[int, ...]:
    """Address, strides and group of each scale, as the struct has them; then those of tokens.

    ``group`` is how many query heads share a key head, and so a scale of k, v, or shape (b, hk).
    """
    located: list[int] = []
    of_tokens: list[int] = []
    for name, x in descales._asdict().items():
        has_tokens = is_of_tokens(x)
        if name in ("k", "v"):
            strides = (*(0,) * (4 - x.dim()), *x.stride()) if has_tokens else ()
            of_tokens += (x.data_ptr(), *strides) if has_tokens else (0,) * 5
        if x is None or has_tokens:
            located += (0, 0, 0, 1)
            continue
        sizes = zip(x.shape, x.stride(), strict=True)
        batch, head = (0, *(0 if size == 1 else stride for size, stride in sizes))[-2:]
        is_shared = name in ("k", "v") or x.dim() == 2
        located += (x.data_ptr(), batch, head, group if is_shared else 1)
    return (*located, *of_tokens)


def _packed_modifiers(
    modifiers: Modifiers | None,
    dropout: Dropout | None,
    descales: tuple[int, ...],
    dbias: Tensor | None = None,
) -> bytes:
    of_dbias = (0, 0, 0, 0)
    if dbias is not None:
        *batch, head, query, key = dbias.stride()
        of_dbias = batch[0] if batch else 0, query, head, key
    return MODIFIERS.packer.pack(
        *packed_tensors(modifiers),
        address(None if dropout is None else dropout.rng_state),
        *(address(dbias), *of_dbias),
        *descales,
    )


def _packed_keys(keys: KeyOptions, k: Tensor) -> bytes:
    table, num_splits, out_accum, lse_accum = keys
    if table is None:
        pages = 0, 0, 0, 0
    else:
        pages = table.data_ptr(), stride_of_rows(table), k.shape[0], table.shape[-1]
    return _pack_key_options(*pages, num_splits, 0, address(out_accum), address(lse_accum))


_pack_key_options = KEY_OPTIONS.packer.pack


def load_entry(spec: BuildSpec, name: str, *arguments: Any) -> Callable[..., int]:
    """The function of a kernel, which runs on torch's threads; raises as `load`."""
    library = load(spec)
    library.jitfmha_use_pool(*thread_pool())
    function: Callable[..., int] = getattr(library, name)
    function.argtypes = arguments  # type: ignore[attr-defined]
    function.restype = ctypes.c_int  # type: ignore[attr-defined]
    return function


@cache
def _entry(traits: CpuTraits) -> Callable[..., int]:
    arguments = [ctypes.c_char_p] * {"forward": 4, "backward": 3}[traits.direction]
    return load_entry(launcher_spec(traits), f"jitfmha_{traits.short_direction}", *arguments)
