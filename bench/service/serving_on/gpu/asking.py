"""`Asking`: a process that asks a service while it is told to, and compares every answer."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from torch import Tensor

from bench.service.serving_on.gpu.service import LARGEST_ERROR

START_SECONDS, JOIN_SECONDS = 120.0, 70.0


class Order(NamedTuple):
    """What a process is to do from now on. lane: to whose it asks; None: any."""

    asks: bool
    lane: int | None = None


PAUSE = Order(False)


class Answer(NamedTuple):
    """One call or pass that has ended, on the clock of `time.time`."""

    layer: int  # -1: all of them, in a pass
    began: float
    ended: float
    fault: str = ""  # why there is no right answer
    wrong: bool = False  # there is an answer, and it is wrong
    other_bits: bool = False  # it is right, and not the first one bit by bit
    lane: int = -1  # to which bare calls went
    tried: bool = False  # nothing was asked: a lane was to be made again, and was not


class Asking:
    """A context. target: runs in the process, with its ends of the pipe and of the queue, and `given`."""

    def __init__(self, target: Callable[..., None], *given: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._answers: Any = context.Queue()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, self._answers, *given), daemon=True)
        self._theirs = theirs

    def __enter__(self) -> Asking:
        self._process.start()
        self._theirs.close()
        try:
            said = self._pipe.recv() if self._pipe.poll(START_SECONDS) else f"not in {START_SECONDS:g} s"
        except EOFError:
            said = "it has ended"
        if said is not None:
            self.__exit__()
            raise RuntimeError(f"a process of callers is not ready: {said}")
        return self

    def __exit__(self, *ended: object) -> None:
        self._pipe.close()
        until = time.monotonic() + JOIN_SECONDS
        while self._process.is_alive() and time.monotonic() < until:
            self.answers(0.1)  # a process ends once its queue is taken from
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def order(self, order: Order) -> None:
        """Has it ask, another lane too, or pause once the call under way has ended."""
        with contextlib.suppress(OSError):  # it has ended, as its last answer says
            self._pipe.send(order)

    def answers(self, seconds: float = 0.0) -> list[Answer]:
        """Those that came since the last look, or come within so many seconds."""
        found, until = list[Answer](), time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._answers.get(timeout=max(0.001, until - time.monotonic())))
        return found


def orders(pipe: Connection) -> Iterator[Order]:
    """In the process: the order of each call, as long as there are any; says that it is ready."""
    pipe.send(None)
    now = PAUSE
    with contextlib.suppress(EOFError):
        while True:
            while not now.asks or pipe.poll():
                now = pipe.recv()
            yield now


def compared(layer: int, began: float, pairs: list[tuple[Tensor, Tensor]]) -> Answer:
    """An answer that has just come, by what was found and what is right."""
    ended = time.time()
    if all(bool((found == right).all()) for found, right in pairs):
        return Answer(layer, began, ended)
    errors = [float((found.float() - right.float()).norm() / right.float().norm()) for found, right in pairs]
    if all(error <= LARGEST_ERROR for error in errors):
        return Answer(layer, began, ended, other_bits=True)
    return Answer(layer, began, ended, f"relative error {max(errors):.2e}", wrong=True)


def failure(error: BaseException) -> str:
    """An error in a few words."""
    return f"{type(error).__name__}: {error}"[:300]
