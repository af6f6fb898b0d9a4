"""What dispatchers over torch.distributed launch in a step, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from parallel import group

from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.dispatcher import Dispatcher, DispatchSpec
from moeserve.dispatch.members import Members
from moeserve.dispatch.routing import Routing
from moeserve.quant.formats import FORMATS

COLLECTIVES = ("all_to_all_single", "all_to_all", "broadcast", "all_reduce", "barrier", "all_gather_object")

HIDDEN, TOP_K, SLOTS = 32, 2, 2


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts collectives and messages of this process meanwhile."""
    found: Counter[str] = Counter()
    true = {name: getattr(dist, name) for name in (*COLLECTIVES, "batch_isend_irecv")}

    def counting(name: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            found[name] += len(args[0]) if name == "batch_isend_irecv" else 1
            return true[name](*args, **kwargs)

        return called

    for name in true:
        setattr(dist, name, counting(name))
    try:
        yield found
    finally:
        for name, function in true.items():
            setattr(dist, name, function)


def stepped(dispatcher: Dispatcher, spec: DispatchSpec, lane_rows: tuple[int, ...], number: int) -> list[int]:
    """One step, each row choosing the first slots of two owners; rows of the batch and of the answer."""
    rows = spec.own_rows(lane_rows)
    slots = torch.tensor([[0, SLOTS]], dtype=torch.int32).repeat(rows, 1)
    hidden = torch.full((rows, HIDDEN), float(spec.seat + 1))
    arrived = dispatcher.dispatch(hidden, Routing(slots, torch.ones(rows, TOP_K), lane_rows, number))
    outputs = arrived.batch.tokens.dequantize()
    answer = dispatcher.combine(outputs, arrived.ticket)
    if not torch.equal(answer, 2 * hidden):
        raise AssertionError(f"seat {spec.seat}: found {answer}")
    return [int(arrived.batch.counts.sum()), answer.shape[0]]


def launched(
    rank: int, world: int, name: str, members: Members, steps: list[tuple[int, ...]]
) -> list[tuple[dict[str, int], list[int]]]:
    """Worker: what building and then each step launched here, and the rows of each."""
    seat, wire = members.seats[rank], FORMATS["fp32"]
    spec = DispatchSpec(members, seat, SLOTS, HIDDEN, TOP_K, 8, torch.float32, wire)
    with counted() as built:
        dispatcher = DISPATCHERS[name].build(spec, group())
    found = [(dict(built), [0, 0])]
    for number, lane_rows in enumerate(steps, start=1):
        with counted() as calls:
            rows = stepped(dispatcher, spec, lane_rows, number)
        found.append((dict(calls), rows))
    return found
