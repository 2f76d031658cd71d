"""The kernel of heads for AMD GPUs: how many threads have a head, and how it is launched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import gcd
from typing import NamedTuple

from ... import jit
from ...amd.chips import Arch
from ...amd.kernel_arguments import DEVICE
from ...jit.shared_struct import cpp_of
from ...kernels.compiled.device_spec import device_spec
from ...kernels.struct_launcher import StructLauncher
from ...planning.target import AmdTarget
from ...problem.dtypes import DTYPE_BYTES
from ..amd import ELEMENTS, LARGEST, LOAD_BYTES, refuse_form_of_fp8
from .problem import MOST_NUMBER, N_TENSORS, STRUCTS, HeadArguments, HeadTraits

THREADS, _WAVE = 256, 64
# What is loaded and stored in chunks of several numbers.
_PAGES = "k_cache", "v_cache"
_IN_CHUNKS = (
    *("q", "k", "v", "q_out", "k_out", "q_weight", "k_weight", "cos", "sin"),
    *_PAGES,
)

# Queries, keys and values, of each of which a last workgroup may have fewer turns.
_PARTS = 3
# Workgroups of a unit that have one turn, and how many would compute for as long as one waits.
_MOST_OF_UNIT, _LATENCY = 8, 5
_CONSTANTS = "width", "lanes", "units", "of_unit", "has_one_token", "has_turns"


class HeadKernel(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        hdims: of q and k, and of v.
        half: of what is rotated of a head; 0: nothing is; None: as each call says.
        has_norm: whether q is normalised, and whether k is.
        width: numbers that a thread loads at once.
        heads: that all counts of heads are multiples of.
        has_turns: whether a workgroup has several blocks of heads.
    """

    traits: HeadTraits
    arch: Arch
    hdims: tuple[int, int]
    half: int | None
    has_norm: tuple[bool, bool]
    width: int
    heads: int = 1
    has_turns: bool = False

    @property
    def has_one_token(self) -> bool:
        """Whether all heads of a wave are of one."""
        return self.heads * self.lanes % _WAVE == 0

    @property
    def name(self) -> str:
        norms = "".join(word for word, has in zip("qk", self.has_norm, strict=True) if has)
        half = "any" if self.half is None else self.half
        sizes = "x".join(map(str, (*self.hdims, half, self.width)))
        sizes += "_one" * self.has_one_token + "_turns" * self.has_turns
        return f"heads_{self.traits.name}_{norms}{sizes}_{self.arch}"

    @property
    def lanes(self) -> int:
        """Threads of a head."""
        lanes = 1
        while lanes < min(self._all_units, _WAVE):
            lanes *= 2
        return lanes

    @property
    def units(self) -> int:
        """Pairs of loads that each of them has."""
        return -(-self._all_units // self.lanes)

    @property
    def heads_of_wave(self) -> int:
        return _WAVE // self.lanes

    @property
    def tokens_of_wave(self) -> tuple[int, ...]:
        """Of which it has one head: those of keys and values that lie side by side in packed pages.

        0 of queries, and without such pages: all heads of a token come before the next one.
        """
        return (0, self.heads_of_wave, self.width) if self.traits.is_packed else (0, 0, 0)

    def blocks(self, tokens: int, heads: Sequence[int]) -> list[int]:
        """How many workgroups queries, keys and values have, of one turn each."""
        counts = zip(heads, self.tokens_of_wave, strict=True)
        waves = [
            n * -(-tokens // of) if of else -(-n * tokens // self.heads_of_wave) for n, of in counts
        ]
        return [-(-each * _WAVE // THREADS) for each in waves]

    @property
    def of_unit(self) -> int:
        """Workgroups of a compute unit, for which registers have room, of several turns, too."""
        others = self.traits.weight_dtype, self.traits.table_dtype
        is_small = sum(map(DTYPE_BYTES.__getitem__, others)) <= 2 * DTYPE_BYTES[self.traits.dtype]
        return 7 if is_small and self.units == 1 else 6

    @property
    def _all_units(self) -> int:
        return -(-max(self.hdims) // (2 * self.width))


@cache
def kernel_spec(kernel: HeadKernel) -> jit.BuildSpec:
    """The sources and the flags of a kernel."""
    traits = kernel.traits
    values = {
        "kernel": kernel.name,
        "shared_structs": cpp_of(STRUCTS, DEVICE),
        "element": ELEMENTS[traits.dtype],
        "weight_element": ELEMENTS[traits.weight_dtype],
        "table_element": ELEMENTS[traits.table_dtype],
        "cache_element": ELEMENTS[traits.cache_dtype],
        "largest": f"{LARGEST.get(traits.cache_dtype, 0)}.0f",
        "is_interleaved": traits.is_interleaved,
        "is_packed": traits.is_packed,
        **dict(zip(("has_q_norm", "has_k_norm"), kernel.has_norm, strict=True)),
        **dict(zip(("hdim", "hdim_v"), kernel.hdims, strict=True)),
        "half": -1 if kernel.half is None else kernel.half,
        **{name: getattr(kernel, name) for name in _CONSTANTS},
        "tokens_of_wave": ", ".join(map(str, kernel.tokens_of_wave)),
        "threads": THREADS,
    }
    why = f"the first call over heads of {traits.dtype} on {kernel.arch}"
    headers = "elements.h", "row_chunks.h"
    return device_spec(kernel.name, kernel.arch, "heads.hip", values, headers, why)


def widest_load(dtype: str, numbers: Sequence[int]) -> int:
    """How many numbers a thread loads at once, where these are multiples of it."""
    width = LOAD_BYTES // DTYPE_BYTES[dtype]
    while any(n % width for n in numbers):
        width //= 2
    return width


def _turns(blocks: int, kernel: HeadKernel, compute_units: int) -> int:
    """Of a workgroup, so that all of them begin at once where a last round had little to do."""
    turns = -(-blocks // max(kernel.of_unit * compute_units - _PARTS, 1))
    # Values in packed pages take so long that workgroups which others follow are quicker, and of
    # neighbours of many tokens registers have no room for it.
    has_room = kernel.has_one_token or not kernel.traits.is_interleaved
    if kernel.traits.is_packed or turns == 1 or not has_room:
        return 1
    at_once = -(-blocks // (turns * compute_units))
    rounds = -(-blocks // (_MOST_OF_UNIT * compute_units))
    is_quicker = turns * (_LATENCY + at_once) < rounds * (_LATENCY + _MOST_OF_UNIT)
    return turns if is_quicker else 1


class Loaded(NamedTuple):
    """A kernel's address, its workgroups for queries, keys and values, and their turns."""

    address: int
    workgroups: tuple[int, ...]
    turns: int


class AmdHeads(StructLauncher):
    """The kernels of calls that differ in the addresses of their tensors alone."""

    def __init__(self, traits: HeadTraits, target: AmdTarget, arguments: HeadArguments) -> None:
        """Raises ``NotImplementedError`` where the chip has no such form of fp8."""
        refuse_form_of_fp8("k_cache", traits.cache_dtype, target)
        super().__init__(target)
        parts = arguments.q, arguments.k, arguments.v
        self._sizes = (
            arguments.first.shape[:-2].numel(),
            [0 if x is None else x.shape[-2] for x in parts],
        )
        self._bytes = [1 if x is None else x.element_size() for x in arguments.tensors]
        self._is_in_chunks = [name in _IN_CHUNKS for name in arguments._fields[:N_TENSORS]]
        hdims = [x.shape[-1] for x in parts if x is not None]
        half = 0 if arguments.cos is None else arguments.cos.shape[-1]
        strides: list[int] = []
        for name in _IN_CHUNKS:
            x = getattr(arguments, name)
            strides += () if x is None else x.stride()[:-1]
            if x is not None and max(0, *x.stride()[name in _PAGES :]) > MOST_NUMBER:
                raise NotImplementedError(
                    f"{name} has strides {x.stride()}; those of tokens and heads may be 2**31 - 1"
                )
        width = widest_load(traits.dtype, (*hdims, half, *strides))
        has_norm = arguments.q_weight is not None, arguments.k_weight is not None
        of_heads = hdims[0], hdims[-1]
        heads = gcd(*(x.shape[-2] for x in parts if x is not None))
        self._widest = HeadKernel(traits, target.arch, of_heads, half, has_norm, width, heads)
        self._compute_units = target.compute_units
        self._kernels: dict[int, Loaded] = {}

    def kernel_for(self, pointers: Sequence[int]) -> Loaded:
        """The kernel for tensors that begin there."""
        width = self._widest.width
        while width > 1 and any(
            is_in_chunks and pointer % min(width * size, LOAD_BYTES)
            for pointer, size, is_in_chunks in zip(
                pointers, self._bytes, self._is_in_chunks, strict=True
            )
        ):
            width //= 2
        if width not in self._kernels:
            kernel = self._widest._replace(width=width)
            blocks = kernel.blocks(*self._sizes)
            turns = _turns(sum(blocks), kernel, self._compute_units)
            kernel = kernel._replace(has_turns=turns > 1)
            spec = kernel_spec(kernel)
            address = self.load(jit.read(spec), THREADS, spec.artifact_name, kernel.name, "")
            workgroups = tuple(-(-each // turns) for each in blocks)
            self._kernels[width] = Loaded(address, workgroups, turns)
        return self._kernels[width]
