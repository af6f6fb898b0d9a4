"""`Way`: how rows get to experts and home, by one of the modes of `connect`; `Rows`: one call's tensors."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

T = TypeVar("T")


class WrongRows(ValueError):
    """Tensors of a call do not fit the layer; names the tensor, what it is and what the layer takes."""


class Rows(NamedTuple):
    """One call's rows. `route` holds chosen experts with `weights`, or router logits without."""

    hidden: Tensor  # [T, H]
    route: Tensor  # [T, K] int32 or int64, -1 = none; or [T, E] of a float dtype
    weights: Tensor | None  # [T, K], final; None: `route` holds logits

    def on_host(self) -> Rows:
        """The same on the CPU, dense. Raises RuntimeError where the caller records a CUDA graph."""
        self.refuse_recording()
        return self._each(lambda given: given.detach().cpu().contiguous())

    def detached(self) -> Rows:
        """The same without gradients."""
        return self._each(Tensor.detach)

    def ids(self, experts: int) -> Tensor:
        """The chosen experts as int32. An id out of range stays so: it is cut, and not wrapped round."""
        route = self.route
        return route if route.dtype == torch.int32 else route.clamp(-2, experts).to(torch.int32)

    def refuse_recording(self) -> None:
        """Raises RuntimeError where the caller records a CUDA graph."""
        if self.hidden.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "experts that are reached through the host cannot be in a CUDA graph: a replay runs no host "
                "code; leave the MoE layers out of the graph, or use mode='in_process'"
            )

    def _each(self, change: Callable[[Tensor], Tensor]) -> Rows:
        weights = None if self.weights is None else change(self.weights)
        return Rows(change(self.hidden), change(self.route), weights)


@dataclass(frozen=True)
class Sizes:
    """What a layer takes."""

    hidden: int
    experts: int
    top_k: int

    def check(self, layer: int, rows: Rows) -> None:
        """Raises WrongRows for tensors of other shapes or dtypes, and for ids out of range on the CPU."""
        hidden, route, weights = rows
        if hidden.dim() != 2 or hidden.shape[1] != self.hidden or not hidden.is_floating_point():
            raise WrongRows(
                f"layer {layer}: hidden is {_said(hidden)}; it must be [T, {self.hidden}] of a float dtype"
            )
        width = self.experts if weights is None else self.top_k
        what = "logits" if weights is None else "ids"
        if tuple(route.shape) != (hidden.shape[0], width):
            raise WrongRows(
                f"layer {layer}: {what} are {_said(route)}; they must be [{hidden.shape[0]}, {width}]"
            )
        if weights is None:
            if not route.is_floating_point():
                text = "logits, given without weights, are floats"
                raise WrongRows(f"layer {layer}: {what} are {_said(route)}; {text}")
            return
        if route.dtype not in (torch.int32, torch.int64):
            raise WrongRows(f"layer {layer}: {what} are {_said(route)}; ids are int32 or int64")
        if weights.shape != route.shape or not weights.is_floating_point():
            raise WrongRows(
                f"layer {layer}: weights are {_said(weights)}; ids {list(route.shape)} need a float each"
            )
        if not route.is_cuda and route.numel():
            low, high = int(route.min()), int(route.max())
            if low < -1 or high >= self.experts:
                wrong = low if low < -1 else high
                raise WrongRows(
                    f"layer {layer}: id {wrong} is out of range: experts are 0 to {self.experts - 1}, "
                    "-1 is none"
                )


