"""The output of `moeserve inspect --against`: the relative error of each layer's experts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.checkpoints.fidelity import LayerError, SideError, check_comparable, layer_error

COLUMNS = ("layer", "gate_up mean", "max", "worst expert", "down mean", "max", "worst expert")


def errors_against(checkpoint: Checkpoint, reference: str) -> list[LayerError]:
    """Computes the errors of all layers, with a progress bar. Raises ValueError for another model."""
    from tqdm import tqdm

    other = Checkpoint(reference)
    check_comparable(checkpoint, other)
    layers = tqdm(checkpoint.layers, desc="compare", unit="layer", disable=not os.isatty(2))
    return [layer_error(checkpoint, other, layer) for layer in layers]


def errors_rows(errors: Sequence[LayerError]) -> list[tuple[str, ...]]:
    """Returns a table with a line for each layer and one for all."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for error in errors:
        sides = (error.gate_up, error.down)
        cells = [cell for side in sides for cell in (f"{side.mean:.4g}", f"{side.max:.4g}", str(side.worst))]
        rows.append((str(error.layer), *cells))
    whole = [(_mean(sides), max(side.max for side in sides)) for sides in _sides(errors)]
    return [*rows, ("all", *(cell for mean, most in whole for cell in (f"{mean:.4g}", f"{most:.4g}", "")))]


def errors_json(reference: str, errors: Sequence[LayerError]) -> dict[str, Any]:
    """Returns the errors as JSON values."""
    every = [side for sides in _sides(errors) for side in sides]
    return {
        "checkpoint": reference,
        "mean": _mean(every),
        "max": max(side.max for side in every),
        "layers": [asdict(error) for error in errors],
    }


def _sides(errors: Sequence[LayerError]) -> tuple[list[SideError], list[SideError]]:
    return [error.gate_up for error in errors], [error.down for error in errors]


def _mean(sides: Sequence[SideError]) -> float:
    return sum(side.mean for side in sides) / len(sides)
