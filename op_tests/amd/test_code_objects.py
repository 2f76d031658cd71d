"""The code objects in the tree: what their sources give, and what their manifests say."""

import csv
import hashlib
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hsa_build import REPOSITORY, hsa_build

from jitfmha.amd.code_object import kernel_metadata
from jitfmha.emulator.wait_states import missing_waits
from jitfmha.jit.elf import Elf


def manifests() -> list[Path]:
    return sorted((REPOSITORY / "hsa").glob("gfx*/*/*.csv"))


def rows() -> list[tuple[Path, dict[str, str]]]:
    """Each code object's file with its row."""
    found: list[tuple[Path, dict[str, str]]] = []
    for manifest in manifests():
        with manifest.open(newline="", encoding="utf-8") as text:
            found += [(manifest.parent / row["co_name"], row) for row in csv.DictReader(text)]
    return found


def test_the_sources_give_the_code_objects_bit_for_bit(request, rng):
    """All of them with `--exhaustive`; `python hsa/build.py --check` does the same."""
    kernels = list(hsa_build.kernels())
    if not request.config.getoption("--exhaustive"):
        kernels = random.Random(rng.initial_seed()).sample(kernels, 12)
    with ThreadPoolExecutor() as pool:
        built = list(pool.map(hsa_build.build, kernels))
    compilers = {each.compiler for each in built}
    assert compilers == {row["compiler"] for _, row in rows()}, "this is not the pinned compiler"
    for code_object in built:
        path = code_object.kernel.path
        assert path.read_bytes() == code_object.content, f"{path.name} is not what its source gives"
        (row,) = (row for file, row in rows() if file == path)
        assert row == {name: str(value) for name, value in code_object.row().items()}
    # Rows of code objects that were not built stay as they are.
    assert hsa_build.differing(hsa_build.files(built)) == []


def test_manifests_list_every_kernel_and_every_file():
    expected = [each.path for each in hsa_build.kernels()]
    assert [path for path, _ in rows()] == expected
    assert [row["knl_name"] for _, row in rows()] == [each.name for each in hsa_build.kernels()]
    files = {path for path, _ in rows()} | set(manifests())
    assert files == {path for path in (REPOSITORY / "hsa").glob("gfx*/**/*") if path.is_file()}


def test_manifests_have_the_hashes_of_the_files():
    for path, row in rows():
        assert hashlib.sha256(path.read_bytes()).hexdigest()[:32] == row["sha256"], path.name


def test_the_arguments_are_those_that_the_launcher_packs():
    for path, header in hsa_build.ARGUMENTS.items():
        assert path.read_text(encoding="utf-8") == header()


def test_nothing_is_spilled():
    """Registers that go to scratch memory would be in every loop's way."""
    for kernel in hsa_build.kernels():
        elf = Elf(kernel.path.read_bytes())
        for symbol in kernel.symbols:
            metadata = kernel_metadata(elf, symbol)
            assert metadata is not None
            spilled = metadata[".vgpr_spill_count"] + metadata[".sgpr_spill_count"]
            assert spilled == 0, f"{kernel.path.name}: {symbol}"


def test_no_path_lacks_wait_states():
    for path, _ in rows():
        assert missing_waits(path.read_bytes()) == [], path.name


def test_a_difference_is_told(tmp_path, monkeypatch):
    """`--check` names what is missing, what differs, and what nobody made."""
    kernel = next(iter(hsa_build.kernels()))
    monkeypatch.setattr(hsa_build, "HSA", tmp_path)
    folder = kernel.path.parent
    folder.mkdir(parents=True)
    (folder / "other.co").write_bytes(b"other")
    expected = {kernel.path: b"content", kernel.manifest: b"manifest"}
    kernel.manifest.write_bytes(b"another manifest")
    assert hsa_build.differing(expected) == [
        f"{kernel.path.relative_to(tmp_path)} is missing",
        f"{kernel.manifest.relative_to(tmp_path)} is not what its sources give",
        f"{(folder / 'other.co').relative_to(tmp_path)} comes from no source",
    ]
