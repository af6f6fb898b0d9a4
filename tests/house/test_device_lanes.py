"""Callers that are attached by memory, in processes of their own, to a service of three ranks: whole passes,
and what becomes of a caller that does wrong, while the other one has right answers.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from attached_callers import Steady, answer_of, name_of, one_pass, run_caller
from houses import Alone, house_config
from lane_calls import lanes_at
from reported import until_reported
from warm import WARM

from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.client import Choice, Logits, MoeClient
from moeserve.proto.errors import InvalidArgument, MoeError, NotFound, Unavailable, WeightsChanged
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.passes.mailbox import Status
from moeserve.proto.passes.running import PassLate
from moeserve.proto.tensors import TensorError
from moeserve.runtime.launch.local_cluster import LocalCluster

EP3 = {"parallel__data_parallel_size": 3, "parallel__enable_expert_parallel": True}
PATIENCE = 2.0  # the default: a caller that busy cores hold up brings its rows within it
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def house(checkpoint_path: Path) -> Iterator[LocalCluster]:
    values = {"passes__patience_seconds": PATIENCE, "passes__lanes": 3, "step__lane_rows": 32}
    with LocalCluster(
        house_config(checkpoint_path, balance__redundant_experts=1, **values, **EP3)
    ) as cluster:
        yield cluster


def attached(house: LocalCluster, name: str, **asked: Any) -> AttachedLane:
    return AttachedLane.attach(
        house.address, Wanted(name, **({"dtype": "fp32", "rows": 16, "timeout": 15.0} | asked))
    )


@contextmanager
def steady(house: LocalCluster, path: Path, rank: int = 0) -> Iterator[Steady]:
    """Another caller, in a process of its own, which compares every answer meanwhile."""
    ours, theirs = WARM.Pipe()
    process = WARM.Process(target=run_caller, args=(house.address, path, rank, theirs), daemon=True)
    process.start()
    theirs.close()
    caller = Steady(process, ours)
    try:
        caller.started()
        yield caller
        caller.stop()
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("stages", [1, 3])
def test_two_callers_have_right_answers_at_once(
    house: LocalCluster, alone: Alone, checkpoint_path: Path, stages: int
) -> None:
    with steady(house, checkpoint_path, rank=1) as other, attached(house, "one", stages=stages) as lane:
        for turn in range(20):
            one_pass(lane, alone, stages=stages, seed=turn)
        before = other.passes()
        assert other.passes(more_than=before) > before


def test_a_standing_pass_is_announced_once(house: LocalCluster, alone: Alone) -> None:
    with attached(house, "standing", stages=2) as lane:
        with lane.begin([1, 0], stages=2, standing=True) as run:
            for turn in range(25):
                for layer in (1, 0):
                    batches = [alone.batch(turn % 4 + stage, seed=turn + stage) for stage in range(2)]
                    for stage, (hidden, ids, weights) in enumerate(batches):
                        assert run.layer(stage) == layer
                        run.post(stage, hidden, Choice(ids, weights))
                    for stage, batch in enumerate(batches):
                        torch.testing.assert_close(
                            answer_of(run, stage), alone.forward(layer, *batch), **CLOSE
                        )
            time.sleep(1.5 * PATIENCE)  # between its rounds the caller may rest
            assert run.status is None and lane.number == 1
        assert run.status is Status.OK


def test_logits_and_no_rows_travel_too(house: LocalCluster, alone: Alone) -> None:
    hidden, _, _ = alone.batch(5, seed=1)
    logits = torch.randn(5, alone.checkpoint.num_experts, generator=torch.Generator().manual_seed(2))
    with attached(house, "logits") as lane, lane.begin([0, 1]) as run:
        run.post(0, hidden, Logits(logits))
        expected = alone.forward(0, hidden, *alone.checkpoint.gate(0).route(logits))
        torch.testing.assert_close(answer_of(run, 0), expected, **CLOSE)
        none = alone.batch(0, seed=0)
        run.post(0, none[0], Choice(*none[1:]))
        assert run.take(0).shape == (0, alone.checkpoint.hidden)


def test_an_answer_comes_into_memory_of_the_caller(house: LocalCluster, alone: Alone) -> None:
    batch = alone.batch(3, seed=4)
    own = torch.full_like(batch[0], torch.nan)
    with attached(house, "own") as lane, lane.begin([0, 1]) as run:
        run.post(0, batch[0], Choice(*batch[1:]))
        for wrong in (own[:2], own.double(), own.T.contiguous().T):
            with pytest.raises(TensorError, match="out: "):
                run.take(0, out=wrong)
        run.take(0, out=own)
        torch.testing.assert_close(own, alone.forward(0, *batch), **CLOSE)
        run.post(0, batch[0], Choice(*batch[1:]))
        array = own.numpy()
        assert run.take(0, out=array) is not None
        torch.testing.assert_close(own, alone.forward(1, *batch), **CLOSE)


def test_bfloat16_rows_come_home_as_bfloat16(house: LocalCluster, alone: Alone) -> None:
    hidden, ids, weights = alone.batch(4, seed=3)
    with attached(house, "bf16", dtype="bf16") as lane, lane.begin([0]) as run:
        run.post(0, hidden.bfloat16(), Choice(ids, weights))
        found = answer_of(run, 0)
        assert found.dtype == torch.bfloat16
        expected = alone.forward(0, hidden.bfloat16().float(), ids, weights)
        torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


def refused(house: LocalCluster, **asked: Any) -> MoeError:
    with pytest.raises(MoeError) as raised:
        attached(house, asked.pop("name", "refused"), **asked).close()
    return raised.value


def test_what_cannot_be_attached_is_refused_by_name(house: LocalCluster) -> None:
    assert refused(house, device="cuda:0").reason == "device_refused"
    assert "must be 1 to 64 letters" in refused(house, name="no name").message
    assert "rows: 33 is not one of 1 to 32" in refused(house, rows=33).message
    assert "stages: 9 is not one of 1 to 8" in refused(house, stages=9).message
    assert "answer_buffers: 9 is not one of 0 to 8" in refused(house, buffers=9).message
    assert "model: 'other' is not served here" in refused(house, model="other").message
    assert isinstance(refused(house, rank=7), NotFound)
    with attached(house, "one", rank=0):
        taken = refused(house, name="one", rank=0)
        assert (taken.code, taken.reason) == ("ALREADY_EXISTS", "name_taken")
        with attached(house, "two", rank=0), attached(house, "three", rank=0):
            assert refused(house, name="four", rank=0).reason == "lanes_taken"
    with attached(house, "one", rank=0):  # the name is free again
        pass
    with attached(house, "anywhere"):  # two of one name meet at one rank, though none is pinned
        assert refused(house, name="anywhere").reason == "name_taken"


def test_callers_that_pin_no_rank_are_spread(house: LocalCluster) -> None:
    lanes = [attached(house, f"spread-{at}") for at in range(6)]
    found = [sum(name.startswith("spread") for name in listed(house, rank)) for rank in range(3)]
    for lane in lanes:
        lane.close()
    assert sum(found) == 6 and max(found) <= 3, found


def listed(house: LocalCluster, rank: int = 0) -> dict[str, moe_pb2.DeviceLaneInfo]:
    return {lane.name: lane for lane in lanes_at(house.address, rank)}


def test_lanes_are_listed_without_their_secrets(house: LocalCluster, alone: Alone) -> None:
    with attached(house, "shown", rows=8, stages=2, rank=0) as lane:
        one_pass(lane, alone, stages=2, seed=1)
        found = listed(house)["shown"]
        assert (found.rows, found.stages, found.passes, found.steps, found.ended) == (8, 2, 1, 4, "ok")
        assert found.bytes == lane.layout.mailbox_bytes + lane.layout.answers_bytes
        assert lane.regions[0] not in str(found)
    assert "shown" not in listed(house)


def write(lane: AttachedLane, words: dict[int, int]) -> None:
    for at, value in words.items():
        lane.memory.box[at] = value


def unknown_layer(lane: AttachedLane, alone: Alone) -> None:
    lane.begin([0, 7]).wait(5)


def too_many_stages(lane: AttachedLane, alone: Alone) -> None:
    lane.begin([0], stages=5).wait(5)


def wrong_header(changed: dict[int, int]) -> Callable[[AttachedLane, Alone], None]:
    def act(lane: AttachedLane, alone: Alone) -> None:
        run = lane.begin([0, 1])
        head = lane.layout.header(0)
        words = {m.LAYER: 0, m.STAGE: 0, m.COUNT: 1, m.KIND: m.CHOICE} | changed
        write(lane, {head + at: value for at, value in words.items()})
        lane.memory.box[head + m.TAG] = m.tag_of(run.number, 0)
        run.wait(5)

    return act


def garbage_ids(lane: AttachedLane, alone: Alone) -> None:
    hidden, ids, weights = alone.batch(2, seed=1)
    run = lane.begin([0])
    run.post(0, hidden, Choice(ids * 0 + 2**30, weights))
    run.wait(5)


BAD: dict[str, tuple[Callable[[AttachedLane, Alone], None], str]] = {
    "unknown layer": (unknown_layer, "layer 7 has no experts served here"),
    "too many stages": (too_many_stages, "5 stages; this lane was attached with 2"),
    "header of another layer": (wrong_header({m.LAYER: 1}), "names layer 1 and stage 0; layer 0 of stage 0"),
    "header of another stage": (
        wrong_header({m.STAGE: 2**64 - 1}),
        "layer 0 and stage 18446744073709551615",
    ),
    "too many rows": (wrong_header({m.COUNT: 9}), "9 rows in a step; this lane was attached with 8"),
    "endless rows": (wrong_header({m.COUNT: 2**64 - 1}), "rows in a step; this lane was attached with 8"),
    "a kind that is none": (wrong_header({m.KIND: 3}), "kind 3 of a step is neither"),
    "garbage for ids": (garbage_ids, "id 1073741824 is out of range"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_ends_the_own_pass_by_name(house: LocalCluster, alone: Alone, name: str) -> None:
    act, said = BAD[name]
    with attached(house, "bad", rows=8, stages=2, rank=0) as lane:
        with pytest.raises(InvalidArgument) as raised:
            act(lane, alone)
        assert said in str(raised.value)
        one_pass(lane, alone, stages=2, seed=5)  # and the lane goes on


def test_garbage_all_over_the_mailbox_hurts_nobody_else(
    house: LocalCluster, alone: Alone, checkpoint_path: Path
) -> None:
    random = torch.Generator().manual_seed(1)
    with steady(house, checkpoint_path) as other:
        for turn in range(8):
            with attached(house, "garbage", rows=8, rank=0) as lane:
                if turn % 2:
                    lane.begin([0, 1], standing=True)
                    time.sleep(0.01)
                found = torch.frombuffer(lane.memory.bytes[0], dtype=torch.uint8)
                for _ in range(5):
                    found.copy_(torch.randint(0, 256, found.shape, dtype=torch.uint8, generator=random))
                    time.sleep(0.005)
        assert other.passes(more_than=other.passes())


def test_tensors_that_the_lane_does_not_take_are_named_before_they_are_sent(
    house: LocalCluster, alone: Alone
) -> None:
    hidden, ids, weights = alone.batch(3, seed=1)
    with attached(house, "typed", rows=4) as lane, lane.begin([0]) as run:
        for said, rows in {
            "hidden: bf16": (hidden.bfloat16(), Choice(ids, weights)),
            "hidden: 5 rows": (alone.batch(5, seed=1)[0], Choice(ids, weights)),
            "weights: fp16": (hidden, Choice(ids, weights.half())),
            "ids: int32 [2, 2]": (hidden, Choice(ids[:2], weights)),
            "logits: fp32 [3, 2]": (hidden, Logits(weights)),
        }.items():
            with pytest.raises(TensorError) as raised:
                run.post(0, *rows)
            assert said in str(raised.value)
        run.post(0, hidden, Choice(ids, weights))
        answer_of(run, 0)


def test_a_stage_that_the_pass_does_not_have_is_named(house: LocalCluster, alone: Alone) -> None:
    hidden, ids, weights = alone.batch(3, seed=1)
    with attached(house, "staged", stages=2) as lane, lane.begin([0], stages=2) as run:
        for wrong in (-1, -2, 2):
            for use in (lambda at: run.post(at, hidden, Choice(ids, weights)), run.take, run.under_way):
                with pytest.raises(
                    ValueError, match=f"^stage {wrong} is not one of 0 to 1, those of this pass"
                ):
                    use(wrong)
        run.post(1, hidden, Choice(ids, weights))
        answer_of(run, 1)


def test_a_late_caller_is_told_so_and_may_begin_again(
    house: LocalCluster, alone: Alone, checkpoint_path: Path
) -> None:
    with steady(house, checkpoint_path) as other, attached(house, "late", rank=0) as lane:
        run = lane.begin([0, 1])
        hidden, ids, weights = alone.batch(2, seed=1)
        run.post(0, hidden, Choice(ids, weights))
        run.take(0)
        before = other.passes()
        started = time.monotonic()
        with pytest.raises(PassLate, match="stage 0 brought no rows of layer 1 within"):
            run.wait(10)
        assert time.monotonic() - started >= 0.8 * PATIENCE
        assert run.status is Status.LATE
        assert other.passes() > before + 1  # nobody waited for it
        one_pass(lane, alone, stages=1, seed=2)


def test_weights_that_are_not_served_are_told(house: LocalCluster, alone: Alone) -> None:
    hidden, ids, weights = alone.batch(2, seed=1)
    with attached(house, "weights") as lane:
        run = lane.begin([0], weights_version=99)
        run.post(0, hidden, Choice(ids, weights))
        with pytest.raises(WeightsChanged, match="weights version 1, and 99 is demanded"):
            run.take(0)
        assert run.status is Status.OTHER_WEIGHTS


def test_a_lane_is_detached_under_load(house: LocalCluster, alone: Alone, checkpoint_path: Path) -> None:
    with steady(house, checkpoint_path) as other:
        for turn in range(10):
            lane = attached(house, "leaves", stages=2, rank=0)
            run = lane.begin([0, 1], stages=2)
            for stage in range(2):
                hidden, ids, weights = alone.batch(8, seed=turn)
                run.post(stage, hidden, Choice(ids, weights))
            if turn % 2:
                time.sleep(0.001)
            lane.close()
            with pytest.raises(Unavailable):
                for stage in range(2):
                    run.take(stage, timeout=5)  # it may have been answered before
                run.wait(5)
        assert other.passes(more_than=other.passes())
    wait_for(lambda: not listed(house))


def wait_for(true: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not come to be"
        time.sleep(0.02)


def test_another_s_mailbox_cannot_be_detached_or_used(house: LocalCluster, alone: Alone) -> None:
    with attached(house, "mine", rank=0) as lane, MoeClient(house.address, timeout=20) as client:
        lanes = {found.rank: found.address for found in client.topology().lanes}
        with grpc.insecure_channel(lanes[0]) as channel:
            stub = moe_pb2_grpc.DeviceLaneServiceStub(channel)
            public = lane.regions[0].rpartition("-")[0]
            for name in (public, "", public + "-" + "0" * 32):
                with pytest.raises(grpc.RpcError) as raised:
                    stub.DetachLane(moe_pb2.DetachLaneRequest(mailbox=name))
                assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        one_pass(lane, alone, stages=1, seed=1)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_caller_that_is_killed_or_stopped_in_a_pass_hurts_nobody_else(
    house: LocalCluster, alone: Alone, checkpoint_path: Path, sent: signal.Signals
) -> None:
    with steady(house, checkpoint_path, rank=0) as victim, attached(house, "survivor", rank=0) as lane:
        victim.passes(more_than=2)
        os.kill(victim.pid, sent)
        for turn in range(30):
            one_pass(lane, alone, stages=1, seed=turn)
        if sent == signal.SIGKILL:
            wait_for(lambda: set(listed(house)) == {"survivor"})  # its memory went with it
            victim.gone()
            return
        name = name_of(victim.pid)
        wait_for(lambda: not listed(house)[name].in_pass or listed(house)[name].ended == "late")
        os.kill(victim.pid, signal.SIGCONT)
        before = victim.passes()
        victim.passes(more_than=before)  # it was told that it was late, and began again


def test_experts_move_while_passes_run(house: LocalCluster, alone: Alone, checkpoint_path: Path) -> None:
    with steady(house, checkpoint_path, rank=2) as other, MoeClient(house.address, timeout=30) as client:
        other.passes(more_than=5)
        until_reported(client, [0, 1])
        moved = client.rebalance(policy="eplb", timeout=30)
        assert moved.outcome == "moved" and moved.committed_moves > 0
        other.passes(more_than=other.passes())
