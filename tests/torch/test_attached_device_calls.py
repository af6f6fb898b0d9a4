"""What a way from a GPU does on its host: calls, passes and failures; kernels only note what they do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.dispatch.mail.layout import STEPS, MailLayout, Word
from moeserve.proto.errors import MoeError, Unavailable, WeightsChanged
from moeserve.proto.passes.mailbox import Status
from moeserve.proto.passes.running import _failure
from moeserve.torch import attached_device
from moeserve.torch.attached_device import AttachedDevice
from moeserve.torch.caller_lane import CallerLane
from moeserve.torch.ways import Rows, WrongRows

LAYOUT = MailLayout(8, 1, 64, 8, 2, torch.bfloat16)
LAYERS = (0, 1, 2)
ROWS = Rows(torch.ones(2, 64, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2))


class There:
    """A lane that the rank keeps, as long as the rank is there."""

    layers = LAYERS
    layout = SimpleNamespace(header=lambda at: 0)

    def __init__(self, device: Device, number: int) -> None:
        self._device, self._number = device, number
        self.begin = device.begin

    @property
    def alive(self) -> bool:
        return self._device.alive and self._number == self._device.attached


class Lane:
    """As `attached_device.CallerLane`."""

    def __init__(self, device: Device, number: int) -> None:
        self._device, self.lane, self.layout = device, There(device, number), device.layout
        self.addresses, self.answers = (number,) * 3, SimpleNamespace(mine=device.answers)

    def leave(self) -> None:
        self._device.leaving += 1

    @property
    def left(self) -> bool:
        return self._device.rested

    def close(self) -> None:
        self._device.closed += 1


class Device:
    """The device and the rank, as far as the host can tell."""

    def __init__(self) -> None:
        self.ends: Status | None = None  # how the pass ends at the next fetch
        self.recording = False
        self.alive = True
        self.attached = 0
        self.leaving = self.closed = self.exchanged = 0
        self.rested = True  # whether a rank that was left writes no answer any more
        self.passes: list[Any] = []
        self.asked: list[tuple[bool, int]] = []  # any_weights and weights_version of each pass
        self.layout = LAYOUT  # of the next lane
        self.wanted: list[str] = []  # wires that lanes were asked for
        self.touched: list[str] = []  # memory of the lane, by kernels
        self.answers = torch.zeros(LAYOUT.answers_bytes, dtype=torch.uint8)

    # -- as torch.cuda

    def synchronize(self, device: object = None) -> None:
        """Nothing is under way."""

    # -- as the rank's side of a lane

    def begin(self, layers: tuple[int, ...], **options: Any) -> Any:
        run = SimpleNamespace(number=len(self.passes) + 1, layers=tuple(layers), status=None)
        self.asked.append((options["any_weights"], options["weights_version"]))

        def wait(timeout: float) -> None:
            raise _failure(run.status, f"{run.status.name.lower()}: pass {run.number}")

        run.wait = wait
        self.passes.append(run)
        return run

    def lane(self, *given: Any) -> Any:
        """Makes one, as `attached_device.CallerLane` does."""
        self.wanted.append(given[-1])
        if not self.alive:
            raise Unavailable("UNAVAILABLE", "no_lane", "the rank is away")
        self.attached += 1
        return Lane(self, self.attached)

    # -- as the caller's kernels

    def kernels(self, layout: MailLayout, table: Tensor) -> Any:
        def bring(stage: int, layer: int, given: object, header_at: int) -> None:
            if not table[Word.ENDED]:
                self.touched.append(f"{int(table[Word.MAILBOX])}: layer {layer}")

        def fetch(stage: int, out: Tensor) -> None:
            if self.ends is not None and not table[Word.ENDED]:
                table[Word.ENDED], self.passes[-1].status = int(self.ends), self.ends
                self.ends = None
            out.fill_(0.0 if table[Word.ENDED] else 1.0)
            table[STEPS + stage] += 1

        def exchange(
            stage: int, layer: int, given: object, header_at: int, answer: tuple[int, Tensor]
        ) -> None:
            self.exchanged += 1
            bring(stage, layer, given, header_at)
            fetch(*answer)

        return SimpleNamespace(bring=bring, fetch=fetch, exchange=exchange)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    stream = SimpleNamespace(synchronize=made.synchronize, wait_stream=lambda other: None)
    for name, act in (
        ("synchronize", made.synchronize),
        ("current_stream", lambda device=None: stream),
        ("is_current_stream_capturing", lambda: made.recording),
        ("device", lambda device: nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, act)
    monkeypatch.setattr(attached_device, "CallerLane", made.lane)
    monkeypatch.setattr(attached_device, "CallerKernels", made.kernels)
    return made


@pytest.fixture
def way(device: Device) -> Iterator[AttachedDevice]:
    made = AttachedDevice(lambda *given: None, LAYOUT, torch.device("cpu"))  # type: ignore[arg-type,return-value]
    yield made
    made.close()


def of_two_stages(device: Device) -> AttachedDevice:
    device.layout = MailLayout(8, 2, 64, 8, 2, torch.bfloat16)
    device.answers = torch.zeros(device.layout.answers_bytes, dtype=torch.uint8)
    return AttachedDevice(lambda *_: None, device.layout, torch.device("cpu"))  # type: ignore[arg-type,return-value]


def forward(way: AttachedDevice) -> list[bool]:
    """Whether the answer of each layer is there."""
    return [bool(way.mixed(layer, ROWS).any()) for layer in LAYERS]


def test_one_pass_is_announced_for_all_forward_passes(way: AttachedDevice, device: Device) -> None:
    assert all(forward(way) + forward(way))
    way.check()
    assert [run.layers for run in device.passes] == [LAYERS]
    assert device.touched == [f"1: layer {layer}" for layer in LAYERS * 2]


def test_a_pass_that_ended_in_the_middle_is_told_though_another_came_after_it(
    way: AttachedDevice, device: Device
) -> None:
    assert way.mixed(0, ROWS).any()
    device.ends = Status.LATE
    assert [bool(way.mixed(layer, ROWS).any()) for layer in (1, 2)] == [False, True]
    with pytest.raises(MoeError, match="pass 1"):
        way.check()
    assert all(forward(way))
    way.check()


def test_a_call_out_of_order_begins_another_pass_and_the_next_one_is_in_order_again(
    way: AttachedDevice, device: Device
) -> None:
    way.mixed(0, ROWS)
    way.mixed(0, ROWS)
    way.mixed(2, ROWS)
    assert [run.layers for run in device.passes] == [LAYERS, LAYERS, (2, 0, 1)]
    way.check()
    assert all(forward(way))
    assert [run.layers for run in device.passes[3:]] == [LAYERS]
    with pytest.raises(WrongRows, match="layer 7 has no experts served there"):
        way.mixed(7, ROWS)


def test_a_ticket_that_nobody_waits_for_holds_up_no_later_forward_pass(
    way: AttachedDevice, device: Device
) -> None:
    way.mixed(0, ROWS)
    way.submit(1, ROWS)
    with pytest.raises(RuntimeError, match="1 calls are under way"):
        way.submit(2, ROWS)
    for _ in range(2):
        assert all(forward(way))
    way.check()
    assert len(device.passes) == 2


def test_a_recording_that_failed_is_told_once_and_calls_go_on(way: AttachedDevice, device: Device) -> None:
    assert all(forward(way))
    device.recording = True
    way.mixed(0, ROWS)
    device.recording = False
    with pytest.raises(RuntimeError, match="whole forward passes have multiples of 3"):
        way.mixed(0, ROWS)
    assert all(forward(way))
    device.recording = True
    assert all(forward(way))
    device.recording = False
    assert all(forward(way))
    way.check()


def test_nothing_touches_the_memory_of_a_rank_that_is_gone(way: AttachedDevice, device: Device) -> None:
    assert all(forward(way))
    device.alive = device.rested = False
    for act in (way.renew, lambda: way.mixed(0, ROWS)):
        with pytest.raises(Unavailable):
            act()
    assert device.leaving == 1
    before = list(device.touched)
    way._kernels.bring(0, 0, None, 0)  # as a graph that is replayed
    assert device.touched == before
    device.alive = True
    with pytest.raises(Unavailable, match="this device lane is no more: its rank is gone"):
        way.check()
    way.renew()
    assert all(forward(way)) and device.touched[-1] == "2: layer 2"
    way.check()
    assert device.closed == 0, "another rank answers before this one's memory can be freed"
    device.rested = True
    way.check()
    assert device.closed == 1


def test_where_there_is_no_memory_for_two_lanes_the_one_that_is_gone_is_freed_first(
    way: AttachedDevice, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.alive = device.rested = False
    with pytest.raises(Unavailable):
        way.renew()
    device.alive = True
    made = device.lane

    def fits(*given: Any) -> Any:
        if device.attached - device.closed >= 1:
            raise RuntimeError("out of memory")
        return made(*given)

    monkeypatch.setattr(attached_device, "CallerLane", fits)
    way.renew()
    assert (device.attached, device.closed) == (2, 1) and all(forward(way))


def test_a_lane_that_cannot_be_freed_keeps_no_other_from_it(
    way: AttachedDevice, device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    freed = []

    def free(lane: CallerLane) -> None:
        freed.append(lane)
        raise RuntimeError("the driver does not unmap it")

    def leave(lane: CallerLane) -> None:
        lane._leaving = threading.Thread()
        lane._leaving.start()

    for name, act in (("leave", leave), ("close", CallerLane.close), ("_free", free), ("_leaving", None)):
        monkeypatch.setattr(Lane, name, act, raising=False)
    device.alive = device.rested = False
    with pytest.raises(Unavailable):
        way.renew()
    device.alive = True
    way.renew()
    way.close()
    assert len(set(freed)) == 2 and "memory of a device lane is not freed" in caplog.text


class Stream:
    """A stream, which notes whom it waits for."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)

    def synchronize(self) -> None:
        """Nothing is under way."""


