"""The CPU family: one C++ template, compiled for exactly a call's traits.

The launcher and the kernel are one shared library here. It runs on torch's own thread pool and is
called through ctypes, so that it needs neither torch's nor Python's headers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain

from torch import Tensor

from ..arguments import Dropout, Modifiers, Tensors
from ..dropout import largest_kept
from ..jit.loader import is_built, load
from ..jit.render import render
from ..jit.shared_struct import FLOAT, INT32, INT64, Pointer, SharedStruct
from ..jit.spec import BuildSpec
from ..plan import Launch
from ..problem import Direction, Feature, GradientStrides, Problem, Sizes
from ..target import CpuIsa, CpuTarget, Target

NAME = "cpu"
SERVES = frozenset(
    {
        Feature.FP32,
        Feature.BF16,
        Feature.FP16,
        Feature.GROUP_MODE,
        Feature.PADDED_SEQUENCES,
        Feature.CAUSAL_MASK,
        Feature.WINDOW_MASK,
        Feature.TOP_LEFT_MASK,
        Feature.LSE,
        Feature.BIAS,
        Feature.BOOLEAN_BIAS,
        Feature.ALIBI,
        Feature.SOFTCAP,
        Feature.SINKS,
        Feature.SINK_TOKENS,
        Feature.DROPOUT,
        Feature.BACKWARD,
    }
)

_TEMPLATES: dict[Direction, str] = {
    "forward": "cpu/fmha_fwd.cpp.in",
    "backward": "cpu/fmha_bwd.cpp.in",
}
# What the templates include: the same for all kernels but for the first.
_TRAITS_HEADER = "cpu/traits.h.in"
_HEADERS = ("dropout.h", "elements.h", "problem.h", "schedule.h", "scores.h", "tiles.h")
# The products, as a template includes them, for instruction sets with a tile unit and for others.
_PRODUCTS: dict[tuple[Direction, bool], tuple[str, str]] = {
    ("forward", True): ("products.h", "cpu/products_tile_unit.h"),
    ("forward", False): ("products.h", "cpu/products_vectors.h"),
    ("backward", True): ("backward_products.h", "cpu/backward_products_tile_unit.h"),
    ("backward", False): ("backward_products.h", "cpu/backward_products_vectors.h"),
}
_TILE_UNITS: dict[CpuIsa, str] = {
    "amx": "cpu/tile_unit_amx.h",
    "amx_emulated": "cpu/tile_unit_emulated.h",
}
# Tile units multiply bf16 numbers. Kernels of other dtypes are compiled for what is there beside.
BESIDE_TILE_UNIT: dict[CpuIsa, CpuIsa] = {"amx": "avx512", "amx_emulated": "generic"}
_X86_AVX512 = (
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
)
_ISA_FLAGS: dict[CpuIsa, tuple[str, ...]] = {
    "amx": (*_X86_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": (*_X86_AVX512, "-mavx512bf16"),
    "avx512": _X86_AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "neon": (),
    "generic": (),
    "amx_emulated": ("-DJITFMHA_BF16_PAIRS=1",),
}
_ISA_HEADERS: dict[CpuIsa, str] = {
    "amx": "cpu/simd_avx512.h",
    "avx512_bf16": "cpu/simd_avx512.h",
    "avx512": "cpu/simd_avx512.h",
    "avx2": "cpu/simd_avx2.h",
    "neon": "cpu/simd_neon.h",
    "generic": "cpu/simd_generic.h",
    "amx_emulated": "cpu/simd_generic.h",
}
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
    "logit_softcap": FLOAT,
    "sink_size": INT64,
    "largest_kept": INT32,
    "keep_scale": FLOAT,
    "seqlen_q": INT64,
    "seqlen_k": INT64,
}
_CU_SEQLENS = dict.fromkeys(
    ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_q_padded", "cu_seqlens_k_padded"),
    Pointer("const std::int32_t"),
)
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

MODIFIERS = SharedStruct(
    "Modifiers",
    {
        "bias": Pointer("const void"),
        "bias_strides": STRIDES,
        "alibi_slopes": Pointer("const float"),
        "alibi_batch": INT64,
        "alibi_head": INT64,
        "sink": Pointer("const float"),
        "sink_head": INT64,
        "rng_state": Pointer("const std::int64_t"),
        "dbias": Pointer("float"),
        "dbias_strides": STRIDES,
    },
)


def propose(problem: Problem, target: Target) -> CpuPlan:
    """The kernel for ``problem``."""
    assert isinstance(target, CpuTarget)
    return CpuPlan(
        problem,
        target,
        CpuTraits(
            dtype=problem.dtype,
            hdim_q=problem.hdim_q,
            hdim_v=problem.hdim_v,
            masked=not problem.mask.is_none,
            mode=problem.mode,
            isa=_isa_for(problem, target.isa),
            modifiers=CpuModifiers.of(problem),
            direction=problem.direction,
        ),
    )


def _isa_for(problem: Problem, isa: CpuIsa) -> CpuIsa:
    """What the kernel is compiled for on a CPU with ``isa``."""
    return isa if problem.dtype == "bf16" else BESIDE_TILE_UNIT.get(isa, isa)


@dataclass(frozen=True)
class CpuModifiers:
    """What is compiled in beside the mask. A learned sink is not: it costs a look for each row."""

    bias: str = "none"
    alibi: bool = False
    softcap: bool = False
    sink_tokens: bool = False
    dropout: bool = False

    @classmethod
    def of(cls, problem: Problem) -> CpuModifiers:
        """What a problem asks for."""
        return cls(
            bias=problem.bias_dtype or "none",
            alibi=problem.has_alibi,
            softcap=problem.logit_softcap > 0,
            sink_tokens=problem.sink_size > 0,
            dropout=problem.dropout_p > 0,
        )

    @property
    def suffix(self) -> str:
        """The part of a kernel's name; short, as names have a limit."""
        bias = "" if self.bias == "none" else f"_bias_{self.bias}"
        named = {"alibi": "alibi", "cap": "softcap", "sinks": "sink_tokens", "drop": "dropout"}
        return bias + "".join(f"_{short}" for short, name in named.items() if getattr(self, name))

    def values(self) -> dict[str, str]:
        """Those of the template."""
        # "bool" is no name in C++.
        bias = "boolean" if self.bias == "bool" else self.bias
        return {name: str(value).lower() for name, value in vars(self).items()} | {"bias": bias}


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
    modifiers: CpuModifiers = CpuModifiers()

    @property
    def name(self) -> str:
        """The kernel's name."""
        hdims = f"{self.hdim_q}x{self.hdim_v}"
        kind = f"{self.dtype}_{hdims}_{self.mask}{self.modifiers.suffix}_{self.mode}"
        return f"cpu_{self.short_direction}_{kind}_{self.isa}"

    @property
    def short_direction(self) -> str:
        """``fwd`` or ``bwd``."""
        return {"forward": "fwd", "backward": "bwd"}[self.direction]

    @property
    def template(self) -> str:
        """The template that becomes the kernel."""
        return _TEMPLATES[self.direction]

    @property
    def mask(self) -> str:
        """The mask kind that the template knows."""
        return "window" if self.masked else "none"


