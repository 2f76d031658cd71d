"""``torch.nn.functional.scaled_dot_product_attention`` by kernels of this package.

>>> import jitfmha.integrations.sdpa
>>> with jitfmha.integrations.sdpa.patch():
...     model(batch)

A call is routed when the dispatch that ``jitfmha.explain`` shows has a kernel for it, and for its
backward pass where autograd will want one. Every other call goes to torch as it came.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import handle_torch_function, has_torch_function

from ..call.detection import target_of
from ..call.dispatch import explain_problem
from ..call.interface import OFF, fmha_fwd
from ..call.pytorch.autocast import dtype_of_region, under_autocast
from ..call.pytorch.autograd import backward_of
from ..call.run import prepared_call
from ..kernels.modifiers import packed_tensors
from ..planning.plan import Launch
from ..planning.target import TARGET_HERE, CpuTarget
from ..problem.arguments import Arguments, Tensors, new_tuple
from ..problem.checks import requires_any_grad
from ..problem.memory import request_huge_pages
from ..problem.problem import make_problem
from ..problem.score_features import Modifiers
from ..problem.torch_parts import (
    functorch_level,
    has_forward_mode,
    is_any_autocast_enabled,
    is_flash_enabled,
    is_function_mode_asked,
    is_watched,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_TOP_LEFT_CAUSAL = 1  # torch's is_causal
_MOST_KNOWN = 1024
# What every call asks: a name of this module takes less time than a path through torch.
_empty_like = torch.empty_like
_is_grad_enabled = torch.is_grad_enabled
_changing = Lock()  # of torch's name for the function
_torch: Any = F


class Route(NamedTuple):
    """Where a call goes, to this package or to torch, and why.

    Attributes:
        reasons: why torch serves it; empty where this package does.
    """

    reasons: tuple[str, ...]

    @property
    def is_ours(self) -> bool:
        return not self.reasons


_TYPES: dict[str, tuple[type, ...]] = {
    "dropout_p": (int, float),
    "is_causal": (bool,),
    "scale": (int, float, type(None)),
    "enable_gqa": (bool,),
}


class _Call(NamedTuple):
    """The arguments of ``scaled_dot_product_attention``, by position or by name."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


