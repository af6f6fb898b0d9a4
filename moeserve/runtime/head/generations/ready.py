"""`ReadyPlans`: for each owner that may be lost, the epoch without it, made before it is needed."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from moeserve.experts.cover.breather import Breather
from moeserve.experts.cover.takeover import heirs
from moeserve.runtime.control.shadowed import Shadowed
from moeserve.runtime.epoch import Epoch

log = logging.getLogger(__name__)

SETTLED_SECONDS = 0.2  # without another epoch, before plans are made: a rebalance commits many
REMEMBERED = 64  # epochs, of which members may still hold the shadows


@dataclass(frozen=True)
class Cover:
    """Where the experts of one member come from, were it lost now: in how many layers, and how many bytes.

    A layer is served at once where other owners hold all of its experts (`replicas`), and else when the last
    one is brought in, from host memory (`shadows`) or from a checkpoint (`disk`). In layers that are counted
    in `waits` the others have no slots for them: the group waits for the member.
    """

    replicas: int = 0
    shadows: int = 0
    disk: int = 0
    waits: int = 0
    nbytes: int = 0  # that are brought in, as they lie in the checkpoint
    why_waits: str = ""


class _Told(NamedTuple):
    """The epoch that a member has filled its shadows for, and the positions of the layers that have all."""

    of: Epoch
    positions: frozenset[int]

    def holds(self, epoch: Epoch, position: int) -> bool:
        """Whether those shadows are what `epoch` needs in one layer: nothing has changed there since."""
        before, now = self.of.placement, epoch.placement
        same = self.of is epoch or (
            before.room == now.room
            and self.of.version(position) == epoch.version(position)
            and bool((before.slots[position] == now.slots[position]).all())
        )
        return same and position in self.positions


class ReadyPlans:
    """The epochs that follow when members are lost. Any thread may ask; one thread makes plans beforehand.

    `shadowed` gives what the members that are connected have said of their shadows, by seat; `nbytes` the
    bytes of one expert of each layer by position, as it lies in the checkpoint.
    """

    def __init__(
        self, shadowed: Callable[[], Mapping[int, Shadowed]] = dict, nbytes: tuple[int, ...] = ()
    ) -> None:
        self._shadowed = shadowed
        self.nbytes = nbytes
        self._news = threading.Condition()  # around those below
        self._epochs: OrderedDict[int, Epoch] = OrderedDict()  # the last ones, by number
        self._plans: dict[int, Epoch | str] = {}  # of the newest epoch, by seat; why there is none
        self._planned: Epoch | None = None  # what the plans are of
        self._closed = False

    def start(self) -> None:
        """Begins to make plans beforehand."""
        threading.Thread(target=self._run, name="ready_plans", daemon=True).start()

    def close(self) -> None:
        """Makes no further plans."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    def renew(self, epoch: Epoch) -> None:
        """Has plans be made for `epoch` soon, unless it is the newest already; takes no time."""
        with self._news:
            if self._epochs.get(epoch.number) is epoch:
                return
            self._epochs[epoch.number] = epoch
            self._epochs.move_to_end(epoch.number)
            while len(self._epochs) > REMEMBERED:
                self._epochs.popitem(last=False)
            self._news.notify_all()

    def without(self, epoch: Epoch, seats: Collection[int]) -> Epoch:
        """`epoch` when the members of `seats` are lost: the plan where there is one of it, else made now.

        Where members still hold the shadows of an epoch before, experts go to where those are. Raises
        ValueError, with the reason, where the others cannot serve without them.
        """
        shadowed = self._shadowed_epoch(epoch, seats)
        if len(seats) == 1 and shadowed is None:
            with self._news:
                plan = self._plans.get(next(iter(seats))) if self._planned is epoch else None
            if isinstance(plan, str):
                raise ValueError(plan)
            if plan is not None:
                return plan
        return epoch.without(seats, shadowed)

    def covered(self, epoch: Epoch, seat: int) -> Cover:
        """Where the experts of the member of `seat` come from, were it lost now. Raises ValueError for a
        vacant seat.
        """
        owner, placement = epoch.members.at(seat).owner, epoch.placement
        if owner is None:
            return Cover(replicas=placement.layers)
        if epoch.mesh.sliced:
            why = "ranks hold slices of every expert; the group cannot serve without one"
            return Cover(waits=placement.layers, why_waits=why)
        told, sources, nbytes, why = self._told(), dict.fromkeys(SOURCES, 0), 0, ""
        for position, row in enumerate(placement.slots):
            found = heirs(row.tobytes(), placement.room, placement.experts, owner)
            source = self._source(epoch, position, found, told)
            sources[source] += 1
            if found is None:
                why = why or f"the other owners have no slots for its experts at {position}, among others"
            elif position < len(self.nbytes):
                nbytes += len(found) * self.nbytes[position]
        return Cover(**sources, nbytes=nbytes, why_waits=why)

    def _source(
        self, epoch: Epoch, position: int, found: dict[int, int] | None, told: Mapping[int, _Told]
    ) -> str:
        """Where a layer's experts come from, of which each goes to the owner that `found` names."""
        if found is None:
            return "waits"
        if not found:
            return "replicas"
        seats = {epoch.members.seat_of_owner[owner] for owner in found.values()}
        said = [told.get(-1 if seat is None else seat) for seat in seats]
        return "shadows" if all(one is not None and one.holds(epoch, position) for one in said) else "disk"

    def _told(self) -> dict[int, _Told]:
        """What members have said of their shadows, with the epoch that they said it of, by seat."""
        shadowed = dict(self._shadowed())
        with self._news:
            found = {seat: (self._epochs.get(said.epoch), said.positions) for seat, said in shadowed.items()}
        return {seat: _Told(of, positions) for seat, (of, positions) in found.items() if of is not None}

    def _shadowed_epoch(self, epoch: Epoch, seats: Collection[int]) -> Epoch | None:
        """The earlier epoch whose shadows all survivors that have any still hold; None for this one's."""
        told = {said.epoch for seat, said in dict(self._shadowed()).items() if seat not in seats}
        told.discard(0)
        with self._news:
            return self._epochs.get(told.pop()) if len(told) == 1 and told != {epoch.number} else None

    def _run(self) -> None:
        """Runs the thread; without it plans are made when they are needed."""
        try:
            while (epoch := self._next()) is not None:
                self._plan(epoch)
        except Exception:
            log.exception("the thread ready_plans ends; plans are made when a member is lost")
            with self._news:
                self._planned, self._plans = None, {}

    def _next(self) -> Epoch | None:
        """The newest epoch, once it has none of its plans and no other has come for a while."""
        with self._news:
            self._news.wait_for(lambda: self._closed or self._newest is not self._planned)
            newest = None
            while not self._closed and self._newest is not newest:
                newest = self._newest
                self._news.wait(SETTLED_SECONDS)
            return None if self._closed else newest

    @property
    def _newest(self) -> Epoch | None:
        return next(reversed(self._epochs.values()), None)

    def _plan(self, epoch: Epoch) -> None:
        """Makes the plan for each owner, unless a newer epoch comes meanwhile."""
        plans: dict[int, Epoch | str] = {}
        for member in epoch.members.present:
            if self._newest is not epoch or self._closed:
                return
            try:
                self._warm(epoch, member.owner)
                plans[member.seat] = epoch.without({member.seat})
            except ValueError as error:
                plans[member.seat] = str(error)
        with self._news:
            self._planned, self._plans = epoch, plans

    def _warm(self, epoch: Epoch, owner: int | None) -> None:
        """Makes each layer of a plan by itself, and lets the head's other threads run between."""
        if owner is None or epoch.mesh.sliced:
            return
        placement, breather = epoch.placement, Breather()
        for row in placement.slots:
            heirs(row.tobytes(), placement.room, placement.experts, owner)
            breather.breathe()


SOURCES = ("replicas", "shadows", "disk", "waits")
"""Where the experts of a layer come from when an owner is lost, as fields of `Cover`."""
