"""Which kernels of heads a library gets, for ``mha_fwd_appendkv``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

from .. import jit
from ..amd.chips import Arch, architecture
from ..problem.dtypes import EIGHT_BIT_NAMES, FP8_NAMES
from ..rows.heads.amd import HeadKernel, kernel_spec, widest_load
from ..rows.heads.problem import HeadTraits
from .kernels import Selection, selected_types

Rope = Literal["none", "interleaved", "half_rotated"]
"""The members of ``jitfmha::Rope``: what is rotated with each other."""
_ROPES: tuple[Rope, ...] = ("none", "interleaved", "half_rotated")


class AppendPass(NamedTuple):
    """A kernel that is not compiled yet, and what calls it serves.

    Attributes:
        dtype: of new keys and values, and of queries. int8 serves all of 8 bits, which are copied.
        cache: the member of ``jitfmha::KeyType`` that caches have.
    """

    dtype: str
    cache: str
    rope: Rope
    kernel: HeadKernel

    @property
    def spec(self) -> jit.BuildSpec:
        """What it is compiled from."""
        return kernel_spec(self.kernel)


class AppendKernel(NamedTuple):
    """A kernel of heads with its code object."""

    made_for: AppendPass
    image: bytes

    @property
    def name(self) -> str:
        return self.made_for.kernel.name

    @property
    def arch(self) -> Arch:
        return self.made_for.kernel.arch


def append_passes(selection: Selection) -> tuple[AppendPass, ...]:
    """What is compiled for ``mha_fwd_appendkv``, each once; of the same calls the widest first."""
    if not selection.appends:
        return ()
    selected = dict.fromkeys(selected_types(selection))
    passes = itertools.chain.from_iterable(itertools.starmap(_passes, selected))
    return tuple(dict.fromkeys(passes))


def compiled_append(made_for: AppendPass) -> AppendKernel:
    """A kernel from the build cache, or compiled.

    Raises ``jitfmha.BuildError`` where it cannot be.
    """
    return AppendKernel(made_for, jit.read(made_for.spec))


def _passes(
    arch: Arch, dtype: str, kv_dtype: str, hdims: tuple[int, int], may_be_packed: bool
) -> Iterator[AppendPass]:
    if dtype in EIGHT_BIT_NAMES:
        dtype = kv_dtype = "int8"  # which is copied
    elif kv_dtype not in (dtype, "int8", architecture(arch).fp8_dtype):
        return
    cache = "fp8" if kv_dtype in FP8_NAMES.values() else kv_dtype
    for rope, is_packed in itertools.product(_ROPES, (False, True)[: 1 + may_be_packed]):
        if rope != "none" and (dtype in EIGHT_BIT_NAMES or hdims[0] < 2):
            continue
        is_interleaved = rope == "interleaved"
        traits = HeadTraits(dtype, dtype, dtype, kv_dtype, is_interleaved, is_packed)
        widest = widest_load(dtype, hdims)
        for width in sorted({widest, 1}, reverse=True):  # 1 serves what is aligned to nothing
            half = 0 if rope == "none" else None
            kernel = HeadKernel(traits, arch, hdims, half, (False, False), width)
            yield AppendPass(dtype, "as_q" if dtype == kv_dtype else cache, rope, kernel)
