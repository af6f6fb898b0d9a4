"""A request's tensors on their way in and out: every transport, and everything that does not fit refused."""

import gc
import weakref
from multiprocessing import shared_memory

import numpy as np
import pytest
import torch

from moeserve.proto import moe_pb2
from moeserve.proto.tensors import Spec, TensorError, encode, known, plain
from moeserve.proto.transports.shared_memory import RemoteRegion, SharedTensor
from moeserve.runtime.doors.payloads import TRANSPORTS, Payloads, Regions
from moeserve.runtime.doors.payloads.errors import UnknownRegion
from moeserve.runtime.doors.payloads.regions import MOST_VIEWS, RegionLimits


@pytest.fixture
def kept():
    made = Regions()
    yield made
    made.close()


def make(kept: Regions, size: int = 8192) -> moe_pb2.CreateRegionReply:
    name, size = kept.create(size)
    return moe_pb2.CreateRegionReply(name=name, size=size, socket=kept.socket)


def request(hidden: moe_pb2.Tensor, ids=None, weights=None, **more) -> moe_pb2.ForwardRequest:
    choice = moe_pb2.Choice(
        ids=encode(plain(torch.zeros(2, 1, dtype=torch.int32) if ids is None else ids, "choice.ids")),
        weights=encode(plain(torch.ones(2, 1) if weights is None else weights, "choice.weights")),
    )
    return moe_pb2.ForwardRequest(hidden=hidden, choice=choice, **more)


HIDDEN = torch.arange(8, dtype=torch.float32).reshape(2, 4)


def placed(kept: Regions) -> SharedTensor:
    return SharedTensor(RemoteRegion.open(make(kept)), 64, Spec(known("x", "fp32"), (2, 4)), 0)


@pytest.mark.parametrize("entry", TRANSPORTS, ids=lambda entry: entry.name)
def test_every_transport_brings_the_same_bytes_there_and_back(kept, entry):
    tensor, output = placed(kept), placed(kept)
    tensor.array[:] = HIDDEN.numpy()
    spec = moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=(2, 4))
    if entry.payload == "region":
        spec.region.CopyFrom(tensor.place)
        asked = request(spec, output=output.place)
    else:
        spec.data = HIDDEN.numpy().tobytes()
        asked = request(spec)
    with Payloads(kept).open(asked) as opened:
        assert torch.equal(opened.hidden, HIDDEN)
        assert sum(status.in_use for status in kept.list()) == (2 if entry.payload == "region" else 0)
        reply = opened.reply(opened.hidden * 2, epoch=3, weights_version=4)
    assert (reply.epoch, reply.weights_version) == (3, 4)
    assert reply.hidden.WhichOneof("payload") == entry.payload
    got = (
        output.tensor
        if entry.payload == "region"
        else torch.frombuffer(bytearray(reply.hidden.data), dtype=torch.float32)
    )
    assert torch.equal(got.reshape(2, 4), HIDDEN * 2)
    assert [status.in_use for status in kept.list()] == [0, 0]


