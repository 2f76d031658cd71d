"""What connects this package with others; each module is imported when it is first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import sdpa as sdpa
    from . import transformers as transformers


def __getattr__(name: str) -> object:
    if name in ("sdpa", "transformers"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
