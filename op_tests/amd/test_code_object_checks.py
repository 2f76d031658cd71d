"""Code objects are checked before they are loaded; a bad one is named with what was expected."""

import hashlib
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from plain_tree import PlainKernel

from jitfmha.amd.code_object import CodeObjectError, read_code_object
from jitfmha.jit.toolchain.device_compiler import assemble, compile_hip_to_assembly

KERNEL = PlainKernel()
_FLAGS = 48  # of the ELF header
_MINIMAL = """
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(512, 512)))
void small(const int* a, int* b) { b[0] = a[0]; }
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / KERNEL.file
    file.write_bytes(KERNEL.code_object("gfx942"))
    return file


def read(path: Path, **changes: Any) -> Any:
    expected: dict[str, Any] = {
        "arch": "gfx942",
        "kernels": {KERNEL.symbol: 512},
        "kernarg_bytes": 656,
        "sha256": None,
    }
    return read_code_object(path, **(expected | changes))


def assert_refused(path: Path, *words: str, **changes: Any) -> None:
    with pytest.raises(CodeObjectError) as raised:
        read(path, **changes)
    for word in (str(path), *words):
        assert word in str(raised.value)


def patched(path: Path, offset: int, value: int) -> Path:
    image = bytearray(path.read_bytes())
    image[offset] = value
    path.write_bytes(image)
    return path


def test_a_good_one(path):
    image = path.read_bytes()
    for digits in (32, 64):
        code_object = read(path, sha256=hashlib.sha256(image).hexdigest()[:digits])
        assert code_object.image == image
    assert code_object.kernarg_bytes == 656
    assert code_object.symbol == KERNEL.symbol
    path.write_bytes(KERNEL.code_object("gfx950"))
    assert read(path, arch="gfx950").kernarg_bytes == 656


OTHER, SHA = "_ZN5aiter4noneE", hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ({"sha256": SHA}, ("its SHA-256 is", SHA)),
        ({"sha256": SHA[:32]}, ("its SHA-256 is", SHA[:32])),
        ({"arch": "gfx950"}, ("gfx942 (EF_AMDGPU_MACH 0x4c)", "expected gfx950 (0x4f)")),
        ({"kernels": {OTHER: 512}}, (f"has no kernel {OTHER}", "it has", KERNEL.symbol)),
        ({"kernels": {KERNEL.symbol: 1024}}, ("at most 512 threads", "expected 1024")),
        ({"kernarg_bytes": 655}, ("declares 656 bytes of arguments", "at most 655")),
    ],
)
def test_what_is_expected(path, expected, words):
    assert_refused(path, *words, **expected)


def test_other_machines(path):
    assert_refused(patched(path, _FLAGS, 0x3F), "another architecture", "0x3f")
    assert_refused(patched(path, 18, 62), "ELF machine 62", "expected 224")


def test_argument_size_of_the_descriptor(path):
    """Compilers write it there too, and the two must not contradict each other."""
    image = bytearray(path.read_bytes())
    descriptors = [i for i in range(0, len(image) - 4, 4) if image[i : i + 4] == b"\x90\x02\0\0"]
    for at in descriptors:
        image[at : at + 4] = struct.pack("<I", 1024)
    path.write_bytes(image)
    assert_refused(path, "declares 1024 bytes of arguments")


def test_a_kernel_may_read_a_part_of_the_arguments(tmp_path):
    """As production kernels do, whose descriptors also leave the size out."""
    text = compile_hip_to_assembly(_MINIMAL, "gfx942")
    file = tmp_path / "small.co"
    file.write_bytes(assemble(text, "gfx942"))
    assert read(file, kernels={"small": 512}).kernarg_bytes == 16
    file.write_bytes(
        assemble(text.replace(".amdhsa_kernarg_size 16", ".amdhsa_kernarg_size 0"), "gfx942")
    )
    assert read(file, kernels={"small": 512}).kernarg_bytes == 16


@pytest.mark.parametrize("count", [15, 16])
def test_a_kernel_may_have_many_arguments(tmp_path, count):
    """Each has an entry in a list, which begins in another way from the 16th on."""
    others = "".join(f", int* p{i}" for i in range(2, count))
    text = compile_hip_to_assembly(_MINIMAL.replace("int* b", f"int* b{others}"), "gfx942")
    file = tmp_path / "small.co"
    file.write_bytes(assemble(text, "gfx942"))
    assert read(file, kernels={"small": 512}).kernarg_bytes == 8 * count


def test_required_workgroup_size(tmp_path):
    source = _MINIMAL.replace("512, 512", "1, 1024")
    text = compile_hip_to_assembly(source, "gfx942").replace(
        "    .max_flat_workgroup_size: 1024\n",
        "    .max_flat_workgroup_size: 1024\n    .reqd_workgroup_size:\n"
        "      - 256\n      - 1\n      - 1\n",
    )
    file = tmp_path / "small.co"
    file.write_bytes(assemble(text, "gfx942"))
    assert read(file, kernels={"small": 256}).kernarg_bytes == 16
    assert_refused(file, "[256, 1, 1]", "expected [512, 1, 1]", kernels={"small": 512})


def test_wave_size(path):
    image = path.read_bytes()
    at = image.index(b".wavefront_size") + len(b".wavefront_size")
    assert image[at] == 64
    assert_refused(patched(path, at, 32), "waves of 32 lanes, expected 64")


def test_metadata_that_are_missing(path):
    image = path.read_bytes().replace(b"amdhsa.kernels", b"amdhsa.Kernels")
    path.write_bytes(image)
    assert_refused(path, "no metadata about kernel", KERNEL.symbol)


def test_files_that_cannot_be_read(tmp_path):
    assert_refused(tmp_path / "none.co", "cannot be read", "No such file")
    assert_refused(tmp_path, "cannot be read", "directory")


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"text" * 100, bytes(64)])
def test_files_that_are_no_code_objects(path, content):
    path.write_bytes(content)
    assert_refused(path, "is damaged")


_HEADER_BYTES = 64  # of the file


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("program headers", 1 << 40, "the table of its program headers ends at byte"),
        ("section headers", 1 << 40, "the table of its section headers ends at byte"),
        ("number of program headers", 65535, "the table of its program headers ends at byte"),
        ("size of a program header", 57, "its program headers have 57 bytes each, not 56"),
        ("size of a section header", 56, "its section headers have 56 bytes each, not 64"),
        ("segment's offset", 1 << 40, "segment 1 ends at byte"),
        ("segment's offset", (1 << 64) - 8, "segment 1 ends at byte"),
        ("segment's size", 1 << 40, "segment 1 ends at byte"),
        ("segment's size in memory", 1, "more than the 1 in memory"),
        ("section's offset", 1 << 40, "section 1 ends at byte"),
        ("section's size", 1 << 40, "section 1 ends at byte"),
    ],
)
def test_parts_outside_of_the_file(path, place, value, words):
    """HIP loads an image without its size: what its headers say is where it reads."""
    image = bytearray(path.read_bytes())
    segment = _HEADER_BYTES + 56
    (sections,) = struct.unpack_from("<Q", image, 40)
    at, size = {
        "program headers": (32, 8),
        "section headers": (40, 8),
        "number of program headers": (56, 2),
        "size of a program header": (54, 2),
        "size of a section header": (58, 2),
        "segment's offset": (segment + 8, 8),
        "segment's size": (segment + 32, 8),
        "segment's size in memory": (segment + 40, 8),
        "section's offset": (sections + 64 + 24, 8),
        "section's size": (sections + 64 + 32, 8),
    }[place]
    image[at : at + size] = value.to_bytes(size, "little")
    path.write_bytes(image)
    assert_refused(path, "is damaged", words)


def test_damage_anywhere_is_refused_or_harmless(path, seed):
    """Whatever is cut off or flipped: the answer is a sentence, never another exception."""
    drawn = random.Random(seed)
    image = path.read_bytes()
    sentences = []
    for _ in range(300):
        damaged = bytearray(image[: drawn.randrange(len(image))] if drawn.random() < 0.3 else image)
        for _ in range(drawn.randrange(1, 30)):
            if damaged:
                damaged[drawn.randrange(len(damaged))] = drawn.randrange(256)
        path.write_bytes(damaged)
        try:
            read(path)
        except CodeObjectError as error:
            sentences.append(str(error))
    assert len(sentences) > 60
    assert all(sentence.startswith(str(path)) for sentence in sentences)
    path.write_bytes(image)
    read(path)
