"""`Members`: who is in a group. A member may bring rows by a lane, hold experts as an owner, or do both.

Seats, lanes and owners are numbers that stay: a group has room for so many of each, and a number keeps its
meaning while others come and go. The position of a member among those present is its rank in a process
group, and changes with them. The field's EP rank is a member that is both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True, order=True)
class Member:
    """A process of a group: its seat, the lane it brings rows by, and the owner's place that it fills."""

    seat: int
    lane: int | None = None
    owner: int | None = None

    def __post_init__(self) -> None:
        if self.lane is None and self.owner is None:
            raise ValueError(f"the member of seat {self.seat} has neither a lane nor an owner's place")


@dataclass(frozen=True)
class Members:
    """The members of a group, by seat, and for how many lanes and owners it has room.

    Raises ValueError for a seat, lane or owner that two members have, and for one beyond the room.
    """

    present: tuple[Member, ...]
    max_lanes: int
    max_owners: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "present", tuple(sorted(self.present)))
        found = {
            "seat": [member.seat for member in self.present],
            "lane": [member.lane for member in self.present if member.lane is not None],
            "owner": [member.owner for member in self.present if member.owner is not None],
        }
        limits = {
            "seat": self.max_lanes + self.max_owners,
            "lane": self.max_lanes,
            "owner": self.max_owners,
        }
        for kind, numbers in found.items():
            if len(set(numbers)) < len(numbers):
                raise ValueError(f"two members have the same {kind}: {sorted(numbers)}")
            if any(not 0 <= number < limits[kind] for number in numbers):
                raise ValueError(f"{kind}s {sorted(numbers)} must lie between 0 and {limits[kind] - 1}")

    @classmethod
    def of_ranks(cls, ranks: int, max_lanes: int = 0, max_owners: int = 0) -> Members:
        """`ranks` members that are both: rank r has seat, lane and owner's place r. Room may be for more."""
        present = tuple(Member(rank, rank, rank) for rank in range(ranks))
        return cls(present, max(ranks, max_lanes), max(ranks, max_owners))

    @classmethod
    def split(cls, lanes: int, owners: int) -> Members:
        """`lanes` members that only bring rows, in the first seats, and `owners` that only hold experts."""
        bringing = tuple(Member(at, lane=at) for at in range(lanes))
        holding = tuple(Member(lanes + at, owner=at) for at in range(owners))
        return cls(bringing + holding, lanes, owners)

    def __len__(self) -> int:
        return len(self.present)

    @cached_property
    def seats(self) -> tuple[int, ...]:
        """The seats that are taken, ascending; a seat's place here is its position."""
        return tuple(member.seat for member in self.present)

    def position(self, seat: int) -> int:
        """The rank of `seat` in a process group of those present. Raises ValueError for a vacant seat."""
        if seat not in self.seats:
            raise ValueError(f"seat {seat} is vacant; members have the seats {list(self.seats)}")
        return self.seats.index(seat)

    def at(self, seat: int) -> Member:
        """The member of `seat`. Raises ValueError for a vacant seat."""
        return self.present[self.position(seat)]

    @cached_property
    def seat_of_lane(self) -> tuple[int | None, ...]:
        """`[max_lanes]`: the seat whose member brings each lane's rows; None for a reserved lane."""
        found = {member.lane: member.seat for member in self.present}
        return tuple(found.get(lane) for lane in range(self.max_lanes))

    @cached_property
    def seat_of_owner(self) -> tuple[int | None, ...]:
        """`[max_owners]`: the seat whose member holds each owner's experts; None for a reserved place."""
        found = {member.owner: member.seat for member in self.present}
        return tuple(found.get(owner) for owner in range(self.max_owners))

    @cached_property
    def equal(self) -> bool:
        """Whether every member is both, with its position as lane and owner's place, and no room is reserved.

        Libraries of the field serve only such groups: their rank is lane, owner and position at once.
        """
        count = len(self.present)
        alike = all((m.seat, m.lane, m.owner) == (at, at, at) for at, m in enumerate(self.present))
        return alike and (self.max_lanes, self.max_owners) == (count, count)

    def in_step(self, lane_rows: tuple[int, ...]) -> tuple[int, ...]:
        """Seats that take part in a step, ascending: every owner, and the lanes that bring rows.

        Nobody takes part in a step that no lane brings rows to.
        """
        return tuple(
            member.seat
            for member in self.present
            if (member.owner is not None and any(lane_rows))
            or (member.lane is not None and lane_rows[member.lane] > 0)
        )

    def without(self, seats: Collection[int]) -> Members:
        """The members that are left when those of `seats` are gone; the room stays."""
        return replace(self, present=tuple(m for m in self.present if m.seat not in seats))

    def plus(self, member: Member) -> Members:
        """These members and one more. Raises ValueError where its seat, lane or owner's place is taken."""
        return replace(self, present=(*self.present, member))
