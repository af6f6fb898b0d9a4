"""Payloads: where the hidden states of a part lie during its call, and where its answer is read from."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moeserve.proto import moe_pb2
from moeserve.proto.client.batch import ClientBatch
from moeserve.proto.errors import MoeError, NotFound, Unavailable
from moeserve.proto.tensors import (
    DType,
    Plain,
    TensorError,
    as_numpy,
    describe_into,
    encode_into,
    spec_of,
)
from moeserve.proto.transports.carried import CARRIED_BYTES, Carried, beside
from moeserve.proto.transports.copies import copy_into
from moeserve.proto.transports.region_calls import RegionCalls
from moeserve.proto.transports.shared_memory import (
    RegionPool,
    RemoteRegion,
    SharedTensor,
    aligned,
    region_size,
)

TRANSPORTS = ("auto", "inline", "shared_memory")

SHARE_BYTES = 1 << 11
"""Hidden states from this size on go through shared memory: their request is one packet to the lane's
process, where a gRPC call takes several threads on either side.
"""


class Payload(Protocol):
    """The hidden states of one attempt at one part."""

    @property
    def calls(self) -> RegionCalls | None:
        """What sends the request over the lease of its region; None where only gRPC can."""

    def lost(self, error: Unavailable) -> MoeError:
        """What is wrong where the lease of its region cannot take the request any more."""

    def fill(self, request: moe_pb2.ForwardRequest) -> None:
        """Puts the rows where the lane reads them, and says so in `request`."""

    def answer(self, reply: moe_pb2.ForwardReply, into: NDArray[Any] | None) -> NDArray[Any]:
        """The answer's rows in the storage type, `into` where that is given.

        TensorError when not as asked for.
        """

    def done(self) -> None:
        """The answer was read."""

    def abandon(self) -> None:
        """There was no answer, and one may still be written later."""


class InlineRows:
    """Rows that ride in the message, and their answer in the reply.

    Large ones may be carried beside the message by who sends it, from `carry` on: then only gRPC copies them.
    """

    calls = None

    def __init__(self, rows: Plain) -> None:
        self._rows = rows
        self._carried = False
        self._came: memoryview | None = None  # the answer's data, where it came beside its message

    @property
    def dtype(self) -> DType:
        """Of the rows."""
        return self._rows.dtype

    def carry(self, least: int = CARRIED_BYTES) -> None:
        """Has rows of so many bytes on carried: what is sent is what `sent` gives, and `received` is told
        what came.
        """
        self._carried = self._rows.spec.nbytes >= least

    def lost(self, error: Unavailable) -> MoeError:
        """`error`: there is no region."""
        return error

    def fill(self, request: moe_pb2.ForwardRequest) -> None:
        """Copies the rows into the message, unless they are carried beside it."""
        if self._carried:
            describe_into(request.hidden, self._rows.spec)
        else:
            encode_into(request.hidden, self._rows)

    def sent(
        self, request: moe_pb2.ForwardRequest
    ) -> moe_pb2.ForwardRequest | Carried[moe_pb2.ForwardRequest]:
        """The filled request, with the rows beside it where they are carried."""
        return beside(request, self._rows.storage) if self._carried else request

    def received(self, came: moe_pb2.ForwardReply | Carried[moe_pb2.ForwardReply]) -> moe_pb2.ForwardReply:
        """The reply, its data kept for `answer`."""
        if isinstance(came, Carried):
            self._came = came.data
            return came.message
        return came

    def answer(self, reply: moe_pb2.ForwardReply, into: NDArray[Any] | None) -> NDArray[Any]:
        """A view of the bytes that came, or a copy `into`: of memory that the caller may write to."""
        if self._came is None:
            return moved(inline_answer(reply, self._rows), into)
        check_answer(reply, self._rows)
        return moved(as_numpy(self._came, self._rows.spec, "reply.hidden").storage, into)

    def done(self) -> None:
        """Does nothing: no region is held."""

    def abandon(self) -> None:
        """Does nothing: no region is held."""


class Pooled:
    """Rows and answer lie in a region that calls to this lane take turns with: one copy in, one out."""

    def __init__(self, rows: Plain, region: RemoteRegion, pool: RegionPool) -> None:
        self._rows = rows
        self._region = region
        self._pool = pool
        self._output = aligned(rows.spec.nbytes)

    @staticmethod
    def size(nbytes: int) -> int:
        """Bytes of the region for `nbytes` of rows and as many of answer."""
        return region_size(2 * aligned(nbytes))

    @property
    def calls(self) -> RegionCalls | None:
        """Those over the lease of this region."""
        return self._region.calls

    def lost(self, error: Unavailable) -> MoeError:
        """`error`: another attempt has another region."""
        return error

    def fill(self, request: moe_pb2.ForwardRequest) -> None:
        """Copies the rows into the region."""
        spec = self._rows.spec
        copy_into(self._region.view(0, spec).storage, self._rows.storage)
        describe_into(request.hidden, spec)
        request.hidden.region.CopyFrom(self._region.message(0, spec))
        request.output.CopyFrom(self._region.message(self._output, spec))

    def answer(self, reply: moe_pb2.ForwardReply, into: NDArray[Any] | None) -> NDArray[Any]:
        """A copy, since the next call will write over the region."""
        check_placed(reply, self._rows)
        found = self._region.view(self._output, self._rows.spec).storage
        into = np.empty_like(found) if into is None else into
        copy_into(into, found)
        return into

    def done(self) -> None:
        """Lets the next call have the region."""
        self._pool.give(self._region)

    def abandon(self) -> None:
        """Gives the region back to the lane: a late answer must not land in another call's."""
        self._region.close()


