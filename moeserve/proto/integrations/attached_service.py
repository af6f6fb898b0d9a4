"""`AttachedService`: an engine's process brings its rows to a rank of its host by memory that both map.

service = AttachedService(Settings("127.0.0.1:50051", mode="attached"))
reply = service.call(3, hidden, Choice(ids, weights))

Layers of a forward pass follow one another, so they are steps of one standing pass (passes/running.py). A
call out of that order, or of more rows than the lane takes, costs an announcement for each step, and nothing
else.
"""

from __future__ import annotations

import logging
import os
import time
import uuid

import torch
from torch import Tensor

from moeserve.proto import moe_pb2
from moeserve.proto.client import Choice, MoeClient, Reply
from moeserve.proto.client.lanes import check_serving
from moeserve.proto.client.patience import check_process
from moeserve.proto.errors import (
    DeadlineExceeded,
    MoeError,
    NotFound,
    Overloaded,
    Unavailable,
    WeightsChanged,
)
from moeserve.proto.host import host_id
from moeserve.proto.integrations.settings import MODE, Settings
from moeserve.proto.passes.attached import DETACH_SECONDS, AttachedLane, Wanted
from moeserve.proto.passes.running import Pass, PassLate
from moeserve.proto.tensors import as_torch

log = logging.getLogger(__name__)

ROWS = 256
"""Most rows of a step that the lane is attached for; fewer where the service's steps take fewer."""

AGAIN_SECONDS = 0.05
"""Between two attempts, while no rank of this host serves."""

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class AttachedService:
    """A service of which a rank is on this host. One thread at a time calls it.

    The lane is attached at the first call, for rows of its dtype, at any rank of this host that has one free,
    and anew where its rank has gone. A step is pure, so one that got no answer is run again, until the
    settings' timeout has passed.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._process = settings, os.getpid()
        self._name = f"engine-{uuid.uuid4().hex[:16]}"
        self._client = MoeClient(settings.address, timeout=settings.timeout, credentials=settings.credentials)
        self._rows = 0  # most of a step; 0: not asked yet
        self._lane: AttachedLane | None = None
        self._running: Pass | None = None

    def model(self) -> moe_pb2.GetModelReply:
        """The description of the model that is served.

        Raises NotFound where the service has no rank on this host, and Unavailable where it does not serve.
        """
        self._most_rows()
        return self._client.model()

    def call(self, layer: int, hidden: Tensor, route: Choice) -> Reply:
        """One layer's experts, mixed. All rows are computed with the version of the weights that is returned.

        hidden: [T, H] on the CPU, float32, bfloat16 or float16. Raises MoeError where no answer came within
        the settings' timeout, and RuntimeError after a fork.
        """
        check_process(self._process)
        until = time.monotonic() + self._settings.timeout
        answer, most = torch.empty_like(hidden), self._most_rows()
        while True:
            versions = {
                self._step(layer, slice(at, at + most), (hidden, route, answer), until)
                for at in range(0, max(1, len(hidden)), most)  # no rows are a step, too
            }
            if len(versions) == 1:
                return Reply(answer, 0, versions.pop())
            if time.monotonic() > until:
                text = f"layer {layer} was reloaded again and again for {self._settings.timeout:g} s"
                raise WeightsChanged("UNAVAILABLE", "wrong_version", text)

    def close(self) -> None:
        """Detaches the lane, and closes the connection."""
        self._detach()
        self._client.close()

    def _step(self, layer: int, part: slice, rows: tuple[Tensor, Choice, Tensor], until: float) -> int:
        """Fills `part` of the answer, the last of `rows`; returns the version of the weights."""
        hidden, route, answer = rows
        given = Choice(route.experts[part], route.weights[part])
        waits_for: MoeError | None = None
        while True:
            try:
                run = self._pass_at(layer, hidden.dtype, until)
                run.post(0, hidden[part], given)
                found = run.arrived(0, max(0.0, until - time.monotonic()))
            except DeadlineExceeded as late:
                raise late if waits_for is None else waits_for from late
            except (Unavailable, PassLate, NotFound, Overloaded) as failed:
                self._running, waits_for = None, failed
                if time.monotonic() + AGAIN_SECONDS > until:
                    raise
                log.debug("layer %d is asked again: %s", layer, failed)
                if not isinstance(failed, PassLate):
                    time.sleep(AGAIN_SECONDS)
            else:
                answer[part] = as_torch(found.storage.data, found.spec)
                return run.version(0)

    def _most_rows(self) -> int:
        """Most rows of a step, asked for once. Raises NotFound where no rank is on this host, and Unavailable
        where the service does not serve.
        """
        if not self._rows:
            here, topology = host_id(), check_serving(self._client.topology())
            lanes = [lane for lane in topology.lanes if here and lane.host_id == here]
            if not lanes:
                raise NotFound(
                    "NOT_FOUND",
                    "no_lane",
                    f"{MODE}=attached needs a rank of {self._settings.address} on this host, which shares "
                    f"memory with this process, and there is none; leave {MODE} out, or set it to remote",
                )
            self._rows = min(ROWS, *(lane.capacity for lane in lanes))
        return self._rows

    def _pass_at(self, layer: int, dtype: torch.dtype, until: float) -> Pass:
        """A pass whose next step is of `layer`: the one that runs, or another one from there on and round."""
        lane, run = self._attached(DTYPES[dtype], until), self._running
        if run is None or run.status is not None or run.under_way(0) or run.layer(0) != layer:
            at = lane.layers.index(layer)
            order = lane.layers[at:] + lane.layers[:at]
            left = max(0.0, until - time.monotonic())
            run = self._running = lane.begin(order, standing=True, any_weights=True, timeout=left)
        return run

    def _attached(self, dtype: str, until: float) -> AttachedLane:
        """The lane for rows of `dtype`, attached anew where its rank has gone."""
        if self._lane is not None and not (self._lane.alive and self._lane.wanted.dtype == dtype):
            self._detach(max(0.0, until - time.monotonic()))
        if self._lane is None:
            settings = self._settings
            wanted = Wanted(
                self._name,
                self._most_rows(),
                dtype=dtype,
                any_rank=True,
                timeout=settings.timeout,
                credentials=settings.credentials,
            )
            left = max(0.0, until - time.monotonic())
            self._lane = AttachedLane.attach(settings.address, wanted, left)
        return self._lane

    def _detach(self, seconds: float = DETACH_SECONDS) -> None:
        lane, self._lane, self._running = self._lane, None, None
        if lane is not None:
            lane.close(min(seconds, DETACH_SECONDS))
