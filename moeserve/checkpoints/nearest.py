"""What a checkpoint has in the place of a tensor that it lacks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

MOST = 3
"""Names that an error lists."""

ALIKE = 0.7
"""Share of letters that two names must have in common, past the number of their layer or expert."""

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
        stem = "" if own is None else f"layers.{own[0]}."
        around = [name for name in known if stem in name][:MOST_COMPARED]
        tails = {name.partition(stem)[2] if stem else name: name for name in around}
        wanted = missing.partition(stem)[2] if stem else missing
        if found := get_close_matches(wanted, tails, n=MOST, cutoff=ALIKE):
            return f"; nearest that is there: {', '.join(tails[tail] for tail in found)}"
    return "; nothing there has a name like it"
