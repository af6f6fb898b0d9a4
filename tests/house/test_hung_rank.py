"""A rank that hangs while its process runs: a step that stands still ends, and the one that holds it up is
named, killed and replaced; those that waited for it are left alone.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from houses import Alone, house_config

from bench.service.chaos import Case, unnamed
from bench.service.faults import points
from bench.service.faults.service import Service
from moeserve.proto.client import MoeClient

RANKS = 3
EP3 = {"parallel__data_parallel_size": RANKS, "parallel__enable_expert_parallel": True}
LATE_SECONDS = 3.0
HUNG = 1


@pytest.mark.timed
@pytest.mark.parametrize(
    ("state", "action"),
    [
        ("in a step", "hang"),  # a thread that waits for ever, and all else answers
        ("in combine", "hold"),  # the interpreter is held, and nothing answers
        ("in dispatch", "hang"),  # where those are that wait for it
    ],
)
def test_a_hung_rank_is_named_killed_and_replaced(
    checkpoint_path: Path, alone: Alone, tmp_path: Path, state: str, action: str
) -> None:
    config = house_config(
        checkpoint_path,
        **EP3,
        step__late_seconds=LATE_SECONDS,
        step__timeout_seconds=5.0,
        server__metrics_port=-1,
        cluster__launcher="local",
    )
    batch = alone.batch(10, seed=3)
    with Service(config, tmp_path / "service") as service, MoeClient(service.address, timeout=120) as client:
        wanted = alone.forward(1, *batch)
        torch.testing.assert_close(client.forward(1, *batch), wanted, rtol=1e-4, atol=1e-4)
        before, generation, mark = service.living(), service.status()[2], service.logged()
        points.arm(service.folder, state, HUNG, action)
        answers: list[torch.Tensor] = []
        asking = threading.Thread(target=lambda: answers.append(client.forward(1, *batch)))
        asking.start()
        until = time.monotonic() + 60.0
        while (met := points.fired(service.folder, state, HUNG)) is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert service.wait_whole(generation, 90.0) == ""
        asking.join(60.0)
        assert answers, "the call was answered"
        torch.testing.assert_close(answers[0], wanted, rtol=1e-4, atol=1e-4)
        after, told = service.living(), service.log(mark)
        assert met[0] == before[HUNG][0] != after[HUNG][0]
        assert {rank: after[rank] for rank in (0, 2)} == {rank: before[rank] for rank in (0, 2)}, told
        others = {before[0][0], before[2][0]}
        assert unnamed(told, Case(state, HUNG, action), met[0], others) == ""
        found = "it has not left its step" if state == "in dispatch" else "it is late: "
        assert f"rank {HUNG} (pid {met[0]}) is given up: {found}" in told
