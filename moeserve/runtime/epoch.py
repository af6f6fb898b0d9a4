"""`Epoch`: the one way the world changes: first load, rebalance, one lost or joined; each is the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moeserve.dispatch.members import Member, Members
from moeserve.experts.balance.room import slots_a_rank
from moeserve.experts.cover.replicas import covered
from moeserve.experts.cover.takeover import NoRoom, heirs, row_without, taken_over
from moeserve.experts.load import Load
from moeserve.experts.placement import EMPTY, Move, Placement
from moeserve.runtime.mesh import Mesh


@dataclass(frozen=True)
class Epoch:
    """A numbered state of the group: its members, where every expert is, and which weights are served.

    `mesh` is the one the service started with. An owner's place keeps its slot numbers while members come and
    go: without a member it has no room. When experts are sliced, the placement has the one owner that all
    members are together.

    Weights are reloaded layer by layer, so each layer has a version of its own: `versions [L]`, or () while
    all are at 1. Version v was read from the checkpoint folder `weights[v - 1]`; the empty name is the
    configured one, which is the first; names of versions that no layer is at any more are empty too.
    `marks[v - 1]` is the mark of the experts that it began with; () and an empty one: it is not known.

    Raises ValueError for a placement of other owners than `members` has room for, or with experts' room where
    no member is.
    """

    number: int
    mesh: Mesh
    placement: Placement
    members: Members
    versions: tuple[int, ...] = ()
    weights: tuple[str, ...] = ("",)
    marks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        owners = 1 if self.mesh.sliced else self.members.max_owners
        if self.placement.owners != owners:
            raise ValueError(
                f"a placement on {self.placement.owners} owners is not of a group with room for {owners}"
            )
        held = [owner for owner, room in enumerate(self.placement.room) if room]
        if not self.mesh.sliced and (
            away := [owner for owner in held if self.members.seat_of_owner[owner] is None]
        ):
            raise ValueError(f"owners {away} have room for experts, and no member is there to hold them")

    @classmethod
    def first(
        cls, mesh: Mesh, layers: int, experts: int, redundant: int = 0, members: Members | None = None
    ) -> Epoch:
        """Epoch 1, the load: experts spread evenly, and the slots of `redundant` replicas left empty.

        `members` are by default the mesh's ranks; places of owners that they only reserve have no room.
        Raises ValueError where redundant experts do not divide over the owners, or experts are sliced.
        """
        if redundant and mesh.sliced:
            raise ValueError(
                f"{redundant} redundant experts: ranks hold slices of every expert, which have no replicas"
            )
        found = mesh.members() if members is None else members
        present = (True,) if mesh.sliced else tuple(seat is not None for seat in found.seat_of_owner)
        stride = slots_a_rank(experts, sum(present), redundant)
        room = tuple(stride if there else 0 for there in present)
        return cls(1, mesh, Placement.blocks(layers, experts, stride, room), found)

    def covered(self) -> Epoch:
        """This epoch, before it is loaded, with second replicas on other owners in the spare slots.

        Which is alike in every layer that holds its experts alike.
        """
        placement = self.placement
        if not placement.layers or self.mesh.sliced:
            return self
        alike, which = np.unique(placement.slots, axis=0, return_inverse=True)
        load = Load(np.ones((len(alike), placement.experts)))
        rows = covered(placement.with_slots(alike), load).slots[which.ravel()]
        return replace(self, placement=placement.with_slots(rows))

    def moved(self, layer: int, slots: NDArray[np.int32]) -> Epoch:
        """The epoch with `slots [S]` at `layer` (a position), and every other layer as it is."""
        rows = self.placement.slots.copy()
        rows[layer] = slots
        return self._next(placement=self.placement.with_slots(rows))

    def reloaded(self, layer: int, version: int) -> Epoch:
        """This placement with the weights of `version`, one of `weights`, at `layer` (a position)."""
        if not 1 <= version <= len(self.weights):
            raise ValueError(f"weights version {version} is not one of 1 to {len(self.weights)}")
        versions = [self.version(at) for at in range(self.placement.layers)]
        versions[layer] = version
        return self._next(versions=tuple(versions))

    def with_weights(self, name: str) -> Epoch:
        """This epoch with one more version of the weights known by its name; no layer is at it yet.

        Folders of versions that no layer is at are forgotten: every message of a change holds the names.
        """
        served = {self.version(layer) for layer in range(self.placement.layers)}
        kept = (old if at in served else "" for at, old in enumerate(self.names, start=1))
        return self.with_names((*kept, name))

    def with_names(self, names: Iterable[str]) -> Epoch:
        """This epoch with these names of the versions, and no others. Raises ValueError for none."""
        weights, marks = zip(*map(folder_and_mark, names), strict=True)
        return replace(self, weights=weights, marks=marks if any(marks) else ())

    @property
    def names(self) -> tuple[str, ...]:
        """Of the versions: the folder of each and its mark, as `marked` has them."""
        marks = self.marks or ("",) * len(self.weights)
        return tuple(marked(*one) for one in zip(self.weights, marks, strict=True))

    def version(self, layer: int) -> int:
        """The version of the weights at `layer` (a position)."""
        return self.versions[layer] if self.versions else 1

    @property
    def weights_version(self) -> int:
        """The oldest version of the weights that any layer is at."""
        return min(self.versions, default=1)

    def without(self, seats: Collection[int], shadowed: Epoch | None = None) -> Epoch:
        """This epoch when the members of `seats` are lost; nobody else's place moves.

        Their owners' places lose their room, and experts that lost their last replica move into spare slots
        of the survivors, as `taken_over` says; of several lost owners, to survivors that have a shadow of
        them where they can. `shadowed` is the epoch whose shadows they hold, by default this one. Raises
        ValueError for a vacant seat, when no owner survives, when experts are sliced (a lost slice can only
        return), or when the survivors have too few spare slots (empty ones, and second replicas).
        """
        lost = {owner for seat in seats if (owner := self._member(seat).owner) is not None}
        if lost and self.mesh.sliced:
            raise ValueError(
                f"seats {sorted(seats)} hold slices of every expert; the group cannot serve without them"
            )
        members, placement = self.members.without(seats), self.placement
        if not any(member.owner is not None for member in members.present):
            raise ValueError("no member that holds experts survives")
        if lost:
            placement = _without(placement, lost, (shadowed or self).placement)
        return self._next(members=members, placement=placement)

    def joined(
        self, member: Member, room: int | None = None, slots: NDArray[np.int32] | None = None
    ) -> Epoch:
        """`member` takes a reserved seat; one that only brings rows changes no placement.

        An owner's place gets `slots [L, room]`, such as it had before it was lost. Without them it gets
        `room` slots, by default all its numbers, filled with replicas of the experts that have fewest; slots
        are left empty where it holds every expert. Raises ValueError for a seat, lane or owner's place that
        is taken or beyond what is reserved, for slots of another size, and for an owner when experts are
        sliced.
        """
        members, placement = self.members.plus(member), self.placement
        if member.owner is None:
            return self._next(members=members)
        if self.mesh.sliced:
            raise ValueError("a group whose ranks hold slices of every expert cannot grow")
        stride = placement.slots_per_owner
        width = stride if room is None else room
        if slots is not None:
            width = slots.shape[-1]
            if slots.shape != (placement.layers, width) or room not in (None, width):
                sizes = [placement.layers, "room" if room is None else room]
                raise ValueError(f"slots {list(slots.shape)} of a member that joins must be {sizes}")
        if not 0 <= width <= stride:
            raise ValueError(f"room={width} of a new owner must be 0 to {stride}, what an owner's place has")
        first, rows = member.owner * stride, placement.slots.copy()
        rows[:, first : first + width] = _rarest(placement, width) if slots is None else slots
        rooms = (*placement.room[: member.owner], width, *placement.room[member.owner + 1 :])
        return self._next(members=members, placement=replace(placement, slots=rows, room=rooms))

    def yielding(self, unread: Mapping[int, Collection[int]]) -> Epoch:
        """This epoch when members give up, in layers that they cannot read all of, what others hold.

        `unread`: by position of a layer, the seats of members that lack some of its experts. Their slots are
        left empty where a member that lacks nothing there has the expert. Seats that are vacant count for
        nothing.
        """
        rows, stride = self.placement.slots.copy(), self.placement.slots_per_owner
        for at, seats in unread.items():
            members = [self.members.at(seat) for seat in seats if seat in self.members.seats]
            owners = [member.owner for member in members if member.owner is not None]
            theirs = np.isin(np.arange(rows.shape[1]) // stride, owners)
            rows[at, theirs & np.isin(rows[at], rows[at, ~theirs])] = EMPTY
        if self.mesh.sliced or (rows == self.placement.slots).all():
            return self
        return self._next(placement=self.placement.with_slots(rows))

    def slots_of(self, member: Member) -> int:
        """How many slots of each layer `member` has; 0 without an owner's place."""
        if member.owner is None:
            return 0
        return self.placement.room[0 if self.mesh.sliced else member.owner]

    def _member(self, seat: int) -> Member:
        if seat not in self.members.seats:
            raise ValueError(f"seat {seat} is vacant; the members have seats {list(self.members.seats)}")
        return self.members.at(seat)

    def _next(self, **changes: object) -> Epoch:
        return replace(self, number=self.number + 1, **changes)  # type: ignore[arg-type]


