"""The modules that a quantization config leaves unquantized, under any name of the list."""

from __future__ import annotations

import re
from collections.abc import Sequence

from moeserve.checkpoints.dialects.dialect import Quantization

LISTS = ("ignore", "exclude_modules", "ignored_layers", "modules_to_not_convert", "exclude")
SHOWN = 12


def excluded_modules(quantization: Quantization) -> list[str]:
    """Returns entries as the config has them: names, patterns, `re:` expressions, negative rules of GPTQ."""
    if quantization is None:
        return []
    found: list[str] = []
    for part in (quantization, quantization.get("quantization")):
        if isinstance(part, dict):
            found += [str(entry) for key in LISTS for entry in part.get(key) or []]
            found += [rule for rule in part.get("dynamic") or {} if rule.startswith("-:")]
    return list(dict.fromkeys(found))


def brief(entries: Sequence[str]) -> str:
    """Formats entries on one line; those that differ in numbers only become one, with their count."""
    alike: dict[str, list[str]] = {}
    for entry in entries:
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "N", entry), []).append(entry)
    words = [f"{name} ({len(same)})" if len(same) > 1 else same[0] for name, same in alike.items()]
    more = [f"and {len(words) - SHOWN} more"] if len(words) > SHOWN else []
    return ", ".join(words[:SHOWN] + more) or "none"
