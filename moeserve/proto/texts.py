"""Texts of errors: they repeat what a caller sent only as far as a person reads it.

A shape of 40 MB, printed whole, took every call of the process seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_TEXT = 1024
"""Bytes of UTF-8 in the message of an error."""

LONGEST_NAME = 100
"""Characters of a name that a message repeats."""

LONGEST_LIST = 8
"""Numbers of a list that a message repeats."""

_CUT = "..."


def clipped(text: str) -> str:
    """`text`, or its beginning where it has more than LONGEST_TEXT bytes."""
    beginning = text[: LONGEST_TEXT + 1].encode(errors="replace")
    if len(beginning) <= LONGEST_TEXT:
        return text
    return beginning[: LONGEST_TEXT - len(_CUT)].decode(errors="ignore") + _CUT


def quoted(name: object) -> str:
    """`name` in quotation marks, or its beginning and its length where it is long.

    Other values stand as they print where that is short, else by their type.
    """
    if not isinstance(name, str):
        shown = repr(name)
        return shown if len(shown) <= LONGEST_NAME else f"a {type(name).__name__}"
    if len(name) <= LONGEST_NAME:
        return repr(name)
    return f"{name[:LONGEST_NAME]!r}{_CUT} ({len(name)} characters)"


def listed(numbers: Sequence[int]) -> str:
    """`numbers` in brackets, or the first of them and how many there are."""
    if len(numbers) <= LONGEST_LIST:
        return str(list(numbers))
    first = ", ".join(str(number) for number in numbers[:LONGEST_LIST])
    return f"[{first}, {_CUT}] ({len(numbers)} numbers)"
