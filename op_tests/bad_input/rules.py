"""The rules of `fmha_fwd` from its docstring, once more: which arguments break one."""

import math
import re
from itertools import pairwise
from typing import Any

import torch
from calls import GROUP, Arguments, is_int, is_number, is_window_size
from torch import Tensor

EIGHT_BITS = (
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    torch.int8,
)
_SERVED = (torch.float32, torch.bfloat16, torch.float16, *EIGHT_BITS)
_MASK_TEXT = re.compile(r"([tbg]):(-?\d{1,100}),(-?\d{1,100})")
_STARTS = {"cu_seqlens_q": "cu_seqlens_q_padded", "cu_seqlens_k": "cu_seqlens_k_padded"}
_MOST_INDICES = 1 << 22


def broken_rules(
    call: Arguments, *, explains: bool = False, reads_lengths: bool = True
) -> set[str]:
    """The names of all arguments that break a rule, alone or together with others.

    `explains`: of `explain`, which reads no data, runs nothing and so asks for less.
    `reads_lengths`: False on a GPU, which does not look at the values of `cu_seqlens`.
    """
    broken = broken_numbers(call) | _broken_tensors(call) | _broken_group(call)
    if broken & {"q", "k", "v"}:
        tensors = [call[name] for name in ("q", "k", "v")]
        if all(isinstance(x, Tensor) and x.layout == torch.strided and x.dim() for x in tensors):
            broken |= _broken_out(call, explains)  # may be what is told first
        return broken
    broken |= _broken_shapes(call) | _broken_out(call, explains)
    if explains and call["q"].is_meta:
        broken.add("q")  # a target that does not exist
    if not explains and reads_lengths and not broken & {"q", "k", *GROUP}:
        broken |= _broken_lengths(call)
    return broken


def is_group(call: Arguments) -> bool:
    return any(call[name] is not None for name in GROUP)


def broken_numbers(call: Arguments) -> set[str]:
    """What is wrong with the arguments that are no tensors."""
    broken = set()
    scale = call["softmax_scale"]
    if scale is not None and not (is_number(scale) and 0 < _as_float32(scale) < math.inf):
        broken.add("softmax_scale")
    if not is_window_size(call["window_size"]):
        broken.add("window_size")
    if not isinstance(call["return_lse"], bool):
        broken.add("return_lse")
    if not (isinstance(call["bf16_cvt"], str) and call["bf16_cvt"] in ("rtne", "rtna", "rtz")):
        broken.add("bf16_cvt")
    mask = call["mask"]
    if isinstance(mask, str) and (text := _MASK_TEXT.fullmatch(mask)):
        if "window_size" not in broken and tuple(call["window_size"]) != (-1, -1):
            broken |= {"mask", "window_size"}
        if min(int(text[2]), int(text[3])) < (1 if text[1] == "g" else -1):
            broken.add("mask")
    elif isinstance(mask, str):
        if mask not in ("none", "causal", "t", "b"):
            broken.add("mask")
    elif not (is_int(mask) and mask in (0, 1, 2)):
        broken.add("mask")
    return broken


def _as_float32(value: Any) -> float:
    try:
        return float(torch.tensor(float(value), dtype=torch.float32))
    except OverflowError:
        return math.inf


def _broken_tensors(call: Arguments) -> set[str]:
    """What is wrong with q, k, v and scales before their shapes are looked at."""
    broken = set()
    q = call["q"]
    for name in ("q", "k", "v"):
        x = call[name]
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            broken.add(name)
            continue
        if x.dtype not in _SERVED:
            broken.add(name)
        if not isinstance(q, Tensor):
            continue
        has_8_bits_alone = name != "q" and x.dtype in EIGHT_BITS and q.dtype not in EIGHT_BITS
        if (x.dtype != q.dtype and not has_8_bits_alone) or x.device != q.device:
            broken |= {name, "q"}
    k, v = call["k"], call["v"]
    if isinstance(k, Tensor) and isinstance(v, Tensor) and k.dtype != v.dtype:
        broken |= {"k", "v"}
    scaled = {"q_descale": q, "k_descale": k, "v_descale": v, "p_descale": q}
    for name, of in scaled.items():
        if call[name] is not None and not _is_descale(name, of, call):
            broken.add(name)
    return broken


def _is_descale(name: str, of: Any, call: Arguments) -> bool:
    """Whether a scale fits the tensor that it belongs to, which is of 8 bits."""
    x, k = call[name], call["k"]
    if not all(isinstance(y, Tensor) and y.dim() >= 3 for y in (of, k)):
        return False
    if of.dtype not in ((torch.int8,) if name == "p_descale" else EIGHT_BITS):
        return False
    if not isinstance(x, Tensor) or (x.dtype, x.device) != (torch.float32, of.device):
        return False
    ends = call["cu_seqlens_q"]
    batch = len(ends) - 1 if isinstance(ends, Tensor) and ends.dim() else of.shape[0]
    of_tokens = (*of.shape[:-1], 1)
    if name in ("k_descale", "v_descale") and x.shape == of_tokens:
        return name == "k_descale" or call["p_descale"] is None
    return x.shape in ((1,), (of.shape[-2],), (batch, k.shape[-2]))


