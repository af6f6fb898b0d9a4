"""Both clients and shared memory: when it is used, used again, and used in place."""

import threading
import time

import grpc
import numpy as np
import pytest
import torch
from proto_fake import rows

from moeserve.proto.errors import (
    REASON_KEY,
    MoeError,
    Overloaded,
)
from moeserve.proto.tensors import TensorError
from moeserve.proto.transports import copies
from moeserve.proto.transports.copies import THREADED_BYTES, copy_into
from moeserve.runtime.doors.payloads import RegionLimits

UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, {REASON_KEY: "REFORMING"})


def test_regions_and_streams_are_used_again(client_of, service):
    hidden, experts, weights = rows(8, 2048)
    with client_of(service.address, lane=0) as client:
        for scale in range(1, 6):
            assert torch.equal(client.forward(3, hidden * scale, experts, weights), hidden * scale * 2)
        lane = service.lanes[0]
        assert [row.size for row in lane.regions.list()] == [1 << 17]
        assert lane.streams == 1
        assert all(request.hidden.region.size == request.output.size == 1 << 16 for request in lane.asked)
    end = time.monotonic() + 5
    while lane.regions.list() and time.monotonic() < end:
        time.sleep(0.01)
    assert lane.regions.list() == ()


def test_small_batches_stay_inline_unless_told(client_of, service):
    with client_of(service.address) as client:
        client.forward(3, *rows(2))
    with client_of(service.address, transport="shared_memory") as client:
        client.forward(3, *rows(2))
    with client_of(service.address, transport="inline") as client:
        client.forward(3, *rows(8, 8192))
    assert sorted(service.methods) == ["Forward", "Forward", "ForwardStream"]


def test_shared_memory_with_another_host_is_an_error_that_names_both(client_of, far):
    with client_of(far.address, transport="shared_memory") as client:
        with pytest.raises(
            MoeError, match=r"lane 0 at .* cannot share memory .*'another-host'\); use transport='auto'"
        ):
            client.forward(3, *rows(2), lane=0)
        with pytest.raises(MoeError, match="cannot share memory"):
            client.allocate(0, (2, 2))
    with pytest.raises(
        ValueError, match="transport='dispatcher pigeon' is not one of auto, inline, shared_memory"
    ):
        client_of(far.address, transport="dispatcher pigeon")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_tensor_in_the_region_is_read_there_and_the_answer_written_there(client_of, service, dtype):
    _, experts, weights = rows(64, 16)
    with client_of(service.address) as client:
        hidden, output = client.allocate(1, (64, 16), dtype), client.allocate(1, (64, 16), dtype)
        hidden.tensor.copy_(torch.arange(1024).reshape(64, 16) % 128)
        answer = client.forward(3, hidden, experts, weights, output=output)
        assert np.shares_memory(answer, output.array)
        assert torch.equal(output.tensor, hidden.tensor * 2)
        (request,) = service.asked
        assert request.hidden.region.name == hidden.region.name and request.output.name == output.region.name
        assert [len(lane.asked) for lane in service.lanes] == [0, 1]
        # placed on one side only: the other rides inline
        assert (client.forward(3, hidden, experts, weights) == hidden.array * 2).all()
        client.forward(3, hidden.tensor.clone(), experts, weights, output=output)
        assert [r.hidden.WhichOneof("payload") for r in service.asked] == ["region", "region", "data"]
        other = client.allocate(0, (64, 16), dtype)
        with pytest.raises(ValueError, match=r"one call goes to one lane, .* lanes \[0, 1\]"):
            client.forward(3, hidden, experts, weights, output=other)
        with pytest.raises(TensorError, match=r"output: .*\[2, 16\] cannot take the answer .*\[64, 16\]"):
            client.forward(3, hidden, experts, weights, output=client.allocate(1, (2, 16), dtype))


def test_rows_ride_inline_where_the_lane_has_no_room_for_a_region(client_of, service):
    for lane in service.lanes:
        lane.regions.limits = RegionLimits(max_bytes=1 << 18)
    hidden, experts, weights = rows(64, 2048)  # 2 x 512 KiB: no region of this lane takes them
    with client_of(service.address, lane=0) as client:
        client.forward(3, hidden[:8], experts[:8], weights[:8])
        assert torch.equal(client.forward(3, hidden, experts, weights), hidden * 2)
        assert [r.hidden.WhichOneof("payload") for r in service.asked] == ["region", "data"]
    insists = client_of(service.address, lane=0, transport="shared_memory")
    with insists as client, pytest.raises(Overloaded, match="region_limit"):
        client.forward(3, hidden, experts, weights)


def test_idle_regions_of_other_sizes_make_room(client_of, service):
    regions = service.lanes[0].regions
    regions.limits = RegionLimits(max_bytes=600 << 10)
    hidden, experts, weights = rows(32, 2048)
    with client_of(service.address, lane=0) as client:
        for count in (32, 8, 8):  # a region of 512 KiB, and one of 128 KiB
            client.forward(3, hidden[:count], experts[:count], weights[:count])
            end = time.monotonic() + 5
            while count == 8 and regions.bytes > 1 << 17 and time.monotonic() < end:
                time.sleep(0.01)  # the lane hears of regions given back
        assert [r.hidden.WhichOneof("payload") for r in service.asked] == ["region", "data", "region"]


def test_the_region_of_a_call_that_failed_is_not_used_again(client_of, service):
    lane = service.lanes[0]
    lane.scripts = [UNAVAILABLE]
    with client_of(service.address, lane=0) as client:
        client.forward(3, *rows(8, 2048))
        first, second = lane.asked
        assert first.hidden.region.name != second.hidden.region.name
        assert (first.job_id, first.attempt) == (second.job_id, 0) and second.attempt == 1


@pytest.mark.parametrize("writeable", [True, False])
@pytest.mark.parametrize("size", [THREADED_BYTES // 2 - 3, THREADED_BYTES // 2 + 3])
def test_large_copies_are_the_same_bytes(writeable, size):
    found = np.random.default_rng(0).integers(0, 1 << 16, (1, size), dtype=np.uint16)
    found.flags.writeable = writeable
    into, strided = np.zeros_like(found), np.zeros((1, 2 * size), dtype=np.uint16)
    copy_into(into, found)
    copy_into(strided[:, ::2], found)
    assert np.array_equal(into, found) and np.array_equal(strided[:, ::2], found)
    assert not strided[:, 1::2].any()


def test_a_large_copy_has_no_more_threads_than_leave_cores_to_ranks(monkeypatch):
    seen = []
    real = torch.Tensor.copy_

    def copy(into, found):
        seen.append(torch.get_num_threads())
        return real(into, found)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(copies, "most_threads", lambda: 2)
    before = torch.get_num_threads()
    found, into = np.ones(THREADED_BYTES, np.uint8), np.zeros(THREADED_BYTES, np.uint8)
    elsewhere = []
    try:
        for threads in (4, 1):
            torch.set_num_threads(threads)
            copy_into(into, found)
            thread = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
            thread.start()
            thread.join(10)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 1] and elsewhere == [4, 1] and into.all()
