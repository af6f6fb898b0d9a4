"""A service whose dispatchers are chosen by cost: steps travel differently and answer alike."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest
import torch
from costing_ranks import FITTING
from houses import Alone, house_config

from moeserve.device.machine import machine_named
from moeserve.dispatch.costs.costs import Costs, DispatcherCost, Point
from moeserve.dispatch.costs.files import store_costs
from moeserve.proto.client import MoeClient
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.runtime.planning.costing import costing_of
from moeserve.runtime.planning.layers import plans_for
from moeserve.runtime.served import served_from

EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}
LANE_ROWS = 64
SMALL, LARGE = "allgather_reducescatter", "all2allv"
BOUND = 8
"""Rows of a lane where the two cost the same."""


def test_small_and_large_steps_have_their_own_dispatchers(
    checkpoint_path: Path, alone: Alone, tmp_path: Path
) -> None:
    by_cost = {"plan__measure": "always", "plan__costs": str(tmp_path)}
    config = house_config(checkpoint_path, step__lane_rows=LANE_ROWS, **by_cost, **EP2)
    (plan, *_) = plans_for(served_from(config), machine_named("cpu", ()), config.plan.wanted).values()
    times = {SMALL: [(1, 1.0), (LANE_ROWS, 1.0 * LANE_ROWS)], LARGE: [(1, BOUND), (LANE_ROWS, BOUND)]}
    wire = plan.dispatchers[0].wire.name
    dear = {name: [(1, 2.0 * LANE_ROWS), (LANE_ROWS, 2.0 * LANE_ROWS)] for name in FITTING}
    costs = [
        DispatcherCost(name, wire, tuple(Point(rows, seconds, 0.0) for rows, seconds in points))
        for name, points in (dear | times).items()
    ]
    store_costs(Costs(costing_of(config).setting(plan, (socket.gethostname(),)), tuple(costs)), tmp_path)
    kept = [path.read_bytes() for path in tmp_path.iterdir()]

    with LocalCluster(config) as house, MoeClient(house.address, timeout=30) as client:
        assert {layer.all2all_backend for layer in client.model().layers} == {f"{SMALL}+{LARGE}"}
        assert {layer.wire for layer in client.model().layers} == {wire}
        for layer in (0, 1):
            for rows in (1, 5, 100, 3):
                hidden, experts, weights = alone.batch(rows, seed=rows)
                answer = client.forward(layer, hidden, experts, weights)
                torch.testing.assert_close(answer, alone.forward(layer, hidden, experts, weights))
        read = [
            urllib.request.urlopen(f"http://{target}/metrics", timeout=10).read().decode()
            for target in house.metrics_targets()[1:]
        ]
    for name in (SMALL, LARGE):
        lines = [
            line
            for text in read
            for line in text.splitlines()
            if line.startswith("moe_wire_bytes_total") and f'all2all_backend="{name}"' in line
        ]
        assert sum(float(line.rsplit(" ", 1)[1]) for line in lines) > 0, name
    assert [path.read_bytes() for path in tmp_path.iterdir()] == kept  # read, and nothing measured


@pytest.mark.usefixtures("one_thread")
def test_a_service_measures_what_it_does_not_know(checkpoint_path: Path, tmp_path: Path) -> None:
    by_cost = {"plan__measure": "always", "plan__costs": str(tmp_path / "costs")}
    config = house_config(checkpoint_path, step__lane_rows=4, server__metrics_port=-1, **by_cost, **EP2)
    with LocalCluster(config) as house, MoeClient(house.address, timeout=30) as client:
        names = {layer.all2all_backend for layer in client.model().layers}
    assert len(names) == 1 and set(names.pop().split("+")) <= FITTING
    assert len(list((tmp_path / "costs").iterdir())) == 1
