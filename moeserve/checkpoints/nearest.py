"""What a checkpoint has in the place of a tensor that it lacks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

MOST = 3
"""Names that an error lists."""

MOST_COMPARED = 4096
"""Names that are compared: those of the same expert or layer, or of a checkpoint that has few."""

_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=layers\.)\d+\..*experts\.\d+(?=\.)")


def in_its_place(missing: str, names: Iterable[str]) -> str:
    """Returns the end of an error that says that `missing` lacks: the names of `names` nearest to it.

    Names of the same expert come first, then those of the same layer, then any.
    """
    known = sorted(names)
    for place in (_EXPERT, _LAYER, None):
        own = place and place.search(missing)
        if place is not None and own is None:
            continue
        around = [name for name in known if own is None or f"layers.{own[0]}." in name]
        if found := get_close_matches(missing, around[:MOST_COMPARED], n=MOST, cutoff=0.5):
            return f"; nearest that is there: {', '.join(found)}"
    return "; nothing there has a name like it"
