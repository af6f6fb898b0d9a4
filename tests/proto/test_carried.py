"""Messages with large data beside them: on the wire they are ordinary ones, and garbage is what it was."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from moeserve.proto import moe_pb2
from moeserve.proto.client.payload import InlineRows
from moeserve.proto.tensors import describe_into, encode_into, plain
from moeserve.proto.transports.carried import CARRIED_BYTES, Carried, beside, packed, unpacking

ROWS = np.arange(CARRIED_BYTES, dtype=np.float32).reshape(8, -1)
UNPACK = unpacking(moe_pb2.ForwardRequest)


def request(rows: np.ndarray = ROWS) -> moe_pb2.ForwardRequest:
    made = moe_pb2.ForwardRequest(layer=3, job_id="a.0", timeout_ms=7)
    encode_into(made.hidden, plain(rows, "x"))
    encode_into(made.choice.ids, plain(np.zeros((8, 2), dtype=np.int32), "x"))
    return made


def bare() -> moe_pb2.ForwardRequest:
    made = request(np.zeros((8, 1), dtype=np.float32))
    made.hidden.Clear()
    describe_into(made.hidden, plain(ROWS, "x").spec)
    return made


def test_a_carried_message_is_an_ordinary_one_to_every_parser() -> None:
    assert moe_pb2.ForwardRequest.FromString(packed(beside(bare(), ROWS))) == request()
    assert packed(request()) == request().SerializeToString()


@pytest.mark.parametrize("sent", [request(), beside(bare(), ROWS)], ids=["whole", "carried"])
def test_large_data_is_a_view_of_what_came(sent: object) -> None:
    received = packed(sent)
    came = UNPACK(received)
    assert isinstance(came, Carried)
    assert came.data.obj is received and bytes(came.data) == ROWS.tobytes()
    assert came.message.hidden.WhichOneof("payload") == "data" and not came.message.hidden.data
    came.message.hidden.data = bytes(came.data)
    assert came.message == request()


def test_small_data_stays_in_its_message() -> None:
    small = request(np.ones((8, 4), dtype=np.float32))
    assert UNPACK(small.SerializeToString()) == small


def test_a_reply_is_carried_alike() -> None:
    reply = moe_pb2.ForwardReply(epoch=4, weights_version=5)
    describe_into(reply.hidden, plain(ROWS, "x").spec)
    came = unpacking(moe_pb2.ForwardReply)(packed(beside(reply, ROWS)))
    assert isinstance(came, Carried)
    assert (came.message.epoch, came.message.weights_version) == (4, 5)
    assert bytes(came.data) == ROWS.tobytes()


def tensor(**fields: object) -> bytes:
    """A request with these fields of hidden, as bytes; several are merged by parsers."""
    return moe_pb2.ForwardRequest(hidden=moe_pb2.Tensor(**fields)).SerializeToString()  # type: ignore[arg-type]


LARGE = b"\1" * CARRIED_BYTES
REGION = moe_pb2.Region(name="r", offset=1, size=2)
ODD = {
    "data twice": tensor(data=LARGE) + tensor(data=b"\2" * CARRIED_BYTES),
    "a region after data": tensor(data=LARGE) + tensor(region=REGION),
    "data after a region": tensor(region=REGION) + tensor(data=LARGE),
    "large elsewhere": moe_pb2.ForwardRequest(job_id="x" * CARRIED_BYTES).SerializeToString(),
    "unknown fields": b"\xa0\x06\x01" + tensor(data=LARGE),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_messages_mean_what_they_mean_to_protobuf(name: str) -> None:
    came = UNPACK(ODD[name])
    if isinstance(came, Carried):
        came.message.hidden.data = bytes(came.data)
        came = came.message
    assert came == moe_pb2.ForwardRequest.FromString(ODD[name])


def parsed(received: bytes) -> moe_pb2.ForwardRequest | None:
    """What protobuf reads; None where it refuses, and `UNPACK` too."""
    try:
        return moe_pb2.ForwardRequest.FromString(received)
    except DecodeError:
        with pytest.raises(DecodeError):
            UNPACK(received)
        return None


def test_every_prefix_of_a_message_is_refused_or_read_as_protobuf_does() -> None:
    whole = packed(beside(bare(), ROWS))
    for cut in [*range(120), *range(len(whole) - 40, len(whole))]:
        received = whole[:cut]
        wanted = parsed(received)
        if wanted is None:
            continue
        came = UNPACK(received)
        assert not isinstance(came, Carried) and came == wanted


def test_random_changes_of_a_message_are_read_as_protobuf_does() -> None:
    random, whole = np.random.default_rng(0), packed(request())
    for _ in range(300):
        changed = bytearray(whole)
        for at in random.integers(0, 64, 3):
            changed[at] = random.integers(0, 256)
        received = bytes(changed)
        wanted = parsed(received)
        if wanted is None:
            continue
        came = UNPACK(received)
        if isinstance(came, Carried):
            came.message.hidden.data = bytes(came.data)
            came = came.message
        assert came == wanted


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("columns", [1, CARRIED_BYTES])
def test_a_client_reads_an_answer_either_way(carry: bool, columns: int) -> None:
    rows = plain(np.arange(2.0 * columns, dtype=np.float32).reshape(2, -1), "x")
    payload, asked = InlineRows(rows), moe_pb2.ForwardRequest()
    if carry:
        payload.carry()
    payload.fill(asked)
    there = moe_pb2.ForwardRequest.FromString(packed(payload.sent(asked)))
    assert there.hidden.data == rows.storage.tobytes()
    reply = moe_pb2.ForwardReply(hidden=there.hidden, epoch=1)
    came = unpacking(moe_pb2.ForwardReply)(reply.SerializeToString()) if carry else reply
    answer = payload.answer(payload.received(came), None)
    assert np.array_equal(answer, rows.storage)
