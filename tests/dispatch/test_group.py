"""Groups of our own beside a default group: they form and end alone, and nothing of them stays."""

import pytest
import torch
import torch.distributed as dist
from group_ranks import Left, beside_default, crossed, for_ever_absent, several, without_default
from parallel import parallel_launch

from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.exchange import check_group
from moeserve.dispatch.group import GroupKind, form_group
from moeserve.dispatch.members import Members
from moeserve.quant.formats import FORMATS

RANKS = 3
TIMES = 50


def test_groups_need_no_default_group() -> None:
    assert parallel_launch(RANKS, without_default) == [True] * RANKS


def test_groups_form_and_end_beside_a_default_group_and_leave_nothing() -> None:
    for before, after in parallel_launch(RANKS, beside_default, TIMES):
        left_nothing(before, after)


def test_a_next_group_forms_while_the_present_one_is_used() -> None:
    assert parallel_launch(RANKS, several) == [[0, 1, 2]] * RANKS


def test_ranks_of_a_group_are_its_own_where_the_default_group_has_others() -> None:
    assert parallel_launch(RANKS, crossed) == [(2, 0), (1, 1), (0, 2)]


def test_members_that_stay_away_are_not_waited_for_for_ever() -> None:
    (said,) = parallel_launch(1, for_ever_absent, timeout=30)
    assert said


@pytest.mark.gpu(2)
def test_nccl_groups_form_and_end_beside_a_default_group_of_nccl() -> None:
    for before, after in parallel_launch(2, beside_default, 10, device="cuda", timeout=200):
        left_nothing(before, after)


def left_nothing(before: Left, after: Left) -> None:
    """A thread or a file more may be one that is about to end."""
    assert after.listed == before.listed
    assert after.files <= before.files + 1 and after.threads <= before.threads + 1


@pytest.mark.parametrize(
    ("place", "kind", "message"),
    [
        ((1, 1), GroupKind("gloo", 5.0), "rank=1 must be one of 1 members of group 'g'"),
        ((0, 1), GroupKind("mpi", 5.0), "backend 'mpi' of group 'g': found neither gloo nor nccl"),
    ],
)
def test_what_is_no_group_is_named(place: tuple[int, int], kind: GroupKind, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        form_group(dist.HashStore(), "g", *place, kind)


def test_a_dispatcher_is_built_over_the_group_of_its_members() -> None:
    spec = DispatchSpec(Members.split(1, 2), 1, 4, 64, 2, 8, torch.float32, FORMATS["fp32"])
    with pytest.raises(ValueError, match="no process group was given, and 3 members need one"):
        check_group(spec, None)
