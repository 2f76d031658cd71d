"""Code objects that somebody made to do harm: what they cost, and what of them reaches a terminal.

Damage that is random is for `test_fuzz.py`.
"""

import json
import re
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from jitfmha.amd.code_object import CodeObjectError, read_code_object
from jitfmha.cli import main
from jitfmha.emulator import EmulatorError, take_findings
from jitfmha.jit.elf import Elf
from jitfmha.jit.toolchain.device_compiler import compile_hip

# What takes less than a tenth of it, and took ten seconds to hours.
_SECONDS = 3.0
_ALIASES = 10_000
# Reads as a relocation that writes 0, as a symbol without a name, and as two empty notes.
_ENTRY = struct.pack("<QQQ", 0, 13, 0)
_ENTRIES = 20_000
_LOAD, _NOTE_SEGMENT = 1, 4
_STRINGS, _RELOCATIONS, _NOTES, _SYMBOLS = 3, 4, 7, 11
_SOURCE = """
extern "C" __global__ void abcdefgh(float* out) { out[__builtin_amdgcn_workitem_id_x()] = 1; }
"""


@pytest.fixture(scope="module")
def good() -> bytes:
    return compile_hip(_SOURCE, "gfx950")


def _section(kind: int, offset: int, size: int, link: int = 0) -> bytes:
    return struct.pack("<II4QIIQQ", 0, kind, 0, 0, offset, size, link, 0, 8, 24)


def _segment(kind: int, offset: int, size: int) -> bytes:
    return struct.pack("<II6Q", kind, 4, offset, 0, 0, size, size, 4)


def _grown(
    code_object: bytes,
    content: bytes,
    sections: Callable[[int, int], list[bytes]] = lambda offset, count: [],
    segments: Callable[[int], list[bytes]] = lambda offset: [],
) -> bytes:
    """With content and headers at the end.

    Args:
        sections: offset of the content, number of sections that are there -> more headers.
        segments: the same for program headers.
    """
    image = bytearray(code_object)
    image += bytes(-len(image) % 8) + content + bytes(-len(content) % 8)
    begin = len(image) - len(content) - -len(content) % 8
    for place, counts_at, size, more in (
        (32, 56, 56, lambda count: segments(begin)),
        (40, 60, 64, lambda count: sections(begin, count)),
    ):
        (table,) = struct.unpack_from("<Q", image, place)
        (count,) = struct.unpack_from("<H", image, counts_at)
        headers = more(count)
        struct.pack_into("<Q", image, place, len(image))
        struct.pack_into("<H", image, counts_at, count + len(headers))
        image += image[table : table + count * size] + b"".join(headers)
    return bytes(image)


def _aliases(good: bytes, kind: int) -> bytes:
    content = _ENTRY * _ENTRIES
    return _grown(
        good, content, lambda at, count: [_section(kind, at, len(content), link=1)] * _ALIASES
    )


def _aliased_segments(good: bytes, kind: int) -> bytes:
    content = _ENTRY * _ENTRIES
    return _grown(good, content, segments=lambda at: [_segment(kind, at, len(content))] * _ALIASES)


def _long_names(good: bytes) -> bytes:
    """Symbols that have half of the file as their name, in tables of one each."""
    name = b"a" * len(_ENTRY * _ENTRIES) + b"\0"
    return _grown(
        good,
        name + bytes(24),
        lambda at, count: [
            _section(_STRINGS, at, len(name)),
            *[_section(_SYMBOLS, at + len(name), 24, link=count)] * _ALIASES,
        ],
    )


@contextmanager
def _quickly() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < _SECONDS


_QUADRATIC = {
    "symbols": lambda good: _aliases(good, _SYMBOLS),
    "relocations": lambda good: _aliases(good, _RELOCATIONS),
    "notes": lambda good: _aliases(good, _NOTES),
    "segments": lambda good: _aliased_segments(good, _LOAD),
    "segments of notes": lambda good: _aliased_segments(good, _NOTE_SEGMENT),
    "long names": _long_names,
}
# The emulator reads notes by their segments, Python by their sections.
_LEGAL = {"emulator": ("notes",), "python": ("relocations", "segments", "segments of notes")}


