"""Messages as bytes: they come back as they were, and what is no message is refused with a short reason."""

from __future__ import annotations

import random
import socket
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest

from moeserve.dispatch.members import Members
from moeserve.runtime.control.frames import LENGTH, decoded, encoded
from moeserve.runtime.control.messages import (
    epoch_from,
    epoch_message,
    header_from,
    header_message,
    load_from,
    report_message,
)
from moeserve.runtime.control.stream import Stream, StreamClosed
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.step import Header

PLAIN: dict[str, Any] = {
    "kind": "anything",
    "numbers": [0, -1, 1 << 40, 0.5, float("inf"), None, True],
    "bytes": bytes(range(256)),
    "text": "w\u00f6rter \U0001f600",
    "by number": {0: ["a", "b"], 7: []},
    "empty": {},
}


def travelled(message: dict[str, Any]) -> dict[str, Any]:
    frame = encoded(message)
    assert struct.unpack("<I", frame[:4]) == (len(frame) - 4,)
    return decoded(frame[LENGTH.size :])


def test_a_message_comes_back_as_it_was() -> None:
    assert travelled(PLAIN) == PLAIN


def test_headers_epochs_and_reports_come_back_as_they_were() -> None:
    header = Header(1 << 33, 4, 3, (8, 0, 2), ((17, 8), (1 << 50, 1)))
    assert header_from(travelled(header_message(header, 2))) == header
    epoch = Epoch.first(Mesh(4, 1, 4), layers=3, experts=8, redundant=4, members=Members.of_ranks(4))
    found = epoch_from(travelled(epoch_message(epoch)))
    assert (found.placement.slots == epoch.placement.slots).all()
    assert (found.members, found.mesh, found.versions) == (epoch.members, epoch.mesh, epoch.versions)
    tokens = np.arange(24, dtype=np.int64).reshape(2, 3, 4) << 40
    assert (load_from(travelled(report_message(1, (2, 3), tokens)), (2, 3, 4)) == tokens).all()


def test_a_text_that_utf8_cannot_hold_travels_with_a_question_mark() -> None:
    message = {"kind": "failed", "reason": "cannot read layer-\udcff.bin", "more": [("\ud800", b"\xff", 3)]}
    assert travelled(message) == {
        "kind": "failed",
        "reason": "cannot read layer-?.bin",
        "more": [["?", b"\xff", 3]],
    }


def test_a_value_that_is_no_plain_one_is_not_sent() -> None:
    with pytest.raises(TypeError, match=r"numpy\.int64"):
        encoded({"kind": "done", "step": np.int64(3)})


NONSENSE = {
    "nothing": b"",
    "JSON": b'{"kind": "hello"}',
    "a list": b"\x91\xc0",
    "no kind": b"\x80",
    "a kind that is a number": b"\x81\xa4kind\x07",
    "a key that is a number": b"\x81\x07\xc0",
    "a key that is a map": b"\x81\xa1a\x81\x80\xc0",
    "no UTF-8": b"\x81\xa4kind\xa1\xff",
    "more behind": b"\x81\xa4kind\xa1a\xc0",
    "an unused code": b"\x81\xa4kind\xc1",
    "too deep": b"\x81\xa4kind" + b"\x91" * 100_000 + b"\xc0",
    "a long array": b"\x81\xa4kind\xdd\xff\xff\xff\xff",
    "a long map": b"\xdf\xff\xff\xff\xff",
    "a long text": b"\x81\xa4kind\xdb\xff\xff\xff\xff",
    "long arrays": b"\x81\xa4kind" + b"\xdd\x7f\xff\xff\xff" * 400,
    "a time that is none": b"\x81\xa4kind\xc7\xff\xff" + b"a" * 255,
}


@pytest.mark.parametrize("what", NONSENSE)
def test_what_is_no_message_is_refused_with_a_short_reason_and_little_memory(what: str) -> None:
    decoded(encoded({"kind": "a"})[4:])
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="a frame is no message: ") as refused:
            decoded(NONSENSE[what])
        assert len(str(refused.value)) < 1000
        assert tracemalloc.get_traced_memory()[1] < len(NONSENSE[what]) + (1 << 20)
    finally:
        tracemalloc.stop()


def test_any_bytes_are_a_message_or_refused() -> None:
    draw = random.Random(0)
    whole = bytearray(encoded(PLAIN)[LENGTH.size :])
    for _ in range(20_000):
        bent = bytearray(whole[: draw.randrange(len(whole) + 1)])
        for _ in range(draw.randrange(4)):
            if bent:
                bent[draw.randrange(len(bent))] = draw.randrange(256)
        try:
            assert isinstance(decoded(bytes(bent))["kind"], str)
        except ValueError as refused:
            assert len(str(refused)) < 1000


def test_a_stream_that_brings_nonsense_ends_with_the_reason() -> None:
    one, other = socket.socketpair()
    stream = Stream(other)
    one.sendall(struct.pack("<I", 2) + b"\xc1\xc1")
    with pytest.raises(StreamClosed, match="a frame is no message"):
        stream.receive()
    one.close()
    stream.close()


def test_a_frame_that_was_encoded_once_can_be_sent_to_many() -> None:
    pairs, frame = [socket.socketpair() for _ in range(3)], encoded(PLAIN)
    for one, other in pairs:
        sending, receiving = Stream(one), Stream(other)
        sending.send_bytes(frame)
        assert receiving.receive() == PLAIN
        sending.close()
        receiving.close()
