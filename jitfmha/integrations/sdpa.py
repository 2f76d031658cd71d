"""``torch.nn.functional.scaled_dot_product_attention`` by kernels of this package.

>>> import jitfmha.integrations.sdpa
>>> with jitfmha.integrations.sdpa.patch():
...     model(batch)

A call is routed when the dispatch that ``jitfmha.explain`` shows has a kernel for it, and for its
backward pass where autograd will want one. Every other call goes to torch as it came.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor

from ..call.detection import target_of
from ..call.dispatch import explain_problem
from ..call.interface import OFF, fmha_fwd
from ..call.pytorch.autocast import under_autocast
from ..call.pytorch.autograd import backward_of
from ..planning.target import TARGET_HERE
from ..problem.arguments import Arguments
from ..problem.problem import make_problem
from ..problem.torch_parts import functorch_level, has_forward_mode

if TYPE_CHECKING:
    from typing_extensions import Self

_TOP_LEFT_CAUSAL = 1  # torch's is_causal
_MOST_ROUTES = 1024


class Route(NamedTuple):
    """Where a call goes.

    Attributes:
        reasons: why torch serves it; empty where this package does.
    """

    reasons: tuple[str, ...]

    @property
    def is_ours(self) -> bool:
        """Whether this package serves the call."""
        return not self.reasons


class _Call(NamedTuple):
    """The arguments of ``scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


