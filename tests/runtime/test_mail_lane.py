"""The host's part of a lane of a GPU, beside runs that end by hand: what is launched, and how passes end."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from itertools import product

import pytest
from mail_callers import AHEAD, PATIENCE, Caller

from moeserve.dispatch.mail.kernels import CHOICE, LOGITS, MISFIT, YIELD
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import Status
from moeserve.runtime.doors.passes import mail_lane, mail_pass, pauses
from moeserve.runtime.doors.passes.mail_lane import COMPANY_SECONDS
from moeserve.runtime.doors.passes.mail_pass import MOST_FLYING
from moeserve.runtime.doors.passes.turns import Company
from moeserve.runtime.doors.payloads import RegionLimits, Regions
from moeserve.runtime.rank.runs.runs import Told


@pytest.fixture
def caller() -> Iterator[Caller]:
    regions = Regions(RegionLimits(max_bytes=1 << 20))
    yield Caller(regions)
    regions.close()


def test_a_whole_forward_pass_is_launched_when_its_first_rows_are_there(caller: Caller) -> None:
    caller.standing([3, 5], flags=m.ANY_WEIGHTS)
    assert not caller.look() and not caller.begun
    caller.bring(0, 0, count=5)
    assert caller.look()
    run, version = caller.begun[0]
    assert (run.steps, run.rows, run.kind, run.begins, version) == (((3, 0), (5, 0)), 8, CHOICE, 1, 0)
    assert not caller.look(), "its second step waits on the device"
    caller.bring(0, 1)
    assert not caller.look()
    caller.bring(0, 2, count=1, kind=LOGITS)
    assert caller.look(), "the next forward pass, though the one before has not been told yet"
    run, _ = caller.begun[1]
    assert (run.steps, run.rows, run.kind, run.begins) == (((3, 0), (5, 0)), 1, LOGITS, 0)
    assert caller.lane.soon
    caller.lane.ran(Told(0, (2, 0), 2), 7)
    assert caller.lane.soon
    caller.lane.ran(Told(0, (4, 0), 2), 7)
    assert not caller.lane.soon
    assert caller.lane.counts.steps == 4 and caller.ended is None
    caller.bring(0, 4)
    caller.look()
    assert caller.begun[2][1] == 0, "any weights"


def test_all_runs_of_a_pass_have_the_weights_of_the_first(caller: Caller) -> None:
    caller.standing([3, 5])
    for step in (0, 2):
        caller.bring(0, step)
        caller.look()
    assert [version for _, version in caller.begun] == [0], "which weights it has is not known yet"
    caller.lane.ran(Told(0, (2, 0), 2), 7)
    for step in (2, 4):
        caller.bring(0, step)
        assert caller.look()
    assert [version for _, version in caller.begun] == [0, 7, 7]


@pytest.mark.parametrize("flags", [0, m.ANY_WEIGHTS])
def test_weights_that_a_caller_demands_are_demanded_of_each_run(caller: Caller, flags: int) -> None:
    caller.standing([3], version=4, flags=flags)
    for step in (0, 1):
        caller.bring(0, step)
        assert caller.look()
    assert [version for _, version in caller.begun] == [4, 4]
    caller.lane.other_weights(5)
    assert caller.aborted and caller.ended is None, "one of them is under way"
    caller.lane.ran(Told(3, (2, 0)), 4)
    assert caller.ended is not None and caller.ended[0] is Status.OTHER_WEIGHTS
    assert "weights version 5, and this pass 4" in caller.ended[1]


def test_a_long_forward_pass_has_several_runs(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """To record a run holds up all other steps as long as it takes."""
    monkeypatch.setattr(mail_pass, "AHEAD_STEPS", 2)
    caller.standing([3, 5, 3], flags=m.ANY_WEIGHTS)
    for step in (0, 2, 3):
        caller.bring(0, step)
        assert caller.look()
        caller.lane.ran(Told(0, (sum(len(run.steps) for run, _ in caller.begun), 0)), 1)
    assert [run.steps for run, _ in caller.begun] == [((3, 0), (5, 0)), ((3, 0),), ((3, 0), (5, 0))]


def test_two_forward_passes_at_most_are_launched_ahead(caller: Caller) -> None:
    caller.standing([3], flags=m.ANY_WEIGHTS)
    for step in range(MOST_FLYING):
        caller.bring(0, step)
        assert caller.look()
    caller.bring(0, MOST_FLYING)
    assert not caller.look()
    caller.lane.ran(Told(0, (1, 0)), 1)
    assert caller.look()


def test_with_company_each_step_is_launched_when_its_rows_are_there(caller: Caller) -> None:
    caller.lane.company = lambda: Company.CALLS
    caller.standing([3, 5], stages=2, flags=m.ANY_WEIGHTS)
    caller.bring(1, 0)
    assert caller.look()
    caller.bring(1, 1)
    caller.bring(0, 0)
    assert caller.look() and not caller.look()
    caller.lane.ran(Told(0, (0, 1)), 1)
    assert caller.look()
    assert [run.steps for run, _ in caller.begun] == [((3, 1),), ((3, 0),), ((5, 1),)]


def test_all_stages_of_a_pass_are_launched_layer_by_layer(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail_lane, "COMPANY_SECONDS", 5.0)  # a test may be slow
    caller.announce([3, 5], stages=2)
    caller.bring(0, 0, count=3)
    assert not caller.look(), "for a moment the other stage's rows are waited for"
    caller.bring(1, 0, count=9)
    assert caller.look()
    run, _ = caller.begun[0]
    assert run.steps == ((3, 0), (3, 1), (5, 0), (5, 1)) and run.rows == 16
    caller.lane.ran(Told(0, (2, 2)), 1)
    assert caller.ended == (Status.OK, "") and caller.observed == ["ok"]


def test_a_stage_whose_company_does_not_come_goes_on_alone(caller: Caller) -> None:
    caller.standing([3, 5], stages=2)
    caller.bring(1, 0)
    assert caller.look(COMPANY_SECONDS * 2)
    assert caller.begun[0][0].steps == ((3, 1),)


def test_steps_whose_rows_do_not_fit_are_launched_anew(caller: Caller) -> None:
    caller.standing([3, 5])
    caller.bring(0, 0, count=2)
    caller.look()
    caller.bring(0, 1, count=30)
    caller.lane.ran(Told(MISFIT, (1, 0)), 1)
    assert caller.look()
    run, _ = caller.begun[1]
    assert (run.steps, run.rows, run.again, run.begins) == (((5, 0),), 32, True, 0)
    caller.lane.ran(Told(0, (2, 0)), 1)
    caller.bring(0, 2, count=1)
    assert caller.look() and not caller.begun[2][0].again


def test_no_run_follows_one_that_misfits_before_all_have_ended(caller: Caller) -> None:
    caller.standing([3], flags=m.ANY_WEIGHTS)
    for step in range(2):
        caller.bring(0, step)
        caller.look()
    caller.bring(0, 0, count=30)
    caller.lane.ran(Told(MISFIT, (0, 0)), 1)
    assert not caller.look()
    caller.lane.ran(Told(MISFIT, (0, 0)), 1)
    assert caller.look() and caller.begun[2][0].again


def test_a_run_that_waits_is_left_where_others_want_steps(caller: Caller) -> None:
    caller.standing([3, 5])
    caller.lane.yield_steps()
    assert not caller.aborted, "nothing waits"
    caller.bring(0, 0)
    caller.look()
    caller.lane.company = lambda: Company.CALLS
    caller.lane.yield_steps()
    assert caller.mail.lane.abort[0] == YIELD
    caller.lane.ran(Told(MISFIT, (1, 0)), 1)
    assert not caller.look() and not caller.aborted
    caller.bring(0, 1)
    assert caller.look() and caller.ended is None
    run, _ = caller.begun[1]
    assert run.steps == ((5, 0),) and run.again
    caller.lane.yield_steps()
    assert not caller.aborted, "its rows were there"


def test_a_run_that_waits_for_too_long_is_left_and_goes_on_step_by_step(caller: Caller) -> None:
    caller.most_seconds = 2.0
    caller.standing([3, 5])
    caller.bring(0, 0)
    caller.look(1.0)
    caller.look(2.9)
    assert not caller.aborted, "other members wait for it, but not for long yet"
    caller.look(3.1)
    assert caller.mail.lane.abort[0] == YIELD and caller.ended is None
    caller.lane.ran(Told(MISFIT, (1, 0)), 1)
    caller.bring(0, 1)
    assert caller.look() and caller.begun[1][0].steps == ((5, 0),) and caller.begun[1][0].again
    caller.look(9.0)
    assert not caller.aborted, "its rows were there"


def test_steps_come_one_by_one_until_what_they_need_is_loaded(caller: Caller) -> None:
    caller.loaded = False
    caller.standing([3, 5])
    for step, layer in enumerate((3, 5)):
        caller.bring(0, step)
        assert caller.look() and caller.begun[-1][0].steps == ((layer, 0),)
        caller.lane.ran(Told(0, (step + 1, 0)), 1)
    caller.loaded = True
    caller.bring(0, 2)
    assert caller.look() and caller.begun[-1][0].steps == ((3, 0), (5, 0))


def test_a_header_that_lies_about_rows_again_and_again_ends_its_pass(caller: Caller) -> None:
    caller.standing([3])
    for at in range(3):
        caller.bring(0, 0, count=1)
        assert caller.look()
        assert caller.begun[-1][0].rows == (64 if at == 2 else 1)
        caller.lane.ran(Told(MISFIT, (0, 0)), 1)
    caller.look()
    assert caller.ended is not None and caller.ended[0] is Status.REFUSED


@pytest.mark.parametrize(
    ("ended", "status"), [(2, Status.LATE), (3, Status.LOST), (5, Status.REFUSED), (1 << 40, Status.LOST)]
)
def test_what_a_kernel_has_ended_is_told(caller: Caller, ended: int, status: Status) -> None:
    caller.standing([3])
    caller.bring(0, 0)
    caller.look()
    caller.lane.ran(Told(ended, (1, 0)), 1)
    assert caller.ended is not None and caller.ended[0] is status
    caller.standing([5])
    caller.bring(0, 0)
    assert caller.look() and caller.begun[1][0].begins == 2 and not caller.aborted


def test_a_caller_is_late_within_a_forward_pass_and_may_rest_between_two(caller: Caller) -> None:
    caller.lane.company = lambda: Company.CALLS
    caller.standing([3, 5])
    caller.look(PATIENCE * 2)
    assert caller.ended is None
    caller.bring(0, 0)
    caller.look()
    caller.look(PATIENCE * 2)
    assert caller.ended is None, "its run has not ended, and the device asks"
    caller.lane.ran(Told(0, (1, 0)), 1)
    caller.look(PATIENCE * 2)
    assert caller.ended is not None and caller.ended[0] is Status.LATE
    assert "stage 0 brought no rows of layer 5" in caller.ended[1]


def test_a_pass_is_over_when_no_run_can_write_an_answer(caller: Caller) -> None:
    caller.standing([3])
    caller.bring(0, 0)
    caller.look()
    caller.box[m.GIVEN_UP] = caller.number
    assert not caller.look() and caller.aborted and caller.ended is None and caller.lane.in_pass
    caller.lane.ran(Told(3, (1, 0)), 1)
    assert caller.ended == (Status.OK, "") and not caller.lane.in_pass


def test_detached_in_a_pass(caller: Caller) -> None:
    caller.standing([3])
    caller.bring(0, 0)
    caller.look()
    caller.lane.detach("it was detached")
    assert caller.aborted and caller.ended is None
    caller.lane.lost("the group forms anew")
    assert caller.ended == (Status.DETACHED, "it was detached")
    caller.bring(0, 1)
    assert not caller.look()
    caller.lane.close()
    assert caller.detached == [caller.mail]


def test_other_weights_and_lost_runs_end_a_pass_by_name(caller: Caller) -> None:
    caller.standing([3])
    caller.bring(0, 0)
    caller.look()
    caller.lane.ran(Told(0, (1, 0)), 2)
    caller.bring(0, 1)
    caller.look()
    caller.lane.other_weights(3)
    assert caller.ended is not None and caller.ended[0] is Status.OTHER_WEIGHTS
    assert "weights version 3, and this pass 2" in caller.ended[1]
    caller.standing([3])
    caller.bring(0, 0)
    caller.look()
    caller.lane.lost("the group forms anew")
    assert caller.ended == (Status.LOST, "lost: the group forms anew")


# -- forward passes that are launched before their rows ------------------------------------------------------


def test_a_forward_pass_is_launched_before_its_rows_where_they_came_at_once_before(caller: Caller) -> None:
    caller.standing([3, 5], flags=m.ANY_WEIGHTS)
    first = caller.steady()
    assert len(caller.begun) == 3 and caller.look() and not caller.look(), "one, behind the one that runs"
    run, _ = caller.begun[3]
    assert (run.steps, run.rows, run.kind, run.least) == (((3, 0), (5, 0)), 8, CHOICE, 5)
    caller.lane.ran(Told(0, (first, 0)), 1)
    assert not caller.look(), "its rows are not there, and no other is launched"
    caller.bring(0, first, count=5)
    assert caller.look(), "they are there: the next one"
    assert not caller.aborted and len(caller.begun) == 5
    assert all(run.least == 0 for run, _ in caller.begun[:3])


def test_a_caller_that_rests_is_not_waited_for(caller: Caller) -> None:
    caller.standing([3, 5], flags=m.ANY_WEIGHTS)
    first = caller.steady()
    caller.look()
    caller.look(9 * AHEAD)
    assert not caller.aborted, "the one before it still runs"
    caller.lane.ran(Told(0, (first, 0)), 1)
    caller.look(AHEAD / 2)
    assert not caller.aborted
    caller.look(AHEAD * 1.5)
    assert caller.mail.lane.abort[0] == YIELD and caller.ended is None
    caller.lane.ran(Told(MISFIT, (first, 0)), 1)
    assert not caller.look(AHEAD * 2) and not caller.aborted and caller.ended is None
    caller.bring(0, first, count=2)
    assert caller.look(AHEAD * 9)
    run, _ = caller.begun[-1]
    assert (run.rows, run.least, run.again) == (2, 0, True)
    assert not caller.look(), "it has rested: its next rows are waited for first"


def test_a_look_as_a_run_ends_leaves_nothing(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward pass took longer than what waits behind it may wait for its own rows."""
    caller.ahead = 0.05
    caller.__post_init__()
    caller.standing([3, 5], flags=m.ANY_WEIGHTS)
    first = caller.steady()
    assert caller.look() and len(caller.begun) == 4
    time.sleep(2 * caller.ahead)
    ended, looks = mail_pass.MailPass.ran, list[threading.Thread]()

    def ran(run: mail_pass.MailPass, *, misfit: bool) -> None:
        ended(run, misfit=misfit)
        looks.append(threading.Thread(target=caller.lane.look, args=(time.monotonic(),)))
        looks[0].start()
        time.sleep(0.2)  # as where the other thread has taken the interpreter

    monkeypatch.setattr(mail_pass.MailPass, "ran", ran)
    caller.lane.ran(Told(0, (first, 0), 2), 1)
    looks[0].join(10)
    assert not looks[0].is_alive() and not caller.aborted


