"""The public functions of the package: argument checks, and the way down to the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Generator, Tensor

from ..problem.arguments import (
    OPTION_NAMES,
    Arguments,
    Bf16Cvt,
    Dropout,
    check_choice,
    gather_cu_seqlens,
    gather_descales,
    gather_dropout,
    gather_keys,
    new_tuple,
)
from ..problem.checks import (
    check_not_negative,
    not_a_tensor,
    refuse_unexpected,
    requires_any_grad,
    result_requires_grad,
)
from ..problem.dropout import new_rng_state
from ..problem.mask import OPEN_WINDOW
from ..problem.memory import refuse_shared_rooms, write_values
from ..problem.problem import make_problem
from ..problem.score_features import Modifiers, gather_modifiers
from ..problem.torch_parts import is_any_autocast_enabled, is_any_special, is_watched
from .backward import BackwardArguments, make_backward_problem
from .detection import planned_target
from .dispatch import Explanation, explain_problem
from .pytorch import batching as _batching  # noqa: F401 - of the operators
from .pytorch.autocast import under_autocast
from .pytorch.autograd import attend, differentiate
from .pytorch.flop_count import join_flop_counters
from .pytorch.ops import call_operator
from .run import prepared_call, run_prepared

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..problem.arguments import AttentionOptions, FeatureOptions, Options

_is_grad_enabled = torch.is_grad_enabled

_NO_FEATURES = (None,) * 4  # the last fields of Arguments

# The default of what a number turns on. That nothing is asked for is seen by its identity, which is
# quick; every other number, 0.0 as well, is checked. An int: torch.compile makes floats inputs.
OFF = 0


@overload
def fmha_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def fmha_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def fmha_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def fmha_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    # What follows is given by name. A bare star would say so as well, but Python looks up each
    # default behind it in a dict: half a microsecond in every call.
    _only_by_name: object = ...,
    softmax_scale: float | None = None,
    mask: int | str = 0,
    window_size: tuple[int, int] = OPEN_WINDOW,
    return_lse: bool = False,
    out: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
    bf16_cvt: Bf16Cvt = "rtne",
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    p_descale: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    logit_softcap: float = OFF,
    sink: Tensor | None = None,
    sink_size: int = OFF,
    dropout_p: float = OFF,
    generator: Generator | None = None,
    rng_state: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int = OFF,
    deterministic: bool | None = None,
    **score_features: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Fused multi-head attention, ``softmax(softmax_scale * q @ k^T) @ v`` for each head.

    Without ``cu_seqlens`` every sequence has the same lengths (batch mode, gm0). With
    ``cu_seqlens_q`` and ``cu_seqlens_k`` sequences of different lengths lie packed one after the
    other (group mode, gm1).

    Args:
        q: gm0 ``(b, sq, hq, hdim)``, gm1 ``(total_q, hq, hdim)``; bfloat16, float16, float32,
            int8, float8_e4m3fnuz and float8_e5m2fnuz on the CPU and on gfx942, float8_e4m3fn and
            float8_e5m2 on the CPU and on gfx950. 8 bits have no gradients. Any strides, as long as
            the last dimension is contiguous; never copied.
        k: gm0 ``(b, sk, hk, hdim)``, gm1 ``(total_k, hk, hdim)``, with hk a divisor of hq
            (GQA, MQA): query head h reads key head ``h // (hq // hk)``. q's dtype, or one of
            8 bits with a q of 16 or 32, which keeps its bits: k and v are what is converted.
        v: as k, with a head dimension ``hdim_v`` of its own. Both are 1 to 576. Keys may be
            contiguous in place of the last dimension (``v.stride(1) == 1`` in gm0,
            ``v.stride(0) == 1`` in gm1), which is read as it lies, too.
        softmax_scale: finite and > 0; ``1 / sqrt(hdim)`` by default.
        mask: 0 or "none"; 1 or "t" (causal, top-left: key j is seen by query i when j <= i); 2, "b"
            or "causal" (causal, bottom-right: when j <= i + sk - sq); "t:l,r" and "b:l,r", a window
            from l keys left to r keys right of the diagonal of mask 1 and of mask 2, where l = -1
            is open and r = -1 is 0; "xt:w" and "xb:w", the same with l = w // 2 and r = (w - 1) //
            2, or causal where w < 1; "g:y,x", the generic coordinates: i - y < j < i + x. In gm1
            each sequence has its own diagonal.
        window_size: (left, right), in keys around the mask's diagonal, -1 being open. Masks 1 and
            2 hide what is right of the diagonal all the same; with mask 0 the diagonal is the
            bottom-right one.
        return_lse: also return the log-sum-exp of the scaled scores.
        out: where to write the result: the shape of q with hdim_v last, q's dtype (for 8 bits
            bfloat16, float16 or float32; a new one is bfloat16), any strides with a contiguous last
            dimension, no memory shared with another argument or itself.
        cu_seqlens_q, cu_seqlens_k: int32 ``(b + 1,)``, the prefix sums of the lengths, from 0.
        max_seqlen_q, max_seqlen_k: the longest lengths, optional. A GPU does not check them: there
            queries from max_seqlen_q up are not computed, and giving it saves empty workgroups.
        cu_seqlens_q_padded, cu_seqlens_k_padded: int32 ``(b + 1,)``, where each sequence starts in
            the packed tensors if there are unused rows between them. Unused rows of a fresh output
            are 0 and of the lse -inf; those of ``out`` stay as they are. Without this argument the
            sequences must cover all rows of q on a GPU, where nobody reads the numbers to find out.
        bf16_cvt: how probabilities become bf16: "rtne" rounds to nearest even, "rtna" to nearest
            away from zero, "rtz" towards zero. Only gfx942 has a choice, for bf16 inputs.
        q_descale, k_descale, v_descale: what 8-bit inputs are multiplied with, 1 by default:
            float32 of shape ``(1,)``; ``(b, hk)``, a scale for each sequence and key head; or one
            for each head, ``(hq,)`` of q and ``(hk,)`` of k and v; or of k and v one for each
            token and head, in the shape that they have with 1 in place of the last dimension:
            ``(b, sk, hk, 1)``, in gm1 ``(total_k, hk, 1)``, in pages
            ``(num_pages, page_size, hk, 1)``, with any strides. They are at least 0, which nobody
            checks.
        p_descale: for int8 q, k and v: probabilities become int8, too, so that both products are
            exact sums of integers. ``p / p_descale`` is rounded towards zero, 127 at most, where p
            is the probability relative to the largest one of its row so far, so that ``1 / 127``
            fits; the output is multiplied with it. float32 as q_descale, greater than 0, and not
            beside a v_descale of tokens. The
            softmax's sum, and the lse, have the probabilities before that.
        bias: added to the scaled scores, after the soft cap: q's dtype (bfloat16 for 8 bits) or
            float32, any strides. gm0 ``(b, hq, sq, sk)``, gm1 ``(hq, total_q, max_seqlen_k)``, for
            which ``max_seqlen_k`` is needed; each dimension but the last may be 1, which serves
            all. Or bool: False hides the key, as in SDPA.
        alibi_slopes: float32 ``(hq,)`` or ``(b, hq)``: the score of query i and key j is lowered by
            ``slope * |i + sk - sq - j|``, whatever the mask.
        logit_softcap: scores become ``logit_softcap * tanh(score / logit_softcap)``, before bias
            and mask; 0 is off.
        sink: float32 ``(hq,)``, one more score in each row of a head, which belongs to no key. It
            counts in the lse.
        sink_size: the first keys of each sequence that a window's left side never hides.
        dropout_p: the probability with which a probability of the softmax is dropped; at least 0
            and less than 1, in steps of 1/256. The others are divided by ``1 - dropout_p``. Which
            ones they are depends on the random state and their position alone:
            see :func:`jitfmha.dropout_randval`.
        generator: where dropout draws its random state from; by default torch's own one for the
            device.
        rng_state: the random state itself, int64 ``(2,)`` on the device of q: to drop the same
            again. :func:`jitfmha.new_rng_state` gives one. Without dropout neither is looked at.
        block_table: int32 ``(b, most pages)``, the pages of each sequence, for gm1: k is then
            ``(num_pages, page_size, hk, hdim)``, with any page size, and v accordingly. Or AITER's
            packed pages, k ``(num_pages, hk, hdim / x, page_size, x)`` and v
            ``(num_pages, hk, page_size / x, hdim_v, x)``, with as many numbers in x as 16 bytes
            hold and the last three dimensions contiguous. Sequences
            may share pages; what stands behind the last page of a sequence has no meaning. There is
            no backward pass. Or int32 ``(total pages,)``, a list for each sequence, as SGLang has
            them: ``cu_seqlens_k_padded`` then says where each begins in it, and need not begin
            at 0. Where a page holds one key it may be ``cu_seqlens_k``, which it is by default.
        num_splits: into how many parts the keys of a sequence are split, up to 128, so that more
            threads, or compute units, have something to do; 0 leaves the choice. A part is a whole
            number of key tiles, so that short sequences have fewer. Results depend on it in their
            last bits, and never on the number of threads.
        deterministic: that of :func:`jitfmha.fmha_bwd`, where ``torch.autograd`` calls it. The
            forward pass is deterministic in any case.

    Returns:
        out, contiguous unless ``out`` was given; or ``(out, lse)``, lse being float32, gm0
        ``(b, hq, sq)``, gm1 ``(hq, total_q)``. A query that sees no key gets 0 and lse -inf.

    Raises:
        TypeError, ValueError: an argument breaks a rule; the text names it and its value.
        NotImplementedError: nothing serves the call yet; the text lists the reasons. Also for
            derivatives in forward mode, for second ones, and for any where ``out`` is given.
        jitfmha.BuildError: the launcher could not be compiled on first use.
        jitfmha.HipError: the HIP runtime refused to load or launch the kernel.

    Source: Dao et al., FlashAttention (arXiv 2205.14135), for tiling and the online softmax;
    ``python/perf-kernels/flash-attention.py`` of github.com/ROCm/triton for what is int8 when.
    """
    if _only_by_name is not ...:
        raise TypeError(
            "fmha_fwd takes 3 arguments by position, q, k and v, and the others by name; "
            f"a fourth one is {_only_by_name!r}"
        )
    cu_seqlens = None
    if (
        cu_seqlens_q is not None
        or cu_seqlens_k is not None
        or cu_seqlens_q_padded is not None
        or cu_seqlens_k_padded is not None
        or max_seqlen_q is not None
        or max_seqlen_k is not None
    ):
        cu_seqlens = gather_cu_seqlens(
            cu_seqlens_q,
            cu_seqlens_k,
            cu_seqlens_q_padded,
            cu_seqlens_k_padded,
            max_seqlen_q,
            max_seqlen_k,
        )
    descales = None
    if (
        q_descale is not None
        or k_descale is not None
        or v_descale is not None
        or p_descale is not None
    ):
        descales = gather_descales(q_descale, k_descale, v_descale, p_descale)
    if (
        bias is not None
        or alibi_slopes is not None
        or sink is not None
        or logit_softcap is not OFF
        or sink_size is not OFF
    ):
        score_features |= {
            "bias": bias,
            "alibi_slopes": alibi_slopes,
            "logit_softcap": logit_softcap,
            "sink": sink,
            "sink_size": sink_size,
        }
    modifiers = None
    if score_features:
        unexpected = [name for name in score_features if name not in Modifiers._fields]
        if unexpected:
            refuse_unexpected("fmha_fwd", unexpected, OPTION_NAMES)
        modifiers = gather_modifiers(score_features)
    dropout = None
    if dropout_p is not OFF:
        dropout = _drawn(q, gather_dropout(dropout_p, generator, rng_state), generator)
    keys = None
    if block_table is not None or num_splits is not OFF:
        keys = gather_keys(block_table, num_splits, cu_seqlens)
    if deterministic is not None:
        check_choice("deterministic", deterministic)
    arguments = new_tuple(
        Arguments,
        (
            q,
            k,
            v,
            softmax_scale,
            mask,
            window_size,
            return_lse,
            out,
            cu_seqlens,
            bf16_cvt,
            descales,
            modifiers,
            dropout,
            keys,
        ),
    )
    watched = (
        is_watched(q, k, v)
        or is_any_autocast_enabled()
        or (out is not None and is_any_special(out))
        or (
            (cu_seqlens or descales or modifiers or dropout or keys) is not None
            and arguments.has_special_options()
        )
    )
    if (
        not watched
        and _is_grad_enabled()
        and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (out is not None and requires_any_grad(out))
            or (descales is not None and requires_any_grad(*descales))
            or (modifiers is not None and requires_any_grad(*modifiers))
        )
    ):
        results = attend(arguments, deterministic)
        return results if return_lse else results[0]
    if watched:
        # Not plain: a subclass, a mode, a transform, tensors without values, or with values whose
        # sign is turned around by a bit of the tensor; or autocast or a profiler has to know of
        # the call.
        if not torch.compiler.is_compiling():
            join_flop_counters()
            arguments = under_autocast(arguments)
            # Torch's dispatcher says less clearly, and with other types, what is wrong.
            make_problem(arguments)
        result, lse = call_operator(arguments, deterministic)
        return (result, lse) if return_lse else result
    try:
        result, lse_or_none = run_prepared(prepared_call(arguments), arguments)
    except RuntimeError:
        # Torch knows no shape of a nested tensor and no address of a sparse one, and to ask before
        # would cost every call.
        make_problem(arguments)
        raise
    return result if lse_or_none is None else (result, lse_or_none)