def test_hidden_states_in_a_region_are_not_copied_but_ids_and_weights_are(kept):
    tensor = placed(kept)
    region = tensor.region
    ids = region.view(1024, Spec(known("x", "int64"), (2, 1)))
    weights = region.view(2048, Spec(known("x", "fp32"), (2, 1)))
    logits_free = request(moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=(2, 4), region=tensor.place))
    for message, view, offset in (
        (logits_free.choice.ids, ids, 1024),
        (logits_free.choice.weights, weights, 2048),
    ):
        message.dtype = view.dtype.code
        message.region.CopyFrom(region.message(offset, view.spec))
    opened = Payloads(kept).open(logits_free)
    tensor.array[:], ids.storage[:], weights.storage[:] = 5, 10**9, 3
    assert opened.hidden.tolist() == [[5.0] * 4] * 2
    assert opened.experts.tolist() == [[0], [0]] and opened.experts.dtype == torch.int64
    assert opened.weights.tolist() == [[0], [0]]
    opened.close()


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        (
            lambda r: moe_pb2.Region(name="region-1-forged", offset=0, size=32),
            UnknownRegion,
            "hidden: this lane has no region",
        ),
        (
            lambda r: moe_pb2.Region(name=r.name, offset=8192 - 31, size=32),
            TensorError,
            "hidden: 32 bytes at offset 8161 leave",
        ),
        (
            lambda r: moe_pb2.Region(name=r.name, offset=2**64 - 16, size=32),
            TensorError,
            "hidden: 32 bytes at offset .* leave",
        ),
        (
            lambda r: moe_pb2.Region(name=r.name, offset=0, size=31),
            TensorError,
            r"hidden: a region of 31 bytes, but fp32 \[2, 4\] takes 32",
        ),
        (
            lambda r: moe_pb2.Region(name=r.name, offset=2, size=32),
            TensorError,
            "hidden: its region does not start at a multiple of 4",
        ),
    ],
    ids=["name", "offset", "overflow", "size", "alignment"],
)
def test_a_forged_region_is_refused_and_nothing_stays_held(kept, asked, kind, text):
    region = RemoteRegion.open(make(kept))
    wrong = request(moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=(2, 4), region=asked(region)))
    with pytest.raises(kind, match=text):
        Payloads(kept).open(wrong)
    inline = request(encode(plain(HIDDEN, "hidden")), output=asked(region))
    with pytest.raises(
        kind, match=text.replace("hidden:", "output:").replace("but fp32", "but the answer fp32")
    ):
        Payloads(kept).open(inline)
    assert [status.in_use for status in kept.list()] == [0]
    region.close()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            lambda: moe_pb2.ForwardRequest(hidden=encode(plain(HIDDEN, "h"))),
            "route: neither choice nor logits is set",
        ),
        (lambda: moe_pb2.ForwardRequest(), "hidden: dtype number 0"),
        (
            lambda: request(encode(plain(HIDDEN[:1], "h"))),
            r"choice.ids: shape \[2, 1\] has 2 rows, but hidden has 1",
        ),
        (
            lambda: request(encode(plain(HIDDEN, "h")), weights=torch.ones(2, 3)),
            r"choice.weights: shape \[2, 3\], but choice.ids is \[2, 1\]",
        ),
        (
            lambda: request(encode(plain(HIDDEN, "h")), ids=torch.ones(2, 1)),
            "choice.ids: dtype fp32 is not one of int32, int64",
        ),
        (
            lambda: moe_pb2.ForwardRequest(
                hidden=encode(plain(HIDDEN, "h")), logits=encode(plain(HIDDEN[:1], "l"))
            ),
            r"logits: shape \[1, 4\] has 1 rows, but hidden has 2",
        ),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(kept, wrong, text):
    with pytest.raises(TensorError, match=text):
        Payloads(kept).open(wrong())


def test_an_answer_unlike_its_question_is_an_error_of_ours(kept):
    with (
        Payloads(kept).open(request(encode(plain(HIDDEN, "h")))) as opened,
        pytest.raises(ValueError, match="the answer is"),
    ):
        opened.reply(HIDDEN.double(), 1, 1)


def test_logits_are_a_copy(kept):
    asked = moe_pb2.ForwardRequest(hidden=encode(plain(HIDDEN, "h")), logits=encode(plain(HIDDEN, "l")))
    with Payloads(kept).open(asked) as opened:
        assert opened.experts is None and torch.equal(opened.logits, HIDDEN)
        opened.logits.zero_()
        assert torch.equal(opened.hidden, HIDDEN)


def test_a_call_from_the_same_place_is_given_the_same_views(kept):
    tensor, output = placed(kept), placed(kept)
    asked = request(moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=(2, 4), region=tensor.place))
    asked.output.CopyFrom(output.place)
    payloads, seen = Payloads(kept), []
    for turn in range(3):
        tensor.array[:] = HIDDEN.numpy() + turn
        with payloads.open(asked) as opened:
            seen.append(opened.hidden)
            assert torch.equal(opened.hidden, HIDDEN + turn)
            assert [status.in_use for status in kept.list()] == [1, 1]
            opened.reply(opened.hidden * 2, epoch=1, weights_version=1)
        opened.close()
        assert [status.in_use for status in kept.list()] == [0, 0]
        assert torch.equal(output.tensor.reshape(2, 4), (HIDDEN + turn) * 2)
    assert seen[1] is seen[2] is seen[0]
    for change in ("dtype", "shape", "offset", "output"):  # what says otherwise is looked at anew
        other = moe_pb2.ForwardRequest.FromString(asked.SerializeToString())
        if change == "dtype":
            other.hidden.dtype = moe_pb2.DTYPE_INT32
        elif change == "shape":
            other.hidden.shape[:] = [2, 5]
        elif change == "offset":
            other.hidden.region.offset = 1 << 20
        else:
            other.output.size = 4
        with pytest.raises(TensorError):
            payloads.open(other)
    assert [status.in_use for status in kept.list()] == [0, 0]


@pytest.mark.parametrize("gone", ["rows", "answer"])
def test_a_region_that_was_released_is_not_found_again(kept, gone):
    tensor, output = placed(kept), placed(kept)
    asked = request(moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=(2, 4), region=tensor.place))
    asked.output.CopyFrom(output.place)
    payloads = Payloads(kept)
    views = weakref.ref(payloads.open(asked).hidden.untyped_storage())
    held = payloads.open(asked)  # a call that is under way, of a client that leaves
    kept.release(tensor.region.name if gone == "rows" else output.region.name)
    with pytest.raises(UnknownRegion):
        payloads.open(asked)
    held.close()
    del held
    if gone == "rows":
        assert views() is None, "nothing keeps the memory mapped"
    assert kept.bytes < 2 * 8192 + 8192


