"""Parts of torch that are not public, and what is done in their place where they are missing.

A call in eager mode goes past torch's dispatcher as long as nobody has to know of it. To ask
whether that is so, torch has quick functions, which it does not promise to keep. Where one is
missing the answer is that somebody has to know: the call goes through ``torch.ops.jitfmha``, which
is always right, and takes longer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from .checks import requires_any_grad


def _part(path: str, public: Any) -> Any:
    """What ``torch.<path>`` is, or ``public`` where there is no such thing."""
    try:
        return reduce(getattr, path.split("."), torch)
    except AttributeError:
        return public


# ---- Whether somebody has to know of a call ------------------------------------------------------

# A quarter of the time that torch.compiler.is_compiling takes. They disagree in an export that runs
# this package's functions, with tensors that are not plain anyway.
is_traced = torch.compiler.is_dynamo_compiling
number_of_dispatch_modes: Callable[[], int] = _part("_C._len_torch_dispatch_stack", lambda: 1)
functorch_level: Callable[[], int | None] = _part("_C._functorch.maybe_current_level", lambda: 0)
is_any_autocast_enabled: Callable[[], bool] = _part(
    "_C._is_any_autocast_enabled",
    lambda: torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
)


PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))
"""Tensors of other types are not plain, nor are those whose values a bit of them turns around."""

_NUMBERS_AND_PLAIN = PLAIN_TYPES | {int, float}


def has_watchers() -> bool:
    """Whether a mode, a transform, a tracer or a profiler is there."""
    try:
        return (
            is_traced()
            or number_of_dispatch_modes() != 0
            or functorch_level() is not None
            # A getattr of each takes 0.04 us longer.
            or forward_ad._current_level >= 0
            or profiler._is_profiler_enabled
        )
    except AttributeError:
        return True


def is_watched(x: Any, y: Any, z: Any, *others: Any) -> bool:
    """Whether a call with these tensors has to go through torch's dispatcher.

    One is not plain, or the first has no values (others without are refused, being elsewhere). Or
    there are watchers.
    """
    if (
        has_watchers()
        # Written out: a loop would take 0.2 us longer in every call.
        or not (type(x) in PLAIN_TYPES and type(y) in PLAIN_TYPES and type(z) in PLAIN_TYPES)
        or x.is_neg()
        or y.is_neg()
        or z.is_neg()
        or x.is_meta
    ):
        return True
    for other in others:  # noqa: SIM110 - a generator takes longer
        if type(other) not in PLAIN_TYPES or other.is_neg():
            return True
    return False


def is_any_special(*optional: Any) -> bool:
    """Whether one of them is a subclass's tensor, or has the negative bit."""
    for x in optional:
        if x is not None and (x.is_neg() if type(x) in PLAIN_TYPES else is_any_of_subclass(x)):
            return True
    return False


def is_any_of_subclass(*optional: object) -> bool:
    """Whether one of them is a subclass's tensor."""
    for x in optional:
        # Of None and of numbers that takes longer to be asked than all the rest.
        if not (x is None or type(x) in _NUMBERS_AND_PLAIN) and isinstance(x, Tensor):
            return True
    return False


_FakeTensor: Any = _part("_subclasses.FakeTensor", ())
_is_batched: Callable[[Tensor], bool] = _part("_C._functorch.is_batchedtensor", lambda _: False)
_PROXY: Any = _part("_C._TorchDispatchModeKey.PROXY", None)
_mode_of: Callable[[Any], Any] = _part("_C._get_dispatch_mode", lambda _: None)
_is_functional: Callable[[Tensor], bool] = _part(
    "_C._functorch.is_functionaltensor", lambda _: False
)


def can_be_read(x: Tensor) -> bool:
    """Whether a check may look at values: not on a GPU, which it would wait for.

    Nor in a trace, also one of real tensors, which would keep what was read; of fake and functional
    tensors, which have none; and of those of many examples of a vmap.
    """
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not isinstance(x, _FakeTensor)
        and not _is_batched(x)
        and not _is_functional(x)
        and not _is_recorded()
    )


def _is_recorded() -> bool:
    """Whether ``make_fx`` records operations."""
    has_modes = number_of_dispatch_modes() != 0 and _PROXY is not None
    return has_modes and _mode_of(_PROXY) is not None


