"""Experts and batches made for tests: random weights in any format, and rows in any grouping amid poison."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.experts.activation import ACTIVATIONS, Activation
from moeserve.experts.batch import ExpertBatch, ExpertShape, ExpertWeights, Grouping
from moeserve.quant.format import Format, Packed, Scheme
from moeserve.quant.formats.floats import FP32

NEEDED = {"limit": 1.5, "beta": 2.0}
"""Values for the parameters some activations need."""


def fresh_seed() -> int:
    """A new seed, printed, so that a failing run can be repeated."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed={seed}")
    return seed


def activation_named(name: str) -> Activation:
    return Activation(name, **{parameter: NEEDED[parameter] for parameter in ACTIVATIONS[name].needs})


def make_weights(shape: ExpertShape, experts: int, form: Format, generator: torch.Generator) -> ExpertWeights:
    """Weights that keep rows at about unit size, so that every part of an activation is met."""
    return make_scheme(shape, experts, Scheme(form, FP32), generator)


STATIC_RANGE = 16.0
"""Largest activation that static scales leave room for: few are beyond, and saturate."""


def make_scheme(
    shape: ExpertShape, experts: int, scheme: Scheme, generator: torch.Generator
) -> ExpertWeights:
    """Weights of a scheme, with static activation scales where it takes them, one value an expert.

    Activation orders are random.
    """
    form = scheme.weights

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(experts, rows, columns, generator=generator) * 2 / columns**0.5

    def bias(rows: int) -> Tensor | None:
        return torch.randn(experts, rows, generator=generator) if shape.bias else None

    def scale() -> Tensor | None:
        if scheme.activations.given is None:
            return None
        largest = {"fp8_static": 448.0, "int8_static": 127.0, "nvfp4_static": 2688.0}[scheme.activations.name]
        return STATIC_RANGE * (1 + torch.rand(experts, generator=generator)) / largest

    def packed(rows: int, columns: int) -> Packed:
        made = form.quantize(matrix(rows, columns))
        if form.parts[-1].name != "order":
            return made
        *parts, order = made.parts
        places = torch.rand(order.shape, generator=generator).argsort(-1)
        return made.with_parts((*parts, order.gather(-1, places)))

    return ExpertWeights(
        gate_up=packed(shape.gate_up_rows, shape.hidden),
        down=packed(shape.hidden, shape.inner),
        gate_up_bias=bias(shape.gate_up_rows),
        down_bias=bias(shape.hidden),
        input_scale=scale(),
        inner_scale=scale(),
    )


@dataclass(frozen=True)
class Arrival:
    """How many rows arrived for each slot, and how they stand."""

    counts: tuple[int, ...]
    grouping: Grouping
    row_align: int = 1
    spare: int = 0  # rows after the last segment, or of each slot when padded
    poison: float = float("nan")  # what stands outside the segments

    def rows(self, hidden: int, generator: torch.Generator) -> list[Tensor]:
        """Rows of each slot, `[count, hidden]` float32."""
        return [torch.randn(count, hidden, generator=generator) for count in self.counts]

    def batch(self, rows: list[Tensor], hidden: int, wire: Format) -> ExpertBatch:
        """The batch that holds `rows`."""
        slots = len(self.counts)
        if self.grouping is Grouping.PADDED:
            capacity = max(self.counts, default=0) + self.spare
            starts = [slot * capacity for slot in range(slots + 1)]
            total = slots * capacity
        else:
            starts = [0]
            for count in self.counts:
                starts.append(starts[-1] + -(-count // self.row_align) * self.row_align)
            total = starts[-1] + self.spare
        tokens = torch.full((total, hidden), self.poison)
        for start, own in zip(starts, rows, strict=False):
            tokens[start : start + len(own)] = own
        packed = wire.quantize(tokens)
        if self.grouping is Grouping.PADDED:
            packed = wire.quantize(tokens.view(slots, capacity, hidden))
        offsets = torch.tensor(starts, dtype=torch.int32)
        return ExpertBatch(packed, self.grouping, torch.tensor(self.counts, dtype=torch.int32), offsets)

    def segments(self, outputs: Tensor, batch: ExpertBatch) -> list[Tensor]:
        """The defined rows of `outputs`, slot by slot."""
        flat = outputs.reshape(-1, outputs.shape[-1])
        starts = batch.offsets.tolist()
        return [flat[start : start + count] for start, count in zip(starts, self.counts, strict=False)]
