"""`OwnSteps`: what a member that is alone in its group says of the steps that it orders by itself."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from moeserve.runtime.control.stream import Message

MOST = 1 << 31
"""Far from what a member does between two messages, and from what a service's counts end at."""

MOST_NUMBER = 1 << 48
"""Of a step; far from what a frame's numbers end at."""

MOST_ENDED = 2048
"""Steps that have ended, in one message."""


class OwnSteps(NamedTuple):
    """Counts are of what has happened since the message before it; the other figures are of now."""

    turn: int  # of this message in its generation; an older one that comes later counts no more
    steps: int  # that were begun
    jobs: int  # that came
    queued: int  # jobs that are in no step yet
    running: int  # steps and runs under way
    number: int  # of the oldest of these, or of the next step
    went_on: float  # seconds on that member's own clock: when a step was last begun, or ended
    active: bool  # steps may run until the next message, which comes soon; else none runs before it
    held: bool  # it begins no step, since it was told so
    ended: tuple[tuple[int, float], ...]  # the layer (decoder index) and the seconds of each step that ended


def own_steps_message(told: OwnSteps, generation: int) -> Message:
    """The message that tells the head."""
    return {"kind": "ordered", "generation": generation} | told._asdict()


def own_steps_from(message: Message, layers: Collection[int]) -> OwnSteps:
    """What a message says. layers: the decoder indices that are served. Raises KeyError, TypeError or
    ValueError for one of another form.
    """
    counts = [int(message[name]) for name in ("turn", "steps", "jobs", "queued", "running")]
    number = int(message["number"])
    ended = tuple((int(layer), float(seconds)) for layer, seconds in message["ended"])
    if not 0 <= min(counts) <= max(counts) < MOST:
        raise ValueError(f"a member counts {min(counts)} to {max(counts)} of its steps")
    if not 0 <= number < MOST_NUMBER:
        raise ValueError(f"step {number} is not one of a service")
    if min(seconds := [seconds for _, seconds in ended], default=0.0) < 0:
        raise ValueError(f"a step took {min(seconds)} s")
    if len(ended) > MOST_ENDED:
        raise ValueError(f"{len(ended)} steps in one message; {MOST_ENDED} may be")
    if unknown := {layer for layer, _ in ended}.difference(layers):
        raise ValueError(f"steps of layers {sorted(unknown)}, which are not served")
    went_on = float(message["went_on"])
    if not all(map(math.isfinite, (went_on, *seconds))):
        raise ValueError("a member's clock is no number")
    turn, steps, jobs, queued, running = counts
    active, held = message["active"] is True, message["held"] is True
    return OwnSteps(turn, steps, jobs, queued, running, number, went_on, active, held, ended)


def steady_message(generation: int, *, steady: bool) -> Message:
    """The message by which the head has such a member begin steps, or begin none."""
    return {"kind": "steady", "generation": generation, "steady": steady}
