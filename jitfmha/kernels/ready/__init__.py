"""The ready family: code objects of ``hsa/``, or of a tree that the environment names."""

from .family import NAME, SERVES, propose, reasons

__all__ = ["NAME", "SERVES", "propose", "reasons"]
