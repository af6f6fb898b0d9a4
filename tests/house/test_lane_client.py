"""A client whose calls go over device lanes, beside a service of two ranks: the same answers as other calls,
and another way where a lane gives none.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failures import stand_still
from fake_members import until
from houses import Alone, house_config
from lane_calls import CLOSE, Ordinary, check, in_threads, lanes_at, line_of

from moeserve.proto.client import Choice, Logits, MoeClient
from moeserve.proto.errors import DeadlineExceeded, InvalidArgument, MoeError, NotFound
from moeserve.proto.passes import called_lane
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.passes.lane_client import LaneClient
from moeserve.proto.passes.refusals import Refusals
from moeserve.proto.passes.running import Pass
from moeserve.proto.tensors import Spec, TensorError
from moeserve.runtime.launch.local_cluster import LocalCluster

EP2 = {"parallel__data_parallel_size": 2, "parallel__enable_expert_parallel": True}
LANES = 3
PATIENCE = 2.0


@pytest.fixture(scope="module")
def house(checkpoint_path: Path) -> Iterator[LocalCluster]:
    values = {"passes__patience_seconds": PATIENCE, "passes__lanes": LANES, "step__lane_rows": 32}
    values["cluster__stopped_seconds"] = 0.0  # a rank that a test stops is not given up
    with LocalCluster(house_config(checkpoint_path, **values, **EP2)) as cluster:
        yield cluster


@pytest.fixture
def client(house: LocalCluster) -> Iterator[LaneClient]:
    with LaneClient(house.address, timeout=20.0, lane=0) as made:
        yield made
    until(lambda: not lanes_at(house.address, 0))  # what its rank sees as gone has left its place


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> Ordinary:
    return Ordinary(monkeypatch)


def test_answers_are_those_of_other_calls_and_go_over_one_lane(
    client: LaneClient, alone: Alone, ordinary: Ordinary
) -> None:
    for turn in range(12):
        for layer in (0, 1):
            check(client, alone, layer, turn % 5 + 1, seed=turn)
    assert ordinary.calls == 0 and line_of(client)._goes_on and line_of(client).lane.wanted.rows == 16
    check(client, alone, 0, 20, seed=1)
    assert ordinary.calls == 0 and line_of(client).lane.wanted.rows == 32, "a larger lane, in its place"
    order = [1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 1]
    for at, layer in enumerate(order):
        check(client, alone, layer, 3, seed=at)
    assert ordinary.calls == 0


def test_rows_of_any_kind_come_back_as_they_were_given(
    client: LaneClient, alone: Alone, ordinary: Ordinary
) -> None:
    hidden, experts, weights = alone.batch(4, seed=3)
    wanted = alone.forward(1, hidden, experts, weights)
    found = client.forward(1, hidden.numpy(), experts.numpy(), weights.numpy())
    assert isinstance(found, np.ndarray)
    torch.testing.assert_close(torch.from_numpy(found), wanted, **CLOSE)
    placed, answer = (client.allocate(0, tuple(hidden.shape), "fp32") for _ in range(2))
    placed.tensor.copy_(hidden)
    reply = client.call(1, placed, Choice(experts.long(), weights), output=answer)
    assert reply.epoch >= 1 and reply.weights_version == 1 and reply.hidden is answer.array
    torch.testing.assert_close(answer.tensor, wanted, **CLOSE)
    again = client.call(1, placed, Choice(experts, weights), weights_version=1)
    torch.testing.assert_close(torch.from_numpy(np.asarray(again.hidden)), wanted, **CLOSE)
    logits = torch.randn(4, alone.checkpoint.num_experts, generator=torch.Generator().manual_seed(1))
    by_lane = client.call(1, hidden, Logits(logits)).hidden
    assert ordinary.calls == 0
    with MoeClient(client.address, lane=0) as other:
        torch.testing.assert_close(by_lane, other.forward_logits(1, hidden, logits), **CLOSE)


def test_what_no_lane_takes_is_said_as_by_other_calls(
    client: LaneClient, alone: Alone, ordinary: Ordinary
) -> None:
    hidden, experts, weights = alone.batch(2, seed=5)
    check(client, alone, 0, 2, seed=5)
    with pytest.raises(NotFound):
        client.forward(77, hidden, experts, weights)
    with pytest.raises(InvalidArgument, match="is out of range"):
        client.forward(0, hidden, experts + 1000, weights)
    with pytest.raises((InvalidArgument, TensorError)):
        client.forward(0, hidden[:, :-1].contiguous(), experts, weights)
    with pytest.raises(TypeError, match="takes no option"):
        client.forward(0, hidden, experts, weights, urgency=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="4294967"):
        client.forward(0, hidden, experts.long() + 2**32, weights)
    with pytest.raises(ValueError, match="weights_version=-1"):
        client.forward(0, hidden, experts, weights, weights_version=-1)
    with pytest.raises(TypeError):
        client.forward(True, hidden, experts, weights)
    placed = client.allocate(0, tuple(hidden.shape), "fp32")
    with pytest.raises(ValueError, match=r"lanes \[0, 1\]"):
        client.forward(0, placed, experts, weights, lane=1)
    assert ordinary.calls == 7
    ordinary.calls = 3
    with pytest.raises(MoeError, match="wrong_version"):
        client.forward(0, hidden, experts, weights, weights_version=9)
    assert ordinary.calls == 4
    found = client.forward(0, hidden, experts, weights.to(torch.bfloat16))
    assert ordinary.calls == 5 and isinstance(found, torch.Tensor)
    none = client.forward(0, hidden[:0], experts[:0], weights[:0])
    assert isinstance(none, torch.Tensor) and none.shape == (0, hidden.shape[1]) and ordinary.calls == 6
    check(client, alone, 1, 2, seed=6)
    assert ordinary.calls == 6, "the lane goes on"


def test_a_caller_who_does_not_rest_has_longer_passes(
    client: LaneClient, alone: Alone, ordinary: Ordinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(called_lane, "REST_SECONDS", 30.0)  # a test may be slow
    batches = [(batch := alone.batch(2, seed=seed), alone.forward(1, *batch)) for seed in range(4)]
    for turn in range(called_lane.RESTLESS_CALLS + 3 * called_lane.LONG_STEPS):
        batch, wanted = batches[turn % 4]
        torch.testing.assert_close(client.forward(1, *batch), wanted, **CLOSE)
    assert len(line_of(client)._run.layers) == called_lane.LONG_STEPS
    check(client, alone, 0, 2, seed=3)
    assert ordinary.calls == 0


def test_a_part_of_placed_rows_has_its_own_answer(client: LaneClient, alone: Alone) -> None:
    hidden, output = client.place(0, 8, "fp32")
    rows, experts, weights = alone.batch(8, seed=8)
    hidden.tensor.copy_(rows)
    width = rows.shape[1]
    part = replace(hidden, offset=hidden.offset + 4 * 3 * width, spec=Spec(hidden.spec.dtype, (5, width)))
    for _ in range(2):
        reply = client.call(0, part, Choice(experts[3:], weights[3:]))
        found, wanted = torch.from_numpy(np.asarray(reply.hidden)), alone.forward(0, rows, experts, weights)
        torch.testing.assert_close(found, wanted[3:], **CLOSE)
        client.call(0, hidden, Choice(experts, weights), output=output)
        torch.testing.assert_close(output.tensor, wanted, **CLOSE)


def test_no_handler_of_a_signal_calls_over_the_rows_of_the_call_that_it_interrupts(
    client: LaneClient, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, output = client.place(0, 4, "fp32")
    rows, *route = alone.batch(4, seed=8)
    hidden.tensor.copy_(rows)
    for _ in range(12):
        client.forward(0, hidden, *route, output=output)
    said, send = list[str](), Pass.send

    def interrupted(run: Pass, *given: Any, **how: Any) -> None:
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="a signal's handler") as told:
            client.forward(0, hidden, *route, output=output)
        said.append(str(told.value))
        send(run, *given, **how)

    monkeypatch.setattr(Pass, "send", interrupted)
    client.forward(0, hidden, *route, output=output)
    assert len(said) == 1
    torch.testing.assert_close(output.tensor, alone.forward(0, rows, *route), **CLOSE)


def test_rows_that_were_placed_in_a_lane_are_not_copied(
    client: LaneClient, alone: Alone, ordinary: Ordinary
) -> None:
    hidden, output = client.place(0, 4, "fp32")
    rows, experts, weights = alone.batch(4, seed=8)
    for turn in range(12):
        layer = turn % 2
        hidden.tensor.copy_(rows * (turn + 1))
        reply = client.call(layer, hidden, Choice(experts, weights), output=output)
        assert reply.hidden is output.array
        wanted = alone.forward(layer, rows * (turn + 1), experts, weights)
        torch.testing.assert_close(output.tensor, wanted, **CLOSE)
        own = client.call(layer, hidden, Choice(experts, weights)).hidden
        torch.testing.assert_close(torch.from_numpy(np.asarray(own)), wanted, **CLOSE)
    check(client, alone, 1, 3, seed=9)
    assert ordinary.calls == 0 and len(client._idle) == 1 and len(client._placed) == 1
    found = MoeClient.call(client, 0, hidden, Choice(experts, weights), output=output)
    wanted = alone.forward(0, rows * 12, experts, weights)
    torch.testing.assert_close(torch.from_numpy(np.asarray(found.hidden)), wanted, **CLOSE)
    with pytest.raises(InvalidArgument):
        client.call(0, hidden, Choice(experts + 1000, weights), output=output)
    with pytest.raises(TensorError):
        client.call(0, hidden, Choice(experts[:2], weights[:2]), output=output)
    client.call(0, hidden, Choice(experts, weights), output=output)
    torch.testing.assert_close(output.tensor, wanted, **CLOSE)
    hidden.close()
    output.close()
    with pytest.raises(MoeError):
        client.call(0, hidden, Choice(experts, weights), output=output, timeout=1.0)
    assert not client._placed
    for _ in range(2 * LANES):
        for tensor in client.place(0, 4, "fp32"):
            tensor.close()
        assert len(client._placed) == 1, "those that were closed are let go"
    with pytest.raises(InvalidArgument, match=r"step\.lane_rows"):
        client.place(0, 33, "fp32")
    with pytest.raises(NotFound):
        client.place(7, 4, "fp32")


def test_where_all_lanes_are_taken_calls_go_the_other_way(
    house: LocalCluster, client: LaneClient, alone: Alone, ordinary: Ordinary
) -> None:
    with ExitStack() as stack:
        for at in range(LANES):
            wanted = Wanted(f"other-{at}", dtype="fp32", rows=4, rank=0, timeout=15.0)
            stack.enter_context(AttachedLane.attach(house.address, wanted))
        for turn in range(3):
            check(client, alone, 0, 2, seed=turn)
        assert ordinary.calls == 3 and not client._idle and len(client._lines) == 0
    client._refusals = Refusals()
    check(client, alone, 0, 2, seed=4)
    assert ordinary.calls == 3


def test_a_caller_may_rest_in_the_middle_of_a_round(
    client: LaneClient, alone: Alone, ordinary: Ordinary
) -> None:
    for turn in range(6):
        for layer in (0, 1):
            check(client, alone, layer, 2, seed=turn)
    check(client, alone, 0, 2, seed=9)
    time.sleep(PATIENCE * 1.3)
    check(client, alone, 1, 2, seed=10)
    check(client, alone, 0, 2, seed=11)
    assert ordinary.calls == 0


def test_a_lane_that_is_detached_by_others_is_given_up(
    client: LaneClient, alone: Alone, ordinary: Ordinary
) -> None:
    check(client, alone, 0, 2, seed=1)
    line_of(client).lane.detach()
    check(client, alone, 0, 2, seed=2)
    assert ordinary.calls == 1
    check(client, alone, 0, 2, seed=3)
    assert ordinary.calls == 1 and len(client._lines) == 1, "another one"


@contextmanager
def stopped(house: LocalCluster) -> Iterator[None]:
    """Rank 0 stands still meanwhile."""
    stand_still(house.pid(0))
    try:
        yield
    finally:
        os.kill(house.pid(0), signal.SIGCONT)


def late(client: LaneClient, *batch: Any, **options: Any) -> None:
    """A call that has no answer in its time, and no longer."""
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"layer 0: no answer within 0\.4 s"):
        client.forward(0, *batch, timeout=0.4, **options)
    assert time.monotonic() - began < 2.0


def test_a_rank_that_is_stopped_holds_a_call_no_longer_than_its_deadline(
    house: LocalCluster, client: LaneClient, alone: Alone
) -> None:
    check(client, alone, 0, 2, seed=1)
    with stopped(house):
        late(client, *alone.batch(2, seed=2))
        late(client, *alone.batch(2, seed=3))
    for turn in range(4):
        check(client, alone, turn % 2, 3, seed=turn)


def test_a_deadline_that_a_lane_let_pass_is_told_of_the_call(
    house: LocalCluster, client: LaneClient, alone: Alone, ordinary: Ordinary
) -> None:
    check(client, alone, 0, 2, seed=1)
    until(lambda: line_of(client)._run.status is not None)  # or the call waits for that, and goes another way
    with stopped(house), pytest.raises(DeadlineExceeded, match=r"layer 1: no answer within 0\.5 s"):
        client.forward(1, *alone.batch(2, seed=2), timeout=0.5)
    assert ordinary.calls == 0


def test_who_waits_for_placed_rows_is_told_for_what(
    house: LocalCluster, client: LaneClient, alone: Alone
) -> None:
    hidden, output = client.place(0, 4, "fp32")
    route = alone.batch(4, seed=1)[1:]
    with ThreadPoolExecutor(1) as pool, stopped(house):
        under_way = pool.submit(client.forward, 0, hidden, *route, output=output)
        until(lambda: next(iter(client._placed.values()))._busy)
        with pytest.raises(DeadlineExceeded, match=r"other calls over the same placed rows took 0\.3 s"):
            client.forward(0, hidden, *route, output=output, timeout=0.3)
        os.kill(house.pid(0), signal.SIGCONT)
        under_way.result(20.0)


def test_a_larger_lane_at_a_stopped_rank_takes_no_longer_than_the_deadline(
    house: LocalCluster, client: LaneClient, alone: Alone
) -> None:
    check(client, alone, 0, 2, seed=1)
    with stopped(house):
        late(client, *alone.batch(20, seed=2))
    check(client, alone, 0, 20, seed=2)


def test_no_placed_answer_is_written_over_by_that_of_a_call_before(
    house: LocalCluster, client: LaneClient, alone: Alone, ordinary: Ordinary
) -> None:
    """Whose caller has given it up: until its pass has ended, no other call writes where it may."""
    hidden, output = client.place(0, 4, "fp32")
    rows, experts, weights = alone.batch(4, seed=8)
    hidden.tensor.copy_(rows)
    client.forward(0, hidden, experts, weights, output=output)
    with stopped(house):
        late(client, hidden, experts, weights, output=output)
        hidden.tensor.copy_(rows * 2)
        late(client, hidden, experts, weights, output=output)
        late(client, hidden, experts, weights.to(torch.bfloat16), output=output)  # which no lane takes
    assert ordinary.calls == 0
    hidden.tensor.copy_(rows * 3)
    client.forward(0, hidden, experts, weights, output=output)
    wanted = alone.forward(0, rows * 3, experts, weights)
    for _ in range(3):
        torch.testing.assert_close(output.tensor, wanted, **CLOSE)
        time.sleep(0.1)
    client.forward(0, hidden, experts, weights.to(torch.bfloat16), output=output)
    assert ordinary.calls == 1


@pytest.mark.parametrize(
    "way", ["over a lane", "beside placed rows over a lane", "in a lane", "in a region", "inline"]
)
def test_a_call_under_way_ends_with_its_client(house: LocalCluster, alone: Alone, way: str) -> None:
    """Whatever its rank does meanwhile."""
    kind = LaneClient if way.endswith("a lane") else MoeClient
    client = kind(house.address, timeout=60.0, lane=0)
    hidden, *route = alone.batch(4, seed=8)
    placed = (hidden, None)
    kept = client.place(0, 4, "fp32") if way.startswith("beside") else None  # to be detached, too
    if way == "in a lane":
        placed = client.place(0, 4, "fp32")
    elif way == "in a region":
        placed = tuple(client.allocate(0, tuple(hidden.shape), "fp32") for _ in range(2))

    ended = list[float]()

    def call() -> None:
        try:
            client.forward(0, placed[0], *route, output=placed[1])
        finally:
            ended.append(time.monotonic())

    call()
    with ThreadPoolExecutor(1) as pool, stopped(house):
        asked = pool.submit(call)
        time.sleep(0.2)
        assert not asked.done()
        began = time.monotonic()
        client.close()
        with pytest.raises(MoeError, match="client_closed"):
            asked.result(30)
        assert time.monotonic() - began < 20, "without the time of the call"
        assert ended[-1] - began < 4, "no call waits for lanes to be detached"
    assert kept is None or not kept[0].region.alive


def test_a_call_that_is_interrupted_takes_no_lane_with_it(
    client: LaneClient, alone: Alone, ordinary: Ordinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(*given: object) -> None:
        raise Interrupted

    for where in ("_tried", "_give"):
        check(client, alone, 0, 2, seed=1)
        with monkeypatch.context() as patched, pytest.raises(Interrupted):
            patched.setattr(client, where, interrupt)
            client.forward(0, *alone.batch(2, seed=2))
        gc.collect()
    before = ordinary.calls
    check(client, alone, 1, 2, seed=3)
    assert ordinary.calls == before and len(client._lines) == 1


def test_after_a_fork_the_child_uses_no_lane_of_its_parents(
    client: LaneClient, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(client, alone, 0, 2, seed=1)
    monkeypatch.setattr(client, "_process", os.getpid() + 1)
    line = line_of(client)
    numbers = line.lane.number, line._calls
    check(client, alone, 0, 2, seed=2)
    assert (line.lane.number, line._calls) == numbers
    with pytest.raises(RuntimeError, match="before a fork"):
        client.place(0, 2, "fp32")


def test_who_wants_messages_has_them(house: LocalCluster, alone: Alone, ordinary: Ordinary) -> None:
    with LaneClient(house.address, timeout=20.0, transport="inline") as client:
        check(client, alone, 0, 2, seed=1)
        assert ordinary.calls == 1 and not client._lines


def test_threads_share_lanes(house: LocalCluster, alone: Alone) -> None:
    with LaneClient(house.address, timeout=20.0, lane=0, lanes=2) as client:

        def call(number: int) -> None:
            for turn in range(15):
                check(client, alone, turn % 2, number + 1, seed=100 * number + turn)

        in_threads(4, call)
        assert len(client._lines) == len(client._idle) <= 2
    with ExitStack() as stack:
        for at in range(LANES):  # all are free again
            wanted = Wanted(f"later-{at}", dtype="fp32", rows=4, rank=0, timeout=15.0)
            stack.enter_context(AttachedLane.attach(house.address, wanted))


def test_more_rows_than_a_rank_takes_go_the_other_way(
    client: LaneClient, alone: Alone, ordinary: Ordinary
) -> None:
    check(client, alone, 0, 17, seed=1)
    assert line_of(client).lane.wanted.rows == 32
    client.close()
    with LaneClient(client.address, timeout=20.0, lane=0) as other:
        batch = alone.batch(33, seed=2)
        with suppress(MoeError):  # the rank takes no such call, either
            other.forward(0, *batch)
        assert ordinary.calls == 1 and other._refusals.limit(("fp32", 0), 99) == 32 and not other._lines
        check(other, alone, 0, 32, seed=3)
        assert ordinary.calls == 1


def test_wrong_arguments_are_named(house: LocalCluster) -> None:
    with pytest.raises(ValueError, match="lanes=0 must be 1 or more"):
        LaneClient(house.address, lanes=0)
