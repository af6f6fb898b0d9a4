"""Calls become steps: right answers whoever else calls, few steps for many calls, nothing lost."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch
from failures import stand_still
from houses import Alone, request_of

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.client import AsyncMoeClient, MoeClient
from moeserve.runtime.launch.local_cluster import LocalCluster

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def client(house: LocalCluster):
    with MoeClient(house.address, timeout=30) as client:
        yield client


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("layer", [0, 1])
def test_four_ranks_answer_as_one(client: MoeClient, alone: Alone, layer: int, rows: int) -> None:
    batch = alone.batch(rows, seed=rows)
    torch.testing.assert_close(client.forward(layer, *batch), alone.forward(layer, *batch), **CLOSE)


def test_no_rows_are_an_answer_of_no_rows(client: MoeClient, alone: Alone) -> None:
    answer = client.forward(0, *alone.batch(0, seed=0))
    assert answer.shape == (0, alone.checkpoint.hidden)


def test_minus_one_chooses_nothing_even_with_a_nan_weight(client: MoeClient, alone: Alone) -> None:
    hidden, experts, weights = alone.batch(6, seed=3)
    experts[0], experts[1, 0] = -1, -1
    weights[0], weights[1, 0] = float("nan"), float("nan")
    answer = client.forward(0, hidden, experts, weights)
    assert not answer[0].any()
    torch.testing.assert_close(answer, alone.forward(0, hidden, experts, weights), **CLOSE)


def test_duplicate_experts_of_a_row_add_their_weights(client: MoeClient, alone: Alone) -> None:
    hidden, experts, weights = alone.batch(4, seed=4)
    experts[:, 1] = experts[:, 0]
    torch.testing.assert_close(
        client.forward(1, hidden, experts, weights), alone.forward(1, hidden, experts, weights), **CLOSE
    )


def test_logits_are_routed_by_the_service(client: MoeClient, alone: Alone) -> None:
    hidden, _, _ = alone.batch(9, seed=5)
    logits = torch.randn(9, alone.checkpoint.num_experts)
    experts, weights = alone.checkpoint.gate(1).route(logits)
    torch.testing.assert_close(
        client.forward_logits(1, hidden, logits), alone.forward(1, hidden, experts, weights), **CLOSE
    )


def test_other_float_dtypes_are_answered_in_kind(client: MoeClient, alone: Alone) -> None:
    hidden, experts, weights = alone.batch(5, seed=6)
    answer = client.forward(0, hidden.bfloat16(), experts, weights.bfloat16())
    assert answer.dtype == torch.bfloat16
    wanted = alone.forward(0, hidden.bfloat16().float(), experts, weights.bfloat16().float())
    torch.testing.assert_close(answer.float(), wanted, rtol=1e-2, atol=1e-2)


def test_a_nan_row_spoils_no_other(client: MoeClient, alone: Alone) -> None:
    hidden, experts, weights = alone.batch(8, seed=7)
    wanted = alone.forward(0, hidden, experts, weights)
    hidden[3] = float("nan")
    answer = client.forward(0, hidden, experts, weights)
    keep = torch.arange(8) != 3
    assert answer[3].isnan().all()
    torch.testing.assert_close(answer[keep], wanted[keep], **CLOSE)


def test_a_batch_over_the_lanes_capacity_is_answered_whole(house: LocalCluster, alone: Alone) -> None:
    batch = alone.batch(300, seed=8)  # lanes take 64
    with MoeClient(house.address, lane=2, timeout=30) as client:
        torch.testing.assert_close(client.forward(0, *batch), alone.forward(0, *batch), **CLOSE)


def test_the_front_door_answers_forward_itself(house: LocalCluster, alone: Alone) -> None:
    batch = alone.batch(150, seed=9)
    with grpc.insecure_channel(house.address) as channel:
        reply = moe_pb2_grpc.FrontServiceStub(channel).Forward(request_of(1, batch), timeout=30)
    answer = torch.frombuffer(bytearray(reply.hidden.data), dtype=torch.float32).view(*reply.hidden.shape)
    torch.testing.assert_close(answer, alone.forward(1, *batch), **CLOSE)
    assert reply.epoch == 1


def test_two_clients_on_different_and_on_the_same_layer(house: LocalCluster, alone: Alone) -> None:
    wrong: list[str] = []

    def ask(layer: int, seed: int) -> None:
        with MoeClient(house.address, timeout=30) as client:
            for turn in range(15):
                batch = alone.batch(1 + (seed + turn) % 9, seed=seed * 100 + turn)
                difference = (client.forward(layer, *batch) - alone.forward(layer, *batch)).abs().max()
                if difference > 1e-4:
                    wrong.append(f"layer {layer} seed {seed} turn {turn}: {difference}")

    threads = [threading.Thread(target=ask, args=(layer, seed)) for seed, layer in enumerate([0, 1, 0, 1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


@pytest.mark.timed  # calls that a busy machine does not let start are not there to share a step
def test_64_concurrent_calls_of_one_layer_run_in_at_most_8_steps(house: LocalCluster, alone: Alone) -> None:
    batches = [alone.batch(2, seed=1000 + at) for at in range(64)]
    gate = threading.Barrier(64)
    with MoeClient(house.address, timeout=30) as client, ThreadPoolExecutor(64) as pool:

        def ask(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
            gate.wait()
            return client.forward(0, *batch)

        def together(batches: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
            return list(pool.map(ask, batches))

        for _ in range(2):  # each lane has connections enough then: to open them is not what is asked here
            together(batches)
        for _ in range(3):  # the bound holds every time, not on average
            before = client.status().steps
            answers = together(batches)
            steps = client.status().steps - before
            for batch, answer in zip(batches, answers, strict=True):
                torch.testing.assert_close(answer, alone.forward(0, *batch), **CLOSE)
            assert 1 <= steps <= 8, steps


def test_a_call_cancelled_under_way_disturbs_nobody(house: LocalCluster, alone: Alone) -> None:
    batches = [alone.batch(3, seed=2000 + at) for at in range(40)]
    with MoeClient(house.address, timeout=30) as client, ThreadPoolExecutor(8) as pool:
        lane = client.topology().lanes[1].address
        with grpc.insecure_channel(lane) as channel:
            stub = moe_pb2_grpc.LaneServiceStub(channel)
            kept = [pool.submit(client.forward, 0, *batch) for batch in batches]
            for at in range(30):
                doomed = stub.Forward.future(request_of(0, batches[at]))
                time.sleep(0.002 * (at % 4))  # before, in, and after its step
                doomed.cancel()
        for batch, answer in zip(batches, kept, strict=True):
            torch.testing.assert_close(answer.result(30), alone.forward(0, *batch), **CLOSE)
        assert client.status().state == "serving"


def test_a_call_cancelled_while_it_waits_holds_no_thread(house: LocalCluster, alone: Alone) -> None:
    with MoeClient(house.address, timeout=30) as client:
        lane = client.topology().lanes[1].address
    left = re.compile(r'^moe_requests_total{code="CANCELLED",method="Forward",.*} (\S+)$', re.MULTILINE)
    here = re.compile(r"^moe_requests_in_flight{.*} (\S+)$", re.MULTILINE)

    def total(metric: re.Pattern[str]) -> float:
        with urllib.request.urlopen(f"http://{house.metrics_targets()[2]}/metrics", timeout=10) as answer:
            return sum(map(float, metric.findall(answer.read().decode())))

    def wait_for(true: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + 10
        while not true():
            assert time.monotonic() < until, what
            time.sleep(0.05)

    before = total(left)
    stand_still(house.pid(3))  # no step ends
    try:
        with grpc.insecure_channel(lane) as channel:
            doomed = moe_pb2_grpc.LaneServiceStub(channel).Forward.future(
                request_of(0, alone.batch(2, seed=5))
            )
            wait_for(lambda: total(here) > 0, "the lane has the call")
            doomed.cancel()
            wait_for(lambda: total(left) > before, "its thread waits for an answer that nobody takes")
    finally:
        os.kill(house.pid(3), signal.SIGCONT)


def test_an_expired_deadline_is_said_and_the_lane_goes_on(house: LocalCluster, alone: Alone) -> None:
    batch = alone.batch(2, seed=11)
    with (
        MoeClient(house.address, timeout=30) as client,
        grpc.insecure_channel(client.topology().lanes[0].address) as channel,
    ):
        stub = moe_pb2_grpc.LaneServiceStub(channel)
        stub.Forward(request_of(0, batch), timeout=30)
        with pytest.raises(grpc.RpcError) as failed:
            stub.Forward(request_of(0, batch), timeout=1e-5)
        assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        torch.testing.assert_close(client.forward(0, *batch, lane=0), alone.forward(0, *batch), **CLOSE)


def test_a_stream_answers_many_calls_by_job_id(house: LocalCluster, alone: Alone) -> None:
    batches = {f"job-{at}": alone.batch(1 + at % 5, seed=3000 + at) for at in range(20)}
    with (
        MoeClient(house.address) as client,
        grpc.insecure_channel(client.topology().lanes[3].address) as channel,
    ):
        requests = []
        for job, batch in batches.items():
            request = request_of(1, batch)
            request.job_id = job
            requests.append(request)
        bad = moe_pb2.ForwardRequest(layer=77, job_id="bad")
        replies = {
            r.job_id: r
            for r in moe_pb2_grpc.LaneServiceStub(channel).ForwardStream(iter([*requests, bad]), timeout=30)
        }
    assert replies.pop("bad").error.message.startswith("layer 77")
    assert replies.keys() == batches.keys()
    for job, reply in replies.items():
        answer = torch.frombuffer(bytearray(reply.reply.hidden.data), dtype=torch.float32).view(
            *reply.reply.hidden.shape
        )
        torch.testing.assert_close(answer, alone.forward(1, *batches[job]), **CLOSE)


@pytest.mark.parametrize("transport", ["inline", "shared_memory"])
def test_both_transports_carry_the_same_answer(house: LocalCluster, alone: Alone, transport: str) -> None:
    batch = alone.batch(50, seed=12)
    with MoeClient(house.address, transport=transport, timeout=30) as client:
        torch.testing.assert_close(client.forward(0, *batch), alone.forward(0, *batch), **CLOSE)


def test_a_tensor_in_a_region_is_answered_into_a_region(house: LocalCluster, alone: Alone) -> None:
    hidden, experts, weights = alone.batch(20, seed=13)
    with MoeClient(house.address, timeout=30) as client:
        source = client.allocate(1, hidden.shape, "fp32")
        answer = client.allocate(1, hidden.shape, "fp32")
        source.tensor.copy_(hidden)
        client.forward(0, source, experts, weights, output=answer)
        torch.testing.assert_close(answer.tensor, alone.forward(0, hidden, experts, weights), **CLOSE)


async def _async_answer(address: str, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    async with AsyncMoeClient(address) as client:
        return await client.forward(0, *batch)


def test_the_async_client_asks_the_same(house: LocalCluster, alone: Alone) -> None:
    import asyncio

    batch = alone.batch(6, seed=14)
    torch.testing.assert_close(
        asyncio.run(_async_answer(house.address, batch)), alone.forward(0, *batch), **CLOSE
    )


def test_a_rank_reads_only_the_experts_it_owns(client: MoeClient, alone: Alone) -> None:
    everything = sum(
        alone.checkpoint.expert_nbytes(layer) * alone.checkpoint.num_experts
        for layer in alone.checkpoint.layers
    )
    read = [rank.bytes_read for rank in client.status().ranks]
    assert read == [everything // 4] * 4


def test_model_topology_and_health_say_what_is_served(client: MoeClient, house: LocalCluster) -> None:
    model = client.model(placement=True)
    assert [layer.layer for layer in model.layers] == [0, 1]
    assert list(model.layers[0].slots) == list(range(8))
    assert (model.expert_parallel_size, model.layers[0].kernel) == (4, "torch_grouped_mm")
    assert model.layers[0].all2all_backend == "allgather_reducescatter"
    assert [lane.rank for lane in client.topology().lanes] == [0, 1, 2, 3]
    assert client.health() == "SERVING"
