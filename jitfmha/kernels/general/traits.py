"""What a general kernel is compiled for, and the build that makes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from ... import jit
from ...amd.code_object import kernel_descriptors
from ...amd.elf import Elf
from ...amd.kernel_arguments import general_structs
from ...amd.manifest import KernelRow
from ...arguments import Bf16Cvt
from ...chips import Arch, architecture
from ...problem import (
    BF16_CVTS,
    DTYPE_NAMES,
    EIGHT_BIT_NAMES,
    FP8_NAMES,
    Feature,
    Mode,
    Problem,
    element_bytes,
)
from .device_spec import device_spec

Access = Literal["near", "far", "paged", "wide_pages"]

_TEMPLATE = "general_fwd.hip"
_HEADERS = ("dropout.h", "elements.h", "half_waves.h", "row_tiles.h", "scores.h")
_ROUNDINGS: dict[Bf16Cvt, str] = {
    "rtne": "nearest_even",
    "rtna": "nearest_away",
    "rtz": "towards_zero",
}
# Of a workgroup's output: registers and LDS have no room for more.
_MOST_COLUMNS = 256
TILE_ROWS, TILE_KEYS, THREADS = 128, 32, 256
_REGISTERS = 512  # vector registers that the waves of a SIMD share
# The loads of a tile of keys reach less than 2 GiB; beyond that each row has an address of its own.
FAR_STRIDE_BYTES = (1 << 31) // TILE_KEYS
_WIDE_PAGE_ROWS = 16  # of which wide pages have a multiple; the threads of a wave have one
_LSE_BYTES = 4
_WORD_END = 1 << 32  # a kernel's strides have 32 bits
# What an element is in memory, and what products take in place of it. That of probabilities and
# values takes 8 bits as those 16 that probabilities lose the least to.
_ELEMENTS = {name: name.upper() for name in DTYPE_NAMES.values()} | dict.fromkeys(
    FP8_NAMES.values(), "FP8"
)
_PRODUCT_DTYPES = {name: "fp16" if name in EIGHT_BIT_NAMES else name for name in _ELEMENTS}
_SCORE_DTYPES = _PRODUCT_DTYPES | {name: name for name in FP8_NAMES.values()}
_SHORT_DTYPES = dict.fromkeys(FP8_NAMES.values(), "fp8")


@dataclass(frozen=True)
class GeneralModifiers:
    """What happens to scores and probabilities beside the mask."""

    bias: str = "none"
    alibi: bool = False
    softcap: bool = False
    sink: bool = False
    sink_tokens: bool = False
    dropout: bool = False

    @classmethod
    def of(cls, problem: Problem) -> GeneralModifiers:
        """What a problem asks for."""
        return cls(
            bias=problem.bias_dtype or "none",
            alibi=problem.has_alibi,
            softcap=problem.logit_softcap > 0,
            sink=problem.has_sink,
            sink_tokens=problem.sink_size > 0,
            dropout=problem.dropout_p > 0,
        )

    def words(self) -> tuple[str, ...]:
        """Those of a kernel's name."""
        bias = () if self.bias == "none" else (f"bias_{self.bias}",)
        named = ("alibi", "softcap", "sink", "sink_tokens", "dropout")
        return (*bias, *(name for name in named if getattr(self, name)))

    def values(self) -> dict[str, str]:
        """Those of the template."""
        # "bool" is no name in C++.
        bias = "boolean" if self.bias == "bool" else self.bias
        return {name: str(value).lower() for name, value in vars(self).items()} | {"bias": bias}


