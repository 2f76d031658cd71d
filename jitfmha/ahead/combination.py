"""A kind of call without its tensors: a combination of data types, head dimensions and features.

It gives the :class:`~jitfmha.problem.problem.Problem` that a call of its kind has, and
``CALL_RULES`` say what must hold of it on every target: the checks of a call's arguments that look
at more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ..call.backward import check_keys_of_backward
from ..problem.arguments import check_num_splits, check_pages_have_lengths, gather_cu_seqlens
from ..problem.dtypes import EIGHT_BIT_NAMES, TORCH_DTYPES, plain_out_dtype
from ..problem.features import Feature
from ..problem.mask import NO_MASK, Mask
from ..problem.packed_pages import check_whole_pieces, packed_strides
from ..problem.problem import (
    Direction,
    GradientStrides,
    Mode,
    Problem,
    Sizes,
    check_descale_dtype,
    check_hdims,
    check_heads,
    check_kv_dtype,
    check_out_dtype,
    check_p_descale_dtype,
)
from ..problem.score_features import AskedModifiers

Layout = Literal["bshd", "bhsd", "sbhd"]
"""The order of batch, sequence, heads and head dimension in memory; packed there is no batch."""

NAMED_FEATURES = {
    feature.name.lower(): feature
    for feature in (
        *(Feature.LSE, Feature.PADDED_SEQUENCES, Feature.COLUMN_MAJOR_V),
        *(Feature.BIAS, Feature.BOOLEAN_BIAS, Feature.ALIBI, Feature.SOFTCAP),
        *(Feature.SINKS, Feature.SINK_TOKENS, Feature.DROPOUT),
        *(Feature.DESCALES, Feature.QUERY_HEAD_DESCALES, Feature.TOKEN_DESCALES),
        *(Feature.INT8_PROBABILITIES, Feature.PAGED_KEYS, Feature.PACKED_PAGES),
        Feature.SPLIT_RESULTS,
    )
}
"""The features that nothing else about a combination says."""

_ONE_SCALE = (0, 0)


def known(what: str, value: object, choices: Sequence[Any]) -> Any:
    """The value, where it is one of the names; ``what`` begins the error's text."""
    if isinstance(value, str) and value in choices:
        return value
    error = ValueError if isinstance(value, str) else TypeError
    raise error(f"{what} {value!r}; use {', '.join(map(repr, choices))}")


