"""Calls of a client of lanes whose rows are more than one step: other rows, the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from houses import Alone, house_config
from lane_calls import CLOSE, Ordinary, check, line_of

from moeserve.proto.client import Choice, Logits, MoeClient
from moeserve.proto.errors import InvalidArgument, MoeError, Unavailable
from moeserve.proto.passes import answers, called_lane, lane_client, refusals
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.passes.lane_client import LaneClient
from moeserve.proto.passes.running import Pass
from moeserve.proto.tensors import TensorError
from moeserve.runtime.launch.local_cluster import LocalCluster


@pytest.fixture(scope="module")
def house(checkpoint_path: Path) -> Iterator[LocalCluster]:
    ranks = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}
    with LocalCluster(house_config(checkpoint_path, step__lane_rows=32, **ranks)) as cluster:
        yield cluster


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> Ordinary:
    return Ordinary(monkeypatch)


@pytest.fixture
def stepped(house: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[LaneClient]:
    """A client whose lanes have 8 rows a step, and are taken for lanes of a GPU's rank."""
    monkeypatch.setattr(lane_client, "MOST_ROWS", 8)
    real = AttachedLane.attach

    def attach(address: str, wanted: Wanted) -> AttachedLane:
        lane = real(address, wanted)
        assert not lane.goes_ahead
        lane.goes_ahead = True
        return lane

    monkeypatch.setattr(AttachedLane, "attach", attach)
    with LaneClient(house.address, timeout=20.0, lane=0) as made:
        yield made


