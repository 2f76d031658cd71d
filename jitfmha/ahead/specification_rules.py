"""What must hold of a configuration of CK's dispatcher: one table of rules with their sources.

Rules of CK's pipelines hold where a configuration names one of these. Each says what is there of it
for kernels of this package: the rule of ours that stands for it, or why it has no meaning here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

from ..amd.chips import Arch, is_arch
from ..planning.specification import Algorithm, Signature
from .ck_architectures import CkArchitecture, ck_architectures
from .combination import NAMED_FEATURES
from .specification import (
    BACKWARD_FAMILIES,
    DATA_TYPES,
    FORWARD_FAMILIES,
    WORDS,
)

OUR_PIPELINES = ("ready", "compiled", "aiter")
"""The families of kernels that run on AMD GPUs."""

Kernels = Literal["every", "ck", "ours"]
"""Whose kernels a rule is about: a configuration names a pipeline of CK's, or one of ours."""

_ASYNC = ("qr_async", "qr_async_trload", "qr_async_trload_v3")
_V3 = ("v3", "qr_async_trload_v3")
_TRLOAD_OR_V3 = ("qr_async_trload", *_V3)
_GFX9_PIPELINES = ("qr", "qr_async", "qs")
_CK_DATA_TYPES = ("fp32", "fp16", "bf16", "fp8", "bf8", "fp8fp16", "fp8bf16", "fp8fp32")
_CK_BACKWARD_TYPES = ("fp32", "fp16", "bf16")
_OF_ONE_DIMENSION = ("bwd_dot_do_o", "bwd_convert_dq")
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_LANES = 64
_KV_BUFFERS = 3  # of the asynchronous pipelines
_KEYS_OF_VALUES = 32  # of a tile of v in LDS
_MOST_LDS, _LDS = 163840, 65536
_COMBINED_COLUMNS = 32
_NUMBERS = 9  # of wave and warp
Complaints = Callable[[Signature, Algorithm, CkArchitecture], Iterator[str]]


class SpecificationRule(NamedTuple):
    """What complains about configurations that break a rule, and where the rule comes from.

    Attributes:
        of: whose kernels it is about.
        ours: of a rule of CK's, what is there of it for kernels of this package.
        is_warning: whether a configuration that breaks it is valid all the same.
    """

    complaints: Complaints
    source: str
    of: Kernels = "ck"
    ours: str = ""
    is_warning: bool = False

    @property
    def name(self) -> str:
        return self.complaints.__name__


# ---- Of every configuration ----------------------------------------------------------------------