@pytest.mark.parametrize("how", _QUADRATIC)
def test_parts_over_each_other(emulator, good, how, tmp_path):
    """A file of a MiB took minutes to hours."""
    image = _QUADRATIC[how](good)
    assert len(image) < 2 << 20
    (tmp_path / "kernel.co").write_bytes(image)
    for reader, error, read in (
        ("emulator", EmulatorError, lambda: emulator.load_module(image, 2)),
        ("python", CodeObjectError, lambda: _read(tmp_path / "kernel.co")),
    ):
        with _quickly():
            if how in _LEGAL[reader]:
                read()
            else:
                with pytest.raises(error, match="have more bytes than the file"):
                    read()


def _read(path: Path, symbol: str = "abcdefgh") -> None:
    read_code_object(path, arch="gfx950", kernels={symbol: 64}, kernarg_bytes=4096, sha256=None)


@pytest.mark.parametrize("depth", [66, 1_000_000])
def test_metadata_that_nests_deeply(emulator, good, depth):
    """A map of one unknown key, whose value is an array of an array, and so on."""
    metadata = b"\x81\xa1x" + b"\x91" * depth + b"\xc0"
    note = struct.pack("<III8s", 7, len(metadata), 32, b"AMDGPU") + metadata
    image = bytearray(_grown(good, note, segments=lambda at: [_segment(4, at, len(note))]))
    (headers,) = struct.unpack_from("<Q", image, 32)
    for number in range(struct.unpack_from("<H", image, 56)[0] - 1):
        at = headers + 56 * number
        if struct.unpack_from("<I", image, at) == (4,):  # notes, of which the first ones count
            struct.pack_into("<I", image, at, 0)
    with pytest.raises(EmulatorError, match="metadata nests too deeply"):
        emulator.load_module(bytes(image), 2)


def test_very_many_kernels(emulator, good, tmp_path):
    """Which is legal. Whether one is there already was asked of each of them."""
    symbol = next(each for each in Elf(good).dynamic_symbols() if each.name.endswith(".kd"))
    count = 60_000
    names = b"".join(b"k%d.kd\0" % i for i in range(count))
    starts = [0, *(found.end() for found in re.finditer(b"\0", names))]
    symbols = b"".join(
        struct.pack("<IBBHQQ", at, 17, 0, symbol.section, symbol.address, 64)
        for at in starts[:count]
    )
    image = _grown(
        good,
        names + symbols,
        lambda at, sections: [
            _section(_STRINGS, at, len(names)),
            _section(_SYMBOLS, at + len(names), len(symbols), link=sections),
        ],
    )
    with _quickly():
        module = emulator.load_module(image, 2)
    assert emulator.function(module, f"k{count - 1}").name == f"k{count - 1}"
    emulator.unload_module(module)
    (tmp_path / "kernel.co").write_bytes(image)
    with _quickly(), pytest.raises(CodeObjectError) as caught:
        _read(tmp_path / "kernel.co", "none")
    assert str(caught.value).endswith(f"k17, k18, {count - 19} more")


# ---- Arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hidden_group_size_", "hidden_block_count_", "hidden_remainder_"])
@pytest.mark.parametrize("axis", [b"~", b"w", b"\0", b"{"])
def test_axes_that_there_are_not(emulator, kind, axis):
    """They were an index."""
    source = 'extern "C" __global__ void k(int* x) { *x = __builtin_amdgcn_workgroup_size_x(); }'
    image = compile_hip(source, "gfx950")
    axes = re.compile(kind.encode() + b"[xyz]")
    assert axes.search(image)
    emulator.unload_module(emulator.load_module(image, 2))
    damaged = axes.sub(kind.encode() + axis, image)
    with pytest.raises(EmulatorError, match=f"an argument's kind is {kind}.*is not x, y or z"):
        emulator.load_module(damaged, 2)


