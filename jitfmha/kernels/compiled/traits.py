"""What a compiled kernel is compiled for, and the build that makes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from ... import jit
from ...amd.chips import SIMDS, Arch, architecture
from ...amd.code_object import kernel_descriptors
from ...amd.kernel_arguments import FEW_SPLITS, compiled_structs
from ...amd.manifest import KernelRow
from ...jit.elf import Elf
from ...problem.arguments import Bf16Cvt
from ...problem.dtypes import DTYPE_BYTES, EIGHT_BIT_NAMES, plain_out_dtype
from ...problem.features import Feature
from ...problem.problem import BF16_CVTS, Mode, PlainSizes, Problem, element_bytes
from ...problem.score_features import AskedModifiers
from ..modifiers import ModifierTraits
from . import decode
from .decode import decode_blocks_of, decode_tile, decode_waves
from .decode_policy import DECODE_WAVES, MOST_BLOCKS
from .device_spec import device_spec
from .latent import latent_tile, made_columns, row_blocks_of
from .tile_table import Product, Tile
from .tiles import early_loads_in_cpp, tile_for, tile_table, waves_in_cpp
from .turns import takes_turns, turns_tile

if TYPE_CHECKING:
    from typing_extensions import Self

Access = Literal["near", "far", "paged", "packed_pages", "wide_pages", "wide_packed_pages"]

_HEADERS_OF_TURNS = ("elements.h", "first_page.h")
_HEADERS = (*_HEADERS_OF_TURNS, "dropout.h", "forward_tasks.h", "row_tiles.h", "scores.h")
_HEADERS_OF_FOURS = ("combine_fours.h", "split_fours.h")
_VALUES_OF_TURNS = (
    *("shared_structs", "kernel", "combine_kernel", "key_element", "out_element"),
    *("hdim_q", "hdim_v", "rounding", "own_rows", "other_rows"),
)
_HELD_ROW_BYTES = 1152  # up to which registers have room for queries, and LDS for keys
_ROUNDINGS: dict[Bf16Cvt, str] = {
    "rtne": "nearest_even",
    "rtna": "nearest_away",
    "rtz": "towards_zero",
}
BUFFER_REACH = 1 << 31
_MOST_SHARED_HDIM = 192  # up to which kernels without features have two waves of a SIMD
WIDE_PAGE_ROWS = 16  # of which wide pages have a multiple; the threads of a wave have one
_LSE_BYTES = 4
# Up to here an error of 1e-7 of the cap is one of 1e-4 of a logit, below what 16 bits keep.
LARGE_SOFTCAP = 1024.0
WORD_END = 1 << 32  # a kernel's strides have 32 bits


def _short(dtype: str) -> str:
    """A data type's word in names: a chip has one form of fp8, and one of bf8."""
    return dtype.partition("_")[0]