@lru_cache(maxsize=256)
def launcher_spec(traits: CpuTraits) -> BuildSpec:
    """The source and the flags of the launcher for ``traits``."""
    structs = (STRIDES, FMHA_SHAPE[traits.direction], TENSORS[traits.direction], MODIFIERS)
    values = {
        "direction": traits.direction,
        "dtype": traits.dtype,
        "hdim_q": traits.hdim_q,
        "hdim_v": traits.hdim_v,
        "mask": traits.mask,
        "mode": traits.mode,
        "tile_unit": str(traits.isa in _TILE_UNITS).lower(),
        "shared_structs": "\n\n".join(x.cpp() for x in structs),
        **traits.modifiers.values(),
    }
    origin = {"origin": f"csrc_templates/{traits.template} for {traits.name}"}
    return BuildSpec(
        name=traits.name,
        sources={
            f"fmha_{traits.short_direction}.cpp": render(traits.template, origin),
            "traits.h": render(_TRAITS_HEADER, values),
            "simd.h": render(_ISA_HEADERS[traits.isa], {}),
            **_product_sources(traits),
            **{header: render(f"cpu/{header}", {}) for header in _HEADERS},
        },
        cflags=(
            "-std=c++17",
            "-O3",
            "-ffp-contract=fast",
            "-fvisibility=hidden",
            *_ISA_FLAGS[traits.isa],
        ),
        ldflags=(),
        why=(
            f"the first {traits.dtype} {_CALLS[traits.direction]} in {traits.mode} with hdim "
            f"{traits.hdim_q}x{traits.hdim_v} and mask {traits.mask}"
            f"{traits.modifiers.suffix.replace('_', ' ')}"
        ),
    )


