"""A service that covers the loss of an owner: the others read nothing, by second replicas or by shadows."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from changes import Changes
from checkpoints import make_checkpoint
from houses import EP4, Alone, house_config
from prometheus_client.parser import text_string_to_metric_families

from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.local_cluster import LocalCluster

SECONDS = 60.0
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
LIVING = (0, 1, 3)
Started = Callable[..., LocalCluster]


@pytest.fixture
def start(checkpoint_path: Path) -> Iterator[Started]:
    """Starts four ranks that cover a loss, with these keys of the section balance; eight experts."""
    made: list[LocalCluster] = []

    def started(
        reload_root: Path | str = "", checkpoint: Path = checkpoint_path, **balance: Any
    ) -> LocalCluster:
        keys = {f"balance__{name}": value for name, value in ({"cover_owners": 1} | balance).items()}
        root = {"server__reload_root": str(reload_root)}
        made.append(LocalCluster(house_config(checkpoint, **keys, **root, **EP4)))
        return made[-1].__enter__()

    yield started
    for house in made:
        house.__exit__(None, None, None)


def until(true: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < limit, what
        time.sleep(0.02)


def read_bytes(house: LocalCluster, seat: int) -> dict[str, float]:
    """Bytes that a rank has read from the checkpoint, and that it keeps in host memory."""
    target = house.head.coordinator.seats()[seat].metrics
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=SECONDS) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    names = {"moe_checkpoint_read_bytes", "moe_shadow_bytes"}
    return {one.name: one.samples[0].value for one in families if one.name in names}


def sources(house: LocalCluster) -> dict[str, int]:
    """Layers of all members by where their experts would come from."""
    covers = house.head.coordinator.view.covers().values()
    return {
        name: sum(getattr(one, name) for one in covers) for name in ("replicas", "shadows", "disk", "waits")
    }


def check(client: MoeClient, alone: Alone) -> None:
    """Both layers answer right, over every lane."""
    for seed in range(4):
        for layer in (0, 1):
            batch = alone.batch(6, seed)
            found = client.forward(layer, *batch)
            torch.testing.assert_close(torch.as_tensor(found), alone.forward(layer, *batch), **CLOSE)


def members(house: LocalCluster) -> tuple[int, ...]:
    return house.head.coordinator.epoch.members.seats


def lose(house: LocalCluster, client: MoeClient, alone: Alone) -> None:
    """Kills rank 2, and has calls answered right while it is away and once it is back."""
    changes = Changes(house)
    os.kill(house.pid(2), signal.SIGKILL)
    changes.until(lambda was: was.seats == LIVING, "it goes on without rank 2")
    check(client, alone)
    until(lambda: members(house) == (0, 1, 2, 3) and house.state() == ("serving", ""), "rank 2 is back")
    check(client, alone)


def test_with_second_replicas_a_loss_reads_nothing(start: Started, alone: Alone) -> None:
    house = start(redundant_experts=8)
    assert sources(house) == {"replicas": 8, "shadows": 0, "disk": 0, "waits": 0}
    with MoeClient(house.address, timeout=SECONDS) as client:
        check(client, alone)
        before = {seat: read_bytes(house, seat) for seat in LIVING}
        lose(house, client, alone)
        assert {seat: read_bytes(house, seat) for seat in LIVING} == before
        assert sources(house)["replicas"] == 8


def test_with_shadows_a_loss_reads_nothing_from_disk(start: Started, alone: Alone) -> None:
    house = start(redundant_experts=4, shadows=True)
    until(lambda: sources(house)["disk"] == 0, "shadows are there")
    assert sources(house)["shadows"] > 0
    with MoeClient(house.address, timeout=SECONDS) as client:
        check(client, alone)
        ranks = client.status().ranks
        assert sum(r.cover.shadows for r in ranks) == sources(house)["shadows"]
        assert all(r.cover.replicas + r.cover.shadows == 2 for r in ranks)
        kept = {r.rank: r.shadow_bytes for r in ranks}
        assert kept == {r.rank: read_bytes(house, r.rank)["moe_shadow_bytes"] for r in ranks}
        assert sum(r.cover.bytes for r in ranks) == sum(kept.values()), "each is kept once"
        before = {seat: read_bytes(house, seat) for seat in LIVING}
        lose(house, client, alone)
        until(lambda: sources(house)["disk"] == 0, "shadows are there again")
        for seat in LIVING:
            after = read_bytes(house, seat)
            assert after["moe_checkpoint_read_bytes"] == before[seat]["moe_checkpoint_read_bytes"]
        assert sum(found["moe_shadow_bytes"] for found in before.values()) > 0


def test_two_that_are_lost_at_once_come_back_and_the_cover_with_them(start: Started, alone: Alone) -> None:
    house = start(redundant_experts=8, shadows=True, interval_seconds=0.5)
    with MoeClient(house.address, timeout=SECONDS) as client:
        check(client, alone)
        changes = Changes(house)
        for seat in (1, 2):
            os.kill(house.pid(seat), signal.SIGKILL)
        changes.until(lambda was: was.seats == (0, 3), "two hold all experts")
        check(client, alone)
        until(lambda: members(house) == (0, 1, 2, 3) and house.state() == ("serving", ""), "both are back")
        check(client, alone)
        until(lambda: sources(house)["replicas"] == 8, "every expert has two owners again")
        check(client, alone)


def test_experts_that_move_all_the_time_are_right_whoever_is_killed(tmp_path: Path, start: Started) -> None:
    make_checkpoint("qwen3_moe", tmp_path, experts=24, layers=3, top_k=4)
    moving = {"policy": "eplb", "interval_seconds": 0.3, "min_tokens": 1, "min_imbalance": 0.0}
    house, alone = start(checkpoint=tmp_path, redundant_experts=8, shadows=True, **moving), Alone(tmp_path)
    over, wrong, rounds = threading.Event(), list[str](), itertools.count()

    def call() -> None:
        with MoeClient(house.address, timeout=SECONDS) as client:
            for turn in rounds:
                hidden, experts, weights = alone.batch(8, turn % 13)
                experts = (experts + turn // 7) % 24  # the hot ones wander
                for layer in range(3):
                    found = torch.as_tensor(client.forward(layer, hidden, experts, weights))
                    if not torch.allclose(found, alone.forward(layer, hidden, experts, weights), **CLOSE):
                        wrong.append(f"layer {layer}, round {turn}")
                if over.is_set():
                    return

    asking = [threading.Thread(target=call) for _ in range(2)]
    for one in asking:
        one.start()
    for seat in (1, 3, 0):
        epoch = house.head.coordinator.epoch.number
        until(lambda epoch=epoch: house.head.coordinator.epoch.number > epoch + 4, "experts move")
        changes = Changes(house)
        os.kill(house.pid(seat), signal.SIGKILL)
        changes.until(lambda was, seat=seat: seat not in was.seats, "it goes on")
        until(lambda: members(house) == (0, 1, 2, 3) and house.state() == ("serving", ""), "it is back")
    over.set()
    for one in asking:
        one.join(SECONDS)
        assert not one.is_alive()
    assert wrong == []


def test_shadows_follow_a_rebalance_and_a_reload(start: Started, alone: Alone, tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path / "newer", seed=7)
    newer, house = Alone(tmp_path / "newer"), start(tmp_path, redundant_experts=4, shadows=True)
    with MoeClient(house.address, timeout=SECONDS) as client:
        check(client, alone)
        assert client.rebalance(policy="eplb").outcome in ("moved", "even")
        until(lambda: sources(house)["disk"] == 0, "shadows of the new placement are there")
        assert client.reload(str(tmp_path / "newer")).outcome == "reloaded"
        until(lambda: sources(house)["disk"] == 0, "shadows of the new weights are there")
        before = {seat: read_bytes(house, seat)["moe_checkpoint_read_bytes"] for seat in LIVING}
        lose(house, client, newer)
        assert {seat: read_bytes(house, seat)["moe_checkpoint_read_bytes"] for seat in LIVING} == before
