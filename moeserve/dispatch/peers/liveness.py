"""`PeerLiveness`: which members are waited for, and who was late.

A member waits for others for a bounded time. One that does not come is given up: from then on it is neither
waited for nor stored to. The host reads which members were given up in host flags, without a word to the
device. The member that was given up finds that in its own memory, and gives up in turn those who have gone
on. So of two members that gave each other up, neither reads what the other writes. A new dispatcher joins
them again, or a new holder of the seat does.

The host can end the waiting for one member, or for all, while kernels wait. It names nobody late for that.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

import torch

from moeserve.dispatch.members import Member, Members

MOST_LANES = 32
"""Lanes of a group, reserved ones too: each thread of a warp has one."""

MOST_OWNERS = 8
"""Owners of a group, reserved places too: combine keeps the partial sums of all of them in registers."""

MOST_SEATS = MOST_LANES + MOST_OWNERS

GIVEN_UP_BYTES = 256
"""The first bytes of every member's memory: int32 word s is set once the member of seat s has given it up."""

HEADER_BYTES = 512
"""The words of `GIVEN_UP_BYTES`, and uint32 `begun [64]` by owner."""

OVER = -(2**63)
"""In the host's word: all waiting is over. Lower bits end waiting for one lane each, and then for owners."""


class PeerLiveness:
    """What one member knows of the others, by place: lane l has place l, owner o has place `max_lanes + o`.

    `live [places + 1]` int32 on the device is 0 for a place that is neither waited for nor stored to; its
    last word is the kernels' own. `host_flags [places + 1]` int32 holds the sequence number in which each
    place was given up, 0 for none; kernels write it. Its last word is the sequence number of a step whose own
    blocks did not run together. `host_word [1]` int64 says for whom waiting has ended; kernels that wait read
    it now and then. Tensors of the host are pinned. `partners [2, places]` int32 on the device has the other
    place of a place's member, or the same one, and the member's seat.
    """

    def __init__(self, members: Members, device: str) -> None:
        self.members = members
        self.places = members.max_lanes + members.max_owners
        self.live = torch.zeros(self.places + 1, dtype=torch.int32, device=device)
        pinned = self.live.is_cuda
        self.host_flags = torch.zeros(self.places + 1, dtype=torch.int32, pin_memory=pinned)
        self._flags = self.host_flags.numpy()  # of the same memory; a tensor is slow to read
        self.host_word = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self.partners = torch.zeros((2, self.places), dtype=torch.int32, device=device)
        self._named: set[int] = set()
        self._lock = threading.Lock()  # over `host_word`, which any thread changes
        for member in members.present:
            self._take(member)

    def places_of(self, member: Member) -> tuple[int, ...]:
        """The places of a member: of its lane, and of what it owns."""
        lane = () if member.lane is None else (member.lane,)
        return lane if member.owner is None else (*lane, self.members.max_lanes + member.owner)

    def mask(self, seat: int | None = None) -> int:
        """The places of all members, or of the one of `seat`: one bit each."""
        found = self.members.present if seat is None else (self.members.at(seat),)
        return sum(1 << place for member in found for place in self.places_of(member))

    def admit(self, member: Member) -> None:
        """Waits for `member`, which takes a vacant seat, from the next phase on. Waits for nothing itself."""
        self.members = self.members.plus(member)
        self._named.discard(member.seat)
        for place in self.places_of(member):
            self.host_flags[place] = 0
            with self._lock:
                self.host_word &= ~(1 << place)
        self._take(member)

    def exclude(self, seats: Collection[int]) -> None:
        """Ends waiting for the members of `seats`, also in phases under way: their rows count as none.

        They are not named late for it, also if they were found late meanwhile. Waits for nothing itself.
        Raises ValueError for a vacant seat, before anybody is excluded.
        """
        excluded = [self.members.at(seat) for seat in seats]
        self._named |= set(seats)
        for member in excluded:
            for place in self.places_of(member):
                with self._lock:
                    self.host_word |= 1 << place
                self.live[place].zero_()

    def dismiss(self, seat: int) -> None:
        """Excludes the member of `seat`, and leaves the seat vacant."""
        self.exclude((seat,))
        self.members = self.members.without((seat,))

    def interrupt(self) -> None:
        """Ends all waiting, also of phases under way, and names nobody late for it.

        Any thread may call it. It sets a word of the host and copies nothing to the device, since a copy was
        seen to wait for the very kernel that it should have ended.
        """
        with self._lock:
            self.host_word |= OVER
        if not self.live.is_cuda:
            self.live.zero_()

    def late(self) -> tuple[int, ...]:
        """The seats given up since the last call, as far as the device has come. Waits for nothing."""
        if not self._flags[:-1].any():
            return ()
        flags = self._flags.tolist()
        given_up = {
            member.seat
            for member in self.members.present
            if any(flags[place] for place in self.places_of(member))
        }
        fresh = tuple(sorted(given_up - self._named))
        self._named |= given_up
        return fresh

    @property
    def stuck(self) -> int:
        """The sequence number of a step whose own blocks did not run together; 0 for none."""
        return int(self._flags[-1]) % 2**32

    def _take(self, member: Member) -> None:
        places = self.places_of(member)
        for place in places:
            self.partners[0, place] = places[-1] if place == places[0] else places[0]
            self.partners[1, place] = member.seat
            self.live[place] = 1
