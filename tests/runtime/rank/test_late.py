"""A step that went on without a late rank's rows fails by name, or is counted, as the configuration says."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from checkpoints import make_checkpoint
from torch.distributed import ProcessGroup

from moeserve.device import waits
from moeserve.device.machine import machine_named
from moeserve.dispatch.backends import DISPATCHERS
from moeserve.dispatch.backends.local import Local
from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.runtime.config import Config
from moeserve.runtime.control.messages import ANY_GENERATION, epoch_message, header_message
from moeserve.runtime.control.stream import StreamClosed
from moeserve.runtime.doors.failures import status_of
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.errors import GroupUnavailable
from moeserve.runtime.planning.layers import plans_for
from moeserve.runtime.rank.all2all import PeersLate
from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.lanes.lane_call import LaneBatch
from moeserve.runtime.rank.member.member import Member
from moeserve.runtime.rank.member.member_group import ProcessGroupSettings
from moeserve.runtime.rank.rank import Rank
from moeserve.runtime.sections import Wanted
from moeserve.runtime.served import served_from
from moeserve.runtime.step import Header, LaneInput, StepRecord

GENERATION = 1


class Impatient(Local):
    """A dispatcher that found ranks 2 and 5 late in its first step, and keeps what it was built for."""

    built: list[DispatchSpec] = []  # noqa: RUF012
    patient = False

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None) -> None:
        super().__init__(spec, group)
        self.built.append(spec)
        self._late: tuple[int, ...] = () if self.patient else (2, 5)

    def late(self) -> tuple[int, ...]:
        late, self._late = self._late, ()
        return late


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint of two layers."""
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3_moe", path)
    return path


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher of one rank is impatient."""
    Impatient.built.clear()
    Impatient.patient = False
    monkeypatch.setitem(DISPATCHERS, "local", replace(DISPATCHERS["local"], build=Impatient))


def rank_of(path: Path, **step: Any) -> Rank:
    """One rank that has joined."""
    values = {f"step.{key}": value for key, value in step.items()}
    served = served_from(Config().with_values({"model.checkpoint": str(path)} | values).checked())
    rank = Rank(0, served, plans_for(served, machine_named("cpu", ()), Wanted()), "cpu")
    rank.load(Epoch.first(served.mesh, len(served.layers), served.checkpoint.num_experts))
    rank.join()
    return rank


def batch_of(rank: Rank, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    checkpoint = rank.served.checkpoint
    experts = torch.arange(checkpoint.top_k, dtype=torch.int32).repeat(rows, 1)
    return torch.randn(rows, checkpoint.hidden), experts, torch.ones(rows, checkpoint.top_k)


def stepped(rank: Rank) -> Rank:
    hidden, experts, weights = batch_of(rank)
    rank.step(0, LaneInput(hidden, experts, weights, torch.ones(3, dtype=torch.bool)), (3,))
    return rank


@pytest.mark.usefixtures("impatient")
def test_an_excluded_member_is_late_for_no_step_any_more(path: Path) -> None:
    rank = stepped(rank_of(path))
    with pytest.raises(PeersLate, match=r"no rows of ranks \[2, 5\]"):
        rank.late(0)
    rank.exclude((2,))
    with pytest.raises(PeersLate, match=r"no rows of ranks \[5\]"):
        rank.late(0)
    rank.exclude((5,))
    assert rank.late(0) == ()


@pytest.mark.usefixtures("impatient")
def test_steps_fail_by_the_names_of_the_late_until_the_dispatchers_are_built_anew(path: Path) -> None:
    rank = stepped(rank_of(path, late_seconds=1.5))
    for layer in (0, 1, 0):  # the dispatcher names them once
        with pytest.raises(PeersLate, match=rf"layer {layer}: no rows of ranks \[2, 5\] within 1.5 s"):
            rank.late(layer)
    rank.leave()
    Impatient.patient = True
    rank.join()
    assert stepped(rank).late(0) == ()
    assert {(spec.patience, spec.on_late) for spec in Impatient.built} == {(1.5, "fail")}


@pytest.mark.parametrize("writes", [False, True])
def test_what_members_may_still_write_to_is_kept_until_they_have_ended(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, writes: bool
) -> None:
    done = list[str]()

    class Written(Local):
        def part(self) -> bool:
            if not writes:
                return super().part()
            done.append("part")
            return True

        def close(self) -> None:
            done.append("close")

    entry = replace(DISPATCHERS["local"], build=Written, buffer_bytes=lambda spec: 64)
    monkeypatch.setitem(DISPATCHERS, "local", entry)
    rank = rank_of(path)  # its two layers are alike, and share one
    rank.join(None, 3)  # the first generation, whose number is 0, is left by this
    assert done == ["part" if writes else "close"]
    for generation in (4, 5):
        rank.leave(keep=True)
        rank.leave(keep=True)
        rank.free(but=[3, 9])
        held = rank.held_bytes()
        assert (held["dispatch"], held["kept"]) == (0, 64 * writes), "of generation 3"
        rank.join(None, generation)
        held = rank.held_bytes()
        assert (held["dispatch"], held["kept"]) == (64, 64 * writes)
    rank.leave(keep=True)
    rank.free(but=[ANY_GENERATION, 9])
    assert rank.held_bytes()["kept"] == 128 * writes, "of generations 3 and 5"
    rank.leave()
    assert rank.held_bytes()["kept"] == 0 and done.count("close") == 4
    assert done.count("part") == 4 * writes


@pytest.mark.parametrize("on_late", ["fail", "drop"])
@pytest.mark.usefixtures("impatient")
def test_a_step_whose_waits_were_ended_has_no_answer(path: Path, on_late: str) -> None:
    """Nobody was late for it, and what it went without is in no list."""
    Impatient.patient = True
    rank = stepped(rank_of(path, on_late=on_late))
    assert rank.late(0) == ()
    rank.interrupt()
    for layer in (0, 1):
        with pytest.raises(PeersLate, match=f"layer {layer}: the group has ended"):
            rank.late(layer)
    rank.join()
    assert stepped(rank).late(0) == ()


@pytest.mark.usefixtures("impatient")
def test_dropped_rows_are_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rank = stepped(rank_of(path, on_late="drop", timeout_seconds=7.0, late_seconds=0.0))
    assert rank.late(0) == (2, 5)
    assert "layer 0: goes on without rows of ranks [2, 5], none within 7 s" in caplog.text
    assert rank.late(0) == ()
    assert {(spec.patience, spec.on_late) for spec in Impatient.built} == {(7.0, "drop")}


def test_an_answer_whose_blocks_waited_in_vain_is_not_given_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's word is the only sign of it: the kernel ran from a graph, and nobody is late."""
    monkeypatch.setattr(waits, "_made", [])
    wait = waits.grid_wait.__wrapped__("few", torch.device("cpu"))
    monkeypatch.setattr(waits, "resident_blocks", lambda device: 132)
    rank = rank_of(path)
    assert stepped(rank).late(0) == ()
    cast(torch.Tensor, wait.arguments()["expired"]).fill_(1)
    with pytest.raises(RuntimeError, match=r"few: .* its answer is wrong; .*members\.held_multiprocessors"):
        stepped(rank).late(0)
    assert stepped(rank).late(0) == ()


