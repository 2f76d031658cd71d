"""A configuration of CK's dispatcher as data: read, checked for form, and turned into a call.

``{"signature": {...}, "algorithm": {...}, "arch": "gfx942"}`` has the field names of
:class:`~jitfmha.planning.specification.Signature` and ``Algorithm``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from ..amd.chips import architecture, is_arch
from ..planning.specification import EIGHT_BIT_DATA_TYPES, Algorithm, Signature, data_types_of
from ..problem.dtypes import other_out_dtype
from ..problem.features import Feature
from ..problem.mask import NO_MASK, Mask
from .combination import NAMED_FEATURES, Combination

_T = TypeVar("_T", Signature, Algorithm)

WORDS: Mapping[str, Mapping[str, str]] = {
    "mask": {
        **dict.fromkeys(("no", "no_mask"), "no"),
        **dict.fromkeys(("causal", "top_left", "t"), "top_left"),
        **dict.fromkeys(("bottom_right", "b"), "bottom_right"),
        **dict.fromkeys(("generic", "window_generic", "g"), "generic"),
    },
    "bias": {
        **dict.fromkeys(("no", "no_bias"), "no"),
        **dict.fromkeys(("bias", "elementwise", "elementwise_bias"), "bias"),
        "alibi": "alibi",
    },
    "qscale": {
        **dict.fromkeys(("no", "no_scale"), "no"),
        **{name: name for name in ("pertensor", "blockscale", "kv_blockscale")},
    },
    "rope": {
        **dict.fromkeys(("none", "no"), "none"),
        **dict.fromkeys(("inter", "interleaved"), "inter"),
        **dict.fromkeys(("half", "half_rotated"), "half"),
    },
    "vlayout": {
        **dict.fromkeys(("r", "row", "row_major"), "r"),
        **dict.fromkeys(("c", "col", "col_major"), "c"),
    },
    "mode": {"batch": "batch", "group": "group"},
    "kv_memory_layout": {name: name for name in ("vectorized", "linear")},
    "kv_lookup_table": {name: name for name in ("sglang", "vllm")},
}
"""The words of a field, each with the one that stands for it: those of CK's ``symbol_map.py``."""

FORWARD_FAMILIES = (
    *("fwd", "fwd_pagedkv", "fwd_splitkv", "fwd_splitkv_combine", "fwd_appendkv"),
    "batch_prefill",
)
BACKWARD_FAMILIES = ("bwd_dot_do_o", "bwd_dq_dk_dv", "bwd_convert_dq")

_MASKS = {
    "no": NO_MASK,
    "top_left": Mask(top_left=True, right=0),
    "bottom_right": Mask(right=0),
    "generic": Mask(left=128, right=0),
}
_FLAGS = {
    "lse": Feature.LSE,
    "dropout": Feature.DROPOUT,
    "logits": Feature.SOFTCAP,
    "sink": Feature.SINK_TOKENS,
    "paged_kv": Feature.PAGED_KEYS,
}
_FORMATS = ("fp8", "bf8", "int8")


class Specification(NamedTuple):
    """A configuration. ``profile`` is one that it has to be part of, or None."""

    signature: Signature
    algorithm: Algorithm
    arch: str
    profile: str | int | None


def read_specification(config: object) -> Specification:
    """Read a configuration whose words stand for what they mean, whatever rules it breaks.

    Raises ``TypeError`` or ``ValueError`` for what is no configuration, naming field and value.
    """
    fields = _mapping("a configuration", config)
    _check_names("a configuration", fields, Specification._fields)
    for name in ("signature", "arch"):
        if name not in fields:
            raise ValueError(f"the configuration has no {name!r}")
    arch, profile = fields["arch"], fields.get("profile")
    if not isinstance(arch, str):
        raise TypeError(f"arch must be a str, got {arch!r}")
    if isinstance(profile, bool) or not isinstance(profile, (str, int, type(None))):
        raise TypeError(f"profile must be a str, an int or None, got {profile!r}")
    signature = _read(Signature, "signature", fields["signature"])
    algorithm = _read(Algorithm, "algorithm", fields.get("algorithm", {}))
    return Specification(canonical(signature), algorithm, arch, profile)


