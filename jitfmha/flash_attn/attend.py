"""What flash-attn's functions end in: their arguments as those of ``fmha_fwd``, and its results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layers.known_attention import attend_noted
from ..layers.kv_cache import starts_in_batch
from ..layers.peer_values import (
    as_dropout_p,
    as_flag,
    as_int,
    as_length,
    as_lengths,
    as_sink,
    as_softcap,
    as_softmax_scale,
    as_window,
    descales_of,
    sums_of,
    with_contiguous_rows,
    written_to,
)
from ..problem.arguments import Arguments, Options
from ..problem.checks import (
    describe,
    not_a_tensor,
    require_cu_seqlens,
    requires_any_grad,
)
from ..problem.dropout import new_rng_state
from ..problem.float64_reference import signed_probabilities
from ..problem.mask import OPEN_WINDOW
from ..problem.torch_parts import can_be_read


class Attended(NamedTuple):
    """Results; what was not asked for, or is not there without dropout, is None."""

    out: Tensor
    lse: Tensor | None
    probabilities: Tensor | None
    rng_state: Tensor | None


def attend(
    *,
    with_lse: bool,
    with_probabilities: bool = False,
    with_rng_state: bool = False,
    dropout_p: object = 0.0,
    softmax_scale: object = None,
    causal: object = False,
    window_size: object = OPEN_WINDOW,
    softcap: object = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: object = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    output_scale: Tensor | None = None,
    num_splits: object = 0,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    q_v: Tensor | None = None,
    **given: Any,
) -> Attended:
    """``given`` are the tensors and the lengths of packed sequences."""
    lengths = _lengths(given, is_paged=block_table is not None)
    q, k, v = _tensors(given, is_group=len(lengths) > 0)
    if q_v is not None:
        q, k = _of_latent(q, k, v, q_v)
    left, right, sink_size = as_window(window_size)
    drop = as_dropout_p(dropout_p)
    options: Options = {"mask": 2 if as_flag("causal", causal) else 0, **lengths}
    # What is off is left out: each option that is given takes time to be found.
    if softmax_scale is not None:
        options["softmax_scale"] = as_softmax_scale(softmax_scale)
    if left != -1 or right != -1:
        options["window_size"] = left, right
    if sink_size:
        options["sink_size"] = sink_size
    if softcap := as_softcap("softcap", softcap):
        options["logit_softcap"] = softcap
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if drop:
        options["dropout_p"] = drop
    if as_flag("deterministic", deterministic):  # False leaves the choice to torch's own setting
        options["deterministic"] = True
    if num_splits := as_int("num_splits", num_splits):
        options["num_splits"] = num_splits
    if s_aux is not None:
        options["sink"] = as_sink(s_aux)
    if not (q_descale is k_descale is v_descale is None):
        # Of wider tensors they have no meaning; vLLM gives them in any case.
        options |= descales_of(q, k, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if block_table is not None:
        ends = _checked_ends(k, v, block_table, options["cu_seqlens_k"])
        if torch.is_grad_enabled() and requires_any_grad(q, k, v):
            # The backward pass needs rows, and is followed by that of the gathering.
            k, v, options["cu_seqlens_k_padded"] = _gathered(k, v, block_table, ends)
        else:
            options["block_table"] = with_contiguous_rows(block_table)
    try:
        are_rows = q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    except (AttributeError, IndexError, RuntimeError):
        are_rows = False
    if not are_rows:
        q, k, v = [with_contiguous_rows(x) for x in (q, k, v)]
    rng_state = None
    if drop > 0 and with_rng_state and isinstance(q, Tensor):
        rng_state = options["rng_state"] = new_rng_state(q.device)
    if output_scale is None:
        options["out"] = out
    is_all = output_scale is None
    attended, lse = attend_noted(q, k, v, options, return_lse=with_lse, is_all=is_all)
    if output_scale is not None:
        attended = written_to(out, attended, output_scale)
    probabilities = None
    if with_probabilities and rng_state is not None:
        probabilities = signed_probabilities(Arguments.of(q, k, v, options))
    return Attended(attended, lse, probabilities, rng_state)


def _lengths(given: Mapping[str, Any], is_paged: bool) -> Options:
    """Prefix sums and longest lengths as ``fmha_fwd`` takes them; empty in batch mode."""
    if "cu_seqlens" in given:
        sums, longest = given["cu_seqlens"], as_length("max_seqlen", given.get("max_seqlen"))
        require_cu_seqlens(cu_seqlens=sums)
        sums_q, sums_k, longest_q, longest_k = sums, sums, longest, longest
    elif "cu_seqlens_q" in given:
        sums_q, sums_k = given["cu_seqlens_q"], given.get("cu_seqlens_k")
        longest_q = as_length("max_seqlen_q", given.get("max_seqlen_q"))
        longest_k = as_length("max_seqlen_k", given.get("max_seqlen_k"))
    else:
        return {}
    options: Options = {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
    used = given.get("seqused_k")
    if used is not None:
        if not is_paged:
            require_cu_seqlens(cu_seqlens_k=sums_k)
            options["cu_seqlens_k_padded"] = sums_k
        sums_k = sums_of(as_lengths("seqused_k", used))
    require_cu_seqlens(cu_seqlens_q=sums_q, cu_seqlens_k=sums_k)
    options |= {"cu_seqlens_q": sums_q, "cu_seqlens_k": sums_k}
    return options


def _tensors(given: Mapping[str, Any], is_group: bool) -> Iterable[Tensor]:
    """q, k and v, of packed tensors as views."""
    if "qkv" in given:
        return _unpacked("qkv", given["qkv"], is_group)
    if "kv" in given:
        return (given["q"], *_unpacked("kv", given["kv"], is_group))
    return given["q"], given["k"], given["v"]


def _of_latent(q: Tensor, k: Tensor, v: Tensor, q_v: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of which ``q_v`` and v are the first columns, so that v counts as a key."""
    for name, x in (("q", q), ("k", k), ("v", v), ("q_v", q_v)):
        if not isinstance(x, Tensor):
            raise not_a_tensor(name, x)
        if x.dim() < 3:
            raise ValueError(f"{name} is {describe(x)}; expected (..., tokens, heads, hdim)")
    if q_v.shape != (*q.shape[:-1], v.shape[-1]) or q_v.dtype != q.dtype:
        raise ValueError(
            f"q_v is {describe(q_v)}; expected one of {q.dtype} and shape "
            f"{(*q.shape[:-1], v.shape[-1])}, with the hdim of v"
        )
    strides = zip(k.shape, k.stride(), v.stride(), strict=False)
    lies_behind = (
        k.shape[:-1] == v.shape[:-1]
        and all(of_k == of_v for size, of_k, of_v in strides if size > 1)
        and k.data_ptr() == v.data_ptr() + v.shape[-1] * v.element_size()
    )
    if not lies_behind:
        raise NotImplementedError(
            f"q_v ({describe(q_v)}) is served where v and k are the first and the last columns of "
            "one tensor, as those of a latent are"
        )
    width = v.shape[-1] + k.shape[-1]
    return torch.cat([q_v, q], dim=-1), v.as_strided((*v.shape[:-1], width), v.stride())


