"""Both clients against fake lanes: finding and spreading, kinds of arrays, and what else they are asked."""

import ml_dtypes
import numpy as np
import pytest
import torch
from proto_fake import FAR, FakeService, rows

from moeserve.proto.client import Choice, Patience
from moeserve.proto.client.batch import SPLIT_ROWS, BatchPart, spread
from moeserve.proto.client.payload import SHARE_BYTES
from moeserve.proto.errors import NotFound, WeightsChanged
from moeserve.proto.tensors import TensorError


@pytest.mark.parametrize(
    ("count", "lanes", "most", "cuts"),
    [
        (0, 4, 100, [0, 0]),
        (1, 4, 100, [0, 1]),
        (2 * SPLIT_ROWS - 1, 4, 5000, [0, 2 * SPLIT_ROWS - 1]),
        (2 * SPLIT_ROWS, 4, 5000, [0, SPLIT_ROWS, 2 * SPLIT_ROWS]),
        (3 * SPLIT_ROWS + 1, 4, 5000, [0, SPLIT_ROWS, 2 * SPLIT_ROWS, 3 * SPLIT_ROWS + 1]),
        (4000, 4, 5000, [0, 1000, 2000, 3000, 4000]),
        (1000, 4, 100, [0, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]),
        (10, 4, 3, [0, 2, 5, 7, 10]),
    ],
)
def test_rows_are_cut_evenly_and_no_finer_than_pays(count, lanes, most, cuts):
    parts = [BatchPart(at, cuts[at], cuts[at + 1]) for at in range(len(cuts) - 1)]
    assert list(spread(count, lanes, most)) == parts


def test_a_large_batch_uses_all_lanes_and_small_ones_one_after_another_the_same(client_of, far):
    with client_of(far.address) as client:
        hidden, experts, weights = rows(4 * SPLIT_ROWS)
        assert torch.equal(client.forward(3, hidden, experts, weights), hidden * 2)
        assert [[len(r.hidden.data) for r in lane.asked] for lane in far.lanes] == [[2 * SPLIT_ROWS * 16]] * 2
        jobs = {request.job_id for request in far.asked}
        assert len(jobs) == 2 and len({job.split(".")[0] for job in jobs}) == 1
        for _ in range(4):
            client.forward(3, *rows(3))
        assert sorted(len(lane.asked) for lane in far.lanes) == [1, 5]
    assert far.topologies == 1


def test_a_batch_in_shared_memory_goes_whole_to_a_lane_that_holds_it(client_of):
    near = FakeService(2)
    with client_of(near.address) as client:
        for count, parts in ((1024, 1), (1025, 2)):  # a fake lane's capacity is 1024
            hidden, experts, weights = rows(count, 64)
            assert torch.equal(client.forward(3, hidden, experts, weights), hidden * 2)
            assert sum(len(lane.asked) for lane in near.lanes) == parts
            for lane in near.lanes:
                lane.asked.clear()
    near.stop()


def test_a_pinned_lane_takes_everything(client_of, far):
    with client_of(far.address, lane=1) as client:
        client.forward(3, *rows(4 * SPLIT_ROWS))
        assert [len(lane.asked) for lane in far.lanes] == [0, 1]
        client.forward(3, *rows(4 * SPLIT_ROWS), lane=0)
        assert [len(lane.asked) for lane in far.lanes] == [1, 1]
        with pytest.raises(NotFound, match=r"lane 9 is not one of the lanes \[0, 1\]"):
            client.forward(3, *rows(1), lane=9)


def test_a_batch_over_the_message_limit_is_cut_finer(client_of, far):
    far.max_message_bytes = (1 << 16) + 10 * (16 + 8 + 8)
    with client_of(far.address, lane=0) as client:
        hidden, experts, weights = rows(25)
        assert torch.equal(client.forward(3, hidden, experts, weights), hidden * 2)
        assert sorted(request.hidden.shape[0] for request in far.asked) == [8, 8, 9]
        far.max_message_bytes = 1 << 16
    with (
        client_of(far.address) as client,
        pytest.raises(TensorError, match="a row of 32 bytes has no room in a message"),
    ):
        client.forward(3, hidden, experts, weights)


def test_model_layer_and_route_reach_the_lane(client_of, far):
    with client_of(far.address, model="m") as client:
        hidden, experts, weights = rows(2)
        client.forward(5, hidden, experts, weights)
        reply = client.forward_logits(6, hidden, torch.ones(2, 8))
        assert torch.equal(reply, hidden * 2)
    chosen, routed = sorted(far.asked, key=lambda request: request.layer)
    assert (chosen.model, chosen.layer, chosen.attempt, chosen.WhichOneof("route")) == ("m", 5, 0, "choice")
    assert chosen.choice.ids.shape == [2, 2] and chosen.choice.weights.shape == [2, 2]
    assert (routed.layer, routed.WhichOneof("route"), list(routed.logits.shape)) == (6, "logits", [2, 8])


