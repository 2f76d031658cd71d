"""The HIP runtime that launches go to: the one that torch uses, or what stands in for it.

torch has loaded the runtime already, and there must not be a second one: streams and memory of the
one mean nothing to the other. So the loaded one comes first, whatever its path is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

_NAME = "libamdhip64.so"
_MAPS = Path("/proc/self/maps")
# hipDeviceAttributePciChipId: ROCm 7.1 put another attribute before it, which has its old number
# (aiter pull request 5182). Ids of Instinct chips tell an answer from one to another question.
_PCI_CHIP_ID = (10019, 10020)
_INSTINCT_IDS = range(0x7400, 0x7600)


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
    def current_stream(self) -> Callable[[int], int | None]:
        """Device index -> the stream that torch's own kernels go to; None is the default one."""
        ...

    @property
    def launching(self) -> LaunchScope | None:
        """Gives what must be around a launch that may touch these tensors; None: nothing must."""
        ...


class HipRuntime:
    """A real HIP runtime."""

    has_host_memory = False
    launching = None

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.library_path = library._name
        # As it is, because every launch asks; a torch without GPU support has none.
        self.current_stream: Callable[[int], int | None] = getattr(
            torch._C, "_cuda_getCurrentRawStream", _no_stream
        )

    def describe_device(self, device_index: int) -> str:
        """As ``device 0``."""
        return f"device {device_index}"

    def pci_chip_id(self, device: int) -> int:
        """The PCI device id of a GPU, which tells chips of one architecture apart.

        Where no number of the attribute gives an Instinct chip's id, the first answer is returned.

        Raises:
            HipError: the runtime does not tell.
        """
        answers = []
        for attribute in _PCI_CHIP_ID:
            value = ctypes.c_int()
            code = self.library.hipDeviceGetAttribute(ctypes.byref(value), attribute, device)
            if code == 0 and value.value in _INSTINCT_IDS:
                return value.value
            answers.append((code, value.value))
        code, answer = answers[0]
        if code != 0:
            raise HipError(
                code, f"hipDeviceGetAttribute(PciChipId) of device {device} failed: {code}"
            )
        return answer


def _no_stream(_device_index: int) -> None:
    """Launches go to the default stream."""


def loaded_runtime() -> HipRuntime:
    """The HIP runtime that torch uses, or the one that it would load.

    Raises:
        HipError: there is none; the text names what was tried.
    """
    tried = []
    for path, already_loaded in _candidates():
        flags = os.RTLD_NOW | (os.RTLD_NOLOAD if already_loaded else 0)
        try:
            return HipRuntime(ctypes.CDLL(path, mode=flags))
        except OSError as error:
            tried.append(f"{path} ({error})")
    raise HipError(-1, f"the HIP runtime was not found; tried {'; '.join(tried)}")


def _candidates() -> list[tuple[str, bool]]:
    """Libraries to try in turn, and whether only a copy that is loaded already counts."""
    beside_torch = Path(torch.__file__).parent / "lib" / _NAME
    return [
        *((path, True) for path in _mapped_libraries()),
        (_NAME, True),
        (str(beside_torch), False),
        (_NAME, False),
    ]


def _mapped_libraries() -> list[str]:
    """The HIP runtimes in this process's memory, by path."""
    try:
        maps = _MAPS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return list(dict.fromkeys(path for path in paths if Path(path).name.startswith(_NAME)))
