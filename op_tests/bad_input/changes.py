"""What is done to a valid call: one argument or two become something else, valid or not."""

import enum
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from calls import FRESH, GROUP, Arguments, Draw, Subject, valid_calls
from contract import Call
from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor


class Choice(enum.IntEnum):
    """An int by inheritance."""

    TWO = 2


_HUGE = (2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 2**70, 10**400)
INTEGERS = st.sampled_from(
    (-1, 0, 1, 2, 3, 17, Choice.TWO, -2, -(2**31) - 1, -(2**63), -(2**63) - 1, *_HUGE, -(10**400))
)
NUMBERS = INTEGERS | st.sampled_from(
    (*(0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-50, 1e-46, 1e-40, 3e38, 1e39, 1e308, 5e-324),
     *(math.nan, math.inf, -math.inf, np.float64(0.25), np.float32(0.25), np.int64(1)))
)  # fmt: skip


def _other_things() -> tuple[Any, ...]:
    return (
        *(None, True, False, 0, 1, 2.5, math.nan, 1j, "", "x", "0", "none", b"none", [], [1.0]),
        *((), (1,), (1, 2), (1, 2, 3), {}, {"a": 1}, {1}, object(), int, len, torch.float32),
        *(np.zeros(3), np.zeros((2, 3, 2, 8), np.float32), np.array("rtne"), np.bool_(True)),
        *(torch.zeros(()), torch.ones(2, dtype=torch.int32), torch.tensor(True), torch.Size((2,))),
        *(torch.device("cpu"), torch.Generator(), slice(1)),
    )


THINGS = st.integers(0, len(_other_things()) - 1).map(lambda i: _other_things()[i])
"""Values of any type."""

DTYPES = tuple(
    dtype
    for name in sorted(dir(torch))
    if isinstance(dtype := getattr(torch, name), torch.dtype) and str(dtype) == f"torch.{name}"
)
WINDOWS = (
    st.tuples(INTEGERS, INTEGERS)
    | st.sampled_from((None, 3, "1,2", (), (1,), (1, 2, 3), (1.0, 2), (True, 0), (None, None)))
    | st.sampled_from(([3, 4], [-1, -1], {1, 2}, range(2), (np.int64(1), 2), ("1", "2")))
    | st.just(torch.tensor([1, 2]))
)
MASKS = (
    INTEGERS
    | st.sampled_from(("", "none", "causal", "Causal", "0", "2", "t:", "b:1", "b:1,2,3", "x:1,2"))
    | st.sampled_from(("b:-1,-1", "b:-2,0", "t:0,0", "g:0,1", "g:1,1", "b:1.5,2", "b: 1,2"))
    | st.sampled_from((f"b:{2**63},0", f"t:{2**40},{2**62}", f"b:3,{10**40}", f"g:{2**64},{2**64}"))
    | st.sampled_from((f"b:{'9' * 5000},1", f"b:{-(2**70)},1", "b:٣,٤"))
    | THINGS
)  # fmt: skip

_MOST_ELEMENTS = 1 << 20  # that are written
_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
_TENSORS = (*("q", "k", "v", "kv", "qkv", "out"), *("dout", "lse", "dlse", "dq", "dk", "dv"))
_INPUTS = ("q", "k", "v", "kv", "qkv", "k_cache", "v_cache")
_FLAGS = (
    *("return_lse", "causal", "deterministic", "return_attn_probs", "is_causal", "zero_tensors"),
    *("return_softmax_lse", "return_dropout_randval"),
)
_INTEGERS = (
    *("max_seqlen_q", "max_seqlen_k", "max_seqlen", "min_seqlen_q", "how_v3_bf16_cvt"),
    *("window_size_left", "window_size_right"),
)
_NUMBERS = ("softmax_scale", "dropout_p", "softcap", "logits_soft_cap")
_DESCALES = ("q_descale", "k_descale", "v_descale", "p_descale")


