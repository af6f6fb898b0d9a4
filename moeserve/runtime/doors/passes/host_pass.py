"""`HostPass`: how far a pass is whose rows lie in host memory, what of it is under way, and how a step that
fails ends it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from moeserve.proto import moe_pb2
from moeserve.proto.passes.mailbox import Status
from moeserve.runtime.doors.passes.announced import Announcement, Between

SOON_SECONDS = 0.0005
"""After which a step is tried again that the lane had no room for, where it does not say when."""

INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED = 3, 5, 8
"""Codes of gRPC's statuses."""

WRONG = (
    (INVALID_ARGUMENT, "bad_tensor"),
    (INVALID_ARGUMENT, "bad_request"),
    (INVALID_ARGUMENT, "too_many_rows"),
    (NOT_FOUND, "not_served"),
)
"""How a step fails that its caller has got wrong. After another failure the caller may try again."""

LEASE_ENDED = "unknown_region"
"""Why a step fails whose rows or answer lie in the lane's memory no more: its caller has let go of that."""


class Call(Protocol):
    """A step of this lane that is under way."""

    def give_up(self) -> None:
        """Ends it soon; its `ended` is called all the same."""


@dataclass
class Stage:
    """Where a stage of a pass is."""

    since: float  # when its next rows were first wanted
    steps: int = 0  # that were answered
    busy: bool = False
    call: Call | None = None
    again: float = -math.inf  # not to be begun before
    there: float = math.inf  # when rows of the step that is next were first seen
    refused: float = math.inf  # when the lane first had no room for the step that is next


@dataclass
class HostPass:
    number: int
    layers: tuple[int, ...]
    standing: bool
    any_weights: bool
    version: int  # of the weights that its steps must have; 0: whichever comes first
    stages: list[Stage]
    ends: tuple[Status, str] | None = None  # how, once the steps under way have ended

    @classmethod
    def of(cls, between: Between) -> HostPass:
        """One that goes on."""
        said = between.said
        stages = [Stage(*one) for one in zip(between.since, between.steps, strict=True)]
        return cls(said.number, said.layers, said.standing, said.any_weights, between.version, stages)

    def between(self) -> Between:
        """How far it is; no step is under way."""
        modes = self.standing, self.any_weights, self.version
        return Between(
            Announcement(self.number, self.layers, len(self.stages), *modes),
            tuple(stage.steps for stage in self.stages),
            tuple(stage.since for stage in self.stages),
            self.version,
        )

    @property
    def done(self) -> bool:
        return not self.standing and all(stage.steps == len(self.layers) for stage in self.stages)

    def layer(self, stage: Stage) -> int:
        return self.layers[stage.steps % len(self.layers)]

    def wants(self, stage: Stage) -> bool:
        """Whether the stage has a step that the caller may bring rows for."""
        return not stage.busy and (self.standing or stage.steps < len(self.layers))

    def late(self, stage: Stage, now: float, patience: float) -> bool:
        """Whether the caller is; between the rounds of a standing pass it may rest."""
        resting = self.standing and stage.steps % len(self.layers) == 0
        return not resting and now - stage.since > patience

    def failed(self, stage: Stage, how: moe_pb2.Error, now: float) -> None:
        """A step has failed: it is tried again where the lane had no room, and else ends the pass."""
        if how.code == RESOURCE_EXHAUSTED:
            after = how.pushback_ms / 1000 if how.HasField("pushback_ms") else SOON_SECONDS
            stage.again, stage.refused = now + after, min(stage.refused, now)
            return
        if how.reason == LEASE_ENDED:
            self.ends = Status.DETACHED, "its caller's lease ended"
            return
        status = Status.REFUSED if (how.code, how.reason) in WRONG else Status.LOST
        if how.reason == "wrong_version":
            status = Status.OTHER_WEIGHTS
        self.ends = status, f"{how.reason}: {how.message}"
