"""The tuned family: code objects of ``hsa/``, or of a tree that the environment names."""

from .family import NAME, plan, reasons_not, remarks

__all__ = ["NAME", "plan", "reasons_not", "remarks"]