@dataclass(frozen=True)
class SharedTraits:
    """What general kernels of both directions are specialised on.

    Attributes:
        bf16_cvt: how float32 becomes bf16; "rtne" where there is no choice.
        is_masked: whether there are keys that some queries do not see.
        access: how rows are reached, as in the templates.
        modifiers: what is compiled in beside the mask.
    """

    arch: Arch
    dtype: str
    hdim_q: int
    hdim_v: int
    mode: Mode
    bf16_cvt: Bf16Cvt
    is_masked: bool
    access: Access
    modifiers: GeneralModifiers

    def row_of(self, symbol: str, file: str) -> KernelRow:
        """A kernel as a row of a manifest, as the launcher knows kernels."""
        is_group = self.mode == "gm1"
        return KernelRow(
            dtype="bf16" if self.dtype == "bf16" else "fp16",
            hdim_q=self.hdim_q,
            hdim_v=self.hdim_v,
            mask=2 if self.is_masked else 0,
            mode=int(is_group),
            bf16_cvt=BF16_CVTS.index(self.bf16_cvt),
            ts_qo=TILE_ROWS,
            ts_kv=TILE_KEYS,
            symbol=symbol,
            file=file,
            abi="jitfmha",
            threads=THREADS,
            grid="heads_batches_tiles_splits" if is_group else "xcd_heads_tiles_splits",
        )

    def template_values(self) -> dict[str, object]:
        """Those that both templates have."""
        return {
            "hdim_q": self.hdim_q,
            "hdim_v": self.hdim_v,
            "is_group": cpp_bool(self.mode == "gm1"),
            "is_masked": cpp_bool(self.is_masked),
            "access": self.access,
            "rounding": _ROUNDINGS[self.bf16_cvt],
        }

    def why_built(self, what: str) -> str:
        """For whom: the first ``what`` of its kind."""
        return (
            f"the first {self.dtype} {what} in {self.mode} with hdim "
            f"{self.hdim_q}x{self.hdim_v}{' and a mask' if self.is_masked else ''}"
            f"{''.join(f', {word}' for word in self.modifiers.words())} on {self.arch}"
        )


