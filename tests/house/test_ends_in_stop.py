"""A process of a service dies while that stops: calls under way are answered all the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from failures import stand_still
from houses import Alone, request_of
from processes import descendants_of
from served import Service, served

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.client import MoeClient
from moeserve.proto.tensors import as_torch, spec_of

EP2 = ("--launcher", "local", "--data-parallel-size", "2", "--enable-expert-parallel")
SECONDS = 60.0


def until(true: Callable[[], object], service: Service) -> None:
    limit = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < limit, service.log.read_text()[-3000:]
        time.sleep(0.01)


def patient(folder: Path, leaving_seconds: float) -> str:
    """The path of a configuration by which a rank may stand still, and calls under way have long."""
    made = folder / "service.toml"
    made.write_text(
        f"[server]\ndrain_seconds = {SECONDS}\nleaving_seconds = {leaving_seconds}\n"
        f"[cluster]\nstopped_seconds = 0.0\n[step]\ntimeout_seconds = {SECONDS}\n"
    )
    return str(made)


@pytest.mark.parametrize("dies", ["moeserve-head", "moeserve-rank1", ""])
def test_a_call_under_way_is_answered_though_a_process_dies_while_the_service_stops(
    tmp_path: Path, checkpoint_path: Path, alone: Alone, dies: str
) -> None:
    batch = alone.batch(8, seed=3)
    with served(tmp_path, checkpoint_path, patient(tmp_path, 0.0), *EP2) as service:
        with MoeClient(service.address) as client:
            lane = next(one.address for one in client.topology().lanes if one.rank == 0)
            slow = service.named("moeserve-rank1")
            stand_still(slow)
            with grpc.insecure_channel(lane) as channel:
                asked = moe_pb2_grpc.LaneServiceStub(channel).Forward.future(
                    request_of(1, batch), timeout=SECONDS
                )
                until(lambda: client.status().in_flight, service)
                for pid in [service.pid, *([] if dies else map(int, descendants_of(service.pid)))]:
                    os.kill(pid, signal.SIGTERM)  # none dies, though all are sent it
                until(lambda: "lanes take no further call" in service.log.read_text(), service)
                if dies:
                    os.kill(service.named(dies), signal.SIGKILL)
                if dies != "moeserve-rank1":
                    os.kill(slow, signal.SIGCONT)
                answer: moe_pb2.ForwardReply = asked.result(SECONDS)
        assert service.process.wait(SECONDS) == 0
        assert "does not stop" not in service.log.read_text()
    found = as_torch(answer.hidden.data, spec_of(answer.hidden, "x", rank=2, dtypes=("fp32",)))
    torch.testing.assert_close(found, alone.forward(1, *batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("leaving_seconds", [0.0, 3.0])
def test_calls_on_the_lane_of_a_rank_that_dies_while_the_service_stops_go_to_another(
    tmp_path: Path, checkpoint_path: Path, alone: Alone, leaving_seconds: float
) -> None:
    batch = alone.batch(8, seed=3)
    with served(tmp_path, checkpoint_path, patient(tmp_path, leaving_seconds), *EP2) as service:
        with MoeClient(service.address, timeout=SECONDS) as client, ThreadPoolExecutor(2) as pool:
            client.forward(1, *batch)
            slow = service.named("moeserve-rank1")
            stand_still(slow)
            asked = [pool.submit(client.forward, 1, *batch) for _ in range(2)]  # one at each lane
            until(lambda: client.status().in_flight, service)
            time.sleep(0.5)
            os.kill(service.pid, signal.SIGTERM)
            if leaving_seconds:
                until(lambda: not client.topology().lanes, service)
            else:
                until(lambda: "lanes take no further call" in service.log.read_text(), service)
            os.kill(slow, signal.SIGKILL)
            answers = [one.result(SECONDS) for one in asked]
        assert service.process.wait(SECONDS) == 0
        said = service.log.read_text()
        assert "lanes take calls again for 0.5 s: ranks [1] are lost" in said and "does not stop" not in said
    for found in answers:
        torch.testing.assert_close(found, alone.forward(1, *batch), rtol=1e-4, atol=1e-4)
