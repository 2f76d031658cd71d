"""The wheel and the sdist hold everything, and the package works from wherever it is installed."""

import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from subprocess import CompletedProcess, check_call

import pytest
from subprocesses import ROOT, run_python

import jitfmha

pytest.importorskip("build", reason="the extra is not installed: pip install '.[test]'")
pytest.importorskip("hatchling", reason="the extra is not installed: pip install '.[test]'")

SHIPPED_FOLDERS = ("csrc_templates", "hsa")

ONE_CALL = """
import json, sys
import torch
import jitfmha
from jitfmha.jit.resources import hsa_dir, templates_dir
q = torch.randn(1, 70, 2, 24)
out = jitfmha.fmha_fwd(q, q, q, mask="causal")
x = q.transpose(1, 2)
expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
torch.testing.assert_close(out, expected.transpose(1, 2))
print(json.dumps([jitfmha.__file__, str(templates_dir()), str(hsa_dir())]))
"""


def run(*argv: str, cwd: Path, code: int = 0, **environment: str) -> CompletedProcess[str]:
    """This interpreter, which finds the package only where the environment says."""
    return run_python(*argv, cwd=cwd, code=code, **{"PYTHONPATH": "", **environment})


def files_below(folder: Path) -> set[str]:
    return {
        path.relative_to(folder.parent).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both, the wheel built from the sdist, so that the sdist is complete if the wheel is."""
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


def test_wheel_contents(wheel):
    assert wheel.name == f"jitfmha-{jitfmha.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (x for x in archive.namelist() if x.endswith(".dist-info/METADATA"))
        fields = archive.read(metadata).decode().splitlines()
    expected = files_below(ROOT / "jitfmha")
    for folder in SHIPPED_FOLDERS:
        expected |= {f"jitfmha/{name}" for name in files_below(ROOT / folder)}
    of_checkouts = "*/README.md", "*/hsa/build.py", "*/hsa/src/*.hip", "*/hsa/src/backward*.h"
    assert names == {
        name for name in expected if not any(fnmatch(name, each) for each in of_checkouts)
    }
    # The test rigs stay in the checkout.
    rigs = {"op_tests", "rigs", "cache_faults", "faulty_system.cpp", "recording_runtime.cpp"}
    assert not [name for name in names if rigs & set(name.split("/"))]
    assert {"jitfmha/py.typed", "jitfmha/csrc_templates/cpu/fmha_fwd.cpp.in"} <= names
    assert "Requires-Python: >=3.10" in fields
    assert "Requires-Dist: torch>=2.10" in fields


def test_a_release(tmp_path, request):
    """Of a clone whose changelog says so."""
    if not request.config.getoption("--exhaustive"):
        pytest.skip("builds everything twice; --exhaustive does it")
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    clone, out = tmp_path / "clone", tmp_path / "out"
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    check_call([*git, "clone", "-q", str(ROOT), str(clone)])
    release = str(clone / ".ci" / "release.py")
    version = jitfmha.__version__
    said = run(release, str(out), cwd=tmp_path, code=1).stderr
    assert f"no section '## [{version}] - YEAR-MONTH-DAY'" in said
    changes = clone / "CHANGELOG.md"
    text = changes.read_text().replace(
        f"[{version}], not released yet", f"[{version}] - 2026-01-31"
    )
    changes.write_text(text)
    assert "not committed" in run(release, str(out), cwd=tmp_path, code=1).stderr
    check_call([*git, "commit", "-qam", "released"], cwd=clone)
    names = {
        line.split()[1] for line in run(release, str(out), cwd=tmp_path).stdout.splitlines()[-2:]
    }
    assert names == {f"jitfmha-{version}-py3-none-any.whl", f"jitfmha-{version}.tar.gz"}


def test_what_an_index_would_show(distributions):
    run("-m", "twine", "check", "--strict", *map(str, distributions.iterdir()), cwd=distributions)


def test_most_of_the_wheel_are_kernels(wheel):
    """A notebook waits for the download; code objects are what it is for."""
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.compress_size for info in archive.infolist()}
    kernels = sum(size for name, size in sizes.items() if name.endswith(".co"))
    total = sum(sizes.values())
    assert total - kernels < total / 4
    assert total < 8_000_000


def test_sdist_contents(distributions):
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {x.name.partition("/")[2] for x in archive.getmembers() if x.isfile()}
    assert {"pyproject.toml", "README.md", "LICENSE", ".ci/run"} <= names
    for folder in ("jitfmha", "op_tests", "examples", *SHIPPED_FOLDERS):
        assert files_below(ROOT / folder) <= names


def install(wheel: Path, site_packages: Path) -> None:
    arguments = ("--no-deps", "--no-index", "--quiet", "--target", str(site_packages))
    run("-m", "pip", "install", *arguments, str(wheel), cwd=site_packages.parent)


def test_works_from_an_unwritable_wheel_install(wheel, tmp_path):
    site_packages = tmp_path / "site-packages"
    install(wheel, site_packages)
    everything = [site_packages, *site_packages.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in everything}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    try:
        places = {"PYTHONPATH": str(site_packages), "JITFMHA_CACHE_DIR": str(tmp_path / "cache")}
        output = run("-c", ONE_CALL, cwd=elsewhere, **places).stdout
        # The modes stop no root user, so what counts is that nothing has changed.
        after = [site_packages, *site_packages.rglob("*")]
        assert {path: path.stat().st_mtime_ns for path in after} == before
    finally:
        for path in everything:
            path.chmod(0o755 if path.is_dir() else 0o644)
    arguments = ("-m", "jitfmha", "bench", "--suite", "cache", "--quick")
    process = run(*arguments, cwd=elsewhere, code=2, PYTHONPATH=str(site_packages))
    assert "the suite 'cache' needs the test rigs of a checkout" in process.stderr
    package = site_packages / "jitfmha"
    for found in (package / "__init__.py", package / "csrc_templates", package / "hsa"):
        assert f'"{found}"' in output
    assert list((tmp_path / "cache").rglob("*.so"))
    assert not list(elsewhere.iterdir())


def test_works_from_an_editable_install(tmp_path):
    site_packages = tmp_path / "site-packages"
    arguments = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
    target = ("--target", str(site_packages))
    run("-m", "pip", "install", *arguments, *target, "--editable", str(ROOT), cwd=tmp_path)
    # A --target folder is not a site directory until it is made one, and only those read .pth. What
    # the .pth names goes to the front, before a jitfmha that is installed with the tests; it may be
    # this very checkout.
    code = (
        f"import pkgutil, site, sys; editable = {str(ROOT / '.editable')!r}; "
        "sys.path[:] = before = [path for path in sys.path if path != editable]; "
        f"site.addsitedir({str(site_packages)!r}); "
        "sys.path.sort(key=lambda path: path in before); "
        "added = [path for path in sys.path if path not in before]\n"
        "assert [module.name for module in pkgutil.iter_modules(added)] == ['jitfmha']\n"
    ) + ONE_CALL
    output = run("-c", code, cwd=tmp_path).stdout
    package = ROOT / ".editable" / "jitfmha"
    assert package.resolve() == ROOT / "jitfmha"
    for found in (package / "__init__.py", ROOT / "csrc_templates", ROOT / "hsa"):
        assert f'"{found}"' in output
    # No second copy of the templates that could go stale.
    assert not list(site_packages.rglob("*.cpp.in"))


def test_import_compiles_nothing_and_touches_no_cache(tmp_path):
    code = (
        "import sys, torch, jitfmha; "
        "print('torch.utils.cpp_extension' in sys.modules, 'setuptools' in sys.modules)"
    )
    cache = tmp_path / "cache"
    places = {"PYTHONPATH": str(ROOT), "JITFMHA_CACHE_DIR": str(cache)}
    assert run("-c", code, cwd=tmp_path, **places).stdout == "False False\n"
    assert not cache.exists()
