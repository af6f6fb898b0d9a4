"""Running the rest of a step before its rank serves: routing, grouping and weighing rows, and whole steps.

Triton compiles a kernel at first use, a graph is recorded at the second, and host memory is pinned: all of it
takes far longer than a step. What needs no other rank is run when experts are loaded; whole steps are run
where a rank is alone, since a rank among others would make them wait for its compiler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch

from moeserve.dispatch.permute import group_rows, weigh_rows
from moeserve.experts.placement import EMPTY
from moeserve.experts.routing.choices import Choices, StepAddressing, addressed, routed
from moeserve.experts.routing.gate import Gate
from moeserve.quant.format import Format
from moeserve.runtime.rank.answers import on_host
from moeserve.runtime.rank.warm.kernels import rooms
from moeserve.runtime.served import Served
from moeserve.runtime.step import LaneInput, LaneLogits, LaneRows

log = logging.getLogger(__name__)

GROUPED_CHOICES = 4096
"""Choices up to which grouping and weighing are warmed; for more, their kernels have no further variant."""

ANSWER_BYTES = 64 << 20
"""Largest answer for which host memory is pinned ahead."""


def warm_choices(served: Served, addressing: Callable[[int], StepAddressing], device: str) -> None:
    """What a step does with its rows' choices, for rows that choose nothing, at every size of a lane."""
    for rows in rooms(served.lane_rows):
        none = torch.full((rows, served.checkpoint.top_k), EMPTY, dtype=torch.int32, device=device)
        valid = torch.zeros(rows, dtype=torch.bool, device=device)
        addressed(Choices(none, torch.zeros(none.shape, device=device), valid), addressing(rows))


def warm_routing(
    gate: Gate, dtypes: tuple[torch.dtype, ...], addressing: StepAddressing, device: str
) -> None:
    """The choice by router logits, where `gate` (its bias on `device`) takes logits, in each of `dtypes`."""
    if not gate.takes_logits or (gate.biased and gate.bias is None):
        return
    for dtype in dict.fromkeys(dtypes):
        logits = torch.zeros((1, gate.experts), dtype=dtype, device=device)
        routed(gate, logits, torch.zeros(1, dtype=torch.bool, device=device), addressing)


def numbers_of(gate: Gate) -> tuple[object, ...]:
    """Returns a gate without its bias: gates that have the same share their kernel."""
    return tuple(value for name, value in vars(gate).items() if name != "bias")


def warm_grouping(wire: Format, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    """Grouping and weighing of rows on `wire` that choose no slot here; `sizes`: K, H, slots, row_align."""
    top_k, hidden, slots, row_align = sizes
    for rows in rooms(GROUPED_CHOICES // top_k):
        tokens = wire.quantize(torch.zeros((rows, hidden), dtype=dtype, device=device))
        nowhere = torch.full((rows, top_k), EMPTY, dtype=torch.int32, device=device)
        weights = torch.zeros((rows, top_k), device=device)
        batch, homes = group_rows(tokens, nowhere, weights, (slots, row_align))
        outputs = torch.zeros((batch.tokens.shape[0], hidden), dtype=dtype, device=device)
        weigh_rows(outputs, homes, dtype)


def warm_steps(run: Callable[[LaneRows], torch.Tensor], served: Served, gate: Gate, recorded: int) -> int:
    """Steps of rows that choose nothing, as `run` runs them on a rank that is alone; returns how many.

    One of every size, and three where steps of up to `recorded` rows come from graphs: as they are, recorded,
    replayed. Rows stand in host memory, as callers' do, and answers come back there. A size that does not fit
    beside the experts ends it with a warning.
    """
    done = 0
    for rows in rooms(served.lane_rows):
        times = 3 if rows <= recorded else 1
        try:
            for lane in idle_rows(served, gate, rows):
                for _ in range(times):
                    answer = run(lane)
                    done += 1
                    if answer.nbytes <= ANSWER_BYTES:
                        on_host(answer)
        except torch.OutOfMemoryError as error:
            log.warning("a step of %d rows would not fit beside the experts: %s", rows, error)
            break
    return done


def idle_rows(served: Served, gate: Gate, rows: int) -> Iterator[LaneRows]:
    """Rows without a caller, with choices and, where the gate takes them, with router logits."""
    hidden = torch.zeros((rows, served.checkpoint.hidden), dtype=served.dtype)
    none = torch.full((rows, gate.top_k), EMPTY, dtype=torch.int32)
    valid = torch.zeros(rows, dtype=torch.bool)
    yield LaneInput(hidden, none, torch.zeros(none.shape), valid)
    if gate.takes_logits and not (gate.biased and gate.bias is None):
        yield LaneLogits(hidden, torch.zeros((rows, gate.experts)), valid)