@dataclass(frozen=True)
class SharedTraits(ABC):
    """What compiled kernels of both directions are specialised on.

    Attributes:
        bf16_cvt: how float32 becomes bf16; "rtne" where there is no choice.
        is_masked: whether there are keys that some queries do not see.
        access: how rows are reached, as in the templates.
        modifiers: what is compiled in beside the mask.
        has_large_softcap: whether the soft cap is so large that it has to be exact in proportion to
            the logits, not to itself.
    """

    arch: Arch
    dtype: str
    hdim_q: int
    hdim_v: int
    mode: Mode
    bf16_cvt: Bf16Cvt
    is_masked: bool
    access: Access
    modifiers: ModifierTraits
    has_large_softcap: bool = field(default=False, kw_only=True)

    @classmethod
    def _of(
        cls, problem: Problem, arch: Arch, access: Access, modifiers: ModifierTraits, **more: Any
    ) -> Self:
        """What a problem asks for, with what follows from the direction."""
        return cls(
            arch=arch,
            dtype=problem.dtype,
            hdim_q=problem.hdim_q,
            hdim_v=problem.hdim_v,
            mode=problem.mode,
            bf16_cvt=problem.bf16_cvt
            if architecture(arch).has_roundings(problem.dtype)
            else "rtne",
            is_masked=not problem.mask.is_none,
            access=access,
            modifiers=modifiers,
            has_large_softcap=problem.modifiers.logit_softcap > LARGE_SOFTCAP,
            **more,
        )

    @property
    @abstractmethod
    def tile(self) -> Tile:
        """The shape of the kernel's work; of a backward pass that of its first kernel."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What the symbols of the kernels begin with."""

    def _name(self, kind: str, of_keys: Sequence[str] = (), of_queries: Sequence[str] = ()) -> str:
        """Name the kernel, with words for what is odd about keys and values, and about queries."""
        words = (
            f"fmha_{kind}_compiled_hd{self.hdim_q}x{self.hdim_v}",
            _short(self.dtype),
            self.bf16_cvt if architecture(self.arch).has_roundings(self.dtype) else "",
            *of_keys,
            "window" if self.is_masked else "",
            *self._words_of_modifiers(),
            "" if self.access == "near" else self.access,
            *of_queries,
            self.mode,
            self.arch,
        )
        return "_".join(word for word in words if word)

    def row_of(self, symbol: str) -> KernelRow:
        is_group = self.mode == "gm1"
        return KernelRow(
            dtype="bf16" if self.dtype == "bf16" else "fp16",
            hdim_q=self.hdim_q,
            hdim_v=self.hdim_v,
            mask=2 if self.is_masked else 0,
            mode=int(is_group),
            bf16_cvt=BF16_CVTS.index(self.bf16_cvt),
            ts_qo=self.tile.own_rows,
            ts_kv=self.tile.other_rows,
            symbol=symbol,
            file=f"{self.name}.co",
            abi="jitfmha",
            threads=self.tile.threads,
            grid="heads_batches_tiles_splits" if is_group else "xcd_heads_tiles_splits",
        )

    def template_values(self) -> dict[str, object]:
        return {
            "hdim_q": self.hdim_q,
            "hdim_v": self.hdim_v,
            "is_group": self.mode == "gm1",
            "is_masked": self.is_masked,
            "access": self.access,
            "score_constants": self.modifiers.constants(),
            "large_softcap": self.has_large_softcap,
            "rounding": _ROUNDINGS[self.bf16_cvt],
            "own_rows": self.tile.own_rows,
            "other_rows": self.tile.other_rows,
            "waves": self.tile.waves,
            "lds_bytes": self.tile.lds_bytes,
            "wide_page_rows": WIDE_PAGE_ROWS,
        }

    def _words_of_modifiers(self) -> tuple[str, ...]:
        large = ("large_softcap",) if self.has_large_softcap else ()
        return (*self.modifiers.words(), *large)

    def why_built(self, what: str) -> str:
        """Say for whom the kernel is built: the first ``what`` of its kind."""
        return (
            f"the first {self.dtype} {what} in {self.mode} with hdim "
            f"{self.hdim_q}x{self.hdim_v}{' and a mask' if self.is_masked else ''}"
            f"{''.join(f', {word}' for word in self._words_of_modifiers())} on {self.arch}"
        )


