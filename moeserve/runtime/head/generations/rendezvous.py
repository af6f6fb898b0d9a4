"""`Rendezvous`: how a generation's members come together: when it is due, all prepare, and then all join."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable

from moeserve.dispatch.members import Members
from moeserve.runtime.control.messages import epoch_message
from moeserve.runtime.control.stream import Message
from moeserve.runtime.head.generations.key_store import KeyStore
from moeserve.runtime.head.generations.parted import GONE_LOOK_SECONDS, Parted
from moeserve.runtime.head.generations.patience import Backoff, Formation, Patience
from moeserve.runtime.head.group import Group

log = logging.getLogger(__name__)

SETTLE_SECONDS = 0.25  # after a failure that no lost rank explains: a killed rank's stream ends by then


class Rendezvous:
    """When the next generation begins, which of its members have prepared and joined, and the store that its
    process group meets in.

    It has no thread, and the caller of any method holds the group's lock. `Generations` keeps the group's
    state, and calls each part in its turn: `begin`, `have_prepare`, `have_join`, and `end` when it aborts.
    """

    def __init__(self, group: Group, parted: Parted) -> None:
        self._group, self._parted = group, parted
        self._begin_at = math.inf
        self.awaits_ends = False  # a generation is due, once processes that were given up have ended
        self._retries = Backoff()  # of generations that members say cannot form; deaths do not count
        self._formation = _nobody_awaited()
        self._store = KeyStore()
        # the number of the first step that the only member of a group orders itself; 0: the head does
        self.own_order: Callable[[Members], int] = lambda members: 0
        self._name = f"moeserve-{secrets.token_hex(4)}"  # of process groups, beside those of other heads

    # -- when it begins -------------------------------------------------------------------------------------

    def next_at(self) -> float:
        """When the next generation begins, or the first bound of its members passes; infinite for never."""
        undead = math.inf if self.awaits_ends else self._parted.due
        return min(self._begin_at, self._formation.due(), undead)

    def due(self, now: float) -> bool:
        """Whether a generation is to begin, and all of its members are there."""
        return self._begin_at <= now and not self._group.missing

    def begin_soon(self) -> None:
        """All members are there: the first generation begins at once, and a later one when whoever else was
        lost with the one before is known.
        """
        settled = time.monotonic() + (SETTLE_SECONDS if self._group.generation else 0)
        self._begin_at = min(self._begin_at, settled)
        self._group.lock.notify_all()

    def begin_at_once(self) -> None:
        """The next generation begins as soon as all of its members are there."""
        self._begin_at = time.monotonic()

    def next_pause(self, *, settled: bool, said: bool) -> float:
        """Seconds until the next generation is tried: none where it is `settled` who is there, and more each
        time that members have `said` of one that it cannot form.
        """
        pause = 0.0 if settled else SETTLE_SECONDS
        if said:
            pause = max(pause, self._retries.next())
            log.warning("the next generation is tried in %.1f s", pause)
        return pause

    def put_off(self, now: float) -> bool:
        """Puts the generation off while processes that were given up still run and may do harm to it; whether
        it does.
        """
        outlives = all(seat.outlives for seat in self._group.seats.values())
        self.awaits_ends = not self._parted.all_ended() and not outlives
        if self.awaits_ends:
            self._begin_at = now + GONE_LOOK_SECONDS
        return self.awaits_ends

    def look_for_ends(self) -> None:
        """Begins the generation that was put off, once those processes have ended."""
        if self._parted.all_ended() and self.awaits_ends:
            self._begin_at = time.monotonic()
            self._group.lock.notify_all()

    # -- its course -----------------------------------------------------------------------------------------

    def begin(self, now: float, patience: Patience) -> None:
        """Gives a fresh generation its number, and waits for all members of the group."""
        self._begin_at = math.inf
        self._group.generation = max(self._group.generation, self._group.newest) + 1
        self._formation = Formation(self._group.members.seats, patience, now)

    def have_prepare(self, *, after: bool) -> None:
        """Has every member get its experts; `after`: the group has served before."""
        number, epoch = self._group.generation, epoch_message(self._group.epoch)
        self._group.broadcast({"kind": "prepare", "generation": number, "epoch": epoch, "after": after})

    def have_join(self) -> None:
        """Has the members form a process group; each is told its position, which is its rank there, and in
        which generations' memory others may still write: all that join have left those.
        """
        number, members = self._group.generation, self._group.members
        self._parted.joining = number
        orders = self.own_order(members)
        self._parted.has_left([seat.process(rank) for rank, seat in self._group.seats.items()])
        entry = {
            "kind": "join",
            "generation": number,
            "epoch": self._group.epoch.number,
            "group": f"{self._name}-{number}",
            "size": len(members),
            "parting": self._parted.generations,
            "orders": orders,
        }
        for rank, seat in list(self._group.seats.items()):
            self._group.send(seat, entry | {"position": members.position(rank)})

    def succeeded(self) -> None:
        """The generation serves: what could not form before it counts no more."""
        self._retries.reset()

    def end(self, pause: float) -> None:
        """The generation is over. The next one begins when all members are there, after `pause` seconds."""
        self._formation, self._store = _nobody_awaited(), KeyStore()
        self._begin_at = math.inf if self._group.missing else time.monotonic() + pause
        self.awaits_ends = False
        self._group.lock.notify_all()

    # -- what its members say -------------------------------------------------------------------------------

    @property
    def began(self) -> float:
        """When members began to prepare, and later when they began to join."""
        return self._formation.began

    def heard(self, rank: int, *, stepping: bool) -> None:
        """A member answers, or has read one more layer; whether it still is in a step."""
        self._formation.heard(rank, time.monotonic(), stepping=stepping)

    def prepared(self, rank: int) -> bool:
        """A member has its experts; whether all have."""
        self._formation.has_prepared(rank, time.monotonic())
        return self._formation.prepared

    def joined(self, rank: int) -> bool:
        """A member is in the process group; whether all are."""
        self._formation.has_joined(rank)
        return self._formation.joined

    def asked(self, rank: int, message: Message) -> None:
        """A member asks something of the store in which its process groups meet.

        Raises KeyError, TypeError or ValueError where that is malformed.
        """
        common = {"kind": "stored", "generation": self._group.generation}
        for number, answer in self._store.answers(rank, message):
            if number in self._group.seats:
                self._group.send(self._group.seats[number], common | answer)

    def silent(self, now: float) -> dict[int, str]:
        """Members that prepare and were not heard of for too long, each with the reason to part with it."""
        return self._formation.silent(now)


def _nobody_awaited() -> Formation:
    return Formation((), Patience(), 0.0)
