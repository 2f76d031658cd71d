"""What calls the ready kernels of each binary interface cannot serve, as reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ...amd.chips import Arch, architecture
from ...amd.manifest import KernelRow
from ...planning.plan import Reason
from ...planning.target import AmdTarget
from ...problem.problem import DescaleStrides, PlainSizes, Problem, Strides, element_bytes
from ..rules import Rule

FIELD_END = 1 << 32
"""The kernels' integers have 32 bits."""

GRID_END = 1 << 16
MOST_ROWS = FIELD_END // 4 - 1  # the lse's stride between heads counts bytes
_WIDEST_BYTES = 4
_LARGE_FIELD = FIELD_END // _WIDEST_BYTES
_ONE_SCALE: DescaleStrides = (0, 0)


def dtype_is_one_of_the_matrix_units(problem: Problem, arch: Arch) -> Iterator[Reason]:
    """Products are made by the chip's matrix units."""
    dtypes = architecture(arch).dtypes
    for dtype in dict.fromkeys((problem.dtype, problem.kv_dtype)):
        if dtype not in dtypes:
            yield Reason(
                "The matrix units of {arch} take {dtypes}; the inputs are {dtype}.",
                arch=arch,
                dtypes=", ".join(dtypes),
                dtype=dtype,
            )


def rows_can_be_counted(problem: Problem, arch: Arch) -> Iterator[Reason]:
    """The stride between the heads of the lse, which is a length, counts bytes in 32 bits."""
    for name, seqlen in (("q", problem.seqlen_q), ("k", problem.seqlen_k)):
        if seqlen > MOST_ROWS:
            template = "The kernels take up to {most} rows; {name} has {seqlen}."
            yield Reason(template, most=MOST_ROWS, name=name, seqlen=seqlen)


def strides_fit(problem: Problem, arch: Arch) -> Iterator[Reason]:
    """Strides count bytes in 32 bits."""
    for name, strides, element in _strided(problem):
        for dimension in ("seq", "head", "batch"):
            size = getattr(strides, dimension) * element
            if size >= FIELD_END:
                yield Reason(
                    "The kernels take strides below 4 GiB; "
                    "{name} has {size} bytes between two in dimension {dimension}.",
                    name=name,
                    size=size,
                    dimension=dimension,
                )
                break


def the_grid_has_room(problem: Problem, arch: Arch) -> Iterator[Reason]:
    """Heads and sequences are counted along y and z of a grid."""
    for what, count in (("heads", problem.heads_q), ("sequences", problem.batch)):
        if count >= GRID_END:
            template = "A grid takes up to {most} {what}; the problem has {count}."
            yield Reason(template, most=GRID_END - 1, what=what, count=count)


def masks_of_packed_sequences_end_in_a_corner(problem: Problem, arch: Arch) -> Iterator[Reason]:
    """Manifests have kernels of packed sequences for the mask that ends in the bottom right."""
    if problem.mode == "gm1" and problem.mask.top_left:
        template = "Kernels of packed sequences have no mask {mask}."
        yield Reason(template, mask=problem.mask)


_ARGUMENTS = "jitfmha/amd/kernel_arguments.py"
DTYPE_RULE = Rule(dtype_is_one_of_the_matrix_units, "dtypes in jitfmha/amd/chips.json")
PACKED_MASK_RULE = Rule(masks_of_packed_sequences_end_in_a_corner, "hsa/*/fmha_v3_fwd/*.csv")
# What does not fit into the arguments, or the grid, of either interface.
SIZE_RULES = (
    Rule(rows_can_be_counted, f"lse_head and s_lse_Hs in {_ARGUMENTS}"),
    Rule(strides_fit, f"the strides in {_ARGUMENTS}"),
    Rule(the_grid_has_room, "the HIP programming guide: 65535 workgroups along y and z"),
)


def are_far_from_limits(problem: Problem, row: KernelRow) -> Callable[[PlainSizes], bool]:
    """A quick question for calls that differ from ``problem`` in lengths and strides only.

    True: no rule of ``SIZE_RULES`` and no :func:`reasons_of_row` is in the way. False: there may be
    one.
    """
    widest = max(problem.hdim_q, problem.hdim_v)
    takes_any_scales = not (problem.is_fp8 and row.mask)

    def have_small_heads(sizes: PlainSizes) -> bool:
        seqlen_q, seqlen_k, *strides = sizes
        of_rows = [x[-3] for x in strides]
        return (
            have_small_fields(sizes)
            and max(seqlen_q, seqlen_k) * max(of_rows) * _WIDEST_BYTES < FIELD_END
            and min(of_rows) >= widest
            and takes_any_scales
        )

    return have_small_fields if row.abi == "jitfmha" else have_small_heads


