"""A rank that is alone orders its own steps: they are counted, a hung one is found, others join and leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import torch
from failures import stand_still
from houses import Alone, house_config, request_of
from hung import hang, hung_config
from patient import PatientCallers
from served import served

from bench.service.faults.service import Service
from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.local_cluster import LocalCluster

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
LATE_SECONDS = 2.0
SECONDS = 60.0


def hidden_of(reply: moe_pb2.ForwardReply) -> torch.Tensor:
    return torch.frombuffer(bytearray(reply.hidden.data), dtype=torch.float32).view(*reply.hidden.shape)


def until(true: Callable[[], bool], seconds: float = SECONDS) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.02)


def own_order(house: LocalCluster) -> int:
    """How many steps the head has heard of that it did not order."""
    return house.head.coordinator._lone.steps


def test_its_steps_and_jobs_are_the_heads_counts(checkpoint_path: Path, alone: Alone) -> None:
    with LocalCluster(house_config(checkpoint_path)) as house, MoeClient(house.address) as client:
        before = client.status().steps
        for seed in range(20):
            batch = alone.batch(1 + seed % 5, seed)
            torch.testing.assert_close(
                client.forward(seed % 2, *batch), alone.forward(seed % 2, *batch), **CLOSE
            )
        until(lambda: client.status().steps == before + 20)
        assert own_order(house) == 20
        until(lambda: client.status().in_flight == 0)


@pytest.mark.timed
@pytest.mark.parametrize("action", ["hang", "hold"])
def test_a_step_that_hangs_ends_it_and_the_call_is_answered(
    checkpoint_path: Path, alone: Alone, tmp_path: Path, action: str
) -> None:
    """A thread that waits for ever; and one that holds the interpreter, so that nothing can be told."""
    config = hung_config(checkpoint_path, LATE_SECONDS)
    with Service(config, tmp_path / "service") as service:
        before = service.living()[0][0]
        # it rests before the step, and the head knows of none
        assert hang(service, alone, ("in a step", 0, action), rest=1.0) == before
        assert service.living()[0][0] != before


def test_a_stopped_one_goes_on_where_it_was(checkpoint_path: Path, alone: Alone) -> None:
    config = house_config(checkpoint_path, cluster__stopped_seconds=0.0, step__late_seconds=20.0)
    with LocalCluster(config) as house, PatientCallers(house.address, alone, [None, 0]) as callers:
        until(lambda: all(callers.answers.values()))
        stand_still(house.pid(0))
        time.sleep(1.0)
        generation = house.head.coordinator.generation
        os.kill(house.pid(0), signal.SIGCONT)
        seen = dict(callers.answers)
        until(lambda: all(callers.answers[lane] > seen[lane] + 5 for lane in seen))
        assert house.head.coordinator.generation == generation
    assert callers.failed == []


def test_a_head_that_stands_still_holds_up_no_step(
    checkpoint_path: Path, alone: Alone, tmp_path: Path
) -> None:
    with (
        served(tmp_path, checkpoint_path, "--launcher", "local") as service,
        MoeClient(service.address, timeout=SECONDS) as client,
    ):
        address = client.topology().lanes[0].address
        batch = alone.batch(3, seed=5)
        with grpc.insecure_channel(address) as channel:
            stub = moe_pb2_grpc.LaneServiceStub(channel)
            request = request_of(1, batch)
            stub.Forward(request, timeout=SECONDS)
            head = service.head
            stand_still(head)
            for _ in range(5):  # its launcher kills it a second later
                found = hidden_of(stub.Forward(request, timeout=SECONDS))
                torch.testing.assert_close(found, alone.forward(1, *batch), **CLOSE)
            stat = Path(f"/proc/{head}/stat").read_text()
            assert stat.rpartition(")")[2].split()[0] == "T", "it was the head's answer"
        with suppress(ProcessLookupError):
            os.kill(head, signal.SIGCONT)
        torch.testing.assert_close(client.forward(1, *batch), alone.forward(1, *batch), **CLOSE)


def test_others_join_and_leave_it_and_no_call_fails(checkpoint_path: Path, alone: Alone) -> None:
    config = house_config(
        checkpoint_path, members__max_lanes=2, members__max_owners=2, balance__redundant_experts=8
    )
    with LocalCluster(config) as house, MoeClient(house.address) as client:
        with PatientCallers(house.address, alone, [None, 0]) as callers:
            until(lambda: own_order(house) > 10)
            grown = client.scale(2, timeout=SECONDS)
            assert grown.outcome == "scaled", grown
            until(lambda: len(client.topology().lanes) == 2)
            alone_before = own_order(house)
            seen = dict(callers.answers)
            until(lambda: all(callers.answers[lane] > seen[lane] + 20 for lane in seen))
            assert own_order(house) == alone_before, "the head orders the steps of two"
            assert client.scale(1, timeout=SECONDS).outcome == "scaled"
            until(lambda: own_order(house) > alone_before + 20)
        assert callers.failed == []
