"""`KeptHead` beside heads that end at the worst moments. They are threads that speak a head's protocol."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from moeserve.runtime.config import Config
from moeserve.runtime.head.reception import RankProcess
from moeserve.runtime.launch import kept_head
from moeserve.runtime.launch.head_child import HeadSpec, Living, Now, Stop, Up
from moeserve.runtime.launch.head_process import Seated
from moeserve.runtime.launch.kept_head import KeptHead
from moeserve.runtime.launch.local_cluster import LocalRanks
from moeserve.runtime.sections import ClusterConfig, ModelConfig, ServerConfig

SECONDS = 10.0
RANKS = frozenset({0, 1})


class Heads:
    """Where heads come from. Each listens, and serves if `serving`; it ends by itself after `lasts` seconds.

    `before_start` is called by whoever starts one.
    """

    def __init__(self) -> None:
        self.made: list[FakeHead] = []
        self.before_start: Callable[[], None] = lambda: None
        self.serving, self.lasts = True, SECONDS
        self.beats = True  # it says all the time that it is alive
        self.aborted = ""  # why its last generation ended
        self.seats: dict[int, Seated] = {}  # who is connected
        self.listens = True
        self.stops = True  # told to stop, it does; it dies otherwise
        self.stands = False  # told to stop, it stands still until it is killed

    Pipe = staticmethod(multiprocessing.Pipe)

    def Process(self, *, args: tuple[HeadSpec, Connection], **named: object) -> FakeHead:
        head = FakeHead(self, *args)
        self.made.append(head)
        return head


class FakeHead:
    """A head's process."""

    def __init__(self, heads: Heads, spec: HeadSpec, pipe: Connection) -> None:
        self._heads, self.spec, self._pipe = heads, spec, pipe
        self.pid, self.sentinel, self.exitcode = os.getpid(), 0, -9
        self.living, self.said = dict(spec.living), list[type]()
        self.killed, self._over = threading.Event(), threading.Event()

    def start(self) -> None:
        self._heads.before_start()
        self._pipe = Connection(os.dup(self._pipe.fileno()))  # as a process has its own
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        if not self._heads.listens:  # it is stopped before
            self.killed.wait(SECONDS)
            self._pipe.close()
            self._over.set()
            return
        self._pipe.send(Up("127.0.0.1:1", ""))
        state = "serving" if self._heads.serving else "forming"
        now = Now(state, "", self._heads.seats, (), RANKS, versions=3, aborted=self._heads.aborted)
        self._pipe.send(now)
        until = time.monotonic() + self._heads.lasts
        while not self.killed.is_set() and time.monotonic() < until:
            if self._heads.beats:
                self._pipe.send(now)
            if self._pipe.poll(0.01):
                said = self._pipe.recv()
                self.said.append(type(said))
                if isinstance(said, Living):
                    self.living = dict(said.processes)
                if isinstance(said, Stop):
                    if self._heads.stands:
                        self.killed.wait(SECONDS)
                    elif self._heads.stops:
                        self._pipe.send(Now("stopped", "", {}, (), RANKS, versions=3))
                    break
        self._pipe.close()
        self._over.set()

    def kill(self) -> None:
        self.killed.set()
        self._over.wait(SECONDS)

    def join(self, seconds: float) -> None:
        self._over.wait(seconds)

    def is_alive(self) -> bool:
        return not self._over.is_set()


def kept_by(heads: Heads, stalled: float = SECONDS, **cluster: Any) -> KeptHead:
    server = ServerConfig(
        port=0, metrics_port=-1, health_port=-1, drain_seconds=SECONDS, stalled_seconds=stalled
    )
    config = Config(ModelConfig(checkpoint="/nowhere"), server=server, cluster=ClusterConfig(**cluster))
    return KeptHead(config, "127.0.0.1", heads)  # type: ignore[arg-type]


