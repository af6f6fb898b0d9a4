"""`AskedBefore`: placed calls that were answered before; the next is a copy of the request with other routes.

A model server asks layer after layer from the same regions. What such a call has alike with the one before it
was checked and put together once: to do it anew takes longer than the way to the lane and back.
"""

from __future__ import annotations

import itertools
import os
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from moeserve.proto import moe_pb2
from moeserve.proto.client.batch import CallOptions, Choice, Logits, Reply
from moeserve.proto.client.patience import Clock
from moeserve.proto.client.payload import check_placed
from moeserve.proto.errors import MoeError
from moeserve.proto.tensors import Array, Plain, plain
from moeserve.proto.transports.shared_memory import SharedTensor

MOST_KNOWN = 256
"""Calls that are remembered; then they are learned anew. One is a request of some 300 bytes."""

Key = tuple[object, ...]

_CALLER, _CALLS = uuid.uuid4().hex, itertools.count()  # a number costs a tenth of what an id of its own does


def new_job_id() -> str:
    """A job id of a call; nobody else has it."""
    return f"{_CALLER}.{os.getpid()}.{next(_CALLS)}"


@dataclass(frozen=True, eq=False)
class _Known:
    """A call that was answered. It keeps no memory of the caller's."""

    hidden: weakref.ref[SharedTensor]
    output: weakref.ref[SharedTensor]
    topology: moe_pb2.GetTopologyReply
    request: moe_pb2.ForwardRequest  # without routes' bytes and id


class Again:
    """A call that is about to be made as one before it."""

    def __init__(self, request: moe_pb2.ForwardRequest, hidden: SharedTensor, output: SharedTensor) -> None:
        self.job_id = new_job_id()
        self.failed: MoeError | None = None  # how the attempt ended
        self._request, self._hidden, self._output = request, hidden, output

    def asked(self, clock: Clock) -> Reply | None:
        """The answer; None where the attempt `failed`, and where another call is under way in the region.

        Raises TensorError for an answer that is not like the question.
        """
        request, calls = self._request, self._output.region.calls
        request.job_id = f"{self.job_id}.0"
        try:
            if calls is None or not calls.send(request, clock.remaining):
                return None
            reply = calls.receive(request.job_id, clock.patience.spin or 0.0)
        except MoeError as failed:
            self.failed = failed
            return None
        check_placed(reply, self._hidden.plain)
        return Reply(self._output.array, reply.epoch, reply.weights_version)


class AskedBefore:
    """The calls of one client that were answered before. Safe from any thread."""

    def __init__(self) -> None:
        self._known: dict[Key, _Known] = {}

    def find(
        self,
        topology: moe_pb2.GetTopologyReply | None,
        batch: tuple[int, Array | SharedTensor, Choice | Logits],
        options: CallOptions,
    ) -> Again | None:
        """A call like one that was answered before, under the same `topology`; None: it is made in full.

        batch: layer, hidden states and route. Raises TensorError for routes that the contract does not take.
        """
        if topology is None or not self._known:
            return None
        layer, hidden, route = batch
        output = options.get("output")
        if output is None or not isinstance(hidden, SharedTensor):
            return None
        routes = _routes(route, options)
        known = self._known.get(_key(layer, (hidden, output), routes, options))
        if known is None or known.topology is not topology:
            return None
        if known.hidden() is not hidden or known.output() is not output:
            return None  # others, of the same numbers: those of what is gone are given anew
        request = moe_pb2.ForwardRequest()
        request.CopyFrom(known.request)
        if isinstance(route, Logits):
            request.logits.data = routes[0].storage.tobytes()
        else:
            request.choice.ids.data = routes[0].storage.tobytes()
            request.choice.weights.data = routes[1].storage.tobytes()
        return Again(request, hidden, output)

    def learn(
        self,
        topology: moe_pb2.GetTopologyReply | None,
        batch: tuple[int, Array | SharedTensor, Choice | Logits],
        options: CallOptions,
        request: Callable[[], moe_pb2.ForwardRequest],
    ) -> None:
        """Takes note of a call that was answered, where the next one may be a copy of it. `request` makes its
        request anew.
        """
        layer, hidden, route = batch
        output = options.get("output")
        if topology is None or output is None or not isinstance(hidden, SharedTensor):
            return
        if output.region.calls is None:
            return
        bare = request()
        bare.job_id, bare.attempt = "", 0
        for tensor in (bare.logits,) if isinstance(route, Logits) else (bare.choice.ids, bare.choice.weights):
            tensor.ClearField("data")
        if len(self._known) >= MOST_KNOWN:
            self._known = {}
        key = _key(layer, (hidden, output), _routes(route, options), options)
        self._known[key] = _Known(weakref.ref(hidden), weakref.ref(output), topology, bare)


def _routes(route: Choice | Logits, options: CallOptions) -> tuple[Plain, ...]:
    dtype = options.get("dtype", "")
    if isinstance(route, Logits):
        return (plain(route.logits, "logits", dtype=dtype),)
    return (plain(route.experts, "choice.ids"), plain(route.weights, "choice.weights", dtype=dtype))


def _key(
    layer: int,
    placed: tuple[SharedTensor, SharedTensor],
    routes: tuple[Plain, ...],
    options: CallOptions,
) -> Key:
    hidden, output = placed
    specs = [(route.dtype.name, route.storage.shape) for route in routes]
    said = options.get("lane"), options.get("dtype"), options.get("weights_version")
    return (layer, id(hidden), id(output), *specs, *said)
