"""Puts this package in the place of another one, for code that imports that by its name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from os import PathLike
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from torch.library import Library

if TYPE_CHECKING:
    from importlib.metadata._meta import SimplePath

    from typing_extensions import Self

# The packages that there are stand-ins for, each a subpackage of this one, and the distribution
# that brings the original, where libraries ask for its version.
_OURS = __package__.rpartition(".")[0]
_DISTRIBUTIONS = {"flash_attn": "flash-attn", "aiter": None}


def install_as(name: Literal["flash_attn", "aiter"]) -> StandIn:
    """Make ``import flash_attn`` (or ``import aiter``) give the functions of this package.

    From then on ``flash_attn`` and its modules are those of :mod:`jitfmha.flash_attn`, also where
    flash-attn is installed, and ``importlib.util.find_spec`` and ``importlib.metadata`` find it, as
    libraries ask them. Call it before libraries are imported that look for the package: many look
    once. Where it is installed already, the same stand-in is returned.

    Args:
        name: "flash_attn" or "aiter".

    Returns:
        A :class:`StandIn`, which takes it back: by its ``remove``, or as a context manager.

    Raises:
        ValueError: there is no stand-in for a package of this name.
        RuntimeError: a package of this name is imported already, so that there is code that uses
            it.
    """
    if name not in _DISTRIBUTIONS:
        raise ValueError(
            f"there is no stand-in for {name!r}; use {' or '.join(map(repr, _DISTRIBUTIONS))}"
        )
    for finder in sys.meta_path:
        if isinstance(finder, StandIn) and finder.name == name:
            return finder
    if name in sys.modules:
        place = getattr(sys.modules[name], "__file__", None)
        raise RuntimeError(
            f"{name} ({place}) is imported already; install_as({name!r}) comes before that"
        )
    stand_in = StandIn(name)
    sys.meta_path.insert(0, stand_in)
    return stand_in


class StandIn(DistributionFinder, Loader):
    """This package in the place of another one; :func:`install_as` makes one.

    Attributes:
        name: of the other package.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._operators: Library | None = None

    def remove(self) -> None:
        """Take it back. What was imported meanwhile keeps the functions that it has."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name, module in tuple(sys.modules.items()):
            spec = getattr(module, "__spec__", None)
            if isinstance(spec, ModuleSpec) and spec.loader is self:
                del sys.modules[name]
        if self._operators is not None:
            self._operators._destroy()
            self._operators = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "installed" if self in sys.meta_path else "removed"
        return f"<jitfmha as {self.name}, {state}>"

    # ---- What the import system asks -------------------------------------------------------------

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """How to import the package or one of its modules; None for those of other packages."""
        if fullname.partition(".")[0] != self.name:
            return None
        ours = find_spec(f"{_OURS}.{fullname}")
        if ours is None:
            text = f"No module named {fullname!r}: {self._what_to_do(fullname)}"
            raise ModuleNotFoundError(text, name=fullname)
        is_package = ours.submodule_search_locations is not None
        spec = ModuleSpec(fullname, self, origin=ours.origin, is_package=is_package)
        spec.has_location = True
        return spec

    def _what_to_do(self, missing: str) -> str:
        return (
            f"jitfmha stands in for {self.name}, and has its attention functions "
            f"(docs/drop_ins.md lists them), not all that is in it. Where {missing} is needed, "
            f"install {self.name} and do not call jitfmha.install_as({self.name!r}); calls that "
            f"are to be jitfmha's import jitfmha.{self.name}"
        )

    def exec_module(self, module: ModuleType) -> None:
        """Fill a new module with what ours of the same name offers."""

        def refuse(name: str) -> Any:
            text = f"module {module.__name__!r} has no attribute {name!r}"
            full_name = f"{module.__name__}.{name}"
            raise AttributeError(f"{text}: {self._what_to_do(full_name)}", name=name, obj=module)

        ours = import_module(f"{_OURS}.{module.__name__}")
        module.__doc__ = ours.__doc__
        public = getattr(ours, "__all__", ())
        if module.__name__ == self.name:
            self._define_operators(ours)
        offered = (*public, *getattr(ours, "OFFERED", ()))
        vars(module).update({name: getattr(ours, name) for name in offered}, __all__=list(public))
        vars(module)["__getattr__"] = refuse

    def _define_operators(self, ours: ModuleType) -> None:
        """Put what torch finds as ``torch.ops.NAME`` in place, as importing the package does."""
        schemas = getattr(ours, "OPERATORS", {})
        if schemas and self._operators is None:
            self._operators = Library(self.name, "FRAGMENT")
            for name, schema in schemas.items():
                self._operators.define(name + schema)
                self._operators.impl(name, getattr(ours, name), "CompositeExplicitAutograd")

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """The distribution that brings the package, as ``importlib.metadata`` asks for it."""
        distribution = _DISTRIBUTIONS[self.name]
        asked = None if context is None else context.name
        if distribution is None or asked not in (None, distribution, self.name):
            return ()
        version = import_module(f"{_OURS}.{self.name}").__version__
        return (_Metadata(distribution, version, self.name),)


class _Metadata(Distribution):
    """Name and version of a distribution, and the package in it."""

    def __init__(self, distribution: str, version: str, package: str) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
            "top_level.txt": f"{package}\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> SimplePath:
        """Nothing: it has no files of its own."""
        raise FileNotFoundError(f"{path}: {self.metadata['Name']} is a stand-in without files")
