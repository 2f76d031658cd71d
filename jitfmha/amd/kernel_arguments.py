"""The argument blocks of all kernels, each stated once.

``aiter`` is the interface of AMD's kernels ("fmha v3"), those of the backward pass included;
``jitfmha`` that of ours. The launcher has
both, rendered from here; ``hsa/src/arguments.h`` has ours, and ``hsa/build.py`` writes it.
Compiled kernels take ours with more behind it, and are rendered with that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ..jit.shared_struct import (
    FLOAT,
    INT32,
    INT64,
    UINT32,
    Array,
    Dialect,
    FieldType,
    Pointer,
    SharedStruct,
    cpp_of,
)
from ..problem.score_features import NUMBER_FEATURES, TENSOR_FEATURES

Abi = Literal["aiter", "jitfmha"]

# Of more splits of latents a workgroup of `combine` takes fewer columns, which all of its waves
# make together: a wave has room for so many at once beside the columns of its own.
FEW_SPLITS = 8

# Strides count bytes: Seqs between tokens, Hs between heads, Bs between batches.
AITER_ARGUMENTS = SharedStruct(
    "AiterArguments",
    {
        **dict.fromkeys(("ptr_o", "ptr_q", "ptr_k", "ptr_v", "ptr_lse"), Pointer("const void")),
        "scalar": FLOAT,  # the softmax scale
        "s_seq_len": UINT32,  # gm0: of q; gm1: the longest of q
        **dict.fromkeys(("s_Seqs", "s_Ts", "s_Hs", "s_Bs"), UINT32),  # of q; Ts is a tile's
        "s_gqa": UINT32,  # query heads of a key head
        **dict.fromkeys(("s_k_Seqs", "s_k_Hs", "s_k_Bs"), UINT32),
        "s_opt": UINT32,  # how the kernel orders its work
        "s_lse": UINT32,  # 1: write the log-sum-exp
        "s_kv_seq_len": UINT32,  # gm0
        **dict.fromkeys(("s_qk_head_dim", "s_v_head_dim", "s_q_head_num"), UINT32),
        **dict.fromkeys(("s_v_Seqs", "s_v_Hs", "s_v_Bs"), UINT32),
        **dict.fromkeys(("s_o_Seqs", "s_o_Hs", "s_o_Bs"), UINT32),
        **dict.fromkeys(("ptr_qseq", "ptr_kseq"), Pointer("const void")),  # gm1: cu_seqlens
        "s_lse_Hs": UINT32,
        **dict.fromkeys(("ptr_qseq_padding", "ptr_kseq_padding"), Pointer("const void")),
        **dict.fromkeys(("ptr_q_descale", "ptr_k_descale", "ptr_v_descale"), Pointer("const void")),
        **{f"s_descale_{x}_{way}": UINT32 for x in "qkv" for way in ("Bs", "Hs")},
    },
    slot_bytes=16,
)

# The three kernels of a backward pass of AMD's, in the order of their launches. The first makes D,
# the sums of o times do of each row.
AITER_ROW_SUM_ARGUMENTS = SharedStruct(
    "AiterRowSumArguments",
    {
        **dict.fromkeys(("ptr_o", "ptr_do", "ptr_d"), Pointer("const void")),
        **dict.fromkeys(("s_o_Hs", "s_o_Bs", "s_o_Seqs"), UINT32),
        **dict.fromkeys(("s_do_Hs", "s_do_Bs", "s_do_Seqs"), UINT32),
        **dict.fromkeys(("s_d_Hs", "s_d_Bs", "s_d_Seqs"), UINT32),
        "s_seq_len_q": UINT32,  # gm0
        "s_head_dim": UINT32,
        **dict.fromkeys(("ptr_qseq", "ptr_qseq_padding"), Pointer("const void")),  # gm1
    },
    slot_bytes=16,
)

# The second makes dk and dv of each query head, and adds dq up.
AITER_GRADIENT_ARGUMENTS = SharedStruct(
    "AiterGradientArguments",
    {
        "ptr_dq": Pointer("const void"),  # or what a third kernel makes dq of
        **dict.fromkeys(("ptr_dk", "ptr_dv"), Pointer("const void")),
        **dict.fromkeys(("ptr_q", "ptr_k", "ptr_v", "ptr_do"), Pointer("const void")),
        **dict.fromkeys(("ptr_lse", "ptr_d"), Pointer("const void")),
        "scalar": FLOAT,  # the softmax scale
        "log2e": FLOAT,
        "s_seq_len_q": UINT32,  # gm0
        "s_Ts": UINT32,  # of a tile of keys
        **dict.fromkeys(("s_q_Hs", "s_q_Bs", "s_q_Seqs"), UINT32),
        "s_gqa": UINT32,  # query heads of a key head
        **dict.fromkeys(("s_k_Hs", "s_k_Bs", "s_k_Seqs"), UINT32),
        "s_dk_Seqs": UINT32,
        "s_seq_len_k": UINT32,  # gm0
        **dict.fromkeys(("s_qk_head_dim", "s_v_head_dim", "s_q_head_num"), UINT32),
        **dict.fromkeys(("s_v_Hs", "s_v_Bs", "s_v_Seqs"), UINT32),
        **dict.fromkeys(("s_do_Hs", "s_do_Bs", "s_do_Seqs"), UINT32),
        **dict.fromkeys(("s_dk_Hs", "s_dk_Bs"), UINT32),
        **dict.fromkeys(("s_dv_Hs", "s_dv_Bs", "s_dv_Seqs"), UINT32),
        "s_lse_Hs": UINT32,  # of the lse and of D
        **dict.fromkeys(("ptr_qseq", "ptr_kseq"), Pointer("const void")),  # gm1
        **dict.fromkeys(("ptr_qseq_padding", "ptr_kseq_padding"), Pointer("const void")),
        "s_max_seq_len_dq": UINT32,  # rows that a head has in what dq is made of
        **dict.fromkeys(("mask_x", "mask_y"), INT32),  # of a window
    },
    slot_bytes=16,
)

# The third makes dq of what was added up.
AITER_DQ_ARGUMENTS = SharedStruct(
    "AiterDqArguments",
    {
        **dict.fromkeys(("ptr_dq_acc", "ptr_dq"), Pointer("const void")),
        **dict.fromkeys(("s_dq_acc_Hs", "s_dq_acc_Bs", "s_dq_acc_Seqs"), UINT32),
        **dict.fromkeys(("s_dq_Hs", "s_dq_Bs", "s_dq_Seqs"), UINT32),
        "s_seq_len_q": UINT32,  # gm0
        "s_head_dim": UINT32,
        **dict.fromkeys(("ptr_qseq", "ptr_qseq_padding"), Pointer("const void")),  # gm1
    },
    slot_bytes=16,
)

# What a kernel divides by: dividing takes it long, so the host gives it the reciprocal.
DIVISOR = SharedStruct(
    "Divisor",
    {
        "divisor": UINT32,
        "reciprocal": UINT32,  # of it: 2^32 - 1 divided by it, rounded down
    },
)

# In bytes.
_STRIDES: Mapping[str, FieldType] = {
    **{f"{x}_{way}": UINT32 for x in ("q", "k", "v", "out") for way in ("seq", "head", "batch")},
    "lse_head": UINT32,
}

JITFMHA_ARGUMENTS = SharedStruct(
    "Arguments",
    {
        **dict.fromkeys(("q", "k", "v"), Pointer("const char")),
        "out": Pointer("char"),
        "lse": Pointer("float"),  # null: not wanted
        # What splits of the keys leave, where there are several; else null.
        "workspace": Pointer("float"),
        "scale_log2": FLOAT,  # the softmax scale times log2(e)
        "seqlen_q": UINT32,  # gm1: max_seqlen_q
        "seqlen_k": UINT32,  # gm0
        **_STRIDES,
        "query_tiles": UINT32,  # of seqlen_q
        # How the workgroups divide the work: the kernel says what follows from these.
        "xcds": DIVISOR,  # gm0: or groups of them
        "num_splits": DIVISOR,  # of the keys
        "heads": DIVISOR,  # of q
        "gqa": DIVISOR,  # query heads of a key head
        **dict.fromkeys(("xcd_heads", "group_heads"), UINT32),  # gm0
        # gm1 from here on: kernels for gm0 load nothing of it.
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), Pointer("const int")),
        # Where sequences begin: the same as above unless there are gaps between them.
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_k_padded"), Pointer("const int")),
        "batch": DIVISOR,
        "pair_tiles": DIVISOR,  # query tiles of a sequence and key head, of all its query heads
        "xcd_sets": DIVISOR,  # sets of XCDs, among which the key heads behind first_heads go
        "set_xcds": DIVISOR,  # XCDs of a set
        "tail_heads": DIVISOR,  # query heads of the pairs in the tail
        "first_heads": UINT32,  # key heads that go to single XCDs
        "set_tiles": UINT32,  # query tiles of a set
        "tail_begin": UINT32,  # those of them before the tail
        # Of 8-bit inputs.
        **dict.fromkeys(("q_descale", "k_descale", "v_descale"), Pointer("const float")),
        **{f"{x}_descale_{way}": UINT32 for x in "qkv" for way in ("batch", "head")},
    },
)


def _score_tensors() -> dict[str, FieldType]:
    """Tensors of score features, and strides: in elements, or in bytes where these have no type."""
    fields: dict[str, FieldType] = {}
    for row in TENSOR_FEATURES:
        element = "char" if row.element == "void" else row.element
        fields[row.name] = Pointer(f"const {element}")
        fields |= dict.fromkeys(row.stride_names, INT64)
    return fields


# What a compiled kernel has beside that. What a kernel is not compiled for, it does not read.
MODIFIERS = SharedStruct(
    "Modifiers",
    {
        **_score_tensors(),
        "rng_state": Pointer("const unsigned"),  # the words of the seed, then of the offset
        # Of keys and values in pages; strides between these in bytes, or where waves take turns as
        # turns.py has them, between the rows of the table in elements.
        "block_table": Pointer("const int"),
        **dict.fromkeys(("block_table_batch", "k_page", "v_page"), INT64),
        "page_size": DIVISOR,
        "num_pages": INT32,
        "bias_keys": INT32,  # the width of a bias
        # A query sees the keys from so many left of the diagonal to so many right of it.
        **dict.fromkeys(("window_left", "window_right"), INT32),
        "is_bottom_right": INT32,  # where the diagonal ends; else it begins in the other corner
        **{row.name: FLOAT if row.schema == "float" else INT32 for row in NUMBER_FEATURES},
        "largest_kept": INT32,  # of the random bytes by which probabilities are dropped
        "keep_scale": FLOAT,  # what the kept ones are multiplied with
        "scale_over_softcap": FLOAT,  # the softmax scale over the soft cap
        # Those of q and p lie between the heads of q, or like the others between those of k.
        **dict.fromkeys(("q_descale_of_query_heads", "p_descale_of_query_heads"), INT32),
        "p_descale": Pointer("const float"),
        **dict.fromkeys(("p_descale_batch", "p_descale_head"), INT64),  # in bytes
        "slices": INT32,  # of the columns of the output, for which there are workgroups each
        "v_column": INT64,  # bytes between the columns of values whose keys lie side by side
        # Where the result of each split goes beside that of all: contiguous, one behind the other.
        **dict.fromkeys(("out_parts", "lse_parts"), Pointer("float")),
        "part_rows": INT64,  # of one split: those of all heads and sequences together
        # Scales of tokens; strides in bytes, those of the batch lie between pages where keys do.
        **{
            name: kind
            for x in ("k", "v")
            for name, kind in {
                f"{x}_token_descales": Pointer("const float"),
                **{f"{x}_token_{way}": INT64 for way in ("batch", "seq", "head")},
            }.items()
        },
    },
)

# Query heads whose rows share tiles; strides between them count bytes.
STACKED_HEADS = SharedStruct(
    "StackedHeads",
    {"count": DIVISOR, **dict.fromkeys(("q_stride", "out_stride", "lse_stride"), UINT32)},
)

# What persistent workgroups do is listed on the device. All heads have the same blocks of rows, of
# which those of one are listed: each a tile of the rows of one sequence.
ROW_BLOCK = SharedStruct(
    "RowBlock",
    {
        **dict.fromkeys(("sequence", "tile"), INT32),
        "key_tiles": INT32,  # that its rows see
        "is_last": INT32,  # of its head
        # Of the sequence, so that who takes the block asks for all of it at once.
        **dict.fromkeys(("seqlen_q", "seqlen_k"), INT32),
        **dict.fromkeys(("q_start", "k_start"), UINT32),
    },
)
# Where the share of a workgroup begins. Several of them may lie in one block.
SHARE_BEGIN = SharedStruct(
    "ShareBegin",
    {
        **dict.fromkeys(("head", "block"), INT32),
        "key_tile": INT32,  # 0: the block is not cut here
        **dict.fromkeys(("first_cut", "last_cut"), INT32),  # of all shares that begin in the block
        "unused": Array(INT32, 3),  # so that what lies behind is aligned
    },
)
# What work takes, in whatever unit.
WORK_COSTS = SharedStruct(
    "WorkCosts",
    {
        "block": UINT32,  # a block of rows, beside its key tiles
        "wave": UINT32,  # more for each wave that has rows
        "key_tile": UINT32,
        "wave_of_tile": UINT32,  # the same of a key tile
    },
)
WORK_LIST = SharedStruct(
    "WorkList",
    {
        "shares": Pointer("ShareBegin"),  # of all workgroups, and the end behind them
        "blocks": Pointer("RowBlock"),
        "workgroups": UINT32,
        "most_blocks": UINT32,  # that there is room for
        "xcds": DIVISOR,  # among which neighbours in the list are not divided
        "xcd_workgroups": UINT32,
        "costs": WORK_COSTS,
    },
)

COMPILED_ARGUMENTS = SharedStruct(
    "CompiledArguments",
    {
        "attention": JITFMHA_ARGUMENTS,
        "modifiers": MODIFIERS,
        "stacked": STACKED_HEADS,
        "list": WORK_LIST,
    },
)

# In bytes; of the lse, its gradient and that of the bias in elements.
TENSOR_STRIDES = SharedStruct("TensorStrides", dict.fromkeys(("batch", "head", "seq"), INT64))

# What backward kernels of ours read and write beside the tensors of attention. Those of keys read
# what that of queries leaves in ``lse_log2`` and ``delta``, which have the layout of a contiguous
# lse and lie one behind the other. With an added bias, shifts of the rows lie behind them likewise.
GRADIENT_TENSORS = SharedStruct(
    "GradientTensors",
    {
        "dout": Pointer("const char"),
        **dict.fromkeys(("lse", "dlse"), Pointer("const float")),  # dlse is null where it is 0
        **dict.fromkeys(("dq", "dk", "dv"), Pointer("char")),
        **dict.fromkeys(("lse_log2", "delta"), Pointer("float")),
        **dict.fromkeys(("dout_strides", "lse_strides", "dlse_strides"), TENSOR_STRIDES),
        **dict.fromkeys(("dq_strides", "dk_strides", "dv_strides"), TENSOR_STRIDES),
    },
)

# How the workgroups of backward kernels divide the work: the kernels say what follows from these.
_BACKWARD_WORK: Mapping[str, FieldType] = {
    "line_heads": DIVISOR,  # the heads that a kernel counts: of q or of k
    "xcd_lines": UINT32,  # sequences and heads of an XCD
    "tiles": UINT32,  # of the longest sequence
}

# What compiled backward kernels take.
BACKWARD_ARGUMENTS = SharedStruct(
    "BackwardArguments",
    {
        "attention": JITFMHA_ARGUMENTS,
        "modifiers": MODIFIERS,
        "gradients": GRADIENT_TENSORS,
        "dbias": Pointer("float"),  # null: not wanted; its keys are contiguous
        "dbias_strides": TENSOR_STRIDES,
        **_BACKWARD_WORK,
    },
)

# What the kernel takes that makes the gradient of sinks. Rows are those of gm1 where there are sums
# of their lengths; the lse and its gradient, null where it is 0, are contiguous along them.
SINK_GRADIENT_ARGUMENTS = SharedStruct(
    "SinkGradientArguments",
    {
        **dict.fromkeys(("out", "dout"), Pointer("const char")),
        **dict.fromkeys(("lse", "dlse", "sink"), Pointer("const float")),
        "dsink": Pointer("float"),
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_q_padded"), Pointer("const int")),
        **dict.fromkeys(("out_strides", "dout_strides", "lse_strides"), TENSOR_STRIDES),
        "sink_head": INT64,  # in elements
        **dict.fromkeys(("batch", "seqlen_q", "hdim"), INT32),
    },
)

# A query sees the keys from so many left of the diagonal to so many right of it.
WINDOW = SharedStruct(
    "Window",
    {
        **dict.fromkeys(("left", "right"), INT32),
        "is_bottom_right": INT32,  # where the diagonal ends; else it begins in the other corner
    },
)

# What backward kernels that come ready take, and nothing that they do not read: code objects are
# built for this layout, and what other kernels take may change without them.
READY_BACKWARD_ARGUMENTS = SharedStruct(
    "ReadyBackwardArguments",
    {
        **dict.fromkeys(("q", "k", "v", "out"), Pointer("const char")),
        # gm1, as in forward.
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), Pointer("const int")),
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_k_padded"), Pointer("const int")),
        "gradients": GRADIENT_TENSORS,
        # Where dq is added up: contiguous, with the heads before the rows.
        "dq_sums": Pointer("float"),
        # Where workgroups of deterministic kernels count whose turn it is; else null.
        "turns": Pointer("unsigned"),
        "scale_log2": FLOAT,  # the softmax scale times log2(e)
        "seqlen_q": UINT32,  # gm1: max_seqlen_q
        "seqlen_k": UINT32,  # gm1: of all sequences together
        **_STRIDES,
        **dict.fromkeys(("batch", "heads_q", "heads_k"), UINT32),
        "gqa": UINT32,  # query heads of a key head
        "window": WINDOW,
        **_BACKWARD_WORK,
    },
)

ARGUMENTS_OF: Mapping[Abi, SharedStruct] = {
    "aiter": AITER_ARGUMENTS,
    "jitfmha": JITFMHA_ARGUMENTS,
}

DEVICE = Dialect(
    scalars={"std::uint32_t": "unsigned", "std::int32_t": "int", "std::int64_t": "long"},
    pointer="Global<{}>",
    offsetof="__builtin_offsetof",
)


def compiled_structs() -> str:
    """What a compiled kernel takes, for its source, behind what ``arguments.h`` has."""
    of_work = STACKED_HEADS, ROW_BLOCK, SHARE_BEGIN, WORK_COSTS, WORK_LIST
    return cpp_of((MODIFIERS, *of_work, COMPILED_ARGUMENTS), DEVICE)


def backward_structs() -> str:
    """Return the C++ structs that compiled kernels of the backward pass take."""
    return cpp_of((MODIFIERS, TENSOR_STRIDES, GRADIENT_TENSORS, BACKWARD_ARGUMENTS), DEVICE)


def sink_gradient_structs() -> str:
    """Return the C++ structs that the kernel of the gradient of sinks takes."""
    return cpp_of((TENSOR_STRIDES, SINK_GRADIENT_ARGUMENTS), DEVICE)
