"""`LoadMeter`: tokens by logical expert and by slot, counted on the device by phase, windows and decay."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.device.machine import kernels_serve
from moeserve.experts.load import PHASES, Load

Counts = NDArray[np.int64]

_SMALL = (2, 8, 8)  # sizes of a meter that is made to run its kernels


@dataclass(frozen=True)
class Metering:
    """What a meter tells apart, and for how long it remembers."""

    prefill_rows: int = 128  # rows the fullest lane brings to a step, from which it is prefill
    half_life: float = 60.0  # seconds after which load counts half
    window_seconds: float = 10.0  # of a window, or a little more: it closes with the first step after that
    windows: int = 6  # closed ones that are kept

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name}={value} must be more than 0")

    def phase(self, rows: int) -> int:
        """The place in `PHASES` of a step to which the fullest lane brings `rows`."""
        return PHASES.index("prefill" if rows >= self.prefill_rows else "decode")

    def weight(self, seconds: float) -> float:
        """What load counts after so long."""
        return float(0.5 ** (seconds / self.half_life))


@dataclass(frozen=True, eq=False)
class Reading:
    """What a meter held at one moment, on the host; phases in the order of `PHASES`."""

    tokens: Counts  # [P, L, E] since the start
    recent: NDArray[np.float64]  # [P, L, E] each window's tokens by its age, half after each half-life
    slots: Counts  # [P, L, S] since the layer's experts last moved
    windows: Counts  # [n, P, L, E] of closed windows, the oldest first
    seconds: tuple[float, ...]  # of each of those windows

    def load(self, phase: str = "") -> Load:
        """Tokens since the start, of one phase or of all."""
        return _load(self.tokens, phase)

    def recent_load(self, phase: str = "") -> Load:
        """The decayed load, of one phase or of all."""
        return _load(self.recent, phase)


def _load(tokens: Counts | NDArray[np.float64], phase: str) -> Load:
    kept = tokens[PHASES.index(phase)] if phase else tokens.sum(axis=0)
    return Load(kept.astype(np.float64))


class Snapshot:
    """A reading under way: its copy to the host runs behind the steps that were launched before it."""

    def __init__(self, tensors: tuple[Tensor, ...], seconds: tuple[float, ...]) -> None:
        self._host = [tensor.to("cpu", non_blocking=True, copy=True) for tensor in tensors]
        self._seconds = seconds
        self._copied: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    @property
    def ready(self) -> bool:
        """Whether `read` would not wait."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def read(self) -> Reading:
        """The reading; waits for its copy, and for nothing that was launched later."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens, recent, slots, windows = (tensor.numpy() for tensor in self._host)
        return Reading(tokens, recent, slots, windows, self._seconds)


class LoadMeter:
    """Counts the rows of one lane; the sum over lanes is the load. Nothing waits for the device.

    `count` has fixed shapes, so that a CUDA graph can hold it. `tick` closes windows, beside the graph: the
    tokens of a window count as of its end.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        device: torch.device | str = "cpu",
        metering: Metering | None = None,
    ) -> None:
        layers, experts, slots = sizes
        self.metering = metering or Metering()

        def table(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._open = table(len(PHASES), layers, experts)
        self._closed = table(len(PHASES), layers, experts)
        self._recent = table(len(PHASES), layers, experts, dtype=torch.float64)
        self._slots = table(len(PHASES), layers, slots)
        self._windows = table(self.metering.windows, len(PHASES), layers, experts)  # the oldest at `_oldest`
        self._taken = torch.empty_like(self._open)  # by `tick`, where memory may be had only when none waits
        self._each = torch.arange(self._open.numel(), device=device)  # the place of each count in `_open`
        self._oldest = 0
        self._seconds: deque[float] = deque(maxlen=self.metering.windows)
        self._opened: float | None = None
        if self._open.is_cuda and sizes != _SMALL:  # a kernel's first launch waits for whatever waits there
            LoadMeter(_SMALL, device, self.metering)._run_all()

    def _run_all(self) -> None:
        """Runs everything but `count` once."""
        for at, beside in enumerate((False, False, True)):
            self.tick(at * self.metering.window_seconds, beside=beside)
        self.moved(0)
        self.snapshot(2 * self.metering.window_seconds).read()

    def count(self, layer: int, experts: Tensor, slots: Tensor, rows: int) -> None:
        """Adds one step of this lane: the chosen `experts [T, K]` and the `slots [T, K]` they resolved to.

        `rows` is what the fullest lane brings to the step. Ids below 0 or out of range are not counted.
        """
        by_expert, by_slot = self.tables(layer, rows)
        if kernels_serve(experts.device):
            from moeserve.experts.routing.choice_kernels import count

            count(experts, slots, by_expert, by_slot)  # type: ignore[no-untyped-call]
            return
        _add(by_expert, experts)
        _add(by_slot, slots)

    def tables(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """Returns the counters of such a step, by expert and by slot: `[E]` and `[S]` int64."""
        phase = self.metering.phase(rows)
        return self._open[phase, layer], self._slots[phase, layer]

    def moved(self, layer: int) -> None:
        """The layer's slots hold other experts from here on: what was counted by slot is forgotten."""
        self._slots[:, layer].zero_()

    def tick(self, now: float, *, beside: bool = False) -> None:
        """Closes the window when it has been open long enough; `now`: seconds on a clock that only rises.
        beside: steps may count on another stream meanwhile.
        """
        if self._opened is None:
            self._opened = now
        seconds = now - self._opened
        if seconds < self.metering.window_seconds:
            return
        counted = self._taken.copy_(self._open) if beside else self._open
        self._recent.mul_(self.metering.weight(seconds)).add_(counted)
        self._closed.add_(counted)
        self._windows[self._oldest].copy_(counted)
        self._oldest = (self._oldest + 1) % self.metering.windows
        if beside:  # by atomic additions: what was counted since is kept
            self._open.view(-1).index_add_(0, self._each, counted.view(-1), alpha=-1)
        else:
            self._open.zero_()
        self._seconds.append(seconds)
        self._opened = now

    def snapshot(self, now: float) -> Snapshot:
        """What is held at `now`, on its way to the host."""
        weight = 1.0 if self._opened is None else self.metering.weight(now - self._opened)
        recent, closed = self._recent * weight + self._open, len(self._seconds)
        kept = self._windows.roll(-self._oldest, 0)[self.metering.windows - closed :]
        return Snapshot((self._closed + self._open, recent, self._slots, kept), tuple(self._seconds))


def _add(counts: Tensor, ids: Tensor) -> None:
    if ids.is_cpu:  # NumPy takes a fraction of torch's time where rows are few
        chosen = ids.numpy().ravel()
        chosen = chosen[(chosen >= 0) & (chosen < counts.shape[0])]
        on_host = counts.numpy()
        on_host += np.bincount(chosen, minlength=counts.shape[0])
        return
    flat = ids.flatten().long()
    known = (flat >= 0) & (flat < counts.shape[0])
    counts.index_add_(0, torch.where(known, flat, 0), known.long())
