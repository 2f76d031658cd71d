"""What a call may ask for: features, which kernel families declare that they serve."""

from __future__ import annotations

from enum import Enum


class Feature(Enum):
    """What a call may ask for. A kernel family declares which features it serves.

    The value is what a refusal says.
    """

    FP32 = "fp32 inputs"
    BF16 = "bf16 inputs"
    FP16 = "fp16 inputs"
    FP8_E4M3FNUZ = "fp8_e4m3fnuz inputs"
    FP8_E4M3FN = "fp8_e4m3fn inputs"
    BF8_E5M2FNUZ = "bf8_e5m2fnuz inputs"
    BF8_E5M2 = "bf8_e5m2 inputs"
    INT8 = "int8 inputs"
    EIGHT_BIT_KEYS_AND_VALUES = "8-bit keys and values beside queries of more bits"
    INT8_PROBABILITIES = "int8 probabilities"
    OUT_DTYPE = "an output of 8-bit queries that is not bf16"
    DESCALES = "scales of 8-bit inputs"
    QUERY_HEAD_DESCALES = "a scale of its own for each query head that shares a key head"
    TOKEN_DESCALES = "a scale of its own for each token of k or v"
    COLUMN_MAJOR_V = "values with contiguous keys (column-major v)"
    GROUP_MODE = "packed sequences (gm1)"
    PADDED_SEQUENCES = "unused rows between packed sequences"
    CAUSAL_MASK = "a causal mask"
    WINDOW_MASK = "a window mask"
    TOP_LEFT_MASK = "a mask aligned at the top left"
    LSE = "the log-sum-exp"
    BACKWARD = "the backward pass"
    DETERMINISTIC = "gradients that are the same, bit by bit, in every run"
    BIAS = "a bias"
    BOOLEAN_BIAS = "a boolean bias"
    ALIBI = "ALiBi slopes"
    SOFTCAP = "a logit soft cap"
    SINKS = "learned sinks"
    SINK_TOKENS = "sink tokens beside a window"
    DROPOUT = "dropout"
    PAGED_KEYS = "keys and values in pages (block_table)"
    PACKED_PAGES = "keys and values in packed pages of five dimensions"
    NUM_SPLITS = "a given number of key splits (num_splits)"
    SPLIT_RESULTS = "the results of each key split (mha_fwd_splitkv)"


DTYPE_FEATURES = {
    "fp32": Feature.FP32,
    "bf16": Feature.BF16,
    "fp16": Feature.FP16,
    "fp8_e4m3fnuz": Feature.FP8_E4M3FNUZ,
    "fp8_e4m3fn": Feature.FP8_E4M3FN,
    "bf8_e5m2fnuz": Feature.BF8_E5M2FNUZ,
    "bf8_e5m2": Feature.BF8_E5M2,
    "int8": Feature.INT8,
}