def test_a_forward_pass_that_was_left_goes_on_step_by_step(caller: Caller) -> None:
    """To record its rest would take longer; one that has a graph is launched whole."""
    caller.standing([3, 5, 3], flags=m.ANY_WEIGHTS)
    caller.graphs = False
    for first in (0, 3):
        caller.bring(0, first)
        assert caller.look() and caller.begun[-1][0].steps == ((3, 0), (5, 0), (3, 0))
        caller.lane.company = lambda: Company.CALLS
        caller.lane.yield_steps()
        caller.lane.ran(Told(MISFIT, (first + 1, 0), 1), 1)
        caller.lane.company = lambda: Company.NONE
        for step, layer in ((first + 1, 5), (first + 2, 3)):
            caller.bring(0, step)
            assert caller.look() and caller.begun[-1][0].steps[0] == (layer, 0)
            if caller.graphs:
                assert caller.begun[-1][0].steps == ((5, 0), (3, 0))
                return
            assert len(caller.begun[-1][0].steps) == 1
            caller.lane.ran(Told(0, (step + 1, 0), 1), 1)
        caller.graphs = True


@pytest.mark.parametrize("standing", [True, False])
def test_stages_that_come_apart_have_the_next_forward_pass_launched_whole(
    caller: Caller, standing: bool
) -> None:
    """Also where those of no step came together, as long as its attention is: nothing has a graph yet."""
    caller.graphs, layers = False, [3, 5, 3]
    flags = m.ANY_WEIGHTS | (m.STANDING if standing else 0)
    caller.announce(layers, 2, flags)
    for step, stage in product(range(len(layers)), range(2)):
        caller.bring(stage, step)
        assert caller.look(2 * COMPANY_SECONDS) and len(caller.begun[-1][0].steps) == 1
        caller.lane.ran(Told(0, (step + 1, step + stage), 1), 1)
    if not standing:
        caller.announce(layers, 2, flags)
    caller.bring(0, len(layers) if standing else 0)
    assert caller.look() and len(caller.begun[-1][0].steps) == 2 * len(layers)


