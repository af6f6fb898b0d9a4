"""Callers of `gpu_soak`: steady ones, which share a process, and rude ones, each in a process of its own."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
from torch import Tensor

from bench.service.hops.sizes import Sizes
from bench.service.passes.gpu.steps import BOUND
from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError
from moeserve.torch import Rows, Settings, Way, connect
from moeserve.torch.attached import Attached
from moeserve.torch.attached_device import AttachedDevice

ROWS = (1, 64, 2, 33, 16, 5, 48, 8, 57, 3, 24, 13)  # of a steady caller's passes, one after another
APART = 5  # inputs between those of two stages
PASSES = 8  # of a steady caller between two looks at its answers
RUDE_ROWS = 8
RUDE_SECONDS = 10.0  # for an answer; a kernel that waits for one ends then at the latest
HALF_WAY = 20  # passes before the one that is left half way
AGAIN_SECONDS = 0.02  # after a pass that has failed
TIMES = 3  # that one leaves with steps under way
MOST_TEXTS = 50


@dataclass(frozen=True)
class Served:
    """What callers are told of the service. device: of the callers' rows. callers and stages: of the steady
    ones.
    """

    address: str
    sizes: Sizes
    device: str
    callers: int = 2
    stages: int = 1

    def opened(self, name: str, rows: int, timeout: float = 60.0, stages: int = 1) -> Way:
        """A way of so many stages."""
        how = Settings("attached", self.address, timeout, name=name, rows=rows, device=self.device)
        return connect(replace(how, stages=stages))


@dataclass
class Seen:
    """What a steady caller saw since it began. gap: the longest time without a right pass since the last
    look, in seconds. failures: passes that ended; `failed` has the first texts.
    """

    passes: int = 0
    answers: int = 0
    other_bits: int = 0
    wrong: int = 0
    failures: int = 0
    failed: list[str] = field(default_factory=list)
    gap: float = 0.0


class Known(NamedTuple):
    """A forward pass whose answers are known."""

    rows: list[Rows]  # by layer
    right: Tensor  # [layers, T, H], as `MoeClient` had them
    bound: float  # of what is off by more than a sum in another order


def known(served: Served) -> list[Known]:
    """The forward passes of all steady callers, on their device."""
    sizes, made = served.sizes, list[Known]()
    with MoeClient(served.address, timeout=60) as client:
        for at, rows in enumerate(ROWS):
            given = [sizes.batch(rows, 100 * at + layer) for layer in range(sizes.layers)]
            found = [client.forward(layer, *one) for layer, one in enumerate(given)]
            right = torch.stack([torch.as_tensor(one) for one in found])
            there = [Rows(*(column.to(served.device) for column in one)) for one in given]
            made.append(Known(there, right.to(served.device), BOUND * float(right.abs().max())))
    return made


class Steady:
    """A caller that makes whole forward passes until it is told to stop. recorded: as CUDA graphs, one for
    each of its inputs; else eagerly. All answers are compared on its device, as a part of the graph. Each
    stage has other rows, and mostly more or fewer of them.
    """

    def __init__(self, served: Served, name: str, given: list[Known], *, recorded: bool) -> None:
        self._device = served.device
        self._way = served.opened(name, max(ROWS), stages=served.stages)
        self._stream = torch.cuda.Stream(served.device) if served.device != "cpu" else None
        self._seen, self._last = Seen(), time.monotonic()
        self._lock, self._stop = threading.Lock(), threading.Event()
        passes = [
            [given[(at + APART * stage) % len(given)] for stage in range(served.stages)]
            for at in range(len(given))
        ]
        self._launches: list[Callable[[], None]] = [lambda one=one: self._eager(one) for one in passes]
        with self._on_stream():
            self._counts = torch.zeros(3, dtype=torch.int64, device=served.device)
            """Answers; of them those with other bits; those that are off by more than the bound."""
            for launch in self._launches:
                launch()
            self._checked()
        if recorded:
            self._launches = [self._recorded(one) for one in passes]
        self._renews = recorded
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins to call, in a thread of its own."""
        self._last = time.monotonic()
        self._thread.start()

    def look(self) -> Seen:
        """What it saw until now."""
        with self._lock:
            seen = replace(self._seen, gap=max(self._seen.gap, time.monotonic() - self._last))
            self._seen.gap = 0.0
        return seen

    def end(self) -> None:
        """Stops it, and closes its way."""
        self._stop.set()
        self._thread.join()
        self._way.close()

    def _on_stream(self) -> ExitStack:
        stack = ExitStack()
        if self._stream is not None:
            stack.enter_context(torch.cuda.device(self._device))
            stack.enter_context(torch.cuda.stream(self._stream))
        return stack

    def _eager(self, stages: list[Known]) -> None:
        """A forward pass, and the comparison of its answers."""
        found: list[list[Tensor]] = [[] for _ in stages]
        for layer in range(len(stages[0].rows)):
            calls = [self._way.submit(layer, one.rows[layer]) for one in stages]
            for answers, call in zip(found, calls, strict=True):
                answers.append(self._way.wait(call))
        for one, answers in zip(stages, found, strict=True):
            self._compare(one, torch.stack(answers))

    def _compare(self, one: Known, answers: Tensor) -> None:
        bits = (answers.view(torch.int16) != one.right.view(torch.int16)).flatten(1).any(1).sum()
        far = (answers.float() - one.right.float()).abs().flatten(1).amax(1)
        self._counts[0].add_(len(one.rows))
        self._counts[1].add_(bits)
        self._counts[2].add_((~(far <= one.bound)).sum())

    def _recorded(self, one: list[Known]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.graph(graph, stream=self._stream):
            self._eager(one)
        return graph.replay

    def _run(self) -> None:
        turns = count()
        with self._on_stream():
            while not self._stop.is_set():
                first = PASSES * next(turns)
                try:
                    self._turn([self._launches[(first + at) % len(self._launches)] for at in range(PASSES)])
                except MoeError as failed:
                    self._failed(str(failed))
                    self._counts.zero_()  # some answers are zeros
                    time.sleep(AGAIN_SECONDS)
                except Exception as failed:
                    self._failed(f"it calls no more: {type(failed).__name__}: {failed}")
                    return

    def _turn(self, launches: list[Callable[[], None]]) -> None:
        if self._renews and isinstance(self._way, AttachedDevice):
            self._way.renew()
        for launch in launches:
            launch()
        answers, bits, wrong = self._checked()
        with self._lock:
            seen, now = self._seen, time.monotonic()
            seen.passes += len(launches)
            seen.answers += answers
            seen.other_bits += bits
            seen.wrong += wrong
            if not wrong:
                seen.gap, self._last = max(seen.gap, now - self._last), now

    def _checked(self) -> list[int]:
        """The counts of all passes since the last time. Raises MoeError where one has ended."""
        if isinstance(self._way, AttachedDevice):
            self._way.check()
        found: list[int] = self._counts.tolist()
        self._counts.zero_()
        return found

    def _failed(self, text: str) -> None:
        with self._lock:
            self._seen.failures += 1
            self._seen.failed = [*self._seen.failed, text[:200]][:MOST_TEXTS]


def steady(served: Served, pipe: Connection, seconds: float) -> None:
    """A process with steady callers, the first one recorded where there is a GPU. It sends what they saw
    whenever it is asked to look, and ends when it is told so. seconds: after which it is ended where it
    hangs.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
    torch.set_num_threads(1)
    given = known(served)
    callers = [Steady(served, "steady-recorded", given, recorded=served.device != "cpu")]
    if served.callers > 1:
        callers.append(Steady(served, "steady-eager", given[::-1], recorded=False))
    for caller in callers:
        caller.start()
    pipe.send("begun")
    with suppress(EOFError):  # whoever asked is gone
        while pipe.recv() == "look":
            pipe.send([caller.look() for caller in callers])
    for caller in callers:
        caller.end()
    pipe.send([caller.look() for caller in callers])


def rude(served: Served, name: str, how: str, pipe: Connection) -> None:
    """A process that does wrong, from its start to its end; it says when it is attached, and when it has had
    its first answers, or why it has none.
    """
    torch.set_num_threads(1)
    try:
        if how == "detached":
            _leaves(served, name)
            pipe.send("")
            return
        _calls(served, name, how, pipe)
    except Exception as error:  # told to whoever started it
        pipe.send(f"{name}, {how}: {type(error).__name__}: {error}")


def _calls(served: Served, name: str, how: str, pipe: Connection) -> None:
    """Makes passes, whatever becomes of them; `half way` leaves one in its middle, and `garbage` writes
    anything anywhere.
    """
    way, rows = served.opened(name, RUDE_ROWS, RUDE_SECONDS), _rude_rows(served)
    layers, told = range(served.sizes.layers), False
    pipe.send("")
    for turn in count():
        with suppress(MoeError):
            for layer in layers:
                way.mixed(layer, rows)
                if how == "half way" and turn == HALF_WAY:
                    pipe.send("")
                    time.sleep(RUDE_SECONDS)
                if how == "garbage":
                    _spoil(way)
            if isinstance(way, AttachedDevice):
                way.check()
            if not told and how != "half way":
                pipe.send("")
                told = True


def _leaves(served: Served, name: str) -> None:
    """Attaches, and detaches with steps under way."""
    rows = _rude_rows(served)
    for _ in range(TIMES):
        way = served.opened(name, RUDE_ROWS, RUDE_SECONDS)
        for layer in range(served.sizes.layers):
            way.mixed(layer, rows)
        way.submit(0, rows)
        way.close()


def _rude_rows(served: Served) -> Rows:
    return Rows(*(column.to(served.device) for column in served.sizes.batch(RUDE_ROWS, 7)))


def _spoil(way: Way) -> None:
    """Writes random bytes all over what a caller has mapped for writing: words and rows."""
    if isinstance(way, AttachedDevice) and way._lane is not None:
        way._lane.mailbox.random_()
        words = way._lane.lane.memory.bytes[0]
    elif isinstance(way, Attached) and way._lane is not None:
        words = way._lane.memory.bytes[0]
    else:
        return
    torch.frombuffer(words, dtype=torch.uint8).random_()
