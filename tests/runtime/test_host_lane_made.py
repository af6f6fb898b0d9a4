"""Which callers with rows in host memory get a lane that is run ahead, and what becomes of its memory."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from host_callers import LAYOUT, HostCaller

from moeserve.device.sharing import GpuProcesses
from moeserve.dispatch.mail.host_layout import HostMailLayout
from moeserve.proto import moe_pb2
from moeserve.proto.passes.mailbox import MailboxLayout
from moeserve.runtime.doors.device_errors import DeviceRefused
from moeserve.runtime.doors.passes.announced import AnnouncedLane, LaneModel
from moeserve.runtime.doors.passes.asked import DeviceLaneLimits
from moeserve.runtime.doors.passes.device_lane import DeviceLane
from moeserve.runtime.doors.passes.device_lanes import DeviceLanes
from moeserve.runtime.doors.passes.host_lane import HostLane
from moeserve.runtime.doors.passes.mail_host import MailHost
from moeserve.runtime.doors.passes.turns import Company
from moeserve.runtime.doors.payloads import RegionLimits, Regions
from moeserve.runtime.doors.payloads.errors import UnknownRegion
from moeserve.runtime.doors.payloads.region import Hold
from moeserve.runtime.doors.payloads.registration import Registrar
from moeserve.runtime.rank.runs.host_memory import HostMemory
from moeserve.runtime.rank.runs.mail import Mail
from moeserve.runtime.rank.runs.member_runs import CannotRun

MODEL = LaneModel("tiny", 8, 4, 2, (3, 5))


class Driver:
    """Registers all memory, or none."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.registered = list[int]()

    def register(self, address: int, nbytes: int) -> str:
        if not self.why:
            self.registered.append(address)
        return self.why

    def unregister(self, address: int) -> str:
        self.registered.remove(address)
        return ""


class Runs:
    """A member's runs, as far as lanes are made."""

    dtype, most_rows, retired, makes_room, open = torch.bfloat16, 64, 0, False, True

    def __init__(self, why: str) -> None:
        self.why = why
        self.attached = list[tuple[HostMailLayout, HostMemory]]()
        self.detached = list[Mail]()

    @property
    def device_uuid(self) -> str:
        return "6a4f0a52-0000-1111-2222-333344445555"

    def check(self, rows: int, patience: float) -> None:
        if self.why == "group":
            raise CannotRun("its group cannot")

    def attach_host(self, layout: HostMailLayout, memory: HostMemory, patience: float) -> Mail:
        if self.why == "room":
            raise torch.OutOfMemoryError("no room")
        self.attached.append((layout, memory))
        return Mail(SimpleNamespace(abort=torch.zeros(1)), memory)  # type: ignore[arg-type]

    def detach(self, mail: Mail) -> None:
        self.detached.append(mail)

    def await_launches(self, seconds: float) -> None:
        """None is ever begun."""


def attached(
    regions: Regions, runs: Runs, rows: int = 4, dtype: str = "DTYPE_BF16"
) -> tuple[DeviceLanes, AnnouncedLane]:
    lanes = DeviceLanes(regions, MODEL, DeviceLaneLimits(lanes=2), lambda peer: lambda *step: None)
    ahead = {"key": "never", "shared": "auto"}.get(runs.why, "always")
    lanes.looking.mail = MailHost(runs, MODEL, 1 << 20, host_ahead=ahead)  # type: ignore[arg-type]
    request = moe_pb2.AttachLaneRequest(
        name="one", device="cpu", rows=rows, stages=1, dtype=moe_pb2.DType.Value(dtype)
    )
    made = lanes.attach(request, "unix:")
    lane = lanes._lanes[made.mailbox].lane
    assert made.goes_ahead == isinstance(lane, HostLane)
    return lanes, lane


@pytest.mark.parametrize("why", ["", "key", "registered", "group", "room", "dtype", "rows"])
def test_a_lane_that_cannot_be_run_ahead_is_one_of_calls(why: str) -> None:
    driver = Driver("CUDA error 1" if why == "registered" else "")
    regions, runs = Regions(RegionLimits(), Registrar(driver, 1 << 20)), Runs(why)
    dtype = "DTYPE_FP32" if why == "dtype" else "DTYPE_BF16"
    lanes, lane = attached(regions, runs, 65 if why == "rows" else 4, dtype)
    try:
        assert isinstance(lane, DeviceLane if why else HostLane)
        assert lane.number == 0 and not lane.in_pass and lanes.attached()[0].rows == lane.rows
        if not why:
            ((layout, memory),) = runs.attached
            assert layout.words == lane.memory.layout
            assert sorted(memory.addresses) == sorted(driver.registered)
    finally:
        lanes.close()
        regions.close()


