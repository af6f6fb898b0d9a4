"""Rows in host memory over a device lane at a rank on a GPU: its steps are launched ahead, or are calls."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_ways import batch
from houses import Alone, house_config
from lane_calls import Ordinary, line_of, requests
from torch import Tensor

from moeserve.proto.client import Choice, MoeClient
from moeserve.proto.errors import InvalidArgument, Unavailable, WeightsChanged
from moeserve.proto.passes import lane_client
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.passes.lane_client import LaneClient
from moeserve.proto.passes.running import Pass, PassLate
from moeserve.proto.tensors import as_torch
from moeserve.runtime.doors.calls.connection_lane import FEWEST_CALLS
from moeserve.runtime.doors.passes.looking import COMPANY_SECONDS
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.torch import MoeExperts, Settings, connect

pytestmark = pytest.mark.gpu(1)
LAYERS = [0, 1]
SECONDS = 20.0
Rows = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def house(path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(house_config(path, plan__device="cuda", passes__host_ahead="always")) as house:
        yield house


def attached(house: LocalCluster, name: str = "host", rows: int = 512, stages: int = 1) -> AttachedLane:
    return AttachedLane.attach(house.address, Wanted(name, rows=rows, stages=stages, timeout=SECONDS))


def rested() -> None:
    """Calls that came before are company no more."""
    time.sleep(1.5 * COMPANY_SECONDS)


def calls_of(house: LocalCluster) -> int:
    """Steps of device lanes that were begun as calls, so far."""
    return requests(house, method="DeviceLane")


def step(run: Pass, rows: Rows, stage: int = 0) -> Tensor:
    run.post(stage, rows[0], Choice(*rows[1:]))
    return taken(run, stage)


def taken(run: Pass, stage: int = 0) -> Tensor:
    found = run.take_plain(stage)
    return as_torch(found.storage.data, found.spec).clone()


def right(house: LocalCluster, given: list[tuple[int, Rows]]) -> list[Tensor]:
    """The same rows by calls of a client."""
    with MoeClient(house.address, timeout=SECONDS) as client:
        return [client.forward(layer, *rows) for layer, rows in given]


@pytest.mark.parametrize("rows", [1, 16, 300])
def test_answers_have_the_bits_of_a_call(house: LocalCluster, alone: Alone, rows: int) -> None:
    given = [
        (layer, batch(alone, rows, seed=10 * turn + layer, device="cpu"))
        for turn in range(6)
        for layer in LAYERS
    ]
    wanted = right(house, given)
    rested()
    before = calls_of(house)
    with attached(house) as lane, lane.begin(LAYERS, standing=True) as run:
        for (_, one), answer in zip(given, wanted, strict=True):
            assert torch.equal(step(run, one), answer)
    assert calls_of(house) == before, "no step was a call"


def test_inline_calls_are_launched_ahead_too(house: LocalCluster, alone: Alone) -> None:
    given = [
        (layer, batch(alone, rows, seed=turn, device="cpu"))
        for turn, rows in enumerate([64] * 12 + [500] * 4 + [64] * 4)
        for layer in LAYERS
    ]
    wanted = right(house, given)
    rested()
    with MoeClient(house.address, timeout=SECONDS, transport="inline") as client:
        for at, ((layer, rows), answer) in enumerate(zip(given, wanted, strict=True)):
            assert torch.equal(client.forward(layer, *rows), answer)
            if at == 2 * FEWEST_CALLS:
                rested()  # the first calls, which went another way, are company no more
                before = calls_of(house)
        assert calls_of(house) == before, "no step was a call"


def test_rows_of_any_number_and_none_are_answered(house: LocalCluster, alone: Alone) -> None:
    counts = (3, 60, 1, 0, 300, 2, 2, 512, 5)
    given = [
        (layer, batch(alone, rows, seed=rows + layer, device="cpu")) for rows in counts for layer in LAYERS
    ]
    wanted = right(house, given)
    rested()
    with attached(house) as lane, lane.begin(LAYERS, standing=True, any_weights=True) as run:
        for (_, one), answer in zip(given, wanted, strict=True):
            torch.testing.assert_close(step(run, one), answer, rtol=2e-2, atol=2e-2)


def test_calls_of_many_rows_are_steps_of_several_stages_ahead(
    house: LocalCluster, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_client, "MOST_ROWS", 64)
    counts = [200] * 30 + [30, 130, 200, 64, 65] * 4
    given = [(at % 2, batch(alone, count, seed=at, device="cpu")) for at, count in enumerate(counts)]
    wanted = right(house, given)
    rested()
    before, ordinary = calls_of(house), Ordinary(monkeypatch)
    with LaneClient(house.address, timeout=SECONDS) as client:
        for (layer, rows), answer in zip(given, wanted, strict=True):
            torch.testing.assert_close(client.forward(layer, *rows), answer, rtol=2e-2, atol=2e-2)
        lane = line_of(client).lane
        assert lane.goes_ahead and (lane.wanted.rows, lane.wanted.stages) == (64, 4)
    assert calls_of(house) == before and ordinary.calls == 0


def test_the_module_for_model_servers_has_the_bits_of_calls(house: LocalCluster, alone: Alone) -> None:
    given = [[batch(alone, 4, seed=2 * turn + layer, device="cpu") for layer in LAYERS] for turn in range(20)]
    remote = connect(Settings("remote", house.address, timeout=SECONDS))
    wanted = [[MoeExperts(remote, layer)(*one[layer]) for layer in LAYERS] for one in given]
    remote.close()
    rested()
    way = connect(Settings("attached", house.address, timeout=SECONDS, rows=16, device="cpu"))
    for one, answers in zip(given, wanted, strict=True):
        for layer in LAYERS:
            assert torch.equal(MoeExperts(way, layer)(*one[layer]), answers[layer])
    way.close()


def test_two_stages_and_two_callers_have_right_answers(house: LocalCluster, alone: Alone) -> None:
    """Each alone by turns, and both at once: their steps change between runs and calls."""
    given = [[batch(alone, 3, seed=4 * layer + at, device="cpu") for at in range(4)] for layer in LAYERS]
    wanted = [right(house, [(layer, one) for one in given[layer]]) for layer in LAYERS]
    with attached(house, "one", stages=2) as one, attached(house, "two", stages=2) as two:
        runs = [lane.begin(LAYERS, stages=2, standing=True) for lane in (one, two)]
        for both in (False, True, False, True):
            rested()
            before = calls_of(house)
            for _ in range(30):
                for layer in LAYERS:
                    at = [(at, stage) for at in range(1 + both) for stage in (0, 1)]
                    for caller, stage in at:
                        rows = given[layer][2 * caller + stage]
                        runs[caller].post(stage, rows[0], Choice(*rows[1:]))
                    for caller, stage in at:
                        assert torch.equal(taken(runs[caller], stage), wanted[layer][2 * caller + stage])
            assert (calls_of(house) > before) == both
        for run in runs:
            run.leave()


def test_calls_of_others_are_answered_beside_a_caller_that_withholds_rows(
    house: LocalCluster, alone: Alone
) -> None:
    rows = batch(alone, 2, seed=1, device="cpu")
    (wanted,) = right(house, [(0, rows)])
    rested()
    with attached(house) as lane, MoeClient(house.address, timeout=SECONDS) as client:
        client.model()
        run = lane.begin(LAYERS)
        assert torch.equal(step(run, rows), wanted)
        began = time.monotonic()
        assert torch.equal(client.forward(0, *rows), wanted)
        assert time.monotonic() - began < 1.0
        with pytest.raises(PassLate, match=r"passes\.patience_seconds = 2"):
            run.wait(SECONDS)
        with lane.begin(LAYERS) as run:
            assert torch.equal(step(run, rows), wanted)
            step(run, rows)


def test_what_is_wrong_ends_the_pass_alone(house: LocalCluster, alone: Alone) -> None:
    rows = batch(alone, 2, seed=1, device="cpu")
    (wanted,) = right(house, [(0, rows)])
    rested()
    with attached(house) as lane:
        box, head = lane.memory.box, lane.layout.header(0)
        for at, value in ((m.LAYER, 0), (m.COUNT, 2**40), (m.KIND, 9), (m.STAGE, 5)):
            run = lane.begin(LAYERS, standing=True)
            for _ in range(3):  # the header of the last is right but for its layer
                found = step(run, rows)
            assert torch.equal(found, wanted)
            box[head + m.LAYER] = 1
            box[head + at] = value
            box[head + m.TAG] = m.tag_of(run.number, 3)
            with pytest.raises(InvalidArgument, match=r"header|rows|kind"):
                run.wait(SECONDS)
        bad = rows[1].clone()
        bad[0, 0] = alone.checkpoint.num_experts
        run = lane.begin(LAYERS)
        with pytest.raises(InvalidArgument):
            step(run, (rows[0], bad, rows[2]))
        assert torch.equal(step(lane.begin(LAYERS), rows), wanted)


def test_a_lane_that_is_detached_in_a_pass_tells_and_is_free_again(house: LocalCluster, alone: Alone) -> None:
    rows = batch(alone, 2, seed=1, device="cpu")
    for _ in range(12):  # more than there may be lanes
        lane = attached(house)
        run = lane.begin(LAYERS, standing=True)
        step(run, rows)
        lane.detach()
        with pytest.raises(Unavailable, match="detached"):
            run.wait(SECONDS)
        lane.close()
        time.sleep(0.05)


def endless(address: str, begun: object) -> None:
    """Forward passes for ever."""
    with AttachedLane.attach(address, Wanted("killed", rows=8, timeout=SECONDS)) as lane:
        hidden, experts, top_k = lane.sizes
        rows = torch.zeros(2, hidden).bfloat16(), torch.arange(top_k).int().repeat(2, 1), torch.ones(2, top_k)
        assert experts >= top_k
        with lane.begin(LAYERS, standing=True) as run:
            while True:
                step(run, rows)
                begun.set()  # type: ignore[attr-defined]


def test_a_caller_that_is_killed_in_a_pass_costs_others_nothing(house: LocalCluster, alone: Alone) -> None:
    rows = batch(alone, 2, seed=1, device="cpu")
    (wanted,) = right(house, [(0, rows)])
    context = multiprocessing.get_context("spawn")
    for _ in range(3):
        begun = context.Event()
        process = context.Process(target=endless, args=(house.address, begun))
        process.start()
        assert begun.wait(60)
        time.sleep(2 * COMPANY_SECONDS)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with attached(house) as lane:
            for _ in range(5):
                with lane.begin(LAYERS) as run:
                    assert torch.equal(step(run, rows), wanted)
                    step(run, rows)


def test_weights_that_are_reloaded_end_a_pass_of_one_version(
    house: LocalCluster, alone: Alone, path: Path
) -> None:
    rows = batch(alone, 2, seed=1, device="cpu")
    with attached(house) as lane, MoeClient(house.address, timeout=60.0) as client:
        run = lane.begin(LAYERS, standing=True)
        before = step(run, rows)
        version = run.version(0)
        step(run, rows)  # a standing pass may rest between its rounds, for as long as a reload takes
        client.reload(str(path))
        with pytest.raises(WeightsChanged):
            for _ in range(20):
                step(run, rows)
                time.sleep(0.1)
        with lane.begin(LAYERS) as run:
            assert torch.equal(step(run, rows), before) and run.version(0) > version
            step(run, rows)
