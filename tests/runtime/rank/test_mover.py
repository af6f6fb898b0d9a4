"""The mover against real peers on loopback: proved copies, corruption fetched again, ways to fall back on."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from made_experts import activation_named, make_weights

from moeserve.experts.bank import Bank
from moeserve.experts.batch import ExpertShape
from moeserve.experts.checksum import Slot
from moeserve.experts.kernel import KernelSpec
from moeserve.experts.kernels import KERNELS
from moeserve.experts.placement import EMPTY
from moeserve.quant.format import Scheme
from moeserve.quant.formats.fp8 import FP8_BLOCK, FP8_GROUP
from moeserve.runtime.control.frames import LENGTH
from moeserve.runtime.control.orders import ExpertCopy, StageOrder, Vote
from moeserve.runtime.control.stream import StreamClosed, StreamSilent, connect
from moeserve.runtime.keys.keys import Keys
from moeserve.runtime.rank.weights.copies import Copier
from moeserve.runtime.rank.weights.mover import CopyInto, CopySources, Fetch, Mover
from moeserve.runtime.rank.weights.peers import Peers, WeightsServer
from moeserve.runtime.sections import KeysConfig

SCHEME = Scheme(FP8_BLOCK, FP8_GROUP)
SHAPE = ExpertShape(256, 128, activation_named("silu"), bias=False)
LAYER, TOKEN, SLOTS = 3, "secret", 3
KERNEL = KERNELS["torch_grouped_mm"].build(KernelSpec(SCHEME, SHAPE, torch.bfloat16))


def bank_of(seed: int) -> Bank:
    bank = Bank()
    weights = make_weights(SHAPE, SLOTS, SCHEME.weights, torch.Generator().manual_seed(seed))
    bank.load(LAYER, KERNEL, weights, list(range(SLOTS)))
    return bank


class Flipper:
    """A wire that flips one bit of an answer, `from_end` bytes before its end, `times` times.

    An answer is a frame, and the tensors of one expert behind it.
    """

    def __init__(self, target: str, expert: Slot, from_end: int, times: int) -> None:
        self._target, self._from_end, self.left = target, from_end, times
        self._nbytes = sum(tensor.nbytes for tensor in expert.values())
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            host, port = self._target.rsplit(":", 1)
            there = socket.create_connection((host, int(port)))
            threading.Thread(target=self._carry, args=(here, there), daemon=True).start()
            threading.Thread(target=self._carry_back, args=(there, here), daemon=True).start()

    def _carry(self, here: socket.socket, there: socket.socket) -> None:
        while data := here.recv(1 << 16):
            there.sendall(data)

    def _carry_back(self, there: socket.socket, here: socket.socket) -> None:
        answer = b""
        while data := there.recv(1 << 20):
            answer += data
            if len(answer) >= LENGTH.size + self._nbytes and len(answer) == self._whole(answer):
                here.sendall(self._flipped(answer))
                answer = b""
        here.close()

    def _whole(self, answer: bytes) -> int:
        (frame,) = LENGTH.unpack_from(answer)
        return LENGTH.size + int(frame) + self._nbytes

    def _flipped(self, answer: bytes) -> bytes:
        if not self.left:
            return answer
        self.left -= 1
        changed = bytearray(answer)
        changed[-self._from_end] ^= 4
        return bytes(changed)

    def close(self) -> None:
        self._listener.close()


@dataclass
class Mine:
    """Rank 0 with its mover; rank 1 is the peer."""

    bank: Bank
    peer: Bank
    server: WeightsServer
    votes: queue.Queue[Vote] = field(default_factory=queue.Queue)
    wrong: list[str] = field(default_factory=list)
    read: list[tuple[int, int, int]] = field(default_factory=list)
    rate: float = 0.0
    gone: bool = False  # the peer's server is closed
    within: float = 20.0

    def __post_init__(self) -> None:
        self.peers = Peers(Keys(KeysConfig(), TOKEN), "cpu", self.within)
        sources = CopySources("here", "cpu", self.bank, 2, self.peers, self.use, self.from_disk)
        copier = Copier(self.rate, "cpu")
        self.mover = Mover(sources, copier, self.votes.put, lambda order, text: self.wrong.append(text))

    def lose_peer(self) -> None:
        self.server.close()
        self.gone = True

    def use(self, weights: Sequence[str]) -> None:
        assert weights == ("",)

    def from_disk(self, layer: int, expert: int, version: int) -> Slot:
        self.read.append((layer, expert, version))
        return self.peer.slot(layer, expert)

    def vote(self, copies: tuple[ExpertCopy, ...], address: str, epoch: int = 2) -> Vote:
        self.mover.stage(StageOrder(1, epoch, epoch, LAYER, 1, ("",), copies, {1: (address, "here")}, 0))
        return self.votes.get(timeout=20)


@pytest.fixture
def mine() -> Iterator[Mine]:
    peer = bank_of(2)
    server = WeightsServer("127.0.0.1", Keys(KeysConfig(), TOKEN), "cpu", peer)
    made = Mine(bank_of(1), peer, server)
    yield made
    made.mover.close()
    if not made.gone:
        server.close()


def test_experts_come_whole_from_a_peer_and_are_served_after_the_commit(mine: Mine) -> None:
    before = [mine.bank.checksum(LAYER, slot) for slot in range(SLOTS)]
    vote = mine.vote((ExpertCopy(0, 2, (1, 2)), ExpertCopy(2, 0, (1, 0))), mine.server.address)
    assert not vote.refused
    assert [(one.path, one.corrupted) for one in vote.staged] == [("stream", 0)] * 2
    assert [mine.bank.checksum(LAYER, slot) for slot in range(SLOTS)] == before, "nothing is served yet"
    mine.mover.commit(2)
    wanted = [mine.peer.checksum(LAYER, 2), before[1], mine.peer.checksum(LAYER, 0)]
    assert [mine.bank.checksum(LAYER, slot) for slot in range(SLOTS)] == wanted
    assert [one.checksum for one in vote.staged] == [wanted[0], wanted[2]]


def test_slots_are_told_of_before_they_are_written(mine: Mine) -> None:
    before, seen = [mine.bank.checksum(LAYER, slot) for slot in range(SLOTS)], []
    mine.mover.before_commit = lambda layer, slots: seen.append(
        (layer, list(slots), [mine.bank.checksum(LAYER, slot) for slot in range(SLOTS)])
    )
    mine.vote((ExpertCopy(0, 2, (1, 2)), ExpertCopy(2, 0, (1, 0))), mine.server.address)
    assert seen == []
    mine.mover.commit(2)
    assert seen == [(LAYER, [0, 2], before)]


def test_ranks_exchange_slots_of_their_own(mine: Mine) -> None:
    before = [mine.bank.checksum(LAYER, slot) for slot in range(SLOTS)]
    vote = mine.vote((ExpertCopy(0, 1, (0, 1)), ExpertCopy(1, 0, (0, 0))), mine.server.address)
    assert [one.path for one in vote.staged] == ["own", "own"]
    mine.mover.commit(2)
    assert [mine.bank.checksum(LAYER, slot) for slot in range(SLOTS)] == [before[1], before[0], before[2]]


@pytest.mark.parametrize("part", ["down", "gate_up_scale"])
def test_one_flipped_bit_of_a_scale_is_caught_reported_and_fetched_again(mine: Mine, part: str) -> None:
    """The last bytes on the wire are those of the tensor whose name comes last; `part` says how far back."""
    tensors = mine.peer.slot(LAYER, 1)
    assert any("scale" in name for name in tensors), sorted(tensors)
    names = sorted(tensors)
    scale = next(name for name in names if "scale" in name) if part != "down" else names[-1]
    after = sum(tensors[name].nbytes for name in names[names.index(scale) :])
    wire = Flipper(mine.server.address, tensors, after - 1, times=1)
    before = mine.bank.checksum(LAYER, 0)
    vote = mine.vote((ExpertCopy(0, 1, (1, 1)),), wire.address)
    assert (vote.refused, wire.left) == ("", 0)
    (one,) = vote.staged
    assert (one.path, one.corrupted, one.checksum) == ("stream", 1, mine.peer.checksum(LAYER, 1))
    assert mine.bank.checksum(LAYER, 0) == before
    mine.mover.commit(2)
    assert mine.bank.checksum(LAYER, 0) == mine.peer.checksum(LAYER, 1)
    wire.close()


def test_a_wire_that_always_corrupts_is_left_for_the_disk(mine: Mine) -> None:
    wire = Flipper(mine.server.address, mine.peer.slot(LAYER, 1), 1, times=100)
    vote = mine.vote((ExpertCopy(0, 1, (1, 1)),), wire.address)
    (one,) = vote.staged
    assert (one.path, one.corrupted, mine.read) == ("disk", 3, [(LAYER, 1, 1)])
    wire.close()


def test_a_peer_that_is_gone_is_left_for_the_disk(mine: Mine) -> None:
    mine.lose_peer()
    vote = mine.vote((ExpertCopy(1, 2, (1, 2)),), mine.server.address)
    assert [one.path for one in vote.staged] == ["disk"]


class Mute:
    """A stopped peer: its kernel takes what comes, and nobody answers after `first` bytes of answers."""

    def __init__(self, target: str = "", first: int = 0) -> None:
        self._target, self._first = target, first
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._held: list[socket.socket] = []
        if target:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        here, _ = self._listener.accept()
        host, port = self._target.rsplit(":", 1)
        there = socket.create_connection((host, int(port)))
        self._held += [here, there]
        threading.Thread(target=self._carry, args=(here, there), daemon=True).start()
        while self._first:
            data = there.recv(self._first)
            self._first -= len(data)
            here.sendall(data)

    def _carry(self, here: socket.socket, there: socket.socket) -> None:
        while data := here.recv(1 << 16):
            there.sendall(data)

    def close(self) -> None:
        for one in (self._listener, *self._held):
            one.close()


@pytest.mark.parametrize("first", [0, 5000])
def test_a_peer_that_is_stopped_is_left_for_the_disk_and_blocks_nobody(first: int) -> None:
    peer = bank_of(2)
    server = WeightsServer("127.0.0.1", Keys(KeysConfig(), TOKEN), "cpu", peer)
    mine = Mine(bank_of(1), peer, server, within=2.0)
    stopped = Mute(server.address if first else "", first)
    vote = mine.vote((ExpertCopy(1, 2, (1, 2)),), stopped.address)
    assert [(one.path, one.checksum) for one in vote.staged] == [("disk", peer.checksum(LAYER, 2))]
    vote = mine.vote((ExpertCopy(0, 1, (1, 1)),), server.address, epoch=3)
    assert [one.path for one in vote.staged] == ["stream"], "and the mover goes on"
    mine.mover.close()
    server.close()
    stopped.close()


def test_a_peer_that_gives_nothing_over_one_path_is_not_asked_over_the_next(mine: Mine) -> None:
    tried: list[str] = []

    class Silent(CopySources):
        def paths(self, order: StageOrder, owner: int, copier: Copier) -> Iterator[tuple[str, Fetch]]:
            def silent(wanted: list[CopyInto]) -> list[str]:
                tried.append("peer")
                raise StreamSilent("nothing came")

            yield "cuda_ipc", silent
            yield "stream", silent
            yield "disk", lambda wanted: self._disk(order, wanted, copier)

    sources = Silent("here", "cpu", mine.bank, 2, mine.peers, mine.use, mine.from_disk)
    votes: queue.Queue[Vote] = queue.Queue()
    mover = Mover(sources, Copier(0, "cpu"), votes.put, lambda order, text: None)
    copies = (ExpertCopy(1, 2, (1, 2)),)
    mover.stage(StageOrder(1, 2, 2, LAYER, 1, ("",), copies, {1: ("nowhere", "here")}, 0))
    assert [one.path for one in votes.get(timeout=20).staged] == ["disk"]
    assert tried == ["peer"]
    mover.close()


def test_a_copier_that_takes_nothing_holds_no_thread_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peer = bank_of(2)
    server = WeightsServer("127.0.0.1", Keys(KeysConfig(), TOKEN), "cpu", peer, unread=0.3)
    deaf = connect(server.address, 5.0)
    deaf.send({"kind": "weights", "token": TOKEN})
    until = time.monotonic() + 20.0
    while "takes nothing of what is sent to it for 0.3 s" not in caplog.text:
        assert time.monotonic() < until
        with contextlib.suppress(StreamClosed):
            deaf.send({"kind": "slots", "layer": LAYER, "slots": [0, 1, 2] * 100, "how": "stream"})
        time.sleep(0.02)
    deaf.close()
    server.close()


def test_what_nobody_can_give_is_refused_with_every_reason(
    mine: Mine, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine.lose_peer()

    def gone(layer: int, expert: int, version: int) -> Slot:
        raise OSError("the disk is gone")

    monkeypatch.setattr(mine, "from_disk", gone)
    sources = CopySources(
        "here", "cpu", mine.bank, 2, Peers(Keys(KeysConfig(), TOKEN), "cpu"), mine.use, gone
    )
    votes: queue.Queue[Vote] = queue.Queue()
    mover = Mover(sources, Copier(0, "cpu"), votes.put, lambda order, text: None)
    mover.stage(
        StageOrder(
            1, 2, 2, LAYER, 1, ("",), (ExpertCopy(1, 2, (1, 2)),), {1: (mine.server.address, "here")}, 0
        )
    )
    refused = votes.get(timeout=20).refused
    assert "stream: cannot reach" in refused
    assert "disk: the disk is gone" in refused
    with pytest.raises(RuntimeError, match="change 2 is committed, and nothing is staged"):
        mover.commit(2)
    mover.close()


def test_a_peer_without_the_token_gets_nothing(mine: Mine) -> None:
    stranger = Peers(Keys(KeysConfig(), "guess"), "cpu")
    room = {name: torch.empty_like(tensor) for name, tensor in mine.bank.slot(LAYER, 0).items()}
    with pytest.raises(ConnectionError):
        stranger.fetch(mine.server.address, LAYER, [0], [room], Copier(0, "cpu"))


def test_abandoning_ends_a_slow_copy_and_frees_its_room() -> None:
    peer = bank_of(2)
    server = WeightsServer("127.0.0.1", Keys(KeysConfig(), TOKEN), "cpu", peer)
    slow = Mine(bank_of(1), peer, server, rate=2000.0)  # a minute for one expert
    slow.mover.stage(
        StageOrder(1, 2, 2, LAYER, 1, ("",), (ExpertCopy(0, 1, (1, 1)),), {1: (server.address, "here")}, 0)
    )
    time.sleep(0.3)
    slow.mover.abandon()
    assert slow.bank.staged == ()
    slow.mover.stage(StageOrder(1, 3, 3, LAYER, 1, ("",), (), {}, 0))
    assert slow.votes.get(timeout=5).order.epoch == 3, "the abandoned one never voted"
    slow.mover.close()
    server.close()


def test_a_slot_that_lost_a_byte_in_the_commit_is_reported(
    mine: Mine, monkeypatch: pytest.MonkeyPatch
) -> None:
    vote = mine.vote((ExpertCopy(0, 2, (1, 2)),), mine.server.address)
    assert not vote.refused
    commit = mine.bank.commit

    def careless() -> int:
        committed = commit()
        next(iter(mine.bank.slot(LAYER, 0).values())).view(-1).view(torch.uint8)[5] ^= 1
        return committed

    monkeypatch.setattr(mine.bank, "commit", careless)
    mine.mover.commit(2)
    for _ in range(100):
        if mine.wrong:
            break
        time.sleep(0.05)
    (text,) = mine.wrong
    assert "slot 0 of layer 3, expert 2: checksum" in text


def test_from_disk_where_nobody_holds_it(mine: Mine) -> None:
    vote = mine.vote((ExpertCopy(0, 1, (EMPTY, EMPTY)),), mine.server.address)
    assert [one.path for one in vote.staged] == ["disk"]
    assert mine.read == [(LAYER, 1, 1)]


def test_a_slot_that_cannot_be_read_after_the_commit_is_reported_and_the_mover_lives(
    mine: Mine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not mine.vote((ExpertCopy(0, 2, (1, 2)),), mine.server.address).refused

    def broken(layer: int, slots: Sequence[int]) -> list[str]:
        raise RuntimeError("an illegal access")

    with monkeypatch.context() as patched:
        patched.setattr(mine.bank, "checksums", broken)
        mine.mover.commit(2)
        for _ in range(100):
            if mine.wrong:
                break
            time.sleep(0.05)
    assert mine.wrong == ["layer 3 cannot be read after its commit: an illegal access"]
    assert not mine.vote((ExpertCopy(0, 1, (1, 1)),), mine.server.address, epoch=3).refused
