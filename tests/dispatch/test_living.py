"""Which places must live while a step's answer is right, as the dispatcher over peer memory says it."""

from __future__ import annotations

from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.members import Member, Members
from moeserve.dispatch.peers.liveness import PeerLiveness

MEMBERS = Members((Member(0, lane=2), Member(3, lane=0, owner=1), Member(4, owner=0)), 4, 3)


def test_places_of_all_members_and_of_one() -> None:
    liveness = PeerLiveness(MEMBERS, "cpu")
    assert liveness.mask() == 0b0110101, "lanes 0 and 2, and owners 0 and 1 behind four lanes"
    assert liveness.mask(3) == 0b0100001 and liveness.mask(4) == 0b0010000
    found = sum(1 << place for place, live in enumerate(liveness.live[:-1].tolist()) if live)
    assert found == liveness.mask()
    liveness.interrupt()
    assert not any(liveness.live.tolist()), "none of them lives once the group has ended"


def test_only_dispatchers_of_our_own_say_who_lives() -> None:
    assert {entry.name for entry in DISPATCHERS.values() if entry.living} == {"nvlink_ll", "nvlink_ht"}
    assert not any(entry.host_sync for entry in DISPATCHERS.values() if entry.living)
