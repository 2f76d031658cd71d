"""Addresses of FLAT, GLOBAL and SCRATCH, from the ISA documents' words."""

SHARED_APERTURE = 0x10000 << 32
PRIVATE_APERTURE = 0x20000 << 32


def scratch(vaddr: int | None, saddr: int | None, offset: int) -> int:
    """The byte in the lane's own memory."""
    return ((vaddr or 0) + (saddr or 0) + offset) & 0xFFFFFFFF
