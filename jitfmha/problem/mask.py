"""What a query may see: one immutable value for every mask that the interface accepts."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

# More digits than any length has; Python refuses to read numbers of thousands.
_TEXT_FORM = r"([tbg]):(-?\d{1,100}),(-?\d{1,100})|(x[tb]):(-?\d{1,100})"


class Mask(NamedTuple):
    """A band around a diagonal of the score matrix.

    Query ``i`` sees key ``j`` if and only if ``d - left <= j <= d + right``, where the diagonal is
    ``d = i`` when ``top_left`` is set and ``d = i + seqlen_k - seqlen_q`` when it is not.
    ``None`` leaves that side open.
    """

    top_left: bool = False
    left: int | None = None
    right: int | None = None

    @property
    def is_none(self) -> bool:
        """True when every query sees every key."""
        return self.left is None and self.right is None

    @property
    def is_causal(self) -> bool:
        """True for plain causal masks, without a window on the left."""
        return self.left is None and self.right == 0

    def __str__(self) -> str:
        if self.is_none:
            return "none"
        corner = "top-left" if self.top_left else "bottom-right"
        if self.is_causal:
            return f"causal ({corner})"
        left = "open" if self.left is None else str(self.left)
        right = "open" if self.right is None else str(self.right)
        return f"window (left {left}, right {right}, {corner})"


NO_MASK, CAUSAL_MASK = Mask(), Mask(right=0)
OPEN_WINDOW = (-1, -1)
INT64_MAX = 2**63 - 1  # what torch's operators take as a number
_CORNERS = {0: False, 1: True, 2: False}
_NUMBERS = {"none": 0, "t": 1, "b": 2, "causal": 2}


def parse_mask(mask: int | str, window_size: tuple[int, int] = OPEN_WINDOW) -> Mask:
    """The :class:`Mask` for the arguments ``mask`` and ``window_size`` of ``fmha_fwd``.

    ``mask``: 0 or ``"none"``; 1 or ``"t"`` (causal, top-left); 2, ``"b"`` or ``"causal"`` (causal,
    bottom-right);
    ``"t:l,r"`` and ``"b:l,r"``, the window from ``l`` keys left to ``r`` keys right of the diagonal
    of masks 1 and 2, -1 being open on the left and 0 on the right; ``"xt:w"`` and ``"xb:w"``, as
    xformers has them, a window of ``w`` keys around these, half of them left of the diagonal, 0 and
    less being a causal mask; ``"g:y,x"``, the generic
    coordinates that count ``y`` down and ``x`` right of the top-left corner, so that query ``i``
    sees keys ``i - y < j < i + x``.

    ``window_size`` is ``(left, right)``, and -1 leaves a side open. With mask 0 it is a window
    around the bottom-right diagonal, as in flash-attn. With 1 and 2 it is one around the mask's
    diagonal, and the mask hides what is to the right of the diagonal, whatever ``right`` is.

    Raises ``TypeError`` or ``ValueError`` naming the argument and its value.
    """
    left, right = check_window_size(window_size)
    if isinstance(mask, str):
        text = re.fullmatch(_TEXT_FORM, mask)
        if text is not None:
            if (left, right) != OPEN_WINDOW:
                raise ValueError(
                    f"window_size={window_size!r} cannot be combined with mask={mask!r}, "
                    "which names its own window"
                )
            if text[4]:
                return _of_width(text[4], int(text[5]))
            return _from_text(mask, text[1], int(text[2]), int(text[3]))
        if mask not in _NUMBERS:
            raise ValueError(
                f"mask={mask!r} is not known; use 0, 1, 2, 'none', 'causal', 't', 'b', "
                "'t:l,r', 'b:l,r', 'xt:w', 'xb:w' or 'g:y,x' with integers l, r, w, y, x"
            )
        mask = _NUMBERS[mask]
    elif isinstance(mask, bool) or not isinstance(mask, int):
        raise TypeError(f"mask must be an int or a str, got {type(mask).__name__} ({mask!r})")
    if mask not in _CORNERS:
        raise ValueError(
            f"mask={mask!r} is not known; use 0 (none), 1 (causal, top-left) or "
            "2 (causal, bottom-right)"
        )
    if mask == 0:
        return Mask(left=_open(left), right=_open(right))
    return Mask(top_left=_CORNERS[mask], left=_open(left), right=0)


def check_window_size(window_size: tuple[int, int]) -> tuple[int, int]:
    """``window_size`` as a pair of ints, each -1 or at least 0.

    Raises ``TypeError`` or ``ValueError`` naming the argument and its value.
    """
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair (left, right), got {window_size!r}")
    for side in window_size:
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)):
            raise TypeError(f"window_size must hold two ints, got {window_size!r}")
        if side < -1:
            raise ValueError(f"window_size={window_size!r}: a side is -1 (open) or at least 0")
        if isinstance(side, int) and side > INT64_MAX:
            raise ValueError(f"window_size={window_size!r}: a side is less than 2**63")
    return window_size[0], window_size[1]


def _from_text(mask: str, form: str, first: int, second: int) -> Mask:
    if form == "g":
        if first < 1 or second < 1:
            raise ValueError(f"mask={mask!r}: y and x count from the corner and are at least 1")
        return Mask(top_left=True, left=first - 1, right=second - 1)
    if first < -1 or second < -1:
        raise ValueError(f"mask={mask!r}: l and r are -1 or at least 0")
    return Mask(top_left=form == "t", left=_open(first), right=max(second, 0))


def _of_width(form: str, width: int) -> Mask:
    if width < 1:
        return Mask(top_left=form == "xt", right=0)
    return Mask(top_left=form == "xt", left=width // 2, right=(width - 1) // 2)


def _open(side: int) -> int | None:
    return None if side < 0 else side
