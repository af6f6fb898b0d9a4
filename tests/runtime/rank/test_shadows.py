"""Shadows: members find for themselves what to keep in host memory, and take over from it."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from member_ranks import served_and_planned

from moeserve.dispatch.members import Members
from moeserve.runtime.control.shadowed import Shadowed
from moeserve.runtime.epoch import Epoch, shadows_of
from moeserve.runtime.keys.keys import Keys
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.rank.experts import RankExperts
from moeserve.runtime.rank.weights import shadows as shadows_of_a_rank
from moeserve.runtime.rank.weights.copies import Copier
from moeserve.runtime.rank.weights.peers import HeldExpert, PeerRefused, Peers, WeightsServer
from moeserve.runtime.rank.weights.shadows import Shadows
from moeserve.runtime.sections import KeysConfig

OWNERS, EXPERTS, LAYERS, SECONDS = 3, 8, 2, 20.0
MEMBERS = Members.of_ranks(OWNERS)
KEYS = Keys(KeysConfig(), "a token")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint of two layers and eight experts."""
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path)
    return path


def start_epoch(redundant: int = 10) -> Epoch:
    """Three owners with six slots each, half of them empty: any two have room for all experts."""
    return Epoch.first(Mesh(OWNERS, 1, OWNERS), LAYERS, EXPERTS, redundant, MEMBERS)


@dataclass
class Owner:
    """One member's experts, its server, and its shadows."""

    experts: RankExperts
    server: WeightsServer
    shadows: Shadows
    told: queue.Queue[Shadowed] = field(default_factory=queue.Queue)

    def filled(self, number: int) -> frozenset[int]:
        """The positions whose shadows are there, once those of epoch `number` are filled."""
        until = time.monotonic() + SECONDS
        while True:
            said = self.told.get(timeout=max(0.0, until - time.monotonic()))
            if said.epoch == number and self.told.empty():
                assert said.nbytes == self.shadows.nbytes
                return said.positions


Made = Callable[..., list[Owner]]


@pytest.fixture
def owners_of(path: Path) -> Iterator[Made]:
    made: list[Owner] = []

    def make(epoch: Epoch, limit: int = 0, rate: float = 0.0) -> list[Owner]:
        served, plans = served_and_planned(path, MEMBERS, "all2allv")
        for seat in range(OWNERS):
            experts = RankExperts(seat, served, plans, "cpu")
            server = WeightsServer("127.0.0.1", KEYS, "cpu", experts.bank)
            server.holds = experts.holds
            shadows = Shadows(seat, experts, Peers(KEYS, "cpu", SECONDS), Copier(rate, "cpu"), limit)
            experts.shadow, experts.on_held = shadows.find, shadows.renew
            owner = Owner(experts, server, shadows)
            shadows.tell = owner.told.put
            made.append(owner)
        for owner in made:
            owner.experts.load(epoch, iter)
        return made

    yield make
    for owner in made:
        owner.shadows.close()
        owner.server.close()


def meet(owners: list[Owner]) -> None:
    for owner in owners:
        owner.shadows.meet({at: one.server.address for at, one in enumerate(owners)})


def ready(owners: list[Owner]) -> None:
    """They have met, and all shadows of the first epoch are there."""
    meet(owners)
    for owner in owners:
        owner.filled(1)


def reloaded(owners: list[Owner], epoch: Epoch, path: Path) -> Epoch:
    """`epoch` with the second layer of the checkpoint at `path`, which they have read."""
    newer = epoch.with_weights(str(path)).reloaded(1, 2)
    for owner in owners:
        owner.experts.use_weights(newer.weights)
        owner.experts.load(newer, iter)
    return newer


def kept(owner: Owner, version: int = 1) -> dict[int, tuple[int, ...]]:
    """The experts with a shadow, by position."""
    found = {
        at: tuple(e for e in range(EXPERTS) if owner.shadows.find(layer, e, version) is not None)
        for at, layer in enumerate(owner.experts.layers)
    }
    return {at: experts for at, experts in found.items() if experts}