# ---- Terminals -----------------------------------------------------------------------------------

# Clears the screen, rings, and begins another command in its form of one letter.
_COMMANDS = "\x1b[2J\x07\x9bh"
_SHOWN_BY_EMULATOR = r"\x1b[2J\x07\xc2\x9bh"
_SHOWN_BY_PYTHON = r"\x1b[2J\x07\x9bh"


@pytest.fixture
def commanding(good: bytes) -> bytes:
    name = _COMMANDS.encode()
    assert len(name) == len(b"abcdefgh")
    return good.replace(b"abcdefgh", name)


def _assert_shown(text: str, shown: str) -> None:
    assert shown in text
    assert all(each.isprintable() or each == "\n" for each in text), ascii(text)


def test_names_of_kernels_in_messages_of_the_emulator(emulator, check_emulator, commanding, capfd):
    out = np.zeros(64, np.float32)
    for each in (emulator, check_emulator):
        module = each.load_module(commanding, 2)
        with pytest.raises(EmulatorError) as missing:
            each.function(module, _COMMANDS + "?")
        _assert_shown(str(missing.value), f"no kernel {_SHOWN_BY_EMULATOR}?; the code object has")
        assert str(missing.value).endswith(f"has: {_SHOWN_BY_EMULATOR}")
        function = each.function(module, _COMMANDS)
        kernarg = struct.pack("<Q", out.ctypes.data)
        each.set_allowed_memory([(out.ctypes.data, 100)])
        capfd.readouterr()
        try:
            if each is check_emulator:
                take_findings(each.library)
                each.launch(function, (1, 1, 1), (64, 1, 1), kernarg)
                (finding,) = take_findings(each.library)
                _assert_shown(
                    str(finding), f"kernel {_SHOWN_BY_EMULATOR}, at {_SHOWN_BY_EMULATOR}+"
                )
                _assert_shown(capfd.readouterr().err, f"kernel {_SHOWN_BY_EMULATOR}, at")
            else:
                with pytest.raises(EmulatorError) as fault:
                    each.launch(function, (1, 1, 1), (64, 1, 1), kernarg)
                _assert_shown(str(fault.value), f"kernel {_SHOWN_BY_EMULATOR}, at")
        finally:
            each.set_allowed_memory(None)
            each.unload_module(module)


def test_names_of_kernels_in_messages_of_python(commanding, tmp_path):
    (tmp_path / "kernel.co").write_bytes(commanding)
    _read(tmp_path / "kernel.co", _COMMANDS)
    with pytest.raises(CodeObjectError) as caught:
        _read(tmp_path / "kernel.co", "none")
    _assert_shown(str(caught.value), f"it has {_SHOWN_BY_PYTHON}")


@pytest.mark.parametrize("kernel", [None, "none"])
def test_names_of_kernels_that_run_kernel_prints(commanding, tmp_path, kernel, capfd):
    (tmp_path / "kernel.co").write_bytes(commanding)
    launch = {
        "arch": "gfx950",
        "grid": [1],
        "block": [64],
        "tensors": {"out": {"dtype": "float32", "shape": [60], "fill": "nan", "output": True}},
        "arguments": [{"tensor": "out"}],
        "kernel": kernel,
    }
    (tmp_path / "args.json").write_text(json.dumps(launch), encoding="utf-8")
    command = ["run-kernel", str(tmp_path / "kernel.co"), "--args", str(tmp_path / "args.json")]
    capfd.readouterr()
    code = main(command)
    printed, complaints = capfd.readouterr()
    if kernel is None:
        assert code == 1
        _assert_shown(printed, f"kernel    {_SHOWN_BY_PYTHON}")
        _assert_shown(printed, f"global-bounds: kernel {_SHOWN_BY_EMULATOR}, at")
    else:
        assert code == 2
        _assert_shown(complaints, f"kernel.co has {_SHOWN_BY_PYTHON}")