@st.composite
def any_calls(draw: Draw, subject: Subject) -> Call:
    """Valid calls, and as many with one change or two; a change need not break anything."""
    good = draw(valid_calls(subject))
    return Call(subject, draw(changed_calls(good)), good)


@st.composite
def changed_calls(draw: Draw, arguments: Arguments) -> Arguments:
    """The arguments as they are, or with one change or two."""
    for _ in range(draw(st.sampled_from((1, 0, 1, 2, 0, 1, 2)))):
        try:
            if draw(st.integers(0, 3)) == 0:
                arguments = draw(changed_as_a_whole(arguments))
            else:
                name = draw(st.sampled_from(sorted(arguments)))
                arguments = {**arguments, name: draw(changed(name, arguments))}
        except (RuntimeError, TypeError):
            reject()  # torch itself has no such tensor, of a dtype that it knows by name only
    return arguments


@st.composite
def changed(draw: Draw, name: str, arguments: Arguments) -> Any:
    """Another value for one argument."""
    value = arguments[name]
    if name in _TENSORS:
        if value is None:  # no out, until now
            q = arguments.get("q")
            return draw(tensors_like(q) if isinstance(q, Tensor) else THINGS)
        return draw(tensors_like(value) if isinstance(value, Tensor) else THINGS)
    if name.startswith("cu_seqlens"):
        return draw(prefix_sums_like(value) if isinstance(value, Tensor) else THINGS)
    if name in _FLAGS:
        return draw(st.booleans() | THINGS)
    if name in _INTEGERS:
        return draw(INTEGERS | NUMBERS | THINGS)
    if name in _NUMBERS:
        return draw(NUMBERS | THINGS)
    if name == "mask":
        return draw(MASKS)
    if name == "window_size":
        return draw(WINDOWS)
    if name == "bf16_cvt":
        return draw(st.sampled_from(("rtne", "rtna", "rtz", "", "RTNE", b"rtne")) | THINGS)
    if name in _DESCALES:
        return draw(st.sampled_from((None, torch.ones(1), torch.ones(2, 2))) | THINGS)
    return draw(THINGS)


@st.composite
def tensors_like(draw: Draw, x: Tensor) -> Any:
    """A tensor that is not quite `x`, or no tensor at all."""
    change = draw(
        st.sampled_from(("thing", "dtype", "shape", "shape", "memory", "memory", "state"))
    )
    is_odd = x.layout != torch.strided or x.is_quantized  # those may crash torch itself
    if change == "thing" or is_odd or x.numel() > _MOST_ELEMENTS:
        return draw(THINGS)
    if change == "dtype":
        return _as_dtype(x, draw(st.sampled_from(DTYPES)))
    if change == "shape":
        return draw(_reshaped(x))
    if change == "memory":
        return draw(_laid_out_anew(x))
    state = draw(st.sampled_from(("meta", "grad", "sparse", "parameter", "inference", "csr")))
    if state == "meta":
        return x.to("meta")
    if state == "sparse":
        return x.to_sparse() if not x.is_meta and x.is_floating_point() else None
    if state == "csr":
        return torch.eye(3).to_sparse_csr()
    if state == "inference":
        with torch.inference_mode():
            return x.clone()
    if not x.is_floating_point():
        return x
    copy = x.detach().clone()
    return torch.nn.Parameter(copy) if state == "parameter" else copy.requires_grad_()


def _as_dtype(x: Tensor, dtype: torch.dtype) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of complex numbers cast to real ones, and of qint8
            if dtype in (torch.qint8, torch.quint8, torch.qint32):
                return torch.quantize_per_tensor(x.float(), 0.1, 0, dtype)
            if "quint" in str(dtype):
                return None
            try:
                return x.to(dtype)
            except (RuntimeError, TypeError):
                return torch.empty(x.shape, dtype=dtype, device=x.device)
    except (RuntimeError, TypeError, NotImplementedError):
        return None  # torch cannot make such a tensor