def test_stages_that_are_used_one_after_the_other_are_not_waited_for(caller: Caller) -> None:
    caller.standing([3, 5], stages=2, flags=m.ANY_WEIGHTS)
    for stage, step in product(range(2), range(2)):
        caller.bring(stage, step)
        assert caller.look(2 * COMPANY_SECONDS)
        caller.lane.ran(Told(0, (step + 1 if not stage else 2, step + 1 if stage else 0), 1), 1)
    caller.bring(0, 2)
    assert caller.look(2 * COMPANY_SECONDS) and len(caller.begun[-1][0].steps) == 1


def test_a_stage_whose_rows_are_always_there_keeps_no_other_one_waiting(caller: Caller) -> None:
    """Without attention its next rows are there before anybody looks."""
    caller.standing([3, 5], stages=2, flags=m.ANY_WEIGHTS)
    for step, layer in enumerate((3, 5, 3)):
        caller.bring(0, step)
        assert caller.look(2 * COMPANY_SECONDS) and caller.begun[-1][0].steps == ((layer, 0),)
        caller.lane.ran(Told(0, (step + 1, 0), 1), 1)
    caller.bring(0, 3)
    caller.bring(1, 0)
    assert caller.look() and caller.begun[-1][0].steps == ((3, 1),), "the one that is behind"


