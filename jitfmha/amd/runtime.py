"""The HIP runtime that launches go to: the one that torch uses, or what stands in for it.

A process can hold two of them, torch's own and that of a ROCm installation. Streams, modules and
memory of the one mean nothing to the other, so it has to be torch's. The order of the libraries in
the process's memory does not tell which one that is; where torch's own calls end does.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Wheels of PyTorch rename it, to `libamdhip64-<hash>.so`.
_NAMES = "libamdhip64*.so*"
SYSTEM_NAMES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
_LIBRARY_OF_TORCH = "libc10_hip.so"
_ROCM_PACKAGE = "_rocm_sdk_core"
_DEFAULT_ROCM = "/opt/rocm"
_MAPS = Path("/proc/self/maps")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
# hipDeviceAttributePciChipId: ROCm 7.1 put another attribute before it, which has its old number
# (aiter pull request 5182). Ids of Instinct chips tell an answer from one to another question.
PCI_CHIP_ID = (10019, 10020)
INSTINCT_IDS = range(0x7400, 0x7600)
_BUS_ID_BYTES = 64
_RELAXED_CAPTURE = 2  # hipStreamCaptureModeRelaxed
_STREAMS_OF_TORCH = 32  # that torch.cuda.Stream gives in turn


class HipError(RuntimeError):
    """A function of the HIP runtime failed.

    Attributes:
        code: HIP's number for the error; negative where the runtime could not be used at all.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


LaunchScope = Callable[[Iterable[Tensor | None]], AbstractContextManager[object]]


class Runtime(Protocol):
    """What a launcher needs of a HIP runtime. A target carries one as a value."""

    @property
    def library_path(self) -> str:
        """The library with the HIP functions, for dlopen.

        Raises:
            jitfmha.BuildError: it is built on first use, and does not compile.
        """
        ...

    @property
    def has_host_memory(self) -> bool:
        """Whether tensors lie in the host's memory, and a launch has ended when it returns."""
        ...

    def describe_device(self, device_index: int) -> str:
        """What a message calls the device."""
        ...

    @property
    def current_stream(self) -> Callable[[int], int]:
        """Device index -> the stream that torch's own kernels go to; 0 is the default one."""
        ...

    @property
    def launching(self) -> LaunchScope | None:
        """Gives what must be around a launch that may touch these tensors; None: nothing must."""
        ...

    def scale_of_one(self, device_index: int) -> Tensor:
        """A float32 1 of shape (1,) that kernels on the device may read from now on.

        On any stream, without waiting, and as long as the process lives.
        """
        ...


class _SymbolOwner(ctypes.Structure):
    """``Dl_info`` of dladdr."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


class HipRuntime:
    """A real HIP runtime.

    Attributes:
        library: with HIP's functions.
        library_path: the file that they are in.
        why: this runtime was taken, and no other.
        current_stream: device index -> the stream that torch's own kernels go to.
    """

    has_host_memory = False
    launching = None

    def __init__(self, library: ctypes.CDLL, why: str = "") -> None:
        """Raises ``OSError`` for a library without HIP's functions."""
        self.library = library
        self.library_path = _runtime_behind(library)
        self.why = why
        # As it is, because every launch asks; a torch without GPU support has none.
        self.current_stream: Callable[[int], int] = getattr(
            torch._C, "_cuda_getCurrentRawStream", _no_stream
        )

    def describe_device(self, device_index: int) -> str:
        """As ``device 0``."""
        return f"device {device_index}"

    def pci_chip_id(self, device: int) -> int | None:
        """The PCI device id of a GPU, which tells chips of one architecture apart.

        None where neither the runtime nor the kernel tells: ROCm 6.2 does not know the question,
        and a container may hide the bus.
        """
        for attribute in PCI_CHIP_ID:
            value = ctypes.c_int()
            code = self._call("hipDeviceGetAttribute", ctypes.byref(value), attribute, device)
            if code == 0 and value.value in INSTINCT_IDS:
                return value.value
        bus_id = ctypes.create_string_buffer(_BUS_ID_BYTES)
        if self._call("hipDeviceGetPCIBusId", bus_id, _BUS_ID_BYTES, device) != 0:
            return None
        try:
            folder = _PCI_DEVICES / bus_id.value.decode("ascii").lower()
            return int((folder / "device").read_text(encoding="ascii"), 16)
        except (OSError, ValueError):
            return None

    def scale_of_one(self, device_index: int) -> Tensor:
        """A float32 1 of shape (1,) that kernels on the device may read from now on.

        On any stream, without waiting, and as long as the process lives.
        """
        if device_index not in _scales_of_one:
            _scales_of_one.setdefault(device_index, self._made_scale_of_one(device_index))
        return _scales_of_one[device_index]

    def _made_scale_of_one(self, device_index: int) -> Tensor:
        # The call may be inside of a graph capture. On the stream that captures, the fill would run
        # with the graph's replays only, and the memory would go with the graph. So a stream that
        # does not capture gets both, and is waited for, which HIP allows in relaxed mode alone: in
        # any other it would spoil the capture.
        device = torch.device("cuda", device_index)
        with torch.cuda.device(device), self._relaxed_capture():
            for _ in range(_STREAMS_OF_TORCH):
                stream = torch.cuda.Stream(device)
                with torch.cuda.stream(stream):
                    if torch.cuda.is_current_stream_capturing():
                        continue
                    one = torch.ones(1, dtype=torch.float32, device=device)
                stream.synchronize()
                return one
        raise HipError(-1, f"every stream of device {device_index} is captured into a graph")

    @contextmanager
    def _relaxed_capture(self) -> Iterator[None]:
        """Inside, this thread may call what other streams' captures would be spoilt by."""
        mode = ctypes.c_int(_RELAXED_CAPTURE)
        exchange = "hipThreadExchangeStreamCaptureMode"  # of `mode` and the thread's
        has_changed = self._call(exchange, ctypes.byref(mode)) == 0
        try:
            yield
        finally:
            if has_changed:
                self._call(exchange, ctypes.byref(mode))

    def _call(self, name: str, *arguments: object) -> int:
        """HIP's code; -1 where the runtime has no such function.

        An error is taken back: torch would find it, and report it as its own.
        """
        function = getattr(self.library, name, None)
        if function is None:
            return -1
        code: int = function(*arguments)
        if code != 0:
            self.library.hipGetLastError()
        return code


