"""The names that profiles and receipts are asked for by; the command line reads them before torch.

A receipt is CK's name for a filter of kernels, which has a number there.
"""

from __future__ import annotations

PROFILE_NAMES = ("inference", "training", "flash-attn", "aiter", "pytorch")

RECEIPT_NUMBERS: dict[str, int | None] = {
    "ck_default": 0,
    "ck_extended": 1,
    "flash_fwd": 2,
    "flash_bwd": 3,
    "ck_pytorch": 4,
    "aiter_batch": 100,
    "aiter_group": 200,
    "aiter_bwd_batch": 300,
    "aiter_bwd_group": 400,
    "aiter_cpp": 600,
    "fp32_all": 800,
    "fp32_min": 801,
    "fp8_test": 888,
    "flash": None,
    "pytorch": None,
    "aiter": None,
    "fp32": None,
    "fp8": None,
    "all": None,
}
"""CK's ``pytorch`` is "ck_pytorch" here, since a profile of ours has that name: where profiles are
built, "pytorch" and "aiter" are ours. Those without a number keep what any receipt of their kind
keeps."""

_BY_NUMBER = {number: name for name, number in RECEIPT_NUMBERS.items() if number is not None}


def receipt_name(asked: str | int) -> str:
    """The name of the receipt that is asked for by name or number.

    Raises ``TypeError`` or ``ValueError`` where there is none.
    """
    if isinstance(asked, bool) or not isinstance(asked, (str, int)):
        raise TypeError(f"profile is {asked!r}; use {_known()}")
    number = int(asked) if isinstance(asked, str) and asked.isdecimal() else asked
    name = _BY_NUMBER.get(number) if isinstance(number, int) else number
    if name not in RECEIPT_NUMBERS:
        raise ValueError(f"profile is {asked!r}; use {_known()}")
    return name


def _known() -> str:
    receipts = (
        repr(name) + (f" ({number})" if number is not None else "")
        for name, number in RECEIPT_NUMBERS.items()
        if name not in PROFILE_NAMES
    )
    return f"{', '.join(map(repr, PROFILE_NAMES))}, or a receipt: {', '.join(receipts)}"