def is_profiled() -> bool:
    """Whether torch's profiler is on; without torch's word for it a call is named anyway."""
    return bool(getattr(profiler, "_is_profiler_enabled", True))


def has_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation may be there."""
    return bool(getattr(forward_ad, "_current_level", 0) >= 0)


def refuse_tangents(named: Iterable[tuple[str, Tensor]], what_has: str) -> None:
    """Raise ``NotImplementedError`` for a tensor with a tangent of forward mode.

    ``named`` tells what to call each; ``what_has`` no such derivative is as "attention has".
    """
    if not has_forward_mode():
        return
    for name, x in named:
        if forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{name} carries a forward-mode tangent, and {what_has} no forward-mode derivative"
            )


def refuse_derivatives(function: str, **tensors: object) -> None:
    """Raise ``NotImplementedError`` where a derivative is asked for of a function without one."""
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if isinstance(x, Tensor) and x.requires_grad:
                raise NotImplementedError(
                    f"{name} requires grad; {function} has no backward pass: call it under "
                    "torch.no_grad()"
                )
    named = ((name, x) for name, x in tensors.items() if isinstance(x, Tensor))
    refuse_tangents(named, f"{function} has")


number_of_function_modes: Callable[[], int] = _part("_C._len_torch_function_stack", lambda: 1)
function_modes: Callable[[], list[Any]] = _part(
    "overrides._get_current_function_mode_stack", lambda: [None]
)
# Public, and in every torch; the path to it takes as long as the call.
is_flash_enabled: Callable[[], bool] = torch.backends.cuda.flash_sdp_enabled
try:
    from torch.utils._device import DeviceContext
except ImportError:
    DeviceContext = ()  # type: ignore[assignment, misc, unused-ignore]


def is_function_mode_asked() -> bool:
    """Whether a TorchFunctionMode may look at calls; that of a default device passes attention."""
    return number_of_function_modes() != 0 and any(
        not isinstance(mode, DeviceContext) for mode in function_modes()
    )


# ---- The derivatives of operators ----------------------------------------------------------------

SingleLevelFunction: Any = torch.autograd.Function
below_autograd: Any = None
try:
    from torch._functorch.utils import enable_single_level_autograd_function
    from torch.autograd import function as _function

    SingleLevelFunction = _function._SingleLevelFunction
    below_autograd = torch._C._AutoDispatchBelowAutograd
except (ImportError, AttributeError):
    below_autograd = None
has_autograd_kernels: bool = below_autograd is not None
"""Whether operators can have kernels for torch's autograd key, which see what is asked for before
they run. Otherwise torch.library.register_autograd makes one."""


def register_autograd(
    library: torch.library.Library, name: str, kernel: Callable[..., Any], function: Any
) -> None:
    """Give an operator its derivative: ``kernel``, or else ``function``'s where it has one."""
    if has_autograd_kernels:
        library.impl(name, kernel, "Autograd")
    elif function is not None:
        torch.library.register_autograd(
            f"jitfmha::{name}",
            function.backward,
            setup_context=function.setup_context,
            lib=library,
        )


def plain_apply(function: Any) -> Callable[..., Any]:
    """``function.apply`` for calls inside of no transform, past what torch does for these."""
    try:
        apply: Callable[..., Any] = super(torch.autograd.Function, function).apply
    except AttributeError:
        return function.apply  # type: ignore[no-any-return]
    return apply


def apply_at_one_level(function: Any, given: tuple[Any, ...]) -> Any:
    """``function.apply``; inside of torch.func.grad at one of its levels."""
    with enable_single_level_autograd_function():
        return function.apply(*given)


def apply_where_asked(function: Any, given: tuple[Any, ...]) -> Any:
    """The same where a gradient is asked for; else ``function.forward``."""
    if torch.is_grad_enabled() and requires_any_grad(*given):
        return apply_at_one_level(function, given)
    return function.forward(*given)


def operator_with_gradient(
    name: str, save: Callable[..., Any], backward: Callable[..., Any]
) -> Any:
    """An autograd function of ``jitfmha::<name>``."""

    def forward(*given: Any) -> Any:
        with below_autograd():
            results = getattr(torch.ops.jitfmha, name).default(*given)
        return tuple(results) if isinstance(results, list) else results

    functions = {"forward": forward, "setup_context": save, "backward": backward}
    methods = {key: staticmethod(each) for key, each in functions.items()}
    return type(name, (SingleLevelFunction,), methods)


