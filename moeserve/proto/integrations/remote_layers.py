"""The MoE layers of an engine's process that a service answers for, for plug-ins that engines load.

layers = RemoteLayers(Settings("127.0.0.1:50051"))
layers.take(3, "model.layers.3.mlp.experts", experts=128, hidden=2048)
mixed = layers.ask(3, hidden, experts, weights)

A forward pass asks its layers one after the other, from one thread. `start_forward` begins to note which
versions of the weights its answers name, and `mixed` tells whether there were several: a service reloads
layer by layer.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from moeserve.proto import moe_pb2
from moeserve.proto.client import Choice, MoeClient, Reply
from moeserve.proto.errors import MoeError, Unavailable
from moeserve.proto.integrations.attached_service import AttachedService
from moeserve.proto.integrations.settings import TIMEOUT, Settings

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""Between two questions whether a service serves, or a reload has ended."""

WEIGHTED_BY_SERVICE = "Llama4"
"""The routing of layers whose router weights the service itself puts on the input."""

_INDEX = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


class NotServed(ValueError):
    """A layer of an engine that the service cannot answer for."""


class Service(Protocol):
    """What a process needs of a client: `MoeClient` is one."""

    def call(self, layer: int, hidden: Any, route: Choice) -> Reply:
        """One layer's experts, mixed, with the version of the weights."""

    def model(self) -> moe_pb2.GetModelReply:
        """The description of the model that is served."""


def layer_of(name: str) -> int:
    """The decoder layer in a module's name, such as 3 in `model.layers.3.mlp.experts`.

    NotServed: the name has no number, or several.
    """
    numbers = _INDEX.findall(name)
    if len(numbers) != 1:
        raise NotServed(f"the MoE layer {name} does not name one decoder layer, as model.layers.3.mlp does")
    return int(numbers[0])