@pytest.mark.parametrize("fails", [0, 1])
def test_a_lane_that_is_half_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    """The memory of both is made, and one of them is not there when it is to be held."""
    regions = Regions(RegionLimits())
    lanes = DeviceLanes(regions, MODEL, DeviceLaneLimits(), lambda peer: lambda *step: None)
    held, hold = list[str](), regions.hold

    def failing(name: str, offset: int, size: int) -> Hold:
        held.append(name)
        if len(held) == fails + 1:
            raise UnknownRegion("so it is")
        return hold(name, offset, size)

    monkeypatch.setattr(regions, "hold", failing)
    request = moe_pb2.AttachLaneRequest(name="one", device="cpu", rows=4, stages=1, dtype=moe_pb2.DTYPE_BF16)
    with pytest.raises(UnknownRegion, match="so it is"):
        lanes.attach(request, "unix:")
    assert not regions.list() and not regions.bytes
    lanes.close()
    regions.close()


def test_memory_stays_registered_until_the_rank_lets_go_of_the_lane() -> None:
    driver = Driver("")
    regions, runs = Regions(RegionLimits(), Registrar(driver, 1 << 20)), Runs("")
    lanes, lane = attached(regions, runs)
    lanes.detach(lane.memory.mailbox)
    lanes.close()
    assert len(driver.registered) == 2 and regions.bytes, "something of the device may be under way"
    runs.detached[0].memory.close()
    assert runs.detached[0].nbytes == 0 and runs.detached[0].handle == b""
    regions.close()
    assert not driver.registered and not regions.bytes


def test_the_memory_of_a_lane_goes_with_it_and_waits_for_no_collection() -> None:
    before = maps()
    regions, runs = Regions(RegionLimits(), Registrar(Driver(""), 1 << 20)), Runs("")
    lanes, lane = attached(regions, runs)
    gone = weakref.ref(lane)
    assert maps() - before and lane.company() is Company.NONE
    gc.collect()
    gc.disable()
    try:
        lanes.detach(lane.memory.mailbox)
        del lane
        runs.detached.pop().memory.close()
        runs.attached.clear()
        until = time.monotonic() + 5
        while (gone() is not None or maps() - before) and time.monotonic() < until:
            time.sleep(0.01)
        assert gone() is None, "something of it leads back to it"
        assert not maps() - before and not regions.bytes
    finally:
        gc.enable()
        lanes.close()
        regions.close()


def maps() -> set[str]:
    """Files of regions that this process has mapped, with their addresses."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "moeserve-region" in line}


def test_steps_of_lanes_count_as_no_calls_of_others() -> None:
    regions = Regions(RegionLimits())
    lanes, found = DeviceLanes(regions, MODEL, DeviceLaneLimits(), lambda peer: lambda *step: None), [3]
    lanes.looking.others = lambda own: found[0] > own
    mine: AnnouncedLane = SimpleNamespace(active_at=0.0, under_way=3)  # type: ignore[assignment]
    lanes.looking.note_company([mine], 10.0)
    assert lanes.looking.company_of(mine) is Company.NONE
    found[0] = 4
    lanes.looking.note_company([mine], 10.0)
    assert lanes.looking.company_of(mine) is Company.CALLS
    lanes.close()
    regions.close()


def test_the_layout_of_host_memory_is_that_of_its_words() -> None:
    words = MailboxLayout.of((40, 2), (8, 4, 2), "bf16")
    assert LAYOUT.words == words
    assert (LAYOUT.mailbox_bytes, LAYOUT.answers_bytes) == (words.mailbox_bytes, words.answers_bytes)
    for stage in (0, 1):
        header, *columns = LAYOUT.columns(stage)
        assert header == 8 * words.header(stage) and tuple(columns) == words.columns(stage)
        assert LAYOUT.answer(stage) == (8 * words.answer_header(stage), words.answer(stage))
        places = [header, *columns, *LAYOUT.answer(stage)]
        assert not any(place % 16 for place in places)
    with pytest.raises(ValueError, match="come as they are"):
        HostMailLayout(4, 1, 256, 8, 2, torch.bfloat16, "fp8_group128")


def test_both_ways_count_alike() -> None:
    regions = Regions(RegionLimits())
    host = HostCaller(regions).host
    assert host.counts is host._calls.counts is host._runs.counts
    regions.close()


def test_while_other_processes_compute_on_the_gpu_steps_are_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    own = False
    monkeypatch.setattr(GpuProcesses, "alone", property(lambda gpu: own))
    regions = Regions(RegionLimits(), Registrar(Driver(""), 1 << 20))
    lanes, lane = attached(regions, Runs("shared"))
    try:
        assert isinstance(lane, HostLane) and lane.company() is Company.CALLS
        own = True
        assert lane.company() is Company.NONE
    finally:
        lanes.close()
        regions.close()


def test_a_caller_that_could_end_the_rank_with_itself_is_refused() -> None:
    """Clients of the multi-process service share what a killed one leaves."""
    runs, device = SimpleNamespace(by_service=True, device_uuid="another"), f"cuda:{Runs('').device_uuid}"
    with pytest.raises(
        DeviceRefused, match=r"\(MPS\), where a caller that is killed ends .*MPS_PIPE_DIRECTORY"
    ):
        MailHost(runs, MODEL, 1 << 20).check(device)  # type: ignore[arg-type]
    MailHost(runs, MODEL, 1 << 20, share_gpu=True).check(device)  # type: ignore[arg-type]
    runs.by_service = False
    MailHost(runs, MODEL, 1 << 20).check(device)  # type: ignore[arg-type]
