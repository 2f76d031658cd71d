"""Backward passes by the code objects that this package ships."""

from .family import NAME, SERVES, propose, reasons

__all__ = ["NAME", "SERVES", "propose", "reasons"]
