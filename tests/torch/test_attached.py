"""Experts reached by a device lane as a module of torch: in any order, under way, and after losses."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from houses import Alone, house_config

from moeserve.proto.client import Choice, MoeClient
from moeserve.proto.errors import DeadlineExceeded, InvalidArgument, MoeError, Unavailable, WeightsChanged
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.attached import AttachedLane, Wanted
from moeserve.proto.passes.mailbox import Status
from moeserve.proto.passes.running import Pass
from moeserve.proto.tensors import Plain
from moeserve.proto.transports.shared_memory import RemoteRegion
from moeserve.runtime.launch.local_cluster import LocalCluster
from moeserve.torch import MoeExperts, Settings, WrongRows, connect
from moeserve.torch.attached import Attached

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


def opened(house: LocalCluster, **values: object) -> Attached:
    given = {"timeout": 20.0, "dtype": "fp32", "rows": 16} | values
    way = connect(Settings("attached", house.address, **given))  # type: ignore[arg-type]
    assert isinstance(way, Attached)
    return way


@pytest.fixture
def way(house: LocalCluster) -> Iterator[Attached]:
    way = opened(house, stages=2)
    yield way
    way.close()


def announced(way: Attached) -> int:
    assert way._lane is not None
    return way._lane.number


def test_forward_passes_in_the_layers_order_are_announced_once(way: Attached, alone: Alone) -> None:
    layers = [MoeExperts(way, layer) for layer in (0, 1)]
    for turn in range(10):
        for layer, experts in enumerate(layers):
            batch = alone.batch(turn % 5, seed=turn)
            torch.testing.assert_close(experts(*batch), alone.forward(layer, *batch), **CLOSE)
    assert announced(way) == 1


def test_layers_may_be_called_in_any_order(house: LocalCluster, alone: Alone) -> None:
    way = opened(house, name="one-stage")
    layers = [MoeExperts(way, layer) for layer in (0, 1)]
    for turn, layer in enumerate([1, 1, 0, 0, 1, 0, 1, 1]):
        batch = alone.batch(3, seed=turn)
        torch.testing.assert_close(layers[layer](*batch), alone.forward(layer, *batch), **CLOSE)
    assert announced(way) == 4  # 1; 1 0; 0 1 0 1; 1
    way.close()


def test_calls_under_way_are_answered_in_any_order(way: Attached, alone: Alone) -> None:
    layers = [MoeExperts(way, layer) for layer in (0, 1)]
    for turn, order in enumerate([(0, 0), (1, 1), (0, 1), (1, 0)]):
        batches = [alone.batch(2 + at, seed=turn + at) for at in range(2)]
        tickets = [layers[layer].submit(*batch) for layer, batch in zip(order, batches, strict=True)]
        if order == (0, 0):
            with pytest.raises(RuntimeError, match="2 calls are under way, as many as there are stages"):
                layers[1].submit(*batches[0])
        for at in reversed(range(2)):
            found = layers[order[at]].wait(tickets[at])
            torch.testing.assert_close(found, alone.forward(order[at], *batches[at]), **CLOSE)


def test_one_call_is_begun_as_another_is_answered(way: Attached, alone: Alone) -> None:
    layers = [MoeExperts(way, layer) for layer in (0, 1)]
    batches = [alone.batch(2 + at, seed=at) for at in range(2)]
    ticket = layers[0].submit(*batches[0])
    for at in range(1, 6):
        layer, before = at // 2 % 2, (at - 1) // 2 % 2
        ticket, found = layers[layer].exchange(ticket, *batches[at % 2])
        torch.testing.assert_close(found, alone.forward(before, *batches[(at - 1) % 2]), **CLOSE)
    torch.testing.assert_close(layers[0].wait(ticket), alone.forward(0, *batches[1]), **CLOSE)


def test_a_caller_that_rested_in_the_middle_of_a_pass_goes_on(way: Attached, alone: Alone) -> None:
    layers, batch = [MoeExperts(way, layer) for layer in (0, 1)], alone.batch(3, seed=1)
    layers[0](*batch)
    assert way._pass is not None
    with pytest.raises(TimeoutError):
        way._pass.wait(10)
    torch.testing.assert_close(layers[1](*batch), alone.forward(1, *batch), **CLOSE)


def test_logits_and_other_dtypes_go_by_the_same_way(way: Attached, alone: Alone) -> None:
    hidden, _, _ = alone.batch(5, seed=4)
    logits = torch.randn(5, alone.checkpoint.num_experts, generator=torch.Generator().manual_seed(5))
    expected = alone.forward(0, hidden, *alone.checkpoint.gate(0).route(logits))
    experts = MoeExperts(way, 0)
    torch.testing.assert_close(experts(hidden, logits), expected, **CLOSE)
    found = experts(hidden.bfloat16(), logits.bfloat16())
    assert found.dtype == torch.bfloat16


@pytest.mark.gpu(1)
def test_rows_of_a_gpu_go_through_registered_memory(way: Attached, alone: Alone) -> None:
    layers = [MoeExperts(way, layer) for layer in (0, 1)]
    for turn in range(20):
        batches = [alone.batch(3 + turn % 4, seed=2 * turn + at) for at in range(2)]
        for layer, experts in enumerate(layers):
            there = [[column.cuda() for column in batch] for batch in batches]
            tickets = [experts.submit(*batch) for batch in there]
            for batch, ticket in zip(batches, tickets, strict=True):
                found = experts.wait(ticket)
                assert found.is_cuda
                torch.testing.assert_close(found.cpu(), alone.forward(layer, *batch), **CLOSE)
    hidden, ids, weights = batches[0]
    wide = ids.long().cuda() + 2**32  # would be a right one in 32 bits
    with pytest.raises(InvalidArgument, match="id 8 is out of range"):
        layers[0](hidden.cuda(), wide, weights.cuda())
    graph = torch.cuda.CUDAGraph()
    static = [column.cuda() for column in batches[0]]
    with pytest.raises(RuntimeError, match="cannot be in a CUDA graph"), torch.cuda.graph(graph):
        layers[0](*static)


def test_what_does_not_fit_is_named(way: Attached, alone: Alone) -> None:
    with pytest.raises(WrongRows, match="17 rows, and the way was opened for 16; raise"):
        MoeExperts(way, 0)(*alone.batch(17, seed=1))
    with pytest.raises(WrongRows, match=r"layer 5 has no experts served there; layers \[0, 1\] have"):
        MoeExperts(way, 5)(*alone.batch(1, seed=1))
    batch = alone.batch(1, seed=1)
    torch.testing.assert_close(MoeExperts(way, 0)(*batch), alone.forward(0, *batch), **CLOSE)


def test_calls_are_answered_after_a_rank_was_killed(alone: Alone, path: Path) -> None:
    with LocalCluster(house_config(path, **EP2)) as house:
        way = opened(house, rank=1, stages=2)
        layers, batch = [MoeExperts(way, layer) for layer in (0, 1)], alone.batch(3, seed=2)
        for lost in (0, 1):  # another one, whose group forms again; and the one that has the lane
            torch.testing.assert_close(layers[0](*batch), alone.forward(0, *batch), **CLOSE)
            ticket = layers[1].submit(*batch)
            os.kill(house.pid(lost), signal.SIGKILL)
            torch.testing.assert_close(layers[1].wait(ticket), alone.forward(1, *batch), **CLOSE)
        way.close()


def test_a_ticket_that_nobody_waits_for_holds_up_no_later_forward_pass(
    house: LocalCluster, alone: Alone
) -> None:
    way = opened(house, name="leaky")
    layers, batch = [MoeExperts(way, layer) for layer in (0, 1)], alone.batch(3, seed=2)
    for _ in range(3):
        layers[0](*batch)
        layers[1].submit(*batch)  # and shared experts fail
        for layer, experts in enumerate(layers):
            torch.testing.assert_close(experts(*batch), alone.forward(layer, *batch), **CLOSE)
    way.close()


@pytest.mark.parametrize("first", [0, 1])
def test_one_version_holds_however_a_pass_began_and_ended(path: Path, first: int) -> None:
    """Passes that ended in the middle, or began there, change nothing of what one forward pass may mix."""
    other = path.parent / f"other-{first}"
    other.mkdir()
    make_checkpoint("qwen3_moe", other, seed=8)
    config = house_config(path, passes__patience_seconds=0.3)
    with LocalCluster(config) as house, MoeClient(house.address, timeout=30) as client:
        way, batch = opened(house, one_version=True), Alone(path).batch(3, seed=2)
        layers = [MoeExperts(way, layer) for layer in (0, 1)]
        layers[first](*batch)  # the pass's rounds begin here, and no forward pass does
        folders = [other, path]
        for late in (False, True):
            layers[0](*batch)
            if late:
                assert way._pass is not None
                with pytest.raises(MoeError):
                    way._pass.wait(10)
            assert client.reload(str(folders[late]), timeout=30).outcome == "reloaded"
            with pytest.raises(WeightsChanged):
                layers[1](*batch)
            now = Alone(folders[late])
            for layer, experts in enumerate(layers):
                torch.testing.assert_close(experts(*batch), now.forward(layer, *batch), **CLOSE)
        assert client.reload(str(other), timeout=30).outcome == "reloaded"  # between two forward passes
        for layer, experts in enumerate(layers):
            torch.testing.assert_close(experts(*batch), Alone(other).forward(layer, *batch), **CLOSE)
        way.close()


def test_a_lane_whose_memory_cannot_be_fetched_is_free_again_at_once(
    house: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:

        def nothing(made: object) -> RemoteRegion:
            raise ValueError("cannot mmap")

        broken.setattr(RemoteRegion, "open", nothing)
        with pytest.raises(ValueError, match="cannot mmap"):
            opened(house, name="unlucky")
    opened(house, name="unlucky").close()


def test_an_answer_that_does_not_come_is_an_error_of_the_service(house: LocalCluster) -> None:
    with AttachedLane.attach(house.address, Wanted("waits", rows=4)) as lane:
        run = lane.begin([0], standing=True)
        with pytest.raises(MoeError, match=r"nothing came within 0\.05 s"):
            run.wait(0.05)


def test_a_pass_that_ends_by_itself_just_when_it_is_left_is_left(house: LocalCluster) -> None:
    with AttachedLane.attach(house.address, Wanted("leaves", rows=4)) as lane:
        run = lane.begin([0, 1])
        with pytest.raises(MoeError):
            run.wait(10)  # it is late
        asked = iter([None, Status.LATE, Status.LATE, Status.LATE])
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(type(run), "status", property(lambda found: next(asked)))
            run.leave()


def test_a_reload_between_layers_is_told_where_the_caller_asks_for_one_version(path: Path) -> None:
    other = path.parent / "two"
    other.mkdir()
    make_checkpoint("qwen3_moe", other, seed=7)
    with LocalCluster(house_config(path)) as house, MoeClient(house.address, timeout=30) as client:
        strict = opened(house, one_version=True, name="strict")
        loose = opened(house, name="loose")
        batch = Alone(path).batch(3, seed=2)
        for way in (strict, loose):
            MoeExperts(way, 0)(*batch)
        assert client.reload(str(other), timeout=30).outcome == "reloaded"
        new = Alone(other)
        with pytest.raises(WeightsChanged):
            MoeExperts(strict, 1)(*batch)
        for way in (strict, loose):
            for layer in (1, 0, 1):
                found = MoeExperts(way, layer)(*batch)
                torch.testing.assert_close(found, new.forward(layer, *batch), **CLOSE)
            way.close()


@pytest.mark.parametrize("out_of_order", [False, True], ids=["behind the tag", "behind the announcement"])
def test_a_call_after_one_that_a_signal_ended_has_its_own_answer(
    house: LocalCluster, alone: Alone, monkeypatch: pytest.MonkeyPatch, out_of_order: bool
) -> None:
    way = opened(house, name="signal", timeout=5.0)
    layers = [MoeExperts(way, layer) for layer in (0, 1)]
    other, own = alone.batch(3, seed=1), alone.batch(3, seed=2)
    layers[0](*other)
    layer = 0 if out_of_order else 1
    assert way._lane is not None
    memory, ring = way._lane.memory, way._lane.memory.ring

    def interrupted() -> None:
        ring()
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(memory, "ring", interrupted)
    with pytest.raises(KeyboardInterrupt):
        layers[layer](*other)
    time.sleep(0.2)  # the step of that one is answered
    for at in (layer, 1 - layer, layer):
        began = time.monotonic()
        torch.testing.assert_close(layers[at](*own), alone.forward(at, *own), **CLOSE)
        assert time.monotonic() - began < 2.0
    way.close()


def test_a_way_that_was_closed_answers_no_more(house: LocalCluster, alone: Alone) -> None:
    way = opened(house, name="closed")
    experts, batch = MoeExperts(way, 0), alone.batch(2, seed=1)
    experts(*batch)
    way.close()
    with pytest.raises(RuntimeError, match="this way to the experts was closed"):
        experts(*batch)
    with opened_again(house, "closed") as again:
        assert again.number == 0, "its name is free"


def opened_again(house: LocalCluster, name: str) -> AttachedLane:
    return AttachedLane.attach(house.address, Wanted(name, rows=4, dtype="fp32"))


def test_no_call_waits_longer_than_its_time_for_others(
    house: LocalCluster, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = opened(house, name="late", stages=4, timeout=1.0)
    layers = [MoeExperts(way, layer) for layer in (0, 1)]
    layers[0](*alone.batch(2, seed=1))
    taken = list[float]()

    def nothing(run: Pass, stage: int, timeout: float | None = None) -> Plain:
        assert timeout is not None
        taken.append(timeout)
        time.sleep(timeout)
        raise DeadlineExceeded("DEADLINE_EXCEEDED", "deadline", "nothing came")

    monkeypatch.setattr(Pass, "arrived", nothing)
    for _ in range(3):  # the other stages are before the first layer
        layers[0].submit(*alone.batch(2, seed=1))
    began = time.monotonic()
    with suppress(DeadlineExceeded):  # the pass may end just then
        layers[0].submit(*alone.batch(2, seed=1))
    assert len(taken) == 3 and time.monotonic() - began < 2.8
    monkeypatch.undo()
    for seed in range(3):
        batch = alone.batch(2, seed=seed)
        torch.testing.assert_close(layers[0](*batch), alone.forward(0, *batch), **CLOSE)
    way.close()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16])
def test_ids_of_other_dtypes_are_refused(way: Attached, alone: Alone, dtype: torch.dtype) -> None:
    hidden, ids, weights = alone.batch(2, seed=1)
    with pytest.raises(WrongRows, match="ids are int32 or int64"):
        MoeExperts(way, 0)(hidden, ids.to(dtype), weights)


@pytest.mark.parametrize(
    ("layers", "values", "text"),
    [
        ([0, -1], {}, "layer -1 is not one of"),
        ([1 << 64], {}, "layer 18446744073709551616 is not"),
        ([], {}, "0 layers; a pass has 1 to"),
        ([0], {"stages": 0}, "0 stages; a pass has at least 1"),
        ([0], {"stages": -1}, "-1 stages"),
        ([0], {"stages": 1 << 64}, "18446744073709551616 stages; a pass has at most 8"),
        ([0], {"weights_version": -1}, "weights_version=-1 is not one of"),
    ],
)
def test_what_cannot_be_said_of_a_pass_is_refused(
    way: Attached, layers: list[int], values: dict[str, int], text: str
) -> None:
    assert way._lane is not None
    with pytest.raises(InvalidArgument, match=text):
        way._lane.begin(layers, **values)
    for name in ("rows", "stages", "buffers"):
        with pytest.raises(ValueError, match=f"{name}=-1 is no number"):
            Wanted("x", **{name: -1})  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [float("nan"), 0.0, -1.0])
def test_a_lane_is_wanted_within_some_time(seconds: float) -> None:
    with pytest.raises(ValueError, match=f"timeout={seconds} must be more than 0 seconds"):
        Wanted("x", timeout=seconds)


def test_no_wait_of_a_pass_is_without_end(house: LocalCluster) -> None:
    with AttachedLane.attach(house.address, Wanted("endless", rows=4, dtype="fp32")) as lane:
        run = lane.begin([0, 1], standing=True)
        ends = threading.Timer(2.0, run.give_up)  # or this test would have no end
        ends.start()
        with pytest.raises(ValueError, match="timeout=nan must be 0 seconds or more"):
            run.wait(float("nan"))
        ends.cancel()
        run.leave()


@pytest.mark.parametrize("way_out", [AttachedLane.detach, AttachedLane.close])
def test_a_lane_that_its_caller_has_given_back_says_so(
    house: LocalCluster, way_out: Callable[[AttachedLane], None]
) -> None:
    with AttachedLane.attach(house.address, Wanted("given-back", rows=4, dtype="fp32")) as lane:
        way_out(lane)
        with pytest.raises(Unavailable, match="was detached or closed; attach another one"):
            lane.begin([0]).wait(10.0)


def test_a_pass_that_was_never_announced_has_no_status(way: Attached) -> None:
    assert way._lane is not None and way._lane.memory.out[m.ENDED] == 0 and way._lane.number == 0


def test_a_pass_that_is_left_at_rest_has_ended(house: LocalCluster, alone: Alone) -> None:
    hidden, ids, weights = alone.batch(2, seed=1)
    with AttachedLane.attach(house.address, Wanted("rest", rows=4, dtype="fp32", rank=0)) as lane:
        assert lane.rest(0.0), "no pass runs"
        run = lane.begin([0, 1], standing=True)
        run.post(0, hidden, Choice(ids, weights))
        run.take(0)
        assert run.status is None
        assert lane.rest(10.0) and run.status is Status.OK
