"""A running group gets ranks and loses some: no call fails, and who cannot be served is told why."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from houses import TP4, Alone, house_config
from patient import PatientCallers
from served import served

from moeserve.cli import main
from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.client import MoeClient
from moeserve.proto.errors import MoeError
from moeserve.runtime.launch.local_cluster import LocalCluster

EP3 = {"parallel__data_parallel_size": 3, "parallel__enable_expert_parallel": True}
ROOM = {"members__max_lanes": 4, "members__max_owners": 4}
SECONDS = 60.0


@pytest.fixture
def house(checkpoint_path: Path) -> Iterator[LocalCluster]:
    """Three ranks with slots of four experts each: two of them hold all of the eight."""
    values = EP3 | ROOM | {"balance__redundant_experts": 4}
    with LocalCluster(house_config(checkpoint_path, **values)) as made:
        yield made


def keep_on_the_last_rank_alone(house: LocalCluster, experts: list[int]) -> None:
    """Moves until these experts lie on rank 3 alone; others of its experts have replicas."""
    placement = house.head.coordinator.epoch.placement
    slots, width = placement.slots.copy(), placement.slots_per_owner
    others = [expert for expert in range(placement.experts) if expert not in experts]
    for row in slots:
        row[3 * width : 3 * width + len(experts)] = experts
        row[: 3 * width] = np.resize(others, 3 * width)
    with house.head.rebalancer.alone():
        assert house.head.rebalancer.move_to(placement.with_slots(slots)).outcome == "moved"


def seats_of(client: MoeClient) -> list[int]:
    """Ranks that are members and up."""
    return sorted(one.rank for one in client.status().ranks if one.up)


def test_ranks_come_and_go_and_no_call_fails(house: LocalCluster, alone: Alone) -> None:
    with MoeClient(house.address) as client, PatientCallers(house.address, alone, [None, 0, 1]) as callers:
        grown = client.scale(4, timeout=SECONDS)
        assert (grown.outcome, list(grown.seats), list(grown.joined)) == ("scaled", [0, 1, 2, 3], [3])
        assert [lane.rank for lane in client.topology().lanes] == [0, 1, 2, 3] == seats_of(client)
        assert client.scale(4).outcome == "unchanged"
        pid = house.pid(3)
        with PatientCallers(house.address, alone, [3]) as of_the_new:
            time.sleep(0.5)
        assert of_the_new.failed == [] and of_the_new.answers[3] > 0, "its lane is one as all others"

        keep_on_the_last_rank_alone(house, experts=[0, 1])
        shrunk = client.scale(3, timeout=SECONDS)
        assert (shrunk.outcome, list(shrunk.seats), list(shrunk.left)) == ("scaled", [0, 1, 2], [3])
        assert shrunk.moves == 4 and shrunk.nbytes > 0, "two experts of each of two layers"
        assert [lane.rank for lane in client.topology().lanes] == [0, 1, 2] == seats_of(client)
        until = time.monotonic() + SECONDS
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < until, "the process of the rank that left runs on"
            time.sleep(0.05)

        again = client.scale(4, timeout=SECONDS)
        assert (again.outcome, list(again.joined)) == ("scaled", [3]) and house.pid(3) != pid
        assert client.scale(2, timeout=SECONDS).outcome == "scaled"
        assert seats_of(client) == [0, 1]
        assert not house.head.coordinator.progress().broken, "nothing has failed: no reform is counted"
        before = dict(callers.answers)
        time.sleep(0.5)
        assert all(callers.answers[lane] > count for lane, count in before.items())
    assert callers.failed == []


def test_what_cannot_be_is_refused_by_name(house: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    with MoeClient(house.address) as client:
        with pytest.raises(MoeError, match=r"members\.max_lanes and members\.max_owners = 5 or more"):
            client.scale(5)
        with pytest.raises(MoeError, match=r"ranks=1: .*spare slots"):
            client.scale(1)
        with pytest.raises(ValueError, match="ranks=0"):
            client.scale(0)
        assert main(["scale", house.address, "5"]) == 1
        assert "room for 4 lanes and 4 owners" in capsys.readouterr().err
        assert seats_of(client) == [0, 1, 2]
    with grpc.insecure_channel(house.address) as channel:
        with pytest.raises(grpc.RpcError, match="ranks: 0") as refused:
            moe_pb2_grpc.AdminServiceStub(channel).Scale(moe_pb2.ScaleRequest(), timeout=SECONDS)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_fewer_ranks_stand_the_loss_of_one_or_are_refused(checkpoint_path: Path, alone: Alone) -> None:
    values = EP3 | ROOM | {"balance__redundant_experts": 4, "balance__cover_owners": 1}
    with (
        LocalCluster(house_config(checkpoint_path, **values)) as house,
        MoeClient(house.address) as client,
        PatientCallers(house.address, alone, [None]) as callers,
    ):
        with pytest.raises(MoeError, match=r"balance\.cover_owners = 1: 2 owners do not stand the loss"):
            client.scale(2)
        assert client.scale(4, timeout=SECONDS).outcome == "scaled"
        grown = house.head.coordinator.epoch.placement
        assert (np.bincount(grown.slots[0], minlength=8) >= 2).all(), "all have a second owner at once"
        assert client.scale(3, timeout=SECONDS).outcome == "scaled"
    assert callers.failed == []


def test_slices_of_experts_neither_come_nor_go(checkpoint_path: Path) -> None:
    with LocalCluster(house_config(checkpoint_path, **TP4)) as house, MoeClient(house.address) as client:
        for ranks in (3, 5):
            with pytest.raises(MoeError, match="each of the 4 ranks holds a slice of every expert"):
                client.scale(ranks)
        assert client.scale(4).outcome == "unchanged"


def test_a_rank_that_is_killed_while_it_joins_joins_all_the_same(house: LocalCluster, alone: Alone) -> None:
    replies = []
    with MoeClient(house.address) as client, PatientCallers(house.address, alone, [None]) as callers:
        asking = threading.Thread(target=lambda: replies.append(client.scale(4, timeout=SECONDS)))
        asking.start()
        until = time.monotonic() + SECONDS
        while 3 not in house.ranks._processes:
            assert time.monotonic() < until
            time.sleep(0.001)
        first = house.pid(3)
        os.kill(first, signal.SIGKILL)
        asking.join(SECONDS)
        assert [one.outcome for one in replies] == ["scaled"]
        assert seats_of(client) == [0, 1, 2, 3] and house.pid(3) != first
    assert callers.failed == []


def test_a_head_that_starts_again_goes_on_with_the_ranks_that_there_were(
    tmp_path: Path, checkpoint_path: Path, alone: Alone
) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[balance]\nredundant_experts = 4\n[members]\nmax_lanes = 4\nmax_owners = 4\n")
    flags = ("--launcher", "local", "--data-parallel-size", "3", "--enable-expert-parallel")
    with (
        served(tmp_path, checkpoint_path, str(config), *flags) as service,
        MoeClient(service.address) as client,
        PatientCallers(service.address, alone, [None]) as callers,
    ):
        for ranks in (4, 2):
            assert client.scale(ranks, timeout=SECONDS).outcome == "scaled"
            before, generation = service.read(), service.serves()
            os.kill(service.head, signal.SIGKILL)
            service.serves(generation)
            time.sleep(1.0)  # the launcher looks ten times a second whom it is to start, or to end
            assert seats_of(client) == list(range(ranks)) and service.read() == before
        assert client.scale(3, timeout=SECONDS).outcome == "scaled"
    assert callers.failed == []
