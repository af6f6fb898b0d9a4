"""A service one of whose ranks hangs in a step while a call waits for it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
from houses import Alone, house_config

from bench.service.faults import points
from bench.service.faults.service import Service
from moeserve.proto.client import MoeClient
from moeserve.runtime.config import Config

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
FIRED_SECONDS, WHOLE_SECONDS = 60.0, 90.0


def hung_config(path: Path, late_seconds: float, **values: Any) -> Config:
    """A configuration in which a step that does not go on for `late_seconds` is somebody's fault."""
    return house_config(
        path,
        step__late_seconds=late_seconds,
        step__timeout_seconds=5.0,
        server__metrics_port=-1,
        cluster__launcher="local",
        **values,
    )


def hang(service: Service, alone: Alone, point: tuple[str, int, str], rest: float = 0.0) -> int:
    """Has the rank of `point` (state, rank, action) hang in the step of a call, which comes `rest` seconds
    after another one; returns that process's id once the group is whole again and the call was answered.
    """
    state, rank, action = point
    batch = alone.batch(10, seed=3)
    with MoeClient(service.address, timeout=120) as client:
        wanted = alone.forward(1, *batch)
        torch.testing.assert_close(client.forward(1, *batch), wanted, **CLOSE)
        generation = service.status()[2]
        time.sleep(rest)
        points.arm(service.folder, state, rank, action)
        answers: list[torch.Tensor] = []
        asking = threading.Thread(target=lambda: answers.append(client.forward(1, *batch)))
        asking.start()
        until = time.monotonic() + FIRED_SECONDS
        while (met := points.fired(service.folder, state, rank)) is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert service.wait_whole(generation, WHOLE_SECONDS) == ""
        asking.join(FIRED_SECONDS)
        assert answers, "the call was answered"
        torch.testing.assert_close(answers[0], wanted, **CLOSE)
    return int(met[0])
