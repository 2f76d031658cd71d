"""The compiled family: AMD Instinct kernels that are compiled for exactly a call's traits."""

from .family import NAME, propose, reasons
from .rules import SERVES

__all__ = ["NAME", "SERVES", "propose", "reasons"]