class Combination(NamedTuple):
    """What a call asks for.

    Attributes:
        dtype: of q; kv_dtype: of k and v.
        other_out_dtype: of the output, where it is not as q, or bf16 beside 8 bits; else empty.
        features: values of ``NAMED_FEATURES``. A bias has the dtype of q, beside 8 bits bf16; sink
            tokens are there where the mask has a left side, and packed pages are keys in pages,
            too. Scales of tokens are those of keys and values, beside int8 probabilities of keys
            alone.
        layout: of q, k, v and the output in memory; packed pages have their own.
        page_size: of keys in pages.
        num_splits: of the keys; 0 leaves the choice.
        seqlen_q, seqlen_k: gm0 of every sequence, gm1 of all together.
    """

    dtype: str
    kv_dtype: str
    hdim_q: int
    hdim_v: int
    mask: Mask = NO_MASK
    mode: Mode = "gm0"
    direction: Direction = "forward"
    features: frozenset[Feature] = frozenset()
    layout: Layout = "bshd"
    page_size: int = 16
    num_splits: int = 0
    batch: int = 1
    heads_q: int = 1
    heads_k: int = 1
    seqlen_q: int = 1
    seqlen_k: int = 1
    other_out_dtype: str = ""

    @property
    def out_dtype(self) -> str:
        return self.other_out_dtype or plain_out_dtype(self.dtype)

    @property
    def is_paged(self) -> bool:
        return not self.features.isdisjoint((Feature.PAGED_KEYS, Feature.PACKED_PAGES))

    def problem(self) -> Problem:
        """Give the problem of a call of this kind, whatever rules it breaks."""
        asked, left = self.features, self.mask.left
        of_tokens = Feature.TOKEN_DESCALES in asked
        # Products of integers are added up before they are multiplied with a scale.
        have_values = of_tokens and Feature.INT8_PROBABILITIES not in asked
        problem = Problem(
            mode=self.mode,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            out_dtype=self.out_dtype,
            batch=self.batch,
            heads_q=self.heads_q,
            heads_k=self.heads_k,
            hdim_q=self.hdim_q,
            hdim_v=self.hdim_v,
            mask=self.mask,
            softmax_scale=float(max(self.hdim_q, 1)) ** -0.5,
            sizes=self._sizes(),
            has_lse=Feature.LSE in asked,
            is_padded=Feature.PADDED_SEQUENCES in asked,
            q_descale=self._descale(self.dtype),
            k_descale=None if of_tokens else self._descale(self.kv_dtype),
            v_descale=None if have_values else self._descale(self.kv_dtype),
            has_query_head_descale=Feature.QUERY_HEAD_DESCALES in asked,
            has_token_k_descale=of_tokens,
            has_token_v_descale=have_values,
            has_p_descale=Feature.INT8_PROBABILITIES in asked,
            modifiers=AskedModifiers(
                bias=self._bias_dtype(),
                alibi_slopes=Feature.ALIBI in asked or None,
                logit_softcap=float(Feature.SOFTCAP in asked),
                sink=Feature.SINKS in asked or None,
                sink_size=int(Feature.SINK_TOKENS in asked and left is not None),
            ),
            dropout_p=0.5 if Feature.DROPOUT in asked else 0.0,
            is_paged=self.is_paged,
            has_packed_pages=Feature.PACKED_PAGES in asked,
            num_splits=self.num_splits,
            has_split_results=Feature.SPLIT_RESULTS in asked,
        )
        if self.direction == "forward":
            return problem
        _, _, q, k, v, out = problem.sizes
        return problem._replace(
            gradients=GradientStrides(out, _lse_strides(problem), None, q, k, _in_rows(v))
        )

    def _bias_dtype(self) -> str | None:
        if Feature.BOOLEAN_BIAS in self.features:
            return "bool"
        return plain_out_dtype(self.dtype) if Feature.BIAS in self.features else None

    def _descale(self, dtype: str) -> tuple[int, int] | None:
        is_scaled = not self.features.isdisjoint((Feature.DESCALES, Feature.QUERY_HEAD_DESCALES))
        return _ONE_SCALE if is_scaled and dtype in EIGHT_BIT_NAMES else None

    def _sizes(self) -> Sizes:
        is_packed, is_paged = self.mode == "gm1", self.is_paged
        batch = 1 if is_packed else self.batch
        of_queries = batch, self.seqlen_q, self.heads_q
        of_keys = batch, self.seqlen_k, self.heads_k
        if is_paged:
            of_keys = -(-self.seqlen_k // self.page_size), self.page_size, self.heads_k
        v = _strides(*of_keys, self.hdim_v, self.layout)
        if Feature.COLUMN_MAJOR_V in self.features:
            v = _strides_of_columns(*of_keys, self.hdim_v)
        q, out = (_strides(*of_queries, x, self.layout) for x in (self.hdim_q, self.hdim_v))
        k = _strides(*of_keys, self.hdim_q, self.layout)
        if Feature.PACKED_PAGES in self.features:
            dtype = TORCH_DTYPES[self.kv_dtype]
            k, v = packed_strides(*of_keys, (self.hdim_q, self.hdim_v), dtype)
        if is_packed:
            q, out = q[1:], out[1:]
            k, v = (k, v) if is_paged else (k[1:], v[1:])
        return Sizes(self.seqlen_q, of_keys[1], q, k, v, out)


def _strides(batch: int, rows: int, heads: int, hdim: int, layout: Layout) -> tuple[int, ...]:
    """Those of ``(batch, rows, heads, hdim)`` that lies in memory in the order of ``layout``."""
    sizes = {"b": batch, "s": rows, "h": heads, "d": hdim}
    strides, below = {}, 1
    for name in reversed(layout):
        strides[name] = below
        below *= sizes[name]
    return tuple(strides[name] for name in "bshd")


def _strides_of_columns(batch: int, rows: int, heads: int, hdim: int) -> tuple[int, ...]:
    """Give the strides where rows lie side by side, and columns begin at least 8 elements apart."""
    column = max(rows, 8)
    return heads * hdim * column, 1, hdim * column, column


def _lse_strides(problem: Problem) -> tuple[int, ...]:
    *batch, heads, rows = problem.lse_shape
    return (*(heads * rows for _ in batch), rows, 1)


def _in_rows(strides: tuple[int, ...]) -> tuple[int, ...]:
    """What a gradient has: its last dimension is contiguous, whatever that of the input is."""
    return (*strides[:-1], 1)


# ---- What must hold of every call ----------------------------------------------------------------


class CallRule(NamedTuple):
    """Something that must hold of every call, whatever it runs on.

    Attributes:
        check: raises what a call of the kind raises.
        source: where the rule comes from.
    """

    check: Callable[[Combination], None]
    source: str

    @property
    def name(self) -> str:
        return self.check.__name__

    def complaint(self, combination: Combination) -> str | None:
        """What a call would raise, in words; None where the rule holds."""
        try:
            self.check(combination)
        except (TypeError, ValueError, NotImplementedError) as error:
            return str(error)
        return None


def hdims_are_in_range(x: Combination) -> None:
    """No kernel has wider head dimensions."""
    check_hdims(x.hdim_q, x.hdim_v)


def query_heads_share_key_heads_evenly(x: Combination) -> None:
    """GQA and MQA: a key head serves as many query heads as any other."""
    check_heads(x.heads_q, x.heads_k)


def keys_are_as_queries_or_of_8_bits(x: Combination) -> None:
    """Keys beside 8-bit queries are of the same format."""
    check_kv_dtype("k", TORCH_DTYPES[x.kv_dtype], TORCH_DTYPES[x.dtype])


def outputs_are_as_queries_or_of_8_bit_calls(x: Combination) -> None:
    """What is read back from 8 bits goes to the type that the next layer takes."""
    check_out_dtype(TORCH_DTYPES[x.out_dtype], TORCH_DTYPES[x.dtype])


def padding_is_between_packed_sequences(x: Combination) -> None:
    """Every sequence of gm0 has all rows."""
    if Feature.PADDED_SEQUENCES in x.features and x.mode == "gm0":
        beginnings = torch.empty(x.batch + 1, dtype=torch.int32, device="meta")
        gather_cu_seqlens(None, None, beginnings, None, None, None)


def pages_have_lengths(x: Combination) -> None:
    """Keys in pages are gm1: cu_seqlens_k says how many a sequence has."""
    if x.is_paged:
        check_pages_have_lengths(x.mode == "gm1")


def pages_have_no_gradients(x: Combination) -> None:
    """Sequences may share a page, so that nobody could say where a gradient goes."""
    if x.direction == "backward":
        check_keys_of_backward(x.is_paged)


def packed_pages_hold_whole_pieces(x: Combination) -> None:
    """Matrix units take 16 bytes of a key, or of a column of values, at a time."""
    if Feature.PACKED_PAGES in x.features:
        check_whole_pieces(x.page_size, x.hdim_q, TORCH_DTYPES[x.kv_dtype])


def num_splits_is_in_range(x: Combination) -> None:
    """flash-attn has the same range of splits."""
    check_num_splits(x.num_splits)


def scaled_inputs_have_8_bits(x: Combination) -> None:
    """Scales are those of formats without the range for plain values."""
    is_scaled = not x.features.isdisjoint((Feature.DESCALES, Feature.TOKEN_DESCALES))
    if is_scaled and x.kv_dtype not in EIGHT_BIT_NAMES:
        check_descale_dtype("k_descale", TORCH_DTYPES[x.kv_dtype])


def scales_of_query_heads_are_of_8_bit_queries(x: Combination) -> None:
    """Scales for each head of q are scales of q."""
    if Feature.QUERY_HEAD_DESCALES in x.features:
        check_descale_dtype("q_descale", TORCH_DTYPES[x.dtype])


def int8_probabilities_meet_int8_values(x: Combination) -> None:
    """A product takes two integers, or none."""
    if Feature.INT8_PROBABILITIES in x.features:
        check_p_descale_dtype(TORCH_DTYPES[x.dtype])


_FLASH_ATTN = "flash_attn/flash_attn_interface.py of github.com/Dao-AILab/flash-attention"
_AITER = "csrc/include/torch/mha_batch_prefill.h of github.com/ROCm/aiter"
_INT8 = "python/perf-kernels/flash-attention.py of github.com/ROCm/triton"
CALL_RULES = (
    CallRule(hdims_are_in_range, "MAX_HDIM of problem.py: DeepSeek's latent, 512 + 64"),
    CallRule(query_heads_share_key_heads_evenly, _FLASH_ATTN),
    CallRule(keys_are_as_queries_or_of_8_bits, _INT8),
    CallRule(outputs_are_as_queries_or_of_8_bit_calls, _INT8),
    CallRule(padding_is_between_packed_sequences, "the arguments of jitfmha.fmha_fwd"),
    CallRule(pages_have_lengths, f"{_FLASH_ATTN}: block_table of flash_attn_varlen_func"),
    CallRule(pages_have_no_gradients, _FLASH_ATTN),
    CallRule(packed_pages_hold_whole_pieces, f"{_AITER}: mha_batch_prefill"),
    CallRule(num_splits_is_in_range, f"{_FLASH_ATTN}: num_splits"),
    CallRule(scaled_inputs_have_8_bits, "the arguments of jitfmha.fmha_fwd"),
    CallRule(scales_of_query_heads_are_of_8_bit_queries, _INT8),
    CallRule(int8_probabilities_meet_int8_values, _INT8),
)


def check_combination(combination: Combination) -> None:
    """Raise what a call of the kind raises, for the first rule that it breaks."""
    for rule in CALL_RULES:
        rule.check(combination)
