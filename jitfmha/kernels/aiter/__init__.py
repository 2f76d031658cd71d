"""Backward passes by code objects of a tree that the environment names, in AITER's form."""

from .family import NAME, SERVES, propose, reasons

__all__ = ["NAME", "SERVES", "propose", "reasons"]
