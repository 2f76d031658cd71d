"""Costs of memory accesses, from the published descriptions, one lane after the other."""

from collections.abc import Iterator, Sequence

READ_BANKS = {"gfx942": 32, "gfx950": 64}
WRITE_BANKS = 32
_QUADS_OF_READ_B128 = ((0, 5), (1, 4), (2, 7), (3, 6))
_QUADS_OF_READ_B128_WITH_64_BANKS = ((0, 3, 5, 6), (1, 2, 4, 7))


def banks_of(arch: str, *, is_read: bool) -> int:
    """Banks of 4 bytes: gfx950 has twice as many for reads."""
    return READ_BANKS[arch] if is_read else WRITE_BANKS


def lane_groups(arch: str, width: int, *, is_read: bool) -> Iterator[list[int]]:
    """Lanes that LDS serves together, where each accesses `width` bytes."""
    if width == 16 and is_read:
        small = arch == "gfx942"
        quads = _QUADS_OF_READ_B128 if small else _QUADS_OF_READ_B128_WITH_64_BANKS
        for half in (0, 32):
            for group in quads:
                yield [half + 4 * quad + lane for quad in sorted(group) for lane in range(4)]
        return
    lanes = min(64, 4 * banks_of(arch, is_read=is_read) // width)
    for first in range(0, 64, lanes):
        yield list(range(first, first + lanes))


def lds_cycles(arch: str, addresses: Sequence[int], width: int, *, is_read: bool) -> int:
    """A bank gives one dword a cycle, to all lanes that want it."""
    cycles = 0
    banks = banks_of(arch, is_read=is_read)
    for group in lane_groups(arch, width, is_read=is_read):
        wanted: dict[int, set[int]] = {}
        for lane in group:
            for dword in range(addresses[lane] // 4, (addresses[lane] + width) // 4):
                wanted.setdefault(dword % banks, set()).add(dword)
        cycles += max(len(dwords) for dwords in wanted.values())
    return cycles


def cache_lines(addresses: Sequence[int], width: int) -> int:
    """Lines of 128 bytes that the lanes touch together."""
    return len({(a + byte) // 128 for a in addresses for byte in (0, width - 1)})