def right(owner: Owner, epoch: Epoch, seat: int, path: Path) -> bool:
    """Whether a member's slots hold what one that reads all of `epoch` from disk has."""
    served, plans = served_and_planned(path, MEMBERS, "all2allv")
    alone = RankExperts(seat, served, plans, "cpu")
    alone.use_weights(epoch.weights)
    alone.load(epoch, iter)
    place = epoch.members.at(seat).owner
    assert place is not None
    return all(
        owner.experts.bank.checksum(layer, slot) == alone.bank.checksum(layer, slot)
        for at, layer in enumerate(alone.layers)
        for slot, expert in enumerate(epoch.placement.of_owner(at, place).tolist())
        if expert >= 0
    )


def test_owners_keep_what_they_would_take_over_and_read_no_disk_for_it(path: Path, owners_of: Made) -> None:
    epoch = start_epoch()
    owners = owners_of(epoch)
    read = [owner.experts.bytes_read for owner in owners]
    meet(owners)
    for at, owner in enumerate(owners):
        wanted = shadows_of(epoch, at)
        assert owner.filled(1) == set(wanted)
        assert kept(owner) == wanted != {}
        assert (owner.experts.bytes_read, owner.shadows.bytes_from_disk) == (read[at], 0)
        each = sum(tensor.nbytes for tensor in owner.experts.bank.slot(0, 0).values())
        assert owner.shadows.nbytes == owner.shadows.bytes_from_peers == each * sum(map(len, wanted.values()))


def test_a_loss_is_taken_over_from_shadows_and_nothing_is_read(path: Path, owners_of: Made) -> None:
    epoch = start_epoch()
    owners = owners_of(epoch)
    ready(owners)
    after = epoch.without({2})
    for seat, owner in enumerate(owners[:2]):
        experts, read = owner.experts, owner.experts.bytes_read
        missing = experts.missing(after)
        assert missing
        assert [experts.source(after, at) for at in missing] == ["shadow"] * len(missing)
        experts.use(after)
        for position in missing:
            experts.restore(after, position, Copier(0.0, "cpu"))
        assert (experts.missing(after), experts.bytes_read) == ((), read)
        assert right(owner, after, seat, path)
        assert experts.bytes_from_shadows > 0
    meet(owners[:2])
    for seat, owner in enumerate(owners[:2]):  # of two owners each holds all by now, or has it in host memory
        owner.filled(after.number)
        assert kept(owner) == shadows_of(after, seat)


def test_layers_with_shadows_come_first_and_what_has_none_is_read(path: Path, owners_of: Made) -> None:
    epoch = start_epoch()
    each = 3 * 64 * 128 * 4  # gate, up and down of one expert
    after = epoch.without({2})
    fits = len(shadows_of(epoch, 0)[0])
    owners = owners_of(epoch, limit=fits * each)
    meet(owners)
    assert owners[0].filled(1) == {0}, "the second layer has no room"
    assert owners[0].shadows.nbytes <= fits * each
    experts = owners[0].experts
    assert experts.missing(after) == (0, 1)
    assert [experts.source(after, at) for at in (0, 1)] == ["shadow", "disk"]
    read = experts.bytes_read
    experts.use(after)
    for position in experts.missing(after):
        experts.restore(after, position)
    lost = len(shadows_of(epoch, 0)[1])
    assert 0 < experts.bytes_read - read <= lost * each
    assert right(owners[0], after, 0, path)


def test_a_reload_drops_the_shadows_of_old_weights_and_fills_new_ones(
    path: Path, tmp_path: Path, owners_of: Made
) -> None:
    make_checkpoint("qwen3_moe", tmp_path, seed=1)
    epoch = start_epoch()
    owners = owners_of(epoch)
    ready(owners)
    newer = reloaded(owners, epoch, tmp_path)
    for at, owner in enumerate(owners):
        assert owner.filled(newer.number) == set(shadows_of(newer, at))
        assert kept(owner, 1).keys() == {0}
        assert kept(owner, 2) == {1: shadows_of(newer, at)[1]}
    after = newer.without({1})
    owners[0].experts.use(after)
    for position in owners[0].experts.missing(after):
        owners[0].experts.restore(after, position)
    assert right(owners[0], after, 0, path)


