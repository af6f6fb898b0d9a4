"""The kernels' source text: one dispatcher's files behind the one that all share."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent


@cache
def source(*names: str) -> str:
    """common.cu and the files `names` beside it, as one text for the compiler."""
    return "\n".join((_FOLDER / file).read_text() for file in ("common.cu", *names))
