"""Placed calls that are made again: the same request with other routes, and every failure as of any call."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import grpc
import pytest
import torch
from proto_fake import FakeLane, FakeService, rows

from moeserve.proto import moe_pb2
from moeserve.proto.client import Choice, MoeClient, Patience
from moeserve.proto.client import again as again_module
from moeserve.proto.client.again import AskedBefore
from moeserve.proto.errors import CODE_OF_NAME, DeadlineExceeded, InvalidArgument
from moeserve.proto.tensors import TensorError

UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, {"moeserve-reason": "REFORMING"})
WIDTH = 512


def take_calls(lane: FakeLane) -> list[moe_pb2.ForwardRequest]:
    """Has `lane` answer calls over leases too; returns those that come so."""
    came: list[moe_pb2.ForwardRequest] = []

    def take(packet: bytes, answer: Callable[[bytes], None], peer: str) -> Callable[[], None]:
        request = moe_pb2.ForwardRequest.FromString(packet)
        came.append(request)

        def act() -> None:
            made = lane.answer(request)
            if isinstance(made, tuple):
                error = moe_pb2.Error(code=CODE_OF_NAME[made[0].name], message="no")
                answer(moe_pb2.ForwardStreamReply(job_id=request.job_id, error=error).SerializeToString())
            else:
                answer(moe_pb2.ForwardStreamReply(job_id=request.job_id, reply=made).SerializeToString())

        threading.Thread(target=act, daemon=True).start()
        return lambda: None

    lane.regions.take_call = take
    return came


@pytest.fixture
def came(service: FakeService) -> list[moe_pb2.ForwardRequest]:
    return take_calls(service.lanes[1])


def bare(request: moe_pb2.ForwardRequest) -> moe_pb2.ForwardRequest:
    """A request without what differs from call to call."""
    made = moe_pb2.ForwardRequest()
    made.CopyFrom(request)
    made.job_id, made.timeout_ms = "", 0
    return made


def test_a_call_that_is_made_again_is_the_same_request_with_other_routes(service, came) -> None:
    _, experts, weights = rows(8, WIDTH)
    with MoeClient(service.address) as client:
        hidden, output = client.allocate(1, (8, WIDTH), "fp32"), client.allocate(1, (8, WIDTH), "fp32")
        for at in range(4):
            hidden.tensor.fill_(at + 1)
            reply = client.call(3, hidden, Choice(experts + at, weights * at), output=output)
            assert torch.equal(output.tensor, torch.full((8, WIDTH), 2.0 * (at + 1)))
            assert reply.hidden is output.array and (reply.epoch, reply.weights_version) == (8, 1)
            sent = came[at].choice
            assert sent.ids.data == (experts + at).numpy().tobytes()
            assert sent.weights.data == (weights * at).numpy().tobytes()
        assert len({request.job_id for request in came}) == 4
        first, *others = came
        for other in others:
            other.choice.CopyFrom(first.choice)
            assert bare(other) == bare(first)


def test_calls_that_differ_are_not_taken_for_one_another(service, came) -> None:
    _, experts, weights = rows(8, WIDTH)
    with MoeClient(service.address) as client:
        hidden, output = client.allocate(1, (8, WIDTH), "fp32"), client.allocate(1, (8, WIDTH), "fp32")
        other = client.allocate(1, (8, WIDTH), "fp32")
        for _ in range(3):
            client.forward(3, hidden, experts, weights, output=output)
            client.forward(4, hidden, experts, weights, output=output)
            client.forward(3, hidden, experts, weights, output=other)
            client.forward(3, hidden, experts.long(), weights, output=output)
            client.forward(3, hidden, experts[:, :1], weights[:, :1], output=output)
            client.forward(3, hidden, experts, weights, output=output, weights_version=5)
            client.forward_logits(3, hidden, torch.zeros(8, 16), output=output)
    said = [
        (
            request.layer,
            request.output.name,
            request.choice.ids.dtype,
            tuple(request.choice.ids.shape),
            request.weights_version,
            request.WhichOneof("route"),
        )
        for request in came
    ]
    assert said[:7] == said[7:14] == said[14:] and len(set(said)) == 7


def test_a_failure_of_such_a_call_is_tried_again_under_its_own_id(service, came) -> None:
    _, experts, weights = rows(8, WIDTH)
    with MoeClient(service.address, timeout=Patience(first_wait=0.001)) as client:
        hidden, output = client.allocate(1, (8, WIDTH), "fp32"), client.allocate(1, (8, WIDTH), "fp32")
        for _ in range(2):
            client.forward(3, hidden, experts, weights, output=output)
        service.lanes[1].scripts = [UNAVAILABLE, UNAVAILABLE]
        asked = service.topologies
        client.forward(3, hidden, experts, weights, output=output)
        assert [request.attempt for request in came] == [0, 0, 0, 1, 2]
        assert len({request.job_id for request in came[2:]}) == 1
        assert service.topologies > asked  # lanes are found anew
        client.forward(3, hidden, experts, weights, output=output)  # learned anew
        with pytest.raises(InvalidArgument):
            service.lanes[1].scripts = [(grpc.StatusCode.INVALID_ARGUMENT, {})]
            client.forward(3, hidden, experts, weights, output=output)


def test_attempts_and_time_are_those_of_any_call(service, came) -> None:
    _, experts, weights = rows(8, WIDTH)
    with MoeClient(service.address) as client:
        hidden, output = client.allocate(1, (8, WIDTH), "fp32"), client.allocate(1, (8, WIDTH), "fp32")
        for _ in range(2):
            client.forward(3, hidden, experts, weights, output=output)
        service.lanes[1].scripts = [UNAVAILABLE] * 5
        with pytest.raises(Exception, match="UNAVAILABLE"):
            client.forward(3, hidden, experts, weights, output=output, timeout=Patience(attempts=1))
        assert len(came) == 3
        service.lanes[1].scripts = []
        for _ in range(2):  # the lanes are found anew, and the call learned
            client.forward(3, hidden, experts, weights, output=output)
        service.lanes[1].scripts = [1.0]
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.forward(3, hidden, experts, weights, output=output, timeout=0.2)
        assert time.monotonic() - started < 0.9


def test_an_answer_unlike_the_question_is_an_error(service, monkeypatch) -> None:
    lane = service.lanes[1]
    take_calls(lane)
    _, experts, weights = rows(8, WIDTH)
    with MoeClient(service.address) as client:
        hidden, output = client.allocate(1, (8, WIDTH), "fp32"), client.allocate(1, (8, WIDTH), "fp32")
        for _ in range(2):
            client.forward(3, hidden, experts, weights, output=output)
        answer = lane.answer

        def other(request: moe_pb2.ForwardRequest):
            made = answer(request)
            made.hidden.shape[0] = 4
            made.hidden.region.size //= 2
            return made

        monkeypatch.setattr(lane, "answer", other)
        with pytest.raises(TensorError, match=r"reply.hidden: it is fp32 \[4, 512\]"):
            client.forward(3, hidden, experts, weights, output=output)
        monkeypatch.setattr(lane, "answer", answer)
        client.forward(3, hidden, experts, weights, output=output)  # the lease is free again


def test_no_memory_is_kept_for_calls_that_may_be_made_again(service, came) -> None:
    _, experts, weights = rows(8, WIDTH)
    with MoeClient(service.address) as client:
        hidden, output = client.allocate(1, (8, WIDTH), "fp32"), client.allocate(1, (8, WIDTH), "fp32")
        for _ in range(2):
            client.forward(3, hidden, experts, weights, output=output)
        gone = [weakref.ref(tensor) for tensor in (hidden, output)]
        del hidden, output
        gc.collect()
        assert [ref() for ref in gone] == [None, None]


def test_only_so_many_calls_are_remembered(service, came, monkeypatch) -> None:
    monkeypatch.setattr(again_module, "MOST_KNOWN", 3)
    known: list[int] = []
    learn = AskedBefore.learn

    def counted(self: AskedBefore, *args) -> None:
        learn(self, *args)
        known.append(len(self._known))

    monkeypatch.setattr(AskedBefore, "learn", counted)
    _, experts, weights = rows(8, WIDTH)
    with MoeClient(service.address) as client:
        hidden, output = client.allocate(1, (8, WIDTH), "fp32"), client.allocate(1, (8, WIDTH), "fp32")
        for layer in range(8):
            client.forward(layer, hidden, experts, weights, output=output)
    assert max(known) == 3


def test_two_threads_with_one_answers_region_both_get_theirs(service, came) -> None:
    """One lease has one call under way: the other goes another way."""
    _, experts, weights = rows(8, WIDTH)
    with MoeClient(service.address) as client:
        hidden, output = client.allocate(1, (8, WIDTH), "fp32"), client.allocate(1, (8, WIDTH), "fp32")
        hidden.tensor.fill_(3.0)
        for _ in range(2):
            client.forward(3, hidden, experts, weights, output=output)
        service.lanes[1].scripts = [0.3]
        slow = threading.Thread(target=lambda: client.forward(3, hidden, experts, weights, output=output))
        slow.start()
        while len(came) < 3:
            time.sleep(0.001)
        client.forward(3, hidden, experts, weights, output=output)
        slow.join()
        assert len(service.lanes[1].asked) == 4 and len(came) == 3  # one came on a stream


@pytest.mark.parametrize("spin", [0.0, 0.05])
def test_a_call_may_look_for_its_answer_before_it_sleeps(service, came, spin: float) -> None:
    _, experts, weights = rows(8, WIDTH)
    with MoeClient(service.address, timeout=Patience(5.0, spin=spin)) as client:
        hidden, output = client.allocate(1, (8, WIDTH), "fp32"), client.allocate(1, (8, WIDTH), "fp32")
        for pause in (0.0, 0.0, 0.02, 0.1):
            service.lanes[1].scripts = [pause]
            hidden.tensor.fill_(pause)
            client.forward(3, hidden, experts, weights, output=output)
            assert torch.equal(output.tensor, 2 * hidden.tensor)
        with pytest.raises(DeadlineExceeded):
            service.lanes[1].scripts = [0.5]
            client.forward(3, hidden, experts, weights, output=output, timeout=Patience(0.03, spin=0.05))


@pytest.mark.parametrize("spin", [-1.0, 1.0, float("nan"), True, "x"])
def test_a_spin_has_a_bound(spin) -> None:
    with pytest.raises((ValueError, TypeError), match="spin="):
        Patience(spin=spin)
