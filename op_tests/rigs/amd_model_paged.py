"""The amd-model suite's rows of prefill with keys in pages, beside calls with dense keys."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from jitfmha.bench.report import Progress, Report
from jitfmha.call.interface import fmha_fwd
from jitfmha.emulator import emulate
from jitfmha.emulator.profile import LaunchProfile
from jitfmha.problem.packed_pages import as_packed

from .modelled_call import add_faults, aligned, estimate_of, take_only, torch_dtype

_BATCH, _SEQLEN, _HEADS = 2, 4096, (32, 8)
_SAMPLES = {0: 2, 2: 24}  # under a mask workgroups have unlike much to do
_HDIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
_OVER_DENSE = {1: 1.25, 16: 1.05, 64: 1.05, 256: 1.05, 1024: 1.05}  # by keys of a page
_PACKED_PAGES = (16, 1024)


@dataclass(frozen=True)
class PrefillCall:
    """Sequences with as many queries as keys, one behind the other.

    Attributes:
        dtype: of all tensors.
        page_size: keys of a page, whose order is a random one; None where they are dense.
        is_packed: whether pages are packed as AITER has them.
    """

    chip: str
    dtype: str
    hdims: tuple[int, int]
    mask: int
    page_size: int | None = None
    is_packed: bool = False

    def __str__(self) -> str:
        packed = "packed " if self.is_packed else ""
        of_pages = f"{packed}pages of {self.page_size}" if self.page_size else "dense keys"
        hdims = "x".join(map(str, self.hdims))
        return (
            f"{self.chip} {self.dtype} {hdims}, {'causal' if self.mask else 'no mask'}, {of_pages}"
        )

    def profiles(self, progress: Progress) -> tuple[LaunchProfile, ...]:
        """Of the launches of the kernel that the call takes by itself."""
        dtype, ends = torch_dtype(self.dtype, self.chip), torch.arange(_BATCH + 1) * _SEQLEN
        options: dict[str, Any] = {"cu_seqlens_q": ends.int(), "cu_seqlens_k": ends.int()}
        options |= {"max_seqlen_q": _SEQLEN, "max_seqlen_k": _SEQLEN, "mask": self.mask}
        rows: tuple[int, ...] = (_BATCH * _SEQLEN,)
        generator = torch.Generator().manual_seed(20260101)
        q = aligned(dtype, *rows, _HEADS[0], self.hdims[0])
        q.copy_(torch.randn(q.shape, generator=generator))
        if self.page_size is not None:
            rows = (rows[0] // self.page_size, self.page_size)
            order = torch.randperm(rows[0], generator=generator)
            options["block_table"] = order.int().view(_BATCH, -1)
        k, v = (aligned(dtype, *rows, _HEADS[1], hdim) for hdim in self.hdims)
        for x in (k, v):
            # Of what memory held before, large numbers would raise maxima again and again.
            x.copy_(torch.randn(x.shape, generator=generator))
        if self.is_packed:
            k, v = as_packed("k", k), as_packed("v", v)
        with emulate(self.chip, profile=True, sample=_SAMPLES[self.mask]) as run:
            take_only("own")
            fmha_fwd(q, k, v, **options)
            profiles = run.profiles()
        taken = " + ".join(f"{estimate_of(each).seconds * 1e6:.1f}" for each in profiles)
        progress(f"{self}: {taken} us, {profiles[0].kernel}")
        return profiles


def add_rows(report: Report, quick: bool, progress: Progress) -> None:
    """Model the calls; ``quick`` takes one pair of them."""
    loops: list[LaunchProfile] = []
    for dense in _dense_calls():
        seconds = _seconds(dense.profiles(progress))
        pages = [(page_size, False) for page_size in _OVER_DENSE][: 1 if quick else None]
        if not quick:
            pages += ((page_size, True) for page_size in _PACKED_PAGES)
        for page_size, is_packed in pages:
            bar = _OVER_DENSE[page_size]
            call = replace(dense, page_size=page_size, is_packed=is_packed)
            profiles = call.profiles(progress)
            loops += profiles
            ratio = _seconds(profiles) / seconds
            report.at_most(f"prefill, time over dense keys, {call}", ratio, bar, "x")
        if quick:
            break
    add_faults(report, ", paged prefill", loops)


def _dense_calls() -> Iterator[PrefillCall]:
    for chip in ("gfx942", "gfx950"):
        for dtype in ("bf16", "fp16", "fp8"):
            for hdims in _HDIMS:
                for mask in (0, 2):
                    yield PrefillCall(chip, dtype, hdims, mask)


def _seconds(profiles: tuple[LaunchProfile, ...]) -> float:
    return sum(estimate_of(each).seconds for each in profiles)