def canonical(signature: Signature) -> Signature:
    """The same with one word for each meaning; a word that is none stays."""
    words: dict[str, Any] = {}
    for name, known in WORDS.items():
        word = getattr(signature, name)
        words[name] = known.get(word, word)
    return signature._replace(**words)


def combination_of(signature: Signature, arch: str | None) -> Combination:
    """The call that a signature is for, on an architecture; on the CPU with None.

    Its words are those of ``WORDS`` and of ``NAMED_FEATURES``; what of it nothing here has, such as
    scales of blocks, is left out.
    """
    features = {feature for name, feature in _FLAGS.items() if getattr(signature, name)}
    features |= {NAMED_FEATURES[name] for name in signature.features}
    if signature.bias != "no":
        features.add(Feature.BIAS if signature.bias == "bias" else Feature.ALIBI)
    if signature.vlayout == "c":
        features.add(Feature.COLUMN_MAJOR_V)
    if signature.qscale != "no":
        features.add(Feature.DESCALES)
    dtype, (_, out) = dtype_of(signature.data_type, arch), _parts(signature.data_type)
    is_splitting = signature.family.startswith("fwd_splitkv")
    return Combination(
        dtype=dtype,
        kv_dtype=dtype_of(signature.kv_data_type or signature.data_type, arch),
        hdim_q=signature.hdim_q,
        hdim_v=signature.hdim_v,
        mask=_MASKS[signature.mask],
        mode="gm1" if signature.mode == "group" else "gm0",
        direction="backward" if signature.family.startswith("bwd") else "forward",
        features=frozenset(features),
        page_size=max(signature.page_size, 1),
        num_splits=2 if is_splitting and Feature.SPLIT_RESULTS not in features else 0,
        seqlen_q=1024,
        seqlen_k=1024,
        heads_q=8,
        heads_k=8,
        other_out_dtype=other_out_dtype(dtype, out) if out else "",
    )


def dtype_of(data_type: str, arch: str | None) -> str:
    """Our name for inputs of a data type of CK's; 8-bit floats are those of the architecture."""
    name, _ = _parts(data_type)
    if name in ("fp8", "bf8"):
        known = architecture(arch if arch and is_arch(arch) else "gfx950").dtypes
        return next(dtype for dtype in known if dtype.startswith(name))
    return name


def _parts(data_type: str) -> tuple[str, str]:
    """The names of the inputs and of the output; that is empty where nothing is said of it."""
    name = next((x for x in _FORMATS if data_type.startswith(x)), data_type)
    return name, data_type.removeprefix(name)


DATA_TYPES = (
    *("fp16", "bf16", "fp32"),
    *dict.fromkeys(x for dtype in EIGHT_BIT_DATA_TYPES for x in data_types_of(dtype)),
)
"""Those that kernels of this package have."""


def _read(kind: type[_T], what: str, given: object) -> _T:
    values = dict(_mapping(what, given))
    _check_names(what, values, kind._fields)
    required = [name for name in kind._fields if name not in kind._field_defaults]
    for name in required:
        if name not in values:
            raise ValueError(f"{what} has no {name!r}; it needs {', '.join(required)}")
    for name, value in values.items():
        values[name] = _checked(f"{what}.{name}", value, _type_of(kind, name))
    return kind(**values)


def _type_of(kind: type[Signature | Algorithm], name: str) -> type:
    """Of a field: a list of numbers, but for features, is a tuple of ints."""
    default = kind._field_defaults.get(name, "" if name == "data_type" else 0)
    return type(default)


def _checked(name: str, value: object, kind: type) -> Any:
    if kind is tuple:
        if isinstance(value, (list, tuple)):
            of_words = name.endswith("features")
            if all(isinstance(x, str) if of_words else isinstance(x, int) for x in value):
                return tuple(value)
        inside = "names" if name.endswith("features") else "integers"
        raise TypeError(f"{name} must be a list of {inside}, got {value!r}")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {value!r}")
    return value


def _mapping(what: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be a dict, got {value!r}")
    return value


def _check_names(what: str, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in values:
        if name not in known:
            raise ValueError(f"{what} has the field {name!r}; known are {', '.join(known)}")