class AmdLimits(NamedTuple):
    """What AMD's kernels for an architecture do not do, as their disassembly shows.

    Attributes:
        fp8_ratios: of query heads to key heads, that fp8 kernels turn into a shift; None: any.
        reads_one_scale: whether they read one scale each of q, k and v, and no strides.
        squares_scales: whether fp8 kernels with a mask multiply their scale in place, once for each
            tile, so that the second tile of a workgroup has the scales of q and k squared.
    """

    fp8_ratios: tuple[int, ...] | None
    reads_one_scale: bool
    squares_scales: bool


_AMD_LIMITS: Mapping[Arch, AmdLimits] = {
    "gfx942": AmdLimits(fp8_ratios=None, reads_one_scale=False, squares_scales=True),
    "gfx950": AmdLimits(fp8_ratios=(1, 2, 4, 8, 16), reads_one_scale=True, squares_scales=False),
}


def have_small_fields(sizes: PlainSizes) -> bool:
    """Whether lengths and strides, of elements of any size, are far from 32 bits.

    So are ``MOST_ROWS``, which is as large as the largest stride of the widest elements.
    """
    seqlen_q, seqlen_k, q, k, v, out = sizes
    # Where the sum is, each is; the largest takes 0.4 us longer to find.
    return seqlen_q + seqlen_k + sum(q) + sum(k) + sum(v) + sum(out) < _LARGE_FIELD


def reasons_of_row(problem: Problem, target: AmdTarget, row: KernelRow) -> list[Reason]:
    """What a kernel of a manifest cannot do beyond that; AMD's own have more limits than ours."""
    if row.abi == "jitfmha":
        return []
    found = (
        _range_reason(problem),
        _gqa_reason(problem, target),
        _descale_shape_reason(problem, target),
        _descale_twice_reason(problem, target, row),
    )
    return [reason for reason in found if reason is not None]


def _range_reason(problem: Problem) -> Reason | None:
    """AMD's kernels give the buffer unit a sequence's length times its stride, in 32 bits."""
    if problem.is_empty:
        return None
    for name, strides, element in _strided(problem):
        rows = problem.seqlen_q if name in ("q", "out") else problem.seqlen_k
        width = problem.hdim_v if name in ("v", "out") else problem.hdim_q
        if rows > 1 and rows * strides.seq * element >= FIELD_END:
            template = "its kernels reach 4 GiB of one head; the rows of {name} take more."
            return Reason(template, name=name)
        if rows > 1 and strides.seq < width:
            template = "its kernels need rows that do not overlap; those of {name} do."
            return Reason(template, name=name)
    return None


def _gqa_reason(problem: Problem, target: AmdTarget) -> Reason | None:
    ratios = _AMD_LIMITS[target.arch].fp8_ratios
    if problem.is_empty or not problem.is_fp8 or ratios is None or problem.gqa in ratios:
        return None
    *most, last = map(str, ratios)
    return Reason(
        "its fp8 kernels take {ratios} query heads for a key head; here are {ratio}.",
        ratios=f"{', '.join(most)} or {last}",
        ratio=problem.gqa,
    )


def _descale_shape_reason(problem: Problem, target: AmdTarget) -> Reason | None:
    if not _AMD_LIMITS[target.arch].reads_one_scale or problem.batch * problem.heads_k == 1:
        return None
    for name in ("q_descale", "k_descale", "v_descale"):
        strides = getattr(problem, name)
        if strides not in (None, _ONE_SCALE):
            return Reason("its kernels take a {name} of shape (1,) only.", name=name)
    return None


def _descale_twice_reason(problem: Problem, target: AmdTarget, row: KernelRow) -> Reason | None:
    if not problem.is_fp8 or not _AMD_LIMITS[target.arch].squares_scales or row.mask == 0:
        return None
    if not (problem.q_descale or problem.k_descale) or problem.seqlen_q <= row.ts_qo:
        return None
    return Reason(
        "its causal fp8 kernels apply q_descale and k_descale twice from row {rows} on.",
        rows=row.ts_qo,
    )


def _strided(problem: Problem) -> tuple[tuple[str, Strides, int], ...]:
    bytes_of = element_bytes(problem)
    return (
        ("q", problem.q, bytes_of.q),
        ("k", problem.k, bytes_of.kv),
        ("v", problem.v, bytes_of.kv),
        ("out", problem.out, bytes_of.out),
    )
