"""The general family: AMD Instinct kernels that are compiled for exactly a call's traits."""

from .family import NAME, SERVES, propose

__all__ = ["NAME", "SERVES", "propose"]