class _Translated(NamedTuple):
    """The call as one of ``fmha_fwd``, but for dropout and the causal mask.

    Attributes:
        lead: the sizes of the result before seqlen and hdim.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    scale: float | None
    lead: tuple[int, ...]


class Patch:
    """The replaced function, until :meth:`undo`; also a context manager, which undoes it."""

    def __init__(self, original: Callable[..., Tensor]) -> None:
        self._ours = _Routing(original)
        _torch.scaled_dot_product_attention = self._ours

    def undo(self) -> None:
        """Put back what was there before; nothing where that has happened already.

        Raises ``RuntimeError`` where somebody has replaced the function since.
        """
        if self._ours.is_applied and not self._ours.undo():
            found = F.scaled_dot_product_attention
            raise RuntimeError(
                f"torch.nn.functional.scaled_dot_product_attention is {found!r}, which was put "
                "there after jitfmha's patch; undo that one first"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


def patch() -> Patch:
    """Route supported calls of ``torch.nn.functional.scaled_dot_product_attention`` to our kernels.

    It takes effect at once, and until ``undo()`` of what is returned, or until the end of a
    ``with`` block. Names that were bound before, as by ``from torch.nn.functional import
    scaled_dot_product_attention``, keep torch's function.

    Routed are calls of plain tensors ``(..., heads, seqlen, hdim)`` with any number of dimensions,
    which are broadcast as torch does it, with ``attn_mask`` (bool, float32 or of the query's
    dtype), ``dropout_p``, ``is_causal``, ``scale`` and ``enable_gqa``; under ``torch.autocast``
    after its casts. :func:`explain` says of a call where it goes. Torch's ``CausalBias`` ends in
    such calls, too. To torch go those in compiled code, with other tensor subclasses, under a
    ``TorchFunctionMode``, under a transform of ``torch.func`` or in forward mode, and all where its
    flash attention is switched off, as by ``sdpa_kernel``.

    What is different: which probabilities dropout drops; the output, a view of
    ``(batch, seqlen, heads, hdim)``; and a second derivative, which raises ``NotImplementedError``.
    """
    return Patch(F.scaled_dot_product_attention)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Route:
    """Where a call of ``scaled_dot_product_attention`` with these arguments goes under the patch.

    Builds and launches nothing.
    """
    call = _Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    reason = _reason_of_surroundings(call)
    if reason is not None:
        return Route((reason,))
    translated = _translated(call)
    return Route((translated,)) if isinstance(translated, str) else _route(call, translated)


class _Routing:
    """The function that takes the place of ``original``, with its signature.

    Tensor subclasses and modes tell functions apart: by the name in ``torch.nn.functional``, by one
    that was bound before or after the patch, or by a table. So this is equal to ``original``, and
    steps aside where they are asked.
    """

    def __init__(self, original: Callable[..., Tensor]) -> None:
        functools.update_wrapper(self, original)
        self.is_applied = True
        self._original = original
        self._steps_aside = 0

    def undo(self) -> bool:
        """Put ``original`` back; False where somebody has replaced the function since."""
        with _changing:
            expected = self._original if self._steps_aside else self
            if _torch.scaled_dot_product_attention is not expected:
                return False
            _torch.scaled_dot_product_attention = self._original
            self.is_applied = False
            return True

    @contextmanager
    def _aside(self) -> Iterator[None]:
        with _changing:
            self._steps_aside += 1
            if _torch.scaled_dot_product_attention is self:
                _torch.scaled_dot_product_attention = self._original
        try:
            yield
        finally:
            with _changing:
                self._steps_aside -= 1
                is_aside = _torch.scaled_dot_product_attention is self._original
                if self.is_applied and is_aside and not self._steps_aside:
                    _torch.scaled_dot_product_attention = self

    def __eq__(self, other: object) -> bool:
        return self is other or self._original == other

    def __hash__(self) -> int:
        return hash(self._original)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        others = () if attn_mask is None else (attn_mask,)
        is_plain = (
            dropout_p == 0
            and type(is_causal) is type(enable_gqa) is bool
            and (scale is None or type(scale) is float)
            and not is_watched(query, key, value, *others)
            and not is_any_autocast_enabled()
            and not is_function_mode_asked()
            and is_flash_enabled()
            and not (_is_grad_enabled() and requires_any_grad(query, key, value, attn_mask))
        )
        known = None
        if is_plain:
            try:
                known = _known_calls.get(
                    _key_of(query, key, value, attn_mask, is_causal, scale, enable_gqa, None)
                )
            except RuntimeError:
                known = None  # without strides
            if known is not None and known.prepared is not None:
                return _run(known.prepared, query, key, value, attn_mask)
        call = _Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        is_compiling = torch.compiler.is_compiling()
        if known is None and not is_compiling and _reason_of_surroundings(call) is None:
            known = _known(call, is_plain)
        if known is not None and known.route.is_ours:
            return _attend(call)
        if has_torch_function(call[:4]) and not (is_compiling and query.is_nested):
            if is_compiling or isinstance(attn_mask, CausalBias):
                # It knows the name of today, and what it calls in turn is routed.
                return handle_torch_function(
                    self, call[:4], *call[:6], scale=scale, enable_gqa=enable_gqa
                )
            with self._aside():
                return self._original(*call[:6], scale=scale, enable_gqa=enable_gqa)
        return self._original(*call[:6], scale=scale, enable_gqa=enable_gqa)


def _attend(call: _Call) -> Tensor:
    translated = _translated(call)
    assert not isinstance(translated, str), translated
    found: Tensor = fmha_fwd(*translated[:3], **_options(call, translated))
    out = found.transpose(1, 2)
    lead = translated.lead
    return out if len(lead) == 2 else out.view(*lead, *out.shape[2:])


def _options(call: _Call, translated: _Translated) -> dict[str, Any]:
    """The options of ``fmha_fwd``."""
    return {
        "mask": _TOP_LEFT_CAUSAL if call.is_causal else 0,
        "softmax_scale": translated.scale,
        "bias": translated.bias,
        "dropout_p": call.dropout_p or OFF,
    }


def _reason_of_surroundings(call: _Call) -> str | None:
    """Why torch serves a call whatever its sizes and options are; None where there is no reason."""
    for name, types in _TYPES.items():
        option = getattr(call, name)
        if not isinstance(option, types):
            return f"{name} is a {type(option).__name__}, which torch refuses or converts"
    tensors = [call.query, call.key, call.value]
    if call.attn_mask is not None:
        tensors.append(call.attn_mask)
    for x in tensors:
        if type(x) not in (Tensor, torch.nn.Parameter) or x.is_nested:
            return f"an argument is a {type(x).__name__}, or nested: no plain tensor"
        if x.layout != torch.strided:
            return f"an argument has the layout {x.layout}"
    if is_function_mode_asked():
        return "a TorchFunctionMode is in effect"
    if functorch_level() is not None or has_forward_mode():
        return "a transform of torch.func or forward mode is in effect"
    if not is_flash_enabled():
        return "torch's flash attention is switched off, as by torch.nn.attention.sdpa_kernel"
    if call.attn_mask is not None and call.attn_mask.dim() < 2:
        return f"attn_mask has shape {tuple(call.attn_mask.shape)}; it needs (..., seqlen, seqlen)"
    if call.attn_mask is not None and call.is_causal:
        return "attn_mask and is_causal=True exclude each other"
    if _wants_gradients((call.attn_mask,)) and 0 in (x.numel() for x in call[:3]):
        return "there is nothing to attend to, where torch gives attn_mask no gradient"
    return None


def _translated(call: _Call) -> _Translated | str:
    """The call translated, or why torch serves it."""
    q, k, v, mask = call[:4]
    lead: tuple[int, ...] = q.shape[:-2]
    is_plain = q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0]
    if not (is_plain and (call.enable_gqa or q.shape[1] == k.shape[1] == v.shape[1])):
        try:
            q, k, v, mask, lead = _in_four_dimensions(call)
        except (RuntimeError, IndexError) as error:
            return f"query, key, value and attn_mask do not fit together: {error}"
    bias = None if mask is None else _as_bias(mask, k.shape[2])
    scale = None if call.scale is None else float(call.scale)
    return _Translated(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias, scale, lead)


def _in_four_dimensions(
    call: _Call,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[int, ...]]:
    """query, key, value and attn_mask, broadcast as torch does it, with one dimension of batches.

    Up to three dimensions are taken for those of one head, so that the result is contiguous as
    torch's is; with enable_gqa the third is of heads.
    The last value has the sizes of the result before seqlen and hdim.
    """
    q, k, v, mask = call[:4]
    if call.enable_gqa:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in call[:3]))
        lead = (*batch, q.shape[-3])
        heads = [x.shape[-3] for x in (q, k, v)]
    else:
        lead = tuple(torch.broadcast_shapes(*(x.shape[:-2] for x in call[:3])))
        if len(lead) < 2:
            q, k, v = (x.unsqueeze(-3) for x in (q, k, v))
            mask = None if mask is None else mask.unsqueeze(-3)
        batch, most = (lead[:-1], lead[-1]) if len(lead) > 1 else (lead, 1)
        # Keys and values of one head are shared, as with enable_gqa.
        shares = all(x.dim() < 3 or x.shape[-3] == 1 for x in (k, v))
        heads = [most, *([1 if shares else most] * 2)]
    number = math.prod(batch)
    q, k, v = (
        x.expand(*batch, n, *x.shape[-2:]).reshape(number, n, *x.shape[-2:])
        for x, n in zip((q, k, v), heads, strict=True)
    )
    if mask is not None:
        own = (1,) * (3 - mask.dim()) + tuple(mask.shape[-3:])
        is_same = math.prod(mask.shape[:-3]) == 1 and mask.dim() <= len(batch) + 3
        mask = mask.reshape(1, *own) if is_same else mask.expand(*batch, *own).reshape(number, *own)
    return q, k, v, mask, lead


def _as_bias(attn_mask: Tensor, seqlen_k: int) -> Tensor:
    """A view with four dimensions, of which the last is as long as the keys."""
    missing = 4 - attn_mask.dim()
    bias = attn_mask[(None,) * missing] if missing > 0 else attn_mask
    return bias.expand(*bias.shape[:-1], seqlen_k) if bias.shape[-1] == 1 else bias


class _Prepared(NamedTuple):
    """A call of which nothing is left but to allocate the output and to launch the kernel.

    Attributes:
        is_like_query: whether ``empty_like`` of the query lies as the output does.
        shape, strides: of the output, a view of ``(batch, seqlen, heads, hdim)``.
    """

    launch: Launch
    is_like_query: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    wants_huge_pages: bool


class _Known(NamedTuple):
    """What is known of calls that are alike."""

    route: Route
    prepared: _Prepared | None


_known_calls: dict[Hashable, _Known] = {}


def _key_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    surroundings: tuple[object, ...] | None,
) -> Hashable:
    """What calls are alike in; ``surroundings`` are None where they are those of a plain call.

    Such a call has plain tensors, none of which asks for gradients, and no dropout, and neither
    autocast nor anything that watches calls is in effect.
    """
    # Written out: nested tuples and a loop over the tensors would take 1 us longer.
    return (
        query.shape,
        query.stride(),
        query.dtype,
        query.device,
        key.shape,
        key.stride(),
        key.dtype,
        key.device,
        value.shape,
        value.stride(),
        value.dtype,
        value.device,
        None
        if attn_mask is None
        else (attn_mask.shape, attn_mask.stride(), attn_mask.dtype, attn_mask.device),
        is_causal,
        scale,
        enable_gqa,
        surroundings,
        TARGET_HERE.get(),
    )


def _known(call: _Call, is_plain: bool) -> _Known:
    """Look up what is known of the call, or find it out."""
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = call
    surroundings = None
    if not is_plain:
        dtype = dtype_of_region(query) if is_any_autocast_enabled() else None
        surroundings = dropout_p, _wants_gradients(call[:4]), dtype
    number = None if scale is None else float(scale)
    options = bool(is_causal), number, bool(enable_gqa)
    looked_up = _key_of(query, key, value, attn_mask, *options, surroundings)
    known = _known_calls.get(looked_up)
    if known is None:
        translated = _translated(call)
        if isinstance(translated, str):
            known = _Known(Route((translated,)), None)
        else:
            route = _route(call, translated)
            is_prepared = is_plain and route.is_ours
            known = _Known(route, _prepared(call, translated) if is_prepared else None)
        if len(_known_calls) >= _MOST_KNOWN:
            _known_calls.clear()
        _known_calls[looked_up] = known
    return known


def _prepared(call: _Call, translated: _Translated) -> _Prepared | None:
    """Prepare a plain call whose launch can have the tensors as they came; None for others.

    That is so on the CPU, where launches read nothing of q, k, v and out but their addresses, and
    of a bias its strides, which may be those of the mask that it was made of.
    """
    query, key, value, attn_mask = call[:4]
    if not isinstance(target_of(query.device), CpuTarget):
        return None
    for x, swapped in zip((query, key, value), translated[:3], strict=True):
        if x.dim() != 4 or not x.transpose(1, 2).is_set_to(swapped):
            return None
    if _packed_mask(attn_mask) != _packed_mask(translated.bias):
        return None
    found = prepared_call(Arguments.of(*translated[:3], _options(call, translated)))
    if found.launch is None or found.kind.out_dtype != query.dtype:
        return None
    out = torch.empty_strided(found.out_shape, found.sizes[-1], device="meta").transpose(1, 2)
    like_query = torch.empty_like(query, device="meta")
    is_like_query = like_query.shape == out.shape and like_query.stride() == out.stride()
    return _Prepared(found.launch, is_like_query, out.shape, out.stride(), found.wants_huge_pages)


def _packed_mask(mask: Tensor | None) -> list[int]:
    return packed_tensors(Modifiers(mask))


def _run(
    prepared: _Prepared, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
) -> Tensor:
    launch, is_like_query, shape, strides, wants_huge_pages = prepared
    out = _empty_like(query) if is_like_query else query.new_empty_strided(shape, strides)
    if wants_huge_pages:
        request_huge_pages(out)
    modifiers = None if attn_mask is None else Modifiers(attn_mask)
    tensors = query, key, value, out, None, None, None, modifiers, None, None, None, True
    launch(new_tuple(Tensors, tensors))
    return out


def _route(call: _Call, translated: _Translated) -> Route:
    # Of dropout there is no random state here, which routes nothing.
    options = _options(call, translated)
    q, k, v = translated[:3]
    try:
        problem = make_problem(under_autocast(Arguments.of(q, k, v, options)))
        target = target_of(q.device)
    except (TypeError, ValueError, NotImplementedError) as error:
        return Route((str(error),))
    problems = [problem]
    if _wants_gradients(translated[:4]):
        problems.append(backward_of(problem))
    reasons: list[str] = []
    for each in problems:
        explanation = explain_problem(each, target)
        if explanation.plan is None:
            reasons.append(str(explanation))
    return Route(tuple(reasons))


def _wants_gradients(tensors: tuple[Tensor | None, ...]) -> bool:
    return _is_grad_enabled() and requires_any_grad(*tensors)
