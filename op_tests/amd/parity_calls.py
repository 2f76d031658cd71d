"""Lines of the exported programs, and the same calls in Python with the tensors that they save."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from packed_pages import packed_keys, packed_values
from torch import Tensor
from untyped import explain, explain_bwd, flash_attn_with_kvcache, fmha_bwd, fmha_fwd

from jitfmha import emulate

ARCH = "gfx942"
_8_BITS = {"fp8": torch.float8_e4m3fnuz, "bf8": torch.float8_e5m2fnuz, "int8": torch.int8}
_PREFIXES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, **_8_BITS}


@dataclass(frozen=True)
class Parity:
    """A call of a program, and what Python is told beside the tensors.

    Attributes:
        line: the program's direction and options, in which 20..40 is a number to be drawn.
        options: the options of ``fmha_fwd``, or of ``fmha_bwd``.
        scores: the option that the saved ``scores`` are.
        is_split: whether keys are.
        kernel: a part of its name.
    """

    name: str
    line: str
    options: dict[str, Any] = field(default_factory=dict)
    scores: str | None = None
    is_split: bool = False
    kernel: str = ""

    @property
    def way(self) -> str:
        return self.line.split()[0]

    def arguments(self, drawn: random.Random) -> list[str]:
        def number(found: re.Match[str]) -> str:
            return str(drawn.randint(int(found[1]), int(found[2])))

        of_way = ["-num_splits=0"] if self.way == "fwd" else []
        shared = ["-v3_bf16_cvt=0", "-kname=1", "-repeat=0"]
        return [*re.sub(r"(\d+)\.\.(\d+)", number, self.line).split()[1:], *of_way, *shared]


_DROPPED = {"dropout_p": 0.2, "rng_state": torch.tensor([7, 3])}
_DROPS = "-p_drop=0.2 -drop_seed=7 -drop_offset=3"
_SMALL = "fwd -prec=bf16 -b=2 -h=4 -d=32 -s=17..70 -s_k=1..90 -lse=1"
_APPENDED = "fwd -prec=bf16 -b=3 -h=3 -d=32 -s=17..30 -s_k=40..90 -mask=2 -lse=1"
PARITY = (
    Parity(
        "causal", "fwd -prec=bf16 -b=2 -h=4 -d=64 -s=100..150 -mask=2 -lse=1", {"mask": "causal"}
    ),
    Parity("bias", f"{_SMALL} -bias=e:2", {}, "bias"),
    Parity("alibi", f"{_SMALL} -bias=a -mask=2", {"mask": 2}, "alibi_slopes"),
    Parity("dropout", f"{_SMALL} -mask=2 {_DROPS}", {"mask": 2, **_DROPPED}),
    Parity(
        "soft cap",
        "fwd -prec=bf16 -mode=1 -h=2 -d=32 -s=33,17..70 -s_k=40,0..90 -lse=1 -logits_soft_cap=3",
        {"logit_softcap": 3.0},
    ),
    Parity("sinks", f"{_SMALL} -mask=2 -sink=1.5", {"mask": 2, "sink": torch.full((4,), 1.5)}),
    Parity("window", f"{_SMALL} -mask=b:16,3,4", {"mask": "b:16,3", "sink_size": 4}),
    Parity("GQA", "fwd -prec=bf16 -b=1 -h=4 -h_k=2 -d=128 -s=130..160 -lse=1"),
    Parity(
        "packed",
        "fwd -prec=bf16 -mode=1 -h=4 -d=128 -s=130..160,70 -s_k=150,200..260 -mask=2 -lse=1",
        {"mask": "causal"},
    ),
    Parity(
        "split keys",
        "fwd -prec=bf16 -b=1 -h=2 -d=32 -s=17..60 -s_k=1500..2000 -mask=2 -sink=.5 -lse=1",
        {"mask": 2, "sink": torch.full((2,), 0.5)},
        is_split=True,
    ),
    Parity(
        "batch prefill",
        "fwd -prec=bf16 -mode=1 -h=3 -d=32 -s=100,20..60 -s_k=130..160,300 -page_block_size=16 "
        "-lse=1",
    ),
    Parity(
        "lists of packed pages",
        "fwd -prec=bf16 -mode=1 -h=3 -d=32 -s=100,20..60 -s_k=130..160,300 -page_block_size=16 "
        "-kv_memory_layout=vectorized -kv_lookup_table=sglang -lse=1",
    ),
    Parity(
        "chunked prefill",
        "fwd -prec=bf16 -mode=1 -h=2 -d=32 -s=130..180,1..5,1..5 -s_k=190..260,1..300,40..90 "
        "-page_block_size=16 -mask=2 -lse=1",
        {"mask": 2},
        kernel="_listed_",
    ),
    Parity(
        "append",
        f"{_APPENDED} -s_knew=1..30 -rotary_dim=16 -rotary_interleaved=1 -page_block_size=16",
        {"rotary_interleaved": True, "causal": True},
    ),
    Parity(
        "append by an index",
        f"{_APPENDED} -s_knew=1..30 -rotary_dim=32 -rotary_interleaved=0 -cache_batch_idx=1",
        {"rotary_interleaved": False, "causal": True},
    ),
    Parity(
        "append and split keys",
        "fwd -prec=bf16 -b=1 -h=2 -d=32 -s=17..60 -s_k=1500..2000 -s_knew=1..70 -rotary_dim=24 "
        "-rotary_interleaved=0 -mask=2 -lse=1",
        {"rotary_interleaved": False, "causal": True},
        is_split=True,
    ),
    Parity("fp8", "fwd -prec=fp8 -b=2 -h=2 -d=128 -s=128 -vlayout=c -squant=1 -init=3 -lse=1"),
    Parity("fp8 and fp32", "fwd -prec=fp8fp32 -b=1 -h=2 -d=40 -s=17..70 -s_k=90 -squant=1 -lse=1"),
    Parity("bf8", f"{_SMALL.replace('bf16', 'bf8')} -mask=2 -init=3 -squant=1", {"mask": 2}),
    Parity(
        "scales of tokens",
        "fwd -prec=int8 -b=2 -h=2 -d=24 -s=17..70 -s_k=70..90 -init=uf:q -scale_s=1e-4 "
        "-qscale=pth -lse=1",
        {"softmax_scale": torch.tensor(1e-4).item()},
    ),
    Parity(
        "backward",
        "bwd -prec=bf16 -b=1 -h=4 -h_k=2 -d=64 -s=100..160 -mask=2 -deterministic=1",
        {"mask": "causal", "deterministic": True},
    ),
    Parity(
        "backward with dropout",
        f"bwd -prec=bf16 -b=2 -h=2 -d=32 -s=1..70 -s_k=1..90 -bias=a -mask=2 {_DROPS}",
        {"mask": 2, **_DROPPED},
        "alibi_slopes",
    ),
)
"""One of each kind of call that both sides serve."""


class Saved:
    """The tensors that a program saved, as Python has them: heads behind rows."""

    def __init__(self, folder: Path, arguments: Sequence[str], scores: str | None) -> None:
        """Read what a program with these arguments left, whose ``scores`` are this option."""
        self._folder, self._scores = folder, scores
        given = dict(x[1:].split("=") for x in arguments)
        prec = given["prec"]
        of_8_bits = next((name for name in _8_BITS if prec.startswith(name)), "")
        self._dtype = _PREFIXES[of_8_bits or prec]
        of_out = prec.removeprefix(of_8_bits) or "bf16"
        self.out_dtype = _PREFIXES[of_out] if of_8_bits else self._dtype
        self.has_packed_pages = given.get("kv_memory_layout") == "vectorized"
        self._has_lists = given.get("kv_lookup_table") == "sglang"
        self._has_token_scales = given.get("qscale") == "pth"
        self.new_keys = int(given.get("s_knew", 0))
        self.is_group = given.get("mode") == "1" or self.new_keys > 0
        self.heads_q = int(given["h"])
        self.heads_k = int(given.get("h_k", self.heads_q))
        self._hdim = int(given["d"])
        self.page_size = int(given.get("page_block_size", 0))
        self.has_columns = given.get("vlayout") == "c"
        self._rotary_dim = int(given.get("rotary_dim", 0))
        self.has_index = given.get("cache_batch_idx") == "1"
        if self.has_index:  # of which each sequence is a page
            self.page_size = self.flat("cache_seqlens", torch.int32).max().item() + self.new_keys
        is_group = given.get("mode") == "1"
        self.batch = len(given["s"].split(",")) if is_group else int(given["b"])

    def flat(self, name: str, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(bytearray((self._folder / f"{name}.bin").read_bytes()), dtype=dtype)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One with heads, which lies in memory as (batch or pages, heads, rows, hdim)."""
        cached = "k", "v", "k_appended", "v_appended"
        heads = self.heads_k if name in (*cached, "dk", "dv") else self.heads_q
        flat = self.flat(name, dtype or self._dtype)
        is_paged = self.page_size > 0 and name in cached
        packs = -1 if is_paged else 1 if self.is_group else self.batch
        if name == "v" and self.has_columns:
            return flat.view(packs, heads, self._hdim, -1).permute(0, 3, 1, 2)
        rows = self.page_size if is_paged else flat.numel() // (packs * heads * self._hdim)
        x = flat.view(packs, heads, rows, self._hdim).transpose(1, 2)
        return x[0] if self.is_group and not is_paged else x

    def lse(self) -> Tensor:
        batch = () if self.is_group else (self.batch,)
        return self.flat("lse", torch.float32).view(*batch, self.heads_q, -1)

    def options(self) -> dict[str, Tensor]:
        """What a call has of sequences, pages, scales and scores."""
        options: dict[str, Tensor] = {}
        if self.is_group:
            options |= {x: self.flat(x, torch.int32) for x in ("cu_seqlens_q", "cu_seqlens_k")}
        if self.page_size:
            table = self.flat("block_table", torch.int32)
            options["block_table"] = table if self._has_lists else table.view(self.batch, -1)
            if self._has_lists:
                starts = self.flat("cu_seqlens_k_padded", torch.int32)
                options["cu_seqlens_k_padded"] = starts
        if self._dtype in _8_BITS.values():
            for name in ("q_descale", "k_descale", "v_descale"):
                scales = self.flat(name, torch.float32)
                of_tokens = self._has_token_scales and name[0] != "q"
                shape = (self.batch, -1, self.heads_k, 1) if of_tokens else (self.batch, -1)
                options[name] = scales.view(shape)
        if self._scores == "alibi_slopes":
            options[self._scores] = self.flat("scores", torch.float32)
        elif self._scores == "bias":
            rows = self.tensor("q").shape[1], self.tensor("k").shape[1]
            bias = self.flat("scores", self.out_dtype)
            options[self._scores] = bias.view(self.batch, self.heads_q, *rows)
        return options

    def appended(self) -> dict[str, Tensor]:
        """What ``flash_attn_with_kvcache`` takes beside queries and caches."""

        def new(name: str) -> Tensor:
            flat = self.flat(name, self._dtype)
            by_head = self.batch, self.heads_k, self.new_keys, self._hdim
            return flat.view(by_head).transpose(1, 2)

        lengths = self.flat("cache_seqlens", torch.int32)
        tables = (self.flat(f"rotary_{x}", self._dtype) for x in ("cos", "sin"))
        cos, sin = (x.view(-1, self._rotary_dim // 2) for x in tables)
        where = {}
        if self.page_size:
            table = self.flat("block_table", torch.int32).view(self.batch, -1)
            where = {"cache_batch_idx": table[:, 0]} if self.has_index else {"block_table": table}
        named = {"k": new("knew"), "v": new("vnew"), "rotary_cos": cos, "rotary_sin": sin}
        return {**named, **where, "cache_seqlens": lengths}


def appended_in_python(parity: Parity, saved: Saved) -> tuple[str, dict[str, Tensor]]:
    """The same of a call that appends keys to its caches."""
    q, k, v = (saved.tensor(name) for name in ("q", "k", "v"))
    options = {**parity.options, **saved.appended()}
    by_sequence = (x if x.dim() == 4 else x.unflatten(0, (saved.batch, -1)) for x in (q, k, v))
    with emulate(ARCH, profile=True) as run:
        out, lse = flash_attn_with_kvcache(*by_sequence, return_softmax_lse=True, **options)
    results = {"out": out.flatten(0, 1), "lse": lse.transpose(0, 1).flatten(1)}
    kernel = next(x.kernel for x in run.profiles() if x.kernel.startswith("fmha_fwd"))
    return kernel, {**results, "k_appended": k, "v_appended": v}


def called_in_python(parity: Parity, saved: Saved) -> tuple[str, dict[str, Tensor]]:
    """The kernel that Python takes, and its results by the names of what programs save."""
    if saved.new_keys:
        return appended_in_python(parity, saved)
    options = {**parity.options, **saved.options()}
    q, k, v = (saved.tensor(name) for name in ("q", "k", "v"))
    if saved.has_packed_pages:
        k, v = packed_keys(k), packed_values(v)
    if saved.is_group:
        lengths = (options[x].diff().max().item() for x in ("cu_seqlens_q", "cu_seqlens_k"))
        options["max_seqlen_q"], options["max_seqlen_k"] = lengths
    with emulate(ARCH):
        if parity.way == "bwd":
            inputs = *(saved.tensor("dout"), q, k, v, saved.tensor("out")), saved.lse()
            kernel = explain_bwd(*inputs, **options).plan.kernel
            gradients = fmha_bwd(*inputs, **options)
            return kernel, dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        if saved.out_dtype not in (q.dtype, torch.bfloat16):
            options["out"] = torch.full_like(saved.tensor("out", saved.out_dtype), torch.nan)
        kernel = explain(q, k, v, **options).plan.kernel
        out, lse = fmha_fwd(q, k, v, return_lse=True, **options)
        return kernel, {"out": out, "lse": lse}