class Wire:
    """The coordinator's end of a stream: entries to come, and what the rank said."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self._entries: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        for entry in entries:
            self._entries.put(entry)
        self.sent: list[dict[str, Any]] = []

    def receive(self) -> dict[str, Any]:
        try:
            return self._entries.get(timeout=5.0)
        except queue.Empty:
            raise StreamClosed("nothing more") from None

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if message["kind"] in ("failed", "done"):
            reason = str(message.get("reason", ""))
            abort = {"kind": "abort", "generation": GENERATION, "reason": reason}
            self._entries.put(abort | {"back": False})
            self._entries.put({"kind": "stop"})


def served_once(path: Path, **step: Any) -> tuple[list[dict[str, Any]], Any, list[StepRecord]]:
    """What a member says of one step, how its caller's job ended, and what was observed."""
    rank = rank_of(path, **step)
    epoch = Epoch.first(rank.served.mesh, len(rank.served.layers), rank.served.checkpoint.num_experts)
    lane, records = Lane(0, 16, 4), list[StepRecord]()
    lane.open()
    announced = list[int]()
    lane.announce = lambda job: announced.append(job.job)
    call = lane.submit(LaneBatch(0, *batch_of(rank)))
    header = Header(1, epoch.number, 0, (3,), ((announced[0], 3),))
    prepare = {"kind": "prepare", "generation": GENERATION, "epoch": epoch_message(epoch)}
    prepare |= {"after": False}
    wire = Wire([prepare, header_message(header, GENERATION)])
    rank.leave = lambda *, keep=False: None  # type: ignore[method-assign]  # its dispatchers are there already
    member = Member(rank, lane, wire, ProcessGroupSettings("gloo", 5.0), records.append)  # type: ignore[arg-type]
    member.run()
    if not call.wait(5.0):
        raise AssertionError("the call did not end")
    return wire.sent, call, records


@pytest.mark.usefixtures("impatient")
def test_a_step_fails_by_the_names_of_the_late_and_callers_may_come_again(path: Path) -> None:
    sent, call, records = served_once(path)
    (failed,) = [message for message in sent if message["kind"] == "failed"]
    assert (
        "rank 0: 'step' failed: PeersLate: layer 0: no rows of ranks [2, 5] within 10 s" in failed["reason"]
    )
    assert not [message for message in sent if message["kind"] == "done"] and records == []
    with pytest.raises(GroupUnavailable, match=r"no rows of ranks \[2, 5\]"):
        call.result()
    assert status_of(call.error).code == "UNAVAILABLE"


@pytest.mark.usefixtures("impatient")
def test_a_step_without_the_late_is_answered_and_observed(path: Path) -> None:
    sent, call, records = served_once(path, on_late="drop")
    assert [message["step"] for message in sent if message["kind"] == "done"] == [1]
    assert [record.late for record in records] == [(2, 5)]
    answer, _ = call.result()
    assert answer.shape[0] == 3
