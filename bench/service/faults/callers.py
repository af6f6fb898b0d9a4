"""`Callers`: processes that ask a service all the time and compare every answer with the reference."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import time
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

import torch

from moeserve.proto.client import MoeClient

PATIENCE_SECONDS = 600.0  # of one call, over every attempt
BOUND = 1e-3  # relative error of an answer
START_SECONDS = 120.0  # for every caller to have its first answer
JOIN_SECONDS = 150.0

Call = tuple[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Layer, batch and the reference's answer."""


class Manner(NamedTuple):
    """How a caller asks."""

    patience: float = PATIENCE_SECONDS
    between: float = 0.02  # seconds from an answer to the next call


MANNER = Manner()


class Answer(NamedTuple):
    """One call that has ended, on the clock of `time.time`."""

    caller: int
    began: float
    ended: float
    wrong: str  # why; empty for a right answer


class Callers:
    """So many processes with a client each, whose calls are drawn by a seed of their own. A context."""

    def __init__(
        self, address: str, calls: list[Call], count: int, seed: int, manner: Manner = MANNER
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._answers: Any = context.Queue()
        self._stop, self._asking = context.Event(), context.Event()
        self._asking.set()
        self._processes = [
            context.Process(
                target=_ask,
                args=((address, manner), calls, (seed, number), (self._stop, self._asking), self._answers),
                daemon=True,
            )
            for number in range(count)
        ]
        self.right = 0
        self.wrong: list[str] = []

    def __enter__(self) -> Callers:
        for process in self._processes:
            process.start()
        until = time.monotonic() + START_SECONDS
        began = set[int]()
        while len(began) < len(self._processes):
            began |= {one.caller for one in self.answers(0.1)}
            if time.monotonic() > until:
                raise RuntimeError(f"only callers {sorted(began)} had an answer within {START_SECONDS:g} s")
        return self

    def __exit__(self, *ended: object) -> None:
        self._stop.set()
        self._asking.set()
        deadline = time.monotonic() + JOIN_SECONDS
        while any(process.is_alive() for process in self._processes) and time.monotonic() < deadline:
            self.answers(0.1)
        for process in self._processes:
            if process.is_alive():
                self.wrong.append("a caller did not end")
                process.kill()
            process.join()
        self.answers(0.5)

    def pause(self) -> None:
        """Has callers ask nothing more; calls under way go on."""
        self._asking.clear()

    def go_on(self) -> None:
        """Has callers ask again."""
        self._asking.set()

    def answers(self, seconds: float) -> list[Answer]:
        """Those that came since the last look, or come within so many seconds; counted."""
        found = []
        until = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._answers.get(timeout=max(0.001, until - time.monotonic())))
        self.right += sum(not one.wrong for one in found)
        self.wrong += [one.wrong for one in found if one.wrong]
        return found


def _ask(
    what: tuple[str, Manner],
    calls: list[Call],
    seed: tuple[int, int],
    events: tuple[Event, Event],
    answers: Any,
) -> None:
    """One caller's process."""
    torch.set_num_threads(1)
    address, manner = what
    stop, asking = events
    draw = torch.Generator().manual_seed(seed[0] * 1000 + seed[1])
    with MoeClient(address, timeout=manner.patience) as client:
        while not stop.is_set():
            asking.wait()
            if stop.is_set():
                break
            layer, batch, wanted = calls[int(torch.randint(len(calls), (1,), generator=draw))]
            began, wrong = time.time(), ""
            try:
                error = float((client.forward(layer, *batch).float() - wanted).norm() / wanted.norm())
                if not error <= BOUND:
                    wrong = f"relative error {error:.2e} is over {BOUND:g}"
            except Exception as error:
                wrong = f"a call failed: {type(error).__name__}: {error}"
            answers.put(Answer(seed[1], began, time.time(), wrong))
            time.sleep(manner.between)