def test_what_comes_step_by_step_does_not_wait_for_other_stages(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail_lane, "COMPANY_SECONDS", 5.0)  # a test may be slow
    caller.graphs = False
    caller.standing([3, 5], stages=2, flags=m.ANY_WEIGHTS)
    for stage in range(2):
        caller.bring(stage, 0)
    assert caller.look()
    caller.lane.company = lambda: Company.CALLS
    caller.lane.yield_steps()
    caller.lane.ran(Told(MISFIT, (1, 1), 2), 1)
    caller.lane.company = lambda: Company.NONE
    caller.bring(0, 1)
    assert caller.look() and caller.begun[-1][0].steps == ((5, 0),)


def test_a_forward_pass_that_is_never_recorded_whole_is_launched_in_parts(caller: Caller) -> None:
    """Of each the first steps alone are launched; the last one has a graph."""
    caller.graphs, caller.most_steps = False, 2
    caller.standing([3, 5, 3, 5], flags=m.ANY_WEIGHTS)
    caller.bring(0, 0)
    assert caller.look() and len(caller.begun[-1][0].steps) == 4
    caller.lane.ran(Told(0, (2, 0), 2), 1)
    caller.bring(0, 2)
    assert caller.look() and caller.begun[-1][0].steps == ((3, 0), (5, 0))


