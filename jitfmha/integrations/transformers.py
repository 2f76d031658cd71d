"""Attention for Hugging Face's Transformers: ``attn_implementation="jitfmha_flash"``.

:func:`register` adds it. Transformers asks two functions then: one for a model's mask, once in each
forward pass, and one for attention, in each layer. Both are here.

Source: ``masking_utils.py``, ``modeling_utils.py`` and ``integrations/`` of
github.com/huggingface/transformers, version 5.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ..call.interface import OFF, fmha_fwd
from ..flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from ..layers.peer_values import as_length
from ..problem.arguments import Options
from ..problem.checks import describe
from ..problem.mask import OPEN_WINDOW

__all__ = ["NAME", "register"]

# Transformers looks for "flash" in the name; without it, the mask of a static cache would be lost.
NAME = "jitfmha_flash"


def register() -> None:
    """Make ``attn_implementation="jitfmha_flash"`` known to Transformers; once is enough.

    Served are padded batches (a mask of two dimensions, or one of four for anything at all), packed
    sequences (positions that start again, or ``cu_seq_lens_q`` and ``cu_seq_lens_k``), dynamic and
    static caches, sliding windows, soft caps, sinks, position biases, dropout, and gradients of all
    of these. There is no ``output_attentions`` and no continuous batching, and models that do not
    use Transformers' attention interface, such as Bloom and Falcon, are not served: all of these
    raise ``NotImplementedError``.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
    _let_our_name_pass()


@functools.cache  # once in a process
def _let_our_name_pass() -> None:
    """Transformers checks names, and takes every other one with "flash" for a download."""
    check = PreTrainedModel._check_and_adjust_attn_implementation

    @functools.wraps(check)
    def checked(
        model: PreTrainedModel, attn_implementation: str | None, *others: object, **named: object
    ) -> str:
        if attn_implementation != NAME:
            try:
                name: str = check(model, attn_implementation, *others, **named)
            except ValueError as error:
                # It lists the names that Transformers has by itself.
                raise ValueError(f"{error} There is {NAME!r}, too, which jitfmha added.") from error
            return name
        if not _asks_for_attention(type(model)):
            raise NotImplementedError(
                f"{type(model).__name__} computes attention by itself, not through Transformers' "
                f"attention interface; attn_implementation={NAME!r} would change nothing"
            )
        return NAME

    PreTrainedModel._check_and_adjust_attn_implementation = checked
    is_flash = masking_utils.is_flash_attention_requested

    @functools.wraps(is_flash)
    def is_without_chunks(config: Any = None, *others: object, **named: object) -> bool:
        # Masks are made by this question's answer in one place: chunks, as Llama 4 has them, are
        # refused. `attention_mask` has them written out.
        is_ours = config is not None and config._attn_implementation == NAME
        return not is_ours and bool(is_flash(config, *others, **named))

    masking_utils.is_flash_attention_requested = is_without_chunks


def _asks_for_attention(model: type) -> bool:
    """Whether a model has no attention class of its own, or one that uses the interface.

    Transformers itself reads the source to find out; a model without one is believed.
    """
    try:
        source = inspect.getsource(sys.modules[model.__module__])
    except (KeyError, OSError, TypeError):
        return True
    has_attention = re.search(r"^class \w*Attention\w*\(nn\.Module\)", source, re.MULTILINE)
    return has_attention is None or "ALL_ATTENTION_FUNCTIONS" in source


# ---- The mask of a forward pass ------------------------------------------------------------------

