"""The backward pass with whatever can be passed: the same gradients, or a clear refusal."""

from typing import Any

import torch
from calls import BACKWARD_KINDS, FRESH, PLAIN, Arguments, Draw, Subject, no_results
from changes import any_calls
from contract import Call, KnownCall, Tally, check_call
from expected import places
from hypothesis import strategies as st
from inputs import LAYOUTS, lay_out
from rules import is_group, is_interleaved, places_of
from torch import Tensor
from untyped import fmha_bwd, fmha_fwd

_OPTIONS = tuple(name for name in PLAIN if name not in ("return_lse", "out"))
_WRITTEN = {"dq": "q", "dk": "k", "dv": "v"}
_READ = ("q", "k", "v", "out", "dout", "lse", "dlse")


def backward_arguments(draw: Draw, problem: Arguments) -> Arguments:
    """What forward gives, random gradients of it, and some room for the results."""
    options = {name: problem[name] for name in _OPTIONS}
    q, k, v = (problem[name] for name in ("q", "k", "v"))
    out, lse = fmha_fwd(q, k, v, return_lse=True, **options)
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    dout = torch.randn(out.shape, generator=rng).to(out.dtype)
    dlse = torch.randn(lse.shape, generator=rng) if draw(st.booleans()) else None
    made: Arguments = {
        "q": q,
        "k": k,
        "v": v,
        "lse": lse,
        "dlse": dlse,
        "out": _laid_out(draw, out),
        "dout": _laid_out(draw, dout),
        **options,
    }
    for name, source in _WRITTEN.items():
        room = _laid_out(draw, torch.zeros_like(problem[source])).fill_(FRESH)
        made[name] = room if draw(st.booleans()) else None
    return made


def _laid_out(draw: Draw, x: Tensor) -> Tensor:
    """In memory of any layout, also where there is no batch."""
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    return lay_out(x, layout) if x.dim() == 4 else lay_out(x[None], layout)[0]


def backward_asked(arguments: Arguments) -> tuple[Arguments, set[str]]:
    call = {**PLAIN, **{name: arguments[name] for name in ("q", "k", "v", *_OPTIONS)}}
    return call, _broken_layouts(arguments) | _broken_shapes(arguments) | _broken_room(arguments)


def _is_strided(x: object) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided


def _broken_layouts(arguments: Arguments) -> set[str]:
    """What is no tensor, and what is not of q's dtype and device."""
    broken = set()
    q = arguments["q"]
    for name in ("out", "dout", "lse", "dlse", *_WRITTEN):
        x = arguments[name]
        if x is None and name in ("dlse", *_WRITTEN):
            continue
        if not _is_strided(x):
            broken.add(name)
        elif isinstance(q, Tensor):
            dtype = torch.float32 if name.endswith("lse") else q.dtype
            if (x.dtype, x.device) != (dtype, q.device):
                broken |= {name, "q"}
    return broken


def _broken_shapes(arguments: Arguments) -> set[str]:
    """What has not the shape that q, k and v ask for, or apart from an lse, elements apart."""
    q, k, v = (arguments[name] for name in ("q", "k", "v"))
    dims = 3 if is_group(arguments) else 4
    if not all(_is_strided(x) and x.dim() == dims for x in (q, k, v)):
        return set()
    of_out, of_lse = (*q.shape[:-1], v.shape[-1]), (*q.shape[:-3], q.shape[-2], q.shape[-3])
    shapes = {"out": of_out, "dout": of_out, "lse": of_lse, "dlse": of_lse}
    shapes |= {name: arguments[source].shape for name, source in _WRITTEN.items()}
    broken = set()
    for name, shape in shapes.items():
        x = arguments[name]
        if not _is_strided(x):
            continue
        has_columns_apart = x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1
        if x.shape != shape or (has_columns_apart and not name.endswith("lse")):
            broken.add(name)
    return broken


def _broken_room(arguments: Arguments) -> set[str]:
    """Where results have gradients, or overlap with themselves, each other or what is read."""
    broken = set()
    taken = {name: arguments[name] for name in _READ}
    for name in _WRITTEN:
        x = arguments[name]
        if not _is_strided(x):
            continue
        if x.requires_grad and torch.is_grad_enabled():
            broken.add(name)
        mine = places_of(x)
        if len(mine) < x.numel() * x.element_size() or is_interleaved(x):
            broken.add(name)
        for other, y in taken.items():
            if not x.is_meta and _is_strided(y) and not y.is_meta:
                broken |= set() if mine.isdisjoint(places_of(y)) else {name, other}
        taken[name] = x
    return broken


def check_gradients(arguments: Arguments, returned: Any) -> None:
    """To the bit those of contiguous copies; rows of given tensors that are unused stay."""
    copies = {
        name: x.detach().contiguous().clone() if isinstance(x, Tensor) else x
        for name, x in arguments.items()
    }
    expected = fmha_bwd(**copies | dict.fromkeys(_WRITTEN))
    for (name, source), actual, wanted in zip(_WRITTEN.items(), returned, expected, strict=True):
        given = arguments[name]
        assert given is None or actual is given
        assert actual.shape == arguments[source].shape
        assert actual.dtype == arguments[source].dtype
        if actual.is_meta:
            continue
        if given is not None and is_group(arguments):
            side = "q" if name == "dq" else "k"
            used = [slice(at, at + n) for at, n in places(arguments, side)]
            parts = [(actual[rows], wanted[rows]) for rows in used]
        else:
            parts = [(actual, wanted)]
        for x, reference in parts:
            assert torch.equal(x.isnan(), reference.isnan()), name
            assert torch.equal(x.nan_to_num(), reference.nan_to_num()), name


SUBJECT = Subject(
    *("fmha_bwd", fmha_bwd, ("gm0", "gm1"), backward_arguments, backward_asked, no_results),
    kinds=BACKWARD_KINDS,
    written=tuple(_WRITTEN),
    check=check_gradients,
)


def test_function(sweep):
    known = KnownCall()

    def check(call: Call, tally: Tally) -> None:
        check_call(call, tally, known=known)

    sweep(any_calls(SUBJECT), check)