def test_nothing_is_launched_behind_a_forward_pass_that_cannot_be_recorded(caller: Caller) -> None:
    """Its last steps are left: what lies behind would take their rows where the last layer is the first."""
    caller.standing([3, 5, 3], flags=m.ANY_WEIGHTS)
    caller.graphs = False
    for step in (0, 3):
        caller.bring(0, step)
        assert caller.look() and len(caller.begun[-1][0].steps) == 3
        assert not caller.look() and not caller.look()
        caller.lane.ran(Told(0, (step + 2,), 2), 1)
        caller.bring(0, step + 2)
        assert caller.look() and caller.begun[-1][0].steps == ((3, 0),)
        caller.lane.ran(Told(0, (step + 3,), 1), 1)


def test_a_first_step_of_other_rows_is_launched_anew_for_as_many(caller: Caller) -> None:
    caller.standing([3, 5], flags=m.ANY_WEIGHTS)
    first = caller.steady()
    assert caller.look()
    caller.lane.ran(Told(0, (first, 0)), 1)
    caller.bring(0, first, count=1, kind=LOGITS)
    caller.lane.ran(Told(MISFIT, (first, 0)), 1)  # as the kernel says that takes it
    assert caller.look()
    run, _ = caller.begun[-1]
    assert (run.rows, run.kind, run.again, run.least) == (1, LOGITS, True, 0) and caller.ended is None