@pytest.mark.parametrize("count", [2, 4 * SPLIT_ROWS])
@pytest.mark.parametrize("host", [FAR, None], ids=["inline", "near"])
@pytest.mark.parametrize(
    "kind",
    [np.float32, np.float16, ml_dtypes.bfloat16, torch.float32, torch.bfloat16, torch.float16],
    ids=str,
)
def test_the_answer_is_the_same_kind_of_array(client_of, kind, host, count):
    service = FakeService(2, host=host)
    hidden = torch.randn(count, SHARE_BYTES // 64)
    experts, weights = torch.zeros(count, 2, dtype=torch.int64), torch.ones(count, 2)
    if isinstance(kind, torch.dtype):
        hidden = hidden.to(kind)
    else:
        hidden, experts, weights = hidden.numpy().astype(kind), experts.numpy(), weights.numpy()
    with client_of(service.address) as client:
        answer = client.forward(3, hidden, experts, weights)
    assert type(answer) is type(hidden) and answer.dtype == hidden.dtype and answer.shape == hidden.shape
    assert (answer == hidden * 2).all()
    shared = host is None and count > 2
    assert set(service.methods) == {"ForwardStream" if shared else "Forward"}
    service.stop()


def test_bfloat16_bits_without_ml_dtypes(client_of, far):
    bits = np.full((2, 4), 0x3F80, np.uint16)
    with client_of(far.address) as client:
        answer = client.forward(
            3, bits, np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32), dtype="bf16"
        )
        with pytest.raises(TensorError, match="hidden: numpy uint16 is no dtype of the contract"):
            client.forward(3, bits, np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32))
    assert answer.dtype == np.uint16 and (answer == 0x4000).all()


def test_no_rows_are_asked_for_and_answered(client_of, far):
    with client_of(far.address) as client:
        assert client.forward(3, *rows(0)).shape == (0, 4)
    assert len(far.asked) == 1


def test_the_epoch_is_the_oldest_of_the_parts(client_of, far):
    with client_of(far.address) as client:
        hidden, experts, weights = rows(4 * SPLIT_ROWS)
        reply = client.call(3, hidden, Choice(experts, weights))
        assert (reply.epoch, reply.weights_version) == (7, 1)
        assert client.call(3, hidden, Choice(experts, weights), lane=1).epoch == 8


def test_parts_that_saw_different_weights_are_asked_for_again(client_of, far):
    far.lanes[0].versions, far.lanes[1].versions = [1, 2], [2, 2]
    with client_of(far.address) as client:
        hidden, experts, weights = rows(4 * SPLIT_ROWS)
        reply = client.call(3, hidden, Choice(experts, weights))
    assert reply.weights_version == 2 and (reply.hidden == hidden * 2).all()
    assert len(far.asked) == 4
    assert len({request.job_id for request in far.asked}) == 2


def test_weights_that_keep_changing_end_a_call_as_unavailable(client_of, far):
    far.lanes[0].versions, far.lanes[1].versions = [1, 1], [2, 2]
    patience = Patience(attempts=2, first_wait=0.001, longest_wait=0.001)
    with client_of(far.address, timeout=patience) as client, pytest.raises(WeightsChanged) as ended:
        client.forward(3, *rows(4 * SPLIT_ROWS))
    assert ended.value.code == "UNAVAILABLE"
    assert "layer 3 saw weights versions [1, 2]" in ended.value.message


def test_a_demanded_version_is_in_every_part(client_of, far):
    with client_of(far.address) as client:
        client.forward(3, *rows(4 * SPLIT_ROWS), weights_version=1)
        for wrong in (-1, 1 << 64):
            with pytest.raises(ValueError, match=f"weights_version={wrong} must be a version"):
                client.forward(3, *rows(1), weights_version=wrong)
    assert [request.weights_version for request in far.asked] == [1, 1]


def test_operations_are_asked_of_the_front_door(client_of, far):
    with client_of(far.address) as client:
        planned = client.rebalance(policy="eplb", max_moves=2, dry_run=True)
        assert (planned.outcome, planned.reason, len(planned.moves)) == ("planned", "eplb", 2)
        assert client.rebalance().outcome == "moved"
        reloaded = client.reload("/new")
        assert (reloaded.outcome, reloaded.reason, reloaded.weights_version) == ("reloaded", "/new", 2)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            (torch.ones(4), torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)),
            r"hidden: shape \[4\] has not two dimensions",
        ),
        (
            (torch.ones(4, 4), torch.zeros(3, 1, dtype=torch.int32), torch.ones(4, 1)),
            r"choice.ids: int32 \[3, 1\] has other rows than hidden",
        ),
        (
            (torch.ones(4, 4), torch.zeros(4, 1), torch.ones(4, 1)),
            "choice.ids: dtype fp32 is not one of int32, int64",
        ),
        (
            (torch.ones(4, 4).double(), torch.zeros(4, 1), torch.ones(4, 1)),
            "hidden: torch dtype torch.float64",
        ),
    ],
)
def test_arrays_that_the_contract_does_not_take_are_named_before_anything_is_sent(
    client_of, far, wrong, text
):
    with client_of(far.address) as client, pytest.raises(TensorError, match=text):
        client.forward(3, *wrong)
    assert far.topologies == 0


def test_topology_model_status_and_health(client_of, far):
    with client_of(far.address) as client:
        assert [lane.rank for lane in client.topology().lanes] == [0, 1]
        assert client.model().model == "fake" and not client.model().layers
        assert client.model(placement=True).layers[0].layer == 3
        assert client.status().steps == 5
        assert client.health() == "SERVING"
        assert far.health_request == b"\x0a\x18moeserve.v1.FrontService"
        assert client.health("") == "SERVING"
        assert far.health_request == b""