def family_is_known(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """CK's families are what a kernel may be one of."""
    families = (*FORWARD_FAMILIES, *BACKWARD_FAMILIES)
    if sig.family not in families:
        yield f"family {sig.family!r} is none of {', '.join(families)}"


def words_are_known(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """A word that nobody knows asks for nothing."""
    for name, known in WORDS.items():
        value = getattr(sig, name)
        if value not in known:
            yield f"{name} {value!r} is none of {', '.join(known)}"
    for feature in sig.features:
        if feature not in NAMED_FEATURES:
            yield f"features has {feature!r}, which is none of {', '.join(NAMED_FEATURES)}"


def data_type_is_known(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """Names with two types are those of the inputs and of the output."""
    known = tuple(dict.fromkeys((*_CK_DATA_TYPES, *DATA_TYPES)))
    for name in ("data_type", "kv_data_type"):
        value = getattr(sig, name)
        if value not in known and (value or name == "data_type"):
            yield f"{name} {value!r} is none of {', '.join(known)}"


def pipeline_is_known(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """A pipeline is CK's, or a family of ours that runs on GPUs."""
    of_ck = dict.fromkeys(
        x for each in ck_architectures().values() for x in each.supported_pipelines
    )
    if alg.pipeline not in (*OUR_PIPELINES, *of_ck):
        known = ", ".join((*OUR_PIPELINES, *of_ck))
        yield f"pipeline {alg.pipeline!r} is none of {known}"


def workgroups_are_counted(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """A launch has workgroups, of one group of waves at least."""
    if alg.block_per_cu <= 0 and alg.block_per_cu != -1:
        yield f"block_per_cu {alg.block_per_cu} is neither positive nor -1, as many as fit"
    if alg.num_wave_groups <= 0:
        yield f"num_wave_groups {alg.num_wave_groups} is not positive"


# ---- Of ours -------------------------------------------------------------------------------------


def architecture_has_kernels(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """Kernels of ours are compiled for two architectures."""
    yield from why_nothing_runs_on(arch.name)


def why_nothing_runs_on(arch: str) -> Iterator[str]:
    """Say it of an architecture that is known to CK alone."""
    if not is_arch(arch):
        ours = " and ".join(get_args(Arch))
        yield f"nothing here runs on {arch}: calls there are refused; kernels are for {ours}"


def outputs_are_wider(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """What is written of 8-bit inputs has 16 or 32 bits."""
    if sig.data_type in _CK_DATA_TYPES and sig.data_type not in DATA_TYPES:
        yield f"data_type {sig.data_type!r} has no kernel; there are {', '.join(DATA_TYPES)}"


def scales_are_not_of_blocks(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """Nothing reads a scale for each block of rows."""
    if sig.qscale in ("blockscale", "kv_blockscale"):
        yield f"qscale {sig.qscale!r} has no kernel; scales are of a tensor, a head or a token"


def keys_are_rotated_as_they_are_appended(
    sig: Signature, alg: Algorithm, arch: CkArchitecture
) -> Iterator[str]:
    """A cache holds keys that are rotated already."""
    if sig.rope != "none" and sig.family != "fwd_appendkv":
        yield f"rope {sig.rope!r} is applied by family 'fwd_appendkv', not by {sig.family!r}"


# ---- Of CK's pipelines: architecture, data type, head dimensions ---------------------------------


def data_type_is_of_the_architecture(
    sig: Signature, alg: Algorithm, arch: CkArchitecture
) -> Iterator[str]:
    """Matrix units take some data types, and generators have some."""
    if sig.data_type not in arch.supported_dtypes:
        served = ", ".join(arch.supported_dtypes)
        yield f"data_type {sig.data_type!r} is not supported on {arch.name}, which has {served}"


def gradients_have_16_bits(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """Nothing in 8 bits has a gradient that is worth something."""
    if sig.family in BACKWARD_FAMILIES and sig.data_type not in _CK_BACKWARD_TYPES:
        served = ", ".join(_CK_BACKWARD_TYPES)
        yield f"family {sig.family!r} serves {served}; data_type is {sig.data_type!r}"


def pipeline_is_of_the_architecture(
    sig: Signature, alg: Algorithm, arch: CkArchitecture
) -> Iterator[str]:
    """A pipeline takes instructions that not every architecture has."""
    if sig.family != "fwd_splitkv_combine" and alg.pipeline not in arch.supported_pipelines:
        served = ", ".join(arch.supported_pipelines)
        yield f"pipeline {alg.pipeline!r} is not supported on {arch.name}, which has {served}"


def v3_is_supported(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """It interleaves two groups of waves, for which few architectures have room."""
    if alg.pipeline in _V3 and not arch.supports_v3:
        yield f"pipeline {alg.pipeline!r} needs an architecture with v3, which {arch.name} is not"


def loads_can_transpose(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """They turn a tile of v on its way from LDS to registers."""
    if alg.pipeline == "qr_async_trload" and not arch.supports_trload:
        yield f"pipeline {alg.pipeline!r} needs loads that transpose, which {arch.name} lacks"


def hdims_are_whole_vectors(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """A lane loads eight numbers of 16 bits at once."""
    for name in ("hdim_q", "hdim_v"):
        if getattr(sig, name) % 8:
            yield f"{name} {getattr(sig, name)} is no multiple of 8"


def hdims_of_trload_and_v3(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """Only these have tiles there."""
    if alg.pipeline in _TRLOAD_OR_V3 and _hdims(sig) not in ((64, 64), (128, 128)):
        yield f"pipeline {alg.pipeline!r} has hdim 64x64 and 128x128; here is {_in_words(sig)}"


def few_tiles_of_192_with_128(
    sig: Signature, alg: Algorithm, arch: CkArchitecture
) -> Iterator[str]:
    """Rows of different widths leave registers for little else."""
    if _hdims(sig) == (192, 128) and (sig.bias != "no" or sig.dropout):
        what = f"bias {sig.bias!r}" if sig.bias != "no" else "dropout"
        yield f"hdim 192x128 with {what} has few tiles"


# ---- Of CK's pipelines: features -----------------------------------------------------------------


def soft_cap_excludes_bias(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """Both change scores at the same place of CK's pipelines."""
    if sig.logits and sig.bias != "no":
        yield f"logits (a soft cap) cannot be combined with bias {sig.bias!r}"


def groups_are_padded(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """Sequences of a group have any length."""
    if sig.mode == "group" and not all(alg.padding[:2]):
        yield f"mode 'group' needs padding of queries and keys; padding is {list(alg.padding)}"


def v_is_row_major(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """These families read rows of v."""
    families = ("batch_prefill", "fwd_appendkv", "fwd_pagedkv", "fwd_splitkv")
    if sig.family in families and sig.vlayout != "r":
        yield f"family {sig.family!r} serves vlayout 'r'; here is {sig.vlayout!r}"


def examples_have_row_major_v(
    sig: Signature, alg: Algorithm, arch: CkArchitecture
) -> Iterator[str]:
    """What nobody runs may not run."""
    if sig.family == "fwd" and sig.vlayout != "r":
        yield f"forward examples take vlayout 'r'; here is {sig.vlayout!r}"


def pages_are_pages(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """These families look keys up by page."""
    if sig.family in ("batch_prefill", "fwd_pagedkv") and not sig.paged_kv:
        yield f"family {sig.family!r} needs paged_kv, which is {sig.paged_kv}"


def pages_are_powers_of_two(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """A shift finds the page of a key."""
    size = sig.page_size
    if sig.family == "batch_prefill" and (size <= 0 or size & (size - 1)):
        yield f"family 'batch_prefill' needs a page_size that is a power of two, not {size}"


def mode_is_of_the_family(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """What is prefilled is packed, and caches that grow are a batch."""
    needed = {"batch_prefill": "group", "fwd_appendkv": "batch"}.get(sig.family, sig.mode)
    if sig.mode != needed:
        yield f"family {sig.family!r} needs mode {needed!r}; here is {sig.mode!r}"


def pipeline_is_of_the_family(
    sig: Signature, alg: Algorithm, arch: CkArchitecture
) -> Iterator[str]:
    """A family is made of these pipelines."""
    pipelines = {
        "batch_prefill": ("qr_async",),
        "fwd_appendkv": ("appendkv",),
        "fwd_pagedkv": ("qr_pagedkv",),
        "fwd_splitkv": ("qr", "qr_nwarp_sshuffle"),
    }.get(sig.family, (alg.pipeline,))
    if alg.pipeline not in pipelines:
        served = " or ".join(map(repr, pipelines))
        yield f"family {sig.family!r} needs pipeline {served}; here is {alg.pipeline!r}"


# ---- Of CK's tiles -------------------------------------------------------------------------------


def tiles_have_all_numbers(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """A tile has the sides of its products: two in forward, and in backward five."""
    sides = 9 if sig.family == "bwd_dq_dk_dv" else 6
    for name, expected in (("tile", sides), ("wave", _NUMBERS), ("warp", _NUMBERS)):
        numbers = getattr(alg, name)
        if len(numbers) != expected:
            yield f"{name} {list(numbers)} has {len(numbers)} numbers, and needs {expected}"
        elif min(numbers) <= 0:
            yield f"{name} {list(numbers)} has numbers that are not positive"


def products_come_in_eights(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """The schedule of the pipeline counts the products of a wave by eights."""
    is_meant = alg.pipeline == "qr" and sig.hdim_q == 256 and arch.family.startswith("cdna")
    if is_meant and sig.family not in _OF_ONE_DIMENSION and _has_numbers(alg):
        products = 1
        for side, of_product in zip(alg.tile[:3], alg.warp[:3], strict=True):
            products *= side // of_product
        products //= alg.wave[0] * alg.wave[1]
        if products % 8:
            yield f"a wave makes {products} products of tile {list(alg.tile)}; 8 divides them not"


def results_are_combined_in_slices(
    sig: Signature, alg: Algorithm, arch: CkArchitecture
) -> Iterator[str]:
    """A workgroup combines 32 columns of splits."""
    if sig.family != "fwd_splitkv_combine" or len(alg.tile) <= 3:
        return
    columns = alg.tile[3]
    if columns != _COMBINED_COLUMNS:
        yield f"fwd_splitkv_combine makes {_COMBINED_COLUMNS} columns at a time; tile has {columns}"
    elif sig.hdim_v % columns or sig.hdim_v < columns:
        yield f"hdim_v {sig.hdim_v} is no multiple of the {columns} columns of tile"


def lds_has_room(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """Tiles of q and k are in LDS together; asynchronous ones have three buffers."""
    if not _is_forward_tile(sig, alg):
        return
    rows, keys, columns = alg.tile[:3]
    size, most = _element_bytes(sig), _LDS
    taken = (rows + keys) * columns * size
    if alg.pipeline in _ASYNC:
        taken, most = _bytes_of_async_buffers(sig, alg, arch), _MOST_LDS
    if taken > most:
        yield f"tile {list(alg.tile)} of {alg.pipeline} takes {taken} bytes of LDS, over {most}"


def hdim_q_is_whole_columns(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """A product goes through a row of q in equal steps."""
    if _is_forward_tile(sig, alg) and sig.hdim_q % alg.tile[2]:
        yield f"hdim_q {sig.hdim_q} is no multiple of the {alg.tile[2]} columns of tile"


def tiles_are_whole_products(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """A tile's sides are multiples of what a wave makes at a time."""
    if not _is_forward_tile(sig, alg):
        return
    sides = zip(alg.tile[:3], alg.warp[:3], strict=True)
    if any(side % of_product for side, of_product in sides):
        yield f"tile {list(alg.tile[:3])} has sides that are no multiples of warp's {alg.warp[:3]}"


def keys_are_copied_evenly(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """All lanes of a workgroup copy equal parts of a tile of keys into LDS."""
    is_meant = alg.pipeline == "qr_async" and arch.name.startswith("gfx9")
    if not (is_meant and _is_forward_tile(sig, alg)):
        return
    copied = _waves(alg) * _LANES * arch.key_vector_bytes // _element_bytes(sig)
    if alg.tile[1] * alg.tile[2] % copied:
        yield f"tile {list(alg.tile)}: {alg.tile[1]}x{alg.tile[2]} keys are no multiple of {copied}"


def tiles_are_those_of_gfx9(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> Iterator[str]:
    """Other tiles of these pipelines are not compiled."""
    is_meant = arch.name.startswith("gfx9") and alg.pipeline in _GFX9_PIPELINES
    if not (is_meant and _is_forward_tile(sig, alg)) or sig.data_type == "fp32":
        return
    rows, keys, columns = alg.tile[:3]
    is_async = alg.pipeline == "qr_async"
    if _hdims(sig) != (128, 128):
        if rows not in (64, 128, 192, 256):
            yield f"tile has {rows} queries; hdim {_in_words(sig)} has 64, 128, 192 or 256"
        return
    if keys != 128:
        yield f"tile has {keys} keys; hdim 128x128 has 128"
    if is_async and rows != 128:
        yield f"tile has {rows} queries; hdim 128x128 of qr_async has 128"
    if not is_async and columns == 64:
        yield f"tile has 64 columns, which hdim 128x128 of {alg.pipeline} has not"


def tiles_are_those_of_gfx950(
    sig: Signature, alg: Algorithm, arch: CkArchitecture
) -> Iterator[str]:
    """Tiles of its own pipelines that are not compiled."""
    if not arch.supports_trload or not _is_forward_tile(sig, alg):
        return
    rows, keys = alg.tile[:2]
    if alg.pipeline == "qr_async_trload" and _hdims(sig) == (128, 128) and keys == 128:
        yield "tile has 128 keys, which hdim 128x128 of qr_async_trload has not"
    if alg.pipeline == "qr_async_trload_v3" and rows != 256:
        yield f"tile has {rows} queries; qr_async_trload_v3 has 256"


def _hdims(sig: Signature) -> tuple[int, int]:
    return sig.hdim_q, sig.hdim_v


def _in_words(sig: Signature) -> str:
    return f"{sig.hdim_q}x{sig.hdim_v}"


def _element_bytes(sig: Signature) -> int:
    return _BYTES.get(sig.data_type, 1)


def _has_numbers(alg: Algorithm) -> bool:
    """Whether tile, wave and warp have the numbers that other rules look at."""
    return (
        len(alg.tile) >= 6
        and len(alg.wave) == len(alg.warp) == _NUMBERS
        and min(*alg.tile, *alg.wave, *alg.warp) > 0
    )


def _is_forward_tile(sig: Signature, alg: Algorithm) -> bool:
    return sig.family == "fwd" and _has_numbers(alg)


def _waves(alg: Algorithm) -> int:
    """Of a workgroup: each has the rows of a product."""
    return max(alg.tile[0] // alg.warp[0], 1)


def _bytes_of_async_buffers(sig: Signature, alg: Algorithm, arch: CkArchitecture) -> int:
    """What three buffers take, each with room for a tile of keys or one of values.

    Rows of values are padded by one read, and so is what the waves copy of keys at a time.
    """
    _, keys, columns = alg.tile[:3]
    size = _element_bytes(sig)
    read = 16 // size
    of_banks = arch.lds_banks * 4 // size
    values = _KEYS_OF_VALUES // read * (sig.hdim_v * read // of_banks) * (of_banks + read)
    vector = max(arch.key_vector_bytes // size, 1)
    rows_of_wave = _LANES // max(columns // vector, 1)
    copies = keys // (rows_of_wave * _waves(alg)) if rows_of_wave else 0
    of_keys = copies * _waves(alg) * (_LANES * vector + read)
    return max(of_keys, values) * size * _KV_BUFFERS


# ---- The table -----------------------------------------------------------------------------------

_SPECS = "CK's dispatcher, dispatcher/codegen/fmha/validation.py"
_DATA = "CK's dispatcher, fmha_arch_specs.json"
_FWD = "CK's example/ck_tile/01_fmha/codegen/ops/fmha_fwd.py"
_POLICY = "CK's block_fmha_pipeline_qx_ks_vs_custom_policy.hpp"
_ANY_TILE = (
    "no meaning: tiles are those of jitfmha/kernels/compiled/gfx*.csv, checked by TILE_RULES"
)
_OWN_TABLES = "no meaning: an architecture's tables say which kernels it has"
SPECIFICATION_RULES = (
    SpecificationRule(family_is_known, _SPECS, "every"),
    SpecificationRule(words_are_known, "CK's dispatcher, symbol_map.py", "every"),
    SpecificationRule(data_type_is_known, "CK's dispatcher, symbol_map.py", "every"),
    SpecificationRule(pipeline_is_known, _DATA, "every"),
    SpecificationRule(workgroups_are_counted, _SPECS, "every"),
    SpecificationRule(architecture_has_kernels, "jitfmha/amd/chips.json", "ours"),
    SpecificationRule(outputs_are_wider, "the arguments of jitfmha.fmha_fwd", "ours"),
    SpecificationRule(scales_are_not_of_blocks, "the arguments of jitfmha.fmha_fwd", "ours"),
    SpecificationRule(
        keys_are_rotated_as_they_are_appended,
        "jitfmha/layers/kv_cache.py, as flash_attn_with_kvcache",
        "ours",
    ),
    SpecificationRule(
        data_type_is_of_the_architecture, _DATA, ours="dtype_is_one_of_the_matrix_units"
    ),
    SpecificationRule(
        gradients_have_16_bits, f"{_SPECS}: BWD_DTYPE_MAP", ours="gradients_have_tiles_of_the_dtype"
    ),
    SpecificationRule(pipeline_is_of_the_architecture, _DATA, ours="architecture_has_kernels"),
    SpecificationRule(
        v3_is_supported,
        _SPECS,
        ours=_OWN_TABLES,
        is_warning=True,
    ),
    SpecificationRule(
        loads_can_transpose,
        _SPECS,
        ours=_OWN_TABLES,
    ),
    SpecificationRule(
        hdims_are_whole_vectors,
        f"{_DATA}: global_rules",
        ours="hdims_are_in_range: any from 1 to 576; rows that are no whole vectors are masked",
    ),
    SpecificationRule(
        hdims_of_trload_and_v3, f"{_SPECS}; {_FWD}", ours="hdims_are_in_range, for both directions"
    ),
    SpecificationRule(
        few_tiles_of_192_with_128,
        f"{_DATA}: global_rules",
        ours="no meaning: a kernel is compiled for any features of any head dimensions",
        is_warning=True,
    ),
    SpecificationRule(
        soft_cap_excludes_bias,
        f"{_FWD}: CompatibilityRuleFactory.check_feature",
        ours="no meaning: the soft cap is applied to products, and the bias is added behind it",
    ),
    SpecificationRule(
        groups_are_padded,
        f"{_FWD}: CompatibilityRuleFactory.check_feature",
        ours="no meaning: all kernels take any number of rows and columns, in both modes",
    ),
    SpecificationRule(
        v_is_row_major, _SPECS, ours="no meaning: compiled kernels take v of both layouts"
    ),
    SpecificationRule(
        examples_have_row_major_v,
        _SPECS,
        ours="no meaning: compiled kernels take v of both layouts",
        is_warning=True,
    ),
    SpecificationRule(
        pages_are_pages, _SPECS, ours="no meaning: block_table says that keys are in pages"
    ),
    SpecificationRule(
        pages_are_powers_of_two, _SPECS, ours="no meaning: a page has any number of keys"
    ),
    SpecificationRule(
        mode_is_of_the_family,
        _SPECS,
        ours="pages_have_lengths, padding_is_between_packed_sequences",
    ),
    SpecificationRule(
        pipeline_is_of_the_family,
        _SPECS,
        ours="no meaning: what is paged, split or appended follows from the call",
    ),
    SpecificationRule(
        tiles_have_all_numbers,
        f"{_SPECS}; {_DATA}: defaults",
        ours="no meaning: a tile table has columns, and a row without one is an error",
    ),
    SpecificationRule(
        products_come_in_eights,
        "CK's block_fmha_pipeline_qr_ks_vs.hpp: static_assert on NumMfmaInsts",
        ours="no meaning: no schedule of ours counts products in groups of eight",
    ),
    SpecificationRule(
        results_are_combined_in_slices,
        f"{_DATA}: splitkv_combine",
        ours="no meaning: a combining kernel makes all columns, however many",
    ),
    SpecificationRule(
        lds_has_room,
        f"{_POLICY}: GetSmemSizeKV; {_DATA}: lds_limits",
        ours="lds_fits, lds_holds_chunks",
    ),
    SpecificationRule(
        hdim_q_is_whole_columns, "CK's tile_fmha_shape.hpp", ours="hdims_are_whole_products"
    ),
    SpecificationRule(
        tiles_are_whole_products,
        f"{_SPECS}: tile_passes_all_constraints",
        ours="waves_own_whole_products, others_are_one_product",
    ),
    SpecificationRule(
        keys_are_copied_evenly,
        f"{_POLICY}: MakeKLdsStoreBlockDescriptor",
        ours="threads_load_whole_rows",
    ),
    SpecificationRule(
        tiles_are_those_of_gfx9, f"{_FWD}: CompatibilityRuleFactoryGfx9", ours=_ANY_TILE
    ),
    SpecificationRule(
        tiles_are_those_of_gfx950, f"{_FWD}: CompatibilityRuleFactoryGfx950", ours=_ANY_TILE
    ),
)