def _product_sources(traits: CpuTraits) -> dict[str, str]:
    """Headers of the matrix products that depend on the instruction set."""
    tile_unit = _TILE_UNITS.get(traits.isa)
    header, rendered = _PRODUCTS[traits.direction, tile_unit is not None]
    sources = {header: render(rendered, {})}
    return sources if tile_unit is None else sources | {"tile_unit.h": render(tile_unit, {})}


@dataclass(frozen=True)
class CpuPlan:
    """The CPU kernel for one problem."""

    problem: Problem
    target: CpuTarget
    traits: CpuTraits
    family: str = NAME

    @property
    def kernel(self) -> str:
        """The name of the kernel and of its cache entry."""
        return self.traits.name

    @property
    def is_built(self) -> bool:
        """True when the launcher is in the cache already."""
        return is_built(launcher_spec(self.traits))

    @property
    def source(self) -> str:
        """The template."""
        return f"csrc_templates/{self.traits.template}"

    def remarks(self) -> list[str]:
        """Why the kernel is compiled for its instruction set."""
        isa, chosen = self.traits.isa, self.target.isa
        remarks = [f"{chosen} is taken because {self.target.why}."]
        if isa != chosen:
            remarks.append(f"This kernel takes {isa}: {chosen} has tiles for bf16 forward only.")
        return remarks

    def bind(self) -> CpuKernel:
        """Build and load the launcher where needed."""
        return CpuKernel(_entry(self.traits), self.problem)


class CpuKernel:
    """The loaded kernel, for calls that differ from one problem in lengths and strides only.

    A backward pass has the strides of its gradients from the problem as well.
    """

    def __init__(self, entry: Callable[..., int], problem: Problem) -> None:
        mask = problem.mask
        self._entry = entry
        self._heads_q = problem.heads_q
        self._is_group = problem.mode == "gm1"
        self._gradients = problem.gradients
        self._constants = (
            *(problem.batch, problem.heads_q, problem.heads_k),
            _OPEN_SIDE if mask.left is None else min(mask.left, _OPEN_SIDE),
            _OPEN_SIDE if mask.right is None else min(mask.right, _OPEN_SIDE),
            not mask.top_left,
            problem.softmax_scale,
            problem.logit_softcap,
            min(problem.sink_size, _OPEN_SIDE),
            *(largest_kept(problem.dropout_p), 1 / (1 - problem.dropout_p)),
        )

    def launch_for(self, sizes: Sizes) -> Launch:
        """The same kernel serves all sizes."""
        seqlen_q, seqlen_k, q, k, v, out = sizes
        if self._gradients is not None:
            strides = self._backward_strides(sizes, self._gradients)
        elif self._is_group:
            strides = (0, *q, 0, *k, 0, *v, 0, *out, 0, 1, seqlen_q, 1)
        else:
            strides = (*q, *k, *v, *out, self._heads_q * seqlen_q, 1, seqlen_q, 1)
        direction: Direction = "forward" if self._gradients is None else "backward"
        shape = FMHA_SHAPE[direction].packer.pack(*self._constants, seqlen_q, seqlen_k, *strides)
        if self._gradients is not None:
            return CpuBackwardLaunch(self._entry, shape).run
        return CpuLaunch(self._entry, shape).run

    def _backward_strides(self, sizes: Sizes, gradients: GradientStrides) -> tuple[int, ...]:
        """Of all tensors in the order of the shape; (batch, seq, head, hdim) of each."""
        dout, lse, dlse, dq, dk, dv = gradients
        rows = (sizes.q, sizes.k, sizes.v, sizes.out)
        of_lse = (lse, lse if dlse is None else dlse)
        batch = (0,) if self._is_group else ()
        lses = [(*batch, *x[:-2], x[-1], x[-2], 1) for x in of_lse]
        before, after = [(*batch, *x) for x in rows], [(*batch, *x) for x in (dq, dk, dv)]
        ordered = (*before, lses[0], (*batch, *dout), lses[1], *after)
        return tuple(chain.from_iterable(ordered))