@dataclass(frozen=True)
class ForwardTraits(SharedTraits):
    """Everything that a compiled kernel is specialised on.

    Attributes:
        kv_dtype: that of keys and values.
        other_out_dtype: of the output, where it is not the one that such queries have.
        has_descales: whether there are scales of 8-bit inputs, all tokens of which have the same.
        has_token_k_descales, has_token_v_descales: whether tokens of k, and of v, have their own.
        has_int8_probabilities: whether probabilities become int8 before they meet values.
        has_column_major_v: whether keys lie side by side in v.
        leaves_parts: whether the results of splits are wanted beside that of all keys.
        stacks_heads: whether the query heads that share a key head are rows of the same tiles.
        row_blocks: where values are the first columns of keys: the rows of a workgroup, in blocks.
        decode_blocks: of other calls with few rows: the same.
        decode_waves: of their workgroups.
        takes_turns: whether the waves of a SIMD do, in calls with many queries and keys in pages.
        lists_work: whether workgroups are persistent, and what they do is listed on the device.
    """

    kv_dtype: str
    other_out_dtype: str = ""
    has_descales: bool = False
    has_token_k_descales: bool = False
    has_token_v_descales: bool = False
    has_int8_probabilities: bool = False
    has_column_major_v: bool = False
    leaves_parts: bool = False
    stacks_heads: bool = False
    row_blocks: int | None = None
    decode_blocks: int | None = None
    decode_waves: int = DECODE_WAVES
    takes_turns: bool = False
    lists_work: bool = False

    @classmethod
    def of(
        cls, problem: Problem, arch: Arch, compute_units: int, *, lists_work: bool = False
    ) -> ForwardTraits:
        """What a problem asks for; there has to be a tile with room for it."""
        tile = forward_tile(arch, problem.dtype, problem.hdim_q, problem.hdim_v)
        are_heads_stacked = stacks_heads(problem, tile, are_uneven=lists_work)
        blocks = (
            (None, None) if lists_work else blocks_of(problem, are_heads_stacked, compute_units)
        )
        row_blocks, decode_blocks = blocks
        access = access_of(problem, tile)
        in_turns = not lists_work and takes_turns(problem, arch, are_wide=access != "paged")
        has_own_template = row_blocks or decode_blocks or in_turns
        if access == "packed_pages" and not has_own_template and has_wide_blocks(problem, tile):
            access = "wide_packed_pages"
        return cls._of(
            problem,
            arch,
            access,
            ModifierTraits.of(problem, "compiled"),
            kv_dtype=problem.kv_dtype,
            other_out_dtype=problem.other_out_dtype,
            has_descales=not problem.features.isdisjoint(
                (Feature.DESCALES, Feature.INT8_PROBABILITIES)
            ),
            has_token_k_descales=problem.has_token_k_descale,
            has_token_v_descales=problem.has_token_v_descale,
            has_int8_probabilities=problem.has_p_descale,
            has_column_major_v=problem.has_column_major_v,
            leaves_parts=problem.has_split_results,
            stacks_heads=are_heads_stacked,
            row_blocks=row_blocks,
            decode_blocks=decode_blocks,
            decode_waves=waves_of(problem, arch, are_heads_stacked, compute_units, decode_blocks),
            takes_turns=in_turns,
            lists_work=lists_work,
        )

    @property
    def tile(self) -> Tile:
        tile = forward_tile(self.arch, self.dtype, self.hdim_q, self.hdim_v)
        if self.row_blocks:
            return latent_tile(tile, self.kv_dtype, self.row_blocks)
        if self.takes_turns:
            return turns_tile(tile, self.arch, self.dtype, self.hdim_q, self.hdim_v)
        if self.decode_blocks:
            return decode_tile(tile, self.hdim_v, self.decode_blocks, self.decode_waves)
        return tile

    @property
    def template(self) -> str:
        if self.row_blocks:
            return "latent_fwd.hip"
        if self.takes_turns:
            return "turns_fwd.hip"
        return "decode_fwd.hip" if self.decode_blocks else "compiled_fwd.hip"

    @property
    def slices(self) -> int:
        return self.tile.slices

    @property
    def has_byte_values(self) -> bool:
        """Whether integers among values become fp16 as decode_fwd.hip.in says."""
        return (
            self.decode_blocks is not None
            and self.kv_dtype == "int8"
            and not (self.has_token_v_descales or self.modifiers.asked.sink)
        )

    @property
    def streams(self) -> bool:
        """Whether queries and keys come from memory whenever a product takes them."""
        return _streams(self.tile, self.dtype)

    @property
    def columns(self) -> int:
        """How many columns of v a slice of the output has."""
        if self.slices == 1:
            return self.hdim_v
        return -(-self.hdim_v // (8 * self.slices)) * 8

    @property
    def made_columns(self) -> int:
        """How many columns a split of the keys leaves."""
        if self.decode_blocks:
            return decode.made_columns(self.hdim_v)
        return made_columns(self.hdim_v) if self.row_blocks else self.columns

    @property
    def out_dtype(self) -> str:
        return self.other_out_dtype or plain_out_dtype(self.dtype)

    @property
    def name(self) -> str:
        of_keys = (
            f"{_short(self.kv_dtype)}kv" if self.kv_dtype != self.dtype else "",
            f"{self.other_out_dtype}out" if self.other_out_dtype else "",
            "descales" if self.has_descales else "",
            "token_k" if self.has_token_k_descales else "",
            "token_v" if self.has_token_v_descales else "",
            "int8p" if self.has_int8_probabilities else "",
            "column_major_v" if self.has_column_major_v else "",
            "parts" if self.leaves_parts else "",
        )
        of_queries = (
            "stacked" if self.stacks_heads else "",
            f"latent{self.row_blocks}" if self.row_blocks else "",
            f"decode{self.decode_blocks}" if self.decode_blocks else "",
            f"waves{self.decode_waves}" if self.decode_waves != DECODE_WAVES else "",
            "turns" if self.takes_turns else "",
            "listed" if self.lists_work else "",
        )
        return self._name("fwd", of_keys, of_queries)

    @property
    def combine_name(self) -> str:
        """The name of the kernel that makes the output where keys are split."""
        return f"{self.name}_combine"

    @property
    def list_name(self) -> str:
        """The name of the kernel that lists the work of persistent workgroups."""
        return f"{self.name}_list"

    def row(self) -> KernelRow:
        # Persistent workgroups combine what they leave themselves.
        combine = None if self.lists_work else self.combine_name
        return self.row_of(self.name)._replace(
            combine_symbol=combine, stacks_heads=self.stacks_heads
        )


def forward_tile(arch: Arch, dtype: str, hdim_q: int, hdim_v: int) -> Tile:
    """The tile of a call that forward serves."""
    tile = tile_for(arch, "forward", dtype, hdim_q, hdim_v)
    assert tile is not None, f"no tile of {arch} for {dtype}, hdim {hdim_q}x{hdim_v}"
    return tile


def blocks_of(
    problem: Problem, are_heads_stacked: bool, compute_units: int
) -> tuple[int | None, int | None]:
    """What a call has of ``row_blocks`` and ``decode_blocks``."""
    row_blocks = row_blocks_of(problem, are_heads_stacked)
    if row_blocks:
        return row_blocks, None
    rows_of_query = problem.gqa if are_heads_stacked else 1
    return None, decode_blocks_of(problem, rows_of_query, compute_units)(problem.seqlen_q)


def waves_of(
    problem: Problem,
    arch: Arch,
    are_heads_stacked: bool,
    compute_units: int,
    decode_blocks: int | None,
) -> int:
    """What a call has of ``decode_waves``."""
    rows_of_query = problem.gqa if are_heads_stacked else 1
    return decode_waves(problem, arch, rows_of_query, compute_units, decode_blocks)


def _streams(tile: Tile, dtype: str) -> bool:
    return tile.hdim_q * DTYPE_BYTES[dtype] > _HELD_ROW_BYTES


def far_stride_bytes(tile: Tile) -> int:
    """The stride from which on a tile reaches further than a buffer, and rows have addresses."""
    return BUFFER_REACH // tile.other_rows


def access_of(problem: Problem, tile: Tile) -> Access:
    """How keys and values are reached; far ones are more than a buffer's offsets apart."""
    stride = max(problem.k.seq, problem.v.seq) * element_bytes(problem).kv
    is_far = stride >= far_stride_bytes(tile)
    if problem.has_packed_pages:
        return "packed_pages"
    if problem.is_paged:
        return "wide_pages" if not is_far and has_wide_blocks(problem, tile) else "paged"
    return "far" if is_far else "near"


def has_wide_blocks(problem: Problem, tile: Tile) -> bool:
    """Whether the threads of a wave load rows of one page, which a buffer reaches."""
    page_bytes = problem.seqlen_k * problem.hdim_q * element_bytes(problem).kv
    if problem.has_packed_pages and (problem.dtype == "fp32" or page_bytes >= BUFFER_REACH):
        return False
    # Biases and dropout need the scalar registers that a wave's page would take.
    # And streamed rows are loaded by lanes that have rows of several pages.
    needs_registers = problem.modifiers.bias or problem.dropout_p or _streams(tile, problem.dtype)
    return not needs_registers and problem.seqlen_k % WIDE_PAGE_ROWS == 0


def stacks_heads(problem: Problem, tile: Tile, *, are_uneven: bool = False) -> bool:
    """Whether the query heads that share a key head are rows of the same tiles.

    That reads keys and values once for all of them, and pays where a tile of one head's queries
    would be half empty. The lengths of gm1's sequences are on the GPU: they count as equally long,
    or some of them as short where they ``are_uneven``.
    """
    if problem.is_empty:
        return False
    most_queries = _most_stacked_queries(problem, tile)
    are_uneven = are_uneven and problem.mode == "gm1"
    if problem.seqlen_q > most_queries and not (are_uneven and most_queries > 0):
        return False
    bytes_of = element_bytes(problem)
    stride = max(problem.q.head * bytes_of.q, problem.out.head * bytes_of.out)
    return problem.gqa * max(stride, problem.seqlen_q * _LSE_BYTES) < WORD_END


def _most_stacked_queries(problem: Problem, tile: Tile) -> int:
    """Up to how many queries heads may be stacked, in gm1 of all sequences together; 0: never."""
    # Stacked heads have one scale.
    if problem.gqa == 1 or problem.has_query_head_descale or problem.has_p_descale:
        return 0
    return tile.tile_q // 2 * problem.packs


def have_same_traits(
    problem: Problem, traits: ForwardTraits, compute_units: int
) -> Callable[[PlainSizes], bool]:
    """A quick question for calls that differ from ``problem`` in lengths and strides only.

    True: all that lengths and strides decide is as in ``traits``. False: it may be otherwise.
    """
    if problem.is_empty:
        return lambda sizes: False
    bytes_of = element_bytes(problem)
    # Wide values may have another kernel with other lengths (latent.py).
    is_near = traits.access == "near" and traits.slices == 1 and not traits.row_blocks
    tile = forward_tile(traits.arch, traits.dtype, traits.hdim_q, traits.hdim_v)
    near_stride = far_stride_bytes(tile) // bytes_of.kv
    most_queries = _most_stacked_queries(problem, tile)
    widest = problem.gqa * max(bytes_of.q, bytes_of.out, _LSE_BYTES)
    rows_of_query = problem.gqa if traits.stacks_heads else 1
    decode_blocks = decode_blocks_of(problem, rows_of_query, compute_units)

    def have_same(sizes: PlainSizes) -> bool:
        seqlen_q, _, q, k, v, out = sizes
        if not (is_near and seqlen_q and k[-3] < near_stride and v[-3] < near_stride):
            return False
        if decode_blocks(seqlen_q) != traits.decode_blocks:
            return False
        if seqlen_q > most_queries:
            return not traits.stacks_heads
        return traits.stacks_heads and widest * (q[-2] + out[-2] + seqlen_q) < WORD_END

    return have_same


def row_of_built(traits: ForwardTraits, image: bytes) -> KernelRow:
    """The row of a kernel whose code object says how many of its waves share a SIMD."""
    descriptor = kernel_descriptors(Elf(image))[traits.name]
    chip = architecture(traits.arch)
    by_registers = chip.simd_vgprs // descriptor.vgprs
    by_lds = chip.lds_bytes // descriptor.lds_bytes * traits.tile.waves // SIMDS
    return traits.row()._replace(waves_of_simd=min(by_registers, by_lds))


@cache
def kernel_spec(traits: ForwardTraits) -> jit.BuildSpec:
    """The sources and the flags of a kernel."""
    of_queries, of_keys, of_output = (
        tile_table(traits.arch).elements_of(dtype)
        for dtype in (traits.dtype, traits.kv_dtype, traits.out_dtype)
    )
    values = {
        "shared_structs": compiled_structs(),
        "kernel": traits.name,
        "combine_kernel": traits.combine_name,
        "stacks_heads": traits.stacks_heads,
        "query_element": of_queries.element,
        "key_element": of_keys.element,
        "out_element": of_output.element,
        "dtype": _product_of_values(of_queries.products, traits),
        "descales": traits.has_descales,
        **traits.template_values(),
    }
    headers: tuple[str, ...] = _HEADERS
    if traits.takes_turns:
        headers = _HEADERS_OF_TURNS
        values = {name: values[name] for name in _VALUES_OF_TURNS} | {
            "has_8_bits": int(traits.dtype in EIGHT_BIT_NAMES),
            "widens_keys": int(traits.kv_dtype != traits.dtype),
            "mask": 2 if traits.is_masked else 0,
            "is_scattered": int(traits.access == "paged"),
            "is_packed": int(traits.access == "packed_pages"),
        }
    elif traits.decode_blocks:
        headers = *_HEADERS, *_HEADERS_OF_FOURS, "sixteen_products.h", "sixteen_rows.h"
        values |= {
            # Bytes of keys become fp16, as those of values do.
            "score_dtype": "FP16" if traits.kv_dtype == "int8" else of_queries.scores,
            "byte_values": traits.has_byte_values,
        }
    elif traits.row_blocks:
        headers = *_HEADERS, *_HEADERS_OF_FOURS
        values |= {"few_splits": FEW_SPLITS}
    else:
        headers = *_HEADERS, "bias_tiles.h", "block_parts.h", "streamed_rows.h", "work_list.h"
        values |= {
            "slices": traits.slices,
            "columns": traits.columns,
            "waves_without_features": waves_in_cpp(traits.arch, "forward", "none"),
            "waves_with_light_one": waves_in_cpp(traits.arch, "forward", "light one"),
            "waves_with_features": waves_in_cpp(traits.arch, "forward", "any"),
            "loads_early": early_loads_in_cpp(traits.arch),
            "chip_lds_bytes": architecture(traits.arch).lds_bytes,
            "score_dtype": of_queries.scores,
            "int8_probabilities": traits.has_int8_probabilities,
            "column_major_v": traits.has_column_major_v,
            "leaves_parts": traits.leaves_parts,
            "streams": traits.streams,
            "lists_work": traits.lists_work,
            "list_kernel": traits.list_name,
        }
    if not (traits.row_blocks or traits.takes_turns):
        headers = *headers, "token_scales.h"
        values |= {
            "token_k_descales": traits.has_token_k_descales,
            "token_v_descales": traits.has_token_v_descales,
        }
    why = traits.why_built("call")
    return device_spec(
        *(traits.name, traits.arch, traits.template, values, headers, why),
        packs_floats=_packs_floats(traits),
        streams=traits.streams,
        takes_turns=traits.takes_turns,
    )


def _product_of_values(product: Product, traits: ForwardTraits) -> Product:
    """What probabilities become: times the scales of tokens they leave the range of fp16."""
    if traits.has_byte_values:
        return "FP16"
    return "BF16" if traits.has_token_v_descales and product == "FP16" else product


def _packs_floats(traits: ForwardTraits) -> bool:
    """Whether packed float32 takes less time than instructions that overlap with matrix products.

    By the cost model it does where the products take less of the time than the rest: with features
    but a bias alone where products are deep, with heads so wide that a wave has a SIMD to itself,
    and where waves of decoding have as many rows as they can have.
    """
    has_many_rows = traits.decode_blocks == MOST_BLOCKS
    if has_many_rows or max(traits.hdim_q, traits.hdim_v) > _MOST_SHARED_HDIM:
        return True
    modifiers = traits.modifiers
    beside_bias = modifiers.asked._replace(bias=None) != AskedModifiers() or modifiers.dropout
    return architecture(traits.arch).product_depth == 16 and beside_bias
