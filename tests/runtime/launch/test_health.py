"""What health says of processes that drain, when the group forms again meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from checkpoints import make_checkpoint
from grpc_health.v1 import health_pb2, health_pb2_grpc
from houses import house_config

from moeserve.runtime.doors.calls.rows import RowAdmission, RowLimits
from moeserve.runtime.launch.head_process import HeadProcess
from moeserve.runtime.launch.rank_process import _RankProcess

SECONDS = 10.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def state(head: HeadProcess, name: str) -> None:
    with head.coordinator._lock:
        head.coordinator.generations.set_state(name, "")


@pytest.mark.parametrize("drained", [False, True])
def test_a_head_that_drains_serves_nobody_when_the_group_forms_again(tmp_path: Path, drained: bool) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    head = HeadProcess(house_config(tmp_path), "127.0.0.1")
    try:
        with grpc.insecure_channel(head.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            def said() -> int:
                return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS).status)

            assert said() == NOT_SERVING
            if drained:
                head._leave("the service is stopping")
            state(head, "serving")
            assert said() == (NOT_SERVING if drained else SERVING)
    finally:
        state(head, "forming")
        head.stop()


def test_a_rank_that_drains_serves_nobody_when_the_group_forms_again() -> None:
    told = list[bool]()
    door = SimpleNamespace(drain=lambda reason: None, admission=RowAdmission(RowLimits()))
    endpoint = SimpleNamespace(drain=lambda reason: None, set_serving=lambda *, serving: told.append(serving))
    process: Any = object.__new__(_RankProcess)
    process._endpoint, process._door, process._draining = endpoint, door, False
    process._group_runs = SimpleNamespace(serving=lambda generation: None)
    process._telling, process._telemetry = threading.Lock(), SimpleNamespace(set_group=lambda *group: None)
    process._serving(1, 0)
    process._drain("the service is stopping")
    process._serving(0, 0)
    process._serving(2, 0)
    assert told == [True, False, False, False]
