"""A killed rank, where no call is to wait for it: callers hear of it within two seconds, and the group forms
again by itself and serves.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import grpc
import pytest
import torch
from failures import HEARD_SECONDS, Callers, serve_again
from houses import EP4, Alone, house_config, request_of

from moeserve.proto import moe_pb2_grpc
from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.local_cluster import LocalCluster

EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}


@pytest.mark.timed
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_and_replaced(checkpoint_path: Path, alone: Alone, victim: int) -> None:
    with LocalCluster(house_config(checkpoint_path, members__hold_seconds=0.0, **EP4)) as house:
        callers = Callers(house.address, alone)
        time.sleep(0.5)
        generation = serve_again(house.address)
        killed = time.monotonic()
        os.kill(house.pid(victim), signal.SIGKILL)
        callers.join()
        assert sorted(callers.failures) == [0, 1, 2, 3]
        for rank, (when, code, text) in callers.failures.items():
            assert code == "UNAVAILABLE", text
            assert when - killed < HEARD_SECONDS, (rank, when - killed)
            if rank != victim:
                assert f"rank {victim} (pid" in text, text
        assert serve_again(house.address) > generation
        batch = alone.batch(10, seed=99)
        with MoeClient(house.address, timeout=30) as client:
            torch.testing.assert_close(
                client.forward(1, *batch), alone.forward(1, *batch), rtol=1e-4, atol=1e-4
            )


def test_the_client_library_rides_over_a_killed_rank(checkpoint_path: Path, alone: Alone) -> None:
    """Forward is pure, so a call that met UNAVAILABLE is made again within its deadline."""
    with (
        LocalCluster(house_config(checkpoint_path, **EP4)) as house,
        MoeClient(house.address, timeout=60) as client,
    ):
        batches = [alone.batch(5, seed=at) for at in range(60)]
        threading.Timer(0.3, lambda: os.kill(house.pid(1), signal.SIGKILL)).start()
        for batch in batches:
            torch.testing.assert_close(
                client.forward(0, *batch), alone.forward(0, *batch), rtol=1e-4, atol=1e-4
            )
            time.sleep(0.02)


def test_new_calls_are_refused_with_the_reason_while_the_group_forms(
    checkpoint_path: Path, alone: Alone
) -> None:
    never = {"cluster__stopped_seconds": 0.0, "members__hold_seconds": 0.0}
    with LocalCluster(house_config(checkpoint_path, **EP2, **never)) as house:
        survivor = house.pid(0)
        os.kill(survivor, signal.SIGSTOP)  # without it no group forms
        os.kill(house.pid(1), signal.SIGKILL)
        until = time.monotonic() + 20
        while house.state()[0] == "serving":
            assert time.monotonic() < until
            time.sleep(0.01)
        with grpc.insecure_channel(house.address) as channel, pytest.raises(grpc.RpcError) as failed:
            moe_pb2_grpc.FrontServiceStub(channel).Forward(request_of(0, alone.batch(1, seed=1)), timeout=5)
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "rank 1" in failed.value.details()
        with MoeClient(house.address) as client:
            assert client.health() == "NOT_SERVING"
        os.kill(survivor, signal.SIGCONT)
        serve_again(house.address)
