"""Which experts ModelOpt's exclude list leaves unquantized. Entries are spelled as the file's tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from moeserve.checkpoints.names import LayerNames


def excluded(entries: Sequence[str], names: LayerNames) -> bool:
    """Whether the layer's experts are listed: by name, by a part of it, or by a wildcard.

    An entry that contains "experts" excludes a layer if it names the layer's experts module or a part of it.
    Any other entry excludes all modules whose name contains it, as in releases before 0.39, or that fit its
    wildcards; `path*` stands for `path` and everything below it. A number at the end of an entry is a whole
    number: layers.1 is not part of layers.10.
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