class CpuLaunch:
    """The loaded kernel with all that it needs but the tensors' addresses."""

    __slots__ = ("_entry", "_shape")

    def __init__(self, entry: Callable[..., int], shape: bytes) -> None:
        self._entry = entry
        self._shape = shape

    def run(self, tensors: Tensors) -> None:
        """Run the kernel; returns when ``out`` and ``lse`` are written."""
        q, k, v, out, lse, cu_seqlens, _, modifiers, dropout, _ = tensors
        modifying = None
        if modifiers is not None or dropout is not None:
            modifying = _packed_modifiers(modifiers or Modifiers(), dropout)
        sums_q = sums_k = padded_q = padded_k = 0
        if cu_seqlens is not None:
            sums_q, sums_k, padded_q, padded_k = [x.data_ptr() for x in cu_seqlens[:4]]
        # Written out: with a star in the call it would take longer.
        packed = _pack_tensors(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            sums_q,
            sums_k,
            padded_q,
            padded_k,
        )
        status = self._entry(self._shape, packed, modifying)
        if status != 0:
            raise MemoryError(_NO_MEMORY)


class CpuBackwardLaunch:
    """The loaded backward kernel with all that it needs but the tensors' addresses."""

    __slots__ = ("_entry", "_shape")

    def __init__(self, entry: Callable[..., int], shape: bytes) -> None:
        self._entry = entry
        self._shape = shape

    def run(self, tensors: Tensors) -> None:
        """Run the kernel; returns when ``dq``, ``dk`` and ``dv`` are written."""
        assert tensors.gradients is not None
        dout, dlse, *written, dbias = tensors.gradients
        read = tensors.q, tensors.k, tensors.v, tensors.out, dout, tensors.lse, dlse
        sums = (None,) * 4 if tensors.cu_seqlens is None else tensors.cu_seqlens[:4]
        packed = TENSORS["backward"].packer.pack(*map(_address, (*read, *written, *sums)))
        modifying = None
        if tensors.modifiers is not None or tensors.dropout is not None:
            modifiers = tensors.modifiers or Modifiers()
            modifying = _packed_modifiers(modifiers, tensors.dropout, dbias)
        if self._entry(self._shape, packed, modifying) != 0:
            raise MemoryError(_NO_MEMORY)


_NO_MEMORY = "the CPU kernel could not allocate its scratch memory"
_pack_tensors = TENSORS["forward"].packer.pack


def _packed_modifiers(
    modifiers: Modifiers, dropout: Dropout | None, dbias: Tensor | None = None
) -> bytes:
    bias, slopes, sink = modifiers.bias, modifiers.alibi_slopes, modifiers.sink
    rng_state = None if dropout is None else dropout.rng_state
    of_bias = (0, 0, 0, 0) if bias is None else _bias_strides(bias)
    of_slopes = (0, 0) if slopes is None else (*(0,) * (2 - slopes.dim()), *slopes.stride())
    return MODIFIERS.packer.pack(
        *(_address(bias), *of_bias),
        *(_address(slopes), *of_slopes),
        *(_address(sink), 0 if sink is None else sink.stride(0)),
        _address(rng_state),
        *(_address(dbias), *((0, 0, 0, 0) if dbias is None else _bias_strides(dbias))),
    )


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _bias_strides(bias: Tensor) -> tuple[int, int, int, int]:
    """Between batches, queries, heads and keys; 0 where one serves all."""
    pairs = zip(bias.shape, bias.stride(), strict=True)
    *batch, head, query, key = [0 if size == 1 else stride for size, stride in pairs]
    return batch[0] if batch else 0, query, head, key


@cache
def _entry(traits: CpuTraits) -> Callable[..., int]:
    function: Callable[..., int] = getattr(
        load(launcher_spec(traits)), f"jitfmha_{traits.short_direction}"
    )
    function.argtypes = [ctypes.c_char_p] * 3  # type: ignore[attr-defined]
    function.restype = ctypes.c_int  # type: ignore[attr-defined]
    return function
