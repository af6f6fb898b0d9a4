"""A request's tensors as a door gives them to its rank, and the rank's answer as the door sends it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from torch import Tensor

from moeserve.proto import moe_pb2
from moeserve.proto.tensors import (
    FLOATS,
    INTEGERS,
    Spec,
    TensorError,
    as_torch,
    describe_into,
    plain,
    spec_of,
)
from moeserve.proto.transports.carried import CARRIED_BYTES, Carried, beside
from moeserve.runtime.doors.payloads import inline, shared_memory
from moeserve.runtime.doors.payloads.regions import Regions
from moeserve.runtime.doors.payloads.transport import Lent, Room, Transport, nothing_to_close

TRANSPORTS = (inline.ENTRY, shared_memory.ENTRY)


class Closes(Protocol):
    """Regions that are held for a call."""

    def close(self) -> None:
        """Lets go of them; a second time does nothing."""


@dataclass(frozen=True, eq=False)
class _Placed:
    """Where a request's hidden states lie and its answer goes."""

    spec: Spec
    hidden: Lent
    room: Room
    home: Tensor | None  # the place of the answer, where the device may write it


class OpenRequest:
    """The tensors of one ForwardRequest; close it when the answer is sent, or when there will be none.

    hidden: [T, H], may be the caller's own memory: read only. Either experts [T, K] (int32 or int64) and
    weights [T, K] (fp32, bf16 or fp16), or logits [T, E], are set; these are copies, which the caller cannot
    change after they are checked. home is the place of the answer `[T, H]`, of the request's dtype, where the
    device may write it there.
    """

    def __init__(self, placed: _Placed, held: Closes) -> None:
        self.hidden = placed.hidden.tensor
        self.reached = placed.hidden.reached  # they lie where the device may read them
        self.experts: Tensor | None = None
        self.weights: Tensor | None = None
        self.logits: Tensor | None = None
        self.home = placed.home
        self._held = held
        self._spec = placed.spec
        self._room = placed.room

    def reply(self, hidden: Tensor, epoch: int, weights_version: int) -> moe_pb2.ForwardReply:
        """The reply for the answer `hidden` [T, H] of the request's dtype, on any device."""
        self._check(hidden)
        reply = moe_pb2.ForwardReply(epoch=epoch, weights_version=weights_version)
        self._room.put(hidden, reply.hidden)  # filled in place: a message set as a field is copied whole
        return reply

    def reply_beside(
        self, hidden: Tensor, epoch: int, weights_version: int
    ) -> moe_pb2.ForwardReply | Carried[moe_pb2.ForwardReply]:
        """Makes the same reply, a large inline answer beside its message: only gRPC copies it then."""
        if not self._room.inline or hidden.nbytes < CARRIED_BYTES:
            return self.reply(hidden, epoch, weights_version)
        self._check(hidden)
        reply = moe_pb2.ForwardReply(epoch=epoch, weights_version=weights_version)
        describe_into(reply.hidden, self._spec)
        return beside(reply, plain(hidden, "hidden").storage)

    def _check(self, hidden: Tensor) -> None:
        if tuple(hidden.shape) != self._spec.shape or hidden.dtype != self.hidden.dtype:
            raise ValueError(
                f"the answer is {hidden.dtype} {list(hidden.shape)}, the request was {self._spec}"
            )

    def close(self) -> None:
        """Lets go of the caller's regions; a second time does nothing."""
        self._held.close()

    def __enter__(self) -> OpenRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Payloads:
    """Opens requests with the transports of the table, over the regions of this process."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._transports: dict[str, Transport] = {entry.payload: entry.build(regions) for entry in TRANSPORTS}

    def open(self, request: moe_pb2.ForwardRequest, data: memoryview | None = None) -> OpenRequest:
        """The request's tensors, checked against each other but not against a model.

        data: the bytes of the hidden states, where they lie beside the request.

        Raises TensorError naming the field, its value and what it takes; UnknownRegion for a region that is
        not there. Whatever was held before the error is let go.
        """
        placed, held = self._placed(request, data)
        try:
            opened = OpenRequest(placed, held)
            route = request.WhichOneof("route")
            if route == "choice":
                opened.experts, opened.weights = self._choice(request.choice, placed.spec)
            elif route == "logits":
                opened.logits = self._copy(request.logits, "logits", FLOATS, placed.spec)
            else:
                raise TensorError(
                    "route", "neither choice nor logits is set; one of them says which experts to run"
                )
        except BaseException:
            held.close()
            raise
        return opened

    def _placed(self, request: moe_pb2.ForwardRequest, data: memoryview | None) -> tuple[_Placed, Closes]:
        """Where rows lie and where the answer goes. A caller who asks again from the same place of a region,
        for an answer in the same place, gets the same views: they were checked, and their regions are there.
        """
        rows, there = request.hidden.region, request.output
        if data is not None or not request.HasField("output") or not rows.name:
            return self._viewed(request, data)
        shape = request.hidden.dtype, *request.hidden.shape
        key = (*shape, rows.offset, rows.size, there.name, there.offset, there.size)
        if (again := self._regions.again(rows.name, key)) is not None:
            views, held = again
            assert isinstance(views, _Placed)
            return views, held
        placed, held_anew = self._viewed(request, None)
        if placed.hidden.hold is not None and placed.room.hold is not None:
            self._regions.remember((placed.hidden.hold, placed.room.hold), key, placed)
        return placed, held_anew

    def _viewed(self, request: moe_pb2.ForwardRequest, data: memoryview | None) -> tuple[_Placed, ExitStack]:
        with ExitStack() as held:
            spec = spec_of(request.hidden, "hidden", rank=2, dtypes=FLOATS)
            if data is None:
                hidden = self._lend(held, request.hidden, spec, "hidden")
            else:
                hidden = Lent(as_torch(data, spec, "hidden"), nothing_to_close)
            _check_apart(request.hidden.region, request.output)
            room = self._room(held, request, spec)
            return _Placed(spec, hidden, room, room.reached), held.pop_all()

    def _choice(self, choice: moe_pb2.Choice, hidden: Spec) -> tuple[Tensor, Tensor]:
        experts = self._copy(choice.ids, "choice.ids", INTEGERS, hidden)
        weights = self._copy(choice.weights, "choice.weights", FLOATS, hidden)
        if weights.shape != experts.shape:
            text = (
                f"shape {list(weights.shape)}, but choice.ids is {list(experts.shape)}: a weight for every id"
            )
            raise TensorError("choice.weights", text)
        return experts, weights

    def _copy(self, message: moe_pb2.Tensor, field: str, dtypes: tuple[str, ...], hidden: Spec) -> Tensor:
        spec = spec_of(message, field, rank=2, dtypes=dtypes)
        if spec.shape[0] != hidden.shape[0]:
            raise TensorError(
                field, f"shape {list(spec.shape)} has {spec.shape[0]} rows, but hidden has {hidden.shape[0]}"
            )
        if message.WhichOneof("payload") == "data":
            return as_torch(message.data, spec, field)  # of bytes of its own, which nobody changes
        with ExitStack() as held:
            return self._lend(held, message, spec, field).tensor.clone()

    def _lend(self, held: ExitStack, message: moe_pb2.Tensor, spec: Spec, field: str) -> Lent:
        payload = message.WhichOneof("payload")
        lent = self._transports[str(payload)].lend(message, spec, field)
        held.callback(lent.close)
        return lent

    def _room(self, held: ExitStack, request: moe_pb2.ForwardRequest, spec: Spec) -> Room:
        payload = "region" if request.HasField("output") else "data"
        room = self._transports[payload].room(request.output, spec)
        held.callback(room.close)
        return room


def _check_apart(rows: moe_pb2.Region, answer: moe_pb2.Region) -> None:
    """Raises TensorError where an answer is wanted over its own rows: a step may be run again, and they stay
    as they are until the answer is there.
    """
    if rows.name and rows.name == answer.name:
        first, second = sorted((rows, answer), key=lambda region: region.offset)
        if second.offset < first.offset + first.size:
            at = f"bytes {answer.offset} to {answer.offset + answer.size} of a region"
            over = f"the rows' {rows.offset} to {rows.offset + rows.size}"
            raise TensorError(
                "output", f"{at} lie over {over}; the rows are needed until the answer is there"
            )