def marked(folder: str, mark: str) -> str:
    """The name of a version of the weights: its folder, and the mark of the experts that it began with."""
    return f"{folder}\0{mark}" if mark else folder  # no path has that character


def folder_and_mark(name: str) -> tuple[str, str]:
    """What the name of a version says; an empty mark where it says none. Raises TypeError for no text."""
    folder, _, mark = str.partition(name, "\0")
    return folder, mark


def _rarest(placement: Placement, width: int) -> NDArray[np.int32]:
    """Replicas of the experts of each layer that have fewest, `[L, width]`; EMPTY beyond one of each."""
    found = np.full((placement.layers, width), EMPTY, dtype=np.int32)
    for into, row in zip(found, placement.slots, strict=True):
        copies = np.bincount(row[row != EMPTY], minlength=placement.experts)
        rarest = np.argsort(copies, kind="stable")[:width]
        into[: len(rarest)] = rarest
    return found


def shadows_of(
    epoch: Epoch, owner: int, between: Callable[[], None] = lambda: None
) -> dict[int, tuple[int, ...]]:
    """The experts that `owner` takes over when any one other owner is lost, and does not hold, ascending; by
    position of their layer, without layers that have none.

    A function of the epoch alone: every member finds for itself what to keep in host memory. Empty when
    experts are sliced, and of a place without room. `between` is called after every tenth of a millisecond or
    so: where that is much, other threads are to have their turn.
    """
    placement = epoch.placement
    if epoch.mesh.sliced or not placement.room[owner]:
        return {}
    others = [other for other, room in enumerate(placement.room) if room and other != owner]
    found: dict[int, tuple[int, ...]] = {}
    for position, row in enumerate(placement.slots):
        mine = set[int]()
        for other in others:
            plan = heirs(row.tobytes(), placement.room, placement.experts, other) or {}
            mine.update(expert for expert, heir in plan.items() if heir == owner)
            between()
        if mine:
            found[position] = tuple(sorted(mine))
    return found


