"""`TwoPhaseCommit`: changes of the epoch, one at a time; members prepare one while steps run and vote."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from moeserve.runtime.control.messages import commit_message, stage_message, staged_from
from moeserve.runtime.control.stream import Message
from moeserve.runtime.epoch import Change, Epoch
from moeserve.runtime.head.group import Group
from moeserve.runtime.head.placing.pending_change import Outcome, PendingChange, Stage

log = logging.getLogger(__name__)


class TwoPhaseCommit:
    """Sends a change to every member, counts the votes and tells the result. Called with the group's lock
    held.

    A member that no expert is copied to has nothing to stage and votes at once; it adopts as the others do,
    since its own rows find the experts by the placement too.
    `layers` are the decoder indices of the placement's layers.
    """

    def __init__(self, group: Group, layers: tuple[int, ...]) -> None:
        self._group, self._layers = group, layers
        self._pending: PendingChange | None = None  # the change under way
        self._changes = 0
        self.adopt_seconds = 60.0  # until every member serves what was decided
        self.on_epoch: Callable[[Epoch], None] = lambda epoch: None  # it has been decided
        # ends the generation for those seats, for a reason
        self.on_stuck: Callable[[list[int], str], None] = lambda seats, why: self.abandon(why)

    def run(self, change: Change, timeout: float) -> Outcome:
        """Has `change` prepared and voted on; blocks until it has ended, and holds no lock meanwhile."""
        started, group = time.monotonic(), self._group
        if refused := self._refused(change):
            return Outcome(refused)
        self._changes += 1
        members, layer = group.members, self._layers[change.layer]
        pending = self._pending = PendingChange(self._changes, change, members.seats)
        peers = group.weights_of
        for number, seat in list(group.seats.items()):
            order = stage_message(pending.number, change, layer, members.at(number).owner)
            group.send(seat, order | {"generation": group.generation, "peers": peers})
        group.lock.wait_for(lambda: pending.stage is not Stage.PREPARING, timeout)
        if pending.stage is Stage.PREPARING:
            self.abandon(f"ranks {pending.missing} did not prepare it within {timeout:g} s")
        if not group.lock.wait_for(lambda: pending.ended, self.adopt_seconds):
            what = f"did not adopt epoch {change.epoch.number}"
            why = f"{what} within cluster.adopt_seconds = {self.adopt_seconds:g}"
            self.on_stuck(pending.behind, why)
        self._pending = None
        return Outcome(pending.reason, time.monotonic() - started, pending.staged)

    def abandon(self, reason: str) -> None:
        """Drops the change under way, unless it is decided; members keep serving the epoch they have."""
        if self._pending is None or self._pending.ended:
            return
        self._pending.abandon(reason)
        self._send_outcome()

    def message_received(self, seat: int, message: Message) -> None:
        """Takes a member's message about the change: it has staged it, it cannot, or it serves it."""
        if self._pending is None or int(message["change"]) != self._pending.number:
            return
        if message["kind"] == "adopted":
            self._pending.adopt(seat)
            self._group.lock.notify_all()
        elif self._pending.stage is Stage.PREPARING:
            self._pending.vote(seat, staged_from(message), str(message["refused"]))
            self._send_outcome()

    def _refused(self, change: Change) -> str:
        """Why `change` cannot be put to the vote, or nothing."""
        served = self._group.epoch.number
        if self._pending is not None:
            return f"epoch {self._pending.change.epoch.number} is still under way"
        if change.epoch.number != served + 1:
            return f"epoch {change.epoch.number} was planned, and epoch {served} is served now"
        return ""

    def _send_outcome(self) -> None:
        """Sends every member the change's commit, or that it is abandoned."""
        if self._pending is None:
            return
        group = self._group
        match self._pending.stage:
            case Stage.DECIDED:
                group.epoch = self._pending.change.epoch
                self.on_epoch(group.epoch)
                group.broadcast(commit_message(self._pending.number, self._pending.change, group.generation))
            case Stage.ABANDONED:
                number = self._pending.change.epoch.number
                log.warning("epoch %d is abandoned: %s", number, self._pending.reason)
                group.broadcast({"kind": "abandon", "generation": group.generation})
        group.lock.notify_all()