def operator_of_gradients(name: str, of_what: str) -> Any:
    """The same of one whose results are gradients, which cannot be differentiated."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            f"the gradients of {of_what} cannot be differentiated once more: {name} has no "
            "backward pass of its own"
        )

    return operator_with_gradient(name, lambda *_: None, refuse)


def implement(
    library: torch.library.Library, name: str, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Give an operator its kernel on all devices, and what stands for it where it is traced."""
    for key in ("CPU", "CUDA"):
        library.impl(name, kernel, key)
    torch.library.register_fake(f"jitfmha::{name}", fake, lib=library)


def register_derivative(
    library: torch.library.Library, name: str, function: Any, of_what: str
) -> None:
    """Give an operator the derivative that ``function`` has, and none in forward mode."""

    def at_autograd(*given: Any) -> Any:
        named = ((f"a tensor of shape {tuple(x.shape)}", x) for x in given if isinstance(x, Tensor))
        refuse_tangents(named, f"{of_what} has")
        return apply_where_asked(function, given)

    register_autograd(library, name, at_autograd, function)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Operators that are called in it are not cast once more."""
    try:
        key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}")
        return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))
    except AttributeError:
        return torch.autocast(device_type, enabled=False)


def dispatch_modes() -> list[Any]:
    """The modes that see operators; none where torch does not tell."""
    try:
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    except ImportError:
        return []
    return list(_get_current_dispatch_mode_stack())


# ---- Processors and devices ----------------------------------------------------------------------


def has_cpu_feature(name: str) -> bool:
    """Whether the processor and its operating system have avx2, avx512, avx512_bf16 or amx_tile."""
    asked = _part(f"cpu._is_{name}_supported", None)
    if asked is not None:
        return bool(asked())
    public = torch.backends.cpu.get_cpu_capability()
    return {"avx2": ("AVX2", "AVX512"), "avx512": ("AVX512",)}.get(name, ()).count(public) > 0


def init_amx() -> bool:
    """Ask the operating system for the tiles of AMX, on behalf of this process."""
    return bool(_part("cpu._init_amx", lambda: False)())


def current_stream(device: int) -> int:
    """The address of torch's current stream; 0 where torch has no GPU support."""
    return int(torch.cuda.current_stream(device).cuda_stream) if torch.cuda.is_available() else 0


raw_current_stream: Callable[[int], int] = _part("_C._cuda_getCurrentRawStream", current_stream)


# ---- The CPU -------------------------------------------------------------------------------------


@cache
def thread_pool() -> tuple[ctypes.c_void_p, ...]:
    """The C functions of torch that run work on its threads, and tell how many there are."""
    plain = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    # A module, by which what it depends on is found, too.
    library = ctypes.CDLL(str(_part("_C.__file__", plain)))
    functions = library.torch_parallel_for, library.torch_get_num_threads
    return tuple(ctypes.cast(function, ctypes.c_void_p) for function in functions)


# Whether torch multiplies matrices in bfloat16 quicker than their float32 copies.
multiplies_bf16: Callable[[], bool] = _part("ops.mkldnn._is_mkldnn_bf16_supported", lambda: False)


_int_mm: Callable[[Tensor, Tensor], Tensor] | None = _part("_int_mm", None)
INT8_PRODUCT = "torch.matmul" if _int_mm is None else "torch._int_mm"
"""What :func:`int8_product` calls."""


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """The product of two int8 matrices in int32.

    Torch's own leaves the result as it was allocated (2.13.0) where a matrix has a single row whose
    stride is 1, rows that share memory, or rows that are 2^31 elements apart: that is copied.
    """
    if _int_mm is None:
        return a.int() @ b.int()
    a, b = (
        x if _has_plain_rows(x) or _has_plain_rows(x.mT)
        else x.clone(memory_format=torch.contiguous_format)
        for x in (a, b)
    )  # fmt: skip
    return _int_mm(a, b)


def _has_plain_rows(x: Tensor) -> bool:
    """Whether rows are contiguous, and one behind the other; not of one row or one column."""
    stride, step = x.stride()
    return 1 not in x.shape and step == 1 and x.shape[1] <= stride < 1 << 31
