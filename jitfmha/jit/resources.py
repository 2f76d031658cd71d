"""Where the files that ship beside the Python code are.

`csrc_templates/` and `hsa/` are top-level folders of the repository. A wheel carries them inside
the package, because that is the only place an installer puts them; a checkout (also when installed
editable) has them beside the package.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def templates_dir() -> Path:
    """The folder of C++ templates; ``FileNotFoundError`` where the installation lacks it."""
    return _shipped_folder("csrc_templates")


def hsa_dir() -> Path:
    """The folder of prebuilt AMD code objects and their manifests; raises as `templates_dir`."""
    return _shipped_folder("hsa")


def _shipped_folder(name: str) -> Path:
    candidates = (_PACKAGE / name, _PACKAGE.parent / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    looked = " and ".join(str(candidate) for candidate in candidates)
    raise FileNotFoundError(
        f"this installation of jitfmha has no {name!r} folder (looked at {looked}); "
        "install it again from a wheel, or run it from a complete checkout"
    )
