"""Bad input gets a named error, and the house goes on as if nothing had been asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from houses import Alone, request_of

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.client import MoeClient
from moeserve.proto.errors import REASON_KEY
from moeserve.runtime.launch.local_cluster import LocalCluster

Spoil = Callable[[moe_pb2.ForwardRequest], None]


def _shorter(request: moe_pb2.ForwardRequest) -> None:
    request.hidden.data = request.hidden.data[:-4]


def _wrong_hidden(request: moe_pb2.ForwardRequest) -> None:
    request.hidden.shape[1] = 32
    request.hidden.data = request.hidden.data[: 3 * 32 * 4]


def _id_too_large(request: moe_pb2.ForwardRequest) -> None:
    request.choice.ids.data = (8).to_bytes(4, "little") + request.choice.ids.data[4:]


def _id_too_small(request: moe_pb2.ForwardRequest) -> None:
    request.choice.ids.data = (-2).to_bytes(4, "little", signed=True) + request.choice.ids.data[4:]


def _three_experts(request: moe_pb2.ForwardRequest) -> None:
    for tensor in (request.choice.ids, request.choice.weights):
        tensor.shape[1] = 1
        tensor.data = tensor.data[: 3 * 4]


def _weights_of_other_rows(request: moe_pb2.ForwardRequest) -> None:
    request.choice.weights.shape[0] = 2
    request.choice.weights.data = request.choice.weights.data[: 2 * 2 * 4]


def _integer_hidden(request: moe_pb2.ForwardRequest) -> None:
    request.hidden.dtype = moe_pb2.DTYPE_INT32


def _no_dtype(request: moe_pb2.ForwardRequest) -> None:
    request.hidden.dtype = moe_pb2.DTYPE_UNSPECIFIED


def _huge_shape(request: moe_pb2.ForwardRequest) -> None:
    request.hidden.shape[0] = 1 << 62


def _no_route(request: moe_pb2.ForwardRequest) -> None:
    request.ClearField("choice")


def _logits_of_other_experts(request: moe_pb2.ForwardRequest) -> None:
    request.logits.CopyFrom(request.choice.weights)


def _unknown_region(request: moe_pb2.ForwardRequest) -> None:
    size = len(request.hidden.data)
    request.hidden.region.CopyFrom(moe_pb2.Region(name="region-1-" + "0" * 32, offset=0, size=size))


STUBS = {"lane": moe_pb2_grpc.LaneServiceStub, "front": moe_pb2_grpc.FrontServiceStub}
"""What each door answers calls with."""

CASES: dict[str, tuple[Spoil, str, str]] = {
    "payload shorter than its shape": (_shorter, "INVALID_ARGUMENT", "hidden: "),
    "wrong hidden size": (
        _wrong_hidden,
        "INVALID_ARGUMENT",
        "hidden: rows of 32, but the model's hidden size is 64",
    ),
    "expert id too large": (
        _id_too_large,
        "INVALID_ARGUMENT",
        "choice.ids: id 8 is out of range: experts are 0 to 7",
    ),
    "expert id too small": (_id_too_small, "INVALID_ARGUMENT", "choice.ids: id -2 is out of range"),
    "K mismatch": (
        _three_experts,
        "INVALID_ARGUMENT",
        "choice.ids: rows of 1, but the model's experts a token is 2",
    ),
    "weights of other rows": (_weights_of_other_rows, "INVALID_ARGUMENT", "choice.weights: "),
    "integer hidden states": (_integer_hidden, "INVALID_ARGUMENT", "hidden: dtype int32"),
    "no dtype": (_no_dtype, "INVALID_ARGUMENT", "hidden: dtype"),
    "a shape that overflows": (_huge_shape, "INVALID_ARGUMENT", "hidden: "),
    "no route": (_no_route, "INVALID_ARGUMENT", "route: neither choice"),
    "logits of other experts": (
        _logits_of_other_experts,
        "INVALID_ARGUMENT",
        "logits: rows of 2, but the layer's experts is 8",
    ),
    "unknown region": (_unknown_region, "NOT_FOUND", "hidden: this lane has no region 'region-1'"),
    "layer out of range": (
        lambda r: setattr(r, "layer", 5),
        "NOT_FOUND",
        "layer 5 has no experts served here; layers 0-1 have",
    ),
    "unknown model": (lambda r: setattr(r, "model", "gpt"), "NOT_FOUND", "model 'gpt' is not served here"),
}


@pytest.mark.parametrize("door", ["lane", "front"])
@pytest.mark.parametrize("case", CASES)
def test_bad_requests_are_named_and_disturb_nothing(
    house: LocalCluster, alone: Alone, case: str, door: str
) -> None:
    spoil, code, text = CASES[case]
    batch = alone.batch(3, seed=1)
    request = request_of(0, batch)
    spoil(request)
    with MoeClient(house.address) as client:
        address = client.topology().lanes[0].address if door == "lane" else house.address
        steps = client.status().steps
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as failed:
            STUBS[door](channel).Forward(request, timeout=10)
        assert (failed.value.code().name, text in failed.value.details()) == (code, True), (
            failed.value.details()
        )
        assert client.status().steps == steps  # no step was spent on it


Said = tuple[str, str, str]


def _refusal(stub: Any, request: moe_pb2.ForwardRequest) -> Said:
    """Code, reason and text of a call without a deadline."""
    with pytest.raises(grpc.RpcError) as failed:
        stub.Forward.future(request).result(30)
    trailing = dict(failed.value.trailing_metadata())
    return failed.value.code().name, trailing.get(REASON_KEY, ""), failed.value.details()


def _streamed_refusal(stub: Any, request: moe_pb2.ForwardRequest) -> Said:
    """The same of a stream's only request."""
    (reply,) = stub.ForwardStream(iter([request]), timeout=30)
    code = next(code.name for code in grpc.StatusCode if code.value[0] == reply.error.code)
    return code, reply.error.reason, reply.error.message