def share_of(rows: int, rank: int, ranks: int) -> slice:
    """The rows that tensor-parallel rank `rank` of `ranks` asks for: all ranks have the same rows, and sum
    up.
    """
    return slice(rows * rank // ranks, rows * (rank + 1) // ranks)


@dataclass
class Counts:
    """What this process asked for so far."""

    calls: int = 0
    begun: int = 0  # of them, that were begun by `start`: something else was computed meanwhile
    rows: int = 0
    seconds: float = 0.0  # that forward passes waited for answers
    repeated: int = 0  # forward passes that were run again, since a reload came between their layers


@dataclass
class RemoteLayers:
    """The layers of one process. `service` is made of the settings' address at the first call where none is
    given.
    """

    settings: Settings
    service: Service | None = None
    taken: dict[int, str] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    _told: moe_pb2.GetModelReply | None = None
    _top_k: dict[int, int] = field(default_factory=dict)  # by layer, of what is served
    _versions: set[int] = field(default_factory=set)
    _tickets: dict[int, tuple[Future[Tensor], torch.device]] = field(default_factory=dict)
    _numbers: Any = field(default_factory=count)
    _asking: ThreadPoolExecutor | None = None

    @property
    def client(self) -> Service:
        """The way to the service. A process makes its own, after it has forked or was spawned."""
        if self.service is None:
            self.service = _service_of(self.settings)
        return self.service

    def begin(self) -> None:
        """Forgets what an earlier model of this process had taken, and asks anew what is served."""
        self.taken.clear()
        self._top_k.clear()
        self._told = None

    def served(self) -> moe_pb2.GetModelReply:
        """What is served. Waits for a service that does not answer yet, at most the settings' timeout."""
        if self._told is None:
            self._told = self._patiently()
        return self._told

    def take(self, layer: int, name: str, *, experts: int, hidden: int, top_k: int) -> moe_pb2.LayerInfo:
        """Puts the module `name` behind the service's layer; returns what is served there. top_k: experts
        that the engine chooses for a row, as many as the service's model does, or fewer.

        NotServed: no such layer is served, it has other sizes, or another module has it already.
        """
        reply = self.served()
        found = {info.layer: info for info in reply.layers}
        if layer in self.taken:
            raise NotServed(f"{name} and {self.taken[layer]} are both layer {layer}; moeserve serves one")
        if layer not in found:
            raise NotServed(
                f"{name} has experts, but {reply.model} at {self.settings.address} serves only the layers "
                f"{sorted(found)}"
            )
        ours, theirs = (experts, hidden), (found[layer].experts, found[layer].hidden)
        if ours != theirs:
            raise NotServed(f"{name}: E, H = {ours} in the engine, {theirs} in what {reply.model} serves")
        if top_k > found[layer].top_k:
            raise NotServed(
                f"{name}: {top_k} experts a row in the engine, at most {found[layer].top_k} in what "
                f"{reply.model} serves"
            )
        self.taken[layer], self._top_k[layer] = name, found[layer].top_k
        return found[layer]

    def check_architecture(self, declared: list[str]) -> None:
        """NotServed where another architecture is served than the engine's model declares."""
        reply = self.served()
        if declared and reply.architecture not in declared:
            raise NotServed(
                f"the engine's model is {declared[0]}, but {self.settings.address} serves {reply.model}, a "
                f"{reply.architecture}"
            )

    def missing(self) -> list[int]:
        """Layers that are served, and that nothing in this process has taken."""
        return sorted({info.layer for info in self.served().layers} - set(self.taken))

    def ask(self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Mixed rows [T, H] where and as `hidden` [T, H] lies; experts [T, K], -1 = none; weights [T, K].

        MoeError: the service did not answer within the settings' timeout; the message names the layer.
        """
        if not len(hidden):
            return torch.empty_like(hidden)
        begun = time.monotonic()
        ids, shares = experts.to("cpu", torch.int32), weights.to("cpu", torch.float32)
        if (more := self._top_k.get(layer, 0) - ids.shape[1]) > 0:  # the engine chooses fewer
            ids, shares = pad(ids, (0, more), value=-1), pad(shares, (0, more))
        route = Choice(ids.contiguous(), shares.contiguous())
        try:
            reply = self.client.call(layer, hidden.to("cpu").contiguous(), route)
        except MoeError as failed:
            name = self.taken.get(layer, f"layer {layer}")
            text = f"{name} got no answer of its experts at {self.settings.address}: {failed.message}"
            raise type(failed)(failed.code, failed.reason, text) from failed
        self._versions.add(reply.weights_version)
        self.counts.calls += 1
        self.counts.rows += len(hidden)
        self.counts.seconds += time.monotonic() - begun
        # a copy, since engines add to it in place and it may lie in the reply's own bytes
        return cast(Tensor, reply.hidden).to(hidden.device, copy=True)

    def start(self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor) -> int:
        """Begins what `ask` does in a thread; returns the number to `finish` it by.

        Rows of a GPU are on the host when it returns: the thread has another stream than its caller, which is
        not behind what the caller's has yet to compute.
        """
        if self._asking is None:
            self._asking = ThreadPoolExecutor(1, "moeserve-ask")
        ticket: int = next(self._numbers)
        self.counts.begun += 1
        rows = (one.to("cpu") for one in (hidden, experts, weights))
        self._tickets[ticket] = self._asking.submit(self.ask, layer, *rows), hidden.device
        return ticket

    def finish(self, ticket: int) -> Tensor:
        """Waits for what `start` began; it is bounded by the call's own timeout."""
        asked, device = self._tickets.pop(ticket)
        return asked.result().to(device)

    def start_forward(self) -> None:
        """Begins to note versions anew. Answers nobody waited for are waited for, and dropped."""
        for ticket in list(self._tickets):
            self._tickets.pop(ticket)[0].exception()
        self._versions.clear()

    def versions(self) -> frozenset[int]:
        """Versions of the weights that answers named since `start_forward`."""
        return frozenset(self._versions)

    def wait_one_version(self) -> int:
        """Waits until all layers are served with one version, and returns it.

        TimeoutError: they were not within the settings' timeout; an abandoned reload leaves layers so.
        """
        deadline = time.monotonic() + self.settings.timeout
        while True:
            self._told = None
            found = {info.layer: info.weights_version for info in self.served().layers}
            if len(set(found.values())) == 1:
                return int(next(iter(found.values())))
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{TIMEOUT}={self.settings.timeout} s passed while layers were served with weights "
                    f"versions {found}; a forward pass must not mix them: reload the service, and raise the "
                    "timeout above what a reload takes"
                )
            time.sleep(POLL_SECONDS)

    def _patiently(self) -> moe_pb2.GetModelReply:
        deadline = time.monotonic() + self.settings.timeout
        told = False
        while True:
            try:
                reply = self.client.model()
            except Unavailable as failed:
                if time.monotonic() > deadline:
                    raise
                if not told:
                    log.warning("waiting for the experts at %s: %s", self.settings.address, failed.message)
                told = True
            else:
                if reply.layers:
                    return reply
                if time.monotonic() > deadline:
                    raise ValueError(f"the service at {self.settings.address} serves no layer")
            time.sleep(POLL_SECONDS)


def _service_of(settings: Settings) -> Service:
    """The way to the service that the settings' mode names."""
    if settings.mode == "attached":
        return AttachedService(settings)
    return MoeClient(settings.address, timeout=settings.timeout, credentials=settings.credentials)


@contextmanager
def floats_kept(arguments: Iterable[Any]) -> Iterator[Callable[[], None]]:
    """A context around a forward pass, which may write over its floating-point inputs (embedded prompts):
    what it gives brings them back.
    """
    given = [one for one in arguments if isinstance(one, Tensor) and one.is_floating_point()]
    before = [one.clone() for one in given]

    def restore() -> None:
        for one, was in zip(given, before, strict=True):
            one.copy_(was)

    yield restore


Kept = Callable[[Iterable[Any]], AbstractContextManager[Callable[[], None]]]
"""A context around a forward pass of these inputs; what it gives brings back what the pass has used up."""


def of_one_version(
    forward: Any,
    layers: RemoteLayers,
    is_mixed: Callable[[frozenset[int]], bool],
    kept: Kept = floats_kept,
) -> Any:
    """A model's forward pass that is run again where its layers saw different weights.

    It can be: it writes the same key-value slots again, and `kept` brings back its inputs. is_mixed: tells of
    the versions that this process saw, and other tensor-parallel ranks, whether they were several; all of
    these ranks run the pass again, or none.
    """

    @functools.wraps(forward)
    def whole(*arguments: Any, **options: Any) -> Any:
        with kept((*arguments, *options.values())) as restore:
            while True:
                layers.start_forward()
                answer = forward(*arguments, **options)
                if not is_mixed(layers.versions()):
                    return answer
                layers.counts.repeated += 1
                version = layers.wait_one_version()
                restore()
                log.warning(
                    "a forward pass saw a reload between its layers; it is run again with version %d", version
                )

    return whole