class Placed:
    """Rows, answer or both lie where the caller allocated them; what was not allocated rides inline."""

    def __init__(self, batch: ClientBatch) -> None:
        self._batch = batch

    @property
    def calls(self) -> RegionCalls | None:
        """Those over the lease of the output's region; an inline answer is too long for a packet."""
        return None if self._batch.output is None else self._batch.output.region.calls

    def lost(self, error: Unavailable) -> MoeError:
        """NotFound: no other attempt has another region."""
        text = (
            f"output: its region is gone, closed here or with its lane's process; allocate it anew: {error}"
        )
        return NotFound("NOT_FOUND", "unknown_region", text)

    def fill(self, request: moe_pb2.ForwardRequest) -> None:
        """Names the caller's regions in the request."""
        batch = self._batch
        if isinstance(batch.like, SharedTensor):
            describe_into(request.hidden, batch.like.spec)
            request.hidden.region.CopyFrom(batch.like.place)
        else:
            encode_into(request.hidden, batch.hidden)
        if batch.output is not None:
            request.output.CopyFrom(batch.output.place)

    def answer(self, reply: moe_pb2.ForwardReply, into: NDArray[Any] | None) -> NDArray[Any]:
        """A view of the place, or of the bytes that came. A placed batch is one part: nothing is joined."""
        if self._batch.output is None:
            return moved(inline_answer(reply, self._batch.hidden), into)
        check_placed(reply, self._batch.hidden)
        return self._batch.output.plain.storage

    def done(self) -> None:
        """Does nothing: the regions are the caller's."""

    def abandon(self) -> None:
        """Does nothing: the regions are the caller's."""


def moved(found: NDArray[Any], into: NDArray[Any] | None) -> NDArray[Any]:
    """`found`, or a copy of it where it may not be written to, or `into` filled with it."""
    if into is None:
        return found if found.flags.writeable else found.copy()
    copy_into(into, found)
    return into


def inline_answer(reply: moe_pb2.ForwardReply, rows: Plain) -> NDArray[Any]:
    """The answer in the reply's bytes; TensorError when it is not like `rows`."""
    check_answer(reply, rows)
    return as_numpy(reply.hidden.data, rows.spec, "reply.hidden").storage


def check_placed(reply: moe_pb2.ForwardReply, rows: Plain) -> None:
    """TensorError unless the reply says that the answer, like `rows`, was written where it was asked for."""
    check_answer(reply, rows)
    if reply.hidden.WhichOneof("payload") != "region":
        raise TensorError("reply.hidden", "it rides inline, but was asked for in a region")


def check_answer(reply: moe_pb2.ForwardReply, rows: Plain) -> None:
    """TensorError unless dtype and shape of the answer are those of `rows`."""
    found = spec_of(reply.hidden, "reply.hidden", rank=2, dtypes=(rows.dtype.name,))
    if found != rows.spec:
        raise TensorError("reply.hidden", f"it is {found}, but {rows.spec} was asked for")


def shares(transport: str, nbytes: int, lane: moe_pb2.Lane, host: str) -> bool:
    """Whether `nbytes` of hidden states go to `lane` through shared memory.

    Raises MoeError when the caller insists on it and the lane runs where memory cannot be shared with it.
    """
    near = bool(host) and lane.host_id == host
    if transport == "shared_memory" and not near:
        text = (
            f"lane {lane.rank} at {lane.address} cannot share memory with this process (host {host!r}, lane's"
        )
        raise MoeError(
            "FAILED_PRECONDITION", "", f"{text} {lane.host_id!r}); use transport='auto' or 'inline'"
        )
    return transport != "inline" and near and (transport == "shared_memory" or nbytes >= SHARE_BYTES)