def _broken_group(call: Arguments) -> set[str]:
    """What is wrong with the arguments of gm1, apart from the values in them."""
    if not is_group(call):
        return set()
    ends = {n: call[n] for n in ("cu_seqlens_q", "cu_seqlens_k")}
    if all(x is None for x in ends.values()):
        return {n for n in GROUP if call[n] is not None}
    broken = {n for n, x in ends.items() if x is None}
    for name in ("max_seqlen_q", "max_seqlen_k"):
        longest = call[name]
        if longest is not None and not (is_int(longest) and 0 <= longest < 2**63):
            broken.add(name)
    for name in GROUP:
        x = call[name]
        if name.startswith("max") or x is None:
            continue
        if (
            not isinstance(x, Tensor)
            or x.layout != torch.strided
            or x.dtype != torch.int32
            or x.dim() != 1
            or x.numel() < 1
            or (x.numel() > 1 and x.stride(0) != 1)
            or (isinstance(call["q"], Tensor) and x.device != call["q"].device)
        ):
            broken.add(name)
    counts = {n: call[n].numel() for n in GROUP if isinstance(call[n], Tensor)}
    if len(set(counts.values())) > 1:
        broken |= set(counts)
    return broken


def _broken_shapes(call: Arguments) -> set[str]:
    """Whether q, k and v fit each other. They are dense tensors of one dtype on one device."""
    q, k, v = call["q"], call["k"], call["v"]
    broken = set()
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != (3 if is_group(call) else 4):
            broken.add(name)
    if broken:
        return broken
    if not is_group(call) and len({x.shape[0] for x in (q, k, v)}) > 1:
        broken |= {"q", "k", "v"}
    if k.shape[:-1] != v.shape[:-1]:
        broken |= {"k", "v"}
    if q.shape[-1] != k.shape[-1]:
        broken |= {"q", "k"}
    heads_q, heads_k = q.shape[-2], k.shape[-2]
    if heads_q != 0 and (heads_k == 0 or heads_q % heads_k):
        broken |= {"q", "k"}
    for name, x in (("q", q), ("k", k), ("v", v)):
        is_row_major = x.shape[-1] <= 1 or x.stride(-1) == 1
        is_column_major = name == "v" and (x.shape[-3] <= 1 or x.stride(-3) == 1)
        if not 1 <= x.shape[-1] <= 576 or not (is_row_major or is_column_major):
            broken.add(name)
    return broken


def _broken_out(call: Arguments, explains: bool) -> set[str]:
    out, q, v = call["out"], call["q"], call["v"]
    if out is None:
        return set()
    if not isinstance(out, Tensor) or out.layout != torch.strided:
        return {"out"}
    is_wider = q.dtype in EIGHT_BITS and out.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if (
        not (is_wider or out.dtype == q.dtype not in EIGHT_BITS)
        or out.device != q.device
        or q.dim() != v.dim()
        or out.shape != (*q.shape[:-1], v.shape[-1])
        or (out.shape[-1] > 1 and out.stride(-1) != 1)
    ):
        return {"out"}
    asking = {name for name in ("q", "k", "v", "out") if call[name].requires_grad}
    if not explains and asking and torch.is_grad_enabled():
        return {"out", *asking}
    mine = places_of(out)
    if len(mine) < out.numel() * out.element_size() or is_interleaved(out):
        return {"out"}
    if explains or out.is_meta:
        return set()
    is_shared = any(not mine.isdisjoint(places_of(call[n])) for n in ("q", "k", "v"))
    return {"out"} if is_shared else set()


def is_interleaved(x: Tensor) -> bool:
    """Rows between each other's elements count as overlapping, even where they do not."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and x.numel():
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def places_of(x: Tensor) -> set[int]:
    """The addresses of all bytes of all elements."""
    if x.numel() == 0:
        return set()
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if stride != 0 and size > 1:
            offsets = offsets[..., None] + torch.arange(size) * stride
    assert offsets.numel() <= _MOST_INDICES
    start = 0 if x.is_meta else x.data_ptr()
    places = start + offsets.flatten() * x.element_size()
    return set((places[:, None] + torch.arange(x.element_size())).flatten().tolist())


def _broken_lengths(call: Arguments) -> set[str]:
    """What is wrong with the values in `cu_seqlens`."""
    if not is_group(call) or call["q"].is_meta:
        return set()
    broken = set()
    for side in ("q", "k"):
        name = f"cu_seqlens_{side}"
        ends = call[name].tolist()
        lengths = [b - a for a, b in pairwise(ends)]
        if ends[0] != 0 or min(lengths, default=0) < 0:
            broken.add(name)
        longest = call[f"max_seqlen_{side}"]
        if longest is not None and longest < max(lengths, default=0):
            broken |= {f"max_seqlen_{side}", name}
        starts = call[_STARTS[name]]
        if starts is None:
            if ends[-1] > call[side].shape[0]:
                broken |= {name, side}
            continue
        places = starts.tolist()
        room = [b - a for a, b in pairwise(places)]
        if (
            places[0] != 0
            or min(room, default=0) < 0
            or any(have < need for have, need in zip(room, lengths, strict=True))
            or places[-1] > call[side].shape[0]
        ):
            broken |= {name, _STARTS[name]}
    return broken