@pytest.mark.parametrize(
    "why", ["company", "a lane to be freed", "switched off", "not loaded", "not recorded"]
)
def test_no_forward_pass_is_launched_before_its_rows_where_that_may_harm(caller: Caller, why: str) -> None:
    caller.standing([3, 5], flags=m.ANY_WEIGHTS)
    if why == "switched off":
        caller.lane._terms = dataclasses.replace(caller.lane._terms, ahead=0.0)
    caller.steady()
    caller.lane.company = lambda: Company.CALLS if why == "company" else Company.NONE
    caller.retired = int(why == "a lane to be freed")
    caller.loaded = why != "not loaded"
    caller.most_steps = 1 if why == "not recorded" else 4096
    assert not caller.look() and len(caller.begun) == 3


def test_no_run_begins_until_memory_of_others_is_freed(caller: Caller) -> None:
    caller.standing([3, 5], flags=m.ANY_WEIGHTS)
    caller.bring(0, 0)
    caller.makes_room = True
    assert caller.look() and not caller.begun, "its caller wants steps, as others see"
    caller.makes_room = False
    assert caller.look() and len(caller.begun) == 1


def test_stages_come_one_after_another_into_one_run(caller: Caller) -> None:
    """Each has its attention first, so that the last one's rows come long after those of the first."""
    caller.standing([3, 5], stages=2, flags=m.ANY_WEIGHTS)
    first = caller.steady((6, 7))
    caller.lane.ran(Told(0, (first, first), 4), 1)
    caller.bring(0, first, count=5)
    assert caller.look() and not caller.look()
    run, _ = caller.begun[3]
    assert (run.steps, run.rows, run.least) == (((3, 0), (3, 1), (5, 0), (5, 1)), 8, 0)
    assert not caller.look(AHEAD / 2) and not caller.aborted
    caller.bring(1, first, count=7)
    caller.look(AHEAD * 1.5)
    assert not caller.aborted, "all are there"


def test_a_stage_that_does_not_come_is_not_waited_for_long(caller: Caller) -> None:
    caller.standing([3, 5], stages=2, flags=m.ANY_WEIGHTS)
    first = caller.steady((6, 7))
    caller.lane.ran(Told(0, (first, first), 4), 1)
    caller.bring(0, first, count=6)
    assert caller.look()
    caller.look(AHEAD * 1.5)
    assert caller.mail.lane.abort[0] == YIELD
    caller.lane.ran(Told(MISFIT, (first + 1, first)), 1)
    caller.bring(0, first + 1)
    assert caller.look()
    assert caller.begun[-1][0].steps == ((5, 0),), "it goes on step by step"


def test_a_run_is_never_as_wide_as_rows_that_may_not_come_again(caller: Caller) -> None:
    """The first stage's rows say whether the others' are as many as they were."""
    caller.standing([3, 5], stages=2, flags=m.ANY_WEIGHTS)
    first = caller.steady((2, 20))
    assert not caller.look(), "the second stage may have fewer next time"
    caller.lane.ran(Told(0, (first, first), 4), 1)
    caller.bring(0, first, count=20)
    caller.bring(1, first, count=20)
    assert caller.look() and caller.begun[-1][0].rows == 32
    for stage in (0, 1):
        caller.bring(stage, first + 1, count=20)
    caller.lane.ran(Told(0, (first + 2, first + 2), 4), 1)
    caller.bring(0, first + 2, count=1)
    assert not caller.look(), "after a prefill the other stage's rows are waited for"
    caller.bring(1, first + 2, count=1)
    assert caller.look() and caller.begun[-1][0].rows == 1


def test_a_run_behind_one_that_had_fewer_steps_is_launched_anew_from_there(caller: Caller) -> None:
    """As where a reload came between: steps of other weights are cut off, and what waits behind misfits."""
    caller.standing([3, 5], flags=m.ANY_WEIGHTS)
    first = caller.steady()
    assert caller.look()
    caller.lane.ran(Told(0, (first - 1, 0), 1), 1)
    caller.bring(0, first - 1, count=5)
    caller.lane.ran(Told(MISFIT, (first - 1, 0)), 1)
    assert caller.look() and caller.ended is None
    run, _ = caller.begun[-1]
    assert (run.steps, run.again, run.least) == (((5, 0),), True, 0)


