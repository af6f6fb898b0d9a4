"""A lane of rows in host memory: when its steps are launched ahead, and when they are calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from host_callers import WORDS, HostCaller, HostDevice
from mail_callers import PATIENCE

from moeserve.dispatch.mail.kernels import ABORT, YIELD
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import Status, tag_of
from moeserve.runtime.doors.passes.host_lane import CHECK_SECONDS
from moeserve.runtime.doors.passes.turns import Company
from moeserve.runtime.doors.payloads import RegionLimits, Regions

LAYERS = [3, 5, 3]


@pytest.fixture
def caller() -> Iterator[HostCaller]:
    regions = Regions(RegionLimits(max_bytes=1 << 20))
    yield HostCaller(regions)
    regions.close()


def flown(caller: HostCaller, device: HostDevice) -> None:
    """The lane and the device go on until neither has anything to do."""
    while caller.looked() or device.work():
        pass


def test_who_is_alone_has_a_forward_pass_launched_and_its_answers_by_the_device(caller: HostCaller) -> None:
    device = HostDevice(caller)
    caller.announce(LAYERS)
    assert caller.lane.in_pass and caller.host.ahead and not caller.begun
    for step in range(3):
        caller.bring(0, step, count=5)
        flown(caller, device)
        assert caller.answered(0, step)
    (run, version), *others = caller.begun
    assert (run.steps, run.rows, run.begins, run.before, version) == (((3, 0), (5, 0), (3, 0)), 8, 1, (), 0)
    assert not others and not caller.calls and caller.ended == (Status.OK, "")
    assert (caller.lane.counts.steps, caller.lane.counts.passes) == (3, 1) and caller.observed == ["ok"]
    assert caller.out[WORDS.answer_header(0) + m.VERSION] == 1


def test_rows_that_follow_their_tag_are_waited_for_by_the_device_or_the_host(caller: HostCaller) -> None:
    device = HostDevice(caller)
    caller.standing(LAYERS)
    caller.fill(0, 0)
    caller.bring(0, 0, count=5)
    flown(caller, device)
    assert caller.begun and not caller.answered(0, 0), "it was launched, and waits for them"
    caller.fill(0, 5)
    flown(caller, device)
    assert caller.answered(0, 0)
    caller.others = Company.CALLS
    flown(caller, device)
    caller.fill(0, 4)
    caller.bring(0, 1, count=5)
    flown(caller, device)
    assert not caller.calls, "a call has all its rows"
    caller.fill(0, 5)
    flown(caller, device)
    assert len(caller.calls) == 1


def test_with_company_steps_come_as_calls_and_go_on_ahead_when_it_has_left(caller: HostCaller) -> None:
    device = HostDevice(caller)
    caller.standing(LAYERS, stages=2)
    for stage in (0, 1):
        caller.bring(stage, 0, count=5)
    flown(caller, device)
    assert [step[:2] for step in device.computed] == [(0, 0), (1, 0)]
    caller.others = Company.LANES
    caller.bring(1, 1)
    caller.looked()
    assert caller.mail.lane.abort[0] == YIELD and not caller.calls, "the run that waits has yet to end"
    flown(caller, device)
    assert not caller.host.ahead and [call.request.layer for call in caller.calls] == [5]
    caller.calls[0].answer()
    assert caller.answered(1, 1) and not caller.answered(0, 1)
    caller.bring(1, 2)
    caller.looked()
    caller.others = Company.NONE
    caller.bring(0, 1)
    caller.looked()
    assert len(caller.calls) == 2 and not caller.host.ahead, "the other stage's call is under way"
    assert caller.calls[1].request.weights_version == 1
    caller.calls[1].answer()
    flown(caller, device)
    run, version = caller.begun[-1]
    assert caller.host.ahead and (run.begins, run.before, version) == (1, (1, 3), 1)
    assert device.computed[-1] == (0, 1, "run") and caller.answered(0, 1) and caller.ended is None
    caller.bring(0, 2)
    flown(caller, device)
    for stage in (0, 1):
        caller.bring(stage, 3, count=4)
    flown(caller, device)
    assert caller.answered(0, 3) and caller.answered(1, 3)
    assert caller.begun[-1][0].steps == tuple((layer, stage) for layer in LAYERS for stage in (0, 1))
    assert caller.lane.counts.steps == 2 + 2 + 2, "those of a run count when it has ended"


def test_logits_are_routed_by_the_host_as_those_of_a_call(caller: HostCaller) -> None:
    device = HostDevice(caller)
    caller.standing(LAYERS)
    caller.bring(0, 0)
    flown(caller, device)
    caller.bring(0, 1, kind=m.LOGITS)
    flown(caller, device)
    assert not caller.host.ahead and caller.calls[-1].request.WhichOneof("route") == "logits"
    caller.calls[-1].answer()
    caller.bring(0, 2)
    flown(caller, device)
    assert len(caller.calls) == 2, "the pass goes on as it is"
    caller.calls[-1].answer()
    assert caller.answered(0, 2)
    caller.standing(LAYERS)
    assert caller.ended is None
    caller.box[m.GIVEN_UP] = 1
    caller.look()
    caller.look()
    caller.bring(0, 0)
    flown(caller, device)
    assert caller.host.ahead and caller.answered(0, 0)


@pytest.mark.parametrize("others", [Company.NONE, Company.CALLS])
@pytest.mark.parametrize("wrong", ["layer", "rows", "kind", "stage"])
def test_a_wrong_header_ends_the_pass_either_way(caller: HostCaller, others: Company, wrong: str) -> None:
    device, caller.others = HostDevice(caller), others
    caller.standing(LAYERS)
    caller.bring(0, 0)
    flown(caller, device)
    for call in caller.calls:
        call.answer()
    given = {"layer": {"layer": 3}, "rows": {"count": 2**63}, "kind": {"kind": 2**40}, "stage": {}}[wrong]
    if wrong == "stage":
        caller.box[WORDS.header(0) + m.STAGE] = 1
        for at, value in ((m.LAYER, 5), (m.TAG, tag_of(1, 1))):
            caller.box[WORDS.header(0) + at] = value
    else:
        caller.bring(0, 1, **given)  # type: ignore[arg-type]
    flown(caller, device)
    assert caller.ended is not None and caller.ended[0] is Status.REFUSED, caller.ended
    assert caller.ended[1].startswith("bad_step: ") and not caller.answered(0, 1)
    caller.announce(LAYERS)
    caller.bring(0, 0)
    flown(caller, device)
    assert (caller.answered(0, 0) or len(caller.calls) == 2) and caller.ended is None


def test_rows_that_change_while_they_are_looked_at_end_the_pass(caller: HostCaller) -> None:
    device = HostDevice(caller)
    caller.standing(LAYERS)
    for _ in range(3):
        caller.bring(0, 0, count=2)
        caller.looked()
        caller.bring(0, 0, count=39)
        device.work()
    caller.bring(0, 0, count=2)
    assert caller.begun[2][0].rows >= 39, "the third time there is room for as many as may come"
    assert caller.answered(0, 0) and caller.ended is None and len(device.computed) == 1


@pytest.mark.parametrize("others", [Company.NONE, Company.CALLS])
def test_a_late_caller_ends_its_pass_and_one_that_rests_does_not(caller: HostCaller, others: Company) -> None:
    device, caller.others = HostDevice(caller), others
    caller.standing([3])
    assert not caller.look(later=PATIENCE * 3) and caller.ended is None
    caller.announce(LAYERS)
    caller.box[m.GIVEN_UP] = 1
    caller.look()
    caller.look()
    assert caller.lane.in_pass
    caller.look(later=PATIENCE * 2)
    caller.look(later=PATIENCE * 2)
    assert caller.ended is not None and caller.ended[0] is Status.LATE
    assert not device.queue


def test_a_caller_that_withholds_rows_of_a_run_is_late_by_the_devices_clock(caller: HostCaller) -> None:
    device = HostDevice(caller)
    caller.announce(LAYERS)
    caller.bring(0, 0)
    flown(caller, device)
    device.ended = int(Status.LATE)
    flown(caller, device)
    assert caller.ended is not None and caller.ended[0] is Status.LATE and caller.answered(0, 0)


def test_a_step_launched_alone_has_all_its_rows_or_its_caller_is_late(caller: HostCaller) -> None:
    caller.loaded, device = False, HostDevice(caller)
    caller.announce(LAYERS)
    for step in range(2):
        caller.fill(0, 1)
        caller.bring(0, step)
        flown(caller, device)
        assert caller.host.ahead and len(caller.begun) == step
        if not step:
            caller.fill(0, 2)
            flown(caller, device)
            assert caller.answered(0, 0)
    caller.look(later=PATIENCE + 0.5)
    caller.look(later=PATIENCE + 0.6)
    ended = caller.ended
    assert ended is not None and ended[0] is Status.LATE, "stage 0 brought no rows"
    assert len(caller.begun) == 1


@pytest.mark.parametrize("when", ["waits", "calls", "between", "idle"])
def test_a_lane_that_is_detached_ends_its_pass_when_nothing_can_write_its_answers(
    caller: HostCaller, when: str
) -> None:
    device = HostDevice(caller)
    caller.others = Company.CALLS if when == "calls" else Company.NONE
    if when != "idle":
        caller.standing(LAYERS)
        caller.bring(0, 0)
        flown(caller, device)
    if when == "between":
        caller.others = Company.CALLS
        flown(caller, device)
        assert not caller.host.ahead and caller.lane.in_pass
    caller.lane.detach("so it is")
    assert caller.lane.detached == "so it is"
    if when == "waits":
        assert caller.lane.in_pass and caller.mail.lane.abort[0] == ABORT and caller.ended is None
        device.work()
    if when == "calls":
        assert caller.lane.in_pass and caller.calls[0].given_up
        caller.calls[0].fail(1, "caller_left")
    if when != "idle":
        assert not caller.lane.in_pass
        assert caller.ended == (Status.DETACHED, "so it is")
    assert not caller.lane.in_pass and not caller.look()


def test_a_lane_detached_as_it_changes_ends_in_its_new_way(caller: HostCaller) -> None:
    caller.others = Company.CALLS
    caller.standing(LAYERS)
    caller.others, take_over = Company.NONE, caller.host._runs.take_over

    def slow(handed: object) -> None:
        caller.lane.detach("meanwhile")
        take_over(handed)  # type: ignore[arg-type]

    caller.host._runs.take_over = slow  # type: ignore[method-assign, assignment]
    caller.look()
    assert caller.host.ahead and caller.ended == (Status.DETACHED, "meanwhile")


def test_a_group_that_ends_loses_what_waits_and_the_next_pass_asks_anew(caller: HostCaller) -> None:
    device = HostDevice(caller)
    caller.standing(LAYERS)
    caller.bring(0, 0)
    flown(caller, device)
    caller.mail.interrupted, caller.can = True, False
    caller.mail.say(ABORT)
    flown(caller, device)
    assert caller.ended is not None and caller.ended[0] is Status.LOST
    caller.standing(LAYERS)
    caller.bring(0, 0)
    flown(caller, device)
    assert not caller.host.ahead and len(caller.calls) == 1, "another group's steps cannot be launched ahead"
    caller.calls[0].answer()
    caller.can = True
    assert not caller.look() and not caller.host.ahead
    caller.look(later=CHECK_SECONDS * 1.1)
    assert caller.host.ahead and not caller.aborted and caller.lane.in_pass


def test_a_pass_that_rests_as_the_group_ends_goes_on_as_calls(caller: HostCaller) -> None:
    """Which are held for the next group, where a run would be lost."""
    device = HostDevice(caller)
    caller.standing(LAYERS)
    for step in range(3):
        caller.bring(0, step)
        flown(caller, device)
    assert caller.answered(0, 2) and caller.host.ahead and not device.queue
    caller.mail.interrupted, caller.mail.lane.abort[0], caller.can = True, ABORT, False
    caller.bring(0, 3)
    caller.looked()
    caller.looked()
    assert not caller.host.ahead and len(caller.calls) == 1 and caller.lane.in_pass
    caller.calls[0].answer()
    caller.can = True
    caller.look(later=CHECK_SECONDS * 1.1)
    for step in range(4, 6):
        caller.bring(0, step)
        flown(caller, device)
        assert caller.answered(0, step)
    assert caller.host.ahead and not caller.mail.interrupted


def test_a_step_that_the_lane_has_no_room_for_comes_as_a_run(caller: HostCaller) -> None:
    device, caller.others = HostDevice(caller), Company.CALLS
    caller.standing(LAYERS)
    caller.bring(0, 0)
    caller.looked()
    caller.calls[0].fail(8, "overloaded", 500)
    caller.others = Company.NONE
    flown(caller, device)
    assert caller.answered(0, 0) and device.computed == [(0, 0, "run")] and len(caller.calls) == 1


def test_each_step_is_computed_once_whoever_comes_and_goes(caller: HostCaller) -> None:
    chance, device, stages = random.Random(5), HostDevice(caller), 2
    caller.standing(LAYERS, stages=stages)
    brought, calls, ended = [0, 0], list[tuple[int, int]](), 0
    waits, counts, filled = [False, False], [0, 0], [0, 0]
    for _ in range(6000):
        if chance.random() < 0.01:
            caller.others = chance.choice(list(Company))
        for stage in range(stages):
            if waits[stage] and caller.answered(stage, brought[stage] - 1):
                waits[stage] = False
            if not waits[stage] and chance.random() < 0.4 and brought[stage] <= min(brought) + 1:
                counts[stage] = chance.choice((1, 2, 5, 20))
                filled[stage] = chance.choice((counts[stage], 0, counts[stage] // 2))
                caller.fill(stage, filled[stage])
                caller.bring(stage, brought[stage], count=counts[stage])
                brought[stage], waits[stage] = brought[stage] + 1, True
            elif filled[stage] < counts[stage] and chance.random() < 0.5:
                filled[stage] += -(-(counts[stage] - filled[stage]) // 2)
                caller.fill(stage, filled[stage])
        acts: list[Callable[[], object]] = [caller.looked, device.work]
        for act in chance.sample(acts, 2):
            act()
        while ended < len(caller.calls) and chance.random() < 0.5:
            call = caller.calls[ended]
            stage = [WORDS.answer(stage) for stage in range(stages)].index(call.request.output.offset)
            assert filled[stage] == counts[stage], "a call has all its rows"
            calls.append((stage, brought[stage] - 1))
            call.answer()
            ended += 1
        assert caller.ended is None, caller.ended
    found = sorted(calls + [step[:2] for step in device.computed])
    assert found == sorted(set(found)) and len(found) > 1500
    done = [steps - (not caller.answered(stage, steps - 1)) for stage, steps in enumerate(brought)]
    assert found == [(stage, step) for stage in range(stages) for step in range(done[stage])]
    assert len(calls) > 200 and len(device.computed) > 200
    assert caller.lane.counts.steps <= len(found)