@dataclass(frozen=True)
class GeneralTraits(SharedTraits):
    """Everything that a general kernel is specialised on.

    Attributes:
        kv_dtype: that of keys and values.
        has_descales: whether there are scales of 8-bit inputs.
        has_int8_probabilities: whether probabilities become int8 before they meet values.
        has_column_major_v: whether keys lie side by side in v.
        stacks_heads: whether the query heads that share a key head are rows of the same tiles.
    """

    kv_dtype: str
    has_descales: bool = False
    has_int8_probabilities: bool = False
    has_column_major_v: bool = False
    stacks_heads: bool = False

    @classmethod
    def of(cls, problem: Problem, arch: Arch) -> GeneralTraits:
        """What a problem asks for."""
        return cls(
            arch=arch,
            dtype=problem.dtype,
            hdim_q=problem.hdim_q,
            hdim_v=problem.hdim_v,
            mode=problem.mode,
            bf16_cvt=problem.bf16_cvt if has_roundings(arch, problem.dtype) else "rtne",
            is_masked=not problem.mask.is_none,
            access=access_of(problem),
            modifiers=GeneralModifiers.of(problem),
            kv_dtype=problem.kv_dtype,
            has_descales=not problem.features.isdisjoint(
                (Feature.DESCALES, Feature.INT8_PROBABILITIES)
            ),
            has_int8_probabilities=problem.has_p_descale,
            has_column_major_v=problem.has_column_major_v,
            stacks_heads=stacks_heads(problem),
        )

    @property
    def slices(self) -> int:
        """Into how many slices the columns of the output are divided."""
        return -(-self.hdim_v // _MOST_COLUMNS)

    @property
    def columns(self) -> int:
        """Of a slice."""
        if self.slices == 1:
            return self.hdim_v
        return -(-self.hdim_v // (8 * self.slices)) * 8

    @property
    def out_dtype(self) -> str:
        """Of the output."""
        return "bf16" if self.dtype in EIGHT_BIT_NAMES else self.dtype

    @property
    def name(self) -> str:
        """The kernel's name, which is also its symbol."""
        words = (
            f"fmha_fwd_general_hd{self.hdim_q}x{self.hdim_v}",
            _SHORT_DTYPES.get(self.dtype, self.dtype),
            self.bf16_cvt if has_roundings(self.arch, self.dtype) else "",
            "int8kv" if self.kv_dtype != self.dtype else "",
            "descales" if self.has_descales else "",
            "int8p" if self.has_int8_probabilities else "",
            "column_major_v" if self.has_column_major_v else "",
            "window" if self.is_masked else "",
            *self.modifiers.words(),
            "" if self.access == "near" else self.access,
            "stacked" if self.stacks_heads else "",
            self.mode,
            self.arch,
        )
        return "_".join(word for word in words if word)

    @property
    def combine_name(self) -> str:
        """The name of the kernel that makes the output where keys are split."""
        return f"{self.name}_combine"

    def row(self) -> KernelRow:
        """The kernel as a row of a manifest, as the launcher knows kernels."""
        return replace(
            self.row_of(self.name, f"{self.name}.co"),
            combine_symbol=self.combine_name,
            stacks_heads=self.stacks_heads,
        )


def has_roundings(arch: Arch, dtype: str) -> bool:
    """Whether there are several ways to the output's dtype: gfx950 rounds in hardware."""
    return arch == "gfx942" and dtype == "bf16"


def access_of(problem: Problem) -> Access:
    """How keys and values are reached; far ones are more than a buffer's offsets apart."""
    is_far = max(problem.k.seq, problem.v.seq) * element_bytes(problem).kv >= FAR_STRIDE_BYTES
    if problem.is_paged:
        # Biases and dropout need the scalar registers that a wave's page would take.
        is_wide = not (is_far or problem.bias_dtype or problem.dropout_p)
        return "wide_pages" if is_wide and problem.seqlen_k % _WIDE_PAGE_ROWS == 0 else "paged"
    return "far" if is_far else "near"


def stacks_heads(problem: Problem) -> bool:
    """Whether the query heads that share a key head are rows of the same tiles.

    That reads keys and values once for all of them, and pays where a tile of one head's queries
    would be half empty. The lengths of gm1's sequences are on the GPU: they count as equally long.
    """
    if problem.is_empty or problem.gqa == 1:
        return False
    # Stacked heads have one scale.
    if problem.has_query_head_descale or problem.has_p_descale:
        return False
    sequences = problem.batch if problem.mode == "gm1" else 1
    if problem.seqlen_q > TILE_ROWS // 2 * sequences:
        return False
    bytes_of = element_bytes(problem)
    stride = max(problem.q.head * bytes_of.q, problem.out.head * bytes_of.out)
    return problem.gqa * max(stride, problem.seqlen_q * _LSE_BYTES) < _WORD_END


def row_of_built(traits: GeneralTraits, image: bytes) -> KernelRow:
    """The row of a kernel whose code object says how many of its waves share a SIMD."""
    descriptor = kernel_descriptors(Elf(image))[traits.name]
    by_registers = _REGISTERS // descriptor.vgprs
    by_lds = architecture(traits.arch).lds_bytes // descriptor.lds_bytes
    return replace(traits.row(), waves_of_simd=min(by_registers, by_lds))


@cache
def kernel_spec(traits: GeneralTraits) -> jit.BuildSpec:
    """The sources and the flags of a kernel."""
    values = {
        "shared_structs": general_structs(),
        "kernel": traits.name,
        "combine_kernel": traits.combine_name,
        "slices": traits.slices,
        "columns": traits.columns,
        "stacks_heads": cpp_bool(traits.stacks_heads),
        "query_element": _ELEMENTS[traits.dtype],
        "key_element": _ELEMENTS[traits.kv_dtype],
        "out_element": _ELEMENTS[traits.out_dtype],
        "score_dtype": _ELEMENTS[_SCORE_DTYPES[traits.dtype]],
        "dtype": _ELEMENTS[_PRODUCT_DTYPES[traits.dtype]],
        "descales": cpp_bool(traits.has_descales),
        "int8_probabilities": cpp_bool(traits.has_int8_probabilities),
        "column_major_v": cpp_bool(traits.has_column_major_v),
        **traits.template_values(),
        **traits.modifiers.values(),
    }
    why = traits.why_built("call")
    return device_spec(traits.name, traits.arch, _TEMPLATE, values, _HEADERS, why)


def cpp_bool(value: bool) -> str:
    """As C++ writes it."""
    return str(value).lower()