# The names of the variables in the functions of which Transformers composes those masks that
# `attention` knows by itself. Anything else, also of a later version, is written out as a mask.
_UNDERSTOOD = {
    "mask_functions",
    "mask_function",
    "sliding_window",
    "packed_sequence_mask",
    "position_ids",
}


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """The mask of a forward pass, as little of it as :func:`attention` needs.

    Args:
        batch_size, q_length, kv_length: of the queries, and of the keys that the cache will return.
        q_offset, kv_offset: positions of the first query and of the first key; that of a query is a
            tensor where the cache is static.
        mask_function: which key a query sees, by indices.
        attention_mask: bool ``(b, positions)``, False being padding.
        use_vmap: that a model brings a mask function of its own.

    Returns:
        None where there is nothing but the causal mask, the window and the packing, which
        ``attention`` finds among its own arguments; bool ``(b, keys)`` for padding, with fewer keys
        than the static cache where those behind are empty; or bool ``(b, 1, sq, sk)`` for
        everything.
    """
    parts = tuple(_parts_of(mask_function))
    is_traced = torch.compiler.is_compiling()
    is_understood = not use_vmap and all(
        set(part.__code__.co_freevars) <= _UNDERSTOOD for part in parts
    )
    if isinstance(q_offset, Tensor) and (q_length == 1 or is_traced):
        # A step of decoding from a static cache keeps the shapes of the step before, and nothing
        # reads the position.
        is_understood = False
    if not is_understood:
        written_out: Tensor = sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        return written_out
    seen = kv_length
    if causal_mask_function in parts:
        # What a static cache has behind the queries is empty.
        seen = min(kv_length, int(q_offset) + q_length - kv_offset)
    if attention_mask is None:
        is_seen = torch.ones(batch_size, seen, dtype=torch.bool, device=device)
        return None if seen == kv_length else is_seen
    # Positions behind the mask are padding, as in Transformers' own masks.
    missing = max(0, seen - attention_mask.shape[1])
    attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    # Generation comes twice in a step, the second time with what it got the first time.
    was_cut = attention_mask.shape[1] < kv_offset + seen
    first = attention_mask.shape[1] - seen if was_cut else kv_offset
    keys = attention_mask[:, first : first + seen]
    if not is_traced and seen == kv_length and keys.all():
        return None
    return keys


def _parts_of(function: object) -> Iterator[FunctionType]:
    """A function, and those among the values that it has enclosed, however deep."""
    if isinstance(function, tuple):
        for one in function:
            yield from _parts_of(one)
    elif isinstance(function, FunctionType):
        yield function
        for cell in function.__closure__ or ():
            yield from _parts_of(cell.cell_contents)


# ---- The attention of a layer --------------------------------------------------------------------


