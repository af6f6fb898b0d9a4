"""The device lane of an engine's process: in the order of a forward pass and out of it, over losses."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from houses import Alone, house_config

from moeserve.proto import moe_pb2
from moeserve.proto.client import Choice, MoeClient
from moeserve.proto.errors import DeadlineExceeded, InvalidArgument, NotFound, Overloaded, Unavailable
from moeserve.proto.integrations import attached_service
from moeserve.proto.integrations.attached_service import AttachedService
from moeserve.proto.integrations.remote_layers import RemoteLayers
from moeserve.proto.integrations.settings import Settings
from moeserve.proto.passes.attached import AttachedLane
from moeserve.runtime.launch.local_cluster import LocalCluster

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "one"
    path.mkdir()
    make_checkpoint("qwen3_moe", path)
    return path


@pytest.fixture(scope="module")
def house(path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(house_config(path, passes__patience_seconds=2.0, **EP2)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alone(path: Path) -> Alone:
    return Alone(path)


@pytest.fixture
def service(house: LocalCluster) -> Iterator[AttachedService]:
    made = AttachedService(Settings(house.address, timeout=60, mode="attached"))
    yield made
    made.close()


def answered(service: AttachedService, alone: Alone, layer: int, rows: int, seed: int) -> int:
    """Asks for one layer, whose answer must be the formulas'; the version of the weights."""
    hidden, ids, weights = alone.batch(rows, seed)
    reply = service.call(layer, hidden, Choice(ids, weights))
    torch.testing.assert_close(reply.hidden, alone.forward(layer, hidden, ids, weights), **CLOSE)
    return reply.weights_version


def announced(service: AttachedService) -> int:
    assert service._lane is not None
    return service._lane.number


def test_forward_passes_are_announced_once(service: AttachedService, alone: Alone) -> None:
    for turn in range(5):
        for layer in (0, 1):
            answered(service, alone, layer, 1 + turn, turn)
    assert announced(service) == 1


def test_layers_out_of_order_and_more_rows_than_a_step_takes(service: AttachedService, alone: Alone) -> None:
    for layer, rows in ((1, 3), (1, 1), (0, 600), (1, 2), (0, 2)):
        answered(service, alone, layer, rows, rows)
    assert announced(service) > 3


def test_rows_of_another_dtype_get_a_lane_of_theirs(service: AttachedService, alone: Alone) -> None:
    answered(service, alone, 0, 4, 0)
    hidden, ids, weights = alone.batch(4, 1)
    reply = service.call(0, hidden.bfloat16(), Choice(ids, weights))
    assert reply.hidden.dtype == torch.bfloat16
    torch.testing.assert_close(
        reply.hidden.float(), alone.forward(0, hidden, ids, weights), rtol=0.1, atol=0.1
    )


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_costs_waiting_and_nothing_else(
    path: Path, alone: Alone, strike: signal.Signals
) -> None:
    config = house_config(path, **EP2).with_values({"step.timeout_seconds": 3.0})
    with LocalCluster(config) as house, MoeClient(house.address, timeout=60) as client:
        service = AttachedService(Settings(house.address, timeout=90, mode="attached"))
        for turn in range(4):
            answered(service, alone, turn % 2, 3, turn)
        generation = client.status().generation
        for rank in (0, 1):  # one of them has the lane
            os.kill(house.pid(rank), strike)
            for turn in range(6):
                answered(service, alone, turn % 2, 3, turn)
        assert client.status().generation > generation
        service.close()


def test_an_engine_takes_a_lane_wherever_one_is_free_and_waits_for_one(path: Path, alone: Alone) -> None:
    """Which rank it asks first follows from its name, and all of a rank's may be taken."""
    with LocalCluster(house_config(path, passes__lanes=1, **EP2)) as house:
        settings = Settings(house.address, timeout=60, mode="attached")
        services = [AttachedService(settings) for _ in range(2)]
        for service in services:
            answered(service, alone, 0, 3, 0)
        late = AttachedService(Settings(house.address, timeout=3.0, mode="attached"))
        with pytest.raises(Overloaded):
            answered(late, alone, 0, 3, 0)
        late.close()
        waiting = AttachedService(settings)
        leaving = threading.Timer(0.5, services[0].close)
        leaving.start()
        answered(waiting, alone, 0, 3, 0)
        for service in (waiting, services[1]):
            service.close()


def test_a_deadline_says_what_was_waited_for(
    service: AttachedService, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All lanes are taken, and the time is over as the service is asked again; or it is over at once."""
    taken = Overloaded("RESOURCE_EXHAUSTED", "lanes_taken", "1 device lanes are attached")
    late = DeadlineExceeded("DEADLINE_EXCEEDED", "deadline", "nothing came")
    failures = iter([taken, late, late])

    def attached(*given: object) -> AttachedLane:
        raise next(failures)

    monkeypatch.setattr(service, "_attached", attached)
    with pytest.raises(Overloaded, match="1 device lanes are attached"):
        answered(service, alone, 0, 3, 0)
    with pytest.raises(DeadlineExceeded, match="nothing came"):
        answered(service, alone, 0, 3, 0)


def test_a_start_waits_while_the_group_forms(
    house: LocalCluster, service: AttachedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        service._client, "topology", lambda: moe_pb2.GetTopologyReply(reason="waiting for ranks")
    )
    with pytest.raises(Unavailable, match="waiting for ranks"):
        service.model()


def test_a_reload_is_seen_and_one_answer_has_one_version(
    service: AttachedService, house: LocalCluster, path: Path, alone: Alone
) -> None:
    first = answered(service, alone, 0, 600, 1)
    with MoeClient(house.address, timeout=60) as client:
        assert client.reload(str(path)).outcome == "reloaded"
    assert answered(service, alone, 0, 600, 1) > first


def test_an_answer_whose_rows_saw_two_versions_is_asked_for_again(
    service: AttachedService, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, told = service._step, iter([7, 8, 8])

    def step(*given: object) -> int:
        real(*given)  # type: ignore[arg-type]
        return next(told, 8)

    monkeypatch.setattr(service, "_step", step)
    monkeypatch.setattr(attached_service, "ROWS", 4)
    assert answered(service, alone, 0, 8, 1) == 8
    assert next(told, None) is None


def test_without_a_rank_on_this_host_a_start_is_refused(
    house: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached_service, "host_id", lambda: "elsewhere")
    layers = RemoteLayers(Settings(house.address, timeout=2, mode="attached"))
    assert isinstance(layers.client, AttachedService)
    with pytest.raises(NotFound, match=r"MOESERVE_EXPERTS_MODE=attached needs a rank of .* on this host"):
        layers.served()


def test_what_is_wrong_for_good_is_not_asked_again(service: AttachedService, alone: Alone) -> None:
    hidden, ids, weights = alone.batch(2, 0)
    with pytest.raises(InvalidArgument):
        service.call(0, hidden, Choice(ids + 100, weights))
    answered(service, alone, 0, 2, 0)


def test_no_rows_have_an_answer(service: AttachedService, alone: Alone) -> None:
    answered(service, alone, 0, 0, 0)


def test_nobody_is_waited_for_longer_than_the_timeout(house: LocalCluster, alone: Alone) -> None:
    service = AttachedService(Settings("127.0.0.1:1", timeout=0.5, mode="attached"))
    with pytest.raises((Unavailable, DeadlineExceeded)):
        service.call(0, torch.ones(1, 64), Choice(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2)))
    service.close()
