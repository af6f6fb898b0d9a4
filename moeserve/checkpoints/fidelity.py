"""Relative errors of a checkpoint's experts against another's, from decoded weights: `layer_error`."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.checkpoints.checkpoint import Checkpoint
from moeserve.checkpoints.requantization import relative_error


@dataclass(frozen=True)
class SideError:
    """Relative errors of one projection over a layer's experts: |a - b| / |b| in Frobenius norms."""

    mean: float
    max: float
    worst: int  # the expert that has the largest error


@dataclass(frozen=True)
class LayerError:
    """One layer's relative errors; gate and up count as one matrix."""

    layer: int
    gate_up: SideError
    down: SideError


def check_comparable(checkpoint: Checkpoint, reference: Checkpoint) -> None:
    """Raises ValueError where layers, experts, H or I of the two differ; it names the first that does."""
    rows = (
        ("layers", checkpoint.layers, reference.layers),
        ("experts", checkpoint.num_experts, reference.num_experts),
        ("H", checkpoint.hidden, reference.hidden),
        ("I", checkpoint.inner, reference.inner),
    )
    for name, ours, theirs in rows:
        if ours != theirs:
            raise ValueError(
                f"{checkpoint.path} cannot be compared with {reference.path}: {name} {ours}, there {theirs}"
            )


def layer_error(checkpoint: Checkpoint, reference: Checkpoint, layer: int) -> LayerError:
    """Computes the errors of `layer` against `reference`, with one expert of each in memory at a time.

    Raises CheckpointError for a file that cannot be read.
    """
    found: tuple[list[float], list[float]] = ([], [])
    for expert in range(checkpoint.num_experts):
        ours, theirs = (each.experts(layer, [expert]) for each in (checkpoint, reference))
        found[0].append(relative_error(ours.gate_up.dequantize(), theirs.gate_up.dequantize()))
        found[1].append(relative_error(ours.down.dequantize(), theirs.down.dequantize()))
    return LayerError(layer, *(_over(errors) for errors in found))


def _over(errors: list[float]) -> SideError:
    largest = max(errors)
    return SideError(sum(errors) / len(errors), largest, errors.index(largest))