def test_a_call_of_many_rows_is_several_steps_of_one_pass(
    stepped: LaneClient, alone: Alone, ordinary: Ordinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(called_lane, "REST_SECONDS", -1.0)  # a test may be fast: no longer pass is begun
    check(stepped, alone, 0, 12, seed=1)
    assert line_of(stepped).lane.wanted.stages == 2
    for turn in range(10):
        for layer in (0, 1):
            check(stepped, alone, layer, 30 - turn % 2, seed=turn)
    line = line_of(stepped)
    assert (line.lane.wanted.rows, line.lane.wanted.stages) == (8, 4)
    assert line._goes_on and line._run.stages == 4 and line._calls > 2 and line._run.layers[:2] == (0, 1)
    for count in (30, 5, 17, 8, 32, 9):
        check(stepped, alone, 0, count, seed=count)
        assert line_of(stepped)._run.stages == -(-count // 8)
    assert ordinary.calls == 0
    with suppress(MoeError):  # the rank takes no such call, either
        stepped.forward(0, *alone.batch(33, seed=2))
    assert ordinary.calls == 1, "more steps than a call may have"


def test_each_step_of_a_call_has_its_own_rows_and_route(
    stepped: LaneClient, alone: Alone, ordinary: Ordinary
) -> None:
    hidden, experts, weights = alone.batch(20, seed=5)
    wanted = alone.forward(0, hidden, experts, weights)
    placed, output = (stepped.allocate(0, tuple(hidden.shape), "fp32") for _ in range(2))
    reply = stepped.call(0, hidden, Choice(experts.long(), weights), output=output)
    assert reply.hidden is output.array and reply.weights_version == 1
    torch.testing.assert_close(output.tensor, wanted, **CLOSE)
    logits = torch.randn(20, alone.checkpoint.num_experts, generator=torch.Generator().manual_seed(1))
    by_lane = stepped.call(1, hidden, Logits(logits)).hidden
    assert ordinary.calls == 0
    with MoeClient(stepped.address, lane=0) as other:
        torch.testing.assert_close(by_lane, other.forward_logits(1, hidden, logits), **CLOSE)
    placed.tensor.copy_(hidden)
    before = ordinary.calls
    stepped.call(0, placed, Choice(experts, weights), output=output)
    assert ordinary.calls == before + 1, "rows that the other way does not copy go there"
    torch.testing.assert_close(output.tensor, wanted, **CLOSE)


def test_what_is_wrong_with_one_step_is_said_of_the_call(
    stepped: LaneClient, alone: Alone, ordinary: Ordinary
) -> None:
    hidden, experts, weights = alone.batch(20, seed=6)
    with pytest.raises(TensorError):
        stepped.forward(0, hidden, torch.cat([experts, experts]), torch.cat([weights, weights]))
    wrong = experts.clone()
    wrong[-1] = 1000
    with pytest.raises(InvalidArgument):
        stepped.forward(0, hidden, wrong, weights)
    before = ordinary.calls
    for turn in range(6):
        check(stepped, alone, turn % 2, 20, seed=turn)
    assert ordinary.calls == before


def test_steps_of_other_weights_are_no_answer_together(
    stepped: LaneClient, alone: Alone, ordinary: Ordinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(stepped, alone, 0, 20, seed=1)
    assert ordinary.calls == 0
    with monkeypatch.context() as patched:
        patched.setattr(Pass, "version", lambda run, stage: 1 + stage // 2)
        check(stepped, alone, 0, 16, seed=2)  # two steps of one version
        assert ordinary.calls == 0
        check(stepped, alone, 0, 20, seed=2)
    assert ordinary.calls == 1
    check(stepped, alone, 0, 20, seed=3)
    assert ordinary.calls == 1


def test_a_rank_that_launches_no_steps_ahead_gets_many_rows_as_one_step(
    house: LocalCluster, alone: Alone, ordinary: Ordinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_client, "MOST_ROWS", 8)
    with LaneClient(house.address, timeout=20.0, lane=0) as client:
        check(client, alone, 0, 8, seed=1)
        assert ordinary.calls == 0
        for turn in range(3):
            check(client, alone, 0, 20, seed=turn)
        assert ordinary.calls == 3 and client._refusals.limit(("fp32", 0), 99) == 8
        assert line_of(client).lane.wanted.rows == 8, "which stays"
        check(client, alone, 0, 8, seed=2)
        assert ordinary.calls == 3
        monkeypatch.setattr(refusals, "LIMITED_SECONDS", 0.0)
        client._refusals.limited(("fp32", 0), 8)
        assert client._refusals.limit(("fp32", 0), 99) == 99, "after a while a rank is asked again"


@pytest.mark.parametrize("why", ["refused", "another dtype"])
def test_what_is_refused_of_one_kind_is_not_of_others(
    stepped: LaneClient, alone: Alone, ordinary: Ordinary, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    check(stepped, alone, 0, 5, seed=1)
    small = line_of(stepped)
    real = AttachedLane.attach

    def attach(address: str, wanted: Wanted) -> AttachedLane:
        if why == "refused" and wanted.stages > 1:
            raise Unavailable("UNAVAILABLE", "", "no room for such a lane")
        lane = real(address, wanted)
        lane.goes_ahead = wanted.dtype == "bf16"
        return lane

    monkeypatch.setattr(AttachedLane, "attach", attach)
    check(stepped, alone, 0, 20, seed=2)
    assert ordinary.calls == 1 and line_of(stepped) is small and small.alive, "the lane that there is stays"
    for turn in range(3):
        check(stepped, alone, 1, 5, seed=turn)
    assert ordinary.calls == 1
    if why == "another dtype":
        hidden, experts, weights = alone.batch(20, seed=5)
        small.used_at = -1e9  # nobody has called it for long
        found = stepped.forward(0, hidden.bfloat16(), experts, weights)
        torch.testing.assert_close(
            found.float(), alone.forward(0, hidden, experts, weights), rtol=0.1, atol=0.1
        )
        assert ordinary.calls == 1 and line_of(stepped).lane.wanted.stages == 4


def test_no_held_answer_is_written_over(
    house: LocalCluster, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "SMALLEST_BYTES", 1)
    with LaneClient(house.address, timeout=20.0, lane=0) as client:
        batches = [alone.batch(4, seed=seed) for seed in range(6)]
        wanted = [alone.forward(0, *batch) for batch in batches]
        held = [client.forward(0, *batch) for batch in batches]
        for found, right in zip(held, wanted, strict=True):
            torch.testing.assert_close(found, right, **CLOSE)
        one = held.pop()
        assert isinstance(one, torch.Tensor)
        where = one.data_ptr()
        del one, found
        again = client.forward(0, *batches[0])
        assert isinstance(again, torch.Tensor) and again.data_ptr() == where
