"""Fills the C++ templates.

A placeholder is `@{name}`, which C++ has no other use for outside of string literals. There are no
loops and no conditions: a template stays C++ that reads as C++, and what varies in structure varies
through `if constexpr` or the preprocessor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from jitfmha.jit.resources import templates_dir

_PLACEHOLDER = re.compile(r"@\{([^{}\n]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class TemplateError(ValueError):
    """A template and the values for it do not fit together."""


def render(template: str, values: Mapping[str, object]) -> str:
    """The text of a template, by its path below `csrc_templates/`, with its `@{name}`s replaced.

    ``values`` has exactly the names that the template uses. A bool is inserted as C++ spells it,
    any other value as it is; what looks like a placeholder inside a value is not replaced again.

    Raises:
        TemplateError: there is no such template, a placeholder has no value, a value has no
            placeholder, or a placeholder is malformed.
    """
    text = _read(template)
    names = {match.group(1) for match in _PLACEHOLDER.finditer(text)}
    _check_names(template, names, values)
    return _PLACEHOLDER.sub(lambda match: _spelled(values[match.group(1)]), text)


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(template: str) -> str:
    relative = PurePosixPath(template)
    if relative.is_absolute() or ".." in relative.parts:
        raise TemplateError(
            f"template {template!r} must be a path relative to csrc_templates/ without '..'"
        )
    folder = templates_dir()
    try:
        return (folder / relative).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise TemplateError(f"there is no template {template!r} in {folder}") from error


def _check_names(template: str, names: set[str], values: Mapping[str, object]) -> None:
    malformed = sorted(name for name in names if not _NAME.fullmatch(name))
    if malformed:
        raise TemplateError(
            f"template {template!r} has the malformed placeholder {_listed(malformed)}; "
            "a name is letters, digits and underscores"
        )
    without_value = sorted(names - values.keys())
    if without_value:
        raise TemplateError(f"template {template!r} got no value for {_listed(without_value)}")
    without_placeholder = sorted(values.keys() - names)
    if without_placeholder:
        raise TemplateError(
            f"template {template!r} got a value for {', '.join(map(repr, without_placeholder))}, "
            "which it does not use"
        )


def _listed(names: list[str]) -> str:
    return ", ".join(f"@{{{name}}}" for name in names)