class Patch:
    """The replaced function, until :meth:`undo`; also a context manager, which undoes it."""

    def __init__(self, original: Callable[..., Tensor]) -> None:
        self._original = original
        self._ours = _routing(original)
        self._is_applied = True
        F.scaled_dot_product_attention = self._ours

    def undo(self) -> None:
        """Put back what was there before; nothing where that has happened already.

        Raises ``RuntimeError`` where somebody has replaced the function since.
        """
        if not self._is_applied:
            return
        found: Any = F.scaled_dot_product_attention
        if found is not self._ours:
            raise RuntimeError(
                f"torch.nn.functional.scaled_dot_product_attention is {found!r}, which was put "
                "there after jitfmha's patch; undo that one first"
            )
        F.scaled_dot_product_attention = self._original
        self._is_applied = False

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

    Routed are calls with four dimensions, ``(batch, heads, seqlen, hdim)``, of plain tensors, with
    ``attn_mask`` (bool, float32 or of the query's dtype), ``dropout_p``, ``is_causal``, ``scale``
    and ``enable_gqa``; under ``torch.autocast`` after its casts. :func:`explain` says of a call
    where it goes. To torch go those in compiled code, under a transform of ``torch.func`` or in
    forward mode, and all where its flash attention is switched off, as by ``sdpa_kernel``.

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
    return Route((reason,)) if reason else _route(call, _arguments_of(call))


def _routing(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function that takes the place of ``original``, with its signature."""

    @functools.wraps(original)
    def scaled_dot_product_attention(
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
        if not torch.compiler.is_compiling():
            call = _Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            if _reason_of_surroundings(call) is None:
                arguments = _arguments_of(call)
                if _known_route(call, arguments).is_ours:
                    return _attend(call, arguments)
        return original(
            *(query, key, value, attn_mask, dropout_p, is_causal),
            scale=scale,
            enable_gqa=enable_gqa,
        )

    return scaled_dot_product_attention


def _attend(call: _Call, arguments: Arguments) -> Tensor:
    out = fmha_fwd(
        *arguments[:3],
        softmax_scale=arguments.softmax_scale,
        mask=_TOP_LEFT_CAUSAL if call.is_causal else 0,
        bias=None if arguments.modifiers is None else arguments.modifiers.bias,
        dropout_p=call.dropout_p or OFF,
    )
    return out.transpose(1, 2)


def _reason_of_surroundings(call: _Call) -> str | None:
    """Why torch serves a call whatever its sizes and options are; None where there is no reason."""
    tensors = [call.query, call.key, call.value]
    if call.attn_mask is not None:
        tensors.append(call.attn_mask)
    for x in tensors:
        if type(x) not in (Tensor, torch.nn.Parameter) or x.is_nested:
            return f"an argument is a {type(x).__name__}, or nested: no plain tensor"
    for name, x in zip(("query", "key", "value"), tensors, strict=False):
        if x.dim() != 4:
            return f"{name} has shape {tuple(x.shape)}; (batch, heads, seqlen, hdim) is served"
    if functorch_level() is not None or has_forward_mode():
        return "a transform of torch.func or forward mode is in effect"
    if not torch.backends.cuda.flash_sdp_enabled():
        return "torch's flash attention is switched off, as by torch.nn.attention.sdpa_kernel"
    if call.attn_mask is not None and call.attn_mask.dim() < 2:
        return f"attn_mask has shape {tuple(call.attn_mask.shape)}; it needs (..., seqlen, seqlen)"
    if call.attn_mask is not None and call.is_causal:
        return "attn_mask and is_causal=True exclude each other"
    if call.query.shape[1] != call.key.shape[1] and not call.enable_gqa:
        return (
            f"query has {call.query.shape[1]} heads, key has {call.key.shape[1]}; that needs "
            "enable_gqa=True"
        )
    return None


def _arguments_of(call: _Call) -> Arguments:
    """The same call of ``fmha_fwd``. Dropout is without the random state, which routes nothing."""
    q, k, v = (x.transpose(1, 2) for x in call[:3])
    options: dict[str, Any] = {"mask": _TOP_LEFT_CAUSAL if call.is_causal else 0}
    if call.scale is not None:
        options["softmax_scale"] = float(call.scale)
    if call.attn_mask is not None:
        options["bias"] = _as_bias(call.attn_mask, q.shape[0], k.shape[1])
    return under_autocast(Arguments.of(q, k, v, options))


def _as_bias(attn_mask: Tensor, batch: int, seqlen_k: int) -> Tensor:
    """A view with four dimensions, of which the last is as long as the keys."""
    missing = 4 - attn_mask.dim()
    bias = attn_mask[(None,) * missing] if missing > 0 else attn_mask
    return bias.expand(*bias.shape[:-1], seqlen_k) if bias.shape[-1] == 1 else bias


_routes: dict[Hashable, Route] = {}


def _known_route(call: _Call, arguments: Arguments) -> Route:
    """As :func:`_route`, which is asked once for calls that are alike."""
    modifiers = arguments.modifiers
    tensors = (*arguments[:3], None if modifiers is None else modifiers.bias)
    key = (
        *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors],
        *(call.is_causal, call.scale, call.dropout_p),
        _wants_gradients(tensors),
        TARGET_HERE.get(),
    )
    route = _routes.get(key)
    if route is None:
        if len(_routes) >= _MOST_ROUTES:
            _routes.clear()
        route = _routes[key] = _route(call, arguments)
    return route


def _route(call: _Call, arguments: Arguments) -> Route:
    modifiers = arguments.modifiers
    bias = None if modifiers is None else modifiers.bias
    try:
        with_dropout = Arguments.of(
            *arguments[:3],
            {
                "mask": arguments.mask,
                "softmax_scale": arguments.softmax_scale,
                "bias": bias,
                "dropout_p": call.dropout_p,
            },
        )
        problem = make_problem(with_dropout)
        target = target_of(arguments.q.device)
    except (TypeError, ValueError, NotImplementedError) as error:
        return Route((str(error),))
    problems = [problem]
    if _wants_gradients((*arguments[:3], bias)):
        problems.append(backward_of(problem))
    reasons: list[str] = []
    for each in problems:
        explanation = explain_problem(each, target)
        if explanation.plan is None:
            reasons.append(str(explanation))
    return Route(tuple(reasons))


def _wants_gradients(tensors: tuple[Tensor | None, ...]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