def _id_out_of_range(request: moe_pb2.ForwardRequest) -> None:
    ids = bytearray(request.choice.ids.data)
    ids[:4], ids[-4:] = (9).to_bytes(4, "little"), (-5).to_bytes(4, "little", signed=True)
    request.choice.ids.data = bytes(ids)


def _half_the_bytes(request: moe_pb2.ForwardRequest) -> None:
    request.hidden.data = request.hidden.data[: len(request.hidden.data) // 2]


def _half_the_weights(request: moe_pb2.ForwardRequest) -> None:
    request.choice.weights.shape[1] = 1
    request.choice.weights.data = request.choice.weights.data[: len(request.choice.weights.data) // 2]


def _logits_of_half_the_bytes(request: moe_pb2.ForwardRequest) -> None:
    request.logits.CopyFrom(request.choice.weights)
    request.logits.data = request.logits.data[: len(request.logits.data) // 2]


def _logits_of_integers(request: moe_pb2.ForwardRequest) -> None:
    request.logits.CopyFrom(request.choice.ids)


def _ids_of_floats(request: moe_pb2.ForwardRequest) -> None:
    request.choice.ids.dtype = moe_pb2.DTYPE_FP32


LARGE = (
    _id_out_of_range,
    _half_the_bytes,
    _half_the_weights,
    _logits_of_half_the_bytes,
    _logits_of_integers,
    _ids_of_floats,
)
"""What is wrong with a batch that the front door would split."""


@pytest.mark.parametrize("case", [*CASES, *(f"large: {spoil.__name__[1:]}" for spoil in LARGE)])
def test_the_front_door_refuses_in_a_lanes_words(house: LocalCluster, alone: Alone, case: str) -> None:
    """Without a deadline, as gRPC calls by default, and on a stream."""
    if case in CASES:
        request = request_of(0, alone.batch(3, seed=1))
        CASES[case][0](request)
    else:
        request = request_of(0, alone.batch(1600, seed=1))  # several lanes share so many
        next(spoil for spoil in LARGE if case.endswith(spoil.__name__[1:]))(request)
    with MoeClient(house.address) as client:
        address = client.topology().lanes[0].address
    with grpc.insecure_channel(house.address) as near, grpc.insecure_channel(address) as far:
        front, lane = moe_pb2_grpc.FrontServiceStub(near), moe_pb2_grpc.LaneServiceStub(far)
        said = _refusal(lane, request)
        assert said[1], "a lane gives a reason"
        assert _refusal(front, request) == said
        assert _streamed_refusal(lane, request) == said
        assert _streamed_refusal(front, request) == said


def test_an_oversize_message_is_refused_by_its_size(house: LocalCluster, alone: Alone) -> None:
    request = request_of(0, alone.batch(1, seed=1))
    request.hidden.data = b"\0" * ((64 << 20) + 1)
    unlimited = [("grpc.max_send_message_length", -1)]
    with (
        grpc.insecure_channel(house.address, options=unlimited) as channel,
        pytest.raises(grpc.RpcError) as failed,
    ):
        moe_pb2_grpc.FrontServiceStub(channel).Forward(request, timeout=30)
    assert failed.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in failed.value.details()


def test_registering_memory_by_name_is_refused_by_default(house: LocalCluster) -> None:
    with (
        MoeClient(house.address) as client,
        grpc.insecure_channel(client.topology().lanes[0].address) as channel,
        pytest.raises(grpc.RpcError) as failed,
    ):
        moe_pb2_grpc.LaneServiceStub(channel).RegisterRegion(
            moe_pb2.RegisterRegionRequest(name="x", key="y", size=4096)
        )
    assert failed.value.code() == grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("name", ["GetTopology", "GetModel", "GetStatus"])
def test_a_lane_sends_questions_to_the_front_door(house: LocalCluster, name: str) -> None:
    with (
        MoeClient(house.address) as client,
        grpc.insecure_channel(client.topology().lanes[0].address) as channel,
        pytest.raises(grpc.RpcError) as failed,
    ):
        getattr(moe_pb2_grpc.FrontServiceStub(channel), name)(
            getattr(moe_pb2, f"{name}Request")(), timeout=10
        )
    assert failed.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "server.port" in failed.value.details()