@st.composite
def _reshaped(draw: Draw, x: Tensor) -> Tensor:
    change = draw(st.sampled_from(("size", "size", "size", "fewer", "more", "flat", "scalar")))
    if change == "size" and x.dim():
        at = draw(st.integers(0, x.dim() - 1))
        shape = list(x.shape)
        shape[at] = draw(st.sampled_from((0, 1, 2, 7, x.shape[at] + 1, 576, 577, 2**31, 2**62)))
        if math.prod(size or 1 for size in shape) > _MOST_ELEMENTS:
            return _one_row(tuple(shape), x) if shape[-1] < _MOST_ELEMENTS else x
        return _blank(shape, x)
    if change == "fewer" and x.dim() and x.shape[0]:
        return x[0]
    if change == "more":
        return x[None]
    if change == "scalar":
        return _blank((), x)
    return x.reshape(-1)


@st.composite
def _laid_out_anew(draw: Draw, x: Tensor) -> Tensor:
    """The same shape and dtype: columns apart, every row in one place, rows that overlap."""
    change = draw(
        st.sampled_from(("columns", "expanded", "overlapping", "reversed", "copy", "odd"))
    )
    if x.is_meta or x.dim() == 0 or change == "copy":
        return x.clone()
    if change == "columns":
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    if change == "expanded":
        at = draw(st.integers(0, x.dim() - 1))
        return x.narrow(at, 0, 1).expand(x.shape) if x.shape[at] else x
    if change == "reversed":
        return (
            x.permute(*range(x.dim() - 1, -1, -1)).contiguous().permute(*range(x.dim() - 1, -1, -1))
        )
    if change == "odd":  # elements at odd addresses
        storage = bytearray(x.numel() * x.element_size() + 1)
        if x.numel() == 0:
            return x
        return torch.frombuffer(storage, dtype=x.dtype, offset=1).view(x.shape).copy_(x)
    strides = [draw(st.integers(0, 3)) * step for step in x.stride()[:-1]]
    last = draw(st.sampled_from((1, 1, 1, 0, 2)))
    return _strided(x, (*strides, last))