# Graphs that were captured may read them whenever they are replayed, so they are never freed.
_scales_of_one: dict[int, Tensor] = {}


def _no_stream(_device_index: int) -> int:
    """Launches go to the default stream."""
    return 0


class _Candidate(NamedTuple):
    """A library that may be the runtime.

    Attributes:
        path: or a name for the linker.
        why: it would be taken.
        is_loaded: whether only a copy that is in the process already counts.
    """

    path: str
    why: str
    is_loaded: bool = False


def loaded_runtime() -> HipRuntime:
    """The HIP runtime that torch uses, or the one that it would load.

    Raises:
        HipError: there is none; the text names what was tried.
    """
    tried = [f"{_LIBRARY_OF_TORCH} (torch has not loaded it)"]
    for path, why, is_loaded in _candidates():
        flags = os.RTLD_NOW | (os.RTLD_NOLOAD if is_loaded else 0)
        try:
            return HipRuntime(ctypes.CDLL(path, mode=flags), why)
        except OSError as error:
            tried.append(f"{path} ({error})")
    places = ", ".join(str(folder / _NAMES) for folder, _ in _folders())
    raise HipError(-1, f"the HIP runtime was not found in {places}; tried {'; '.join(tried)}")


def folders_of_torch_runtime() -> list[tuple[Path, str]]:
    """Where the libraries that belong to torch's HIP runtime may lie, and why each is looked at.

    Loads nothing: where torch has loaded its runtime, that is the only place.
    """
    used = _runtime_of_torch()
    if used is not None:
        return [(Path(used).parent, "it lies beside the HIP runtime that torch uses")]
    *of_torch, _ = _folders()
    return of_torch


def _candidates() -> Iterator[_Candidate]:
    """Libraries to try in turn."""
    used = _runtime_of_torch()
    if used is not None:
        yield _Candidate(used, f"torch's {_LIBRARY_OF_TORCH} calls it", is_loaded=True)
    *of_torch, (rocm, in_rocm) = _folders()
    for folder, why in of_torch:
        yield from (_Candidate(str(path), why) for path in sorted(folder.glob(_NAMES)))
    for path in mapped_runtimes():
        yield _Candidate(path, "it is loaded in this process", is_loaded=True)
    for name in SYSTEM_NAMES:
        yield _Candidate(name, "the system's linker finds it")
    yield from (_Candidate(str(path), in_rocm) for path in sorted(rocm.glob(_NAMES)))


def _folders() -> list[tuple[Path, str]]:
    """Where PyTorch's own runtime may lie, then ROCm's, and why each is looked at."""
    package = importlib.util.find_spec(_ROCM_PACKAGE)
    roots = (package and package.submodule_search_locations) or ()
    in_package = f"it is in the package {_ROCM_PACKAGE}"
    rocm = Path(os.environ.get("ROCM_PATH") or _DEFAULT_ROCM)
    return [
        (_torch_lib(), "it came with torch"),
        *((Path(root) / "lib", in_package) for root in roots),
        (rocm / "lib", "it is ROCm's"),
    ]


def _torch_lib() -> Path:
    return Path(torch.__file__).parent / "lib"


def _runtime_of_torch() -> str | None:
    """The file in which torch's own calls end; None where torch has loaded none."""
    for name in (str(_torch_lib() / _LIBRARY_OF_TORCH), _LIBRARY_OF_TORCH):
        try:
            # A handle's symbols are those of the library and of what it depends on, so other
            # runtimes in the process are out of sight.
            return _runtime_behind(ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD))
        except OSError:
            continue
    return None


def _runtime_behind(library: ctypes.CDLL) -> str:
    """The file with the HIP functions that a library has, or gets from those it depends on.

    Raises:
        OSError: it has none.
    """
    function = getattr(library, "hipGetDevice", None)
    owner = _SymbolOwner()
    if function is None or not ctypes.CDLL(None).dladdr(function, ctypes.byref(owner)):
        raise OSError(f"{library._name} has no function hipGetDevice")
    return os.fsdecode(owner.file)


def mapped_runtimes() -> list[str]:
    """The HIP runtimes in this process's memory, by path; there should be one."""
    try:
        maps = _MAPS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    paths = (Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines())
    return list(dict.fromkeys(str(path) for path in paths if path.match(_NAMES)))
