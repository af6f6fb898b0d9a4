"""`Attached`: rows go to a service by memory that one of its ranks maps too, without messages.

A model's forward pass is a round of a *standing pass* over the layers of the service, which is announced
once. A call out of that order costs an announcement, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.proto.client import Choice, Logits
from moeserve.proto.errors import MoeError, Unavailable, WeightsChanged
from moeserve.proto.passes.attached import AttachedLane, Pass, PassLate
from moeserve.proto.tensors import as_torch
from moeserve.torch.ways import Rows, Sizes, WrongRows

AGAIN_SECONDS = 0.05
"""Between two attempts, while the service does not answer."""


@dataclass
class _Call:
    """A call that was submitted."""

    layer: int
    rows: Rows  # on the host, of the lane's dtypes
    device: torch.device
    dtype: torch.dtype
    stage: int  # whose step it is; -1: none, its pass ended before it could be begun, or answered
    answer: Tensor | None = None


class Attached:
    """Experts behind a service on this host, whose rank shares memory with this process.

    `attach` makes the lane, and makes it again where its rank has gone. A step is pure, so that one whose
    pass ended without its answer is run again, until `timeout` has passed. one_version: layers of one round
    must have the same weights: then a reload between them raises WeightsChanged, and the caller runs its
    forward pass again.
    """

    def __init__(
        self, attach: Callable[[], AttachedLane], timeout: float = 60.0, *, one_version: bool = False
    ) -> None:
        self.order = torch.zeros(1, dtype=torch.int64)
        self._attach, self._timeout, self._one_version = attach, timeout, one_version
        self._lane: AttachedLane | None = attach()
        layout = self._lane.layout
        self._sizes = Sizes(layout.hidden, layout.experts, layout.top_k)
        self._dtype: torch.dtype = getattr(torch, layout.dtype.torch_name)
        self._stages, self._most_rows = layout.stages, layout.rows
        self._pass: Pass | None = None
        self._calls: dict[int, _Call] = {}
        self._numbers = 0

    def mixed(self, layer: int, rows: Rows) -> Tensor:
        """As `Way.mixed`; raises WrongRows, and MoeError where no answer came within the timeout."""
        return self.wait(self.submit(layer, rows))

    def submit(self, layer: int, rows: Rows) -> int:
        """As `Way.submit`; the rows are copied. Raises RuntimeError where all stages are busy."""
        self._sizes.check(layer, rows)
        if rows.hidden.shape[0] > self._most_rows:
            raise WrongRows(
                f"layer {layer}: {rows.hidden.shape[0]} rows, and the way was opened for {self._most_rows}; "
                "raise Settings.rows"
            )
        if len(self._calls) == self._stages:
            raise RuntimeError(
                f"{self._stages} calls are under way, as many as there are stages; wait for one, or raise "
                "Settings.stages"
            )
        host = rows.on_host()
        weights = None if host.weights is None else host.weights.float()
        route = host.route.float() if weights is None else host.route.to(torch.int32)
        given = Rows(host.hidden.to(self._dtype), route, weights)
        call = _Call(layer, given, rows.hidden.device, rows.hidden.dtype, -1)
        self._numbers += 1
        self._calls[self._numbers] = call
        try:
            self._post(call)
        except Unavailable:
            self._forget_pass()  # `wait` tries again
        except BaseException:
            del self._calls[self._numbers]
            raise
        return self._numbers

    def wait(self, number: int) -> Tensor:
        """As `Way.wait`; bounded by the timeout."""
        if number not in self._calls:
            raise KeyError(f"call {number} is not under way: each submitted call is waited for once")
        call = self._calls[number]
        until = time.monotonic() + self._timeout
        try:
            while call.answer is None:
                self._try(call, until)
        finally:
            del self._calls[number]
        return call.answer.to(call.device, call.dtype, copy=True)

    def close(self) -> None:
        """Detaches the lane."""
        lane, self._lane = self._lane, None
        self._forget_pass()
        if lane is not None:
            lane.close()

    def _try(self, call: _Call, until: float) -> None:
        """Takes the answer of `call`, which is begun anew where its pass has ended. Raises MoeError."""
        try:
            if call.stage < 0:
                self._post(call)
            self._take(call, max(0.0, until - time.monotonic()))
        except (Unavailable, PassLate) as failed:
            changed = isinstance(failed, WeightsChanged) and not self._first(call)
            self._forget_pass()
            if changed or time.monotonic() + AGAIN_SECONDS > until:
                raise
            if not isinstance(failed, (PassLate, WeightsChanged)):
                time.sleep(AGAIN_SECONDS)

    def _first(self, call: _Call) -> bool:
        """Whether `call` is the first of its round: no layer of other weights was computed with."""
        return self._pass is not None and call.stage >= 0 and self._pass.first(call.stage)

    def _take(self, call: _Call, timeout: float) -> None:
        assert self._pass is not None
        found = self._pass.take_plain(call.stage, timeout)
        call.answer, call.stage = as_torch(found.storage.data, found.spec), -1

    def _post(self, call: _Call) -> None:
        """Brings the rows of `call` at a stage that is at its layer; in a new pass where none is."""
        lane = self._attached()
        if self._pass is None or self._pass.status is not None or self._free(call.layer) is None:
            self._finish_others(call)
            self._pass = lane.begin(
                _from(lane.layers, call.layer),
                stages=self._stages,
                standing=True,
                any_weights=not self._one_version,
            )
        stage = self._free(call.layer)
        assert stage is not None
        hidden, route, weights = call.rows
        self._pass.post(stage, hidden, Logits(route) if weights is None else Choice(route, weights))
        call.stage = stage

    def _free(self, layer: int) -> int | None:
        """A stage without a step under way whose next layer is `layer`."""
        assert self._pass is not None
        run = self._pass
        return next(
            (at for at in range(run.stages) if not run.under_way(at) and run.layer(at) == layer), None
        )

    def _finish_others(self, call: _Call) -> None:
        """Takes the answers under way before their pass is left; what has none is begun anew."""
        for other in self._calls.values():
            if other is not call and other.stage >= 0:
                try:
                    self._take(other, self._timeout)
                except MoeError:
                    other.stage = -1

    def _attached(self) -> AttachedLane:
        """The lane, attached anew where its rank has gone."""
        if self._lane is not None and not self._lane.alive:
            gone, self._lane = self._lane, None
            self._forget_pass()
            gone.close()
        if self._lane is None:
            self._lane = self._attach()
        return self._lane

    def _forget_pass(self) -> None:
        """The pass has ended, or is of no use: what is under way of it is begun anew."""
        self._pass = None
        for call in self._calls.values():
            call.stage = -1


def _from(layers: tuple[int, ...], first: int) -> tuple[int, ...]:
    """The layers in their order, from `first` on and round. Raises WrongRows where it is none of them."""
    if first not in layers:
        raise WrongRows(f"layer {first} has no experts served there; layers {list(layers)} have")
    at = layers.index(first)
    return layers[at:] + layers[:at]