def test_calls_of_a_stage_follow_one_another_and_those_of_others_do_not(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of two micro-batches that have a stream each."""
    way = of_two_stages(device)
    one, other = Stream(), Stream()
    now = one
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now)
    calls = [way.submit(0, ROWS)]
    now = other
    calls.append(way.submit(0, ROWS))
    way.wait(calls[1])
    assert not one.waited and not other.waited
    way.wait(calls[0])
    assert other.waited == [one], "an answer is taken behind its rows"
    now = one
    way.wait(way.submit(1, ROWS))
    assert one.waited == [other]
    way.close()


def test_rows_are_brought_as_an_answer_is_taken(device: Device) -> None:
    """As of two micro-batches, whose attention comes in turns."""
    way = of_two_stages(device)
    number = way.submit(0, ROWS)
    for layer in (0, 1, 1, 2, 2, 0, 0):
        number, answer = way.exchange(layer, ROWS, number)
        assert answer.all() and answer.dtype == ROWS.hidden.dtype
    assert way.wait(number).all() and len(device.passes) == 1 and device.exchanged == 7
    with pytest.raises(KeyError, match=f"call {number} is not under way"):
        way.exchange(1, ROWS, number)
    assert len(device.touched) == 9, "what it began is under way, as if it was submitted"
    way.close()


def test_an_exchange_whose_pass_was_left_tells_so_and_calls_go_on(device: Device) -> None:
    way = of_two_stages(device)
    number = way.submit(1, ROWS)
    with pytest.raises(KeyError, match=f"call {number} is not under way"):
        way.exchange(0, ROWS, number)  # out of order: another pass
    assert not device.exchanged
    assert all(forward(way))
    way.close()


def test_a_way_that_is_closed_frees_the_memory_of_all_its_lanes(way: AttachedDevice, device: Device) -> None:
    for _ in range(3):
        device.alive = device.rested = False
        with pytest.raises(Unavailable):
            way.renew()
        device.alive = True
        way.renew()
    assert (device.leaving, device.closed) == (3, 0)
    way.close()
    assert device.closed == 4


@pytest.mark.parametrize("recorded", [False, True])
def test_a_lane_is_made_anew_in_the_wire_that_was_asked_for_or_that_graphs_have(
    device: Device, recorded: bool
) -> None:
    way = AttachedDevice(lambda *_: None, LAYOUT, torch.device("cpu"), rows_wire="auto")  # type: ignore[arg-type,return-value]
    assert all(forward(way))
    if recorded:
        device.recording = True
        assert all(forward(way))
        device.recording = False
    device.alive = False
    with pytest.raises(Unavailable):
        way.renew()
    device.alive, device.layout = True, replace(LAYOUT, rows=16)  # as for another wire
    way.renew()
    assert device.wanted == ["auto", *[""] * 2] if recorded else device.wanted == ["auto"] * 3
    assert way._layout == device.layout and all(forward(way))
    way.close()


def test_a_lane_whose_kernels_cannot_be_had_is_given_back(
    way: AttachedDevice, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(forward(way))
    device.alive = False
    with pytest.raises(Unavailable):
        way.renew()
    device.alive, closed = True, device.closed
    with monkeypatch.context() as patched:
        patched.setattr(attached_device, "CallerKernels", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            way.renew()
    assert device.closed == closed + 1
    way.renew()
    assert all(forward(way))


def test_other_weights_are_told_by_name_and_the_next_pass_is_begun(device: Device) -> None:
    given = lambda *_: None, LAYOUT, torch.device("cpu")
    way = AttachedDevice(*given, one_version=True)  # type: ignore[arg-type,return-value]
    assert all(forward(way))
    way.check()
    device.ends = Status.OTHER_WEIGHTS
    assert not way.mixed(0, ROWS).any()
    with pytest.raises(WeightsChanged, match="pass 1"):
        way.check()
    assert all(forward(way))
    way.check()
    assert device.asked == [(False, 0)] * 2
    way.close()


def test_weights_are_demanded_from_the_next_pass_on(way: AttachedDevice, device: Device) -> None:
    assert way.version() == 0
    way.demand(7)
    assert all(forward(way) + forward(way))
    way.demand(7)
    assert all(forward(way))
    way.demand(8)
    way.renew()
    assert all(forward(way))
    way.demand(0)
    assert all(forward(way))
    way.check()
    assert device.asked == [(True, 7), (True, 8), (True, 0)]
    line = LAYOUT.answer(0)[0]
    device.answers[line : line + 32].view(torch.int32)[5] = 8
    assert way.version() == 8


def test_a_closed_way_takes_no_call(device: Device) -> None:
    way = AttachedDevice(lambda *given: None, LAYOUT, torch.device("cpu"))  # type: ignore[arg-type,return-value]
    forward(way)
    way.close()
    with pytest.raises(RuntimeError, match="was closed"):
        way.mixed(0, ROWS)
    before = list(device.touched)
    way._kernels.bring(0, 0, None, 0)
    assert device.touched == before and device.closed == 1