def watched(
    kept: KeptHead, stands: Callable[[], bool], kill: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is seen as stopped for too long while it `stands`; `kill` is what its kill does."""
    seen = kept._config.cluster.stopped_seconds, "it is stopped"
    look = {True: seen, False: (0.0, "")}
    monkeypatch.setattr(kept._watch, "look", lambda pids: dict.fromkeys(pids, look[stands()]))
    monkeypatch.setattr(kept._watch, "kill", lambda pid: kill())


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.fixture
def slow() -> Any:
    """What a host that takes long to start a process does: `begun` says when, `go_on` for how long."""
    return SimpleNamespace(begun=threading.Event(), go_on=threading.Event())


def hold_up(heads: Heads, slow: Any) -> None:
    def wait() -> None:
        slow.begun.set()
        assert slow.go_on.wait(SECONDS)

    heads.before_start = wait


def refuse(heads: Heads, slow: Any) -> None:
    def fail() -> None:
        slow.begun.set()
        raise OSError("Resource temporarily unavailable")

    heads.before_start = fail


def test_a_rank_that_is_started_again_while_the_head_is_is_known_to_the_new_one(slow: Any) -> None:
    """A host's end of memory takes both at once."""
    heads = Heads()
    kept = kept_by(heads)
    kept.start()
    kept.living({0: RankProcess(0, 100, "h"), 1: RankProcess(1, 101, "h")})
    hold_up(heads, slow)
    heads.made[0].kill()
    assert slow.begun.wait(SECONDS)
    kept.living({0: RankProcess(0, 100, "h"), 1: RankProcess(1, 201, "h")})
    slow.go_on.set()
    until(lambda: len(heads.made) == 2 and heads.made[1].living.get(1) == RankProcess(1, 201, "h"))
    assert heads.made[1].spec.start.used == 3, "no version of the weights has a number of before"
    kept.stop()


def test_a_service_that_is_told_to_stop_while_its_head_starts_again_stops(slow: Any) -> None:
    heads = Heads()
    kept = kept_by(heads)
    kept.start()
    hold_up(heads, slow)
    heads.made[0].kill()
    assert slow.begun.wait(SECONDS)
    stopping = threading.Thread(target=kept.stop, daemon=True)
    stopping.start()
    until(kept._stopping.is_set)
    slow.go_on.set()
    stopping.join(SECONDS / 2)
    assert not stopping.is_alive() and Stop in heads.made[1].said
    assert not heads.made[1].killed.is_set()


def test_a_head_that_dies_while_the_service_stops_is_followed_by_one_that_lets_calls_finish() -> None:
    heads = Heads()
    heads.stops = False
    kept = kept_by(heads)
    kept.start()

    def next_one() -> None:
        heads.stops = True

    heads.before_start = next_one
    kept.stop()
    assert [head.said[-1] for head in heads.made] == [Stop, Stop]
    assert heads.made[1].spec.start.again and kept.state() == ("stopped", "")


def test_a_head_that_is_stopped_while_the_service_stops_is_killed_and_followed_by_one_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that dies: its lanes' calls wait for steps, and the service for its end."""
    heads = Heads()
    heads.stands = True
    kept = kept_by(heads)

    def kill() -> None:
        heads.stands = False
        heads.made[0].killed.set()

    watched(kept, lambda: heads.stands and Stop in heads.made[0].said, kill, monkeypatch)
    kept.start()
    kept.stop()
    assert [head.said[-1] for head in heads.made] == [Stop, Stop]
    assert kept.state() == ("stopped", "")


def test_heads_that_die_one_after_the_other_keep_no_service_from_its_stop() -> None:
    heads = Heads()
    heads.stops = False
    kept = kept_by(heads)
    kept.start()
    kept.stop()
    assert len(heads.made) == 2 and not kept._keeping.is_alive()


def test_a_service_that_is_told_to_stop_between_two_heads_has_one_more() -> None:
    heads = Heads()
    kept = kept_by(heads)
    kept.start()
    heads.before_start = lambda: (_ for _ in ()).throw(OSError("no process now"))
    until(lambda: kept.state()[0] == "serving")
    heads.made[0].kill()
    until(lambda: len(heads.made) > 2)  # it waits between two that cannot start
    heads.before_start = lambda: None
    kept.stop()
    assert Stop in heads.made[-1].said and kept.state()[0] == "stopped"


def test_heads_that_end_before_they_serve_are_started_less_and_less_often() -> None:
    heads = Heads()
    heads.serving, heads.lasts = False, 0.01
    kept = kept_by(heads)
    kept.start()
    time.sleep(2.0)
    made, state = len(heads.made), kept.state()[0]
    kept.stop()
    assert 2 <= made <= 10
    assert state == "forming"


def test_a_service_whose_heads_never_serve_ends_when_it_is_to_give_up() -> None:
    heads = Heads()
    heads.serving, heads.lasts = False, 0.01
    kept = kept_by(heads, give_up_seconds=0.3)
    kept.start()
    until(lambda: kept.state()[0] == "failed")
    assert "no head has served for cluster.give_up_seconds = 0.3" in kept.state()[1]
    kept.stop()


def test_a_head_that_hangs_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = Heads()
    kept = kept_by(heads, stalled=1.5)
    monkeypatch.setattr(kept_head, "LEAST_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(kept._watch, "kill", lambda pid: heads.made[-1].killed.set())
    kept.start()
    time.sleep(2.0)
    assert len(heads.made) == 1, "it says that it is alive"
    heads.beats = False
    until(lambda: len(heads.made) == 2)
    assert heads.made[0].killed.is_set()
    heads.beats = True
    until(lambda: kept.state()[0] == "serving")
    kept.stop()


def test_a_head_that_is_stopped_before_it_listens_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = Heads()
    heads.listens = False
    kept = kept_by(heads)

    def kill() -> None:
        heads.listens = True
        heads.made[0].killed.set()

    watched(kept, lambda: not heads.listens, kill, monkeypatch)
    kept.start()
    assert len(heads.made) == 2 and not heads.made[1].killed.is_set()
    kept.stop()


def test_a_host_that_starts_no_process_now_may_start_one_later() -> None:
    heads, failures = Heads(), [OSError("Resource temporarily unavailable"), EOFError()]
    kept = kept_by(heads)
    kept.start()

    def refuse() -> None:
        if failures:
            raise failures.pop()

    heads.before_start = refuse
    heads.made[0].kill()
    until(lambda: len(heads.made) == 4 and heads.made[3].is_alive())
    until(lambda: kept.state()[0] == "serving")
    kept.stop()


def test_a_start_that_takes_too_long_names_what_a_rank_reported_last() -> None:
    heads = Heads()
    heads.serving, heads.aborted = False, "rank 1: 'prepare' failed: CheckpointError: no such tensor"
    kept = kept_by(heads)
    kept.start()
    try:
        until(lambda: bool(kept._now.aborted))
        with pytest.raises(TimeoutError, match=r"did not serve within .*; before: rank 1: .* no such tensor"):
            kept.wait_serving(0.05)
    finally:
        kept.stop()


@pytest.mark.parametrize("how", [hold_up, refuse], ids=["slowly", "not yet"])
def test_no_rank_is_late_for_a_head_that_is_only_being_started(
    slow: Any, how: Callable[[Heads, Any], None]
) -> None:
    """Ranks that serve for longer than `cluster.begin_seconds` were killed between two heads."""
    heads = Heads()
    heads.seats = {rank: Seated(os.getpid(), 1) for rank in RANKS}
    kept = kept_by(heads)
    ranks = LocalRanks(kept._config, kept, None)  # type: ignore[arg-type]
    kept.start()
    try:
        until(lambda: bool(kept.seats()))
        began = kept._config.cluster.begin_seconds
        ranks._processes = dict.fromkeys(RANKS, SimpleNamespace(pid=os.getpid(), runs=True))
        ranks._began = dict.fromkeys(RANKS, time.monotonic() - 2 * began)
        kept.since -= 2 * began
        assert ranks._standing() == []
        how(heads, slow)
        heads.made[0].kill()
        assert slow.begun.wait(SECONDS)
        assert kept.seats() == {} and ranks._standing() == []
        state, why = kept.state()
        assert state == "forming" and why.startswith("the head has ended, and is started again: it")
    finally:
        slow.go_on.set()
        kept.stop()


def test_a_start_whose_heads_end_says_how_they_did() -> None:
    heads = Heads()
    heads.serving, heads.lasts = False, 0.01
    kept = kept_by(heads)
    kept.start()
    try:
        until(lambda: "ended with" in kept.state()[1])
        with pytest.raises(TimeoutError, match=r"did not serve within .*: the head has ended.*ended with -9"):
            kept.wait_serving(0.0)
    finally:
        kept.stop()