def fmha_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    # As in fmha_fwd. The options of features, which are rare, take longer to be found.
    _only_by_name: object = ...,
    softmax_scale: float | None = None,
    mask: int | str = 0,
    window_size: tuple[int, int] = OPEN_WINDOW,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
    bf16_cvt: Bf16Cvt = "rtne",
    dlse: Tensor | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    dbias: Tensor | None = None,
    dsink: Tensor | None = None,
    deterministic: bool | None = None,
    atomic_fp32: bool | None = None,
    **features: Unpack[FeatureOptions],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`jitfmha.fmha_fwd` with respect to q, k and v.

    ``torch.autograd`` calls it by itself for inputs of ``fmha_fwd`` that require grad. The result
    of kernels that this package compiles is deterministic: it depends neither on the number of
    threads nor on their order. Those that come ready, or are of a tree that JITFMHA_HSA_DIR names,
    add dq up with atomics. Beside the results it takes memory that is linear in the sequence
    lengths.

    Args:
        dout: the gradient of out, of out's shape and dtype, any strides with a contiguous last
            dimension.
        q, k, v: as :func:`jitfmha.fmha_fwd` had them.
        out, lse: what it returned; ``lse`` is float32, gm0 ``(b, hq, sq)``, gm1 ``(hq, total_q)``,
            any strides.
        dlse: the gradient of the lse where something depends on it, as ``lse``.
        dq, dk, dv: where to write; the shapes and the dtype of q, k and v, any strides with a
            contiguous last dimension, no memory shared with another argument; tensors that do
            not require grad.
        dbias, dsink: where to write the gradients of ``bias`` and ``sink``, with their shapes, any
            dtype and any strides, no memory shared with another argument; None where they are not
            wanted. For dbias each score takes 4 bytes for a while, also where one bias serves many:
            float32 ``(b, hq, sq, sk)``, or in gm1 ``(hq, total_q, max_seqlen_k)``. Nothing else
            here grows faster than the lengths.
        deterministic: True refuses kernels whose results may differ in their last bits from run to
            run; None does what ``torch.use_deterministic_algorithms`` says.
        atomic_fp32: whether kernels that add dq up with atomics do so in float32 (True), or in the
            dtype of q (False), which is less exact; None leaves the choice. Others ignore it.
        softmax_scale, mask, window_size, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            cu_seqlens_q_padded, cu_seqlens_k_padded, bf16_cvt, features: the options of
            :func:`jitfmha.fmha_fwd`, with the same values.

    Returns:
        dq, dk and dv, of the dtype of q. Unused rows between packed sequences are 0 in new tensors,
        and stay as they are in those that are given.

    Raises:
        TypeError, ValueError: an argument breaks a rule; the text names it and its value.
        NotImplementedError: nothing serves the call yet; the text lists the reasons.
        jitfmha.BuildError: the kernel could not be compiled on first use.

    Source: Dao, FlashAttention-2 (arXiv 2307.08691), algorithm 2. The lse's gradient adds to every
    score of its row what the row's probabilities are, which is a summand of delta.
    """
    if _only_by_name is not ...:
        raise TypeError(
            "fmha_bwd takes 6 arguments by position, dout, q, k, v, out and lse, and the others by "
            f"name; a seventh one is {_only_by_name!r}"
        )
    cu_seqlens = None
    if not (
        cu_seqlens_q is cu_seqlens_k is cu_seqlens_q_padded is cu_seqlens_k_padded is None
        and max_seqlen_q is max_seqlen_k is None
    ):
        cu_seqlens = gather_cu_seqlens(
            cu_seqlens_q,
            cu_seqlens_k,
            cu_seqlens_q_padded,
            cu_seqlens_k_padded,
            max_seqlen_q,
            max_seqlen_k,
        )
    plain = (q, k, v, softmax_scale, mask, window_size, False, out, cu_seqlens, bf16_cvt)
    forward = new_tuple(Arguments, plain + _NO_FEATURES)
    if features:
        forward = forward.with_features(features, "fmha_bwd")
    wants = dbias is not None, dsink is not None, deterministic, atomic_fp32
    given = forward, lse, dout, dlse, dq, dk, dv
    arguments = new_tuple(BackwardArguments, given + wants)
    if not (dq is dk is dv is dbias is dsink is None):
        _refuse_rooms_with_gradients(dq=dq, dk=dk, dv=dv, dbias=dbias, dsink=dsink)
        check_not_negative(dq=dq, dk=dk, dv=dv)
        _check_room("dbias", dbias, features.get("bias"))
        _check_room("dsink", dsink, features.get("sink"))
        if dbias is not None or dsink is not None:
            rooms = {"dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dsink": dsink}
            refuse_shared_rooms(*arguments.inputs(), **rooms)
    results = differentiate(arguments)
    if dbias is not None and results.dbias is not None:
        write_values(dbias, results.dbias)
    if dsink is not None and results.dsink is not None:
        write_values(dsink, results.dsink)
    return results[:3]


def _refuse_rooms_with_gradients(**rooms: object) -> None:
    if not _is_grad_enabled():
        return
    for name, room in rooms.items():
        if requires_any_grad(room):
            raise result_requires_grad(name)


def _check_room(name: str, room: Tensor | None, source: Tensor | None) -> None:
    """Check where a gradient goes, before anything is written.

    That ``source`` is a tensor which has a gradient is checked elsewhere.
    """
    if room is None or not isinstance(source, Tensor) or source.dtype == torch.bool:
        return
    if not isinstance(room, Tensor):
        raise not_a_tensor(name, room)
    if room.shape != source.shape:
        raise ValueError(f"{name} has shape {tuple(room.shape)}; expected {tuple(source.shape)}")


def _drawn(q: Tensor, dropout: Dropout | None, generator: Generator | None) -> Dropout | None:
    """Give the dropout with a random state; a state that is given is kept."""
    if dropout is None or dropout.rng_state is not None or not isinstance(q, Tensor):
        return dropout
    return Dropout(dropout.p, new_rng_state(q.device, generator=generator))


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    device: str | torch.device | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Explanation:
    """What :func:`fmha_fwd` would do with the same arguments: target, kernel and reasons.

    With ``device`` it is asked for tensors there in place of ``q.device``; a GPU need not be here:
    "gfx950", or the name of a chip, as "MI308X". The tensors may then be on ``meta``.

    Builds and launches nothing and does not read the tensors' data. ``print`` the result, or take
    its fields. Raises ``TypeError`` or ``ValueError`` as :func:`fmha_fwd` does for the arguments;
    a call that nothing serves is not an error here.
    """
    arguments = Arguments.of(q, k, v, {**options, "return_lse": return_lse}, "explain")
    problem = make_problem(arguments).with_unevenness(arguments.cu_seqlens)
    return explain_problem(problem, planned_target(q.device if device is None else device))


def explain_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    device: str | torch.device | None = None,
    dlse: Tensor | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    dbias: Tensor | None = None,
    dsink: Tensor | None = None,
    deterministic: bool | None = None,
    atomic_fp32: bool | None = None,
    **options: Unpack[AttentionOptions],
) -> Explanation:
    """What :func:`fmha_bwd` would do with the same arguments, as :func:`explain` tells it.

    Of kernels that a tree has and that are not taken because of what is known to be wrong with
    them, the remarks say so.
    """
    forward = Arguments.of(q, k, v, {**options, "out": out}, "explain_bwd")
    choices = dbias is not None, dsink is not None, deterministic, atomic_fp32
    arguments = BackwardArguments(forward, lse, dout, dlse, dq, dk, dv, *choices)
    problem = make_backward_problem(arguments)
    return explain_problem(problem, planned_target(q.device if device is None else device))
