"""Frames that the table lacks end their stream, and strangers at the socket of weights are bounded."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_members import SECONDS, TOKEN, FakeMember, head_of, until

from moeserve.runtime.control.stream import Stream, StreamClosed
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.keys.keys import Keys
from moeserve.runtime.rank.weights import peers
from moeserve.runtime.rank.weights.peers import Peers, WeightsServer
from moeserve.runtime.sections import KeysConfig


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with head_of() as made:
        yield made


@pytest.mark.parametrize("kind", ["step", "commit", "hello again", "weights"])
def test_a_rank_sends_nothing_that_the_table_lacks(
    coordinator: Coordinator, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    member = FakeMember(coordinator, 0)
    until(lambda: 0 in coordinator.seats())
    member.say(kind)
    until(lambda: 0 not in coordinator.seats())
    assert f"a frame of kind '{kind}' is not in the table of what a rank sends the head" in caplog.text


class NoBank:
    """Holds no expert."""

    def slot(self, layer: int, slot: int) -> dict[str, torch.Tensor]:
        raise KeyError(f"no layer {layer}")


@pytest.mark.parametrize(
    "asked", [{"kind": "step"}, {"kind": "slots", "how": "cuda_ipc", "layer": 0, "slots": [0]}]
)
def test_a_peer_asks_for_nothing_else(asked: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    server = WeightsServer("127.0.0.1", Keys(KeysConfig(), TOKEN), "cpu", NoBank())  # type: ignore[arg-type]
    host, port = server.address.rsplit(":", 1)
    try:
        stream = Stream(socket.create_connection((host, int(port)), SECONDS))
        stream.bound_receives(SECONDS)
        stream.send({"kind": "weights", "token": TOKEN})
        stream.send(asked)
        with pytest.raises(StreamClosed):
            stream.receive()
        until(lambda: "refused weights to" in caplog.text)
    finally:
        server.close()


def test_handles_are_asked_for_over_the_unix_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's handles, which stand-ins answer for here: the same processes and sockets."""

    class Bank(NoBank):
        def slot(self, layer: int, slot: int) -> dict[str, torch.Tensor]:
            return {"w": torch.full((4,), float(slot))}

        def checksums(self, layer: int, slots: list[int]) -> list[str]:
            return [f"sum {slot}" for slot in slots]

    monkeypatch.setattr(peers, "shared", lambda tensor: {"values": tensor.tolist()})
    monkeypatch.setattr(peers, "opened", lambda one, index: torch.tensor(one["values"]).view(torch.uint8))
    copied: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    class Copier:
        def copy(self, pairs: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]) -> None:
            copied.extend(pairs)

    keys = Keys(KeysConfig(), TOKEN)
    monkeypatch.setattr(peers.Copier, "after_commit", lambda self, bank: None)
    server = WeightsServer("127.0.0.1", keys, "cpu", Bank())  # type: ignore[arg-type]
    links = Peers(keys, "cpu")
    try:
        rooms = [{"w": torch.zeros(4)}, {"w": torch.zeros(4)}]
        sums = links.map(server.address, 0, [1, 3], rooms, Copier())  # type: ignore[arg-type]
        assert sums == ["sum 1", "sum 3"]
        assert [source["w"].tolist() for source, _ in copied] == [[1.0] * 4, [3.0] * 4]
        assert [Path(address).name.startswith("weights-") for address in links._links] == [False, True]
        monkeypatch.setattr(peers, "peer_of", lambda connection: (4711, -1))
        stranger = Peers(keys, "cpu")
        with pytest.raises(StreamClosed, match="a process of user -1 listens there"):
            stranger.map(server.address, 0, [1], rooms[:1], Copier())  # type: ignore[arg-type]
        stranger.close()
    finally:
        links.close()
        server.close()
