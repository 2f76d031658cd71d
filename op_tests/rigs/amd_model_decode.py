"""The amd-model suite's rows of decoding, as a call takes it: few queries, and keys that stream."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jitfmha.amd import chips
from jitfmha.amd.node import VIRTUAL_NODE
from jitfmha.bench.report import Progress, Report
from jitfmha.call.interface import fmha_fwd
from jitfmha.emulator import emulate
from jitfmha.emulator.profile import LaunchProfile

from .modelled_call import add_faults, aligned, estimate_of, take_only, torch_dtype
from .streaming_read import streaming_read_seconds

_SAMPLE = 4  # all workgroups have the same to do
_STREAMED, _STREAMED_FROM = 90, 32 << 20
_READ = 1.05
_PAGES = {1: 1.25, 16: 1.05, 32: 1.05, 64: 1.05, 128: 1.05, 256: 1.05, 1024: 1.05}
_PACKED_PAGES = (16, 64, 1024)
_SHAPES = ((1, 8192), (1, 32768), (8, 4096), (16, 4096), (64, 4096))  # batch and keys
# Of pull request 2040 of facebookexperimental/triton, gfx950: batch, keys, and the microseconds of
# the quicker one of Triton and AITER. Its benchmark has these heads, hdim 64 and pages of 16.
_PUBLISHED = (
    *((1, 1024, 13.9), (16, 1024, 24.5), (64, 1024, 39.0), (256, 1024, 130.2)),
    *((1, 8192, 45.3), (8, 8192, 67.3), (32, 8192, 148.8), (128, 8192, 680.5)),
    *((256, 8192, 1363.1), (1, 32768, 144.2), (16, 32768, 419.0), (64, 32768, 1389.1)),
)


@dataclass(frozen=True)
class DecodeCall:
    """What decides about the time of a call.

    Attributes:
        kv_dtype: of keys and values; those of queries are the same, but for int8.
        queries: of each sequence, which see the keys up to their own.
        page_size: keys of a page, whose order is a random one; None where they are dense.
        is_packed: whether pages are AITER's packed ones.
    """

    chip: str
    batch: int
    seqlen_k: int
    heads: tuple[int, int] = (64, 8)
    hdim: int = 128
    queries: int = 1
    kv_dtype: str = "bf16"
    page_size: int | None = None
    is_packed: bool = False

    def __str__(self) -> str:
        of_queries = f", {self.queries} queries" if self.queries > 1 else ""
        packed = "packed " if self.is_packed else ""
        of_pages = f", {packed}pages of {self.page_size}" if self.page_size else ""
        heads = "/".join(map(str, self.heads))
        return (
            f"{self.chip} {self.kv_dtype} hdim {self.hdim}, heads {heads}, "
            f"{self.batch} x {self.seqlen_k} keys{of_queries}{of_pages}"
        )

    @property
    def key_bytes(self) -> int:
        """Of keys and values."""
        itemsize = torch_dtype(self.kv_dtype, self.chip).itemsize
        return 2 * self.batch * self.heads[1] * self.seqlen_k * self.hdim * itemsize

    @property
    def sustained_seconds(self) -> float:
        """In which HBM moves them at the rate that it sustains, as if it did so from the start."""
        streaming = chips.chip(VIRTUAL_NODE[self.chip]).streaming_gb_s
        assert streaming is not None
        return self.key_bytes / (streaming * 1e9)

    def profiles(self, progress: Progress) -> tuple[LaunchProfile, ...]:
        """Of the launches."""
        tensors, options = self._tensors(), self._options()
        with emulate(self.chip, profile=True, sample=_SAMPLE) as run:
            take_only("own")
            fmha_fwd(*tensors, **options)
            profiles = run.profiles()
        taken = " + ".join(f"{estimate_of(each).seconds * 1e6:.1f}" for each in profiles)
        read = streaming_read_seconds(self.chip, self.key_bytes) * 1e6
        sustained = self.sustained_seconds * 1e6
        progress(f"{self}: {taken} us; only to read takes {read:.1f}, or {sustained:.1f} sustained")
        return profiles

    def seconds(self, progress: Progress) -> float:
        return sum(estimate_of(each).seconds for each in self.profiles(progress))

    def _tensors(self) -> tuple[Tensor, ...]:
        """Queries, and keys and values of zeros: what these are changes no cost."""
        heads_q, heads_k = self.heads
        kv_dtype = torch_dtype(self.kv_dtype, self.chip)
        dtype = torch.bfloat16 if kv_dtype == torch.int8 else kv_dtype
        q = aligned(dtype, self.batch, self.queries, heads_q, self.hdim)
        q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(20260101)))
        rows = (self.batch, self.seqlen_k)
        if self.page_size is not None:
            q = q.flatten(0, 1)
            rows = (self.batch * -(-self.seqlen_k // self.page_size), self.page_size)
        if self.is_packed:
            assert self.page_size is not None
            x = 16 // kv_dtype.itemsize
            pages = rows[0], heads_k
            k = aligned(kv_dtype, *pages, self.hdim // x, self.page_size, x)
            return q, k, aligned(kv_dtype, *pages, self.page_size // x, self.hdim, x)
        k, v = (aligned(kv_dtype, *rows, heads_k, self.hdim) for _ in range(2))
        return q, k, v

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"mask": 2 if self.queries > 1 else 0}
        if self.page_size is None:
            return options
        ends = torch.arange(self.batch + 1, dtype=torch.int32)
        count = self.batch * -(-self.seqlen_k // self.page_size)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(20260101))
        return options | {
            "cu_seqlens_q": ends * self.queries,
            "cu_seqlens_k": ends * self.seqlen_k,
            "max_seqlen_q": self.queries,
            "max_seqlen_k": self.seqlen_k,
            "block_table": order.int().view(self.batch, -1),
        }


def add_rows(report: Report, quick: bool, progress: Progress) -> None:
    """Model the calls; ``quick`` takes one of each kind."""
    loops: list[LaunchProfile] = []
    for chip in ("gfx942", "gfx950"):
        for call in _calls(chip, quick):
            profiles = call.profiles(progress)
            loops += profiles[:1]
            seconds = sum(estimate_of(each).seconds for each in profiles)
            share = streaming_read_seconds(chip, call.key_bytes) / seconds
            report.at_least(f"of what streaming reaches, {call}", 100 * share, _STREAMED, "%")
            share = call.sustained_seconds / seconds
            report.figure(f"of the rate that HBM sustains, {call}", 100 * share, "%")
            if call.queries == 1:
                # Of every workgroup, since keys and values are in no cache before.
                moved = profiles[0].work.global_bytes / profiles[0].ended_workgroups
                read = moved * profiles[0].launched_workgroups / call.key_bytes
                report.at_most(f"bytes moved over those of keys, {call}", read, _READ, "x")
        _add_pages(report, DecodeCall(chip, 16, 4096), quick, progress)
    for batch, seqlen_k, published in _PUBLISHED[:1] if quick else _PUBLISHED:
        call = DecodeCall("gfx950", batch, seqlen_k, hdim=64, page_size=16)
        report.at_most(f"published, {call}", call.seconds(progress) * 1e6, published, "us")
    add_faults(report, ", decode", loops)


def _calls(chip: str, quick: bool) -> Iterator[DecodeCall]:
    """From ``_STREAMED_FROM`` bytes of keys on."""
    usual = DecodeCall(chip, 16, 4096)
    if quick:
        yield usual
        return
    calls = [
        *(DecodeCall(chip, *shape) for shape in _SHAPES),
        *(replace(usual, heads=heads) for heads in ((8, 8), (32, 8), (128, 8), (256, 8))),
        *(replace(usual, queries=queries, page_size=16) for queries in (2, 4, 8)),
        *(replace(usual, heads=(128, 8), queries=queries) for queries in (4, 8)),
        *(replace(usual, hdim=hdim) for hdim in (64, 96, 192, 256)),
        *(
            replace(usual, seqlen_k=8192, hdim=hdim, kv_dtype=dtype, page_size=page_size)
            for dtype in ("fp8", "int8")
            for hdim in (64, 128, 256)
            for page_size in (None, 16)
        ),
    ]
    for call in calls:
        assert call.key_bytes >= _STREAMED_FROM, call
        yield call


def _add_pages(report: Report, dense: DecodeCall, quick: bool, progress: Progress) -> None:
    for kv_dtype in ("bf16",) if quick else ("bf16", "fp8", "int8"):
        call = replace(dense, kv_dtype=kv_dtype)
        seconds = call.seconds(progress)
        paged_calls = [(replace(call, page_size=size), bar) for size, bar in _PAGES.items()]
        paged_calls += [
            (replace(paged, is_packed=True), bar)
            for paged, bar in paged_calls
            if paged.page_size in _PACKED_PAGES
        ]
        for paged, bar in paged_calls[:1] if quick else paged_calls:
            over_dense = paged.seconds(progress) / seconds
            report.at_most(f"time over dense keys, {paged}", over_dense, bar, "x")