def test_a_caller_whose_rest_is_a_little_longer_is_steady_no_more(caller: Caller) -> None:
    caller.standing([3, 5], flags=m.ANY_WEIGHTS)
    first = caller.steady()
    assert caller.look()
    caller.lane.ran(Told(0, (first, 0), 2), 1)
    caller.look(AHEAD * 1.5)
    caller.lane.ran(Told(MISFIT, (first, 0)), 1)
    caller.bring(0, first, count=5)
    assert caller.look(AHEAD * 1.6)
    assert not caller.look(AHEAD * 1.7), "no other behind it"


def test_a_pass_like_the_one_before_waits_for_its_stages_in_one_run(caller: Caller) -> None:
    for number in (1, 2, 3):
        caller.standing([3, 5], stages=2, flags=m.ANY_WEIGHTS)
        caller.look()
        caller.bring(0, 0, count=5)
        if number == 1:
            caller.bring(1, 0, count=6)
        assert caller.look()
        run, _ = caller.begun[-1]
        assert (len(run.steps), run.rows, run.begins, run.least) == (4, 8, number, 0)
        if number == 3:
            break
        for stage, step in ((1, 0), (0, 1), (1, 1)):
            caller.bring(stage, step, count=6)
        caller.look()
        caller.lane.ran(Told(0, (2, 2), 4), 1)
        caller.look()
        caller.box[m.GIVEN_UP] = caller.number
        caller.look()
    caller.look(AHEAD * 1.5)
    caller.lane.ran(Told(MISFIT, (1, 0)), 1)
    caller.look()
    caller.box[m.GIVEN_UP] = caller.number
    caller.look()
    caller.standing([3, 5], stages=2, flags=m.ANY_WEIGHTS)
    caller.look()
    caller.bring(0, 0)
    caller.look(COMPANY_SECONDS * 2)
    assert caller.begun[-1][0].steps == ((3, 0),), "the last one's second stage did not come"


@pytest.fixture
def seldom_looked_at(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> Caller:
    """A caller whose lane is looked at for a minute only where it stirs."""
    monkeypatch.setattr(pauses, "LONGEST_LOOK", 60.0)
    return caller


def settled(caller: Caller) -> None:
    """The lane has seen all that there is."""
    for _ in range(8):
        if not caller.lane.stirs(time.monotonic()):
            return
        caller.lane.look(time.monotonic())
    raise AssertionError("it stirs and finds nothing")


def test_a_lane_stirs_where_a_word_has_changed_and_where_others_come(
    seldom_looked_at: Caller,
) -> None:
    caller = seldom_looked_at
    caller.standing([3, 5])
    settled(caller)
    caller.bring(0, 0)
    assert caller.look()
    settled(caller)
    caller.lane.company = lambda: Company.CALLS
    assert caller.lane.stirs(time.monotonic()), "it is alone no more"
    settled(caller)
    caller.lane.ran(Told(0, (2, 0), 2), 1)
    assert caller.lane.stirs(time.monotonic()), "a run has ended"
    settled(caller)
    caller.bring(0, 2)
    assert caller.look()
    settled(caller)
    caller.lane.lost("the group forms anew")
    assert caller.lane.stirs(time.monotonic()) and caller.ended is not None
    settled(caller)
    assert caller.lane.stirs(time.monotonic() + 60.0), "it has been long"


def test_a_pass_that_was_announced_before_the_last_one_has_ended_is_looked_at_next(
    seldom_looked_at: Caller,
) -> None:
    caller = seldom_looked_at
    caller.standing([3, 5])
    settled(caller)
    caller.box[m.GIVEN_UP] = caller.number
    caller.announce_unseen([5, 3], flags=m.STANDING)
    settled(caller)
    assert caller.lane.number == caller.number


def test_a_stage_is_waited_for_since_the_first_has_come_however_long_there_was_nothing(
    seldom_looked_at: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = seldom_looked_at
    monkeypatch.setattr(mail_lane, "COMPANY_SECONDS", 5.0)
    caller.standing([3, 5], stages=2)
    settled(caller)
    assert not caller.lane.stirs(time.monotonic() + 10.0)
    caller.bring(0, 0)
    assert not caller.look(10.0), "the other stage's rows may follow"
    caller.bring(1, 0)
    assert caller.look(10.0) and len(caller.begun[0][0].steps) == 4
