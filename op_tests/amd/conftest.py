"""Trees of code objects for the tests of the AMD path, and a runtime that records launches."""

from pathlib import Path

import pytest
from plain_tree import FULL_TREE, UseTree, write_tree
from rigs.recording_runtime import RecordingRuntime

from jitfmha.amd import tree
from jitfmha.jit.toolchain.device_compiler import DeviceCompilerNotFound, device_compiler


@pytest.fixture(scope="session", autouse=True)
def _device_compiler() -> None:
    try:
        device_compiler()
    except DeviceCompilerNotFound as error:
        pytest.skip(str(error))


@pytest.fixture
def use_tree(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> UseTree:
    """Name a tree in the environment: ``use_tree(root)``, or with another variable.

    The package's own tree is out of sight.
    """
    empty = tmp_path_factory.mktemp("no_hsa")
    monkeypatch.setattr(tree, "hsa_dir", lambda: empty)
    for variable in (tree.HSA_DIR, tree.AITER_ASM_DIR):
        monkeypatch.delenv(variable, raising=False)

    def use(root: Path, variable: str = tree.HSA_DIR) -> None:
        monkeypatch.setenv(variable, str(root))

    return use


@pytest.fixture(scope="session")
def full_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with every kernel that the tests launch."""
    root = tmp_path_factory.mktemp("hsa")
    for arch, kernels in FULL_TREE.items():
        write_tree(root, arch, kernels)
    return root


@pytest.fixture(name="tree")
def full_tree_in_use(full_tree: Path, use_tree: UseTree) -> Path:
    use_tree(full_tree)
    return full_tree


@pytest.fixture(scope="session")
def recording_runtime() -> RecordingRuntime:
    return RecordingRuntime()


@pytest.fixture
def runtime(recording_runtime: RecordingRuntime) -> RecordingRuntime:
    """The recording runtime, with nothing recorded."""
    recording_runtime.reset()
    return recording_runtime