def test_page_locked_memory_is_written_again_and_never_where_somebody_reads(
    path: Path, tmp_path: Path, owners_of: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver takes seconds to free it, and launches nothing meanwhile."""
    monkeypatch.setattr(shadows_of_a_rank, "page_locked", lambda slot: True)
    make_checkpoint("qwen3_moe", tmp_path, seed=1)
    epoch = start_epoch()
    owners = owners_of(epoch)
    ready(owners)
    shadows, layers = owners[0].shadows, owners[0].experts.layers
    before = kept(owners[0])
    held, places = bytes_of(shadows), {place(shadows, layers[at], e, 1) for at in before for e in before[at]}
    read = shadows.find(layers[1], before[1][0], 1)
    assert read is not None
    copies = {name: tensor.clone() for name, tensor in read.items()}
    newer = reloaded(owners, epoch, tmp_path)
    for owner in owners:
        owner.filled(newer.number)
    now = {place(shadows, layers[1], e, 2) for e in kept(owners[0], 2)[1]}
    assert len(now - places) == 1, "one is made beside that which somebody reads"
    assert all(read[name].equal(tensor) for name, tensor in copies.items())
    each = held // len(places)
    assert bytes_of(shadows) == held + each, "and the one that was read is kept for others"
    del read
    again = newer.reloaded(1, 1)
    owners[0].experts.load(again, iter)
    owners[0].filled(again.number)
    assert bytes_of(shadows) == held + each


def bytes_of(shadows: Shadows) -> int:
    """With those that are kept for others."""
    return shadows.nbytes + shadows.spare_bytes


def place(shadows: Shadows, layer: int, expert: int, version: int) -> int:
    """Where a shadow lies."""
    found = shadows.find(layer, expert, version)
    assert found is not None
    return min(tensor.data_ptr() for tensor in found.values())


def test_memory_that_is_kept_for_others_counts_and_makes_way_where_it_does_not_fit(
    path: Path, owners_of: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadows_of_a_rank, "page_locked", lambda slot: True)
    epoch = start_epoch()
    owners = owners_of(epoch)
    each = sum(tensor.nbytes for tensor in owners[0].experts.bank.slot(0, 0).values())
    shadows = owners[0].shadows
    shadows._limit = 3 * each
    small, large = {"gate_up": torch.zeros(7)}, {"gate_up": torch.zeros(each // 4)}
    shadows._spare = [shadows_of_a_rank._Room(large) for _ in range(3)]
    assert shadows.spare_bytes == 3 * each and not shadows.nbytes
    assert shadows._room(small) is not None
    assert shadows.spare_bytes == 2 * each, "no more than makes room for it"
    assert shadows._room(large) is not None
    assert shadows.spare_bytes == each


def test_memory_that_nothing_needs_for_long_is_freed_piece_by_piece(
    path: Path, owners_of: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadows_of_a_rank, "SPARE_SECONDS", 0.2)
    monkeypatch.setattr(shadows_of_a_rank, "FREE_SECONDS", 0.05)
    owners = owners_of(start_epoch())
    shadows = owners[0].shadows
    with shadows._lock:
        shadows._spare = [shadows_of_a_rank._Room({"gate_up": torch.zeros(8)}) for _ in range(4)]
    meet(owners)
    owners[0].filled(1)
    seen, until = set[int](), time.monotonic() + SECONDS
    while shadows.spare_bytes and time.monotonic() < until:
        seen.add(shadows.spare_bytes)
        time.sleep(0.002)
    assert seen == {32, 64, 96, 128} and not shadows.spare_bytes
    assert right(owners[0], start_epoch(), 0, path)


def test_an_owner_that_gives_nothing_is_left_for_the_disk(
    path: Path, owners_of: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("moeserve.runtime.rank.weights.shadows.NEWS_SECONDS", 0.01)
    epoch = start_epoch()
    owners = owners_of(epoch)
    owners[1].server.holds = lambda slot, which: False
    owners[2].server.close()
    with caplog.at_level(logging.INFO):
        meet(owners)
        assert owners[0].filled(1) == set(shadows_of(epoch, 0))
    assert owners[0].shadows.bytes_from_disk == owners[0].shadows.nbytes > 0
    assert "owner 1 gives no shadow of HeldExpert(layer=0" in caplog.text
    assert caplog.text.count("owner 2 gives no shadows: ") >= 1, "it is not asked for each"
    assert caplog.text.count("owner 2 gives no shadows: ") <= 2, "by two members, once each"
    after = epoch.without({1})
    owners[0].experts.use(after)
    for position in owners[0].experts.missing(after):
        owners[0].experts.restore(after, position)
    assert right(owners[0], after, 0, path)


def test_an_owner_that_refuses_for_a_moment_is_asked_again(
    path: Path, owners_of: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeserve.runtime.rank.weights.shadows.NEWS_SECONDS", 0.05)
    owners = owners_of(start_epoch())
    holds, refused = owners[1].server.holds, list[HeldExpert]()

    def at_last(slot: int, which: HeldExpert) -> bool:
        if which in refused:
            return holds(slot, which)
        refused.append(which)
        return False

    owners[1].server.holds = at_last
    meet(owners)
    assert owners[0].filled(1) == set(shadows_of(start_epoch(), 0))
    assert refused and owners[0].shadows.bytes_from_disk == 0


def test_a_slot_that_holds_another_expert_is_not_given(path: Path, owners_of: Made) -> None:
    owners = owners_of(start_epoch())
    bank, holder = owners[0].experts.bank, owners[1].experts
    expert = int(start_epoch().placement.of_owner(0, 1)[0])
    room = {name: tensor.clone() for name, tensor in bank.slot(0, 0).items()}
    peers = Peers(KEYS, "cpu", SECONDS)

    def asked(which: HeldExpert) -> str:
        return peers.fetch_held(owners[1].server.address, which, 0, room, Copier(0.0, "cpu"))

    try:
        assert asked(HeldExpert(0, expert, 1)) == holder.bank.checksum(0, 0)
        for wrong in (HeldExpert(0, expert + 1, 1), HeldExpert(0, expert, 2)):
            with pytest.raises(PeerRefused, match=r"slot 0 does not hold HeldExpert\(layer=0"):
                asked(wrong)
        holder.overwrite(0, [0])
        with pytest.raises(PeerRefused, match="slot 0 does not hold"):
            asked(HeldExpert(0, expert, 1))
    finally:
        peers.close()


def test_shadows_come_at_their_rate(path: Path, owners_of: Made) -> None:
    epoch = start_epoch()
    each = 3 * 64 * 128 * 4
    owners = owners_of(epoch, rate=20 * each)
    count = sum(map(len, shadows_of(epoch, 0).values()))
    started = time.monotonic()
    meet(owners)
    owners[0].filled(1)
    assert time.monotonic() - started >= 0.8 * count / 20


def test_an_owner_without_a_place_keeps_none(path: Path) -> None:
    members = Members.split(1, 2)
    served, plans = served_and_planned(path, members, "all2allv")
    epoch = Epoch.first(served.mesh, LAYERS, EXPERTS, 8, members)
    told: queue.Queue[Shadowed] = queue.Queue()
    experts = RankExperts(0, served, plans, "cpu")
    shadows = Shadows(0, experts, Peers(KEYS, "cpu", SECONDS), Copier(0.0, "cpu"))
    shadows.tell = told.put
    experts.on_held = shadows.renew
    try:
        experts.load(epoch, iter)
        shadows.meet({0: "nowhere:1", 1: "nowhere:2"})
        assert told.get(timeout=SECONDS) == Shadowed(1)
        assert (shadows.nbytes, experts.missing(epoch), experts.missing(epoch.without({1}))) == (0, (), ())
    finally:
        shadows.close()
