"""`Requantization`: error and bytes of loading experts in another scheme, measured on a few experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from moeserve.checkpoints.checkpoint import Checkpoint

SAMPLED = 3
"""The most experts of a layer that are read: the first, the last, and others evenly between."""

MOST_WEIGHTS = 1 << 31
"""The most weights that are read, in about a minute; of a larger model one expert a layer is read."""

Progress = Callable[[Iterable[int]], Iterable[int]]


@dataclass(frozen=True)
class Loss:
    """Relative errors of one projection over the experts that were read."""

    mean: float
    max: float


@dataclass(frozen=True)
class Requantization:
    """Errors and bytes of experts as they are loaded, compared with experts as they are stored.

    An error is `|loaded - stored| / |stored|` of an expert's matrix in Frobenius norms, both decoded to
    float32, so it does not count what the producer lost before. Bytes are of all experts of
    `layers`, on one rank that held them all.
    """

    stored: tuple[str, ...]  # schemes in the file
    loaded: tuple[str, ...]  # schemes as served
    layers: tuple[int, ...]
    experts: tuple[int, ...]  # read in each layer
    gate_up: Loss
    down: Loss
    stored_nbytes: int  # in the file
    loaded_nbytes: int  # as served, before a kernel brings them to its own form


def requantization(
    stored: Checkpoint, loaded: Checkpoint, layers: Sequence[int], progress: Progress = iter
) -> Requantization:
    """Compares two views of one checkpoint, opened without `load_as` and with it.

    Reads the same experts of each layer from both: at most `SAMPLED`, fewer where they are large. `progress`
    wraps the iteration over layers. Raises ValueError without layers, or for a layer without experts.
    """
    if not layers:
        raise ValueError("no layers were given to compare")
    shape = stored.shape(layers[0])
    weights = len(layers) * (shape.gate_up_rows + shape.inner) * shape.hidden
    ids = sampled(stored.num_experts, max(1, min(SAMPLED, MOST_WEIGHTS // weights)))
    gate_up: list[float] = []
    down: list[float] = []
    loaded_nbytes = 0
    for layer in progress(layers):
        for expert in ids:
            before, after = (view.experts(layer, [expert]) for view in (stored, loaded))
            gate_up.append(relative_error(after.gate_up.dequantize(), before.gate_up.dequantize()))
            down.append(relative_error(after.down.dequantize(), before.down.dequantize()))
        loaded_nbytes += _nbytes(loaded, layer)
    return Requantization(
        _schemes(stored, layers),
        _schemes(loaded, layers),
        tuple(layers),
        ids,
        _loss(gate_up),
        _loss(down),
        sum(stored.expert_nbytes(layer) for layer in layers) * stored.num_experts,
        loaded_nbytes,
    )


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Returns `|found - wanted| / |wanted|` in Frobenius norms, summed in float64; 0 where both are zero."""
    off, size = (float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in (found - wanted, wanted))
    if size == 0:
        return inf if off else 0.0
    return off / size


def sampled(experts: int, count: int) -> tuple[int, ...]:
    """Returns at most `count` of `experts` ids, spread evenly from the first to the last."""
    count = min(count, experts)
    return tuple(round(at * (experts - 1) / max(count - 1, 1)) for at in range(count))


def _nbytes(loaded: Checkpoint, layer: int) -> int:
    """Returns the bytes of all experts of a layer; biases are float32 once they are read."""
    shape, weights = loaded.shape(layer), loaded.scheme(layer).weights
    rows, hidden, inner = shape.gate_up_rows, shape.hidden, shape.inner
    biases = (rows + hidden) * torch.float32.itemsize if shape.bias else 0
    return loaded.num_experts * (weights.nbytes((rows, hidden)) + weights.nbytes((hidden, inner)) + biases)


def _schemes(view: Checkpoint, layers: Sequence[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(view.scheme(layer).name for layer in layers))


def _loss(errors: Iterable[float]) -> Loss:
    found = list(errors)
    return Loss(sum(found) / len(found), max(found))