def _without(placement: Placement, lost: set[int], shadowed: Placement) -> Placement:
    """`placement` when owners are lost, whose experts go where shadows of them were made for `shadowed`: by
    the plan for each of them alone.
    """
    room, rows = placement.room, []
    for layer, (row, before) in enumerate(zip(placement.slots, shadowed.slots, strict=True)):
        wish: dict[int, int] = {}
        if len(lost) == 1 and shadowed is placement:
            alike = row_without(row.tobytes(), room, placement.experts, *lost)
            if alike is not None:
                rows.append(alike)
                continue
        else:
            for owner in sorted(lost):
                alone = heirs(before.tobytes(), shadowed.room, placement.experts, owner) or {}
                wish |= {expert: heir for expert, heir in alone.items() if heir not in lost}
        try:
            rows.append(taken_over(row, room, placement.experts, lost, wish))
        except NoRoom as error:
            raise NoRoom(f"layer {layer}: {error}") from error
    left = tuple(0 if owner in lost else each for owner, each in enumerate(room))
    return replace(placement, slots=np.stack(rows) if rows else placement.slots, room=left)


@dataclass(frozen=True)
class Change:
    """One epoch to the next: one layer's slots, or its weights; and what has to be copied for it."""

    epoch: Epoch  # the one to become
    layer: int  # position among the served layers
    moves: tuple[Move, ...]  # `source` EMPTY: from disk, in the version of the epoch
