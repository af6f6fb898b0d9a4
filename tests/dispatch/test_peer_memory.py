"""Peer memory: what a rank stores into another's is there, one that cannot stops all, nothing is left."""

import os
import socket
from collections.abc import Callable
from typing import Any, cast

import pytest
from parallel import parallel_launch
from peer_memory_ranks import named_files, one_has_no_room, too_much_on_one, write_to_all

from moeserve.dispatch.members import Member
from moeserve.dispatch.peers import memory
from moeserve.dispatch.peers.memory import MemoryRequest, PeerMemory, PeerOffer


def test_every_rank_can_store_into_every_other() -> None:
    assert parallel_launch(3, write_to_all, "cpu") == [[1, 2, 3]] * 3


def test_a_name_does_not_outlive_the_opening() -> None:
    assert parallel_launch(2, named_files) == [[], []]


def test_one_rank_without_memory_stops_all_with_its_reason() -> None:
    heard = parallel_launch(2, too_much_on_one)
    assert all("seat 1 cannot allocate 1125899906842624 bytes" in text for text in heard)
    assert all(text.endswith("[]") for text in heard)  # and no file stays


def test_what_one_rank_refuses_all_hear() -> None:
    heard = parallel_launch(2, one_has_no_room)
    assert all("seat 0 needs 8 bytes; 4 are free" in text and text.endswith("[]") for text in heard)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))])
def test_memory_that_was_parted_with_takes_what_a_peer_still_stores(device: str) -> None:
    first, second = PeerMemory(4096, device), PeerMemory(4096, device)
    if device == "cpu":  # a process does not open its own memory of a GPU
        theirs = first.map(PeerOffer(Member(1, 1, 1), socket.gethostname(), 4096, second.handle(), ()))
    else:
        theirs = second.mine
    second.part()
    assert second.views == {}
    theirs.fill_(7)
    assert set(second.mine.tolist()) == {7}
    for one in (first, second):
        one.close()
        one.close()


def test_a_joining_that_comes_to_no_end_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member is lost before all have told of their memory, and after all have mapped it."""
    request = MemoryRequest(Member(0, 0, 0), 4096, "cpu")
    answers = list[Callable[[Any], list[Any]]]()
    monkeypatch.setattr(memory, "_gathered", lambda mine, group: answers.pop(0)(mine))
    before = len(os.listdir("/proc/self/fd"))

    def lost(mine: Any) -> list[Any]:
        raise RuntimeError("Connection closed by peer")

    def alone(mine: Any) -> list[Any]:
        return [mine]

    for given, left in (([lost], 0), ([alone, lost], 1), ([alone, alone], 0)):
        answers[:] = given
        if lost not in given:
            memory.join_memory(request, cast(Any, None)).close()
        else:
            with pytest.raises(RuntimeError, match="Connection closed by peer"):
                memory.join_memory(request, cast(Any, None))
        found = memory.left_over()
        assert len(found) == left, "what others may have mapped"
        for one in found:
            one.close()
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.gpu(2)
def test_two_gpus_store_into_each_other() -> None:
    assert parallel_launch(2, write_to_all, "cuda", device="cuda") == [[1, 2], [1, 2]]
