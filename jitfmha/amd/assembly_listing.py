"""A kernel's assembly listing, as far as its names go: what is in it, and another name for it.

Listings are what compilers write with ``-S`` and what people write by hand. A kernel NAME is there
as a label, and its descriptor as ``NAME.kd``: written as ``.amdhsa_kernel NAME``, or as data behind
a label of its own. The metadata name both.
"""

from __future__ import annotations

import re

_WORD = r"[A-Za-z0-9_$.]"
_DESCRIPTORS = (
    re.compile(r"^\s*\.amdhsa_kernel[ \t]+\"?([^\s\";#]+)", re.MULTILINE),
    re.compile(r"^\s*\"?([^\s\";#:]+)\.kd\"?\s*:", re.MULTILINE),
)
_TARGET = re.compile(r"^\s*\.amdgcn_target\s+\"amdgcn-amd-amdhsa--(\w+)", re.MULTILINE)
_STATEMENT = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)(?=\s|$)(?!\s*=)")
# What means something else where an instruction has it.
_OPERAND = re.compile(
    r"[savm]|(?:[sav]|ttmp)\d+|m0|vcc|exec|scc|off|src_\w+|(?:vcc|exec|flat_scratch)_(?:lo|hi)|glc|"
    r"slc|sc[01]|nt|lds|offen|idxen|flat_scratch|xnack_mask|null",
)
# The assembler knows directives in capital letters and in quotes, too. With `.altmacro` the values
# of a macro's parameters are computed.
_FILE_DIRECTIVE = re.compile(r"\.(?:incbin|include|altmacro)", re.IGNORECASE)
_MACRO = re.compile(r"\.(?:macro|irpc?)(?![a-z])", re.IGNORECASE)
_LABEL = re.compile(r"\s*(?:\"[^\"]*\"|[^\s\":]+)\s*:")
_LONE_PARAMETER = re.compile(r"\\(?:[A-Za-z_$.][A-Za-z0-9_$.]*)")
_NAMING_KEY = re.compile(r"\s*(?:-\s+)?\.(?:name|symbol):")
_NAME = re.compile(r"[A-Za-z_]\w*")


class ListingError(ValueError):
    """A listing that cannot be used as it is; the text says what of it."""


def decorated(name: str) -> str:
    """The symbol of a kernel, as AITER's trees have it; ``ListingError`` for what is no name."""
    if not _NAME.fullmatch(name) or not name.isascii():
        raise ListingError(f"{name!r} is no name for a kernel: letters, digits and _ are")
    return f"_ZN5aiter{len(name)}{name}E"


def refuse_files(listing: str) -> None:
    """Refuse a listing that the assembler would read other files for.

    The directives ``.include`` and ``.incbin`` do so. Macros can put their names together from
    pieces: so where there are macros, no parameter may be a part of a directive's or instruction's
    name, nor begin a word that goes on behind it.

    Raises:
        ListingError: with the line.
    """
    has_macros = _MACRO.search(listing) is not None
    for number, line in enumerate(re.split(r"\r\n|\r|\n", listing), 1):
        found = _FILE_DIRECTIVE.search(line)
        if found is not None:
            raise ListingError(f"line {number} has {found[0]}: a listing is one file")
        if has_macros and "\\" in line and _may_spell(line):
            raise ListingError(
                f"line {number} puts a name together by a macro, which may be that of any "
                f"directive: {line.strip()!r:.100}"
            )


def _may_spell(line: str) -> bool:
    """Whether a line of a macro may become a directive that nobody wrote out."""
    line = line.replace("\\@", "")  # a number
    if "\\" in line and ("/*" in line or "*/" in line):
        return True
    while (label := _LABEL.match(line)) is not None:
        if "\\" in label[0]:
            return True
        line = line[label.end() :]
    first, *others = re.split(r"[\s,]+", line.strip())
    return "\\" in first or any(
        word.startswith("\\") and not _LONE_PARAMETER.fullmatch(word) for word in others
    )


def kernels_of(listing: str) -> tuple[str, ...]:
    """The symbols of the kernels that have a descriptor, in their order."""
    found = (match[1] for form in _DESCRIPTORS for match in form.finditer(listing))
    return tuple(dict.fromkeys(found))


def target_of_listing(listing: str) -> str | None:
    """The architecture that ``.amdgcn_target`` names; None where there is none."""
    match = _TARGET.search(listing)
    return match[1] if match else None


def renamed(listing: str, symbol: str, new_symbol: str) -> str:
    """The listing with another symbol for a kernel and for all that is named after it.

    That is: ``symbol`` itself in labels, directives, metadata and operands, ``symbol.kd`` and
    whatever else goes on behind a dot, and sections such as ``.text.symbol``. Names that only
    contain the symbol's letters stay as they are.

    Raises:
        ListingError: the symbol reads as a register or another operand, or the new one is there
            already.
    """
    if _OPERAND.fullmatch(symbol):
        raise ListingError(
            f"kernel {symbol!r} has the name of an operand, so it cannot be renamed in instructions"
        )
    if symbol == new_symbol:
        return listing
    other = re.search(rf"(?<!{_WORD}){re.escape(new_symbol)}(?!{_WORD})", listing)
    if other is not None:
        number = listing.count("\n", 0, other.start()) + 1
        raise ListingError(f"line {number} has the symbol {new_symbol} already")
    # Behind a dot or before one, but not in the middle of a longer name, and no directive's own.
    form = re.compile(
        rf"(?<![A-Za-z0-9_$@])(?<![^A-Za-z0-9_$]\.)(?<!^\.){re.escape(symbol)}(?![A-Za-z0-9_$])"
    )
    lines: list[str] = []
    is_metadata = False
    for line in listing.splitlines(keepends=True):
        if "amdgpu_metadata" in line:
            is_metadata = ".end_amdgpu_metadata" not in line
        if is_metadata and not _NAMING_KEY.match(line):
            lines.append(line)  # a key, or a word that means something
        else:
            lines.append(_renamed_line(line, form, new_symbol))
    return "".join(lines)


def _renamed_line(line: str, form: re.Pattern[str], new_symbol: str) -> str:
    """The name of an instruction is no name of a kernel, whatever the kernel is called."""
    statement = _STATEMENT.match(line)
    begin = statement.end() if statement else 0
    return line[:begin] + form.sub(lambda _: new_symbol, line[begin:])
