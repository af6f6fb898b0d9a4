"""`measured`: the rates of a cost model from what `bench/experts/gpu_experts.py` measured on a machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from moeserve.experts.balance.cost import CostModel

WEIGHT_BITS = {"bf16": 16.0, "fp8": 8.0, "mxfp4": 4.25, "nvfp4": 4.5}
"""Bits of one weight with its share of scales, by the name that a case begins with."""

_CASE = re.compile(r"(\w+), (\d+) tokens x (\d+), (\d+) of \d+ experts active, whole")


def measured(path: Path | str, weights: str) -> CostModel:
    """The default cost model with `weights` and the rates of a results file: the highest of all its cases.

    That is the roof the model means: no batch reads or computes faster. The bench runs experts of
    DeepSeek-V3's size, the model's own. Raises ValueError for a file without such cases.
    """
    if weights not in WEIGHT_BITS:
        raise ValueError(f"unknown weights {weights!r}; known: {', '.join(WEIGHT_BITS)}")
    model = CostModel(weight_bits=WEIGHT_BITS[weights])
    cases = [case[1:] for case in _cases(Path(path)) if case[0] == weights]
    if not cases:
        raise ValueError(
            f"{path} has no case '{weights}, ... experts active, whole' of bench/experts/gpu_experts.py"
        )
    row = 6 * model.hidden * model.inner
    return CostModel(
        weight_bits=WEIGHT_BITS[weights],
        read_bytes=max(active * model.expert_bytes / seconds for _, active, seconds in cases),
        flops=max(rows * row / seconds for rows, _, seconds in cases),
    )


def _cases(path: Path) -> Iterator[tuple[str, int, int, float]]:
    """Weights, (token, expert) rows, active experts and seconds of each case."""
    try:
        for line in path.read_text().splitlines():
            result = json.loads(line)
            if found := _CASE.fullmatch(result["case"]):
                name, tokens, top_k, active = found.groups()
                yield name, int(tokens) * int(top_k), int(active), float(result["ours"]) * 1e-6
    except OSError as error:
        raise ValueError(f"cannot read the results {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file of results: {error}") from error
