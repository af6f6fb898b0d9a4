"""The table of dispatchers, the dispatcher of one rank, and what is refused at the door."""

from dataclasses import replace

import pytest
import torch

from moeserve.dispatch.backends import ALIASES, DISPATCHERS, ELSEWHERE, dispatcher_named
from moeserve.dispatch.backends.all2allv import destinations
from moeserve.dispatch.checks import check_lane, local_slots
from moeserve.dispatch.dispatcher import DispatchSpec, Traffic
from moeserve.dispatch.members import Members
from moeserve.dispatch.routing import Routing
from moeserve.quant.formats import FORMATS

SPEC = DispatchSpec(Members.of_ranks(1), 0, 4, 128, 2, 8, dtype=torch.float32, wire=FORMATS["fp32"])
HIDDEN = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
ROUTING = Routing(
    torch.tensor([[3, 1], [-1, 1], [-1, -1]], dtype=torch.int32),
    torch.tensor([[0.5, 2.0], [float("nan"), 4.0], [float("nan"), 1.0]]),
    (3,),
    1,
)


def test_rows_are_found_by_their_own_name() -> None:
    assert set(DISPATCHERS) >= {"local", "naive", "allgather_reducescatter", "all2allv"}
    assert all(dispatcher_named(name).name == name for name in DISPATCHERS)


def test_no_name_is_both_here_and_elsewhere() -> None:
    assert not set(DISPATCHERS) & (set(ALIASES) | set(ELSEWHERE))
    assert set(ALIASES.values()) <= set(DISPATCHERS) | set(ELSEWHERE)


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_a_known_name_without_a_row_says_why(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"dispatcher '{name}' cannot serve: .*; dispatchers here: .*all2allv"
    ):
        dispatcher_named(name)


def test_an_unknown_name_gets_the_list() -> None:
    with pytest.raises(
        ValueError,
        match=r"unknown dispatcher 'fedex'; dispatchers here: .*all2allv, .*naive.*; also understood",
    ):
        dispatcher_named("fedex")


def test_one_rank_computes_by_itself() -> None:
    dispatcher = DISPATCHERS["local"].build(SPEC, None)
    arrived = dispatcher.dispatch(HIDDEN, ROUTING)
    scale = torch.repeat_interleave(torch.tensor([1.0, 10.0, 100.0, 1000.0]), arrived.batch.counts)
    answer = dispatcher.combine(arrived.batch.tokens.dequantize() * scale[:, None], arrived.ticket)
    expected = HIDDEN * torch.tensor([[0.5 * 1000 + 2 * 10], [4 * 10], [0.0]])
    torch.testing.assert_close(answer, expected, rtol=1e-6, atol=0)
    place = torch.full_like(answer, float("nan"))
    outputs = arrived.batch.tokens.dequantize() * scale[:, None]
    assert dispatcher.combine_into(outputs, arrived.ticket, place) is place and torch.equal(place, answer)
    assert dispatcher.traffic == Traffic() and dispatcher.traffic.plus(dispatched=3).plus(
        combined=4
    ) == Traffic(3, 4)
    dispatcher.close()


@pytest.mark.parametrize(
    ("spec", "routing", "hidden", "message"),
    [
        (
            SPEC,
            ROUTING,
            HIDDEN[:, :64],
            r"hidden of seat 0 must be torch.float32 \[3, 128\].*found .*\[3, 64\]",
        ),
        (SPEC, ROUTING, HIDDEN.bfloat16(), r"hidden .* must be torch.float32 .* found torch.bfloat16"),
        (SPEC, ROUTING, HIDDEN[:2], r"\(the step's header says 3 rows\); found torch.float32 \[2, 128\]"),
        (
            SPEC,
            replace(ROUTING, lane_rows=(3, 0)),
            HIDDEN,
            r"lane_rows \[3, 0\] must hold one count for each of 1",
        ),
        (
            replace(SPEC, lane_rows=2),
            ROUTING,
            HIDDEN,
            r"lane_rows \[3\] must lie between 0 and .* capacity, 2",
        ),
        (
            SPEC,
            replace(ROUTING, slots=ROUTING.slots.long()),
            HIDDEN,
            r"slots .* must be torch.int32 \[3, 2\]",
        ),
        (
            SPEC,
            replace(ROUTING, weights=ROUTING.weights[:, :1]),
            HIDDEN,
            r"weights .* found torch.float32 \[3, 1\]",
        ),
    ],
)
def test_a_bad_lane_is_named_at_the_door(
    spec: DispatchSpec, routing: Routing, hidden: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_lane(spec, hidden, routing)
    with pytest.raises(ValueError, match=message):
        DISPATCHERS["local"].build(spec, None).dispatch(hidden, routing)


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        (
            "local",
            replace(SPEC, members=Members.of_ranks(2)),
            "serves one rank, not 2 members; use allgather_reducescatter",
        ),
        ("local", replace(SPEC, wire=FORMATS["fp8_block128"]), "wire fp8_block128: its rows share a scale"),
        ("naive", replace(SPEC, seat=1), r"seat=1 is vacant; members have the seats \[0\]"),
        ("naive", replace(SPEC, held=5), "held=5 must lie between 0 and an owner's slot numbers, 4"),
        ("all2allv", replace(SPEC, row_align=0), "row_align=0 must be at least 1"),
        ("allgather_reducescatter", SPEC, "no process group was given, and 1 members need one"),
    ],
)
def test_a_dispatcher_that_cannot_be_built_says_why(name: str, spec: DispatchSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DISPATCHERS[name].build(spec, None)


def test_slots_in_a_ranks_own_numbering() -> None:
    slots = torch.tensor([[0, 4, 5], [7, 8, -1]], dtype=torch.int32)
    second = replace(SPEC, members=Members.of_ranks(3), seat=1)
    assert local_slots(second, slots).tolist() == [[-1, 0, 1], [3, -1, -1]]
    assert local_slots(replace(second, sliced=True), slots) is slots
    assert local_slots(replace(second, held=2), slots).tolist() == [[-1, 0, 1], [-1, -1, -1]]
    lane = replace(SPEC, members=Members.split(1, 2), seat=0)
    assert local_slots(lane, slots).tolist() == [[-1, -1, -1], [-1, -1, -1]]


def test_destinations_of_a_row() -> None:
    slots = torch.tensor([[0, 1], [4, 11], [-1, 9], [-1, -1]], dtype=torch.int32)
    spec = replace(SPEC, members=Members.of_ranks(3))
    assert destinations(spec, slots).int().tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 1], [0, 0, 0]]
    everywhere = destinations(replace(spec, sliced=True), slots).int().tolist()
    assert everywhere == [[1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0]]