def _said(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


class Way(Protocol):
    """How a process reaches the experts of its model. Calls come from one thread, in the order of its model.

    `order` is a tensor that compilers see as written by each call, so that they keep calls in their order.
    """

    order: Tensor

    def mixed(self, layer: int, rows: Rows) -> Tensor:
        """The mixed rows [T, H], like `rows.hidden` in dtype and device; a new tensor."""

    def submit(self, layer: int, rows: Rows) -> int:
        """Begins what `mixed` does; returns what to `wait` for. The tensors may not change meanwhile."""

    def wait(self, number: int) -> Tensor:
        """The answer of `submit`; each is waited for once."""

    def close(self) -> None:
        """Lets go of what it holds; answers under way are waited for."""


@runtime_checkable
class Exchanging(Protocol):
    """A way that begins one call and takes the answer of another at once."""

    def exchange(self, layer: int, rows: Rows, number: int) -> tuple[int, Tensor]:
        """As the function."""


def exchange(way: Way, layer: int, rows: Rows, number: int) -> tuple[int, Tensor]:
    """What to `wait` for and the answer of call `number`, as `submit` and then `wait` give them."""
    if isinstance(way, Exchanging):
        return way.exchange(layer, rows, number)
    return way.submit(layer, rows), way.wait(number)


class Rounds:
    """Which forward pass of a model a call belongs to, as the order of its layers tells: a new one begins
    with a layer before the last, or with the same one when `alike` calls have been at it.
    """

    def __init__(self, alike: int) -> None:
        self.number = 0  # of the round that calls belong to now
        self._alike, self._last, self._same = alike, -1, 0

    def at(self, layer: int) -> int:
        """The round of a call at `layer`, the next one of the model."""
        if not self.number or layer < self._last or (layer == self._last and self._same >= self._alike):
            self.number, self._same = self.number + 1, 0
        self._same = self._same + 1 if layer == self._last else 1
        self._last = layer
        return self.number


def check_process(made_by: int) -> None:
    """Raises RuntimeError in a process that was forked from the one that opened a way: what the way holds is
    its parent's.
    """
    if made_by != os.getpid():
        raise RuntimeError("this way to the experts was made before a fork; connect again in this process")


CLOSED = "this way to the experts was closed"

MOST_ALIKE = 16
"""Calls of one forward pass at one layer, for ways that have no number of their own."""


def not_under_way(number: int) -> KeyError:
    """That nobody can wait for call `number` of a way that has no number of calls of its own."""
    return KeyError(
        f"call {number} is not under way: each submitted call is waited for once, and before the forward "
        f"pass after the next; more than {MOST_ALIKE} submitted calls of one layer count as another one, and "
        "so do layers in another order, as where two threads call at once; calls come from one"
    )


class Submitted:
    """Calls under way in a thread of their own, which makes them in the order that they were submitted.

    Answers that nobody waits for go with the next forward pass but one: whoever failed between `submit` and
    `wait` does not wait any more.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._answers: dict[int, Future[Tensor]] = {}
        self._round_of: dict[int, int] = {}
        self._rounds = Rounds(MOST_ALIKE)
        self._numbers = itertools.count(1)
        self._closed = False
        self._process = os.getpid()

    def put(self, layer: int, call: Callable[[], Tensor]) -> int:
        """Has `call`, of `layer`, made after those before it; returns its number. Raises RuntimeError once it
        is closed, and after a fork.
        """
        check_process(self._process)
        if self._closed:
            raise RuntimeError(CLOSED)
        number, now = next(self._numbers), self._rounds.at(layer)
        for old in [old for old, of in self._round_of.items() if of < now - 1]:
            del self._round_of[old], self._answers[old]
        self._answers[number], self._round_of[number] = self._thread.submit(_without_gradients, call), now
        return number

    @property
    def numbers(self) -> tuple[int, ...]:
        """Those of the calls whose answers are kept."""
        return tuple(self._answers)

    def take(self, number: int) -> Tensor:
        """The answer of `number`, or its failure. Raises KeyError for one that was taken, or never put, and
        RuntimeError once it is closed, and after a fork.
        """
        check_process(self._process)
        if self._closed:
            raise RuntimeError(CLOSED)
        if number not in self._answers:
            raise not_under_way(number)
        del self._round_of[number]
        return self._answers.pop(number).result()

    def run(self, call: Callable[[], T]) -> T:
        """Makes `call` after those under way; in this thread where there are none. Raises RuntimeError after
        a fork.
        """
        check_process(self._process)
        if all(answer.done() for answer in self._answers.values()):
            return call()
        return self._thread.submit(_without_gradients, call).result()

    def close(self) -> None:
        """Waits for the calls under way, whose answers nobody takes any more."""
        self._closed = True
        self._thread.shutdown()
        self._answers.clear()
        self._round_of.clear()


def _without_gradients(call: Callable[[], T]) -> T:
    with torch.no_grad():
        return call()
