"""The emulator's HIP functions, typed, with errors as exceptions."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .library import Variant, load
from .shared_structs import DEFAULT_TIME_SLICE, OPTIONS, RANGE

_POINTER = ctypes.c_void_p
# HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE and _END.
_LAUNCH_BUFFER, _LAUNCH_SIZE, _LAUNCH_END = 1, 2, 3
_InterruptionCheck = ctypes.CFUNCTYPE(ctypes.c_int)


class EmulatorError(RuntimeError):
    """A HIP call failed, with HIP's error code and its name, as hipErrorLaunchFailure."""

    def __init__(self, code: int, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.code = code
        self.name = name


@dataclass(frozen=True)
class Module:
    """A loaded code object, on one device."""

    handle: int
    device: int


@dataclass(frozen=True)
class Function:
    """A kernel of a loaded module, as ``hipModuleGetFunction`` gives it."""

    handle: int
    device: int
    name: str


@dataclass(frozen=True)
class Definition:
    """A row of the instruction tables: an instruction that is emulated.

    Attributes:
        mnemonic: without _e32, _e64, _sdwa, _dpp.
        format: of the encoding; `opcode` counts in it.
        chips: that have the instruction.
        unit: that executes it.
        registers: of the operands, where no signature says it.
        passes: of a matrix instruction, of 4 cycles each.
        result: (type, role).
        sources: (type, role) of each.
    """

    mnemonic: str
    format: str
    opcode: int
    chips: tuple[str, ...]
    unit: str
    registers: tuple[int, ...]
    passes: int
    result: tuple[str, str]
    sources: tuple[tuple[str, str], ...]


class LaunchParameters:
    """An argument block as hipModuleLaunchKernel takes it; valid as long as this is there.

    Attributes:
        extra: its last argument.
    """

    def __init__(self, kernarg: bytes) -> None:
        self._block = ctypes.create_string_buffer(kernarg, max(1, len(kernarg)))
        self._size = ctypes.c_size_t(len(kernarg))
        self.extra = (_POINTER * 5)(
            *(_LAUNCH_BUFFER, ctypes.addressof(self._block)),
            *(_LAUNCH_SIZE, ctypes.addressof(self._size), _LAUNCH_END),
        )


class Decoder:
    """The instruction tables of a library, and what it decodes by them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        _declare(library, _DECODING)

    def disassemble(self, arch: str, words: Sequence[int]) -> tuple[str, int]:
        """The text of the instruction that `words` begin with, and its dwords; 0: it is unknown."""
        array = (ctypes.c_uint32 * len(words))(*words)
        text = ctypes.create_string_buffer(256)
        length = self.library.jitfmha_emulator_disassemble(
            arch.encode(), array, len(words), text, len(text)
        )
        return text.value.decode(), length

    def definitions(self) -> list[Definition]:
        rows = json.loads(self.library.jitfmha_emulator_definitions())
        return [Definition(**{name: _frozen(value) for name, value in row.items()}) for row in rows]


class Emulator(Decoder):
    """The virtual node of one variant of the library: the devices of `VIRTUAL_NODE`."""

    def __init__(self, variant: Variant = "plain", library: ctypes.CDLL | None = None) -> None:
        super().__init__(load(variant) if library is None else library)
        _declare(self.library, _EXECUTING)

    def load_module(self, code_object: bytes, device: int) -> Module:
        """Load a code object; ``EmulatorError`` where it is damaged, or for another chip."""
        handle = _POINTER()
        self._check(self.library.hipSetDevice(device))
        self._check(
            self.library.jitfmha_emulator_module_load(
                ctypes.byref(handle), code_object, len(code_object)
            )
        )
        assert handle.value is not None
        return Module(handle.value, device)

    def unload_module(self, module: Module) -> None:
        self._check(self.library.hipModuleUnload(module.handle))

    @contextmanager
    def loaded(self, code_object: bytes, device: int, name: str) -> Iterator[Function]:
        """The kernel called `name` of a code object that is there until the end of the block."""
        module = self.load_module(code_object, device)
        try:
            yield self.function(module, name)
        finally:
            self.unload_module(module)

    def function(self, module: Module, name: str) -> Function:
        """The kernel called `name`; ``EmulatorError`` lists those there are where there is none."""
        handle = _POINTER()
        self._check(
            self.library.hipModuleGetFunction(ctypes.byref(handle), module.handle, name.encode())
        )
        assert handle.value is not None
        return Function(handle.value, module.device, name)

    def launch(
        self,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        kernarg: bytes,
        *,
        dynamic_lds: int = 0,
    ) -> None:
        """Run a kernel to its end, with packed arguments, without hidden ones.

        `dynamic_lds` counts bytes of LDS beyond those that the kernel declares. On the main thread
        Python's signal handlers run meanwhile, as in `interruptible`. Raises ``EmulatorError``
        where the kernel did something wrong or unknown; the message says where.
        """
        parameters = LaunchParameters(kernarg)
        self._check(self.library.hipSetDevice(function.device))
        with self.interruptible():
            self._check(
                self.library.hipModuleLaunchKernel(
                    function.handle, *grid, *block, dynamic_lds, None, None, parameters.extra
                )
            )

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Launches inside let Python's signal handlers run, on the main thread, which runs them.

        A handler that raises ends the launch, and what it raised (KeyboardInterrupt, as a rule)
        leaves the block in place of the launch's error.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        raised: list[BaseException] = []
        checks = _signal_checks(raised)
        next(checks)
        check = _InterruptionCheck(checks.__next__)
        set_check = self.library.jitfmha_emulator_set_interruption_check
        until_now = set_check(ctypes.cast(check, _POINTER))
        try:
            yield
        finally:
            set_check(until_now)
            if raised:
                raise raised[0] from None

    def set_options(
        self,
        *,
        threads: int = 0,
        time_slice: int = DEFAULT_TIME_SLICE,
        instruction_budget: int = 0,
        random_order: bool = False,
        register_fill: int = 0,
        seed: int = 0,
        print_findings: bool = True,
    ) -> None:
        """Set how later launches of this thread run.

        Args:
            threads: workers; 0: as many as the CPU has. In random order there is one.
            time_slice: instructions before the next wave of a workgroup gets its turn; at most
                65536, so that a launch can be stopped. Waves drift apart by that much: of the
                published kernels that hand LDS over without a barrier, some are right up to 7 only.
            instruction_budget: of each wave, after which it is stopped with an error; 0: none.
            random_order: waves take turns in random order, and `time_slice` is replaced by
                lengths from 1 to 4096, short ones as often as long ones. Workgroups take turns of 1
                to 65536 instructions. Loads into LDS land after 0 to 4095 instructions in place of
                150.
            register_fill: the content of registers and LDS that nobody wrote.
            seed: of `random_order`.
            print_findings: the sanitizer tells each finding on standard error, once in a process.
        """
        options = OPTIONS.ctype(
            threads=threads,
            time_slice=time_slice,
            instruction_budget=instruction_budget,
            random_order=random_order,
            register_fill=register_fill,
            seed=seed,
            print_findings=print_findings,
        )
        self.library.jitfmha_emulator_set_options(ctypes.byref(options), None)

    @contextmanager
    def keep_options(self) -> Iterator[None]:
        """Options that are set inside hold until the end of the block."""
        options = OPTIONS.ctype()
        self.library.jitfmha_emulator_set_options(None, ctypes.byref(options))
        try:
            yield
        finally:
            self.library.jitfmha_emulator_set_options(ctypes.byref(options), None)

    def set_allowed_memory(self, ranges: Sequence[tuple[int, int]] | None) -> None:
        """Set what later launches of this thread may touch.

        Args:
            ranges: (address, bytes) of each tensor. None, the initial state, allows everything.
        """
        if ranges is None:
            self.library.jitfmha_emulator_set_allowed_memory(None, -1)
            return
        limits = [RANGE.ctype(begin=begin, end=begin + size) for begin, size in ranges]
        array = (RANGE.ctype * len(limits))(*limits)
        self.library.jitfmha_emulator_set_allowed_memory(array, len(ranges))

    def last_error(self) -> str:
        text: bytes = self.library.jitfmha_emulator_last_error()
        return text.decode(errors="replace")

    def _check(self, code: int) -> None:
        if code != 0:
            name = self.library.hipGetErrorName(code).decode()
            raise EmulatorError(code, name, self.last_error())


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _signal_checks(raised: list[BaseException]) -> Iterator[int]:
    """Whether a launch goes on, each time that it asks; what a signal handler raises ends it.

    Python runs handlers where it enters a function or resumes a generator. A generator is resumed
    inside of its `try`; a function would not have come to that yet, and what the handler raises
    would be lost.
    """
    try:
        while True:
            yield 1
    except GeneratorExit:
        raise
    except BaseException as error:
        raised.append(error)
    while True:
        yield 0


_CTypes = tuple[str, Any, list[Any]]  # name, result, arguments
_U32, _INTEGER, _TEXT = ctypes.c_uint, ctypes.c_int, ctypes.c_char_p
_DECODING: tuple[_CTypes, ...] = (
    ("jitfmha_emulator_definitions", _TEXT, []),
    ("jitfmha_emulator_disassemble", _INTEGER, [_TEXT, _POINTER, _INTEGER, _POINTER, _INTEGER]),
)
_EXECUTING: tuple[_CTypes, ...] = (
    ("hipSetDevice", _INTEGER, [_INTEGER]),
    ("hipModuleLoadData", _INTEGER, [_POINTER, _TEXT]),
    ("jitfmha_emulator_module_load", _INTEGER, [_POINTER, _TEXT, ctypes.c_size_t]),
    ("hipModuleUnload", _INTEGER, [_POINTER]),
    ("hipModuleGetFunction", _INTEGER, [_POINTER, _POINTER, _TEXT]),
    ("hipModuleLaunchKernel", _INTEGER, [_POINTER, *[_U32] * 7, _POINTER, _POINTER, _POINTER]),
    ("hipGetErrorName", _TEXT, [_INTEGER]),
    ("jitfmha_emulator_last_error", _TEXT, []),
    ("jitfmha_emulator_set_options", None, [_POINTER, _POINTER]),
    ("jitfmha_emulator_set_allowed_memory", None, [_POINTER, ctypes.c_int64]),
    ("jitfmha_emulator_set_interruption_check", _POINTER, [_POINTER]),
)


def _declare(library: ctypes.CDLL, functions: tuple[_CTypes, ...]) -> None:
    """Give the functions their types. ctypes would pass pointers as 32-bit integers otherwise."""
    for name, result, arguments in functions:
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