def test_views_that_are_kept_are_bounded(kept):
    tensor, output = placed(kept), placed(kept)
    payloads = Payloads(kept)
    for rows in range(1, 3 * MOST_VIEWS):
        place = moe_pb2.Region(name=tensor.region.name, offset=0, size=4 * rows)
        ids = torch.zeros(rows, 1, dtype=torch.int32)
        hidden = moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=(rows, 1), region=place)
        asked = request(hidden, ids, torch.ones(rows, 1))
        asked.output.CopyFrom(moe_pb2.Region(name=output.region.name, offset=0, size=4 * rows))
        payloads.open(asked).close()
    assert len(kept._regions[tensor.region.name].views) <= MOST_VIEWS


def test_views_are_not_kept_past_the_region_of_the_answer(kept):
    """A caller that keeps its rows and makes regions for each answer."""
    tensor, payloads = placed(kept), Payloads(kept)
    hidden = moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=(2, 4), region=tensor.place)
    seen = []
    for _ in range(5):
        output = placed(kept)
        asked = request(hidden, output=output.place)
        with payloads.open(asked) as opened:
            seen.append(weakref.ref(opened._room.hold.memory.obj))
            opened.reply(opened.hidden, 1, 1)
        del opened
        kept.release(output.place.name)
        output.region.close()
        del output
    gc.collect()
    assert [ref() for ref in seen] == [None] * 5, "the answers' memory is mapped no more"
    assert not kept._regions[tensor.place.name].views


def test_rows_that_come_and_go_leave_nothing_with_the_region_of_their_answer(kept):
    output, payloads = placed(kept), Payloads(kept)
    for _ in range(5):
        tensor = placed(kept)
        hidden = moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=(2, 4), region=tensor.place)
        payloads.open(request(hidden, output=output.place)).close()
        kept.release(tensor.place.name)
    assert not kept._regions[output.place.name].viewed_with


def test_what_is_kept_of_a_call_is_small(kept):
    """Not the request, of which logits and unknown fields may have any size, nor a key of them."""
    tensor, output, payloads = placed(kept), placed(kept), Payloads(kept)
    hidden = moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=(2, 4), region=tensor.place)
    plain_request = request(hidden, output=output.place)
    unknown = b"\xfa\x3f" + bytes([0x80, 0x80, 0x40]) + bytes(1 << 20)  # field 1023, a megabyte
    odd = moe_pb2.ForwardRequest.FromString(plain_request.SerializeToString())
    odd.hidden.MergeFromString(unknown)
    assert odd.ByteSize() > 1 << 20
    for asked in (odd, plain_request):
        payloads.open(asked).close()
    views = kept._regions[tensor.place.name].views
    assert len(views) == 1, "what is not known does not count"
    assert all(sum(len(part) for part in key if isinstance(part, str | bytes)) < 1000 for key in views)
    ((_, kept_views),) = views.values()
    cells = [cell.cell_contents for cell in kept_views.room.put.__closure__]
    assert not any(cell is asked.output for cell in cells for asked in (odd, plain_request))


def test_a_named_region_that_was_registered_anew_is_seen_anew(tmp_path):
    regions = Regions(RegionLimits(allow_named=True))
    payloads, objects = Payloads(regions), []
    try:
        for value in (1.0, 2.0):
            objects.append(shared_memory.SharedMemory(create=True, size=4096))
            np.frombuffer(objects[-1].buf, np.float32)[:8] = value
        place = moe_pb2.Region(name="rows", offset=0, size=32)
        answer = moe_pb2.Region(name="answer", offset=0, size=32)
        hidden = moe_pb2.Tensor(dtype=moe_pb2.DTYPE_FP32, shape=(2, 4), region=place)
        asked = request(hidden, output=answer)
        regions.register("answer", objects[0].name, 1024, 1024)
        regions.register("rows", objects[0].name, 0, 1024)
        viewed = payloads._viewed

        def meanwhile(given, data):  # another thread registers the name anew
            made = viewed(given, data)
            regions.release("rows")
            regions.register("rows", objects[1].name, 0, 1024)
            return made

        payloads._viewed = meanwhile
        payloads.open(asked).close()
        payloads._viewed = viewed
        with payloads.open(asked) as opened:
            assert float(opened.hidden[0, 0]) == 2.0
        del opened
    finally:
        regions.close()
        for one in objects:
            one.unlink()
