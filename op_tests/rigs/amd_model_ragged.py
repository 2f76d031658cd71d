"""The amd-model suite's rows of ragged batches: few queries beside chunks of prefill."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from jitfmha.bench.report import Progress, Report
from jitfmha.call.interface import fmha_fwd
from jitfmha.emulator import emulate
from jitfmha.emulator.profile import LaunchProfile

from .modelled_call import aligned, estimate_of, take_only, torch_dtype

_EVERY = 1 << 30  # workgroups are timed: each of a ragged batch has something else to do
_BUSY = 90
# Of queries and of keys: so many that every unit has work, and the emulator has no more than that.
_HEADS = {"gfx942-mi308": (16, 2), "gfx950": (48, 6)}


@dataclass(frozen=True)
class RaggedCall:
    """What decides about the time of a call.

    Attributes:
        lengths: queries and keys of each sequence; queries see the keys up to their own.
        heads: of queries and of keys.
    """

    chip: str
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    hdim: int = 128
    dtype: str = "bf16"

    @classmethod
    def drawn(cls, chip: str, seed: int, **options: Any) -> "RaggedCall":
        """Chunks of up to a thousand queries among sequences of 1 to 8, with up to 4096 keys."""
        random = Random(seed)
        few = [
            (random.randint(1, 8), random.randint(64, 4096)) for _ in range(random.randint(8, 24))
        ]
        chunks = []
        for _ in range(random.randint(1, 3)):
            queries = random.randint(128, 1024)
            chunks.append((queries, queries + random.choice((0, random.randint(0, 2048)))))
        lengths = few + chunks
        random.shuffle(lengths)
        return cls(chip, tuple(lengths), _HEADS[chip], **options)

    def __str__(self) -> str:
        heads = "/".join(map(str, self.heads))
        queries = [n for n, _ in self.lengths]
        return (
            f"{self.chip} {self.dtype} hdim {self.hdim}, heads {heads}, {len(queries)} sequences "
            f"of 1 to {max(queries)} queries, {sum(queries)} of {sum(n for _, n in self.lengths)}"
        )

    def profiles(self, mask: int = 2) -> tuple[LaunchProfile, ...]:
        """Of the launches."""
        sums_q, sums_k = (
            torch.tensor([0, *lengths]).cumsum(0).int()
            for lengths in zip(*self.lengths, strict=True)
        )
        heads_q, heads_k = self.heads
        dtype = torch_dtype(self.dtype, self.chip)
        rows_q, rows_k = int(sums_q[-1]), int(sums_k[-1])
        q = aligned(dtype, rows_q, heads_q, self.hdim)
        q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(20260101)))
        # What keys are changes no cost.
        k, v = (aligned(dtype, rows_k, heads_k, self.hdim) for _ in range(2))
        # One after the other: which of the workgroups that share a block comes last, and adds what
        # the others left, is no matter of chance then.
        with emulate(self.chip, profile=True, sample=_EVERY, threads=1) as run:
            take_only("own")
            fmha_fwd(
                *(q, k, v),
                mask=mask,
                cu_seqlens_q=sums_q,
                cu_seqlens_k=sums_k,
                max_seqlen_q=max(n for n, _ in self.lengths),
                max_seqlen_k=max(n for _, n in self.lengths),
            )
            return run.profiles()


def units_with_work(profile: LaunchProfile) -> float:
    """Which share of a launch's time compute units have work, on average."""
    cycles = [x.timing.cycles for x in profile.timed if x.timing is not None]
    slots = profile.compute_units * profile.workgroups_per_unit
    return sum(cycles) / (slots * estimate_of(profile).cycles)


def add_rows(report: Report, quick: bool, progress: Progress) -> None:
    """Model drawn mixes; ``quick`` takes one."""
    for call in _calls(quick):
        profiles = call.profiles()
        main = max(profiles, key=lambda x: estimate_of(x).seconds)
        seconds = [estimate_of(x).seconds for x in profiles]
        progress(f"{call}: {' + '.join(f'{x * 1e6:.1f}' for x in seconds)} us")
        estimate = estimate_of(main)
        busy = max(units_with_work(main), estimate.memory_seconds / estimate.seconds)
        report.at_least(f"units with work, or HBM, {call}", 100 * busy, _BUSY, "%")


def _calls(quick: bool) -> Iterator[RaggedCall]:
    for seed in range(1 if quick else 6):
        for chip in _HEADS:
            yield RaggedCall.drawn(chip, seed)
