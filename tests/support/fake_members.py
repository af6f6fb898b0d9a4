"""Members' processes as the head sees them: streams that a test speaks on."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from moeserve.dispatch.members import Members
from moeserve.runtime.control.messages import epoch_from, here_message
from moeserve.runtime.control.reached import Phase, Reached
from moeserve.runtime.control.stream import Stream, StreamClosed, connect
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.ordering.sequencer import StepPace

TOKEN, SECONDS = "a token", 5.0


@contextlib.contextmanager
def head_of(epoch: Epoch | None = None, layers: tuple[int, ...] = (0,)) -> Iterator[Coordinator]:
    """A head that has begun with `epoch`, or with one of two ranks, a layer and four experts."""
    first = epoch or Epoch.first(Mesh(2, 1, 2), layers=1, experts=4)
    made = Coordinator(first, layers, StepPace(8, 16), "127.0.0.1", TOKEN)
    made.start()
    try:
        yield made
    finally:
        made.stop()


class FakeMember:
    """A member's process as the head sees it: its stream, and every entry that came."""

    def __init__(self, coordinator: Coordinator, seat: int, **more: Any) -> None:
        self.seat, self.generation = seat, 0
        self.runs = True  # and answers at once that it does
        self.reached = Reached(0, Phase.PREPARED)  # what it answers
        self.reset_levels = False  # whether it was told that no level is set
        self.open_layers: list[bool] = []  # whether steps run of all layers, as it was told
        self.entries: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.stream: Stream = connect(coordinator.address, SECONDS)
        hello = {"kind": "hello", "rank": seat, "token": TOKEN, "pid": 100 + seat, "host_id": "here"}
        self.stream.send(hello | {"address": f"door {seat}", "weights": f"weights {seat}"} | more)
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        try:
            while True:
                entry = self.stream.receive()
                if entry["kind"] == "open_layers":
                    self.open_layers.append(not entry["closed"])
                elif entry["kind"] == "log_levels" and not entry["levels"]:
                    self.reset_levels = True
                elif entry["kind"] != "ask":
                    self.entries.put(entry)
                elif self.runs:
                    self.stream.send(here_message(entry["generation"], self.reached))
        except StreamClosed:
            self.entries.put({"kind": "closed"})

    def entry(self, kind: str) -> dict[str, Any]:
        """The next entry, which has to be of `kind`."""
        found = self.entries.get(timeout=SECONDS)
        assert found["kind"] == kind, found
        self.generation = found.get("generation", self.generation)
        return found

    def until(self, kind: str) -> dict[str, Any]:
        """The next entry of `kind`; those before it are passed over."""
        while (found := self.entries.get(timeout=SECONDS))["kind"] != kind:
            pass
        self.generation = found.get("generation", self.generation)
        return found

    def say(self, kind: str, **more: Any) -> None:
        self.stream.send({"kind": kind, "generation": self.generation} | more)

    def answer(self) -> None:
        """Says that it runs, and how far it is."""
        self.stream.send(here_message(self.generation, self.reached))

    def announce(self, job: int, rows: int) -> None:
        self.say("announce", job=job, layer=0, rows=rows, left=None)


def until(true: Callable[[], bool]) -> None:
    """Returns once it is true, within SECONDS."""
    limit = time.monotonic() + SECONDS
    while not true():
        if time.monotonic() > limit:
            raise AssertionError(f"not true within {SECONDS:g} s")
        time.sleep(0.01)


def form_again(members: Iterable[FakeMember]) -> Epoch:
    """These prepare and join the next generation that comes to its end, whatever they hear; its epoch."""

    def formed(one: FakeMember) -> Epoch:
        while True:
            entry = one.entries.get(timeout=SECONDS)
            one.generation = entry.get("generation", one.generation)
            if entry["kind"] == "prepare":
                epoch = epoch_from(entry["epoch"])
                one.say("prepared", bytes_read=0, weight_bytes=0, lacks=[])
            elif entry["kind"] == "join":
                one.say("joined")
                return epoch

    with ThreadPoolExecutor() as threads:
        *_, last = threads.map(formed, members)
    return last


def serving(
    coordinator: Coordinator, members: Members, *, waits: Collection[int] | None = None
) -> dict[int, FakeMember]:
    """The members' processes, by seat, of a group that serves: prepared, joined, each at its position. Those
    of `waits` (None: all) say that a later group has to wait for the ends of this one's members.
    """
    outlives = {seat: waits is not None and seat not in waits for seat in members.seats}
    found = {seat: FakeMember(coordinator, seat, outlives=outlives[seat]) for seat in members.seats}
    for one in found.values():
        assert epoch_from(one.entry("prepare")["epoch"]).members == members
        one.say("prepared", bytes_read=0, weight_bytes=0, lacks=[])
    for seat, one in found.items():
        joining = one.entry("join")
        assert (joining["position"], joining["size"]) == (members.position(seat), len(members))
        one.say("joined")
    coordinator.wait_serving(SECONDS)
    return found