def _strided(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    if x.numel() == 0:
        return x
    reach = sum((size - 1) * step for size, step in zip(x.shape, strides, strict=True))
    if reach > _MOST_ELEMENTS:
        return x
    return torch.zeros(reach + 1, dtype=x.dtype).as_strided(x.shape, strides)


@st.composite
def prefix_sums_like(draw: Draw, x: Tensor) -> Any:
    """Prefix sums that are not quite `x`, or nothing of the kind."""
    change = draw(
        st.sampled_from(("thing", "dtype", "value", "value", "value", "value", "shape", "memory"))
    )
    if change == "thing" or x.dtype != torch.int32 or x.layout != torch.strided or x.dim() != 1:
        return draw(THINGS)
    if change == "dtype":
        return _as_dtype(x, draw(st.sampled_from(DTYPES)))
    if change == "shape":
        other = (x[:0], x[:-1], x[None], x[:, None], torch.cat((x, x[-1:])), x.sum())
        return other[draw(st.integers(0, len(other) - 1))]
    if change == "memory":
        wide = x.repeat_interleave(2)[::2]
        sparse = None if x.is_meta else x.to_sparse()
        other = (wide, x[-1:].expand(len(x)), x.clone(), x.to("meta"), sparse, list(x))
        return other[draw(st.integers(0, len(other) - 1))]
    values = [0, 3] if x.is_meta else x.tolist()
    if values:
        at = draw(st.integers(0, len(values) - 1))
        numbers = (0, 1, -1, values[at] + 1, values[at] - 1, values[-1] + 100, 2**31 - 1, -(2**31))
        values[at] = max(-(2**31), min(2**31 - 1, draw(st.sampled_from(numbers))))
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def changed_as_a_whole(draw: Draw, arguments: Arguments) -> Arguments:
    """Changes of several arguments that fit together."""
    change = draw(
        st.sampled_from(
            ("alias", "meta", "huge", "dtype", "alias", "alias", "no group", "hdim", "rows")
        )
    )
    strided = {
        n: x for n, x in arguments.items() if isinstance(x, Tensor) and x.layout == torch.strided
    }
    if any(x.numel() > _MOST_ELEMENTS for x in strided.values()):
        return arguments
    inputs = {n: x for n, x in strided.items() if n in _INPUTS}
    if change == "meta":
        return arguments | {n: x.to("meta") for n, x in strided.items()}
    if change == "dtype":
        dtype = draw(st.sampled_from(DTYPES))
        return arguments | {n: _as_dtype(x, dtype) for n, x in inputs.items()}
    if change == "no group":
        names = [n for n in arguments if n in (*GROUP, "cu_seqlens", "max_seqlen")]
        kept = draw(st.sampled_from(names)) if names and draw(st.booleans()) else None
        return arguments | {n: None for n in names if n != kept}
    if change == "hdim":
        hdim = draw(st.sampled_from((0, 577, 600)))
        rows = {n: x.shape[:-1] for n, x in inputs.items() if x.dim()}
        return arguments | {n: _one_row((*shape, hdim), inputs[n]) for n, shape in rows.items()}
    if change == "rows":  # of keys alone, or of all; pages may have none
        rows = draw(st.sampled_from((0, 0, 1, 2)))
        some = [n for n in inputs if n != "q" or draw(st.booleans())]
        cut = {n: inputs[n] for n in some if inputs[n].dim() >= 3 and not inputs[n].is_meta}
        return arguments | {n: x.narrow(-3, 0, min(rows, x.shape[-3])) for n, x in cut.items()}
    if change == "huge":
        at = draw(st.integers(0, 2))
        size = draw(st.sampled_from((2**31, 2**40, 2**48, 2**62)))
        some = draw(st.sampled_from((("q",), ("k", "v", "kv"), tuple(inputs))))
        return arguments | {n: _expanded(x, at, size) for n, x in inputs.items() if n in some}
    if "out" in arguments and {"q", "k", "v"} <= inputs.keys():
        return draw(_sharing(arguments, inputs))
    return arguments


def _expanded(x: Tensor, at: int, size: int) -> Tensor:
    if at >= x.dim() - 1:
        return x
    return _one_row((*x.shape[:at], size, *x.shape[at + 1 :]), x)


def _one_row(shape: tuple[int, ...], x: Tensor) -> Tensor:
    """A tensor of any size, all rows of which are one."""
    if math.prod(size or 1 for size in shape) >= 1 << 58:
        return x  # torch has no such tensor
    return _blank((shape[-1],), x).expand(shape)


def _blank(shape: Sequence[int], x: Tensor) -> Tensor:
    """Zeros, where torch can write them."""
    make = torch.zeros if x.dtype in _PLAIN_DTYPES else torch.empty
    return make(shape, dtype=x.dtype, device=x.device)


@st.composite
def _sharing(draw: Draw, arguments: Arguments, inputs: Arguments) -> Arguments:
    """`out` in the memory of an input: the same, from some element on, beside it, row by row."""
    name = draw(st.sampled_from(("q", "k", "v")))
    x, q, v = inputs[name], inputs["q"], inputs["v"]
    if x.is_meta or not (q.dim() and v.dim()) or max(q.numel(), x.numel()) > _MOST_ELEMENTS:
        return arguments | {"out": x}
    shape = (*q.shape[:-1], v.shape[-1])
    how = draw(st.sampled_from(("shifted", "same", "shifted", "interleaved")))
    if how == "interleaved" and x.shape == shape:
        pair = x.new_full((*shape[:-1], 2, shape[-1]), FRESH)
        pair[..., 0, :] = x
        return arguments | {name: pair[..., 0, :], "out": pair[..., 1, :]}
    if how == "shifted":
        room = math.prod(shape)
        start = draw(st.sampled_from((0, 1, room - 1, room)) | st.integers(0, room))
        storage = x.new_full((x.numel() + room,), FRESH)
        start = min(max(start, 0), room)
        moved = storage[start : start + x.numel()].view(x.shape).copy_(x)
        return arguments | {name: moved, "out": storage[:room].view(shape)}
    return arguments | {"out": x}
