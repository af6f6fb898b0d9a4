"""What travels of runs: steps of a pass that are launched at once, in the order of a group's steps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from moeserve.runtime.control.stream import Message

MOST_STEPS = 4096
"""Of one run."""

MOST_ASKED = 256
"""Runs of one member that wait for their order: two of each lane, as a rule."""


@dataclass(frozen=True)
class AskedRun:
    """Steps that a member wants launched at once, for rows that its lane brings and nobody else."""

    seat: int  # of that member
    run: int  # as that member numbers its runs
    layers: tuple[int, ...]  # of its steps, in their order (decoder indices)
    rows: int  # of each step, padded


@dataclass(frozen=True)
class OrderedRun:
    """A run in the order of all steps. number: of its first step; the others have those after it."""

    asked: AskedRun
    number: int
    epoch: int


def asked_message(asked: AskedRun, generation: int) -> Message:
    """The message by which a member asks the head for a run."""
    return {
        "kind": "run",
        "generation": generation,
        "run": asked.run,
        "layers": asked.layers,
        "rows": asked.rows,
    }


def asked_from(seat: int, message: Message, most_rows: int, served: Collection[int]) -> AskedRun:
    """The run that the member of `seat` asks for. served: the layers that there are. Raises KeyError,
    TypeError or ValueError.
    """
    layers = tuple(int(layer) for layer in message["layers"])
    asked = AskedRun(seat, int(message["run"]), layers, int(message["rows"]))
    if not 0 < len(layers) <= MOST_STEPS:
        raise ValueError(f"run {asked.run} of seat {seat} has {len(layers)} steps; 1 to {MOST_STEPS} may be")
    if unknown := set(layers).difference(served):
        raise ValueError(f"run {asked.run} of seat {seat} has layers {sorted(unknown)}, which are not served")
    if not 0 < asked.rows <= most_rows:
        raise ValueError(
            f"run {asked.run} of seat {seat} has {asked.rows} rows; a lane takes 1 to {most_rows}"
        )
    return asked


def run_message(ordered: OrderedRun, generation: int) -> Message:
    """The message that tells all who take part of a run."""
    asked = asked_message(ordered.asked, generation)
    return asked | {
        "seat": ordered.asked.seat,
        "number": ordered.number,
        "epoch": ordered.epoch,
        "why_not": "",
    }


def refused_message(asked: AskedRun, generation: int, why: str) -> Message:
    """The message that tells whoever asked for a run that there will be none."""
    return asked_message(asked, generation) | {"seat": asked.seat, "number": 0, "epoch": 0, "why_not": why}


def ordered_from(message: Message) -> OrderedRun:
    """The run that a message tells of; number 0 where it was refused, for the message's `why_not`."""
    asked = AskedRun(message["seat"], message["run"], tuple(message["layers"]), message["rows"])
    return OrderedRun(asked, message["number"], message["epoch"])