def _unpacked(name: str, packed: Tensor, is_group: bool) -> tuple[Tensor, ...]:
    """Views of q, k and v, or of k and v, in a tensor whose third last dimension holds them."""
    expected = f"{'total_tokens' if is_group else 'batch, seqlen'}, {len(name)}, heads, hdim"
    if not isinstance(packed, Tensor):
        raise not_a_tensor(name, packed)
    if packed.dim() != expected.count(",") + 1 or packed.shape[-3] != len(name):
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; expected ({expected})")
    return packed.unbind(-3)


def _checked_ends(k: Tensor, v: Tensor, block_table: Tensor, ends: Tensor | None) -> Tensor:
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise ValueError(
                f"{name} is {describe(x)}; with a block_table it is (num_pages, page_size, heads, "
                "hdim)"
            )
    is_table = isinstance(block_table, Tensor) and block_table.dtype == torch.int32
    if not is_table or block_table.dim() != 2:
        raise ValueError(
            f"block_table is {describe(block_table)}; expected int32 (batch, most pages)"
        )
    if not isinstance(ends, Tensor) or ends.shape != (block_table.shape[0] + 1,):
        raise ValueError(
            f"cu_seqlens_k is {describe(ends)}; with a block_table of {block_table.shape[0]} rows "
            f"it has {block_table.shape[0] + 1} entries"
        )
    return ends


def _gathered(
    k: Tensor, v: Tensor, block_table: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of paged sequences as rows, and where each sequence starts in them."""
    num_pages, page_size = k.shape[:2]
    # What a table holds behind the last page of a sequence has no meaning.
    first_keys = torch.arange(block_table.shape[1], device=k.device) * page_size
    pages = block_table.long().where(first_keys < ends.diff()[:, None], 0)
    _check_page_numbers(pages, num_pages)
    starts = starts_in_batch(pages.shape[0], pages.shape[1] * page_size, k.device)
    return k[pages].flatten(0, 2), v[pages].flatten(0, 2), starts


def _check_page_numbers(pages: Tensor, num_pages: int) -> None:
    """Raise ``ValueError`` for pages of a ``block_table`` that k lacks, where they can be read."""
    if not can_be_read(pages) or pages.numel() == 0:
        return
    for number in (int(pages.min()), int(pages.max())):
        if not 0 <= number < num_pages:
            raise ValueError(f"block_table names page {number}; k has {num_pages} pages")
