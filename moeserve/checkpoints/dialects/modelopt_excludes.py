"""Which experts ModelOpt's exclude list leaves unquantized. Entries are spelled as the file's tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from moeserve.checkpoints.names import LayerNames


def excluded(entries: Sequence[str], names: LayerNames) -> bool:
    """Whether the layer's experts are listed: by name, by a part of it, or by a wildcard.

    An entry that has "experts" excludes the layer whose experts module it names anything of. Any other
    excludes all modules whose name contains it, as releases before 0.39 meant it, or that its wildcards fit;
    `path*` stands for `path` and what is below it. An entry that ends in a number means that number: layers.1
    is not part of layers.10.
    """
    module = f"{names.module}.experts"
    if any("experts" in entry and module in entry for entry in entries):
        return True
    spellings = (module, module.removeprefix("language_model."))
    return any(_means(entry, name) for entry in _spread(entries) for name in spellings)


def _spread(entries: Iterable[str]) -> Iterable[str]:
    for entry in entries:
        if len(entry) > 1 and entry[-1] == "*" and entry[-2] != ".":
            yield from (entry[:-1], f"{entry[:-1]}.*")
        else:
            yield entry


def _means(entry: str, name: str) -> bool:
    end = r"(?!\d)" if entry[-1:].isdigit() else ""
    return bool(entry and re.search(re.escape(entry) + end, name)) or fnmatchcase(name, entry)