class Packing(NamedTuple):
    """How sequences lie one after the other, as ``fmha_fwd`` takes it."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attention of a layer, as Transformers asks for it.

    Args:
        query: ``(b, hq, sq, hdim)``; key: ``(b, hk, sk, hdim)``; value: ``(b, hk, sk, hdim_v)``.
        attention_mask: what the function of this name returned; or a mask of four dimensions, bool
            or added to the scores, which then says everything about which key is seen.
        sliding_window: how many keys a query sees, itself included; without the causal mask, also
            to its right.
        is_causal: that of the module by default. The mask is aligned to the bottom-right corner.
        s_aux: ``(hq,)``, the sinks.
        position_bias: ``(1 or b, hq, sq, sk)``, added to the scores.
        position_ids: ``(1 or b, sq)``: where they do not go up by one, another sequence starts.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: prefix sums of the lengths of
            packed sequences, and the longest ones.

    Returns:
        ``(b, sq, hq, hdim_v)``, and None in the place of probabilities.

    Raises:
        NotImplementedError: an argument asks for what is not served.
        TypeError, ValueError: what :func:`jitfmha.fmha_fwd` says of the tensors.
    """
    _refuse_what_is_not_served(others)
    q, k, v = _of_one_dtype(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    options: Options = {
        "softmax_scale": scaling,
        "logit_softcap": softcap or OFF,
        "sink": None if s_aux is None else s_aux.float(),
        "dropout_p": dropout or OFF,
    }
    is_whole = attention_mask is not None and attention_mask.dim() == 4
    if not is_whole:
        if attention_mask is not None:
            # The rest of a static cache is empty.
            k, v = (x[:, : attention_mask.shape[1]] for x in (k, v))
        # A single query is the last one, which sees all keys.
        options["mask"] = 2 if is_causal and q.shape[1] > 1 else 0
        options["window_size"] = _window(sliding_window, k.shape[1], is_causal)
    if attention_mask is None:
        packing = _given_packing(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        packing = packing or _packing_of_positions(position_ids, q, k)
        if packing is not None:
            _refuse_with_packing(position_bias)
            out = _attend_packed(
                q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), packing, options
            )
            return out.view(*q.shape[:3], -1), None
    elif not is_whole and is_causal and position_bias is None and _is_square(q, k):
        return _without_padding(q, k, v, attention_mask, options), None
    options["bias"] = _bias(attention_mask, position_bias, q.dtype, k.shape[1])
    return fmha_fwd(q, k, v, **options), None


def _refuse_what_is_not_served(others: dict[str, object]) -> None:
    """Refuse what would change the result; most of what models pass would not."""
    if others.get("output_attentions"):
        raise NotImplementedError(
            'output_attentions=True: no probabilities are kept; use attn_implementation="eager"'
        )
    for name in ("cache", "block_table", "block_indices", "indices", "head_mask"):
        if others.get(name) is not None:
            raise NotImplementedError(
                f"{name} ({type(others[name]).__name__}) is not served by {NAME!r}"
            )


def _refuse_with_packing(position_bias: Tensor | None) -> None:
    if position_bias is not None:
        raise NotImplementedError(
            f"position_bias ({describe(position_bias)}) is not served with packed sequences"
        )


def _of_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Norms and rotary embeddings in float32 leave queries and keys in it beside other values."""
    dtype = v.dtype
    if torch.is_autocast_enabled(v.device.type):
        dtype = torch.get_autocast_dtype(v.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _window(sliding_window: int | None, seqlen_k: int, is_causal: bool) -> tuple[int, int]:
    if sliding_window is None or sliding_window >= seqlen_k:
        return OPEN_WINDOW
    return sliding_window - 1, 0 if is_causal else sliding_window - 1


def _bias(
    mask: Tensor | None, position_bias: Tensor | None, dtype: torch.dtype, seqlen_k: int
) -> Tensor | None:
    """The mask, if any, and the position bias, if any, as one bias in four dimensions."""
    if mask is not None:
        mask = mask[:, None, None] if mask.dim() == 2 else mask[..., :seqlen_k]
    if position_bias is None:
        return mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    position_bias = position_bias[..., :seqlen_k].to(dtype)
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, -torch.inf)
    return position_bias + mask


def _given_packing(
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
    max_length_q: int | Tensor | None,
    max_length_k: int | Tensor | None,
) -> Packing | None:
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        return None
    return Packing(
        cu_seq_lens_q.int(),
        cu_seq_lens_k.int(),
        as_length("max_length_q", max_length_q),
        as_length("max_length_k", max_length_k),
    )


def _packing_of_positions(position_ids: Tensor | None, q: Tensor, k: Tensor) -> Packing | None:
    """The packing of rows with several sequences, as Transformers' own masks find them."""
    batch, seqlen = q.shape[:2]
    if position_ids is None or seqlen == 1 or k.shape[1] != seqlen:
        return None
    if position_ids.shape not in ((batch, seqlen), (1, seqlen)):
        return None
    is_start = torch.nn.functional.pad(position_ids.diff() != 1, (1, 0), value=False)
    if not is_start.any():
        return None
    is_start = is_start.expand(batch, seqlen).clone()
    is_start[:, 0] = True
    starts = is_start.flatten().nonzero()[:, 0]
    cu_seqlens = torch.nn.functional.pad(starts, (0, 1), value=batch * seqlen).int()
    return Packing(cu_seqlens, cu_seqlens, None, None)


def _is_square(q: Tensor, k: Tensor) -> bool:
    """Whether queries are the keys' own tokens, which with a causal mask they are.

    Nothing that torch.compile traces asks how many tokens there are.
    """
    return q.shape[1] == k.shape[1] > 1 and not torch.compiler.is_compiling()


def _without_padding(q: Tensor, k: Tensor, v: Tensor, is_token: Tensor, options: Options) -> Tensor:
    """Attention of the tokens alone, one sequence after the other; 0 where there is padding."""
    packed_q, places, cu_seqlens, max_seqlen, _ = unpad_input(q, is_token)
    packed_k, packed_v = (index_first_axis(x.flatten(0, 1), places) for x in (k, v))
    packing = Packing(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    out = _attend_packed(packed_q, packed_k, packed_v, packing, options)
    return pad_input(out, places, *q.shape[:2])


def _attend_packed(q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: Options) -> Tensor:
    options["cu_seqlens_q"], options["cu_seqlens_k"] = packing.cu_seqlens_q, packing.cu_seqlens_k
    options["max_seqlen_q"], options["max_seqlen_k"] = packing.max_seqlen_q, packing.max_seqlen_k
    return fmha_fwd(q, k, v, **options)
